//! What a shell will list: the directories of the patterns in a text's first two
//! commands. On a slow mount a shell lists them one after the other, a few round trips
//! each; somebody who knows them can list them all at once, before the shell asks. And what all its commands name, for volumes, which
//! are told what changes.
//!
//! Before the first command nothing has run, so that whoever lists a directory now sees what the shell would
//! see. Before the second one only the first has: it is told with it, word by word, as far as it consists of
//! plain programs with words that are certain, for the gateway to judge what it may change. Else, and before any later one, anything
//! may have changed.

use std::{
    collections::HashSet,
    ffi::OsString,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use brush_parser::ast::{
    Command, CommandPrefixOrSuffixItem as Item, CompoundCommand, IoFileRedirectKind, IoFileRedirectTarget, IoRedirect,
    SimpleCommand,
};

use super::{
    Stage,
    reader::{assigned_names, changed_by, command_words, parse},
    words::{self, Scope, Unknowable},
};

/// Lines that are looked at: a script that begins with more than that is not read for it.
const LINES: usize = 48;
/// The same in bytes.
pub const BYTES: usize = 4096;
/// Directories at most: a shell that lists more has other worries.
const DIRECTORIES: usize = 64;
/// Paths that commands name, at most, and commands.
const NAMED: usize = 64;

/// Builtins that change nothing a word of the next command depends on, but for the variables they name.
const HARMLESS: [&str; 6] = [":", "export", "readonly", "set", "true", "umask"];

/// Directories that will be listed: absolute, each once.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Ahead {
    /// By the first command that does something.
    pub first: Vec<PathBuf>,
    /// By the next one, and what the first one is.
    pub second: Option<Second>,
    /// What commands of the text's beginning name or list, whatever else they do.
    pub touched: Touched,
}

/// Paths that may be of interest, absolute, each once.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Words and redirections: files, directories, new names, and words that are no paths.
    pub named: Vec<PathBuf>,
    /// Directories of patterns.
    pub listed: Vec<PathBuf>,
    /// Commands whose words are certain, but for what patterns become, each with its directory.
    pub commands: Vec<(PathBuf, Stage)>,
}

/// What a second command lists, unless the first one changes it.
#[derive(Debug, PartialEq, Eq)]
pub struct Second {
    /// The directories.
    pub listed: Vec<PathBuf>,
    /// The first command's stages.
    pub before: Vec<Stage>,
    /// Its working directory.
    pub cwd: PathBuf,
}

/// What a text's first commands list. `variable` gives exported values. Nothing is
/// touched, and a text that can't be read has none.
#[must_use]
pub fn listed_ahead(text: &str, cwd: &Path, variable: &dyn Fn(&str) -> Option<OsString>) -> Ahead {
    let mut ahead = Ahead { touched: touched(text, cwd, variable), ..Ahead::default() };
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
        let mut reader = Reader { cwd: cwd.to_owned(), assigned: HashSet::new(), variable };
        let lists = program.complete_commands.iter().flat_map(|list| &list.0);
        let mut pipelines = lists.flat_map(|item| item.0.iter().map(|(_, pipeline)| pipeline.seq.as_slice()));
        let Some(first) = pipelines.find(|pipeline| !reader.is_harmless(pipeline)) else { continue };
        ahead.first = reader.listed(first);
        let Some(before) = reader.stages(first) else { return ahead };
        let then = reader.cwd.clone();
        if let Some(second) = pipelines.find(|pipeline| !reader.is_harmless(pipeline)) {
            let listed = reader.listed(second);
            ahead.second = (!listed.is_empty()).then_some(Second { listed, before, cwd: then });
            return ahead;
        }
    }
    ahead
}

/// What the commands of a text's beginning touch, up to where nobody can tell in which directory they run.
fn touched(text: &str, cwd: &Path, variable: &dyn Fn(&str) -> Option<OsString>) -> Touched {
    let ends = text.split_inclusive('\n').take(LINES).scan(0, |end, line| {
        *end += line.len();
        Some(*end)
    });
    let ends: Vec<usize> = ends.filter(|end| *end <= BYTES).collect();
    // An unfinished command can't be read.
    let Some(program) = ends.iter().rev().find_map(|end| parse(&text[..*end]).ok()) else { return Touched::default() };
    let mut reader = Reader { cwd: cwd.to_owned(), assigned: HashSet::new(), variable };
    let mut touched = Touched::default();
    let lists = program.complete_commands.iter().flat_map(|list| &list.0);
    for pipeline in lists.flat_map(|item| item.0.iter().map(|(_, pipeline)| pipeline.seq.as_slice())) {
        touched.named.extend(reader.named(pipeline));
        touched.commands.extend(reader.commands(pipeline));
        touched.listed.extend(reader.listed(pipeline));
        if !reader.is_harmless(pipeline) && reader.goes_elsewhere(pipeline) {
            break;
        }
    }
    let once = |paths: &mut Vec<PathBuf>, most| {
        let mut seen = HashSet::new();
        paths.retain(|path| seen.insert(path.clone()));
        paths.truncate(most);
    };
    once(&mut touched.named, NAMED);
    once(&mut touched.listed, DIRECTORIES);
    touched.commands.truncate(NAMED);
    touched
}

