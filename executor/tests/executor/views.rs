//! Names that a client chooses: mount points, client files, sub-paths and working directories. None
//! of them changes or reaches files of the server outside of its exports. Each test names the guard
//! that it fails without.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink},
    path::{Path, PathBuf},
    process::{Child, ChildStderr, Command, Stdio},
};

use bytes::Bytes;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use posh_proto::executor::{ClientFile, PathUse, RunSpec, rejected::Kind};
use tempfile::TempDir;

use crate::harness::*;

/// An account with no rights of its own, and one unrelated to it.
const NOBODY: u32 = 65534;
const ANOTHER: u32 = 4711;

/// Stands for the executor's own content in a victim's tree.
const OWN: &str = "of the server\n";

/// The ways in which an executor has rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Root,
    RootForNobody,
    ReadOnly,
    Ordinary,
}

const WAYS: [Way; 4] = [Way::Root, Way::RootForNobody, Way::ReadOnly, Way::Ordinary];

/// An executor as a program, with a /dev of its own and a tree that nobody may change.
struct Server {
    child: Child,
    client: Client,
    top: TempDir,
    _devices: TempDir,
    _log: BufReader<ChildStderr>,
}

impl Server {
    /// Runs a script of its administrator, with one argument, among its mounts.
    fn administer(&self, script: &str, argument: &Path) {
        let mut command = Command::new("nsenter");
        command.arg("--target").arg(self.child.id().to_string());
        command.args(["--mount", "sh", "-ec", script, "sh"]).arg(argument);
        assert!(command.status().unwrap().success(), "{script}");
    }

    async fn start(way: Way) -> Self {
        Self::with(way, "").await
    }

