//! The stage program's quick look: could this word of an argv reach an owned
//! mount? It knows a short list of paths only, and errs towards "perhaps".

use std::path::{Path, PathBuf};

/// The owned mount points, and those that must not be touched.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Prefixes {}

impl Prefixes {
    /// The owned mount points, in path order.
    pub fn owned(&self) -> Vec<PathBuf> {
        todo!()
    }

    /// NUL-separated text for a file or variable that the stage program reads.
    pub fn encode(&self) -> Vec<u8> {
        todo!()
    }

    /// The reverse; `None` when it was not made by `encode`.
    pub fn decode(_text: &[u8]) -> Option<Prefixes> {
        todo!()
    }

    /// Whether a directory as from getcwd(3) lies on an owned mount. No system call.
    pub fn cwd_is_owned(&self, _cwd: &Path) -> bool {
        todo!()
    }

    /// Whether one word of an argv could name something on an owned mount:
    /// the word itself, what follows an `=`, what follows a short option's
    /// letter, or what begins at a `/` in it. `cwd` as from getcwd(3).
    pub fn may_touch(&self, _word: &[u8], _cwd: &Path) -> bool {
        todo!()
    }
}
