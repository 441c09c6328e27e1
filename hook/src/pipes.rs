//! Notes on the writers of pipes, for their readers: a reader that uses no mount is certain to stay
//! local if the writer of its input does. So the commands of a purely local pipeline ask nobody,
//! and start no stage program.
//!
//! The notes are one file in the session's directory, with a slot for each pipe by its inode, read
//! and written in place by every process that executes a command. They are hints: a slot taken by
//! another pipe, or a wrong note, costs time and nothing else.

use crate::{
    arena::Arena,
    sys::{self, File, Stat},
};

/// The file's name in the session's directory.
pub const FILE: &str = "pipes";

/// Number of pipes that are remembered. The kernel numbers the pipes of one processor
/// consecutively.
const SLOTS: u64 = 4096;
const SLOT_BYTES: usize = 8;

/// The file's length.
pub const FILE_BYTES: u64 = SLOTS * SLOT_BYTES as u64;

/// Interval and number of a reader's polls. In most cases the writer was forked before it, and
/// writes its first note within 0.1 ms.
const LOOK_AGAIN_MICROSECONDS: u32 = 40;
const LOOKS: usize = 8;
/// Number of polls if the writer has noted that it is deciding: some 4 ms.
const LOOKS_WHILE_IT_DECIDES: usize = 40;

/// Programs that end by executing another one, which may be a known one. A shell does so for the
/// last command of `-c`; a script has another name.
const BECOME_OTHERS: &[u8] = b"bash busybox chpst chroot chrt dash doas env fakechroot fakeroot \
    firejail fish gosu ionice ksh mksh nice nohup nsenter numactl pkexec posh prlimit runuser \
    setarch setpriv setsid sh softlimit ssh-agent stdbuf su-exec sudo taskset time torsocks \
    unbuffer unshare zsh";

/// Returns true if programs of this name end by executing another one.
pub(crate) fn becomes_another(name: &[u8]) -> bool {
    BECOME_OTHERS.split(|byte| *byte == b' ').any(|other| other == name)
}

/// State of a pipe's writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PipeWriter {
    /// It runs locally.
    Stays,
    /// It is a stage, or will be one.
    IsAsked,
    /// It wrote no note in time.
    Unknown,
    /// It is about to note one of the first two: it asks the gateway, or waits for its own writer.
    Decides,
}

/// A slot of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot([u8; SLOT_BYTES]);

impl Slot {
    /// For a pipe, by its inode.
    #[must_use]
    pub fn of(pipe: u64, writer: PipeWriter) -> Self {
        let code = match writer {
            PipeWriter::Stays => 1,
            PipeWriter::IsAsked => 2,
            PipeWriter::Unknown => 3,
            PipeWriter::Decides => 0,
        };
        Self((pipe << 2 | code).to_ne_bytes())
    }

    /// Decodes a slot.
    #[must_use]
    pub fn read(bytes: [u8; SLOT_BYTES]) -> Self {
        Self(bytes)
    }

    /// The encoded slot.
    #[must_use]
    pub fn bytes(&self) -> &[u8; SLOT_BYTES] {
        &self.0
    }

    /// Offset of a pipe's slot in the file.
    #[must_use]
    pub fn offset(pipe: u64) -> u64 {
        (pipe ^ pipe >> 12) % SLOTS * SLOT_BYTES as u64
    }

    /// The note about a pipe; `None` if the slot belongs to another pipe.
    #[must_use]
    pub fn writer(self, pipe: u64) -> Option<PipeWriter> {
        let entry = u64::from_ne_bytes(self.0);
        let writer = match entry & 3 {
            1 => PipeWriter::Stays,
            2 => PipeWriter::IsAsked,
            3 => PipeWriter::Unknown,
            _ => PipeWriter::Decides,
        };
        // In a file that was just made, all slots are 0.
        (entry != 0 && entry >> 2 == pipe << 2 >> 2).then_some(writer)
    }
}

/// The file, opened by a process that is about to execute a command.
pub(crate) struct Notes(File);

impl Notes {
    /// `None` if the file does not exist or can't be written.
    pub(crate) fn open(directory: &[u8], arena: &mut Arena<'_>) -> Option<Self> {
        if sys::longest_file() < FILE_BYTES {
            return None;
        }
        let mut arena = arena.scope();
        File::open_to_write(arena.c_str(&[directory, b"/", FILE.as_bytes()])?).map(Self)
    }

    /// The current note about a pipe's writer.
    pub(crate) fn writer(&self, pipe: u64) -> Option<PipeWriter> {
        let mut bytes = [0; SLOT_BYTES];
        let count = self.0.read(&mut bytes, Slot::offset(pipe))?;
        (count == SLOT_BYTES).then_some(Slot::read(bytes))?.writer(pipe)
    }

    /// Polls for the writer's decision for a short while. If there is none, `Unknown` is noted, so
    /// that no other reader waits.
    pub(crate) fn wait_for_writer(&self, pipe: u64) -> PipeWriter {
        self.wait(pipe, || sys::sleep(LOOK_AGAIN_MICROSECONDS))
    }

