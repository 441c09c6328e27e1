//! A gateway beside a mount that never answers, and directories that lead to it: one command or
//! session waits for it, for a while, and nobody else.

// All of this is test code; clippy's own exception knows only #[test] functions.
#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    os::{fd::AsRawFd as _, unix::fs::symlink},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use bytes::BytesMut;
use fs_mapper::{config::Config, mountinfo::mount_id};
use posh_gateway::Listeners;
use posh_proto::{
    PROTOCOL_VERSION, frame,
    stage::{
        Descriptor, Enlist, OpenSession, ToGateway, ToStage, descriptor, to_gateway, to_stage,
    },
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{UnixListener, UnixStream},
    time::timeout,
};

/// For anything that is to happen at all.
const PATIENCE: Duration = Duration::from_secs(30);
/// Less than the gateway waits for a mount, and more than anything else takes.
const AT_ONCE: Duration = Duration::from_millis(900);
/// Set in the second run of a test, which is the one in a namespace of its own.
const INSIDE: &str = "POSH_GATEWAY_TEST_INSIDE";

/// Runs a test again where its mounts are its own, and end with it. Needs root. The gateway's tasks
/// have one thread, as those of the program have.
fn in_own_namespace(test: &str, body: impl Future<Output = ()> + Send + 'static) {
    if std::env::var_os(INSIDE).is_some() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(runtime.spawn(body)).unwrap();
        runtime.shutdown_background();
        return;
    }
    // A gateway that hangs fires no timer either.
    let mut again = Command::new("timeout");
    again.args(["--signal=KILL", "100", "unshare", "--mount", "--propagation", "private", "--"]);
    again.arg(std::env::current_exe().unwrap());
    let output = again.args(["--exact", test, "--nocapture"]).env(INSIDE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A gateway whose one mount with an owner is mute.
struct Site {
    top: tempfile::TempDir,
    /// Whoever holds this serves the mount, and says nothing.
    _server: File,
}

impl Drop for Site {
    /// Else its directory is looked at when it is removed.
    fn drop(&mut self) {
        nix::mount::umount2(&self.at("mute"), nix::mount::MntFlags::MNT_DETACH).unwrap();
    }
}

impl Site {
    fn new() -> Self {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        fs::create_dir(at("mute")).unwrap();
        let device = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let flags = nix::mount::MsFlags::empty();
        nix::mount::mount(Some("mute"), &at("mute"), Some("fuse"), flags, Some(&*options)).unwrap();
        let text = format!(
            "[[executor]]\nname='far'\naddress='http://127.0.0.1:1'\n\
             [[mount]]\npath='{}'\nexecutor='far'\nexport='x'\ncoherence='generic'\n[gateway]\nsshfs = 'off'\n",
            at("mute").display()
        );
        let config = Config::parse(&text, &at("mounts.toml")).unwrap();
        let listeners = Listeners {
            grpc: UnixListener::bind(at("g.sock")).unwrap(),
            stages: UnixListener::bind(at("g.stage")).unwrap(),
            stage_socket: at("g.stage"),
            directory: top.path().to_owned(),
        };
        tokio::spawn(posh_gateway::run(config, listeners, std::future::pending()));
        Self { top, _server: device }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.top.path().join(name)
    }

    /// What is said to that, and how long it took.
    async fn ask(&self, first: to_gateway::Kind) -> (to_stage::Kind, Duration) {
        let began = Instant::now();
        let answer = timeout(PATIENCE, answer(&self.at("g.stage"), first)).await.unwrap();
        (answer, began.elapsed())
    }

    async fn open(&self, path: &str) -> (PathBuf, Duration) {
        let (answer, took) = self.ask(session(path)).await;
        let to_stage::Kind::SessionOpened(opened) = answer else { panic!("{answer:?}") };
        (String::from_utf8(opened.shim_directory.to_vec()).unwrap().into(), took)
    }

    /// `wc FILE`
    async fn count(&self, file: &str) -> (String, Duration) {
        let descriptor = |fd| Descriptor {
            fd,
            kind: descriptor::Kind::Null.into(),
            path: "/dev/null".into(),
            ..Descriptor::default()
        };
        let enlist = Enlist {
            protocol: PROTOCOL_VERSION,
            pid: std::process::id(),
            name: "wc".into(),
            program: "/usr/bin/wc".into(),
            argv: vec!["wc".into(), self.at(file).into_os_string().into_encoded_bytes().into()],
            env: vec!["PATH=/usr/bin:/bin".into()],
            cwd: "/".into(),
            cwd_mount_id: mount_id(fs::File::open("/").unwrap()),
            umask: 0o022,
            descriptors: (0..3).map(descriptor).collect(),
            mount_namespace: std::os::unix::fs::MetadataExt::ino(
                &fs::metadata("/proc/self/ns/mnt").unwrap(),
            ),
            ..Enlist::default()
        };
        let (answer, took) = self.ask(to_gateway::Kind::Enlist(enlist)).await;
        let to_stage::Kind::RunHere(here) = answer else { panic!("{answer:?}") };
        (here.reason, took)
    }
}

fn session(path: &str) -> to_gateway::Kind {
    to_gateway::Kind::OpenSession(OpenSession {
        protocol: PROTOCOL_VERSION,
        pid: std::process::id(),
        path: path.to_owned().into(),
        stage_program: "/bin/true".into(),
        ..OpenSession::default()
    })
}

async fn answer(socket: &Path, first: to_gateway::Kind) -> to_stage::Kind {
    let mut socket = UnixStream::connect(socket).await.unwrap();
    let mut bytes = BytesMut::new();
    frame::encode(&ToGateway { kind: Some(first) }, &mut bytes);
    socket.write_all(&bytes.split()).await.unwrap();
    loop {
        if let Some(kind) = frame::decode::<ToStage>(&mut bytes).unwrap().and_then(|said| said.kind)
        {
            return kind;
        }
        assert!(socket.read_buf(&mut bytes).await.unwrap() > 0, "the gateway hung up");
    }
}

/// Threads of this process that wait for files.
fn threads_aside() -> usize {
    let names = fs::read_dir("/proc/self/task")
        .unwrap()
        .flatten()
        .map(|task| fs::read_to_string(task.path().join("comm")));
    names.flatten().filter(|name| name == "aside\n").count()
}

#[test]
fn a_mount_that_settles_nothing_holds_up_one_command() {
    in_own_namespace("a_mount_that_settles_nothing_holds_up_one_command", settle_nothing());
}

async fn settle_nothing() {
    let site = Site::new();
    let (reason, _) = site.count("mute/f").await;
    assert!(reason.ends_with("are on the server: it does not answer in time"), "{reason}");
    for _ in 0..20 {
        let (reason, took) = site.count("mute/f").await;
        assert!(
            reason.ends_with("are on the server: it has not answered an earlier question yet"),
            "{reason}"
        );
        assert!(took < AT_ONCE, "{took:?}");
    }
    assert_eq!(threads_aside(), 1);
}

#[test]
fn a_path_that_hangs_holds_up_no_other_session() {
    in_own_namespace("a_path_that_hangs_holds_up_no_other_session", look_along_paths());
}

async fn look_along_paths() {
    let site = Site::new();
    // A link tells nothing of where it leads.
    fs::create_dir(site.at("bin")).unwrap();
    symlink(site.at("mute/git"), site.at("bin/git")).unwrap();
    for directory in ["mute", "bin"] {
        let path = format!("{}:/usr/bin", site.at(directory).display());
        let socket = site.at("g.stage");
        let request = session(&path);
        let first = tokio::spawn(async move { answer(&socket, request).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        let (shims, took) = site.open("/usr/bin:/bin").await;
        assert!(took < AT_ONCE, "{took:?}");
        assert!(shims.join("wc").symlink_metadata().is_ok());
        // It is opened all the same, and so is the next one, at once.
        let opened = timeout(PATIENCE, first).await.unwrap().unwrap();
        assert!(matches!(opened, to_stage::Kind::SessionOpened(_)), "{opened:?}");
        let (_, took) = site.open(&path).await;
        assert!(took < AT_ONCE, "{took:?}");
    }
}
