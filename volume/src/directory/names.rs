//! Operations that create, rename and remove names.

use std::{ffi::OsStr, os::fd::AsFd as _, sync::MutexGuard};

use nix::errno::Errno;
use rustix::fs::{AtFlags, CWD, FileType, Mode, RenameFlags};

use super::{
    Fault, attributes,
    effects::made,
    nodes::{Keep, Node, check_name},
    session::{Intents, NAMES, Session},
};
use crate::leases::Intent;
use crate::store::{Answer, Entry, FileId, Kind, Leases, NameIn, NewMode, Op, Removal, Renaming};

/// Permission bits with setuid, setgid and sticky.
const PERMISSIONS: u32 = 0o7777;

impl Session {
    /// Creates a directory, a node, a symbolic link or a hard link.
    pub fn make(&self, op: &Op) -> Result<Answer, Fault> {
        let (Op::MakeDirectory { parent, name, .. }
        | Op::MakeNode { parent, name, .. }
        | Op::Symlink { parent, name, .. }
        | Op::Link { parent, name, .. }) = op
        else {
            return Err(Errno::EOPNOTSUPP.into());
        };
        let (parent, child) = self.make_in(*parent, name, |parent| {
            let source = match op {
                Op::Link { file, .. } => Some(self.target(*file)?),
                _ => None,
            };
            match op {
                Op::MakeDirectory { mode, .. } => {
                    made(rustix::fs::mkdirat(&parent.fd, name, permissions(parent, *mode)))?
                }
                Op::MakeNode { mode, kind, .. } => {
                    let (kind, mode) = (node_type(*kind)?, permissions(parent, *mode));
                    made(rustix::fs::mknodat(&parent.fd, name, kind, mode, 0))?;
                }
                Op::Symlink { target, .. } => {
                    made(rustix::fs::symlinkat(target, &parent.fd, name))?;
                }
                _ => {
                    let source = source.ok_or(Errno::EINVAL)?;
                    let link = attributes::link_to(source.fd());
                    let flags = AtFlags::SYMLINK_FOLLOW;
                    made(rustix::fs::linkat(CWD, &*link, &parent.fd, name, flags))?;
                }
            }
            Ok(())
        })?;
        let entry = match op {
            Op::MakeDirectory { .. } => self.entry_of_new_directory(&child)?,
            _ => self.entry_of_node(&child)?,
        };
        Ok(Answer::Made { entry, parent: self.entry_of_node(&parent)? })
    }

    /// Creates a name by `make`, and looks it up; returns parent and child.
    pub fn make_in(
        &self,
        parent: FileId,
        name: &OsStr,
        make: impl FnOnce(&Node) -> Result<(), Fault>,
    ) -> Result<(Node, Node), Fault> {
        self.directory.require_writable()?;
        check_name(name)?;
        let parent = self.directory.nodes.node(parent)?;
        let _locked = self.lock_names(&[parent.id]);
        make(&parent)?;
        let child = self.directory.nodes.child(&parent, name, Keep::Open)?;
        Ok((parent, child))
    }

    /// unlink(2) or rmdir(2).
    pub fn remove(
        &self,
        at: NameIn<'_, FileId>,
        what: Removal,
        announced: &Intents,
    ) -> Result<Answer, Fault> {
        self.directory.require_writable()?;
        let NameIn { parent, name } = at;
        let parent = self.directory.nodes.node(parent)?;
        let locked = self.lock_names(&[parent.id]);
        let child = self.directory.nodes.child(&parent, name, Keep::Open)?;
        let flags = match what {
            Removal::File => AtFlags::empty(),
            Removal::Directory => AtFlags::REMOVEDIR,
        };
        made(rustix::fs::unlinkat(&parent.fd, name, flags))?;
        self.directory.nodes.removed(child.id, parent.id, name);
        drop(locked);
        self.touch_unless_announced(&child, NAMES, announced);
        let file = self.rest_of(&child)?;
        Ok(Answer::Removed { parent: self.entry_of_node(&parent)?, file })
    }

