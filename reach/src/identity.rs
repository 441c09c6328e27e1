//! The identity of a server, the key of its data on this workstation: cached contents, and writes
//! that are still to be sent. Not its name in the configuration, which may come to mean another
//! server.
//!
//! * `tls://`: the authority that the workstation was enrolled with. No other server can prove this
//!   identity.
//! * `ssh://`: the login, with the ssh command, and the machine. ssh refuses to connect unless the
//!   host has a key that is known for that name; but several machines may have one name, and know
//!   each other's keys or share one. The executor tells which machine it is.
//! * `http://`: the address, and the machine. They prove nothing: another server at the same
//!   address may call itself the same.

use fs_mapper::config::Address;
use posh_proto::token::Fingerprint;

/// Identity of a server; see the module's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerIdentity {
    text: String,
    /// True if it is proved, and the machine with it.
    is_proved: bool,
}

impl ServerIdentity {
    pub(crate) fn of_authority(fingerprint: &str) -> Self {
        Self { text: format!("tls {fingerprint}"), is_proved: true }
    }

    pub(crate) fn of_login(address: &Address, ssh_command: &[String]) -> Self {
        Self { text: format!("ssh {address} by {ssh_command:?}"), is_proved: false }
    }

    pub(crate) fn of_address(address: &Address) -> Self {
        Self { text: format!("address {address}"), is_proved: false }
    }

    /// Returns a directory name for one of its exports, unique per server and export. `machine`:
    /// the identity that the executor has told.
    #[must_use]
    pub fn directory_for(&self, export: &str, machine: &[u8]) -> String {
        // Neither of the first parts contains a NUL.
        let mut key = format!("{}\0{export}", self.text).into_bytes();
        if !self.is_proved && !machine.is_empty() {
            key.push(0);
            key.extend(machine);
        }
        Fingerprint::of(&key).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_server_and_each_export_has_a_directory_of_its_own() {
        let address = |text: &str| Address::parse(text).expect("an address");
        let (plain, login) = (address("http://h:1"), address("ssh://h"));
        let ssh = |words: &[&str]| {
            ServerIdentity::of_login(
                &login,
                &words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>(),
            )
        };
        let all = [
            ServerIdentity::of_address(&plain),
            ServerIdentity::of_address(&address("http://h:2")),
            ssh(&["ssh"]),
            ssh(&["ssh", "-F", "other"]),
            ServerIdentity::of_authority("00"),
            ServerIdentity::of_authority("01"),
        ];
        let names = all.iter().flat_map(|server| {
            ["x", "y", "..", "/srv/a"].map(|export| server.directory_for(export, b"m"))
        });
        let names: std::collections::BTreeSet<String> = names.collect();
        assert_eq!(names.len(), all.len() * 4);
        let differs = all
            .each_ref()
            .map(|server| server.directory_for("x", b"m") != server.directory_for("x", b"n"));
        // TLS proves the server, whatever it calls itself.
        assert_eq!(differs, [true, true, true, true, false, false]);
        assert!(
            names
                .iter()
                .all(|name| name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit()))
        );
    }
}
