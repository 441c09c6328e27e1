//! Identities of the files that a session relies on: the process's root directory, the library, and
//! the session's directory. Paths are passed from program to program, and lead elsewhere in another
//! root directory or mount namespace, or after a cleaner of /tmp, where any user may have made
//! files of these names.
//!
//! Invariant: nothing that is found by such a path is loaded, executed, read or written unless the
//! path leads to the very file that posh had verified when the shell was started. Its path was one
//! that only root and the user can change (crate `trusted_path`), from the root directory that this
//! process has, in the mount namespace that it is in (mount ids belong to one). As long as the file
//! can be reached, its directory is not empty, so that nobody has removed that and made another one
//! of its name. An inode number may be used again, but then the time of the last change is another:
//! no program can set it. The session's directory itself changes, so that the link to the stage
//! program in it stands for it.

use core::ffi::{CStr, c_int};

use crate::{
    session::STAGE_LINK,
    sys::{AT_EMPTY_PATH, AT_FDCWD, AT_NO_AUTOMOUNT, AT_STATX_DONT_SYNC, AT_SYMLINK_NOFOLLOW},
    sys::{Stat, stat},
};

/// Cached attributes suffice: local file systems have no others, and others cost a round trip.
const QUICK: c_int = AT_STATX_DONT_SYNC | AT_NO_AUTOMOUNT | AT_SYMLINK_NOFOLLOW;

const NUMBERS: usize = 3;
const FILES: usize = 3;
const DIGITS: usize = 2 * size_of::<u64>();

/// Length of the text of [`Identities`].
pub const TEXT_BYTES: usize = FILES * NUMBERS * DIGITS;

/// Device, inode, and for files the time of the last change in nanoseconds, for directories the
/// mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileIdentity([u64; NUMBERS]);

impl FileIdentity {
    fn of_file(found: Stat) -> Self {
        Self([found.device, found.inode, found.changed])
    }

    fn of_directory(found: Stat) -> Self {
        Self([found.device, found.inode, found.mount.unwrap_or(0)])
    }

    fn of_root() -> Option<Self> {
        stat(AT_FDCWD, c"/", QUICK).map(Self::of_directory)
    }
}

/// Identities of all three.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identities {
    root: FileIdentity,
    library: FileIdentity,
    session: FileIdentity,
}

impl Identities {
    /// From descriptors of the verified library and the verified directory of the session; `None`
    /// if that has no link to the stage program.
    #[must_use]
    pub fn of(library: c_int, session: c_int) -> Option<Self> {
        let stage = stat(session, STAGE_LINK, QUICK).filter(|stage| stage.is_link())?;
        Some(Self {
            root: FileIdentity::of_root()?,
            library: FileIdentity::of_file(stat(library, c"", QUICK | AT_EMPTY_PATH)?),
            session: FileIdentity::of_file(stage),
        })
    }

    /// As they are passed on.
    #[must_use]
    pub fn text(&self) -> [u8; TEXT_BYTES] {
        let mut text = [0; TEXT_BYTES];
        let numbers = [self.root, self.library, self.session].into_iter().flat_map(|file| file.0);
        let digits = numbers
            .flat_map(|number| (0..DIGITS).rev().map(move |digit| (number >> (4 * digit)) & 15));
        text.iter_mut().zip(digits).for_each(|(to, digit)| *to = hexadecimal(digit));
        text
    }

    /// From the text; `None` if posh has not written it.
    pub(crate) fn read(text: &[u8]) -> Option<Self> {
        if text.len() != TEXT_BYTES {
            return None;
        }
        let mut files = [FileIdentity([0; NUMBERS]); FILES];
        let numbers = files.iter_mut().flat_map(|file| &mut file.0);
        for (number, digits) in numbers.zip(text.chunks_exact(DIGITS)) {
            *number =
                digits.iter().try_fold(0, |number, digit| Some(number << 4 | value(*digit)?))?;
        }
        let [root, library, session] = files;
        Some(Self { root, library, session })
    }

    /// Returns true if this process has the root directory and the mount namespace of the shell.
    #[inline(never)]
    pub(crate) fn has_root(&self) -> bool {
        FileIdentity::of_root() == Some(self.root)
    }

