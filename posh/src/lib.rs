//! The workstation's programs: `posh`, which starts the user's own shell and answers questions
//! about the gateway, and the stage program, which replaces a command of a pipeline.
//!
//! Reading order for the front end: [`launch`] (the shell), [`gateway`] (finding, starting and
//! calling the service); behind options [`cli`] (the command line), [`watch`] (a shell with a
//! report), [`plan_only`] (explaining without running). For one command: [`stage`].

#[cfg(feature = "cli")]
pub mod cli;
pub mod descriptors;
pub mod ending;
pub mod error;
pub mod gateway;
mod hook;
pub mod launch;
pub mod plan_only;
pub mod programs;
pub mod signals;
pub mod socket;
pub mod stage;
mod trace;
pub mod watch;
pub mod words;

pub use error::Error;
