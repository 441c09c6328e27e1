//! The ways into the stage program. Through the exec hook nothing that a user can
//! look at differs from the shell alone, and whatever executes a command is seen; the
//! shims on PATH have the limits that docs/doors.md names.

use std::fs;
use std::io;
use std::path::Path;

use posh_integration::explain::ExplainReport;
use posh_integration::oracle::Under;
use posh_integration::{Door, Lab, LabSpec, Script};

use crate::arena::{Arena, assert_none, kept_here};
use crate::programs;

/// Name, script, and the commands that must all have been offloaded.
type Case = (&'static str, &'static str, &'static [&'static str]);

/// Where a user, or a script, could see that posh is there.
const LOOKS: &[Case] = &[
    ("env", "env; sh -c env; env -i env", &[]),
    (
        "env-as-root-sees-it",
        "cat /proc/$$/environ | tr '\\0' '\\n'; sh -c 'cat /proc/$$/environ' | tr '\\0' '\\n'",
        &[],
    ),
    (
        "environ",
        "cat /proc/self/environ | tr '\\0' '\\n'; env -i A=b cat /proc/self/environ | od -c",
        &[],
    ),
    (
        // The addresses move with what the kernel puts on the stack, so lengths; without randomness
        // the rest is the same.
        "memory",
        r#"fields='{ print $26, $27, $45, $46, $47, $49 - $48, $51 - $50, $50 - $49, $28 < $48 }'
        setarch -R sh -c 'cat /proc/$$/stat' | awk "$fields"; setarch -R env -i cat /proc/self/stat | awk "$fields"
        setarch -R env -i A=b python3 -SEc 'print(open("/proc/self/stat").read())' | awk "$fields"
        for i in 1 2 3 4 5 6; do cat /proc/self/stat | awk '{ print $27 - $26, $46 - $45, $47 > $46, $51 - $50 }'; done"#,
        &[],
    ),
    ("path", r#"echo "$PATH"; printenv PATH; bash -c 'echo $PATH'"#, &[]),
    ("type", "type grep; type -a cat; type -t sort; type nosuchcommand", &[]),
    (
        "command-v",
        "command -v grep; command -V sort; command -v nosuchcommand; sh -c 'command -v wc'",
        &[],
    ),
    ("which", "which grep cat nosuchcommand; which -a sort", &[]),
    ("hash", r#"grep -c needle "$D/f"; wc -l "$D/f"; hash; hash -t grep"#, &["grep", "wc"]),
    ("exported", "export -p; declare -x; compgen -e", &[]),
    ("variables", r#"set | grep -E 'posh-|POSH_HOOK|LD_'; echo "[$LD_PRELOAD]""#, &[]),
    ("ps", "ps -o comm=,args= -p $$; (exec -a other ps -o comm=,args= -C ps)", &[]),
    (
        "descriptors",
        "ls /proc/self/fd; ls /proc/$$/fd; sh -c 'ls /proc/self/fd' 3< /etc/passwd",
        &[],
    ),
    (
        "last-argument",
        r#"grep -c needle "$D/f"; echo "$_"; sh -c 'env' | sed -n s/^_=//p"#,
        &["grep"],
    ),
    (
        "status",
        "grep -E '^(SigBlk|SigCgt|ShdPnd|Umask|Threads)' /proc/self/status; sh -c 'ps -o ppid= -p $PPID' | wc -l",
        &[],
    ),
    ("limits", "ulimit -a; sh -c 'ulimit -a'", &[]),
    (
        "static-program",
        r#"env -u POSH_CONFIG HOME=/ /run/posh-bin/posh -c 'env; sort -u /etc/shells'"#,
        &[],
    ),
];

/// Whoever executes a command, and however it is named.
const EXECS: &[Case] = &[
    (
        "absolute",
        r#"/bin/grep -c needle "$D/f"; /usr/bin/sort "$D/a"; ../../bin/wc -l "$D/f""#,
        &["grep", "sort", "wc"],
    ),
    (
        "reset-path",
        r#"PATH=/usr/bin:/bin; grep -c needle "$D/f"; sh -c 'PATH=/bin; wc -l "$1"' sh "$D/f""#,
        &["grep", "wc"],
    ),
    (
        "no-path",
        r#"unset PATH; /bin/grep -c needle "$D/f"; /bin/sh -c '/usr/bin/wc -l "$1"' sh "$D/f""#,
        &["grep", "wc"],
    ),
    (
        "env-i",
        r#"env -i /bin/grep -c needle "$D/f"; env -i sh -c 'wc -l "$1"' sh "$D/f"; env -i A=b cat "$D/a""#,
        &["grep", "wc", "cat"],
    ),
    ("exec-a", r#"(exec -a other grep -c needle "$D/f" "$D/absent"); echo $?"#, &["grep"]),
    (
        "exec-c",
        r#"(exec -c /bin/cat "$D/a"); (exec -c sh -c 'wc -l "$1"' sh "$D/f")"#,
        &["cat", "wc"],
    ),
    ("exec", r#"exec /bin/grep -c needle "$D/f""#, &["grep"]),
    (
        // Other bytes, and the same words about itself.
        "another-build",
        r#"d=$(mktemp -d); cp /usr/bin/sort "$d"; printf x >> "$d/sort"; "$d/sort" "$D/a"; "$d/sort" -r "$D/a"; rm -r "$d""#,
        &["sort"],
    ),
    (
        "pipeline-of-paths",
        r#"/bin/cat "$D/f" | /bin/grep needle | /usr/bin/sort | /usr/bin/wc -l"#,
        &["cat", "grep", "sort", "wc"],
    ),
    (
        "nested-script",
        r#"printf 'grep -c needle "$1"; sh ~/n2 "$1"' > ~/n1; printf '/usr/bin/wc -l "$1"' > ~/n2; bash ~/n1 "$D/f""#,
        &["grep", "wc"],
    ),
    (
        "executable-script",
        r##"printf '#!/bin/sh\ngrep -c needle "$1"\n' > ~/s; printf 'wc -l "$1"\n' > ~/t; chmod +x ~/s ~/t; ~/s "$D/f"; ~/t "$D/f"; env ~/t "$D/f""##,
        &["grep", "wc"],
    ),
    ("env", r#"env A=b grep -c needle "$D/f"; env -u HOME wc -l "$D/f""#, &["grep", "wc"]),
    (
        "nice",
        r#"nice -n 5 grep -c needle "$D/f"; nice sh -c 'nice; wc -l "$1"' sh "$D/f""#,
        &["grep", "wc"],
    ),
    (
        "timeout",
        r#"timeout 60 grep -c needle "$D/f"; timeout -k 5 60 sh -c 'exit 3'; echo $?"#,
        &["grep"],
    ),
    (
        "setsid-nohup",
        r#"setsid -w grep -c needle "$D/f"; nohup wc -l "$D/f" 2> /dev/null"#,
        &["grep", "wc"],
    ),
    (
        "xargs",
        r#"printf '%s\n' "$D/a" "$D/f" | xargs -n 1 grep -c needle; printf %s "$D/a" | xargs -I @ sh -c 'wc -l @'"#,
        &["grep", "wc"],
    ),
    (
        "find",
        r#"find "$D/tree" -name '*.txt' -exec grep -c needle {} \; | sort; find "$D/tree" -name '*.txt' -execdir wc -l {} + | sort"#,
        &["grep", "wc"],
    ),
    ("chroot", r#"chroot / grep -c needle "$D/f""#, &["grep"]),
    (
        "make",
        r#"printf 'all: one two\none:\n\t@grep -c needle "$(D)/f"\ntwo:\n\t@wc -l "$(D)/f" | sort\n' > ~/Makefile; make -s -f ~/Makefile D="$D"; make -s -j 2 -f ~/Makefile D="$D" SHELL=/bin/bash | sort -u"#,
        &["grep", "wc"],
    ),
    (
        "perl",
        r#"perl -e '$|=1; system("grep -c needle \"$ARGV[0]\""); system("grep", "-c", "needle", $ARGV[0]); print `wc -l "$ARGV[0]"; true`; open(P, "-|", "sort", "-u", $ARGV[0]); print scalar(<P>); close(P); exec "tail", "-n1", $ARGV[0]' "$D/f""#,
        &["grep", "wc", "sort", "tail"],
    ),
    (
        "awk",
        r#"awk -v f="$D/f" 'BEGIN { system("grep -c needle \"" f "\""); ("wc -l < \"" f "\"") | getline n; print n; print "x" | ("cat - \"" f "\" | tail -n 2") }'"#,
        &["grep", "tail"],
    ),
    (
        "python-subprocess",
        r#"/usr/bin/python3 -c 'import subprocess as s, sys
f = sys.argv[1]
run = lambda *a, **k: print(s.run(*a, stdout=s.PIPE, **k).stdout)
run(["grep", "-c", "needle", f])
run(["grep", "-c", "needle", f], close_fds=False)
run(["/bin/grep", "-c", "needle", "f"], cwd=f[:-2], env={"A": "b"})
run(["grep", "-c", "needle", f], start_new_session=True, preexec_fn=lambda: None)
run("wc -l < \"%s\"; true" % f, shell=True)
print(s.getoutput("sort -u \"%s\" | tail -n 1" % f))' "$D/f""#,
        &["grep", "sort", "tail"],
    ),
    (
        "python-os",
        r#"/usr/bin/python3 -c 'import os, signal, sys
# Python ignores it, and a command that does runs where its pipe is.
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
f = sys.argv[1]
print(os.system("grep -c needle \"%s\"" % f), os.popen("wc -l < \"%s\"" % f).read(), os.environ.get("LD_PRELOAD"), flush=True)
os.waitpid(os.posix_spawn("/bin/grep", ["grep", "-c", "needle", f], os.environ), 0)
os.waitpid(os.posix_spawnp("sort", ["sort", "-u", f, "-o", "/dev/null"], {}), 0)
quiet = [(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)]
os.waitpid(os.posix_spawnp("grep", ["grep", "needle", f], os.environ, file_actions=quiet), 0)
os.spawnlp(os.P_WAIT, "head", "head", "-n", "1", f)
os.system("printenv LD_PRELOAD POSH_HOOK")
os.execlp("tail", "tail", "-n", "1", f)' "$D/f""#,
        &["grep", "sort", "head", "tail"],
    ),
    ("many-words", r#"cat "$D/a" $(yes "$D/a" | head -n 3000) | wc -l"#, &["cat", "wc"]),
    (
        "unset-preload",
        r#"unset LD_PRELOAD; grep -c needle "$D/f"; LD_PRELOAD= wc -l "$D/f"; env -u LD_PRELOAD cat "$D/a""#,
        &["grep", "wc", "cat"],
    ),
    (
        "descriptor-of-a-program",
        r#"perl -e 'open(F, "<", "/bin/cat"); exec {"/proc/self/fd/".fileno(F)} "cat", $ARGV[0]' "$D/a"; grep -c needle "$D/f""#,
        &["grep"],
    ),
    (
        "dollar-zero",
        r#"bash -c 'echo "$0"; exec -a "$0" grep -c needle "$1"' name "$D/f""#,
        &["grep"],
    ),
];

/// Programs that must be left alone, and failures that must stay what they are.
const LEFT_ALONE: &[Case] = &[
    (
        "not-found",
        r#"nosuchcommand; ./grep "$D/f"; /nonexistent/grep "$D/f"; "$D/f/grep"; echo $?"#,
        &[],
    ),
    ("directory", r#"mkdir -p ~/d/grep; ~/d/grep "$D/f"; echo $?; env ~/d/grep; echo $?"#, &[]),
    (
        "not-executable",
        r#"cp /bin/grep ~/d-grep; chmod -x ~/d-grep; ~/d-grep x "$D/f"; echo $?; env ~/d-grep; echo $?"#,
        &[],
    ),
    (
        "script-named-sort",
        r#"mkdir -p ~/b; printf 'echo mine "$#"\n' > ~/b/sort; chmod +x ~/b/sort; ~/b/sort "$D/f"; env ~/b/sort "$D/f"; PATH=~/b:$PATH; sort "$D/f""#,
        &[],
    ),
    (
        "program-named-sort",
        r##"mkdir -p ~/c; printf '#!/bin/sh\necho mine "$#"\n' > ~/c/sort; chmod +x ~/c/sort; ~/c/sort "$D/f"; PATH=~/c:$PATH; sort "$D/f""##,
        &[],
    ),
    (
        "bad-interpreter",
        r##"printf '#!/nonexistent/sh\n' > ~/cat; chmod +x ~/cat; ~/cat "$D/f"; echo $?; env ~/cat "$D/f"; echo $?"##,
        &[],
    ),
    (
        "empty-program",
        r#"mkdir -p ~/e; : > ~/e/cat; chmod +x ~/e/cat; ~/e/cat "$D/f"; echo $?"#,
        &[],
    ),
    (
        "damaged-program",
        r#"mkdir -p ~/e; head -c 64 /bin/cat > ~/e/head; chmod +x ~/e/head; ~/e/head "$D/f"; echo $?"#,
        &[],
    ),
    (
        "own-library",
        r#"export LD_PRELOAD=libnothing-of-this-name.so; env 2> /dev/null | grep LD_; unset LD_PRELOAD; grep -c needle "$D/f""#,
        &[],
    ),
    (
        "fakeroot",
        r#"fakeroot sh -c 'id -u; : > ~/owned; chown 7:8 ~/owned; stat -c "%u %g" ~/owned; grep -c needle "$1"; echo "$LD_PRELOAD"' sh "$D/f""#,
        &[],
    ),
    ("stdbuf", r#"stdbuf -oL grep -c needle "$D/f""#, &[]),
    (
        "other-user",
        r#"setpriv --reuid=65534 --regid=65534 --clear-groups sh -c 'grep -c root /etc/passwd; env | grep -E "LD_|HOOK"; sort /etc/shells | tail -n 1'"#,
        &[],
    ),
    ("su", r#"su -s /bin/sh nobody -c 'grep -c root /etc/passwd; env | sort'; echo $?"#, &[]),
    (
        "other-mounts",
        r#"unshare -m sh -c 'mount -t tmpfs none /run/user; grep -c root /etc/passwd; sort /etc/shells | tail -n 1; env | grep LD_'"#,
        &[],
    ),
    (
        "other-root",
        r#"unshare -m sh -c 'mkdir -p ~/root && mount --bind / ~/root && mount -t tmpfs none ~/root/run && chroot ~/root sh -c "grep -c root /etc/passwd; env | grep LD_"'"#,
        &[],
    ),
    (
        "static-in-the-middle",
        r#"env -u POSH_CONFIG HOME=/ /run/posh-bin/posh -c 'grep -c needle "$0"; wc -l "$0"' "$D/f""#,
        &[],
    ),
    (
        "posh-in-posh",
        r#"/run/posh-bin/posh -c 'grep -c needle "$0"; env | grep -E "LD_|HOOK"; echo $PATH' "$D/f""#,
        &[],
    ),
];

/// The longest word that a program takes, to the byte: what posh adds must not count.
const LONGEST: &str = r#"
ulimit -s 512
longest() {
    low=60000 high=131072
    while [ $((high - low)) -gt 1 ]; do
        middle=$(((low + high) / 2)) word=
        printf -v word "%0${middle}d" 1
        if "$@" "$word" 2> /dev/null; then low=$middle; else high=$middle; fi
    done
    echo "$low"
}
longest /bin/true
longest env true
export long=$(printf '%030000d' 1)
longest /bin/true
longest sh -c : sh
"#;

fn fill(directory: &Path) -> io::Result<()> {
    let line = |i: usize| {
        format!("line {i} with {}\n", if i.is_multiple_of(50) { "a needle" } else { "hay" })
    };
    fs::write(directory.join("f"), (0..500).map(line).collect::<String>())?;
    fs::write(directory.join("a"), "one needle\ntwo\n")?;
    for number in 0..6 {
        let below = directory.join(format!("tree/{}", number % 2));
        fs::create_dir_all(&below)?;
        fs::write(
            below.join(format!("{number}.txt")),
            (0..60 + number).map(line).collect::<String>(),
        )?;
    }
    Ok(())
}

/// Checks placements. Assembly works against the clock: a missed placement with the right output is
/// tried once more.
fn placed(
    arena: &Arena,
    name: &str,
    script: &Script,
    offloaded: &[&str],
) -> Result<ExplainReport, String> {
    let missed = |report: &ExplainReport| kept_here(report, offloaded);
    let report = arena.attempt(name, script)?;
    let Some(first) = missed(&report) else { return Ok(report) };
    println!("tried again: {name}: {first}");
    let report = arena.attempt(&format!("{name}-again"), script)?;
    missed(&report)
        .map_or(Ok(report), |fault| Err(format!("{name}: {fault} in\n  {}", script.text)))
}

fn try_all(cases: &[Case], check: impl Fn(&str, &ExplainReport) -> Option<String>) {
    let arena = Arena::new(fill);
    let mut faults = Vec::new();
    for (name, text, offloaded) in cases {
        let script = Script::new(*text).door(Door::Hook);
        faults.extend(placed(&arena, name, &script, offloaded).map_or_else(Some, |report| {
            let fault = check(name, &report);
            fault.map(|f| format!("{name}: {f} in\n  {text}"))
        }));
    }
    assert_none(&faults, cases.len());
}

#[test]
fn nobody_sees_the_hook() {
    try_all(LOOKS, |_, _| None);
}

#[test]
fn every_way_to_execute_is_seen() {
    try_all(EXECS, |_, _| None);
}

#[test]
fn what_can_not_be_served_is_left_alone() {
    try_all(LEFT_ALONE, |name, report| {
        // After `unset LD_PRELOAD` the same session goes on offloading.
        let expected = usize::from(name == "own-library");
        let offloaded =
            report.pipelines.iter().flat_map(|p| &p.stages).filter(|s| s.is_offloaded()).count();
        (offloaded != expected).then(|| format!("{offloaded} stages were offloaded"))
    });
}

#[test]
fn a_program_s_own_library_keeps_it_here() {
    let arena = Arena::new(fill);
    let script = Script::new(r#"fakeroot grep -c needle "$D/f""#).door(Door::Hook);
    let report = arena.attempt("fakeroot", &script).unwrap();
    let grep = report.stages("grep").next().expect("the hook is beside the other library");
    // fakeroot sets LD_LIBRARY_PATH, too.
    assert!(!grep.is_offloaded() && grep.reason.starts_with("LD_"), "{grep:?}");
}

/// Without a report, for which each command goes through the stage program.
#[test]
fn programs_that_start_no_others_go_without_the_hook() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let text = "cp /bin/cat /tmp/cat\nfor p in cat /usr/bin/cat 'sed p' /tmp/cat; do echo \"= $p\"; $p /proc/self/maps; done";
    let outcome = Script::new(text).run(&lab.workstation, Under::Posh).unwrap();
    let stdout = String::from_utf8_lossy(&outcome.stdout);
    let hooked = stdout
        .split("= ")
        .skip(1)
        .map(|maps| (maps.lines().next().unwrap(), maps.contains("/hook-")));
    let expected = [("cat", false), ("/usr/bin/cat", false), ("sed p", true), ("/tmp/cat", true)];
    assert_eq!(hooked.collect::<Vec<_>>(), expected, "{outcome}");
}

#[test]
fn what_is_added_does_not_make_a_command_line_too_long() {
    let arena = Arena::new(fill);
    arena.attempt("longest", &Script::new(LONGEST).door(Door::Hook)).unwrap();
}

/// Without a report, commands at pipes leave notes for each other: none may stay local that another
/// one should have been joined to.
#[test]
fn without_a_report_pipelines_run_where_their_data_is_all_the_same() {
    const ROUNDS: u64 = 10;
    const BYTES: u64 = 4 << 20;
    let arena = Arena::new(fill);
    let line = "a line of the large file, which is to stay where it is\n";
    fs::write(arena.lab.data(1).join("large"), line.repeat(BYTES as usize / line.len())).unwrap();
    let large = arena.lab.mount(1).join("large");
    for pipeline in [
        "cat L | grep -v x | sort | wc -l",
        "nice cat < L | tr a b | env sort -u | head -n 1",
        "x=$(cat L | tail -n 1); echo \"$x\" | sed s/a/b/",
        "cat L | grep -c line > out; cat out; cat L L 2>&1 | cksum",
    ] {
        let text = format!(
            "for i in $(seq {ROUNDS}); do {}; done",
            pipeline.replace('L', large.to_str().unwrap())
        );
        let before = arena.lab.bytes_moved().unwrap();
        let [alone, posh] = [Under::Shell, Under::Posh].map(|under| {
            let outcome = Script::new(&text).run(&arena.lab.workstation, under).unwrap();
            (outcome, arena.lab.bytes_moved().unwrap())
        });
        assert_eq!(posh.0.stdout, alone.0.stdout, "{pipeline}");
        let [moved, by_posh] = [alone.1 - before, posh.1 - alone.1];
        assert!(moved > BYTES, "{pipeline}: bash moved {moved} bytes");
        // On a machine with more to do than processors the gateway may give up waiting for a
        // neighbour.
        assert!(by_posh < 3 * BYTES, "{pipeline}: {by_posh} bytes for {ROUNDS} times {BYTES}");
    }
}

#[test]
fn the_doors_can_be_nested() {
    let arena = Arena::new(fill);
    for outer in Door::ALL {
        for inner in Door::ALL {
            let text = format!(
                r#"/run/posh-bin/posh --door {} --explain=json -c '/usr/bin/env grep -c needle "$0"' "$D/f" 2>&1 > ~/out | jq '.[].stages[] | .placement'; cat ~/out"#,
                inner.name()
            );
            let script =
                Script::new(text).door(outer).variable("D", arena.lab.mount(1).to_str().unwrap());
            fs::write(arena.lab.data(1).join("f"), "a needle\n").unwrap();
            let outcome = script.run(&arena.lab.workstation, Under::Posh).unwrap();
            let said = String::from_utf8_lossy(&outcome.stdout);
            assert!(
                said.starts_with("\"store1\"\n") && said.ends_with("\n1\n"),
                "{outer:?} {inner:?}: {outcome}"
            );
        }
    }
}
