//! Shims of a session: one symlink to the stage program for each annotated command that is
//! installed. The list is cached for the last PATH, until one of its directories changes.

use std::{
    ffi::OsStr,
    fs, io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, symlink},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use posh_hook::session::STAGE;
use posh_proto::runtime::SHIMS;

use crate::{pipe_notes, shares::Shares};

/// Timeout for all directories of a PATH, and the targets of links in them.
const PATIENCE: Duration = Duration::from_secs(2);

/// Modification time of a directory in seconds and nanoseconds; `None` if it does not exist.
type Changed = Option<(i64, i64)>;

/// Key of the cached list of shims.
#[derive(Debug, PartialEq, Eq)]
struct ShimSearch {
    path: PathBuf,
    stage_program: PathBuf,
    changed: Vec<Changed>,
}

impl ShimSearch {
    fn now(path: &Path, stage_program: &Path) -> Self {
        let changed = |directory: PathBuf| {
            let found = fs::metadata(directory).ok()?;
            Some((found.mtime(), found.mtime_nsec()))
        };
        Self {
            path: path.to_owned(),
            stage_program: stage_program.to_owned(),
            changed: std::env::split_paths(path).map(changed).collect(),
        }
    }
}

/// Commands found for the last PATH.
#[derive(Debug, Default)]
pub(super) struct FoundShims {
    last: Arc<Last>,
    looks: Shares,
}

/// The lock is never held during file system access: a PATH on a hanging mount delays no other
/// session.
#[derive(Debug, Default)]
struct Last(Mutex<Option<(ShimSearch, Arc<[String]>)>>);

impl FoundShims {
    /// Commands among `commands` that are on `path`; none on a timeout. Then all commands of the
    /// session run locally, as do those of later sessions until the path answers.
    fn on(&self, path: &Path, stage_program: &Path, commands: &[String]) -> Arc<[String]> {
        let (last, search) = (Arc::clone(&self.last), path.to_owned());
        let (stage_program, commands) = (stage_program.to_owned(), commands.to_vec());
        let look = move || last.on(&search, &stage_program, &commands);
        self.looks.ask_aside(path, PATIENCE, look).unwrap_or_else(|why| {
            tracing::warn!(?path, %why, "a session has no commands of posh");
            Arc::default()
        })
    }

    /// Creates a session's directory with its shims.
    pub(super) fn make(
        &self,
        directory: &Path,
        path: &Path,
        stage_program: &Path,
        commands: &[String],
    ) -> io::Result<()> {
        let shims = directory.join(SHIMS);
        fs::DirBuilder::new().mode(0o700).create(directory)?;
        fs::DirBuilder::new().mode(0o700).create(&shims)?;
        pipe_notes::make(directory)?;
        symlink(stage_program, directory.join(STAGE))?;
        let names = self.on(path, stage_program, commands);
        names.iter().try_for_each(|name| symlink(stage_program, shims.join(name)))
    }
}

impl Last {
    fn on(&self, path: &Path, stage_program: &Path, commands: &[String]) -> Arc<[String]> {
        let search = ShimSearch::now(path, stage_program);
        let known = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .map(|(of, names)| (*of == search).then(|| Arc::clone(names)));
        if let Some(Some(names)) = known {
            return names;
        }
        let is_there = |name: &&String| has_command(path.as_os_str(), name, stage_program);
        let names: Arc<[String]> = commands.iter().filter(is_there).cloned().collect();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((search, Arc::clone(&names)));
        names
    }
}

/// Returns true if a command of that name, other than a shim, is on PATH.
fn has_command(path: &OsStr, name: &str, stage_program: &Path) -> bool {
    std::env::split_paths(path).any(|directory| {
        let file = directory.join(name);
        let is_command = fs::metadata(&file).is_ok_and(|m| m.is_file() && m.mode() & 0o111 != 0);
        is_command && !fs::read_link(&file).is_ok_and(|target| target == stage_program)
    })
}
