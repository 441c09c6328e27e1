//! Long operations, split into steps. Each step queues for a thread like a new job, and needs a
//! permit of its account: copies in memory are CPU-bound, and without the permits an account's
//! threads could occupy all processors.
//!
//! Invariant: a step's permit and the operation's announcement last until its job has ended, also
//! if the call is cancelled before: the job is carried out all the same.

use std::{ops::Range, sync::Arc};

use nix::errno::Errno;

use super::session::Session;
use crate::keeper::Begun;
use crate::store::{Allocation, Answer, Caller, Op, OpenFlags, Place, PositionIn};

/// Bytes of one step of a copy: some 1 ms on a disk. Without kernel preemption, the processor is
/// occupied for that time.
const COPY_STEP_BYTES: u64 = 1 << 20;
/// Limit of bytes copied for one answer.
const COPY_BYTES: u64 = 256 << 20;
/// Bytes of one step of an allocation; tmpfs zeroes what it allocates.
const ALLOCATION_STEP_BYTES: u64 = 4 << 20;
/// Limit of steps of one allocation.
const MAX_ALLOCATION_STEPS: u64 = 1024;

/// See [`Op::CopyRange`] and [`Op::Allocate`].
pub async fn perform(session: &Arc<Session>, caller: &Caller, op: Op) -> Result<Answer, Errno> {
    let intents = session.intents(&op)?;
    let changed = match &op {
        Op::CopyRange { to, .. } => to.file,
        Op::Allocate { place, .. } => *place,
        _ => return Err(Errno::EOPNOTSUPP),
    };
    session.as_caller(caller, move |session| session.check_writing(changed)).await?;
    let mut begun = session.announce(&intents);
    begun.clear().await;
    // Ends with the last holder, which may be a job whose caller has gone.
    let begun = Arc::new(begun);
    match op {
        Op::CopyRange { from, to, length } => copy(session, caller, &begun, from, to, length).await,
        Op::Allocate { place, range, how } => {
            allocate(session, caller, &begun, place, range, how).await
        }
        _ => Err(Errno::EOPNOTSUPP),
    }
}

/// Copies up to [`COPY_BYTES`]. After a partial copy it returns the count; the next call reports
/// the error.
async fn copy(
    session: &Arc<Session>,
    caller: &Caller,
    begun: &Arc<Begun>,
    from: PositionIn<Place>,
    to: PositionIn<Place>,
    length: u64,
) -> Result<Answer, Errno> {
    let length = length.min(COPY_BYTES);
    let mut done = 0;
    loop {
        let step = COPY_STEP_BYTES.min(length - done);
        let held = (session.account.step().await, begun.clone());
        let (from_offset, to_offset) =
            from.offset.checked_add(done).zip(to.offset.checked_add(done)).ok_or(Errno::EFBIG)?;
        let copied = session
            .as_caller_at_low_priority(caller, move |session| {
                let _until_it_is_done = held;
                let source = session.usable(from.file, OpenFlags::READ)?;
                super::files::copy_step(
                    PositionIn { file: &source, offset: from_offset },
                    PositionIn {
                        file: &session.usable(to.file, OpenFlags::WRITE)?,
                        offset: to_offset,
                    },
                    step,
                )
            })
            .await;
        match copied {
            Err(errno) if done == 0 => return Err(errno),
            Err(_) | Ok(0) => break,
            Ok(copied) => done += copied,
        }
        if done >= length {
            break;
        }
    }
    let entry =
        session.as_caller(caller, move |session| session.entry_of_writable(to.file)).await?;
    Ok(Answer::Copied { bytes: done, entry })
}

async fn allocate(
    session: &Arc<Session>,
    caller: &Caller,
    begun: &Arc<Begun>,
    place: Place,
    range: Range<u64>,
    how: Allocation,
) -> Result<Answer, Errno> {
    for step in steps_of(range, how) {
        let held = (session.account.step().await, begun.clone());
        let allocate = move |session: &Arc<Session>| {
            let _until_it_is_done = held;
            super::files::allocate_step(&session.usable(place, OpenFlags::WRITE)?, step, how)
        };
        session.as_caller_at_low_priority(caller, allocate).await?;
    }
    session
        .as_caller(caller, move |session| session.entry_of_writable(place))
        .await
        .map(Answer::Entry)
}

/// Splits an allocation into steps. Collapse and insert are one step, since half of them would be
/// corruption.
fn steps_of(range: Range<u64>, how: Allocation) -> impl Iterator<Item = Range<u64>> {
    let length = range.end.saturating_sub(range.start);
    let step = match how {
        Allocation::CollapseRange | Allocation::InsertRange => u64::MAX,
        _ => ALLOCATION_STEP_BYTES
            .max((length / MAX_ALLOCATION_STEPS).next_multiple_of(ALLOCATION_STEP_BYTES)),
    };
    // One step also for an empty range, so that the kernel refuses it.
    let count = length.div_ceil(step).max(1);
    (0..count).map(move |number| {
        let start = range.start.saturating_add(number.saturating_mul(step));
        start..start.saturating_add(step).min(range.end)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_cover_the_range_and_are_few() {
        for (range, how) in [
            (0..0, Allocation::Extend),
            (5..6, Allocation::KeepSize),
            (1..(300 << 20), Allocation::ZeroRange),
            (0..i64::MAX as u64, Allocation::PunchHole),
            (7..u64::MAX, Allocation::Extend),
            (4096..(1 << 40), Allocation::CollapseRange),
        ] {
            let steps: Vec<_> = steps_of(range.clone(), how).collect();
            assert!(steps.len() as u64 <= MAX_ALLOCATION_STEPS + 1, "{range:?}");
            assert_eq!((steps[0].start, steps.last().unwrap().end), (range.start, range.end));
            assert!(steps.windows(2).all(|pair| pair[0].end == pair[1].start), "{range:?}");
        }
    }
}
