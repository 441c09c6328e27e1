//! Limits the files of one command by a Landlock domain, made from the paths that its annotation
//! names. `policy` analyses the command, and `view` shows the files; neither happens in this
//! module.
//!
//! Programs that it may start are one file each (see `programs`): a directory of programs would
//! allow all that is installed.
//!
//! Every path is resolved once, to a descriptor, and the rule is on the file that this refers to: a
//! name that leads out of the operands' directories a moment later leads to a file without a rule.
//! Files made or replaced in one of these directories while the command waits can be read. Accesses
//! without a rule fail with EACCES, so too few rules would change a command's output: a command
//! that changes a file gets the directory around it too, since tools make their temporary files
//! there.
//!
//! Invariant: a right to make, remove or truncate files in a tree includes the right to write their
//! contents. Otherwise a tool that replaces a file (removes it, makes it anew, and only then may
//! not write to it) leaves an empty one.
//!
//! Invariant: in a read-only mount, a command opens nothing for writing. The mount refuses that of
//! files and directories (EROFS, before Landlock is asked), but not of FIFOs: rules on what lies in
//! such a mount have no right to write ([`in_mount`]).
//!
//! Invariant: no name that a command opens, by this server's own annotation, is that of a FIFO, a
//! socket or a device in a mount. Names come from the command's words (`policy`); what the client
//! says that it uses (`paths`) can only add refusals.

use std::{
    collections::HashMap,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Path, PathBuf},
};

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible as _, PathBeneath,
    Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr as _, RulesetError, Scope,
    make_bitflags,
};
use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, FcntlArg, OFlag, OpenHow, ResolveFlag, fcntl, open, openat2, readlinkat},
    libc,
    sys::{
        signal::kill,
        stat::{FileStat, Mode, SFlag, fstat},
    },
    unistd::getppid,
};
use posh_proto::{
    executor::{ClientFile, rejected::Kind},
    rule::{self, Rule},
};

use super::{
    budget::{Budget, MAX_RULES, SPENT},
    devices,
    paths::{MAX_LINKS, Unlike, find, landing, name_of, require_plain},
    processes::Below,
    programs::{Programs, library_directories},
    system,
    view::{PROGRAM_LINKS, SHOWN, View, path_of},
    wire::{Access, DirectoryId, Fence, Grant, Isolation, ViewSpec},
};
use crate::{error::Refusal, sys::ActingAs};

/// The newest version of Landlock whose rights this file knows; an older kernel's are used as far
/// as they go.
const KNOWN: ABI = ABI::V7;

/// The oldest version whose rights keep the promises of docs/security.md. Before version 2 no file
/// could be moved to another directory, before 3 any file could be truncated, before 5 any device
/// be told to do things, and before 6 (Linux 6.12) signals and abstract sockets reached out of the
/// domain. Version 7 only adds records.
pub const LEAST_LANDLOCK: i32 = 6;

/// Access to the server's programs, if a command may start any of them.
const PROGRAMS: BitFlags<AccessFs> = make_bitflags!(AccessFs::{Execute | ReadFile | ReadDir});
/// The kernel reads what it executes, loaders and interpreters too.
pub const PROGRAM: BitFlags<AccessFs> = make_bitflags!(AccessFs::{Execute | ReadFile});
pub const READ: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | ReadDir});
const DEVICE: BitFlags<AccessFs> =
    make_bitflags!(AccessFs::{ReadFile | WriteFile | Truncate | IoctlDev});
const OUTPUT: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | WriteFile | Truncate});
/// Access to the directory around one that may itself be removed or moved: allows removal of empty
/// directories only, and of no file.
const AROUND_DIRECTORY: BitFlags<AccessFs> =
    make_bitflags!(AccessFs::{ReadDir | RemoveDir | Refer});
/// All but executing: programs of an export are data. A command makes no sockets or devices.
pub const CHANGE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{
    ReadFile | WriteFile | Truncate | ReadDir | RemoveDir | RemoveFile
        | MakeDir | MakeReg | MakeSym | MakeFifo | Refer
});

/// Walking so many components costs as much of the budget as looking up a name.
const COMPONENTS_OF_A_NAME: usize = 8;

