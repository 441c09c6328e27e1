//! Replacements of the C library's exec functions, under their names. Each builds a request, and
//! `door` decides how to execute it. They behave as their manual pages say.
#![allow(unsafe_code, reason = "C functions that get raw pointers and call the C library's own")]

use core::{
    ffi::{CStr, c_char, c_int, c_void},
    mem,
};

use crate::{
    arena::{self, Arena},
    door::{Exec, ExecRequest, Plan, words},
    lend, readable,
    search::{self, Search},
    session::Next,
    sys::{self, AT_EMPTY_PATH, AT_FDCWD, E2BIG, ENOEXEC, ENOSYS, Strings},
};

type Execve = unsafe extern "C" fn(*const c_char, Strings, Strings) -> c_int;
type Execveat = unsafe extern "C" fn(c_int, *const c_char, Strings, Strings, c_int) -> c_int;
type Fexecve = unsafe extern "C" fn(c_int, Strings, Strings) -> c_int;
type Spawn = unsafe extern "C" fn(
    *mut c_int,
    *const c_char,
    *const c_void,
    *const c_void,
    Strings,
    Strings,
) -> c_int;
type System = unsafe extern "C" fn(*const c_char) -> c_int;
type Popen = unsafe extern "C" fn(*const c_char, *const c_char) -> *mut c_void;

/// The C library's function of that type; `None` where it has none.
macro_rules! next {
    ($function:expr, $type:ty) => {{
        let address = $function.address();
        // SAFETY: an address that is not null is that of the function with this name, and this is
        // its type.
        (!address.is_null()).then(|| unsafe { mem::transmute::<*mut c_void, $type>(address) })
    }};
}

/// Sets `errno`; the return value of an exec function that failed.
fn failed(error: c_int) -> c_int {
    sys::set_errno(error);
    -1
}

/// Returns true if all arguments of an exec can be read. Otherwise the kernel reports the error.
fn is_request(path: *const c_char, argv: Strings, environment: Strings) -> bool {
    readable::is_string(path) && readable::are_strings(argv) && readable::are_strings(environment)
}

/// Executes a path; returns the error.
///
/// # Safety
/// As of execve(2).
unsafe fn exec_path(
    path: &CStr,
    argv: Strings,
    environment: Strings,
    arena: &mut Arena<'_>,
) -> c_int {
    let Some(next) = next!(Next::Execve, Execve) else { return ENOSYS };
    let mut exec = |program: Option<&CStr>, environment| {
        // SAFETY: the caller's own arguments, or strings and arrays that live until the call
        // returns.
        unsafe { next(program.unwrap_or(path).as_ptr(), argv, environment) };
        sys::errno()
    };
    let request =
        ExecRequest { directory: AT_FDCWD, path, argv, environment, spawned: false, moved: false };
    // SAFETY: the caller's arrays are as execve(2) wants them.
    unsafe { planned(&request, arena, &mut exec) }
}

/// Executes as planned, or as given; returns the last attempt's result.
///
/// # Safety
/// As for [`Plan::of`].
unsafe fn planned(request: &ExecRequest<'_>, arena: &mut Arena<'_>, exec: &mut Exec<'_>) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        match Plan::of(request, arena) {
            Some(plan) => plan.attempt(arena, exec),
            None => exec(None, request.environment),
        }
    }
}

/// execve(2).
///
/// # Safety
/// As the manual says.
#[cfg_attr(all(posh_preload, not(test)), unsafe(no_mangle))]
pub unsafe extern "C" fn execve(path: *const c_char, argv: Strings, environment: Strings) -> c_int {
    let Some(next) = next!(Next::Execve, Execve) else { return failed(ENOSYS) };
    // SAFETY: the caller's promise; a path that can't be read is the kernel's to refuse.
    unsafe {
        if !is_request(path, argv, environment) {
            return next(path, argv, environment);
        }
        arena::with(|arena| match arena {
            Some(arena) => failed(exec_path(CStr::from_ptr(path), argv, environment, arena)),
            None => next(path, argv, environment),
        })
    }
}

/// execv(3).
///
/// # Safety
/// As the manual says.
#[cfg_attr(all(posh_preload, not(test)), unsafe(no_mangle))]
pub unsafe extern "C" fn execv(path: *const c_char, argv: Strings) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { execve(path, argv, sys::environment()) }
}

