//! Snapshot of the sessions' live processes: pipe holders, and processes that may still act. Reads
//! only /proc (proc(5)), as the user that owns the processes.

mod live;
mod orphans;

use std::{
    collections::{HashMap, HashSet},
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use self::live::{
    descriptor_tables, hides_others, is_alive, is_pipe, living_thread, read_end, read_stat_of,
    read_system_call, ticks_after_boot, wait_channel,
};
pub use self::{
    live::{
        PipeEnd, Stat, children, is_below, pipe_inode, pipe_read_by, read_stat, substitution_above,
        waits_for_children,
    },
    orphans::{Orphans, processes_below},
};
use crate::enlisted::{Descriptor, Enlisted, Pid};

/// Processes whose descriptors were read at about the same time.
#[derive(Debug, Default)]
pub struct Snapshot {
    processes: HashMap<Pid, Process>,
    /// Shells of the sessions.
    roots: HashSet<Pid>,
    /// Processes that started a session with wanted descriptors, and their other descendants.
    outside: Vec<Process>,
    /// Other users' processes are hidden in /proc (mount option `hidepid`).
    hides_others: bool,
    /// Creation times of pipes, in clock ticks after boot, where needed and known.
    made: HashMap<u64, u64>,
}

/// One process.
#[derive(Debug, Clone)]
pub struct Process {
    /// Process ID.
    pub pid: Pid,
    /// Parent's process ID.
    pub parent: Pid,
    /// State letter of proc_pid_stat(5): R, S, D, Z, T, ... It is the first thread's, or another
    /// one's if that has ended.
    pub state: char,
    /// Path of its executable.
    pub executable: PathBuf,
    /// Session ID (setsid(2)).
    pub session: Pid,
    /// Time of its fork, in clock ticks after boot. `u64::MAX` if unreadable.
    pub started: u64,
    /// Its descriptors are unreadable for this user, as with a set-user-id program. It may hold
    /// anything that it can have inherited.
    pub is_opaque: bool,
    /// In the middle of its exit(2): it has no executable any more.
    pub ending: bool,
    /// Pipe ends that it holds, of the wanted ones.
    pub pipe_ends: Vec<PipeEnd>,
    /// Regular files that it has open, of the wanted ones.
    pub files: Vec<PathBuf>,
    /// System call that it sleeps in, with its first argument, if the kernel shows it.
    pub system_call: Option<(i64, u64)>,
    /// That call is a read(2) from some pipe.
    pub sleeps_in_pipe: bool,
    /// That call is an open(2) of a FIFO whose other end is not open.
    pub waits_for_partner: bool,
    /// Changes whenever it gets a processor, and with every kernel tick while it has one.
    pub scheduled: Scheduled,
}

/// /proc/PID/schedstat (Documentation/scheduler/sched-stats.rst). Compare it for equality only.
pub type Scheduled = String;

/// Pipes and files to look for.
#[derive(Debug, Default)]
pub struct SearchTargets {
    /// Pipes, by inode.
    pub pipes: HashSet<u64>,
    /// Files, by path.
    pub files: HashSet<PathBuf>,
    /// Processes that hold nothing wanted and have no children, as long as they run one of
    /// `stage_programs`: only their executable is read.
    pub without: HashSet<Pid>,
    /// Targets of the shims.
    pub stage_programs: HashSet<PathBuf>,
    /// Waiting stages without children: their descriptors are those that they enlisted with.
    /// Nothing of them is read.
    pub waiting: HashMap<Pid, Arc<Enlisted>>,
}

impl Snapshot {
    /// Reads the processes below `roots`, and orphans: processes that left those trees (their
    /// parent ended) but may hold inherited descriptors.
    #[must_use]
    pub fn take(roots: &[Pid], wanted: &SearchTargets, orphans: &mut Orphans) -> Self {
        let hides_others = hides_others();
        let mut snapshot =
            Self { roots: roots.iter().copied().collect(), hides_others, ..Self::default() };
        snapshot.read_below(roots, wanted);
        // A process that loses its parent during the walk is found among the orphans.
        let cut_off = orphans.find(roots, |pid| snapshot.processes.contains_key(&pid));
        snapshot.read_below(&cut_off, wanted);
        if snapshot.opaque().next().is_some() {
            snapshot.read_times_of_pipes();
        }
        snapshot.read_outside(wanted);
        snapshot
    }

    /// Reads processes outside the session that share its descriptors: a pipe that a loop or
    /// command group reads, in which posh is one command, or the file that all of them write.
    fn read_outside(&mut self, wanted: &SearchTargets) {
        let was_given =
            |root: &&Process| root.pipe_ends.iter().any(|end| end.reads) || !root.files.is_empty();
        let roots = self.roots.iter().filter_map(|root| self.get(*root)).filter(was_given);
        let starters: Vec<Pid> =
            roots.map(|root| root.parent).filter(|parent| *parent > 1).collect();
        let mut seen = HashSet::new();
        let mut queue: Vec<(Pid, Option<Pid>)> =
            starters.into_iter().map(|starter| (starter, None)).collect();
        while let Some((pid, parent)) = queue.pop() {
            if self.processes.contains_key(&pid) || !seen.insert(pid) {
                continue;
            }
            match read_process(pid, wanted) {
                Some(process) => {
                    queue.extend(children(pid).into_iter().map(|child| (child, Some(pid))));
                    self.outside.push(process);
                }
                None if is_alive(pid) => {
                    self.outside.push(Process::unseen(pid, parent.unwrap_or_default()))
                }
                None => {}
            }
        }
    }

    /// Returns true if a process outside the session may read from a pipe that the session
    /// inherited.
    #[must_use]
    pub fn is_read_outside(&self, pipe: u64) -> bool {
        let given =
            self.roots.iter().filter_map(|root| self.get(*root)).flat_map(|root| &root.pipe_ends);
        let reads = |p: &Process| {
            p.is_opaque || p.pipe_ends.iter().any(|end| end.inode == pipe && end.reads)
        };
        given.into_iter().any(|end| end.inode == pipe)
            && self.outside.iter().any(|p| !p.is_dead() && reads(p))
    }

    /// Returns true if a process outside the session may write to a file that the session
    /// inherited, except one that waits for the session.
    #[must_use]
    pub fn is_written_outside(&self, file: &Path) -> bool {
        let starts_sessions = |p: &Process| {
            self.roots.iter().filter_map(|root| self.get(*root)).any(|r| r.parent == p.pid)
        };
        let waits = |p: &Process| starts_sessions(p) && p.waits_for_children();
        self.outside
            .iter()
            .any(|p| !p.is_dead() && p.files.iter().any(|its| its == file) && !waits(p))
    }

    /// Processes whose descriptors can't be read.
    pub fn opaque(&self) -> impl Iterator<Item = &Process> {
        self.processes().filter(|process| process.is_opaque && !process.is_dead())
    }

    /// Returns true if an opaque process may hold an end of the pipe, having made or inherited it.
    /// A holder descends from the pipe's maker: it is below the same topmost root, or an orphan of
    /// it. An orphan that was forked before the pipe was made has not inherited it.
    #[must_use]
    pub fn may_be_held_unseen(&self, pipe: u64) -> bool {
        if self.hides_others {
            return true;
        }
        if self.opaque().next().is_none() {
            return false;
        }
        let made = self.made.get(&pipe).copied().unwrap_or_default();
        let holds = |p: &&Process| !p.is_dead() && p.pipe_ends.iter().any(|end| end.inode == pipe);
        let holders: Vec<&Process> = self.processes().filter(holds).collect();
        self.opaque().any(|process| {
            let may_have_made = |holder: &&Process| self.may_be_kin(process.pid, holder.pid);
            process.started >= made || holders.iter().any(may_have_made)
        })
    }

    /// Returns true if an opaque process may share a stage's output offset: through its shell's
    /// open files, or through the process that started the shell in this session. Daemons have
    /// their own session and none of their starter's descriptors.
    #[must_use]
    pub fn may_share_files_unseen(&self, stage: Pid, session: Option<Pid>) -> bool {
        let is_of_session = |p: &Process| session.is_none_or(|session| p.session == session);
        let may_share = |p: &Process| {
            let shell = self.topmost_root(p.pid).and_then(|root| self.get(root));
            is_of_session(p)
                || shell.is_some_and(is_of_session)
                || self.is_below_the_same(p.pid, stage)
        };
        self.hides_others || self.opaque().any(may_share)
    }

    /// Returns true if `ancestor` may be an ancestor of `pid`, as far as visible: an orphan's
    /// parent becomes a subreaper or init.
    fn may_be_kin(&self, ancestor: Pid, pid: Pid) -> bool {
        self.topmost_root(pid).is_none()
            || self.is_below_the_same(ancestor, pid)
            || self.is_ancestor(ancestor, pid)
    }

    /// Returns true if both are below the same root.
    fn is_below_the_same(&self, one: Pid, other: Pid) -> bool {
        self.topmost_root(one).is_some_and(|root| self.topmost_root(other) == Some(root))
    }

    /// Topmost root above a process; `None` for an orphan.
    fn topmost_root(&self, pid: Pid) -> Option<Pid> {
        std::iter::successors(self.get(pid), |p| self.get(p.parent))
            .map(|p| p.pid)
            .filter(|p| self.roots.contains(p))
            .last()
    }

    /// Reads creation times of pipes. An unused pipe has its creation time in all its timestamps
    /// (inode(7)); nothing is known of a used one.
    fn read_times_of_pipes(&mut self) {
        let ends =
            self.processes.values().flat_map(|p| p.pipe_ends.iter().map(|end| (p.pid, *end)));
        let made = ends.filter_map(|(pid, end)| {
            let meta = fs::metadata(format!("/proc/{pid}/fd/{}", end.fd))
                .ok()
                .filter(|m| m.ino() == end.inode)?;
            let times = [meta.atime(), meta.mtime(), meta.ctime()];
            let parts = [meta.atime_nsec(), meta.mtime_nsec(), meta.ctime_nsec()];
            let is_untouched =
                times.iter().all(|at| *at == times[0]) && parts.iter().all(|at| *at == parts[0]);
            let time = Duration::new(u64::try_from(times[0]).ok()?, u32::try_from(parts[0]).ok()?);
            is_untouched.then(|| Some((end.inode, ticks_after_boot(time)?))).flatten()
        });
        self.made = made.collect();
    }

    fn read_below(&mut self, tops: &[Pid], wanted: &SearchTargets) {
        let mut queue: Vec<(Pid, Option<Pid>)> = tops.iter().map(|&top| (top, None)).collect();
        while let Some((pid, parent)) = queue.pop() {
            if self.processes.contains_key(&pid) {
                continue;
            }
            if let Some(process) = parent.and_then(|parent| wanted.at_once(pid, parent)) {
                self.processes.insert(pid, process);
                continue;
            }
            // Read the state before the children: a process seen waiting has forked all of them.
            let process = read_process(pid, wanted);
            if process.is_some() {
                queue.extend(children(pid).into_iter().map(|child| (child, Some(pid))));
            }
            self.add(pid, process, parent);
        }
    }

    /// Adds a process. If nothing was read, it has ended or is invisible.
    fn add(&mut self, pid: Pid, read: Option<Process>, parent: Option<Pid>) {
        let unseen = || is_alive(pid).then(|| Process::unseen(pid, parent.unwrap_or_default()));
        self.processes.extend(read.or_else(unseen).map(|process| (pid, process)));
    }

    /// A snapshot of made-up processes.
    #[cfg(test)]
    pub fn of(processes: impl Iterator<Item = Process>) -> Self {
        Self { processes: processes.map(|p| (p.pid, p)).collect(), ..Self::default() }
    }

    /// All processes of the snapshot.
    pub fn processes(&self) -> impl Iterator<Item = &Process> {
        self.processes.values()
    }

    /// Process by its ID.
    #[must_use]
    pub fn get(&self, pid: Pid) -> Option<&Process> {
        self.processes.get(&pid)
    }

    /// Returns true if `ancestor` is above `pid` in the tree.
    #[must_use]
    pub fn is_ancestor(&self, ancestor: Pid, pid: Pid) -> bool {
        std::iter::successors(self.get(pid), |p| self.get(p.parent))
            .skip(1)
            .any(|p| p.pid == ancestor)
    }
}

impl SearchTargets {
    /// Process built without reading /proc/PID/fd: a waiting stage, or one of `without`.
    fn at_once(&self, pid: Pid, parent: Pid) -> Option<Process> {
        if let Some(stage) = self.waiting.get(&pid) {
            let files =
                stage.descriptors.iter().map(|d| &d.path).filter(|path| self.files.contains(*path));
            let (pipe_ends, files) = (self.ends_of(stage).collect(), files.cloned().collect());
            return Some(Process { pipe_ends, files, ..Process::asleep(pid, parent) });
        }
        let executable = self
            .without
            .contains(&pid)
            .then(|| fs::read_link(format!("/proc/{pid}/exe")).ok())??;
        self.stage_programs
            .contains(&executable)
            .then(|| Process { executable, ..Process::asleep(pid, parent) })
    }

    /// Excludes FIFOs, whose other users need not be descendants.
    fn ends_of<'s>(&'s self, stage: &'s Enlisted) -> impl Iterator<Item = PipeEnd> + 's {
        let wanted =
            |d: &&Descriptor| pipe_inode(&d.path).is_some_and(|inode| self.pipes.contains(&inode));
        let end = |d: &Descriptor| PipeEnd {
            inode: d.identity.1,
            fd: d.fd,
            reads: d.reads(),
            writes: d.writes(),
        };
        stage.descriptors.iter().filter(wanted).map(end)
    }
}

impl Process {
    /// A sleeping process of which nothing else is known.
    fn asleep(pid: Pid, parent: Pid) -> Self {
        Self {
            pid,
            parent,
            state: 'S',
            executable: PathBuf::new(),
            session: 0,
            started: 0,
            is_opaque: false,
            ending: false,
            pipe_ends: Vec::new(),
            files: Vec::new(),
            system_call: None,
            sleeps_in_pipe: false,
            waits_for_partner: false,
            scheduled: Scheduled::default(),
        }
    }

    /// A process that exists but can't be read.
    fn unseen(pid: Pid, parent: Pid) -> Self {
        Self { started: u64::MAX, is_opaque: true, ..Self::asleep(pid, parent) }
    }

    /// Runs, or is about to: its descriptors may change at once.
    #[must_use]
    pub fn is_running(&self) -> bool {
        matches!(self.state, 'R' | 'D')
    }

    /// Dead but not reaped; holds nothing.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    /// Waits for its children, so it will not fork, read or write before one ends.
    #[must_use]
    pub fn waits_for_children(&self) -> bool {
        use nix::libc::{SYS_rt_sigsuspend, SYS_wait4, SYS_waitid};
        !self.is_running()
            && self
                .system_call
                .is_some_and(|(n, _)| [SYS_wait4, SYS_waitid, SYS_rt_sigsuspend].contains(&n))
    }

    /// Sleeps in a file system call: a shell that expands words does, for long on a slow mount.
    #[must_use]
    pub fn walks_files(&self) -> bool {
        self.state == 'D'
            || self.system_call.is_some_and(|(number, _)| FILE_CALLS.contains(&number))
    }

    /// Sleeps in a read(2) from this pipe.
    #[must_use]
    pub fn reads_from(&self, pipe: u64) -> bool {
        self.pipe_it_reads() == Some(pipe)
    }

    /// Pipe, among the wanted ones, that it sleeps in a read(2) from.
    #[must_use]
    pub fn pipe_it_reads(&self) -> Option<u64> {
        let (number, fd) = self.system_call?;
        let is_read =
            |end: &&PipeEnd| number == nix::libc::SYS_read && u64::from(end.fd) == fd && end.reads;
        self.pipe_ends.iter().find(is_read).map(|end| end.inode)
    }

    /// Stopped by a signal or a debugger: nothing will happen that could be waited for.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }
}

impl Process {
    /// Adds its descriptors to those found before.
    fn read_descriptors(&mut self, wanted: &SearchTargets, threads: u32) {
        for table in descriptor_tables(self.pid, threads) {
            match fs::read_dir(table.join("fd")) {
                Ok(directory) => self.add_descriptors(directory, wanted),
                // An ended thread's directory is unreadable for everybody, and empty.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    self.is_opaque |= read_stat_of(&table).is_some_and(|stat| !stat.has_ended());
                }
                Err(_) => {}
            }
        }
    }

    fn add_descriptors(&mut self, directory: fs::ReadDir, wanted: &SearchTargets) {
        for entry in directory.flatten() {
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            if let Some(inode) = pipe_inode(&target).filter(|inode| wanted.pipes.contains(inode)) {
                let end = read_end(&entry.path(), inode);
                self.pipe_ends.extend(end.filter(|end| !self.pipe_ends.contains(end)));
            } else if wanted.files.contains(&target) && !self.files.contains(&target) {
                self.files.push(target);
            }
        }
    }
}

