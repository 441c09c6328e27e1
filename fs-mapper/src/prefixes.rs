//! The stage program's quick look: could this word of an argv reach an owned
//! mount? It knows a short list of paths only, and errs towards "perhaps".
//!
//! It walks as the whole table does, so what it answers "no" to is local for
//! the gateway too. A word that is a name in the working directory costs one
//! readlink(2) and a few hundred bytes of memory; one that is an option costs
//! nothing or one.

use crate::places::{Place, Places, Terrain, dir_of, parent, path_of};
use crate::walk::{End, LastLink, Position};
use std::path::{Path, PathBuf};

/// Paths that are looked up for one word; a word with more of them is a script
/// of some kind, and asking the gateway is cheaper than looking further.
const MAX_LOOKUPS: usize = 32;

/// The owned mount points, and those that must not be touched.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Prefixes {
    places: Places,
}

impl Prefixes {
    /// From the table's places: what is not local, and what is mounted inside of that.
    pub(crate) fn of(places: &Places, automounts: &Places) -> Prefixes {
        let inside = |place: &Place| {
            let outer = parent(&place.dir).and_then(|dir| places.around(dir));
            outer.is_some_and(|outer| outer.terrain != Terrain::Local)
        };
        // A path that the automounter will mount comes first: it is an owner's to be.
        let awaited = automounts.iter().map(|place| Place { terrain: Terrain::Owned, ..place.clone() });
        let needed = places.iter().filter(|place| place.terrain != Terrain::Local || inside(place)).cloned();
        let chosen = awaited.chain(needed).map(|place| Place { index: 0, ..place });
        Prefixes { places: Places::new(chosen.collect()) }
    }

    /// The owned mount points, in path order.
    pub fn owned(&self) -> Vec<PathBuf> {
        let owned = self.places.iter().filter(|place| place.terrain == Terrain::Owned);
        owned.map(|place| path_of(&place.dir)).collect()
    }

    /// Bytes for a file that the stage program reads: per path a letter for its
    /// kind, the path, a NUL.
    pub fn encode(&self) -> Vec<u8> {
        let mut text = Vec::new();
        for place in self.places.iter() {
            text.push(letter(place.terrain));
            text.extend_from_slice(&place.dir);
            text.push(0);
        }
        text
    }

    /// The reverse; `None` when it was not made by `encode`.
    pub fn decode(text: &[u8]) -> Option<Prefixes> {
        if text.is_empty() {
            return Some(Prefixes::default());
        }
        let entries = text.strip_suffix(b"\0")?.split(|byte| *byte == 0);
        let places = entries.map(|entry| {
            let (kind, dir) = entry.split_first()?;
            let terrain =
                [Terrain::Local, Terrain::Owned, Terrain::Closed].into_iter().find(|t| letter(*t) == *kind)?;
            let whole = dir.starts_with(b"/") && dir.ends_with(b"/");
            whole.then(|| Place { dir: dir.to_vec(), terrain, index: 0 })
        });
        Some(Prefixes { places: Places::new(places.collect::<Option<_>>()?) })
    }

    /// Whether a directory as from getcwd(3) lies on an owned mount. No system call.
    pub fn cwd_is_owned(&self, cwd: &Path) -> bool {
        self.places.around(&dir_of(cwd)).is_some_and(|place| place.terrain == Terrain::Owned)
    }

    /// Whether one word of an argv could name something on an owned mount:
    /// the word itself, what follows its first `=`, what follows a short
    /// option's letter, or what begins at a `/` in it. `cwd` as from getcwd(3).
    ///
    /// A word that begins with `-` is taken for an option. A `/` in the middle
    /// of a name begins a path only in an option (`-xzf/mnt/a`), or when the
    /// name after it leads to an owned mount by its text alone (`r/mnt/logs/x`);
    /// otherwise each word with slashes would cost a lookup per slash.
    pub fn may_touch(&self, word: &[u8], cwd: &Path) -> bool {
        if self.places.iter().all(|place| place.terrain != Terrain::Owned) {
            return false;
        }
        let start = Position::at(&self.places, cwd);
        if start.terrain == Terrain::Owned {
            return true;
        }
        let mut lookups = 0;
        self.candidates(word).any(|path| {
            lookups += 1;
            lookups > MAX_LOOKUPS || self.reaches(&start, path)
        })
    }

    fn reaches(&self, start: &Position, path: &[u8]) -> bool {
        if path.is_empty() || path.contains(&0) {
            return false;
        }
        let mut position = start.clone();
        position.walk(&self.places, path, LastLink::Follow);
        position.end == End::Open && position.terrain == Terrain::Owned
    }

