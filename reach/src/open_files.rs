//! Limit on open files (RLIMIT_NOFILE). A gateway raises its own soft limit, and each program that
//! it starts gets back the limit that the gateway was started with: some programs walk through all
//! numbers below it, or use select(2), which takes none above 1,023.
#![allow(unsafe_code, reason = "pre_exec runs between fork and exec")]

use std::{io, os::unix::process::CommandExt as _, process::Command, sync::OnceLock};

use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};

/// Soft limit before it was raised.
static BEFORE: OnceLock<rlim_t> = OnceLock::new();

/// Raises the soft limit of this process to its hard limit. The limit stays where that is refused.
pub fn raise() {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return };
    if soft < hard && BEFORE.set(soft).is_ok() {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// Makes a command start with the limit from before [`raise`].
pub fn give_back(command: &mut Command) {
    let Some(soft) = BEFORE.get().copied() else { return };
    // SAFETY: the closure makes two system calls and allocates nothing, as is required after a
    // fork in a process with threads.
    unsafe {
        command.pre_exec(move || {
            let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
            setrlimit(Resource::RLIMIT_NOFILE, soft.min(hard), hard).map_err(io::Error::from)
        });
    }
}
