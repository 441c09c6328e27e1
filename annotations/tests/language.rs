//! The parts of the language that the first command files do not use: expressions,
//! subcommands, single-dash names, several values, separators, `--`.

use std::ffi::OsString;

use posh_annotations::{Because, CurrentDir, FileKind, Invocation, Library, Unknown};

const FIND: &str = r#"
find:
- FLAGS:
  - {short: L}
  OPTPARAMS:
  - {short: D, size: 1}
  PARAMS:
  - {name: start, type: input_dir, size: list, or_current_dir: true}
  EXPRESSION:
  - word: [-print, "(", ")", "!", -o, -ls]
  - {word: -name, type: string, size: 1}
  - {word: -newer, type: input_file, size: 1}
  - {word: -fprintf, types: [output_file, string], size: specific_size(2)}
  - {word: -exec, size: 'until(";", "+")', stays_here: "starts commands"}
  terminal: {when: -print, is: output}
"#;

const GIT: &str = r#"
git:
  subcommands: true
  FLAGS:
  - {long: no-pager}
  OPTPARAMS:
  - {short: C, type: input_dir, size: 1, changes_dir: everything}
  - {short: c, stays_here: "a configuration value is given"}
  client_files: ["~/.gitconfig"]
  environment: ["GIT_*"]
  searches_up: [.git]
git add:
- needs_current_dir: writes
  ignores_posixly_correct: true
  FLAGS:
  - {short: A, long: all}
  PARAMS:
  - {type: input_dir, size: list}
git log:
- needs_current_dir: reads
  ignores_posixly_correct: true
  OPTPARAMS:
  - {short: n, long: max-count, size: 1, numeric: anywhere}
  PARAMS:
  - {name: revisions, size: list}
  - {name: paths, type: input_dir, size: list, after_dashes: true}
  stays_here:
  - {when: {value: -n, is: "0"}, reason: "shows nothing"}
"#;

const OTHERS: &str = r#"
convert:
- long_arg_single_dash: true
  FLAGS:
  - {long: strip}
  - {word: "+repage"}
  OPTPARAMS:
  - {long: resize, size: 1}
  PARAMS:
  - {name: inputs, type: input_file, size: list, at_least: 1}
  - {name: output, type: output_file, size: 1}
jq:
- abbreviations: false
  FLAGS:
  - {short: r, long: raw-output}
  OPTPARAMS:
  - {long: slurpfile, types: [string, input_file], size: specific_size(2)}
  - {short: L, type: input_dir, size: list, separator: ":"}
  - {long: args, size: list}
  PARAMS:
  - {name: filter, size: 1}
  - {name: files, type: input_file, size: list, or_stdin: true}
cp:
- OPTPARAMS:
  - {short: t, long: target-directory, type: output_dir, size: 1}
  PARAMS:
  - {name: sources, type: input_file, size: list, at_least: 1, dash: file, no_follow: true}
  - {name: target, type: output_dir, size: 1, unless: -t, dash: file}
first:
- when: {environment: MODE, is: fast}
  FLAGS: [{short: a}]
- when: {count: files, at_least: 2}
  PARAMS:
  - {name: files, type: input_file, size: list}
  status: grep
- PARAMS:
  - {type: string, size: 1}
"#;

fn library(text: &str) -> Library {
    let directory = tempfile::tempdir().expect("a directory can be made");
    std::fs::write(directory.path().join("tool.yaml"), text).expect("a file can be written");
    let (library, faults) = Library::load(&[directory.path().to_owned()]);
    assert!(faults.is_empty(), "{faults:?}");
    library
}

fn read(text: &str, line: &str) -> Result<Invocation, Unknown> {
    let argv: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
    library(text).classify(&argv[0].to_string_lossy(), &argv, &|_| None)
}

fn files(text: &str, line: &str) -> String {
    match read(text, line) {
        Ok(invocation) => {
            let files = invocation.files.iter();
            files
                .map(|file| format!("{:?} {}", file.kind, file.path.to_string_lossy()))
                .collect::<Vec<_>>()
                .join(", ")
        }
        Err(unknown) => format!("! {unknown}"),
    }
}

