//! POSIX ACLs of files, which the kernel asks for where it checks permissions itself: remembered
//! under the lease of the attributes. Most files have none, which their attributes tell.

use std::{ffi::OsStr, sync::Arc};

use bytes::Bytes;

use super::{Volume, table::Node};
use crate::store::{Acls, Attributes, Caller, Errno, Time};

/// An ACL of up to 60 entries is remembered.
const MAX_ACL_BYTES: usize = 512;

/// ACLs of a file as it was when the store was asked for them.
#[derive(Debug)]
pub(super) struct KnownAcls {
    of: (u64, Time, u32),
    /// Each as an extended attribute; `None`: there is none.
    known: Vec<(Acls, Option<Bytes>)>,
}

/// Says that whoever might read a file may do so still. What an ACL says is not known: any change
/// may be one of it.
pub(super) fn has_same_rights(before: &Attributes, now: &Attributes) -> bool {
    let rights = |of: &Attributes| (of.mode, of.uid, of.gid, of.acls);
    let has_acl = now.acls.is_some_and(|acls| acls.contains(Acls::ACCESS));
    rights(before) == rights(now) && (!has_acl || before.ctime == now.ctime)
}

impl Node {
    /// Another value whenever an ACL may be another, also by what was changed in memory.
    fn acls_of(&self) -> Option<(u64, Time, u32)> {
        self.attributes.map(|its| (its.version, its.ctime, its.mode))
    }

    /// An ACL as the store would tell it, if that is known; to be used under the lease.
    pub fn known_acl(&self, acl: Acls) -> Option<Option<Bytes>> {
        let told = self.attributes.and_then(|attributes| attributes.acls);
        if self.unborn.is_some() || told.is_some_and(|acls| !acls.contains(acl)) {
            // Files are made in memory where they get none.
            return Some(None);
        }
        let acls = self.acls.as_ref().filter(|acls| Some(acls.of) == self.acls_of())?;
        acls.known.iter().find(|(which, _)| *which == acl).map(|(_, value)| value.clone())
    }

    /// Remembers what the store has said of one.
    pub fn note_acl(&mut self, acl: Acls, value: Option<Bytes>) {
        let is_short = value.as_ref().is_none_or(|value| value.len() <= MAX_ACL_BYTES);
        let Some(of) = self.acls_of().filter(|_| is_short) else { return };
        if self.acls.as_ref().is_none_or(|acls| acls.of != of) {
            self.acls = Some(Box::new(KnownAcls { of, known: Vec::new() }));
        }
        if let Some(acls) = &mut self.acls {
            acls.known.retain(|(which, _)| *which != acl);
            acls.known.push((acl, value));
        }
    }
}

impl Volume {
    /// The kernel asks for it before it lets anybody but the owner in, and keeps the answer as long
    /// as the attributes; that of the root it does not keep.
    pub(super) async fn acl(
        self: &Arc<Self>,
        caller: &Caller,
        number: u64,
        (name, acl): (&OsStr, Acls),
    ) -> Result<Bytes, Errno> {
        if let Some(known) = self.remembered_acl(number, acl) {
            return known;
        }
        let before = self.leased(number);
        let answer = match self.ask_extended(caller, number, name).await {
            // The kernel would take any other error for a refusal.
            Err(Errno::EOPNOTSUPP) => Err(Errno::ENODATA),
            answer => answer,
        };
        if before.is_none() || self.leased(number) != before {
            // Nobody would tell of a change of what the kernel is about to keep.
            self.forget_attributes(number);
            return answer;
        }
        if let Some(node) = self.table().node_mut(number) {
            match &answer {
                Ok(value) => node.note_acl(acl, Some(value.clone())),
                Err(Errno::ENODATA) => node.note_acl(acl, None),
                Err(_) => {}
            }
        }
        answer
    }

    /// An ACL that nobody has to be asked for, or that it is not there.
    pub fn remembered_acl(&self, number: u64, acl: Acls) -> Option<Result<Bytes, Errno>> {
        let table = self.table();
        let known = table.node(number).filter(|node| self.is_leased(node))?.known_acl(acl)?;
        Some(known.ok_or(Errno::ENODATA))
    }

    /// The same as long as a lease of the file's attributes is held without a break, and they are
    /// as they were.
    fn leased(&self, number: u64) -> Option<(u32, Attributes)> {
        let table = self.table();
        let node = table.node(number).filter(|node| self.is_leased(node))?;
        Some((node.losses, node.attributes?))
    }

    /// By this session, which is not told of its own changes. What others may do, and what new
    /// files get, only the server knows from now on.
    pub(super) fn acl_changed(&self, number: u64, name: &OsStr) {
        let mut table = self.table();
        if let Some(node) = table.node_mut(number).filter(|_| Acls::named(name).is_some()) {
            node.own = None;
            node.reader = None;
            node.acls = None;
            // What is on its way may be older.
            node.losses = node.losses.wrapping_add(1);
        }
    }
}
