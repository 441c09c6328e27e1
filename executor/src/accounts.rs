//! Follows changes of the server's accounts while the executor runs: a user who leaves a group
//! loses that group's rights also in runs, sessions and calls of the executor.
//!
//! Invariant: each account is looked up on its own, and its rights depend on its own answers only.
//! Look-ups that hang delay another's for half a second for each 32 of them: every look-up begins
//! in a lane for quick ones, and one that takes longer is made again in a lane of its own.
//!
//! Invariant: `Standing::take` alone decides which answers count, for accounts and for groups. A
//! directory service that is away is no error to initgroups(3), and to getpwnam(3) an unknown name.

mod standing;

use std::{
    collections::HashMap,
    fs::Metadata,
    io,
    os::unix::fs::MetadataExt as _,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    sync::{Semaphore, mpsc},
    task::{JoinSet, spawn_blocking},
    time,
};

use crate::{
    Config,
    config::user_to_become,
    identity::{ConfiguredAccount, MOST_AT_ONCE, NoUser, PATIENCE, UnixUser},
};
use standing::Standing;

/// Name service switch of the C library.
const NSSWITCH: &str = "/etc/nsswitch.conf";
/// Files of nsswitch.conf(5)'s service `files`, and nsswitch.conf itself.
const DATABASES: [&str; 3] = ["/etc/passwd", "/etc/group", NSSWITCH];

/// Interval at which these are checked.
const LOOK: Duration = Duration::from_secs(1);

/// Interval at which accounts are looked up although no file has changed: directory services keep
/// theirs elsewhere.
const LOOK_UP: Duration = Duration::from_secs(300);

/// Interval for an account that is awaited (see [`Standing::is_awaited`]).
const LOOK_UP_AWAITED: Duration = Duration::from_secs(2);

/// Awaited accounts whose look-ups begin in one [`LOOK`], so that many cost little.
const AWAITED_AT_ONCE: usize = 16;

/// Time after which a look-up leaves the lane for quick ones.
const QUICK: Duration = Duration::from_millis(500);

/// Metadata by which a change of a file shows.
type Stamps = [Option<(u64, u64, i64, i64, u64)>; DATABASES.len()];

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

/// Looks an account up, for that time at most.
type Find = fn(&str, Duration) -> Result<UnixUser, NoUser>;

/// Slots for look-ups. Each holds a thread.
struct Lanes {
    quick: Semaphore,
    slow: Semaphore,
    find: Find,
}

/// Answer about an account.
struct LookUpAnswer {
    name: String,
    found: Result<UnixUser, NoUser>,
    /// Text of nsswitch.conf(5).
    nsswitch: String,
}

impl Lanes {
    fn new(find: Find) -> Self {
        Self { quick: Semaphore::new(MOST_AT_ONCE), slow: Semaphore::new(MOST_AT_ONCE), find }
    }

    async fn look_up(self: Arc<Self>, name: String) -> LookUpAnswer {
        let mut found = self.look_up_in(&self.quick, &name, QUICK).await;
        if found.as_ref().is_err_and(NoUser::is_timeout) {
            found = self.look_up_in(&self.slow, &name, PATIENCE).await;
        }
        let nsswitch = tokio::fs::read_to_string(NSSWITCH).await.unwrap_or_default();
        LookUpAnswer { name, found, nsswitch }
    }

    async fn look_up_in(
        &self,
        lane: &Semaphore,
        name: &str,
        patience: Duration,
    ) -> Result<UnixUser, NoUser> {
        let _slot = lane.acquire().await;
        let (find, its) = (self.find, name.to_owned());
        spawn_blocking(move || find(&its, patience)).await.unwrap_or_else(|error| {
            let source = io::Error::other(error);
            Err(NoUser::LookUp { name: name.to_owned(), program: "a thread", source })
        })
    }
}

/// An account that the configuration names.
struct Followed {
    standing: Standing,
    /// Time of its next look-up; at once if `None`.
    due: Option<Instant>,
    /// A look-up is under way.
    is_asked: bool,
}

impl Followed {
    fn new(account: &ConfiguredAccount) -> Self {
        Self { standing: Standing::new(account), due: None, is_asked: false }
    }

    fn is_due(&self, now: Instant) -> bool {
        !self.is_asked && self.due.is_none_or(|due| due <= now)
    }
}

struct Follower {
    configured: Config,
    accounts: HashMap<String, Followed>,
    lanes: Arc<Lanes>,
    look_ups: JoinSet<LookUpAnswer>,
}

impl Follower {
    fn new(configured: Config, find: Find) -> Self {
        let lanes = Arc::new(Lanes::new(find));
        let mut follower =
            Self { configured, accounts: HashMap::new(), lanes, look_ups: JoinSet::new() };
        follower.take_accounts();
        follower
    }

