//! What a session's mounts are told while its shell goes on. After some commands a shell does nothing before it executes the next
//! one, by its whole text (`posh::plan_only::followed`): nobody looks at what the mount shows in between but that one, which waits if it runs here. So
//! its shell hears of the end at once, and the round trips in which the mount is told are those of the next command as well.

use std::{
    ffi::OsString,
    path::Path,
    sync::{Arc, OnceLock},
};

use fs_mapper::{MountTable, Resolution};
use posh_proto::gateway::FollowedCommand;
use tokio::sync::watch;

use super::head_start::Stat;
use crate::{
    enlisted::Enlisted,
    session::{Session, Sessions},
    state::Gateway,
};

/// What of a session is still to be told.
#[derive(Debug, Default)]
pub struct Untold {
    /// All programs that its shell may execute; empty if that is not known.
    followed: OnceLock<Vec<FollowedCommand>>,
    count: watch::Sender<Count>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Count {
    begun: u64,
    done: u64,
}

/// One command of which mounts are being told. They are told in the order of the commands.
#[derive(Debug)]
pub struct Turn {
    number: u64,
    session: Arc<Session>,
    sessions: Arc<Sessions>,
}

impl Untold {
    /// The shell's text says this. `search` is its PATH.
    pub fn expect(&self, table: &MountTable, followed: Vec<FollowedCommand>, search: &Path) {
        let is_there = |directory: &Path| matches!(table.resolve(directory, Path::new("/")), Resolution::Owned(_));
        // Looking for a program, a shell looks at these.
        if !std::env::split_paths(search).any(|directory| is_there(&directory)) {
            let _ = self.followed.set(followed);
        }
    }

    /// Waits until the mounts have been told all.
    pub async fn wait(&self) {
        let _ = self.count.subscribe().wait_for(|count| count.done == count.begun).await;
    }
}

/// Lets a shell go on after a command that has ended well, if it is known to do nothing but to execute another one, which asks.
pub fn begin(gateway: &Gateway, session: &Arc<Session>, stage: &Enlisted) -> Option<Turn> {
    let followed = session.untold.followed.get()?;
    let mut candidates = followed.iter().filter(|command| may_be(command, &stage.argv)).peekable();
    candidates.peek()?;
    let asks = |command: &FollowedCommand| {
        !command.next.is_empty()
            && command.next.iter().all(|name| gateway.commands.contains(name) && session.has_shim(name))
    };
    // What a volume has at hand does not ask.
    if gateway.volumes.are_there() || !candidates.all(asks) || !is_of_the_shell(stage, session) {
        return None;
    }
    let mut number = 0;
    session.untold.count.send_modify(|count| {
        number = count.begun;
        count.begun += 1;
    });
    // Until then the next command asks, whatever it is.
    gateway.sessions.have_all_ask(session, true);
    Some(Turn { number, session: Arc::clone(session), sessions: Arc::clone(&gateway.sessions) })
}

impl Turn {
    /// Waits until the mounts have been told of the commands before.
    pub async fn comes(&self) {
        let _ = self.session.untold.count.subscribe().wait_for(|count| count.done >= self.number).await;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut is_last = false;
        self.session.untold.count.send_modify(|count| {
            count.done += 1;
            is_last = count.done == count.begun;
        });
        if is_last {
            self.sessions.have_all_ask(&self.session, false);
        }
    }
}

/// Whether a command may be that of the text, or what that becomes (`nice git add .`).
fn may_be(command: &FollowedCommand, argv: &[OsString]) -> bool {
    let is_known = |index: usize| !command.unknown.iter().any(|unknown| *unknown as usize == index);
    let before = command.words.len().checked_sub(argv.len());
    let ends_so = before.is_some_and(|before| {
        let mut pairs = (before..).zip(command.words.iter().skip(before).zip(argv));
        pairs.all(|(index, (word, own))| !is_known(index) || own.as_encoded_bytes() == &word[..])
    });
    command.is_open || ends_so
}

/// Whether the process is a child of the shell itself.
fn is_of_the_shell(stage: &Enlisted, session: &Session) -> bool {
    let of_shell = || {
        let shell = Stat::of(Stat::of(stage.pid)?.parent)?;
        Some(shell.is_shell_of(session))
    };
    of_shell() == Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_command_may_be() {
        let command = |words: &[&str], unknown: &[u32], is_open| FollowedCommand {
            words: words.iter().map(|word| word.as_bytes().to_vec().into()).collect(),
            unknown: unknown.to_vec(),
            is_open,
            next: Vec::new(),
        };
        let check = |command: FollowedCommand, argv: &[&str], expected| {
            let argv: Vec<OsString> = argv.iter().map(Into::into).collect();
            assert_eq!(may_be(&command, &argv), expected, "{command:?} {argv:?}");
        };
        check(command(&["git", "add", "."], &[], false), &["git", "add", "."], true);
        check(command(&["git", "add", "."], &[], false), &["git", "add", "x"], false);
        check(command(&["git", "add"], &[], false), &["git", "add", "."], false);
        check(command(&["git", "add", ""], &[2], false), &["git", "add", "."], true);
        check(command(&["nice", "git", "add"], &[], false), &["git", "add"], true);
        check(command(&["git", ""], &[1], false), &["sort"], true);
        check(command(&["sort"], &[], true), &["git", "add"], true);
    }
}
