//! Notes of a session's commands about the pipes that they write to (`posh_hook::pipes`): a reader
//! whose writer runs locally need not look for it.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
};

use posh_hook::pipes::{FILE, FILE_BYTES, PipeWriter, Slot};

/// Creates the file in a session's directory.
///
/// # Errors
/// The file system's.
pub fn make(directory: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(0o600).open(directory.join(FILE))?;
    file.set_len(FILE_BYTES)
}

/// Returns true if the pipe's writer has noted that it runs locally.
#[must_use]
pub fn is_fed_here(directory: &Path, pipe: u64) -> bool {
    let mut bytes = [0; 8];
    let read = File::open(directory.join(FILE))
        .and_then(|file| file.read_exact_at(&mut bytes, Slot::offset(pipe)));
    read.is_ok() && Slot::read(bytes).writer(pipe) == Some(PipeWriter::Stays)
}

/// Notes that no command of the session writes to this pipe: its other end existed before.
///
/// # Errors
/// The file system's.
pub fn note_fed_here(directory: &Path, pipe: u64) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(directory.join(FILE))?;
    file.write_all_at(Slot::of(pipe, PipeWriter::Stays).bytes(), Slot::offset(pipe))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_noted_is_so() {
        let directory = tempfile::tempdir().unwrap();
        assert!(!is_fed_here(directory.path(), 7));
        assert!(note_fed_here(directory.path(), 7).is_err());
        make(directory.path()).unwrap();
        assert!(!is_fed_here(directory.path(), 7) && !is_fed_here(directory.path(), 0));
        note_fed_here(directory.path(), 7).unwrap();
        assert!(is_fed_here(directory.path(), 7) && !is_fed_here(directory.path(), 8));
    }
}
