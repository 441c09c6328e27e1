//! Stages that run locally whatever surrounds them: the quick look found none of their files on a
//! mount, or a volume has them cached, and their input comes from other such stages. They are
//! identified by the inodes of their pipes, without reading processes, and are released at once:
//! the readers of their output don't matter.
//!
//! Nor do other holders of such pipes: nothing is joined that would have to be exact.

use std::collections::{HashMap, HashSet, VecDeque};

use super::closing;
use crate::enlisted::{Enlisted, Pid};
use crate::model::Edge;

/// Limit on remembered stages; a pipeline's stages start within milliseconds.
const REMEMBERED: usize = 1024;

/// Recently released stages, and the pipes that they write to.
#[derive(Debug, Default)]
pub struct Staying {
    order: VecDeque<(Pid, Vec<u64>)>,
    stages: HashSet<Pid>,
    pipes: HashSet<u64>,
}

impl Staying {
    /// Returns true if this process was released and has not enlisted since.
    #[must_use]
    pub fn is_at_work(&self, pid: Pid) -> bool {
        self.stages.contains(&pid)
    }

    /// Forgets a released stage when a process with its ID enlists.
    pub fn enlisted(&mut self, pid: Pid) {
        self.stages.remove(&pid);
    }

    /// Remembers a stage that is released.
    pub fn let_go(&mut self, stage: &Enlisted) {
        let pipes: Vec<u64> = written(stage).map(|(_, pipe)| pipe).collect();
        self.stages.insert(stage.pid);
        self.pipes.extend(&pipes);
        self.order.push_back((stage.pid, pipes));
        if self.order.len() > REMEMBERED
            && let Some((pid, pipes)) = self.order.pop_front()
        {
            self.stages.remove(&pid);
            self.pipes.retain(|pipe| !pipes.contains(pipe));
        }
    }

    /// Groups of waiting stages (by index) that may go, and the pipes that join them. `fed_here`
    /// knows of local writers that have not enlisted.
    #[must_use]
    pub fn groups(
        &self,
        stages: &[&Enlisted],
        fed_here: &dyn Fn(&Enlisted, u64) -> bool,
    ) -> (Vec<Vec<usize>>, Vec<Edge>) {
        let mut going: Vec<usize> =
            (0..stages.len()).filter(|&i| stages[i].stays.is_some()).collect();
        let mut count = usize::MAX;
        while going.len() < count {
            count = going.len();
            let fed: HashSet<u64> =
                going.iter().flat_map(|&i| written(stages[i])).map(|(_, pipe)| pipe).collect();
            going.retain(|&i| {
                let is_here = |pipe| {
                    fed.contains(&pipe) || self.pipes.contains(&pipe) || fed_here(stages[i], pipe)
                };
                read(stages[i]).all(|(_, pipe)| is_here(pipe))
            });
        }
        let edges = edges(stages, &going);
        let mut groups = closing::groups(stages.len(), &edges);
        groups.retain(|group| going.contains(&group[0]));
        (groups, edges)
    }
}

/// Descriptors and pipes that a stage reads.
fn read(stage: &Enlisted) -> impl Iterator<Item = (u32, u64)> {
    closing::used_ends(stage).filter(|d| d.reads()).map(|d| (d.fd, d.identity.1))
}

/// Descriptors and pipes that a stage writes.
fn written(stage: &Enlisted) -> impl Iterator<Item = (u32, u64)> {
    closing::used_ends(stage).filter(|d| d.writes()).map(|d| (d.fd, d.identity.1))
}

/// Edges from each pipe's writers to each of its readers, among these stages.
fn edges(stages: &[&Enlisted], going: &[usize]) -> Vec<Edge> {
    let mut readers: HashMap<u64, Vec<(usize, u32)>> = HashMap::new();
    for &index in going {
        read(stages[index])
            .for_each(|(fd, pipe)| readers.entry(pipe).or_default().push((index, fd)));
    }
    let writers =
        going.iter().flat_map(|&index| written(stages[index]).map(move |end| (index, end)));
    let joined = writers.flat_map(|(index, (fd, pipe))| {
        readers.get(&pipe).into_iter().flatten().map(move |to| Edge { from: (index, fd), to: *to })
    });
    joined.collect()
}

#[cfg(test)]
mod tests {
    use super::{super::closing::tests::stage, *};
    use crate::model::LocalReason;

    const NONE: Vec<Vec<usize>> = Vec::new();

    fn found(before: &Staying, stages: &[Enlisted]) -> Vec<Vec<usize>> {
        before.groups(&stages.iter().collect::<Vec<_>>(), &|_, pipe| pipe == 77).0
    }

    fn staying(pid: Pid, ends: &[(u32, u64, bool)]) -> Enlisted {
        Enlisted { stays: Some(LocalReason::nothing_on_mounts()), ..stage(pid, ends, 0, &[]) }
    }

    fn pipeline() -> [Enlisted; 3] {
        let ends: [&[_]; 3] =
            [&[(1, 1, true)], &[(0, 1, false), (1, 2, true)], &[(0, 2, false), (1, 3, true)]];
        [11, 12, 13].map(|pid| staying(pid, ends[pid as usize - 11]))
    }

    #[test]
    fn what_they_read_must_come_from_others_of_their_kind() {
        let before = Staying::default();
        let [cat, grep, wc] = pipeline();
        assert_eq!(found(&before, &[wc.clone(), cat.clone(), grep.clone()]), [[1, 2, 0]]);
        assert_eq!(found(&before, &[wc.clone(), cat.clone()]), [[1]]);
        assert_eq!(found(&before, &[wc.clone(), grep.clone()]), NONE);
        let there = Enlisted { stays: None, ..cat };
        assert_eq!(found(&before, &[there, grep, wc]), NONE);
        assert_eq!(
            found(&before, &[staying(14, &[(0, 77, false)]), staying(15, &[(0, 78, false)])]),
            [[0]]
        );
    }

    #[test]
    fn who_was_let_go_before_counts() {
        let mut before = Staying::default();
        let [cat, grep, wc] = pipeline();
        before.let_go(&cat);
        assert_eq!(found(&before, &[wc, grep]), [[1, 0]]);
        assert!(before.is_at_work(11));
        before.enlisted(11);
        assert!(!before.is_at_work(11));
    }

    #[test]
    fn only_so_many_are_remembered() {
        let mut before = Staying::default();
        (1..=REMEMBERED as u32 + 1)
            .for_each(|n| before.let_go(&staying(n, &[(1, n.into(), true)])));
        assert!(!before.is_at_work(1) && before.is_at_work(2));
        assert_eq!(found(&before, &[staying(3000, &[(0, 1, false)])]), NONE);
        assert_eq!(found(&before, &[staying(3000, &[(0, 2, false)])]), [[0]]);
    }
}
