//! Leases of a process that was killed: the next one waits for their holders.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use nix::unistd::geteuid;
use posh_volume::{
    leases::LEASE_TIME,
    remote::{Patience, Remote},
    store::*,
};

use crate::harness::*;

/// Less than a lease lasts, and more than a reconnection takes.
const SOON: Duration = Duration::from_secs(8);

struct Process {
    child: Child,
    address: SocketAddr,
}

impl Process {
    fn start(export: &Path, state: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_posh-executor"));
        command.args(["--listen", "127.0.0.1:0", "--require", "none", "--export"]);
        command.arg(format!("{EXPORT}={}", export.display())).arg("--state").arg(state);
        if geteuid().is_root() {
            command.args(["--user", "root"]);
        }
        let mut child = command.env("RUST_LOG", "info").stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let listening = lines
            .find_map(|line| Some(line.unwrap().split_once("listening on ")?.1.trim().to_owned()));
        let address = listening.unwrap().parse().unwrap();
        // Else it would block on a full pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address }
    }
}

impl Drop for Process {
    /// Sends SIGKILL.
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

async fn behind(proxy: &Proxy) -> Remote {
    Remote::open(Arc::new(Direct(proxy.address)), EXPORT, Patience::default()).await.unwrap()
}

/// Time for making a directory.
async fn change(store: &Remote, name: &str) -> Duration {
    let began = Instant::now();
    loop {
        let op = Op::MakeDirectory { parent: store.root(), name: name.into(), mode: 0o700.into() };
        match call(store, op).await {
            Ok(_) => return began.elapsed(),
            // It was requested before the next process listened, or that one does not know the
            // directory yet.
            Err(errno) => assert!(
                matches!(errno, posh_volume::Errno::EIO | posh_volume::Errno::ESTALE),
                "{errno}"
            ),
        }
        let _ = find(store, "").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_restart_changes_wait_for_those_who_had_leases() {
    let top = tempfile::tempdir().unwrap();
    let (export, state) = (top.path().join("export"), top.path().join("state"));
    fs::create_dir(&export).unwrap();
    let first = Process::start(&export, &state);
    let proxies = [Proxy::to(first.address).await, Proxy::to(first.address).await];
    let (ada, bob) = (behind(&proxies[0]).await, behind(&proxies[1]).await);
    assert!(change(&ada, "at-first").await < SOON);

    // Bob's workstation is cut off when the executor dies, and may rely on its leases.
    proxies[1].let_through(false);
    drop(first);
    let second = Process::start(&export, &state);
    proxies[0].lead_to(second.address);
    let waited = change(&ada, "without-bob").await;
    assert!(waited > SOON, "{waited:?}");

    // It reconnects: no change waits for longer than that takes.
    proxies[1].lead_to(second.address);
    proxies[1].let_through(true);
    assert!(change(&bob, "bob-is-back").await < SOON);
    drop(second);
    let third = Process::start(&export, &state);
    proxies.iter().for_each(|proxy| proxy.lead_to(third.address));
    assert!(change(&ada, "both-are-back").await < SOON);

    // A holder that has said goodbye delays no change; nor does one that was away for too long.
    bob.close().await;
    drop(third);
    let fourth = Process::start(&export, &state);
    proxies[0].lead_to(fourth.address);
    assert!(change(&ada, "bob-has-left").await < SOON);
    assert!(waited < LEASE_TIME + SOON, "{waited:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_executor_that_lives_is_no_earlier_one() {
    let top = tempfile::tempdir().unwrap();
    let (export, state) = (top.path().join("export"), top.path().join("state"));
    fs::create_dir(&export).unwrap();
    let one = Process::start(&export, &state);
    let ada =
        Remote::open(Arc::new(Direct(one.address)), EXPORT, Patience::default()).await.unwrap();
    assert!(change(&ada, "ada").await < SOON);
    let other = Process::start(&export, &state);
    let bob =
        Remote::open(Arc::new(Direct(other.address)), EXPORT, Patience::default()).await.unwrap();
    assert!(change(&bob, "bob").await < SOON);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_dead_workstation_has_asked_for_is_not_carried_out_behind_its_successor() {
    let site = Site::new().await;
    let (dead, next, other) = (site.remote().await, site.remote().await, site.remote().await);
    // This session answers no recalls: changes of the directory wait until its lease expires.
    let _unanswered = other.notices();
    let looked = find(&other, "").await.unwrap();
    assert!(looked.leases.contains(Leases::ENTRIES));
    let (began, session, parent) = (Instant::now(), dead.session(), dead.root());
    let asked = tokio::spawn(async move {
        let op = Op::MakeDirectory { parent, name: "late".into(), mode: 0o700.into() };
        dead.call(&me(), op).await
    });
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(call(&next, Op::EndSessions(vec![session.clone()])).await, Ok(Answer::Done));
    // A repetition is no error, and does not end the session that asks.
    let own = next.session();
    assert_eq!(call(&next, Op::EndSessions(vec![session, own])).await, Ok(Answer::Done));
    let waited = change(&next, "next").await;
    assert!(
        waited > SOON && began.elapsed() > LEASE_TIME,
        "the change had to wait, too: {waited:?}"
    );
    assert!(site.path("next").is_dir() && !site.path("late").exists());
    asked.abort();
}
