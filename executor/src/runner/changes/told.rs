//! Reported changes in watched trees, directory by directory, as in the contract.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use nix::sys::stat::lstat;
use posh_proto::executor::{Attributes, ChangedDirectory, NamedKind};

use crate::runner::{ids, listing};

/// Changed directories; `incomplete` if there may be more.
#[derive(Debug, Default, PartialEq)]
pub struct DirectoryChanges {
    pub directories: BTreeMap<PathBuf, Changed>,
    pub incomplete: bool,
}

/// Changes in one directory.
#[derive(Debug, Default, PartialEq)]
pub struct Changed {
    pub names: bool,
    pub written: Vec<OsString>,
    pub removed: Vec<OsString>,
    /// Those of `written` that are directories or links now, with the links' targets.
    pub kinds: Vec<(OsString, Option<OsString>)>,
    /// How the `written` are now.
    pub written_now: Vec<Attributes>,
    /// How a directory is whose only changes are new files in place of old ones.
    pub now: Option<Attributes>,
    /// The directory's owner after the run, if it may be told.
    pub owner: Option<u32>,
}

impl DirectoryChanges {
    pub fn of(&mut self, directory: &Path) -> &mut Changed {
        self.directories.entry(directory.to_owned()).or_default()
    }

    /// Looks up each directory's owner: the workstation sets it to make its mount forget the
    /// listing.
    ///
    /// Invariant: only root and the run's own user are told. By then another directory may have
    /// the name, whose owner is set: nobody else gets anything that way.
    pub fn look_up_owners(&mut self) {
        for (path, changed) in &mut self.directories {
            let found = lstat(path).ok().filter(listing::is_directory);
            changed.owner = found.map(|found| found.st_uid).filter(|owner| ids::is_told(*owner));
        }
    }

    /// Converts them to the contract's form.
    pub fn message(&self) -> Vec<ChangedDirectory> {
        let bytes =
            |names: &[OsString]| names.iter().map(|name| name.as_bytes().to_vec().into()).collect();
        let bytes_of = |name: &OsString| name.as_bytes().to_vec().into();
        let kind = |(name, link): &(OsString, Option<OsString>)| NamedKind {
            name: bytes_of(name),
            link: link.as_ref().map(bytes_of).unwrap_or_default(),
        };
        let directory = |(path, changed): (&PathBuf, &Changed)| ChangedDirectory {
            path: path.as_os_str().as_bytes().to_vec().into(),
            names_changed: changed.names,
            written: bytes(&changed.written),
            removed: bytes(&changed.removed),
            kinds: changed.kinds.iter().map(kind).collect(),
            now: changed.now,
            written_now: changed.written_now.clone(),
            owner: changed.owner,
        };
        self.directories.iter().map(directory).collect()
    }
}
