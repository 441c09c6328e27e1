//! The exec hook: a library that the dynamic loader preloads into the user's shell and into the
//! programs that it starts. It interposes execve(2) and its family, checks whether a command may
//! touch an owned mount, and only then executes the stage program instead.
//!
//! It runs in processes that do not expect it: between fork and exec, in children of vfork that
//! share their parent's memory, on stacks of a few kilobytes, beside threads that use the
//! environment. So it does not allocate, uses no standard library, and cannot panic. Larger data is
//! in a slot of static memory ([`arena`]), and all frames together take less than 2 KiB. Mapped
//! memory is unmapped before the exec. After `main` has begun nothing writes to `environ`, and each
//! of its entries is read once. System calls are made directly (`syscall`). Of the C library it
//! uses a few symbols without versions, bound at the start; it is not linked to it, so that one
//! file works with every glibc.
//!
//! posh's build script builds this crate with `--cfg posh_preload` as a C library; only then are
//! the functions of [`interpose`] exported by their C names, and only then does [`session`] run
//! before `main`. As a Rust library it provides the stage program's quick look ([`look`]), and the
//! check whether a program can be preloaded ([`target`]).
#![cfg_attr(not(test), no_std)]

pub mod arena;
mod door;
pub mod identity;
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

/// Never reached: a test checks that the built library does not refer to this symbol.
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
