//! Opens the session of a shell that begins: what its text names is looked at ahead meanwhile.

use std::{
    ffi::OsString,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::PathBuf,
    sync::{Arc, PoisonError},
};

use bytes::Bytes;
use posh_proto::{PROTOCOL_VERSION, gateway::ForeseenCommand, other_version, stage as wire};
use tokio::task::JoinHandle;

use crate::{
    aside::aside_if_far,
    dispatch::{
        self,
        head_start::{self, Text},
    },
    enlisted::Enlisted,
    look_ahead::Looked,
    session::{Request, Session, Taken},
    state::{Gateway, View},
};

/// The session, or why there is none.
pub(crate) fn open(gateway: &Arc<Gateway>, request: wire::OpenSession) -> Result<wire::SessionOpened, String> {
    if request.protocol != PROTOCOL_VERSION {
        let words = other_version("posh", request.protocol, "the running gateway");
        return Err(format!("{words}; `posh gateway stop` ends the one that runs"));
    }
    let view = gateway.view();
    let search = path(request.path.clone());
    let directories: Vec<PathBuf> = std::env::split_paths(&search).collect();
    aside_if_far(&view.table, &directories, || open_with(gateway, &view, search, request))
}

fn open_with(
    gateway: &Arc<Gateway>,
    view: &View,
    search: PathBuf,
    request: wire::OpenSession,
) -> Result<wire::SessionOpened, String> {
    let (ahead, shell) = (request.look_ahead, request.shell);
    let looked = ahead.as_ref().map(|ahead| gateway.look_ahead.begin(view, &gateway.volumes, ahead, &search));
    let Looked { fetched, listed, wanted, later } = looked.unwrap_or_default();
    let request = Request {
        pid: request.pid,
        explain: request.explain,
        trace: request.trace,
        split: (request.split > 0).then_some(request.split),
        path: search.clone(),
        stage_program: path(request.stage_program),
        taken: (!request.taken.is_empty()).then(|| Taken {
            directory: path(request.taken),
            outputs: request.outputs,
            input: request.input,
        }),
    };
    let told = gateway.told_of(&view.table);
    let opened = gateway.sessions.open(request, &gateway.commands, &told);
    let (session, shims) = opened.map_err(|error| {
        let cause = std::error::Error::source(&error).map(|source| format!(": {source}")).unwrap_or_default();
        format!("{error}{cause}")
    })?;
    *session.later.lock().unwrap_or_else(PoisonError::into_inner) = later;
    if let (false, Some(ahead)) = (told.volumes, &ahead) {
        session.untold.expect(&view.table, ahead.followed.clone(), &search);
    }
    let mut is_text_known = false;
    if let (Some(ahead), Some(shell)) = (&ahead, shell) {
        let (commands, environment) = (ahead.commands.iter().cloned().collect(), ahead.environment.clone());
        let text = Text { commands, environment, listed, shell, search };
        if !told.volumes {
            head_start::list(gateway, &session, &text, wanted);
        }
        session.head_start.expect(text);
        is_text_known = true;
    }
    let foreseen = ahead.zip(fetched).filter(|_| told.at_hand);
    let (gateway, session_then) = (Arc::clone(gateway), Arc::clone(&session));
    tokio::spawn(async move {
        // Volumes fetch what is small, and what they have is used here.
        if let Some((ahead, fetched)) = foreseen {
            foretell(Arc::clone(&gateway), Arc::clone(&session_then), ahead.foreseen, fetched).await;
        }
        if is_text_known {
            head_start::begin(gateway, session_then, Vec::new()).await;
        }
    });
    let shim_directory = Bytes::copy_from_slice(shims.as_os_str().as_bytes());
    Ok(wire::SessionOpened { session: session.id.clone(), shim_directory })
}

/// Tells the session which of the commands that its text names stay here, as soon as what they read has been fetched.
async fn foretell(
    gateway: Arc<Gateway>,
    session: Arc<Session>,
    commands: Vec<ForeseenCommand>,
    fetched: JoinHandle<()>,
) {
    let _ = fetched.await;
    let look = move || {
        let commands = commands.into_iter().filter_map(|command| Enlisted::foreseen(command, gateway.mount_namespace));
        let stay =
            commands.filter_map(|mut command| dispatch::has_all_at_hand(&gateway, &mut command).then_some(command));
        gateway.sessions.foretell(&session, stay.map(|command| command.digest()));
    };
    // For some commands it takes a millisecond.
    let _ = tokio::task::spawn_blocking(look).await;
}

fn path(bytes: Bytes) -> PathBuf {
    OsString::from_vec(bytes.into()).into()
}
