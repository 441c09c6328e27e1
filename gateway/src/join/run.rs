//! A running local aggregator: a recipe's commands as processes, fed with the output of remote
//! parts. Input is bounded by the sender's credit, which grows as input is consumed
//! ([`AggregatorEvent::Fed`]), output by [`Joining::allow`].

use std::{
    collections::VecDeque,
    ffi::OsString,
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::process::ExitStatusExt as _,
    },
    path::PathBuf,
    process::{ExitStatus, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use nix::{
    fcntl::OFlag,
    sys::signal::{Signal, kill},
    unistd::{Pid, pipe2},
};
use posh_proto::pieces;
use posh_reach::open_files;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    net::unix::pipe,
    process::{Child, ChildStderr, ChildStdout, Command},
    sync::{Notify, mpsc, watch},
    task::JoinSet,
};

use super::{
    JoinSource, Recipe,
    own::{NoPart, OwnAggregator, Recount},
    status,
};
use crate::stage_link::Status;

/// Capacity of the event queue.
const QUEUE: usize = 16;
/// Size of one read from a command: a pipe holds no more.
const READ_BYTES: usize = 64 << 10;
/// Output credit before the reader has confirmed any: the reader is local, so a few pipes' worth
/// suffices.
const WINDOW_BYTES: u64 = 1 << 20;

/// Exit status if posh itself fails.
const BROKEN: u32 = 125;

/// Executable of a [`super::Step`].
#[derive(Debug, Clone)]
pub struct AggregatorProgram {
    /// Path of the executable.
    pub path: PathBuf,
    /// Complete environment.
    pub env: Vec<(OsString, OsString)>,
}

/// Event of an aggregator.
#[derive(Debug)]
pub enum AggregatorEvent {
    /// So many bytes of that part were consumed.
    Fed(usize, u64),
    /// Output.
    Output(Bytes),
    /// Error output of a command.
    Errors(Bytes),
    /// End of all commands, with the status.
    Over(Status),
}

/// A running aggregator. Dropping it kills its commands.
#[derive(Debug)]
pub struct Joining {
    parts: Vec<Arc<PartBuffer>>,
    window: Arc<watch::Sender<Window>>,
    pids: Vec<Pid>,
    tasks: JoinSet<()>,
}

/// Output credit of the reader.
#[derive(Debug, Clone, Copy)]
struct Window {
    allowed_bytes: u64,
    is_closed: bool,
}

/// Buffered bytes of one part, bounded by the sender's credit.
#[derive(Debug, Default)]
struct PartBuffer {
    state: Mutex<BufferedPieces>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct BufferedPieces {
    pieces: VecDeque<Bytes>,
    has_ended: bool,
}

impl PartBuffer {
    fn push(&self, data: Bytes) {
        pieces::keep(&mut self.lock().pieces, data);
        self.changed.notify_one();
    }

    fn end(&self) {
        self.lock().has_ended = true;
        self.changed.notify_one();
    }

