//! A directory of an export as it is now, by which a gateway finds out if an sshfs mount shows it.
//! Looked at with the caller's rights, and never out of the export.
//!
//! Invariant: nothing is asked of a file system that is mounted in the directory: it may hang, and
//! this process with it, whatever signal it gets.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read as _},
    os::{
        fd::{AsFd, AsRawFd as _, OwnedFd},
        unix::{
            ffi::{OsStrExt as _, OsStringExt as _},
            fs::MetadataExt as _,
        },
    },
    path::Path,
};

use posh_proto::{
    codec::FINGERPRINTS,
    executor::{
        FileFingerprint, FileSystemSizes, FingerprintReply, FingerprintRequest,
        fingerprint_reply::Listed,
    },
};
use rustix::{
    fs::{
        AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fgetxattr, fstat, fstatvfs,
        openat2, statat,
    },
    io::Errno,
    process::{getegid, geteuid},
};

use serde::Serialize;

use crate::{
    audit::{AuditLog, shown},
    callers::Caller,
    error::Refusal,
    identity::ViewUser,
    runner::{open_directory, open_export, refuse, wire::ViewMount},
    sys::ActingAs,
};

/// Names of a directory that are read for the first few of them.
const MOST_NAMES: usize = 4096;

/// Beginning of the names of files whose content is told: a gateway makes them to be told.
const TOLD: &[u8] = b".posh-";

/// Their size at most.
const MOST_CONTENT_BYTES: u64 = 64;

/// Command that tells about as much.
const COMMAND: &str = "ls";

/// Line of the audit record about a look.
#[derive(Serialize)]
struct LookRecord<'a> {
    identity: &'a str,
    peer: &'a str,
    export: String,
    sub_path: String,
    name: String,
}

/// Bytes of each text in the record at most.
const RECORDED_BYTES: usize = 512;

/// Records that the directory is going to be looked at.
///
/// # Errors
/// The record can't be written.
pub async fn record(
    audit: &AuditLog,
    caller: &Caller,
    peer: &str,
    request: &FingerprintRequest,
) -> Result<(), Refusal> {
    let line = LookRecord {
        identity: caller.name(),
        peer,
        export: shown(request.export.as_bytes(), RECORDED_BYTES),
        sub_path: shown(&request.sub_path, RECORDED_BYTES),
        name: shown(&request.name, RECORDED_BYTES),
    };
    audit.begin("look", Some(caller.name()), &line).await
}

/// Looks at the directory.
///
/// # Errors
/// It is not one of the caller's, or can't be looked at.
pub fn take(caller: &Caller, request: FingerprintRequest) -> Result<FingerprintReply, Refusal> {
    let FingerprintRequest { export, sub_path, name } = request;
    caller.require_command(COMMAND)?;
    let Some(export) = caller.exports.iter().find(|known| known.name == export) else {
        return Err(refuse(format!("there is no export {export:?}")));
    };
    export.require_place()?;
    let directory = export.path.clone().into_os_string().into_vec();
    let place = ViewMount { directory, sub_path: sub_path.to_vec(), ..ViewMount::default() };
    let user = caller.user.as_ref().map(ViewUser::from);
    let handle = open_export(&place, user.as_ref())?;
    let _acting = ActingAs::begin(user.as_ref()).map_err(failed)?;
    let sizes = fstatvfs(&handle).map_err(failed)?;
    let itself = statat(&handle, "", AtFlags::EMPTY_PATH).map_err(failed)?;
    let own = user.as_ref().map_or_else(|| geteuid().as_raw(), |user| user.uid);
    let inherits_group = Mode::from_raw_mode(itself.st_mode).contains(Mode::SGID);
    let directory = open_directory(&handle, Path::new("."));
    let (entries, listed) = match &directory {
        _ if !name.is_empty() => (one(&handle, &name)?.into_iter().collect(), Listed::Not),
        Some(directory) => list(directory).map_err(failed)?,
        None => (Vec::new(), Listed::Not),
    };
    Ok(FingerprintReply {
        file_system: Some(FileSystemSizes {
            bytes: sizes.f_blocks.saturating_mul(sizes.f_frsize),
            free_bytes: sizes.f_bfree.saturating_mul(sizes.f_frsize),
            files: sizes.f_files,
            free_files: sizes.f_ffree,
            longest_name: sizes.f_namemax,
        }),
        directory: Some(fingerprint(Vec::new(), &itself)),
        entries,
        listed: listed.into(),
        has_default_acl: directory.is_none_or(|directory| has_default_acl(&directory)),
        user: own,
        exchangeable: is_exchangeable(&handle, own),
        group: match &user {
            _ if inherits_group => itself.st_gid,
            Some(user) => user.gid,
            None => getegid().as_raw(),
        },
    })
}

