//! Where the configuration is looked for.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The first candidate that exists; `etc` is /etc outside tests.
pub(super) fn find(variable: impl Fn(&str) -> Option<OsString>, etc: &Path) -> Option<PathBuf> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    if let Some(named) = set("POSH_CONFIG") {
        return Some(PathBuf::from(named));
    }
    let user = set("XDG_CONFIG_HOME")
        .map(PathBuf::from)
        .filter(|dir| dir.is_absolute())
        .or_else(|| set("HOME").map(|home| PathBuf::from(home).join(".config")));
    let candidates = [
        Some(PathBuf::from("mounts.toml")),
        user.map(|dir| dir.join("posh/mounts.toml")),
        Some(etc.join("posh/mounts.toml")),
    ];
    candidates.into_iter().flatten().find(|path| path.is_file())
}
