//! Queue of messages from the relay to one run's executor. Sending never blocks, so an executor
//! that stops reading delays only its own run.
//!
//! Invariant: the queue is bounded. An input's bytes are limited by the executor's credit
//! ([`GivenCredit`]), in few chunks; credits for one stream are merged; all other messages are sent
//! a few times in a command's life, or by the user.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::BytesMut;
use posh_proto::executor::{Chunk, RunInput, run_input::Kind};
use tokio::sync::mpsc;

/// Limit for merging queued chunks.
const CHUNK_BYTES: usize = 256 << 10;

/// Limit on credit per input. An executor buffers a megabyte of each; more is a fault.
const MOST_GIVEN_BYTES: u64 = 16 << 20;

/// Connection to an executor, with a queue.
#[derive(Debug)]
pub(super) struct Outgoing {
    sender: mpsc::Sender<RunInput>,
    waiting: Arc<Mutex<SendQueue>>,
}

#[derive(Debug, Default)]
struct SendQueue {
    words: VecDeque<Kind>,
    /// A task is sending the queue.
    is_sent: bool,
}

impl Outgoing {
    pub fn new(sender: mpsc::Sender<RunInput>) -> Self {
        Self { sender, waiting: Arc::default() }
    }

    /// Sends in order. The message is dropped if the call is over.
    pub fn send(&self, kind: Kind) {
        let mut waiting = lock(&self.waiting);
        if waiting.is_sent {
            return waiting.push(kind);
        }
        if let Err(mpsc::error::TrySendError::Full(RunInput { kind: Some(kind) })) =
            self.sender.try_send(RunInput { kind: Some(kind) })
        {
            waiting.push(kind);
            waiting.is_sent = true;
            tokio::spawn(send_what_waits(self.sender.clone(), Arc::clone(&self.waiting)));
        }
    }
}

async fn send_what_waits(sender: mpsc::Sender<RunInput>, waiting: Arc<Mutex<SendQueue>>) {
    while let Ok(room) = sender.reserve().await {
        let mut waiting = lock(&waiting);
        match waiting.words.pop_front() {
            Some(kind) => room.send(RunInput { kind: Some(kind) }),
            None => {
                waiting.is_sent = false;
                return;
            }
        }
    }
}

fn lock(waiting: &Mutex<SendQueue>) -> MutexGuard<'_, SendQueue> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SendQueue {
    fn push(&mut self, kind: Kind) {
        // Streams are independent, so a message may overtake those of other streams.
        let merged = match &kind {
            Kind::Chunk(next) => {
                let last = self.words.iter_mut().rev().find_map(|word| match word {
                    Kind::Chunk(last) if last.stream == next.stream => Some(last),
                    _ => None,
                });
                last.is_some_and(|last| append(last, next))
            }
            Kind::Credit(next) => {
                let same = self.words.iter_mut().find_map(|word| match word {
                    Kind::Credit(credit) if credit.stream == next.stream => Some(credit),
                    _ => None,
                });
                same.map(|credit| credit.bytes = credit.bytes.saturating_add(next.bytes)).is_some()
            }
            Kind::Received(next) => match self.words.back_mut() {
                // Cumulative: replaces the previous count.
                Some(Kind::Received(last)) => {
                    *last = *next;
                    true
                }
                _ => false,
            },
            _ => false,
        };
        if !merged {
            self.words.push_back(kind);
        }
    }
}

/// Appends `next` to `last` if it fits, and returns whether it did.
fn append(last: &mut Chunk, next: &Chunk) -> bool {
    if last.data.len() + next.data.len() > CHUNK_BYTES {
        return false;
    }
    let mut both = BytesMut::from(std::mem::take(&mut last.data));
    both.extend_from_slice(&next.data);
    last.data = both.freeze();
    true
}

/// Unused credit from an executor, by input.
#[derive(Debug, Default)]
pub(super) struct GivenCredit(BTreeMap<u32, u64>);

/// Error of an executor that gives more credit than it can buffer.
#[derive(Debug)]
pub(super) struct TooMuch;

impl GivenCredit {
    pub fn give(&mut self, stream: u32, bytes: u64) -> Result<(), TooMuch> {
        let given = self.0.entry(stream).or_default();
        *given = given.saturating_add(bytes);
        if *given > MOST_GIVEN_BYTES { Err(TooMuch) } else { Ok(()) }
    }

    pub fn sent(&mut self, Chunk { stream, data }: &Chunk) {
        if let Some(given) = self.0.get_mut(stream) {
            *given = given.saturating_sub(data.len() as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use posh_proto::executor::Credit;

    use super::*;

    fn chunk(stream: u32, data: &'static [u8]) -> Kind {
        Kind::Chunk(Chunk { stream, data: data.into() })
    }

    #[tokio::test]
    async fn what_waits_keeps_its_order_and_becomes_less() {
        let (sender, mut taken) = mpsc::channel(1);
        let outgoing = Outgoing::new(sender);
        outgoing.send(chunk(1, b"a"));
        for _ in 0..10_000 {
            outgoing.send(chunk(1, b"b"));
            outgoing.send(chunk(3, b"x"));
            outgoing.send(Kind::Credit(Credit { stream: 2, bytes: 3 }));
        }
        outgoing.send(Kind::End(1));
        assert!(
            lock(&outgoing.waiting).words.len() < 10,
            "{:?}",
            lock(&outgoing.waiting).words.len()
        );
        let (mut data, mut credit) = (Vec::new(), 0);
        loop {
            match taken.recv().await.unwrap().kind.unwrap() {
                Kind::Chunk(chunk) if chunk.stream == 3 => {}
                Kind::Chunk(chunk) => data.extend_from_slice(&chunk.data),
                Kind::Credit(given) => credit += given.bytes,
                Kind::End(1) => break,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((data.len(), data[0], data[10_000], credit), (10_001, b'a', b'b', 30_000));
        // What comes later goes the short way again.
        while lock(&outgoing.waiting).is_sent {
            tokio::task::yield_now().await;
        }
        outgoing.send(chunk(1, b"c"));
        assert!(lock(&outgoing.waiting).words.is_empty());
    }

    #[test]
    fn credit_that_no_executor_means_is_noticed() {
        let mut given = GivenCredit::default();
        for _ in 0..100 {
            given.give(1, 1 << 20).unwrap();
            given.sent(&Chunk { stream: 1, data: vec![0; 1 << 20].into() });
        }
        given.give(1, MOST_GIVEN_BYTES).unwrap();
        given.give(2, MOST_GIVEN_BYTES).unwrap();
        assert!(given.give(1, 1).is_err() && given.give(2, u64::MAX).is_err());
    }
}
