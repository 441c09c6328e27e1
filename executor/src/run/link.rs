//! The daemon's end of a run's socket to its supervisor (see `runner::wire`), and the resources
//! that this supervisor uses.
//!
//! Invariant: a long list of a command's changes is on the caller's account from before it is read
//! until nobody needs it. If there is no room at once, the list is left out, and the command's exit
//! says so.
//!
//! Invariant: all that a run was admitted with stays reserved until its supervisor is gone, however
//! the call ended: a run that its client gives up runs until then, and counts as the client's.

use std::{
    io::{self, ErrorKind},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    sync::{Arc, LazyLock, Mutex},
    time::Duration,
};

use bytes::{Buf as _, BytesMut};
use posh_proto::{
    executor::{ChangedDirectory, Exited, RunInput, RunOutput, Signal, run_input, run_output},
    frame,
};
use prost::Message;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, Interest},
    net::UnixStream,
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore},
};

use crate::{
    load::RunShare,
    metered::LEAST_OF_ONE,
    pool::Lease,
    runner::{
        ids,
        wire::{
            CHANGES_HEAD_BYTES, DESCRIPTORS_PER_MESSAGE, HAS_CHANGES, SupervisorJob,
            send_descriptors,
        },
    },
};

/// Timeout for the supervisor's end. Killing and reaping takes milliseconds; a process that a dead
/// disk holds can take for ever, and must not hold us.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// This process sees all users. If it does not (in a rootless container), neither is its own number
/// the machine's, and no owner is told: a mount may have been made from elsewhere.
static IDS_ARE_WHOLE: LazyLock<bool> = LazyLock::new(ids::are_whole);

/// Bytes of a list that are read at a time.
const PIECE_BYTES: usize = 64 << 10;

/// Resources that a run was admitted with: its share of the machine, and its client's account of
/// queued messages.
pub struct Admitted(Mutex<RunShare>, Arc<Semaphore>);

impl Admitted {
    pub fn new(share: RunShare, queued: Arc<Semaphore>) -> Self {
        Self(Mutex::new(share), queued)
    }

    /// Returns what was for the start alone.
    pub fn has_begun(&self, own_descriptors: usize, specification_bytes: usize) {
        self.0.lock().expect("not poisoned").has_begun(own_descriptors, specification_bytes);
    }
}

/// A run's socket. Dropping it ends the run: a supervisor that still prepares is killed, and one
/// that has started commands kills them (see `sys::Deadly`).
pub struct RunLink {
    /// `Some` until this is dropped.
    connection: Option<SupervisorConnection>,
}

/// A supervisor's message.
pub struct SupervisorMessage {
    pub output: RunOutput,
    /// Permit of a long list of changes.
    pub room: Option<OwnedSemaphorePermit>,
}

/// A long list of changes that is being received.
enum List {
    /// There is room for it.
    Coming { encoded: BytesMut, length: usize, room: OwnedSemaphorePermit },
    /// There is no room; so many bytes must still be skipped.
    LeftOut(usize),
}

/// A received list, for the exit that follows it.
#[derive(Default)]
enum ReceivedChanges {
    #[default]
    None,
    Here(Vec<ChangedDirectory>, OwnedSemaphorePermit),
    LeftOut,
}

struct SupervisorConnection {
    socket: UnixStream,
    received: BytesMut,
    list: Option<List>,
    changes: ReceivedChanges,
    /// The supervisor is gone: it alone had the other end, which is closed.
    is_over: bool,
    lease: Lease,
    /// Shared with a second attempt.
    admitted: Arc<Admitted>,
}

impl RunLink {
    pub fn new(socket: UnixStream, lease: Lease, admitted: Arc<Admitted>) -> Self {
        let (received, list, changes) = (BytesMut::new(), None, ReceivedChanges::None);
        Self {
            connection: Some(SupervisorConnection {
                socket,
                received,
                list,
                changes,
                is_over: false,
                lease,
                admitted,
            }),
        }
    }

    fn connection(&mut self) -> &mut SupervisorConnection {
        self.connection.as_mut().expect("it is there until this is dropped")
    }

    /// After the supervisor was lost: see [`Lease::forget_if_dead`].
    pub async fn forget_runner_if_dead(&mut self) {
        self.connection().lease.forget_if_dead().await;
    }

