//! One tokio runtime for each identity, on a thread of its own. Connections without identity (plain
//! text, strangers) and handshakes stay on the program's common runtime.
//!
//! Invariant: all work that an identity's connections cause in this process (TLS records, HTTP/2
//! frames, messages, handlers, and the tasks and blocking calls that handlers start) runs on that
//! identity's runtime. So the kernel's scheduler divides the processors between identities, not the
//! order of tasks in one queue; one identity keeps at most one processor busy with asynchronous
//! work, and blocking calls that hang use up its own threads alone.
//!
//! A thread and a process inherit the niceness of the thread that starts them (clone(2)), and the
//! common runtime has a lower priority than these. So a thread starts them that has the priority of
//! the [`Runtimes`]' creator.

use std::{
    collections::{HashMap, hash_map::DefaultHasher},
    future::Future,
    hash::{Hash as _, Hasher as _},
    io,
    pin::Pin,
    sync::{Arc, Mutex, mpsc as channels},
    thread,
};

use tokio::{
    runtime::Builder,
    sync::{mpsc, watch},
};
use tokio_stream::wrappers::ReceiverStream;

/// Each is a thread, an epoll instance and some 100 KB once its identity has connected. Beyond that
/// number identities share the existing runtimes.
const MAX_RUNTIMES: usize = 256;

/// Blocking threads of one identity: they access exports and analyse command lines.
const BLOCKING_THREADS: usize = 32;

/// Connections of one identity that wait for its runtime.
const QUEUE: usize = 16;

/// Serves connections until no more come and all are closed.
type ServeFn<C> = dyn Fn(ReceiverStream<C>) -> Pin<Box<dyn Future<Output = ()>>> + Send + Sync;

/// The body of a thread.
type Work = Box<dyn FnOnce() + Send>;

/// The runtimes, started when their identities first connect. Dropping this ends them.
pub struct Runtimes<C> {
    server: Arc<ServeFn<C>>,
    starter: Starter,
    /// By identity.
    queues: Mutex<Queues<C>>,
    /// Number of running servers.
    at_work: watch::Sender<usize>,
    over: watch::Sender<bool>,
}

struct Queues<C> {
    of: HashMap<String, mpsc::Sender<C>>,
    all: Vec<mpsc::Sender<C>>,
    is_closed: bool,
}

/// A thread that starts threads. Dropping this ends it.
struct Starter(channels::Sender<ThreadToStart>);

struct ThreadToStart {
    name: String,
    work: Work,
    started: channels::SyncSender<io::Result<()>>,
}

/// Counts one running server.
struct RunningServer(watch::Sender<usize>);

impl<C: Send + 'static> Runtimes<C> {
    /// With a server for each, which makes its future on the runtime's own thread.
    ///
    /// # Errors
    /// When there is no room for a thread.
    pub fn new<F>(
        server: impl Fn(ReceiverStream<C>) -> F + Send + Sync + 'static,
    ) -> io::Result<Self>
    where
        F: Future<Output = ()> + 'static,
    {
        Ok(Self {
            server: Arc::new(move |connections| Box::pin(server(connections))),
            starter: Starter::new()?,
            queues: Mutex::new(Queues { of: HashMap::new(), all: Vec::new(), is_closed: false }),
            at_work: watch::Sender::new(0),
            over: watch::Sender::new(false),
        })
    }

    /// Passes a connection to the runtime of its identity; waits while that has no room for it.
    pub async fn serve(&self, identity: &str, connection: C) {
        match self.queue_of(identity) {
            // A failed send means that the server has ended.
            Ok(queue) => drop(queue.send(connection).await),
            Err(error) => {
                tracing::error!(identity, %error, "cannot start a runtime; a connection is closed")
            }
        }
    }

    /// Takes no more connections, and resolves when all that were taken are closed.
    pub async fn finish(&self) {
        {
            let mut queues = self.queues.lock().expect("not poisoned");
            queues.is_closed = true;
            queues.of.clear();
            queues.all.clear();
        }
        // The sender lives as long as we do.
        let _ = self.at_work.subscribe().wait_for(|count| *count == 0).await;
    }

    fn queue_of(&self, identity: &str) -> io::Result<mpsc::Sender<C>> {
        let mut queues = self.queues.lock().expect("not poisoned");
        if let Some(queue) = queues.of.get(identity) {
            return Ok(queue.clone());
        }
        if queues.is_closed {
            return Err(io::Error::other("this executor is ending"));
        }
        let queue = if queues.all.len() < MAX_RUNTIMES {
            let queue = self.start(queues.all.len())?;
            queues.all.push(queue.clone());
            queue
        } else {
            let mut hasher = DefaultHasher::new();
            identity.hash(&mut hasher);
            let number = hasher.finish() % MAX_RUNTIMES as u64;
            queues.all[usize::try_from(number).unwrap_or_default()].clone()
        };
        queues.of.insert(identity.to_owned(), queue.clone());
        Ok(queue)
    }

    fn start(&self, number: usize) -> io::Result<mpsc::Sender<C>> {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let runtime = Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING_THREADS)
            .build()?;
        let (server, mut over) = (self.server.clone(), self.over.subscribe());
        let at_work = RunningServer::begin(&self.at_work);
        let serve = move || {
            runtime.block_on(async {
                let serving = async {
                    server(ReceiverStream::new(receiver)).await;
                    drop(at_work);
                    // Runs go on without a connection, until the executor ends.
                    std::future::pending::<()>().await;
                };
                tokio::select! {
                    () = serving => {}
                    _ = over.wait_for(|is_over| *is_over) => {}
                }
            });
            // Work that hangs in the kernel must not hold up the end.
            runtime.shutdown_background();
        };
        self.starter.start(format!("identity-{number}"), Box::new(serve))?;
        Ok(sender)
    }
}

