//! POSIX ACLs of files, which the kernel requests if it checks permissions itself. They are cached
//! under [`Leases::ATTRIBUTES`](crate::store::Leases::ATTRIBUTES). Attributes say if a file has
//! none, as most.

use std::{ffi::OsStr, sync::Arc};

use bytes::Bytes;

use super::{Volume, table::Node};
use crate::store::{Acls, Attributes, Caller, Errno, Time};

/// Limit for cached ACLs: about 60 entries.
const MAX_ACL_BYTES: usize = 512;

/// Cached ACLs of a file, with the state of the file that they are valid for.
#[derive(Debug)]
pub(super) struct KnownAcls {
    of: (u64, Time, u32),
    /// Each as an extended attribute; `None`: there is none.
    known: Vec<(Acls, Option<Bytes>)>,
}

/// Returns true if access rights are certainly unchanged. With an ACL, any change of the file may
/// be one of the ACL.
pub(super) fn has_same_rights(before: &Attributes, now: &Attributes) -> bool {
    let rights = |of: &Attributes| (of.mode, of.uid, of.gid, of.acls);
    let has_acl = now.acls.is_some_and(|acls| acls.contains(Acls::ACCESS));
    rights(before) == rights(now) && (!has_acl || before.ctime == now.ctime)
}

impl Node {
    /// Returns a key that changes whenever an ACL may have changed, also in memory.
    fn acls_of(&self) -> Option<(u64, Time, u32)> {
        self.attributes.map(|its| (its.version, its.ctime, its.mode))
    }

    /// Returns the cached ACL; the inner `None`: the file has none. Valid only under the lease.
    pub fn known_acl(&self, acl: Acls) -> Option<Option<Bytes>> {
        let told = self.attributes.and_then(|attributes| attributes.acls);
        if self.unborn.is_some() || told.is_some_and(|acls| !acls.contains(acl)) {
            // Files are created in memory only if they get no ACL.
            return Some(None);
        }
        let acls = self.acls.as_ref().filter(|acls| Some(acls.of) == self.acls_of())?;
        acls.known.iter().find(|(which, _)| *which == acl).map(|(_, value)| value.clone())
    }

    /// Caches an ACL from the store.
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
    /// Returns an ACL for the kernel, which needs it before it grants access to users other than
    /// the owner. It caches the answer with the attributes, except for the root directory.
    pub(super) async fn acl(
        self: &Arc<Self>,
        caller: &Caller,
        number: u64,
        name: &OsStr,
        acl: Acls,
    ) -> Result<Bytes, Errno> {
        if let Some(known) = self.remembered_acl(number, acl) {
            return known;
        }
        let before = self.leased(number);
        let answer = match self.ask_extended(caller, number, name).await {
            // The kernel would treat any other error as a refusal.
            Err(Errno::EOPNOTSUPP) => Err(Errno::ENODATA),
            answer => answer,
        };
        if before.is_none() || self.leased(number) != before {
            // Without a lease, a change of the ACL that the kernel is about to cache would be
            // missed.
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

    /// Returns a cached ACL, or `ENODATA` if the file certainly has none.
    pub fn remembered_acl(&self, number: u64, acl: Acls) -> Option<Result<Bytes, Errno>> {
        let table = self.table();
        let known = table.node(number).filter(|node| self.is_leased(node))?.known_acl(acl)?;
        Some(known.ok_or(Errno::ENODATA))
    }

    /// Returns a value that stays the same only while the lease of the file's attributes is held
    /// without interruption, and they are unchanged.
    fn leased(&self, number: u64) -> Option<(u32, Attributes)> {
        let table = self.table();
        let node = table.node(number).filter(|node| self.is_leased(node))?;
        Some((node.losses, node.attributes?))
    }

    /// Handles a change of an ACL by this session, for which it gets no recall. From now on only
    /// the server knows the access rights, and the permissions of new files.
    pub(super) fn acl_changed(&self, number: u64, name: &OsStr) {
        let mut table = self.table();
        if let Some(node) = table.node_mut(number).filter(|_| Acls::named(name).is_some()) {
            node.own = None;
            node.reader = None;
            node.acls = None;
            // Answers in flight may be older.
            node.losses = node.losses.wrapping_add(1);
        }
    }
}
