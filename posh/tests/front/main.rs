//! The front end as its user meets it: the real program, real shells, and a
//! gateway that only remembers ([`fake`]).

mod allow;
mod fake;
mod options;
mod question;
mod reach;
mod skew;
mod stack;

use std::{
    fs,
    os::unix::{ffi::OsStrExt, process::ExitStatusExt},
    process::{Output, Stdio},
    thread,
};

use fake::{Fake, Installed};
use posh_proto::PROTOCOL_VERSION;

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The same status, output and messages.
fn assert_same(ours: &Output, theirs: &Output) {
    assert_eq!((stdout(ours), stderr(ours)), (stdout(theirs), stderr(theirs)));
    assert_eq!(ours.status, theirs.status);
}

fn with_gateway() -> (Installed, Fake) {
    let installed = Installed::new().configured();
    let fake = Fake::listen(&installed.socket(), &installed.at("shims"));
    (installed, fake)
}

#[test]
fn the_shell_is_posh_itself_with_only_path_changed() {
    let (installed, fake) = with_gateway();
    let ours =
        installed.posh(&["--door", "path", "--split", "3", "-c", "echo $$; env -0 | tr '\\0' '|'"]);
    let theirs = installed.bash(&["-c", "echo $$; env -0 | tr '\\0' '|'"]);
    assert_eq!(stderr(&ours), "");
    let (pid, ours) =
        stdout(&ours).split_once('\n').map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
    let theirs = stdout(&theirs).split_once('\n').unwrap().1.to_owned();
    let shims = format!("PATH={}:", installed.at("shims").display());
    assert_eq!(ours.replacen(&shims, "PATH=", 1), theirs);
    assert!(ours.contains(&shims), "{ours}");

    let asked = fake.asked.lock().unwrap();
    let [session] = asked.sessions.as_slice() else { panic!("{asked:?}") };
    assert_eq!(session.pid.to_string(), pid);
    assert_eq!((session.protocol, session.split, session.explain), (PROTOCOL_VERSION, 3, false));
    assert_eq!(session.stage_program, installed.at("bin/posh-stage").as_os_str().as_bytes());
    assert!(
        theirs.contains(&format!("PATH={}|", String::from_utf8_lossy(&session.path))),
        "{session:?}"
    );
}

/// A confined program in the gateway's place would have this shell execute its programs.
#[test]
fn a_session_of_a_gateway_with_other_rights_is_not_taken() {
    let (installed, fake) = with_gateway();
    let posh = installed.at("bin/posh");
    let posh = posh.to_str().unwrap();
    let text = "echo $PATH; grep -c hook- /proc/self/maps";
    let confined = ["--no-new-privs", posh, "-c", text];
    let output = installed.command("setpriv", &confined).output().unwrap();
    let shims = installed.at("shims");
    assert!(!stdout(&output).contains(shims.to_str().unwrap()), "{}", stdout(&output));
    assert!(stdout(&output).ends_with("\n0\n"), "{}", stdout(&output));
    let why = "it does not run with this process's own rights, but with no_new_privs";
    assert!(stderr(&output).contains(why), "{}", stderr(&output));
    assert_eq!(fake.asked.lock().unwrap().sessions.len(), 1);
}

#[test]
fn a_shell_needs_nothing_but_posh_and_all_else_says_what_is_missing() {
    let (installed, fake) = with_gateway();
    fs::remove_file(installed.at("bin/posh-cli")).unwrap();
    let plain = installed.posh(&["-c", "echo $0 \"$@\"", "a", "--explain"]);
    assert_eq!((stdout(&plain).as_str(), stderr(&plain).as_str()), ("a --explain\n", ""));
    assert_eq!(fake.asked.lock().unwrap().sessions.len(), 1);
    let told = installed.posh(&["--explain", "-c", "echo not reached"]);
    let missing = installed.at("bin/posh-cli");
    let words =
        format!("posh: can't run {}, which is installed with posh: ENOENT", missing.display());
    assert_eq!((stdout(&told).as_str(), told.status.code()), ("", Some(1)));
    assert!(stderr(&told).starts_with(&words), "{}", stderr(&told));
}

