//! The machines on which cases run, one set for each worker: a laboratory whose first server has a
//! directory for each run, and a mount namespace on the workstation in which the same paths hold a
//! local copy instead of the mount. Nothing is restarted between cases.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use posh_proto::rule;

use super::fixture::Fixture;
use super::{Case, StartDirectory};
use crate::error::{AttemptExt, Result};
use crate::host::{HOME, Host};
use crate::lab::{Lab, LabSpec};
use crate::oracle::Door;
use crate::oracle::{RunOutcome, Script, Under};
use crate::people::{self, Person};
use crate::programs::Programs;
use crate::services;
use crate::tree::{self, Tree};
use crate::volumes::{self, Mounts};

/// Time limit of a script on a busy machine. A hanging one costs a laboratory too.
const CASE_LIMIT: Duration = Duration::from_secs(120);
/// Like [`CASE_LIMIT`], with a rule left out: hanging is then one way to fail.
const CASE_LIMIT_WITHOUT: Duration = Duration::from_secs(15);
/// The user's settings that allow git to run on either machine.
const GIT_SETTINGS: &str = "[core]\n\tcheckStat = minimal\n\ttrustctime = false\n";
/// File in the home for the statuses of a script's last pipeline.
const STATUSES: &str = ".statuses";
/// Directory on the first mount in which the workstation mounts another file system.
const NESTED: &str = "nested";
/// Files of the second server, which no case changes.
const OTHER: &str = "/mnt/s2/other";

/// Settings common to all workers.
#[derive(Debug, Clone)]
pub struct CaseSettings {
    /// The programs under test.
    pub programs: Programs,
    /// The files of a case.
    pub fixture: Arc<Fixture>,
    /// Rules that the programs leave out.
    pub without: Vec<rule::Rule>,
    /// Interception of commands, if not posh's default.
    pub door: Option<Door>,
    /// Kind of the mounts of the servers' directories.
    pub mounts: Mounts,
}

/// A worker's machines.
#[derive(Debug)]
pub struct CaseSite {
    // Dropped before the laboratory whose namespaces it shares.
    local: Host,
    lab: Lab,
    setting: CaseSettings,
    serial: u32,
}

/// Ways in which a script runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunMode {
    /// The shell alone, on a local copy at the same path.
    Copy,
    /// The shell alone, on the mount: the reference for posh.
    Mount,
    /// posh on the mount, with a report of placements.
    Posh,
    /// posh on the mount without a report: local stages need not enlist then.
    PoshUntold,
}

/// Result of one run, which still contains the name of its directory.
#[derive(Debug)]
pub struct ScriptRun {
    /// Outputs and status, and posh's report.
    pub outcome: RunOutcome,
    /// `$?` and the statuses of the last pipeline, as the script's end saw them.
    pub statuses: String,
    /// The directory afterwards, on its server.
    pub left: Tree,
    /// The home afterwards.
    pub home: Tree,
    /// Name of the run's directory, which is unique.
    pub name: String,
}

impl CaseSite {
    /// Starts the laboratory.
    pub fn start(setting: &CaseSettings) -> Result<CaseSite> {
        let names: Vec<_> = setting.without.iter().map(|rule| rule.name()).collect();
        let mut spec = LabSpec::servers(2).different().mounts(setting.mounts);
        if !names.is_empty() {
            spec = spec.with_variable(rule::VARIABLE, &names.join(","));
        }
        let lab = Lab::start(&spec, &setting.programs)?;
        let local = lab.workstation.room()?;
        fill_room(&local)?;
        let site = CaseSite { local, lab, setting: setting.clone(), serial: 0 };
        site.fill_constant()?;
        Ok(site)
    }

    /// Fills directories beside the cases': a nested mount, and another server's files.
    fn fill_constant(&self) -> Result<()> {
        let here = |host: &Host, path: &str| -> Result<()> {
            let path = host.path(path);
            fs::create_dir_all(&path).attempt(|| format!("make {}", path.display()))?;
            self.setting.fixture.put(&path, 0)
        };
        here(&self.lab.servers[1].host, "/srv/s2/other")?;
        here(&self.local, OTHER)?;
        for (host, root) in [(&self.lab.servers[0].host, "/srv/s1"), (&self.local, "/mnt/s1")] {
            let outer = host.path(root).join(NESTED);
            let made = fs::create_dir_all(outer.join("inner"))
                .and_then(|()| fs::write(outer.join("beside"), "needle beside\n"));
            made.and_then(|()| fs::write(outer.join("inner/hidden"), "needle below\n"))
                .attempt(|| format!("fill {}", outer.display()))?;
        }
        for host in [&self.lab.workstation, &self.local] {
            let inner = format!("/mnt/s1/{NESTED}/inner");
            mount_tmpfs(host, &inner)?;
            services::write_file(host, format!("{inner}/mine"), b"needle of the workstation\n")?;
        }
        Ok(())
    }

