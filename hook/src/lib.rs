//! The exec hook: a library that the dynamic loader puts into the user's shell
//! and into what it starts. It stands in front of execve(2) and its family, looks
//! whether a command may touch a mount that has an owner, and only then starts
//! the stage program in its place.
//!
//! It lives in processes that know nothing of it, between fork and exec, in children of vfork that
//! share their parent's memory, on stacks of a few kilobytes, beside threads that use the
//! environment. So: no allocation, no standard library, no panic; what needs room is in a slot of
//! static memory ([`arena`]), and all frames together take less than 2 KiB; memory that is mapped
//! is unmapped before the exec; after `main` has begun nothing writes to `environ`, and each of its
//! entries is read once. The kernel is called directly (`syscall`), the C library by few names
//! without versions, which are bound at the start; it is not linked to, so that one file serves
//! every glibc.
//!
//! posh's build script builds this crate with `--cfg posh_preload` as a C library; only then are
//! the functions of [`interpose`] exported by their C names, and only then does [`session`] run
//! before `main`. As a Rust library it is the quick look ([`look`]) of the stage program, and the
//! check whether a program can be served at all ([`target`]).
#![cfg_attr(not(test), no_std)]

pub mod arena;
mod door;
pub mod interpose;
mod leaves;
mod lend;
pub mod look;
mod memory;
mod message;
pub mod pipes;
mod places;
mod question;
mod readable;
mod search;
pub mod session;
mod sys;
mod syscall;
pub mod target;
mod text;
pub mod variadic;
mod walk;

/// Reached by no code: a test looks into the built library for the name that this refers to.
#[cfg(all(posh_preload, not(test)))]
#[panic_handler]
#[allow(unsafe_code, reason = "the reference must be to a symbol that exists nowhere")]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    unsafe extern "C" {
        fn posh_hook_must_not_panic() -> !;
    }
    // SAFETY: never called: the optimiser removes this function, since nothing panics.
    unsafe { posh_hook_must_not_panic() }
}
