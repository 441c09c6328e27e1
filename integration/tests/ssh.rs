//! Executors that ssh starts, configured or found by their sshfs mounts: the same answers as
//! bash's, the promises that hold for a lost connection, a word for every way in which a login can
//! go wrong, nothing left behind.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use posh_integration::explain::ExplainReport;
use posh_integration::host::{CONFIG, HOME, PROGRAMS};
use posh_integration::oracle::{SCRIPT_LIMIT, Under, assert_equal, assert_same, collect};
use posh_integration::people;
use posh_integration::process::wait_gone;
use posh_integration::running::Running;
use posh_integration::services::{WORKSTATION_KEY, read_file, write_file};
use posh_integration::wire::Profile;
use posh_integration::{Host, Lab, LabSpec, RunOutcome, Script, network};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::programs;

mod attach;
mod new_files;
mod refused;
mod same_files;
mod sshfs;

/// What the user's ssh is told, in a file: the account has the home of this machine's root.
const SSH_CONFIG: &str = "/run/lab-ssh-config";
/// Where a login on the server finds the program.
const INSTALLED: &str = "/home/user/.local/bin/posh-executor";
/// For what ends when its connection does, on a busy machine.
const LIMIT: Duration = Duration::from_secs(20);

/// A server without a listening executor, which ssh knows as `store1`.
fn lab() -> Lab {
    let lab = Lab::start(&LabSpec::servers(1).without_executors(), &programs()).unwrap();
    admit(&lab);
    let lines: String = (0..3_000)
        .map(|i| format!("line {i} {}\n", if i % 50 == 0 { "needle" } else { "hay" }))
        .collect();
    fs::write(lab.data(1).join("f"), lines).unwrap();
    lab
}

/// Makes ssh the way in.
fn admit(lab: &Lab) {
    install(&lab.servers[0].host);
    write_file(&lab.workstation, SSH_CONFIG, ssh_config("root", WORKSTATION_KEY).as_bytes())
        .unwrap();
    configure(lab, &table("ssh://store1", "/srv/s1", &format!("ssh -F {SSH_CONFIG}")));
}

