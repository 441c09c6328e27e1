//! Test suites for file systems, run on a volume of a laboratory: pjdfstest (effects and errors of
//! each call) as root and as an ordinary user, and fsx (one file, random operations, checked after
//! each) with a large and a small cache. The programs come from crates.io, see `cargo xtask
//! volumes`.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::error::{AttemptExt, Result};
use crate::host::Host;
use crate::lab::{Lab, LabSpec};
use crate::people::as_number;
use crate::programs::Programs;
use crate::services::write_file;
use crate::volumes::{self, Mounts, User};

/// Directory of the programs on a host.
const TOOLS: &str = "/run/tools";
/// Mount point of a second volume of the same export, with a small cache.
const SMALL: &str = "/mnt/small";
/// Size of that cache: somewhat less than fsx's working set.
const SMALL_CACHE: &str = "4M";
/// Operations of one run of fsx, and of a short one.
const OPERATIONS: u32 = 100_000;
const FEW_OPERATIONS: u32 = 2_000;
const SEEDS: [u32; 3] = [1, 2, 3];
/// Failures of pjdfstest that are allowed besides those with device files.
const ALLOWED: usize = 4;
/// The account `daemon`, which every Debian machine has.
const ORDINARY: u32 = 1;
/// Lines of output that are printed of a failed run.
const TAIL_LINES: usize = 30;

/// Weights of all operations; the file is small, so that they collide.
const FSX: &str = "flen = 1048576\n[opsize]\nmax = 131072\nmin = 0\n[weights]\nclose_open = 1.0\n\
    invalidate = 1.0\nmapread = 2.0\nmapwrite = 2.0\nread = 4.0\nwrite = 4.0\ntruncate = 2.0\n\
    fsync = 0.5\nfdatasync = 0.5\nposix_fallocate = 1.0\npunch_hole = 1.0\nsendfile = 1.0\n\
    posix_fadvise = 1.0\ncopy_file_range = 1.0\n";
const PJDFSTEST: &str = "[features]\nposix_fallocate = {}\nrename_ctime = {}\nutime_now = {}\n\
    utimensat = {}\n\
    [settings]\nnaptime = 0.01\nallow_remount = false\n\
    [dummy_auth]\nentries = [[\"nobody\", \"nogroup\"], [\"bin\", \"bin\"], \
    [\"games\", \"games\"]]\n";

/// Programs and extent of the suites.
#[derive(Debug, Clone, clap::Args)]
pub struct SuiteOptions {
    /// The directory with the programs fsx and pjdfstest
    #[arg(long)]
    pub tools: PathBuf,
    /// Less of everything
    #[arg(long)]
    pub quick: bool,
}

/// One line of the table.
#[derive(Debug)]
pub struct SuiteRow {
    what: String,
    figures: String,
    took: Duration,
    /// The failure.
    fault: Option<String>,
}

/// Runs all suites, and prints each line when it is ready; true if all passed.
///
/// # Errors
/// The laboratory's own.
pub fn run(options: &SuiteOptions, programs: &Programs) -> Result<bool> {
    let lab = Lab::start(&LabSpec::servers(1).mounts(Mounts::Volume), programs)?;
    let host = &lab.workstation;
    bring_tools(host, &options.tools)?;
    fs::create_dir_all(host.path(SMALL)).attempt(|| format!("make {SMALL}"))?;
    host.must(volumes::posh(
        host,
        User::Root,
        &["mount", "store1:s1", SMALL, "--cache-size", SMALL_CACHE],
    ))?;
    let mount = lab.mount(1);
    let mut is_good = true;
    let mut tell = |row: SuiteRow| {
        is_good &= row.fault.is_none();
        print!("{}", row.text());
    };
    tell(pjdfstest(host, &mount, 0)?);
    tell(pjdfstest(host, &mount, ORDINARY)?);
    let operations = if options.quick { FEW_OPERATIONS } else { OPERATIONS };
    for (place, what) in
        [(mount.as_path(), "64 MiB in memory, 1 GiB on disk"), (Path::new(SMALL), "4 MiB of cache")]
    {
        for seed in SEEDS {
            tell(fsx(host, place, operations, seed, what)?);
        }
    }
    Ok(is_good)
}

