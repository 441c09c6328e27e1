//! Rule 8: nothing stale is read, nothing new overwritten. The programs are the real
//! ones (sshfs, rclone); what this machine shows is looked at by this very process,
//! which is not intercepted and has looked at everything before. Each promise is
//! also tried without the rule, and must then be broken.

mod git;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, chown};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use posh_integration::cloud::{Cloud, CloudSpec};
use posh_integration::host::{CONFIG, HOME};
use posh_integration::oracle::Under;
use posh_integration::wire::Profile;
use posh_integration::{Host, Lab, LabSpec, RunOutcome, Script};
use rustix::process::{Pid, Signal, kill_process};

use crate::programs;

/// What a directory tree looks like: names, each with its mode, and for files the size
/// that stat(2) says and the content that is read.
type Tree = BTreeMap<String, String>;

fn look(top: &Path) -> Tree {
    let mut tree = Tree::new();
    let mut queue = vec![String::new()];
    while let Some(inside) = queue.pop() {
        let Ok(entries) = fs::read_dir(top.join(&inside)) else {
            tree.insert(inside, "cannot be listed".into());
            continue;
        };
        for entry in entries {
            let name = Path::new(&inside)
                .join(entry.unwrap().file_name())
                .into_os_string()
                .into_string()
                .unwrap();
            let path = top.join(&name);
            // By its name: that it is in the listing and that it is there are two things.
            let Ok(found) = fs::symlink_metadata(&path) else {
                tree.insert(name, "is listed and not there".into());
                continue;
            };
            let mut seen = format!("{:o}", found.mode());
            if found.is_file() {
                let content =
                    fs::read(&path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
                let _ =
                    write!(seen, " {} {:?}", found.len(), content.map_err(|error| error.kind()));
            } else {
                queue.push(name.clone());
            }
            tree.insert(name, seen);
        }
    }
    tree
}

/// The same, with what is not listed but still there for one who asks by name.
fn look_for(top: &Path, names: &Tree) -> Tree {
    let mut tree = look(top);
    for name in names.keys() {
        if !tree.contains_key(name) && top.join(name).symlink_metadata().is_ok() {
            tree.insert(name.clone(), "is there and not listed".into());
        }
    }
    tree
}

fn run(host: &Host, text: &str) -> RunOutcome {
    let outcome = Script::new(text).run(host, Under::PoshExplained).unwrap();
    assert!(outcome.status.success() && outcome.stderr.is_empty(), "{text}: {outcome}");
    outcome
}

/// Every stage of `command` ran on a server.
fn assert_offloaded(outcome: &RunOutcome, command: &str) {
    let stages: Vec<_> = outcome.report().stages(command).collect();
    assert!(
        !stages.is_empty() && stages.iter().all(|s| s.is_offloaded()),
        "{command}: {:#?}",
        outcome.report()
    );
}

/// Why a command ran here.
fn reason(outcome: &RunOutcome, command: &str) -> String {
    let stage = outcome.report().stages(command).next().expect("it ran");
    assert!(!stage.is_offloaded(), "{stage:#?}");
    stage.reason.clone()
}

fn text(outcome: &RunOutcome) -> String {
    String::from_utf8_lossy(&outcome.stdout).into_owned()
}

/// A change on the server: its name, a script, and the command in it that must run there.
type Case = (&'static str, &'static str, &'static str);

/// Each in a directory of its own, where the script starts, with the files of [`fill`].
const CHANGES: &[Case] = &[
    ("grown-by-a-redirect", "cat more >> file", "cat"),
    ("cut-by-a-redirect", "head -n 1 more > file", "head"),
    ("same-size-by-a-redirect", "tr a-y b-z < file > same", "tr"),
    ("grown-by-name", "sort -o file more", "sort"),
    ("same-size-by-name", "sort -o file file", "sort"),
    ("made-by-name", "sort -o new more", "sort"),
    ("made-in-place", "sed -i s/alpha/longer/ file", "sed"),
    ("removed", "rm -r file other/a", "rm"),
    ("removed-tree", "rm -r other", "rm"),
    ("unpacked", "tar -xf all.tar", "tar"),
    ("copied", "cp -r tree copy", "cp"),
    ("copied-over", "cp -r tree/. other", "cp"),
    ("modes-of-a-tree", "chmod -R g-r tree", "chmod"),
    ("by-two-commands", "tee one two < more | sort -o three", "tee"),
];

fn fill(directory: &Path) {
    fs::create_dir_all(directory.join("tree/deep")).unwrap();
    fs::create_dir_all(directory.join("other/deep")).unwrap();
    for (name, content) in [
        ("file", "alpha\nbeta\n"),
        ("same", "other\nsame\n"),
        ("more", "gamma\ndelta\nepsilon\n"),
        ("tree/a", "a in the tree\n"),
        ("tree/deep/b", "b in the tree\n"),
        ("other/a", "a\n"),
        ("other/deep/b", "b of another\n"),
    ] {
        fs::write(directory.join(name), content).unwrap();
    }
    let tar = std::process::Command::new("tar")
        .args(["-cf", "all.tar", "--transform", "s/$/ /", "--transform", "s/ $//", "file", "tree"])
        .current_dir(directory)
        .status()
        .unwrap();
    assert!(tar.success());
    // Unpacking changes these back.
    fs::write(directory.join("tree/a"), "changed\n").unwrap();
    fs::remove_file(directory.join("tree/deep/b")).unwrap();
    fs::write(directory.join("file"), "beta\nalpha\n").unwrap();
}

/// Tries changes; the names of those after which `mount` did not show what `store` has.
fn try_changes(
    host: &Host,
    (store, mount, seen): (&Path, &Path, &str),
    cases: &[&Case],
) -> Vec<&'static str> {
    for (name, ..) in cases {
        fs::create_dir(store.join(name)).unwrap();
        fill(&store.join(name));
    }
    let mut stale = Vec::new();
    for (name, change, command) in cases {
        let before = look(&mount.join(name));
        assert_eq!(before, look(&store.join(name)), "{name}: a new directory");
        let outcome = run(host, &format!("cd {seen}/{name} && {change}"));
        assert_offloaded(&outcome, command);
        let now = look(&store.join(name));
        assert_ne!(before, now, "{name} changed nothing");
        if look_for(&mount.join(name), &before) != now {
            stale.push(*name);
        }
    }
    stale
}

/// The names of cases, all or but a few.
fn names<'a>(cases: &[&'a Case], but: &[&str]) -> Vec<&'a str> {
    cases.iter().map(|case| case.0).filter(|name| !but.contains(name)).collect()
}

