//! Owner of a path: `mounts.toml`, /proc/self/mountinfo, the table made from both, and one adapter
//! per file system type for cache coherence. A leaf: it knows nothing of commands or of the
//! network.
#![forbid(unsafe_code)]

mod beneath;
pub mod coherence;
pub mod config;
mod daemons;
mod foreign;
mod kind;
pub mod mountinfo;
mod path;
pub mod peer;
mod places;
mod prefixes;
pub mod process;
mod resolve;
pub mod rights;
pub mod sshfs;
mod table;
mod walk;

pub use beneath::{DirectoryOwners, MountRoot};
pub use foreign::Foreign;
pub use path::{ClientPath, ExecutorName, ExportPath, MountId};
pub use prefixes::Prefixes;
pub use resolve::{LocalReason, Owned, Resolution, Resolver};
pub use table::{Mount, MountFlags, MountState, MountTable, Owner, SamePlace};
pub use walk::LastLink;
