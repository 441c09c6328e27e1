//! Limit on HTTP/2 frames that carry no messages. All connections of a gateway share one thread,
//! and a server could keep it busy with frames that HTTP/2 ignores or answers, which nothing above
//! ever sees.
//!
//! Invariant: what a server makes this process parse is in proportion to the messages that it
//! delivers and to what it was sent, but for a budget by address ([`BUDGET_BYTES`], refilled by
//! [`REFILL_BYTES`] a second), which no reconnect renews. A connection that exceeds it ends with
//! [`Flood`].
//!
//! Data for a stream that was reset counts as a message.

use std::{
    collections::HashMap,
    io,
    pin::Pin,
    sync::{Arc, LazyLock, Mutex, PoisonError},
    task::{Context, Poll},
    time::Instant,
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Budget of one address, and the credit that a connection may save.
const BUDGET_BYTES: u64 = 1 << 20;
/// An idle connection needs 9 bytes a second, for answers to keepalives.
const REFILL_BYTES: u64 = 64 << 10;
/// A byte sent may be answered by so many: by the head and the end of a call, and the return of
/// flow-control credit. Requests are smaller than that.
const ANSWERS: u64 = 4;
/// Length of a frame's header (RFC 9113, section 4.1), and its type for data.
const HEADER_BYTES: usize = 9;
const DATA: u8 = 0;
/// Frames that are answered at once with an acknowledgement, and its length.
const ANSWERED: [(u8, usize); 2] = [(SETTINGS, HEADER_BYTES), (PING, HEADER_BYTES + 8)];
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const ACK: u8 = 1;

/// Error of a connection that has exceeded its budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it floods the connection with HTTP/2 frames that carry no messages")]
pub struct Flood;

/// A connection whose frames are counted.
#[derive(Debug)]
pub struct Metered<S> {
    stream: S,
    meter: Meter,
}

/// Budgets by address, of all servers that this process has connected to.
static BUDGETS: LazyLock<Mutex<HashMap<String, Arc<FrameBudget>>>> = LazyLock::new(Mutex::default);

/// Token bucket.
#[derive(Debug)]
struct FrameBudget(Mutex<BudgetLeft>);

#[derive(Debug)]
struct BudgetLeft {
    bytes: u64,
    as_of: Instant,
}

/// Count of one connection.
#[derive(Debug)]
struct Meter {
    budget: Arc<FrameBudget>,
    /// Bytes that may still come before the budget is charged.
    credit: u64,
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
    /// Rest of the present frame's payload.
    payload_bytes: usize,
}

impl<S> Metered<S> {
    /// Counts the frames of a connection to this address.
    pub fn new(stream: S, address: &str) -> Self {
        Self { stream, meter: Meter::new(FrameBudget::of(address)) }
    }
}

impl FrameBudget {
    fn of(address: &str) -> Arc<Self> {
        let mut budgets = BUDGETS.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(budgets.entry(address.to_owned()).or_default())
    }

    fn take(&self, bytes: u64) -> Result<(), Flood> {
        let mut left = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = left.as_of.elapsed().as_millis();
        let refill = u64::try_from(passed).unwrap_or(u64::MAX).saturating_mul(REFILL_BYTES) / 1000;
        if refill > 0 {
            *left = BudgetLeft {
                bytes: left.bytes.saturating_add(refill).min(BUDGET_BYTES),
                as_of: Instant::now(),
            };
        }
        left.bytes = left.bytes.checked_sub(bytes).ok_or(Flood)?;
        Ok(())
    }
}

impl Default for FrameBudget {
    fn default() -> Self {
        Self(Mutex::new(BudgetLeft { bytes: BUDGET_BYTES, as_of: Instant::now() }))
    }
}

impl Meter {
    fn new(budget: Arc<FrameBudget>) -> Self {
        Self { budget, credit: 0, header: [0; HEADER_BYTES], header_bytes: 0, payload_bytes: 0 }
    }

    fn sent(&mut self, bytes: usize) {
        self.earn((bytes as u64).saturating_mul(ANSWERS));
    }

    fn earn(&mut self, bytes: u64) {
        self.credit = self.credit.saturating_add(bytes).min(BUDGET_BYTES);
    }

    fn charge(&mut self, bytes: u64) -> Result<(), Flood> {
        let beyond = bytes.saturating_sub(self.credit);
        self.credit = self.credit.saturating_sub(bytes);
        if beyond > 0 { self.budget.take(beyond) } else { Ok(()) }
    }

    /// Counts received bytes: frames in any pieces.
    fn received(&mut self, mut bytes: &[u8]) -> Result<(), Flood> {
        while !bytes.is_empty() {
            let payload = self.payload_bytes.min(bytes.len());
            self.payload_bytes -= payload;
            bytes = &bytes[payload..];
            let piece = (HEADER_BYTES - self.header_bytes).min(bytes.len());
            self.header[self.header_bytes..][..piece].copy_from_slice(&bytes[..piece]);
            self.header_bytes += piece;
            bytes = &bytes[piece..];
            if self.header_bytes == HEADER_BYTES {
                self.header_bytes = 0;
                self.begin_frame()?;
            }
        }
        Ok(())
    }

    fn begin_frame(&mut self) -> Result<(), Flood> {
        let [high, middle, low, kind, flags, ..] = self.header;
        let length = u32::from_be_bytes([0, high, middle, low]);
        self.payload_bytes = usize::try_from(length).map_err(|_| Flood)?;
        if kind == DATA {
            self.earn(u64::from(length));
            self.charge(HEADER_BYTES as u64)
        } else {
            self.charge(u64::from(length) + HEADER_BYTES as u64 + answer(kind, flags) * ANSWERS)
        }
    }
}

/// Bytes of the answer to a frame, which must earn its sender nothing.
fn answer(kind: u8, flags: u8) -> u64 {
    let mut answered =
        ANSWERED.iter().filter(|(answered, _)| *answered == kind && flags & ACK == 0);
    answered.next().map_or(0, |(_, bytes)| *bytes as u64)
}

impl<S: AsyncRead + Unpin> AsyncRead for Metered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        match self.meter.received(&buffer.filled()[before..]) {
            Ok(()) => read,
            Err(flood) => {
                buffer.set_filled(before);
                Poll::Ready(Err(io::Error::other(flood)))
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> Metered<S> {
    fn note(&mut self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = &written {
            self.meter.sent(*bytes);
        }
        written
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Metered<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.note(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.note(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const WINDOW_UPDATE: u8 = 8;
    const UNKNOWN: u8 = 0x42;

    fn frame(kind: u8, payload: usize) -> Vec<u8> {
        let length = u32::try_from(payload).unwrap().to_be_bytes();
        let mut frame = vec![length[1], length[2], length[3], kind, 0, 0, 0, 0, 0];
        frame.resize(HEADER_BYTES + payload, 0);
        frame
    }

    fn many(meter: &mut Meter, frame: &[u8], count: usize) -> Result<(), Flood> {
        (0..count).try_for_each(|_| {
            meter.received(frame)?;
            meter.sent(usize::try_from(answer(frame[3], frame[4])).unwrap());
            Ok(())
        })
    }

    fn meter() -> Meter {
        Meter::new(Arc::default())
    }

    #[test]
    fn frames_without_messages_are_few() {
        for (kind, payload) in
            [(UNKNOWN, 0), (UNKNOWN, 16 << 10), (PING, 8), (SETTINGS, 6), (DATA, 0)]
        {
            let frame = frame(kind, payload);
            let count = usize::try_from(BUDGET_BYTES).unwrap() / frame.len();
            let mut meter = meter();
            assert_eq!(many(&mut meter, &frame, count / 8), Ok(()), "{kind}");
            assert_eq!(many(&mut meter, &frame, 10 * count), Err(Flood), "{kind}");
            // The next connection has no budget of its own.
            let mut next = Meter::new(meter.budget);
            assert_eq!(many(&mut next, &frame, count), Err(Flood), "{kind}");
        }
    }

    #[test]
    fn messages_are_many_in_any_pieces() {
        let mut meter = meter();
        // The smallest message of all, and the answers to a large upload.
        assert_eq!(many(&mut meter, &frame(DATA, 10), 1_000_000), Ok(()));
        for _ in 0..1_000_000 {
            meter.sent(64);
            assert_eq!(meter.received(&frame(WINDOW_UPDATE, 4)), Ok(()));
        }
        let text = [frame(DATA, 100), frame(UNKNOWN, 30)].concat();
        for piece in [1, 7, 10, text.len()] {
            for bytes in text.repeat(100).chunks(piece) {
                assert_eq!(meter.received(bytes), Ok(()));
            }
        }
        assert_eq!((meter.header_bytes, meter.payload_bytes), (0, 0));
        // What was saved is not more than the budget.
        assert_eq!(many(&mut meter, &frame(UNKNOWN, 0), 1_000_000), Err(Flood));
    }

    #[tokio::test]
    async fn a_connection_ends_that_is_flooded() {
        let (ours, mut theirs) = tokio::io::duplex(1 << 16);
        let mut ours = Metered::new(ours, "a test's");
        let flood = tokio::spawn(async move {
            let frames = frame(UNKNOWN, 0).repeat(1000);
            while theirs.write_all(&frames).await.is_ok() {}
        });
        let mut read = Vec::new();
        let end = tokio::time::timeout(Duration::from_secs(30), ours.read_to_end(&mut read)).await;
        let error = end.expect("it ends").unwrap_err();
        assert_eq!(error.to_string(), Flood.to_string());
        drop(ours);
        flood.await.unwrap();
    }
}
