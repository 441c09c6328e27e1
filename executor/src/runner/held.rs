//! Redirects that are held. A run may be started before the workstation's shell has opened the file that it writes to: what is
//! written waits here. Once the shell has, the file is opened, and a process of its own carries there what waits and what follows.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    rc::Rc,
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    libc,
    sys::{
        prctl,
        signal::Signal,
        stat::{FileStat, fstat},
        statvfs::{FsFlags, fstatvfs},
    },
    unistd::{ForkResult, Pid, pipe2},
};
use posh_proto::executor::{File as Redirect, Stage, rejected};

use super::{
    confine, paths,
    reads::{Read, identity},
    view::{View, path_of},
};
use crate::{error::Refusal, sys};

/// What waits of one at most, and in a pipe besides: so much is done before a command waits itself.
pub const WAITS_BYTES: usize = 32 << 20;

/// The kernel gives an ordinary user 16 such pipes (pipe(7)).
const PIPE_BYTES: i32 = 1 << 20;

/// Taken in at a time.
pub const PIECE_BYTES: usize = 256 << 10;

/// A redirect that waits.
pub struct Held {
    /// Which descriptor of the stage it is.
    pub fd: u32,
    /// Where it leads.
    pub file: Redirect,
    /// What waits, then what follows; `None` at its end.
    kept: Vec<u8>,
    follows: Option<File>,
    cwd: Rc<OwnedFd>,
}

/// A redirect on its way to its file.
pub struct Released {
    /// How large that was, bytes.
    pub size: u64,
    /// Which descriptor of the stage it is.
    pub fd: u32,
    /// The process that carries it.
    pub carrier: Pid,
    /// Where to, if its final offset is to be told.
    pub reported: Option<Rc<OwnedFd>>,
}

impl Held {
    /// One of a stage's, and what the stage writes to.
    pub fn new(stage: &Stage, fd: u32, file: Redirect, cwd: &Rc<OwnedFd>) -> Result<(Self, OwnedFd), Refusal> {
        let access = file.flags.cast_signed() & libc::O_ACCMODE;
        if access != libc::O_WRONLY || stage.paths.iter().any(|used| used.recursive) {
            return Err(Refusal::protocol("a redirect is held that can't be"));
        }
        let path = path_of(&file.path);
        let is_read_only = || {
            let place = paths::find(cwd, path.parent()?, true).ok()?;
            Some(fstatvfs(&place).ok()?.flags().contains(FsFlags::ST_RDONLY))
        };
        if is_read_only() == Some(true) {
            let why = format!("cannot open {}: {}", path.display(), Errno::EROFS.desc());
            return Err(Refusal::new(rejected::Kind::OpenFailed, why));
        }
        let failed = |errno: Errno| Refusal::protocol(format!("cannot make a pipe: {}", errno.desc()));
        let (waits, end) = pipe2(OFlag::O_CLOEXEC).map_err(failed)?;
        // It is as good with less.
        let _ = fcntl(&waits, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
        Ok((Self { fd, file, kept: Vec::new(), follows: Some(waits.into()), cwd: cwd.clone() }, end))
    }

    /// Where there is more to [`keep`](Self::keep), if there is room for it.
    pub fn follows(&self) -> Option<BorrowedFd<'_>> {
        self.follows.as_ref().filter(|_| self.kept.len() + PIECE_BYTES <= WAITS_BYTES).map(File::as_fd)
    }

    /// Takes in what is there, by way of `piece`: so much of it, or the end.
    pub fn keep(&mut self, piece: &mut [u8]) {
        let Some(follows) = &mut self.follows else { return };
        match follows.read(piece) {
            Ok(0) => self.follows = None,
            Ok(count) => self.kept.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => self.follows = None,
        }
    }

    /// Which of the files that the run reads it is to be appended to: neither can that wait nor be done once more. A
    /// file that is there already is meant; one that is made meanwhile is looked at when this is released.
    pub fn appends_to(&self, read: &[Read]) -> Option<Refusal> {
        let appends = self.file.flags.cast_signed() & libc::O_APPEND != 0;
        let path = path_of(&self.file.path);
        let is_read = || Some(is_among(read, &fstat(paths::find(&self.cwd, path, true).ok()?.as_fd()).ok()?));
        let why = || format!("cannot open {}: it is also read", path.display());
        (appends && is_read() == Some(true)).then(|| Refusal::new(rejected::Kind::OpenFailed, why()))
    }

    /// Lets it go: opens the file, unless that is one that the run has read, which the shell has emptied by opening it.
    pub fn release(self, view: &View, stage: &Stage, read: &[Read]) -> Result<Released, String> {
        let opened = paths::open_redirect(view, &self.cwd, &self.file).map_err(|refusal| refusal.message)?;
        let about = fstat(&opened).map_err(|errno| errno.desc().to_owned())?;
        if is_among(read, &about) {
            return Err(format!("{} is also read", path_of(&self.file.path).display()));
        }
        let (size, opened) = (about.st_size.unsigned_abs(), Rc::new(opened));
        let reported = self.file.report_offset.then(|| opened.clone());
        let fd = self.fd;
        match sys::fork().map_err(|errno| errno.desc().to_owned())? {
            ForkResult::Parent { child } => Ok(Released { size, fd, carrier: child, reported }),
            ForkResult::Child => {
                let carried = self.carry(view, stage, &opened);
                sys::exit_now(i32::from(carried.is_err()))
            }
        }
    }

    fn carry(self, view: &View, stage: &Stage, opened: &OwnedFd) -> io::Result<()> {
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        // As large as the command itself could have made it.
        for limit in stage.limits.iter().filter(|limit| limit.resource == FILE_SIZE) {
            sys::set_limit(limit.resource, limit.soft, limit.hard)?;
        }
        confine::set_bounds(&view.bounds)?;
        let mut to = File::from(opened.try_clone()?);
        to.write_all(&self.kept)?;
        self.follows.map_or(Ok(0), |mut from| io::copy(&mut from, &mut to))?;
        // A file system of another machine may say only now that it has no room.
        Ok(nix::unistd::close(OwnedFd::from(to))?)
    }
}

fn is_among(read: &[Read], about: &FileStat) -> bool {
    read.iter().any(|read| read.identity() == Some(identity(about)))
}

/// RLIMIT_FSIZE has a type of its own.
const FILE_SIZE: u32 = libc::RLIMIT_FSIZE;
