//! What files one command reaches: a Landlock domain, made from what its annotation names. Not made
//! here: the annotation's reading of the command (see `policy`), and what the whole view shows.
//!
//! What it may start is one file each (see `programs`): a directory of programs would be all that
//! is installed.
//!
//! Every path is resolved once, to a descriptor, and the rule is on what that refers to: a name
//! that leads out of the directories of the operands a moment later leads to something that is not
//! in the domain. What is made or replaced in one of these directories while the command waits can
//! be read. What the domain lacks fails with EACCES, so too little of it would change what a
//! command says: a command that changes a file gets the directory around it too, since tools make
//! their temporary files there.
//!
//! Invariant: whoever may make, remove or truncate files in a tree may write their contents too.
//! Otherwise a tool that replaces a file (removes it, makes it anew, and only then may not write to
//! it) leaves an empty one.

use std::{
    collections::HashMap,
    os::fd::{AsFd, OwnedFd},
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
    sys::stat::{FileStat, Mode, SFlag, fstat},
};
use posh_proto::executor::{ClientFile, rejected::Kind};

use super::{
    budget::{Budget, MAX_RULES, SPENT},
    paths::{MAX_LINKS, find, landing, name_of},
    programs::{Programs, library_directories},
    system,
    view::{PROGRAM_LINKS, SHOWN, View, path_of},
    wire::{Access, DirectoryId, Fence, Grant, Isolation, ViewSpec},
};
use crate::{error::Refusal, sys::ActingAs};

/// The newest version of Landlock that this file knows the rights of; of an older kernel's, what
/// there is.
const KNOWN: ABI = ABI::V7;

/// The oldest version whose rights keep what docs/security.md says of commands. Before version 2 no
/// file could be moved to another directory, before 3 any file could be truncated, before 5 any
/// device be told to do things, and before 6 (Linux 6.12) signals and abstract sockets reached out
/// of the domain. Version 7 only adds records.
pub const LEAST_LANDLOCK: i32 = 6;

/// What the server's programs are for, where it is not known which of them a command starts.
const PROGRAMS: BitFlags<AccessFs> = make_bitflags!(AccessFs::{Execute | ReadFile | ReadDir});
/// The kernel reads what it executes, loaders and interpreters too.
pub const PROGRAM: BitFlags<AccessFs> = make_bitflags!(AccessFs::{Execute | ReadFile});
pub const READ: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | ReadDir});
const DEVICE: BitFlags<AccessFs> =
    make_bitflags!(AccessFs::{ReadFile | WriteFile | Truncate | IoctlDev});
const OUTPUT: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | WriteFile | Truncate});
/// Of the directory around one that may be removed or moved itself: only empty directories can be
/// removed by it, and no file.
const AROUND_DIRECTORY: BitFlags<AccessFs> =
    make_bitflags!(AccessFs::{ReadDir | RemoveDir | Refer});
/// All but starting programs: those of an export are data. Sockets and devices are nothing that a
/// command makes.
pub const CHANGE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{
    ReadFile | WriteFile | Truncate | ReadDir | RemoveDir | RemoveFile | MakeDir | MakeReg | MakeSym | MakeFifo | Refer
});

/// Walking so many directories costs a run as much as looking at a name.
const COMPONENTS_OF_A_NAME: usize = 8;

/// What all commands use of the server's own tree, and how; what they may start is not among it.
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

/// Private to the view, so everything but starting what was put there.
const PRIVATE: [&str; 2] = ["/tmp", "/var/tmp"];

/// Without a view, what programs look at of the machine's /proc when they start: C libraries
/// (processors, memory) and libselinux. A command reads of processes its own only
/// ([`Domain::enter`]).
const PROC: [&str; 5] = [
    "/proc/filesystems",
    "/proc/meminfo",
    "/proc/cpuinfo",
    "/proc/stat",
    "/proc/sys/vm/overcommit_memory",
];

/// What every command of a view may reach, resolved when the view stands.
#[derive(Debug, Default)]
pub struct Ground {
    own: Vec<(OwnedFd, BitFlags<AccessFs>)>,
    /// Where loaders look for libraries.
    pub library_directories: Vec<PathBuf>,
}

