//! Differences between a server of the laboratory and the workstation, so that nothing agrees by
//! accident: accounts, time zone, default locale, a locale that is missing, and one older tool.
//! Also the ordinary user, who has an account on both under one name with two uids, a mount and an
//! executor of her own.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::process::Command;

use nix::mount::{MsFlags, mount};

use crate::error::{AttemptExt, Result};
use crate::host::Host;
use crate::services::{self, Service, write_file};
use crate::volumes::{self, Mounts};

/// The ordinary user's name on both machines.
pub const NAME: &str = "ada";
/// Her uid and gid on the workstation; on a server they are another user's.
pub const HERE: u32 = 1000;
/// Her uid and gid on a server.
pub const THERE: u32 = 2001;
/// Her home, on both machines.
pub const HOME: &str = "/home/ada";
/// Her sockets and her mount table on the workstation.
pub const RUNTIME: &str = "/run/ada";
/// Her mount of her directory on the first server.
pub const MOUNT: &str = "/mnt/u1";
/// That directory on the server.
pub const DIRECTORY: &str = "/srv/u1";

/// Directory of the files that are bound over those in /etc.
const OWN_ETC: &str = "/run/lab-etc";
/// Port of her executor.
const EXECUTOR_PORT: u16 = 7401;
/// The tool of which a server has an older version.
pub const OLDER_TOOL: &str = "tsort";
/// A locale that only the workstation has.
pub const OWN_LOCALE: &str = "nds_DE.utf8";

/// A language in which only the workstation has messages.
const OWN_LANGUAGE: &str = "fr";

/// Her mount and her executor.
#[derive(Debug)]
pub struct Person {
    // Dropped in this order.
    _mount: Option<Service>,
    _executor: Service,
}

/// A locale that only servers have.
const THEIR_LOCALE: &str = "sco_GB.utf8";

/// Accounts, time zone and locales of the workstation.
pub fn furnish_workstation(host: &Host) -> Result<()> {
    accounts(host, &[(NAME, HERE), ("bob", 1001), ("carl", THERE)])?;
    // A locale of that name behaves as C.UTF-8 does, but a server does not know it.
    add_locale(host, OWN_LOCALE)?;
    // In containers only root may open /dev/fuse.
    shell(host, "mknod -m 666 /run/fuse c 10 229")?;
    bind(host, "/run/fuse", "/dev/fuse")
}

/// Accounts and time zone of a server: other uids for the same names, Tokyo, the C locale, an older
/// tool.
pub fn furnish_server(host: &Host) -> Result<()> {
    accounts(host, &[(NAME, THERE), ("dora", HERE), ("bob", 2002)])?;
    bind(host, "/usr/share/zoneinfo/Asia/Tokyo", "/etc/localtime")?;
    let older = format!(
        "#!/bin/sh\n[ \"$1\" = --version ] && exec echo '{OLDER_TOOL} (GNU coreutils) 8.4'\n\
         # As releases before did not: each line ends in a blank.\n\
         /usr/bin/{OLDER_TOOL} \"$@\" | sed 's/$/ /'\n"
    );
    services::write_file(host, "/run/older-tool", older.as_bytes())?;
    let script = "mkdir /run/local-bin; cp /run/older-tool /run/local-bin/tsort; \
                  chmod 755 /run/local-bin/tsort";
    shell(host, script)?;
    bind(host, "/run/local-bin", "/usr/local/bin")?;
    add_locale(host, THEIR_LOCALE)?;
    shell(host, "mkdir /run/no-catalogs")?;
    let catalogs = format!("/usr/share/locale/{OWN_LANGUAGE}/LC_MESSAGES");
    bind(host, "/run/no-catalogs", &catalogs)
}

fn add_locale(host: &Host, name: &str) -> Result<()> {
    let script = format!(
        "mkdir /run/locale; cp -a /usr/lib/locale/. /run/locale; \
         cp -a /run/locale/C.utf8 /run/locale/{name}"
    );
    shell(host, &script)?;
    bind(host, "/run/locale", "/usr/lib/locale")
}

/// Formats an account's line in one of these files, from its name and number.
type AccountLine = fn(&str, u32) -> String;

/// /etc/passwd, /etc/group and /etc/shadow with the system's accounts and `people`.
fn accounts(host: &Host, people: &[(&str, u32)]) -> Result<()> {
    let directory = host.path(OWN_ETC);
    fs::create_dir_all(&directory).attempt(|| format!("make {}", directory.display()))?;
    let passwd =
        |name: &str, number: u32| format!("{name}:x:{number}:{number}::/home/{name}:/bin/sh\n");
    let group = |name: &str, number: u32| format!("{name}:x:{number}:\n");
    let shadow = |name: &str, _: u32| format!("{name}:*:19000:0:99999:7:::\n");
    let files: [(&str, AccountLine); 3] =
        [("passwd", passwd), ("group", group), ("shadow", shadow)];
    for (file, line) in files {
        let path = format!("/etc/{file}");
        let before = String::from_utf8_lossy(&services::read_file(host, &path)?).into_owned();
        let kept = before.lines().filter(|l| is_system(l, file)).map(|l| format!("{l}\n"));
        let added = people.iter().map(|(name, number)| line(name, *number));
        let own = format!("{OWN_ETC}/{file}");
        write_file(host, &own, kept.chain(added).collect::<String>().as_bytes())?;
        bind(host, &own, &path)?;
    }
    Ok(())
}

