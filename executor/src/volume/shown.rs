//! Directories in which runs act, and those that their workstation's volumes show.
//!
//! Invariant: a run acts in the very directory (device, inode and mount) that each volume of its
//! workstation with the same export shows when it begins. A volume shows the directory of its
//! session, which the run names as the mount knows it. That session was open before the run came,
//! and is when its view is: its directory was open all the time, so that no other one had its
//! numbers, and a view of those numbers has that directory. Without that session the run is
//! rejected, since the mount may still show the former directory, or show the next one already; the
//! command then runs over the volume. A session whose export's path leads elsewhere ends, and the
//! mount finds the next directory (`looks`).
//!
//! A run that has begun stays in its directory when that is replaced, as a process keeps its
//! working directory: it acts as if it had been done before the mount left that directory.

use std::{path::PathBuf, sync::Arc};

use bytes::Bytes;
use posh_proto::{
    executor::{VolumeSession, rejected::Kind},
    rule::{self, Rule},
};

use super::{Volumes, end_replaced, kept};
use crate::{callers::Caller, error::Refusal, pool::ExportRoot, service::ServiceState};

/// The volumes of a run's workstation.
#[derive(Debug)]
pub struct ShownVolumes {
    identity: Option<String>,
    volumes: Vec<ShownVolume>,
}

/// A session as the mount knows it.
#[derive(Debug)]
struct ShownVolume {
    session: Bytes,
    /// Its [`DirectorySession::opened`](posh_volume::directory::DirectorySession::opened).
    opened: u64,
    /// Its export's path.
    path: PathBuf,
}

impl ShownVolumes {
    /// Those that a run names.
    pub fn named_in(caller: &Caller, named: &[VolumeSession]) -> Self {
        let shown = |named: &VolumeSession| {
            let export = caller.exports.iter().find(|export| export.name == named.export)?;
            let (session, opened) = (kept(&named.session), named.opened);
            Some(ShownVolume { session, opened, path: export.path.clone() })
        };
        // An older gateway does not tell which session it means.
        let volumes = match rule::holds(Rule::Coherence) {
            true => named.iter().filter(|named| named.opened != 0).filter_map(shown).collect(),
            false => Vec::new(),
        };
        Self { identity: caller.identity.clone(), volumes }
    }

    /// Call it when the run's view is open, just before its commands start. Sessions of any
    /// workstation that have another directory than the run end, unless the path has changed again.
    ///
    /// # Errors
    /// A volume may show another directory than the run would act in.
    pub fn require(&self, shared: &Arc<ServiceState>, roots: &[ExportRoot]) -> Result<(), Refusal> {
        if shared.volumes.are_elsewhere(roots) {
            end_replaced(shared);
        }
        match self.volumes.iter().all(|volume| shared.volumes.shows(self, volume, roots)) {
            true => Ok(()),
            false => Err(Refusal::new(
                Kind::Stale,
                "another directory is at the export's path than the volume shows, or the volume's \
                 session is being opened anew",
            )),
        }
    }
}

impl Volumes {
    /// Returns true if a session has another directory than a run found at its export's path.
    fn are_elsewhere(&self, roots: &[ExportRoot]) -> bool {
        let sessions = self.sessions.lock().expect("not poisoned");
        sessions.values().any(|served| {
            let identity = served.store.directory().root_identity();
            roots.iter().any(|root| root.path == served.export.path && root.identity != identity)
        })
    }

    /// Returns true if a run with these directories acts where that volume's session is.
    fn shows(&self, whose: &ShownVolumes, volume: &ShownVolume, roots: &[ExportRoot]) -> bool {
        let mut own = roots.iter().filter(|root| root.path == volume.path).peekable();
        if own.peek().is_none() {
            return true;
        }
        let served = self.sessions.lock().expect("not poisoned").get(&volume.session).cloned();
        let served = served.filter(|served| {
            served.caller.identity == whose.identity
                && served.store.opened().0 == volume.opened
                && served.export.path == volume.path
        });
        served.is_some_and(|served| {
            let identity = served.store.directory().root_identity();
            own.all(|root| root.identity == identity)
        })
    }
}
