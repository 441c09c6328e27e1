//! A whole laboratory: one workstation, its servers, the mounts and the mount table. It is
//! described by a [`LabSpec`], is ready when [`Lab::start`] returns, and is removed when dropped.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};

use crate::error::{AttemptExt, Result};
use crate::host::{CONFIG, Host, RUNTIME};
use crate::network::{self, NumberedServer};
use crate::people::{self, Person};
use crate::programs::Programs;
use crate::services::{self, EXECUTOR_PORT, Service, WORKSTATION_KEY};
use crate::volumes::{self, Mounts};
use crate::wire::{Profile, Wire};
use crate::workload::Store;

/// Directories with the logs of the workstation's gateways.
const RUNTIMES: [&str; 3] = [RUNTIME, volumes::OTHER_RUNTIME, people::RUNTIME];

/// Description of a laboratory.
#[derive(Debug, Clone, Default)]
pub struct LabSpec {
    /// The storage servers, in order.
    pub servers: Vec<ServerSpec>,
    /// Start posh-executor on each server.
    pub executors: bool,
    /// Delay and rate of each server's link; `None`: unlimited.
    pub link: Option<Profile>,
    /// Link between the servers; `None`: they can't reach each other.
    pub between: Option<Profile>,
    /// Directory on this machine's disk for the servers' data; `None`: in memory.
    pub storage: Option<PathBuf>,
    /// Variables of every command on every host.
    pub variables: Vec<(String, String)>,
    /// Servers and workstation differ as much as possible, and there is an ordinary user.
    pub different: bool,
    /// Kind of the exports' mounts.
    pub mounts: Mounts,
    /// The configuration has only executors and mounts. Otherwise commands run where their data
    /// lives, at any cost.
    pub unconfigured: bool,
}

/// One storage server.
#[derive(Debug, Clone)]
pub struct ServerSpec {
    /// Its host name and the executor's name in the mount table.
    pub name: String,
    /// Exports that it serves.
    pub exports: Vec<ExportSpec>,
}

/// One directory of a server: `/srv/NAME` on it.
#[derive(Debug, Clone)]
pub struct ExportSpec {
    /// The export's name.
    pub name: String,
    /// Mount point on the workstation.
    pub mount: String,
    /// Size of a file system of its own; `None`: it has none.
    pub size_bytes: Option<u64>,
}

impl LabSpec {
    /// `count` servers named `store1`..., each with the export `s1`... mounted at `/mnt/s1`...
    pub fn servers(count: usize) -> LabSpec {
        let server = |i| ServerSpec {
            name: format!("store{i}"),
            exports: vec![ExportSpec::new(&format!("s{i}"))],
        };
        LabSpec {
            servers: (1..=count).map(server).collect(),
            executors: true,
            ..LabSpec::default()
        }
    }

    /// Adds an export of `size_bytes` to the first server.
    pub fn with_small_export(mut self, name: &str, size_bytes: u64) -> LabSpec {
        let export = ExportSpec { size_bytes: Some(size_bytes), ..ExportSpec::new(name) };
        self.servers[0].exports.push(export);
        self
    }

    /// Limits every server's link.
    pub fn link(mut self, profile: Profile) -> LabSpec {
        self.link = Some(profile);
        self
    }

    /// Joins all servers by links of this kind; they may log in to each other.
    pub fn between(mut self, profile: Profile) -> LabSpec {
        self.between = Some(profile);
        self
    }

    /// Puts the servers' data in new directories below `directory`, which are removed with the
    /// laboratory.
    pub fn storage(mut self, directory: Option<PathBuf>) -> LabSpec {
        self.storage = directory;
        self
    }

