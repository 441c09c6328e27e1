//! The machines of a demonstration: a laboratory for root; for other users this machine, with
//! executors on its loopback interface and no mounts in between.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tempfile::TempDir;

use super::DemoOptions;
use crate::error::{AttemptExt, Result};
use crate::host::{HOME, Host};
use crate::lab::{Lab, LabSpec};
use crate::programs::Programs;
use crate::services::{self, Service};
use crate::workload::Store;

/// Number that the paper's distributed logs need.
const SERVERS: usize = 5;

pub enum DemoSite {
    Lab(Box<Lab>, String),
    Plain(Plain),
}

/// Everything on this machine: an export and its mount are the same directory.
pub struct Plain {
    host: Host,
    root: PathBuf,
    /// Emptied by [`DemoSite::end`], which a signal may call while the demonstration still runs.
    owned: Mutex<Option<(Vec<Service>, TempDir)>>,
}

impl DemoSite {
    pub fn start(options: &DemoOptions, programs: &Programs) -> Result<DemoSite> {
        for program in ["posh", "posh-cli", "posh-gateway", "posh-executor", "posh-stage"] {
            programs.find(program)?;
        }
        if !nix::unistd::geteuid().is_root() {
            return Ok(DemoSite::Plain(Plain::start(programs)?));
        }
        let spec = LabSpec::servers(SERVERS).link(options.link);
        let link = format!("a link of {}", options.link);
        Ok(DemoSite::Lab(Box::new(Lab::start(&spec, programs)?), link))
    }

    pub fn description(&self) -> String {
        match self {
            DemoSite::Lab(_, link) => format!(
                "A workstation and {SERVERS} storage servers, each in network, mount and process \
                 namespaces of\n\
                 its own on this machine, joined by {link} each. /mnt/s1 ... /mnt/s{SERVERS} are\n\
                 sshfs mounts; the servers hold their data in memory. Bytes are those of the \
                 workstation's\n\
                 network interfaces, both directions, mount traffic included."
            ),
            DemoSite::Plain(plain) => format!(
                "This user is not root: no namespaces and no mounts can be made. {SERVERS} \
                 executors serve\n\
                 directories below {} over the loopback interface, and bash reads the same\n\
                 directories directly; so outputs and placement are shown, but neither speed nor \
                 bytes\n\
                 mean anything. Run it as root for those.",
                plain.root.display()
            ),
        }
    }

    pub fn workstation(&self) -> &Host {
        match self {
            DemoSite::Lab(lab, _) => &lab.workstation,
            DemoSite::Plain(plain) => &plain.host,
        }
    }

    /// Directory for results on the workstation.
    pub fn home(&self) -> PathBuf {
        match self {
            DemoSite::Lab(..) => HOME.into(),
            DemoSite::Plain(plain) => plain.root.join("home"),
        }
    }

    /// The directory `name`, made anew on each of the first `count` servers.
    pub fn stores(&self, name: &str, count: usize) -> Result<Vec<Store<'_>>> {
        match self {
            DemoSite::Lab(lab, _) => Ok(lab.stores(name)?.into_iter().take(count).collect()),
            DemoSite::Plain(plain) => (1..=count).map(|number| plain.store(number, name)).collect(),
        }
    }

    pub fn bytes_moved(&self) -> Result<Option<u64>> {
        match self {
            DemoSite::Lab(lab, _) => lab.bytes_moved().map(Some),
            DemoSite::Plain(_) => Ok(None),
        }
    }

    /// Starts the gateway, so that no run includes its start.
    pub fn warm_up(&self) -> Result<()> {
        let host = self.workstation();
        let mut start = host.command(host.programs().join("posh"));
        start.args(["gateway", "start"]);
        host.must(start).map(drop)
    }

    /// Ends processes that do not end with this one.
    pub fn end(&self) {
        let DemoSite::Plain(plain) = self else { return };
        let mut stop = plain.host.command(plain.host.programs().join("posh"));
        stop.args(["gateway", "stop"]);
        if let Err(error) = plain.host.must(stop) {
            eprintln!("{error}");
        }
        // The executors first, then the directory they serve.
        let owned = plain.owned.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((executors, directory)) = owned {
            drop(executors);
            drop(directory);
        }
    }
}

impl Plain {
    fn start(programs: &Programs) -> Result<Plain> {
        let directory = tempfile::Builder::new().prefix("posh-demo-").tempdir();
        let directory = directory.attempt(|| "make a temporary directory".into())?;
        let root = directory.path().to_owned();
        let make = |name: &str| {
            let path = root.join(name);
            std::fs::create_dir(&path).attempt(|| format!("make {}", path.display())).map(|()| path)
        };
        let (config, runtime) = (root.join("mounts.toml"), make("run")?);
        make("home")?;
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&runtime, std::fs::Permissions::from_mode(0o700))
            .attempt(|| format!("set the mode of {}", runtime.display()))?;
        let host = Host::plain("localhost", programs).with_variables(&[
            ("POSH_CONFIG", config.as_path()),
            ("XDG_RUNTIME_DIR", runtime.as_path()),
        ]);
        let mut table = String::new();
        let mut executors = Vec::new();
        for number in 1..=SERVERS {
            let (service, lines) = Plain::executor(&host, number, &make(&format!("s{number}"))?)?;
            executors.push(service);
            table.push_str(&lines);
        }
        std::fs::write(&config, table).attempt(|| format!("write {}", config.display()))?;
        Ok(Plain { host, root, owned: Mutex::new(Some((executors, directory))) })
    }

    /// Starts an executor on a free port; also returns its lines of the mount table.
    fn executor(host: &Host, number: usize, directory: &Path) -> Result<(Service, String)> {
        let path = directory.display();
        let (service, address) =
            services::start_local_executor(host, &format!("s{number}"), directory)?;
        let lines = format!(
            "[[executor]]\nname = \"store{number}\"\naddress = \"http://{address}\"\n\n\
             [[mount]]\npath = \"{path}\"\nexecutor = \"store{number}\"\n\
             export = \"s{number}\"\ncoherence = \"bind\"\n\n"
        );
        Ok((service, lines))
    }

    fn store(&self, number: usize, name: &str) -> Result<Store<'_>> {
        let directory = self.root.join(format!("s{number}")).join(name);
        std::fs::create_dir(&directory).attempt(|| format!("make {}", directory.display()))?;
        Ok(Store { host: &self.host, mount: directory.clone(), directory })
    }
}
