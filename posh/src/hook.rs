//! The exec hook's library. posh embeds it, and writes it to the private runtime directory, from
//! which the loader maps it. It stays there, since programs that outlive a shell continue to use
//! it; its name depends on its content.

use std::{
    ffi::{CString, OsString},
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use nix::{
    sys::statvfs::{FsFlags, statvfs},
    unistd::getpid,
};
use posh_hook::{
    arena::Arena,
    session::{MAX_PATH_BYTES, PRELOAD_VARIABLE, SESSION_VARIABLE},
    target::{self, Target, look_at},
};
use posh_proto::runtime::RuntimeDir;

use crate::Error;

#[cfg(posh_has_hook)]
const LIBRARY: Option<(&str, &[u8])> =
    Some((env!("POSH_HOOK_DIGEST"), include_bytes!(env!("POSH_HOOK_LIBRARY"))));
#[cfg(not(posh_has_hook))]
const LIBRARY: Option<(&str, &[u8])> = None;

/// Reason why a shell can't be hooked; its commands are then intercepted by shims on PATH.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// It would never load the library.
    #[error("{} is not a dynamically linked program of this machine", .0.display())]
    Shell(PathBuf),
    /// This posh was built for a target without a hook.
    #[error("this posh was built without the hook's library")]
    NotBuilt,
    /// There is no directory for the library.
    #[error("no private directory for the library")]
    RuntimeDir(#[source] Box<Error>),
    /// It could not be written.
    #[error("can't write {}", path.display())]
    Write {
        /// The library's path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Its path does not fit LD_PRELOAD: the loader separates libraries by blanks and colons, and
    /// the library keeps only short paths.
    #[error(
        "{} is too long, or has a blank or a colon in it; set XDG_RUNTIME_DIR to another directory",
        .0.display()
    )]
    Name(PathBuf),
    /// Its file system is mounted noexec, so that the loader can't map it.
    #[error(
        "{} is on a file system that is mounted noexec; set XDG_RUNTIME_DIR to another",
        .0.display()
    )]
    NoExec(PathBuf),
}

/// The library's path, for a shell that can load it.
///
/// # Errors
/// [`Unusable`].
pub fn library_for(shell: &Path) -> Result<PathBuf, Unusable> {
    let program = CString::new(shell.as_os_str().as_bytes()).ok();
    let mut memory = [0; target::ARENA_BYTES];
    if program
        .is_none_or(|program| look_at(&program, &mut Arena::new(&mut memory)) != Target::Preloads)
    {
        return Err(Unusable::Shell(shell.to_owned()));
    }
    let (digest, content) = LIBRARY.ok_or(Unusable::NotBuilt)?;
    let directory =
        RuntimeDir::open().map_err(|error| Unusable::RuntimeDir(Box::new(error.into())))?;
    let path = directory.path().join(format!("hook-{digest}.so"));
    let name = path.as_os_str().as_bytes();
    if name.len() > MAX_PATH_BYTES || name.iter().any(|byte| matches!(byte, b' ' | b':')) {
        return Err(Unusable::Name(path));
    }
    let there = fs::symlink_metadata(&path)
        .is_ok_and(|found| found.is_file() && found.size() == content.len() as u64);
    if !there {
        put(&path, content).map_err(|source| Unusable::Write { path: path.clone(), source })?;
    }
    match statvfs(directory.path()) {
        Ok(found) if found.flags().contains(FsFlags::ST_NOEXEC) => Err(Unusable::NoExec(path)),
        _ => Ok(path),
    }
}

/// Writes the file atomically: other shells start at the same time.
fn put(path: &Path, content: &[u8]) -> io::Result<()> {
    let new = path.with_extension(format!("{}.new", getpid()));
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o700).open(&new)?;
    file.write_all(content)?;
    fs::rename(&new, path)
}

/// The last two variables of a hooked program's environment; `theirs` is the user's own
/// `LD_PRELOAD`.
pub fn variables(
    session: &Path,
    library: &Path,
    theirs: Option<OsString>,
) -> [(OsString, OsString); 2] {
    let mut libraries = library.as_os_str().to_owned();
    if let Some(theirs) = theirs.filter(|theirs| !theirs.is_empty()) {
        libraries.push(":");
        libraries.push(theirs);
    }
    [
        (SESSION_VARIABLE.into(), session.as_os_str().to_owned()),
        (PRELOAD_VARIABLE.into(), libraries),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_can_not_panic_and_needs_no_other() {
        let (_, content) = LIBRARY.expect("the tests run where the hook can be built");
        let holds =
            |text: &str| content.windows(text.len()).any(|window| window == text.as_bytes());
        assert!(holds("execve") && holds("posix_spawn"));
        // See the panic handler of the crate `hook`.
        assert!(!holds("must_not_panic"));
        assert!(!holds("libc.so") && !holds("GLIBC_"));
    }

    #[test]
    fn a_user_s_own_library_comes_behind_ours() {
        let variables =
            |theirs: &str| variables(Path::new("/s"), Path::new("/l.so"), Some(theirs.into()));
        assert_eq!(variables("")[1].1, "/l.so");
        assert_eq!(variables("a.so b.so")[1].1, "/l.so:a.so b.so");
    }
}
