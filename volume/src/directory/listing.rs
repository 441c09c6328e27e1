//! Walks and lists directories.

use std::{
    ffi::{OsStr, OsString},
    mem::MaybeUninit,
    os::{fd::AsFd as _, unix::ffi::OsStrExt as _},
};

use nix::errno::Errno;
use rustix::fs::{Mode, OFlags, RawDir, SeekFrom};

use super::{
    Fault, attributes,
    nodes::{Keep, Node},
    session::{NAMES, Session},
};
use crate::store::{Answer, FileId, Kind, Leases, Listed, Listing, Walked};

/// Limit of names in one answer: about 150 bytes each on the wire, at most 450.
pub const MAX_NAMES: u32 = 8192;
/// Size of the buffer for getdents64(2).
const BUFFER_BYTES: usize = 64 << 10;
/// PATH_MAX.
const MAX_TARGET_BYTES: usize = 4096;

/// A directory entry.
struct Found {
    name: OsString,
    cookie: u64,
    inode: u64,
    kind: Kind,
}

impl Session {
    /// Looks up names one below the other, as far as they exist.
    pub fn walk(&self, from: FileId, names: &[OsString]) -> Result<Walked, Fault> {
        let mut at = self.directory.nodes.node(from)?;
        let mut walked =
            Walked { from: self.entry_of_node(&at)?, entries: Vec::new(), error: None };
        for name in names {
            let next = match at.kind {
                Kind::Directory => self.directory.nodes.child(&at, name, Keep::Open),
                _ => Err(Errno::ENOTDIR.into()),
            };
            let entry = next.and_then(|next| Ok((self.entry_of_node(&next)?, next)));
            match entry {
                Ok((entry, next)) => {
                    walked.entries.push(entry);
                    at = next;
                }
                Err(fault) => {
                    walked.error = Some(fault.into());
                    break;
                }
            }
        }
        Ok(walked)
    }

    /// Returns the files that a walk is going to report.
    pub fn walked_ids(&self, from: FileId, names: &[OsString]) -> Vec<FileId> {
        let mut ids = vec![from];
        let Ok(mut at) = self.directory.nodes.node(from) else { return ids };
        for name in names {
            match self.directory.nodes.child(&at, name, Keep::Open) {
                Ok(next) => at = next,
                Err(_) => break,
            }
            ids.push(at.id);
        }
        ids
    }

    /// Returns the files that a listing is going to report, and the directory, whose names another
    /// session may hold back.
    pub fn listed_ids(&self, directory: FileId, cookie: u64, limit: u32) -> Vec<FileId> {
        let Ok(node) = self.directory.nodes.node(directory) else { return Vec::new() };
        let found = self.names_of(&node, cookie, limit).map(|(found, _)| found).unwrap_or_default();
        let child = |found: Found| self.directory.nodes.child(&node, &found.name, Keep::Way).ok();
        std::iter::once(directory)
            .chain(found.into_iter().filter_map(child).map(|child| child.id))
            .collect()
    }

    /// Lists part of a directory.
    pub fn list(&self, directory: FileId, cookie: u64, limit: u32) -> Result<Listing, Fault> {
        let node = self.directory.nodes.node(directory)?;
        if node.kind != Kind::Directory {
            return Err(Errno::ENOTDIR.into());
        }
        // Before the names are read: a change in between is recalled.
        let entry = self.entry(node.fd.as_fd(), node.id, NAMES)?;
        let (found, is_last) = self.names_of(&node, cookie, limit)?;
        let names = found.into_iter().map(|found| self.listed(&node, found)).collect();
        Ok(Listing { directory: entry, names, is_last })
    }

    fn listed(&self, directory: &Node, found: Found) -> Listed {
        let child = self.directory.nodes.child(directory, &found.name, Keep::Way);
        let entry = child.and_then(|child| self.entry_of_node(&child)).ok();
        Listed {
            name: found.name,
            cookie: found.cookie,
            entry,
            inode: found.inode,
            kind: found.kind,
        }
    }

    fn names_of(
        &self,
        directory: &Node,
        cookie: u64,
        limit: u32,
    ) -> Result<(Vec<Found>, bool), Fault> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open =
            rustix::fs::open(attributes::link_to(directory.fd.as_fd()), flags, Mode::empty())?;
        if cookie != 0 {
            rustix::fs::seek(&open, SeekFrom::Start(cookie))?;
        }
        let limit = limit.clamp(1, MAX_NAMES) as usize;
        let mut buffer = [MaybeUninit::uninit(); BUFFER_BYTES];
        let mut entries = RawDir::new(open, &mut buffer);
        let mut found = Vec::new();
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            if found.len() == limit {
                return Ok((found, false));
            }
            found.push(Found {
                name: name.to_owned(),
                cookie: entry.next_entry_cookie(),
                inode: entry.ino(),
                kind: kind(entry.file_type()),
            });
        }
        Ok((found, true))
    }

    /// Reads a symbolic link.
    pub fn read_link(&self, file: FileId) -> Result<Answer, Fault> {
        let node = self.directory.nodes.node(file)?;
        if node.kind != Kind::Symlink {
            return Err(Errno::EINVAL.into());
        }
        let stamp = self.entry(node.fd.as_fd(), node.id, Leases::ATTRIBUTES)?.stamp;
        let target = rustix::fs::readlinkat(&node.fd, c"", Vec::with_capacity(MAX_TARGET_BYTES))?;
        Ok(Answer::Target { target: OsStr::from_bytes(target.as_bytes()).to_owned(), stamp })
    }
}

fn kind(of: rustix::fs::FileType) -> Kind {
    super::nodes::kind_of(of.as_raw_mode())
}