    /// Adds a variable that every command on every host has.
    pub fn with_variable(mut self, name: &str, value: &str) -> LabSpec {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Gives servers other accounts, another time zone and default locale and an older tool, and an
    /// ordinary user an account, a mount and an executor, see [`people`].
    pub fn different(mut self) -> LabSpec {
        self.different = true;
        self
    }

    fn host(&self, name: &str, programs: &Programs) -> Result<Host> {
        let variables: Vec<_> =
            self.variables.iter().map(|(name, value)| (name.as_str(), Path::new(value))).collect();
        let host = Host::start(name, programs)?.with_variables(&variables);
        network::raise_loopback(&host).map(|()| host)
    }

    /// Sets the kind of mounts. Volumes need executors.
    pub fn mounts(mut self, mounts: Mounts) -> LabSpec {
        self.mounts = mounts;
        self
    }

    /// Starts no executors: only the mounts.
    pub fn without_executors(mut self) -> LabSpec {
        self.executors = false;
        self
    }
}

impl ExportSpec {
    /// `/srv/NAME` on the server, `/mnt/NAME` on the workstation.
    pub fn new(name: &str) -> ExportSpec {
        ExportSpec { name: name.into(), mount: format!("/mnt/{name}"), size_bytes: None }
    }

    /// The directory on the server.
    pub fn directory(&self) -> String {
        format!("/srv/{}", self.name)
    }
}

/// A running server.
#[derive(Debug)]
pub struct LabServer {
    // Fields are dropped in this order: services before their host.
    /// Its executor, when the laboratory has executors.
    pub executor: Option<Service>,
    _sshd: Service,
    /// Its description.
    pub spec: ServerSpec,
    ip: String,
    /// The executor's address in the mount table.
    pub address: String,
    /// Its emulated link to the workstation, if it has a [`Profile`].
    pub wire: Option<Wire>,
    /// The machine.
    pub host: Host,
    // Dropped last: no process may have a file open in it.
    _storage: Option<tempfile::TempDir>,
}

impl LabServer {
    /// Starts its executor, in a laboratory that was started without.
    pub fn start_executor(&mut self) -> Result<()> {
        let exports: Vec<_> =
            self.spec.exports.iter().map(|e| (e.name.clone(), e.directory())).collect();
        self.executor = Some(services::start_executor(&self.host, &self.ip, &exports)?);
        Ok(())
    }

    fn store(&self, name: &str) -> Store<'_> {
        let export = &self.spec.exports[0];
        let (directory, mount) =
            (PathBuf::from(export.directory()).join(name), Path::new(&export.mount).join(name));
        Store { host: &self.host, directory, mount }
    }
}

/// A running laboratory; everything ends when it is dropped.
#[derive(Debug)]
pub struct Lab {
    // Fields are dropped in this order.
    _waits: WaitsAreShort,
    person: Option<Person>,
    /// The sshfs mounts, with their paths.
    mounts: Vec<(String, Service)>,
    kind: Mounts,
    _between: Vec<Wire>,
    /// The user's machine.
    pub workstation: Host,
    /// The storage servers.
    pub servers: Vec<LabServer>,
    programs: Programs,
}

impl Lab {
    /// Makes everything; on return the mounts exist and the executors listen.
    pub fn start(spec: &LabSpec, programs: &Programs) -> Result<Lab> {
        if spec.executors {
            programs.find("posh-executor")?;
        }
        let workstation = spec.host("workstation", programs)?;
        if spec.different {
            people::furnish_workstation(&workstation)?;
        }
        let key = services::make_user_key(&workstation)?;
        let mut servers = Vec::new();
        for (index, server) in (1..).zip(&spec.servers) {
            servers.push(start_server(&workstation, index, server, spec, &key, programs)?);
        }
        let between = spec
            .between
            .map(|link| join_all(&workstation, &servers, link))
            .transpose()?
            .unwrap_or_default();
        let (kind, programs) = (spec.mounts, programs.clone());
        let waits =
            WaitsAreShort(RUNTIMES.map(|directory| workstation.path(directory).join("posh")));
        let mut lab = Lab {
            _waits: waits,
            person: None,
            mounts: Vec::new(),
            kind,
            _between: between,
            workstation,
            servers,
            programs,
        };
        let settings = if spec.unconfigured { "" } else { kind.settings() };
        services::write_file(
            &lab.workstation,
            CONFIG,
            (settings.to_owned() + &lab.mount_table()).as_bytes(),
        )?;
        match kind {
            Mounts::Sshfs => lab.mounts = mount_all(&lab.workstation, &spec.servers, &[])?,
            Mounts::Volume | Mounts::AtHand => lab.start_volumes()?,
        }
        let settle = |server: &LabServer| {
            Person::settle(&lab.workstation, &server.host, &network::addresses(1).1, kind)
        };
        lab.person = lab.servers.first().filter(|_| spec.different).map(settle).transpose()?;
        Ok(lab)
    }

