//! `posh enroll ADDRESS TOKEN`: exchanges a token from an executor's administrator for a
//! certificate of this workstation.

use fs_mapper::config::{Address, AddressFault, TlsHost};
use posh_proto::{token::Token, untrusted::escaped};
use posh_reach::tls;
use tokio::runtime::Builder;

use crate::{Error, error::named};

/// Default port of executors.
const DEFAULT_PORT: u16 = 7400;

/// Error of [`parse_host`], for the user.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostFault {
    /// An executor without TLS.
    #[error("an executor behind http asks for no certificate")]
    Http,
    /// An executor that ssh starts.
    #[error("an executor behind ssh asks for no certificate")]
    Ssh,
    /// No address.
    #[error("{0}; write it as tls://host:{port}", port = DEFAULT_PORT)]
    Address(AddressFault),
}

/// An address as it is given on the command line: `[tls://]HOST[:PORT]`.
///
/// # Errors
/// No address of an executor with TLS.
pub fn parse_host(text: &str) -> Result<TlsHost, HostFault> {
    let address = if text.contains("://") { text.to_owned() } else { format!("tls://{text}") };
    let parsed = Address::parse(&address).or_else(|fault| {
        // Retried with the default port, in case only the port is missing.
        Address::parse(&format!("{address}:{DEFAULT_PORT}")).map_err(|_| fault)
    });
    match parsed {
        Ok(Address::Tls(host)) => Ok(host),
        Ok(Address::Http { .. }) => Err(HostFault::Http),
        Ok(Address::Ssh(_)) => Err(HostFault::Ssh),
        Err(fault) => Err(HostFault::Address(fault)),
    }
}

/// Enrols this workstation; returns the lines for mounts.toml.
///
/// # Errors
/// [`Error::Enroll`] for every reason why it was not, and [`Error::System`].
pub fn enroll(host: &TlsHost, token: &Token) -> Result<String, Error> {
    let failed =
        |fault: tls::TlsFault| Error::Enroll(posh_reach::Unreachable::from(fault).sentence());
    let path = tls::credentials_file(host).map_err(failed)?;
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Error::Enroll(error.to_string()))?;
    let credentials = runtime.block_on(tls::enrol::enrol(host, token, &path)).map_err(failed)?;
    let days = credentials.expires_in().as_secs() / (24 * 3600);
    Ok(format!(
        "{host} knows this workstation as {} now\n\
         key and certificate are in {}; they are renewed by themselves, if used within {days} \
         days\n\
         in mounts.toml: address = \"tls://{host}\"\n",
        escaped(&credentials.identity),
        named(&path)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        for (text, expect) in [
            ("store1", Ok("store1:7400")),
            ("store1:1", Ok("store1:1")),
            ("tls://store1:1/", Ok("store1:1")),
            ("tls://[::1]:7400", Ok("[::1]:7400")),
            ("http://store1:7400", Err("an executor behind http")),
            ("ssh://store1", Err("an executor behind ssh")),
            ("store1:x", Err("the address has no valid port")),
            ("", Err("the address has no valid host")),
        ] {
            match (parse_host(text), expect) {
                (Ok(host), Ok(expect)) => assert_eq!(host.to_string(), expect),
                (Err(why), Err(expect)) => assert!(why.to_string().starts_with(expect), "{why}"),
                (found, _) => panic!("{text}: {found:?}"),
            }
        }
    }
}
