//! Values that assembly, planning and execution share.

/// Reason for a local stage in a pipeline that concerns no executor.
pub const NOTHING_ON_MOUNTS: &str = "nothing that it uses is on a mount with an executor";

/// An executor, by its index in the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExecutorId(pub usize);

/// A pipe between two waiting stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edge {
    /// Index and descriptor of the writing stage.
    pub from: (usize, u32),
    /// Index and descriptor of the reading stage.
    pub to: (usize, u32),
}
