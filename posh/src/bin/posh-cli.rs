//! The program that `posh` executes for all but plain lines (`posh`, `posh -c CMD`, `posh
//! ./SCRIPT`): parses options, answers questions, and starts shells that are reported on
//! afterwards.
//!
//! There is no Rust `main`, for the reasons that `main.rs` gives.
#![no_main]
#![allow(
    unsafe_code,
    reason = "exporting the C `main` needs an unsafe attribute; there is no unsafe block"
)]

use std::{
    env,
    ffi::{c_char, c_int},
    io::{self, Write},
};

use nix::sys::signal::{SigSet, Signal, raise};
use posh::{
    Error,
    cli::{
        self, Annotations, GatewayCommand, Question, Request, VolumeAction, allow, annotations,
        attach, doctor, enroll, tables, volumes,
    },
    descriptors,
    ending::{FAILED, OK, USAGE, complain},
    gateway::{self, GatewayTarget},
    plan_only,
    watch::{self, ShellEnd},
};
use posh_proto::untrusted::escaped_lines;

/// Offset of a signal's number in bash's exit status for a killed command.
const SIGNAL_BASE: c_int = 128;

/// Called by the C library, whose static start-up code has handed the arguments
/// to `std::env` by then.
#[unsafe(no_mangle)]
extern "C" fn main(_argc: c_int, _argv: *const *const c_char) -> c_int {
    descriptors::fill_standard();
    match cli::parse(env::args_os()) {
        Err(message) => usage(&message),
        Ok(Request::Launch(launch)) => match watch::run(&launch, &mut io::stderr()) {
            Ok(ShellEnd::Code(code)) => code,
            Ok(ShellEnd::Signal(signal)) => die_by(signal),
            Err(error) => complain(&error),
        },
        Ok(Request::Ask(target, question)) => {
            if !matches!(question, Question::Allow { .. } | Question::Deny { .. }) {
                gateway::say_passed_over(&target);
            }
            answer(&target, question)
        }
    }
}

/// Prints the answer; returns the exit status.
fn answer(target: &GatewayTarget, question: Question) -> c_int {
    match question {
        Question::Mounts { json } => print(tables::mounts(target, json)),
        Question::Resolve { path, json } => print(tables::resolve(target, &path, json)),
        Question::Status { json } => print(tables::status(target, json)),
        Question::Explain { pipeline, json, split } => {
            print(plan_only::explain(target, &pipeline, json, split))
        }
        Question::Mount { source, dir, read_only, cache_size, sync, hard } => {
            let options = volumes::MountOptions { read_only, cache_size, sync, hard };
            print(volumes::mount(target, &source, &dir, &options))
        }
        Question::Umount { dir } => print(volumes::unmount(target, &dir)),
        Question::Volumes { action: Some(VolumeAction::Recover { mount, to }), .. } => {
            print(volumes::recover(target, &mount, &to))
        }
        Question::Volumes { json, action: None } => print(volumes::list(target, json)),
        Question::Attach { host, yes } => {
            let consent = if yes { attach::Consent::Given } else { attach::Consent::Ask };
            print(attach::attach(target, &host, consent))
        }
        Question::Enroll { address, token } => print(enroll::enroll(&address, &token)),
        Question::Allow { file } => print(allow::allow(&file)),
        Question::Deny { file } => print(allow::deny(&file)),
        Question::Doctor => print_checked(Ok(doctor::examine(target))),
        Question::Annotations(Annotations::Check { dir }) => {
            print_checked(annotations::check(target, dir.as_deref()))
        }
        Question::Annotations(Annotations::Explain { command }) => {
            print(annotations::explain(target, &command))
        }
        Question::Annotations(Annotations::Coverage { commands }) => {
            print(annotations::coverage(target, &commands))
        }
        Question::Annotations(Annotations::Verify { file, in_copy_of, command }) => print_checked(
            annotations::verify(target, file.as_deref(), in_copy_of.as_deref(), &command),
        ),
        Question::Gateway(GatewayCommand::Start) => print(
            gateway::require(target)
                .and_then(|place| gateway::start(&place))
                .map(|()| String::new()),
        ),
        Question::Gateway(GatewayCommand::Stop) => print(gateway::stop(target)),
        Question::Completions { shell } => print(Ok(cli::completions(shell))),
    }
}

/// Prints an answer.
fn print(answer: Result<String, Error>) -> c_int {
    print_checked(answer.map(|text| (text, true)))
}

/// Prints an answer with its verdict.
fn print_checked(answer: Result<(String, bool), Error>) -> c_int {
    let written = answer.and_then(|(text, good)| {
        let mut stdout = io::stdout();
        // The text may have file names and server messages; JSON documents are escaped already.
        stdout
            .write_all(escaped_lines(&text).as_bytes())
            .and_then(|()| stdout.flush())
            .map_err(Error::Output)?;
        Ok(good)
    });
    match written {
        Ok(true) => OK,
        Ok(false) => FAILED,
        Err(error) => complain(&error),
    }
}

fn usage(message: &clap::Error) -> c_int {
    let _ = message.print();
    let _ = io::stdout().flush();
    if message.use_stderr() { USAGE } else { OK }
}

/// Kills this process by the shell's signal, so that the parent sees the same status.
fn die_by(signal: Signal) -> c_int {
    // The shell has already dumped core, if at all.
    let _ = nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_CORE, 0, 0);
    let _ = SigSet::from(signal).thread_unblock();
    let _ = raise(signal);
    SIGNAL_BASE + signal as c_int
}
