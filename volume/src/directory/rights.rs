//! Permission checks before an operation, so that a refused one recalls no leases.
//!
//! Invariant: the kernel would refuse everything that these checks refuse, with the same errno, for
//! the caller that this thread acts for (except for an invalid ACL: EPERM comes before EINVAL). So
//! a missing check costs others a recall, and no check changes the access rules.

use std::{
    ffi::OsStr,
    fs,
    os::fd::{AsFd as _, BorrowedFd},
    sync::LazyLock,
};

use nix::{
    errno::Errno,
    fcntl::AtFlags,
    unistd::{AccessFlags, faccessat},
};
use rustix::fs::{FileType, Mode};

use super::{
    Fault, attributes,
    files::Target,
    nodes::{Keep, Node},
    session::Session,
    sys::{self, Capability},
};
use crate::store::{Changes, FileId, Kind, NameIn, NewTime, Op, OpenFlags, Place, Renaming};

/// `fs.protected_hardlinks` (proc_sys_fs(5)): a user can't link a file of another user unless he
/// may read and write it.
static ARE_LINKS_PROTECTED: LazyLock<bool> = LazyLock::new(|| {
    fs::read("/proc/sys/fs/protected_hardlinks").is_ok_and(|value| value.starts_with(b"1"))
});

impl Session {
    /// Checks the caller's permissions for an op.
    pub fn check_rights(&self, op: &Op) -> Result<(), Fault> {
        match op {
            Op::Set { place, changes } => self.check_changes(*place, changes),
            Op::SetAttribute { place, name, .. } | Op::RemoveAttribute { place, name } => {
                self.check_attribute(*place, name)
            }
            Op::MakeDirectory { parent, name, .. }
            | Op::MakeNode { parent, name, .. }
            | Op::Symlink { parent, name, .. } => self.check_new_name(*parent, name),
            Op::Link { file, parent, name } => {
                match check_link(self.target(*file)?.fd()) {
                    Err(_) if self.child(*parent, name)?.is_some() => Err(Errno::EEXIST.into()),
                    other => other,
                }?;
                self.check_new_name(*parent, name)
            }
            Op::Remove { parent, name, .. } => {
                let parent = self.directory.nodes.node(*parent)?;
                self.check_removal(&parent, name)
            }
            Op::Rename { parent, name, new_parent, new_name, how } => self.check_rename(
                NameIn { parent: *parent, name },
                NameIn { parent: *new_parent, name: new_name },
                *how,
            ),
            Op::Create { parent, name, flags, .. } => match self.child(*parent, name)? {
                Some(file) => self.check_opening(&file, *flags),
                None => self.check_new_name(*parent, name),
            },
            Op::CreateWhole { put, .. } => {
                let (parent, name) = self.place_of(put)?;
                self.check_new_name(parent.id, name)
            }
            Op::Open { place, flags } => self.check_opening(&self.node_to_open(*place)?, *flags),
            _ => Ok(()),
        }
    }

    /// Checks that the file is open for writing, or that the caller may open it so.
    pub fn check_writing(&self, place: Place) -> Result<(), Fault> {
        match self.target(place)? {
            Target::Opened(opened) if opened.flags.contains(OpenFlags::WRITE) => Ok(()),
            Target::Opened(_) => Err(Errno::EBADF.into()),
            Target::Node(node) => {
                self.check_kind(&node, OpenFlags::WRITE)?;
                may_write(node.fd.as_fd())
            }
        }
    }

    /// Checks that the caller may change these attributes.
    pub fn check_changes(&self, place: Place, changes: &Changes) -> Result<(), Fault> {
        let target = self.target(place)?;
        let fd = target.fd();
        if changes.size.is_some() {
            self.check_writing(place).map_err(|fault| not_open_for_it(&target, fault))?;
        }
        if changes.uid.is_some() || changes.gid.is_some() {
            require(may_give(fd, changes)?, Errno::EPERM)?;
        }
        if changes.mode.is_some() {
            require(!is_link(fd)?, Errno::EOPNOTSUPP)?;
            require(owns(fd, Capability::Fowner)?, Errno::EPERM)?;
        }
        match (changes.atime, changes.mtime) {
            (None, None) => Ok(()),
            (Some(NewTime::Now), Some(NewTime::Now)) => match owns(fd, Capability::Fowner)? {
                true => Ok(()),
                false => may_write(fd),
            },
            _ => require(owns(fd, Capability::Fowner)?, Errno::EPERM),
        }
    }

