//! The laboratory of the bench, which is put into the same state before every run: new mounts,
//! dropped caches, new gateways and shared connections, already connected, and programs read into
//! memory.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use posh_integration::host::{CONFIG, PROGRAMS};
use posh_integration::programs::Programs;
use posh_integration::services::{self, Service, WORKSTATION_KEY};
use posh_integration::wire::Profile;
use posh_integration::workload::Store;
use posh_integration::{Lab, LabSpec, network};

use super::catalogue::Workload;
use super::data;
use super::system::{COLD, ELSEWHERE, MASTER, OUT, SCRIPT_FILE, System, VOLUMES};

/// The second server's mount of the first one's data, and the port of its executor for that.
const FAR: &str = "/srv/far";
const FAR_PORT: u16 = 7401;
/// rclone's cache on the workstation.
const RCLONE_CACHE: &str = "/home/user/rclone";
/// An expert's setting for large files: the kernel's read-ahead of a mount, KiB (the default is
/// 128).
const READ_AHEAD_KIB: u32 = 4096;
/// File beside the data by which a connection is made before the time starts.
const WARM: &str = "warm";
/// Reads the programs and their libraries, so that only the data is cold.
const READ_PROGRAMS: &str = "for p in cat grep sed cut head tail sort uniq wc awk jq pr git tar \
                             gzip find xargs comm diff cmp stat md5sum mkdir rm mv cp ls ssh; do \
                             \"$p\" --version; done\n\
                             printf 'P6 1 1 255 abc' | convert ppm:- gif:-; mogrify -version\n\
                             \"$1/posh-stage\"; \"$1/posh\" --version\n\
                             cat \"$1/posh\" \"$1/posh-stage\" \"$1/posh-gateway\" \
                             \"$1/posh-executor\" \"$(command -v sshfs)\" \
                             /usr/lib/openssh/sftp-server";
/// Reads the programs of GNU parallel, whose start is slow.
const READ_PARALLEL: &str = "printf x | parallel --will-cite echo";

/// The laboratory and the services for one run.
#[derive(Debug)]
pub struct RunPlace {
    // Dropped before the machines on which they run.
    server_mounts: Vec<(String, Service)>,
    far: Option<(Service, Service)>,
    cached_mount: Option<Service>,
    /// The laboratory's machines.
    pub lab: Lab,
}

impl RunPlace {
    /// As many servers as the workloads need, with links `link`; `between` joins them to each
    /// other.
    pub fn start(
        link: Profile,
        between: Profile,
        servers: usize,
        storage: Option<&Path>,
    ) -> Result<RunPlace> {
        let spec = LabSpec::servers(servers)
            .link(link)
            .between(between)
            .storage(storage.map(Path::to_owned));
        let mut lab = Lab::start(&spec, &Programs::beside_this()?)?;
        lab.unmount()?;
        for number in 1..=servers {
            fs::write(lab.data(number).join(WARM), "warm\n").context("cannot write to a server")?;
        }
        write_configurations(&lab)?;
        Ok(RunPlace { server_mounts: Vec::new(), far: None, cached_mount: None, lab })
    }

