//! The supervisor: one process per run, the parent of its stages. A path that hangs or a run that
//! goes wrong affects no other run.
//!
//! It ends when its socket is closed, or when nobody needs it; either way it ends everything below
//! it first.

use std::{
    collections::{HashMap, HashSet},
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    rc::Rc,
};

use bytes::BytesMut;
use nix::{
    errno::Errno,
    fcntl::OFlag,
    sys::{
        prctl,
        signal::{Signal, kill, killpg},
        signalfd::SignalFd,
    },
    unistd::{Pid, pipe2},
};
use posh_proto::{
    clock::monotonic_ns,
    executor::{RunInput, RunOutput, StartTimes, Started, rejected::Kind, run_input, run_output},
    frame,
};

use super::{
    budget::Budget,
    complain,
    confine::{self, OwnMemory},
    fence, look_at,
    processes::Orphans,
    spawn::{Barrier, Budgets, Ends, Live, Prepared, REPORT_BYTES},
    teller::{SeenEnd, Teller, Telling},
    view::View,
    wait_for,
    wire::{Fence, SupervisorJob, read_descriptors, read_frame, write_frame},
};
use crate::{
    cgroup,
    error::Refusal,
    sys::{self, Deadly},
};

/// Main function of a supervisor; returns its exit status.
pub fn main(socket: UnixStream, view: &View, children: &SignalFd) -> i32 {
    if let Err(error) = supervise(&socket, view, children) {
        // The daemon is gone or broke the protocol; it sees the socket close.
        if error.kind() != io::ErrorKind::BrokenPipe && error.kind() != io::ErrorKind::UnexpectedEof
        {
            complain(&error);
        }
    }
    0
}

/// Returns when nothing is left below this process.
fn supervise(socket: &UnixStream, view: &View, children: &SignalFd) -> io::Result<()> {
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    prctl::set_child_subreaper(true)?;
    let mut descriptors = read_descriptors(socket)?;
    let job: SupervisorJob = read_frame(socket)?;
    if let Some(entrance) = job.has_cgroup.then(|| descriptors.pop()).flatten()
        && let Err(error) = cgroup::enter(entrance)
    {
        let refusal =
            Refusal::new(Kind::SpawnFailed, format!("cannot enter the run's cgroup: {error}"));
        return write_frame(socket, &RunOutput::from(refusal));
    }
    // The only step that needs more rights than the commands have: it is on a file system of ours.
    job.stages.iter().for_each(|stage| view.prepare_directory(&stage.cwd));
    confine::take_user(view.user.as_ref())?;
    // A change of the user id clears it (prctl(2)).
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    let memory = OwnMemory::bound()?;
    let below = fence::enter_run()?;
    match start(job, &memory, descriptors, view, children, socket) {
        Ok(mut run) => {
            let watched = run.watch(socket, children);
            confine::hurry();
            match watched.is_ok() && run.untold.is_empty() {
                true => below.end(),
                // The run was given up.
                false => below.kill(),
            }
            watched
        }
        Err(failure) => {
            below.kill();
            match failure {
                Failure::Refused(refusal) => write_frame(socket, &RunOutput::from(refusal)),
                Failure::Broken(error) => Err(error),
            }
        }
    }
}

