//! Path lookup as the kernel does it (path_resolution(7)), but only as far down
//! as local disks go: readlink(2) above mount points, nothing below them. The same walk as
//! fs-mapper's, without allocation and without the path that it comes to.
//!
//! What is known without asking: a directory that holds a mount point, or that
//! getcwd(3) named, is a real one. Everything else on a local disk costs one
//! readlink, which also tells whether it exists.

use crate::{
    places::{Found, Places, Terrain},
    sys,
    text::{Full, Text},
};

/// As many as Linux follows in one lookup (MAXSYMLINKS).
const MAX_LINKS: u8 = 40;
/// The kernel's longest path (PATH_MAX).
const PATH_BYTES: usize = 4096;
/// What is still to be walked: a symlink's target and the rest of the path that led to it.
const AHEAD_BYTES: usize = 2 * PATH_BYTES;

/// Where a lookup came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// As far as can be told without touching a mount, it is there, and this is the ground.
    At(Terrain),
    /// A component does not exist, is no directory, or may not be searched.
    Missing,
    /// Longer than the buffers.
    TooLong,
}

/// A lookup on its way.
pub(crate) struct Walk<'a> {
    places: Places<'a>,
    /// Real directories with a slash at the end; the last one may be a file.
    dir: Text<{ PATH_BYTES + 2 }>,
    terrain: Terrain,
    /// `dir` is known to be a directory.
    is_dir: bool,
    links: u8,
    fits: bool,
}

/// Why a lookup does not go on.
struct Stop(Outcome);

impl From<Full> for Stop {
    fn from(_: Full) -> Self {
        Self(Outcome::TooLong)
    }
}

impl<'a> Walk<'a> {
    /// From a directory as getcwd(3) names it.
    pub(crate) fn from(places: Places<'a>, cwd: &[u8]) -> Self {
        let mut dir = Text::new();
        let slash: &[u8] = if cwd.ends_with(b"/") { b"" } else { b"/" };
        let fits = dir.push(cwd).and_then(|()| dir.push(slash)).is_ok();
        let terrain = places.around(dir.as_bytes());
        Self { places, dir, terrain, is_dir: true, links: 0, fits }
    }

    /// Walks a path: from the root if it is absolute.
    pub(crate) fn along(mut self, path: &[u8]) -> Outcome {
        match self.walk(path) {
            Ok(()) if !self.fits => Outcome::TooLong,
            Ok(()) => Outcome::At(self.terrain),
            Err(Stop(outcome)) => outcome,
        }
    }

    fn walk(&mut self, path: &[u8]) -> Result<(), Stop> {
        let mut ahead = Text::<AHEAD_BYTES>::of(&[path])?;
        let mut at = 0;
        self.begin(path)?;
        loop {
            let rest = ahead.as_bytes().get(at..).unwrap_or_default();
            let Some(start) = rest.iter().position(|byte| *byte != b'/') else { return Ok(()) };
            let rest = rest.get(start..).unwrap_or_default();
            let end = rest.iter().position(|byte| *byte == b'/').unwrap_or(rest.len());
            let (name, rest) = rest.split_at_checked(end).unwrap_or_default();
            at += start + end;
            match name {
                b"." => {}
                b".." => self.up()?,
                name => {
                    if let Some(target) = self.down(name)? {
                        self.begin(target.as_bytes())?;
                        ahead = Text::of(&[target.as_bytes(), b"/", rest])?;
                        at = 0;
                    }
                }
            }
        }
    }

    /// An absolute path begins at the root.
    fn begin(&mut self, path: &[u8]) -> Result<(), Stop> {
        if path.starts_with(b"/") {
            self.dir.truncate(0);
            self.dir.push(b"/")?;
            self.fits = true;
            self.is_dir = true;
            self.terrain = self.places.around(b"/");
        }
        if self.fits { Ok(()) } else { Err(Stop(Outcome::TooLong)) }
    }

    fn up(&mut self) -> Result<(), Stop> {
        if !self.is_dir && !sys::is_directory(self.dir.as_bytes()) {
            return Err(Stop(Outcome::Missing));
        }
        self.is_dir = true;
        let name_end = self.dir.len().saturating_sub(1);
        let above = self.dir.as_bytes().get(..name_end).and_then(|dir| dir.iter().rposition(|byte| *byte == b'/'));
        if let Some(slash) = above {
            self.dir.truncate(slash + 1);
            self.terrain = self.places.around(self.dir.as_bytes());
        }
        Ok(())
    }

    /// One component; what it leads to if it is a symlink.
    fn down(&mut self, name: &[u8]) -> Result<Option<Text<PATH_BYTES>>, Stop> {
        let above = self.dir.len();
        self.dir.push(name)?;
        self.dir.push(b"/")?;
        match self.places.at(self.dir.as_bytes()) {
            Found::Here(terrain) => {
                self.terrain = terrain;
                self.is_dir = true;
            }
            Found::Above => self.is_dir = true,
            // Nothing below a mount point is looked at: it decides.
            Found::Unknown if self.terrain != Terrain::Local => return Err(Stop(Outcome::At(self.terrain))),
            Found::Unknown => {
                self.is_dir = false;
                let target = self.link()?;
                if target.is_some() {
                    self.is_dir = true;
                    self.dir.truncate(above);
                }
                return Ok(target);
            }
        }
        Ok(None)
    }

    fn link(&mut self) -> Result<Option<Text<PATH_BYTES>>, Stop> {
        let name = self.dir.as_bytes().strip_suffix(b"/").unwrap_or_default();
        match sys::read_link(name) {
            Ok(_) if self.links == MAX_LINKS => Err(Stop(Outcome::Missing)),
            Ok(target) => {
                self.links += 1;
                Ok(Some(target))
            }
            // It is there and is no symlink.
            Err(sys::EINVAL) => Ok(None),
            Err(_) => Err(Stop(Outcome::Missing)),
        }
    }
}
