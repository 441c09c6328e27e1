//! The identity of a server, by which this workstation keeps what it keeps of it: contents that
//! were read, and writes that are still to be sent. Not the name that the configuration gives it,
//! which may be given to another.
//!
//! * `tls://`: the authority that the workstation was enrolled with. Nobody else can prove that it
//!   is that server.
//! * `ssh://`: the login, with the words that start ssh. ssh has found that the host has the key
//!   that is known for that name, or has refused to connect.
//! * `http://`: the address. Nothing is proved there: another server at the same address can't be
//!   told apart.

use fs_mapper::config::Address;
use posh_proto::token::Fingerprint;

/// A server, as far as it can be told from others.
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

    /// The name of a directory for one of its exports: no two servers, and no two exports, have the
    /// same.
    #[must_use]
    pub fn directory_for(&self, export: &str) -> String {
        // A NUL is in neither.
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
