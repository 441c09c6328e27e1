//! Mounts a local directory as a volume: `mount_directory DIRECTORY MOUNT_POINT
//! [CACHE_SIZE [JOURNAL]]`. For test suites for file systems, without an executor. Ends when it is
//! unmounted.
#![allow(clippy::unwrap_used)]

use std::{env, path::PathBuf, sync::Arc};

use nix::unistd::geteuid;
use posh_volume::{
    directory::{Directory, DirectorySession, Liveness, Machine, Mutability, Rights},
    fs::{MAX_FILES, Settings, Volume},
    fuse::{self, Users},
    journal::Journal,
    mount::{self, Wanted},
};

#[tokio::main(worker_threads = 2)]
async fn main() {
    let arguments: Vec<PathBuf> = env::args_os().skip(1).map(PathBuf::from).collect();
    let [directory, mount_point, rest @ ..] = &arguments[..] else {
        panic!("DIRECTORY MOUNT_POINT [CACHE_SIZE [JOURNAL]]")
    };
    let cache =
        rest.first().and_then(|size| size.to_str()).map_or(64 << 20, |size| size.parse().unwrap());
    let is_root = geteuid().is_root();
    let rights = if is_root { Rights::Callers } else { Rights::Own };
    let directory =
        Directory::open(Machine::start().unwrap(), directory, rights, Mutability::ReadWrite)
            .unwrap();
    let store = Arc::new(DirectorySession::open(directory, Liveness::Own));
    let (volume, invalidations) = Volume::new(
        store,
        Settings { sync: false, memory_bytes: cache, most_files: MAX_FILES },
        None,
    );
    if let Some(journal) = rest.get(1) {
        let (journal, left) = Journal::open(journal).unwrap();
        volume.keep_journal(journal, left).await.unwrap();
    }
    let wanted = Wanted { source: "this:directory", read_only: false, for_everybody: is_root };
    let device = mount::mount(&wanted, mount_point).unwrap();
    let users = if is_root { Users::All } else { Users::Own };
    let served = tokio::task::block_in_place(|| {
        fuse::serve(volume, invalidations, device.device, mount_point, users)
    })
    .unwrap();
    println!("ready");
    tokio::task::spawn_blocking(|| served.join().unwrap().unwrap()).await.unwrap();
}
