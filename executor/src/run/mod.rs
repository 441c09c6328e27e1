//! One run in the daemon, from its first message to its line in the log.
//!
//! The commands belong to the run's supervisor process; this module has the pipes' ends that face
//! the network. Each stream has a task and credit of its own, so that none can hold up another; all
//! tasks end with the run.

mod audit;
mod broken;
mod farewells;
mod inlet;
mod kept;
mod launch;
mod link;
mod merge;
mod outbox;
mod outlet;
mod pace;
mod plumbing;
mod prepare;
mod times;

use std::{
    collections::HashMap,
    io,
    os::fd::AsFd as _,
    sync::{Arc, Weak},
    time::Duration,
};

use nix::libc;
use posh_proto::{
    clock::monotonic_ns,
    codec::RUN_BYTES,
    executor::{
        Exited, Finished, Resume, RunInput, RunOutput, RunTimes, Signal, StartTimes, Started,
        WindowSize, WrittenFile, exited::How, run_input, run_output,
    },
};
use tokio::{
    net::unix::pipe,
    sync::{OwnedSemaphorePermit, mpsc},
    task::JoinSet,
};
use tonic::{Status, Streaming};

use self::{
    broken::BrokenStream,
    farewells::{CommandExit, Farewells},
    inlet::Inlet,
    kept::{Return, check_run_id},
    link::{Admitted, RunLink, SupervisorMessage},
    outbox::{Outbox, Unheard},
    outlet::Gate,
    plumbing::Plumbing,
    prepare::{Prepared, ReceivedSpec},
    times::{Clock, Traffic},
};
pub use self::{kept::KeptRuns, outbox::Messages};
use crate::{
    admission::Denied, callers::Caller, cgroup::RunCgroup, error::Refusal, metered::Largest,
    service::ServiceState, sys, tls::serving::Proof, wiring::Wiring,
};

/// Queue of messages to the client.
type ClientQueue = Arc<Outbox>;

/// Time for the last messages of a client whose call has ended: they tell a cancelled call from a
/// lost client.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// Time for a client to close its input, once its run has ended.
const HEARING_OUT: Duration = Duration::from_secs(10);
/// Time for queuing messages that the client must get, while it acknowledges nothing: longer than
/// it may be lost.
const ROOM_TIMEOUT: Duration = Duration::from_secs(75);
/// Upper bound of `grace_ms`: a kept run takes memory and a place among the runs.
const LONGEST_GRACE: Duration = Duration::from_secs(60);

/// A place among the specifications of an identity that are in memory.
type SpecTurn = Option<OwnedSemaphorePermit>;

/// Reconnections of a kept run's client.
type Returns = mpsc::Receiver<Return>;

/// How a run ended, for the log and for the client.
#[derive(Debug)]
enum RunEnd {
    /// With its times, if they were asked for.
    Finished(Option<RunTimes>),
    /// The client went away or reset the call.
    Cancelled,
    /// The client of a kept run was lost, and has not come back in time.
    Abandoned,
    /// The executor is told to end.
    Killed,
    /// Its caller is not admitted any more, and the reason.
    Removed(String),
    Rejected(Refusal),
    /// The client broke the contract.
    Violation(String),
    /// The supervisor is gone.
    Lost(String),
    /// Data of the commands was lost in this program.
    Broken(String),
    /// Writes of the commands did not reach the storage behind an export.
    Unpublished(String),
}

/// The caller of a run.
pub struct RunOrigin {
    /// The caller's rights.
    pub caller: Arc<Caller>,
    /// For the log.
    pub peer: String,
    /// Proof by which the caller is admitted.
    pub proof: Proof,
}

/// Messages from a client.
pub struct ClientMessages {
    /// Its messages.
    pub messages: Streaming<RunInput>,
    /// The charge for them. A stranger has none.
    pub largest: Option<Largest>,
}

impl ClientMessages {
    async fn message(&mut self) -> Result<Option<RunInput>, Status> {
        self.messages.message().await
    }

    /// Covers its messages by the room that its run was admitted with.
    fn cover(&self) {
        self.largest.iter().for_each(|largest| largest.cover(RUN_BYTES));
    }

    /// Ends [`Self::cover`]. False: there is no room for them.
    fn uncover(&self) -> bool {
        self.largest.as_ref().is_none_or(Largest::uncover)
    }
}