    /// Follows the configured accounts. Those that were followed before stand as they do: what the
    /// configuration has of them is older.
    fn take_accounts(&mut self) {
        let identities = self.configured.identities.iter();
        let confinement = self.configured.confinement.user.clone();
        let accounts = identities.filter_map(|identity| identity.user.clone()).chain(confinement);
        let mut before = std::mem::take(&mut self.accounts);
        for account in accounts {
            let name = account.name().to_owned();
            let taken = before.remove(&name).unwrap_or_else(|| Followed::new(&account));
            self.accounts.entry(name).or_insert(taken);
        }
        // An answer that is under way is older than what is asked from now on.
        self.accounts.extend(before.into_iter().filter(|(_, followed)| followed.is_asked));
    }

    /// Has all accounts looked up.
    fn all_are_due(&mut self) {
        self.accounts.values_mut().for_each(|followed| followed.due = None);
    }

    /// Begins the look-ups that are due: all of accounts that stand, and some of those that are
    /// awaited, the longest due first.
    fn look_up_due(&mut self) {
        let now = Instant::now();
        let is_due = |(_, followed): &(&String, &mut Followed)| followed.is_due(now);
        let mut due: Vec<_> = self.accounts.iter_mut().filter(is_due).collect();
        due.sort_by_key(|(_, followed)| followed.due);
        let mut awaited = 0;
        for (name, followed) in due {
            awaited += usize::from(followed.standing.is_awaited(now));
            if followed.standing.is_awaited(now) && awaited > AWAITED_AT_ONCE {
                continue;
            }
            (followed.due, followed.is_asked) = (Some(now + LOOK_UP), true);
            self.look_ups.spawn(self.lanes.clone().look_up(name.clone()));
        }
    }

    fn take(&mut self, LookUpAnswer { name, found, nsswitch }: LookUpAnswer) {
        let Some(followed) = self.accounts.get_mut(&name) else { return };
        let now = Instant::now();
        followed.is_asked = false;
        followed.standing.take(&name, found.and_then(user_to_become), &nsswitch, now);
        if followed.standing.is_awaited(now) {
            // Earlier if its files have changed meanwhile.
            followed.due = followed.due.min(Some(now + LOOK_UP_AWAITED));
        }
    }

    /// The configuration with its accounts as they stand.
    fn config(&self) -> Config {
        let mut config = self.configured.clone();
        let standing = |name: &str| self.accounts.get(name).map(|followed| &followed.standing);
        let of_identities = config.identities.iter_mut().filter_map(|it| it.user.as_mut());
        for account in of_identities.chain(&mut config.confinement.user) {
            if let Some(standing) = standing(account.name()) {
                *account = standing.account(account.name());
            }
        }
        config
    }
}

/// Sources of changes beside the databases.
pub struct Inputs {
    /// Configurations that were read again.
    pub anew: mpsc::Receiver<Config>,
    /// Names of absent accounts whose identities have just tried to get in.
    pub attempted: mpsc::Receiver<String>,
}

/// Sends the configuration whenever its accounts have changed, and each configuration from `anew`.
pub async fn follow(configured: Config, inputs: Inputs, changed: mpsc::Sender<Config>) {
    follow_by(UnixUser::find, configured, inputs, changed).await;
}

