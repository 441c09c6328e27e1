//! The exec hook's library. posh embeds it, and writes it to the private runtime directory, from
//! which the loader maps it. It stays there, since programs that outlive a shell continue to use
//! it; its name depends on its content.
//!
//! Invariant: a file of that name is never replaced while it is whole. Shells know it by its inode
//! (`posh_hook::identity`), and would lose the hook.

use std::{
    ffi::{CString, OsStr, OsString},
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::{
        fd::AsRawFd,
        unix::{ffi::OsStrExt, fs::OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use nix::{
    sys::statvfs::{FsFlags, statvfs},
    unistd::{geteuid, getpid},
};
use posh_hook::{
    arena::Arena,
    identity::Identities,
    session::{MAX_PATH_BYTES, PRELOAD_VARIABLE, SESSION_VARIABLE},
    target::{self, Target, look_at},
};
use posh_proto::runtime::RuntimeDir;
use rustix::{
    fs::{CWD, RenameFlags, renameat_with},
    io::Errno,
};
use trusted_path::Untrusted;

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
    /// Other users could change the library or the session's directory.
    #[error("the hook's files are not safe from other users")]
    Untrusted(#[from] Untrusted),
    /// The gateway has made no link to the stage program.
    #[error("the session has no link to the stage program in {}", .0.display())]
    NoStage(PathBuf),
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

/// The library's file, verified to be one that no other user can change.
pub struct Library {
    path: PathBuf,
    file: File,
}

/// The library, for a shell that can load it.
///
/// # Errors
/// [`Unusable`].
pub fn library_for(shell: &Path) -> Result<Library, Unusable> {
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
    let whole = match open(&path) {
        Ok(found) if found.metadata().is_ok_and(|found| found.len() == content.len() as u64) => {
            Some(found)
        }
        _ => None,
    };
    let file = match whole {
        Some(file) => file,
        None => {
            put(&path, content).map_err(|source| Unusable::Write { path: path.clone(), source })?;
            open(&path)?
        }
    };
    match statvfs(directory.path()) {
        Ok(found) if found.flags().contains(FsFlags::ST_NOEXEC) => Err(Unusable::NoExec(path)),
        _ => Ok(Library { path, file }),
    }
}

fn open(library: &Path) -> Result<File, Untrusted> {
    trusted_path::open_file(library, geteuid().as_raw()).map(|found| found.file)
}

/// Writes the file atomically, unless another shell that starts at the same time has done so.
fn put(path: &Path, content: &[u8]) -> io::Result<()> {
    let new = path.with_extension(format!("{}.new", getpid()));
    let put = write(&new, content).and_then(|()| {
        let is_damaged = fs::metadata(path).is_ok_and(|found| found.len() != content.len() as u64);
        if is_damaged {
            fs::remove_file(path)?;
        }
        match renameat_with(CWD, &new, CWD, path, RenameFlags::NOREPLACE) {
            // An old kernel, or a file system without this flag.
            Err(Errno::INVAL | Errno::NOSYS) => fs::rename(&new, path),
            renamed => renamed.map_err(io::Error::from),
        }
    });
    match put {
        Ok(()) => Ok(()),
        Err(error) => {
            let _ = fs::remove_file(&new);
            if error.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(error) }
        }
    }
}

fn write(new: &Path, content: &[u8]) -> io::Result<()> {
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o700).open(new)?;
    file.write_all(content)
}

/// The last two variables of a hooked program's environment; `theirs` is the user's own
/// `LD_PRELOAD`. `session` is the session's directory.
///
/// # Errors
/// [`Unusable::Untrusted`], [`Unusable::NoStage`]
pub fn variables(
    session: &Path,
    library: &Library,
    theirs: Option<OsString>,
) -> Result<[(OsString, OsString); 2], Unusable> {
    let directory = trusted_path::directory(session, geteuid().as_raw())?.descriptor;
    let identities = Identities::of(library.file.as_raw_fd(), directory.as_raw_fd())
        .ok_or_else(|| Unusable::NoStage(session.to_owned()))?;
    let mut value = session.as_os_str().to_owned();
    value.push(":");
    value.push(OsStr::from_bytes(&identities.text()));
    let mut libraries = library.path.as_os_str().to_owned();
    if let Some(theirs) = theirs.filter(|theirs| !theirs.is_empty()) {
        libraries.push(":");
        libraries.push(theirs);
    }
    Ok([(SESSION_VARIABLE.into(), value), (PRELOAD_VARIABLE.into(), libraries)])
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use posh_hook::session::STAGE;

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
        let session = tempfile::tempdir().unwrap();
        let library = Library { path: "/l.so".into(), file: File::open("/proc/self/exe").unwrap() };
        let variables = |theirs: &str| variables(session.path(), &library, Some(theirs.into()));
        assert!(matches!(variables(""), Err(Unusable::NoStage(_))));
        symlink("/posh-stage", session.path().join(STAGE)).unwrap();
        assert_eq!(variables("").unwrap()[1].1, "/l.so");
        assert_eq!(variables("a.so b.so").unwrap()[1].1, "/l.so:a.so b.so");
    }

    #[test]
    fn a_whole_library_is_never_replaced_and_no_part_of_one_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("hook.so");
        let inode = || fs::metadata(&path).unwrap().ino();
        let names = || fs::read_dir(directory.path()).unwrap().count();
        put(&path, b"content").unwrap();
        let first = inode();
        put(&path, b"content").unwrap();
        assert_eq!((first, names()), (inode(), 1));
        fs::write(&path, b"cont").unwrap();
        put(&path, b"content").unwrap();
        assert_eq!((fs::read(&path).unwrap(), names()), (b"content".to_vec(), 1));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        fs::write(path.join("file"), "").unwrap();
        assert!(put(&path, b"content").is_err());
        assert_eq!(names(), 1);
    }
}
