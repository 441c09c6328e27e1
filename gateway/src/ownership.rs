//! Whose the repository is in which a command runs. git refuses one of another user
//! (`safe.directory`, git-config(1)); on the server it acts as the user to whom all of it belongs
//! there, so that the owners that this machine sees are looked at before.

use std::{
    ffi::OsStr,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    time::Duration,
};

use nix::unistd::geteuid;
use posh_annotations::{Invocation, settings};
use posh_proto::executor::ClientFile;

use crate::{enlisted::Enlisted, shares::Shares};

/// For all looks at a mount, each of which is a round trip or two.
const PATIENCE: Duration = Duration::from_secs(5);

/// Looks upwards from `start` to `top`, where a mount begins, for what the command looks for; that
/// and its directory must be the user's. What the user has configured is in `sent`.
///
/// # Errors
/// Whose it is instead, or that the mount does not answer.
pub fn check(
    mount: &Shares,
    stage: &Enlisted,
    invocation: &Invocation,
    (start, top): (&Path, &Path),
    sent: &[ClientFile],
) -> Result<(), String> {
    // Where nothing is known of the variables, they may allow it.
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
    let found =
        found.map_err(|why| format!("whose {} is can't be told: {why}", start.display()))?;
    let Some((directory, owners)) = found else { return Ok(()) };
    let foreign =
        owners.into_iter().find(|(owner, _)| owner.is_some_and(|uid| !is_users(stage, uid)));
    match foreign {
        Some((Some(uid), path)) if !is_safe(&directory, sent) => Err(format!(
            "{} may refuse {}, which belongs to another user (uid {uid})",
            invocation.command,
            path.display()
        )),
        _ => Ok(()),
    }
}

/// The nearest directory that has what is looked for.
fn nearest(names: &[String], start: &Path, top: &Path) -> Option<PathBuf> {
    // git goes there, and asks where it is then.
    let start = start.canonicalize().ok()?;
    let mut above = start.ancestors().take_while(|directory| directory.starts_with(top));
    let has = |directory: &&Path| names.iter().any(|name| owner(&directory.join(name)).is_some());
    above.find(has).map(Path::to_owned)
}

/// Whose an entry is; of a symbolic link, the link's.
fn owner(path: &Path) -> Option<u32> {
    path.symlink_metadata().ok().map(|status| status.uid())
}

/// The effective user; for root, also the one who has called sudo.
fn is_users(stage: &Enlisted, uid: u32) -> bool {
    let by_sudo = || stage.variable("SUDO_UID")?.to_str()?.parse::<u32>().ok();
    let user = geteuid();
    uid == user.as_raw() || user.is_root() && by_sudo() == Some(uid)
}

/// Whether the user's own configuration allows this directory, or all.
fn is_safe(directory: &Path, sent: &[ClientFile]) -> bool {
    let all = sent.iter().filter_map(|file| settings::parse(&file.content).ok()).flatten();
    let values: Vec<_> = all
        .filter(|setting| setting.name == b"safe.directory")
        .map(|setting| setting.value)
        .collect();
    // An empty one takes back what stands before it.
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
