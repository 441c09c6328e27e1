//! Address of an executor. Only its syntax is checked, without name lookups.

use std::fmt;
use std::net::Ipv6Addr;

/// Validated address of an executor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// `http://HOST:PORT`: an executor that listens without TLS.
    Http {
        /// A name or an IP address, without the brackets of IPv6.
        host: String,
        /// 1 to 65535.
        port: u16,
    },
    /// `tls://HOST:PORT`: an executor that listens with TLS and authenticates its callers.
    Tls(TlsHost),
    /// `ssh://[USER@]HOST[:PORT]`: an executor that ssh starts for this gateway alone.
    Ssh(Login),
}

/// Host and port of an executor with certificates.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TlsHost {
    /// A name or an IP address, without the brackets of IPv6; the executor's certificate must be
    /// for it.
    pub host: String,
    /// 1 to 65535.
    pub port: u16,
}

/// Login for ssh; the user's ssh configuration supplies omitted parts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Login {
    user: Option<String>,
    host: String,
    port: Option<u16>,
}

/// Mistake in an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddressFault {
    /// No `scheme://`.
    #[error("the address has no scheme")]
    NoScheme,
    /// A scheme that is not supported.
    #[error("the address has a scheme that is not supported")]
    Scheme,
    /// No host, or invalid characters in it.
    #[error("the address has no valid host")]
    Host,
    /// No port, or not 1 to 65535.
    #[error("the address has no valid port")]
    Port,
    /// A user, path, query or fragment.
    #[error("the address has more than a host and a port")]
    Extra,
    /// As [`AddressFault::Host`], for an ssh address; the host must not look like an option either.
    #[error("the address has no valid host")]
    SshHost,
    /// A port that is not 1 to 65535.
    #[error("the address has no valid port")]
    SshPort,
    /// An empty user, a password, or invalid characters.
    #[error("the address has no valid user")]
    SshUser,
    /// A path, query or fragment.
    #[error("the address has more than a user, a host and a port")]
    SshExtra,
}

impl AddressFault {
    /// Advice for the user.
    pub fn hint(self) -> &'static str {
        match self {
            AddressFault::Scheme => "http://, tls:// and ssh:// are",
            AddressFault::Port => {
                "write the port that the executor listens on, such as http://host:7400"
            }
            AddressFault::NoScheme => "write it as http://host:7400 or ssh://host",
            AddressFault::Host | AddressFault::Extra => "write it as http://host:7400",
            AddressFault::SshHost => "write it as ssh://host, with a name that ssh knows",
            AddressFault::SshPort => {
                "write it as ssh://host:22, or leave the port to ssh's own configuration"
            }
            AddressFault::SshUser => {
                "write it as ssh://user@host; a password can't be given, a key can"
            }
            AddressFault::SshExtra => {
                "write it as ssh://user@host; the directory is the mount's `export`"
            }
        }
    }
}

impl Address {
    /// Parses an address.
    pub fn parse(text: &str) -> Result<Address, AddressFault> {
        let (scheme, rest) = text.split_once("://").ok_or(AddressFault::NoScheme)?;
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        let more = |marks: &[char]| authority.contains(marks);
        if scheme.eq_ignore_ascii_case("ssh") {
            if more(&['/', '?', '#']) {
                return Err(AddressFault::SshExtra);
            }
            return Login::parse(authority).map(Address::Ssh);
        }
        let is_tls = scheme.eq_ignore_ascii_case("tls");
        if !is_tls && !scheme.eq_ignore_ascii_case("http") {
            return Err(AddressFault::Scheme);
        }
        if more(&['/', '?', '#', '@']) {
            return Err(AddressFault::Extra);
        }
        let (host, port) = split_port(authority).ok_or(AddressFault::Host)?;
        let port = port.and_then(port_number).ok_or(AddressFault::Port)?;
        let host = host.to_owned();
        Ok(if is_tls { Address::Tls(TlsHost { host, port }) } else { Address::Http { host, port } })
    }

    /// Returns true if ssh starts the executor.
    pub fn is_ssh(&self) -> bool {
        matches!(self, Address::Ssh(_))
    }
}

impl Login {
    /// Validates the parts of a login.
    pub fn new(user: Option<&str>, host: &str, port: Option<u16>) -> Result<Login, AddressFault> {
        let of_user = |byte: u8| byte.is_ascii_alphanumeric() || b"-._+@\\".contains(&byte);
        if user.is_some_and(|user| {
            user.is_empty() || user.starts_with('-') || !user.bytes().all(of_user)
        }) {
            return Err(AddressFault::SshUser);
        }
        // ssh(1) would parse a leading `-` as an option.
        if host.starts_with('-') || !(is_name(host) || host.parse::<Ipv6Addr>().is_ok()) {
            return Err(AddressFault::SshHost);
        }
        if port == Some(0) {
            return Err(AddressFault::SshPort);
        }
        Ok(Login { user: user.map(str::to_owned), host: host.to_owned(), port })
    }

    /// `[USER@]HOST[:PORT]`.
    fn parse(authority: &str) -> Result<Login, AddressFault> {
        let (user, rest) = match authority.rsplit_once('@') {
            Some((user, rest)) => (Some(user), rest),
            None => (None, authority),
        };
        let (host, port) = split_port(rest).ok_or(AddressFault::SshHost)?;
        let port = port.map(|port| port_number(port).ok_or(AddressFault::SshPort)).transpose()?;
        Login::new(user, host, port)
    }

    /// User name, or `None` for ssh's choice.
    pub fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    /// Host name or alias that ssh knows, or an IP address without the brackets of IPv6.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Port from 1 to 65535, or `None` for ssh's choice.
    pub fn port(&self) -> Option<u16> {
        self.port
    }
}

