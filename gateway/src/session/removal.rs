//! Removal of session directories: only entries of the gateway's own directory, by name.

use std::{
    ffi::{OsStr, OsString},
    fs, io,
    os::fd::AsRawFd as _,
    path::{Component, Path, PathBuf},
};

use rustix::fs::{Mode, OFlags, open};

/// Name of an entry of `top`: a single normal component. Compares components, so `..` is one.
pub(super) fn entry_of<'a>(directory: &'a Path, top: &Path) -> Option<&'a OsStr> {
    let mut rest = directory.strip_prefix(top).ok()?.components();
    match (rest.next()?, rest.next()) {
        (Component::Normal(name), None) => Some(name),
        _ => None,
    }
}

/// Removes an entry of `top` and everything below. Starts at a descriptor of `top` and follows no
/// symlinks, neither in place of the entry nor below it (`remove_dir_all` opens every directory
/// with O_NOFOLLOW).
///
/// # Errors
/// System errors, and `InvalidInput` for anything but an entry of `top`.
pub(super) fn remove(directory: &Path, top: &Path) -> io::Result<()> {
    let name = entry_of(directory, top).ok_or(io::ErrorKind::InvalidInput)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = open(top, flags, Mode::empty())?;
    let mut below = OsString::from(format!("/proc/self/fd/{}/", top.as_raw_fd()));
    below.push(name);
    fs::remove_dir_all(PathBuf::from(below))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_an_entry_of_the_directory_is_removed() {
        let made = tempfile::tempdir().unwrap();
        let top = made.path().join("posh");
        for directory in ["posh/session-p1/bin", "posh/session-p2", "beside/inner"] {
            fs::create_dir_all(made.path().join(directory)).unwrap();
        }
        for path in
            ["..", ".", "", "../beside", "session-p1/..", "session-p1/../..", "session-p1/bin", "/"]
        {
            assert!(remove(&top.join(path), &top).is_err(), "{path:?}");
        }
        assert!(remove(&made.path().join("beside"), &top).is_err());
        symlink("../../beside", top.join("session-p1/link")).unwrap();
        remove(&top.join("session-p1"), &top).unwrap();
        assert!(!top.join("session-p1").exists() && top.join("session-p2").exists());
        // A link in place of the entry, or of the directory.
        symlink("../beside", top.join("session-p3")).unwrap();
        let _ = remove(&top.join("session-p3"), &top);
        symlink("posh", made.path().join("link")).unwrap();
        assert!(remove(&made.path().join("link/session-p2"), &made.path().join("link")).is_err());
        assert!(made.path().join("beside/inner").exists() && top.join("session-p2").exists());
    }
}
