//! sshfs's arguments (sshfs(1)): ssh's command line, and whether the mount shows the server's files
//! unchanged.

use std::ffi::OsString;

/// Connection settings in the arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SshSettings {
    /// ssh and the options that sshfs passes to it.
    pub ssh_command: Vec<String>,
    /// Port, if given.
    pub port: Option<u16>,
    /// The login's files are shown as this user's, and the other way round (`idmap=user`).
    pub translates_login: bool,
    /// The kernel remembers contents, attributes or absent names for longer than by default: see
    /// [`makes_kernel_remember`].
    pub makes_kernel_remember: bool,
}

/// sshfs and mount options, up to `=`, that affect neither the view of commands nor ssh's
/// connection. A mount with any other option is left out.
const HARMLESS: &[&str] = &[
    "_netdev",
    "allow_other",
    "allow_root",
    "async",
    "async_read",
    "atime",
    "auto",
    "auto_unmount",
    "big_writes",
    "cache",
    "compression",
    "debug",
    "default_permissions",
    "delay_connect",
    "dev",
    "exec",
    "group",
    "idmap=none",
    "idmap=user",
    "intr",
    "large_read",
    "loglevel",
    "max_background",
    "max_conns",
    "max_read",
    "max_readahead",
    "max_write",
    "no_check_root",
    "no_readahead",
    "noatime",
    "noauto",
    "noauto_cache",
    "nodev",
    "nodiratime",
    "nofail",
    "nonempty",
    "nosuid",
    "owner",
    "reconnect",
    "relatime",
    "rw",
    "sshfs_debug",
    "sshfs_sync",
    "sshfs_verbose",
    "subtype",
    "suid",
    "sync_read",
    "sync_readdir",
    "user",
    "users",
];
/// Prefixes of further such options.
const HARMLESS_BEGINNINGS: &[&str] = &["cache_", "dcache_", "dir_cache", "x-", "comment="];
/// Options about the kernel's caches; see [`makes_kernel_remember`].
const OF_KERNEL_CACHES: &[&str] = &[
    "ac_attr_timeout",
    "attr_timeout",
    "auto_cache",
    "entry_timeout",
    "kernel_cache",
    "negative_timeout",
];
/// The kernel's default lifetime of names and attributes;
/// [`KERNEL_MEMORY`](crate::coherence::KERNEL_MEMORY) relies on it.
const KERNEL_MEMORY_S: f64 = 1.0;
/// sshfs's default cache lifetime; [`SSHFS_MEMORY`](crate::coherence::SSHFS_MEMORY) relies on it.
const MEMORY_S: u64 = 20;
/// ssh options that the gateway sets itself, for an unattended ssh.
const OUR_OWN: &[&str] =
    &["batchmode", "controlmaster", "clearallforwardings", "remotecommand", "requesttty"];

/// Reason why a mount's arguments can't be taken over, about the mount.
#[derive(Debug, thiserror::Error)]
pub(super) enum ArgumentsFault {
    #[error("its options are not UTF-8")]
    NotUtf8,
    #[error("its option {0} has no value")]
    NoValue(String),
    #[error("its option {0} is not known to posh")]
    UnknownFlag(String),
    #[error("its port {0:?} is none")]
    Port(String),
    #[error("its ssh_command can't be split into words")]
    SshCommand,
    #[error(
        "it remembers for more than {longest} s ({0}), so what is new would not be seen",
        longest = MEMORY_S
    )]
    RemembersLonger(String),
    #[error("it is mounted with the option {0}, which may change what commands see")]
    UnknownOption(String),
    #[error("its option names the relative file {0:?}")]
    RelativeFile(String),
}

/// Parses the arguments.
pub(super) fn read(arguments: &[OsString]) -> Result<SshSettings, ArgumentsFault> {
    let mut reading =
        SshfsArguments { command: vec!["ssh".to_owned()], ..SshfsArguments::default() };
    let mut words = arguments.iter().map(|word| word.to_str().ok_or(ArgumentsFault::NotUtf8));
    while let Some(word) = words.next().transpose()? {
        let Some(flags) = word.strip_prefix('-').filter(|flags| !flags.is_empty()) else {
            continue;
        };
        let (flag, attached) = flags.split_at(flags.chars().next().map_or(0, char::len_utf8));
        match flag {
            "o" | "p" | "F" => {
                let value = match attached {
                    "" => words
                        .next()
                        .transpose()?
                        .ok_or_else(|| ArgumentsFault::NoValue(word.to_owned()))?,
                    attached => attached,
                };
                reading.with_value(flag, value)?;
            }
            "C" if attached.is_empty() => reading.options.push("-C".to_owned()),
            "f" | "d" | "s" if attached.is_empty() => {}
            _ => return Err(ArgumentsFault::UnknownFlag(word.to_owned())),
        }
    }
    reading.command.append(&mut reading.options);
    let SshfsArguments {
        command: ssh_command, port, translates_login, makes_kernel_remember, ..
    } = reading;
    Ok(SshSettings { ssh_command, port, translates_login, makes_kernel_remember })
}

