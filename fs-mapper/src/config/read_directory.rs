//! Forbidden keys in a file of the current directory, even if the user has allowed it: its author
//! could start programs, mount something, or change the meaning of commands.

use super::{ConfigReader, tables};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Advice: the right file for such a key.
const OWN: &str = "write it into ~/.config/posh/mounts.toml, or name the file with --config";

/// Keys of `[gateway]`: the first starts a program, the second defines the meaning of commands.
const GATEWAY_KEYS: [&str; 2] = ["ssh_command", "annotations"];

/// Prefix of addresses that start a program on this machine.
const STARTS_SSH: &str = "ssh:";

impl ConfigReader<'_> {
    /// Reports each forbidden key at its position.
    pub(super) fn forbidden_in_directories(&mut self, document: &DeTable<'_>) {
        if let Some((key, _)) = document.get_key_value("volume") {
            self.mistake(
                key.span(),
                "a directory's file can't name a [[volume]], which is mounted",
                OWN,
            );
        }
        if let Some(DeValue::Table(gateway)) = document.get("gateway").map(Spanned::get_ref) {
            for key in gateway.keys().filter(|key| GATEWAY_KEYS.contains(&key.get_ref().as_ref())) {
                self.mistake(
                    key.span(),
                    format!("a directory's file can't say `{}`", key.get_ref()),
                    OWN,
                );
            }
        }
        for executor in tables(document, "executor") {
            let Some(address) = executor.get("address") else { continue };
            let starts_ssh = |text: &str| {
                text.trim_start()
                    .get(..STARTS_SSH.len())
                    .is_some_and(|s| s.eq_ignore_ascii_case(STARTS_SSH))
            };
            if matches!(address.get_ref(), DeValue::String(text) if starts_ssh(text)) {
                let message = "a directory's file can't name an executor over ssh, which is a \
                               program to start";
                self.mistake(address.span(), message, OWN);
            }
        }
    }
}