    /// `more` is appended to the export's table.
    async fn with(way: Way, more: &str) -> Self {
        let (top, devices) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        fs::set_permissions(top.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let at = |name: &str| top.path().join(name);
        for directory in ["export/sub/deep", "victim/d"] {
            fs::create_dir_all(at(directory)).unwrap();
        }
        for file in ["victim/f", "victim/d/f", "export/f", "export/sub/f"] {
            fs::write(at(file), OWN).unwrap();
        }
        symlink(at("victim"), at("export/to-victim")).unwrap();
        symlink("sub", at("export/to-sub")).unwrap();
        symlink("/proc/1/root", at("export/to-root")).unwrap();
        let owner = if way == Way::Ordinary || way == Way::RootForNobody { NOBODY } else { 0 };
        for path in ["export", "export/sub", "export/sub/deep", "export/f", "export/sub/f"] {
            chown(at(path), Some(owner), Some(owner)).unwrap();
        }
        let user = match way {
            Way::RootForNobody => "[confinement]\nuser = \"nobody\"\n",
            Way::Root | Way::ReadOnly => "[confinement]\nuser = \"root\"\n",
            Way::Ordinary => "[confinement]\n",
        };
        let read_only = way == Way::ReadOnly;
        let configuration = format!(
            "listen = \"127.0.0.1:0\"\n{user}commands = [\"*\"]\nrequire = \"namespaces\"\n[[export]]\nname = \"logs\"\npath = {:?}\nread_only = {read_only}\n{more}\n",
            at("export")
        );
        fs::write(at("executor.toml"), configuration).unwrap();
        let program = at("posh-executor");
        fs::copy(env!("CARGO_BIN_EXE_posh-executor"), &program).unwrap();
        let mut child = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-ec", PRIVATE_DEVICES, "sh"])
            .arg(devices.path())
            .arg(if way == Way::Ordinary {
                format!("setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups")
            } else {
                String::new()
            })
            .arg(&program)
            .arg(at("executor.toml"))
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        let address = loop {
            let start = said.len();
            assert!(log.read_line(&mut said).unwrap() > 0, "{way:?}: {said}");
            if let Some((_, rest)) = said[start..].split_once("listening on ") {
                break rest.split_whitespace().next().unwrap().parse().unwrap();
            }
        };
        let client = connect(address).await;
        Self { child, client, top, _devices: devices, _log: log }
    }

    async fn run(&self, spec: RunSpec) -> Outcome {
        run(&self.client, spec, Bytes::new()).await
    }

    fn victim(&self) -> PathBuf {
        self.top.path().join("victim")
    }

    /// Everything outside of the export, device nodes, and the executor's own mount namespace.
    fn snapshot(&self) -> BTreeMap<PathBuf, String> {
        let mut found = BTreeMap::new();
        let devices = PathBuf::from(format!("/proc/{}/root/dev", self.child.id()));
        for top in [self.victim(), devices] {
            look_at(&top, &mut found);
        }
        for path in [
            "/.old",
            "/.posh-cover",
            "/posh-test-views",
            "/etc/ld.so.preload",
            "/etc/posh-test-views",
        ] {
            if let Ok(about) = fs::symlink_metadata(path) {
                found.insert(path.into(), state_of(Path::new(path), &about));
            }
        }
        for path in [
            "/",
            "/etc",
            "/etc/passwd",
            "/usr",
            "/usr/local",
            "/usr/local/sbin",
            "/usr/bin",
            "/var",
            "/home",
        ] {
            // Not their times: other tests of this machine may change these directories.
            let about = fs::symlink_metadata(path).unwrap();
            found.insert(
                path.into(),
                format!("{} {} {} {}", about.ino(), about.uid(), about.gid(), about.mode()),
            );
        }
        found
    }
}

/// The directory to which a link in the server's /usr/local/bin leads.
const LINKED: &str = "/home/posh-test-views";

/// Puts nodes and links of its own over /dev, a link over /usr/local/bin, and becomes the executor
/// ($2 is how, word by word).
const PRIVATE_DEVICES: &str = r#"
mount -t tmpfs dev "$1"
mknod -m 666 "$1/null" c 1 3
mknod -m 666 "$1/zero" c 1 5
mknod -m 666 "$1/full" c 1 7
mknod -m 666 "$1/random" c 1 8
mknod -m 666 "$1/urandom" c 1 9
mknod -m 666 "$1/tty" c 5 0
ln -s /proc/self/fd "$1/fd"
mkdir -m 1777 "$1/shm"
mount -t tmpfs bin /usr/local/bin
ln -s /home/posh-test-views/posh-test-linked /usr/local/bin/
mount --bind "$1" /dev
exec $2 "$3" --config "$4"
"#;

impl Drop for Server {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

fn state_of(path: &Path, about: &fs::Metadata) -> String {
    let content = if about.is_file() && about.len() < 4096 {
        fs::read(path).unwrap_or_default()
    } else {
        Vec::new()
    };
    let times = (about.mtime(), about.mtime_nsec(), about.ctime(), about.ctime_nsec());
    let owner = (about.uid(), about.gid(), about.mode(), about.nlink(), about.rdev());
    format!("{} {owner:?} {times:?} {content:?}", about.ino())
}

fn look_at(path: &Path, found: &mut BTreeMap<PathBuf, String>) {
    let about = fs::symlink_metadata(path).unwrap();
    found.insert(path.to_owned(), state_of(path, &about));
    if about.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            look_at(&entry.unwrap().path(), found);
        }
    }
}

fn client_file(path: &str, mode: u32) -> ClientFile {
    ClientFile { path: path.to_owned().into(), content: "of the client\n".into(), mode }
}

fn with_mount(mut spec: RunSpec, path: &str, sub_path: &str) -> RunSpec {
    spec.mounts.push(mount(path, "logs", sub_path));
    spec
}

