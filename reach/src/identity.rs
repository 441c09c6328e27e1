//! The identity of a server, the key of its data on this workstation: cached contents, and writes
//! that are still to be sent. Not its name in the configuration, which may come to mean another
//! server.
//!
//! * `tls://`: the authority that the workstation was enrolled with. No other server can prove this
//!   identity.
//! * `ssh://`: the login, with the ssh command. ssh refuses to connect unless the host has the key
//!   that is known for that name.
//! * `http://`: the address. It proves nothing: another server at the same address looks the same.

use fs_mapper::config::Address;
use posh_proto::token::Fingerprint;

/// Identity of a server; see the module's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerIdentity(String);

impl ServerIdentity {
    pub(crate) fn of_authority(fingerprint: &str) -> Self {
        Self(format!("tls {fingerprint}"))
    }

    pub(crate) fn of_login(address: &Address, ssh_command: &[String]) -> Self {
        Self(format!("ssh {address} by {ssh_command:?}"))
    }

    pub(crate) fn of_address(address: &Address) -> Self {
        Self(format!("address {address}"))
    }

    /// Returns a directory name for one of its exports, unique per server and export.
    #[must_use]
    pub fn directory_for(&self, export: &str) -> String {
        // Neither part contains a NUL.
        Fingerprint::of(format!("{}\0{export}", self.0).as_bytes()).to_string()
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
            ["x", "y", "..", "/srv/a"].map(|export| server.directory_for(export))
        });
        let names: std::collections::BTreeSet<String> = names.collect();
        assert_eq!(names.len(), all.len() * 4);
        assert!(
            names
                .iter()
                .all(|name| name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit()))
        );
    }
}
