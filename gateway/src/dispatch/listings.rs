//! Checks that this machine's mounts can be made to show at once what a command changes on a
//! server: the listings of directories.

use std::{path::PathBuf, time::Duration};

use posh_proto::{
    codec::MOST_CHANGED_DIRECTORIES,
    rule::{self, Rule},
};

use crate::{
    facts::{ResolvedCommand, World},
    model::{LocalReason, ReasonKind},
    ownership, written,
};

/// Directories in which a command on a server may make or replace single files: each listing is
/// invalidated by a call of its own, and the executor tells of no more than twice as many.
const MOST_DIRECTORIES: usize = MOST_CHANGED_DIRECTORIES / 2;
/// Directories whose owners are looked at: each may take a round trip.
const LOOKED_AT: usize = 8;
/// How long a mount may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Checks a command's changes against what the mounts can be made to forget. Its mounts are those
/// of `world`, by whose table it was resolved; `user` is the one as whom it would run on the
/// server, if that is told.
///
/// # Errors
/// Why it runs here.
pub fn can_be_told(
    world: &World<'_>,
    reading: &ResolvedCommand,
    user: Option<u32>,
) -> Result<(), LocalReason> {
    let command = &reading.invocation.command;
    if written::directories_written(world.table, reading).len() > MOST_DIRECTORIES {
        return Err(ReasonKind::Attributes.because(format!(
            "{command} may change the listings of more than {MOST_DIRECTORIES} directories"
        )));
    }
    if !rule::holds(Rule::Coherence) {
        return Ok(());
    }
    if let Some(mount) = written::keeps_listings(world.table, reading) {
        return Err(ReasonKind::Attributes.because(format!(
            "{command} may change listings of {}, which can't be made to forget them: its sshfs \
             was not found, or has an option that changes what it shows or sets (idmap, \
             sftp_server, ...)",
            mount.path.as_path().display()
        )));
    }
    let Some(user) = user else { return Ok(()) };
    let mut directories = written::listings_on_sshfs(world.table, reading);
    directories.truncate(LOOKED_AT);
    let Some((first, _)) = directories.first().cloned() else { return Ok(()) };
    let look = move || directories.into_iter().find(|place| is_changed_in_vain(place, user));
    match world.own_files.ask_aside(&first, PATIENCE, look) {
        Ok(None) => Ok(()),
        Ok(Some((directory, _))) => Err(ReasonKind::Attributes.because(format!(
            "{command} may change the listing of {}, which its sshfs would go on showing for 22 \
             s: the directory is not its user's",
            directory.display()
        ))),
        Err(why) => Err(ReasonKind::Attributes
            .because(format!("who owns {} is not known: {why}", first.display()))),
    }
}

/// Returns true if a directory is somebody else's, and the name in it that will change is new.
/// What is not found here is made by the command, or not changed.
fn is_changed_in_vain((directory, name): &(PathBuf, Option<PathBuf>), user: u32) -> bool {
    ownership::owner(directory).is_some_and(|owner| owner != user)
        && name.as_ref().is_none_or(|name| ownership::owner(name).is_none())
}
