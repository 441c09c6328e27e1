//! What refreshes of one executor's mounts may cost at one time. An executor can tell of many
//! changes and then hold up whatever asks its mounts about them: threads in calls on a mount can't
//! be cancelled. So each refresh has a share, until the last of its threads has ended.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Refreshes at work at a time, each with up to 64 threads; others wait for their turn.
const TURNS: usize = 32;
/// Bytes of the paths that an executor has told of and that are not dealt with: two commands may
/// each tell of as many as are heard (16 MiB). A refresh keeps some copies of each path.
const TOLD_KIB: usize = 32 << 10;
/// What a path takes besides its bytes.
const PATH_BYTES: usize = 64;

/// Of one executor.
#[derive(Debug)]
pub struct Shares {
    turns: Arc<Semaphore>,
    told_kib: Arc<Semaphore>,
}

/// Is given back when it is dropped.
#[derive(Debug)]
pub struct Share {
    _permit: OwnedSemaphorePermit,
}

impl Default for Shares {
    fn default() -> Self {
        Self { turns: Arc::new(Semaphore::new(TURNS)), told_kib: Arc::new(Semaphore::new(TOLD_KIB)) }
    }
}

impl Shares {
    /// Room for paths that together have so many bytes; `None` if there is not as much left.
    #[must_use]
    pub fn room(&self, paths: usize, bytes: usize) -> Option<Share> {
        let kib = u32::try_from((bytes + paths * PATH_BYTES).div_ceil(1 << 10)).ok()?;
        let permit = Arc::clone(&self.told_kib).try_acquire_many_owned(kib).ok()?;
        Some(Share { _permit: permit })
    }

    /// Waits until there are few enough at work.
    pub async fn turn(&self) -> Share {
        let permit = Arc::clone(&self.turns).acquire_owned().await;
        Share { _permit: permit.expect("it is never closed") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_executor_has_so_many_refreshes_and_paths_at_a_time() {
        let shares = Shares::default();
        let all = shares.room(1000, 31 << 20);
        assert!(all.is_some() && shares.room(1, 1 << 20).is_none());
        assert!(shares.room(1, 100).is_some(), "a few more");
        drop(all);
        assert!(shares.room(1, 1 << 20).is_some());
        let mut turns = Vec::new();
        for _ in 0..TURNS {
            turns.push(shares.turn().await);
        }
        assert!(at_once(shares.turn()).await.is_none());
        turns.pop();
        assert!(at_once(shares.turn()).await.is_some());
    }

    /// What is there without waiting.
    async fn at_once<T>(work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            done = work => Some(done),
            () = std::future::ready(()) => None,
        }
    }
}
