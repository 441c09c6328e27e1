//! Before a remote command reads a file, what this machine has written to it
//! through the mount must be on the server (design §5, rule 8), and before it
//! changes one, this machine must be able to see that.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use fs_mapper::{MountTable, Resolution, coherence::Adapter};
use posh_proto::rule::{self, Rule};

use super::again;
use crate::{
    assembly::Written,
    enlisted::{Enlisted, Kind},
    facts::{Place, Reading},
    state::Gateway,
};

/// A mount that can't say in this time that a file is settled has it not settled.
const DEADLINE: Duration = Duration::from_secs(1);

/// A file or tree that a command will use on the server.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Use {
    path: PathBuf,
    adapter: Adapter,
    kind: UseKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UseKind {
    /// A word, the current directory, or standard input.
    Read,
    /// Changed by its name.
    Changed,
    /// A redirect.
    Output,
}

/// Settles what every command uses; one that can't be settled makes its command run here.
pub async fn settle(gateway: &Gateway, commands: &[Arc<Enlisted>], readings: &mut [Result<Reading, String>]) {
    if !rule::holds(Rule::Coherence) {
        return;
    }
    let table = Arc::clone(&gateway.view().table);
    let uses: Vec<Vec<Use>> = commands.iter().zip(readings.iter()).map(|(c, r)| uses_of(&table, c, r)).collect();
    if uses.iter().all(Vec::is_empty) {
        return;
    }
    let written = being_written(gateway, commands, &uses);
    tracing::debug!(?uses, ?written, roots = ?gateway.sessions.roots(), "settling");
    for (reading, uses) in readings.iter_mut().zip(uses).filter(|(_, uses)| !uses.is_empty()) {
        let changes_names = reading.as_ref().is_ok_and(|reading| !again::leaves_names(reading));
        if let Err(reason) = settle_volumes(gateway, &table, &uses, changes_names).await {
            *reading = Err(reason);
            continue;
        }
        let calls: Result<Vec<_>, _> = uses.iter().map(|used| calls_for(used, &written)).collect();
        let done = match calls.map(|calls| calls.concat()) {
            Ok(calls) if calls.is_empty() => continue,
            Ok(calls) => carry_out(calls).await,
            Err(reason) => Err(reason),
        };
        if let Err(reason) = done {
            *reading = Err(reason);
        }
    }
}

/// Volumes are asked directly: they are served by this very process.
async fn settle_volumes(
    gateway: &Gateway,
    table: &MountTable,
    uses: &[Use],
    changes_names: bool,
) -> Result<(), String> {
    let mut settled = BTreeSet::new();
    for used in uses.iter().filter(|used| used.adapter == Adapter::Volume) {
        let Resolution::Owned(owned) = table.resolve(&used.path, Path::new("/")) else { continue };
        if settled.insert(owned.mount) {
            gateway.volumes.settle(table.mount(owned.mount)).await?;
            if changes_names {
                gateway.volumes.hold_open(table.mount(owned.mount)).await;
            }
        }
    }
    Ok(())
}

fn uses_of(table: &MountTable, command: &Enlisted, reading: &Result<Reading, String>) -> Vec<Use> {
    let Ok(read) = reading else { return Vec::new() };
    let mut uses = Vec::new();
    let mut add = |path: &Path, adapter: Adapter, kind: UseKind| {
        if adapter != Adapter::Bind {
            uses.push(Use { path: path.to_owned(), adapter, kind });
        }
    };
    let files = read.invocation.files.iter().zip(&read.places);
    let files = files.map(|(file, place)| (place.as_ref(), file.kind.writes()));
    for (place, writes) in files.chain([(read.cwd.as_ref(), false)]) {
        let Some(Place::At(_, path, mount)) = place else { continue };
        let adapter = table.mount(*mount).adapter();
        add(path.as_path(), adapter, UseKind::Read);
        if writes {
            add(path.as_path(), adapter, UseKind::Changed);
        }
    }
    for descriptor in command.descriptors.iter().filter(|d| d.fd <= 2 && d.kind == Kind::File) {
        let Resolution::Owned(owned) = table.resolve(&descriptor.path, Path::new("/")) else { continue };
        let kind = if descriptor.fd == 0 { UseKind::Read } else { UseKind::Output };
        add(&descriptor.path, table.mount(owned.mount).adapter(), kind);
    }
    uses
}

