//! The laboratory for tests and demonstrations of posh: a workstation and storage servers as
//! network, mount and process namespaces of this machine, the paper's five applications with
//! generators for their data, bash as the oracle, and cases as data.
//!
//! Code of single tests is in `tests/`; timing studies are in `bench`.

pub mod cases;
pub mod chaos;
pub mod cloud;
pub mod demo;
mod devices;
pub mod error;
pub mod explain;
pub mod generate;
mod git_index;
pub mod host;
pub mod init;
pub mod interleave;
pub mod lab;
pub mod network;
pub mod oracle;
pub mod people;
pub mod process;
pub mod programs;
pub mod quiet;
pub mod random;
pub mod running;
pub mod services;
pub mod shapes;
pub mod suites;
pub mod terminal;
pub mod tree;
pub mod volumes;
pub mod wire;
pub mod workload;

pub use error::{LabError, Result};
pub use host::Host;
pub use lab::{Lab, LabSpec, ServerSpec};
pub use oracle::{Door, RunOutcome, Script, Shell};
pub use process::ChildProcess;
