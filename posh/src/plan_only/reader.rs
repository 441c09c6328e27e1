//! Finds the pipelines of a text: parses it with brush-parser and walks it in order of execution,
//! while it tracks variables, functions and the working directory as far as the text determines
//! them. Includes pipelines inside loops, functions' callers and substitutions: each is placed by
//! itself when it runs.

use std::{
    collections::HashSet,
    ffi::{OsStr, OsString},
    path::PathBuf,
};

use brush_parser::{
    ParseError, TokenizerError,
    ast::{
        AndOr, AndOrList, Command, CommandPrefixOrSuffixItem as Item, CompoundCommand,
        CompoundList, IoFileRedirectKind, IoFileRedirectTarget, IoRedirect,
        Pipeline as ParsedPipeline, Program, SeparatorOperator, SimpleCommand, SourceLocation as _,
    },
    parse_tokens, tokenize_str_with_options,
};

use super::{
    PredictedPipeline, PredictedStage, Surroundings,
    nesting::is_parsable,
    words::{self, ExpansionScope, Unknowable},
};
use crate::Error;

/// Limit of nested substitutions; deeper ones are ignored.
const DEPTH: usize = 16;

/// Builtins that assign the variables that they name.
const ASSIGNING: [&str; 10] = [
    "declare",
    "export",
    "getopts",
    "local",
    "mapfile",
    "read",
    "readarray",
    "readonly",
    "typeset",
    "unset",
];

/// Builtins after which nothing is known.
const OPAQUE: [&str; 3] = [".", "eval", "source"];

/// The pipelines of `text`, in the order of their commands.
pub(super) fn read(
    text: &str,
    surroundings: &Surroundings<'_>,
) -> Result<Vec<PredictedPipeline>, Error> {
    let program = parse(text).map_err(|fault| Error::Parse(fault.to_string()))?;
    let mut reader =
        ScriptReader { surroundings, text: text.to_owned(), found: Vec::new(), depth: 0 };
    let mut shell = ShellChanges::new(surroundings.cwd.clone());
    for list in &program.complete_commands {
        reader.list(list, &mut shell);
    }
    Ok(reader.found)
}

/// Reason why a text is no shell program.
#[derive(Debug, thiserror::Error)]
pub(super) enum SyntaxFault {
    #[error("it is nested too deep")]
    NestedTooDeep,
    #[error(transparent)]
    Tokens(#[from] TokenizerError),
    #[error(transparent)]
    Grammar(#[from] ParseError),
}

pub(super) fn parse(text: &str) -> Result<Program, SyntaxFault> {
    if !is_parsable(text) {
        return Err(SyntaxFault::NestedTooDeep);
    }
    let options = words::options();
    let tokens = tokenize_str_with_options(text, &options.tokenizer_options())?;
    Ok(parse_tokens(&tokens, &options)?)
}

/// Changes that the text has made to the shell so far.
#[derive(Clone, PartialEq, Eq)]
struct ShellChanges {
    cwd: Option<PathBuf>,
    assigned: HashSet<String>,
    functions: HashSet<String>,
    /// A function, `eval` or `source` has run: any variable may have changed.
    opaque: bool,
}

impl ShellChanges {
    fn new(cwd: PathBuf) -> Self {
        Self { cwd: Some(cwd), assigned: HashSet::new(), functions: HashSet::new(), opaque: false }
    }

    /// Merges with the state after a part that may have run any number of times.
    fn join(&mut self, maybe: Self) {
        if self.cwd != maybe.cwd {
            self.cwd = None;
        }
        self.assigned.extend(maybe.assigned);
        self.functions.extend(maybe.functions);
        self.opaque |= maybe.opaque;
    }

    /// A variable's value, unless the text may have changed it.
    fn variable(&self, name: &str, surroundings: &Surroundings<'_>) -> Result<String, Unknowable> {
        if self.opaque || self.assigned.contains(name) {
            return Err(Unknowable::new(format!("${name} gets its value only when it runs")));
        }
        let value = (surroundings.variable)(name);
        let value =
            value.ok_or_else(|| Unknowable::new(format!("${name} has no exported value")))?;
        value
            .into_string()
            .map_err(|_| Unknowable::new(format!("the value of ${name} is not UTF-8")))
    }
}

struct ScriptReader<'a> {
    surroundings: &'a Surroundings<'a>,
    /// Text to which the current commands' positions refer.
    text: String,
    found: Vec<PredictedPipeline>,
    depth: usize,
}

impl ScriptReader<'_> {
    fn list(&mut self, list: &CompoundList, shell: &mut ShellChanges) {
        for item in &list.0 {
            match item.1 {
                SeparatorOperator::Sequence => self.and_or(&item.0, shell),
                // A background command runs in a subshell.
                SeparatorOperator::Async => self.and_or(&item.0, &mut shell.clone()),
            }
        }
    }

