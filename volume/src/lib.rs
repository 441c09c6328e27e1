//! Volumes: mounts that posh serves itself. Their files are kept by a [`Store`], of which this
//! crate has the trait.
//!
//! * [`fs`]: the file system on top of it, without FUSE
//! * [`fuse`]: the one module that knows the crate fuser
//! * [`mount`]: into the file tree and out of it
//! * [`store`]: what a store can be asked, and what it promises of what it has answered
//! * [`leases`]: who may remember what, and who waits for whom; [`keeper`]: with a clock, for those
//!   who wait
//! * [`clock`]: the time that all of them go by
//! * [`disk`]: contents on this machine's disk; [`journal`]: what was closed and is not on the
//!   server yet
//! * [`directory`]: the store over a directory of this machine
//! * [`remote`]: the store over a connection to an executor; [`wire`]: its words as messages

pub mod clock;
pub mod directory;
pub mod disk;
pub mod fs;
pub mod fuse;
pub mod journal;
pub mod keeper;
pub mod leases;
pub mod mount;
pub mod remote;
pub mod store;
pub mod wire;

pub use store::{Errno, Store};
