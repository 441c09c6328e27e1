//! The stage program: what the shell execs in place of an annotated command.
//! Only the entry lives here; the story is [`posh::stage::run`].
//!
//! `no_main`, because Rust's runtime would reopen closed standard descriptors
//! and ignore SIGPIPE before we could see what the shell had prepared.
#![no_main]
#![allow(unsafe_code, reason = "an entry point without Rust's runtime must be an unmangled C function")]

/// The C entry point. The arguments are read through `std::env`, which glibc
/// fills before `main`.
#[unsafe(no_mangle)]
pub extern "C" fn main(_argc: i32, _argv: *const *const u8) -> i32 {
    posh::stage::run()
}
