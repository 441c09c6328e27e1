//! Returning memory to the system.
#![allow(unsafe_code, reason = "mallopt(3) and malloc_trim(3) have no safe wrappers")]

/// Allocations from this size on are mapped separately and unmapped when freed: file contents, in
/// chunks of 1 MiB. By default, glibc would raise this threshold with the first of them and keep as
/// much again.
#[cfg(target_env = "gnu")]
const MAPPED_FROM_BYTES: nix::libc::c_int = 1 << 20;

/// Number of shared heaps: each keeps its peak size, and a volume has a hundred threads that rarely
/// work at the same time.
#[cfg(target_env = "gnu")]
const HEAPS: nix::libc::c_int = 2;

/// Call before anything else.
pub fn keep_little() {
    // SAFETY: mallopt takes no pointers; there is one thread.
    #[cfg(target_env = "gnu")]
    unsafe {
        nix::libc::mallopt(nix::libc::M_MMAP_THRESHOLD, MAPPED_FROM_BYTES);
        nix::libc::mallopt(nix::libc::M_ARENA_MAX, HEAPS);
    }
}

/// Returns unused memory of the allocator.
pub fn trim() {
    // SAFETY: malloc_trim takes no pointers and may be called at any time, from any thread.
    #[cfg(target_env = "gnu")]
    unsafe {
        nix::libc::malloc_trim(0);
    }
}
