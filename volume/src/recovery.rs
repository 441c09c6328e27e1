//! The directory that `posh volumes recover` makes for the files that a server refuses.
//!
//! Invariant: no other user decides where something is written, although the directory may be made
//! in one that all users may write, and names and targets of links are what anybody has made in the
//! volume. The directory is new (mkdir(2)), belongs to this user, and nobody else may enter it; it
//! is reached by links of root and this user alone. Below it each step goes from a descriptor to
//! one name, follows no link, and each file is a new one.

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Write as _},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, Mode, OFlags, fstat, mkdirat, openat, symlinkat, unlinkat},
    io::Errno,
    process::geteuid,
};

use crate::store::{NewFile, Put};

/// Limit for a name, in bytes (NAME_MAX).
const NAME_BYTES: usize = 255;

/// Permissions of the group and of others.
const OF_OTHERS: u32 = 0o077;

/// A new directory of this user.
#[derive(Debug)]
pub struct Recovery {
    parent: OwnedFd,
    directory: OwnedFd,
    path: PathBuf,
}

impl Recovery {
    /// Creates the directory.
    ///
    /// # Errors
    /// The system's; [`io::ErrorKind::AlreadyExists`] if anything has the name;
    /// [`io::ErrorKind::PermissionDenied`] if another user's link leads to it.
    pub fn create(path: &Path) -> io::Result<Self> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(explained(path, io::ErrorKind::InvalidInput.into()));
        };
        let user = geteuid().as_raw();
        let parent = trusted_path::open_shared_directory(parent, user)?;
        let failed = |error: Errno| explained(path, error.into());
        mkdirat(&parent, name, Mode::RWXU).map_err(failed)?;
        let directory = open_directory(parent.as_fd(), name).map_err(failed)?;
        // Whoever may write the parent may have put another one in its place.
        let about = fstat(&directory).map_err(failed)?;
        if about.st_uid != user || about.st_mode & OF_OTHERS != 0 {
            return Err(explained(path, io::ErrorKind::PermissionDenied.into()));
        }
        Ok(Self { parent, directory, path: path.to_owned() })
    }

    /// Writes a file to a path below the directory, as this user's, and for nobody else to read.
    /// Missing directories on the way are created. Nothing is replaced: for a name that is taken,
    /// the first free one of NAME.2, NAME.3 ... is used.
    ///
    /// # Errors
    /// The disk's; [`io::ErrorKind::InvalidInput`] for a path that leads out.
    pub fn put(&self, path: &Path, put: &Put) -> io::Result<()> {
        self.put_file(path, put).map_err(|error| explained(&self.path.join(path), error))
    }

    fn put_file(&self, path: &Path, put: &Put) -> io::Result<()> {
        let mut names = Vec::new();
        for component in path.components() {
            let Component::Normal(name) = component else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            names.push(name);
        }
        let Some((name, above)) = names.split_last() else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let mut at = self.directory.try_clone()?;
        for name in above {
            at = with_free_name(name, |name| make_directory(at.as_fd(), name))?;
        }
        match &put.what {
            NewFile::Regular { data } => {
                let mode = put.changes.mode.unwrap_or(put.mode);
                let is_program = Mode::from_raw_mode(mode) & Mode::XUSR;
                let flags = OFlags::WRONLY
                    | OFlags::CREATE
                    | OFlags::EXCL
                    | OFlags::NOFOLLOW
                    | OFlags::CLOEXEC;
                let mode = Mode::RUSR | Mode::WUSR | is_program;
                let file = with_free_name(name, |name| openat(&at, name, flags, mode))?;
                let mut file = File::from(file);
                file.write_all(data).and_then(|()| file.sync_all())
            }
            NewFile::Symlink { target } => {
                Ok(with_free_name(name, |name| symlinkat(target, &at, name))?)
            }
            NewFile::Directory => {
                Ok(with_free_name(name, |name| make_directory(at.as_fd(), name)).map(drop)?)
            }
        }
    }

    /// Removes the directory if nothing was written.
    pub fn remove_if_empty(self) {
        if let Some(name) = self.path.file_name() {
            let _ = unlinkat(&self.parent, name, AtFlags::REMOVEDIR);
        }
    }
}

/// Calls `make` with a name, and while that is taken (`EEXIST`) with NAME.2, NAME.3 ...
fn with_free_name<T>(name: &OsStr, make: impl Fn(&OsStr) -> Result<T, Errno>) -> Result<T, Errno> {
    let mut made = make(name);
    for number in 2_u64.. {
        if !matches!(made, Err(Errno::EXIST)) {
            break;
        }
        let suffix = format!(".{number}");
        let bytes = name.as_bytes();
        let begin = &bytes[..bytes.len().min(NAME_BYTES - suffix.len())];
        made = make(OsStr::from_bytes(&[begin, suffix.as_bytes()].concat()));
    }
    made
}