const WITHOUT: (&str, &str) = ("POSH_WITHOUT", "coherence");

fn try_sshfs(spec: LabSpec) -> Vec<&'static str> {
    let lab = Lab::start(&spec, &programs()).unwrap();
    let mount = lab.workstation.path("/mnt/s1");
    let cases: Vec<&Case> = CHANGES.iter().collect();
    try_changes(&lab.workstation, (&lab.data(1), &mount, "/mnt/s1"), &cases)
}

#[test]
fn sshfs_shows_remote_changes_at_once() {
    assert_eq!(try_sshfs(LabSpec::servers(1)), [""; 0]);
}

/// sshfs's memory would be 20 s long.
const SOON: Duration = Duration::from_secs(10);

#[test]
fn sshfs_forgets_directories_that_were_removed_remotely() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let (mount, store) = (lab.workstation.path("/mnt/s1"), lab.data(1));
    for name in ["tree/one/deep", "tree/two", "from/one/deep/other"] {
        fs::create_dir_all(store.join(name)).unwrap();
        fs::write(store.join(name).join("file"), name).unwrap();
    }
    let before = look(&mount);
    let began = Instant::now();
    assert_offloaded(&run(&lab.workstation, "cd /mnt/s1 && rm -r tree"), "rm");
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    assert_eq!(look_for(&mount, &before), look(&store));
    assert!(!store.join("tree").exists());
    // Others of the same names are others, at every depth.
    assert_offloaded(&run(&lab.workstation, "cd /mnt/s1 && cp -r from tree"), "cp");
    assert_eq!(look(&mount), look(&store));
}

