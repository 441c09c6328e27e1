//! Word expansion, as far as it is certain: quotes, `~`, exported variables, braces, field
//! splitting and patterns. Anything that is known only at a run is an [`Unknowable`] with its
//! sentence.

use std::{ffi::OsString, path::Path};

use brush_parser::{
    ParserOptions,
    word::{self, Parameter, ParameterExpr, TildeExpr, WordPiece, WordPieceWithSource},
};

use super::{
    braces,
    nesting::is_readable,
    patterns::{Quoting, WordField},
};

/// bash's default IFS; the shell does not take IFS from its environment.
const FIELD_SEPARATORS: [char; 3] = [' ', '\t', '\n'];

/// Reason why a word can't be known: a sentence for the plan.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unknowable(pub(super) String);

impl Unknowable {
    pub(super) fn new(sentence: impl Into<String>) -> Self {
        Self(sentence.into())
    }
}

/// Directory and variables for an expansion.
pub(super) struct ExpansionScope<'a> {
    pub(super) cwd: Option<&'a Path>,
    /// A variable's certain value.
    pub(super) variable: &'a dyn Fn(&str) -> Result<String, Unknowable>,
}

/// Parser options of bash's defaults: extglob is off.
pub(super) fn options() -> ParserOptions {
    ParserOptions { enable_extended_globbing: false, ..ParserOptions::default() }
}

/// Expands one word of a command to its arguments: none, one or many.
pub(super) fn expand(word: &str, scope: &ExpansionScope<'_>) -> Result<Vec<OsString>, Unknowable> {
    // bash expands a tilde there when the word looks like an assignment.
    if word.contains("=~") {
        return Err(Unknowable::new("what ~ after = stands for is known only when it runs"));
    }
    let words = braces::expand(word, &options()).ok_or_else(|| {
        Unknowable::new(format!("{word} expands to more words than a plan is made for"))
    })?;
    let mut arguments = Vec::new();
    for word in words {
        for field in fields(&word, scope)? {
            arguments.extend(field.names(scope.cwd)?);
        }
    }
    Ok(arguments)
}

/// Expands the word of a redirection to its one file.
pub(super) fn expand_one(word: &str, scope: &ExpansionScope<'_>) -> Result<OsString, Unknowable> {
    let mut names = expand(word, scope)?;
    match (names.pop(), names.is_empty()) {
        (Some(name), true) => Ok(name),
        _ => Err(Unknowable::new(format!("the redirection to {word} is ambiguous"))),
    }
}

/// Texts of the command substitutions in a word, in order.
pub(super) fn substitutions(word: &str) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(Ok(pieces)) = is_readable(word).then(|| word::parse(word, &options())) {
        collect(&pieces, &mut found);
    }
    found
}

fn collect(pieces: &[WordPieceWithSource], found: &mut Vec<String>) {
    for piece in pieces {
        match &piece.piece {
            WordPiece::CommandSubstitution(text)
            | WordPiece::BackquotedCommandSubstitution(text) => {
                found.push(text.clone());
            }
            WordPiece::DoubleQuotedSequence(inner)
            | WordPiece::GettextDoubleQuotedSequence(inner) => {
                collect(inner, found);
            }
            _ => {}
        }
    }
}

fn fields(word: &str, scope: &ExpansionScope<'_>) -> Result<Vec<WordField>, Unknowable> {
    if !is_readable(word) {
        return Err(Unknowable::new(format!("{word} is nested too deep to be read")));
    }
    let pieces = word::parse(word, &options())
        .map_err(|error| Unknowable::new(format!("{word} can't be read: {error}")))?;
    let mut splitter = Splitter::default();
    for piece in &pieces {
        expand_piece(&piece.piece, Quoting::Unquoted, scope, &mut splitter)?;
    }
    Ok(splitter.finish())
}

/// Collects fields: unquoted expansions are split at white space.
#[derive(Default)]
struct Splitter {
    done: Vec<WordField>,
    open: Option<WordField>,
}

impl Splitter {
    /// Appends text to the current field.
    fn push(&mut self, text: &str, quoting: Quoting) {
        self.open.get_or_insert_default().push(text, quoting);
    }

