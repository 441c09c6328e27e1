//! A story is what somebody does in an interactive shell. It is told by the shell
//! alone, on the mount, and by posh through each door; then they are compared, turn by turn.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::time::Duration;

use posh_integration::oracle::{Door, Under};
use posh_integration::process::wait_gone;
use posh_integration::quiet::processes_left;
use posh_integration::running::Running;
use posh_integration::terminal::TerminalSize;
use posh_integration::terminal::session::{PromptTurn, TerminalSession, TerminalSetup};
use posh_integration::{Lab, Shell};

/// What the followed file holds when a story begins.
const LOG: &str = "hay\na needle\nhay\n";
/// What a remote command may take to end after its stage has ended.
pub const PROMISE: Duration = Duration::from_secs(1);

/// By the shell alone, then by posh through each of its doors; homes have names of one length.
const TELLINGS: [(Under, Option<Door>, &str); 3] = [
    (Under::Shell, None, "/home/user/alone"),
    (Under::Posh, Some(Door::Hook), "/home/user/hook_"),
    (Under::Posh, Some(Door::Path), "/home/user/path_"),
];

/// One telling: the shell and where it runs.
pub struct Teller<'a> {
    pub lab: &'a Lab,
    pub session: TerminalSession,
    pub under: Under,
    pub home: &'static str,
    turns: Vec<PromptTurn>,
}

impl Teller<'_> {
    /// Types a line and keeps what came of it; gives the status.
    pub fn line(&mut self, text: &str) -> u32 {
        let turn =
            self.session.line(text).unwrap_or_else(|e| panic!("{:?}: {text}: {e}", self.under));
        self.keep(turn)
    }

    /// Types a line that goes on until something is pressed; it has begun when `sign` was written.
    pub fn begin(&mut self, text: &str, sign: &str) {
        self.session.begin(text, sign).unwrap_or_else(|e| panic!("{:?}: {text}: {e}", self.under));
    }

    /// Presses keys that lead to a prompt, and does not compare what comes of it: a matter of luck
    /// in any shell.
    pub fn by_luck(&mut self, keys: &str) {
        self.key(keys);
        self.turns.pop();
    }

    /// Presses keys after which no prompt is due.
    pub fn press(&mut self, keys: &str) {
        self.session.terminal().keys(keys).unwrap();
    }

    /// Appends to the followed file through the workstation's mount, whose own view of it is new
    /// then.
    pub fn append(&self, text: &str) {
        let log = self.lab.workstation.path("/mnt/s1/log");
        OpenOptions::new().append(true).open(log).unwrap().write_all(text.as_bytes()).unwrap();
    }

    /// Presses a key that leads to a prompt.
    pub fn key(&mut self, key: &str) -> u32 {
        let turn =
            self.session.key(key).unwrap_or_else(|e| panic!("{:?}: {key:?}: {e}", self.under));
        self.keep(turn)
    }

    /// Waits until `sign` was written.
    pub fn until(&mut self, sign: &str) {
        self.session.terminal().until(sign).unwrap_or_else(|e| panic!("{:?}: {e}", self.under));
    }

    fn keep(&mut self, turn: PromptTurn) -> u32 {
        let status = turn.status;
        self.turns.push(turn);
        status
    }

    /// The command as it runs on the server, by the first word of its command line. Alone, there is
    /// none.
    pub fn remote(&self, name: &str) -> Vec<Running> {
        let found = self.remote_if_joined(name);
        assert_eq!(
            found.len(),
            usize::from(self.under != Under::Shell),
            "{name} on the server: {found:?}"
        );
        found
    }

    /// The same of a command that only its pipeline leads to the server: on a machine with far more
    /// to do than processors, the gateway may give up waiting for it, and it runs here.
    pub fn remote_if_joined(&self, name: &str) -> Vec<Running> {
        let mut found = self.on_server();
        found.retain(|p| p.command_line.split(' ').next() == Some(name));
        found
    }

    fn on_server(&self) -> Vec<Running> {
        self.lab.servers[0].host.processes().unwrap()
    }

    /// These have ended, and nothing else is left on the server.
    pub fn assert_gone(&self, processes: &[Running]) {
        for process in processes {
            assert!(
                wait_gone(process.pid, PROMISE).unwrap(),
                "{:?}: {process:?} still runs",
                self.under
            );
        }
        let left = processes_left(&self.lab.servers[0].host, PROMISE).unwrap();
        assert!(left.is_empty(), "{:?}: left on the server: {left:?}", self.under);
    }
}

/// Tells a story in all ways, and compares what was written.
pub fn tell(lab: &Lab, shell: Shell, rc: &str, story: impl Fn(&mut Teller<'_>)) {
    let mut told = Vec::new();
    for (under, door, home) in TELLINGS {
        let setting = TerminalSetup { shell, under, door, size: TerminalSize::USUAL, home, rc };
        let session = TerminalSession::start(&lab.workstation, &setting)
            .unwrap_or_else(|e| panic!("{under:?}: {e}"));
        let mut teller = Teller { lab, session, under, home, turns: Vec::new() };
        fs::write(lab.data(1).join("log"), LOG).unwrap();
        story(&mut teller);
        let Teller { session, turns, .. } = teller;
        let status = session.end().unwrap_or_else(|e| panic!("{under:?}: {e}"));
        told.push((turns, status));
    }
    let [(alone, alone_end), told @ ..] = told.as_slice() else { unreachable!("three tellings") };
    for ((posh, posh_end), (_, door, _)) in told.iter().zip(&TELLINGS[1..]) {
        for (number, (alone, posh)) in alone.iter().zip(posh).enumerate() {
            let name = shell.name();
            assert!(
                alone == posh,
                "turn {number} differs\n--- {name}: {alone:?}\n--- posh, {door:?}: {posh:?}"
            );
        }
        assert_eq!(
            (alone.len(), alone_end),
            (posh.len(), posh_end),
            "turns, and how the shell ended, {door:?}"
        );
    }
}
