//! The session that this process belongs to. Two variables pass it from one program to the next,
//! always as the last two of the environment. Before `main` they are copied and removed, from
//! /proc/self/environ too, so that neither programs nor users see them.
//!
//! The user's own `LD_PRELOAD` stays in its place: the loader takes the last one, which is ours and
//! lists the user's libraries after our own.
#![allow(
    unsafe_code,
    reason = "reads and shortens the environment as the kernel laid it out, before any other code \
              runs"
)]

use core::{
    cell::UnsafeCell,
    ffi::{CStr, c_char, c_int, c_void},
    ptr,
    sync::atomic::{AtomicPtr, AtomicUsize, Ordering},
};

use crate::{
    arena::{self, Arena},
    identity::{Identities, TEXT_BYTES},
    memory::{self, InitialStack},
    pipes::{Notes, PipeWriter},
    sys::{self, AT_FDCWD, Contents, File, PATH_BYTES},
    text::{Full, Text},
};

/// Path of the session's directory, a colon, and the text of [`Identities`].
pub const SESSION_VARIABLE: &str = "POSH_HOOK";
/// Path that was to be executed, for the stage program.
pub const TARGET_VARIABLE: &str = "POSH_HOOK_EXEC";
/// Prefix of the target variable: the command itself uses no mount, and only a pipe makes it worth
/// asking about.
pub const PIPE_ONLY: &[u8] = b"|";
/// Prefix of the target variable: the command may touch a mount.
pub const MAY_TOUCH: &[u8] = b"@";
/// Variable of the dynamic loader (ld.so(8)).
pub const PRELOAD_VARIABLE: &str = "LD_PRELOAD";

const SESSION: &[u8] = b"POSH_HOOK=";
const PRELOAD: &[u8] = b"LD_PRELOAD=";

/// File in the session's directory with the mounts, and directory of the shims.
const SESSION_FILE: &[u8] = b"/session";
const SHIMS: &[u8] = b"/bin/";

/// The symlink to the stage program in the session's directory. It is never replaced.
pub const STAGE: &str = "stage";
pub(crate) const STAGE_LINK: &CStr = c"stage";
/// First word of the stage program when it is to become a shell; the two variables and the shell's
/// text follow.
pub const AS_SHELL: &CStr = c"--as-shell";

/// Longest path of library or session that is passed on. Both lie in the directory of the gateway's
/// sockets, whose paths have at most 108 bytes (unix(7)); the copies are touched at the start of
/// every program.
pub const MAX_PATH_BYTES: usize = 240;

/// A variable whose value is such a path.
pub(crate) type Carried = Text<[u8; MAX_PATH_BYTES + 16]>;
/// A [`Carried`] with identities.
type CarriedSession = Text<[u8; MAX_PATH_BYTES + 16 + TEXT_BYTES]>;

/// The interposed functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    Execve,
    Execvpe,
    Execveat,
    Fexecve,
    Spawn,
    SpawnPath,
    System,
    Popen,
}

impl Next {
    const ALL: [Self; 8] = [
        Self::Execve,
        Self::Execvpe,
        Self::Execveat,
        Self::Fexecve,
        Self::Spawn,
        Self::SpawnPath,
        Self::System,
        Self::Popen,
    ];

    const fn name(self) -> &'static CStr {
        match self {
            Self::Execve => c"execve",
            Self::Execvpe => c"execvpe",
            Self::Execveat => c"execveat",
            Self::Fexecve => c"fexecve",
            Self::Spawn => c"posix_spawn",
            Self::SpawnPath => c"posix_spawnp",
            Self::System => c"system",
            Self::Popen => c"popen",
        }
    }

    /// Address of the C library's function; null if it has none.
    pub(crate) fn address(self) -> *mut c_void {
        let Some(slot) = FUNCTIONS.get(self as usize) else { return ptr::null_mut() };
        let known = slot.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // Start-up code of another library ran before ours. The loader is called on the process's
        // own stack, which is deep enough, since only the loader ran so far.
        let found = sys::next_function(self.name());
        slot.store(found, Ordering::Relaxed);
        found
    }
}