#[test]
fn sshfs_forgets_large_trees_that_were_removed_remotely() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let (mount, store) = (lab.workstation.path("/mnt/s1"), lab.data(1));
    for directory in ["tree/a", "tree/b/deep", "from/a", "from/b/deep"] {
        fs::create_dir_all(store.join(directory)).unwrap();
        for number in 0..80 {
            fs::write(store.join(directory).join(number.to_string()), &directory[..number % 4])
                .unwrap();
        }
    }
    fs::remove_file(store.join("from/a/1")).unwrap();
    let before = look(&mount);
    let began = Instant::now();
    assert_offloaded(&run(&lab.workstation, "cd /mnt/s1 && rm -r tree"), "rm");
    assert_eq!(look_for(&mount, &before), look(&store));
    assert_offloaded(&run(&lab.workstation, "cd /mnt/s1 && cp -r from tree"), "cp");
    assert_eq!(look_for(&mount, &before), look(&store), "others of the same names");
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
}

#[test]
fn sshfs_is_stale_without_the_rule() {
    let stale = try_sshfs(LabSpec::servers(1).with_variable(WITHOUT.0, WITHOUT.1));
    // Content of the same size it shows at once, since an open drops what the kernel has.
    assert_eq!(stale, names(&CHANGES.iter().collect::<Vec<_>>(), &["same-size-by-name"]));
}

#[test]
fn a_file_closed_on_sshfs_is_read_remotely_at_once() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let mount = lab.workstation.path("/mnt/s1");
    for round in 0..20 {
        let content = format!("round {round}\n").repeat(round + 1);
        fs::write(mount.join("file"), &content).unwrap();
        fs::write(mount.join(format!("file-{round}")), "x").unwrap();
        let outcome =
            run(&lab.workstation, "cat /mnt/s1/file; find /mnt/s1 -name 'file-*' | grep -c .");
        assert_offloaded(&outcome, "cat");
        assert_eq!(text(&outcome), format!("{content}{}\n", round + 1));
    }
}

/// sshfs forgets a listing when the directory's owner is set, and remembers the owner for 20 s.
#[test]
fn an_owner_or_group_that_was_changed_on_the_server_is_kept() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let mount = lab.workstation.path("/mnt/s1");
    let on_server = lab.servers[0].host.path("/srv/s1");
    fs::write(mount.join("file"), "x").unwrap();
    let rounds = [
        ("cp /mnt/s1/file /mnt/s1/d/new", (0, 7)),
        ("cp -r /mnt/s1/tree /mnt/s1/d", (0, 7)),
        ("cp /mnt/s1/file /mnt/s1/d/new", (7, 7)),
    ];
    for (command, (user, group)) in rounds {
        let directory = on_server.join("d");
        fs::create_dir_all(&directory).unwrap();
        fs::create_dir_all(on_server.join("tree/in")).unwrap();
        assert_eq!(fs::metadata(mount.join("d")).unwrap().uid(), 0, "{command}");
        chown(&directory, Some(user), Some(group)).unwrap();
        let outcome = run(&lab.workstation, command);
        assert_offloaded(&outcome, "cp");
        let now = fs::metadata(&directory).unwrap();
        assert_eq!((now.uid(), now.gid()), (user, group), "{command}");
        fs::remove_dir_all(&directory).unwrap();
        wait_until_gone(&mount.join("d"));
    }
}

/// sshfs does not take up new attributes while a program writes through the mount: here, jobs write
/// to a file of their own on it, from this machine, and a server to others at the same time.
#[test]
fn what_parallel_jobs_have_written_is_shown_as_it_is() {
    const JOBS: &str = r#"
        cd /mnt/s1; printf 'c\nb\na\n' > lines; wrong=0
        for round in 1 2 3 4; do
            for job in 1 2 3 4 5 6 7 8; do
                (for turn in 1 2 3 4; do
                    seq 20 >> log.$job; sort lines > out.$job; cat out.$job >> all
                done) &
            done; wait
            for job in 1 2 3 4 5 6 7 8; do
                seen=$(<out.$job); [ -s out.$job ] && [ "$seen" = $'a\nb\nc' ] || ((wrong += 1))
            done
        done
        echo $wrong wrong"#;
    let link = Profile { round_trip: Duration::from_millis(3), megabits: 600 };
    let lab = Lab::start(&LabSpec::servers(1).link(link), &programs()).unwrap();
    let outcome = run(&lab.workstation, JOBS);
    assert!(outcome.report().stages("sort").any(|stage| stage.is_offloaded()));
    assert_eq!(text(&outcome), "0 wrong\n");
}

