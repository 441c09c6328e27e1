//! Decides by their text alone where a client's names may lie in a view: mount points, client
//! files, and working directories that only the workstation has.
//!
//! A view has its root on a tmpfs of its own, so any name outside of the directories listed here is
//! harmless. The listed ones hold what the server shows (programs, libraries, configuration,
//! devices, `/proc`): nothing of a client's lies at, below or above them.

use std::{
    collections::HashSet,
    os::unix::ffi::OsStrExt as _,
    path::{Component, Path, PathBuf},
};

/// Top directories of programs, libraries, configuration, and the kernel. They are reserved even if
/// this server has none of that name.
const RESERVED: [&str; 18] = [
    "/bin", "/boot", "/dev", "/etc", "/gnu", "/lib", "/lib32", "/lib64", "/libo32", "/libx32",
    "/nix", "/opt", "/proc", "/run", "/sbin", "/snap", "/sys", "/usr",
];

/// Parts of [`RESERVED`] below which workstations mount removable media and users' file systems.
const OPEN: [&str; 2] = ["/run/media", "/run/user"];

/// Directories that the view has for its commands; names below them are allowed.
pub const PRIVATE: [&str; 2] = ["/tmp", "/var/tmp"];

/// Files of `/etc` that the workstation may replace, each by its whole name: the time zone, and
/// those that annotations list as `client_files`. None of them limits what commands may do on this
/// server (ImageMagick's policy does).
const REPLACEABLE: [&str; 4] =
    ["/etc/localtime", "/etc/gitconfig", "/etc/gitattributes", "/etc/magic"];

/// Mounts of one view. Each costs every run on the view a path comparison, and the kernel counts
/// mounts per namespace.
const MAX_MOUNTS: usize = 256;

/// Client files of one view; annotations list fewer than twenty.
const MAX_FILES: usize = 64;

