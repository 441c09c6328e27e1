//! /proc/self/mountinfo (proc_pid_mountinfo(5)): the mounts of this mount namespace, and those that
//! a path lookup can reach. Knows nothing of owners.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, StatxFlags, statx};
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// The mounts of the calling thread's namespace.
const OWN_LIST: &str = "/proc/thread-self/mountinfo";

/// Error on reading the list of mounts.
#[derive(Debug, thiserror::Error)]
pub enum MountInfoError {
    /// The file could not be read.
    #[error("cannot read /proc/self/mountinfo; is /proc mounted?")]
    Read(#[source] io::Error),
    /// A line is not in the kernel's format.
    #[error("/proc/self/mountinfo line {line}: {what}")]
    Line {
        /// From 1.
        line: usize,
        /// Missing or malformed field.
        what: &'static str,
    },
}

/// A line of mountinfo, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// Column 1; also `mnt_id` in /proc/PID/fdinfo.
    pub mount_id: u32,
    /// Column 2: the mount that this one is mounted on.
    pub parent_id: u32,
    /// Major and minor number of the file system.
    pub device: (u32, u32),
    /// Directory of the file system that is mounted; `/` unless it is a bind mount.
    pub root: PathBuf,
    /// Mount point, as this process sees it.
    pub mount_point: PathBuf,
    /// Such as `ext4` or `fuse.sshfs`.
    pub fs_type: String,
    /// Such as `host:/export`; bytes of any encoding.
    pub source: OsString,
    /// Options of the mount and of the file system, joined by a comma.
    pub options: String,
}

/// All mounts of this namespace, in the kernel's order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MountInfo {
    entries: Vec<MountEntry>,
}

impl MountInfo {
    /// Reads the list of the calling thread's namespace.
    pub fn read() -> Result<MountInfo, MountInfoError> {
        MountInfo::parse(&std::fs::read(OWN_LIST).map_err(MountInfoError::Read)?)
    }

    /// Parses the text of a mountinfo file.
    pub fn parse(text: &[u8]) -> Result<MountInfo, MountInfoError> {
        let lines =
            text.split(|byte| *byte == b'\n').enumerate().filter(|(_, line)| !line.is_empty());
        let entries = lines
            .map(|(index, line)| {
                entry(line).map_err(|what| MountInfoError::Line { line: index + 1, what })
            })
            .collect::<Result<_, _>>()?;
        Ok(MountInfo { entries })
    }

    /// Every mount, hidden ones too, in the kernel's order.
    pub fn entries(&self) -> &[MountEntry] {
        &self.entries
    }

    /// Mounts that a path lookup can reach, at most one per mount point, in the kernel's order: not
    /// those under or below a later mount. Takes n log n comparisons of paths.
    pub fn visible(&self) -> Vec<&MountEntry> {
        let tree = MountTree::new(&self.entries);
        let mut reached: Vec<Option<bool>> = vec![None; self.entries.len()];
        let shown = |index: &usize| tree.is_reached(*index, &mut reached) && tree.is_top(*index);
        let shown: Vec<usize> = (0..self.entries.len()).filter(shown).collect();
        shown.into_iter().map(|index| &self.entries[index]).collect()
    }
}

/// Mount ID of an open file or directory, without access to its file system; 0 if the kernel
/// doesn't report it (before 5.8), which is the ID of no mount.
pub fn mount_id(of: impl AsFd) -> u64 {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    statx(of, "", flags, StatxFlags::MNT_ID)
        .ok()
        .filter(|found| found.stx_mask & StatxFlags::MNT_ID.bits() != 0)
        .map_or(0, |found| found.stx_mnt_id)
}

/// The list of mounts at some time. Invariant: what follows from it counts only while the kernel
/// gives the same bytes and has told of no change. Neither is enough: a directory above a mount
/// point that is renamed takes the mount along without an event (poll(2)), and a mount that came
/// and went leaves the same bytes.
#[derive(Debug)]
pub struct MountSnapshot {
    /// Opened before the text was read.
    list: File,
    text: Vec<u8>,
    /// The kernel tells of a change once.
    was_told: AtomicBool,
}

impl MountSnapshot {
    /// Reads the list of the calling thread's namespace.
    pub fn take() -> Result<(Self, MountInfo), MountInfoError> {
        let mut list = File::open(OWN_LIST).map_err(MountInfoError::Read)?;
        let mut text = Vec::new();
        list.read_to_end(&mut text).map_err(MountInfoError::Read)?;
        let info = MountInfo::parse(&text)?;
        Ok((Self { list, text, was_told: AtomicBool::new(false) }, info))
    }