/// Returns true for the characters of a host name or of an alias in ssh's configuration.
fn is_name(host: &str) -> bool {
    !host.is_empty()
        && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
}

fn port_number(text: &str) -> Option<u16> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|port| digits && *port != 0)
}

/// Splits host and port; IPv6 addresses are in brackets (RFC 3986 §3.2.2).
fn split_port(authority: &str) -> Option<(&str, Option<&str>)> {
    if let Some(rest) = authority.strip_prefix('[') {
        let (host, after) = rest.split_once(']')?;
        host.parse::<Ipv6Addr>().ok()?;
        return if after.is_empty() {
            Some((host, None))
        } else {
            Some((host, Some(after.strip_prefix(':')?)))
        };
    }
    let (host, port) = match authority.split_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (authority, None),
    };
    is_name(host).then_some((host, port))
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Http { host, port } => write!(f, "http://{}:{port}", Bracketed(host)),
            Address::Tls(host) => write!(f, "tls://{host}"),
            Address::Ssh(login) => write!(f, "ssh://{login}"),
        }
    }
}

impl fmt::Display for TlsHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", Bracketed(&self.host), self.port)
    }
}

impl fmt::Display for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(user) = &self.user {
            write!(f, "{user}@")?;
        }
        write!(f, "{}", Bracketed(&self.host))?;
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// Host in the form for an address: IPv6 in brackets.
struct Bracketed<'a>(&'a str);

impl fmt::Display for Bracketed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.contains(':') { write!(f, "[{}]", self.0) } else { f.write_str(self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http() {
        let check = |text: &str, expect: Result<(&str, u16), AddressFault>| {
            let expect = expect.map(|(host, port)| Address::Http { host: host.to_owned(), port });
            assert_eq!(Address::parse(text), expect, "{text}");
        };
        check("http://127.0.0.1:7400", Ok(("127.0.0.1", 7400)));
        check("http://store-1.example.org:80/", Ok(("store-1.example.org", 80)));
        check("HTTP://store1:7400", Ok(("store1", 7400)));
        check("http://[::1]:7400", Ok(("::1", 7400)));
        check("store1:7400", Err(AddressFault::NoScheme));
        check("https://store1:7400", Err(AddressFault::Scheme));
        check("http://store1", Err(AddressFault::Port));
        check("http://store1:", Err(AddressFault::Port));
        check("http://store1:0", Err(AddressFault::Port));
        check("http://store1:+80", Err(AddressFault::Port));
        check("http://store1:65536", Err(AddressFault::Port));
        check("http://[::1]", Err(AddressFault::Port));
        check("http://:7400", Err(AddressFault::Host));
        check("http://[::g]:7400", Err(AddressFault::Host));
        check("http://[::1]7400", Err(AddressFault::Host));
        check("http://st ore:7400", Err(AddressFault::Host));
        check("http://me@store1:7400", Err(AddressFault::Extra));
        check("http://store1:7400/path", Err(AddressFault::Extra));
    }

    #[test]
    fn ssh() {
        let check =
            |text: &str, expect: Result<(Option<&str>, &str, Option<u16>), AddressFault>| {
                let found = Address::parse(text);
                let parts = |address: &Address| match address {
                    Address::Ssh(login) => {
                        (login.user().map(str::to_owned), login.host().to_owned(), login.port())
                    }
                    other => panic!("{text} is read as {other}"),
                };
                let expect = expect
                    .map(|(user, host, port)| (user.map(str::to_owned), host.to_owned(), port));
                assert_eq!(found.as_ref().map(parts).map_err(|fault| *fault), expect, "{text}");
            };
        check("ssh://store1", Ok((None, "store1", None)));
        check("SSH://store1/", Ok((None, "store1", None)));
        check(
            "ssh://ada@store-1.example.org:2222",
            Ok((Some("ada"), "store-1.example.org", Some(2222))),
        );
        check("ssh://ada@corp@store1", Ok((Some("ada@corp"), "store1", None)));
        check("ssh://[::1]", Ok((None, "::1", None)));
        check("ssh://ada@[fe80::1]:22", Ok((Some("ada"), "fe80::1", Some(22))));
        check("ssh://", Err(AddressFault::SshHost));
        check("ssh://ada@", Err(AddressFault::SshHost));
        check("ssh://-oProxyCommand=reboot", Err(AddressFault::SshHost));
        check("ssh://-v", Err(AddressFault::SshHost));
        check("ssh://st ore", Err(AddressFault::SshHost));
        check("ssh://store1:", Err(AddressFault::SshPort));
        check("ssh://store1:0", Err(AddressFault::SshPort));
        check("ssh://store1:ssh", Err(AddressFault::SshPort));
        check("ssh://[::1]:99999", Err(AddressFault::SshPort));
        check("ssh://@store1", Err(AddressFault::SshUser));
        check("ssh://-l@store1", Err(AddressFault::SshUser));
        check("ssh://ada:secret@store1", Err(AddressFault::SshUser));
        check("ssh://store1/srv/data", Err(AddressFault::SshExtra));
        check("ssh://store1?x", Err(AddressFault::SshExtra));
    }

    #[test]
    fn addresses_are_shown_in_one_form() {
        for (text, shown) in [
            ("http://store1:7400/", "http://store1:7400"),
            ("http://[::1]:7400", "http://[::1]:7400"),
            ("SSH://ada@store1:022", "ssh://ada@store1:22"),
            ("ssh://[::1]", "ssh://[::1]"),
            ("TLS://store1:7400/", "tls://store1:7400"),
            ("tls://[::1]:1", "tls://[::1]:1"),
        ] {
            assert_eq!(
                Address::parse(text).map(|address| address.to_string()),
                Ok(shown.to_owned())
            );
        }
    }
}
