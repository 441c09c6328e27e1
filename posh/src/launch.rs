//! Executes the user's own shell, with the exec hook, or with a session's shims at the front of
//! PATH.
//!
//! posh execs the shell in its own process, so that the process tree, the descriptors, the signal
//! dispositions and the environment (with shims, except PATH) are as without posh. If posh itself
//! fails, the shell still runs, and its commands run locally.
//!
//! This module is part of the small program `posh`. Every shell waits for it, so that it must not
//! depend on the option parser, gRPC or TLS (`main.rs`).

use std::{
    convert::Infallible,
    env,
    ffi::{CString, OsStr, OsString},
    io::{self, IsTerminal as _, Write},
    num::NonZeroU32,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    process,
};

use clap::ValueEnum;
use nix::{
    sys::signal::Signal,
    unistd::{AccessFlags, access, execve},
};
use posh_hook::session::PRELOAD_VARIABLE;
use posh_proto::{PROTOCOL_VERSION, runtime::RuntimeDir, stage::OpenSession, untrusted::escaped};

use crate::{
    Error,
    gateway::{self, GatewayTarget, OpenedSession, c_string, environment},
    hook, programs,
    signals::BlockedSignals,
};

/// execvp(3)'s search path without PATH.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// A shell to be started.
#[derive(Debug, PartialEq, Eq)]
pub struct Launch {
    /// Which one.
    pub shell: Shell,
    /// Interception of its commands; `None`: by the hook, if that can be used.
    pub door: Option<Door>,
    /// Report afterwards where each stage ran.
    pub explain: Option<Format>,
    /// Write a timeline to this file.
    pub trace: Option<PathBuf>,
    /// Splitting factor, else as configured.
    pub split: Option<NonZeroU32>,
    /// Its words after its name.
    pub words: ShellWords,
    /// argv\[0\] began with `-`, as login(1) and sshd(8) have it: it is to be a login shell.
    pub is_login: bool,
    /// The gateway to use.
    pub target: GatewayTarget,
}

/// The shells that posh knows how to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    /// bash
    Bash,
    /// zsh
    Zsh,
    /// fish
    Fish,
    /// dash
    Dash,
}

/// How posh sees what a shell executes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Door {
    /// A library in the shell and in what it starts
    Hook,
    /// Shims at the front of PATH
    Path,
}

/// How a report is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people
    Text,
    /// For programs
    Json,
}

/// Words of a shell after its name, exactly as given: its options, `-c CMD` or a script, and
/// arguments. It finds their mistakes itself.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ShellWords(pub Vec<OsString>);

impl Launch {
    /// A launch without options of posh.
    #[must_use]
    pub fn plain(words: ShellWords) -> Self {
        Self {
            shell: Shell::Bash,
            door: None,
            explain: None,
            trace: None,
            split: None,
            words,
            is_login: false,
            target: GatewayTarget::default(),
        }
    }

    /// Returns true if posh must outlive the shell, for a report or trace.
    #[must_use]
    pub fn is_told_of(&self) -> bool {
        self.explain.is_some() || self.trace.is_some()
    }
}

impl ShellWords {
    /// Takes the words after `posh` if they are certainly all the shell's: none is an option of
    /// posh or the name of a subcommand. Most lines that start a shell are so.
    #[must_use]
    pub fn plain(words: &[OsString]) -> Option<Self> {
        let is_plain = words.first().is_none_or(|first| {
            is_short_option(first) || !begins_option(first) && first.as_bytes().contains(&b'/')
        });
        is_plain.then(|| Self(words.to_vec()))
    }

    /// Returns true if a person is to work in the shell: nothing is to be run, or `-i` is given.
    #[must_use]
    pub fn is_interactive(&self) -> bool {
        let mut options = self.0.iter().take_while(|word| is_short_option(word));
        self.0.is_empty() || options.any(|word| word.as_bytes().contains(&b'i'))
    }
}

/// Returns true for options of one letter, which are all the shell's, except for those by which
/// programs tell of themselves.
fn is_short_option(word: &OsStr) -> bool {
    begins_option(word) && !word.as_bytes().starts_with(b"--") && word != "-h" && word != "-V"
}

/// Returns true for words that a shell takes for options.
#[must_use]
pub fn begins_option(word: &OsStr) -> bool {
    matches!(word.as_bytes().first(), Some(b'-' | b'+'))
}

