//! Invocations and how they are read, as a table: a command line on the left,
//! what the annotation makes of it, in short form, on the right.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::sync::LazyLock;

use posh_annotations::{
    Aggregator, BehindMerge, CurrentDir, FileKind, Invocation, Library, LineEnds, StatusRule,
    StdinUse, TerminalUse, Unknown,
};

static LIBRARY: LazyLock<Library> = LazyLock::new(Library::builtin);

/// Words with shell-like single quotes; variables set for the command may stand in front (`A=b tar
/// ...`).
fn words(line: &str) -> (Vec<(String, OsString)>, Vec<OsString>) {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quoted = false;
    for character in line.chars() {
        match character {
            '\'' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            ' ' if !quoted => words.extend(word.take()),
            other => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    let is_variable = |word: &&String| {
        word.split_once('=').is_some_and(|(name, _)| {
            name.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_')
        })
    };
    let count = words.iter().take_while(is_variable).count();
    let argv = words.split_off(count);
    let variables = words
        .iter()
        .filter_map(|word| word.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.into()));
    (variables.collect(), argv.into_iter().map(OsString::from).collect())
}

fn classify(line: &str) -> Result<Invocation, Unknown> {
    let (variables, argv) = words(line);
    let environment = |name: &str| {
        variables.iter().find(|(other, _)| other == name).map(|(_, value)| value.clone())
    };
    let invocation = LIBRARY.classify(&argv[0].to_string_lossy(), &argv, &environment)?;
    for file in &invocation.files {
        assert_eq!(
            &argv[file.argument].as_bytes()[file.start..file.end],
            file.path.as_bytes(),
            "{line}"
        );
    }
    Ok(invocation)
}

/// Files with a letter for their kind (r read, R tree read, w, W, u changed, l list; ! not
/// followed), then whatever is not as usual.
fn short(invocation: &Invocation) -> String {
    let mut parts: Vec<String> = invocation
        .files
        .iter()
        .map(|file| {
            let kind = match file.kind {
                FileKind::InputFile => "r",
                FileKind::InputDir => "R",
                FileKind::OutputFile => "w",
                FileKind::OutputDir => "W",
                FileKind::NewDir => "d",
                FileKind::InoutFile => "u",
                FileKind::ListFile => "l",
            };
            format!(
                "{kind}{}:{}",
                if file.no_follow { "!" } else { "" },
                file.path.to_string_lossy()
            )
        })
        .collect();
    match invocation.current_dir {
        CurrentDir::Unused => {}
        CurrentDir::Reads => parts.push("cwd".to_owned()),
        CurrentDir::Writes => parts.push("CWD".to_owned()),
    }
    match invocation.stdin {
        StdinUse::Unused => {}
        StdinUse::ReadsAll => parts.push("stdin".to_owned()),
        StdinUse::MayStopEarly => parts.push("stdin?".to_owned()),
    }
    if let Some(split) = &invocation.split {
        let operands: Vec<String> = split.operands.iter().map(ToString::to_string).collect();
        parts.push(if split.across_input {
            "split:input".to_owned()
        } else {
            format!("split:{}", operands.join(","))
        });
        parts.extend(
            split.add_arguments.iter().map(|word| format!("add:{}", word.to_string_lossy())),
        );
        match &split.aggregator {
            None => {}
            Some(Aggregator::Merge { words, .. }) => {
                let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
                parts.push(format!("by:[{}]", words.join(" ")));
            }
            Some(Aggregator::Same) => parts.push("by:same".to_owned()),
            Some(Aggregator::Sum) => parts.push("by:sum".to_owned()),
            Some(Aggregator::UniqCount) => parts.push("by:uniq_count".to_owned()),
            Some(Aggregator::WcTotal(columns)) => parts.push(format!("by:wc_total({columns})")),
        }
        match split.behind_merge {
            None => {}
            Some(BehindMerge::Same) => parts.push("merged:same".to_owned()),
            Some(BehindMerge::Counted) => parts.push("merged:counted".to_owned()),
        }
        if split.whole_files {
            parts.push("whole".to_owned());
        }
    }
    if invocation.status_rule == StatusRule::Grep {
        parts.push("status:grep".to_owned());
    }
    match invocation.terminal {
        TerminalUse::Plain => {}
        TerminalUse::Output => parts.push("tty:output".to_owned()),
        TerminalUse::Interactive => parts.push("tty:interactive".to_owned()),
    }
    parts.join(" ")
}

/// Checks a table of lines `COMMAND => READING`, or `COMMAND => ! REASON`; all differences are
/// reported at once.
fn check(table: &str) {
    let mut differences = Vec::new();
    for line in
        table.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        let (command, expected) =
            line.split_once(" =>").unwrap_or_else(|| panic!("no => in {line}"));
        let found = match classify(command.trim()) {
            Ok(invocation) => short(&invocation),
            Err(unknown) => format!("! {unknown}"),
        };
        if found != expected.trim() {
            differences.push(format!(
                "{}\n   expected {}\n   found    {found}",
                command.trim(),
                expected.trim()
            ));
        }
    }
    assert!(differences.is_empty(), "\n{}", differences.join("\n"));
}