    /// renameat2(2).
    pub fn rename(
        &self,
        from: NameIn<'_, FileId>,
        to: NameIn<'_, FileId>,
        how: Renaming,
        announced: &Intents,
    ) -> Result<Answer, Fault> {
        self.directory.require_writable()?;
        let nodes = &self.directory.nodes;
        let (old, new) = (nodes.node(from.parent)?, nodes.node(to.parent)?);
        let locked = self.lock_names(&[old.id, new.id]);
        let file = nodes.child(&old, from.name, Keep::Open)?;
        let other = match nodes.child(&new, to.name, Keep::Open) {
            Ok(other) => Some(other),
            Err(fault) if fault == Fault::from(Errno::ENOENT) => None,
            Err(fault) => return Err(fault),
        };
        let flags = match how {
            Renaming::Replace => RenameFlags::empty(),
            Renaming::NoReplace => RenameFlags::NOREPLACE,
            Renaming::Exchange => RenameFlags::EXCHANGE,
        };
        made(rustix::fs::renameat_with(&old.fd, from.name, &new.fd, to.name, flags))?;
        // Two names of one file: a no-op (rename(2)).
        let is_changed = other.as_ref().is_none_or(|other| other.id != file.id);
        if is_changed {
            nodes.removed(file.id, old.id, from.name);
            nodes.moved(file.id, new.id, to.name);
            if let Some(other) = &other {
                nodes.removed(other.id, new.id, to.name);
            }
            if let (Some(other), Renaming::Exchange) = (&other, how) {
                nodes.moved(other.id, old.id, from.name);
            }
        }
        drop(locked);
        if is_changed {
            self.touch_unless_announced(&file, Leases::ATTRIBUTES, announced);
            for node in [&old, &new].into_iter().chain(&other) {
                self.touch_unless_announced(node, NAMES, announced);
            }
        }
        Ok(Answer::Renamed {
            from: self.entry_of_node(&old)?,
            to: self.entry_of_node(&new)?,
            file: self.entry_of_node(&file)?,
            other: other.map(|other| self.rest_of(&other)).transpose()?.flatten(),
        })
    }

    /// Returns the entry of a file that has lost a name, if it has others or is open.
    fn rest_of(&self, node: &Node) -> Result<Option<Entry>, Fault> {
        let entry = self.entry(node.fd.as_fd(), node.id, Leases::ATTRIBUTES)?;
        let is_open = || {
            self.opened.lock().expect("not poisoned").values().any(|opened| opened.file == node.id)
        };
        Ok(Some(entry).filter(|entry| entry.attributes.links > 0 || is_open()))
    }

    /// Locks the names of these directories against changes by this process.
    fn lock_names(&self, directories: &[FileId]) -> Vec<MutexGuard<'_, ()>> {
        let mut numbers: Vec<usize> =
            directories.iter().map(|id| self.directory.name_lock(*id)).collect();
        // In one order everywhere, against deadlock.
        numbers.sort_unstable();
        numbers.dedup();
        numbers
            .into_iter()
            .map(|n| self.directory.name_locks[n].lock().expect("not poisoned"))
            .collect()
    }
}

impl Session {
    /// Ends others' leases of a file unless the announcement of this op has recalled these: between
    /// announcement and execution, a name may have come to refer to another file. Announcements of
    /// the session's other ops don't count: they may recall other leases, or still wait.
    pub(super) fn touch_unless_announced(&self, node: &Node, leases: Leases, announced: &Intents) {
        let file = self.directory.nodes.file(node.id);
        let is_announced = announced.iter().any(|(announced, intent)| {
            announced.key == file
                && matches!(intent, Intent::Change(recalled) if recalled.contains(leases))
        });
        if !is_announced {
            self.directory.touched(node.id, leases);
        }
    }
}

/// Returns the mode for a new file in a directory. A race with a change of the default ACL is
/// harmless: who can change it can grant the same access by it.
pub fn permissions(parent: &Node, mode: NewMode) -> Mode {
    let is_masked = mode.withheld == 0 || attributes::has_no_default_acl(parent.fd.as_fd());
    let mode = if is_masked { mode.masked } else { mode.masked | mode.withheld };
    Mode::from_raw_mode(mode & PERMISSIONS)
}

/// Returns the type for mknodat(2). Device files are refused: they would give clients access to the
/// server's devices.
fn node_type(kind: Kind) -> Result<FileType, Fault> {
    match kind {
        Kind::Regular => Ok(FileType::RegularFile),
        Kind::Fifo => Ok(FileType::Fifo),
        Kind::Socket => Ok(FileType::Socket),
        Kind::BlockDevice | Kind::CharacterDevice => Err(Errno::EPERM.into()),
        Kind::Directory | Kind::Symlink => Err(Errno::EINVAL.into()),
    }
}