/// Files that processes of the sessions hold open for writing, without those that
/// the shell has just opened for these very commands.
fn being_written(gateway: &Gateway, commands: &[Arc<Enlisted>], uses: &[Vec<Use>]) -> Vec<PathBuf> {
    // Volumes know themselves what is written through them.
    let below = uses.iter().flatten().filter(|used| used.adapter != Adapter::Volume);
    let below: Vec<PathBuf> = below.map(|used| used.path.clone()).collect();
    if below.is_empty() {
        return Vec::new();
    }
    let mut written = gateway.writers.find(&gateway.sessions.roots(), commands, &below);
    let fresh = |written: &Written| {
        let outputs = commands.iter().flat_map(|command| &command.descriptors);
        written.offset == 0 && outputs.into_iter().any(|d| d.writes() && d.path == written.path)
    };
    written.retain(|written| !fresh(written));
    written.into_iter().map(|written| written.path).collect()
}

/// One call on a mount.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Call {
    Settle(Adapter, PathBuf),
    HandOver(Adapter, PathBuf),
}

/// sshfs hands every write to its server at once and has closed files there: only
/// what is still open is worth the round trip. A volume is settled as a whole. Where a file goes up as a whole when
/// it is closed, one that is open makes the command run here.
fn calls_for(used: &Use, written: &[PathBuf]) -> Result<Vec<Call>, String> {
    let adapter = used.adapter;
    let mut open = written.iter().filter(|path| path.starts_with(&used.path));
    match (adapter, used.kind) {
        (Adapter::Sshfs, UseKind::Changed) | (Adapter::Volume, _) => Ok(Vec::new()),
        (Adapter::Sshfs, _) => Ok(open.map(|path| Call::Settle(adapter, path.clone())).collect()),
        (_, UseKind::Output) => Ok(Vec::new()),
        (Adapter::Rclone | Adapter::Generic, UseKind::Read) if open.next().is_some() => {
            Err(format!("{} is open for writing on this machine", used.path.display()))
        }
        (_, UseKind::Read) => Ok(vec![Call::Settle(adapter, used.path.clone())]),
        (_, UseKind::Changed) => Ok(vec![Call::HandOver(adapter, used.path.clone())]),
    }
}

async fn carry_out(calls: Vec<Call>) -> Result<(), String> {
    let work = tokio::task::spawn_blocking(move || {
        calls.into_iter().try_for_each(|call| match call {
            Call::Settle(adapter, path) => adapter.coherence().settle(&path),
            Call::HandOver(adapter, path) => adapter.coherence().hand_over(&path),
        })
    });
    match tokio::time::timeout(DEADLINE, work).await {
        Ok(Ok(done)) => done.map_err(|error| error.to_string()),
        _ => Err("its mount does not say whether its files are on the server".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_of_which_mount() {
        let written = [PathBuf::from("/mnt/w/open")];
        let check = |adapter, kind, path: &str, expect: Result<&[&str], ()>| {
            let used = Use { path: path.into(), adapter, kind };
            let calls = calls_for(&used, &written).map(|calls| {
                let word = |call: &Call| match call {
                    Call::Settle(_, path) => format!("settle {}", path.display()),
                    Call::HandOver(_, path) => format!("hand over {}", path.display()),
                };
                calls.iter().map(word).collect::<Vec<_>>()
            });
            let expect = expect.map(|words| words.iter().map(|&word| word.to_owned()).collect());
            assert_eq!(calls.map_err(drop), expect, "{adapter:?} {kind:?} {path}");
        };
        check(Adapter::Sshfs, UseKind::Read, "/mnt/w/other", Ok(&[]));
        check(Adapter::Sshfs, UseKind::Read, "/mnt/w", Ok(&["settle /mnt/w/open"]));
        check(Adapter::Sshfs, UseKind::Output, "/mnt/w/open", Ok(&["settle /mnt/w/open"]));
        check(Adapter::Rclone, UseKind::Read, "/mnt/w/other", Ok(&["settle /mnt/w/other"]));
        check(Adapter::Rclone, UseKind::Read, "/mnt/w", Err(()));
        check(Adapter::Rclone, UseKind::Output, "/mnt/w/open", Ok(&[]));
        check(Adapter::Rclone, UseKind::Changed, "/mnt/w/other", Ok(&["hand over /mnt/w/other"]));
        check(Adapter::Nfs, UseKind::Read, "/mnt/w/open", Ok(&["settle /mnt/w/open"]));
    }
}
