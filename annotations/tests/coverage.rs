//! Every flag that an installed tool's help names is annotated or left out with a reason. Holds for
//! the versions that the command files were written against; another version may know further
//! flags.

use std::path::Path;
use std::process::{Command, Stdio};

use posh_annotations::Library;

/// Parts of the first line of `--version`.
const VERSIONS: [&str; 16] = [
    "(GNU coreutils) 9.1",
    "(GNU grep) 3.8",
    "(GNU tar) 1.34",
    "(GNU sed) 4.9",
    "(GNU findutils) 4.9.0",
    "(GNU diffutils) 3.8",
    "git version 2.39.",
    "gzip 1.12",
    "(gzip) 1.12",
    "bzip2, a block-sorting file compressor.  Version 1.0.8",
    "xz (XZ Utils) 5.4.1",
    "Zstandard CLI (64-bit) v1.5.4",
    "file-5.44",
    "jq-1.6",
    "mawk 1.3.4",
    "Version: ImageMagick 6.9.11-60",
];

#[test]
fn no_flag_of_an_installed_tool_is_passed_over() {
    let library = Library::builtin();
    let (mut checked, mut listed) = (0, 0);
    let mut unexplained = Vec::new();
    for command in library.full_names() {
        let help = library.help_command(command).unwrap();
        if !is_of_known_version(&help[0]) {
            continue;
        }
        let coverage = library.coverage(command, &output(&help)).unwrap();
        checked += 1;
        listed += coverage.listed.len();
        if !coverage.unexplained.is_empty() {
            unexplained.push(format!("{command}: {}", coverage.unexplained.join(" ")));
        }
    }
    assert!(unexplained.is_empty(), "\n{}", unexplained.join("\n"));
    // On a machine with none of these versions nothing could be compared.
    let some_known = ["grep", "tar", "cat"].into_iter().any(is_of_known_version);
    assert_eq!(checked > 0, some_known);
    assert!(
        listed > 3 * checked,
        "{listed} flags found for {checked} commands: is their help read as it should be?"
    );
}

fn is_of_known_version(tool: &str) -> bool {
    let first = output(&[tool.to_owned(), "--version".to_owned()]);
    let first = first.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    VERSIONS.iter().any(|version| first.contains(version))
}

/// What a command prints, on either stream; nothing if it is not installed.
fn output(words: &[String]) -> String {
    let run = Command::new(&words[0])
        .args(&words[1..])
        .current_dir(Path::new("/"))
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output();
    run.map(|output| {
        String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr)
    })
    .unwrap_or_default()
}
