//! Targets of the table as data, with verdicts.

use super::catalogue::is_local;
use super::results::Results;

/// Limit relative to bash on the server itself.
#[derive(Debug, Clone, Copy)]
enum Over {
    /// Additional seconds.
    Seconds(f64),
    /// Additional seconds for each of a number of commands.
    Each(f64, usize),
    /// Additional share.
    Share(f64),
}

/// Targets of one workload.
struct Aim {
    workload: &'static str,
    /// Factor by which posh must be faster than bash over sshfs.
    faster: Option<f64>,
    over: Option<Over>,
}

const fn aim(workload: &'static str, faster: f64, over: Over) -> Aim {
    Aim { workload, faster: Some(faster), over: Some(over) }
}

/// git apply, status, add and commit for each of 20 patches, and git log.
const GIT_COMMANDS: usize = 81;

/// Round trip from which the factors over sshfs are targets: a shorter one leaves less to gain.
const FAR_MS: f64 = 20.0;

/// Targets at size s. Ratios count; absolute times are a guide.
const AIMS: [Aim; 8] = [
    aim("raytrace", 40.0, Over::Seconds(0.25)),
    aim("access-logs", 30.0, Over::Seconds(0.25)),
    aim("git", 50.0, Over::Each(0.06, GIT_COMMANDS)),
    aim("grep-r", 150.0, Over::Seconds(0.10)),
    aim("tar-x", 300.0, Over::Seconds(0.10)),
    Aim { workload: "comm", faster: Some(1.0), over: None },
    aim("port-scan", 2.5, Over::Share(0.15)),
    aim("thumbnails", 5.0, Over::Share(0.15)),
];
/// Extra time of one small command on a warm connection, beyond the round trip.
const ONE_COMMAND_MS: f64 = 6.0;
/// Ratio to bash alone for 1,000 local commands: through the hook, and through PATH.
const LOCAL: [(&str, f64); 2] = [("posh", 1.15), ("posh-path", 1.7)];
/// posh over sshfs, and over its own volumes.
const POSH: [&str; 2] = ["posh", "posh-volume"];
/// Limits of programs on the workstation over a volume, in seconds.
const VOLUME: [(&str, f64); 3] = [("read-small", 2.0), ("walk", 1.2), ("untar-here", 3.0)];
/// Share of the link's rate for a large file.
const LINK_SHARE: f64 = 0.9;
/// Most that a cell may be slower than bash over the same mount, or, over a volume, than over the
/// sshfs mount that it replaces.
const SLOWER: f64 = 1.05;
const NEVER_SLOWER: [(&str, &str); 3] =
    [("posh", "sshfs"), ("posh-volume", "sshfs"), ("posh-volume", "volume")];

/// A target with the measured value.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetVerdict {
    /// The compared quantity.
    pub what: String,
    /// The target.
    pub target: String,
    /// The measured value.
    pub seen: String,
    /// `None`: a lower bound that does not decide.
    pub met: Option<bool>,
}

/// Judges all targets for which this run has figures.
pub fn judge(results: &Results) -> Vec<TargetVerdict> {
    let mut verdicts = Vec::new();
    let is_far = results.link.round_trip_ms >= FAR_MS;
    for (aim, system) in AIMS.iter().flat_map(|aim| POSH.map(|system| (aim, system))) {
        let factor = aim.faster.filter(|factor| is_far || *factor == 1.0);
        verdicts.extend(factor.and_then(|factor| faster(results, aim.workload, system, factor)));
        verdicts
            .extend(aim.over.and_then(|over| beyond_server(results, aim.workload, system, over)));
    }
    verdicts.extend(POSH.iter().filter_map(|system| one_command(results, system)));
    verdicts.extend(LOCAL.iter().filter_map(|(system, factor)| local(results, system, *factor)));
    verdicts
        .extend(VOLUME.iter().filter_map(|(workload, most)| on_volume(results, workload, *most)));
    verdicts.extend(sequential(results));
    verdicts.extend(
        NEVER_SLOWER.iter().filter_map(|(system, mount)| never_slower(results, system, mount)),
    );
    verdicts
}

/// Judges a program of the workstation over a volume, by seconds.
fn on_volume(results: &Results, workload: &str, most: f64) -> Option<TargetVerdict> {
    let seen = results.cell(workload, "volume")?.median();
    Some(TargetVerdict {
        what: format!("{workload}, volume"),
        target: format!("≤ {most:.1} s"),
        seen: format!("{seen:.2} s"),
        met: Some(seen <= most),
    })
}

/// Judges the first read of a large file over a volume, against the rate of one TCP connection.
fn sequential(results: &Results) -> Option<TargetVerdict> {
    let input = results.inputs.iter().find(|input| input.workload == "read-large")?;
    let megabits = input.bytes as f64 * 8.0 / 1e6 / results.cell("read-large", "volume")?.median();
    let share = megabits / results.link.measured_back;
    Some(TargetVerdict {
        what: "read-large, volume, of what the link carries".into(),
        target: format!("≥ {:.0} %", LINK_SHARE * 100.0),
        seen: format!("{:.0} %", share * 100.0),
        met: Some(share >= LINK_SHARE),
    })
}

