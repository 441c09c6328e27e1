//! Conversion of operations to and from messages.

use std::ffi::{OsStr, OsString};

use posh_proto::volume as pb;

use super::*;

fn name_of(parent: FileId, name: &OsStr) -> Option<pb::Name> {
    Some(pb::Name { parent: Some(parent.into()), name: bytes(name) })
}

fn name(message: Option<pb::Name>) -> Result<(FileId, OsString), Malformed> {
    let name = message.ok_or(Malformed("name"))?;
    Ok((needed(name.parent, "parent")?, text(&name.name)))
}

impl From<Op> for pb::Op {
    fn from(op: Op) -> Self {
        Self { kind: Some(kind_of(op)) }
    }
}

fn kind_of(op: Op) -> pb::op::Kind {
    use pb::op::Kind as To;
    match op {
        Op::Walk { from, names } => To::Walk(pb::Walk {
            from: Some(from.into()),
            names: names.iter().map(|name| bytes(name)).collect(),
        }),
        Op::Attributes(place) => To::Attributes(place.into()),
        Op::Set { place, changes } => {
            To::Set(pb::Set { place: Some(place.into()), changes: Some(changes.into()) })
        }
        Op::List { directory, cookie, limit } => {
            To::List(pb::List { directory: Some(directory.into()), cookie, limit })
        }
        Op::ReadLink(file) => To::ReadLink(file.into()),
        Op::MakeDirectory { .. } | Op::MakeNode { .. } | Op::Symlink { .. } | Op::Link { .. } => {
            kind_of_make(op)
        }
        Op::Remove { parent, name, what } => To::Remove(pb::Remove {
            name: name_of(parent, &name),
            directory: what == Removal::Directory,
        }),
        Op::Rename { parent, name, new_parent, new_name, how } => {
            let (from, to) = (name_of(parent, &name), name_of(new_parent, &new_name));
            To::Rename(pb::Rename { from, to, how: how.number() })
        }
        Op::Create { parent, name, mode, flags } => To::Create(pb::Open {
            name: name_of(parent, &name),
            mode: mode.masked,
            flags: flags.bits(),
            withheld: mode.withheld,
            place: None,
        }),
        Op::CreateWhole { put, flags } => {
            To::CreateWhole(pb::CreateWhole { put: Some(put.into()), flags: flags.bits() })
        }
        Op::Open { place, flags } => To::Open(pb::Open {
            place: Some(place.into()),
            flags: flags.bits(),
            ..pb::Open::default()
        }),
        Op::Close(handle) => To::Close(handle.0),
        Op::Sync { place, what } => {
            To::Sync(pb::Sync { place: Some(place.into()), data_only: what == Synced::Data })
        }
        Op::Allocate { place, range, how } => To::Allocate(pb::Allocate {
            place: Some(place.into()),
            start: range.start,
            end: range.end,
            how: how.number(),
        }),
        Op::Seek { place, offset, what } => {
            To::Seek(pb::Seek { place: Some(place.into()), offset, hole: what == Sought::Hole })
        }
        Op::CopyRange { from, to, length } => To::CopyRange(pb::CopyRange {
            from: Some(from.file.into()),
            from_offset: from.offset,
            to: Some(to.file.into()),
            to_offset: to.offset,
            length,
        }),
        Op::FileSystem => To::FileSystem(pb::Nothing {}),
        Op::GetAttribute { place, name } => To::GetAttribute(extended(place, &name)),
        Op::SetAttribute { place, name, value, how } => {
            To::SetAttribute(pb::Extended { value, how: how.number(), ..extended(place, &name) })
        }
        Op::RemoveAttribute { place, name } => To::RemoveAttribute(extended(place, &name)),
        Op::ListAttributes(place) => To::ListAttributes(place.into()),
        Op::Lock { place, owner, lock, wait } => {
            let (whole, (start, end), access) = match lock {
                Lock::Whole(access) => (true, (0, 0), access),
                Lock::Range(lock) => (false, (lock.range.start, lock.range.end), lock.access),
            };
            let (place, access) = (Some(place.into()), access_number(access));
            To::Lock(pb::Lock { place, owner, whole, access, start, end, wait: wait == Wait::Yes })
        }
        Op::TestLock { place, owner, lock } => {
            To::TestLock(pb::Lock { place: Some(place.into()), owner, ..range_lock(&lock) })
        }
        Op::Unlock { file, owner } => To::Unlock(pb::Unlock { file: Some(file.into()), owner }),
        Op::Return(returned) => {
            let leases = returned
                .into_iter()
                .map(|each| notice(each.file, each.leases, each.stamp))
                .collect();
            To::ReturnLeases(pb::ReturnLeases { leases })
        }
        Op::EndSessions(names) => To::EndSessions(pb::EndSessions { names }),
        Op::Forgotten(Stamp(lost)) => To::Forgotten(lost),
        Op::Settle(how) => To::Settle(how == Settling::Flush),
        Op::Reserve { directory, bytes } => {
            To::Reserve(pb::Reserve { directory: Some(directory.into()), bytes })
        }
    }
}

