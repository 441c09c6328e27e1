//! Policy: decides which commands may run, and which parts of the mounts each may access, by this
//! server's own analysis of the command's words, whatever the gateway says. A gateway that does not
//! keep to its annotations (`tar --to-command`, `sort --compress-program`, LD_PRELOAD) is refused
//! before any file is accessed.
//!
//! Path resolution is left to the runner, which alone can see the files (`fence`, `paths`).

use std::{
    collections::HashSet,
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::{Component, Path, PathBuf},
};

use bytes::Bytes;
use posh_annotations::{
    Because, CurrentDir, FileKind, GuardTest, Invocation, Library, TerminalUse, Unknown,
};
use posh_proto::{
    executor::{ClientFile, EnvVar, Guard, Stage, descriptor::Source, guard::Test, rejected::Kind},
    rule::{self, Rule},
};

use crate::{
    config::{Commands, Confinement},
    error::Refusal,
    runner::{
        check_file,
        wire::{Access, Fence, Grant},
    },
    tools,
};

/// Variables that matter to every command, and so come with every run.
const COMMON_ENVIRONMENT: [&str; 7] =
    ["LANG", "LANGUAGE", "LC_*", "POSIXLY_CORRECT", "TZ", "HOME", "TERM"];

/// Variables that make a command start or load another program or library than the named one. No
/// run has them, not even one of an unknown command.
const LOADING: [&str; 14] = [
    "LD_*",
    "GLIBC_TUNABLES",
    "GCONV_PATH",
    "LOCPATH",
    "BASH_ENV",
    "ENV",
    "BASH_FUNC_*",
    "SHELLOPTS",
    "BASHOPTS",
    "PS4",
    "IFS",
    "PERL5*",
    "PYTHON*",
    "MALLOC_*",
];

/// The one file of the system that the workstation may replace for every command: its time zone.
const LOCALTIME: &str = "/etc/localtime";

/// Argument that asks a program for its version.
const VERSION: &[u8] = b"--version";

/// Most bytes of one client file, as a gateway sends it, and of all those of a run.
const CLIENT_FILE_BYTES: usize = 256 << 10;
const CLIENT_FILES_BYTES: usize = 1 << 20;

/// Prefix of client files in the user's home.
const IN_HOME: &str = "~/";

/// Decides about commands and their access.
pub struct Policy {
    commands: Commands,
    library: Library,
    /// Rules of exactness are switched off in a debug build: gateways then send commands that
    /// annotations keep local.
    is_lax: bool,
}

/// Divides directories of annotations into those in which nobody but root and this process's user
/// can have put anything, and sentences about the others: annotations say what may run.
fn trusted_directories(directories: &[PathBuf]) -> (Vec<PathBuf>, Vec<String>) {
    // In a user namespace without root, what is root's can't be told from what is others'.
    if !crate::runner::ids::are_whole() {
        return (directories.to_vec(), Vec::new());
    }
    let user = nix::unistd::geteuid().as_raw();
    let why = |directory: &PathBuf| -> Option<String> {
        if let Err(why) = trusted_path::directory(directory, user) {
            return (!why.is_missing()).then(|| why.to_string());
        }
        let entries = std::fs::read_dir(directory).ok()?.flatten();
        let mut files = entries.map(|entry| entry.path()).filter(|path| {
            path.extension().is_some_and(|extension| extension == "yaml") && path.is_file()
        });
        files.find_map(|file| trusted_path::open_file(&file, user).err()).map(|it| it.to_string())
    };
    let (mut trusted, mut untrusted) = (Vec::new(), Vec::new());
    for directory in directories {
        match why(directory) {
            None => trusted.push(directory.clone()),
            Some(why) => untrusted
                .push(format!("the annotations in {} do not count: {why}", directory.display())),
        }
    }
    (trusted, untrusted)
}

/// The words of a command don't tell which files it accesses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotUnderstood {
    /// No annotation covers them.
    #[error(transparent)]
    Unknown(#[from] Unknown),
    /// It needs the network. Names the command.
    #[error("{0}: it needs the network")]
    Network(String),
    /// A file that it reads names its files. Names the command.
    #[error("{0}: its files are named in a file")]
    ListFile(String),
}

