//! The private directory in which a user's gateways and their clients meet. Names in it follow from
//! a configuration file. Shared by `posh`, which connects, and the gateway, which binds. Makes and
//! checks the directory; opens nothing in it.

use std::{
    env, fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};
use trusted_path::Untrusted;

/// Digits of 5 bits of the configuration path's SHA-256 in a name: 128 bits, so that nobody finds a
/// second path with the same name. A socket's whole path must fit into the 108 bytes of
/// `sockaddr_un` (unix(7)), where 32 hexadecimal digits would leave little for the directory.
const DIGEST_DIGITS: u32 = 26;
const DIGITS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";

/// The file in a session's directory ([`crate::stage::SessionFile`]).
pub const SESSION_FILE: &str = "session";

/// The directory of shims in a session's directory.
pub const SHIMS: &str = "bin";

/// Any permission of the group or of others.
const OF_OTHERS: u32 = 0o077;

/// Reason why the directory can't be used. Its sockets give the right to run commands, so anything
/// unexpected is refused, never repaired.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeDirError {
    /// It could not be made or examined.
    #[error("can't use the runtime directory {}", path.display())]
    Io {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file or a symlink has its name.
    #[error("{} is not a directory; remove it, or set XDG_RUNTIME_DIR", .0.display())]
    NotADirectory(PathBuf),
    /// It belongs to another user.
    #[error(
        "{} belongs to user {owner}, not to user {user}; set XDG_RUNTIME_DIR to a directory of \
         your own",
        path.display()
    )]
    ForeignOwner {
        /// The directory.
        path: PathBuf,
        /// Its owner's uid.
        owner: u32,
        /// Our effective uid.
        user: u32,
    },
    /// Other users could replace it.
    #[error(
        "the runtime directory is not safe from other users: {0}; set XDG_RUNTIME_DIR to a \
         directory of your own"
    )]
    Untrusted(#[source] Untrusted),
    /// Its permissions allow other users access.
    #[error(
        "{} has mode {mode:04o}, which lets other users in; run: chmod 700 {}",
        path.display(), path.display()
    )]
    Open {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
}

/// The stage socket of a gateway, by its gRPC socket.
#[must_use]
pub fn stage_socket(socket: &Path) -> PathBuf {
    socket.with_extension("stage")
}

/// The private directory of one user's gateways.
#[derive(Debug, Clone)]
pub struct RuntimeDir {
    path: PathBuf,
}

impl RuntimeDir {
    /// `$XDG_RUNTIME_DIR/posh`, or `/tmp/posh-UID` where that variable names no directory; made
    /// with mode 0700 if it does not exist. Only root and the user can change any component of its
    /// path ([`trusted_path`]), so that its content is the user's own.
    ///
    /// # Errors
    /// [`RuntimeDirError`] when it can't be made, or is not private to this user.
    pub fn open() -> Result<Self, RuntimeDirError> {
        let user = nix::unistd::geteuid().as_raw();
        let base = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let path = match base.filter(|base| base.is_absolute() && base.is_dir()) {
            Some(base) => base.join("posh"),
            None => PathBuf::from(format!("/tmp/posh-{user}")),
        };
        Self::open_at(path, user)
    }

    /// Like [`RuntimeDir::open`], for a given path and the user with this uid.
    ///
    /// # Errors
    /// As [`RuntimeDir::open`].
    pub fn open_at(path: PathBuf, user: u32) -> Result<Self, RuntimeDirError> {
        let found = match trusted_path::make_last_directory(&path, user) {
            Ok(found) => found,
            Err(Untrusted::Io { path, source }) => {
                return Err(RuntimeDirError::Io { path, source });
            }
            Err(Untrusted::Kind { path, .. } | Untrusted::SharedLink(path)) => {
                return Err(RuntimeDirError::NotADirectory(path));
            }
            Err(Untrusted::ForeignOwner { path, owner, user }) => {
                return Err(RuntimeDirError::ForeignOwner { path, owner, user });
            }
            Err(writable) => return Err(RuntimeDirError::Untrusted(writable)),
        };
        // The walk has made sure that no other user can have changed it meanwhile.
        if fs::symlink_metadata(&path).is_ok_and(|found| !found.is_dir()) {
            return Err(RuntimeDirError::NotADirectory(path));
        }
        if found.owner != user {
            return Err(RuntimeDirError::ForeignOwner { path, owner: found.owner, user });
        }
        if found.mode & OF_OTHERS != 0 {
            return Err(RuntimeDirError::Open { path, mode: found.mode });
        }
        Ok(Self { path })
    }

