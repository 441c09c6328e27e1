//! Protocol between the daemon and its runners, over UNIX socket pairs: length-delimited protobuf
//! (see `posh_proto::frame`), and descriptors.
//!
//! * The control socket, one per runner: a [`ViewSpec`], answered by a [`ViewReply`]; from then on
//!   one byte with one descriptor per run.
//! * That descriptor is the run's own socket: the count of descriptors, the descriptors, a
//!   [`SupervisorJob`]; then `RunInput` (signals) to the supervisor and `RunOutput` (started,
//!   rejected, exited) from it, as in the contract. A long list of a command's changes comes before
//!   its exit ([`write_end`]). Closing the socket, on either side, ends the run and all its
//!   processes.

use std::{
    io::{self, IoSlice, Read as _, Write as _},
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
};

use bytes::{BufMut as _, Bytes, BytesMut};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use posh_proto::{
    executor::{
        Attributes, ChangedDirectory, ClientFile, Exited, NamedKind, RunOutput, Stage, run_output,
    },
    frame,
};
use prost::Message;

pub use crate::identity::ViewUser;
use crate::sys;

/// The kernel's own limit (SCM_MAX_FD) is 253.
pub const DESCRIPTORS_PER_MESSAGE: usize = 200;

/// Extent to which a runner hides the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum Isolation {
    /// Nothing: runs see the server's own tree. Only for mounts that have the
    /// same path on both sides.
    Nothing = 0,
    /// A mount namespace.
    Mounts = 1,
    /// A mount namespace and a PID namespace.
    MountsAndProcesses = 2,
}

/// The file tree that a runner's commands see.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ViewSpec {
    /// [`Isolation`].
    #[prost(enumeration = "Isolation", tag = "1")]
    pub isolation: i32,
    /// The mounts of the workstation, shallow ones first.
    #[prost(message, repeated, tag = "2")]
    pub mounts: Vec<ViewMount>,
    /// The user's configuration files.
    #[prost(message, repeated, tag = "3")]
    pub client_files: Vec<ClientFile>,
    /// A directory of the runner's own on disk, for the view's /tmp and more.
    #[prost(bytes = "vec", tag = "4")]
    pub scratch: Vec<u8>,
    /// The soft limit of open files that commands start with; the daemon and
    /// its runners have raised their own.
    #[prost(uint64, tag = "5")]
    pub open_files: u64,
    /// The user that commands run as; the executor's own when there is none.
    #[prost(message, optional, tag = "6")]
    pub user: Option<ViewUser>,
    /// Bounds of the commands.
    #[prost(message, required, tag = "7")]
    pub bounds: Bounds,
    /// Paths that commands do not see by their own names; see the module `hidden`.
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub hidden: Vec<Vec<u8>>,
}

/// Bounds of the commands; 0 is no bound.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
pub struct Bounds {
    /// Processes and threads at a time, in one PID namespace and of one user.
    #[prost(uint64, tag = "1")]
    pub processes: u64,
    /// Memory that one process may write to.
    #[prost(uint64, tag = "2")]
    pub memory_bytes: u64,
    /// The size to which a file may be written.
    #[prost(uint64, tag = "3")]
    pub file_bytes: u64,
    /// The size of the temporary directories of a view, all together.
    #[prost(uint64, tag = "4")]
    pub tmp_bytes: u64,
    /// Files that one process may have open.
    #[prost(uint64, tag = "5")]
    pub open_files: u64,
}

impl Bounds {
    /// Like `self`, but with at most this memory, which includes the temporary directories.
    pub fn with_memory(self, bytes: Option<u64>) -> Self {
        let least = |own: u64| {
            [Some(own), bytes].into_iter().flatten().filter(|bytes| *bytes > 0).min().unwrap_or(0)
        };
        Self { memory_bytes: least(self.memory_bytes), tmp_bytes: least(self.tmp_bytes), ..self }
    }
}

/// One export at a path of the workstation.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
pub struct ViewMount {
    /// Its path on the workstation.
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
    /// The export's directory on the server.
    #[prost(bytes = "vec", tag = "2")]
    pub directory: Vec<u8>,
    /// Path below the export's directory.
    #[prost(bytes = "vec", tag = "3")]
    pub sub_path: Vec<u8>,
    /// Commands may not write.
    #[prost(bool, tag = "4")]
    pub read_only: bool,
    /// Programs in it may be started.
    #[prost(bool, tag = "5")]
    pub exec: bool,
    /// Symbolic links in it lead nowhere.
    #[prost(bool, tag = "6")]
    pub no_symlinks: bool,
    /// On the workstation, files in it have no holes.
    #[prost(bool, tag = "7")]
    pub no_holes: bool,
    /// On the workstation, what is mounted below its directory can't be reached.
    #[prost(bool, tag = "8")]
    pub one_file_system: bool,
}