impl Policy {
    /// Loads the server's annotations; the second value is their mistakes, one sentence each.
    pub fn new(confinement: &Confinement) -> (Self, Vec<String>) {
        let (trusted, untrusted) = trusted_directories(&confinement.annotations);
        let (mut library, mistakes) = Library::load(&trusted);
        // `CheapThroughMount` is about speed, not about semantics; gateways create names on
        // executors, too.
        library.ignore_reasons(vec![Because::CheapThroughMount]);
        let is_lax = Rule::ALL.iter().any(|rule| !rule::holds(*rule));
        let policy = Self { commands: confinement.commands.clone(), library, is_lax };
        let mistakes = mistakes.iter().map(ToString::to_string);
        (policy, untrusted.into_iter().chain(mistakes).collect())
    }

    /// The current annotations with the commands of `confinement`, whose own annotations can't be
    /// read in time.
    #[must_use]
    pub fn with_commands_of(&self, confinement: &Confinement) -> Self {
        Self {
            commands: confinement.commands.clone(),
            library: self.library.clone(),
            is_lax: self.is_lax,
        }
    }

    /// Returns true if a command of that name may run at all.
    pub fn allows(&self, name: &str) -> bool {
        match &self.commands {
            Commands::Annotated => self.knows(name),
            Commands::Listed(names) => names.contains(name),
            Commands::Any => true,
        }
    }

    /// Access of a run's stages, in their order, or the refusal of one. Each stage gets the guards
    /// of its annotation, whatever the gateway has sent.
    pub fn fences(
        &self,
        stages: &mut [Stage],
        client_files: &[ClientFile],
    ) -> Result<Vec<Fence>, Refusal> {
        let mut listed = vec![PathBuf::from(LOCALTIME)];
        let fences: Vec<Fence> = stages
            .iter_mut()
            .map(|stage| self.fence(stage, &mut listed).map_err(|refusal| refusal.at(stage.id)))
            .collect::<Result<_, _>>()?;
        // Files that other commands read are not annotated.
        let is_open = self.is_lax || self.commands == Commands::Any;
        let is_described = !is_open && fences.iter().all(|fence| !fence.everything);
        client_files.iter().try_for_each(|file| check_client_file(file, &listed, is_described))?;
        check_size(client_files)?;
        Ok(fences)
    }

    /// Adds the configuration files that the command reads to `listed`.
    fn fence(&self, stage: &mut Stage, listed: &mut Vec<PathBuf>) -> Result<Fence, Refusal> {
        check_name(stage)?;
        let name = &stage.program;
        if !self.allows(name) {
            return Err(refuse(format!("this executor does not run {name}")));
        }
        check_variables(stage)?;
        if let Some(variable) = stage.env.iter().find(|variable| is_loading(&variable.name)) {
            return Err(refuse_variable(name, &variable.name));
        }
        check_home(stage)?;
        if asks_for_version(stage) {
            return Ok(Fence::default());
        }
        let everything = Fence { everything: true, changes: true, ..Fence::default() };
        match self.read(stage) {
            Ok(invocation) => {
                listed.extend(
                    invocation.client_files.iter().filter_map(|name| client_path(stage, name)),
                );
                let own_guards = add_guards(stage, &invocation);
                let grants = grants(&invocation);
                let changes = invocation.side_effects
                    || grants.iter().any(|grant| grant.access() != Access::Read);
                Ok(Fence {
                    everything: false,
                    grants,
                    starts: starts(&invocation),
                    changes,
                    own_guards,
                })
            }
            Err(_) if self.is_lax || self.commands == Commands::Any => Ok(everything),
            // Listed by the administrator, although not annotated.
            Err(_) if !self.knows(name) => Ok(everything),
            Err(refusal) => Err(refusal),
        }
    }

    /// Returns true if there is an annotation for that name.
    pub fn knows(&self, name: &str) -> bool {
        self.library.commands().any(|known| known == name)
    }