fn failed(error: impl Into<io::Error>) -> Refusal {
    refuse(format!("the directory can't be looked at: {}", error.into()))
}

/// Returns true if others than root and `own` may put another directory in the place of this one,
/// or of one above it.
fn is_exchangeable(handle: &OwnedFd, own: u32) -> bool {
    let Ok(path) = std::fs::read_link(format!("/proc/self/fd/{}", handle.as_raw_fd())) else {
        return true;
    };
    let may_change = |above: &Path| {
        std::fs::symlink_metadata(above).map_or(true, |above| {
            let is_theirs = ![0, own].contains(&above.uid());
            is_theirs || above.mode() & 0o022 != 0 && above.mode() & 0o1000 == 0
        })
    };
    path.ancestors().skip(1).any(may_change)
}

/// The entry of this name, if it is there.
fn one(directory: impl AsFd, name: &[u8]) -> Result<Option<FileFingerprint>, Refusal> {
    let path = OsStr::from_bytes(name);
    if Path::new(path).file_name() != Some(path) {
        return Err(refuse(format!("{path:?} is no name of a file")));
    }
    match look_at(&directory, path) {
        Ok(found) => {
            let is_told = name.starts_with(TOLD) && FileType::from_raw_mode(found.kind).is_file();
            let content = if is_told { content(&directory, path) } else { Vec::new() };
            Ok(Some(FileFingerprint { content: content.into(), ..found }))
        }
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

/// An entry, itself if it is a symbolic link.
fn look_at(directory: impl AsFd, name: &OsStr) -> Result<FileFingerprint, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let handle = openat2(directory, name, flags, Mode::empty(), NO_MOUNT);
    let told = name.as_bytes().to_vec();
    match handle {
        Ok(handle) => Ok(fingerprint(told, &fstat(&handle)?)),
        Err(Errno::XDEV) => Ok(FileFingerprint { name: told.into(), ..Default::default() }),
        Err(error) => Err(error),
    }
}

/// Enters nothing that is mounted.
const NO_MOUNT: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_XDEV);

/// The content of a plain file; nothing if it is long, or may not be read.
fn content(directory: impl AsFd, name: &OsStr) -> Vec<u8> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let Ok(file) = openat2(directory, name, flags, Mode::empty(), NO_MOUNT) else {
        return Vec::new();
    };
    let file = File::from(file);
    let is_short =
        file.metadata().is_ok_and(|found| found.is_file() && found.len() <= MOST_CONTENT_BYTES);
    let mut content = Vec::new();
    match is_short.then(|| file.take(MOST_CONTENT_BYTES).read_to_end(&mut content)) {
        Some(Ok(_)) => content,
        _ => Vec::new(),
    }
}

/// Returns false only if new files of a directory certainly go by their maker's umask (acl(5)).
fn has_default_acl(directory: &File) -> bool {
    let mut nothing: [u8; 0] = [];
    let size = fgetxattr(directory, "system.posix_acl_default", &mut nothing[..]);
    !matches!(size, Err(Errno::NODATA | Errno::OPNOTSUPP))
}

/// The first entries, without those that go meanwhile.
fn list(directory: &File) -> io::Result<(Vec<FileFingerprint>, Listed)> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        if names.len() == MOST_NAMES {
            return Ok((Vec::new(), Listed::Not));
        }
        names.push(OsString::from_vec(name.to_vec()));
    }
    names.sort_unstable();
    let listed = if names.len() > FINGERPRINTS { Listed::First } else { Listed::All };
    names.truncate(FINGERPRINTS);
    let entries = names.iter().filter_map(|name| look_at(directory, name).ok()).collect();
    Ok((entries, listed))
}