    fn and_or(&mut self, list: &AndOrList, shell: &mut ShellChanges) {
        self.pipeline(&list.first, shell);
        for next in &list.additional {
            match next {
                // It runs only after a success of the previous one, whose changes hold then.
                AndOr::And(pipeline) => self.pipeline(pipeline, shell),
                AndOr::Or(pipeline) => {
                    self.maybe(shell, |reader, shell| reader.pipeline(pipeline, shell))
                }
            }
        }
    }

    /// Visits a part that may run any number of times.
    fn maybe(&mut self, shell: &mut ShellChanges, part: impl FnOnce(&mut Self, &mut ShellChanges)) {
        let mut after = shell.clone();
        part(self, &mut after);
        shell.join(after);
    }

    fn pipeline(&mut self, pipeline: &ParsedPipeline, shell: &mut ShellChanges) {
        if let [Command::Simple(command)] = pipeline.seq.as_slice() {
            self.simple_pipeline(command, shell);
            return;
        }
        // The only command of a pipeline runs in the shell itself, several in subshells.
        let alone = pipeline.seq.len() == 1;
        if !alone {
            let stages = pipeline.seq.iter().map(|command| self.stage(command, shell)).collect();
            let texts: Vec<String> =
                pipeline.seq.iter().map(|command| one_line(command, &self.text)).collect();
            self.found.push(PredictedPipeline {
                text: texts.join(" | "),
                cwd: shell.cwd.clone(),
                stages,
            });
        }
        for command in &pipeline.seq {
            match alone {
                true => self.inside(command, shell),
                false => self.inside(command, &mut shell.clone()),
            }
        }
    }

    fn simple_pipeline(&mut self, command: &SimpleCommand, shell: &mut ShellChanges) {
        if command.word_or_name.is_some() {
            let stage = self.simple_stage(command, shell);
            let text = one_line(&Command::Simple(command.clone()), &self.text);
            self.found.push(PredictedPipeline {
                text,
                cwd: shell.cwd.clone(),
                stages: vec![stage],
            });
        }
        self.substitutions(command, shell);
        self.effect(command, shell);
    }

    /// Visits the pipelines inside a command of any kind.
    fn inside(&mut self, command: &Command, shell: &mut ShellChanges) {
        match command {
            Command::Simple(command) => self.substitutions(command, shell),
            Command::Compound(compound, _) => self.compound(compound, shell),
            Command::Function(definition) => {
                shell.functions.insert(definition.fname.value.clone());
            }
            Command::ExtendedTest(..) => {}
        }
    }

    fn compound(&mut self, command: &CompoundCommand, shell: &mut ShellChanges) {
        match command {
            CompoundCommand::BraceGroup(group) => self.list(&group.list, shell),
            CompoundCommand::Subshell(subshell) => self.list(&subshell.list, &mut shell.clone()),
            CompoundCommand::Coprocess(coprocess) => {
                self.inside(&coprocess.body, &mut shell.clone())
            }
            CompoundCommand::ForClause(clause) => {
                shell.assigned.insert(clause.variable_name.clone());
                self.body(&clause.body.list, shell);
            }
            CompoundCommand::ArithmeticForClause(clause) => self.body(&clause.body.list, shell),
            CompoundCommand::WhileClause(clause) | CompoundCommand::UntilClause(clause) => {
                let changed = |list: &CompoundList| changes(list);
                shell.assigned.extend(changed(&clause.1.list));
                self.list(&clause.0, shell);
                self.body(&clause.1.list, shell);
            }
            CompoundCommand::IfClause(clause) => {
                self.list(&clause.condition, shell);
                self.maybe(shell, |reader, shell| reader.list(&clause.then, shell));
                for other in clause.elses.iter().flatten() {
                    self.maybe(shell, |reader, shell| {
                        if let Some(condition) = &other.condition {
                            reader.list(condition, shell);
                        }
                        reader.list(&other.body, shell);
                    });
                }
            }
            CompoundCommand::CaseClause(clause) => {
                for list in clause.cases.iter().filter_map(|case| case.cmd.as_ref()) {
                    self.maybe(shell, |reader, shell| reader.list(list, shell));
                }
            }
            CompoundCommand::Arithmetic(_) => {}
        }
    }

