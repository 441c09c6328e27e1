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
    launch::{Door, Format, Launch, Shell, ShellWords, begins_option},
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
/// Starts SHELL with a script, with -c CMD, or interactively. The first word that
/// is no option of posh, and all words after it, are the shell's: its own options
/// (-c, -l, -i, -e, -x, -o NAME, --norc, ...), and SCRIPT with its arguments. A
/// script that has the name of a subcommand is run as ./NAME.
#[derive(Debug, Parser)]
#[command(
    name = "posh",
    version,
    disable_help_subcommand = true,
    override_usage = "posh [OPTIONS] [SHELL'S OPTIONS] [-c CMD | SCRIPT] [ARGS]...\n       posh \
                      [--config FILE] [--socket PATH] COMMAND"
)]
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
    let (name, words) = arguments.split_first().map_or((None, &[][..]), |(a, b)| (Some(a), b));
    let is_login = name.is_some_and(|name| begins_option(name));
    if let Some(words) = ShellWords::plain(words) {
        return Ok(Request::Launch(Launch { is_login, ..Launch::plain(words) }));
    }
    let own = words.iter().take(count_own(words));
    let rest = &words[own.len()..];
    let mut own: Vec<OsString> = std::iter::once("posh".into()).chain(own.cloned()).collect();
    let is_for_shell = !rest.first().is_some_and(|first| is_for_posh(first));
    own.extend(rest.iter().filter(|_| !is_for_shell).cloned());
    let line = CommandLine::try_parse_from(own)?;
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
    let words = ShellWords(if is_for_shell { rest.to_vec() } else { line.script });
    let CommandLine { shell, door, explain, trace, split, .. } = line;
    Ok(Request::Launch(Launch { shell, door, explain, trace, split, words, is_login, target }))
}

/// Returns the number of words before the first one that is neither an option of posh nor its
/// value.
fn count_own(words: &[OsString]) -> usize {
    let command = CommandLine::command();
    let mut count = 0;
    while let Some(word) = words.get(count) {
        let word = word.to_string_lossy();
        let Some(text) = word.strip_prefix("--") else { break };
        let name = text.split('=').next().unwrap_or_default();
        let Some(option) = command.get_arguments().find(|its| its.get_long() == Some(name)) else {
            break;
        };
        // With `=`, the value is in the same word.
        let takes_next = !option.is_require_equals_set() && !text.contains('=');
        count += if takes_next { 2 } else { 1 };
    }
    count.min(words.len())
}

/// Returns true if the first word that is no option of a launch is for posh all the same: a
/// subcommand, a request for help, or a misspelt option.
fn is_for_posh(word: &OsStr) -> bool {
    const LETTERS_OF_A_MISSPELT_ONE: usize = 3;
    let command = CommandLine::command();
    let Some(word) = word.to_str() else { return false };
    let is_like = |long: &str| {
        let letters = |text: &str| text.chars().take(LETTERS_OF_A_MISSPELT_ONE).collect::<String>();
        word.strip_prefix("--").is_some_and(|name| letters(name) == letters(long))
    };
    matches!(word, "-h" | "-V" | "--help" | "--version")
        || command.get_subcommands().any(|its| its.get_name() == word)
        || command.get_arguments().filter_map(clap::Arg::get_long).any(is_like)
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
    fn all_words_from_the_first_that_is_not_its_own_are_the_shells() {
        let cases: &[(&[&str], &[&str])] = &[
            (&[], &[]),
            (&["--explain"], &[]),
            (&["--explain", "--trace=t", "--split", "2"], &[]),
            (&["s"], &["s"]),
            (&["s", "--explain", "-c", "mounts"], &["s", "--explain", "-c", "mounts"]),
            (&["--explain", "s", "--", "-x"], &["s", "--", "-x"]),
            (&["--", "-s", "x"], &["--", "-s", "x"]),
            (&["./mounts"], &["./mounts"]),
            (&["s", "mounts"], &["s", "mounts"]),
            (&["-c", "echo $1", "x", "--explain"], &["-c", "echo $1", "x", "--explain"]),
            (&["--config", "m", "-c", "mounts"], &["-c", "mounts"]),
            (&["-c"], &["-c"]),
            (&["-c", "-x y"], &["-c", "-x y"]),
            (&["-lc", "x", "--shell", "zsh"], &["-lc", "x", "--shell", "zsh"]),
            (&["--explain", "-x", "--", "s"], &["-x", "--", "s"]),
            (&["-o", "pipefail", "+B", "s"], &["-o", "pipefail", "+B", "s"]),
            (&["--login", "--norc", "-i"], &["--login", "--norc", "-i"]),
            (&["--explain", "--rcfile", "f", "--explain"], &["--rcfile", "f", "--explain"]),
            (&["-"], &["-"]),
            (&[""], &[""]),
        ];
        for (line, expect) in cases {
            let launch = launch(&[&["posh"], *line].concat());
            assert_eq!(launch.words.0, words(expect), "{line:?}");
            assert_eq!(launch.explain.is_some(), line.first() == Some(&"--explain"), "{line:?}");
        }
    }

    #[test]
    fn a_dash_before_its_name_makes_a_login_shell() {
        for line in [&["-posh"][..], &["-posh", "-c", "x"], &["-posh", "--explain", "s"]] {
            assert!(launch(line).is_login, "{line:?}");
        }
        assert!(!launch(&["posh", "-l"]).is_login);
    }

    #[test]
    fn plain_lines_are_only_such_as_are_all_the_shells() {
        for line in [
            &["-c", "x", "--explain"][..],
            &["-c"],
            &["-ic", "x"],
            &["+x", "mounts"],
            &["./mounts"],
            &["/s", "--explain"],
            &["é/ü", "x"],
            &[],
        ] {
            let words = words(line);
            assert_eq!(ShellWords::plain(&words), Some(ShellWords(words.clone())), "{line:?}");
        }
        for line in [&["mounts"][..], &["s"], &["--explain", "./s"], &["--login"], &["-h"], &["-V"]]
        {
            assert_eq!(ShellWords::plain(&words(line)), None, "{line:?}");
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
            &["posh", "--explian"],
            &["posh", "--splitt=2", "s"],
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
