//! `posh annotations`: questions about the annotations of commands. The annotations crate answers
//! them; this module runs `COMMAND --help` for the list of flags, and `posh-executor` to verify
//! commands.

use std::{
    env,
    ffi::OsString,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use fs_mapper::config::{Config, Untrusted, annotation_directories};
use posh_annotations::{Coverage, Diagnostic, Library};
use posh_proto::untrusted::escaped;

use crate::{
    Error,
    error::named,
    gateway::{self, GatewayTarget},
    programs,
};

/// Reports every fault of the files in `dir`, or in each directory that the
/// gateway reads besides its built-in files; false when there is one.
///
/// # Errors
/// [`Error::Annotations`] when `dir` can't be listed.
pub fn check(target: &GatewayTarget, dir: Option<&Path>) -> Result<(String, bool), Error> {
    let faults = match dir {
        Some(dir) if !dir.is_dir() => {
            return Err(Error::Annotations(format!(
                "{} is not a directory of annotation files",
                dir.display()
            )));
        }
        Some(dir) => posh_annotations::check(dir),
        None => library(target).1,
    };
    if faults.is_empty() {
        let checked = dir.map_or_else(|| directories(target), |dir| vec![dir.to_owned()]);
        let checked: Vec<String> = checked.iter().map(|dir| named(dir)).collect();
        return Ok((format!("no faults in {}\n", checked.join(", ")), true));
    }
    Ok((lines(&faults), false))
}

/// Explains how an invocation is read.
///
/// # Errors
/// [`Error::Annotations`] when its name is not UTF-8, as no annotated command's is.
pub fn explain(target: &GatewayTarget, command: &[OsString]) -> Result<String, Error> {
    let Some(name) = command.first().and_then(|name| name.to_str()) else {
        return Err(Error::Annotations(
            "the command's name is not UTF-8, so no annotation can have it".to_owned(),
        ));
    };
    let (library, faults) = library(target);
    Ok(lines(&faults) + &library.explain(name, command, &|variable| env::var_os(variable)))
}

/// Lists annotated and missing flags of each command; of every annotated command when `commands` is
/// empty. A subcommand is one word with its command (`"git log"`).
///
/// # Errors
/// [`Error::Annotations`] when one of `commands` has no annotation.
pub fn coverage(target: &GatewayTarget, commands: &[String]) -> Result<String, Error> {
    let (library, faults) = library(target);
    let mut text = lines(&faults);
    if commands.is_empty() {
        for name in library.full_names() {
            text.push_str(&covered(&library, name)?);
        }
    }
    for name in commands {
        text.push_str(&covered(&library, name)?);
    }
    Ok(text)
}

fn covered(library: &Library, name: &str) -> Result<String, Error> {
    let unknown = || Error::Annotations(format!("{name} has no annotation"));
    let words = library.help_command(name).ok_or_else(unknown)?;
    let help = match help_text(&words) {
        Ok(help) => help,
        Err(error) => {
            let failed = format!("{name}: can't run {}: {error}", words.join(" "));
            return Ok(format!("{}\n", escaped(&failed)));
        }
    };
    let coverage: Option<Coverage> = library.coverage(name, &help);
    coverage.map(|coverage| coverage.to_string()).ok_or_else(unknown)
}

/// Runs commands and reports files that they use and their annotations do not name; false when
/// there is one. `posh-executor` does the work, with its own rules of confinement.
///
/// # Errors
/// [`Error::Annotations`] when that program is missing, or no command can be observed.
pub fn verify(
    target: &GatewayTarget,
    file: Option<&Path>,
    in_copy_of: Option<&Path>,
    command: &[OsString],
) -> Result<(String, bool), Error> {
    let program = executor_program()?;
    let mut verifier = Command::new(&program);
    verifier.arg("verify");
    for directory in directories(target) {
        verifier.arg("--annotations").arg(directory);
    }
    for (option, value) in [("--file", file), ("--in", in_copy_of)] {
        verifier
            .args(value.map(|value| [option.as_ref(), value.as_os_str()]).into_iter().flatten());
    }
    let failed = |what: String| Error::Annotations(format!("{} {what}", program.display()));
    let output =
        verifier.arg("--").args(command).stdin(Stdio::inherit()).stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| failed(format!("can't be run: {error}")))?;
    match output.status.code() {
        Some(code @ (0 | 1)) => {
            Ok((String::from_utf8_lossy(&output.stdout).into_owned(), code == 0))
        }
        _ => Err(failed("could not verify anything".to_owned())),
    }
}

/// The program that was installed with this one.
fn executor_program() -> Result<PathBuf, Error> {
    let unknown = |error| Error::Annotations(format!("can't tell where posh is: {error}"));
    let beside = programs::beside("posh-executor").map_err(unknown)?;
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).map(|directory| directory.join("posh-executor"));
    std::iter::once(beside.clone()).chain(on_path).find(|program| program.is_file()).ok_or_else(
        || {
            Error::Annotations(format!(
                "posh-executor, which does this, is neither {} nor on PATH",
                beside.display()
            ))
        },
    )
}

/// Both streams of a help command: some tools print their help to stderr.
fn help_text(words: &[String]) -> io::Result<String> {
    let Some((program, arguments)) = words.split_first() else { return Ok(String::new()) };
    let mut command = Command::new(program);
    // In English, without colours, a pager or this terminal's width.
    command
        .args(arguments)
        .env("LC_ALL", "C")
        .env("PAGER", "cat")
        .env("GIT_PAGER", "cat")
        .env("MANPAGER", "cat");
    let output = command.env("TERM", "dumb").stdin(Stdio::null()).output()?;
    Ok(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

/// The annotations as the gateway of this configuration loads them: built-in files, then the
/// machine's, the user's and the configuration's.
fn library(target: &GatewayTarget) -> (Library, Vec<Diagnostic>) {
    Library::load(&directories(target))
}

fn directories(target: &GatewayTarget) -> Vec<PathBuf> {
    let configured = gateway::find_config(target).ok().flatten();
    let config = configured.and_then(|found| Config::load_found(&found).ok());
    let usable = |directory: Result<PathBuf, Untrusted>| match directory {
        Ok(directory) => Some(directory),
        Err(why) => {
            let _ =
                writeln!(io::stderr(), "posh: annotations not used: {}", escaped(&why.to_string()));
            None
        }
    };
    annotation_directories(config.as_ref()).into_iter().filter_map(usable).collect()
}

fn lines(faults: &[Diagnostic]) -> String {
    faults.iter().map(|fault| format!("{}\n", escaped(&fault.to_string()))).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn no_name_or_word_forges_a_line() {
        let forged = "x\nFORGED: no faults";
        let directory = tempfile::tempdir().unwrap();
        let named = directory.path().join(forged);
        fs::create_dir(&named).unwrap();
        let none = GatewayTarget { config: Some("/dev/null".into()), socket: None };
        let mut said = vec![check(&none, Some(&named)).unwrap().0];
        fs::write(named.join(format!("{forged}.yaml")), "commands: [{name: [").unwrap();
        said.push(check(&none, Some(&named)).unwrap().0);
        for words in [["cat", forged], ["cat", "--x\nFORGED"], [forged, "a"]] {
            said.push(explain(&none, &words.map(OsString::from)).unwrap());
        }
        for text in said {
            assert!(!text.lines().any(|line| line.starts_with("FORGED")), "{text}");
            assert!(text.contains("\\nFORGED"), "{text}");
        }
    }
}