/// Takes one `Run` call and returns its messages. The run itself is not tied to the call, since it
/// must be cleaned up after its client has gone.
pub async fn answer(
    shared: Arc<ServiceState>,
    origin: RunOrigin,
    mut input: ClientMessages,
) -> Messages {
    // Until its turn comes, nothing of it is decoded.
    let turn = shared.arrivals.share_of(&origin.caller).acquire_owned().await;
    let first = match input.message().await {
        Ok(first) => first.and_then(|first| first.kind),
        Err(status) => return Messages::only(Err(status)),
    };
    let arrived_ns = monotonic_ns();
    // The call may have been open for a minute: the caller's current rights count.
    let origin = match shared.admission.standing(&origin.proof) {
        Ok(Some(caller)) => RunOrigin { caller, ..origin },
        Ok(None) => origin,
        Err(Denied(why)) => return Messages::only(Err(Status::unauthenticated(why))),
    };
    let asked = match first {
        Some(run_input::Kind::Spec(spec)) => ReceivedSpec::Plain(Box::new(spec)),
        Some(run_input::Kind::Packed(packed)) => ReceivedSpec::Packed(packed),
        Some(run_input::Kind::Resume(resume)) => {
            drop(turn);
            if let Err(refusal) = check_run_id(&resume.run_id) {
                return refuse(&shared, &origin.caller, input, refusal);
            }
            let (RunOrigin { caller, peer, .. }, run_id) = (origin, resume.run_id.clone());
            let resume = Resume { run_id: caller.run_name(&run_id), ..resume };
            let (resumed, unheard) = shared.kept.resume(resume, input).await;
            let identity = caller.name();
            match &resumed {
                // Logged at debug only: a client can do so without end.
                Ok(_) => tracing::debug!(run_id, identity, peer, "a client came back"),
                Err(Refusal { kind, .. }) => {
                    let kind = kind.as_str_name();
                    if shared.audit.refused(identity, &peer, &format!("resume: {kind}")) {
                        tracing::info!(run_id, identity, peer, kind, "a client came back in vain");
                    }
                }
            }
            if let Some(input) = unheard {
                hear_out(&shared, &caller, input);
            }
            return resumed.unwrap_or_else(|refusal| Messages::only(Ok(refusal.into())));
        }
        _ => {
            let refusal = Refusal::protocol("the first message must be the specification");
            return refuse(&shared, &origin.caller, input, refusal);
        }
    };
    let prepared = prepare::prepare(&shared, &origin.caller, &origin.peer, asked).await;
    match prepared.and_then(|prepared| Ok((claim(&shared, &origin.caller, &prepared)?, prepared))) {
        Ok(((outbox, returns), prepared)) => {
            input.cover();
            let messages = outbox.attach();
            let client = Client { input, is_open: true, returns };
            tokio::spawn(serve(shared, origin, prepared, arrived_ns, turn.ok(), client, outbox));
            messages
        }
        Err(refusal) => {
            let (identity, peer, kind) =
                (origin.caller.name(), &origin.peer, refusal.kind.as_str_name());
            if shared.audit.refused(identity, peer, &format!("run: {kind}")) {
                tracing::info!(identity, peer, kind, stage = refusal.stage, "run refused");
            }
            refuse(&shared, &origin.caller, input, refusal)
        }
    }
}

/// The answer to a call that starts no run.
fn refuse(
    shared: &ServiceState,
    caller: &Caller,
    input: ClientMessages,
    refusal: Refusal,
) -> Messages {
    hear_out(shared, caller, input);
    Messages::only(Ok(refusal.into()))
}

/// Reads the rest of an answered call's input. A client closes its input once it has the answer;
/// messages under way by then must not hit a reset call: h2 counts these for the connection's life,
/// and closes it in the end. Of a caller with too many open calls, further ones are reset.
fn hear_out(shared: &ServiceState, caller: &Caller, mut input: ClientMessages) {
    if !input.uncover() {
        return;
    }
    let Ok(place) = shared.heard_out.share_of(caller).try_acquire_owned() else { return };
    tokio::spawn(async move {
        let hear = async { while let Ok(Some(_)) = input.message().await {} };
        let _ = tokio::time::timeout(HEARING_OUT, hear).await;
        drop(place);
    });
}

