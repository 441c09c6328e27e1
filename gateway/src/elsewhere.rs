//! Ablation of the rule `paths` (in debug builds): a run that does not show the workstation's
//! paths. The exports appear below another directory, and the commands' words are adapted. Tests
//! use it to show that adapting words is not enough.

use std::{ffi::OsStr, os::unix::ffi::OsStrExt, path::Path};

use bytes::Bytes;
use posh_proto::executor::{RunSpec, descriptor::Source};

/// Directory above the exports.
const DIRECTORY: &[u8] = b"/elsewhere";

/// Adapts a run.
pub fn move_to(spec: &mut RunSpec) {
    let mounts: Vec<Bytes> = spec.mounts.iter().map(|mount| mount.path.clone()).collect();
    let moved = |path: &mut Bytes| {
        let below = |mount: &Bytes| {
            Path::new(OsStr::from_bytes(path)).starts_with(OsStr::from_bytes(mount))
        };
        if mounts.iter().any(below) {
            *path = [DIRECTORY, path].concat().into();
        }
    };
    spec.mounts.iter_mut().for_each(|mount| moved(&mut mount.path));
    for stage in &mut spec.stages {
        moved(&mut stage.cwd);
        stage.argv.iter_mut().for_each(moved);
        stage.paths.iter_mut().for_each(|used| moved(&mut used.path));
        stage.watched_trees.iter_mut().for_each(|tree| moved(&mut tree.path));
        stage.owners_of.iter_mut().chain(&mut stage.attributes_of).for_each(moved);
        stage.guards.iter_mut().flat_map(|guard| &mut guard.files).for_each(moved);
        for descriptor in &mut stage.descriptors {
            if let Some(Source::File(file)) = &mut descriptor.source {
                moved(&mut file.path);
            }
        }
    }
}