fn ssh_config(user: &str, key: &str) -> String {
    let (_, address) = network::addresses(1);
    format!(
        "Host store1\nHostName {address}\nUser {user}\nIdentityFile {key}\nIdentitiesOnly yes\n\
         StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    )
}

fn table(address: &str, directory: &str, ssh: &str) -> String {
    format!(
        "[[executor]]\nname = \"store1\"\naddress = \"{address}\"\n\n\
         [[mount]]\npath = \"/mnt/s1\"\nexecutor = \"store1\"\nexport = \"{directory}\"\n\n\
         [gateway]\nssh_command = \"{ssh}\"\n"
    )
}

fn configure(lab: &Lab, table: &str) {
    write_file(&lab.workstation, CONFIG, table.as_bytes()).unwrap();
}

fn install(server: &Host) {
    let installed = server.path(INSTALLED);
    fs::create_dir_all(installed.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink(format!("{PROGRAMS}/posh-executor"), installed).unwrap();
}

/// posh with these words, such as `mounts`.
fn posh(host: &Host, words: &[&str]) -> RunOutcome {
    let mut command = host.command(host.programs().join("posh"));
    command.args(words);
    collect(host, command, &words.join(" "), SCRIPT_LIMIT).unwrap()
}

fn stdout(outcome: &RunOutcome) -> String {
    String::from_utf8_lossy(&outcome.stdout).into_owned()
}

fn assert_offloaded(report: &ExplainReport) {
    assert!(!report.pipelines.is_empty());
    let stages: Vec<_> = report.pipelines.iter().flat_map(|p| &p.stages).collect();
    assert!(stages.iter().all(|stage| stage.is_offloaded()), "{stages:#?}");
}

fn sh(host: &Host, text: &str) {
    let mut command = host.command("sh");
    command.args(["-c", text]);
    let done = collect(host, command, text, SCRIPT_LIMIT).unwrap();
    assert!(done.status.success(), "{done}");
}

/// Root's login on the server acts for each user of the workstation with their ids, as root mounts
/// the volume for all of them.
#[test]
fn what_users_make_on_a_volume_of_root_s_is_their_own() {
    let lab = lab();
    configure(
        &lab,
        &format!(
            "[[executor]]\nname = \"store1\"\naddress = \"ssh://store1\"\n\n\
             [gateway]\nssh_command = \"ssh -F {SSH_CONFIG}\"\n"
        ),
    );
    let server = &lab.servers[0].host;
    sh(server, "mkdir -p /srv/x/pub; chmod 1777 /srv/x/pub");
    let user = "setpriv --reuid 2000 --regid 2000 --clear-groups";
    let text = format!(
        "set -e; PATH={PROGRAMS}:$PATH; mkdir -p /mnt/v; posh mount store1:/srv/x /mnt/v; \
         cd /mnt/v/pub; {user} sh -ec 'echo 1 > log; echo 2 >> log; mkdir d; : > d/x'; cd /; posh umount /mnt/v"
    );
    sh(&lab.workstation, &text);
    let owners = ["log", "d", "d/x"].map(|name| {
        let found = fs::metadata(server.path(format!("/srv/x/pub/{name}"))).unwrap();
        (found.uid(), found.gid())
    });
    assert_eq!(owners, [(2000, 2000); 3]);
}

fn reasons(outcome: &RunOutcome) -> Vec<String> {
    let stages = outcome.report().pipelines.iter().flat_map(|p| &p.stages);
    stages.map(|stage| format!("{} {}", stage.placement, stage.reason)).collect()
}

/// All that runs for the way in: ssh here, and what it has started there. Not sshfs and its ssh.
fn of_the_way_in(host: &Host) -> Vec<Running> {
    let is_one = |p: &Running| p.command_line.contains("--stdio") || p.program == "posh-executor";
    host.processes().unwrap().into_iter().filter(is_one).collect()
}

fn assert_gone(processes: &[Running]) {
    for process in processes {
        assert!(wait_gone(process.pid, LIMIT).unwrap(), "{process:?} still runs");
    }
}

fn kill(pid: u32) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), Signal::KILL).unwrap();
}

#[test]
fn pipelines_give_what_bash_gives() {
    let lab = lab();
    let binary: Vec<u8> =
        (0..3_000_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    fs::write(lab.data(1).join("binary"), &binary).unwrap();
    for text in [
        "cat /mnt/s1/f | grep needle | sort -r | head -n 5; echo \"${PIPESTATUS[*]}\"",
        "cd /mnt/s1; grep -c hay f nothing; echo $?",
        "cat /mnt/s1/binary",
        "cat /mnt/s1/f | grep -v hay | tac > /mnt/s1/out; cat /mnt/s1/out; wc -l < /mnt/s1/out",
        "cat /mnt/s1/binary | head -c 100",
    ] {
        let outcome = assert_same(&lab.workstation, &Script::new(text));
        assert_offloaded(outcome.report());
    }
    // What comes from here goes there through ssh's input.
    fs::write(lab.workstation.path(HOME).join("local"), &binary).unwrap();
    let text = "cat local | cat - /mnt/s1/f | sha256sum";
    assert_same(&lab.workstation, &Script::new(text));
}

/// An ordinary user's own ~/.ssh/config is what counts; files of hers are made as hers.
#[test]
fn an_ordinary_user_logs_in_as_herself() {
    let lab = Lab::start(&LabSpec::servers(1).different(), &programs()).unwrap();
    install(&lab.servers[0].host);
    let own = |path: &str, text: &str, mode: u32| {
        write_file(&lab.workstation, path, text.as_bytes()).unwrap();
        let path = lab.workstation.path(path);
        chown(&path, Some(people::HERE), Some(people::HERE)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    };
    let ssh = format!("{}/.ssh", people::HOME);
    fs::create_dir(lab.workstation.path(&ssh)).unwrap();
    own(
        &format!("{ssh}/config"),
        &ssh_config(people::NAME, &format!("{}/key", people::RUNTIME)),
        0o600,
    );
    let table = table("ssh://store1", people::DIRECTORY, "ssh").replace("/mnt/s1", people::MOUNT);
    own(&format!("{}/mounts.toml", people::RUNTIME), &table, 0o644);
    let server = &lab.servers[0].host;
    write_file(server, format!("{}/f", people::DIRECTORY), b"one\ntwo\nthree\n").unwrap();

    let mut script = Script::new(
        "cat /mnt/u1/f | grep -n t | sort -r; tac /mnt/u1/f > /mnt/u1/out; cat /mnt/u1/out",
    );
    for (name, value) in people::Person::variables() {
        script = script.variable(name, value);
    }
    let script =
        Script { account: Some(people::HERE), directory: Some(people::HOME.into()), ..script };
    let outcome = assert_same(&lab.workstation, &script);
    assert_offloaded(outcome.report());
    let made = fs::metadata(server.path(people::DIRECTORY).join("out")).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&made), people::THERE);
}

