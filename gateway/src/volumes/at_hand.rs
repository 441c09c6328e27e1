//! Runs commands locally if a volume has their files cached and asking its server would take longer
//! (`scheduler = "cost"`). Of files that are looked at or read, only uncached data is transferred
//! then.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use fs_mapper::{LastLink, Resolver};
use posh_annotations::{CurrentDir, FileKind, Invocation, StdinUse};
use posh_volume::fs::{AtHand, Use};

use super::{
    Volumes,
    prefetch::{LOOKING, on_volume, own_caller},
};
use crate::{
    enlisted::{DescriptorKind, Enlisted},
    facts::{PathOwner, ResolvedCommand, World},
    model::{LocalReason, ReasonKind},
};

/// Time for a run on a server besides its round trip: messages, and starting processes (`posh-bench
/// overhead`).
const RUN: Duration = Duration::from_millis(3);

/// Transfer time per byte besides the round trip: 400 Mbit/s.
const FETCHED_BYTE: Duration = Duration::from_nanos(20);

/// Time for local access per byte and per file: through the kernel and back.
const BYTE: Duration = Duration::from_nanos(1);
const FILE: Duration = Duration::from_micros(20);

/// Uses by commands, by mount point of the volume.
type Uses = BTreeMap<PathBuf, Vec<Use>>;

impl Volumes {
    /// Reason for running the commands of a pipeline locally, if that is faster than asking the
    /// server of the volumes that have all their files.
    #[must_use]
    pub fn at_hand(
        &self,
        world: &World<'_>,
        commands: &[(&Enlisted, &Result<ResolvedCommand, LocalReason>)],
    ) -> Option<LocalReason> {
        self.sooner_here(world, commands).map(|(uses, found)| reason(uses.keys(), &found))
    }

    /// Round trips of one command that runs locally for that reason.
    #[must_use]
    pub fn round_trips_to_have(
        &self,
        world: &World<'_>,
        command: &Enlisted,
        reading: ResolvedCommand,
    ) -> Option<u32> {
        self.sooner_here(world, &[(command, &Ok(reading))]).map(|(_, found)| found.round_trips)
    }

    /// Uses of the commands, if they are faster locally.
    fn sooner_here(
        &self,
        world: &World<'_>,
        commands: &[(&Enlisted, &Result<ResolvedCommand, LocalReason>)],
    ) -> Option<(Uses, AtHand)> {
        let mut uses = Uses::new();
        for (command, reading) in commands {
            if let Ok(reading) = reading {
                note(world, command, reading, &mut uses)?;
            }
        }
        let mut all = AtHand::default();
        for (path, uses) in &uses {
            let serving =
                self.known().iter().find(|known| known.config.path == *path)?.serving()?;
            let found = serving.volume.at_hand(&own_caller(), uses)?;
            all = AtHand {
                files: all.files + found.files,
                bytes: all.bytes + found.bytes,
                missing: all.missing + found.missing,
                round_trips: all.round_trips + found.round_trips,
                round_trip: all.round_trip.max(found.round_trip),
            };
        }
        let is_sooner = all.files > 0 && time_here(&all) < all.round_trip + RUN;
        is_sooner.then_some((uses, all))
    }
}

fn time_here(all: &AtHand) -> Duration {
    let times =
        |each: Duration, count: u64| each.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX));
    let here = times(FILE, all.files) + times(BYTE, all.bytes);
    here + all.round_trip * all.round_trips + times(FETCHED_BYTE, all.missing)
}

fn reason<'a>(places: impl Iterator<Item = &'a PathBuf>, all: &AtHand) -> LocalReason {
    let places: Vec<_> = places.map(|place| place.display().to_string()).collect();
    let places = places.join(" and ");
    ReasonKind::Cached.because(match all.round_trips {
        0 => format!("what it uses on {places} is at hand"),
        1 => format!("what it uses on {places} is at hand but for one round trip"),
        n => {
            format!("what it uses on {places} is at hand but for {n} round trips, which are short")
        }
    })
}

