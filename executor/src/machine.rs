//! The identity of this machine, by which a workstation notices that a name or an address leads to
//! another machine (DNS, a load balancer). It is a digest: machine-id(5) is to be kept secret.
//!
//! Invariant: two machines have different identities, also those that were copied with their
//! /etc/machine-id, as long as their host names differ; and a machine keeps its own when it
//! restarts. Without a machine-id it has a new one after each restart (`boot_id`), so that it may
//! be taken for another machine, and never another one for it.

use std::{path::Path, sync::OnceLock};

use bytes::Bytes;
use nix::unistd::gethostname;
use posh_proto::token::Fingerprint;

const MACHINE_ID: &str = "/etc/machine-id";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Hexadecimal digits of a machine-id; before the first boot is complete it is another word.
const MACHINE_ID_LEN: usize = 32;

/// Returns the identity of this machine.
pub fn identity() -> Bytes {
    static IDENTITY: OnceLock<Bytes> = OnceLock::new();
    let read = || {
        let host = gethostname().unwrap_or_default();
        of(&id(Path::new(MACHINE_ID)), host.as_encoded_bytes())
    };
    IDENTITY.get_or_init(read).clone()
}

fn id(file: &Path) -> String {
    let is_id =
        |id: &String| id.len() == MACHINE_ID_LEN && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    let read = |file: &Path| std::fs::read_to_string(file).map(|id| id.trim().to_owned()).ok();
    read(file).filter(is_id).or_else(|| read(Path::new(BOOT_ID))).unwrap_or_default()
}

fn of(id: &str, host: &[u8]) -> Bytes {
    let text = [b"posh machine\0", id.as_bytes(), b"\0", host].concat();
    Bytes::copy_from_slice(&Fingerprint::of(&text).0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_a_machine_differ_by_name_and_machines_without_an_id_by_their_start() {
        let top = tempfile::tempdir().unwrap();
        let file = top.path().join("machine-id");
        let boot = std::fs::read_to_string(BOOT_ID).unwrap().trim().to_owned();
        assert_eq!(id(&file), boot);
        for none in ["", "uninitialized\n"] {
            std::fs::write(&file, none).unwrap();
            assert_eq!(id(&file), boot, "{none}");
        }
        std::fs::write(&file, "0123456789abcdef0123456789abcdef\n").unwrap();
        let own = id(&file);
        assert_eq!(own, "0123456789abcdef0123456789abcdef");
        assert!(of(&own, b"login1") != of(&own, b"login2") && of(&own, b"h") != of(&boot, b"h"));
        assert_eq!(identity(), identity());
    }
}