impl Shell {
    /// Its name, also its argv\[0\], with which its messages begin.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Bash => "bash",
            Self::Zsh => "zsh",
            Self::Fish => "fish",
            Self::Dash => "dash",
        }
    }

    /// The whole argv.
    #[must_use]
    pub fn argv(self, words: &ShellWords, is_login: bool) -> Vec<OsString> {
        let name = if is_login { format!("-{}", self.name()) } else { self.name().to_owned() };
        std::iter::once(OsString::from(name)).chain(words.0.iter().cloned()).collect()
    }
}

/// Becomes the shell; returns only if it can't be executed. Notes for the user are written to
/// `notes` before, one line each. Makes no report afterwards, even if the launch asks for one: that
/// is
/// [`crate::watch`].
///
/// # Errors
/// [`Error::NoShell`], [`Error::Exec`]: nothing was run.
pub fn run(launch: &Launch, notes: &mut dyn Write) -> Result<Infallible, Error> {
    ShellStart::prepare(launch, notes)?.image.replace_us()
}

/// A shell about to be executed.
pub(crate) struct ShellStart {
    /// Arguments of execve(2).
    pub(crate) image: Image,
    /// The session of its commands.
    pub(crate) session: Option<LaunchSession>,
}

impl ShellStart {
    /// Finds the shell and opens its session; writes to `notes` why there is none.
    pub(crate) fn prepare(launch: &Launch, notes: &mut dyn Write) -> Result<Self, Error> {
        let outer_path = env::var_os("PATH").as_deref().map(without_shims);
        let search = outer_path.as_deref().unwrap_or(OsStr::new(DEFAULT_PATH));
        let shell =
            find_program(launch.shell.name(), search).ok_or(Error::NoShell(launch.shell.name()))?;
        // Beyond a limit on file sizes a write is an error then: nothing of ours ends the shell.
        let quiet = BlockedSignals::new(&[Signal::SIGXFSZ]);
        let session = session(launch, search, notes);
        let hook = session.as_ref().and_then(|session| hook(launch, &shell, session, notes));
        drop(quiet);
        let variables = match (&session, hook, outer_path) {
            (Some(_), Some(hook), path) => hooked(hook, path),
            (Some(session), None, Some(path)) => shimmed(session, &path),
            // Shims need a PATH.
            (Some(_), None, None) | (None, ..) => env::vars_os().collect(),
        };
        let image =
            Image::new(&shell, launch.shell.argv(&launch.words, launch.is_login), variables)?;
        Ok(Self { image, session })
    }
}

/// The hook's variables, unless shims were requested or the shell can't load its library.
fn hook(
    launch: &Launch,
    shell: &Path,
    session: &LaunchSession,
    notes: &mut dyn Write,
) -> Option<HookVariables> {
    if launch.door == Some(Door::Path) {
        return None;
    }
    let directory = session.shims.parent().unwrap_or(&session.shims);
    let found = hook::library_for(shell)
        .and_then(|library| hook::variables(directory, &library, env::var_os(PRELOAD_VARIABLE)));
    if let (Err(error), Some(Door::Hook)) = (&found, launch.door) {
        let mut reason = error.to_string();
        if let Some(cause) = std::error::Error::source(error) {
            reason = format!("{reason}: {cause}");
        }
        let _ = writeln!(notes, "posh: no exec hook, shims on PATH instead: {reason}");
    }
    found.ok()
}

type Variables = Vec<(OsString, OsString)>;
type HookVariables = [(OsString, OsString); 2];

/// The environment with the hook's variables appended, and without an outer posh's shims.
fn hooked(hook: HookVariables, path: Option<OsString>) -> Variables {
    let mut variables = replaced("PATH", path);
    variables.extend(hook);
    variables
}

/// The environment with the shims at the front of PATH.
fn shimmed(session: &LaunchSession, path: &OsStr) -> Variables {
    replaced("PATH", Some(prepend(&session.shims, path)))
}

/// The environment with one variable changed, if a value is given.
fn replaced(name: &str, value: Option<OsString>) -> Variables {
    let with = |(own, before): (OsString, OsString)| match &value {
        Some(value) if own == name => (own, value.clone()),
        _ => (own, before),
    };
    env::vars_os().map(with).collect()
}

/// An open session of the gateway.
pub(crate) struct LaunchSession {
    /// The gateway.
    pub(crate) place: gateway::GatewayPlace,
    /// Its name at the gateway.
    pub(crate) id: String,
    shims: PathBuf,
}

