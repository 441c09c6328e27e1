//! Identity of a caller and its rights: every use of an export, a command or a share of the machine
//! is checked against them. The transport decides how a connection proves its identity.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use posh_proto::executor::rejected::Kind;
use tonic::{Request, Status};

use crate::{
    Config, Export,
    config::{Identity, Limits, Unserved},
    error::Refusal,
    identity::{ConfiguredAccount, UnixUser},
};

/// Log name of a caller without a configured identity.
const NOBODY_IN_PARTICULAR: &str = "-";

/// A caller and its rights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The `[[identity]]` of `executor.toml`; `None` for plain text, and for the one
    /// connection of an executor that ssh has started.
    pub identity: Option<String>,
    /// Account that commands run as; `None`: the executor's own.
    pub user: Option<UnixUser>,
    /// Volumes act with the ids that the workstation claims, rather than the user's.
    pub trust_caller_ids: bool,
    /// The directories that may be used, read-only where this caller may not write.
    pub exports: Vec<Export>,
    /// Exports that it might use, if they could be served.
    pub unserved: Vec<Unserved>,
    /// It may have its exports as volumes, besides running commands on them.
    pub volumes: bool,
    /// The commands that may be run; `None`: those of the executor's own list.
    pub commands: Option<BTreeSet<String>>,
    /// Shares of the machine.
    pub limits: Limits,
}

/// Name of an account that this machine does not know at present: nothing runs as it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no account is named `{0}` at present")]
pub struct AbsentAccount(pub String);

/// All configured callers.
#[derive(Debug)]
pub struct Callers {
    /// Caller on a connection that needs no proof.
    pub anybody: Result<Arc<Caller>, AbsentAccount>,
    identities: HashMap<String, Arc<Caller>>,
    /// Accounts of identities that are configured and can't be let in, by the identity's name.
    absent: HashMap<String, String>,
}

impl Callers {
    /// From the configuration.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let mut callers = Self {
            anybody: match &config.confinement.user {
                Some(ConfiguredAccount::Absent(account)) => Err(AbsentAccount(account.clone())),
                _ => Ok(Arc::new(Caller::anybody(config))),
            },
            identities: HashMap::new(),
            absent: HashMap::new(),
        };
        for identity in &config.identities {
            let name = identity.name.clone();
            let user = match identity.user.as_ref().or(config.confinement.user.as_ref()) {
                Some(ConfiguredAccount::Absent(account)) => {
                    callers.absent.insert(name, account.clone());
                    continue;
                }
                Some(ConfiguredAccount::Known(user)) => Some(user),
                None => None,
            };
            let caller = Caller::of(identity, user.cloned(), config);
            callers.identities.insert(name, Arc::new(caller));
        }
        callers
    }

    /// Looks up an identity.
    #[must_use]
    pub fn identity(&self, name: &str) -> Option<Arc<Caller>> {
        self.identities.get(name).cloned()
    }

    /// Account of a configured identity that can't be let in, since this machine does not know the
    /// account at present.
    #[must_use]
    pub fn absent_account(&self, identity: &str) -> Option<&str> {
        self.absent.get(identity).map(String::as_str)
    }

    /// Number of identities that are let in.
    #[must_use]
    pub fn count(&self) -> usize {
        self.identities.len()
    }

    /// Returns true if several identities share the machine.
    #[must_use]
    pub fn are_several(&self) -> bool {
        self.identities.len() > 1
    }
}

impl Caller {
    /// Key of a run. It includes the identity, so that no caller finds another's run by its id.
    pub fn run_name(&self, run_id: &str) -> String {
        format!("{}\0{run_id}", self.identity.as_deref().unwrap_or_default())
    }

    /// Caller of an executor that asks for no proof: may use all that it serves, as its own user or
    /// the configured one.
    ///
    /// # Panics
    /// The configured account is absent.
    #[must_use]
    pub fn anybody(config: &Config) -> Self {
        let account = config.confinement.user.as_ref();
        let user = account.map(|account| account.known().expect("a known account").clone());
        Self {
            identity: None,
            // The account may have another number since this was checked. Without one, this process
            // has the rights that ssh's login has.
            trust_caller_ids: config.confinement.trust_caller_ids
                && user.as_ref().is_none_or(UnixUser::is_root),
            user,
            exports: config.exports.clone(),
            unserved: config.unserved.clone(),
            volumes: config.volumes,
            commands: None,
            limits: Limits::default(),
        }
    }

    /// A configured identity, and the account that its commands run as.
    fn of(identity: &Identity, user: Option<UnixUser>, config: &Config) -> Self {
        let may_use =
            |export: &str| identity.exports.as_ref().is_none_or(|names| names.contains(export));
        let exports = config.exports.iter().filter(|export| may_use(&export.name));
        let exports = exports.map(|export| Export {
            read_only: export.read_only || identity.read_only,
            ..export.clone()
        });
        Self {
            identity: Some(identity.name.clone()),
            // The account may have become known, or have another number, since this was checked.
            trust_caller_ids: identity.trusts_caller_ids(&config.confinement)
                && user.as_ref().is_some_and(UnixUser::is_root),
            user,
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

    /// Name in the log.
    #[must_use]
    pub fn name(&self) -> &str {
        self.identity.as_deref().unwrap_or(NOBODY_IN_PARTICULAR)
    }

    /// Reason why an export that it may use is not served now.
    #[must_use]
    pub fn why_unserved(&self, export: &str) -> Option<String> {
        let Unserved { fault, .. } =
            self.unserved.iter().find(|unserved| unserved.name == export)?;
        let hint = "the executor's log says more to its administrator";
        Some(format!(
            "this executor does not serve the export `{export}` just now: {fault}; {hint}"
        ))
    }

    /// Returns true if its own list allows `program`.
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

/// Caller of a request, as admission has determined it.
pub(crate) fn caller_of<T>(request: &Request<T>) -> Result<Arc<Caller>, Status> {
    // Requests never reach the service without a caller; refuse if one does.
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
        assert!(matches!(
            UnixUser::named("no-such-user-here"),
            Err(crate::identity::NoUser::Unknown(_))
        ));
    }

    /// On root's volume over ssh, each user of the workstation makes files of their own.
    #[test]
    fn a_login_of_root_is_trusted_with_the_ids_of_others() {
        let mut config = Config::for_stdio(Vec::new(), false);
        let is_root = nix::unistd::geteuid().is_root();
        assert_eq!(Caller::anybody(&config).trust_caller_ids, is_root);
        config.confinement.trust_caller_ids = true;
        assert!(Caller::anybody(&config).trust_caller_ids);
        let user = UnixUser { uid: 1, ..UnixUser::named("root").unwrap() };
        config.confinement.user = Some(user.into());
        assert!(!Caller::anybody(&config).trust_caller_ids);
    }

    /// Not as the executor's own user, nor by the account's former number.
    #[test]
    fn nobody_is_let_in_as_an_account_that_is_gone() {
        let mut config = Config::new(Vec::new());
        config.identities = vec![Identity::named("ada".to_owned())];
        config.confinement.user = Some(ConfiguredAccount::Absent("bob".to_owned()));
        let callers = Callers::new(&config);
        assert_eq!(callers.anybody, Err(AbsentAccount("bob".to_owned())));
        assert_eq!((callers.count(), callers.absent_account("ada")), (0, Some("bob")));
        config.confinement.user = UnixUser::named("root").ok().map(Into::into);
        let callers = Callers::new(&config);
        assert!(callers.anybody.is_ok() && callers.identity("ada").is_some());
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