    /// Returns true if the path leads to the library.
    #[inline(never)]
    pub(crate) fn is_library(&self, path: &CStr) -> bool {
        stat(AT_FDCWD, path, QUICK).map(FileIdentity::of_file) == Some(self.library)
    }

    /// Returns true if the path leads to the link in the session's directory.
    #[inline(never)]
    pub(crate) fn is_session(&self, stage: &CStr) -> bool {
        stat(AT_FDCWD, stage, QUICK).map(FileIdentity::of_file) == Some(self.session)
    }
}

fn hexadecimal(digit: u64) -> u8 {
    let digit = (digit & 15) as u8;
    if digit < 10 { b'0' + digit } else { b'a' + digit - 10 }
}

fn value(digit: u8) -> Option<u64> {
    match digit {
        b'0'..=b'9' => Some(u64::from(digit - b'0')),
        b'a'..=b'f' => Some(u64::from(digit - b'a' + 10)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        ffi::CString,
        fs,
        os::{
            fd::AsRawFd as _,
            unix::{
                ffi::OsStrExt as _,
                fs::{PermissionsExt as _, symlink},
            },
        },
        path::PathBuf,
        time::Duration,
    };

    use super::*;

    struct Site(PathBuf);

    impl Site {
        fn new(name: &str) -> Self {
            let name = format!("posh-hook-identity-{name}-{}", std::process::id());
            let site = Self(std::env::temp_dir().join(name));
            fs::create_dir(&site.0).unwrap();
            fs::create_dir(site.0.join("session")).unwrap();
            fs::write(site.0.join("library"), "content").unwrap();
            symlink("/posh-stage", site.0.join("session/stage")).unwrap();
            site
        }

        fn at(&self, name: &str) -> CString {
            CString::new(self.0.join(name).as_os_str().as_bytes()).unwrap()
        }

        fn identities(&self) -> Option<Identities> {
            let [library, session] =
                ["library", "session"].map(|name| fs::File::open(self.0.join(name)).unwrap());
            Identities::of(library.as_raw_fd(), session.as_raw_fd())
        }
    }

    impl Drop for Site {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn their_text_says_all_and_nothing_else_is_read() {
        let site = Site::new("text");
        let identities = site.identities().unwrap();
        let text = identities.text();
        assert_eq!(Identities::read(&text), Some(identities));
        assert!(identities.has_root());
        for other in [&text[1..], &[text[1]; TEXT_BYTES + 1], &[b'G'; TEXT_BYTES], b""] {
            assert_eq!(Identities::read(other), None);
        }
        for place in 0..TEXT_BYTES {
            let mut other = text;
            other[place] = if text[place] == b'0' { b'1' } else { b'0' };
            assert_ne!(Identities::read(&other), Some(identities), "digit {place}");
        }
    }

    #[test]
    fn a_file_in_place_of_the_verified_one_is_another() {
        let site = Site::new("other");
        let identities = site.identities().unwrap();
        let (library, stage) = (site.at("library"), site.at("session/stage"));
        assert!(identities.is_library(&library) && identities.is_session(&stage));
        // By a link, which could lead elsewhere a moment later.
        symlink("library", site.0.join("link")).unwrap();
        assert!(!identities.is_library(&site.at("link")));
        // File systems give an inode's number again. Times are as coarse as the kernel's clock.
        std::thread::sleep(Duration::from_millis(30));
        fs::set_permissions(site.0.join("library"), fs::Permissions::from_mode(0o700)).unwrap();
        assert!(!identities.is_library(&library));
        fs::remove_file(site.0.join("session/stage")).unwrap();
        assert!(!identities.is_session(&stage));
        symlink("/posh-stage", site.0.join("session/stage")).unwrap();
        assert!(!identities.is_session(&stage));
    }

    #[test]
    fn a_session_without_a_stage_program_has_none() {
        let site = Site::new("none");
        fs::remove_file(site.0.join("session/stage")).unwrap();
        assert_eq!(site.identities(), None);
        fs::write(site.0.join("session/stage"), "").unwrap();
        assert_eq!(site.identities(), None);
    }
}
