//! The set of annotations in use: the files that ship with posh and those of the
//! machine and the user over them. Reads files; the meaning of an invocation is found elsewhere.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;
use std::{
    fs,
    io::{self, Read},
};

use crate::classify;
use crate::compile::{self, Depth};
use crate::diagnostic::{Diagnostic, Faults};
use crate::document::{self, Content, Node, Place};
use crate::facts::Environment;
use crate::invocation::{Because, Invocation, Unknown};
use crate::model::{Body, Command, Condition};

/// The table that build.rs writes.
mod embedded {
    include!(concat!(env!("OUT_DIR"), "/embedded.rs"));
}

/// No annotation file is near this size; what is larger was put there by mistake.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// A checked set of annotations. Cloning is cheap. A file is parsed when the
/// first of its commands is asked for, so a program may make one at its start.
#[derive(Debug, Clone, Default)]
pub struct Library {
    commands: Arc<BTreeMap<String, Entry>>,
    ignored_reasons: Vec<Because>,
}

/// See [`Library::declared_splits`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeclaredSplits {
    /// Across operands.
    pub operands: bool,
    /// Across standard input.
    pub across_input: bool,
    /// Across standard input, behind parts that have to be merged.
    pub behind_merge: bool,
}

#[derive(Debug, Clone)]
struct Entry {
    file: Arc<File>,
    compiled: OnceLock<Option<Arc<Command>>>,
}

#[derive(Debug)]
struct File {
    text: Cow<'static, str>,
    commands: OnceLock<BTreeMap<String, Node>>,
}

impl Library {
    /// The files that ship with posh.
    #[must_use]
    pub fn builtin() -> Self {
        let mut commands = BTreeMap::new();
        for (_, names, text) in embedded::FILES {
            let file = Arc::new(File::new(Cow::Borrowed(*text)));
            for name in *names {
                commands.insert((*name).to_owned(), Entry::new(&file));
            }
        }
        Self { commands: Arc::new(commands), ignored_reasons: Vec::new() }
    }

    /// The files that ship with posh, and over them those of `directories`, of which a later one
    /// replaces the commands of an earlier one. A directory that does not exist is empty. A file
    /// with faults is left out, and all its faults are returned.
    #[must_use]
    pub fn load(directories: &[PathBuf]) -> (Self, Vec<Diagnostic>) {
        let mut library = Self::builtin();
        let mut diagnostics = Vec::new();
        for directory in directories.iter().filter(|directory| directory.exists()) {
            diagnostics.extend(library.add_directory(directory));
        }
        (library, diagnostics)
    }

    /// Changes when a file of `directories` is added, removed or written: reload then.
    /// Looks at names, sizes and times only.
    #[must_use]
    pub fn fingerprint(directories: &[PathBuf]) -> u64 {
        let mut hasher = DefaultHasher::new();
        for directory in directories {
            directory.hash(&mut hasher);
            for path in annotation_files(directory).unwrap_or_default() {
                let metadata = fs::metadata(&path).ok();
                let modified = metadata.as_ref().and_then(|metadata| metadata.modified().ok());
                (
                    path,
                    metadata.map(|metadata| metadata.len()),
                    modified.unwrap_or(SystemTime::UNIX_EPOCH),
                )
                    .hash(&mut hasher);
            }
        }
        hasher.finish()
    }

    /// From now on, reasons of these kinds for staying here are none: for an executor, to which it
    /// is no matter what is cheap on a workstation, and for tests that show what such a reason
    /// prevents.
    pub fn ignore_reasons(&mut self, kinds: Vec<Because>) {
        self.ignored_reasons = kinds;
    }

    pub(crate) fn heeds(&self, because: Because) -> bool {
        !self.ignored_reasons.contains(&because)
    }

    /// Every annotated command's name (first word), sorted, once each.
    pub fn commands(&self) -> impl Iterator<Item = &str> {
        let mut last = "";
        self.commands.keys().filter_map(move |name| {
            let first = name.split(' ').next().unwrap_or(name);
            let new = first != last;
            last = first;
            new.then_some(first)
        })
    }

    /// Every annotated command, subcommands included, sorted: `git`, `git add`, ...
    pub fn full_names(&self) -> impl Iterator<Item = &str> {
        self.commands.keys().map(String::as_str)
    }

