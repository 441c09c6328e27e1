//! The executor from outside: an executor in this process (or as a program),
//! asked through gRPC as a gateway would.

mod harness;
mod lifecycle;
mod paths;
mod streams;
