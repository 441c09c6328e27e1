//! Verification finds files that commands use although their annotations do not name them, and
//! nothing else.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, chown},
    path::Path,
    process::{Command, Output, Stdio},
};

/// A `sort` whose annotation lacks that two of its options name files.
const FORGETFUL: &str = "\
sort:
- FLAGS:
  - {short: R}
  OPTPARAMS:
  - {long: random-source, type: string, size: 1}
  - {short: o, type: string, size: 1}
  PARAMS:
  - {type: input_file, size: list, or_stdin: true}
";

/// A `stat` that uses no names, according to its annotation.
const BLIND: &str =
    "stat:\n- OPTPARAMS:\n  - {short: c, type: string, size: 1}\n  PARAMS:\n  - {size: list}\n";

/// A directory with files to use, and one beside it with annotations.
struct Site {
    files: tempfile::TempDir,
    annotations: tempfile::TempDir,
}

impl Site {
    fn new() -> Self {
        let site =
            Self { files: tempfile::tempdir().unwrap(), annotations: tempfile::tempdir().unwrap() };
        let write =
            |name: &str, content: &str| fs::write(site.files.path().join(name), content).unwrap();
        write("a", "2 two\n1 one\n3 three\n");
        write("b", "1 uno\n2 dos\n");
        write("keys", "0123456789012345678901234567890123456789");
        write("j.json", "{\"a\": [1, 2]}\n");
        fs::create_dir_all(site.files.path().join("d/e")).unwrap();
        write("d/e/f", "deep\n");
        std::os::unix::fs::symlink("a", site.files.path().join("link")).unwrap();
        site
    }

    fn annotate(self, file: &str, text: &str) -> Self {
        fs::write(self.annotations.path().join(file), text).unwrap();
        self
    }

    fn program(&self) -> Command {
        self.prepare(Command::new(env!("CARGO_BIN_EXE_posh-executor")))
    }

    fn prepare(&self, mut command: Command) -> Command {
        command.arg("verify").arg("--annotations").arg(self.annotations.path());
        command.current_dir(self.files.path()).stdin(Stdio::null());
        command
    }

    fn verify(&self, words: &[&str]) -> Verdict {
        Verdict::of(self.program().arg("--").args(words).output().unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.files.path().canonicalize().unwrap().join(name).display().to_string()
    }
}

#[derive(Debug)]
struct Verdict {
    report: String,
    output: String,
    status: Option<i32>,
}

impl Verdict {
    fn of(output: Output) -> Self {
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        Self {
            report: text(&output.stdout),
            output: text(&output.stderr),
            status: output.status.code(),
        }
    }