    /// Returns true if something was mounted or unmounted since, the list is not the current one,
    /// or that is unknown.
    pub fn has_changed(&self) -> bool {
        // proc_pid_mountinfo(5): a change since the file was opened is an exceptional condition.
        let mut asked = [PollFd::new(&self.list, PollFlags::PRI)];
        if !matches!(poll(&mut asked, Some(&Timespec::default())), Ok(0)) {
            self.was_told.store(true, Ordering::Relaxed);
        }
        self.was_told.load(Ordering::Relaxed)
            || !std::fs::read(OWN_LIST).is_ok_and(|text| text == self.text)
    }
}

/// Mounts as the kernel links them: by (parent mount, mount point). A lookup enters a mount from
/// its parent, if no other child of the parent lies on the way.
struct MountTree<'m> {
    entries: &'m [MountEntry],
    /// `None`: outside the list, as the root's, in a chroot of other mounts too.
    parents: Vec<Option<usize>>,
    /// Mounts that a lookup in their parent doesn't enter: another child is on top, or on the way.
    hidden: Vec<bool>,
    /// Mounts with another one on top.
    covered: Vec<bool>,
}

impl<'m> MountTree<'m> {
    fn new(entries: &'m [MountEntry]) -> Self {
        let by_id: HashMap<u32, usize> =
            entries.iter().enumerate().map(|(index, entry)| (entry.mount_id, index)).collect();
        let parent = |(index, entry): (usize, &MountEntry)| {
            by_id.get(&entry.parent_id).copied().filter(|parent| *parent != index)
        };
        let parents: Vec<Option<usize>> = entries.iter().enumerate().map(parent).collect();
        let mut tree = Self {
            entries,
            parents,
            hidden: vec![false; entries.len()],
            covered: vec![false; entries.len()],
        };
        let mut by_parent: HashMap<Option<usize>, Vec<usize>> = HashMap::new();
        for (index, parent) in tree.parents.iter().enumerate() {
            by_parent.entry(*parent).or_default().push(index);
        }
        by_parent.into_iter().for_each(|(parent, children)| tree.hide(parent, children));
        tree
    }

    /// Finds out which children of one mount a lookup enters.
    fn hide(&mut self, parent: Option<usize>, mut children: Vec<usize>) {
        let entries = self.entries;
        let point = |index: usize| entries[index].mount_point.as_path();
        // Paths are compared by components, so that all below one come right after it. Of two
        // mounts on one path (propagation; rare) the later one is on top, and comes first.
        children.sort_by(|a, b| point(*a).cmp(point(*b)).then(b.cmp(a)));
        let mut around: Option<usize> = None;
        for child in children {
            let is_outside = parent.is_some_and(|on| !point(child).starts_with(point(on)));
            let is_below = around.is_some_and(|other| point(child).starts_with(point(other)));
            self.hidden[child] = is_outside || is_below;
            if !self.hidden[child] {
                around = Some(child);
            }
            if let Some(parent) = parent
                && point(child) == point(parent)
            {
                self.covered[parent] = true;
            }
        }
    }

    /// Returns true if a lookup of its mount point enters this mount.
    fn is_reached(&self, index: usize, known: &mut [Option<bool>]) -> bool {
        let mut way = vec![index];
        // A cyclic list has no way in.
        while let Some(parent) = self.parents[way[way.len() - 1]]
            && known[parent].is_none()
            && way.len() <= self.entries.len()
        {
            way.push(parent);
        }
        while let Some(index) = way.pop() {
            let is_reached = match self.parents[index] {
                None => !self.hidden[index],
                Some(parent) => known[parent] == Some(true) && !self.hidden[index],
            };
            known[index] = Some(is_reached);
        }
        known[index] == Some(true)
    }

    /// Returns true if no other mount is on top of this one.
    fn is_top(&self, index: usize) -> bool {
        !self.covered[index]
    }
}

/// One line: `id parent major:minor root mount_point options optional... - type source
/// super_options`. Any number of optional fields may stand before the lone dash.
fn entry(line: &[u8]) -> Result<MountEntry, &'static str> {
    let mut fields = line.split(|byte| *byte == b' ');
    let mut next = |what| fields.next().ok_or(what);
    let mount_id = number(next("no mount id")?).ok_or("the mount id is not a number")?;
    let parent_id = number(next("no parent id")?).ok_or("the parent id is not a number")?;
    let device = device(next("no device")?).ok_or("the device is not major:minor")?;
    let root = path(next("no root")?).ok_or("the root holds a NUL")?;
    let mount_point = path(next("no mount point")?).ok_or("the mount point holds a NUL")?;
    let mut options = text(next("no options")?);
    while next("no dash before the file system type")? != b"-" {}
    let fs_type = text(next("no file system type")?);
    let source = OsString::from_vec(decode(next("no source")?));
    if let Ok(of_the_file_system) = next("") {
        options = format!("{options},{}", text(of_the_file_system));
    }
    Ok(MountEntry { mount_id, parent_id, device, root, mount_point, fs_type, source, options })
}

