//! Where the configuration is looked for.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The first candidate that exists; `etc` is /etc outside tests.
pub(super) fn find(variable: impl Fn(&str) -> Option<OsString>, etc: &Path) -> Option<PathBuf> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    if let Some(named) = set("POSH_CONFIG") {
        return Some(PathBuf::from(named));
    }
    let user = user_directory(set);
    let candidates = [
        Some(PathBuf::from("mounts.toml")),
        user.map(|dir| dir.join("posh/mounts.toml")),
        Some(etc.join("posh/mounts.toml")),
    ];
    candidates.into_iter().flatten().find(|path| path.is_file())
}

/// Where annotation files are looked for besides those that ship, a later place over an earlier one.
pub(super) fn annotations(variable: impl Fn(&str) -> Option<OsString>, etc: &Path) -> Vec<PathBuf> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    [Some(etc.to_owned()), user_directory(set)].into_iter().flatten().map(|dir| dir.join("posh/annotations")).collect()
}

/// The user's configuration directory (XDG Base Directory Specification).
pub(super) fn user_directory(set: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let named = set("XDG_CONFIG_HOME").map(PathBuf::from).filter(|dir| dir.is_absolute());
    named.or_else(|| set("HOME").map(|home| PathBuf::from(home).join(".config")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// The file that is found with these variables and an /etc of ours.
    fn check(variables: &[(&str, &Path)], etc: &Path, expect: Option<PathBuf>) {
        let variable =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, v)| v.as_os_str().to_owned());
        assert_eq!(find(variable, etc), expect, "{variables:?}");
    }

    #[test]
    fn the_first_that_exists() {
        let dir = tempfile::tempdir().expect("a directory");
        let (home, xdg, etc) = (dir.path().join("home"), dir.path().join("xdg"), dir.path().join("etc"));
        let none = Path::new("");
        check(&[("HOME", &home)], &etc, None);
        let make = |base: &Path| {
            fs::create_dir_all(base.join("posh")).expect("a directory");
            fs::write(base.join("posh/mounts.toml"), "").expect("a file");
            base.join("posh/mounts.toml")
        };
        let in_etc = make(&etc);
        check(&[("HOME", &home)], &etc, Some(in_etc));
        let in_home = make(&home.join(".config"));
        check(&[("HOME", &home), ("POSH_CONFIG", none)], &etc, Some(in_home.clone()));
        let in_xdg = make(&xdg);
        check(&[("HOME", &home), ("XDG_CONFIG_HOME", &xdg)], &etc, Some(in_xdg));
        check(&[("HOME", &home), ("XDG_CONFIG_HOME", Path::new("relative"))], &etc, Some(in_home));
        let named = Path::new("/nonexistent/m.toml");
        check(&[("HOME", &home), ("POSH_CONFIG", named)], &etc, Some(named.to_path_buf()));
    }
}
