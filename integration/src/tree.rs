//! The content of a directory as a value, to compare the files of two runs.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::{AttemptExt, Result};
use crate::git_index;
use crate::oracle::replace;

/// Bytes of a file's beginning in the report of a difference.
const SHOWN_BYTES: usize = 60;

/// Entry at one path.
#[derive(Debug, Clone)]
pub struct TreeEntry {
    /// Kind and content.
    pub kind: EntryKind,
    /// Its permission bits.
    pub mode: u32,
    /// Its owner's and its group's number.
    pub owner: (u32, u32),
    /// Modification time, seconds since 1970. Not compared: two runs are never at the same time.
    pub modified_s: i64,
}

/// Kinds of directory entries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntryKind {
    /// A directory.
    Directory,
    /// A file with these bytes; git's index is normalized.
    File(Vec<u8>),
    /// A symbolic link, with its target.
    Link(PathBuf),
    /// Anything else.
    Other,
}

impl PartialEq for TreeEntry {
    fn eq(&self, other: &TreeEntry) -> bool {
        self.kind == other.kind && self.mode == other.mode && self.owner == other.owner
    }
}

impl Eq for TreeEntry {}

/// Relative paths and their entries.
pub type Tree = BTreeMap<PathBuf, TreeEntry>;

/// Reads everything below `root`, except the relative paths of `skip`.
pub fn snapshot(root: &Path, skip: &[&str]) -> Result<Tree> {
    let mut tree = Tree::new();
    let mut open = vec![root.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(&directory).attempt(|| format!("list {}", directory.display()))? {
            let path = entry.attempt(|| format!("list {}", directory.display()))?.path();
            let relative =
                path.strip_prefix(root).expect("an entry lies below its root").to_owned();
            if skip.iter().any(|s| Path::new(s) == relative) || is_on_its_way_out(&path) {
                continue;
            }
            let entry = read(&path)?;
            if entry.kind == EntryKind::Directory {
                open.push(path);
            }
            tree.insert(relative, entry);
        }
    }
    Ok(tree)
}

/// Returns true for a file that was removed through sshfs while it was open: libfuse keeps it under
/// such a name until the kernel reports the last close, some time after it (fuse(8),
/// `hard_remove`).
fn is_on_its_way_out(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_bytes().starts_with(b".fuse_hidden"))
}

/// Replaces `from` in names, link targets and the content of every file: for runs in directories of
/// their own.
pub fn renamed(tree: Tree, from: &str, to: &str) -> Tree {
    let path = |path: &Path| -> PathBuf {
        let bytes = replace(path.as_os_str().as_bytes(), from.as_bytes(), to.as_bytes());
        OsString::from_vec(bytes).into()
    };
    let change = |(name, mut entry): (PathBuf, TreeEntry)| {
        match &mut entry.kind {
            EntryKind::File(bytes) => *bytes = replace(bytes, from.as_bytes(), to.as_bytes()),
            EntryKind::Link(target) => *target = path(target),
            EntryKind::Directory | EntryKind::Other => {}
        }
        (path(&name), entry)
    };
    tree.into_iter().map(change).collect()
}

fn read(path: &Path) -> Result<TreeEntry> {
    let words = || format!("read {}", path.display());
    let metadata = fs::symlink_metadata(path).attempt(words)?;
    let kind = if metadata.is_dir() {
        EntryKind::Directory
    } else if metadata.is_file() {
        let content = fs::read(path).attempt(words)?;
        let is_index = path.ends_with("index");
        EntryKind::File(if is_index { git_index::neutral(content) } else { content })
    } else if metadata.is_symlink() {
        EntryKind::Link(fs::read_link(path).attempt(words)?)
    } else {
        EntryKind::Other
    };
    let (mode, owner) = (metadata.mode() & 0o7777, (metadata.uid(), metadata.gid()));
    Ok(TreeEntry { kind, mode, owner, modified_s: metadata.mtime() })
}

/// Paths at which two trees differ, with descriptions; empty when they are equal.
pub fn differences(left: &Tree, right: &Tree) -> Vec<String> {
    let paths: std::collections::BTreeSet<_> = left.keys().chain(right.keys()).collect();
    let differing = paths.into_iter().filter(|p| left.get(*p) != right.get(*p));
    differing
        .map(|p| format!("{}: {} / {}", p.display(), brief(left.get(p)), brief(right.get(p))))
        .collect()
}

fn brief(entry: Option<&TreeEntry>) -> String {
    let Some(TreeEntry { kind, mode, owner: (user, group), .. }) = entry else {
        return "absent".into();
    };
    let what = match kind {
        EntryKind::Directory => "directory".into(),
        EntryKind::File(bytes) => {
            let start = String::from_utf8_lossy(&bytes[..bytes.len().min(SHOWN_BYTES)]);
            format!("file of {} bytes {start:?}", bytes.len())
        }
        EntryKind::Link(to) => format!("link to {}", to.display()),
        EntryKind::Other => "special file".into(),
    };
    format!("{what} {mode:o} {user}:{group}")
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
            fs::write(root.path().join(format!(".fuse_hidden{text}")), "").unwrap();
        }
        fs::write(b.path().join("extra"), "").unwrap();
        let trees = [&a, &b].map(|r| snapshot(r.path(), &[]).unwrap());
        let found = differences(&trees[0], &trees[1]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("d/f: ") && found[1].starts_with("extra: absent"));
        assert!(differences(&snapshot(a.path(), &["d/f"]).unwrap(), &trees[1]).len() == 2);
    }
}