#[test]
fn cat() {
    check(
        "
        cat => stdin split:input
        cat - => stdin split:input
        cat a => r:a
        cat a b => r:a r:b split:1,2
        cat -v a b => r:a r:b split:2,3
        cat -n a b => r:a r:b
        cat --squeeze a b => r:a r:b
        cat -vbT a b => r:a r:b
        cat a - b => r:a r:b stdin
        cat -- -n a => r:-n r:a split:2,3
        cat a b -s => r:a r:b
        POSIXLY_CORRECT=1 cat a -s => r:a r:-s split:1,2
        cat -n => stdin
        cat /dev/stdin => r:/dev/stdin stdin split:input
        cat -q a => ! flag -q of cat is not annotated
        cat --number=3 a => ! cat: --number takes no value
        cat --s a => ! flag --s of cat is not annotated
        cat '' => ! cat: a file name is empty
        nonsense a => ! nonsense has no annotation
        ",
    );
}

#[test]
fn grep() {
    check(
        "
        grep x => stdin split:input status:grep
        grep x a => r:a status:grep
        grep x a b => r:a r:b split:2,3 add:-H status:grep
        grep -h x a b => r:a r:b split:3,4 status:grep
        grep x a b -H => r:a r:b split:2,3 status:grep
        grep -c x => stdin split:input by:sum status:grep
        grep -cH x => stdin status:grep
        grep -c x a b => r:a r:b split:3,4 add:-H status:grep
        grep -n x => stdin status:grep
        grep -z x => stdin status:grep
        grep -m1 x => stdin? status:grep
        grep -q x => stdin? status:grep
        grep -l x => stdin? status:grep
        grep -q x a b => r:a r:b status:grep
        grep -A1 x a b => r:a r:b status:grep
        grep -1 x a b => r:a r:b status:grep
        grep -i5 x a => r:a status:grep
        grep -e x -e y a => r:a status:grep
        grep -fpat a => r:pat r:a status:grep
        grep -if pat a => r:pat r:a status:grep
        grep --file=pat a => r:pat r:a status:grep
        grep -f - a => r:a stdin status:grep
        grep -f - => stdin status:grep
        grep -f pat => r:pat stdin split:input status:grep
        grep -r x => cwd status:grep
        grep -d recurse x => cwd status:grep
        grep -rn x src lib => R:src R:lib split:3,4 add:-H status:grep
        grep -rL x d e => R:d R:e split:3,4 add:-H status:grep
        grep --color=auto x a => r:a status:grep tty:output
        grep --colou x a => r:a status:grep tty:output
        grep --color x a => r:a status:grep tty:output
        grep --exclude-from=ex -r x d => r:ex R:d status:grep
        grep -d rec x d => ! grep: the value rec is not annotated of --directories
        grep -P x a => ! flag -P of grep is not annotated
        grep --perl x a => ! flag --perl of grep is not annotated
        grep --in x a => ! flag --in of grep is not annotated
        grep --inc=*.c -r x . => R:. status:grep
        grep => ! grep: an operand is missing
        grep -e => ! grep: --regexp lacks a value
        GREP_OPTIONS=-i grep x a => ! grep: GREP_OPTIONS is set
        POSIXLY_CORRECT= grep x a -h => r:a r:-h split:2,3 add:-H status:grep
        ",
    );
}

