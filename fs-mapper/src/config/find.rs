//! Search for the configuration file, and the trust in each candidate.

use std::{
    ffi::OsString,
    fmt, io,
    path::{Path, PathBuf},
};

use trusted_path::Untrusted;

use super::allow::{self, Register};

/// Name of the file in each searched directory.
const NAME: &str = "mounts.toml";

/// Name that stands for an empty configuration.
const EMPTY: &str = "/dev/null";

/// Limit on the file's length: each shell reads it on start.
const MAX_BYTES: u64 = 1 << 20;

/// Origin of a configuration, which limits the keys that it may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfigScope {
    /// Named by the user, or the user's or the machine's own: all keys count.
    Own,
    /// From the current directory, allowed by the user. It must not start programs, mount, or
    /// change the meaning of commands.
    Directory,
}

/// A readable configuration file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundConfig {
    /// Without symbolic links.
    pub file: PathBuf,
    /// Origin, which limits its keys.
    pub scope: ConfigScope,
    /// SHA-256 of the allowed contents, in hexadecimal digits; empty for the user's own.
    digest: String,
}

impl FoundConfig {
    /// Name of its gateway: the file's path. A directory's file has one gateway per allowed
    /// contents, at a path that no file can have. So no gateway with more trust or with other
    /// contents serves it.
    #[must_use]
    pub fn gateway_name(&self) -> PathBuf {
        match self.scope {
            ConfigScope::Own => self.file.clone(),
            ConfigScope::Directory => self.file.join(&self.digest),
        }
    }

    /// Empty configuration, for sshfs mounts alone.
    #[must_use]
    pub fn empty() -> Self {
        Self { file: EMPTY.into(), scope: ConfigScope::Own, digest: String::new() }
    }
}

/// A candidate that is not used, and the reason.
#[derive(Debug)]
pub enum PassedOver {
    /// In the current directory, but the user has not allowed these contents.
    NotAllowed(PathBuf),
    /// In the current directory, but another user may have written it.
    NotOwn(UnusableConfig),
    /// In the user's or the machine's directory, but unsafe.
    Unsafe(UnusableConfig),
}

impl PassedOver {
    /// Returns true if the user's own setup is at fault; a directory may hold any file.
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
pub struct UnusableConfig {
    /// Path as given.
    pub file: PathBuf,
    /// Why.
    pub source: io::Error,
}

impl UnusableConfig {
    fn new(file: &Path, source: impl Into<io::Error>) -> Self {
        Self { file: file.to_owned(), source: source.into() }
    }

    /// For a missing file, the system error says enough.
    fn untrusted(file: &Path, why: Untrusted) -> Self {
        match why {
            Untrusted::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                Self::new(file, source)
            }
            why => Self::new(file, why),
        }
    }
}

/// Result of a search.
#[derive(Debug, Default)]
pub struct ConfigSearch {
    /// Configuration in force.
    pub found: Option<FoundConfig>,
    /// Candidates of higher precedence that were skipped.
    pub passed_over: Vec<PassedOver>,
}

/// The environment of a search.
pub(super) struct SearchEnvironment<'a> {
    /// By name.
    pub variable: &'a dyn Fn(&str) -> Option<OsString>,
    /// Current directory, in any spelling.
    pub here: &'a Path,
    /// /etc outside tests.
    pub etc: &'a Path,
    /// Owner of the configuration.
    pub user: u32,
}

impl SearchEnvironment<'_> {
    fn set(&self, name: &str) -> Option<OsString> {
        (self.variable)(name).filter(|value| !value.is_empty())
    }
}