impl Starter {
    fn new() -> io::Result<Self> {
        let (sender, to_start) = channels::channel::<ThreadToStart>();
        thread::Builder::new().name("identities".to_owned()).spawn(move || {
            for ThreadToStart { name, work, started } in to_start {
                let _ = started.send(thread::Builder::new().name(name).spawn(work).map(drop));
            }
        })?;
        Ok(Self(sender))
    }

    fn start(&self, name: String, work: Work) -> io::Result<()> {
        let has_ended = || io::Error::other("the thread that starts threads has ended");
        let (started, is_started) = channels::sync_channel(1);
        self.0.send(ThreadToStart { name, work, started }).map_err(|_| has_ended())?;
        is_started.recv().map_err(|_| has_ended())?
    }
}

impl<C> Drop for Runtimes<C> {
    fn drop(&mut self) {
        self.over.send_replace(true);
    }
}

impl RunningServer {
    fn begin(count: &watch::Sender<usize>) -> Self {
        count.send_modify(|count| *count += 1);
        Self(count.clone())
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::{sync::oneshot, time::timeout};
    use tokio_stream::StreamExt as _;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Each connection is work for its server.
    fn runtimes() -> Runtimes<Work> {
        let made = Runtimes::new(|mut connections: ReceiverStream<Work>| async move {
            while let Some(work) = connections.next().await {
                work();
            }
        });
        made.unwrap()
    }

    #[tokio::test]
    async fn an_identity_whose_work_never_yields_holds_up_no_other() {
        let runtimes = runtimes();
        let (let_go, held) = std::sync::mpsc::channel::<()>();
        let hold = Box::new(move || {
            let _ = held.recv();
        });
        runtimes.serve("ada", hold).await;
        let (done, is_done) = oneshot::channel();
        runtimes
            .serve(
                "bob",
                Box::new(move || {
                    let _ = done.send(thread::current().id());
                }),
            )
            .await;
        let bobs = timeout(PATIENCE, is_done).await.unwrap().unwrap();
        let (done, mut is_done) = oneshot::channel();
        runtimes
            .serve(
                "ada",
                Box::new(move || {
                    let _ = done.send(thread::current().id());
                }),
            )
            .await;
        assert!(timeout(Duration::from_millis(50), &mut is_done).await.is_err());
        drop(let_go);
        assert_ne!(timeout(PATIENCE, is_done).await.unwrap().unwrap(), bobs);
        timeout(PATIENCE, runtimes.finish()).await.unwrap();
    }

    #[tokio::test]
    async fn an_identity_has_the_priority_of_who_made_the_runtimes() {
        // Field 19 of proc_pid_stat(5), the third of which follows the name.
        let niceness = || -> i32 {
            let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
            stat.rsplit_once(") ").unwrap().1.split(' ').nth(16).unwrap().parse().unwrap()
        };
        let runtimes = runtimes();
        let own = niceness();
        let (done, is_done) = oneshot::channel();
        let serve = move || {
            crate::lower_priority(own + 5);
            let work = Box::new(move || {
                let _ = done.send(niceness());
            });
            let runtime = Builder::new_current_thread().build().unwrap();
            runtime.block_on(runtimes.serve("ada", work));
            runtimes
        };
        let runtimes = thread::spawn(serve).join().unwrap();
        assert_eq!(timeout(PATIENCE, is_done).await.unwrap().unwrap(), own);
        drop(runtimes);
    }

    #[tokio::test]
    async fn nothing_is_taken_once_it_is_finishing() {
        let runtimes = runtimes();
        timeout(PATIENCE, runtimes.finish()).await.unwrap();
        let (done, is_done) = oneshot::channel::<()>();
        runtimes
            .serve(
                "ada",
                Box::new(move || {
                    let _ = done.send(());
                }),
            )
            .await;
        assert!(timeout(PATIENCE, is_done).await.unwrap().is_err());
    }

    #[tokio::test]
    async fn more_identities_than_runtimes_share_them() {
        let runtimes = runtimes();
        let (done, mut is_done) = mpsc::unbounded_channel();
        for number in 0..=MAX_RUNTIMES {
            let done = done.clone();
            let work = Box::new(move || {
                let _ = done.send(thread::current().id());
            });
            runtimes.serve(&number.to_string(), work).await;
        }
        let mut threads = std::collections::HashSet::new();
        for _ in 0..=MAX_RUNTIMES {
            threads.insert(timeout(PATIENCE, is_done.recv()).await.unwrap().unwrap());
        }
        assert_eq!(threads.len(), MAX_RUNTIMES);
    }
}
