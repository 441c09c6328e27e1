//! Register of directories' files that the user has allowed. As in direnv, an entry holds path and
//! contents: a changed file must be allowed again. One small file per entry, in the user's state
//! directory.

use std::{
    ffi::OsString,
    fs, io,
    io::{Read as _, Write as _},
    os::unix::{ffi::OsStrExt as _, fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};

use super::find::directory_of;

/// Hexadecimal digits of a SHA-256.
const DIGEST_DIGITS: usize = 64;

/// The user's register.
pub(super) struct Register {
    directory: PathBuf,
    user: u32,
}

/// SHA-256 in hexadecimal digits.
pub(super) fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Register {
    /// Opens the register below $XDG_STATE_HOME or ~/.local/state; `None` without a home directory.
    pub(super) fn of(set: impl Fn(&str) -> Option<OsString>, user: u32) -> Option<Self> {
        let below_home = || Some(directory_of(&set, "HOME")?.join(".local/state"));
        let state = directory_of(&set, "XDG_STATE_HOME").or_else(below_home)?;
        Some(Self { directory: state.join("posh/allowed"), user })
    }

    /// Returns true if this file is allowed with these contents (by digest). `file` has no
    /// symlinks.
    pub(super) fn allows(&self, file: &Path, contents: &str) -> bool {
        let Ok(entry) = trusted_path::open_file(&self.entry(file), self.user) else { return false };
        let mut allowed = String::new();
        let read = entry.file.take(DIGEST_DIGITS as u64).read_to_string(&mut allowed);
        read.is_ok() && allowed == contents
    }

    /// Allows this file with these contents.
    pub(super) fn allow(&self, file: &Path, contents: &str) -> io::Result<()> {
        trusted_path::make_directory(&self.directory, self.user)?;
        let entry = self.entry(file);
        let fresh = entry.with_extension(format!("{}.new", std::process::id()));
        // An earlier process with this ID may have crashed.
        let _ = fs::remove_file(&fresh);
        let mut new =
            fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
        // The path is for human readers; lookups use the file's name.
        new.write_all(&[contents.as_bytes(), b"  ", file.as_os_str().as_bytes(), b"\n"].concat())?;
        fs::rename(&fresh, entry)
    }

    /// Revokes the permission for any contents. Returns whether there was one.
    pub(super) fn deny(&self, file: &Path) -> io::Result<bool> {
        match fs::remove_file(self.entry(file)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn entry(&self, file: &Path) -> PathBuf {
        self.directory.join(digest(file.as_os_str().as_bytes()))
    }
}