fn faster(results: &Results, workload: &str, system: &str, factor: f64) -> Option<TargetVerdict> {
    let (sshfs, posh) = (results.cell(workload, "sshfs")?, results.cell(workload, system)?);
    let ratio = sshfs.median() / posh.median();
    let least = if sshfs.limited { "at least " } else { "" };
    Some(TargetVerdict {
        what: format!("{workload}, {system}: against bash over sshfs"),
        target: if factor == 1.0 {
            "never slower".into()
        } else {
            format!("≥ {factor}× faster")
        },
        seen: format!("{least}{ratio:.1}×"),
        met: if ratio >= factor || (factor == 1.0 && ratio * SLOWER >= 1.0) {
            Some(true)
        } else if sshfs.limited {
            None
        } else {
            Some(false)
        },
    })
}

fn beyond_server(
    results: &Results,
    workload: &str,
    system: &str,
    over: Over,
) -> Option<TargetVerdict> {
    let (server, posh) =
        (results.cell(workload, "server")?.median(), results.cell(workload, system)?.median());
    let more = posh - server;
    let (target, seen, met) = match over {
        Over::Seconds(most) => (format!("≤ +{most:.2} s"), format!("{more:+.3} s"), more <= most),
        Over::Each(most, count) => {
            let each = more / count as f64;
            (
                format!("≤ +{most:.2} s each of {count} commands"),
                format!("{each:+.4} s each"),
                each <= most,
            )
        }
        Over::Share(most) => {
            let share = more / server;
            (format!("≤ +{:.0} %", most * 100.0), format!("{:+.1} %", share * 100.0), share <= most)
        }
    };
    Some(TargetVerdict {
        what: format!("{workload}, {system}: against bash on the server"),
        target,
        seen,
        met: Some(met),
    })
}

fn one_command(results: &Results, system: &str) -> Option<TargetVerdict> {
    let round_trip = results.link.round_trip_ms;
    let at = |system: &str| {
        let found =
            |l: &&super::results::Latency| l.system == system && l.round_trip_ms == round_trip;
        results.latency.iter().find(found).map(|l| l.summary.median)
    };
    let posh = at(system)?;
    let ssh = at("ssh-master")
        .map(|ms| format!(" (ssh over a shared connection: {ms:.1} ms)"))
        .unwrap_or_default();
    Some(TargetVerdict {
        what: format!("one small command, {system}, warm connection, {round_trip} ms{ssh}"),
        target: format!("≤ 1 round trip + {ONE_COMMAND_MS} ms"),
        seen: format!("{posh:.1} ms"),
        met: Some(posh <= round_trip + ONE_COMMAND_MS),
    })
}

fn local(results: &Results, system: &str, factor: f64) -> Option<TargetVerdict> {
    let ratio = results.cell("local-1000", system)?.median()
        / results.cell("local-1000", "sshfs")?.median();
    Some(TargetVerdict {
        what: format!("1,000 local commands, {system}"),
        target: format!("≤ {factor} × bash"),
        seen: format!("{ratio:.2} ×"),
        met: Some(ratio <= factor),
    })
}

fn never_slower(results: &Results, system: &str, mount: &str) -> Option<TargetVerdict> {
    let mut slower = Vec::new();
    let mut cells =
        results.cells.iter().filter(|c| c.system == system && !is_local(&c.workload)).peekable();
    cells.peek()?;
    for cell in cells {
        let Some(bash) = results.cell(&cell.workload, mount) else { continue };
        let ratio = cell.median() / bash.median();
        if ratio > SLOWER {
            slower.push(format!("{} {ratio:.2} ×", cell.workload));
        }
    }
    Some(TargetVerdict {
        what: format!(
            "every cell of {system} against bash over {}",
            if mount == "volume" { "a volume" } else { mount }
        ),
        target: "≤ +5 %".into(),
        met: Some(slower.is_empty()),
        seen: if slower.is_empty() { "none slower".into() } else { slower.join(", ") },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::Samples;
    use crate::table::results::Cell;

    fn cell(workload: &str, system: &str, seconds: f64, limited: bool) -> Cell {
        let seconds = Samples::one(seconds);
        Cell {
            workload: workload.into(),
            system: system.into(),
            summary: seconds.summary(),
            seconds,
            limited,
            bytes: 0.0,
            posh: None,
        }
    }

    #[test]
    fn a_lower_bound_can_meet_a_target_and_cannot_miss_it() {
        let check = |sshfs: f64, limited: bool, met: Option<bool>| {
            let results = Results::of_cells(vec![
                cell("tar-x", "sshfs", sshfs, limited),
                cell("tar-x", "posh", 1.0, false),
            ]);
            assert_eq!(
                faster(&results, "tar-x", "posh", 300.0).unwrap().met,
                met,
                "{sshfs} {limited}"
            );
        };
        check(301.0, false, Some(true));
        check(301.0, true, Some(true));
        check(299.0, false, Some(false));
        check(299.0, true, None);
    }

    #[test]
    fn five_per_cent_are_allowed() {
        let met = |posh: f64| {
            let cells = vec![cell("comm", "sshfs", 1.0, false), cell("comm", "posh", posh, false)];
            never_slower(&Results::of_cells(cells), "posh", "sshfs").unwrap().met
        };
        assert_eq!((met(1.04), met(1.06)), (Some(true), Some(false)));
    }
}
