//! Bounds on the use of the machine, of one identity and of all.

/// The most commands at a time, of an identity and of all; also the default of each such bound,
/// since no configuration may ask for more.
///
/// Each annotated command has a seccomp filter of its own, which the kernel compiles and keeps in
/// the memory of its JIT compiler (`bpf_prog_pack`). Some thousand of them that are freed at once,
/// as when a run is killed, stall the machine: each one is taken out of that memory under one lock,
/// with a flush of every processor's TLB. 768 end together within a moment.
pub const MOST_PROCESSES: usize = 768;

/// All commands together may hold one file open in so many of those that the machine can have open
/// (fs.file-max): the rest is for its other programs, and for processes that commands fork.
const SHARE_OF_FILES: u64 = 2;
/// Open files of one command: shells usually start commands with 1024, which should not find fewer
/// here. More than the upper bound costs too much of the kernel's memory where there is no limit.
const OPEN_FILES: std::ops::RangeInclusive<u64> = 1 << 10..=1 << 16;

/// Files that this machine can have open at a time.
pub(crate) fn machine_files() -> u64 {
    let most = std::fs::read_to_string("/proc/sys/fs/file-max").unwrap_or_default();
    most.trim().parse().unwrap_or(u64::MAX)
}

/// The most open files of one command, where a machine can have so many.
pub(super) fn open_files_of_one(machine: u64) -> u64 {
    (machine / SHARE_OF_FILES / MOST_PROCESSES as u64).clamp(*OPEN_FILES.start(), *OPEN_FILES.end())
}

/// Bounds of one identity. `None` is no bound of its own: the whole executor's apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Runs at a time.
    pub runs: Option<usize>,
    /// Commands at a time, over all runs; [`MOST_PROCESSES`] at most.
    pub processes: Option<usize>,
    /// Bytes that the executor holds for the identity's streams.
    pub buffered_bytes: Option<usize>,
    /// Connections at a time.
    pub connections: Option<usize>,
    /// Calls in a second; twice as many at once.
    pub calls_per_second: Option<u32>,
    /// Memory of one command. Applied where the command is started.
    pub memory_bytes: Option<u64>,
}

/// Bounds of the whole executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Runs at a time.
    pub runs: usize,
    /// Commands at a time, over all runs; [`MOST_PROCESSES`] at most.
    pub processes: usize,
    /// Bytes that are held for streams, pipes included.
    pub buffered_bytes: usize,
    /// Admitted connections at a time.
    pub connections: usize,
    /// Load average above which nothing new is begun, for each core.
    pub load_per_core: Option<u32>,
    /// Per cent of the last ten seconds in which something waited for memory (PSI).
    pub memory_pressure: Option<u32>,
    /// Like `memory_pressure`, but for a processor.
    pub cpu_pressure: Option<u32>,
    /// Like `memory_pressure`, but for a disk.
    pub io_pressure: Option<u32>,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            // Each costs a supervising process and its commands; beyond that the machine
            // is better left to finish them.
            runs: 512,
            processes: MOST_PROCESSES,
            // A run has some 4 MiB.
            buffered_bytes: 4 << 30,
            // A gateway has one.
            connections: 1024,
            // Only a machine that is being lost exceeds these.
            load_per_core: Some(64),
            memory_pressure: Some(60),
            // Commands that wait for a processor or a disk still get on.
            cpu_pressure: None,
            io_pressure: None,
        }
    }
}

impl Bounds {
    /// As many commands as can all have `open_files` open where a machine can have so many.
    #[must_use]
    pub(crate) fn with_files(self, open_files: u64, machine: u64) -> Self {
        let most = (machine / SHARE_OF_FILES / open_files.max(1)).max(1);
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        Self { processes: self.processes.min(most), ..self }
    }

    /// As many connections as there are descriptors for them.
    #[must_use]
    pub(crate) fn with_connections(self, descriptors: usize) -> Self {
        Self { connections: self.connections.min(descriptors), ..self }
    }

    /// No bound for the machine's own load.
    #[must_use]
    pub fn unbounded() -> Self {
        Self { load_per_core: None, memory_pressure: None, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_all_commands_are_a_part_of_the_machines() {
        for machine in [100_000, 400_000, 2_466_174, 20_000_000, 100_000_000, u64::MAX] {
            let open_files = open_files_of_one(machine);
            assert!(OPEN_FILES.contains(&open_files), "{open_files} of {machine}");
            for open_files in [open_files, 20_000] {
                let Bounds { processes, .. } = Bounds::default().with_files(open_files, machine);
                let all = processes as u64 * open_files;
                assert!(processes > 0 && all <= machine / SHARE_OF_FILES, "{all} of {machine}");
            }
        }
        assert_eq!(open_files_of_one(u64::MAX), 1 << 16);
        assert_eq!(Bounds::default().with_files(1 << 16, u64::MAX), Bounds::default());
    }
}
