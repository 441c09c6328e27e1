//! Paths that no view shows, although they may lie in directories that all views show (`/opt`,
//! `/usr`): the exports, which have their own mount points, and the executor's own files. A view is
//! made without them (`runner::system`).
//!
//! Invariant: below `/opt`, `/nix`, `/gnu` and `/snap`, what is hidden stays hidden under any name.
//! A path is hidden by its name, and whoever renames a directory (a deployment, or a user who may
//! write the directory around it) gives it another. So where something hidden lies below one of
//! these, views do not show that directory at all ([`OPTIONAL`]). Below `/usr`, which every command
//! needs, and in the stores of programs, names are hidden one by one: nothing that must stay hidden
//! belongs there.
//!
//! Making a view waits for no disk: another identity's export that hangs holds up nobody. Paths are
//! resolved when the configuration is read; their other names come from the list of mounts.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use fs_mapper::mountinfo::{MountEntry, MountInfo, MountInfoError};

use crate::{Config, identity::PATH, runner::is_shown};

/// Directories that programs need, beside those of PATH. An export of one of these, or of a parent
/// of one, shows only what every view shows.
const PROGRAMS: [&str; 18] = [
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libo32",
    "/libx32",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/libexec",
    "/usr/share",
    "/usr/local/lib",
    "/usr/local/share",
    "/nix/store",
    "/gnu/store",
    "/snap/bin",
    "/etc",
];

/// Directories at the top that views can do without.
const OPTIONAL: [&str; 4] = ["/opt", "/nix", "/gnu", "/snap"];

/// Exports of a configuration and files of its executor, with links resolved.
///
/// Invariant: no export's file system is accessed. An export's path was resolved when the
/// configuration was read, within a limit; one that hangs now would block the caller.
#[must_use]
pub fn paths(config: &Config) -> BTreeSet<PathBuf> {
    let own = own_files(config).into_iter().map(|path| fs::canonicalize(&path).unwrap_or(path));
    own.chain(exports(config)).collect()
}

/// Exports and the executor's own files under their configured names. Accesses none of them: their
/// file systems may hang.
#[must_use]
pub fn configured_paths(config: &Config) -> BTreeSet<PathBuf> {
    own_files(config).into_iter().chain(exports(config)).collect()
}

fn exports(config: &Config) -> impl Iterator<Item = PathBuf> {
    let served = config.exports.iter().map(|export| &export.path);
    served.chain(config.unserved.iter().map(|unserved| &unserved.path)).cloned()
}

fn own_files(config: &Config) -> Vec<PathBuf> {
    let mut all = vec![std::env::temp_dir()];
    all.extend(config.tls.iter().map(|tls| tls.directory.clone()));
    all.extend(config.confinement.annotations.iter().cloned());
    all.extend(
        [&config.file, &config.audit, &config.state, &config.confinement.cgroup]
            .into_iter()
            .flatten()
            .cloned(),
    );
    // The head file of the record; see `audit::chain`.
    all.extend(config.audit.iter().map(|audit| {
        let mut name = audit.clone().into_os_string();
        name.push(".head");
        PathBuf::from(name)
    }));
    all
}

/// Places of these paths in what views show of the server, shallow ones first. To be called in the
/// server's tree.
///
/// # Errors
/// The list of mounts can't be read.
pub fn shown<'a>(
    paths: impl Iterator<Item = &'a Path>,
) -> Result<BTreeSet<PathBuf>, MountInfoError> {
    let mounts = MountInfo::read()?;
    Ok(shown_among(paths, &mounts.visible()))
}

/// Like [`shown`], among these mounts.
pub fn shown_among<'a>(
    paths: impl Iterator<Item = &'a Path>,
    mounts: &[&MountEntry],
) -> BTreeSet<PathBuf> {
    let names = paths.filter(|path| !holds_programs(path)).flat_map(|path| {
        let others = other_names(path, mounts);
        std::iter::once(path.to_owned()).chain(others)
    });
    names.filter(|name| is_shown(name) && !holds_programs(name)).map(with_what_is_around).collect()
}

/// The directory of [`OPTIONAL`] that has this path; the path itself if none has, or if it lies
/// among programs (`/nix/store`).
fn with_what_is_around(path: PathBuf) -> PathBuf {
    let is_among_programs = PROGRAMS.iter().any(|programs| path.starts_with(programs));
    match OPTIONAL.iter().find(|top| path.starts_with(top)) {
        Some(top) if !is_among_programs => PathBuf::from(top),
        _ => path,
    }
}

fn holds_programs(path: &Path) -> bool {
    PATH.split(':').chain(PROGRAMS).any(|needed| Path::new(needed).starts_with(path))
}

/// Other names by which the same directory, or a part of it, is mounted.
fn other_names(path: &Path, mounts: &[&MountEntry]) -> Vec<PathBuf> {
    let around = mounts.iter().filter(|mount| path.starts_with(&mount.mount_point));
    let Some(around) = around.max_by_key(|mount| mount.mount_point.as_os_str().len()) else {
        return Vec::new();
    };
    let Ok(below) = path.strip_prefix(&around.mount_point) else { return Vec::new() };
    let inside = around.root.join(below);
    let name = |mount: &&&MountEntry| match inside.strip_prefix(&mount.root) {
        Ok(below) => Some(mount.mount_point.join(below)),
        Err(_) => mount.root.starts_with(&inside).then(|| mount.mount_point.clone()),
    };
    mounts
        .iter()
        .filter(|mount| mount.device == around.device)
        .filter_map(|mount| name(&mount))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
21 1 8:1 / / rw - ext4 /dev/sda1 rw
22 21 8:2 / /srv/disk rw - ext4 /dev/sdb1 rw
23 21 8:2 /data/payroll /opt/payroll rw - ext4 /dev/sdb1 rw
24 21 8:1 /srv/logs/old /opt/old rw - ext4 /dev/sda1 rw
25 21 8:1 /usr/share/doc /usr/local/doc rw - ext4 /dev/sda1 rw
";

    #[test]
    fn exports_are_found_by_all_their_names() {
        let mounts = MountInfo::parse(MOUNTS.as_bytes()).unwrap();
        for (path, names) in [
            ("/opt/x/data", vec!["/opt"]),
            ("/opt-x/data", vec![]),
            ("/nix/data", vec!["/nix"]),
            ("/nix/store/x-posh/annotations", vec!["/nix/store/x-posh/annotations"]),
            ("/snap/x/1/data", vec!["/snap"]),
            ("/usr/local/data", vec!["/usr/local/data"]),
            ("/srv/other", vec![]),
            ("/srv/disk/data/payroll/2026", vec!["/opt"]),
            ("/srv/disk/data", vec!["/opt"]),
            ("/srv/disk/data/pay", vec![]),
            ("/srv/logs", vec!["/opt"]),
            ("/usr/src", vec!["/usr/src"]),
            // All commands need these.
            ("/usr", vec![]),
            ("/usr/share", vec![]),
            ("/usr/local", vec![]),
            ("/", vec![]),
            ("/opt", vec!["/opt"]),
        ] {
            let found = shown_among([Path::new(path)].into_iter(), &mounts.visible());
            let names: BTreeSet<PathBuf> = names.into_iter().map(PathBuf::from).collect();
            assert_eq!(found, names, "{path}");
        }
    }
}
