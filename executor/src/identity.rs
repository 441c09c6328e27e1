//! Accounts of this machine, under which commands run.
//!
//! Invariant: the look-up of an account has a deadline of its own and depends on no other's. A
//! look-up that hangs says nothing about the next: each account may be another service's.

use std::{
    collections::{BTreeSet, HashMap},
    io,
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use nix::libc::{gid_t, uid_t};

/// Search path of commands. A run's own PATH is the workstation's, which means nothing on this
/// machine.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// An account of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnixUser {
    /// The login name.
    pub name: String,
    /// Its number.
    pub uid: uid_t,
    /// The number of its first group.
    pub gid: gid_t,
    /// All its groups, the first one included.
    pub groups: Vec<gid_t>,
    /// Its home directory.
    pub home: PathBuf,
}

impl UnixUser {
    /// Returns true if it has root's rights.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.uid == 0
    }
}

/// Reason why commands can't run as an account.
#[derive(Debug, thiserror::Error)]
pub enum NoUser {
    /// The name is not known.
    #[error("this machine has no user `{0}`")]
    Unknown(String),
    /// This process can't take its rights.
    #[error(
        "commands can't run as `{0}`: only an executor that runs as root can run commands as \
         somebody else"
    )]
    NotOurs(String),
    /// The look-up failed.
    #[error("cannot look up user `{name}` by {program}: {source}")]
    LookUp {
        /// The account.
        name: String,
        /// Program that was asked.
        program: &'static str,
        /// The system's answer, or the program's.
        #[source]
        source: io::Error,
    },
}

impl NoUser {
    /// Returns true if the look-up has not ended in time.
    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self, Self::LookUp { source, .. } if source.kind() == io::ErrorKind::TimedOut)
    }
}

/// Account of an identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConfiguredAccount {
    /// As it was looked up.
    Known(UnixUser),
    /// Name of an account that is not known on this machine at present: nothing runs as it.
    Absent(String),
}

impl From<UnixUser> for ConfiguredAccount {
    fn from(user: UnixUser) -> Self {
        Self::Known(user)
    }
}

impl ConfiguredAccount {
    /// The account, if it is known.
    #[must_use]
    pub fn known(&self) -> Option<&UnixUser> {
        match self {
            Self::Known(user) => Some(user),
            Self::Absent(_) => None,
        }
    }

    /// Returns true if it is known to be root's.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.known().is_some_and(UnixUser::is_root)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Known(user) => &user.name,
            Self::Absent(name) => name,
        }
    }
}

/// Timeout of a look-up.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Look-ups at a time: those that hang leave slots for others.
pub(crate) const MOST_AT_ONCE: usize = 32;
/// First and longest pause between two looks for the program's end.
const LOOK: Duration = Duration::from_millis(1);
const LONGEST_LOOK: Duration = Duration::from_millis(50);
/// getent(1)'s status for a name that is not in the database.
const NOT_FOUND: i32 = 2;

impl UnixUser {
    /// Looks an account up, by getent(1) and id(1): a statically linked program can't load
    /// what nsswitch.conf names, and accounts need not stand in `/etc/passwd`. Ends after
    /// `patience`.
    ///
    /// # Errors
    /// [`NoUser`].
    pub fn find(name: &str, patience: Duration) -> Result<Self, NoUser> {
        let unknown = || NoUser::Unknown(name.to_owned());
        if name.is_empty() || name.starts_with('-') || name.contains([':', '\0']) {
            return Err(unknown());
        }
        let end = Instant::now() + patience;
        let line = ask(name, "getent", &["passwd", name], end)?;
        let groups = ask(name, "id", &["-G", name], end)?;
        let fields: Vec<&str> = line.trim_end().split(':').collect();
        let [found, _, uid, gid, _, home, _] = fields[..] else { return Err(unknown()) };
        // getent also finds an account by its number.
        if found != name {
            return Err(unknown());
        }
        Ok(Self {
            name: name.to_owned(),
            uid: uid.parse().map_err(|_| unknown())?,
            gid: gid.parse().map_err(|_| unknown())?,
            groups: groups
                .split_whitespace()
                .map(str::parse)
                .collect::<Result<_, _>>()
                .map_err(|_| unknown())?,
            home: home.into(),
        })
    }

