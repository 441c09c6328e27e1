//! `posh mount`, `posh umount` and `posh volumes`: requests to the gateway. A volume whose gateway
//! is gone is unmounted by this program.

use std::{
    ffi::OsString,
    io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use posh_proto::gateway::{MountVolumeRequest, RecoverVolumeRequest, UnmountVolumeRequest, Volume};
use posh_volume::mounted::MountedVolume;
use serde_json::{Value, json};

use super::tables::{aligned, pretty, shown, text};
use crate::{
    Error,
    error::named,
    gateway::{self, Client, GatewayTarget},
};

/// The export to mount: `EXECUTOR:EXPORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportSource {
    /// Name in the configuration.
    pub executor: String,
    /// Name on the executor.
    pub export: String,
}

/// Options of `posh mount`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MountOptions {
    /// Refuse changes.
    pub read_only: bool,
    /// In bytes.
    pub cache_size: Option<u64>,
    /// Answer writes only when they are on the server.
    pub sync: bool,
    /// Wait without limit for the server.
    pub hard: bool,
}

/// Error of [`parse_source`]: the syntax.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("write it as EXECUTOR:EXPORT, such as store1:logs")]
pub struct SourceSyntax;

/// Error of [`parse_size`], with the syntax.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}; {hint}")]
pub struct SizeFault {
    what: &'static str,
    hint: &'static str,
}

/// Reads `EXECUTOR:EXPORT`.
///
/// # Errors
/// Another syntax.
pub fn parse_source(words: &str) -> Result<ExportSource, SourceSyntax> {
    match words.split_once(':') {
        Some((executor, export)) if !executor.is_empty() && !export.is_empty() => {
            Ok(ExportSource { executor: executor.to_owned(), export: export.to_owned() })
        }
        _ => Err(SourceSyntax),
    }
}

/// Reads a size.
///
/// # Errors
/// Another syntax, or a size out of range.
pub fn parse_size(words: &str) -> Result<u64, SizeFault> {
    fs_mapper::config::cache_size(words).map_err(|(what, hint)| SizeFault { what, hint })
}

/// Mounts an export. Returns the gateway's notice about data that the server lacks, if any.
///
/// # Errors
/// [`Error::MountPoint`], and the gateway's errors.
pub fn mount(
    target: &GatewayTarget,
    source: &ExportSource,
    dir: &Path,
    options: &MountOptions,
) -> Result<String, Error> {
    let path = mount_point(dir)?;
    let place = gateway::require(target)?;
    match mount_once(&place, source, dir, &path, options) {
        // That gateway was about to end. It has taken the connection, and perhaps the request, but
        // has not answered; a volume that it mounted is gone by then.
        Err(error) if error.is_lost_connection() && gateway::has_ended(&place) => {
            mount_once(&place, source, dir, &path, options)
        }
        outcome => outcome,
    }
}

fn mount_once(
    place: &gateway::GatewayPlace,
    source: &ExportSource,
    dir: &Path,
    path: &Path,
    options: &MountOptions,
) -> Result<String, Error> {
    if let Some(left) = mounted_at(path)?.filter(MountedVolume::is_dead) {
        left.unmount().map_err(|source| not_unmounted(path, source))?;
    }
    let is_directory = path
        .metadata()
        .map_err(|source| Error::MountPoint { path: dir.to_owned(), source })?
        .is_dir();
    if !is_directory {
        let source = io::Error::from(io::ErrorKind::NotADirectory);
        return Err(Error::MountPoint { path: dir.to_owned(), source });
    }
    let request = MountVolumeRequest {
        executor: source.executor.clone(),
        export: source.export.clone(),
        path: path.as_os_str().as_bytes().to_vec().into(),
        read_only: options.read_only,
        cache_bytes: options.cache_size.unwrap_or(0),
        sync: options.sync,
        hard: options.hard,
    };
    let notice = gateway::reach(place)?.mount_volume(request)?;
    Ok(if notice.is_empty() { notice } else { format!("mounted: {notice}\n") })
}

/// Unmounts a volume, with or without a gateway that serves it.
///
/// # Errors
/// [`Error::Unmount`], and the gateway's errors.
pub fn unmount(target: &GatewayTarget, dir: &Path) -> Result<String, Error> {
    let path = mount_point(dir)?;
    let running = gateway::find(target)?.map(|place| Client::connect(place.socket()));
    if let Some(Ok(mut gateway)) = running {
        let request = UnmountVolumeRequest { path: path.as_os_str().as_bytes().to_vec().into() };
        return gateway.unmount_volume(request).map(|()| String::new());
    }
    let Some(left) = mounted_at(&path)? else {
        return Err(not_unmounted(&path, io::Error::other("it is no volume of posh")));
    };
    left.unmount().map(|()| String::new()).map_err(|source| not_unmounted(&path, source))
}

