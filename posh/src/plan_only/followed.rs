//! After which of a text's commands its shell does nothing before it executes the next one: opens no file, lists no
//! directory, writes nothing. What a mount is to be told of such a command it can be told while the next one runs.
//!
//! Only a text that is known to its end says that, and only where nothing of it can make the shell do something else in between
//! (a trap, a function, a substitution). A command ends well, or something else follows.

use std::{
    collections::{BTreeSet, HashSet},
    ffi::OsString,
};

use brush_parser::ast::{
    AndOr, AndOrList, Command as Parsed, CommandPrefixOrSuffixItem as Item, CompoundCommand, CompoundList,
    IoFileRedirectKind, IoFileRedirectTarget, IoRedirect, Pipeline, Program, SeparatorOperator, SimpleCommand,
};

use super::reader::{assigned_names, changed_by, command_words};

/// Words after which a shell may do anything at any time, or executes programs without being their parent.
const OPAQUE: [&str; 13] =
    [".", "alias", "builtin", "command", "coproc", "enable", "eval", "exec", "fc", "hash", "shopt", "source", "trap"];

/// Variables that change what a shell does between two commands, or which programs it finds.
const MEANINGFUL: [&str; 5] = ["BASH_ENV", "ENV", "IFS", "PATH", "PS4"];

/// Variables to which a shell gives values by itself, and beginnings of their names (bash(1)).
const CHANGING: [&str; 22] = [
    "BASH",
    "COLUMNS",
    "COMP_",
    "DIRSTACK",
    "EPOCH",
    "EUID",
    "FUNCNAME",
    "GROUPS",
    "HIST",
    "LINENO",
    "LINES",
    "MAPFILE",
    "OLDPWD",
    "OPT",
    "PIPESTATUS",
    "PPID",
    "PWD",
    "RANDOM",
    "REPLY",
    "SECONDS",
    "SHLVL",
    "SRANDOM",
];

/// What the text has as words, of bash's and dash's builtins and keywords.
const BUILTINS: [&str; 61] = [
    ".",
    ":",
    "[",
    "[[",
    "alias",
    "bg",
    "bind",
    "break",
    "builtin",
    "caller",
    "case",
    "cd",
    "chdir",
    "command",
    "compgen",
    "complete",
    "compopt",
    "continue",
    "declare",
    "dirs",
    "disown",
    "echo",
    "enable",
    "eval",
    "exec",
    "exit",
    "export",
    "false",
    "fc",
    "fg",
    "getopts",
    "hash",
    "help",
    "history",
    "jobs",
    "kill",
    "let",
    "local",
    "logout",
    "mapfile",
    "popd",
    "printf",
    "pushd",
    "pwd",
    "read",
    "readarray",
    "readonly",
    "return",
    "set",
    "shift",
    "shopt",
    "source",
    "suspend",
    "test",
    "times",
    "trap",
    "true",
    "type",
    "ulimit",
    "umask",
    "wait",
];

/// Builtins and keywords that are not among the others.
const MORE_BUILTINS: [&str; 5] = ["typeset", "unalias", "unset", "time", "select"];

/// A command, and what follows it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Followed {
    /// Its words; `None`: one that is not known.
    pub(super) words: Vec<Option<String>>,
    /// It may have any words at all.
    pub(super) is_open: bool,
    /// The programs that the shell may go on to, each without doing anything before; none: it may do something.
    pub(super) next: BTreeSet<String>,
}

/// What a shell executes next; `None`: it may do something else before.
type Next = Option<BTreeSet<String>>;

