//! Checks a `RunSpec` before anything is made for it: unknown ids, ends with two readers, bounds.
//! The result is a [`Wiring`], in which every end of every pipe has its holder.

use std::{
    collections::{HashMap, HashSet},
    ffi::OsStr,
    os::unix::ffi::OsStrExt as _,
    path::{Component, Path},
};

use posh_proto::{
    PROTOCOL_VERSION,
    executor::{
        Descriptor, Inlet, Merge, Outlet, Pty, RunSpec, Stage, WatchedTree, descriptor::Source,
    },
    other_version,
};

use crate::{
    error::Refusal,
    runner::wire::{EndKind, PipeEnd},
};

/// Stages of one run; a pipeline split over the files of a large directory has
/// some hundred.
const MAX_STAGES: usize = 4096;

/// Pipes and ptys of one run: two per stage, and some for streams.
const MAX_PIPES: usize = 3 * MAX_STAGES;

/// A run's socket, and its cgroup.
const OTHER_DESCRIPTORS: usize = 2;

/// Descriptor numbers of a command; the kernel's default for fs.nr_open.
const MAX_DESCRIPTOR: u32 = 1 << 20;

/// A run's plumbing, checked.
#[derive(Debug)]
pub struct Wiring {
    pub pipes: Vec<u32>,
    pub ptys: Vec<Pty>,
    pub merges: Vec<Merge>,
    pub inlets: Vec<Inlet>,
    pub outlets: Vec<Outlet>,
    /// The ends that stages hold, each once.
    pub stage_ends: Vec<PipeEnd>,
    pub stages: Vec<Stage>,
}

/// Descriptors that a run needs in the daemon while it is set up.
pub fn descriptors_to_begin(spec: &RunSpec) -> usize {
    2 * (spec.pipes.len() + spec.ptys.len()) + OTHER_DESCRIPTORS
}

impl Wiring {
    /// Checks and converts the spec, or returns its mistake.
    pub fn check(spec: RunSpec) -> Result<Self, Refusal> {
        if spec.protocol != PROTOCOL_VERSION {
            let message = other_version("the gateway", spec.protocol, "this executor");
            return Err(Refusal::protocol(message));
        }
        require_bounds(&spec)?;
        let mut checker = Checker::new(&spec)?;
        let mut ids = HashSet::new();
        for stage in &spec.stages {
            if !ids.insert(stage.id) {
                return Err(Refusal::protocol(format!("stage {} is named twice", stage.id)));
            }
            checker.stage(stage).map_err(|refusal| refusal.at(stage.id))?;
        }
        checker.streams(&spec)?;
        // Pipes without any end in use are dropped.
        let is_used = |id: &u32| {
            let ends = [EndKind::PipeRead, EndKind::PipeWrite]
                .map(|kind| PipeEnd { kind: kind.into(), id: *id });
            ends.iter()
                .any(|end| checker.own_ends.contains(end) || checker.stage_ends.contains(end))
        };
        let pipes = spec.pipes.into_iter().filter(is_used).collect();
        let mut stage_ends: Vec<_> = checker.stage_ends.into_iter().collect();
        stage_ends.sort_unstable();
        Ok(Self {
            pipes,
            ptys: spec.ptys,
            merges: spec.merges,
            inlets: spec.inlets,
            outlets: spec.outlets,
            stage_ends,
            stages: spec.stages,
        })
    }

    /// Descriptors that the run has in the daemon once it has started.
    pub fn own_descriptors(&self) -> usize {
        let sources = self.outlets.iter().map(|outlet| outlet.sources.len());
        let merged = self.merges.iter().map(|merge| merge.sources.len() + 1);
        self.inlets.len() + sources.chain(merged).sum::<usize>() + OTHER_DESCRIPTORS
    }
}

