//! The user's configuration files that a command reads: files sent along with a run, reduced to the
//! settings that it needs; files that must be the same on the executor's machine; and guards, by
//! which an executor checks if the configuration on its machine lets the command run there.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    io::{self, Read as _},
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use posh_annotations::{
    Admitted, Guard as Annotated, GuardTest, Invocation,
    settings::{self, Setting},
};
use posh_proto::{
    executor::{ClientFile, Guard, guard::Test},
    rule::{self, Rule},
};
use sha2::{Digest as _, Sha256};

use crate::{
    enlisted::Enlisted,
    model::{LocalReason, ReasonKind},
    shares::Shares,
    zone::{self, Zone},
};

/// Timeout for all of a command's files, which are local or linked elsewhere.
const PATIENCE: Duration = Duration::from_secs(2);

/// Size limit: the files are sent with every run, and hand-written ones are smaller.
const CLIENT_FILE_BYTES: u64 = 256 << 10;

/// A command's configuration files, read once: the checked content is the sent content.
#[derive(Debug, Default)]
pub struct ClientFiles {
    /// Existing files, as the executor must show them.
    pub sent: Vec<ClientFile>,
    /// Files that the executor must have too.
    compared: Vec<Compared>,
}

/// A file whose content must be the same on both machines.
#[derive(Debug)]
struct Compared {
    path: Bytes,
    /// Empty if the file does not exist.
    sha256: Bytes,
}

/// Reads a command's configuration files.
///
/// # Errors
/// The file that can't be sent or is not read in time, or the setting that keeps the command on
/// this machine.
pub fn read(
    own_files: &Shares,
    enlisted: &Enlisted,
    invocation: &Invocation,
) -> Result<ClientFiles, LocalReason> {
    let files = |names: &[String]| {
        names.iter().filter_map(|name| client_path(enlisted, name)).collect::<Vec<_>>()
    };
    let (to_send, mut to_compare) =
        (files(&invocation.client_files), files(&invocation.same_files));
    to_compare.extend(zone(enlisted, invocation)?);
    let all = [&to_send[..], &to_compare[..]].concat();
    let Some(place) = all.first().cloned() else { return Ok(ClientFiles::default()) };
    let command = invocation.command.clone();
    let work = move || {
        let read = all.into_iter().map(|path| (content(&path, &command), path));
        read.map(|(content, path)| (path, content)).collect::<BTreeMap<PathBuf, FileContent>>()
    };
    let read = own_files.ask_aside(&place, PATIENCE, work);
    let read = read.map_err(|why| {
        let command = &invocation.command;
        ReasonKind::ClientFiles.because(format!("{command} reads {}: {why}", place.display()))
    })?;
    let content = |path: &Path| read.get(path).cloned().unwrap_or(Ok(None));
    let sent = to_send
        .iter()
        .filter_map(|path| sent(path, content(path), enlisted, invocation).transpose());
    let compared = to_compare.iter().map(|path| compared(path, content(path)));
    Ok(ClientFiles {
        sent: sent.collect::<Result<_, _>>()?,
        compared: compared.collect::<Result<_, _>>()?,
    })
}

/// Content and permissions of a file; `None` if it does not exist.
type FileContent = Result<Option<(Vec<u8>, u32)>, LocalReason>;

/// Time zone file that TZ names, for a command that shows times.
fn zone(enlisted: &Enlisted, invocation: &Invocation) -> Result<Option<PathBuf>, LocalReason> {
    match zone::of(enlisted, invocation).filter(|_| rule::holds(Rule::Identity)) {
        Some(Zone::Named(file)) => Ok(Some(file)),
        Some(Zone::Other(variable)) => Err(ReasonKind::ClientFiles.because(format!(
            "{variable} names a time zone that {} may not find on the server",
            invocation.command
        ))),
        Some(Zone::Machine | Zone::Rule) | None => Ok(None),
    }
}

fn sent(
    path: &Path,
    content: FileContent,
    enlisted: &Enlisted,
    invocation: &Invocation,
) -> Result<Option<ClientFile>, LocalReason> {
    let Some((content, mode)) = content? else { return Ok(None) };
    let is_of = |guard: &&Annotated| {
        let mut files = guard.files.iter().filter_map(|name| client_path(enlisted, name));
        matches!(guard.test, GuardTest::SettingsAllowed { .. }) && files.any(|file| file == path)
    };
    let guards: Vec<&Annotated> = invocation.guards.iter().filter(is_of).collect();
    let content = if guards.is_empty() { content } else { allowed_part(path, &content, &guards)? };
    Ok(Some(ClientFile { path: bytes(path.as_os_str()), content: content.into(), mode }))
}

