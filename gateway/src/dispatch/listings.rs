//! Checks that the listings and attributes which this machine's mounts have cached can be
//! invalidated after a command has run on a server.

use std::{fs::Metadata, os::unix::fs::MetadataExt as _, time::Duration};

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
    let look = move || {
        let obstacle = |listing: &ChangedListing| Some((obstacle(listing, user)?, listing.clone()));
        listings.iter().find_map(obstacle)
    };
    match world.own_files.ask_aside(&first, PATIENCE, look) {
        Ok(None) => Ok(()),
        Ok(Some((why, listing))) => Err(ReasonKind::Attributes.because(format!(
            "{command} may change the listing of {}, which its sshfs would go on showing for 22 \
             s: {why}",
            listing.directory.display()
        ))),
        Err(why) => Err(ReasonKind::Attributes
            .because(format!("who owns {} is not known: {why}", first.display()))),
    }
}

/// Reason for which a listing that will change can't be invalidated. The command creates a
/// directory that is missing, or changes none.
///
/// sshfs forgets a listing when the directory's owner is set, by its path on the server, to the one
/// that it has. Only that owner can do that, and only root, who can set another file's, must be
/// certain that nobody puts a link in the directory's place.
fn obstacle(listing: &ChangedListing, user: u32) -> Option<&'static str> {
    let ChangedListing { directory, unless_exists } = listing;
    let found = directory.symlink_metadata().ok()?;
    if unless_exists.as_ref().is_some_and(|path| ownership::owner(path).is_some()) {
        return None;
    }
    if found.uid() != user {
        return Some("the directory is not its user's");
    }
    let above = directory.ancestors().skip(1).map_while(|above| {
        let above = above.symlink_metadata().ok()?;
        (above.dev() == found.dev()).then_some(above)
    });
    let may_exchange = |above: Metadata| {
        above.uid() != user || above.mode() & 0o022 != 0 && above.mode() & 0o1000 == 0
    };
    (user == 0 && above.into_iter().any(may_exchange))
        .then_some("others than root may put another one in the directory's place")
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{PermissionsExt as _, chown},
        path::Path,
    };

    use super::*;

    #[test]
    fn root_sets_no_owner_where_others_may_put_a_link() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        fs::create_dir_all(at("shared/d")).unwrap();
        let obstacle_as = |user: u32| {
            let listing = ChangedListing { directory: at("shared/d"), unless_exists: None };
            obstacle(&listing, user)
        };
        let allow = |path: &Path, mode: u32| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        assert_eq!(obstacle_as(1), Some("the directory is not its user's"));
        for (mode, is_safe) in [(0o755, true), (0o775, false), (0o757, false), (0o1777, true)] {
            allow(&at("shared"), mode);
            // The temporary directory itself is sticky.
            assert_eq!(obstacle_as(0).is_none(), is_safe, "{mode:o}");
        }
        allow(&at("shared"), 0o755);
        chown(at("shared"), Some(1), None).unwrap();
        assert!(obstacle_as(0).is_some());
        // Without root's rights, nobody can set another's.
        chown(at("shared/d"), Some(1), None).unwrap();
        allow(&at("shared"), 0o777);
        assert_eq!(obstacle_as(1), None);
    }
}
