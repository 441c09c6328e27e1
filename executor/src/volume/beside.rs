//! Runs beside volumes: before a run starts, what sessions hold back of the exports that it uses is
//! written; when one of its commands has ended, the sessions of its workstation are told what it
//! has changed, before the workstation hears that it has ended.

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
    leases::{RUN_TIME, overlap},
    store::{FileId, Leases, Returned, Stamp},
};

use super::{Volumes, kept, session::Served};
use crate::callers::Caller;

/// The sessions of a run's workstation.
#[derive(Debug, Clone, Default)]
pub struct Beside(Vec<(Bytes, Weak<Served>)>);

impl Volumes {
    /// Before a run looks at anything of these trees. Costs nothing if nobody holds anything back
    /// of them, and else at most [`RUN_TIME`]: whoever has not written by then has lost its leases
    /// ([`posh_volume::leases`]). After a restart it waits first until those who had leases of an
    /// earlier process are back, or their time is over.
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
        for VolumeSession { session, returned } in named {
            if beside.0.iter().any(|(known, _)| *known == session) {
                continue;
            }
            let Ok(served) = self.session(caller, &session) else { continue };
            served.store.give_back(returned.into_iter().map(returned_of).collect());
            beside.0.push((kept(&session), Arc::downgrade(&served)));
        }
        let is_used = |tree: &Path| trees.iter().any(|used| overlap(used, tree));
        let waiter = (caller.identity.as_deref().unwrap_or_default(), None);
        self.keeper.flush(waiter, is_used, RUN_TIME).await;
        beside
    }
}

/// The trees of those exports of the caller's that `is_used` says.
pub fn trees_of(caller: &Caller, is_used: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    // Without links as they are, and not looked at: on the runtime's threads an export that hangs
    // would hold up others.
    caller
        .exports
        .iter()
        .filter(|export| is_used(&export.name))
        .map(|export| export.path.clone())
        .collect()
}

impl Beside {
    /// Nobody is to be told.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Tells the sessions what has changed until now, and notes where in what they are told that
    /// is.
    pub async fn tell(&self, exits: impl IntoIterator<Item = &mut Exited>) {
        let mut marks = Vec::with_capacity(self.0.len());
        for (session, served) in &self.0 {
            // One that has ended is told nothing: its workstation finds out.
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
