//! The search, and the files that it must not trust.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt as _, chown, symlink},
};

use super::*;

/// Somebody who is neither root nor the user of these tests.
const OTHER: u32 = 54_321;

/// Directories for a search.
struct Place {
    top: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self { top: tempfile::tempdir().expect("a directory") };
        for name in ["home", "here", "etc"] {
            fs::create_dir(place.at(name)).expect("a directory");
            place.set_mode(name, 0o755);
        }
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.top.path().join(name)
    }

    fn set_mode(&self, name: &str, mode: u32) {
        fs::set_permissions(self.at(name), Permissions::from_mode(mode)).expect("a mode");
    }

    /// An empty configuration in that directory.
    fn write(&self, directory: &str, text: &str) -> PathBuf {
        fs::create_dir_all(self.at(directory)).expect("a directory");
        let file = self.at(directory).join(NAME);
        fs::write(&file, text).expect("a file");
        file
    }

    fn with<T>(
        &self,
        variables: &[(&str, &Path)],
        work: impl FnOnce(&SearchEnvironment<'_>) -> T,
    ) -> T {
        let home = self.at("home");
        let variable = |name: &str| {
            let known = variables.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
            known
                .or_else(|| (name == "HOME").then_some(home.as_path()))
                .map(|value| value.as_os_str().to_owned())
        };
        let user = rustix::process::geteuid().as_raw();
        work(&SearchEnvironment {
            variable: &variable,
            here: &self.at("here"),
            etc: &self.at("etc"),
            user,
        })
    }

    fn find(&self, variables: &[(&str, &Path)]) -> ConfigSearch {
        self.with(variables, find).expect("nothing was named")
    }

    fn found(&self, variables: &[(&str, &Path)]) -> Option<PathBuf> {
        self.find(variables).found.map(|found| found.file)
    }

    fn allow(&self, file: &Path) -> Result<PathBuf, UnusableConfig> {
        self.with(&[], |around| {
            let (file, text) = read_in_directory(file, around.user)?;
            let register = Register::of(|name| around.set(name), around.user).expect("a home");
            register
                .allow(&file, &allow::digest(text.as_bytes()))
                .map_err(|error| UnusableConfig::new(&file, error))?;
            Ok(file)
        })
    }
}

#[test]
fn the_first_that_exists() {
    let place = Place::new();
    assert_eq!(place.found(&[]), None);
    let in_etc = place.write("etc/posh", "");
    assert_eq!(place.found(&[]), Some(in_etc));
    let in_home = place.write("home/.config/posh", "");
    assert_eq!(place.found(&[("POSH_CONFIG", Path::new(""))]), Some(in_home.clone()));
    let in_xdg = place.write("xdg/posh", "");
    assert_eq!(place.found(&[("XDG_CONFIG_HOME", &place.at("xdg"))]), Some(in_xdg.clone()));
    assert_eq!(place.found(&[("XDG_CONFIG_HOME", Path::new("relative"))]), Some(in_home));
    assert_eq!(place.found(&[("POSH_CONFIG", &in_xdg)]), Some(in_xdg));
    let missing = place
        .with(&[("POSH_CONFIG", Path::new("/nonexistent/m.toml"))], find)
        .expect_err("no such file");
    assert_eq!(
        (missing.file.as_path(), is_missing(&missing)),
        (Path::new("/nonexistent/m.toml"), true)
    );
    assert_eq!(place.found(&[("POSH_CONFIG", Path::new(EMPTY))]), Some(EMPTY.into()));
}

#[test]
fn a_directory_s_file_counts_only_while_it_is_as_it_was_allowed() {
    let place = Place::new();
    let own = place.write("home/.config/posh", "");
    let file = place.write("here", "# one\n");
    let is_refused = || {
        let search = place.find(&[]);
        let said = matches!(&search.passed_over[..], [PassedOver::NotAllowed(refused)] if *refused == file);
        said && search
            .found
            .is_some_and(|found| found.file == own && found.scope == ConfigScope::Own)
    };
    assert!(is_refused());
    place.allow(&file).expect("it is our own");
    let found = place.find(&[]).found.expect("it is allowed");
    assert_eq!((&found.file, found.scope), (&file, ConfigScope::Directory));
    assert_ne!(
        found.gateway_name(),
        named(&file, place.with(&[], |a| a.user)).expect("ours").gateway_name()
    );
    place.write("here", "# two\n");
    assert!(is_refused());
    // What was found a moment ago is not read as it is now.
    assert!(place.with(&[], |around| read(&found, around.user)).is_err());
    place.write("here", "# one\n");
    assert_eq!(place.found(&[]), Some(file.clone()));
    let denied = place.with(&[], |around| {
        Register::of(|name| around.set(name), around.user).map(|r| r.deny(&file))
    });
    assert!(matches!(denied, Some(Ok(true))) && is_refused());
    // Another file with the same contents is another file.
    place.allow(&place.write("home", "# one\n")).expect("it is our own");
    assert!(is_refused());
}

#[test]
fn a_directory_s_file_that_others_may_have_written_is_not_even_read() {
    let place = Place::new();
    let file = place.write("here", "");
    place.allow(&file).expect("it is our own");
    let is_refused = || {
        let search = place.find(&[]);
        search.found.is_none() && matches!(&search.passed_over[..], [PassedOver::NotOwn(_)])
    };
    for (name, mode) in [
        ("here/mounts.toml", 0o664),
        ("here/mounts.toml", 0o646),
        ("here", 0o775),
        ("here", 0o1777),
    ] {
        place.set_mode(name, mode);
        assert!(is_refused(), "{name} {mode:o}");
        place.set_mode(name, if name == "here" { 0o755 } else { 0o644 });
    }
    assert_eq!(place.found(&[]), Some(file.clone()));
    fs::rename(&file, place.at("here/elsewhere")).expect("renamed");
    symlink("elsewhere", &file).expect("a link");
    assert!(is_refused());
    fs::remove_file(&file).expect("removed");
    fs::rename(place.at("here/elsewhere"), &file).expect("renamed");
    if rustix::process::geteuid().is_root() {
        for name in ["here/mounts.toml", "here"] {
            chown(place.at(name), Some(OTHER), None).expect("another owner");
            assert!(is_refused(), "{name}");
            chown(place.at(name), Some(0), None).expect("another owner");
        }
    }
    assert_eq!(place.found(&[]), Some(file));
}

#[test]
fn one_s_own_configuration_is_ignored_where_others_can_change_it() {
    let place = Place::new();
    let file = place.write("home/.config/posh", "");
    for name in ["home", "home/.config", "home/.config/posh", "home/.config/posh/mounts.toml"] {
        place.set_mode(name, 0o777);
        let search = place.find(&[]);
        assert!(search.found.is_none() && search.passed_over[0].is_fault(), "{name}");
        assert!(
            search.passed_over[0].to_string().contains("chmod go-w"),
            "{}",
            search.passed_over[0]
        );
        // Nor where it is named.
        place.with(&[("POSH_CONFIG", &file)], find).expect_err("others can change it");
        place.set_mode(name, 0o755);
    }
    assert_eq!(place.found(&[]), Some(file));
}

#[test]
fn a_home_that_is_no_absolute_path_is_none() {
    for (home, expect) in
        [("/home/u", Some("/home/u/.config")), (".", None), ("", None), ("home/u", None)]
    {
        let set = |name: &str| (name == "HOME").then(|| OsString::from(home));
        assert_eq!(user_directory(set), expect.map(PathBuf::from), "{home}");
        assert_eq!(Register::of(set, 0).is_some(), expect.is_some(), "{home}");
    }
}
