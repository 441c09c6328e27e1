//! One run in the daemon, from its first message to its line in the log.
//!
//! The commands belong to the run's supervisor process; here are the pipes'
//! ends that face the network. Each stream has a task and credit of its own, so
//! that none can hold up another; all tasks end with the run.

mod inlet;
mod launch;
mod link;
mod merge;
mod outlet;
mod pace;
mod plumbing;
mod times;

use std::{
    collections::HashMap,
    io,
    os::fd::AsFd as _,
    sync::{Arc, Weak},
    time::Instant,
};

use nix::libc;
use posh_proto::executor::{
    Exited, Finished, RunInput, RunOutput, RunSpec, RunTimes, Signal, StartTimes, Started, WindowSize, exited::How,
    run_input, run_output,
};
use tokio::{
    net::unix::pipe,
    sync::{OwnedSemaphorePermit, mpsc},
    task::JoinSet,
};
use tonic::{Status, Streaming};

use self::{
    inlet::Inlet,
    link::Link,
    outlet::Gate,
    plumbing::Plumbing,
    times::{Clock, Traffic},
};
use crate::{
    callers::Caller, error::Refusal, load::RunShare, own_mounts::OwnMounts, pool::Lease, service::Shared, sys,
    wiring::Wiring,
};

/// Programs and statuses named in a run's line of the log.
const LOGGED_PROGRAMS: usize = 16;

/// The way to the client.
type Output = mpsc::Sender<Result<RunOutput, Status>>;

/// How a run ended, for the log and for the client.
#[derive(Debug)]
enum End {
    /// With its times, if they were asked for.
    Finished(Option<RunTimes>),
    /// The client went away or reset the call.
    Cancelled,
    /// The executor is told to end.
    Killed,
    Rejected(Refusal),
    /// The client broke the contract.
    Violation(String),
    /// The supervisor is gone.
    Lost(String),
    /// What the commands wrote did not reach the storage behind an export.
    Unpublished(String),
}

/// Serves one `Run` call to its end; nothing of the run is left afterwards.
pub async fn serve(
    shared: Arc<Shared>,
    (caller, peer): (Arc<Caller>, String),
    mut input: Streaming<RunInput>,
    output: Output,
) {
    let began = Instant::now();
    let spec = match input.message().await {
        Ok(Some(RunInput { kind: Some(run_input::Kind::Spec(spec)) })) => spec,
        Ok(_) => {
            let refusal = Refusal::protocol("the first message must be the specification");
            let _ = output.send(Ok(refusal.into())).await;
            return;
        }
        Err(_) => return,
    };
    let run_id = spec.run_id.clone();
    let programs = spec.stages.iter().take(LOGGED_PROGRAMS).map(|stage| stage.program.as_str());
    let programs = programs.collect::<Vec<_>>().join(" ");
    let clock = Clock::start(&spec);
    let mut report = Report { clock, traffic: Arc::new(Traffic::new(clock)), ..Report::default() };
    let end = attend((&shared, &caller), spec, input, &output, &mut report).await;
    let (bytes_in, bytes_out) = report.traffic.totals();
    tracing::info!(
        run_id,
        identity = caller.name(),
        peer,
        programs,
        end = end.word(),
        statuses = report.statuses.join(" "),
        bytes_in,
        bytes_out,
        ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
        "run ended"
    );
}

/// What the log tells of a run, and its trace.
#[derive(Default)]
struct Report {
    statuses: Vec<String>,
    /// Of a traced run.
    clock: Option<Clock>,
    traffic: Arc<Traffic>,
}

impl End {
    fn word(&self) -> String {
        match self {
            Self::Finished(_) => "finished".to_owned(),
            Self::Cancelled => "cancelled".to_owned(),
            Self::Killed => "killed".to_owned(),
            Self::Rejected(refusal) => format!("rejected: {refusal}"),
            Self::Violation(what) => format!("violation: {what}"),
            Self::Lost(what) => format!("lost: {what}"),
            Self::Unpublished(what) => format!("unpublished: {what}"),
        }
    }

    /// The last message to the client.
    fn message(&self) -> Option<Result<RunOutput, Status>> {
        Some(match self {
            Self::Finished(times) => Ok(output_of(run_output::Kind::Finished(Finished { times: times.clone() }))),
            Self::Cancelled => return None,
            Self::Killed => Err(Status::unavailable("the executor was shut down and killed this run")),
            Self::Rejected(refusal) => Ok(refusal.clone().into()),
            Self::Violation(what) => Err(Status::invalid_argument(what.as_str())),
            Self::Lost(what) => Err(Status::internal(format!("the run's supervisor is gone: {what}"))),
            Self::Unpublished(what) => {
                Err(Status::internal(format!("what it wrote there did not get any further: {what}")))
            }
        })
    }
}

