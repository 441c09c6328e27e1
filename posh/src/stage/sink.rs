//! One descriptor for output of the remote command: a queue of bytes, written as the descriptor
//! takes them. O_NONBLOCK is never set, since the open file description also belongs to the shell
//! and its other children.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd},
};

use bytes::{Buf, Bytes};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, fcntl},
    sys::socket::{MsgFlags, send},
};
use posh_proto::{
    pieces,
    stage::{Descriptor, descriptor::Kind},
};
use rustix::pipe::{SpliceFlags, splice};

use super::descriptors;

/// A terminal may stop taking bytes at any moment (Ctrl-S); after POLLOUT it takes at least this
/// much (n_tty's WAKEUP_CHARS is 256).
const TTY_WRITE_BYTES: usize = 256;
/// Credit is granted in pieces of this size, a quarter of the window: the sender never runs out of
/// it, and not every write needs a message.
const CREDIT_BYTES: u64 = 1 << 20;
/// Size of our own pipe before the shell's, from which splice(2) can move pages without blocking.
const FERRY_BYTES: i32 = 1 << 20;

enum How {
    /// Files and devices: a write does not block for long.
    Direct,
    Terminal,
    Socket,
    /// By splice(2) through our own pipe: its read end, its write end, and the bytes in it.
    Pipe {
        read: OwnedFd,
        write: OwnedFd,
        held: usize,
    },
    /// A pipe without a pipe of our own: PIPE_BUF bytes after each POLLOUT.
    SmallPipe,
}

/// An output descriptor; see the module.
pub struct Sink {
    /// The descriptor's number.
    pub fd: RawFd,
    how: How,
    queue: VecDeque<Bytes>,
    failed: bool,
    ended: bool,
    undelivered: Option<Errno>,
    undelivered_bytes: usize,
    /// The reader was there when the first bytes came.
    has_delivered: bool,
    /// Bytes that a pipe had room for when its reader left.
    room_bytes: usize,
    uncredited: u64,
    is_file: bool,
    has_written_file: bool,
}

impl Sink {
    /// A sink for an open descriptor.
    pub fn new(descriptor: &Descriptor) -> Self {
        let how = match descriptor.kind() {
            Kind::Pipe => ferry().unwrap_or(How::SmallPipe),
            Kind::Socket => How::Socket,
            Kind::Tty => How::Terminal,
            _ => How::Direct,
        };
        Self {
            fd: descriptor.fd.cast_signed(),
            how,
            queue: VecDeque::new(),
            failed: false,
            ended: false,
            undelivered: None,
            undelivered_bytes: 0,
            has_delivered: false,
            room_bytes: 0,
            uncredited: 0,
            is_file: descriptor.kind() == Kind::File,
            has_written_file: false,
        }
    }

    /// Queues bytes; they are dropped if the descriptor has failed.
    pub fn push(&mut self, data: Bytes) {
        if data.is_empty() {
        } else if self.failed {
            self.undelivered.get_or_insert(Errno::EPIPE);
            self.undelivered_bytes += data.len();
        } else {
            pieces::keep(&mut self.queue, data);
        }
    }

    /// Counts written bytes; returns credit once it is worth a message.
    pub fn credit_for(&mut self, bytes: usize) -> Option<u64> {
        self.uncredited += bytes as u64;
        (self.uncredited >= CREDIT_BYTES).then(|| std::mem::take(&mut self.uncredited))
    }

    /// The error because of which output was not delivered, if any.
    pub fn undelivered(&self) -> Option<Errno> {
        self.undelivered
    }

    /// Returns true if the pipe could have taken all that was not delivered before its reader left:
    /// a local command that was done by then would have noticed nothing.
    pub fn had_room(&self) -> bool {
        self.undelivered_bytes <= self.room_bytes
    }

    /// Checks for delayed write errors; to be called once all is written. A file system may report
    /// at close(2) that accepted data did not reach the file (a full disk behind sshfs or NFS), to
    /// the first closed descriptor of the file. It counts as an error of the write.
    pub fn hear_late_errors(&mut self) {
        if !std::mem::take(&mut self.has_written_file) || self.undelivered.is_some() {
            return;
        }
        // If it can't be duplicated, the kernel closes it when this process ends.
        let closed = nix::unistd::dup(descriptors::borrow(self.fd)).map(nix::unistd::close);
        if let Ok(Err(errno)) = closed {
            self.undelivered = Some(errno);
        }
    }

    /// Marks the end of the output.
    pub fn end(&mut self) {
        self.ended = true;
    }

