//! Before a remote command reads a file, what this machine has written to it
//! through the mount must be on the server (design §5, rule 8).

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use fs_mapper::{MountTable, Resolution, coherence::Adapter};
use posh_proto::rule::{self, Rule};

use crate::facts::{Place, Reading};

/// A mount that can't say in this time that a file is settled has it not settled.
const DEADLINE: Duration = Duration::from_secs(1);

/// Settles the inputs of every command; one that can't be settled makes its
/// command run here.
///
/// sshfs is left out: it hands every write to the server at once, and a closed
/// file is there; asking would cost each file two round trips.
pub async fn settle(table: &Arc<MountTable>, readings: &mut [Result<Reading, String>]) {
    if !rule::holds(Rule::Coherence) {
        return;
    }
    for reading in readings {
        let Ok(read) = reading else { continue };
        let paths = unsettled(table, read);
        if paths.is_empty() {
            continue;
        }
        let table = Arc::clone(table);
        let work = tokio::task::spawn_blocking(move || paths.iter().try_for_each(|p| settle_one(&table, p)));
        let settled = tokio::time::timeout(DEADLINE, work).await;
        let reason = match settled {
            Ok(Ok(Ok(()))) => continue,
            Ok(Ok(Err(reason))) => reason,
            _ => "its mount does not say whether its files are on the server".to_owned(),
        };
        *reading = Err(reason);
    }
}

fn unsettled(table: &MountTable, reading: &Reading) -> Vec<PathBuf> {
    let asks = |place: &Place| match place {
        Place::At(_, path, mount) if !matches!(table.mount(*mount).adapter(), Adapter::Bind | Adapter::Sshfs) => {
            Some(path.as_path().to_owned())
        }
        _ => None,
    };
    reading.places.iter().flatten().chain(&reading.cwd).filter_map(asks).collect()
}

fn settle_one(table: &MountTable, path: &Path) -> Result<(), String> {
    let Resolution::Owned(owned) = table.resolve(path, "/".as_ref()) else { return Ok(()) };
    table.mount(owned.mount).coherence().settle(path).map_err(|e| e.to_string())
}