/// System calls that look up a path or list a directory.
const FILE_CALLS: [i64; 9] = [
    nix::libc::SYS_openat,
    nix::libc::SYS_openat2,
    nix::libc::SYS_getdents64,
    nix::libc::SYS_newfstatat,
    nix::libc::SYS_statx,
    nix::libc::SYS_faccessat,
    nix::libc::SYS_faccessat2,
    nix::libc::SYS_readlinkat,
    nix::libc::SYS_chdir,
];

fn read_process(pid: Pid, wanted: &SearchTargets) -> Option<Process> {
    let stat = read_stat(pid)?;
    let first_has_ended = stat.has_ended() && stat.threads > 1;
    // The gateway's own threads are many and share their descriptors.
    let threads = if pid == std::process::id() { 1 } else { stat.threads };
    let Stat { parent, mut state, session, started, .. } = stat;
    let mut executable = fs::read_link(format!("/proc/{pid}/exe"));
    if first_has_ended && let Some((thread, stat)) = living_thread(pid) {
        state = stat.state;
        executable = fs::read_link(thread.join("exe"));
    }
    let ending = executable.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
    let executable = executable.unwrap_or_default();
    let mut process =
        Process { state, session, started, ending, executable, ..Process::asleep(pid, parent) };
    process.read_descriptors(wanted, threads);
    // A shell's child that moves a pipe from a high descriptor to a low one during the in-order
    // reading appears to have it nowhere. A second reading finds it, as the move is done by then.
    if process.is_running() || read_stat(pid).is_some_and(|stat| stat.state == 'R') {
        process.read_descriptors(wanted, threads);
    }
    if !process.pipe_ends.is_empty() || !process.files.is_empty() {
        process.system_call = read_system_call(pid);
        process.scheduled =
            fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap_or_default();
        process.sleeps_in_pipe =
            matches!(process.system_call, Some((nix::libc::SYS_read, fd)) if is_pipe(pid, fd));
        process.waits_for_partner = process.walks_files()
            && wait_channel(pid).is_some_and(|function| function == "wait_for_partner");
    }
    Some(process)
}

#[cfg(test)]
mod tests;