    /// Nothing is left to write.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.held() == 0
    }

    /// The descriptor has failed.
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// Returns true if the reader's end still matters.
    pub fn is_watched(&self) -> bool {
        !self.failed && !self.ended
    }

    /// The descriptor, for poll(2).
    pub fn borrow(&self) -> BorrowedFd<'static> {
        descriptors::borrow(self.fd)
    }

    /// Writes as much as the descriptor takes now. `ready`: poll(2) reported POLLOUT. Returns the
    /// number of bytes written.
    ///
    /// # Errors
    /// write(2)'s; the sink then drops its queue and all further bytes.
    pub fn write(&mut self, ready: bool) -> Result<usize, Errno> {
        let result = self.write_some(ready);
        match result {
            Ok(bytes) => {
                self.has_written_file |= self.is_file && bytes > 0;
                self.has_delivered |= bytes > 0;
            }
            Err(errno) => self.fail(errno),
        }
        result
    }

    /// Marks the sink as failed: the reader is gone (EPIPE), or the descriptor takes no more.
    pub fn fail(&mut self, errno: Errno) {
        if !self.is_idle() {
            self.undelivered.get_or_insert(errno);
        }
        if !self.failed && errno == Errno::EPIPE {
            let queued: usize = self.queue.iter().map(Bytes::len).sum();
            self.undelivered_bytes = queued + self.held();
            // A reader that left before the first byte had left before a local command's write.
            self.room_bytes = if self.has_delivered { self.room() } else { 0 };
        }
        self.failed = true;
        self.queue.clear();
        if let How::Pipe { held, .. } = &mut self.how {
            *held = 0;
        }
    }

    /// Bytes that fit into a pipe beside those that are in it; 0 for other descriptors.
    fn room(&self) -> usize {
        if !matches!(self.how, How::Pipe { .. } | How::SmallPipe) {
            return 0;
        }
        let size = fcntl(self.borrow(), FcntlArg::F_GETPIPE_SZ).unwrap_or(0);
        let unread = rustix::io::ioctl_fionread(self.borrow()).unwrap_or(u64::MAX);
        usize::try_from(size)
            .unwrap_or(0)
            .saturating_sub(usize::try_from(unread).unwrap_or(usize::MAX))
    }

    fn held(&self) -> usize {
        if let How::Pipe { held, .. } = &self.how { *held } else { 0 }
    }

    fn write_some(&mut self, ready: bool) -> Result<usize, Errno> {
        match self.how {
            How::Direct => self.write_pieces(usize::MAX, usize::MAX),
            How::Terminal if ready => self.write_pieces(TTY_WRITE_BYTES, 1),
            How::SmallPipe if ready => self.write_pieces(nix::libc::PIPE_BUF, 1),
            How::Terminal | How::SmallPipe => Ok(0),
            How::Socket => self.send_pieces(),
            How::Pipe { .. } => self.ferry(),
        }
    }

    fn write_pieces(&mut self, piece_bytes: usize, pieces: usize) -> Result<usize, Errno> {
        let (mut total, mut count) = (0, 0);
        while let Some(front) = self.queue.front_mut() {
            if count == pieces {
                break;
            }
            let piece = &front[..front.len().min(piece_bytes)];
            match nix::unistd::write(descriptors::borrow(self.fd), piece) {
                Ok(n) => {
                    (total, count) = (total + n, count + 1);
                    advance(&mut self.queue, n);
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => break,
                Err(e) => return Err(e),
            }
        }
        Ok(total)
    }

    fn send_pieces(&mut self) -> Result<usize, Errno> {
        let mut total = 0;
        while let Some(front) = self.queue.front() {
            match send(self.fd, front, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL) {
                Ok(n) => {
                    total += n;
                    advance(&mut self.queue, n);
                }
                Err(Errno::EAGAIN | Errno::EINTR) => break,
                Err(e) => return Err(e),
            }
        }
        Ok(total)
    }

    /// Fills our own pipe and splices its pages on, as long as neither blocks.
    fn ferry(&mut self) -> Result<usize, Errno> {
        let How::Pipe { read, write, held } = &mut self.how else { return Ok(0) };
        let mut total = 0;
        loop {
            let mut moved = false;
            if let Some(front) = self.queue.front() {
                match nix::unistd::write(write.as_fd(), front) {
                    Ok(n) => {
                        (*held, moved) = (*held + n, true);
                        advance(&mut self.queue, n);
                    }
                    Err(Errno::EAGAIN | Errno::EINTR) => {}
                    Err(e) => return Err(e),
                }
            }
            if *held > 0 {
                let target = descriptors::borrow(self.fd);
                match splice(read.as_fd(), None, target, None, *held, SpliceFlags::NONBLOCK) {
                    Ok(n) => (*held, total, moved) = (*held - n, total + n, true),
                    Err(e) => match Errno::from_raw(e.raw_os_error()) {
                        Errno::EAGAIN | Errno::EINTR => {}
                        e => return Err(e),
                    },
                }
            }
            if !moved || (self.queue.is_empty() && *held == 0) {
                return Ok(total);
            }
        }
    }
}

