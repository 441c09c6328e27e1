//! Volumes from outside: an executor in this process, sessions over gRPC through a connection that
//! can be cut.

#![allow(clippy::unwrap_used, reason = "the whole program is tests, its harness included")]

mod coherence;
mod harness;
mod links;
mod model;
mod restarts;
