//! The stage program's quick check: could this word of an argv name something on an owned mount? It
//! knows only a short list of paths, and errs towards "perhaps". `posh_hook::look`, which the exec
//! hook also uses, does the check; this module selects the list from the table and encodes it.

use crate::places::{MountPlace, Places, Terrain, parent, path_of};
use posh_hook::look::{self, Arena, Look, PlaceKind};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Owned mount points, and those that lookups must not touch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Prefixes {
    /// Sorted and without duplicates, in the format of `posh_hook::look::Places`.
    text: Vec<u8>,
}

impl Prefixes {
    /// Selects the table's mount points that are not local, and those mounted inside them.
    /// `mount_id` gives the mount ID for a [`MountPlace::index`] of `places`.
    pub(crate) fn of(
        places: &Places,
        automounts: &Places,
        mount_id: impl Fn(usize) -> Option<u32>,
    ) -> Prefixes {
        let inside = |place: &MountPlace| {
            let outer = parent(&place.dir).and_then(|dir| places.around(dir));
            outer.is_some_and(|outer| outer.terrain != Terrain::Local)
        };
        // An automounter's path comes first: it will belong to an owner.
        let awaited =
            automounts.iter().map(|place| MountPlace { terrain: Terrain::Owned, ..place.clone() });
        let needed =
            places.iter().filter(|place| place.terrain != Terrain::Local || inside(place)).cloned();
        let is_awaited = |place: &MountPlace| automounts.iter().any(|other| other.dir == place.dir);
        Prefixes::write(&Places::new(awaited.chain(needed).collect()), |place| {
            let known = place.terrain == Terrain::Owned && !is_awaited(place);
            mount_id(place.index).filter(|_| known)
        })
    }

    fn write(places: &Places, mount_id: impl Fn(&MountPlace) -> Option<u32>) -> Prefixes {
        let mut text = Vec::new();
        for place in places.iter() {
            text.push(kind(place.terrain).letter());
            text.extend(mount_id(place).map(|id| id.to_string()).unwrap_or_default().into_bytes());
            text.extend_from_slice(&place.dir);
            text.push(0);
        }
        Prefixes { text }
    }

    /// The owned mount points, in path order.
    pub fn owned(&self) -> Vec<PathBuf> {
        self.places().owned().map(path_of).collect()
    }

    /// Encodes for the session file. Per path: a letter for its kind, the mount ID if owned and
    /// known, the path, a NUL.
    pub fn encode(&self) -> Vec<u8> {
        self.text.clone()
    }

    /// Inverse of `encode`; `None` for any other text.
    pub fn decode(text: &[u8]) -> Option<Prefixes> {
        look::Places::read(text).map(|_| Prefixes { text: text.to_vec() })
    }

    /// Returns true if a directory, as from getcwd(3), is on an owned mount. Makes no system call.
    pub fn cwd_is_owned(&self, cwd: &Path) -> bool {
        look::is_owned(self.places(), cwd.as_os_str().as_bytes())
    }

    /// Returns true if one word of an argv could name something on an owned mount, see
    /// [`Look::may_touch`]. `cwd` as from getcwd(3).
    pub fn may_touch(&self, word: &[u8], cwd: &Path) -> bool {
        let mut memory = vec![0; look::ARENA_BYTES];
        Look::new(self.places(), cwd.as_os_str().as_bytes())
            .may_touch(word, &mut Arena::new(&mut memory))
    }

    fn places(&self) -> look::Places<'_> {
        look::Places::read(&self.text).expect("the text was made or checked here")
    }
}

