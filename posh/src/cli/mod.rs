//! The command line. Parsing only validates; its result is one [`Request`].

pub mod allow;
pub mod annotations;
pub mod attach;
pub mod doctor;
pub mod enroll;
pub mod tables;
pub mod volumes;

use std::{
    ffi::{OsStr, OsString},
    num::NonZeroU32,
    path::PathBuf,
};

use clap::{CommandFactory, Parser, Subcommand, error::ErrorKind};
use fs_mapper::config::{Login, TlsHost};
use posh_proto::token::Token;

use crate::{
    gateway::GatewayTarget,
    launch::{Door, Format, Launch, Shell, ShellProgram},
};

/// The request of a command line.
#[derive(Debug, PartialEq, Eq)]
pub enum Request {
    /// Start a shell.
    Launch(Launch),
    /// Answer a question.
    Ask(GatewayTarget, Question),
}

/// The subcommands.
#[derive(Debug, PartialEq, Eq, Subcommand)]
pub enum Question {
    /// Print the mount table: each mount, its file system, and who owns it
    Mounts {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Say which machine owns PATH, and what it is called there
    Resolve {
        /// The path, absolute or relative to the current directory
        path: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Plan a pipeline without running anything
    Explain {
        /// Shell text: one pipeline, or several joined by ; && || or lines
        pipeline: String,
        /// Print one JSON document a pipeline
        #[arg(long)]
        json: bool,
        /// Split what can be split into N parts on one machine
        #[arg(long, value_name = "N")]
        split: Option<NonZeroU32>,
    },
    /// Say how the gateway and its executors are
    Status {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Mount an executor's export as a volume, which the gateway serves
    Mount {
        /// An executor of the configuration, and one of its exports
        #[arg(value_name = "EXECUTOR:EXPORT", value_parser = volumes::parse_source)]
        source: volumes::ExportSource,
        /// Where; a directory
        dir: PathBuf,
        /// Refuse changes
        #[arg(long)]
        read_only: bool,
        /// Keep so much of what was read, such as 512M or 10G
        #[arg(long, value_name = "SIZE", value_parser = volumes::parse_size)]
        cache_size: Option<u64>,
        /// Answer writes when they are on the server
        #[arg(long)]
        sync: bool,
        /// Wait for a server that is out of reach, instead of failing
        #[arg(long)]
        hard: bool,
    },
    /// Write what is left, and take a volume out of the file tree
    Umount {
        /// Where it is mounted
        dir: PathBuf,
    },
    /// Say how the volumes are: state, cache, what is not on the server yet, leases
    #[command(args_conflicts_with_subcommands = true)]
    Volumes {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// An action on one of them, instead
        #[command(subcommand)]
        action: Option<VolumeAction>,
    },
    /// Check or explain what posh knows of commands
    #[command(subcommand)]
    Annotations(Annotations),
    /// Let this directory's configuration count, as it is now
    Allow {
        /// The file
        #[arg(default_value = "mounts.toml")]
        file: PathBuf,
    },
    /// Take that back
    Deny {
        /// The file
        #[arg(default_value = "mounts.toml")]
        file: PathBuf,
    },
    /// Check this machine's set-up, step by step
    Doctor,
    /// Copy posh-executor to ~/.local/bin of a login on another machine, over ssh
    Attach {
        /// As ssh knows it
        #[arg(value_name = "[USER@]HOST[:PORT]", value_parser = attach::parse_login)]
        host: Login,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
    /// Get this workstation a certificate for an executor, with a token from `posh-executor enroll
    /// NAME`
    Enroll {
        /// Where the executor listens
        #[arg(value_name = "[tls://]HOST[:PORT]", value_parser = enroll::parse_host)]
        address: TlsHost,
        /// One word, good once
        token: Token,
    },
    /// Start or end the gateway in the background (shells start it by themselves)
    #[command(subcommand)]
    Gateway(GatewayCommand),
    /// Print a completion script for a shell
    Completions {
        /// The shell that is to complete posh's options
        shell: clap_complete::Shell,
    },
}

/// Actions on one volume.
#[derive(Debug, Clone, PartialEq, Eq, Subcommand)]
pub enum VolumeAction {
    /// Take out of a volume the files that its server does not take, into a directory of this
    /// machine
    Recover {
        /// Where the volume is mounted
        mount: PathBuf,
        /// Where the files are put, under the paths that they have in the volume
        to: PathBuf,
    },
}

/// `posh annotations ...`
#[derive(Debug, PartialEq, Eq, Subcommand)]
pub enum Annotations {
    /// Report every fault in annotation files, with file, line and column
    Check {
        /// A directory of .yaml files; the machine's and the user's own when left out
        dir: Option<PathBuf>,
    },
    /// Show how an invocation is read
    Explain {
        /// The command with its arguments, after `--`
        #[arg(required = true, last = true)]
        command: Vec<OsString>,
    },
    /// List the flags that a command's --help names and its annotation lacks
    Coverage {
        /// The commands, "git log" as one word; every annotated one when left out
        commands: Vec<String>,
    },
    /// Run commands, and report each file that they use and their annotations do not name
    ///
    /// The commands really run: what they change is changed. One word with spaces in it is a line
    /// for sh; several words are one command. A use that an executor would not allow fails with
    /// "Permission denied". What the commands print goes to standard error, and the report to
    /// standard output; the exit status is 1 if anything was missed.
    Verify {
        /// A file with more lines for sh, one a line; # begins a remark
        #[arg(long, value_name = "FILE")]
        file: Option<PathBuf>,
        /// Run in a copy of DIR, which is thrown away
        #[arg(long = "in", value_name = "DIR")]
        in_copy_of: Option<PathBuf>,
        /// The command with its arguments, or one line for sh
        #[arg(
            value_name = "CMD",
            trailing_var_arg = true,
            allow_hyphen_values = true,
            required_unless_present = "file"
        )]
        command: Vec<OsString>,
    },
}

/// `posh gateway ...`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Subcommand)]
pub enum GatewayCommand {
    /// Start it, unless it runs
    Start,
    /// End it when its pipelines have ended
    Stop,
}

/// A shell whose commands run where their data lives.
///
/// Starts SHELL with a script, with -c CMD, or interactively. Everything after
/// SCRIPT or after -c CMD belongs to the script. A script that has the name of a
/// subcommand is run as ./NAME.
#[derive(Debug, Parser)]
#[command(name = "posh", version, disable_help_subcommand = true)]
struct CommandLine {
    /// The shell to start
    #[arg(long, value_enum, default_value_t = Shell::Bash)]
    shell: Shell,
    /// How posh sees what the shell executes; the hook, where the shell can load it
    #[arg(long, value_enum)]
    door: Option<Door>,
    /// Print to stderr, when the shell has ended, where each stage ran and why
    #[arg(
        long,
        value_enum,
        value_name = "FORMAT",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "text"
    )]
    explain: Option<Format>,
    /// Write a timeline of every pipeline to FILE, for ui.perfetto.dev or chrome://tracing
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Split what can be split into N parts on one machine
    #[arg(long, value_name = "N")]
    split: Option<NonZeroU32>,
    /// The configuration; else $POSH_CONFIG, ./mounts.toml (see `posh allow`),
    /// ~/.config/posh/mounts.toml, /etc/posh/mounts.toml
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The socket of a running gateway; else $POSH_SOCKET, else the one of the configuration
    #[arg(long, global = true, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Run CMD; the words after it become $0, $1, ...
    #[arg(short = 'c', value_names = ["CMD", "ARGS"], num_args = 1.., allow_hyphen_values = true)]
    command: Vec<OsString>,
    /// Run SCRIPT with ARGS
    #[arg(value_names = ["SCRIPT", "ARGS"], trailing_var_arg = true)]
    script: Vec<OsString>,
    #[command(subcommand)]
    question: Option<Question>,
}

