//! Who asks for a call, and what they may: the one place that every use of an
//! export, a command or a share of the machine goes through. How a connection
//! proves who it is, is the transport's matter.

use std::{
    collections::{BTreeSet, HashMap},
    io,
    path::PathBuf,
    process::{Command, Stdio},
    sync::Arc,
};

use nix::libc::{gid_t, uid_t};
use posh_proto::executor::rejected::Kind;
use tonic::{Request, Status};

use crate::{
    Config, Export,
    config::{Identity, Limits, Unserved},
    error::Refusal,
    runner::wire::ViewUser,
    tools::PATH,
};

/// What the log calls a caller that no identity is configured for.
const NOBODY_IN_PARTICULAR: &str = "-";

/// Who asks, and what they may.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The `[[identity]]` of `executor.toml`; `None` for plain text, and for the one
    /// connection of an executor that ssh has started.
    pub identity: Option<String>,
    /// Whose rights the commands have; `None`: the executor's own.
    pub user: Option<UnixUser>,
    /// Volumes act with the ids that the workstation claims, rather than the user's.
    pub trust_caller_ids: bool,
    /// The directories that may be used, read-only where this caller may not write.
    pub exports: Vec<Export>,
    /// Those that it might use, if they could be served.
    pub unserved: Vec<Unserved>,
    /// It may have its exports as volumes, besides running commands on them.
    pub volumes: bool,
    /// The commands that may be run; `None`: those that the executor lets anybody run.
    pub commands: Option<BTreeSet<String>>,
    /// How much of the machine may be used at a time.
    pub limits: Limits,
}

/// All who may come.
#[derive(Debug)]
pub struct Callers {
    /// Who asks on a connection that needs no proof.
    pub anybody: Arc<Caller>,
    identities: HashMap<String, Arc<Caller>>,
}

impl Callers {
    /// As the configuration has them.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let identities = config.identities.iter();
        let identities = identities
            .map(|identity| (identity.name.clone(), Arc::new(Caller::of(identity, config))));
        Self { anybody: Arc::new(Caller::anybody(config)), identities: identities.collect() }
    }

    /// One identity.
    #[must_use]
    pub fn identity(&self, name: &str) -> Option<Arc<Caller>> {
        self.identities.get(name).cloned()
    }

    /// How many identities there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.identities.len()
    }

    /// Whether there are several to be fair to.
    #[must_use]
    pub fn are_several(&self) -> bool {
        self.identities.len() > 1
    }
}

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
    /// Whether it has root's rights.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.uid == 0
    }
}

/// Why there is no such account to run commands as.
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
        /// What could not be run.
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
        // Asked for a number, getent finds the account that has it.
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

/// What a program says of an account.
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

impl Caller {
    /// The name of a run of this caller's: nobody finds another one's by its id.
    pub fn run_name(&self, run_id: &str) -> String {
        format!("{}\0{run_id}", self.identity.as_deref().unwrap_or_default())
    }

    /// Whoever reaches an executor that asks for no proof: all that it serves, as its own user
    /// or the one that is configured.
    #[must_use]
    pub fn anybody(config: &Config) -> Self {
        Self {
            identity: None,
            user: config.confinement.user.clone(),
            trust_caller_ids: config.confinement.trust_caller_ids,
            exports: config.exports.clone(),
            unserved: config.unserved.clone(),
            volumes: config.volumes,
            commands: None,
            limits: Limits::default(),
        }
    }

    /// A configured identity.
    fn of(identity: &Identity, config: &Config) -> Self {
        let may_use =
            |export: &str| identity.exports.as_ref().is_none_or(|names| names.contains(export));
        let exports = config.exports.iter().filter(|export| may_use(&export.name));
        let exports = exports.map(|export| Export {
            read_only: export.read_only || identity.read_only,
            ..export.clone()
        });
        Self {
            identity: Some(identity.name.clone()),
            user: identity.user.as_ref().or(config.confinement.user.as_ref()).cloned(),
            trust_caller_ids: identity.trusts_caller_ids(&config.confinement),
            exports: exports.collect(),
            unserved: config
                .unserved
                .iter()
                .filter(|unserved| may_use(&unserved.name))
                .cloned()
                .collect(),
            volumes: config.volumes && identity.volumes,
            commands: identity.commands.clone(),
            limits: identity.limits,
        }
    }

    /// What the log calls it.
    #[must_use]
    pub fn name(&self) -> &str {
        self.identity.as_deref().unwrap_or(NOBODY_IN_PARTICULAR)
    }

    /// Why it can't use that export just now, although it may.
    #[must_use]
    pub fn why_unserved(&self, export: &str) -> Option<String> {
        let Unserved { fault, .. } =
            self.unserved.iter().find(|unserved| unserved.name == export)?;
        let hint = "the executor's log says more to its administrator";
        Some(format!(
            "this executor does not serve the export `{export}` just now: {fault}; {hint}"
        ))
    }

    /// Whether it may run `program`, as far as its own list says.
    #[must_use]
    pub fn may_run(&self, program: &str) -> bool {
        self.commands.as_ref().is_none_or(|commands| commands.contains(program))
    }

    /// Refuses a command that is not on its list.
    pub(crate) fn require_command(&self, program: &str) -> Result<(), Refusal> {
        if self.may_run(program) {
            return Ok(());
        }
        let message = format!(
            "{} may not run {program} on this executor (`commands` of its [[identity]])",
            self.name()
        );
        Err(Refusal::new(Kind::MissingTool, message))
    }
}

/// Who made a request, as whoever let the request in has found out.
pub(crate) fn caller_of<T>(request: &Request<T>) -> Result<Arc<Caller>, Status> {
    // The service is never reached without: to be sure, that is nobody.
    request
        .extensions()
        .get()
        .cloned()
        .ok_or_else(|| Status::unauthenticated("nobody has vouched for this call"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_are_looked_up() {
        let root = UnixUser::named("root").unwrap();
        assert_eq!((root.uid, root.gid, root.groups.contains(&0)), (0, 0, true));
        assert!(matches!(UnixUser::named("no-such-user-here"), Err(NoUser::Unknown(_))));
    }

    #[test]
    fn a_list_of_commands_is_the_whole_list() {
        let mut caller = Caller::anybody(&Config::new(Vec::new()));
        assert!(caller.may_run("cat"));
        caller.commands = Some(BTreeSet::from(["cat".to_owned()]));
        assert!(caller.require_command("cat").is_ok());
        assert_eq!(caller.require_command("sh").unwrap_err().kind, Kind::MissingTool);
    }
}
