//! Results of a run as digests: of its standard output, and of every file that it left. Equal
//! results give equal digests.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use posh_integration::RunOutcome;
use posh_integration::tree::{self, EntryKind};
use sha2::{Digest, Sha256};

use super::catalogue::Workload;
use super::place::RunPlace;
use super::system::{OUT, System};

/// Most differences that are named.
const NAMED: usize = 3;

/// Parts of the result, with their digests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fingerprint(BTreeMap<String, String>);

impl Fingerprint {
    /// Fingerprint of a run that has just ended.
    pub fn take(
        place: &RunPlace,
        workload: &Workload,
        system: System,
        outcome: &RunOutcome,
    ) -> Result<Fingerprint> {
        // Scripts that ran on the server have printed the server's own paths.
        let outcome = outcome.clone().with("/srv/s", "/mnt/s");
        let mut parts = BTreeMap::from([("standard output".to_owned(), digest(&outcome.stdout))]);
        add(&mut parts, "OUT", &system.host(&place.lab).path(OUT))?;
        if let Some(store) = place.stores(workload).first() {
            for result in workload.results {
                add(&mut parts, result, &store.data().join(result))?;
            }
        }
        Ok(Fingerprint(parts))
    }

    /// The first differences, as text; `None` when they are equal.
    pub fn differences(&self, other: &Fingerprint) -> Option<String> {
        let names: std::collections::BTreeSet<_> = self.0.keys().chain(other.0.keys()).collect();
        let differing: Vec<_> =
            names.into_iter().filter(|n| self.0.get(*n) != other.0.get(*n)).collect();
        let shown: Vec<_> = differing.iter().take(NAMED).map(|n| n.as_str()).collect();
        (!differing.is_empty())
            .then(|| format!("{} parts differ: {}", differing.len(), shown.join(", ")))
    }
}

fn add(parts: &mut BTreeMap<String, String>, name: &str, path: &Path) -> Result<()> {
    if !path.is_dir() {
        parts.insert(
            name.to_owned(),
            std::fs::read(path).map_or_else(|e| e.to_string(), |content| digest(&content)),
        );
        return Ok(());
    }
    // git's own files have times in them; the commits' hashes, which are printed, represent them.
    for (relative, entry) in tree::snapshot(path, &[".git"])? {
        let content = match entry.kind {
            EntryKind::Directory => "directory".to_owned(),
            EntryKind::File(bytes) => digest(&bytes),
            EntryKind::Link(to) => format!("link to {}", to.display()),
            EntryKind::Other => "special file".to_owned(),
        };
        parts.insert(
            format!("{name}/{}", relative.display()),
            format!("{content} {:o}", entry.mode),
        );
    }
    Ok(())
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_named() {
        let of = |text: &str| {
            Fingerprint(
                [("a".to_owned(), "1".to_owned()), ("b".to_owned(), digest(text.as_bytes()))]
                    .into(),
            )
        };
        assert_eq!(of("x").differences(&of("x")), None);
        assert_eq!(of("x").differences(&of("y")).as_deref(), Some("1 parts differ: b"));
    }
}