/// Settings of a file that the command may need, as a file of their own.
fn allowed_part(
    path: &Path,
    content: &[u8],
    guards: &[&Annotated],
) -> Result<Vec<u8>, LocalReason> {
    let shown = path.display();
    let stays = |guard: &Annotated, found: String| {
        ReasonKind::ClientFiles.because(format!("{} ({found})", guard.reason))
    };
    let settings = settings::parse(content)
        .map_err(|line| stays(guards[0], format!("line {line} of {shown} is no setting")))?;
    let mut kept: Vec<&Setting> = Vec::new();
    for setting in &settings {
        let name = || format!("{} in {shown}", String::from_utf8_lossy(&setting.name));
        let mut is_sent = true;
        for guard in guards {
            let admitted = guard.test.admits(setting).ok_or_else(|| stays(guard, name()))?;
            is_sent &= admitted == Admitted::Sent;
        }
        if is_sent && setting.depends_on_version {
            return Err(stays(
                guards[0],
                format!("{}, whose white space depends on the version of git", name()),
            ));
        }
        kept.extend(is_sent.then_some(setting));
    }
    Ok(settings::write(kept))
}

fn compared(path: &Path, content: FileContent) -> Result<Compared, LocalReason> {
    let sha256 = content?.map(|(content, _)| Bytes::copy_from_slice(&Sha256::digest(content)));
    Ok(Compared { path: bytes(path.as_os_str()), sha256: sha256.unwrap_or_default() })
}

/// Reads a file. Blocks.
fn content(path: &Path, command: &str) -> FileContent {
    let refuse = |why: &str| {
        ReasonKind::ClientFiles.because(format!("{command} reads {}, which {why}", path.display()))
    };
    let file = match trusted_path::open_regular(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            return Err(refuse("is no plain file"));
        }
        Err(_) => return Err(refuse("can't be read")),
    };
    let mode = file.metadata().map_err(|_| refuse("can't be looked at"))?.mode() & 0o777;
    let mut content = Vec::new();
    // It may have grown meanwhile.
    match file.take(CLIENT_FILE_BYTES + 1).read_to_end(&mut content) {
        Err(_) => Err(refuse("can't be read")),
        Ok(_) if content.len() as u64 > CLIENT_FILE_BYTES => {
            Err(refuse("is too large to be sent along"))
        }
        Ok(_) => Ok(Some((content, mode))),
    }
}

/// Path of a configuration file; `None` below an unknown home directory.
fn client_path(enlisted: &Enlisted, name: &str) -> Option<PathBuf> {
    match name.strip_prefix("~/") {
        Some(rest) => enlisted
            .variable("HOME")
            .map(|home| Path::new(home).join(rest))
            .filter(|path| path.is_absolute()),
        None => Some(PathBuf::from(name)),
    }
}

/// Returns true if a test requires settings that make git's index independent of the machine that
/// reads the files.
fn is_about_the_index(test: &GuardTest) -> bool {
    const SETTINGS: [&str; 2] = ["core.checkStat=minimal", "core.trustctime=false"];
    matches!(
        test,
        GuardTest::SettingRequired(all)
            if all.iter().all(|setting| SETTINGS.contains(&setting.as_str()))
    )
}

/// Guards of the annotation, without those about git's index if both sides see the same inodes
/// (`same_index`), plus two more. Files that this machine lacks must not exist among the server's
/// own. Files of `same_files`, and TZ's zone, must be the same on the server.
#[must_use]
pub fn guards(
    enlisted: &Enlisted,
    invocation: &Invocation,
    files: &ClientFiles,
    same_index: bool,
) -> Vec<Guard> {
    let needed =
        invocation.guards.iter().filter(|guard| !same_index || !is_about_the_index(&guard.test));
    let annotated = needed.map(|guard| Guard {
        directory: invocation.working_dir.as_deref().map(bytes).unwrap_or_default(),
        below: guard.below.clone().unwrap_or_default(),
        files: paths(enlisted, guard.files.iter()),
        test: test_of(&guard.test).into(),
        settings: guard.test.patterns().cloned().collect(),
        reason: guard.reason.clone(),
        ..Guard::default()
    });
    let is_missing = |name: &&String| {
        name.starts_with('/') && !files.sent.iter().any(|file| file.path == name.as_bytes())
    };
    let not_here = Guard {
        files: paths(enlisted, invocation.client_files.iter().filter(is_missing)),
        test: Test::Exists.into(),
        reason: "the server has a file of its own that this machine has not".to_owned(),
        ..Guard::default()
    };
    let compared = files.compared.iter();
    let same = Guard {
        files: compared.clone().map(|file| file.path.clone()).collect(),
        sha256: compared.map(|file| file.sha256.clone()).collect(),
        test: Test::SameContent.into(),
        reason: format!("a file that {} reads is not the same on the server", invocation.command),
        ..Guard::default()
    };
    annotated.chain([not_here, same]).filter(|guard| !guard.files.is_empty()).collect()
}

fn test_of(test: &GuardTest) -> Test {
    match test {
        GuardTest::Exists => Test::Exists,
        GuardTest::Executable => Test::Executable,
        GuardTest::AllExist => Test::AllExist,
        GuardTest::SettingsAllowed { .. } => Test::SettingsAllowed,
        GuardTest::SettingRequired(_) => Test::SettingRequired,
    }
}

fn paths<'a>(enlisted: &Enlisted, names: impl Iterator<Item = &'a String>) -> Vec<Bytes> {
    names
        .filter_map(|name| client_path(enlisted, name))
        .map(|path| bytes(path.as_os_str()))
        .collect()
}

fn bytes(text: &OsStr) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}
