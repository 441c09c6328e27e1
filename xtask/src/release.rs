//! `cargo xtask release`: the files of a release in one directory: the programs, the licences, a
//! bill of materials and the checksums of all of it.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest as _, Sha256};

use crate::programs;
use crate::supply::packages::{self, Metadata};
use crate::supply::sbom;

/// Programs for users; the others are for measurements and demonstrations.
const PROGRAMS: [&str; 5] = ["posh", "posh-cli", "posh-stage", "posh-gateway", "posh-executor"];
const TEXTS: [&str; 4] = ["LICENSE-APACHE", "LICENSE-MIT", "README.md", "CHANGELOG.md"];
/// Format of sha256sum(1).
const SUMS: &str = "SHA256SUMS";
const BILL: &str = "posh.cdx.json";
const VERSION: &str = "VERSION";

/// Builds everything; returns the directory.
pub fn run() -> Result<PathBuf> {
    let metadata = Metadata::read()?;
    let built = programs::release()?;
    let directory = built.with_file_name("").join("../release-files");
    // Removes the files of an earlier release.
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let directory = directory.canonicalize()?;
    for program in PROGRAMS {
        copy(&built.join(program), &directory)?;
    }
    for text in TEXTS {
        copy(&metadata.root().join(text), &directory)?;
    }
    let version = env!("CARGO_PKG_VERSION");
    let document = sbom::document(&metadata, &packages::locked(metadata.root())?, version)?;
    fs::write(directory.join(BILL), format!("{}\n", serde_json::to_string_pretty(&document)?))?;
    fs::write(directory.join(VERSION), format!("{version}\n"))?;
    fs::write(directory.join(SUMS), sums(&directory)?)?;
    Ok(directory)
}

fn copy(from: &Path, directory: &Path) -> Result<()> {
    let name = from.file_name().context("a file has a name")?;
    fs::copy(from, directory.join(name))
        .with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}

/// A line for each file, sorted.
fn sums(directory: &Path) -> Result<String> {
    let entries =
        fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name())).collect::<Result<Vec<_>>>()?;
    let mut names: Vec<String> =
        entries.iter().map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    let mut sums = String::new();
    for name in names.iter().filter(|name| *name != SUMS) {
        let digest = Sha256::digest(fs::read(directory.join(name))?);
        digest.iter().try_for_each(|byte| write!(sums, "{byte:02x}"))?;
        writeln!(sums, "  {name}")?;
    }
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn sha256sum_finds_the_files_as_they_are_and_misses_what_was_changed() {
        let directory = std::env::temp_dir().join(format!("posh-release-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("b"), "second").unwrap();
        fs::write(directory.join("a"), [0, 255]).unwrap();
        fs::write(directory.join(SUMS), sums(&directory).unwrap()).unwrap();
        let check = || {
            let mut command = Command::new("sha256sum");
            let command = command.args(["--strict", "--check", SUMS]).current_dir(&directory);
            let output = command.output().unwrap();
            (output.status.success(), String::from_utf8(output.stdout).unwrap())
        };
        assert_eq!(check(), (true, "a: OK\nb: OK\n".to_owned()));
        fs::write(directory.join("b"), "seconds").unwrap();
        assert_eq!(check(), (false, "a: OK\nb: FAILED\n".to_owned()));
        fs::remove_dir_all(directory).unwrap();
    }
}
