//! Work that may take long, or hang with a server that is away, while the gateway goes on with everything else: its tasks share one
//! thread, and another one takes over that thread's work meanwhile.

use std::path::{Path, PathBuf};

use fs_mapper::{LocalReason, MountTable, Resolution};
use tokio::runtime::{Handle, RuntimeFlavor};

/// Does it.
pub fn aside<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        // Nobody else is there to go on.
        _ => work(),
    }
}

/// Looks at these paths, aside if one of them is on a network mount.
pub fn aside_if_far<T>(table: &MountTable, paths: &[PathBuf], work: impl FnOnce() -> T) -> T {
    match paths.iter().any(|path| is_far(table, path)) {
        true => aside(work),
        false => work(),
    }
}

fn is_far(table: &MountTable, path: &Path) -> bool {
    !matches!(table.resolve(path, Path::new("/")), Resolution::Local { reason: LocalReason::NotOnMount(_) })
}
