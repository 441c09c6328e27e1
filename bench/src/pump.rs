//! Helper processes: a slow reader, and a plain TCP copy for comparison. They run on a benchmark's
//! machine, started by path.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};

/// Size of reads: that of posh's own chunks.
const BUFFER_BYTES: usize = 256 << 10;
/// Pause before the first read, in which every stream fills its window.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Bytes between pauses of the reader, so that the streams behind it are always full.
const REST_EVERY_BYTES: u64 = 64 << 20;
const REST: Duration = Duration::from_millis(20);

/// Reads `parts` of `part_bytes`, each beginning with its number, and prints the number of bytes.
pub fn consume(parts: u64, part_bytes: u64) -> Result<()> {
    let mut input = io::stdin().lock();
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut total = 0_u64;
    thread::sleep(FIRST_PAUSE);
    loop {
        let count = input.read(&mut buffer)? as u64;
        if count == 0 {
            break;
        }
        let first_start = total.next_multiple_of(part_bytes);
        for start in (first_start..total + count).step_by(usize::try_from(part_bytes)?) {
            let number = start / part_bytes + 1;
            let found = buffer[usize::try_from(start - total)?];
            ensure!(
                u64::from(found) == number,
                "part {number} begins with {found} at byte {start}"
            );
        }
        if total / REST_EVERY_BYTES != (total + count) / REST_EVERY_BYTES {
            thread::sleep(REST);
        }
        total += count;
    }
    ensure!(
        total == parts * part_bytes,
        "{total} bytes came instead of {parts} times {part_bytes}"
    );
    writeln!(io::stdout(), "{total}")?;
    Ok(())
}

/// Reads and discards everything.
pub fn discard() -> Result<()> {
    copy(&mut io::stdin().lock(), &mut io::sink())?;
    Ok(())
}

/// Sends a file through one connection into another file: read, send, receive, write.
pub fn tcp(from: &Path, to: &Path) -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let (mut source, address) = (File::open(from)?, listener.local_addr()?);
    let sender = thread::spawn(move || copy(&mut source, &mut TcpStream::connect(address)?));
    let (mut stream, _) = listener.accept()?;
    let received = copy(&mut stream, &mut File::create(to)?)?;
    let sent = sender.join().expect("copying does not panic")?;
    ensure!(sent == received, "{sent} bytes were sent and {received} received");
    Ok(())
}

fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<u64> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut total = 0;
    loop {
        let count = from.read(&mut buffer)?;
        if count == 0 {
            return Ok(total);
        }
        to.write_all(&buffer[..count])?;
        total += count as u64;
    }
}
