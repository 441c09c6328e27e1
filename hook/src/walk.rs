//! Path lookup as in the kernel (path_resolution(7)), limited to local disks: readlink(2) above
//! mount points, no access below them. Like fs-mapper's lookup, but without allocation and without
//! the resulting path.
//!
//! A directory that contains a mount point, or that getcwd(3) named, is known to be a real one. Any
//! other component on a local disk costs one readlink, which also shows whether it exists.

use crate::{
    arena::Arena,
    places::{PlaceLookup, Places, Terrain},
    sys,
    text::{Full, Text, copy},
};

/// Most symlinks that Linux follows in one lookup (MAXSYMLINKS).
const MAX_LINKS: u8 = 40;
/// The kernel's longest path (PATH_MAX).
const PATH_BYTES: usize = 4096;
/// Bytes of the path that is still to be walked: a symlink's target and the rest of the path that
/// led to it.
const AHEAD_BYTES: usize = 2 * PATH_BYTES;
/// Bytes of a directory's path, a slash and a NUL.
const DIR_BYTES: usize = PATH_BYTES + 2;

/// Bytes of arena that a lookup needs.
pub(crate) const ARENA_BYTES: usize = DIR_BYTES + AHEAD_BYTES + PATH_BYTES;

/// Result of a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LookupOutcome {
    /// The path exists, as far as that is known without touching a mount, on this kind of place.
    At(Terrain),
    /// A component does not exist, is no directory, or may not be searched.
    Missing,
    /// The path is longer than the buffers.
    TooLong,
}

/// State of a lookup.
pub(crate) struct Walk<'a> {
    places: Places<'a>,
    arena: Arena<'a>,
    /// Path of real directories, with a slash at the end; the last component may be a file.
    dir: Text<&'a mut [u8]>,
    terrain: Terrain,
    /// `dir` is known to be a directory.
    is_dir: bool,
    links: u8,
    fits: bool,
}

/// End of a lookup, with its result.
struct Stop(LookupOutcome);

impl From<Full> for Stop {
    fn from(_: Full) -> Self {
        Self(LookupOutcome::TooLong)
    }
}

impl<'a> Walk<'a> {
    /// A lookup that starts in a directory, as getcwd(3) names it; `None` when the arena is full.
    pub(crate) fn from(places: Places<'a>, cwd: &[u8], mut arena: Arena<'a>) -> Option<Self> {
        let mut dir = arena.text(DIR_BYTES)?;
        let slash: &[u8] = if cwd.ends_with(b"/") { b"" } else { b"/" };
        let fits = dir.push(cwd).and_then(|()| dir.push(slash)).is_ok();
        let terrain = places.around(dir.as_bytes());
        Some(Self { places, arena, dir, terrain, is_dir: true, links: 0, fits })
    }

    /// Walks a path; an absolute one from the root.
    pub(crate) fn along(&mut self, path: &[u8]) -> LookupOutcome {
        match self.walk(path) {
            Ok(()) if !self.fits => LookupOutcome::TooLong,
            Ok(()) => LookupOutcome::At(self.terrain),
            Err(Stop(outcome)) => outcome,
        }
    }

    fn walk(&mut self, path: &[u8]) -> Result<(), Stop> {
        self.begin(path)?;
        let rest = self.until_link(path)?;
        if rest.is_empty() { Ok(()) } else { self.through_links(rest) }
    }