    /// Visits a loop's body: an iteration may see the assignments of the previous one.
    fn body(&mut self, list: &CompoundList, shell: &mut ShellChanges) {
        shell.assigned.extend(changes(list));
        self.maybe(shell, |reader, shell| reader.list(list, shell));
    }

    fn stage(&self, command: &Command, shell: &ShellChanges) -> PredictedStage {
        match command {
            Command::Simple(command) => self.simple_stage(command, shell),
            other => PredictedStage {
                argv: vec![OsString::from(one_line(other, &self.text))],
                unknowable: Some(
                    "the shell itself runs it; the commands inside are placed as they start"
                        .to_owned(),
                ),
                ..PredictedStage::default()
            },
        }
    }

    fn simple_stage(&self, command: &SimpleCommand, shell: &ShellChanges) -> PredictedStage {
        let mut stage = PredictedStage::default();
        let variable = |name: &str| shell.variable(name, self.surroundings);
        let scope = ExpansionScope { cwd: shell.cwd.as_deref(), variable: &variable };
        if let Err(Unknowable(sentence)) = fill(command, &scope, &mut stage) {
            let as_written = command_words(command).map(OsString::from);
            stage.argv = as_written.collect();
            stage.unknowable = Some(sentence);
        } else if let Some(name) = stage.argv.first().and_then(|name| name.to_str())
            && shell.functions.contains(name)
        {
            stage.unknowable =
                Some(format!("{name} is a function; its commands are placed as they start"));
        }
        stage
    }

    /// Visits the pipelines in `$(...)`, `<(...)` and `>(...)` of a command's words.
    fn substitutions(&mut self, command: &SimpleCommand, shell: &ShellChanges) {
        if self.depth == DEPTH {
            return;
        }
        self.depth += 1;
        for item in items(command) {
            if let Item::ProcessSubstitution(_, subshell)
            | Item::IoRedirect(IoRedirect::File(
                _,
                _,
                IoFileRedirectTarget::ProcessSubstitution(_, subshell),
            )) = item
            {
                self.list(&subshell.list, &mut shell.clone());
            }
        }
        let texts: Vec<String> = command_words(command).flat_map(words::substitutions).collect();
        for text in texts {
            // The shell will report the syntax error.
            let Ok(program) = parse(&text) else { continue };
            let outer = std::mem::replace(&mut self.text, text);
            for list in &program.complete_commands {
                self.list(list, &mut shell.clone());
            }
            self.text = outer;
        }
        self.depth -= 1;
    }

    /// Applies a command's changes to the shell that runs it.
    fn effect(&self, command: &SimpleCommand, shell: &mut ShellChanges) {
        if command.word_or_name.is_none() {
            shell.assigned.extend(assigned_names(command));
            return;
        }
        let stage = self.simple_stage(command, shell);
        let name = stage.argv.first().and_then(|name| name.to_str()).unwrap_or_default();
        if name == "cd" || name == "pushd" || name == "popd" {
            shell.cwd = moved(&stage, shell.cwd.as_ref());
        }
        shell.opaque |= OPAQUE.contains(&name) || shell.functions.contains(name);
        shell.assigned.extend(changed_by(command));
    }
}

/// Target of `cd DIR` when it is certain: one operand, an existing directory.
fn moved(stage: &PredictedStage, cwd: Option<&PathBuf>) -> Option<PathBuf> {
    let [command, directory] = stage.argv.as_slice() else { return None };
    let plain =
        command == OsStr::new("cd") && stage.unknowable.is_none() && directory != OsStr::new("-");
    Some(cwd?.join(directory)).filter(|target| plain && target.is_dir())
}

/// Expands a command's words and redirections into `stage`.
fn fill(
    command: &SimpleCommand,
    scope: &ExpansionScope<'_>,
    stage: &mut PredictedStage,
) -> Result<(), Unknowable> {
    if let Some(word) = &command.word_or_name {
        stage.argv = words::expand(&word.value, scope)?;
    }
    for item in prefix(command) {
        if let Item::IoRedirect(redirect) = item {
            redirection(redirect, scope, stage)?;
        }
    }
    for item in suffix(command) {
        match item {
            Item::Word(word) | Item::AssignmentWord(_, word) => {
                stage.argv.extend(words::expand(&word.value, scope)?)
            }
            Item::IoRedirect(redirect) => redirection(redirect, scope, stage)?,
            Item::ProcessSubstitution(..) => {
                return Err(Unknowable::new(
                    "which pipe a process substitution gives it is known only when it runs",
                ));
            }
        }
    }
    Ok(())
}

