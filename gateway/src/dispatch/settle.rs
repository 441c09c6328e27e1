//! Flushes before a remote command runs (design §5, rule 8): this machine's writes through the
//! mount to files that the command reads must be on the server. For files that it changes, this
//! machine must be able to see the change.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use fs_mapper::{MountId, MountTable, Resolution, coherence::Adapter};
use posh_proto::rule::{self, Rule};

use super::again;
use crate::{
    assembly::Written,
    enlisted::{DescriptorKind, Enlisted},
    facts::{PathOwner, ResolvedCommand},
    model::{LocalReason, ReasonKind},
    shares::Unanswered,
    state::Gateway,
};

/// Flush timeout; on expiry the command runs locally.
const DEADLINE: Duration = Duration::from_secs(1);

/// A file or tree that a command will use on the server.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ServerUse {
    path: PathBuf,
    adapter: Adapter,
    kind: UseKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UseKind {
    /// An operand, the current directory, or standard input.
    Read,
    /// Changed by its name.
    Changed,
    /// A redirect.
    Output,
}

/// Flushes the files that each command uses; if that fails, the command runs locally.
pub async fn settle(
    gateway: &Gateway,
    commands: &[Arc<Enlisted>],
    readings: &mut [Result<ResolvedCommand, LocalReason>],
) {
    if !rule::holds(Rule::Coherence) {
        return;
    }
    let table = Arc::clone(&gateway.view().table);
    let uses: Vec<Vec<(MountId, ServerUse)>> =
        commands.iter().zip(readings.iter()).map(|(c, r)| uses_of(&table, c, r)).collect();
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
        let calls = uses.iter().map(|(mount, used)| Ok((*mount, calls_for(used, &written)?)));
        let done = match calls.collect::<Result<Vec<_>, LocalReason>>() {
            Ok(calls) => carry_out(gateway, &table, calls).await,
            Err(reason) => Err(reason),
        };
        if let Err(reason) = done {
            *reading = Err(reason);
        }
    }
}

/// Asks volumes directly: this process serves them.
async fn settle_volumes(
    gateway: &Gateway,
    table: &MountTable,
    uses: &[(MountId, ServerUse)],
    changes_names: bool,
) -> Result<(), LocalReason> {
    let mut settled = BTreeSet::new();
    for (mount, _) in uses.iter().filter(|(_, used)| used.adapter == Adapter::Volume) {
        if settled.insert(mount) {
            gateway.volumes.settle(table.mount(*mount)).await?;
            if changes_names {
                gateway.volumes.hold_open(table.mount(*mount)).await;
            }
        }
    }
    Ok(())
}

fn uses_of(
    table: &MountTable,
    command: &Enlisted,
    reading: &Result<ResolvedCommand, LocalReason>,
) -> Vec<(MountId, ServerUse)> {
    let Ok(read) = reading else { return Vec::new() };
    let mut uses = Vec::new();
    let mut add = |path: &Path, mount: MountId, kind: UseKind| {
        let adapter = table.mount(mount).adapter();
        if adapter != Adapter::Bind {
            uses.push((mount, ServerUse { path: path.to_owned(), adapter, kind }));
        }
    };
    let files = read.invocation.files.iter().zip(&read.places);
    let files = files.map(|(file, place)| (place.as_ref(), file.kind.writes()));
    for (place, writes) in files.chain([(read.cwd.as_ref(), false)]) {
        let Some(PathOwner::At(_, path, mount)) = place else { continue };
        add(path.as_path(), *mount, UseKind::Read);
        if writes {
            add(path.as_path(), *mount, UseKind::Changed);
        }
    }
    for descriptor in
        command.descriptors.iter().filter(|d| d.fd <= 2 && d.kind == DescriptorKind::File)
    {
        let Resolution::Owned(owned) = table.resolve(&descriptor.path, Path::new("/")) else {
            continue;
        };
        let kind = if descriptor.fd == 0 { UseKind::Read } else { UseKind::Output };
        add(&descriptor.path, owned.mount, kind);
    }
    uses
}

/// Files that the sessions' processes have open for writing, without those that the shell has just
/// opened for these commands.
fn being_written(
    gateway: &Gateway,
    commands: &[Arc<Enlisted>],
    uses: &[Vec<(MountId, ServerUse)>],
) -> Vec<Written> {
    // Volumes track writes themselves.
    let below = uses.iter().flatten().filter(|(_, used)| used.adapter != Adapter::Volume);
    let below: Vec<PathBuf> = below.map(|(_, used)| used.path.clone()).collect();
    if below.is_empty() {
        return Vec::new();
    }
    let mut written = gateway.writers.find(&gateway.sessions.roots(), commands, &below);
    let is_fresh = |written: &Written| {
        let mut outputs = commands.iter().flat_map(|command| &command.descriptors);
        matches!(written, Written::Open { path, offset: 0 }
            if outputs.any(|d| d.writes() && d.path == *path))
    };
    written.retain(|written| !is_fresh(written));
    written
}

/// One call on a mount.
#[derive(Debug, Clone, PartialEq, Eq)]
enum MountCall {
    Settle(Adapter, PathBuf),
    HandOver(Adapter, PathBuf),
}