    /// Adds the value of an unquoted expansion.
    fn split(&mut self, value: &str) {
        let mut rest = value;
        while let Some(at) = rest.find(FIELD_SEPARATORS) {
            if at > 0 {
                self.push(&rest[..at], Quoting::Unquoted);
            }
            self.done.extend(self.open.take());
            rest = rest[at..].trim_start_matches(FIELD_SEPARATORS);
        }
        if !rest.is_empty() {
            self.push(rest, Quoting::Unquoted);
        }
    }

    fn finish(mut self) -> Vec<WordField> {
        self.done.extend(self.open.take());
        self.done
    }
}

fn expand_piece(
    piece: &WordPiece,
    quoting: Quoting,
    scope: &ExpansionScope<'_>,
    out: &mut Splitter,
) -> Result<(), Unknowable> {
    let only_running =
        |what: &str| Err(Unknowable::new(format!("{what} is known only when it runs")));
    match piece {
        WordPiece::Text(text) => out.push(text, quoting),
        WordPiece::SingleQuotedText(text) => out.push(text, Quoting::Quoted),
        WordPiece::AnsiCQuotedText(text) => out.push(&ansi_c(text)?, Quoting::Quoted),
        WordPiece::EscapeSequence(escaped) => out.push(unescaped(escaped), Quoting::Quoted),
        WordPiece::DoubleQuotedSequence(inner) | WordPiece::GettextDoubleQuotedSequence(inner) => {
            // An empty quoted string is an argument, too.
            out.push("", Quoting::Quoted);
            for piece in inner {
                expand_piece(&piece.piece, Quoting::Quoted, scope, out)?;
            }
        }
        WordPiece::TildeExpansion(TildeExpr::Home) => {
            out.push(&(scope.variable)("HOME")?, Quoting::Quoted)
        }
        WordPiece::TildeExpansion(_) => return only_running("what ~ with a name stands for"),
        WordPiece::ParameterExpansion(expression) => {
            let value = parameter(expression, scope)?;
            match quoting {
                Quoting::Quoted => out.push(&value, Quoting::Quoted),
                Quoting::Unquoted => out.split(&value),
            }
        }
        WordPiece::CommandSubstitution(text) | WordPiece::BackquotedCommandSubstitution(text) => {
            return only_running(&format!("the output of $({})", text.trim()));
        }
        WordPiece::ArithmeticExpression(expression) => {
            return only_running(&format!("the value of $(({}))", expression.value));
        }
    }
    Ok(())
}

fn parameter(expression: &ParameterExpr, scope: &ExpansionScope<'_>) -> Result<String, Unknowable> {
    match expression {
        ParameterExpr::Parameter { parameter: Parameter::Named(name), indirect: false } => {
            (scope.variable)(name)
        }
        // A default counts only for a variable without a value, which is unknown.
        ParameterExpr::UseDefaultValues {
            parameter: Parameter::Named(name),
            indirect: false,
            ..
        }
        | ParameterExpr::AssignDefaultValues {
            parameter: Parameter::Named(name),
            indirect: false,
            ..
        }
        | ParameterExpr::IndicateErrorIfNullOrUnset {
            parameter: Parameter::Named(name),
            indirect: false,
            ..
        } => {
            let value = (scope.variable)(name)?;
            let empty = || {
                Unknowable::new(format!(
                    "${name} is empty, so the shell puts something else in its place"
                ))
            };
            if value.is_empty() { Err(empty()) } else { Ok(value) }
        }
        ParameterExpr::Parameter { parameter, .. } => {
            Err(Unknowable::new(format!("{parameter} is known only when it runs")))
        }
        _ => Err(Unknowable::new("an expansion of ${...} is known only when it runs")),
    }
}

/// `\x` is x, and a backslash before a line end joins two lines.
fn unescaped(escaped: &str) -> &str {
    match escaped.strip_prefix('\\').unwrap_or(escaped) {
        "\n" => "",
        text => text,
    }
}

