//! Relays for a command that runs remotely: reads its input on demand, writes its output to the
//! shell's descriptors, forwards signals, and ends as the remote command ended. One poll(2) loop.

use std::{
    collections::BTreeSet,
    io,
    os::{
        fd::{AsFd, RawFd},
        unix::ffi::OsStrExt as _,
    },
};

use bytes::BytesMut;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, SigmaskHow, Signal, raise, sigprocmask},
        signalfd::{SfdFlags, SignalFd},
    },
    unistd::{Whence, lseek},
};
use posh_proto::rule::{self, Rule};
use posh_proto::stage::{
    self as wire, Credit, Data, Exit, Remote, Signal as SignalMessage, WriteFailed, exit,
    to_gateway, to_stage,
};

use super::{
    EXIT_POSH_FAILED,
    again::{Again, ChildEvent, Differs},
    descriptors,
    enlist::terminal_size,
    entry::ShellCommand,
    process,
    sink::Sink,
    times::Noted,
    wire::GatewayLink,
};

/// Bytes per read of an input.
const READ_BYTES: usize = 256 << 10;
/// Limit of bytes queued for the gateway, above which no input is read.
const OUTGOING_BYTES: usize = 1 << 20;
/// `si_code` of a signal from the kernel itself, such as a terminal's Ctrl-C (sigaction(2)).
const SI_KERNEL: i32 = 0x80;

/// Signals that are forwarded. SIGPIPE is blocked, so that a write returns EPIPE; the others are
/// left alone.
const FORWARDED: [Signal; 10] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGALRM,
    Signal::SIGTSTP,
    Signal::SIGCONT,
    Signal::SIGWINCH,
];

/// Forwarded signals by which a user or a shell ends a command.
const ENDING: [Signal; 4] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];

/// An input that the remote command may read.
struct RelaySource {
    fd: RawFd,
    credit: u64,
    ended: bool,
}

struct Relay<'a> {
    link: GatewayLink,
    sources: Vec<RelaySource>,
    sinks: Vec<Sink>,
    signals: SignalFd,
    entry: &'a ShellCommand,
    mask_before: SigSet,
    exit: Option<Exit>,
    run_here: bool,
    again: Option<Again>,
    asked_to_end: Option<Signal>,
    /// Signals that were read, except window size changes and stops.
    taken: BTreeSet<Signal>,
    told_of_broken_pipe: bool,
    noted: Noted,
}

/// Relays until the remote command has ended and all its output is written, then ends in the same
/// way.
pub fn stand_in(link: GatewayLink, remote: &Remote, entry: &ShellCommand, noted: Noted) -> i32 {
    let mut mask_before = SigSet::empty();
    let mut held: SigSet = FORWARDED.into_iter().filter(|s| !process::ignores(*s)).collect();
    let signals = SignalFd::with_flags(&held, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC);
    held.add(Signal::SIGPIPE);
    // SIGTTOU is not blocked: a terminal stops this process for background output as it would the
    // command.
    let masked = sigprocmask(SigmaskHow::SIG_BLOCK, Some(&held), Some(&mut mask_before));
    let (Ok(signals), Ok(())) = (signals, masked) else {
        return process::complain(
            EXIT_POSH_FAILED,
            "no descriptor is left for signals; raise `ulimit -n`",
        );
    };
    let sources = remote
        .reads
        .iter()
        .map(|&fd| RelaySource { fd: fd.cast_signed(), credit: 0, ended: false })
        .collect();
    let sinks = remote
        .writes
        .iter()
        .filter_map(|&fd| descriptors::one(fd.cast_signed()))
        .map(|d| Sink::new(&d));
    let sinks = sinks.collect();
    Relay {
        link,
        sources,
        sinks,
        signals,
        entry,
        mask_before,
        exit: None,
        run_here: false,
        again: None,
        asked_to_end: None,
        taken: BTreeSet::new(),
        told_of_broken_pipe: false,
        noted,
    }
    .run()
}

