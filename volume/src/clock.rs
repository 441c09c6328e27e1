//! The clock that everything which waits or expires goes by. It is the runtime's, so that a test
//! which pauses the runtime's time also decides when leases end.

use std::time::Instant;

/// The present.
#[must_use]
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
