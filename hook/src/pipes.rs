//! What becomes of the commands that write to pipes, noted for those that read from them: a reader
//! of which nothing is on a mount stays here for certain if what it reads comes from a command that
//! does. In a pipeline of the session's own machine, then, nobody asks anybody, and no stage
//! program is started.
//!
//! One file in the session's directory, a slot for each pipe by its inode, read and written in
//! place by whoever executes a command. It is a hint: a slot that another pipe has taken, or a note
//! that is wrong, costs time and nothing else.

use crate::{
    arena::Arena,
    sys::{self, File, Stat},
};

/// The file's name in the session's directory.
pub const FILE: &str = "pipes";

/// As many pipes as are remembered; of those that one processor makes, the kernel counts the
/// numbers up.
const SLOTS: u64 = 4096;
const SLOT_BYTES: usize = 8;

/// The file's length.
pub const FILE_BYTES: u64 = SLOTS * SLOT_BYTES as u64;

/// A reader looks again after so long, and so often. The writer was forked before it in most cases,
/// and notes in a tenth of a millisecond what it does, or in four if it asks.
const LOOK_AGAIN_MICROSECONDS: u32 = 40;
const LOOKS: usize = 8;

/// Programs that end by executing another one, which may be one that is asked about. A shell does
/// so for the last command of `-c`; a script that one runs has another name.
const BECOME_OTHERS: &[u8] = b"bash busybox chpst chroot chrt dash doas env fakechroot fakeroot firejail fish gosu ionice ksh mksh \
    nice nohup nsenter numactl pkexec posh prlimit runuser setarch setpriv setsid sh softlimit ssh-agent stdbuf su-exec sudo taskset \
    time torsocks unbuffer unshare zsh";

/// Whether a program of this name is one of those.
pub(crate) fn becomes_another(name: &[u8]) -> bool {
    BECOME_OTHERS.split(|byte| *byte == b' ').any(|other| other == name)
}

/// What is known of who writes to a pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writer {
    /// It runs here.
    Stays,
    /// It has become a stage, or will.
    IsAsked,
    /// It did not say in time.
    Unknown,
}

/// A slot of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot([u8; SLOT_BYTES]);

impl Slot {
    /// For a pipe, by its inode.
    #[must_use]
    pub fn of(pipe: u64, writer: Writer) -> Self {
        let code = match writer {
            Writer::Stays => 1,
            Writer::IsAsked => 2,
            Writer::Unknown => 3,
        };
        Self((pipe << 2 | code).to_ne_bytes())
    }

    /// As it was read.
    #[must_use]
    pub fn read(bytes: [u8; SLOT_BYTES]) -> Self {
        Self(bytes)
    }

    /// As it is written.
    #[must_use]
    pub fn bytes(&self) -> &[u8; SLOT_BYTES] {
        &self.0
    }

    /// Where in the file a pipe's slot is.
    #[must_use]
    pub fn offset(pipe: u64) -> u64 {
        (pipe ^ pipe >> 12) % SLOTS * SLOT_BYTES as u64
    }

    /// What it says of a pipe; `None` if it is another one's.
    #[must_use]
    pub fn writer(self, pipe: u64) -> Option<Writer> {
        let entry = u64::from_ne_bytes(self.0);
        let writer = match entry & 3 {
            1 => Writer::Stays,
            2 => Writer::IsAsked,
            3 => Writer::Unknown,
            _ => return None,
        };
        (entry >> 2 == pipe << 2 >> 2).then_some(writer)
    }
}

/// The file, opened by a process that is about to execute a command.
pub(crate) struct Notes(File);

impl Notes {
    /// `None` where there is none, or where it may not be written to.
    pub(crate) fn open(directory: &[u8], arena: &mut Arena<'_>) -> Option<Self> {
        if sys::longest_file() < FILE_BYTES {
            return None;
        }
        let mut arena = arena.scope();
        File::open_to_write(arena.c_str(&[directory, b"/", FILE.as_bytes()])?).map(Self)
    }

    /// What is noted by now.
    pub(crate) fn writer(&self, pipe: u64) -> Option<Writer> {
        let mut bytes = [0; SLOT_BYTES];
        let count = self.0.read(&mut bytes, Slot::offset(pipe))?;
        (count == SLOT_BYTES).then_some(Slot::read(bytes))?.writer(pipe)
    }

    /// What the writer says within a short while; if nothing, that is noted, so that nobody else
    /// waits for it.
    pub(crate) fn wait_for_writer(&self, pipe: u64) -> Writer {
        for _ in 1..LOOKS {
            if let Some(writer) = self.writer(pipe) {
                return writer;
            }
            sys::sleep(LOOK_AGAIN_MICROSECONDS);
        }
        self.writer(pipe).unwrap_or_else(|| {
            self.note(pipe, Writer::Unknown);
            Writer::Unknown
        })
    }

    /// Notes it.
    pub(crate) fn note(&self, pipe: u64, writer: Writer) {
        self.0.write(Slot::of(pipe, writer).bytes(), Slot::offset(pipe));
    }
}

/// The pipes that a process has as its standard streams.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Standard {
    /// What it reads.
    pub(crate) input: Option<u64>,
    /// What it writes.
    outputs: [Option<u64>; 2],
}

impl Standard {
    /// By what statx(2) says of descriptors 0 to 2.
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
        for writer in [Writer::Stays, Writer::IsAsked, Writer::Unknown] {
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
        let directory = std::env::temp_dir().join(format!("posh-pipes-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let name = directory.to_str().unwrap().as_bytes();
        let mut memory = [0; 300];
        let mut arena = Arena::new(&mut memory);
        assert!(Notes::open(name, &mut arena).is_none());
        std::fs::write(directory.join(FILE), vec![0; FILE_BYTES as usize]).unwrap();
        let notes = Notes::open(name, &mut arena).unwrap();
        assert_eq!(notes.writer(77), None);
        notes.note(77, Writer::Stays);
        assert_eq!(notes.wait_for_writer(77), Writer::Stays);
        assert_eq!(notes.wait_for_writer(78), Writer::Unknown);
        assert_eq!(notes.writer(78), Some(Writer::Unknown));
        // A pipe takes the place of another one.
        let other =
            (1..).find(|pipe| *pipe != 77 && Slot::offset(*pipe) == Slot::offset(77)).unwrap();
        notes.note(other, Writer::IsAsked);
        assert_eq!((notes.writer(77), notes.writer(other)), (None, Some(Writer::IsAsked)));
        std::fs::remove_dir_all(directory).unwrap();
    }
}
