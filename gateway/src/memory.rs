//! Giving memory back to the system.
#![allow(unsafe_code, reason = "mallopt(3) and malloc_trim(3) have no safe wrappers")]

/// Allocations from here on are mapped by themselves, and given back when they are freed: contents
/// of files, which come as chunks of 1 MiB. glibc would raise that bound with the first of them,
/// and keep as much again between those that live longer.
#[cfg(target_env = "gnu")]
const MAPPED_FROM_BYTES: nix::libc::c_int = 1 << 20;

/// Heaps that threads share: each keeps what it has had most of, and a volume has a hundred threads
/// that seldom work at the same time.
#[cfg(target_env = "gnu")]
const HEAPS: nix::libc::c_int = 2;

/// To be called before anything else is done.
pub fn keep_little() {
    // SAFETY: mallopt takes no pointers; there is one thread.
    #[cfg(target_env = "gnu")]
    unsafe {
        nix::libc::mallopt(nix::libc::M_MMAP_THRESHOLD, MAPPED_FROM_BYTES);
        nix::libc::mallopt(nix::libc::M_ARENA_MAX, HEAPS);
    }
}

/// Returns what the allocator holds and nobody uses.
pub fn trim() {
    // SAFETY: malloc_trim takes no pointers and may be called at any time, from any thread.
    #[cfg(target_env = "gnu")]
    unsafe {
        nix::libc::malloc_trim(0);
    }
}