    /// Next piece; `None` at the end.
    async fn next(&self) -> Option<Bytes> {
        loop {
            {
                let mut state = self.lock();
                let next = state.pieces.pop_front();
                if next.is_some() || state.has_ended {
                    return next;
                }
            }
            // `Notify` stores a notification that comes before this.
            self.changed.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, BufferedPieces> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Joining {
    /// Starts the commands; `programs` belong to the recipe's commands.
    ///
    /// # Errors
    /// A pipe or process can't be created; then nothing runs.
    pub fn start(
        recipe: &Recipe,
        programs: &[AggregatorProgram],
    ) -> io::Result<(Self, mpsc::Receiver<AggregatorEvent>)> {
        let incoming: Vec<Arc<PartBuffer>> = (0..recipe.parts).map(|_| Arc::default()).collect();
        let (events, told) = mpsc::channel(QUEUE);
        let window = watch::Sender::new(Window { allowed_bytes: WINDOW_BYTES, is_closed: false });
        let mut joining = Self {
            parts: incoming.clone(),
            window: Arc::new(window),
            pids: Vec::new(),
            tasks: JoinSet::new(),
        };
        let output = Outlet { window: Arc::clone(&joining.window), events };
        match &recipe.source {
            JoinSource::Own(own) => {
                drop(joining.tasks.spawn(run_own(own.clone(), incoming, output)))
            }
            JoinSource::InOrder => joining.start_in_order(recipe, programs, incoming, output)?,
            JoinSource::Separate | JoinSource::Counted => {
                joining.start_separate(recipe, programs, incoming, output)?
            }
        }
        Ok((joining, told))
    }

    fn start_in_order(
        &mut self,
        recipe: &Recipe,
        programs: &[AggregatorProgram],
        incoming: Vec<Arc<PartBuffer>>,
        output: Outlet,
    ) -> io::Result<()> {
        let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
        let writer = pipe::Sender::from_owned_fd(write)?;
        let children = spawn(recipe, programs, Stdio::from(read), Vec::new())?;
        self.note(&children);
        let parts: Vec<_> = incoming.into_iter().enumerate().collect();
        self.tasks.spawn(feed(parts, writer, None, output.events.clone()));
        self.tasks.spawn(attend(children, Vec::new(), None, output));
        Ok(())
    }

    fn start_separate(
        &mut self,
        recipe: &Recipe,
        programs: &[AggregatorProgram],
        incoming: Vec<Arc<PartBuffer>>,
        output: Outlet,
    ) -> io::Result<()> {
        let counts = (recipe.source == JoinSource::Counted)
            .then(|| Arc::new(Mutex::new(Recount::new(recipe.parts))));
        let mut reads = Vec::new();
        let mut writers = Vec::new();
        for _ in 0..recipe.parts {
            let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
            reads.push(read);
            writers.push(pipe::Sender::from_owned_fd(write)?);
        }
        // Name the gateway's descriptors: an inheritable one could leak into other children that
        // start at this moment.
        let own = std::process::id();
        let names = reads.iter().map(|read| format!("/proc/{own}/fd/{}", read.as_raw_fd()).into());
        let children = spawn(recipe, programs, Stdio::null(), names.collect())?;
        self.note(&children);
        for (part, writer) in incoming.into_iter().enumerate().zip(writers) {
            self.tasks.spawn(feed(vec![part], writer, counts.clone(), output.events.clone()));
        }
        self.tasks.spawn(attend(children, reads, counts, output));
        Ok(())
    }

    fn note(&mut self, children: &[Child]) {
        self.pids =
            children.iter().filter_map(|c| Some(Pid::from_raw(c.id()?.cast_signed()))).collect();
    }

    /// Adds bytes of a part.
    pub fn push(&self, part: usize, data: Bytes) {
        self.parts.get(part).into_iter().for_each(|incoming| incoming.push(data.clone()));
    }

    /// Ends a part.
    pub fn end(&mut self, part: usize) {
        self.parts.get(part).into_iter().for_each(|incoming| incoming.end());
    }

    /// Adds output credit.
    pub fn allow(&self, bytes: u64) {
        self.window.send_modify(|window| {
            window.allowed_bytes = window.allowed_bytes.saturating_add(bytes)
        });
    }

    /// Closes the output: a command that writes gets SIGPIPE.
    pub fn close(&self) {
        self.window.send_modify(|window| window.is_closed = true);
    }

    /// Sends a signal to the commands.
    pub fn signal(&self, signal: Signal) {
        // Unreaped until the last one has closed its output, so their IDs are valid.
        for pid in &self.pids {
            let _ = kill(*pid, signal);
        }
    }
}

/// Starts the commands, each reading the output of the one before.
fn spawn(
    recipe: &Recipe,
    programs: &[AggregatorProgram],
    input: Stdio,
    operands: Vec<OsString>,
) -> io::Result<Vec<Child>> {
    let mut children: Vec<Child> = Vec::new();
    let (mut input, mut operands) = (Some(input), Some(operands));
    for (step, program) in recipe.commands.iter().zip(programs) {
        let mut command = Command::new(&program.path);
        command.as_std_mut().env_clear().envs(program.env.iter().cloned());
        command.arg0(&step.argv[0]).args(&step.argv[1..]).args(operands.take().unwrap_or_default());
        // The user's own directory may be on a mount, and is not needed.
        command.current_dir("/").process_group(0).kill_on_drop(true);
        command
            .stdin(input.take().unwrap_or_else(Stdio::null))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        open_files::give_back(command.as_std_mut());
        let mut child = command.spawn()?;
        if children.len() + 1 < recipe.commands.len() {
            let output = child
                .stdout
                .take()
                .ok_or_else(|| io::Error::other("a command without an output"))?;
            input = Some(Stdio::from(output.into_owned_fd()?));
        }
        children.push(child);
    }
    Ok(children)
}

/// Writes parts, one after the other, into a command.
async fn feed(
    parts: Vec<(usize, Arc<PartBuffer>)>,
    mut writer: pipe::Sender,
    counts: Option<Arc<Mutex<Recount>>>,
    events: mpsc::Sender<AggregatorEvent>,
) {
    // After the reader is gone, keep consuming: the senders must not block forever.
    let mut is_read = true;
    for (part, incoming) in parts {
        while let Some(data) = incoming.next().await {
            let bytes = data.len() as u64;
            let data = match &counts {
                None => data,
                Some(counts) => {
                    let lines =
                        counts.lock().unwrap_or_else(PoisonError::into_inner).part(part, &data);
                    match lines {
                        Ok(lines) => Bytes::from(lines),
                        Err(no_part) => return tell_broken(no_part, &events).await,
                    }
                }
            };
            is_read = is_read && writer.write_all(&data).await.is_ok();
            if events.send(AggregatorEvent::Fed(part, bytes)).await.is_err() {
                return;
            }
        }
    }
}

/// Waits for the end of the commands. `_reads` keeps the pipes that the first one opens by name.
async fn attend(
    mut children: Vec<Child>,
    _reads: Vec<OwnedFd>,
    counts: Option<Arc<Mutex<Recount>>>,
    mut outlet: Outlet,
) {
    let mut errors = JoinSet::new();
    for stderr in children.iter_mut().filter_map(|c| c.stderr.take()) {
        errors.spawn(tell_errors(stderr, outlet.events.clone()));
    }
    if let Some(stdout) = children.last_mut().and_then(|c| c.stdout.take()) {
        tell_output(stdout, counts.as_deref(), &mut outlet).await;
    }
    while errors.join_next().await.is_some() {}
    let mut statuses = Vec::new();
    for child in &mut children {
        statuses.push(status_of(&child.wait().await));
    }
    let _ = outlet.events.send(AggregatorEvent::Over(status::of_chain(&statuses))).await;
}

async fn tell_errors(mut stderr: ChildStderr, events: mpsc::Sender<AggregatorEvent>) {
    while let Some(data) = read_some(&mut stderr).await {
        if events.send(AggregatorEvent::Errors(data)).await.is_err() {
            return;
        }
    }
}

/// Relays until the output ends, or its reader is gone: then closes the pipe.
async fn tell_output(
    mut stdout: ChildStdout,
    counts: Option<&Mutex<Recount>>,
    outlet: &mut Outlet,
) {
    loop {
        let data = tokio::select! {
            () = outlet.closed() => return,
            data = read_some(&mut stdout) => data,
        };
        let is_end = data.is_none();
        let data = match counts {
            None => Ok(data.unwrap_or_default()),
            Some(counts) => {
                let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
                match data {
                    Some(data) => counts.merged(&data).map(Bytes::from),
                    None => Ok(counts.finish().into()),
                }
            }
        };
        let data = match data {
            Ok(data) => data,
            Err(no_part) => return tell_broken(no_part, &outlet.events).await,
        };
        if !outlet.send(data).await || is_end {
            return;
        }
    }
}

async fn read_some(from: &mut (impl AsyncRead + Unpin)) -> Option<Bytes> {
    let mut buffer = Vec::with_capacity(READ_BYTES);
    // An error of a pipe is its end.
    match from.read_buf(&mut buffer).await {
        Ok(1..) => Some(Bytes::from(buffer)),
        Ok(0) | Err(_) => None,
    }
}

/// Runs posh's own code in place of commands.
async fn run_own(mut own: OwnAggregator, parts: Vec<Arc<PartBuffer>>, outlet: Outlet) {
    for (part, incoming) in parts.into_iter().enumerate() {
        while let Some(data) = incoming.next().await {
            let out = match own.push(&data) {
                Ok(out) => out,
                Err(no_part) => return tell_broken(no_part, &outlet.events).await,
            };
            let fed =
                outlet.events.send(AggregatorEvent::Fed(part, data.len() as u64)).await.is_ok();
            if !fed || !outlet.send(out.into()).await {
                let _ = outlet
                    .events
                    .send(AggregatorEvent::Over(Status::Signal(Signal::SIGPIPE as u32)))
                    .await;
                return;
            }
        }
    }
    let is_read = outlet.send(own.finish().into()).await;
    let status = if is_read { Status::Code(0) } else { Status::Signal(Signal::SIGPIPE as u32) };
    let _ = outlet.events.send(AggregatorEvent::Over(status)).await;
}

/// Reports that the parts can't be joined, which ends the aggregator.
async fn tell_broken(no_part: NoPart, events: &mpsc::Sender<AggregatorEvent>) {
    let _ = events.send(AggregatorEvent::Errors(Bytes::from(format!("posh: {no_part}\n")))).await;
    let _ = events.send(AggregatorEvent::Over(Status::Code(BROKEN))).await;
}

/// Output channel with the reader's credit.
struct Outlet {
    window: Arc<watch::Sender<Window>>,
    events: mpsc::Sender<AggregatorEvent>,
}

impl Outlet {
    /// Sends bytes within the credit; returns false when the reader is gone.
    async fn send(&self, mut data: Bytes) -> bool {
        let mut window = self.window.subscribe();
        while !data.is_empty() {
            let ready =
                window.wait_for(|window| window.is_closed || window.allowed_bytes > 0).await;
            let Some(allowed) = ready.ok().filter(|w| !w.is_closed).map(|w| w.allowed_bytes) else {
                return false;
            };
            let piece =
                data.split_to(usize::try_from(allowed).unwrap_or(usize::MAX).min(data.len()));
            self.window.send_modify(|window| window.allowed_bytes -= piece.len() as u64);
            if self.events.send(AggregatorEvent::Output(piece)).await.is_err() {
                return false;
            }
        }
        true
    }

    async fn closed(&self) {
        // We hold the sender, so it can't be dropped.
        let _ = self.window.subscribe().wait_for(|window| window.is_closed).await;
    }
}

fn status_of(result: &io::Result<ExitStatus>) -> Status {
    match result {
        Ok(status) => match status.signal() {
            Some(signal) => Status::Signal(signal.cast_unsigned()),
            None => Status::Code(status.code().unwrap_or(1).cast_unsigned()),
        },
        Err(_) => Status::Code(1),
    }
}
