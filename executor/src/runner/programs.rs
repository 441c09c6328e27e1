//! Programs that one command may start: its own, those that its annotation names (`runs`,
//! `helpers`), and those by which the kernel starts these: loaders, and the interpreters of
//! scripts. Programs named by a file of an export (git's configuration, a hook, a delegate) are not
//! among them, whenever that file was written.
//!
//! A loader starts whatever it can read (`ld.so /usr/bin/python3`). So read access to the server's
//! own tree depends on the programs: a command that starts nothing, which the seccomp filter
//! ensures, reads all of it; one that starts binary programs reads those, their libraries and data;
//! a script reads no directory of programs.

use std::{
    collections::HashSet,
    ffi::{OsStr, OsString},
    fs::{self, File, OpenOptions},
    os::{
        fd::OwnedFd,
        unix::{
            ffi::OsStrExt as _,
            fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _},
        },
    },
    path::{Path, PathBuf},
};

use landlock::{AccessFs, BitFlags};
use nix::libc;

use super::{
    elf::ElfImage,
    fence::{PROGRAM, READ},
    view::{PROGRAM_LINKS, SHOWN, is_shown},
};
use crate::identity;

/// Depth of interpreters that are scripts themselves, as the kernel follows them.
const MAX_DEPTH: usize = 5;

/// Bound of files: far more than any program has with its libraries.
const MAX_FILES: usize = 512;

/// Bytes of a script's first line that the kernel reads.
const MAX_LINE_BYTES: usize = 256;

/// Libraries that C libraries load on demand.
const LOADED_LATER: [&str; 6] = [
    "libgcc_s.so.1",
    "libnss_files.so.2",
    "libnss_compat.so.2",
    "libnss_systemd.so.2",
    "libnss_extrausers.so.2",
    "libnss_db.so.2",
];

/// Subdirectories of library directories: modules that convert character sets, and variants for
/// newer processors.
const BESIDE_LIBRARIES: [&str; 2] = ["gconv", "glibc-hwcaps"];

/// Data that programs read: languages, time zones, terminals, and git's templates.
const DATA: [&str; 11] = [
    "/usr/lib/locale",
    "/usr/lib64/locale",
    "/usr/share/locale",
    "/usr/share/locale-langpack",
    "/usr/share/i18n",
    "/usr/share/zoneinfo",
    "/usr/share/terminfo",
    "/usr/lib/terminfo",
    "/lib/terminfo",
    "/usr/share/misc",
    "/usr/share/git-core",
];

/// Trees that a script's interpreter may read: it has modules in many places. None is a directory
/// of a PATH.
const MODULES: [&str; 12] = [
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/libx32",
    "/usr/share",
    "/usr/local/lib",
    "/usr/local/lib64",
    "/usr/local/share",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
];

/// Directories in which distributions and packages have programs and libraries side by side.
const STORES: [&str; 4] = ["/opt", "/nix", "/gnu", "/snap"];

/// Trees of the server that a command reads, beside single files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadTrees {
    /// All of it: it starts nothing.
    Everything,
    /// The modules of interpreters, and libraries of all programs.
    Modules,
    /// Data only.
    Data,
}

/// Programs that one command may start, and the files that it reads for that.
#[derive(Debug)]
pub struct Programs {
    /// Files to execute and read.
    pub executed: Vec<OwnedFd>,
    /// Files to read: libraries, and directories of them.
    pub libraries: Vec<OwnedFd>,
    /// Trees to read.
    pub reads: ReadTrees,
    /// Directories of a program's own distribution.
    pub stores: Vec<&'static str>,
}

impl Programs {
    /// For the program at `path`, which starts `others`: names, or absolute paths. Programs that
    /// are not installed are left out. Looks for libraries in `directories`.
    pub fn new(path: &Path, others: &[String], directories: &[PathBuf]) -> Self {
        let mut search = ReferenceSearch { directories, ..ReferenceSearch::default() };
        search.add(path, MAX_DEPTH);
        let is_alone = others.is_empty() && !search.has_script;
        if !is_alone {
            others.iter().for_each(|other| search.add_named(OsStr::new(other), MAX_DEPTH));
            search.add_libraries();
        }
        let reads = match (is_alone, search.has_script || search.is_short) {
            (true, _) => ReadTrees::Everything,
            (false, true) => ReadTrees::Modules,
            (false, false) => ReadTrees::Data,
        };
        let open = |files: Vec<File>| files.into_iter().map(OwnedFd::from).collect();
        Self {
            executed: open(search.executed),
            libraries: open(search.libraries),
            reads,
            stores: search.stores,
        }
    }

    /// Returns true if the command never executes another program.
    pub fn is_alone(&self) -> bool {
        self.reads == ReadTrees::Everything
    }

    /// Single files, and directories of libraries.
    pub fn files(&self) -> impl Iterator<Item = (&OwnedFd, BitFlags<AccessFs>)> {
        let executed = self.executed.iter().map(|file| (file, PROGRAM));
        executed.chain(self.libraries.iter().map(|file| (file, READ)))
    }

