//! What people write in shells: loops, functions, substitutions, tests, jobs. Every
//! case must look the same as in the shell itself; where a case names commands,
//! those must have run on the server.

use std::fs;
use std::io;
use std::path::Path;

use posh_integration::{Door, Script, Shell};

use crate::arena::{Arena, Start, assert_none, kept_here};

/// Name, script, and the commands that must all have been offloaded.
type Case = (&'static str, &'static str, &'static [&'static str]);

/// In the language that bash, dash, zsh share.
const COMMON: &[Case] = &[
    ("pipeline", r#"cat "$D/f" | grep needle | sort | wc -l"#, &["cat", "grep", "sort", "wc"]),
    ("simple", r#"grep -c needle "$D/f""#, &["grep"]),
    ("redirects", r#"sort < "$D/f" > "$D/sorted"; tail -n 1 "$D/sorted""#, &["sort", "tail"]),
    ("for", r#"for f in "$D"/part-*; do grep -c needle "$f"; done"#, &["grep"]),
    ("while", r#"i=0; while [ $i -lt 3 ]; do grep -c needle "$D/part-$i"; i=$((i + 1)); done"#, &["grep"]),
    ("function", r#"count() { cat "$1" | grep -c needle; }; count "$D/f"; count "$D/part-1""#, &["cat", "grep"]),
    ("substitution", r#"n=$(grep -c needle "$D/f"); echo "n=$n""#, &["grep"]),
    ("substitution-of-a-pipeline", r#"echo "$(cat "$D/f" | sort | head -n 1)""#, &["cat", "sort", "head"]),
    (
        "nested-substitution",
        r#"echo "$(head -n "$(wc -l < "$D/part-0")" "$D/f" | tail -n 1)""#,
        &["wc", "head", "tail"],
    ),
    ("if", r#"if grep -q needle "$D/f"; then echo yes; else echo no; fi"#, &["grep"]),
    ("and-or", r#"grep -q absent-word "$D/f" || grep -c needle "$D/f" && echo done"#, &["grep"]),
    ("case", r#"case $(head -n 1 "$D/f") in line*) echo a line;; *) echo other;; esac"#, &["head"]),
    ("here-document", "cat <<E | grep -c needle - \"$D/f\"\na needle\nE", &["grep"]),
    ("here-document-into-the-mount", "cat > \"$D/new\" <<E\none\ntwo\nE\nwc -l < \"$D/new\"", &["wc"]),
    ("background", r#"grep -c needle "$D/f" > "$D/n" & wait; cat "$D/n""#, &["grep", "cat"]),
    ("wait-status", r#"grep -q absent-word "$D/f" & wait $!; echo $?"#, &["grep"]),
    ("subshell", r#"(cd "$D" && cat f | wc -l); cat "$D/f" | wc -l"#, &["cat", "wc"]),
    ("find-xargs", r#"find "$D/tree" -name '*.txt' | sort | xargs grep -l needle"#, &["find", "sort", "grep"]),
    ("find-xargs-many", r#"find "$D/tree" -type f -print0 | xargs -0 -n 5 grep -h needle | sort"#, &["find", "grep"]),
    ("find-exec", r#"find "$D/tree" -name '*.txt' -exec grep -c needle {} + | sort"#, &["grep"]),
    ("eval", r#"eval 'cat "$D/f" | wc -l'"#, &["cat", "wc"]),
    ("alias-of-nothing", r#"command grep -c needle "$D/f""#, &["grep"]),
    ("env", r#"LC_ALL=C sort "$D/f" | head -n 1; env LC_ALL=C sort "$D/f" | tail -n 1"#, &["sort", "head", "tail"]),
    ("script-stdin", r#"printf 'cat "%s/f" | wc -l\n' "$D" | sh"#, &["cat", "wc"]),
    ("traps", r#"trap 'echo bye' EXIT; cat "$D/f" | wc -l"#, &["cat", "wc"]),
    ("exec", r#"exec grep -c needle "$D/f""#, &["grep"]),
];

/// In bash only.
const BASH: &[Case] = &[
    ("comm", r#"comm -12 <(sort "$D/part-0") <(sort "$D/part-1") | wc -l"#, &["sort", "comm", "wc"]),
    ("diff", r#"diff <(sort "$D/part-0") <(sort "$D/part-1"); echo $?"#, &["sort"]),
    (
        "output-substitution",
        r#"cat "$D/f" | tee >(wc -l > "$D/n") | wc -c; wait; until [ -s "$D/n" ]; do :; done"#,
        &["cat"],
    ),
    ("arrays", r#"files=("$D"/part-*); cat "${files[@]}" | wc -l"#, &["cat", "wc"]),
    (
        "read-from-substitution",
        r#"while read -r l; do echo "$l"; done < <(grep needle "$D/f" | head -n 2)"#,
        &["grep", "head"],
    ),
    ("mapfile", r#"mapfile -t l < <(sort "$D/f"); echo "${#l[@]}""#, &["sort"]),
    ("time", r#"TIMEFORMAT=; time cat "$D/f" | wc -l"#, &["cat", "wc"]),
    ("coprocess", r#"coproc grep -c needle "$D/f"; read -r n <&"${COPROC[0]}"; echo "$n"; wait"#, &["grep"]),
    ("lastpipe", r#"shopt -s lastpipe; cat "$D/f" | read -r l; echo "$l""#, &[]),
    ("both-outputs", r#"cat "$D/f" "$D/absent" |& grep -c needle"#, &["cat", "grep"]),
    ("select-status", r#"cat "$D/f" | grep absent-word | cat; echo "${PIPESTATUS[*]}""#, &["cat", "grep"]),
    ("xtrace", r#"set -x; cat "$D/a"; n=$(wc -l < "$D/f")"#, &["cat", "wc"]),
];

/// In zsh only.
const ZSH: &[Case] = &[
    ("comm", r#"comm -12 <(sort "$D/part-0") <(sort "$D/part-1") | wc -l"#, &["sort", "comm", "wc"]),
    ("statuses", r#"cat "$D/f" | grep absent-word | wc -l; echo $pipestatus"#, &["cat", "grep", "wc"]),
    ("temporary-file", r#"cat =(sort "$D/f") | wc -l"#, &["sort"]),
    ("several-outputs", r#"grep needle "$D/f" > "$D/x" > "$D/y"; cmp "$D/x" "$D/y" && wc -l < "$D/y""#, &[]),
];

/// In fish, whose language is its own.
const FISH: &[Case] = &[
    ("pipeline", r#"cat "$D/f" | command grep needle | sort | wc -l"#, &["cat", "grep", "sort", "wc"]),
    ("for", r#"for f in $D/part-*; command grep -c needle $f; end"#, &["grep"]),
    ("function", r#"function count; cat $argv[1] | command grep -c needle; end; count "$D/f""#, &["cat", "grep"]),
    ("substitution", r#"set n (command grep -c needle "$D/f"); echo "n=$n""#, &["grep"]),
    ("if", r#"if command grep -q needle "$D/f"; echo yes; else; echo no; end"#, &["grep"]),
    ("and-or", r#"command grep -q absent-word "$D/f"; or echo none; and echo more"#, &["grep"]),
    ("process-substitution", r#"comm -12 (sort "$D/part-0" | psub) (sort "$D/part-1" | psub) | wc -l"#, &["sort"]),
    ("find-xargs", r#"find "$D/tree" -name '*.txt' | sort | xargs grep -l needle"#, &["find", "sort", "grep"]),
    ("statuses", r#"cat "$D/f" | command grep absent-word | wc -l; echo $pipestatus"#, &["cat", "grep", "wc"]),
    ("redirects", r#"sort < "$D/f" > "$D/sorted"; tail -n 1 "$D/sorted""#, &["sort", "tail"]),
    ("background", r#"command grep -c needle "$D/f" > "$D/n" &; wait; cat "$D/n""#, &["grep", "cat"]),
    // fish's own function around grep, which tries grep first.
    ("grep-function", r#"cat "$D/f" | grep needle | wc -l; grep -c needle "$D/f""#, &[]),
    ("block", r#"begin; cat "$D/a"; cat "$D/f"; end | wc -l"#, &["cat"]),
];

fn fill(directory: &Path) -> io::Result<()> {
    let lines = |count: usize, step: usize| -> String {
        let line = |i: usize| {
            format!("line {} with {}\n", i * step % 1009, if i.is_multiple_of(50) { "a needle" } else { "hay" })
        };
        (0..count).map(line).collect()
    };
    fs::write(directory.join("f"), lines(3_000, 7919))?;
    fs::write(directory.join("a"), "one\ntwo\n")?;
    for part in 0..4 {
        fs::write(directory.join(format!("part-{part}")), lines(120 + part, 31 + part))?;
    }
    for number in 0..20 {
        let below = directory.join(format!("tree/{}", number % 4));
        fs::create_dir_all(&below)?;
        fs::write(below.join(format!("{number}.txt")), lines(40 + 10 * number, number + 3))?;
    }
    Ok(())
}

/// Everything of `tables` in one shell, from outside of the mount, through one door.
fn try_all(shell: Shell, door: Door, tables: &[&[Case]]) {
    let arena = Arena::new(fill);
    let mut faults = Vec::new();
    let cases: Vec<_> = tables.iter().copied().flatten().collect();
    for (name, text, offloaded) in &cases {
        let script = Script::new(*text).shell(shell).door(door);
        match arena.attempt(name, &script, Start::Home) {
            Err(fault) => faults.push(fault),
            Ok(report) => faults.extend(kept_here(&report, offloaded).map(|f| format!("{name}: {f} in\n  {text}"))),
        }
    }
    assert_none(&faults, cases.len());
}

#[test]
fn bash() {
    try_all(Shell::Bash, Door::Hook, &[COMMON, BASH]);
}

#[test]
fn bash_with_shims() {
    try_all(Shell::Bash, Door::Path, &[COMMON, BASH]);
}

#[test]
fn dash() {
    try_all(Shell::Dash, Door::Hook, &[COMMON]);
}

#[test]
fn dash_with_shims() {
    try_all(Shell::Dash, Door::Path, &[COMMON]);
}

#[test]
fn zsh() {
    try_all(Shell::Zsh, Door::Hook, &[COMMON, ZSH]);
}

#[test]
fn zsh_with_shims() {
    try_all(Shell::Zsh, Door::Path, &[COMMON, ZSH]);
}

#[test]
fn fish() {
    try_all(Shell::Fish, Door::Hook, &[FISH]);
}

#[test]
fn fish_with_shims() {
    try_all(Shell::Fish, Door::Path, &[FISH]);
}
