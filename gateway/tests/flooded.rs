//! A gateway in the background, and a process that connects to it again and again.

// All of this is test code; clippy's own exception knows only #[test] functions.
#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    io::Write as _,
    os::{fd::AsRawFd as _, unix::net::UnixStream},
    path::Path,
    process::{Child, Command},
    time::{Duration, Instant},
};

use nix::{
    sys::{
        signal::{Signal, kill},
        socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket},
    },
    unistd::Pid,
};

/// With a line for each, they would fill the log.
const CONNECTIONS: usize = 20_000;
/// Beginning of HTTP/2 (RFC 9113, section 3.4), with empty settings.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

struct Gateway {
    process: Child,
    directory: tempfile::TempDir,
}

impl Gateway {
    fn start(level: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("mounts.toml"), "").unwrap();
        let process = Command::new(env!("CARGO_BIN_EXE_posh-gateway"))
            .arg("--config")
            .arg(at("mounts.toml"))
            .arg("--socket")
            .arg(at("gateway.sock"))
            .arg("--log")
            .arg(at("gateway.log"))
            .env("XDG_RUNTIME_DIR", directory.path())
            .env("POSH_LOG", level)
            .stderr(File::options().create(true).append(true).open(at("gateway.log")).unwrap())
            .spawn()
            .unwrap();
        Self { process, directory }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Connects when it listens.
    fn connect(&self, socket: &str) -> UnixStream {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            match UnixStream::connect(self.path().join(socket)) {
                Ok(connection) => return connection,
                Err(error) => assert!(Instant::now() < deadline, "it does not listen: {error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn log_bytes(&self) -> Vec<u64> {
        let names = ["gateway.log", "gateway.log.old"].map(|name| self.path().join(name));
        names.iter().filter_map(|path| fs::metadata(path).ok()).map(|log| log.len()).collect()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn refused_connections_do_not_fill_the_runtime_directory() {
    let gateway = Gateway::start("info");
    (0..CONNECTIONS).for_each(|_| drop(gateway.connect("gateway.stage")));
    let text = fs::read_to_string(gateway.path().join("gateway.log")).unwrap();
    let refused = text.lines().filter(|line| line.contains("a caller was not taken in")).count();
    // A minute may have ended meanwhile.
    assert!((1..=30).contains(&refused), "{refused} lines:\n{text}");
}

#[test]
fn few_connections_are_ahead_of_the_next_one() {
    let gateway = Gateway::start("off");
    drop(gateway.connect("gateway.stage"));
    let stopped = Pid::from_raw(gateway.process.id().cast_signed());
    kill(stopped, Signal::SIGSTOP).unwrap();
    let stat = || fs::read_to_string(format!("/proc/{stopped}/stat")).unwrap();
    while !stat().contains(") T ") {
        std::thread::yield_now();
    }
    let address = UnixAddr::new(&gateway.path().join("gateway.stage")).unwrap();
    let connects = || {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None).unwrap();
        connect(socket.as_raw_fd(), &address).is_ok().then_some(socket)
    };
    let waiting: Vec<_> = (0..1000).map_while(|_| connects()).collect();
    assert!((100..300).contains(&waiting.len()), "{}", waiting.len());
}

#[test]
fn the_log_is_bounded_while_the_gateway_runs() {
    let gateway = Gateway::start("trace");
    // Debugging output has no limit but this one.
    let deadline = Instant::now() + Duration::from_secs(60);
    while gateway.log_bytes().len() < 2 {
        assert!(Instant::now() < deadline, "no former one: {:?}", gateway.log_bytes());
        let _ = gateway.connect("gateway.sock").write_all(PREFACE);
    }
    let bytes = gateway.log_bytes();
    assert!(bytes.iter().all(|bytes| *bytes <= (1 << 20) + (8 << 10)), "{bytes:?}");
}
