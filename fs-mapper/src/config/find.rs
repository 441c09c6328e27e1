//! The search for the configuration, and which of the candidates may be trusted how far.

use std::{
    ffi::OsString,
    fmt, io,
    path::{Path, PathBuf},
};

use trusted_path::Untrusted;

use super::allow::{self, Register};

/// The name of the file in each directory that is searched.
const NAME: &str = "mounts.toml";

/// The configuration that stands for none, as the user may name it.
const EMPTY: &str = "/dev/null";

/// No configuration is longer; what is, is not read to its end at the start of each shell.
const MAX_BYTES: u64 = 1 << 20;

/// The place that a configuration was found in, which says how far it is trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The user has named it, or it is the user's or the machine's own: all of its keys count.
    Own,
    /// It lies in the current directory, and the user has allowed it: nothing in it may start a
    /// program, mount, or change the meaning of commands.
    Directory,
}

/// A configuration file that may be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Without symbolic links.
    pub file: PathBuf,
    /// How far it is trusted.
    pub scope: Scope,
    /// SHA-256 of the contents that were allowed, in hexadecimal digits; empty for the user's own.
    digest: String,
}

impl Found {
    /// The name that its gateway goes by: the file's path. A directory's file has a gateway for
    /// each contents that were allowed, at a path that no file can have, so that it is never served
    /// by one that trusts it further, or that has read something else.
    #[must_use]
    pub fn gateway_name(&self) -> PathBuf {
        match self.scope {
            Scope::Own => self.file.clone(),
            Scope::Directory => self.file.join(&self.digest),
        }
    }

    /// For sshfs mounts without any configuration.
    #[must_use]
    pub fn empty() -> Self {
        Self { file: EMPTY.into(), scope: Scope::Own, digest: String::new() }
    }
}

/// A candidate that is not used, and why.
#[derive(Debug)]
pub enum PassedOver {
    /// It lies in the current directory, and the user has not allowed these contents.
    NotAllowed(PathBuf),
    /// It lies in the current directory, and somebody else may have written it.
    NotOwn(Unusable),
    /// It should be the user's own or the machine's.
    Unsafe(Unusable),
}

impl PassedOver {
    /// Whether something is wrong with the user's own set-up; a directory may hold any file.
    #[must_use]
    pub fn is_fault(&self) -> bool {
        matches!(self, Self::Unsafe(_))
    }
}

impl fmt::Display for PassedOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAllowed(file) => {
                write!(f, "{} is not allowed; `posh allow` to use it", file.display())
            }
            Self::NotOwn(why) | Self::Unsafe(why) => {
                write!(f, "{} is not used: {}", why.file.display(), why.source)
            }
        }
    }
}

/// A configuration file that can't be used.
#[derive(Debug, thiserror::Error)]
#[error("can't use the configuration {}", file.display())]
pub struct Unusable {
    /// As it was named.
    pub file: PathBuf,
    /// Why.
    pub source: io::Error,
}

impl Unusable {
    fn new(file: &Path, source: impl Into<io::Error>) -> Self {
        Self { file: file.to_owned(), source: source.into() }
    }

    /// Of a file that is missing, the system's words are enough.
    fn untrusted(file: &Path, why: Untrusted) -> Self {
        match why {
            Untrusted::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                Self::new(file, source)
            }
            why => Self::new(file, why),
        }
    }
}

/// The end of a search.
#[derive(Debug, Default)]
pub struct Search {
    /// The configuration in force.
    pub found: Option<Found>,
    /// What would have come before it.
    pub passed_over: Vec<PassedOver>,
}

/// The environment of a search.
pub(super) struct Surroundings<'a> {
    /// By name.
    pub variable: &'a dyn Fn(&str) -> Option<OsString>,
    /// The current directory, however it is spelled.
    pub here: &'a Path,
    /// /etc outside tests.
    pub etc: &'a Path,
    /// Whose configuration it is.
    pub user: u32,
}

impl Surroundings<'_> {
    fn set(&self, name: &str) -> Option<OsString> {
        (self.variable)(name).filter(|value| !value.is_empty())
    }
}

/// The first candidate that may be used.
pub(super) fn find(around: &Surroundings<'_>) -> Result<Search, Unusable> {
    if let Some(named) = around.set("POSH_CONFIG") {
        let found = self::named(Path::new(&named), around.user)?;
        return Ok(Search { found: Some(found), passed_over: Vec::new() });
    }
    let mut search = Search::default();
    match in_directory(around) {
        Ok(Some(found)) => return Ok(Search { found: Some(found), ..search }),
        Ok(None) => {}
        Err(why) => search.passed_over.push(why),
    }
    let user = user_directory(|name| around.set(name));
    for directory in user.into_iter().chain([around.etc.to_owned()]) {
        let file = directory.join("posh").join(NAME);
        match named(&file, around.user) {
            Ok(found) => {
                search.found = Some(found);
                break;
            }
            Err(why) if is_missing(&why) => {}
            Err(why) => search.passed_over.push(PassedOver::Unsafe(why)),
        }
    }
    Ok(search)
}

