//! Describes the machine and time of a benchmark, for comparison with other figures. Reads /proc,
//! and runs git and date; changes nothing.

use std::fs;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// One machine at one time.
#[derive(Debug, Serialize, Deserialize)]
pub struct Machine {
    /// Processor model, as the kernel reports it.
    pub processor: String,
    /// Usable cores.
    pub cores: usize,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// The kernel's release.
    pub kernel: String,
    /// The load average of the last minute before the benchmark.
    pub load_before: f64,
    /// The niceness at which everything ran.
    pub nice: i32,
    /// Start of the benchmark, UTC.
    pub date: String,
    /// The commit that was built.
    pub commit: String,
    /// The working tree differed from that commit.
    pub modified: bool,
}

impl Machine {
    /// This machine, now. Unknown values are reported as such.
    pub fn describe() -> Machine {
        let unknown = || "unknown".to_owned();
        let status = git(&["status", "--porcelain"]);
        Machine {
            processor: field("/proc/cpuinfo", "model name").unwrap_or_else(unknown),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: field("/proc/meminfo", "MemTotal").and_then(|f| kib(&f)).unwrap_or(0)
                / 1024,
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
                .map_or_else(|_| unknown(), |t| t.trim().to_owned()),
            load_before: load(),
            nice: nice(),
            date: output("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"]).unwrap_or_else(unknown),
            commit: git(&["rev-parse", "HEAD"]).unwrap_or_else(unknown),
            modified: status.is_none_or(|s| !s.is_empty()),
        }
    }
}

/// The load average of the last minute (proc_loadavg(5)).
pub fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(f64::NAN)
}

/// `key: value` in a file of /proc.
pub fn field(file: &str, key: &str) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim().to_owned())
}

/// The number in `1234 kB`.
pub fn kib(value: &str) -> Option<u64> {
    value.strip_suffix("kB")?.trim().parse().ok()
}

/// Field 19 of proc_pid_stat(5).
fn nice() -> i32 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    after_name.split_whitespace().nth(16).and_then(|word| word.parse().ok()).unwrap_or(0)
}

fn git(arguments: &[&str]) -> Option<String> {
    output("git", &[&["-C", env!("CARGO_MANIFEST_DIR")], arguments].concat())
}

fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output =
        Command::new(program).args(arguments).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
