//! When the client learns that a command has ended: not before others can see what it wrote on an
//! export that is itself a mount, and not before its workstation's volumes are told.

use posh_proto::executor::Exited;
use tokio::{sync::OwnedSemaphorePermit, task::JoinSet};

use crate::{own_mounts::OwnMounts, volume::Beside};

/// The end of a command.
pub struct Ended {
    pub exited: Exited,
    /// Of its list of changes, if that is long.
    pub room: Option<OwnedSemaphorePermit>,
}

/// The ends of a run's commands on their way to the client.
pub struct Farewells {
    own_mounts: OwnMounts,
    volumes: Beside,
    /// Until all have ended.
    held: Vec<Ended>,
    under_way: JoinSet<Result<Vec<Ended>, String>>,
}

impl Farewells {
    /// Of a run that uses these.
    pub fn new(own_mounts: OwnMounts, volumes: Beside) -> Self {
        Self { own_mounts, volumes, held: Vec::new(), under_way: JoinSet::new() }
    }

    /// Whether there is none on its way.
    pub fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// A command has ended, the last one perhaps. Gives it back if there is nothing to wait for.
    pub fn ended(&mut self, mut ended: Ended, is_last: bool) -> Option<Ended> {
        if self.own_mounts.is_empty() && self.volumes.is_empty() {
            return Some(ended);
        }
        let volumes = self.volumes.clone();
        if self.own_mounts.is_empty() {
            self.under_way.spawn(async move {
                volumes.tell([&mut ended.exited]).await;
                Ok(vec![ended])
            });
            return None;
        }
        // Times there are not this machine's, so they do not tell all that changed.
        ended.exited.changes_incomplete = true;
        self.held.push(ended);
        if is_last {
            let (own_mounts, mut held) = (self.own_mounts.clone(), std::mem::take(&mut self.held));
            self.under_way.spawn(async move {
                own_mounts.publish().await?;
                volumes.tell(held.iter_mut().map(|ended| &mut ended.exited)).await;
                Ok(held)
            });
        }
        None
    }

    /// The next that the client may know. `None`: there is none on its way.
    ///
    /// # Errors
    /// What they wrote did not get further than here.
    pub async fn next(&mut self) -> Option<Result<Vec<Ended>, String>> {
        let ended = self.under_way.join_next().await?;
        Some(ended.unwrap_or_else(|error| Err(error.to_string())))
    }
}
