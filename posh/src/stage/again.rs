//! Repeats a read-only command locally when the machine that ran it is lost. It runs as a child,
//! whose outputs pass through this process, so that bytes delivered before are skipped. The child
//! must write them again identically; otherwise it is an error, since output can't be withdrawn.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd, RawFd},
        unix::fs::FileExt,
    },
};

use bytes::{Bytes, BytesMut};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::{
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Pid, Whence, lseek, pipe2},
};
use posh_proto::{
    digest::Digest,
    stage::{self as wire, Delivered, Exit, exit::How},
};
use rustix::process::{PidfdFlags, pidfd_open};

use super::{descriptors, process};

/// Bytes per read of the child's output.
const READ_BYTES: usize = 64 << 10;

/// The repeated command.
pub struct Again {
    child: Pid,
    ended: OwnedFd,
    status: Option<How>,
    core_dumped: bool,
    outputs: Vec<RepeatedOutput>,
}

/// One of its outputs.
struct RepeatedOutput {
    fd: RawFd,
    /// `None` at its end.
    pipe: Option<OwnedFd>,
    /// Bytes still to skip.
    left_bytes: u64,
    seen: Digest,
    expected: u64,
}

/// Error: the child's output differs from the bytes delivered before.
#[derive(Debug, PartialEq, Eq)]
pub struct Differs;

/// Events of the child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChildEvent {
    /// The process has ended.
    End,
    /// An output is readable; its index.
    Output(usize),
}

impl Again {
    /// Starts `command` in a child. The command executes a program; if that fails, its result is
    /// the child's exit status.
    ///
    /// # Errors
    /// No child was started.
    pub fn start(delivered: &[Delivered], command: impl FnOnce() -> i32) -> io::Result<Self> {
        let mut outputs = Vec::new();
        let mut ends = Vec::new();
        for one in delivered {
            let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
            fcntl(&read, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
            outputs.push(RepeatedOutput::new(one, read)?);
            ends.push((write, one));
        }
        let child = process::fork(|| {
            for (write, one) in &ends {
                for fd in std::iter::once(&one.fd).chain(&one.also) {
                    if process::put(write.as_fd(), fd.cast_signed()).is_err() {
                        return super::EXIT_POSH_FAILED;
                    }
                }
            }
            command()
        })?;
        let number = rustix::process::Pid::from_raw(child.as_raw()).ok_or(Errno::ECHILD)?;
        let ended = pidfd_open(number, PidfdFlags::empty())?;
        Ok(Self { child, ended, status: None, core_dumped: false, outputs })
    }

    /// Descriptors to poll; `may_flow` says if an output's descriptor takes more.
    pub fn awaited(&self, may_flow: impl Fn(RawFd) -> bool) -> Vec<(ChildEvent, BorrowedFd<'_>)> {
        let outputs = self.outputs.iter().enumerate().filter(|(_, output)| may_flow(output.fd));
        let mut awaited: Vec<_> = outputs
            .filter_map(|(i, output)| Some((ChildEvent::Output(i), output.pipe.as_ref()?.as_fd())))
            .collect();
        if self.status.is_none() {
            awaited.push((ChildEvent::End, self.ended.as_fd()));
        }
        awaited
    }

    /// Reads an output once; returns its descriptor and the new bytes, `None` at the end.
    ///
    /// # Errors
    /// [`Differs`]; then the child must be killed.
    pub fn read(&mut self, index: usize) -> Result<(RawFd, Option<Bytes>), Differs> {
        let output = &mut self.outputs[index];
        let Some(pipe) = &output.pipe else { return Ok((output.fd, None)) };
        let mut buffer = BytesMut::with_capacity(READ_BYTES);
        match process::read_into(pipe, &mut buffer, READ_BYTES) {
            Ok(count) if count > 0 => Ok((output.fd, Some(output.leave_out(buffer.freeze())?))),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {
                Ok((output.fd, Some(Bytes::new())))
            }
            Ok(_) | Err(_) => {
                output.pipe = None;
                if output.left_bytes > 0 { Err(Differs) } else { Ok((output.fd, None)) }
            }
        }
    }

    /// Closes an output whose reader is gone: the child gets SIGPIPE as it would locally.
    pub fn close(&mut self, fd: RawFd) {
        let closed = self.outputs.iter_mut().filter(|output| output.fd == fd);
        closed.for_each(|output| (output.pipe, output.left_bytes) = (None, 0));
    }

    /// Reaps the child if it has ended.
    pub fn reap(&mut self) {
        match waitpid(self.child, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::Exited(_, code)) => self.status = Some(How::Code(code.cast_unsigned())),
            Ok(WaitStatus::Signaled(_, signal, core)) => {
                (self.status, self.core_dumped) =
                    (Some(How::Signal((signal as i32).cast_unsigned())), core);
            }
            _ => {}
        }
    }

