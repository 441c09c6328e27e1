//! Directories of sessions whose gateway was killed: the next gateway removes them.
//!
//! Invariant: what a shell, or one of its jobs, may still use is not removed. A gateway holds a
//! lock (flock(2)) on each of its sessions' directories, which ends with the gateway. The directory
//! names its shell under that lock. It is removed by a gateway that gets the lock, sees the
//! processes that the shell's gateway saw (the same PID namespace), finds that the shell has ended,
//! and, as at the end of a session, that no process of this user has the directory in its
//! variables. All other directories stay: those of a former version, of a gateway that was killed
//! while it made one, of another container.

use std::{
    fs::{self, File, TryLockError},
    io,
    path::Path,
};

use fs_mapper::process::Process;

use super::{processes_with, removal};
use crate::enlisted::Pid;

/// File in a session's directory with a [`shell`].
const SHELL: &str = "shell";
/// Beginning of the names of sessions' directories.
pub(super) const PREFIX: &str = "session-";
/// Longest line of /proc/PID/stat.
const STAT_BYTES: u64 = 4096;
/// Position of the time of a process's start behind its name (proc(5)).
const START_TIME: usize = 19;

/// Locks a session's new directory until the result is dropped, and names its shell in it.
pub(super) fn hold(directory: &Path, pid: Pid) -> io::Result<File> {
    let lock = File::open(directory)?;
    lock.lock()?;
    fs::write(directory.join(SHELL), shell(pid)?)?;
    Ok(lock)
}

/// Removes the directories of ended sessions in `top`, except those that a living gateway holds.
/// May block: it reads the memory of processes.
pub(super) fn remove_all(top: &Path) {
    for entry in fs::read_dir(top).into_iter().flatten().filter_map(Result::ok) {
        let directory = entry.path();
        if entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes())
            && entry.file_type().is_ok_and(|kind| kind.is_dir())
            && let Err(error) = remove_if_left(&directory, top)
        {
            let directory = directory.display();
            tracing::info!(%directory, %error, "a former session's directory stays");
        }
    }
}

fn remove_if_left(directory: &Path, top: &Path) -> io::Result<()> {
    let lock = File::open(directory)?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(()),
        Err(TryLockError::Error(error)) => return Err(error),
    }
    let named = fs::read_to_string(directory.join(SHELL))?;
    match has_ended(&named)? && processes_with(directory).is_empty() {
        true => removal::remove(directory, top),
        false => Ok(()),
    }
}

/// A process: its number, the time of its start, and the namespace of the number.
fn shell(pid: Pid) -> io::Result<String> {
    let process = Process::open(pid)?;
    Ok(format!("{pid} {} {}", start_of(&process)?, pid_namespace()?))
}

/// Returns true if that [`shell`] has certainly ended.
fn has_ended(named: &str) -> io::Result<bool> {
    let mut words = named.split(' ');
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let (Some(pid), Some(start), Some(namespace)) = (words.next(), words.next(), words.next())
    else {
        return Err(invalid());
    };
    if namespace != pid_namespace()? {
        return Ok(false);
    }
    match Process::open(pid.parse().map_err(|_| invalid())?) {
        Ok(process) => Ok(start_of(&process).is_ok_and(|its| its != start)),
        Err(error) => Ok(error.kind() == io::ErrorKind::NotFound),
    }
}

/// The time of a process's start, in ticks since the machine's.
fn start_of(process: &Process) -> io::Result<String> {
    let stat = process.read("stat", STAT_BYTES)?;
    let stat = String::from_utf8_lossy(&stat);
    // The name, in parentheses, may have any characters.
    let behind = stat.rsplit_once(") ").map(|(_, behind)| behind);
    let start = behind.and_then(|behind| behind.split(' ').nth(START_TIME));
    start.map(str::to_owned).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn pid_namespace() -> io::Result<String> {
    Ok(fs::read_link("/proc/self/ns/pid")?.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use std::{path::PathBuf, process::Command};

    use super::*;

    /// A session's directory whose gateway, if `lock` is dropped, was killed.
    struct Left {
        top: tempfile::TempDir,
        directory: PathBuf,
        lock: Option<File>,
    }

    impl Left {
        fn of(pid: Pid) -> Self {
            let top = tempfile::tempdir().unwrap();
            let directory = top.path().join("session-0123");
            fs::create_dir(&directory).unwrap();
            let lock = Some(hold(&directory, pid).unwrap());
            Self { top, directory, lock }
        }

        fn is_removed(&self) -> bool {
            remove_all(self.top.path());
            !self.directory.exists()
        }
    }

    #[test]
    fn a_directory_is_removed_when_its_gateway_and_its_shell_have_ended() {
        let mut shell = Command::new("sleep").arg("100").spawn().unwrap();
        let mut left = Left::of(shell.id());
        assert!(!left.is_removed(), "its gateway runs");
        left.lock = None;
        assert!(!left.is_removed(), "its shell runs");
        shell.kill().unwrap();
        shell.wait().unwrap();
        let mut job = Command::new("sleep");
        let path = format!("{}:/bin", left.directory.join("bin").display());
        let mut job = job.arg("100").env("PATHS", path).spawn().unwrap();
        // Its variables are its parent's until it is executed.
        while processes_with(&left.directory).is_empty() {
            std::thread::yield_now();
        }
        assert!(!left.is_removed(), "a job of its shell runs");
        job.kill().unwrap();
        job.wait().unwrap();
        left.lock = Some(File::open(&left.directory).unwrap());
        left.lock.as_ref().unwrap().lock().unwrap();
        assert!(!left.is_removed(), "its gateway runs, though its shell has ended");
        left.lock = None;
        assert!(left.is_removed());
    }

    #[test]
    fn a_directory_that_is_not_known_to_be_left_stays() {
        let mut left = Left::of(std::process::id());
        left.lock = None;
        let own = fs::read_to_string(left.directory.join(SHELL)).unwrap();
        let [pid, start, namespace] = own.split(' ').collect::<Vec<_>>().try_into().unwrap();
        for (named, is_left) in [
            (own.clone(), false),
            // Of another container, or of no one.
            (format!("{pid} 1 pid:[1]"), false),
            (String::new(), false),
            (format!("x {start} {namespace}"), false),
            // Another process has its number by now.
            (format!("{pid} 1 {namespace}"), true),
        ] {
            fs::write(left.directory.join(SHELL), &named).unwrap();
            assert_eq!(left.is_removed(), is_left, "{named}");
        }
        fs::create_dir_all(left.top.path().join("session-none")).unwrap();
        remove_all(left.top.path());
        assert!(left.top.path().join("session-none").exists());
    }
}
