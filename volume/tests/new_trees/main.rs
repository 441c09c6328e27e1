//! Files of directories that a session has just made: in memory first, and what holds all the same.
#![allow(clippy::unwrap_used)]

mod client;
mod model;
mod promises;
mod room;
