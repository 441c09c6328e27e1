//! Sessions that are opened one after the other, and what each leaves for the next.

use std::{process::Child, time::Instant};

use super::*;

const NOBODY: Pid = i32::MAX as Pid;
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
        // What two killed gateways had ready, one of them this one's predecessor; and what a living one has.
        let left = |stem: &str, gateway: Pid| {
            let place = directory.path().join(format!("{stem}.ready-123456789abc"));
            fs::create_dir(&place).unwrap();
            let file = SessionFile { session: format!("{gateway}-1"), ..SessionFile::default() };
            fs::write(place.join(FILE), file.encode_to_vec()).unwrap();
            place
        };
        let (own, dead, living) = (left("g", 1), left("dead", NOBODY), left("living", 1));
        let sessions = Sessions::new(directory.path().to_owned(), directory.path().join("g.stage"));
        assert!(!own.exists() && !dead.exists() && living.exists());
        fs::remove_dir_all(living).unwrap();
        Self { directory, sessions }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn made_for(&self, path: &str) -> MadeFor {
        MadeFor::now(self.path(path).as_os_str(), Path::new(STAGE))
    }

    fn place(&self, path: &str) -> PathBuf {
        self.made_for(path).place(&self.sessions.stage_socket)
    }

    /// Takes what is ready, as a shell that begins.
    fn take(&self, path: &str, pid: Pid) -> Option<Taken> {
        let directory = posh_proto::ready::take(&self.place(path), pid).ok()?;
        Some(Taken { directory, outputs: vec![7], input: None })
    }

    fn open(&self, path: &str, pid: Pid, taken: Option<Taken>) -> Result<Arc<Session>, SessionError> {
        let (path, stage_program) = (self.path(path), STAGE.into());
        let request = Request { pid, explain: false, trace: false, split: None, path, stage_program, taken };
        let commands = ["cat".to_owned(), "grep".to_owned()];
        let (session, shims) = self.sessions.open(request, &commands, &Mounts::default())?;
        assert_eq!(shims, session.directory.join(SHIMS));
        let file = fs::read(session.directory.join(FILE)).unwrap();
        assert_eq!(SessionFile::decode(file.as_slice()).unwrap().session, session.id);
        Ok(session)
    }

    /// A session of a shell of its own, opened without asking what is ready.
    fn open_asking(&self, path: &str) -> Opened {
        let shell = shell();
        let session = self.open(path, shell.id(), None).unwrap();
        Opened::of(shell, &session)
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
    session: Arc<Session>,
    inode: u64,
    names: Vec<String>,
}

impl Opened {
    fn of(shell: Child, session: &Arc<Session>) -> Self {
        let names = fs::read_dir(session.directory.join(SHIMS)).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        let inode = fs::metadata(&session.directory).unwrap().ino();
        Self { shell, session: Arc::clone(session), inode, names }
    }
}

fn shell() -> Child {
    std::process::Command::new("sleep").arg("100").spawn().unwrap()
}

#[tokio::test]
async fn a_session_takes_what_was_left_by_one_with_its_path_only() {
    let site = Site::new();
    let (first, second) = (site.open_asking("one"), site.open_asking("one"));
    assert_eq!((first.names.as_slice(), second.names.as_slice()), (&["cat".to_owned()][..], &["cat".to_owned()][..]));
    let inode = first.inode;
    assert_ne!(second.inode, inode);
    site.close(first).await;
    site.close(second).await;
    let third = site.open_asking("one");
    assert_eq!((third.inode, third.names.as_slice()), (inode, &["cat".to_owned()][..]));
    let fourth = site.open_asking("other");
    assert_eq!(fourth.names, ["grep"]);
    site.close(third).await;
    site.close(fourth).await;
    // A program that was installed meanwhile.
    fs::copy("/proc/self/exe", site.path("other/cat")).unwrap();
    let fifth = site.open_asking("other");
    assert_eq!(fifth.names.len(), 2);
    let inode = fifth.inode;
    site.close(fifth).await;
    let sixth = site.open_asking("other");
    assert_eq!(sixth.inode, inode);
    site.close(sixth).await;
    site.sessions.close_all();
    assert_eq!(fs::read_dir(site.directory.path()).unwrap().count(), 2);
}