fn kind(terrain: Terrain) -> PlaceKind {
    match terrain {
        Terrain::Local => PlaceKind::Local,
        Terrain::Owned => PlaceKind::Owned,
        Terrain::Closed => PlaceKind::Closed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::places::dir_of;
    use posh_hook::look::MAX_LOOKUPS;
    use std::os::unix::fs::symlink;

    fn prefixes(places: &[(&str, Terrain)]) -> Prefixes {
        let place = |(dir, terrain): &(&str, Terrain)| MountPlace {
            dir: dir.as_bytes().to_vec(),
            terrain: *terrain,
            index: 0,
        };
        Prefixes::write(&Places::new(places.iter().map(place).collect()), |_| None)
    }

    /// Mount points that do not exist: whatever looked below one would find nothing.
    fn owned() -> Prefixes {
        prefixes(&[
            ("/posh-t/logs/", Terrain::Owned),
            ("/posh-t/dead/", Terrain::Closed),
            ("/proc/", Terrain::Closed),
        ])
    }

    #[test]
    fn words() {
        let dir = tempfile::tempdir().expect("a directory");
        let cwd = dir.path().canonicalize().expect("a real path");
        symlink("/posh-t/logs/a", cwd.join("link")).expect("a link");
        symlink("/posh-t/dead/a", cwd.join("dead")).expect("a link");
        let check = |word: &str, expect: bool| {
            let word = word.replace('B', cwd.to_str().expect("ASCII"));
            assert_eq!(owned().may_touch(word.as_bytes(), &cwd), expect, "{word}");
        };
        for word in [
            "link",
            "./link",
            "link/x",
            "B/link",
            "-flink",
            "--file=link",
            "if=link",
            "/posh-t/logs",
        ] {
            check(word, true);
        }
        for word in [
            "host:B/link",
            "@B/link",
            "a,B/link",
            "-xzfB/link",
            "-I=B/link",
            "\"B/link",
            "x=/posh-t/logs/a",
        ] {
            check(word, true);
        }
        for word in [
            "r/posh-t/logs/a",
            "r//posh-t/logs/a",
            "//posh-t/./logs/../logs/",
            "../../../../../../posh-t/logs",
        ] {
            check(word, true);
        }
        for word in [
            "",
            "-",
            "--",
            "-r",
            "-rn",
            "foo",
            "s/a/b/",
            "--colour=auto",
            "/posh-t",
            "/posh-t/log",
            "a=b",
        ] {
            check(word, false);
        }
        for word in [
            "dead",
            "/posh-t/dead/a/../../logs/x",
            "/proc/self/root/mnt",
            "/posh-t/logs-2",
            "a\0b",
            "linkx",
        ] {
            check(word, false);
        }
        // The word itself is one more.
        check(&" /x".repeat(MAX_LOOKUPS - 1), false);
        check(&" /x".repeat(MAX_LOOKUPS), true);
    }

    #[test]
    fn in_an_owned_directory_every_word_may() {
        assert!(owned().may_touch(b"-rn", Path::new("/posh-t/logs/a")));
        assert!(owned().cwd_is_owned(Path::new("/posh-t/logs")));
        assert!(!owned().cwd_is_owned(Path::new("/posh-t/logs-2")));
    }

    #[test]
    fn a_local_mount_inside_of_a_closed_one_is_looked_at() {
        let dir = tempfile::tempdir().expect("a directory");
        let base = dir.path().canonicalize().expect("a real path");
        symlink("/posh-t/logs/a", base.join("link")).expect("a link");
        let (inner, outer) = (dir_of(&base), dir_of(base.parent().expect("a parent")));
        let place = |dir: &[u8], terrain| MountPlace { dir: dir.to_vec(), terrain, index: 0 };
        let logs = place(b"/posh-t/logs/", Terrain::Owned);
        let table = Places::new(vec![
            logs.clone(),
            place(&outer, Terrain::Closed),
            place(&inner, Terrain::Local),
        ]);
        assert!(Prefixes::of(&table, &Places::default(), |_| Some(7)).may_touch(b"link", &base));
        let without = Places::new(vec![logs, place(&outer, Terrain::Closed)]);
        assert!(!Prefixes::of(&without, &Places::default(), |_| None).may_touch(b"link", &base));
    }

    #[test]
    fn without_an_owner_nothing_may() {
        assert!(!Prefixes::default().may_touch(b"/posh-t/logs/a", Path::new("/")));
    }

    #[test]
    fn the_text_form() {
        let check = |text: &[u8], expect: Option<usize>| {
            assert_eq!(
                Prefixes::decode(text).map(|prefixes| prefixes.owned().len()),
                expect,
                "{text:?}"
            );
        };
        check(b"", Some(0));
        check(b"o/a/\0", Some(1));
        check(b"o/a/\0c/b/\0o/a\xff\n/\0", Some(2));
        check(b"o12/a/\0", Some(1));
        check(b"o/a/", None);
        check(b"o/a\0", None);
        check(b"oa/\0", None);
        check(b"x/a/\0", None);
        check(b"\0", None);
        assert_eq!(Prefixes::decode(&owned().encode()), Some(owned()));
        assert_eq!(owned().owned(), [Path::new("/posh-t/logs")]);
        assert!(
            Prefixes::decode(b"o/a\xff/\0")
                .is_some_and(|p| p.owned()[0].as_os_str().as_bytes() == b"/a\xff")
        );
    }
}
