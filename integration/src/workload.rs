//! The paper's five applications (§7.1) as data: a script for bash and posh, and a generator of its
//! input in a given size. The callers time and compare.

use std::io;
use std::path::{Path, PathBuf};

use crate::error::{AttemptExt, Result};
use crate::generate;
use crate::host::Host;
use crate::oracle::Script;

/// One directory of a server, and its mount on the workstation.
#[derive(Debug, Clone)]
pub struct Store<'a> {
    /// Its server.
    pub host: &'a Host,
    /// Its path on the server.
    pub directory: PathBuf,
    /// Its path on the workstation.
    pub mount: PathBuf,
}

impl Store<'_> {
    /// Path by which this process can access it without the mount.
    pub fn data(&self) -> PathBuf {
        self.host.path(&self.directory)
    }
}

/// Size of an application's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkloadSize {
    /// A few megabytes: seconds in a debug build.
    Test,
    /// Some 100 MB: enough for visible differences of time.
    Demo,
}

/// One application.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workload {
    /// One ray's path through the logs of many workers.
    RayTrace,
    /// Thumbnails of large pictures.
    Thumbnails,
    /// Addresses per autonomous system.
    PortScan,
    /// One address in the logs of five servers.
    AccessLogs,
    /// Patches applied and committed.
    Git,
}

impl Workload {
    /// All five, in the paper's order.
    pub const ALL: [Workload; 5] = [
        Workload::RayTrace,
        Workload::Thumbnails,
        Workload::PortScan,
        Workload::AccessLogs,
        Workload::Git,
    ];

    /// Name of the application and of its script.
    pub fn name(self) -> &'static str {
        match self {
            Workload::RayTrace => "raytrace",
            Workload::Thumbnails => "thumbnails",
            Workload::PortScan => "port-scan",
            Workload::AccessLogs => "access-logs",
            Workload::Git => "git",
        }
    }

    /// The script: plain shell with directories in variables S1..., OUT.
    pub fn script(self) -> &'static str {
        match self {
            Workload::RayTrace => include_str!("../workloads/raytrace.sh"),
            Workload::Thumbnails => include_str!("../workloads/thumbnails.sh"),
            Workload::PortScan => include_str!("../workloads/port-scan.sh"),
            Workload::AccessLogs => include_str!("../workloads/access-logs.sh"),
            Workload::Git => include_str!("../workloads/git.sh"),
        }
    }

    /// Number of servers that it needs.
    pub fn stores(self) -> usize {
        if self == Workload::AccessLogs { 5 } else { 1 }
    }

    /// The script with its directories: `stores` as S1..., `out` (on the workstation) as OUT.
    pub fn script_for(self, stores: &[Store<'_>], out: &str) -> Script {
        let mut script = Script::new(self.script()).variable("OUT", out);
        for (number, store) in (1..).zip(stores) {
            script = script.variable(&format!("S{number}"), store.mount.to_string_lossy());
        }
        self.variables().into_iter().fold(script, |s, (name, value)| s.variable(&name, value))
    }

    /// Variables of the script besides the directories.
    pub fn variables(self) -> Vec<(String, String)> {
        let pairs: &[(&str, String)] = match self {
            Workload::RayTrace => &[("RAY", generate::RAY.to_string())],
            Workload::AccessLogs => &[("VISITOR", generate::VISITOR.replace('.', "\\."))],
            // Equal commits need equal dates.
            Workload::Git => &[
                ("GIT_AUTHOR_DATE", "2020-07-15T12:00:00+0000".into()),
                ("GIT_COMMITTER_DATE", "2020-07-15T12:00:00+0000".into()),
            ],
            Workload::Thumbnails | Workload::PortScan => &[],
        };
        pairs.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
    }

    /// Files that may differ after two correct runs: git's index has inode numbers and times.
    pub fn volatile(self) -> &'static [&'static str] {
        if self == Workload::Git { &["repository/.git/index"] } else { &[] }
    }

    /// Generates the input in `stores`, on the servers themselves and not through the mounts.
    pub fn generate(self, stores: &[Store<'_>], size: WorkloadSize) -> Result<()> {
        let first = stores[0].data();
        let made = match self {
            Workload::RayTrace => {
                let (workers, lines) = size.pick((40, 8_000), (100, 60_000));
                generate::ray_logs(&first.join("logs"), workers, lines)
            }
            Workload::Thumbnails => {
                let (count, width, height) = size.pick((6, 400, 300), (40, 1400, 1000));
                generate::images(&first.join("images"), count, width, height)
            }
            Workload::PortScan => std::fs::create_dir_all(&first).and_then(|()| {
                generate::port_scan(&first.join("scan.json"), size.pick(25_000, 250_000))
            }),
            Workload::AccessLogs => {
                let (files, lines) = size.pick((4, 15_000), (10, 70_000));
                (1..).zip(stores).try_for_each(|(i, s)| {
                    generate::access_logs(&s.data().join("logs"), i, files, lines)
                })
            }
            Workload::Git => return repository(&stores[0], size),
        };
        made.attempt(|| format!("make the data of {}", self.name()))
    }
}

impl WorkloadSize {
    fn pick<T>(self, test: T, demo: T) -> T {
        match self {
            WorkloadSize::Test => test,
            WorkloadSize::Demo => demo,
        }
    }
}

fn repository(store: &Store<'_>, size: WorkloadSize) -> Result<()> {
    let (files, patches) = size.pick((60, 4), (2_000, 10));
    let data = store.data();
    sources(&data, files, patches).attempt(|| "make the sources of the repository".into())?;
    let git = |arguments: &[&str]| {
        let mut command = store.host.command("git");
        command
            .current_dir(store.directory.join("repository"))
            .args(arguments)
            .envs(Workload::Git.variables());
        store.host.must(command).map(drop)
    };
    git(&["init", "-q", "-b", "main"])?;
    git(&["config", "user.name", "A. Developer"])?;
    git(&["config", "user.email", "developer@example.org"])?;
    // Background maintenance would race with the comparison of the results.
    git(&["config", "gc.auto", "0"])?;
    // Makes git's index valid both locally and through sshfs.
    git(&["config", "core.checkStat", "minimal"])?;
    git(&["config", "core.trustctime", "false"])?;
    git(&["config", "maintenance.auto", "false"])?;
    git(&["add", "."])?;
    git(&["commit", "-q", "-m", "the sources"])
}

fn sources(data: &Path, files: usize, patches: usize) -> io::Result<()> {
    generate::source_tree(&data.join("repository"), files)?;
    generate::patches(&data.join("patches"), patches, files)
}
