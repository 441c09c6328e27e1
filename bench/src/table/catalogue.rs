//! The workloads as data: scripts, amounts of data, and results. `data` makes the input, `cell`
//! runs them.

use posh_integration::workload::Workload as Application;

use super::data::{self, Making};

/// How much data a run of the bench gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum DataSize {
    /// Under a minute for bash over sshfs on the `wan` link, but where the number of files is
    /// given.
    S,
    /// Some five times as much.
    M,
    /// The paper's. Needs a disk: see --storage.
    L,
}

impl DataSize {
    /// `s`, `m` or `l`.
    pub fn letter(self) -> char {
        match self {
            DataSize::S => 's',
            DataSize::M => 'm',
            DataSize::L => 'l',
        }
    }
}

/// Amount of input data; each workload says what it counts.
#[derive(Debug, Clone, Copy)]
pub struct Amount {
    /// Files (on each server).
    pub files: usize,
    /// Lines of each file, or another measure of its size.
    pub each: usize,
}

/// One workload.
#[derive(Debug)]
pub struct Workload {
    /// Name on the command line, in results and of the scripts.
    pub name: &'static str,
    /// Description.
    pub words: &'static str,
    /// Script for every system.
    pub script: &'static str,
    /// An expert's script with ssh; `None`: impossible by hand.
    pub by_hand: Option<&'static str>,
    /// An expert's script with GNU parallel, where that fits.
    pub parallel: Option<&'static str>,
    /// Number of servers with its data; 0 for local work.
    pub servers: usize,
    /// Results of a run below its directory on the first server.
    pub results: &'static [&'static str],
    /// Copy that is made before each run (copy, original).
    pub copy: Option<(&'static str, &'static str)>,
    /// Amounts for s, m and l.
    pub amounts: [Amount; 3],
    /// Makes the input.
    pub make: Making,
    /// Time limit of a run, seconds; a longer one would show nothing more.
    pub limit_s: u64,
    /// Is also run with an executor on another server than the data's (paper §8.2.1).
    pub elsewhere: bool,
    /// Is also run with other split factors (paper §8.2.2).
    pub splits: bool,
    /// Its programs run on the workstation, to measure the mount itself.
    pub here: bool,
    /// Under posh, too, its results are made by programs of the workstation if everything is
    /// cached.
    pub made_here: bool,
}

impl Workload {
    /// Its amount of data for a size.
    pub fn amount(&self, size: DataSize) -> Amount {
        self.amounts[size as usize]
    }

    /// Looks a workload up by name.
    pub fn named(name: &str) -> Option<&'static Workload> {
        ALL.iter().find(|w| w.name == name)
    }

    /// The script's variables besides its directories.
    pub fn variables(&self, size: DataSize) -> Vec<(String, String)> {
        let application = Application::ALL.into_iter().find(|a| a.name() == self.name);
        let mut variables = application.map(Application::variables).unwrap_or_default();
        if self.name == "find-xargs" {
            // Through sshfs at 20 ms, opening all of 10,000 files takes a quarter of an hour.
            let pattern = if size == DataSize::S { "*00.c" } else { "*.c" };
            variables.push(("PATTERN".into(), pattern.into()));
        }
        variables
    }
}

/// Returns true if the workload of this name touches no mount.
pub fn is_local(name: &str) -> bool {
    Workload::named(name).is_some_and(|workload| workload.servers == 0)
}

/// Usual time limit of a run, seconds.
pub const USUAL_LIMIT_S: u64 = 300;

/// Defaults of most workloads: one server, on which the script is run by hand.
const USUAL: Workload = Workload {
    name: "",
    words: "",
    script: "",
    by_hand: Some(include_str!("../../workloads/on-server.ssh.sh")),
    parallel: None,
    servers: 1,
    results: &[],
    copy: None,
    amounts: [Amount { files: 0, each: 0 }; 3],
    make: data::nothing,
    limit_s: USUAL_LIMIT_S,
    elsewhere: false,
    splits: false,
    here: false,
    made_here: false,
};

