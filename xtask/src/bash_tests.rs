//! bash's own test suite from Debian's source package, with the small programs that it calls. apt
//! fetches it into the target directory, with package lists apart from this machine's; it is no
//! part of this repository.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::cargo;

/// Programs that the tests call besides common ones; each is one C file of the package.
const PROGRAMS: [&str; 4] = ["recho", "zecho", "printenv", "xcase"];
/// Macros that those files expect of a configured build.
const CONFIG_H: &str = "#define HAVE_STRING_H 1\n#define HAVE_STDLIB_H 1\n#define HAVE_UNISTD_H 1\n#define STDC_HEADERS 1\n";

/// The directory of the tests, fetched unless it exists.
pub fn fetch() -> Result<PathBuf> {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    let place = std::path::absolute(target.join("bash-tests"))?;
    let tests = place.join("tests");
    if tests.join("xcase").exists() {
        return Ok(tests);
    }
    println!("set-up: fetching the source package of bash from Debian for its tests (20 MB)");
    let _ = fs::remove_dir_all(&place);
    for directory in ["lists/partial", "cache/archives/partial", "parts"] {
        fs::create_dir_all(place.join(directory))
            .with_context(|| format!("cannot make {}", place.display()))?;
    }
    fs::write(place.join("parts/source.sources"), source_list()?)?;
    cargo::must(apt(&place, &["update", "-q"]))?;
    cargo::must(apt(&place, &["source", "-q", "--download-only", "bash"]))?;
    unpack(&place)?;
    let source = place.join("source");
    fs::write(source.join("config.h"), CONFIG_H)?;
    for program in PROGRAMS {
        let mut cc = Command::new("cc");
        cc.args(["-w", "-I.", "-Iinclude", "-o"]).arg(source.join("tests").join(program));
        cc.arg(format!("support/{program}.c")).current_dir(&source);
        cargo::must(cc)?;
    }
    fs::rename(source.join("tests"), &tests)?;
    Ok(tests)
}

/// apt sources of the release that this machine runs.
fn source_list() -> Result<String> {
    let release = fs::read_to_string("/etc/os-release").context("cannot read /etc/os-release")?;
    let value = |key: &str| {
        release.lines().find_map(|l| Some(l.strip_prefix(key)?.trim_matches('"').to_owned()))
    };
    ensure!(value("ID=").as_deref() == Some("debian"), "this is not a Debian machine");
    let suite = value("VERSION_CODENAME=").context("/etc/os-release names no release")?;
    Ok(format!(
        "Types: deb-src\nURIs: http://deb.debian.org/debian\nSuites: {suite}\nComponents: main\n\
         Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    ))
}

fn apt(place: &Path, words: &[&str]) -> Command {
    let mut apt = Command::new("apt-get");
    let below = |name: &str| place.join(name).display().to_string();
    for (key, value) in [
        ("Dir::Etc::sourcelist", "/dev/null".to_owned()),
        ("Dir::Etc::sourceparts", below("parts")),
        ("Dir::State::lists", below("lists")),
        ("Dir::Cache", below("cache")),
        // apt's unprivileged user may not reach the target directory.
        ("APT::Sandbox::User", "root".to_owned()),
    ] {
        apt.args(["-o", &format!("{key}={value}")]);
    }
    apt.args(words).current_dir(place).stdin(std::process::Stdio::null());
    apt
}

fn unpack(place: &Path) -> Result<()> {
    let archive = fs::read_dir(place)?.filter_map(Result::ok).map(|e| e.path());
    let mut archives = archive.filter(|p| p.to_string_lossy().contains(".orig.tar."));
    let Some(archive) = archives.next() else { bail!("the source package of bash has no archive") };
    fs::create_dir(place.join("source"))?;
    let mut tar = Command::new("tar");
    tar.arg("-xf").arg(archive).args(["--strip-components=1", "-C"]).arg(place.join("source"));
    cargo::must(tar)
}
