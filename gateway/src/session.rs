//! Sessions: one per shell that `posh` started. A session owns a directory of shims and the file
//! with the gateway's socket for stages. Both are removed when the shell's process has ended,
//! however it ended, and none of the jobs that it left behind uses them; by the next gateway, if
//! this one was killed (`left`).
//!
//! Invariant: nobody can tell the name of a session's directory in advance. Shims are found by
//! their path, in any root directory, so that whoever knows it could have programs of his own
//! there.

mod left;
mod removal;
mod shims;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashSet},
    ffi::OsStr,
    fs,
    io::{self, Read as _},
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use fs_mapper::process::Process;
use posh_proto::{
    runtime::{SESSION_FILE, SHIMS},
    stage::SessionFile,
};
use prost::Message;
use rustix::process::{PidfdFlags, pidfd_open};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Semaphore,
};

use crate::{
    assembly::{is_below, pipe_inode},
    enlisted::Pid,
    pipe_notes,
    report::Reports,
    trace::Trace,
};

/// Timeout of the search for jobs of an ended shell: thousands of processes take less.
const LOOK_LIMIT: Duration = Duration::from_secs(5);

/// Data about the mounts for every session.
#[derive(Debug, Clone, Default)]
pub struct Mounts {
    /// Encoded by fs-mapper.
    pub prefixes: Vec<u8>,
    /// Commands may find all their files cached, so asking before an exec is worthwhile.
    pub at_hand: bool,
}

/// Request of `posh` for a session.
#[derive(Debug, Clone)]
pub struct SessionRequest {
    /// The process that is, or will become, the shell.
    pub pid: Pid,
    /// Keep a report of every stage, local ones too.
    pub explain: bool,
    /// Keep a trace.
    pub trace: bool,
    /// Splitting factor within one machine; `None`: as configured.
    pub split: Option<u32>,
    /// The user's PATH.
    pub path: PathBuf,
    /// Target of the shims.
    pub stage_program: PathBuf,
}

/// One shell and its descendants.
#[derive(Debug)]
pub struct ShellSession {
    /// Name of the session.
    pub id: String,
    /// The shell's process.
    pub pid: Pid,
    /// See [`SessionRequest::explain`].
    pub explain: bool,
    /// See [`SessionRequest::split`].
    pub split: Option<u32>,
    /// Placements and reasons.
    pub reports: Reports,
    /// Trace, if requested.
    pub trace: Option<Arc<Trace>>,
    /// Pipes that its shell writes to, by inode.
    outputs: Vec<u64>,
    /// Locked while its file is written.
    file: Mutex<FileState>,
    directory: PathBuf,
    /// Keeps other gateways from removing the directory.
    lock: OnceLock<fs::File>,
    stage_program: PathBuf,
}

/// State of a session's file.
#[derive(Debug, Default, PartialEq, Eq)]
enum FileState {
    #[default]
    Open,
    /// The directory was removed, or is about to be.
    Removed,
}

/// Error of opening a session.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// Files could not be created.
    #[error("cannot make the session directory {}", path.display())]
    Directory {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The process has ended.
    #[error("cannot watch process {pid}")]
    Watch {
        /// Which one.
        pid: Pid,
        /// Why.
        source: io::Error,
    },
}

/// All sessions of this gateway.
#[derive(Debug)]
pub struct Sessions {
    directory: PathBuf,
    stage_socket: PathBuf,
    next: AtomicU64,
    found: shims::FoundShims,
    open: Mutex<BTreeMap<String, Arc<ShellSession>>>,
    /// One permit for the search for jobs of an ended shell, so that at most one thread blocks on
    /// an unresponsive process.
    looks: Arc<Semaphore>,
    changed: tokio::sync::watch::Sender<usize>,
}

impl Sessions {
    /// Makes sessions whose directories lie below `directory` (0700).
    #[must_use]
    pub fn new(directory: PathBuf, stage_socket: PathBuf) -> Arc<Self> {
        let changed = tokio::sync::watch::Sender::new(0);
        Arc::new(Self {
            directory,
            stage_socket,
            next: AtomicU64::new(0),
            found: shims::FoundShims::default(),
            open: Mutex::default(),
            looks: Arc::new(Semaphore::new(1)),
            changed,
        })
    }

    /// Removes directories that killed gateways have left.
    pub async fn remove_left(self: Arc<Self>) {
        let _ = tokio::task::spawn_blocking(move || left::remove_all(&self.directory)).await;
    }

