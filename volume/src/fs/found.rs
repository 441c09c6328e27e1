//! Look-up by name of files whose ids the store no longer knows, since the executor has restarted
//! or has evicted them.

use std::{collections::BTreeSet, ffi::OsString};

use tokio_stream::StreamExt as _;

use super::{Volume, table::ROOT};
use crate::store::{
    Answer, Caller, Entry, Errno, FileId, Kind, NewFile, Op, Put, ReadPart, Walked,
};

/// Limit of names in one walk.
const WALKED_NAMES: usize = 32;

/// Result of looking a file up by its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// The file exists.
    There(Entry),
    /// The path is gone, or leads to another file. With the number of the topmost missing
    /// directory, if no other file has its name.
    Gone(Option<u64>),
}

/// Returns true if an error may be the connection's, so that the call's outcome is unknown.
pub(super) fn is_lost(errno: Errno) -> bool {
    matches!(errno, Errno::EIO | Errno::ETIMEDOUT | Errno::EAGAIN)
}

/// One component of a path from the root.
pub(super) struct Step {
    pub number: u64,
    pub file: FileId,
    pub name: OsString,
}

impl Volume {
    /// Looks a file up in the store by its known names.
    ///
    /// # Errors
    /// The request is lost.
    pub(super) async fn find_again(&self, caller: &Caller, number: u64) -> Result<Found, Errno> {
        let Some(way) = self.table().way_to(number) else { return Ok(Found::Gone(None)) };
        let mut from = self.store.root();
        let mut found = None;
        for steps in way.chunks(WALKED_NAMES) {
            let names = steps.iter().map(|step| step.name.clone()).collect();
            let walked = match self.ask_once(caller, Op::Walk { from, names }).await {
                Ok(Answer::Walked(walked)) => walked,
                Ok(_) => return Err(Errno::EPROTO),
                Err(Errno::ESTALE | Errno::EACCES) => return Ok(Found::Gone(None)),
                Err(errno) => return Err(errno),
            };
            for (step, entry) in steps.iter().zip(&walked.entries) {
                if entry.attributes.id != step.file {
                    return Ok(Found::Gone(None));
                }
                (from, found) = (entry.attributes.id, Some(*entry));
            }
            if let Some(missing) = steps.get(walked.entries.len()) {
                let is_free = walked.error == Some(Errno::ENOENT);
                return Ok(Found::Gone(is_free.then_some(missing.number)));
            }
        }
        Ok(found.map_or(Found::Gone(None), Found::There))
    }

    /// Looks all files of a call up in the store by their names.
    ///
    /// # Errors
    /// `ESTALE`: not all exist under their known names. Others: a request is lost, and the result
    /// is unknown.
    pub(super) async fn find_all_again(
        &self,
        caller: &Caller,
        files: &[FileId],
    ) -> Result<(), Errno> {
        let numbers: BTreeSet<u64> = {
            let table = self.table();
            files
                .iter()
                .filter_map(|file| table.number_of(*file))
                .filter(|number| *number != ROOT)
                .collect()
        };
        for number in &numbers {
            if let Found::Gone(_) = self.find_again(caller, *number).await? {
                return Err(Errno::ESTALE);
            }
        }
        if numbers.is_empty() { Err(Errno::ESTALE) } else { Ok(()) }
    }

    /// Returns the existing file of a put's name, if it has the put's kind and contents.
    ///
    /// # Errors
    /// Unknown, since a request is lost.
    pub(super) async fn found_there(
        &self,
        caller: &Caller,
        put: &Put,
    ) -> Result<Option<Entry>, Errno> {
        let op = Op::Walk { from: put.directory, names: put.path.clone() };
        let Answer::Walked(Walked { entries, .. }) = self.ask_once(caller, op).await? else {
            return Err(Errno::EPROTO);
        };
        let Some(entry) = entries.get(put.path.len() - 1).copied() else { return Ok(None) };
        let attributes = entry.attributes;
        let is_it = match &put.what {
            NewFile::Directory => attributes.kind == Kind::Directory,
            NewFile::Symlink { target } => {
                attributes.kind == Kind::Symlink
                    && matches!(self.ask_once(caller, Op::ReadLink(attributes.id)).await?,
                        Answer::Target { target: there, .. } if there == *target)
            }
            NewFile::Regular { data } => {
                let may_be = attributes.size == data.len() as u64;
                attributes.kind == Kind::Regular
                    && may_be
                    && self.has_contents(caller, &entry, data).await?
            }
        };
        Ok(is_it.then_some(entry))
    }

    async fn has_contents(
        &self,
        caller: &Caller,
        entry: &Entry,
        data: &[u8],
    ) -> Result<bool, Errno> {
        let part = ReadPart { place: entry.attributes.id.into(), range: 0..entry.attributes.size };
        let mut pieces = self.store.read(caller, vec![part]).await;
        let mut there = Vec::new();
        while let Some(piece) = pieces.next().await {
            match piece?.data {
                Ok(data) => there.extend_from_slice(&data),
                // The executor has restarted since the look-up.
                Err(Errno::ESTALE) => return Err(Errno::EAGAIN),
                Err(_) => return Ok(false),
            }
        }
        Ok(data == there)
    }

    /// Calls the store once, and caches its answer.
    pub(super) async fn ask_once(&self, caller: &Caller, op: Op) -> Result<Answer, Errno> {
        let asked = crate::clock::now();
        let answer = self.store.call(caller, op).await?;
        self.round_trip.took(crate::clock::now() - asked);
        let mut table = self.table();
        for entry in answer.entries() {
            table.learn(&entry, asked);
        }
        Ok(answer)
    }
}
