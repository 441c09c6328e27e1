//! Limits of the gateway's own process (getrlimit(2)). It inherits those of whichever shell needed
//! it first, and serves shells without them.
//!
//! Invariant: a gateway that runs has soft limits as high as they can be, and hard limits that it
//! reaches only where the machine itself has come to its end. Commands keep the limits of their own
//! shells, by which they are executed, or which their stages report.

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, rlim_t, setrlimit};

const GIB: rlim_t = 1 << 30;

/// A limit that would end a gateway, or make it fail in the middle of its work.
struct Bound {
    resource: Resource,
    /// Least hard limit of a gateway.
    least: rlim_t,
    /// Resource and unit, in words.
    what: &'static str,
    unit: &'static str,
    /// Option of the shell's `ulimit`.
    option: char,
}

/// Those of files and processor time are reached by anyone who works long enough: SIGXFSZ, SIGXCPU
/// and SIGKILL end all shells' sessions and volumes. 1024 descriptors, the default of every system,
/// are enough for a few hundred stages, and as many processes of this user for all threads. Beyond
/// 4 GiB of address space, or of private memory, no gateway comes: threads have up to 2 MiB each,
/// volumes 64 MiB, and an allocation that fails is the end of it. A main thread with 1 MiB of stack
/// is safe.
///
/// No gateway needs more of other resources than any limit gives, or none at all: locked memory,
/// message queues, pending signals, priorities. Core dumps hold secrets, so that their limit stays.
const BOUNDS: [Bound; 7] = [
    Bound {
        resource: Resource::RLIMIT_FSIZE,
        least: RLIM_INFINITY,
        what: "the size of files",
        unit: "bytes",
        option: 'f',
    },
    Bound {
        resource: Resource::RLIMIT_CPU,
        least: RLIM_INFINITY,
        what: "processor time",
        unit: "s",
        option: 't',
    },
    // Raised by `posh_reach::open_files`, which remembers the former limit.
    Bound {
        resource: Resource::RLIMIT_NOFILE,
        least: 1024,
        what: "the number of open files",
        unit: "descriptors",
        option: 'n',
    },
    Bound {
        resource: Resource::RLIMIT_NPROC,
        least: 1024,
        what: "the number of processes",
        unit: "processes",
        option: 'u',
    },
    Bound {
        resource: Resource::RLIMIT_AS,
        least: 4 * GIB,
        what: "virtual memory",
        unit: "bytes",
        option: 'v',
    },
    Bound {
        resource: Resource::RLIMIT_DATA,
        least: 4 * GIB,
        what: "the data segment",
        unit: "bytes",
        option: 'd',
    },
    Bound {
        resource: Resource::RLIMIT_STACK,
        least: 1 << 20,
        what: "the stack",
        unit: "bytes",
        option: 's',
    },
];

/// Reason for not serving anybody.
#[derive(Debug, thiserror::Error)]
#[error(
    "{what} is limited to {hard} {unit} here (`ulimit -{option}`), for a gateway that would serve \
     shells without this limit too"
)]
pub struct TooLimited {
    what: &'static str,
    hard: rlim_t,
    unit: &'static str,
    option: char,
}

/// Raises the soft limits to the hard ones.
///
/// # Errors
/// [`TooLimited`]: a hard limit, which can't be raised, is too low for a gateway.
pub fn raise() -> Result<(), TooLimited> {
    posh_reach::open_files::raise();
    for Bound { resource, least, what, unit, option } in BOUNDS {
        let Ok((soft, hard)) = getrlimit(resource) else { continue };
        // From the size of stacks the kernel derives the memory map of what the gateway executes.
        if soft < hard && resource != Resource::RLIMIT_STACK {
            let _ = setrlimit(resource, hard, hard);
        }
        // Root may have any number of processes.
        let is_bound = resource != Resource::RLIMIT_NPROC || !nix::unistd::geteuid().is_root();
        if hard < least && is_bound {
            return Err(TooLimited { what, hard, unit, option });
        }
    }
    Ok(())
}
