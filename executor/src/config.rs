//! The executor's configuration: from `executor.toml` or from arguments. All
//! mistakes are found before anything is bound, and reported together.

mod confinement;
mod identity;
mod limits;
mod tls;

pub use crate::level::Level;
pub(crate) use confinement::machine_memory_bytes;
pub use confinement::{Commands, Confinement};
pub use tls::{DEFAULT_DIRECTORY, TlsConfig};

use std::{
    collections::{HashMap, HashSet},
    fmt::Write as _,
    io,
    net::{Ipv4Addr, SocketAddr},
    ops::Range,
    os::fd::AsRawFd as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use fs_mapper::coherence::Adapter;
use nix::unistd::{Uid, geteuid};
use posh_proto::executor::rejected::Kind;
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

pub use identity::{Identity, NoIdentityName, check_identity};
pub(crate) use limits::machine_files;
pub use limits::{Bounds, Limits, MOST_PROCESSES};

use crate::{
    error::{AttemptExt as _, Error, Refusal},
    identity::{ConfiguredAccount, NoUser, UnixUser},
};

/// Time that running commands have after SIGTERM.
const DEFAULT_DRAIN: Duration = Duration::from_secs(10);

/// Time within which an export's directory must answer.
pub(crate) const EXPORT_PATIENCE: Duration = Duration::from_secs(5);

/// Address to listen on by default.
#[must_use]
pub fn default_listen() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 7400))
}

/// Command-line arguments about the rights of commands.
#[derive(Debug, Clone, Default)]
pub struct RightsArguments {
    /// Account that commands run as.
    pub user: Option<String>,
    /// See [`Confinement::trust_caller_ids`].
    pub trust_caller_ids: bool,
    /// See [`Confinement::require`].
    pub require: Option<Level>,
}

impl RightsArguments {
    /// Applies them to `confinement`; returns the mistakes.
    fn apply(self, confinement: &mut Confinement) -> Vec<String> {
        let mut mistakes = Vec::new();
        match self.user.as_deref().map(|name| UnixUser::named(name).and_then(user_to_become)) {
            Some(Ok(user)) => confinement.user = Some(ConfiguredAccount::Known(user)),
            Some(Err(mistake)) => mistakes.push(mistake.to_string()),
            None => {}
        }
        confinement.trust_caller_ids = self.trust_caller_ids;
        if self.trust_caller_ids
            && !confinement.user.as_ref().is_some_and(ConfiguredAccount::is_root)
        {
            mistakes.push(confinement::TRUST_NEEDS_ROOT.to_owned());
        }
        confinement.require = self.require.unwrap_or(confinement.require);
        mistakes
    }
}

/// Checks that this process can take an account's rights.
pub(crate) fn user_to_become(user: UnixUser) -> Result<UnixUser, NoUser> {
    if !geteuid().is_root() && Uid::from_raw(user.uid) != geteuid() {
        return Err(NoUser::NotOurs(user.name));
    }
    Ok(user)
}

/// A directory that is served, and its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Export {
    /// The name that mount tables use.
    pub name: String,
    /// An absolute, existing directory.
    pub path: PathBuf,
    /// Commands may not change it.
    pub read_only: bool,
    /// Programs in it may be started, by commands that no annotation confines to their files.
    pub exec: bool,
    /// Adapter that keeps this machine's own view of it coherent; by its file system when `None`.
    pub coherence: Option<Adapter>,
    /// The path as configured, if links on it lead to `path`.
    pub linked_from: Option<PathBuf>,
}

impl Export {
    /// A directory by its name, all else as by default.
    #[must_use]
    pub fn named(name: String, path: PathBuf, read_only: bool) -> Self {
        Self { name, path, read_only, exec: false, coherence: None, linked_from: None }
    }

    /// Checks that the path as configured leads to the directory still. Who mounts it by sshfs gets
    /// what it leads to at each request.
    ///
    /// # Errors
    /// A link on it has been changed, or can't be followed.
    pub(crate) fn require_place(&self) -> Result<(), Refusal> {
        let Some(configured) = &self.linked_from else { return Ok(()) };
        match without_links(configured) {
            Ok(path) if path == self.path => Ok(()),
            _ => Err(Refusal::new(
                Kind::Stale,
                format!(
                    "a link on the path of the export `{}` leads elsewhere than when the executor \
                     looked at it (an administrator's SIGHUP lets it look again)",
                    self.name
                ),
            )),
        }
    }
}

