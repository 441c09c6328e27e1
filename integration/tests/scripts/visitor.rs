//! An ordinary user of a workstation, with an empty home and no rights, who tries
//! programs that could do anything: nothing they do reaches further than the laboratory.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::mount::{MsFlags, mount};
use posh_integration::explain::ExplainReport;
use posh_integration::oracle::{Door, collect};
use posh_integration::{Lab, LabSpec, RunOutcome};

use crate::programs;

/// A user that no machine has.
const USER: u32 = 61_234;
const HOME: &str = "/home/visitor";
const RUNTIME: &str = "/run/visitor";
/// How long anything may take before it counts as hanging in spite of its own limit.
const LIMIT: Duration = Duration::from_secs(300);

/// Under what a script runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Front {
    Stock,
    Posh(Door),
}

impl Front {
    /// What is compared with the stock shell.
    pub const UNDER_TEST: [Front; 2] = [Front::Posh(Door::Hook), Front::Posh(Door::Path)];
}

/// One script with its arguments.
pub struct Run {
    /// For messages.
    pub name: String,
    /// What bash is given.
    pub words: Vec<String>,
    /// Where it runs, of the workstation; the home when empty.
    pub directory: String,
    /// How long it may take, on a busy machine.
    pub limit_s: u32,
    /// Variables besides the usual ones.
    pub variables: Vec<(String, String)>,
}

pub struct Visitor {
    pub lab: Lab,
}

impl Visitor {
    /// A laboratory with one mount, so that posh has something to decide, and proof that it does.
    pub fn arrive() -> Visitor {
        let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
        fs::write(lab.data(1).join("f"), "on the server\n").unwrap();
        let none: Option<&str> = None;
        for public in ["/var/tmp", "/dev/shm"] {
            lab.workstation
                .run(move || mount(Some("tmpfs"), public, Some("tmpfs"), MsFlags::empty(), none))
                .unwrap();
            fs::set_permissions(lab.workstation.path(public), fs::Permissions::from_mode(0o1777))
                .unwrap();
        }
        let visitor = Visitor { lab };
        for own in [HOME, RUNTIME] {
            visitor.make_directory(own);
        }
        visitor.prove_that_posh_decides();
        visitor
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.lab.workstation.path(path)
    }

    /// A directory of the user's own.
    pub fn make_directory(&self, path: &str) {
        let path = self.path(path);
        fs::create_dir_all(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        own(&path);
    }

    /// Gives everything below a path to the user.
    pub fn own_tree(&self, path: &str) {
        let mut queue = vec![self.path(path)];
        while let Some(path) = queue.pop() {
            own(&path);
            if path.is_dir() && !path.is_symlink() {
                queue.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
            }
        }
    }

    pub fn run(&self, run: &Run, front: Front) -> RunOutcome {
        let mut command = self.shell(front, &[], run.limit_s);
        command.args(&run.words).envs(run.variables.iter().map(|(n, v)| (n, v)));
        if !run.directory.is_empty() {
            command.current_dir(&run.directory);
        }
        collect(&self.lab.workstation, command, &run.name, LIMIT).unwrap()
    }

    /// timeout(1) ended it.
    pub fn was_ended(outcome: &RunOutcome) -> bool {
        use std::os::unix::process::ExitStatusExt;
        outcome.status.code() == Some(137) || outcome.status.signal() == Some(9)
    }

    fn shell(&self, front: Front, options: &[&str], limit_s: u32) -> Command {
        let host = &self.lab.workstation;
        let mut command = host.command("timeout");
        command.args([
            "--signal=KILL",
            &limit_s.to_string(),
            "setpriv",
            "--no-new-privs",
            "--clear-groups",
        ]);
        command.args([format!("--reuid={USER}"), format!("--regid={USER}"), "--".into()]);
        match front {
            Front::Stock => command.arg("bash"),
            Front::Posh(door) => command
                .arg(host.programs().join("posh"))
                .args(["--door", door.name()])
                .args(options),
        };
        command
            .env("HOME", HOME)
            .env("XDG_RUNTIME_DIR", RUNTIME)
            .env("USER", "visitor")
            .current_dir(HOME);
        command
    }

    fn prove_that_posh_decides(&self) {
        for front in Front::UNDER_TEST {
            let mut command = self.shell(front, &["--explain=json"], 60);
            command.args(["-c", "cat /mnt/s1/f; ls /"]);
            let outcome = collect(&self.lab.workstation, command, "a first look", LIMIT).unwrap();
            let (_, report) = ExplainReport::take(&outcome.stderr).unwrap();
            // Whether or not this user's command may run there: posh was asked.
            assert!(report.stages("cat").count() == 1, "{front:?}: {report:?}");
        }
    }
}

fn own(path: &Path) {
    if !path.is_symlink() {
        chown(path, Some(USER), Some(USER)).unwrap();
    }
}