impl Ground {
    /// Opens what there is; what is missing, nobody can reach.
    pub fn new(spec: &ViewSpec, temporary: Option<&Path>) -> Self {
        let own: Vec<_> = match spec.isolation() {
            // The machine's own: as much of it as a view has, and no more.
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

/// The client's files in the view; without one, the files that were there with the same content.
/// One that lies in an export is found with the commands' rights.
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

/// What the machine's Landlock is good for, or what of it is missing.
pub fn reached() -> Result<String, String> {
    judge(crate::sys::landlock_version().ok().filter(|version| *version > 0))
}

fn judge(version: Option<i32>) -> Result<String, String> {
    match version {
        Some(version) if version >= LEAST_LANDLOCK => Ok(format!("landlock {version}")),
        Some(version) => Err(format!(
            "landlock {LEAST_LANDLOCK} (the kernel has version {version}; Linux 6.12 has 6)"
        )),
        None => Err(format!(
            "landlock {LEAST_LANDLOCK} (the kernel has none, or it is not among its `lsm=`)"
        )),
    }
}

/// What one command may use.
pub struct Reach<'a> {
    /// Its directory.
    pub cwd: &'a OwnedFd,
    /// What its words name.
    pub fence: &'a Fence,
    /// What it may start; `None`: nobody knows, so anything.
    pub programs: Option<&'a Programs>,
}

/// A domain that waits to be entered.
pub struct Domain {
    rules: RulesetCreated,
    /// The machine's /proc is there, with all of its processes.
    is_proc_of_machine: bool,
}

impl Domain {
    /// Makes the domain of one command: the ground, what `fence` grants, and what the command has
    /// open.
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
                domain.allow_path(mount, CHANGE | programs).map_err(failed)?;
            }
            return Ok(domain);
        };
        for tree in programs.trees() {
            domain.allow_path(Path::new(tree), READ).map_err(failed)?;
        }
        for (file, access) in programs.files() {
            domain.allow(file, access).map_err(failed)?;
        }
        match rules((view, cwd), (&fence.grants, Reads::Directories), budget, &mut |at, access| {
            domain.allow(at, access)
        }) {
            Ok(()) => Ok(domain),
            Err(NoRules::Kernel(error)) => Err(failed(error)),
            Err(why) => {
                Err(Refusal::new(Kind::Guard, format!("the files that a command names: {why}")))
            }
        }
    }

    /// Enters it, for good, with all that will be started. Called by the command's own process.
    pub fn enter(&self) -> nix::Result<()> {
        let mut rules = self.rules.try_clone().map_err(|_| Errno::EMFILE)?;
        if self.is_proc_of_machine {
            // The list of mounts, which `find -fstype` reads, and what else a process is told of
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

    /// What is open may be opened once more by the name that /dev/fd gives it, as it is open.
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

fn empty() -> Result<RulesetCreated, RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(KNOWN))?
        .handle_access(AccessNet::from_all(KNOWN))?
        .scope(Scope::from_all(KNOWN))?
        .create()
}

/// Takes a rule: all below what the descriptor refers to may be used so.
pub type AddRule<'a> = &'a mut dyn FnMut(&OwnedFd, BitFlags<AccessFs>) -> Result<(), RulesetError>;

/// How far a command reads, of the files that its words name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reads {
    /// These, as long as they are the same files.
    Named,
    /// Also what else is in their directories: a file that is made or replaced while the command
    /// waits has no rule of its own, since rules are on what is there when the command starts.
    Directories,
}

/// The reason why a command gets no rules.
#[derive(Debug, thiserror::Error)]
pub enum NoRules {
    /// The kernel's.
    #[error("cannot make a rule: {0}")]
    Kernel(#[from] RulesetError),
    /// The run has used up what it may look at.
    #[error("{SPENT}")]
    Spent,
    /// Or what it may have of the kernel's memory.
    #[error("they are more than the {MAX_RULES} that the commands of one run may name here")]
    TooMany,
}

/// Gives `add` the rules of a command that has these grants, in the directory `cwd`.
pub fn rules(
    (view, cwd): (&View, &OwnedFd),
    (grants, reads): (&[Grant], Reads),
    budget: &Budget,
    add: AddRule<'_>,
) -> Result<(), NoRules> {
    add(cwd, AccessFs::ReadDir.into())?;
    let mut resolver = Resolver { view, cwd, reads, budget, allowed: HashMap::new(), add };
    grants.iter().try_for_each(|grant| resolver.grant(grant))
}

/// What the server's own tree is for, in a view, whatever a command names or starts, other than its
/// temporary directories.
pub fn ground() -> impl Iterator<Item = (&'static str, BitFlags<AccessFs>)> {
    VIEWS.into_iter().chain(GROUND)
}

/// Turns grants into rules. What it keeps of a path is which file that is: a client names as many
/// paths, and as long ones, as it likes, and each of the links on their way makes another one.
struct Resolver<'a> {
    view: &'a View,
    cwd: &'a OwnedFd,
    reads: Reads,
    budget: &'a Budget,
    /// What has a rule, at most [`MAX_RULES`].
    allowed: HashMap<DirectoryId, BitFlags<AccessFs>>,
    add: AddRule<'a>,
}