/// At the same size, in the same second, by a program that has the file open and has read it.
#[test]
fn what_is_changed_at_the_same_size_is_read_through_open_descriptors() {
    const READ_AGAIN: &str = r#"
        echo one > /mnt/s1/1; echo two > /mnt/s1/2; echo new > /mnt/s1/f
        python3 -c '
import os, subprocess
opened = os.open("/mnt/s1/f", os.O_RDONLY)
for turn in range(6):
    os.pread(opened, 9, 0)
    subprocess.run("cat /mnt/s1/%d 1<> /mnt/s1/f" % (turn % 2 + 1), shell=True, check=True)
    print(os.pread(opened, 9, 0).decode().strip())'"#;
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let outcome = run(&lab.workstation, READ_AGAIN);
    assert_offloaded(&outcome, "cat");
    assert_eq!(text(&outcome), "one\ntwo\n".repeat(3));
}

/// Such a listing can only be waited for, for 22 s.
#[test]
fn what_changes_the_listing_of_another_user_s_directory_runs_here() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let on_server = lab.servers[0].host.path("/srv/s1");
    fs::create_dir_all(on_server.join("theirs/tree")).unwrap();
    fs::create_dir_all(on_server.join("ours")).unwrap();
    for file in ["lines", "theirs/old", "theirs/edited"] {
        fs::write(on_server.join(file), "b\na\n").unwrap();
    }
    chown(on_server.join("theirs"), Some(7), None).unwrap();
    let commands = [
        ("sort -o /mnt/s1/theirs/new /mnt/s1/lines", false),
        ("sed -i s/a/c/ /mnt/s1/theirs/edited", false),
        ("cp -r /mnt/s1/ours /mnt/s1/theirs", false),
        ("sort -o /mnt/s1/theirs/old /mnt/s1/lines", true),
        ("sort -o /mnt/s1/ours/new /mnt/s1/lines", true),
    ];
    for (command, is_offloaded) in commands {
        let outcome = run(&lab.workstation, command);
        let name = command.split(' ').next().unwrap();
        let report = outcome.report();
        let stage = report.stages(name).next().unwrap();
        assert_eq!(stage.is_offloaded(), is_offloaded, "{command}: {}", stage.reason);
        assert!(is_offloaded || stage.reason.contains("is not its user's"), "{}", stage.reason);
    }
    assert_eq!(fs::read_to_string(on_server.join("theirs/new")).unwrap(), "a\nb\n");
}

#[test]
fn a_command_that_writes_in_thousands_of_directories_runs_here() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let on_server = lab.servers[0].host.path("/srv/s1");
    for number in 0..2100 {
        let directory = on_server.join(number.to_string());
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("f"), "a\n").unwrap();
    }
    let outcome = run(&lab.workstation, "cd /mnt/s1; sed -i s/a/b/ 1?/f; sed -i s/[ab]/c/ */f");
    let reasons: Vec<_> = outcome.report().stages("sed").map(|sed| &sed.reason).collect();
    assert!(reasons.iter().any(|why| why.contains("more than 2048 directories")), "{reasons:?}");
    assert!(outcome.report().stages("sed").any(|stage| stage.is_offloaded()));
    assert_eq!(fs::read_to_string(on_server.join("2099/f")).unwrap(), "c\n");
}

/// Waits until a mount has forgotten a name.
fn wait_until_gone(path: &Path) {
    let end = Instant::now() + Duration::from_secs(30);
    while path.exists() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(!path.exists(), "{} is still shown", path.display());
}

/// A process writes to a file that it keeps open (a shell's own writes end with a
/// close(2) of some descriptor, which waits for the server); then its shell reads the file.
const WRITER_BESIDE: &str = r#"
    coproc perl -e '$| = 1; open F, ">", "/mnt/s1/file" or die "open: $!"; print "opened\n"; <STDIN>; syswrite F, "written\n"; print "so\n"; <STDIN>'
    read -r said <&"${COPROC[0]}"; echo opened; read -r go; echo go >&"${COPROC[1]}"; read -r said <&"${COPROC[0]}"
    cat /mnt/s1/file; exit"#;