    fn wait(&self, pipe: u64, mut pause: impl FnMut()) -> PipeWriter {
        let mut looks = 0;
        loop {
            let limit = match self.writer(pipe) {
                Some(PipeWriter::Decides) => LOOKS_WHILE_IT_DECIDES,
                Some(writer) => return writer,
                None => LOOKS,
            };
            looks += 1;
            if looks >= limit {
                self.note(pipe, PipeWriter::Unknown);
                return PipeWriter::Unknown;
            }
            pause();
        }
    }

    /// Writes a note.
    pub(crate) fn note(&self, pipe: u64, writer: PipeWriter) {
        self.0.write(Slot::of(pipe, writer).bytes(), Slot::offset(pipe));
    }
}

/// The pipes that a process has as its standard streams.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Standard {
    /// Pipe on descriptor 0.
    pub(crate) input: Option<u64>,
    /// Pipes on descriptors 1 and 2.
    outputs: [Option<u64>; 2],
}

impl Standard {
    /// From the status of descriptors 0 to 2.
    pub(crate) fn of([input, output, errors]: [Option<Stat>; 3]) -> Self {
        let pipe = |stream: Option<Stat>| {
            stream.filter(|stream| stream.is_pipe()).map(|stream| stream.inode)
        };
        Self { input: pipe(input), outputs: [pipe(output), pipe(errors)] }
    }

    /// The pipes that it writes to.
    pub(crate) fn outputs(self) -> impl Iterator<Item = u64> {
        self.outputs.into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_that_become_others() {
        for name in ["bash", "nice", "nohup", "time", "zsh"] {
            assert!(becomes_another(name.as_bytes()), "{name}");
        }
        for name in ["python3", "ps", "", " ", "nic"] {
            assert!(!becomes_another(name.as_bytes()), "{name}");
        }
    }

    #[test]
    fn a_slot_is_of_one_pipe() {
        for writer in
            [PipeWriter::Stays, PipeWriter::IsAsked, PipeWriter::Unknown, PipeWriter::Decides]
        {
            for pipe in [1, 4096, 23_396_636, u64::from(u32::MAX), u64::MAX >> 2] {
                let slot = Slot::of(pipe, writer);
                assert_eq!(slot.writer(pipe), Some(writer));
                assert_eq!(slot.writer(pipe ^ 1), None);
                assert!(Slot::offset(pipe) + SLOT_BYTES as u64 <= FILE_BYTES);
            }
        }
        assert_eq!(Slot::read([0; 8]).writer(0), None);
        assert_ne!(Slot::offset(5000), Slot::offset(5001));
    }

    #[test]
    fn what_is_noted_is_found_and_nothing_is_waited_for_twice() {
        let directory = made("noted");
        let name = directory.to_str().unwrap().as_bytes();
        let mut memory = [0; 300];
        let mut arena = Arena::new(&mut memory);
        assert!(Notes::open(name, &mut arena).is_none());
        std::fs::write(directory.join(FILE), vec![0; FILE_BYTES as usize]).unwrap();
        let notes = Notes::open(name, &mut arena).unwrap();
        assert_eq!((notes.writer(77), notes.writer(0)), (None, None));
        notes.note(77, PipeWriter::Stays);
        assert_eq!(notes.wait_for_writer(77), PipeWriter::Stays);
        assert_eq!(notes.wait_for_writer(78), PipeWriter::Unknown);
        assert_eq!(notes.writer(78), Some(PipeWriter::Unknown));
        // A pipe takes the place of another one.
        let other =
            (1..).find(|pipe| *pipe != 77 && Slot::offset(*pipe) == Slot::offset(77)).unwrap();
        notes.note(other, PipeWriter::IsAsked);
        assert_eq!((notes.writer(77), notes.writer(other)), (None, Some(PipeWriter::IsAsked)));
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_writer_that_decides_is_waited_for_but_not_for_ever() {
        let directory = made("decides");
        std::fs::write(directory.join(FILE), vec![0; FILE_BYTES as usize]).unwrap();
        let name = directory.to_str().unwrap().as_bytes();
        let mut memory = [0; 300];
        let notes = Notes::open(name, &mut Arena::new(&mut memory)).unwrap();
        notes.note(77, PipeWriter::Decides);
        let mut pauses = 0;
        let later_than_a_first_note = || {
            pauses += 1;
            if pauses == 2 * LOOKS {
                notes.note(77, PipeWriter::Stays);
            }
        };
        assert_eq!(notes.wait(77, later_than_a_first_note), PipeWriter::Stays);
        notes.note(78, PipeWriter::Decides);
        assert_eq!(notes.wait_for_writer(78), PipeWriter::Unknown);
        assert_eq!(notes.writer(78), Some(PipeWriter::Unknown));
        std::fs::remove_dir_all(directory).unwrap();
    }

    fn made(name: &str) -> std::path::PathBuf {
        let name = format!("posh-pipes-{name}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory).unwrap();
        directory
    }
}
