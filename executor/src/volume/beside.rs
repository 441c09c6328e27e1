//! Runs beside volumes: before a run starts, sessions write back their cached changes of the
//! exports that it uses; when a command has ended, the sessions of its workstation get its changes,
//! before the workstation is told of its end.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Weak},
};

use bytes::Bytes;
use posh_proto::{
    executor::{Exited, VolumeMark, VolumeSession},
    rule::{self, Rule},
};
use posh_volume::{
    leases::{Overlap, RUN_TIME},
    store::{FileId, Leases, Returned, Stamp},
};

use super::{Volumes, kept, session::Served};
use crate::callers::Caller;

/// The sessions of a run's workstation.
#[derive(Debug, Clone, Default)]
pub struct Beside(Vec<(Bytes, Weak<Served>)>);

impl Volumes {
    /// Call it before a run accesses these trees. Costs nothing if no session holds changes of
    /// them, and else at most [`RUN_TIME`]: sessions that have not written by then lose their
    /// leases ([`posh_volume::leases`]). After a restart it first waits until holders of an earlier
    /// process's leases are back, or their time is over.
    pub async fn begin_run(
        &self,
        caller: &Caller,
        named: Vec<VolumeSession>,
        trees: &[PathBuf],
    ) -> Beside {
        if !rule::holds(Rule::Coherence) {
            return Beside::default();
        }
        let mut beside = Beside::default();
        for VolumeSession { session, returned, .. } in named {
            if beside.0.iter().any(|(known, _)| *known == session) {
                continue;
            }
            let Ok(served) = self.session(caller, &session) else { continue };
            served.store.give_back(returned.into_iter().map(returned_of).collect());
            beside.0.push((kept(&session), Arc::downgrade(&served)));
        }
        let Overlap(overlap) = self.keeper.table().overlap();
        let is_used = |tree: &Path| trees.iter().any(|used| overlap(used, tree));
        let waiter = caller.identity.as_deref().unwrap_or_default();
        self.keeper.flush(waiter, None, is_used, RUN_TIME).await;
        beside
    }
}

/// Trees of the caller's exports for which `is_used` is true.
pub fn trees_of(caller: &Caller, is_used: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    // The paths have no links, and are not accessed: an export that hangs would block the runtime's
    // threads.
    caller
        .exports
        .iter()
        .filter(|export| is_used(&export.name))
        .map(|export| export.path.clone())
        .collect()
}

impl Beside {
    /// Returns true if no session is to be told.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Sends the changes made until now to the sessions, and notes the position of that in their
    /// notices.
    pub async fn tell(&self, exits: impl IntoIterator<Item = &mut Exited>) {
        let mut marks = Vec::with_capacity(self.0.len());
        for (session, served) in &self.0 {
            // A session that has ended gets nothing: its workstation notices by itself.
            let Some(served) = served.upgrade() else { continue };
            let stamp = served.store.mark().await;
            marks.extend(stamp.map(|Stamp(stamp)| VolumeMark { session: session.clone(), stamp }));
        }
        for exited in exits {
            exited.volume_marks.clone_from(&marks);
        }
    }
}

fn returned_of(its: posh_proto::executor::ReturnedLease) -> Returned {
    let file = FileId { inode: its.inode, generation: its.generation };
    Returned { file, leases: Leases::WRITE, stamp: Stamp(its.stamp) }
}