    #[track_caller]
    fn expect(&self, status: i32, report: &str) {
        assert_eq!((self.status, self.report.as_str()), (Some(status), report), "{}", self.output);
    }
}

#[test]
fn a_file_that_an_annotation_forgets_is_told_and_denied() {
    let site = Site::new().annotate("sort.yaml", FORGETFUL);
    let keys = site.path("keys");
    let verdict = site.verify(&["sort", "-R", &format!("--random-source={keys}"), "a"]);
    let said = format!(
        "sort: read {keys}, which no word of its annotation names (option --random-source?)"
    );
    verdict.expect(1, &format!("{said}\ncommands verified: 1; uses that no annotation names: 1\n"));
    assert!(verdict.output.contains("Permission denied"), "{}", verdict.output);
    let out = site.path("out");
    let said = format!("sort: made {out}, which no word of its annotation names (option -o?)");
    site.verify(&["sort", "a", "-o", "out"])
        .expect(1, &format!("{said}\ncommands verified: 1; uses that no annotation names: 1\n"));
    assert!(!Path::new(&out).exists());
    // The annotation that ships knows the second, and does not take the first.
    let site = Site::new();
    site.verify(&["sort", "a", "-o", "out"])
        .expect(0, "commands verified: 1; each used what its annotation names, and no more\n");
    let refused = "not verified: flag -R of sort is not annotated\n\
                   no command was verified: none that ran is understood by an annotation\n";
    site.verify(&["sort", "-R", "a"]).expect(1, refused);
}

#[test]
fn what_is_only_looked_at_is_told_and_goes_on() {
    let site = Site::new().annotate("stat.yaml", BLIND);
    let verdict = site.verify(&["stat", "-c", "%s", "d/e/f"]);
    let said = format!(
        "stat: looked at {}, which no word of its annotation names (word 3?)",
        site.path("d/e/f")
    );
    verdict.expect(1, &format!("{said}\ncommands verified: 1; uses that no annotation names: 1\n"));
    assert_eq!(verdict.output, "5\n");
}

#[test]
fn each_command_of_a_line_has_its_own_files() {
    let site = Site::new().annotate("stat.yaml", BLIND);
    let verdict = site.verify(&["cat a | sort > sorted; (cd d && stat -c %s e/f); wc -l sorted"]);
    let said = format!(
        "stat: looked at {}, which no word of its annotation names (word 3?)",
        site.path("d/e/f")
    );
    verdict.expect(1, &format!("{said}\ncommands verified: 4; uses that no annotation names: 1\n"));
    assert_eq!(verdict.output, "5\n3 sorted\n");
}

#[test]
fn a_file_that_is_named_for_another_use_is_told() {
    let site = Site::new()
        .annotate("touch.yaml", "touch:\n- PARAMS:\n  - {type: input_file, size: list}\n");
    let a = site.path("a");
    let said = ["wrote to", "changed"]
        .map(|deed| format!("touch: {deed} {a}, which its annotation names, but not for that\n"));
    site.verify(&["touch", "a"]).expect(
        1,
        &format!("{}commands verified: 1; uses that no annotation names: 2\n", said.concat()),
    );
}

#[test]
fn threads_children_and_signals_are_left_as_they_are() {
    let site = Site::new();
    // Stopped by job control and continued, killed by a signal without a name, waited for, and left
    // behind.
    let line = "sh -c 'kill -STOP $$; echo continued; : > done' & \
                until test -e done; do kill -CONT $!; done; wait; \
                sh -c 'kill -40 $$'; echo $?; cat a | tail -n 1; sleep 1000 &";
    let verdict = site.verify(&[line]);
    verdict.expect(0, "commands verified: 2; each used what its annotation names, and no more\n");
    assert!(
        verdict.output.starts_with("continued\n") && verdict.output.ends_with("168\n3 three\n"),
        "{verdict:?}"
    );
    // Threads (zstd, sort) and children (tar) belong to their command.
    let line = "seq 200000 > big; sort --parallel=4 -S 1M -n big | tail -n 1; tar -czf t.tgz big; zstd -q -k big; ls big.zst";
    let verdict = site.verify(&[line]);
    verdict.expect(0, "commands verified: 5; each used what its annotation names, and no more\n");
}

#[test]
fn a_copy_takes_the_changes_and_a_file_has_the_lines() {
    let site = Site::new();
    let lines = site.annotations.path().join("lines");
    fs::write(&lines, "# remark\n\ncp a copied\n  sed -i s/one/ONE/ a\nfile d/e/f\n").unwrap();
    let output = site
        .program()
        .arg("--file")
        .arg(&lines)
        .arg("--in")
        .arg(site.files.path())
        .output()
        .unwrap();
    Verdict::of(output)
        .expect(0, "commands verified: 3; each used what its annotation names, and no more\n");
    assert!(!site.files.path().join("copied").exists());
    assert!(fs::read_to_string(site.files.path().join("a")).unwrap().contains("one"));
}

#[test]
fn an_ordinary_user_needs_no_rights() {
    const USER: u32 = 23456;
    let site = Site::new().annotate("sort.yaml", FORGETFUL);
    let bin = tempfile::tempdir().unwrap();
    let copy = bin.path().join("posh-executor");
    fs::copy(env!("CARGO_BIN_EXE_posh-executor"), &copy).unwrap();
    for directory in [bin.path(), site.files.path(), site.annotations.path()] {
        fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).unwrap();
        chown(directory, Some(USER), Some(USER)).unwrap();
    }
    let user = USER.to_string();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]).arg(&copy);
    let output =
        site.prepare(command).args(["--", "sort a -o out; cat b > c; wc -l c"]).output().unwrap();
    let said = format!(
        "sort: made {}, which no word of its annotation names (option -o?)",
        site.path("out")
    );
    Verdict::of(output)
        .expect(1, &format!("{said}\ncommands verified: 3; uses that no annotation names: 1\n"));
}