fn advance(queue: &mut VecDeque<Bytes>, bytes: usize) {
    if let Some(front) = queue.front_mut() {
        front.advance(bytes);
        if front.is_empty() {
            queue.pop_front();
        }
    }
}

fn ferry() -> Option<How> {
    let flags = nix::fcntl::OFlag::O_CLOEXEC | nix::fcntl::OFlag::O_NONBLOCK;
    let (read, write) = nix::unistd::pipe2(flags).ok()?;
    // The default of 64 KiB suffices when the user's limit of pipe pages is used up.
    let _ = fcntl(write.as_fd(), FcntlArg::F_SETPIPE_SZ(FERRY_BYTES));
    Some(How::Pipe { read, write, held: 0 })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    /// Bytes that a pipe holds (pipe(7)).
    const PIPE_BYTES: usize = 64 << 10;

    /// A pipe's sink after `written` bytes of which `read` were read, whose reader has left.
    fn unread(written: usize, read: usize) -> (Sink, OwnedFd) {
        let (reader, writer) = nix::unistd::pipe().unwrap();
        let descriptor = Descriptor {
            fd: writer.as_raw_fd().cast_unsigned(),
            kind: Kind::Pipe.into(),
            ..Descriptor::default()
        };
        let mut sink = Sink::new(&descriptor);
        sink.push(vec![b'x'; written].into());
        assert_eq!(sink.write(true).unwrap(), written);
        let mut buffer = vec![0; read];
        assert_eq!(nix::unistd::read(&reader, &mut buffer).unwrap(), read);
        drop(reader);
        (sink, writer)
    }

    #[test]
    fn a_pipe_takes_64_kib_beside_what_its_reader_has_read() {
        let rows = [
            (16 << 10, 1, PIPE_BYTES - (16 << 10) + 1),
            (16 << 10, 16 << 10, PIPE_BYTES),
            (PIPE_BYTES, 100, 100),
        ];
        for (written, read, room) in rows {
            for (more, had_room) in [(room, true), (room + 1, false)] {
                let (mut sink, _writer) = unread(written, read);
                sink.fail(Errno::EPIPE);
                sink.push(vec![b'x'; more].into());
                assert_eq!(sink.had_room(), had_room, "{written} {read} {more}");
            }
        }
    }

    #[test]
    fn bytes_that_wait_when_the_reader_leaves_count_too() {
        // Of a megabyte, the pipe takes 64 KiB.
        let (reader, writer) = nix::unistd::pipe().unwrap();
        let fd = writer.as_raw_fd().cast_unsigned();
        let mut sink =
            Sink::new(&Descriptor { fd, kind: Kind::Pipe.into(), ..Descriptor::default() });
        sink.push(vec![b'x'; 1 << 20].into());
        assert!(sink.write(true).unwrap() <= PIPE_BYTES);
        drop(reader);
        sink.fail(Errno::EPIPE);
        assert!(!sink.had_room() && sink.undelivered() == Some(Errno::EPIPE));
    }

    #[test]
    fn a_pipe_whose_reader_left_before_the_first_byte_has_no_room() {
        let (reader, writer) = nix::unistd::pipe().unwrap();
        drop(reader);
        let fd = writer.as_raw_fd().cast_unsigned();
        let mut sink =
            Sink::new(&Descriptor { fd, kind: Kind::Pipe.into(), ..Descriptor::default() });
        sink.push(Bytes::from_static(b"x"));
        assert!(sink.write(true).is_err() && !sink.had_room());
        let mut told_before =
            Sink::new(&Descriptor { fd, kind: Kind::Pipe.into(), ..Descriptor::default() });
        told_before.fail(Errno::EPIPE);
        told_before.push(Bytes::from_static(b"x"));
        assert!(!told_before.had_room());
    }

    #[test]
    fn only_pipes_have_room() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let fd = ours.as_raw_fd().cast_unsigned();
        let mut sink =
            Sink::new(&Descriptor { fd, kind: Kind::Socket.into(), ..Descriptor::default() });
        drop(theirs);
        sink.fail(Errno::EPIPE);
        sink.push(Bytes::from_static(b"x"));
        assert!(!sink.had_room());
    }
}