    /// Makes every command ready, which each else is when it is first asked about: those that ship
    /// with posh take 20 ms in all, up to one each, and 7 MB.
    pub fn prepare(&self) {
        for (name, entry) in self.commands.iter() {
            entry.compiled.get_or_init(|| self.compile(name, entry, Depth::Ready).map(Arc::new));
        }
    }

    /// What the annotations of a command (by its full name) declare of splitting, under whatever
    /// conditions. Tests are held to it: every split that is declared must be tried.
    #[must_use]
    pub fn declared_splits(&self, name: &str) -> DeclaredSplits {
        let annotations = match self.command(name).map(|command| &command.body) {
            Some(Body::Annotations(annotations)) => annotations.as_slice(),
            Some(Body::Subcommands(_)) | None => &[],
        };
        let ever = |condition: &Condition| !matches!(condition, Condition::Never);
        DeclaredSplits {
            operands: annotations
                .iter()
                .any(|a| a.params.iter().any(|param| ever(&param.splittable))),
            across_input: annotations.iter().any(|a| ever(&a.splittable_across_input)),
            behind_merge: annotations.iter().any(|a| !a.behind_merge.0.is_empty()),
        }
    }

    /// Reads one invocation. `name` is the command's name as the shell found it, with or without
    /// its directory; `argv[0]` is not used. `environment` looks up a variable of the command
    /// (`POSIXLY_CORRECT`, `TAR_OPTIONS`, `GIT_DIR`, ... can change the reading).
    ///
    /// # Errors
    /// [`Unknown`] says why the invocation stays here.
    pub fn classify(
        &self,
        name: &str,
        argv: &[OsString],
        environment: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<Invocation, Unknown> {
        self.understand(name, argv, environment).map(|understood| understood.invocation)
    }

    /// As [`Library::classify`], with the reading of each word.
    pub(crate) fn understand<'a>(
        &'a self,
        name: &str,
        argv: &'a [OsString],
        environment: Environment<'a>,
    ) -> Result<classify::Understood<'a>, Unknown> {
        classify::understand(self, base_name(name), argv, environment)
    }

    /// The command of that full name, parsed and checked now if it was not before.
    pub(crate) fn command(&self, name: &str) -> Option<&Command> {
        let entry = self.commands.get(name)?;
        entry
            .compiled
            .get_or_init(|| self.compile(name, entry, Depth::Trusted).map(Arc::new))
            .as_deref()
    }

    fn compile(&self, name: &str, entry: &Entry, depth: Depth) -> Option<Command> {
        let mut faults = Faults::default();
        let command = compile::command(
            entry.file.command(name)?,
            &|other| self.node(other),
            depth,
            &mut faults,
        );
        command.filter(|_| faults.is_empty())
    }

    fn node(&self, name: &str) -> Option<Node> {
        self.commands.get(name)?.file.command(name).cloned()
    }

    /// Puts the files of one directory over what is there, and returns all their faults.
    fn add_directory(&mut self, directory: &Path) -> Vec<Diagnostic> {
        let paths = match annotation_files(directory) {
            Ok(paths) => paths,
            Err(error) => return vec![unreadable(directory, &error)],
        };
        let mut diagnostics = Vec::new();
        let mut read: Vec<(PathBuf, String, Node)> = Vec::new();
        for path in paths {
            match read_file(&path) {
                Ok((text, node)) => read.push((path, text, node)),
                Err(diagnostic) => diagnostics.push(diagnostic),
            }
        }
        // Aliases may lead to any file of the directory, so all are known before one is checked.
        let mut with_all = self.clone();
        for (_, text, node) in &read {
            with_all.add_file(text, node);
        }
        let mut owners: BTreeMap<String, PathBuf> = BTreeMap::new();
        for (path, text, mut node) in read {
            document::locate(&mut node, &text);
            let faults = check_file(&path, &node, &|name| with_all.node(name), &mut owners);
            if faults.is_empty() {
                self.add_file(&text, &node);
            }
            diagnostics.extend(faults);
        }
        diagnostics
    }

    fn add_file(&mut self, text: &str, node: &Node) {
        let file = Arc::new(File::new(Cow::Owned(text.to_owned())));
        let commands = Arc::make_mut(&mut self.commands);
        // What was compiled may be an alias of what is replaced now.
        commands.values_mut().for_each(|entry| entry.compiled = OnceLock::new());
        for (key, _) in entries(node) {
            commands.insert(key.text().unwrap_or_default().to_owned(), Entry::new(&file));
        }
    }
}