    /// The mount table of this laboratory.
    pub fn mount_table(&self) -> String {
        let mut text = String::new();
        for LabServer { spec, address, .. } in &self.servers {
            let _ =
                write!(text, "[[executor]]\nname = \"{}\"\naddress = \"{address}\"\n\n", spec.name);
            spec.exports
                .iter()
                .for_each(|e| text += &self.kind.entry(&e.mount, &spec.name, &e.name));
        }
        text
    }

    fn start_volumes(&self) -> Result<()> {
        let exports: Vec<&ExportSpec> =
            self.servers.iter().flat_map(|server| &server.spec.exports).collect();
        for export in &exports {
            let point = self.workstation.path(&export.mount);
            fs::create_dir_all(&point).attempt(|| format!("make {}", point.display()))?;
        }
        let paths: Vec<&str> = exports.iter().map(|export| &*export.mount).collect();
        volumes::start(&self.workstation, volumes::User::Root, &paths)
    }

    /// Bytes on the workstation's interfaces since the start, both directions, mounts included.
    pub fn bytes_moved(&self) -> Result<u64> {
        network::bytes_moved(&self.workstation)
    }

    /// Unmounts all of the workstation's sshfs mounts, with their caches.
    pub fn unmount(&mut self) -> Result<()> {
        self.mounts
            .drain(..)
            .try_for_each(|(path, service)| services::unmount(&self.workstation, &path, service))
    }

    /// Mounts the first `count` servers' exports anew by sshfs, with further options of sshfs.
    pub fn remount(&mut self, count: usize, options: &[String]) -> Result<()> {
        self.unmount()?;
        let specs: Vec<_> = self.servers.iter().take(count).map(|s| s.spec.clone()).collect();
        self.mounts = mount_all(&self.workstation, &specs, options)?;
        Ok(())
    }

    /// Path for this process of server number `index` (from 1)'s first export.
    pub fn data(&self, index: usize) -> PathBuf {
        let server = &self.servers[index - 1];
        server.host.path(server.spec.exports[0].directory())
    }

    /// Path of that directory on the workstation.
    pub fn mount(&self, index: usize) -> PathBuf {
        PathBuf::from(&self.servers[index - 1].spec.exports[0].mount)
    }

    /// Process id of the sshfs of the workstation's mount number `index` (from 1).
    pub fn mount_process(&self, index: usize) -> u32 {
        self.mounts[index - 1].1.process.id()
    }

    /// A new directory `name` in each server's first export.
    pub fn stores(&self, name: &str) -> Result<Vec<Store<'_>>> {
        let stores: Vec<Store<'_>> = self.servers.iter().map(|s| s.store(name)).collect();
        for store in &stores {
            fs::create_dir(store.data())
                .attempt(|| format!("make {}", store.directory.display()))?;
        }
        Ok(stores)
    }

    /// The programs under test, as this process sees them.
    pub fn programs(&self) -> &Programs {
        &self.programs
    }
}

/// Fails at its drop if the log of some gateway of the workstation, even of one that has ended,
/// reports a wait that has reached its last limit.
#[derive(Debug)]
struct WaitsAreShort([PathBuf; RUNTIMES.len()]);

impl Drop for WaitsAreShort {
    fn drop(&mut self) {
        let files =
            self.0.iter().filter_map(|directory| fs::read_dir(directory).ok()).flatten().flatten();
        let logs = files
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|end| end == "log"));
        let texts: Vec<_> = logs.filter_map(|log| fs::read(log).ok()).collect();
        let lines = texts
            .iter()
            .flat_map(|text| text.split(|byte| *byte == b'\n'))
            .map(String::from_utf8_lossy);
        let told: Vec<_> = lines.filter(|line| line.contains(posh_proto::BACKSTOP)).collect();
        if !told.is_empty() && !std::thread::panicking() {
            panic!("posh was at fault:\n{}", told.join("\n"));
        }
    }
}

