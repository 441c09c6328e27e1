//! Delays exit reports to the client: until others can see what the command wrote on an export that
//! is itself a mount, and until its workstation's volumes are updated.

use posh_proto::executor::Exited;
use tokio::{sync::OwnedSemaphorePermit, task::JoinSet};

use super::broken::FarewellError;
use crate::{own_mounts::OwnMounts, volume::Beside};

/// The exit of a command.
pub struct CommandExit {
    pub exited: Exited,
    /// Permit for a long list of its changes.
    pub room: Option<OwnedSemaphorePermit>,
}

/// The exits of a run's commands on their way to the client.
pub struct Farewells {
    own_mounts: OwnMounts,
    volumes: Beside,
    /// Exits held until all commands have ended.
    held: Vec<CommandExit>,
    under_way: JoinSet<Result<Vec<CommandExit>, FarewellError>>,
}

impl Farewells {
    /// For a run that uses these.
    pub fn new(own_mounts: OwnMounts, volumes: Beside) -> Self {
        Self { own_mounts, volumes, held: Vec::new(), under_way: JoinSet::new() }
    }

    /// Returns true if no exit is on its way.
    pub fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Takes the exit of a command. Returns it if there is nothing to wait for.
    pub fn ended(&mut self, mut ended: CommandExit, is_last: bool) -> Option<CommandExit> {
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
        // Such a mount's file times are not this machine's, so they do not show all changes.
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

    /// The next exits to report. `None`: none is on its way.
    ///
    /// # Errors
    /// Writes of the commands did not get beyond this machine.
    pub async fn next(&mut self) -> Option<Result<Vec<CommandExit>, FarewellError>> {
        let ended = self.under_way.join_next().await?;
        Some(ended.unwrap_or_else(|error| Err(error.into())))
    }
}