    /// Looks one account up; see [`Self::find`].
    ///
    /// # Errors
    /// [`NoUser`].
    pub fn named(name: &str) -> Result<Self, NoUser> {
        Self::find(name, PATIENCE)
    }

    /// Looks accounts up, [`MOST_AT_ONCE`] at a time.
    pub(crate) fn all_named(names: BTreeSet<String>) -> HashMap<String, Result<Self, NoUser>> {
        let helpers = names.len().min(MOST_AT_ONCE).saturating_sub(1);
        let (left, found) = (Mutex::new(names.into_iter()), Mutex::new(HashMap::new()));
        let work = || {
            loop {
                let next = left.lock().expect("not poisoned").next();
                let Some(name) = next else { return };
                let user = Self::named(&name);
                found.lock().expect("not poisoned").insert(name, user);
            }
        };
        thread::scope(|scope| {
            for _ in 0..helpers {
                // Without a thread, this one does all.
                let _ = thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        found.into_inner().expect("not poisoned")
    }
}

fn ask(
    name: &str,
    program: &'static str,
    arguments: &[&str],
    end: Instant,
) -> Result<String, NoUser> {
    let failed = |source| NoUser::LookUp { name: name.to_owned(), program, source };
    let output = output_in_time(program, arguments, end).map_err(failed)?;
    match output.status.code() {
        Some(0) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        Some(NOT_FOUND) if program == "getent" => Err(NoUser::Unknown(name.to_owned())),
        _ => Err(failed(io::Error::other(output.status.to_string()))),
    }
}

/// Output of a program that ends in time. What it prints fits into a pipe, or it does not end.
fn output_in_time(program: &str, arguments: &[&str], end: Instant) -> io::Result<Output> {
    let mut child = Command::new(program)
        .args(arguments)
        .env_clear()
        .env("PATH", PATH)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut pause = LOOK;
    while child.try_wait()?.is_none() {
        if Instant::now() > end {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it does not answer"));
        }
        thread::sleep(pause);
        pause = (2 * pause).min(LONGEST_LOOK);
    }
    child.wait_with_output()
}

/// An account of this machine.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
pub struct ViewUser {
    /// The login name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its number.
    #[prost(uint32, tag = "2")]
    pub uid: u32,
    /// The number of its first group.
    #[prost(uint32, tag = "3")]
    pub gid: u32,
    /// All its groups, the first one included.
    #[prost(uint32, repeated, tag = "4")]
    pub groups: Vec<u32>,
    /// Its home directory, as this machine has it.
    #[prost(bytes = "vec", tag = "5")]
    pub home: Vec<u8>,
}

impl From<&UnixUser> for ViewUser {
    fn from(user: &UnixUser) -> Self {
        Self {
            name: user.name.clone(),
            uid: user.uid,
            gid: user.gid,
            groups: user.groups.clone(),
            home: std::os::unix::ffi::OsStrExt::as_bytes(user.home.as_os_str()).to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_end_is_ended_in_time() {
        let begun = Instant::now();
        let end = begun + Duration::from_millis(100);
        let error = ask("ada", "sleep", &["20"], end).unwrap_err();
        assert!(error.is_timeout() && begun.elapsed() < Duration::from_secs(10), "{error}");
    }

    #[test]
    fn many_accounts_are_looked_up() {
        let names = ["root", "nobody", "no-such-user-here"].map(str::to_owned);
        let found = UnixUser::all_named(names.into());
        assert_eq!(found["root"].as_ref().unwrap().uid, 0);
        assert!(found["nobody"].is_ok());
        assert!(matches!(&found["no-such-user-here"], Err(NoUser::Unknown(_))));
    }
}
