//! execl, execle, execlp: their arguments come in registers and then on the stack, which stable
//! Rust can receive only in assembly. The C library's versions make calls that can't be interposed.
//!
//! The registers are pushed just below the arguments on the stack, over the place of the return
//! address, which is moved. So all arguments form one array in place, and none is copied.
#![allow(
    unsafe_code,
    reason = "functions with a variable number of arguments, received in assembly"
)]

use core::ffi::{c_char, c_int};

use crate::{
    interpose,
    sys::{self, Strings},
};

/// execle(3), with the words as an array; behind its null pointer is the environment.
///
/// # Safety
/// As of execle(3).
unsafe extern "C" fn execle_of(path: *const c_char, argv: Strings) -> c_int {
    // SAFETY: called by the trampoline with what the caller passed: nothing behind the environment
    // is read.
    unsafe {
        let count = crate::session::count(argv);
        let environment: Strings = sys::entry(argv, count + 1).cast();
        interpose::execve(path, argv, environment)
    }
}

/// A function that makes an array of its arguments and passes it on.
macro_rules! trampoline {
    ($name:ident, $next:path, $manual:literal) => {
        #[doc = $manual]
        ///
        /// # Safety
        /// As the manual says.
        #[cfg_attr(all(posh_preload, not(test)), unsafe(no_mangle))]
        #[unsafe(naked)]
        #[cfg(target_arch = "x86_64")]
        pub unsafe extern "C" fn $name(_: *const c_char) -> c_int {
            core::arch::naked_asm!(
                ".cfi_startproc",
                "pop rax",
                ".cfi_adjust_cfa_offset -8",
                ".cfi_register rip, rax",
                "push r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                ".cfi_adjust_cfa_offset 40",
                "mov rsi, rsp",
                "push rax",
                ".cfi_adjust_cfa_offset 8",
                ".cfi_rel_offset rip, 0",
                // Five words and the address: the stack is aligned as at any call.
                "call {next}",
                "pop rcx",
                ".cfi_adjust_cfa_offset -8",
                ".cfi_register rip, rcx",
                "add rsp, 40",
                ".cfi_adjust_cfa_offset -40",
                "push rcx",
                ".cfi_adjust_cfa_offset 8",
                ".cfi_rel_offset rip, 0",
                "ret",
                ".cfi_endproc",
                next = sym $next,
            )
        }

        #[doc = $manual]
        ///
        /// # Safety
        /// As the manual says.
        #[cfg_attr(all(posh_preload, not(test)), unsafe(no_mangle))]
        #[unsafe(naked)]
        #[cfg(target_arch = "aarch64")]
        pub unsafe extern "C" fn $name(_: *const c_char) -> c_int {
            core::arch::naked_asm!(
                ".cfi_startproc",
                "sub sp, sp, #80",
                ".cfi_adjust_cfa_offset 80",
                "stp x29, x30, [sp]",
                ".cfi_rel_offset x30, 8",
                // Seven words up to where the others begin.
                "str x1, [sp, #24]",
                "stp x2, x3, [sp, #32]",
                "stp x4, x5, [sp, #48]",
                "stp x6, x7, [sp, #64]",
                "add x1, sp, #24",
                "bl {next}",
                "ldp x29, x30, [sp]",
                "add sp, sp, #80",
                ".cfi_adjust_cfa_offset -80",
                "ret",
                ".cfi_endproc",
                next = sym $next,
            )
        }
    };
}

trampoline!(execl, interpose::execv, "execl(3).");
trampoline!(execlp, interpose::execvp, "execlp(3).");
trampoline!(execle, execle_of, "execle(3).");
