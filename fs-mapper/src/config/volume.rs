//! One `[[volume]]`: a mount that the gateway serves itself, from an export of an executor.

use super::mistake::Position;
use super::{MountConfig, value};
use crate::path::ExecutorName;
use std::path::PathBuf;

/// One `[[volume]]`, or a request by `posh mount`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeConfig {
    /// Mount point: absolute and normalised by text.
    pub path: PathBuf,
    /// One of [`Config::executors`](super::Config::executors).
    pub executor: ExecutorName,
    /// As the executor names it, or a directory of its machine; see [`MountConfig::export`].
    pub export: String,
    /// Forbids changes through this mount.
    pub read_only: bool,
    /// Limit on the server's data in the disk cache, in bytes.
    pub cache_bytes: u64,
    /// Answers a write only when it is on the server.
    pub sync: bool,
    /// Makes operations wait for an unreachable server instead of failing.
    pub hard: bool,
    /// Where the entry begins in the file.
    pub position: Position,
}

impl VolumeConfig {
    /// Default limit on the disk cache.
    pub const DEFAULT_CACHE_BYTES: u64 = 1 << 30;

    /// The volume as a mount with an owner.
    pub fn mount(&self) -> MountConfig {
        MountConfig {
            path: self.path.clone(),
            executor: self.executor.clone(),
            export: self.export.clone(),
            sub_path: PathBuf::new(),
            coherence: None,
            shows_changes: false,
            position: self.position,
        }
    }

    /// Source in mountinfo.
    pub fn source(&self) -> String {
        format!("{}:{}", self.executor, self.export)
    }
}

/// Parses a size such as `10G`, `512M`, `64k` or a number of bytes; suffixes are powers of 1024.
///
/// # Errors
/// A message and a hint.
pub fn cache_size(text: &str) -> Result<u64, (&'static str, &'static str)> {
    value::size(text)
}
