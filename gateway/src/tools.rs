//! Same tools (design §5, rule 3): checks if an executor's command equals the one that this machine
//! would have run. Equal files are equal tools; otherwise the version lines are compared, by the
//! annotation's policy.
//!
//! None of the user's own programs is executed for that, as planning and `posh explain` must have
//! no effects: only a program that nobody but root can have written is asked for its version. Other
//! programs' versions are unknown.
//!
//! Invariant: the gateway's own thread accesses no directory of PATH and no program, wherever they
//! seem to lie: a link may lead to a mount that hangs, or whose server answers a shell but not the
//! gateway. `Shares` makes the accesses, and a missing answer in time means unknown.

use std::{
    collections::{HashMap, HashSet},
    ffi::OsStr,
    fs::{self, File, Metadata},
    io::{self, Read as _},
    os::unix::{fs::MetadataExt, process::CommandExt as _},
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nix::libc;
use posh_annotations::ToolVersion;
use posh_proto::{
    PROTOCOL_VERSION,
    executor::{
        Descriptor, EnvVar, Outlet, RunInput, RunSpec, Stage, descriptor::Source, run_input,
        run_output,
    },
    rule::{self, Rule},
};
use posh_reach::{Allowance, open_files};
use sha2::{Digest, Sha256};
use tokio::{process::Child, runtime::Handle, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;

use crate::{
    executors::ExecutorConnection,
    model::{LocalReason, ReasonKind},
    shares::{Shares, Unanswered},
};

/// Timeout for a tool's version line, after which it has none; also for reading its file, after
/// which it is unknown.
const VERSION_TIMEOUT: Duration = Duration::from_secs(2);

/// Limits on the output read, and on its first line.
const VERSION_BYTES: usize = 4096;
const VERSION_CHARS: usize = 256;

/// Limit on the size of compared programs: reading a larger one would delay a plan by half a
/// second.
const PROGRAM_BYTES: u64 = 256 << 20;

/// Size of a read.
const BLOCK_BYTES: usize = 64 << 10;

/// Limit on cached hashes and versions, after which the cache is cleared.
const MOST_FILES: usize = 4096;

/// Owner of programs that may be executed here.
const ROOT: u32 = 0;

/// Cache of this machine's own tools, by file.
#[derive(Debug, Default)]
pub struct LocalTools {
    hashes: Arc<Mutex<HashMap<FileStamp, [u8; 32]>>>,
    versions: Mutex<HashMap<FileStamp, String>>,
    files: Shares,
}

/// Identity of a file's content.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct FileStamp {
    path: PathBuf,
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileStamp {
    fn of(path: &Path, about: &Metadata) -> Self {
        Self {
            path: path.to_owned(),
            device: about.dev(),
            inode: about.ino(),
            size: about.size(),
            modified: (about.mtime(), about.mtime_nsec()),
            changed: (about.ctime(), about.ctime_nsec()),
        }
    }
}

impl LocalTools {
    /// Checks that the connection's command of that name may replace `program`.
    ///
    /// # Errors
    /// A sentence for explain.
    pub async fn same(
        &self,
        executor: &str,
        connection: &ExecutorConnection,
        name: &str,
        program: &Path,
        policy: ToolVersion,
    ) -> Result<(), LocalReason> {
        let tool = connection.tools.get(name).filter(|t| t.found);
        let tool = tool.ok_or_else(|| {
            ReasonKind::Executor.because(format!("{name} is not installed on {executor}"))
        })?;
        let any = policy == ToolVersion::Any || !rule::holds(Rule::Tools);
        if any || self.hash(program).await.is_some_and(|hash| hash == *tool.sha256) {
            return Ok(());
        }
        let Some(here) = self.version(program).await else {
            return Err(ReasonKind::Executor.because(format!(
                "{name} on {executor} is another file than {}, whose version is not asked for: \
                 others than root can change it, or it does not answer",
                program.display()
            )));
        };
        let there = remote_version(connection, name).await;
        let there = there.map_err(|why| ReasonKind::Executor.because(why.to_string()))?;
        let agrees = match policy {
            ToolVersion::Same => here == there,
            _ => major(&here) == major(&there),
        };
        if agrees && !here.is_empty() {
            Ok(())
        } else {
            Err(ReasonKind::Executor.because(format!(
                "{name} on {executor} is another version ({there:?}, here {here:?})"
            )))
        }
    }

    async fn hash(&self, program: &Path) -> Option<[u8; 32]> {
        let (hashes, file) = (Arc::clone(&self.hashes), program.to_owned());
        // After a timeout, the hash is known the next time.
        let hash = self
            .files
            .ask(directory_of(program), VERSION_TIMEOUT, move || hash_of(&file, &hashes))
            .await;
        hash.ok().flatten()
    }

    /// Version line of a program; `None` if others than root can have written it, so it is not
    /// executed, or if its directory does not answer.
    async fn version(&self, program: &Path) -> Option<String> {
        let file = program.to_owned();
        let look = move || {
            let found = trusted_path::open_file(&file, ROOT).ok()?;
            Some((FileStamp::of(&file, &found.file.metadata().ok()?), found.path))
        };
        let (stamp, path) =
            self.files.ask(directory_of(program), VERSION_TIMEOUT, look).await.ok()??;
        if let Some(known) =
            self.versions.lock().unwrap_or_else(PoisonError::into_inner).get(&stamp)
        {
            return Some(known.clone());
        }
        let line = self.first_line_of_version(path, program).await?;
        keep(&self.versions, stamp, line.clone());
        Some(line)
    }

    /// Executes a file under the user's name for it. The environment is not the user's: the user's
    /// variables could make a script of root's, or the loader, execute the user's files. `None` if
    /// its directory does not answer.
    async fn first_line_of_version(&self, file: PathBuf, name: &Path) -> Option<String> {
        let mut command = std::process::Command::new(file);
        command.arg0(name).arg("--version").current_dir("/").env_clear();
        command
            .envs([("LC_ALL", "C"), ("PATH", "/usr/bin:/bin")])
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        command.stdout(Stdio::piped());
        open_files::give_back(&mut command);
        let mut command = tokio::process::Command::from(command);
        let runtime = Handle::current();
        // Returns after the exec.
        let spawn = move || -> io::Result<Child> {
            let _its_tasks = runtime.enter();
            command.kill_on_drop(true).spawn()
        };
        let child = self.files.ask(directory_of(name), VERSION_TIMEOUT, spawn).await.ok()?;
        let output = async { child.ok()?.wait_with_output().await.ok() };
        let output = tokio::time::timeout(VERSION_TIMEOUT, output).await.ok().flatten();
        Some(output.map_or_else(String::new, |output| first_line(&output.stdout)))
    }

    /// First program of a name on a PATH, except `shims`.
    ///
    /// # Errors
    /// A directory of PATH, or a link's target, does not answer.
    pub async fn on_path(
        &self,
        path: Option<&OsStr>,
        name: &str,
        shims: HashSet<PathBuf>,
    ) -> Result<Option<PathBuf>, Unanswered> {
        let path = path.map_or_else(|| "/usr/local/bin:/usr/bin:/bin".into(), OsStr::to_owned);
        let (place, name) = (PathBuf::from(&path), name.to_owned());
        self.files.ask(&place, VERSION_TIMEOUT, move || program_on_path(&path, &name, &shims)).await
    }
}

/// Directory of a program: its answers stand for all programs in it.
fn directory_of(program: &Path) -> &Path {
    program.parent().unwrap_or(program)
}

fn hash_of(program: &Path, hashes: &Mutex<HashMap<FileStamp, [u8; 32]>>) -> Option<[u8; 32]> {
    let file = trusted_path::open_regular(program).ok()?;
    let stamp = FileStamp::of(program, &file.metadata().ok()?);
    if stamp.size > PROGRAM_BYTES {
        return None;
    }
    if let Some(hash) = hashes.lock().unwrap_or_else(PoisonError::into_inner).get(&stamp) {
        return Some(*hash);
    }
    let hash = digest(file).ok()?;
    keep(hashes, stamp, hash);
    Some(hash)
}

fn keep<T>(all: &Mutex<HashMap<FileStamp, T>>, stamp: FileStamp, known: T) {
    let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
    if all.len() >= MOST_FILES {
        all.clear();
    }
    all.insert(stamp, known);
}

/// SHA-256 of a file that may be growing.
fn digest(file: File) -> io::Result<[u8; 32]> {
    let (mut file, mut digest, mut block) =
        (file.take(PROGRAM_BYTES + 1), Sha256::new(), vec![0; BLOCK_BYTES]);
    let mut total = 0;
    loop {
        let count = file.read(&mut block)?;
        total += count as u64;
        match count {
            0 => return Ok(digest.finalize().into()),
            _ if total > PROGRAM_BYTES => return Err(io::ErrorKind::FileTooLarge.into()),
            _ => digest.update(&block[..count]),
        }
    }
}

fn program_on_path(path: &OsStr, name: &str, shims: &HashSet<PathBuf>) -> Option<PathBuf> {
    let mut found = std::env::split_paths(path).map(|directory| directory.join(name));
    found.find(|file| {
        let is_program = fs::metadata(file).is_ok_and(|m| m.is_file() && m.mode() & 0o111 != 0);
        is_program && !fs::read_link(file).is_ok_and(|target| shims.contains(&target))
    })
}

/// Reason why the version of a program on a server is unknown.
#[derive(Debug, thiserror::Error)]
#[error("cannot learn the version of {program}: {why}")]
struct NoVersion {
    program: String,
    why: NoAnswer,
}

/// Reason why a server did not run a program to tell its version.
#[derive(Debug, thiserror::Error)]
enum NoAnswer {
    /// The call failed.
    #[error("{}", .0.message())]
    Failed(tonic::Status),
    /// The executor refused, with the reason.
    #[error("{0}")]
    Refused(String),
}

/// Version line of a program on the server, requested once per connection: a run with the rights
/// and the confinement of any command.
async fn remote_version(connection: &ExecutorConnection, name: &str) -> Result<String, NoVersion> {
    if let Some(known) =
        connection.versions.lock().unwrap_or_else(PoisonError::into_inner).get(name)
    {
        return Ok(known.clone());
    }
    let said = tokio::time::timeout(VERSION_TIMEOUT, run_version(connection, name)).await;
    let said = said.unwrap_or_else(|_| Ok(Vec::new()));
    let line = first_line(&said.map_err(|why| NoVersion { program: name.to_owned(), why })?);
    let mut versions = connection.versions.lock().unwrap_or_else(PoisonError::into_inner);
    versions.insert(name.to_owned(), line.clone());
    Ok(line)
}

async fn run_version(connection: &ExecutorConnection, name: &str) -> Result<Vec<u8>, NoAnswer> {
    let spec = version_spec(name);
    let allowance = Allowance::of(&spec);
    let spec = RunInput { kind: Some(run_input::Kind::Spec(spec)) };
    // Keep it open until the run has ended: closing it may look like a lost client.
    let (input, messages) = mpsc::channel(1);
    input.try_send(spec).expect("there is room for one");
    let mut outputs = connection
        .client
        .clone()
        .run(ReceiverStream::new(messages), allowance)
        .await
        .map_err(NoAnswer::Failed)?;
    let mut said = Vec::new();
    while let Some(output) = outputs.message().await.map_err(NoAnswer::Failed)? {
        match output.kind {
            Some(run_output::Kind::Chunk(chunk)) => said.extend_from_slice(&chunk.data),
            Some(run_output::Kind::Rejected(refusal)) => {
                return Err(NoAnswer::Refused(refusal.message));
            }
            Some(run_output::Kind::Finished(_)) => break,
            _ => {}
        }
        if said.len() >= VERSION_BYTES {
            break;
        }
    }
    Ok(said)
}

/// Specification of `NAME --version` without mounts; only its output is read.
fn version_spec(name: &str) -> RunSpec {
    let descriptor = |fd, source| Descriptor { fd, source: Some(source) };
    let null = libc::O_RDWR.cast_unsigned();
    let stage = Stage {
        program: name.to_owned(),
        argv: vec![name.to_owned().into(), "--version".into()],
        env: vec![EnvVar { name: "LC_ALL".into(), value: "C".into() }],
        cwd: "/".into(),
        umask: 0o022,
        descriptors: vec![
            descriptor(0, Source::NullFlags(null)),
            descriptor(1, Source::PipeWrite(1)),
            descriptor(2, Source::NullFlags(null)),
        ],
        ..Stage::default()
    };
    RunSpec {
        // A run ID is too short for some names.
        run_id: "version".to_owned(),
        protocol: PROTOCOL_VERSION,
        stages: vec![stage],
        pipes: vec![1],
        outlets: vec![Outlet {
            stream: 2,
            sources: vec![1],
            initial_credit_bytes: VERSION_BYTES as u64,
        }],
        ..RunSpec::default()
    }
}

/// The first line that is not blank.
fn first_line(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said);
    let line = text.lines().find(|line| !line.trim().is_empty());
    line.unwrap_or_default().chars().take(VERSION_CHARS).collect()
}

/// Version line up to its first number: `sort (GNU coreutils) 9.1` → `sort (GNU coreutils) 9`.
fn major(line: &str) -> &str {
    let digits = line.find(|c: char| c.is_ascii_digit()).unwrap_or(line.len());
    let end = line[digits..].find(|c: char| !c.is_ascii_digit()).map_or(line.len(), |n| digits + n);
    &line[..end]
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn major_versions_keep_the_tools_name() {
        assert_eq!(major("sort (GNU coreutils) 9.1"), "sort (GNU coreutils) 9");
        assert_ne!(major("grep (GNU grep) 3.8"), major("grep (BSD grep) 3.8"));
        assert_eq!(major("no number"), "no number");
    }

    fn script(path: &Path, text: &str) {
        fs::write(path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// A program that others than root can have made says nothing of itself: it would be executed.
    #[tokio::test]
    async fn a_program_of_the_user_s_own_is_not_executed() {
        let top = tempfile::tempdir().unwrap();
        let (program, ran) = (top.path().join("sort"), top.path().join("ran"));
        script(&program, &format!("#!/bin/sh\necho $0 >> {}\necho sort 1.0\n", ran.display()));
        // Where these tests are root's: others can write the file, or its directory.
        fs::set_permissions(&program, fs::Permissions::from_mode(0o775)).unwrap();
        let writable = top.path().join("bin");
        fs::create_dir(&writable).unwrap();
        script(&writable.join("sort"), &fs::read_to_string(&program).unwrap());
        fs::set_permissions(&writable, fs::Permissions::from_mode(0o777)).unwrap();
        let tools = LocalTools::default();
        for program in [program, writable.join("sort")] {
            assert_eq!(tools.version(&program).await, None, "{program:?}");
            assert!(tools.hash(&program).await.is_some());
        }
        assert!(!ran.exists());
        let of_the_system = tools.version(Path::new("/usr/bin/sort")).await;
        assert!(of_the_system.is_none_or(|line| line.contains("sort")), "by its own name");
    }

    #[test]
    fn a_program_or_a_directory_that_does_not_answer_holds_up_nobody_else() {
        let top = tempfile::tempdir().unwrap();
        let mute = top.path().to_owned();
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
        let work = async move {
            let tools = LocalTools::default();
            let (answer, answered) = std::sync::mpsc::channel::<()>();
            // Somebody looked at a program there, and waits for ever.
            let look =
                tools.files.ask(&mute, Duration::from_millis(10), move || answered.recv()).await;
            assert!(look.is_err());
            assert_eq!(tools.hash(&mute.join("sort")).await, None);
            assert_eq!(tools.version(&mute.join("sort")).await, None);
            let path = mute.as_os_str();
            assert_eq!(
                tools.on_path(Some(path), "sort", HashSet::new()).await,
                Err(Unanswered::Earlier)
            );
            let other = tools.on_path(None, "sort", HashSet::new()).await.unwrap().unwrap();
            assert!(tools.hash(&other).await.is_some());
            drop(answer);
        };
        runtime.block_on(runtime.spawn(work)).unwrap();
    }

    #[tokio::test]
    async fn a_program_is_hashed_anew_when_it_has_changed_and_only_up_to_a_bound() {
        let top = tempfile::tempdir().unwrap();
        let (program, other) = (top.path().join("sort"), top.path().join("other"));
        script(&program, "one");
        let tools = LocalTools::default();
        let first = tools.hash(&program).await.unwrap();
        assert_eq!(first[..], Sha256::digest("one")[..]);
        // Of the same size and time.
        let time = fs::metadata(&program).unwrap().modified().unwrap();
        script(&other, "two");
        File::options().write(true).open(&other).unwrap().set_modified(time).unwrap();
        fs::rename(&other, &program).unwrap();
        assert_eq!(tools.hash(&program).await.unwrap()[..], Sha256::digest("two")[..]);
        let large = vec![7; 3 * BLOCK_BYTES + 5];
        fs::write(&program, &large).unwrap();
        assert_eq!(tools.hash(&program).await.unwrap()[..], Sha256::digest(&large)[..]);
        File::options().write(true).open(&program).unwrap().set_len(PROGRAM_BYTES + 1).unwrap();
        assert_eq!(tools.hash(&program).await, None);
    }
}