/// Lookups of one path that has too many links, before that counts.
const TRIES: usize = 100;

/// Access of all commands to the server's own tree, without programs.
const GROUND: [(&str, BitFlags<AccessFs>); 8] = [
    ("/sys/devices/system/cpu", READ),
    ("/dev", make_bitflags!(AccessFs::{ReadDir})),
    ("/dev/null", DEVICE),
    ("/dev/zero", DEVICE),
    ("/dev/full", DEVICE),
    ("/dev/random", DEVICE),
    ("/dev/urandom", DEVICE),
    ("/dev/tty", DEVICE),
];

/// Made for a view: a few files of the server's, and its own processes.
const VIEWS: [(&str, BitFlags<AccessFs>); 2] = [("/etc", READ), ("/proc", READ)];

/// Private to the view: everything but executing.
const PRIVATE: [&str; 2] = ["/tmp", "/var/tmp"];

/// Files of the machine's /proc that programs read at their start, for commands without a view: C
/// libraries (processors, memory) and libselinux. Of processes, a command reads only its own
/// ([`Domain::enter`]).
const PROC: [&str; 5] = [
    "/proc/filesystems",
    "/proc/meminfo",
    "/proc/cpuinfo",
    "/proc/stat",
    "/proc/sys/vm/overcommit_memory",
];

/// Files that every command of a view may access, opened when the view is complete.
#[derive(Debug, Default)]
pub struct Ground {
    own: Vec<(OwnedFd, BitFlags<AccessFs>)>,
    /// Search path of loaders for libraries.
    pub library_directories: Vec<PathBuf>,
}

impl Ground {
    /// Opens the existing files; missing ones can't be reached.
    pub fn new(spec: &ViewSpec, temporary: Option<&Path>) -> Self {
        let own: Vec<_> = match spec.isolation() {
            // The machine's own tree: as much of it as a view has, and no more.
            Isolation::Nothing => {
                (GROUND.into_iter().map(|(path, access)| (PathBuf::from(path), access)))
                    .chain(system::etc().map(|path| (path, READ)))
                    .chain(PROC.iter().map(|path| (PathBuf::from(path), AccessFs::ReadFile.into())))
                    .chain(temporary.map(|path| (path.to_owned(), CHANGE)))
                    .collect()
            }
            _ => (ground().chain(PRIVATE.iter().map(|path| (*path, CHANGE))))
                .map(|(path, access)| (PathBuf::from(path), access))
                .collect(),
        };
        let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
        // Links at the top (/bin) lead to directories that are in the list themselves.
        let open = |path: &Path| open(path, flags | OFlag::O_NOFOLLOW, Mode::empty()).ok();
        let own = own.iter().filter_map(|(path, access)| Some((open(path)?, *access)));
        let own = own.chain(client_files(spec)).filter(is_no_link).collect();
        Self { own, library_directories: library_directories() }
    }
}

/// The client's files in the view; without one, the server's files with equal content. One that
/// lies in an export is opened with the commands' rights.
fn client_files(spec: &ViewSpec) -> Vec<(OwnedFd, BitFlags<AccessFs>)> {
    let Ok(_acting) = ActingAs::begin(spec.user.as_ref()) else { return Vec::new() };
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let found = |file: &ClientFile| openat2(AT_FDCWD, path_of(&file.path), how).ok();
    spec.client_files.iter().filter_map(found).map(|file| (file, READ)).collect()
}

fn is_no_link((fd, _): &(OwnedFd, BitFlags<AccessFs>)) -> bool {
    fstat(fd).is_ok_and(|status| status.st_mode & libc::S_IFMT != libc::S_IFLNK)
}

/// The machine's Landlock is too old for what confinement claims, or there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoLandlock {
    /// Its version.
    #[error("landlock {LEAST_LANDLOCK} (the kernel has version {0}; Linux 6.12 has 6)")]
    Old(i32),
    /// The kernel has none.
    #[error("landlock {LEAST_LANDLOCK} (the kernel has none, or it is not among its `lsm=`)")]
    Missing,
}

