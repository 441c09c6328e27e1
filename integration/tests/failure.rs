//! Sudden ends: of a stage, the gateway, the shell, the reader, the executor. What
//! ran remotely ends within a second, or goes on where bash's own would.

use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Stdio};
use std::time::{Duration, Instant};

use posh_integration::oracle::Under;
use posh_integration::process::wait_gone;
use posh_integration::quiet::processes_left;
use posh_integration::running::Running;
use posh_integration::{ChildProcess, Host, Lab, LabSpec, Script};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::programs;

/// The promise for what a killed stage ran remotely.
const PROMISE: Duration = Duration::from_secs(1);

/// The same on a machine with more to do than processors: all of it takes as much longer.
fn promise() -> Duration {
    let load = fs::read_to_string("/proc/loadavg").unwrap();
    let load: f64 = load.split(' ').next().unwrap().parse().unwrap();
    let processors = std::thread::available_parallelism().unwrap().get();
    PROMISE.mul_f64((load / processors as f64).max(1.0))
}

/// A pipeline that stays silent after its first line, at work on the server (under
/// the shell alone: on the workstation, since a mount shows new lines after 20 s only).
struct Silent {
    // Dropped in this order: the laboratory ends when its processes are reaped.
    shell: ChildProcess,
    stdout: BufReader<ChildStdout>,
    log: PathBuf,
    lab: Lab,
}

impl Silent {
    fn start(under: Under) -> Silent {
        let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
        let (seen, log) = match under {
            Under::Shell => ("/home/user/log", lab.workstation.path("/home/user/log")),
            Under::Posh | Under::PoshExplained => ("/mnt/s1/log", lab.data(1).join("log")),
        };
        fs::write(&log, "hay\na needle\nhay\n").unwrap();
        let text =
            format!("tail -n +1 -f {seen} | grep --line-buffered needle; echo \"status $?\"");
        let mut command = Script::new(text).command(&lab.workstation, under);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut shell = lab.workstation.spawn(command).unwrap();
        let mut stdout = BufReader::new(shell.stdout.take().unwrap());
        // Its first line proves that it runs.
        assert_eq!(read_line(&mut stdout), "a needle\n");
        Silent { shell, stdout, log, lab }
    }

    fn server(&self) -> &Host {
        &self.lab.servers[0].host
    }

    /// `tail` and `grep` as they run on the server.
    fn remote(&self) -> [Running; 2] {
        ["tail", "grep"].map(|name| find(self.server(), name))
    }

    /// What stands for them on the workstation.
    fn stages(&self) -> [Running; 2] {
        ["tail", "grep"].map(|name| find(&self.lab.workstation, name))
    }

    fn append(&self, text: &str) {
        append(&self.log, text);
    }

    /// Nothing is known of how the commands would have ended: that is an error, never a success.
    fn assert_given_up(&mut self, remote: &[Running]) {
        assert_gone(remote);
        let status = read_line(&mut self.stdout);
        assert!(status.starts_with("status ") && status != "status 0\n", "{status:?}");
    }
}

fn append(log: &Path, text: &str) {
    let mut log = OpenOptions::new().append(true).open(log).unwrap();
    log.write_all(text.as_bytes()).unwrap();
}

fn read_line(reader: &mut impl BufRead) -> String {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    line
}

fn find(host: &Host, name: &str) -> Running {
    let processes = host.processes().unwrap();
    let found = processes.iter().find(|p| p.command_line.split(' ').next() == Some(name));
    found.unwrap_or_else(|| panic!("{name} does not run on {}: {processes:?}", host.name())).clone()
}