/// Notes a command's uses. `None` if they are unknown, or not on volumes alone.
fn note(
    world: &World<'_>,
    command: &Enlisted,
    reading: &ResolvedCommand,
    uses: &mut Uses,
) -> Option<()> {
    let invocation = &reading.invocation;
    let goes_further = !invocation.searches_up.is_empty()
        || !invocation.guards.is_empty()
        || !invocation.runs.is_empty();
    if goes_further
        || invocation.working_dir.is_some()
        || invocation.current_dir == CurrentDir::Writes
    {
        return None;
    }
    let mut resolver = Resolver::new(world.table, &command.cwd);
    let mut add = |path: &Path, last: LastLink, to_use: fn(PathBuf) -> Use| {
        let (mount, below) = on_volume(world.table, &mut resolver, path, last)?;
        uses.entry(mount).or_default().push(to_use(below));
        Some(())
    };
    let is_elsewhere = |place: &Option<PathOwner>| matches!(place, Some(PathOwner::At(..)));
    for (file, _) in
        invocation.files.iter().zip(&reading.places).filter(|(_, place)| is_elsewhere(place))
    {
        let last = if file.no_follow { LastLink::Keep } else { LastLink::Follow };
        add(Path::new(&file.path), last, use_of(invocation, file.kind)?)?;
    }
    if is_elsewhere(&reading.cwd) {
        let is_listed = invocation.command == "ls"
            && !command.argv.iter().any(|word| may_be_recursive(word.as_encoded_bytes()));
        let kind = if is_listed { FileKind::InputFile } else { FileKind::InputDir };
        add(&command.cwd, LastLink::Follow, use_of(invocation, kind)?)?;
    }
    for descriptor in command
        .descriptors
        .iter()
        .filter(|d| d.fd <= 2 && d.kind == DescriptorKind::File && d.on_mount)
    {
        match descriptor.fd {
            0 if invocation.stdin == StdinUse::Unused => {}
            0 => add(&descriptor.path, LastLink::Keep, Use::Read)?,
            _ => add(&descriptor.path, LastLink::Keep, Use::Write)?,
        }
    }
    Some(())
}

/// `None` if it changes more than one name, or an existing file.
fn use_of(invocation: &Invocation, kind: FileKind) -> Option<fn(PathBuf) -> Use> {
    let copies_files = || {
        invocation.command == "cp"
            && !invocation.files.iter().any(|file| file.kind == FileKind::InputDir)
    };
    match (kind, LOOKING.contains(&invocation.command.as_str())) {
        (FileKind::InputFile, true) => Some(Use::Look),
        (FileKind::InputFile, false) => Some(Use::Read),
        (FileKind::InputDir, true) => Some(Use::LookBelow),
        (FileKind::InputDir, false) => Some(Use::ReadBelow),
        (FileKind::OutputFile, _) => Some(Use::Make),
        (FileKind::OutputDir, _) if copies_files() => Some(Use::Make),
        (FileKind::OutputDir | FileKind::NewDir | FileKind::InoutFile | FileKind::ListFile, _) => {
            None
        }
    }
}

/// `-R` among other letters, or the long option, perhaps abbreviated; or an operand that looks like
/// one.
fn may_be_recursive(word: &[u8]) -> bool {
    word.starts_with(b"--r") || word.starts_with(b"-") && word.contains(&b'R')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_less_time_here() {
        let link = |milliseconds| AtHand {
            files: 1,
            round_trip: Duration::from_millis(milliseconds),
            ..AtHand::default()
        };
        let is_sooner = |all: AtHand| time_here(&all) < all.round_trip + RUN;
        assert!(is_sooner(link(20)));
        assert!(is_sooner(AtHand { round_trips: 1, missing: 100_000, ..link(20) }));
        assert!(!is_sooner(AtHand { round_trips: 1, missing: 200_000, ..link(20) }));
        assert!(!is_sooner(AtHand { round_trips: 2, ..link(20) }));
        assert!(is_sooner(AtHand { round_trips: 3, ..link(1) }));
        assert!(is_sooner(AtHand { bytes: 20_000_000, ..link(20) }));
        assert!(!is_sooner(AtHand { bytes: 30_000_000, ..link(20) }));
        assert!(!is_sooner(AtHand { files: 2000, ..link(20) }));
    }

    #[test]
    fn a_recursive_listing_is_told_apart() {
        for word in ["-R", "-lR", "--recursive", "--rec"] {
            assert!(may_be_recursive(word.as_bytes()), "{word}");
        }
        for word in ["-l", "README", "--all"] {
            assert!(!may_be_recursive(word.as_bytes()), "{word}");
        }
    }
}
