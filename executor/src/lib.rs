//! The executor: runs parts of pipelines next to the data that they read.
//!
//! A gateway sends one `Run` per part (see `executor.proto`); this crate checks it, joins its
//! commands with kernel pipes, starts them inside a mount namespace that shows the workstation's
//! paths, and streams their output.
//!
//! Reading order, which is also the way of one run:
//!
//! * [`config`] and `server`: from listening to drained, [`run`]; or, started by ssh, for one
//!   connection ([`run_stdio`], `stdio`)
//! * [`callers`]: identity of a caller, and its rights
//! * [`tls`], `admission`, `enrolment`: proof of a connection's identity, and its admission
//! * `runtimes`: a runtime for each identity, so that one's computations hold up no other
//! * `descriptors`: parts of the table of open files, by kind of work
//! * `load`, `metered`: admission control, for runs and for incomplete messages
//! * [`audit`]: the audit record, in a tamper-evident file
//! * `service`: the gRPC calls; `describe` and `tools` answer the two simple ones
//! * `wiring`: checks a `RunSpec` and assigns each end of each pipe to its holder
//! * `run`: one run in the daemon: pipes, outlets, inlets, merges, credit
//! * `own_mounts`: exports on network mounts of this machine, which cache
//! * `classifier`: analyses commands' words, off the runtime's threads
//! * `policy`: allowed commands, and their access to the mounts
//! * `pool`: the runners, one per mount table
//! * `hidden`: paths that no view shows, although their directories are in all views
//! * [`runner`]: the other program of this binary. It builds the namespace, checks paths, forks and
//!   reaps. The daemon itself never forks.
//! * [`verify`]: a third program of this binary, which reports files that commands use although
//!   their annotations do not name them
//! * `volume`: files for mounts that gateways serve themselves
//! * `sys`: the only file with `unsafe`

mod accept;
pub mod accounts;
mod admission;
pub mod audit;
pub mod callers;
mod cgroup;
mod classifier;
pub mod config;
mod describe;
mod descriptors;
mod enrolment;
mod error;
mod fingerprint;
mod hidden;
pub mod identity;
pub mod level;
mod load;
mod machine;
mod metered;
mod own_mounts;
mod policy;
mod pool;
mod run;
pub mod runner;
mod runtimes;
mod server;
mod service;
mod stdio;
mod sys;
pub mod tls;
mod tools;
pub mod verify;
mod volume;
mod wiring;

pub use config::{Config, Export};
pub use error::Error;
pub use server::{ConfigChanges, longest_end, run, run_stdio, run_with_changes};
pub use stdio::Stdio;
pub use sys::set_nice as lower_priority;
