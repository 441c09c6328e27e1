//! The audit file as a hash chain: each line names the SHA-256 of the line before it, over
//! rotations too, and a file beside it (`.head`) holds the number and the hash of the last one. So
//! a line that was removed, changed or moved is detected, also at the end. One process writes at a
//! time, and each record is one write(2): a killed executor leaves whole lines, or a last line that
//! was cut off, which the next start closes and records. A full disk leaves such a line, too, where
//! the file may only be appended to; its rest is written before any other then.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::SystemTime,
};

use posh_proto::token::Fingerprint;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The hash before the first line.
pub const NO_HASH: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// Bytes read from a file's end to find its last line: records are far shorter.
const TAIL_BYTES: u64 = 1 << 20;

/// One line.
#[derive(Debug, Serialize, Deserialize)]
pub struct ChainLine {
    /// Counted from 1, and over rotations.
    pub seq: u64,
    /// The SHA-256 of the line before.
    pub prev: String,
    /// Seconds since 1970.
    pub at_s: u64,
    /// The kind of record.
    pub event: String,
    /// Fields of the record.
    #[serde(flatten)]
    pub record: Map<String, Value>,
}

/// The last line, by number and hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// Its number.
    pub seq: u64,
    /// Its SHA-256.
    pub sha256: String,
}

/// State in which a start finds the record; without a fault nothing is set.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct ChainCondition {
    /// The last line was cut off while it was written.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub torn: bool,
    /// The previous executor did not record its end.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub killed: bool,
    /// The last line is not the one that was written.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub altered: bool,
    /// So many records are gone from the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<u64>,
}

/// The record, to be appended to.
#[derive(Debug)]
pub struct Chain {
    path: PathBuf,
    head_file: File,
    last: Head,
    /// The file of the last line, and what is not written of that.
    rest: Option<(File, Vec<u8>)>,
}

/// Extent to which a line was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Appended {
    /// All of it.
    Whole,
    /// A part, which could not be taken back: the file may only be appended to (chattr(1)). The
    /// rest is written before the next line.
    InPart,
}

impl Appended {
    /// Fails if a part is missing.
    ///
    /// # Errors
    /// `StorageFull`.
    pub fn whole(self) -> io::Result<()> {
        match self {
            Self::Whole => Ok(()),
            Self::InPart => Err(io::ErrorKind::StorageFull.into()),
        }
    }
}

impl Head {
    const fn none() -> Self {
        Self { seq: 0, sha256: String::new() }
    }

    fn hash(&self) -> &str {
        if self.sha256.is_empty() { NO_HASH } else { &self.sha256 }
    }

    /// Reads the head file of the record at `path`.
    pub fn read(path: &Path) -> io::Result<Option<Self>> {
        let text = match std::fs::read_to_string(head_path(path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text?,
        };
        Ok(Self::parse(&text))
    }

    fn parse(text: &str) -> Option<Self> {
        let (seq, sha256) = text.trim_end().split_once(' ')?;
        Some(Self { seq: seq.parse().ok()?, sha256: sha256.to_owned() })
    }

    /// Always as long as before, so that one write replaces it.
    fn text(&self) -> String {
        format!("{:020} {}\n", self.seq, self.hash())
    }
}

fn head_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".head");
    name.into()
}

