//! Facts about this machine by which a gateway decides if a command would give the same answer on
//! it.

use std::{io, path::Path, sync::OnceLock};

use nix::{
    sys::utsname::uname,
    unistd::{geteuid, gethostname},
};
use posh_proto::{
    PROTOCOL_VERSION, catalogs, clock,
    executor::{DescribeReply, Export, Locale},
    locales::{self, Locales},
};

use crate::{
    callers::Caller,
    pool::Pool,
    runner::{ids, wire::ConfinementReport},
    tools,
};

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
        let (locales, catalogs) = read.unwrap_or_default();
        DescribeReply {
            protocol: PROTOCOL_VERSION,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            hostname: gethostname()
                .map_or_else(|_| String::new(), |name| name.to_string_lossy().into_owned()),
            exports: exports
                .map(|e| Export { name: e.name.clone(), read_only: e.read_only })
                .collect(),
            locales,
            catalogs,
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
            now_ms: clock::now_ms(),
            user: Some(caller.user.as_ref().map_or_else(|| geteuid().as_raw(), |user| user.uid)),
            ids_are_partial: (no_namespaces.is_none() && !geteuid().is_root()) || !ids::are_whole(),
        }
    }
}

/// An id of this start of the executor: random(4).
fn new_instance() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default().trim().to_owned()
}

/// Locales, and catalogs of messages by language.
fn read_locales() -> Option<(Vec<Locale>, Vec<Locale>)> {
    let locale = |name: &str, digest: &[u8]| Locale {
        name: name.to_owned(),
        digest: digest.to_vec().into(),
    };
    let read = || -> io::Result<_> {
        let locales = Locales::read(Path::new(locales::DIRECTORY))?;
        let catalogs = catalogs::all(&catalogs::DIRECTORIES.map(Path::new))?;
        Ok((
            locales.iter().map(|(name, digest)| locale(name, digest)).collect(),
            catalogs.iter().map(|(language, digest)| locale(language, digest)).collect(),
        ))
    };
    read()
        .inspect_err(|error| tracing::warn!(%error, "the locales of this machine are unknown"))
        .ok()
}
