//! The user's configuration files that a command reads: what of them goes along
//! with a run, and the guards, by which an executor finds out whether what is
//! configured there lets the command run there.

use std::{
    ffi::OsStr,
    fs,
    io::{self, Read as _},
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use fs_mapper::MountTable;
use posh_annotations::{GuardTest, Invocation};
use posh_proto::executor::{ClientFile, Guard, guard::Test};

use crate::{aside::aside_if_far, enlisted::Enlisted};

/// They are sent with every run, and no one writes so much by hand.
const CLIENT_FILE_BYTES: u64 = 256 << 10;

/// Whether all that exist can be sent along.
///
/// # Errors
/// Names the one that can't be.
pub fn check(table: &MountTable, enlisted: &Enlisted, invocation: &Invocation) -> Result<(), String> {
    let files = files(enlisted, invocation);
    aside_if_far(table, &files, || files.iter().try_for_each(|path| check_one(path, invocation)))
}

fn check_one(path: &Path, invocation: &Invocation) -> Result<(), String> {
    let refuse = |why: &str| Err(format!("{} reads {}, which {why}", invocation.command, path.display()));
    match fs::metadata(path) {
        Ok(meta) if !meta.is_file() => refuse("is no plain file"),
        Ok(meta) if meta.len() > CLIENT_FILE_BYTES => refuse("is too large to be sent along"),
        Err(error) if error.kind() != io::ErrorKind::NotFound => refuse("can't be looked at"),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Those that exist, as the executor is to show them.
#[must_use]
pub fn of(table: &MountTable, enlisted: &Enlisted, invocation: &Invocation) -> Vec<ClientFile> {
    let files = files(enlisted, invocation);
    aside_if_far(table, &files, || files.iter().filter_map(|path| client_file(path)).collect())
}

fn files(enlisted: &Enlisted, invocation: &Invocation) -> Vec<PathBuf> {
    invocation.client_files.iter().filter_map(|name| client_path(enlisted, name)).collect()
}

fn client_file(path: &Path) -> Option<ClientFile> {
    let file = trusted_path::open_regular(path).ok()?;
    let meta = file.metadata().ok().filter(|m| m.len() <= CLIENT_FILE_BYTES)?;
    let mut content = Vec::new();
    // It may have grown meanwhile.
    let read = file.take(CLIENT_FILE_BYTES + 1).read_to_end(&mut content).ok()?;
    (read as u64 <= CLIENT_FILE_BYTES).then(|| ClientFile {
        path: bytes(path.as_os_str()),
        content: content.into(),
        mode: meta.mode() & 0o777,
    })
}

/// `None` is below a home directory that the command does not know.
fn client_path(enlisted: &Enlisted, name: &str) -> Option<PathBuf> {
    match name.strip_prefix("~/") {
        Some(rest) => {
            enlisted.variable("HOME").map(|home| Path::new(home).join(rest)).filter(|path| path.is_absolute())
        }
        None => Some(PathBuf::from(name)),
    }
}

/// It asks for settings by which git's index is the same whoever looks at the files.
fn is_about_the_index(test: &GuardTest) -> bool {
    const SETTINGS: [&str; 2] = ["core.checkStat=minimal", "core.trustctime=false"];
    matches!(test, GuardTest::SettingRequired(all) if all.iter().all(|setting| SETTINGS.contains(&setting.as_str())))
}

/// The annotation's guards, without those about git's index where both sides see the same
/// inodes (`same_index`), and one more: what this machine has not must not be
/// found there among the server's own files.
#[must_use]
pub fn guards(enlisted: &Enlisted, invocation: &Invocation, same_index: bool) -> Vec<Guard> {
    let needed = invocation.guards.iter().filter(|guard| !same_index || !is_about_the_index(&guard.test));
    let annotated = needed.map(|guard| {
        let (test, settings) = test_of(&guard.test);
        Guard {
            directory: invocation.working_dir.as_deref().map(bytes).unwrap_or_default(),
            below: guard.below.clone().unwrap_or_default(),
            files: paths(enlisted, guard.files.iter()),
            test: test.into(),
            settings: settings.to_vec(),
            reason: guard.reason.clone(),
        }
    });
    let missing = invocation.client_files.iter().filter(|name| name.starts_with('/') && !Path::new(name).exists());
    let not_here = Guard {
        files: paths(enlisted, missing),
        test: Test::Exists.into(),
        reason: "the server has a file of its own that this machine has not".to_owned(),
        ..Guard::default()
    };
    annotated.chain([not_here]).filter(|guard| !guard.files.is_empty()).collect()
}

fn test_of(test: &GuardTest) -> (Test, &[String]) {
    match test {
        GuardTest::Exists => (Test::Exists, &[]),
        GuardTest::Executable => (Test::Executable, &[]),
        GuardTest::AllExist => (Test::AllExist, &[]),
        GuardTest::SettingsAllowed(settings) => (Test::SettingsAllowed, settings),
        GuardTest::SettingRequired(settings) => (Test::SettingRequired, settings),
    }
}

fn paths<'a>(enlisted: &Enlisted, names: impl Iterator<Item = &'a String>) -> Vec<Bytes> {
    names.filter_map(|name| client_path(enlisted, name)).map(|path| bytes(path.as_os_str())).collect()
}

fn bytes(text: &OsStr) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}
