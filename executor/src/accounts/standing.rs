//! The rule by which answers about an account count.
//!
//! Invariant: an answer that takes nothing away counts at once. One that takes the account, its
//! number or a group away counts at once if only files of this machine have said so; else after
//! [`DOUBT`] in which no answer has said otherwise. A failed look-up changes nothing. Whatever may
//! come back is awaited.

use std::time::{Duration, Instant};

use crate::identity::{ConfiguredAccount, NoUser, UnixUser};

/// Services of nsswitch.conf(5) that answer from files of this machine: what they do not know is
/// not there.
const CERTAIN_SERVICES: [&str; 6] = ["files", "compat", "db", "systemd", "altfiles", "extrausers"];
/// Databases of nsswitch.conf(5) that tell of accounts, and of their groups.
const OF_ACCOUNTS: [&str; 2] = ["passwd", "passwd_compat"];
const OF_GROUPS: [&str; 3] = ["group", "group_compat", "initgroups"];

/// Time for which a directory service has to say that an account or a group is gone. Where it is
/// away for a moment, it says so of all.
const DOUBT: Duration = Duration::from_secs(10);
/// Time for which what a directory service has taken away is looked up again soon: it may have
/// been away for longer.
const AWAITED_FOR: Duration = Duration::from_secs(3600);

/// Rights of an account, by the answers so far.
#[derive(Debug)]
pub(super) struct Standing {
    /// The account as it was when it was known; `None` if it never was.
    user: Option<UnixUser>,
    /// Nothing runs as it.
    is_gone: bool,
    /// Time since which answers have taken something away and do not count yet.
    doubted: Option<Instant>,
    /// Time of the last loss that a directory service has brought about.
    lost: Option<Instant>,
    /// The last look-up has failed.
    has_failed: bool,
}

impl Standing {
    pub(super) fn new(account: &ConfiguredAccount) -> Self {
        let user = account.known().cloned();
        let is_gone = user.is_none();
        let lost = is_gone.then(Instant::now);
        Self { user, is_gone, doubted: None, lost, has_failed: false }
    }

    /// The account, by its name.
    pub(super) fn account(&self, name: &str) -> ConfiguredAccount {
        match &self.user {
            Some(user) if !self.is_gone => ConfiguredAccount::Known(user.clone()),
            _ => ConfiguredAccount::Absent(name.to_owned()),
        }
    }

    /// Returns true if it is to be looked up again soon.
    pub(super) fn is_awaited(&self, now: Instant) -> bool {
        let is_recent = |lost: Instant| now.saturating_duration_since(lost) < AWAITED_FOR;
        self.has_failed || self.doubted.is_some() || self.lost.is_some_and(is_recent)
    }

    /// Takes an answer, and the text of nsswitch.conf(5) at that time.
    pub(super) fn take(
        &mut self,
        name: &str,
        answer: Result<UnixUser, NoUser>,
        nsswitch: &str,
        now: Instant,
    ) {
        let found = match answer {
            Ok(user) => Some(user),
            Err(NoUser::Unknown(_)) => None,
            Err(error) => {
                if !self.has_failed {
                    tracing::error!("`{name}` stays as it was, and is looked up again: {error}");
                }
                self.has_failed = true;
                return;
            }
        };
        self.has_failed = false;
        let loss = Loss::between(self.user.as_ref().filter(|_| !self.is_gone), found.as_ref());
        if loss.is_any() && !loss.is_certain(nsswitch) {
            let since = *self.doubted.get_or_insert_with(|| {
                tracing::warn!("`{name}` has lost something just now, and is looked up again");
                now
            });
            if now.saturating_duration_since(since) < DOUBT {
                return;
            }
            self.lost = Some(now);
        }
        self.doubted = None;
        if found.is_none() != self.is_gone {
            match found {
                Some(_) => tracing::info!("`{name}` is known: its identities are let in"),
                None => tracing::error!(
                    "identities of `{name}` are not let in any more: this machine has no such user"
                ),
            }
        }
        self.is_gone = found.is_none();
        self.user = found.or(self.user.take());
    }
}

/// Rights that an account has no more.
struct Loss {
    /// The account itself, or its number or first group is another.
    account: bool,
    /// A group.
    group: bool,
}

impl Loss {
    /// Without `before`, there is nothing to lose.
    fn between(before: Option<&UnixUser>, now: Option<&UnixUser>) -> Self {
        let Some(before) = before else { return Self { account: false, group: false } };
        let Some(now) = now else { return Self { account: true, group: false } };
        Self {
            account: (before.uid, before.gid) != (now.uid, now.gid),
            group: before.groups.iter().any(|group| !now.groups.contains(group)),
        }
    }

    fn is_any(&self) -> bool {
        self.account || self.group
    }

    /// Returns true if files of this machine alone have said so.
    fn is_certain(&self, nsswitch: &str) -> bool {
        (!self.account || are_certain(&OF_ACCOUNTS, nsswitch))
            && (!self.group || are_certain(&OF_GROUPS, nsswitch))
    }
}

