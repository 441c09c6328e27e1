//! A look at the live processes of the sessions: who holds which end of which
//! pipe, and who is still about to do something. Reads /proc only (proc(5)), as
//! the user that owns the processes.

use std::{
    collections::{HashMap, HashSet},
    fs,
    io::{self, Read as _},
    os::unix::fs::{MetadataExt as _, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::enlisted::{Descriptor, Enlisted, Pid};

/// Processes whose descriptors were read at about the same time.
#[derive(Debug, Default)]
pub struct Snapshot {
    processes: HashMap<Pid, Process>,
    /// When pipes were made, in clock ticks after boot, where it matters and can be told.
    made: HashMap<u64, u64>,
}

/// One process.
#[derive(Debug)]
pub struct Process {
    /// Its id.
    pub pid: Pid,
    /// Its parent's id.
    pub parent: Pid,
    /// The letter of proc_pid_stat(5): R, S, D, Z, T, ...
    pub state: char,
    /// The program it runs.
    pub executable: PathBuf,
    /// Its session, as setsid(2) has it.
    pub session: Pid,
    /// When it was forked, in clock ticks after boot.
    pub started: u64,
    /// This user may not read its descriptors: a set-user-id program, say. It may hold anything that it
    /// can have inherited.
    pub is_opaque: bool,
    /// It is in the middle of its exit(2): it has no program any more.
    pub ending: bool,
    /// The pipe ends it holds, of those that were asked for.
    pub pipe_ends: Vec<PipeEnd>,
    /// The regular files it has open, of those that were asked for.
    pub files: Vec<PathBuf>,
    /// The system call it sleeps in, with its first argument, where the kernel tells.
    pub system_call: Option<(i64, u64)>,
    /// That call is a read(2) from some pipe.
    pub sleeps_in_pipe: bool,
    /// Changes whenever it gets a processor, and while it has one with every tick of the kernel.
    pub scheduled: Scheduled,
}

/// /proc/PID/schedstat (Documentation/scheduler/sched-stats.rst), to be compared with itself only.
pub type Scheduled = String;

/// One end of one pipe in one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipeEnd {
    /// The pipe.
    pub inode: u64,
    /// The process's number for it.
    pub fd: u32,
    /// Can read from it.
    pub reads: bool,
    /// Can write to it.
    pub writes: bool,
}

/// What to look for.
#[derive(Debug, Default)]
pub struct Wanted {
    /// Pipes, by inode.
    pub pipes: HashSet<u64>,
    /// Files, by path.
    pub files: HashSet<PathBuf>,
    /// Processes that have nothing of this, nor children, as long as they run one of `stage_programs`: no more is read of them.
    pub without: HashSet<Pid>,
    /// Files that shims lead to.
    pub stage_programs: HashSet<PathBuf>,
    /// Stages that wait and have no children: each has what it enlisted with. Nothing is read of them.
    pub waiting: HashMap<Pid, Arc<Enlisted>>,
}

impl Snapshot {
    /// Reads the processes below `roots`, and orphans: processes that were cut off
    /// from those trees (their parent ended) but may hold what they inherited.
    #[must_use]
    pub fn take(roots: &[Pid], wanted: &Wanted, orphans: &mut Orphans) -> Self {
        let mut snapshot = Self::default();
        snapshot.read_below(roots, wanted);
        // Who loses its parent while the trees are walked is found behind them.
        let cut_off = orphans.find(roots, |pid| snapshot.processes.contains_key(&pid));
        snapshot.read_below(&cut_off, wanted);
        if snapshot.opaque().next().is_some() {
            snapshot.read_times_of_pipes();
        }
        snapshot
    }

    /// Processes whose descriptors can't be read.
    pub fn opaque(&self) -> impl Iterator<Item = &Process> {
        self.processes().filter(|process| process.is_opaque && !process.is_dead())
    }

    /// Whether a process whose descriptors can't be read may hold an end of the pipe. It has inherited that if it
    /// has it, so that one that was forked before the pipe was made has none.
    #[must_use]
    pub fn may_be_held_unseen(&self, pipe: u64) -> bool {
        let made = self.made.get(&pipe).copied().unwrap_or_default();
        self.opaque().any(|process| process.started >= made)
    }

    /// A pipe that nothing was written to and nothing read from has the time of its making in all of its times
    /// (inode(7)). Of others nothing is known.
    fn read_times_of_pipes(&mut self) {
        let ends = self.processes.values().flat_map(|p| p.pipe_ends.iter().map(|end| (p.pid, *end)));
        let made = ends.filter_map(|(pid, end)| {
            let meta = fs::metadata(format!("/proc/{pid}/fd/{}", end.fd)).ok().filter(|m| m.ino() == end.inode)?;
            let times = [meta.atime(), meta.mtime(), meta.ctime()];
            let parts = [meta.atime_nsec(), meta.mtime_nsec(), meta.ctime_nsec()];
            let is_untouched = times.iter().all(|at| *at == times[0]) && parts.iter().all(|at| *at == parts[0]);
            let time = Duration::new(u64::try_from(times[0]).ok()?, u32::try_from(parts[0]).ok()?);
            is_untouched.then(|| Some((end.inode, ticks_after_boot(time)?))).flatten()
        });
        self.made = made.collect();
    }

    fn read_below(&mut self, tops: &[Pid], wanted: &Wanted) {
        let mut queue: Vec<(Pid, Option<Pid>)> = tops.iter().map(|&top| (top, None)).collect();
        while let Some((pid, parent)) = queue.pop() {
            if self.processes.contains_key(&pid) {
                continue;
            }
            if let Some(process) = parent.and_then(|parent| wanted.at_once(pid, parent)) {
                self.processes.insert(pid, process);
                continue;
            }
            // Its state before its children: one that was seen waiting has had all of them.
            if let Some(process) = read_process(pid, wanted) {
                queue.extend(children(pid).into_iter().map(|child| (child, Some(pid))));
                self.processes.insert(pid, process);
            }
        }
    }

    /// A snapshot of made-up processes.
    #[cfg(test)]
    pub fn of(processes: impl Iterator<Item = Process>) -> Self {
        Self { processes: processes.map(|p| (p.pid, p)).collect(), made: HashMap::new() }
    }

    /// All of them.
    pub fn processes(&self) -> impl Iterator<Item = &Process> {
        self.processes.values()
    }

    /// One of them.
    #[must_use]
    pub fn get(&self, pid: Pid) -> Option<&Process> {
        self.processes.get(&pid)
    }

    /// Whether `ancestor` is above `pid` in the tree.
    #[must_use]
    pub fn is_ancestor(&self, ancestor: Pid, pid: Pid) -> bool {
        std::iter::successors(self.get(pid), |p| self.get(p.parent)).skip(1).any(|p| p.pid == ancestor)
    }
}

impl Wanted {
    /// What is known of one that waits, or of one of those without.
    fn at_once(&self, pid: Pid, parent: Pid) -> Option<Process> {
        if let Some(stage) = self.waiting.get(&pid) {
            let files = stage.descriptors.iter().map(|d| &d.path).filter(|path| self.files.contains(*path));
            let (pipe_ends, files) = (self.ends_of(stage).collect(), files.cloned().collect());
            return Some(Process { pipe_ends, files, ..Process::asleep(pid, parent) });
        }
        let executable = self.without.contains(&pid).then(|| fs::read_link(format!("/proc/{pid}/exe")).ok())??;
        self.stage_programs.contains(&executable).then(|| Process { executable, ..Process::asleep(pid, parent) })
    }

    /// Not of pipes with a name, whose other users are nobody's children.
    fn ends_of<'s>(&'s self, stage: &'s Enlisted) -> impl Iterator<Item = PipeEnd> + 's {
        let wanted = |d: &&Descriptor| pipe_inode(&d.path).is_some_and(|inode| self.pipes.contains(&inode));
        let end = |d: &Descriptor| PipeEnd { inode: d.identity.1, fd: d.fd, reads: d.reads(), writes: d.writes() };
        stage.descriptors.iter().filter(wanted).map(end)
    }
}

impl Process {
    /// One that sleeps and of which no more is known.
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
            scheduled: Scheduled::default(),
        }
    }

    /// It runs, or is about to: what it holds now may change at once.
    #[must_use]
    pub fn is_running(&self) -> bool {
        matches!(self.state, 'R' | 'D')
    }

    /// It is dead but not reaped, and holds nothing.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    /// It waits for its children to end, so it will not fork, read or write before.
    #[must_use]
    pub fn waits_for_children(&self) -> bool {
        use nix::libc::{SYS_rt_sigsuspend, SYS_wait4, SYS_waitid};
        !self.is_running()
            && self.system_call.is_some_and(|(n, _)| [SYS_wait4, SYS_waitid, SYS_rt_sigsuspend].contains(&n))
    }

    /// It sleeps in a call on the file system: a shell that expands words does, on a slow mount for long.
    #[must_use]
    pub fn walks_files(&self) -> bool {
        self.state == 'D' || self.system_call.is_some_and(|(number, _)| FILE_CALLS.contains(&number))
    }

    /// It sleeps in a read(2) from this pipe.
    #[must_use]
    pub fn reads_from(&self, pipe: u64) -> bool {
        self.system_call.is_some_and(|(number, fd)| {
            number == nix::libc::SYS_read
                && self.pipe_ends.iter().any(|e| e.inode == pipe && u64::from(e.fd) == fd && e.reads)
        })
    }
}

