//! The arguments of this program, from its C `main`: std gets them itself only if the C library
//! passes them to start-up functions, as glibc does and musl does not.
#![allow(unsafe_code, reason = "what a C `main` is given is pointers")]

use std::{
    ffi::{CStr, OsStr, OsString, c_char, c_int},
    os::unix::ffi::OsStrExt,
};

/// Copies the arguments.
///
/// # Safety
/// These must be the arguments of `main` as the C library gives them: `argc` strings, each ended by
/// a zero byte.
#[must_use]
pub unsafe fn of_main(argc: c_int, argv: *const *const c_char) -> Vec<OsString> {
    let count = usize::try_from(argc).unwrap_or(0);
    // SAFETY: the caller's promise.
    let words = (0..count).map(|index| unsafe { CStr::from_ptr(*argv.add(index)) });
    words.map(|word| OsStr::from_bytes(word.to_bytes()).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_taken_as_they_are() {
        let words = [c"posh".as_ptr(), c"".as_ptr(), c"\xff b".as_ptr(), std::ptr::null()];
        // SAFETY: three strings, and the null pointer that ends an argv.
        let found = unsafe { of_main(3, words.as_ptr()) };
        assert_eq!(found, [OsStr::new("posh"), OsStr::new(""), OsStr::from_bytes(b"\xff b")]);
    }
}
