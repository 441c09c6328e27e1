//! Which machine owns a path: `mounts.toml`, /proc/self/mountinfo, the table
//! made from both, and one adapter per file system type that keeps a mount's
//! caches true. A leaf: it knows nothing of commands or of the network.
#![forbid(unsafe_code)]