#[tokio::test]
async fn who_takes_what_is_ready_is_heard_of_later() {
    let site = Site::new();
    let first = site.open_asking("one");
    let inode = first.inode;
    site.close(first).await;
    assert!(site.take("other", 1).is_none());
    let shell = shell();
    let taken = site.take("one", shell.id()).unwrap();
    assert!(site.take("one", shell.id()).is_none());
    // Its first command may come before its word.
    let file = fs::read(taken.directory.join(FILE)).unwrap();
    let id = SessionFile::decode(file.as_slice()).unwrap().session;
    let waiting = tokio::spawn({
        let (sessions, id) = (Arc::clone(&site.sessions), id.clone());
        async move {
            sessions.heard_of(&id).await;
            sessions.get(&id).is_some()
        }
    });
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(!waiting.is_finished() && site.sessions.get(&id).is_none());
    let session = site.open("one", shell.id(), Some(taken)).unwrap();
    assert!(waiting.await.unwrap());
    assert_eq!((session.id.as_str(), session.outputs.as_slice()), (id.as_str(), &[7][..]));
    let second = Opened::of(shell, &session);
    assert_eq!(second.inode, inode);
    site.close(second).await;
    // What is ready is told of mounts, and who has it already when it is heard of.
    let mounts = |prefixes: &[u8]| Mounts { prefixes: prefixes.to_vec(), at_hand: true, volumes: true };
    site.sessions.publish(&mounts(b"new"));
    let file = fs::read(site.place("one").join(FILE)).unwrap();
    assert_eq!(SessionFile::decode(file.as_slice()).unwrap().prefixes, b"new"[..]);
    // Who has died after it took it.
    let taken = site.take("one", NOBODY).unwrap();
    assert!(!site.sessions.withdraw(), "somebody will be heard of");
    let directory = taken.directory.clone();
    assert!(matches!(site.open("one", NOBODY, Some(taken)), Err(SessionError::Watch { .. })));
    assert!(!directory.exists() && site.sessions.withdraw());
    // Of whom nothing is heard in time, nobody waits for a second time.
    let last = site.open_asking("one");
    site.close(last).await;
    let directory = site.take("one", NOBODY).unwrap().directory;
    let id = posh_proto::ready::session_file(&directory).unwrap().session;
    site.sessions.heard_of(&id).await;
    assert!(!site.sessions.ready().is_unheard(&id));
    site.sessions.close_all();
}

/// The directories above, beside and below the gateway's own, other sessions' places, links.
#[tokio::test]
async fn a_taken_session_is_one_name_in_the_gateway_s_directory() {
    let site = Site::new();
    let (mut shell, mut other) = (shell(), shell());
    let own = posh_proto::ready::taken_name(shell.id());
    let others = posh_proto::ready::taken_name(other.id());
    for name in ["one/inner", &others, &format!("{own}-x"), "session-1-1"] {
        fs::create_dir_all(site.path(name)).unwrap();
    }
    symlink("one", site.path(&own)).unwrap();
    let names = ["..", "../..", ".", "", "one", "session-1-1", "session-p", "one/..", "../one"].map(str::to_owned);
    let lies = [own.clone(), others.clone(), format!("{own}-x"), format!("{own}/.."), format!("{own}/inner")];
    for name in names.into_iter().chain(lies) {
        let taken = Taken { directory: site.path(&name), outputs: Vec::new(), input: None };
        let session = site.open("one", shell.id(), Some(taken)).unwrap();
        let name_of_new = format!("session-{}", session.id);
        assert_eq!(session.directory, site.path(&name_of_new), "{name}");
        session.remove();
        assert!(!site.path(&name_of_new).exists() && site.path("one/inner").exists(), "{name}");
        assert!(!site.path("one/session").exists(), "written through a link");
    }
    // Its own name, and a second time while that is open.
    fs::remove_file(site.path(&own)).unwrap();
    fs::create_dir(site.path(&own)).unwrap();
    let taken = Some(Taken { directory: site.path(&own), outputs: Vec::new(), input: None });
    let session = site.sessions.open(
        Request {
            pid: shell.id(),
            explain: false,
            trace: false,
            split: None,
            path: site.path("one"),
            stage_program: STAGE.into(),
            taken: taken.clone(),
        },
        &[],
        &Mounts::default(),
    );
    assert_eq!(session.map(|(session, _)| session.directory.clone()).ok(), Some(site.path(&own)));
    assert_ne!(site.open("one", shell.id(), taken).unwrap().directory, site.path(&own));
    for child in [&mut shell, &mut other] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

#[tokio::test]
async fn only_a_session_s_place_is_taken_for_one() {
    let site = Site::new();
    let elsewhere = site.path("one");
    let taken = Taken { directory: elsewhere.join("session-p1"), outputs: Vec::new(), input: None };
    let shell = shell();
    let session = site.open("one", shell.id(), Some(taken)).unwrap();
    assert_eq!(session.directory.parent(), Some(site.directory.path()));
    site.close(Opened::of(shell, &session)).await;
    // Nothing is offered by one that ends.
    let last = site.open_asking("one");
    site.sessions.offer_nothing();
    assert!(!site.place("one").exists());
    site.close(last).await;
    assert!(!site.place("one").exists());
}
