//! What a gateway has left that was killed: put where it belongs by the next one. A name that is there already is as it should be, or
//! somebody else's: then what was left is kept apart.

use std::{
    io,
    path::{Path, PathBuf},
};

use tokio_stream::StreamExt as _;

use crate::{
    journal::{Journal, Record},
    store::{Answer, Entry, Errno, Kind, NewFile, Op, Put, ReadPart, Store, Walked, Write},
};

/// What is said of a file that could not be made.
pub(super) fn message(path: &Path, errno: Errno, kept: io::Result<PathBuf>) -> String {
    let path = path.display();
    match kept {
        Ok(kept) => format!("{path} could not be made ({errno}): what was written to it is in {}", kept.display()),
        Err(error) => format!("{path} could not be made ({errno}), and what was written to it is lost: {error}"),
    }
}

/// Puts a file of a former process, if it is not there. What is to be said of it, if it could not be.
///
/// # Errors
/// When the store is out of reach: it is to be tried again.
pub(super) async fn put_again(store: &dyn Store, journal: &Journal, record: &Record) -> Result<Option<String>, Errno> {
    let refused = match again(store, record).await {
        Ok(()) => None,
        Err(errno @ (Errno::EIO | Errno::ETIMEDOUT)) => return Err(errno),
        Err(errno) => {
            let path: PathBuf = record.home.iter().chain(&record.put.path).collect();
            Some(message(&path, errno, journal.keep_lost(&record.put)))
        }
    };
    journal.done(&[record.order]);
    Ok(refused)
}

async fn again(store: &dyn Store, record: &Record) -> Result<(), Errno> {
    let home = walk(store, record, store.root(), &record.home).await?;
    let home = found(&home, record.home.len())?.attributes.id;
    if home != record.put.directory {
        // Another directory has its name.
        return Err(Errno::ESTALE);
    }
    let put = record.put.clone();
    let mut results = store.write(&record.caller, vec![Write::Put(put)]).await?;
    match results.pop().ok_or(Errno::EPROTO)? {
        Ok(_) => Ok(()),
        Err(Errno::EEXIST) if is_there(store, record).await? => Ok(()),
        Err(errno) => Err(errno),
    }
}

async fn walk(
    store: &dyn Store,
    record: &Record,
    from: crate::store::FileId,
    names: &[std::ffi::OsString],
) -> Result<Walked, Errno> {
    match store.call(&record.caller, Op::Walk { from, names: names.to_vec() }).await? {
        Answer::Walked(walked) => Ok(walked),
        _ => Err(Errno::EPROTO),
    }
}

fn found(walked: &Walked, names: usize) -> Result<Entry, Errno> {
    if walked.entries.len() < names {
        return Err(walked.error.unwrap_or(Errno::ENOENT));
    }
    Ok(walked.entries.last().copied().unwrap_or(walked.from))
}

/// Whether the name has what the record would have put there.
async fn is_there(store: &dyn Store, record: &Record) -> Result<bool, Errno> {
    let Put { directory, path, what, .. } = &record.put;
    let walked = walk(store, record, *directory, path).await?;
    let attributes = found(&walked, path.len())?.attributes;
    Ok(match what {
        NewFile::Directory => attributes.kind == Kind::Directory,
        NewFile::Symlink { target } => {
            let answer = store.call(&record.caller, Op::ReadLink(attributes.id)).await;
            matches!(answer, Ok(Answer::Target { target: there, .. }) if there == *target)
        }
        NewFile::Regular { data } => {
            if attributes.kind != Kind::Regular || attributes.size != data.len() as u64 {
                return Ok(false);
            }
            let part = ReadPart { place: attributes.id.into(), range: 0..attributes.size };
            let mut pieces = store.read(&record.caller, vec![part]).await;
            let mut there = Vec::new();
            while let Some(piece) = pieces.next().await {
                there.extend_from_slice(&piece?.data?);
            }
            there == *data
        }
    })
}
