//! Files that the store does not know any more by their numbers, since the executor was started
//! anew or has forgotten them: found again by the names that they had here.

use std::{collections::BTreeSet, ffi::OsString};

use tokio_stream::StreamExt as _;

use super::{Volume, table::ROOT};
use crate::store::{
    Answer, Caller, Entry, Errno, FileId, Kind, NewFile, Op, Put, ReadPart, Walked,
};

/// Names of one request.
const WALKED_NAMES: usize = 32;

/// Where the names of a file lead to now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// To the file.
    There(Entry),
    /// To nothing, or to another file. With the number of the topmost directory that is not there,
    /// if nothing else has its name.
    Gone(Option<u64>),
}

/// Whether an error of a call may be that of its connection: nobody knows what became of it.
pub(super) fn is_lost(errno: Errno) -> bool {
    matches!(errno, Errno::EIO | Errno::ETIMEDOUT | Errno::EAGAIN)
}

/// One name on the way down from the root.
pub(super) struct Step {
    pub number: u64,
    pub file: FileId,
    pub name: OsString,
}

impl Volume {
    /// Has the store look a file up by the names that it had here.
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

    /// Has the store look up all files that a call names.
    ///
    /// # Errors
    /// `ESTALE`: not all are there under the names that they had here. Others: a request is lost,
    /// and nobody knows.
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

    /// The file that a name has, if it is as the one to be put would be.
    ///
    /// # Errors
    /// That is not known: a request is lost.
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
                // The executor was started anew since it was found.
                Err(Errno::ESTALE) => return Err(Errno::EAGAIN),
                Err(_) => return Ok(false),
            }
        }
        Ok(data.starts_with(&there))
    }

    /// Asks the store, and remembers what it says.
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