fn kind_of_make(op: Op) -> pb::op::Kind {
    use pb::op::Kind as To;
    match op {
        Op::MakeNode { parent, name, mode, kind, rdev } => To::MakeNode(pb::Make {
            name: name_of(parent, &name),
            mode: mode.masked,
            withheld: mode.withheld,
            kind: kind.number(),
            rdev,
            ..pb::Make::default()
        }),
        Op::Symlink { parent, name, target } => To::Symlink(pb::Make {
            name: name_of(parent, &name),
            target: bytes(&target),
            ..pb::Make::default()
        }),
        Op::Link { file, parent, name } => To::Link(pb::Make {
            name: name_of(parent, &name),
            file: Some(file.into()),
            ..pb::Make::default()
        }),
        Op::MakeDirectory { parent, name, mode } => {
            let NewMode { masked: mode, withheld } = mode;
            To::MakeDirectory(pb::Make {
                name: name_of(parent, &name),
                mode,
                withheld,
                ..pb::Make::default()
            })
        }
        _ => To::FileSystem(pb::Nothing {}),
    }
}

fn extended(place: Place, name: &OsStr) -> pb::Extended {
    pb::Extended { place: Some(place.into()), name: bytes(name), ..pb::Extended::default() }
}

impl TryFrom<pb::Op> for Op {
    type Error = Malformed;

    fn try_from(op: pb::Op) -> Result<Self, Malformed> {
        use pb::op::Kind as From;
        Ok(match op.kind.ok_or(Malformed("op"))? {
            From::Walk(walk) => {
                Self::Walk { from: needed(walk.from, "from")?, names: texts(&walk.names) }
            }
            From::Attributes(place) => Self::Attributes(place.try_into()?),
            From::Set(set) => Self::Set {
                place: needed(set.place, "place")?,
                changes: set.changes.unwrap_or_default().into(),
            },
            From::List(list) => {
                let directory = needed(list.directory, "directory")?;
                Self::List { directory, cookie: list.cookie, limit: list.limit }
            }
            From::ReadLink(file) => Self::ReadLink(file.into()),
            From::MakeDirectory(make) => {
                let (parent, name) = name(make.name)?;
                Self::MakeDirectory { parent, name, mode: new_mode(make.mode, make.withheld) }
            }
            From::MakeNode(make) => {
                let (parent, name) = name(make.name)?;
                let mode = new_mode(make.mode, make.withheld);
                Self::MakeNode { parent, name, mode, kind: Kind::of(make.kind)?, rdev: make.rdev }
            }
            From::Symlink(make) => {
                let (parent, name) = name(make.name)?;
                Self::Symlink { parent, name, target: text(&make.target) }
            }
            From::Link(make) => {
                let (parent, name) = name(make.name)?;
                Self::Link { file: needed(make.file, "file")?, parent, name }
            }
            From::Remove(remove) => {
                let (parent, name) = name(remove.name)?;
                let what = if remove.directory { Removal::Directory } else { Removal::File };
                Self::Remove { parent, name, what }
            }
            From::Rename(rename) => {
                let ((parent, name), (new_parent, new_name)) =
                    (name(rename.from)?, name(rename.to)?);
                let how = Renaming::of(rename.how)?;
                Self::Rename { parent, name, new_parent, new_name, how }
            }
            From::Create(open) => {
                let (parent, name) = name(open.name)?;
                Self::Create {
                    parent,
                    name,
                    mode: new_mode(open.mode, open.withheld),
                    flags: flags(open.flags)?,
                }
            }
            From::CreateWhole(whole) => {
                Self::CreateWhole { put: needed(whole.put, "put")?, flags: flags(whole.flags)? }
            }
            From::Open(open) => {
                Self::Open { place: needed(open.place, "place")?, flags: flags(open.flags)? }
            }
            From::Close(handle) => Self::Close(Handle(handle)),
            other => op_on_file(other)?,
        })
    }
}