/// All commands of a text, if at least one is followed. `variable` gives exported values.
pub(super) fn followed(text: &str, program: &Program, variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<Followed> {
    let substitutes = ["`", "$(", "$[", "<(", ">(", "${ ", "${|", "@P"].into_iter().any(|sign| text.contains(sign));
    if substitutes {
        return Vec::new();
    }
    // What a text sets anywhere, it may have set before.
    let is_given = |name: &str| name != "_" && name != "UID" && !CHANGING.iter().any(|other| name.starts_with(other));
    let plain = |name: &str| {
        variable(name)
            .filter(|_| is_given(name))?
            .into_string()
            .ok()
            .filter(|value| is_plain(value) && is_read_only(text, name))
    };
    let mut reader = Reader {
        found: Vec::new(),
        functions: HashSet::new(),
        is_opaque: false,
        is_strict: text.contains("set "),
        plain: &plain,
    };
    let mut after: Next = None;
    for list in program.complete_commands.iter().rev() {
        after = reader.list(list, &after);
    }
    let Reader { mut found, functions, is_opaque, .. } = reader;
    let is_program = |name: &String| !functions.contains(name);
    for command in &mut found {
        if !command.next.iter().all(is_program) {
            command.next.clear();
        }
    }
    if is_opaque || found.iter().all(|command| command.next.is_empty()) { Vec::new() } else { found }
}

struct Reader<'a> {
    found: Vec<Followed>,
    functions: HashSet<String>,
    is_opaque: bool,
    /// A variable without a value may end the shell.
    is_strict: bool,
    /// Values of variables that are one plain word.
    plain: &'a dyn Fn(&str) -> Option<String>,
}

