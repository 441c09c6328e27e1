//! The table and the adapters against real mounts: bind mounts, a stack, sshfs.
//! Needs root and /dev/fuse. Each test runs again in namespaces of its own
//! (mounts, processes, network), so that whatever it starts or mounts ends with
//! it, however it ends.

use fs_mapper::coherence::{Adapter, Change};
use fs_mapper::config::Config;
use fs_mapper::mountinfo::{MountInfo, MountSnapshot};
use fs_mapper::{ClientPath, MountTable, Resolution};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Set in the second run, which is the one inside of the namespaces.
const INSIDE: &str = "FS_MAPPER_TEST_INSIDE";

fn in_own_namespaces(test: &str, body: impl FnOnce(&Path)) {
    if std::env::var_os(INSIDE).is_some() {
        body(Path::new("/run"));
        return;
    }
    let namespaces = [
        "--mount",
        "--propagation",
        "private",
        "--net",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ];
    // Everything that a test makes is below /run, which is its own.
    let script = "mount -t tmpfs tmpfs /run && ip link set lo up && exec \"$0\" \"$@\"";
    let output = Command::new("unshare")
        .args(namespaces)
        .args(["--", "sh", "-c", script])
        .arg(std::env::current_exe().expect("this program"))
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .expect("unshare");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

fn run(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().expect(program);
    assert!(
        output.status.success(),
        "{program} {args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

fn text(path: &Path) -> &str {
    path.to_str().expect("ASCII")
}

fn table(mounts: &str) -> MountTable {
    let executor = "[[executor]]\nname='s1'\naddress='http://127.0.0.1:7400'\n";
    let config = Config::parse(&format!("{executor}{mounts}"), Path::new("mounts.toml"))
        .expect("a configuration");
    MountTable::new(&config, &MountInfo::read().expect("mountinfo"))
}

fn mount(path: &Path, export: &str) -> String {
    format!("[[mount]]\npath='{}'\nexecutor='s1'\nexport='{export}'\n", path.display())
}

/// `export:/path` of an owned path, or nothing.
fn owned(table: &MountTable, path: &Path) -> Option<String> {
    match table.resolve(path, Path::new("/")) {
        Resolution::Owned(owned) => Some(owned.export_path.to_string()),
        Resolution::Local { .. } => None,
    }
}

#[test]
fn each_change_of_the_mounts_is_noticed_and_stays_so() {
    in_own_namespaces("each_change_of_the_mounts_is_noticed_and_stays_so", |top| {
        let (before, _) = MountSnapshot::take().expect("mountinfo");
        assert!(!before.has_changed());
        let place = top.join("place");
        fs::create_dir(&place).expect("made");
        run("mount", &["-t", "tmpfs", "none", text(&place)]);
        assert!(before.has_changed() && before.has_changed());
        let (after, _) = MountSnapshot::take().expect("mountinfo");
        assert!(!after.has_changed());
        run("umount", &[text(&place)]);
        assert!(after.has_changed());
        // The list is as it was.
        let (between, _) = MountSnapshot::take().expect("mountinfo");
        run("mount", &["-t", "tmpfs", "none", text(&place)]);
        run("umount", &[text(&place)]);
        assert!(between.has_changed() && between.has_changed());
        // Without an event of poll(2).
        fs::create_dir_all(top.join("above/place")).expect("made");
        run("mount", &["-t", "tmpfs", "none", text(&top.join("above/place"))]);
        let (elsewhere, _) = MountSnapshot::take().expect("mountinfo");
        fs::rename(top.join("above"), top.join("renamed")).expect("renamed");
        assert!(elsewhere.has_changed() && elsewhere.has_changed());
    });
}

#[test]
fn bind_mounts_stacks_and_boundaries() {
    in_own_namespaces("bind_mounts_stacks_and_boundaries", |base| {
        for dir in ["store/logs/sub", "mnt/logs", "srv/a b", "other"] {
            fs::create_dir_all(base.join(dir)).expect("a directory");
        }
        let (store, logs, blank) =
            (base.join("store/logs"), base.join("mnt/logs"), base.join("srv/a b"));
        std::os::unix::fs::symlink("mnt/logs", base.join("link")).expect("a link");
        let config = mount(&base.join("link"), "logs");
        assert_eq!(owned(&table(&config), &logs.join("f")), None, "nothing is mounted yet");

        run("mount", &["--bind", text(&store), text(&logs)]);
        run("mount", &["--bind", text(&logs.join("sub")), text(&blank)]);
        let bound = table(&config);
        assert_eq!(owned(&bound, &logs.join("f")).as_deref(), Some("logs:/f"));
        assert_eq!(owned(&bound, &base.join("link/f")).as_deref(), Some("logs:/f"));
        assert_eq!(owned(&bound, &blank.join("f")).as_deref(), Some("logs:/sub/f"));
        assert_eq!(owned(&bound, &store.join("f")), None, "the same file by another path is local");
        assert!(bound.prefixes().may_touch(b"--file=link/f", base));

        run("mount", &["-t", "tmpfs", "tmpfs", text(&logs.join("sub"))]);
        let with_boundary = table(&config);
        assert_eq!(owned(&with_boundary, &logs.join("sub/f")), None);
        assert_eq!(owned(&with_boundary, &logs.join("f")).as_deref(), Some("logs:/f"));
        let nested = with_boundary.nested(&ClientPath::new(&logs).expect("absolute"));
        assert_eq!(
            nested.iter().map(|mount| mount.fs_type.as_str()).collect::<Vec<_>>(),
            ["tmpfs"]
        );

        run("mount", &["-t", "tmpfs", "tmpfs", text(&base.join("mnt"))]);
        let hidden = table(&config);
        assert_eq!(owned(&hidden, &logs.join("f")), None, "another mount hides it");
        let states: Vec<bool> =
            hidden.mounts().filter(|mount| mount.owner.is_some()).map(|m| m.mounted()).collect();
        assert_eq!(states, [false]);
    });
}

/// A server directory and where sshfs shows it, with caches that live for an
/// hour: what the adapter does not refresh stays stale.
struct Sshfs {
    server: PathBuf,
    mount: PathBuf,
    sshd: Child,
}

impl Drop for Sshfs {
    fn drop(&mut self) {
        let _ended_already = self.sshd.kill();
        let _status = self.sshd.wait();
    }
}

fn sshfs(base: &Path) -> Sshfs {
    let made = |name: &str| {
        let dir = base.join(name);
        fs::create_dir_all(&dir).expect("a directory");
        dir
    };
    let (server, mount, keys) = (made("server"), made("mnt"), made("keys"));
    made("sshd");
    for key in ["host", "user"] {
        run("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-f", text(&keys.join(key))]);
    }
    let keys = text(&keys);
    let options = [
        "ListenAddress=127.0.0.1:22".to_owned(),
        format!("HostKey={keys}/host"),
        format!("AuthorizedKeysFile={keys}/user.pub"),
        "StrictModes=no".to_owned(),
        "UsePAM=no".to_owned(),
        "PermitRootLogin=yes".to_owned(),
        "Subsystem=sftp internal-sftp".to_owned(),
    ];
    let mut sshd = Command::new("/usr/sbin/sshd");
    sshd.args(["-D", "-e", "-f", "/dev/null"])
        .args(options.iter().flat_map(|option| ["-o", option]));
    let mut sshd = sshd.stderr(Stdio::piped()).spawn().expect("sshd");
    let mut log = BufReader::new(sshd.stderr.take().expect("a pipe"))
        .lines()
        .map(|line| line.expect("a line"));
    let listening = log.by_ref().find(|line| line.contains("Server listening"));
    assert!(listening.is_some(), "sshd ended early");
    std::thread::spawn(move || log.for_each(drop));
    let options = format!(
        "IdentityFile={keys}/user,StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null,\
         dcache_timeout=3600,entry_timeout=3600,attr_timeout=3600"
    );
    let source = format!("root@127.0.0.1:{}", server.display());
    run("sshfs", &["-F", "/dev/null", "-o", &options, &source, text(&mount)]);
    Sshfs { server, mount, sshd }
}

fn size(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|found| found.len())
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("a directory");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("ASCII"))
        .collect();
    names.sort();
    names
}