    /// Sends the whole job, and closes our copies of the descriptors.
    pub async fn send_job(
        &mut self,
        job: &SupervisorJob,
        descriptors: Vec<OwnedFd>,
    ) -> io::Result<()> {
        let count = u32::try_from(descriptors.len()).map_err(io::Error::other)?;
        let socket = &mut self.connection().socket;
        socket.write_all(&count.to_le_bytes()).await?;
        for batch in descriptors.chunks(DESCRIPTORS_PER_MESSAGE) {
            let raw: Vec<_> = batch.iter().map(|fd| fd.as_raw_fd()).collect();
            loop {
                socket.writable().await?;
                match socket.try_io(Interest::WRITABLE, || send_descriptors(socket.as_fd(), &raw)) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    other => break other?,
                }
            }
        }
        drop(descriptors);
        self.send(job).await
    }

    /// Passes a signal on.
    pub async fn signal(&mut self, signal: Signal) -> io::Result<()> {
        self.send(&RunInput { kind: Some(run_input::Kind::Signal(signal)) }).await
    }

    /// The supervisor's next message; `None` at its end. Cancel safe.
    pub async fn next(&mut self) -> io::Result<Option<SupervisorMessage>> {
        self.connection().next().await
    }

    /// Tells the supervisor to kill the rest, and waits for its end, with a timeout.
    pub async fn close(&mut self) {
        if tokio::time::timeout(CLOSE_TIMEOUT, self.connection().close()).await.is_err() {
            tracing::warn!("killed processes have not ended yet");
        }
    }

    async fn send(&mut self, message: &impl Message) -> io::Result<()> {
        let mut buffer = BytesMut::new();
        frame::encode(message, &mut buffer);
        self.connection().socket.write_all(&buffer).await
    }
}

impl Drop for RunLink {
    fn drop(&mut self) {
        let Some(mut connection) = self.connection.take().filter(|connection| !connection.is_over)
        else {
            return;
        };
        // Without a runtime the executor is ending, and all of its runners with it.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move { connection.close().await });
        }
    }
}