/// Places that are the server's, or no places at all; VICTIM is a directory of the server's.
const HOSTILE: [&str; 40] = [
    "/",
    "//x",
    "/a/../etc/x",
    "/a/./x",
    "/mnt/x/",
    "/mnt/x\n",
    "relative",
    "",
    "/dev",
    "/dev/null",
    "/dev/x",
    "/dev/shm/x",
    "/dev/fd/3",
    "/proc",
    "/proc/x",
    "/proc/self/fd/3",
    "/proc/1/root/x",
    "/sys",
    "/sys/x",
    "/sys/devices/system/cpu",
    "/boot/x",
    "/bin",
    "/bin/cat",
    "/sbin/x",
    "/lib/x",
    "/lib64/x",
    "/usr",
    "/usr/local",
    "/usr/local/sbin",
    "/usr/bin/cat",
    "/opt/x",
    "/nix/x",
    "/gnu/x",
    "/snap/x",
    "/etc",
    "/etc/x",
    "/etc/passwd",
    "/etc/ld.so.preload",
    "/tmp",
    "/var",
];

// Guards: places::check_all, in the executor's own process and in the runner's.
#[tokio::test]
async fn hostile_places_change_nothing_on_the_server() {
    for way in WAYS {
        let server = Server::start(way).await;
        let before = server.snapshot();
        // The decision is the same for all, and each costs as much.
        let step = if way == Way::RootForNobody { 1 } else { 4 };
        for path in HOSTILE.into_iter().step_by(step) {
            let outcome = server.run(with_mount(pipeline(&["true"]), path, "")).await;
            assert!(
                matches!(outcome.refusal().kind(), Kind::NoNamespace | Kind::Protocol),
                "{way:?} mount {path:?}"
            );
            let mut spec = pipeline(&["true"]);
            spec.client_files = vec![client_file(path, 0o644)];
            assert_eq!(
                server.run(spec).await.refusal().kind(),
                Kind::NotAllowed,
                "{way:?} file {path:?}"
            );
        }
        assert_eq!(server.snapshot(), before, "{way:?}");
    }
}

// Guards: root::Root::enter (the server's root has left), root::Root::bare.
#[tokio::test]
async fn places_by_the_names_of_the_servers_tree_lie_on_the_views_own() {
    for way in WAYS {
        let server = Server::start(way).await;
        let before = server.snapshot();
        let victim = server.victim();
        let victim = victim.to_str().unwrap();
        for path in [
            format!("/.old{victim}"),
            format!("/.old{victim}/f"),
            format!("/.old{victim}/new/x"),
            "/.old/etc/posh-test-views".to_owned(),
            "/.posh-cover".to_owned(),
            "/posh-test-views/x".to_owned(),
            format!("{victim}/new"),
            format!("{victim}/f/x"),
        ] {
            let mut spec = command(&["sh", "-c", &format!("cat '{path}'; ls -d '{path}'")]);
            spec.client_files = vec![client_file(&path, 0o4755)];
            let outcome = server.run(spec).await;
            assert_eq!(
                outcome.text(),
                format!("of the client\n{path}\n"),
                "{way:?} {path}: {outcome:?}"
            );
            let spec = with_mount(command(&["cat", &format!("{path}/f")]), &path, "");
            assert_eq!(server.run(spec).await.text(), OWN, "{way:?} {path}");
            let mut spec = pipeline(&["pwd"]);
            spec.stages[0].cwd = format!("{path}/made").into();
            let _ = server.run(spec).await;
        }
        assert_eq!(server.snapshot(), before, "{way:?}");
        let here = fs::read_dir(server.victim()).unwrap().count();
        assert_eq!(here, 2, "{way:?}: the victim's own entries");
    }
}

// Guard: root::FILE_MODE.
#[tokio::test]
async fn a_client_file_gives_nobodys_rights() {
    let server = Server::start(Way::Root).await;
    let mut spec = command(&["stat", "-c", "%a %U", "/home/u/f"]);
    spec.client_files = vec![client_file("/home/u/f", 0o7755)];
    assert_eq!(server.run(spec).await.text(), "755 root\n");
}