    /// Forwards a signal.
    pub fn signal(&self, signal: Signal) {
        if self.status.is_none() {
            let _ = kill(self.child, signal);
        }
    }

    /// Kills the child.
    pub fn abandon(&mut self) {
        self.signal(Signal::SIGKILL);
        if self.status.is_none() {
            let _ = waitpid(self.child, None);
        }
    }

    /// Its status, once it has ended and all its output is read.
    pub fn end(&self) -> Option<Exit> {
        let how =
            self.status.filter(|_| self.outputs.iter().all(|output| output.pipe.is_none()))?;
        Some(Exit { how: Some(how), core_dumped: self.core_dumped, ..wire::Exit::default() })
    }
}

impl RepeatedOutput {
    fn new(delivered: &Delivered, pipe: OwnedFd) -> io::Result<Self> {
        let (fd, pipe) = (delivered.fd.cast_signed(), Some(pipe));
        let seen = Digest::default();
        match delivered.file_offset {
            None => {
                Ok(Self { fd, pipe, left_bytes: delivered.bytes, seen, expected: delivered.digest })
            }
            Some(offset) => {
                let written = written(fd, offset)?;
                Ok(Self { fd, pipe, left_bytes: written.bytes(), seen, expected: written.value() })
            }
        }
    }

    /// Removes the bytes that were delivered before.
    fn leave_out(&mut self, mut data: Bytes) -> Result<Bytes, Differs> {
        if self.left_bytes == 0 {
            return Ok(data);
        }
        let old =
            data.split_to(usize::try_from(self.left_bytes).unwrap_or(usize::MAX).min(data.len()));
        self.seen.add(&old);
        self.left_bytes -= old.len() as u64;
        if self.left_bytes == 0 && self.seen.value() != self.expected {
            return Err(Differs);
        }
        Ok(data)
    }
}

/// Digest of a file from `offset` to its end; moves the descriptor's offset to the end.
fn written(fd: RawFd, offset: u64) -> io::Result<Digest> {
    // The descriptor may be open for writing only.
    let file = File::open(format!("/proc/self/fd/{fd}"))?;
    let mut digest = Digest::default();
    let mut piece = vec![0; READ_BYTES];
    loop {
        match file.read_at(&mut piece, offset + digest.bytes())? {
            0 => break,
            count => digest.add(&piece[..count]),
        }
    }
    let end = i64::try_from(offset + digest.bytes()).unwrap_or(i64::MAX);
    lseek(descriptors::borrow(fd), end, Whence::SeekSet)?;
    Ok(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(before: &[u8]) -> RepeatedOutput {
        let mut digest = Digest::default();
        digest.add(before);
        let delivered = Delivered {
            fd: 1,
            bytes: digest.bytes(),
            digest: digest.value(),
            ..Delivered::default()
        };
        RepeatedOutput::new(&delivered, pipe2(OFlag::O_CLOEXEC).unwrap().0).unwrap()
    }

    #[test]
    fn what_was_delivered_is_left_out_once() {
        let mut output = output(b"hello ");
        let pieces: [&[u8]; 3] = [b"hel", b"lo wor", b"ld"];
        let rest: Result<Vec<Bytes>, _> =
            pieces.iter().map(|p| output.leave_out(Bytes::copy_from_slice(p))).collect();
        assert_eq!(rest.unwrap().concat(), b"world");
    }

    #[test]
    fn other_bytes_are_found() {
        let mut output = output(b"hello ");
        assert_eq!(output.leave_out(Bytes::from_static(b"hellO world")), Err(Differs));
    }

    #[test]
    fn what_is_in_a_file_counts_as_written() {
        let mut file = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut file, b"before and after").unwrap();
        let digest = written(std::os::fd::AsRawFd::as_raw_fd(&file), 7).unwrap();
        let mut expected = Digest::default();
        expected.add(b"and after");
        assert_eq!(digest, expected);
    }
}
