//! Comparison of the directory that a mount shows with what an executor said of its own, before and
//! after. Programs may change it all the time: a part that was one way before and is another way
//! after may be shown any way. So may one that has changed since sshfs may have cached it, except
//! for regular files, which are looked at without its cache when they differ.

use std::{
    collections::BTreeMap, ffi::OsString, fmt, os::unix::ffi::OsStringExt as _, time::Duration,
};

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
}

impl Difference {
    /// Name of the entry.
    pub fn name(&self) -> Option<&OsString> {
        match self {
            Self::Missing(name) | Self::Extra(name) | Self::Entry { name, .. } => Some(name),
            Self::Directory { .. } | Self::FileSystem(_) => None,
        }
    }
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
        }
    }
}

/// A directory as its executor described it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToldDirectory {
    file_system: FileSystemLook,
    itself: ToldFile,
    /// `None` if it can't list them.
    entries: Option<BTreeMap<OsString, ToldFile>>,
    has_more: bool,
    /// Clock of `changed_ns`, before the look.
    now_ns: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ToldFile {
    look: FileLook,
    /// Another time after each change.
    changed_ns: i64,
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
            entries.map(|entry| (OsString::from_vec(entry.name.to_vec()), ToldFile::of(&entry)));
        Some(Self {
            file_system,
            itself: ToldFile::of(&reply.directory?),
            entries: (listed != Listed::Not).then(|| entries.collect()),
            has_more: listed == Listed::First,
            now_ns: reply.now_ns,
        })
    }
}

impl ToldFile {
    fn of(told: &FileFingerprint) -> Self {
        let &FileFingerprint { kind, size, modified_s, changed_ns, .. } = told;
        Self { look: FileLook { kind, size, modified_s: seconds(modified_s) }, changed_ns }
    }

    /// Returns true if a file that was so before and `after` may be shown as `shown`, by an answer
    /// that was cached at `cached_ns` at the earliest.
    fn may_be(&self, shown: FileLook, after: &Self, cached_ns: i64) -> bool {
        let is_cached = self.look.kind != libc::S_IFREG && self.changed_ns >= cached_ns;
        // A mount may follow links.
        self.look.kind == libc::S_IFLNK
            || [self.look, after.look].contains(&shown)
            || (is_cached || self.changes_until(after)) && shown.kind == self.look.kind
    }

    fn changes_until(&self, after: &Self) -> bool {
        self.changed_ns != after.changed_ns
    }
}

/// Compares what a mount shows, from a cache of at most this age, with what the executor said
/// before and after. Returns the differences that no change meanwhile explains.
pub fn compare(
    before: &ToldDirectory,
    shown: &DirectoryLook,
    after: &ToldDirectory,
    cache: Duration,
) -> Vec<Difference> {
    let cache_ns = i64::try_from(cache.as_nanos()).unwrap_or(i64::MAX);
    let cached_ns = before.now_ns.saturating_sub(cache_ns);
    let mut differences = Vec::new();
    if let Some(sizes) = &shown.file_system {
        differences.extend(compare_sizes(&before.file_system, sizes, &after.file_system).err());
    }
    if !before.itself.may_be(shown.itself, &after.itself, cached_ns) {
        differences.push(Difference::Directory { told: before.itself.look, shown: shown.itself });
    }
    let (Some(earlier), Some(seen), Some(later)) =
        (&before.entries, &shown.entries, &after.entries)
    else {
        return differences;
    };
    // Names after the last one of a list that has more are not known.
    let ends = [
        (before.has_more, earlier.keys().next_back()),
        (shown.has_more, seen.keys().next_back()),
        (after.has_more, later.keys().next_back()),
    ];
    let end = ends.into_iter().filter(|(has_more, _)| *has_more).filter_map(|(_, last)| last).min();
    let is_known = |name: &&OsString| end.is_none_or(|end| *name <= end);
    let changes = before.itself.changes_until(&after.itself);
    for (name, entry) in earlier.iter().filter(|(name, _)| is_known(name)) {
        let Some(then) = later.get(name) else { continue };
        match seen.get(name) {
            None if changes && entry.changes_until(then) => {}
            None => differences.push(Difference::Missing(name.clone())),
            Some(Some(look)) if !entry.may_be(*look, then, cached_ns) => {
                let (name, told) = (name.clone(), entry.look);
                differences.push(Difference::Entry { name, told, shown: *look });
            }
            Some(_) => {}
        }
    }
    let is_told = |name: &OsString| earlier.contains_key(name) || later.contains_key(name);
    let is_cached = before.itself.changed_ns >= cached_ns;
    let is_there = |look: &Option<FileLook>| {
        !changes && (!is_cached || look.is_some_and(|look| look.kind == libc::S_IFREG))
    };
    let extra = seen.iter().filter(|(name, look)| is_known(name) && is_there(look));
    let extra = extra.map(|(name, _)| name).filter(|name| !is_told(name));
    differences.extend(extra.cloned().map(Difference::Extra));
    differences
}

