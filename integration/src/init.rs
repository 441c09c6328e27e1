//! Process 1 of a laboratory host: mounts the host's own /proc, reaps orphans, and ends when its
//! standard input does. The kernel then kills everything in the host's process namespace, so a host
//! never outlives its owner, even after SIGKILL.

use std::io::{Read, Write};

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::error::{AttemptExt, Result};

/// Runs as process 1 until standard input ends. Prints `ready` when /proc is in place.
pub fn run() -> Result<()> {
    let mut children = SigSet::empty();
    children.add(Signal::SIGCHLD);
    children.thread_block().attempt(|| "block SIGCHLD".into())?;
    let none: Option<&str> = None;
    mount(Some("proc"), "/proc", Some("proc"), MsFlags::empty(), none)
        .attempt(|| "mount /proc".into())?;
    println!("ready");
    std::io::stdout().flush().attempt(|| "report that the host is ready".into())?;
    std::thread::spawn(end_with_stdin);
    loop {
        children.wait().attempt(|| "wait for SIGCHLD".into())?;
        reap();
    }
}

fn end_with_stdin() {
    let mut rest = Vec::new();
    // An error is an end too.
    let _ = std::io::stdin().read_to_end(&mut rest);
    std::process::exit(0);
}

fn reap() {
    loop {
        match waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return,
            Ok(_) | Err(_) => {}
        }
    }
}
