//! Limits of the gateway's own process (getrlimit(2)). It inherits those of whichever shell needed
//! it first, and serves shells without them.
//!
//! Invariant: a gateway that runs writes files of any length, and has soft limits as high as they
//! can be. Commands keep the limits of their own shells, by which they are executed, or which their
//! stages report.

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};

/// Raised: each of them ends a process, or makes it fail, in the middle of its work. Not among them
/// is the size of stacks, from which the kernel derives the memory map of what the gateway
/// executes, and that of core dumps, which hold secrets. The number of descriptors is raised by
/// [`posh_reach::open_files`].
const RAISED: [Resource; 5] = [
    Resource::RLIMIT_FSIZE,
    Resource::RLIMIT_CPU,
    Resource::RLIMIT_DATA,
    Resource::RLIMIT_AS,
    Resource::RLIMIT_NPROC,
];

/// Reason for not serving anybody.
#[derive(Debug, thiserror::Error)]
#[error(
    "the size of files is limited to {0} bytes here (`ulimit -f`), for a gateway that would serve \
     shells without this limit too"
)]
pub struct FilesAreLimited(u64);

/// Raises the soft limits to the hard ones.
///
/// # Errors
/// [`FilesAreLimited`]: the hard limit can't be raised.
pub fn raise() -> Result<(), FilesAreLimited> {
    for resource in RAISED {
        if let Ok((soft, hard)) = getrlimit(resource)
            && soft < hard
        {
            let _ = setrlimit(resource, hard, hard);
        }
    }
    match getrlimit(Resource::RLIMIT_FSIZE) {
        Ok((_, hard)) if hard != RLIM_INFINITY => Err(FilesAreLimited(hard)),
        _ => Ok(()),
    }
}
