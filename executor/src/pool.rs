//! The runners: one per mount table, started when first needed, ended when idle.
//!
//! Making a namespace costs some milliseconds and a dozen mounts, forking inside one a fraction of
//! that. The key of a runner covers all that its view is made of ([`key`]): the next run sees what
//! was mounted, unmounted or remounted on the server.

mod key;

use std::{
    collections::{BTreeSet, HashMap},
    ffi::OsString,
    fs,
    io::{self, ErrorKind},
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::{ffi::OsStringExt as _, net::UnixStream as StdUnixStream},
    },
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::BytesMut;
use nix::unistd::mkdtemp;
use posh_proto::{
    executor::{ClientFile, MountPoint, rejected::Kind},
    frame,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, Interest},
    net::UnixStream,
    process::Command,
    task::JoinHandle,
};

pub use self::key::ExportRoot;
use self::key::{MadeOf, key_of};
use crate::{
    Config, Export,
    callers::Caller,
    error::Refusal,
    hidden,
    load::Limit,
    runner::wire::{
        Bounds, ConfinementReport, DirectoryId, Isolation, ViewMount, ViewReply, ViewSpec,
        ViewUser, send_descriptors,
    },
};

/// A runner without runs for this long is ended.
const IDLE: Duration = Duration::from_secs(300);

/// Interval of the search for idle runners.
const RETIRE_INTERVAL: Duration = Duration::from_secs(10);

/// Mount tables served at a time; each is two processes and some twenty mounts.
const MAX_RUNNERS: usize = 64;

/// Runners that one identity has in use: each has temporary files in memory (`tmp_bytes`). A
/// workstation has one mount table, and a view for each set of configuration files that its
/// commands read.
const MAX_VIEWS_OF_ONE: usize = 6;

/// Least memory for temporary files, enough for small ones, in any view.
const LEAST_TMP_BYTES: u64 = 16 << 20;

/// Building a view takes milliseconds, unless a file system it touches hangs.
const BUILD_TIMEOUT: Duration = Duration::from_secs(10);

/// Attempts at making a view while mounts change.
const ATTEMPTS: usize = 4;

/// Time until a runner's guard has noticed the death of its keeper.
const DEATH_TIMEOUT: Duration = Duration::from_millis(200);

/// The owner of all runners.
pub struct Pool {
    program: PathBuf,
    isolation: Isolation,
    no_namespaces: Option<String>,
    reached: ConfinementReport,
    bounds: Bounds,
    /// The soft limit of open files that commands start with.
    open_files: u64,
    slots: Mutex<HashMap<Vec<u8>, Arc<Slot>>>,
    /// Paths that no view shows by their own names.
    hidden: Mutex<Vec<Vec<u8>>>,
}

/// A place for one runner, also while that is being started.
struct Slot {
    /// The identity that it was made for.
    holder: Option<String>,
    /// Number of halvings of its temporary files' bound, against that of its identity's first view:
    /// so all views of one identity have less than twice `tmp_bytes`, however many there are.
    tmp_halves: u32,
    runner: tokio::sync::Mutex<Option<Runner>>,
    runs: AtomicUsize,
    last_used: Mutex<Instant>,
}

/// A running runner; dropping it closes the control socket, which ends it. It sends nothing more on
/// the socket: readable means that it has ended.
struct Runner {
    control: UnixStream,
    reached: ConfinementReport,
    directories: Vec<DirectoryId>,
}

/// Keeps a runner from being retired while a run is on it.
pub struct Lease(Arc<Slot>);

impl Lease {
    /// A lease of a runner that is not started, and a count of its runs.
    #[cfg(test)]
    pub fn of_test() -> (Self, impl Fn() -> usize) {
        let slot = Arc::new(Slot::of(None, 0, 1));
        (Self(slot.clone()), move || slot.runs.load(Ordering::Relaxed))
    }