#[test]
fn sshfs_is_settled_and_refreshed() {
    in_own_namespaces("sshfs_is_settled_and_refreshed", |base| {
        let lab = sshfs(base);
        let (server, path) = (lab.server.clone(), lab.mount.clone());
        let table = table(&mount(&path, "data"));
        let mount = table.mounts().find(|mount| mount.owner.is_some()).expect("the mount");
        assert_eq!((mount.fs_type.as_str(), mount.mounted()), ("fuse.sshfs", true));
        let (coherence, on) = (mount.coherence(), mount.open_root().expect("the mount"));
        let written = |name: &str| {
            coherence.refresh(&on, &Change::FileWritten(path.join(name))).expect("a refresh")
        };

        // Written through a descriptor that is still open.
        let mut file = File::create(path.join("open")).expect("a file");
        file.write_all(b"hello").expect("written");
        coherence.settle(&path.join("open")).expect("settled");
        assert_eq!(fs::read(server.join("open")).expect("the file"), b"hello");

        // Grown on the server: the stale size first, so that the test shows something.
        File::create(path.join("grown")).expect("a file");
        assert_eq!(size(&path.join("grown")), Some(0));
        fs::write(server.join("grown"), "longer").expect("written");
        assert_eq!(fs::read(path.join("grown")).expect("the file"), b"");
        written("grown");
        assert_eq!(size(&path.join("grown")), Some(6));
        assert_eq!(fs::read(path.join("grown")).expect("the file"), b"longer");

        // Other content of the same size, and another mode, which must not be put back.
        fs::write(path.join("mode"), "aaaa").expect("written");
        assert_eq!(fs::read(path.join("mode")).expect("the file"), b"aaaa");
        fs::write(server.join("mode"), "bbbb").expect("written");
        fs::set_permissions(server.join("mode"), fs::Permissions::from_mode(0o600))
            .expect("a mode");
        written("mode");
        assert_eq!(fs::read(path.join("mode")).expect("the file"), b"bbbb");
        assert_eq!(
            fs::metadata(path.join("mode")).expect("the file").permissions().mode() & 0o777,
            0o600
        );
        assert_eq!(
            fs::metadata(server.join("mode")).expect("the file").permissions().mode() & 0o777,
            0o600
        );
    });
}

