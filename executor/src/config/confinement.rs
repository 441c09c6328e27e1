//! `[confinement]` of the configuration: allowed commands, the confinement that they need, and
//! their bounds.

use std::{collections::BTreeSet, path::PathBuf};

use toml::de::DeTable;

use super::{ConfigReader, SpannedValue, identity::MissingAccount, limits};
use crate::identity::ConfiguredAccount;
use crate::level::Level;

/// Processes of all commands of one user and mount table at a time: ten times what the largest
/// builds use, and a fork bomb ends while the machine still answers. Forked processes share the
/// filters of their command (see `limits::MOST_PROCESSES`). RLIMIT_NPROC counts all of the user's
/// processes on the machine, where the user has no namespace of its own: it must leave room for
/// them.
const DEFAULT_PROCESSES: u64 = 8192;

/// Divides the machine's memory into the bound of one process: sort(1), the command that takes the
/// most, takes an eighth of it at least, and at most half of its bound, which is the same.
const SHARE_OF_MEMORY: u64 = 4;
/// Divides the machine's memory into the bound of one view's temporary files. One identity has six
/// views in use at most (`pool`), so that all of them full leave a quarter of the memory.
const SHARE_OF_TMP: u64 = 8;
/// Less would keep ordinary commands from working on small machines, where the kernel's OOM killer
/// decides.
const LEAST_MEMORY_BYTES: u64 = 2 << 30;
const LEAST_TMP_BYTES: u64 = 64 << 20;

/// Total memory of this machine.
pub(crate) fn machine_memory_bytes() -> u64 {
    let about = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = about.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    total.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// Commands that may run, and their confinement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Confinement {
    /// Nothing runs below this level.
    pub require: Level,
    /// Commands that may run.
    pub commands: Commands,
    /// Directories with annotations of this server's own, over those that ship with posh.
    pub annotations: Vec<PathBuf>,
    /// Account that commands run as when no identity names one; the executor's own if `None`, which
    /// an executor that runs as root and accepts connections refuses.
    pub user: Option<ConfiguredAccount>,
    /// Volumes act with the ids that workstations claim (NFS: `sec=sys`); only with root as the
    /// user.
    pub trust_caller_ids: bool,
    /// Processes of one user and mount table at a time.
    pub max_processes: u64,
    /// Memory that one process may write to; 0 is no bound.
    pub max_memory_bytes: u64,
    /// The size of `/tmp` and `/var/tmp` of one view, together. They are in memory.
    pub tmp_bytes: u64,
    /// The size to which a file may be written; 0 is no bound.
    pub max_file_bytes: u64,
    /// Files that one process may have open.
    pub max_open_files: u64,
    /// A cgroup for the executor's use; without, its own if the system has delegated it.
    pub cgroup: Option<PathBuf>,
}

/// Default directory of an administrator's own annotations.
const ANNOTATIONS: &str = "/etc/posh/annotations";

impl Default for Confinement {
    fn default() -> Self {
        Self {
            require: Level::Strict,
            commands: Commands::Annotated,
            annotations: vec![ANNOTATIONS.into()],
            user: None,
            trust_caller_ids: false,
            max_processes: DEFAULT_PROCESSES,
            max_memory_bytes: (machine_memory_bytes() / SHARE_OF_MEMORY).max(LEAST_MEMORY_BYTES),
            tmp_bytes: (machine_memory_bytes() / SHARE_OF_TMP).max(LEAST_TMP_BYTES),
            max_file_bytes: 0,
            max_open_files: limits::open_files_of_one(limits::machine_files()),
            cgroup: None,
        }
    }
}

/// A workstation that may claim any id can claim root's: another user would be a promise that is
/// not kept.
pub(super) const TRUST_NEEDS_ROOT: &str = "`trust_caller_ids` is only accepted with user = \
                                           \"root\": a workstation that is trusted with every id \
                                           is trusted with root's";

/// Names of commands that may run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Commands {
    /// Those that the server's annotations describe, as described.
    Annotated,
    /// These alone. Those without annotation run unanalysed, and reach all of the mounts.
    Listed(BTreeSet<String>),
    /// Any installed program. Those that the annotations do not understand reach all of the mounts.
    Any,
}