    /// Opens a session with its shims: one for each command that has an annotation and is installed
    /// (otherwise `command -v` would find missing commands).
    ///
    /// # Errors
    /// [`SessionError`]; nothing is left behind.
    pub fn open(
        self: &Arc<Self>,
        request: SessionRequest,
        commands: &[String],
        mounts: &Mounts,
    ) -> Result<(Arc<ShellSession>, PathBuf), SessionError> {
        let id = format!("{}-{}", std::process::id(), self.next.fetch_add(1, Ordering::Relaxed));
        let name = unguessable_name()
            .map_err(|source| SessionError::Directory { path: self.directory.clone(), source })?;
        let session = Arc::new(ShellSession {
            directory: self.directory.join(name),
            id: id.clone(),
            pid: request.pid,
            explain: request.explain,
            split: request.split,
            reports: Reports::default(),
            trace: request.trace.then(Arc::default),
            outputs: pipes_of(request.pid, [1, 2]),
            file: Mutex::default(),
            lock: OnceLock::new(),
            stage_program: request.stage_program,
        });
        let shims = session.directory.join(SHIMS);
        let pidfd = watch(request.pid)?;
        let made = || {
            let stage_program = &session.stage_program;
            self.found.make(&session.directory, &request.path, stage_program, commands)?;
            let _ = session.lock.set(left::hold(&session.directory, session.pid)?);
            self.write_file(&session, mounts)?;
            self.note_input(&session)
        };
        if let Err(source) = made() {
            session.remove();
            return Err(SessionError::Directory { path: session.directory.clone(), source });
        }
        self.lock().insert(id.clone(), Arc::clone(&session));
        self.announce();
        tokio::spawn(Arc::clone(self).close_at_end(Arc::clone(&session), pidfd));
        Ok((session, shims))
    }

    /// Notes that a shell's piped input comes from outside, unless the shell is within a session:
    /// then no command waits for a note of the pipe's writer.
    fn note_input(&self, session: &ShellSession) -> io::Result<()> {
        let input = pipes_of(session.pid, [0]).first().copied();
        match input.filter(|_| !is_below(session.pid, &self.roots())) {
            Some(pipe) => pipe_notes::note_fed_here(&session.directory, pipe),
            None => Ok(()),
        }
    }

    /// Returns true if the writer of this pipe has noted in the session that it runs locally.
    #[must_use]
    pub fn is_fed_here(&self, session: &str, pipe: u64) -> bool {
        self.get(session).is_some_and(|session| pipe_notes::is_fed_here(&session.directory, pipe))
    }

    /// A session by its name.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<Arc<ShellSession>> {
        self.lock().get(id).cloned()
    }

    /// Process IDs of the shells.
    #[must_use]
    pub fn roots(&self) -> Vec<Pid> {
        self.lock().values().map(|s| s.pid).collect()
    }

    /// Pipes that the shells write to, by inode.
    #[must_use]
    pub fn outputs(&self) -> HashSet<u64> {
        self.lock().values().flat_map(|session| session.outputs.iter().copied()).collect()
    }

    /// Shells among these processes, given as (process, parent): a session's process itself, or its
    /// child if posh stays for the report.
    #[must_use]
    pub fn shells(&self, processes: impl Iterator<Item = (Pid, Pid)>) -> HashSet<Pid> {
        let roots: BTreeMap<Pid, bool> =
            self.lock().values().map(|s| (s.pid, s.is_waited_for())).collect();
        let is_shell = |&(pid, parent): &(Pid, Pid)| {
            roots.get(&pid) == Some(&false) || roots.get(&parent) == Some(&true)
        };
        processes.filter(is_shell).map(|(pid, _)| pid).collect()
    }

    /// Targets of the shims.
    #[must_use]
    pub fn stage_programs(&self) -> HashSet<PathBuf> {
        self.lock().values().map(|s| s.stage_program.clone()).collect()
    }

    /// Number of sessions, as a watch channel.
    #[must_use]
    pub fn count(&self) -> tokio::sync::watch::Receiver<usize> {
        self.changed.subscribe()
    }

    /// Publishes a changed mount table to every session.
    pub fn publish(&self, mounts: &Mounts) {
        let sessions: Vec<Arc<ShellSession>> = self.lock().values().cloned().collect();
        for session in sessions {
            if let Err(error) = self.write_file(&session, mounts) {
                tracing::warn!(
                    session = session.id,
                    %error,
                    "cannot tell a session of changed mounts"
                );
            }
        }
    }

    /// Removes every session's directory.
    pub fn close_all(&self) {
        std::mem::take(&mut *self.lock()).into_values().for_each(|s| s.remove());
        self.announce();
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<ShellSession>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn announce(&self) {
        let count = self.lock().len();
        self.changed.send_replace(count);
    }

    /// Stages read the file at any time: replace it atomically, and only if it changed.
    fn write_file(&self, session: &ShellSession, mounts: &Mounts) -> io::Result<()> {
        let message = SessionFile {
            session: session.id.clone(),
            socket: self.stage_socket.as_os_str().as_bytes().to_vec().into(),
            always_enlist: session.explain,
            trace: session.trace.is_some(),
            prefixes: mounts.prefixes.clone().into(),
            // Commands that don't enlist are missing from reports.
            asks: mounts.at_hand && !session.is_waited_for(),
        };
        let state = session.lock_file();
        if *state == FileState::Removed {
            return Ok(());
        }
        let (file, message) = (session.directory.join(SESSION_FILE), message.encode_to_vec());
        if fs::read(&file).is_ok_and(|before| before == message) {
            return Ok(());
        }
        let new = session.directory.join("session.new");
        fs::write(&new, message)?;
        fs::rename(new, file)
    }

    async fn close_at_end(self: Arc<Self>, session: Arc<ShellSession>, pidfd: AsyncFd<OwnedFd>) {
        // A pidfd becomes readable when the process ends (pidfd_open(2)).
        let _ = pidfd.ready(Interest::READABLE).await;
        // Jobs left behind still use the shims: a shell caches the paths of commands.
        while let Some(left) = session.left_behind(&self.looks).await {
            let _ = left.ready(Interest::READABLE).await;
        }
        session.remove();
        self.lock().remove(&session.id);
        self.announce();
    }
}