/// Lines for every command that ships annotated, with the number of its invocations to be verified.
const LINES: &[(usize, &str)] = &[
    (2, "awk '{print $1}' a; awk -v n=1 '{print n}' a b"),
    (2, "base64 a > a.64; base64 -d a.64"),
    (4, "bzip2 -k a; bzip2 -dc a.bz2; bunzip2 -kf a.bz2; bzcat a.bz2"),
    (2, "cat a b; cat -n link"),
    (2, "chmod 600 a; chmod -R go-w d"),
    (5, "cksum a; md5sum a b; b2sum a; sha1sum a; sha224sum < a"),
    (4, "sha256sum a; sha384sum a; sha512sum a; base32 a"),
    (3, "mawk 1 a; zstd -qk a; unzstd -qfk a.zst"),
    (2, "xz -k b; xzcat b.xz"),
    (2, "cmp a a; cmp a b || :"),
    (1, "column -t a"),
    (1, "comm -12 b b"),
    (4, "cp a c; cp -r d d2; cp -p a b d; cp -t d a"),
    (2, "cut -d' ' -f1 a; cut -c2 a"),
    (2, "diff a a; diff a b || :"),
    (2, "du -s d; du -a d || :"),
    (3, "egrep one a; fgrep one a; grep -f pattern a"),
    (4, "expand a; unexpand a; fold -w 3 a; nl a"),
    (1, "file a"),
    (3, "find d -name f; find . -newer b; find . -type f -size +0"),
    (4, "grep one a b; grep -r deep d; grep -rl deep .; grep -c one < a"),
    (5, "gzip -k a; gzip -dc a.gz; zcat a.gz; gunzip -kf a.gz; zgrep one a.gz"),
    (3, "head -n 1 a b; tail -n 1 a; tail -c 2 a"),
    (1, "join b b"),
    (2, "jq .a j.json; jq --slurpfile x j.json '$x' j.json"),
    (6, "ln a hard; ln -s a soft; ln -sf b soft; ln d/e/f; ln -t d a; ls -1 d"),
    (3, "ls; ls -R d; ls -d d link"),
    (3, "mkdir m; mkdir -p m/n/o; mkdir -m 700 p"),
    (4, "mv a c; mv -t d c; mv d/c .; mv d d3"),
    (2, "od -c a; paste a b"),
    (2, "pr -t a; rev a"),
    (4, "rm b; rm -f b; rm -r d; rm link"),
    (2, "rmdir x; rmdir y/z"),
    (3, "sed -n 1p a; sed -i s/one/1/ a; sed -i.bak s/two/2/ a"),
    (1, "shuf -n 1 a > /dev/null || :"),
    (5, "sort a b; sort -o out a; sort -m b b; sort -u -k1,1 a; sort -T d a"),
    (2, "stat -c %s a; stat --printf '%n' d"),
    (1, "strings a"),
    (2, "tac a; tee t1 t2 < a"),
    (5, "tar -cf t.tar a d; tar -tf t.tar; tar -xf t.tar; mkdir x2; tar -xf t.tar -C x2"),
    (3, "tar -czf t.tgz -C d e; tar -xzf t.tgz; tar --zstd -cf t.zst a"),
    (3, "touch new; touch -r a new; touch a b"),
    (1, "tr a-z A-Z < a"),
    (1, "tsort b"),
    (2, "uniq a; uniq -c a out"),
    (2, "wc a b; wc -l < a"),
    (3, "xz -k a; xz -dc a.xz; unxz -kf a.xz"),
    (3, "zstd -q -k a; zstd -q -dc a.zst; zstdcat a.zst"),
    (3, "convert r.ppm -resize 2x2 s.png; identify r.ppm; mogrify -resize 3x3 r.ppm"),
    (
        6,
        "cd repo; git status; git add c; git -c user.name=x -c user.email=x commit -qm x; git log; git diff; git show",
    ),
];

/// Every use of the first stays on the workstation; the others are analysed as awk and gunzip, and
/// do not exist on every machine.
const NOT_RUN: [&str; 5] = ["dd", "gawk", "nawk", "original-awk", "uncompress"];

#[test]
fn every_command_that_ships_annotated_uses_what_its_annotation_names() {
    let mut wrong = Vec::new();
    std::thread::scope(|scope| {
        let runs: Vec<_> = LINES
            .iter()
            .map(|(count, line)| scope.spawn(|| line_as_expected(*count, line)))
            .collect();
        wrong.extend(runs.into_iter().filter_map(|run| run.join().unwrap()));
    });
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    let words: Vec<&str> = LINES.iter().flat_map(|(_, line)| line.split([' ', ';'])).collect();
    let library = posh_annotations::Library::builtin();
    let untried: Vec<&str> = library
        .commands()
        .filter(|name| !words.contains(name) && !NOT_RUN.contains(name))
        .collect();
    assert!(untried.is_empty(), "no line runs {untried:?}");
}

/// Runs one line in a directory of its own; returns the difference from the expected result, if
/// any.
fn line_as_expected(count: usize, line: &str) -> Option<String> {
    let site = Site::new();
    let prepared =
        Command::new("sh").args(["-euc", SCENE]).current_dir(site.files.path()).status().unwrap();
    assert!(prepared.success());
    let home = site.files.path();
    let output = site
        .program()
        .arg("--")
        .arg(line)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("HOME", home)
        .output();
    let Verdict { report, output, .. } = Verdict::of(output.unwrap());
    let expected =
        format!("commands verified: {count}; each used what its annotation names, and no more\n");
    (report != expected).then(|| format!("{line}\n  {report}  {output}"))
}

/// Files for the lines, besides those of every site.
const SCENE: &str = "mkdir -p x y/z; echo one > pattern; printf 'P3 2 2 255 1 2 3 1 2 3 1 2 3 1 2 3\\n' > r.ppm
git init -q repo; cd repo; echo x > a; git add a; git -c user.name=x -c user.email=x commit -qm x; echo y > c";
