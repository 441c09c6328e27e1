//! The guards of a stage: tests on files that decide whether its command would act on the server as
//! on the workstation. They read only names, modes, and the settings and contents of small files.
//! The gateway knows which files matter to which command. (The guard of `runner` is a process, and
//! another thing.)

use std::{
    io::{self, Read as _},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    libc,
    sys::stat::{FileStat, Mode, SFlag, fstat},
};
use posh_annotations::settings::{self, Setting};
use posh_proto::executor::{Guard, Stage, guard::Test, rejected::Kind};
use sha2::{Digest as _, Sha256};

use super::{
    budget::{Budget, SPENT},
    paths::{Unlike, find, landing, name_of, path_of, require_inside},
    places::PRIVATE,
    view::View,
};
use crate::error::Refusal;

/// Configuration files are far smaller; a larger one is refused without being read.
const MAX_BYTES: u64 = 1 << 20;

/// Reading so many bytes costs as much of the budget as looking up a name.
const BYTES_OF_A_NAME: usize = 4096;

/// Tests all guards of a stage. Those of `own` come from the server's own annotation.
pub fn check(
    view: &View,
    cwd: &OwnedFd,
    stage: &Stage,
    own: &[u32],
    budget: &Budget,
) -> Result<(), Refusal> {
    (0..).zip(&stage.guards).try_for_each(|(number, guard)| {
        let is_own = own.contains(&number);
        GuardCheck { view, cwd, guard, is_own, budget }.run().map_err(|found| {
            let message = match found {
                GuardFinding::Nothing => guard.reason.clone(),
                found => format!("{} ({found})", guard.reason),
            };
            Refusal::new(Kind::Guard, message)
        })
    })
}

/// Why a guard refuses its command: the file at fault, in words that follow the guard's reason.
#[derive(Debug, thiserror::Error)]
enum GuardFinding {
    /// Nothing to add to the guard's reason.
    #[error("")]
    Nothing,
    /// A file that must not be there, or is not as it must be.
    #[error("{}", .0.display())]
    File(PathBuf),
    /// A setting that is not allowed.
    #[error("{name} in {}", file.display())]
    Setting {
        /// Its name.
        name: String,
        /// Its file.
        file: PathBuf,
    },
    /// A line that is no setting.
    #[error("line {line} of {} is no setting", file.display())]
    Line {
        /// Its number, from 1.
        line: usize,
        /// Its file.
        file: PathBuf,
    },
    #[error("{} is not in a mount", .0.display())]
    NotMounted(PathBuf),
    #[error("{} is no directory", .0.display())]
    NoDirectory(PathBuf),
    #[error("{} is no plain file", .0.display())]
    NotPlain(PathBuf),
    #[error("{} is larger than 1 MiB", .0.display())]
    Large(PathBuf),
    #[error("{} is not absolute", .0.display())]
    Relative(PathBuf),
    #[error("{} {}", .0.display(), .1)]
    Unlike(PathBuf, Unlike),
    #[error("cannot read {}: {}", .0.display(), .1)]
    Unread(PathBuf, Unread),
    #[error("{}: {}", .0.display(), .1.desc())]
    System(PathBuf, Errno),
    #[error("not every file has its hash")]
    NoHash,
    #[error("a test that this executor does not know")]
    UnknownTest,
    /// The run's budget of looks is spent.
    #[error("{SPENT}")]
    Spent,
}

/// Why a plain file can't be read.
#[derive(Debug, thiserror::Error)]
enum Unread {
    #[error("it has moved")]
    Moved,
    #[error("{}", .0.desc())]
    System(#[from] Errno),
    #[error("{0}")]
    Io(io::Error),
}

/// One guard's test. Its errors name the file at fault.
struct GuardCheck<'a> {
    view: &'a View,
    cwd: &'a OwnedFd,
    guard: &'a Guard,
    /// The guard comes from the server's own annotation.
    is_own: bool,
    budget: &'a Budget,
}