    /// Checks that the caller may create names in a directory.
    pub fn check_new_names(&self, directory: &Node) -> Result<(), Fault> {
        may(directory.fd.as_fd(), AccessFlags::W_OK | AccessFlags::X_OK)
    }

    fn check_opening(&self, file: &Node, flags: OpenFlags) -> Result<(), Fault> {
        self.check_kind(file, flags)?;
        let mut access = AccessFlags::empty();
        access.set(AccessFlags::R_OK, flags.contains(OpenFlags::READ));
        access.set(AccessFlags::W_OK, flags.intersects(OpenFlags::WRITE | OpenFlags::TRUNCATE));
        may(file.fd.as_fd(), access)
    }

    fn check_attribute(&self, place: Place, name: &OsStr) -> Result<(), Fault> {
        attributes::check_namespace(name, Errno::EOPNOTSUPP)?;
        let target = self.target(place)?;
        if !name.as_encoded_bytes().starts_with(b"user.") {
            require(!is_link(target.fd())?, Errno::EOPNOTSUPP)?;
            return require(owns(target.fd(), Capability::Fowner)?, Errno::EPERM);
        }
        // Only regular files and directories have user attributes; those of a sticky directory
        // belong to its owner (xattr(7)).
        let mode = rustix::fs::fstat(target.fd())?.st_mode;
        match FileType::from_raw_mode(mode) {
            FileType::RegularFile => {}
            FileType::Directory if !Mode::from_raw_mode(mode).contains(Mode::SVTX) => {}
            FileType::Directory => require(owns(target.fd(), Capability::Fowner)?, Errno::EPERM)?,
            _ => return Err(Errno::EPERM.into()),
        }
        may_write(target.fd())
    }

    fn check_new_name(&self, parent: FileId, name: &OsStr) -> Result<(), Fault> {
        let directory = self.directory.nodes.node(parent)?;
        match self.check_new_names(&directory) {
            Err(fault) if self.child(parent, name)?.is_none() => Err(fault),
            Err(_) => Err(Errno::EEXIST.into()),
            Ok(()) => Ok(()),
        }
    }

    fn check_removal(&self, parent: &Node, name: &OsStr) -> Result<(), Fault> {
        let allowed = self.check_new_names(parent);
        let attributes = rustix::fs::fstat(&parent.fd)?;
        let is_sticky = Mode::from_raw_mode(attributes.st_mode).contains(Mode::SVTX);
        if allowed.is_ok() && !is_sticky {
            return Ok(());
        }
        let child = self.child(parent.id, name)?.ok_or(Errno::ENOENT)?;
        allowed?;
        let may_all = owns(parent.fd.as_fd(), Capability::Fowner)?
            || owns(child.fd.as_fd(), Capability::Fowner)?;
        require(may_all, Errno::EPERM)
    }