const fn amount(files: usize, each: usize) -> Amount {
    Amount { files, each }
}

/// All workloads: first the paper's, then further ones, then those of the mounts themselves.
pub const ALL: [Workload; 19] = [
    Workload {
        name: "raytrace",
        words: "ray-tracing logs are cleaned and joined, one ray is looked for (workers' logs, \
                lines each)",
        script: include_str!("../../../integration/workloads/raytrace.sh"),
        by_hand: Some(include_str!("../../workloads/raytrace.ssh.sh")),
        parallel: Some(include_str!("../../workloads/raytrace.parallel.sh")),
        results: &["rays.csv"],
        amounts: [amount(400, 5_000), amount(800, 20_000), amount(2_500, 110_000)],
        make: data::ray_logs,
        elsewhere: true,
        splits: true,
        ..USUAL
    },
    Workload {
        name: "thumbnails",
        words: "small pictures of large ones, ImageMagick (pictures of 4.2 MB)",
        script: include_str!("../../../integration/workloads/thumbnails.sh"),
        parallel: Some(include_str!("../../workloads/thumbnails.parallel.sh")),
        results: &["thumbnails"],
        amounts: [amount(30, 1400), amount(150, 1400), amount(1090, 1400)],
        make: data::images,
        elsewhere: true,
        splits: true,
        ..USUAL
    },
    Workload {
        name: "port-scan",
        words: "addresses per autonomous system: jq, pr, awk, sort; zannotate is left out (hosts)",
        script: include_str!("../../../integration/workloads/port-scan.sh"),
        results: &["addresses", "asns", "by-asn.csv"],
        amounts: [amount(1, 200_000), amount(1, 1_000_000), amount(1, 200_000_000)],
        make: data::port_scan,
        ..USUAL
    },
    Workload {
        name: "access-logs",
        words: "one visitor in the logs of five servers (logs on each, lines each)",
        script: include_str!("../../../integration/workloads/access-logs.sh"),
        by_hand: Some(include_str!("../../workloads/access-logs.ssh.sh")),
        parallel: Some(include_str!("../../workloads/access-logs.parallel.sh")),
        servers: 5,
        amounts: [amount(10, 40_000), amount(20, 100_000), amount(40, 4_000_000)],
        make: data::access_logs,
        ..USUAL
    },
    Workload {
        name: "git",
        words: "20 patches are applied and committed: apply, status, add, commit each (files)",
        script: include_str!("../../../integration/workloads/git.sh"),
        results: &["repository"],
        copy: Some(("repository", "pristine")),
        amounts: [amount(20_000, 20), amount(20_000, 20), amount(340_000, 20)],
        make: data::repository,
        // bash over sshfs is the reference, and takes more than usual.
        limit_s: 900,
        elsewhere: true,
        ..USUAL
    },
    Workload {
        name: "grep-r",
        words: "grep -r over a source tree (files of 2 kB)",
        script: include_str!("../../workloads/grep-r.sh"),
        amounts: [amount(500, 0), amount(5_000, 0), amount(70_000, 0)],
        make: data::tree,
        ..USUAL
    },
    Workload {
        name: "tar-x",
        words: "an archive is unpacked where it lies (files of 2 kB)",
        script: include_str!("../../workloads/tar-x.sh"),
        results: &["tree"],
        amounts: [amount(5_000, 0), amount(5_000, 0), amount(70_000, 0)],
        make: data::archive,
        // Three hundred times the time of unpacking on the server.
        limit_s: 120,
        ..USUAL
    },
    Workload {
        name: "comm",
        words: "what two lists on two servers have in common (lists, lines each)",
        script: include_str!("../../workloads/comm.sh"),
        by_hand: Some(include_str!("../../workloads/comm.ssh.sh")),
        servers: 2,
        amounts: [amount(1, 1_000_000), amount(1, 5_000_000), amount(1, 50_000_000)],
        make: data::sorted_lists,
        ..USUAL
    },
    Workload {
        name: "find-xargs",
        words: "find | sort | xargs grep in a tree; at size s one file of a hundred is searched \
                (files)",
        script: include_str!("../../workloads/find-xargs.sh"),
        amounts: [amount(10_000, 0), amount(10_000, 0), amount(70_000, 0)],
        make: data::tree,
        ..USUAL
    },
    Workload {
        name: "tar-gzip",
        words: "a remote tree is packed into a local archive (files of 2 kB)",
        script: include_str!("../../workloads/tar-gzip.sh"),
        by_hand: Some(include_str!("../../workloads/tar-gzip.ssh.sh")),
        amounts: [amount(300, 0), amount(3_000, 0), amount(70_000, 0)],
        make: data::tree,
        ..USUAL
    },
    Workload {
        name: "session",
        words: "30 small commands, one after the other",
        script: include_str!("../../workloads/session.sh"),
        by_hand: Some(include_str!("../../workloads/session.ssh.sh")),
        results: &["project/results"],
        made_here: true,
        amounts: [amount(50, 0), amount(50, 0), amount(50, 0)],
        make: data::project,
        ..USUAL
    },
    Workload {
        name: "local-1000",
        words: "1,000 short commands that touch no mount",
        script: include_str!("../../workloads/local-1000.sh"),
        by_hand: None,
        servers: 0,
        ..USUAL
    },
    Workload {
        name: "local-pipes",
        words: "500 short pipelines that touch no mount",
        script: include_str!("../../workloads/local-pipes.sh"),
        by_hand: None,
        servers: 0,
        ..USUAL
    },
    Workload {
        name: "read-small",
        words: "small files are read here, one after the other (files of 2 kB)",
        script: include_str!("../../workloads/read-small.sh"),
        amounts: [amount(1_000, 0), amount(1_000, 0), amount(10_000, 0)],
        make: data::tree,
        ..HERE
    },
    Workload {
        name: "walk",
        words: "every file of a tree is looked at here for the first time (files)",
        script: include_str!("../../workloads/walk.sh"),
        amounts: [amount(20_000, 0), amount(20_000, 0), amount(70_000, 0)],
        make: data::tree,
        ..HERE
    },
    Workload {
        name: "walk-again",
        words: "the same, and four times again (files)",
        script: include_str!("../../workloads/walk-again.sh"),
        amounts: [amount(20_000, 0), amount(20_000, 0), amount(70_000, 0)],
        make: data::tree,
        ..HERE
    },
    Workload {
        name: "read-large",
        words: "a large file is read here (MiB)",
        script: include_str!("../../workloads/read-large.sh"),
        amounts: [amount(1, 1024), amount(1, 1024), amount(1, 10_240)],
        make: data::large,
        ..HERE
    },
    Workload {
        name: "read-large-again",
        words: "the same, and four times again (MiB)",
        script: include_str!("../../workloads/read-large-again.sh"),
        amounts: [amount(1, 1024), amount(1, 1024), amount(1, 10_240)],
        make: data::large,
        ..HERE
    },
    Workload {
        name: "untar-here",
        words: "an archive is unpacked onto the mount by a tar that runs here (files of 2 kB)",
        script: include_str!("../../workloads/untar-here.sh"),
        results: &["tree"],
        amounts: [amount(5_000, 0), amount(5_000, 0), amount(70_000, 0)],
        make: data::archive,
        // Forty times its target.
        limit_s: 120,
        ..HERE
    },
];

/// Defaults of workloads that run on the workstation under every system.
const HERE: Workload = Workload { by_hand: None, here: true, ..USUAL };

/// One small command: its latency is measured for several round trips, and it shows the cost of a
/// first connection.
pub const ONE_COMMAND: Workload = Workload {
    name: "one-command",
    words: "cat of a small file, shell and all",
    script: include_str!("../../workloads/one-command.sh"),
    amounts: [amount(1, 0), amount(1, 0), amount(1, 0)],
    make: data::small,
    ..USUAL
};