#[test]
fn by_the_hook_nothing_at_all_is_changed() {
    let (installed, fake) = with_gateway();
    let look = "env -0 | tr '\\0' '|'; export -p; cat /proc/self/environ | tr '\\0' '|'; echo \"$LD_PRELOAD\"";
    for own in [None, Some("libSegFault-of-nobody.so")] {
        let run = |shell: std::path::PathBuf, arguments: &[&str]| {
            let mut command = installed.command(shell, arguments);
            command.envs(own.map(|library| ("LD_PRELOAD", library))).output().unwrap()
        };
        let ours = run(installed.at("bin/posh"), &["--door", "hook", "-c", look]);
        assert_eq!(stdout(&ours), stdout(&run("bash".into(), &["-c", look])));
        assert!(own.is_some() || stderr(&ours).is_empty(), "{}", stderr(&ours));
    }
    assert_eq!(fake.asked.lock().unwrap().sessions.len(), 2);
    // Without a session there is nothing to hook for.
    let installed = Installed::new();
    let loaded = stdout(
        &installed.posh(&["-c", "grep -c hook- /proc/self/maps; ls -A $XDG_RUNTIME_DIR/posh"]),
    );
    assert_eq!(loaded, "0\n");
}

#[test]
fn the_hook_is_loaded_unless_it_can_not_be() {
    let (installed, _fake) = with_gateway();
    let loaded = |installed: &Installed, arguments: &[&str]| {
        let line = [
            "-c",
            "grep -c hook- /proc/self/maps > counted; read n < counted; [ $n -gt 0 ]; echo $?; rm counted",
        ];
        installed.posh(&[arguments, &line].concat())
    };
    assert_eq!(stdout(&loaded(&installed, &[])), "0\n");
    assert_eq!(stdout(&loaded(&installed, &["--door", "path"])), "1\n");
    // A shell that is a static program: the stage program will do.
    fs::create_dir(installed.at("static")).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_posh-stage"), installed.at("static/bash")).unwrap();
    let path = format!("{}:/bin", installed.at("static").display());
    let output = installed
        .command(installed.at("bin/posh"), &["--door", "hook", "-c", "true"])
        .env("PATH", path)
        .output();
    let said = stderr(&output.unwrap());
    let expected = format!(
        "posh: no exec hook, shims on PATH instead: {} is not a",
        installed.at("static/bash").display()
    );
    assert!(said.starts_with(&expected), "{said}");
}

#[test]
fn descriptors_and_signals_are_those_of_plain_bash() {
    let (installed, _fake) = with_gateway();
    let look = "ls /proc/self/fd; grep -E '^Sig(Blk|Ign)|^ShdPnd' /proc/self/status";
    for surroundings in
        ["", "trap '' PIPE INT; ", "exec <&-; ", "exec 2>&-; ", "exec <&- >&- 2>&-; exec 1>$OUT; "]
    {
        let run = |shell: &str| {
            let out = installed.at("out");
            let _ = fs::remove_file(&out);
            let line = format!("{surroundings}exec {shell} -c \"$LOOK\"");
            let mut command = installed.command("bash", &["-c", &line]);
            let output = command.env("LOOK", look).env("OUT", &out).output().unwrap();
            let to_file = fs::read_to_string(&out).unwrap_or_default();
            (stdout(&output) + &to_file, stderr(&output), output.status)
        };
        assert_eq!(run(installed.at("bin/posh").to_str().unwrap()), run("bash"), "{surroundings}");
    }
}