static FUNCTIONS: [AtomicPtr<c_void>; Next::ALL.len()] =
    [const { AtomicPtr::new(ptr::null_mut()) }; Next::ALL.len()];

/// The session's variables, kept for the next program.
pub(crate) struct SessionVariables {
    /// `LD_PRELOAD=` with our library alone, a NUL at the end.
    pub(crate) preload: Carried,
    /// `POSH_HOOK=` with the session's directory and the identities, a NUL at the end.
    pub(crate) session: CarriedSession,
    identities: Identities,
}

impl SessionVariables {
    /// Reads the two variables, without the user's libraries in the second.
    pub(crate) fn read(session: &[u8], preload: &[u8]) -> Option<Self> {
        let value = session.strip_prefix(SESSION).filter(|value| value.starts_with(b"/"))?;
        let identities = Identities::read(value.get(directory_of(value)?.len() + 1..)?)?;
        let libraries = preload.strip_prefix(PRELOAD)?;
        let library = libraries.split(|byte| matches!(byte, b':' | b' ')).next()?;
        let read = || -> Result<Self, Full> {
            let preload = Text::of(&[PRELOAD, library, b"\0"])?;
            Ok(Self { preload, session: Text::of(&[SESSION, value, b"\0"])?, identities })
        };
        read().ok().filter(|_| library.starts_with(b"/"))
    }

    /// The path of our library.
    pub(crate) fn library(&self) -> Option<&CStr> {
        let value = self.preload.as_bytes().strip_prefix(PRELOAD)?;
        CStr::from_bytes_with_nul(value).ok()
    }

    /// Returns true if the program to be executed can load the library, and would load no other
    /// file in its place.
    pub(crate) fn library_is_in_reach(&self) -> bool {
        self.library()
            .is_some_and(|path| sys::is_readable(path) && self.identities.is_library(path))
    }

    fn path(&self) -> &[u8] {
        let value = self.session.as_bytes().strip_prefix(SESSION).unwrap_or_default();
        directory_of(value).unwrap_or_default()
    }

    /// Returns true if the command is known to posh, which is if it has a shim. Only a hint: the
    /// directory may be another one than the session's.
    pub(crate) fn knows(&self, name: &[u8], arena: &mut Arena<'_>) -> bool {
        let mut arena = arena.scope();
        arena.c_str(&[self.path(), SHIMS, name]).is_some_and(|shim| sys::is_link(shim) == Ok(true))
    }

    /// The session's directory; `None` if another one, or none, is at its path.
    pub(crate) fn directory(&self, arena: &mut Arena<'_>) -> Option<SessionDirectory<'_>> {
        let mut arena = arena.scope();
        let stage = arena.c_str(&[self.path(), b"/", STAGE.as_bytes()])?;
        self.identities.is_session(stage).then(|| SessionDirectory(self.path()))
    }
}

/// The session's directory, by a path that led to it during this exec.
#[derive(Clone, Copy)]
pub(crate) struct SessionDirectory<'s>(&'s [u8]);

impl SessionDirectory<'_> {
    /// The stage program for a known command: the target of its shim.
    pub(crate) fn stage_program<'a>(self, name: &[u8], arena: &mut Arena<'a>) -> Option<&'a CStr> {
        let shim = arena.c_str(&[self.0, SHIMS, name])?;
        target(shim, arena)
    }

    /// The stage program for any command.
    pub(crate) fn stage<'a>(self, arena: &mut Arena<'a>) -> Option<&'a CStr> {
        let link = arena.c_str(&[self.0, b"/", STAGE.as_bytes()])?;
        target(link, arena)
    }

    /// The session file, for as long as the session lives.
    pub(crate) fn file<'a>(self, arena: &mut Arena<'a>) -> Option<Contents<'a>> {
        let path = arena.c_str(&[self.0, SESSION_FILE])?;
        File::open(AT_FDCWD, path)?.contents(arena)
    }

    /// The notes about pipes.
    pub(crate) fn notes(self, arena: &mut Arena<'_>) -> Option<Notes> {
        Notes::open(self.0, arena)
    }
}

