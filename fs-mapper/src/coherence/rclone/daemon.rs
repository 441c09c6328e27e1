//! Process that serves an rclone mount, and its settings. Everything is read from /proc; nothing
//! has to be configured. Missing information is an error, and then commands run locally.

use super::{cache::Cache, remote_control::RemoteControl};
use crate::daemons::Daemons;
use crate::mountinfo::{MountEntry, MountInfo};
use crate::process::Process;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Default of `--vfs-write-back`.
const DEFAULT_WRITE_BACK: Duration = Duration::from_secs(5);
/// File names of rclone's executable, including those for mount(8).
const NAMES: [&str; 3] = ["rclone", "rclonefs", "mount.rclone"];
/// root, whose mounts all users may use.
const ROOT: u32 = 0;
/// Default of `--attr-timeout`.
const DEFAULT_ATTRIBUTE_LIFE: Duration = Duration::from_secs(1);

/// A running `rclone mount`.
#[derive(Debug)]
pub(super) struct Daemon {
    mount: MountEntry,
    process: PathBuf,
    words: Vec<OsString>,
    variables: Vec<(OsString, OsString)>,
}

impl Daemon {
    /// Daemon of the mount that holds a path.
    pub(super) fn of(path: &Path) -> io::Result<Daemon> {
        let info = MountInfo::read().map_err(io::Error::other)?;
        let around =
            info.visible().into_iter().filter(|mount| path.starts_with(&mount.mount_point));
        let mount = around.max_by_key(|mount| mount.mount_point.components().count()).cloned();
        let mount = mount.filter(|mount| mount.fs_type.starts_with("fuse")).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::Unsupported,
                format!("{} is on no rclone mount", path.display()),
            )
        })?;
        let process = process_of(&mount).ok_or_else(|| {
            let what =
                format!("the rclone process of {} is not to be found", mount.mount_point.display());
            io::Error::new(io::ErrorKind::Unsupported, what)
        })?;
        let (process, words) = process;
        let variables = process.strings("environ")?.into_iter().filter_map(|variable| {
            let bytes = variable.as_bytes();
            let equals = bytes.iter().position(|byte| *byte == b'=')?;
            Some((
                OsStr::from_bytes(&bytes[..equals]).to_owned(),
                OsStr::from_bytes(&bytes[equals + 1..]).to_owned(),
            ))
        });
        let words = words.into_iter().filter(|word| !word.is_empty()).skip(1).collect();
        Ok(Daemon { mount, words, variables: variables.collect(), process: process.path() })
    }

    /// Path relative to the remote's root, as rclone names it.
    pub(super) fn inside(&self, path: &Path) -> PathBuf {
        let below = path.strip_prefix(&self.mount.mount_point).unwrap_or(path);
        self.mount.root.strip_prefix("/").unwrap_or(&self.mount.root).join(below)
    }

    /// Inverse of `inside`: path on this machine.
    pub(super) fn shown(&self, inside: &Path) -> PathBuf {
        let root = self.mount.root.strip_prefix("/").unwrap_or(&self.mount.root);
        self.mount.mount_point.join(inside.strip_prefix(root).unwrap_or(inside))
    }

    /// Write cache; `None` when every write goes to the cloud before close(2) returns.
    pub(super) fn cache(&self) -> io::Result<Option<Cache>> {
        if self.setting("vfs-cache-mode").is_none_or(|mode| mode == "off" || mode == "0") {
            return Ok(None);
        }
        let said = self.remote_control().and_then(|control| control.metadata_directory());
        let root = match said {
            Ok(Some(directory)) => PathBuf::from(directory),
            _ => self.metadata_directory()?,
        };
        // rclone creates it with the mount; if it is missing, the cache is elsewhere.
        match root.is_dir() {
            true => Ok(Some(Cache { root })),
            false => Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!(
                    "the cache of {} is not at {}",
                    self.mount.mount_point.display(),
                    root.display()
                ),
            )),
        }
    }

    /// Path by the rules of rclone's documentation: below `--cache-dir`, by the name and path of
    /// the remote.
    fn metadata_directory(&self) -> io::Result<PathBuf> {
        let below = |variable: &str, rest: &str| {
            self.variable(variable).map(|home| Path::new(home).join(rest))
        };
        let caches = self.setting("cache-dir").map(PathBuf::from);
        let caches = caches
            .or_else(|| below("XDG_CACHE_HOME", "rclone"))
            .or_else(|| below("HOME", ".cache/rclone"));
        let source = self.mount.source.to_str().filter(|_| self.setting("devname").is_none());
        let (Some(caches), Some((name, path))) =
            (caches, source.and_then(|source| source.split_once(':')))
        else {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the place of rclone's cache is not known",
            ));
        };
        let caches = self.process.join("cwd").join(caches);
        Ok(caches.join("vfsMeta").join(name).join(path.trim_matches('/')))
    }

    /// Remote control.
    ///
    /// # Errors
    /// rclone runs without `--rc`, or not on a loopback address.
    pub(super) fn remote_control(&self) -> io::Result<RemoteControl> {
        let on =
            self.setting("rc").is_some_and(|value| matches!(value.as_str(), "" | "true" | "1"));
        if !on {
            let what = format!("rclone at {} runs without --rc", self.mount.mount_point.display());
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        RemoteControl::at(
            self.setting("rc-addr").as_deref().unwrap_or("localhost:5572"),
            &self.process,
        )
    }

    /// Delay between a file's last use and its upload.
    pub(super) fn write_back(&self) -> Duration {
        self.setting("vfs-write-back")
            .and_then(|text| duration(&text))
            .unwrap_or(DEFAULT_WRITE_BACK)
    }

    /// Lifetime of attributes and names in the kernel.
    pub(super) fn attribute_life(&self) -> Duration {
        self.setting("attr-timeout")
            .and_then(|text| duration(&text))
            .unwrap_or(DEFAULT_ATTRIBUTE_LIFE)
    }

    /// Value of `--name`, of `-o name=value` (mount.rclone), or of `RCLONE_NAME`; empty for a flag
    /// that is last or precedes another flag.
    fn setting(&self, name: &str) -> Option<String> {
        let mut found = None;
        for (index, word) in self.words.iter().enumerate() {
            let Some(word) = word.to_str() else { continue };
            let next = || {
                self.words.get(index + 1).and_then(|w| w.to_str()).filter(|w| !w.starts_with('-'))
            };
            if let Some(rest) = word.strip_prefix("--").and_then(|word| word.strip_prefix(name)) {
                match rest.strip_prefix('=') {
                    Some(value) => found = Some(value.to_owned()),
                    // A switch takes no value from the next word.
                    None if rest.is_empty() && name == "rc" => found = Some(String::new()),
                    None if rest.is_empty() => found = Some(next().unwrap_or_default().to_owned()),
                    None => {}
                }
            } else if let Some(options) = word.strip_prefix("-o") {
                let options = if options.is_empty() { next().unwrap_or_default() } else { options };
                for option in options.split(',') {
                    let (key, value) = option.split_once('=').unwrap_or((option, ""));
                    if key.replace('_', "-") == name {
                        found = Some(value.to_owned());
                    }
                }
            }
        }
        let variable = format!("RCLONE_{}", name.replace('-', "_").to_uppercase());
        found.or_else(|| self.variable(&variable)?.to_str().map(str::to_owned))
    }

    fn variable(&self, name: &str) -> Option<&OsStr> {
        self.variables.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_os_str())
    }
}