    /// Analyses the words of a command.
    ///
    /// # Errors
    /// They don't tell which files it accesses.
    pub fn understand(
        &self,
        name: &str,
        argv: &[OsString],
        environment: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<Invocation, NotUnderstood> {
        let invocation = self.library.classify(name, argv, environment)?;
        if invocation.needs_network {
            return Err(NotUnderstood::Network(invocation.command));
        }
        if invocation.files.iter().any(|file| file.kind == FileKind::ListFile) {
            return Err(NotUnderstood::ListFile(invocation.command));
        }
        Ok(invocation)
    }

    /// Analyses a command by this server's annotations.
    fn read(&self, stage: &Stage) -> Result<Invocation, Refusal> {
        let argv: Vec<OsString> =
            stage.argv.iter().map(|word| OsString::from_vec(word.to_vec())).collect();
        let lookup = |name: &str| {
            let found = stage.env.iter().find(|variable| variable.name == name.as_bytes())?;
            Some(OsStr::from_bytes(&found.value).to_owned())
        };
        let invocation = self
            .understand(&stage.program, &argv, &lookup)
            .map_err(|why| refuse(format!("this executor does not run it: {why}")))?;
        if invocation.terminal == TerminalUse::Interactive && has_terminal(stage) {
            return Err(refuse(format!(
                "this executor does not run {}: it may ask on a terminal",
                invocation.command
            )));
        }
        let known = |name: &[u8]| {
            is_one_of(name, &COMMON_ENVIRONMENT) || is_one_of(name, &invocation.environment)
        };
        match stage.env.iter().find(|variable| !known(&variable.name)) {
            Some(variable) => Err(refuse_variable(&invocation.command, &variable.name)),
            None => Ok(invocation),
        }
    }
}

/// `NAME --version` with only the common variables: gateways compare the output with their own
/// program's. No annotation says what it accesses, and it is given nothing.
fn asks_for_version(stage: &Stage) -> bool {
    let is_common = |name: &[u8]| is_one_of(name, &COMMON_ENVIRONMENT);
    matches!(
        &stage.argv[..],
        [name, word] if *name == stage.program.as_bytes() && word[..] == *VERSION
    ) && stage.env.iter().all(|variable| is_common(&variable.name))
}

/// Adds the guards that keep files of an export from starting programs or leading elsewhere. A
/// gateway that keeps to its annotations has sent equal ones, and each test is made once. Returns
/// their indices among the stage's guards.
fn add_guards(stage: &mut Stage, invocation: &Invocation) -> Vec<u32> {
    let mut places = Vec::new();
    for guard in &invocation.guards {
        let test = match &guard.test {
            GuardTest::Exists => Test::Exists,
            GuardTest::Executable => Test::Executable,
            GuardTest::AllExist => Test::AllExist,
            GuardTest::SettingsAllowed { .. } => Test::SettingsAllowed,
            // This decides if the result equals the workstation's: only the gateway knows how its
            // mount shows files.
            GuardTest::SettingRequired(_) => continue,
        };
        let files = guard.files.iter().filter_map(|file| file_of_guard(stage, file));
        let own = Guard {
            directory: invocation
                .working_dir
                .as_ref()
                .map_or(&[][..], |path| path.as_bytes())
                .to_vec()
                .into(),
            below: guard.below.clone().unwrap_or_default(),
            files: files.collect(),
            test: test.into(),
            settings: guard.test.patterns().cloned().collect(),
            reason: guard.reason.clone(),
            ..Guard::default()
        };
        if own.files.is_empty() {
            continue;
        }
        let place = stage.guards.iter().position(|guard| *guard == own).unwrap_or_else(|| {
            stage.guards.push(own);
            stage.guards.len() - 1
        });
        places.extend(u32::try_from(place));
    }
    places
}

/// The home is the command's `HOME`; without one the command looks for no such file.
fn file_of_guard(stage: &Stage, file: &str) -> Option<Bytes> {
    let Some(below) = file.strip_prefix("~/") else { return Some(file.to_owned().into()) };
    let home = stage.env.iter().find(|variable| variable.name == b"HOME"[..])?;
    let path = Path::new(OsStr::from_bytes(&home.value)).join(below);
    path.is_absolute().then(|| path.into_os_string().into_vec().into())
}

/// With `=` in its name, a variable would be another one to the command than to these checks; of
/// two with one name, each may use another one.
fn check_variables(stage: &Stage) -> Result<(), Refusal> {
    let mut names = HashSet::new();
    for EnvVar { name, .. } in &stage.env {
        if name.is_empty() || name.iter().any(|byte| matches!(byte, b'=' | 0)) {
            return Err(refuse(format!(
                "{:?} is no name of a variable",
                String::from_utf8_lossy(name)
            )));
        }
        if !names.insert(name) {
            return Err(refuse(format!(
                "the variable {} comes twice",
                String::from_utf8_lossy(name)
            )));
        }
    }
    Ok(())
}

/// Guards look in the command's `HOME`: a relative one would be another directory to the command.
fn check_home(stage: &Stage) -> Result<(), Refusal> {
    let home = stage.env.iter().find(|variable| variable.name == b"HOME"[..]);
    let is_plain = home.is_none_or(|home| {
        let mut parts = Path::new(OsStr::from_bytes(&home.value)).components();
        parts.next() == Some(Component::RootDir)
            && parts.all(|part| matches!(part, Component::Normal(_)))
    });
    if is_plain {
        return Ok(());
    }
    Err(refuse(format!("HOME of {} is no plain absolute path", stage.program)))
}

/// The program is a name. argv[0] may be anything (`exec -a`) but the name of another program:
/// multi-call binaries choose by it.
fn check_name(stage: &Stage) -> Result<(), Refusal> {
    let name = &stage.program;
    if name.is_empty() || name.contains('/') {
        return Err(refuse(format!("{name:?} is not the name of a command")));
    }
    let called = stage.argv.first().and_then(|word| Path::new(OsStr::from_bytes(word)).file_name());
    let called = called.unwrap_or_default().to_string_lossy();
    let called = called.strip_prefix('-').unwrap_or(&called);
    // git runs `git-log` as `git log`, even if there is no such program.
    let is_part = called.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with('-'));
    if called != name && (is_part || tools::find(called).is_some()) {
        return Err(refuse(format!(
            "{name} would be called by the name of another program, {called}"
        )));
    }
    Ok(())
}