fn fingerprint(name: Vec<u8>, of: &Stat) -> FileFingerprint {
    FileFingerprint {
        name: name.into(),
        kind: FileType::from_raw_mode(of.st_mode).as_raw_mode(),
        size: of.st_size.cast_unsigned(),
        modified_s: of.st_mtime,
        user: of.st_uid,
        group: of.st_gid,
        content: Default::default(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{Config, Export};

    fn caller(path: &Path) -> Caller {
        let export = Export {
            name: "x".to_owned(),
            path: path.to_owned(),
            read_only: false,
            exec: false,
            coherence: None,
            linked_from: None,
        };
        Caller { exports: vec![export], ..Caller::anybody(&Config::new(Vec::new())) }
    }

    fn of(path: &Path, export: &str, sub_path: &str) -> Result<FingerprintReply, Refusal> {
        let sub_path = sub_path.as_bytes().to_vec().into();
        let export = export.to_owned();
        take(&caller(path), FingerprintRequest { export, sub_path, ..Default::default() })
    }

    #[test]
    fn a_directory_is_told_with_its_first_entries() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        for number in 0..FINGERPRINTS + 3 {
            fs::write(place.join(format!("{number:04}")), vec![0; number]).unwrap();
        }
        fs::create_dir(place.join("0000d")).unwrap();
        let told = of(&place, "x", "").unwrap();
        assert_eq!((told.entries.len(), told.listed()), (FINGERPRINTS, Listed::First));
        assert_eq!((&told.entries[0].name[..], told.entries[0].size), (&b"0000"[..], 0));
        assert_eq!(told.entries[1].kind, nix::libc::S_IFDIR);
        assert_eq!(told.entries[3].size, 2);
        assert!(told.file_system.unwrap().bytes > 0);
        let below = of(&place, "x", "0000d").unwrap();
        assert_eq!((below.entries.len(), below.listed()), (0, Listed::All));
    }

    #[test]
    fn one_file_is_told() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        fs::write(place.join("f"), "12").unwrap();
        let of = |name: &str| {
            let name = name.as_bytes().to_vec().into();
            let request = FingerprintRequest { export: "x".into(), name, ..Default::default() };
            take(&caller(&place), request)
        };
        let told = of("f").unwrap();
        assert_eq!((told.entries.len(), told.entries[0].size), (1, 2));
        assert!(!told.has_default_acl);
        let made = &told.entries[0];
        assert_eq!((made.user, made.group), (told.user, told.group));
        assert!(of("absent").unwrap().entries.is_empty());
        for name in ["..", ".", "d/f", "/etc/passwd"] {
            assert!(of(name).is_err(), "{name}");
        }
    }

    #[test]
    fn others_may_exchange_what_lies_in_a_directory_that_they_may_change() {
        use std::os::unix::fs::PermissionsExt as _;
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        fs::create_dir_all(place.join("a/b")).unwrap();
        let told = || of(&place, "x", "a/b").unwrap().exchangeable;
        for (mode, expected) in [(0o755, false), (0o775, true), (0o757, true), (0o1777, false)] {
            fs::set_permissions(place.join("a"), fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(told(), expected, "{mode:o}");
        }
        // Its own entries are exchanged by whoever may change it, which the gateway sees itself.
        fs::set_permissions(place.join("a"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(place.join("a/b"), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(!told());
    }

    /// It may hang.
    #[test]
    fn what_is_mounted_there_is_not_looked_at() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        fs::create_dir(place.join("mounted")).unwrap();
        let look = move || {
            use nix::mount::{MsFlags, mount};
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
            let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
            mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
            let at = place.join("mounted");
            mount(Some("none"), &at, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
            let name = b"mounted".to_vec().into();
            let request = FingerprintRequest { export: "x".into(), name, ..Default::default() };
            [of(&place, "x", ""), take(&caller(&place), request)].map(|told| {
                let told = told.unwrap();
                (told.entries.len(), told.entries[0].kind)
            })
        };
        let told = std::thread::spawn(look).join().unwrap();
        assert_eq!(told, [(1, 0), (1, 0)]);
    }

    #[test]
    fn only_a_short_file_of_a_gateway_s_own_is_told_with_its_content() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        fs::write(place.join(".posh-a"), "secret").unwrap();
        fs::write(place.join(".posh-long"), [0; 65]).unwrap();
        fs::write(place.join("other"), "secret").unwrap();
        std::os::unix::fs::symlink("other", place.join(".posh-link")).unwrap();
        for (name, content) in
            [(".posh-a", "secret"), (".posh-long", ""), ("other", ""), (".posh-link", "")]
        {
            let name = name.as_bytes().to_vec().into();
            let request = FingerprintRequest { export: "x".into(), name, ..Default::default() };
            let told = take(&caller(&place), request).unwrap();
            assert_eq!(told.entries[0].content, content);
        }
        let all = of(&place, "x", "").unwrap();
        assert!(all.entries.iter().all(|entry| entry.content.is_empty()));
    }

    #[test]
    fn nothing_outside_of_the_callers_exports_is_told() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        std::os::unix::fs::symlink("/etc", place.join("out")).unwrap();
        for (export, sub_path) in [("y", ""), ("x", "out"), ("x", ".."), ("x", "absent")] {
            assert!(of(&place, export, sub_path).is_err(), "{export} {sub_path}");
        }
    }
}
