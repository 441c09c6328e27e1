//! Sessions that are opened one after the other.

use std::{
    process::Child,
    time::{Duration, Instant},
};

use super::*;

const STAGE: &str = "/posh-stage";

/// A gateway's directory, two of a PATH with a command each, and its sessions.
struct Site {
    directory: tempfile::TempDir,
    sessions: Arc<Sessions>,
}

impl Site {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        for (path, name) in [("one", "cat"), ("other", "grep")] {
            fs::create_dir(directory.path().join(path)).unwrap();
            fs::copy("/proc/self/exe", directory.path().join(path).join(name)).unwrap();
        }
        let sessions = Sessions::new(directory.path().to_owned(), directory.path().join("g.stage"));
        Self { directory, sessions }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A session of a shell of its own.
    fn open(&self, path: &str) -> Opened {
        let shell = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let (path, stage_program) = (self.path(path), STAGE.into());
        let request = SessionRequest {
            pid: shell.id(),
            explain: false,
            trace: false,
            split: None,
            path,
            stage_program,
        };
        let commands = ["cat".to_owned(), "grep".to_owned()];
        let (session, shims) = self.sessions.open(request, &commands, &Mounts::default()).unwrap();
        assert_eq!(shims, session.directory.join(SHIMS));
        let names = fs::read_dir(shims).unwrap();
        let mut names: Vec<String> =
            names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        Opened { shell, session, names }
    }

    async fn close(&self, mut opened: Opened) {
        opened.shell.kill().unwrap();
        opened.shell.wait().unwrap();
        let began = Instant::now();
        while opened.session.directory.exists() {
            assert!(began.elapsed() < Duration::from_secs(10), "the session is still there");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

struct Opened {
    shell: Child,
    session: Arc<ShellSession>,
    names: Vec<String>,
}

fn file_of(session: &ShellSession) -> SessionFile {
    SessionFile::decode(fs::read(session.directory.join(SESSION_FILE)).unwrap().as_slice()).unwrap()
}

#[tokio::test]
async fn a_session_has_shims_for_the_commands_on_its_path_and_ends_with_its_shell() {
    let site = Site::new();
    let (first, second, third) = (site.open("one"), site.open("one"), site.open("other"));
    assert_eq!(
        [&first, &second, &third].map(|opened| opened.names.join(" ")),
        ["cat", "cat", "grep"]
    );
    assert_eq!(file_of(&first.session).session, first.session.id);
    let random = |opened: &Opened| {
        let name = opened.session.directory.file_name().unwrap().to_str().unwrap().to_owned();
        let bits = name.strip_prefix("session-").filter(|bits| bits.len() == 32).unwrap();
        u128::from_str_radix(bits, 16).unwrap()
    };
    // Neither a process's number nor that of the session.
    let differing = (random(&first) ^ random(&second)).count_ones();
    assert!((20..=108).contains(&differing), "{differing} bits differ");
    // A program that is installed meanwhile.
    fs::copy("/proc/self/exe", site.path("other/cat")).unwrap();
    let fourth = site.open("other");
    assert_eq!(fourth.names, ["cat", "grep"]);
    for opened in [first, second, third, fourth] {
        site.close(opened).await;
    }
    assert_eq!(fs::read_dir(site.directory.path()).unwrap().count(), 2);
}

#[tokio::test]
async fn open_sessions_are_told_of_mounts_and_ended_ones_are_left_alone() {
    let site = Site::new();
    let (first, second) = (site.open("one"), site.open("one"));
    let ended = Arc::clone(&second.session);
    site.close(second).await;
    let mounts = Mounts { prefixes: b"new".to_vec(), at_hand: true };
    site.sessions.publish(&mounts);
    let told = file_of(&first.session);
    assert_eq!((&told.prefixes[..], told.asks), (&b"new"[..], true));
    site.sessions.write_file(&ended, &mounts).unwrap();
    assert!(!ended.directory.exists());
    site.close(first).await;
}

#[tokio::test]
async fn a_session_ends_though_a_process_never_tells_its_variables() {
    let site = Site::new();
    // As long as the thread that asks for them waits.
    let _asks = Arc::clone(&site.sessions.looks).acquire_owned().await.unwrap();
    site.close(site.open("one")).await;
}

#[test]
fn processes_of_others_keep_no_session() {
    let directory = tempfile::tempdir().unwrap();
    let started = |line: &str| {
        let mut words = line.split(' ');
        let mut command = std::process::Command::new(words.next().unwrap());
        command
            .args(words)
            .env("PATH_OF_SESSION", directory.path().join(SHIMS))
            .stdout(std::process::Stdio::piped());
        let mut child =
            command.args(["perl", "-e", r#"$| = 1; print "\n"; sleep 100"#]).spawn().unwrap();
        io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        child
    };
    let mut all = vec![started("env")];
    if nix::unistd::geteuid().is_root() {
        all.push(started("setpriv --reuid 12345 --clear-groups"));
    }
    let found = processes_with(directory.path());
    assert_eq!(found, [all[0].id()]);
    for mut child in all {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
