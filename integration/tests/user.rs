//! The same with no rights at all: gateway, front end and executor of an ordinary
//! user, who gets a user namespace at most.

use std::fs;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use posh_integration::explain::ExplainReport;

use crate::programs;

/// A user that no machine has, and his second group.
const USER: u32 = 61_234;
const SECOND_GROUP: u32 = 61_235;

/// The words of a command that runs as that user, with only these variables.
fn as_user(home: &Path, program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args([
        format!("--reuid={USER}"),
        format!("--regid={USER}"),
        format!("--groups={USER},{SECOND_GROUP}"),
        "--".into(),
    ]);
    command
        .arg(program)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("HOME", home)
        .current_dir(home);
    command.env("XDG_RUNTIME_DIR", home.join("run")).env("POSH_CONFIG", home.join("mounts.toml"));
    command
}

/// Copies a program to where the user can reach it: the build directory may be closed to others.
fn install(home: &Path, name: &str) {
    fs::copy(programs().find(name).unwrap(), home.join(name)).unwrap();
}

#[test]
fn an_ordinary_user_offloads_too() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let home = directory.path();
    fs::set_permissions(home, fs::Permissions::from_mode(0o755)).unwrap();
    for made in ["run", "data"] {
        fs::create_dir(home.join(made)).unwrap();
        fs::set_permissions(home.join(made), fs::Permissions::from_mode(0o700)).unwrap();
        chown(home.join(made), Some(USER), Some(USER)).unwrap();
    }
    let lines: String = (0..1000).map(|i| format!("line {i}\n")).collect();
    fs::write(home.join("data/f"), lines).unwrap();
    for shared in ["edited", "packed", "copied"] {
        let path = home.join("data").join(shared);
        fs::write(&path, "x").unwrap();
        chown(&path, Some(USER), Some(SECOND_GROUP)).unwrap();
    }
    for name in ["posh", "posh-cli", "posh-gateway", "posh-stage", "posh-executor"] {
        install(home, name);
    }

    let data = home.join("data");
    let mut executor = as_user(home, &home.join("posh-executor"));
    executor.args(["--listen", "127.0.0.1:0", "--export"]).arg(format!("data={}", data.display()));
    let mut executor = Ended(executor.stderr(Stdio::piped()).spawn().unwrap());
    let mut words = BufReader::new(executor.0.stderr.take().unwrap()).lines();
    let address = words.by_ref().find_map(|line| {
        let line = line.unwrap();
        line.split_once("listening on ")
            .map(|(_, rest)| rest.split_whitespace().next().unwrap().to_owned())
    });
    let address: String =
        address.unwrap().chars().take_while(|c| c.is_ascii_digit() || ".:".contains(*c)).collect();
    let config = format!(
        "[[executor]]\nname = \"own\"\naddress = \"http://{address}\"\n[[mount]]\npath = \"{}\"\nexecutor = \"own\"\nexport = \"data\"\ncoherence = \"bind\"\n",
        data.display()
    );
    fs::write(home.join("mounts.toml"), config).unwrap();

    let script = "cd data; grep 7 f | sort -r | head -n 2; tac f > g; head -n 1 g; stat -c %u g; cp f h; sed -i s/line/LINE/ h; \
                  sed -i s/x/y/ edited; gzip -f packed; cp -p copied copy; \
                  stat -c %g h edited packed.gz copy; find copied -gid 61235";
    let run = |explain: &[&str]| {
        as_user(home, &home.join("posh"))
            .args(explain)
            .args(["-c", script])
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    let plain = run(&[]);
    // Root's processes that have just begun may hold a pipe's end, for all that a user can see, and
    // other tests start many.
    let reports = (0..20).map(|_| ExplainReport::take(&run(&["--explain=json"]).stderr).unwrap().1);
    let are_offloaded = |report: &ExplainReport| {
        let mut stages = ["grep", "sort", "tac"]
            .into_iter()
            .map(|command| report.stages(command).collect::<Vec<_>>());
        stages.all(|all| !all.is_empty() && all.iter().all(|stage| stage.is_offloaded()))
    };
    let mut last = None;
    let is_offloaded = reports
        .inspect(|report| last = Some(format!("{report:?}")))
        .any(|report| are_offloaded(&report));
    let refused = strangers(&home.join("run"));
    let stopped = as_user(home, &home.join("posh")).args(["gateway", "stop"]).status().unwrap();
    drop(executor);

    let groups = format!("{USER}\n{0}\n{0}\n{0}\n", SECOND_GROUP);
    let expect = format!("line 997\nline 987\nline 999\n{USER}\n{groups}copied\n");
    assert_eq!(
        String::from_utf8_lossy(&plain.stdout),
        expect,
        "{}",
        String::from_utf8_lossy(&plain.stderr)
    );
    assert!(is_offloaded, "{last:?}");
    assert!(stopped.success());
    assert_eq!(refused, ["refused", "refused"], "one socket for clients, one for stages");
}

/// A process that ends with the test, however that ends.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What becomes of us, another user whom no mode keeps out, at each of the gateway's sockets.
fn strangers(below: &Path) -> Vec<&'static str> {
    let mut found = Vec::new();
    // Sessions' directories go away as we look.
    for entry in fs::read_dir(below).into_iter().flatten().flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            found.extend(strangers(&entry.path()));
        } else if kind.is_socket() {
            let Ok(mut socket) = UnixStream::connect(entry.path()) else { continue };
            socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            // Who is let in has something to say (HTTP/2), or waits to be told something.
            let said = socket.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0");
            let heard = said.and_then(|()| socket.read(&mut [0; 64]));
            let gone = |error: io::Error| {
                [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset].contains(&error.kind())
            };
            found.push(if heard.map_or_else(gone, |count| count == 0) {
                "refused"
            } else {
                "let in"
            });
        }
    }
    found
}
