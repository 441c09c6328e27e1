//! Opens the session of a starting shell.

use std::{
    ffi::OsString,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::PathBuf,
    sync::Arc,
};

use bytes::Bytes;
use posh_proto::{PROTOCOL_VERSION, other_version, stage as wire};

use crate::{session::SessionRequest, state::Gateway};

/// Reason for refusing a session, in words for the user.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionRefused {
    /// `posh` speaks another version of the protocol.
    #[error("{0}; `posh gateway stop` ends the one that runs")]
    OtherVersion(String),
    /// The process of `posh` has not the gateway's rights.
    #[error("{0}")]
    Confined(String),
    /// The session's directory could not be made, with the causes.
    #[error("{0}")]
    NotMade(String),
}

/// Opens the session. Searches PATH aside, wherever it leads (`session/shims.rs`).
///
/// # Errors
/// [`SessionRefused`].
pub(crate) fn open(
    gateway: &Arc<Gateway>,
    request: wire::OpenSession,
) -> Result<wire::SessionOpened, SessionRefused> {
    if request.protocol != PROTOCOL_VERSION {
        let words = other_version("posh", request.protocol, "the running gateway");
        return Err(SessionRefused::OtherVersion(words));
    }
    let view = gateway.view();
    let request = SessionRequest {
        pid: request.pid,
        explain: request.explain,
        trace: request.trace,
        split: (request.split > 0).then_some(request.split),
        path: path(request.path),
        stage_program: path(request.stage_program),
    };
    let opened = gateway.sessions.open(request, &gateway.commands, &gateway.told_of(&view.table));
    let (session, shims) = opened.map_err(|error| {
        let cause = std::error::Error::source(&error)
            .map(|source| format!(": {source}"))
            .unwrap_or_default();
        SessionRefused::NotMade(format!("{error}{cause}"))
    })?;
    let shim_directory = Bytes::copy_from_slice(shims.as_os_str().as_bytes());
    Ok(wire::SessionOpened { session: session.id.clone(), shim_directory })
}

fn path(bytes: Bytes) -> PathBuf {
    OsString::from_vec(bytes.into()).into()
}
