//! The gateway: one per user and configuration on a workstation. It holds the
//! mount table, takes in the commands that shells start, assembles pipelines from
//! them, decides where each stage runs, and relays what runs elsewhere.
//!
//! The walk of one pipeline: [`stage_link`] (a stage enlists) → [`assembly`] →
//! [`facts`] (annotations, mount table) → [`plan`] → [`lower`] → [`dispatch`].

mod aside;
pub mod assembly;
pub mod backstops;
pub mod client_files;
pub mod dispatch;
mod elsewhere;
pub mod enlisted;
pub mod executors;
pub mod explain;
pub mod facts;
mod fresh;
pub mod join;
pub mod limits;
mod locales;
pub mod log;
pub mod lower;
pub mod model;
mod new_files;
pub mod plan;
mod probe;
pub mod report;
mod same_files;
pub mod service;
pub mod session;
mod shares;
pub mod stage_link;
pub mod state;
pub mod tools;
pub mod trace;
pub mod volumes;

mod memory;
mod open_files;
mod opening;
mod ownership;
mod peers;
mod pipe_notes;
mod serve;
mod working_directory;
mod written;
mod zone;

pub use memory::keep_little;
pub use serve::{Listeners, ServeError, run};