#[test]
fn scripts_commands_and_stdin_read_as_in_bash() {
    let (installed, _fake) = with_gateway();
    fs::write(installed.at("home/mounts"), "echo script $0 $@; exit 3\n").unwrap();
    fs::write(installed.at("home/-dash"), "echo dash $0 $@\n").unwrap();
    let cases: &[&[&str]] = &[
        &["./mounts", "--explain", "-c"],
        &["--", "-dash", "x"],
        &["-c", "echo $0 $1; nosuchcommand", "x", "--explain"],
        &["-c", "echo $0; nosuchcommand"],
        &["-c", "kill -TERM $$"],
        &["-c", "exit 77"],
        &["/nonexistent"],
    ];
    for arguments in cases {
        assert_same(&installed.posh(arguments), &installed.bash(arguments));
    }
    let from_stdin = |program: &std::path::Path| {
        let script = fs::File::open(installed.at("home/mounts")).unwrap();
        installed.command(program, &[]).stdin(script).output().unwrap()
    };
    assert_same(&from_stdin(&installed.at("bin/posh")), &from_stdin("bash".as_ref()));
}

#[test]
fn a_trace_is_a_document_whatever_happens() {
    let (installed, fake) = with_gateway();
    let file = installed.at("home/t");
    let traced = installed.posh(&["--trace", "t", "-c", "echo hello; exit 3"]);
    assert_eq!(
        (stdout(&traced), stderr(&traced), traced.status.code()),
        ("hello\n".into(), String::new(), Some(3))
    );
    assert_eq!(fs::read_to_string(&file).unwrap(), "{\"traceEvents\":[1]}");
    {
        let asked = fake.asked.lock().unwrap();
        let times = asked.reports[0].times.unwrap();
        assert!(asked.sessions[0].trace && 0 < times.started_ns);
        assert!(times.started_ns <= times.shell_ns && times.shell_ns <= times.ended_ns);
    }
    // Without a gateway.
    let without = Installed::new();
    let traced = without.posh(&["--trace", "t", "-c", "exit 4"]);
    assert!(
        stderr(&traced).starts_with("posh: nothing to trace, every command runs here"),
        "{}",
        stderr(&traced)
    );
    assert_eq!(traced.status.code(), Some(4));
    assert_eq!(fs::read_to_string(without.at("home/t")).unwrap(), "{\"traceEvents\":[]}\n");
    // Where it can't be written, nothing runs.
    let traced = installed.posh(&["--trace", "no/t", "-c", "echo hello"]);
    assert_eq!((stdout(&traced).as_str(), traced.status.code()), ("", Some(1)));
    assert_eq!(fake.asked.lock().unwrap().sessions.len(), 1);
}

#[test]
fn the_other_shells_get_their_words() {
    let (installed, _fake) = with_gateway();
    let cases = [
        ("zsh", "print -r -- $1 $2", "a --x\n"),
        ("dash", "echo $1 $2", "a --x\n"),
        ("fish", "echo $argv[2..]", "a --x\n"),
        ("bash", "echo $1 $2", "a --x\n"),
    ];
    for (shell, command, expected) in cases {
        let output = installed.posh(&["--shell", shell, "-c", command, "zero", "a", "--x"]);
        assert_eq!((stdout(&output).as_str(), stderr(&output).as_str()), (expected, ""), "{shell}");
        for words in [&["-c", "+nosuch"][..], &["-nosuch"], &["-l", "-c", "echo l"]] {
            let ours = installed.posh(&[&["--shell", shell], words].concat());
            assert_same(&ours, &installed.command(shell, words).output().unwrap());
        }
    }
}

#[test]
fn explain_reports_after_the_shell_and_ends_as_it_did() {
    let (installed, fake) = with_gateway();
    let output = installed.posh(&["--explain=json", "-c", "echo out; echo err >&2; exit 5"]);
    assert_eq!((stdout(&output).as_str(), output.status.code()), ("out\n", Some(5)));
    assert_eq!(stderr(&output), "err\nreport of s1, json true\n");
    let output = installed.posh(&["--explain", "-c", "kill -KILL $$"]);
    assert_eq!(
        (output.status.signal(), stderr(&output).as_str()),
        (Some(9), "report of s1, json false\n")
    );
    let asked = fake.asked.lock().unwrap();
    assert!(asked.sessions.iter().all(|session| session.explain), "{asked:?}");
    assert_eq!(asked.reports.len(), 2);
}

