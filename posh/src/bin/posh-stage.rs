//! The stage program: executed in place of an annotated command. This is only the entry; see
//! [`posh::stage::run`].
//!
//! `no_main`, because Rust's runtime would reopen closed standard descriptors and ignore SIGPIPE
//! before the stage could examine them.
#![no_main]
#![allow(
    unsafe_code,
    reason = "an entry point without Rust's runtime must be an unmangled C function, and is given \
              pointers"
)]

use std::ffi::{c_char, c_int};

#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;

/// Called by the C library.
#[unsafe(no_mangle)]
extern "C" fn main(argc: c_int, argv: *const *const c_char) -> c_int {
    // SAFETY: as the C library gave them.
    let words = unsafe { posh::words::of_main(argc, argv) };
    posh::stage::run(words)
}
