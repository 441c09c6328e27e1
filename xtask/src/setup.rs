//! The system packages: the programs that tests and demonstration call, their Debian packages, and
//! the installation of missing ones. Existing programs are not installed again, and packages are
//! named before they are installed.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::cargo;

/// Extent of the packages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackageSet {
    /// Also for laboratories (mounts, namespaces).
    Everything,
    /// Only the programs of the paper's pipelines.
    Commands,
}

/// Program, Debian package, and true if the pipelines call it (not only laboratories).
const PROGRAMS: &[(&str, &str, bool)] = &[
    ("bash", "bash", true),
    ("jq", "jq", true),
    ("mogrify", "imagemagick", true),
    ("git", "git", true),
    ("awk", "mawk", true),
    ("dash", "dash", false),
    ("zsh", "zsh", false),
    ("fish", "fish", false),
    ("sshfs", "sshfs", false),
    ("fusermount3", "fuse3", false),
    ("sshd", SSHD, false),
    ("ssh", "openssh-client", false),
    ("ssh-keygen", "openssh-client", false),
    ("ip", "iproute2", false),
    ("tc", "iproute2", false),
    ("zstd", "zstd", false),
    ("bzip2", "bzip2", false),
    ("xz", "xz-utils", false),
    ("gzip", "gzip", false),
    ("find", "findutils", false),
    ("file", "file", false),
    ("column", "bsdextrautils", false),
    ("strings", "binutils", false),
    ("setfattr", "attr", false),
    ("setfacl", "acl", false),
    ("diff", "diffutils", false),
    ("tmux", "tmux", false),
    ("strace", "strace", false),
    ("ps", "procps", false),
    ("setpriv", "util-linux", false),
    ("mount", "mount", false),
    ("rclone", "rclone", false),
    ("bindfs", "bindfs", false),
    ("less", "less", false),
    // Loaded by users' bashrc; this is its only program.
    ("dh_bash-completion", "bash-completion", false),
    ("fakeroot", "fakeroot", false),
    ("make", "make", false),
    ("perl", "perl-base", false),
    ("python3", "python3", false),
    ("su", "util-linux", false),
    // Applications that test volumes.
    ("sqlite3", "sqlite3", false),
    ("vim.tiny", "vim-tiny", false),
    ("rsync", "rsync", false),
    // GNU parallel, for comparison in the bench.
    ("parallel", "parallel", false),
];

const SSHD: &str = "openssh-server";
/// invoke-rc.d(8): status 101 forbids starting a service.
const POLICY: &str = "/usr/sbin/policy-rc.d";
const POLICY_TEXT: &str = "#!/bin/sh\nexit 101\n";

/// Returns true if this user may install packages and make namespaces.
pub fn is_root() -> bool {
    // The owner of a process's own directory is its effective user (proc(5)).
    fs::metadata("/proc/self").is_ok_and(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0)
}

/// Installs rustfmt and clippy, which a minimal toolchain lacks.
pub fn toolchain() -> Result<()> {
    for (tool, component) in [("fmt", "rustfmt"), ("clippy", "clippy")] {
        let there = cargo::command(&[tool, "--version"]).output().is_ok_and(|o| o.status.success());
        if !there {
            println!("installing the Rust component {component}");
            let mut add = Command::new("rustup");
            add.args(["component", "add", component]);
            cargo::must(add)
                .with_context(|| format!("install {component} for your Rust toolchain by hand"))?;
        }
    }
    Ok(())
}

/// Installs missing packages, after naming them.
pub fn packages(need: PackageSet) -> Result<()> {
    let missing = missing(need);
    if missing.is_empty() {
        println!("set-up: every system package is there");
        return Ok(());
    }
    let list = missing.join(" ");
    let line = format!("apt-get update && apt-get install -y --no-install-recommends {list}");
    ensure!(is_root(), "these system packages are missing: {list}; as root: {line}");
    ensure!(
        find("apt-get").is_some(),
        "this is not a Debian machine; install what has these packages' programs: {list}"
    );
    println!("set-up: installing the system packages {list}");
    install(&missing)
}

fn install(packages: &[&str]) -> Result<()> {
    let sshd = packages.contains(&SSHD);
    if sshd {
        println!(
            "set-up: only the program of {SSHD} is wanted; its service is neither started nor \
             enabled"
        );
    }
    let _policy = if sshd { NoServices::forbid()? } else { None };
    let apt = |arguments: &[&str]| {
        let mut apt = Command::new("apt-get");
        apt.args(arguments)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdin(std::process::Stdio::null());
        cargo::must(apt)
    };
    apt(&["update", "-q"])?;
    apt(&[&["install", "-y", "-q", "--no-install-recommends"], packages].concat())?;
    if sshd && find("systemctl").is_some() {
        let mut disable = Command::new("systemctl");
        disable.args(["disable", "-q", "ssh.service"]);
        cargo::must(disable)?;
    }
    match missing(PackageSet::Everything).iter().find(|p| packages.contains(p)) {
        Some(package) => {
            bail!("{package} is installed, but its program is not on PATH or in /usr/sbin")
        }
        None => Ok(()),
    }
}

/// Forbids package installations to start services, until it is dropped.
struct NoServices;

impl NoServices {
    /// `None` when the machine has a policy of its own, which is left alone.
    fn forbid() -> Result<Option<NoServices>> {
        if Path::new(POLICY).exists() {
            return Ok(None);
        }
        fs::write(POLICY, POLICY_TEXT).with_context(|| format!("cannot write {POLICY}"))?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(POLICY, mode)
            .with_context(|| format!("cannot make {POLICY} executable"))?;
        Ok(Some(NoServices))
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(POLICY) {
            eprintln!("xtask: cannot remove {POLICY}, which forbids services to start: {error}");
        }
    }
}

fn missing(need: PackageSet) -> Vec<&'static str> {
    let wanted =
        PROGRAMS.iter().filter(|(_, _, command)| *command || need == PackageSet::Everything);
    let mut packages: Vec<_> =
        wanted.filter(|(program, ..)| find(program).is_none()).map(|(_, p, _)| *p).collect();
    packages.dedup();
    packages
}

/// Searches PATH and the directories of administrators' programs.
fn find(program: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    directories.map(|d| d.join(program)).find(|p| p.is_file())
}
