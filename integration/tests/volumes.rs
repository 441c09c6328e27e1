//! Volumes that the gateway serves: mounted by word and by configuration, used by commands here and
//! there, and taken out of the tree whatever became of the gateway.

mod applications;
mod at_hand;
mod interleavings;
mod kept;
mod links;
mod ordinary;

use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use posh_integration::host::CONFIG;
use posh_integration::oracle::Under;
use posh_integration::wire::Profile;
use posh_integration::{Host, Lab, LabSpec, Script};

use crate::programs;

const VOLUME: &str = "/mnt/volume";

/// Long enough that a second round trip can't be taken for a busy machine.
const FAR: Duration = Duration::from_millis(250);

/// A gateway that has just been started still connects.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs `posh` with these words.
fn posh(host: &Host, words: &[&str]) -> Output {
    let mut command = host.command(host.programs().join("posh"));
    command.args(words).stdout(Stdio::piped()).stderr(Stdio::piped());
    host.run(move || command.output()).unwrap()
}

fn must(host: &Host, words: &[&str]) -> String {
    let output = posh(host, words);
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs shell text on the workstation, without posh.
fn shell(host: &Host, text: &str) -> String {
    let mut command = host.command("bash");
    command.args(["-c", text]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = host.run(move || command.output()).unwrap();
    assert!(output.status.success(), "{text}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A laboratory with the first server's export also mounted as a volume.
fn mounted() -> Lab {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    shell(&lab.workstation, &format!("mkdir -p {VOLUME}"));
    must(&lab.workstation, &["mount", "store1:s1", VOLUME]);
    lab
}

fn mounts(host: &Host) -> Vec<String> {
    let info = shell(host, "cat /proc/self/mountinfo");
    info.lines().filter(|line| line.contains(&format!(" {VOLUME} "))).map(str::to_owned).collect()
}

#[test]
fn a_volume_is_a_mount_with_an_owner_until_it_is_unmounted() {
    let lab = mounted();
    let host = &lab.workstation;
    let found = mounts(host);
    assert!(found.len() == 1 && found[0].contains(" - fuse.posh store1:s1 "), "{found:?}");
    assert!(
        must(host, &["mounts"]).contains(&format!("{VOLUME}  fuse.posh   store1:s1")),
        "{}",
        must(host, &["mounts"])
    );
    assert!(must(host, &["volumes"]).contains("mounted"));
    let again = posh(host, &["mount", "store1:s1", VOLUME]);
    assert!(
        !again.status.success() && String::from_utf8_lossy(&again.stderr).contains("mounted"),
        "{again:?}"
    );
    // A gateway with a volume is needed, though there is no session.
    fs::write(lab.data(1).join("f"), "text\n").unwrap();
    assert_eq!(shell(host, &format!("cat {VOLUME}/f")), "text\n");
    let server = &lab.servers[0].host;
    assert!(is_watched(server));
    must(host, &["umount", VOLUME]);
    assert_eq!(mounts(host), [""; 0]);
    assert!(!must(host, &["volumes"]).contains(VOLUME));
    // Being watched costs the server's other programs something; nobody asks for it any more.
    let end = Instant::now() + PATIENCE;
    while is_watched(server) {
        assert!(Instant::now() < end, "the server's file system is still watched");
        sleep(Duration::from_millis(20));
    }
}

/// Whether a program of the host watches a file system (fanotify(7)).
fn is_watched(host: &Host) -> bool {
    let watches = |pid: u32| {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let mut targets =
            descriptors.filter_map(|descriptor| fs::read_link(descriptor.path()).ok());
        targets.any(|target| target.as_os_str() == "anon_inode:[fanotify]")
    };
    host.processes().unwrap().iter().any(|process| watches(process.pid))
}

#[test]
fn what_cannot_be_mounted_is_said() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let host = &lab.workstation;
    shell(host, "mkdir -p /mnt/volume; touch /mnt/file");
    let check = |source: &str, place: &str, expect: &str| {
        let output = posh(host, &["mount", source, place]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(expect), "{source} {place}: {said}");
    };
    check("store9:s1", VOLUME, "no executor is named store9; there are store1");
    check("store1:none", VOLUME, "none");
    check("store1:s1", "/mnt/file", "/mnt/file can't be a mount point");
    check("store1:s1", "/mnt/none", "/mnt/none can't be a mount point");
    check("store1:s1", "/mnt/s1", "[[mount]]");
    let output = posh(host, &["umount", VOLUME]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("no volume is mounted"), "{output:?}");
}

/// Commands here and there in turns, in one session; what they print is what bash prints on a local
/// directory.
#[test]
fn commands_here_and_there_see_what_the_others_did() {
    let lab = mounted();
    let text = "for i in 1 2 3 4 5 6 7 8; do
            echo line $i >> f; printf '%s\\n' b$i a$i > g
            grep -c line f; sort g > h; read -r first < h; echo $first; rm g
            [ -e g ] || echo gone; sort h | tail -n 1 > k; mapfile -t lines < k; echo ${lines[0]}
            mkdir d$i; cp h d$i/copy; read -r copied < d$i/copy; echo $copied; gzip -k d$i/copy
            for name in d$i/*; do echo $name; done; tac f > r; read -r last < r; echo $last; rm -r d$i; echo d*
        done";
    let on = |place: &str, under| {
        let script = Script::new(format!("mkdir -p {place}; cd {place}; {text}"));
        script.run(&lab.workstation, under).unwrap()
    };
    let (plain, ours) =
        (on("/tmp/plain", Under::Shell), on(&format!("{VOLUME}/w"), Under::PoshExplained));
    assert_eq!(String::from_utf8_lossy(&ours.stdout), String::from_utf8_lossy(&plain.stdout));
    let report = ours.report();
    for command in ["grep", "sort", "tac", "gzip", "cp"] {
        assert!(report.stages(command).count() > 0, "{report:?}");
        assert!(report.stages(command).all(|stage| stage.is_offloaded()), "{command}: {report:?}");
    }
}

/// What a command changed is told on its way back, and nothing is asked before it.
#[test]
fn a_command_on_a_volume_takes_one_round_trip() {
    let lab = Lab::start(
        &LabSpec::servers(1).link(Profile { round_trip: FAR, ..Profile::WAN }),
        &programs(),
    )
    .unwrap();
    let host = &lab.workstation;
    fs::write(lab.data(1).join("f"), "b\na\n").unwrap();
    shell(host, &format!("mkdir -p {VOLUME}"));
    must(host, &["mount", "store1:s1", VOLUME]);
    // In turns: one only reads, the other makes a file that was removed here; what it made is seen
    // here without a question.
    let text = format!(
        "cd {VOLUME}; sort -o g f
         for i in 1 2 3 4 5 6; do
             a=$EPOCHREALTIME; grep -c a f > /dev/null; b=$EPOCHREALTIME; sort -o g f; c=$EPOCHREALTIME
             mapfile -t lines < g; echo ${{lines[0]}} $((${{b/./}} - ${{a/./}})) $((${{c/./}} - ${{b/./}}))
         done"
    );
    let output = Script::new(text).run(host, Under::PoshExplained).unwrap();
    assert!(
        output
            .report()
            .stages("grep")
            .chain(output.report().stages("sort"))
            .all(|stage| stage.is_offloaded())
    );
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let rows: Vec<Vec<&str>> = said.lines().map(|line| line.split(' ').collect()).collect();
    assert!(rows.len() == 6 && rows.iter().all(|row| row[0] == "a"), "{said}");
    for column in [1, 2] {
        let fastest = rows
            .iter()
            .map(|row| row[column].parse().map(Duration::from_micros).unwrap())
            .min()
            .unwrap();
        // Two would be twice as much; the rest is the machine's.
        assert!(fastest < FAR * 17 / 10, "{said}");
    }
}

/// A local file system keeps a file for whoever has it open.
#[test]
fn what_is_open_is_read_on_after_a_command_on_the_server_has_replaced_it() {
    let lab = mounted();
    let text = format!(
        "mkdir {VOLUME}/new; cd {VOLUME}/new; seq 1000 > n; sync .; exec 3< n; read -r first <&3
         sed -i s/1/x/ n; echo $first; head -n 2 <&3; tail -n 1 <&3; head -n 1 n"
    );
    let outcome = Script::new(text).run(&lab.workstation, Under::PoshExplained).unwrap();
    assert_eq!(String::from_utf8_lossy(&outcome.stdout), "1\n2\n3\n1000\nx\n", "{outcome}");
    assert!(outcome.report().stages("sed").all(|stage| stage.is_offloaded()), "{outcome}");
}

#[test]
fn git_keeps_a_repository_on_a_volume() {
    let lab = mounted();
    let text = format!(
        "cd {VOLUME}; export GIT_CONFIG_GLOBAL=/dev/null; git init -q one; cd one; git config user.name n; git config user.email e
         for i in $(seq 30); do echo $i > f$i; done; git add .; git commit -q -m first
         cd ..; git clone -q one two; cd two; git rm -q f1; git -c user.name=n -c user.email=e commit -q -m second
         git gc -q; git fsck --strict; git status --porcelain"
    );
    assert_eq!(shell(&lab.workstation, &text), "");
    assert!(lab.data(1).join("two/f2").exists() && !lab.data(1).join("two/f1").exists());
}

#[test]
fn the_configuration_names_volumes_and_an_end_of_the_gateway_unmounts_them() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let host = &lab.workstation;
    fs::write(lab.data(1).join("f"), "text\n").unwrap();
    let volume = format!(
        "[[volume]]\npath = \"{VOLUME}\"\nexecutor = \"store1\"\nexport = \"s1\"\nread_only = true\n"
    );
    fs::write(host.path(CONFIG), lab.mount_table() + &volume).unwrap();
    shell(host, &format!("mkdir -p {VOLUME}"));
    must(host, &["gateway", "start"]);
    let began = Instant::now();
    while mounts(host).is_empty() {
        assert!(began.elapsed() < PATIENCE, "{}", must(host, &["volumes"]));
    }
    assert_eq!(
        shell(host, &format!("cat {VOLUME}/f; touch {VOLUME}/g 2>&1 | grep -o Read-only")),
        "text\nRead-only\n"
    );
    assert_eq!(must(host, &["gateway", "stop"]), "the gateway has ended\n");
    assert_eq!(mounts(host), [""; 0]);
}

/// A volume refuses it (EXDEV), so that commands do not use it on the server either.
#[test]
fn what_is_mounted_below_an_export_is_as_unreachable_for_commands_as_for_the_shell() {
    let lab = mounted();
    let host = &lab.workstation;
    fs::create_dir_all(lab.data(1).join("d/disk")).unwrap();
    fs::write(lab.data(1).join("d/f"), "text\n").unwrap();
    let (server, disk) = (&lab.servers[0].host, "/srv/s1/d/disk");
    shell(server, &format!("mount -t tmpfs disk {disk}; echo text of the disk > {disk}/f"));
    shell(server, "ln -s d/disk/f /srv/s1/link");
    for (text, is_offloaded) in [
        ("sort d/f", true),
        ("grep -r text d", false),
        ("grep text d/disk/f", false),
        ("sort link", false),
        ("ls -l d | tail -n 1", false),
        ("find d -name f | sort", false),
        ("cp -r d copied; find copied | sort; rm -r copied", false),
        ("du -a d", false),
    ] {
        let script = Script::new(format!("cd {VOLUME}; {text}; echo ${{PIPESTATUS[*]}}"));
        let plain = script.run(host, Under::Shell).unwrap();
        let ours = script.run(host, Under::PoshExplained).unwrap();
        let texts = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert_eq!(texts(&ours.stdout), texts(&plain.stdout), "{text}");
        assert_eq!(texts(&ours.stderr), texts(&plain.stderr), "{text}");
        let first = text.split(' ').next().unwrap();
        let report = ours.report();
        assert!(report.stages(first).all(|s| s.is_offloaded() == is_offloaded), "{report:?}");
    }
    shell(server, &format!("umount {disk}"));
    let again = Script::new(format!("cd {VOLUME}; grep -r text d"));
    let ours = again.run(host, Under::PoshExplained).unwrap();
    assert!(ours.report().stages("grep").all(|stage| stage.is_offloaded()));
}

#[test]
fn what_is_mounted_over_a_volume_is_left_alone() {
    let lab = mounted();
    let host = &lab.workstation;
    shell(host, &format!("mount -t tmpfs over {VOLUME}; touch {VOLUME}/f"));
    let refused = posh(host, &["umount", VOLUME]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("mounted over it"), "{refused:?}");
    must(host, &["gateway", "stop"]);
    assert_eq!(shell(host, &format!("ls {VOLUME}; umount {VOLUME}")), "f\n");
    must(host, &["umount", VOLUME]);
    assert_eq!(mounts(host), [""; 0]);
}

/// By whatever program: it comes back with its journal, and what it had read.
#[test]
fn what_was_unmounted_just_now_can_be_mounted_again() {
    let lab = mounted();
    let host = &lab.workstation;
    shell(host, &format!("echo text > {VOLUME}/f; cat {VOLUME}/f"));
    for _ in 0..60 {
        shell(host, &format!("umount {VOLUME}"));
        must(host, &["mount", "store1:s1", VOLUME]);
        assert_eq!(shell(host, &format!("cat {VOLUME}/f")), "text\n");
    }
    // Otherwise the log says that no journal, or nothing that is read, is kept.
    assert_eq!(
        shell(host, "cat /run/user/posh/gateway-*.log > /tmp/log && ! grep 'is kept' /tmp/log"),
        ""
    );
}

/// A program that has a file and the directory of the volume open is no reason to wait: it goes on
/// with the former volume, whose journal and disk are the next one's.
#[test]
fn what_is_unmounted_while_in_use_can_be_mounted_again() {
    let lab = mounted();
    let host = &lab.workstation;
    shell(host, "mkfifo /tmp/go");
    for way in ["posh", "another"] {
        let file = format!("{VOLUME}/{way}/file");
        let hold = format!(
            "exec 3< {VOLUME} 4> {file}; echo one >&4; : > /tmp/{way}-held; read -r _ < /tmp/go"
        );
        let holder = format!(
            "{{ {hold}; echo two >&4; exec 4>&-; : > /tmp/{way}-closed; }} > /tmp/{way} 2>&1 &"
        );
        shell(
            host,
            &format!("mkdir {VOLUME}/{way}; {holder} while [ ! -e /tmp/{way}-held ]; do :; done"),
        );
        if way == "posh" {
            must(host, &["umount", VOLUME]);
        } else {
            shell(host, &format!("umount -l {VOLUME}"));
        }
        assert_eq!(mounts(host), [""; 0]);
        let listed = must(host, &["volumes"]);
        // Another program waits for nothing that is on its way; that is told, and nothing is called
        // mounted.
        let is_told =
            |line: &str| way == "another" && line.contains("not mounted: files of it are open");
        assert!(
            listed.lines().all(|line| !line.contains(VOLUME) || is_told(line)),
            "{way}: {listed}"
        );
        must(host, &["mount", "store1:s1", VOLUME]);
        assert_eq!(
            shell(
                host,
                &format!("cat {file}; mkdir {VOLUME}/{way}/new; echo 1 > {VOLUME}/{way}/new/f")
            ),
            "one\n"
        );
        shell(
            host,
            &format!(
                "echo > /tmp/go; while [ ! -e /tmp/{way}-closed ]; do :; done; cat /tmp/{way}"
            ),
        );
        assert_eq!(shell(host, &format!("cat {file}; cat /tmp/{way}")), "one\ntwo\n");
        assert_eq!(fs::read_to_string(lab.data(1).join(way).join("file")).unwrap(), "one\ntwo\n");
    }
    // Otherwise the log says that no journal, or nothing that is read, is kept.
    assert_eq!(
        shell(host, "cat /run/user/posh/gateway-*.log > /tmp/log && ! grep 'is kept' /tmp/log"),
        ""
    );
}

#[test]
fn a_killed_gateway_leaves_a_mount_that_can_be_replaced_and_removed() {
    let lab = mounted();
    let host = &lab.workstation;
    shell(host, &format!("echo text > {VOLUME}/closed"));
    let pid = |host: &Host| {
        let status = must(host, &["status", "--json"]);
        let pid = status.lines().find_map(|line| line.trim().strip_prefix("\"pid\": ")).unwrap();
        pid.trim_end_matches(',').to_owned()
    };
    let kill = |host: &Host| {
        shell(host, &format!("kill -9 {0}; while kill -0 {0} 2>/dev/null; do :; done", pid(host)))
    };
    kill(host);
    assert_eq!(mounts(host).len(), 1);
    must(host, &["mount", "store1:s1", VOLUME]);
    assert_eq!(
        (mounts(host).len(), shell(host, &format!("cat {VOLUME}/closed"))),
        (1, "text\n".to_owned())
    );
    // While what was closed is on its way.
    let make =
        format!("mkdir {VOLUME}/new; for i in $(seq 300); do echo $i > {VOLUME}/new/$i; done");
    shell(
        host,
        &format!("{make}; kill -9 {0}; while kill -0 {0} 2>/dev/null; do :; done", pid(host)),
    );
    must(host, &["mount", "store1:s1", VOLUME]);
    assert_eq!(shell(host, &format!("cat {VOLUME}/new/* | wc -l")), "300\n");
    kill(host);
    must(host, &["umount", VOLUME]);
    assert_eq!(mounts(host), [""; 0]);
    assert!(Path::new(&lab.data(1)).join("closed").exists());
}

/// A figure of `posh volumes`, of all of them.
fn figure(host: &Host, name: &str) -> u64 {
    let volumes: serde_json::Value =
        serde_json::from_str(&must(host, &["volumes", "--json"])).unwrap();
    volumes.as_array().into_iter().flatten().filter_map(|volume| volume[name].as_u64()).sum()
}

/// What is kept of a volume's contents, in bytes.
fn kept_bytes(host: &Host) -> u64 {
    figure(host, "cached_bytes")
}

/// The command reads its standard input first, which has nothing to read before the files are
/// there.
#[test]
fn what_a_command_here_is_going_to_read_is_fetched_before_it_opens_it() {
    let lab = mounted();
    let host = &lab.workstation;
    const FILES: usize = 100;
    const FILE_BYTES: usize = 4096;
    fs::create_dir(lab.data(1).join("in")).unwrap();
    for number in 0..FILES {
        fs::write(lab.data(1).join(format!("in/{number:03}")), vec![b'x'; FILE_BYTES]).unwrap();
    }
    shell(host, "echo here > /tmp/here; mkfifo /tmp/wait");
    let text = format!(
        "{{ read -r line < /tmp/wait; echo $line; }} | cat - {VOLUME}/in/* /tmp/here | tail -c 9"
    );
    let outcome = std::thread::scope(|scope| {
        let running = scope.spawn(|| Script::new(text).run(host, Under::PoshExplained).unwrap());
        let began = Instant::now();
        while kept_bytes(host) < (FILES * FILE_BYTES) as u64 {
            if began.elapsed() > PATIENCE {
                break;
            }
        }
        let kept = kept_bytes(host);
        shell(host, "echo go > /tmp/wait");
        let outcome = running.join().unwrap();
        assert!(kept >= (FILES * FILE_BYTES) as u64, "only {kept} bytes were fetched: {outcome}");
        outcome
    });
    assert_eq!(String::from_utf8_lossy(&outcome.stdout), "xxxxhere\n");
    let report = outcome.report();
    let words = format!("what it reads on {VOLUME} is fetched ahead");
    assert!(
        report.stages("cat").any(|stage| !stage.is_offloaded() && stage.reason.contains(&words)),
        "{report:?}"
    );
}