/// An export that is left out, since its directory can't be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unserved {
    /// The name that mount tables use.
    pub name: String,
    /// The path as configured.
    pub path: PathBuf,
    /// The directory's fault, for callers that ask for the export.
    pub fault: &'static str,
    /// A sentence for the administrator: path, fault and remedy.
    pub hint: String,
}

/// Configuration of an executor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The file that it was read from.
    pub file: Option<PathBuf>,
    /// Address to listen on; [`crate::run`] takes a bound listener and ignores it.
    pub listen: SocketAddr,
    /// Serve plain text also on addresses that others can reach.
    pub allow_plaintext: bool,
    /// The directories served; names are unique.
    pub exports: Vec<Export>,
    /// Exports that are configured and can't be served.
    pub unserved: Vec<Unserved>,
    /// They may be had as volumes, besides running commands on them.
    pub volumes: bool,
    /// Certificates on both sides; plain text when `None`.
    pub tls: Option<TlsConfig>,
    /// Identities that are admitted; only with `tls`.
    pub identities: Vec<Identity>,
    /// Shares of the machine; requests beyond are refused as overload.
    pub bounds: Bounds,
    /// A file that gets a line for every run.
    pub audit: Option<PathBuf>,
    /// A directory that outlives this process, for records of volume sessions: the next process
    /// delays changes until their holders are back. Nothing is recorded when `None`.
    pub state: Option<PathBuf>,
    /// Time that running commands have after a signal to shut down.
    pub drain: Duration,
    /// Commands that may run, and their confinement.
    pub confinement: Confinement,
    /// The `posh-executor` program that is started as a runner; this very
    /// program when `None`. Tests that run an executor in process need it.
    pub runner_program: Option<PathBuf>,
}

/// Default directory of records of volume sessions: `/run/posh-executor` for root, else
/// `posh-executor` in `$XDG_STATE_HOME` or `~/.local/state`, or `/tmp/posh-executor-UID` without a
/// home. A user's runtime directory ends with the last login, which a process may outlive.
#[must_use]
pub fn default_state() -> PathBuf {
    if geteuid().is_root() {
        return PathBuf::from("/run/posh-executor");
    }
    let base =
        std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    // A process that has changed its user may have kept the variables of the first.
    let is_own = |home: &PathBuf| {
        std::fs::metadata(home).is_ok_and(|found| found.uid() == geteuid().as_raw())
    };
    let home = || std::env::home_dir().filter(is_own).map(|home| home.join(".local/state"));
    match base.or_else(home) {
        Some(base) => base.join("posh-executor"),
        None => PathBuf::from(format!("/tmp/posh-executor-{}", geteuid())),
    }
}

/// An argument that names no export.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoExport {
    /// It is below `~`, and the environment tells no home.
    #[error("HOME is not set")]
    NoHome,
    /// It has neither a name nor such a directory.
    #[error("`{0}` is neither NAME=DIR nor an absolute directory")]
    Unclear(String),
}

/// Splits `NAME=DIR`; `/DIR`, `~` and `~/DIR` are their own names.
///
/// # Errors
/// [`NoExport`].
pub fn parse_export(argument: &str) -> Result<(String, PathBuf), NoExport> {
    if argument.starts_with('/') {
        return Ok((argument.to_owned(), PathBuf::from(argument)));
    }
    if let Some(below) =
        argument.strip_prefix('~').filter(|below| below.is_empty() || below.starts_with('/'))
    {
        let home =
            std::env::home_dir().filter(|home| home.is_absolute()).ok_or(NoExport::NoHome)?;
        return Ok((argument.to_owned(), home.join(below.trim_start_matches('/'))));
    }
    match argument.split_once('=') {
        Some((name, directory)) if !name.is_empty() && !directory.is_empty() => {
            Ok((name.to_owned(), PathBuf::from(directory)))
        }
        _ => Err(NoExport::Unclear(argument.to_owned())),
    }
}

impl Config {
    /// A configuration of `exports`, all else as by default. Nothing is checked.
    #[must_use]
    pub fn new(exports: Vec<Export>) -> Self {
        Self { exports, ..Self::empty(default_listen(), false) }
    }

