//! `[tls]`, `[[identity]]` and `[limits]` of `executor.toml`: identities and their limits.

use std::{
    collections::{BTreeSet, HashSet},
    ops::Range,
    path::PathBuf,
};

use nix::unistd::geteuid;
use toml::de::DeTable;

use super::tls::TlsConfig;
use super::{
    Bounds, Config, ConfigReader, Confinement, Limits, SpannedValue, confinement::TRUST_NEEDS_ROOT,
    user_to_become,
};
use crate::identity::{ConfiguredAccount, UnixUser};

/// One `[[identity]]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Name given to `posh-executor enroll`.
    pub name: String,
    /// Account that its commands run as; that of `[confinement]` when `None`.
    pub user: Option<ConfiguredAccount>,
    /// Its volumes act with the ids that its workstation claims; only with root as the user. As
    /// `[confinement]` has it when `None`, if that names the user.
    pub trust_caller_ids: Option<bool>,
    /// Names of exports; all when `None`.
    pub exports: Option<BTreeSet<String>>,
    /// It may not write, whatever the exports say.
    pub read_only: bool,
    /// It may have its exports as volumes.
    pub volumes: bool,
    /// Its commands; the executor's own list when `None`.
    pub commands: Option<BTreeSet<String>>,
    /// Its shares of the machine.
    pub limits: Limits,
}

impl Identity {
    /// An identity without keys of its own.
    #[must_use]
    pub fn named(name: String) -> Self {
        Self {
            name,
            user: None,
            trust_caller_ids: None,
            exports: None,
            read_only: false,
            volumes: true,
            commands: None,
            limits: Limits::default(),
        }
    }

    /// Returns true if its volumes act with the ids that its workstation claims.
    pub(crate) fn trusts_caller_ids(&self, confinement: &Confinement) -> bool {
        self.trust_caller_ids.unwrap_or(self.user.is_none() && confinement.trust_caller_ids)
    }
}

/// An identity as read, with its place and those of its exports.
pub(super) struct Read {
    identity: Identity,
    at: Range<usize>,
    /// It has no `user`, not even a wrong one.
    lacks_user: bool,
    exports: Vec<(String, Range<usize>)>,
}

const KNOWN: &str = "name, user, trust_caller_ids, exports, read_only, volumes, commands, \
                     max_runs, max_processes, max_buffered_mb, max_connections, \
                     max_calls_per_second, max_memory_mb";

/// Consequence of an account that can't be looked up when a configuration is read again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MissingAccount {
    IsMistake,
    /// The identity is not let in until the account is known.
    IsAwaited,
}

