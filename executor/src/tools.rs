//! Commands that this executor has, and their identities: the path on a fixed PATH and the SHA-256
//! of the file. The output of `NAME --version` takes a run like any other (`policy`): this module
//! starts nothing.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Mutex,
};

use nix::unistd::{AccessFlags, access};
use posh_proto::executor::Tool;
use sha2::{Digest as _, Sha256};

use crate::{identity::PATH, runner};

/// Identities kept; a gateway asks for some hundred names.
const MAX_CACHED: usize = 4096;

/// The program that `name`, a plain name, is on the fixed PATH.
///
/// A link such as /usr/local/bin/x -> /home/u/x does not count: in a view, it leads into what a
/// client has mounted there.
pub fn find(name: &str) -> Option<PathBuf> {
    if name.is_empty() || name.contains('/') || name.contains('\0') {
        return None;
    }
    PATH.split(':').map(|directory| Path::new(directory).join(name)).find(|path| is_program(path))
}

fn is_program(path: &Path) -> bool {
    path.is_file()
        && access(path, AccessFlags::X_OK).is_ok()
        && fs::canonicalize(path).is_ok_and(|path| runner::is_shown(&path))
}

/// Identity of an unchanged file.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Stamp {
    path: PathBuf,
    size: u64,
    modified: (i64, i64),
    inode: u64,
}

/// Hashes of programs, cached as long as their files do not change.
#[derive(Default)]
pub struct Tools {
    hashes: Mutex<HashMap<Stamp, Vec<u8>>>,
}

impl Tools {
    /// Describes these commands, those for which `may_run` is false as missing: each once, however
    /// often it is named. Reads files.
    pub fn describe_all(&self, names: Vec<String>, may_run: impl Fn(&str) -> bool) -> Vec<Tool> {
        let mut known: HashMap<String, Tool> = HashMap::new();
        let mut describe = |name: String| {
            if let Some(tool) = known.get(&name) {
                return tool.clone();
            }
            let tool = match may_run(&name) {
                true => self.describe(name.clone()),
                false => Tool { name: name.clone(), ..Tool::default() },
            };
            known.insert(name, tool.clone());
            tool
        };
        names.into_iter().map(&mut describe).collect()
    }

    /// Describes the command `name`. Reads its file, unless its hash is cached.
    pub fn describe(&self, name: String) -> Tool {
        let missing = Tool { name: name.clone(), ..Tool::default() };
        let Some(path) = find(&name).and_then(|path| fs::canonicalize(path).ok()) else {
            return missing;
        };
        let Ok(metadata) = fs::metadata(&path) else { return missing };
        let stamp = Stamp {
            path,
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            inode: metadata.ino(),
        };
        let Some(sha256) = self.hash(&stamp) else { return missing };
        Tool { name, found: true, sha256: sha256.into() }
    }

    fn hash(&self, stamp: &Stamp) -> Option<Vec<u8>> {
        if let Some(known) = self.hashes.lock().expect("not poisoned").get(stamp) {
            return Some(known.clone());
        }
        let hash = hash_file(&stamp.path).ok()?;
        self.remember(stamp, hash.clone());
        Some(hash)
    }

    fn remember(&self, stamp: &Stamp, hash: Vec<u8>) {
        let mut known = self.hashes.lock().expect("not poisoned");
        if known.len() >= MAX_CACHED {
            known.clear();
        }
        known.insert(stamp.clone(), hash);
    }
}

/// The SHA-256 of a file's content.
pub fn hash_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finalize().to_vec()),
            count => hasher.update(&buffer[..count]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_are_found() {
        assert!(find("cat").is_some());
        for name in ["", "/bin/cat", "../bin/cat", "no-such-command-here", "cat\0"] {
            assert_eq!(find(name), None, "{name:?}");
        }
    }

    #[test]
    fn a_tool_has_a_hash() {
        let tools = Tools::default();
        let cat = tools.describe("cat".into());
        assert!(cat.found, "{cat:?}");
        assert_eq!(cat.sha256, hash_file(&find("cat").unwrap()).unwrap());
        assert!(!tools.describe("no-such-command-here".into()).found);
    }

    #[test]
    fn one_name_named_often_is_looked_up_once() {
        let looked_up = std::cell::Cell::new(0);
        let may_run = |_: &str| {
            looked_up.set(looked_up.get() + 1);
            true
        };
        let tools = Tools::default().describe_all(vec!["cat".to_owned(); 4096], may_run);
        assert_eq!((tools.len(), looked_up.get()), (4096, 1));
        assert!(tools.iter().all(|tool| tool.found && *tool == tools[0]));
    }
}
