//! What a shell will list before it runs anything: the directories of the patterns
//! in a text's first command. On a slow mount a shell lists them one after the
//! other, a few round trips each; somebody who knows them can list them all at once.
//!
//! Of the first command only: nothing has run before it, so that whoever lists a directory
//! now sees what the shell would see. Before a later one, anything may have changed.

use std::{
    collections::HashSet,
    ffi::OsString,
    path::{Path, PathBuf},
};

use brush_parser::ast::{Command, CommandPrefixOrSuffixItem as Item, CompoundCommand, SimpleCommand};

use super::{
    reader::{assigned_names, changed_by, command_words, parse},
    words::{self, Scope, Unknowable},
};

/// Lines that are looked at: a script that begins with more than that is not read for it.
const LINES: usize = 24;
/// The same in bytes.
pub const BYTES: usize = 4096;
/// Directories at most: a shell that lists more has other worries.
const DIRECTORIES: usize = 64;

/// Builtins that change nothing a word of the next command depends on, but for the variables they name.
const HARMLESS: [&str; 6] = [":", "export", "readonly", "set", "true", "umask"];

/// The directories, absolute, each once. `variable` gives exported values. Nothing is
/// touched, and a text that can't be read has none.
#[must_use]
pub fn listed_at_once(text: &str, cwd: &Path, variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut end = 0;
    for line in text.split_inclusive('\n').take(LINES) {
        end += line.len();
        let is_code = !line.trim_start().is_empty() && !line.trim_start().starts_with('#');
        let goes_on = line.trim_end_matches('\n').ends_with('\\');
        if end > BYTES || goes_on || !is_code {
            continue;
        }
        // An unfinished command can't be read.
        let Ok(program) = parse(&text[..end]) else { continue };
        let mut first = First { cwd: cwd.to_owned(), assigned: HashSet::new(), variable, found: Vec::new() };
        let lists = program.complete_commands.iter().flat_map(|list| &list.0);
        let mut pipelines = lists.flat_map(|item| item.0.iter().map(|(_, pipeline)| pipeline));
        if pipelines.any(|pipeline| !first.take(&pipeline.seq)) {
            let mut seen = HashSet::new();
            first.found.retain(|directory| seen.insert(directory.clone()));
            first.found.truncate(DIRECTORIES);
            return first.found;
        }
    }
    Vec::new()
}

/// What is known on the way to the first command.
struct First<'a> {
    cwd: PathBuf,
    assigned: HashSet<String>,
    variable: &'a dyn Fn(&str) -> Option<OsString>,
    found: Vec<PathBuf>,
}

impl First<'_> {
    /// Whether the command after this one is still the first that does something.
    fn take(&mut self, pipeline: &[Command]) -> bool {
        if let [Command::Simple(command)] = pipeline
            && self.is_harmless(command)
        {
            return true;
        }
        for command in pipeline {
            match command {
                Command::Simple(command) => self.words(command_words(command).chain(redirected(command))),
                Command::Compound(CompoundCommand::ForClause(clause), _) if pipeline.len() == 1 => {
                    self.words(clause.values.iter().flatten().map(|word| word.value.as_str()));
                }
                _ => {}
            }
        }
        false
    }

    /// Assignments, options of the shell, a change of directory.
    fn is_harmless(&mut self, command: &SimpleCommand) -> bool {
        let words: Vec<&str> = command_words(command).collect();
        if words.iter().any(|word| word.contains(['`', '$']) && word.contains(['`', '('])) {
            return false;
        }
        self.assigned.extend(assigned_names(command));
        self.assigned.extend(changed_by(command));
        match words.as_slice() {
            [] => redirected(command).next().is_none() && !runs_something(command),
            ["cd", directory] => match self.expanded(directory).as_deref() {
                Some([one]) => {
                    self.cwd.push(one);
                    true
                }
                _ => false,
            },
            [name, ..] => HARMLESS.contains(name) && redirected(command).next().is_none(),
        }
    }

    fn words<'w>(&mut self, words: impl Iterator<Item = &'w str>) {
        for word in words.filter(|word| word.contains(['*', '?', '['])) {
            let listed = self.with_scope(|scope| words::listed(word, &self.cwd, scope));
            self.found.extend(listed);
        }
    }

    /// A word without patterns.
    fn expanded(&self, word: &str) -> Option<Vec<OsString>> {
        let plain = !word.contains(['*', '?', '[', '-']);
        plain.then(|| self.with_scope(|scope| words::expand(word, scope).ok())).flatten()
    }

    fn with_scope<T>(&self, work: impl FnOnce(&Scope<'_>) -> T) -> T {
        let variable = |name: &str| {
            let value = (self.variable)(name).filter(|_| !self.assigned.contains(name));
            let value = value.and_then(|value| value.into_string().ok());
            value.ok_or_else(|| Unknowable::new(format!("${name} is known only when it runs")))
        };
        work(&Scope { cwd: Some(&self.cwd), variable: &variable })
    }
}

