//! Calls of cargo, in the root of the workspace and always for all of it, so that every task uses
//! the same features and target directory.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};

/// `cargo` in the workspace's root.
pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root().expect("xtask lies in the workspace")).args(arguments);
    command
}

/// Runs a command to its end; a non-zero status is an error.
pub fn must(mut command: Command) -> Result<()> {
    let line = line(&command);
    eprintln!("$ {line}");
    let status = command.status().with_context(|| format!("cannot start {line}"))?;
    ensure!(status.success(), "{line} failed");
    Ok(())
}

/// The command line, for display.
pub fn line(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args());
    words.map(|w| w.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

/// Replaces this process by another program, so that signals reach it directly.
pub fn become_program(program: &Path, task: &str, arguments: &[String]) -> Result<ExitCode> {
    let error = Command::new(program).arg(task).args(arguments).exec();
    Err(error).with_context(|| format!("cannot start {}", program.display()))
}

/// The root of the workspace.
///
/// # Errors
/// This program was built outside of the workspace.
pub fn root() -> Result<PathBuf> {
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask lies in the workspace")?;
    Ok(root.to_owned())
}