#[test]
fn directories_are_named_as_they_are() {
    let lab = lab();
    let odd = "it's $HOME, 100% \\\"odd\\\"";
    let directory = lab.data(1).join("it's $HOME, 100% \"odd\"");
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("g"), "found\n").unwrap();
    let mount = |path: &str, export: &str| {
        format!(
            "[[mount]]\npath = \"{path}\"\nexecutor = \"store1\"\nexport = \"{export}\"\ncoherence = \"bind\"\n"
        )
    };
    let own = mount("/mnt/home", "~/own");
    let ssh = format!("ssh -F {SSH_CONFIG}");
    // The mount is what the server calls otherwise.
    let whole = table("ssh://store1", "/srv/s1", &ssh);
    let odd = table("ssh://store1", &format!("/srv/s1/{odd}"), &ssh)
        .replace("/mnt/s1", "/mnt/s1/it's $HOME, 100% \\\"odd\\\"");
    let odd = odd.split_once("\n\n").unwrap().1.split_once("[gateway]").unwrap().0;
    configure(&lab, &format!("{odd}\n{own}{whole}"));
    for host in [&lab.workstation, &lab.servers[0].host] {
        fs::create_dir_all(host.path("/mnt/home")).unwrap();
        fs::create_dir_all(host.path("/mnt/gone")).unwrap();
    }
    fs::create_dir(lab.servers[0].host.path("/home/user/own")).unwrap();
    fs::write(lab.servers[0].host.path("/home/user/own/h"), "at home\n").unwrap();
    let outcome = assert_same(
        &lab.workstation,
        &Script::new("cat \"/mnt/s1/it's \\$HOME, 100% \\\"odd\\\"/g\""),
    );
    assert_offloaded(outcome.report());
    let at_home =
        Script::new("cat /mnt/home/h").run(&lab.workstation, Under::PoshExplained).unwrap();
    assert_eq!(stdout(&at_home), "at home\n");
    assert_offloaded(at_home.report());
    // One that is missing there is named.
    assert!(posh(&lab.workstation, &["gateway", "stop"]).status.success());
    configure(&lab, &format!("{}{whole}", mount("/mnt/gone", "/srv/gone")));
    let mounts = stdout(&posh(&lab.workstation, &["mounts"]));
    let line = mounts.lines().find(|line| line.starts_with("/mnt/gone")).unwrap();
    assert!(line.contains("/srv/gone can't be opened there"), "{mounts}");
}

#[test]
fn mounts_status_and_doctor_know_it() {
    let lab = lab();
    let mounts = stdout(&posh(&lab.workstation, &["mounts"]));
    assert!(mounts.contains("store1:/srv/s1") && mounts.contains("connected"), "{mounts}");
    let status = stdout(&posh(&lab.workstation, &["status"]));
    assert!(status.contains("ssh://store1"), "{status}");
    let doctor = stdout(&posh(&lab.workstation, &["doctor"]));
    for line in [
        "ok    executor store1: store1 0.1.0 at ssh://store1",
        "ok    export store1:/srv/s1: served",
    ] {
        assert!(doctor.contains(line), "{doctor}");
    }
}