    /// The directory itself.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The gRPC socket of the gateway that serves this configuration. `config` is
    /// canonical (absolute, no symlink), so that one file has one gateway.
    #[must_use]
    pub fn socket_path(&self, config: &Path) -> PathBuf {
        self.named(config, "sock")
    }

    /// Log file of that gateway when it runs in the background.
    #[must_use]
    pub fn log_path(&self, config: &Path) -> PathBuf {
        self.named(config, "log")
    }

    /// Lock file, so that only one process starts that gateway.
    #[must_use]
    pub fn lock_path(&self, config: &Path) -> PathBuf {
        self.named(config, "lock")
    }

    fn named(&self, config: &Path, extension: &str) -> PathBuf {
        let digest = Sha256::digest(config.as_os_str().as_bytes());
        let bits = digest
            .iter()
            .take(size_of::<u128>())
            .fold(0_u128, |bits, byte| bits << 8 | u128::from(*byte));
        let digit = |place: u32| {
            char::from(DIGITS[usize::try_from(bits >> (5 * place) & 31).expect("below 32")])
        };
        let name: String = (0..DIGEST_DIGITS).rev().map(digit).collect();
        self.path.join(format!("gateway-{name}.{extension}"))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{
        DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, chown, symlink,
    };

    use super::*;

    fn own_uid() -> u32 {
        nix::unistd::geteuid().as_raw()
    }

    #[test]
    fn it_is_made_private_and_can_be_opened_again() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("posh");
        for _ in 0..2 {
            let opened = RuntimeDir::open_at(path.clone(), own_uid()).unwrap();
            assert_eq!(opened.path(), path);
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o700);
        }
    }

    #[test]
    fn whatever_others_could_have_made_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let at = |name: &str| parent.path().join(name);
        fs::create_dir(at("open")).unwrap();
        fs::set_permissions(at("open"), fs::Permissions::from_mode(0o750)).unwrap();
        fs::write(at("file"), "").unwrap();
        fs::DirBuilder::new().mode(0o700).create(at("target")).unwrap();
        symlink(at("target"), at("link")).unwrap();

        let open = |name: &str, user: u32| RuntimeDir::open_at(at(name), user).unwrap_err();
        assert!(matches!(open("open", own_uid()), RuntimeDirError::Open { mode: 0o750, .. }));
        assert!(matches!(open("file", own_uid()), RuntimeDirError::NotADirectory(_)));
        assert!(matches!(open("link", own_uid()), RuntimeDirError::NotADirectory(_)));
        assert!(matches!(open("target", own_uid() + 1), RuntimeDirError::ForeignOwner { .. }));
        assert!(matches!(open("missing/deeper", own_uid()), RuntimeDirError::Io { .. }));
    }

    #[test]
    fn what_it_lies_in_is_nobody_else_s() {
        let parent = tempfile::tempdir().unwrap();
        let base = parent.path().join("base");
        let path = base.join("posh");
        fs::create_dir(&base).unwrap();
        for mode in [0o770, 0o707, 0o777] {
            fs::set_permissions(&base, fs::Permissions::from_mode(mode)).unwrap();
            let refused = RuntimeDir::open_at(path.clone(), own_uid()).unwrap_err();
            assert!(
                matches!(refused, RuntimeDirError::Untrusted(_)) && !path.exists(),
                "{refused}"
            );
        }
        if own_uid() == 0 {
            // As root has it after `sudo -E`: another user could rename it.
            fs::set_permissions(&base, fs::Permissions::from_mode(0o700)).unwrap();
            chown(&base, Some(54_321), None).unwrap();
            let refused = RuntimeDir::open_at(path.clone(), 0).unwrap_err();
            assert!(
                matches!(refused, RuntimeDirError::ForeignOwner { owner: 54_321, .. })
                    && !path.exists()
            );
        }
    }

    #[test]
    fn each_configuration_has_names_of_its_own() {
        let parent = tempfile::tempdir().unwrap();
        let dir = RuntimeDir::open_at(parent.path().join("posh"), own_uid()).unwrap();
        let socket = dir.socket_path(Path::new("/etc/posh/mounts.toml"));
        assert_ne!(socket, dir.socket_path(Path::new("/home/u/mounts.toml")));
        assert_eq!(socket, dir.path().join("gateway-7cx212ge5wc3y5rgggaw6na8hq.sock"));
        assert_eq!(dir.log_path(Path::new("/etc/posh/mounts.toml")), socket.with_extension("log"));
        assert_eq!(
            dir.lock_path(Path::new("/etc/posh/mounts.toml")),
            socket.with_extension("lock")
        );
    }
}