impl Process {
    /// Adds what it holds to what was found before.
    fn read_descriptors(&mut self, wanted: &Wanted) {
        let directory = match fs::read_dir(format!("/proc/{}/fd", self.pid)) {
            Ok(directory) => directory,
            Err(error) => {
                self.is_opaque = error.kind() == io::ErrorKind::PermissionDenied;
                return;
            }
        };
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

/// Calls by which a path is looked up or a directory listed.
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

/// The number in `pipe:[12345]`.
#[must_use]
pub fn pipe_inode(link: &Path) -> Option<u64> {
    link.to_str()?.strip_prefix("pipe:[")?.strip_suffix(']')?.parse().ok()
}

/// Whether a process is one of `roots`, or one of them is above it.
#[must_use]
pub fn is_below(pid: Pid, roots: &[Pid]) -> bool {
    !roots.is_empty() && ancestors(pid).any(|pid| roots.contains(&pid))
}

/// A process and those above it, up to init.
fn ancestors(pid: Pid) -> impl Iterator<Item = Pid> {
    let parent = |pid: &Pid| read_stat(*pid).map(|stat| stat.parent).filter(|parent| *parent > 0);
    std::iter::successors(Some(pid), parent)
}

/// The processes below `roots`, and those that were cut off from these trees; their states are not asked for, nor of the `childless` what they have started.
pub fn processes_below(roots: &[Pid], childless: &HashSet<Pid>, orphans: &mut Orphans) -> HashSet<Pid> {
    let mut found = HashSet::new();
    let add_below = |tops: &[Pid], found: &mut HashSet<Pid>| {
        let mut queue: Vec<Pid> = tops.to_vec();
        while let Some(pid) = queue.pop() {
            if found.insert(pid) && !childless.contains(&pid) {
                queue.extend(children(pid));
            }
        }
    };
    add_below(roots, &mut found);
    let cut_off = orphans.find(roots, |pid| found.contains(&pid));
    add_below(&cut_off, &mut found);
    found
}

fn read_process(pid: Pid, wanted: &Wanted) -> Option<Process> {
    let Stat { parent, state, session, started } = read_stat(pid)?;
    let executable = fs::read_link(format!("/proc/{pid}/exe"));
    let ending = executable.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
    let executable = executable.unwrap_or_default();
    let mut process = Process { state, session, started, ending, executable, ..Process::asleep(pid, parent) };
    process.read_descriptors(wanted);
    // A shell's child that moves a pipe from a high number to a low one while they are read in order has it
    // nowhere. What ran has moved it by now, so that a second reading finds it.
    if process.is_running() || read_stat(pid).is_some_and(|stat| stat.state == 'R') {
        process.read_descriptors(wanted);
    }
    if !process.pipe_ends.is_empty() || !process.files.is_empty() {
        process.system_call = read_system_call(pid);
        process.scheduled = fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap_or_default();
        process.sleeps_in_pipe = matches!(process.system_call, Some((nix::libc::SYS_read, fd)) if is_pipe(pid, fd));
    }
    Some(process)
}

fn is_pipe(pid: Pid, fd: u64) -> bool {
    fs::read_link(format!("/proc/{pid}/fd/{fd}")).is_ok_and(|link| pipe_inode(&link).is_some())
}

/// The permissions of a link in /proc/PID/fd tell the access mode (proc_pid_fd(5)).
fn read_end(link: &Path, inode: u64) -> Option<PipeEnd> {
    let mode = fs::symlink_metadata(link).ok()?.permissions().mode();
    let fd = link.file_name()?.to_str()?.parse().ok()?;
    Some(PipeEnd { inode, fd, reads: mode & 0o400 != 0, writes: mode & 0o200 != 0 })
}

/// What is used of proc_pid_stat(5).
struct Stat {
    parent: Pid,
    state: char,
    session: Pid,
    /// Clock ticks after boot.
    started: u64,
}

fn read_stat(pid: Pid) -> Option<Stat> {
    // Numbers of at most 20 digits, 52 of them, and the name. By fs::read it takes twice as long: that does not know how much there is.
    let mut buffer = [0; 1200];
    let count = fs::File::open(format!("/proc/{pid}/stat")).and_then(|mut file| file.read(&mut buffer)).ok()?;
    let text = String::from_utf8_lossy(&buffer[..count]);
    // The name is in parentheses and may contain anything, also ") ".
    let rest = &text[text.rfind(')')? + 1..];
    let mut words = rest.split_ascii_whitespace();
    let state = words.next()?.chars().next()?;
    let parent = words.next()?.parse().ok()?;
    let session = words.nth(1)?.parse().ok()?;
    // Field 22 of the line is the start time; four words after the name are taken.
    let started = words.nth(15)?.parse().ok()?;
    Some(Stat { parent, state, session, started })
}

/// The last tick that had surely begun at that time of the clock, which counts from 1970.
fn ticks_after_boot(time: Duration) -> Option<u64> {
    use nix::time::{ClockId, clock_gettime};
    /// An inode's time is that of the last timer interrupt, and the clock may be slewed meanwhile (adjtimex(2)).
    const MARGIN: Duration = Duration::from_millis(50);
    const TICK_MS: u128 = 10;
    let now = Duration::from(clock_gettime(ClockId::CLOCK_REALTIME).ok()?);
    let since_boot = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?);
    let made = since_boot.saturating_sub(now.saturating_sub(time)).saturating_sub(MARGIN);
    u64::try_from(made.as_millis() / TICK_MS).ok()
}

fn read_system_call(pid: Pid) -> Option<(i64, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/syscall")).ok()?;
    let mut words = text.split_ascii_whitespace();
    let number = words.next()?.parse().ok()?;
    let first = words.next().and_then(|w| u64::from_str_radix(w.trim_start_matches("0x"), 16).ok()).unwrap_or(0);
    Some((number, first))
}

fn children(pid: Pid) -> Vec<Pid> {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let lists = threads.flatten().filter_map(|t| fs::read_to_string(t.path().join("children")).ok());
    lists.flat_map(|l| l.split_ascii_whitespace().filter_map(|w| w.parse().ok()).collect::<Vec<_>>()).collect()
}

/// Finds processes that left their session's tree, without reading all of /proc
/// each time: what is older than every session can't have inherited from one.
#[derive(Debug, Default)]
pub struct Orphans {
    /// Processes known to be older than the sessions, by id.
    old: HashSet<Pid>,
    /// The start of the oldest root, when `old` was made.
    oldest_start: u64,
    /// And when that was.
    looked_at: Option<Instant>,
}

/// So long nobody is taken for another one who had the number before: there are 32,768 at least.
const NUMBERS_HOLD: Duration = Duration::from_secs(5);

impl Orphans {
    /// Processes younger than the oldest root that init, or a subreaper, took over. A subreaper takes over what its
    /// own descendants leave (PR_SET_CHILD_SUBREAPER(2const)), so one that has a session's processes is above that
    /// session's root. Those that are `known` are not looked at.
    fn find(&mut self, roots: &[Pid], known: impl Fn(Pid) -> bool) -> Vec<Pid> {
        let Some(oldest) = roots.iter().filter_map(|&r| Some(read_stat(r)?.started)).min() else { return Vec::new() };
        let looked_at = self.looked_at.replace(Instant::now());
        if oldest < self.oldest_start || looked_at.is_none_or(|at| at.elapsed() > NUMBERS_HOLD) {
            self.old.clear();
        }
        self.oldest_start = oldest;
        // Read first: when one of them ends, the next one above takes over what it had.
        let reapers: HashSet<Pid> = roots.iter().flat_map(|&root| ancestors(root).skip(1)).collect();
        let Ok(directory) = fs::read_dir("/proc") else { return Vec::new() };
        let pids = directory.flatten().filter_map(|e| e.file_name().to_str()?.parse::<Pid>().ok());
        let mut orphans = Vec::new();
        let mut seen = HashSet::new();
        for pid in pids {
            if self.old.contains(&pid) {
                seen.insert(pid);
                continue;
            }
            if known(pid) {
                continue;
            }
            let Some(Stat { parent, started, .. }) = read_stat(pid) else { continue };
            if started < oldest {
                seen.insert(pid);
            } else if parent <= 1 || reapers.contains(&parent) {
                orphans.push(pid);
            }
        }
        // A number that went away may come back as a younger process.
        self.old = seen;
        orphans
    }
}

#[cfg(test)]
mod tests {
    use super::{super::closing::tests::stage, *};