// Guards: root::Root::find_as, RESOLVE_NO_SYMLINKS; a mount point in an export is looked up, never
// made.
#[tokio::test]
async fn mount_points_in_exports_are_only_looked_up() {
    for way in WAYS {
        let server = Server::start(way).await;
        let hidden = server.top.path().join("export/hidden");
        fs::create_dir_all(hidden.join("inner")).unwrap();
        fs::set_permissions(&hidden, fs::Permissions::from_mode(0o700)).unwrap();
        chown(&hidden, Some(ANOTHER), Some(ANOTHER)).unwrap();
        let before = server.snapshot();
        for (below, is_allowed) in [
            ("sub", true),
            ("sub/deep", true),
            ("missing", false),
            ("missing/x", false),
            ("f", false),
            ("to-sub", false),
            ("to-sub/deep", false),
            ("to-victim", false),
            ("to-victim/d", false),
            ("to-root/etc", false),
            // As far as the caller can see.
            ("hidden/inner", matches!(way, Way::Root | Way::ReadOnly)),
        ] {
            let point = format!("{MOUNT}/{below}");
            let spec = with_mount(command(&["cat", &format!("{point}/f")]), &point, "");
            let outcome = server.run(spec).await;
            match is_allowed {
                true => assert_eq!(outcome.text(), OWN, "{way:?} {below}: {outcome:?}"),
                false => assert_eq!(outcome.refusal().kind(), Kind::NoNamespace, "{way:?} {below}"),
            }
        }
        assert_eq!(server.snapshot(), before, "{way:?}");
        assert!(!server.top.path().join("export/missing").exists());
    }
}

// Guards: places::check_all for places that cover another one of the client's.
#[tokio::test]
async fn places_of_one_view_do_not_cover_each_other() {
    let lab = Lab::start().await;
    lab.write("f", OWN);
    let refused = |spec: RunSpec| async { lab.run(spec).await.refusal().kind() };
    assert_eq!(refused(with_mount(pipeline(&["true"]), MOUNT, "")).await, Kind::Protocol);
    let above = MOUNT.rsplit_once('/').unwrap().0;
    for files in
        [&[MOUNT][..], &[above], &["/mnt"], &["/home/f", "/home/f"], &["/home/f", "/home/f/g"]]
    {
        let mut spec = pipeline(&["true"]);
        spec.client_files = files.iter().map(|path| client_file(path, 0o644)).collect();
        assert_eq!(refused(spec).await, Kind::NoNamespace, "{files:?}");
    }
    let mut spec = with_mount(pipeline(&["true"]), "/home/u/x", "");
    spec.client_files = vec![client_file("/home/u", 0o644)];
    assert_eq!(refused(spec).await, Kind::NoNamespace);
}

// Guard: sys::ActingAs, in view::open_export; RESOLVE_BENEATH.
#[tokio::test]
async fn a_sub_path_needs_the_callers_rights_on_the_way() {
    for way in WAYS {
        let server = Server::start(way).await;
        let export = server.top.path().join("export");
        fs::create_dir_all(export.join("private/shared")).unwrap();
        fs::write(export.join("private/shared/f"), OWN).unwrap();
        fs::set_permissions(export.join("private/shared"), fs::Permissions::from_mode(0o777))
            .unwrap();
        chown(export.join("private"), Some(ANOTHER), Some(ANOTHER)).unwrap();
        fs::set_permissions(export.join("private"), fs::Permissions::from_mode(0o700)).unwrap();
        let before = server.snapshot();
        let read = |sub_path: &str| {
            let mut spec = pipeline(&["cat f"]);
            spec.mounts = vec![mount(MOUNT, "logs", sub_path)];
            server.run(spec)
        };
        let others_are_seen = matches!(way, Way::Root | Way::ReadOnly);
        for (sub_path, is_allowed) in [
            ("sub", true),
            ("to-sub", true),
            ("private/shared", others_are_seen),
            ("private/../private/shared", false),
            ("..", false),
            ("sub/../..", false),
            ("sub/../sub", false),
            ("/etc", false),
            ("to-victim", false),
            ("to-root", false),
            ("f", false),
            ("missing", false),
        ] {
            let outcome = read(sub_path).await;
            match is_allowed {
                true => assert_eq!(outcome.text(), OWN, "{way:?} {sub_path}"),
                false => {
                    assert_eq!(outcome.refusal().kind(), Kind::UnknownExport, "{way:?} {sub_path}")
                }
            }
        }
        if way == Way::RootForNobody {
            // A view that stands does not keep the right.
            fs::set_permissions(export.join("private"), fs::Permissions::from_mode(0o711)).unwrap();
            assert_eq!(read("private/shared").await.text(), OWN);
            fs::set_permissions(export.join("private"), fs::Permissions::from_mode(0o700)).unwrap();
            assert_eq!(read("private/shared").await.refusal().kind(), Kind::UnknownExport);
        }
        assert_eq!(server.snapshot(), before, "{way:?}");
    }
}

