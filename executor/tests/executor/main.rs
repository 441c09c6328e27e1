//! The executor from outside: an executor in this process (or as a program),
//! asked through gRPC as a gateway would.

#![allow(clippy::unwrap_used, reason = "the whole program is tests, its harness included")]

mod attacks;
mod beside_volumes;
mod cgroups;
mod guards;
mod harness;
mod lifecycle;
mod paths;
mod streams;
mod tls;
mod verify;
mod views;
