//! The address of an executor. Only its shape is checked; nothing is looked up.

use std::fmt;

/// `http://HOST:PORT`, checked.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Address {
    url: String,
    host: String,
    port: u16,
}

impl Address {
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

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}
