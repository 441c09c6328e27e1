//! A terminal with a user: a pseudo-terminal on which a program of a host runs in a session of its
//! own, its output, and the resulting screen. Every wait is for bytes, with a limit; nothing
//! sleeps. `session` handles the prompts of shells.

pub mod session;

use std::num::NonZeroU16;
use std::os::fd::OwnedFd;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};

use crate::error::{AttemptExt, LabError, Result};
use crate::host::Host;
use crate::process::{ChildProcess, wait_for};

/// Limit of every wait on a terminal, for a busy machine.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Bytes per read; the kernel buffers 4 KiB of a terminal.
const READ_BYTES: usize = 16 << 10;

/// Script that runs its arguments, prints their status, and stays until a line is typed.
const LEADER: &str = r#""$@"; printf '\033]posh-end:%d;\007' "$?"; read -r line"#;
/// Text that the leader writes when the command has ended: an escape sequence that is not
/// displayed.
const END: &str = "\x1b]posh-end:";

/// The size of a terminal, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TerminalSize {
    rows: NonZeroU16,
    columns: NonZeroU16,
}

impl TerminalSize {
    /// Size of terminals since the VT100.
    pub const USUAL: TerminalSize = TerminalSize::new(24, 80);

    /// Lines, and characters in each.
    ///
    /// # Panics
    /// If one of them is 0.
    pub const fn new(rows: u16, columns: u16) -> TerminalSize {
        let (Some(rows), Some(columns)) = (NonZeroU16::new(rows), NonZeroU16::new(columns)) else {
            panic!("a terminal has rows and columns")
        };
        TerminalSize { rows, columns }
    }

    fn as_kernel_has_it(self) -> Winsize {
        Winsize { ws_row: self.rows.get(), ws_col: self.columns.get(), ws_xpixel: 0, ws_ypixel: 0 }
    }
}

/// A program on a terminal. Dropping it hangs up and kills the program.
pub struct Terminal {
    // The terminal is hung up before the program is killed.
    master: Option<OwnedFd>,
    program: ChildProcess,
    screen: vt100::Parser,
    raw: Vec<u8>,
    seen: usize,
    ended: bool,
}

