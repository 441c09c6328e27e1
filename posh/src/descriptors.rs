//! Handling of inherited descriptors. Rust's runtime would reopen closed standard descriptors for
//! good, which the shell would inherit (`posh ... <&-`); this module fills them only until the next
//! exec.

use std::{
    fs,
    os::fd::{AsRawFd, IntoRawFd, RawFd},
};

/// The first descriptor that is not a standard one.
const FIRST_OTHER: RawFd = 3;

/// Opens /dev/null as each of 0, 1 and 2 that is closed, so that no file that this program opens
/// gets that number and is written to by mistake. They are close-on-exec: the shell finds them
/// closed, as the caller left them.
pub fn fill_standard() {
    // open(2) takes the lowest free number, so the loop ends by the third round.
    while let Ok(null) = fs::OpenOptions::new().read(true).write(true).open("/dev/null") {
        if null.as_raw_fd() >= FIRST_OTHER {
            return;
        }
        let _kept_until_exec = null.into_raw_fd();
    }
}

/// Closes everything but the standard descriptors: a process that outlives its
/// caller must not keep the caller's pipes open. Call before opening anything.
pub fn close_inherited() {
    let Ok(entries) = fs::read_dir("/proc/self/fd") else { return };
    let open: Vec<RawFd> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str().and_then(|name| name.parse().ok()))
        .collect();
    for descriptor in open.into_iter().filter(|&descriptor| descriptor >= FIRST_OTHER) {
        // The listing's own descriptor is among them and closed by now.
        let _ = nix::unistd::close(descriptor);
    }
}