fn require_bounds(spec: &RunSpec) -> Result<(), Refusal> {
    if spec.stages.is_empty() {
        return Err(Refusal::protocol("a run without stages"));
    }
    if spec.stages.len() > MAX_STAGES {
        return Err(Refusal::protocol(format!(
            "{} stages, more than {MAX_STAGES}",
            spec.stages.len()
        )));
    }
    if spec.pipes.len() + spec.ptys.len() > MAX_PIPES {
        return Err(Refusal::protocol(format!("more than {MAX_PIPES} pipes")));
    }
    Ok(())
}

/// A tree has a plain absolute path, and all names in it are plain.
fn require_plain_tree(tree: &WatchedTree) -> Result<(), Refusal> {
    let path = Path::new(OsStr::from_bytes(&tree.path));
    let is_plain = |name: &&String| {
        Path::new(name)
            .components()
            .all(|part| matches!(part, Component::Normal(_) | Component::CurDir))
    };
    let mut names = [&tree.up_to, &tree.only, &tree.grows, &tree.own].into_iter().flatten();
    if !path.is_absolute() || path.components().any(|part| part == Component::ParentDir) {
        return Err(Refusal::protocol(format!(
            "the watched tree {} is no plain absolute path",
            path.display()
        )));
    }
    match names.find(|name| !is_plain(name)) {
        None => Ok(()),
        Some(name) => Err(Refusal::protocol(format!(
            "{name:?} is no plain name in the watched tree {}",
            path.display()
        ))),
    }
}

/// Kind of object that an id names.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Named {
    Pipe,
    Pty,
    Stream,
}

struct Checker {
    names: HashMap<u32, Named>,
    stage_ends: HashSet<PipeEnd>,
    /// Ends that this daemon reads or writes itself.
    own_ends: HashSet<PipeEnd>,
}

impl Checker {
    fn new(spec: &RunSpec) -> Result<Self, Refusal> {
        let pipes = spec.pipes.iter().map(|&id| (id, Named::Pipe));
        let ptys = spec.ptys.iter().map(|pty| (pty.id, Named::Pty));
        let inlets = spec.inlets.iter().map(|inlet| (inlet.stream, Named::Stream));
        let outlets = spec.outlets.iter().map(|outlet| (outlet.stream, Named::Stream));
        let mut names = HashMap::new();
        for (id, named) in pipes.chain(ptys).chain(inlets).chain(outlets) {
            if names.insert(id, named).is_some() {
                return Err(Refusal::protocol(format!("number {id} names two things")));
            }
        }
        Ok(Self { names, stage_ends: HashSet::new(), own_ends: HashSet::new() })
    }

    fn stage(&mut self, stage: &Stage) -> Result<(), Refusal> {
        if stage.program.is_empty() || stage.program.contains('/') {
            return Err(Refusal::protocol(format!("`{}` is no name of a program", stage.program)));
        }
        if stage.argv.is_empty() {
            return Err(Refusal::protocol(format!(
                "no arguments for {}, not even its name",
                stage.program
            )));
        }
        stage.watched_trees.iter().try_for_each(require_plain_tree)?;
        let mut seen = HashSet::new();
        for descriptor in &stage.descriptors {
            if descriptor.fd >= MAX_DESCRIPTOR || !seen.insert(descriptor.fd) {
                return Err(Refusal::protocol(format!(
                    "descriptor {} is out of range or given twice",
                    descriptor.fd
                )));
            }
            self.descriptor(descriptor)?;
        }
        Ok(())
    }

    fn descriptor(&mut self, descriptor: &Descriptor) -> Result<(), Refusal> {
        let (kind, id) = match descriptor.source {
            Some(Source::PipeRead(id)) => (EndKind::PipeRead, id),
            Some(Source::PipeWrite(id)) => (EndKind::PipeWrite, id),
            Some(Source::Pty(id)) => (EndKind::Pty, id),
            _ => return Ok(()),
        };
        self.require(id, if kind == EndKind::Pty { Named::Pty } else { Named::Pipe })?;
        self.stage_ends.insert(PipeEnd { kind: kind.into(), id });
        Ok(())
    }

