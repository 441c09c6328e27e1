//! Volumes: FUSE mounts that posh serves itself. Their files are in a [`Store`].
//!
//! * [`fs`]: the file system over a store, without FUSE
//! * [`fuse`]: the one module that uses the crate fuser
//! * [`mount`]: mounting; [`mounted`]: mounted volumes, and unmounting
//! * [`store`]: the store's trait, with its operations and guarantees
//! * [`leases`]: the lease table, with recalls; [`keeper`]: the table with a clock and wake-ups
//! * [`clock`]: the clock of all of them
//! * [`disk`]: cached contents on this machine's disk; [`journal`]: closed files that are not on
//!   the server yet; [`recovery`]: the directory for those that the server refuses
//! * [`directory`]: the store over a local directory
//! * [`remote`]: the store over a connection to an executor; [`wire`]: its messages

pub mod clock;
pub mod directory;
pub mod disk;
pub mod fs;
pub mod fuse;
pub mod journal;
pub mod keeper;
pub mod leases;
pub mod mount;
pub mod mounted;
pub mod recovery;
pub mod remote;
pub mod store;
pub mod wire;

pub use store::{Errno, Store};
