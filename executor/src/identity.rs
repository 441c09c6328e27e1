//! Accounts of this machine, under which commands run.

use std::{
    io,
    path::PathBuf,
    process::{Command, Output, Stdio},
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

/// Timeout of a look-up.
const PATIENCE: Duration = Duration::from_secs(5);
/// Interval at which the program's end is looked for.
const LOOK: Duration = Duration::from_millis(5);
/// getent(1)'s status for a name that is not in the database.
const NOT_FOUND: i32 = 2;

/// Looks accounts up, one after the other.
#[derive(Debug, Default)]
pub struct AccountLookup {
    /// A look-up has not ended in time: the next would not either.
    hangs: bool,
}

impl AccountLookup {
    /// Looks an account up, by getent(1) and id(1): a statically linked program can't load
    /// what nsswitch.conf names, and accounts need not stand in `/etc/passwd`.
    ///
    /// # Errors
    /// [`NoUser`]; after a timeout at once.
    pub fn find(&mut self, name: &str) -> Result<UnixUser, NoUser> {
        let unknown = || NoUser::Unknown(name.to_owned());
        if name.is_empty() || name.starts_with('-') || name.contains([':', '\0']) {
            return Err(unknown());
        }
        let line = self.ask(name, "getent", &["passwd", name])?;
        let groups = self.ask(name, "id", &["-G", name])?;
        let fields: Vec<&str> = line.trim_end().split(':').collect();
        let [found, _, uid, gid, _, home, _] = fields[..] else { return Err(unknown()) };
        // getent also finds an account by its number.
        if found != name {
            return Err(unknown());
        }
        Ok(UnixUser {
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

    fn ask(
        &mut self,
        name: &str,
        program: &'static str,
        arguments: &[&str],
    ) -> Result<String, NoUser> {
        let failed = |source| NoUser::LookUp { name: name.to_owned(), program, source };
        if self.hangs {
            return Err(failed(io::ErrorKind::TimedOut.into()));
        }
        let output = output_in_time(program, arguments).map_err(|error| {
            self.hangs |= error.kind() == io::ErrorKind::TimedOut;
            failed(error)
        })?;
        match output.status.code() {
            Some(0) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            Some(NOT_FOUND) if program == "getent" => Err(NoUser::Unknown(name.to_owned())),
            _ => Err(failed(io::Error::other(output.status.to_string()))),
        }
    }
}

/// Output of a program that ends in time. What it prints fits into a pipe, or it does not end.
fn output_in_time(program: &str, arguments: &[&str]) -> io::Result<Output> {
    let mut child = Command::new(program)
        .args(arguments)
        .env_clear()
        .env("PATH", PATH)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let end = Instant::now() + PATIENCE;
    while child.try_wait()?.is_none() {
        if Instant::now() > end {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it does not answer"));
        }
        thread::sleep(LOOK);
    }
    child.wait_with_output()
}

impl UnixUser {
    /// Looks one account up; see [`AccountLookup::find`].
    ///
    /// # Errors
    /// [`NoUser`].
    pub fn named(name: &str) -> Result<Self, NoUser> {
        AccountLookup::default().find(name)
    }
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