#[test]
fn expressions() {
    assert_eq!(files(FIND, "find a b -name x"), "InputDir a, InputDir b");
    assert_eq!(files(FIND, "find -L a ( -newer f -o ! -print )"), "InputDir a, InputFile f");
    assert_eq!(files(FIND, "find -D tree a -fprintf out %p"), "InputDir a, OutputFile out");
    assert_eq!(files(FIND, "find a -exec rm {} ;"), "! find: starts commands");
    assert_eq!(files(FIND, "find a -exec rm {}"), "! find: -exec lacks a value");
    assert_eq!(files(FIND, "find a -delete"), "! flag -delete of find is not annotated");
    assert_eq!(
        files(FIND, "find -name x a"),
        "! find: a stands in the expression, but is no part of one"
    );
    // -ls is a word of the expression, not -l -s and not the option -L.
    assert_eq!(files(FIND, "find -ls"), "");
    assert_eq!(read(FIND, "find -name x").unwrap().current_dir, CurrentDir::Reads);
}

#[test]
fn subcommands_and_a_changed_directory() {
    let add = read(GIT, "git add -A").unwrap();
    assert_eq!((add.command.as_str(), add.current_dir), ("git add", CurrentDir::Writes));
    assert_eq!(add.client_files, ["~/.gitconfig"]);
    assert_eq!(add.searches_up, [".git"]);
    assert!(add.environment.contains(&"GIT_*".to_owned()));

    let elsewhere = read(GIT, "git --no-pager -C repo add src").unwrap();
    assert_eq!(elsewhere.current_dir, CurrentDir::Unused);
    assert_eq!(elsewhere.working_dir, Some("repo".into()));
    assert_eq!(elsewhere.files.len(), 1);
    assert_eq!((elsewhere.files[0].kind, elsewhere.files[0].argument), (FileKind::OutputDir, 3));
    assert!(elsewhere.side_effects);

    assert_eq!(files(GIT, "git -C repo log -- src"), "InputDir repo");
    assert_eq!(files(GIT, "git -C repo log -- /abs"), "InputDir repo, InputDir /abs");
    assert_eq!(
        files(GIT, "git -C repo log -- ../up"),
        "! git log: a path leads out of the directory that it changes to"
    );
    assert_eq!(files(GIT, "git -C a -C b log"), "! git: it changes its directory twice");
    assert_eq!(files(GIT, "git bisect start"), "! git bisect has no annotation");
    assert_eq!(files(GIT, "git -c a=b add x"), "! git: a configuration value is given");
    assert_eq!(files(GIT, "git"), "! git: a subcommand is missing");
    assert_eq!(files(GIT, "git --version"), "! flag --version of git is not annotated");
}

#[test]
fn operands_after_two_dashes() {
    assert_eq!(files(GIT, "git log main -5 -- a b"), "InputDir a, InputDir b");
    assert_eq!(files(GIT, "git log a b"), "");
    assert_eq!(files(GIT, "git log -0"), "! git log: shows nothing");
}

#[test]
fn single_dash_names() {
    assert_eq!(
        files(OTHERS, "convert a.jpg -resize 50% -strip +repage b.png"),
        "InputFile a.jpg, OutputFile b.png"
    );
    assert_eq!(
        files(OTHERS, "convert a.jpg -res 50% b.png"),
        "! flag -res of convert is not annotated"
    );
    assert_eq!(
        files(OTHERS, "convert a.jpg --strip b.png"),
        "! flag --strip of convert is not annotated"
    );
    assert_eq!(files(OTHERS, "convert a.jpg"), "! convert: an operand is missing");
}

#[test]
fn several_values() {
    assert_eq!(files(OTHERS, "jq -r --slurpfile n f . a"), "InputFile f, InputFile a");
    assert_eq!(files(OTHERS, "jq . --args x y"), "");
    assert_eq!(files(OTHERS, "jq --slurpfile n"), "! jq: --slurpfile lacks a value");
    assert_eq!(files(OTHERS, "jq --raw . a"), "! flag --raw of jq is not annotated");
    let searched = read(OTHERS, "jq -L lib:share/jq . a").unwrap();
    let spans: Vec<_> =
        searched.files.iter().map(|file| (file.argument, file.start, file.end)).collect();
    assert_eq!(spans, [(2, 0, 3), (2, 4, 12), (4, 0, 1)]);
}

#[test]
fn operands_are_dealt_out_as_a_usage_line_is_read() {
    assert_eq!(files(OTHERS, "cp a b c"), "InputFile a, InputFile b, OutputDir c");
    assert_eq!(files(OTHERS, "cp -t d a -"), "OutputDir d, InputFile a, InputFile -");
    assert_eq!(files(OTHERS, "cp -td"), "! cp: an operand is missing");
    assert!(read(OTHERS, "cp a b").unwrap().files[0].no_follow);
}

