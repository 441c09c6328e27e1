//! Pipelines for the faults, and their files. All paths are relative, so that both shells print the
//! same.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use super::faults::Point;
use crate::error::{AttemptExt, Result};
use crate::host::Host;

const LARGE_LINES: usize = 40_000;
const SMALL_LINES: usize = 400;

/// Side effect of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    Reads,
    /// Creates a file.
    Writes,
    /// Appends to a file, exactly once.
    Appends(&'static str),
    /// Makes a git commit, exactly once.
    Commits,
}

/// A pipeline.
#[derive(Debug, Clone)]
pub struct Work {
    /// Script for bash.
    pub text: &'static str,
    /// Its side effect.
    pub effect: Effect,
    /// Its output takes many messages.
    is_long: bool,
}

const fn reads(text: &'static str, is_long: bool) -> Work {
    Work { text, effect: Effect::Reads, is_long }
}

const fn writes(text: &'static str) -> Work {
    Work { text, effect: Effect::Writes, is_long: false }
}

const fn appends(text: &'static str, file: &'static str) -> Work {
    Work { text, effect: Effect::Appends(file), is_long: false }
}

const COMMIT: &str =
    "cd repo && echo more >> f && git add -A && git commit -qm chaos && git log --format=%T";

const ALL: [Work; 26] = [
    reads("set -o pipefail; cat large | grep needle", true),
    reads("cat large", true),
    reads("grep -n hay large", true),
    reads("set -o pipefail; sort large | tac", true),
    reads("set -o pipefail; cat large | tr a-z A-Z | cut -d' ' -f2-", true),
    reads("sed s/hay/straw/ large", true),
    reads("sort -r large small", true),
    reads("set -o pipefail; cat large small | grep -v needle | sort", true),
    reads("set -o pipefail; grep -c hay large && wc -l small", false),
    reads("wc < large", false),
    reads("set -o pipefail; cat large | sort | uniq -c | tail -n 3", false),
    reads("cat small nothing", false),
    reads("tar -tf archive.tar", false),
    reads("set -o pipefail; cat ~/originals/small | cat - small | sort | tail -n 5", false),
    writes("grep needle large > out"),
    writes("sort large > out"),
    writes("set -o pipefail; cat small | tac > out"),
    writes("sort -o sorted large"),
    writes("gzip -k small && gzip -dc small.gz"),
    writes("tar -cf new.tar small large"),
    writes("tar -xf archive.tar && cat member"),
    appends("tail -n 1 small >> log", "log"),
    appends("set -o pipefail; cat large | grep -c needle >> log", "log"),
    appends("tee -a log < small > /dev/null", "log"),
    Work { text: COMMIT, effect: Effect::Commits, is_long: false },
    Work {
        text: "git -C repo rm -q g && git -C repo commit -qm chaos",
        effect: Effect::Commits,
        is_long: false,
    },
];

impl Work {
    /// All of them.
    pub fn all() -> Vec<Work> {
        ALL.to_vec()
    }

    /// Returns true if a fault at this point can happen to it.
    pub fn reaches(&self, point: Point) -> bool {
        self.is_long || point != Point::Middle
    }
}

/// Makes the files of which each pipeline gets a copy, in a directory of a host.
pub fn make_files(host: &Host, path: &str) -> Result<()> {
    let directory = &host.path(path);
    let make =
        |path: &Path| fs::create_dir_all(path).attempt(|| format!("make {}", path.display()));
    make(&directory.join("repo"))?;
    let put = |name: &str, text: &str| {
        fs::write(directory.join(name), text).attempt(|| format!("write {name}"))
    };
    put("large", &lines(LARGE_LINES))?;
    put("small", &lines(SMALL_LINES))?;
    put("log", "first\n")?;
    put("member", "of the archive\n")?;
    put("repo/f", "one\n")?;
    put("repo/g", "two\n")?;
    for words in [
        "tar -cf archive.tar member small",
        "rm member",
        "git -C repo init -q -b main",
        "git -C repo config core.checkStat minimal",
        "git -C repo config core.trustctime false",
        "git -C repo config user.name Nobody",
        "git -C repo config user.email nobody@example.org",
        "git -C repo config gc.auto 0",
        "git -C repo add -A",
        "git -C repo commit -qm first",
    ] {
        git_or_tar(host, path, words)?;
    }
    Ok(())
}

fn git_or_tar(host: &Host, directory: &str, words: &str) -> Result<()> {
    let words: Vec<&str> = words.split(' ').collect();
    let mut command = host.command(words[0]);
    command.args(&words[1..]).current_dir(directory);
    host.must(command).map(drop)
}

/// Trees and messages of all commits in a directory of a host, newest first.
pub fn history(host: &Host, directory: &str) -> Result<Vec<String>> {
    let mut git = host.command("git");
    git.args(["-C", &format!("{directory}/repo"), "log", "--format=%T %s"]);
    let text = host.must(git)?.stdout;
    Ok(String::from_utf8_lossy(&text).lines().map(str::to_owned).collect())
}

fn lines(count: usize) -> String {
    let mut text = String::new();
    for i in 0..count {
        let what = if i % 50 == 0 { "needle" } else { "hay" };
        let _ = writeln!(
            text,
            "{:08x} line {i} holds {what} and more of the like",
            i.wrapping_mul(0x9E37_79B9) as u32
        );
    }
    text
}
