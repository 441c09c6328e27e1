//! Views against clients that choose their names: mount points, sub-paths, client files and working directories.
//! Nothing of the server's is made, changed or hidden by one.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink},
    path::Path,
    process::{Child, Command, Stdio},
};

use nix::sys::signal::{Signal, kill};
use posh_executor::callers::UnixUser;
use posh_proto::executor::{ClientFile, RunSpec, rejected::Kind};
use tempfile::TempDir;

use crate::harness::*;

/// An account with no rights of its own.
const NOBODY: &str = "nobody";

/// Starts `$@` where `/dev` is its own: what an attack changes there is not the machine's.
const WITH_OWN_DEVICES: &str = "
    mount -t tmpfs none \"$1\" && cd \"$1\" &&
    mknod -m 666 null c 1 3 && mknod -m 666 zero c 1 5 && mknod -m 666 full c 1 7 &&
    mknod -m 666 random c 1 8 && mknod -m 666 urandom c 1 9 && mknod -m 666 tty c 5 0 &&
    cd / && mount --move \"$1\" /dev && shift && exec \"$@\"";

/// `mounts` seen at their places, and `cat` of a device, which every view has.
fn seeing(mounts: &[(&str, &str)], files: &[&str]) -> RunSpec {
    let mut spec = in_directory(pipeline(&["cat /dev/null"]), "/");
    spec.mounts = mounts.iter().map(|(path, sub_path)| mount(path, "logs", sub_path)).collect();
    let file = |path: &&str| ClientFile { path: path.to_string().into(), content: "mine\n".into(), mode: 0o6777 };
    spec.client_files = files.iter().map(file).collect();
    spec
}

fn in_directory(mut spec: RunSpec, directory: &str) -> RunSpec {
    for stage in &mut spec.stages {
        stage.cwd = directory.to_owned().into();
    }
    spec
}

async fn as_nobody() -> Lab {
    let lab = Lab::with(|config| config.confinement.user = UnixUser::named(NOBODY).ok()).await;
    fs::set_permissions(lab.store.path(), fs::Permissions::from_mode(0o777)).unwrap();
    lab
}

