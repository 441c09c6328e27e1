//! A directory of an export as it is now, by which a gateway finds out if an sshfs mount shows it.
//! Looked at with the caller's rights, and never out of the export.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io,
    os::{fd::AsFd, unix::ffi::OsStrExt as _, unix::ffi::OsStringExt as _},
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
    fs::{AtFlags, Dir, FileType, Mode, Stat, fgetxattr, fstatvfs, statat},
    io::Errno,
    process::{getegid, geteuid},
};

use crate::{
    callers::Caller,
    error::Refusal,
    identity::ViewUser,
    runner::{open_directory, open_export, refuse, wire::ViewMount},
    sys::ActingAs,
};

/// Names of a directory that are read for the first few of them.
const MOST_NAMES: usize = 4096;

/// Looks at the directory.
///
/// # Errors
/// It is not one of the caller's, or can't be looked at.
pub fn take(caller: &Caller, request: FingerprintRequest) -> Result<FingerprintReply, Refusal> {
    let FingerprintRequest { export, sub_path, name } = request;
    let Some(export) = caller.exports.iter().find(|known| known.name == export) else {
        return Err(refuse(format!("there is no export {export:?}")));
    };
    let directory = export.path.clone().into_os_string().into_vec();
    let place = ViewMount { directory, sub_path: sub_path.to_vec(), ..ViewMount::default() };
    let user = caller.user.as_ref().map(ViewUser::from);
    let handle = open_export(&place, user.as_ref())?;
    let _acting = ActingAs::begin(user.as_ref()).map_err(failed)?;
    let sizes = fstatvfs(&handle).map_err(failed)?;
    let itself = statat(&handle, "", AtFlags::EMPTY_PATH).map_err(failed)?;
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
        user: geteuid().as_raw(),
        group: if inherits_group { itself.st_gid } else { getegid().as_raw() },
    })
}

fn failed(error: impl Into<io::Error>) -> Refusal {
    refuse(format!("the directory can't be looked at: {}", error.into()))
}

/// The entry of this name, if it is there.
fn one(directory: impl AsFd, name: &[u8]) -> Result<Option<FileFingerprint>, Refusal> {
    let path = OsStr::from_bytes(name);
    if Path::new(path).file_name() != Some(path) {
        return Err(refuse(format!("{path:?} is no name of a file")));
    }
    match statat(directory, path, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) => Ok(Some(fingerprint(name.to_vec(), &found))),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(failed(error)),
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
    let status = |name: OsString| {
        let found = statat(directory.as_fd(), &name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        Some(fingerprint(name.as_bytes().to_vec(), &found))
    };
    Ok((names.into_iter().filter_map(status).collect(), listed))
}

fn fingerprint(name: Vec<u8>, of: &Stat) -> FileFingerprint {
    FileFingerprint {
        name: name.into(),
        kind: FileType::from_raw_mode(of.st_mode).as_raw_mode(),
        size: of.st_size.cast_unsigned(),
        modified_s: of.st_mtime,
        user: of.st_uid,
        group: of.st_gid,
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
    fn nothing_outside_of_the_callers_exports_is_told() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        std::os::unix::fs::symlink("/etc", place.join("out")).unwrap();
        for (export, sub_path) in [("y", ""), ("x", "out"), ("x", ".."), ("x", "absent")] {
            assert!(of(&place, export, sub_path).is_err(), "{export} {sub_path}");
        }
    }
}
