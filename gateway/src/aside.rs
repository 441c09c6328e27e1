//! Work that may take long, or hang with a server that is away, while the gateway goes on with
//! everything else: its tasks share one thread, and another one takes over that thread's work
//! meanwhile.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::oneshot,
};

/// Nobody minds to wait so long. It is many times what handing over the thread's work takes.
const SHORT: Duration = Duration::from_millis(1);

/// Work that takes the longer the more processes there are: it goes aside as soon as it has taken
/// long once.
#[derive(Debug, Default)]
pub struct Growing {
    /// The last time, in nanoseconds.
    took: AtomicU64,
}

impl Growing {
    /// Does it.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let done = if self.took() > SHORT { aside(work) } else { work() };
        self.took.store(
            u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX),
            Ordering::Relaxed,
        );
        done
    }

    /// How long it took the last time.
    pub fn took(&self) -> Duration {
        Duration::from_nanos(self.took.load(Ordering::Relaxed))
    }
}

/// Does it.
pub fn aside<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        // Nobody else is there to go on.
        _ => work(),
    }
}

/// Has work done that may never end: in a thread of its own, and none of tokio's pool, of which
/// [`aside`] needs one for the gateway to go on. Without an answer nothing came of it.
pub fn in_own_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> oneshot::Receiver<T> {
    let (sender, receiver) = oneshot::channel();
    let spawned = std::thread::Builder::new().name("aside".to_owned()).spawn(move || {
        let _nobody_waits = sender.send(work());
    });
    if let Err(error) = spawned {
        tracing::warn!(%error, "no thread for what may take long");
    }
    receiver
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn what_took_long_once_holds_nobody_up() {
        // On the runtime's only thread, as the gateway's tasks are.
        let task = tokio::spawn(async {
            let growing = Growing::default();
            growing.run(|| thread::sleep(2 * SHORT));
            assert!(growing.took() > SHORT);
            let (sender, receiver) = mpsc::channel();
            tokio::spawn(async move { sender.send(()) });
            growing.run(|| receiver.recv_timeout(Duration::from_secs(10)))
        });
        task.await.unwrap().expect("the other task went on");
    }
}