/// Calls needed before a use. sshfs sends every write at once and closed files are on its server:
/// only files still open need the round trip. Volumes are flushed as a whole. If an adapter uploads
/// a file on close, an open file makes the command run locally; so does one that is mapped, for
/// stores send nothing.
fn calls_for(used: &ServerUse, written: &[Written]) -> Result<Vec<MountCall>, LocalReason> {
    let adapter = used.adapter;
    let is_mapped = |written: &Written| match written {
        Written::Mapped(path) => path.starts_with(&used.path),
        Written::Open { .. } => false,
    };
    if adapter != Adapter::Volume && written.iter().any(is_mapped) {
        return Err(ReasonKind::Unflushed
            .because(format!("a process here may store to {} by a mapping", used.path.display())));
    }
    let mut open = written.iter().filter_map(|written| match written {
        Written::Open { path, .. } => Some(path).filter(|path| path.starts_with(&used.path)),
        Written::Mapped(_) => None,
    });
    match (adapter, used.kind) {
        (Adapter::Sshfs, UseKind::Changed) | (Adapter::Volume, _) => Ok(Vec::new()),
        (Adapter::Sshfs, _) => {
            Ok(open.map(|path| MountCall::Settle(adapter, path.clone())).collect())
        }
        (_, UseKind::Output) => Ok(Vec::new()),
        (Adapter::Rclone | Adapter::Generic, UseKind::Read) if open.next().is_some() => {
            Err(ReasonKind::Unflushed
                .because(format!("{} is open for writing on this machine", used.path.display())))
        }
        (_, UseKind::Read) => Ok(vec![MountCall::Settle(adapter, used.path.clone())]),
        (_, UseKind::Changed) => Ok(vec![MountCall::HandOver(adapter, used.path.clone())]),
    }
}

/// Invariant: a mount that does not answer blocks one thread and delays one command; its further
/// commands run locally at once ([`Shares`](crate::shares::Shares)).
async fn carry_out(
    gateway: &Gateway,
    table: &MountTable,
    calls: Vec<(MountId, Vec<MountCall>)>,
) -> Result<(), LocalReason> {
    let mut by_mount: BTreeMap<MountId, Vec<MountCall>> = BTreeMap::new();
    for (mount, calls) in calls.into_iter().filter(|(_, calls)| !calls.is_empty()) {
        by_mount.entry(mount).or_default().extend(calls);
    }
    let end = Instant::now() + DEADLINE;
    for (mount, calls) in by_mount {
        let mount = table.mount(mount);
        let executor =
            mount.owner.as_ref().and_then(|owner| gateway.executors.named(&owner.executor));
        let Some(executor) = executor else {
            return Err(ReasonKind::Executor.because("its mount has no executor any more"));
        };
        let work = move || {
            calls.into_iter().try_for_each(|call| match call {
                MountCall::Settle(adapter, path) => adapter.coherence().settle(&path),
                MountCall::HandOver(adapter, path) => adapter.coherence().hand_over(&path),
            })
        };
        let left = end.saturating_duration_since(Instant::now());
        let answer = executor.shares.ask(mount.path.as_path(), left, work).await;
        answer
            .map_err(unanswered)?
            .map_err(|error| ReasonKind::Unflushed.because(error.to_string()))?;
    }
    Ok(())
}

fn unanswered(why: Unanswered) -> LocalReason {
    ReasonKind::Unflushed
        .because(format!("its mount does not say whether its files are on the server: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_of_which_mount() {
        let written = [
            Written::Open { path: "/mnt/w/open".into(), offset: 1 },
            Written::Mapped("/mnt/w/mapped".into()),
        ];
        let check = |adapter, kind, path: &str, expect: Result<&[&str], ()>| {
            let used = ServerUse { path: path.into(), adapter, kind };
            let calls = calls_for(&used, &written).map(|calls| {
                let word = |call: &MountCall| match call {
                    MountCall::Settle(_, path) => format!("settle {}", path.display()),
                    MountCall::HandOver(_, path) => format!("hand over {}", path.display()),
                };
                calls.iter().map(word).collect::<Vec<_>>()
            });
            let expect = expect.map(|words| words.iter().map(|&word| word.to_owned()).collect());
            assert_eq!(calls.map_err(drop), expect, "{adapter:?} {kind:?} {path}");
        };
        check(Adapter::Sshfs, UseKind::Read, "/mnt/w/other", Ok(&[]));
        check(Adapter::Sshfs, UseKind::Read, "/mnt/w/open", Ok(&["settle /mnt/w/open"]));
        check(Adapter::Sshfs, UseKind::Read, "/mnt/w", Err(()));
        for kind in [UseKind::Read, UseKind::Changed, UseKind::Output] {
            check(Adapter::Nfs, kind, "/mnt/w/mapped", Err(()));
        }
        check(Adapter::Volume, UseKind::Read, "/mnt/w/mapped", Ok(&[]));
        check(Adapter::Sshfs, UseKind::Output, "/mnt/w/open", Ok(&["settle /mnt/w/open"]));
        check(Adapter::Rclone, UseKind::Read, "/mnt/w/other", Ok(&["settle /mnt/w/other"]));
        check(Adapter::Rclone, UseKind::Read, "/mnt/w/open", Err(()));
        check(Adapter::Rclone, UseKind::Output, "/mnt/w/open", Ok(&[]));
        check(Adapter::Rclone, UseKind::Changed, "/mnt/w/other", Ok(&["hand over /mnt/w/other"]));
        check(Adapter::Nfs, UseKind::Read, "/mnt/w/open", Ok(&["settle /mnt/w/open"]));
    }
}