impl Reader<'_> {
    /// What a list begins with, given what comes after it.
    fn list(&mut self, list: &CompoundList, after: &Next) -> Next {
        let mut next = after.clone();
        for item in list.0.iter().rev() {
            next = match item.1 {
                SeparatorOperator::Sequence => self.and_or(&item.0, &next),
                SeparatorOperator::Async => {
                    self.and_or(&item.0, &None);
                    None
                }
            };
        }
        next
    }

    fn and_or(&mut self, list: &AndOrList, after: &Next) -> Next {
        // After one that ended well, what follows an `||` does not run.
        let mut next = after.clone();
        for part in list.additional.iter().rev() {
            match part {
                AndOr::And(pipeline) => next = self.pipeline(pipeline, &next),
                AndOr::Or(pipeline) => drop(self.pipeline(pipeline, &next)),
            }
        }
        self.pipeline(&list.first, &next)
    }

    fn pipeline(&mut self, pipeline: &Pipeline, after: &Next) -> Next {
        let after = if pipeline.bang || pipeline.timed.is_some() { &None } else { after };
        let first = match pipeline.seq.as_slice() {
            [command] => self.command(command, after),
            stages => {
                // All are executed by processes of their own, at once.
                let all: Vec<Next> = stages.iter().map(|stage| self.command(stage, &None)).collect();
                let is_plain = stages.iter().all(|stage| matches!(stage, Parsed::Simple(_)));
                let names: Option<Vec<_>> = all.into_iter().collect();
                names.filter(|_| is_plain).map(|names| names.into_iter().flatten().collect())
            }
        };
        first.filter(|_| pipeline.timed.is_none())
    }

    fn command(&mut self, command: &Parsed, after: &Next) -> Next {
        match command {
            Parsed::Simple(command) => self.simple(command, after),
            Parsed::Function(definition) => {
                self.functions.insert(definition.fname.value.clone());
                self.compound(&definition.body.0, &None);
                after.clone()
            }
            Parsed::ExtendedTest(..) => None,
            Parsed::Compound(compound, redirects) if redirects.as_ref().is_some_and(|all| !all.0.is_empty()) => {
                self.compound(compound, &None);
                None
            }
            Parsed::Compound(compound, _) => self.compound(compound, after),
        }
    }

    fn compound(&mut self, command: &CompoundCommand, after: &Next) -> Next {
        match command {
            CompoundCommand::BraceGroup(group) => self.list(&group.list, after),
            CompoundCommand::ForClause(clause) => {
                let body = self.repeated(&clause.body.list, after);
                let mut values = clause.values.iter().flatten();
                body.filter(|_| clause.values.is_some() && values.all(|word| self.touches_nothing(&word.value)))
            }
            CompoundCommand::IfClause(clause) => {
                for part in clause.elses.iter().flatten() {
                    let body = self.list(&part.body, after);
                    part.condition.iter().for_each(|condition| drop(self.list(condition, &body)));
                }
                let then = self.list(&clause.then, after);
                self.list(&clause.condition, &then)
            }
            CompoundCommand::WhileClause(clause) => {
                let condition = self.tried(&clause.0, after);
                let body = self.list(&clause.1.list, &condition);
                self.list(&clause.0, &body)
            }
            CompoundCommand::UntilClause(clause) => {
                let condition = self.list(&clause.0, after);
                self.list(&clause.1.list, &condition);
                condition
            }
            CompoundCommand::Subshell(shell) => {
                self.list(&shell.list, &None);
                None
            }
            CompoundCommand::CaseClause(clause) => {
                clause.cases.iter().filter_map(|case| case.cmd.as_ref()).for_each(|list| drop(self.list(list, &None)));
                None
            }
            CompoundCommand::Arithmetic(_) => None,
            _ => {
                self.is_opaque = true;
                None
            }
        }
    }

    /// What a loop's body begins with or, where there is nothing to loop over, what comes after it.
    fn repeated(&mut self, body: &CompoundList, after: &Next) -> Next {
        let again = self.tried(body, after);
        let next = again.zip(after.clone()).map(|(again, after)| again.union(&after).cloned().collect());
        let first = self.list(body, &next);
        first.zip(after.clone()).map(|(first, after)| first.union(&after).cloned().collect())
    }

    /// What a list begins with, if that does not depend on what comes after it.
    fn tried(&self, list: &CompoundList, _: &Next) -> Next {
        let (found, functions, is_opaque) = (Vec::new(), HashSet::new(), false);
        Reader { found, functions, is_opaque, ..*self }.list(list, &None)
    }

    fn simple(&mut self, command: &SimpleCommand, after: &Next) -> Next {
        let words: Vec<&str> = command_words(command).collect();
        let assigned = assigned_names(command).into_iter().chain(changed_by(command));
        self.is_opaque |= assigned.into_iter().any(|name| MEANINGFUL.contains(&name.as_str()));
        self.is_opaque |= words.first().is_some_and(|name| OPAQUE.contains(name));
        let Some(name) = &command.word_or_name else { return None };
        let known: Vec<Option<Option<String>>> = words.iter().map(|word| known(&self.filled(word))).collect();
        let is_open = known.iter().any(Option::is_none);
        let next = after.clone().unwrap_or_default();
        // What the shell does itself is no process that ends.
        if !is_builtin(&name.value) {
            self.found.push(Followed { words: known.into_iter().flatten().collect(), is_open, next });
        }
        let items =
            [&command.prefix.as_ref().map(|prefix| &prefix.0), &command.suffix.as_ref().map(|suffix| &suffix.0)];
        let goes_straight = items.into_iter().flatten().flat_map(|items| items.iter()).all(|item| match item {
            Item::Word(word) => self.touches_nothing(&word.value),
            Item::IoRedirect(IoRedirect::File(_, kind, target)) => is_of_nothing(kind, target),
            _ => false,
        });
        (goes_straight && is_program(&name.value)).then(|| BTreeSet::from([name.value.clone()]))
    }

    /// A word with the values of variables in it that are plain.
    fn filled(&self, word: &str) -> String {
        let (mut filled, mut rest) = (String::new(), word);
        while let Some((before, after)) = rest.split_once('$') {
            filled += before;
            let is_of_name = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
            let (name, length) = match after.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
                Some((name, _)) => (name, name.len() + 2),
                None => {
                    let length = after.bytes().take_while(|byte| is_of_name(byte)).count();
                    (&after[..length], length)
                }
            };
            // In single quotes, or behind a backslash, it is no variable.
            let may_be_one = !word.contains(['\'', '\\']) && name.bytes().all(|byte| is_of_name(&byte));
            match (self.plain)(name).filter(|_| may_be_one && !name.is_empty()) {
                Some(value) => filled += &value,
                None => filled.extend(["$", &after[..length]]),
            }
            rest = &after[length..];
        }
        filled + rest
    }

    /// Whether a word is expanded without looking at any file, and without failing.
    fn touches_nothing(&self, word: &str) -> bool {
        let word = &self.filled(word)[..];
        let mut bytes = word.bytes();
        let (mut is_quoted, mut is_first) = (false, true);
        while let Some(byte) = bytes.next() {
            match byte {
                b'\'' if !is_quoted => is_quoted = !bytes.by_ref().any(|byte| byte == b'\''),
                b'"' => is_quoted = !is_quoted,
                b'\\' => drop(bytes.next()),
                b'$' if !is_quoted || self.is_strict => return false,
                b'~' if is_first => return false,
                b'*' | b'?' | b'[' | b'!' | b'@' | b'+' if !is_quoted && is_pattern(byte, word) => return false,
                _ => {}
            }
            is_first = false;
        }
        !(is_quoted || word.contains("${") && word.contains('?'))
    }
}

