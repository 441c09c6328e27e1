//! `posh annotations verify`: runs command lines and reports the files that they used although no
//! word of their annotations names them. The rules of a command are those of an executor (`policy`,
//! `runner::fence`); the processes are traced (`observe`), and `scope` checks each access. Commands
//! that no annotation understands run untraced, since a server would not run them.

mod calls;
mod judge;
mod observe;
mod scope;

use std::{
    ffi::{CString, OsStr, OsString},
    fs, io,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use nix::unistd::mkdtemp;

use self::judge::Verifier;
use crate::{
    config::{Commands, Confinement},
    policy::{Policy, is_loading},
};

/// Input of a verification.
#[derive(Debug, Default)]
pub struct Task {
    /// Directories of annotation files, over those that ship with posh.
    pub annotations: Vec<PathBuf>,
    /// One command, or one line for the shell.
    pub command: Vec<OsString>,
    /// Further lines for the shell, one a line.
    pub file: Option<PathBuf>,
    /// Run in a copy of this directory.
    pub in_copy_of: Option<PathBuf>,
}

/// Runs the verification; returns the report, and true if nothing was missed.
///
/// # Errors
/// When the command lines can't be read, or no command can be traced on this machine. Must be
/// called by a process that has one thread.
pub fn verify(task: &Task) -> io::Result<(String, bool)> {
    let lines = lines(task)?;
    let scratch = Scratch::new()?;
    let temporary = scratch.0.join("tmp");
    fs::create_dir(&temporary)?;
    if let Some(directory) = &task.in_copy_of {
        let copy = scratch.0.join("copy");
        copy_tree(directory, &copy)?;
        std::env::set_current_dir(copy)?;
    }
    let confinement = Confinement {
        annotations: task.annotations.clone(),
        commands: Commands::Annotated,
        ..Confinement::default()
    };
    let (policy, mistakes) = Policy::new(&confinement);
    let mut verifier = Verifier::new(policy, temporary.clone());
    let before = environment(&temporary)?;
    for line in lines {
        observe::run(&[&before[..], &line[..]].concat(), &mut verifier)?;
    }
    let (report, is_sound) = verifier.report();
    Ok((
        mistakes.iter().map(|mistake| format!("{mistake}\n")).collect::<String>() + &report,
        is_sound,
    ))
}

/// Words before a command that give it its environment on a server: without variables that load
/// code into programs, and with a TMPDIR of its own.
fn environment(temporary: &Path) -> io::Result<Vec<CString>> {
    let mut words = vec![OsString::from("env")];
    for (name, _) in std::env::vars_os().filter(|(name, _)| is_loading(name.as_bytes())) {
        words.extend(["-u".into(), name]);
    }
    let mut variable = OsString::from("TMPDIR=");
    variable.push(temporary);
    words.push(variable);
    words.iter().map(|word| c_string(word)).collect()
}

/// The command lines, each as words for execve(2).
fn lines(task: &Task) -> io::Result<Vec<Vec<CString>>> {
    let c_strings =
        |words: &[&OsStr]| words.iter().map(|word| c_string(word)).collect::<io::Result<Vec<_>>>();
    let for_shell = |line: &OsStr| c_strings(&["sh".as_ref(), "-c".as_ref(), line]);
    let mut lines = Vec::new();
    match task.command.as_slice() {
        [] => {}
        [line] => lines.push(for_shell(line)?),
        words => lines.push(words.iter().map(|word| c_string(word)).collect::<io::Result<_>>()?),
    }
    if let Some(file) = &task.file {
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("cannot read {}: {error}", file.display()))
        };
        let text = fs::read(file).map_err(named)?;
        let written = text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
        for line in written.filter(|line| !line.is_empty() && !line.starts_with(b"#")) {
            lines.push(for_shell(OsStr::from_bytes(line))?);
        }
    }
    Ok(lines)
}

fn c_string(word: &OsStr) -> io::Result<CString> {
    CString::new(word.as_bytes()).map_err(|_| io::Error::other("an argument holds a zero byte"))
}

/// Copies everything as it is: modes, times, links.
fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    let failed = |why: String| io::Error::other(format!("cannot copy {}: {why}", from.display()));
    if !from.is_dir() {
        return Err(failed("it is no directory".to_owned()));
    }
    let status = Command::new("cp").arg("-aT").arg("--").args([from, to]).status();
    match status.map_err(|error| failed(error.to_string()))? {
        status if status.success() => Ok(()),
        status => Err(failed(format!("cp ended with {status}"))),
    }
}

/// A temporary directory, removed when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> io::Result<Self> {
        let template = fs::canonicalize(std::env::temp_dir())?.join("posh-verify-XXXXXX");
        Ok(Self(mkdtemp(&template)?))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
