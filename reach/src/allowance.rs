//! What the executor of a run may still say: of each outlet as many bytes as it was given credit
//! for, and beside that as much as one message may hold. A sound executor keeps to that, so whoever
//! exceeds it is a broken peer, and what the workstation holds for a run is bounded by what the
//! workstation has asked for.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use posh_proto::{
    MAX_MESSAGE_BYTES,
    executor::{Chunk, RunOutput, RunSpec, run_output::Kind},
    message_bytes,
};
use tonic::Status;

/// An executor sends once more, out of credit, what it reads of each source of an outlet that was
/// closed.
const LAST_READ_BYTES: u64 = 16 << 10;
/// Ends of commands, with what these have changed, and all else that is no stream: less than 1 MiB
/// of most runs.
const TOLD_BYTES: usize = MAX_MESSAGE_BYTES;
/// What keeping such a message costs beside its contents.
const MESSAGE_BYTES: usize = 256;

/// See the module's text. Clones are of one run, which may go on over several connections.
#[derive(Debug, Clone)]
pub struct Allowance(Arc<Mutex<Left>>);

#[derive(Debug)]
struct Left {
    outlets: HashMap<u32, Outlet>,
    told_bytes: usize,
}

#[derive(Debug)]
struct Outlet {
    bytes: u64,
    sources: u64,
    is_closed: bool,
}

/// What a peer has said beyond what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Exceeded {
    /// Bytes of an output.
    #[error("it sent more of an output than it was asked for")]
    Credit,
    /// Of its commands, and of what they have changed.
    #[error("it told of more than a run can have done")]
    Told,
    /// Of the end of a command.
    #[error("it told of an end that no command can have")]
    End,
}

impl Allowance {
    /// For a run that is about to be asked for.
    #[must_use]
    pub fn of(spec: &RunSpec) -> Self {
        let outlet = |outlet: &posh_proto::executor::Outlet| {
            let sources = outlet.sources.len() as u64;
            (
                outlet.stream,
                Outlet { bytes: outlet.initial_credit_bytes, sources, is_closed: false },
            )
        };
        let outlets = spec.outlets.iter().map(outlet).collect();
        Self(Arc::new(Mutex::new(Left { outlets, told_bytes: TOLD_BYTES })))
    }

    /// So many more bytes of an outlet can be taken; to be called before the executor is told.
    pub fn give(&self, stream: u32, bytes: u64) {
        if let Some(outlet) = self.lock().outlets.get_mut(&stream) {
            outlet.bytes = outlet.bytes.saturating_add(bytes);
        }
    }

    /// Nobody reads an outlet any more; to be called before the executor is told.
    pub fn close(&self, stream: u32) {
        if let Some(outlet) = self.lock().outlets.get_mut(&stream)
            && !std::mem::replace(&mut outlet.is_closed, true)
        {
            outlet.bytes = outlet.bytes.saturating_add(outlet.sources * LAST_READ_BYTES);
        }
    }

    /// Charges a message.
    ///
    /// # Errors
    /// `Exceeded`, and then nobody should keep it.
    pub fn take(&self, message: &RunOutput) -> Result<(), Exceeded> {
        let mut left = self.lock();
        match &message.kind {
            Some(Kind::Chunk(Chunk { stream, data })) => {
                let bytes = left
                    .outlets
                    .get_mut(stream)
                    .map(|outlet| &mut outlet.bytes)
                    .ok_or(Exceeded::Credit)?;
                *bytes = bytes.checked_sub(data.len() as u64).ok_or(Exceeded::Credit)?;
            }
            // They are small, come as often as streams go on, and nobody keeps them.
            Some(Kind::End(_) | Kind::Credit(_) | Kind::Closed(_)) | None => {}
            Some(_) => {
                let bytes = message_bytes(message) + MESSAGE_BYTES;
                left.told_bytes = left.told_bytes.checked_sub(bytes).ok_or(Exceeded::Told)?;
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Left> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a call ended because the peer exceeded its allowance: nothing goes on with such a peer.
/// No peer can make itself look so, for statuses from the wire have no source.
#[must_use]
pub fn has_exceeded(status: &Status) -> bool {
    std::error::Error::source(status).is_some_and(|source| source.is::<Exceeded>())
}

impl From<Exceeded> for Status {
    fn from(exceeded: Exceeded) -> Self {
        let mut status = Self::resource_exhausted(exceeded.to_string());
        status.set_source(Arc::new(exceeded));
        status
    }
}

#[cfg(test)]
mod tests {
    use posh_proto::executor::{self as wire, Exited, Stage};

    use super::*;

    fn message(kind: Kind) -> RunOutput {
        RunOutput { kind: Some(kind) }
    }

    fn chunk(stream: u32, bytes: usize) -> RunOutput {
        message(Kind::Chunk(Chunk { stream, data: vec![0; bytes].into() }))
    }

    fn spec() -> RunSpec {
        let outlet = wire::Outlet { stream: 7, sources: vec![1, 2], initial_credit_bytes: 100 };
        RunSpec { outlets: vec![outlet], stages: vec![Stage::default()], ..RunSpec::default() }
    }

    #[test]
    fn nobody_sends_more_than_the_credit() {
        let allowance = Allowance::of(&spec());
        assert_eq!(allowance.take(&chunk(7, 100)), Ok(()));
        assert_eq!(allowance.take(&chunk(7, 1)), Err(Exceeded::Credit));
        allowance.give(7, 10);
        assert_eq!(allowance.take(&chunk(7, 10)), Ok(()));
        allowance.close(7);
        allowance.close(7);
        let last = 2 * usize::try_from(LAST_READ_BYTES).unwrap();
        assert_eq!(allowance.take(&chunk(7, last)), Ok(()));
        assert_eq!(allowance.take(&chunk(7, 1)), Err(Exceeded::Credit));
        // Not one of the run's.
        assert_eq!(allowance.take(&chunk(8, 1)), Err(Exceeded::Credit));
    }

    #[test]
    fn what_is_told_of_commands_has_a_bound() {
        let allowance = Allowance::of(&spec());
        let path = vec![b'x'; TOLD_BYTES / 2].into();
        let changed = wire::ChangedDirectory { path, ..wire::ChangedDirectory::default() };
        let end = message(Kind::Exited(Exited {
            changed_directories: vec![changed],
            ..Exited::default()
        }));
        assert_eq!([(); 2].map(|()| allowance.take(&end)), [Ok(()), Err(Exceeded::Told)]);
        let status = Status::from(Exceeded::Told);
        assert!(
            has_exceeded(&status) && !has_exceeded(&Status::resource_exhausted(status.message()))
        );
    }
}
