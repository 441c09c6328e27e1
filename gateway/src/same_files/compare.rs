//! Comparison of the directory that a mount shows with what an executor said of its own, before and
//! after. Programs may change it all the time, so each attribute must lie between the two answers.
//! An older one from sshfs's cache does not, and is a difference.

use std::{collections::BTreeMap, ffi::OsString, fmt, os::unix::ffi::OsStringExt as _};

use fs_mapper::sshfs::{DirectoryLook, FileLook, FileSystemLook, seconds};
use nix::libc;
use posh_proto::executor::{FileFingerprint, FingerprintReply, fingerprint_reply::Listed};

/// Space that others may use or free on a file system between two looks at it.
const SLACK_BYTES: u64 = 1 << 20;
/// Likewise. Some file systems make inodes of free space, of 256 bytes each.
const SLACK_FILES: u64 = SLACK_BYTES / 256;

/// Part of a directory in which a mount and an executor differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    /// The directory's attributes.
    Directory { told: FileLook, shown: FileLook },
    /// The file system's sizes.
    FileSystem(&'static str),
    /// An entry is not shown.
    Missing(OsString),
    /// An entry is shown that the executor does not have.
    Extra(OsString),
    /// An entry's attributes.
    Entry { name: OsString, told: FileLook, shown: FileLook },
    /// The names are not known, and neither is the server's address.
    Unlisted,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory { told, shown } => {
                write!(f, "the directory is shown with {shown}, and has {told}")
            }
            Self::FileSystem(what) => write!(f, "the {what} of its file system differ"),
            Self::Missing(name) => write!(f, "{name:?} is not shown"),
            Self::Extra(name) => write!(f, "{name:?} is shown, and is not there"),
            Self::Entry { name, told, shown } => {
                write!(f, "{name:?} is shown with {shown}, and has {told}")
            }
            Self::Unlisted => f.write_str("it has too many entries, or may not be listed"),
        }
    }
}

/// A directory as its executor described it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToldDirectory {
    file_system: FileSystemLook,
    itself: FileLook,
    /// `None` if they are not listed.
    entries: Option<BTreeMap<OsString, FileLook>>,
    has_more: bool,
}

impl ToldDirectory {
    /// From the executor's words; `None` if they lack something.
    #[must_use]
    pub fn of(reply: FingerprintReply) -> Option<Self> {
        let listed = reply.listed();
        let sizes = reply.file_system?;
        let file_system = FileSystemLook {
            bytes: sizes.bytes,
            free_bytes: sizes.free_bytes,
            files: sizes.files,
            free_files: sizes.free_files,
            longest_name: sizes.longest_name,
        };
        let entries = reply.entries.into_iter();
        let entries =
            entries.map(|entry| (OsString::from_vec(entry.name.to_vec()), look_of(&entry)));
        Some(Self {
            file_system,
            itself: look_of(&reply.directory?),
            entries: (listed != Listed::Not).then(|| entries.collect()),
            has_more: listed == Listed::First,
        })
    }

    /// Returns true if its names are known.
    #[must_use]
    pub fn is_listed(&self) -> bool {
        self.entries.is_some()
    }
}

fn look_of(told: &FileFingerprint) -> FileLook {
    let &FileFingerprint { kind, size, modified_s, .. } = told;
    FileLook { kind, size, modified_s: seconds(modified_s) }
}

/// Returns true if a file with these looks before and after may have had this one meanwhile.
fn is_between(before: FileLook, shown: FileLook, after: FileLook) -> bool {
    let within = |of: fn(&FileLook) -> u64| {
        let (one, other) = (of(&before), of(&after));
        (one.min(other)..=one.max(other)).contains(&of(&shown))
    };
    // A mount may follow links. What is mounted there is not looked at.
    [libc::S_IFLNK, 0].contains(&before.kind)
        || after.kind == 0
        || [before.kind, after.kind].contains(&shown.kind)
            && within(|look| look.size)
            && within(|look| look.modified_s.into())
}

