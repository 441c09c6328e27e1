//! Sessions: one for each shell that `posh` started. A session owns a directory
//! of shims and the file that tells a stage where to ask; both go away when the
//! shell's process ends, however it ends, and none that it left behind looks there.

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
};

use posh_proto::stage::SessionFile;
use prost::Message;
use rustix::process::{PidfdFlags, pidfd_open};
use tokio::io::{Interest, unix::AsyncFd};

use crate::{
    assembly::{is_below, pipe_inode},
    enlisted::Pid,
    pipe_notes,
    report::Reports,
    trace::Trace,
};

/// In a session's directory.
const SHIMS: &str = "bin";

/// Around the gateway's process, the name of a directory that no session has yet.
const SPARE_PREFIX: &str = "session-";
const SPARE_SUFFIX: &str = "-spare";

/// What every session is told of the mounts.
#[derive(Debug, Clone, Default)]
pub struct Mounts {
    /// As fs-mapper writes them.
    pub prefixes: Vec<u8>,
    /// Commands may find all that they use at hand, so that asking first is worth it.
    pub at_hand: bool,
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
    /// Pipes that its shell writes to, by inode.
    outputs: Vec<u64>,
    directory: PathBuf,
    made_for: MadeFor,
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

/// The shims of a session that has ended, for the next one, so that it needs not wait until there are some.
#[derive(Debug)]
struct Spare {
    directory: PathBuf,
    made_for: MadeFor,
}

/// What shims depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
struct MadeFor {
    path: PathBuf,
    stage_program: PathBuf,
    /// Of each directory of the path, when it was changed last.
    changes: Vec<Option<(i64, i64)>>,
}

impl MadeFor {
    fn of(request: &Request) -> Self {
        let changed = |directory: PathBuf| fs::metadata(directory).ok().map(|m| (m.mtime(), m.mtime_nsec()));
        let changes = std::env::split_paths(&request.path).map(changed).collect();
        Self { path: request.path.clone(), stage_program: request.stage_program.clone(), changes }
    }
}

/// All sessions of this gateway.
#[derive(Debug)]
pub struct Sessions {
    directory: PathBuf,
    stage_socket: PathBuf,
    next: AtomicU64,
    open: Mutex<BTreeMap<String, Arc<Session>>>,
    /// For whoever comes next.
    spare: Mutex<Option<Spare>>,
    /// There is no next one.
    is_closed: AtomicBool,
    changed: tokio::sync::watch::Sender<usize>,
}

impl Sessions {
    /// Sessions whose directories lie below `directory` (0700).
    #[must_use]
    pub fn new(directory: PathBuf, stage_socket: PathBuf) -> Arc<Self> {
        let changed = tokio::sync::watch::Sender::new(0);
        remove_spares_of_the_dead(&directory);
        Arc::new(Self {
            directory,
            stage_socket,
            next: AtomicU64::new(0),
            open: Mutex::default(),
            spare: Mutex::default(),
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
        commands: &Arc<Vec<String>>,
        mounts: &Mounts,
    ) -> Result<(Arc<Session>, PathBuf), SessionError> {
        let pidfd = watch(request.pid)?;
        let id = format!("{}-{}", std::process::id(), self.next.fetch_add(1, Ordering::Relaxed));
        let session = Arc::new(Session {
            directory: self.directory.join(format!("session-{id}")),
            id: id.clone(),
            pid: request.pid,
            explain: request.explain,
            split: request.split,
            reports: Reports::default(),
            trace: request.trace.then(Arc::default),
            outputs: outputs_of(request.pid),
            made_for: MadeFor::of(&request),
        });
        let shims = session.directory.join(SHIMS);
        let made = match self.take_spare(&session) {
            true => Ok(()),
            false => make_shims(&session.directory, &session.made_for, commands),
        };
        let made = made.and_then(|()| self.write_file(&session, mounts));
        let made = made.and_then(|()| self.note_input(&session));
        if let Err(source) = made {
            session.remove();
            return Err(SessionError::Directory { path: session.directory.clone(), source });
        }
        self.lock().insert(id, Arc::clone(&session));
        self.announce();
        tokio::spawn(Arc::clone(self).close_at_end(Arc::clone(&session), pidfd));
        Ok((session, shims))
    }

    /// What is piped to a shell comes from outside, unless it is one within a session: no command needs to wait for a
    /// word of who writes it.
    fn note_input(&self, session: &Session) -> io::Result<()> {
        let input = fs::read_link(format!("/proc/{}/fd/0", session.pid)).ok().and_then(|link| pipe_inode(&link));
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
        self.lock().values().map(|s| s.made_for.stage_program.clone()).collect()
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
    }

    /// Shims for a session that begins, if there are any that are right for it.
    fn take_spare(&self, session: &Session) -> bool {
        let spare = self.spare().take_if(|spare| spare.made_for == session.made_for);
        let gives = |spare: &Spare| fs::rename(&spare.directory, &session.directory).inspect_err(|_| spare.remove());
        spare.is_some_and(|spare| gives(&spare).is_ok())
    }

    /// A session's shims go, or are kept for the next one. No process looks there any more.
    fn retire(&self, session: &Session) {
        let mut spare = self.spare();
        let is_of_use = spare.as_ref().is_none_or(|spare| spare.made_for != session.made_for);
        if self.is_closed.load(Ordering::Relaxed) || !is_of_use {
            drop(spare);
            return session.remove();
        }
        spare.take().inspect(Spare::remove);
        let directory = self.directory.join(format!("{SPARE_PREFIX}{}{SPARE_SUFFIX}", std::process::id()));
        match fs::rename(&session.directory, &directory) {
            Ok(()) => *spare = Some(Spare { directory, made_for: session.made_for.clone() }),
            Err(_) => session.remove(),
        }
    }

    fn spare(&self) -> MutexGuard<'_, Option<Spare>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes every session's directory.
    pub fn close_all(&self) {
        let mut spare = self.spare();
        self.is_closed.store(true, Ordering::Relaxed);
        spare.take().inspect(Spare::remove);
        drop(spare);
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

    /// Stages read this file at any moment: it is replaced whole.
    fn write_file(&self, session: &Session, mounts: &Mounts) -> io::Result<()> {
        let message = SessionFile {
            session: session.id.clone(),
            socket: self.stage_socket.as_os_str().as_bytes().to_vec().into(),
            always_enlist: session.explain,
            trace: session.trace.is_some(),
            prefixes: mounts.prefixes.clone().into(),
            // What is not enlisted is in no report.
            asks: mounts.at_hand && !session.explain && session.trace.is_none(),
        };
        let new = session.directory.join("session.new");
        fs::write(&new, message.encode_to_vec())?;
        fs::rename(new, session.directory.join("session"))
    }

    async fn close_at_end(self: Arc<Self>, session: Arc<Session>, pidfd: AsyncFd<OwnedFd>) {
        // A pidfd becomes readable when the process ends (pidfd_open(2)).
        let _ = pidfd.ready(Interest::READABLE).await;
        // A shell knows by heart where it has found a command.
        while let Some(left) = session.left_behind().await {
            let _ = left.ready(Interest::READABLE).await;
        }
        self.retire(&session);
        self.lock().remove(&session.id);
        self.announce();
    }
}

/// The pipes that are a process's output and errors, by inode.
fn outputs_of(pid: Pid) -> Vec<u64> {
    let links = [1, 2].into_iter().filter_map(|fd| fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok());
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
    fn is_waited_for(&self) -> bool {
        self.explain || self.trace.is_some()
    }

    /// A process whose commands come to this session: a job that the shell did not wait for.
    async fn left_behind(&self) -> Option<AsyncFd<OwnedFd>> {
        let directory = self.directory.clone();
        // With many processes this takes some milliseconds.
        let found = tokio::task::spawn_blocking(move || processes_with(&directory));
        found.await.ok()?.into_iter().find_map(|pid| watch(pid).ok())
    }

    fn remove(&self) {
        if let Err(error) = fs::remove_dir_all(&self.directory) {
            tracing::warn!(directory = %self.directory.display(), %error, "cannot remove a session directory");
        }
    }
}

impl Spare {
    fn remove(&self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// What gateways that were killed had ready for a next session.
fn remove_spares_of_the_dead(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(SPARE_PREFIX)?.strip_suffix(SPARE_SUFFIX));
        let owner = number.and_then(|number| number.parse::<Pid>().ok());
        if owner.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Makes a session's directory with its shims.
fn make_shims(directory: &Path, made_for: &MadeFor, commands: &[String]) -> io::Result<()> {
    let shims = directory.join(SHIMS);
    fs::DirBuilder::new().mode(0o700).create(directory)?;
    fs::DirBuilder::new().mode(0o700).create(&shims)?;
    pipe_notes::make(directory)?;
    let names = |c: &&String| has_command(made_for.path.as_os_str(), c, &made_for.stage_program);
    commands.iter().filter(names).try_for_each(|name| symlink(&made_for.stage_program, shims.join(name)))
}

/// Whether a command of that name, other than a shim, is on PATH.
fn has_command(path: &OsStr, name: &str, stage_program: &Path) -> bool {
    std::env::split_paths(path).any(|directory| {
        let file = directory.join(name);
        let is_command = fs::metadata(&file).is_ok_and(|m| m.is_file() && m.mode() & 0o111 != 0);
        is_command && !fs::read_link(&file).is_ok_and(|target| target == stage_program)
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    const NOBODY: Pid = u32::MAX - 1;

    #[tokio::test]
    async fn a_session_takes_what_was_left_by_one_with_its_path_only() {
        let directory = tempfile::tempdir().unwrap();
        let [path, other] = ["one", "other"].map(|name| directory.path().join(name));
        for (directory, name) in [(&path, "cat"), (&other, "grep")] {
            fs::create_dir(directory).unwrap();
            fs::copy("/proc/self/exe", directory.join(name)).unwrap();
        }
        let left = directory.path().join(format!("{SPARE_PREFIX}{NOBODY}{SPARE_SUFFIX}"));
        fs::create_dir(&left).unwrap();
        let sessions = Sessions::new(directory.path().to_owned(), "/socket".into());
        assert!(!left.exists());
        let commands = Arc::new(vec!["cat".to_owned(), "grep".to_owned()]);
        // A shell of its own for each, its directory's inode and what is in it.
        let open = |path: &Path| {
            let shell = std::process::Command::new("sleep").arg("100").spawn().unwrap();
            let (pid, stage_program) = (shell.id(), "/posh-stage".into());
            let request =
                Request { pid, explain: false, trace: false, split: None, path: path.to_owned(), stage_program };
            let (session, shims) = sessions.open(request, &commands, &Mounts::default()).unwrap();
            let names = fs::read_dir(&shims).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let names: Vec<_> = names.collect();
            (shell, session.directory.clone(), fs::metadata(&session.directory).unwrap().ino(), names)
        };
        let close = async |(mut shell, shims, ..): (std::process::Child, PathBuf, u64, Vec<String>)| {
            shell.kill().unwrap();
            shell.wait().unwrap();
            let began = Instant::now();
            while shims.exists() || sessions.spare().is_none() {
                assert!(began.elapsed() < Duration::from_secs(10), "no spare");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let (first, second) = (open(&path), open(&path));
        assert_eq!((&first.3, &second.3), (&vec!["cat".to_owned()], &vec!["cat".to_owned()]));
        let inode = first.2;
        assert_ne!(second.2, inode);
        close(first).await;
        close(second).await;
        let third = open(&path);
        assert_eq!((third.2, &third.3), (inode, &vec!["cat".to_owned()]));
        let fourth = open(&other);
        assert_eq!(fourth.3, ["grep"]);
        close(third).await;
        close(fourth).await;
        // A program that was installed meanwhile.
        fs::copy("/proc/self/exe", other.join("cat")).unwrap();
        let fifth = open(&other);
        assert_eq!(fifth.3.len(), 2);
        let inode = fifth.2;
        close(fifth).await;
        let sixth = open(&other);
        assert_eq!(sixth.2, inode);
        close(sixth).await;
        sessions.close_all();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }
}
