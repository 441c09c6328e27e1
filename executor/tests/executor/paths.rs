//! Paths that commands may use, and their view of them.

use std::os::unix::fs::{PermissionsExt as _, symlink};

use nix::libc;
use posh_proto::executor::{ClientFile, RunSpec, exited::How, rejected::Kind};

use crate::harness::*;

fn using(commands: &[&str], paths: &[&str]) -> RunSpec {
    let mut spec = pipeline(commands);
    spec.stages[0].paths = paths.iter().map(|path| path_use(path)).collect();
    spec
}

fn in_directory(mut spec: RunSpec, directory: &str) -> RunSpec {
    spec.stages[0].cwd = directory.to_owned().into();
    spec
}

#[tokio::test]
async fn the_working_directory_is_the_workstations() {
    let lab = Lab::start().await;
    std::fs::create_dir(lab.store.path().join("sub")).unwrap();
    let below = format!("{MOUNT}/sub");
    for directory in
        [MOUNT, &below, "/home/nobody-here/project", "/tmp/only on the workstation", "/srv/x", "/"]
    {
        let outcome = lab.run(in_directory(pipeline(&["pwd -P"]), directory)).await;
        assert_eq!(outcome.text(), format!("{directory}\n"));
    }
}

#[tokio::test]
async fn a_working_directory_that_the_server_lacks_is_refused() {
    let lab = Lab::start().await;
    symlink("/tmp", lab.store.path().join("link")).unwrap();
    for (directory, expected) in [
        (format!("{MOUNT}/missing"), "No such file or directory"),
        (format!("{MOUNT}/link"), "it is /tmp on the server"),
        ("/usr/share/only-on-the-workstation".to_owned(), "/usr is the server's own"),
        ("relative".to_owned(), "not an absolute path"),
    ] {
        let outcome = lab.run(in_directory(pipeline(&["pwd"]), &directory)).await;
        let refusal = outcome.refusal();
        assert_eq!((refusal.kind(), refusal.stage), (Kind::Cwd, 1));
        assert!(refusal.message.contains(expected), "{}", refusal.message);
    }
    assert!(!lab.store.path().join("missing").exists());
}

#[tokio::test]
async fn paths_inside_the_mount_pass_however_they_are_written() {
    let lab = Lab::start().await;
    lab.write("f", "content\n");
    std::fs::create_dir(lab.store.path().join("d")).unwrap();
    symlink("f", lab.store.path().join("relative")).unwrap();
    symlink(format!("{MOUNT}/f"), lab.store.path().join("absolute")).unwrap();
    symlink("d/new", lab.store.path().join("dangling")).unwrap();
    let absolute = format!("{MOUNT}/f");
    let around = format!("../../posh-test-workstation/logs/{}", "f");
    for path in [
        "f",
        "./f",
        "d/../f",
        &absolute,
        &around,
        "relative",
        "absolute",
        "missing",
        "d/a/b/c",
        "f/x",
        "dangling",
        "",
        "/dev/null",
        "/dev/stdin",
    ] {
        let outcome = lab.run(using(&["echo ok"], &[path])).await;
        assert!(outcome.is_finished, "{path}: {outcome:?}");
    }
    assert_eq!(lab.run(using(&["cat absolute"], &["absolute"])).await.text(), "content\n");
}

