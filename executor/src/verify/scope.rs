//! Files that one command may access by its annotation, as paths: the rules that an executor makes
//! for the kernel, looked up for each access as the kernel would. Without the rules for the
//! directories of operands: a file beside an operand can be read on a server, but an annotation
//! that does not name it is wrong all the same, since the server's view of it is not kept coherent.

use std::{
    ffi::OsStr,
    fs, io,
    os::{fd::OwnedFd, unix::ffi::OsStrExt as _},
    path::{Component, Path, PathBuf},
};

use landlock::{AccessFs, BitFlags, make_bitflags};
use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    sys::stat::{Mode, SFlag, fstat},
};
use posh_annotations::Invocation;

use super::calls::Deed;
use crate::{
    policy::{grants, starts},
    runner::{
        Budget, CHANGE, Programs, READ, ReadableFiles, View, find, ground, library_directories,
        name_of, rules,
    },
    tools,
};

/// A right to one of these in a tree includes changes of modes and times: Landlock has no rights
/// for them.
const ALTER: BitFlags<AccessFs> = make_bitflags!(AccessFs::{WriteFile | MakeReg});

/// A path as a process uses it.
pub struct ProcessPath {
    /// Its working directory, or the one that the call names.
    pub base: OwnedFd,
    /// As the process passed it.
    pub path: PathBuf,
    /// A link at the end is followed.
    pub follows: bool,
}

/// An access that no word of an annotation covers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Miss {
    /// Verb in the past tense: `read`.
    pub deed: &'static str,
    /// File that was accessed.
    pub path: PathBuf,
    /// The file is named, but for another use.
    pub is_named: bool,
    /// Landlock has a right for it, so that it would fail on a server, unless it is a read beside
    /// an operand; a server would allow other accesses, to a file that is not there.
    pub is_governed: bool,
}

/// Access rights of one command.
pub struct CommandRights {
    rules: Vec<(PathBuf, BitFlags<AccessFs>)>,
    /// Paths that its words name, with all links followed but the last, and with all.
    named: Vec<PathBuf>,
}

impl CommandRights {
    /// For a command analysed as `invocation`, in the directory `cwd`, with the directory
    /// `temporary` for itself.
    ///
    /// # Errors
    /// When a directory can't be opened.
    pub fn new(
        name: &str,
        invocation: &Invocation,
        cwd: &Path,
        temporary: &Path,
    ) -> io::Result<Self> {
        let base = open_directory(cwd)?;
        let program = tools::find(name).unwrap_or_default();
        let programs = Programs::new(&program, &starts(invocation), &library_directories());
        let files_of_user = invocation.client_files.iter().chain(&invocation.same_files);
        let mut own: Vec<_> = ground()
            .chain(programs.trees().map(|tree| (tree, READ)))
            .map(|(path, access)| (PathBuf::from(path), access))
            .chain(
                programs.files().filter_map(|(file, access)| Some((name_of(file).ok()?, access))),
            )
            .chain([(temporary.to_owned(), CHANGE)])
            .chain(files_of_user.filter_map(|file| Some((in_home(file)?, READ))))
            .filter_map(|(path, access)| Some((fs::canonicalize(path).ok()?, access)))
            .collect();
        let grants = grants(invocation);
        let view = View::of_machine();
        rules(
            &view,
            &base,
            &grants,
            ReadableFiles::Named,
            &Budget::new(None),
            &mut |at, access| {
                own.extend(name_of(at).ok().map(|name| (name, access)));
                Ok(())
            },
        )
        .map_err(io::Error::other)?;
        let mut named = vec![cwd.to_owned()];
        for grant in &grants {
            let path = Path::new(OsStr::from_bytes(&grant.path));
            named.push(cwd.join(path));
            for follow in [false, true] {
                named.extend(find(&base, path, follow).and_then(|at| name_of(&at)).ok());
            }
            named.extend(entry(&base, path).map(|(_, path)| path));
        }
        Ok(Self { rules: own, named })
    }

    /// Mistake in an access by path; `None` if it is covered.
    pub fn miss(&self, place: &ProcessPath, deed: Deed) -> Option<Miss> {
        match deed {
            Deed::Make => self.make(place, AccessFs::MakeReg.into()),
            Deed::MakeSpecial => self.make(place, AccessFs::MakeFifo.into()),
            Deed::Replace => self
                .make(place, AccessFs::MakeReg.into())
                .or_else(|| self.replace(place, AccessFs::MakeReg, "replaced")),
            Deed::Remove => self.replace(place, AccessFs::RemoveFile, "removed"),
            Deed::Open(flags) => self.open(place, flags),
            Deed::Look => self.found(place).and_then(|(path, _)| self.look(path)),
            Deed::Alter => self.found(place).and_then(|(path, _)| {
                (!self.allows_any(&path, ALTER))
                    .then(|| Miss { is_governed: false, ..self.missed("changed", path) })
            }),
            Deed::Truncate => self
                .found(place)
                .and_then(|(path, _)| self.require(path, AccessFs::Truncate.into(), "wrote to")),
            Deed::Run => self
                .found(place)
                .and_then(|(path, _)| self.require(path, AccessFs::Execute.into(), "ran")),
        }
    }