/// Creates a directory unless there is one, and opens it; `EEXIST` if there is something else.
fn make_directory(at: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd, Errno> {
    match mkdirat(at, name, Mode::RWXU) {
        Ok(()) => open_directory(at, name),
        Err(Errno::EXIST) => open_directory(at, name).map_err(|error| match error {
            Errno::NOTDIR | Errno::LOOP => Errno::EXIST,
            other => other,
        }),
        Err(error) => Err(error),
    }
}

fn open_directory(at: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(at, name, flags, Mode::empty())
}

fn explained(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt as _, PermissionsExt, symlink},
    };

    use super::*;
    use crate::store::{Changes, FileId};

    fn put(what: NewFile) -> Put {
        let changes = Changes { mode: Some(0o4755), ..Changes::default() };
        Put { directory: FileId::default(), path: Vec::new(), what, mode: 0o666, changes }
    }

    fn file() -> Put {
        put(NewFile::Regular { data: "contents".into() })
    }

    #[test]
    fn what_is_written_out_replaces_nothing() {
        let top = tempfile::tempdir().unwrap();
        let to = Recovery::create(&top.path().join("to")).unwrap();
        let (path, place) = (Path::new("d/f1"), top.path().join("to/d/f1"));
        to.put(path, &file()).unwrap();
        to.put(Path::new("d"), &put(NewFile::Directory)).unwrap();
        assert_eq!(fs::read(&place).unwrap(), b"contents");
        to.put(path, &put(NewFile::Regular { data: "other".into() })).unwrap();
        assert_eq!(fs::read(&place).unwrap(), b"contents");
        assert_eq!(fs::read(top.path().join("to/d/f1.2")).unwrap(), b"other");
        let modes = ["", "d", "d/f1"].map(|path| {
            let about = top.path().join("to").join(path).metadata().unwrap();
            (about.uid(), about.permissions().mode() & 0o7777)
        });
        assert_eq!(modes, [(geteuid().as_raw(), 0o700); 3]);
    }

    #[test]
    fn the_directory_is_a_new_one_that_no_link_of_others_leads_to() {
        let top = tempfile::tempdir().unwrap();
        let victim = top.path().join("victim");
        fs::create_dir(&victim).unwrap();
        symlink(&victim, top.path().join("link")).unwrap();
        symlink(top.path().join("missing"), top.path().join("dangling")).unwrap();
        for name in ["victim", "link", "dangling"] {
            let error = Recovery::create(&top.path().join(name)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists, "{name}");
        }
        let shared = top.path().join("shared");
        fs::create_dir(&shared).unwrap();
        fs::set_permissions(&shared, PermissionsExt::from_mode(0o777)).unwrap();
        symlink(&victim, shared.join("theirs")).unwrap();
        let error = Recovery::create(&shared.join("theirs/to")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        Recovery::create(&shared.join("to")).unwrap().remove_if_empty();
        assert!(!shared.join("to").exists());
        assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);
    }

    #[test]
    fn nothing_is_written_through_links_or_out_of_the_directory() {
        let top = tempfile::tempdir().unwrap();
        let victim = top.path().join("victim");
        fs::create_dir(&victim).unwrap();
        let to = Recovery::create(&top.path().join("to")).unwrap();
        let link = put(NewFile::Symlink { target: victim.clone().into() });
        to.put(Path::new("d"), &link).unwrap();
        to.put(Path::new("f"), &put(NewFile::Symlink { target: victim.join("f").into() })).unwrap();
        let outside = victim.join("f");
        for path in ["../victim/f", "..", ".", "", outside.to_str().unwrap()] {
            to.put(Path::new(path), &file()).unwrap_err();
        }
        for path in ["d/f", "f"] {
            to.put(Path::new(path), &file()).unwrap();
        }
        assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);
        for path in ["to/d.2/f", "to/f.2"] {
            assert_eq!(fs::read(top.path().join(path)).unwrap(), b"contents");
        }
    }

    #[test]
    fn no_two_paths_are_in_each_others_way() {
        let top = tempfile::tempdir().unwrap();
        let to = Recovery::create(&top.path().join("to")).unwrap();
        let long = "n".repeat(255);
        let regular = |text: &'static str| put(NewFile::Regular { data: text.into() });
        let link = put(NewFile::Symlink { target: "target".into() });
        let all = [
            ("a", regular("file")),
            ("a.2", regular("of that name")),
            ("a", put(NewFile::Directory)),
            ("a/f", regular("inside")),
            ("a", link.clone()),
            ("a/g", regular("inside")),
            (&long, regular("one")),
            (&long, regular("two")),
        ];
        for (path, put) in &all {
            to.put(Path::new(path), put).unwrap();
        }
        let cut = "n".repeat(253) + ".2";
        let expected = [
            ("a", "file"),
            ("a.2", "of that name"),
            ("a.3/f", "inside"),
            ("a.3/g", "inside"),
            (&long, "one"),
            (&cut, "two"),
        ];
        for (path, text) in expected {
            assert_eq!(fs::read_to_string(top.path().join("to").join(path)).unwrap(), text);
        }
        assert!(top.path().join("to/a.4").is_symlink());
    }
}