    /// Kind of the mounts of the servers' directories.
    pub fn mounts(&self) -> Mounts {
        self.setting.mounts
    }

    /// Runs a case one way, in a fresh directory that is removed afterwards.
    pub fn run(&mut self, case: &Case, way: RunMode) -> Result<ScriptRun> {
        self.serial += 1;
        let name = format!("run-{:06}", self.serial);
        let who = if case.user { &USER } else { &ROOT };
        let (owner, root, number) = match way {
            RunMode::Copy => (&self.local, who.mount, who.here),
            RunMode::Mount | RunMode::Posh | RunMode::PoshUntold => {
                (&self.lab.servers[0].host, who.directory, who.there)
            }
        };
        let directory = Path::new(root).join(&name);
        let data = owner.path(&directory);
        fs::create_dir(&data)
            .and_then(|()| chown(&data, Some(number), Some(number)))
            .attempt(|| format!("make {}", data.display()))?;
        self.setting.fixture.put(&data, number)?;
        prepare(owner, &directory, number, &case.prepare)?;
        if self.setting.mounts.are_volumes() && way != RunMode::Copy {
            self.wait_seen(&name, who)?;
        }
        let host = if way == RunMode::Copy { &self.local } else { &self.lab.workstation };
        empty(&host.path(who.home))?;
        let settings = host.path(who.home).join(".gitconfig");
        fs::write(&settings, GIT_SETTINGS)
            .and_then(|()| chown(&settings, Some(who.here), Some(who.here)))
            .attempt(|| format!("write {}", settings.display()))?;
        let under = match way {
            RunMode::Copy | RunMode::Mount => Under::Shell,
            RunMode::Posh => Under::PoshExplained,
            RunMode::PoshUntold => Under::Posh,
        };
        let outcome = self.script(case, &name, who).run(host, under)?;
        if self.setting.mounts.are_volumes() && way != RunMode::Copy {
            self.settle(&name, who)?;
        }
        let mut left = tree::snapshot(&data, &[])?;
        // Her uids on the workstation and on the server are the same person.
        let hers = left
            .values_mut()
            .filter(|e| way == RunMode::Copy && case.user && e.owner == (who.here, who.here));
        hers.for_each(|entry| entry.owner = (who.there, who.there));
        let statuses =
            services::read_file(host, Path::new(who.home).join(STATUSES)).unwrap_or_default();
        let statuses = String::from_utf8_lossy(&statuses).trim().to_owned();
        let home = tree::snapshot(&host.path(who.home), &[STATUSES])?;
        fs::remove_dir_all(&data).attempt(|| format!("remove {}", data.display()))?;
        Ok(ScriptRun { outcome, statuses, left, home, name })
    }

    /// Waits until the workstation sees the directory: a volume may cache that it does not exist,
    /// and notices a change on the server soon, not at once.
    fn wait_seen(&self, name: &str, who: &Who) -> Result<()> {
        let mut wait = self.lab.workstation.command("sh");
        wait.args(["-c", "until [ -d \"$1\" ]; do :; done", "sh"])
            .arg(Path::new(who.mount).join(name));
        self.lab.workstation.must(people::as_number(wait, who.here)).map(drop)
    }

    /// Flushes the run's directory to the server, which this process reads next; the last changes
    /// may still be queued.
    fn settle(&self, name: &str, who: &Who) -> Result<()> {
        let text = format!("sync {}", Path::new(who.mount).join(name).display());
        let user = if who.here == 0 { volumes::User::Root } else { volumes::User::Ordinary };
        volumes::output(&self.lab.workstation, user, &["-c", &text]).map(drop)
    }