/// What a path leads to.
struct Found {
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
        match grant.access() {
            Access::Read => self.read(&path, grant.no_follow),
            Access::Output => self.output(&path, grant.no_follow),
            Access::Change => self.change(&path, grant.no_follow),
            Access::Within => self.allow(&path, !grant.no_follow, CHANGE).map(drop),
        }
    }

    /// The path of a grant; by `up_to` that of the nearest directory above which has such an entry.
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

    /// To be called before a path is looked up.
    fn spend(&self, path: &Path) -> Result<(), NoRules> {
        match self.budget.spend(1 + path.components().count() / COMPONENTS_OF_A_NAME) {
            true => Ok(()),
            false => Err(NoRules::Spent),
        }
    }

    /// Allows a tree to be read, or the directory that has a file, and the one that each link on
    /// the way leads to. Where there is nothing yet, it may come. A file gets a rule of its own
    /// only if its directory has none: the kernel keeps as many rules as there are.
    fn read(&mut self, path: &Path, no_follow: bool) -> Result<(), NoRules> {
        let found = self.find(path, !no_follow)?;
        let is_directory = found.as_ref().is_some_and(|found| found.kind == SFlag::S_IFDIR);
        if is_directory || self.reads == Reads::Named || !self.read_directories(path, no_follow)? {
            found.map_or(Ok(()), |found| self.allow_found(&found, READ))?;
        }
        Ok(())
    }

    /// Tells if the last of the directories is the one that has the file itself, and has its rule.
    fn read_directories(&mut self, path: &Path, no_follow: bool) -> Result<bool, NoRules> {
        let mut path = path.to_owned();
        // What is longer the kernel follows by its links alone.
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

    /// Allows one file to be written, and where there is none, the directory in which it is made.
    /// Nothing else of its directory: the file is written where it is.
    fn output(&mut self, path: &Path, no_follow: bool) -> Result<(), NoRules> {
        match self.find(path, !no_follow)? {
            None => self.around(path, no_follow, CHANGE).map(drop),
            // No command writes to a directory, and to what is in it none may by this name.
            Some(found) if found.kind == SFlag::S_IFDIR => Ok(()),
            Some(found) => self.allow_found(&found, OUTPUT),
        }
    }

    /// Allows what a command changes, removes or replaces, and as much of the directory around it
    /// as that takes.
    fn change(&mut self, path: &Path, no_follow: bool) -> Result<(), NoRules> {
        let found = self.find(path, !no_follow)?;
        let is_directory = found.as_ref().is_some_and(|found| found.kind == SFlag::S_IFDIR);
        let around = if is_directory { AROUND_DIRECTORY } else { CHANGE };
        let is_covered = self.around(path, no_follow, around)? && !is_directory;
        found.filter(|_| !is_covered).map_or(Ok(()), |found| self.allow_found(&found, CHANGE))
    }

    /// Allows this in the directory that has `path` as an entry, or in the deepest one that there
    /// is. Tells if that is the one that has the file, and has its rule.
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

    /// Where a link leads, things are made too. Tells if it is one.
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

    /// Each component that is missing is looked for.
    fn landing(&self, path: &Path) -> Result<Option<(PathBuf, SFlag)>, NoRules> {
        match self.budget.spend(MAX_LINKS + path.components().count()) {
            true => {
                Ok(landing(self.cwd, path, true).ok().map(|(at, status)| (at, kind_of(&status))))
            }
            false => Err(NoRules::Spent),
        }
    }

    /// Allows what is at `path`, if it lies in a mount; gives its kind.
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
        Found { at, kind, id }: &Found,
        access: BitFlags<AccessFs>,
    ) -> Result<(), NoRules> {
        // A link can't be read or written, and the kernel takes no rule on one.
        if self.has(*id, access) || *kind == SFlag::S_IFLNK {
            return Ok(());
        }
        if !name_of(at).is_ok_and(|name| self.view.mount_of(&name).is_some()) {
            return Ok(());
        }
        // The kernel has one for each file, whatever the accesses.
        if !self.allowed.contains_key(id) && !self.budget.rule() {
            return Err(NoRules::TooMany);
        }
        (self.add)(at, access)?;
        *self.allowed.entry(*id).or_default() |= access;
        Ok(())
    }

    fn has(&self, id: DirectoryId, access: BitFlags<AccessFs>) -> bool {
        self.allowed.get(&id).is_some_and(|allowed| allowed.contains(access))
    }

    fn find(&self, path: &Path, follow: bool) -> Result<Option<Found>, NoRules> {
        self.spend(path)?;
        let Ok(at) = find(self.cwd, path, follow) else { return Ok(None) };
        let Ok(status) = fstat(&at) else { return Ok(None) };
        let id = DirectoryId { device: status.st_dev, inode: status.st_ino };
        Ok(Some(Found { at, kind: kind_of(&status), id }))
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

    /// The rules, but that on the working directory, of a command in `tree` that uses these paths
    /// so.
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
            (&View::of_machine(), &cwd),
            (&grants, Reads::Directories),
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
    fn an_old_landlock_is_none() {
        assert_eq!(judge(Some(LEAST_LANDLOCK)), Ok("landlock 6".to_owned()));
        for (version, expected) in [
            (Some(5), "landlock 6 (the kernel has version 5; Linux 6.12 has 6)"),
            (None, "landlock 6 (the kernel has none, or it is not among its `lsm=`)"),
        ] {
            assert_eq!(judge(version).unwrap_err(), expected);
        }
    }
}