    /// The workload's directory on each of its servers.
    pub fn stores(&self, workload: &Workload) -> Vec<Store<'_>> {
        let store = |number: usize| Store {
            host: &self.lab.servers[number - 1].host,
            directory: format!("/srv/s{number}/{}", workload.name).into(),
            mount: format!("/mnt/s{number}/{}", workload.name).into(),
        };
        (1..=workload.servers).map(store).collect()
    }

    /// Ends the services of the last run, and prepares the next one.
    pub fn prepare(&mut self, workload: &Workload, system: System) -> Result<()> {
        self.clear()?;
        if let Some(store) = self.stores(workload).first() {
            data::reset(workload, store)?;
        }
        for host in [&self.lab.workstation, &self.lab.servers[0].host] {
            let out = host.path(OUT);
            let _ = fs::remove_dir_all(&out);
            fs::create_dir_all(&out).with_context(|| format!("cannot make {OUT}"))?;
        }
        services::write_file(&self.lab.workstation, SCRIPT_FILE, workload.script.as_bytes())?;
        drop_caches()?;
        if system.mounts() {
            self.lab.remount(workload.servers, &system.mount_options())?;
        }
        if system == System::SshfsTuned {
            self.read_ahead(workload.servers)?;
        }
        self.read_programs(system)?;
        match system {
            System::Server => self.mount_others(workload.servers)?,
            System::SshMaster | System::Parallel => self.connect_masters(workload.servers)?,
            System::PoshElsewhere => self.start_far_executor()?,
            System::Rclone => self.mount_by_rclone()?,
            _ => {}
        }
        if system.has_gateway() {
            self.start_gateway(system, workload.servers)?;
        }
        Ok(())
    }

    /// Ends all services of a run.
    pub fn clear(&mut self) -> Result<()> {
        for system in [System::Posh, System::PoshElsewhere, System::PoshVolume] {
            if !self.gateways()?.is_empty() {
                self.lab.workstation.must(system.posh(&self.lab, &["gateway", "stop"]))?;
            }
        }
        self.end_masters()?;
        let first = &self.lab.servers[0].host;
        self.server_mounts
            .drain(..)
            .try_for_each(|(path, mount)| services::unmount(first, &path, mount))?;
        if let Some(mount) = self.cached_mount.take() {
            services::unmount(&self.lab.workstation, "/mnt/s1", mount)?;
            fs::remove_dir_all(self.lab.workstation.path(RCLONE_CACHE))
                .context("cannot remove rclone's cache")?;
        }
        if let Some((executor, mount)) = self.far.take() {
            drop(executor);
            services::unmount(&self.lab.servers[1].host, FAR, mount)?;
        }
        Ok(self.lab.unmount()?)
    }

    /// Process ids of gateways.
    pub fn gateways(&self) -> Result<Vec<u32>> {
        let processes = self.lab.workstation.processes()?;
        Ok(processes.into_iter().filter(|p| p.program == "posh-gateway").map(|p| p.pid).collect())
    }

    /// Process ids of executors, on all servers.
    pub fn executors(&self) -> Result<Vec<u32>> {
        let mut found = Vec::new();
        for server in &self.lab.servers {
            let processes = server.host.processes()?;
            found.extend(
                processes.into_iter().filter(|p| p.program == "posh-executor").map(|p| p.pid),
            );
        }
        Ok(found)
    }

    fn start_gateway(&self, system: System, servers: usize) -> Result<()> {
        let lab = &self.lab;
        lab.workstation.must(system.posh(lab, &["gateway", "start"]))?;
        for number in 1..=servers {
            if system.has_volumes() {
                let (source, path) =
                    (format!("store{number}:s{number}"), format!("/mnt/s{number}"));
                lab.workstation.must(system.posh(lab, &["mount", &source, &path]))?;
            }
            let text = format!("cat /mnt/s{number}/{WARM} > /dev/null");
            lab.workstation.must(system.posh(lab, &["-c", &text]))?;
        }
        Ok(())
    }

    /// Mounts the other servers' data on the first server, as on the workstation.
    fn mount_others(&mut self, servers: usize) -> Result<()> {
        let first = &self.lab.servers[0].host;
        for number in 2..=servers {
            let (source, path) = (format!("/srv/s{number}"), format!("/mnt/s{number}"));
            let address = network::addresses(number).1;
            let mount = services::mount_sshfs(first, &address, &source, &path, &[])?;
            services::wait_answering(first, &path)?;
            self.server_mounts.push((path, mount));
        }
        Ok(())
    }

    /// Starts the second server's executor over an uncached sshfs mount, so that the configuration
    /// may declare it the executor's own directory.
    fn start_far_executor(&mut self) -> Result<()> {
        const CONFIGURATION: &str = "/run/far.toml";
        let second = &self.lab.servers[1].host;
        let options = ["dir_cache=no,attr_timeout=0,entry_timeout=0,negative_timeout=0".to_owned()];
        let mount =
            services::mount_sshfs(second, &network::addresses(1).1, "/srv/s1", FAR, &options)?;
        services::wait_answering(second, FAR)?;
        let text = format!(
            "listen = \"{}:{FAR_PORT}\"\nallow_plaintext = true\n\n[[export]]\nname = \"far\"\n\
             path = \"{FAR}\"\n\
             coherence = \"bind\"\n[confinement]\nuser = \"root\"\ntrust_caller_ids = true\n",
            network::addresses(2).1
        );
        services::write_file(second, CONFIGURATION, text.as_bytes())?;
        let mut command = second.command(format!("{PROGRAMS}/posh-executor"));
        command.args(["--config", CONFIGURATION]);
        self.far = Some((services::start_listening(second, command)?, mount));
        Ok(())
    }

    /// Mounts by rclone, with the options that its manual recommends for programs that need a real
    /// file system.
    fn mount_by_rclone(&mut self) -> Result<()> {
        let workstation = &self.lab.workstation;
        let cache = workstation.path(RCLONE_CACHE);
        fs::create_dir_all(&cache).with_context(|| format!("cannot make {RCLONE_CACHE}"))?;
        let mut command = workstation.command("rclone");
        command.env("RCLONE_CONFIG", "/dev/null");
        command.args([
            "mount",
            ":sftp:/srv/s1",
            "/mnt/s1",
            "--vfs-cache-mode",
            "full",
            "--cache-dir",
            RCLONE_CACHE,
        ]);
        command.args(["--sftp-host", &network::addresses(1).1, "--sftp-user", "root"]);
        command.args(["--sftp-key-file", WORKSTATION_KEY]);
        self.cached_mount = Some(services::mount(workstation, command, "/mnt/s1")?);
        Ok(())
    }

    fn connect_masters(&self, servers: usize) -> Result<()> {
        (1..=servers).try_for_each(|number| {
            // It stays in the background, so that its output must not be a pipe that is read to its
            // end.
            let status = self.ssh(&["-M", "-N", "-f"], number)?;
            ensure!(status, "cannot connect to server {number} by ssh");
            Ok(())
        })
    }

    fn end_masters(&self) -> Result<()> {
        for number in 1..=self.lab.servers.len() {
            if self
                .lab
                .workstation
                .path(format!("/run/user/cm-{}", network::addresses(number).1))
                .exists()
            {
                self.ssh(&["-q", "-O", "exit"], number)?;
            }
        }
        Ok(())
    }

    fn ssh(&self, words: &[&str], number: usize) -> Result<bool> {
        let mut command = self.lab.workstation.command("ssh");
        command.args(["-F", MASTER]).args(words).arg(network::addresses(number).1);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Ok(self.lab.workstation.spawn(command)?.wait()?.success())
    }

    /// Sets the kernel's read-ahead of the workstation's mounts, for which sshfs has no option.
    fn read_ahead(&self, servers: usize) -> Result<()> {
        for number in 1..=servers {
            let metadata = fs::metadata(self.lab.workstation.path(self.lab.mount(number)))?;
            let device = std::os::unix::fs::MetadataExt::dev(&metadata);
            let (major, minor) = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
            let file = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
            fs::write(&file, READ_AHEAD_KIB.to_string())
                .with_context(|| format!("cannot write {file}"))?;
        }
        Ok(())
    }

    fn read_programs(&self, system: System) -> Result<()> {
        let also = if system == System::Parallel { READ_PARALLEL } else { "true" };
        let mut command = self.lab.workstation.command("bash");
        command
            .args(["-c", &format!("{READ_PROGRAMS}; {also}"), "bash"])
            .arg(self.lab.workstation.programs());
        // Some do not know --version, and print errors.
        command.stdout(Stdio::null()).stderr(Stdio::null()).env("PARALLEL_HOME", "/tmp/parallel");
        self.lab.workstation.spawn(command)?.wait()?;
        Ok(())
    }
}

