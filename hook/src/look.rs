//! The quick look: decides from a short list of paths whether a word of an argv could reach an
//! owned mount, and errs towards yes.
//!
//! It resolves paths as the gateway's whole table does, so that a no is a no for the gateway too. A
//! word that is a name in the working directory costs one readlink(2); an option costs none or one.

use crate::{
    places::Terrain,
    walk::{self, LookupOutcome, Walk},
};

pub use crate::{
    arena::Arena,
    places::{Places, Terrain as PlaceKind},
};

/// Bytes of arena that a look needs.
pub const ARENA_BYTES: usize = walk::ARENA_BYTES;

/// Limit of path lookups for one word. A word with more of them is some kind of script, and asking
/// the gateway is cheaper than looking further.
pub const MAX_LOOKUPS: usize = 32;

/// The working directory and the places to test against.
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

    /// Returns true if the working directory is on an owned mount. Makes no system call.
    #[must_use]
    pub fn cwd_is_owned(&self) -> bool {
        is_owned(self.places, self.cwd)
    }

    /// Returns true if a word of an argv could name something on an owned mount: as a whole, after
    /// its first `=`, after a short option's letter, or from a `/` in it.
    ///
    /// A word that begins with `-` is taken for an option. A `/` in the middle of a name begins a
    /// path only in an option (`-xzf/mnt/a`), or if its text alone leads to an owned mount
    /// (`r/mnt/logs/x`); otherwise each word with slashes would cost a lookup per slash. If the
    /// arena is full, the answer is yes.
    #[must_use]
    pub fn may_touch(&self, word: &[u8], arena: &mut Arena<'_>) -> bool {
        if !self.places.has_owned() {
            return false;
        }
        if self.cwd_is_owned() {
            return true;
        }
        let mut lookups = 0;
        let mut may_reach = |path: &[u8]| {
            lookups += 1;
            lookups > MAX_LOOKUPS || self.reaches(path, arena)
        };
        let option = word.starts_with(b"-");
        relative(word, option).into_iter().flatten().any(&mut may_reach)
            || (0..word.len()).any(|at| self.absolute(word, at, option).is_some_and(&mut may_reach))
    }

    fn reaches(&self, path: &[u8], arena: &mut Arena<'_>) -> bool {
        if path.is_empty() || path.contains(&0) {
            return false;
        }
        let Some(mut walk) = Walk::from(self.places, self.cwd, arena.scope()) else { return true };
        match walk.along(path) {
            LookupOutcome::At(terrain) => terrain == Terrain::Owned,
            LookupOutcome::Missing => false,
            LookupOutcome::TooLong => true,
        }
    }

    /// The rest of the word from `at`, if an absolute path may begin there.
    #[inline(never)]
    fn absolute<'w>(&self, word: &'w [u8], at: usize, option: bool) -> Option<&'w [u8]> {
        let path = word.get(at..).filter(|path| path.starts_with(b"/"))?;
        let Some(before) = at.checked_sub(1).and_then(|index| word.get(index)) else {
            return Some(path);
        };
        let begins = *before != b'/'
            && (option || !is_of_a_name(*before) || self.begins_like_an_owned(path));
        begins.then_some(path)
    }

    /// Returns true if the first component is that of an owned mount point.
    fn begins_like_an_owned(&self, path: &[u8]) -> bool {
        let slashes = path.iter().take_while(|byte| **byte == b'/').count();
        let path = path.get(slashes.saturating_sub(1)..).unwrap_or_default();
        let below = path.get(1..).unwrap_or_default();
        let end = below.iter().position(|byte| *byte == b'/').map_or(path.len(), |slash| 1 + slash);
        let first = path.get(..end).unwrap_or_default();
        self.places.owned().any(|dir| dir.starts_with(first) && dir.get(end) == Some(&b'/'))
    }
}

/// The parts of a word that may be relative paths.
#[inline(never)]
fn relative(word: &[u8], option: bool) -> [Option<&[u8]>; 3] {
    let whole = (!option).then_some(word);
    let short = if option && word.get(1) != Some(&b'-') { word.get(2..) } else { None };
    let value =
        word.iter().position(|byte| *byte == b'=').and_then(|equals| word.get(equals + 1..));
    // An absolute path is taken from its slash, whatever stands before it.
    [whole, short, value].map(|part| part.filter(|path| !path.starts_with(b"/")))
}

/// Returns true if a path without symlinks, as the kernel prints it, is on an owned mount.
#[must_use]
#[inline(never)]
pub fn is_owned(places: Places<'_>, path: &[u8]) -> bool {
    let holds = |dir: &[u8]| path.starts_with(dir) || dir.strip_suffix(b"/") == Some(path);
    let holding = places.iter().filter(|(_, dir)| holds(dir));
    holding.max_by_key(|(_, dir)| dir.len()).is_some_and(|(terrain, _)| terrain == Terrain::Owned)
}

/// Returns true for letters, digits and other bytes common in file names: a slash after one of
/// these continues a path, after any other (`:`, `,`, a quote) it may begin one.
fn is_of_a_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"._-".contains(&byte) || byte >= 0x80
}