/// A word that is the same however often it is expanded.
fn is_plain(value: &str) -> bool {
    !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/._-".contains(&byte))
}

/// Whether a variable's name stands nowhere in a text but behind a `$`.
fn is_read_only(text: &str, name: &str) -> bool {
    let is_of_name = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    text.match_indices(name).all(|(at, _)| {
        let (before, after) = (&text.as_bytes()[..at], &text.as_bytes()[at + name.len()..]);
        let is_other = before.last().is_some_and(is_of_name) || after.first().is_some_and(is_of_name);
        is_other || before.ends_with(b"$") || before.ends_with(b"${") && after.starts_with(b"}")
    })
}

/// Whether a sign in a word, outside of quotes, may stand for names of files.
fn is_pattern(sign: u8, word: &str) -> bool {
    match sign {
        b'*' | b'?' | b'[' => true,
        // Of extended patterns.
        _ => word.contains('('),
    }
}

fn is_program(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._+-".contains(&byte);
    !name.is_empty() && name.bytes().all(is_plain) && !is_builtin(name)
}

fn is_builtin(name: &str) -> bool {
    BUILTINS.contains(&name) || MORE_BUILTINS.contains(&name)
}

/// A redirection that opens nothing on any mount.
fn is_of_nothing(kind: &IoFileRedirectKind, target: &IoFileRedirectTarget) -> bool {
    match target {
        IoFileRedirectTarget::Filename(word) => word.value == "/dev/null",
        IoFileRedirectTarget::Duplicate(word) => {
            matches!(kind, IoFileRedirectKind::DuplicateOutput | IoFileRedirectKind::DuplicateInput)
                && word.value.bytes().all(|byte| byte.is_ascii_digit())
        }
        IoFileRedirectTarget::Fd(_) => true,
        IoFileRedirectTarget::ProcessSubstitution(..) => false,
    }
}

/// One word as the command gets it: certain, or one that nobody knows; `None` where it may become any number of words.
#[expect(clippy::option_option, reason = "how many words and which are two questions")]
fn known(word: &str) -> Option<Option<String>> {
    let (mut text, mut is_certain, mut is_quoted) = (String::new(), true, false);
    let mut signs = word.chars();
    while let Some(sign) = signs.next() {
        match sign {
            '\'' if !is_quoted => text.extend(signs.by_ref().take_while(|sign| *sign != '\'')),
            '"' => is_quoted = !is_quoted,
            '\\' => {
                is_certain &= !is_quoted;
                text.extend(signs.next());
            }
            '$' if is_quoted => is_certain = false,
            other if is_quoted => text.push(other),
            '$' | '*' | '?' | '[' | '{' => return None,
            '~' | '(' => is_certain = false,
            other => text.push(other),
        }
    }
    // "$@" and the like.
    let is_list = !is_certain && word.contains('@');
    (!is_list).then(|| is_certain.then_some(text))
}

#[cfg(test)]
mod tests {
    use super::{super::reader::parse, *};

