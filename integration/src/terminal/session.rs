//! An interactive shell on a terminal, alone or under posh. Its prompts are counted (`<7:0> `: the
//! seventh, the last status was 0), so that the end of a command line is an event, and the output
//! between two prompts can be compared between runs.

use std::fs;
use std::process::ExitStatus;

use crate::error::{AttemptExt, LabError, Result};
use crate::host::Host;
use crate::oracle::{Door, Shell, Under};
use crate::process::ChildProcess;
use crate::terminal::{Terminal, TerminalSize};

/// Appended to the user's bashrc: counts prompts, whatever the prompt contains besides.
const BASH_COUNTER: &str = "PROMPT_COMMAND=\"tick_s=\\$?; \
                            tick=\\$((tick + 1))${PROMPT_COMMAND:+; $PROMPT_COMMAND}\"\n\
                            PS1=\"${TICK_PS1-}<\\$tick:\\$tick_s> \"\nHISTFILE=~/.history\n";
/// Counter for zsh: `precmd` runs before each prompt.
const ZSH_COUNTER: &str = "precmd() { tick_s=$?; tick=$((tick + 1)) }\nsetopt PROMPT_SUBST\n\
                           PROMPT='<$tick:$tick_s> '\n\
                           HISTFILE=~/.history SAVEHIST=100 HISTSIZE=100\n";
/// Counter for fish, which repaints its prompts: the event comes once for each.
const FISH_COUNTER: &str = "set -g fish_greeting\nset -g tick 0\n\
                            function count_prompt --on-event fish_prompt; \
                            set -g tick (math $tick + 1); end\n\
                            function fish_prompt; set -l s $status; echo -n \"<$tick:$s> \"; end\n";

/// A shell to start, and its environment.
#[derive(Debug, Clone)]
pub struct TerminalSetup<'a> {
    /// The shell.
    pub shell: Shell,
    /// The shell alone, or under posh.
    pub under: Under,
    /// Interception of its commands; `None`: posh's default.
    pub door: Option<Door>,
    /// The terminal's size.
    pub size: TerminalSize,
    /// The user's home, made anew; also the working directory at the start.
    pub home: &'a str,
    /// Content of the shell's start-up file before our own lines.
    pub rc: &'a str,
}

/// An interactive shell; see the module.
pub struct TerminalSession {
    shell: Shell,
    terminal: Terminal,
    prompts: usize,
    /// Offset in the output at which the last turn ended.
    told: usize,
}

/// Output and status between Enter (or another key) and the next prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptTurn {
    /// All output, including the echo and the prompt; process ids are replaced by `PID`. For fish,
    /// which colours its line at any time, the text on the screen.
    pub written: String,
    /// `$?` at the prompt.
    pub status: u32,
}

impl TerminalSession {
    /// Starts the shell and waits for its first prompt.
    pub fn start(host: &Host, setting: &TerminalSetup<'_>) -> Result<TerminalSession> {
        write_rc(host, setting)?;
        let mut command = match setting.under {
            Under::Shell => host.command(setting.shell.name()),
            Under::Posh | Under::PoshExplained => host.command(host.programs().join("posh")),
        };
        if setting.under == Under::PoshExplained {
            command.arg("--explain");
        }
        if setting.under != Under::Shell {
            command.args(["--shell", setting.shell.name()]);
            command.args(setting.door.iter().flat_map(|door| ["--door", door.name()]));
        }
        command.env("HOME", setting.home).env("TERM", "xterm-256color").current_dir(setting.home);
        let terminal = Terminal::start(host, &command, setting.size)?;
        let mut session = TerminalSession { shell: setting.shell, terminal, prompts: 0, told: 0 };
        session.prompt()?;
        Ok(session)
    }

    /// Types a line, and waits for the next prompt.
    pub fn line(&mut self, text: &str) -> Result<PromptTurn> {
        self.terminal.keys(&format!("{text}\r"))?;
        self.prompt()
    }

