//! The stage program: looks, asks the gateway, then becomes the real command, or relays for it
//! while it runs remotely.
//!
//! Only `entry` depends on the way of interception (symlink on PATH, exec hook). Everything up to
//! `enlist` is on the path of every local command, so it makes few system calls and starts no
//! runtime.

mod again;
mod descriptors;
mod enlist;
mod entry;
mod process;
mod relay;
mod sink;
mod times;
mod wire;

use std::ffi::OsString;

use entry::ShellCommand;
use posh_proto::stage::{Remote, ToStage, to_stage};
use times::{Noted, StartTime};
use wire::GatewayLink;

/// Exit status when posh itself failed after it had given up the right to run the command locally
/// (as env(1), nohup(1) and timeout(1) use 125).
pub const EXIT_POSH_FAILED: i32 = 125;

/// Runs the stage to its end; returns its exit status. Usually it does not return: it becomes the
/// real command, or dies by the signal that ended the remote one. The words are those of the
/// command line.
#[must_use]
pub fn run(words: Vec<OsString>) -> i32 {
    let start = StartTime::now();
    let for_shell = entry::is_for_shell(&words).then(|| words.clone());
    let entry = match ShellCommand::find(words) {
        Ok(entry) => entry,
        // Words for a shell make `find` fail.
        Err(e) => {
            let status = for_shell.and_then(|words| entry::become_shell(&words));
            return status.unwrap_or_else(|| process::complain(EXIT_POSH_FAILED, &e.to_string()));
        }
    };
    let Some(session) = &entry.session else { return entry.run_here() };
    let Some(enlist) = enlist::worth_asking(&entry, session) else { return entry.run_here() };
    if descriptors::are_scarce() {
        return entry.run_here();
    }
    // ps(1) and pkill(1) must find the command's name.
    process::rename(&entry.name);
    let Ok(mut link) = GatewayLink::connect(&session.socket) else { return entry.run_here() };
    let mut noted = Noted::since(start, session.trace);
    match ask(&mut link, enlist, &mut noted) {
        Some(remote) => relay::stand_in(link, &remote, &entry, noted),
        None => entry.run_here(),
    }
}

/// Enlists and waits for the directive; `None` means to run the command locally, as does any fault
/// before the acknowledgement.
fn ask(
    link: &mut GatewayLink,
    mut enlist: posh_proto::stage::Enlist,
    noted: &mut Noted,
) -> Option<Remote> {
    noted.enlisted();
    enlist.times = noted.so_far();
    link.send_enlist(enlist).ok()?;
    let directive = link.receive_directive().ok()?;
    noted.directed();
    match directive {
        ToStage { kind: Some(to_stage::Kind::Remote(remote)) } => {
            link.acknowledge().ok().map(|()| remote)
        }
        _ => None,
    }
}
