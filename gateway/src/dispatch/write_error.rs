//! Ends of commands whose reader leaves before they have written all.
//!
//! SIGPIPE ends a command wherever it runs. One that ignores the signal (signal(7); services of
//! systemd do) sees EPIPE, and each ends in a way of its own: with a status, and words that may
//! depend on what it has written by then. Only a command whose own write fails knows them, so it
//! runs where its pipe is.

use std::sync::Arc;

use nix::{libc::STDOUT_FILENO, sys::signal::Signal};
use posh_proto::rule::{self, Rule};

use crate::{
    enlisted::{DescriptorKind, Enlisted},
    model::{Edge, LocalReason, ReasonKind},
    plan::{self, Need, PipelineFacts, Placement, Plan, PlanSettings},
};

/// Descriptor of standard output.
const OUTPUT: u32 = STDOUT_FILENO.unsigned_abs();

/// Plans a pipeline whose commands that ignore SIGPIPE run where their pipes are.
pub fn plan(commands: &[Arc<Enlisted>], facts: &mut PipelineFacts, options: PlanSettings) -> Plan {
    let mut plan = plan::greedy(facts, options);
    // Each turn leaves one more stage here.
    while let Some(stage) = unseen(commands, &facts.edges, &plan) {
        facts.stages[stage].need = Need::Here(reason());
        plan = plan::greedy(facts, options);
    }
    plan
}

/// A stage that ignores SIGPIPE and would run on a server, away from its pipe.
fn unseen(commands: &[Arc<Enlisted>], edges: &[Edge], plan: &Plan) -> Option<usize> {
    let machine = |stage: usize| match &plan.placements[stage] {
        Placement::Remote(parts) => match &parts[..] {
            [part] => Some(part.executor),
            _ => None,
        },
        Placement::Here(_) => None,
    };
    let is_beside = |stage: usize| {
        let mut readers = edges.iter().filter(|edge| edge.from == (stage, OUTPUT));
        readers.any(|edge| machine(stage).is_some() && machine(edge.to.0) == machine(stage))
    };
    let is_remote = |stage: &usize| matches!(plan.placements[*stage], Placement::Remote(_));
    (0..commands.len()).filter(is_remote).find(|stage| {
        rule::holds(Rule::InitSignals) && sees(&commands[*stage]) && !is_beside(*stage)
    })
}

/// Returns true if a failing write to a pipe does not end a command by a signal.
fn sees(command: &Enlisted) -> bool {
    let ignores = command.ignored_signals & 1 << (Signal::SIGPIPE as u32 - 1) != 0;
    let mut outputs = command.descriptors.iter().filter(|descriptor| descriptor.fd == OUTPUT);
    ignores && outputs.any(|output| output.kind == DescriptorKind::Pipe)
}

/// Reason for running such a stage here.
fn reason() -> LocalReason {
    ReasonKind::Descriptors.because(
        "it ignores SIGPIPE, and only here it can tell that the reader of its output has left",
    )
}