    /// A configuration of `exports` on `listen`, all else as by default. Relative
    /// directories are taken from the current one.
    ///
    /// # Errors
    /// [`Error::Config`] with all mistakes.
    pub fn from_arguments(
        listen: SocketAddr,
        exports: Vec<(String, PathBuf)>,
        read_only: bool,
        allow_plaintext: bool,
        rights: RightsArguments,
    ) -> Result<Self, Error> {
        let mut mistakes = Vec::new();
        let mut config = Self::empty(listen, allow_plaintext);
        mistakes.extend(rights.apply(&mut config.confinement));
        if exports.is_empty() {
            mistakes.push("nothing to serve: give --export NAME=DIR or --config FILE".to_owned());
        }
        for (name, path) in exports {
            let path = std::path::absolute(&path).unwrap_or(path);
            mistakes.extend(config.add_export(Export {
                name,
                path,
                read_only,
                exec: false,
                coherence: None,
                linked_from: None,
            }));
        }
        if mistakes.is_empty() {
            config.leave_out_unserved();
            // Without a file, no reload can mend this.
            if config.exports.is_empty() {
                mistakes.extend(config.unserved.iter().map(|unserved| unserved.hint.clone()));
            }
        }
        if mistakes.is_empty() { Ok(config) } else { Err(Error::Config(mistakes.join("\n"))) }
    }

    /// A configuration for one connection, of those `exports` that can be served. The caller is
    /// told which those are.
    #[must_use]
    pub fn for_stdio(exports: Vec<(String, PathBuf)>, read_only: bool) -> Self {
        let mut config = Self::empty(default_listen(), false);
        // A user who logs in may run any program without us. Commands that annotations understand
        // are still fenced.
        config.confinement.commands = Commands::Any;
        // Nor does it exceed the rights of the login: root can take any id.
        config.confinement.require = Level::None;
        config.confinement.trust_caller_ids = geteuid().is_root();
        for (name, path) in exports {
            if let Some(mistake) = config.add_export(Export::named(name, path, read_only)) {
                tracing::warn!("{mistake}");
            }
        }
        config.leave_out_unserved();
        config.unserved.iter().for_each(|unserved| tracing::warn!("{}", unserved.hint));
        config
    }

    /// Reads and checks `file`. Exports that can't be served are no mistakes: they are left out.
    ///
    /// # Errors
    /// [`Error::Io`] when it can't be read, [`Error::Config`] with every mistake as
    /// `FILE:LINE:COLUMN: sentence`.
    pub fn load(file: &Path) -> Result<Self, Error> {
        let text =
            std::fs::read_to_string(file).attempting(|| format!("read {}", file.display()))?;
        Self::of_file(file, &text, None)
    }

    /// Reads `file` again. A directory service that is away must not keep those in who were taken
    /// out of it: accounts that are known stay as they are, since [`crate::accounts::follow`] looks
    /// them up again; and an identity with a new one that can't be looked up is not let in until it
    /// can.
    ///
    /// # Errors
    /// See [`Self::load`].
    pub fn load_again(&self, file: &Path) -> Result<Self, Error> {
        let text =
            std::fs::read_to_string(file).attempting(|| format!("read {}", file.display()))?;
        Self::of_file(file, &text, Some(self))
    }

    fn of_file(file: &Path, text: &str, before: Option<&Self>) -> Result<Self, Error> {
        let config = Self::parse(&file.display().to_string(), text, before)?;
        Ok(Self {
            file: Some(std::path::absolute(file).unwrap_or_else(|_| file.to_owned())),
            ..config
        })
    }

    fn parse(name: &str, text: &str, before: Option<&Self>) -> Result<Self, Error> {
        let (table, errors) = DeTable::parse_recoverable(text);
        let is_new = |name: &String| before.is_none_or(|before| before.account(name).is_none());
        let new = user_names(table.get_ref()).filter(is_new).collect();
        let (mistakes, accounts) = (Vec::new(), UnixUser::all_named(new));
        let mut reader = ConfigReader { text, mistakes, accounts, before };
        for error in errors {
            reader.mistake(error.span().unwrap_or(0..0), error.message());
        }
        let mut config = reader.config(&table);
        if reader.mistakes.is_empty() {
            config.leave_out_unserved();
            return Ok(config);
        }
        reader.mistakes.sort_by_key(|(at, _)| at.start);
        let mut all = String::new();
        for (at, sentence) in &reader.mistakes {
            let (line, column) = line_and_column(text, at.start);
            let _ = writeln!(all, "{name}:{line}:{column}: {sentence}");
        }
        Err(Error::Config(all.trim_end().to_owned()))
    }