    fn open(&self, place: &ProcessPath, flags: OFlag) -> Option<Miss> {
        let Some((path, kind)) = self.found(place) else {
            let is_new = flags.contains(OFlag::O_CREAT);
            return if is_new { self.make(place, AccessFs::MakeReg.into()) } else { None };
        };
        if flags.contains(OFlag::O_PATH) {
            return self.look(path);
        }
        if kind == SFlag::S_IFDIR {
            return self.require(path, AccessFs::ReadDir.into(), "listed");
        }
        let (wanted, word) = match flags & OFlag::O_ACCMODE {
            OFlag::O_RDONLY => (AccessFs::ReadFile.into(), "read"),
            OFlag::O_WRONLY => (AccessFs::WriteFile.into(), "wrote to"),
            _ => (AccessFs::ReadFile | AccessFs::WriteFile, "read and wrote to"),
        };
        let cut = if flags.contains(OFlag::O_TRUNC) {
            AccessFs::Truncate.into()
        } else {
            BitFlags::EMPTY
        };
        self.require(path, wanted | cut, word)
    }

    /// The existing file at a place.
    fn found(&self, place: &ProcessPath) -> Option<(PathBuf, SFlag)> {
        let at = find(&place.base, &place.path, place.follows).ok()?;
        let kind = SFlag::from_bits_truncate(fstat(&at).ok()?.st_mode & SFlag::S_IFMT.bits());
        let path = name_of(&at).ok()?;
        (!is_kernels(&path)).then_some((path, kind))
    }

    /// Checks the creation of a new name: a right of the directory.
    fn make(&self, place: &ProcessPath, wanted: BitFlags<AccessFs>) -> Option<Miss> {
        let (directory, path) = entry(&place.base, &place.path)?;
        let is_new = path.symlink_metadata().is_err() && !is_kernels(&path);
        (is_new && !self.allows(&directory, wanted)).then(|| self.missed("made", path))
    }

    /// Checks the removal or replacement of an existing name.
    fn replace(&self, place: &ProcessPath, wanted: AccessFs, word: &'static str) -> Option<Miss> {
        let (directory, path) = entry(&place.base, &place.path)?;
        let old = path.symlink_metadata().ok().filter(|_| !is_kernels(&path))?;
        let wanted = match old.is_dir() {
            true => AccessFs::RemoveDir.into(),
            false => wanted | AccessFs::RemoveFile,
        };
        (!self.allows(&directory, wanted)).then(|| self.missed(word, path))
    }

    /// To look a file up, it is enough that a path in it or around it is named.
    fn look(&self, path: PathBuf) -> Option<Miss> {
        let lists_only = BitFlags::from(AccessFs::ReadDir);
        let mut covering = self.rules.iter().filter(|(_, access)| *access != lists_only);
        let is_covered = covering.any(|(rule, _)| path.starts_with(rule))
            || self.rules.iter().any(|(rule, _)| rule.starts_with(&path))
            || self.named.iter().any(|named| named.starts_with(&path));
        (!is_covered).then(|| Miss { is_governed: false, ..self.missed("looked at", path) })
    }

    fn require(
        &self,
        path: PathBuf,
        wanted: BitFlags<AccessFs>,
        word: &'static str,
    ) -> Option<Miss> {
        (!self.allows(&path, wanted)).then(|| self.missed(word, path))
    }

    fn missed(&self, deed: &'static str, path: PathBuf) -> Miss {
        Miss { deed, is_named: self.named.contains(&path), path, is_governed: true }
    }

    /// Each right may come from another rule, on the file itself or on a directory above
    /// (landlock(7)).
    fn allows(&self, path: &Path, wanted: BitFlags<AccessFs>) -> bool {
        let given = self.rules.iter().filter(|(rule, _)| path.starts_with(rule));
        given.fold(BitFlags::EMPTY, |all, (_, access)| all | *access).contains(wanted)
    }

    fn allows_any(&self, path: &Path, wanted: BitFlags<AccessFs>) -> bool {
        self.rules.iter().any(|(rule, access)| path.starts_with(rule) && access.intersects(wanted))
    }
}

/// The directory that has `path` as an entry, and the entry's own path.
fn entry(base: &OwnedFd, path: &Path) -> Option<(PathBuf, PathBuf)> {
    let Some(Component::Normal(name)) = path.components().next_back() else { return None };
    let parent = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let directory = find(base, parent, true).and_then(|at| name_of(&at)).ok()?;
    let path = directory.join(name);
    Some((directory, path))
}

/// Files of the kernel may be used by all.
fn is_kernels(path: &Path) -> bool {
    ["/proc", "/sys", "/dev"].iter().any(|kernel| path.starts_with(kernel)) || !path.is_absolute()
}

/// A file of the user, as annotations write it.
fn in_home(file: &str) -> Option<PathBuf> {
    match file.strip_prefix("~/") {
        Some(below) => Some(std::env::home_dir()?.join(below)),
        None => Some(PathBuf::from(file)),
    }
}

/// Opens a directory for relative lookups.
///
/// # Errors
/// Errors of open(2).
pub fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).map_err(|errno: Errno| errno.into())
}