/// Copies the data that a volume's server refuses to a directory, then drops it from the volume.
///
/// # Errors
/// [`Error::MountPoint`], and the gateway's errors.
pub fn recover(target: &GatewayTarget, dir: &Path, to: &Path) -> Result<String, Error> {
    let path = mount_point(dir)?;
    let absolute = std::path::absolute(to)
        .map_err(|source| Error::MountPoint { path: to.to_owned(), source })?;
    let request = RecoverVolumeRequest {
        path: path.as_os_str().as_bytes().to_vec().into(),
        to: absolute.as_os_str().as_bytes().to_vec().into(),
    };
    let files = Client::connect(gateway::require(target)?.socket())?.recover_volume(request)?;
    let them = if files == 1 { "1 file is".to_owned() } else { format!("{files} files are") };
    Ok(format!("{them} in {} now, and in the volume no more\n", named(&absolute)))
}

/// Lists the volumes and their state.
///
/// # Errors
/// Any error of asking the gateway; one that does not run is not started.
pub fn list(target: &GatewayTarget, as_json: bool) -> Result<String, Error> {
    let volumes = Client::connect(gateway::require(target)?.socket())?.volumes()?.volumes;
    Ok(if as_json { pretty(&volumes.iter().map(volume_json).collect()) } else { table(&volumes) })
}

/// The mount point's absolute path, without symlinks. A mount that nothing serves any more can't be
/// resolved, so that only its parent is.
fn mount_point(dir: &Path) -> Result<PathBuf, Error> {
    let wrong = |source| Error::MountPoint { path: dir.to_owned(), source };
    let absolute = std::path::absolute(dir).map_err(wrong)?;
    match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) if !absolute.is_symlink() => {
            let parent = parent.canonicalize().map_err(wrong)?;
            let name: OsString = name.to_owned();
            Ok(parent.join(name))
        }
        _ => absolute.canonicalize().map_err(wrong),
    }
}

fn mounted_at(path: &Path) -> Result<Option<MountedVolume>, Error> {
    MountedVolume::at(path).map_err(|source| not_unmounted(path, source))
}

fn not_unmounted(path: &Path, source: io::Error) -> Error {
    Error::Unmount { path: path.to_owned(), source }
}

fn table(volumes: &[Volume]) -> String {
    let heading =
        ["PATH", "SOURCE", "CACHE", "DIRTY", "LEASES", "OPEN", "STATE"].map(str::to_owned);
    let rows = volumes.iter().map(|volume| {
        [
            shown(&volume.path),
            format!("{}:{}", volume.executor, volume.export),
            format!("{} of {}", mebibytes(volume.cached_bytes), mebibytes(volume.cache_bytes)),
            mebibytes(volume.dirty_bytes),
            volume.leases.to_string(),
            volume.open.to_string(),
            volume.state.clone(),
        ]
    });
    aligned(std::iter::once(heading).chain(rows))
}

fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

fn volume_json(volume: &Volume) -> Value {
    json!({
        "path": text(&volume.path),
        "executor": volume.executor,
        "export": volume.export,
        "state": volume.state,
        "read_only": volume.read_only,
        "cached_bytes": volume.cached_bytes,
        "cache_bytes": volume.cache_bytes,
        "dirty_bytes": volume.dirty_bytes,
        "leases": volume.leases,
        "files": volume.files,
        "open": volume.open,
        "watched": volume.watched,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mounted() {
        let source = |executor: &str, export: &str| Ok((executor.to_owned(), export.to_owned()));
        let check = |words: &str, expect: Result<(String, String), ()>| {
            let found =
                parse_source(words).map(|source| (source.executor, source.export)).map_err(drop);
            assert_eq!(found, expect, "{words}");
        };
        check("store1:logs", source("store1", "logs"));
        check("store1:/srv/a:b", source("store1", "/srv/a:b"));
        check("store1", Err(()));
        check(":logs", Err(()));
        check("store1:", Err(()));
    }

    #[test]
    fn the_table_tells_how_each_is() {
        let volume = Volume {
            path: "/mnt/logs".into(),
            executor: "store1".to_owned(),
            export: "logs".to_owned(),
            state: "mounted".to_owned(),
            cached_bytes: 3 << 20,
            cache_bytes: 64 << 20,
            dirty_bytes: 1,
            leases: 12,
            open: 2,
            ..Volume::default()
        };
        let expected = "\
PATH       SOURCE       CACHE            DIRTY  LEASES  OPEN  STATE
/mnt/logs  store1:logs  3 MiB of 64 MiB  1 MiB  12      2     mounted
";
        assert_eq!(table(&[volume]), expected);
    }
}
