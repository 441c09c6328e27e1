//! How the shipped annotations of the commands for text, sums and compressed files read command
//! lines, as tables; and sed's own word for it that the scripts which are taken name no files.

use std::ffi::OsString;
use std::process::{Command, Stdio};

use posh_annotations::{
    CurrentDir, FileKind, Invocation, Library, StatusRule, StdinUse, TerminalUse,
};

/// Checks lines of the form `[NAME=VALUE]... COMMAND [WORD]... => READING`; single quotes are the
/// shell's. All differences are reported at once.
#[track_caller]
fn check(table: &str) {
    let library = Library::builtin();
    let lines = table.lines().map(str::trim).filter(|line| !line.is_empty());
    let wrong: Vec<String> = lines
        .map(|line| line.split_once(" =>").expect("every line has an arrow"))
        .map(|(line, expected)| (line, expected.trim(), read(&library, line)))
        .filter(|(_, expected, found)| expected != found)
        .map(|(line, expected, found)| format!("{line}\n  expected {expected}\n  found    {found}"))
        .collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

fn read(library: &Library, line: &str) -> String {
    let mut words = words(line);
    let assigned = words.iter().take_while(|word| word.contains('=')).count();
    let argv: Vec<OsString> = words.split_off(assigned).into_iter().map(OsString::from).collect();
    let environment = |name: &str| {
        words
            .iter()
            .filter_map(|word| word.split_once('='))
            .find(|(set, _)| *set == name)
            .map(|(_, value)| value.into())
    };
    match library.classify(&argv[0].to_string_lossy(), &argv, &environment) {
        Ok(invocation) => describe(&invocation),
        Err(unknown) => format!("! {unknown}"),
    }
}

fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quoted = false;
    for character in line.trim().chars() {
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
    words
}

/// Files with a letter for their kind (r read, R tree read, w, W, d made, u changed, l list), then
/// what is not the plainest case.
fn describe(invocation: &Invocation) -> String {
    let letter = |kind| match kind {
        FileKind::InputFile => 'r',
        FileKind::InputDir => 'R',
        FileKind::OutputFile => 'w',
        FileKind::OutputDir => 'W',
        FileKind::NewDir => 'd',
        FileKind::InoutFile => 'u',
        FileKind::ListFile => 'l',
    };
    let files = invocation.files.iter();
    let mut parts: Vec<String> = files
        .map(|file| format!("{}:{}", letter(file.kind), file.path.to_string_lossy()))
        .collect();
    if invocation.current_dir == CurrentDir::Reads {
        parts.push("cwd".to_owned());
    }
    match invocation.stdin {
        StdinUse::Unused => {}
        StdinUse::ReadsAll => parts.push("stdin".to_owned()),
        StdinUse::MayStopEarly => parts.push("stdin?".to_owned()),
    }
    if let Some(split) = &invocation.split {
        let operands: Vec<String> = split.operands.iter().map(ToString::to_string).collect();
        parts.push(format!(
            "split:{}",
            if split.across_input { "input".to_owned() } else { operands.join(",") }
        ));
        parts.extend(
            split.add_arguments.iter().map(|word| format!("add:{}", word.to_string_lossy())),
        );
    }
    if invocation.status_rule == StatusRule::Grep {
        parts.push("status:grep".to_owned());
    }
    match invocation.terminal {
        TerminalUse::Plain => {}
        TerminalUse::Output => parts.push("tty:output".to_owned()),
        TerminalUse::Interactive => parts.push("tty:interactive".to_owned()),
    }
    parts.extend(invocation.shows.iter().map(|shown| format!("shows:{shown:?}").to_lowercase()));
    if !invocation.deterministic {
        parts.push("varies".to_owned());
    }
    parts.join(" ")
}

#[test]
fn sed() {
    check(
        r##"
        sed s/a/b/ => stdin split:input
        sed s/a/b/ f => r:f
        sed s/a/b/ f g => r:f r:g
        sed -n 2p f => r:f
        sed -n '2,5p' f => r:f
        sed 's/error/w/;s/x/y/2g' => stdin split:input
        sed -E 's|^/([^/]+)/.*|\1|;/^$/d' => stdin split:input
        sed -e s/a/b/ -e '/^#/d' => stdin split:input
        sed '/a/,/b/d' => stdin
        sed 5q => stdin?
        sed '$d' => stdin
        sed '$!N;P;D' => stdin
        sed 's//x/' => stdin
        sed -z s/a/b/ => stdin
        sed ':a;s/^\(x*\)y/\1x/;ta' => stdin split:input
        sed --posix s/a/b/ => stdin
        sed 's/a/b/w out' f => ! sed: the script may name files or start commands
        sed 's/a/date/e' f => ! sed: the script may name files or start commands
        sed '/x/w out' f => ! sed: the script may name files or start commands
        sed 'r other' f => ! sed: the script may name files or start commands
        sed 'R other' f => ! sed: the script may name files or start commands
        sed '1e date' f => ! sed: the script may name files or start commands
        sed 'W out' f => ! sed: the script may name files or start commands
        sed 's/[/]/w/;w f' f => ! sed: the script may name files or start commands
        sed 's/[/]/x/' f => ! sed: the script may name files or start commands
        sed 's/[^]]*//' f => r:f
        sed 's/[[:space:]]*$//' => stdin split:input
        sed -e 'a\' -e 'w out' f => ! sed: the script may name files or start commands
        sed '1i\header' f => r:f
        sed 'a hello;w out' f => r:f
        sed '$a\end' f => r:f
        sed 'ta}s/;w file;x/y/' f => ! sed: the script may name files or start commands
        sed 'y/abc/xyz/' => stdin split:input
        sed -f script f => ! sed: the script is in a file
        sed --sandbox -f script f => r:script r:f
        sed --sandbox 'w out' f => r:f
        sed -i s/a/b/ f g => u:f u:g
        sed -i.bak -e s/a/b/ f => u:f
        sed -ibak/ s/a/b/ f => ! sed: the old file is kept in another directory
        sed -ni 's/a/b/p' f => u:f
        sed -s -n '$p' f g => r:f r:g
        sed -n --expression='$=' f => r:f
        sed -n '/x/{p;q}' - => stdin?
        sed -u 1q => stdin?
        sed '#n' f => r:f
        sed 's/a/b/' - f => r:f stdin
        sed --debug p f => ! flag --debug of sed is not annotated
        sed => ! sed: an operand is missing
        sed 's#a#b#;s,a,b,;s:a:b:;s@a@b@;s%a%b%' => stdin
        sed -n '\,x,p' => ! sed: the script may name files or start commands
        sed s/a/b/ -n f => r:f
        POSIXLY_CORRECT=1 sed s/a/b/ -n f => r:-n r:f
        sed 's/a/b/ie' f => ! sed: the script may name files or start commands
        sed 's/a/b/iw out' f => ! sed: the script may name files or start commands
        "##,
    );
}

#[test]
fn awk() {
    check(
        r##"
        awk '{print $1}' => stdin split:input
        awk '{print $1}' f => r:f
        awk '{print $1}' f g => r:f r:g
        awk -F: '$3 > 1000 {print $1, $NF}' => stdin split:input
        awk '/a|b/ && $2 != "x y"' => stdin split:input
        awk '!seen[$0]++' => stdin
        awk 'NR==1' => stdin
        awk '{s+=$1} END {print s}' => stdin
        awk '/a/,/b/' => stdin
        awk '{print > "out"}' f => ! awk: the program may write to a file or a command
        awk '{print $1 | "sort"}' f => ! awk: the program may write to a file or a command
        awk '{ print $1 >> $2 ".txt" }' f => ! awk: the program may write to a file or a command
        awk '{ if ($1 > 5) print }' => stdin split:input
        awk '{ system("rm " $1) }' f => ! awk: the program may read files or start commands
        awk '"date" | getline d' f => ! awk: the program may read files or start commands
        awk '{ while ((getline x < "y") > 0) print x }' f => ! awk: the program may read files or start commands
        awk 'BEGIN {print 1}' => stdin?
        awk 'BEGIN {FS=":"} {print $1}' => stdin split:input
        awk 'BEGIN{OFS=","}{print $1,$2}' => stdin split:input
        awk '{print ENVIRON["HOME"]}' f => ! awk: the program looks at its environment
        awk 'BEGIN {ARGV[1]="g"} 1' f => ! awk: the program may choose its own files
        awk '{print strftime("%F")}' f => ! awk: the program asks for the time
        awk '{print rand()}' f => r:f varies
        awk '{print x, $1}' x=1 f => ! awk: an operand is an assignment, or empty
        awk '{print $1}' ./x=1 => r:./x=1
        awk '{print $1}' '' => ! awk: an operand is an assignment, or empty
        awk -f prog f => ! awk: the program is in a file
        awk -v x=1 '{print x}' f => r:f
        awk -v RS= '{print $1}' => stdin
        awk '{print $1 / NR; y = 2 / 3}' => stdin
        awk '{print $1 ~ $2}' => stdin
        awk '{gsub(/a/, "b"); print}' => stdin split:input
        awk '{gsub("a", "b"); print}' => stdin
        awk '{print $(NF-1)}' => stdin
        awk 'length > 80' => stdin split:input
        awk '{printf "%s\n", $1}' => stdin
        awk '{print $1}' - f => r:f stdin
        awk -W version => ! flag -W of awk is not annotated
        awk '{print $1}' f -n => r:f r:-n
        gawk --sandbox '{print $1}' f => r:f
        gawk '@include "lib"; {print}' f => ! gawk: the program has parts in other files
        gawk 'BEGIN { f = "sys" "tem"; @f("date") }' f => ! gawk: the program may read files or start commands
        gawk '/x@example.com/' f => r:f
        gawk -i inplace '{print}' f => ! flag -i of gawk is not annotated
        mawk -F: '{print $1}' f => r:f
        GAWK_PERSIST_FILE=x gawk '{print}' f => ! gawk: GAWK_PERSIST_FILE is set
        awk 'BEGIN{FS=OFS="\t"} {print $2}' => stdin split:input
        awk 'BEGIN{x="}{";exit}{print $1,$2}' => stdin?
        awk '' => stdin?
        awk '{$2=tolower($2); print}' => stdin
        "##,
    );
}

#[test]
fn lines() {
    check(
        r##"
        comm a b => r:a r:b
        comm -12 a - => r:a stdin
        comm --check-order - b => r:b stdin?
        comm --total --output-delimiter=: -z a b => r:a r:b
        comm a => ! comm: an operand is missing
        comm -x a b => ! flag -x of comm is not annotated
        join a b => r:a r:b
        join -t: -1 2 -2 3 -o 1.1,2.2 -a 1 a - => r:a stdin?
        join -j1 2 a b => ! join: there are more operands than it takes
        join -o 1.1 2.2 a b => ! join: there are more operands than it takes
        join --header -e NULL a b => r:a r:b
        paste a b => r:a r:b
        paste => stdin
        paste - - - => stdin
        paste -s a b => r:a r:b split:2,3
        paste -sd, a b => r:a r:b split:2,3
        paste -d, a - => r:a stdin
        paste -d '\n' - f => r:f stdin
        nl a b => r:a r:b
        nl -ba -w3 -s': ' a => r:a
        nl --body-numbering=a - => stdin
        nl -b => ! nl: --body-numbering lacks a value
        nl -n ln f => r:f
        tac a b => r:a r:b split:1,2
        tac => stdin
        tac -s '' -b a b => r:a r:b split:4,5
        tac - a => r:a stdin
        tac -r --separator=x a => r:a
        rev a b => r:a r:b split:1,2
        rev => stdin
        rev - a => r:- r:a split:1,2
        rev -V => ! flag -V of rev is not annotated
        rev -0 a => ! flag -0 of rev is not annotated
        fold -w 20 a b => r:a r:b split:3,4
        fold -40s => stdin split:input
        fold --spaces --width=10 - => stdin split:input
        fold -c a => ! flag -c of fold is not annotated
        fold a => r:a
        expand -t 4 a b => r:a r:b
        expand -4,8 => stdin split:input
        expand -i a => r:a
        expand --tabs=1,2 - => stdin split:input
        unexpand -a a => r:a
        unexpand --first-only -t2 => stdin split:input
        unexpand -8 => stdin split:input
        tee a b => w:a w:b stdin
        tee => stdin
        tee -a log => w:log stdin
        tee - => w:- stdin
        tee -i a => ! flag -i of tee is not annotated
        tee --output-error=warn a => ! flag --output-error of tee is not annotated
        tee /dev/stderr => w:/dev/stderr stdin
        diff a b => R:a R:b
        diff -u a b => R:a R:b shows:times
        diff -U5 a - => R:a stdin shows:times
        diff -u --label a --label b a b => R:a R:b
        diff -c -L x a b => R:a R:b shows:times
        diff -rq d e => ! diff: follows symlinks in the directories, which may lead anywhere
        diff --brief - b => R:b stdin?
        diff -5 a b => R:a R:b shows:times
        diff --color=auto a b => R:a R:b tty:output
        diff -l a b => ! flag -l of diff is not annotated
        diff --from-file=a b c => R:a R:b R:c
        diff -x '*.o' -X ignore d e => r:ignore R:d R:e
        diff a => ! diff: an operand is missing
        diff -y -W 80 a b => R:a R:b
        diff --no-dereference -r a b => ! flag --no-dereference of diff is not annotated
        diff --old-line-format='%L' a b => R:a R:b
        cmp a b => r:a r:b
        cmp -s a => r:a stdin?
        cmp -l a b 10 20 => r:a r:b
        cmp -i 5:6 -n 100 a - => r:a stdin?
        cmp a b c d e => ! cmp: there are more operands than it takes
        "##,
    );
}

#[test]
fn sums() {
    check(
        r##"
        md5sum a b => r:a r:b split:1,2
        md5sum => stdin
        md5sum -c list => l:list cwd
        md5sum -c => ! md5sum: the files to check are named on standard input
        md5sum --check - => ! md5sum: the files to check are named on standard input
        sha256sum --tag a - => r:a stdin
        sha512sum --quiet -c a b => l:a l:b cwd
        sha1sum -bz a b => r:a r:b split:2,3
        b2sum -l 128 a b => r:a r:b split:3,4
        sha224sum a => r:a
        cksum a b => r:a r:b split:1,2
        cksum -a sha256 --untagged a => r:a
        cksum --debug a => ! flag --debug of cksum is not annotated
        cksum --check sums => l:sums cwd
        cksum -a bsd - => stdin
        "##,
    );
}

#[test]
fn compressors() {
    check(
        r##"
        gzip a => u:a tty:interactive shows:links
        gzip -f a => u:a
        gzip -k a b => u:a u:b tty:interactive shows:links
        gzip -c a b => r:a r:b tty:output
        gzip => stdin tty:output
        gzip -9 => stdin tty:output
        gzip -dc a.gz b.gz => r:a.gz r:b.gz tty:output
        gzip -dc a => ! gzip: the name lacks a suffix of gzip, which may be left out
        gzip -dcf a => r:a tty:output
        gzip -d a.gz => u:a.gz tty:interactive shows:links
        gzip -d a => ! gzip: the name lacks a suffix of gzip, which may be left out
        gzip - => stdin tty:output
        gzip - a => ! gzip: standard input among files
        gzip -l a.gz => r:a.gz
        gzip -lv a.gz => ! gzip: the list shows times, in this machine's time zone
        gzip -t a.gz => r:a.gz tty:output
        gzip -r d => ! flag -r of gzip is not annotated
        gzip --rsyncable a => ! flag --rsyncable of gzip is not annotated
        GZIP=-9 gzip a => ! gzip: GZIP is set
        gzip -S /x a => ! gzip: the suffix has a slash
        gzip --stdout --best a => r:a tty:output
        gzip -S .z -dc a.z => r:a.z tty:output
        gunzip a.gz => u:a.gz tty:interactive shows:links
        gunzip -c a.gz => r:a.gz tty:output
        gunzip => stdin? tty:output
        gunzip -f a.tgz => u:a.tgz
        gunzip a => ! gunzip: the name lacks a suffix of gzip, which may be left out
        gunzip -l a.gz => ! flag -l of gunzip is not annotated
        zcat a.gz b.gz => r:a.gz r:b.gz tty:output
        zcat => stdin? tty:output
        zcat a => ! zcat: the name lacks a suffix of gzip, which may be left out
        zcat -f a b.gz => r:a r:b.gz tty:output
        zcat - a.gz => r:a.gz stdin? tty:output
        GZIP=-v zcat a.gz => ! zcat: GZIP is set
        zcat -r d => ! flag -r of zcat is not annotated
        bzip2 a => u:a shows:links
        bzip2 -c a b => r:a r:b split:2,3 tty:output
        bzip2 -dc a.bz2 b.bz2 => r:a.bz2 r:b.bz2 tty:output
        bzip2 -dc - => stdin? tty:output
        bzip2 -dc - a.bz2 => ! bzip2: a dash among files is ignored
        bzip2 -zk a => ! flag -z of bzip2 is not annotated
        bzip2 -9kf a => u:a
        bzip2 --comp a => ! flag --comp of bzip2 is not annotated
        POSIXLY_CORRECT=1 bzip2 a -c => r:a tty:output
        bunzip2 -k a.bz2 => u:a.bz2 shows:links
        bunzip2 => stdin? tty:output
        bzcat a.bz2 => r:a.bz2 tty:output
        bzcat a.bz2 - => ! bzcat: a dash among files is ignored
        bzcat -t a.bz2 => ! flag -t of bzcat is not annotated
        bzcat => stdin? tty:output
        xz a => u:a shows:links
        xz -k -9e a => u:a
        xz -T0 a => ! xz: the output may depend on the number of processors
        xz -T1 -c a => r:a tty:output
        xz -T 4 -dc a.xz => r:a.xz tty:output
        xz -dc => stdin? tty:output
        xz -l a.xz => r:a.xz
        xz -lv a.xz b.xz => r:a.xz r:b.xz
        xz -v a => ! flag -v of xz is not annotated
        xz -l - => ! xz: a list is not made of standard input
        XZ_OPT=-9 xz -c a => ! xz: XZ_OPT is set
        xz --files=list => ! flag --files of xz is not annotated
        xz -dk a.xz => u:a.xz
        xz -t a.xz => r:a.xz tty:output
        xz - a => ! xz: standard input among files
        unxz a.xz => u:a.xz shows:links
        unxz -c a.xz => r:a.xz tty:output
        unxz -kf a.xz => u:a.xz
        XZ_DEFAULTS=-T0 unxz a.xz => ! unxz: XZ_DEFAULTS is set
        unxz => stdin? tty:output
        xzcat a.xz b.xz => r:a.xz r:b.xz tty:output
        xzcat => stdin? tty:output
        xzcat -T0 a.xz => r:a.xz tty:output
        xzcat -v a.xz => ! flag -v of xzcat is not annotated
        xzcat - a.xz => r:a.xz stdin? tty:output
        zstd a => ! zstd: it may ask before it replaces a file; with -f or -q it would not
        zstd -f a => u:a tty:output
        zstd -c a b => r:a r:b tty:output
        zstd -19 -T0 -c a => r:a tty:output
        zstd -T 0 -c a => r:0 r:a tty:output
        zstd -cT0d a => ! zstd: the letters after -T's number are options
        zstd => stdin tty:output
        zstd -o out -f a => u:out r:a tty:output shows:copiedowner
        zstd -o out a => ! zstd: it may ask before it replaces a file; with -f or -q it would not
        zstd -fo out a b => ! zstd: there are more operands than it takes
        zstd -o out -c a => ! flag -c of zstd is not annotated
        zstd --rm a => ! flag --rm of zstd is not annotated
        zstd -D dict -c a => r:dict r:a tty:output
        zstd -dc a.zst b.zst => r:a.zst r:b.zst tty:output
        zstd --long=27 --ultra -22 -c a => r:a tty:output
        zstd --adapt => ! flag --adapt of zstd is not annotated
        zstd -l a.zst => r:a.zst
        zstd -t a.zst => r:a.zst tty:output
        zstd -qfd a.zst => u:a.zst tty:output
        POSIXLY_CORRECT=1 zstd a -c => r:a tty:output
        zstdcat a.zst b.zst => r:a.zst r:b.zst split:1,2 tty:output
        zstdcat => stdin? tty:output
        zstdcat - a.zst => r:a.zst stdin? tty:output
        zstdcat -o x a.zst => ! flag -o of zstdcat is not annotated
        zstdcat --long=31 a.zst => r:a.zst tty:output
        unzstd -f a.zst => u:a.zst tty:output
        unzstd -c a.zst b.zst => r:a.zst r:b.zst tty:output
        unzstd a.zst => ! unzstd: it may ask before it replaces a file; with -f or -q it would not
        unzstd => stdin? tty:output
        unzstd --rm a.zst => ! flag --rm of unzstd is not annotated
        BZIP=-9 bzip2 -c a => ! bzip2: BZIP is set
        zstd -cf a b => r:a r:b split:2,3 tty:output
        zstd -q a => u:a tty:output
        "##,
    );
}

#[test]
fn jq() {
    check(
        r##"
        jq . => stdin? tty:output
        jq . a b => r:a r:b tty:output
        jq -r '.[] | select(.x > 1) | .y' a => r:a tty:output
        jq -n '1+1' => tty:output
        jq -n '[inputs]' => stdin? tty:output
        jq -n '[inputs]' a => r:a tty:output
        jq -n input_filename => tty:output
        jq --arg a b '$a' f => r:f tty:output
        jq --slurpfile a f '$a' g => r:f r:g tty:output
        jq -n --rawfile a f '$a' => r:f tty:output
        jq -f prog f => ! jq: the program is in a file
        jq env.HOME f => ! jq: the program looks at its environment
        jq '$ENV.HOME' f => ! jq: the program looks at its environment
        jq '.environment' f => r:f tty:output
        jq 'import "a" as a; .' f => ! jq: the program has parts in other files
        jq -L lib . f => ! flag -L of jq is not annotated
        jq '.t | fromdate' f => ! jq: jq counts times with this machine's time zone
        jq 'now' f => r:f tty:output varies
        jq --args '$ARGS' a => ! flag --args of jq is not annotated
        jq -C . f => r:f
        jq --indent 2 -c . - => stdin? tty:output
        jq . f -c => r:f tty:output
        POSIXLY_CORRECT=1 jq . f -c => r:f tty:output
        jq --raw . f => ! flag --raw of jq is not annotated
        jq => ! jq: an operand is missing
        jq input_filename f g => r:f r:g tty:output
        jq --argjson x 1 --arg y 2 -s . f => r:f tty:output
        "##,
    );
}

#[test]
fn zgrep() {
    check(
        r##"
        zgrep x a.gz => r:a.gz status:grep
        zgrep x a.gz b => r:a.gz r:b split:2,3 add:-H status:grep
        zgrep -c x a.gz b.gz => r:a.gz r:b.gz split:3,4 add:-H status:grep
        zgrep -h x a.gz b.gz => r:a.gz r:b.gz split:3,4 status:grep
        zgrep x => stdin? status:grep
        zgrep -e x -e y a.gz b.gz => r:a.gz r:b.gz split:5,6 add:-H status:grep
        zgrep -f pats a.gz => r:pats r:a.gz status:grep
        zgrep -f - a.gz => ! zgrep: the patterns come from standard input
        zgrep -A 3 x a.gz => r:a.gz status:grep
        zgrep --context=3 x a.gz => r:a.gz status:grep
        zgrep --context 3 a.gz => r:a.gz status:grep
        zgrep -r x d => ! flag -r of zgrep is not annotated
        zgrep -P x a.gz => ! flag -P of zgrep is not annotated
        GREP=egrep zgrep x a.gz => ! zgrep: GREP names another grep
        zgrep --color=always x a.gz => r:a.gz status:grep tty:output
        zgrep -5 x a.gz => r:a.gz status:grep
        zgrep --regexp x a.gz => r:a.gz status:grep
        "##,
    );
}

#[test]
fn bytes_and_columns() {
    check(
        r##"
        tsort => stdin
        tsort f => r:f
        tsort a b => ! tsort: there are more operands than it takes
        base64 f => r:f
        base64 -d => stdin?
        base64 -w0 - => stdin
        base32 --decode f => r:f
        base64 a b => ! base64: there are more operands than it takes
        shuf f => r:f varies
        shuf -n 1 => stdin? varies
        shuf -e a b => varies
        shuf -i 1-10 => varies
        shuf -o f f => w:f r:f varies
        shuf --random-source=r -n5 f => r:r r:f
        shuf -r -n 2 -z - => stdin? varies
        od -c f g => r:f r:g
        od -An -tx1 => stdin
        od -N 16 f => r:f
        od f +10 => ! od: the operand may be an offset
        od f 10 => ! od: the operand may be an offset
        od --strings f => r:f
        od -w16 -S 3 f => r:f
        column -t f => r:f tty:output
        column -s, -t => stdin tty:output
        column - f => r:- r:f tty:output
        column -c 80 f => r:f tty:output
        column -N a,b -J -t => stdin tty:output
        strings f g => r:f r:g split:1,2
        strings -n 8 - => ! strings: a dash alone is an option
        strings -8 f => r:f
        strings @opts => ! strings: the operand names a file of options
        strings -d f => ! flag -d of strings is not annotated
        strings -tx f => r:f
        strings => stdin
        pr f => ! pr: page headers show a time, in this machine's time zone
        pr -t f g => r:f r:g
        pr -2 -t => stdin
        pr -t +2 f => ! pr: a first page is given as an operand
        pr -T -n:5 -l 60 f => r:f
        pr -tm a b => r:a r:b
        pr -h title f => ! flag -h of pr is not annotated
        pr --pages=2 -t - => stdin?
        "##,
    );
}

/// Pieces of sed scripts: commands that are harmless alone, and what turns them into others.
const PIECES: [&str; 18] = [
    "s/a/b/", "s|a|b|", "s,[,],e,", "/a/", "y/ab/ba/", "i", "a\\", "e", "w f", "r f", "\n", ";",
    "}", "#", "tx", "[/]", "1", "p",
];

#[test]
fn sed_scripts_that_are_taken_name_no_files() {
    let library = Library::builtin();
    let mut taken = 0;
    for (first, second, third) in PIECES
        .iter()
        .flat_map(|a| PIECES.iter().flat_map(move |b| PIECES.iter().map(move |c| (a, b, c))))
    {
        let script = format!("{first}{second}{third}");
        let argv = ["sed", &script].map(OsString::from);
        if library.classify("sed", &argv, &|_| None).is_err() {
            continue;
        }
        taken += 1;
        let run =
            Command::new("sed").args(["--sandbox", &script]).stdin(Stdio::null()).output().unwrap();
        let errors = String::from_utf8_lossy(&run.stderr);
        assert!(!errors.contains("sandbox"), "{script:?}: {errors}");
    }
    assert!(taken > 500, "only {taken} scripts were taken");
}
