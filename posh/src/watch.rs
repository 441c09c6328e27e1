//! A shell with a report after its end: for `--explain` and `--trace` posh stays as its parent.

use std::io::Write;

use nix::{
    errno::Errno,
    spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn},
    sys::{
        signal::Signal,
        wait::{WaitStatus, waitpid},
    },
};
use posh_proto::{
    clock::monotonic_ns,
    gateway::{ReportReply, ReportRequest},
    untrusted::{escaped_json, escaped_lines},
};

use crate::{
    Error,
    gateway::Client,
    launch::{Format, Image, Launch, LaunchSession, ShellStart},
    signals::BlockedSignals,
    trace::Trace,
};

/// End of the shell, when posh has stayed as its parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShellEnd {
    /// With this exit status.
    Code(i32),
    /// Killed by this signal.
    Signal(Signal),
}

/// Starts the shell. Returns only with `--explain` or `--trace`, after the shell has ended, or when
/// the shell can't be executed. Notes for the user are written to `notes` before, one line each.
///
/// # Errors
/// [`Error::NoShell`], [`Error::Exec`], [`Error::Trace`]: nothing was run.
pub fn run(launch: &Launch, notes: &mut dyn Write) -> Result<ShellEnd, Error> {
    let mut trace = launch.trace.as_deref().map(Trace::begin).transpose()?;
    let ShellStart { image, session } = ShellStart::prepare(launch, notes)?;
    match session {
        Some(session) if launch.is_told_of() => {
            run_and_report(&image, launch.explain, trace, session, notes)
        }
        _ => {
            trace.as_mut().map_or(Ok(()), |trace| trace.write(None))?;
            match image.replace_us()? {}
        }
    }
}

/// Runs the shell as a child in this process group. Signals of the terminal are for the shell
/// alone, as in system(3).
fn run_and_report(
    image: &Image,
    explain: Option<Format>,
    mut trace: Option<Trace>,
    session: LaunchSession,
    notes: &mut dyn Write,
) -> Result<ShellEnd, Error> {
    let held = BlockedSignals::new(&[Signal::SIGINT, Signal::SIGQUIT])?;
    trace.iter_mut().for_each(|trace| trace.times.shell_ns = monotonic_ns());
    let ended = run_as_child(image, &held)?;
    trace.iter_mut().for_each(|trace| trace.times.ended_ns = monotonic_ns());
    // From now on Ctrl-C ends this process: a report may wait for background pipelines.
    drop(held);
    // A report that is longer than a file may be is cut off, and the status is the shell's.
    let _quiet = BlockedSignals::new(&[Signal::SIGXFSZ]);
    let times = trace.as_ref().map(|trace| trace.times);
    let request = ReportRequest { session: session.id, json: explain == Some(Format::Json), times };
    let told = match Client::connect(session.place.socket())
        .and_then(|mut client| client.report(request))
    {
        Ok(reply) => tell(&reply, explain, trace.as_mut(), notes),
        Err(error) => trace.as_mut().map_or(Ok(()), |trace| trace.write(None)).and(Err(error)),
    };
    if let Err(error) = told {
        let _ = writeln!(notes, "posh: {}", error.chain());
    }
    Ok(ended)
}

fn run_as_child(image: &Image, held: &BlockedSignals) -> Result<ShellEnd, Error> {
    let exec = |source| Error::Exec { path: image.program.clone(), source };
    let mut attributes = PosixSpawnAttr::init().map_err(exec)?;
    attributes.set_flags(PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK).map_err(exec)?;
    attributes.set_sigmask(held.mask_before()).map_err(exec)?;
    let actions = PosixSpawnFileActions::init().map_err(exec)?;
    let child = posix_spawn(&image.program, &actions, &attributes, &image.argv, &image.environment)
        .map_err(exec)?;
    loop {
        match waitpid(child, None) {
            Ok(WaitStatus::Exited(_, code)) => return Ok(ShellEnd::Code(code)),
            Ok(WaitStatus::Signaled(_, signal, _)) => return Ok(ShellEnd::Signal(signal)),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(source) => return Err(Error::System { attempt: "wait for the shell", source }),
        }
    }
}

/// Prints the report and writes the trace, as requested.
fn tell(
    reply: &ReportReply,
    explain: Option<Format>,
    trace: Option<&mut Trace>,
    notes: &mut dyn Write,
) -> Result<(), Error> {
    if explain.is_some() {
        let nothing = "posh: nothing to explain: no command that posh knows was run";
        let text = Some(reply.text.trim_end()).filter(|text| !text.is_empty()).unwrap_or(nothing);
        let text =
            if explain == Some(Format::Json) { escaped_json(text) } else { escaped_lines(text) };
        let _ = writeln!(notes, "{text}");
    }
    let Some(trace) = trace else { return Ok(()) };
    if reply.trace_dropped > 0 {
        let _ =
            writeln!(notes, "posh: the trace has no room for {} later events", reply.trace_dropped);
    }
    trace.write(Some(&reply.trace))
}