/// Drops the kernel's caches of the whole machine.
fn drop_caches() -> Result<()> {
    nix::unistd::sync();
    fs::write("/proc/sys/vm/drop_caches", "3").context("cannot drop the kernel's caches")
}

fn write_configurations(lab: &Lab) -> Result<()> {
    let ssh = format!(
        "User root\nIdentityFile {WORKSTATION_KEY}\nStrictHostKeyChecking no\n\
         UserKnownHostsFile /dev/null\n\
         LogLevel ERROR\nBatchMode yes\n"
    );
    services::write_file(&lab.workstation, COLD, ssh.as_bytes())?;
    services::write_file(
        &lab.workstation,
        MASTER,
        format!("{ssh}ControlPath /run/user/cm-%h\n").as_bytes(),
    )?;
    services::write_file(&lab.workstation, CONFIG, lab.mount_table().as_bytes())?;
    let elsewhere = format!(
        "[[executor]]\nname = \"far\"\naddress = \"http://{}:{FAR_PORT}\"\n\n\
         [[mount]]\npath = \"/mnt/s1\"\nexecutor = \"far\"\nexport = \"far\"\n",
        network::addresses(2).1
    );
    services::write_file(&lab.workstation, ELSEWHERE, elsewhere.as_bytes())?;
    let mut volumes = String::new();
    for server in &lab.servers {
        let _ = write!(
            volumes,
            "[[executor]]\nname = \"{}\"\naddress = \"{}\"\n\n",
            server.spec.name, server.address
        );
    }
    Ok(services::write_file(&lab.workstation, VOLUMES, volumes.as_bytes())?)
}
