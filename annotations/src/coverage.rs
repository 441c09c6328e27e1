//! Which of a tool's own flags an annotation knows: compares the text of
//! `--help` with the flags listed and those left out on purpose. Runs nothing.

use std::collections::BTreeSet;
use std::fmt;

use crate::library::Library;
use crate::model::{Annotation, Body, Command};

/// Flags that every tool has and that need no reason: their answer is about the
/// tool of this machine, so they run here.
const OF_EVERY_TOOL: [&str; 2] = ["--help", "--version"];

/// Comparison of a command's annotation with the flags that its `--help` prints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coverage {
    /// With its subcommand.
    pub command: String,
    /// Flags that --help names and the annotation lists.
    pub listed: Vec<String>,
    /// Flags that --help names and that are left out on purpose, with the reason.
    pub explained: Vec<(String, String)>,
    /// Flags that --help names and the annotation does not mention.
    pub unexplained: Vec<String>,
    /// Flags that the annotation lists and --help does not name: hidden flags or typos.
    pub beyond_help: Vec<String>,
}

impl Library {
    /// Compares a command's annotation with its help text. `command` may have a subcommand.
    /// `None`: it has no annotation.
    #[must_use]
    pub fn coverage(&self, command: &str, help_text: &str) -> Option<Coverage> {
        let found = self.command(command)?;
        let annotations = annotations(found);
        let single_dash =
            annotations.iter().any(|annotation| annotation.style.long_arg_single_dash);
        let expression = annotations.iter().any(|annotation| annotation.style.expression);
        let listed: BTreeSet<String> =
            annotations.iter().flat_map(|annotation| listed_flags(annotation)).collect();
        let named = flags_of_help(help_text, single_dash || expression, expression);
        let mut coverage = Coverage {
            command: command.to_owned(),
            listed: Vec::new(),
            explained: Vec::new(),
            unexplained: Vec::new(),
            beyond_help: listed.difference(&named).cloned().collect(),
        };
        let omission_of =
            |flag: &String| found.omissions.iter().find(|omission| omission.flags.contains(flag));
        let is_known = |flag: &String| listed.contains(flag) || omission_of(flag).is_some();
        for mut flag in named {
            // `-Olevel` is -O with its value, where no flag of the whole name is known.
            let short = flag.get(..2).filter(|short| !short.ends_with('-')).map(str::to_owned);
            if let Some(short) = short.filter(|short| !is_known(&flag) && is_known(short)) {
                flag = short;
            }
            let omission = omission_of(&flag);
            match omission {
                _ if listed.contains(&flag) => coverage.listed.push(flag),
                Some(omission) => coverage.explained.push((flag, omission.reason.clone())),
                None if OF_EVERY_TOOL.contains(&flag.as_str()) => {}
                None => coverage.unexplained.push(flag),
            }
        }
        Some(coverage)
    }

    /// The words that print a command's list of flags: `NAME --help`, unless the
    /// annotation names others.
    #[must_use]
    pub fn help_command(&self, command: &str) -> Option<Vec<String>> {
        let found = self.command(command)?;
        let usual = || command.split(' ').chain(["--help"]).map(str::to_owned).collect();
        Some(found.help.clone().unwrap_or_else(usual))
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.listed.len() + self.explained.len() + self.unexplained.len();
        writeln!(formatter, "{}: {} of {all} flags annotated", self.command, self.listed.len())?;
        for (flag, reason) in &self.explained {
            writeln!(formatter, "  {flag}: {reason}")?;
        }
        for flag in &self.unexplained {
            writeln!(formatter, "  {flag}: not annotated, and no reason given")?;
        }
        for flag in &self.beyond_help {
            writeln!(formatter, "  {flag}: annotated, but not in its help")?;
        }
        Ok(())
    }
}

fn annotations(command: &Command) -> Vec<&Annotation> {
    match &command.body {
        Body::Annotations(annotations) => annotations.iter().collect(),
        Body::Subcommands(before) => vec![before],
    }
}