// Guards: places::RESERVED; MOUNT_ATTR_NOEXEC, tools::find.
#[tokio::test]
async fn an_export_brings_no_programs() {
    let server = Server::start(Way::RootForNobody).await;
    let export = server.top.path().join("export");
    fs::create_dir(export.join("bin")).unwrap();
    for name in ["cat", "posh-test-own-program"] {
        fs::write(export.join("bin").join(name), "#!/bin/sh\necho started\n").unwrap();
        fs::set_permissions(export.join("bin").join(name), fs::Permissions::from_mode(0o755))
            .unwrap();
    }
    for path in tools_path().chain([
        "/usr/lib".into(),
        "/lib".into(),
        "/opt/x".into(),
        "/etc/alternatives".into(),
    ]) {
        let outcome = server.run(with_mount(pipeline(&["cat f"]), &path, "bin")).await;
        assert_eq!(outcome.refusal().kind(), Kind::NoNamespace, "{path}");
    }
    let own = format!("{MOUNT}/bin/cat");
    let script =
        format!("{own}; test -x {own} || echo no program; /lib64/ld-linux-x86-64.so.2 {own}");
    let outcome = server.run(command(&["sh", "-c", &script])).await;
    assert!(!outcome.text().contains("started"), "{outcome:?}");
    assert!(
        outcome.text().contains("no program") && outcome.errors().contains("Permission denied"),
        "{outcome:?}"
    );
}

// Guard: paths::is_unreadable_program. access(2) says of programs on a noexec mount that they are
// none.
#[tokio::test]
async fn a_program_that_can_not_be_read_is_looked_at_on_the_workstation() {
    for more in ["", "exec = true"] {
        let server = Server::with(Way::RootForNobody, more).await;
        let program = server.top.path().join("export/program");
        fs::write(&program, "#!/bin/sh\n").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o711)).unwrap();
        let local = "exec setpriv --reuid 65534 --regid 65534 --clear-groups file -b \"$1\"";
        let local =
            Command::new("bash").args(["-c", local, "bash"]).arg(&program).output().unwrap().stdout;
        assert!(String::from_utf8_lossy(&local).contains("executable, regular file"), "{local:?}");
        let mut spec = command(&["file", "-b", "program"]);
        spec.stages[0].paths = vec![path_use("program")];
        let outcome = server.run(spec).await;
        match more {
            "" => assert_eq!(outcome.refusal().kind(), Kind::Guard),
            _ => assert_eq!(outcome.out, local, "{outcome:?}"),
        }
        // A readable file has no such problem.
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let mut spec = command(&["file", "-b", "program"]);
        spec.stages[0].paths = vec![path_use("program")];
        assert!(server.run(spec).await.text().contains("shell script"));
    }
}