    /// An account that commands run as.
    fn account(&self, name: &str) -> Option<&UnixUser> {
        let accounts = self.identities.iter().filter_map(|identity| identity.user.as_ref());
        let mut users = accounts.chain(&self.confinement.user).filter_map(ConfiguredAccount::known);
        users.find(|user| user.name == name)
    }

    /// The keys whose values differ in `other` and apply only at a start.
    #[must_use]
    pub fn fixed_in(&self, other: &Self) -> Vec<&'static str> {
        let ours = |config: &Self| Confinement {
            commands: Commands::Any,
            annotations: Vec::new(),
            user: None,
            ..config.confinement.clone()
        };
        let fixed = [
            ("listen", self.listen != other.listen),
            ("allow_plaintext", self.allow_plaintext != other.allow_plaintext),
            ("[tls]", self.tls != other.tls),
            ("max_runs and [limits]", self.bounds != other.bounds),
            ("audit", self.audit != other.audit),
            ("state", self.state != other.state),
            ("drain_seconds", self.drain != other.drain),
            ("[confinement] other than commands, annotations and user", ours(self) != ours(other)),
        ];
        fixed.into_iter().filter(|(_, differs)| *differs).map(|(key, _)| key).collect()
    }

    /// Refuses plain text on `address` unless it is allowed there.
    ///
    /// # Errors
    /// [`Error::Plaintext`].
    pub fn check_address(&self, address: SocketAddr) -> Result<(), Error> {
        if self.allow_plaintext || self.tls.is_some() || address.ip().is_loopback() {
            Ok(())
        } else {
            Err(Error::Plaintext(address))
        }
    }

    /// Refuses to give root's rights to callers, unless the configuration names root.
    ///
    /// # Errors
    /// [`Error::RootUser`].
    pub fn check_user(&self) -> Result<(), Error> {
        let lack_user = match self.tls {
            None => self.confinement.user.is_none(),
            Some(_) => {
                self.confinement.user.is_none()
                    && self.identities.iter().any(|identity| identity.user.is_none())
            }
        };
        if lack_user && geteuid().is_root() { Err(Error::RootUser) } else { Ok(()) }
    }

    /// Returns true if anybody who reaches the port has root's rights, as configured.
    pub(crate) fn serves_root_to_anybody(&self) -> bool {
        self.tls.is_none()
            && geteuid().is_root()
            && self.confinement.user.as_ref().is_some_and(ConfiguredAccount::is_root)
    }

    fn empty(listen: SocketAddr, allow_plaintext: bool) -> Self {
        Self {
            file: None,
            listen,
            allow_plaintext,
            volumes: true,
            exports: Vec::new(),
            unserved: Vec::new(),
            tls: None,
            identities: Vec::new(),
            bounds: Bounds::default(),
            audit: None,
            state: None,
            drain: DEFAULT_DRAIN,
            confinement: Confinement::default(),
            runner_program: None,
        }
    }

    /// Adds an export without access to its directory, or returns the mistake.
    fn add_export(&mut self, export: Export) -> Option<String> {
        let Export { name, path, .. } = &export;
        if self.exports.iter().any(|other| other.name == *name) {
            return Some(format!("export `{name}` is named twice"));
        }
        if !path.is_absolute() {
            return Some(format!(
                "path of export `{name}` must be absolute, not `{}`",
                path.display()
            ));
        }
        self.exports.push(export);
        None
    }

    /// Checks the exports' directories, all at the same time, and leaves out those that can't be
    /// served.
    fn leave_out_unserved(&mut self) {
        let looks: Vec<_> = self
            .exports
            .drain(..)
            .map(|export| (begin_look(export.path.clone()), export))
            .collect();
        let deadline = Instant::now() + EXPORT_PATIENCE;
        for (look, export) in looks {
            match look.and_then(|answer| wait_for_look(&answer, deadline)) {
                Ok(path) => {
                    let linked_from = Some(export.path).filter(|configured| *configured != path);
                    self.exports.push(Export { path, linked_from, ..export });
                }
                Err(why) => {
                    let Export { name, path, .. } = export;
                    let hint = format!("{} of export `{name}` {why}", path.display());
                    self.unserved.push(Unserved { name, path, fault: why.fault(), hint });
                }
            }
        }
    }
}

