//! Telling the daemon how commands have ended, with what they have changed.
//!
//! Invariant: a supervisor whose commands run touches no file system, so that none can keep it from
//! ending its run. Looking at watched trees waits for their file systems, and asking a file for its
//! offset waits for whoever reads it: where there is such a thing to look at, another process does
//! all the telling. It is below the supervisor, and ends with the commands.
//!
//! It is forked before they start, since it could not be when they have used up their processes.

use std::{
    collections::HashMap,
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    rc::Rc,
};

use nix::{
    sys::{prctl, signal::Signal, wait::WaitStatus},
    unistd::{ForkResult, Pid, Whence, lseek},
};
use posh_proto::executor::{Exited, Offset, exited::How};

use super::{budget::Budget, spawn::Live, wire::write_end};
use crate::sys;

/// Knowledge that telling the ends of a run's commands needs.
pub struct Telling {
    pub lives: HashMap<Pid, Live>,
    /// For lookups when commands have ended.
    pub budget: Budget,
}

/// The end of a command, and its time if the run is traced.
pub struct SeenEnd {
    pub ended: sys::EndedChild,
    pub at_ns: u64,
}

/// Whoever tells the ends of a run's commands.
pub enum Teller {
    /// The supervisor: there is nothing to look at.
    Itself(Telling),
    /// A process below it, which is told of one end at a time and answers with a byte.
    Another {
        pid: Pid,
        link: UnixStream,
        /// It has not answered yet.
        is_busy: bool,
    },
}

impl Teller {
    /// Forks another process if there is anything to look at.
    pub fn begin(telling: Telling, socket: &UnixStream) -> io::Result<Self> {
        if !telling.lives.values().any(|live| live.is_looked_at) {
            return Ok(Self::Itself(telling));
        }
        let (link, its) = UnixStream::pair()?;
        match sys::fork()? {
            ForkResult::Child => {
                drop(link);
                sys::exit_now(i32::from(telling.serve(&its, socket).is_err()))
            }
            ForkResult::Parent { child } => Ok(Self::Another { pid: child, link, is_busy: false }),
        }
    }

    /// Its process, if that is not the supervisor.
    pub fn pid(&self) -> Option<Pid> {
        match self {
            Self::Itself(_) => None,
            Self::Another { pid, .. } => Some(*pid),
        }
    }

    /// Readable when [`Self::hear`] is to be called.
    pub fn link(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Itself(_) => None,
            Self::Another { link, .. } => Some(link.as_fd()),
        }
    }

    /// Returns true if it can be told of an end.
    pub fn is_ready(&self) -> bool {
        !matches!(self, Self::Another { is_busy: true, .. })
    }

    /// Takes its answer; an error if it is gone.
    pub fn hear(&mut self) -> io::Result<()> {
        if let Self::Another { link, is_busy, .. } = self {
            link.read_exact(&mut [0])?;
            *is_busy = false;
        }
        Ok(())
    }

    /// Has the daemon told of an end. Called when it is ready: then there is room on its link.
    pub fn tell(&mut self, seen: &SeenEnd, socket: &UnixStream) -> io::Result<()> {
        match self {
            Self::Itself(telling) => telling.tell(seen, socket),
            Self::Another { link, is_busy, .. } => {
                *is_busy = true;
                link.write_all(&seen.encoded())
            }
        }
    }
}

impl Telling {
    /// Main function of the other process.
    fn serve(mut self, mut link: &UnixStream, socket: &UnixStream) -> io::Result<()> {
        // The run is over when its supervisor is, however that ended.
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        let mut bytes = [0; SeenEnd::BYTES];
        loop {
            link.read_exact(&mut bytes)?;
            self.tell(&SeenEnd::decoded(&bytes), socket)?;
            link.write_all(b"t")?;
        }
    }

    fn tell(&mut self, seen: &SeenEnd, socket: &UnixStream) -> io::Result<()> {
        match self.lives.remove(&seen.ended.pid) {
            Some(live) => write_end(socket, exited(&live, seen, &self.budget)),
            None => Ok(()),
        }
    }
}

impl SeenEnd {
    const BYTES: usize = 6 * size_of::<u64>();

    fn encoded(&self) -> [u8; Self::BYTES] {
        let sys::EndedChild { pid, status, cpu_us: (user, system), max_rss_kib } = self.ended;
        let id = u64::from(pid.as_raw().cast_unsigned());
        let status = u64::from(status.cast_unsigned());
        let numbers = [id, status, user, system, max_rss_kib, self.at_ns];
        let mut bytes = [0; Self::BYTES];
        for (to, number) in bytes.chunks_exact_mut(size_of::<u64>()).zip(numbers) {
            to.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    fn decoded(bytes: &[u8; Self::BYTES]) -> Self {
        let mut numbers = bytes
            .chunks_exact(size_of::<u64>())
            .map(|number| u64::from_le_bytes(number.try_into().expect("eight bytes")));
        let mut next = || numbers.next().unwrap_or_default();
        let [pid, status] = [next(), next()].map(|number| (number as u32).cast_signed());
        let cpu_us = (next(), next());
        let ended =
            sys::EndedChild { pid: Pid::from_raw(pid), status, cpu_us, max_rss_kib: next() };
        Self { ended, at_ns: next() }
    }
}

fn exited(live: &Live, seen: &SeenEnd, budget: &Budget) -> Exited {
    let SeenEnd { ended, at_ns } = seen;
    let (how, core_dumped) = match WaitStatus::from_raw(ended.pid, ended.status) {
        Ok(WaitStatus::Signaled(_, signal, core)) => {
            (How::Signal((signal as i32).unsigned_abs()), core)
        }
        Ok(WaitStatus::Exited(_, code)) => (How::Code(code.unsigned_abs()), false),
        // A real-time signal has no name in nix.
        _ => (How::Signal((ended.status & 0x7f).unsigned_abs()), ended.status & 0x80 != 0),
    };
    let offset = |(fd, file): &(u32, Rc<OwnedFd>)| {
        let offset = lseek(file.as_fd(), 0, Whence::SeekCur).ok()?;
        Some(Offset { fd: *fd, offset: offset.unsigned_abs() })
    };
    let (user_us, system_us) = ended.cpu_us;
    let mut changes = live.watch.changes(budget);
    changes.look_up_owners();
    Exited {
        stage: live.stage,
        how: Some(how),
        core_dumped,
        offsets: live.reported.iter().filter_map(offset).collect(),
        user_us,
        system_us,
        max_rss_kib: ended.max_rss_kib,
        changed_directories: changes.message(),
        files_now: live.watch.files_now(budget),
        changes_incomplete: changes.incomplete,
        exited_ns: *at_ns,
        ..Exited::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_told_as_it_was_seen() {
        let ended = sys::EndedChild {
            pid: Pid::from_raw(i32::MAX),
            status: 0x8b,
            cpu_us: (1, u64::MAX),
            max_rss_kib: 7,
        };
        let seen = SeenEnd { ended, at_ns: 9 };
        let told = SeenEnd::decoded(&seen.encoded());
        assert_eq!(told.encoded(), seen.encoded());
        assert_eq!((told.ended.pid, told.ended.status), (Pid::from_raw(i32::MAX), 0x8b));
        assert_eq!((told.ended.cpu_us, told.ended.max_rss_kib, told.at_ns), ((1, u64::MAX), 7, 9));
    }
}
