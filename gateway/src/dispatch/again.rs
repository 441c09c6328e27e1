//! Commands that may run a second time: read-only ones. For all others, the executor keeps the run
//! when a connection is lost, to be resumed (see `resume`).

use std::{
    collections::BTreeSet,
    path::Path,
    time::{Duration, Instant},
};

use fs_mapper::Resolution;
use nix::libc::{O_ACCMODE, O_APPEND, O_RDONLY};
use posh_annotations::{CurrentDir, FileKind};
use posh_proto::executor::{File, RunSpec, WrittenFile, descriptor::Source};

use super::resume::GRACE;
use crate::{
    enlisted::Enlisted,
    facts::{PathOwner, ResolvedCommand, World},
    lower::Lowered,
    model::LocalReason,
};

/// Timeout: a mount over a dead link never answers, and a command that reads it would hang.
const MOUNT_ANSWERS: Duration = Duration::from_millis(1500);

/// Returns true if the command has no effects except its output.
pub fn only_reads(reading: &ResolvedCommand) -> bool {
    let invocation = &reading.invocation;
    let writes = invocation.files.iter().any(|file| file.kind.writes());
    !invocation.side_effects
        && !invocation.needs_network
        && !writes
        && invocation.current_dir != CurrentDir::Writes
}

/// Returns true if every name keeps its file: at most, directories are created.
pub fn leaves_names(reading: &ResolvedCommand) -> bool {
    let invocation = &reading.invocation;
    let writes =
        invocation.files.iter().any(|file| file.kind.writes() && file.kind != FileKind::NewDir);
    !invocation.side_effects && !writes && invocation.current_dir != CurrentDir::Writes
}

/// Returns true if its output is also the same each time. Else it is not run again, even if nobody
/// has seen any of its output: `tail -f` would begin at another end of its file, and its reader
/// wait for a line that has gone by.
pub fn repeats_itself(reading: &ResolvedCommand) -> bool {
    only_reads(reading) && reading.invocation.deterministic
}

/// Makes runs that do more than read resumable, with IDs that nobody else can guess.
pub fn keep_what_writes(
    lowered: &mut Lowered,
    readings: &[Result<ResolvedCommand, LocalReason>],
    secret: &str,
) {
    for (index, run) in lowered.runs.iter_mut().enumerate() {
        let mut stages = lowered
            .commands
            .iter()
            .filter(|((run, _), _)| *run == index)
            .map(|(_, (stage, _))| *stage);
        let reads = stages.all(|stage| readings[stage].as_ref().is_ok_and(only_reads));
        if !reads || redirects(&run.spec).next().is_some() {
            run.spec.grace_ms = u32::try_from(GRACE.as_millis()).unwrap_or(u32::MAX);
            run.spec.run_id = format!("{}-{secret}", run.spec.run_id);
        }
    }
}

/// Files that a run opens for writing: command ID on the wire, descriptor, file.
pub fn redirects(spec: &RunSpec) -> impl Iterator<Item = (u32, u32, &File)> {
    spec.stages.iter().flat_map(|stage| {
        stage.descriptors.iter().filter_map(|descriptor| match &descriptor.source {
            Some(Source::File(file)) if file.flags.cast_signed() & O_ACCMODE != O_RDONLY => {
                Some((stage.id, descriptor.fd, file))
            }
            _ => None,
        })
    })
}

/// Start of a command's output in a file, if everything after it is the command's own.
pub fn written_from(file: &File, before: &WrittenFile) -> Option<u64> {
    let start = if file.flags.cast_signed() & O_APPEND != 0 { before.size } else { file.offset };
    (start == before.size).then_some(start)
}

/// Returns true if the mounts that commands use answer: over a dead link, commands would hang. A
/// mount with an unanswered earlier request counts as dead ([`Shares`](crate::shares::Shares)).
pub async fn mounts_answer(world: &World<'_>, commands: &[(&Enlisted, &ResolvedCommand)]) -> bool {
    let mut mounts = BTreeSet::new();
    for (command, reading) in commands {
        for place in reading.places.iter().flatten().chain(&reading.cwd) {
            if let PathOwner::At(_, _, mount) = place {
                mounts.insert(*mount);
            }
        }
        for descriptor in command.descriptors.iter().filter(|d| d.fd <= 2) {
            if let Resolution::Owned(owned) = world.table.resolve(&descriptor.path, Path::new("/"))
            {
                mounts.insert(owned.mount);
            }
        }
    }
    let end = Instant::now() + MOUNT_ANSWERS;
    for mount in mounts {
        let mount = world.table.mount(mount);
        let path = mount.path.as_path().to_owned();
        let executor =
            mount.owner.as_ref().and_then(|owner| world.executors.named(&owner.executor));
        let Some(executor) = executor else { return false };
        let left = end.saturating_duration_since(Instant::now());
        // Never cached by the kernel: asks the file system's server.
        let ask = move || nix::sys::statvfs::statvfs(&path).is_ok();
        if executor.shares.ask(mount.path.as_path(), left, ask).await != Ok(true) {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_behind_the_start_must_be_the_command_s() {
        let check = |flags: i32, offset: u64, size: u64, expected: Option<u64>| {
            let file = File { flags: flags.cast_unsigned(), offset, ..File::default() };
            let before = WrittenFile { size, ..WrittenFile::default() };
            assert_eq!(written_from(&file, &before), expected, "{flags:o} {offset} {size}");
        };
        check(nix::libc::O_WRONLY, 0, 0, Some(0));
        check(nix::libc::O_WRONLY, 7, 7, Some(7));
        check(nix::libc::O_WRONLY, 0, 7, None);
        check(nix::libc::O_WRONLY | O_APPEND, 0, 7, Some(7));
    }
}
