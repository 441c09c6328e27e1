//! New files that are made complete or not at all, with their contents and attributes.

use std::{
    ffi::OsStr,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
};

use bytes::Bytes;
use nix::errno::Errno;
use rustix::fs::{AtFlags, Mode, OFlags};

use super::{
    Fault, attributes,
    effects::{self, made},
    files::NewOpen,
    nodes::{BENEATH, Keep, Node, check_name},
    session::{BYTES, Intents, NAMES, Session},
    transfer::write_all,
};
use crate::store::{Answer, Entry, Leases, NameIn, NewFile, OpenFlags, Put};

impl Session {
    pub fn parent_of(&self, put: &Put) -> Result<Node, Fault> {
        let directory = self.directory.nodes.node(put.directory)?;
        let (_, above) = put.path.split_last().ok_or(Errno::EINVAL)?;
        self.directory.nodes.descend(&directory, above)
    }

    /// Creates a file without a name (O_TMPFILE), and links it when it is complete. `None` if the
    /// file system or the kernel doesn't allow that.
    fn put_whole(
        at: NameIn<'_, &Node>,
        data: &Bytes,
        mode: Mode,
        put: &Put,
    ) -> Result<Option<OwnedFd>, Fault> {
        let NameIn { parent, name } = at;
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        let file = match rustix::fs::openat2(&parent.fd, ".", flags, mode, BENEATH) {
            Ok(file) => file,
            Err(
                rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR | rustix::io::Errno::INVAL,
            ) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        effects::without_name(|| {
            write_all(&file, data, Some(0))?;
            change(file.as_fd(), put)
        })?;
        // Linked through /proc, which needs no capability (open(2)).
        let by = format!("/proc/self/fd/{}", file.as_raw_fd());
        let flags = AtFlags::SYMLINK_FOLLOW;
        match made(rustix::fs::linkat(rustix::fs::CWD, by, &parent.fd, name, flags)) {
            Ok(()) => Ok(Some(file)),
            // A file of another owner may not be linked (proc(5), protected_hardlinks), and /proc
            // may be hidden.
            Err(rustix::io::Errno::PERM | rustix::io::Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Returns a put's directory and name.
    pub fn place_of<'a>(&self, put: &'a Put) -> Result<(Node, &'a OsStr), Fault> {
        let name = put.path.last().ok_or(Errno::EINVAL)?;
        check_name(name)?;
        Ok((self.parent_of(put)?, name))
    }

    /// See [`crate::store::Op::CreateWhole`].
    pub fn create_whole(
        &self,
        put: &Put,
        flags: OpenFlags,
        announced: &Intents,
    ) -> Result<Answer, Fault> {
        self.directory.require_writable()?;
        let NewFile::Regular { data } = &put.what else { return Err(Errno::EINVAL.into()) };
        let room = self.room_for_open()?;
        let (parent, name) = self.place_of(put)?;
        let at = NameIn { parent: &parent, name };
        let file = Self::put_file(at, data, put)?;
        self.keep_new(at, file, NewOpen { flags, room, announced })
    }

    fn put_file(at: NameIn<'_, &Node>, data: &Bytes, put: &Put) -> Result<OwnedFd, Fault> {
        let mode = Mode::from_raw_mode(put.mode & 0o7777);
        match Self::put_whole(at, data, mode, put)? {
            Some(file) => Ok(file),
            None => put_by_name(at, data, mode, put),
        }
    }

    /// Creates a new file, complete or not at all.
    pub fn put(&self, put: &Put, announced: &Intents) -> Result<Entry, Fault> {
        self.directory.require_writable()?;
        let (parent, name) = self.place_of(put)?;
        let entry = self.put_in(NameIn { parent: &parent, name }, put)?;
        // Its path may lead into another directory than when it was announced.
        self.touch_unless_announced(&parent, NAMES, announced);
        Ok(entry)
    }

    fn put_in(&self, at: NameIn<'_, &Node>, put: &Put) -> Result<Entry, Fault> {
        let NameIn { parent, name } = at;
        let mode = Mode::from_raw_mode(put.mode & 0o7777);
        match &put.what {
            NewFile::Directory => made(rustix::fs::mkdirat(&parent.fd, name, mode))?,
            NewFile::Symlink { target } => {
                made(rustix::fs::symlinkat(target, &parent.fd, name))?;
            }
            NewFile::Regular { data } => {
                let file = Self::put_file(at, data, put)?;
                let at = NameIn { parent: parent.id, name };
                let node = self.directory.nodes.remember(file, Some(at), Keep::Way)?;
                // No other session knows the new file yet.
                return self.entry(node.fd.as_fd(), node.id, BYTES | Leases::WRITE);
            }
        }
        let node = self.directory.nodes.child(parent, name, Keep::Open)?;
        if let Err(fault) = change(node.fd.as_fd(), put) {
            super::files::unmake(at, &rustix::fs::fstat(&node.fd)?);
            return Err(fault);
        }
        match put.what {
            NewFile::Directory => self.entry_of_new_directory(&node),
            _ => self.entry_of_node(&node),
        }
    }
}

/// Creates a file under its name from the start: if this process is killed, an incomplete file is
/// left.
fn put_by_name(
    at: NameIn<'_, &Node>,
    data: &Bytes,
    mode: Mode,
    put: &Put,
) -> Result<OwnedFd, Fault> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = made(rustix::fs::openat2(&at.parent.fd, at.name, flags, mode, BENEATH))?;
    let written = write_all(&file, data, Some(0)).and_then(|()| change(file.as_fd(), put));
    if let Err(fault) = written {
        super::files::unmake(at, &rustix::fs::fstat(&file)?);
        return Err(fault);
    }
    Ok(file)
}

fn change(fd: std::os::fd::BorrowedFd<'_>, put: &Put) -> Result<(), Fault> {
    attributes::change(fd, &put.changes)?;
    if let Some(size) = put.changes.size {
        effects::begin();
        rustix::fs::ftruncate(fd, size)?;
    }
    attributes::change_times(fd, &put.changes)
}
