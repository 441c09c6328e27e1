//! Sessions: one for each shell that `posh` started. A session owns a directory
//! of shims and the file that tells a stage where to ask; both go away when the
//! shell's process ends, however it ends, and none that it left behind looks there.

mod ready;
mod removal;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashSet},
    ffi::OsStr,
    fs, io,
    os::{
        fd::OwnedFd,
        unix::{
            ffi::OsStrExt,
            fs::{DirBuilderExt, MetadataExt, symlink},
        },
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use posh_hook::{
    foreseen::{Digest, HOLDS_NS},
    session::STAGE,
};
use posh_proto::{
    clock,
    ready::{FILE, MadeFor, SHIMS},
    stage::SessionFile,
};
use prost::Message;
use rustix::process::{PidfdFlags, pidfd_open};
use tokio::io::{Interest, unix::AsyncFd};

use crate::{
    assembly::{is_below, pipe_inode},
    dispatch::{head_start::HeadStart, untold::Untold},
    enlisted::Pid,
    look_ahead::Look,
    pipe_notes,
    report::Reports,
    trace::Trace,
};
use ready::Ready;

/// Who has taken a session is heard of in less, or not at all: it has died.
const UNHEARD: Duration = Duration::from_secs(1);

/// What every session is told of the mounts.
#[derive(Debug, Clone, Default)]
pub struct Mounts {
    /// As fs-mapper writes them.
    pub prefixes: Vec<u8>,
    /// Commands may find all that they use at hand, so that asking first is worth it.
    pub at_hand: bool,
    /// Some are volumes.
    pub volumes: bool,
}

/// What `posh` asks for.
#[derive(Debug, Clone)]
pub struct Request {
    /// The process that is, or will become, the shell.
    pub pid: Pid,
    /// Keep a report of every stage, local ones too.
    pub explain: bool,
    /// Keep the times of what happens.
    pub trace: bool,
    /// Splitting factor within one machine; `None`: as configured.
    pub split: Option<u32>,
    /// The user's PATH.
    pub path: PathBuf,
    /// The program that the shims lead to.
    pub stage_program: PathBuf,
    /// It has taken a session that was ready, and begins.
    pub taken: Option<Taken>,
}

/// Of a session that was ready and has been taken.
#[derive(Debug, Clone)]
pub struct Taken {
    /// Its directory.
    pub directory: PathBuf,
    /// Pipes that are the shell's output and errors, by inode, as it began.
    pub outputs: Vec<u64>,
    /// The pipe that was its input.
    pub input: Option<u64>,
}

/// One shell and what runs below it.
#[derive(Debug)]
pub struct Session {
    /// Its name.
    pub id: String,
    /// The shell's process.
    pub pid: Pid,
    /// See [`Request::explain`].
    pub explain: bool,
    /// See [`Request::split`].
    pub split: Option<u32>,
    /// What ran where.
    pub reports: Reports,
    /// When, if that was asked for.
    pub trace: Option<Arc<Trace>>,
    /// Its first command, until it comes.
    pub head_start: HeadStart,
    /// What mounts are told while its shell goes on.
    pub untold: Untold,
    /// What is to be looked at when that has come.
    pub later: Mutex<Vec<Look>>,
    /// Pipes that its shell writes to, by inode.
    outputs: Vec<u64>,
    /// What its file says beside what all sessions' files say; whoever writes the file has it locked.
    file: Mutex<OwnPart>,
    directory: PathBuf,
    made_for: MadeFor,
    stage_program: PathBuf,
}

/// Of a session's file.
#[derive(Debug, Default)]
struct OwnPart {
    /// Commands that stay here before they come (`posh_hook::foreseen`).
    foreseen: Vec<u8>,
    /// Until when that counts, by CLOCK_MONOTONIC.
    foreseen_until_ns: u64,
    /// Nothing can be foreseen any more.
    is_unforeseeable: bool,
    /// Every command is to ask.
    is_asked_by_all: bool,
    /// The file is another session's, or gone.
    is_over: bool,
}

/// Why a session could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// Files could not be made.
    #[error("cannot make the session directory {}", path.display())]
    Directory {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The process is gone already.
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
    open: Mutex<BTreeMap<String, Arc<Session>>>,
    /// What they were told last.
    told: Mutex<Mounts>,
    /// For whoever comes next.
    ready: Mutex<Ready>,
    /// There is no next one.
    is_closed: AtomicBool,
    changed: tokio::sync::watch::Sender<usize>,
}

impl Sessions {
    /// Sessions whose directories lie below `directory` (0700).
    #[must_use]
    pub fn new(directory: PathBuf, stage_socket: PathBuf) -> Arc<Self> {
        let changed = tokio::sync::watch::Sender::new(0);
        ready::remove_those_of_the_dead(&directory, &stage_socket);
        Arc::new(Self {
            directory,
            stage_socket,
            next: AtomicU64::new(0),
            open: Mutex::default(),
            told: Mutex::default(),
            ready: Mutex::default(),
            is_closed: AtomicBool::new(false),
            changed,
        })
    }

    /// Makes the shims: one for each command that has an annotation and that the
    /// user has (or `command -v` would find what is not there).
    ///
    /// # Errors
    /// [`SessionError`]; nothing is left behind then.
    pub fn open(
        self: &Arc<Self>,
        request: Request,
        commands: &[String],
        mounts: &Mounts,
    ) -> Result<(Arc<Session>, PathBuf), SessionError> {
        let taken = request.taken.clone().filter(|taken| self.is_place(taken, request.pid));
        let known = taken.as_ref().and_then(|taken| self.ready().unheard(&taken.directory));
        let id = known.unwrap_or_else(|| self.next_id());
        let directory = taken.as_ref().map(|taken| taken.directory.clone());
        let (outputs, input) = match taken.clone() {
            Some(taken) => (taken.outputs, taken.input),
            None => (pipes_of(request.pid, [1, 2]), pipes_of(request.pid, [0]).first().copied()),
        };
        let session = Arc::new(Session {
            directory: directory.unwrap_or_else(|| self.directory.join(format!("session-{id}"))),
            id: id.clone(),
            pid: request.pid,
            explain: request.explain,
            split: request.split,
            reports: Reports::default(),
            trace: request.trace.then(Arc::default),
            head_start: HeadStart::default(),
            untold: Untold::default(),
            later: Mutex::default(),
            outputs,
            file: Mutex::default(),
            made_for: MadeFor::now(request.path.as_os_str(), &request.stage_program),
            stage_program: request.stage_program,
        });
        let shims = session.directory.join(SHIMS);
        *self.told.lock().unwrap_or_else(PoisonError::into_inner) = mounts.clone();
        let pidfd = match (watch(request.pid), &taken) {
            (Err(error), Some(_)) => {
                session.remove();
                return Err(error);
            }
            (pidfd, _) => pidfd?,
        };
        let has_shims = taken.is_some() || self.ready().take(&session.made_for, &session.directory);
        let made = || {
            if !has_shims {
                make_shims(&session.directory, &request.path, &session.stage_program, commands)?;
            }
            self.write_file(&session, mounts)?;
            self.note_input(&session, input)
        };
        if let Err(source) = made() {
            session.remove();
            return Err(SessionError::Directory { path: session.directory.clone(), source });
        }
        self.lock().insert(id.clone(), Arc::clone(&session));
        self.ready().heard_of(&id);
        self.announce();
        tokio::spawn(Arc::clone(self).close_at_end(Arc::clone(&session), pidfd));
        Ok((session, shims))
    }

    fn next_id(&self) -> String {
        format!("{}-{}", std::process::id(), self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Whether a shell may have taken the session that lies there: a directory, no link, beside the others, under the
    /// one name that this process gives it, and of no session that is open. It is written to, and removed in the end.
    fn is_place(&self, taken: &Taken, pid: Pid) -> bool {
        let name = removal::entry_of(&taken.directory, &self.directory);
        let is_its_name = name.is_some_and(|name| *name == *ready::name_of_taken(pid));
        let is_directory = || fs::symlink_metadata(&taken.directory).is_ok_and(|found| found.is_dir());
        let is_free = || self.lock().values().all(|open| open.directory != taken.directory);
        is_its_name && is_directory() && is_free()
    }

    /// Waits for word of a session that was ready and has been taken: its first command may be sooner.
    pub async fn heard_of(&self, id: &str) {
        if !self.ready().is_unheard(id) {
            return;
        }
        let mut changed = self.changed.subscribe();
        let is_open = async { while self.get(id).is_none() && changed.changed().await.is_ok() {} };
        if tokio::time::timeout(UNHEARD, is_open).await.is_err() {
            // Its further commands need not wait.
            self.ready().heard_of(id);
        }
    }

    /// What is piped to a shell comes from outside, unless it is one within a session: no command needs to wait for a
    /// word of who writes it.
    fn note_input(&self, session: &Session, input: Option<u64>) -> io::Result<()> {
        match input.filter(|_| !is_below(session.pid, &self.roots())) {
            Some(pipe) => pipe_notes::note_fed_here(&session.directory, pipe),
            None => Ok(()),
        }
    }

    /// Whether what a session's command reads from this pipe was written by one that stays here.
    #[must_use]
    pub fn is_fed_here(&self, session: &str, pipe: u64) -> bool {
        self.get(session).is_some_and(|session| pipe_notes::is_fed_here(&session.directory, pipe))
    }

    /// A session by its name.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<Arc<Session>> {
        self.lock().get(id).cloned()
    }

    /// The shells' processes.
    #[must_use]
    pub fn roots(&self) -> Vec<Pid> {
        self.lock().values().map(|s| s.pid).collect()
    }

    /// Pipes that the shells write to, by inode.
    #[must_use]
    pub fn outputs(&self) -> HashSet<u64> {
        self.lock().values().flat_map(|session| session.outputs.iter().copied()).collect()
    }

    /// The shells among these processes, each given with its parent: a session's process itself, or, where
    /// posh stays for the report, its child.
    #[must_use]
    pub fn shells(&self, processes: impl Iterator<Item = (Pid, Pid)>) -> HashSet<Pid> {
        let roots: BTreeMap<Pid, bool> = self.lock().values().map(|s| (s.pid, s.is_waited_for())).collect();
        let is_shell =
            |&(pid, parent): &(Pid, Pid)| roots.get(&pid) == Some(&false) || roots.get(&parent) == Some(&true);
        processes.filter(is_shell).map(|(pid, _)| pid).collect()
    }

    /// Files that shims lead to.
    #[must_use]
    pub fn stage_programs(&self) -> HashSet<PathBuf> {
        self.lock().values().map(|s| s.stage_program.clone()).collect()
    }

    /// How many there are, as it changes.
    #[must_use]
    pub fn count(&self) -> tokio::sync::watch::Receiver<usize> {
        self.changed.subscribe()
    }

    /// Tells every session of a changed mount table.
    pub fn publish(&self, mounts: &Mounts) {
        let sessions: Vec<Arc<Session>> = self.lock().values().cloned().collect();
        for session in sessions {
            if let Err(error) = self.write_file(&session, mounts) {
                tracing::warn!(session = session.id, %error, "cannot tell a session of changed mounts");
            }
        }
        *self.told.lock().unwrap_or_else(PoisonError::into_inner) = mounts.clone();
        if let Some((id, directory)) = self.ready().offered() {
            // Somebody may take it at this moment: whoever tells of that is told the mounts as they are then.
            let _ = self.write_message(directory, &self.message(id, mounts));
        }
    }

    /// A session's directory goes, or is made ready for the next one. No process looks there any more.
    fn retire(&self, session: &Session) {
        let mut ready = self.ready();
        let has_place = self.stage_socket.parent() == Some(&self.directory);
        if self.is_closed.load(Ordering::Relaxed) || !has_place || !ready.lacks(&session.made_for) {
            drop(ready);
            return session.remove();
        }
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner).clone();
        session.own_part().is_over = true;
        let id = self.next_id();
        let written = self.write_message(&session.directory, &self.message(&id, &told));
        let offer = || ready.offer(id, &session.directory, session.made_for.clone(), &self.stage_socket);
        if written.and_then(|()| offer()).is_err() {
            session.remove();
        }
    }

    /// Tells a session of commands that stay here, before they come.
    pub fn foretell(&self, session: &Session, digests: impl Iterator<Item = Digest>) {
        let digests: Vec<u8> = digests.flat_map(Digest::bytes).collect();
        if digests.is_empty() || session.is_waited_for() {
            return;
        }
        let mut own = session.own_part();
        if own.is_unforeseeable {
            return;
        }
        own.foreseen = digests;
        own.foreseen_until_ns = clock::monotonic_ns().saturating_add(HOLDS_NS);
        drop(own);
        self.tell_own_part(session);
    }

    /// A command of the session is about to change something on a server: what volumes have at hand of it then is not
    /// what they had when it was foreseen that others find all at hand.
    pub fn foretell_no_more(&self, session: &Session) {
        let mut own = session.own_part();
        own.is_unforeseeable = true;
        let was_foreseen = !std::mem::take(&mut own.foreseen).is_empty();
        drop(own);
        if was_foreseen {
            self.tell_own_part(session);
        }
    }

    /// Has every command of the session ask that posh knows, or only those that touch a mount.
    pub fn have_all_ask(&self, session: &Session, is_asked_by_all: bool) {
        session.own_part().is_asked_by_all = is_asked_by_all;
        self.tell_own_part(session);
    }

    fn tell_own_part(&self, session: &Session) {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Err(error) = self.write_file(session, &told) {
            tracing::debug!(session = session.id, %error, "cannot tell a session what is foreseen");
        }
    }

    /// Takes back what is ready for the next shell. False: one has just taken it, and comes.
    #[must_use]
    pub fn withdraw(&self) -> bool {
        self.ready().withdraw()
    }

    /// From now on no shell finds anything ready: this gateway ends.
    pub fn offer_nothing(&self) {
        let mut ready = self.ready();
        self.is_closed.store(true, Ordering::Relaxed);
        ready.withdraw();
    }

    fn ready(&self) -> MutexGuard<'_, Ready> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes every session's directory.
    pub fn close_all(&self) {
        self.offer_nothing();
        std::mem::take(&mut *self.lock()).into_values().for_each(|s| s.remove());
        self.announce();
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Session>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn announce(&self) {
        let count = self.lock().len();
        self.changed.send_replace(count);
    }

    fn write_file(&self, session: &Session, mounts: &Mounts) -> io::Result<()> {
        let message = self.message(&session.id, mounts);
        let is_told_of = session.is_waited_for();
        let own = session.own_part();
        if own.is_over {
            return Ok(());
        }
        self.write_message(
            &session.directory,
            &SessionFile {
                always_enlist: session.explain || own.is_asked_by_all,
                trace: session.trace.is_some(),
                // What is not enlisted is in no report.
                asks: message.asks && !is_told_of,
                foreseen: own.foreseen.clone().into(),
                foreseen_until_ns: own.foreseen_until_ns,
                ..message
            },
        )
    }

    /// For a session that nobody tells of afterwards.
    fn message(&self, id: &str, mounts: &Mounts) -> SessionFile {
        SessionFile {
            session: id.to_owned(),
            socket: self.stage_socket.as_os_str().as_bytes().to_vec().into(),
            always_enlist: false,
            trace: false,
            prefixes: mounts.prefixes.clone().into(),
            asks: mounts.at_hand,
            volumes: mounts.volumes,
            ..SessionFile::default()
        }
    }

    /// Stages read this file at any moment: it is replaced whole, and only by another.
    fn write_message(&self, directory: &Path, message: &SessionFile) -> io::Result<()> {
        let (file, message) = (directory.join(FILE), message.encode_to_vec());
        if fs::read(&file).is_ok_and(|before| before == message) {
            return Ok(());
        }
        let new = directory.join("session.new");
        fs::write(&new, message)?;
        fs::rename(new, file)
    }

    async fn close_at_end(self: Arc<Self>, session: Arc<Session>, pidfd: AsyncFd<OwnedFd>) {
        // A pidfd becomes readable when the process ends (pidfd_open(2)).
        let _ = pidfd.ready(Interest::READABLE).await;
        session.head_start.end();
        // A shell knows by heart where it has found a command.
        while let Some(left) = session.left_behind().await {
            let _ = left.ready(Interest::READABLE).await;
        }
        self.retire(&session);
        self.lock().remove(&session.id);
        self.announce();
    }
}

/// Which of these descriptors of a process are pipes, by inode.
fn pipes_of<const N: usize>(pid: Pid, descriptors: [u32; N]) -> Vec<u64> {
    let links = descriptors.into_iter().filter_map(|fd| fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok());
    links.filter_map(|link| pipe_inode(&link)).collect()
}

/// Processes, this one aside, one of whose variables is `directory`, or a list of
/// directories with one in it: its shims, or what the exec hook is told. Those of
/// others can't be looked at.
fn processes_with(directory: &Path) -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<Pid>().ok());
    let names_it = |pid: &Pid| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let values = environment.split(|b| *b == 0).filter_map(|v| v.splitn(2, |b| *b == b'=').nth(1));
        let paths = values.flat_map(|value| value.split(|b| *b == b':'));
        paths
            .filter(|path| path.first() == Some(&b'/'))
            .any(|path| Path::new(OsStr::from_bytes(path)).starts_with(directory))
    };
    pids.filter(|pid| *pid != std::process::id()).filter(names_it).collect()
}

