//! One stage's process, from the contract's words to execve: the work of a shell's child between
//! fork and exec, and a barrier before the exec.

use std::{
    collections::HashMap,
    ffi::CString,
    io::{Read as _, Write as _},
    os::{
        fd::{AsFd as _, OwnedFd, RawFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
    rc::Rc,
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    libc,
    sys::{
        resource::{Resource, getrlimit},
        stat::{Mode, fstat, umask},
    },
    unistd::{ForkResult, Pid, setpgid},
};
use posh_proto::{
    executor::{Descriptor, Stage, WrittenFile, descriptor::Source, rejected::Kind},
    rule::{self, Rule},
};

use super::{
    budget::{Budget, Over, SPENT},
    changes::WatchedTrees,
    confine::{self, OwnMemory},
    fence::{Domain, Reach},
    filter::{self, Narrowed},
    guards, paths,
    programs::Programs,
    view::View,
    wire::{Bounds, EndKind, Fence, PipeEnd},
};
use crate::{error::Refusal, identity, sys, tools};

/// The pipe and pty ends that came with the job.
pub type Ends = HashMap<PipeEnd, Rc<OwnedFd>>;

/// The two pipes of the barrier: each stage reports success or failure of its set-up, and then
/// waits for one byte.
pub struct Barrier<'a> {
    pub report: &'a OwnedFd,
    pub go: &'a OwnedFd,
}

/// Report of a child at the barrier: its stage, and an errno or 0.
pub const REPORT_BYTES: usize = 8;

/// A stage whose paths are checked and whose descriptors are open.
pub struct Prepared {
    stage: Stage,
    program: CString,
    argv: Vec<CString>,
    env: Vec<CString>,
    cwd: Rc<OwnedFd>,
    descriptors: Vec<(Rc<OwnedFd>, RawFd)>,
    /// Files whose final offsets are to be reported.
    reported: Vec<(u32, Rc<OwnedFd>)>,
    /// Files that it writes to, with their sizes.
    written: Vec<(u32, u64)>,
    watch: WatchedTrees,
    open_files: u64,
    bounds: Bounds,
    domain: Option<Domain>,
    /// Set for an annotated command, whose behaviour is known: it makes only the listed system
    /// calls.
    narrowed: Option<Narrowed>,
}

/// Budgets for lookups before the start.
pub struct Budgets {
    /// Guards and paths, without which nothing starts.
    pub checks: Budget,
    /// Watched trees.
    pub trees: Budget,
}

/// State of a stage that is kept until it has ended.
pub struct Live {
    pub stage: u32,
    /// Files whose final offsets are to be reported.
    pub reported: Vec<(u32, Rc<OwnedFd>)>,
    /// Trees whose changes are to be reported.
    pub watch: WatchedTrees,
    /// There are such trees or files, so that its end is told by looking at file systems.
    pub is_looked_at: bool,
}

impl Prepared {
    /// Checks a stage and opens the files that it names; nothing runs.
    pub fn new(
        view: &View,
        ends: &Ends,
        stage: Stage,
        fence: &Fence,
        budgets: &Budgets,
    ) -> Result<Self, Refusal> {
        let id = stage.id;
        Self::prepare(view, ends, stage, fence, budgets).map_err(|refusal| refusal.at(id))
    }

    fn prepare(
        view: &View,
        ends: &Ends,
        stage: Stage,
        fence: &Fence,
        budgets: &Budgets,
    ) -> Result<Self, Refusal> {
        if view.is_servers_own() && fence.changes {
            return Err(changes_without_namespaces(&stage));
        }
        check_open_files(view, &stage)?;
        let cwd = paths::working_directory(view, &stage.cwd)?;
        paths::check(view, &cwd, &stage, &budgets.checks)?;
        guards::check(view, &cwd, &stage, &fence.own_guards, &budgets.checks)?;
        let program = tools::find(&stage.program).ok_or_else(|| {
            Refusal::new(
                Kind::MissingTool,
                format!("{} is not installed on the server", stage.program),
            )
        })?;
        let directories = &view.ground.library_directories;
        let programs =
            (!fence.everything).then(|| Programs::new(&program, &fence.starts, directories));
        let narrowed = programs.as_ref().map(|programs| match programs.is_alone() {
            true => Narrowed::Alone,
            false => Narrowed::WithOthers,
        });
        let watch = watch(view, &cwd, &stage, &budgets.trees)?;
        let mut prepared = Self {
            program: c_string(program.as_os_str().as_bytes())?,
            argv: stage.argv.iter().map(|argument| c_string(argument)).collect::<Result<_, _>>()?,
            env: environment(&stage, view.temporary.as_deref())?,
            cwd: Rc::new(cwd),
            descriptors: Vec::new(),
            reported: Vec::new(),
            written: Vec::new(),
            watch,
            open_files: view.open_files,
            bounds: view.bounds,
            domain: None,
            narrowed,
            stage,
        };
        for descriptor in std::mem::take(&mut prepared.stage.descriptors) {
            prepared.open_descriptor(view, ends, descriptor)?;
        }
        let opened: Vec<_> =
            prepared.descriptors.iter().map(|(source, _)| source.as_fd()).collect();
        let reach = Reach { cwd: &prepared.cwd, fence, programs: programs.as_ref() };
        prepared.domain = Some(Domain::new(view, &reach, &opened, &budgets.checks)?);
        Ok(prepared)
    }

    fn open_descriptor(
        &mut self,
        view: &View,
        ends: &Ends,
        descriptor: Descriptor,
    ) -> Result<(), Refusal> {
        let end = |kind: EndKind, id| {
            let end = ends.get(&PipeEnd { kind: kind.into(), id });
            end.cloned().ok_or_else(|| Refusal::protocol(format!("no such pipe or pty: {id}")))
        };
        let source = match descriptor.source {
            None | Some(Source::Closed(_)) => return Ok(()),
            Some(Source::PipeRead(id)) => end(EndKind::PipeRead, id)?,
            Some(Source::PipeWrite(id)) => end(EndKind::PipeWrite, id)?,
            Some(Source::Pty(id)) => end(EndKind::Pty, id)?,
            Some(Source::NullFlags(flags)) => Rc::new(open_null(flags)?),
            Some(Source::DuplicateOf(fd)) => self.opened_as(fd)?,
            Some(Source::File(file)) => {
                let opened = Rc::new(paths::open_redirect(view, &self.cwd, &file)?);
                if file.flags.cast_signed() & libc::O_ACCMODE != libc::O_RDONLY {
                    let size =
                        fstat(opened.as_fd()).map_or(0, |about| about.st_size.unsigned_abs());
                    self.written.push((descriptor.fd, size));
                }
                if file.report_offset {
                    self.reported.push((descriptor.fd, opened.clone()));
                }
                opened
            }
        };
        let target = RawFd::try_from(descriptor.fd)
            .map_err(|_| Refusal::protocol("descriptor number out of range"))?;
        self.descriptors.push((source, target));
        Ok(())
    }

    fn opened_as(&self, fd: u32) -> Result<Rc<OwnedFd>, Refusal> {
        let earlier = self.descriptors.iter().find(|(_, target)| u32::try_from(*target) == Ok(fd));
        let missing = || {
            Refusal::protocol(format!("duplicate of descriptor {fd}, which is not open before it"))
        };
        earlier.map(|(source, _)| source.clone()).ok_or_else(missing)
    }

    /// Sizes of the files that its redirects write to.
    pub fn written_files(&self) -> impl Iterator<Item = WrittenFile> {
        self.written.iter().map(|(fd, size)| WrittenFile {
            stage: self.stage.id,
            fd: *fd,
            size: *size,
        })
    }

    /// Forks the stage; its child waits at the barrier.
    pub fn fork(&self, barrier: &Barrier<'_>, memory: &OwnMemory) -> nix::Result<Pid> {
        match sys::fork()? {
            ForkResult::Parent { child } => {
                // The parent sets it, too: a signal to the group may come before the child runs.
                let _ = setpgid(child, child);
                Ok(child)
            }
            ForkResult::Child => self.become_stage(barrier, memory),
        }
    }

    /// State that the supervisor needs from now on; closes its copies of the descriptors.
    pub fn into_live(self) -> Live {
        let is_looked_at = !self.reported.is_empty()
            || !self.stage.watched_trees.is_empty()
            || !self.stage.owners_of.is_empty()
            || !self.stage.attributes_of.is_empty();
        Live { stage: self.stage.id, reported: self.reported, watch: self.watch, is_looked_at }
    }

    fn become_stage(&self, barrier: &Barrier<'_>, memory: &OwnMemory) -> ! {
        let wanted: Vec<_> =
            self.descriptors.iter().map(|(source, target)| (source.as_fd(), *target)).collect();
        // First the steps that need our descriptors: the command's own may have the same numbers.
        let installed = self.enter().and_then(|()| {
            sys::install_descriptors(&wanted, [barrier.report.as_fd(), barrier.go.as_fd()])
        });
        let [report, go] = match installed {
            Ok(kept) => kept,
            Err(errno) => {
                // Both copies may be missing: report on the original, if that still exists.
                let copy = barrier.report.try_clone();
                let _ = copy.map(|copy| std::fs::File::from(copy).write_all(&self.report(errno)));
                sys::exit_now(126);
            }
        };
        let errno =
            memory.give_back().and_then(|()| self.set_up()).err().unwrap_or(Errno::from_raw(0));
        let said = std::fs::File::from(report).write_all(&self.report(errno));
        let mut byte = [0];
        if said.is_err() || !matches!(std::fs::File::from(go).read(&mut byte), Ok(1)) {
            sys::exit_now(126);
        }
        let errno = sys::exec(&self.program, &self.argv, &self.env, filter::pass());
        // Too late to refuse: others run already. The message is a shell's.
        let message = format!("posh-executor: {}: {}\n", self.stage.program, errno.desc());
        let _ = std::io::stderr().write_all(message.as_bytes());
        sys::exit_now(if errno == Errno::ENOENT { 127 } else { 126 })
    }

    fn report(&self, errno: Errno) -> [u8; REPORT_BYTES] {
        let mut report = [0; REPORT_BYTES];
        report[..4].copy_from_slice(&self.stage.id.to_le_bytes());
        report[4..].copy_from_slice(&(errno as i32).to_le_bytes());
        report
    }

    /// Enters its process group, its directory, and its domain.
    fn enter(&self) -> nix::Result<()> {
        setpgid(Pid::from_raw(0), Pid::from_raw(0))?;
        confine::enter_directory(&self.cwd)?;
        self.domain.as_ref().map_or(Ok(()), Domain::enter)
    }

    fn set_up(&self) -> nix::Result<()> {
        umask(Mode::from_bits_truncate(self.stage.umask));
        let hard = getrlimit(Resource::RLIMIT_NOFILE)?.1;
        sys::set_limit(libc::RLIMIT_NOFILE, self.open_files, hard)?;
        for limit in &self.stage.limits {
            sys::set_limit(limit.resource, limit.soft, limit.hard)?;
        }
        confine::set_bounds(&self.bounds)?;
        sys::set_nice(self.stage.nice);
        sys::set_signals(self.stage.ignored_signals, self.stage.blocked_signals);
        if let Some(narrowed) = self.narrowed {
            // Last, since setting up needs calls that the filter refuses.
            filter::narrow(narrowed)?;
        }
        Ok(())
    }
}

/// Landlock has no rights for modes, owners, times and extended attributes. Without mounts of its
/// own, a command that has to set them could do so outside of the exports, and can't be told from
/// others.
fn changes_without_namespaces(stage: &Stage) -> Refusal {
    let why = "it changes files, and without namespaces the server can't keep it from changing \
               attributes outside of the exports";
    Refusal::new(
        Kind::NotAllowed,
        format!("this executor does not run {} like this: {why}", stage.program),
    )
}

/// Files that a program opens beside those that its words and descriptors name: libraries, locales.
const OWN_FILES: u64 = 32;

/// Programs that have one operand open at a time, so that their words say nothing of open files.
const ONE_BY_ONE: [&str; 27] = [
    "b2sum",
    "base32",
    "base64",
    "basename",
    "cat",
    "cksum",
    "dirname",
    "du",
    "echo",
    "egrep",
    "fgrep",
    "find",
    "grep",
    "head",
    "ls",
    "md5sum",
    "printf",
    "realpath",
    "rm",
    "sed",
    "sha1sum",
    "sha224sum",
    "sha256sum",
    "sha384sum",
    "sha512sum",
    "stat",
    "wc",
];

/// A command that opens all that its words name (paste, tee) is not to run out of descriptors here
/// if it would not on the workstation.
fn check_open_files(view: &View, stage: &Stage) -> Result<(), Refusal> {
    let hard = getrlimit(Resource::RLIMIT_NOFILE)
        .map_err(|errno| Refusal::new(Kind::SpawnFailed, errno.desc()))?
        .1;
    let bound = Some(view.bounds.open_files).filter(|bound| *bound > 0).unwrap_or(hard).min(hard);
    let own = stage.limits.iter().rfind(|limit| limit.resource == libc::RLIMIT_NOFILE);
    let wanted = own.map_or(0, |limit| limit.soft);
    let named = (stage.argv.len() + stage.descriptors.len()) as u64 + OWN_FILES;
    let is_one_by_one = ONE_BY_ONE.contains(&stage.program.as_str());
    if wanted <= bound || named <= bound || is_one_by_one {
        return Ok(());
    }
    let why = format!("it may open {named} files, and commands have {bound} (`max_open_files`)");
    Err(Refusal::new(
        Kind::NotAllowed,
        format!("this executor does not run {} like this: {why}", stage.program),
    ))
}

/// Starts watching. A tree that is too large makes the report of changes incomplete; a walk that
/// takes too long refuses the run.
fn watch(
    view: &View,
    cwd: &OwnedFd,
    stage: &Stage,
    budget: &Budget,
) -> Result<WatchedTrees, Refusal> {
    let watch = WatchedTrees::new(view, cwd, stage, budget);
    match budget.over() {
        Some(Over::Time | Over::GivenUp) => Err(Refusal::new(
            Kind::Guard,
            format!("the trees that {} may change: {SPENT}", stage.program),
        )),
        Some(Over::Names | Over::Bytes) | None => match watch.default_acl() {
            Some(directory) if rule::holds(Rule::MountDifferences) => {
                Err(paths::default_acl_refusal(directory))
            }
            _ => Ok(watch),
        },
    }
}

fn c_string(bytes: &[u8]) -> Result<CString, Refusal> {
    CString::new(bytes).map_err(|_| Refusal::protocol("an argument holds a zero byte"))
}

/// The stage's variables, with our PATH in place of theirs, and our TMPDIR, where /tmp is not the
/// commands' own.
fn environment(stage: &Stage, temporary: Option<&Path>) -> Result<Vec<CString>, Refusal> {
    let temporary =
        temporary.map(|directory| [b"TMPDIR=", directory.as_os_str().as_bytes()].concat());
    let own_names = [Some(&b"PATH"[..]), temporary.as_ref().map(|_| &b"TMPDIR"[..])];
    let own =
        [Some(format!("PATH={}", identity::PATH).into_bytes()), temporary].into_iter().flatten();
    let own = own.map(|variable| c_string(&variable));
    let given = stage.env.iter().filter(|variable| !own_names.contains(&Some(&variable.name[..])));
    own.chain(
        given.map(|variable| c_string(&[&variable.name[..], b"=", &variable.value[..]].concat())),
    )
    .collect()
}

fn open_null(flags: u32) -> Result<OwnedFd, Refusal> {
    let flags = OFlag::from_bits_retain(i32::try_from(flags).unwrap_or(0));
    let kept = flags & (OFlag::O_ACCMODE | OFlag::O_APPEND | OFlag::O_NONBLOCK);
    open(Path::new("/dev/null"), kept | OFlag::O_CLOEXEC, Mode::empty()).map_err(|errno| {
        Refusal::new(Kind::OpenFailed, format!("cannot open /dev/null: {}", errno.desc()))
    })
}