fn listed_flags(annotation: &Annotation) -> impl Iterator<Item = String> {
    let dashes = if annotation.style.long_arg_single_dash { "-" } else { "--" };
    annotation.options.iter().flat_map(move |option| {
        let short = option.short.iter().map(|short| format!("-{}", char::from(*short)));
        let long = option.long.iter().map(move |long| format!("{dashes}{long}"));
        short.chain(long).chain(option.words.iter().cloned())
    })
}

/// The flags that a help text names. In the usual form they open a line and end at two spaces; in a
/// usage line, and all over the help of `find` (`anywhere`), they stand between other words.
fn flags_of_help(help: &str, single_dash: bool, anywhere: bool) -> BTreeSet<String> {
    let mut flags = BTreeSet::new();
    for line in help.lines() {
        let line = line.trim();
        let names = if anywhere || is_usage(line) {
            line
        } else if line.starts_with('-') {
            line.split("  ").next().unwrap_or(line)
        } else {
            continue;
        };
        for word in names.split([' ', ',', '|', '\t']) {
            flags.extend(flags_of_word(word.trim_start_matches(['[', '(']), single_dash));
        }
    }
    flags
}

/// `usage: git [-C <path>]`, or a further line of it.
fn is_usage(line: &str) -> bool {
    let start = line.get(..6).unwrap_or(line);
    start.eq_ignore_ascii_case("usage:") || line.starts_with("[-")
}

/// The flags of one word: `--[no-]quiet` is two.
fn flags_of_word(word: &str, single_dash: bool) -> Vec<String> {
    if let Some(name) = word.strip_prefix("--[no-]") {
        let mut flags = flags_of_word(&format!("--{name}"), single_dash);
        flags.extend(flags_of_word(&format!("--no-{name}"), single_dash));
        return flags;
    }
    let Some(name) = word.strip_prefix("--").or_else(|| word.strip_prefix('-')) else {
        return Vec::new();
    };
    let dashes = &word[..word.len() - name.len()];
    let name: String = name
        .chars()
        .take_while(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '?'))
        .collect();
    let name = name.trim_end_matches('-');
    if name.is_empty() || (name.len() > 1 && name.bytes().all(|byte| byte.is_ascii_uppercase())) {
        return Vec::new(); // `-NUM` is no flag of that name
    }
    // `-Olevel` without a space: only its first letter is the flag.
    let short = dashes == "-" && !single_dash;
    let name = if short { &name[..1] } else { name };
    vec![format!("{dashes}{name}")]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(help: &str) -> Vec<String> {
        flags_of_help(help, false, false).into_iter().collect()
    }

    #[test]
    fn the_usual_form_of_help() {
        let help = "\
Usage: tool [OPTION]... -x FILE
  -a, --all=WHAT             take -b into account
      --color[=WHEN],
      --colour[=WHEN]        use colours
  -NUM                       same as --context=NUM
      --[no-]quiet           say nothing
  -z, --gzip, --gunzip   filter";
        let expected = [
            "--all",
            "--color",
            "--colour",
            "--gunzip",
            "--gzip",
            "--no-quiet",
            "--quiet",
            "-a",
            "-x",
            "-z",
        ];
        assert_eq!(flags(help), expected);
    }

    #[test]
    fn the_form_of_git() {
        let help = "usage: git [-v | --version] [-C <path>]\n           [--exec-path[=<path>]] [-p | --paginate]\nstart -a";
        assert_eq!(flags(help), ["--exec-path", "--paginate", "--version", "-C", "-p", "-v"]);
    }

    #[test]
    fn the_form_of_find() {
        let help = "tests (N can be +N or -N or N): -amin N -anewer FILE\n  [-exec COMMAND ;]";
        let found: Vec<String> = flags_of_help(help, true, true).into_iter().collect();
        assert_eq!(found, ["-N", "-amin", "-anewer", "-exec"]);
    }

    #[test]
    fn a_reason_is_found_and_its_lack_is_told() {
        let help = "  -a, --text\n  -P, --perl-regexp\n  -?, --new\n";
        let coverage = Library::builtin().coverage("grep", help).unwrap();
        assert_eq!(coverage.listed, ["--text", "-a"]);
        assert_eq!(coverage.explained.len(), 2);
        assert_eq!(coverage.unexplained, ["--new", "-?"]);
    }
}