    /// Walks up to the first component that is a symlink; returns the rest of the path from that
    /// component.
    fn until_link<'p>(&mut self, path: &'p [u8]) -> Result<&'p [u8], Stop> {
        let mut rest = path;
        loop {
            let Some(start) = rest.iter().position(|byte| *byte != b'/') else { return Ok(b"") };
            rest = rest.get(start..).unwrap_or_default();
            let (name, behind) = split(rest);
            match name {
                b"." => {}
                b".." => self.up()?,
                name if self.down(name)? => return Ok(rest),
                _ => {}
            }
            rest = behind;
        }
    }

    /// Like [`Walk::until_link`], but through symlinks. The path begins with one. A function of its
    /// own, since few paths need the buffers.
    #[inline(never)]
    fn through_links(&mut self, path: &[u8]) -> Result<(), Stop> {
        let (Some(ahead), Some(target)) =
            (self.arena.buffer(AHEAD_BYTES), self.arena.buffer(PATH_BYTES))
        else {
            return Err(Stop(LookupOutcome::TooLong));
        };
        // The path ahead is at the end of the buffer, so that a link's target can be put before the
        // rest.
        let mut at = AHEAD_BYTES.checked_sub(path.len()).ok_or(Full)?;
        copy(path, ahead.get_mut(at..).ok_or(Full)?);
        loop {
            let (name, rest) = split(ahead.get(at..).unwrap_or_default());
            let rest_len = rest.len();
            let count = self.link(name, target)?;
            let target = target.get(..count).unwrap_or_default();
            self.begin(target)?;
            at = AHEAD_BYTES.checked_sub(count + 1 + rest_len).ok_or(Full)?;
            let (slash, to) =
                ahead.get_mut(at..=at + count).and_then(<[u8]>::split_last_mut).ok_or(Full)?;
            copy(target, to);
            *slash = b'/';
            let left = self.until_link(ahead.get(at..).unwrap_or_default())?.len();
            if left == 0 {
                return Ok(());
            }
            at = AHEAD_BYTES - left;
        }
    }

    /// Returns to the root if the path is absolute.
    fn begin(&mut self, path: &[u8]) -> Result<(), Stop> {
        if path.starts_with(b"/") {
            self.dir.truncate(0);
            self.dir.push(b"/")?;
            self.fits = true;
            self.is_dir = true;
            self.terrain = self.places.around(b"/");
        }
        if self.fits { Ok(()) } else { Err(Stop(LookupOutcome::TooLong)) }
    }

    fn up(&mut self) -> Result<(), Stop> {
        if !self.is_dir && !self.dir.with_c_str(b".", sys::is_in_directory).unwrap_or(false) {
            return Err(Stop(LookupOutcome::Missing));
        }
        self.is_dir = true;
        let name_end = self.dir.len().saturating_sub(1);
        let above = self
            .dir
            .as_bytes()
            .get(..name_end)
            .and_then(|dir| dir.iter().rposition(|byte| *byte == b'/'));
        if let Some(slash) = above {
            self.dir.truncate(slash + 1);
            self.terrain = self.places.around(self.dir.as_bytes());
        }
        Ok(())
    }

    /// Enters one component; returns true if it is a symlink, which is not followed.
    fn down(&mut self, name: &[u8]) -> Result<bool, Stop> {
        let above = self.dir.len();
        self.dir.push(name)?;
        self.dir.push(b"/")?;
        match self.places.at(self.dir.as_bytes()) {
            PlaceLookup::Here(terrain) => {
                self.terrain = terrain;
                self.is_dir = true;
            }
            PlaceLookup::Above => self.is_dir = true,
            // The mount point decides; no component below it is accessed.
            PlaceLookup::Unknown if self.terrain != Terrain::Local => {
                return Err(Stop(LookupOutcome::At(self.terrain)));
            }
            PlaceLookup::Unknown => {
                self.is_dir = false;
                if self.is_link()? {
                    self.is_dir = true;
                    self.dir.truncate(above);
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Returns true if `dir`, which is known by name only, is a symlink.
    fn is_link(&mut self) -> Result<bool, Stop> {
        let end = self.dir.len().saturating_sub(1);
        // The NUL takes the slash's place, so that nothing is copied.
        self.dir.truncate(end);
        self.dir.push(b"\0")?;
        let found = self.dir.as_c_str().map_or(Err(sys::EINVAL), sys::is_link);
        self.dir.truncate(end);
        self.dir.push(b"/")?;
        found.map_err(|_| Stop(LookupOutcome::Missing))
    }

    /// Reads the target of a symlink in `dir`; returns the number of bytes in the buffer.
    fn link(&mut self, name: &[u8], target: &mut [u8]) -> Result<usize, Stop> {
        let count = self.dir.with_c_str(name, |path| sys::read_link(path, target)).ok_or(Full)?;
        if self.links == MAX_LINKS {
            return Err(Stop(LookupOutcome::Missing));
        }
        self.links += 1;
        count.map_err(|_| Stop(LookupOutcome::Missing))
    }
}

/// Splits a path after its first component.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    let end = path.iter().position(|byte| *byte == b'/').unwrap_or(path.len());
    path.split_at_checked(end).unwrap_or_default()
}
