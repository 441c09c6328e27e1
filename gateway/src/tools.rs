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

use posh_annotations::ToolVersion;
use posh_proto::{
    executor::ToolsRequest,
    rule::{self, Rule},
};
use sha2::{Digest, Sha256};

use crate::aside::aside;
use crate::executors::Connection;

/// A tool that does not print its version in this time has none.
const VERSION_TIMEOUT: Duration = Duration::from_secs(2);

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
    String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned()
}

async fn remote_version(connection: &Connection, name: &str) -> Result<String, String> {
    let request = ToolsRequest { names: vec![name.to_owned()], versions: true };
    let reply = connection.client.clone().tools(request).await;
    let tools = reply.map_err(|e| format!("cannot learn the version of {name}: {}", e.message()))?;
    Ok(tools.into_iter().next().map(|t| t.version).unwrap_or_default())
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
