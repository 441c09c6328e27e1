//! Owner of the repository in which a command runs. git refuses another user's repository
//! (`safe.directory`, git-config(1)). On the server, git runs as the user that owns everything
//! there, so check the owners that this machine sees beforehand.

use std::{
    ffi::OsStr,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    time::Duration,
};

use nix::unistd::geteuid;
use posh_annotations::{Invocation, settings};
use posh_proto::executor::ClientFile;

use crate::model::{LocalReason, ReasonKind};
use crate::{enlisted::Enlisted, shares::Shares};

/// Timeout for all looks at a mount, each of which takes a round trip or two.
const PATIENCE: Duration = Duration::from_secs(5);

/// Searches upwards from `start` to `top`, the mount point, for the command's `searches_up` names.
/// The match and its directory must belong to the user. `sent` holds the user's configuration.
///
/// # Errors
/// The actual owner, or that the mount does not answer.
pub fn check(
    mount: &Shares,
    stage: &Enlisted,
    invocation: &Invocation,
    start: &Path,
    top: &Path,
    sent: &[ClientFile],
) -> Result<(), LocalReason> {
    // Unknown variables may allow it.
    if stage.env.is_empty() {
        return Ok(());
    }
    let (names, from, up_to) = (invocation.searches_up.clone(), start.to_owned(), top.to_owned());
    let look = move || {
        let directory = nearest(&names, &from, &up_to)?;
        let looked_at =
            std::iter::once(directory.clone()).chain(names.iter().map(|name| directory.join(name)));
        let owners: Vec<_> = looked_at.map(|path| (owner(&path), path)).collect();
        Some((directory, owners))
    };
    let found = mount.ask_aside(top, PATIENCE, look);
    let found = found.map_err(|why| {
        let start = start.display();
        ReasonKind::ClientFiles.because(format!("whose {start} is can't be told: {why}"))
    })?;
    let Some((directory, owners)) = found else { return Ok(()) };
    let foreign =
        owners.into_iter().find(|(owner, _)| owner.is_some_and(|uid| !is_users(stage, uid)));
    match foreign {
        Some((Some(uid), path)) if !is_safe(&directory, sent) => Err(ReasonKind::ClientFiles
            .because(format!(
                "{} may refuse {}, which belongs to another user (uid {uid})",
                invocation.command,
                path.display()
            ))),
        _ => Ok(()),
    }
}

/// Nearest directory that contains one of `names`.
fn nearest(names: &[String], start: &Path, top: &Path) -> Option<PathBuf> {
    // git changes to that directory and calls getcwd(3).
    let start = start.canonicalize().ok()?;
    let mut above = start.ancestors().take_while(|directory| directory.starts_with(top));
    let has = |directory: &&Path| names.iter().any(|name| owner(&directory.join(name)).is_some());
    above.find(has).map(Path::to_owned)
}

/// Owner of an entry; symlinks are not followed.
pub fn owner(path: &Path) -> Option<u32> {
    path.symlink_metadata().ok().map(|status| status.uid())
}

/// Returns true for the effective user, and for root also for sudo's caller.
fn is_users(stage: &Enlisted, uid: u32) -> bool {
    let by_sudo = || stage.variable("SUDO_UID")?.to_str()?.parse::<u32>().ok();
    let user = geteuid();
    uid == user.as_raw() || user.is_root() && by_sudo() == Some(uid)
}

/// Returns true if the user's own configuration allows this directory, or all.
fn is_safe(directory: &Path, sent: &[ClientFile]) -> bool {
    let all = sent.iter().filter_map(|file| settings::parse(&file.content).ok()).flatten();
    let values: Vec<_> = all
        .filter(|setting| setting.name == b"safe.directory")
        .map(|setting| setting.value)
        .collect();
    // An empty value resets the list.
    let is_reset = values.iter().any(|value| value.as_ref().is_none_or(Vec::is_empty));
    let allows = |value: &Vec<u8>| value == b"*" || OsStr::from_bytes(value) == directory;
    !is_reset && values.iter().flatten().any(allows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_says_which_directories_of_others_are_safe() {
        let check = |lines: &[&str], safe: bool| {
            let content = format!("[safe]\n\t{}\n", lines.join("\n\t"));
            let file = ClientFile { content: content.clone().into(), ..ClientFile::default() };
            assert_eq!(is_safe(Path::new("/mnt/a"), &[file]), safe, "{content}");
        };
        check(&[], false);
        check(&["directory = /mnt/a"], true);
        check(&["directory = *"], true);
        check(&["directory = /mnt"], false);
        check(&["directory = /mnt/b", "directory = /mnt/a"], true);
        check(&["directory = *", "directory ="], false);
        check(&["directory"], false);
    }
}