/// execvp(3).
///
/// # Safety
/// As the manual says.
#[cfg_attr(all(posh_preload, not(test)), unsafe(no_mangle))]
pub unsafe extern "C" fn execvp(file: *const c_char, argv: Strings) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { execvpe(file, argv, sys::environment()) }
}

/// execvpe(3).
///
/// # Safety
/// As the manual says.
#[cfg_attr(all(posh_preload, not(test)), unsafe(no_mangle))]
pub unsafe extern "C" fn execvpe(
    file: *const c_char,
    argv: Strings,
    environment: Strings,
) -> c_int {
    let Some(next) = next!(Next::Execvpe, Execve) else { return failed(ENOSYS) };
    // SAFETY: the caller's promise.
    unsafe {
        arena::with(|arena| {
            let arena = arena.filter(|_| is_request(file, argv, environment));
            let Some(arena) = arena else { return next(file, argv, environment) };
            let mut search = match Search::new(CStr::from_ptr(file)) {
                Ok(search) => search,
                Err(error) => return failed(error),
            };
            loop {
                let mut arena = arena.scope();
                let Some(path) = search.next(&mut arena) else { break };
                let mut error = exec_path(path, argv, environment, &mut arena.scope());
                if error == ENOEXEC {
                    error = exec_script(path, argv, environment, &mut arena);
                }
                if !search.goes_on_after(error) {
                    break;
                }
            }
            failed(search.error())
        })
    }
}

/// A file that is no program: execvp(3) gives it to the shell.
///
/// # Safety
/// As of execve(2).
unsafe fn exec_script(
    path: &CStr,
    argv: Strings,
    environment: Strings,
    arena: &mut Arena<'_>,
) -> c_int {
    const SHELL: &CStr = c"/bin/sh";
    let next = next!(Next::Execvpe, Execve).filter(|_| path.to_bytes().contains(&b'/'));
    // SAFETY: the caller's promise. The first word, if any, is replaced by the two of ours.
    unsafe {
        let with_shell = [SHELL.as_ptr(), path.as_ptr()].into_iter().chain(words(argv).skip(1));
        if let Some(with_shell) = arena.words(with_shell) {
            return exec_path(SHELL, with_shell.as_ptr(), environment, arena);
        }
        // The C library executes the script with memory on its caller's stack, as without the hook.
        let Some(next) = next else { return E2BIG };
        next(path.as_ptr(), argv, environment);
        sys::errno()
    }
}

/// execveat(2).
///
/// # Safety
/// As the manual says.
#[cfg_attr(all(posh_preload, not(test)), unsafe(no_mangle))]
pub unsafe extern "C" fn execveat(
    directory: c_int,
    path: *const c_char,
    argv: Strings,
    environment: Strings,
    flags: c_int,
) -> c_int {
    let Some(next) = next!(Next::Execveat, Execveat) else { return failed(ENOSYS) };
    // SAFETY: the caller's promise.
    unsafe {
        let is_request = is_request(path, argv, environment);
        let given =
            is_request.then(|| CStr::from_ptr(path)).filter(|_| flags & !AT_EMPTY_PATH == 0);
        let Some(given) = given else { return next(directory, path, argv, environment, flags) };
        if !given.is_empty() && (directory == AT_FDCWD || given.to_bytes().starts_with(b"/")) {
            return execve(path, argv, environment);
        }
        if given.is_empty() && directory >= 0 {
            return fexecve(directory, argv, environment);
        }
        let request =
            ExecRequest { directory, path: given, argv, environment, spawned: false, moved: false };
        carry(&request, &mut |environment| next(directory, path, argv, environment, flags))
    }
}

/// fexecve(3).
///
/// # Safety
/// As the manual says.
#[cfg_attr(all(posh_preload, not(test)), unsafe(no_mangle))]
pub unsafe extern "C" fn fexecve(fd: c_int, argv: Strings, environment: Strings) -> c_int {
    let Some(next) = next!(Next::Fexecve, Fexecve) else { return failed(ENOSYS) };
    // SAFETY: the caller's promise.
    unsafe {
        if !is_request(c"".as_ptr(), argv, environment) {
            return next(fd, argv, environment);
        }
        let path = sys::descriptor_path(fd);
        let path = path.as_ref().and_then(|path| path.as_c_str()).unwrap_or(c"");
        let request = ExecRequest {
            directory: AT_FDCWD,
            path,
            argv,
            environment,
            spawned: false,
            moved: false,
        };
        carry(&request, &mut |environment| next(fd, argv, environment))
    }
}