type DirectoryLook = Result<PathBuf, UnusableExport>;

/// Resolves the path of an export's directory now: links that are put on it later are not followed.
/// A file system that hangs blocks only a thread, which is left behind.
fn begin_look(path: PathBuf) -> Result<mpsc::Receiver<DirectoryLook>, UnusableExport> {
    let (told, answer) = mpsc::sync_channel(1);
    let look = move || {
        let found = match std::fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() => {
                without_links(&path).map_err(UnusableExport::Linked)
            }
            Ok(_) => Err(UnusableExport::NoDirectory),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(UnusableExport::Missing),
            Err(error) => Err(UnusableExport::Closed(error)),
        };
        let _ = told.send(found);
    };
    thread::Builder::new().name("export".to_owned()).spawn(look).map_err(UnusableExport::Closed)?;
    Ok(answer)
}

fn wait_for_look(answer: &mpsc::Receiver<DirectoryLook>, deadline: Instant) -> DirectoryLook {
    let left = deadline.saturating_duration_since(Instant::now());
    answer.recv_timeout(left).unwrap_or(Err(UnusableExport::Silent))
}

/// Reason why an export's directory can't be served, and the remedy; follows its path and name.
#[derive(Debug, thiserror::Error)]
enum UnusableExport {
    #[error("does not exist; make the directory, or take the export out")]
    Missing,
    #[error("cannot be opened: {0}; mend that, or take the export out")]
    Closed(io::Error),
    #[error("is not a directory; name one, or take the export out")]
    NoDirectory,
    #[error(
        "leads through a link that others can change: {0}; name the directory itself, or take the \
         export out"
    )]
    Linked(io::Error),
    #[error(
        "has not answered for {} s: its file system hangs; mount it anew, or take the export out",
        EXPORT_PATIENCE.as_secs()
    )]
    Silent,
}

impl UnusableExport {
    /// The fault, without the server's path.
    fn fault(&self) -> &'static str {
        match self {
            Self::Missing => "its directory does not exist",
            Self::Closed(_) => "its directory cannot be opened",
            Self::NoDirectory => "it is not a directory",
            Self::Linked(_) => "its path leads through a link",
            Self::Silent => "its file system hangs",
        }
    }
}

/// Resolves links, and refuses those that others than root and this process's user can have made.
fn without_links(path: &Path) -> io::Result<PathBuf> {
    let directory = trusted_path::open_shared_directory(path, geteuid().as_raw())?;
    std::fs::read_link(format!("/proc/self/fd/{}", directory.as_raw_fd()))
}

/// Top-level keys.
const KNOWN: &str = "listen, allow_plaintext, volumes, max_runs, drain_seconds, audit, state, tls, \
                     identity, limits, confinement, export";

/// Walks the parsed document and collects mistakes with their places.
struct ConfigReader<'a> {
    text: &'a str,
    mistakes: Vec<(Range<usize>, String)>,
    /// Accounts that are not known from `before`, by name.
    accounts: HashMap<String, Result<UnixUser, NoUser>>,
    /// The configuration so far, if this one is to follow it.
    before: Option<&'a Config>,
}

type SpannedValue<'a> = Spanned<DeValue<'a>>;

/// Values of `user` in `[confinement]` and each `[[identity]]`.
fn user_names(table: &DeTable<'_>) -> impl Iterator<Item = String> {
    let identities = table.get("identity").and_then(|value| value.get_ref().as_array());
    let tables = identities.into_iter().flat_map(|identities| identities.iter());
    let users = tables.chain(table.get("confinement")).filter_map(|it| it.get_ref().get("user"));
    users.filter_map(|user| user.get_ref().as_str().map(str::to_owned))
}