    fn script(&self, case: &Case, name: &str, who: &Who) -> Script {
        let directory = Path::new(who.mount).join(name);
        let shell = case.shell.into();
        let text = format!("{}\n{}", case.script.trim_end(), trailer(shell, who.home));
        let limit = if self.setting.without.is_empty() { CASE_LIMIT } else { CASE_LIMIT_WITHOUT };
        let mut script = Script { limit, ..Script::new(text).shell(shell) }.variable("E", OTHER);
        script.options.extend(self.setting.door.map(|door| format!("--door={}", door.name())));
        if case.user {
            script.account = Some(who.here);
            script = script.directory(who.home);
            script
                .variables
                .extend(Person::variables().map(|(name, value)| (name.to_owned(), value)));
        }
        match case.start {
            StartDirectory::Home => script.variable("D", directory.to_string_lossy()),
            StartDirectory::Inside => script.variable("D", ".").directory(directory),
        }
    }
}

/// Paths and uids for the user of a case.
struct Who {
    home: &'static str,
    mount: &'static str,
    directory: &'static str,
    here: u32,
    there: u32,
}

const ROOT: Who = Who { home: HOME, mount: "/mnt/s1", directory: "/srv/s1", here: 0, there: 0 };
const USER: Who = Who {
    home: people::HOME,
    mount: people::MOUNT,
    directory: people::DIRECTORY,
    here: people::HERE,
    there: people::THERE,
};

fn empty(home: &Path) -> Result<()> {
    let entries = fs::read_dir(home).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    for entry in entries.attempt(|| format!("list {}", home.display()))? {
        let path: PathBuf = entry.path();
        let is_directory = entry.file_type().is_ok_and(|t| t.is_dir());
        let removed = if is_directory { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.attempt(|| format!("remove {}", path.display()))?;
    }
    Ok(())
}

/// Lines after the script that record `$?` and the statuses of its last pipeline, and end as the
/// script would have ended. They print nothing: both outputs are closed for them, also for a trace.
/// A script that ends by itself records nothing.
fn trailer(shell: crate::Shell, home: &str) -> String {
    use crate::Shell;
    let file = format!("{home}/{STATUSES}");
    match shell {
        Shell::Bash => format!(
            "{{ lab_statuses=(\"$?\" \"${{PIPESTATUS[@]}}\"); \
             builtin printf '%s ' \"${{lab_statuses[@]}}\" >| {file}; }} \
             >/dev/null 2>&1\nexit \"${{lab_statuses[0]}}\""
        ),
        Shell::Dash => format!(
            "{{ lab_status=$?; echo $lab_status >| {file}; }} >/dev/null 2>&1\nexit $lab_status"
        ),
        Shell::Zsh => format!(
            "{{ lab_statuses=($? $pipestatus); print -r -- $lab_statuses >| {file} }} \
             >/dev/null 2>&1\nexit $lab_statuses[1]"
        ),
        Shell::Fish => {
            format!(
                "set -l lab_statuses $status $pipestatus\necho $lab_statuses > {file}\n\
                 exit $lab_statuses[1]"
            )
        }
    }
}

/// Runs the case's own preparation on the server, with fixed names and times for git.
fn prepare(host: &Host, directory: &Path, number: u32, text: &str) -> Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    let mut command = host.command("sh");
    command
        .args(["-euc", text])
        .current_dir(directory)
        .stdin(Stdio::null())
        .env("HOME", "/nowhere");
    for role in ["AUTHOR", "COMMITTER"] {
        command
            .env(format!("GIT_{role}_NAME"), "Ada")
            .env(format!("GIT_{role}_EMAIL"), "ada@example.org");
        command.env(format!("GIT_{role}_DATE"), "1000000000 +0000");
    }
    host.must(people::as_number(command, number)).map(drop)
}

/// Replaces the mounts by the mount namespace's own file systems.
fn fill_room(room: &Host) -> Result<()> {
    for path in ["/mnt/s1", "/mnt/s2", people::MOUNT] {
        room.run(move || umount2(path, MntFlags::MNT_DETACH))
            .attempt(|| format!("unmount {path} in a room"))?;
        mount_tmpfs(room, path)?;
    }
    Ok(())
}

fn mount_tmpfs(host: &Host, path: &str) -> Result<()> {
    let point = path.to_owned();
    host.run(move || {
        mount(Some("tmpfs"), point.as_str(), Some("tmpfs"), MsFlags::empty(), Some("mode=0755"))
    })
    .attempt(|| format!("mount a tmpfs on {path}"))
}
