//! Where execvp(3) and posix_spawnp(3) look for a program, as glibc does it: its
//! own search ends in calls that nobody can stand in front of.

use core::ffi::{CStr, c_int};

use crate::{
    sys::{self, EACCES, ENAMETOOLONG, ENODEV, ENOENT, ENOTDIR, ESTALE, ETIMEDOUT, PATH_BYTES},
    text::Text,
};

/// Without PATH: confstr(3)'s `_CS_PATH`.
const DEFAULT_PATH: &[u8] = b"/bin:/usr/bin";
/// The kernel's longest file name.
const NAME_MAX: usize = 255;

/// Tries each place until `attempt` succeeds (it gives `None`) or fails for good; the error.
pub(crate) fn each(file: &CStr, mut attempt: impl FnMut(&CStr) -> Option<c_int>) -> Option<c_int> {
    let name = file.to_bytes();
    if name.is_empty() {
        return Some(ENOENT);
    }
    if name.contains(&b'/') {
        return attempt(file);
    }
    if name.len() > NAME_MAX {
        return Some(ENAMETOOLONG);
    }
    let path = sys::variable(c"PATH").map_or(DEFAULT_PATH, CStr::to_bytes);
    let (mut denied, mut last) = (false, ENOENT);
    for directory in path.split(|byte| *byte == b':') {
        let Some(candidate) = join(directory, name) else { continue };
        let Some(candidate) = candidate.as_c_str() else { continue };
        last = attempt(candidate)?;
        match last {
            EACCES => denied = true,
            ENOENT | ESTALE | ENOTDIR | ENODEV | ETIMEDOUT => {}
            _ => return Some(last),
        }
    }
    Some(if denied { EACCES } else { last })
}

/// `None` where it is longer than any path that the kernel takes.
fn join(directory: &[u8], name: &[u8]) -> Option<Text<PATH_BYTES>> {
    let slash: &[u8] = if directory.is_empty() { b"" } else { b"/" };
    Text::of(&[directory, slash, name, b"\0"]).ok()
}

/// The first program that could be executed.
pub(crate) fn first(file: &CStr) -> Option<Text<PATH_BYTES>> {
    let mut found = None;
    each(file, |candidate| {
        if !sys::is_executable(candidate) || sys::stat(sys::AT_FDCWD, candidate, 0).is_none_or(|s| !s.is_file()) {
            return Some(ENOENT);
        }
        found = Text::of(&[candidate.to_bytes_with_nul()]).ok();
        None
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_a_slash_is_tried_as_it_is() {
        let mut tried = Vec::new();
        let error = each(c"./x", |path| {
            tried.push(path.to_owned());
            Some(sys::ENOEXEC)
        });
        assert_eq!((error, tried), (Some(sys::ENOEXEC), vec![c"./x".to_owned()]));
        assert_eq!(each(c"", |_| None), Some(ENOENT));
        assert_eq!(first(c"/bin/sh").unwrap().as_c_str(), Some(c"/bin/sh"));
        assert!(first(c"/bin").is_none());
    }

    #[test]
    fn a_denied_place_is_remembered() {
        let answers = [ENOENT, EACCES, ENOENT];
        let mut answers = answers.iter().copied().chain(std::iter::repeat(ENOTDIR));
        assert_eq!(each(c"nosuch", |_| answers.next()), Some(EACCES));
        assert_eq!(each(c"nosuch", |_| Some(sys::E2BIG)), Some(sys::E2BIG));
    }
}