/// Returns true if all of these databases are files of this machine.
fn are_certain(databases: &[&str], nsswitch: &str) -> bool {
    nsswitch.lines().all(|line| {
        let text = line.split('#').next().unwrap_or_default().trim_start();
        // For the C library white space ends the name, too, and the colon may come later.
        let is_colon_or_space = |character: char| character == ':' || character.is_whitespace();
        let (name, services) = text.split_once(is_colon_or_space).unwrap_or_default();
        // An action in brackets, [NOTFOUND=return], is none.
        let mut services = services
            .split(is_colon_or_space)
            .filter(|word| !word.is_empty() && !word.starts_with('['));
        !databases.contains(&name) || services.all(|word| CERTAIN_SERVICES.contains(&word))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: &str = "passwd: files\ngroup: files\n";
    const DIRECTORY: &str = "passwd: files sss\ngroup: files sss\n";
    /// The last of these is the directory service's.
    const GROUPS: [u32; 3] = [7, 8, 9];

    fn user(groups: &[u32]) -> UnixUser {
        let (name, home) = ("ada".to_owned(), "/".into());
        UnixUser { name, uid: 1, gid: 7, groups: groups.into(), home }
    }

    fn standing() -> Standing {
        Standing::new(&ConfiguredAccount::Known(user(&GROUPS)))
    }

    fn unknown() -> Result<UnixUser, NoUser> {
        Err(NoUser::Unknown("ada".to_owned()))
    }

    fn failed() -> Result<UnixUser, NoUser> {
        let source = std::io::ErrorKind::TimedOut.into();
        Err(NoUser::LookUp { name: "ada".to_owned(), program: "getent", source })
    }

    /// Answers that take something away.
    fn losses() -> Vec<fn() -> Result<UnixUser, NoUser>> {
        vec![
            unknown,
            || Ok(user(&GROUPS[..2])),
            || Ok(UnixUser { uid: 2, ..user(&GROUPS) }),
            || Ok(UnixUser { gid: 8, ..user(&GROUPS) }),
        ]
    }

    fn account_of(answer: Result<UnixUser, NoUser>) -> ConfiguredAccount {
        answer
            .map_or_else(|_| ConfiguredAccount::Absent("ada".to_owned()), ConfiguredAccount::Known)
    }

    #[test]
    fn a_loss_counts_at_once_by_files_and_after_ten_seconds_by_a_directory_service() {
        for loss in losses() {
            let (mut standing, now) = (standing(), Instant::now());
            standing.take("ada", loss(), FILES, now);
            assert_eq!(standing.account("ada"), account_of(loss()));
            assert!(!standing.is_awaited(now));
        }
        for loss in losses() {
            let (mut standing, now) = (standing(), Instant::now());
            for seconds in [0, 2, 9] {
                let later = now + Duration::from_secs(seconds);
                standing.take("ada", loss(), DIRECTORY, later);
                assert_eq!(standing.account("ada"), ConfiguredAccount::Known(user(&GROUPS)));
                assert!(standing.is_awaited(later));
            }
            standing.take("ada", loss(), DIRECTORY, now + DOUBT);
            assert_eq!(standing.account("ada"), account_of(loss()));
            // It may have been away for longer.
            assert!(standing.is_awaited(now + AWAITED_FOR));
            assert!(!standing.is_awaited(now + AWAITED_FOR + 2 * DOUBT));
            standing.take("ada", Ok(user(&GROUPS)), DIRECTORY, now + DOUBT);
        }
    }

    #[test]
    fn what_comes_back_in_time_was_never_lost_and_each_loss_has_its_own_time() {
        let (mut standing, now) = (standing(), Instant::now());
        standing.take("ada", Ok(user(&GROUPS[..2])), DIRECTORY, now);
        standing.take("ada", Ok(user(&GROUPS)), DIRECTORY, now + DOUBT);
        assert!(!standing.is_awaited(now + DOUBT));
        standing.take("ada", unknown(), DIRECTORY, now + 2 * DOUBT);
        assert_eq!(standing.account("ada"), ConfiguredAccount::Known(user(&GROUPS)));
        // What is more counts at once, and what comes after a loss.
        let more = [7, 8, 9, 10];
        standing.take("ada", Ok(user(&more)), DIRECTORY, now + 2 * DOUBT);
        assert_eq!(standing.account("ada"), ConfiguredAccount::Known(user(&more)));
    }

    #[test]
    fn a_failed_look_up_changes_nothing_and_brings_nothing_back() {
        let (mut standing, now) = (standing(), Instant::now());
        standing.take("ada", failed(), FILES, now);
        assert_eq!(standing.account("ada"), ConfiguredAccount::Known(user(&GROUPS)));
        assert!(standing.is_awaited(now + 2 * AWAITED_FOR));
        standing.take("ada", unknown(), FILES, now);
        standing.take("ada", failed(), FILES, now);
        assert_eq!(standing.account("ada"), account_of(unknown()));
    }

    #[test]
    fn only_files_of_this_machine_are_certain() {
        for (text, accounts, groups) in [
            ("", true, true),
            ("group: files ldap\n", true, false),
            ("group: files\ninitgroups: files [NOTFOUND=continue] sss", true, false),
            ("passwd: files systemd # ldap\n", true, true),
            ("passwd:\tfiles [NOTFOUND=return] db", true, true),
            ("passwd: files sss\n", false, true),
            ("passwd:sss\n", false, true),
            ("passwd : files sss\n group\t:sss", false, false),
            ("passwd files sss\n#group: sss", false, true),
            ("passwdx: sss\ngroup : files", true, true),
            ("passwd: ldap\nshadow: files", false, true),
            ("passwd: compat\npasswd_compat: nis\ngroup: compat\ngroup_compat: nis", false, false),
        ] {
            let certain = [are_certain(&OF_ACCOUNTS, text), are_certain(&OF_GROUPS, text)];
            assert_eq!(certain, [accounts, groups], "{text:?}");
        }
    }
}
