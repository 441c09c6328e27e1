//! Directories that others may write, opened without following links that others could have made.

use std::{
    ffi::OsStr,
    os::{fd::OwnedFd, unix::ffi::OsStrExt as _},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, Mode, OFlags, ResolveFlags, openat2, readlinkat},
    io::Errno,
};

use crate::{MAX_LINKS, Untrusted, directory};

/// Opens a directory with O_PATH. A symbolic link in any component is followed only if its
/// directory is trusted ([`directory`]): root or `user` made it. The last step is one openat2(2)
/// that follows no link, so that a concurrent change can't redirect it.
///
/// # Errors
/// [`Untrusted`]; the system's.
pub fn open_shared_directory(path: &Path, user: u32) -> Result<OwnedFd, Untrusted> {
    let mut at = path.to_owned();
    for _ in 0..MAX_LINKS {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match openat2(CWD, &at, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
            // Some component is a link, or was one a moment ago.
            Err(Errno::LOOP) => at = without_a_link(&at, user)?,
            opened => return opened.map_err(|error| Untrusted::io(path, error)),
        }
    }
    Err(Untrusted::io(path, Errno::LOOP))
}

/// Replaces the first symbolic link of a path by its target.
fn without_a_link(path: &Path, user: u32) -> Result<PathBuf, Untrusted> {
    let mut before = PathBuf::new();
    let mut names = path.components();
    while let Some(name) = names.next() {
        let is_link = before.join(name).symlink_metadata().is_ok_and(|found| found.is_symlink());
        if !is_link {
            before.push(name);
            continue;
        }
        let parent = directory(&before, user)?;
        let target = readlinkat(&parent.descriptor, name.as_os_str(), Vec::new());
        let target = target.map_err(|error| Untrusted::io(&before.join(name), error))?;
        return Ok(parent.path.join(OsStr::from_bytes(target.as_bytes())).join(names.as_path()));
    }
    Ok(path.to_owned())
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{PermissionsExt as _, symlink},
    };

    use rustix::process::geteuid;

    use super::*;

    #[test]
    fn links_count_where_nobody_else_can_have_made_them() {
        let made = tempfile::tempdir().unwrap();
        let top = made.path().canonicalize().unwrap();
        let (ours, shared) = (top.join("ours"), top.join("shared"));
        for directory in
            [&ours, &shared, &ours.join("data"), &ours.join("data/inner"), &shared.join("data")]
        {
            fs::create_dir(directory).unwrap();
        }
        // Its contents are others' business.
        fs::set_permissions(ours.join("data"), fs::Permissions::from_mode(0o777)).unwrap();
        fs::set_permissions(&shared, fs::Permissions::from_mode(0o777)).unwrap();
        symlink("data", ours.join("link")).unwrap();
        symlink(ours.join("link"), ours.join("chain")).unwrap();
        symlink("/", shared.join("link")).unwrap();
        symlink(&shared, ours.join("way")).unwrap();
        symlink("/", ours.join("data/etc")).unwrap();
        symlink("loop", ours.join("loop")).unwrap();
        let open = |path: PathBuf| open_shared_directory(&path, geteuid().as_raw());
        for path in [
            "ours/data",
            "ours/link",
            "ours/chain",
            "ours/data/inner",
            "ours/link/inner",
            "ours/way/data",
            "shared/data",
        ] {
            assert!(open(top.join(path)).is_ok(), "{path}");
        }
        for path in [
            "shared/link",
            "ours/way/link",
            "ours/data/etc",
            "ours/link/etc",
            "ours/data/etc/tmp",
            "ours/loop",
        ] {
            assert!(open(top.join(path)).is_err(), "{path}");
        }
    }
}