#[test]
fn tar() {
    check(
        "
        tar -xzf a.tgz -C dir => r:a.tgz W:dir
        tar xzf a.tgz -C dir => r:a.tgz W:dir
        tar xfz a.tgz => r:a.tgz CWD
        tar xfC a.tgz dir => r:a.tgz W:dir
        tar -x -f - => CWD stdin?
        tar xz => CWD stdin?
        tar -xOf a.tar m => r:a.tar
        tar -xf a.tar -C d m => r:a.tar W:d CWD
        tar --extract --file=a.tar --directory d => r:a.tar W:d
        tar --ext -f a.tar => r:a.tar CWD
        tar -tvf a.tar => r:a.tar
        tar cf out.tar a b => w:out.tar R:a R:b
        tar czf out.tgz -C dir x y => w:out.tgz R:dir
        tar -C dir -cf out.tar . => R:dir w:out.tar
        tar -cf out.tar x -C dir y => w:out.tar R:x R:dir
        tar -cf out.tar -C dir /abs => w:out.tar R:dir R:/abs
        tar -cf out.tar -C dir ../up => ! tar: a path leads out of the directory that it changes to
        tar -cf out.tar -C a x -C b y => ! tar: it changes its directory twice
        tar -cf out.tar -C a x -C /b y => w:out.tar R:a R:/b
        tar -cf - d => R:d
        tar -c d => R:d tty:output
        tar -cf out.tar -T list => w:out.tar l:list
        tar -xf host:a.tar => ! tar: the archive is on another machine
        tar -xf ./host:a.tar => r:./host:a.tar CWD
        tar -xPf a.tar => ! flag -P of tar is not annotated
        tar -tPf a.tar => ! flag -P of tar is not annotated
        tar -cPf a.tar => ! flag -P of tar is not annotated
        tar -rf a.tar b => ! flag -r of tar is not annotated
        tar xf => ! tar: --file lacks a value
        tar -f a.tar => ! tar: this use of it is not annotated
        TAR_OPTIONS=-v tar -xf a => ! tar: TAR_OPTIONS is set
        ",
    );
}

#[test]
fn egrep_and_fgrep_are_grep() {
    check(
        "
        egrep -c x a b => r:a r:b split:3,4 add:-H status:grep
        fgrep -f pat => r:pat stdin split:input status:grep
        egrep -P x => ! flag -P of egrep is not annotated
        ",
    );
    assert_eq!(classify("egrep x a").unwrap().runs, ["grep"]);
}

#[test]
fn head() {
    check(
        "
        head => stdin?
        head -5 a => r:a
        head -5 => stdin?
        head -n 5 a b => r:a r:b
        head -qn5 a b => r:a r:b split:2,3
        head -q -v a b => r:a r:b
        head -v -q a b => r:a r:b split:3,4
        head --lines=-3 a - => r:a stdin?
        head a -5 => ! flag -5 of head is not annotated
        head -5k a => ! flag -5 of head is not annotated
        ",
    );
}

#[test]
fn tail() {
    check(
        "
        tail => stdin split:input by:same merged:same
        tail -20 a => r:a
        tail -f a => r:a
        tail --follow=name --retry a => r:a
        tail -q a b => r:a r:b split:2,3 whole
        tail -qf a b => r:a r:b
        tail -n +2 a => r:a
        tail -5f a => ! flag -5 of tail is not annotated
        tail -f --pid=1 a => ! flag --pid of tail is not annotated
        ",
    );
    for followed in ["-f", "-F", "--follow", "--follow=name --retry", "-n 0 -qf", "-s 1 -F"] {
        assert!(!classify(&format!("tail {followed} a")).unwrap().deterministic, "{followed}");
    }
    assert!(classify("tail --retry -n 1 a").unwrap().deterministic);
    assert!((classify("tail -n +2 a").unwrap().output_weight - 1.0).abs() < 1e-9);
}

#[test]
fn cut() {
    check(
        "
        cut -f1 => stdin split:input
        cut -d: -f 1,3 a b => r:a r:b split:4,5
        cut -zf1 => stdin
        cut -f => ! cut: --fields lacks a value
        ",
    );
    let newline = ["cut", "-d", "\n", "-f1"].map(OsString::from);
    assert_eq!(LIBRARY.classify("cut", &newline, &|_| None).unwrap().split, None);
}

#[test]
fn tr() {
    check(
        "
        tr a-z A-Z => stdin split:input
        tr -d x => stdin split:input
        tr -s ' ' => stdin
        tr -cs a-z '\\n' => stdin
        tr a -d => stdin split:input
        tr => ! tr: an operand is missing
        ",
    );
}

