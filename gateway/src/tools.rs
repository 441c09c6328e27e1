//! Same tools (design §5, rule 3): whether an executor's command is the one that
//! this machine would have run. Equal files are equal tools; otherwise the
//! version lines are compared, by the policy of the annotation.

use std::{
    collections::{HashMap, HashSet},
    ffi::{OsStr, OsString},
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use nix::libc;
use posh_annotations::ToolVersion;
use posh_proto::{
    PROTOCOL_VERSION,
    executor::{Descriptor, EnvVar, Outlet, RunInput, RunSpec, Stage, descriptor::Source, run_input, run_output},
    rule::{self, Rule},
};
use posh_reach::Allowance;
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::aside::aside;
use crate::executors::Connection;

/// A tool that does not print its version in this time has none.
const VERSION_TIMEOUT: Duration = Duration::from_secs(2);

/// As much as is read of what it prints, and as much of its first line as anybody needs.
const VERSION_BYTES: usize = 4096;
const VERSION_CHARS: usize = 256;

/// What is known of this machine's own tools, by file.
#[derive(Debug, Default)]
pub struct LocalTools {
    hashes: Mutex<HashMap<(PathBuf, i64, u64), [u8; 32]>>,
    versions: Mutex<HashMap<PathBuf, String>>,
}

impl LocalTools {
    /// Whether `connection`'s command of that name may stand in for `program`.
    ///
    /// # Errors
    /// The sentence for explain.
    pub async fn same(
        &self,
        executor: &str,
        connection: &Connection,
        name: &str,
        program: &Path,
        policy: ToolVersion,
    ) -> Result<(), String> {
        let tool = connection.tools.get(name).filter(|t| t.found);
        let tool = tool.ok_or_else(|| format!("{name} is not installed on {executor}"))?;
        let any = policy == ToolVersion::Any || !rule::holds(Rule::Tools);
        if any || self.hash(program).is_some_and(|hash| hash == *tool.sha256) {
            return Ok(());
        }
        let (here, there) = (self.version(program).await, remote_version(connection, name).await?);
        let agrees = match policy {
            ToolVersion::Same => here == there,
            _ => major(&here) == major(&there),
        };
        if agrees && !here.is_empty() {
            Ok(())
        } else {
            Err(format!("{name} on {executor} is another version ({there:?}, here {here:?})"))
        }
    }

    fn hash(&self, program: &Path) -> Option<[u8; 32]> {
        let meta = fs::metadata(program).ok()?;
        let key = (program.to_owned(), meta.mtime(), meta.size());
        if let Some(hash) = self.hashes.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Some(*hash);
        }
        // Of a large program this takes milliseconds.
        let hash: [u8; 32] = aside(|| Some(Sha256::digest(fs::read(program).ok()?)))?.into();
        self.hashes.lock().unwrap_or_else(PoisonError::into_inner).insert(key, hash);
        Some(hash)
    }

    async fn version(&self, program: &Path) -> String {
        if let Some(known) = self.versions.lock().unwrap_or_else(PoisonError::into_inner).get(program) {
            return known.clone();
        }
        let line = first_line_of_version(program).await;
        self.versions.lock().unwrap_or_else(PoisonError::into_inner).insert(program.to_owned(), line.clone());
        line
    }
}

/// The first program of a name on a PATH that is not one of `shims`.
#[must_use]
pub fn program_on_path(path: Option<&OsStr>, name: &str, shims: &HashSet<PathBuf>) -> Option<PathBuf> {
    let path: OsString = path.map_or_else(|| "/usr/local/bin:/usr/bin:/bin".into(), OsStr::to_owned);
    let mut found = std::env::split_paths(&path).map(|directory| directory.join(name));
    found.find(|file| {
        let is_program = fs::metadata(file).is_ok_and(|m| m.is_file() && m.mode() & 0o111 != 0);
        is_program && !fs::read_link(file).is_ok_and(|target| shims.contains(&target))
    })
}

async fn first_line_of_version(program: &Path) -> String {
    let mut command = tokio::process::Command::new(program);
    command.arg("--version").env("LC_ALL", "C").stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(VERSION_TIMEOUT, command.output()).await;
    let Ok(Ok(output)) = output else { return String::new() };
    first_line(&output.stdout)
}

/// What a program there says of itself, asked once for each connection: a run with the rights and the confinement of any command.
async fn remote_version(connection: &Connection, name: &str) -> Result<String, String> {
    if let Some(known) = connection.versions.lock().unwrap_or_else(PoisonError::into_inner).get(name) {
        return Ok(known.clone());
    }
    let said = tokio::time::timeout(VERSION_TIMEOUT, run_version(connection, name)).await;
    let said = said.unwrap_or_else(|_| Ok(Vec::new()));
    let line = first_line(&said.map_err(|why| format!("cannot learn the version of {name}: {why}"))?);
    let mut versions = connection.versions.lock().unwrap_or_else(PoisonError::into_inner);
    versions.insert(name.to_owned(), line.clone());
    Ok(line)
}

async fn run_version(connection: &Connection, name: &str) -> Result<Vec<u8>, String> {
    let spec = version_spec(name);
    let allowance = Allowance::of(&spec);
    let spec = RunInput { kind: Some(run_input::Kind::Spec(spec)) };
    let words = |status: tonic::Status| status.message().to_owned();
    // Open until the run has ended: a client that has no more to say may be one that is gone.
    let (input, messages) = mpsc::channel(1);
    input.try_send(spec).map_err(|error| error.to_string())?;
    let mut outputs = connection.client.clone().run(ReceiverStream::new(messages), allowance).await.map_err(words)?;
    let mut said = Vec::new();
    while let Some(output) = outputs.message().await.map_err(words)? {
        match output.kind {
            Some(run_output::Kind::Chunk(chunk)) => said.extend_from_slice(&chunk.data),
            Some(run_output::Kind::Rejected(refusal)) => return Err(refusal.message),
            Some(run_output::Kind::Finished(_)) => break,
            _ => {}
        }
        if said.len() >= VERSION_BYTES {
            break;
        }
    }
    Ok(said)
}

/// `NAME --version` in no mount, whose output is read and nothing else.
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
        // An id has no room for every name.
        run_id: "version".to_owned(),
        protocol: PROTOCOL_VERSION,
        stages: vec![stage],
        pipes: vec![1],
        outlets: vec![Outlet { stream: 2, sources: vec![1], initial_credit_bytes: VERSION_BYTES as u64 }],
        ..RunSpec::default()
    }
}

/// The first line that says anything.
fn first_line(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said);
    let line = text.lines().find(|line| !line.trim().is_empty());
    line.unwrap_or_default().chars().take(VERSION_CHARS).collect()
}

/// The first number of a version line: `sort (GNU coreutils) 9.1` → `9`, with the words before it.
fn major(line: &str) -> &str {
    let digits = line.find(|c: char| c.is_ascii_digit()).unwrap_or(line.len());
    let end = line[digits..].find(|c: char| !c.is_ascii_digit()).map_or(line.len(), |n| digits + n);
    &line[..end]
}

#[cfg(test)]
mod tests {
    use super::major;

    #[test]
    fn major_versions_keep_the_tools_name() {
        assert_eq!(major("sort (GNU coreutils) 9.1"), "sort (GNU coreutils) 9");
        assert_ne!(major("grep (GNU grep) 3.8"), major("grep (BSD grep) 3.8"));
        assert_eq!(major("no number"), "no number");
    }
}