    /// The trees of the server that the command reads.
    pub fn trees(&self) -> impl Iterator<Item = &'static str> {
        let (all, some): (&[&str], &[&str]) = match self.reads {
            ReadTrees::Everything => (&SHOWN, &PROGRAM_LINKS),
            ReadTrees::Modules => (&MODULES, &self.stores),
            ReadTrees::Data => (&DATA, &[]),
        };
        all.iter().chain(some).copied().collect::<Vec<_>>().into_iter()
    }
}

/// Search path of this machine's loader for libraries, in any order: configured and built-in
/// directories.
pub fn library_directories() -> Vec<PathBuf> {
    let mut files = vec![PathBuf::from("/etc/ld.so.conf")];
    files.extend(
        fs::read_dir("/etc/ld.so.conf.d").into_iter().flatten().flatten().map(|entry| entry.path()),
    );
    let texts = files.iter().filter_map(|file| fs::read_to_string(file).ok());
    let lines: Vec<String> =
        texts.flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>()).collect();
    let configured =
        lines.iter().map(|line| line.split(['#', ' ', '\t', '=']).next().unwrap_or_default());
    let triplet = format!("{}-linux-gnu", std::env::consts::ARCH);
    let built_in = ["/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib"];
    let built_in = [format!("/lib/{triplet}"), format!("/usr/lib/{triplet}")]
        .into_iter()
        .chain(built_in.map(str::to_owned))
        .chain(configured.filter(|line| line.starts_with('/')).map(str::to_owned));
    let mut known = HashSet::new();
    // On most machines /lib and /usr/lib are one directory.
    let directories = built_in.filter_map(|path| fs::canonicalize(path).ok());
    directories.filter(|path| is_shown(path) && known.insert(path.clone())).collect()
}

/// Follows references of files to the files that they need.
#[derive(Default)]
struct ReferenceSearch<'a> {
    directories: &'a [PathBuf],
    known: HashSet<(u64, u64)>,
    executed: Vec<File>,
    libraries: Vec<File>,
    /// Files whose libraries are still to be found, with their own search paths.
    images: Vec<ElfImage>,
    stores: Vec<&'static str>,
    has_script: bool,
    /// A needed library was not found.
    is_short: bool,
}

impl ReferenceSearch<'_> {
    /// Adds all programs of a name: a script may use one of them by its path.
    fn add_named(&mut self, name: &OsStr, depth: usize) {
        if name.as_bytes().starts_with(b"/") {
            return self.add(Path::new(name), depth);
        }
        if !name.as_bytes().contains(&b'/') {
            identity::PATH
                .split(':')
                .for_each(|directory| self.add(&Path::new(directory).join(name), depth));
        }
    }

    /// Adds a program, and the programs by which the kernel starts it.
    fn add(&mut self, path: &Path, depth: usize) {
        let Some(file) = self.open(path) else { return };
        let (image, line) = (ElfImage::read(&file), first_line(&file));
        self.executed.push(file);
        match (image, line) {
            (Some(image), _) => {
                if let Some(loader) =
                    image.interpreter.as_ref().and_then(|loader| self.open(loader))
                {
                    self.executed.push(loader);
                }
                self.images.push(image);
            }
            (None, Some(line)) if depth > 0 => self.add_interpreter(path, &line, depth - 1),
            (None, _) => {}
        }
    }

    /// Adds the program in a script's first line. The script may be a wrapper for a program of its
    /// own name.
    fn add_interpreter(&mut self, script: &Path, line: &[u8], depth: usize) {
        self.has_script = true;
        let mut words =
            line.split(|byte| byte.is_ascii_whitespace()).filter(|word| !word.is_empty());
        let Some(interpreter) = words.next().map(|word| Path::new(OsStr::from_bytes(word))) else {
            return;
        };
        self.add(interpreter, depth);
        if interpreter.file_name() == Some(OsStr::new("env")) {
            let words = words.map(|word| word.strip_prefix(b"-S").unwrap_or(word));
            let mut names =
                words.filter(|word| !word.is_empty() && word[0] != b'-' && !word.contains(&b'='));
            names
                .next()
                .into_iter()
                .for_each(|name| self.add_named(OsStr::from_bytes(name), depth));
        }
        script.file_name().into_iter().for_each(|name| self.add_named(name, depth));
    }

    /// Opens a regular file of the server's own tree, once.
    fn open(&mut self, path: &Path) -> Option<File> {
        let found = fs::canonicalize(path).ok().filter(|path| is_shown(path))?;
        // Opening a FIFO or a device must not block.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(&found)
            .ok()?;
        let about = file.metadata().ok().filter(fs::Metadata::is_file)?;
        self.stores.extend(STORES.iter().filter(|store| found.starts_with(store)));
        (self.known.len() < MAX_FILES && self.known.insert((about.dev(), about.ino())))
            .then_some(file)
    }

    /// Adds the libraries that the loaders will look for.
    fn add_libraries(&mut self) {
        let preloaded = fs::read_to_string("/etc/ld.so.preload").unwrap_or_default();
        let others = LOADED_LATER.iter().copied().chain(preloaded.split_whitespace());
        let mut seen: HashSet<OsString> = HashSet::new();
        for other in others {
            seen.insert(other.into());
            self.add_library(OsStr::new(other), &[]);
        }
        while let Some(image) = self.images.pop() {
            for needed in &image.needed {
                if seen.insert(needed.clone()) && !self.add_library(needed, &image.run_paths) {
                    self.is_short = true;
                }
            }
        }
        for directory in
            self.directories.iter().flat_map(|path| BESIDE_LIBRARIES.map(|name| path.join(name)))
        {
            let flags = libc::O_DIRECTORY | libc::O_PATH;
            self.libraries
                .extend(OpenOptions::new().read(true).custom_flags(flags).open(directory).ok());
        }
    }

    /// Adds all libraries of that name: the loader chooses by its cache and by the processor.
    fn add_library(&mut self, name: &OsStr, run_paths: &[OsString]) -> bool {
        if name.as_bytes().contains(&b'/') {
            return self.add_library_at(Path::new(name));
        }
        let run_paths =
            run_paths.iter().flat_map(|list| list.as_bytes().split(|byte| *byte == b':'));
        let run_paths = run_paths.map(|path| Path::new(OsStr::from_bytes(path)).to_owned());
        let directories: Vec<PathBuf> = run_paths.chain(self.directories.iter().cloned()).collect();
        directories.iter().filter(|directory| self.add_library_at(&directory.join(name))).count()
            > 0
    }

    fn add_library_at(&mut self, path: &Path) -> bool {
        if !path.is_absolute() || !path.exists() {
            return false;
        }
        if let Some(file) = self.open(path) {
            self.images.extend(ElfImage::read(&file));
            self.libraries.push(file);
        }
        true
    }
}