/// Target of a symlink.
fn target<'a>(shim: &CStr, arena: &mut Arena<'a>) -> Option<&'a CStr> {
    let program = arena.filled(PATH_BYTES, sys::ENOMEM, |buffer| {
        let (last, most) = buffer.split_last_mut().ok_or(sys::ENOMEM)?;
        *last = 0;
        let count = sys::read_link(shim, most)?;
        *buffer.get_mut(count).ok_or(sys::ENOMEM)? = 0;
        Ok(count + 1)
    });
    CStr::from_bytes_with_nul(program.ok()?).ok()
}

/// The session's directory in the value of [`SESSION_VARIABLE`].
#[must_use]
pub fn directory_of(value: &[u8]) -> Option<&[u8]> {
    value.get(..value.iter().rposition(|byte| *byte == b':')?)
}

/// Id of the process in which `main` began; a fork of it has another one.
static BEGAN_IN: AtomicUsize = AtomicUsize::new(0);

#[cfg(all(posh_preload, not(test)))]
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

/// Runs when the process ends by exit(3). In a fork that has executed nothing, as in `echo x
/// sed`, notes that its output is local.
#[cfg_attr(not(posh_preload), allow(dead_code, reason = "called by the dynamic loader"))]
extern "C" fn end() {
    let Some(session) = current().filter(|_| sys::process() != BEGAN_IN.load(Ordering::Relaxed))
    else {
        return;
    };
    let output = sys::stat(1, c"", sys::AT_EMPTY_PATH | sys::AT_STATX_DONT_SYNC)
        .filter(|output| output.is_pipe());
    let Some(pipe) = output.map(|output| output.inode) else { return };
    let mut memory = [0; MAX_PATH_BYTES + 16];
    let mut arena = Arena::new(&mut memory);
    let notes = session.directory(&mut arena).and_then(|directory| directory.notes(&mut arena));
    let Some(notes) = notes else { return };
    if notes.writer(pipe) != Some(PipeWriter::IsAsked) {
        notes.note(pipe, PipeWriter::Stays);
    }
}

/// Written once, before `main` and before there is another thread; read-only afterwards.
struct SessionCell(UnsafeCell<Option<SessionVariables>>);

// SAFETY: see `SessionCell`.
unsafe impl Sync for SessionCell {}

static KEPT: SessionCell = SessionCell(UnsafeCell::new(None));

/// This process's session; `None` in another root directory or mount namespace than the shell's,
/// where the session's paths lead elsewhere.
pub(crate) fn current() -> Option<&'static SessionVariables> {
    // SAFETY: nobody writes after the start, see `SessionCell`.
    unsafe { (*KEPT.0.get()).as_ref() }.filter(|session| session.identities.has_root())
}

#[cfg(all(posh_preload, not(test)))]
#[used]
#[unsafe(link_section = ".init_array")]
static START: unsafe extern "C" fn(c_int, *const *const c_char, *mut *mut c_char) = start;