    fn streams(&mut self, spec: &RunSpec) -> Result<(), Refusal> {
        for merge in &spec.merges {
            for &source in &merge.sources {
                self.require(source, Named::Pipe)?;
                self.own(EndKind::PipeRead, source)?;
            }
            self.require(merge.pipe, Named::Pipe)?;
            self.own(EndKind::PipeWrite, merge.pipe)?;
        }
        require_no_circle(&spec.merges)?;
        for inlet in &spec.inlets {
            self.require(inlet.pipe, Named::Pipe)?;
            self.own(EndKind::PipeWrite, inlet.pipe)?;
        }
        for &source in spec.outlets.iter().flat_map(|outlet| &outlet.sources) {
            match self.names.get(&source) {
                // The daemon has the master side of the pty, which no stage has.
                Some(Named::Pty) => self.own(EndKind::PipeRead, source)?,
                _ => {
                    self.require(source, Named::Pipe)?;
                    self.own(EndKind::PipeRead, source)?;
                }
            }
        }
        Ok(())
    }

    fn require(&self, id: u32, named: Named) -> Result<(), Refusal> {
        if self.names.get(&id) == Some(&named) {
            return Ok(());
        }
        let what = if named == Named::Pipe { "pipe" } else { "pty" };
        Err(Refusal::protocol(format!("{id} names no {what}")))
    }

    fn own(&mut self, kind: EndKind, id: u32) -> Result<(), Refusal> {
        let end = PipeEnd { kind: kind.into(), id };
        if self.stage_ends.contains(&end) || !self.own_ends.insert(end) {
            return Err(Refusal::protocol(format!("an end of pipe {id} has two holders")));
        }
        Ok(())
    }
}