/// Makes all connections at once, then waits for them.
fn mount_all(
    workstation: &Host,
    servers: &[ServerSpec],
    options: &[String],
) -> Result<Vec<(String, Service)>> {
    let mut mounts = Vec::new();
    for (index, server) in (1..).zip(servers) {
        let (_, address) = network::addresses(index);
        for export in &server.exports {
            let (directory, mount) = (export.directory(), &export.mount);
            let service = services::mount_sshfs(workstation, &address, &directory, mount, options)?;
            mounts.push((export.mount.clone(), service));
        }
    }
    for export in servers.iter().flat_map(|s| &s.exports) {
        services::wait_answering(workstation, &export.mount)?;
    }
    Ok(mounts)
}

fn join_all(workstation: &Host, servers: &[LabServer], link: Profile) -> Result<Vec<Wire>> {
    let mut wires = Vec::new();
    let key = services::read_file(workstation, WORKSTATION_KEY)?;
    for (index, server) in (1..).zip(servers) {
        services::write_secret(&server.host, WORKSTATION_KEY, &key)?;
        for (other, far) in (index + 1..).zip(&servers[index..]) {
            let near = NumberedServer { host: &server.host, index };
            let far = NumberedServer { host: &far.host, index: other };
            wires.push(network::join(near, far, link)?);
        }
    }
    Ok(wires)
}

fn start_server(
    workstation: &Host,
    index: usize,
    server: &ServerSpec,
    spec: &LabSpec,
    key: &str,
    programs: &Programs,
) -> Result<LabServer> {
    let mut host = spec.host(&server.name, programs)?;
    if spec.different {
        people::furnish_server(&host)?;
        host = host.with_variables(&[("LANG", Path::new("C"))]);
    }
    let wire = network::connect(workstation, &host, index, spec.link)?;
    let storage =
        spec.storage.as_deref().map(|directory| store_on_disk(&host, directory)).transpose()?;
    for export in &server.exports {
        make_export(&host, export)?;
    }
    let (_, ip) = network::addresses(index);
    let sshd = services::start_sshd(&host, &ip, key)?;
    let address = format!("http://{ip}:{EXECUTOR_PORT}");
    let mut server = LabServer {
        executor: None,
        _sshd: sshd,
        spec: server.clone(),
        ip,
        address,
        wire,
        host,
        _storage: storage,
    };
    if spec.executors {
        server.start_executor()?;
    }
    Ok(server)
}

/// Mounts a directory of this machine's disk as the host's /srv.
fn store_on_disk(host: &Host, directory: &Path) -> Result<tempfile::TempDir> {
    let made = tempfile::Builder::new().prefix("posh-lab-").tempdir_in(directory);
    let made = made.attempt(|| format!("make a directory in {}", directory.display()))?;
    let path = made.path().canonicalize().attempt(|| format!("find {}", made.path().display()))?;
    let none: Option<&str> = None;
    let source = path.clone();
    host.run(move || mount(Some(&source), "/srv", none, MsFlags::MS_BIND, none))
        .attempt(|| format!("bind {} to /srv", path.display()))?;
    Ok(made)
}

fn make_export(host: &Host, export: &ExportSpec) -> Result<()> {
    let directory = export.directory();
    let seen = host.path(&directory);
    fs::create_dir_all(&seen).attempt(|| format!("make {directory}"))?;
    let Some(size_bytes) = export.size_bytes else { return Ok(()) };
    let options = format!("size={size_bytes},mode=0755");
    let point = directory.clone();
    host.run(move || {
        mount(
            Some("tmpfs"),
            point.as_str(),
            Some("tmpfs"),
            MsFlags::empty(),
            Some(options.as_str()),
        )
    })
    .attempt(|| format!("mount a tmpfs on {directory}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check is dropped first, while the log is there.
    fn log_with(line: &str) -> (WaitsAreShort, tempfile::TempDir) {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("gateway.log"), format!("INFO connected\n{line}\n"))
            .unwrap();
        let check = WaitsAreShort([0; RUNTIMES.len()].map(|_| directory.path().to_owned()));
        (check, directory)
    }

    #[test]
    fn a_log_without_a_backstop_is_good() {
        drop(log_with("INFO told to end"));
    }

    #[test]
    #[should_panic(expected = "posh was at fault")]
    fn a_backstop_in_a_log_is_a_fault() {
        drop(log_with(&format!("ERROR {} limit=\"assembly\"", posh_proto::BACKSTOP)));
    }
}
