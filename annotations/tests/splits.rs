//! Held against the real tools: wherever an annotation says that an invocation can be
//! split, the parts are run and joined as it says, and output and status must be those of the whole.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use posh_annotations::{Aggregator, Invocation, Library, Split, StatusRule};

/// Commands, a set of flags of which every subset of up to two is tried, and the words after them.
const TRIED: [(&str, &[&str], &str); 9] = [
    ("cat", &["-A", "-b", "-e", "-E", "-n", "-s", "-t", "-T", "-u", "-v"], ""),
    (
        "grep",
        &[
            "-i",
            "-v",
            "-w",
            "-x",
            "-b",
            "-n",
            "-H",
            "-h",
            "-o",
            "-q",
            "-a",
            "-L",
            "-l",
            "-c",
            "-T",
            "-Z",
            "-m1",
            "-A1",
            "-B1",
            "-C1",
            "-1",
            "-s",
            "-z",
            "-r",
            "--color=always",
            "--label=x",
            "--line-buffered",
        ],
        "-e a -e two",
    ),
    ("head", &["-q", "-v", "-z", "-n2", "-n-2", "-c3", "-c-3"], ""),
    ("tail", &["-q", "-v", "-z", "-n2", "-n+2", "-c3", "-c+3"], ""),
    ("cut", &["-s", "-z", "--complement", "--output-delimiter=_"], "-d: -f2"),
    ("tr", &["-d", "-s", "-c", "-t"], "a-o"),
    (
        "sort",
        &["-b", "-d", "-f", "-g", "-i", "-M", "-h", "-n", "-r", "-V", "-s", "-u", "-z", "-k2", "-t:", "-m", "-c"],
        "",
    ),
    ("uniq", &["-c", "-d", "-D", "-i", "-u", "-z", "-f1", "-s1", "-w1", "-1", "--group"], ""),
    ("wc", &["-c", "-m", "-l", "-L", "-w"], ""),
];

/// Files with what is hard at a seam: equal lines, empty lines, no newline at the end, nothing at all.
const FILES: [(&str, &str); 6] = [
    ("one", "a:1\na:1\n\n\n"),
    ("two", "\n\nb:two\nB:2\n10\n9\n\n"),
    ("empty", ""),
    ("open", "two:x\n\tz\na:1\r"),
    ("return", "\na:1\nzz two\n"),
    ("last", "zz two\nnone: 3\nz\u{e9}\n"),
];

/// What one run gives: output and status.
type Outcome = (Vec<u8>, i32);

#[test]
fn parts_give_what_the_whole_gives() {
    let directory = tempfile::tempdir().unwrap();
    for (name, text) in FILES {
        fs::write(directory.path().join(name), text).unwrap();
    }
    let library = Library::builtin();
    let mut compared = 0;
    let mut differences = Vec::new();
    for (command, flags, words) in TRIED {
        for chosen in subsets(flags) {
            let mut argv: Vec<OsString> = vec![command.into()];
            argv.extend(chosen.iter().chain(&words.split_whitespace().collect::<Vec<_>>()).map(OsString::from));
            let files = FILES.map(|(name, _)| OsString::from(name));
            let with_files = [argv.as_slice(), &files].concat();
            let with_missing = [argv.as_slice(), &files[..2], &["missing".into()], &files[2..]].concat();
            // A missing file is as wrong with two flags as with one; these runs take time.
            let tried = if chosen.len() > 1 { 2 } else { 3 };
            for argv in [argv, with_files, with_missing].into_iter().take(tried) {
                let Ok(invocation) = library.classify(command, &argv, &|_| None) else { continue };
                let Some(split) = &invocation.split else { continue };
                let whole = run(&argv, &input(split), directory.path());
                let Some(joined) = in_parts(&argv, &invocation, split, directory.path()) else { continue };
                compared += 1;
                if whole != joined {
                    differences.push(format!("{argv:?}\n  whole  {}\n  joined {}", show(&whole), show(&joined)));
                }
            }
        }
    }
    assert!(differences.is_empty(), "{} of {compared}\n{}", differences.len(), differences.join("\n"));
    assert!(compared > 500, "only {compared} splits were tried");
}