/// Refuses merges that lead a pipe back into itself, through however many others: it would never
/// reach end of file, and the run would outlive its commands.
///
/// Each pipe is read by one merge at most, so that each has one successor.
fn require_no_circle(merges: &[Merge]) -> Result<(), Refusal> {
    let onwards = |merge: &Merge| {
        merge.sources.iter().map(|source| (*source, merge.pipe)).collect::<Vec<_>>()
    };
    let next: HashMap<u32, u32> = merges.iter().flat_map(onwards).collect();
    // Start of the walk that has passed each pipe: the current one, or an earlier one.
    let mut passed: HashMap<u32, u32> = HashMap::new();
    for &start in next.keys() {
        let mut pipe = start;
        while let Some(&following) = next.get(&pipe) {
            match passed.insert(pipe, start) {
                Some(by) if by == start => {
                    return Err(Refusal::protocol(format!(
                        "pipe {pipe} is merged into itself: its end would never come"
                    )));
                }
                // The rest was walked before, and ends.
                Some(_) => break,
                None => pipe = following,
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(id: u32, sources: &[Source]) -> Stage {
        let descriptors =
            (0..).zip(sources).map(|(fd, source)| Descriptor { fd, source: Some(source.clone()) });
        Stage {
            id,
            program: "cat".into(),
            argv: vec!["cat".into()],
            descriptors: descriptors.collect(),
            ..Stage::default()
        }
    }

    fn spec() -> RunSpec {
        RunSpec {
            protocol: PROTOCOL_VERSION,
            stages: vec![
                stage(1, &[Source::NullFlags(0), Source::PipeWrite(10)]),
                stage(2, &[Source::PipeRead(10), Source::PipeWrite(11)]),
            ],
            pipes: vec![10, 11],
            outlets: vec![Outlet { stream: 20, sources: vec![11], initial_credit_bytes: 1 }],
            ..RunSpec::default()
        }
    }

    #[test]
    fn a_sound_spec_passes() {
        let wiring = Wiring::check(spec()).unwrap();
        let ends: Vec<_> = wiring.stage_ends.iter().map(|end| (end.kind(), end.id)).collect();
        assert_eq!(
            ends,
            [(EndKind::PipeRead, 10), (EndKind::PipeWrite, 10), (EndKind::PipeWrite, 11)]
        );
    }

    #[test]
    fn what_is_wrong_is_said() {
        let check = |expected: &str, change: fn(&mut RunSpec)| {
            let mut spec = spec();
            change(&mut spec);
            let refusal = Wiring::check(spec).unwrap_err();
            assert!(refusal.message.contains(expected), "{} lacks {expected:?}", refusal.message);
        };
        check("protocol 9", |spec| spec.protocol = 9);
        check("without stages", |spec| spec.stages.clear());
        check("stage 1 is named twice", |spec| spec.stages[1].id = 1);
        check("names two things", |spec| spec.pipes.push(20));
        check("99 names no pipe", |spec| spec.outlets[0].sources = vec![99]);
        check("two holders", |spec| spec.outlets[0].sources = vec![10]);
        check("two holders", |spec| spec.inlets.push(Inlet { stream: 21, pipe: 11 }));
        check("is no name of a program", |spec| spec.stages[0].program = "/bin/cat".into());
        check("not even its name", |spec| spec.stages[0].argv.clear());
        check("plain absolute path", |spec| {
            spec.stages[0].watched_trees =
                vec![WatchedTree { path: "/m/../x".into(), ..WatchedTree::default() }];
        });
        let fields: [fn(&mut WatchedTree) -> &mut Vec<String>; 4] = [
            |tree| &mut tree.up_to,
            |tree| &mut tree.only,
            |tree| &mut tree.grows,
            |tree| &mut tree.own,
        ];
        for (field, (name, is_plain)) in fields.into_iter().flat_map(|field| {
            [("/etc", false), ("a/../..", false), ("a/./b", true)].map(|name| (field, name))
        }) {
            let mut tree = WatchedTree { path: "/m".into(), ..WatchedTree::default() };
            field(&mut tree).push(name.to_owned());
            let mut spec = spec();
            spec.stages[0].watched_trees = vec![tree];
            assert_eq!(Wiring::check(spec).is_ok(), is_plain, "{name}");
        }
        check("given twice", |spec| spec.stages[0].descriptors[1].fd = 0);
        check("more than 4096", |spec| spec.stages = vec![spec.stages[0].clone(); MAX_STAGES + 1]);
    }

    #[test]
    fn merges_lead_nowhere_back() {
        let check = |merges: &[(&[u32], u32)]| {
            let mut spec = spec();
            spec.pipes.extend(30..40);
            let merges = merges
                .iter()
                .map(|(sources, pipe)| Merge { sources: sources.to_vec(), pipe: *pipe });
            spec.merges = merges.collect();
            Wiring::check(spec).map_err(|refusal| refusal.message)
        };
        let circles: [&[(&[u32], u32)]; 5] = [
            &[(&[30], 30)],
            &[(&[31, 30], 30)],
            &[(&[30], 31), (&[31], 30)],
            &[(&[33, 31], 32), (&[32], 30), (&[30], 31)],
            &[(&[35], 30), (&[30], 31), (&[31, 32], 33), (&[33], 32)],
        ];
        for circle in circles {
            let refused = check(circle).unwrap_err();
            assert!(
                refused.ends_with("is merged into itself: its end would never come"),
                "{circle:?}: {refused}"
            );
        }
        assert!(check(&[(&[30, 31], 32), (&[32, 33], 34), (&[34], 35), (&[36], 37)]).is_ok());
        // A chain of thousands of pipes.
        let mut long = spec();
        long.pipes.extend(1000..9000);
        long.merges =
            (1000..8999).map(|pipe| Merge { sources: vec![pipe], pipe: pipe + 1 }).collect();
        assert!(Wiring::check(long.clone()).is_ok());
        long.merges.push(Merge { sources: vec![8999], pipe: 1000 });
        assert!(Wiring::check(long).is_err());
    }

    #[test]
    fn a_pipe_that_nothing_uses_is_not_made() {
        let mut spec = spec();
        spec.pipes.extend(100..10_000);
        let wiring = Wiring::check(spec).unwrap();
        assert_eq!((wiring.pipes.as_slice(), wiring.own_descriptors()), (&[10, 11][..], 3));
    }
}
