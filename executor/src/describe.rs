//! Facts about this machine by which a gateway decides if a command would give the same answer on
//! it.

use std::{path::Path, process::Stdio, sync::OnceLock, time::Duration};

use nix::{sys::utsname::uname, unistd::gethostname};
use posh_proto::{
    PROTOCOL_VERSION,
    executor::{DescribeReply, Export},
};
use tokio::{process::Command, sync::OnceCell};

use crate::{callers::Caller, pool::Pool, runner::wire::ConfinementReport, tools};

/// `locale -a` reads one directory; a longer run is a fault.
const LOCALES_TIMEOUT: Duration = Duration::from_secs(5);

/// The locales, read once: installing one needs a restart to be seen.
#[derive(Default)]
pub struct MachineDescription {
    locales: OnceCell<Vec<String>>,
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
        DescribeReply {
            protocol: PROTOCOL_VERSION,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            hostname: gethostname()
                .map_or_else(|_| String::new(), |name| name.to_string_lossy().into_owned()),
            exports: exports
                .map(|e| Export { name: e.name.clone(), read_only: e.read_only })
                .collect(),
            locales: self.locales.get_or_init(read_locales).await.clone(),
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
        }
    }
}

/// An id of this start of the executor: random(4).
fn new_instance() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default().trim().to_owned()
}

async fn read_locales() -> Vec<String> {
    // Locales that every C library has built in.
    let built_in = || vec!["C".to_owned(), "POSIX".to_owned()];
    let Some(program) = tools::find("locale") else { return built_in() };
    let mut command = Command::new(program);
    command.arg("-a").env_clear().stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    match tokio::time::timeout(LOCALES_TIMEOUT, command.output()).await {
        Ok(Ok(output)) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
        }
        _ => built_in(),
    }
}