/// The queue of a run that may begin. A kept run is also registered by its name, and gets its
/// client's reconnections.
fn claim(
    shared: &ServiceState,
    caller: &Caller,
    prepared: &Prepared,
) -> Result<(ClientQueue, Option<Returns>), Refusal> {
    let outbox = Outbox::of_run(
        prepared.grace_ms > 0,
        shared.admission.queued(caller),
        shared.admission.frames(caller),
    );
    let returns = match outbox.keeps() {
        true => Some(shared.kept.begin(&caller.run_name(&prepared.run_id), &outbox)?),
        false => None,
    };
    Ok((outbox, returns))
}

/// Serves one run to its end; only what is remembered of it is left.
async fn serve(
    shared: Arc<ServiceState>,
    origin: RunOrigin,
    mut prepared: Prepared,
    arrived_ns: u64,
    turn: SpecTurn,
    mut client: Client,
    output: ClientQueue,
) {
    let record = std::mem::take(&mut prepared.record);
    let name = origin.caller.run_name(&prepared.run_id);
    let clock = Clock::start(prepared.trace, arrived_ns);
    let mut report =
        RunReport { clock, traffic: Arc::new(Traffic::new(clock)), ..RunReport::default() };
    let end = match record.begin(&shared.audit).await {
        Ok(()) => attend(&shared, &origin, prepared, turn, &mut client, &output, &mut report).await,
        Err(refusal) => {
            let end = RunEnd::Rejected(refusal);
            say(&end, &output).await;
            end
        }
    };
    output.end();
    if client.is_open {
        hear_out(&shared, &origin.caller, client.input);
    }
    // A run that is not kept may have the name of a kept one, which must stay.
    match end {
        _ if !output.keeps() => {}
        // Nothing of it has run: a client without an answer asks again.
        RunEnd::Rejected(_) => shared.kept.forget(&name),
        _ => shared.kept.end(&name, end.is_violent()),
    }
    let (bytes_in, bytes_out) = report.traffic.totals();
    record.ended(&end, report.statuses, bytes_in, bytes_out).write(&shared.audit).await;
}

/// The run's client, and its input.
struct Client {
    input: ClientMessages,
    is_open: bool,
    /// Reconnections of a kept run's client.
    returns: Option<Returns>,
}

impl Client {
    /// Waits for a reconnection; for ever, if the run is not kept.
    async fn returned(returns: &mut Option<Returns>) -> Return {
        match returns {
            Some(returns) => match returns.recv().await {
                Some(returned) => returned,
                None => std::future::pending().await,
            },
            None => std::future::pending().await,
        }
    }
}

/// Data for the log and for the trace.
#[derive(Default)]
struct RunReport {
    statuses: Vec<String>,
    /// Only of a traced run.
    clock: Option<Clock>,
    traffic: Arc<Traffic>,
}

impl RunEnd {
    fn word(&self) -> &'static str {
        match self {
            Self::Finished(_) => "finished",
            Self::Cancelled => "cancelled",
            Self::Abandoned => "abandoned",
            Self::Killed => "killed",
            Self::Removed(_) => "removed",
            Self::Rejected(_) => "rejected",
            Self::Violation(_) => "violation",
            Self::Lost(_) => "lost",
            Self::Unpublished(_) => "unpublished",
            Self::Broken(_) => "broken",
        }
    }

    /// Returns true if its commands were killed.
    fn is_violent(&self) -> bool {
        !matches!(self, Self::Finished(_) | Self::Rejected(_) | Self::Unpublished(_))
    }

    /// The last message to the client.
    fn message(&self) -> Option<Result<RunOutput, Status>> {
        Some(match self {
            Self::Finished(times) => {
                Ok(output_of(run_output::Kind::Finished(Finished { times: times.clone() })))
            }
            Self::Cancelled | Self::Abandoned => return None,
            Self::Killed => {
                Err(Status::unavailable("the executor was shut down and killed this run"))
            }
            Self::Removed(why) => {
                Err(Status::unauthenticated(format!("the executor ended this run: {why}")))
            }
            Self::Rejected(refusal) => Ok(refusal.clone().into()),
            Self::Violation(what) => Err(Status::invalid_argument(what.as_str())),
            Self::Lost(what) => {
                Err(Status::internal(format!("the run's supervisor is gone: {what}")))
            }
            Self::Broken(what) => Err(Status::internal(what.as_str())),
            Self::Unpublished(what) => Err(Status::internal(format!(
                "what it wrote there did not get any further: {what}"
            ))),
        })
    }
}

fn output_of(kind: run_output::Kind) -> RunOutput {
    RunOutput { kind: Some(kind) }
}