/// Name of the machine's Landlock version.
///
/// # Errors
/// It does not suffice.
pub fn reached() -> Result<String, NoLandlock> {
    judge(crate::sys::landlock_version().ok().filter(|version| *version > 0))
}

fn judge(version: Option<i32>) -> Result<String, NoLandlock> {
    match version {
        Some(version) if version >= LEAST_LANDLOCK => Ok(format!("landlock {version}")),
        Some(version) => Err(NoLandlock::Old(version)),
        None => Err(NoLandlock::Missing),
    }
}

/// Parts of one command's domain.
pub struct Reach<'a> {
    /// Its working directory.
    pub cwd: &'a OwnedFd,
    /// Paths that its words name.
    pub fence: &'a Fence,
    /// Programs that it may start; `None`: any, since the command is not annotated.
    pub programs: Option<&'a Programs>,
}

/// A domain that waits to be entered.
pub struct Domain {
    rules: RulesetCreated,
    /// The machine's /proc is visible, with all of its processes.
    is_proc_of_machine: bool,
}

impl Domain {
    /// Makes the domain of one command: the ground, the grants of `fence`, and the command's open
    /// files.
    pub fn new(
        view: &View,
        reach: &Reach<'_>,
        opened: &[impl AsFd],
        budget: &Budget,
    ) -> Result<Self, Refusal> {
        let Reach { cwd, fence, programs } = reach;
        let failed = |error: RulesetError| {
            Refusal::new(Kind::NoNamespace, format!("cannot confine a command: {error}"))
        };
        let mut domain =
            Self { rules: empty().map_err(failed)?, is_proc_of_machine: view.is_servers_own() };
        for (fd, access) in &view.ground.own {
            domain.allow(fd, *access).map_err(failed)?;
        }
        for fd in opened {
            domain.allow_opened(fd).map_err(failed)?;
        }
        let Some(programs) = programs else {
            for tree in SHOWN.iter().chain(&PROGRAM_LINKS) {
                domain.allow_path(Path::new(tree), PROGRAMS).map_err(failed)?;
            }
            for mount in view.mounts() {
                let programs = if view.is_executable(mount) {
                    AccessFs::Execute.into()
                } else {
                    BitFlags::EMPTY
                };
                let access = in_mount(view, mount, CHANGE | programs);
                domain.allow_path(mount, access).map_err(failed)?;
            }
            return Ok(domain);
        };
        for tree in programs.trees() {
            domain.allow_path(Path::new(tree), READ).map_err(failed)?;
        }
        for (file, access) in programs.files() {
            domain.allow(file, access).map_err(failed)?;
        }
        match rules(
            view,
            cwd,
            &fence.grants,
            ReadableFiles::Directories,
            budget,
            &mut |at, access| domain.allow(at, access),
        ) {
            Ok(()) => Ok(domain),
            Err(NoRules::Kernel(error)) => Err(failed(error)),
            Err(why @ NoRules::NotPlain { .. }) => {
                Err(Refusal::new(Kind::PathOutside, why.to_string()))
            }
            Err(why) => {
                Err(Refusal::new(Kind::Guard, format!("the files that a command names: {why}")))
            }
        }
    }

    /// Enters it for good, with all children. Called by the command's own process.
    pub fn enter(&self) -> nix::Result<()> {
        let mut rules = self.rules.try_clone().map_err(|_| Errno::EMFILE)?;
        if self.is_proc_of_machine {
            // The list of mounts, which `find -fstype` reads, and other files about the process
            // itself.
            let own = open("/proc/self", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
            (&mut rules).add_rule(PathBeneath::new(&own, READ)).map_err(|_| Errno::EPERM)?;
        }
        rules.restrict_self().map(drop).map_err(|_| Errno::EPERM)
    }

    fn allow(&mut self, at: &impl AsFd, access: BitFlags<AccessFs>) -> Result<(), RulesetError> {
        (&mut self.rules).add_rule(PathBeneath::new(at, access)).map(drop)
    }

    fn allow_path(&mut self, path: &Path, access: BitFlags<AccessFs>) -> Result<(), RulesetError> {
        match open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()) {
            Ok(at) => self.allow(&at, access),
            Err(_) => Ok(()),
        }
    }

