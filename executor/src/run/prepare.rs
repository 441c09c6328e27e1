//! Prepares a requested run: admits, unpacks and decodes its specification, analyses its commands,
//! and checks its plumbing. A specification of some KiB can hold a hundred thousand words and
//! paths: it stays packed until its turn, is analysed off the runtime's threads, and its memory is
//! charged to its identity until the run has begun.

use std::{mem::size_of, sync::Arc, time::Duration};

use bytes::Bytes;
use posh_proto::{
    codec::RUN_BYTES,
    executor::{
        ClientFile, Guard, MountPoint, RunSpec, Stage, VolumeSession, WatchedTree, rejected::Kind,
    },
    packed,
};
use prost::Message as _;

use super::{
    audit::RunRecord, inlet::WINDOW_BYTES, kept::check_run_id, outbox::HELD_BYTES,
    plumbing::PIPE_BYTES,
};
use crate::{
    callers::Caller,
    classifier::{Passing, Turns},
    error::Refusal,
    load::{BytesShare, Need, RunShare},
    policy::Policy,
    runner::{MAX_KEPT_BYTES, wire::Fence},
    service::ServiceState,
    wiring::{Wiring, descriptors_to_begin},
};

/// Chunks in a run's queue, and about as much again in HTTP/2.
const OUTPUT_BYTES: usize = 2 << 20;

/// Memory of a run's supervisor while its commands run, about.
const SUPERVISOR_BYTES: usize = 1 << 20;

/// A larger specification, inflated or decoded, is large: until its commands run, what is made of
/// it takes more than ten times as much (a rule for each path, the job and its frame), so that each
/// identity has one of these at a time.
const LARGE_BYTES: usize = 64 << 10;
const LARGE_DECODED_BYTES: usize = 256 << 10;
/// Starting as many commands and paths as are allowed takes some ten seconds. A start that waits
/// itself (a named pipe is opened, a file system hangs) may wait for a later one.
const LONGEST_LARGE_TURN: Duration = Duration::from_secs(30);

/// A specification as received.
pub enum ReceivedSpec {
    Plain(Box<RunSpec>),
    Packed(Bytes),
}

/// A run that may be started.
pub struct Prepared {
    pub run_id: String,
    pub grace_ms: u32,
    pub trace: bool,
    pub record: RunRecord,
    pub spec: Rest,
    pub client_files: Vec<ClientFile>,
    pub fences: Vec<Fence>,
    /// The policy by which they were checked.
    pub policy: Arc<Policy>,
    pub wiring: Wiring,
    pub share: RunShare,
    /// Bytes of the share that are the specification's.
    pub specification_bytes: usize,
    /// Held until its commands run.
    pub large_turn: Option<LargeTurn>,
}

/// A turn among the large specifications of one identity.
pub struct LargeTurn(Option<Passing>);

impl LargeTurn {
    async fn of(turns: &Turns, caller: &Caller) -> Self {
        Self(Some(turns.passing(caller, LONGEST_LARGE_TURN).await))
    }
}

impl Drop for LargeTurn {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(Passing::end);
    }
}

/// Other parts of the specification that the start needs.
pub struct Rest {
    pub mounts: Vec<MountPoint>,
    pub volumes: Vec<VolumeSession>,
}

/// A specification waiting for its turn, and its room.
enum WaitingSpec {
    Admitted(Box<RunSpec>, RunShare, usize),
    Packed(Bytes, BytesShare),
}

