//! The address of an executor. Only its shape is checked; nothing is looked up.

use std::fmt;
use std::net::Ipv6Addr;

/// `http://HOST:PORT`, checked.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Address {
    url: String,
    host: String,
    port: u16,
}

/// What is wrong with an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddressFault {
    /// No `scheme://`.
    #[error("the address has no scheme")]
    NoScheme,
    /// A scheme that is not spoken.
    #[error("the address has a scheme that is not supported")]
    Scheme,
    /// No host, or with characters that no host has.
    #[error("the address has no valid host")]
    Host,
    /// No port, or not 1 to 65535.
    #[error("the address has no valid port")]
    Port,
    /// A user, path, query or fragment.
    #[error("the address has more than a host and a port")]
    Extra,
}

impl AddressFault {
    /// What to do about it.
    pub fn hint(self) -> &'static str {
        match self {
            AddressFault::Scheme => "only http:// is",
            AddressFault::Port => "write the port that the executor listens on, such as http://host:7400",
            AddressFault::NoScheme | AddressFault::Host | AddressFault::Extra => "write it as http://host:7400",
        }
    }
}

impl Address {
    /// Checks the shape of an address.
    pub fn parse(text: &str) -> Result<Address, AddressFault> {
        let (scheme, rest) = text.split_once("://").ok_or(AddressFault::NoScheme)?;
        if !scheme.eq_ignore_ascii_case("http") {
            return Err(AddressFault::Scheme);
        }
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        if authority.contains(['/', '?', '#', '@']) {
            return Err(AddressFault::Extra);
        }
        let (host, port) = split_port(authority)?;
        let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
        let port: u16 = port.parse().ok().filter(|port| digits && *port != 0).ok_or(AddressFault::Port)?;
        Ok(Address { url: format!("http://{authority}"), host: host.to_owned(), port })
    }

    /// As the user wrote it, without a trailing slash: what tonic's `Endpoint` takes.
    pub fn as_str(&self) -> &str {
        &self.url
    }

    /// A name or an IP address, without the brackets of IPv6.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// 1 to 65535.
    pub fn port(&self) -> u16 {
        self.port
    }
}

/// Host and port as text; IPv6 addresses stand in brackets (RFC 3986 §3.2.2).
fn split_port(authority: &str) -> Result<(&str, &str), AddressFault> {
    if let Some(rest) = authority.strip_prefix('[') {
        let (host, after) = rest.split_once(']').ok_or(AddressFault::Host)?;
        host.parse::<Ipv6Addr>().map_err(|_| AddressFault::Host)?;
        return Ok((host, after.strip_prefix(':').ok_or(AddressFault::Port)?));
    }
    let (host, port) = authority.split_once(':').unwrap_or((authority, ""));
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if host.is_empty() || !host.bytes().all(valid) {
        return Err(AddressFault::Host);
    }
    Ok((host, port))
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes() {
        let check = |text: &str, expect: Result<(&str, u16), AddressFault>| {
            let found = Address::parse(text);
            assert_eq!(found.as_ref().map(|a| (a.host(), a.port())).map_err(|fault| *fault), expect, "{text}");
        };
        check("http://127.0.0.1:7400", Ok(("127.0.0.1", 7400)));
        check("http://store-1.example.org:80/", Ok(("store-1.example.org", 80)));
        check("HTTP://store1:7400", Ok(("store1", 7400)));
        check("http://[::1]:7400", Ok(("::1", 7400)));
        check("store1:7400", Err(AddressFault::NoScheme));
        check("https://store1:7400", Err(AddressFault::Scheme));
        check("ssh://store1", Err(AddressFault::Scheme));
        check("http://store1", Err(AddressFault::Port));
        check("http://store1:", Err(AddressFault::Port));
        check("http://store1:0", Err(AddressFault::Port));
        check("http://store1:+80", Err(AddressFault::Port));
        check("http://store1:65536", Err(AddressFault::Port));
        check("http://[::1]", Err(AddressFault::Port));
        check("http://:7400", Err(AddressFault::Host));
        check("http://[::g]:7400", Err(AddressFault::Host));
        check("http://st ore:7400", Err(AddressFault::Host));
        check("http://me@store1:7400", Err(AddressFault::Extra));
        check("http://store1:7400/path", Err(AddressFault::Extra));
    }

    #[test]
    fn a_trailing_slash_is_dropped() {
        assert_eq!(Address::parse("http://store1:7400/").map(|a| a.to_string()), Ok("http://store1:7400".to_owned()));
    }
}
