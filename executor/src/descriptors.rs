//! Parts of this process's table of open files (`RLIMIT_NOFILE`), one for each kind of work.
//!
//! Invariant: the parts leave an eighth of the table, which no peer can take: for the listener, the
//! registers of identities and revocations, the audit record, runners and their set-up. Each kind
//! of work counts what it opens against its own part only.

use nix::sys::resource::{Resource, getrlimit};

/// Each part, and what is left, is a multiple of this part of the table.
const UNIT: usize = 32;

/// Sizes of the parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DescriptorShares {
    /// Connections of peers that have proved nothing yet.
    pub unproven: usize,
    /// Admitted connections.
    pub connections: usize,
    /// Streams of runs.
    pub runs: usize,
    /// Files, locks and cached directories of volumes.
    pub volumes: usize,
}

impl DescriptorShares {
    /// Of this process's table, which is as large as it gets by now.
    pub fn of_process() -> Self {
        let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
        Self::of(usize::try_from(limit).unwrap_or(usize::MAX))
    }

    fn of(table: usize) -> Self {
        let unit = table / UNIT;
        Self { unproven: 8 * unit, connections: 2 * unit, runs: 9 * unit, volumes: 9 * unit }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eighth_of_the_table_is_nobodys() {
        for table in [256, 1000, 1024, 4096, 65_536, 1 << 20, 1 << 30] {
            let DescriptorShares { unproven, connections, runs, volumes } =
                DescriptorShares::of(table);
            let taken = unproven + connections + runs + volumes;
            assert!(taken <= table - table / 8, "{taken} of {table}");
            assert!([unproven, connections, runs, volumes].iter().all(|part| *part >= 14));
        }
    }
}