/// Opens a session; writes to `notes` why there is none, except where nothing is configured and
/// none was requested.
fn session(launch: &Launch, path: &OsStr, notes: &mut dyn Write) -> Option<LaunchSession> {
    let mut note = |text: String| {
        let _ = writeln!(notes, "posh: {text}");
    };
    let found = gateway::search(&launch.target).map(|(place, passed_over)| {
        // Any directory may have such a file, and a script's output must not depend on it, so that
        // this note is for interactive use only.
        let is_for_people =
            launch.is_told_of() || launch.words.is_interactive() || io::stderr().is_terminal();
        for why in passed_over.iter().filter(|why| is_for_people || why.is_fault()) {
            note(escaped(&why.to_string()).into_owned());
        }
        place
    });
    let opened = match found {
        Ok(Some(place)) => open_session(launch, path, &place),
        Ok(None) => {
            if launch.is_told_of() {
                let what = if launch.explain.is_some() { "explain" } else { "trace" };
                note(format!("nothing to {what}, every command runs here: {}", Error::NoConfig));
            }
            return None;
        }
        Err(error) => Err(error),
    };
    opened.map_err(|error| note(format!("every command runs here: {}", error.chain()))).ok()
}

fn open_session(
    launch: &Launch,
    path: &OsStr,
    place: &gateway::GatewayPlace,
) -> Result<LaunchSession, Error> {
    let request = OpenSession {
        protocol: PROTOCOL_VERSION,
        pid: process::id(),
        explain: launch.explain.is_some(),
        split: launch.split.map_or(0, NonZeroU32::get),
        path: path.as_bytes().to_vec().into(),
        stage_program: stage_program()?.into_os_string().into_vec().into(),
        trace: launch.trace.is_some(),
    };
    let OpenedSession { shims, id } = gateway::open_session(place, &request)?;
    Ok(LaunchSession { place: place.clone(), id, shims })
}

/// Target of the shims: the stage program beside this program.
fn stage_program() -> Result<PathBuf, Error> {
    let attempt = || "find posh-stage beside posh".to_owned();
    let stage = programs::beside("posh-stage")
        .map_err(|source| Error::Start { attempt: attempt(), source })?;
    match stage.metadata() {
        Ok(_) => Ok(stage),
        Err(source) => Err(Error::Start { attempt: format!("find {}", stage.display()), source }),
    }
}

/// PATH without the shims of an outer posh, which would be taken for the real commands.
fn without_shims(path: &OsStr) -> OsString {
    let Ok(runtime) = RuntimeDir::open() else { return path.to_owned() };
    remove_below(path, runtime.path())
}

fn remove_below(path: &OsStr, directory: &Path) -> OsString {
    let is_outside = |entry: &&[u8]| !Path::new(OsStr::from_bytes(entry)).starts_with(directory);
    let entries: Vec<&[u8]> =
        path.as_bytes().split(|&byte| byte == b':').filter(is_outside).collect();
    OsString::from_vec(entries.join(&b':'))
}

fn prepend(directory: &Path, path: &OsStr) -> OsString {
    let mut joined = directory.as_os_str().to_owned();
    joined.push(":");
    joined.push(path);
    joined
}

/// The first executable file of that name on `path`, as execvp(3) would find it.
pub(crate) fn find_program(name: &str, path: &OsStr) -> Option<PathBuf> {
    env::split_paths(path)
        .map(|directory| directory.join(name))
        .find(|candidate| candidate.is_file() && access(candidate, AccessFlags::X_OK).is_ok())
}

/// Arguments of execve(2).
pub(crate) struct Image {
    /// The shell's path.
    pub(crate) program: PathBuf,
    program_for_exec: CString,
    /// Its argv.
    pub(crate) argv: Vec<CString>,
    /// Its variables.
    pub(crate) environment: Vec<CString>,
}

impl Image {
    fn new(program: &Path, argv: Vec<OsString>, variables: Variables) -> Result<Self, Error> {
        let argv = argv.iter().map(|word| c_string(word.as_bytes())).collect::<Result<_, _>>()?;
        Ok(Self {
            program: program.to_owned(),
            program_for_exec: c_string(program.as_os_str().as_bytes())?,
            argv,
            environment: environment(variables.into_iter())?,
        })
    }

    /// Executes the program. All files that this process opened are close-on-exec, and it changed
    /// neither signal dispositions nor, after restoring it, the mask.
    pub(crate) fn replace_us(&self) -> Result<Infallible, Error> {
        execve(&self.program_for_exec, &self.argv, &self.environment)
            .map_err(|source| Error::Exec { path: self.program.clone(), source })
    }
}
