//! Files that a command searches for upwards from its directory (`.git`).

use std::{path::PathBuf, time::Duration};

use fs_mapper::{Mount, Resolution};
use posh_proto::rule::{self, Rule};

use super::{ResolvedCommand, World};
use crate::{
    enlisted::Enlisted,
    model::{LocalReason, ReasonKind},
    ownership,
};

/// Timeout for a lookup above a mount: mostly local directories.
const PATIENCE: Duration = Duration::from_secs(2);

/// Checks that nothing that a command searches for upwards (`.git`) lies above the mount, where
/// only this machine could find it. A mount may lie in another one, which may hang.
pub(super) fn check_search(
    world: &World<'_>,
    stage: &Enlisted,
    reading: &ResolvedCommand,
) -> Result<(), LocalReason> {
    if reading.invocation.searches_up.is_empty() {
        return Ok(());
    }
    let Some((_, mount)) = search(world, stage, reading) else { return Ok(()) };
    let top = mount.path.as_path();
    let (place, names) = (top.to_owned(), reading.invocation.searches_up.clone());
    let look = move || {
        place.ancestors().skip(1).find_map(|directory| {
            let mut files = names.iter().map(|name| directory.join(name));
            files.find(|file| file.symlink_metadata().is_ok())
        })
    };
    match world.own_files.ask_aside(top, PATIENCE, look) {
        Err(why) => Err(ReasonKind::ClientFiles.because(format!(
            "{} may find files above {}: {why}",
            reading.invocation.command,
            top.display()
        ))),
        Ok(None) => Ok(()),
        Ok(Some(file)) => Err(ReasonKind::ClientFiles.because(format!(
            "{} may find {} on this machine",
            reading.invocation.command,
            file.display()
        ))),
    }
}

/// Start directory of a command's upward search, and its mount.
fn search<'w>(
    world: &World<'w>,
    stage: &Enlisted,
    reading: &ResolvedCommand,
) -> Option<(PathBuf, &'w Mount)> {
    let start =
        reading.invocation.working_dir.as_ref().map_or(stage.cwd.clone(), |d| stage.cwd.join(d));
    let Resolution::Owned(owned) = world.table.resolve(&start, &stage.cwd) else { return None };
    Some((start, world.table.mount(owned.mount)))
}

/// Checks that the search result is the user's own, as this machine sees it.
pub(super) fn check_owner(
    world: &World<'_>,
    stage: &Enlisted,
    reading: &ResolvedCommand,
) -> Result<(), LocalReason> {
    if reading.invocation.searches_up.is_empty() || !rule::holds(Rule::Identity) {
        return Ok(());
    }
    let Some((start, mount)) = search(world, stage, reading) else { return Ok(()) };
    let executor = mount.owner.as_ref().and_then(|owner| world.executors.named(&owner.executor));
    let Some(executor) = executor else {
        return Err(ReasonKind::Executor.because("its mount has no executor any more"));
    };
    let top = mount.path.as_path();
    ownership::check(
        &executor.shares,
        stage,
        &reading.invocation,
        &start,
        top,
        &reading.client_files.sent,
    )
}