/// Admits and analyses a requested run, or refuses it; then nothing is left of it.
pub async fn prepare(
    shared: &Arc<ServiceState>,
    caller: &Arc<Caller>,
    peer: &str,
    asked: ReceivedSpec,
) -> Result<Prepared, Refusal> {
    require_open(shared)?;
    let large_turn = match is_large(shared, caller, &asked).await? {
        true => Some(LargeTurn::of(&shared.large, caller).await),
        false => None,
    };
    let waiting = match asked {
        // Refused at once if there is no room.
        ReceivedSpec::Plain(spec) => admit(shared, caller, spec)?,
        ReceivedSpec::Packed(packed) => {
            let share = shared.load.hold(caller, packed.len())?;
            WaitingSpec::Packed(packed, share)
        }
    };
    let (reader, asking, peer) = (shared.clone(), caller.clone(), peer.to_owned());
    let reading = move || {
        let waiting = match waiting {
            WaitingSpec::Packed(packed, share) => unpack(&reader, &asking, packed, share)?,
            admitted => admitted,
        };
        match waiting {
            WaitingSpec::Admitted(spec, share, bytes) => {
                let prepared = read(&reader, &asking, &peer, *spec, share, bytes)?;
                Ok(Prepared { large_turn, ..prepared })
            }
            WaitingSpec::Packed(..) => Err(not_one()),
        }
    };
    shared.classifier.read(caller, reading).await
}

async fn is_large(
    shared: &ServiceState,
    caller: &Caller,
    asked: &ReceivedSpec,
) -> Result<bool, Refusal> {
    match asked {
        ReceivedSpec::Plain(spec) => Ok(specification_bytes(spec) > LARGE_DECODED_BYTES),
        ReceivedSpec::Packed(packed) => {
            let packed = packed.clone();
            shared
                .classifier
                .read(caller, move || Ok(packed::inflated_bytes(&packed) > LARGE_BYTES))
                .await
        }
    }
}

fn require_open(shared: &ServiceState) -> Result<(), Refusal> {
    match shared.is_draining() {
        true => Err(Refusal::new(Kind::ShuttingDown, "the executor is shutting down")),
        false => Ok(()),
    }
}

fn not_one() -> Refusal {
    Refusal::protocol("the first message must be the specification")
}

fn unpack(
    shared: &Arc<ServiceState>,
    caller: &Caller,
    packed: Bytes,
    share: BytesShare,
) -> Result<WaitingSpec, Refusal> {
    let encoded = packed::inflate(&packed).ok_or_else(not_one)?;
    drop((packed, share));
    let inflated = shared.load.hold(caller, encoded.len())?;
    let spec = RunSpec::decode(&*encoded).map_err(|_| not_one())?;
    drop((encoded, inflated));
    admit(shared, caller, Box::new(spec))
}

/// Reserves room for the run and its specification.
fn admit(
    shared: &Arc<ServiceState>,
    caller: &Caller,
    spec: Box<RunSpec>,
) -> Result<WaitingSpec, Refusal> {
    check_run_id(&spec.run_id)?;
    shared.load.admit_call(caller)?;
    let bytes = specification_bytes(&spec);
    let need = need(&spec);
    let need = Need { buffered_bytes: need.buffered_bytes.saturating_add(bytes), ..need };
    let share = shared.load.admit_run(caller, need)?;
    // Checked after the admission: a shutdown either waits for this run, or is seen by this check.
    require_open(shared)?;
    Ok(WaitingSpec::Admitted(spec, share, bytes))
}

/// Analyses the commands' words, and checks their plumbing.
fn read(
    shared: &ServiceState,
    caller: &Caller,
    peer: &str,
    mut spec: RunSpec,
    share: RunShare,
    specification_bytes: usize,
) -> Result<Prepared, Refusal> {
    for stage in &spec.stages {
        caller.require_command(&stage.program).map_err(|refusal| refusal.at(stage.id))?;
    }
    let client_files = std::mem::take(&mut spec.client_files);
    let policy = shared.policy();
    let fences = policy.fences(&mut spec.stages, &client_files)?;
    let record = RunRecord::of(&spec, &client_files, caller, peer);
    let rest = Rest {
        mounts: std::mem::take(&mut spec.mounts),
        volumes: std::mem::take(&mut spec.volumes),
    };
    let (run_id, grace_ms, trace) = (std::mem::take(&mut spec.run_id), spec.grace_ms, spec.trace);
    let wiring = Wiring::check(spec)?;
    Ok(Prepared {
        run_id,
        grace_ms,
        trace,
        record,
        spec: rest,
        client_files,
        fences,
        policy,
        wiring,
        share,
        specification_bytes,
        large_turn: None,
    })
}