async fn follow_by(find: Find, configured: Config, inputs: Inputs, changed: mpsc::Sender<Config>) {
    let Inputs { mut anew, mut attempted } = inputs;
    let mut interval = time::interval(LOOK);
    interval.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
    // All accounts are looked up after this: they may have changed since the configuration was
    // read.
    let mut seen = stamps().await;
    let mut current = configured.clone();
    let mut follower = Follower::new(configured, find);
    loop {
        let mut is_new = false;
        tokio::select! {
            Some(configured) = anew.recv() => {
                follower.configured = configured;
                follower.take_accounts();
                follower.all_are_due();
                is_new = true;
            }
            Some(name) = attempted.recv() => {
                if let Some(followed) = follower.accounts.get_mut(&name) {
                    followed.due = None;
                }
            }
            Some(answer) = follower.look_ups.join_next() => {
                answer.into_iter().for_each(|answer| follower.take(answer));
            }
            _ = interval.tick() => {
                let now = stamps().await;
                if now != seen {
                    seen = now;
                    follower.all_are_due();
                }
                follower.look_up_due();
            }
        }
        // What has come at the same time is one change.
        while let Some(Ok(answer)) = follower.look_ups.try_join_next() {
            follower.take(answer);
        }
        let next = follower.config();
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
    use std::{
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

    use super::*;
    use crate::config::Identity;

    fn identity(account: &str, groups: &[u32]) -> Identity {
        let user = Some(ConfiguredAccount::Known(user(account, groups)));
        Identity { user, ..Identity::named(account.to_owned()) }
    }

    fn user(name: &str, groups: &[u32]) -> UnixUser {
        let uid = nix::unistd::geteuid().as_raw();
        UnixUser { name: name.into(), uid, gid: 7, groups: groups.into(), home: "/".into() }
    }

    struct Following {
        changes: mpsc::Receiver<Config>,
        attempts: mpsc::Sender<String>,
        anew: mpsc::Sender<Config>,
    }

    fn begin(find: Find, config: Config) -> Following {
        let (anew, read) = mpsc::channel(1);
        let (attempts, attempted) = mpsc::channel(1);
        let (changed, changes) = mpsc::channel(1);
        let inputs = Inputs { anew: read, attempted };
        tokio::spawn(follow_by(find, config, inputs, changed));
        Following { changes, attempts, anew }
    }

    fn config(identities: Vec<Identity>) -> Config {
        Config { identities, ..Config::new(Vec::new()) }
    }

    fn timed_out(name: &str, patience: Duration) -> Result<UnixUser, NoUser> {
        thread::sleep(patience);
        let source = io::ErrorKind::TimedOut.into();
        Err(NoUser::LookUp { name: name.to_owned(), program: "getent", source })
    }

    /// What runs as it would run as whoever gets its number next.
    #[test]
    fn an_account_of_the_configuration_that_is_gone_is_gone_for_all() {
        let mut config = config(vec![identity("ada", &[])]);
        config.confinement.user = Some(user("bob", &[]).into());
        let mut follower = Follower::new(config, |name, _| Ok(user(name, &[])));
        let files = "passwd: files";
        let gone = |name: &str| Err(NoUser::Unknown(name.to_owned()));
        for name in ["ada", "bob"] {
            let (name, nsswitch) = (name.to_owned(), files.to_owned());
            follower.take(LookUpAnswer { found: gone(&name), name, nsswitch });
        }
        let config = follower.config();
        let absent = |name: &str| Some(ConfiguredAccount::Absent(name.to_owned()));
        assert_eq!(config.identities[0].user, absent("ada"));
        assert_eq!(config.confinement.user, absent("bob"));
    }

    /// Several times as many hang as look-ups have slots.
    #[tokio::test]
    async fn accounts_whose_look_up_hangs_delay_no_others() {
        let find = |name: &str, patience: Duration| match name.starts_with("bob") {
            true => Ok(user(name, &[7, 9])),
            false => timed_out(name, patience),
        };
        let hanging = (0..3 * MOST_AT_ONCE).map(|number| identity(&format!("ada{number}"), &[7]));
        let others = (0..MOST_AT_ONCE).map(|number| identity(&format!("bob{number}"), &[7]));
        let all: Vec<_> = hanging.chain(others).collect();
        let mut expected = all.clone();
        for other in &mut expected[3 * MOST_AT_ONCE..] {
            other.user = Some(ConfiguredAccount::Known(user(&other.name, &[7, 9])));
        }
        let mut following = begin(find, config(all.clone()));
        let all_others =
            async { while following.changes.recv().await.unwrap().identities != expected {} };
        time::timeout(PATIENCE, all_others).await.unwrap();
        // At SIGHUP an account stands as it did, not as the configuration had it.
        following.anew.send(config(all.clone())).await.unwrap();
        let read_again = following.changes.recv().await.unwrap();
        assert_eq!(read_again.identities, expected);
    }

    #[tokio::test]
    async fn an_account_that_hangs_is_looked_up_again_soon_and_one_that_is_absent_at_an_attempt() {
        static HANGS: AtomicBool = AtomicBool::new(true);
        let find = |name: &str, patience: Duration| match HANGS.load(Ordering::Relaxed) {
            true => timed_out(name, patience.min(QUICK)),
            false => Ok(user(name, &[7, 9])),
        };
        let mut eve = identity("eve", &[]);
        eve.user = Some(ConfiguredAccount::Absent("eve".to_owned()));
        let mut following = begin(find, config(vec![identity("ada", &[7]), eve]));
        time::sleep(2 * LOOK).await;
        HANGS.store(false, Ordering::Relaxed);
        following.attempts.send("eve".to_owned()).await.unwrap();
        let is_known = |config: &Config| {
            let accounts = config.identities.iter().map(|it| it.user.clone().unwrap());
            let mut groups = accounts.filter_map(|it| it.known().map(|user| user.groups.clone()));
            groups.next() == Some(vec![7, 9]) && groups.next() == Some(vec![7, 9])
        };
        let all = async { while !is_known(&following.changes.recv().await.unwrap()) {} };
        time::timeout(Duration::from_secs(20), all).await.unwrap();
    }
}