fn output_of(kind: run_output::Kind) -> RunOutput {
    RunOutput { kind: Some(kind) }
}

/// Starts the run and stays with it until its processes are gone.
async fn attend(
    (shared, caller): (&Shared, &Caller),
    spec: RunSpec,
    input: Streaming<RunInput>,
    output: &Output,
    report: &mut Report,
) -> End {
    let mut kill = shared.kill.subscribe();
    let starting = tokio::select! {
        () = output.closed() => return End::Cancelled,
        starting = launch::start((shared, caller), spec, report.clock) => starting,
    };
    let mut run = match starting {
        Ok(run) => run,
        Err(refusal) => {
            let end = End::Rejected(refusal);
            say(&end, output).await;
            return end;
        }
    };
    run.report = std::mem::take(report);
    let times = run.report.clock.zip(run.start_times).map(|(clock, times)| clock.started(times));
    if output.send(Ok(output_of(run_output::Kind::Started(Started { times })))).await.is_err() {
        run.link.close().await;
        return End::Cancelled;
    }
    run.start_streams(output);
    let end = tokio::select! {
        end = run.drive(input, output) => end,
        _ = kill.wait_for(|kill| *kill) => End::Killed,
    };
    // Closes the pipes, then the supervisor's socket, and waits for its end: the
    // run's permits count processes, not calls. The client need not wait for that,
    // nor that for the client.
    let clean_up = async {
        run.streams.shutdown().await;
        run.link.close().await;
    };
    tokio::join!(say(&end, output), clean_up);
    *report = run.report;
    end
}

async fn say(end: &End, output: &Output) {
    if let Some(last) = end.message() {
        let _ = output.send(last).await;
    }
}

/// A run that has started, in the daemon.
struct Run {
    link: Link,
    streams: JoinSet<()>,
    inlets: HashMap<u32, Arc<Inlet>>,
    gates: HashMap<u32, Arc<Gate>>,
    ptys: Vec<Weak<pipe::Receiver>>,
    terminal_stages: Vec<u32>,
    /// Of a traced run.
    start_times: Option<StartTimes>,
    /// The plumbing that the streams take over once the client knows.
    plan: Option<(Wiring, Plumbing)>,
    stages_left: usize,
    /// Exports whose files others see only later.
    own_mounts: OwnMounts,
    /// Ends that the client learns of when it can see what the stages wrote.
    held: Vec<Exited>,
    report: Report,
    _lease: Lease,
    _share: RunShare,
    _descriptors: OwnedSemaphorePermit,
}

impl Run {
    /// Starts one task per merge, inlet and outlet. What is left of the plumbing
    /// is closed.
    fn start_streams(&mut self, output: &Output) {
        let Some((wiring, mut plumbing)) = self.plan.take() else { return };
        for merge in &wiring.merges {
            let sources = merge.sources.iter().filter_map(|id| plumbing.reader(*id)).collect();
            if let Some(target) = plumbing.writer(merge.pipe) {
                self.streams.spawn(merge::join(sources, target));
            }
        }
        for spec in &wiring.inlets {
            let inlet = Arc::new(Inlet::default());
            self.inlets.insert(spec.stream, inlet.clone());
            if let Some(target) = plumbing.writer(spec.pipe) {
                let traffic = self.report.traffic.clone();
                self.streams.spawn(inlet::feed(spec.stream, inlet, target, output.clone(), traffic));
            }
        }
        for spec in &wiring.outlets {
            let gate = Arc::new(Gate::new(spec.initial_credit_bytes));
            self.gates.insert(spec.stream, gate.clone());
            let sources: Vec<_> = spec.sources.iter().filter_map(|id| plumbing.reader(*id)).map(Arc::new).collect();
            let ptys = spec.sources.iter().zip(&sources).filter(|(id, _)| wiring.ptys.iter().any(|pty| pty.id == **id));
            self.ptys.extend(ptys.map(|(_, master)| Arc::downgrade(master)));
            let traffic = self.report.traffic.clone();
            self.streams.spawn(outlet::drain(spec.stream, sources, gate, output.clone(), traffic));
        }
    }