/// That script, with a server that is stopped while the process writes: what the command
/// gives, and whether it waited until the server went on.
fn read_while_the_server_is_held_up(spec: LabSpec) -> (String, bool) {
    let lab = Lab::start(&spec, &programs()).unwrap();
    // The gateway starts with the first shell, and connects with the first command.
    run(&lab.workstation, "touch /mnt/s1/other && cat /mnt/s1/other");
    let mut command = Script::new(WRITER_BESIDE).command(&lab.workstation, Under::Posh);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut shell = lab.workstation.spawn(command).unwrap();
    let mut stdout = BufReader::new(shell.stdout.take().unwrap());
    let mut said = String::new();
    stdout.read_line(&mut said).unwrap();
    assert_eq!(said, "opened\n");
    let servers: Vec<_> = lab.servers[0]
        .host
        .processes()
        .unwrap()
        .into_iter()
        .filter(|process| process.program == "sshd")
        .collect();
    assert!(servers.len() > 1, "{servers:?}");
    let tell = |signal| {
        for process in &servers {
            kill_process(Pid::from_raw(process.pid.cast_signed()).unwrap(), signal).unwrap();
        }
    };
    tell(Signal::STOP);
    shell.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let waited = !shell.wait_at_most(Duration::from_millis(400)).unwrap();
    tell(Signal::CONT);
    let mut read = String::new();
    stdout.read_to_string(&mut read).unwrap();
    (read, waited)
}

#[test]
fn a_file_still_open_on_sshfs_is_settled_before_it_is_read_remotely() {
    assert_eq!(
        read_while_the_server_is_held_up(LabSpec::servers(1)),
        ("written\n".to_owned(), true)
    );
}

#[test]
fn a_file_still_open_on_sshfs_is_read_too_early_without_the_rule() {
    let spec = LabSpec::servers(1).with_variable(WITHOUT.0, WITHOUT.1);
    assert_eq!(read_while_the_server_is_held_up(spec), (String::new(), false));
}

/// Uploads begin at once, so that they are over within the time that posh waits.
const QUICK: &str = "--vfs-cache-mode writes --vfs-write-back 50ms";
/// The defaults of rclone's write cache: five seconds until an upload begins.
const SLOW: &str = "--vfs-cache-mode writes";
/// With the remote control, on each host's own loopback interface.
const CONTROL: &str = "--rc --rc-addr localhost:5572";

fn cloud(spec: CloudSpec) -> Cloud {
    Cloud::start(&spec, &programs()).unwrap()
}

/// The changes by name, without redirects (which go through the mount), modes (which WebDAV does
/// not have) and copies of trees (whose links the mount may not show, so they are made here).
fn by_name() -> Vec<&'static Case> {
    let is_here = |name: &str| {
        name.ends_with("redirect") || name.starts_with("modes") || name.starts_with("copied")
    };
    CHANGES.iter().filter(|case| !is_here(case.0)).collect()
}

fn try_rclone(spec: CloudSpec) -> Vec<&'static str> {
    let cloud = cloud(spec);
    try_changes(&cloud.workstation, (&cloud.store(), &cloud.mount(), "/mnt/cloud"), &by_name())
}

#[test]
fn rclone_shows_remote_changes_at_once() {
    assert_eq!(try_rclone(CloudSpec::new(&format!("{QUICK} {CONTROL}"))), [""; 0]);
}

#[test]
fn rclone_is_stale_without_the_rule() {
    let stale = try_rclone(
        CloudSpec::new(&format!("{QUICK} {CONTROL}")).with_variable(WITHOUT.0, WITHOUT.1),
    );
    // It keeps no content of files that it did not write.
    assert_eq!(stale, names(&by_name(), &["same-size-by-name"]));
}

#[test]
fn rclone_without_its_remote_control_is_written_through() {
    let cloud = cloud(CloudSpec::new(QUICK));
    fs::write(cloud.store().join("more"), "b\na\n").unwrap();
    let outcome =
        run(&cloud.workstation, "cd /mnt/cloud && sort -o sorted more && cat more | tr a-z A-Z");
    assert_eq!(reason(&outcome, "sort"), "rclone at /mnt/cloud runs without --rc");
    assert_offloaded(&outcome, "tr");
    assert_eq!(fs::read_to_string(cloud.mount().join("sorted")).unwrap(), "a\nb\n");
}

const WRITE_AND_READ: &str = "cd /mnt/cloud; for i in 1 2 3; do echo round $i > file; cat file; done; \
                              mkdir -p d; echo deep > d/e; grep -H . d/e; ls . d";