enum Failure {
    Refused(Refusal),
    Broken(io::Error),
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

fn spawn_failed(errno: Errno) -> Refusal {
    Refusal::new(
        Kind::SpawnFailed,
        format!("cannot start a process on the server: {}", errno.desc()),
    )
}

/// Prepares all stages, forks all, and releases them together.
fn start(
    job: SupervisorJob,
    memory: &OwnMemory,
    descriptors: Vec<OwnedFd>,
    view: &View,
    children: &SignalFd,
    socket: &UnixStream,
) -> Result<Running, Failure> {
    // If the run is given up, this process is killed, whatever it waits for. The daemon sends
    // nothing before it knows that the commands run.
    let deadly = Deadly::begin(socket.as_fd()).map_err(spawn_failed)?;
    let now_ns = || if job.trace { monotonic_ns() } else { 0 };
    let taken_ns = now_ns();
    let ends: Ends = job.ends.into_iter().zip(descriptors.into_iter().map(Rc::new)).collect();
    // Without a fence of its own a stage could access nothing, which fails safe.
    let fences = job.fences.into_iter().chain(std::iter::repeat_with(Fence::default));
    let budget = || Budget::new(socket.as_fd().try_clone_to_owned().ok());
    let before = Budgets { checks: budget(), trees: budget() };
    let prepare = |(stage, fence): (_, Fence)| Prepared::new(view, &ends, stage, &fence, &before);
    let stages = job.stages.into_iter().zip(fences).map(prepare).collect::<Result<Vec<_>, _>>()?;
    drop(ends);
    let prepared_ns = now_ns();
    let (report, report_end) = pipe2(OFlag::O_CLOEXEC).map_err(spawn_failed)?;
    let (go_end, go) = pipe2(OFlag::O_CLOEXEC).map_err(spawn_failed)?;
    let barrier = Barrier { report: &report_end, go: &go_end };
    let mut pids = Vec::new();
    for stage in &stages {
        pids.push(stage.fork(&barrier, memory).map_err(spawn_failed)?);
    }
    drop((report_end, go_end));
    let written_files = stages.iter().flat_map(Prepared::written_files).collect();
    await_all(report, children, pids.len())?;
    let times = job.trace.then(|| StartTimes {
        taken_ns,
        prepared_ns,
        spawned_ns: now_ns(),
        ..StartTimes::default()
    });
    // From here on only the children hold the stages' descriptors.
    let lives: HashMap<Pid, Live> =
        pids.into_iter().zip(stages.into_iter().map(Prepared::into_live)).collect();
    let by_id: HashMap<u32, Pid> = lives.iter().map(|(pid, live)| (live.stage, *pid)).collect();
    let telling = Telling { lives, budget: budget() };
    let teller = Teller::begin(telling, socket)
        .map_err(|error| spawn_failed(Errno::from_raw(error.raw_os_error().unwrap_or(0))))?;
    let running = Running {
        untold: by_id.values().copied().collect(),
        kept: by_id.values().copied().chain(teller.pid()).collect(),
        by_id,
        teller,
        orphans: Orphans::default(),
        frames: BytesMut::new(),
        trace: job.trace,
    };
    drop(deadly);
    // The daemon must know first: once released, the commands count as run.
    let started =
        RunOutput { kind: Some(run_output::Kind::Started(Started { times, written_files })) };
    write_frame(socket, &started).map_err(Failure::Broken)?;
    let bytes = vec![b'g'; running.untold.len()];
    io::Write::write_all(&mut std::fs::File::from(go), &bytes).map_err(Failure::Broken)?;
    Ok(running)
}

/// Reads the children's reports at the barrier.
fn await_all(report: OwnedFd, children: &SignalFd, count: usize) -> Result<(), Failure> {
    let mut report = std::fs::File::from(report);
    for _ in 0..count {
        let [said, died] = wait_for([report.as_fd(), children.as_fd()]).map_err(spawn_failed)?;
        if died && !said {
            return Err(spawn_failed(Errno::ECHILD).into());
        }
        let mut bytes = [0; REPORT_BYTES];
        report.read_exact(&mut bytes).map_err(|_| spawn_failed(Errno::ECHILD))?;
        let [stage, errno] =
            [0, 4].map(|at| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")));
        if errno != 0 {
            return Err(spawn_failed(Errno::from_raw(errno.cast_signed())).at(stage).into());
        }
    }
    Ok(())
}

/// A run whose commands were released.
///
/// Invariant: until the run's end no process of `kept` is reaped. As long as it exists, if only
/// as a zombie, its pid and that of its group are not reused, so that a signal to either never
/// reaches another process.
///
/// Invariant: nothing here waits for a file system, nor opens a file on one (see `teller`).
struct Running {
    /// Stages whose exit the teller does not know of.
    untold: HashSet<Pid>,
    /// All stages, also those that have ended: their groups may live on.
    by_id: HashMap<u32, Pid>,
    /// All stages, and the teller.
    kept: HashSet<Pid>,
    teller: Teller,
    orphans: Orphans,
    frames: BytesMut,
    /// Exits are reported with their time.
    trace: bool,
}

impl Running {
    /// Reports exits and forwards signals until the daemon closes the socket, which is looked at
    /// first: commands that fork all the time must not put off the end of their run.
    fn watch(&mut self, socket: &UnixStream, children: &SignalFd) -> io::Result<()> {
        loop {
            let link = self.teller.link().unwrap_or(children.as_fd());
            let events = [socket.as_fd(), children.as_fd(), link];
            let [said, ended, told] = match self.orphans.are_left() {
                true => look_at(events)?,
                false => wait_for(events)?,
            };
            if said && !self.take_input(socket)? {
                return Ok(());
            }
            if told {
                self.teller.hear()?;
            }
            if ended {
                let _ = children.read_signal();
            }
            if ended || told {
                self.look_at_stages(socket)?;
            }
            if ended || told || self.orphans.are_left() {
                self.orphans.reap_some(&self.kept);
            }
        }
    }

    /// Reports the stages that have ended. Those whose end can't be told yet stay zombies.
    fn look_at_stages(&mut self, socket: &UnixStream) -> io::Result<()> {
        while self.teller.is_ready()
            && let Some(ended) = self.untold.iter().find_map(|pid| sys::ended(*pid).ok().flatten())
        {
            self.untold.remove(&ended.pid);
            let at_ns = if self.trace { monotonic_ns() } else { 0 };
            self.teller.tell(&SeenEnd { ended, at_ns }, socket)?;
        }
        Ok(())
    }

    /// Reads the available input; false at the socket's end.
    fn take_input(&mut self, mut socket: &UnixStream) -> io::Result<bool> {
        let mut buffer = [0; 4096];
        let count = socket.read(&mut buffer)?;
        self.frames.extend_from_slice(&buffer[..count]);
        while let Some(input) =
            frame::decode::<RunInput>(&mut self.frames).map_err(io::Error::other)?
        {
            if let Some(run_input::Kind::Signal(signal)) = input.kind {
                self.send_signal(&signal);
            }
        }
        Ok(count > 0)
    }

    fn send_signal(&self, signal: &posh_proto::executor::Signal) {
        let number =
            i32::try_from(signal.signal).ok().and_then(|number| Signal::try_from(number).ok());
        let (Some(&pid), Some(number)) = (self.by_id.get(&signal.stage), number) else { return };
        // Neither is reaped; a zombie takes no signal, but others of its group do.
        if signal.group {
            let _ = killpg(pid, number);
        } else if self.untold.contains(&pid) {
            let _ = kill(pid, number);
        }
    }
}