/// Result of building the view.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
pub struct ViewReply {
    /// Empty on success.
    #[prost(string, tag = "1")]
    pub error: String,
    /// `Rejected.Kind` of the error.
    #[prost(int32, tag = "2")]
    pub kind: i32,
    /// Confinement of the commands.
    #[prost(message, required, tag = "3")]
    pub reached: ConfinementReport,
    /// The exports' directories, in the order of the specification's mounts; none without a mount
    /// namespace.
    #[prost(message, repeated, tag = "4")]
    pub directories: Vec<DirectoryId>,
}

/// A directory's identity: no other one has it as long as this one is in use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
pub struct DirectoryId {
    /// stat(2), `st_dev`.
    #[prost(uint64, tag = "1")]
    pub device: u64,
    /// `st_ino`.
    #[prost(uint64, tag = "2")]
    pub inode: u64,
}

impl DirectoryId {
    /// Of an open directory.
    pub fn of(directory: impl AsFd) -> nix::Result<Self> {
        let status = nix::sys::stat::fstat(directory)?;
        Ok(Self { device: status.st_dev, inode: status.st_ino })
    }
}

/// Confinement of commands, as descriptions.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
pub struct ConfinementReport {
    /// Mechanisms in force.
    #[prost(string, repeated, tag = "1")]
    pub has: Vec<String>,
    /// Mechanisms that this machine lacks, each with its reason.
    #[prost(string, repeated, tag = "2")]
    pub lacks: Vec<String>,
}

/// The work of one supervisor.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SupervisorJob {
    /// As in the contract; pipes and ptys by their ids.
    #[prost(message, repeated, tag = "1")]
    pub stages: Vec<Stage>,
    /// Kinds and ids of the descriptors sent before, in the same order.
    #[prost(message, repeated, tag = "2")]
    pub ends: Vec<PipeEnd>,
    /// The supervisor reports times, by this machine's `CLOCK_MONOTONIC`.
    #[prost(bool, tag = "3")]
    pub trace: bool,
    /// Files that each stage may access, in the order of the stages.
    #[prost(message, repeated, tag = "4")]
    pub fences: Vec<Fence>,
    /// The last descriptor, which is none of the ends, is the `cgroup.procs` of the run's cgroup.
    #[prost(bool, tag = "5")]
    pub has_cgroup: bool,
}

/// Files of the mounts that a stage may access.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Fence {
    /// All of them: the command is not annotated.
    #[prost(bool, tag = "1")]
    pub everything: bool,
    /// Paths that it names.
    #[prost(message, repeated, tag = "2")]
    pub grants: Vec<Grant>,
    /// Programs that it starts: names, or absolute paths.
    #[prost(string, repeated, tag = "3")]
    pub starts: Vec<String>,
    /// It changes files otherwise than by its redirects.
    #[prost(bool, tag = "4")]
    pub changes: bool,
    /// Indices of the stage's guards that the server's own annotation has; others are the client's
    /// alone.
    #[prost(uint32, repeated, tag = "5")]
    pub own_guards: Vec<u32>,
}

/// One path that a stage uses.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Grant {
    /// As in the stage's arguments, relative to its directory.
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
    /// [`Access`].
    #[prost(enumeration = "Access", tag = "2")]
    pub access: i32,
    /// The last component is not followed if it is a link.
    #[prost(bool, tag = "3")]
    pub no_follow: bool,
    /// Grants the nearest directory from there upwards that has an entry of one of these names;
    /// without names, the path.
    #[prost(string, repeated, tag = "4")]
    pub up_to: Vec<String>,
    /// With `up_to`: this path below that directory.
    #[prost(string, tag = "5")]
    pub below: String,
    /// The command opens it, so that it has to be a regular file or a directory.
    #[prost(bool, tag = "6")]
    pub opened: bool,
}

/// Kind of access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum Access {
    /// A file or a tree is read.
    Read = 0,
    /// One file is written.
    Output = 1,
    /// A file or tree is changed, or itself replaced or removed, with as much of the directory
    /// around it as that takes.
    Change = 2,
    /// Entries of a tree are changed, but not the tree's own name.
    Within = 3,
}

/// One end of a pipe, or the terminal side of a pty.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Message)]
pub struct PipeEnd {
    /// [`EndKind`].
    #[prost(enumeration = "EndKind", tag = "1")]
    pub kind: i32,
    /// The pipe's or pty's id in the run.
    #[prost(uint32, tag = "2")]
    pub id: u32,
}

