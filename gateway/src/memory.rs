//! Giving memory back to the system.
#![allow(unsafe_code, reason = "malloc_trim(3) has no safe wrapper")]

/// Returns what the allocator holds and nobody uses.
pub fn trim() {
    // SAFETY: malloc_trim takes no pointers and may be called at any time, from any thread.
    #[cfg(target_env = "gnu")]
    unsafe {
        nix::libc::malloc_trim(0);
    }
}