/// A pipeline that stays silent after its first line, at work through ssh.
struct Silent {
    shell: posh_integration::ChildProcess,
    stdout: BufReader<std::process::ChildStdout>,
    stderr: std::process::ChildStderr,
}

impl Silent {
    /// With both commands on the server. Placing fewer is right, too, but not what is tested: it
    /// may happen once on a busy machine, where a shell is slow to start the second.
    fn start(lab: &Lab) -> Silent {
        let first = Self::start_once(lab);
        if of_pipeline(lab).len() == 2 {
            return first;
        }
        let group = Pid::from_raw(first.shell.id().cast_signed()).unwrap();
        kill_process_group(group, Signal::KILL).unwrap();
        first.rest();
        while !of_pipeline(lab).is_empty() {
            std::thread::yield_now();
        }
        Self::start_once(lab)
    }

    fn start_once(lab: &Lab) -> Silent {
        fs::write(lab.data(1).join("log"), "hay\na needle\nhay\n").unwrap();
        let mut silent = Self::of(
            lab,
            "tail -n +1 -f /mnt/s1/log | grep --line-buffered needle; echo \"status $?\"",
        );
        assert_eq!(silent.line(), "a needle\n");
        silent
    }

    /// Another script, which has begun.
    fn of(lab: &Lab, text: &str) -> Silent {
        let mut command: Command = Script::new(text).command(&lab.workstation, Under::Posh);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut shell = lab.workstation.spawn(command).unwrap();
        let stdout = BufReader::new(shell.stdout.take().unwrap());
        let stderr = shell.stderr.take().unwrap();
        Silent { shell, stdout, stderr }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line
    }

    /// What its shell still says, to the end.
    fn rest(mut self) -> (String, String) {
        let (mut out, mut err) = (String::new(), String::new());
        std::io::Read::read_to_string(&mut self.stdout, &mut out).unwrap();
        std::io::Read::read_to_string(&mut self.stderr, &mut err).unwrap();
        self.shell.wait().unwrap();
        (out, err)
    }
}

/// On the server: what runs there for a pipeline.
fn commands(lab: &Lab) -> Vec<Running> {
    let found = of_pipeline(lab);
    assert_eq!(found.len(), 2, "{found:?}");
    found
}

fn of_pipeline(lab: &Lab) -> Vec<Running> {
    let of_it = |p: &Running| p.program == "tail" || p.program == "grep";
    lab.servers[0].host.processes().unwrap().into_iter().filter(of_it).collect()
}

/// ssh itself, not the one of sshfs.
fn the_ssh(lab: &Lab) -> Running {
    let found = of_the_way_in(&lab.workstation);
    assert_eq!(found.len(), 1, "{found:?}");
    found[0].clone()
}

/// A lost connection is never success, nothing goes on there, and the next one is made by itself.
#[test]
fn a_lost_ssh_is_made_anew() {
    let lab = lab();
    let silent = Silent::start(&lab);
    let mut there = of_the_way_in(&lab.servers[0].host);
    there.extend(commands(&lab));
    let lost = the_ssh(&lab).pid;
    kill(lost);
    assert_gone(&there);
    let (out, err) = silent.rest();
    assert!(out.starts_with("status ") && out != "status 0\n", "{out:?}");
    assert!(
        err.contains("executor store1 at ssh://store1 was lost while the command ran there"),
        "{err}"
    );

    wait_anew(&lab, lost);
    let outcome = assert_same(&lab.workstation, &Script::new("cat /mnt/s1/f | grep needle | sort"));
    assert_offloaded(outcome.report());
    // Also when nothing ran.
    let lost = the_ssh(&lab).pid;
    kill(lost);
    wait_anew(&lab, lost);
    let outcome = assert_same(&lab.workstation, &Script::new("cat /mnt/s1/f | grep needle | sort"));
    assert_offloaded(outcome.report());
}