impl Chain {
    /// Continues the record at `path`.
    ///
    /// # Errors
    /// When it can't be written, or another process writes it.
    pub fn open(path: &Path) -> io::Result<(Self, ChainCondition)> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut head_file = options.open(head_path(path))?;
        head_file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::Error::other("another executor writes this record"),
            TryLockError::Error(error) => error,
        })?;
        let mut text = String::new();
        head_file.read_to_string(&mut text)?;
        let known = Head::parse(&text);
        let mut found = ChainCondition::default();
        let last = last_line(path, &mut found)?;
        let last = agree(known, last, &mut found);
        Ok((Self { path: path.to_owned(), head_file, last, rest: None }, found))
    }

    /// Adds a record.
    ///
    /// # Errors
    /// When nothing of it can be written; the record is as it was then.
    pub fn append(&mut self, event: &str, record: Map<String, Value>) -> io::Result<Appended> {
        self.finish()?;
        let at_s = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
        let (seq, prev) = (self.last.seq + 1, self.last.hash().to_owned());
        let line =
            serde_json::to_string(&ChainLine { seq, prev, at_s, event: event.to_owned(), record })?;
        let line = escape(&line);
        let last = Head { seq, sha256: hash(line.as_bytes()) };
        // Opened by name each time, so that log rotation need not notify us.
        let mut file = appending(&self.path)?;
        let length = file.metadata()?.len();
        let bytes = [line.as_bytes(), b"\n"].concat();
        let count = file.write(&bytes)?;
        if count == bytes.len() {
            self.last = last;
            self.write_head();
            return Ok(Appended::Whole);
        }
        if file.set_len(length).is_ok() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.last = last;
        self.rest = Some((file, bytes[count..].to_vec()));
        Ok(Appended::InPart)
    }

    /// Adds a record whose last `left` bytes can't be written.
    #[cfg(test)]
    pub fn append_in_part(&mut self, event: &str, record: Map<String, Value>, left: u64) {
        let head = Head::read(&self.path).unwrap().unwrap();
        self.append(event, record).unwrap();
        let file = OpenOptions::new().read(true).append(true).open(&self.path).unwrap();
        let kept = file.metadata().unwrap().len() - left;
        let mut rest = vec![0; usize::try_from(left).unwrap()];
        file.read_exact_at(&mut rest, kept).unwrap();
        file.set_len(kept).unwrap();
        self.head_file.write_all_at(head.text().as_bytes(), 0).unwrap();
        self.rest = Some((file, rest));
    }

    /// The line stands, so a failure is not the record's. The next line's head replaces this one.
    fn write_head(&self) {
        if let Err(error) = self.head_file.write_all_at(self.last.text().as_bytes(), 0) {
            tracing::error!(%error, "cannot write the head of the audit record");
        }
    }

    /// Writes the rest of the last line to its file, which may have been renamed since.
    fn finish(&mut self) -> io::Result<()> {
        while let Some((file, rest)) = &mut self.rest {
            let count = file.write(rest)?;
            rest.drain(..count);
            if rest.is_empty() {
                self.rest = None;
                self.write_head();
            } else if count == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
        }
        Ok(())
    }
}

/// The last line of the file; closes a torn one.
fn last_line(path: &Path, found: &mut ChainCondition) -> io::Result<Option<Result<Head, ()>>> {
    let mut file = appending(path)?;
    let length = file.metadata()?.len();
    let mut reading = File::open(path)?;
    reading.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
    let mut tail = Vec::new();
    reading.read_to_end(&mut tail)?;
    if tail.is_empty() {
        return Ok(None);
    }
    let is_closed = tail.pop_if(|byte| *byte == b'\n').is_some();
    let mut lines = tail.rsplit(|byte| *byte == b'\n');
    let last = lines.next().unwrap_or_default();
    let line = parse(last);
    if !is_closed {
        file.write_all(b"\n")?;
    }
    // Of a whole line only the newline may be missing.
    found.torn = !is_closed && line.is_none();
    if found.torn {
        found.killed = true;
        let seq = lines.next().and_then(parse).map_or(0, |line| line.seq);
        return Ok(Some(Ok(Head { seq, sha256: hash(last) })));
    }
    found.killed = line.as_ref().is_none_or(|line| line.event != super::STOP);
    Ok(Some(line.map(|line| Head { seq: line.seq, sha256: hash(last) }).ok_or(())))
}

/// The line after which to continue.
fn agree(known: Option<Head>, last: Option<Result<Head, ()>>, found: &mut ChainCondition) -> Head {
    match (known, last) {
        (known, None) => known.unwrap_or(Head::none()),
        (None, Some(last)) => last.unwrap_or_else(|()| {
            found.altered = true;
            Head::none()
        }),
        (Some(known), Some(Err(()))) => {
            found.altered = true;
            known
        }
        (Some(known), Some(Ok(last))) if last.seq < known.seq => {
            found.lost = Some(known.seq - last.seq);
            known
        }
        (Some(known), Some(Ok(last))) => {
            found.altered = !found.torn && last.seq == known.seq && last.sha256 != known.sha256;
            last
        }
    }
}

/// A line of the record; `None` if it is none.
pub fn parse(line: &[u8]) -> Option<ChainLine> {
    serde_json::from_slice(line).ok()
}

/// The hash by which the next line names this one.
pub fn hash(line: &[u8]) -> String {
    Fingerprint::of(line).to_string()
}

/// JSON leaves U+007F to U+009F unescaped; terminals interpret them as control characters.
fn escape(line: &str) -> String {
    let mut escaped = String::with_capacity(line.len());
    for character in line.chars() {
        match character {
            '\u{7f}'..='\u{9f}' => escaped.push_str(&format!("\\u{:04x}", u32::from(character))),
            _ => escaped.push(character),
        }
    }
    escaped
}

fn appending(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}