/// The path that an annotation's name of a client file has for a command; `None` below a home that
/// it does not know.
fn client_path(stage: &Stage, name: &str) -> Option<PathBuf> {
    let Some(rest) = name.strip_prefix(IN_HOME) else { return Some(name.into()) };
    let home = stage.env.iter().find(|variable| variable.name == b"HOME"[..])?;
    Some(Path::new(OsStr::from_bytes(&home.value)).join(rest))
}

/// Client files stay in memory as long as their view.
fn check_size(client_files: &[ClientFile]) -> Result<(), Refusal> {
    let total: usize = client_files.iter().map(|file| file.content.len()).sum();
    match client_files.iter().find(|file| file.content.len() > CLIENT_FILE_BYTES) {
        Some(file) => {
            let path = Path::new(OsStr::from_bytes(&file.path)).display();
            Err(refuse(format!("{path} is larger than {CLIENT_FILE_BYTES} bytes")))
        }
        None if total > CLIENT_FILES_BYTES => Err(refuse(format!(
            "the workstation's files have more than {CLIENT_FILES_BYTES} bytes"
        ))),
        None => Ok(()),
    }
}

/// A client file replaces no file of the server, and is listed by an annotation of the run's
/// commands. An unannotated command may have any.
fn check_client_file(
    file: &ClientFile,
    listed: &[PathBuf],
    is_described: bool,
) -> Result<(), Refusal> {
    let path = Path::new(OsStr::from_bytes(&file.path));
    check_file(path).map_err(|why| {
        refuse(format!("{} is not the workstation's to replace: {why}", path.display()))
    })?;
    if !is_described || listed.iter().any(|known| path == known) {
        return Ok(());
    }
    Err(refuse(format!(
        "{} is not the workstation's to replace: no command of the run reads it",
        path.display()
    )))
}