/// Every fault of every annotation file in `directory`, by file and place.
#[must_use]
pub fn check(directory: &Path) -> Vec<Diagnostic> {
    let mut diagnostics = Library::builtin().add_directory(directory);
    diagnostics.sort();
    diagnostics
}

/// Every fault of one annotation file, given as text. Aliases may lead to the files that ship with
/// posh.
#[must_use]
pub fn check_text(file: &Path, text: &str) -> Vec<Diagnostic> {
    let mut node = match parse(file, text) {
        Ok(node) => node,
        Err(diagnostic) => return vec![diagnostic],
    };
    document::locate(&mut node, text);
    let mut with_it = Library::builtin();
    with_it.add_file(text, &node);
    check_file(file, &node, &|name| with_it.node(name), &mut BTreeMap::new())
}

/// Checks a whole file. `owners` says which file of the directory defined a command before.
fn check_file(
    path: &Path,
    node: &Node,
    lookup: compile::Lookup<'_>,
    owners: &mut BTreeMap<String, PathBuf>,
) -> Vec<Diagnostic> {
    let mut faults = Faults::default();
    if !matches!(node.content, Content::Map(_)) {
        faults.add(
            node.place,
            format!(
                "an annotation file is a mapping from commands to annotations, not {}",
                node.kind()
            ),
        );
    }
    for (key, value) in entries(node) {
        let name = key.text().unwrap_or_default();
        if name.is_empty() || name.split(' ').any(|word| word.is_empty() || word.contains('/')) {
            faults.add(
                key.place,
                "a command's name is one or more words with single spaces between, without a directory",
            );
            continue;
        }
        match owners.insert(name.to_owned(), path.to_owned()) {
            Some(other) if other == path => faults.add(key.place, format!("{name} is given twice")),
            Some(other) => {
                faults.add(key.place, format!("{name} is also defined in {}", other.display()))
            }
            None => {}
        }
        compile::command(value, lookup, Depth::Full, &mut faults);
    }
    faults.into_diagnostics(path)
}

impl Entry {
    fn new(file: &Arc<File>) -> Self {
        Self { file: Arc::clone(file), compiled: OnceLock::new() }
    }
}

impl File {
    fn new(text: Cow<'static, str>) -> Self {
        Self { text, commands: OnceLock::new() }
    }

    fn command(&self, name: &str) -> Option<&Node> {
        let commands = self.commands.get_or_init(|| {
            let node = document::read(&self.text).ok();
            let entries = node.map(|node| entries(&node).to_vec()).unwrap_or_default();
            entries
                .into_iter()
                .filter_map(|(key, value)| Some((key.text()?.to_owned(), value)))
                .collect()
        });
        commands.get(name)
    }
}

fn entries(node: &Node) -> &[(Node, Node)] {
    match &node.content {
        Content::Map(entries) => entries,
        _ => &[],
    }
}

/// The last component of a command's path.
fn base_name(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

/// The annotation files of a directory, sorted.
fn annotation_files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let paths = fs::read_dir(directory)?.map(|entry| Ok(entry?.path()));
    let mut paths = paths.collect::<io::Result<Vec<PathBuf>>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "yaml"));
    paths.sort();
    Ok(paths)
}

/// Invariant: nothing but a regular file is opened, and no more than [`MAX_FILE_BYTES`] of it are
/// read: whoever made the directory may have put a FIFO, a device or an endless file there.
fn read_file(path: &Path) -> Result<(String, Node), Diagnostic> {
    let mut text = String::new();
    let file = trusted_path::open_regular(path);
    let read = file.and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text));
    match read {
        Err(error) => return Err(unreadable(path, &error)),
        Ok(length) if length as u64 > MAX_FILE_BYTES => {
            return Err(unreadable(
                path,
                &io::Error::other("larger than 1 MiB, which no annotation file is"),
            ));
        }
        Ok(_) => {}
    }
    let node = parse(path, &text)?;
    Ok((text, node))
}

fn parse(path: &Path, text: &str) -> Result<Node, Diagnostic> {
    document::read(text).map_err(|fault| {
        let Place { line, column } = fault.place;
        Diagnostic { file: path.to_owned(), line, column, message: fault.message }
    })
}

fn unreadable(path: &Path, error: &io::Error) -> Diagnostic {
    Diagnostic {
        file: path.to_owned(),
        line: 0,
        column: 0,
        message: format!("cannot read it: {error}"),
    }
}
