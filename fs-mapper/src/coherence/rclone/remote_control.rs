//! rclone's remote control: one short HTTP request per call. Uses only commands without
//! authentication, and sends nothing until rclone is known to have accepted the connection.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::peer::SocketPeer;

/// rclone answers from memory, on this machine.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// An answer lists the forgotten paths, or counts files.
const MOST_BYTES: u64 = 16 << 20;

/// Address of a daemon's remote control.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RemoteControl {
    address: SocketAddr,
    /// The daemon's directory in /proc.
    process: PathBuf,
}

impl RemoteControl {
    /// Parses `host:port` as in `--rc-addr`. Accepts only numeric loopback addresses and
    /// `localhost`: another machine would learn file names in plain text, and its answer would say
    /// where the cache is.
    pub(super) fn at(text: &str, process: &Path) -> io::Result<Self> {
        let text = match text.split_once(':') {
            Some(("" | "localhost", port)) => format!("127.0.0.1:{port}"),
            _ => text.to_owned(),
        };
        let refused = || {
            let what = format!(
                "rclone listens at {text}, and is asked only at an address of this machine \
                 (127.0.0.1, [::1])"
            );
            io::Error::new(io::ErrorKind::Unsupported, what)
        };
        let address: SocketAddr = text.parse().map_err(|_| refused())?;
        if address.ip().is_loopback() {
            Ok(Self { address, process: process.to_owned() })
        } else {
            Err(refused())
        }
    }

    /// Checks that rclone answers.
    pub(super) fn noop(&self) -> io::Result<()> {
        self.call("rc/noop", "{}").map(drop)
    }

    /// Makes the daemon forget one file or directory; `kind` is the parameter's name.
    pub(super) fn forget(&self, kind: &str, inside: &Path) -> io::Result<()> {
        let Some(text) = inside.to_str() else { return self.forget_all() };
        if text.is_empty() {
            return self.forget_all();
        }
        let body = serde_json::json!({ kind: text }).to_string();
        self.call("vfs/forget", &body).map(drop)
    }

    /// Makes the daemon forget every directory.
    pub(super) fn forget_all(&self) -> io::Result<()> {
        self.call("vfs/forget", "{}").map(drop)
    }

    /// Metadata directory of the mount's cache; `None` without a cache.
    pub(super) fn metadata_directory(&self) -> io::Result<Option<String>> {
        let said = self.call("vfs/stats", "{}")?;
        Ok(said["diskCache"]["pathMeta"].as_str().map(str::to_owned))
    }

    fn call(&self, what: &str, body: &str) -> io::Result<serde_json::Value> {
        let mut stream = TcpStream::connect_timeout(&self.address, ANSWER_LIMIT)?;
        SocketPeer::of(&stream, ANSWER_LIMIT)?.expect(&self.process)?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        stream.set_write_timeout(Some(ANSWER_LIMIT))?;
        let length = body.len();
        let request = format!(
            "POST /{what} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        stream.take(MOST_BYTES).read_to_end(&mut answer)?;
        answer_of(what, &answer)
    }
}

/// Parses the JSON body of an HTTP answer with status 200.
fn answer_of(what: &str, answer: &[u8]) -> io::Result<serde_json::Value> {
    let body = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").map(|at| &answer[at + 4..]);
    let head = answer.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let refused = || {
        let head = String::from_utf8_lossy(head).into_owned();
        io::Error::other(format!("rclone's remote control answers {what} with {head:?}"))
    };
    if head.split(|byte| *byte == b' ').nth(1) != Some(b"200") {
        return Err(refused());
    }
    serde_json::from_slice(body.ok_or_else(refused)?).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let check = |text: &str, expect: Option<&str>| {
            let found = RemoteControl::at(text, Path::new("/proc/self"))
                .ok()
                .map(|control| control.address.to_string());
            assert_eq!(found.as_deref(), expect, "{text}");
        };
        check("localhost:5572", Some("127.0.0.1:5572"));
        check(":5573", Some("127.0.0.1:5573"));
        check("[::1]:5572", Some("[::1]:5572"));
        check("unix:///run/rclone.sock", None);
        check("example.org:5572", None);
        for elsewhere in ["192.0.2.7:5572", "0.0.0.0:5572", "[2001:db8::1]:5572", "[::]:5572"] {
            let why = RemoteControl::at(elsewhere, Path::new("/proc/self"))
                .expect_err(elsewhere)
                .to_string();
            assert!(why.contains(elsewhere) && why.contains("address of this machine"), "{why}");
        }
    }

    #[test]
    fn another_program_at_rclone_s_address_is_told_nothing() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("an address");
        let address = listener.local_addr().expect("bound").to_string();
        let heard = std::thread::spawn(move || {
            let hear = |_| {
                let (mut stream, _) = listener.accept().expect("somebody connects");
                let mut said = [0; 4096];
                let count = stream.read(&mut said).expect("said");
                stream.write_all(b"HTTP/1.0 200 OK\r\n\r\n{}").expect("answered");
                String::from_utf8_lossy(&said[..count]).into_owned()
            };
            [0, 1].map(hear)
        });
        let forget = |process: &str| {
            let control = RemoteControl::at(&address, Path::new(process)).expect("of this machine");
            control.forget("file", Path::new("secret/name"))
        };
        let theirs = format!("/proc/{}", std::os::unix::process::parent_id());
        let why = forget(&theirs).expect_err("it is another process").to_string();
        assert!(why.contains("another program") && why.contains("rclone"), "{why}");
        forget("/proc/self").expect("it is this process");
        let [nothing, said] = heard.join().expect("no panic");
        assert_eq!(nothing, "");
        assert!(said.contains("secret/name"), "{said}");
    }

    #[test]
    fn answers() {
        let answer = |text: &str| answer_of("rc/noop", text.as_bytes());
        assert_eq!(answer("HTTP/1.0 200 OK\r\nA: b\r\n\r\n{\"a\": 1}").expect("an answer")["a"], 1);
        let refusal =
            answer("HTTP/1.1 401 Unauthorized\r\n\r\nno").expect_err("refused").to_string();
        assert_eq!(
            refusal,
            "rclone's remote control answers rc/noop with \"HTTP/1.1 401 Unauthorized\""
        );
        assert!(answer("").is_err());
    }
}