/// What can be seen of a tree: names, modes, owners, times and contents.
fn snapshot(top: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut queue = vec![top.to_owned()];
    while let Some(at) = queue.pop() {
        let status = fs::symlink_metadata(&at).unwrap();
        let content = if status.is_file() { fs::read(&at).unwrap() } else { Vec::new() };
        let (mode, owner, changed) = (status.mode(), status.uid(), (status.ctime(), status.ctime_nsec()));
        found.push(format!("{} {mode:o} {owner} {changed:?} {content:?}", at.display()));
        if status.is_dir() {
            queue.extend(fs::read_dir(&at).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    found.sort();
    found
}

// Guards: `places::check`, and that the server's root has left before names are made (`build::enter`).
#[tokio::test]
async fn no_name_of_a_client_reaches_the_servers_tree() {
    let victim = TempDir::new().unwrap();
    fs::write(victim.path().join("authorized_keys"), "the administrator's\n").unwrap();
    fs::create_dir(victim.path().join("cron.d")).unwrap();
    let before = snapshot(victim.path());
    let path = victim.path().display();
    let ways = ["/.old", "/old", "/proc/self/root", "/proc/1/root", "/proc/1/cwd", "/dev/fd/3/../..", "/..", ""];
    for lab in [Lab::start().await, as_nobody().await] {
        for way in ways {
            for name in ["authorized_keys", "cron.d/evil", "new/deep/file"] {
                let name = format!("{way}{path}/{name}");
                lab.run(seeing(&[(MOUNT, "")], &[&name])).await;
                lab.run(seeing(&[(MOUNT, ""), (&name, "")], &[])).await;
                lab.run(in_directory(seeing(&[(MOUNT, "")], &[]), &name)).await;
            }
        }
        assert_eq!(snapshot(victim.path()), before);
    }
}

// Guard: `places::check`.
#[tokio::test]
async fn nothing_is_mounted_over_what_a_view_shows() {
    let lab = as_nobody().await;
    lab.write("cat", "#!/bin/sh\necho another program\n");
    fs::set_permissions(lab.store.path().join("cat"), fs::Permissions::from_mode(0o755)).unwrap();
    for path in [
        "/usr/local/sbin",
        "/usr/bin",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/locale",
        "/bin",
        "/lib64",
        "/etc",
        "/etc/alternatives",
        "/etc/ld.so.conf.d",
        "/dev/shm",
        "/proc/x",
        "/sys/x",
        "/boot",
        "/opt/x",
        "/tmp",
        "/var",
        "/var/tmp",
        "/",
    ] {
        let outcome = lab.run(seeing(&[(MOUNT, ""), (path, "")], &[])).await;
        assert_eq!(outcome.refusal().kind(), Kind::NoNamespace, "{path}");
    }
    let twice = lab.run(seeing(&[(MOUNT, ""), (MOUNT, "")], &[])).await;
    assert_eq!(twice.refusal().kind(), Kind::Protocol);
}

// Guard: `places::check_file`, and O_EXCL of `Root::make_file`.
#[tokio::test]
async fn no_client_file_lies_where_the_view_shows_something_else() {
    let lab = as_nobody().await;
    for path in ["/dev/null", "/dev/new", "/proc/self/comm", "/sys/x", "/etc/passwd", "/etc/ld.so.preload", "/boot/x"] {
        let outcome = lab.run(seeing(&[(MOUNT, "")], &[path])).await;
        assert_eq!(outcome.refusal().kind(), Kind::NotAllowed, "{path}");
    }
    // A file where a directory of another file is, and the other way round.
    for files in [["/home/u/x", "/home/u/x/y"], ["/home/u/x/y", "/home/u/x"]] {
        let outcome = lab.run(seeing(&[(MOUNT, "")], &files)).await;
        assert_eq!(outcome.refusal().kind(), Kind::NoNamespace, "{files:?}");
    }
}

// Guard: the mask of `Root::write_file`.
#[tokio::test]
async fn a_client_file_gives_no_rights() {
    let lab = as_nobody().await;
    let mut spec = seeing(&[(MOUNT, "")], &["/home/u/.gitconfig"]);
    spec.stages[0].argv = ["stat", "-c", "%a %U", "/home/u/.gitconfig"].map(Into::into).to_vec();
    spec.stages[0].program = "stat".into();
    assert_eq!(lab.run(spec).await.text(), format!("777 {NOBODY}\n"));
}

// Guard: the rights of the view's user in `open_export`.
#[tokio::test]
async fn a_sub_path_is_walked_with_the_users_rights() {
    let lab = as_nobody().await;
    let store = lab.store.path();
    fs::create_dir_all(store.join("private/sub")).unwrap();
    fs::write(store.join("private/sub/f"), "another user's\n").unwrap();
    fs::set_permissions(store.join("private"), fs::Permissions::from_mode(0o700)).unwrap();
    chown(store.join("private"), Some(5), Some(60)).unwrap();
    symlink("private/sub", store.join("link")).unwrap();
    symlink("/etc", store.join("out")).unwrap();
    for sub_path in ["private/sub", "private", "link", "out", "..", "../..", "/etc", "private/sub/../../.."] {
        let outcome = lab.run(in_directory(seeing(&[(MOUNT, sub_path)], &[]), MOUNT)).await;
        // `private` itself can be opened, and nothing in it.
        if sub_path == "private" {
            let mut spec = in_directory(seeing(&[(MOUNT, sub_path)], &[]), "/");
            spec.stages[0].argv = vec!["cat".into(), format!("{MOUNT}/sub/f").into()];
            let outcome = lab.run(spec).await;
            assert!(outcome.out.is_empty(), "{outcome:?}");
            continue;
        }
        assert_eq!(outcome.refusal().kind(), Kind::UnknownExport, "{sub_path}");
    }
}

// Guard: the rights of the view's user in `Root::mount_inside`.
#[tokio::test]
async fn a_mount_inside_a_mount_is_found_with_the_users_rights_and_never_made() {
    let lab = as_nobody().await;
    let store = lab.store.path();
    fs::create_dir_all(store.join("private/sub")).unwrap();
    fs::create_dir_all(store.join("open/sub")).unwrap();
    fs::set_permissions(store.join("private"), fs::Permissions::from_mode(0o700)).unwrap();
    symlink("open", store.join("link")).unwrap();
    let before = snapshot(store);
    for (below, is_there) in
        [("open/sub", true), ("private/sub", false), ("link/sub", false), ("new", false), ("open/new/deep", false)]
    {
        let inner = format!("{MOUNT}/{below}");
        let outcome = lab.run(seeing(&[(MOUNT, ""), (&inner, "open")], &[])).await;
        match is_there {
            true => assert!(outcome.is_finished, "{outcome:?}"),
            false => assert_eq!(outcome.refusal().kind(), Kind::NoNamespace, "{below}"),
        }
    }
    assert_eq!(snapshot(store), before);
}

// Guard: MOUNT_ATTR_NOEXEC in `build::take_export`.
#[tokio::test]
async fn programs_of_an_export_start_only_where_the_administrator_says_so() {
    for exec in [false, true] {
        let lab = Lab::with(|config| config.exports[0].exec = exec).await;
        let outcome = lab.run(in_directory(pipeline(&["cat /proc/self/mounts"]), "/")).await.text();
        let line = outcome.lines().find(|line| line.contains(MOUNT)).unwrap();
        assert_eq!(line.contains("noexec"), !exec, "{line}");
        assert!(line.contains("nosuid") && line.contains("nodev"), "{line}");
    }
}

/// An executor of its own process, in a mount namespace with devices of its own.
struct OwnDevices {
    process: Child,
    address: SocketAddr,
    _directory: TempDir,
    store: TempDir,
}

impl OwnDevices {
    fn start() -> Self {
        let (directory, store) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let configuration = directory.path().join("executor.toml");
        let text = format!(
            "listen = \"127.0.0.1:0\"\n[[export]]\nname = \"logs\"\npath = \"{}\"\n\
             [confinement]\ncommands = [\"*\"]\nuser = \"root\"\n",
            store.path().display()
        );
        fs::write(&configuration, text).unwrap();
        fs::create_dir(directory.path().join("dev")).unwrap();
        let mut process = Command::new("unshare")
            .args(["-m", "sh", "-c", WITH_OWN_DEVICES, "sh"])
            .arg(directory.path().join("dev"))
            .arg(env!("CARGO_BIN_EXE_posh-executor"))
            .arg("--config")
            .arg(&configuration)
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(process.stderr.take().unwrap()).lines();
        let address = said.find_map(|line| line.unwrap().rsplit_once("listening on ")?.1.trim().parse().ok());
        std::thread::spawn(move || said.count());
        Self { process, address: address.expect("the executor listens"), _directory: directory, store }
    }

    fn devices(&self) -> Vec<String> {
        let device = |name: &str| {
            let status = fs::metadata(format!("/proc/{}/root/dev/{name}", self.process.id())).unwrap();
            let (changed, modified) = ((status.ctime(), status.ctime_nsec()), status.mtime());
            format!("{name} {:o} {}:{} {changed:?} {modified}", status.mode(), status.uid(), status.gid())
        };
        ["null", "zero", "full", "random", "urandom", "tty"].map(device).to_vec()
    }
}

impl Drop for OwnDevices {
    fn drop(&mut self) {
        let _ = kill(nix::unistd::Pid::from_raw(self.process.id().cast_signed()), Signal::SIGTERM);
        let _ = self.process.wait();
    }
}

// Guard: `system::DEVICE` is read-only; `places::check_file`.
#[tokio::test]
async fn the_machines_devices_stay_as_they_are() {
    let lab = OwnDevices::start();
    let client = connect(lab.address).await;
    let before = lab.devices();
    let script = "for d in null zero full random urandom tty; do \
        chmod 0 /dev/$d; chown 5 /dev/$d; [ $d = tty ] || touch -d @1 /dev/$d; done; echo x > /dev/null && echo written";
    let outcome = run(&client, command(&["sh", "-c", script]), bytes::Bytes::new()).await;
    assert_eq!(outcome.text(), "written\n", "{}", outcome.errors());
    assert_eq!(outcome.errors().matches("Read-only file system").count(), 17, "{}", outcome.errors());
    for path in ["/dev/null", "/dev/urandom"] {
        run(&client, seeing(&[(MOUNT, "")], &[path]), bytes::Bytes::new()).await.refusal();
    }
    assert_eq!(lab.devices(), before);
    assert!(lab.store.path().exists());
}

// Guard: what a view shows of the server is read-only, for root too.
#[tokio::test]
async fn roots_commands_change_nothing_of_the_servers() {
    let lab = Lab::start().await;
    let before = fs::metadata("/etc/passwd").unwrap();
    let script = "for f in /etc/passwd /usr/bin/cat /bin/sh /proc/version /etc /usr /dev; do \
        chmod 777 $f; chown 5 $f; touch $f; mv $f $f.old; done 2>/dev/null; echo x 2>/dev/null > /etc/passwd; id -u";
    assert_eq!(lab.run(command(&["sh", "-c", script])).await.text(), "0\n");
    let after = fs::metadata("/etc/passwd").unwrap();
    assert_eq!((before.mode(), before.ctime(), before.len()), (after.mode(), after.ctime(), after.len()));
}