// Guard: tools::is_program. On this server, a link in /usr/local/bin leads to a user's home.
#[tokio::test]
async fn a_link_out_of_the_servers_programs_is_no_program() {
    let server = Server::with(Way::RootForNobody, "exec = true").await;
    let export = server.top.path().join("export");
    fs::write(export.join("posh-test-linked"), "#!/bin/sh\necho started\n").unwrap();
    fs::set_permissions(export.join("posh-test-linked"), fs::Permissions::from_mode(0o755))
        .unwrap();
    let spec = with_mount(pipeline(&["posh-test-linked"]), LINKED, "");
    assert_eq!(server.run(spec).await.refusal().kind(), Kind::MissingTool);
}

fn tools_path() -> impl Iterator<Item = String> {
    ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
        .into_iter()
        .map(str::to_owned)
}

// Guard: the administrator's word; `exec` of an export.
#[tokio::test]
async fn an_administrator_may_let_programs_of_an_export_start() {
    let server = Server::with(Way::RootForNobody, "exec = true").await;
    let own = server.top.path().join("export/program");
    fs::write(&own, "#!/bin/sh\necho started\n").unwrap();
    fs::set_permissions(&own, fs::Permissions::from_mode(0o755)).unwrap();
    let outcome = server.run(command(&["sh", "-c", "test -x ./program && ./program"])).await;
    assert_eq!(outcome.text(), "started\n", "{outcome:?}");
}

// Guards: system::NODES, system::PROGRAMS, system::KERNELS.
#[tokio::test]
async fn root_changes_no_attributes_of_what_is_the_servers() {
    for way in [Way::Root, Way::ReadOnly] {
        let server = Server::start(way).await;
        let before = server.snapshot();
        let files = [
            "/dev/null",
            "/dev/zero",
            "/dev/full",
            "/dev/random",
            "/dev/urandom",
            "/dev/tty",
            "/etc/passwd",
            "/usr/bin/env",
            "/usr",
            "/etc/ld.so.cache",
            "/proc/self/status",
            "/proc/1/status",
            "/proc",
            "/sys/devices/system/cpu/online",
            "/sys/devices/system/cpu",
        ];
        for path in files.into_iter().filter(|path| Path::new(path).exists()) {
            for change in
                ["chmod 600", "chmod +t", "chown 1:1", "touch -d 2001-01-01", "rm -rf", "ln -sf /x"]
            {
                let mut words: Vec<&str> = change.split(' ').collect();
                words.push(path);
                let outcome = server.run(command(&words)).await;
                assert!(!outcome.errors().is_empty(), "{way:?} {change} {path}: {outcome:?}");
            }
        }
        // Also through open descriptors: fchmod(2) and futimens(2), on standard input and output.
        let script = "chmod 600 /proc/self/fd/0; chmod 600 /dev/stdin; touch -d 2001-01-01 /dev/stdin; \
                      exec 3<> /dev/null; chmod 600 /proc/self/fd/3; perl -e 'open F, q(+<), q(/dev/null); \
                      print STDERR chmod(0600, *F) ? q(changed) : qq($!\\n), chown(1, 1, *F) ? q(changed) : qq($!\\n)'";
        let outcome = server.run(command(&["sh", "-c", script])).await;
        assert!(outcome.errors().matches("Read-only file system").count() >= 5, "{outcome:?}");
        assert!(!outcome.errors().contains("changed"), "{outcome:?}");
        // They work as before.
        let script = "echo x > /dev/null && head -c 3 /dev/zero | wc -c && head -c 5 /dev/urandom | wc -c && echo x > /dev/full";
        let outcome = server.run(command(&["sh", "-c", script])).await;
        assert_eq!(outcome.text(), "3\n5\n");
        assert!(outcome.errors().contains("error"), "{outcome:?}");
        assert_eq!(server.snapshot(), before, "{way:?}");
    }
}