/// The files of its redirections.
fn redirected(command: &SimpleCommand) -> impl Iterator<Item = &str> {
    use brush_parser::ast::{IoFileRedirectTarget, IoRedirect};
    let prefix = command.prefix.iter().flat_map(|prefix| &prefix.0);
    let suffix = command.suffix.iter().flat_map(|suffix| &suffix.0);
    prefix.chain(suffix).filter_map(|item| match item {
        Item::IoRedirect(IoRedirect::File(_, _, IoFileRedirectTarget::Filename(word))) => Some(word.value.as_str()),
        _ => None,
    })
}

/// An assignment with the output of a command.
fn runs_something(command: &SimpleCommand) -> bool {
    let prefix = command.prefix.iter().flat_map(|prefix| &prefix.0);
    prefix.into_iter().any(|item| match item {
        Item::AssignmentWord(_, word) => word.value.contains(['`', '(']),
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &[&str]) {
        let variable = |name: &str| match name {
            "S1" => Some(OsString::from("/mnt/s1")),
            "S2" => Some(OsString::from("/mnt/s2")),
            _ => None,
        };
        let found = listed_at_once(text, Path::new("/cwd"), &variable);
        assert_eq!(found, expected.iter().map(PathBuf::from).collect::<Vec<_>>(), "{text}");
    }

    #[test]
    fn the_first_command_s_patterns() {
        check(r#"cat "$S1"/logs/*.csv "$S2"/logs/*.csv | grep x"#, &["/mnt/s1/logs/", "/mnt/s2/logs/"]);
        check("cat $S1/a/*.x $S1/a/*.y", &["/mnt/s1/a/"]);
        check("# a comment\n\ncat \\\n  $S1/*/b |\n  wc > out", &["/mnt/s1/"]);
        check("for f in $S1/*; do rm $f; done; ls $S2/*", &["/mnt/s1/"]);
        check("cat *.log", &["/cwd/"]);
        check("cat {$S1,/x}/*", &["/mnt/s1/", "/x/"]);
        check("cat a | grep '[x]'", &[]);
    }

    #[test]
    fn what_comes_before_it_and_changes_nothing() {
        check("set -e\nD=$S1/logs\ncd $S2/sub && cat *.csv", &["/mnt/s2/sub/"]);
        check("D=$S1/logs\ncat $D/*", &[]);
        check("export S1=/x; cat $S1/* $S2/*", &["/mnt/s2/"]);
    }

    #[test]
    fn later_commands_are_left_alone() {
        check("make\ncat $S1/*", &[]);
        check("rm $S1/a; cat $S1/*", &[]);
        check("D=$(mktemp); cat $S1/*", &[]);
        check("> $S1/new; cat $S1/*", &[]);
        check("{ cat $S1/*; }", &[]);
        check("cat $S1/* $(ls)", &["/mnt/s1/"]);
        check("cat '", &[]);
        check(&format!("{}cat $S1/*", "\n".repeat(LINES)), &[]);
    }
}