/// Redirections of stdin and stdout to files; other descriptors and here-documents do not matter
/// for a plan.
fn redirection(
    redirect: &IoRedirect,
    scope: &ExpansionScope<'_>,
    stage: &mut PredictedStage,
) -> Result<(), Unknowable> {
    match redirect {
        IoRedirect::File(fd, kind, IoFileRedirectTarget::Filename(word)) => {
            let file = Some(words::expand_one(&word.value, scope)?);
            let input = matches!(kind, IoFileRedirectKind::Read | IoFileRedirectKind::ReadAndWrite);
            match (fd, input) {
                (None | Some(0), true) => stage.stdin = file,
                (None | Some(1), false) => stage.stdout = file,
                _ => {}
            }
        }
        IoRedirect::OutputAndError(word, _) => {
            stage.stdout = Some(words::expand_one(&word.value, scope)?)
        }
        IoRedirect::File(..) | IoRedirect::HereDocument(..) | IoRedirect::HereString(..) => {}
    }
    Ok(())
}

fn prefix(command: &SimpleCommand) -> impl Iterator<Item = &Item> {
    command.prefix.iter().flat_map(|prefix| &prefix.0)
}

fn suffix(command: &SimpleCommand) -> impl Iterator<Item = &Item> {
    command.suffix.iter().flat_map(|suffix| &suffix.0)
}

fn items(command: &SimpleCommand) -> impl Iterator<Item = &Item> {
    prefix(command).chain(suffix(command))
}

/// A command's name and arguments as written.
pub(super) fn command_words(command: &SimpleCommand) -> impl Iterator<Item = &str> {
    let arguments = suffix(command).filter_map(|item| match item {
        Item::Word(word) | Item::AssignmentWord(_, word) => Some(word.value.as_str()),
        _ => None,
    });
    command.word_or_name.iter().map(|word| word.value.as_str()).chain(arguments)
}

/// Variables of `a=1 b=2` before, or instead of, a command.
pub(super) fn assigned_names(command: &SimpleCommand) -> Vec<String> {
    let name = |word: &str| word.split(['=', '+', '[']).next().unwrap_or_default().to_owned();
    let assigned = prefix(command).filter_map(|item| match item {
        Item::AssignmentWord(_, word) => Some(name(&word.value)),
        _ => None,
    });
    assigned.collect()
}

/// Variables that a builtin names as its operands.
pub(super) fn changed_by(command: &SimpleCommand) -> Vec<String> {
    let mut words = command_words(command);
    match words.next() {
        Some(name) if ASSIGNING.contains(&name) => words
            .filter(|word| !word.starts_with('-'))
            .map(|word| word.split(['=', '+']).next().unwrap_or(word).to_owned())
            .collect(),
        _ => Vec::new(),
    }
}

/// Variables that a list assigns on its own level.
fn changes(list: &CompoundList) -> Vec<String> {
    let pipelines = list.0.iter().flat_map(|item| item.0.iter().map(|(_, pipeline)| pipeline));
    let simple = pipelines.flat_map(|pipeline| &pipeline.seq).filter_map(|command| match command {
        Command::Simple(command) => Some(command),
        _ => None,
    });
    simple
        .flat_map(|command| match command.word_or_name {
            None => assigned_names(command),
            Some(_) => changed_by(command),
        })
        .collect()
}

