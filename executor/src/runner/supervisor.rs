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
        wait::WaitStatus,
    },
    unistd::{Pid, Whence, lseek, pipe2},
};
use posh_proto::{
    clock::monotonic_ns,
    executor::{
        Exited, Offset, RunInput, RunOutput, StartTimes, Started, exited::How, rejected::Kind,
        run_input, run_output,
    },
    frame,
};

use super::{
    budget::Budget,
    complain,
    confine::{self, OwnMemory},
    processes,
    spawn::{Barrier, Budgets, Ends, Live, Prepared, REPORT_BYTES},
    view::View,
    wait_for,
    wire::{Fence, Job, read_descriptors, read_frame, write_end, write_frame},
};
use crate::{
    cgroup,
    error::Refusal,
    sys::{self, Deadly},
};

/// Main function of a supervisor; returns its exit status.
pub fn main(socket: UnixStream, view: &View, children: &SignalFd) -> i32 {
    match supervise(&socket, view, children) {
        Ok(()) => 0,
        Err(error) => {
            // The daemon is gone or broke the protocol; it sees the socket close.
            if error.kind() != io::ErrorKind::BrokenPipe
                && error.kind() != io::ErrorKind::UnexpectedEof
            {
                complain(&error);
            }
            processes::kill_all_below();
            0
        }
    }
}

fn supervise(socket: &UnixStream, view: &View, children: &SignalFd) -> io::Result<()> {
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    prctl::set_child_subreaper(true)?;
    let mut descriptors = read_descriptors(socket)?;
    let job: Job = read_frame(socket)?;
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
    match start((job, &memory), descriptors, view, children, socket) {
        Ok(mut run) => {
            let ended = run.watch(socket, children);
            run.end();
            ended
        }
        Err(Failure::Refused(refusal)) => {
            processes::kill_all_below();
            write_frame(socket, &RunOutput::from(refusal))
        }
        Err(Failure::Broken(error)) => Err(error),
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
    (job, memory): (Job, &OwnMemory),
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
    let prepare = |(stage, fence): (_, Fence)| Prepared::new(view, &ends, (stage, &fence), &before);
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
    let mut running = Running {
        stages: HashMap::new(),
        by_id: HashMap::new(),
        leaders: pids.iter().copied().collect(),
        frames: BytesMut::new(),
        trace: job.trace,
        budget: budget(),
    };
    // From here on only the children hold the stages' descriptors.
    for (pid, live) in pids.into_iter().zip(stages.into_iter().map(Prepared::into_live)) {
        running.by_id.insert(live.stage, pid);
        running.stages.insert(pid, live);
    }
    drop(deadly);
    // The daemon must know first: once released, the commands count as run.
    let started =
        RunOutput { kind: Some(run_output::Kind::Started(Started { times, written_files })) };
    write_frame(socket, &started).map_err(Failure::Broken)?;
    let bytes = vec![b'g'; running.stages.len()];
    io::Write::write_all(&mut std::fs::File::from(go), &bytes).map_err(Failure::Broken)?;
    Ok(running)
}

/// Reads the children's reports at the barrier.
fn await_all(report: OwnedFd, children: &SignalFd, count: usize) -> Result<(), Failure> {
    let mut report = std::fs::File::from(report);
    for _ in 0..count {
        let [said, died] = wait_for(report.as_fd(), children.as_fd()).map_err(spawn_failed)?;
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
/// Invariant: until the run's end no process of `leaders` is reaped. As long as it exists, if only
/// as a zombie, its pid and that of its group are not reused, so that a signal to either never
/// reaches another process.
struct Running {
    /// Stages whose exit the daemon has not been told.
    stages: HashMap<Pid, Live>,
    /// All stages, also those that have ended: their groups may live on.
    by_id: HashMap<u32, Pid>,
    leaders: HashSet<Pid>,
    frames: BytesMut,
    /// Exits are reported with their time.
    trace: bool,
    /// For lookups when commands have ended.
    budget: Budget,
}

impl Running {
    /// Reports exits and forwards signals until the daemon closes the socket.
    fn watch(&mut self, socket: &UnixStream, children: &SignalFd) -> io::Result<()> {
        loop {
            let [said, ended] = wait_for(socket.as_fd(), children.as_fd())?;
            if ended {
                let _ = children.read_signal();
                self.look_at_children(socket)?;
            }
            if said && !self.take_input(socket)? {
                return Ok(());
            }
        }
    }

    /// Reports the stages that have ended, and reaps other processes: orphans become our children.
    fn look_at_children(&mut self, socket: &UnixStream) -> io::Result<()> {
        let ended: Vec<_> =
            self.stages.keys().filter_map(|pid| sys::ended(*pid).ok().flatten()).collect();
        for ended in &ended {
            self.tell_end(ended, socket)?;
        }
        processes::reap_others(&self.leaders);
        Ok(())
    }

    fn tell_end(&mut self, ended: &sys::Ended, socket: &UnixStream) -> io::Result<()> {
        let at_ns = if self.trace { monotonic_ns() } else { 0 };
        match self.stages.remove(&ended.pid) {
            Some(live) => write_end(socket, exited(&live, ended, at_ns, &self.budget)),
            None => Ok(()),
        }
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
        } else if self.stages.contains_key(&pid) {
            let _ = kill(pid, number);
        }
    }

    /// Ends whatever is left: background processes of commands that have ended, and the stages
    /// themselves when the run was given up.
    fn end(&self) {
        if !self.stages.is_empty() {
            for &pid in self.stages.keys() {
                let _ = killpg(pid, Signal::SIGKILL);
            }
            return processes::kill_all_below();
        }
        processes::end_all_below();
    }
}

fn exited(live: &Live, ended: &sys::Ended, exited_ns: u64, budget: &Budget) -> Exited {
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
    let changes = live.watch.changes(budget);
    Exited {
        stage: live.stage,
        how: Some(how),
        core_dumped,
        offsets: live.reported.iter().filter_map(offset).collect(),
        user_us,
        system_us,
        max_rss_kib: ended.max_rss_kib,
        changed_directories: changes.message(),
        changes_incomplete: changes.incomplete,
        exited_ns,
        ..Exited::default()
    }
}
