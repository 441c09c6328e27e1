//! A session that a gateway has ready before anybody asks for one: its directory lies beside the stage socket, under a name
//! that says what its shims were made for. Whoever renames it has it, and no shell needs to wait for the gateway's answer.

use std::{
    env,
    ffi::OsStr,
    fs, io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use prost::Message;
use sha2::{Digest, Sha256};

use crate::{PROTOCOL_VERSION, stage::SessionFile};

/// Hexadecimal digits of a SHA-256 that go into a name: a path of the user's that is met once in 2⁴⁸ finds the wrong shims.
const DIGEST_DIGITS: usize = 12;

/// What a session's directory holds: shims, in that directory of it.
pub const SHIMS: &str = "bin";

/// And the file of that name ([`SessionFile`]).
pub const FILE: &str = "session";

/// What shims depend on: where commands are looked for, which files are there, and what the shims lead to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MadeFor(String);

impl MadeFor {
    /// As it is now; looks at each directory of `path`.
    #[must_use]
    pub fn now(path: &OsStr, stage_program: &Path) -> Self {
        let mut digest = Sha256::new();
        let mut add = |bytes: &[u8]| {
            digest.update(bytes.len().to_le_bytes());
            digest.update(bytes);
        };
        add(&PROTOCOL_VERSION.to_le_bytes());
        add(path.as_bytes());
        add(stage_program.as_os_str().as_bytes());
        for directory in env::split_paths(path) {
            if let Ok(found) = fs::metadata(directory) {
                add(&found.mtime().to_le_bytes());
                add(&found.mtime_nsec().to_le_bytes());
            }
            add(b"");
        }
        let hex = digest.finalize().iter().take(DIGEST_DIGITS / 2).map(|byte| format!("{byte:02x}")).collect();
        Self(hex)
    }

    /// Where a session that is ready lies, by its gateway's stage socket.
    #[must_use]
    pub fn place(&self, stage_socket: &Path) -> PathBuf {
        stage_socket.with_extension(format!("{READY}{}", self.0))
    }
}

/// Around a digest, the extension of a session that is ready.
const READY: &str = "ready-";

/// Whether a file's name is that of a session that is ready, whichever gateway made it.
#[must_use]
pub fn is_ready(name: &Path) -> bool {
    name.extension().is_some_and(|extension| extension.as_bytes().starts_with(READY.as_bytes()))
}

/// What a session's directory says of it.
///
/// # Errors
/// It can't be read, or is no such file.
pub fn session_file(directory: &Path) -> io::Result<SessionFile> {
    SessionFile::decode(fs::read(directory.join(FILE))?.as_slice()).map_err(io::Error::other)
}

/// The name of a session's directory once the process `pid` has taken it.
#[must_use]
pub fn taken_name(pid: u32) -> String {
    format!("session-p{pid}")
}

/// Takes the session that is ready at `place`, for the process `pid`: where it is now.
///
/// # Errors
/// There is none, most often.
pub fn take(place: &Path, pid: u32) -> io::Result<PathBuf> {
    let taken = place.with_file_name(taken_name(pid));
    // What another process of that number has left is not empty, and stays.
    fs::rename(place, &taken).map(|()| taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_what_shims_were_made_for() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("gateway-1.stage");
        let [one, other] = ["one", "other"].map(|name| directory.path().join(name));
        fs::create_dir(&one).unwrap();
        let of = |path: &Path, stage: &str| MadeFor::now(path.as_os_str(), Path::new(stage));
        let first = of(&one, "/stage");
        assert_eq!(first, of(&one, "/stage"));
        let missing = of(&other, "/stage");
        assert!(first != missing && first != of(&one, "/other"));
        fs::create_dir(&other).unwrap();
        assert_ne!(missing, of(&other, "/stage"));
        fs::write(one.join("new"), "").unwrap();
        assert_ne!(first, of(&one, "/stage"));
        assert!(is_ready(&first.place(&socket)) && !is_ready(&socket));
        assert_eq!(first.place(&socket).parent(), Some(directory.path()));
    }

    #[test]
    fn one_of_all_takes_it() {
        let directory = tempfile::tempdir().unwrap();
        let place = MadeFor::now(OsStr::new("/bin"), Path::new("/stage")).place(&directory.path().join("g.stage"));
        fs::create_dir_all(place.join(SHIMS)).unwrap();
        let taken = take(&place, 7).unwrap();
        assert_eq!(taken, directory.path().join("session-p7"));
        assert_eq!(take(&place, 8).unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::create_dir_all(place.join(SHIMS)).unwrap();
        assert!(take(&place, 7).is_err());
        assert!(taken.join(SHIMS).exists() && place.exists());
    }
}
