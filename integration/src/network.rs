//! Links between the workstation and the servers, and their byte counters. Addresses exist only
//! within the laboratory's network namespaces.

use std::fs::{self, File};
use std::process::Command;

use crate::error::{AttemptExt, LabError, Result};
use crate::host::Host;
use crate::wire::{Profile, Wire};

/// The workstation's and a server's address on the link to server number `index`.
pub fn addresses(index: usize) -> (String, String) {
    (format!("10.77.{index}.1"), format!("10.77.{index}.2"))
}

/// Brings up a host's loopback interface.
pub fn raise_loopback(host: &Host) -> Result<()> {
    ip(host, "link set dev lo up")
}

/// Joins a server to the workstation by interfaces of their own: `s<index>` on the workstation,
/// `eth0` on the server. Without a profile the link is unlimited.
pub fn connect(
    workstation: &Host,
    server: &Host,
    index: usize,
    link: Option<Profile>,
) -> Result<Option<Wire>> {
    let name = format!("s{index}");
    let wire = match link {
        Some(profile) => Some(Wire::lay((workstation, &name), (server, "eth0"), profile)?),
        None => {
            pair(workstation, server, &name)?;
            None
        }
    };
    let (near, far) = addresses(index);
    // A TUN device has no neighbour discovery: `peer` makes either kind know the other end.
    ip(workstation, &format!("address add {near} peer {far} dev {name}"))?;
    ip(workstation, &format!("link set dev {name} up"))?;
    ip(server, &format!("address add {far} peer {near} dev eth0"))?;
    ip(server, "link set dev eth0 up")?;
    Ok(wire)
}

/// State of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkState {
    /// Packets are delivered.
    Up,
    /// Packets are lost.
    Down,
}

/// Cuts the workstation's link to server number `index`, or restores it.
pub fn set_link(workstation: &Host, index: usize, link: LinkState) -> Result<()> {
    let state = match link {
        LinkState::Up => "up",
        LinkState::Down => "down",
    };
    ip(workstation, &format!("link set dev s{index} {state}"))
}

/// A server and its number.
#[derive(Debug, Clone, Copy)]
pub struct NumberedServer<'a> {
    /// Its host.
    pub host: &'a Host,
    /// As in [`addresses`], from 1.
    pub index: usize,
}

/// Joins two servers by interfaces of their own: each reaches the other one by the address that the
/// workstation uses.
pub fn join(a: NumberedServer<'_>, b: NumberedServer<'_>, link: Profile) -> Result<Wire> {
    let names = [format!("to{}", b.index), format!("to{}", a.index)];
    let wire = Wire::lay((a.host, &names[0]), (b.host, &names[1]), link)?;
    for (near, name, far) in [(a, &names[0], b), (b, &names[1], a)] {
        let host = near.host;
        let (near, far) = (addresses(near.index).1, addresses(far.index).1);
        ip(host, &format!("address add {near} peer {far} dev {name}"))?;
        ip(host, &format!("link set dev {name} up"))?;
    }
    Ok(wire)
}

/// Makes a veth pair.
fn pair(workstation: &Host, server: &Host, name: &str) -> Result<()> {
    let space = format!("/proc/{}/ns/net", server.pid());
    let space = File::open(&space).attempt(|| format!("open {space}"))?;
    // A process id means another process inside, so the namespace is passed as a descriptor.
    let mut add =
        command(workstation, "ip", &format!("link add name {name} type veth peer name eth0"));
    add.args(["netns", "/proc/self/fd/0"]).stdin(space);
    workstation.must(add).map(drop)
}

/// Bytes received and sent on all of a host's interfaces but the loopback, since its start.
pub fn bytes_moved(host: &Host) -> Result<u64> {
    let path = format!("/proc/{}/net/dev", host.pid());
    let table = fs::read_to_string(&path).attempt(|| format!("read {path}"))?;
    table.lines().skip(2).filter(|l| !l.trim_start().starts_with("lo:")).map(counters).sum()
}

/// proc(5), /proc/net/dev: `name: received-bytes 7 others sent-bytes ...`.
fn counters(line: &str) -> Result<u64> {
    let strange = || LabError::Report(format!("not a line of /proc/net/dev: {line}"));
    let (_, fields) = line.split_once(':').ok_or_else(strange)?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let number = |i: usize| fields.get(i).and_then(|f| f.parse::<u64>().ok()).ok_or_else(strange);
    Ok(number(0)? + number(8)?)
}

fn ip(host: &Host, arguments: &str) -> Result<()> {
    host.must(command(host, "ip", arguments)).map(drop)
}

fn command(host: &Host, program: &str, arguments: &str) -> Command {
    let mut command = host.command(program);
    command.args(arguments.split(' '));
    command
}

#[cfg(test)]
mod tests {
    use super::counters;

    #[test]
    fn received_and_sent_bytes_are_added() {
        let line = "  s1: 1000 10 0 0 0 0 0 0 234 5 0 0 0 0 0 0";
        assert_eq!(counters(line).unwrap(), 1234);
        assert!(counters("nonsense").is_err());
    }
}
