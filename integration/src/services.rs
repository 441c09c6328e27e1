//! The long-running programs of a laboratory: sshd and posh-executor on a server, sshfs on the
//! workstation. Each is a child in the foreground with an owner. Its start is awaited by its output
//! or effect, never by time.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use crate::error::{AttemptExt, LabError, Result};
use crate::host::{HOME, Host, PROGRAMS};
use crate::process::{ChildProcess, Journal, wait_for};

/// Timeout for a service's start on a busy machine.
pub const START_LIMIT: Duration = Duration::from_secs(30);
/// Port of executors.
pub const EXECUTOR_PORT: u16 = 7400;

/// The ssh key that gives access to every server, on the hosts that have it.
pub const WORKSTATION_KEY: &str = "/run/lab-key";
const SSH_DIRECTORY: &str = "/run/lab-ssh";

/// A running service and its output.
#[derive(Debug)]
pub struct Service {
    /// The process; dropping it ends it.
    pub process: ChildProcess,
    /// Its stderr.
    pub journal: Journal,
}

impl Service {
    pub(crate) fn start(host: &Host, mut command: Command) -> Result<Service> {
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = host.spawn(command)?;
        let stderr = process.stderr.take().expect("stderr is a pipe");
        Ok(Service { process, journal: Journal::of(stderr) })
    }
}

/// Makes the workstation's ssh key; returns its public half.
pub fn make_user_key(workstation: &Host) -> Result<String> {
    make_key(workstation, WORKSTATION_KEY)?;
    let public = workstation.path(format!("{WORKSTATION_KEY}.pub"));
    fs::read_to_string(&public).attempt(|| format!("read {}", public.display()))
}

fn make_key(host: &Host, path: &str) -> Result<()> {
    let mut keygen = host.command("ssh-keygen");
    keygen.args(["-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", path]);
    host.must(keygen).map(drop)
}

/// Starts an sshd that admits root with `public_key` and nobody else.
pub fn start_sshd(server: &Host, address: &str, public_key: &str) -> Result<Service> {
    let put = |name: &str, text: &str| {
        let path = server.path(SSH_DIRECTORY).join(name);
        fs::write(&path, text).attempt(|| format!("write {}", path.display()))
    };
    let directory = server.path(SSH_DIRECTORY);
    fs::create_dir_all(&directory).attempt(|| format!("make {}", directory.display()))?;
    make_key(server, &format!("{SSH_DIRECTORY}/host-key"))?;
    put("authorized_keys", public_key)?;
    put("config", &sshd_config(address))?;
    put("shadow", &unlocked_root(server)?)?;
    server
        .run(|| {
            let none: Option<&str> = None;
            let shadow = format!("{SSH_DIRECTORY}/shadow");
            nix::mount::mount(
                Some(shadow.as_str()),
                "/etc/shadow",
                none,
                nix::mount::MsFlags::MS_BIND,
                none,
            )
        })
        .attempt(|| format!("bind a shadow file on {}", server.name()))?;
    // sshd re-executes itself and wants its absolute path.
    let mut command = server.command("/usr/sbin/sshd");
    command.args(["-D", "-e", "-f", &format!("{SSH_DIRECTORY}/config")]);
    let service = Service::start(server, command)?;
    service.journal.wait_for("Server listening on", START_LIMIT)?;
    Ok(service)
}

/// The home is the host's own: a shell must not read this machine's start-up files of root.
fn sshd_config(address: &str) -> String {
    format!(
        "ListenAddress {address}\nPort 22\nHostKey {SSH_DIRECTORY}/host-key\nPidFile none\n\
         AuthorizedKeysFile {SSH_DIRECTORY}/authorized_keys\nStrictModes no\nUsePAM no\n\
         PermitRootLogin prohibit-password\nPasswordAuthentication no\nUseDNS no\n\
         Subsystem sftp internal-sftp\nMaxStartups 100\nSetEnv HOME={HOME}\n"
    )
}

/// The private half of the user's key.
pub fn user_key(workstation: &Host) -> Result<Vec<u8>> {
    read_file(workstation, WORKSTATION_KEY)
}

