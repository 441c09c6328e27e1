//! Conversion of answers to and from messages.

use bytes::Bytes;
use posh_proto::volume as pb;

use super::*;

impl From<Answer> for pb::Answer {
    fn from(answer: Answer) -> Self {
        use pb::answer::Kind as To;
        let entries = |entries: Vec<Entry>| pb::Entries {
            entries: entries.into_iter().map(Into::into).collect(),
        };
        let kind = match answer {
            Answer::Done => To::Done(pb::Nothing {}),
            Answer::Entry(entry) => To::Entry(entry.into()),
            Answer::Walked(walked) => To::Walked(walked.into()),
            Answer::Listing(listing) => To::Listing(listing.into()),
            Answer::Target { target, stamp } => To::Target(stamped(vec![bytes(&target)], stamp)),
            Answer::Made { entry, parent } => To::Made(entries(vec![entry, parent])),
            Answer::Removed { parent, file } => {
                To::Removed(entries(std::iter::once(parent).chain(file).collect()))
            }
            Answer::Renamed { from, to, file, other } => {
                To::Renamed(entries([from, to, file].into_iter().chain(other).collect()))
            }
            Answer::Opened { handle, entry, parent } => To::Opened(pb::Opened {
                handle: handle.0,
                entry: Some(entry.into()),
                parent: parent.map(Into::into),
            }),
            Answer::Offset(offset) => To::Offset(offset),
            Answer::Copied { bytes, entry } => {
                To::Copied(pb::Copied { bytes, entry: Some(entry.into()) })
            }
            Answer::FileSystem(its) => To::FileSystem(pb::FileSystem {
                block_bytes: its.block_bytes,
                bytes: its.bytes,
                bytes_free: its.bytes_free,
                bytes_available: its.bytes_available,
                files: its.files,
                files_free: its.files_free,
                name_bytes: its.name_bytes,
            }),
            Answer::Value { value, stamp } => To::Value(stamped(vec![value], stamp)),
            Answer::Names { names, stamp } => {
                To::Names(stamped(names.iter().map(|name| bytes(name)).collect(), stamp))
            }
            Answer::Locked(lock) => To::Locked(lock.as_ref().map(range_lock).unwrap_or_default()),
            Answer::Settled(stamp) => To::Settled(stamp.0),
        };
        Self { kind: Some(kind) }
    }
}

impl From<Walked> for pb::Walked {
    fn from(walked: Walked) -> Self {
        Self {
            from: Some(walked.from.into()),
            entries: walked.entries.into_iter().map(Into::into).collect(),
            error: walked.error.map_or(0, |errno| errno as i32),
        }
    }
}

impl TryFrom<pb::Walked> for Walked {
    type Error = Malformed;

    fn try_from(walked: pb::Walked) -> Result<Self, Malformed> {
        Ok(Self {
            from: needed(walked.from, "from")?,
            entries: walked.entries.into_iter().map(Entry::try_from).collect::<Result<_, _>>()?,
            error: errno(walked.error),
        })
    }
}

fn stamped(values: Vec<Bytes>, stamp: Stamp) -> pb::Stamped {
    pb::Stamped { values, stamp: stamp.0 }
}

impl From<Listing> for pb::Listing {
    fn from(listing: Listing) -> Self {
        let listed = |listed: Listed| pb::Listed {
            name: bytes(&listed.name),
            cookie: listed.cookie,
            entry: listed.entry.map(Into::into),
            inode: listed.inode,
            kind: listed.kind.number(),
        };
        Self {
            directory: Some(listing.directory.into()),
            names: listing.names.into_iter().map(listed).collect(),
            is_last: listing.is_last,
        }
    }
}

impl TryFrom<pb::Listing> for Listing {
    type Error = Malformed;

    fn try_from(listing: pb::Listing) -> Result<Self, Malformed> {
        let listed = |listed: pb::Listed| {
            Ok(Listed {
                name: file_name(&listed.name)?,
                cookie: listed.cookie,
                entry: listed.entry.map(Entry::try_from).transpose()?,
                inode: listed.inode,
                kind: Kind::of(listed.kind)?,
            })
        };
        let names = listing.names.into_iter().map(listed).collect::<Result<_, Malformed>>()?;
        Ok(Self {
            directory: needed(listing.directory, "directory")?,
            names,
            is_last: listing.is_last,
        })
    }
}

impl TryFrom<pb::Answer> for Answer {
    type Error = Malformed;

    fn try_from(answer: pb::Answer) -> Result<Self, Malformed> {
        use pb::answer::Kind as From;
        Ok(match answer.kind.ok_or(Malformed("answer"))? {
            From::Done(_) => Self::Done,
            From::Entry(entry) => Self::Entry(entry.try_into()?),
            From::Walked(walked) => Self::Walked(walked.try_into()?),
            From::Listing(listing) => Self::Listing(listing.try_into()?),
            From::Target(its) => {
                Self::Target { target: text(&first(&its)), stamp: Stamp(its.stamp) }
            }
            From::Made(its) => {
                let mut its = its.entries.into_iter();
                Self::Made {
                    entry: needed(its.next(), "entry")?,
                    parent: needed(its.next(), "parent")?,
                }
            }
            From::Removed(its) => {
                let mut its = its.entries.into_iter();
                let parent = needed(its.next(), "parent")?;
                Self::Removed { parent, file: its.next().map(Entry::try_from).transpose()? }
            }
            From::Renamed(its) => {
                let mut its = its.entries.into_iter();
                Self::Renamed {
                    from: needed(its.next(), "from")?,
                    to: needed(its.next(), "to")?,
                    file: needed(its.next(), "file")?,
                    other: its.next().map(Entry::try_from).transpose()?,
                }
            }
            From::Opened(its) => Self::Opened {
                handle: Handle(its.handle),
                entry: needed(its.entry, "entry")?,
                parent: its.parent.map(Entry::try_from).transpose()?,
            },
            From::Offset(offset) => Self::Offset(offset),
            From::Copied(its) => {
                Self::Copied { bytes: its.bytes, entry: needed(its.entry, "entry")? }
            }
            From::FileSystem(its) => Self::FileSystem(FileSystem {
                block_bytes: its.block_bytes,
                bytes: its.bytes,
                bytes_free: its.bytes_free,
                bytes_available: its.bytes_available,
                files: its.files,
                files_free: its.files_free,
                name_bytes: its.name_bytes,
            }),
            From::Value(its) => Self::Value { value: first(&its), stamp: Stamp(its.stamp) },
            From::Names(its) => Self::Names { names: texts(&its.values), stamp: Stamp(its.stamp) },
            From::Locked(its) => {
                let access = access_of(its.access)?;
                Self::Locked(
                    access.map(|access| RangeLock {
                        range: its.start..its.end,
                        access: Some(access),
                    }),
                )
            }
            From::Settled(stamp) => Self::Settled(Stamp(stamp)),
        })
    }
}

fn first(stamped: &pb::Stamped) -> Bytes {
    stamped.values.first().cloned().unwrap_or_default()
}
