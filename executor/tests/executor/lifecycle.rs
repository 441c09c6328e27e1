//! Starts, ends, and leftovers of both.

use std::{
    fs::File,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::{fd::AsRawFd as _, unix::fs::PermissionsExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use hyper_util::rt::TokioIo;
use nix::{
    fcntl::{Flock, FlockArg},
    mount::MsFlags,
    sched::{CloneFlags, setns, unshare},
    sys::signal::{Signal, kill},
    unistd::{Pid, geteuid},
};
use posh_executor::identity::UnixUser;
use posh_proto::{
    PROTOCOL_VERSION, STDIO_GREETING,
    executor::{
        DescribeRequest, EnvVar, RunSpec, Signal as RunSignal, ToolsRequest, WatchedTree,
        executor_client::ExecutorClient, exited, rejected, run_input, run_output,
    },
    locales::{self, Locales},
};
use tokio::io::AsyncReadExt as _;
use tonic::transport::Endpoint;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::harness::*;

/// Takes a lock, which its processes inherit, and leaves some in other sessions.
const CLINGING: &str = "exec 9>lock; flock 9; setsid sleep 1000 & (setsid sh -c 'trap \"\" TERM HUP; sleep 1000; :' &) ; echo ready; sleep 1000";

/// Waits until no process has the lock of [`CLINGING`] any more.
pub async fn lock_is_free(store: &Path) {
    let path = store.join("lock");
    let lock = tokio::task::spawn_blocking(move || {
        Flock::lock(File::open(path).unwrap(), FlockArg::LockExclusive)
            .map(drop)
            .map_err(|(_, errno)| errno)
    });
    tokio::time::timeout(PATIENCE, lock).await.expect("all processes end").unwrap().unwrap();
}

#[tokio::test]
async fn a_cancelled_run_leaves_no_process() {
    let lab = Lab::start().await;
    let mut call = Call::open(&lab.client, command(&["sh", "-c", CLINGING])).await;
    call.until_output("ready").await;
    drop(call);
    lock_is_free(lab.store.path()).await;
}

/// Forks without end: each process is soon another one.
const FLEEING: &str = "use POSIX; $SIG{TERM} = 'IGNORE'; for (1 .. 40) { fork or last } print qq(ready\\n); close STDOUT; \
                       while (1) { my $child = fork; next if !defined $child; if ($child) { fork or next; POSIX::_exit(0) } }";

// Guard: fence::enter_run; a look for them one by one may find none of these in time.
#[tokio::test]
async fn a_run_leaves_no_process_however_often_they_fork() {
    let uid = 1_800_000_000 + std::process::id();
    let user = UnixUser { name: "runaway".into(), uid, gid: uid, groups: vec![], home: "/".into() };
    let lab = Lab::with(|config| {
        config.confinement.user = Some(user.into());
        config.confinement.max_processes = 150;
    })
    .await;
    std::fs::set_permissions(lab.store.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let script = format!("exec 9>lock; flock 9; exec perl -e '$| = 1; {FLEEING}'");
    let script = script.replace("'IGNORE'", "q(IGNORE)");
    let mut other = Call::open(&lab.client, command(&["sh", "-c", "echo ready; sleep 1000"])).await;
    other.until_output("ready").await;
    let mut call = Call::open(&lab.client, command(&["sh", "-c", &script])).await;
    call.until_output("ready").await;
    drop(call);
    lock_is_free(lab.store.path()).await;
    // Another run of the same user goes on.
    other.send(run_input::Kind::Signal(RunSignal { stage: 1, signal: 15, group: true })).await;
    let outcome = other.collect(bytes::Bytes::new()).await;
    assert_eq!(outcome.exits[&1].how, Some(exited::How::Signal(15)));
}

/// In the view of this keeper, mounts a file system that never answers; it does when this is
/// dropped.
fn hang_within(keeper: &Path, point: &'static str) -> File {
    let device = File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let view = File::open(keeper.join("ns/mnt")).unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
    let mount = move || {
        unshare(CloneFlags::CLONE_FS).unwrap();
        setns(view, CloneFlags::CLONE_NEWNS).unwrap();
        let none = MsFlags::empty();
        nix::mount::mount(Some("hangs"), point, Some("fuse"), none, Some(options.as_str()))
            .unwrap();
    };
    std::thread::spawn(mount).join().unwrap();
    device
}

// Guard: runner::teller. A tree that a command may have changed lies on a file system that hangs
// once that has ended.
#[tokio::test]
async fn a_run_ends_though_a_file_system_hangs_that_is_looked_at_for_it() {
    const TREE: &str = "/mnt/posh-test-workstation/logs/d";
    let lab = Lab::start().await;
    std::fs::create_dir(lab.store.path().join("d")).unwrap();
    let mut spec = pipeline_with_input(&["cat", "sh"]);
    spec.stages[0].watched_trees =
        vec![WatchedTree { path: TREE.into(), ..WatchedTree::default() }];
    spec.stages[1].argv = ["sh", "-c", CLINGING].map(|word| word.into()).to_vec();
    let mut call = Call::open(&lab.client, spec).await;
    call.until_output("ready").await;
    let hung = hang_within(&keeper(&lab), TREE);
    call.send(run_input::Kind::End(IN)).await;
    // It is being looked at.
    tokio::time::sleep(Duration::from_millis(500)).await;
    drop(call);
    lock_is_free(lab.store.path()).await;
    drop(hung);
}

#[tokio::test]
async fn a_finished_run_leaves_no_process() {
    let lab = Lab::start().await;
    let script = "exec 9>lock; flock 9; setsid sleep 1000 >/dev/null 2>&1 & echo bye";
    assert_eq!(lab.run(command(&["sh", "-c", script])).await.text(), "bye\n");
    lock_is_free(lab.store.path()).await;
}

/// Messages that cross a run's end must not meet a call that was reset: HTTP/2 libraries count such
/// frames for a connection's life, and end it, with all its runs, after some ten thousand.
#[tokio::test]
async fn a_client_is_heard_out_after_its_run() {
    let lab = Lab::start().await;
    let mut call = Call::open(&lab.client, command(&["true"])).await;
    while call.next().await.is_some() {}
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert!(!call.input.is_closed(), "the call was reset");
        call.send(run_input::Kind::Received(1)).await;
    }
}

/// Each answered call that is still open takes memory.
#[tokio::test]
async fn few_calls_are_heard_out() {
    let lab = Lab::start().await;
    let mut calls = Vec::new();
    for _ in 0..300 {
        let mut call = Call::open(&lab.client, RunSpec { protocol: 0, ..command(&["true"]) }).await;
        while call.next().await.is_some() {}
        calls.push(call);
    }
    let reset = async {
        while calls.iter().filter(|call| call.input.is_closed()).count() < 300 - 256 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    // Less than the time for which the rest of a call is read.
    tokio::time::timeout(Duration::from_secs(4), reset).await.expect("those beyond 256 are reset");
    assert!(!calls[0].input.is_closed());
}

#[tokio::test]
async fn a_lost_connection_leaves_no_process() {
    let lab = Lab::start().await;
    let client = connect(lab.address).await;
    let mut call = Call::open(&client, command(&["sh", "-c", CLINGING])).await;
    call.until_output("ready").await;
    drop((call, client));
    lock_is_free(lab.store.path()).await;
}

#[tokio::test]
async fn a_frozen_peer_leaves_no_process() {
    let lab = Lab::start().await;
    let between = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, server) = (between.local_addr().unwrap(), lab.address);
    // Forwards until told to freeze; the connections stay open.
    let (freeze, frozen) = tokio::sync::oneshot::channel::<()>();
    let relay = tokio::spawn(async move {
        let (mut near, _) = between.accept().await.unwrap();
        let mut far = tokio::net::TcpStream::connect(server).await.unwrap();
        tokio::select! {
            _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
            _ = frozen => {}
        }
        (near, far)
    });
    let client = connect(address).await;
    let mut call = Call::open(&client, command(&["sh", "-c", CLINGING])).await;
    call.until_output("ready").await;
    freeze.send(()).unwrap();
    let _open = relay.await.unwrap();
    lock_is_free(lab.store.path()).await;
}

/// An executor started by ssh has one connection: even a run that would be kept for another one
/// ends with it.
#[tokio::test]
async fn a_lost_ssh_leaves_no_process() {
    let store = tempfile::tempdir().unwrap();
    let mut ssh = tokio::process::Command::new(env!("CARGO_BIN_EXE_posh-executor"));
    ssh.args(["--stdio", "--export", &format!("logs={}", store.path().display())])
        .kill_on_drop(true);
    let mut executor = ssh.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut input, mut output) = (executor.stdin.take().unwrap(), executor.stdout.take().unwrap());
    output.read_exact(&mut vec![0; STDIO_GREETING.len()]).await.unwrap();
    let (near, far) = tokio::io::duplex(1 << 16);
    let (mut said, mut heard) = tokio::io::split(far);
    let hearing = tokio::spawn(async move { tokio::io::copy(&mut output, &mut heard).await });
    let _saying = tokio::spawn(async move { tokio::io::copy(&mut said, &mut input).await });
    let only = std::sync::Mutex::new(Some(near));
    let connector = tower::service_fn(move |_| {
        let only = only.lock().unwrap().take().map(TokioIo::new);
        async move { only.ok_or_else(|| std::io::Error::from(std::io::ErrorKind::NotConnected)) }
    });
    let channel =
        Endpoint::from_static("http://ssh").connect_with_connector(connector).await.unwrap();
    let spec = RunSpec { grace_ms: 60_000, ..command(&["sh", "-c", CLINGING]) };
    let mut call = Call::open(&ExecutorClient::new(channel), spec).await;
    call.until_output("ready").await;
    // The reader is gone without an orderly end: messages would still be delivered.
    hearing.abort();
    let ended = Duration::from_secs(8);
    tokio::time::timeout(ended, lock_is_free(store.path()))
        .await
        .expect("it ends before a grace would");
    tokio::time::timeout(PATIENCE, executor.wait()).await.expect("the executor ends too").unwrap();
}

/// `posh-executor` as a program.
pub struct Program {
    child: Child,
    stderr: BufReader<Box<dyn std::io::Read>>,
    configuration: tempfile::NamedTempFile,
}

impl Program {
    pub fn start(command: &mut Command, store: &Path) -> Self {
        Self::with(command, store, "")
    }

    /// With more lines for `[confinement]`.
    pub fn with(command: &mut Command, store: &Path, confinement: &str) -> Self {
        Self::configured(command, store, confinement, str::to_owned)
    }

    /// With a configuration that `change` modifies first.
    fn configured(
        command: &mut Command,
        store: &Path,
        confinement: &str,
        change: impl Fn(&str) -> String,
    ) -> Self {
        let mut configuration = tempfile::NamedTempFile::new().unwrap();
        // An unprivileged executor, which setpriv starts, can only run commands as its own user.
        let user = if command.get_program() == "setpriv" { "" } else { "user = \"root\"\n" };
        let text = format!(
            "listen = \"127.0.0.1:0\"\n[[export]]\nname = \"logs\"\npath = {:?}\n[confinement]\ncommands = [\"*\"]\n{user}{confinement}",
            store.to_str().unwrap()
        );
        configuration.write_all(change(&text).as_bytes()).unwrap();
        let readable = std::fs::Permissions::from_mode(0o644);
        configuration.as_file().set_permissions(readable).unwrap();
        command.arg("--config").arg(configuration.path());
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let stderr: Box<dyn std::io::Read> = Box::new(child.stderr.take().unwrap());
        let stderr = BufReader::new(stderr);
        Self { child, stderr, configuration }
    }

    pub fn address(&mut self) -> std::net::SocketAddr {
        let said = self.until("listening on ");
        said.split_whitespace().next().unwrap().parse().unwrap()
    }

    /// Reads its log up to these words; returns the rest of their line.
    pub fn until(&mut self, words: &str) -> String {
        let mut log = String::new();
        loop {
            let start = log.len();
            assert!(
                self.stderr.read_line(&mut log).unwrap() > 0,
                "it did not say {words:?}: {log}"
            );
            if let Some((_, rest)) = log[start..].split_once(words) {
                return rest.to_owned();
            }
        }
    }

    /// Changes its configuration and has it read again.
    fn reconfigure(&mut self, change: impl Fn(&str) -> String) {
        let text = std::fs::read_to_string(self.configuration.path()).unwrap();
        std::fs::write(self.configuration.path(), change(&text)).unwrap();
        kill(self.pid(), Signal::SIGHUP).unwrap();
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_posh-executor"))
}

/// The executor is not notified. The account database is in its own mount namespace.
#[tokio::test]
async fn who_leaves_a_group_loses_its_rights() {
    if !geteuid().is_root() {
        return;
    }
    let store = tempfile::tempdir().unwrap();
    let groups = tempfile::NamedTempFile::new().unwrap();
    let of_machine = std::fs::read_to_string("/etc/group").unwrap();
    std::fs::write(groups.path(), format!("{of_machine}posh-test-staff:x:64999:nobody\n")).unwrap();
    std::fs::set_permissions(groups.path(), std::fs::Permissions::from_mode(0o644)).unwrap();
    let mut command = Command::new("unshare");
    command.args([
        "--mount",
        "sh",
        "-c",
        "mount --bind \"$1\" /etc/group && shift && exec \"$@\"",
        "sh",
    ]);
    command.arg(groups.path()).arg(program().get_program()).env("RUST_LOG", "info");
    let as_nobody = |text: &str| text.replace("user = \"root\"", "user = \"nobody\"");
    let mut executor = Program::configured(&mut command, store.path(), "", as_nobody);
    let client = connect(executor.address()).await;
    let is_in = || async {
        let groups = run(&client, pipeline(&["id -G"]), bytes::Bytes::new()).await.text();
        groups.split_whitespace().any(|group| group == "64999")
    };
    assert!(is_in().await);
    std::fs::write(groups.path(), of_machine).unwrap();
    executor.until("accounts of this machine have changed");
    executor.until("took over the configuration");
    assert!(!is_in().await);
}

#[tokio::test]
async fn a_hangup_has_the_configuration_read_anew() {
    let store = tempfile::tempdir().unwrap();
    let mut executor = Program::start(program().env("RUST_LOG", "info"), store.path());
    let client = connect(executor.address()).await;
    let echo = || run(&client, pipeline(&["echo x"]), bytes::Bytes::new());
    assert_eq!(echo().await.text(), "x\n");
    executor.reconfigure(|text| text.replace("[\"*\"]", "[\"cat\"]"));
    executor.until("took over the configuration");
    assert!(echo().await.refusal().message.contains("this executor does not run echo"));
    // One with a mistake changes nothing, and the log tells its place.
    executor.reconfigure(|text| text.replace("[\"cat\"]", "[\"*\"]\ncolour = 1"));
    let said = executor.until("the configuration stays as it was, since it can't be read anew: ");
    assert!(said.contains(":7:1: unknown key `colour`"), "{said}");
    assert!(echo().await.refusal().message.contains("this executor does not run echo"));
    executor
        .reconfigure(|text| text.replace("\ncolour = 1", "").replace("127.0.0.1:0", "127.0.0.1:9"));
    let said = executor.until("took over the configuration, other than ");
    assert_eq!(said, "listen: that takes a restart\n");
    assert_eq!(echo().await.text(), "x\n");
}

/// A directory service that hangs, or says for a moment that it knows nobody, keeps nobody in who
/// was taken out, and takes nobody out.
#[tokio::test]
async fn a_directory_service_that_is_away_changes_no_rights() {
    if !geteuid().is_root() {
        return;
    }
    let (store, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = |name: &str| files.path().join(name);
    std::fs::copy("/usr/bin/getent", file("real")).unwrap();
    let getent = |text: &str| {
        std::fs::write(file("new"), format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(file("new"), std::fs::Permissions::from_mode(0o755)).unwrap();
        // In place: it is mounted by its inode.
        std::fs::write(file("getent"), std::fs::read(file("new")).unwrap()).unwrap();
        std::fs::set_permissions(file("getent"), std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    let real = format!("exec {} \"$@\"", file("real").display());
    getent(&real);
    std::fs::write(file("nsswitch"), "passwd: files sss\ngroup: files\n").unwrap();
    let mut command = Command::new("unshare");
    let mounts = "mount --bind $1/getent /usr/bin/getent; mount --bind $1/nsswitch \
                  /etc/nsswitch.conf; shift; exec \"$@\"";
    command.args(["--mount", "sh", "-ec", mounts, "sh"]).arg(files.path());
    command.arg(program().get_program()).env("RUST_LOG", "info");
    let as_nobody = |text: &str| text.replace("user = \"root\"", "user = \"nobody\"");
    let mut executor = Program::configured(&mut command, store.path(), "", as_nobody);
    let address = executor.address();
    // Anew: waiting for the log keeps this thread from answering pings.
    let echo = async || {
        let client = connect(address).await;
        run(&client, pipeline(&["echo x"]), bytes::Bytes::new()).await
    };
    assert_eq!(echo().await.text(), "x\n");
    for away in ["exit 2", "sleep 100"] {
        getent(away);
        // What was taken out of the file is out.
        executor.reconfigure(|text| text.replace("[\"*\"]", "[\"cat\"]"));
        executor.until("took over the configuration");
        assert!(echo().await.refusal().message.contains("this executor does not run echo"));
        getent(&real);
        executor.reconfigure(|text| text.replace("[\"cat\"]", "[\"*\"]"));
        executor.until("took over the configuration");
        assert_eq!(echo().await.text(), "x\n");
    }
}

/// setrlimit(2): a write beyond the limit on file sizes brings SIGXFSZ, and a volume's caller
/// chooses where it writes.
#[tokio::test]
async fn a_limit_on_file_sizes_does_not_end_it() {
    let store = tempfile::tempdir().unwrap();
    let mut executor = Program::start(&mut program(), store.path());
    let client = connect(executor.address()).await;
    kill(executor.pid(), Signal::SIGXFSZ).unwrap();
    let says = async |script| {
        run(&client, command(&["bash", "-c", script]), bytes::Bytes::new()).await.text()
    };
    assert_eq!(says("echo there").await, "there\n");
    // Its commands start with the default action for the signal.
    let script = "ulimit -f 1; bash -c 'head -c 9999 /dev/zero > f'; echo $?";
    assert_eq!(says(script).await, format!("{}\n", 128 + nix::libc::SIGXFSZ));
}

#[tokio::test]
async fn nobody_needs_to_read_its_log() {
    let store = tempfile::tempdir().unwrap();
    let mut executor = Program::start(&mut program(), store.path());
    let client = connect(executor.address()).await;
    executor.stderr = BufReader::new(Box::new(std::io::empty()));
    // Each run is a line of the log.
    for _ in 0..3 {
        assert_eq!(
            run(&client, command(&["sh", "-c", "echo there"]), bytes::Bytes::new()).await.text(),
            "there\n"
        );
    }
}

/// Threads that hang on a log without a reader do not keep the executor from ending.
#[tokio::test]
async fn it_ends_when_told_though_all_its_threads_hang() {
    let store = tempfile::tempdir().unwrap();
    let drain = |text: &str| format!("drain_seconds = 1\n{text}");
    let mut executor =
        Program::configured(program().env("RUST_LOG", "info"), store.path(), "", drain);
    let client = connect(executor.address()).await;
    // Each run is a line, until the pipe is full and no thread continues.
    let mut spec = pipeline(&["true"]);
    spec.run_id = "x".repeat(64);
    spec.stages[0].cwd = "/".repeat(250).into();
    let hanging = async {
        loop {
            let runs: Vec<_> = (0..64)
                .map(|_| {
                    tokio::spawn({
                        let (client, spec) = (client.clone(), spec.clone());
                        async move { run(&client, spec, bytes::Bytes::new()).await }
                    })
                })
                .collect();
            for run in runs {
                let _ = run.await;
            }
        }
    };
    let _ = tokio::time::timeout(Duration::from_secs(4), hanging).await;
    kill(executor.pid(), Signal::SIGTERM).unwrap();
    let longest = posh_executor::longest_end(Duration::from_secs(1)) + Duration::from_secs(5);
    let ended = async {
        while executor.child.try_wait().unwrap().is_none() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(longest, ended).await.expect("it ends all the same");
}

#[tokio::test]
async fn the_record_tells_beginnings_and_survives_a_kill() {
    let store = tempfile::tempdir().unwrap();
    let audit = store.path().join("audit");
    let with_record = |text: &str| format!("audit = {:?}\n{text}", audit.to_str().unwrap());
    let mut executor = Program::configured(&mut program(), store.path(), "", with_record);
    let client = connect(executor.address()).await;
    assert_eq!(run(&client, pipeline(&["echo x"]), bytes::Bytes::new()).await.text(), "x\n");
    let mut call = Call::open(&client, command(&["sh", "-c", CLINGING])).await;
    call.until_output("ready").await;
    kill(executor.pid(), Signal::SIGKILL).unwrap();
    lock_is_free(store.path()).await;
    let events = || {
        let text = std::fs::read_to_string(&audit).unwrap();
        text.lines()
            .map(|line| {
                line.split("\"event\":\"").nth(1).unwrap().split('"').next().unwrap().to_owned()
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(events(), ["start", "run_begin", "run_end", "run_begin"]);
    let mut next = Program::configured(&mut program(), store.path(), "", with_record);
    let _ = next.address();
    let text = std::fs::read_to_string(&audit).unwrap();
    assert!(text.lines().last().unwrap().contains("\"killed\":true"), "{text}");
    kill(next.pid(), Signal::SIGTERM).unwrap();
    let _ = next.child.wait();
    assert_eq!(events().last().unwrap(), "stop");
    let verify = || program().args(["audit", "verify"]).arg(&audit).output().unwrap();
    assert!(verify().status.success(), "{:?}", verify());
    std::fs::write(&audit, text.replace("\"programs\":[\"echo\"]", "\"programs\":[\"cat\"]"))
        .unwrap();
    let broken = verify();
    assert_eq!(broken.status.code(), Some(1));
    let said = String::from_utf8(broken.stdout).unwrap();
    assert!(said.contains("audit:3: the line before it is not the one"), "{said}");
}

#[tokio::test]
async fn a_killed_executor_leaves_no_process_and_no_directory() {
    let (store, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut executor = Program::start(program().env("TMPDIR", temporary.path()), store.path());
    let client = connect(executor.address()).await;
    let mut call = Call::open(&client, command(&["sh", "-c", CLINGING])).await;
    call.until_output("ready").await;
    kill(executor.pid(), Signal::SIGKILL).unwrap();
    lock_is_free(store.path()).await;
    // The runners hold the executor's standard error until they end.
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut executor.stderr, &mut rest).unwrap();
    assert_eq!(std::fs::read_dir(temporary.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn memory_stays_bounded_while_nobody_reads() {
    let store = tempfile::tempdir().unwrap();
    let mut executor = Program::start(&mut program(), store.path());
    let address = executor.address();
    let (unread, busy) = (connect(address).await, connect(address).await);
    let mut calls = Vec::new();
    for _ in 0..8 {
        let mut spec = pipeline(&["yes"]);
        spec.outlets[0].initial_credit_bytes = u64::MAX;
        calls.push(Call::open(&unread, spec).await);
    }
    // While this passes, the others could have filled any memory.
    let outcome = run(&busy, pipeline(&["head -c 100000000 /dev/zero"]), bytes::Bytes::new()).await;
    assert_eq!(outcome.out.len(), 100_000_000);
    let status = std::fs::read_to_string(format!("/proc/{}/status", executor.child.id())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak_kib: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak_kib < 100 << 10, "{peak_kib} KiB");
}

#[tokio::test]
async fn an_ordinary_user_serves_in_a_user_namespace() {
    let store = tempfile::tempdir().unwrap();
    let bin = tempfile::tempdir().unwrap();
    let copy = open_to(&store, &bin);
    let mut command_line = Command::new("setpriv");
    command_line.args(["--reuid", USER, "--regid", USER, "--clear-groups"]).arg(&copy);
    let mut executor = Program::start(&mut command_line, store.path());
    let mut client = connect(executor.address()).await;
    let reply =
        client.describe(DescribeRequest { protocol: PROTOCOL_VERSION }).await.unwrap().into_inner();
    assert!(reply.namespaces, "{}", reply.namespaces_reason);
    let script =
        "pwd -P; id -u; echo x > f; stat -c %u f; touch /usr/x || touch /x || echo read-only";
    let outcome = run(&client, command(&["sh", "-c", script]), bytes::Bytes::new()).await;
    assert_eq!(outcome.text(), format!("{MOUNT}\n{USER}\n{USER}\nread-only\n"));
    let mut call = Call::open(&client, command(&["sh", "-c", CLINGING])).await;
    call.until_output("ready").await;
    kill(executor.pid(), Signal::SIGKILL).unwrap();
    lock_is_free(store.path()).await;
}

/// Commands without side effects, as far as these annotations know.
const HARMLESS: &str = "
pwd:
- FLAGS:
  - {short: P}
sh:
  helpers: [flock, setsid, sh, sleep]
  annotations:
  - OPTPARAMS:
    - {short: c, type: string, size: 1}
";

#[tokio::test]
async fn without_namespaces_runs_need_the_same_path_on_both_sides() {
    let store = tempfile::tempdir().unwrap();
    let bin = tempfile::tempdir().unwrap();
    let copy = open_to(&store, &bin);
    let mut command_line = without_namespaces(&copy);
    std::fs::write(bin.path().join("own.yaml"), HARMLESS).unwrap();
    let confinement = format!("require = \"none\"\nannotations = [{:?}]\n", bin.path());
    let mut executor = Program::with(&mut command_line, store.path(), &confinement);
    let mut client = connect(executor.address()).await;
    let reply =
        client.describe(DescribeRequest { protocol: PROTOCOL_VERSION }).await.unwrap().into_inner();
    assert!(
        !reply.namespaces && reply.namespaces_reason.contains("cannot make a namespace"),
        "{reply:?}"
    );
    // Mechanisms that need no rights are in force all the same.
    let reached = &reply.confinement;
    assert!(
        reached.starts_with("none: seccomp, landlock ") && reached.contains("missing: mounts"),
        "{reached}"
    );
    let outcome = run(&client, pipeline(&["pwd"]), bytes::Bytes::new()).await;
    assert_eq!(outcome.refusal().kind(), rejected::Kind::NoNamespace);
    let path = store.path().to_str().unwrap();
    let there = |argv: &[&str]| {
        let mut spec = command(argv);
        spec.mounts = vec![mount(path, "logs", "")];
        spec.stages[0].cwd = path.to_owned().into();
        spec
    };
    let outcome = run(&client, there(&["pwd", "-P"]), bytes::Bytes::new()).await;
    assert_eq!(outcome.text(), format!("{path}\n"));
    // Without a PID namespace the descendants are found all the same.
    let lock = store.path().join("lock");
    File::create(&lock).unwrap();
    std::os::unix::fs::chown(&lock, USER.parse().ok(), None).unwrap();
    let mut clinging = there(&["sh", "-c", CLINGING.strip_prefix("exec 9>lock; ").unwrap()]);
    clinging.stages[0].descriptors.push(descriptor(9, file("lock", nix::libc::O_WRONLY, 0)));
    let mut call = Call::open(&client, clinging.clone()).await;
    call.until_output("ready").await;
    drop(call);
    lock_is_free(store.path()).await;
    let mut call = Call::open(&client, clinging).await;
    call.until_output("ready").await;
    kill(executor.pid(), Signal::SIGKILL).unwrap();
    lock_is_free(store.path()).await;
}

#[test]
fn where_confinement_is_less_than_required_nothing_is_served() {
    let store = tempfile::tempdir().unwrap();
    let bin = tempfile::tempdir().unwrap();
    let copy = open_to(&store, &bin);
    // The default is strict.
    for (level, line, is_reached) in [
        ("strict", "", false),
        ("strict", "require = \"strict\"\n", false),
        ("namespaces", "require = \"namespaces\"\n", false),
        ("none", "require = \"none\"\n", true),
    ] {
        let mut executor = Program::with(&mut without_namespaces(&copy), store.path(), line);
        if is_reached {
            executor.address();
            continue;
        }
        let mut said = String::new();
        executor.stderr.read_to_string(&mut said).unwrap();
        assert_eq!(executor.child.wait().unwrap().code(), Some(2), "{said}");
        let expected = format!(
            "refusing to serve: the confinement `{level}` is required, and this machine reaches none: seccomp"
        );
        assert!(said.contains(&expected), "{said}");
        assert!(!said.contains("listening"), "{said}");
    }
    // The machine makes the difference: the same program starts without those limits.
    Program::with(&mut program(), store.path(), "require = \"strict\"\n").address();
}

/// The program as an ordinary user in a namespace that allows no further ones.
fn without_namespaces(program: &Path) -> Command {
    let script = "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --ambient-caps=-all --inh-caps=-all \"$@\"";
    let mut command_line = Command::new("setpriv");
    command_line.args(["--reuid", USER, "--regid", USER, "--clear-groups"]);
    command_line
        .args(["unshare", "--user", "--map-current-user", "--keep-caps", "sh", "-c", script, "sh"])
        .arg(program);
    command_line
}

/// A user without files on any machine.
const USER: &str = "23456";

/// Gives the store to [`USER`], and a copy of the program that they can run: where
/// the test's own build is may not be open to others.
fn open_to(store: &tempfile::TempDir, bin: &tempfile::TempDir) -> PathBuf {
    let id = USER.parse().unwrap();
    std::os::unix::fs::chown(store.path(), Some(id), Some(id)).unwrap();
    std::fs::set_permissions(bin.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    let copy = bin.path().join("posh-executor");
    std::fs::copy(env!("CARGO_BIN_EXE_posh-executor"), &copy).unwrap();
    copy
}

#[tokio::test]
async fn a_terminated_executor_lets_runs_end() {
    let store = tempfile::tempdir().unwrap();
    let mut executor = Program::start(&mut program(), store.path());
    let client = connect(executor.address()).await;
    let script = "echo ready; while ! test -e go; do sleep 0.02; done; echo done";
    let mut call = Call::open(&client, command(&["sh", "-c", script])).await;
    call.until_output("ready").await;
    kill(executor.pid(), Signal::SIGTERM).unwrap();
    std::fs::write(store.path().join("go"), "").unwrap();
    call.until_output("done").await;
    call.until(|kind| matches!(kind, run_output::Kind::Finished(_)).then_some(())).await;
    assert!(executor.child.wait().unwrap().success());
}

#[tokio::test]
async fn runs_that_take_too_long_to_end_are_killed() {
    let mut lab = Lab::with(|config| config.drain = std::time::Duration::from_millis(50)).await;
    let mut call = Call::open(&lab.client, command(&["sh", "-c", CLINGING])).await;
    call.until_output("ready").await;
    lab.stop();
    lock_is_free(lab.store.path()).await;
    (&mut lab.served).await.unwrap().unwrap();
}

#[test]
fn plain_text_is_refused_where_others_can_reach_it() {
    let output = program().args(["--listen", "0.0.0.0:0", "--export", "a=/"]).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("refusing to serve plain text on 0.0.0.0:0"), "{message}");
}

#[test]
fn root_is_nobodys_user_by_omission() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("executor.toml");
    let refused = |arguments: &[&str], text: &str| {
        std::fs::write(&file, text).unwrap();
        let output = program().args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let hint = "refusing to run everybody's commands as root: pass --user NAME";
    let listen = ["--listen", "127.0.0.1:0", "--export", "a=/"];
    let said = refused(&listen, "");
    assert!(said.contains(hint), "{said}");
    let said =
        refused(&[&listen[..], &["--listen", "0.0.0.0:0", "--allow-plaintext"]].concat()[2..], "");
    assert!(said.contains(hint), "{said}");
    let said = refused(&[&listen[..], &["--user", "no-such-user-here"]].concat(), "");
    assert!(
        said.contains("this machine has no user `no-such-user-here`") && !said.contains(hint),
        "{said}"
    );
    let said = refused(&[&listen[..], &["--user", "nobody", "--trust-caller-ids"]].concat(), "");
    assert!(said.contains("`trust_caller_ids` is only accepted with user = \"root\""), "{said}");
    let export = "[[export]]\nname = \"a\"\npath = \"/\"\n";
    let config = ["--config", file.to_str().unwrap()];
    let said =
        refused(&config, &format!("listen = \"127.0.0.1:0\"\nallow_plaintext = true\n{export}"));
    assert!(said.contains("executor.toml:1:10: ") && said.contains(hint), "{said}");
    let said = refused(&config, &format!("{export}[tls]\n[[identity]]\nname = \"ada\"\n"));
    assert!(
        said.contains(
            "executor.toml:5:1: commands of this [[identity]] would run as root; say user = "
        ),
        "{said}"
    );
    // Named explicitly, root is served, with a warning.
    let mut executor = Program::start(&mut program(), directory.path());
    executor.until("is root below the exports");
    executor.address();
}

#[test]
fn a_wrong_configuration_is_reported_before_anything_starts() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("executor.toml");
    std::fs::write(&file, "lisen = 1\n[[export]]\nname = \"a\"\npath = \"no/such/directory\"\n")
        .unwrap();
    let output = program().arg("--config").arg(&file).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("executor.toml:1:1: unknown key `lisen`"), "{message}");
    let relative =
        "executor.toml:4:8: path of export `a` must be absolute, not `no/such/directory`";
    assert!(message.contains(relative), "{message}");
}

/// For example because of a user who may write the parent directory: everybody else's exports and
/// rights still apply.
#[tokio::test]
async fn an_export_that_can_not_be_served_is_left_out() {
    let [store, around] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let point = around.path().join("point");
    let directory = point.join("n");
    std::fs::create_dir(&point).unwrap();
    let with_export = |text: &str| {
        let export = format!(
            "[[export]]\nname = \"n\"\npath = {:?}\n[confinement]",
            directory.to_str().unwrap()
        );
        text.replace("[confinement]", &export)
    };
    // It is missing at the start. Each run would be a line of a log that nobody reads.
    let mut executor = Program::configured(
        program().env("RUST_LOG", "info,posh_executor::run=error"),
        store.path(),
        "",
        with_export,
    );
    let said = executor.until("an export is left out: ");
    assert!(
        said.ends_with(
            "n of export `n` does not exist; make the directory, or take the export out, then send SIGHUP\n"
        )
    );
    let client = connect(executor.address()).await;
    let on_export =
        |program: &str| RunSpec { mounts: vec![mount(MOUNT, "n", "")], ..pipeline(&[program]) };
    let refused = |spec: RunSpec| {
        let client = client.clone();
        async move {
            run(&client, spec, bytes::Bytes::new()).await.rejected.map(|rejected| rejected.message)
        }
    };
    // Each of the following configurations removes commands.
    let taken = |program: &'static str| async move {
        while refused(pipeline(&[program])).await.is_none() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert_eq!(refused(pipeline(&["echo"])).await, None);
    let why = refused(on_export("echo")).await.unwrap();
    assert!(
        why.contains("does not serve the export `n` just now: its directory does not exist; "),
        "{why}"
    );
    // It exists now.
    std::fs::create_dir(&directory).unwrap();
    executor.reconfigure(|text| text.replace("[\"*\"]", "[\"pwd\", \"true\"]"));
    tokio::time::timeout(PATIENCE, taken("echo")).await.expect("the configuration counts");
    assert_eq!(refused(on_export("pwd")).await, None);
    // A user puts a link in its place.
    std::fs::rename(&directory, point.join("gone")).unwrap();
    std::os::unix::fs::symlink("gone", &directory).unwrap();
    std::os::unix::fs::chown(&point, Some(65534), None).unwrap();
    executor.reconfigure(|text| text.replace("\"pwd\", ", ""));
    tokio::time::timeout(PATIENCE, taken("pwd")).await.expect("the configuration counts");
    assert_eq!(refused(pipeline(&["true"])).await, None);
    let why = refused(on_export("true")).await.unwrap();
    assert!(why.contains("its path leads through a link; "), "{why}");
    // A hanging file system is mounted over it.
    let hung = Hung::over(&point);
    executor.reconfigure(|text| text.replace("\"true\"", "\"printf\""));
    tokio::time::timeout(PATIENCE, taken("true")).await.expect("the configuration counts");
    assert_eq!(refused(pipeline(&["printf x"])).await, None);
    let why = refused(on_export("printf x")).await.unwrap();
    assert!(why.contains("its file system hangs; "), "{why}");
    drop(hung);
    std::fs::remove_file(&directory).unwrap();
    std::fs::create_dir(&directory).unwrap();
    executor.reconfigure(|text| text.replace("\"printf\"", "\"echo\""));
    tokio::time::timeout(PATIENCE, taken("printf x")).await.expect("the configuration counts");
    assert_eq!(refused(on_export("echo")).await, None);
}

#[test]
fn an_export_whose_file_system_hangs_is_told_of_and_holds_up_nobody() {
    let directory = tempfile::tempdir().unwrap();
    let point = directory.path().join("hangs");
    std::fs::create_dir(&point).unwrap();
    let hung = Hung::over(&point);
    let export = format!("hangs={}", point.display());
    let output = program().args(["--listen", "127.0.0.1:0", "--export", &export]).output().unwrap();
    drop(hung);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(
        message.contains("hangs of export `hangs` has not answered for 5 s: its file system hangs"),
        "{message}"
    );
}

#[tokio::test]
async fn two_hundred_runs_at_once_are_not_mixed_up() {
    let lab = Lab::start().await;
    let mut runs = tokio::task::JoinSet::new();
    for number in 0..200 {
        let client = lab.client.clone();
        runs.spawn(async move {
            let spec = pipeline(&[&format!("seq {number} 3000"), "cat", "sort -n"]);
            (number, run(&client, spec, bytes::Bytes::new()).await)
        });
    }
    while let Some(finished) = runs.join_next().await {
        let (number, outcome) = finished.unwrap();
        let expected: String = (number..=3000).map(|n| format!("{n}\n")).collect();
        assert!(outcome.text() == expected, "run {number}: {outcome:?}");
    }
}

#[tokio::test]
async fn a_run_too_many_is_refused() {
    let lab = Lab::with(|config| config.bounds.runs = 1).await;
    let mut call = Call::open(&lab.client, command(&["sh", "-c", "echo ready; sleep 1000"])).await;
    call.until_output("ready").await;
    assert_eq!(lab.run(pipeline(&["true"])).await.refusal().kind(), rejected::Kind::Overloaded);
}

#[tokio::test]
async fn a_runner_that_died_is_replaced() {
    let lab = Lab::start().await;
    assert_eq!(lab.run(pipeline(&["echo one"])).await.text(), "one\n");
    end_at_once(&keeper(&lab)).await;
    assert_eq!(lab.run(pipeline(&["echo two"])).await.text(), "two\n");
}

/// The keeper has forked it for the next run, and forks one for each run from then on.
#[tokio::test]
async fn a_spare_supervisor_that_died_is_done_without() {
    let lab = Lab::start().await;
    assert_eq!(lab.run(pipeline(&["echo one"])).await.text(), "one\n");
    let keeper = keeper(&lab);
    let spare = loop {
        match children_of(pid_of(&keeper)).as_slice() {
            [spare] => break spare.clone(),
            _ => tokio::task::yield_now().await,
        }
    };
    end_at_once(&spare).await;
    for word in ["two", "three"] {
        assert_eq!(lab.run(pipeline(&[&format!("echo {word}")])).await.text(), format!("{word}\n"));
    }
    assert!(keeper.join("exe").read_link().is_ok(), "it is the same runner");
    while !children_of(pid_of(&keeper)).is_empty() {
        tokio::task::yield_now().await;
    }
}

/// The keeper, among all processes below this one, that sees this store: others belong to other
/// tests.
fn keeper(lab: &Lab) -> PathBuf {
    let guards = children_of(std::process::id());
    let name = lab.store.path().file_name().unwrap().to_str().unwrap().to_owned();
    let keepers = guards.iter().flat_map(|guard| children_of(pid_of(guard)));
    let sees_store = |keeper: &PathBuf| {
        std::fs::read_to_string(keeper.join("mountinfo")).is_ok_and(|mounts| mounts.contains(&name))
    };
    let keepers: Vec<_> = keepers.filter(sees_store).collect();
    let [keeper] = keepers.as_slice() else { panic!("{keepers:?}") };
    keeper.clone()
}

// Guard: supervisor::Running::leaders. Without it the pid of an ended command would soon be another
// process's, and so would a signal to its group.
#[tokio::test]
async fn the_number_of_an_ended_command_stays_its_own_until_its_run_ends() {
    let lab = Lab::start().await;
    let mut spec = pipeline(&["sh", "sleep 1000"]);
    // It leaves an orphan, which is reaped.
    spec.stages[0].argv = ["sh", "-c", "(sleep 0.1 &)"].map(|word| word.into()).to_vec();
    let mut call = Call::open(&lab.client, spec).await;
    call.until(|kind| {
        matches!(kind, run_output::Kind::Exited(exited) if exited.stage == 1).then_some(())
    })
    .await;
    let supervisors = children_of(pid_of(&keeper(&lab)));
    let states = |supervisor: &PathBuf| -> Vec<char> {
        let children = children_of(pid_of(supervisor));
        let stat = |child: &PathBuf| std::fs::read_to_string(child.join("stat")).ok();
        children
            .iter()
            .filter_map(stat)
            .filter_map(|stat| stat.rsplit(") ").next()?.chars().next())
            .collect()
    };
    let of_run = || supervisors.iter().map(states).find(|states| !states.is_empty()).unwrap();
    while of_run().len() != 2 {
        tokio::task::yield_now().await;
    }
    assert_eq!(of_run().into_iter().filter(|state| *state == 'Z').count(), 1, "{:?}", of_run());
    // To its group, which has no live process any more.
    call.send(run_input::Kind::Signal(RunSignal { stage: 1, signal: 9, group: true })).await;
    call.send(run_input::Kind::Signal(RunSignal { stage: 2, signal: 15, group: true })).await;
    let outcome = call.collect(bytes::Bytes::new()).await;
    assert_eq!(outcome.exits[&2].how, Some(exited::How::Signal(15)));
}

// Guard: runner::reap_supervisors. As when the kernel kills one for its memory.
#[tokio::test]
async fn what_a_killed_supervisor_leaves_ends_and_other_runs_go_on() {
    let lab = Lab::start().await;
    let mut call = Call::open(&lab.client, command(&["sh", "-c", CLINGING])).await;
    call.until_output("ready").await;
    let keeper = keeper(&lab);
    let has_commands = |process: &&PathBuf| !children_of(pid_of(process)).is_empty();
    let supervisor = children_of(pid_of(&keeper)).iter().find(has_commands).unwrap().clone();
    let mut other = Call::open(&lab.client, command(&["sh", "-c", "echo ready; sleep 1000"])).await;
    other.until_output("ready").await;
    end_at_once(&supervisor).await;
    lock_is_free(lab.store.path()).await;
    other.send(run_input::Kind::Signal(RunSignal { stage: 1, signal: 15, group: true })).await;
    let outcome = other.collect(bytes::Bytes::new()).await;
    assert_eq!(outcome.exits[&1].how, Some(exited::How::Signal(15)));
}

// Guard: runner::kill_stopped. Another process of its user's can stop it, and nothing that is told
// to a stopped process is heeded.
#[tokio::test]
async fn a_supervisor_that_is_stopped_ends_with_its_run() {
    let lab = Lab::start().await;
    let mut call = Call::open(&lab.client, command(&["sh", "-c", CLINGING])).await;
    call.until_output("ready").await;
    let has_commands = |process: &&PathBuf| !children_of(pid_of(process)).is_empty();
    let supervisors = children_of(pid_of(&keeper(&lab)));
    let supervisor = supervisors.iter().find(has_commands).unwrap();
    kill(Pid::from_raw(pid_of(supervisor).cast_signed()), Signal::SIGSTOP).unwrap();
    lock_is_free(lab.store.path()).await;
    assert!(!supervisor.exists());
}

// Guard: confine::OwnMemory, and that commands get theirs back.
#[tokio::test]
async fn a_supervisor_has_a_bound_of_its_own_that_commands_have_not() {
    let lab = Lab::start().await;
    let own = std::fs::read_to_string("/proc/self/limits").unwrap();
    let mut call = Call::open(
        &lab.client,
        command(&["sh", "-c", "cat /proc/self/limits; echo ready; sleep 1000"]),
    )
    .await;
    let said = call.until_output("ready").await;
    let soft = |limits: &str| {
        let line =
            limits.lines().find(|line| line.starts_with("Max data size")).unwrap().to_owned();
        line.split_whitespace().nth(3).unwrap().parse().unwrap_or(u64::MAX)
    };
    let configured = posh_executor::config::Confinement::default().max_memory_bytes;
    assert_eq!(soft(&said), configured.min(soft(&own)));
    let bounds: Vec<u64> = children_of(pid_of(&keeper(&lab)))
        .iter()
        .filter_map(|supervisor| std::fs::read_to_string(supervisor.join("limits")).ok())
        .map(|limits| soft(&limits))
        .collect();
    assert!(bounds.contains(&(128 << 20)), "{bounds:?}");
}

async fn end_at_once(process: &Path) {
    kill(Pid::from_raw(pid_of(process).cast_signed()), Signal::SIGKILL).unwrap();
    while process.join("exe").read_link().is_ok() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn describe_and_tools_say_what_is_here() {
    let lab = Lab::start().await;
    let mut client = lab.client.clone();
    let reply =
        client.describe(DescribeRequest { protocol: PROTOCOL_VERSION }).await.unwrap().into_inner();
    assert!(reply.namespaces, "{}", reply.namespaces_reason);
    assert_eq!((reply.protocol, reply.exports[0].name.as_str()), (PROTOCOL_VERSION, "logs"));
    let here = Locales::read(Path::new(locales::DIRECTORY)).unwrap();
    let told = reply.locales.into_iter().map(|its| (its.name, its.digest.to_vec()));
    assert!(!reply.locales_unknown && Locales::of(told) == here, "{here:?}");
    assert!(!reply.machine.is_empty() && !reply.hostname.is_empty());
    let request = ToolsRequest { names: vec!["sort".into(), "no-such-command-here".into()] };
    let tools = client.tools(request).await.unwrap().into_inner().tools;
    assert!(tools[0].found && tools[0].sha256.len() == 32, "{tools:?}");
    assert!(!tools[1].found);
}

/// As gateways ask for it: outside of all mounts, and with the confinement of any run.
#[tokio::test]
async fn a_program_says_its_version_in_a_run() {
    let lab = Lab::with(|config| {
        config.confinement.commands = posh_executor::config::Commands::Annotated
    })
    .await;
    let version = |command: &str| {
        let mut spec = pipeline(&[command]);
        spec.mounts.clear();
        spec.stages[0].cwd = "/".into();
        spec
    };
    let outcome = lab.run(version("git --version")).await;
    assert!(outcome.text().starts_with("git version "), "{outcome:?}");
    let mut loaded = version("git --version");
    loaded.stages[0].env.push(EnvVar { name: "GREP_COLORS".into(), value: "x".into() });
    assert_eq!(lab.run(loaded).await.refusal().kind(), rejected::Kind::NotAllowed);
    assert_eq!(
        lab.run(version("git --version x")).await.refusal().kind(),
        rejected::Kind::NotAllowed
    );
}

#[tokio::test]
async fn health_is_told() {
    let lab = Lab::start().await;
    let channel = tonic::transport::Channel::from_shared(format!("http://{}", lab.address))
        .unwrap()
        .connect()
        .await
        .unwrap();
    let request = HealthCheckRequest { service: "posh.executor.v1.Executor".into() };
    let reply = HealthClient::new(channel).check(request).await.unwrap().into_inner();
    assert_eq!(reply.status, 1);
}

/// The /proc directories of a process's children.
fn children_of(parent: u32) -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let parent = parent.to_string();
    let is_child = |process: &PathBuf| {
        let stat = std::fs::read_to_string(process.join("stat")).unwrap_or_default();
        stat.rsplit(')').next().and_then(|rest| rest.split(' ').nth(2)) == Some(&parent)
    };
    entries.filter(is_child).collect()
}

fn pid_of(process: &Path) -> u32 {
    process.file_name().unwrap().to_str().unwrap().parse().unwrap()
}

/// Like git's background gc, which removes its locks then; a process that stays is killed.
#[tokio::test]
async fn what_a_finished_command_leaves_behind_is_asked_to_end() {
    let lab = Lab::start().await;
    let tidy = "trap 'rm made; exit' TERM; touch made; echo bye >&3; exec 3>&-; while :; do sleep 0.01; done";
    let deaf = "trap '' TERM; sleep 1000; :";
    // The last output comes from the background: its trap is set then.
    let script = format!(
        "exec 9>lock; flock 9; exec 3>&1; setsid sh -c \"$1\" >/dev/null 2>&1 & setsid sh -c '{deaf}' 3>&- >/dev/null 2>&1 & :"
    );
    let outcome = lab.run(command(&["sh", "-c", &script, "sh", tidy])).await;
    assert_eq!(outcome.text(), "bye\n");
    lock_is_free(lab.store.path()).await;
    assert!(!lab.store.path().join("made").exists());
}
