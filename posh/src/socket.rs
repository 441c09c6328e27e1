//! Connections to the stage socket.

use std::{io, os::unix::net::UnixStream, path::Path, time::Duration};

use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
    sockopt::{Timeout, set_socket_timeout},
};

/// Connects, with a timeout for that and for each read and write. `UnixStream::connect` alone would
/// wait without limit for a stopped gateway whose queue of connections is full.
///
/// # Errors
/// No gateway listens there; `WouldBlock` on a timeout.
pub fn connect_within(limit: Duration, path: &Path) -> io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    for kind in [Timeout::Send, Timeout::Recv] {
        set_socket_timeout(&socket, kind, Some(limit))?;
    }
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_full_queue_of_connections_is_not_waited_for_without_limit() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gateway.stage");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let limit = Duration::from_millis(10);
        let connections: Vec<_> = (0..4).map(|_| connect_within(limit, &path)).collect();
        assert!(connections[0].is_ok());
        let last = connections[3].as_ref().unwrap_err();
        assert_eq!(last.kind(), io::ErrorKind::WouldBlock);
    }
}
