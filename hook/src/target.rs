//! Decides whether a program can be preloaded: it is loaded by the dynamic loader that this library
//! is for, and has no privileges of its own. For a program of another architecture the loader would
//! print an error; a static program would show the session's variables; a privileged one would
//! ignore the library but keep the variables.

use core::ffi::{CStr, c_int};

use crate::{
    arena::Arena,
    sys::{AT_FDCWD, File, stat},
};

/// Ways to treat a program that is about to be executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// It loads preloaded libraries of this kind.
    Preloads,
    /// It can be executed but not preloaded: static, or for another loader of this machine.
    Plain,
    /// It is executed as given: missing, unreadable, privileged, for another architecture, or of an
    /// unknown kind.
    Closed,
}

/// The file name of the loader, which is the same on every glibc system of a machine.
#[cfg(target_arch = "x86_64")]
const LOADER: &[u8] = b"ld-linux-x86-64.so.2";
#[cfg(target_arch = "aarch64")]
const LOADER: &[u8] = b"ld-linux-aarch64.so.1";
/// `e_machine` of elf(5).
#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;

/// Bytes for the ELF header, the usual number of program headers, and the loader's name after them.
const HEAD_BYTES: usize = 1024;
/// Bytes that the kernel reads of a `#!` line (BINPRM_BUF_SIZE).
const SCRIPT_BYTES: usize = 256;
/// Depth of interpreters that are scripts themselves, as in execve(2).
const MAX_INTERPRETERS: usize = 5;
/// Most program headers that are examined; linkers make about a dozen.
const MAX_HEADERS: usize = 32;
const HEADER_BYTES: usize = 56;
const PT_INTERP: u32 = 3;

/// Bytes of arena that a look needs.
pub const ARENA_BYTES: usize =
    MAX_INTERPRETERS * (HEAD_BYTES + SCRIPT_BYTES) + MAX_HEADERS * HEADER_BYTES + SCRIPT_BYTES;

/// Examines a program without changing anything.
#[must_use]
pub fn look_at(path: &CStr, arena: &mut Arena<'_>) -> Target {
    look(AT_FDCWD, path, arena)
}

/// Like [`look_at`], but relative to a directory.
pub(crate) fn look(directory: c_int, path: &CStr, arena: &mut Arena<'_>) -> Target {
    let mut arena = arena.scope();
    let (mut directory, mut path) = (directory, path);
    for _ in 0..MAX_INTERPRETERS {
        let Some((file, head)) = open(directory, path, &mut arena) else { return Target::Closed };
        if head.starts_with(b"\x7fELF") {
            return if file.has_capabilities() {
                Target::Closed
            } else {
                elf(&file, head, &mut arena)
            };
        }
        let Some(next) = script(head).and_then(|name| arena.c_str(&[name])) else {
            return Target::Closed;
        };
        (directory, path) = (AT_FDCWD, next);
    }
    Target::Closed
}

/// Opens a regular file without privileges of its own; also returns its first bytes.
fn open<'a>(directory: c_int, path: &CStr, arena: &mut Arena<'a>) -> Option<(File, &'a [u8])> {
    // Checked before opening: opening a FIFO or a device may have side effects.
    stat(directory, path, 0).filter(|found| found.is_file() && !found.is_set_id())?;
    let file = File::open(directory, path)?;
    let head = arena.filled(HEAD_BYTES, (), |buffer| file.read(buffer, 0).ok_or(())).ok()?;
    Some((file, head))
}

/// The interpreter that a `#!` line names.
fn script(head: &[u8]) -> Option<&[u8]> {
    let line = head.get(..SCRIPT_BYTES.min(head.len()))?.strip_prefix(b"#!")?;
    let line = line.split(|byte| *byte == b'\n').next()?;
    let mut words =
        line.split(|byte| matches!(byte, b' ' | b'\t' | 0)).filter(|word| !word.is_empty());
    words.next()
}

/// A program of another architecture, or a damaged one, is left to the kernel.
fn elf<'a>(file: &File, head: &'a [u8], arena: &mut Arena<'a>) -> Target {
    const CLASS_64_LITTLE: &[u8] = &[2, 1];
    let ours = head.get(4..6) == Some(CLASS_64_LITTLE) && u16_at(head, 18) == Some(MACHINE);
    let headers = if ours { program_headers(file, head, arena) } else { None };
    let Some(headers) = headers else { return Target::Closed };
    let interpreter =
        headers.chunks_exact(HEADER_BYTES).find(|header| u32_at(header, 0) == Some(PT_INTERP));
    match interpreter.map(|header| loader_is_ours(file, head, header, arena)) {
        Some(Some(true)) => Target::Preloads,
        Some(None) => Target::Closed,
        Some(Some(false)) | None => Target::Plain,
    }
}