/// A command of `text` on one line, for a heading: compound commands as written, simple ones as
/// parsed.
fn one_line(command: &Command, text: &str) -> String {
    let written = match command {
        Command::Compound(compound, _) => compound.location().map(|span| {
            let length = span.end.index.saturating_sub(span.start.index);
            text.chars().skip(span.start.index).take(length).collect()
        }),
        _ => None,
    };
    let whole: String = written.unwrap_or_else(|| command.to_string());
    whole.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Renders what was read: stages joined by `|`, `<in` and `>out`, `!` before
    /// what can't be known.
    fn render(pipeline: &PredictedPipeline) -> String {
        let stage = |stage: &PredictedStage| {
            let text = |word: &OsString| word.to_str().unwrap().to_owned();
            let mut words: Vec<String> = stage.argv.iter().map(text).collect();
            words.extend(stage.stdin.iter().map(|file| format!("<{}", text(file))));
            words.extend(stage.stdout.iter().map(|file| format!(">{}", text(file))));
            let mark = if stage.unknowable.is_some() { "!" } else { "" };
            format!("{mark}{}", words.join(" "))
        };
        let cwd = pipeline.cwd.as_ref().map_or("?".to_owned(), |cwd| cwd.display().to_string());
        let stages: Vec<String> = pipeline.stages.iter().map(stage).collect();
        if cwd == "/" { stages.join(" | ") } else { format!("[{cwd}] {}", stages.join(" | ")) }
    }

    fn check(text: &str, expected: &[&str]) {
        let variable = |name: &str| (name == "V").then(|| OsString::from("v"));
        let surroundings = Surroundings { cwd: PathBuf::from("/"), variable: &variable };
        let pipelines = read(text, &surroundings).unwrap();
        assert_eq!(pipelines.iter().map(render).collect::<Vec<_>>(), expected, "{text}");
    }

    #[test]
    fn lists_are_taken_apart() {
        check("cat a | grep -c x", &["cat a | grep -c x"]);
        check("a; b && c || d &", &["a", "b", "c", "d"]);
        check("a\nb | c", &["a", "b | c"]);
        check("time ! a x", &["a x"]);
        check("FOO=1 a $V", &["a v"]);
        check("# nothing", &[]);
    }

    #[test]
    fn redirections_of_stdin_and_stdout_are_kept() {
        check("sort <in >'o u'", &["sort <in >o u"]);
        check("sort 2>err >>$V 2>&1 0<in", &["sort <in >v"]);
        check("a &> both", &["a >both"]);
        check("< in cat | tee x > out", &["cat <in | tee x >out"]);
        check("cat <<E\nhello\nE\n", &["cat"]);
        check("cat <<< hello", &["cat"]);
    }

    #[test]
    fn what_the_text_changes_is_not_taken_from_the_environment() {
        check("V=1; cat $V", &["!cat $V"]);
        check("read V; cat $V", &["read V", "!cat $V"]);
        check("eval x; cat $V", &["eval x", "!cat $V"]);
        check("(V=1); cat $V", &["cat v"]);
        check("if a; then V=2; fi; cat $V", &["a", "!cat $V"]);
        check("f() { a; }; f x | b; cat $V", &["!f x | b", "cat v"]);
        check("f() { a; }; f; cat $V", &["!f", "!cat $V"]);
    }

    #[test]
    fn a_change_of_directory_is_followed() {
        check("cd /proc && cat x", &["cd /proc", "[/proc] cat x"]);
        check("cd /proc; cd self; cat x", &["cd /proc", "[/proc] cd self", "[/proc/self] cat x"]);
        check("cd $(pwd); cat x", &["!cd $(pwd)", "pwd", "[?] cat x"]);
        check("cd /proc | a; cat x", &["cd /proc | a", "cat x"]);
        check("a && { cd /proc; }; cat x", &["a", "cd /proc", "[/proc] cat x"]);
        check("a || cd /proc; cat x", &["a", "cd /proc", "[?] cat x"]);
        check("cd /nonexistent; cat x", &["cd /nonexistent", "[?] cat x"]);
    }

    #[test]
    fn pipelines_inside_others_are_found() {
        check("for f in a b; do cat $f | wc; done", &["!cat $f | wc"]);
        check("for f in a; do V=$f; cat x; done; cat $V", &["cat x", "!cat $V"]);
        check(
            "cat l | while read f; do grep $f $V; done",
            &[
                "cat l | !while read f; do grep $f $V; done",
                "read f",
                "!grep $f v".replace(" v", " $V").as_str(),
            ],
        );
        check("wc -l $(find . | sort)", &["!wc -l $(find . | sort)", "find . | sort"]);
        check("comm <(sort a) <(sort b)", &["!comm", "sort a", "sort b"]);
        check("(cat a; cat b) | sort", &["!(cat a; cat b) | sort", "cat a", "cat b"]);
        check("case $V in v) cat a;; *) cat b;; esac", &["cat a", "cat b"]);
    }

    #[test]
    fn nonsense_is_refused() {
        let surroundings = Surroundings { cwd: PathBuf::from("/"), variable: &|_| None };
        for text in ["a |", "a | | b", "'", "if a; then"] {
            assert!(matches!(read(text, &surroundings), Err(Error::Parse(_))), "{text}");
        }
    }
}
