//! Follows changes of the server's accounts while the executor runs: a user who leaves a group
//! loses that group's rights also in runs, sessions and calls of the executor.

use std::{
    fs::Metadata,
    os::unix::fs::MetadataExt as _,
    time::{Duration, Instant},
};

use tokio::{sync::mpsc, time};

use crate::{
    Config,
    identity::{NoUser, UnixUser},
};

/// Files of nsswitch.conf(5)'s service `files`, and nsswitch.conf itself.
const DATABASES: [&str; 3] = ["/etc/passwd", "/etc/group", "/etc/nsswitch.conf"];

/// Interval at which these are checked.
const LOOK: Duration = Duration::from_secs(1);

/// Interval at which accounts are looked up although no file has changed: directory services keep
/// theirs elsewhere.
const LOOK_UP: Duration = Duration::from_secs(300);

/// Watches account databases for changes, as far as their files tell.
pub struct Accounts {
    seen: Stamps,
    looked_up: Instant,
    interval: time::Interval,
}

type Stamps = [Option<(u64, u64, i64, i64, u64)>; DATABASES.len()];

impl Accounts {
    /// Watches from now on. Look up the accounts in use after this.
    pub async fn watch() -> Self {
        let mut interval = time::interval(LOOK);
        interval.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        Self { seen: stamps().await, looked_up: Instant::now(), interval }
    }

    /// Waits until accounts may have changed.
    pub async fn changed(&mut self) {
        loop {
            self.interval.tick().await;
            let now = stamps().await;
            if now != self.seen || self.looked_up.elapsed() >= LOOK_UP {
                (self.seen, self.looked_up) = (now, Instant::now());
                return;
            }
        }
    }
}

async fn stamps() -> Stamps {
    let mut stamps = Stamps::default();
    for (stamp, file) in stamps.iter_mut().zip(DATABASES) {
        let of = |found: Metadata| {
            (found.dev(), found.ino(), found.ctime(), found.ctime_nsec(), found.size())
        };
        *stamp = tokio::fs::metadata(file).await.ok().map(of);
    }
    stamps
}

impl Config {
    /// This configuration with its accounts looked up again. An identity whose account is gone is
    /// removed. An account stays as it was if its look-up fails, and so does the user of
    /// `[confinement]` if it is gone.
    #[must_use]
    pub fn with_accounts_of_now(&self) -> Self {
        let mut now = self.clone();
        if let Some(user) = &mut now.confinement.user {
            match UnixUser::named(&user.name) {
                Ok(found) => *user = found,
                Err(error) => {
                    tracing::error!("commands go on to run as `{}` as it was: {error}", user.name)
                }
            }
        }
        now.identities.retain_mut(|identity| {
            let Some(user) = &mut identity.user else { return true };
            match UnixUser::named(&user.name) {
                Ok(found) => *user = found,
                Err(error @ NoUser::LookUp { .. }) => {
                    tracing::error!(
                        "the account of identity `{}` stays as it was: {error}",
                        identity.name
                    );
                }
                Err(error @ NoUser::Unknown(_)) => {
                    tracing::error!("identity `{}` is not let in any more: {error}", identity.name);
                    return false;
                }
            }
            true
        });
        now
    }
}

/// Sends the configuration whenever its accounts have changed, and each configuration from `anew`.
pub async fn follow(
    configured: Config,
    mut anew: mpsc::Receiver<Config>,
    changed: mpsc::Sender<Config>,
) {
    let mut accounts = Accounts::watch().await;
    let mut current = configured.clone();
    let mut configured = configured;
    let mut ends = false;
    loop {
        let is_new = tokio::select! {
            new = anew.recv(), if !ends => match new {
                Some(new) => { configured = new; true }
                None => { ends = true; continue }
            },
            () = accounts.changed() => false,
        };
        let next = configured.clone();
        let looked_up = tokio::task::spawn_blocking(move || next.with_accounts_of_now()).await;
        let Ok(next) = looked_up else { continue };
        if is_new || next != current {
            if !is_new {
                tracing::info!("accounts of this machine have changed");
            }
            current = next.clone();
            if changed.send(next).await.is_err() {
                return;
            }
        }
    }
}