#[test]
fn an_interrupt_from_the_terminal_is_the_shells_alone_under_explain() {
    let (installed, _fake) = with_gateway();
    // The whole group is interrupted, as by Ctrl-C; the shell lives on, and so does posh.
    let script = "trap 'echo caught' INT; kill -INT 0; echo after";
    let posh = installed.at("bin/posh");
    let line = format!("setsid --wait {} --explain -c \"$SCRIPT\"", posh.display());
    let output = installed.command("bash", &["-c", &line]).env("SCRIPT", script).output().unwrap();
    assert_eq!(
        (stdout(&output).as_str(), stderr(&output).as_str()),
        ("caught\nafter\n", "report of s1, json false\n")
    );
    // The dispositions of the shell below an explaining posh are the user's, too.
    let look = "grep -E '^Sig(Blk|Ign)' /proc/self/status | cut -f2";
    let explained = signal_sets(&installed.posh(&["--explain", "-c", look]));
    assert_eq!(explained, signal_sets(&installed.bash(&["-c", look])));
}

/// Lines of /proc/PID/status, without signals 32 and 33: glibc keeps those two for
/// itself, and ignores them in a child of posix_spawn(3).
fn signal_sets(output: &Output) -> Vec<u64> {
    let set = |line: &str| u64::from_str_radix(line.trim(), 16).expect("a set") & !(0b11 << 31);
    stdout(output).lines().map(set).collect()
}

