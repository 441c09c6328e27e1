//! A child process with an owner: dropping it kills and reaps it. Also waits for the end of
//! processes that are not children (pidfd).

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::ops::{Deref, DerefMut};
use std::process::{Child, ChildStderr};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::error::{AttemptExt, LabError, Result};

/// Number of lines of a service's stderr that are kept for messages.
const KEPT_LINES: usize = 200;

/// A child that is killed and reaped when dropped.
#[derive(Debug)]
pub struct ChildProcess(Child);

impl ChildProcess {
    /// Takes ownership of a child.
    pub fn new(child: Child) -> Self {
        ChildProcess(child)
    }

    /// Waits for the child's end for at most `limit`; false when it still runs.
    pub fn wait_at_most(&mut self, limit: Duration) -> Result<bool> {
        if self.0.try_wait().attempt(|| "wait for a child".into())?.is_some() {
            return Ok(true);
        }
        wait_gone(self.0.id(), limit)
    }
}

impl Deref for ChildProcess {
    type Target = Child;
    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for ChildProcess {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until the process `pid` (as this process numbers it) has ended or `limit`
/// has passed; true when it has ended.
pub fn wait_gone(pid: u32, limit: Duration) -> Result<bool> {
    let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let Some(pid) = raw else { return Ok(true) };
    let fd = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::SRCH) => return Ok(true),
        Err(e) => return Err(e).attempt(|| format!("open a pidfd of process {pid:?}")),
    };
    wait_for(&fd, PollFlags::IN, limit)
}

/// Polls one descriptor; true when `events` came within `limit`.
pub(crate) fn wait_for(
    fd: &impl std::os::fd::AsFd,
    events: PollFlags,
    limit: Duration,
) -> Result<bool> {
    let end = Instant::now() + limit;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 3600, tv_nsec: 0 });
        match poll(&mut [PollFd::new(fd, events)], Some(&timeout)) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e).attempt(|| "poll".into()),
        }
    }
}

/// The stderr of a service: a thread reads it to its end and keeps the last lines.
#[derive(Debug, Clone, Default)]
pub struct Journal(Arc<(Mutex<JournalLines>, Condvar)>);

#[derive(Debug, Default)]
struct JournalLines {
    last: VecDeque<String>,
    ended: bool,
}

impl Journal {
    /// Starts the reading thread.
    pub fn of(stderr: ChildStderr) -> Self {
        let journal = Journal::default();
        let copy = journal.clone();
        std::thread::spawn(move || copy.read(stderr));
        journal
    }

    fn read(&self, stderr: impl Read) {
        for line in BufReader::new(stderr).split(b'\n').map_while(std::io::Result::ok) {
            let mut lines = self.lock();
            if lines.last.len() == KEPT_LINES {
                lines.last.pop_front();
            }
            lines.last.push_back(String::from_utf8_lossy(&line).into_owned());
            self.0.1.notify_all();
        }
        self.lock().ended = true;
        self.0.1.notify_all();
    }

    /// Waits for a line that contains `needle`, and returns it; the error has the lines that came
    /// instead.
    pub fn wait_for(&self, needle: &str, limit: Duration) -> Result<String> {
        let found = |lines: &JournalLines| lines.last.iter().find(|l| l.contains(needle)).cloned();
        let (lines, _) = self
            .0
            .1
            .wait_timeout_while(self.lock(), limit, |l| !l.ended && found(l).is_none())
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = found(&lines) {
            return Ok(line);
        }
        let detail = lines.last.iter().cloned().collect::<Vec<_>>().join("\n");
        Err(LabError::Timeout { what: format!("a line with {needle:?}"), after: limit, detail })
    }

    /// The last lines so far.
    pub fn text(&self) -> String {
        self.lock().last.iter().cloned().collect::<Vec<_>>().join("\n")
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, JournalLines> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