/// Resources of a run: its commands, for each of its streams a pipe of full size and the bytes
/// between pipe and network, and its supervisor's records of the trees that the commands may
/// change.
fn need(spec: &RunSpec) -> Need {
    let own_pipes = spec.inlets.len()
        + spec.merges.len()
        + spec.outlets.iter().map(|o| o.sources.len()).sum::<usize>();
    let held_bytes = if spec.grace_ms > 0 { HELD_BYTES } else { 0 };
    // The buffer of its messages stays as large as the largest until the call ends.
    let looks_at_trees =
        spec.stages.iter().any(|stage| stage.watched_trees.iter().any(|tree| !tree.made));
    let told_of =
        spec.stages.iter().flat_map(|stage| stage.owners_of.iter().chain(&stage.attributes_of));
    let told_bytes: usize = told_of.map(|path| size_of::<std::path::PathBuf>() + path.len()).sum();
    let kept_bytes = SUPERVISOR_BYTES + if looks_at_trees { MAX_KEPT_BYTES } else { told_bytes };
    let buffered_bytes = (OUTPUT_BYTES + RUN_BYTES + held_bytes + kept_bytes)
        .saturating_add(own_pipes.saturating_mul(PIPE_BYTES))
        .saturating_add(spec.inlets.len().saturating_mul(WINDOW_BYTES));
    Need {
        processes: spec.stages.len(),
        buffered_bytes,
        descriptors: descriptors_to_begin(spec),
        ptys: spec.ptys.len(),
    }
}

/// Memory of a specification: its bytes, and the structures into which they were decoded.
fn specification_bytes(spec: &RunSpec) -> usize {
    spec.encoded_len() + slots(&spec.stages) + spec.stages.iter().map(stage_bytes).sum::<usize>()
}

fn stage_bytes(stage: &Stage) -> usize {
    let tree = |tree: &WatchedTree| {
        slots(&tree.up_to) + slots(&tree.only) + slots(&tree.grows) + slots(&tree.own)
    };
    let guard = |guard: &Guard| slots(&guard.files) + slots(&guard.settings);
    let words = slots(&stage.argv)
        + slots(&stage.env)
        + slots(&stage.paths)
        + slots(&stage.covered)
        + slots(&stage.owners_of)
        + slots(&stage.attributes_of);
    let others = slots(&stage.descriptors)
        + slots(&stage.limits)
        + slots(&stage.guards)
        + slots(&stage.watched_trees);
    words
        + others
        + stage.watched_trees.iter().map(tree).sum::<usize>()
        + stage.guards.iter().map(guard).sum::<usize>()
}

fn slots<T>(list: &Vec<T>) -> usize {
    list.capacity() * size_of::<T>()
}

#[cfg(test)]
mod tests {
    use posh_proto::executor::PathUse;

    use super::*;

    #[test]
    fn what_a_supervisor_keeps_of_trees_counts() {
        let with = |tree: WatchedTree| {
            let stage = Stage { watched_trees: vec![tree], ..Stage::default() };
            need(&RunSpec { stages: vec![stage], ..RunSpec::default() }).buffered_bytes
        };
        let made = with(WatchedTree { made: true, ..WatchedTree::default() });
        assert_eq!(with(WatchedTree::default()), made + MAX_KEPT_BYTES);
    }

    #[test]
    fn what_words_are_decoded_into_counts() {
        let paths = vec![PathUse { path: "f".into(), ..PathUse::default() }; 100_000];
        let spec =
            RunSpec { stages: vec![Stage { paths, ..Stage::default() }], ..RunSpec::default() };
        let decoded = RunSpec::decode(&*spec.encode_to_vec()).unwrap();
        assert!(specification_bytes(&decoded) > 100_000 * size_of::<PathUse>());
    }
}