#[test]
fn sort() {
    check(
        "
        sort => stdin split:input by:[sort -m]
        sort a => r:a
        sort -rnk2 a b => r:a r:b split:2,3 by:[sort -m -r -n -k 2] whole
        sort -t, --key=2,2 -u a b => r:a r:b split:4,5 by:[sort -m -t , --key 2,2 -u] whole
        sort --sort=numeric --parallel=4 a b => r:a r:b split:3,4 by:[sort -m --sort numeric] whole
        sort -o f f => w:f r:f
        sort f -o f => r:f w:f
        sort -m a b => r:a r:b
        sort -c a => r:a
        sort --check => stdin?
        sort -z => stdin
        sort -T /tmp/x a b => W:/tmp/x r:a r:b
        sort --files0-from=list => l:list
        sort --files0-from=- => ! sort: the files named on its standard input can't be seen before it runs
        sort -R a => ! flag -R of sort is not annotated
        sort -k1R a => ! sort: a key in random order
        sort +1 a => ! sort: +POS is an old way to write a key
        sort --compress-program=gzip a => ! flag --compress-program of sort is not annotated
        ",
    );
    assert!(!classify("sort -T /tmp/x a").unwrap().side_effects);
    assert!(classify("sort -o f f").unwrap().side_effects);
}

#[test]
fn uniq() {
    check(
        "
        uniq => stdin split:input by:same merged:same
        uniq -c => stdin split:input by:uniq_count merged:counted
        uniq -ci => stdin
        uniq -c -f1 => stdin
        uniq -c -1 => stdin
        uniq a => r:a
        uniq a b => r:a w:b
        uniq - b => w:b stdin
        uniq a b c => ! uniq: there are more operands than it takes
        ",
    );
}

#[test]
fn wc() {
    check(
        "
        wc => stdin split:input by:wc_total()
        wc -l => stdin split:input by:wc_total(l)
        wc -lw => stdin split:input by:wc_total(lw)
        wc -lL => stdin split:input by:wc_total(lL)
        wc -l - => stdin
        wc -l a b => r:a r:b split:2,3 add:-c by:wc_total(l) whole
        wc --files0-from=list => l:list
        wc -l --files0-from=- => ! wc: the files named on its standard input can't be seen before it runs
        wc --files0-from=list a => ! wc: there are more operands than it takes
        ",
    );
}

#[test]
fn how_the_last_line_ends() {
    let table = [
        ("cat a", LineEnds::AsInput),
        ("cat -E a", LineEnds::Unknown),
        ("grep x", LineEnds::Always),
        ("grep -lZ x a", LineEnds::Unknown),
        ("cut -f1", LineEnds::Always),
        ("cut -zf1", LineEnds::Unknown),
        ("sort", LineEnds::Always),
        ("uniq -c", LineEnds::Always),
        ("wc -l", LineEnds::Always),
        ("head a", LineEnds::Unknown),
        ("tr a-z A-Z", LineEnds::AsInput),
        ("tr '[:lower:]' '[:upper:]'", LineEnds::AsInput),
        ("tr -d 0-9", LineEnds::AsInput),
        ("tr ' ' '\\n'", LineEnds::AsInput),
        ("tr -c a-z ' '", LineEnds::Unknown),
        ("tr '\\n' ' '", LineEnds::Unknown),
        ("tr '[:space:]' ' '", LineEnds::Unknown),
    ];
    for (line, expected) in table {
        assert_eq!(classify(line).map(|invocation| invocation.line_ends), Ok(expected), "{line}");
    }
}

#[test]
fn variables_of_the_programs_that_it_starts_count_for_a_command() {
    check(
        "
        GZIP=-1 tar czf out.tgz a => ! tar: GZIP is set, for gzip, which it starts
        XZ_OPT=-0 tar cJf out.txz a => ! tar: XZ_OPT is set, for xz, which it starts
        XZ_DEFAULTS=-0 tar xJf in.txz a => ! tar: XZ_DEFAULTS is set, for xz, which it starts
        BZIP2=-1 tar cjf out.tbz a => ! tar: BZIP2 is set, for bzip2, which it starts
        GZIP=-1 tar cf out.tar a => w:out.tar R:a
        ",
    );
    let zstd = classify("tar c --zstd -f out a").unwrap();
    assert!(zstd.environment.contains(&"ZSTD_CLEVEL".to_owned()), "{zstd:?}");
}