fn number(field: &[u8]) -> Option<u32> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

fn device(field: &[u8]) -> Option<(u32, u32)> {
    let colon = field.iter().position(|byte| *byte == b':')?;
    Some((number(&field[..colon])?, number(&field[colon + 1..])?))
}

/// Decodes a path. The kernel's paths hold no NUL, which would terminate them in system calls.
fn path(field: &[u8]) -> Option<PathBuf> {
    let bytes = decode(field);
    (!bytes.contains(&0)).then(|| PathBuf::from(OsString::from_vec(bytes)))
}

/// Types and options are ASCII unless a FUSE daemon chose other bytes.
fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(&decode(field)).into_owned()
}

/// Decodes the kernel's escapes: a backslash and three octal digits for a byte (blank, tab,
/// newline, backslash, in some fields `#`). Split fields before decoding.
fn decode(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        match after {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..] if *first == b'\\' => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = after;
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    bytes
}

/// Directory after `host:` in the source of an NFS mount. The root field is always `/` for NFS; the
/// source has a bind mount's directory.
pub(crate) fn nfs_directory(source: &OsStr) -> Option<PathBuf> {
    let bytes = source.as_bytes();
    let host =
        if bytes.starts_with(b"[") { bytes.iter().position(|byte| *byte == b']')? } else { 0 };
    let colon = host + bytes[host..].iter().position(|byte| *byte == b':')?;
    Some(path_of(&bytes[colon + 1..]))
}

