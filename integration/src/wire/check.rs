//! Measures a link between two hosts, for comparison with its profile.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::error::{AttemptExt, Result};
use crate::host::Host;

/// Round trips measured; the median counts.
const ROUND_TRIPS: usize = 21;
/// Duration of a transfer in one direction, after TCP's window has opened.
const FILL: Duration = Duration::from_millis(800);
/// Time for TCP to open its window.
const WARM_UP: Duration = Duration::from_millis(700);
const PIECE_BYTES: usize = 256 << 10;

/// Measurements of a link.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    /// Median round-trip time of small messages.
    pub round_trip: Duration,
    /// One TCP connection from the near to the far end, megabits of payload per second.
    pub megabits_out: f64,
    /// One TCP connection from the far to the near end, megabits of payload per second.
    pub megabits_back: f64,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.2} ms, {:.0} Mbit/s out, {:.0} back",
            self.round_trip.as_secs_f64() * 1e3,
            self.megabits_out,
            self.megabits_back
        )
    }
}

/// Measures the link from `near` to `far`, which has this address.
pub fn measure(near: &Host, far: &Host, address: &str) -> Result<Measured> {
    let attempt = || format!("measure the wire to {}", far.name());
    let (here, there) = connect(near, far, address)?;
    let round_trip = round_trip(&here, &there).attempt(attempt)?;
    let megabits_out = fill(here, there).attempt(attempt)?;
    let (here, there) = connect(near, far, address)?;
    let megabits_back = fill(there, here).attempt(attempt)?;
    Ok(Measured { round_trip, megabits_out, megabits_back })
}

/// Makes a connection; a socket belongs to the network namespace in which it was made.
fn connect(near: &Host, far: &Host, address: &str) -> Result<(TcpStream, TcpStream)> {
    let place = (address.to_owned(), 0);
    let listener =
        far.run(move || TcpListener::bind(place)).attempt(|| format!("listen at {address}"))?;
    let place = listener.local_addr().attempt(|| "ask for a port".into())?;
    let here =
        near.run(move || TcpStream::connect(place)).attempt(|| format!("connect to {place}"))?;
    let (there, _) = listener.accept().attempt(|| format!("accept at {place}"))?;
    Ok((here, there))
}

fn round_trip(mut here: &TcpStream, mut there: &TcpStream) -> io::Result<Duration> {
    here.set_nodelay(true)?;
    there.set_nodelay(true)?;
    let mut byte = [0];
    let mut seen = Vec::new();
    for _ in 0..ROUND_TRIPS {
        let start = Instant::now();
        here.write_all(&[0])?;
        there.read_exact(&mut byte)?;
        there.write_all(&[0])?;
        here.read_exact(&mut byte)?;
        seen.push(start.elapsed());
    }
    seen.sort();
    Ok(seen[ROUND_TRIPS / 2])
}

/// Sends as much as possible for a fixed time; returns the rate.
fn fill(mut from: TcpStream, mut to: TcpStream) -> io::Result<f64> {
    let end = Instant::now() + WARM_UP + FILL;
    let sender = std::thread::spawn(move || -> io::Result<()> {
        let piece = vec![0; PIECE_BYTES];
        while Instant::now() < end {
            from.write_all(&piece)?;
        }
        from.shutdown(Shutdown::Write)
    });
    let counted_from = Instant::now() + WARM_UP;
    let mut piece = vec![0; PIECE_BYTES];
    let (mut bytes, mut first) = (0, None);
    let rate = loop {
        let count = to.read(&mut piece)?;
        let now = Instant::now();
        if count == 0 || now >= end {
            let start: Instant = first.unwrap_or(counted_from);
            break bytes as f64 * 8e-6 / (now - start).as_secs_f64();
        }
        match first {
            None if now >= counted_from => first = Some(now),
            None => {}
            Some(_) => bytes += count,
        }
    };
    // Bytes under way are discarded.
    while to.read(&mut piece)? > 0 {}
    sender.join().expect("the sender does not panic")?;
    Ok(rate)
}