impl Relay<'_> {
    fn run(mut self) -> i32 {
        loop {
            if self.run_here {
                // No command got the forwarded signals: they are raised in this process again.
                for signal in &self.taken {
                    let _ = raise(*signal);
                }
                let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&self.mask_before), None);
                return self.entry.run_here();
            }
            if let Some(exit) = self.exit.take_if(|_| self.sinks.iter().all(Sink::is_idle)) {
                self.sinks.iter_mut().for_each(Sink::hear_late_errors);
                self.tell_times();
                return self.finish(&exit);
            }
            if self.link.is_closed() && self.exit.is_none() && self.again.is_none() {
                return self.lost();
            }
            if let Err(e) = self.step() {
                return process::complain(
                    EXIT_POSH_FAILED,
                    &format!("{}: relay: {e}", self.entry.name.display()),
                );
            }
        }
    }

    /// Waits for events, and handles them.
    fn step(&mut self) -> io::Result<()> {
        let ready = self.wait()?;
        if ready.signal {
            self.pass_signals()?;
        }
        for (index, flags) in ready.sinks {
            self.write(index, flags);
        }
        for index in ready.sources {
            self.read(index);
        }
        if ready.link_in && !self.link.is_closed() {
            self.link.fill()?;
            while let Some(message) = self.link.next()? {
                if let Some(kind) = message.kind {
                    self.handle(kind);
                }
            }
        }
        self.go_on_again(&ready.again);
        if self.again.is_none() {
            self.tell_of_broken_pipes();
        }
        self.link.flush();
        Ok(())
    }

    /// Reports SIGPIPE for bytes whose reader is gone: a local command would have received it at
    /// that write, and the remote one may never write again.
    fn tell_of_broken_pipes(&mut self) {
        let broken = rule::holds(Rule::Streaming)
            && self.sinks.iter().any(|s| s.undelivered() == Some(Errno::EPIPE));
        if broken && !self.told_of_broken_pipe {
            self.told_of_broken_pipe = true;
            self.queue_signal(Signal::SIGPIPE as u32, false);
        }
    }

    fn wait(&self) -> io::Result<Ready> {
        let mut fds = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        let mut link = PollFlags::empty();
        link.set(PollFlags::POLLIN, !self.link.is_closed());
        link.set(PollFlags::POLLOUT, self.link.queued_bytes() > 0);
        // A closed link would be reported by every poll; while the command is repeated locally, it
        // is not needed.
        let fd = if self.link.is_closed() { self.signals.as_fd() } else { self.link.as_fd() };
        fds.push(PollFd::new(fd, link));
        let open = self.link.queued_bytes() < OUTGOING_BYTES && self.exit.is_none();
        let sources: Vec<usize> = (0..self.sources.len())
            .filter(|&i| open && !self.sources[i].ended && self.sources[i].credit > 0)
            .collect();
        fds.extend(
            sources
                .iter()
                .map(|&i| PollFd::new(descriptors::borrow(self.sources[i].fd), PollFlags::POLLIN)),
        );
        let watch = rule::holds(Rule::Streaming);
        // poll(2) always reports POLLERR: it shows that the reader is gone even when there is
        // nothing to write.
        let sinks: Vec<usize> = (0..self.sinks.len())
            .filter(|&i| watch && self.sinks[i].is_watched() || !self.sinks[i].is_idle())
            .collect();
        for &i in &sinks {
            let wanted =
                if self.sinks[i].is_idle() { PollFlags::empty() } else { PollFlags::POLLOUT };
            fds.push(PollFd::new(self.sinks[i].borrow(), wanted));
        }
        let again = self
            .again
            .as_ref()
            .map(|again| again.awaited(|fd| self.takes_more(fd)))
            .unwrap_or_default();
        fds.extend(again.iter().map(|(_, fd)| PollFd::new(*fd, PollFlags::POLLIN)));
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
        let flags: Vec<PollFlags> =
            fds.iter().map(|fd| fd.revents().unwrap_or(PollFlags::empty())).collect();
        let (fixed, rest) = flags.split_at(2);
        let (source_flags, rest) = rest.split_at(sources.len());
        let (sink_flags, again_flags) = rest.split_at(sinks.len());
        let again = again
            .iter()
            .zip(again_flags)
            .filter(|(_, flags)| !flags.is_empty())
            .map(|((part, _), _)| *part);
        Ok(Ready {
            again: again.collect(),
            signal: !fixed[0].is_empty(),
            link_in: fixed[1]
                .intersects(PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR),
            sources: sources
                .into_iter()
                .zip(source_flags)
                .filter(|(_, f)| !f.is_empty())
                .map(|(i, _)| i)
                .collect(),
            sinks: sinks
                .into_iter()
                .zip(sink_flags.iter().copied())
                .filter(|(_, f)| !f.is_empty())
                .collect(),
        })
    }

    fn handle(&mut self, kind: to_stage::Kind) {
        match kind {
            to_stage::Kind::RunHere(_) => self.run_here = true,
            to_stage::Kind::Data(Data { fd, data }) => {
                if let Some(index) = self.sinks.iter().position(|s| s.fd == fd.cast_signed()) {
                    self.sinks[index].push(data);
                    self.write(index, PollFlags::empty());
                }
            }
            to_stage::Kind::Credit(Credit { fd, bytes }) => {
                if let Some(source) = self.sources.iter_mut().find(|s| s.fd == fd.cast_signed()) {
                    source.credit = source.credit.saturating_add(bytes);
                }
            }
            to_stage::Kind::StopReading(fd) => {
                self.sources
                    .iter_mut()
                    .filter(|s| s.fd == fd.cast_signed())
                    .for_each(|s| s.ended = true);
            }
            to_stage::Kind::Exit(exit) => {
                self.sinks.iter_mut().for_each(Sink::end);
                self.exit = Some(exit);
            }
            to_stage::Kind::Again(again) => self.run_again(&again),
            // These answer other requests.
            to_stage::Kind::Remote(_)
            | to_stage::Kind::SessionOpened(_)
            | to_stage::Kind::SessionRefused(_) => {}
        }
    }

    /// Repeats the command locally: by exec if nothing was delivered, else in a child.
    fn run_again(&mut self, order: &wire::Again) {
        self.sources.iter_mut().for_each(|source| source.ended = true);
        if order.delivered.is_empty() {
            self.run_here = true;
            return;
        }
        let (entry, mask) = (self.entry, self.mask_before);
        let started = Again::start(&order.delivered, || {
            let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&mask), None);
            entry.run_here()
        });
        match started {
            Ok(again) => {
                self.taken.iter().for_each(|signal| again.signal(*signal));
                self.again = Some(again);
            }
            Err(error) => {
                self.fail(format!("{}; it can't be run again here: {error}", order.reason))
            }
        }
    }

    /// Ends with an error of posh, once all output is written.
    fn fail(&mut self, message: String) {
        self.again.take().into_iter().for_each(|mut again| again.abandon());
        self.sinks.iter_mut().for_each(Sink::end);
        let message = format!("posh: {}: {message}", self.entry.name.display());
        let how = Some(exit::How::Code(EXIT_POSH_FAILED.cast_unsigned()));
        self.exit = Some(Exit { how, message, ..Exit::default() });
    }

    /// Returns true if the descriptor's sinks are idle: a sink queues little more than its current
    /// write.
    fn takes_more(&self, fd: RawFd) -> bool {
        self.sinks.iter().all(|sink| sink.fd != fd || sink.is_idle())
    }

    fn go_on_again(&mut self, ready: &[ChildEvent]) {
        let Some(mut again) = self.again.take() else { return };
        for part in ready {
            match part {
                ChildEvent::End => again.reap(),
                ChildEvent::Output(index) => match again.read(*index) {
                    Ok((fd, data)) => self.take_again(fd, data),
                    Err(Differs) => {
                        self.again = Some(again);
                        let why = "the machine that ran it was lost, and run again it writes \
                                   something else";
                        return self.fail(format!("{why}; its output is incomplete"));
                    }
                },
            }
        }
        self.sinks.iter().filter(|sink| sink.has_failed()).for_each(|sink| again.close(sink.fd));
        self.exit = again.end();
        if self.exit.is_none() {
            self.again = Some(again);
        } else {
            self.sinks.iter_mut().for_each(Sink::end);
        }
    }

    fn take_again(&mut self, fd: RawFd, data: Option<bytes::Bytes>) {
        let Some(index) = self.sinks.iter().position(|sink| sink.fd == fd) else { return };
        match data {
            Some(data) => {
                self.sinks[index].push(data);
                self.write(index, PollFlags::empty());
            }
            None => self.sinks[index].end(),
        }
    }

    /// Writes as much as a descriptor takes. New data is written at once, without a poll, where
    /// that can't block.
    fn write(&mut self, index: usize, flags: PollFlags) {
        let sink = &mut self.sinks[index];
        let fd = sink.fd.cast_unsigned();
        if flags.intersects(PollFlags::POLLERR | PollFlags::POLLNVAL) && sink.is_watched() {
            sink.fail(Errno::EPIPE);
            self.link.queue(to_gateway::Kind::WriteFailed(WriteFailed {
                fd,
                errno: Errno::EPIPE as u32,
            }));
            return;
        }
        match sink.write(flags.contains(PollFlags::POLLOUT)) {
            Ok(0) => {}
            Ok(n) => {
                self.noted.wrote();
                if let Some(bytes) = sink.credit_for(n) {
                    self.link.queue(to_gateway::Kind::Credit(Credit { fd, bytes }));
                }
            }
            Err(e) => {
                self.link.queue(to_gateway::Kind::WriteFailed(WriteFailed { fd, errno: e as u32 }))
            }
        }
    }

    fn read(&mut self, index: usize) {
        let source = &mut self.sources[index];
        let fd = source.fd.cast_unsigned();
        let wanted = usize::try_from(source.credit).unwrap_or(READ_BYTES).min(READ_BYTES);
        let mut buffer = BytesMut::with_capacity(wanted);
        match process::read_into(descriptors::borrow(source.fd), &mut buffer, wanted) {
            Ok(n) if n > 0 => {
                source.credit -= n as u64;
                self.link.queue(to_gateway::Kind::Data(Data { fd, data: buffer.freeze() }));
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            Ok(_) | Err(_) => {
                source.ended = true;
                self.link.queue(to_gateway::Kind::End(fd));
            }
        }
    }

    fn pass_signals(&mut self) -> io::Result<()> {
        while let Some(info) = self.signals.read_signal()? {
            let number = info.ssi_signo;
            let from_terminal = info.ssi_code == SI_KERNEL;
            let signal = Signal::try_from(number.cast_signed()).ok();
            self.taken.extend(
                signal.filter(|signal| ![Signal::SIGWINCH, Signal::SIGTSTP].contains(signal)),
            );
            match Signal::try_from(number.cast_signed()) {
                Ok(signal) if self.again.is_some() => self.pass_again(signal, from_terminal),
                Ok(Signal::SIGWINCH) => self.pass_window_size(),
                Ok(Signal::SIGTSTP) => self.stop(),
                Ok(signal) if ENDING.contains(&signal) => self.end_by(signal, from_terminal),
                _ => self.queue_signal(number, from_terminal),
            }
        }
        Ok(())
    }

    /// Signals the child, except from the terminal: it signals the whole group, which includes the
    /// child.
    fn pass_again(&mut self, signal: Signal, from_terminal: bool) {
        self.again.iter().filter(|_| !from_terminal).for_each(|again| again.signal(signal));
        if signal == Signal::SIGTSTP {
            self.stop();
        }
    }

    /// Forwards a signal that ends commands. At the second one this process does not wait for the
    /// remote command any more: the executor may be out of reach.
    fn end_by(&mut self, signal: Signal, from_terminal: bool) {
        self.queue_signal(signal as u32, from_terminal);
        if self.asked_to_end.replace(signal) == Some(signal) {
            self.link.flush();
            let status = process::die_by(signal as i32);
            self.exit = Some(Exit {
                how: Some(exit::How::Code(status.cast_unsigned())),
                ..Exit::default()
            });
        }
    }

    fn queue_signal(&mut self, signal: u32, group: bool) {
        self.link.queue(to_gateway::Kind::Signal(SignalMessage { signal, group }));
    }

    fn pass_window_size(&mut self) {
        if let Some(size) = self.sinks.iter().find_map(|s| terminal_size(s.fd)) {
            self.link.queue(to_gateway::Kind::WindowSize(size));
        }
    }

    /// Handles Ctrl-Z: stops the remote command (by SIGSTOP, since SIGTSTP has no effect in its
    /// orphaned process group), then this process, as the shell expects; SIGCONT continues both.
    fn stop(&mut self) {
        self.queue_signal(Signal::SIGSTOP as u32, true);
        self.link.flush();
        let mut only = SigSet::empty();
        only.add(Signal::SIGTSTP);
        let _ = nix::sys::signal::raise(Signal::SIGTSTP);
        let _ = only.thread_unblock();
        // Blocks until SIGCONT.
        let _ = only.thread_block();
        self.queue_signal(Signal::SIGCONT as u32, true);
    }

    /// Sends the times, as the last message of a traced session.
    fn tell_times(&mut self) {
        self.noted.ended();
        if let Some(times) = self.noted.so_far() {
            self.link.queue(to_gateway::Kind::Times(times));
            self.link.flush();
        }
    }

    /// Ends as the remote command ended, after moving the shared files' offsets.
    fn finish(&self, exit: &Exit) -> i32 {
        for seek in &exit.seeks {
            let offset = i64::try_from(seek.offset).unwrap_or(i64::MAX);
            let _ = lseek(descriptors::borrow(seek.fd.cast_signed()), offset, Whence::SeekSet);
        }
        if !exit.message.is_empty() {
            process::say(&exit.message);
        }
        let output = self.sinks.iter().find(|s| s.fd == 1);
        let undelivered = output.and_then(Sink::undelivered);
        if let Some(signal) = self.asked_to_end.filter(|_| ended_beside_the_signal(exit)) {
            return process::die_by(signal as i32);
        }
        match (exit.how, undelivered) {
            // The command ended by itself before it was told that its reader had left. A local pipe
            // takes only so much: if the command wrote more, one of its writes would have waited
            // for the reader, and failed when that left. If not, its own end counts.
            (Some(exit::How::Code(code)), Some(Errno::EPIPE))
                if !output.is_some_and(Sink::had_room) =>
            {
                self.end_at_closed_pipe(code.cast_signed())
            }
            (Some(_), Some(errno)) if errno != Errno::EPIPE => self.end_at_write_error(errno),
            (Some(exit::How::Code(code)), _) => code.cast_signed(),
            (Some(exit::How::Signal(signal)), _) => process::die_by(signal.cast_signed()),
            (None, _) => EXIT_POSH_FAILED,
        }
    }

    /// `code` is the command's own exit status.
    fn end_at_closed_pipe(&self, code: i32) -> i32 {
        match (process::ignores(Signal::SIGPIPE), code) {
            (false, _) => process::die_by(Signal::SIGPIPE as i32),
            (true, 0) => self.end_at_write_error(Errno::EPIPE),
            (true, _) => code,
        }
    }

    /// Reports the error in the words of most of the GNU tools; returns the status of the command.
    fn end_at_write_error(&self, errno: Errno) -> i32 {
        let status = status_of_write_error(self.entry.name.as_bytes());
        if status != 0 {
            process::say(&format!("{}: write error: {}", self.entry.name.display(), errno.desc()));
        }
        status
    }

    /// Reports that the gateway is gone after this process gave up the right to run the command:
    /// nobody knows if it ran.
    fn lost(&self) -> i32 {
        let name = self.entry.name.display();
        process::complain(
            EXIT_POSH_FAILED,
            &format!(
                "{name}: the gateway ended while this command ran on another machine; its output \
                 may be incomplete"
            ),
        )
    }
}

struct Ready {
    again: Vec<ChildEvent>,
    signal: bool,
    link_in: bool,
    sources: Vec<usize>,
    sinks: Vec<(usize, PollFlags)>,
}

/// Status with which a command ends that can't write what it prints.
const fn status_of_write_error(name: &[u8]) -> i32 {
    match name {
        // It looks at no error.
        b"strings" | b"identify" => 0,
        b"awk" | b"gawk" | b"mawk" | b"nawk" | b"original-awk" => 2,
        b"cmp" | b"diff" | b"jq" | b"ls" | b"sort" | b"tar" => 2,
        b"grep" | b"egrep" | b"fgrep" | b"zgrep" | b"zegrep" | b"zfgrep" => 2,
        b"sed" => 4,
        b"git" => 128,
        _ => 1,
    }
}

/// Returns true if a neighbour may have received the signal before the command did: the command
/// then ended by itself, or by a closed reader. To the shell, the signal came while it was running.
fn ended_beside_the_signal(exit: &Exit) -> bool {
    match exit.how {
        Some(exit::How::Code(_)) => true,
        Some(exit::How::Signal(signal)) => signal.cast_signed() == Signal::SIGPIPE as i32,
        None => false,
    }
}
