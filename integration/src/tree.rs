//! The content of a directory as a value, to compare what two runs left behind.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::error::{Attempt, Result};
use crate::oracle::replace;

/// What stands at one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// A directory with these permission bits.
    Directory(u32),
    /// A file with these permission bits and bytes.
    File(u32, Vec<u8>),
    /// A symbolic link to there.
    Link(PathBuf),
    /// Anything else.
    Other,
}

/// Relative path → what stands there.
pub type Tree = BTreeMap<PathBuf, Entry>;

/// Reads everything below `root`, without what `skip` names (as relative paths).
pub fn snapshot(root: &Path, skip: &[&str]) -> Result<Tree> {
    let mut tree = Tree::new();
    let mut open = vec![root.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(&directory).attempt(|| format!("list {}", directory.display()))? {
            let path = entry.attempt(|| format!("list {}", directory.display()))?.path();
            let relative = path.strip_prefix(root).expect("an entry lies below its root").to_owned();
            if skip.iter().any(|s| Path::new(s) == relative) {
                continue;
            }
            let entry = read(&path)?;
            if matches!(entry, Entry::Directory(_)) {
                open.push(path);
            }
            tree.insert(relative, entry);
        }
    }
    Ok(tree)
}

/// The same, with `from` replaced in the content of every file: for runs in directories of their own.
pub fn renamed(tree: Tree, from: &str, to: &str) -> Tree {
    let change = |(path, entry)| match entry {
        Entry::File(mode, bytes) => (path, Entry::File(mode, replace(&bytes, from.as_bytes(), to.as_bytes()))),
        other => (path, other),
    };
    tree.into_iter().map(change).collect()
}

fn read(path: &Path) -> Result<Entry> {
    let words = || format!("read {}", path.display());
    let metadata = fs::symlink_metadata(path).attempt(words)?;
    let mode = metadata.permissions().mode() & 0o7777;
    Ok(if metadata.is_dir() {
        Entry::Directory(mode)
    } else if metadata.is_file() {
        Entry::File(mode, fs::read(path).attempt(words)?)
    } else if metadata.is_symlink() {
        Entry::Link(fs::read_link(path).attempt(words)?)
    } else {
        Entry::Other
    })
}

/// The paths at which two trees differ, with how; empty when they are equal.
pub fn differences(left: &Tree, right: &Tree) -> Vec<String> {
    let paths: std::collections::BTreeSet<_> = left.keys().chain(right.keys()).collect();
    let differing = paths.into_iter().filter(|p| left.get(*p) != right.get(*p));
    differing.map(|p| format!("{}: {} / {}", p.display(), brief(left.get(p)), brief(right.get(p)))).collect()
}

fn brief(entry: Option<&Entry>) -> String {
    match entry {
        None => "absent".into(),
        Some(Entry::Directory(mode)) => format!("directory {mode:o}"),
        Some(Entry::File(mode, bytes)) => format!("file {mode:o} of {} bytes", bytes.len()),
        Some(Entry::Link(to)) => format!("link to {}", to.display()),
        Some(Entry::Other) => "special file".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_mode_and_absence_count() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for (root, text) in [(&a, "one"), (&b, "two")] {
            fs::create_dir(root.path().join("d")).unwrap();
            fs::write(root.path().join("d/f"), text).unwrap();
            fs::write(root.path().join("same"), "x").unwrap();
        }
        fs::write(b.path().join("extra"), "").unwrap();
        let trees = [&a, &b].map(|r| snapshot(r.path(), &[]).unwrap());
        let found = differences(&trees[0], &trees[1]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("d/f: ") && found[1].starts_with("extra: absent"));
        assert!(differences(&snapshot(a.path(), &["d/f"]).unwrap(), &trees[1]).len() == 2);
    }
}
