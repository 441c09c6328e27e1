//! PATH search of execvp(3) and posix_spawnp(3) as in glibc, whose own search makes calls that
//! can't be interposed.

#![allow(unsafe_code, reason = "reads PATH where the C library reads it")]

use core::ffi::{CStr, c_int};

use crate::{
    arena::Arena,
    sys::{
        self, EACCES, ENAMETOOLONG, ENODEV, ENOENT, ENOTDIR, ESTALE, ETIMEDOUT, PATH_BYTES, Strings,
    },
};

/// Used without PATH: confstr(3)'s `_CS_PATH`.
const DEFAULT_PATH: &[u8] = b"/bin:/usr/bin";
/// The kernel's longest file name.
const NAME_MAX: usize = 255;

/// A search for a program: the places that are left, and the errors of those that were tried.
pub(crate) struct Search<'f> {
    name: &'f CStr,
    /// Rest of PATH; `None` when all was tried.
    directories: Option<&'f [u8]>,
    is_denied: bool,
    error: c_int,
}

impl<'f> Search<'f> {
    /// A search for a name, or for a path alone; an error if the name is invalid.
    pub(crate) fn new(name: &'f CStr) -> Result<Self, c_int> {
        match name.count_bytes() {
            0 => return Err(ENOENT),
            count if count > NAME_MAX && !is_path(name) => return Err(ENAMETOOLONG),
            _ => {}
        }
        // SAFETY: `environ` is the process's environment.
        let path = || unsafe { variable(sys::environment(), b"PATH=") }.unwrap_or(DEFAULT_PATH);
        let directories = if is_path(name) { b"" } else { path() };
        Ok(Self { name, directories: Some(directories), is_denied: false, error: ENOENT })
    }

    /// The next candidate.
    pub(crate) fn next<'a>(&mut self, arena: &mut Arena<'a>) -> Option<&'a CStr> {
        loop {
            let directories = self.directories?;
            let end = directories.iter().position(|byte| *byte == b':');
            let directory = directories.get(..end.unwrap_or(directories.len())).unwrap_or_default();
            self.directories = end.and_then(|end| directories.get(end + 1..));
            if let Some(path) = join(directory, self.name.to_bytes(), arena) {
                return Some(path);
            }
        }
    }

    /// Records the last candidate's error; returns true if the search continues.
    pub(crate) fn goes_on_after(&mut self, error: c_int) -> bool {
        self.error = error;
        self.is_denied |= error == EACCES;
        matches!(error, EACCES | ENOENT | ESTALE | ENOTDIR | ENODEV | ETIMEDOUT)
    }

    /// The error of the whole search.
    pub(crate) fn error(&self) -> c_int {
        let is_usual =
            matches!(self.error, EACCES | ENOENT | ESTALE | ENOTDIR | ENODEV | ETIMEDOUT);
        if self.is_denied && is_usual && !is_path(self.name) { EACCES } else { self.error }
    }
}

/// Returns true for a name with a slash, which is not searched for.
fn is_path(name: &CStr) -> bool {
    name.to_bytes().contains(&b'/')
}

/// `None` if the result is longer than any path that the kernel accepts.
fn join<'a>(directory: &[u8], name: &[u8], arena: &mut Arena<'a>) -> Option<&'a CStr> {
    let slash: &[u8] = if directory.is_empty() { b"" } else { b"/" };
    (directory.len() + slash.len() + name.len() < PATH_BYTES)
        .then(|| arena.c_str(&[directory, slash, name]))?
}

/// The value of a variable, whose name ends in `=`, as getenv(3) finds it.
///
/// # Safety
/// The environment is null, or its entries are C strings and a null pointer. Other threads may
/// change it only as getenv(3) allows: no string that was in it is freed.
unsafe fn variable<'a>(environment: Strings, name: &[u8]) -> Option<&'a [u8]> {
    if environment.is_null() {
        return None;
    }
    (0..).find_map(|index| {
        // SAFETY: nothing behind the null pointer is read.
        let entry = unsafe { sys::entry(environment, index) };
        if entry.is_null() {
            return Some(None);
        }
        // SAFETY: the caller's promise.
        let entry = unsafe { CStr::from_ptr(entry) };
        entry.to_bytes().strip_prefix(name).map(Some)
    })?
}

/// The first executable file found.
pub(crate) fn first<'a>(file: &CStr, arena: &mut Arena<'a>) -> Option<&'a CStr> {
    let mut found = arena.text(PATH_BYTES)?;
    let mut search = Search::new(file).ok()?;
    loop {
        let mut arena = arena.scope();
        let path = search.next(&mut arena)?;
        if sys::is_executable(path)
            && sys::stat(sys::AT_FDCWD, path, 0).is_some_and(|found| found.is_file())
        {
            found.push(path.to_bytes_with_nul()).ok()?;
            break;
        }
    }
    CStr::from_bytes_with_nul(found.into_bytes()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The places that are tried while these errors come, and the last one's error.
    fn tries(file: &CStr, errors: &[c_int]) -> (Vec<std::ffi::CString>, c_int) {
        let mut search = match Search::new(file) {
            Ok(search) => search,
            Err(error) => return (Vec::new(), error),
        };
        search.directories = search.directories.filter(|_| is_path(file)).or(Some(b"/a::/b"));
        let mut tried = Vec::new();
        for error in errors {
            let mut memory = [0; PATH_BYTES];
            let Some(path) = search.next(&mut Arena::new(&mut memory)) else { break };
            tried.push(path.to_owned());
            if !search.goes_on_after(*error) {
                break;
            }
        }
        (tried, search.error())
    }

    fn finds(file: &CStr) -> bool {
        first(file, &mut Arena::new(&mut [0; 2 * PATH_BYTES])).is_some()
    }

    #[test]
    fn a_name_with_a_slash_is_tried_as_it_is() {
        assert_eq!(tries(c"./x", &[sys::ENOEXEC]), (vec![c"./x".to_owned()], sys::ENOEXEC));
        assert_eq!(tries(c"./x", &[EACCES, ENOENT]), (vec![c"./x".to_owned()], EACCES));
        assert_eq!(tries(c"", &[]), (vec![], ENOENT));
        let long = std::ffi::CString::new(vec![b'x'; NAME_MAX + 1]).unwrap();
        assert_eq!(tries(&long, &[]), (vec![], ENAMETOOLONG));
        assert!(finds(c"/bin/sh") && finds(c"sh") && !finds(c"/bin"));
    }

    #[test]
    fn a_denied_place_is_remembered() {
        let places = vec![c"/a/x".to_owned(), c"x".to_owned(), c"/b/x".to_owned()];
        assert_eq!(tries(c"x", &[ENOENT, EACCES, ENOENT, ENOENT]), (places.clone(), EACCES));
        assert_eq!(tries(c"x", &[ENOTDIR; 4]), (places, ENOTDIR));
        assert_eq!(tries(c"x", &[EACCES, sys::E2BIG]).1, sys::E2BIG);
    }

    #[test]
    fn a_variable_is_found_by_its_whole_name() {
        let environment =
            [c"PATHS=/a".as_ptr(), c"PATH=/b".as_ptr(), c"PATH=/c".as_ptr(), std::ptr::null()];
        // SAFETY: the array is one.
        unsafe {
            assert_eq!(variable(environment.as_ptr(), b"PATH="), Some(&b"/b"[..]));
            assert_eq!(variable(environment.as_ptr(), b"HOME="), None);
            assert_eq!(variable(std::ptr::null(), b"HOME="), None);
        }
    }
}
