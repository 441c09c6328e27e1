//! Runs beside volumes: before a run starts, what sessions hold back is written; when one of its commands has ended, the
//! sessions of its workstation are told what it has changed, before the workstation hears that it has ended.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use bytes::Bytes;
use posh_proto::{
    executor::{Exited, VolumeMark, VolumeSession, rejected::Kind},
    rule::{self, Rule},
};
use posh_volume::store::{FileId, Leases, Returned, Stamp};

use super::{Volumes, session::Served};
use crate::{callers::Caller, error::Refusal};

/// Who does not write in this time what it holds back is not waited for by a run: the gateway waits not much longer for one to start.
const FLUSH_LIMIT: Duration = Duration::from_secs(5);

/// The sessions of a run's workstation.
#[derive(Debug, Clone, Default)]
pub struct Beside(Vec<(Bytes, Weak<Served>)>);

impl Volumes {
    /// Before a run looks at anything. Costs nothing if nobody holds anything back.
    ///
    /// # Errors
    /// A refusal, when somebody does not write it.
    pub async fn begin_run(&self, caller: &Caller, named: Vec<VolumeSession>) -> Result<Beside, Refusal> {
        if !rule::holds(Rule::Coherence) {
            return Ok(Beside::default());
        }
        let mut beside = Beside::default();
        for VolumeSession { session, returned } in named {
            let Ok(served) = self.session(caller, &session) else { continue };
            served.store.give_back(returned.into_iter().map(returned_of).collect());
            beside.0.push((session, Arc::downgrade(&served)));
        }
        let Some(machine) = self.machine_in_use() else { return Ok(beside) };
        let flush = machine.keeper.begin_flush(None);
        match tokio::time::timeout(FLUSH_LIMIT, flush.clear()).await {
            Ok(()) => Ok(beside),
            Err(_) => {
                let why = "a workstation has not written yet what it holds back of a file there";
                Err(Refusal::new(Kind::Stale, why))
            }
        }
    }
}

impl Beside {
    /// Nobody is to be told.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Tells the sessions what has changed until now, and notes where in what they are told that is.
    pub async fn tell(&self, mut exits: Vec<Exited>) -> Vec<Exited> {
        let mut marks = Vec::with_capacity(self.0.len());
        for (session, served) in &self.0 {
            // One that has ended is told nothing: its workstation finds out.
            let Some(served) = served.upgrade() else { continue };
            let stamp = served.store.mark().await;
            marks.extend(stamp.map(|Stamp(stamp)| VolumeMark { session: session.clone(), stamp }));
        }
        for exited in &mut exits {
            exited.volume_marks.clone_from(&marks);
        }
        exits
    }
}

fn returned_of(its: posh_proto::executor::ReturnedLease) -> Returned {
    let file = FileId { inode: its.inode, generation: its.generation };
    Returned { file, leases: Leases::WRITE, stamp: Stamp(its.stamp) }
}
