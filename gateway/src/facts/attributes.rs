//! Attributes of files that commands show or set, and which of them a mount shows as the server has
//! them.

use fs_mapper::{Mount, coherence::Adapter};
use posh_annotations::{FileAttribute, Invocation};
use posh_proto::rule::{self, Rule};

use super::{PathOwner, ResolvedCommand, World};
use crate::{
    enlisted::Enlisted,
    model::{LocalReason, ReasonKind},
    zone::{self, Zone},
};

/// Checks that file attributes that a command shows look the same on the server.
pub(super) fn check_attributes(
    world: &World<'_>,
    reading: &ResolvedCommand,
) -> Result<(), LocalReason> {
    if !rule::holds(Rule::MountDifferences) {
        return Ok(());
    }
    for place in reading.places.iter().flatten().chain(&reading.cwd) {
        let PathOwner::At(_, _, mount) = place else { continue };
        let mount = world.table.mount(*mount);
        if let Some(differs) = reading.invocation.shows.iter().find(|a| !shown_alike(mount, **a)) {
            return Err(ReasonKind::Attributes.because(format!(
                "{} shows {}, which a {} mount does not show as the server does",
                reading.invocation.command,
                attribute(*differs),
                mount.fs_type
            )));
        }
    }
    Ok(())
}

/// Returns true if a mount shows an attribute as the server has it. A bind mount does. sshfs passes
/// on permissions, sizes of directories and the order of their entries (observed up to 3,000
/// entries; above 10,000 find(1) sorts by inode number on local disks). Of other file systems only
/// permissions are certain.
fn shown_alike(mount: &Mount, attribute: FileAttribute) -> bool {
    let through_sshfs = matches!(attribute, FileAttribute::Order | FileAttribute::DirSize);
    match mount.adapter() {
        _ if attribute == FileAttribute::CopiedOwner => true,
        // The executor checks symlinks below.
        Adapter::Sshfs if attribute == FileAttribute::Symlinks => true,
        Adapter::Bind => true,
        // It passes on the server's attributes, but the device is local, and access times are
        // recorded locally.
        Adapter::Volume => !matches!(attribute, FileAttribute::Device | FileAttribute::AccessTime),
        Adapter::Sshfs => through_sshfs || attribute == FileAttribute::Mode,
        Adapter::Rclone | Adapter::Nfs | Adapter::Generic => attribute == FileAttribute::Mode,
    }
}

/// Like `shown_alike`, but for a place; local files are shown as they are.
#[must_use]
pub fn shows(world: &World<'_>, place: &PathOwner, attribute: FileAttribute) -> bool {
    match place {
        PathOwner::At(_, _, mount) => shown_alike(world.table.mount(*mount), attribute),
        PathOwner::Here(_) => true,
    }
}

fn attribute(attribute: FileAttribute) -> &'static str {
    match attribute {
        FileAttribute::Owner => "owners",
        FileAttribute::Inode => "inode numbers",
        FileAttribute::Links => "link counts",
        FileAttribute::Blocks => "disk usage",
        FileAttribute::Device => "device numbers",
        FileAttribute::Times => "exact times",
        FileAttribute::Mode => "permissions",
        FileAttribute::CopiedOwner => "owners that it copies",
        FileAttribute::DirSize => "sizes of directories",
        FileAttribute::Order => "the order of directory entries",
        FileAttribute::AccessTime => "times of access",
        FileAttribute::Symlinks => "targets of symbolic links",
    }
}

/// Returns true if a command's output depends on the machine's time zone.
#[must_use]
pub fn shows_local_time(stage: &Enlisted, invocation: &Invocation) -> bool {
    zone::of(stage, invocation) == Some(Zone::Machine)
}

/// Returns true if a command compares times with the present one, shows them, or may otherwise go
/// by the clock.
#[must_use]
pub fn goes_by_the_time(stage: &Enlisted, invocation: &Invocation) -> bool {
    invocation.shows.contains(&FileAttribute::Times)
        || !invocation.deterministic
        || zone::of(stage, invocation).is_some()
}

/// Returns true if the mount of a place restricts symlinks: Debian's sshfs refuses absolute ones
/// and those with `..` (`contain_symlinks`).
#[must_use]
pub fn contains_symlinks(world: &World<'_>, place: &PathOwner) -> bool {
    let is_sshfs = |mount| world.table.mount(mount).adapter() == Adapter::Sshfs;
    matches!(place, PathOwner::At(_, _, mount) if is_sshfs(*mount))
}