/// Returns true if a line of such a file is about an account that comes with the system. The shadow
/// file has no numbers; its lines for other users of this machine do no harm.
fn is_system(line: &str, file: &str) -> bool {
    let number = line.split(':').nth(2).and_then(|n| n.parse::<u32>().ok());
    file == "shadow" || number.is_none_or(|n| !(HERE..65_000).contains(&n))
}

fn bind(host: &Host, from: &str, to: &str) -> Result<()> {
    let (source, target, none) = (from.to_owned(), to.to_owned(), None::<&str>);
    host.run(move || mount(Some(source.as_str()), target.as_str(), none, MsFlags::MS_BIND, none))
        .attempt(|| format!("bind {from} to {to} on {}", host.name()))
}

fn shell(host: &Host, script: &str) -> Result<()> {
    let mut command = host.command("sh");
    command.args(["-euc", script]);
    host.must(command).map(drop)
}

impl Person {
    /// Gives her homes, an executor that runs as her, a mount that she makes herself, and a mount
    /// table.
    pub fn settle(
        workstation: &Host,
        server: &Host,
        address: &str,
        mounts: Mounts,
    ) -> Result<Person> {
        for (host, path, number) in [
            (workstation, HOME, HERE),
            (workstation, RUNTIME, HERE),
            (workstation, MOUNT, HERE),
            (server, HOME, THERE),
            (server, DIRECTORY, THERE),
        ] {
            own_directory(host, path, number)?;
        }
        let mut executor = services::executor_command(server, address, EXECUTOR_PORT);
        executor.arg("--export").arg(format!("u1={DIRECTORY}")).env("HOME", HOME);
        let executor = services::start_listening(server, as_number(executor, THERE))?;
        let executor_entry = format!(
            "[[executor]]\nname = \"store1\"\naddress = \"http://{address}:{EXECUTOR_PORT}\"\n\n"
        );
        let table =
            mounts.settings().to_owned() + &executor_entry + &mounts.entry(MOUNT, "store1", "u1");
        write_file(workstation, format!("{RUNTIME}/mounts.toml"), table.as_bytes())?;
        let mount = match mounts {
            Mounts::Sshfs => Some(mount_sshfs(workstation, address)?),
            Mounts::Volume | Mounts::AtHand => {
                volumes::start(workstation, volumes::User::Ordinary, &[MOUNT])?;
                None
            }
        };
        // Waits for the mount, which no other user may access.
        let mut look = workstation.command("stat");
        look.arg(MOUNT);
        workstation.must(as_number(look, HERE))?;
        Ok(Person { _mount: mount, _executor: executor })
    }

    /// Her variables on the workstation.
    pub fn variables() -> [(&'static str, String); 4] {
        let config = format!("{RUNTIME}/mounts.toml");
        [
            ("HOME", HOME.into()),
            ("XDG_RUNTIME_DIR", RUNTIME.into()),
            ("POSH_CONFIG", config),
            ("USER", NAME.into()),
        ]
    }
}

fn mount_sshfs(workstation: &Host, address: &str) -> Result<Service> {
    let key = format!("{RUNTIME}/key");
    write_file(workstation, &key, &services::user_key(workstation)?)?;
    give(workstation, &key, HERE, 0o600)?;
    let mount =
        services::sshfs_command(workstation, &format!("{NAME}@{address}:{DIRECTORY}"), MOUNT, &key);
    services::mount(workstation, as_number(mount, HERE), MOUNT)
}

/// Runs the command with this uid and gid.
pub fn as_number(mut command: Command, number: u32) -> Command {
    use std::os::unix::process::CommandExt;
    command.uid(number).gid(number);
    command
}

fn own_directory(host: &Host, path: &str, number: u32) -> Result<()> {
    let seen = host.path(path);
    fs::create_dir_all(&seen).attempt(|| format!("make {path} on {}", host.name()))?;
    give(host, path, number, 0o700)
}

fn give(host: &Host, path: &str, number: u32, mode: u32) -> Result<()> {
    let seen = host.path(path);
    chown(&seen, Some(number), Some(number))
        .and_then(|()| fs::set_permissions(&seen, fs::Permissions::from_mode(mode)))
        .attempt(|| format!("give {path} on {} to {number}", host.name()))
}