/// Kind of an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum EndKind {
    /// The end of a pipe that is read.
    PipeRead = 0,
    /// The end of a pipe that is written.
    PipeWrite = 1,
    /// The terminal side of a pty.
    Pty = 2,
}

/// Writes one frame, blocking.
pub fn write_frame(mut socket: &UnixStream, message: &impl Message) -> io::Result<()> {
    let mut buffer = BytesMut::new();
    frame::encode(message, &mut buffer);
    socket.write_all(&buffer)
}

/// Flag in the length of a frame with a list of changes; the length is followed by the list's size
/// in memory.
pub const HAS_CHANGES: u32 = 1 << 31;
/// The head of such a frame.
pub const CHANGES_HEAD_BYTES: usize = 8;
/// A list up to this size is sent within its command's exit.
const SMALL_CHANGES_BYTES: usize = 16 << 10;

/// Writes the exit of a command, blocking. A long list of changes has a frame of its own before it:
/// the daemon reserves room for the list before it reads it, or leaves it out.
pub fn write_end(mut socket: &UnixStream, mut exited: Exited) -> io::Result<()> {
    let bytes = memory_of(&exited.changed_directories);
    if bytes > SMALL_CHANGES_BYTES {
        let list = Exited {
            changed_directories: std::mem::take(&mut exited.changed_directories),
            ..Exited::default()
        };
        let length = u32::try_from(list.encoded_len()).map_err(io::Error::other)?;
        let mut buffer = BytesMut::with_capacity(CHANGES_HEAD_BYTES + list.encoded_len());
        buffer.put_u32_le(length | HAS_CHANGES);
        buffer.put_u32_le(u32::try_from(bytes).unwrap_or(u32::MAX));
        list.encode(&mut buffer).map_err(io::Error::other)?;
        drop(list);
        socket.write_all(&buffer)?;
    }
    write_frame(socket, &RunOutput { kind: Some(run_output::Kind::Exited(exited)) })
}

/// Memory that a list of changes takes once it is decoded.
fn memory_of(directories: &[ChangedDirectory]) -> usize {
    let of = |directory: &ChangedDirectory| {
        let names = (directory.written.len() + directory.removed.len()) * size_of::<Bytes>();
        let attributes = directory.written_now.len() * size_of::<Attributes>();
        let kinds = directory.kinds.len() * size_of::<NamedKind>();
        // Field, tag and length.
        size_of::<ChangedDirectory>() + directory.encoded_len() + 8 + names + attributes + kinds
    };
    directories.iter().map(of).sum()
}

/// Reads one frame, blocking. Reads nothing beyond it, because what follows may
/// carry descriptors.
pub fn read_frame<M: Message + Default>(mut socket: &UnixStream) -> io::Result<M> {
    let mut buffer = BytesMut::zeroed(frame::HEADER_BYTES);
    socket.read_exact(&mut buffer)?;
    let length = u32::from_le_bytes(buffer[..].try_into().expect("four bytes")) as usize;
    if length > frame::MAX_FRAME_BYTES {
        return Err(io::Error::other(frame::FrameError::TooLong(length)));
    }
    buffer.resize(frame::HEADER_BYTES + length, 0);
    socket.read_exact(&mut buffer[frame::HEADER_BYTES..])?;
    frame::decode(&mut buffer)
        .map_err(io::Error::other)?
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Reads the count of descriptors and then the descriptors, blocking.
pub fn read_descriptors(mut socket: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut count = [0; 4];
    socket.read_exact(&mut count)?;
    let count = u32::from_le_bytes(count) as usize;
    let mut received = Vec::new();
    while received.len() < count {
        let some = sys::receive_descriptors(socket.as_fd())?;
        if some.is_empty() {
            return Err(io::Error::other("fewer descriptors arrived than were announced"));
        }
        received.extend(some);
    }
    Ok(received)
}

/// Sends one byte with `descriptors` (at most [`DESCRIPTORS_PER_MESSAGE`]), once.
pub fn send_descriptors(socket: BorrowedFd<'_>, descriptors: &[RawFd]) -> io::Result<()> {
    let rights = [ControlMessage::ScmRights(descriptors)];
    sendmsg::<()>(
        socket.as_raw_fd(),
        &[IoSlice::new(b"d")],
        &rights,
        MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_a_list_of_changes_is_decoded_into_counts() {
        let kinds = vec![NamedKind { name: "n".into(), link: "l".into() }; 1000];
        let directory =
            ChangedDirectory { path: "/m".into(), kinds, ..ChangedDirectory::default() };
        assert!(memory_of(&[directory]) > 1000 * size_of::<NamedKind>());
    }
}
