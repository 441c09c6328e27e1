//! Configurations that lie about: in the directory that a shell starts in, and where other users
//! could have put them.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt as _, chown},
    path::PathBuf,
    process::Output,
};

use crate::{
    fake::{Fake, Installed},
    stderr, stdout,
};

/// A configuration that would start a program as soon as it is read, if it counted.
const HOSTILE: &str = "[gateway]\nssh_command = \"/bin/sh -c 'touch /tmp/never'\"\n";

/// Somebody who is neither root nor the user of these tests.
const OTHER: u32 = 54_321;

/// A directory `here` with that configuration, beside a gateway program that refuses to start.
struct Directory {
    installed: Installed,
}

impl Directory {
    fn with(text: &str) -> Self {
        let installed = Installed::new();
        installed.gateway_program("eval \"echo refused >&$ready\"");
        fs::create_dir(installed.at("here")).expect("a directory");
        let directory = Self { installed };
        directory.write(text);
        directory
    }

    fn file(&self) -> PathBuf {
        self.installed.at("here/mounts.toml")
    }

    fn write(&self, text: &str) {
        fs::write(self.file(), text).expect("a file");
    }

    fn set_mode(&self, name: &str, mode: u32) {
        fs::set_permissions(self.installed.at(name), Permissions::from_mode(mode)).expect("a mode");
    }

    fn posh(&self, arguments: &[&str]) -> Output {
        let mut command = self.installed.command(self.installed.at("bin/posh"), arguments);
        command.current_dir(self.installed.at("here")).output().expect("posh runs")
    }

    /// What its shell says where people are told of it, having checked that it runs and prints what
    /// it should.
    fn said(&self) -> String {
        let output = self.posh(&["--explain", "-c", "echo shell"]);
        assert_eq!(stdout(&output), "shell\n", "{}", stderr(&output));
        stderr(&output)
    }

    /// How a gateway was started, if one was.
    fn starts(&self) -> String {
        fs::read_to_string(self.installed.at("starts")).unwrap_or_default()
    }
}

#[test]
fn a_directory_s_configuration_is_nothing_until_it_is_allowed() {
    let directory = Directory::with("");
    let refusal =
        format!("posh: {} is not allowed; `posh allow` to use it", directory.file().display());
    assert!(directory.said().starts_with(&refusal), "{}", directory.said());
    // A script says what it says anywhere.
    let script = directory.posh(&["-c", "echo shell"]);
    assert_eq!((stdout(&script).as_str(), stderr(&script).as_str()), ("shell\n", ""));
    assert_eq!(directory.starts(), "");

    assert!(directory.posh(&["allow"]).status.success());
    assert!(!directory.said().contains("not allowed"), "{}", directory.said());
    // The gateway is told how far to trust it.
    let started = format!("--from-directory {} ", directory.file().display());
    assert!(directory.starts().starts_with(&started), "{}", directory.starts());

    directory.write("# changed\n");
    assert!(directory.said().starts_with(&refusal), "{}", directory.said());
    assert!(directory.posh(&["allow", "mounts.toml"]).status.success());
    assert!(directory.posh(&["deny"]).status.success());
    assert!(directory.said().starts_with(&refusal), "{}", directory.said());
}

#[test]
fn the_user_s_own_configuration_counts_beside_one_that_is_not_allowed() {
    let directory = Directory::with(HOSTILE);
    fs::create_dir_all(directory.installed.at("home/.config/posh")).expect("a directory");
    fs::write(directory.installed.config(), "").expect("a file");
    let fake = Fake::listen(&directory.installed.socket(), &directory.installed.at("shims"));
    let said = directory.said();
    assert!(said.contains("mounts.toml is not allowed"), "{said}");
    assert_eq!(fake.asked.lock().expect("not poisoned").sessions.len(), 1);
}

#[test]
fn what_starts_programs_or_mounts_is_never_allowed() {
    let directory = Directory::with(
        "[[executor]]\nname = \"s\"\naddress = \"ssh://host\"\n\
         [[volume]]\npath = \"/mnt/v\"\nexecutor = \"s\"\nexport = \"/x\"\n\
         [gateway]\nssh_command = \"/bin/sh -c id\"\nannotations = [\"here\"]\n",
    );
    let refused = directory.posh(&["allow"]);
    assert!(!refused.status.success());
    for place in ["3:11", "4:3", "9:1", "10:1"] {
        let line =
            format!("{}:{place}: error: a directory's file can't", directory.file().display());
        assert!(stderr(&refused).contains(&line), "{line}: {}", stderr(&refused));
    }
    assert!(directory.said().contains("is not allowed"));
    assert_eq!(directory.starts(), "");
}