/// Becomes readable when a process ends (pidfd_open(2)).
pub(crate) fn watch(pid: Pid) -> Result<AsyncFd<OwnedFd>, SessionError> {
    let error = |source| SessionError::Watch { pid, source };
    let raw =
        rustix::process::Pid::from_raw(pid.cast_signed()).ok_or_else(|| error(io::ErrorKind::InvalidInput.into()))?;
    let pidfd = pidfd_open(raw, PidfdFlags::NONBLOCK).map_err(|e| error(e.into()))?;
    #[expect(deprecated, reason = "the replacement is unsafe; an OwnedFd owns its descriptor for its whole life")]
    AsyncFd::with_interest(pidfd, Interest::READABLE).map_err(error)
}

impl Session {
    /// posh stays to tell of what happened: the shell is its child.
    #[must_use]
    pub fn is_waited_for(&self) -> bool {
        self.explain || self.trace.is_some()
    }

    /// Whether a command of that name comes here.
    #[must_use]
    pub fn has_shim(&self, name: &str) -> bool {
        fs::symlink_metadata(self.directory.join(SHIMS).join(name)).is_ok()
    }

    /// A process whose commands come to this session: a job that the shell did not wait for.
    async fn left_behind(&self) -> Option<AsyncFd<OwnedFd>> {
        let directory = self.directory.clone();
        // With many processes this takes some milliseconds.
        let found = tokio::task::spawn_blocking(move || processes_with(&directory));
        found.await.ok()?.into_iter().find_map(|pid| watch(pid).ok())
    }

