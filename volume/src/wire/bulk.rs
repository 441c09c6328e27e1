//! Conversion of bulk transfers to and from messages.

use posh_proto::volume as pb;

use super::*;

impl From<ReadPart> for pb::ReadPart {
    fn from(part: ReadPart) -> Self {
        Self { place: Some(part.place.into()), start: part.range.start, end: part.range.end }
    }
}

impl TryFrom<pb::ReadPart> for ReadPart {
    type Error = Malformed;

    fn try_from(part: pb::ReadPart) -> Result<Self, Malformed> {
        Ok(Self { place: needed(part.place, "place")?, range: part.start..part.end })
    }
}

impl From<Piece> for pb::Piece {
    fn from(piece: Piece) -> Self {
        let (data, error) = match piece.data {
            Ok(data) => (data, 0),
            Err(errno) => (Bytes::new(), errno as i32),
        };
        let (part, offset, is_last) = (piece.part, piece.offset, piece.is_last);
        Self { part, offset, data, error, is_last, entry: piece.entry.map(Into::into) }
    }
}

impl TryFrom<pb::Piece> for Piece {
    type Error = Malformed;

    fn try_from(piece: pb::Piece) -> Result<Self, Malformed> {
        Ok(Self {
            part: piece.part,
            offset: piece.offset,
            data: errno(piece.error).map_or(Ok(piece.data), Err),
            is_last: piece.is_last,
            entry: piece.entry.map(Entry::try_from).transpose()?,
        })
    }
}

impl From<Write> for pb::Write {
    fn from(write: Write) -> Self {
        use pb::write::Kind as To;
        let place_of = |place: Place| Some(place.into());
        let kind = match write {
            Write::At { place, offset, data } => {
                To::At(pb::Bytes { place: place_of(place), offset, data })
            }
            Write::Append { place, data } => {
                To::Append(pb::Bytes { place: place_of(place), offset: 0, data })
            }
            Write::Set { place, changes } => {
                To::Set(pb::Set { place: place_of(place), changes: Some(changes.into()) })
            }
            Write::Put(put) => To::Put(put.into()),
        };
        Self { kind: Some(kind) }
    }
}

impl From<Put> for pb::Put {
    fn from(put: Put) -> Self {
        let (kind, data) = match put.what {
            NewFile::Regular { data } => (Kind::Regular, data),
            NewFile::Directory => (Kind::Directory, Bytes::new()),
            NewFile::Symlink { target } => (Kind::Symlink, bytes(&target)),
        };
        Self {
            directory: Some(put.directory.into()),
            path: put.path.iter().map(|name| bytes(name)).collect(),
            kind: kind.number(),
            data,
            mode: put.mode,
            changes: Some(put.changes.into()),
        }
    }
}

impl TryFrom<pb::Write> for Write {
    type Error = Malformed;

    fn try_from(write: pb::Write) -> Result<Self, Malformed> {
        use pb::write::Kind as From;
        Ok(match write.kind.ok_or(Malformed("write"))? {
            From::At(at) => {
                Self::At { place: needed(at.place, "place")?, offset: at.offset, data: at.data }
            }
            From::Append(at) => Self::Append { place: needed(at.place, "place")?, data: at.data },
            From::Set(set) => Self::Set {
                place: needed(set.place, "place")?,
                changes: set.changes.unwrap_or_default().into(),
            },
            From::Put(put) => Self::Put(put.try_into()?),
        })
    }
}

impl TryFrom<pb::Put> for Put {
    type Error = Malformed;

    fn try_from(put: pb::Put) -> Result<Self, Malformed> {
        Ok(Self {
            directory: needed(put.directory, "directory")?,
            path: texts(&put.path),
            what: match Kind::of(put.kind)? {
                Kind::Regular => NewFile::Regular { data: put.data },
                Kind::Directory => NewFile::Directory,
                Kind::Symlink => NewFile::Symlink { target: text(&put.data) },
                _ => return Err(Malformed("kind")),
            },
            mode: put.mode,
            changes: put.changes.unwrap_or_default().into(),
        })
    }
}
