//! Determines the stage program's target: the session, the command's name and the real program.
//!
//! By a shim on PATH: the kernel records the executed path (`AT_EXECFN`, getauxval(3)); argv[0]
//! would not do, since `exec -a` changes it. The session lies beside the directory of shims. By the
//! exec hook: the last variables of the environment have the target's path, the session, and the
//! variables by which the real program is hooked in turn.

use std::{
    ffi::{CStr, CString, OsStr, OsString},
    fmt, fs,
    io::{self, Read as _},
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

use posh_hook::session::{
    AS_SHELL, MAY_TOUCH, PIPE_ONLY, PRELOAD_VARIABLE, SESSION_VARIABLE, TARGET_VARIABLE,
    directory_of,
};
use posh_proto::stage::SessionFile;
use prost::Message;

use super::process;

/// File with the session, beside the directory of shims.
const SESSION_FILE: &str = "session";

/// The command that the shell wanted to execute.
pub struct ShellCommand {
    /// Name without directory.
    pub name: OsString,
    /// The real program.
    pub program: PathBuf,
    /// argv, unchanged, with `argv[0]`.
    pub argv: Vec<OsString>,
    /// The shell's variables, unchanged.
    pub environment: Vec<CString>,
    /// `None` when the session is gone: then everything runs locally.
    pub session: Option<StageSession>,
    /// Result of the hook's quick look, if it was taken before this program was executed.
    pub looked: Option<Looked>,
    /// Variables appended to the environment of the real program.
    carried: Vec<CString>,
}

/// Reason why a command is worth asking about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Looked {
    /// Only a pipe, whose other end may belong to a command that touches a mount.
    PipeOnly,
    /// It may touch a mount itself.
    MayTouch,
}

/// Session data: the gateway's socket, and the paths that are worth asking about.
pub struct StageSession {
    /// Name of the session, for reports.
    pub id: String,
    /// The gateway's stage socket.
    pub socket: PathBuf,
    /// Enlist even commands that touch no mount.
    pub always_enlist: bool,
    /// The owned mount points.
    pub prefixes: fs_mapper::Prefixes,
    /// Report times to the gateway.
    pub trace: bool,
}

/// Reason why no program can be determined.
#[derive(Debug)]
pub enum EntryError {
    /// Not started through a shim.
    NotAShim(OsString),
    /// No other program of that name is on PATH.
    NotFound(OsString),
}

impl fmt::Display for EntryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAShim(path) => write!(
                f,
                "{} is started by the shims of a posh session, not by hand; start `posh` instead",
                Path::new(path).display()
            ),
            Self::NotFound(name) => write!(f, "{}: command not found", Path::new(name).display()),
        }
    }
}

impl ShellCommand {
    /// Determines everything but the words from the kernel and PATH.
    ///
    /// # Errors
    /// [`EntryError`] when no real program can be named.
    pub fn find(argv: Vec<OsString>) -> Result<Self, EntryError> {
        let executed = OsStr::from_bytes(rustix::param::linux_execfn().to_bytes()).to_owned();
        let environment = process::environment();
        if Path::new(&executed).is_symlink() {
            return Self::by_shim(executed, argv, environment);
        }
        Self::by_hook(argv, environment).ok_or(EntryError::NotAShim(executed))
    }

    fn by_shim(
        shim: OsString,
        argv: Vec<OsString>,
        environment: Vec<CString>,
    ) -> Result<Self, EntryError> {
        let path = Path::new(&shim);
        let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(EntryError::NotAShim(shim));
        };
        let name = name.to_owned();
        let program =
            real_program(&name, directory).ok_or_else(|| EntryError::NotFound(name.clone()))?;
        let session = directory.parent().and_then(|d| read_session(&d.join(SESSION_FILE)));
        // bash sets `_` to the path that it executes: the real program must not see the shim there.
        let (wrong, right) = (variable("_", &shim), variable("_", program.as_os_str()));
        let environment = environment
            .into_iter()
            .map(|v| if Some(&v) == wrong.as_ref() { right.clone() } else { Some(v) });
        Ok(Self {
            name,
            environment: environment.flatten().collect(),
            argv,
            session,
            looked: None,
            carried: Vec::new(),
            program,
        })
    }

    /// The hook appends its variables: the session, for a program that preloads the library, and
    /// the path. All before them are the shell's.
    fn by_hook(argv: Vec<OsString>, mut environment: Vec<CString>) -> Option<Self> {
        let target = environment.pop()?;
        let target = value(&target, TARGET_VARIABLE)?;
        let (looked, program) = match target.strip_prefix(PIPE_ONLY) {
            Some(program) => (Looked::PipeOnly, program),
            None => (Looked::MayTouch, target.strip_prefix(MAY_TOUCH)?),
        };
        let program = PathBuf::from(OsStr::from_bytes(program));
        let preload = environment.pop_if(|last| value(last, SESSION_VARIABLE).is_none());
        let session = environment.pop()?;
        let directory = directory_of(value(&session, SESSION_VARIABLE)?)?;
        let directory = Path::new(OsStr::from_bytes(directory)).to_owned();
        let carried = match preload {
            Some(preload) => {
                value(&preload, PRELOAD_VARIABLE)?;
                vec![session, preload]
            }
            None => Vec::new(),
        };
        Some(Self {
            name: program.file_name()?.to_owned(),
            environment,
            argv,
            session: read_session(&directory.join(SESSION_FILE)),
            looked: Some(looked),
            carried,
            program,
        })
    }

    /// Becomes the real program, exactly as the shell set it up. Returns only on failure, with a
    /// shell's exit status for it.
    #[must_use]
    pub fn run_here(&self) -> i32 {
        let argv: Vec<CString> = self.argv.iter().filter_map(|a| c_string(a.clone())).collect();
        let Some(program) = c_string(self.program.clone().into_os_string()) else { return 126 };
        let error = self.exec(&program, &argv);
        if error.raw_os_error() == Some(nix::libc::ENOEXEC) {
            return self.run_as_script(argv);
        }
        let status = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
        process::complain(status, &format!("{}: {error}", self.program.display()))
    }

    /// Runs a file without `#!` by sh, as every shell does when execve(2) refuses it.
    fn run_as_script(&self, mut argv: Vec<CString>) -> i32 {
        let Some(program) = c_string(self.program.clone().into_os_string()) else { return 126 };
        argv.splice(..argv.len().min(1), [c"sh".to_owned(), program]);
        let error = self.exec(c"/bin/sh", &argv);
        process::complain(126, &format!("{}: {error}", self.program.display()))
    }

    /// Executes with the appended variables; without them if the environment is too long.
    fn exec(&self, program: &CStr, argv: &[CString]) -> io::Error {
        let environment: Vec<CString> =
            self.environment.iter().chain(&self.carried).cloned().collect();
        let error = process::exec(program, argv, &environment);
        match error.raw_os_error() {
            Some(nix::libc::E2BIG) => process::exec(program, argv, &self.environment),
            _ => error,
        }
    }
}

