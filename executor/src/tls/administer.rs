//! An administrator's commands for certificates: `posh-executor init`, `renew`, `rotate`, `enroll`,
//! `revoke` and `list`. Each returns the text to print; none needs a running executor, and a
//! running one notices changes by itself.

use std::path::Path;

use nix::unistd::gethostname;

use super::{
    TlsError,
    authority::{Authority, CLIENT_LIFETIME_S},
    now_s,
    register::{Certificate, Register, TOKEN_LIFETIME_S},
    rotation::Forced,
};

const HOUR_S: u64 = 3600;
const DAY_S: u64 = 24 * HOUR_S;

/// Digits of a certificate's SHA-256 in a list: no two share them by chance.
const SHOWN_DIGITS: usize = 16;

/// Makes the authority, the executor's certificate for `names` and an empty register.
///
/// # Errors
/// [`TlsError`].
pub fn init(directory: &Path, names: Vec<String>) -> Result<String, TlsError> {
    let names = or_own_names(names);
    Authority::at(directory).create(&names)?;
    Register::at(directory).create(&names)?;
    let shown = directory.display();
    Ok(format!(
        "made an authority and a certificate for {} in {shown}\n\
         in executor.toml: [tls] dir = \"{shown}\", and an [[identity]] for each who may come\n",
        names.join(", ")
    ))
}

/// Makes the executor a new certificate, for other names if there are any.
///
/// # Errors
/// [`TlsError`].
pub fn renew(directory: &Path, names: Vec<String>) -> Result<String, TlsError> {
    let register = Register::at(directory);
    if !names.is_empty() {
        register.rename(&names)?;
    }
    let names = register.renew_server()?;
    Ok(format!(
        "made a new certificate for {}; a running executor takes it by itself\n",
        names.join(", ")
    ))
}

/// Begins a rotation of the authority.
///
/// # Errors
/// [`TlsError`].
pub fn rotate(directory: &Path) -> Result<String, TlsError> {
    let register = Register::at(directory);
    register.begin_rotation()?;
    let waiting = register.outstanding()?.unwrap_or_default();
    let waiting = if waiting.is_empty() { "nobody".to_owned() } else { waiting.to_string() };
    Ok(format!(
        "made the authority that follows; workstations renew by themselves, within the hour when \
         they are connected\n\
         to renew yet: {waiting}\n\
         once all have, and a day more: posh-executor rotate --finish --dir {}\n",
        directory.display()
    ))
}

/// Ends a rotation of the authority.
///
/// # Errors
/// [`TlsError`].
pub fn finish_rotation(directory: &Path, forced: Forced) -> Result<String, TlsError> {
    let locked_out = Register::at(directory).finish_rotation(forced)?;
    let ended = "the former authority counts no more\n";
    if locked_out.is_empty() {
        return Ok(ended.to_owned());
    }
    Ok(format!(
        "{ended}calls with these are refused from now on: {locked_out}\n\
         their runs go on, their volumes end; a workstation that has not renewed must be enrolled \
         anew\n"
    ))
}

/// Makes a token for `identity`; returns the text to print, and a hint for a terminal.
///
/// # Errors
/// [`TlsError`].
pub fn enroll(directory: &Path, identity: &str) -> Result<(String, String), TlsError> {
    let register = Register::at(directory);
    let token = register.token_for(identity)?;
    let names = register.names()?;
    let host = names.first().map_or("HOST", String::as_str);
    let hint = format!(
        "on the workstation of {identity}, within {} minutes: posh enroll {host}:{} TOKEN\n\
         the certificate is then good for {} days, and renewed by itself\n",
        TOKEN_LIFETIME_S / 60,
        crate::config::default_listen().port(),
        CLIENT_LIFETIME_S / DAY_S
    );
    Ok((format!("{token}\n"), hint))
}

/// Revokes all certificates and tokens of `identity`.
///
/// # Errors
/// [`TlsError`].
pub fn revoke(directory: &Path, identity: &str) -> Result<String, TlsError> {
    let count = Register::at(directory).revoke(identity)?;
    Ok(match count {
        0 => format!("{identity} has no certificate and no token\n"),
        _ => format!(
            "took {count} certificates and tokens of {identity} back; calls are refused from now \
             on, and runs at work end within a second or two\n"
        ),
    })
}

/// Revokes the certificate of `identity` whose SHA-256 begins with `prefix`.
///
/// # Errors
/// [`TlsError`].
pub fn revoke_one(directory: &Path, identity: &str, prefix: &str) -> Result<String, TlsError> {
    let revoked = Register::at(directory).revoke_one(identity, prefix)?;
    let none =
        || TlsError::NoSuchCertificate { identity: identity.to_owned(), prefix: prefix.to_owned() };
    let sha256 = revoked.ok_or_else(none)?;
    Ok(format!("took the certificate {sha256} of {identity} back\n"))
}

/// One line for each certificate, and one for a rotation in progress.
///
/// # Errors
/// [`TlsError`].
pub fn list(directory: &Path) -> Result<String, TlsError> {
    let now = now_s();
    let register = Register::at(directory);
    let line = |certificate: &Certificate| {
        let Certificate {
            sha256,
            identity,
            issued_s,
            expires_s,
            revoked,
            superseded_s,
            retired,
            ..
        } = certificate;
        let state = match (revoked, superseded_s, expires_s.checked_sub(now)) {
            (true, ..) => "revoked".to_owned(),
            _ if *retired => "of a former authority".to_owned(),
            (_, Some(at), _) if *at <= now => "replaced".to_owned(),
            (_, Some(at), _) => {
                format!("replaced, good for {} hours more", (at - now).div_ceil(HOUR_S))
            }
            (.., None) => "expired".to_owned(),
            (.., Some(left_s)) => format!("good for {} days", left_s / DAY_S),
        };
        let age_days = now.saturating_sub(*issued_s) / DAY_S;
        let prefix = sha256.get(..SHOWN_DIGITS).unwrap_or(sha256);
        format!("{identity}: {prefix} issued {age_days} days ago, {state}\n")
    };
    let mut text: String = register.certificates()?.iter().map(line).collect();
    if let Some(waiting) = register.outstanding()? {
        let waiting = if waiting.is_empty() { "nobody".to_owned() } else { waiting.to_string() };
        text += &format!("the authority is being replaced; to renew yet: {waiting}\n");
    }
    Ok(text)
}

/// The given names, or by default this machine's.
fn or_own_names(names: Vec<String>) -> Vec<String> {
    if !names.is_empty() {
        return names;
    }
    let host =
        gethostname().ok().and_then(|name| name.into_string().ok()).filter(|name| !name.is_empty());
    host.into_iter().chain(["localhost", "127.0.0.1", "::1"].map(str::to_owned)).collect()
}
