//! Owned mount points and other special directories, read from a session's encoding. Each place is
//! a letter for its [`Terrain`], the mount id if it is known, the path with a trailing slash, and a
//! NUL. The trailing slash makes "below" equal to "begins with".

use crate::text::decimal;

/// How a path lookup may proceed below a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Terrain {
    /// A local disk: resolve.
    Local,
    /// An executor's: touch nothing, the executor resolves the rest.
    Owned,
    /// A network or FUSE mount without owner, an automounter, /proc: touch nothing.
    Closed,
}

impl Terrain {
    /// Its letter in the encoding.
    #[must_use]
    pub const fn letter(self) -> u8 {
        match self {
            Self::Local => b'l',
            Self::Owned => b'o',
            Self::Closed => b'c',
        }
    }

    const fn of(letter: u8) -> Option<Self> {
        match letter {
            b'l' => Some(Self::Local),
            b'o' => Some(Self::Owned),
            b'c' => Some(Self::Closed),
            _ => None,
        }
    }
}

/// Result of looking a directory up among the places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlaceLookup {
    /// The directory is a place.
    Here(Terrain),
    /// Places lie below it, so it is a real directory and no symlink.
    Above,
    /// Neither.
    Unknown,
}

/// One place.
#[derive(Clone, Copy)]
struct PlaceEntry<'a> {
    terrain: Terrain,
    /// As in proc_pid_mountinfo(5); `None` where nothing is mounted yet, or it is part of another
    /// mount.
    mount: Option<u64>,
    dir: &'a [u8],
}

/// Encoded places; a few dozen, so that each query scans them all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places<'a>(&'a [u8]);

impl<'a> Places<'a> {
    /// `None` if the encoding is invalid.
    #[must_use]
    pub fn read(text: &'a [u8]) -> Option<Self> {
        let ends = text.is_empty() || text.ends_with(b"\0");
        (ends && Self::entries(text).all(|entry| entry.is_some())).then_some(Self(text))
    }

    fn entries(text: &'a [u8]) -> impl Iterator<Item = Option<PlaceEntry<'a>>> {
        let count = if text.is_empty() { 0 } else { usize::MAX };
        let text = text.strip_suffix(b"\0").unwrap_or(text);
        text.split(|byte| *byte == 0).take(count).map(|entry| {
            let (letter, rest) = entry.split_first()?;
            let (digits, dir) =
                rest.split_at_checked(rest.iter().position(|byte| *byte == b'/')?)?;
            let mount = if digits.is_empty() { None } else { Some(decimal(digits)?) };
            let terrain = Terrain::of(*letter)?;
            dir.ends_with(b"/").then_some(PlaceEntry { terrain, mount, dir })
        })
    }

    /// All places, with their paths.
    pub fn iter(self) -> impl Iterator<Item = (Terrain, &'a [u8])> {
        Self::entries(self.0).flatten().map(|entry| (entry.terrain, entry.dir))
    }

    /// Returns true if a file on the mount with this `mnt_id` (statx(2)) may be on an owned place.
    /// Needs no path.
    #[inline(never)]
    pub(crate) fn may_own(self, mount: u64) -> bool {
        let mut owned =
            Self::entries(self.0).flatten().filter(|entry| entry.terrain == Terrain::Owned);
        owned.any(|entry| entry.mount.is_none_or(|owned| owned == mount))
    }

    /// Returns true if some place is owned.
    #[inline(never)]
    pub fn has_owned(self) -> bool {
        self.owned().next().is_some()
    }

    /// Paths of the owned places.
    pub fn owned(self) -> impl Iterator<Item = &'a [u8]> {
        self.iter().filter(|(terrain, _)| *terrain == Terrain::Owned).map(|(_, dir)| dir)
    }

    /// Looks up a directory; `dir` ends in a slash, as the places do.
    #[inline(never)]
    pub(crate) fn at(self, dir: &[u8]) -> PlaceLookup {
        let mut found = PlaceLookup::Unknown;
        for (terrain, place) in self.iter() {
            if place == dir {
                return PlaceLookup::Here(terrain);
            }
            if place.starts_with(dir) {
                found = PlaceLookup::Above;
            }
        }
        found
    }

    /// Terrain of the place with the longest path that contains `dir`.
    #[inline(never)]
    pub(crate) fn around(self, dir: &[u8]) -> Terrain {
        let holding = self.iter().filter(|(_, place)| dir.starts_with(place));
        holding.max_by_key(|(_, place)| place.len()).map_or(Terrain::Local, |(terrain, _)| terrain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_share_a_prefix_are_not_below_each_other() {
        let places =
            Places::read(b"o/mnt/logs/\0c/mnt/logs-old/\0l/mnt/logs/a/\0o/mnt/logs.d/x/\0")
                .unwrap();
        let cases: &[(&str, Terrain)] = &[
            ("/mnt/logs/", Terrain::Owned),
            ("/mnt/logs/b/", Terrain::Owned),
            ("/mnt/logs/a/b/", Terrain::Local),
            ("/mnt/logs-old/b/", Terrain::Closed),
            ("/mnt/logs-ol/", Terrain::Local),
        ];
        for (dir, expected) in cases {
            assert_eq!(places.around(dir.as_bytes()), *expected, "{dir}");
        }
        assert_eq!(places.at(b"/mnt/logs.d/"), PlaceLookup::Above);
        assert_eq!(places.at(b"/mnt/log/"), PlaceLookup::Unknown);
        assert_eq!(places.at(b"/mnt/logs/a/"), PlaceLookup::Here(Terrain::Local));
        assert_eq!(places.owned().count(), 2);
    }

    #[test]
    fn only_whole_texts_are_read() {
        let check = |text: &[u8], expected: Option<usize>| {
            assert_eq!(
                Places::read(text).map(|places| places.iter().count()),
                expected,
                "{text:?}"
            );
        };
        check(b"", Some(0));
        check(b"o/a/\0c/b/\0", Some(2));
        check(b"o31/a/\0c/b/\0", Some(2));
        for text in [&b"o/a/"[..], b"o3x/a/\0", b"o/a\0", b"oa/\0", b"x/a/\0", b"\0", b"o/a/\0\0"] {
            check(text, None);
        }
    }

    #[test]
    fn mounts_are_known_by_their_numbers() {
        let may_own = |text: &'static [u8], mount| Places::read(text).unwrap().may_own(mount);
        assert!(may_own(b"o31/a/\0o32/b/\0", 32) && !may_own(b"o31/a/\0o32/b/\0", 33));
        assert!(may_own(b"o/a/\0o32/b/\0", 33), "nobody knows what will be mounted there");
        assert!(!may_own(b"l33/a/\0c/b/\0", 33) && !may_own(b"", 33));
    }
}