fn program_headers<'a>(file: &File, head: &'a [u8], arena: &mut Arena<'a>) -> Option<&'a [u8]> {
    let start = u64_at(head, 32)?;
    let count = usize::from(u16_at(head, 56)?).min(MAX_HEADERS);
    let known = usize::from(u16_at(head, 54)?) == HEADER_BYTES;
    known.then(|| part(file, head, start, count * HEADER_BYTES, arena)).flatten()
}

fn loader_is_ours(file: &File, head: &[u8], header: &[u8], arena: &mut Arena<'_>) -> Option<bool> {
    let (offset, size) = (u64_at(header, 8)?, usize::try_from(u64_at(header, 32)?).ok()?);
    let mut arena = arena.scope();
    let len = Some(size).filter(|size| *size <= SCRIPT_BYTES)?;
    let name = part(file, head, offset, len, &mut arena)?;
    let name = name.split(|byte| *byte == 0).next()?;
    Some(name.rsplit(|byte| *byte == b'/').next() == Some(LOADER))
}

/// `len` bytes of the file from `offset`: from its head, or read.
fn part<'a>(
    file: &File,
    head: &'a [u8],
    offset: u64,
    len: usize,
    arena: &mut Arena<'a>,
) -> Option<&'a [u8]> {
    let start = usize::try_from(offset).ok()?;
    if let Some(there) = head.get(start..start.checked_add(len)?) {
        return Some(there);
    }
    let bytes = arena.filled(len, (), |buffer| file.read(buffer, offset).ok_or(())).ok()?;
    (bytes.len() == len).then_some(bytes)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use std::{ffi::CString, fs, os::unix::fs::PermissionsExt, path::Path};

    use super::*;

    fn kind(path: &Path) -> Target {
        look_at(
            &CString::new(path.to_str().unwrap()).unwrap(),
            &mut Arena::new(&mut [0; ARENA_BYTES]),
        )
    }

    #[test]
    fn programs_and_scripts_of_this_machine() {
        let dir = std::env::temp_dir().join(format!("posh-hook-target-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let put = |name: &str, text: &[u8]| {
            fs::write(dir.join(name), text).unwrap();
            dir.join(name)
        };
        assert_eq!(kind(Path::new("/bin/sh")), Target::Preloads);
        assert_eq!(kind(&put("sh-script", b"#! /bin/sh -e\n")), Target::Preloads);
        let chained = format!("#!{}\n", dir.join("sh-script").display());
        assert_eq!(kind(&put("chained", chained.as_bytes())), Target::Preloads);
        let myself = format!("#!{}\n", dir.join("loop").display());
        assert_eq!(kind(&put("loop", myself.as_bytes())), Target::Closed);
        assert_eq!(kind(&put("absent-interpreter", b"#!/nonexistent/sh\n")), Target::Closed);
        assert_eq!(kind(&put("empty-line", b"#!\n")), Target::Closed);
        assert_eq!(kind(&put("text", b"echo hello\n")), Target::Closed);
        assert_eq!(kind(&put("empty", b"")), Target::Closed);
        assert_eq!(kind(&dir), Target::Closed);
        assert_eq!(kind(&dir.join("absent")), Target::Closed);

        let mut shell = fs::read("/bin/sh").unwrap();
        let privileged = put("privileged", &shell);
        fs::set_permissions(&privileged, fs::Permissions::from_mode(0o4755)).unwrap();
        assert_eq!(kind(&privileged), Target::Closed);
        shell[4] = 1;
        assert_eq!(kind(&put("other-class", &shell)), Target::Closed);
        (shell[4], shell[18]) = (2, 8);
        assert_eq!(kind(&put("other-machine", &shell)), Target::Closed);
        shell[18] = MACHINE.to_le_bytes()[0];
        assert_eq!(kind(&put("whole", &shell)), Target::Preloads);
        for length in [4, 20, 64, 200, 600] {
            assert_eq!(kind(&put("cut-short", &shell[..length])), Target::Closed, "{length} bytes");
        }
        // The tests are static programs themselves.
        assert_eq!(kind(Path::new("/proc/self/exe")), Target::Plain);
        fs::remove_dir_all(&dir).unwrap();
    }
}