    /// Types a line, and waits until its command has written `sign`, which the line itself must not
    /// contain.
    pub fn begin(&mut self, text: &str, sign: &str) -> Result<()> {
        assert!(!text.contains(sign), "the echo of {text:?} would be taken for {sign:?}");
        self.terminal.keys(&format!("{text}\r"))?;
        self.terminal.until(sign).map(drop)
    }

    /// Presses keys, and waits for the next prompt.
    pub fn key(&mut self, keys: &str) -> Result<PromptTurn> {
        self.terminal.keys(keys)?;
        self.prompt()
    }

    /// Waits for the next prompt.
    pub fn prompt(&mut self) -> Result<PromptTurn> {
        self.prompts += 1;
        self.terminal.until(&format!("<{}:", self.prompts))?;
        let status = self.terminal.until("> ")?;
        let status = String::from_utf8_lossy(&status).trim_end_matches("> ").parse();
        let status = status
            .map_err(|_| LabError::Report(format!("no status in prompt {}", self.prompts)))?;
        let raw = self.terminal.awaited();
        let (text, told) = (String::from_utf8_lossy(&raw[self.told..]).into_owned(), raw.len());
        self.told = told;
        let text = if self.shell == Shell::Fish { self.terminal.screen().join("\n") } else { text };
        let written = without_pids(&text);
        Ok(PromptTurn { written, status })
    }

    /// Leaves the shell by `exit`, and returns its status.
    pub fn end(self) -> Result<ExitStatus> {
        let mut terminal = self.terminal;
        terminal.keys("exit\r")?;
        terminal.finish().map(|(_, _, status)| status)
    }

    /// Closes the terminal; the shell's end is still to be awaited.
    pub fn hang_up(self) -> ChildProcess {
        self.terminal.hang_up()
    }

    /// The terminal, for waits other than for prompts.
    pub fn terminal(&mut self) -> &mut Terminal {
        &mut self.terminal
    }
}

/// Our lines come last, after the user's own.
fn write_rc(host: &Host, setting: &TerminalSetup<'_>) -> Result<()> {
    let home = host.path(setting.home);
    let (name, counter) = match setting.shell {
        Shell::Bash => (".bashrc", BASH_COUNTER),
        Shell::Zsh => (".zshrc", ZSH_COUNTER),
        Shell::Fish => (".config/fish/config.fish", FISH_COUNTER),
        Shell::Dash => {
            return Err(LabError::Report("dash reads no start-up file by itself".into()));
        }
    };
    let file = home.join(name);
    let directory = file.parent().unwrap_or(&home);
    fs::create_dir_all(directory).attempt(|| format!("make {}", directory.display()))?;
    fs::write(&file, format!("{}\n{counter}", setting.rc))
        .attempt(|| format!("write {}", file.display()))
}

/// Removes the process ids that job control prints: numbers of two or more digits on lines that
/// begin with `[`.
fn without_pids(text: &str) -> String {
    let lines = text
        .split_inclusive('\n')
        .map(|line| if line.starts_with('[') { hide_numbers(line) } else { line.into() });
    lines.collect()
}

fn hide_numbers(line: &str) -> String {
    let mut hidden = String::new();
    let mut rest = line;
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        let number = &rest[start..];
        let end = number.find(|c: char| !c.is_ascii_digit()).unwrap_or(number.len());
        hidden.push_str(&rest[..start]);
        hidden.push_str(if end > 1 { "PID" } else { &number[..end] });
        rest = &number[end..];
    }
    hidden + rest
}

#[cfg(test)]
mod tests {
    use super::without_pids;

    #[test]
    fn process_ids_are_hidden_where_jobs_are_told_of() {
        let text = "ls 1234\r\n[1] 4711\r\n[2]  + 33 suspended  sleep 100";
        assert_eq!(without_pids(text), "ls 1234\r\n[1] PID\r\n[2]  + PID suspended  sleep PID");
    }
}