fn bring_tools(host: &Host, tools: &Path) -> Result<()> {
    let directory = host.path(TOOLS);
    fs::create_dir_all(&directory).attempt(|| format!("make {TOOLS}"))?;
    for program in ["fsx", "pjdfstest"] {
        let from = tools.join(program);
        fs::copy(&from, directory.join(program)).attempt(|| format!("copy {}", from.display()))?;
    }
    write_file(host, format!("{TOOLS}/fsx.toml"), FSX.as_bytes())?;
    write_file(host, format!("{TOOLS}/pjdfstest.toml"), PJDFSTEST.as_bytes())
}

fn output(host: &Host, mut command: Command) -> Result<(Output, Duration)> {
    let began = Instant::now();
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = host.run(move || command.output()).attempt(|| "run a test suite".into())?;
    Ok((output, began.elapsed()))
}

fn pjdfstest(host: &Host, mount: &Path, user: u32) -> Result<SuiteRow> {
    let directory = mount.join(format!("pjdfstest-{user}"));
    let seen = host.path(&directory);
    fs::create_dir(&seen)
        .and_then(|()| fs::set_permissions(&seen, fs::Permissions::from_mode(0o777)))
        .attempt(|| format!("make {}", directory.display()))?;
    let mut command = host.command(format!("{TOOLS}/pjdfstest"));
    command
        .args(["-c", &format!("{TOOLS}/pjdfstest.toml"), "-p"])
        .arg(&directory)
        .current_dir(&directory);
    let (output, took) = output(host, as_number(command, user))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let what = format!("pjdfstest as {}", if user == 0 { "root" } else { "an ordinary user" });
    Ok(pjdfstest_row(what, &said, took))
}

/// `Summary: 86 failed, 16 skipped, 296 passed, ...`, and a line for each test.
fn pjdfstest_row(what: String, said: &str, took: Duration) -> SuiteRow {
    let failed = said.lines().filter_map(|line| line.strip_suffix("FAILED")).map(str::trim);
    let (devices, others): (Vec<&str>, Vec<&str>) = failed.partition(|name| is_about_devices(name));
    let Some(summary) = said.lines().find_map(|line| line.strip_prefix("Summary: ")) else {
        return SuiteRow { what, figures: String::new(), took, fault: Some(tail(said)) };
    };
    let figures = format!(
        "{summary}; of the failed, {} with device files, {} others",
        devices.len(),
        others.len()
    );
    let fault = (others.len() > ALLOWED).then(|| others.join("\n"));
    SuiteRow { what, figures, took, fault }
}

/// Returns true if the test begins by making a device, which a volume refuses.
fn is_about_devices(name: &str) -> bool {
    name.ends_with("::block") || name.ends_with("::char") || name.starts_with("mknod::device")
}

fn fsx(host: &Host, mount: &Path, operations: u32, seed: u32, cache: &str) -> Result<SuiteRow> {
    let artifacts = format!("/tmp/fsx-{seed}");
    fs::create_dir_all(host.path(&artifacts)).attempt(|| format!("make {artifacts}"))?;
    let mut command = host.command(format!("{TOOLS}/fsx"));
    command.args([
        "-f",
        &format!("{TOOLS}/fsx.toml"),
        "-N",
        &operations.to_string(),
        "-S",
        &seed.to_string(),
    ]);
    command.args(["-P", &artifacts]).arg(mount.join(format!("fsx-{seed}")));
    let (output, took) = output(host, command)?;
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let what = format!("fsx, seed {seed}, {cache}");
    let figures = format!("{operations} operations of all kinds");
    let fault = (!output.status.success()).then(|| tail(&said));
    Ok(SuiteRow { what, figures, took, fault })
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

impl SuiteRow {
    fn text(&self) -> String {
        let verdict = if self.fault.is_none() { "good" } else { "FAILED" };
        let mut text = format!(
            "{verdict:6} {}: {} ({:.1} s)\n",
            self.what,
            self.figures,
            self.took.as_secs_f64()
        );
        for line in self.fault.iter().flat_map(|fault| fault.lines()) {
            let _ = writeln!(text, "       {line}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_without_device_files_count() {
        let said = "a::b::block                 FAILED\n\twhy\nopen::x    ok\nopen::y    FAILED\n\
                    Summary: 2 failed, 0 skipped, 1 passed, 0 expected failures, 3 total\n";
        let row = |said: &str| pjdfstest_row("it".into(), said, Duration::ZERO);
        assert!(
            row(said).figures.ends_with("1 with device files, 1 others")
                && row(said).fault.is_none()
        );
        let many = "rename::z FAILED\n".repeat(4);
        assert!(row(&(many + said)).fault.is_some_and(|fault| fault.contains("open::y")));
        assert!(row("it died").fault.is_some());
    }
}