#[test]
fn a_directory_s_configuration_that_others_could_have_written_is_never_allowed() {
    let directory = Directory::with("");
    assert!(directory.posh(&["allow"]).status.success());
    for (name, mode, usual) in [
        ("here/mounts.toml", 0o666, 0o644),
        ("here", 0o777, 0o755),
        ("here", 0o1777, 0o755),
        ("here", 0o775, 0o755),
    ] {
        directory.set_mode(name, mode);
        assert!(
            directory.said().contains("mounts.toml is not used"),
            "{name} {mode:o}: {}",
            directory.said()
        );
        assert!(!directory.posh(&["allow"]).status.success(), "{name} {mode:o}");
        directory.set_mode(name, usual);
    }
    if nix::unistd::geteuid().is_root() {
        for name in ["here/mounts.toml", "here"] {
            chown(directory.installed.at(name), Some(OTHER), None).expect("another owner");
            assert!(
                directory.said().contains("mounts.toml is not used"),
                "{name}: {}",
                directory.said()
            );
            assert!(!directory.posh(&["allow"]).status.success(), "{name}");
            chown(directory.installed.at(name), Some(0), None).expect("another owner");
        }
    }
    assert_eq!(directory.starts(), "");
}

#[test]
fn the_name_of_a_directory_says_nothing_to_the_terminal() {
    let directory = Directory::with("");
    let odd = directory.installed.at("a\u{1b}]0;T\u{7}\nFORGED");
    fs::rename(directory.installed.at("here"), &odd).expect("renamed");
    let mut command = directory
        .installed
        .command(directory.installed.at("bin/posh"), &["--explain", "-c", "true"]);
    let said = stderr(&command.current_dir(&odd).output().expect("posh runs"));
    assert!(said.contains("a\\u{1b}]0;T\\u{7}\\nFORGED/mounts.toml is not allowed"), "{said}");
    assert!(!said.contains('\u{1b}') && !said.contains("\nFORGED"), "{said}");
}

#[test]
fn a_configuration_or_a_runtime_directory_that_others_can_change_is_not_used() {
    let directory = Directory::with("");
    let installed = &directory.installed;
    fs::remove_file(directory.file()).expect("removed");
    fs::create_dir_all(installed.at("home/.config/posh")).expect("a directory");
    fs::write(installed.config(), "").expect("a file");
    directory.set_mode("home/.config", 0o777);
    let config = installed.config().display().to_string();
    let said = stderr(&directory.posh(&["-c", "true"]));
    assert!(
        said.contains(&format!("posh: {config} is not used: ")) && said.contains("chmod go-w"),
        "{said}"
    );
    let named = directory.posh(&["--config", &config, "--explain", "-c", "echo shell"]);
    assert_eq!(stdout(&named), "shell\n");
    assert!(
        stderr(&named).contains("every command runs here: can't read the configuration"),
        "{}",
        stderr(&named)
    );
    directory.set_mode("home/.config", 0o755);

    // As with `sudo -E`: the directory in it is ours, but its owner could rename it.
    fs::remove_dir_all(installed.at("run/posh")).expect("it was made while it could be");
    directory.set_mode("run", 0o777);
    let said = stderr(&directory.posh(&["-c", "true"]));
    assert!(
        said.contains("every command runs here: ") && said.contains("set XDG_RUNTIME_DIR"),
        "{said}"
    );
    directory.set_mode("run", 0o700);
    if nix::unistd::geteuid().is_root() {
        chown(installed.at("run"), Some(OTHER), None).expect("another owner");
        let said = stderr(&directory.posh(&["-c", "true"]));
        assert!(
            said.contains("belongs to user 54321") && said.contains("set XDG_RUNTIME_DIR"),
            "{said}"
        );
    }
    assert!(!installed.at("run/posh").exists());
    assert_eq!(directory.starts(), "");
}
