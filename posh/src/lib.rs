//! The workstation's programs: the front end `posh`, and the stage program that
//! stands where a command of a pipeline would have been.
pub mod stage;
