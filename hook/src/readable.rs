//! Checks whether the arguments of an exec can be read: execve(2) answers EFAULT if they can't, and
//! code that reads them before it must not crash instead.
//!
//! The check is rt_sigprocmask(2) with an invalid `how`: the kernel reads the new mask first, and
//! then refuses the call. That has no effect, and every C library makes this call around an exec,
//! so that seccomp filters allow it. Any result but EFAULT counts as readable.
#![allow(unsafe_code, reason = "it reads strings and arrays of the caller's")]

use core::ffi::{c_char, c_int};

use crate::{
    sys::Strings,
    syscall::{call, number},
};

/// The smallest page size; a larger page is checked several times.
const PAGE_BYTES: usize = 4096;
/// Bytes that the kernel reads: a signal mask.
const MASK_BYTES: usize = 8;
const EFAULT: c_int = 14;

/// Caches the last page that could be read.
#[derive(Debug, Default)]
struct Pages {
    last: usize,
}

impl Pages {
    fn holds(&mut self, address: usize) -> bool {
        let page = address & !(PAGE_BYTES - 1);
        if page == 0 {
            // The kernel takes null for no mask at all.
            return false;
        }
        if page == self.last {
            return true;
        }
        const NO_SUCH_CHANGE: usize = 0x7fff_ffff;
        let arguments = [NO_SUCH_CHANGE, address & !(MASK_BYTES - 1), 0, MASK_BYTES];
        // SAFETY: a mask is read, and with this `how` nothing is done with it.
        let is_readable = unsafe { call(number::RT_SIGPROCMASK, arguments) } != Err(EFAULT);
        if is_readable {
            self.last = page;
        }
        is_readable
    }

    /// Returns true if the string can be read up to its NUL.
    fn hold_string(&mut self, string: *const c_char) -> bool {
        let mut at = string;
        loop {
            if !self.holds(at.addr()) {
                return false;
            }
            loop {
                // SAFETY: it lies in a page that can be read.
                if unsafe { at.read() } == 0 {
                    return true;
                }
                at = at.wrapping_add(1);
                if at.addr() & (PAGE_BYTES - 1) == 0 {
                    break;
                }
            }
        }
    }
}

/// Returns true if the string can be read.
pub fn is_string(string: *const c_char) -> bool {
    Pages::default().hold_string(string)
}

/// Returns true if the array and its strings can be read; Linux takes a null pointer for an empty
/// array.
pub fn are_strings(array: Strings) -> bool {
    let (mut of_array, mut of_strings) = (Pages::default(), Pages::default());
    let mut at = array;
    if at.is_null() {
        return true;
    }
    loop {
        let last_byte = at.addr().wrapping_add(size_of::<*const c_char>() - 1);
        if !of_array.holds(at.addr()) || !of_array.holds(last_byte) {
            return false;
        }
        // SAFETY: it lies in pages that can be read; the kernel wants no alignment.
        let string = unsafe { at.read_unaligned() };
        if string.is_null() {
            return true;
        }
        if !of_strings.hold_string(string) {
            return false;
        }
        at = at.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests {
    use core::ptr;

    use super::*;

    #[test]
    fn strings_end_before_their_memory_does() {
        const READ_AND_WRITE: usize = 3;
        const PRIVATE_AND_ANONYMOUS: usize = 0x22;
        let arguments = [0, 2 * PAGE_BYTES, READ_AND_WRITE, PRIVATE_AND_ANONYMOUS, usize::MAX, 0];
        // SAFETY: new memory, of which the second page goes again.
        let memory = unsafe {
            let memory =
                ptr::with_exposed_provenance_mut::<c_char>(call(number::MMAP, arguments).unwrap());
            memory.write_bytes(1, 2 * PAGE_BYTES);
            call(number::MUNMAP, [memory.addr() + PAGE_BYTES, PAGE_BYTES]).unwrap();
            memory
        };
        let end: *const c_char = memory.wrapping_add(PAGE_BYTES - 3);
        assert!(
            !is_string(end) && !is_string(ptr::null()) && !is_string(ptr::without_provenance(16))
        );
        let words = [c"a".as_ptr(), end, ptr::null()];
        assert!(!are_strings(words.as_ptr()) && !are_strings(end.cast()));
        // SAFETY: the last byte that can be written.
        unsafe { memory.add(PAGE_BYTES - 1).write(0) };
        assert!(is_string(end) && are_strings(words.as_ptr()) && are_strings(ptr::null()));
        let long: Vec<u8> = [b'y'; 9000].into_iter().chain([0]).collect();
        assert!(is_string(c"text".as_ptr()) && is_string(long.as_ptr().cast()));
    }
}