/// Compares what a mount shows with what the executor said before and after. Without names, only an
/// address that both are known to be connected to shows that they are the same.
///
/// # Errors
/// A difference that no change meanwhile explains.
pub fn compare(
    before: &ToldDirectory,
    shown: &DirectoryLook,
    after: &ToldDirectory,
    have_one_address: bool,
) -> Result<(), Difference> {
    if let Some(sizes) = &shown.file_system {
        compare_sizes(&before.file_system, sizes, &after.file_system)?;
    }
    if !is_between(before.itself, shown.itself, after.itself) {
        return Err(Difference::Directory { told: before.itself, shown: shown.itself });
    }
    let (Some(earlier), Some(seen), Some(later)) =
        (&before.entries, &shown.entries, &after.entries)
    else {
        return if have_one_address { Ok(()) } else { Err(Difference::Unlisted) };
    };
    // Names after the last one of a list that has more are not known.
    let ends = [
        (before.has_more, earlier.keys().next_back()),
        (shown.has_more, seen.keys().next_back()),
        (after.has_more, later.keys().next_back()),
    ];
    let end = ends.into_iter().filter(|(has_more, _)| *has_more).filter_map(|(_, last)| last).min();
    let is_known = |name: &&OsString| end.is_none_or(|end| *name <= end);
    for (name, &told) in earlier.iter().filter(|(name, _)| is_known(name)) {
        let Some(&then) = later.get(name) else { continue };
        match seen.get(name) {
            None => return Err(Difference::Missing(name.clone())),
            Some(&Some(shown)) if !is_between(told, shown, then) => {
                return Err(Difference::Entry { name: name.clone(), told, shown });
            }
            // Another mount covers it, or it is another file by now.
            Some(_) => {}
        }
    }
    let is_told = |name: &OsString| earlier.contains_key(name) || later.contains_key(name);
    match seen.keys().filter(is_known).find(|name| !is_told(name)) {
        Some(name) => Err(Difference::Extra(name.clone())),
        None => Ok(()),
    }
}