    /// An open file may be opened once more by its name in /dev/fd, with the same access.
    fn allow_opened(&mut self, fd: &impl AsFd) -> Result<(), RulesetError> {
        let kind = fstat(fd).map_or(0, |status| status.st_mode & libc::S_IFMT);
        let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL).unwrap_or(0));
        let access = match (SFlag::from_bits_truncate(kind), flags & OFlag::O_ACCMODE) {
            (SFlag::S_IFCHR, _) => DEVICE,
            (SFlag::S_IFREG, OFlag::O_RDONLY) => AccessFs::ReadFile.into(),
            (SFlag::S_IFREG, OFlag::O_WRONLY) => AccessFs::WriteFile | AccessFs::Truncate,
            (SFlag::S_IFREG, _) => OUTPUT,
            _ => return Ok(()),
        };
        self.allow(fd, access)
    }
}

/// Enters a domain of one run, with all that it will start: signals end at it, so that kill(-1) in
/// it reaches the run's own processes alone. It takes no right to files away; Landlock refuses
/// links and moves between directories in every domain that does not allow them. Returns how all
/// below this process are reached.
pub fn enter_run() -> nix::Result<Below> {
    if reached().is_err() {
        return Ok(Below::Parents);
    }
    let root = open("/", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    let entered = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::Refer)
        .and_then(|rules| rules.scope(Scope::Signal)?.create())
        .and_then(|rules| rules.add_rule(PathBeneath::new(&root, AccessFs::Refer)))
        .and_then(RulesetCreated::restrict_self);
    entered.map_err(|_| Errno::EPERM)?;
    // Who sends to everybody makes sure.
    match kill(getppid(), None) {
        Err(Errno::EPERM) => Ok(Below::Domain),
        _ => Ok(Below::Parents),
    }
}

fn empty() -> Result<RulesetCreated, RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(KNOWN))?
        .handle_access(AccessNet::from_all(KNOWN))?
        .scope(Scope::from_all(KNOWN))?
        .create()
}

/// Takes a rule: this access to everything below the descriptor.
pub type AddRule<'a> = &'a mut dyn FnMut(&OwnedFd, BitFlags<AccessFs>) -> Result<(), RulesetError>;

/// Files that a command may read, beside its operands themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadableFiles {
    /// Only the operands, as long as they are the same files.
    Named,
    /// Also other files of their directories: a file that is made or replaced while the command
    /// waits has no rule of its own, since rules are on the files at the command's start.
    Directories,
}

/// The reason why a command gets no rules.
#[derive(Debug, thiserror::Error)]
pub enum NoRules {
    /// The kernel refuses a rule.
    #[error("cannot make a rule: {0}")]
    Kernel(#[from] RulesetError),
    /// The command would open something else than a file or a directory.
    #[error("{}: {why}", .path.display())]
    NotPlain {
        /// As the command names it.
        path: PathBuf,
        /// Kind of file, or the error.
        why: Unlike,
    },
    /// The run's budget is spent.
    #[error("{SPENT}")]
    Spent,
    /// The rules would take too much of the kernel's memory.
    #[error("they are more than the {MAX_RULES} that the commands of one run may name here")]
    TooMany,
}

/// Passes the rules of a command with these grants, in the directory `cwd`, to `add`.
pub fn rules(
    view: &View,
    cwd: &OwnedFd,
    grants: &[Grant],
    reads: ReadableFiles,
    budget: &Budget,
    add: AddRule<'_>,
) -> Result<(), NoRules> {
    add(cwd, AccessFs::ReadDir.into())?;
    let mut resolver = Resolver { view, cwd, reads, budget, allowed: HashMap::new(), add };
    grants.iter().try_for_each(|grant| resolver.grant(grant))
}

/// Access to the server's own tree in a view, whatever a command names or starts, without its
/// temporary directories.
pub fn ground() -> impl Iterator<Item = (&'static str, BitFlags<AccessFs>)> {
    VIEWS.into_iter().chain(GROUND)
}

/// The part of `access` that a rule on `path` may have: no changes, unless there is a mount at
/// `path` or below it in which commands may write.
fn in_mount(view: &View, path: &Path, access: BitFlags<AccessFs>) -> BitFlags<AccessFs> {
    match view.is_writable_at_or_below(path) {
        true => access,
        false => access & (READ | PROGRAM),
    }
}

/// Turns grants into rules. Keeps the identity of each file, not its path: a client names as many
/// and as long paths as it likes, and each symbolic link on their way makes another one.
struct Resolver<'a> {
    view: &'a View,
    cwd: &'a OwnedFd,
    reads: ReadableFiles,
    budget: &'a Budget,
    /// Files with a rule, at most [`MAX_RULES`].
    allowed: HashMap<DirectoryId, BitFlags<AccessFs>>,
    add: AddRule<'a>,
}

