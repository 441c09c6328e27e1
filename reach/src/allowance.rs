//! Limits on the messages that the executor of a run may still send: on each outlet as many bytes
//! as it has credit for, and in all other messages together as many as one message may hold. A
//! correct executor stays within them, so a peer that exceeds them is broken. They bound the memory
//! that a run takes on the workstation.

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

/// After an outlet was closed, an executor may send one last read of each of its sources without
/// credit.
const LAST_READ_BYTES: u64 = 16 << 10;
/// Limit for exits of commands with the changed paths, and all else that is no stream: less than
/// 1 MiB in most runs.
const TOLD_BYTES: usize = MAX_MESSAGE_BYTES;
/// Memory overhead of a stored message beside its contents.
const MESSAGE_BYTES: usize = 256;

/// See the module's text. Clones share one run, which may continue over several connections.
#[derive(Debug, Clone)]
pub struct Allowance(Arc<Mutex<AllowanceLeft>>);

#[derive(Debug)]
struct AllowanceLeft {
    outlets: HashMap<u32, Outlet>,
    told_bytes: usize,
}

#[derive(Debug)]
struct Outlet {
    bytes: u64,
    sources: u64,
    is_closed: bool,
}

/// A limit that a peer has exceeded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Exceeded {
    /// More bytes of an outlet than its credit.
    #[error("it sent more of an output than it was asked for")]
    Credit,
    /// Too much about its commands and the paths that they have changed.
    #[error("it told of more than a run can have done")]
    Told,
    /// An exit status or signal that no command can have.
    #[error("it told of an end that no command can have")]
    End,
}

impl Allowance {
    /// Returns the allowance for a run that is about to be requested.
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
        Self(Arc::new(Mutex::new(AllowanceLeft { outlets, told_bytes: TOLD_BYTES })))
    }

    /// Adds credit to an outlet; to be called before the credit is sent.
    pub fn give(&self, stream: u32, bytes: u64) {
        if let Some(outlet) = self.lock().outlets.get_mut(&stream) {
            outlet.bytes = outlet.bytes.saturating_add(bytes);
        }
    }

    /// Marks an outlet as closed by its reader; to be called before the executor is notified.
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
    /// `Exceeded`; the message must be discarded then.
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
            // Small, unlimited in number while streams go on, and not stored.
            Some(Kind::End(_) | Kind::Credit(_) | Kind::Closed(_)) | None => {}
            Some(_) => {
                let bytes = message_bytes(message) + MESSAGE_BYTES;
                left.told_bytes = left.told_bytes.checked_sub(bytes).ok_or(Exceeded::Told)?;
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, AllowanceLeft> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns true if a call ended because the peer exceeded its allowance: don't resume with such a
/// peer. A peer can't forge this, since statuses from the wire have no source.
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