fn is_missing(why: &Unusable) -> bool {
    matches!(why.source.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// A file that the user has named, or that lies where the user's own does.
pub(super) fn named(file: &Path, user: u32) -> Result<Found, Unusable> {
    if file == Path::new(EMPTY) {
        return Ok(Found::empty());
    }
    let opened =
        trusted_path::open_file(file, user).map_err(|why| Unusable::untrusted(file, why))?;
    Ok(Found { file: opened.path, scope: Scope::Own, digest: String::new() })
}

/// The current directory's file, if the user has allowed it as it is now.
fn in_directory(around: &Surroundings<'_>) -> Result<Option<Found>, PassedOver> {
    let file = around.here.join(NAME);
    if !file.symlink_metadata().is_ok_and(|found| found.is_file() || found.is_symlink()) {
        return Ok(None);
    }
    let (file, text) = read_in_directory(&file, around.user).map_err(PassedOver::NotOwn)?;
    let digest = allow::digest(text.as_bytes());
    let register = Register::of(|name| around.set(name), around.user);
    if !register.is_some_and(|register| register.allows(&file, &digest)) {
        return Err(PassedOver::NotAllowed(file));
    }
    Ok(Some(Found { file, scope: Scope::Directory, digest }))
}

/// Reads a directory's file: one regular file of the user's in directories that nobody else can
/// change. The descriptor that is judged is the one that is read.
pub(super) fn read_in_directory(file: &Path, user: u32) -> Result<(PathBuf, String), Unusable> {
    let refused =
        |why: &str| Unusable::new(file, io::Error::new(io::ErrorKind::PermissionDenied, why));
    let directory =
        file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = file.file_name().ok_or_else(|| refused("it is not the name of a file"))?;
    let directory =
        trusted_path::directory(directory, user).map_err(|why| Unusable::untrusted(file, why))?;
    let direct = directory.path.join(name);
    let opened =
        trusted_path::open_file(&direct, user).map_err(|why| Unusable::untrusted(file, why))?;
    if opened.path != direct {
        return Err(refused("it is a symbolic link"));
    }
    if opened.owner != user {
        return Err(refused(&format!("it belongs to user {}, not to user {user}", opened.owner)));
    }
    let text = read_all(opened.file).map_err(|error| Unusable::new(file, error))?;
    Ok((direct, text))
}

/// Reads what was found, once more under the same rules.
pub(super) fn read(found: &Found, user: u32) -> Result<String, Unusable> {
    if found.file == Path::new(EMPTY) {
        return Ok(String::new());
    }
    match found.scope {
        Scope::Own => {
            let opened = trusted_path::open_file(&found.file, user);
            let opened = opened.map_err(|why| Unusable::untrusted(&found.file, why))?;
            read_all(opened.file).map_err(|error| Unusable::new(&found.file, error))
        }
        Scope::Directory => {
            let (_, text) = read_in_directory(&found.file, user)?;
            if allow::digest(text.as_bytes()) != found.digest {
                let changed = io::Error::other("it has changed since it was allowed");
                return Err(Unusable::new(&found.file, changed));
            }
            Ok(text)
        }
    }
}

fn read_all(file: std::fs::File) -> io::Result<String> {
    let text = io::read_to_string(io::Read::take(file, MAX_BYTES + 1))?;
    if text.len() as u64 > MAX_BYTES {
        return Err(io::Error::other(format!("it is longer than {MAX_BYTES} bytes")));
    }
    Ok(text)
}

/// A directory's file for `--from-directory`: it must be allowed as it is now.
pub(super) fn allowed(file: &Path, around: &Surroundings<'_>) -> Result<Found, Unusable> {
    let (file, text) = read_in_directory(file, around.user)?;
    let digest = allow::digest(text.as_bytes());
    let register = Register::of(|name| around.set(name), around.user);
    if register.is_some_and(|register| register.allows(&file, &digest)) {
        return Ok(Found { file, scope: Scope::Directory, digest });
    }
    let source = io::Error::new(
        io::ErrorKind::PermissionDenied,
        "it is not allowed; `posh allow` to use it",
    );
    Err(Unusable { file, source })
}

/// Where annotation files are looked for besides those that ship, a later place over an earlier
/// one.
pub(super) fn annotations(variable: impl Fn(&str) -> Option<OsString>, etc: &Path) -> Vec<PathBuf> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    [Some(etc.to_owned()), user_directory(set)]
        .into_iter()
        .flatten()
        .map(|dir| dir.join("posh/annotations"))
        .collect()
}

/// The user's configuration directory (XDG Base Directory Specification).
pub(super) fn user_directory(set: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    directory_of(&set, "XDG_CONFIG_HOME")
        .or_else(|| Some(directory_of(&set, "HOME")?.join(".config")))
}

/// The directory that a variable names; none if that is no absolute path, since it would be
/// wherever one is.
pub(super) fn directory_of(set: impl Fn(&str) -> Option<OsString>, name: &str) -> Option<PathBuf> {
    set(name).map(PathBuf::from).filter(|directory| directory.is_absolute())
}

#[cfg(test)]
#[path = "find_tests.rs"]
mod tests;