impl ConfigReader<'_> {
    /// `[tls]`.
    pub(super) fn tls(&mut self, value: &SpannedValue<'_>) -> Option<TlsConfig> {
        let Some(table) = value.get_ref().as_table() else {
            self.mistake(value.span(), "`tls` must be written as [tls]");
            return None;
        };
        let mut directory = None;
        for (key, value) in table {
            match key.get_ref().as_ref() {
                "dir" => {
                    directory =
                        self.string("dir", value).map(|text| (PathBuf::from(text), value.span()))
                }
                other => {
                    self.mistake(key.span(), format!("unknown key `{other}` of [tls] (known: dir)"))
                }
            }
        }
        let (directory, at) =
            directory.unwrap_or_else(|| (super::tls::DEFAULT_DIRECTORY.into(), value.span()));
        if !directory.is_absolute() {
            self.mistake(
                at,
                format!("`dir` of [tls] must be absolute, not `{}`", directory.display()),
            );
        }
        Some(TlsConfig { directory })
    }

    /// All `[[identity]]`.
    pub(super) fn identities(&mut self, value: &SpannedValue<'_>) -> Vec<Read> {
        let Some(tables) = value.get_ref().as_array() else {
            self.mistake(value.span(), "`identity` must be written as [[identity]]");
            return Vec::new();
        };
        let mut names = HashSet::new();
        let mut found = Vec::new();
        for entry in tables {
            match entry.get_ref().as_table() {
                Some(table) => found.extend(self.identity(entry.span(), table, &mut names)),
                None => self.mistake(entry.span(), "`identity` must be written as [[identity]]"),
            }
        }
        found
    }

    fn identity(
        &mut self,
        at: Range<usize>,
        table: &DeTable<'_>,
        names: &mut HashSet<String>,
    ) -> Option<Read> {
        let mut identity = Identity::named(String::new());
        let mut exports = Vec::new();
        for (key, value) in table {
            match key.get_ref().as_ref() {
                "name" => identity.name = self.identity_name(value, names).unwrap_or_default(),
                "user" => identity.user = self.user(value, MissingAccount::IsAwaited),
                "trust_caller_ids" => {
                    identity.trust_caller_ids = Some(self.boolean("trust_caller_ids", value));
                }
                "exports" => {
                    exports = self.strings("exports", value);
                    identity.exports = Some(exports.iter().map(|(name, _)| name.clone()).collect());
                }
                "read_only" => identity.read_only = self.boolean("read_only", value),
                "volumes" => identity.volumes = self.boolean("volumes", value),
                "commands" => {
                    let commands = self.strings("commands", value);
                    if let Some((_, at)) = commands.iter().find(|(name, _)| name == "*") {
                        let known = "an identity without `commands` has those of [confinement]";
                        self.mistake(at.clone(), format!("`*` is no command; {known}"));
                    }
                    identity.commands = Some(commands.into_iter().map(|(name, _)| name).collect());
                }
                other if self.limit(other, value, &mut identity.limits) => {}
                other => {
                    self.mistake(
                        key.span(),
                        format!("unknown key `{other}` of [[identity]] (known: {KNOWN})"),
                    );
                }
            }
        }
        if !table.contains_key("name") {
            self.mistake(at.clone(), "this [[identity]] has no `name`");
        }
        let lacks_user = !table.contains_key("user");
        Some(Read { identity, at, lacks_user, exports })
    }

    fn identity_name(
        &mut self,
        value: &SpannedValue<'_>,
        names: &mut HashSet<String>,
    ) -> Option<String> {
        let name = self.string("name", value)?;
        if let Err(why) = check_identity(&name) {
            self.mistake(value.span(), why.to_string());
        } else if !names.insert(name.clone()) {
            self.mistake(value.span(), format!("identity `{name}` is named twice"));
        }
        Some(name)
    }

    pub(super) fn user(
        &mut self,
        value: &SpannedValue<'_>,
        missing: MissingAccount,
    ) -> Option<ConfiguredAccount> {
        let name = self.string("user", value)?;
        if let Some(known) = self.before.and_then(|before| before.account(&name)) {
            return Some(ConfiguredAccount::Known(known.clone()));
        }
        let error = match self.accounts.get(&name)? {
            Ok(user) => match user_to_become(user.clone()) {
                Ok(user) => return Some(ConfiguredAccount::Known(user)),
                Err(error) => error.to_string(),
            },
            Err(error) if self.before.is_some() && missing == MissingAccount::IsAwaited => {
                tracing::error!("an identity is not let in until its account is known: {error}");
                return Some(ConfiguredAccount::Absent(name));
            }
            Err(error) => error.to_string(),
        };
        self.mistake(value.span(), error);
        None
    }

    /// Reads `key` if it is a limit of an identity, and returns true then.
    fn limit(&mut self, key: &str, value: &SpannedValue<'_>, limits: &mut Limits) -> bool {
        let number = |reader: &mut Self| reader.positive(key, value);
        match key {
            "max_runs" => limits.runs = number(self),
            "max_processes" => limits.processes = self.processes(key, value),
            "max_buffered_mb" => limits.buffered_bytes = number(self).map(|mb| mb << 20),
            "max_connections" => limits.connections = number(self),
            "max_calls_per_second" => {
                limits.calls_per_second = number(self).and_then(|rate| rate.try_into().ok())
            }
            "max_memory_mb" => limits.memory_bytes = number(self).map(|mb| (mb as u64) << 20),
            _ => return false,
        }
        true
    }

    /// `[limits]`.
    pub(super) fn bounds(&mut self, value: &SpannedValue<'_>, bounds: &mut Bounds) {
        let Some(table) = value.get_ref().as_table() else {
            return self.mistake(value.span(), "`limits` must be written as [limits]");
        };
        for (key, value) in table {
            let name = key.get_ref().as_ref();
            let number = |reader: &mut Self| reader.positive(name, value);
            let percent =
                |reader: &mut Self| number(reader).and_then(|number| number.try_into().ok());
            match name {
                "max_processes" => {
                    bounds.processes = self.processes(name, value).unwrap_or(bounds.processes)
                }
                "max_buffered_mb" => bounds.buffered_bytes = number(self).unwrap_or(1) << 20,
                "max_connections" => {
                    bounds.connections = number(self).unwrap_or(bounds.connections)
                }
                "max_load_per_core" => bounds.load_per_core = percent(self),
                "max_memory_pressure" => bounds.memory_pressure = percent(self),
                "max_cpu_pressure" => bounds.cpu_pressure = percent(self),
                "max_io_pressure" => bounds.io_pressure = percent(self),
                other => {
                    let known = "max_processes, max_buffered_mb, max_connections, \
                                 max_load_per_core, max_memory_pressure, max_cpu_pressure, \
                                 max_io_pressure";
                    self.mistake(
                        key.span(),
                        format!("unknown key `{other}` of [limits] (known: {known})"),
                    );
                }
            }
        }
    }

    pub(super) fn strings(
        &mut self,
        key: &str,
        value: &SpannedValue<'_>,
    ) -> Vec<(String, Range<usize>)> {
        let Some(array) = value.get_ref().as_array() else {
            self.mistake(
                value.span(),
                format!("`{key}` must be a list, such as {key} = [\"...\"]"),
            );
            return Vec::new();
        };
        array.iter().filter_map(|value| Some((self.string(key, value)?, value.span()))).collect()
    }

    /// Checks that need the whole file.
    pub(super) fn check_identities(
        &mut self,
        config: &mut Config,
        identities: Vec<Read>,
        at: Range<usize>,
    ) {
        if config.tls.is_none() && !identities.is_empty() {
            self.mistake(
                at,
                "an [[identity]] is proved by a certificate: add [tls] and run posh-executor init",
            );
        }
        for Read { identity, at, lacks_user, exports } in identities {
            self.check_user_of(&identity, &config.confinement, at, lacks_user);
            for (name, at) in exports {
                if !config.exports.iter().any(|export| export.name == name) {
                    self.mistake(at, format!("no [[export]] is named `{name}`"));
                }
            }
            config.identities.push(identity);
        }
    }

    /// Nobody runs as root by omission, and whoever may claim any id has root's rights anyway.
    fn check_user_of(
        &mut self,
        identity: &Identity,
        confinement: &Confinement,
        at: Range<usize>,
        lacks_user: bool,
    ) {
        let user = match identity.user.as_ref().or(confinement.user.as_ref()) {
            None => None,
            Some(ConfiguredAccount::Known(user)) => Some(user),
            // `Caller::of` trusts no claims until it is known.
            Some(ConfiguredAccount::Absent(_)) => return,
        };
        if lacks_user && user.is_none() && geteuid().is_root() {
            let hint =
                "say user = \"NAME\" here or in [confinement], or user = \"root\" if that is meant";
            self.mistake(
                at.clone(),
                format!("commands of this [[identity]] would run as root; {hint}"),
            );
        }
        if identity.trust_caller_ids == Some(true) && !user.is_some_and(UnixUser::is_root) {
            self.mistake(at, TRUST_NEEDS_ROOT);
        }
    }
}