/// `$'...'`: the escapes of one character (bash(1), "QUOTING").
fn ansi_c(text: &str) -> Result<String, Unknowable> {
    let mut plain = String::new();
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        if character != '\\' {
            plain.push(character);
            continue;
        }
        plain.push(match characters.next() {
            Some('a') => '\x07',
            Some('b') => '\x08',
            Some('e' | 'E') => '\x1b',
            Some('f') => '\x0c',
            Some('n') => '\n',
            Some('r') => '\r',
            Some('t') => '\t',
            Some('v') => '\x0b',
            Some(quoted @ ('\\' | '\'' | '"' | '?')) => quoted,
            _ => {
                return Err(Unknowable::new(
                    "a numeric escape in $'...' is read only when it runs",
                ));
            }
        });
    }
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variable(name: &str) -> Result<String, Unknowable> {
        match name {
            "HOME" => Ok("/home/u".to_owned()),
            "TWO" => Ok("a  b ".to_owned()),
            "EMPTY" => Ok(String::new()),
            "STAR" => Ok("*".to_owned()),
            _ => Err(Unknowable::new(format!("${name} has no exported value"))),
        }
    }

    fn check(word: &str, expected: &[&str]) {
        let dir = tempfile::tempdir().unwrap();
        for name in ["f1", "f2"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let scope = ExpansionScope { cwd: Some(dir.path()), variable: &variable };
        let arguments = expand(word, &scope).unwrap();
        let arguments: Vec<_> =
            arguments.iter().map(|argument| argument.to_str().unwrap()).collect();
        assert_eq!(arguments, expected, "{word}");
    }

    #[test]
    fn what_is_certain_is_expanded() {
        check("plain", &["plain"]);
        check(r#"'a b'c"d e"\ f"#, &["a bcd e f"]);
        check(r#""\$x \" \a""#, &[r#"$x " \a"#]);
        check("''", &[""]);
        check(r#""""#, &[""]);
        check(r"$'a\tb\'c'", &["a\tb'c"]);
        check("~/x", &["/home/u/x"]);
        check("'~'/x", &["~/x"]);
        check("a~", &["a~"]);
        check("$HOME/x", &["/home/u/x"]);
        check("${HOME}x", &["/home/ux"]);
        check("${HOME:-no}", &["/home/u"]);
        check("$TWO", &["a", "b"]);
        check("x$TWO/y", &["xa", "b", "/y"]);
        check(r#""$TWO""#, &["a  b "]);
        check("$EMPTY", &[]);
        check(r#""$EMPTY""#, &[""]);
        check("f*", &["f1", "f2"]);
        check("'f*'", &["f*"]);
        check(r"f\*", &["f*"]);
        check("$STAR", &["f1", "f2"]);
        check(r#""$STAR""#, &["*"]);
        check("{f1,x}.{a,b}", &["f1.a", "f1.b", "x.a", "x.b"]);
    }

    #[test]
    fn what_only_running_can_tell_is_a_sentence() {
        let scope = ExpansionScope { cwd: Some(Path::new("/")), variable: &variable };
        let cases = [
            ("$(ls /)", "the output of $(ls /) is known only when it runs"),
            ("a`ls`", "the output of $(ls) is known only when it runs"),
            (r#""x $(ls)""#, "the output of $(ls) is known only when it runs"),
            ("$((1+2))", "the value of $((1+2)) is known only when it runs"),
            ("$1", "$1 is known only when it runs"),
            ("$?", "$? is known only when it runs"),
            ("$nope", "$nope has no exported value"),
            ("${nope:-x}", "$nope has no exported value"),
            ("${EMPTY:-x}", "$EMPTY is empty, so the shell puts something else in its place"),
            ("${HOME%u}", "an expansion of ${...} is known only when it runs"),
            ("~root", "what ~ with a name stands for is known only when it runs"),
            (r"$'\x41'", "a numeric escape in $'...' is read only when it runs"),
        ];
        for (word, sentence) in cases {
            assert_eq!(expand(word, &scope), Err(Unknowable::new(sentence)), "{word}");
        }
        assert!(expand_one("{a,b}", &scope).is_err());
        assert_eq!(substitutions(r#"a$(b c)"d `e` $f""#), ["b c", "e"]);
    }
}
