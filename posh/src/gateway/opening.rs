//! Opens a session: the one question that every shell waits for, so it is asked on the stage socket, by
//! one message each way. The gRPC client needs half a millisecond to be there.

use std::{
    io,
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::Path,
};

use bytes::BytesMut;
use nix::sys::socket::{MsgFlags, send};
use posh_proto::{
    frame,
    runtime::stage_socket,
    stage::{OpenSession, SessionOpened, ToGateway, ToStage, to_gateway, to_stage},
};

use super::{Place, client::ANSWER_TIMEOUT, reach_by};
use crate::Error;

/// An answer: a name and a path.
const ANSWER_BYTES: usize = 4 << 10;

/// Opens a session that lives as long as the process named in it, with a gateway that is started if it must be.
///
/// # Errors
/// [`Error::NoSession`], and whatever kept the gateway from being reached.
pub fn open_session(place: &Place, request: OpenSession) -> Result<SessionOpened, Error> {
    let mut question = BytesMut::new();
    frame::encode(&ToGateway { kind: Some(to_gateway::Kind::OpenSession(request)) }, &mut question);
    let ask = || {
        let stream = reach_by(place, connect)?;
        let refused = |what| Error::NoSession { socket: place.socket().to_owned(), what };
        match converse(&stream, &question) {
            Ok(Some(to_stage::Kind::SessionOpened(opened))) => Ok(Some(opened)),
            Ok(Some(to_stage::Kind::SessionRefused(why))) => Err(refused(why)),
            Ok(Some(_)) => Err(refused("it said something else".to_owned())),
            Ok(None) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(refused(format!("no answer within {} s", ANSWER_TIMEOUT.as_secs())))
            }
            Err(error) => Err(refused(error.to_string())),
        }
    };
    // It was about to end for want of work as we came: the next one will do.
    match ask()?.map_or_else(ask, |opened| Ok(Some(opened)))? {
        Some(opened) => Ok(opened),
        None => {
            let what = "it closed the connection; is it of another version? `posh gateway stop` ends it".to_owned();
            Err(Error::NoSession { socket: place.socket().to_owned(), what })
        }
    }
}

fn connect(socket: &Path) -> Result<UnixStream, Error> {
    let not_running = |source| Error::NotRunning { socket: socket.to_owned(), source };
    let stream = UnixStream::connect(stage_socket(socket)).map_err(not_running)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(not_running)?;
    stream.set_write_timeout(Some(ANSWER_TIMEOUT)).map_err(not_running)?;
    Ok(stream)
}

/// `None` when the gateway closes the connection.
fn converse(stream: &UnixStream, mut question: &[u8]) -> io::Result<Option<to_stage::Kind>> {
    while !question.is_empty() {
        // Whose disposition of SIGPIPE this is, is our user's.
        match send(stream.as_raw_fd(), question, MsgFlags::MSG_NOSIGNAL) {
            Ok(sent) => question = &question[sent..],
            Err(nix::Error::EINTR) => {}
            Err(nix::Error::EPIPE | nix::Error::ECONNRESET) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
    let mut answer = BytesMut::new();
    loop {
        if let Some(message) = frame::decode::<ToStage>(&mut answer).map_err(io::Error::other)? {
            return Ok(message.kind);
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
