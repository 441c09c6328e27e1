//! Metadata files of rclone's write cache (`vfsMeta`): one JSON file per cached file, at the same
//! path as in the mount. Read only.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Upper bound of files examined per query: searching a larger cache costs every command too much.
const MOST_COPIES: usize = 100_000;
/// A metadata file is a few hundred bytes; fragments of a sparse copy add to it.
const MOST_BYTES: u64 = 16 << 20;

/// The cache of one mount.
#[derive(Debug)]
pub(super) struct Cache {
    /// Directory that corresponds to the mount's root.
    pub(super) root: PathBuf,
}

/// Cache metadata of one file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Copy {
    /// Relative to the mount's root.
    pub(super) path: PathBuf,
    /// Has data that is not uploaded.
    pub(super) dirty: bool,
    /// rclone's fingerprint of the content: size, time, hash.
    pub(super) fingerprint: String,
    /// Modification time of the metadata file: of the first write, or of the close.
    pub(super) recorded: SystemTime,
}

impl Copy {
    pub(super) fn is_dirty(&self) -> bool {
        self.dirty
    }

    /// The fingerprint is the size alone: other content of the same size would go unnoticed.
    pub(super) fn is_weak(&self) -> bool {
        !self.fingerprint.contains(',')
    }
}

impl Cache {
    /// Returns some copy at or below `inside` that `wanted` accepts. A name that the cache may
    /// encode differently is searched for in the whole cache.
    pub(super) fn find(
        &self,
        inside: &Path,
        wanted: impl Fn(&Copy) -> bool,
    ) -> io::Result<Option<Copy>> {
        let plain =
            inside.to_str().is_some_and(|text| text.bytes().all(|b| (b' '..0x7f).contains(&b)));
        let start = if plain { inside } else { Path::new("") };
        let mut queue = vec![start.to_owned()];
        let mut seen = 0;
        while let Some(inside) = queue.pop() {
            let place = self.root.join(&inside);
            let found = match fs::symlink_metadata(&place) {
                Ok(found) => found,
                Err(error) if is_absent(&error) => continue,
                Err(error) => return Err(error),
            };
            seen += 1;
            if seen > MOST_COPIES {
                return Err(io::Error::other(format!(
                    "{} has too many files to look through",
                    self.root.display()
                )));
            }
            if found.is_dir() {
                match fs::read_dir(&place) {
                    Ok(entries) => {
                        queue.extend(entries.flatten().map(|entry| inside.join(entry.file_name())))
                    }
                    Err(error) if is_absent(&error) => {}
                    Err(error) => return Err(error),
                }
            } else if let Some(copy) = self.read(inside, &found)?
                && wanted(&copy)
            {
                return Ok(Some(copy));
            }
        }
        Ok(None)
    }

    fn read(&self, inside: PathBuf, found: &fs::Metadata) -> io::Result<Option<Copy>> {
        let recorded = found.modified()?;
        if found.len() > MOST_BYTES {
            return Err(io::Error::other(format!(
                "{} is too large",
                self.root.join(inside).display()
            )));
        }
        // Another writer of this directory may have replaced the file with a FIFO, or extended it:
        // excess bytes make it invalid JSON.
        let mut text = Vec::new();
        let file = trusted_path::open_regular(&self.root.join(&inside));
        match file.and_then(|file| file.take(MOST_BYTES).read_to_end(&mut text)) {
            Ok(_) => Ok(Some(copy(inside, recorded, &text))),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// A file removed during the search was clean, or was just renamed.
fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// A truncated file is being written: treat it as dirty.
fn copy(path: PathBuf, recorded: SystemTime, text: &[u8]) -> Copy {
    let Ok(said) = serde_json::from_slice::<serde_json::Value>(text) else {
        return Copy { path, dirty: true, fingerprint: String::new(), recorded };
    };
    Copy {
        path,
        dirty: said["Dirty"].as_bool().unwrap_or(true),
        fingerprint: said["Fingerprint"].as_str().unwrap_or_default().to_owned(),
        recorded,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(files: &[(&str, &str)]) -> (tempfile::TempDir, Cache) {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            fs::write(path, text).expect("written");
        }
        let root = dir.path().to_owned();
        (dir, Cache { root })
    }

    const DIRTY: &str = r#"{"Size": 1, "Fingerprint": "", "Dirty": true}"#;
    const CLEAN: &str =
        r#"{"Size": 1, "Fingerprint": "1,2026-01-01 00:00:00 +0000 UTC", "Dirty": false}"#;
    const WEAK: &str = r#"{"Size": 1, "Fingerprint": "1", "Dirty": false}"#;

    #[test]
    fn copies_are_found_at_a_path_and_below() {
        let (_dir, cache) = cache(&[
            ("d/dirty", DIRTY),
            ("d/e/clean", CLEAN),
            ("weak", WEAK),
            ("half", "{\"Si"),
            ("o/\u{201b}", DIRTY),
        ]);
        let check = |inside: &str, wanted: fn(&Copy) -> bool, expect: Option<&str>| {
            let found = cache.find(Path::new(inside), wanted).expect("readable");
            assert_eq!(found.map(|copy| copy.path), expect.map(PathBuf::from), "{inside}");
        };
        check("d", Copy::is_dirty, Some("d/dirty"));
        check("d/dirty", Copy::is_dirty, Some("d/dirty"));
        check("d/e", Copy::is_dirty, None);
        check("absent", Copy::is_dirty, None);
        check("weak/below-a-file", Copy::is_dirty, None);
        check("half", Copy::is_dirty, Some("half"));
        check("weak", Copy::is_weak, Some("weak"));
        check("d/e", Copy::is_weak, None);
        // Nobody writes to it.
        let made = std::process::Command::new("mkfifo")
            .arg(cache.root.join("fifo"))
            .status()
            .expect("mkfifo(1)");
        assert!(made.success());
        let why = cache.find(Path::new("fifo"), Copy::is_dirty).expect_err("it is not opened");
        assert_eq!(why.to_string(), "not a regular file");
        // Whatever it is called in the cache, it may be one of those.
        assert!(cache.find(Path::new("o\n"), Copy::is_dirty).expect("readable").is_some());
    }
}
