//! Access check for a gateway's clients: processes of its own user. The directory of the sockets
//! already excludes other users; this check holds if somebody has opened it, and against a root
//! that means another gateway.

use std::io;

pub use fs_mapper::peer::Peer;
use tokio::net::UnixStream;

/// The peer is another user's process, by its effective user ID when it connected.
#[derive(Debug, thiserror::Error)]
#[error("process of user {0} is not ours")]
pub struct Stranger(u32);

/// Returns the peer, if it is this user's.
///
/// # Errors
/// [`Stranger`], in an [`io::Error`] of kind `PermissionDenied`.
pub fn own(socket: &UnixStream) -> io::Result<Peer> {
    let peer = Peer::of(socket)?;
    if peer.user != nix::unistd::geteuid().as_raw() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, Stranger(peer.user)));
    }
    Ok(peer)
}
