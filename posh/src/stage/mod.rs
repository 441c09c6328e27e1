//! The stage program's story: look, ask, then either become the real command or
//! stand in for it while it runs elsewhere.
//!
//! It must not care how it was entered (symlink on PATH, exec hook):
//! `entry` alone knows that. Everything up to `enlist` is on the path of
//! every local command, so it makes few system calls and starts no runtime.

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

use entry::Entry;
use posh_proto::stage::{Remote, ToStage, to_stage};
use times::{Noted, Start};
use wire::Link;

/// Exit status when posh itself failed after it had given up the right to run
/// the command here (as env(1), nohup(1) and timeout(1) use 125).
pub const EXIT_POSH_FAILED: i32 = 125;

/// Runs the stage to its end and gives its exit status. Usually it does not
/// return: it becomes the real command, or ends by the signal that ended the
/// remote one. It takes the words of the command line, as the shell gave them.
#[must_use]
pub fn run(words: Vec<OsString>) -> i32 {
    let start = Start::now();
    let for_shell = entry::is_for_shell(&words).then(|| words.clone());
    let entry = match Entry::find(words) {
        Ok(entry) => entry,
        // A command with such words has been found by now.
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
    // ps(1) and pkill(1) are to find the command, not what stands in for it.
    process::rename(&entry.name);
    let Ok(mut link) = Link::connect(&session.socket) else { return entry.run_here() };
    let mut noted = Noted::since(start, session.trace);
    match ask(&mut link, enlist, &mut noted) {
        Some(remote) => relay::stand_in(link, &remote, &entry, noted),
        None => entry.run_here(),
    }
}

/// Enlists and waits for the directive; `None` means to run the command here,
/// which is also what any fault before the acknowledgement means.
fn ask(
    link: &mut Link,
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