impl Terminal {
    /// Starts `command`, which was made by [`Host::command`], as the leader of a session
    /// on a new terminal. Descriptors that it does not set are the terminal.
    pub fn start(host: &Host, command: &Command, size: TerminalSize) -> Result<Terminal> {
        let words = || "make a terminal".to_owned();
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)
            .attempt(words)?;
        grantpt(&master).attempt(words)?;
        unlockpt(&master).attempt(words)?;
        tcsetwinsize(&master, size.as_kernel_has_it()).attempt(words)?;
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let terminal = ioctl_tiocgptpeer(&master, flags).attempt(words)?;
        let [output, error] = [terminal.try_clone(), terminal.try_clone()];
        let mut leader = as_session_leader(host, command);
        leader.stdin(terminal).stdout(output.attempt(words)?).stderr(error.attempt(words)?);
        let program = host.spawn(leader)?;
        let screen = vt100::Parser::new(size.rows, size.columns, 0);
        Ok(Terminal {
            master: Some(master),
            program,
            screen,
            raw: Vec::new(),
            seen: 0,
            ended: false,
        })
    }

    /// Runs `command` to its end on a new terminal: its output, the coloured screen, and its status
    /// as a shell reports it.
    ///
    /// The leader of the session is another program, which stays until all output was read: when a
    /// leader ends, the kernel hangs up and drops bytes that are still between the two sides of the
    /// terminal.
    pub fn run(
        host: &Host,
        command: &Command,
        size: TerminalSize,
    ) -> Result<(Vec<u8>, String, i32)> {
        let mut leader = host.command("sh");
        leader.args(["-c", LEADER, "sh"]);
        let leader = with_arguments_of(leader, command);
        let mut terminal = Terminal::start(host, &leader, size)?;
        terminal.until(END)?;
        let status = terminal.until(";")?;
        let status = String::from_utf8_lossy(&status[..status.len() - 1]).into_owned();
        let status =
            status.parse().map_err(|_| LabError::Report(format!("{status:?} is no status")))?;
        let written = find(&terminal.raw, END.as_bytes()).expect("it was awaited");
        let raw = terminal.raw[..written].to_vec();
        // Processed at once: this emulator depends on the division into pieces within a character.
        let mut screen = vt100::Parser::new(size.rows, size.columns, 0);
        screen.process(&raw);
        let screen = screen.screen().contents_formatted_basic();
        terminal.keys("\r")?;
        terminal.finish()?;
        Ok((raw, screen, status))
    }

    /// Presses keys.
    pub fn keys(&mut self, keys: &str) -> Result<()> {
        let master = self.master()?;
        let mut rest = keys.as_bytes();
        while !rest.is_empty() {
            let count = rustix::io::write(master, rest).attempt(|| "write to a terminal".into())?;
            rest = &rest[count..];
        }
        Ok(())
    }

    /// Waits for `text` after the previously awaited text; returns the output up to its end.
    pub fn until(&mut self, text: &str) -> Result<Vec<u8>> {
        let from = self.seen;
        self.wait(&format!("{text:?}"), |terminal| {
            find(&terminal.raw[from..], text.as_bytes()).is_some()
        })?;
        let at = find(&self.raw[from..], text.as_bytes()).expect("it was just found");
        self.seen = from + at + text.len();
        Ok(self.raw[from..self.seen].to_vec())
    }

    /// Waits for `text`, even before the previously awaited text: for output that is not in order.
    pub fn until_anywhere(&mut self, text: &str) -> Result<()> {
        self.wait(&format!("{text:?}"), |terminal| find(&terminal.raw, text.as_bytes()).is_some())
    }

    /// Waits until the screen satisfies a condition.
    pub fn until_screen(
        &mut self,
        what: &str,
        is_so: impl Fn(&[String]) -> bool,
    ) -> Result<Vec<String>> {
        self.wait(what, |terminal| is_so(&terminal.screen()))?;
        self.seen = self.raw.len();
        Ok(self.screen())
    }

    /// Waits for the program's end; returns its output, the coloured screen, and its status.
    pub fn finish(mut self) -> Result<(Vec<u8>, String, ExitStatus)> {
        let end = Instant::now() + LIMIT;
        while !self.ended {
            self.read(end.saturating_duration_since(Instant::now()), "the end of the program")?;
        }
        if !self.program.wait_at_most(end.saturating_duration_since(Instant::now()))? {
            return Err(self.late("the end of the program"));
        }
        let status = self.program.wait().attempt(|| "wait for a program on a terminal".into())?;
        Ok((std::mem::take(&mut self.raw), self.coloured_screen(), status))
    }

    /// Closes the terminal, like closing its window; returns the program, whose end is still to be
    /// awaited.
    pub fn hang_up(mut self) -> ChildProcess {
        self.master = None;
        self.program
    }

    /// Changes the size; the kernel signals the foreground processes.
    pub fn resize(&mut self, size: TerminalSize) -> Result<()> {
        tcsetwinsize(self.master()?, size.as_kernel_has_it())
            .attempt(|| "resize a terminal".into())?;
        self.screen.screen_mut().set_size(size.rows, size.columns);
        Ok(())
    }

    /// The terminal's modes, as in stty(1).
    pub fn modes(&self) -> Result<Termios> {
        tcgetattr(self.master()?).attempt(|| "read a terminal's modes".into())
    }

    /// The lines of the screen, without spaces at their ends.
    pub fn screen(&self) -> Vec<String> {
        let screen = self.screen.screen();
        screen.rows(0, screen.size().1.get()).map(|line| line.trim_end().to_owned()).collect()
    }

    /// The screen with the escape sequences for its colours.
    pub fn coloured_screen(&self) -> String {
        self.screen.screen().contents_formatted_basic()
    }

    /// All output so far.
    pub fn raw(&self) -> &[u8] {
        &self.raw
    }

    /// The output up to the end of the last awaited text.
    pub fn awaited(&self) -> &[u8] {
        &self.raw[..self.seen]
    }

    /// The program on the terminal.
    pub fn program(&self) -> &ChildProcess {
        &self.program
    }

    fn master(&self) -> Result<&OwnedFd> {
        self.master.as_ref().ok_or_else(|| LabError::Report("the terminal was hung up".into()))
    }

    fn wait(&mut self, what: &str, is_so: impl Fn(&Terminal) -> bool) -> Result<()> {
        let end = Instant::now() + LIMIT;
        while !is_so(self) {
            if self.ended {
                return Err(self.late(what));
            }
            self.read(end.saturating_duration_since(Instant::now()), what)?;
        }
        Ok(())
    }

    /// Waits for output, and reads it.
    fn read(&mut self, limit: Duration, what: &str) -> Result<()> {
        let master = self.master()?;
        if !wait_for(master, PollFlags::IN, limit)? {
            return Err(self.late(what));
        }
        let mut part = vec![0; READ_BYTES];
        match rustix::io::read(master, &mut part) {
            Ok(0) => self.ended = true,
            Ok(count) => {
                self.screen.process(&part[..count]);
                self.raw.extend_from_slice(&part[..count]);
            }
            // No process has the other side open any more.
            Err(rustix::io::Errno::IO) => self.ended = true,
            Err(e) => return Err(e).attempt(|| "read from a terminal".into()),
        }
        Ok(())
    }

    fn late(&self, what: &str) -> LabError {
        let after = String::from_utf8_lossy(&self.raw[self.seen..]).into_owned();
        let detail = format!(
            "screen:\n{}\nwritten since the last event: {after:?}",
            self.screen().join("\n").trim_end()
        );
        LabError::Timeout { what: what.to_owned(), after: LIMIT, detail }
    }
}

/// Runs the command by setsid(1), which makes its standard input the controlling terminal.
fn as_session_leader(host: &Host, command: &Command) -> Command {
    let mut leader = host.command("setsid");
    leader.arg("--ctty");
    let mut leader = with_arguments_of(leader, command);
    leader.stdin(Stdio::null());
    leader
}

/// Appends another command to `leader` as its last arguments, with that command's environment and
/// directory.
fn with_arguments_of(mut leader: Command, command: &Command) -> Command {
    leader.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => leader.env(name, value),
            None => leader.env_remove(name),
        };
    }
    if let Some(directory) = command.get_current_dir() {
        leader.current_dir(directory);
    }
    leader
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|w| w == wanted)
}