/// Starts the run and stays with it until its processes are gone.
async fn attend(
    shared: &Arc<ServiceState>,
    origin: &RunOrigin,
    prepared: Prepared,
    turn: SpecTurn,
    client: &mut Client,
    output: &ClientQueue,
    report: &mut RunReport,
) -> RunEnd {
    let mut kill = shared.kill.subscribe();
    let grace = Duration::from_millis(prepared.grace_ms.into()).min(LONGEST_GRACE);
    // A kept run whose client is lost meanwhile starts all the same; the client learns so when it
    // returns.
    let is_unwanted = async {
        output.detached().await;
        if output.keeps() {
            std::future::pending::<()>().await;
        }
    };
    let stopped = async {
        tokio::select! {
            _ = kill.wait_for(|kill| *kill) => RunEnd::Killed,
            Denied(why) = shared.admission.removed(&origin.proof) => RunEnd::Removed(why),
        }
    };
    let starting = tokio::select! {
        () = is_unwanted => return RunEnd::Cancelled,
        end = stopped => {
            say(&end, output).await;
            return end;
        }
        starting = launch::start(shared, origin, prepared, report.clock) => starting,
    };
    // The specification is freed, but for what runs.
    drop(turn);
    let mut run = match starting {
        Ok(run) => run,
        Err(refusal) => {
            let end = RunEnd::Rejected(refusal);
            say(&end, output).await;
            return end;
        }
    };
    run.report = std::mem::take(report);
    let times = run.report.clock.zip(run.start_times).map(|(clock, times)| clock.started(times));
    let written_files = std::mem::take(&mut run.written_files);
    let started = Started { times, written_files };
    let running = async {
        if output.send(Ok(output_of(run_output::Kind::Started(started)))).await.is_err() {
            return RunEnd::Cancelled;
        }
        match run.start_streams(output) {
            Err(error) => RunEnd::Broken(error.to_string()),
            Ok(()) => run.drive(client, grace, output).await,
        }
    };
    let end = tokio::select! {
        end = running => end,
        _ = kill.wait_for(|kill| *kill) => RunEnd::Killed,
        Denied(why) = shared.admission.removed(&origin.proof) => RunEnd::Removed(why),
    };
    // Closes the pipes, then the supervisor's socket, and waits for its end: the run's permits
    // count processes, not calls. Neither this nor the client waits for the other.
    let clean_up = async {
        run.streams.shutdown().await;
        run.link.close().await;
    };
    tokio::join!(say(&end, output), clean_up);
    *report = run.report;
    end
}

/// Sends the last message, unless the client leaves no room for it. The wait is short when the
/// caller is not admitted any more, or the executor ends.
async fn say(end: &RunEnd, output: &ClientQueue) {
    let patience = match end {
        RunEnd::Removed(_) | RunEnd::Killed => LAST_WORDS,
        _ => ROOM_TIMEOUT,
    };
    if let Some(last) = end.message() {
        let _ = tokio::time::timeout(patience, output.send(last)).await;
    }
}

/// A run that has started, in the daemon.
struct StartedRun {
    link: RunLink,
    /// Each returns its failure.
    streams: JoinSet<Result<(), BrokenStream>>,
    inlets: HashMap<u32, Arc<Inlet>>,
    gates: HashMap<u32, Arc<Gate>>,
    ptys: Vec<Weak<pipe::Receiver>>,
    terminal_stages: Vec<u32>,
    /// Redirection targets that the client was told of.
    written_files: Vec<WrittenFile>,
    /// Number of forwarded signals.
    signals_taken: usize,
    /// Only of a traced run.
    start_times: Option<StartTimes>,
    /// Plumbing for the streams, which they take once the client knows that the run has started.
    plan: Option<(Wiring, Plumbing)>,
    stages_left: usize,
    farewells: Farewells,
    report: RunReport,
    _cgroup: Option<RunCgroup>,
    admitted: Arc<Admitted>,
}