/// Executes a file that has no path, with the session's variables; returns -1, and sets `errno`.
///
/// # Safety
/// As for [`Plan::of`].
unsafe fn carry(request: &ExecRequest<'_>, exec: &mut dyn FnMut(Strings) -> c_int) -> c_int {
    let mut exec = |_: Option<&CStr>, environment| {
        exec(environment);
        sys::errno()
    };
    // SAFETY: the caller's promise. The request has no path, so that no stage program is used.
    arena::with(|arena| match arena {
        Some(arena) => failed(unsafe { planned(request, arena, &mut exec) }),
        None => failed(exec(None, request.environment)),
    })
}

/// posix_spawn(3).
///
/// # Safety
/// As the manual says.
#[cfg_attr(all(posh_preload, not(test)), unsafe(no_mangle))]
pub unsafe extern "C" fn posix_spawn(
    pid: *mut c_int,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    argv: Strings,
    environment: Strings,
) -> c_int {
    let Some(next) = next!(Next::Spawn, Spawn) else { return ENOSYS };
    // SAFETY: the caller's promise.
    unsafe {
        let spawn = &mut |program: Option<&CStr>, environment| {
            let program = program.map_or(path, CStr::as_ptr);
            next(pid, program, actions, attributes, argv, environment)
        };
        if !is_request(path, argv, environment) {
            return spawn(None, environment);
        }
        let moved = !actions.is_null();
        let request = ExecRequest {
            directory: AT_FDCWD,
            path: CStr::from_ptr(path),
            argv,
            environment,
            spawned: true,
            moved,
        };
        arena::with(|arena| match arena {
            Some(arena) => planned(&request, arena, spawn),
            None => spawn(None, environment),
        })
    }
}

/// posix_spawnp(3).
///
/// # Safety
/// As the manual says.
#[cfg_attr(all(posh_preload, not(test)), unsafe(no_mangle))]
pub unsafe extern "C" fn posix_spawnp(
    pid: *mut c_int,
    file: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    argv: Strings,
    environment: Strings,
) -> c_int {
    let by_name = next!(Next::SpawnPath, Spawn);
    let (Some(by_name), Some(by_path)) = (by_name, next!(Next::Spawn, Spawn)) else {
        return ENOSYS;
    };
    // SAFETY: the caller's promise.
    unsafe {
        let spawn = &mut |program: Option<&CStr>, environment| match program {
            Some(program) => by_path(pid, program.as_ptr(), actions, attributes, argv, environment),
            None => by_name(pid, file, actions, attributes, argv, environment),
        };
        arena::with(|arena| {
            let arena = arena.filter(|_| is_request(file, argv, environment));
            let Some(arena) = arena else { return spawn(None, environment) };
            let Some(path) = search::first(CStr::from_ptr(file), arena) else {
                return spawn(None, environment);
            };
            let moved = !actions.is_null();
            let request =
                ExecRequest { directory: AT_FDCWD, path, argv, environment, spawned: true, moved };
            planned(&request, arena, spawn)
        })
    }
}

/// system(3).
///
/// # Safety
/// As the manual says.
#[cfg_attr(all(posh_preload, not(test)), unsafe(no_mangle))]
pub unsafe extern "C" fn system(command: *const c_char) -> c_int {
    let Some(next) = next!(Next::System, System) else { return failed(ENOSYS) };
    // SAFETY: the caller's promise.
    unsafe { lend::to_shell(command, |command| next(command)) }
}

/// popen(3).
///
/// # Safety
/// As the manual says.
#[cfg_attr(all(posh_preload, not(test)), unsafe(no_mangle))]
pub unsafe extern "C" fn popen(command: *const c_char, mode: *const c_char) -> *mut c_void {
    let Some(next) = next!(Next::Popen, Popen) else {
        sys::set_errno(ENOSYS);
        return core::ptr::null_mut();
    };
    // SAFETY: the caller's promise.
    unsafe { lend::to_shell(command, |command| next(command, mode)) }
}