#[test]
fn what_was_written_to_rclone_is_read_remotely_at_once() {
    let cloud = cloud(CloudSpec::new(QUICK));
    let outcome = run(&cloud.workstation, WRITE_AND_READ);
    assert_offloaded(&outcome, "cat");
    assert_offloaded(&outcome, "grep");
    assert_offloaded(&outcome, "ls");
    assert_eq!(text(&outcome), "round 1\nround 2\nround 3\nd/e:deep\n.:\nd\nfile\n\nd:\ne\n");
}

#[test]
fn what_was_written_to_rclone_is_not_found_without_the_rule() {
    let cloud = cloud(CloudSpec::new(SLOW).with_variable(WITHOUT.0, WITHOUT.1));
    let outcome = Script::new("cd /mnt/cloud; echo new > file; cat file")
        .run(&cloud.workstation, Under::Posh)
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&outcome.stderr), "cat: file: No such file or directory\n");
}

#[test]
fn what_waits_for_its_upload_is_read_here() {
    let cloud = cloud(CloudSpec::new(SLOW));
    let outcome = run(
        &cloud.workstation,
        "cd /mnt/cloud; echo new > file; cat file; wc -c < file; grep -c new file",
    );
    assert_eq!(text(&outcome), "new\n4\n1\n");
    for command in ["cat", "wc", "grep"] {
        assert_eq!(reason(&outcome, command), "/mnt/cloud/file is not uploaded yet");
    }
}

#[test]
fn what_is_open_for_writing_on_rclone_is_read_here() {
    for mode in ["off", "writes"] {
        let cloud = cloud(CloudSpec::new(&format!("--vfs-cache-mode {mode}")));
        fs::write(cloud.store().join("file"), "old\n").unwrap();
        let outcome = run(
            &cloud.workstation,
            "cd /mnt/cloud; cat file; exec 3> other; echo new >&3; cat file other",
        );
        let stages: Vec<_> = outcome.report().stages("cat").collect();
        assert!(stages[0].is_offloaded(), "{stages:?}");
        assert_eq!(stages[1].reason, "/mnt/cloud/other is open for writing on this machine");
    }
}

/// Waits until a file has this content, by the kernel's word.
fn wait_for_content(path: &Path, content: &str) {
    let watch = Inotify::init(InitFlags::IN_NONBLOCK).unwrap();
    watch.add_watch(path.parent().unwrap(), AddWatchFlags::IN_ALL_EVENTS).unwrap();
    let end = Instant::now() + Duration::from_secs(30);
    while fs::read_to_string(path).ok().as_deref() != Some(content) {
        let left = end.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "{} is {:?}", path.display(), fs::read_to_string(path));
        let timeout = PollTimeout::try_from(left).unwrap();
        poll(&mut [PollFd::new(std::os::fd::AsFd::as_fd(&watch), PollFlags::POLLIN)], timeout)
            .unwrap();
        let _ = watch.read_events();
    }
}

const REDIRECT: &str =
    "cd /mnt/cloud; { echo first; sort more; } > file; echo first > other; sort more >> other";

#[test]
fn a_redirect_into_rclone_is_not_overwritten() {
    let cloud = cloud(CloudSpec::new(SLOW));
    fs::write(cloud.store().join("more"), "b\na\n").unwrap();
    let outcome = run(&cloud.workstation, REDIRECT);
    assert_offloaded(&outcome, "sort");
    for name in ["file", "other"] {
        assert_eq!(fs::read_to_string(cloud.mount().join(name)).unwrap(), "first\na\nb\n");
        wait_for_content(&cloud.store().join(name), "first\na\nb\n");
    }
}

#[test]
fn a_redirect_into_rclone_is_overwritten_without_its_adapter() {
    let cloud = cloud(CloudSpec::new(SLOW).with_variable(WITHOUT.0, WITHOUT.1));
    fs::write(cloud.store().join("more"), "b\na\n").unwrap();
    fs::write(cloud.store().join("file"), "").unwrap();
    let table = fs::read_to_string(cloud.workstation.path(CONFIG)).unwrap();
    fs::write(cloud.workstation.path(CONFIG), format!("{table}coherence = \"bind\"\n")).unwrap();
    run(&cloud.workstation, "cd /mnt/cloud; { echo first; sort more; } > file");
    // The server's part came first, the workstation's own copy of the file later.
    wait_for_content(&cloud.store().join("file"), "first\n");
}