/// Process that serves the mount, and its arguments.
fn process_of(mount: &MountEntry) -> Option<(Process, Vec<OsString>)> {
    let names_it =
        |words: &[OsString]| words.iter().any(|word| Path::new(word) == mount.mount_point);
    let running = Daemons::running(&NAMES, &[ROOT]);
    let daemon = running.serving(mount, &names_it).into_iter().next()?;
    Some((daemon.process.again().ok()?, daemon.words.clone()))
}

/// Parses a Go duration: `1m30s`, `250ms`, `0`; a number alone is seconds.
fn duration(text: &str) -> Option<Duration> {
    if let Ok(seconds) = text.parse::<f64>() {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let mut total = Duration::ZERO;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let unit = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let seconds = match &rest[..unit] {
            "ms" => 0.001,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            "d" => 86400.0,
            _ => return None,
        };
        total += Duration::try_from_secs_f64(number * seconds).ok()?;
        rest = &rest[unit..];
    }
    Some(total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemons::tests::{Holder, holder};

    fn daemon(words: &str, variables: &[(&str, &str)]) -> Daemon {
        let line = b"66 64 0:42 / /mnt/w rw,nosuid - fuse.rclone cloud:bucket/top rw";
        let info = MountInfo::parse(line).expect("a mount");
        let os = |text: &str| OsString::from(text);
        Daemon {
            mount: info.entries()[0].clone(),
            process: "/proc/1".into(),
            words: words.split(' ').map(os).collect(),
            variables: variables.iter().map(|(name, value)| (os(name), os(value))).collect(),
        }
    }

    #[test]
    fn settings() {
        let check = |words: &str, name: &str, expect: Option<&str>| {
            let daemon = daemon(words, &[("RCLONE_VFS_CACHE_MODE", "full")]);
            assert_eq!(daemon.setting(name).as_deref(), expect, "{words} {name}");
        };
        check("mount cloud: /w --vfs-cache-mode writes", "vfs-cache-mode", Some("writes"));
        check("mount --vfs-cache-mode=writes cloud: /w", "vfs-cache-mode", Some("writes"));
        check("mount cloud: /w", "vfs-cache-mode", Some("full"));
        check("cloud: /w -o rw,vfs_cache_mode=minimal,rc", "vfs-cache-mode", Some("minimal"));
        check("cloud: /w -o rw,vfs_cache_mode=minimal,rc", "rc", Some(""));
        check("mount --rc cloud: /w", "rc", Some(""));
        check("mount --rc-addr :1 cloud: /w", "rc", None);
        check("mount cloud: /w --vfs-write-back", "vfs-write-back", Some(""));
    }

    #[test]
    fn paths_in_the_mount_and_in_the_cache() {
        let daemon =
            daemon("mount cloud:bucket/top /mnt/w --vfs-cache-mode writes", &[("HOME", "/home/u")]);
        assert_eq!(daemon.inside(Path::new("/mnt/w/d/f")), Path::new("d/f"));
        assert_eq!(daemon.shown(Path::new("d/f")), Path::new("/mnt/w/d/f"));
        let expect = Path::new("/home/u/.cache/rclone/vfsMeta/cloud/bucket/top");
        assert_eq!(daemon.metadata_directory().expect("known"), expect);
    }

    #[test]
    fn another_program_under_rclone_s_name_is_not_asked() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let found = |how: Holder<'_>| {
            let (_kept, running) = holder("rclone", how, &["mount", "cloud:", "/mnt/w"]);
            let line = format!("66 64 0:{} / /mnt/w rw - fuse.rclone cloud: rw", running.said);
            let info = MountInfo::parse(line.as_bytes()).expect("a mount");
            let found = process_of(&info.entries()[0]).and_then(|(process, _)| process.number());
            found.is_some() && found == running.process().number()
        };
        assert!(found(Holder::Itself));
        // A link gives a process its own name and not its program's.
        assert!(!found(Holder::Link));
        assert!(!found(Holder::Through("setpriv --no-new-privs")));
    }

    #[test]
    fn durations() {
        let check = |text: &str, expect: Option<u64>| {
            assert_eq!(duration(text).map(|d| d.as_millis()), expect.map(u128::from), "{text}");
        };
        check("0", Some(0));
        check("0s", Some(0));
        check("1m30s", Some(90_000));
        check("250ms", Some(250));
        check("1.5s", Some(1500));
        check("soon", None);
    }
}