/// /etc/shadow with a root account that has no password but is not locked: sshd
/// without PAM turns locked accounts away, and Debian's installer locks root.
fn unlocked_root(server: &Host) -> Result<String> {
    let shadow = String::from_utf8_lossy(&read_file(server, "/etc/shadow")?).into_owned();
    let others = shadow.lines().filter(|l| !l.starts_with("root:"));
    Ok(std::iter::once("root:*:19000:0:99999:7:::").chain(others).flat_map(|l| [l, "\n"]).collect())
}

/// The laboratory's executors serve root, whose workstation has several users.
const AS_ROOT: [&str; 3] = ["--user", "root", "--trust-caller-ids"];

/// Starts an executor that serves `exports` (name and directory).
pub fn start_executor(
    server: &Host,
    address: &str,
    exports: &[(String, String)],
) -> Result<Service> {
    let mut command = executor_command(server, address, EXECUTOR_PORT);
    command.args(AS_ROOT);
    for (name, directory) in exports {
        command.args(["--export", &format!("{name}={directory}")]);
    }
    start_listening(server, command)
}

/// Command of an executor that serves nothing yet.
pub fn executor_command(server: &Host, address: &str, port: u16) -> Command {
    let mut command = server.command(format!("{PROGRAMS}/posh-executor"));
    command.args(["--listen", &format!("{address}:{port}"), "--allow-plaintext"]);
    command
}

/// Starts an executor and waits until it listens.
pub fn start_listening(server: &Host, command: Command) -> Result<Service> {
    let service = Service::start(server, command)?;
    service.journal.wait_for("listening on", START_LIMIT)?;
    Ok(service)
}

