//! Volumes: mounts that posh serves itself. Their files are kept by a [`Store`], of which this
//! crate has the trait.
//!
//! * [`store`]: what a store can be asked, and what it promises of what it has answered
//! * [`chunks`]: contents on this machine's disk
//! * [`leases`]: who may remember what, and who waits for whom

pub mod chunks;
pub mod leases;
pub mod store;

pub use store::{Errno, Store};
