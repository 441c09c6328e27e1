//! The one-time token that an administrator gives to a user: the fingerprint of the certificate
//! that signs the executor's, and a secret for one enrolment.

use std::{fmt, str::FromStr};

use sha2::{Digest as _, Sha256};

/// Prefix of all tokens.
const PREFIX: &str = "posh-";

/// Bytes of a secret; guessing 128 bits is hopeless within a token's hour.
pub const SECRET_BYTES: usize = 16;

/// SHA-256 of a certificate or a secret.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// Fingerprint of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Compares in constant time.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        let differences =
            self.0.iter().zip(&other.0).fold(0, |all, (one, other)| all | (one ^ other));
        std::hint::black_box(differences) == 0
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Fingerprint {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        bytes_of(text).map(Self)
    }
}

/// A token, as `posh-executor enroll` prints it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// The certificate that has signed the executor's.
    pub authority: Fingerprint,
    /// Good for one enrolment.
    pub secret: [u8; SECRET_BYTES],
}

/// Error: the text is no token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "this is no token; it is one word that begins with {PREFIX}, as `posh-executor enroll NAME` \
     prints it"
)]
pub struct TokenError;

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}-", self.authority)?;
        self.secret.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Leaves the secret out of logs.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({PREFIX}{}-...)", self.authority)
    }
}

impl FromStr for Token {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let (authority, secret) =
            text.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-')).ok_or(TokenError)?;
        Ok(Self { authority: authority.parse()?, secret: bytes_of(secret)? })
    }
}

/// Exactly `N` bytes in lower or upper case hexadecimal digits.
fn bytes_of<const N: usize>(text: &str) -> Result<[u8; N], TokenError> {
    if text.len() != 2 * N || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(TokenError);
    }
    let mut bytes = [0; N];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).map_err(|_| TokenError)?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_as_it_was_printed() {
        let token =
            Token { authority: Fingerprint::of(b"authority"), secret: [0xa7; SECRET_BYTES] };
        let text = token.to_string();
        assert_eq!(text.parse(), Ok(token.clone()));
        assert!(!format!("{token:?}").contains("a7a7"));
        for wrong in [
            "",
            "posh-",
            "posh-00-00",
            text[5..].into(),
            &text[..text.len() - 1],
            &format!("{text}0"),
        ] {
            assert_eq!(wrong.parse::<Token>(), Err(TokenError), "{wrong}");
        }
        assert_eq!(text.replace("a7", "\u{e9}").parse::<Token>(), Err(TokenError));
    }

    #[test]
    fn fingerprints_are_compared() {
        let one = Fingerprint::of(b"1");
        assert!(one.is(&Fingerprint::of(b"1")) && !one.is(&Fingerprint::of(b"2")));
        assert_eq!(one.to_string().parse::<Fingerprint>(), Ok(one));
    }
}