#[test]
fn eight_shells_at_once_start_one_gateway() {
    let installed = Installed::new().configured();
    let gateway = installed.gateway_on_demand();
    let shell = || installed.command(installed.at("bin/posh"), &["-c", "echo $$"]);
    let shells: Vec<_> = (0..8)
        .map(|_| shell().stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
        .collect();
    let outputs: Vec<Output> =
        shells.into_iter().map(|shell| shell.wait_with_output().unwrap()).collect();
    let fake = gateway.join().unwrap();
    for output in &outputs {
        assert_eq!(stderr(output), "");
    }
    let starts = fs::read_to_string(installed.at("starts")).unwrap();
    let expected = format!(
        "--config {} --socket {} --log {} --ready-fd ",
        installed.config().display(),
        installed.socket().display(),
        installed.socket().with_extension("log").display()
    );
    assert!(starts.starts_with(&expected), "{starts}");
    assert_eq!(starts.lines().count(), 1, "{starts}");
    let mut pids: Vec<u32> =
        outputs.iter().map(|output| stdout(output).trim().parse().unwrap()).collect();
    let mut opened: Vec<u32> =
        fake.asked.lock().unwrap().sessions.iter().map(|session| session.pid).collect();
    pids.sort_unstable();
    opened.sort_unstable();
    assert_eq!(opened, pids);
}

#[test]
fn a_gateway_that_is_started_belongs_to_nobody() {
    let installed = Installed::new().configured();
    let seen = installed.at("seen");
    // Its session, directory, umask, mask and descriptors; then it gives up.
    installed.gateway_program(&format!(
        "{{ test $(cut -d' ' -f6 /proc/$$/stat) = $$ && echo own session; pwd; umask; grep SigIgn /proc/$$/status | cut -c 18-\n\
         for fd in /proc/$$/fd/*; do test $(basename $fd) = $ready || readlink $fd; done; }} > {}\n\
         echo said on its stderr >&2\neval \"echo a mistake >&$ready\"",
        seen.display()
    ));
    // The caller has a pipe open and SIGINT ignored; neither may reach the gateway.
    let line = format!(
        "trap '' INT; exec 7> >(cat); {} -c 'echo ran'; exec 7>&-; wait",
        installed.at("bin/posh").display()
    );
    let output = installed.command("bash", &["-c", &line]).output().unwrap();
    assert_eq!(stdout(&output), "ran\n");
    let log = installed.socket().with_extension("log");
    let script = installed.at("bin/posh-gateway");
    let expected = format!(
        "own session\n/\n0077\n0000000\n/dev/null\n{}\n{}\n/dev/null\n{}\n",
        seen.display(),
        script.display(),
        log.display()
    );
    // Its interpreter has the script itself open, and keeps its stdout aside.
    assert_eq!(fs::read_to_string(&seen).unwrap(), expected);
    assert_eq!(fs::read_to_string(log).unwrap(), "said on its stderr\n");
}

#[test]
fn whatever_is_wrong_with_the_gateway_the_shell_runs() {
    let installed = Installed::new();
    let run = |installed: &Installed| {
        let output = installed.posh(&["-c", "echo ran"]);
        assert_eq!(stdout(&output), "ran\n", "{}", stderr(&output));
        stderr(&output)
    };
    assert_eq!(run(&installed), "", "nothing is configured");
    let installed = installed.configured();
    let missing = run(&installed);
    assert!(missing.starts_with("posh: posh-gateway is neither beside "), "{missing}");
    assert!(
        missing
            .lines()
            .nth(1)
            .is_some_and(|line| line.starts_with("posh: every command runs here: ")),
        "{missing}"
    );

    installed
        .gateway_program("eval \"printf 'mounts.toml:1: bad\\nmounts.toml:2: worse\\n' >&$ready\"");
    let refused = run(&installed);
    assert!(
        refused.starts_with(
            "posh: mounts.toml:1: bad\nmounts.toml:2: worse\nposh: every command runs here"
        ),
        "{refused}"
    );
    installed.gateway_program("exit 1");
    assert!(run(&installed).contains("ended before it was ready; its messages are in "));
    installed.gateway_program("eval \"echo ready >&$ready\"");
    assert!(run(&installed).contains("no gateway answers at "), "it said ready and is not there");
    fs::set_permissions(
        installed.at("run/posh"),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    assert!(run(&installed).contains("which lets other users in; run: chmod 700 "));
}

#[test]
fn what_was_named_and_is_not_there_is_said() {
    let (installed, _fake) = with_gateway();
    let output = installed.posh(&["--config", "/nonexistent.toml", "-c", "echo ran"]);
    assert_eq!(stdout(&output), "ran\n");
    assert!(
        stderr(&output).contains("can't read the configuration /nonexistent.toml"),
        "{}",
        stderr(&output)
    );
    let output = installed.posh(&["--socket", "/nonexistent.sock", "-c", "echo ran"]);
    assert_eq!(stdout(&output), "ran\n");
    assert!(
        stderr(&output).contains("no gateway answers at /nonexistent.sock"),
        "{}",
        stderr(&output)
    );
    let output = installed
        .command(installed.at("bin/posh"), &["-c", "echo ran"])
        .env("PATH", "/nonexistent")
        .output();
    let output = output.unwrap();
    assert_eq!(
        (output.status.code(), stderr(&output).as_str()),
        (Some(127), "posh: bash is not found on PATH\n")
    );
    assert_eq!(installed.posh(&["--bogus"]).status.code(), Some(2));
}

#[test]
fn the_socket_can_be_named_instead() {
    let installed = Installed::new();
    let fake = Fake::listen(&installed.at("named.sock"), &installed.at("shims"));
    let mut command =
        installed.command(installed.at("bin/posh"), &["--door", "path", "-c", "echo $PATH"]);
    let output = command.env("POSH_SOCKET", installed.at("named.sock")).output().unwrap();
    assert!(
        stdout(&output).starts_with(installed.at("shims").to_str().unwrap()),
        "{}",
        stderr(&output)
    );
    assert_eq!(fake.asked.lock().unwrap().sessions.len(), 1);
}

#[test]
fn questions_are_answered_and_say_why_not() {
    let (installed, fake) = with_gateway();
    let table = stdout(&installed.posh(&["mounts"]));
    assert_eq!(
        table,
        "PATH       TYPE  SOURCE  OWNER  STATE\n/mnt/logs  -     -       -      no owner\n"
    );
    assert!(stdout(&installed.posh(&["mounts", "--json"])).contains("\"path\": \"/mnt/logs\""));
    assert_eq!(stdout(&installed.posh(&["resolve", "x/y"])), "x/y is local: a test\n");
    assert_eq!(
        fake.asked.lock().unwrap().resolved[0].cwd,
        installed.at("home").as_os_str().as_bytes()
    );
    assert!(
        stdout(&installed.posh(&["status"]))
            .starts_with(&format!("gateway 9.9 (protocol {PROTOCOL_VERSION}), pid 7\n"))
    );
    let stop = installed.posh(&["gateway", "stop"]);
    assert_eq!(stop.status.code(), Some(1));
    assert!(stderr(&stop).ends_with("could not be ended: this one stays\n"), "{}", stderr(&stop));

    let unconfigured = Installed::new().posh(&["mounts"]);
    assert_eq!(unconfigured.status.code(), Some(1));
    assert!(stderr(&unconfigured).starts_with("posh: no configuration found at $POSH_CONFIG"));
}

#[test]
fn explain_plans_each_pipeline_and_runs_none() {
    let (installed, fake) = with_gateway();
    fs::write(installed.at("home/a.log"), "").unwrap();
    let text = "cat *.log < $HOME/in | sort > out; touch made; grep $(date) x";
    let output = installed.posh(&["explain", "--split", "2", text]);
    assert_eq!(
        stdout(&output),
        "\
$ cat *.log < $HOME/in | sort > out\n2 stages\n$ touch made\n1 stages\n$ grep $(date) x\n1 stages\n$ date\n1 stages\n"
    );
    assert!(!installed.at("home/made").exists());
    let asked = fake.asked.lock().unwrap();
    let first = &asked.plans[0];
    assert_eq!((first.cwd.as_ref(), first.split), (installed.at("home").as_os_str().as_bytes(), 2));
    assert_eq!(first.stages[0].argv, ["cat", "a.log"]);
    assert_eq!(first.stages[0].stdin_path, format!("{}/in", installed.at("home").display()));
    assert_eq!(
        (first.stages[1].stdout_path.as_ref(), first.stages[1].unknowable.as_str()),
        (&b"out"[..], "")
    );
    assert_eq!(
        asked.plans[2].stages[0].unknowable,
        "the output of $(date) is known only when it runs"
    );
}

#[test]
fn a_nested_posh_does_not_see_the_outer_shims() {
    let installed = Installed::new().configured();
    let shims = installed.at("run/posh/session-1/bin");
    let fake = Fake::listen(&installed.socket(), &shims);
    let inner = format!("{} --door path -c 'echo $PATH'", installed.at("bin/posh").display());
    let path = stdout(&installed.posh(&["--door", "path", "-c", &inner]));
    assert_eq!(path.matches(shims.to_str().unwrap()).count(), 1, "{path}");
    let asked = fake.asked.lock().unwrap();
    assert_eq!((asked.sessions.len(), &asked.sessions[0].path), (2, &asked.sessions[1].path));
}

#[test]
fn two_hundred_sessions_from_eight_threads() {
    let (installed, fake) = with_gateway();
    thread::scope(|scope| {
        for worker in 0..8 {
            let installed = &installed;
            scope.spawn(move || {
                for round in 0..25 {
                    let output = installed.posh(&["-c", &format!("echo {worker}.{round}")]);
                    assert_eq!(
                        (stdout(&output), stderr(&output)),
                        (format!("{worker}.{round}\n"), String::new())
                    );
                }
            });
        }
    });
    assert_eq!(fake.asked.lock().unwrap().sessions.len(), 200);
}

/// Each would be read for many seconds, most of them for ever.
#[test]
fn a_text_that_is_nested_too_deep_is_the_shell_s_to_read() {
    let (installed, _fake) = with_gateway();
    for (part, times) in [("{", 40), ("{b,}{", 14), ("$(", 40), ("(case x in a) ", 40)] {
        let text = format!("echo */{}", part.repeat(times));
        let (ours, theirs) = (installed.posh(&["-c", &text]), installed.bash(&["-c", &text]));
        assert_eq!((stdout(&ours), stderr(&ours)), (stdout(&theirs), stderr(&theirs)), "{text}");
        let explained = installed.posh(&["explain", &text]);
        assert!(explained.status.code().is_some(), "{text}");
    }
}