    fn check_rename(
        &self,
        from: NameIn<'_, FileId>,
        to: NameIn<'_, FileId>,
        how: Renaming,
    ) -> Result<(), Fault> {
        let nodes = &self.directory.nodes;
        let (source, target) = (nodes.node(from.parent)?, nodes.node(to.parent)?);
        let checks = || -> Result<(), Fault> {
            self.check_removal(&source, from.name)?;
            match self.child(to.parent, to.name)? {
                Some(_) => self.check_removal(&target, to.name)?,
                None => self.check_new_names(&target)?,
            }
            if from.parent == to.parent {
                return Ok(());
            }
            // A moved directory gets another `..`, which is a write to it.
            let moved = [
                self.child(from.parent, from.name)?,
                self.child(to.parent, to.name)?.filter(|_| how == Renaming::Exchange),
            ];
            let mut directories =
                moved.iter().flatten().filter(|node| node.kind == Kind::Directory);
            directories.try_for_each(|node| may_write(node.fd.as_fd()))
        };
        let Err(fault) = checks() else { return Ok(()) };
        // Errors other than permissions take precedence.
        let file = self.child(from.parent, from.name)?.ok_or(Errno::ENOENT)?;
        match self.child(to.parent, to.name)? {
            Some(other) if how == Renaming::NoReplace && other.id != file.id => {
                Err(Errno::EEXIST.into())
            }
            // Two names of one file: a no-op (rename(2)).
            Some(other) if other.id == file.id => Ok(()),
            None if how == Renaming::Exchange => Err(Errno::ENOENT.into()),
            _ => Err(fault),
        }
    }

    fn child(&self, parent: FileId, name: &OsStr) -> Result<Option<Node>, Fault> {
        let parent = self.directory.nodes.node(parent)?;
        match self.directory.nodes.child(&parent, name, Keep::Open) {
            Ok(child) => Ok(Some(child)),
            Err(fault) if fault == Fault::from(Errno::ENOENT) => Ok(None),
            Err(fault) => Err(fault),
        }
    }
}

/// Maps a fault to EINVAL if the file is open: ftruncate(2) of a read-only descriptor.
fn not_open_for_it(target: &Target, fault: Fault) -> Fault {
    if matches!(target, Target::Opened(_)) { Errno::EINVAL.into() } else { fault }
}

/// Returns true for an allowed chown(2): an owner may change the group to one of his own, and
/// CAP_CHOWN allows everything.
fn may_give(file: BorrowedFd<'_>, changes: &Changes) -> Result<bool, Fault> {
    if sys::has(Capability::Chown)? {
        return Ok(true);
    }
    let present = rustix::fs::fstat(file)?;
    let (uid, gid) = sys::file_ids();
    let in_group = |wanted: u32| -> nix::Result<bool> {
        let groups = nix::unistd::getgroups()?;
        Ok(wanted == present.st_gid
            || wanted == gid
            || groups.iter().any(|group| group.as_raw() == wanted))
    };
    let keeps_owner = changes.uid.is_none_or(|wanted| wanted == present.st_uid);
    Ok(present.st_uid == uid && keeps_owner && changes.gid.map_or(Ok(true), in_group)?)
}

fn check_link(file: BorrowedFd<'_>) -> Result<(), Fault> {
    if !*ARE_LINKS_PROTECTED || owns(file, Capability::Fowner)? {
        return Ok(());
    }
    let mode = rustix::fs::fstat(file)?.st_mode;
    let rights = Mode::from_raw_mode(mode);
    let is_privileged = rights.contains(Mode::SUID) || rights.contains(Mode::SGID | Mode::XGRP);
    let is_plain = FileType::from_raw_mode(mode) == FileType::RegularFile && !is_privileged;
    let is_usable = || may(file, AccessFlags::R_OK | AccessFlags::W_OK).is_ok();
    require(is_plain && is_usable(), Errno::EPERM)
}

/// Returns true for a symbolic link, whose mode and ACL can't be set.
fn is_link(file: BorrowedFd<'_>) -> Result<bool, Fault> {
    Ok(FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode) == FileType::Symlink)
}

fn may_write(file: BorrowedFd<'_>) -> Result<(), Fault> {
    may(file, AccessFlags::W_OK)
}

/// Checks access by mode and ACL, as the kernel does on open.
fn may(file: BorrowedFd<'_>, access: AccessFlags) -> Result<(), Fault> {
    Ok(faccessat(file, c"", access, AtFlags::AT_EACCESS | AtFlags::AT_EMPTY_PATH)?)
}

/// Returns true if the caller is the file's owner, or has the capability `instead`.
fn owns(file: BorrowedFd<'_>, instead: Capability) -> Result<bool, Fault> {
    let owner = rustix::fs::fstat(file)?.st_uid;
    Ok(owner == sys::file_ids().0 || sys::has(instead)?)
}