    /// Carries messages until all stages have exited and all streams have ended.
    async fn drive(&mut self, mut input: Streaming<RunInput>, output: &Output) -> End {
        let mut is_input_open = true;
        let mut publishing = JoinSet::new();
        while self.stages_left > 0 || !self.streams.is_empty() || !publishing.is_empty() {
            tokio::select! {
                () = output.closed() => return End::Cancelled,
                message = input.message(), if is_input_open => match message {
                    Ok(Some(message)) => if let Err(end) = self.take(message).await {
                        return end;
                    },
                    // The client has no more to say: neither has any inlet.
                    Ok(None) => {
                        is_input_open = false;
                        self.inlets.values().for_each(|inlet| inlet.end());
                    }
                    Err(_) => return End::Cancelled,
                },
                message = self.link.next(), if self.stages_left > 0 => match message {
                    Ok(Some(RunOutput { kind: Some(run_output::Kind::Exited(exited)) })) => {
                        let exited = match self.report.clock {
                            Some(clock) => clock.take_over_end(exited),
                            None => exited,
                        };
                        self.stages_left -= 1;
                        if self.report.statuses.len() < LOGGED_PROGRAMS {
                            self.report.statuses.push(status_word(&exited));
                        }
                        if self.own_mounts.is_empty() {
                            if output.send(Ok(output_of(run_output::Kind::Exited(exited)))).await.is_err() {
                                return End::Cancelled;
                            }
                        } else {
                            self.hold(exited);
                            if self.stages_left == 0 {
                                publishing.spawn(self.own_mounts.clone().publish());
                            }
                        }
                    }
                    Ok(Some(_)) => {}
                    Ok(None) => return End::Lost("it closed its socket".to_owned()),
                    Err(error) => return End::Lost(error.to_string()),
                },
                Some(_) = self.streams.join_next() => {}
                Some(published) = publishing.join_next() => {
                    if let Err(what) = published.unwrap_or_else(|error| Err(error.to_string())) {
                        return End::Unpublished(what);
                    }
                    for exited in self.held.drain(..) {
                        if output.send(Ok(output_of(run_output::Kind::Exited(exited)))).await.is_err() {
                            return End::Cancelled;
                        }
                    }
                }
            }
        }
        End::Finished(self.report.traffic.times())
    }

    /// Times there are not this machine's, so they do not tell all that changed.
    fn hold(&mut self, exited: Exited) {
        self.held.push(Exited { changes_incomplete: true, ..exited });
    }

    async fn take(&mut self, message: RunInput) -> Result<(), End> {
        match message.kind {
            Some(run_input::Kind::Chunk(chunk)) => {
                let inlet = self.inlets.get(&chunk.stream);
                let inlet = inlet.ok_or_else(|| End::Violation(format!("{} is no inlet", chunk.stream)))?;
                inlet.push(&chunk.data).map_err(End::Violation)?;
            }
            Some(run_input::Kind::End(stream)) => {
                self.inlets.get(&stream).into_iter().for_each(|inlet| inlet.end());
            }
            Some(run_input::Kind::Credit(credit)) => {
                self.gates.get(&credit.stream).into_iter().for_each(|gate| gate.add(credit.bytes));
            }
            Some(run_input::Kind::Closed(stream)) => {
                self.gates.get(&stream).into_iter().for_each(|gate| gate.close());
            }
            Some(run_input::Kind::Signal(signal)) => {
                self.link.signal(signal).await.map_err(|error| End::Lost(error.to_string()))?;
            }
            Some(run_input::Kind::WindowSize(size)) => {
                self.resize(&size).await.map_err(|error| End::Lost(error.to_string()))?;
            }
            Some(run_input::Kind::Spec(_)) => return Err(End::Violation("a second specification".to_owned())),
            // A newer gateway may say what we do not know; it can't matter to us.
            None => {}
        }
        Ok(())
    }

    /// Resizes all ptys. The kernel tells only a terminal's session of it, which no
    /// stage is in: they get the signal from us.
    async fn resize(&mut self, size: &WindowSize) -> io::Result<()> {
        for master in self.ptys.iter().filter_map(Weak::upgrade) {
            sys::resize(master.as_fd(), size)?;
        }
        for &stage in &self.terminal_stages {
            let signal = libc::SIGWINCH.unsigned_abs();
            self.link.signal(Signal { stage, signal, group: true }).await?;
        }
        Ok(())
    }
}

/// `2/1`: stage 2 exited with 1; `2!13`: it died of signal 13.
fn status_word(exited: &Exited) -> String {
    match exited.how {
        Some(How::Code(code)) => format!("{}/{code}", exited.stage),
        Some(How::Signal(signal)) => format!("{}!{signal}", exited.stage),
        None => format!("{}?", exited.stage),
    }
}