fn kill(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

fn kill_group(process: &ChildProcess, signal: Signal) {
    kill_process_group(Pid::from_raw(process.id().cast_signed()).unwrap(), signal).unwrap();
}

fn assert_gone(processes: &[Running]) {
    for process in processes {
        assert!(wait_gone(process.pid, promise()).unwrap(), "{process:?} still runs");
    }
}

#[test]
fn a_killed_first_stage() {
    let mut run = Silent::start(Under::Posh);
    let remote = run.remote();
    kill(run.stages()[0].pid, Signal::KILL);
    // The first ends with its stage, the second then has nothing to read; grep's status is the
    // pipeline's.
    assert_gone(&remote);
    assert_eq!(read_line(&mut run.stdout), "status 0\n");
    assert!(run.shell.wait().unwrap().success());
}

#[test]
fn a_killed_last_stage() {
    let mut run = Silent::start(Under::Posh);
    let remote = run.remote();
    kill(run.stages()[1].pid, Signal::KILL);
    // GNU tail notices that its reader has gone (coreutils 8.28), so both end, here as in bash.
    assert_gone(&remote);
    assert_eq!(read_line(&mut run.stdout), "status 137\n");
}

#[test]
fn a_killed_gateway() {
    let mut run = Silent::start(Under::Posh);
    let remote = run.remote();
    kill(find_gateway(&run.lab.workstation).pid, Signal::KILL);
    run.assert_given_up(&remote);
}

/// The shell that started it may have had a limit on the sizes of files.
#[test]
fn a_gateway_is_not_ended_by_a_limit_on_file_sizes() {
    let mut run = Silent::start(Under::Posh);
    let remote = run.remote();
    kill(find_gateway(&run.lab.workstation).pid, Signal::XFSZ);
    kill(run.stages()[0].pid, Signal::KILL);
    assert_gone(&remote);
    assert_eq!(read_line(&mut run.stdout), "status 0\n");
    assert!(run.shell.wait().unwrap().success());
}

fn find_gateway(host: &Host) -> Running {
    let processes = host.processes().unwrap();
    let gateway = processes.iter().find(|p| p.program == "posh-gateway");
    gateway.unwrap_or_else(|| panic!("no gateway runs: {processes:?}")).clone()
}

#[test]
fn a_killed_executor() {
    let mut run = Silent::start(Under::Posh);
    let remote = run.remote();
    kill(executors(run.server()).daemon, Signal::KILL);
    run.assert_given_up(&remote);
}

/// The runner of a mount table is a guard, a keeper, and a supervisor for each run: a run ends with
/// any of them.
#[test]
fn a_killed_runner() {
    for at in 0..3 {
        let mut run = Silent::start(Under::Posh);
        let remote = run.remote();
        kill(executors(run.server()).runners[at], Signal::KILL);
        run.assert_given_up(&remote);
    }
}

/// The supervisor that waits for a run has none to lose, and is not needed for the next one.
#[test]
fn a_killed_spare() {
    let mut run = Silent::start(Under::Posh);
    let remote = run.remote();
    kill(executors(run.server()).spare, Signal::KILL);
    run.append("a needle after it\n");
    assert_eq!(read_line(&mut run.stdout), "a needle after it\n");
    let next = Script::new("grep -c needle /mnt/s1/log")
        .run(&run.lab.workstation, Under::PoshExplained)
        .unwrap();
    assert_eq!(next.stdout, b"2\n");
    assert!(
        next.report().stages("grep").all(|s| s.is_offloaded())
            && next.report().stages("grep").count() == 1
    );
    assert_eq!(remote, run.remote(), "they are the same processes as before");
    kill_group(&run.shell, Signal::TERM);
    assert_gone(&remote);
    run.shell.wait().unwrap();
}

/// The executor's processes while one run is on it.
#[derive(Debug)]
struct Executors {
    daemon: u32,
    /// Guard, keeper and supervisor: those that have children, in the order in which they were
    /// started.
    runners: [u32; 3],
    spare: u32,
}

/// Waits for the supervisor of the next run, which is forked when one has got its own.
fn executors(host: &Host) -> Executors {
    let limit = Instant::now() + promise();
    loop {
        let found = look_for_executors(host);
        match (&found.0[..], &found.1[..], &found.2[..]) {
            ([daemon], &[guard, keeper, supervisor], [spare]) => {
                return Executors {
                    daemon: *daemon,
                    runners: [guard, keeper, supervisor],
                    spare: *spare,
                };
            }
            _ => assert!(Instant::now() < limit, "not one of each: {found:?}"),
        }
    }
}

/// Daemons, runners' processes with children, and those without.
fn look_for_executors(host: &Host) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let all = host.processes().unwrap().into_iter().filter(|p| p.program == "posh-executor");
    let (runners, daemons): (Vec<_>, Vec<_>) =
        all.partition(|p| p.command_line.ends_with(" runner"));
    let is_childless = |p: &Running| {
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", p.pid));
        children.is_ok_and(|children| children.is_empty())
    };
    let (spares, runners): (Vec<_>, Vec<_>) = runners.into_iter().partition(is_childless);
    let pids = |found: Vec<Running>| {
        let mut pids: Vec<_> = found.iter().map(|p| p.pid).collect();
        pids.sort_unstable();
        pids
    };
    (pids(daemons), pids(runners), pids(spares))
}