#[derive(Default)]
struct SshfsArguments {
    command: Vec<String>,
    options: Vec<String>,
    port: Option<u16>,
    translates_login: bool,
    makes_kernel_remember: bool,
}

impl SshfsArguments {
    fn with_value(&mut self, flag: &str, value: &str) -> Result<(), ArgumentsFault> {
        match flag {
            "p" => self.port(value),
            "F" => {
                is_absolute(value)?;
                self.options.extend(["-F".to_owned(), value.to_owned()]);
                Ok(())
            }
            _ => split_options(value).iter().try_for_each(|option| self.option(option)),
        }
    }

    fn port(&mut self, value: &str) -> Result<(), ArgumentsFault> {
        let port = value.parse().ok().filter(|port| *port != 0);
        self.port = Some(port.ok_or_else(|| ArgumentsFault::Port(value.to_owned()))?);
        Ok(())
    }

    /// Handles one option of `-o`. ssh's begin with a capital letter, those of sshfs and mounts
    /// never do.
    fn option(&mut self, option: &str) -> Result<(), ArgumentsFault> {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        if name.starts_with(|c: char| c.is_ascii_uppercase()) {
            return self.ssh_option(name, value);
        }
        if name == "ssh_command" {
            let words = shlex::split(value).filter(|words| !words.is_empty());
            self.command = words.ok_or(ArgumentsFault::SshCommand)?;
            return Ok(());
        }
        if name.contains("cache_")
            && name.ends_with("timeout")
            && !value.parse().is_ok_and(|s: u64| s <= MEMORY_S)
        {
            return Err(ArgumentsFault::RemembersLonger(option.to_owned()));
        }
        self.translates_login |= option == "idmap=user";
        if OF_KERNEL_CACHES.contains(&name) {
            self.makes_kernel_remember |= makes_kernel_remember(name, value);
            return Ok(());
        }
        let known = HARMLESS.iter().any(|harmless| *harmless == name || *harmless == option);
        if known || HARMLESS_BEGINNINGS.iter().any(|beginning| option.starts_with(beginning)) {
            return Ok(());
        }
        Err(ArgumentsFault::UnknownOption(name.to_owned()))
    }

    fn ssh_option(&mut self, name: &str, value: &str) -> Result<(), ArgumentsFault> {
        match name.to_ascii_lowercase().as_str() {
            "port" => return self.port(value),
            "identityfile" => is_absolute(value)?,
            own if OUR_OWN.contains(&own) => return Ok(()),
            _ => {}
        }
        self.options.extend(["-o".to_owned(), format!("{name}={value}")]);
        Ok(())
    }
}

/// Returns true if the kernel remembers longer with this option than by default: it then answers
/// without sshfs, so that nothing that is done to sshfs shows what has changed on the server.
/// `auto_cache` keeps contents as long as size and time of change, in whole seconds, are the same.
/// A time that this can't read counts as a long one.
fn makes_kernel_remember(name: &str, value: &str) -> bool {
    let longest_s = match name {
        "kernel_cache" | "auto_cache" => return true,
        // By default, an absent name is asked for each time.
        "negative_timeout" => 0.0,
        _ => KERNEL_MEMORY_S,
    };
    !value.parse().is_ok_and(|s: f64| s <= longest_s)
}

/// A relative file depends on a directory that is no longer known.
fn is_absolute(file: &str) -> Result<(), ArgumentsFault> {
    if file.starts_with(['/', '~', '%']) {
        Ok(())
    } else {
        Err(ArgumentsFault::RelativeFile(file.to_owned()))
    }
}

/// Splits at commas; a backslash escapes the next character.
fn split_options(text: &str) -> Vec<String> {
    let mut options = vec![String::new()];
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        let current = options.last_mut().expect("there is always one");
        match character {
            '\\' => current.extend(characters.next()),
            ',' => options.push(String::new()),
            other => current.push(other),
        }
    }
    options.retain(|option| !option.is_empty());
    options
}