impl ConfigReader<'_> {
    fn mistake(&mut self, at: Range<usize>, sentence: impl Into<String>) {
        self.mistakes.push((at, sentence.into()));
    }

    fn config(&mut self, table: &Spanned<DeTable<'_>>) -> Config {
        let mut config = Config::empty(default_listen(), false);
        let (mut listen_at, mut identities_at) = (0..0, 0..0);
        let mut identities = Vec::new();
        for (key, value) in table.get_ref() {
            match key.get_ref().as_ref() {
                "listen" => {
                    listen_at = value.span();
                    if let Some(address) = self.address(value) {
                        config.listen = address;
                    }
                }
                "allow_plaintext" => {
                    config.allow_plaintext = self.boolean("allow_plaintext", value)
                }
                "volumes" => config.volumes = self.boolean("volumes", value),
                "max_runs" => config.bounds.runs = self.positive("max_runs", value).unwrap_or(1),
                "audit" => config.audit = self.absolute("audit", value),
                "state" => config.state = self.absolute("state", value),
                "tls" => config.tls = self.tls(value),
                "identity" => {
                    identities_at = value.span();
                    identities = self.identities(value);
                }
                "limits" => self.bounds(value, &mut config.bounds),
                "drain_seconds" => {
                    let seconds = self.positive("drain_seconds", value).unwrap_or(1);
                    config.drain = Duration::from_secs(seconds as u64);
                }
                "export" => self.exports(&mut config, value),
                "confinement" => config.confinement = self.confinement(value),
                other => {
                    self.mistake(key.span(), format!("unknown key `{other}` (known: {KNOWN})"))
                }
            }
        }
        self.check_identities(&mut config, identities, identities_at);
        if let Err(error) = config.check_address(config.listen) {
            self.mistake(listen_at.clone(), error.to_string());
        }
        // An identity without a user is reported with its place; so is a user that is wrong.
        let has_user = table
            .get_ref()
            .get("confinement")
            .and_then(|value| value.get_ref().get("user"))
            .is_some();
        if config.tls.is_none()
            && !has_user
            && let Err(error) = config.check_user()
        {
            self.mistake(listen_at.clone(), error.to_string());
        }
        if !table.get_ref().contains_key("export") {
            self.mistake(
                self.text.len()..self.text.len(),
                "nothing to serve: add an [[export]] with name and path",
            );
        }
        config
    }

    fn absolute(&mut self, key: &str, value: &SpannedValue<'_>) -> Option<PathBuf> {
        let path = PathBuf::from(self.string(key, value)?);
        if !path.is_absolute() {
            self.mistake(
                value.span(),
                format!("`{key}` must be absolute, not `{}`", path.display()),
            );
        }
        Some(path)
    }

    fn exports(&mut self, config: &mut Config, value: &SpannedValue<'_>) {
        let Some(tables) = value.get_ref().as_array() else {
            return self.mistake(value.span(), "`export` must be written as [[export]]");
        };
        let mut seen = HashSet::new();
        for entry in tables {
            match entry.get_ref().as_table() {
                Some(table) => self.export(config, entry.span(), table, &mut seen),
                None => self.mistake(entry.span(), "`export` must be written as [[export]]"),
            }
        }
    }

    fn export(
        &mut self,
        config: &mut Config,
        at: Range<usize>,
        table: &DeTable<'_>,
        seen: &mut HashSet<String>,
    ) {
        let (mut name, mut path, mut coherence) = (None, None, None);
        let (mut read_only, mut exec) = (false, false);
        for (key, value) in table {
            match key.get_ref().as_ref() {
                "name" => name = self.string("name", value).map(|text| (text, value.span())),
                "path" => path = self.string("path", value).map(|text| (text, value.span())),
                "read_only" => read_only = self.boolean("read_only", value),
                "exec" => exec = self.boolean("exec", value),
                "coherence" => coherence = self.adapter(value),
                other => {
                    self.mistake(
                        key.span(),
                        format!(
                            "unknown key `{other}` of [[export]] (known: name, path, read_only, \
                             exec, coherence)"
                        ),
                    );
                }
            }
        }
        if !table.contains_key("name") {
            self.mistake(at.clone(), "this [[export]] has no `name`");
        }
        if !table.contains_key("path") {
            self.mistake(at, "this [[export]] has no `path`");
        }
        if let Some((name, name_at)) = &name
            && !seen.insert(name.clone())
        {
            return self.mistake(name_at.clone(), format!("export `{name}` is named twice"));
        }
        if let (Some((name, _)), Some((path, path_at))) = (name, path)
            && let Some(mistake) = config.add_export(Export {
                exec,
                coherence,
                ..Export::named(name, path.into(), read_only)
            })
        {
            self.mistake(path_at, mistake);
        }
    }

    fn string(&mut self, key: &str, value: &SpannedValue<'_>) -> Option<String> {
        match value.get_ref().as_str() {
            Some(text) if !text.is_empty() => Some(text.to_owned()),
            Some(_) => {
                self.mistake(value.span(), format!("`{key}` is empty"));
                None
            }
            None => {
                self.mistake(
                    value.span(),
                    format!("`{key}` must be a string, not {}", value.get_ref().type_str()),
                );
                None
            }
        }
    }

    fn boolean(&mut self, key: &str, value: &SpannedValue<'_>) -> bool {
        value.get_ref().as_bool().unwrap_or_else(|| {
            self.mistake(
                value.span(),
                format!("`{key}` must be true or false, not {}", value.get_ref().type_str()),
            );
            false
        })
    }

    fn adapter(&mut self, value: &SpannedValue<'_>) -> Option<Adapter> {
        let text = self.string("coherence", value)?;
        let found = Adapter::ALL.into_iter().find(|adapter| adapter.name() == text);
        if found.is_none() {
            let known = Adapter::ALL.map(Adapter::name).join(", ");
            self.mistake(value.span(), format!("`coherence` must be one of {known}, not `{text}`"));
        }
        found
    }

    fn positive(&mut self, key: &str, value: &SpannedValue<'_>) -> Option<usize> {
        let number = value.get_ref().as_integer().and_then(|number| number.as_str().parse().ok());
        if number.is_none_or(|number: u32| number == 0) {
            self.mistake(value.span(), format!("`{key}` must be a whole number above 0"));
            return None;
        }
        number.map(|number| number as usize)
    }

    /// A number of commands, at most [`limits::MOST_PROCESSES`].
    fn processes(&mut self, key: &str, value: &SpannedValue<'_>) -> Option<usize> {
        let count = self.positive(key, value)?;
        if count > limits::MOST_PROCESSES {
            let most = limits::MOST_PROCESSES;
            let why = "the kernel keeps a filter of system calls for each command, and stalls when \
                       more end at once";
            self.mistake(value.span(), format!("`{key}` must be at most {most}: {why}"));
            return None;
        }
        Some(count)
    }

    fn address(&mut self, value: &SpannedValue<'_>) -> Option<SocketAddr> {
        let text = self.string("listen", value)?;
        let address = text.parse().ok();
        if address.is_none() {
            self.mistake(
                value.span(),
                format!("`listen` must be IP:PORT such as 127.0.0.1:7400, not `{text}`"),
            );
        }
        address
    }
}