impl StartedRun {
    /// Starts one task per merge, inlet and outlet. Closes the rest of the plumbing.
    fn start_streams(&mut self, output: &ClientQueue) -> Result<(), BrokenStream> {
        let Some((wiring, mut plumbing)) = self.plan.take() else { return Ok(()) };
        for merge in &wiring.merges {
            let sources =
                merge.sources.iter().map(|id| plumbing.reader(*id)).collect::<Result<_, _>>()?;
            self.streams.spawn(merge::join(sources, plumbing.writer(merge.pipe)?));
        }
        for spec in &wiring.inlets {
            let inlet = Arc::new(Inlet::default());
            self.inlets.insert(spec.stream, inlet.clone());
            let traffic = self.report.traffic.clone();
            let feed = inlet::feed(
                spec.stream,
                inlet,
                plumbing.writer(spec.pipe)?,
                output.clone(),
                traffic,
            );
            self.streams.spawn(async move {
                feed.await;
                Ok(())
            });
        }
        for spec in &wiring.outlets {
            let gate = Arc::new(Gate::new(spec.initial_credit_bytes));
            self.gates.insert(spec.stream, gate.clone());
            let sources = spec.sources.iter().map(|id| plumbing.reader(*id).map(Arc::new));
            let sources = sources.collect::<Result<Vec<_>, _>>()?;
            let ptys = spec
                .sources
                .iter()
                .zip(&sources)
                .filter(|(id, _)| wiring.ptys.iter().any(|pty| pty.id == **id));
            self.ptys.extend(ptys.map(|(_, master)| Arc::downgrade(master)));
            let traffic = self.report.traffic.clone();
            self.streams.spawn(outlet::drain(spec.stream, sources, gate, output.clone(), traffic));
        }
        drop(plumbing);
        self.admitted.has_begun(wiring.own_descriptors(), 0);
        Ok(())
    }

