//! Numbers of users and groups as commands see them: in a user namespace (user_namespaces(7)) only
//! those that it maps, and one number for all others.

use std::fs;

use nix::{
    sys::stat::FileStat,
    unistd::{getegid, geteuid},
};

/// Number that stands for all users and groups that a namespace does not map, unless a sysctl says
/// otherwise.
const OVERFLOW: u32 = 65534;

/// Returns true outside of user namespaces: every number is that of the machine.
pub fn are_whole() -> bool {
    let is_all = |file: &str| {
        let map = fs::read_to_string(file).unwrap_or_default();
        map.split_whitespace().eq(["0", "0", "4294967295"])
    };
    is_all("/proc/self/uid_map") && is_all("/proc/self/gid_map")
}

/// Returns true if a file has this process's own user and group, for certain.
pub fn are_ours(status: &FileStat) -> bool {
    let own = (geteuid().as_raw(), getegid().as_raw());
    let is_certain = (own.0 != overflow("uid") && own.1 != overflow("gid")) || are_whole();
    (status.st_uid, status.st_gid) == own && is_certain
}

/// Returns true for root and this process's own user, if the number is that of the machine: inside
/// a user namespace root may be anybody.
pub fn is_told(owner: u32) -> bool {
    let own = geteuid().as_raw();
    match are_whole() {
        true => owner == 0 || owner == own,
        false => owner == own && own != 0 && own != overflow("uid"),
    }
}

fn overflow(kind: &str) -> u32 {
    let text = fs::read_to_string(format!("/proc/sys/kernel/overflow{kind}"));
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(OVERFLOW)
}
