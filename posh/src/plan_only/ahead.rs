//! What a shell will list: the directories of the patterns in a text's first two
//! commands. On a slow mount a shell lists them one after the other, a few round trips
//! each; somebody who knows them can list them all at once, before the shell asks. The first commands themselves, as far as they consist of
//! plain programs with words that are certain: they can be begun. And what all its commands name, for volumes, which
//! are told what changes.
//!
//! Before the first command nothing has run, so that whoever lists a directory now sees what the shell would
//! see. Before the second one only the first has, for the gateway to judge what it may change. Else, and before any later one, anything
//! may have changed.

use std::{
    collections::HashSet,
    ffi::OsString,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use brush_parser::ast::{
    Command as Parsed, CommandPrefixOrSuffixItem as Item, CompoundCommand, CompoundListItem, IoFileRedirectKind,
    IoFileRedirectTarget, IoRedirect, Program, SeparatorOperator, SimpleCommand,
};

use super::{
    Stage,
    reader::{assigned_names, changed_by, command_words, parse},
    words::{self, Scope, Unknowable},
};

/// Lines that are looked at for what is touched: a script that begins with more than that is not read for it.
const LINES: usize = 48;
/// The same for the first commands themselves.
const FIRST_LINES: usize = 12;
/// What is looked at in all, in bytes.
pub const BYTES: usize = 4096;
/// Directories at most: a shell that lists more has other worries.
const DIRECTORIES: usize = 64;
/// Paths that commands name, at most, and commands.
const NAMED: usize = 64;

/// Builtins that change nothing a word of the next command depends on, but for the variables they name.
const HARMLESS: [&str; 6] = [":", "export", "readonly", "set", "true", "umask"];
/// All builtins that a first command may come after.
pub(super) const PASSED_OVER: [&str; 7] = ["cd", ":", "export", "readonly", "set", "true", "umask"];

/// Builtins after which later commands may not run, or not as they are written: those of its own text, of a trap, or none.
/// With `set` that is so for most of its options.
const ENDING: [&str; 16] = [
    ".", "alias", "builtin", "command", "enable", "eval", "exec", "exit", "kill", "logout", "return", "shopt",
    "source", "suspend", "trap", "ulimit",
];
/// Options of `set` with which commands run as without them, one letter each; `-o` names one. Without patterns (`-f`) a
/// listing is of no use, and what is begun has other words and is given up.
const SET_LETTERS: &str = "eEfuvx";
/// The same by name, and `pipefail`.
const SET_NAMES: [&str; 6] = ["errexit", "errtrace", "nounset", "verbose", "xtrace", "pipefail"];

/// What a text begins with. Directories are absolute, each once.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Ahead {
    /// Directories that the first command that does something lists.
    pub(super) first: Vec<PathBuf>,
    /// Directories that the next one lists, unless the first one changes them; only where that one is certain.
    pub(super) second: Vec<PathBuf>,
    /// The first commands, as far as they are certain, and each runs when the one before has ended, whatever came of that.
    pub(super) commands: Vec<Command>,
}

/// A command of which all is certain, but for what patterns become.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Command {
    /// In order.
    pub(super) stages: Vec<Stage>,
    /// Its working directory.
    pub(super) cwd: PathBuf,
}

/// Paths that may be of interest, absolute, each once.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Touched {
    /// Words and redirections: files, directories, new names, and words that are no paths.
    pub(super) named: Vec<PathBuf>,
    /// Directories of patterns.
    pub(super) listed: Vec<PathBuf>,
    /// Commands whose words are certain, but for what patterns become, each with its directory.
    pub(super) commands: Vec<(PathBuf, Stage)>,
}

/// What a text's first commands are and list. `variable` gives exported values. Nothing is
/// touched, and a text that can't be read has none.
pub(super) fn listed(text: &str, cwd: &Path, variable: &dyn Fn(&str) -> Option<OsString>) -> Ahead {
    let mut ahead = Ahead::default();
    let Some(program) = beginning(text, FIRST_LINES) else { return ahead };
    let mut reader = Reader { cwd: cwd.to_owned(), assigned: HashSet::new(), variable };
    let (mut count, mut is_straight) = (0, true);
    for CompoundListItem(list, separator) in program.complete_commands.iter().flat_map(|list| &list.0) {
        for (index, (_, pipeline)) in list.iter().enumerate() {
            let pipeline = pipeline.seq.as_slice();
            if reader.ends_certainty(pipeline) {
                return ahead;
            }
            if reader.is_harmless(pipeline) {
                continue;
            }
            match count {
                0 => ahead.first = reader.listed(pipeline),
                1 => ahead.second = reader.listed(pipeline),
                _ => {}
            }
            count += 1;
            let stages = reader.stages(pipeline).filter(|_| is_straight);
            is_straight = stages.is_some();
            ahead.commands.extend(stages.map(|stages| Command { stages, cwd: reader.cwd.clone() }));
            // Others of the same list may not run, or not after it.
            is_straight &= index == list.additional.len() && matches!(separator, SeparatorOperator::Sequence);
            if ahead.commands.is_empty() || count > 1 && !is_straight {
                return ahead;
            }
        }
    }
    ahead
}

