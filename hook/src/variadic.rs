//! execl, execle, execlp: their words come one by one, in registers and then on
//! the stack, which stable Rust can receive only in assembly. The C library's own
//! ones end in calls that nobody can stand in front of.
#![allow(unsafe_code, reason = "functions with a variable number of arguments, received in assembly")]

use core::ffi::{c_char, c_int};

use crate::{
    door::{Strings, joined},
    interpose,
    sys::{self, E2BIG},
};

/// Registers that hold words, after the one with the path.
#[cfg(target_arch = "x86_64")]
const IN_REGISTERS: usize = 5;
#[cfg(target_arch = "aarch64")]
const IN_REGISTERS: usize = 7;

/// The words of a call: the first few were in registers, the others lie on the caller's stack.
struct Words {
    registers: Strings,
    stack: Strings,
    count: usize,
}

impl Words {
    /// # Safety
    /// Both are as the calling convention lays them out, and a null pointer ends the words.
    unsafe fn read(registers: Strings, stack: Strings) -> Self {
        let mut words = Self { registers, stack, count: 0 };
        // SAFETY: nothing behind the null pointer is read.
        while !unsafe { words.at(words.count) }.is_null() {
            words.count += 1;
        }
        words
    }

    unsafe fn at(&self, index: usize) -> *const c_char {
        // SAFETY: the caller's promise.
        unsafe {
            match index.checked_sub(IN_REGISTERS) {
                None => *self.registers.add(index),
                Some(index) => *self.stack.add(index),
            }
        }
    }

    /// Calls with all of them as an array.
    unsafe fn with(&self, call: &mut dyn FnMut(Strings) -> c_int) -> c_int {
        let first = self.count.min(IN_REGISTERS);
        let parts = [(self.registers, first), (self.stack, self.count - first)];
        // SAFETY: these are the words that were counted.
        let result = unsafe { joined(&parts, &[], call) };
        result.unwrap_or_else(|| {
            // More words than anybody writes down in a program.
            sys::set_errno(E2BIG);
            -1
        })
    }
}

unsafe extern "C" fn words_of_execl(path: *const c_char, registers: Strings, stack: Strings) -> c_int {
    // SAFETY: called by the trampoline with what the caller passed.
    unsafe { Words::read(registers, stack).with(&mut |argv| interpose::execv(path, argv)) }
}

unsafe extern "C" fn words_of_execlp(file: *const c_char, registers: Strings, stack: Strings) -> c_int {
    // SAFETY: as above.
    unsafe { Words::read(registers, stack).with(&mut |argv| interpose::execvp(file, argv)) }
}

unsafe extern "C" fn words_of_execle(path: *const c_char, registers: Strings, stack: Strings) -> c_int {
    // SAFETY: as above; behind the null pointer is the environment.
    unsafe {
        let words = Words::read(registers, stack);
        let environment: Strings = words.at(words.count + 1).cast();
        words.with(&mut |argv| interpose::execve(path, argv, environment))
    }
}

/// A function that lays its register words out in memory and passes on where they and the others are.
macro_rules! trampoline {
    ($name:ident, $words:ident, $manual:literal) => {
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
                "sub rsp, 56",
                ".cfi_adjust_cfa_offset 56",
                "mov [rsp], rsi",
                "mov [rsp + 8], rdx",
                "mov [rsp + 16], rcx",
                "mov [rsp + 24], r8",
                "mov [rsp + 32], r9",
                "mov rsi, rsp",
                // Above what was just taken, and the return address.
                "lea rdx, [rsp + 64]",
                "call {words}",
                "add rsp, 56",
                ".cfi_adjust_cfa_offset -56",
                "ret",
                ".cfi_endproc",
                words = sym $words,
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
                "stp x29, x30, [sp, #64]",
                "stp x1, x2, [sp]",
                "stp x3, x4, [sp, #16]",
                "stp x5, x6, [sp, #32]",
                "str x7, [sp, #48]",
                "mov x1, sp",
                "add x2, sp, #80",
                "bl {words}",
                "ldp x29, x30, [sp, #64]",
                "add sp, sp, #80",
                ".cfi_adjust_cfa_offset -80",
                "ret",
                ".cfi_endproc",
                words = sym $words,
            )
        }
    };
}

trampoline!(execl, words_of_execl, "execl(3).");
trampoline!(execlp, words_of_execlp, "execlp(3).");
trampoline!(execle, words_of_execle, "execle(3).");

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn words_in_registers_and_on_the_stack_are_one_list() {
        let word = |text: &'static CStr| text.as_ptr();
        let mut registers = [word(c"a"); IN_REGISTERS];
        let stack = [word(c"b"), word(c"c"), std::ptr::null(), word(c"never")];
        let read = |registers: &[*const c_char]| {
            let mut found = Vec::new();
            // SAFETY: both arrays live, and a null pointer ends the words.
            unsafe {
                Words::read(registers.as_ptr(), stack.as_ptr()).with(&mut |argv| {
                    found = (0..).map(|index| *argv.add(index)).take_while(|word| !word.is_null()).collect();
                    0
                });
            }
            found.iter().map(|word| unsafe { CStr::from_ptr(*word) }.to_owned()).collect::<Vec<_>>()
        };
        let mut expected = vec![c"a".to_owned(); IN_REGISTERS];
        expected.extend([c"b".to_owned(), c"c".to_owned()]);
        assert_eq!(read(&registers), expected);
        registers[2] = std::ptr::null();
        assert_eq!(read(&registers), [c"a".to_owned(), c"a".to_owned()]);
    }
}
