//! The programs for installing, testing and measuring: in one directory, `target/programs/PROFILE`,
//! as hard links to cargo's output.
//!
//! Two of them, `posh` and `posh-stage`, start with every shell and with every command that is
//! offloaded, and do little. They are built for musl: glibc queries the processor's caches before
//! `main`, by more than forty CPUID instructions, each of which a virtual machine's host answers in
//! microseconds (measured: 3.8 µs; 0.36 ms for a static program of glibc that only executes another
//! one, 0.13 ms for one of musl). Programs that move data or allocate much are built for glibc.
//! Without Rust's musl target, all are.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cargo;

/// Programs that must start fast.
const SMALL: [&str; 2] = ["posh", "posh-stage"];
/// The other programs.
const LARGE: [&str; 5] = ["posh-cli", "posh-gateway", "posh-executor", "posh-lab", "posh-bench"];

/// Directories of cargo's output.
struct Layout {
    target: PathBuf,
    /// Target of this machine: `x86_64-unknown-linux-gnu`.
    triple: String,
}

impl Layout {
    /// From the path of this program, `TARGET/TRIPLE/PROFILE/xtask`.
    fn find() -> Result<Self> {
        let this = env::current_exe().context("cannot tell where this program is")?;
        let mut above = this.ancestors().skip(2);
        let triple =
            above.next().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
        let target = above.next().map(Path::to_owned);
        let (triple, target) =
            triple.zip(target).context("this program is not where cargo builds programs")?;
        Ok(Self { target, triple })
    }

    fn small_triple(&self) -> String {
        self.triple.replace("-gnu", "-musl")
    }
}

/// Installs Rust's musl target if possible.
pub fn small_target() -> Result<()> {
    let triple = Layout::find()?.small_triple();
    if has_target(&triple) {
        return Ok(());
    }
    println!("installing Rust's target {triple}");
    let added = Command::new("rustup").args(["target", "add", &triple]).status();
    if !added.is_ok_and(|status| status.success()) {
        println!(
            "{triple} is not to be had: posh and posh-stage are built as the others and start 0.3 \
             ms later"
        );
    }
    Ok(())
}

fn has_target(triple: &str) -> bool {
    let asked =
        Command::new("rustc").args(["--print", "target-libdir", "--target", triple]).output();
    asked.is_ok_and(|answer| Path::new(String::from_utf8_lossy(&answer.stdout).trim()).is_dir())
}

/// Builds of all programs, to be run one after the other. `with` are other targets to build with
/// the first: tests need more features of some packages, which would then be compiled twice.
pub fn builds(options: &[&str], with: &[&str]) -> Result<Vec<Command>> {
    let mut all = cargo::command(&["build", "--workspace", "--bins"]);
    all.args(with).args(options);
    let mut builds = vec![all];
    let triple = Layout::find()?.small_triple();
    if has_target(&triple) {
        let mut small = cargo::command(&[
            "build",
            "--package",
            "posh",
            "--no-default-features",
            "--target",
            &triple,
        ]);
        small.args(SMALL.iter().flat_map(|program| ["--bin", program])).args(options);
        builds.push(small);
    }
    Ok(builds)
}

/// Links the built programs into one directory; returns it.
pub fn assemble(profile: &str) -> Result<PathBuf> {
    let layout = Layout::find()?;
    let directory = layout.target.join("programs").join(profile);
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let small = if has_target(&layout.small_triple()) {
        layout.small_triple()
    } else {
        layout.triple.clone()
    };
    let small = SMALL.iter().map(|program| (small.as_str(), program));
    for (triple, program) in
        small.chain(LARGE.iter().map(|program| (layout.triple.as_str(), program)))
    {
        let built = layout.target.join(triple).join(profile).join(program);
        // Linked under another name first: a running old program keeps its file.
        let (name, fresh) = (directory.join(program), directory.join(format!("{program}.new")));
        let _ = fs::remove_file(&fresh);
        let linked = fs::hard_link(&built, &fresh).and_then(|()| fs::rename(&fresh, &name));
        linked.with_context(|| format!("cannot link {} to {}", name.display(), built.display()))?;
        // rename(2) does nothing where both names are of one file.
        let _ = fs::remove_file(&fresh);
    }
    Ok(directory)
}

/// Builds the programs for installing; returns their directory.
pub fn release() -> Result<PathBuf> {
    small_target()?;
    for build in builds(&["--release"], &[])? {
        cargo::must(build)?;
    }
    assemble("release")
}