#[test]
fn an_interrupted_group() {
    for (signal, name) in
        [(Signal::INT, "SIGINT"), (Signal::TERM, "SIGTERM"), (Signal::HUP, "SIGHUP")]
    {
        let mut run = Silent::start(Under::Posh);
        let remote = run.remote();
        kill_group(&run.shell, signal);
        assert_gone(&remote);
        assert_eq!(run.shell.wait().unwrap().signal(), Some(signal.as_raw()), "{name}");
    }
}

/// bash's children outlive it and go on; so do posh's, and their remote commands with them.
#[test]
fn a_killed_shell() {
    for under in [Under::Shell, Under::Posh] {
        let mut run = Silent::start(under);
        run.shell.kill().unwrap();
        run.shell.wait().unwrap();
        run.append("another needle\n");
        assert_eq!(read_line(&mut run.stdout), "another needle\n", "{under:?}");
        let stages = run.stages();
        // Now nobody reads: the next line ends grep, and that ends tail.
        let Silent { lab, stdout, log, .. } = run;
        drop(stdout);
        append(&log, "a needle for nobody\n");
        // The shell alone is held to no promise: without inotify(7), tail looks now and then
        // whether anybody reads.
        if under == Under::Shell {
            for stage in &stages {
                let _may_be_gone =
                    kill_process(Pid::from_raw(stage.pid.cast_signed()).unwrap(), Signal::KILL);
            }
        }
        for stage in stages {
            assert!(
                wait_gone(stage.pid, 3 * promise()).unwrap(),
                "{under:?}: {stage:?} still runs"
            );
        }
        assert_quiet(&lab);
    }
}

fn assert_quiet(lab: &Lab) {
    for host in [&lab.servers[0].host, &lab.workstation] {
        let left = processes_left(host, promise()).unwrap();
        assert!(left.is_empty(), "left on {}: {left:?}", host.name());
    }
}

/// A reader that goes away ends the remote command, also a silent one.
#[test]
fn readers_that_leave() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let lines: String = (0..200_000).map(|i| format!("line {i} with a needle\n")).collect();
    fs::write(lab.data(1).join("large"), lines).unwrap();
    fs::write(lab.data(1).join("log"), "one line\n").unwrap();
    for text in [
        "cat /mnt/s1/large | head -n 1",
        "cat /mnt/s1/large | grep needle | head -n 1",
        "cat /mnt/s1/large | { read -r line; echo \"$line\"; }",
        "tail -n +1 -f /mnt/s1/log | head -n 1",
        "tail -n +1 -f /mnt/s1/log | { read -r line; echo \"$line\"; }",
        "cat /mnt/s1/large | grep -q needle && echo found",
        "yes | head -n 1",
        "yes \"$(cat /mnt/s1/log)\" | head -n 2",
    ] {
        let [bash, posh] = [Under::Shell, Under::Posh]
            .map(|u| Script::new(text).run(&lab.workstation, u).unwrap());
        posh_integration::oracle::assert_equal(text, &bash, &posh);
        assert_quiet(&lab);
    }
}

/// Ctrl-Z and fg, without a terminal: the stages stop and go on by their signals.
#[test]
fn a_stopped_group_goes_on() {
    let mut run = Silent::start(Under::Posh);
    kill_group(&run.shell, Signal::STOP);
    run.append("a needle while stopped\n");
    kill_group(&run.shell, Signal::CONT);
    assert_eq!(read_line(&mut run.stdout), "a needle while stopped\n");
    let remote = run.remote();
    kill_group(&run.shell, Signal::TERM);
    assert_gone(&remote);
    run.shell.wait().unwrap();
}
