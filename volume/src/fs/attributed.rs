//! READDIRPLUS: names of a directory with the attributes of their files. A reply can't say that
//! attributes are unknown: so missing ones are looked up before the reply.

use std::{ffi::OsStr, sync::Arc};

use tokio::task::JoinSet;

use super::{Name, Volume};
use crate::store::{Caller, Entry, Errno, NameIn};

/// Limit of concurrent look-ups: one reply seldom has more names without cached attributes.
const LOOKED_UP_AT_ONCE: usize = 64;

/// Limit of names in one reply: a program's buffer (32 KiB, at 160 bytes each) holds fewer.
const NAMES_AT_ONCE: usize = 256;

impl Name {
    /// Returns true if the attributes are missing, and the name is neither `.` nor `..`, whose
    /// attributes the kernel knows.
    fn lacks_attributes(&self) -> bool {
        self.entry.is_none() && self.name != OsStr::new(".") && self.name != OsStr::new("..")
    }
}

impl Volume {
    /// Like [`Self::read_directory`], with the attributes of every file that the caller may stat.
    /// An empty result is the end of the directory.
    ///
    /// # Errors
    /// Those of reading the directory.
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
            // Cut off before the first name that was not looked up.
            let end = missing.nth(answers.len()).map_or(names.len(), |(place, _)| place);
            let last = if end < names.len() { names[end - 1].next } else { last };
            names.truncate(end);
            let mut gone = Vec::new();
            for (place, found) in answers {
                match found {
                    Ok(entry) => names[place].entry = Some(entry),
                    Err(Errno::ENOENT) => gone.push(names[place].next),
                    // The caller may see the name, but not stat the file.
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

    /// Looks up names without attributes, up to [`LOOKED_UP_AT_ONCE`]; returns them by index.
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
            asked.spawn(async move {
                let at = NameIn { parent, name: &name };
                (place, volume.lookup(&caller, at).await)
            });
        }
        Ok(asked.join_all().await)
    }
}
