//! The machine for measuring overheads: one machine in namespaces of its own, executors on its
//! loopback interface, and their exports as bind mounts, so that neither network nor mount adds to
//! posh's cost. Everything is removed when it is dropped, and when this process ends in any other
//! way.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use nix::mount::{MsFlags, mount};
use posh_integration::explain::{ExplainReport, LOCAL};
use posh_integration::host::{CONFIG, HOME};
use posh_integration::oracle::{Script, Under};
use posh_integration::programs::Programs;
use posh_integration::services::{self, EXECUTOR_PORT, Service};
use posh_integration::workload::Store;
use posh_integration::{Host, network};

/// Directory of the certificates of an executor with TLS.
const CERTIFICATES: &str = "/run/posh-tls";
const EXECUTOR_CONFIG: &str = "/run/executor.toml";

/// A machine with executors; fields are dropped in this order.
#[derive(Debug)]
pub struct BenchSite {
    executors: Vec<Service>,
    host: Host,
}

impl BenchSite {
    /// Makes a machine with `count` executors: number N serves `/srv/sN`, which is mounted at
    /// `/mnt/sN`. No gateway runs yet.
    pub fn start(programs: &Programs, count: usize) -> Result<BenchSite> {
        let host = Host::start("bench", programs)?;
        network::raise_loopback(&host)?;
        let mut table = String::new();
        let mut executors = Vec::new();
        for number in 1..=count {
            let (directory, path) = (server_path(number), mount_path(number));
            for made in [&directory, &path] {
                fs::create_dir(host.path(made))
                    .with_context(|| format!("cannot make {}", made.display()))?;
            }
            bind(&host, &directory, &path)?;
            let (service, address) =
                services::start_local_executor(&host, &format!("s{number}"), &directory)?;
            executors.push(service);
            write!(
                table,
                "[[executor]]\nname = \"store{number}\"\naddress = \"http://{address}\"\n\n\
                 [[mount]]\npath = \"{}\"\nexecutor = \"store{number}\"\n\
                 export = \"s{number}\"\n\n",
                path.display()
            )?;
        }
        services::write_file(&host, CONFIG, table.as_bytes())?;
        Ok(BenchSite { executors, host })
    }

    /// Like [`BenchSite::start`], with one executor that knows its users by certificates.
    pub fn with_certificates(programs: &Programs) -> Result<BenchSite> {
        let mut site = BenchSite::start(programs, 1)?;
        site.executors.clear();
        let BenchSite { executors, host } = &mut site;
        host.must(words(
            host,
            "posh-executor",
            &["init", "--dir", CERTIFICATES, "--name", "127.0.0.1"],
        ))?;
        let config = format!(
            "listen = \"127.0.0.1:{EXECUTOR_PORT}\"\n[tls]\ndir = \"{CERTIFICATES}\"\n\
             [[export]]\nname = \"s1\"\npath = \"{}\"\n[[identity]]\nname = \"bench\"\n\
             user = \"root\"\ntrust_caller_ids = true\n",
            server_path(1).display()
        );
        services::write_file(host, EXECUTOR_CONFIG, config.as_bytes())?;
        executors.push(services::start_listening(
            host,
            words(host, "posh-executor", &["--config", EXECUTOR_CONFIG]),
        )?);
        let token = host
            .must(words(host, "posh-executor", &["enroll", "bench", "--dir", CERTIFICATES]))?
            .stdout;
        let (token, address) =
            (String::from_utf8_lossy(&token), format!("tls://127.0.0.1:{EXECUTOR_PORT}"));
        host.must(words(host, "posh", &["enroll", &address, token.trim()]))?;
        let table = format!(
            "[[executor]]\nname = \"store1\"\naddress = \"{address}\"\n\n\
             [[mount]]\npath = \"{}\"\nexecutor = \"store1\"\nexport = \"s1\"\n",
            mount_path(1).display()
        );
        services::write_file(host, CONFIG, table.as_bytes())?;
        Ok(site)
    }

