//! The quick look: could this word of an argv reach an owned mount? It knows a
//! short list of paths only, and errs towards "perhaps".
//!
//! It walks as the gateway's whole table does, so what it answers "no" to is
//! local for the gateway too. A word that is a name in the working directory costs one
//! readlink(2); one that is an option costs nothing or one.

use crate::{
    places::Terrain,
    walk::{Outcome, Walk},
};

pub use crate::places::{Places, Terrain as PlaceKind};

/// Paths that are looked up for one word; a word with more of them is a script
/// of some kind, and asking the gateway is cheaper than looking further.
pub const MAX_LOOKUPS: usize = 32;

/// From where, and among which places.
#[derive(Debug, Clone, Copy)]
pub struct Look<'a> {
    places: Places<'a>,
    cwd: &'a [u8],
}

impl<'a> Look<'a> {
    /// `cwd` as from getcwd(3).
    #[must_use]
    pub fn new(places: Places<'a>, cwd: &'a [u8]) -> Self {
        Self { places, cwd }
    }

    /// Whether the working directory lies on an owned mount. No system call.
    #[must_use]
    pub fn cwd_is_owned(&self) -> bool {
        is_owned(self.places, self.cwd)
    }

    /// Whether one word of an argv could name something on an owned mount:
    /// the word itself, what follows its first `=`, what follows a short
    /// option's letter, or what begins at a `/` in it.
    ///
    /// A word that begins with `-` is taken for an option. A `/` in the middle
    /// of a name begins a path only in an option (`-xzf/mnt/a`), or when the
    /// name after it leads to an owned mount by its text alone (`r/mnt/logs/x`);
    /// otherwise each word with slashes would cost a lookup per slash.
    #[must_use]
    pub fn may_touch(&self, word: &[u8]) -> bool {
        if self.places.owned().next().is_none() {
            return false;
        }
        if self.cwd_is_owned() {
            return true;
        }
        let mut lookups = 0;
        self.candidates(word).any(|path| {
            lookups += 1;
            lookups > MAX_LOOKUPS || self.reaches(path)
        })
    }

    fn reaches(&self, path: &[u8]) -> bool {
        if path.is_empty() || path.contains(&0) {
            return false;
        }
        match Walk::from(self.places, self.cwd).along(path) {
            Outcome::At(terrain) => terrain == Terrain::Owned,
            Outcome::Missing => false,
            Outcome::TooLong => true,
        }
    }

    /// Every part of a word that may be a path.
    fn candidates<'w>(&self, word: &'w [u8]) -> impl Iterator<Item = &'w [u8]> {
        let option = word.starts_with(b"-");
        let whole = (!option).then_some(word);
        let short = if option && word.get(1) != Some(&b'-') { word.get(2..) } else { None };
        let value = word.iter().position(|byte| *byte == b'=').and_then(|equals| word.get(equals + 1..));
        // An absolute path is taken from its slash below, whatever stands before it.
        let relative = [whole, short, value].into_iter().flatten().filter(|path| !path.starts_with(b"/"));
        relative.chain(self.absolute(word, option))
    }

    /// What begins where an absolute path may begin in a word.
    fn absolute<'w>(&self, word: &'w [u8], option: bool) -> impl Iterator<Item = &'w [u8]> {
        let slashes = word.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(slash, _)| slash);
        slashes.filter_map(|slash| word.get(slash..).map(|path| (slash, path))).filter_map(move |(slash, path)| {
            let Some(before) = slash.checked_sub(1).and_then(|index| word.get(index)) else { return Some(path) };
            let begins = *before != b'/' && (option || !is_of_a_name(*before) || self.begins_like_an_owned(path));
            begins.then_some(path)
        })
    }

    /// Whether the first component is that of an owned mount point.
    fn begins_like_an_owned(&self, path: &[u8]) -> bool {
        let slashes = path.iter().take_while(|byte| **byte == b'/').count();
        let path = path.get(slashes.saturating_sub(1)..).unwrap_or_default();
        let below = path.get(1..).unwrap_or_default();
        let end = below.iter().position(|byte| *byte == b'/').map_or(path.len(), |slash| 1 + slash);
        let first = path.get(..end).unwrap_or_default();
        self.places.owned().any(|dir| dir.starts_with(first) && dir.get(end) == Some(&b'/'))
    }
}

/// Whether a path without symlinks, as the kernel prints it, lies on an owned mount.
#[must_use]
pub fn is_owned(places: Places<'_>, path: &[u8]) -> bool {
    let holds = |dir: &[u8]| path.starts_with(dir) || dir.strip_suffix(b"/") == Some(path);
    let holding = places.iter().filter(|(_, dir)| holds(dir));
    holding.max_by_key(|(_, dir)| dir.len()).is_some_and(|(terrain, _)| terrain == Terrain::Owned)
}

/// Letters, digits and what file names commonly hold: a slash after one of these
/// goes on with a path, after anything else (`:`, `,`, a quote) it may begin one.
fn is_of_a_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"._-".contains(&byte) || byte >= 0x80
}