/// Reads the command line.
///
/// # Errors
/// A [`clap::Error`] to be printed: a mistake, or the text of `--help` and `--version`.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Request, clap::Error> {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    match ShellProgram::plain(arguments.get(1..).unwrap_or_default()) {
        Some(program) => Ok(Request::Launch(Launch::plain(program))),
        None => parse_options(arguments),
    }
}

fn parse_options(arguments: Vec<OsString>) -> Result<Request, clap::Error> {
    let line = CommandLine::try_parse_from(arguments)?;
    let target = GatewayTarget { config: line.config, socket: line.socket };
    if let Some(question) = line.question {
        if line.explain.is_some()
            || line.trace.is_some()
            || line.split.is_some()
            || line.door.is_some()
        {
            let message = "--explain, --trace, --split and --door are for starting a shell; see \
                           `posh explain --help`";
            return Err(CommandLine::command().error(ErrorKind::ArgumentConflict, message));
        }
        return Ok(Request::Ask(target, question));
    }
    let program = match (line.command, line.script) {
        (command, script) if command.is_empty() && script.is_empty() => ShellProgram::Interactive,
        (command, script) if command.is_empty() => ShellProgram::Script(script),
        (command, _) => ShellProgram::Command(without_dashes(command)?),
    };
    let CommandLine { shell, door, explain, trace, split, .. } = line;
    Ok(Request::Launch(Launch { shell, door, explain, trace, split, program, target }))
}

