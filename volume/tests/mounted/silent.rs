//! A store that lives and does not answer.

use std::time::Instant;

use async_trait::async_trait;
use posh_volume::{directory::DirectorySession, store::*};
use tokio::sync::watch;

/// Answers nothing while it is told to be silent.
pub struct Silent {
    pub inner: DirectorySession,
    pub is_silent: watch::Receiver<bool>,
    /// No lease is good after that.
    pub until: Option<Instant>,
}

impl Silent {
    async fn speaks(&self) {
        let _ = self.is_silent.clone().wait_for(|is_silent| !is_silent).await;
    }
}

#[async_trait]
impl Store for Silent {
    fn root(&self) -> FileId {
        self.inner.root()
    }

    async fn call(&self, caller: &Caller, op: Op) -> Result<Answer, Errno> {
        self.speaks().await;
        self.inner.call(caller, op).await
    }

    async fn read(&self, caller: &Caller, parts: Vec<ReadPart>) -> Pieces {
        self.speaks().await;
        self.inner.read(caller, parts).await
    }

    async fn write(
        &self,
        caller: &Caller,
        writes: Vec<Write>,
    ) -> Result<Vec<Result<Entry, Errno>>, Errno> {
        self.speaks().await;
        self.inner.write(caller, writes).await
    }

    fn notices(&self) -> Notices {
        self.inner.notices()
    }

    fn valid_until(&self) -> Instant {
        self.until.unwrap_or_else(|| self.inner.valid_until())
    }

    fn state(&self) -> StoreState {
        self.inner.state()
    }
}