    fn of(text: &str) -> String {
        let variable = |name: &str| match name {
            "D" | "PWD" => Some(OsString::from("/mnt/s1")),
            "G" => Some(OsString::from("*.c")),
            _ => None,
        };
        let found = followed(text, &parse(text).unwrap(), &variable);
        let mut lines: Vec<String> = Vec::new();
        for Followed { words, is_open, next } in found.into_iter().filter(|command| !command.next.is_empty()) {
            let words: Vec<String> = words.into_iter().map(|word| word.unwrap_or("_".to_owned())).collect();
            let next: Vec<String> = next.into_iter().collect();
            lines.push(format!("{}{}: {}", words.join(" "), if is_open { " ..." } else { "" }, next.join(" ")));
        }
        lines.sort();
        lines.join("; ")
    }

    #[test]
    fn what_goes_straight_on() {
        for (text, expected) in [
            ("git add .; git commit -m 'a b'", "git add .: git"),
            ("git add . && git status", "git add .: git"),
            ("git add . || exit; git status >&2 2> /dev/null", "git add .: git"),
            ("git add . || echo no && git status", "git add .: git"),
            ("git add \"$1\"\ngit commit -m \"${x##*/}\"\n", "git add _: git"),
            ("git add $x; cat f | sort | wc -l", "git add ...: cat sort wc"),
            ("sort -o $D/f f; cat ${D}/f \"$D\"", "sort -o /mnt/s1/f f: cat"),
            ("if git add .; then git commit; fi; ls", "git add .: git; git commit: ls"),
            ("{ git add .; sort -o f f; }; git log", "git add .: sort; sort -o f f: git"),
            ("while sort -o f f; do sort -o g g; done", "sort -o f f: sort; sort -o g g: sort"),
            (
                "cd $S1 || exit\nfor p in ../*.patch; do\n git apply \"$p\" || exit\n git status\ndone\ngit log",
                "git apply _: git; git status: git",
            ),
            ("for x in a b; do sort -o \"$x\" f; done; ls", "sort -o _ f: ls sort"),
            ("sort -o f f; for x in a; do cat f; done; ls", "cat f: cat ls; sort -o f f: cat ls"),
            ("f() { git add .; }; git add .; sort f", "git add .: sort"),
        ] {
            assert_eq!(of(text), expected, "{text}");
        }
    }

    #[test]
    fn the_workflow_with_git() {
        let text = include_str!("../../../integration/workloads/git.sh");
        assert_eq!(of(text), "git add .: git; git apply _: git; git commit -m _: git; git status: git");
    }

    #[test]
    fn what_may_do_something_before() {
        for text in [
            "git add .",
            "git add .; echo done",
            "git add .; [ -f x ]; git commit",
            "git add .; test -f x",
            "git add .; cat *.c",
            "git add .; cat $x",
            "git add .; cat ~/f",
            "git add .; cat $G",
            "git add .; cat $PWD",
            "git add .; cat $D*",
            "git add .; D=*; cat $D",
            "git add .; read D < f; cat $D",
            "git add .; cat ${D:=*}",
            "git add .; cat $D $x",
            "for D in a; do git add .; cat $D; done",
            "git add .; cat f > out",
            "git add .; cat < f",
            "git add .; X=1 cat f",
            "git add .; X=1",
            "git add .; ./x",
            "git add .; $x f",
            "git add . & cat f",
            "(git add .); cat f",
            "for x in a; do sort -o $x f; done",
            "git add . | cat; cat f",
            "! git add .; cat f",
            "time git add .; cat f",
            "git add .; time cat f",
            "git add . || cat f",
            "until git add .; do :; done; echo",
            "git add .; for x in *; do cat f; done",
            "git add .; while read x; do cat f; done < f",
            "for x in a; do git add .; done",
            "git add .; if [[ -f x ]]; then cat f; fi",
            "git add .; case x in *) cat f;; esac",
            "git add .; (cat f)",
            "git add .; cat <<E\nx\nE",
            "cat() { :; }; git add .; cat f",
            "git add .; cat f; eval x",
            "git add .; cat f; trap 'ls' EXIT",
            "git add .; cat f; . ./x",
            "git add .; cat f; x=$(ls)",
            "git add .; cat f; PATH=/x",
            "git add .; cat f; export PATH=/x",
            "git add .; cat \"${x:?}\"",
            "set -u; git add .; cat \"$x\"",
        ] {
            assert_eq!(of(text), "", "{text}");
        }
    }
}
