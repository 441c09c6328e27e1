//! Names of a view that a client may choose: mount points, working directories and client files. Decided by
//! the text of a path alone, before anything is opened. Nothing of the server's own, and nothing
//! that the view shows, lies at such a path, above it or below it.

use std::{
    ffi::OsStr,
    os::unix::ffi::OsStrExt as _,
    path::{Component, Path},
};

/// Trees of the view that are the server's: its kernel's, its programs, libraries and configuration.
const RESERVED: [&str; 10] = ["/dev", "/proc", "/sys", "/boot", "/etc", "/usr", "/opt", "/nix", "/gnu", "/snap"];

/// Directories of the view's own. Clients may have names below them, but not cover them.
pub const PRIVATE: [&str; 2] = ["/tmp", "/var/tmp"];

/// Configuration of the machine that the workstation may send in place of the server's, if an annotation
/// lists it: its values change what commands print, and name no program or library.
pub const REPLACEABLE: [&str; 10] = [
    "/etc/localtime",
    "/etc/gitconfig",
    "/etc/gitattributes",
    "/etc/magic",
    "/etc/ImageMagick-6/policy.xml",
    "/etc/ImageMagick-6/coder.xml",
    "/etc/ImageMagick-6/thresholds.xml",
    "/etc/ImageMagick-7/policy.xml",
    "/etc/ImageMagick-7/coder.xml",
    "/etc/ImageMagick-7/thresholds.xml",
];

/// PATH_MAX, without its zero byte.
const MAX_PATH_BYTES: usize = 4095;
/// NAME_MAX.
const MAX_NAME_BYTES: usize = 255;

/// Reason why a client's path has no place in a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Misplaced {
    /// Not in normal form.
    #[error("it is not an absolute path without `.`, `..`, empty names and control characters")]
    NotPlain,
    /// At or below a tree of the server's.
    #[error("nothing of the workstation's can be placed in the server's {0}")]
    Reserved(&'static str),
    /// At or above something that the view shows.
    #[error("it would hide the server's {0}")]
    Hides(&'static str),
}

/// Symbolic links and directories at the top of the tree where distributions keep programs and libraries.
pub fn is_program_link(name: &str) -> bool {
    name == "bin" || name == "sbin" || name.starts_with("lib")
}

/// Checks the place of a mount or of a working directory.
///
/// # Errors
/// [`Misplaced`].
pub fn check(path: &Path) -> Result<(), Misplaced> {
    check_plain(path)?;
    if let Some(reserved) = RESERVED.into_iter().find(|reserved| path.starts_with(reserved)) {
        return Err(Misplaced::Reserved(reserved));
    }
    let top = path.components().nth(1).and_then(|top| top.as_os_str().to_str());
    if top.is_some_and(is_program_link) {
        return Err(Misplaced::Reserved("programs and libraries"));
    }
    match RESERVED.into_iter().chain(PRIVATE).find(|shown| Path::new(shown).starts_with(path)) {
        Some(shown) => Err(Misplaced::Hides(shown)),
        None => Ok(()),
    }
}

/// Checks the place of a client file.
///
/// # Errors
/// [`Misplaced`].
pub fn check_file(path: &Path) -> Result<(), Misplaced> {
    if is_replaceable(path) { Ok(()) } else { check(path) }
}

/// Whether a client file stands in for one of the server's.
pub fn is_replaceable(path: &Path) -> bool {
    REPLACEABLE.iter().any(|file| path.as_os_str() == OsStr::new(file))
}

fn check_plain(path: &Path) -> Result<(), Misplaced> {
    let bytes = path.as_os_str().as_bytes();
    let mut components = path.components();
    let is_normal = components.next() == Some(Component::RootDir)
        && components.all(|part| matches!(part, Component::Normal(name) if name.len() <= MAX_NAME_BYTES));
    // Components hide `.`, doubled and trailing slashes.
    let is_whole = path.components().collect::<std::path::PathBuf>().as_os_str() == path.as_os_str();
    let is_printable = !bytes.iter().any(u8::is_ascii_control);
    if is_normal && is_whole && is_printable && bytes.len() <= MAX_PATH_BYTES {
        Ok(())
    } else {
        Err(Misplaced::NotPlain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_places_of_the_workstations_own_are_taken() {
        use Misplaced::{Hides, NotPlain, Reserved};
        const PROGRAMS: Result<(), Misplaced> = Err(Reserved("programs and libraries"));
        for (path, expected) in [
            ("/mnt/logs", Ok(())),
            ("/home/ada/data", Ok(())),
            ("/data", Ok(())),
            ("/run/user/1000/gvfs", Ok(())),
            ("/tmp/x", Ok(())),
            ("/var/tmp/x", Ok(())),
            ("/usrlocal", Ok(())),
            ("/", Err(Hides("/dev"))),
            ("/var", Err(Hides("/var/tmp"))),
            ("/tmp", Err(Hides("/tmp"))),
            ("/.old/etc", Ok(())),
            ("/usr", Err(Reserved("/usr"))),
            ("/usr/local/sbin", Err(Reserved("/usr"))),
            ("/etc", Err(Reserved("/etc"))),
            ("/etc/ld.so.preload", Err(Reserved("/etc"))),
            ("/etc/localtime", Err(Reserved("/etc"))),
            ("/dev/null", Err(Reserved("/dev"))),
            ("/proc/self/root", Err(Reserved("/proc"))),
            ("/sys/fs/cgroup", Err(Reserved("/sys"))),
            ("/boot", Err(Reserved("/boot"))),
            ("/opt/x", Err(Reserved("/opt"))),
            ("/bin", PROGRAMS),
            ("/lib64/x", PROGRAMS),
            ("/libx32", PROGRAMS),
            ("mnt/x", Err(NotPlain)),
            ("", Err(NotPlain)),
            ("//mnt/x", Err(NotPlain)),
            ("/mnt/", Err(NotPlain)),
            ("/mnt/./x", Err(NotPlain)),
            ("/mnt/../etc", Err(NotPlain)),
            ("/mnt/x\n", Err(NotPlain)),
            ("/mnt/\u{1b}[2J", Err(NotPlain)),
        ] {
            assert_eq!(check(Path::new(path)), expected, "{path:?}");
        }
        let long = format!("/mnt/{}", "x".repeat(256));
        assert_eq!(check(Path::new(&long)), Err(NotPlain));
    }

    #[test]
    fn of_the_configuration_exact_names_are_replaced() {
        for (path, expected) in [
            ("/etc/localtime", true),
            ("/home/ada/.gitconfig", true),
            ("/etc/gitconfig", true),
            ("/etc//gitconfig", false),
            ("/etc/gitconfig/x", false),
            ("/etc/passwd", false),
            ("/etc/ld.so.preload", false),
            ("/dev/null", false),
            ("/proc/self/exe", false),
        ] {
            assert_eq!(check_file(Path::new(path)).is_ok(), expected, "{path}");
        }
    }
}