    /// Forwards messages until all stages have exited and all streams have ended.
    async fn drive(
        &mut self,
        client: &mut Client,
        grace: Duration,
        output: &ClientQueue,
    ) -> RunEnd {
        let mut lost_at = None;
        while self.stages_left > 0 || !self.streams.is_empty() || !self.farewells.is_empty() {
            let patience = async {
                match lost_at {
                    Some(lost_at) => tokio::time::sleep_until(lost_at + grace).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = output.detached(), if lost_at.is_none() => {
                    if let Err(end) = self.lose(client, output).await {
                        return end;
                    }
                    lost_at = Some(tokio::time::Instant::now());
                }
                () = patience => return RunEnd::Abandoned,
                (resume, input) = Client::returned(&mut client.returns) => {
                    input.cover();
                    (client.input, client.is_open, lost_at) = (input, true, None);
                    if let Err(end) = self.catch_up(resume).await {
                        return end;
                    }
                }
                message = client.input.message(),
                    if client.is_open && lost_at.is_none() => match message {
                    Ok(Some(message)) => if let Err(end) = self.take(message, output).await {
                        return end;
                    },
                    // The client has closed its input, and so every inlet.
                    Ok(None) => {
                        client.is_open = false;
                        self.inlets.values().for_each(|inlet| inlet.end());
                    }
                    Err(status) => match self.is_kept_after(&status, output) {
                        true => {
                            client.is_open = false;
                            lost_at = Some(tokio::time::Instant::now());
                        }
                        false => return RunEnd::Cancelled,
                    }
                },
                message = self.link.next(), if self.stages_left > 0 => match message {
                    Ok(Some(SupervisorMessage {
                        output: RunOutput { kind: Some(run_output::Kind::Exited(exited)) },
                        room,
                    })) => {
                        let exited = match self.report.clock {
                            Some(clock) => clock.take_over_end(exited),
                            None => exited,
                        };
                        self.stages_left -= 1;
                        if self.report.statuses.len() < audit::RECORDED {
                            self.report.statuses.push(status_word(&exited));
                        }
                        let exit = CommandExit { exited, room };
                        let ended = self.farewells.ended(exit, self.stages_left == 0);
                        if tell_ends(ended, output).await.is_err() {
                            return RunEnd::Cancelled;
                        }
                    }
                    Ok(Some(_)) => {}
                    Ok(None) => return RunEnd::Lost("it closed its socket".to_owned()),
                    Err(error) => return RunEnd::Lost(error.to_string()),
                },
                Some(ended) = self.streams.join_next() => {
                    if let Err(error) = ended.unwrap_or_else(|error| Err(error.into())) {
                        return RunEnd::Broken(error.to_string());
                    }
                }
                Some(ended) = self.farewells.next() => match ended {
                    Err(error) => return RunEnd::Unpublished(error.to_string()),
                    Ok(exits) => if tell_ends(exits, output).await.is_err() {
                        return RunEnd::Cancelled;
                    }
                }
            }
        }
        RunEnd::Finished(self.report.traffic.times())
    }

    /// Handles the loss of the client. The run goes on only if the client did not cancel it and
    /// owes no input.
    async fn lose(&mut self, client: &mut Client, output: &ClientQueue) -> Result<(), RunEnd> {
        if !output.keeps() || !client.is_open {
            return Err(RunEnd::Cancelled);
        }
        loop {
            match tokio::time::timeout(LAST_WORDS, client.input.message()).await {
                Ok(Ok(Some(message))) => self.take(message, output).await?,
                Ok(Ok(None)) => return Err(RunEnd::Cancelled),
                Ok(Err(status)) if !self.is_kept_after(&status, output) => {
                    return Err(RunEnd::Cancelled);
                }
                Ok(Err(_)) | Err(_) => {
                    client.is_open = false;
                    return Ok(());
                }
            }
        }
    }

    /// Returns true if the run goes on after its client's input ended with `status`: the client did
    /// not cancel, and owes no input.
    fn is_kept_after(&self, status: &Status, output: &ClientQueue) -> bool {
        output.keeps()
            && status.code() != tonic::Code::Cancelled
            && self.inlets.values().all(|inlet| inlet.is_ended())
    }

    /// Applies the client's repeated messages. They are totals, so that it does not matter which of
    /// them came before.
    async fn catch_up(&mut self, resume: Resume) -> Result<(), RunEnd> {
        for credit in &resume.credits {
            self.gates
                .get(&credit.stream)
                .into_iter()
                .for_each(|gate| gate.add_up_to(credit.bytes));
        }
        resume
            .closed
            .iter()
            .filter_map(|stream| self.gates.get(stream))
            .for_each(|gate| gate.close());
        resume
            .ended
            .iter()
            .filter_map(|stream| self.inlets.get(stream))
            .for_each(|inlet| inlet.end());
        for signal in resume.signals.into_iter().skip(self.signals_taken) {
            self.pass_on(signal).await?;
        }
        Ok(())
    }

    async fn pass_on(&mut self, signal: Signal) -> Result<(), RunEnd> {
        self.signals_taken += 1;
        self.link.signal(signal).await.map_err(|error| RunEnd::Lost(error.to_string()))
    }

    async fn take(&mut self, message: RunInput, output: &ClientQueue) -> Result<(), RunEnd> {
        match message.kind {
            Some(run_input::Kind::Chunk(chunk)) => {
                let inlet = self.inlets.get(&chunk.stream);
                let inlet = inlet
                    .ok_or_else(|| RunEnd::Violation(format!("{} is no inlet", chunk.stream)))?;
                inlet
                    .push(&chunk.data)
                    .map_err(|violation| RunEnd::Violation(violation.to_string()))?;
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
            Some(run_input::Kind::Signal(signal)) => self.pass_on(signal).await?,
            Some(run_input::Kind::Received(count)) => output.received(count),
            Some(run_input::Kind::WindowSize(size)) => {
                self.resize(&size).await.map_err(|error| RunEnd::Lost(error.to_string()))?;
            }
            Some(
                run_input::Kind::Spec(_) | run_input::Kind::Packed(_) | run_input::Kind::Resume(_),
            ) => {
                return Err(RunEnd::Violation("a second specification".to_owned()));
            }
            // A newer gateway may send a message that we do not know; such a message can't matter
            // to us.
            None => {}
        }
        Ok(())
    }

    /// Resizes all ptys. The kernel signals only a terminal's session, and no stage is in it: we
    /// signal the stages.
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

/// Reports exits. A client that leaves no room for that in time, and acknowledges nothing, has
/// given the run up.
async fn tell_ends(
    exits: impl IntoIterator<Item = CommandExit>,
    output: &ClientQueue,
) -> Result<(), Unheard> {
    let telling = async {
        for CommandExit { exited, room } in exits {
            output.send_within(Ok(output_of(run_output::Kind::Exited(exited))), room).await?;
        }
        Ok(())
    };
    tokio::time::timeout(ROOM_TIMEOUT, telling).await.unwrap_or(Err(Unheard))
}

/// `2/1`: stage 2 exited with 1; `2!13`: it died of signal 13.
fn status_word(exited: &Exited) -> String {
    match exited.how {
        Some(How::Code(code)) => format!("{}/{code}", exited.stage),
        Some(How::Signal(signal)) => format!("{}!{signal}", exited.stage),
        None => format!("{}?", exited.stage),
    }
}
