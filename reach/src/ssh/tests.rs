//! Against programs that stand for ssh: what each of its ends is called.

use std::time::Instant;

use fs_mapper::config::Address;

use super::*;

/// A route whose ssh is this script; its arguments are ssh's.
fn route(script: &str) -> (Login, Route) {
    let login = Login::new(Some("ada"), "store1", None).expect("a login");
    let ssh_command = ["sh", "-c", script, "ssh"].map(str::to_owned).into();
    let route = Route {
        address: Address::Ssh(login.clone()),
        exports: vec!["/srv".to_owned()],
        ssh_command,
    };
    (login, route)
}

async fn fault(script: &str) -> String {
    let (login, route) = route(script);
    start(&login, &route).await.map(drop).expect_err(script).to_string()
}

#[tokio::test]
async fn every_failure_has_its_words() {
    let cases = [
        (
            "echo 'ssh: connect to host store1 port 22: Connection refused' >&2; exit 255",
            "ssh: connect to host store1 port 22: Connection refused",
        ),
        ("exit 255", "ssh ended without a word (exit status: 255)"),
        ("test \"$(pwd)\" = / && echo at the top >&2; exit 255", "ssh: at the top"),
        ("kill -9 $$", "ssh ended without a word (signal: 9 (SIGKILL))"),
        (
            "echo 'sh: 1: exec: posh-executor: not found' >&2; exit 127",
            "posh-executor is not installed there; run: posh attach ada@store1",
        ),
        (
            "echo 'ada@store1: Permission denied (publickey).' >&2; exit 255",
            "ssh: ada@store1: Permission denied (publickey); ssh can ask nothing here, so this must work: \
             ssh -o BatchMode=yes -l ada -- store1 true",
        ),
        (
            "printf 'Last login: never\\n'; exec sleep 60",
            "ada@store1 said \"Last login: never\" where posh-executor was to speak; ",
        ),
        (
            "printf posh; exec >&-; exec sleep 60",
            "ada@store1 said \"posh\" where posh-executor was to speak; ",
        ),
        ("printf hello; exec sleep 60", "ada@store1 said \"hello\" where"),
    ];
    for (script, expect) in cases {
        let found = fault(script).await;
        assert!(found.starts_with(expect), "{script}: {found}");
    }
    let (login, mut route) = route("");
    route.ssh_command = vec!["/nonexistent/ssh".to_owned()];
    let found = start(&login, &route).await.map(drop).expect_err("no such program").to_string();
    assert_eq!(found, "cannot run /nonexistent/ssh");
}

#[tokio::test]
async fn the_greeting_is_taken_off_and_the_end_is_told() {
    let (login, route) =
        route("echo 'posh-executor --stdio'; echo more; echo why >&2; read line; exit 3");
    let (mut stream, mut watch) = start(&login, &route).await.expect("greeted");
    let mut rest = String::new();
    tokio::io::AsyncWriteExt::write_all(&mut stream, b"go\n").await.expect("written");
    stream.read_to_string(&mut rest).await.expect("read");
    assert_eq!((rest.as_str(), watch.ended().await.as_str()), ("more\n", "ssh: why"));
}

/// Also one that does not look at its input any more ends with the stream.
#[tokio::test]
async fn a_dropped_stream_ends_the_process() {
    let (login, route) = route("echo 'posh-executor --stdio'; exec sleep 600");
    let (stream, mut watch) = start(&login, &route).await.expect("greeted");
    let dropped = Instant::now();
    drop(stream);
    assert_eq!(watch.ended().await, "ssh ended without a word (signal: 9 (SIGKILL))");
    assert!(dropped.elapsed() >= FAREWELL);
}
