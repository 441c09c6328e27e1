//! The kernel's caches aren't stale, even if the requesting thread runs long after its answer was
//! sent.

use std::{
    fs,
    io::Read as _,
    os::unix::fs::MetadataExt as _,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, mpsc},
    thread,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use nix::{
    errno::Errno,
    sched::{CpuSet, sched_getaffinity},
    unistd::{Pid, geteuid},
};
use posh_volume::{directory::DirectorySession, store::*};
use tokio::sync::oneshot;

use crate::site::Site;

/// For what is to happen soon.
const PATIENCE: Duration = Duration::from_secs(10);

/// A thread that has its answer is kept from running for so long, unless the kernel has forgotten
/// what it had to before: much longer than that takes.
const HELD: Duration = Duration::from_millis(500);

/// Returns true for the op whose answer is held back.
type IsMeant = fn(&Op) -> bool;

/// Filter for an op, and a channel that gets a sender to release its answer.
type Holder = (IsMeant, mpsc::Sender<oneshot::Sender<()>>);

/// Holds one answer back.
struct Gate {
    inner: DirectorySession,
    holder: Arc<Mutex<Option<Holder>>>,
}

#[async_trait]
impl Store for Gate {
    fn root(&self) -> FileId {
        self.inner.root()
    }

    async fn call(&self, caller: &Caller, op: Op) -> Result<Answer, Errno> {
        let holder = self.holder.lock().unwrap().take_if(|(is_meant, _)| is_meant(&op));
        let answer = self.inner.call(caller, op).await;
        if let Some((_, holder)) = holder {
            let (go, goes) = oneshot::channel();
            holder.send(go).unwrap();
            let _ = goes.await;
        }
        answer
    }

    async fn read(&self, caller: &Caller, parts: Vec<ReadPart>) -> Pieces {
        self.inner.read(caller, parts).await
    }

    async fn write(
        &self,
        caller: &Caller,
        writes: Vec<Write>,
    ) -> Result<Vec<Result<Entry, Errno>>, Errno> {
        self.inner.write(caller, writes).await
    }

    fn notices(&self) -> Notices {
        self.inner.notices()
    }

    fn valid_until(&self) -> Instant {
        self.inner.valid_until()
    }

    fn state(&self) -> StoreState {
        self.inner.state()
    }
}

fn first_processor() -> usize {
    let all = sched_getaffinity(Pid::from_raw(0)).unwrap();
    (0..CpuSet::count()).find(|number| all.is_set(*number).unwrap()).unwrap()
}

/// A process that runs on one processor alone.
fn start_there(directory: &Path, script: &str) -> Child {
    let processor = first_processor().to_string();
    Command::new("taskset")
        .args(["-c", &processor, "sh", "-c", script])
        .current_dir(directory)
        .spawn()
        .unwrap()
}

/// Keeps that processor from everybody else as long as it lives.
struct Busy(Child);

impl Busy {
    fn start() -> Self {
        let processor = first_processor().to_string();
        let script = "echo; while :; do :; done";
        let mut command = Command::new("chrt");
        command
            .args(["--fifo", "1", "taskset", "-c", &processor, "sh", "-c", script])
            .stdout(Stdio::piped());
        let mut busy = command.spawn().unwrap();
        busy.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        Self(busy)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// By another process, which the store hears of, and the kernel that has to forget.
fn elsewhere(site: &Site, script: &str) {
    let status = Command::new("sh").args(["-c", script]).current_dir(site.origin()).status();
    assert!(status.unwrap().success());
    site.catch_up(0);
}

fn seen(path: &Path) -> (u64, u32, u64) {
    let found = fs::metadata(path).unwrap();
    (found.size(), found.mode(), found.nlink())
}

#[test]
fn what_was_asked_before_a_change_is_not_remembered_after_it() {
    if !geteuid().is_root() {
        // Nobody tells of what other programs change.
        return;
    }
    let holder = Arc::new(Mutex::new(None));
    let site = Site::over(1, |inner| Arc::new(Gate { inner, holder: Arc::clone(&holder) }));
    let [walk, set, link] = [
        |op: &Op| matches!(op, Op::Walk { .. }),
        |op: &Op| matches!(op, Op::Set { .. }),
        |op: &Op| matches!(op, Op::Link { .. }),
    ];
    // What looks or changes here, whether the kernel knows the file before, and what is answered
    // late.
    let scripts: [(&str, bool, IsMeant); 5] = [
        ("test -e f", false, walk),
        ("stat f > /dev/null", false, walk),
        ("truncate -s 0 f", true, set),
        ("chmod 700 f", true, set),
        ("ln f g", true, link),
    ];
    for (script, is_known, what) in scripts {
        let (path, origin) = (site.mount(0).join("f"), site.origin().join("f"));
        elsewhere(&site, "printf 'a little' > f");
        if is_known {
            seen(&path);
        }
        let (tell, told) = mpsc::channel();
        *holder.lock().unwrap() = Some((what, tell));
        let mut asking = start_there(site.mount(0), script);
        let go = told.recv_timeout(PATIENCE).expect(script);
        let busy = Busy::start();
        go.send(()).unwrap();
        thread::scope(|scope| {
            let (ends, end) = mpsc::channel();
            scope.spawn(move || {
                let _ = end.recv_timeout(HELD);
                drop(busy);
            });
            site.wait_until_told(0, fs::metadata(&origin).unwrap().ino());
            elsewhere(&site, "printf 'and more' >> f");
            // The kernel has forgotten: now it may run.
            let _ = ends.send(());
        });
        asking.wait().unwrap();
        assert_eq!(seen(&path), seen(&origin), "{script}");
        elsewhere(&site, "rm -f f g");
    }
}

/// An invalidation doesn't wait for a reply that was sent to a killed process.
#[test]
fn who_was_killed_while_it_asked_is_told_of_nothing() {
    if !geteuid().is_root() {
        return;
    }
    let holder = Arc::new(Mutex::new(None));
    let site = Site::over(1, |inner| Arc::new(Gate { inner, holder: Arc::clone(&holder) }));
    elsewhere(&site, "printf 'a little' > f");
    let (tell, told) = mpsc::channel();
    *holder.lock().unwrap() = Some((|op: &Op| matches!(op, Op::Walk { .. }), tell));
    let mut asking = start_there(site.mount(0), "exec test -e f");
    let go = told.recv_timeout(PATIENCE).unwrap();
    asking.kill().unwrap();
    asking.wait().unwrap();
    go.send(()).unwrap();
    let began = Instant::now();
    elsewhere(&site, "printf 'and more' >> f");
    assert!(began.elapsed() < PATIENCE / 4, "{:?}", began.elapsed());
    assert_eq!(seen(&site.mount(0).join("f")), seen(&site.origin().join("f")));
}