/// Waits until a command runs on the server, which no message tells.
fn wait_there(lab: &Lab, program: &str) -> Running {
    let end = Instant::now() + LIMIT;
    loop {
        let found =
            lab.servers[0].host.processes().unwrap().into_iter().find(|p| p.program == program);
        if let Some(found) = found {
            return found;
        }
        assert!(Instant::now() < end, "{program} does not run there");
    }
}

/// What writes is neither gone on with nor run again, and ends there at once: an executor that ssh
/// has started has one connection. A redirect that is its own would be repeated if anybody took the
/// next executor for a restarted one.
#[test]
fn a_lost_ssh_ends_what_writes() {
    let lab = lab();
    // Minutes of work, and nothing on the disk.
    fs::File::create(lab.data(1).join("large")).unwrap().set_len(200 << 30).unwrap();
    let shell = Silent::of(&lab, "sha256sum /mnt/s1/large > /mnt/s1/out; echo \"status $?\"");
    let there = wait_there(&lab, "sha256sum");
    let lost = the_ssh(&lab).pid;
    kill(lost);
    // Well before the grace of other runs is over.
    assert!(wait_gone(there.pid, Duration::from_secs(6)).unwrap(), "{there:?} still runs");
    let (out, err) = shell.rest();
    assert_eq!(out, "status 125\n", "{err}");
    // The process is there before the gateway has heard so.
    let words =
        ["was lost while the command ran there", "was lost as the command was started there"];
    let is_said = words.iter().any(|words| err.contains(words));
    assert!(
        err.starts_with("posh: sha256sum: executor store1 at ssh://store1 ") && is_said,
        "{err}"
    );
    assert!(
        err.contains("how far the command came is not known, and it is not run again"),
        "{err}"
    );
    assert_eq!(fs::read(lab.data(1).join("out")).unwrap(), b"");
    wait_anew(&lab, lost);
    assert_offloaded(
        assert_same(&lab.workstation, &Script::new("wc -l < /mnt/s1/f > /mnt/s1/out")).report(),
    );
}