    #[test]
    fn pipes_are_known_by_their_links() {
        assert_eq!(pipe_inode(Path::new("pipe:[4711]")), Some(4711));
        assert_eq!(pipe_inode(Path::new("/tmp/pipe:[4711]")), None);
        assert_eq!(pipe_inode(Path::new("socket:[4711]")), None);
    }

    #[test]
    fn an_older_root_makes_younger_what_was_old() {
        let older = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        // Starts are counted in ticks of the clock: wait for one.
        let start = |pid: Pid| read_stat(pid).unwrap().started;
        let mut younger = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        while start(younger.id()) == start(older.id()) {
            younger.kill().unwrap();
            younger.wait().unwrap();
            younger = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        }
        let mut orphans = Orphans::default();
        let mut remembered = |root: Pid| {
            orphans.find(&[root], |_| false);
            (orphans.old.contains(&1), orphans.old.contains(&older.id()))
        };
        assert_eq!(remembered(older.id()), (true, false));
        assert_eq!(remembered(younger.id()), (true, true));
        assert_eq!(remembered(older.id()), (true, false));
        for mut child in [older, younger] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn only_a_reaper_above_the_root_has_orphans_of_its_session() {
        use std::io::{BufRead, BufReader, Write};
        use std::process::{Command, Stdio};
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
        };
        // Says the number of a process that it starts when told to.
        let told = |shell: &mut std::process::Child| -> Pid {
            shell.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
            let mut line = String::new();
            BufReader::new(shell.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
            line.trim().parse().unwrap()
        };
        let mut other = shell("read go; sleep 100 & echo $!; wait");
        std::thread::sleep(Duration::from_millis(20));
        let mut root = shell("read go; (sleep 100 & echo $!); read end");
        let (not_ours, ours) = (told(&mut other), told(&mut root));
        let find = || Orphans::default().find(&[root.id()], |_| false);
        // Its parent, a subshell, is at its end.
        let deadline = Instant::now() + Duration::from_secs(10);
        while !find().contains(&ours) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        let found = find();
        for pid in [not_ours, ours] {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid as i32), nix::sys::signal::SIGKILL);
        }
        for mut shell in [other, root] {
            shell.kill().unwrap();
            shell.wait().unwrap();
        }
        assert_eq!([ours, not_ours].map(|pid| found.contains(&pid)), [true, false]);
    }