impl ConfigReader<'_> {
    pub(super) fn confinement(&mut self, value: &SpannedValue<'_>) -> Confinement {
        let mut read = Confinement::default();
        match value.get_ref().as_table() {
            Some(table) => self.confinement_keys(table, &mut read),
            None => self.mistake(value.span(), "`confinement` must be written as [confinement]"),
        }
        read
    }

    fn confinement_keys(&mut self, table: &DeTable<'_>, read: &mut Confinement) {
        for (key, value) in table {
            match key.get_ref().as_ref() {
                "require" => match self.string("require", value).map(|text| text.parse()) {
                    Some(Ok(level)) => read.require = level,
                    Some(Err(error)) => self.mistake(value.span(), error.to_string()),
                    None => {}
                },
                "commands" => read.commands = self.commands(value),
                "annotations" => {
                    read.annotations = self
                        .strings("annotations", value)
                        .into_iter()
                        .map(|(directory, _)| directory.into())
                        .collect();
                }
                "user" => {
                    read.user = self.user(value, MissingAccount::IsMistake);
                }
                "trust_caller_ids" => {
                    read.trust_caller_ids = self.boolean("trust_caller_ids", value)
                }
                "max_processes" => {
                    let default = DEFAULT_PROCESSES;
                    read.max_processes =
                        self.positive("max_processes", value).map_or(default, |count| count as u64);
                }
                "max_open_files" => {
                    let default = read.max_open_files;
                    read.max_open_files = self
                        .positive("max_open_files", value)
                        .map_or(default, |count| count as u64);
                }
                "max_memory_bytes" => read.max_memory_bytes = self.bytes("max_memory_bytes", value),
                "tmp_bytes" => read.tmp_bytes = self.bytes("tmp_bytes", value),
                "cgroup" => read.cgroup = self.string("cgroup", value).map(PathBuf::from),
                "max_file_bytes" => read.max_file_bytes = self.bytes("max_file_bytes", value),
                other => self.mistake(
                    key.span(),
                    format!(
                        "unknown key `{other}` (known: require, commands, annotations, user, \
                         trust_caller_ids, max_processes, max_memory_bytes, tmp_bytes, \
                         max_file_bytes, max_open_files, cgroup)"
                    ),
                ),
            }
        }
        if let Some((key, _)) = table.get_key_value("trust_caller_ids")
            && read.trust_caller_ids
            && !read.user.as_ref().is_some_and(ConfiguredAccount::is_root)
        {
            self.mistake(key.span(), TRUST_NEEDS_ROOT);
        }
    }

    fn bytes(&mut self, key: &str, value: &SpannedValue<'_>) -> u64 {
        let number = value
            .get_ref()
            .as_integer()
            .and_then(|number| number.as_str().parse().ok())
            .unwrap_or(0);
        if number == 0 {
            self.mistake(value.span(), format!("`{key}` must be a whole number of bytes above 0"));
        }
        number
    }

    /// A list of names; `*` allows any.
    fn commands(&mut self, value: &SpannedValue<'_>) -> Commands {
        let names: BTreeSet<String> =
            self.strings("commands", value).into_iter().map(|(name, _)| name).collect();
        if let Some(name) = names.iter().find(|name| name.contains('/')) {
            self.mistake(value.span(), format!("`commands` are names, not paths such as {name:?}"));
        }
        if names.contains("*") { Commands::Any } else { Commands::Listed(names) }
    }
}

#[cfg(test)]
mod tests {
    use crate::Config;

    use super::*;

    fn read(section: &str) -> Result<Confinement, String> {
        // In plain text an executor of root must name the commands' user.
        let tls = "[tls]\n";
        let text =
            format!("[[export]]\nname = \"a\"\npath = \"/\"\n[confinement]\n{section}\n{tls}");
        Config::parse("executor.toml", &text, None)
            .map(|config| config.confinement)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_whole_section_is_read() {
        let text = "require = \"strict\"\ncommands = [\"cat\", \"mytool\"]\nannotations = [\"/etc/posh\"]\nuser = \"root\"\n\
                    trust_caller_ids = true\nmax_processes = 400\nmax_memory_bytes = 8589934592\ntmp_bytes = 9\nmax_file_bytes = 1\nmax_open_files = 2000\n\
                    cgroup = \"/sys/fs/cgroup/posh\"\n";
        let expected = Confinement {
            require: Level::Strict,
            commands: Commands::Listed(["cat", "mytool"].map(str::to_owned).into()),
            annotations: vec!["/etc/posh".into()],
            user: crate::identity::UnixUser::named("root").ok().map(ConfiguredAccount::Known),
            trust_caller_ids: true,
            max_processes: 400,
            max_memory_bytes: 8 << 30,
            tmp_bytes: 9,
            max_file_bytes: 1,
            max_open_files: 2000,
            cgroup: Some("/sys/fs/cgroup/posh".into()),
        };
        assert_eq!(read(text), Ok(expected));
        assert_eq!(read(""), Ok(Confinement::default()));
        assert_eq!(read("commands = [\"*\"]").map(|read| read.commands), Ok(Commands::Any));
    }

    #[test]
    fn mistakes_have_their_place() {
        for (section, expected) in [
            (
                "require = \"much\"",
                "executor.toml:5:11: `require` must be \"strict\", \"namespaces\" or \"none\"",
            ),
            (
                "commands = [\"/bin/sh\"]",
                "executor.toml:5:12: `commands` are names, not paths such as \"/bin/sh\"",
            ),
            (
                "commands = \"cat\"",
                "executor.toml:5:12: `commands` must be a list, such as commands = [\"...\"]",
            ),
            (
                "max_file_bytes = 0",
                "executor.toml:5:18: `max_file_bytes` must be a whole number of bytes above 0",
            ),
            (
                "user = \"no-such-user-here\"",
                "executor.toml:5:8: this machine has no user `no-such-user-here`",
            ),
            (
                "trust_caller_ids = true",
                "executor.toml:5:1: `trust_caller_ids` is only accepted with user = \"root\"",
            ),
            (
                "user = \"nobody\"\ntrust_caller_ids = true",
                "executor.toml:6:1: `trust_caller_ids` is only accepted",
            ),
            ("colour = 1", "executor.toml:5:1: unknown key `colour`"),
        ] {
            let said = read(section).expect_err(section);
            assert!(said.starts_with(expected), "{said}");
        }
    }
}