#[test]
fn annotations_are_tried_in_order() {
    assert_eq!(files(OTHERS, "first a b"), "InputFile a, InputFile b");
    assert_eq!(files(OTHERS, "first a"), "");
    assert_eq!(files(OTHERS, "first -a"), "! flag -a of first is not annotated");
    let argv = ["first".into(), "-a".into()];
    let fast = |name: &str| (name == "MODE").then(|| "fast".into());
    assert!(library(OTHERS).classify("first", &argv, &fast).is_ok());
}

#[test]
fn an_explanation_names_every_word() {
    let argv: Vec<OsString> = "tar -xzf a.tgz -C dir".split(' ').map(OsString::from).collect();
    insta::assert_snapshot!(Library::builtin().explain("tar", &argv, &|_| None), @r"
    -xzf   flag --extract; flag --gzip; option --file
    a.tgz  value of --file: a file that is read
    -C     option --directory
    dir    value of --directory: a tree that is written
    standard input   not read
    output size      1 of the input
    split            not possible
    status of parts  the largest
    tool version     the same version
    starts           gzip
    environment      LANG, LANGUAGE, LC_*, POSIXLY_CORRECT, TZ
    may be re-run    yes: writing it twice leaves the same
    ");
    let argv: Vec<OsString> = "git -C repo log -5 -- src".split(' ').map(OsString::from).collect();
    insta::assert_snapshot!(library(GIT).explain("git", &argv, &|_| None), @r"
    -C    option -C
    repo  value of -C: a tree that is read
    log   subcommand
    -5    option --max-count; value of --max-count: no file
    --    end of the options
    src   paths: below the directory that it changes to
    standard input   not read
    directory        changes to repo; looks upwards for .git
    output size      1 of the input
    split            not possible
    status of parts  the largest
    tool version     the same version
    environment      GIT_*, LANG, LANGUAGE, LC_*, POSIXLY_CORRECT
    reads            ~/.gitconfig
    may be re-run    yes: nothing is changed, and the output is the same
    ");
    let argv: Vec<OsString> = "grep -P x".split(' ').map(OsString::from).collect();
    let explained = Library::builtin().explain("grep", &argv, &|_| None);
    assert_eq!(explained, "runs here: flag -P of grep is not annotated\n");
}

#[test]
fn reasons_for_staying_here_have_a_kind() {
    const TOOL: &str = r#"
tool:
- FLAGS:
  - {short: i, stays_here: {reason: "asks the user", because: asks}}
  - {short: x, stays_here: "starts a program"}
  PARAMS:
  - {type: output_file, size: list}
  stays_here:
  - {unless: -x, because: cheap_through_mount, reason: "makes names"}
"#;
    let mut library = library(TOOL);
    let stays = |library: &Library, words: &str| {
        let argv: Vec<OsString> = words.split(' ').map(OsString::from).collect();
        match library.classify("tool", &argv, &|_| None) {
            Err(Unknown::StaysHere { because, reason, .. }) => format!("{because:?}: {reason}"),
            other => format!("{:?}", other.map(|invocation| invocation.command)),
        }
    };
    for (words, expected) in [
        ("tool -i a", "Asks: asks the user"),
        ("tool -x a", "Exactness: starts a program"),
        ("tool a", "CheapThroughMount: makes names"),
    ] {
        assert_eq!(stays(&library, words), expected, "{words}");
    }
    // One that does not count hides none that does.
    library.ignore_reasons(vec![Because::CheapThroughMount, Because::Asks]);
    for (words, expected) in [
        ("tool a", "Ok(\"tool\")"),
        ("tool -i a", "Ok(\"tool\")"),
        ("tool -i -x a", "Exactness: starts a program"),
    ] {
        assert_eq!(stays(&library, words), expected, "{words}");
    }
    let unknown =
        "tool:\n- FLAGS:\n  - {short: i, stays_here: {reason: \"asks\", because: maybe}}\n";
    let faults = posh_annotations::check_text(std::path::Path::new("tool.yaml"), unknown);
    let said: Vec<String> = faults.iter().map(ToString::to_string).collect();
    assert_eq!(
        said,
        [
            "tool.yaml:3:54: unknown kind of reason maybe; it is one of cheap_through_mount, asks, mount_differs"
        ]
    );
}