/// A text that can't name an identity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no name for an identity: letters, digits and - _ . @, at most 64")]
pub struct NoIdentityName(String);

/// Identities stand in logs and in certificates: a word, at most 64 bytes long.
///
/// # Errors
/// It is none.
pub fn check_identity(name: &str) -> Result<(), NoIdentityName> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.@".contains(&byte);
    if !name.is_empty() && name.len() <= 64 && name.bytes().all(is_plain) {
        return Ok(());
    }
    Err(NoIdentityName(name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Config, String> {
        let export = "[[export]]\nname = \"logs\"\npath = \"/\"\n";
        Config::parse("executor.toml", &format!("{export}{text}"), None)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn identities_are_read() {
        let text = "[tls]\ndir = \"/etc/x\"\n[[identity]]\nname = \"ada\"\nuser = \"root\"\nexports = [\"logs\"]\n\
                    read_only = true\ncommands = [\"cat\"]\nmax_runs = 3\nmax_memory_mb = 2\nmax_buffered_mb = 1\n\
                    [limits]\nmax_processes = 9\nmax_cpu_pressure = 50\n";
        let config = read(text).unwrap();
        assert_eq!(config.tls, Some(TlsConfig { directory: "/etc/x".into() }));
        let ada = &config.identities[0];
        assert_eq!(
            (
                ada.name.as_str(),
                ada.user.as_ref().and_then(|user| user.known()).map(|user| user.uid)
            ),
            ("ada", Some(0))
        );
        assert_eq!(ada.exports, Some(BTreeSet::from(["logs".to_owned()])));
        assert!(
            ada.read_only && ada.commands.as_ref().is_some_and(|commands| commands.contains("cat"))
        );
        assert_eq!((ada.limits.runs, ada.limits.processes), (Some(3), None));
        assert_eq!(
            (ada.limits.memory_bytes, ada.limits.buffered_bytes),
            (Some(2 << 20), Some(1 << 20))
        );
        assert_eq!((config.bounds.processes, config.bounds.cpu_pressure), (9, Some(50)));
    }

    #[test]
    fn mistakes_have_their_places_all_at_once() {
        let text = "[tls]\ndir = \"etc\"\n[[identity]]\nname = \"a b\"\nuser = \"no-such-user-here\"\nexports = [\"lags\"]\n\
                    max_runs = 0\n[[identity]]\nname = \"c\"\ncolour = 1\nuser = \"root\"\nmax_processes = 4096\n\
                    [limits]\nmax_runs = 1\nmax_processes = 769\n";
        let all = read(text).unwrap_err();
        for expected in [
            "executor.toml:5:7: `dir` of [tls] must be absolute, not `etc`",
            "executor.toml:7:8: `a b` is no name for an identity",
            "executor.toml:8:8: this machine has no user `no-such-user-here`",
            "executor.toml:9:12: no [[export]] is named `lags`",
            "executor.toml:10:12: `max_runs` must be a whole number above 0",
            "executor.toml:13:1: unknown key `colour` of [[identity]]",
            "executor.toml:15:17: `max_processes` must be at most 768",
            "executor.toml:17:1: unknown key `max_runs` of [limits]",
            "executor.toml:18:17: `max_processes` must be at most 768",
        ] {
            assert!(all.contains(expected), "missing {expected:?} in:\n{all}");
        }
        assert_eq!(all.lines().count(), 9, "{all}");
    }

    #[test]
    fn identities_need_certificates_and_a_user() {
        let all = read("[[identity]]\nname = \"ada\"\n").unwrap_err();
        assert!(all.contains("add [tls] and run posh-executor init"), "{all}");
        assert_eq!(all.contains("would run as root"), geteuid().is_root(), "{all}");
    }

    #[test]
    fn with_certificates_other_machines_may_come() {
        let text = "[tls]\n";
        let listen = "listen = \"0.0.0.0:7400\"\n";
        let export = "[[export]]\nname = \"logs\"\npath = \"/\"\n";
        let config =
            Config::parse("executor.toml", &format!("{listen}{export}{text}"), None).unwrap();
        assert_eq!(
            config.tls.map(|tls| tls.directory),
            Some(crate::config::DEFAULT_DIRECTORY.into())
        );
    }
}
