//! Work that may take long, or hang with an unreachable server, while the gateway goes on. Its
//! tasks share one thread; another thread takes them over meanwhile (`block_in_place`).

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::oneshot,
};

/// Acceptable delay without `block_in_place`: many times the cost of handing over the thread's
/// tasks.
const SHORT: Duration = Duration::from_millis(1);

/// Work that grows with the number of processes: it goes aside once it has taken long.
#[derive(Debug, Default)]
pub struct Growing {
    /// Duration of the last run, in nanoseconds.
    took: AtomicU64,
}

impl Growing {
    /// Runs the work.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let done = if self.took() > SHORT { aside(work) } else { work() };
        self.took.store(
            u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX),
            Ordering::Relaxed,
        );
        done
    }

    /// Duration of the last run.
    pub fn took(&self) -> Duration {
        Duration::from_nanos(self.took.load(Ordering::Relaxed))
    }
}

/// Runs work that may block, by `block_in_place` on a multi-threaded runtime.
pub fn aside<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        // There is no other thread to continue on.
        _ => work(),
    }
}

/// Runs work that may never end in a thread of its own. It must not use tokio's pool, which
/// [`aside`] needs for the gateway to go on. The receiver fails if the work panicked or no thread
/// could be started.
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
