//! Who may talk to a gateway: processes of its own user. The sockets' directory lets nobody else
//! in; this holds where somebody has opened it, and against a root that means another gateway.

use std::io;

use tokio::net::UnixStream;

/// The process at the other end is another user's, by its effective user id when it connected (unix(7), SO_PEERCRED).
#[derive(Debug, thiserror::Error)]
#[error("process of user {0} is not ours")]
pub struct Stranger(u32);

/// Whether the peer is one of ours, and its process id if the kernel knows it.
///
/// # Errors
/// [`Stranger`], in an [`io::Error`] of kind `PermissionDenied`.
pub fn own(socket: &UnixStream) -> io::Result<Option<i32>> {
    let peer = socket.peer_cred()?;
    if peer.uid() == nix::unistd::geteuid().as_raw() {
        Ok(peer.pid())
    } else {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, Stranger(peer.uid())))
    }
}
