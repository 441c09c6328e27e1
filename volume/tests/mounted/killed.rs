//! A process that waits for an unresponsive store can be killed.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::process::ExitStatusExt as _,
    process::{Child, Command, ExitStatus, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::sync::watch;

use crate::{silent::Silent, site::Site};

/// For what is to happen soon.
const PATIENCE: Duration = Duration::from_secs(10);

/// Ends with the test, however that ends.
struct Waiting(Child);

impl Waiting {
    /// It begins when it is told to.
    fn start(site: &Site, script: &str) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("read go; {script}")]).current_dir(site.mount(0));
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }

    fn begin(&mut self) {
        self.0.stdin.take().unwrap().write_all(b"go\n").unwrap();
    }

    /// Until the kernel waits for an answer to what it asks.
    fn wait_until_held(&mut self, script: &str) {
        let began = Instant::now();
        while fs::read_to_string(format!("/proc/{}/wchan", self.0.id())).unwrap()
            != "request_wait_answer"
        {
            assert!(began.elapsed() < PATIENCE, "{script} waits for nothing");
            assert!(self.0.try_wait().unwrap().is_none(), "{script} has ended");
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn end(&mut self, script: &str) -> ExitStatus {
        let began = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(began.elapsed() < PATIENCE, "{script} goes on");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = self.0.kill();
    }
}

#[test]
fn who_waits_for_a_silent_server_can_be_killed() {
    let (silence, is_silent) = watch::channel(false);
    let site = Site::over(1, |inner| {
        Arc::new(Silent { inner, is_silent: is_silent.clone(), until: None })
    });
    for name in ["a", "b", "c", "d", "e", "f"] {
        fs::create_dir(site.origin().join(name)).unwrap();
        fs::write(site.origin().join(name).join("old"), b"old").unwrap();
    }
    site.catch_up(0);
    let scripts = [
        (Signal::SIGKILL, "read line < a/old"),
        (Signal::SIGKILL, "test -e b/nothing"),
        (Signal::SIGTERM, "exec rm c/old"),
        (Signal::SIGINT, "exec mkdir d/new"),
        (Signal::SIGKILL, "exec ln -s x e/link"),
        (Signal::SIGHUP, "exec ls -l f"),
    ];
    let waiting = scripts.map(|(signal, script)| (Waiting::start(&site, script), signal, script));
    silence.send(true).unwrap();
    for (mut waiting, signal, script) in waiting {
        waiting.begin();
        waiting.wait_until_held(script);
        kill(Pid::from_raw(waiting.0.id().cast_signed()), signal).unwrap();
        assert_eq!(waiting.end(script).signal(), Some(signal as i32), "{script}");
    }
    silence.send(false).unwrap();
    // What was under way is done, or not; the volume serves on.
    assert_eq!(fs::read(site.mount(0).join("a/old")).unwrap(), b"old");
    fs::write(site.mount(0).join("a/new"), b"new").unwrap();
    site.settle(0);
    assert_eq!(fs::read(site.origin().join("a/new")).unwrap(), b"new");
}

/// A file that is still open when a process is killed is closed while it ends.
#[test]
fn who_is_killed_does_not_wait_for_what_it_has_written() {
    let (silence, is_silent) = watch::channel(false);
    let site = Site::over(1, |inner| {
        Arc::new(Silent { inner, is_silent: is_silent.clone(), until: None })
    });
    fs::write(site.origin().join("f"), b"old").unwrap();
    site.catch_up(0);
    let script = "exec 3> f; echo ready; read go; echo new >&3";
    let mut command = Command::new("sh");
    command
        .args(["-c", script])
        .current_dir(site.mount(0))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut waiting = Waiting(command.spawn().unwrap());
    let (mut input, output) = (waiting.0.stdin.take().unwrap(), waiting.0.stdout.take().unwrap());
    let mut told = BufReader::new(output).lines();
    assert_eq!(told.next().unwrap().unwrap(), "ready");
    silence.send(true).unwrap();
    input.write_all(b"go\n").unwrap();
    waiting.wait_until_held(script);
    kill(Pid::from_raw(waiting.0.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert_eq!(waiting.end(script).signal(), Some(Signal::SIGTERM as i32));
    silence.send(false).unwrap();
    site.settle(0);
    assert_eq!(
        fs::read(site.origin().join("f")).unwrap(),
        fs::read(site.mount(0).join("f")).unwrap()
    );
}