/// The text after `#!`.
fn first_line(file: &File) -> Option<Vec<u8>> {
    let mut bytes = vec![0; MAX_LINE_BYTES];
    let count = file.read_at(&mut bytes, 0).ok()?;
    bytes.truncate(count);
    let line = bytes.strip_prefix(b"#!")?;
    Some(line.split(|byte| *byte == b'\n').next().unwrap_or_default().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::paths::name_of;

    fn programs(path: &str, others: &[&str]) -> Programs {
        let others: Vec<String> = others.iter().map(ToString::to_string).collect();
        Programs::new(Path::new(path), &others, &library_directories())
    }

    fn names(files: &[OwnedFd]) -> Vec<PathBuf> {
        files.iter().map(|file| name_of(file).unwrap()).collect()
    }

    fn has(files: &[OwnedFd], path: &str) -> bool {
        names(files).contains(&fs::canonicalize(path).unwrap())
    }

    #[test]
    fn what_starts_nothing_has_itself_and_its_loader() {
        let sort = programs("/usr/bin/sort", &[]);
        assert_eq!((sort.executed.len(), sort.libraries.len(), sort.is_alone()), (2, 0, true));
        assert!(has(&sort.executed, "/usr/bin/sort"), "{:?}", names(&sort.executed));
    }

    #[test]
    fn machine_code_reads_its_libraries_and_no_program() {
        let git = programs("/usr/bin/git", &["git", "/usr/lib/git-core/git", "/missing"]);
        assert_eq!(git.reads, ReadTrees::Data, "{:?}", names(&git.libraries));
        assert!(has(&git.executed, "/usr/lib/git-core/git"));
        assert!(!has(&git.executed, "/bin/sh"));
        assert!(
            names(&git.libraries).iter().any(|path| path.to_string_lossy().contains("/libc.so"))
        );
        assert!(git.trees().all(|tree| !Path::new("/usr/bin/sh").starts_with(tree)));
    }

    #[test]
    fn a_script_has_its_interpreter_and_what_is_named() {
        let zgrep = programs("/usr/bin/zgrep", &["gzip", "grep", "sh"]);
        assert_eq!(zgrep.reads, ReadTrees::Modules);
        for path in ["/usr/bin/zgrep", "/bin/sh", "/usr/bin/gzip", "/usr/bin/grep"] {
            assert!(has(&zgrep.executed, path), "{path}");
        }
        assert!(!has(&zgrep.executed, "/usr/bin/env"));
        let tops = ["/usr", "/usr/bin", "/usr/local/bin", "/usr/sbin", "/bin"];
        assert!(zgrep.trees().all(|tree| !tops.contains(&tree)));
    }

    #[test]
    fn what_env_starts_is_an_interpreter() {
        let mut search = ReferenceSearch::default();
        search.add_interpreter(
            Path::new("/usr/local/bin/none"),
            b"/usr/bin/env -S LANG=C sort -u",
            3,
        );
        let executed: Vec<OwnedFd> = search.executed.into_iter().map(OwnedFd::from).collect();
        assert!(
            has(&executed, "/usr/bin/env") && has(&executed, "/usr/bin/sort"),
            "{:?}",
            names(&executed)
        );
    }

    #[test]
    fn no_file_of_others_is_a_program() {
        let directory = tempfile::tempdir().unwrap();
        let copy = directory.path().join("sort");
        fs::copy("/usr/bin/sort", &copy).unwrap();
        assert_eq!(programs(&copy.display().to_string(), &[]).executed.len(), 0);
    }
}
