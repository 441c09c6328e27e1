//! State of a remote stage until it ends, and the combination of its parts' exits.

use posh_annotations::StatusRule;
use posh_proto::executor::{Exited, exited};
use tokio::sync::mpsc;

use crate::{
    facts::ResolvedCommand,
    join::{Joining, status},
    lower::RunStream,
    stage_link::{ForStage, StageLink, Status},
};

/// Exit status for a command that posh lost (see the stage program).
pub(super) const EXIT_POSH_FAILED: u32 = 125;

/// End of one part of a stage.
pub(super) enum PartEnd {
    Exited(Exited),
    Lost(String),
    /// Silent since this signal was sent.
    Silent(u32),
}

/// An aggregator on this machine.
pub(super) struct JoinHere {
    pub joining: Joining,
    /// Its input streams, part by part.
    pub inputs: Vec<RunStream>,
    pub ended: Option<Status>,
}

/// State of a stage until it ends.
pub(super) struct StageState {
    pub name: String,
    pub tell: mpsc::Sender<ForStage>,
    /// Its parts, followed by the aggregator's commands on the parts' machine.
    pub parts: Vec<Option<PartEnd>>,
    pub part_count: usize,
    pub join: Option<JoinHere>,
    pub gone: bool,
    pub finished: bool,
}

/// Exit of a command that posh lost.
pub(super) fn failed(message: String) -> ForStage {
    ForStage::Exit {
        status: Status::Code(EXIT_POSH_FAILED),
        core_dumped: false,
        seeks: Vec::new(),
        message,
    }
}

/// `$?` for a status.
pub(super) fn as_shell(status: Status) -> u32 {
    match status {
        Status::Code(code) => code,
        Status::Signal(signal) => 128 + signal.clamp(1, 127),
    }
}

impl PartEnd {
    /// Returns true if the part did not end by itself. SIGPIPE counts as a normal end, as in a
    /// shell.
    pub(super) fn is_violent(&self) -> bool {
        match self {
            Self::Lost(_) | Self::Silent(_) => true,
            Self::Exited(exited) => {
                matches!(
                    exited.how,
                    Some(exited::How::Signal(s)) if s != nix::libc::SIGPIPE.cast_unsigned()
                )
            }
        }
    }
}

impl StageState {
    pub(super) fn new(
        link: &StageLink,
        part_count: usize,
        commands: usize,
        join: Option<JoinHere>,
    ) -> Self {
        Self {
            name: link.enlisted.name.clone(),
            tell: link.sender(),
            parts: (0..commands).map(|_| None).collect(),
            part_count,
            join,
            gone: false,
            finished: false,
        }
    }

    /// Returns true if a part of it was lost or given up.
    pub(super) fn is_lost(&self) -> bool {
        self.parts
            .iter()
            .flatten()
            .any(|part| matches!(part, PartEnd::Lost(_) | PartEnd::Silent(_)))
    }

    /// Exits of its parts so far.
    pub(super) fn exits(&self) -> impl Iterator<Item = &Exited> {
        self.parts
            .iter()
            .flatten()
            .filter_map(|p| if let PartEnd::Exited(e) = p { Some(e) } else { None })
    }

    /// Status of the aggregator, if any: `there` are its commands on the parts' machine.
    fn joined(&self, there: &[&Exited]) -> Option<Status> {
        let statuses: Vec<Status> = there.iter().map(|e| status_of(e)).collect();
        let here = self.join.as_ref().and_then(|j| j.ended);
        here.or_else(|| (!statuses.is_empty()).then(|| status::of_chain(&statuses)))
    }

    pub(super) fn farewell(&self, reading: Option<&ResolvedCommand>) -> ForStage {
        if let Some(PartEnd::Lost(message)) =
            self.parts.iter().flatten().find(|p| matches!(p, PartEnd::Lost(_)))
        {
            return failed(message.clone());
        }
        let silent =
            |part: &PartEnd| if let PartEnd::Silent(signal) = part { Some(*signal) } else { None };
        if let Some(signal) = self.parts.iter().flatten().find_map(silent) {
            let status = Status::Signal(signal);
            return ForStage::Exit {
                status,
                core_dumped: false,
                seeks: Vec::new(),
                message: String::new(),
            };
        }
        let exits: Vec<&Exited> = self.exits().collect();
        let (parts, there) = exits.split_at(self.part_count.min(exits.len()));
        let rule = reading.map_or(StatusRule::Maximum, |r| r.invocation.status_rule);
        let parts: Vec<Status> = parts.iter().map(|e| status_of(e)).collect();
        ForStage::Exit {
            status: status::of_stage(&parts, self.joined(there), rule),
            core_dumped: exits.iter().any(|e| e.core_dumped),
            seeks: exits.iter().flat_map(|e| e.offsets.iter().map(|o| (o.fd, o.offset))).collect(),
            message: String::new(),
        }
    }
}

/// Status of a command.
fn status_of(exited: &Exited) -> Status {
    match exited.how {
        Some(exited::How::Code(code)) => Status::Code(code),
        Some(exited::How::Signal(signal)) => Status::Signal(signal),
        None => Status::Code(EXIT_POSH_FAILED),
    }
}
