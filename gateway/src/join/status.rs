//! Combines the exit statuses of parts and of their aggregator.

use nix::sys::signal::Signal;
use posh_annotations::StatusRule;

use crate::stage_link::Status;

const BROKEN_PIPE: Status = Status::Signal(Signal::SIGPIPE as u32);

/// Status of a stage from its parts and its aggregator, if any.
#[must_use]
pub fn of_stage(parts: &[Status], joined: Option<Status>, rule: StatusRule) -> Status {
    // A signal that killed a part, and then its aggregator, takes precedence over the aggregator's
    // status.
    let is_killed = parts.iter().any(|s| matches!(s, Status::Signal(_)) && *s != BROKEN_PIPE);
    let joined = joined.filter(|s| *s != Status::Code(0) && !is_killed);
    joined.unwrap_or_else(|| of_parts(parts, rule))
}

/// Combines the parts' statuses by the annotation's rule.
fn of_parts(parts: &[Status], rule: StatusRule) -> Status {
    let signals = || parts.iter().copied().filter(|s| matches!(s, Status::Signal(_)));
    if let Some(signal) = signals().find(|s| *s != BROKEN_PIPE).or_else(|| signals().next()) {
        return signal;
    }
    let codes =
        parts.iter().filter_map(|s| if let Status::Code(code) = s { Some(*code) } else { None });
    let largest = codes.clone().max().unwrap_or(0);
    Status::Code(match rule {
        StatusRule::Maximum => largest,
        StatusRule::Grep if largest > 1 => largest,
        StatusRule::Grep => codes.min().unwrap_or(0),
    })
}

/// Status of a chain of commands that stands for one: the last one's. If that is a success, the
/// first failure of an earlier one, except SIGPIPE, as in a shell.
#[must_use]
pub fn of_chain(commands: &[Status]) -> Status {
    let Some((last, earlier)) = commands.split_last() else { return Status::Code(0) };
    let fault = earlier.iter().find(|s| **s != Status::Code(0) && **s != BROKEN_PIPE);
    match last {
        Status::Code(0) => fault.copied().unwrap_or(*last),
        _ => *last,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_of_parts_combine_as_the_whole_would_have_ended() {
        let (well, one, two, killed) =
            (Status::Code(0), Status::Code(1), Status::Code(2), Status::Signal(9));
        let check = |parts: &[Status], rule, expect| {
            assert_eq!(of_stage(parts, None, rule), expect, "{parts:?}")
        };
        check(&[well, one], StatusRule::Maximum, one);
        check(&[well, one], StatusRule::Grep, well);
        check(&[one, one], StatusRule::Grep, one);
        check(&[well, two], StatusRule::Grep, two);
        check(&[well, BROKEN_PIPE, killed], StatusRule::Grep, killed);
        assert_eq!(of_stage(&[well, well], Some(two), StatusRule::Maximum), two);
        assert_eq!(of_stage(&[BROKEN_PIPE, well], Some(two), StatusRule::Maximum), two);
        assert_eq!(
            of_stage(&[killed, well], Some(Status::Signal(13)), StatusRule::Maximum),
            killed
        );
    }

    #[test]
    fn a_chain_ends_as_its_last_command() {
        let (well, two) = (Status::Code(0), Status::Code(2));
        assert_eq!(of_chain(&[two, well]), two);
        assert_eq!(of_chain(&[BROKEN_PIPE, well]), well);
        assert_eq!(of_chain(&[two, BROKEN_PIPE]), BROKEN_PIPE);
    }
}