/// One mount on the workstation and one beside the executor, which has nothing else.
fn near(workstation: &str, executor: &str) -> CloudSpec {
    CloudSpec::new(workstation).near(executor)
}

const READ_BEFORE: &str = "cd /mnt/cloud; cat file; ls; wc -c file";
const READ_AFTER: &str = "cd /mnt/cloud; echo longer than before > file; echo x > new; rm gone; cat file; ls; wc -c file";

fn read_near(spec: CloudSpec) -> RunOutcome {
    let cloud = cloud(spec);
    for name in ["file", "gone"] {
        fs::write(cloud.store().join(name), "old\n").unwrap();
    }
    let before = run(&cloud.workstation, READ_BEFORE);
    assert_offloaded(&before, "cat");
    assert_eq!(text(&before), "old\nfile\ngone\n4 file\n");
    run(&cloud.workstation, READ_AFTER)
}

#[test]
fn what_was_written_here_is_read_at_once_beside_an_executor_that_mounts_the_cloud() {
    let outcome = read_near(near(QUICK, &format!("{QUICK} {CONTROL}")));
    for command in ["cat", "ls", "wc"] {
        assert_offloaded(&outcome, command);
    }
    assert_eq!(text(&outcome), "longer than before\nfile\nnew\n19 file\n");
}

#[test]
fn what_was_written_here_is_old_beside_an_executor_without_the_rule() {
    let outcome =
        read_near(near(QUICK, &format!("{QUICK} {CONTROL}")).with_variable(WITHOUT.0, WITHOUT.1));
    // Of the new content as much as the old size allows may be read.
    assert!(text(&outcome).ends_with("file\ngone\n4 file\n"), "{outcome}");
}

#[test]
fn an_executor_whose_mount_cannot_forget_runs_nothing() {
    let outcome_of = |options: &str| {
        let cloud = cloud(near(QUICK, options));
        fs::write(cloud.store().join("file"), "old\n").unwrap();
        run(&cloud.workstation, "cat /mnt/cloud/file")
    };
    let outcome = outcome_of(QUICK);
    let expect =
        "near refused: commands there may see an old state: rclone at /mnt/near runs without --rc";
    assert_eq!(reason(&outcome, "cat"), expect);
    assert_eq!(text(&outcome), "old\n");
}

#[test]
fn remote_changes_are_seen_at_once_from_an_executor_that_mounts_the_cloud() {
    let options = format!("{QUICK} {CONTROL}");
    let cloud = cloud(near(&options, &options));
    // rclone 1.60 answers a request for an access control list with EIO, which sed reports here and
    // there.
    let cases: Vec<_> = by_name().into_iter().filter(|case| case.2 != "sed").collect();
    let stale =
        try_changes(&cloud.workstation, (&cloud.store(), &cloud.mount(), "/mnt/cloud"), &cases);
    assert_eq!(stale, [""; 0]);
}

#[test]
fn remote_changes_are_not_seen_without_the_rule() {
    let options = format!("{QUICK} {CONTROL}");
    let cloud = cloud(near(&options, &options).with_variable(WITHOUT.0, WITHOUT.1));
    fs::write(cloud.store().join("more"), "b\na\n").unwrap();
    let before = look(&cloud.mount());
    run(&cloud.workstation, "cd /mnt/cloud; sort -o sorted more");
    wait_for_content(&cloud.store().join("sorted"), "a\nb\n");
    assert_eq!(look(&cloud.mount()), before);
}

#[test]
fn a_copy_that_may_be_old_unnoticed_is_not_used() {
    let options = format!("{QUICK} {CONTROL}");
    let cloud = cloud(near(&options, &options));
    fs::write(cloud.store().join("more"), "b\na\n").unwrap();
    // The executor's cache keeps what its command wrote, and would not notice other content of that
    // size.
    let outcome = run(&cloud.workstation, "cd /mnt/cloud; sort -o file more; cat more");
    assert_offloaded(&outcome, "sort");
    let outcome =
        run(&cloud.workstation, "cd /mnt/cloud; echo 1 > file; echo 2 >> file; cat file; cat more");
    assert_eq!(text(&outcome), "1\n2\nb\na\n");
    let stages: Vec<_> = outcome.report().stages("cat").collect();
    assert!(
        stages[0].reason.contains("rclone may not notice that its copy of /mnt/near/file is old"),
        "{stages:?}"
    );
}
