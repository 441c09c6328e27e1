//! Opens a session. Every shell waits for it, so that it uses the stage socket, with one message
//! each way; setting up the gRPC client takes half a millisecond.
//!
//! Invariant: a session is taken only from a process with exactly this process's own rights
//! ([`rights`]), since the shell will execute what lies in the session's directory. A confined
//! program that can write the runtime directory could otherwise put itself in the gateway's place.
//! A stage program does not compare rights, which would cost each command 0.1 ms: its socket is the
//! one that its session names.

use std::{
    ffi::OsString,
    io,
    os::{
        fd::AsRawFd,
        unix::{ffi::OsStringExt, net::UnixStream},
    },
    path::{Path, PathBuf},
};

use bytes::BytesMut;
use fs_mapper::{
    peer::Peer,
    rights::{self, Rights},
};
use nix::{
    errno::Errno,
    sys::socket::{MsgFlags, send},
};
use posh_proto::{
    frame,
    runtime::stage_socket,
    stage::{OpenSession, SessionOpened, ToGateway, ToStage, to_gateway, to_stage},
};

use super::{
    GatewayPlace,
    client::{ANSWER_TIMEOUT, expect_own},
    reach_by,
};
use crate::{Error, socket::connect_within};

/// Bytes of an answer: a name and a path.
const ANSWER_BYTES: usize = 4 << 10;

/// A session, which lives as long as the process that it was opened for.
#[derive(Debug)]
pub struct OpenedSession {
    /// Directory of its shims.
    pub shims: PathBuf,
    /// Its name.
    pub id: String,
}

/// Opens a session that lives as long as the process named in it; starts the gateway if needed.
///
/// # Errors
/// [`Error::NoSession`], and any error of reaching the gateway.
pub fn open_session(place: &GatewayPlace, request: &OpenSession) -> Result<OpenedSession, Error> {
    let ask = || {
        let (stream, gateway) = reach_by(place, connect)?;
        let question = encoded(request.clone());
        let refused = |what| Error::NoSession { socket: place.socket().to_owned(), what };
        // It can't be asked to end either, with other rights than its own.
        let process = gateway.number.map(|number| format!(" (process {number})"));
        let process = process.unwrap_or_default();
        let unlike =
            |why| refused(format!("{why}; it{process} ends when its last shell has ended"));
        match converse(&stream, &question, || why_unbelievable(&gateway)) {
            Ok(Some((to_stage::Kind::SessionRefused(why), None))) => Err(refused(why)),
            Ok(Some((to_stage::Kind::SessionRefused(why), Some(_)))) => Err(unlike(why)),
            Ok(Some((_, Some(why)))) => Err(unlike(why)),
            Ok(Some((to_stage::Kind::SessionOpened(opened), None))) => {
                let SessionOpened { session, shim_directory } = opened;
                let shims = PathBuf::from(OsString::from_vec(shim_directory.into()));
                Ok(Some(OpenedSession { shims, id: session }))
            }
            Ok(Some(_)) => Err(refused("it said something else".to_owned())),
            Ok(None) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(refused(format!("no answer within {} s", ANSWER_TIMEOUT.as_secs())))
            }
            Err(error) => Err(refused(error.to_string())),
        }
    };
    // The gateway was about to end, being idle; a second attempt finds a new one.
    match ask()?.map_or_else(ask, |opened| Ok(Some(opened)))? {
        Some(opened) => Ok(opened),
        None => {
            let what =
                "it closed the connection; is it of another version? `posh gateway stop` ends it"
                    .to_owned();
            Err(Error::NoSession { socket: place.socket().to_owned(), what })
        }
    }
}

fn encoded(request: OpenSession) -> BytesMut {
    let mut message = BytesMut::new();
    frame::encode(&ToGateway { kind: Some(to_gateway::Kind::OpenSession(request)) }, &mut message);
    message
}

fn connect(socket: &Path) -> Result<(UnixStream, Peer), Error> {
    let not_running = |source| Error::NotRunning { socket: socket.to_owned(), source };
    let stream = connect_within(ANSWER_TIMEOUT, &stage_socket(socket)).map_err(not_running)?;
    let gateway = expect_own(&stream, socket)?;
    Ok((stream, gateway))
}

/// Reason for not taking a session from this process: its rights are not ours.
fn why_unbelievable(gateway: &Peer) -> Option<String> {
    let compare = || Rights::own()?.difference(&gateway.process()?, rights::at_once);
    match compare() {
        Ok(what) => what
            .map(|what| format!("it does not run with this process's own rights, but with {what}")),
        Err(_) => Some("the rights of its process can't be told".to_owned()),
    }
}

/// Sends all of it, without SIGPIPE: its disposition belongs to the user.
fn send_all(stream: &UnixStream, mut message: &[u8]) -> Result<(), Errno> {
    while !message.is_empty() {
        match send(stream.as_raw_fd(), message, MsgFlags::MSG_NOSIGNAL) {
            Ok(sent) => message = &message[sent..],
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Asks, does other work while the gateway prepares its answer, and returns both. `None` when the
/// gateway closes the connection.
fn converse<T>(
    stream: &UnixStream,
    question: &[u8],
    meanwhile: impl FnOnce() -> T,
) -> io::Result<Option<(to_stage::Kind, T)>> {
    match send_all(stream, question) {
        Err(Errno::EPIPE | Errno::ECONNRESET) => return Ok(None),
        sent => sent?,
    }
    let done = meanwhile();
    let mut answer = BytesMut::new();
    loop {
        if let Some(message) = frame::decode::<ToStage>(&mut answer).map_err(io::Error::other)? {
            return Ok(message.kind.map(|kind| (kind, done)));
        }
        let mut part = [0; ANSWER_BYTES];
        match io::Read::read(&mut &*stream, &mut part) {
            Ok(0) => return Ok(None),
            Ok(count) => answer.extend_from_slice(&part[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Err(error) => return Err(error),
        }
    }
}
