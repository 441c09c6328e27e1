//! A script's command, as its text tells it, and whether a directory that the next one lists is the same
//! before and after it. It must be nothing but programs whose annotations say that they read files of mounts, come to an
//! end by themselves, and start nothing else: no program of which nothing is known (it may be an ssh that changes the directory on
//! the server), nothing that waits for somebody, nothing that writes beside its one redirect.

use std::{
    collections::HashSet,
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use fs_mapper::{Mount, MountTable, Owned, Resolution, coherence::Adapter};
use posh_annotations::{FileUse, Invocation, Library, StdinUse};
use posh_proto::gateway as wire;

use super::path;
use crate::tools;

/// Where programs are those of the system, and not the user's own under the same name.
const SYSTEM: [&str; 2] = ["/usr/bin", "/bin"];

/// One whose outputs are all that it can change.
#[derive(Debug)]
pub struct Before {
    /// Redirects, but to /dev/null.
    pub outputs: Vec<PathBuf>,
}

impl Before {
    /// `None` where the command may change anything else. `search` is the shell's PATH.
    #[must_use]
    pub fn read(
        table: &MountTable,
        library: &Library,
        command: &wire::CertainCommand,
        environment: &[bytes::Bytes],
        search: &Path,
    ) -> Option<Self> {
        let cwd = path(&command.cwd);
        let mut outputs = Vec::new();
        for (index, stage) in command.stages.iter().enumerate() {
            let argv: Vec<OsString> = stage.argv.iter().map(|word| path(word).into_os_string()).collect();
            let invocation = invocation(library, &argv, environment, search)?;
            let reads_ours = index == 0 && stage.stdin_path.is_empty() && invocation.stdin != StdinUse::Unused;
            let redirected = (!stage.stdin_path.is_empty()).then(|| path(&stage.stdin_path));
            let read = invocation.files.iter().filter(|file| !is_stdin(file)).map(|file| PathBuf::from(&file.path));
            let mut read = read.chain(redirected);
            if reads_ours || !read.all(|file| owned(table, &file, &cwd).is_some()) {
                return None;
            }
            outputs.extend((!stage.stdout_path.is_empty()).then(|| cwd.join(path(&stage.stdout_path))));
        }
        outputs.retain(|output| output != Path::new("/dev/null"));
        (!command.stages.is_empty()).then_some(Self { outputs })
    }

    /// Whether the shell opens one of the outputs through a mount.
    #[must_use]
    pub fn writes_to(&self, table: &MountTable, mount: &Mount) -> bool {
        let place = |output: &PathBuf| owned(table, output, Path::new("/"));
        self.outputs.iter().filter_map(place).any(|output| table.mount(output.mount).path == mount.path)
    }

    /// Whether a directory can't be changed by the outputs: they are on the same mount, by which this machine
    /// makes them, and neither in the directory nor on the way to it. On another mount of the same server they might be in it,
    /// under another name.
    #[must_use]
    pub fn keeps(&self, table: &MountTable, directory: &Path) -> bool {
        let Some(listed) = owned(table, directory, Path::new("/")) else { return false };
        let is_apart = |output: &PathBuf| {
            owned(table, output, Path::new("/")).is_some_and(|output| {
                let (output_path, listed_path) = (output.client_path.as_path(), listed.client_path.as_path());
                output.mount == listed.mount
                    && !output_path.starts_with(listed_path)
                    && !listed_path.starts_with(output_path)
            })
        };
        // Its daemon forgets within seconds what was looked at too early; others remember for minutes.
        table.mount(listed.mount).adapter() == Adapter::Sshfs && self.outputs.iter().all(is_apart)
    }
}

/// What one command is, if it does nothing but read files and its input.
fn invocation(library: &Library, argv: &[OsString], environment: &[bytes::Bytes], search: &Path) -> Option<Invocation> {
    let name = argv.first()?.to_str().filter(|name| !name.contains('/'))?;
    let program = tools::program_on_path(Some(search.as_os_str()), name, &HashSet::new())?;
    let is_of_the_system = SYSTEM.iter().any(|directory| program.parent() == Some(Path::new(directory)));
    let variable = |name: &str| {
        let value = |entry: &bytes::Bytes| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=").map(<[u8]>::to_vec);
        environment.iter().find_map(value).map(|value| OsStr::from_bytes(&value).to_owned())
    };
    let found = library.classify(name, argv, &variable).ok()?;
    let changes_nothing = !found.side_effects && !found.files.iter().any(|file| file.kind.writes());
    // What is the same each time does not follow a file that grows.
    let ends = found.deterministic && !found.needs_network;
    let is_alone = found.runs.is_empty() && found.guards.is_empty();
    (is_of_the_system && changes_nothing && ends && is_alone).then_some(found)
}

fn is_stdin(file: &FileUse) -> bool {
    file.path == "-"
}

/// Where on an owned mount a path leads, if the text alone can tell.
fn owned(table: &MountTable, path: &Path, cwd: &Path) -> Option<Owned> {
    match table.resolve(path, cwd) {
        Resolution::Owned(owned) if !owned.uncertain => Some(owned),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use fs_mapper::{config::Config, mountinfo::MountInfo};

    use super::*;

    /// Two sshfs mounts of one server, an rclone mount of it, and a local disk.
    fn table() -> MountTable {
        let info = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n\
                    10 1 0:10 / /m/a rw - fuse.sshfs me@s:/a rw\n\
                    11 1 0:11 / /m/b rw - fuse.sshfs me@s:/b rw\n\
                    12 1 0:12 / /m/r rw - fuse.rclone r: rw\n";
        let mount = |name: &str| format!("[[mount]]\npath='/m/{name}'\nexecutor='s'\nexport='{name}'\n");
        let config =
            format!("[[executor]]\nname='s'\naddress='http://s:1'\n{}{}{}", mount("a"), mount("b"), mount("r"));
        let config = Config::parse(&config, Path::new("m")).expect("a configuration");
        MountTable::new(&config, &MountInfo::parse(info.as_bytes()).expect("mountinfo"))
    }

    fn stage(text: &str) -> wire::PlannedStage {
        let mut stage = wire::PlannedStage::default();
        for word in text.split_whitespace() {
            match word.split_at(1) {
                ("<", file) => stage.stdin_path = file.to_owned().into(),
                (">", file) => stage.stdout_path = file.to_owned().into(),
                _ => stage.argv.push(word.to_owned().into()),
            }
        }
        stage
    }

    /// Whether `directory` is the same after `text`, run in /m/a.
    fn keeps_with(variable: &'static str, text: &str, directory: &str) -> bool {
        let command = wire::CertainCommand { stages: text.split('|').map(stage).collect(), cwd: "/m/a".into() };
        let search = Path::new("/usr/bin:/bin");
        let before = Before::read(&table(), &Library::builtin(), &command, &[variable.into()], search);
        before.is_some_and(|before| before.keeps(&table(), Path::new(directory)))
    }

    fn keeps(text: &str, directory: &str) -> bool {
        keeps_with("HOME=/root", text, directory)
    }

    #[test]
    fn what_reads_mounts_and_writes_elsewhere_on_the_same_one_changes_no_listing() {
        for text in [
            "cat f",
            "cat /m/b/f | grep x | head -n 1 | cut -c 8- >/m/a/out",
            "cat f >out",
            "cat f >logs.csv",
            "sort <f | uniq -c >/dev/null",
            "grep -r x /m/b/tree",
            "sed -n s/a/b/p d/*.csv >other/out",
        ] {
            assert!(keeps(text, "/m/a/logs/"), "{text}");
        }
    }

    #[test]
    fn what_may_change_a_directory_or_wait_for_somebody_who_does_is_refused() {
        for text in [
            // Into it, onto it, or above it.
            "cat f >logs/new",
            "cat f >logs/deep/new",
            "cat f >logs",
            // The same server by another mount, or this machine's disk.
            "cat f >/m/b/new",
            "cat f >/srv/a/new",
            "cat f >/m/a/../b/new",
            // Files that commands make by their words.
            "tee /m/a/logs/new <f",
            "tee /m/b/new <f",
            "sort -o out f",
            "sed -i s/a/b/ f",
            "rm f",
            "mkdir d",
            // Programs of which nothing is known, and those that start others.
            "ssh s touch f",
            "./cat f",
            "sort --compress-program=ssh f",
            "sed e f",
            "find . -exec touch {} +",
            "git status",
            // What waits: for the shell's input, for a pipe with a name on this machine, for a file that grows.
            "cat",
            "cat -",
            "grep x | wc",
            "cat /tmp/fifo",
            "cat </tmp/fifo",
            "tail -f f | grep -m1 x",
        ] {
            assert!(!keeps(text, "/m/a/logs/"), "{text}");
        }
        assert!(!keeps("cat f", "/m/r/logs/"), "rclone remembers for minutes");
        assert!(!keeps("cat f", "/m/a/x/../logs/") && !keeps("cat f", "/srv/logs/"));
        assert!(!keeps_with("_POSIX2_VERSION=1", "uniq f", "/m/a/logs/"), "a variable can change what words mean");
    }
}
