//! system(3) and popen(3) start a shell with the process's own environment, which lacks the
//! session's variables. Other threads may use `environ` at any time, so that it is never written
//! to. Instead the shell is given another text, which executes the stage program; that adds the
//! variables to its own environment and becomes the same shell with the original text.
#![allow(unsafe_code, reason = "reads the environment and the text of C functions")]

use core::{
    ffi::{CStr, c_char},
    ptr,
};

use crate::{
    arena::{self, Arena},
    door::{ExecRequest, Plan, words},
    readable,
    session::{self, AS_SHELL},
    sys::{self, AT_FDCWD, Mapped},
    text::{Full, Text},
};

/// Bytes that execve(2) accepts under any limits of the process (ARG_MAX of a kernel with
/// `RLIMIT_STACK` of 0).
const CERTAIN_BYTES: usize = 128 << 10;
/// Space for the names of both programs, their options and the session's variables.
const SMALL_BYTES: usize = 16 << 10;
/// Longest text that fits a slot when it is quoted; a longer one is passed as given.
const MAX_TEXT_BYTES: usize = 32 << 10;

/// Calls with the text to pass to the shell.
///
/// # Safety
/// `text` is null or a C string.
pub(crate) unsafe fn to_shell<T>(text: *const c_char, call: impl FnOnce(*const c_char) -> T) -> T {
    if !readable::is_string(text) {
        return call(text);
    }
    // The slot is released before the call, which lasts as long as the shell.
    let with_session = arena::with(|arena| {
        // SAFETY: the caller's promise.
        let text = unsafe { through_stage(CStr::from_ptr(text), &mut arena?.scope()) }?
            .to_bytes_with_nul();
        Mapped::copy_of(text)
    });
    match with_session {
        Some(mapped) => call(mapped.as_bytes().as_ptr().cast()),
        None => call(text),
    }
}

/// `None` if the text is to be passed as given.
///
/// # Safety
/// `environ` is an environment.
unsafe fn through_stage<'a>(text: &CStr, arena: &mut Arena<'a>) -> Option<&'a CStr> {
    let session = session::current()?;
    let (environment, argv) = (sys::environment(), ptr::null());
    let request = ExecRequest {
        directory: AT_FDCWD,
        path: c"/bin/sh",
        argv,
        environment,
        spawned: true,
        moved: false,
    };
    // SAFETY: the caller's promise.
    let [first, second] = unsafe {
        let plan = Plan::of(&request, arena)?;
        fits(environment, text).then(|| plan.variables(arena))??
    };
    let stage = session.directory(arena)?.stage(arena)?;
    // The shell might take such a text for an option.
    let is_option = text.to_bytes().starts_with(b"-") || text.to_bytes().starts_with(b"+");
    if is_option || !sys::is_executable(stage) {
        return None;
    }
    let mut command = arena.text(2 * MAX_TEXT_BYTES.min(arena.left() / 2))?;
    let mut add = || -> Result<(), Full> {
        command.push(b"exec")?;
        for word in [stage, AS_SHELL, first, second, text] {
            quote(word.to_bytes(), &mut command)?;
        }
        command.push(b"\0")
    };
    add().ok()?;
    CStr::from_bytes_with_nul(command.into_bytes()).ok()
}

/// Returns true if the stage program and the shell can be executed with a few more words, and the
/// shell is not set to trace its commands (`SHELLOPTS`).
///
/// # Safety
/// As for [`words`], of C strings.
unsafe fn fits(environment: sys::Strings, text: &CStr) -> bool {
    let mut bytes = SMALL_BYTES + 2 * text.count_bytes();
    // SAFETY: the caller's promise.
    let mut variables =
        unsafe { words(environment).map(|variable| CStr::from_ptr(variable).to_bytes()) };
    variables.all(|variable| {
        bytes += variable.len() + 1 + size_of::<*const c_char>();
        bytes < CERTAIN_BYTES && !variable.starts_with(b"SHELLOPTS=")
    })
}

/// Appends a blank and the word, quoted for a shell.
fn quote(word: &[u8], text: &mut Text<&mut [u8]>) -> Result<(), Full> {
    text.push(b" '")?;
    for (index, part) in word.split(|byte| *byte == b'\'').enumerate() {
        if index > 0 {
            text.push(b"'\\''")?;
        }
        text.push(part)?;
    }
    text.push(b"'")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_shell_reads_the_words_that_were_quoted() {
        let mut buffer = [0; 200];
        let mut text = Text::within(&mut buffer[..]);
        text.push(b"printf %s,").unwrap();
        for word in ["it's", "", "a b\n$HOME `x` \"\\", "''"] {
            quote(word.as_bytes(), &mut text).unwrap();
        }
        let script = std::str::from_utf8(text.as_bytes()).unwrap();
        let output = Command::new("sh").args(["-c", script]).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "it's,,a b\n$HOME `x` \"\\,'',");
        assert_eq!(quote(&[b'\''; 100], &mut text), Err(Full));
    }

    #[test]
    fn what_might_not_fit_goes_as_given() {
        let long = std::ffi::CString::new(vec![b'x'; CERTAIN_BYTES]).unwrap();
        let check = |variable: &CStr, expected| {
            let environment = [c"A=b".as_ptr(), variable.as_ptr(), ptr::null()];
            // SAFETY: the array is an environment.
            assert_eq!(unsafe { fits(environment.as_ptr(), c"true") }, expected);
        };
        check(c"HOME=/", true);
        check(&long, false);
        check(c"SHELLOPTS=xtrace", false);
    }
}
