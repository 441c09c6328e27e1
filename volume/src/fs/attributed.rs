//! Names of a directory together with the attributes of their files, for a kernel that is told of
//! both at once. An answer can't say that the attributes of a name are not known: what is missing
//! is looked up here, before anything is told.

use std::{ffi::OsStr, sync::Arc};

use tokio::task::JoinSet;

use super::{Name, Volume};
use crate::store::{Caller, Entry, Errno};

/// Looked up at the same time: what the kernel takes at once has seldom more that are not
/// remembered.
const LOOKED_UP_AT_ONCE: usize = 64;

/// Names of one answer: what a program takes at once (32 KiB, at 160 bytes each) has fewer.
const NAMES_AT_ONCE: usize = 256;

impl Name {
    /// Neither `.` nor `..`, which the kernel knows, and of no known attributes.
    fn lacks_attributes(&self) -> bool {
        self.entry.is_none() && self.name != OsStr::new(".") && self.name != OsStr::new("..")
    }
}

impl Volume {
    /// As [`Self::read_directory`], with attributes of every file that the caller may look at. None
    /// at all: the end.
    ///
    /// # Errors
    /// Of reading the directory.
    pub async fn read_directory_with_attributes(
        self: &Arc<Self>,
        open: u64,
        mut offset: u64,
    ) -> Result<Vec<Name>, Errno> {
        loop {
            let mut names = self.read_names(open, offset, NAMES_AT_ONCE).await?;
            let Some(last) = names.last().map(|name| name.next) else { return Ok(names) };
            let answers = self.look_up_missing(open, &names).await?;
            let mut missing = names.iter().enumerate().filter(|(_, name)| name.lacks_attributes());
            // The rest is for the next part.
            let end = missing.nth(answers.len()).map_or(names.len(), |(place, _)| place);
            let last = if end < names.len() { names[end - 1].next } else { last };
            names.truncate(end);
            let mut gone = Vec::new();
            for (place, found) in answers {
                match found {
                    Ok(entry) => names[place].entry = Some(entry),
                    Err(Errno::ENOENT) => gone.push(names[place].next),
                    // It has a name, and nothing else for this caller.
                    Err(_) => {}
                }
            }
            names.retain(|name| !gone.contains(&name.next));
            if !names.is_empty() {
                return Ok(names);
            }
            offset = last;
        }
    }

    /// By their places.
    async fn look_up_missing(
        self: &Arc<Self>,
        open: u64,
        names: &[Name],
    ) -> Result<Vec<(usize, Result<Entry, Errno>)>, Errno> {
        let (parent, caller): (u64, Caller) = self.whose_directory(open)?;
        let missing = names.iter().enumerate().filter(|(_, name)| name.lacks_attributes());
        let mut asked = JoinSet::new();
        for (place, name) in missing.take(LOOKED_UP_AT_ONCE) {
            let (volume, caller, name) = (Arc::clone(self), caller.clone(), name.name.clone());
            asked.spawn(async move { (place, volume.lookup(&caller, parent, &name).await) });
        }
        Ok(asked.join_all().await)
    }
}