#[tokio::test]
async fn paths_that_lead_out_are_refused_by_name() {
    let lab = Lab::start().await;
    symlink("/etc/passwd", lab.store.path().join("link")).unwrap();
    symlink("/srv/elsewhere/new", lab.store.path().join("dangling")).unwrap();
    symlink("loop", lab.store.path().join("loop")).unwrap();
    nix::unistd::mkfifo(&lab.store.path().join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    for (path, expected) in [
        ("/etc/passwd", "leads to /etc/passwd on the server"),
        ("../../../etc/passwd", "leads to /etc/passwd"),
        ("link", "leads to /etc/passwd"),
        ("dangling", "leads to / on the server, which is not in /mnt/posh-test-workstation/logs"),
        ("..", "leads to /mnt/posh-test-workstation"),
        ("/no/such/thing", "leads to /"),
        ("fifo", "is a FIFO"),
        ("/dev/tty", "leads to /dev/tty"),
        ("/dev/fd/9", "leads to"),
    ] {
        let outcome = lab.run(using(&["echo ok"], &["f", path])).await;
        let refusal = outcome.refusal();
        assert_eq!((refusal.kind(), refusal.stage), (Kind::PathOutside, 1), "{path}");
        assert!(
            refusal.message.contains(expected) && refusal.message.starts_with(path),
            "{}",
            refusal.message
        );
    }
    // A command that works on the link itself may.
    let mut spec = using(&["readlink link"], &["link"]);
    spec.stages[0].paths[0].no_follow = true;
    assert_eq!(lab.run(spec).await.text(), "/etc/passwd\n");
}

#[tokio::test]
async fn redirects_out_of_the_mount_are_refused() {
    let lab = Lab::start().await;
    symlink("/etc/passwd", lab.store.path().join("link")).unwrap();
    nix::unistd::mkfifo(&lab.store.path().join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    for (path, kind) in
        [("link", Kind::PathOutside), ("missing", Kind::OpenFailed), ("fifo", Kind::OpenFailed)]
    {
        let mut spec = pipeline(&["cat"]);
        spec.stages[0].descriptors[0].source = Some(file(path, libc::O_RDONLY, 0));
        assert_eq!(lab.run(spec).await.refusal().kind(), kind, "{path}");
    }
}

#[tokio::test]
async fn exports_must_exist_and_sub_paths_stay_below() {
    let lab = Lab::start().await;
    std::fs::create_dir_all(lab.store.path().join("a/b")).unwrap();
    lab.write("a/b/f", "deep\n");
    symlink("/etc", lab.store.path().join("out")).unwrap();
    for (export, sub_path) in
        [("other", ""), ("logs", "missing"), ("logs", "../.."), ("logs", "/etc"), ("logs", "out")]
    {
        let mut spec = pipeline(&["cat f"]);
        spec.mounts = vec![mount(MOUNT, export, sub_path)];
        assert_eq!(
            lab.run(spec).await.refusal().kind(),
            Kind::UnknownExport,
            "{export} {sub_path}"
        );
    }
    let mut spec = pipeline(&["cat f"]);
    spec.mounts = vec![mount(MOUNT, "logs", "a/b")];
    assert_eq!(lab.run(spec).await.text(), "deep\n");
}

#[tokio::test]
async fn a_read_only_export_can_only_be_read() {
    let lab = Lab::with(|config| config.exports[0].read_only = true).await;
    lab.write("f", "content\n");
    assert_eq!(lab.run(pipeline(&["cat f"])).await.text(), "content\n");
    let outcome = lab.run(pipeline(&["touch new"])).await;
    assert!(outcome.errors().contains("Read-only file system"), "{outcome:?}");
    let mut spec = pipeline(&["echo new"]);
    spec.stages[0].descriptors[1].source = Some(file("f", libc::O_WRONLY, 0));
    assert_eq!(lab.run(spec).await.refusal().kind(), Kind::OpenFailed);
    assert_eq!(std::fs::read_to_string(lab.store.path().join("f")).unwrap(), "content\n");
}

#[tokio::test]
async fn files_are_made_with_the_umask() {
    let lab = Lab::start().await;
    let mut spec = pipeline(&["touch new"]);
    spec.stages[0].umask = 0o077;
    lab.run(spec).await;
    let mode = std::fs::metadata(lab.store.path().join("new")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test]
async fn the_servers_own_files_are_hidden_and_the_root_is_read_only() {
    let lab = Lab::start().await;
    let outcome = lab.run(command(&["ls", "-A", "/root", "/var/lib", "/tmp"])).await;
    assert!(outcome.errors().contains("cannot access '/root'"), "{outcome:?}");
    assert!(outcome.errors().contains("cannot access '/var/lib'"), "{outcome:?}");
    assert_eq!(outcome.text(), "/tmp:\n");
    let script = "for p in / /usr /etc /home /mnt; do touch $p/new || echo $p; done; touch /tmp/new && echo tmp";
    let outcome = lab.run(command(&["sh", "-c", script])).await;
    assert_eq!(outcome.text(), "/\n/usr\n/etc\n/home\n/mnt\ntmp\n");
    assert!(!std::path::Path::new("/tmp/new").exists());
}

#[tokio::test]
async fn mounts_can_be_nearly_anywhere() {
    let lab = Lab::start().await;
    lab.write("f", "content\n");
    std::fs::create_dir(lab.store.path().join("inner")).unwrap();
    for path in [
        "/tmp/a/b",
        "/var/tmp/a",
        "/var/x",
        "/home/u/data",
        "/media/u/disk",
        "/run/user/1000/x",
        "/data",
        "/a/b",
    ] {
        let mut spec = in_directory(pipeline(&["cat f"]), path);
        spec.mounts = vec![mount(path, "logs", "")];
        assert_eq!(lab.run(spec).await.text(), "content\n", "{path}");
    }
    // One mount inside another.
    let inner = format!("{MOUNT}/inner");
    let mut spec = in_directory(pipeline(&["cat f"]), &inner);
    spec.mounts = vec![mount(&inner, "logs", ""), mount(MOUNT, "logs", "")];
    assert_eq!(lab.run(spec).await.text(), "content\n");
}

#[tokio::test]
async fn mounts_that_would_hide_the_system_are_refused() {
    let lab = Lab::start().await;
    let missing = format!("{MOUNT}/missing");
    for (path, kind) in [
        ("/", Kind::NoNamespace),
        ("/usr", Kind::NoNamespace),
        ("/usr/local/posh-test/data", Kind::NoNamespace),
        ("/usr/share/zoneinfo", Kind::NoNamespace),
        ("/etc/posh-test", Kind::NoNamespace),
        ("/proc/x", Kind::NoNamespace),
        ("/dev/x", Kind::NoNamespace),
        ("relative", Kind::Protocol),
        ("/a/../b", Kind::Protocol),
        ("/a//b", Kind::Protocol),
        (&missing, Kind::NoNamespace),
    ] {
        let mut spec = in_directory(pipeline(&["true"]), "/");
        spec.mounts = vec![mount(MOUNT, "logs", ""), mount(path, "logs", "")];
        assert_eq!(lab.run(spec).await.refusal().kind(), kind, "{path}");
    }
    assert!(!lab.store.path().join("missing").exists());
}

#[tokio::test]
async fn the_users_files_are_shown_at_their_paths() {
    let lab = Lab::start().await;
    lab.write("own", "from the export\n");
    let own = format!("{MOUNT}/own");
    let file = |path: &str| ClientFile {
        path: path.to_owned().into(),
        content: "mine\n".into(),
        mode: 0o640,
    };
    let paths = ["/home/u/.gitconfig", "/etc/localtime", "/tmp/x/y", &own];
    let mut words = vec!["cat"];
    words.extend(paths);
    let mut spec = command(&words);
    spec.client_files = paths.iter().map(|path| file(path)).collect();
    assert_eq!(lab.run(spec).await.text(), "mine\nmine\nmine\nfrom the export\n");
    assert_ne!(std::fs::read("/etc/localtime").ok().as_deref(), Some(&b"mine\n"[..]));
    let mut spec = command(&["stat", "-c", "%a", "/home/u/.gitconfig"]);
    spec.client_files = vec![file("/home/u/.gitconfig")];
    assert_eq!(lab.run(spec).await.text(), "640\n");
}

#[tokio::test]
async fn a_missing_tool_is_named() {
    let lab = Lab::start().await;
    let outcome = lab.run(pipeline(&["echo never", "no-such-command-here"])).await;
    let refusal = outcome.refusal();
    assert_eq!((refusal.kind(), refusal.stage), (Kind::MissingTool, 2));
    assert_eq!(refusal.message, "no-such-command-here is not installed on the server");
}

#[tokio::test]
async fn nothing_of_a_refused_run_has_run() {
    let lab = Lab::start().await;
    let mut spec = pipeline(&["touch new", "cat"]);
    spec.stages[1].paths = vec![path_use("/etc/passwd")];
    assert_eq!(lab.run(spec).await.refusal().stage, 2);
    // A stage that can't be set up holds back the others.
    let mut spec = pipeline(&["touch new", "cat"]);
    spec.stages[1].limits =
        vec![posh_proto::executor::ResourceLimit { resource: 9999, soft: 1, hard: 1 }];
    assert_eq!(lab.run(spec).await.refusal().kind(), Kind::SpawnFailed);
    assert!(!lab.store.path().join("new").exists());
}

#[tokio::test]
async fn a_program_that_cannot_be_run_exits_as_under_a_shell() {
    let lab = Lab::start().await;
    let huge = "x".repeat(3 << 20);
    let outcome = lab.run(command(&["echo", &huge])).await;
    assert_eq!(outcome.codes(), [How::Code(126)]);
    assert!(outcome.errors().contains("echo: Argument list too long"), "{}", outcome.errors());
}

#[tokio::test]
async fn a_command_does_not_read_what_the_workstation_writes() {
    let lab = Lab::start().await;
    lab.write("out", "");
    symlink("out", lab.store.path().join("link")).unwrap();
    std::fs::hard_link(lab.store.path().join("out"), lab.store.path().join("other")).unwrap();
    lab.write("f", "content\n");
    let run = |path: &str| {
        let mut spec = using(&["cat f"], &[path]);
        spec.stages[0].local_output = format!("{MOUNT}/out").into();
        lab.run(spec)
    };
    for path in ["out", "link", "other"] {
        assert_eq!(run(path).await.refusal().kind(), Kind::Guard, "{path}");
    }
    assert_eq!(run("f").await.text(), "content\n");
}

#[tokio::test]
async fn an_output_that_is_not_empty_is_another_file() {
    let lab = Lab::start().await;
    lab.write("out", "another file's\n");
    let to = |flags, offset| {
        let mut spec = pipeline(&["echo new"]);
        spec.stages[0].descriptors[1].source = Some(file("out", flags, offset));
        spec
    };
    assert_eq!(lab.run(to(libc::O_WRONLY, 0)).await.refusal().kind(), Kind::OpenFailed);
    assert!(lab.run(to(libc::O_WRONLY | libc::O_APPEND, 0)).await.is_finished);
    assert_eq!(
        std::fs::read_to_string(lab.store.path().join("out")).unwrap(),
        "another file's\nnew\n"
    );
}
