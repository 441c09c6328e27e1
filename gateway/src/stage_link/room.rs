//! Connections before their first message. Their number is limited: a new one displaces the one
//! that has been silent the longest.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// Limit on connections; each takes up to some 300 KiB.
const PLACES: usize = 256;
/// Limit on those with a large message: 8 MiB each.
const LARGE_ONES: usize = 8;

/// All of them.
#[derive(Debug, Clone)]
pub struct Room {
    silent: Arc<Mutex<Silent>>,
    large_ones: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct Silent {
    /// Number of connections so far; no number is reused.
    next: u64,
    by_number: BTreeMap<u64, oneshot::Sender<()>>,
}

/// One connection's place, released on drop.
#[derive(Debug)]
pub struct Place {
    number: u64,
    room: Room,
    lost: oneshot::Receiver<()>,
}

impl Default for Room {
    fn default() -> Self {
        Self { silent: Arc::default(), large_ones: Arc::new(Semaphore::new(LARGE_ONES)) }
    }
}

impl Room {
    /// Takes a place for a new connection.
    #[must_use]
    pub fn enter(&self) -> Place {
        let mut silent = self.silent.lock().unwrap_or_else(PoisonError::into_inner);
        if silent.by_number.len() >= PLACES {
            // Dropping its sender notifies the other end.
            silent.by_number.pop_first();
        }
        let number = silent.next;
        silent.next += 1;
        let (sender, lost) = oneshot::channel();
        silent.by_number.insert(number, sender);
        Place { number, room: self.clone(), lost }
    }

    /// Waits until few enough others have a large message.
    pub(super) async fn for_a_large_one(&self) -> OwnedSemaphorePermit {
        let permit = Arc::clone(&self.large_ones).acquire_owned().await;
        permit.expect("it is never closed")
    }
}

impl Place {
    pub(super) fn room(&self) -> &Room {
        &self.room
    }

    /// Completes when another connection has taken the place.
    pub(super) async fn lost(&mut self) {
        let _sender_is_gone = (&mut self.lost).await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.room
            .silent
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .by_number
            .remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_that_is_silent_for_longest_loses_its_place() {
        let room = Room::default();
        let mut places: Vec<Place> = (0..PLACES).map(|_| room.enter()).collect();
        let is_lost =
            |place: &mut Place| place.lost.try_recv() == Err(oneshot::error::TryRecvError::Closed);
        assert!(!places.iter_mut().any(is_lost));
        // One that has spoken has made room.
        drop(places.remove(100));
        places.push(room.enter());
        assert!(!places.iter_mut().any(is_lost));
        places.push(room.enter());
        let lost: Vec<bool> = places.iter_mut().map(is_lost).collect();
        assert!(lost[0] && !lost[1..].contains(&true));
    }
}