/// The reason why a client's name can't lie at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoPlace {
    /// Relative paths have no meaning in a view.
    #[error("it is not an absolute path")]
    Relative,
    /// The path is not in its normal form.
    #[error("it is not a plain path")]
    NotPlain,
    /// The root directory.
    #[error("it would hide everything")]
    Root,
    /// In a directory of the server's.
    #[error("{0} is the server's own")]
    Reserved(&'static str),
    /// At or above a directory of the view's.
    #[error("it would hide the view's {0}")]
    Hides(&'static str),
    /// At or above a mount, or at or around another client file.
    #[error("something else of the workstation is there")]
    Taken,
    /// More than a view may have.
    #[error("there are more than {0} of its kind")]
    TooMany(usize),
}

/// A path, and the reason of its refusal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the view can have nothing of the workstation at {}: {why}", path.display())]
pub struct Misplaced {
    path: PathBuf,
    why: NoPlace,
}

/// Checks the place of a mount point or of a directory.
///
/// # Errors
/// The reason against it.
pub fn check(path: &Path) -> Result<(), NoPlace> {
    check_text(path)?;
    if path == Path::new("/") {
        return Err(NoPlace::Root);
    }
    let is_open = OPEN.iter().any(|open| path.starts_with(open) && path != Path::new(open));
    match RESERVED.iter().find(|reserved| path.starts_with(reserved)) {
        Some(reserved) if !is_open => return Err(NoPlace::Reserved(reserved)),
        _ => {}
    }
    match PRIVATE.iter().find(|private| Path::new(private).starts_with(path)) {
        Some(private) => Err(NoPlace::Hides(private)),
        None => Ok(()),
    }
}

/// Checks the place of a client file.
///
/// # Errors
/// The reason against it.
pub fn check_file(path: &Path) -> Result<(), NoPlace> {
    if is_replaceable(path) {
        return Ok(());
    }
    check(path)
}

/// Tells if `path` is one of the files of `/etc` that the workstation may replace.
pub fn is_replaceable(path: &Path) -> bool {
    // Compared as text: `Path`s of different texts can be equal.
    REPLACEABLE.iter().any(|name| path.as_os_str() == *name)
}

/// Checks the places of a view's mounts and client files, each by itself and beside the others.
/// One mount may lie inside another, and a file inside a mount.
///
/// # Errors
/// The first that is misplaced.
pub fn check_all(mounts: &[&Path], files: &[&Path]) -> Result<(), Misplaced> {
    let misplaced = |path: &Path, why| Misplaced { path: path.to_owned(), why };
    for (paths, most) in [(mounts, MAX_MOUNTS), (files, MAX_FILES)] {
        if let Some(path) = paths.get(most) {
            return Err(misplaced(path, NoPlace::TooMany(most)));
        }
    }
    let mut points = HashSet::new();
    for path in mounts {
        check(path).map_err(|why| misplaced(path, why))?;
        if !points.insert(*path) {
            return Err(misplaced(path, NoPlace::Taken));
        }
    }
    let above: HashSet<&Path> = mounts.iter().flat_map(|path| path.ancestors()).collect();
    let mut names = HashSet::new();
    for path in files {
        check_file(path).map_err(|why| misplaced(path, why))?;
        if above.contains(path) || !names.insert(*path) {
            return Err(misplaced(path, NoPlace::Taken));
        }
    }
    let is_around = |path: &&&Path| path.ancestors().skip(1).any(|above| names.contains(above));
    match mounts.iter().chain(files).find(is_around) {
        Some(path) => Err(misplaced(path, NoPlace::Taken)),
        None => Ok(()),
    }
}

/// A place has one name: no empty component, `.`, `..`, slash at its end, or control character.
fn check_text(path: &Path) -> Result<(), NoPlace> {
    let bytes = path.as_os_str().as_bytes();
    if !bytes.starts_with(b"/") {
        return Err(NoPlace::Relative);
    }
    let normal =
        path.components().skip(1).all(|component| matches!(component, Component::Normal(_)));
    let is_same = path.components().collect::<PathBuf>().as_os_str() == path.as_os_str();
    if !normal || !is_same || bytes.iter().any(u8::is_ascii_control) {
        return Err(NoPlace::NotPlain);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_allowed_or_refused_by_their_text() {
        for (path, expected) in [
            ("/mnt", Ok(())),
            ("/mnt/x", Ok(())),
            ("/home", Ok(())),
            ("/home/u/.gitconfig", Ok(())),
            ("/root/.gitconfig", Ok(())),
            ("/media/u/disk", Ok(())),
            ("/data", Ok(())),
            ("/srv/a b/c", Ok(())),
            ("/library/x", Ok(())),
            ("/usrlocal", Ok(())),
            ("/.old/etc/x", Ok(())),
            ("/var/x", Ok(())),
            ("/tmp/x", Ok(())),
            ("/var/tmp/x", Ok(())),
            ("/run/user/1000/x", Ok(())),
            ("/run/media/u/disk", Ok(())),
            ("/mnt/etc", Ok(())),
            ("/", Err(NoPlace::Root)),
            ("", Err(NoPlace::Relative)),
            ("mnt/x", Err(NoPlace::Relative)),
            ("./mnt", Err(NoPlace::Relative)),
            ("//", Err(NoPlace::NotPlain)),
            ("//mnt", Err(NoPlace::NotPlain)),
            ("/mnt//x", Err(NoPlace::NotPlain)),
            ("/mnt/", Err(NoPlace::NotPlain)),
            ("/mnt/.", Err(NoPlace::NotPlain)),
            ("/./mnt", Err(NoPlace::NotPlain)),
            ("/..", Err(NoPlace::NotPlain)),
            ("/mnt/../etc", Err(NoPlace::NotPlain)),
            ("/home/../etc/passwd", Err(NoPlace::NotPlain)),
            ("/mnt/x\n", Err(NoPlace::NotPlain)),
            ("/mnt/\u{1b}[2J", Err(NoPlace::NotPlain)),
            ("/tmp", Err(NoPlace::Hides("/tmp"))),
            ("/var", Err(NoPlace::Hides("/var/tmp"))),
            ("/var/tmp", Err(NoPlace::Hides("/var/tmp"))),
            ("/run", Err(NoPlace::Reserved("/run"))),
            ("/run/user", Err(NoPlace::Reserved("/run"))),
            ("/run/userx/y", Err(NoPlace::Reserved("/run"))),
            ("/run/systemd/x", Err(NoPlace::Reserved("/run"))),
            ("/etc", Err(NoPlace::Reserved("/etc"))),
            ("/etc/x", Err(NoPlace::Reserved("/etc"))),
            ("/etc/localtime", Err(NoPlace::Reserved("/etc"))),
            ("/etc/ld.so.preload", Err(NoPlace::Reserved("/etc"))),
            ("/dev/null", Err(NoPlace::Reserved("/dev"))),
            ("/dev/shm/x", Err(NoPlace::Reserved("/dev"))),
            ("/proc/self/fd/3", Err(NoPlace::Reserved("/proc"))),
            ("/sys", Err(NoPlace::Reserved("/sys"))),
            ("/boot/x", Err(NoPlace::Reserved("/boot"))),
            ("/bin", Err(NoPlace::Reserved("/bin"))),
            ("/sbin/x", Err(NoPlace::Reserved("/sbin"))),
            ("/lib64/x", Err(NoPlace::Reserved("/lib64"))),
            ("/usr", Err(NoPlace::Reserved("/usr"))),
            ("/usr/local/sbin", Err(NoPlace::Reserved("/usr"))),
            ("/opt/x", Err(NoPlace::Reserved("/opt"))),
            ("/nix/store", Err(NoPlace::Reserved("/nix"))),
            ("/gnu/store", Err(NoPlace::Reserved("/gnu"))),
            ("/snap/x", Err(NoPlace::Reserved("/snap"))),
        ] {
            assert_eq!(check(Path::new(path)), expected, "{path:?}");
        }
    }

    #[test]
    fn only_whole_names_of_etc_are_replaceable() {
        for (path, expected) in [
            ("/etc/localtime", Ok(())),
            ("/etc/gitconfig", Ok(())),
            ("/home/u/.gitconfig", Ok(())),
            ("/etc/ImageMagick-6/policy.xml", Err(NoPlace::Reserved("/etc"))),
            ("/etc/localtime/", Err(NoPlace::NotPlain)),
            ("//etc/localtime", Err(NoPlace::NotPlain)),
            ("/etc/./localtime", Err(NoPlace::NotPlain)),
            ("/etc/localtime/x", Err(NoPlace::Reserved("/etc"))),
            ("/etc/ImageMagick-6", Err(NoPlace::Reserved("/etc"))),
            ("/etc/ImageMagick-6/delegates.xml", Err(NoPlace::Reserved("/etc"))),
            ("/etc/passwd", Err(NoPlace::Reserved("/etc"))),
        ] {
            assert_eq!(check_file(Path::new(path)), expected, "{path:?}");
        }
    }

    #[test]
    fn places_do_not_cover_each_other() {
        for (mounts, files, expected) in [
            (&["/mnt/a", "/mnt/a/b"][..], &["/mnt/a/f", "/home/u/f"][..], None),
            (&["/mnt/a", "/mnt/a"], &[], Some("/mnt/a")),
            (&["/mnt/a"], &["/mnt/a"], Some("/mnt/a")),
            (&["/mnt/a/b"], &["/mnt/a"], Some("/mnt/a")),
            (&["/mnt/a/b"], &["/mnt"], Some("/mnt")),
            (&[], &["/home/f", "/home/f"], Some("/home/f")),
            (&[], &["/home/f", "/home/f/g"], Some("/home/f/g")),
            (&["/usr/x"], &[], Some("/usr/x")),
            (&[], &["/usr/x"], Some("/usr/x")),
        ] {
            let paths =
                |texts: &'static [&'static str]| texts.iter().map(Path::new).collect::<Vec<_>>();
            let found =
                check_all(&paths(mounts), &paths(files)).err().map(|misplaced| misplaced.path);
            assert_eq!(found.as_deref(), expected.map(Path::new), "{mounts:?} {files:?}");
        }
    }

    #[test]
    fn a_view_has_a_bounded_number_of_places() {
        let names: Vec<PathBuf> =
            (0..=MAX_MOUNTS).map(|number| PathBuf::from(format!("/mnt/{number}"))).collect();
        let paths: Vec<&Path> = names.iter().map(PathBuf::as_path).collect();
        assert_eq!(check_all(&paths[..MAX_MOUNTS], &[]), Ok(()));
        assert!(check_all(&paths, &[]).is_err());
        assert_eq!(check_all(&[], &paths[..MAX_FILES]), Ok(()));
        assert!(check_all(&[], &paths[..=MAX_FILES]).is_err());
    }
}
