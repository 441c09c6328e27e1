//! The `posh` command, for the lines that start a shell, which users wait for. Option parsing, gRPC
//! and TLS are in `posh-cli`, which this program executes when needed: in one program with all of
//! it, the loader alone would take a third of a millisecond more.
//!
//! There is no Rust `main`: its runtime would ignore SIGPIPE and reopen closed standard descriptors
//! before our code runs, and the shell would inherit both.
#![no_main]
#![allow(unsafe_code, reason = "a C `main` is exported by an unsafe attribute, and given pointers")]

use std::{
    convert::Infallible,
    ffi::{CString, OsString, c_char, c_int},
    io,
    os::unix::ffi::OsStrExt,
};

use nix::unistd::execv;
use posh::{
    Error, descriptors, ending,
    launch::{self, Launch, ShellWords, begins_option},
    programs, words,
};

#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;

/// Called by the C library.
#[unsafe(no_mangle)]
extern "C" fn main(argc: c_int, argv: *const *const c_char) -> c_int {
    descriptors::fill_standard();
    // SAFETY: as the C library gave them.
    let words = unsafe { words::of_main(argc, argv) };
    let is_login = words.first().is_some_and(|name| begins_option(name));
    let never = match ShellWords::plain(words.get(1..).unwrap_or_default()) {
        Some(words) => launch::run(&Launch { is_login, ..Launch::plain(words) }, &mut io::stderr()),
        None => become_cli(&words),
    };
    match never {
        Ok(never) => match never {},
        Err(error) => ending::complain(&error),
    }
}

/// Becomes posh-cli, which handles everything else.
fn become_cli(words: &[OsString]) -> Result<Infallible, Error> {
    let cli = programs::beside("posh-cli");
    let cli = cli.map_err(|source| Error::Start {
        attempt: "find posh-cli beside posh".to_owned(),
        source,
    })?;
    let c_string = |word: &[u8]| CString::new(word).map_err(|_| Error::NulInArgument);
    let words =
        words.iter().map(|word| c_string(word.as_bytes())).collect::<Result<Vec<_>, _>>()?;
    execv(&c_string(cli.as_os_str().as_bytes())?, &words)
        .map_err(|source| Error::NoCli { path: cli, source })
}