impl GuardCheck<'_> {
    fn run(&self) -> Result<(), GuardFinding> {
        match self.guard.test() {
            Test::Exists => self.no_file(&self.places()?, |_| true),
            Test::Executable => self
                .no_file(&self.places()?, |status| is_file(status) && status.st_mode & 0o111 != 0),
            Test::AllExist => self.places()?.iter().try_for_each(|place| self.not_all_exist(place)),
            Test::SettingsAllowed => {
                self.files(&self.places()?).try_for_each(|file| self.settings_allowed(&file))
            }
            Test::SettingRequired => {
                self.places()?.iter().try_for_each(|place| self.setting_required(place))
            }
            Test::SameContent => self.same_content(),
            Test::Unspecified => Err(GuardFinding::UnknownTest),
        }
    }

    /// The directories in which the guard looks for its files.
    fn places(&self) -> Result<Vec<PathBuf>, GuardFinding> {
        let directory = match &self.guard.directory[..] {
            b"" => Path::new("."),
            given => path_of(given),
        };
        // A missing directory is the command's to report.
        let start = find(self.cwd, directory, true).and_then(|directory| name_of(&directory)).ok();
        let Some(start) = start else { return Ok(Vec::new()) };
        let Some(mount) = self.view.mount_of(&start) else {
            // Commands write there; elsewhere outside of the mounts there are no such files.
            return match PRIVATE.iter().any(|private| start.starts_with(private)) {
                true => Err(GuardFinding::NotMounted(start)),
                false => Ok(Vec::new()),
            };
        };
        let upwards = start.ancestors().take_while(|directory| directory.starts_with(mount));
        // Each is kept with its whole path: at most half as many as the path has bytes.
        if !self.budget.spend(upwards.clone().count()) {
            return Err(GuardFinding::Spent);
        }
        if self.guard.below.is_empty() {
            return Ok(upwards.map(Path::to_owned).collect());
        }
        let mut found = Vec::new();
        for path in upwards.map(|directory| directory.join(&self.guard.below)) {
            match self.look(&path)? {
                None => {}
                Some((at, status)) if kind(&status) == SFlag::S_IFDIR => found.push(at),
                Some(_) => return Err(GuardFinding::NoDirectory(path)),
            }
        }
        Ok(found)
    }

    /// Every file that the guard names, once for each place. Each path is made on demand, and its
    /// lookup paid for before the next: all together are places times files.
    fn files(&self, places: &[PathBuf]) -> impl Iterator<Item = PathBuf> {
        let named = |is_absolute: bool| {
            let files = self.guard.files.iter().map(|file| path_of(file));
            files.filter(move |file| file.is_absolute() == is_absolute)
        };
        let below = places.iter().flat_map(move |place| named(false).map(|file| place.join(file)));
        named(true).map(Path::to_owned).chain(below)
    }

    /// The target of a path, if it exists. Only the workstation knows if a link that leaves the
    /// mounts has a target.
    fn look(&self, path: &Path) -> Result<Option<(PathBuf, FileStat)>, GuardFinding> {
        let failed = |errno: Errno| GuardFinding::System(path.to_owned(), errno);
        // The kernel walks the path up to four times.
        if !self.budget.spend(4 * path.components().count()) {
            return Err(GuardFinding::Spent);
        }
        let found = match find(self.cwd, path, true) {
            Ok(handle) => {
                Some((name_of(&handle).map_err(failed)?, fstat(&handle).map_err(failed)?))
            }
            Err(Errno::ENOENT | Errno::ENOTDIR) => None,
            Err(errno) => return Err(failed(errno)),
        };
        if !self.is_users(path) {
            let at = match &found {
                Some((at, _)) => at.clone(),
                None => landing(self.cwd, path, true).map_err(failed)?.0,
            };
            self.require_readable(&at).map_err(|why| GuardFinding::Unlike(path.to_owned(), why))?;
        }
        Ok(found)
    }

    /// A guard's answer discloses a file's content. Without a view, a client may only ask about
    /// files in its mounts, and about those that every view has.
    fn require_readable(&self, at: &Path) -> Result<(), Unlike> {
        match require_inside(self.view, at) {
            Err(_) if self.view.is_servers_own() && self.view.would_show(at) => Ok(()),
            other => other,
        }
    }

    /// Returns true for a file of the user: the view has it, if the workstation does. Without a
    /// view it is one of the server's, and counts only for the server's own guards.
    fn is_users(&self, path: &Path) -> bool {
        if self.view.is_servers_own() && !self.is_own {
            return false;
        }
        self.guard
            .files
            .iter()
            .any(|file| file.starts_with(b"/") && file[..] == *path.as_os_str().as_bytes())
    }

    fn no_file(
        &self,
        places: &[PathBuf],
        is_meant: impl Fn(&FileStat) -> bool,
    ) -> Result<(), GuardFinding> {
        for file in self.files(places) {
            if self.look(&file)?.is_some_and(|(_, status)| is_meant(&status)) {
                return Err(GuardFinding::File(file));
            }
        }
        Ok(())
    }

    fn not_all_exist(&self, place: &Path) -> Result<(), GuardFinding> {
        for file in &self.guard.files {
            if self.look(&place.join(path_of(file)))?.is_none() {
                return Ok(());
            }
        }
        Err(GuardFinding::File(place.to_owned()))
    }

    fn settings_allowed(&self, file: &Path) -> Result<(), GuardFinding> {
        let is_allowed =
            |setting: &&Setting| self.guard.settings.iter().any(|pattern| setting.is_like(pattern));
        // Each setting is compared with each pattern.
        let is_fine = |setting: &&Setting| self.budget.spend(0) && is_allowed(setting);
        match self.settings(file)?.iter().find(|setting| !is_fine(setting)) {
            None => Ok(()),
            Some(_) if self.budget.over().is_some() => Err(GuardFinding::Spent),
            Some(other) => {
                let name = String::from_utf8_lossy(&other.name).into_owned();
                Err(GuardFinding::Setting { name, file: file.to_owned() })
            }
        }
    }

    fn setting_required(&self, place: &PathBuf) -> Result<(), GuardFinding> {
        for file in self.files(std::slice::from_ref(place)) {
            let settings = self.settings(&file)?;
            let mut settings = settings.iter().take_while(|_| self.budget.spend(0));
            if settings
                .any(|setting| self.guard.settings.iter().any(|pattern| setting.is_like(pattern)))
            {
                return Ok(());
            }
        }
        Err(GuardFinding::Nothing)
    }

    fn same_content(&self) -> Result<(), GuardFinding> {
        let Guard { files, sha256, .. } = self.guard;
        if files.len() != sha256.len() {
            return Err(GuardFinding::NoHash);
        }
        for (path, expected) in files.iter().map(|file| path_of(file)).zip(sha256) {
            if !path.is_absolute() {
                return Err(GuardFinding::Relative(path.to_owned()));
            }
            let own = self.content(path)?.map(|content| Sha256::digest(content).to_vec());
            if own.unwrap_or_default() != expected[..] {
                return Err(GuardFinding::File(path.to_owned()));
            }
        }
        Ok(())
    }

    /// The settings of a file; none, if it does not exist.
    fn settings(&self, path: &Path) -> Result<Vec<Setting>, GuardFinding> {
        let Some(content) = self.content(path)? else { return Ok(Vec::new()) };
        settings::parse(&content).map_err(|line| GuardFinding::Line { line, file: path.to_owned() })
    }

    /// The content of a plain file, if it exists.
    fn content(&self, path: &Path) -> Result<Option<Vec<u8>>, GuardFinding> {
        let Some((at, status)) = self.look(path)? else { return Ok(None) };
        if !is_file(&status) {
            return Err(GuardFinding::NotPlain(path.to_owned()));
        }
        let content =
            read(self.cwd, &at).map_err(|why| GuardFinding::Unread(path.to_owned(), why))?;
        if content.len() as u64 > MAX_BYTES {
            return Err(GuardFinding::Large(path.to_owned()));
        }
        if !self.budget.spend(content.len() / BYTES_OF_A_NAME) {
            return Err(GuardFinding::Spent);
        }
        Ok(Some(content))
    }
}

/// Reads a plain file, at most one byte more than the limit.
fn read(cwd: &OwnedFd, path: &Path) -> Result<Vec<u8>, Unread> {
    let handle = find(cwd, path, false)?;
    // A directory on the way may have become a link since it was found.
    if name_of(&handle).ok().as_deref() != Some(path) {
        return Err(Unread::Moved);
    }
    let own = format!("/proc/self/fd/{}", handle.as_raw_fd());
    let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let file = open(own.as_str(), flags, Mode::empty())?;
    let mut content = Vec::new();
    let limited = std::fs::File::from(file).take(MAX_BYTES + 1).read_to_end(&mut content);
    limited.map(|_| content).map_err(Unread::Io)
}

fn kind(status: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(status.st_mode & libc::S_IFMT)
}

fn is_file(status: &FileStat) -> bool {
    kind(status) == SFlag::S_IFREG
}