fn op_on_file(kind: pb::op::Kind) -> Result<Op, Malformed> {
    use pb::op::Kind as From;
    Ok(match kind {
        From::Sync(sync) => {
            let what = if sync.data_only { Synced::Data } else { Synced::Everything };
            Op::Sync { place: needed(sync.place, "place")?, what }
        }
        From::Allocate(its) => {
            let (place, how) = (needed(its.place, "place")?, Allocation::of(its.how)?);
            Op::Allocate { place, range: its.start..its.end, how }
        }
        From::Seek(seek) => {
            let what = if seek.hole { Sought::Hole } else { Sought::Data };
            Op::Seek { place: needed(seek.place, "place")?, offset: seek.offset, what }
        }
        From::CopyRange(copy) => Op::CopyRange {
            from: PositionIn { file: needed(copy.from, "from")?, offset: copy.from_offset },
            to: PositionIn { file: needed(copy.to, "to")?, offset: copy.to_offset },
            length: copy.length,
        },
        From::FileSystem(_) => Op::FileSystem,
        From::GetAttribute(its) => {
            Op::GetAttribute { place: needed(its.place, "place")?, name: text(&its.name) }
        }
        From::SetAttribute(its) => Op::SetAttribute {
            place: needed(its.place, "place")?,
            name: text(&its.name),
            value: its.value,
            how: AttributeChange::of(its.how)?,
        },
        From::RemoveAttribute(its) => {
            Op::RemoveAttribute { place: needed(its.place, "place")?, name: text(&its.name) }
        }
        From::ListAttributes(place) => Op::ListAttributes(place.try_into()?),
        From::Lock(its) => {
            let access = access_of(its.access)?;
            let range = || RangeLock { range: its.start..its.end, access };
            let lock = if its.whole { Lock::Whole(access) } else { Lock::Range(range()) };
            let wait = if its.wait { Wait::Yes } else { Wait::No };
            Op::Lock { place: needed(its.place, "place")?, owner: its.owner, lock, wait }
        }
        From::TestLock(its) => {
            let lock = RangeLock { range: its.start..its.end, access: access_of(its.access)? };
            Op::TestLock { place: needed(its.place, "place")?, owner: its.owner, lock }
        }
        From::Unlock(its) => Op::Unlock { file: needed(its.file, "file")?, owner: its.owner },
        From::ReturnLeases(its) => {
            let returned = |each: pb::Notice| {
                let (leases, stamp) = (Leases::from_bits_truncate(each.leases), Stamp(each.stamp));
                Ok(Returned { file: needed(each.file, "file")?, leases, stamp })
            };
            Op::Return(its.leases.into_iter().map(returned).collect::<Result<_, Malformed>>()?)
        }
        From::Reserve(its) => {
            Op::Reserve { directory: needed(its.directory, "directory")?, bytes: its.bytes }
        }
        From::EndSessions(its) => Op::EndSessions(its.names),
        From::Forgotten(lost) => Op::Forgotten(Stamp(lost)),
        From::Settle(flush) => Op::Settle(if flush { Settling::Flush } else { Settling::Recalls }),
        _ => return Err(Malformed("op")),
    })
}

/// `withheld` is 0 from a gateway that doesn't send the umask: it has applied it.
fn new_mode(masked: u32, withheld: u32) -> NewMode {
    NewMode { masked, withheld }
}

fn flags(bits: u32) -> Result<OpenFlags, Malformed> {
    OpenFlags::from_bits(bits).ok_or(Malformed("flags"))
}
