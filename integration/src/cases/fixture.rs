//! The files in every case's directory. They are made once, kept in memory, and written anew for
//! each run. Their times are fixed, so that commands that show times (`ls -l`, `tar`, `find
//! -newer`) have one result.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;

use crate::error::{AttemptExt, LabError, Result};

/// Modification time of the fixture's first file, seconds since 1970; each next one is a minute
/// later.
const FIRST_TIME_S: i64 = 1_000_000_000;
const STEP_S: i64 = 60;

/// A tree in memory.
#[derive(Debug)]
pub struct Fixture(Vec<FixtureNode>);

#[derive(Debug)]
struct FixtureNode {
    path: PathBuf,
    kind: FixtureKind,
    mode: u32,
    modified_s: i64,
}

#[derive(Debug)]
enum FixtureKind {
    Directory,
    File(Vec<u8>),
    Link(PathBuf),
}

impl Fixture {
    /// Makes the files in a temporary directory and reads them back.
    pub fn make() -> Result<Fixture> {
        let directory =
            tempfile::tempdir().attempt(|| "make a directory for the fixture".into())?;
        let root = directory.path();
        fill(root).attempt(|| "write the fixture".into())?;
        pack(root)?;
        let mut nodes = Vec::new();
        read(root, Path::new(""), &mut nodes).attempt(|| "read the fixture".into())?;
        for (node, number) in nodes.iter_mut().zip(0..) {
            node.modified_s = FIRST_TIME_S + STEP_S * number;
        }
        // Set only now, since only root could read such files back.
        for (name, mode) in [("unreadable", 0), ("locked", 0)] {
            nodes.iter_mut().filter(|n| n.path == Path::new(name)).for_each(|n| n.mode = mode);
        }
        Ok(Fixture(nodes))
    }

    /// Writes the tree into `root`, an empty directory, with owner `owner`.
    pub fn put(&self, root: &Path, owner: u32) -> Result<()> {
        for node in &self.0 {
            let path = root.join(&node.path);
            node.write(&path, owner).attempt(|| format!("write {}", path.display()))?;
        }
        // Directories last and innermost first: creating entries changes their times.
        for node in self.0.iter().rev().filter(|n| matches!(n.kind, FixtureKind::Directory)) {
            let path = root.join(&node.path);
            node.settle(&path).attempt(|| format!("set the mode of {}", path.display()))?;
        }
        Ok(())
    }
}

impl FixtureNode {
    fn write(&self, path: &Path, owner: u32) -> std::io::Result<()> {
        match &self.kind {
            FixtureKind::Directory => fs::create_dir(path)?,
            FixtureKind::Link(target) => symlink(target, path)?,
            FixtureKind::File(bytes) => fs::write(path, bytes)?,
        }
        if owner != 0 {
            lchown(path, Some(owner), Some(owner))?;
        }
        if matches!(self.kind, FixtureKind::Directory) { Ok(()) } else { self.settle(path) }
    }

    fn settle(&self, path: &Path) -> std::io::Result<()> {
        if !matches!(self.kind, FixtureKind::Link(_)) {
            fs::set_permissions(path, fs::Permissions::from_mode(self.mode))?;
        }
        let time = TimeSpec::new(self.modified_s, 0);
        Ok(utimensat(AT_FDCWD, path, &time, &time, UtimensatFlags::NoFollowSymlink)?)
    }
}

fn read(root: &Path, below: &Path, nodes: &mut Vec<FixtureNode>) -> std::io::Result<()> {
    let mut names: Vec<_> = fs::read_dir(root.join(below))?
        .map(|e| e.map(|e| e.file_name()))
        .collect::<std::io::Result<_>>()?;
    names.sort();
    for name in names {
        let path = below.join(name);
        let whole = root.join(&path);
        let metadata = fs::symlink_metadata(&whole)?;
        let mode = metadata.mode() & 0o7777;
        let kind = if metadata.is_dir() {
            FixtureKind::Directory
        } else if metadata.is_symlink() {
            FixtureKind::Link(fs::read_link(&whole)?)
        } else {
            FixtureKind::File(fs::read(&whole)?)
        };
        let descend = matches!(kind, FixtureKind::Directory);
        nodes.push(FixtureNode { path: path.clone(), kind, mode, modified_s: 0 });
        if descend {
            read(root, &path, nodes)?;
        }
    }
    Ok(())
}

fn fill(root: &Path) -> std::io::Result<()> {
    let put = |name: &str, text: &[u8]| fs::write(root.join(name), text);
    put("f", lines(4_000).as_bytes())?;
    // More than a default pipe holds, and more than any pipe holds.
    put("middle", lines(12_000).as_bytes())?;
    put("large", lines(120_000).as_bytes())?;
    put("a", b"alpha\nneedle in a\nomega\n")?;
    put("b", b"beta\nneedle in b\nno end of line")?;
    put("empty", b"")?;
    put("list", b"a\nb\nf\nempty\n")?;
    for part in 0..4 {
        put(&format!("part-{part}"), lines(100 + part).as_bytes())?;
    }
    put("unreadable", b"nobody reads this\n")?;
    text_files(&put)?;
    odd_names(root)?;
    trees(root)?;
    for (target, name) in
        [("f", "link"), ("/home/user/own", "own"), ("nowhere", "dangling"), ("loop", "loop")]
    {
        symlink(target, root.join(name))?;
    }
    Ok(())
}