fn compare_sizes(
    before: &FileSystemLook,
    shown: &FileSystemLook,
    after: &FileSystemLook,
) -> Result<(), Difference> {
    let check = |what, of: fn(&FileSystemLook) -> u64, slack: u64| {
        let (one, other) = (of(before), of(after));
        let around = one.abs_diff(other).max(slack);
        let (least, most) =
            (one.min(other).saturating_sub(around), one.max(other).saturating_add(around));
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

    const FILE: u32 = libc::S_IFREG;

    fn sizes() -> FileSystemLook {
        FileSystemLook {
            bytes: 100 << 30,
            free_bytes: 50 << 30,
            files: 1 << 20,
            free_files: 1 << 19,
            longest_name: 255,
        }
    }

    fn file(size: u64, changed_ns: i64) -> ToldFile {
        ToldFile { look: FileLook { kind: FILE, size, modified_s: 7 }, changed_ns }
    }

    fn told(names: &[&str]) -> ToldDirectory {
        let itself = ToldFile {
            look: FileLook { kind: libc::S_IFDIR, size: 4096, modified_s: 7 },
            changed_ns: 7,
        };
        let entries = names.iter().map(|name| (OsString::from(name), file(3, 7)));
        ToldDirectory {
            file_system: sizes(),
            itself,
            entries: Some(entries.collect()),
            has_more: false,
            now_ns: 1_000_000,
        }
    }

    /// As a mount shows it.
    fn shown(of: &ToldDirectory) -> DirectoryLook {
        let entries = of.entries.as_ref();
        let entries = entries
            .map(|all| all.iter().map(|(name, file)| (name.clone(), Some(file.look))).collect());
        DirectoryLook {
            file_system: Some(of.file_system),
            itself: of.itself.look,
            entries,
            has_more: of.has_more,
        }
    }

    fn first(
        before: &ToldDirectory,
        shown: &DirectoryLook,
        after: &ToldDirectory,
    ) -> Result<(), Difference> {
        compare(before, shown, after, Duration::ZERO).into_iter().next().map_or(Ok(()), Err)
    }

    fn check(before: &ToldDirectory, shown: &DirectoryLook, expected: Result<(), Difference>) {
        assert_eq!(first(before, shown, before), expected);
    }

    #[test]
    fn the_same_directory_is_the_same() {
        for names in [&[][..], &["a", "b"]] {
            let before = told(names);
            check(&before, &shown(&before), Ok(()));
        }
        // One that may not be listed, here or there.
        let before = told(&["a"]);
        check(&before, &DirectoryLook { entries: None, ..shown(&before) }, Ok(()));
        let unlisted = ToldDirectory { entries: None, ..before.clone() };
        check(&unlisted, &shown(&before), Ok(()));
        // A server that does not tell the sizes.
        check(&before, &DirectoryLook { file_system: None, ..shown(&before) }, Ok(()));
    }

    #[test]
    fn another_directory_differs() {
        let before = told(&["a", "b"]);
        let name = |name: &str| OsString::from(name);
        check(&before, &shown(&told(&["a"])), Err(Difference::Missing(name("b"))));
        check(&before, &shown(&told(&["a", "b", "c"])), Err(Difference::Extra(name("c"))));
        let mut other = told(&["a", "b"]);
        other.entries.as_mut().unwrap().insert(name("b"), file(4, 7));
        let (three, four) = (file(3, 7).look, file(4, 7).look);
        let differs = Difference::Entry { name: name("b"), told: three, shown: four };
        check(&before, &shown(&other), Err(differs));
        let mut other = shown(&before);
        other.itself.modified_s += 1;
        let told = before.itself.look;
        check(&before, &other, Err(Difference::Directory { told, shown: other.itself }));
        let mut other = shown(&before);
        other.file_system.as_mut().unwrap().free_bytes -= 2 * SLACK_BYTES;
        check(&before, &other, Err(Difference::FileSystem("free bytes")));
        let mut other = shown(&before);
        other.file_system.as_mut().unwrap().bytes += 2 * SLACK_BYTES;
        check(&before, &other, Err(Difference::FileSystem("bytes")));
    }

    #[test]
    fn a_change_meanwhile_is_no_difference() {
        let (before, mut after) = (told(&["a", "gone"]), told(&["a", "new"]));
        after.itself.changed_ns = 8;
        after.entries.as_mut().unwrap().insert("a".into(), file(9, 8));
        after.file_system.free_bytes -= 10 * SLACK_BYTES;
        let mut seen = shown(&told(&["a", "came and went"]));
        seen.itself.modified_s = 8;
        seen.file_system.as_mut().unwrap().free_bytes -= 5 * SLACK_BYTES;
        seen.entries.as_mut().unwrap().insert("a".into(), Some(file(6, 0).look));
        assert_eq!(first(&before, &seen, &after), Ok(()));
        // What is the same before and after is shown so.
        seen.entries.as_mut().unwrap().remove(&OsString::from("a"));
        let same = ToldDirectory { entries: before.entries.clone(), ..after };
        let missing = Err(Difference::Missing("a".into()));
        assert_eq!(first(&before, &seen, &same), missing);
    }

    #[test]
    fn a_directory_that_has_changed_since_it_was_cached_may_be_shown_as_it_was() {
        let mut before = told(&["a"]);
        let directory = FileLook { kind: libc::S_IFDIR, size: 4096, modified_s: 6 };
        let entries = before.entries.as_mut().unwrap();
        entries.insert("d".into(), ToldFile { look: directory, changed_ns: 7 });
        let mut old = shown(&before);
        old.itself.modified_s -= 1;
        let older = FileLook { modified_s: 5, ..directory };
        old.entries.as_mut().unwrap().insert("d".into(), Some(older));
        old.entries.as_mut().unwrap().insert("gone".into(), Some(older));
        let check = |cache: u64, changed_ns: i64, expected: usize| {
            let mut before = before.clone();
            before.itself.changed_ns = changed_ns;
            let entries = before.entries.as_mut().unwrap();
            entries.values_mut().for_each(|entry| entry.changed_ns = changed_ns);
            let found = compare(&before, &old, &before, Duration::from_nanos(cache));
            assert_eq!(found.len(), expected, "{cache} {changed_ns} {found:?}");
        };
        check(1000, 999_500, 0);
        check(1000, 998_900, 3);
        check(0, 999_500, 3);
        // By a clock that is ahead.
        check(1000, 1_000_500, 0);
        // Files are looked at without a cache.
        before.itself.changed_ns = 999_500;
        before.entries.as_mut().unwrap().values_mut().for_each(|entry| entry.changed_ns = 999_500);
        for (name, size) in [("a", Some(4)), ("a", None), ("more", Some(0))] {
            let mut seen = shown(&before);
            let entries = seen.entries.as_mut().unwrap();
            match size {
                Some(size) => drop(entries.insert(name.into(), Some(file(size, 0).look))),
                None => drop(entries.remove(&OsString::from(name))),
            }
            let found = compare(&before, &seen, &before, Duration::from_nanos(1000));
            assert_eq!(found.len(), 1, "{name} {size:?} {found:?}");
        }
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