/// Returns true if the words may be meant for [`become_shell`].
pub fn is_for_shell(words: &[OsString]) -> bool {
    words.get(1).is_some_and(|word| word.as_bytes() == AS_SHELL.to_bytes())
}

/// Becomes a shell for the hook (system(3), popen(3)), with the given text, and the session's
/// variables appended to the environment. `None` when the words are not such a request; otherwise
/// the exit status of a failure.
#[must_use]
pub fn become_shell(words: &[OsString]) -> Option<i32> {
    const SHELL: &CStr = c"/bin/sh";
    let [_, _, session, preload, text] = words else { return None };
    let carried: Vec<CString> =
        [session, preload].into_iter().filter_map(|word| c_string(word.clone())).collect();
    let names = [SESSION_VARIABLE, PRELOAD_VARIABLE];
    let are_ours = carried
        .iter()
        .zip(names)
        .filter(|(variable, name)| value(variable, name).is_some())
        .count()
        == 2;
    if !are_ours {
        return None;
    }
    let argv = [c"sh".to_owned(), c"-c".to_owned(), c_string(text.clone())?];
    let environment = process::environment();
    let hooked: Vec<CString> = environment.iter().chain(&carried).cloned().collect();
    let mut error = process::exec(SHELL, &argv, &hooked);
    if error.raw_os_error() == Some(nix::libc::E2BIG) {
        error = process::exec(SHELL, &argv, &environment);
    }
    // As in system(3).
    Some(process::complain(127, &format!("/bin/sh: {error}")))
}

/// Makes `NAME=VALUE`.
fn variable(name: &str, value: &OsStr) -> Option<CString> {
    CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).ok()
}

/// The value, if the variable has this name.
fn value<'v>(variable: &'v CStr, name: &str) -> Option<&'v [u8]> {
    variable.to_bytes().strip_prefix(name.as_bytes())?.strip_prefix(b"=")
}

fn c_string(word: OsString) -> Option<CString> {
    CString::new(word.into_vec()).ok()
}

/// The first executable of that name on PATH that is not a shim. Sessions can be nested, so that a
/// shim is recognized by the file that it leads to, not by its directory.
fn real_program(name: &OsStr, own_directory: &Path) -> Option<PathBuf> {
    let ourselves = fs::metadata("/proc/self/exe").ok()?;
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    std::env::split_paths(&path).filter(|d| d != own_directory).find_map(|directory| {
        let directory =
            if directory.as_os_str().is_empty() { PathBuf::from(".") } else { directory };
        let candidate = directory.join(name);
        let meta = fs::metadata(&candidate).ok()?;
        let is_shim = (meta.dev(), meta.ino()) == (ourselves.dev(), ourselves.ino());
        (meta.is_file() && meta.mode() & 0o111 != 0 && !is_shim).then_some(candidate)
    })
}

/// Reads a session file. Its writer decides what is executed, so the file and every directory of
/// its path must belong to root or this user, and be writable by no other. An inherited variable
/// (`sudo -E`) may name another user's file.
fn read_session(file: &Path) -> Option<StageSession> {
    let mut bytes = Vec::new();
    let opened = trusted_path::open_file(file, rustix::process::geteuid().as_raw()).ok()?;
    (&opened.file).read_to_end(&mut bytes).ok()?;
    let message = SessionFile::decode(bytes.as_slice()).ok()?;
    Some(StageSession {
        id: message.session,
        socket: PathBuf::from(OsString::from_vec(message.socket.to_vec())),
        always_enlist: message.always_enlist,
        prefixes: fs_mapper::Prefixes::decode(&message.prefixes)?,
        trace: message.trace,
    })
}