/// Both count from 1; the column counts characters.
fn line_and_column(text: &str, offset: usize) -> (usize, usize) {
    let before = text.get(..offset).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mistakes(text: &str) -> String {
        match Config::parse("executor.toml", text, None) {
            Ok(config) => panic!("accepted as {config:?}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_whole_file_is_read() {
        let text = "listen = \"127.0.0.1:9\"\nmax_runs = 3\ndrain_seconds = 4\n\
                    [confinement]\nuser = \"root\"\n[[export]]\nname = \"root\"\npath = \"/\"\nread_only = true\nexec = true\ncoherence = \"rclone\"\n";
        let config = Config::parse("executor.toml", text, None).unwrap();
        assert_eq!(config.listen.port(), 9);
        assert_eq!((config.bounds.runs, config.drain), (3, Duration::from_secs(4)));
        assert_eq!(
            config.exports,
            [Export {
                name: "root".into(),
                path: "/".into(),
                read_only: true,
                exec: true,
                coherence: Some(Adapter::Rclone),
                linked_from: None,
            }]
        );
    }

    #[test]
    fn every_mistake_is_reported_with_its_place() {
        let text = "listen = \"everywhere\"\ncolour = 1\n[[export]]\nname = \"a\"\npath = \"rel\"\n\
                    [[export]]\nname = \"a\"\npath = \"/\"\nread_only = \"no\"\n[[export]]\nname = \"b\"\ncoherence = \"x\"\n\
                    [confinement]\nuser = \"root\"\n";
        let all = mistakes(text);
        for expected in [
            "executor.toml:1:10: `listen` must be IP:PORT",
            "executor.toml:2:1: unknown key `colour`",
            "executor.toml:5:8: path of export `a` must be absolute",
            "executor.toml:7:8: export `a` is named twice",
            "executor.toml:9:13: `read_only` must be true or false",
            "executor.toml:10:1: this [[export]] has no `path`",
        ] {
            assert!(all.contains(expected), "missing {expected:?} in:\n{all}");
        }
        assert!(
            all.contains("executor.toml:12:13: `coherence` must be one of sshfs, rclone, "),
            "{all}"
        );
        assert_eq!(all.lines().count(), 7, "{all}");
    }

    #[test]
    fn broken_syntax_has_a_place() {
        assert!(mistakes("[[export]\nname = \"a\"\n").starts_with("executor.toml:1:"));
    }

    #[test]
    fn plain_text_stays_on_loopback() {
        let all = mistakes("listen = \"0.0.0.0:7400\"\n[[export]]\nname = \"a\"\npath = \"/\"\n");
        assert!(
            all.starts_with("executor.toml:1:10: refusing to serve plain text on 0.0.0.0:7400"),
            "{all}"
        );
        let allowed = "listen = \"0.0.0.0:1\"\nallow_plaintext = true\n[[export]]\nname = \"a\"\npath = \"/\"\n";
        assert!(
            mistakes(allowed)
                .starts_with("executor.toml:1:10: refusing to run everybody's commands as root")
        );
        let allowed = format!("{allowed}[confinement]\nuser = \"root\"\n");
        assert!(Config::parse("executor.toml", &allowed, None).is_ok());
    }

    #[test]
    fn an_export_may_be_its_own_name() {
        let check = |argument: &str, name: &str, path: &str| {
            assert_eq!(
                parse_export(argument),
                Ok((name.to_owned(), PathBuf::from(path))),
                "{argument}"
            );
        };
        check("logs=/srv/logs", "logs", "/srv/logs");
        check("/srv/a=b", "/srv/a=b", "/srv/a=b");
        check("/", "/", "/");
        let home = std::env::home_dir().unwrap();
        check("~", "~", home.to_str().unwrap());
        check("~/x y", "~/x y", home.join("x y").to_str().unwrap());
        for wrong in ["logs", "=/srv", "~ada", "logs="] {
            assert!(parse_export(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn over_stdio_what_is_missing_is_left_out() {
        let exports = ["/nonexistent-directory", "/", "/"].map(|path| parse_export(path).unwrap());
        let names: Vec<_> =
            Config::for_stdio(exports.into(), true).exports.into_iter().map(|e| e.name).collect();
        assert_eq!(names, ["/"]);
    }

    #[test]
    fn exports_that_can_not_be_served_are_left_out() {
        let text = "[tls]\n[[export]]\nname = \"a\"\npath = \"/\"\n[[export]]\nname = \"b\"\npath = \"/nonexistent-directory\"\n\
                    [[export]]\nname = \"c\"\npath = \"/dev/null\"\n[[identity]]\nname = \"ada\"\nuser = \"root\"\nexports = [\"a\", \"b\"]\n";
        let config = Config::parse("executor.toml", text, None).unwrap();
        assert_eq!(
            config.exports.iter().map(|export| export.name.as_str()).collect::<Vec<_>>(),
            ["a"]
        );
        let unserved: Vec<_> =
            config.unserved.iter().map(|its| (its.name.as_str(), its.fault)).collect();
        assert_eq!(
            unserved,
            [("b", "its directory does not exist"), ("c", "it is not a directory")]
        );
        let hint = "/nonexistent-directory of export `b` does not exist; make the directory, or take the export out";
        assert_eq!(config.unserved[0].hint, hint);
        // Mistakes in the file itself are still reported.
        let twice = format!("{text}[[export]]\nname = \"b\"\npath = \"/nonexistent-directory\"\n");
        assert!(mistakes(&twice).contains("export `b` is named twice"));
    }

    #[test]
    fn arguments_are_checked_the_same_way() {
        let exports = vec![
            ("a".to_owned(), PathBuf::from("/nonexistent-directory")),
            ("b".into(), "/dev/null".into()),
        ];
        let all = Config::from_arguments(
            default_listen(),
            exports,
            false,
            false,
            RightsArguments::default(),
        )
        .unwrap_err()
        .to_string();
        assert!(all.contains("/nonexistent-directory of export `a` does not exist"), "{all}");
        assert!(all.contains("/dev/null of export `b` is not a directory"), "{all}");
    }
}