    fn own_part(&self) -> MutexGuard<'_, OwnPart> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove(&self) {
        self.own_part().is_over = true;
        let removed = self.directory.parent().map_or(Ok(()), |top| removal::remove(&self.directory, top));
        if let Err(error) = removed {
            tracing::warn!(directory = %self.directory.display(), %error, "cannot remove a session directory");
        }
    }
}

/// Makes a session's directory with its shims.
fn make_shims(directory: &Path, path: &Path, stage_program: &Path, commands: &[String]) -> io::Result<()> {
    let shims = directory.join(SHIMS);
    fs::DirBuilder::new().mode(0o700).create(directory)?;
    fs::DirBuilder::new().mode(0o700).create(&shims)?;
    pipe_notes::make(directory)?;
    symlink(stage_program, directory.join(STAGE))?;
    let names = |c: &&String| has_command(path.as_os_str(), c, stage_program);
    commands.iter().filter(names).try_for_each(|name| symlink(stage_program, shims.join(name)))
}

/// Whether a command of that name, other than a shim, is on PATH.
fn has_command(path: &OsStr, name: &str, stage_program: &Path) -> bool {
    std::env::split_paths(path).any(|directory| {
        let file = directory.join(name);
        let is_command = fs::metadata(&file).is_ok_and(|m| m.is_file() && m.mode() & 0o111 != 0);
        is_command && !fs::read_link(&file).is_ok_and(|target| target == stage_program)
    })
}
