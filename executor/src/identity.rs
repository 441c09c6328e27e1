//! Accounts of this machine, under which commands run.

use std::{
    io,
    path::PathBuf,
    process::{Command, Stdio},
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
    /// The look-up failed.
    #[error("cannot run {program} to look up user `{name}`")]
    LookUp {
        /// The account.
        name: String,
        /// Program that could not be run.
        program: &'static str,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}

impl UnixUser {
    /// Looks an account up, by getent(1) and id(1): a statically linked program can't load
    /// what nsswitch.conf names, and accounts need not stand in `/etc/passwd`.
    ///
    /// # Errors
    /// [`NoUser`].
    pub fn named(name: &str) -> Result<Self, NoUser> {
        let unknown = || NoUser::Unknown(name.to_owned());
        if name.is_empty() || name.starts_with('-') || name.contains([':', '\0']) {
            return Err(unknown());
        }
        let line = said(name, "getent", &["passwd", name])?;
        let groups = said(name, "id", &["-G", name])?;
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
}

/// Output of a program about an account.
fn said(name: &str, program: &'static str, arguments: &[&str]) -> Result<String, NoUser> {
    let output = Command::new(program)
        .args(arguments)
        .env_clear()
        .env("PATH", PATH)
        .stdin(Stdio::null())
        .output();
    let output =
        output.map_err(|source| NoUser::LookUp { name: name.to_owned(), program, source })?;
    if !output.status.success() {
        return Err(NoUser::Unknown(name.to_owned()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
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