fn compare_sizes(
    before: &FileSystemLook,
    shown: &FileSystemLook,
    after: &FileSystemLook,
) -> Result<(), Difference> {
    let check = |what, of: fn(&FileSystemLook) -> u64, slack: u64| {
        let (one, other) = (of(before), of(after));
        let (least, most) =
            (one.min(other).saturating_sub(slack), one.max(other).saturating_add(slack));
        match (least..=most).contains(&of(shown)) {
            true => Ok(()),
            false => Err(Difference::FileSystem(what)),
        }
    };
    check("bytes", |of| of.bytes, SLACK_BYTES)?;
    check("free bytes", |of| of.free_bytes, SLACK_BYTES)?;
    check("files", |of| of.files, SLACK_FILES)?;
    check("free files", |of| of.free_files, SLACK_FILES)?;
    check("longest names", |of| of.longest_name, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes() -> FileSystemLook {
        FileSystemLook {
            bytes: 100 << 30,
            free_bytes: 50 << 30,
            files: 1 << 20,
            free_files: 1 << 19,
            longest_name: 255,
        }
    }

    fn file(size: u64, modified_s: u32) -> FileLook {
        FileLook { kind: libc::S_IFREG, size, modified_s }
    }

    fn told(names: &[&str]) -> ToldDirectory {
        let entries = names.iter().map(|name| (OsString::from(name), file(3, 7)));
        ToldDirectory {
            file_system: sizes(),
            itself: FileLook { kind: libc::S_IFDIR, size: 4096, modified_s: 7 },
            entries: Some(entries.collect()),
            has_more: false,
        }
    }

    /// As a mount shows it.
    fn shown(of: &ToldDirectory) -> DirectoryLook {
        let entries = of.entries.as_ref();
        let entries =
            entries.map(|all| all.iter().map(|(name, file)| (name.clone(), Some(*file))).collect());
        DirectoryLook {
            file_system: Some(of.file_system),
            itself: of.itself,
            entries,
            has_more: of.has_more,
        }
    }

    fn check(before: &ToldDirectory, shown: &DirectoryLook, expected: Result<(), Difference>) {
        assert_eq!(compare(before, shown, before, false), expected);
    }

    #[test]
    fn the_same_directory_is_the_same() {
        for names in [&[][..], &["a", "b"]] {
            let before = told(names);
            check(&before, &shown(&before), Ok(()));
        }
        // A server that does not tell the sizes.
        let before = told(&["a"]);
        check(&before, &DirectoryLook { file_system: None, ..shown(&before) }, Ok(()));
    }

    #[test]
    fn names_that_are_not_known_need_an_address() {
        let before = told(&["a"]);
        let unlisted = ToldDirectory { entries: None, ..before.clone() };
        let unseen = DirectoryLook { entries: None, ..shown(&before) };
        for (before, shown) in [(&unlisted, &shown(&before)), (&before, &unseen)] {
            check(before, shown, Err(Difference::Unlisted));
            assert_eq!(compare(before, shown, before, true), Ok(()));
        }
    }

    #[test]
    fn another_directory_differs() {
        let before = told(&["a", "b"]);
        let name = |name: &str| OsString::from(name);
        check(&before, &shown(&told(&["a"])), Err(Difference::Missing(name("b"))));
        check(&before, &shown(&told(&["a", "b", "c"])), Err(Difference::Extra(name("c"))));
        let mut other = told(&["a", "b"]);
        other.entries.as_mut().unwrap().insert(name("b"), file(4, 7));
        let differs = Difference::Entry { name: name("b"), told: file(3, 7), shown: file(4, 7) };
        check(&before, &shown(&other), Err(differs));
        let mut other = shown(&before);
        other.itself.modified_s += 1;
        let told = before.itself;
        check(&before, &other, Err(Difference::Directory { told, shown: other.itself }));
        let mut other = shown(&before);
        other.file_system.as_mut().unwrap().free_bytes -= 2 * SLACK_BYTES;
        check(&before, &other, Err(Difference::FileSystem("free bytes")));
        let mut other = shown(&before);
        other.file_system.as_mut().unwrap().bytes += 2 * SLACK_BYTES;
        check(&before, &other, Err(Difference::FileSystem("bytes")));
    }

    #[test]
    fn a_change_meanwhile_explains_what_lies_between() {
        let (before, mut after) = (told(&["a", "gone"]), told(&["a", "new"]));
        after.itself.modified_s = 9;
        after.entries.as_mut().unwrap().insert("a".into(), file(9, 8));
        after.file_system.free_bytes -= 10 * SLACK_BYTES;
        let mut seen = shown(&told(&["a", "new"]));
        seen.itself.modified_s = 8;
        seen.file_system.as_mut().unwrap().free_bytes -= 5 * SLACK_BYTES;
        let mut try_entry = |look: FileLook| {
            seen.entries.as_mut().unwrap().insert("a".into(), Some(look));
            compare(&before, &seen, &after, false)
        };
        assert_eq!(try_entry(file(6, 7)), Ok(()));
        // Not any other.
        for other in [file(2, 7), file(10, 8), file(6, 6), file(6, 9)] {
            let name = OsString::from("a");
            let differs = Difference::Entry { name, told: file(3, 7), shown: other };
            assert_eq!(try_entry(other), Err(differs));
        }
        assert_eq!(try_entry(file(6, 7)), Ok(()));
        seen.entries.as_mut().unwrap().insert("other".into(), Some(file(1, 8)));
        let extra = Difference::Extra("other".into());
        assert_eq!(compare(&before, &seen, &after, false), Err(extra));
    }

    #[test]
    fn names_after_the_first_are_not_compared() {
        let before = ToldDirectory { has_more: true, ..told(&["a", "b"]) };
        let seen = DirectoryLook { has_more: true, ..shown(&told(&["a", "b", "c"])) };
        check(&before, &seen, Ok(()));
        let fewer = DirectoryLook { has_more: true, ..shown(&told(&["a"])) };
        check(&before, &fewer, Ok(()));
        let other = DirectoryLook { has_more: true, ..shown(&told(&["a", "aa", "c"])) };
        check(&before, &other, Err(Difference::Missing("b".into())));
    }
}