    /// Every part of a word that may be a path.
    fn candidates<'w>(&self, word: &'w [u8]) -> impl Iterator<Item = &'w [u8]> {
        let option = word.starts_with(b"-");
        let whole = (!option).then_some(word);
        let short = if option && word.get(1) != Some(&b'-') { word.get(2..) } else { None };
        let value = word.iter().position(|byte| *byte == b'=').map(|equals| &word[equals + 1..]);
        // An absolute path is taken from its slash below, whatever stands before it.
        let relative = [whole, short, value].into_iter().flatten().filter(|path| !path.starts_with(b"/"));
        relative.chain(self.absolute(word, option).map(|slash| &word[slash..]))
    }

    /// Where an absolute path may begin in a word.
    fn absolute(&self, word: &[u8], option: bool) -> impl Iterator<Item = usize> {
        word.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(slash, _)| slash).filter(move |slash| {
            let Some(before) = slash.checked_sub(1).map(|index| word[index]) else { return true };
            before != b'/' && (option || !is_of_a_name(before) || self.begins_like_an_owned(&word[*slash..]))
        })
    }

    /// Whether the first component is that of an owned mount point.
    fn begins_like_an_owned(&self, path: &[u8]) -> bool {
        let slashes = path.iter().take_while(|byte| **byte == b'/').count();
        let path = &path[slashes.saturating_sub(1)..];
        let end = path[1..].iter().position(|byte| *byte == b'/').map_or(path.len(), |slash| 1 + slash);
        let first = &path[..end];
        let mut owned = self.places.iter().filter(|place| place.terrain == Terrain::Owned);
        owned.any(|place| place.dir.starts_with(first) && place.dir.get(end) == Some(&b'/'))
    }
}

fn letter(terrain: Terrain) -> u8 {
    match terrain {
        Terrain::Local => b'l',
        Terrain::Owned => b'o',
        Terrain::Closed => b'c',
    }
}

/// Letters, digits and what file names commonly hold: a slash after one of these
/// goes on with a path, after anything else (`:`, `,`, a quote) it may begin one.
fn is_of_a_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"._-".contains(&byte) || byte >= 0x80
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    fn prefixes(places: &[(&str, Terrain)]) -> Prefixes {
        let place =
            |(dir, terrain): &(&str, Terrain)| Place { dir: dir.as_bytes().to_vec(), terrain: *terrain, index: 0 };
        Prefixes { places: Places::new(places.iter().map(place).collect()) }
    }

    /// Mount points that do not exist: whatever looked below one would find nothing.
    fn owned() -> Prefixes {
        prefixes(&[("/posh-t/logs/", Terrain::Owned), ("/posh-t/dead/", Terrain::Closed), ("/proc/", Terrain::Closed)])
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
        for word in ["link", "./link", "link/x", "B/link", "-flink", "--file=link", "if=link", "/posh-t/logs"] {
            check(word, true);
        }
        for word in ["host:B/link", "@B/link", "a,B/link", "-xzfB/link", "-I=B/link", "\"B/link", "x=/posh-t/logs/a"] {
            check(word, true);
        }
        for word in ["r/posh-t/logs/a", "r//posh-t/logs/a", "//posh-t/./logs/../logs/", "../../../../../../posh-t/logs"]
        {
            check(word, true);
        }
        for word in ["", "-", "--", "-r", "-rn", "foo", "s/a/b/", "--colour=auto", "/posh-t", "/posh-t/log", "a=b"] {
            check(word, false);
        }
        for word in ["dead", "/posh-t/dead/a/../../logs/x", "/proc/self/root/mnt", "/posh-t/logs-2", "a\0b", "linkx"] {
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
        let place = |dir: &[u8], terrain| Place { dir: dir.to_vec(), terrain, index: 0 };
        let logs = place(b"/posh-t/logs/", Terrain::Owned);
        let table = Places::new(vec![logs.clone(), place(&outer, Terrain::Closed), place(&inner, Terrain::Local)]);
        assert!(Prefixes::of(&table, &Places::default()).may_touch(b"link", &base));
        let without = Places::new(vec![logs, place(&outer, Terrain::Closed)]);
        assert!(!Prefixes::of(&without, &Places::default()).may_touch(b"link", &base));
    }

    #[test]
    fn without_an_owner_nothing_may() {
        assert!(!Prefixes::default().may_touch(b"/posh-t/logs/a", Path::new("/")));
    }

    #[test]
    fn the_text_form() {
        let check = |text: &[u8], expect: Option<usize>| {
            assert_eq!(Prefixes::decode(text).map(|prefixes| prefixes.owned().len()), expect, "{text:?}");
        };
        check(b"", Some(0));
        check(b"o/a/\0", Some(1));
        check(b"o/a/\0c/b/\0o/a\xff\n/\0", Some(2));
        check(b"o/a/", None);
        check(b"o/a\0", None);
        check(b"oa/\0", None);
        check(b"x/a/\0", None);
        check(b"\0", None);
        assert_eq!(Prefixes::decode(&owned().encode()), Some(owned()));
        assert_eq!(owned().owned(), [Path::new("/posh-t/logs")]);
        assert!(Prefixes::decode(b"o/a\xff/\0").is_some_and(|p| p.owned()[0].as_os_str().as_bytes() == b"/a\xff"));
    }
}
