//! Files that hold secrets: private keys, credentials, the register of tokens. They are read only
//! if no other user can read them, and written so that no other user ever could. Shared by the
//! executor and its clients.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use nix::{libc::O_NOFOLLOW, unistd::geteuid};
use trusted_path::Untrusted;

/// Permission bits of others than the owner.
const OF_OTHERS: u32 = 0o077;

/// Limit of a secret's size; a register of ten thousand certificates has 2 MB.
const MAX_BYTES: u64 = 16 << 20;

/// Reason why a secret is not read or written.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// It could not be opened, read or written.
    #[error("cannot {attempt} {}", path.display())]
    Io {
        /// "read", "write", ...
        attempt: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// Another user made it, and may know it.
    #[error(
        "{} belongs to user {owner}, not to user {user}, so that it is no secret of ours; it is \
         not read",
        path.display()
    )]
    ForeignOwner {
        /// The file.
        path: PathBuf,
        /// Its owner's uid.
        owner: u32,
        /// Our effective uid.
        user: u32,
    },
    /// Other users may read or write it.
    #[error(
        "{} has mode {mode:04o}, so that others can read or change it; make it anew if they may \
         have, else run: chmod 600 {}",
        path.display(), path.display()
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Other users could replace it.
    #[error("{} is not safe from other users", path.display())]
    Place {
        /// The file.
        path: PathBuf,
        /// The directory that is not safe.
        #[source]
        source: Untrusted,
    },
    /// A directory, a device, or far too large.
    #[error("{} is not a file that holds a secret", .0.display())]
    NotAFile(PathBuf),
}

impl SecretError {
    /// There is no such file.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        match self {
            Self::Io { source, .. } => source.kind() == io::ErrorKind::NotFound,
            Self::Place { source, .. } => source.is_missing(),
            _ => false,
        }
    }

    /// There is no room on the disk, or none for this user.
    #[must_use]
    pub fn is_full(&self) -> bool {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        let is_it = |source: &io::Error| matches!(source.kind(), StorageFull | QuotaExceeded);
        matches!(self, Self::Io { source, .. } if is_it(source))
    }
}

/// Reads a secret.
///
/// # Errors
/// [`SecretError`], also if its owner is not this user, if others have any right to it, or if
/// others can change a directory that it lies in.
pub fn read(path: &Path) -> Result<String, SecretError> {
    let failed = |source| SecretError::Io { attempt: "read", path: path.to_owned(), source };
    let place = |source| SecretError::Place { path: path.to_owned(), source };
    trusted_path::directory(directory_of(path), geteuid().as_raw()).map_err(place)?;
    // Not following a symlink: the checked file is the one of that name.
    let mut file =
        OpenOptions::new().read(true).custom_flags(O_NOFOLLOW).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() || metadata.len() > MAX_BYTES {
        return Err(SecretError::NotAFile(path.to_owned()));
    }
    let user = geteuid().as_raw();
    if metadata.uid() != user {
        return Err(SecretError::ForeignOwner {
            path: path.to_owned(),
            owner: metadata.uid(),
            user,
        });
    }
    if metadata.mode() & OF_OTHERS != 0 {
        return Err(SecretError::Open { path: path.to_owned(), mode: metadata.mode() & 0o7777 });
    }
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

/// Replaces a secret, atomically; makes its directory.
///
/// # Errors
/// [`SecretError::Io`], [`SecretError::Place`].
pub fn write(path: &Path, content: &str) -> Result<(), SecretError> {
    let failed = |source| SecretError::Io { attempt: "write", path: path.to_owned(), source };
    let place = |source| SecretError::Place { path: path.to_owned(), source };
    let directory = directory_of(path);
    trusted_path::make_directory(directory, geteuid().as_raw()).map_err(place)?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let fresh = directory.join(name);
    // Left by a process of the same id that has died.
    let _ = fs::remove_file(&fresh);
    let written = write_new(&fresh, content).and_then(|()| fs::rename(&fresh, path));
    if written.is_err() {
        let _ = fs::remove_file(&fresh);
    }
    written.and_then(|()| sync(directory)).map_err(failed)
}

/// Writes a secret over its present content, which must be as long at least: on most file systems
/// that takes no room on the disk. A machine that stops in the middle leaves it damaged.
///
/// # Errors
/// [`SecretError::Io`]; `StorageFull` for a longer one.
pub fn overwrite(path: &Path, content: &str) -> Result<(), SecretError> {
    let failed = |source| SecretError::Io { attempt: "write", path: path.to_owned(), source };
    let write = || -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(path)?;
        if file.metadata()?.len() < content.len() as u64 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        file.write_all_at(content.as_bytes(), 0)?;
        file.set_len(content.len() as u64)?;
        file.sync_all()
    };
    write().map_err(failed)
}

/// Renames a secret within its directory, replacing another one.
///
/// # Errors
/// [`SecretError::Io`].
pub fn rename(from: &Path, to: &Path) -> Result<(), SecretError> {
    let failed = |source| SecretError::Io { attempt: "rename", path: from.to_owned(), source };
    fs::rename(from, to).and_then(|()| sync(directory_of(to))).map_err(failed)
}

/// Makes the directory's new entry durable (fsync(2)).
fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        Some(_) => Path::new("."),
        None => Path::new("/"),
    }
}

fn write_new(path: &Path, content: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(content.as_bytes())?;
    file.sync_all()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn what_is_written_can_be_read_by_its_owner_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("below/secret");
        write(&path, "one").unwrap();
        write(&path, "two").unwrap();
        assert_eq!(read(&path).unwrap(), "two");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o7777, 0o700);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn what_others_can_read_is_no_secret() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        write(&path, "x").unwrap();
        for mode in [0o640, 0o604, 0o620, 0o602, 0o610] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert!(matches!(read(&path), Err(SecretError::Open { .. })), "{mode:o}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        assert!(read(&path).is_ok());
    }

    #[test]
    fn what_others_could_have_put_there_is_no_secret() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("below/secret");
        write(&path, "x").unwrap();
        let below = path.parent().unwrap();
        fs::set_permissions(below, fs::Permissions::from_mode(0o770)).unwrap();
        assert!(matches!(read(&path), Err(SecretError::Place { .. })));
        assert!(matches!(write(&path, "y"), Err(SecretError::Place { .. })));
        fs::set_permissions(below, fs::Permissions::from_mode(0o750)).unwrap();
        assert_eq!(read(&path).unwrap(), "x");
    }

    #[test]
    fn what_belongs_to_others_or_is_a_link_is_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let (path, link) = (directory.path().join("secret"), directory.path().join("link"));
        write(&path, "x").unwrap();
        symlink(&path, &link).unwrap();
        assert!(matches!(read(&link), Err(SecretError::Io { .. })));
        if geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
            assert!(matches!(read(&path), Err(SecretError::ForeignOwner { owner: 12345, .. })));
        }
        assert!(read(&directory.path().join("missing")).unwrap_err().is_missing());
    }
}
