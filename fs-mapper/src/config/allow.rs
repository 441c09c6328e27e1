//! Which files of directories the user has allowed, as direnv keeps it: by path and contents, so
//! that a file that has changed must be allowed anew. One small file for each, in the user's state
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
    /// Below $XDG_STATE_HOME or ~/.local/state; `None` where there is no home.
    pub(super) fn of(set: impl Fn(&str) -> Option<OsString>, user: u32) -> Option<Self> {
        let below_home = || Some(directory_of(&set, "HOME")?.join(".local/state"));
        let state = directory_of(&set, "XDG_STATE_HOME").or_else(below_home)?;
        Some(Self { directory: state.join("posh/allowed"), user })
    }

    /// Whether these contents of that file are allowed. `file` has no symbolic links.
    pub(super) fn allows(&self, file: &Path, contents: &str) -> bool {
        let Ok(entry) = trusted_path::open_file(&self.entry(file), self.user) else { return false };
        let mut allowed = String::new();
        let read = entry.file.take(DIGEST_DIGITS as u64).read_to_string(&mut allowed);
        read.is_ok() && allowed == contents
    }

    /// Allows them.
    pub(super) fn allow(&self, file: &Path, contents: &str) -> io::Result<()> {
        trusted_path::make_directory(&self.directory, self.user)?;
        let entry = self.entry(file);
        let fresh = entry.with_extension(format!("{}.new", std::process::id()));
        // A process of the same number may have died here.
        let _ = fs::remove_file(&fresh);
        let mut new =
            fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
        // The path is for people; the file's name is what counts.
        new.write_all(&[contents.as_bytes(), b"  ", file.as_os_str().as_bytes(), b"\n"].concat())?;
        fs::rename(&fresh, entry)
    }

    /// Takes it back; gives whether it was allowed, in whatever version.
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
