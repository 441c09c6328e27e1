//! What is in a directory, asked of its executor: that takes one round trip, where a mount needs several, and more while the
//! shell opens its redirects through it.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use nix::libc::{O_RDONLY, O_WRONLY};
use posh_proto::{
    executor::{Exited, RunSpec, exited::How, run_output},
    gateway::{CertainCommand, PlannedStage},
};

use super::{CREDIT_BYTES, Ready, Text, imagine, ready, start, with_little_credit};
use crate::{
    enlisted::{Descriptor, Kind},
    session::Session,
    state::Gateway,
    trace::Tracer,
};

/// Its names, as ls(1) tells them to a pipe.
pub async fn names(
    gateway: &Arc<Gateway>,
    session: &Session,
    text: &Text,
    (number, directory): (usize, &Path),
) -> Option<Vec<OsString>> {
    let words = [OsStr::new("ls"), OsStr::new("-f"), OsStr::new("--"), directory.as_os_str()];
    let argv = words.map(|word| word.as_bytes().to_vec().into()).to_vec();
    let stages = vec![PlannedStage { argv, ..PlannedStage::default() }];
    let command = CertainCommand { stages, cwd: bytes::Bytes::from_static(b"/") };
    let mut commands = imagine(&command, &text.shell(), &text.search)?;
    let null = |fd, flags| Descriptor::imagined(fd, Kind::Null, PathBuf::from("/dev/null"), flags);
    let pipe = Descriptor::imagined(1, Kind::Pipe, PathBuf::new(), O_WRONLY);
    Arc::make_mut(commands.first_mut()?).descriptors = vec![null(0, O_RDONLY), pipe, null(2, O_WRONLY)];
    let run_id = format!("{}-list-{number}", session.id);
    let Ready { executor, connection, spec } = ready(gateway, session, &commands, (&[], &[]), &run_id).await?;
    let executor = gateway.executors.get(executor);
    let started = start::open_in_time(
        executor,
        connection,
        with_little_credit(RunSpec { ahead: true, ..spec }),
        Tracer::default(),
    )
    .await;
    let (mut flight, mut listed, mut is_whole) = (started.ok()?, Vec::new(), false);
    while let Some(message) = flight.output.message().await.ok()? {
        match message.kind {
            Some(run_output::Kind::Chunk(chunk)) => listed.extend_from_slice(&chunk.data),
            Some(run_output::Kind::Exited(Exited { how, .. })) => is_whole = how == Some(How::Code(0)),
            _ => {}
        }
        // It waits for somebody to read on.
        if listed.len() as u64 >= CREDIT_BYTES {
            return None;
        }
    }
    let names = listed.split(|byte| *byte == b'\n').filter(|name| !name.is_empty());
    is_whole.then(|| names.map(|name| OsStr::from_bytes(name).to_owned()).collect())
}