#[test]
fn sshfs_names_are_refreshed() {
    in_own_namespaces("sshfs_names_are_refreshed", |base| {
        let lab = sshfs(base);
        let (server, path) = (lab.server.clone(), lab.mount.clone());
        let table = table(&mount(&path, "data"));
        let on = table.mounts().find(|mount| mount.owner.is_some()).expect("the mount").open_root();
        let owners = [(path.join("dir"), fs::metadata(&server).expect("it").uid())].into();
        let (coherence, on) = (Adapter::of("fuse.sshfs").coherence(), on.expect("opened"));
        let on = on.with_owners(owners);
        let refresh = |change: Change| coherence.refresh(&on, &change).expect("a refresh");
        fs::create_dir(path.join("dir")).expect("a directory");
        fs::write(path.join("dir/gone"), "x").expect("written");
        assert_eq!(names(&path.join("dir")), ["gone"]);
        assert_eq!(size(&path.join("dir/gone")), Some(1));

        fs::remove_file(server.join("dir/gone")).expect("removed");
        fs::write(server.join("dir/new"), "x").expect("written");
        fs::set_permissions(server.join("dir"), fs::Permissions::from_mode(0o700)).expect("a mode");
        assert_eq!(names(&path.join("dir")), ["gone"], "stale, or this test shows nothing");
        refresh(Change::EntriesChanged(path.join("dir")));
        assert_eq!(names(&path.join("dir")), ["new"]);
        assert_eq!(
            fs::metadata(server.join("dir")).expect("it").permissions().mode() & 0o777,
            0o700
        );

        assert_eq!(size(&path.join("dir/gone")), Some(1), "stale, or this test shows nothing");
        refresh(Change::FileWritten(path.join("dir/gone")));
        assert_eq!(size(&path.join("dir/gone")), None);
        assert_eq!(names(&server.join("dir")), ["new"], "nothing was made on the server");

        refresh(Change::EntriesChanged(path.join("absent")));
    });
}
