//! Commands that this executor has, and their identities: the path on a fixed PATH and the SHA-256
//! of the file. The output of `NAME --version` takes a run like any other (`policy`): this module
//! starts nothing.
//!
//! Invariant: an answer says nothing about a file that the caller's user can't read. Each answer
//! finds and opens the file with that user's rights; only then does the cache of hashes count.

use std::{
    collections::HashMap,
    fs::{self, File, Metadata},
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Mutex,
};

use nix::{
    fcntl::{AT_FDCWD, AtFlags},
    unistd::{AccessFlags, faccessat},
};
use posh_proto::executor::Tool;
use sha2::{Digest as _, Sha256};

use crate::{identity::PATH, runner, runner::wire::ViewUser, sys::ActingAs};

/// Identities kept; a gateway asks for some hundred names.
const MAX_CACHED: usize = 4096;

/// The program that `name`, a plain name, is on the fixed PATH.
///
/// Looks with the rights that this thread acts with ([`ActingAs`]), not with those of its real ids.
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
        && faccessat(AT_FDCWD, path, AccessFlags::X_OK, AtFlags::AT_EACCESS).is_ok()
        && fs::canonicalize(path).is_ok_and(|path| runner::is_shown(&path))
}

/// Identity of an unchanged file.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    /// Time of the last change of content or attributes, in seconds and nanoseconds.
    changed: [i64; 2],
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            changed: [metadata.ctime(), metadata.ctime_nsec()],
        }
    }
}

/// Hashes of programs, cached as long as their files do not change.
#[derive(Default)]
pub struct Tools {
    hashes: Mutex<HashMap<Stamp, Vec<u8>>>,
}

impl Tools {
    /// Describes these commands to a caller whose commands run as `user`, those for which `may_run`
    /// is false as missing: each once, however often it is named. Reads files.
    ///
    /// # Errors
    /// When this thread can't have that user's rights.
    pub fn describe_all(
        &self,
        names: Vec<String>,
        user: Option<&ViewUser>,
        may_run: impl Fn(&str) -> bool,
    ) -> nix::Result<Vec<Tool>> {
        let _acting = ActingAs::begin(user)?;
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
        Ok(names.into_iter().map(&mut describe).collect())
    }

    /// Describes the command `name`, as far as this thread may read it. Reads its file, unless its
    /// hash is cached.
    fn describe(&self, name: String) -> Tool {
        let sha256 = find(&name).and_then(|path| self.hash(&path).ok());
        Tool { name, found: sha256.is_some(), sha256: sha256.unwrap_or_default().into() }
    }

    fn hash(&self, path: &Path) -> io::Result<Vec<u8>> {
        let file = File::open(path)?;
        let stamp = Stamp::of(&file.metadata()?);
        let known = self.hashes.lock().expect("not poisoned").get(&stamp).cloned();
        if let Some(known) = known {
            return Ok(known);
        }
        let hash = hash_content(file)?;
        self.remember(&stamp, hash.clone());
        Ok(hash)
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
    hash_content(File::open(path)?)
}

fn hash_content(mut file: File) -> io::Result<Vec<u8>> {
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
        let tools = Tools::default().describe_all(vec!["cat".to_owned(); 4096], None, may_run);
        let tools = tools.expect("own rights");
        assert_eq!((tools.len(), looked_up.get()), (4096, 1));
        assert!(tools.iter().all(|tool| tool.found && *tool == tools[0]));
    }

    #[test]
    fn nobody_is_told_of_a_program_that_they_may_not_read() {
        use std::os::unix::fs::PermissionsExt as _;
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let in_private = || {
            let none = None::<&str>;
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
            let private = nix::mount::MsFlags::MS_REC | nix::mount::MsFlags::MS_PRIVATE;
            nix::mount::mount(none, "/", none, private, none).unwrap();
            let (kind, flags) = (Some("tmpfs"), nix::mount::MsFlags::empty());
            nix::mount::mount(kind, "/usr/local/bin", kind, flags, none).unwrap();
            let program = Path::new("/usr/local/bin/posh-test-tool");
            fs::write(program, "password").unwrap();
            let tools = Tools::default();
            let nobody = ViewUser { uid: 65534, gid: 65534, ..ViewUser::default() };
            let told = |mode, user| {
                fs::set_permissions(program, fs::Permissions::from_mode(mode)).unwrap();
                let names = vec!["posh-test-tool".to_owned()];
                let tool = tools.describe_all(names, user, |_| true).unwrap().remove(0);
                assert_eq!(tool.found, !tool.sha256.is_empty());
                tool.found
            };
            // The cache has it already when others ask.
            assert!(told(0o700, None) && !told(0o700, Some(&nobody)));
            assert!(told(0o711, None) && !told(0o711, Some(&nobody)));
            assert!(told(0o755, Some(&nobody)) && !told(0o744, Some(&nobody)));
        };
        std::thread::spawn(in_private).join().unwrap();
    }
}