impl SupervisorConnection {
    async fn next(&mut self) -> io::Result<Option<SupervisorMessage>> {
        loop {
            self.take_list()?;
            // The head of a list may have come in part.
            if self.list.is_none()
                && !self.is_at_list()
                && let Some(output) = frame::decode(&mut self.received).map_err(io::Error::other)?
            {
                if self.received.is_empty() && self.received.capacity() > PIECE_BYTES {
                    self.received = BytesMut::new();
                }
                return Ok(Some(self.complete(output)));
            }
            if self.list.is_some() {
                self.received.reserve(PIECE_BYTES);
            }
            match self.socket.read_buf(&mut self.received).await {
                Ok(0) => {
                    self.is_over = true;
                    return Ok(None);
                }
                Ok(_) => {}
                // It died before it had read everything. Its last messages can still be read, and a
                // `Started` among them matters; the error is reported only once.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes the received part of a list, or skips it.
    fn take_list(&mut self) -> io::Result<()> {
        if self.list.is_none() {
            self.list = self.begin_list()?;
        }
        match &mut self.list {
            None => {}
            Some(List::Coming { encoded, length, .. }) => {
                let come = (*length - encoded.len()).min(self.received.len());
                encoded.extend_from_slice(&self.received[..come]);
                self.received.advance(come);
                if encoded.len() == *length
                    && let Some(List::Coming { encoded, room, .. }) = self.list.take()
                {
                    let list = Exited::decode(encoded.freeze()).map_err(io::Error::other)?;
                    self.changes = ReceivedChanges::Here(list.changed_directories, room);
                }
            }
            Some(List::LeftOut(left)) => {
                let come = (*left).min(self.received.len());
                self.received.advance(come);
                *left -= come;
                if *left == 0 {
                    (self.list, self.changes) = (None, ReceivedChanges::LeftOut);
                }
            }
        }
        Ok(())
    }

    /// The head of a list, if that is next: reserves room for the list.
    fn begin_list(&mut self) -> io::Result<Option<List>> {
        let (true, Some(head), Some(bytes)) = (self.is_at_list(), self.number(0), self.number(4))
        else {
            return Ok(None);
        };
        let length = (head & !HAS_CHANGES) as usize;
        if length > frame::MAX_FRAME_BYTES {
            return Err(io::Error::other("a list of changes that is too long"));
        }
        self.received.advance(CHANGES_HEAD_BYTES);
        let room = (length <= LEAST_OF_ONE)
            .then(|| self.admitted.1.clone().try_acquire_many_owned(bytes).ok());
        Ok(Some(match room.flatten() {
            Some(room) => List::Coming { encoded: BytesMut::with_capacity(length), length, room },
            None => List::LeftOut(length),
        }))
    }

    /// Returns true if a list is next.
    fn is_at_list(&self) -> bool {
        self.number(0).is_some_and(|head| head & HAS_CHANGES != 0)
    }

    fn number(&self, at: usize) -> Option<u32> {
        Some(u32::from_le_bytes(self.received.get(at..at + 4)?.try_into().ok()?))
    }

    /// Adds the list that came before a command's exit to that exit.
    fn complete(&mut self, mut output: RunOutput) -> SupervisorMessage {
        let mut room = None;
        if let Some(run_output::Kind::Exited(exited)) = &mut output.kind {
            match std::mem::take(&mut self.changes) {
                ReceivedChanges::None => {}
                ReceivedChanges::Here(list, its_room) => {
                    (exited.changed_directories, room) = (list, Some(its_room))
                }
                ReceivedChanges::LeftOut => exited.changes_incomplete = true,
            }
            if !*IDS_ARE_WHOLE {
                exited.changed_directories.iter_mut().for_each(|changed| changed.owner = None);
            }
        }
        SupervisorMessage { output, room }
    }

    async fn close(&mut self) {
        let _ = self.socket.shutdown().await;
        let mut rest = [0; 4096];
        loop {
            match self.socket.read(&mut rest).await {
                Ok(0) => break,
                // The supervisor died before it had read everything; see `next`.
                Err(error) if error.kind() != ErrorKind::ConnectionReset => break,
                _ => {}
            }
        }
        self.is_over = true;
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;
    use crate::{
        Config,
        callers::Caller,
        config::Bounds,
        load::{Capacity, Load, Need},
        runner::wire::write_end,
    };

    /// The executor's end, with so many bytes on the account, and a supervisor that reports two
    /// exits.
    fn told_of(account: &Arc<Semaphore>, names: usize) -> RunLink {
        let load =
            Arc::new(Load::new(Bounds::default(), Capacity { descriptors: 1, ptys: 0 }, false));
        let caller = Caller::anybody(&Config::new(Vec::new()));
        let share = load.admit_run(&caller, Need::default()).unwrap();
        let (ours, supervisor) = std::os::unix::net::UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        std::thread::spawn(move || {
            let directory = ChangedDirectory {
                path: "/d".into(),
                written: vec!["n".repeat(100).into(); names],
                ..Default::default()
            };
            let long =
                Exited { stage: 1, changed_directories: vec![directory], ..Exited::default() };
            let short = Exited {
                stage: 2,
                changed_directories: vec![ChangedDirectory::default()],
                ..Exited::default()
            };
            // In pieces that end within the heads.
            let (write, mut read) = std::os::unix::net::UnixStream::pair().unwrap();
            std::thread::spawn(move || {
                write_end(&write, long).unwrap();
                write_end(&write, short).unwrap();
            });
            let mut all = Vec::new();
            read.read_to_end(&mut all).unwrap();
            let (head, rest) = all.split_at(6);
            (&supervisor).write_all(head).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            (&supervisor).write_all(rest).unwrap();
        });
        let (lease, _) = Lease::of_test();
        RunLink::new(
            UnixStream::from_std(ours).unwrap(),
            lease,
            Arc::new(Admitted::new(share, account.clone())),
        )
    }

    async fn next_end(link: &mut RunLink) -> (Exited, Option<OwnedSemaphorePermit>) {
        match link.next().await.unwrap().unwrap() {
            SupervisorMessage {
                output: RunOutput { kind: Some(run_output::Kind::Exited(exited)) },
                room,
            } => (exited, room),
            _ => panic!("an end"),
        }
    }

    #[tokio::test]
    async fn long_lists_of_changes_have_room_before_they_are_read_or_are_left_out() {
        const NAMES: usize = 50_000;
        for (bytes, is_told) in [(LEAST_OF_ONE, true), (1 << 20, false)] {
            let account = Arc::new(Semaphore::new(bytes));
            let mut link = told_of(&account, NAMES);
            let (long, room) = next_end(&mut link).await;
            let told: usize =
                long.changed_directories.iter().map(|directory| directory.written.len()).sum();
            assert_eq!(
                (told, long.changes_incomplete),
                (if is_told { NAMES } else { 0 }, !is_told)
            );
            let taken = bytes - account.available_permits();
            assert!(if is_told { taken > NAMES * 100 } else { taken == 0 }, "{taken}");
            drop((long, room));
            assert_eq!(account.available_permits(), bytes);
            let (short, room) = next_end(&mut link).await;
            assert_eq!(
                (short.stage, short.changed_directories.len(), short.changes_incomplete),
                (2, 1, false)
            );
            assert!(room.is_none());
        }
        // A list beyond a frame's size has no room on any account.
        let account = Arc::new(Semaphore::new(1 << 30));
        let (long, _) = next_end(&mut told_of(&account, 100_000)).await;
        assert!(long.changes_incomplete && long.changed_directories.is_empty());
    }

    #[tokio::test]
    async fn what_a_run_takes_is_taken_until_its_supervisor_is_gone() {
        let load =
            Arc::new(Load::new(Bounds::default(), Capacity { descriptors: 1, ptys: 0 }, false));
        let caller = Caller::anybody(&Config::new(Vec::new()));
        let share = load.admit_run(&caller, Need::default()).unwrap();
        let (ours, supervisor) = UnixStream::pair().unwrap();
        let (lease, runs) = Lease::of_test();
        // The call is cancelled while the supervisor still prepares.
        drop(RunLink::new(
            ours,
            lease,
            Arc::new(Admitted::new(share, Arc::new(Semaphore::new(0)))),
        ));
        let mut told = Vec::new();
        let mut supervisor = supervisor;
        supervisor.read_to_end(&mut told).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!((load.running(), runs()), (1, 1));
        drop(supervisor);
        tokio::time::timeout(Duration::from_secs(5), load.idle()).await.expect("given back");
        while runs() > 0 {
            tokio::task::yield_now().await;
        }
    }
}