/// Name of a session's directory, with 128 random bits.
fn unguessable_name() -> io::Result<String> {
    let mut bits = [0; size_of::<u128>()];
    fs::File::open("/dev/urandom")?.read_exact(&mut bits)?;
    Ok(format!("{}{:032x}", left::PREFIX, u128::from_ne_bytes(bits)))
}

/// Inodes of the pipes among these descriptors of a process.
fn pipes_of<const N: usize>(pid: Pid, descriptors: [u32; N]) -> Vec<u64> {
    let links =
        descriptors.into_iter().filter_map(|fd| fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok());
    links.filter_map(|link| pipe_inode(&link)).collect()
}

/// Other processes of this user that have `directory`, or a list with a directory in it, as value
/// of a variable: its shims, or the exec hook's settings. Other users have no part in a session,
/// whatever their variables say. Oversized environments are not read.
fn processes_with(directory: &Path) -> Vec<Pid> {
    let names_it = |process: &Process| {
        let variables = process.strings("environ").unwrap_or_default();
        let values = variables.iter().filter_map(|v| v.as_bytes().splitn(2, |b| *b == b'=').nth(1));
        let paths = values.flat_map(|value| value.split(|b| *b == b':'));
        paths
            .filter(|path| path.first() == Some(&b'/'))
            .any(|path| Path::new(OsStr::from_bytes(path)).starts_with(directory))
    };
    let others =
        Process::of_users(&[]).filter(|process| process.number() != Some(std::process::id()));
    others.filter(names_it).filter_map(|process| process.number()).collect()
}

/// Becomes readable when a process ends (pidfd_open(2)).
pub(crate) fn watch(pid: Pid) -> Result<AsyncFd<OwnedFd>, SessionError> {
    let error = |source| SessionError::Watch { pid, source };
    let raw = rustix::process::Pid::from_raw(pid.cast_signed())
        .ok_or_else(|| error(io::ErrorKind::InvalidInput.into()))?;
    let pidfd = pidfd_open(raw, PidfdFlags::NONBLOCK).map_err(|e| error(e.into()))?;
    #[expect(
        deprecated,
        reason = "the replacement is unsafe; an OwnedFd owns its descriptor for its whole life"
    )]
    AsyncFd::with_interest(pidfd, Interest::READABLE).map_err(error)
}

impl ShellSession {
    /// Returns true if posh stays for the report or trace: the shell is its child.
    #[must_use]
    pub fn is_waited_for(&self) -> bool {
        self.explain || self.trace.is_some()
    }

    /// A process that still uses this session: a job that the shell did not wait for. Reading
    /// variables accesses the process's memory, which may be a mapped file that never answers: on a
    /// timeout, nobody was left behind.
    async fn left_behind(&self, looks: &Arc<Semaphore>) -> Option<AsyncFd<OwnedFd>> {
        let look = async {
            let turn = Arc::clone(looks).acquire_owned().await.ok()?;
            let directory = self.directory.clone();
            // With many processes, this takes some milliseconds.
            let found = tokio::task::spawn_blocking(move || {
                let found = processes_with(&directory);
                drop(turn);
                found
            });
            found.await.ok()
        };
        let found = tokio::time::timeout(LOOK_LIMIT, look).await.ok()??;
        found.into_iter().find_map(|pid| watch(pid).ok())
    }

    fn lock_file(&self) -> MutexGuard<'_, FileState> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove(&self) {
        *self.lock_file() = FileState::Removed;
        let removed =
            self.directory.parent().map_or(Ok(()), |top| removal::remove(&self.directory, top));
        if let Err(error) = removed {
            tracing::warn!(
                directory = %self.directory.display(),
                %error,
                "cannot remove a session directory"
            );
        }
    }
}