/// Runs before `main`, with the arguments of `main`.
///
/// # Safety
/// `arguments` has `argument_count` entries; `environment` is null, or the array that the kernel
/// made, which ends in a null pointer and which nothing else uses now.
#[cfg_attr(not(posh_preload), allow(dead_code, reason = "called by the dynamic loader"))]
unsafe extern "C" fn start(
    argument_count: c_int,
    arguments: *const *const c_char,
    environment: *mut *mut c_char,
) {
    // Bound now, since a forked child of a program with threads must not call the loader.
    for function in Next::ALL {
        function.address();
    }
    arena::prepare();
    BEGAN_IN.store(sys::process(), Ordering::Relaxed);
    if environment.is_null() {
        return;
    }
    // SAFETY: the array is as described above, so that its entries up to the null pointer can be
    // read and written, and each is a C string on the initial stack.
    unsafe {
        let count = count(environment.cast_const().cast());
        if count < 2 {
            return;
        }
        let (session, preload) = (*environment.add(count - 2), *environment.add(count - 1));
        let found = SessionVariables::read(
            CStr::from_ptr(session).to_bytes(),
            CStr::from_ptr(preload).to_bytes(),
        );
        let Some(found) = found else { return };
        let begin = InitialStack {
            arguments: (arguments, usize::try_from(argument_count).unwrap_or(0)),
            first_variable: *environment,
            auxiliary: environment.add(count + 1).cast(),
        };
        *KEPT.0.get() = Some(found);
        *environment.add(count - 2) = ptr::null_mut();
        // Some programs (Go's runtime) look for the auxiliary vector after the first null pointer:
        // the two words between become an entry of it without effect, (AT_IGNORE, 0).
        const AT_IGNORE: usize = 1;
        *environment.add(count - 1) = ptr::without_provenance_mut(AT_IGNORE);
        erase(session, preload, &begin);
    }
}

/// Entries before the null pointer.
///
/// # Safety
/// `array` ends in a null pointer.
pub(crate) unsafe fn count(array: *const *const c_char) -> usize {
    // SAFETY: nothing behind the null pointer is read.
    unsafe { (0..).find(|index| (*array.add(*index)).is_null()).unwrap_or(0) }
}

/// Erases the strings of the last two variables from /proc/self/environ.
///
/// # Safety
/// Both are C strings that may be overwritten; `start` is as the kernel made it but for these.
unsafe fn erase(first: *mut c_char, last: *mut c_char, start: &InitialStack) {
    // SAFETY: the strings, their NULs included, are as long as strlen says; if they are neighbours,
    // all between is theirs; the rest is the caller's promise.
    unsafe {
        let end = last.add(CStr::from_ptr(last).count_bytes() + 1);
        if first.add(CStr::from_ptr(first).count_bytes() + 1) != last {
            return;
        }
        ptr::write_bytes(first, 0, end.addr() - first.addr());
        memory::end_environment_at(first.addr(), start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(directory: &str) -> Vec<u8> {
        format!("POSH_HOOK={directory}:{}", "0".repeat(TEXT_BYTES)).into_bytes()
    }

    fn library(preload: &[u8]) -> Option<Vec<u8>> {
        let session = SessionVariables::read(&session("/run/s"), preload)?;
        assert_eq!(session.path(), b"/run/s");
        session.library().map(|path| path.to_bytes().to_vec())
    }

    #[test]
    fn only_what_posh_wrote_is_taken() {
        assert_eq!(library(b"LD_PRELOAD=/l/hook.so").as_deref(), Some(&b"/l/hook.so"[..]));
        assert_eq!(
            library(b"LD_PRELOAD=/l/hook.so:libfakeroot.so").as_deref(),
            Some(&b"/l/hook.so"[..])
        );
        for other in [&b"LD_PRELOAD="[..], b"LD_PRELOAD=libx.so", b"PATH=/bin", b""] {
            assert_eq!(library(other), None);
        }
        for other in [&session("")[..], b"POSH_HOOK=", b"POSH_HOOK=/run/s", b"POSH_HOOK=/run/s:0"] {
            assert!(SessionVariables::read(other, b"LD_PRELOAD=/l").is_none());
        }
        let of_a_colon = SessionVariables::read(&session("/run/a:b"), b"LD_PRELOAD=/l").unwrap();
        assert_eq!(of_a_colon.path(), b"/run/a:b");
        assert!(SessionVariables::read(b"HOME=/root", b"LD_PRELOAD=/l").is_none());
    }
}