    /// The machine.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// A new directory `name` on each of the first `count` servers.
    pub fn stores(&self, name: &str, count: usize) -> Result<Vec<Store<'_>>> {
        let store = |number| {
            let (directory, mount) =
                (server_path(number).join(name), mount_path(number).join(name));
            let seen = self.host.path(&directory);
            fs::create_dir(&seen).with_context(|| format!("cannot make {}", seen.display()))?;
            Ok(Store { host: &self.host, directory, mount })
        };
        (1..=count).map(store).collect()
    }

    /// Makes a file of `size_bytes` on the first server, without holes; returns its path through
    /// the mount.
    pub fn file(&self, name: &str, size_bytes: u64) -> Result<PathBuf> {
        const BLOCK_BYTES: usize = 1 << 20;
        let mut file = fs::File::create(self.host.path(server_path(1).join(name)))?;
        let block: Vec<u8> = b"x of a line\n".iter().copied().cycle().take(BLOCK_BYTES).collect();
        let mut left = size_bytes;
        while left > 0 {
            let piece = usize::try_from(left).unwrap_or(BLOCK_BYTES).min(BLOCK_BYTES);
            file.write_all(&block[..piece])
                .with_context(|| format!("cannot write {size_bytes} bytes of {name}"))?;
            left -= piece as u64;
        }
        Ok(mount_path(1).join(name))
    }

    /// Makes a file on the first server that has `first` and then a hole; returns its path through
    /// the mount.
    pub fn sparse_file(&self, name: &str, size_bytes: u64, first: u8) -> Result<PathBuf> {
        let mut file = fs::File::create(self.host.path(server_path(1).join(name)))?;
        file.write_all(&[first])?;
        file.set_len(size_bytes)?;
        Ok(mount_path(1).join(name))
    }

    /// Process id of executor number `number`, in this process's namespace.
    pub fn executor(&self, number: usize) -> u32 {
        self.executors[number - 1].process.id()
    }

    /// Process id of the running gateway.
    pub fn gateway(&self) -> Result<Option<u32>> {
        Ok(self.host.processes()?.into_iter().find(|p| p.program == "posh-gateway").map(|p| p.pid))
    }

    /// Runs a script under posh and returns its report; a failure is an error.
    pub fn explained(&self, text: &str) -> Result<ExplainReport> {
        let outcome = Script::new(text).run(&self.host, Under::PoshExplained)?;
        if !outcome.status.success() {
            bail!("under posh, this failed: {text}\n{outcome}");
        }
        Ok(outcome.report().clone())
    }

    /// Requires that all annotated commands of a script run remotely or locally, as intended.
    pub fn expect_placement(&self, text: &str, offloaded: bool) -> Result<()> {
        let report = self.explained(text)?;
        let mut stages = report.pipelines.iter().flat_map(|p| &p.stages).peekable();
        if stages.peek().is_none() {
            bail!("posh saw no command of {text}");
        }
        match stages.find(|s| (s.placement != LOCAL) != offloaded) {
            Some(stage) => {
                bail!("{} of {text} ran at {}: {}", stage.command, stage.placement, stage.reason)
            }
            None => Ok(()),
        }
    }
}

fn words(host: &Host, program: &str, words: &[&str]) -> Command {
    let mut command = host.command(host.programs().join(program));
    command.args(words);
    command
}

/// A path in the user's home on the machine's own memory file system.
pub fn local_path(name: &str) -> PathBuf {
    Path::new(HOME).join(name)
}

fn server_path(number: usize) -> PathBuf {
    format!("/srv/s{number}").into()
}

fn mount_path(number: usize) -> PathBuf {
    format!("/mnt/s{number}").into()
}

fn bind(host: &Host, from: &Path, to: &Path) -> Result<()> {
    let (source, target) = (from.to_owned(), to.to_owned());
    let none: Option<&str> = None;
    host.run(move || mount(Some(&source), &target, none, MsFlags::MS_BIND, none))
        .with_context(|| format!("cannot bind {} to {}", from.display(), to.display()))
}