/// The file at a path.
struct FileAtPath {
    at: OwnedFd,
    kind: SFlag,
    id: DirectoryId,
}

impl Resolver<'_> {
    fn grant(&mut self, grant: &Grant) -> Result<(), NoRules> {
        let path = match self.start(grant)? {
            Some(path) => path,
            None => return Ok(()),
        };
        if grant.opened {
            self.require_plain(&path, grant.no_follow)?;
        }
        match grant.access() {
            Access::Read => self.read(&path, grant.no_follow),
            Access::Output => self.output(&path, grant.no_follow),
            Access::Change => self.change(&path, grant.no_follow),
            Access::Within => self.allow(&path, !grant.no_follow, CHANGE).map(drop),
        }
    }

    /// Refuses what is not to be opened in a mount. The lookup follows no magic links, by which a
    /// name outside of all mounts leads into one (`/proc/self/cwd/x`): that is ELOOP. What the
    /// command does not find either is no matter.
    fn require_plain(&self, path: &Path, no_follow: bool) -> Result<(), NoRules> {
        let bytes = path.as_os_str().as_bytes();
        if !rule::holds(Rule::Files)
            || devices::is_same_everywhere(bytes)
            || devices::descriptor_of(bytes).is_some()
        {
            return Ok(());
        }
        self.spend(path)?;
        let look_up = || find(self.cwd, path, !no_follow);
        // When mounts or renames of others make the kernel walk once more, it goes on counting
        // links: a path of many links is ELOOP at random. The first that stays so ends the run.
        let found = (0..TRIES).map(|_| look_up()).find(|found| !matches!(found, Err(Errno::ELOOP)));
        let checked = match found.unwrap_or(Err(Errno::ELOOP)) {
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::EACCES | Errno::ENAMETOOLONG) => Ok(()),
            found => found.map_err(Unlike::System).and_then(|at| self.require_plain_file(&at)),
        };
        checked.map_err(|why| NoRules::NotPlain { path: path.to_owned(), why })
    }

    fn require_plain_file(&self, at: &OwnedFd) -> Result<(), Unlike> {
        let status = fstat(at).map_err(Unlike::System)?;
        match name_of(at) {
            Ok(name) if self.view.mount_of(&name).is_none() => Ok(()),
            _ => require_plain(&status, kind_of(&status) == SFlag::S_IFLNK),
        }
    }

    /// The path of a grant; with `up_to`, that of the nearest directory upwards that has such an
    /// entry.
    fn start(&self, grant: &Grant) -> Result<Option<PathBuf>, NoRules> {
        let path = path_of(&grant.path);
        if grant.up_to.is_empty() {
            return Ok(Some(path.to_owned()));
        }
        self.spend(path)?;
        let Ok(start) = find(self.cwd, path, true).and_then(|at| name_of(&at)) else {
            return Ok(None);
        };
        let Some(mount) = self.view.mount_of(&start) else { return Ok(None) };
        for top in start.ancestors().take_while(|directory| directory.starts_with(mount)) {
            for name in &grant.up_to {
                self.spend(top)?;
                if top.join(name).symlink_metadata().is_ok() {
                    return Ok(Some(top.join(&grant.below)));
                }
            }
        }
        Ok(None)
    }

    /// Call it before a path is looked up.
    fn spend(&self, path: &Path) -> Result<(), NoRules> {
        match self.budget.spend(1 + path.components().count() / COMPONENTS_OF_A_NAME) {
            true => Ok(()),
            false => Err(NoRules::Spent),
        }
    }

    /// Allows reading a tree, or the directory of a file, and those of the targets of each link on
    /// the way: a file that does not exist yet may come. A file gets a rule of its own only if its
    /// directory has none: the kernel keeps all rules.
    fn read(&mut self, path: &Path, no_follow: bool) -> Result<(), NoRules> {
        let found = self.find(path, !no_follow)?;
        let is_directory = found.as_ref().is_some_and(|found| found.kind == SFlag::S_IFDIR);
        if is_directory
            || self.reads == ReadableFiles::Named
            || !self.read_directories(path, no_follow)?
        {
            found.map_or(Ok(()), |found| self.allow_found(&found, READ))?;
        }
        Ok(())
    }

    /// Returns true if the last of the directories has the file itself, and has a rule.
    fn read_directories(&mut self, path: &Path, no_follow: bool) -> Result<bool, NoRules> {
        let mut path = path.to_owned();
        // Beyond this, the kernel follows no link.
        for _ in 0..MAX_LINKS {
            let parent = parent_of(&path);
            let mut has_rule = false;
            if let Some(found) =
                self.find(&parent, true)?.filter(|found| found.kind == SFlag::S_IFDIR)
            {
                self.allow_found(&found, READ)?;
                has_rule = self.has(found.id, READ);
            }
            self.spend(&path)?;
            match readlinkat(self.cwd, &path) {
                Ok(target) if !no_follow => path = parent.join(target),
                _ => return Ok(has_rule),
            }
            if path.as_os_str().len() >= libc::PATH_MAX.unsigned_abs() as usize {
                break;
            }
        }
        Ok(false)
    }

    /// Allows writing one file, or making it in its directory if it does not exist. Allows nothing
    /// else in the directory: the file is written in place.
    fn output(&mut self, path: &Path, no_follow: bool) -> Result<(), NoRules> {
        match self.find(path, !no_follow)? {
            None => self.around(path, no_follow, CHANGE).map(drop),
            // No command writes to a directory, and this name allows none of its entries.
            Some(found) if found.kind == SFlag::S_IFDIR => Ok(()),
            Some(found) => self.allow_found(&found, OUTPUT),
        }
    }

    /// Allows changing, removing or replacing a file, and as much of the directory around it as
    /// that takes.
    fn change(&mut self, path: &Path, no_follow: bool) -> Result<(), NoRules> {
        let found = self.find(path, !no_follow)?;
        let is_directory = found.as_ref().is_some_and(|found| found.kind == SFlag::S_IFDIR);
        let around = if is_directory { AROUND_DIRECTORY } else { CHANGE };
        let is_covered = self.around(path, no_follow, around)? && !is_directory;
        found.filter(|_| !is_covered).map_or(Ok(()), |found| self.allow_found(&found, CHANGE))
    }

    /// Allows `access` in the directory that has `path` as an entry, or in the deepest existing one
    /// above. Returns true if that directory has the file, and has a rule.
    fn around(
        &mut self,
        path: &Path,
        no_follow: bool,
        access: BitFlags<AccessFs>,
    ) -> Result<bool, NoRules> {
        let parent = parent_of(path);
        let found = self.find(&parent, true)?;
        match &found {
            Some(found) => self.allow_found(found, access)?,
            None => {
                if let Some((deepest, _)) = self.landing(&parent)? {
                    self.allow(&deepest, true, access)?;
                }
            }
        }
        let leads_elsewhere = self.around_target(path, no_follow, access)?;
        Ok(!leads_elsewhere && found.is_some_and(|found| self.has(found.id, access)))
    }

    /// Allows the same around a link's target. Returns true if `path` is a link.
    fn around_target(
        &mut self,
        path: &Path,
        no_follow: bool,
        access: BitFlags<AccessFs>,
    ) -> Result<bool, NoRules> {
        let is_link = self.find(path, false)?.is_some_and(|found| found.kind == SFlag::S_IFLNK);
        if no_follow || !is_link {
            return Ok(false);
        }
        match self.landing(path)? {
            Some((at, SFlag::S_IFDIR)) => drop(self.allow(&at, true, access)?),
            Some((at, _)) => drop(self.allow(at.parent().unwrap_or(&at), true, access)?),
            None => {}
        }
        Ok(true)
    }

    /// Looks up each missing component.
    fn landing(&self, path: &Path) -> Result<Option<(PathBuf, SFlag)>, NoRules> {
        match self.budget.spend(MAX_LINKS + path.components().count()) {
            true => {
                Ok(landing(self.cwd, path, true).ok().map(|(at, status)| (at, kind_of(&status))))
            }
            false => Err(NoRules::Spent),
        }
    }

    /// Allows access to the file at `path`, if it lies in a mount; returns its type.
    fn allow(
        &mut self,
        path: &Path,
        follow: bool,
        access: BitFlags<AccessFs>,
    ) -> Result<Option<SFlag>, NoRules> {
        let Some(found) = self.find(path, follow)? else { return Ok(None) };
        self.allow_found(&found, access)?;
        Ok(Some(found.kind))
    }

    fn allow_found(
        &mut self,
        FileAtPath { at, kind, id }: &FileAtPath,
        access: BitFlags<AccessFs>,
    ) -> Result<(), NoRules> {
        // A link can't be read or written, and the kernel takes no rule on one.
        if self.has(*id, access) || *kind == SFlag::S_IFLNK {
            return Ok(());
        }
        let Some(name) = name_of(at).ok().filter(|name| self.view.mount_of(name).is_some()) else {
            return Ok(());
        };
        let rule = in_mount(self.view, &name, access);
        // The kernel has one rule for each file, whatever the accesses.
        if !self.allowed.contains_key(id) && !self.budget.rule() {
            return Err(NoRules::TooMany);
        }
        (self.add)(at, rule)?;
        *self.allowed.entry(*id).or_default() |= access;
        Ok(())
    }

    fn has(&self, id: DirectoryId, access: BitFlags<AccessFs>) -> bool {
        self.allowed.get(&id).is_some_and(|allowed| allowed.contains(access))
    }

    fn find(&self, path: &Path, follow: bool) -> Result<Option<FileAtPath>, NoRules> {
        self.spend(path)?;
        let Ok(at) = find(self.cwd, path, follow) else { return Ok(None) };
        let Ok(status) = fstat(&at) else { return Ok(None) };
        let id = DirectoryId { device: status.st_dev, inode: status.st_ino };
        Ok(Some(FileAtPath { at, kind: kind_of(&status), id }))
    }
}

