//! Requests for attributes, symbolic links' targets, file system statistics and extended
//! attributes.

use std::{
    ffi::{OsStr, OsString},
    sync::Arc,
};

use bytes::Bytes;

use super::{Volume, table::Node};
use crate::store::{
    Acls, Answer, AttributeChange, Attributes, Caller, Changes, Errno, FileSystem, Leases, Op,
};

impl Volume {
    /// stat(2). Unsent writes are sent first, so that size and times are the server's.
    ///
    /// # Errors
    /// Of the call.
    pub async fn attributes(
        self: &Arc<Self>,
        caller: &Caller,
        number: u64,
    ) -> Result<Attributes, Errno> {
        if let Some(attributes) = self.unborn_attributes(number) {
            return Ok(attributes);
        }
        let file = self.file(number)?;
        self.drain(file).await?;
        if let Some(attributes) = self.remembered_attributes(number) {
            return Ok(attributes);
        }
        let file = self.born(number).await?;
        match self.ask_of(caller, file, Op::Attributes).await {
            Ok(Answer::Entry(entry)) => Ok(entry.attributes),
            Ok(_) => Err(Errno::EPROTO),
            Err(Errno::ESTALE) => self.attributes_of_gone(number).ok_or(Errno::ESTALE),
            Err(errno) => Err(errno),
        }
    }

    /// Last known attributes of a directory that has lost its name on the server, for a process
    /// that works in it: the kernel checks permissions of the working directory before it goes to
    /// `..`. What is in the directory stays unknown.
    fn attributes_of_gone(&self, number: u64) -> Option<Attributes> {
        let last = self.table().node(number)?.last.as_deref().copied()?;
        Some(Attributes { links: 0, ..last })
    }

    fn remembered_attributes(&self, number: u64) -> Option<Attributes> {
        let table = self.table();
        table.node(number).filter(|node| self.is_leased(node))?.attributes
    }

    pub(super) fn is_leased(&self, node: &Node) -> bool {
        node.leases.contains(Leases::ATTRIBUTES) && self.is_good(node)
    }

    /// chmod(2), chown(2), truncate(2), utimensat(2). `open`: the open file for the f-variants,
    /// such as ftruncate(2).
    ///
    /// # Errors
    /// Of the call.
    pub async fn change(
        self: &Arc<Self>,
        caller: &Caller,
        number: u64,
        open: Option<u64>,
        changes: Changes,
    ) -> Result<Attributes, Errno> {
        if let Some(attributes) = self.change_newborn(caller, number, open, &changes) {
            return Ok(attributes);
        }
        let file = self.born(number).await?;
        self.drain(file).await?;
        let open = open.and_then(|open| self.open_file(open).ok());
        let answer = match open {
            Some(open) if open.handle().is_some() => {
                let place = open.place();
                self.ask(caller, Op::Set { place, changes }).await?
            }
            _ => self.ask_of(caller, file, |place| Op::Set { place, changes }).await?,
        };
        match answer {
            Answer::Entry(entry) => Ok(entry.attributes),
            _ => Err(Errno::EPROTO),
        }
    }

    /// readlink(2)
    ///
    /// # Errors
    /// Of the call.
    pub async fn target(self: &Arc<Self>, caller: &Caller, number: u64) -> Result<OsString, Errno> {
        if let Some(target) = self.unborn_target(number) {
            return Ok(target);
        }
        let file = self.born(number).await?;
        if let Some(target) =
            self.table().node(number).filter(|n| self.is_good(n)).and_then(|n| n.target.clone())
        {
            return Ok(target);
        }
        let Answer::Target { target, stamp } = self.ask(caller, Op::ReadLink(file)).await? else {
            return Err(Errno::EPROTO);
        };
        if let Some(node) = self
            .table()
            .node_mut(number)
            .filter(|node| node.attributes.is_some() && stamp >= node.stamp)
        {
            node.target = Some(target.clone());
        }
        Ok(target)
    }

    /// statfs(2)
    ///
    /// # Errors
    /// Of the call.
    pub async fn file_system(&self, caller: &Caller) -> Result<FileSystem, Errno> {
        match self.ask(caller, Op::FileSystem).await? {
            Answer::FileSystem(about) => Ok(about),
            _ => Err(Errno::EPROTO),
        }
    }

    /// getxattr(2)
    ///
    /// # Errors
    /// Of the call.
    pub async fn extended(
        self: &Arc<Self>,
        caller: &Caller,
        number: u64,
        name: &OsStr,
    ) -> Result<Bytes, Errno> {
        match Acls::named(name) {
            Some(acl) => self.acl(caller, number, name, acl).await,
            None => self.ask_extended(caller, number, name).await,
        }
    }

    pub(super) async fn ask_extended(
        self: &Arc<Self>,
        caller: &Caller,
        number: u64,
        name: &OsStr,
    ) -> Result<Bytes, Errno> {
        let file = self.born(number).await?;
        match self
            .ask_of(caller, file, |place| Op::GetAttribute { place, name: name.to_owned() })
            .await?
        {
            Answer::Value { value, .. } => Ok(value),
            _ => Err(Errno::EPROTO),
        }
    }

    /// setxattr(2)
    ///
    /// # Errors
    /// Of the call.
    pub async fn set_extended(
        self: &Arc<Self>,
        caller: &Caller,
        number: u64,
        name: &OsStr,
        value: Bytes,
        how: AttributeChange,
    ) -> Result<(), Errno> {
        let file = self.born(number).await?;
        let op =
            |place| Op::SetAttribute { place, name: name.to_owned(), value: value.clone(), how };
        self.ask_of(caller, file, op).await?;
        self.acl_changed(number, name);
        Ok(())
    }

    /// listxattr(2)
    ///
    /// # Errors
    /// Of the call.
    pub async fn extended_names(
        self: &Arc<Self>,
        caller: &Caller,
        number: u64,
    ) -> Result<Vec<OsString>, Errno> {
        let file = self.born(number).await?;
        match self.ask_of(caller, file, Op::ListAttributes).await? {
            Answer::Names { names, .. } => Ok(names),
            _ => Err(Errno::EPROTO),
        }
    }

    /// removexattr(2)
    ///
    /// # Errors
    /// Of the call.
    pub async fn remove_extended(
        self: &Arc<Self>,
        caller: &Caller,
        number: u64,
        name: &OsStr,
    ) -> Result<(), Errno> {
        let file = self.born(number).await?;
        self.ask_of(caller, file, |place| Op::RemoveAttribute { place, name: name.to_owned() })
            .await?;
        self.acl_changed(number, name);
        Ok(())
    }
}
