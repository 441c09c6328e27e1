//! The workstation's programs: `posh`, the front end that starts the user's own
//! shell and answers questions about the gateway, and the stage program that
//! stands where a command of a pipeline would have been.
//!
//! Reading order for the front end: [`cli`] (what was asked) → [`launch`] (the
//! shell) → [`gateway`] (finding, starting and calling the service) →
//! [`plan_only`] (explaining without running). For one command: [`stage`].

pub mod cli;
pub mod descriptors;
pub mod error;
pub mod gateway;
mod hook;
pub mod launch;
pub mod plan_only;
pub mod signals;
pub mod stage;
mod trace;

pub use error::Error;
