//! Records of volume sessions that outlive this process: a new process reads which sessions of
//! earlier processes may still rely on leases ([`Former`]). RFC 8881 (section 8.4.3) has servers
//! keep such records for the same reason.
//!
//! In the state directory each process has `ID.lock`, which it locks as long as it lives (fcntl(2):
//! a child does not inherit such a lock), and the directory `ID` with a file for each session,
//! named `FINGERPRINT.N`, with the session's tree.
//!
//! Invariant: a session has its record before it can have a lease, until its holder has said that
//! it relies on none any more, or is away for longer than leases last. So each new process reads
//! the records of ended ones, and removes them only once the leases of that time have ended: the
//! next start may come sooner.

use std::{
    collections::HashMap,
    ffi::OsString,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    os::unix::{
        ffi::{OsStrExt as _, OsStringExt as _},
        fs::{DirBuilderExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use nix::unistd::geteuid;
use posh_volume::leases::Former;
use rustix::{
    fs::{FlockOperation, fcntl_lock},
    io::Errno,
};
use trusted_path::Untrusted;

const LOCK: &str = "lock";

/// The reason that a session can't be recorded.
#[derive(Debug, thiserror::Error)]
pub enum NotRecorded {
    /// Others could change the directory, or it does not exist.
    #[error("cannot record sessions of volumes: {0}; name another directory (`state`, --state)")]
    Untrusted(#[from] Untrusted),
    /// The system's error.
    #[error(
        "cannot record sessions of volumes in {}: {source}; name another directory (`state`, \
         --state)",
        place.display()
    )]
    Io { place: PathBuf, source: io::Error },
}

/// The records of this process. They stay when it ends, however it does.
#[derive(Debug)]
pub struct Records {
    place: PathBuf,
    /// Made with the first session.
    own: Mutex<Option<OwnRecords>>,
    /// Records of earlier processes, by their sessions' names.
    left: Mutex<HashMap<String, Vec<PathBuf>>>,
}

/// This process's part of the state directory.
#[derive(Debug)]
struct OwnRecords {
    directory: PathBuf,
    sessions: u64,
    /// Locked while the process lives.
    _lock: File,
}

/// Records of earlier processes.
#[derive(Debug, Default)]
pub struct FormerRecords {
    /// Their sessions.
    pub former: Vec<Former>,
    records: HashMap<String, Vec<PathBuf>>,
    place: PathBuf,
    ids: Vec<OsString>,
}

/// The record of one session.
#[derive(Debug)]
pub struct SessionRecord(PathBuf);

impl Records {
    /// Reads the records of earlier processes in this directory. It need not exist before the first
    /// session.
    ///
    /// # Errors
    /// [`NotRecorded`]
    pub fn open(place: &Path) -> Result<(Self, FormerRecords), NotRecorded> {
        let mut left = match trusted_path::directory(place, geteuid().as_raw()) {
            Ok(_) => FormerRecords::read(place)
                .map_err(|source| NotRecorded::Io { place: place.to_owned(), source })?,
            Err(untrusted) if untrusted.is_missing() => FormerRecords::default(),
            Err(untrusted) => return Err(untrusted.into()),
        };
        let records = Mutex::new(std::mem::take(&mut left.records));
        Ok((Self { place: place.to_owned(), own: Mutex::default(), left: records }, left))
    }

    /// Records a session, by the name with which its holder will return.
    ///
    /// # Errors
    /// [`NotRecorded`]: it must not begin.
    pub fn note(&self, name: &str, tree: &Path) -> Result<SessionRecord, NotRecorded> {
        let failed = |source| NotRecorded::Io { place: self.place.clone(), source };
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = &mut *own {
            match own.note(name, tree) {
                // Somebody has deleted the directory: it is made anew.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                noted => return noted.map_err(failed),
            }
        }
        trusted_path::make_directory(&self.place, geteuid().as_raw())?;
        own.insert(OwnRecords::make_in(&self.place).map_err(failed)?)
            .note(name, tree)
            .map_err(failed)
    }

    /// Removes records: the holder of former sessions of that name relies on none of their leases
    /// any more.
    pub fn is_back(&self, name: &str) {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
        left.into_iter().flatten().map(SessionRecord).for_each(SessionRecord::remove);
    }
}

impl OwnRecords {
    fn make_in(place: &Path) -> io::Result<Self> {
        let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
        let id = format!("{}-{since}", std::process::id());
        let path = lock_of(place, id.as_ref());
        let lock =
            OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        let directory = place.join(id);
        let locked =
            fcntl_lock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(io::Error::from);
        let made = locked.and_then(|()| DirBuilder::new().mode(0o700).create(&directory));
        if let Err(error) = made {
            let _ = fs::remove_file(path);
            return Err(error);
        }
        Ok(Self { directory, sessions: 0, _lock: lock })
    }

    fn note(&mut self, name: &str, tree: &Path) -> io::Result<SessionRecord> {
        self.sessions += 1;
        let path = self.directory.join(format!("{name}.{}", self.sessions));
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        let record = SessionRecord(path);
        if let Err(error) = file.write_all(tree.as_os_str().as_bytes()) {
            // An empty one would stand for a session of every tree.
            record.remove();
            return Err(error);
        }
        Ok(record)
    }
}

impl Drop for OwnRecords {
    /// Without sessions nothing is left.
    fn drop(&mut self) {
        if fs::remove_dir(&self.directory).is_ok() {
            let _ = fs::remove_file(self.directory.with_extension(LOCK));
        }
    }
}

impl SessionRecord {
    /// Removes the record: no holder relies on leases of that session any more.
    pub fn remove(self) {
        // A record that stays makes others wait once, after the next start.
        let removed = fs::remove_file(&self.0);
        if let Err(error) = removed.or_else(unless_missing) {
            tracing::warn!(
                path = %self.0.display(),
                %error,
                "the record of a volume's session can't be removed"
            );
        }
    }
}

impl FormerRecords {
    fn read(place: &Path) -> io::Result<Self> {
        let mut left = Self { place: place.to_owned(), ..Self::default() };
        for entry in fs::read_dir(place)? {
            let path = entry?.path();
            let Some(id) = path
                .file_stem()
                .filter(|_| path.extension().is_some_and(|extension| extension == LOCK))
            else {
                continue;
            };
            if !has_ended(&path)? {
                continue;
            }
            for (former, record) in former_in(&place.join(id))? {
                left.records.entry(former.name.clone()).or_default().push(record);
                left.former.push(former);
            }
            left.ids.push(id.to_owned());
        }
        Ok(left)
    }

    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Removes the records, once the leases of that time have ended.
    pub async fn remove_after(self, time: Duration) {
        tokio::time::sleep(time).await;
        let removing =
            tokio::task::spawn_blocking(move || self.ids.iter().try_for_each(|id| self.remove(id)));
        if let Ok(Err(error)) = removing.await {
            tracing::warn!(%error, "what an earlier executor has left can't be removed");
        }
    }

    fn remove(&self, id: &OsString) -> io::Result<()> {
        let lock = lock_of(&self.place, id);
        // Between creating and locking its file a process looks as if it had ended.
        if !has_ended(&lock)? {
            return Ok(());
        }
        for gone in [fs::remove_dir_all(self.place.join(id)), fs::remove_file(lock)] {
            // Another process may have removed it first.
            gone.or_else(unless_missing)?;
        }
        Ok(())
    }
}

fn unless_missing(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

fn lock_of(place: &Path, id: &std::ffi::OsStr) -> PathBuf {
    place.join(id).with_extension(LOCK)
}

/// Returns true if the process with that lock has ended.
fn has_ended(lock: &Path) -> io::Result<bool> {
    let file = match File::open(lock) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        file => file?,
    };
    match fcntl_lock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(true),
        Err(Errno::AGAIN | Errno::ACCESS) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

fn former_in(directory: &Path) -> io::Result<Vec<(Former, PathBuf)>> {
    let entries = match fs::read_dir(directory) {
        // The process has ended before it made one.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let read = |path: PathBuf| {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        // Empty if the process was killed meanwhile: an empty path overlaps with every tree.
        let tree = PathBuf::from(OsString::from_vec(fs::read(&path)?));
        Ok((Former { name, tree }, path))
    };
    let found = entries.map(|entry| read(entry?.path()));
    // Another process may have removed it meanwhile: its holder is back, or its time is over.
    let is_there = |read: &io::Result<_>| {
        read.as_ref().err().is_none_or(|error| error.kind() != io::ErrorKind::NotFound)
    };
    found.filter(is_there).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;

    fn former(name: &str, tree: &str) -> Former {
        Former { name: name.to_owned(), tree: tree.into() }
    }

    #[tokio::test]
    async fn what_a_process_leaves_is_found_by_all_that_start_until_it_is_removed() {
        let place = tempfile::tempdir().unwrap();
        let (records, left) = Records::open(place.path()).unwrap();
        assert!(left.former.is_empty());
        let ended = records.note("aa", Path::new("/srv/one")).unwrap();
        let _stays = records.note("aa", Path::new("/srv/one")).unwrap();
        let _too = records.note("bb", Path::new("/srv/two \n")).unwrap();
        ended.remove();
        // As after SIGKILL: the lock is released, the records stay.
        drop(records);
        for _ in 0..2 {
            let (_, mut left) = Records::open(place.path()).unwrap();
            left.former.sort_by(|one, other| one.name.cmp(&other.name));
            assert_eq!(left.former, [former("aa", "/srv/one"), former("bb", "/srv/two \n")]);
        }
        let (last, left) = Records::open(place.path()).unwrap();
        last.is_back("aa");
        assert_eq!(
            FormerRecords::read(place.path()).unwrap().former,
            [former("bb", "/srv/two \n")]
        );
        left.remove_after(Duration::ZERO).await;
        drop(last);
        assert!(Records::open(place.path()).unwrap().1.former.is_empty());
    }

    #[test]
    fn a_record_that_was_not_written_to_its_end_stands_for_every_tree() {
        let place = tempfile::tempdir().unwrap();
        let (records, _) = Records::open(place.path()).unwrap();
        let _stays = records.note("aa", Path::new("")).unwrap();
        drop(records);
        let (_records, left) = Records::open(place.path()).unwrap();
        assert!(posh_volume::leases::overlap(&left.former[0].tree, Path::new("/srv")));
    }

    #[test]
    fn others_can_read_nothing_of_it_and_without_sessions_nothing_is_left() {
        let top = tempfile::tempdir().unwrap();
        let place = top.path().join("state");
        let (records, _) = Records::open(&place).unwrap();
        assert!(!place.exists());
        let ended = records.note("aa", Path::new("/srv")).unwrap();
        let directories = || {
            fs::read_dir(&place)
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .filter(|path| path.is_dir())
        };
        assert!(
            directories().all(|directory| fs::metadata(directory).unwrap().mode() & 0o777 == 0o700)
        );
        assert_eq!(directories().count(), 1);
        ended.remove();
        drop(records);
        assert_eq!(fs::read_dir(&place).unwrap().count(), 0);
    }

    #[test]
    fn what_others_can_change_is_not_believed() {
        let place = tempfile::tempdir().unwrap();
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Records::open(place.path()).is_err());
    }
}
