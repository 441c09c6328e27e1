//! Syntax of single values. Messages omit the value; the reader puts it first.

use std::path::{Component, Path, PathBuf};

/// Message about a wrong value, and a hint.
pub(crate) type Wrong = (&'static str, &'static str);

/// A name that an executor gives to one of its directories.
pub(super) fn export_name(text: &str) -> Result<String, Wrong> {
    if text.is_empty() || text.contains(['/', '\0']) {
        let hint = "give the executor's name for it; directories below it go into sub_path";
        return Err(("is not the name of an export", hint));
    }
    Ok(text.to_owned())
}

/// Validates a directory on a server that ssh reaches: absolute, or below the login's home.
pub(crate) fn server_directory(text: &str) -> Result<String, Wrong> {
    let below_home = text == "~" || text.starts_with("~/");
    if !below_home && !text.starts_with('/') {
        let hint = "over ssh, export is a directory there, such as \"/srv/data\" or \"~/data\"";
        return Err(("is not a directory of the server", hint));
    }
    if text.contains(char::is_control) {
        return Err((
            "holds control characters",
            "rename the directory, or export the one above it",
        ));
    }
    let path = Path::new(text);
    if path.components().any(|part| part == Component::ParentDir) {
        return Err(("holds ..", "write the directory that is meant"));
    }
    let normal: PathBuf = path.components().collect();
    Ok(normal.into_os_string().into_string().expect("it is made of parts of a string"))
}

/// Normalizes a path: absolute, without `.`, `..`, doubled or trailing slashes.
///
/// # Errors
/// A message and a hint.
pub(super) fn normal_path(text: &str) -> Result<PathBuf, Wrong> {
    let path = Path::new(text);
    if text.contains('\0') {
        return Err(("holds a NUL byte", "no path can"));
    }
    if text.starts_with('~') {
        return Err(("begins with ~", "write the home directory in full"));
    }
    if !path.is_absolute() {
        return Err(("is relative", "write it from / on"));
    }
    if path.components().any(|part| part == Component::ParentDir) {
        return Err(("holds ..", "write the directory that is meant"));
    }
    let normal: PathBuf = path.components().collect();
    if normal == Path::new("/") {
        return Err(("is the root directory", "name the directories that executors serve"));
    }
    Ok(normal)
}

/// Parses a number of bytes, with or without suffix.
pub(super) fn size(text: &str) -> Result<u64, Wrong> {
    let (digits, shift) = match text.char_indices().next_back() {
        Some((end, 'k' | 'K')) => (&text[..end], 10),
        Some((end, 'm' | 'M')) => (&text[..end], 20),
        Some((end, 'g' | 'G')) => (&text[..end], 30),
        Some((end, 't' | 'T')) => (&text[..end], 40),
        _ => (text, 0),
    };
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number: Option<u64> = digits.parse().ok().filter(|_| is_number);
    let bytes = number.and_then(|number| number.checked_mul(1 << shift)).filter(|bytes| *bytes > 0);
    bytes.ok_or(("is not a size", "write it as a number of bytes, or as 512M or 10G"))
}
