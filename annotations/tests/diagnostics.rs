//! Faults of annotation files: all of a file at once, each with its place.

use std::path::Path;

use posh_annotations::check_text;

fn faults(text: &str) -> String {
    let faults = check_text(Path::new("tool.yaml"), text);
    faults.iter().map(|fault| format!("{fault}\n")).collect()
}

#[test]
fn every_fault_of_a_file_is_reported_at_once() {
    let text = "\
tool:
- filters_inputt: true
  FLAGS:
  - {short: c, long: count}
  - {short: [d, c], lnog: delete}
  - {short: ab}
  - {}
  OPTPARAMS:
  - {short: f, type: input_flie, size: 1}
  - {short: g, size: specific_size(0)}
  - {long: --color, size: optional}
  - {short: h, long: count}
  - {short: C, type: string, changes_dir: operands}
  PARAMS:
  - {type: input_file, size: list, splittable: {unless: [-z, pattern]}}
  - {type: input_file, size: list, splittable: true}
  - {name: pattern}
  terminal: loud
  stops_early: {value: -f, matches: '('}
  environment: LANG
";
    insta::assert_snapshot!(faults(text), @r"
    tool.yaml:2:3: unknown key filters_inputt; did you mean filters_input?
    tool.yaml:5:17: flag -c is declared twice
    tool.yaml:5:21: unknown key lnog; did you mean long?
    tool.yaml:6:13: short is one character, not ab; see long and word
    tool.yaml:7:5: an option has a short, a long or a word
    tool.yaml:9:22: unknown type input_flie; did you mean input_file?
    tool.yaml:10:22: bad size specific_size(0); it is 1, optional, specific_size(n) or list
    tool.yaml:11:12: long is a name without dashes, not --color
    tool.yaml:12:22: flag --count is declared twice
    tool.yaml:13:30: changes_dir needs the type input_dir or output_dir
    tool.yaml:15:58: the condition names flag -z, which this annotation does not declare
    tool.yaml:16:5: a second operand of size list; which words are whose?
    tool.yaml:16:5: a second splittable operand; at most one is
    tool.yaml:17:5: size is missing
    tool.yaml:18:13: unknown use of a terminal loud; it is one of plain, output, interactive
    tool.yaml:19:37: bad regular expression (: unclosed group
    tool.yaml:20:16: a list is needed here, not a word
    ");
}

#[test]
fn faults_of_commands() {
    let text = "\
one: word
two:
  FLAGS: []
three:
  annotations: {}
four:
  same_as: nothing
five:
  same_as: five
six: []
seven:
  subcommands: true
  PARAMS:
  - {type: string, size: 1}
a/b:
- FLAGS: []
six:
- FLAGS: {}
eight:
  not_annotated:
  - {flags: [-x]}
  annotations:
  - aggregator: sum
    when_split:
    - {add: -x}
    when: {}
";
    insta::assert_snapshot!(faults(text), @r"
    tool.yaml:1:6: a command is a list of annotations or a mapping, not a word
    tool.yaml:3:3: a command has one of annotations, same_as and subcommands
    tool.yaml:5:16: annotations is a list, not a mapping
    tool.yaml:7:12: same_as names nothing, which has no annotation
    tool.yaml:9:12: same_as names five, which has faults or leads in a circle
    tool.yaml:10:6: a command needs at least one annotation
    tool.yaml:12:3: a command with subcommands has no PARAMS of its own
    tool.yaml:15:1: a command's name is one or more words with single spaces between, without a directory
    tool.yaml:17:1: six is given twice
    tool.yaml:18:10: FLAGS is a list, not a mapping
    tool.yaml:21:5: an item of not_annotated has flags and a reason
    tool.yaml:23:5: an aggregator without anything splittable
    tool.yaml:24:5: when_split without a splittable operand
    tool.yaml:25:13: a list is needed here, not a word
    tool.yaml:26:11: a condition has one of any, all, not, when, unless, value, every, last, count, last_of, environment
    ");
}

#[test]
fn faults_of_conditions_and_cases() {
    let text = "\
tool:
- FLAGS:
  - {short: a}
  OPTPARAMS:
  - {short: b, types: [string, input_file], size: 1}
  - {short: s, separator: ','}
  PARAMS:
  - {name: x, type: string, size: 1, unless: y}
  - {name: y, type: string, size: optional}
  stays_here:
  - {when: -a}
  - {when: {count: -a}, reason: r}
  - {when: {value: -b}, reason: r}
  - {when: {last_of: [-a, -b], is: -c}, reason: r}
  - {when: {both: [-a]}, reason: r}
  status:
  - {when: -a, is: grep, otherwise: maximum}
  - {when: -a}
  reads_stdin:
  deterministic: ~
";
    insta::assert_snapshot!(faults(text), @r"
    tool.yaml:5:23: 2 types need size: specific_size(2)
    tool.yaml:6:16: a separator needs size: list
    tool.yaml:8:46: whether an operand exists can only depend on options, not on operand y
    tool.yaml:11:5: reason is missing
    tool.yaml:12:12: count needs at_least or at_most
    tool.yaml:13:12: value needs a test: is, matches or contains
    tool.yaml:14:12: last_of needs is: one of its own options
    tool.yaml:14:36: the condition names flag -c, which this annotation does not declare
    tool.yaml:15:12: a condition has one of any, all, not, when, unless, value, every, last, count, last_of, environment
    tool.yaml:15:13: unknown key both
    tool.yaml:17:26: unknown key otherwise
    tool.yaml:18:5: is is missing
    tool.yaml:19:14: a condition is missing here
    tool.yaml:20:18: a condition is missing here
    ");
}

#[test]
fn what_is_no_yaml_is_told_with_its_place() {
    insta::assert_snapshot!(faults("tool:\n- FLAGS: [\n  PARAMS: }\n"), @r"
    tool.yaml:3:11: did not find expected node content
    ");
    insta::assert_snapshot!(faults("tool:\n- !flags a\n"), @r"
    tool.yaml:2:3: tool[0]: tags such as !name have no meaning here
    ");
    insta::assert_snapshot!(faults("- tool\n"), @r"
    tool.yaml:1:1: an annotation file is a mapping from commands to annotations, not a list
    ");
}

#[test]
fn what_annotations_share_is_reported_once() {
    let text = "\
tool:
  FLAGS:
  - {shortt: a}
  annotations:
  - PARAMS: []
  - PARAMS: []
";
    insta::assert_snapshot!(faults(text), @r"
    tool.yaml:3:5: an option has a short, a long or a word
    tool.yaml:3:6: unknown key shortt; did you mean short?
    ");
}

#[test]
fn an_alias_of_yaml_is_reported_where_it_stands() {
    let text = "\
one:
- &flags
  FLAGS:
  - {short: a, logn: b}
two:
- *flags
";
    insta::assert_snapshot!(faults(text), @r"
    tool.yaml:4:16: unknown key logn; did you mean long?
    tool.yaml:6:3: unknown key logn; did you mean long?
    ");
}

#[test]
fn faults_of_guards() {
    let text = "\
tool:
- guards:
  - {below: .git, exists: a}
  - {below: a/b, exists: a, reason: x}
  - {below: .git, reason: x}
  - {exists: a, executable: b, reason: x}
  - {settings: a, reason: x}
  - {settings: a, allowed: b, required: c, reason: x}
  - {exists: a, unless: -x, reason: x}
  - {exsits: a, reason: x}
  - {settings: a, withheld: b, required: c, reason: x}
  - {settings: a, allowed: [b.c, d.*], withheld: [b.*, B.C, d.e=f, d.*], reason: x}
- guards: word
- client_files: [/a, ~/b]
  same_files: [/a, c]
";
    insta::assert_snapshot!(faults(text), @r"
    tool.yaml:3:5: a guard has a reason
    tool.yaml:4:6: below is the name of a directory, without slashes
    tool.yaml:5:5: a guard has one of exists, executable, all_exist and settings, and settings one of allowed and required
    tool.yaml:6:5: a guard has one of exists, executable, all_exist and settings, and settings one of allowed and required
    tool.yaml:7:5: a guard has one of exists, executable, all_exist and settings, and settings one of allowed and required
    tool.yaml:8:5: a guard has one of exists, executable, all_exist and settings, and settings one of allowed and required
    tool.yaml:9:25: the condition names flag -x, which this annotation does not declare
    tool.yaml:10:5: a guard has one of exists, executable, all_exist and settings, and settings one of allowed and required
    tool.yaml:10:6: unknown key exsits; did you mean exists?
    tool.yaml:11:19: withheld without allowed
    tool.yaml:12:56: B.C would be sent, since b.c is allowed
    tool.yaml:12:61: d.e=f would be sent, since d.* is allowed
    tool.yaml:12:68: d.* would be sent, since d.* is allowed
    tool.yaml:13:11: a list is needed here, not a word
    tool.yaml:15:15: a file is either sent (client_files) or compared (same_files)
    tool.yaml:15:15: a file of same_files is absolute or starts with ~/
    ");
}

#[test]
fn what_is_no_file_of_annotations_is_not_read() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    let made =
        std::process::Command::new("mkfifo").arg(path("fifo.yaml")).status().expect("mkfifo(1)");
    assert!(made.success());
    std::os::unix::fs::symlink("/dev/zero", path("zero.yaml")).expect("made");
    std::fs::File::create(path("large.yaml"))
        .and_then(|file| file.set_len((1 << 20) + 1))
        .expect("made");
    std::fs::write(path("good.yaml"), "tool:\n- {}\n").expect("written");
    let (sender, receiver) = std::sync::mpsc::channel();
    let at = directory.path().to_owned();
    std::thread::spawn(move || sender.send(posh_annotations::check(&at)));
    let faults =
        receiver.recv_timeout(std::time::Duration::from_secs(60)).expect("it opens no FIFO");
    let said: Vec<_> = faults
        .iter()
        .map(|fault| {
            (
                fault.file.file_name().and_then(|name| name.to_str()).expect("a name"),
                fault.message.as_str(),
            )
        })
        .collect();
    assert_eq!(
        said,
        [
            ("fifo.yaml", "cannot read it: not a regular file"),
            ("large.yaml", "cannot read it: larger than 1 MiB, which no annotation file is"),
            ("zero.yaml", "cannot read it: not a regular file"),
        ]
    );
}