/// Starts an executor for one export on a free port of the loopback interface; also returns its
/// `address:port`. It ends with the calling thread, however that ends.
pub fn start_local_executor(
    host: &Host,
    export: &str,
    directory: &Path,
) -> Result<(Service, String)> {
    let mut command = host.command("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(host.programs().join("posh-executor"));
    command
        .args(["--listen", "127.0.0.1:0", "--export"])
        .arg(format!("{export}={}", directory.display()));
    if nix::unistd::geteuid().is_root() {
        command.args(AS_ROOT);
    }
    let service = Service::start(host, command)?;
    let line = service.journal.wait_for("listening on ", START_LIMIT)?;
    let address =
        line.split("listening on ").nth(1).and_then(|rest| rest.split_whitespace().next());
    let address =
        address.ok_or_else(|| LabError::Report(format!("no address in {line:?}")))?.to_owned();
    Ok((service, address))
}

/// Mounts `address:directory` at `path` on a host that has [`WORKSTATION_KEY`], with further
/// `options` of sshfs. The connection may not be established yet; [`wait_answering`] waits for it.
pub fn mount_sshfs(
    host: &Host,
    address: &str,
    directory: &str,
    path: &str,
    options: &[String],
) -> Result<Service> {
    let point = host.path(path);
    fs::create_dir_all(&point).attempt(|| format!("make {}", point.display()))?;
    let mut command =
        sshfs_command(host, &format!("root@{address}:{directory}"), path, WORKSTATION_KEY);
    for option in options {
        command.args(["-o", option]);
    }
    mount(host, command, path)
}

/// Unmounts a mount of a host, even if it is in use; `service` served it.
pub fn unmount(host: &Host, path: &str, service: Service) -> Result<()> {
    let point = path.to_owned();
    host.run(move || nix::mount::umount2(point.as_str(), nix::mount::MntFlags::MNT_DETACH))
        .attempt(|| format!("unmount {path} on {}", host.name()))?;
    drop(service);
    Ok(())
}

/// Command of an sshfs in the foreground that mounts `source` at `path`.
pub fn sshfs_command(workstation: &Host, source: &str, path: &str, key: &str) -> Command {
    let mut command = workstation.command("sshfs");
    command.args(["-f", source, path]);
    let options = [
        "StrictHostKeyChecking=no",
        "UserKnownHostsFile=/dev/null",
        "LogLevel=ERROR",
        "BatchMode=yes",
    ];
    command.args(["-o", &format!("{},IdentityFile={key}", options.join(","))]);
    command
}

/// Starts a program that mounts something at `path`, and waits until it is in the mount table.
pub fn mount(workstation: &Host, command: Command, path: &str) -> Result<Service> {
    let mut service = Service::start(workstation, command)?;
    wait_mounted(workstation, path, &mut service)?;
    Ok(service)
}

/// Waits until a mount answers: sshfs shows its mount before it has connected.
pub fn wait_answering(workstation: &Host, path: &str) -> Result<()> {
    fs::metadata(workstation.path(path)).map(drop).attempt(|| format!("reach the mount {path}"))
}

/// Waits for the mount; an error if the program ends before.
fn wait_mounted(host: &Host, path: &str, service: &mut Service) -> Result<()> {
    let mut appears = Appearance::of(host, path)?;
    while !appears.is_there()? {
        let ended = service.process.try_wait().attempt(|| "wait for sshfs".into())?.is_some();
        if ended || !appears.wait()? {
            return Err(appears.late(service.journal.text()));
        }
    }
    Ok(())
}

/// Waits until something is mounted at a path of a host; `tell` describes the state at the timeout.
pub fn wait_in_mountinfo(host: &Host, path: &str, tell: &dyn Fn() -> Result<String>) -> Result<()> {
    let mut appears = Appearance::of(host, path)?;
    while !appears.is_there()? {
        if !appears.wait()? {
            return Err(appears.late(tell()?));
        }
    }
    Ok(())
}

/// A mount that is awaited. The kernel raises POLLPRI on mountinfo with every change of the mount
/// table.
struct Appearance {
    table: File,
    what: String,
    path: String,
    end: Instant,
}

impl Appearance {
    fn of(host: &Host, path: &str) -> Result<Self> {
        let table = format!("/proc/{}/mountinfo", host.pid());
        let table = File::open(&table).attempt(|| format!("open {table}"))?;
        let what = format!("the mount of {path} on {}", host.name());
        Ok(Self { table, what, path: path.to_owned(), end: Instant::now() + START_LIMIT })
    }

    fn is_there(&self) -> Result<bool> {
        is_mounted(&self.table, &self.path)
    }

    /// Waits for the next change of the table; false at the timeout.
    fn wait(&mut self) -> Result<bool> {
        wait_for(&self.table, PollFlags::PRI, self.end.saturating_duration_since(Instant::now()))
    }

    fn late(self, detail: String) -> LabError {
        LabError::Timeout { what: self.what, after: START_LIMIT, detail }
    }
}

fn is_mounted(table: &File, path: &str) -> Result<bool> {
    use std::os::unix::fs::FileExt;
    let mut text = Vec::new();
    let mut part = [0; 16 * 1024];
    loop {
        let read =
            table.read_at(&mut part, text.len() as u64).attempt(|| "read mountinfo".into())?;
        if read == 0 {
            break;
        }
        text.extend_from_slice(&part[..read]);
    }
    let text = String::from_utf8_lossy(&text);
    Ok(text.lines().any(|line| line.split(' ').nth(4) == Some(path)))
}

/// Writes a file on a host.
pub fn write_file(host: &Host, path: impl AsRef<Path>, content: &[u8]) -> Result<()> {
    let path = host.path(path);
    fs::write(&path, content).attempt(|| format!("write {}", path.display()))
}

/// Writes a file on a host that only its owner may read.
pub fn write_secret(host: &Host, path: impl AsRef<Path>, content: &[u8]) -> Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let path = host.path(path);
    let file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path);
    file.and_then(|mut file| file.write_all(content))
        .attempt(|| format!("write {}", path.display()))
}

/// Reads a file of a host.
pub fn read_file(host: &Host, path: impl AsRef<Path>) -> Result<Vec<u8>> {
    let path = host.path(path);
    let mut content = Vec::new();
    let mut file = File::open(&path).attempt(|| format!("open {}", path.display()))?;
    file.read_to_end(&mut content).attempt(|| format!("read {}", path.display()))?;
    Ok(content)
}
