//! The executor: runs parts of pipelines next to the data that they read.
//!
//! A gateway sends one `Run` per part (see `executor.proto`); this crate checks
//! it, joins its commands with kernel pipes, starts them inside a mount
//! namespace that shows the workstation's paths, and streams what comes out.
//!
//! Reading order, which is also the way of one run:
//!
//! * [`config`] and `server`: from listening to drained, [`run`]; or, started by ssh,
//!   for the one connection that is there ([`run_stdio`], `stdio`)
//! * [`callers`]: who asks, and what they may
//! * [`tls`], `admission`, `enrolment`: how a connection proves who it is, and what follows
//! * `runtimes`: a runtime for each identity, so that what one computes holds up no other
//! * `load`, `metered`: whether there is room, for runs and for messages that are not whole yet
//! * [`audit`]: what was done here, in a file that shows changes
//! * `service`: the gRPC calls; `describe` and `tools` answer the two simple ones
//! * `wiring`: checks a `RunSpec` and says who holds which end of which pipe
//! * `run`: one run in the daemon: pipes, outlets, inlets, merges, credit
//! * `own_mounts`: exports that this machine mounts from elsewhere, and so remembers things of
//! * `classifier`: has the words of commands read, away from the runtime's threads
//! * `policy`: what may run, and what of the mounts it reaches
//! * `pool`: the runners, one per mount table
//! * `hidden`: what no view shows of the directories that all of them have
//! * [`runner`]: the other program of this binary. It builds the namespace,
//!   checks paths, forks and reaps. The daemon itself never forks.
//! * [`verify`]: a third program of it, which tells what files commands use that their annotations
//!   do not name
//! * `volume`: files for mounts that gateways serve themselves
//! * `sys`: the only file with `unsafe`

pub mod accounts;
mod admission;
pub mod audit;
pub mod callers;
mod cgroup;
mod classifier;
pub mod config;
mod describe;
mod enrolment;
mod error;
mod hidden;
mod load;
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
pub use server::{longest_end, run, run_stdio, run_with_changes};
pub use stdio::Stdio;
pub use sys::set_nice as lower_priority;