/// What only reads is run again here, and what was delivered is left out.
#[test]
fn a_lost_ssh_repeats_what_reads() {
    let lab = lab();
    // More than is ever on its way, so that the command there has not ended.
    let content: Vec<u8> =
        (0..40_000_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    fs::write(lab.data(1).join("content"), &content).unwrap();
    let gate = lab.workstation.path(HOME).join("gate");
    nix::unistd::mkfifo(&gate, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let text = "cat /mnt/s1/content | { head -c 100 | wc -c; read -r line < gate; sha256sum; }; \
                echo \"${PIPESTATUS[*]}\"";
    let mut shell = Silent::of(&lab, text);
    assert_eq!(shell.line(), "100\n");
    let there = wait_there(&lab, "cat");
    kill(the_ssh(&lab).pid);
    assert_gone(&[there]);
    fs::write(gate, "go on\n").unwrap();
    let (out, err) = shell.rest();
    fs::write(lab.data(1).join("rest"), &content[100..]).unwrap();
    let plain = Script::new("sha256sum < /mnt/s1/rest; echo 0 0")
        .run(&lab.workstation, Under::Shell)
        .unwrap();
    assert_eq!((out, err), (stdout(&plain), String::new()));
}

/// Waits for another ssh than the `lost` one, and for the executor behind it. posh is
/// asked again and again: nothing else tells.
fn wait_anew(lab: &Lab, lost: u32) {
    let end = Instant::now() + LIMIT;
    loop {
        let is_other = of_the_way_in(&lab.workstation).iter().any(|ssh| ssh.pid != lost);
        let status = stdout(&posh(&lab.workstation, &["status"]));
        if is_other && status.contains("connected") {
            return;
        }
        assert!(Instant::now() < end, "{status}");
    }
}

#[test]
fn a_gateway_that_ends_takes_all_of_it_along() {
    let lab = lab();
    // In order, in the middle of nothing.
    assert_offloaded(assert_same(&lab.workstation, &Script::new("cat /mnt/s1/f | wc -l")).report());
    let (here, there) = (of_the_way_in(&lab.workstation), of_the_way_in(&lab.servers[0].host));
    assert!(!here.is_empty() && !there.is_empty());
    assert!(posh(&lab.workstation, &["gateway", "stop"]).status.success());
    assert_gone(&here);
    assert_gone(&there);
    // Suddenly, in the middle of a run.
    let silent = Silent::start(&lab);
    let (here, there) = (of_the_way_in(&lab.workstation), of_the_way_in(&lab.servers[0].host));
    let running = commands(&lab);
    let gateway = lab
        .workstation
        .processes()
        .unwrap()
        .into_iter()
        .find(|p| p.program == "posh-gateway")
        .unwrap();
    kill(gateway.pid);
    for processes in [&here, &there, &running] {
        assert_gone(processes);
    }
    let (out, _) = silent.rest();
    assert!(out.starts_with("status ") && out != "status 0\n", "{out:?}");
}

/// The descriptors that carry the protocol are no command's.
#[test]
fn commands_have_none_of_the_connection() {
    let lab = lab();
    let silent = Silent::start(&lab);
    for command in commands(&lab) {
        let directory = format!("/proc/{}/fd", command.pid);
        for entry in fs::read_dir(&directory).unwrap() {
            let target = fs::read_link(entry.unwrap().path()).unwrap();
            assert!(!target.to_string_lossy().starts_with("socket:"), "{command:?} has {target:?}");
        }
    }
    let executor = of_the_way_in(&lab.servers[0].host)
        .into_iter()
        .find(|p| p.command_line.contains("--stdio"))
        .unwrap();
    let input = fs::read_link(format!("/proc/{}/fd/0", executor.pid)).unwrap();
    assert_eq!(input.to_str(), Some("/dev/null"));
    let [output, error] =
        [1, 2].map(|fd| fs::read_link(format!("/proc/{}/fd/{fd}", executor.pid)).unwrap());
    assert_eq!(output, error);
    kill(the_ssh(&lab).pid);
    silent.rest();
}

/// An administrator's key that may do nothing else: what it serves is not ours to say.
#[test]
fn a_key_with_a_command_of_its_own() {
    let lab = lab();
    let server = &lab.servers[0].host;
    let keys = "/run/lab-ssh/authorized_keys";
    let key = String::from_utf8(read_file(server, keys).unwrap()).unwrap();
    let command = format!("{PROGRAMS}/posh-executor --stdio --read-only --export /srv/s1");
    write_file(server, keys, format!("restrict,command=\"{command}\" {key}").as_bytes()).unwrap();
    let outcome = assert_same(&lab.workstation, &Script::new("cat /mnt/s1/f | grep needle | sort"));
    assert_offloaded(outcome.report());
    let outcome = assert_same(
        &lab.workstation,
        &Script::new("tac /mnt/s1/f > /mnt/s1/out; sort /mnt/s1/out | head -n 2"),
    );
    assert!(
        outcome.report().stages("tac").all(|stage| !stage.is_offloaded()),
        "{:?}",
        outcome.report()
    );
}

/// Pings wait behind the data of a slow link; neither side may take that for the other's end.
#[test]
fn a_link_of_one_megabit_carries_a_megabyte() {
    for through_ssh in [false, true] {
        let slow = Profile { round_trip: Duration::from_millis(20), megabits: 1 };
        let lab = Lab::start(&LabSpec::servers(1).link(slow), &programs()).unwrap();
        if through_ssh {
            admit(&lab);
        }
        let content: Vec<u8> =
            (0..1_000_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        fs::write(lab.data(1).join("content"), &content).unwrap();
        let ways_in = || if through_ssh { of_the_way_in(&lab.workstation) } else { Vec::new() };
        let mut before = None;
        for _ in 0..2 {
            let outcome = Script::new("cat /mnt/s1/content")
                .run(&lab.workstation, Under::PoshExplained)
                .unwrap();
            assert!(
                outcome.status.success() && outcome.stdout == content,
                "{:?}",
                String::from_utf8_lossy(&outcome.stderr)
            );
            assert_offloaded(outcome.report());
            assert_eq!(*before.get_or_insert_with(ways_in), ways_in());
        }
    }
}
