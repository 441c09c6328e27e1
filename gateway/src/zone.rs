//! Meaning of a command's TZ (tzset(3)), and the file that must be the same on the server for times
//! to look as they do locally.

use std::{
    ffi::OsStr,
    os::unix::ffi::OsStrExt,
    path::{Component, Path, PathBuf},
};

use posh_annotations::Invocation;

use crate::enlisted::Enlisted;

/// Directory of the zones that TZ names, without TZDIR.
const ZONES: &str = "/usr/share/zoneinfo";
/// Meaning of an unset TZ.
pub const LOCALTIME: &str = "/etc/localtime";

/// Source of a command's time zone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Zone {
    /// The machine's own.
    Machine,
    /// A complete rule: TZ is sent along.
    Rule,
    /// A file among the system's zones. A name without a file means the same on both machines.
    Named(PathBuf),
    /// Another file of this machine, by its variable.
    Other(&'static str),
}

/// Time zone for a command that shows times.
#[must_use]
pub fn of(stage: &Enlisted, invocation: &Invocation) -> Option<Zone> {
    let is_set = |name: &&OsStr| !name.is_empty();
    let shows = invocation.environment.iter().any(|name| name == "TZ");
    shows.then(|| named_by(stage.variable("TZ"), stage.variable("TZDIR").filter(is_set).is_some()))
}

fn named_by(value: Option<&OsStr>, has_directory: bool) -> Zone {
    let Some(value) = value else { return Zone::Machine };
    let name = value.as_bytes().strip_prefix(b":").unwrap_or(value.as_bytes());
    if name == LOCALTIME.as_bytes() {
        return Zone::Machine;
    }
    // Empty means UTC.
    if value.is_empty() || std::str::from_utf8(value.as_bytes()).is_ok_and(is_whole_rule) {
        return Zone::Rule;
    }
    if has_directory {
        return Zone::Other("TZDIR");
    }
    let path = Path::new(OsStr::from_bytes(name));
    let is_plain =
        !name.is_empty() && path.components().all(|part| matches!(part, Component::Normal(_)));
    let file = Path::new(ZONES).join(path);
    // The C library and its other files interpret an incomplete rule.
    let is_name = |file: &Path| !name.iter().any(u8::is_ascii_digit) || file.exists();
    if is_plain && is_name(&file) { Zone::Named(file) } else { Zone::Other("TZ") }
}

/// Returns true for a complete POSIX rule: `CET-1CEST,M3.5.0,M10.5.0/3`. Without the dates of
/// changes it is incomplete.
fn is_whole_rule(text: &str) -> bool {
    let whole = |text| {
        let rest = offset(abbreviation(text)?, 24)?;
        if rest.is_empty() {
            return Some(());
        }
        let rest = abbreviation(rest)?;
        let rest = offset(rest, 24).unwrap_or(rest);
        change(change(rest)?)?.is_empty().then_some(())
    };
    whole(text).is_some()
}

/// Skips three letters or more, or a quoted name such as `<+03>`.
fn abbreviation(text: &str) -> Option<&str> {
    if let Some(quoted) = text.strip_prefix('<') {
        let (name, rest) = quoted.split_once('>')?;
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-');
        return (name.len() >= 3 && name.chars().all(is_allowed)).then_some(rest);
    }
    let rest = text.trim_start_matches(|c: char| c.is_ascii_alphabetic());
    (text.len() - rest.len() >= 3).then_some(rest)
}

/// Skips `[+-]hh[:mm[:ss]]`.
fn offset(text: &str, most_hours: u32) -> Option<&str> {
    let mut rest = number(text.strip_prefix(['+', '-']).unwrap_or(text), 0..=most_hours)?;
    for _ in 0..2 {
        let Some(more) = rest.strip_prefix(':') else { break };
        rest = number(more, 0..=59)?;
    }
    Some(rest)
}

/// Skips `,Mm.w.d[/time]`, `,Jn[/time]` or `,n[/time]`.
fn change(text: &str) -> Option<&str> {
    let day = text.strip_prefix(',')?;
    let rest = match (day.strip_prefix('M'), day.strip_prefix('J')) {
        (Some(month), _) => {
            let week = number(month, 1..=12)?.strip_prefix('.')?;
            number(number(week, 1..=5)?.strip_prefix('.')?, 0..=6)?
        }
        (_, Some(day)) => number(day, 1..=365)?,
        _ => number(day, 0..=365)?,
    };
    rest.strip_prefix('/').map_or(Some(rest), |time| offset(time, 167))
}

/// Skips a number within `allowed`.
fn number(text: &str, allowed: std::ops::RangeInclusive<u32>) -> Option<&str> {
    let rest = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let number = text[..text.len() - rest.len()].parse().ok()?;
    allowed.contains(&number).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_time_zone_is_read_from() {
        let check = |value: &str, expected: Zone| {
            assert_eq!(named_by(Some(value.as_ref()), false), expected, "{value}")
        };
        assert_eq!(named_by(None, true), Zone::Machine);
        for value in [":/etc/localtime", "/etc/localtime"] {
            check(value, Zone::Machine);
        }
        for value in [
            "",
            "UTC0",
            "<+03>-3",
            "CET-1CEST,M3.5.0,M10.5.0/3",
            "EST+5:00:00EDT,J60,365/-1",
            "<-03>3<-02>,M3.5.0/-2,M10.5.0/-1",
            "AAA0BBB0,0/0,J365/25",
        ] {
            check(value, Zone::Rule);
        }
        let named = |name: &str| Zone::Named(Path::new(ZONES).join(name));
        check("Asia/Tokyo", named("Asia/Tokyo"));
        check(":Asia/Tokyo", named("Asia/Tokyo"));
        check("UTC", named("UTC"));
        check("nonsense", named("nonsense"));
        for value in [
            ":",
            "/usr/share/zoneinfo/Asia/Tokyo",
            ":/tmp/zone",
            "../../../tmp/zone",
            "Asia/../Tokyo",
            // The days of the changes are the C library's.
            "XYZ3ABC",
            "CET-1CEST,M3.5.0",
            "CET-1CEST,M13.5.0,M10.5.0",
            "CET-1CEST,M3.5.0,M10.5.0/3,",
            "UTC25",
            "<a>3",
            "AB3",
            ":UTC0",
        ] {
            check(value, Zone::Other("TZ"));
        }
        assert_eq!(named_by(Some("Asia/Tokyo".as_ref()), true), Zone::Other("TZDIR"));
        assert_eq!(named_by(Some("UTC0".as_ref()), true), Zone::Rule);
    }
}
