//! The clock of all timeouts and leases. It is Tokio's, so that a test that pauses Tokio's time
//! also controls the expiry of leases.

use std::time::Instant;

/// Returns the current time.
#[must_use]
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