/// Access that a command needs by its words.
pub fn grants(invocation: &Invocation) -> Vec<Grant> {
    let mut grants: Vec<Grant> = Vec::new();
    for file in &invocation.files {
        let access = match file.kind {
            FileKind::InputFile | FileKind::InputDir | FileKind::ListFile => Access::Read,
            FileKind::OutputFile => Access::Output,
            // A command does not remove its working directory.
            FileKind::OutputDir if invocation.working_dir.as_ref() == Some(&file.path) => {
                Access::Within
            }
            FileKind::OutputDir | FileKind::NewDir | FileKind::InoutFile => Access::Change,
        };
        let named = grant(file.path.as_bytes(), access);
        grants.push(Grant { no_follow: file.no_follow, opened: file.is_opened(), ..named });
    }
    let directory =
        invocation.working_dir.as_ref().map_or(&b"."[..], |directory| directory.as_bytes());
    let changes = invocation.current_dir == CurrentDir::Writes
        || (invocation.working_dir.is_some() && invocation.side_effects);
    let access = if changes { Access::Within } else { Access::Read };
    if invocation.current_dir != CurrentDir::Unused || invocation.working_dir.is_some() {
        grants.push(grant(directory, access));
    }
    if !invocation.searches_up.is_empty() {
        let up_to = invocation.searches_up.clone();
        grants.push(Grant { up_to: up_to.clone(), ..grant(directory, access) });
        // A command may update its own directories even when it only reads: git rewrites its index.
        for below in &invocation.own_directories {
            grants.push(Grant {
                up_to: up_to.clone(),
                below: below.clone(),
                ..grant(directory, Access::Within)
            });
        }
    }
    grants
}

/// Programs that a command starts, according to this server's annotations.
pub fn starts(invocation: &Invocation) -> Vec<String> {
    invocation.runs.iter().chain(&invocation.helpers).cloned().collect()
}

fn grant(path: &[u8], access: Access) -> Grant {
    Grant { path: path.to_vec(), access: access.into(), ..Grant::default() }
}

fn has_terminal(stage: &Stage) -> bool {
    stage.descriptors.iter().any(|descriptor| matches!(descriptor.source, Some(Source::Pty(_))))
}

/// Returns true if a variable can make a command start or load another program or library than the
/// named one.
pub fn is_loading(name: &[u8]) -> bool {
    is_one_of(name, &LOADING)
}

/// Matches names, or prefixes that end with `*`.
fn is_one_of<T: AsRef<str>>(name: &[u8], patterns: &[T]) -> bool {
    patterns.iter().map(AsRef::as_ref).any(|pattern| match pattern.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix.as_bytes()),
        None => name == pattern.as_bytes(),
    })
}

fn refuse(message: impl Into<String>) -> Refusal {
    Refusal::new(Kind::NotAllowed, message)
}

fn refuse_variable(command: &str, name: &[u8]) -> Refusal {
    refuse(format!("{} is no variable that {command} is given here", String::from_utf8_lossy(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_called_by_its_own_name() {
        let stage = |called: &'static str| Stage {
            program: "git".to_owned(),
            argv: vec![called.into(), "log".into(), "var".into()],
            ..Stage::default()
        };
        for called in ["git", "-git", "/usr/bin/git", "puma", "digit"] {
            assert_eq!(check_name(&stage(called)), Ok(()), "{called}");
        }
        for called in ["git-var", "-git-var", "/x/git-shell", "cat"] {
            assert_eq!(check_name(&stage(called)).unwrap_err().kind, Kind::NotAllowed, "{called}");
        }
    }

    #[test]
    fn annotations_that_others_may_write_do_not_count() {
        use std::os::unix::fs::PermissionsExt as _;
        let place = tempfile::tempdir().unwrap();
        let (directory, file) = (place.path().join("d"), place.path().join("d/x.yaml"));
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(&file, "").unwrap();
        let directories = [directory.clone(), place.path().join("none")];
        let counted = || trusted_directories(&directories).0.len();
        let set_mode = |path: &PathBuf, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        assert_eq!(counted(), 2);
        set_mode(&file, 0o666);
        assert_eq!(counted(), 1);
        set_mode(&file, 0o644);
        set_mode(&directory, 0o777);
        assert_eq!(counted(), 1);
        assert!(trusted_directories(&directories).1[0].contains("do not count"));
    }

    #[test]
    fn the_workstations_files_are_small() {
        let file = |bytes| ClientFile {
            path: "/etc/localtime".into(),
            content: vec![0; bytes].into(),
            mode: 0o644,
        };
        assert_eq!(check_size(&vec![file(CLIENT_FILE_BYTES); 4]), Ok(()));
        assert!(check_size(&[file(CLIENT_FILE_BYTES + 1)]).is_err());
        assert!(check_size(&vec![file(CLIENT_FILE_BYTES); 5]).is_err());
    }
}