/// Contents of all kinds.
fn text_files(put: &impl Fn(&str, &[u8]) -> std::io::Result<()>) -> std::io::Result<()> {
    let all: Vec<u8> = (0..=255).cycle().take(2_000).collect();
    put("binary", &all)?;
    put(
        "utf8",
        "größer\nça va\n日本語 needle\nNEEDLE Ünder\nемкость\n🦀 crab\nnaïve café\n".as_bytes(),
    )?;
    put("invalid", b"valid\nneedle \xff\xfe here\n\xc3(\nlast \xe2\x82\n")?;
    put("crlf", b"one\r\nneedle two\r\nthree\r\n")?;
    let stems = [
        "pear", "Apple", "fig", "apple", "Banana", "fig", "cherry", "date", "10", "9", "2", "-5",
        "", "quince",
    ];
    let word = |i: usize| format!("{} {}\n", stems[i * i % stems.len()], i * 7 % 11);
    put("words", (0..120).map(word).collect::<String>().as_bytes())?;
    let key = |start: usize, step: usize, what: &str| -> String {
        (0..60).map(|i| format!("k{:03} {what}{i}\n", start + step * i)).collect()
    };
    put("sorted-1", key(0, 2, "left").as_bytes())?;
    put("sorted-2", key(0, 3, "right").as_bytes())?;
    let numbers = (0..100_i64).map(|i| match i % 10 {
        3 => format!("{}.{}\n", i * 37 % 101 - 50, i % 7),
        7 => format!("{}K\n", i * 13 % 29),
        9 => format!("{}e{}\n", i % 9, i % 5),
        _ => format!("{}\n", i * 7919 % 1009 - 300),
    });
    put("numbers", numbers.collect::<String>().as_bytes())?;
    let names = ["ada", "bob", "eve, the third", "zoë"];
    let row = |i: usize| {
        format!(
            "{i},\"{}\",{},{}\n",
            names[i % 4],
            i * 31 % 17,
            if i.is_multiple_of(3) { "red" } else { "blue" }
        )
    };
    put(
        "table.csv",
        format!("id,name,count,colour\n{}", (0..50).map(row).collect::<String>()).as_bytes(),
    )?;
    let item = |i: usize| {
        format!(
            "{{\"id\":{i},\"name\":\"item {i}\",\"tags\":[\"t{}\",\"é\"],\"price\":{}.5}}",
            i % 3,
            i * 3
        )
    };
    let items: Vec<_> = (0..20).map(item).collect();
    put(
        "data.json",
        format!("{{\"items\":[{}],\"total\":20,\"none\":null}}\n", items.join(",")).as_bytes(),
    )
}

fn odd_names(root: &Path) -> std::io::Result<()> {
    let put = |name: &[u8], text: &[u8]| fs::write(root.join(OsStr::from_bytes(name)), text);
    put(b"a name", b"needle with a blank\n")?;
    put(b"new\nline", b"new line\n")?;
    put(b"\xff\xfe", b"not UTF-8\n")?;
    put(b"-dash", b"needle after a dash\n")?;
    put(b".hidden", b"hidden needle\n")
}

fn trees(root: &Path) -> std::io::Result<()> {
    let put = |name: &str, text: &[u8]| fs::write(root.join(name), text);
    fs::create_dir(root.join("dir"))?;
    put("dir/deep", b"a deep needle\n")?;
    fs::create_dir(root.join("locked"))?;
    put("locked/inside", b"locked needle\n")?;
    for number in 0..12 {
        let below = root.join(format!("tree/{}/{}", number % 3, number % 2));
        fs::create_dir_all(&below)?;
        fs::write(below.join(format!("{number}.txt")), lines(30 + 10 * number))?;
    }
    put("tree/0/script.sh", b"#!/bin/sh\necho needle\n")?;
    fs::set_permissions(root.join("tree/0/script.sh"), fs::Permissions::from_mode(0o755))?;
    put("tree/empty", b"")?;
    put("tree/a b.txt", b"needle in the tree\n")?;
    fs::create_dir(root.join("tree/nothing"))?;
    symlink("0/0/0.txt", root.join("tree/first"))?;
    symlink("../0", root.join("tree/1/other"))?;
    symlink("nowhere", root.join("tree/2/dangling"))
}

/// Lines of hay, every hundredth with a needle.
fn lines(count: usize) -> String {
    let line = |i: usize| match i % 100 {
        7 => format!("line {i} with a needle\n"),
        _ => format!("line {} of hay\n", i * 7919 % 10_007),
    };
    (0..count).map(line).collect()
}

/// Adds compressed files and archives of the fixture's files.
fn pack(root: &Path) -> Result<()> {
    let script = "gzip -nc f > f.gz; bzip2 -c f > f.bz2; xz -c f > f.xz; zstd -qc f > f.zst
        tar --sort=name --owner=0 --group=0 --mtime=@1000000000 -cf archive.tar a b dir tree
        tar --sort=name --owner=0 --group=0 --mtime=@1000000000 -c a b dir | gzip -n > archive.tgz";
    let output = Command::new("sh").args(["-euc", script]).current_dir(root).output();
    let output = output.attempt(|| "run sh for the fixture".into())?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(LabError::Command { command: script.into(), host: "this machine".into(), stderr })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{differences, snapshot};

    #[test]
    fn two_copies_are_equal() {
        let fixture = Fixture::make().unwrap();
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fixture.put(a.path(), 0).unwrap();
        fixture.put(b.path(), 0).unwrap();
        let trees = [&a, &b].map(|d| snapshot(d.path(), &[]).unwrap());
        assert_eq!(differences(&trees[0], &trees[1]), Vec::<String>::new());
        let times = trees.each_ref().map(|t| t.values().map(|e| e.modified_s).collect::<Vec<_>>());
        assert_eq!(times[0], times[1]);
        assert_eq!(trees[0][Path::new("unreadable")].mode, 0);
    }
}
