//! The executor under test: a process of the installed program, with certificates, two identities
//! and an export for each. Its files are in one directory, which is removed with it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use fs_mapper::config::TlsHost;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, User};
use posh_proto::token::Token;
use tempfile::TempDir;

/// The abusing identity, and the measured one.
pub const ABUSER: &str = "ada";
pub const OTHER: &str = "bob";
/// Their exports.
pub const ABUSED_EXPORT: &str = "a";
pub const OTHER_EXPORT: &str = "b";
/// Their users, which exist on any system.
const USERS: [(&str, &str, &str); 2] =
    [(ABUSER, ABUSED_EXPORT, "games"), (OTHER, OTHER_EXPORT, "news")];
/// File that the other identity reads, and its content.
pub const FILE: &str = "f";
pub const CONTENT: &str = "a line of the other identity\n";
/// Number of the abuser's files to open.
pub const FILES: usize = 50;
/// Size of the abuser's file to copy.
pub const LARGE_BYTES: u64 = 256 << 20;
/// Timeout for the executor's start and end.
const PATIENCE: Duration = Duration::from_secs(20);

pub struct FairnessServer {
    directory: TempDir,
    program: PathBuf,
    process: Child,
    pub host: TlsHost,
}

impl FairnessServer {
    pub fn start(programs: &Path) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("posh-fairness").tempdir()?;
        // Users traverse it on the way to their exports.
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o711))?;
        let program = programs.join("posh-executor");
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("tmp"))?;
        administer(
            &program,
            &["init", "--dir", &at("tls").to_string_lossy(), "--name", "127.0.0.1"],
        )?;
        fs::write(at("executor.toml"), configure(directory.path())?)?;
        let mut command = Command::new(&program);
        command.arg("--config").arg(at("executor.toml")).env("TMPDIR", at("tmp"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process =
            command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let address = address_of(&mut process);
        let (host, port) = match &address {
            Ok(address) => address.rsplit_once(':').context("an address has a port")?,
            Err(_) => ("", "0"),
        };
        let host = TlsHost { host: host.to_owned(), port: port.parse()? };
        let server = Self { program, process, host, directory };
        address.map(|_| server)
    }

    pub fn credentials(&self, identity: &str) -> PathBuf {
        self.directory.path().join(format!("{identity}.json"))
    }

    /// Makes a token for an enrolment.
    pub fn token(&self, identity: &str) -> Result<Token> {
        let tls = self.directory.path().join("tls");
        let printed =
            administer(&self.program, &["enroll", "--dir", &tls.to_string_lossy(), identity])?;
        printed
            .split_whitespace()
            .find_map(|word| word.parse().ok())
            .context("enroll prints a token")
    }

    /// Resets the executor's peak memory.
    pub fn forget_peak(&self) -> Result<()> {
        fs::write(format!("/proc/{}/clear_refs", self.process.id()), "5")
            .context("cannot reset VmHWM")
    }

    /// Peak resident memory since then, in MiB; `None` when the executor has ended.
    pub fn peak_mib(&self) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib >> 10)
    }
}

impl Drop for FairnessServer {
    fn drop(&mut self) {
        let pid = Pid::from_raw(self.process.id().cast_signed());
        let _ = kill(pid, Signal::SIGTERM);
        let ends = (0..PATIENCE.as_millis() / 50).any(|_| {
            thread::sleep(Duration::from_millis(50));
            !matches!(self.process.try_wait(), Ok(None))
        });
        if !ends {
            println!("the executor did not heed SIGTERM and was killed");
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}

/// Output of a command of `posh-executor`.
fn administer(program: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output()?;
    anyhow::ensure!(
        output.status.success(),
        "{arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}

/// Makes the exports; returns the configuration, with the default bounds.
fn configure(directory: &Path) -> Result<String> {
    let tls = directory.join("tls");
    // Any command: a fork bomb is not annotated.
    let mut text = format!(
        "listen = \"127.0.0.1:0\"\ndrain_seconds = 1\n[tls]\ndir = {tls:?}\n[confinement]\n\
         commands = [\"*\"]\n"
    );
    for (identity, export, user) in USERS {
        let path = directory.join(export);
        fs::create_dir(&path)?;
        fs::write(path.join(FILE), CONTENT)?;
        if identity == ABUSER {
            (0..FILES).try_for_each(|number| fs::write(path.join(format!("g{number}")), "x"))?;
            ["large", "copy"]
                .iter()
                .try_for_each(|name| fs::File::create(path.join(name))?.set_len(LARGE_BYTES))?;
        }
        let user_id =
            User::from_name(user)?.with_context(|| format!("this machine has no user {user}"))?;
        let own = |path: &Path| chown(path, Some(user_id.uid.as_raw()), Some(user_id.gid.as_raw()));
        fs::read_dir(&path)?.try_for_each(|entry| own(&entry?.path()))?;
        own(&path)?;
        text += &format!("[[export]]\nname = \"{export}\"\npath = {path:?}\n");
        text += &format!(
            "[[identity]]\nname = \"{identity}\"\nuser = \"{user}\"\nexports = [\"{export}\"]\n"
        );
    }
    Ok(text)
}

/// Reads the executor's address from its log; the log is read on, so that the executor never
/// blocks.
fn address_of(process: &mut Child) -> Result<String> {
    let (found, address) = mpsc::channel();
    let output = process.stdout.take().map(|out| Box::new(out) as Box<dyn std::io::Read + Send>);
    let errors = process.stderr.take().map(|err| Box::new(err) as Box<dyn std::io::Read + Send>);
    for stream in [output, errors].into_iter().flatten() {
        let found = found.clone();
        thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                if std::env::var_os("POSH_FAIRNESS_LOG").is_some() {
                    eprintln!("{line}");
                }
                let address = line
                    .split("listening on ")
                    .nth(1)
                    .and_then(|rest| rest.split_whitespace().next());
                if let Some(address) = address {
                    let digits = |c: char| c.is_ascii_digit() || c == '.' || c == ':';
                    let _ =
                        found.send(address.chars().take_while(|c| digits(*c)).collect::<String>());
                }
            }
        });
    }
    address.recv_timeout(PATIENCE).context("the executor does not listen")
}