/// No flag, each flag, and each pair.
fn subsets<'a>(flags: &[&'a str]) -> Vec<Vec<&'a str>> {
    let mut subsets = vec![Vec::new()];
    for (number, flag) in flags.iter().enumerate() {
        subsets.push(vec![*flag]);
        subsets.extend(flags[..number].iter().map(|other| vec![*other, *flag]));
    }
    subsets
}

/// Standard input of the whole: cut after newlines, it is [`chunks`].
fn input(split: &Split) -> Vec<u8> {
    if split.across_input { chunks().concat() } else { Vec::new() }
}

/// Each ends with a newline, except perhaps the last one.
fn chunks() -> Vec<Vec<u8>> {
    let whole_lines = FILES.into_iter().filter(|(_, text)| text.ends_with('\n'));
    let mut chunks: Vec<Vec<u8>> = whole_lines.map(|(_, text)| text.as_bytes().to_vec()).collect();
    chunks.push(b"z\nno newline".to_vec());
    chunks
}

/// Runs the parts and joins them; `None` for an aggregator that is not a command and not a sum.
fn in_parts(argv: &[OsString], invocation: &Invocation, split: &Split, directory: &Path) -> Option<Outcome> {
    let parts: Vec<Outcome> = if split.across_input {
        chunks().iter().map(|chunk| run(argv, chunk, directory)).collect()
    } else {
        split.operands.iter().map(|operand| run(&part(argv, split, *operand), &[], directory)).collect()
    };
    let statuses: Vec<i32> = parts.iter().map(|(_, status)| *status).collect();
    let failed = parts.iter().any(|(output, status)| *status > 0 && output.is_empty());
    let outputs = parts.iter().map(|(output, _)| output.as_slice());
    let output = match &split.aggregator {
        None => outputs.collect::<Vec<_>>().concat(),
        // The rule of docs/annotations.md for parts that fail before they write.
        Some(Aggregator::Command(_)) if failed => Vec::new(),
        Some(Aggregator::Command(words)) => {
            let names = outputs.enumerate().map(|(number, output)| {
                let name = format!("part{number}");
                fs::write(directory.join(&name), output).expect("the directory can be written");
                OsString::from(name)
            });
            run(&words.iter().cloned().chain(names).collect::<Vec<_>>(), &[], directory).0
        }
        Some(Aggregator::Builtin(name)) if name == "sum" => {
            let number = |output: &[u8]| String::from_utf8_lossy(output).trim().parse::<u64>().expect("it is a number");
            format!("{}\n", outputs.map(number).sum::<u64>()).into_bytes()
        }
        Some(Aggregator::Builtin(_)) => return None,
    };
    Some((output, status(invocation.status_rule, &statuses)))
}

/// The words of the part that has only `kept` of the operands.
fn part(argv: &[OsString], split: &Split, kept: usize) -> Vec<OsString> {
    let words = argv.iter().enumerate().skip(1);
    let words = words.filter(|(argument, _)| *argument == kept || !split.operands.contains(argument));
    let words = words.map(|(_, word)| word.clone());
    std::iter::once(argv[0].clone()).chain(split.add_arguments.iter().cloned()).chain(words).collect()
}

fn status(rule: StatusRule, statuses: &[i32]) -> i32 {
    let largest = statuses.iter().copied().max().unwrap_or(0);
    match rule {
        StatusRule::Grep if largest == 1 && statuses.contains(&0) => 0,
        StatusRule::Maximum | StatusRule::Grep => largest,
    }
}

fn run(argv: &[OsString], input: &[u8], directory: &Path) -> Outcome {
    let mut child = Command::new(&argv[0])
        .args(&argv[1..])
        .current_dir(directory)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("LC_ALL", OsStr::new("C.UTF-8"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the tools of this table are on every machine");
    let mut stdin = child.stdin.take().expect("it is a pipe");
    // The inputs are smaller than a pipe; a tool that ended without reading all is none of our concern.
    let _ = stdin.write_all(input);
    drop(stdin);
    let output = child.wait_with_output().expect("it was started");
    (output.stdout, output.status.code().unwrap_or(-1))
}

fn show((output, status): &Outcome) -> String {
    format!("{status} {:?}", String::from_utf8_lossy(output))
}
