//! Lists the processes of a host, read from /proc.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;

use crate::error::{AttemptExt, Result};

/// A process seen on a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Running {
    /// Its id in this process's namespace (not the host's).
    pub pid: u32,
    /// The file name of the program that it executes, which need not be its `argv[0]`.
    pub program: String,
    /// Its argument list, joined by spaces.
    pub command_line: String,
}

/// Every process on the host whose process 1 is `init`, except that one and zombies.
pub fn on_host(init: u32) -> Result<Vec<Running>> {
    let mut parents = HashMap::new();
    for entry in fs::read_dir("/proc").attempt(|| "list /proc".into())? {
        let name = entry.attempt(|| "list /proc".into())?.file_name();
        let Some(pid) = name.to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        parents.extend(parent(pid).map(|parent| (pid, parent)));
    }
    let home = process_namespace(init);
    // A process in a namespace below the host's has an ancestor in the host's own.
    let belongs = |pid: u32| {
        let mut line = std::iter::successors(Some(pid), |p| parents.get(p).copied());
        home.is_some() && line.any(|p| process_namespace(p) == home)
    };
    Ok(parents.keys().filter(|p| **p != init && belongs(**p)).filter_map(|p| read(*p)).collect())
}

fn process_namespace(pid: u32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/pid")).ok()
}

fn parent(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|l| l.strip_prefix("PPid:"))?.trim().parse().ok()
}

fn read(pid: u32) -> Option<Running> {
    let program = fs::read_link(format!("/proc/{pid}/exe")).ok()?;
    let program = program.file_name()?.to_string_lossy().into_owned();
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words: Vec<_> = line.split(|&b| b == 0).map(String::from_utf8_lossy).collect();
    Some(Running { pid, program, command_line: words.join(" ").trim_end().to_owned() })
}