// Guards: view::prepare_directory, places::check.
#[tokio::test]
async fn a_working_directory_is_made_on_the_views_own_only() {
    for way in WAYS {
        let server = Server::start(way).await;
        let before = server.snapshot();
        let in_directory = |path: &str| {
            let mut spec = pipeline(&["pwd -P"]);
            spec.stages[0].cwd = path.to_owned().into();
            server.run(spec)
        };
        for path in ["/home/u/new", "/tmp/new/x", "/var/tmp/x", "/srv/x", "/.old/x"] {
            assert_eq!(in_directory(path).await.text(), format!("{path}\n"), "{way:?}");
        }
        for path in [
            "/etc/new",
            "/usr/new",
            "/dev/new",
            "/dev/shm/new",
            "/proc/new",
            "/sys/new",
            "/bin/new",
            "/home/../etc/new",
            "/home/u/new/../../../etc/new",
            "/mnt/x\n",
            &format!("{MOUNT}/new"),
            &format!("{MOUNT}/to-victim/new"),
            &format!("{MOUNT}/to-victim/d"),
        ] {
            assert_eq!(in_directory(path).await.refusal().kind(), Kind::Cwd, "{way:?} {path}");
        }
        assert_eq!(server.snapshot(), before, "{way:?}");
        assert!(!server.top.path().join("export/new").exists());
    }
}

// Guard: root::Root::cover; the file of the server stays, and its place is a constant.
#[tokio::test]
async fn files_of_etc_are_replaced_by_whole_names_only() {
    let lab = Lab::start().await;
    for path in ["/etc/localtime", "/etc/gitconfig", "/etc/gitattributes", "/etc/magic"] {
        let own = fs::read(path).ok();
        let mut spec = command(&["cat", path]);
        spec.client_files = vec![client_file(path, 0o644)];
        assert_eq!(lab.run(spec).await.text(), "of the client\n", "{path}");
        assert_eq!(fs::read(path).ok(), own, "{path}");
    }
}

// Guard: `places::REPLACEABLE`.
#[tokio::test]
async fn the_servers_policy_of_imagemagick_counts() {
    let lab = Lab::start().await;
    for name in ["policy.xml", "coder.xml", "thresholds.xml"] {
        let path = format!("/etc/ImageMagick-6/{name}");
        let mut spec = command(&["cat", &path]);
        if let Ok(own) = fs::read_to_string(&path) {
            assert_eq!(lab.run(spec.clone()).await.text(), own, "{path}");
        }
        spec.client_files = vec![client_file(&path, 0o644)];
        assert_eq!(lab.run(spec).await.refusal().kind(), Kind::NotAllowed, "{path}");
    }
}

// Guard: NO_XDEV in `scratch::remove_directory`.
#[tokio::test]
async fn emptying_tmp_touches_nothing_of_an_export_that_is_mounted_there() {
    let lab = Lab::start().await;
    lab.write("kept", "x\n");
    fs::create_dir(lab.store.path().join("d")).unwrap();
    lab.write("d/kept", "x\n");
    let run = async |script: &str| {
        let mut spec = command(&["sh", "-c", script]);
        let far = mount("/tmp/a/b/c/d", "logs", "d");
        spec.mounts = vec![mount("/tmp/logs", "logs", ""), mount("/tmp/a/b2", "logs", "d"), far];
        spec.stages[0].cwd = "/tmp/logs".into();
        lab.run(spec).await.text()
    };
    run("mkdir -p /tmp/own/deep /tmp/a/b/own; echo > /tmp/own/f; echo > /tmp/a/b/c/own").await;
    // It is emptied when the run's last process has been reaped.
    let emptied = async { while run("ls /tmp").await != "a\nlogs\n" {} };
    tokio::time::timeout(PATIENCE, emptied).await.expect("/tmp is emptied");
    // Mounts are in place, and nothing else is beside them.
    assert_eq!(
        run("ls /tmp/a /tmp/a/b /tmp/a/b/c; cat /tmp/a/b/c/d/kept")
            .await
            .lines()
            .collect::<String>(),
        "/tmp/a:bb2/tmp/a/b:c/tmp/a/b/c:dx"
    );
    assert_eq!(fs::read_to_string(lab.store.path().join("kept")).unwrap(), "x\n");
    assert_eq!(fs::read_to_string(lab.store.path().join("d/kept")).unwrap(), "x\n");
}

