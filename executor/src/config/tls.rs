//! `[tls]` of the configuration.

use std::path::PathBuf;

/// Default directory of these files for init, enroll and the executor.
pub const DEFAULT_DIRECTORY: &str = "/etc/posh/tls";

/// `[tls]` of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsConfig {
    /// Directory made by `posh-executor init`.
    pub directory: PathBuf,
}