/// As many of the first lines, without those of comments, as can be read.
fn beginning(text: &str, lines: usize) -> Option<Program> {
    let mut end = 0;
    let ends = text.split_inclusive('\n').filter_map(|line| {
        end += line.len();
        let is_code = !line.trim_start().is_empty() && !line.trim_start().starts_with('#');
        // Before its last line a command is another one.
        let goes_on = line.trim_end_matches('\n').ends_with('\\');
        (is_code && end <= BYTES).then_some((end, goes_on))
    });
    let ends: Vec<(usize, bool)> = ends.take(lines).collect();
    // An unfinished command can't be read.
    ends.into_iter().rev().find_map(|(end, goes_on)| if goes_on { None } else { parse(&text[..end]).ok() })
}

/// All of a text, unless there may be more of it.
pub(super) fn whole(text: &str) -> Option<Program> {
    let is_all = text.len() < BYTES && text.lines().count() <= LINES;
    is_all.then(|| parse(text).ok()).flatten()
}

/// What the commands of a text's beginning touch, up to where nobody can tell in which directory they run.
pub(super) fn touched(text: &str, cwd: &Path, variable: &dyn Fn(&str) -> Option<OsString>) -> Touched {
    let Some(program) = beginning(text, LINES) else { return Touched::default() };
    let mut reader = Reader { cwd: cwd.to_owned(), assigned: HashSet::new(), variable };
    let mut touched = Touched::default();
    let lists = program.complete_commands.iter().flat_map(|list| &list.0);
    for pipeline in lists.flat_map(|item| item.0.iter().map(|(_, pipeline)| pipeline.seq.as_slice())) {
        touched.named.extend(reader.named(pipeline));
        touched.commands.extend(reader.commands(pipeline));
        touched.listed.extend(reader.listed(pipeline));
        if reader.ends_certainty(pipeline) || !reader.is_harmless(pipeline) && reader.goes_elsewhere(pipeline) {
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
    fn listed(&self, pipeline: &[Parsed]) -> Vec<PathBuf> {
        let words = pipeline.iter().flat_map(|command| match command {
            Parsed::Simple(command) => command_words(command).chain(redirected(command)).collect(),
            Parsed::Compound(CompoundCommand::ForClause(clause), _) if pipeline.len() == 1 => {
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
    fn named(&self, pipeline: &[Parsed]) -> Vec<PathBuf> {
        let words = pipeline.iter().flat_map(|command| match command {
            Parsed::Simple(command) => {
                let name = command.word_or_name.iter().map(|name| name.value.as_str());
                let words = command_words(command).skip(name.count());
                words.chain(redirected(command)).collect()
            }
            _ => Vec::new(),
        });
        let names = words.filter_map(|word| self.with_scope(|scope| words::unlisted(word, scope)));
        let names = names.flat_map(|(names, _)| names);
        let is_path = |name: &OsString| {
            let first = name.as_bytes().first();
            first.is_some_and(|first| *first != b'-') && !name.as_bytes().iter().any(|byte| b"*?[".contains(byte))
        };
        names.filter(is_path).map(|name| self.cwd.join(name)).collect()
    }

    /// Its commands, as far as their words are certain.
    fn commands(&self, pipeline: &[Parsed]) -> Vec<(PathBuf, Stage)> {
        let stages = pipeline.iter().filter_map(|command| match command {
            Parsed::Simple(command) => self.stage(command),
            _ => None,
        });
        stages.map(|stage| (self.cwd.clone(), stage)).collect()
    }

    /// Whether the commands after it run in a directory that is not known.
    fn goes_elsewhere(&self, pipeline: &[Parsed]) -> bool {
        match pipeline {
            [Parsed::Simple(command)] => command_words(command)
                .next()
                .is_some_and(|name| ["cd", "pushd", "popd", "exit", "exec"].contains(&name)),
            [_] => true,
            _ => false,
        }
    }

    /// The stages of a pipeline of which all words are certain, but for what patterns become; `None` where it is
    /// anything else. Also none where the text has named a variable before: who reads it is not known here.
    fn stages(&self, pipeline: &[Parsed]) -> Option<Vec<Stage>> {
        let stage = |command: &Parsed| match command {
            Parsed::Simple(command) => self.stage(command),
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
                Item::Word(word) => {
                    let (words, has_pattern) = expand(&word.value)?;
                    stage.has_pattern |= has_pattern;
                    stage.argv.extend(words);
                }
                Item::IoRedirect(IoRedirect::File(fd, kind, IoFileRedirectTarget::Filename(word))) => {
                    let (words, has_pattern) = expand(&word.value)?;
                    stage.has_pattern |= has_pattern;
                    let [file] = <[OsString; 1]>::try_from(words).ok()?;
                    use IoFileRedirectKind::{Append, Clobber, Read, Write};
                    stage.appends |= matches!(kind, Append);
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

    /// Whether a command may have its shell run nothing of what follows, or something else.
    fn ends_certainty(&self, pipeline: &[Parsed]) -> bool {
        let [Parsed::Simple(command)] = pipeline else { return false };
        // As the shell has its words, else as they are written.
        let words: Vec<String> = match self.stage(command) {
            Some(stage) => stage.argv.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
            None => command_words(command).map(|word| word.replace(['\'', '"', '\\'], "")).collect(),
        };
        match words.split_first() {
            Some((name, options)) if name == "set" => !are_plain_options(options),
            Some((name, _)) => ENDING.contains(&name.as_str()),
            None => false,
        }
    }

    /// Assignments, options of the shell, a change of directory.
    fn is_harmless(&mut self, pipeline: &[Parsed]) -> bool {
        let [Parsed::Simple(command)] = pipeline else { return false };
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

/// Whether `set` with these words leaves commands to run as without it; its operands, behind the options, do.
fn are_plain_options(words: &[String]) -> bool {
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let letters = match word.strip_prefix(['-', '+']) {
            Some("" | "-") => return true,
            Some(letters) => letters,
            None => return !word.contains(['$', '`']),
        };
        let are_known = letters.chars().all(|letter| letter == 'o' || SET_LETTERS.contains(letter));
        let mut names = letters.chars().filter(|letter| *letter == 'o');
        if !are_known || !names.all(|_| words.next().is_some_and(|name| SET_NAMES.contains(&name.as_str()))) {
            return false;
        }
    }
    true
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

    fn variable(name: &str) -> Option<OsString> {
        match name {
            "S1" => Some(OsString::from("/mnt/s1")),
            "S2" => Some(OsString::from("/mnt/s2")),
            _ => None,
        }
    }

    fn ahead(text: &str) -> Ahead {
        listed(text, Path::new("/cwd"), &variable)
    }

    fn touched_by(text: &str) -> Touched {
        touched(text, Path::new("/cwd"), &variable)
    }

    fn words_of(command: &Command) -> String {
        let text_of = |word: &OsString| word.to_str().unwrap().to_owned();
        let stage = |stage: &Stage| {
            let mut words: Vec<String> = stage.argv.iter().map(text_of).collect();
            words.extend(stage.stdin.iter().map(|file| format!("<{}", text_of(file))));
            let sign = if stage.appends { ">>" } else { ">" };
            words.extend(stage.stdout.iter().map(|file| format!("{sign}{}", text_of(file))));
            words.extend(stage.has_pattern.then(|| "(a pattern)".to_owned()));
            words.join(" ")
        };
        command.stages.iter().map(stage).collect::<Vec<_>>().join(" | ")
    }

    fn check(text: &str, expected: &[&str]) {
        assert_eq!(ahead(text).first, expected.iter().map(PathBuf::from).collect::<Vec<_>>(), "{text}");
    }

    /// The second command's directories, and the first one's words with `<in` and `>out`.
    fn check_second(text: &str, expected: Option<(&str, &str)>) {
        let ahead = ahead(text);
        let listed: Vec<_> = ahead.second.iter().map(|directory| directory.to_str().unwrap()).collect();
        let found = (!listed.is_empty()).then(|| (listed.join(" "), words_of(&ahead.commands[0])));
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
        check_second("cd $S1 && sort < f >> g; set -e; cat a/* b/*", Some(("/mnt/s1/a/ /mnt/s1/b/", "sort <f >>g")));
        check_second("cat $S1/{a,b} || for f in $S2/*; do rm $f; done", Some(("/mnt/s2/", "cat /mnt/s1/a /mnt/s1/b")));
        check_second("cat $S1/a/* | wc\ncat $S2/*", Some(("/mnt/s2/", "cat /mnt/s1/a/* (a pattern) | wc")));
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
    fn first_commands_that_are_certain() {
        let check = |text: &str, expected: &str| {
            let ahead = ahead(text);
            let line = |command: &Command| format!("{}: {}", command.cwd.display(), words_of(command));
            assert_eq!(ahead.commands.iter().map(line).collect::<Vec<_>>().join("; "), expected, "{text}");
        };
        check("cat $S1/f", "/cwd: cat /mnt/s1/f");
        check(
            "# of f\nset -e\ncd $S1; grep '[x]' f |\n wc -l >> n\ncd a\nmake; cat < n",
            "/mnt/s1: grep [x] f | wc -l >>n; /mnt/s1/a: make; /mnt/s1/a: cat <n",
        );
        check("cat $S1/*.c > n; cat n; cat $1; cat f", "/cwd: cat /mnt/s1/*.c >n (a pattern); /cwd: cat n");
        check("cat f || cat g; cat h", "/cwd: cat f");
        check("cd $S1 && cat f; cat g", "/mnt/s1: cat f; /mnt/s1: cat g");
        check("cat f & cat g", "/cwd: cat f");
        check("cat f; for x in a; do cat g; done; cat h", "/cwd: cat f");
        check("cat f; X=1; cat g", "/cwd: cat f");
        check("cat f \\\n  g\ncat h \\", "/cwd: cat f g");
        check(&"cat f\n".repeat(40), &["/cwd: cat f"; FIRST_LINES].join("; "));
        for text in ["cat $1", "make $(ls)\ncat $S1/f", "X=1 cat f", "if true; then cat $S1/f; fi", "cat '"] {
            check(text, "");
        }
    }

    #[test]
    fn nothing_is_begun_after_what_may_end_or_change_the_shell() {
        let ending = [
            "set -n",
            "set -o noexec",
            "set -eo noexec",
            "set -e -n",
            "set -xn",
            "set -euo pipefail -o noexec",
            "set -t",
            "set -k",
            "set -o",
            "set -o posix",
            "set $X",
            "set \"-n\"",
            "'set' -n",
            "\\set -n",
            "s\"et\" -n",
            "set -n 2>&1",
            "X=1 set -n",
            "set -n < f",
            "true && set -n",
            "ulimit -t 0",
            "ulimit -v 1 2>&1",
            "exit",
            "return",
            "exec cat g",
            "kill -9 $$",
            "trap 'exit' DEBUG",
            "alias cat=rm",
            ". ./f",
            "eval exit",
            "enable -n cat",
        ];
        for ending in ending {
            let found = ahead(&format!("{ending}; cat $S1/f; cat $S2/*"));
            assert_eq!(found, Ahead::default(), "{ending}");
            let found = ahead(&format!("cat g\n{ending}\ncat $S1/f"));
            assert_eq!(found.commands.iter().map(words_of).collect::<Vec<_>>(), ["cat g"], "{ending}");
            let touched = touched_by(&format!("{ending}; cat $S1/f; cat $S2/*"));
            let is_below = |path: &PathBuf| path.starts_with("/mnt");
            assert!(!touched.named.iter().chain(&touched.listed).any(is_below), "{ending}: {touched:?}");
        }
        for plain in
            ["set -e", "set -euo pipefail", "set +e -x", "set -o errexit", "set -- -n a", "set - -n", "set a -n"]
        {
            let found = ahead(&format!("{plain}; cat $S1/f"));
            assert_eq!(found.commands.iter().map(words_of).collect::<Vec<_>>(), ["cat /mnt/s1/f"], "{plain}");
        }
    }

    #[test]
    fn all_that_is_named_up_to_an_unknown_directory() {
        let check = |text: &str, named: &str, listed: &str| {
            let touched = touched_by(text);
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
            let found: Vec<String> = touched_by(text).commands.iter().map(command).collect();
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
        check(&format!("{}cat $S1/*", "true\n".repeat(FIRST_LINES)), &[]);
    }
}
