//! Facts about this machine by which a gateway decides if a command would give the same answer on
//! it.

use std::{path::Path, sync::OnceLock};

use nix::{
    sys::utsname::uname,
    unistd::{geteuid, gethostname},
};
use posh_proto::{
    PROTOCOL_VERSION,
    executor::{DescribeReply, Export, Locale},
    locales::{self, Locales},
};

use crate::{callers::Caller, pool::Pool, runner::wire::ConfinementReport, tools};

/// Facts that do not change while this executor lives.
#[derive(Default)]
pub struct MachineDescription {
    instance: OnceLock<String>,
}

impl MachineDescription {
    /// The reply to `caller`'s `Describe`.
    pub async fn describe(
        &self,
        caller: &Caller,
        pool: &Pool,
        confinement: &ConfinementReport,
    ) -> DescribeReply {
        let no_namespaces = pool.no_namespaces();
        let exports = caller.exports.iter();
        let read = tokio::task::spawn_blocking(read_locales).await.ok().flatten();
        let locales_unknown = read.is_none();
        DescribeReply {
            protocol: PROTOCOL_VERSION,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            hostname: gethostname()
                .map_or_else(|_| String::new(), |name| name.to_string_lossy().into_owned()),
            exports: exports
                .map(|e| Export { name: e.name.clone(), read_only: e.read_only })
                .collect(),
            locales: read.unwrap_or_default(),
            locales_unknown,
            machine: uname().map_or_else(
                |_| String::new(),
                |name| name.machine().to_string_lossy().into_owned(),
            ),
            namespaces: no_namespaces.is_none(),
            namespaces_reason: no_namespaces.unwrap_or_default().to_owned(),
            instance: self.instance.get_or_init(new_instance).clone(),
            localtime_sha256: tools::hash_file(Path::new("/etc/localtime"))
                .unwrap_or_default()
                .into(),
            confinement: confinement.to_string(),
            ids_are_partial: no_namespaces.is_none() && !geteuid().is_root(),
        }
    }
}

/// An id of this start of the executor: random(4).
fn new_instance() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default().trim().to_owned()
}

fn read_locales() -> Option<Vec<Locale>> {
    let all = Locales::read(Path::new(locales::DIRECTORY))
        .inspect_err(|error| tracing::warn!(%error, "the locales of this machine are unknown"))
        .ok()?;
    let locale = |(name, digest): (&str, &[u8])| Locale {
        name: name.to_owned(),
        digest: digest.to_vec().into(),
    };
    Some(all.iter().map(locale).collect())
}
