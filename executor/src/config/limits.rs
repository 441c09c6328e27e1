//! How much of the machine one identity may use at a time.

/// Bounds of one identity. `None` is no bound of its own: the whole executor's apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Runs at a time.
    pub runs: Option<usize>,
    /// Commands at a time, over all runs.
    pub processes: Option<usize>,
    /// Bytes that the executor holds for the identity's streams.
    pub buffered_bytes: Option<usize>,
    /// Connections at a time.
    pub connections: Option<usize>,
    /// Calls in a second; twice as many at once.
    pub calls_per_second: Option<u32>,
    /// Memory of one command. Applied where the command is started.
    pub memory_bytes: Option<u64>,
}
