//! What a session's mounts are told while its shell goes on. After some commands a shell does nothing before it executes the next
//! one, by its whole text (`posh::plan_only::followed`): nobody looks at what the mount shows in between but that one, which waits if it runs here. So
//! its shell hears of the end at once, and the round trips in which the mount is told are those of the next command as well.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use fs_mapper::{MountTable, Resolution};
use posh_proto::gateway::FollowedCommand;
use tokio::sync::watch;

use super::head_start::Stat;
use crate::{
    enlisted::Enlisted,
    facts::{Place, Reading},
    session::{Session, Sessions},
    state::Gateway,
};

/// What of a session is still to be told.
#[derive(Debug, Default)]
pub struct Untold {
    /// All programs that its shell may execute; empty if that is not known.
    followed: OnceLock<Vec<FollowedCommand>>,
    count: watch::Sender<Count>,
    /// Directories whose listings mounts are made to forget, and of which command: that changes these directories on the server.
    forgotten: Mutex<Vec<(u64, BTreeSet<PathBuf>)>>,
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

    fn forgotten(&self) -> MutexGuard<'_, Vec<(u64, BTreeSet<PathBuf>)>> {
        self.forgotten.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the mounts have been told all.
    pub async fn wait(&self) {
        let _ = self.count.subscribe().wait_for(|count| count.done == count.begun).await;
    }
}

impl Untold {
    /// Waits until no mount is told anything that a command would see which runs on the server: a directory whose listing is
    /// forgotten gets another time of change there.
    pub async fn wait_for_what_is_seen(&self, reading: &Reading) {
        let seen = |directory: &PathBuf| {
            let places = reading.places.iter().chain([&reading.cwd]).flatten();
            !reading.invocation.searches_up.is_empty()
                || places.filter_map(Place::path).any(|path| directory.starts_with(path))
        };
        let last = {
            let forgotten = self.forgotten();
            forgotten.iter().filter(|(_, directories)| directories.iter().any(seen)).map(|(number, _)| *number).max()
        };
        if let Some(last) = last {
            let _ = self.count.subscribe().wait_for(|count| count.done > last).await;
        }
    }
}

/// Whether the shell will go on after a command, should that end well.
pub fn goes_on(gateway: &Gateway, session: &Session, stage: &Enlisted) -> bool {
    let may_go_on = || {
        let followed = session.untold.followed.get()?;
        let mut candidates = followed.iter().filter(|command| may_be(command, &stage.argv)).peekable();
        candidates.peek()?;
        let asks = |command: &FollowedCommand| {
            !command.next.is_empty()
                && command.next.iter().all(|name| gateway.commands.contains(name) && session.has_shim(name))
        };
        // What a volume has at hand does not ask.
        Some(!gateway.volumes.are_there() && candidates.all(asks) && is_of_the_shell(stage, session))
    };
    may_go_on() == Some(true)
}

/// Lets a shell go on after a command that has ended well, if it is known to do nothing but to execute another one, which asks.
///
/// `forgotten` are the directories whose listings a mount is made to forget.
pub fn begin(
    gateway: &Gateway,
    session: &Arc<Session>,
    stage: &Enlisted,
    forgotten: BTreeSet<PathBuf>,
) -> Option<Turn> {
    if !goes_on(gateway, session, stage) {
        return None;
    }
    let mut number = 0;
    session.untold.count.send_modify(|count| {
        number = count.begun;
        count.begun += 1;
    });
    if !forgotten.is_empty() {
        session.untold.forgotten().push((number, forgotten));
    }
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
        self.session.untold.forgotten().retain(|(number, _)| *number != self.number);
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
