//! Follows changes of the server's accounts while the executor runs: a user who leaves a group
//! loses that group's rights also in runs, sessions and calls of the executor.

use std::{
    collections::HashMap,
    fs::Metadata,
    os::unix::fs::MetadataExt as _,
    time::{Duration, Instant},
};

use tokio::{sync::mpsc, time};

use crate::{
    Config,
    identity::{AccountLookup, NoUser},
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

/// Services of nsswitch.conf(5) that answer from files of this machine: what they do not know is
/// not there.
const CERTAIN_SERVICES: [&str; 6] = ["files", "compat", "db", "systemd", "altfiles", "extrausers"];
/// Time for which a directory service has to say that an account is unknown. Where it is away for a
/// moment, it says so of all.
const UNKNOWN_FOR: Duration = Duration::from_secs(10);
/// Interval of look-ups meanwhile.
const LOOK_UP_MISSING: Duration = Duration::from_secs(2);

/// Accounts in use that were unknown at the last look-up, by name, and since when.
#[derive(Debug, Clone, Default)]
pub struct MissingAccounts(HashMap<String, Instant>);

impl MissingAccounts {
    /// Returns true if that account, which is unknown now, is certain to be gone.
    fn is_gone(&mut self, name: &str) -> bool {
        let nsswitch = std::fs::read_to_string("/etc/nsswitch.conf");
        self.is_gone_by(name, &nsswitch.unwrap_or_default())
    }

    fn is_gone_by(&mut self, name: &str, nsswitch: &str) -> bool {
        if are_certain(nsswitch) {
            return true;
        }
        let since = *self.0.entry(name.to_owned()).or_insert_with(Instant::now);
        since.elapsed() >= UNKNOWN_FOR
    }

    /// Returns true if one of them may come back.
    fn are_awaited(&self) -> bool {
        self.0.values().any(|since| since.elapsed() < UNKNOWN_FOR + LOOK_UP_MISSING)
    }
}

/// Returns true if all accounts are in files of this machine.
fn are_certain(nsswitch: &str) -> bool {
    let mut services = nsswitch.lines().filter_map(|line| line.trim().strip_prefix("passwd:"));
    services.all(|services| {
        let text = services.split('#').next().unwrap_or_default();
        // An action in brackets, [NOTFOUND=return], is none.
        let mut words = text.split_whitespace().filter(|word| !word.starts_with('['));
        words.all(|word| CERTAIN_SERVICES.contains(&word))
    })
}

impl Config {
    /// This configuration with its accounts looked up again. An identity whose account is gone is
    /// removed. An account stays as it was if its look-up fails, and so does the user of
    /// `[confinement]` if it is gone.
    #[must_use]
    pub fn with_accounts_of_now(&self, missing: &mut MissingAccounts) -> Self {
        let mut now = self.clone();
        let mut lookup = AccountLookup::default();
        if let Some(user) = &mut now.confinement.user {
            match lookup.find(&user.name) {
                Ok(found) => *user = found,
                Err(error) => {
                    tracing::error!("commands go on to run as `{}` as it was: {error}", user.name)
                }
            }
        }
        let before = std::mem::take(&mut missing.0);
        let mut still = MissingAccounts::default();
        now.identities.retain_mut(|identity| {
            let Some(user) = &mut identity.user else { return true };
            match lookup.find(&user.name) {
                Ok(found) => *user = found,
                Err(NoUser::Unknown(name)) => {
                    before.get(&name).map(|since| still.0.insert(name.clone(), *since));
                    if still.is_gone(&name) {
                        tracing::error!(
                            "identity `{}` is not let in any more: {}",
                            identity.name,
                            NoUser::Unknown(name)
                        );
                        return false;
                    }
                    tracing::warn!("`{name}` is unknown just now, and looked up again");
                }
                Err(error) => {
                    tracing::error!(
                        "the account of identity `{}` stays as it was: {error}",
                        identity.name
                    );
                }
            }
            true
        });
        *missing = still;
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
    let mut missing = MissingAccounts::default();
    let mut ends = false;
    loop {
        let waits_for_missing = missing.are_awaited();
        let is_new = tokio::select! {
            new = anew.recv(), if !ends => match new {
                Some(new) => { configured = new; true }
                None => { ends = true; continue }
            },
            () = accounts.changed() => false,
            () = time::sleep(LOOK_UP_MISSING), if waits_for_missing => false,
        };
        let (next, mut still_missing) = (configured.clone(), missing.clone());
        let looked_up = tokio::task::spawn_blocking(move || {
            let next = next.with_accounts_of_now(&mut still_missing);
            (next, still_missing)
        });
        let Ok((next, still_missing)) = looked_up.await else { continue };
        missing = still_missing;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_gone_once_it_was_unknown_for_ten_seconds() {
        let mut missing = MissingAccounts::default();
        assert!(!missing.is_gone_by("ada", "passwd: files sss") && missing.are_awaited());
        assert!(!missing.is_gone_by("ada", "passwd: files sss"));
        let long_ago = Instant::now().checked_sub(UNKNOWN_FOR).unwrap();
        missing.0.insert("ada".to_owned(), long_ago);
        assert!(missing.is_gone_by("ada", "passwd: files sss"));
        assert!(MissingAccounts::default().is_gone_by("ada", "passwd: files"));
    }

    #[test]
    fn only_files_of_this_machine_are_certain() {
        for (text, expect) in [
            ("", true),
            ("group: files ldap\n", true),
            ("passwd: files systemd # ldap\n", true),
            ("passwd:\tfiles [NOTFOUND=return] db", true),
            ("passwd: files sss\n", false),
            ("passwd: ldap\nshadow: files", false),
        ] {
            assert_eq!(are_certain(text), expect, "{text:?}");
        }
    }
}