    #[test]
    fn a_snapshot_sees_our_own_pipe() {
        let (read, write) = nix::unistd::pipe().unwrap();
        let inode =
            pipe_inode(&fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&read))).unwrap());
        let wanted = Wanted { pipes: inode.into_iter().collect(), ..Wanted::default() };
        let me = std::process::id();
        let snapshot = Snapshot::take(&[me], &wanted, &mut Orphans::default());
        let ends = &snapshot.get(me).unwrap().pipe_ends;
        assert_eq!((ends.iter().filter(|e| e.reads).count(), ends.iter().filter(|e| e.writes).count()), (1, 1));
        drop((read, write));
    }

    #[test]
    fn a_process_that_hides_its_descriptors_may_hold_only_pipes_that_are_older() {
        let hidden = |started| Process { started, is_opaque: true, ..Process::asleep(9, 1) };
        let mut snapshot = Snapshot::of([hidden(500)].into_iter());
        snapshot.made = [(1, 499), (2, 501)].into();
        assert_eq!([1, 2, 3].map(|pipe| snapshot.may_be_held_unseen(pipe)), [true, false, true]);
        let dead = Snapshot::of([Process { state: 'Z', ..hidden(500) }].into_iter());
        assert!(!dead.may_be_held_unseen(1));
    }

    #[test]
    fn the_making_of_a_pipe_is_known_or_not_told() {
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&input));
        let pipe = pipe_inode(&fs::read_link(link).unwrap()).unwrap();
        let made = || {
            let wanted = Wanted { pipes: [pipe].into(), ..Wanted::default() };
            let mut snapshot = Snapshot::take(&[std::process::id()], &wanted, &mut Orphans::default());
            snapshot.read_times_of_pipes();
            let started = snapshot.get(child.id()).unwrap().started;
            snapshot.made.get(&pipe).map(|made| started.saturating_sub(*made))
        };
        // Of a child that was forked just after it.
        let at_first = made();
        assert!(at_first.is_some_and(|since| since < 1000), "{at_first:?}");
        // Older kernels than 6.15 note the use of a pipe in its times.
        std::thread::sleep(Duration::from_millis(20));
        std::io::Write::write_all(&mut input, b"x").unwrap();
        assert!(made().is_none_or(|since| Some(since) == at_first));
        drop(input);
        child.wait().unwrap();
    }

    #[test]
    fn who_waits_has_what_it_enlisted_with() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let (pid, me) = (child.id(), std::process::id());
        let mut stage = stage(pid, &[(0, 7, false), (1, 8, true), (4, 9, false)], 0, &[]);
        // A pipe with a name.
        stage.descriptors[1].path = PathBuf::from("/tmp/fifo");
        let wanted = Wanted { pipes: [7, 8].into(), waiting: [(pid, Arc::new(stage))].into(), ..Wanted::default() };
        let snapshot = Snapshot::take(&[me], &wanted, &mut Orphans::default());
        let process = snapshot.get(pid).unwrap();
        let ends: Vec<_> = process.pipe_ends.iter().map(|end| (end.inode, end.fd, end.reads, end.writes)).collect();
        assert_eq!((process.parent, ends), (me, vec![(7, 0, true, false)]));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn who_is_without_is_not_looked_at_while_it_runs_its_program() {
        // It has our pipe as its input.
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        let (ours, me) = (child.stdin.take().unwrap(), std::process::id());
        let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&ours));
        let pipes: HashSet<u64> = pipe_inode(&fs::read_link(link).unwrap()).into_iter().collect();
        let found = |without: &[Pid], program: &Path| {
            let (without, stage_programs) = (without.iter().copied().collect(), [program.to_owned()].into());
            let wanted = Wanted { pipes: pipes.clone(), without, stage_programs, ..Wanted::default() };
            let snapshot = Snapshot::take(&[me], &wanted, &mut Orphans::default());
            let process = snapshot.get(pid).unwrap();
            (process.parent, process.executable.clone(), process.pipe_ends.len())
        };
        let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap();
        assert_eq!(found(&[], &program), (me, program.clone(), 1));
        assert_eq!(found(&[pid], &program), (me, program.clone(), 0));
        assert_eq!(found(&[pid], Path::new("/another")), (me, program, 1));
        drop(ours);
        child.wait().unwrap();
    }
}