fn require(is_allowed: bool, otherwise: Errno) -> Result<(), Fault> {
    if is_allowed { Ok(()) } else { Err(otherwise.into()) }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::HashMap,
        ffi::OsString,
        os::unix::fs::{PermissionsExt as _, chown, symlink},
    };

    use super::*;
    use crate::{
        directory::{Directory, DirectorySession, Liveness, Machine, Mutability, Rights},
        leases::Intent,
        store::{Answer, AttributeChange, Caller, Leases, NewMode, Notice, Removal, Store as _},
    };
    use tokio_stream::StreamExt as _;

    const OWNER: u32 = 61_001;
    const OTHER: u32 = 61_002;
    const FLAGS: [OpenFlags; 3] =
        [OpenFlags::READ, OpenFlags::WRITE, OpenFlags::WRITE.union(OpenFlags::TRUNCATE)];

    /// rw-r----- as an extended attribute has it: a version, and (tag, rights, nobody in
    /// particular) each.
    const ACL: &[u8] = b"\x02\0\0\0\x01\0\x06\0\xff\xff\xff\xff\x04\0\x04\0\xff\xff\xff\xff\x20\0\0\0\xff\xff\xff\xff";

    /// Directories (name, mode), each with a file that all may write, one that only its owner may,
    /// a directory, a link and a pipe.
    const DIRECTORIES: [(&str, u32); 3] = [("open", 0o777), ("closed", 0o755), ("sticky", 0o1777)];

    const FILES: [&str; 5] = ["own", "shared", "d", "link", "pipe"];

    fn make(top: &std::path::Path) {
        for (name, mode) in DIRECTORIES {
            let directory = top.join(name);
            fs::create_dir(&directory).unwrap();
            for (file, mode) in [("shared", 0o666), ("own", 0o644)] {
                fs::write(directory.join(file), "x").unwrap();
                fs::set_permissions(directory.join(file), fs::Permissions::from_mode(mode))
                    .unwrap();
            }
            fs::create_dir(directory.join("d")).unwrap();
            fs::hard_link(directory.join("own"), directory.join("again")).unwrap();
            fs::set_permissions(&directory, fs::Permissions::from_mode(mode)).unwrap();
            symlink("own", directory.join("link")).unwrap();
            nix::unistd::mkfifo(
                &directory.join("pipe"),
                nix::sys::stat::Mode::from_bits_truncate(0o644),
            )
            .unwrap();
            chown(directory.join("pipe"), Some(OWNER), Some(OWNER)).unwrap();
            for path in ["", "shared", "own", "d"] {
                chown(directory.join(path), Some(OWNER), Some(OWNER)).unwrap();
            }
        }
    }

    fn changes_of_attributes() -> Vec<Changes> {
        let none = Changes::default();
        let now = Some(NewTime::Now);
        let then = Some(NewTime::At(crate::store::Time { seconds: 1, nanoseconds: 0 }));
        vec![
            Changes { mode: Some(0o640), ..none },
            Changes { uid: Some(OTHER), ..none },
            Changes { gid: Some(OTHER), ..none },
            Changes { size: Some(0), ..none },
            Changes { atime: now, mtime: now, ..none },
            Changes { mtime: now, ..none },
            Changes { mtime: then, ..none },
        ]
    }

    /// Every kind of change, of and in every directory.
    fn ops(id: impl Fn(&str, &str) -> FileId) -> Vec<Op> {
        let mut ops = Vec::new();
        let mode = NewMode::from(0o755);
        for (directory, _) in DIRECTORIES {
            let parent = id(directory, "");
            for name in ["new", "own", "d"] {
                let name: OsString = name.into();
                ops.push(Op::MakeDirectory { parent, name: name.clone(), mode });
                ops.push(Op::MakeNode {
                    parent,
                    name: name.clone(),
                    mode,
                    kind: Kind::Fifo,
                    rdev: 0,
                });
                ops.push(Op::Symlink { parent, name: name.clone(), target: "x".into() });
                ops.push(Op::Remove { parent, name: name.clone(), what: Removal::File });
                ops.push(Op::Remove { parent, name: name.clone(), what: Removal::Directory });
                for flags in FLAGS {
                    ops.push(Op::Create { parent, name: name.clone(), mode, flags });
                    ops.push(Op::Create { parent, name: "link".into(), mode, flags });
                }
                for (other, _) in DIRECTORIES {
                    for file in ["own", "shared"] {
                        ops.push(Op::Link {
                            file: id(other, file).into(),
                            parent,
                            name: name.clone(),
                        });
                    }
                    for old in ["missing", "own", "d", "again"] {
                        for how in [Renaming::Replace, Renaming::NoReplace, Renaming::Exchange] {
                            ops.push(Op::Rename {
                                parent: id(other, ""),
                                name: old.into(),
                                new_parent: parent,
                                new_name: name.clone(),
                                how,
                            });
                        }
                    }
                }
            }
            for file in FILES {
                let place = Place::from(id(directory, file));
                ops.extend(
                    changes_of_attributes().into_iter().map(|changes| Op::Set { place, changes }),
                );
                ops.extend(FLAGS.map(|flags| Op::Open { place, flags }));
                for name in ["user.a", "system.posix_acl_access"] {
                    let (name, value) = (OsString::from(name), bytes::Bytes::from_static(ACL));
                    ops.push(Op::SetAttribute {
                        place,
                        name: name.clone(),
                        value,
                        how: AttributeChange::Any,
                    });
                    ops.push(Op::RemoveAttribute { place, name });
                }
            }
        }
        ops
    }

    /// Returns the check's result, and then the kernel's.
    async fn tried(session: &DirectorySession, caller: &Caller, op: &Op) -> [Result<(), Errno>; 2] {
        let op = op.clone();
        let job = move |session: &std::sync::Arc<Session>| {
            let said = session.check_rights(&op).map_err(Errno::from);
            Ok([said, session.execute(&op, &session.intents(&op)?).map(drop).map_err(Errno::from)])
        };
        session.0.as_caller(caller, job).await.unwrap()
    }

    /// A name that came to stand for another file after an op was announced.
    #[tokio::test]
    async fn only_the_file_that_was_announced_is_truncated() {
        let top = tempfile::tempdir_in("/var/tmp").unwrap();
        fs::write(top.path().join("f"), "x").unwrap();
        let machine = Machine::start().unwrap();
        let directory =
            Directory::open(machine, top.path(), Rights::Own, Mutability::ReadWrite).unwrap();
        let session = DirectorySession::open(directory, Liveness::Own);
        let op = Op::Create {
            parent: session.root(),
            name: "f".into(),
            mode: NewMode { masked: 0o644, withheld: 0 },
            flags: OpenFlags::WRITE | OpenFlags::TRUNCATE,
        };
        let job = move |session: &std::sync::Arc<Session>| {
            let unannounced = session.execute(&op, &Vec::new()).map(drop).map_err(Errno::from);
            let length = fs::metadata(top.path().join("f")).unwrap().len();
            let announced = session.execute(&op, &session.intents(&op)?).map(drop);
            let after = fs::metadata(top.path().join("f")).unwrap().len();
            Ok((unannounced, length, announced.map_err(Errno::from), after))
        };
        let seen = session.0.as_caller(&Caller::default(), job).await.unwrap();
        assert_eq!(seen, (Err(Errno::EAGAIN), 1, Ok(()), 0));
    }

    /// The file that an op was announced for is gone, and the session's announcement of another op
    /// of the directory recalls other leases.
    #[tokio::test]
    async fn a_new_name_is_told_whatever_else_the_session_has_announced() {
        let top = tempfile::tempdir_in("/var/tmp").unwrap();
        fs::write(top.path().join("f"), "x").unwrap();
        let directory = Directory::open(
            Machine::blind().unwrap(),
            top.path(),
            Rights::Own,
            Mutability::ReadWrite,
        )
        .unwrap();
        let [one, other] = [0, 1].map(|_| DirectorySession::open(directory.clone(), Liveness::Own));
        let mut notices = other.notices();
        let root = one.root();
        let list = Op::List { directory: root, cookie: 0, limit: 100 };
        other.call(&Caller::default(), list).await.unwrap();
        let flags = OpenFlags::WRITE;
        let mode = NewMode { masked: 0o644, withheld: 0 };
        let op = Op::Create { parent: root, name: "f".into(), mode, flags };
        let job = move |session: &std::sync::Arc<Session>| {
            let announced = session.intents(&op)?;
            fs::remove_file(top.path().join("f")).unwrap();
            let pending = session.intent(root, Intent::Change(Leases::ATTRIBUTES));
            let _pending = session.announce(&vec![pending]);
            Ok(session.execute(&op, &announced).map(drop).map_err(Errno::from))
        };
        one.0.as_caller(&Caller::default(), job).await.unwrap().unwrap();
        let told = async {
            while let Some(notice) = notices.next().await {
                if matches!(notice, Notice::Recall { file, leases, .. }
                    if file == root && leases.contains(Leases::ENTRIES))
                {
                    return true;
                }
            }
            false
        };
        assert!(tokio::time::timeout(std::time::Duration::from_secs(5), told).await.unwrap());
    }

    /// A tree as [`make`] makes it, and every op on it.
    struct Site {
        _top: tempfile::TempDir,
        session: DirectorySession,
        ops: Vec<Op>,
    }

    impl Site {
        async fn new(machine: &std::sync::Arc<Machine>, caller: &Caller) -> Self {
            let top = tempfile::tempdir_in("/var/tmp").unwrap();
            fs::set_permissions(top.path(), fs::Permissions::from_mode(0o755)).unwrap();
            make(top.path());
            let directory = Directory::open(
                machine.clone(),
                top.path(),
                Rights::Callers,
                Mutability::ReadWrite,
            );
            let session = DirectorySession::open(directory.unwrap(), Liveness::Own);
            let mut ids = HashMap::new();
            for (directory, name) in
                DIRECTORIES.iter().flat_map(|(directory, _)| FILES.map(|name| (*directory, name)))
            {
                let op =
                    Op::Walk { from: session.root(), names: vec![directory.into(), name.into()] };
                let Answer::Walked(walked) = session.call(caller, op).await.unwrap() else {
                    panic!("walked")
                };
                ids.insert((directory, ""), walked.entries[0].attributes.id);
                ids.insert((directory, name), walked.entries[1].attributes.id);
            }
            let ops = ops(|directory, name| {
                *ids.iter().find(|(key, _)| **key == (directory, name)).unwrap().1
            });
            Self { _top: top, session, ops }
        }
    }

    #[tokio::test]
    async fn what_the_kernel_refuses_for_want_of_rights_is_refused_before_and_nothing_else() {
        assert_eq!(nix::unistd::geteuid().as_raw(), 0, "tests run as root");
        let machine = Machine::start().unwrap();
        let (mut count, mut refused, mut wrong) = (0, 0, Vec::new());
        for uid in [0, OWNER, OTHER] {
            let caller = Caller { uid, gid: uid, ..Caller::default() };
            let mut site = Site::new(&machine, &caller).await;
            for number in 0..site.ops.len() {
                let op = site.ops[number].clone();
                let [said, done] = tried(&site.session, &caller, &op).await;
                let for_rights = matches!(done, Err(Errno::EACCES | Errno::EPERM));
                if said != done && (said.is_err() || for_rights) {
                    wrong.push(format!("{uid} {op:?}: {said:?}, then {done:?}"));
                }
                refused += usize::from(said.is_err());
                count += 1;
                // Each op finds the tree as it was made.
                if done.is_ok() {
                    site = Site::new(&machine, &caller).await;
                }
            }
        }
        assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
        // Neither everything nor nothing.
        assert!(refused > count / 10 && refused < count / 2, "{refused} of {count}");
    }
}