    /// After a run was lost before its start: forgets the runner if it is dead, which its guard
    /// reports within moments.
    pub async fn forget_if_dead(&self) {
        let mut runner = self.0.runner.lock().await;
        if let Some(suspect) = runner.as_ref()
            && tokio::time::timeout(DEATH_TIMEOUT, suspect.control.readable()).await.is_ok()
        {
            *runner = None;
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        *self.0.last_used.lock().expect("not poisoned") = Instant::now();
        self.0.runs.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Pool {
    /// Finds out, by trying, how far runs can be isolated on this machine.
    pub async fn new(config: &Config, open_files: u64) -> Self {
        let program =
            config.runner_program.clone().unwrap_or_else(|| PathBuf::from("/proc/self/exe"));
        let confinement = &config.confinement;
        let bounds = Bounds {
            processes: confinement.max_processes,
            memory_bytes: confinement.max_memory_bytes,
            file_bytes: confinement.max_file_bytes,
            tmp_bytes: confinement.tmp_bytes,
            open_files: confinement.max_open_files,
        };
        let mut pool = Self {
            program,
            isolation: Isolation::Nothing,
            no_namespaces: None,
            reached: ConfinementReport::default(),
            bounds,
            open_files,
            slots: Mutex::default(),
            hidden: Mutex::default(),
        };
        pool.hide(hidden::paths(config));
        for isolation in [Isolation::MountsAndProcesses, Isolation::Mounts, Isolation::Nothing] {
            pool.isolation = isolation;
            match pool
                .start(&ViewSpec { isolation: isolation.into(), bounds, ..ViewSpec::default() })
                .await
            {
                Ok(runner) => {
                    pool.reached = runner.reached;
                    if isolation != Isolation::Nothing {
                        pool.no_namespaces = None;
                    }
                    return pool;
                }
                // The first reason helps most: that attempt asked for most.
                Err(refusal) => {
                    pool.no_namespaces = pool.no_namespaces.take().or(Some(refusal.message))
                }
            }
        }
        pool
    }

    /// Hides these paths in new views by their own names, besides those of before: running commands
    /// may still use a directory that is no export any more.
    pub fn hide(&self, paths: BTreeSet<PathBuf>) {
        let mut hidden = self.hidden.lock().expect("not poisoned");
        hidden.extend(paths.into_iter().map(|path| path.into_os_string().into_vec()));
        hidden.sort_unstable();
        hidden.dedup();
    }

    /// Confinement that commands have.
    pub fn confinement(&self) -> ConfinementReport {
        self.reached.clone()
    }

    /// Reason why runs can't see the workstation's paths, if they can't.
    pub fn no_namespaces(&self) -> Option<&str> {
        self.no_namespaces.as_deref()
    }

    /// Begins to compute the view of a run of `caller` that sees `mounts`: its exports' directories
    /// are accessed meanwhile, off the runtime's threads, since an export may be on a network file
    /// system that hangs.
    pub fn identify(
        &self,
        caller: &Caller,
        mounts: &[MountPoint],
        client_files: &[ClientFile],
    ) -> Result<Identifying, Refusal> {
        let spec = ViewSpec {
            isolation: self.isolation.into(),
            mounts: view_mounts(caller, mounts)?,
            client_files: client_files.to_vec(),
            user: caller.user.as_ref().map(Into::into),
            bounds: self.bounds.with_memory(caller.limits.memory_bytes),
            hidden: self.hidden.lock().expect("not poisoned").clone(),
            ..ViewSpec::default()
        };
        let holder = caller.identity.clone();
        let is_used = |export: &&Export| mounts.iter().any(|mount| mount.export == export.name);
        let exports = caller.exports.iter().filter(is_used).cloned().collect();
        Ok(Identified::begin(spec, holder, exports))
    }

    /// Opens a supervisor for one run with this view. Only runs with the same user, exports and
    /// rights share a runner: all that is part of the key.
    pub async fn open(&self, identified: &Identified) -> Result<(UnixStream, Lease), Refusal> {
        match self.open_one(identified).await? {
            Some(opened) => return Ok(opened),
            None => {
                tracing::info!("the mounts have changed while a view was made; it is made anew")
            }
        }
        for _ in 1..ATTEMPTS {
            let Identified { spec, holder, exports, .. } = identified;
            let again =
                Identified::begin(spec.clone(), holder.clone(), exports.clone()).wait().await?;
            // What is certain of the first ones is not of others.
            if again.roots() != identified.roots() {
                let why = "another directory came to an export's path while the run was started";
                return Err(Refusal::new(Kind::Stale, why));
            }
            if let Some(opened) = self.open_one(&again).await? {
                return Ok(opened);
            }
        }
        let why = "what is mounted on the server changes all the time; no view of it is certain";
        Err(Refusal::new(Kind::Stale, why))
    }

    /// Returns `None` if the new view is not the one that its key stands for.
    async fn open_one(
        &self,
        identified: &Identified,
    ) -> Result<Option<(UnixStream, Lease)>, Refusal> {
        let Identified { spec, key, holder, made_of, .. } = identified;
        let lease = self.slot(key.clone(), holder.as_ref())?;
        let (ours, theirs) = StdUnixStream::pair().map_err(|error| spawn_failed(&error))?;
        let mut runner = lease.0.runner.lock().await;
        // A runner may have died since the last run; a fresh one has not.
        for is_last in [false, true] {
            let alive = match runner.as_ref() {
                Some(alive) => alive,
                None => {
                    let made = self.start(&with_less_tmp(spec, lease.0.tmp_halves)).await?;
                    if !made_of.is_still(&made.directories) {
                        return Ok(None);
                    }
                    runner.insert(made)
                }
            };
            match alive.hand_over(&theirs).await {
                Ok(()) => break,
                Err(error) if is_last => return Err(spawn_failed(&error)),
                Err(_) => *runner = None,
            }
        }
        drop(runner);
        ours.set_nonblocking(true).map_err(|error| spawn_failed(&error))?;
        Ok(Some((UnixStream::from_std(ours).map_err(|error| spawn_failed(&error))?, lease)))
    }

    /// Ends idle runners, for ever.
    pub async fn retire_idle(&self) {
        let mut interval = tokio::time::interval(RETIRE_INTERVAL);
        loop {
            interval.tick().await;
            self.end_idle_for(IDLE);
        }
    }

    /// Ends runners without runs for at least that long.
    pub fn end_idle_for(&self, time: Duration) {
        self.slots.lock().expect("not poisoned").retain(|_, slot| !slot.is_idle_for(time));
    }

    fn slot(&self, key: Vec<u8>, holder: Option<&String>) -> Result<Lease, Refusal> {
        let mut slots = self.slots.lock().expect("not poisoned");
        if !slots.contains_key(&key) {
            make_room(&mut slots, holder)?;
        }
        let tmp_halves = free_halves(&slots, holder);
        let slot =
            slots.entry(key).or_insert_with(|| Arc::new(Slot::of(holder.cloned(), tmp_halves, 0)));
        slot.runs.fetch_add(1, Ordering::Relaxed);
        Ok(Lease(slot.clone()))
    }

    async fn start(&self, spec: &ViewSpec) -> Result<Runner, Refusal> {
        let scratch = Scratch::new().map_err(|error| spawn_failed(&error))?;
        let spec = ViewSpec {
            scratch: scratch.0.clone().into_os_string().into_vec(),
            open_files: self.open_files,
            ..spec.clone()
        };
        let (ours, theirs) = StdUnixStream::pair().map_err(|error| spawn_failed(&error))?;
        ours.set_nonblocking(true).map_err(|error| spawn_failed(&error))?;
        let mut control = UnixStream::from_std(ours).map_err(|error| spawn_failed(&error))?;
        // The socket as standard input: nothing must be done between fork and exec,
        // so that std uses posix_spawn, and no other child can inherit it.
        let child = Command::new(&self.program)
            .arg("runner")
            .env_clear()
            .envs(posh_proto::rule::passed_on())
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn();
        let mut child = child.map_err(|error| spawn_failed(&error))?;
        tokio::spawn(async move {
            let _ = child.wait().await;
            drop(scratch);
        });
        let reply = tokio::time::timeout(BUILD_TIMEOUT, introduce(&mut control, &spec)).await;
        let reply = reply
            .unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
            .map_err(|error| spawn_failed(&error))?;
        if reply.error.is_empty() {
            return Ok(Runner { control, reached: reply.reached, directories: reply.directories });
        }
        Err(Refusal::new(Kind::try_from(reply.kind).unwrap_or(Kind::NoNamespace), reply.error))
    }
}

/// The least number of halvings that no view of `holder` has.
fn free_halves(slots: &HashMap<Vec<u8>, Arc<Slot>>, holder: Option<&String>) -> u32 {
    let own =
        || slots.values().filter(|slot| slot.holder.as_ref() == holder).map(|slot| slot.tmp_halves);
    (0..).find(|halves| own().all(|taken| taken != *halves)).unwrap_or_default()
}

fn with_less_tmp(spec: &ViewSpec, halves: u32) -> ViewSpec {
    let tmp_bytes = spec
        .bounds
        .tmp_bytes
        .checked_shr(halves)
        .unwrap_or_default()
        .max(spec.bounds.tmp_bytes.min(LEAST_TMP_BYTES));
    ViewSpec { bounds: Bounds { tmp_bytes, ..spec.bounds }, ..spec.clone() }
}

/// Makes room for one more view of `holder`. Views in use can't be ended, and alone count as
/// shares; idle ones are evicted, first those of the identity that has most of them.
fn make_room(
    slots: &mut HashMap<Vec<u8>, Arc<Slot>>,
    holder: Option<&String>,
) -> Result<(), Refusal> {
    // Callers without identity do not share.
    let is_shared = holder.is_some();
    let in_use = || slots.values().filter(|slot| !slot.is_idle_for(Duration::ZERO));
    let own = in_use().filter(|slot| slot.holder.as_ref() == holder).count();
    let own_limit = is_shared.then_some(MAX_VIEWS_OF_ONE);
    if let Some(why) = limit_of_views(in_use().count(), own, own_limit)
        .refusal(holder.map_or("-", String::as_str), is_shared)
    {
        return Err(Refusal::new(Kind::Overloaded, why));
    }
    // Idle ones count, too: they take memory, though no run waits for them.
    while is_shared
        && slots.values().filter(|slot| slot.holder.as_ref() == holder).count() >= MAX_VIEWS_OF_ONE
    {
        let idle = slots
            .iter()
            .filter(|(_, slot)| slot.holder.as_ref() == holder && slot.is_idle_for(Duration::ZERO));
        let oldest = idle.min_by_key(|(_, slot)| *slot.last_used.lock().expect("not poisoned"));
        let Some(oldest) = oldest.map(|(key, _)| key.clone()) else { break };
        slots.remove(&oldest);
    }
    while slots.len() >= MAX_RUNNERS {
        let mut idle: HashMap<&Option<String>, Vec<(Instant, &Vec<u8>)>> = HashMap::new();
        for (key, slot) in slots.iter().filter(|(_, slot)| slot.is_idle_for(Duration::ZERO)) {
            let last_used = *slot.last_used.lock().expect("not poisoned");
            idle.entry(&slot.holder).or_default().push((last_used, key));
        }
        let most = idle.into_values().max_by_key(Vec::len);
        let oldest = most.into_iter().flatten().min().map(|(_, key)| key.clone());
        let Some(oldest) = oldest else { break };
        slots.remove(&oldest);
    }
    Ok(())
}

fn limit_of_views(whole: usize, own: usize, own_limit: Option<usize>) -> Limit {
    Limit { name: "views (mount tables)", want: 1, own, own_limit, whole, whole_limit: MAX_RUNNERS }
}

/// A run's view while its exports are accessed.
pub struct Identifying(JoinHandle<Result<Identified, Refusal>>);

/// A run's view, and its key among the runners.
pub struct Identified {
    spec: ViewSpec,
    key: Vec<u8>,
    holder: Option<String>,
    /// Those that it shows.
    exports: Vec<Export>,
    made_of: MadeOf,
}

impl Identified {
    fn begin(spec: ViewSpec, holder: Option<String>, exports: Vec<Export>) -> Identifying {
        let identify = move || {
            exports.iter().try_for_each(Export::require_place)?;
            let (key, made_of) = key_of(&spec, holder.as_deref())?;
            Ok(Self { spec, key, holder, exports, made_of })
        };
        Identifying(tokio::task::spawn_blocking(identify))
    }

    /// The user that its commands run as, if one is configured.
    pub fn user(&self) -> Option<&ViewUser> {
        self.spec.user.as_ref()
    }

    /// The directories of its exports.
    pub fn roots(&self) -> &[ExportRoot] {
        &self.made_of.roots
    }
}

impl Identifying {
    /// Waits for the view, with a timeout.
    pub async fn wait(self) -> Result<Identified, Refusal> {
        match tokio::time::timeout(BUILD_TIMEOUT, self.0).await {
            Ok(Ok(done)) => done,
            Ok(Err(error)) => Err(spawn_failed(&error.into())),
            Err(_) => {
                Err(Refusal::new(Kind::UnknownExport, "an export's file system does not answer"))
            }
        }
    }
}

impl Slot {
    fn of(holder: Option<String>, tmp_halves: u32, runs: usize) -> Self {
        Self {
            holder,
            tmp_halves,
            runner: tokio::sync::Mutex::new(None),
            runs: AtomicUsize::new(runs),
            last_used: Mutex::new(Instant::now()),
        }
    }

    fn is_idle_for(&self, time: Duration) -> bool {
        self.runs.load(Ordering::Relaxed) == 0
            && self.last_used.lock().expect("not poisoned").elapsed() >= time
    }
}

impl Runner {
    async fn hand_over(&self, socket: &StdUnixStream) -> io::Result<()> {
        loop {
            self.control.writable().await?;
            let send = || send_descriptors(self.control.as_fd(), &[socket.as_raw_fd()]);
            match self.control.try_io(Interest::WRITABLE, send) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                other => return other,
            }
        }
    }
}

/// A runner's directory on disk; the runner's guard removes it, or else we do.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> io::Result<Self> {
        let template = fs::canonicalize(std::env::temp_dir())?.join("posh-executor-XXXXXX");
        Ok(Self(mkdtemp(&template)?))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn spawn_failed(error: &io::Error) -> Refusal {
    Refusal::new(Kind::SpawnFailed, format!("cannot start a runner: {error}"))
}

async fn introduce(control: &mut UnixStream, spec: &ViewSpec) -> io::Result<ViewReply> {
    let mut buffer = BytesMut::new();
    frame::encode(spec, &mut buffer);
    control.write_all(&buffer).await?;
    buffer.clear();
    loop {
        if let Some(reply) = frame::decode(&mut buffer).map_err(io::Error::other)? {
            return Ok(reply);
        }
        if control.read_buf(&mut buffer).await? == 0 {
            return Err(io::Error::other("it ended while it was being set up"));
        }
    }
}

/// The mounts with their exports' directories, shallow paths first.
fn view_mounts(caller: &Caller, mounts: &[MountPoint]) -> Result<Vec<ViewMount>, Refusal> {
    let mut views = Vec::with_capacity(mounts.len());
    for mount in mounts {
        let path = PathBuf::from(OsString::from_vec(mount.path.to_vec()));
        // Components drop `.`, double and trailing slashes: with any of these the comparison fails.
        if !path.is_absolute()
            || path.components().collect::<PathBuf>().as_os_str() != path.as_os_str()
            || has_parent(&path)
        {
            return Err(Refusal::protocol(format!(
                "mount path {} is not absolute and plain",
                path.display()
            )));
        }
        let Some(export) = caller.exports.iter().find(|export| export.name == mount.export) else {
            let unknown = || format!("this executor has no export `{}`", mount.export);
            let why = caller.why_unserved(&mount.export).unwrap_or_else(unknown);
            return Err(Refusal::new(Kind::UnknownExport, why));
        };
        // Checked as text, before any access. The lookup with the caller's rights makes sure that
        // it leads nowhere else.
        let sub_path = PathBuf::from(OsString::from_vec(mount.sub_path.to_vec()));
        if sub_path.is_absolute() || has_parent(&sub_path) {
            let message =
                format!("{} does not lie below the export `{}`", sub_path.display(), mount.export);
            return Err(Refusal::new(Kind::UnknownExport, message));
        }
        views.push(ViewMount {
            path: mount.path.to_vec(),
            directory: export.path.clone().into_os_string().into_vec(),
            sub_path: mount.sub_path.to_vec(),
            read_only: export.read_only || mount.read_only,
            exec: export.exec,
            no_symlinks: mount.no_symlinks,
            one_file_system: mount.one_file_system,
            no_holes: mount.no_holes,
        });
    }
    views.sort_by(|one, other| one.path.cmp(&other.path));
    match views.windows(2).find(|pair| pair[0].path == pair[1].path) {
        Some(pair) => {
            let path = String::from_utf8_lossy(&pair[0].path);
            Err(Refusal::protocol(format!("two mounts at {path}")))
        }
        None => Ok(views),
    }
}

fn has_parent(path: &Path) -> bool {
    path.components().any(|component| component == std::path::Component::ParentDir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Views(HashMap<Vec<u8>, Arc<Slot>>, usize);

    impl Views {
        fn add(&mut self, holder: &str, runs: usize) -> Result<(), Refusal> {
            make_room(&mut self.0, Some(&holder.to_owned()))?;
            let tmp_halves = free_halves(&self.0, Some(&holder.to_owned()));
            let slot = Slot::of(Some(holder.to_owned()), tmp_halves, runs);
            self.1 += 1;
            self.0.insert(self.1.to_ne_bytes().to_vec(), Arc::new(slot));
            Ok(())
        }

        fn fill(&mut self, holder: &str, runs: usize) -> usize {
            (0..2 * MAX_RUNNERS).take_while(|_| self.add(holder, runs).is_ok()).count()
        }

        fn of(&self, holder: &str) -> usize {
            self.0.values().filter(|slot| slot.holder.as_deref() == Some(holder)).count()
        }
    }

    #[test]
    fn one_identity_does_not_take_all_views() {
        let mut views = Views::default();
        for identity in ["ada", "bob", "eve"] {
            assert_eq!(views.fill(identity, 1), MAX_VIEWS_OF_ONE);
        }
        let refused = views.add("ada", 1).unwrap_err();
        assert_eq!(refused.kind, Kind::Overloaded);
        assert!(refused.message.contains("ada is at its limit of views"), "{refused}");
    }

    #[test]
    fn all_views_of_one_have_less_than_two_shares_of_temporary_files() {
        let mut views = Views::default();
        views.fill("eve", 1);
        assert_eq!(views.fill("ada", 1), MAX_VIEWS_OF_ONE);
        let own = views.0.values().filter(|slot| slot.holder.as_deref() == Some("ada"));
        let spec = ViewSpec {
            bounds: Bounds { tmp_bytes: 3 << 30, ..Bounds::default() },
            ..ViewSpec::default()
        };
        let sizes: Vec<u64> =
            own.map(|slot| with_less_tmp(&spec, slot.tmp_halves).bounds.tmp_bytes).collect();
        assert!(sizes.contains(&(3 << 30)) && sizes.iter().sum::<u64>() < 6 << 30, "{sizes:?}");
        let tiny = ViewSpec {
            bounds: Bounds { tmp_bytes: 9, ..Bounds::default() },
            ..ViewSpec::default()
        };
        assert_eq!(with_less_tmp(&tiny, 5).bounds.tmp_bytes, 9);
    }

    #[test]
    fn idle_views_go_first_and_never_those_in_use() {
        let mut views = Views::default();
        // An identity's own idle views make way for its new ones.
        assert_eq!((views.fill("ada", 0), views.of("ada")), (2 * MAX_RUNNERS, MAX_VIEWS_OF_ONE));
        assert!(views.add("eve", 0).is_ok());
        (0..MAX_RUNNERS)
            .for_each(|number| drop(views.add(&format!("{}", number / MAX_VIEWS_OF_ONE), 0)));
        assert_eq!(views.fill("bob", 1), MAX_VIEWS_OF_ONE);
        assert_eq!(
            (views.of("bob"), views.of("eve"), views.0.len()),
            (MAX_VIEWS_OF_ONE, 1, MAX_RUNNERS)
        );
        // An identity that has its share ends no view of another.
        assert!(views.add("bob", 1).is_err());
        assert_eq!(views.of("eve"), 1);
    }
}
