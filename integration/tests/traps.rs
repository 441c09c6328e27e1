//! Pipes, shared descriptions, closed descriptors, early-stopping readers: what
//! goes wrong first when a command runs elsewhere than its shell believes. Each
//! case must look the same under bash and posh: both outputs, status, files.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use posh_integration::oracle::{Door, Under};
use posh_integration::{Lab, LabSpec, Script};

use crate::arena::{Arena, Start, assert_none};
use crate::programs;

/// Name and script; `$D` is a directory with the files of [`fill`].
const CASES: &[(&str, &str)] = &[
    // Pipe ends with more than one holder.
    ("two-readers-of-a-pipe", r#"cat "$D/f" | { head -n 1; wc -l; }"#),
    ("two-writers-of-a-pipe", r#"(echo header; cat "$D/f") | sort | tail -n 3"#),
    ("group-of-writers", r#"{ cat "$D/a"; cat "$D/b"; } | tail -n 1"#),
    ("reader-is-the-shell", r#"grep needle "$D/f" | { read -r line; echo "$line"; cat; } | md5sum"#),
    ("writer-is-the-shell", r#"echo needle | grep -f - "$D/f" | wc -l"#),
    // Shared descriptions and offsets.
    ("head-then-cat", r#"{ head -n 1; cat; } < "$D/f" | md5sum"#),
    ("head-twice", r#"{ head -n 1; head -n 1; } < "$D/f""#),
    ("grep-m-then-head", r#"{ grep -m 1 needle; head -n 1; } < "$D/f""#),
    ("sed-q-then-cat", r#"{ sed 2q; cat; } < "$D/f" | md5sum"#),
    ("read-then-cat", r#"{ read -r first; echo "$first"; cat; } < "$D/f" | md5sum"#),
    ("descriptor-3", r#"exec 3< "$D/f"; head -n 1 <&3; head -n 1 <&3; exec 3<&-"#),
    ("outputs-in-turn", r#"{ grep needle "$D/a"; grep -c . "$D/b"; cat "$D/a"; } > "$D/out"; cat "$D/out""#),
    ("output-of-a-loop", r#"for f in "$D"/part-*; do grep needle "$f"; done > "$D/out"; cat "$D/out""#),
    (
        "writers-at-once",
        r#"for f in "$D"/part-*; do grep needle "$f" & done > "$D/out"; wait; sort "$D/out"; wc -c < "$D/out"; rm "$D/out""#,
    ),
    ("descriptor-5", r#"exec 5> "$D/out"; grep needle "$D/f" >&5; grep -c . "$D/f" >&5; exec 5>&-; cat "$D/out""#),
    ("shell-writes-too", r#"exec > "$D/out"; echo one; cat "$D/a"; echo two; cat "$D/b""#),
    ("append", r#"echo one > "$D/out"; grep needle "$D/f" >> "$D/out"; echo two >> "$D/out"; cat "$D/out""#),
    ("both-outputs-in-one-file", r#"cat "$D/a" "$D/absent" "$D/b" > "$D/out" 2>&1; cat "$D/out""#),
    ("errors-down-the-pipe", r#"cat "$D/a" "$D/absent" "$D/b" 2>&1 | tail -n 4"#),
    // stdin is read only by those who read it.
    ("stdin-of-a-loop", r#"while read -r f; do grep -c needle "$D/$f"; done < "$D/list""#),
    ("stdin-of-a-loop-of-pipelines", r#"while read -r f; do cat "$D/$f" | wc -l; done < "$D/list""#),
    ("stdin-of-a-loop-from-a-pipe", r#"cat "$D/list" | while read -r f; do grep -c needle "$D/$f"; done"#),
    ("stdin-by-a-dash", r#"cat - "$D/a" < "$D/b" | md5sum"#),
    ("here-document", "cat <<E | grep needle - \"$D/a\"\nneedle of the shell\nhay\nE"),
    ("here-string", r#"grep -c needle - "$D/a" <<< needle"#),
    // Closed descriptors.
    ("closed-stdin", r#"cat <&-; echo $?"#),
    ("closed-stdin-and-a-file", r#"cat "$D/f" <&- | wc -c"#),
    ("closed-stdout", r#"cat "$D/f" >&-; echo $?"#),
    ("closed-stdout-of-an-empty-file", r#"cat "$D/empty" >&-; echo $?"#),
    ("closed-stderr", r#"cat "$D/absent" 2>&-; echo $?"#),
    ("all-closed", r#"cat "$D/f" <&- >&- 2>&-; echo $?"#),
    // Readers that stop early, writers that notice.
    ("yes-head", r#"yes | head -n 1; echo "${PIPESTATUS[@]}""#),
    ("cat-head", r#"cat "$D/f" | head -n 1"#),
    ("large-cat-head", r#"cat "$D/large" | head -n 1; echo "${PIPESTATUS[@]}""#),
    ("middle-cat-head", r#"cat "$D/middle" | head -n 1; echo "${PIPESTATUS[@]}""#),
    ("large-cat-grep-q", r#"cat "$D/large" | grep -q needle; echo "${PIPESTATUS[@]}""#),
    ("large-cat-true", r#"cat "$D/large" | true; echo "${PIPESTATUS[1]}""#),
    ("ignored-sigpipe", r#"trap '' PIPE; cat "$D/large" | head -n 1; echo "${PIPESTATUS[@]}""#),
    ("ignored-sigpipe-yes", r#"trap '' PIPE; yes | head -n 1; echo "${PIPESTATUS[@]}""#),
    ("head-c", r#"head -c 100 "$D/large" | md5sum"#),
    // Input is output.
    ("input-is-output", r#"cp "$D/b" "$D/all"; cat "$D/a" "$D/all" >> "$D/all"; echo $?; cat "$D/all""#),
    ("stdin-is-stdout", r#"cat < "$D/a" >> "$D/a"; echo $?; cat "$D/a""#),
    ("sort-in-place", r#"sort -r "$D/f" -o "$D/f"; head -n 1 "$D/f""#),
    ("read-after-write", r#"grep needle "$D/f" > "$D/out"; wc -l < "$D/out"; sort "$D/out" | tail -n 1"#),
    ("write-after-write", r#"echo one > "$D/out"; cat "$D/a" > "$D/out"; cat "$D/out"; ls -1 "$D""#),
    // Statuses.
    ("pipefail", r#"set -o pipefail; cat "$D/absent" | sort; echo $?"#),
    ("statuses", r#"cat "$D/a" | grep absent-word | wc -l; echo "${PIPESTATUS[@]}""#),
    ("errexit", r#"set -e; grep -q absent-word "$D/f"; echo not reached"#),
    ("negation", r#"! grep -q absent-word "$D/f"; echo $?"#),
    ("some-absent", r#"cat "$D"/part-* "$D/absent" | wc -l; echo "${PIPESTATUS[@]}""#),
    ("wc-of-several", r#"wc -l "$D/f" "$D/a" "$D/absent"; echo $?"#),
    ("a-directory", r#"cat "$D/dir"; echo $?"#),
    ("bad-flag", r#"grep --no-such-flag x "$D/f"; echo $?"#),
    ("full-device", r#"cat "$D/f" > /dev/full; echo $?"#),
    // bash says the number of the process here, so what it says is left out.
    ("file-size-limit", r#"{ (ulimit -f 8; cat "$D/large" > "$D/out"); } 2> ~/said; echo $?; wc -c < "$D/out""#),
    // Names and directories.
    ("odd-names", r#"cat "$D/a name" "$D/"$'new\nline' "$D/"$'\xff\xfe'; grep -c needle "$D/a name""#),
    ("names-are-printed", r#"grep -l needle "$D"/part-*; grep -c needle "$D/a" "$D/b""#),
    ("deep-directory", r#"cd "$D/dir" && cat ../f | head -n 1 && grep -l needle ../part-*"#),
    ("recursive", r#"cd "$D" && grep -r needle dir | sort"#),
    ("link-within", r#"cat "$D/link" | md5sum"#),
    ("link-to-the-workstation", r#"echo mine > ~/own; cat "$D/own" | tr a-z A-Z"#),
    ("dot-dot-out", r#"echo mine > ~/own; cat "$D/../../../../home/user/own" | tr a-z A-Z"#),
    // Environment.
    ("locale", r#"LC_ALL=C sort "$D/f" | head -n 2; LC_ALL=C.UTF-8 sort "$D/f" | head -n 2"#),
    ("umask", r#"umask 077; grep needle "$D/f" > "$D/out"; tee "$D/second" < "$D/a" | wc -l"#),
    ("tee-and-compare", r#"tee "$D/copy" < "$D/f" | wc -l; cmp "$D/copy" "$D/f""#),
    ("tee-to-stderr", r#"cat "$D/a" | tee /dev/stderr | wc -l"#),
    ("long-output", r#"cat "$D/large" | md5sum; cat "$D/large" > ~/copy; md5sum < ~/copy"#),
    ("long-pipeline", r#"cat "$D/f" | sort | uniq -c | sort -rn | head -n 3 | tr -s ' ' | cut -d ' ' -f 2-"#),
];

/// The files of a case.
fn fill(directory: &Path) -> io::Result<()> {
    let put = |name: &str, text: &[u8]| fs::write(directory.join(name), text);
    put("f", lines(4_000).as_bytes())?;
    // More than a default pipe holds, and more than any pipe holds.
    put("middle", lines(12_000).as_bytes())?;
    put("large", lines(120_000).as_bytes())?;
    put("a", b"alpha\nneedle in a\nomega\n")?;
    put("b", b"beta\nneedle in b\nno end of line")?;
    put("empty", b"")?;
    put("list", b"a\nb\nf\nempty\n")?;
    put("a name", b"needle with a blank\n")?;
    put("new\nline", b"new line\n")?;
    fs::write(directory.join(std::ffi::OsStr::from_bytes(b"\xff\xfe")), "not UTF-8\n")?;
    for part in 0..4 {
        put(&format!("part-{part}"), lines(100 + part).as_bytes())?;
    }
    fs::create_dir(directory.join("dir"))?;
    put("dir/deep", b"a deep needle\n")?;
    std::os::unix::fs::symlink("f", directory.join("link"))?;
    // There only on the workstation.
    std::os::unix::fs::symlink("/home/user/own", directory.join("own"))
}

fn lines(count: usize) -> String {
    let line = |i: usize| match i % 100 {
        7 => format!("line {i} with a needle\n"),
        _ => format!("line {} of hay\n", i * 7919 % 10_007),
    };
    (0..count).map(line).collect()
}

fn try_all(start: Start) {
    let arena = Arena::new(fill);
    let faults = CASES.iter().filter_map(|(name, text)| arena.attempt(name, &Script::new(*text), start).err());
    assert_none(&faults.collect::<Vec<_>>(), CASES.len());
}

#[test]
fn with_absolute_paths() {
    try_all(Start::Home);
}

#[test]
fn from_within_the_mount() {
    try_all(Start::Inside);
}

/// A shell knows by heart where it has found a command, so a job must find it there
/// after its shell has ended.
#[test]
fn a_job_that_outlives_its_shell() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    fs::write(lab.data(1).join("a"), "one\ntwo\n").unwrap();
    for door in [Door::Path, Door::Hook] {
        let text = r#"rm -f ~/go ~/said; mkfifo ~/go ~/said; wc -l /mnt/s1/a
            { { read -r x; wc -l /mnt/s1/a; } < ~/go > ~/said 2>&1; } > /dev/null 2>&1 &"#;
        let outcome = Script::new(text).door(door).run(&lab.workstation, Under::Posh).unwrap();
        assert_eq!(String::from_utf8_lossy(&outcome.stdout), "2 /mnt/s1/a\n", "{outcome}");
        fs::write(lab.workstation.path("/home/user/go"), "go\n").unwrap();
        assert_eq!(fs::read_to_string(lab.workstation.path("/home/user/said")).unwrap(), "2 /mnt/s1/a\n");
    }
}