fn kind_of(status: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(status.st_mode & libc::S_IFMT)
}

/// The path of the directory that has this one as an entry.
fn parent_of(path: &Path) -> PathBuf {
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(_)) if parent == Path::new("") => PathBuf::from("."),
        (Some(parent), Some(_)) => parent.to_owned(),
        // It ends in `..`, or is `.` or `/`.
        _ => path.join(".."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A tool that removes a file and makes it anew must be able to write it too.
    #[test]
    fn whoever_makes_or_removes_files_writes_them() {
        let names =
            make_bitflags!(AccessFs::{MakeReg | MakeSym | MakeFifo | RemoveFile | Truncate});
        let ground = ground().map(|(_, access)| access);
        for access in
            [PROGRAMS, READ, DEVICE, OUTPUT, AROUND_DIRECTORY, CHANGE].into_iter().chain(ground)
        {
            assert!(
                !access.intersects(names) || access.contains(AccessFs::WriteFile),
                "{access:?}"
            );
        }
    }

    /// Rules of a command in `tree` that uses these paths so, without that on the working
    /// directory.
    fn rules_of(
        tree: &Path,
        access: Access,
        paths: impl Iterator<Item = String>,
    ) -> Result<usize, NoRules> {
        let cwd =
            open(tree, OFlag::O_PATH | OFlag::O_DIRECTORY, Mode::empty()).expect("a directory");
        let grants: Vec<Grant> = paths
            .map(|path| Grant { path: path.into(), access: access.into(), ..Grant::default() })
            .collect();
        let mut count = 0;
        let mut add = |_: &OwnedFd, _| {
            count += 1;
            Ok(())
        };
        rules(
            &View::of_machine(),
            &cwd,
            &grants,
            ReadableFiles::Directories,
            &Budget::new(None),
            &mut add,
        )?;
        Ok(count - 1)
    }

    #[test]
    fn the_rules_of_a_run_are_bounded_and_none_is_made_twice() {
        let tree = tempfile::tempdir().expect("a directory");
        let (at, names) =
            (tree.path(), |count: usize| (0..count).map(|number| format!("f{number}")));
        names(MAX_RULES + 1).for_each(|name| std::fs::write(at.join(name), "").expect("a file"));
        std::fs::create_dir(at.join("d")).expect("a directory");
        std::os::unix::fs::symlink("d/f", at.join("link")).expect("a link");
        std::fs::write(at.join("d/f"), "").expect("a file");
        let named =
            |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>().into_iter();
        assert!(matches!(rules_of(at, Access::Read, names(MAX_RULES + 1)), Ok(1)), "one directory");
        assert!(
            matches!(rules_of(at, Access::Change, names(MAX_RULES + 1)), Ok(1)),
            "one directory"
        );
        assert!(
            matches!(rules_of(at, Access::Read, named(&["link", "d/f", "d", "new"])), Ok(2)),
            "two directories"
        );
        assert!(matches!(rules_of(at, Access::Output, names(MAX_RULES)), Ok(MAX_RULES)));
        assert!(matches!(
            rules_of(at, Access::Output, names(MAX_RULES + 1)),
            Err(NoRules::TooMany)
        ));
    }

    #[test]
    fn what_a_command_opens_is_plain() {
        let tree = tempfile::tempdir().expect("a directory");
        let at = |name: &str| tree.path().join(name);
        std::fs::write(at("file"), "").expect("a file");
        nix::unistd::mkfifo(&at("fifo"), Mode::S_IRWXU).expect("a FIFO");
        std::os::unix::net::UnixListener::bind(at("socket")).expect("a socket");
        for (name, target) in
            [("to-fifo", "fifo"), ("to-file", "file"), ("by-cwd", "/proc/self/cwd/fifo")]
        {
            std::os::unix::fs::symlink(target, at(name)).expect("a link");
        }
        let cwd = open(tree.path(), OFlag::O_PATH | OFlag::O_DIRECTORY, Mode::empty())
            .expect("a directory");
        let is_fine = |path: &str, no_follow, opened| {
            let grants = [Grant { path: path.into(), no_follow, opened, ..Grant::default() }];
            let (view, budget) = (View::of_machine(), Budget::new(None));
            let reads = ReadableFiles::Directories;
            let made = rules(&view, &cwd, &grants, reads, &budget, &mut |_, _| Ok(()));
            assert!(matches!(made, Ok(()) | Err(NoRules::NotPlain { .. })), "{made:?}");
            made.is_ok()
        };
        for path in ["file", ".", "to-file", "missing", "file/x", "/dev/null", "/dev/fd/9"] {
            assert!(is_fine(path, false, true), "{path}");
        }
        for path in ["fifo", "./fifo", "socket", "to-fifo", "by-cwd", "/proc/self/cwd/fifo"] {
            assert!(!is_fine(path, false, true), "{path}");
        }
        // `rm fifo`, `ls -l fifo`; `cp -P fifo x`, `cp -P link x`.
        assert!(is_fine("fifo", true, false));
        assert!(!is_fine("fifo", true, true));
        assert!(is_fine("to-fifo", true, true));
    }

    #[test]
    fn an_old_landlock_is_none() {
        assert_eq!(judge(Some(LEAST_LANDLOCK)), Ok("landlock 6".to_owned()));
        for (version, expected) in [
            (Some(5), "landlock 6 (the kernel has version 5; Linux 6.12 has 6)"),
            (None, "landlock 6 (the kernel has none, or it is not among its `lsm=`)"),
        ] {
            assert_eq!(judge(version).unwrap_err().to_string(), expected);
        }
    }
}
