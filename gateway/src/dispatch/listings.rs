//! Checks that the listings and attributes which this machine's mounts have cached can be
//! invalidated after a command has run on a server.

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
/// Number of directories whose owners are requested, each in a round trip at worst.
const LOOKED_AT: usize = 8;
/// Timeout of a mount's answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Checks the places that a command may change. `world` has the mount table by which it was
/// resolved; `user` is its user on the server, if known.
///
/// # Errors
/// Why it runs here.
pub fn can_invalidate(
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
    if let Some(mount) = written::busy_mount(world, reading) {
        return Err(ReasonKind::Attributes.because(format!(
            "{command} may change what is on {}, through which this machine writes without pause: \
             its sshfs would show the changes late",
            mount.path.as_path().display()
        )));
    }
    let Some(user) = user else { return Ok(()) };
    let mut listings = written::listings_on_sshfs(world.table, reading);
    listings.truncate(LOOKED_AT);
    let Some(first) = listings.first().map(|listing| listing.directory.clone()) else {
        return Ok(());
    };
    let look = move || listings.into_iter().find(|listing| stays_cached(listing, user));
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

/// Returns true if a listing will change that sshfs keeps until it expires: only the directory's
/// owner can invalidate it. The command creates a directory that is missing, or changes none.
fn stays_cached(listing: &ChangedListing, user: u32) -> bool {
    let ChangedListing { directory, unless_exists } = listing;
    ownership::owner(directory).is_some_and(|owner| owner != user)
        && unless_exists.as_ref().is_none_or(|path| ownership::owner(path).is_none())
}