/// Finds the first usable candidate.
pub(super) fn find(around: &SearchEnvironment<'_>) -> Result<ConfigSearch, UnusableConfig> {
    if let Some(named) = around.set("POSH_CONFIG") {
        let found = self::named(Path::new(&named), around.user)?;
        return Ok(ConfigSearch { found: Some(found), passed_over: Vec::new() });
    }
    let mut search = ConfigSearch::default();
    match in_directory(around) {
        Ok(Some(found)) => return Ok(ConfigSearch { found: Some(found), ..search }),
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

fn is_missing(why: &UnusableConfig) -> bool {
    matches!(why.source.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Opens a file that the user has named, or one in the user's or the machine's directory.
pub(super) fn named(file: &Path, user: u32) -> Result<FoundConfig, UnusableConfig> {
    if file == Path::new(EMPTY) {
        return Ok(FoundConfig::empty());
    }
    let opened =
        trusted_path::open_file(file, user).map_err(|why| UnusableConfig::untrusted(file, why))?;
    Ok(FoundConfig { file: opened.path, scope: ConfigScope::Own, digest: String::new() })
}

/// Current directory's file, if the user has allowed its contents.
fn in_directory(around: &SearchEnvironment<'_>) -> Result<Option<FoundConfig>, PassedOver> {
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
    Ok(Some(FoundConfig { file, scope: ConfigScope::Directory, digest }))
}

/// Reads a directory's file: a regular file of the user's, in directories that nobody else can
/// change. Checks and reads the same descriptor.
pub(super) fn read_in_directory(
    file: &Path,
    user: u32,
) -> Result<(PathBuf, String), UnusableConfig> {
    let refused =
        |why: &str| UnusableConfig::new(file, io::Error::new(io::ErrorKind::PermissionDenied, why));
    let directory =
        file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = file.file_name().ok_or_else(|| refused("it is not the name of a file"))?;
    let directory = trusted_path::directory(directory, user)
        .map_err(|why| UnusableConfig::untrusted(file, why))?;
    let direct = directory.path.join(name);
    let opened = trusted_path::open_file(&direct, user)
        .map_err(|why| UnusableConfig::untrusted(file, why))?;
    if opened.path != direct {
        return Err(refused("it is a symbolic link"));
    }
    if opened.owner != user {
        return Err(refused(&format!("it belongs to user {}, not to user {user}", opened.owner)));
    }
    let text = read_all(opened.file).map_err(|error| UnusableConfig::new(file, error))?;
    Ok((direct, text))
}

/// Reads a found file, after checking it again.
pub(super) fn read(found: &FoundConfig, user: u32) -> Result<String, UnusableConfig> {
    if found.file == Path::new(EMPTY) {
        return Ok(String::new());
    }
    match found.scope {
        ConfigScope::Own => {
            let opened = trusted_path::open_file(&found.file, user);
            let opened = opened.map_err(|why| UnusableConfig::untrusted(&found.file, why))?;
            read_all(opened.file).map_err(|error| UnusableConfig::new(&found.file, error))
        }
        ConfigScope::Directory => {
            let (_, text) = read_in_directory(&found.file, user)?;
            if allow::digest(text.as_bytes()) != found.digest {
                let changed = io::Error::other("it has changed since it was allowed");
                return Err(UnusableConfig::new(&found.file, changed));
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

/// Opens a directory's file for `--from-directory`: its contents must be allowed.
pub(super) fn allowed(
    file: &Path,
    around: &SearchEnvironment<'_>,
) -> Result<FoundConfig, UnusableConfig> {
    let (file, text) = read_in_directory(file, around.user)?;
    let digest = allow::digest(text.as_bytes());
    let register = Register::of(|name| around.set(name), around.user);
    if register.is_some_and(|register| register.allows(&file, &digest)) {
        return Ok(FoundConfig { file, scope: ConfigScope::Directory, digest });
    }
    let source = io::Error::new(
        io::ErrorKind::PermissionDenied,
        "it is not allowed; `posh allow` to use it",
    );
    Err(UnusableConfig { file, source })
}

/// Directories of annotation files besides the built-in ones; later ones override earlier ones.
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

/// Directory in a variable; `None` unless the path is absolute, as a relative one would depend on
/// the current directory.
pub(super) fn directory_of(set: impl Fn(&str) -> Option<OsString>, name: &str) -> Option<PathBuf> {
    set(name).map(PathBuf::from).filter(|directory| directory.is_absolute())
}

#[cfg(test)]
#[path = "find_tests.rs"]
mod tests;