fn path_of(bytes: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(bytes.to_vec()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn parse(text: &str) -> MountInfo {
        MountInfo::parse(text.as_bytes()).expect("well formed")
    }

    fn visible(text: &str) -> Vec<u32> {
        parse(text).visible().iter().map(|entry| entry.mount_id).collect()
    }

    #[test]
    fn a_line_of_each_kind() {
        let info = parse(
            "36 35 98:0 / / rw,noatime shared:1 master:2 unbindable - ext4 /dev/sda1 rw,errors=remount-ro\n\
             40 36 0:51 /sub /mnt/a\\040b\\134c rw - fuse.sshfs me@host:da\\040ta rw,user_id=0\n\
             41 36 0:52 / /tmp rw -  tmpfs\n",
        );
        let [root, sshfs, bare] = info.entries() else { panic!("three entries") };
        assert_eq!((root.mount_id, root.parent_id, root.device), (36, 35, (98, 0)));
        assert_eq!(root.options, "rw,noatime,rw,errors=remount-ro");
        assert_eq!(sshfs.mount_point, Path::new("/mnt/a b\\c"));
        assert_eq!(sshfs.root, Path::new("/sub"));
        assert_eq!(
            (sshfs.fs_type.as_str(), sshfs.source.as_os_str()),
            ("fuse.sshfs", OsStr::new("me@host:da ta"))
        );
        assert_eq!((bare.fs_type.as_str(), bare.source.as_os_str()), ("", OsStr::new("tmpfs")));
    }

    #[test]
    fn a_dash_that_is_a_mount_point_is_not_the_separator() {
        assert_eq!(parse("36 35 0:5 / - rw - tmpfs none rw\n").entries()[0].fs_type, "tmpfs");
    }

    #[test]
    fn escapes() {
        let check =
            |text: &str, expect: &[u8]| assert_eq!(decode(text.as_bytes()), expect, "{text}");
        check("\\040\\011\\012\\134\\043", b" \t\n\\#");
        check("\\134040", b"\\040");
        check("\\377", b"\xff");
        check("\\4", b"\\4");
        check("\\08x", b"\\08x");
        check("\\400", b"\\400");
        check("end\\", b"end\\");
    }

    #[test]
    fn a_malformed_line_is_named() {
        let check = |text: &str, expect: &str| {
            let error = MountInfo::parse(text.as_bytes()).expect_err("malformed");
            assert_eq!(error.to_string(), expect);
        };
        let good = "36 35 98:0 / / rw - ext4 /dev/sda1 rw";
        check(&format!("{good}\nx"), "/proc/self/mountinfo line 2: the mount id is not a number");
        check(
            "1 2 3 / / rw - ext4 x rw",
            "/proc/self/mountinfo line 1: the device is not major:minor",
        );
        check(
            "1 2 0:3 / / rw shared:1",
            "/proc/self/mountinfo line 1: no dash before the file system type",
        );
        check("1 2 0:3 / / rw - ext4", "/proc/self/mountinfo line 1: no source");
        check(
            "1 2 0:3 / /a\\000b rw - ext4 d rw",
            "/proc/self/mountinfo line 1: the mount point holds a NUL",
        );
    }

    #[test]
    fn what_a_later_mount_hides() {
        let root = "1 0 8:1 / / rw - ext4 d rw\n";
        let check = |mounts: &str, expect: &[u32]| {
            assert_eq!(visible(&format!("{root}{mounts}")), expect, "{mounts}")
        };
        check("2 1 0:2 / /mnt/logs rw - fuse.sshfs a rw\n", &[1, 2]);
        // On the same mount point.
        check("2 1 0:2 / /mnt rw - fuse.sshfs a rw\n3 2 0:3 / /mnt rw - tmpfs b rw\n", &[1, 3]);
        // Over the directory that has the mount point.
        check(
            "2 1 0:2 / /mnt/logs rw - fuse.sshfs a rw\n3 1 0:3 / /mnt rw - tmpfs b rw\n",
            &[1, 3],
        );
        // And again inside of what hides it.
        let again = "2 1 0:2 / /mnt/l rw - nfs a rw\n3 1 0:3 / /mnt rw - tmpfs b rw\n4 3 0:4 / /mnt/l rw - nfs c rw\n";
        check(again, &[1, 3, 4]);
        // Moved: the list is not in the order of mounting.
        check("3 2 0:3 / /mnt/a/b rw - nfs b rw\n2 1 0:2 / /mnt/a rw - nfs a rw\n", &[1, 3, 2]);
    }

    #[test]
    fn roots() {
        // initramfs below the root; a chroot whose root is no mount point; a root that is its own
        // parent.
        assert_eq!(visible("1 1 0:1 / / rw - rootfs rootfs rw\n2 1 8:1 / / rw - ext4 d rw\n"), [2]);
        assert_eq!(visible("9 7 0:4 / /proc rw - proc proc rw\n"), [9]);
    }

    /// Finds the mount of a path as the kernel does: name by name, each time onto the last mount
    /// there.
    fn looked_up(info: &MountInfo, path: &Path) -> Option<u32> {
        let entries = info.entries();
        let ids: Vec<u32> = entries.iter().map(|entry| entry.mount_id).collect();
        let parent = |entry: &MountEntry| {
            Some(entry.parent_id).filter(|id| ids.contains(id) && *id != entry.mount_id)
        };
        let mut names: Vec<&Path> = path.ancestors().collect();
        names.reverse();
        let mut mount = None;
        for name in names {
            let on = |mount: Option<u32>| {
                let mut all = entries.iter().rev();
                all.find(|entry| parent(entry) == mount && entry.mount_point == name)
            };
            while let Some(upper) = on(mount) {
                mount = Some(upper.mount_id);
            }
        }
        mount
    }

    proptest::proptest! {
        #[test]
        fn visible_mounts_are_those_that_a_lookup_finds(
            mounts in proptest::collection::vec((0..8u32, 0..7usize), 1..12),
            is_moved: bool,
        ) {
            let points = ["/", "/a", "/a/b", "/a/b/c", "/ab", "/a-b", "/b"];
            let mut entries: Vec<MountEntry> = Vec::new();
            for (index, (back, point)) in mounts.into_iter().enumerate() {
                let id = u32::try_from(index).unwrap() + 1;
                entries.push(MountEntry {
                    mount_id: id,
                    // Itself, an earlier one, or one outside of the list.
                    parent_id: id.saturating_sub(back),
                    device: (0, id),
                    root: "/".into(),
                    mount_point: points[point].into(),
                    fs_type: "tmpfs".to_owned(),
                    source: "none".into(),
                    options: String::new(),
                });
            }
            if is_moved {
                entries.reverse();
            }
            let info = MountInfo { entries };
            let found: Vec<u32> = info.visible().iter().map(|entry| entry.mount_id).collect();
            let expected = info.entries().iter().filter(|entry| {
                looked_up(&info, &entry.mount_point) == Some(entry.mount_id)
            });
            proptest::prop_assert_eq!(found, expected.map(|e| e.mount_id).collect::<Vec<_>>());
        }
    }

    /// Another user may make a thousand mounts with paths of 4 KiB.
    #[test]
    fn deep_mounts_cost_no_more_than_their_bytes() {
        let deep = "/d".repeat(2000);
        let lines = (2..1002).map(|id| format!("{id} 1 0:{id} / {deep}/{id} rw - fuse a rw\n"));
        let text = format!("1 0 0:1 / / rw - ext4 a rw\n{}", lines.collect::<String>());
        assert_eq!(parse(&text).visible().len(), 1001);
    }

    #[test]
    fn this_process_has_mounts() {
        let info = MountInfo::read().expect("mountinfo");
        assert!(info.visible().iter().any(|entry| entry.fs_type == "proc"));
    }

    #[test]
    fn nfs_sources() {
        let check = |source: &str, expect: Option<&str>| {
            assert_eq!(nfs_directory(OsStr::new(source)), expect.map(PathBuf::from), "{source}");
        };
        check("host:/export/sub", Some("/export/sub"));
        check("[fe80::1]:/export", Some("/export"));
        check("nothing", None);
    }
}
