//! A laboratory with a cloud: `rclone serve webdav` on the server, an rclone mount on the
//! workstation, and on request another one beside the executor, which then accesses the data only
//! through it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{AttemptExt, Result};
use crate::host::{CONFIG, Host};
use crate::network;
use crate::programs::Programs;
use crate::services::{self, EXECUTOR_PORT, START_LIMIT, Service};

/// The workstation's mount of the cloud.
pub const MOUNT: &str = "/mnt/cloud";
/// Data of the cloud, on the server's disk.
const STORE: &str = "/srv/cloud";
/// The executor's mount of the cloud, if it has one.
const NEAR: &str = "/mnt/near";
const CLOUD_PORT: u16 = 8080;

/// Description of a laboratory with a cloud.
#[derive(Debug, Clone, Default)]
pub struct CloudSpec {
    /// Options of the workstation's mount.
    pub options: Vec<String>,
    /// Options of the executor's own mount; without them, it serves the store's disk.
    pub near: Option<Vec<String>>,
    /// Variables of every command on both hosts.
    pub variables: Vec<(String, String)>,
}

/// A running laboratory with a cloud; everything ends when it is dropped.
#[derive(Debug)]
pub struct Cloud {
    // Fields are dropped in this order: an executor before the mount that it serves, that before
    // the cloud.
    _executor: Service,
    _mounts: Vec<Service>,
    _cloud: Service,
    /// The user's machine.
    pub workstation: Host,
    /// The machine with the store and the executor.
    pub server: Host,
}

impl CloudSpec {
    /// A workstation whose mount has these options, separated by blanks.
    pub fn new(options: &str) -> CloudSpec {
        CloudSpec { options: words(options), ..CloudSpec::default() }
    }

    /// Also mounts the cloud beside the executor, with these options.
    pub fn near(mut self, options: &str) -> CloudSpec {
        self.near = Some(words(options));
        self
    }

    /// Adds a variable that every command on both hosts has.
    pub fn with_variable(mut self, name: &str, value: &str) -> CloudSpec {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    fn host(&self, name: &str, programs: &Programs) -> Result<Host> {
        let variables: Vec<_> =
            self.variables.iter().map(|(name, value)| (name.as_str(), Path::new(value))).collect();
        let host = Host::start(name, programs)?.with_variables(&variables);
        network::raise_loopback(&host).map(|()| host)
    }
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

impl Cloud {
    /// Makes everything; on return the mounts exist and the executor listens.
    pub fn start(spec: &CloudSpec, programs: &Programs) -> Result<Cloud> {
        let workstation = spec.host("workstation", programs)?;
        let server = spec.host("server", programs)?;
        network::connect(&workstation, &server, 1, None)?;
        let (_, address) = network::addresses(1);
        make_directory(&server, STORE)?;
        let cloud = serve(&server, &address)?;
        let mut mounts = vec![mount(&workstation, &address, MOUNT, &spec.options)?];
        let export = match &spec.near {
            Some(options) => {
                mounts.push(mount(&server, &address, NEAR, options)?);
                NEAR
            }
            None => STORE,
        };
        let executor =
            services::start_executor(&server, &address, &[("cloud".into(), export.into())])?;
        let table = format!(
            "[[executor]]\nname = \"near\"\naddress = \"http://{address}:{EXECUTOR_PORT}\"\n\n\
             [[mount]]\npath = \"{MOUNT}\"\nexecutor = \"near\"\nexport = \"cloud\"\n"
        );
        services::write_file(&workstation, CONFIG, table.as_bytes())?;
        Ok(Cloud { _executor: executor, _mounts: mounts, _cloud: cloud, workstation, server })
    }

    /// The store's directory, by a path for this process.
    pub fn store(&self) -> PathBuf {
        self.server.path(STORE)
    }

    /// The workstation's mount, by a path for this process: reads use the workstation's caches.
    pub fn mount(&self) -> PathBuf {
        self.workstation.path(MOUNT)
    }
}

fn make_directory(host: &Host, path: &str) -> Result<()> {
    let seen = host.path(path);
    fs::create_dir_all(&seen).attempt(|| format!("make {}", seen.display()))
}

/// Serves the directory as the cloud, without any cache.
fn serve(server: &Host, address: &str) -> Result<Service> {
    let mut command = rclone(server, address);
    command.args([
        "serve",
        "webdav",
        "--addr",
        &format!("{address}:{CLOUD_PORT}"),
        "--dir-cache-time",
        "0s",
        STORE,
    ]);
    let service = Service::start(server, command)?;
    service.journal.wait_for("WebDav Server started", START_LIMIT)?;
    Ok(service)
}

fn mount(host: &Host, address: &str, path: &str, options: &[String]) -> Result<Service> {
    make_directory(host, path)?;
    let mut command = rclone(host, address);
    command.args(["mount", "cloud:", path]).args(options);
    services::mount(host, command, path)
}

/// rclone with the remote `cloud:` defined by variables, so that no user's file is read or made.
fn rclone(host: &Host, address: &str) -> Command {
    let mut command = host.command("rclone");
    command.env("RCLONE_CONFIG", "/dev/null").env("RCLONE_CONFIG_CLOUD_TYPE", "webdav");
    command.env("RCLONE_CONFIG_CLOUD_URL", format!("http://{address}:{CLOUD_PORT}"));
    command.env("RCLONE_CONFIG_CLOUD_VENDOR", "other");
    command
}