/// What is known on the way through a text.
struct Reader<'a> {
    cwd: PathBuf,
    assigned: HashSet<String>,
    variable: &'a dyn Fn(&str) -> Option<OsString>,
}

impl Reader<'_> {
    /// The directories of a pipeline's patterns.
    fn listed(&self, pipeline: &[Command]) -> Vec<PathBuf> {
        let words = pipeline.iter().flat_map(|command| match command {
            Command::Simple(command) => command_words(command).chain(redirected(command)).collect(),
            Command::Compound(CompoundCommand::ForClause(clause), _) if pipeline.len() == 1 => {
                clause.values.iter().flatten().map(|word| word.value.as_str()).collect()
            }
            _ => Vec::new(),
        });
        let patterns = words.filter(|word| word.contains(['*', '?', '[']));
        let listed = patterns.flat_map(|word| self.with_scope(|scope| words::listed(word, &self.cwd, scope)));
        let mut seen = HashSet::new();
        listed.filter(|directory| seen.insert(directory.clone())).take(DIRECTORIES).collect()
    }

    /// What a pipeline's words may name: those that are certain and neither options nor patterns, after the commands' names.
    fn named(&self, pipeline: &[Command]) -> Vec<PathBuf> {
        let words = pipeline.iter().flat_map(|command| match command {
            Command::Simple(command) => {
                let name = command.word_or_name.iter().map(|name| name.value.as_str());
                let words = command_words(command).skip(name.count());
                words.chain(redirected(command)).collect()
            }
            _ => Vec::new(),
        });
        let names = words.filter_map(|word| self.with_scope(|scope| words::unlisted(word, scope))).flatten();
        let is_path = |name: &OsString| {
            let first = name.as_bytes().first();
            first.is_some_and(|first| *first != b'-') && !name.as_bytes().iter().any(|byte| b"*?[".contains(byte))
        };
        names.filter(is_path).map(|name| self.cwd.join(name)).collect()
    }

    /// Its commands, as far as their words are certain.
    fn commands(&self, pipeline: &[Command]) -> Vec<(PathBuf, Stage)> {
        let stages = pipeline.iter().filter_map(|command| match command {
            Command::Simple(command) => self.stage(command),
            _ => None,
        });
        stages.map(|stage| (self.cwd.clone(), stage)).collect()
    }

    /// Whether the commands after it run in a directory that is not known.
    fn goes_elsewhere(&self, pipeline: &[Command]) -> bool {
        match pipeline {
            [Command::Simple(command)] => command_words(command)
                .next()
                .is_some_and(|name| ["cd", "pushd", "popd", "exit", "exec"].contains(&name)),
            [_] => true,
            _ => false,
        }
    }

    /// The stages of a pipeline of which all words are certain, but for what patterns become; `None` where it is
    /// anything else. Also none where the text has named a variable before: who reads it is not known here.
    fn stages(&self, pipeline: &[Command]) -> Option<Vec<Stage>> {
        let stage = |command: &Command| match command {
            Command::Simple(command) => self.stage(command),
            _ => None,
        };
        self.assigned.is_empty().then(|| pipeline.iter().map(stage).collect()).flatten()
    }

    fn stage(&self, command: &SimpleCommand) -> Option<Stage> {
        let mut stage = Stage::default();
        let expand = |word: &str| self.with_scope(|scope| words::unlisted(word, scope));
        let name = command.word_or_name.iter().map(|word| Item::Word(word.clone()));
        let prefix = command.prefix.iter().flat_map(|prefix| prefix.0.iter().cloned());
        let suffix = command.suffix.iter().flat_map(|suffix| suffix.0.iter().cloned());
        for item in prefix.chain(name).chain(suffix) {
            match item {
                Item::Word(word) => stage.argv.extend(expand(&word.value)?),
                Item::IoRedirect(IoRedirect::File(fd, kind, IoFileRedirectTarget::Filename(word))) => {
                    let [file] = <[OsString; 1]>::try_from(expand(&word.value)?).ok()?;
                    use IoFileRedirectKind::{Append, Clobber, Read, Write};
                    let place = match (fd, kind) {
                        (None | Some(0), Read) => &mut stage.stdin,
                        (None | Some(1), Write | Append | Clobber) => &mut stage.stdout,
                        _ => return None,
                    };
                    if place.replace(file).is_some() {
                        return None;
                    }
                }
                _ => return None,
            }
        }
        (!stage.argv.is_empty()).then_some(stage)
    }

    /// Assignments, options of the shell, a change of directory.
    fn is_harmless(&mut self, pipeline: &[Command]) -> bool {
        let [Command::Simple(command)] = pipeline else { return false };
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

    fn ahead(text: &str) -> Ahead {
        let variable = |name: &str| match name {
            "S1" => Some(OsString::from("/mnt/s1")),
            "S2" => Some(OsString::from("/mnt/s2")),
            _ => None,
        };
        listed_ahead(text, Path::new("/cwd"), &variable)
    }

    fn check(text: &str, expected: &[&str]) {
        assert_eq!(ahead(text).first, expected.iter().map(PathBuf::from).collect::<Vec<_>>(), "{text}");
    }

    /// The second command's directories, and the first one's words with `<in` and `>out`.
    fn check_second(text: &str, expected: Option<(&str, &str)>) {
        let text_of = |word: &OsString| word.to_str().unwrap().to_owned();
        let stage = |stage: &Stage| {
            let mut words: Vec<String> = stage.argv.iter().map(text_of).collect();
            words.extend(stage.stdin.iter().map(|file| format!("<{}", text_of(file))));
            words.extend(stage.stdout.iter().map(|file| format!(">{}", text_of(file))));
            words.join(" ")
        };
        let found = ahead(text).second.map(|second| {
            let listed: Vec<_> = second.listed.iter().map(|directory| directory.to_str().unwrap()).collect();
            (listed.join(" "), second.before.iter().map(stage).collect::<Vec<_>>().join(" | "))
        });
        assert_eq!(found.as_ref().map(|(listed, before)| (listed.as_str(), before.as_str())), expected, "{text}");
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
    fn the_second_command_s_patterns_and_what_comes_before() {
        check_second(
            "cat \"$S1/f\" | wc > $S1/out\ncat $S1/a/*",
            Some(("/mnt/s1/a/", "cat /mnt/s1/f | wc >/mnt/s1/out")),
        );
        check_second("cd $S1 && sort < f >> g; set -e; cat a/* b/*", Some(("/mnt/s1/a/ /mnt/s1/b/", "sort <f >g")));
        check_second("cat $S1/{a,b} || for f in $S2/*; do rm $f; done", Some(("/mnt/s2/", "cat /mnt/s1/a /mnt/s1/b")));
        check_second("cat $S1/a/* | wc\ncat $S2/*", Some(("/mnt/s2/", "cat /mnt/s1/a/* | wc")));
        check_second("cat f\ncat g\ncat $S1/*", None);
        check_second("cat f\ncat g", None);
    }

    #[test]
    fn a_first_command_that_is_not_certain_leaves_the_second_alone() {
        for first in [
            "cat $1",
            "cat $(ls)",
            "cat <(ls)",
            "X=1 cat f",
            "cat *",
            "cat -*",
            "cat f 2> err",
            "cat f 2>&1",
            "cat <<< x",
            "cat f > a > b",
            "{ cat f; }",
            "(cat f)",
            "f() { :; }",
            "[[ -e f ]]",
            "X=1; cat f",
            "export PATH; cat f",
            "while read x; do :; done",
            "cat f | while read x; do :; done",
            "> f",
        ] {
            check_second(&format!("{first}\ncat $S2/*"), None);
        }
    }

    #[test]
    fn all_that_is_named_up_to_an_unknown_directory() {
        let check = |text: &str, named: &str, listed: &str| {
            let touched = ahead(text).touched;
            let joined = |paths: &[PathBuf]| {
                let paths: Vec<&str> = paths.iter().map(|path| path.to_str().unwrap()).collect();
                paths.join(" ")
            };
            assert_eq!(
                (joined(&touched.named), joined(&touched.listed)),
                (named.to_owned(), listed.to_owned()),
                "{text}"
            );
        };
        check(
            "cat $S1/f-0 | grep -v x > $S1/out\nrm -r $S2/d; cat $S2/a/*",
            "/mnt/s1/f-0 /cwd/x /mnt/s1/out /mnt/s2/d",
            "/mnt/s2/a/",
        );
        check("mkdir $S1/t\ncd $S1/t && tar -x -f ../t.tar", "/mnt/s1/t /mnt/s1/t/../t.tar", "");
        check("sort < f >> g; cd $1; cat h", "/cwd/f /cwd/g", "");
        check("for f in $S1/*; do cat $f; done; cat g", "", "/mnt/s1/");
        check("D=/x\ncat $D/f $(ls) {a,b}", "/cwd/a /cwd/b", "");
        check("cat a\ncat '", "/cwd/a", "");
    }

    #[test]
    fn commands_that_are_certain() {
        let check = |text: &str, expected: &str| {
            let command = |(cwd, stage): &(PathBuf, Stage)| {
                let words = stage.argv.iter().chain(&stage.stdin).map(|word| word.to_str().unwrap());
                words.fold(format!("{}:", cwd.display()), |text, word| format!("{text} {word}"))
            };
            let found: Vec<String> = ahead(text).touched.commands.iter().map(command).collect();
            assert_eq!(found.join("; "), expected, "{text}");
        };
        check(
            "cd $S1\ncat f | sort -u | wc -l > out",
            "/cwd: cd /mnt/s1; /mnt/s1: cat f; /mnt/s1: sort -u; /mnt/s1: wc -l",
        );
        check("wc < f && ls; true || head -n 1 a/*.c", "/cwd: wc f; /cwd: ls; /cwd: true; /cwd: head -n 1 a/*.c");
        check("cat $1; cat $(ls); grep x f 2> err; cat f", "/cwd: cat f");
        check("cat f; cd $1; cat g", "/cwd: cat f");
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
