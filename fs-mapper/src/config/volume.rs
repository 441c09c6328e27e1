//! One `[[volume]]`: a mount that the gateway serves itself, from an export of an executor.

use super::mistake::Position;
use super::{MountConfig, value};
use crate::path::ExecutorName;
use std::path::PathBuf;

/// One `[[volume]]`, or what `posh mount` asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeConfig {
    /// Where it is mounted: absolute and normalised by text.
    pub path: PathBuf,
    /// One of [`Config::executors`](super::Config::executors).
    pub executor: ExecutorName,
    /// As the executor names it, or a directory of its machine; see [`MountConfig::export`].
    pub export: String,
    /// Nothing on it can be changed through this mount.
    pub read_only: bool,
    /// How much of the server's data may be kept on the disk, in bytes.
    pub cache_bytes: u64,
    /// Every write is on the server before it is answered.
    pub sync: bool,
    /// While the server is out of reach, operations wait for it instead of failing.
    pub hard: bool,
    /// Where the entry begins in the file.
    pub position: Position,
}

impl VolumeConfig {
    /// What is kept of the server's data unless something else is said.
    pub const DEFAULT_CACHE_BYTES: u64 = 1 << 30;

    /// The volume as a mount with an owner.
    pub fn mount(&self) -> MountConfig {
        MountConfig {
            path: self.path.clone(),
            executor: self.executor.clone(),
            export: self.export.clone(),
            sub_path: PathBuf::new(),
            coherence: None,
            position: self.position,
        }
    }

    /// What mountinfo shows as its source.
    pub fn source(&self) -> String {
        format!("{}:{}", self.executor, self.export)
    }
}

/// A size such as `10G`, `512M`, `64k` or a number of bytes; suffixes are powers of 1024.
///
/// # Errors
/// What is wrong with it, and a hint.
pub fn cache_size(text: &str) -> Result<u64, (&'static str, &'static str)> {
    value::size(text)
}