// Guard: pool::key_of. A view has copies of the mounts below an export, and lasts for minutes.
#[tokio::test]
async fn what_is_mounted_below_an_export_is_that_of_this_moment() {
    let server = Server::start(Way::Root).await;
    let sub = server.top.path().join("export/sub");
    let administer = |script: &str| server.administer(script, &sub);
    let reads = || server.run(pipeline(&["cat sub/f"]));
    assert_eq!(reads().await.text(), OWN);
    for _ in 0..2 {
        administer("mount -t tmpfs none $1; echo of the disk > $1/f");
        assert_eq!(reads().await.text(), "of the disk\n");
        assert_eq!(server.run(command(&["cp", "f", "sub/copy"])).await.errors(), "");
        administer("test -e $1/copy; umount $1; test ! -e $1/copy");
        assert_eq!(reads().await.text(), OWN);
    }
}

// Guard: `unreachable` in paths::check_one. A volume refuses what is mounted below its export
// (EXDEV).
#[tokio::test]
async fn what_a_volume_does_not_show_no_command_uses() {
    let server = Server::start(Way::Root).await;
    let sub = server.top.path().join("export/sub");
    server.administer("mkdir -p $1/inner/deep; mount -t tmpfs none $1/inner", &sub);
    server.administer("mkdir $1/deep; echo of the disk > $1/deep/f", &sub.join("inner"));
    server.administer("ln -s sub/inner/deep $1/link", &server.top.path().join("export"));
    let uses = |path: &str, recursive, one_file_system| {
        let mut spec = command(&["ls", path]);
        spec.mounts.iter_mut().for_each(|mount| mount.one_file_system = one_file_system);
        spec.stages[0].paths = vec![PathUse { recursive, ..path_use(path) }];
        spec
    };
    for (path, recursive, is_refused) in [
        ("sub/inner/deep/f", false, true),
        ("sub/inner", false, true),
        ("link/f", false, true),
        // Its entry has attributes that the volume does not show.
        ("sub", false, true),
        (".", true, true),
        (".", false, false),
        ("f", false, false),
        ("f", true, false),
    ] {
        let outcome = server.run(uses(path, recursive, true)).await;
        match is_refused {
            true => assert_eq!(outcome.refusal().kind(), Kind::PathOutside, "{path}"),
            false => assert_eq!(outcome.errors(), "", "{path}"),
        }
        assert_eq!(server.run(uses(path, recursive, false)).await.errors(), "", "{path}");
    }
    // The workstation has that file system's own export there.
    let mut spec = uses("sub/inner/deep/f", false, true);
    spec.mounts.push(mount(&format!("{MOUNT}/sub/inner"), "logs", "sub/inner"));
    assert_eq!(server.run(spec).await.errors(), "");
    server.administer("umount $1/inner", &sub);
    assert_eq!(server.run(uses(".", true, true)).await.errors(), "");
}

// Guard: pool::key. A view has copies of the mounts around its exports, too.
#[tokio::test]
async fn an_export_that_becomes_read_only_is_so_in_the_next_run() {
    let server = Server::start(Way::Root).await;
    let export = server.top.path().join("export");
    let administer = |script: &str| server.administer(script, &export);
    let copies = || server.run(command(&["cp", "f", "copy"]));
    assert_eq!(copies().await.errors(), "");
    administer("mount --bind $1 $1");
    assert_eq!(copies().await.errors(), "");
    administer("mount -o remount,bind,ro $1");
    let refused = copies().await.errors();
    assert!(refused.contains("Read-only file system"), "{refused}");
    administer("umount $1");
    assert_eq!(copies().await.errors(), "");
}
