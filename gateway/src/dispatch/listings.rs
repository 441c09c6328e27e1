//! Checks that this machine's mounts can be made to show at once what a command changes on a
//! server: the listings of directories.

use std::time::Duration;

use posh_proto::{
    codec::MOST_CHANGED_DIRECTORIES,
    rule::{self, Rule},
};

use crate::{
    facts::{ResolvedCommand, World},
    model::{LocalReason, ReasonKind},
    ownership,
    written::{self, ChangedListing},
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
            "{command} may change what is on {}, which would go on showing what was there: its \
             sshfs was not found, or has an option that changes what it shows or sets (idmap, \
             sftp_server, ...) or lets the kernel remember longer (kernel_cache, auto_cache, \
             negative_timeout, ...)",
            mount.path.as_path().display()
        )));
    }
    let Some(user) = user else { return Ok(()) };
    let mut listings = written::listings_on_sshfs(world.table, reading);
    listings.truncate(LOOKED_AT);
    let Some(first) = listings.first().map(|listing| listing.directory.clone()) else {
        return Ok(());
    };
    let look = move || listings.into_iter().find(|listing| is_kept(listing, user));
    match world.own_files.ask_aside(&first, PATIENCE, look) {
        Ok(None) => Ok(()),
        Ok(Some(listing)) => Err(ReasonKind::Attributes.because(format!(
            "{command} may change the listing of {}, which its sshfs would go on showing for 22 \
             s: the directory is not its user's",
            listing.directory.display()
        ))),
        Err(why) => Err(ReasonKind::Attributes
            .because(format!("who owns {} is not known: {why}", first.display()))),
    }
}

/// Returns true if a listing will change that sshfs can't be made to forget: the directory is
/// somebody else's. A directory that is not found here is made by the command, or not changed.
fn is_kept(listing: &ChangedListing, user: u32) -> bool {
    let ChangedListing { directory, unless_exists } = listing;
    ownership::owner(directory).is_some_and(|owner| owner != user)
        && unless_exists.as_ref().is_none_or(|path| ownership::owner(path).is_none())
}