/// Drops `--`: `sh -c -- CMD` protects a CMD that begins with `-`.
fn without_dashes(mut command: Vec<OsString>) -> Result<Vec<OsString>, clap::Error> {
    if command.first().map(OsString::as_os_str) == Some(OsStr::new("--")) {
        command.remove(0);
        if command.is_empty() {
            return Err(CommandLine::command()
                .error(ErrorKind::MissingRequiredArgument, "-c needs a command"));
        }
    }
    Ok(command)
}

/// The completion script of one shell.
#[must_use]
pub fn completions(shell: clap_complete::Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut CommandLine::command(), "posh", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &[&str]) -> Vec<OsString> {
        line.iter().map(OsString::from).collect()
    }

    fn launch(line: &[&str]) -> Launch {
        match parse(words(line)) {
            Ok(Request::Launch(launch)) => launch,
            other => panic!("{line:?} is read as {other:?}"),
        }
    }

    #[test]
    fn what_belongs_to_the_script_is_left_to_it() {
        use ShellProgram::{Command, Interactive, Script};
        let cases: &[(&[&str], ShellProgram)] = &[
            (&["posh"], Interactive),
            (&["posh", "--explain"], Interactive),
            (&["posh", "s"], Script(words(&["s"]))),
            (
                &["posh", "s", "--explain", "-c", "mounts"],
                Script(words(&["s", "--explain", "-c", "mounts"])),
            ),
            (&["posh", "--explain", "s", "--", "-x"], Script(words(&["s", "--", "-x"]))),
            (&["posh", "--", "-s", "x"], Script(words(&["-s", "x"]))),
            (&["posh", "./mounts"], Script(words(&["./mounts"]))),
            (&["posh", "s", "mounts"], Script(words(&["s", "mounts"]))),
            (
                &["posh", "-c", "echo $1", "x", "--explain"],
                Command(words(&["echo $1", "x", "--explain"])),
            ),
            (
                &["posh", "-c", "echo", "--shell", "zsh"],
                Command(words(&["echo", "--shell", "zsh"])),
            ),
            (&["posh", "-c", "mounts"], Command(words(&["mounts"]))),
            (
                &["posh", "-c", "x", "mounts", "-c", "y"],
                Command(words(&["x", "mounts", "-c", "y"])),
            ),
            (&["posh", "-c", "x", "--", "y"], Command(words(&["x", "--", "y"]))),
            (&["posh", "-c", "--", "-x"], Command(words(&["-x"]))),
            (&["posh", "-c", "-x y"], Command(words(&["-x y"]))),
            (&["posh", "-c", ""], Command(words(&[""]))),
        ];
        for (line, program) in cases {
            assert_eq!(launch(line).program, *program, "{line:?}");
        }
    }

    #[test]
    fn plain_lines_are_read_as_by_the_parser() {
        let programs = [
            &["-c", "x"][..],
            &["-c", "x", "--", "y"],
            &["-c", "-x", "mounts"],
            &["-c", "", "--shell", "zsh"],
            &["-c", "-c", "-c"],
            &["-c", "x", "--explain", "--config", "m"],
            &["./mounts"],
            &["/s", "--explain", "-c", "mounts"],
            &["d/s", "--", "-x"],
            &["é/ü", "x"],
            &[],
        ];
        for line in programs {
            let line = words(&[&["posh"], line].concat());
            let plain =
                ShellProgram::plain(&line[1..]).unwrap_or_else(|| panic!("{line:?} is plain"));
            let Ok(Request::Launch(launch)) = parse_options(line.clone()) else {
                panic!("{line:?} starts a shell")
            };
            assert_eq!(launch.program, plain, "{line:?}");
            assert_eq!(parse(line).unwrap(), Request::Launch(launch));
        }
        for line in [
            &["-c"][..],
            &["-c", "--", "x"],
            &["mounts"],
            &["s"],
            &["--explain", "./s"],
            &["-/x"],
            &["-cx"],
        ] {
            assert_eq!(ShellProgram::plain(&words(line)), None, "{line:?}");
        }
    }

    #[test]
    fn own_options_are_read_up_to_the_script() {
        let line = [
            "posh",
            "--shell",
            "zsh",
            "--door",
            "path",
            "--explain=json",
            "--trace",
            "t",
            "--split",
            "4",
            "--config",
            "m",
            "--socket",
            "s",
            "x",
        ];
        let launch = launch(&line);
        assert_eq!(
            (launch.shell, launch.door, launch.explain),
            (Shell::Zsh, Some(Door::Path), Some(Format::Json))
        );
        assert_eq!((launch.split, launch.trace), (NonZeroU32::new(4), Some("t".into())));
        assert_eq!(
            launch.target,
            GatewayTarget { config: Some("m".into()), socket: Some("s".into()) }
        );
    }

    #[test]
    fn questions_take_the_target_on_either_side() {
        let target = GatewayTarget { config: Some("m".into()), socket: None };
        for line in [["posh", "--config", "m", "mounts"], ["posh", "mounts", "--config", "m"]] {
            let mounts = Request::Ask(target.clone(), Question::Mounts { json: false });
            assert_eq!(parse(words(&line)).unwrap(), mounts);
        }
        let line = ["posh", "annotations", "explain", "--", "tar", "-xzf", "a", "--config", "x"];
        let command = words(&["tar", "-xzf", "a", "--config", "x"]);
        let explain = Question::Annotations(Annotations::Explain { command });
        assert_eq!(parse(words(&line)).unwrap(), Request::Ask(GatewayTarget::default(), explain));
        let line =
            ["posh", "annotations", "verify", "--in", "d", "sort", "--file", "x", "--config", "y"];
        let command = words(&["sort", "--file", "x", "--config", "y"]);
        let verify = Annotations::Verify { file: None, in_copy_of: Some("d".into()), command };
        assert_eq!(
            parse(words(&line)).unwrap(),
            Request::Ask(GatewayTarget::default(), Question::Annotations(verify))
        );
    }

    #[test]
    fn mistakes_are_refused() {
        let cases: &[&[&str]] = &[
            &["posh", "--bogus"],
            &["posh", "-x", "s"],
            &["posh", "-c"],
            &["posh", "-c", "--"],
            &["posh", "--split", "0"],
            &["posh", "--shell", "tcsh"],
            &["posh", "--door", "window"],
            &["posh", "--door", "path", "mounts"],
            &["posh", "--explain=yaml"],
            &["posh", "--explain", "mounts"],
            &["posh", "--trace"],
            &["posh", "--trace", "t", "mounts"],
            &["posh", "resolve"],
            &["posh", "annotations", "explain"],
            &["posh", "annotations", "verify"],
        ];
        for line in cases {
            let error = parse(words(line)).unwrap_err();
            assert!(error.use_stderr(), "{line:?} is read as help: {error}");
        }
    }

    #[test]
    fn the_definition_is_sound() {
        CommandLine::command().debug_assert();
    }
}
