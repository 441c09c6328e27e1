//! A process that has been given less than its user has must not get it back on a server.

use std::fs;

use posh_integration::oracle::Under;
use posh_integration::{Lab, LabSpec, Script};

use crate::programs;

const PROGRAMS: &str = posh_integration::host::PROGRAMS;

#[test]
fn a_command_with_less_than_the_gateway_s_rights_runs_here() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    fs::write(lab.data(1).join("f"), "x\n").unwrap();
    let run = |before: &str| {
        let script = Script::new(format!("{before} cat /mnt/s1/f"));
        let outcome = script.run(&lab.workstation, Under::PoshExplained).unwrap();
        assert_eq!(
            (outcome.stdout.as_slice(), outcome.status.code()),
            (&b"x\n"[..], Some(0)),
            "{before}: {outcome}"
        );
        let stages: Vec<(bool, String)> = outcome
            .report()
            .stages("cat")
            .map(|stage| (stage.is_offloaded(), stage.reason.clone()))
            .collect();
        (stages, format!("{outcome}"))
    };
    let (stages, said) = run("env");
    assert!(stages.len() == 1 && stages[0].0, "{said}");
    for before in [
        "setpriv --no-new-privs",
        "setpriv --groups 7",
        "setpriv --bounding-set -sys_admin",
        "unshare -m",
        "unshare -U -r",
        "unshare -n",
    ] {
        let (stages, said) = run(before);
        assert!(stages.iter().all(|(is_offloaded, _)| !is_offloaded), "{before}: {said}");
    }
    let (stages, said) = run("setpriv --no-new-privs");
    assert!(stages.iter().any(|(_, reason)| reason.contains("with no_new_privs")), "{said}");
    let (stages, said) = run("unshare -n");
    let names_it = |reason: &str| reason.contains("with another network namespace");
    assert!(stages.iter().any(|(_, reason)| names_it(reason)), "{said}");
}

/// Asks whether commands on a volume run here, and prints how many processes the gateway watches.
const QUESTIONS: &str = r#"
import ctypes, glob, os, socket, struct, sys, time
def field(number, value):
    return bytes([number << 3 | 2, len(value)]) + value
def ask(words):
    question = field(2, b'/usr/bin/' + words[0]) + b''.join(field(3, w) for w in words) + field(4, b'/')
    asks = socket.socket(socket.AF_UNIX)
    asks.connect(glob.glob('/run/user/posh/gateway-*.stage')[0])
    frame = bytes([11 << 3 | 2, len(question)]) + question
    asks.sendall(struct.pack('<I', len(frame)) + frame)
    asks.settimeout(10)
    return len(asks.recv(100))
def watched():
    count = 0
    for process in filter(str.isdigit, os.listdir('/proc')):
        try:
            if not open(f'/proc/{process}/comm').read().startswith('posh-gateway'): continue
            for fd in os.listdir(f'/proc/{process}/fdinfo'):
                lines = open(f'/proc/{process}/fdinfo/{fd}').read().splitlines()
                count += f'Pid:	{os.getpid()}' in lines
        except OSError: pass
    return count
if sys.argv[1] == 'confined': ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
for number in range(50): assert ask([b'find', b'/mnt/vol/none%d' % number, b'-atime', b'+1'])
# A prefetch begins after the answer.
if sys.argv[1] != 'confined':
    while not watched(): time.sleep(0.01)
time.sleep(0.5)
print(watched(), flush=True)
"#;

#[test]
fn nothing_is_fetched_ahead_for_a_process_with_less_than_the_gateway_s_rights() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let ask = fs::write(lab.data(1).join("ask.py"), QUESTIONS);
    ask.unwrap();
    let posh = format!("{PROGRAMS}/posh");
    let text = format!(
        "mkdir /mnt/vol; {posh} mount store1:s1 /mnt/vol
         for rights in own confined; do python3 /mnt/s1/ask.py $rights; done
         {posh} umount /mnt/vol"
    );
    let outcome = Script::new(text).run(&lab.workstation, Under::Shell).unwrap();
    assert_eq!(String::from_utf8_lossy(&outcome.stdout), "1\n0\n", "{outcome}");
}

/// It would mount what it likes where the user looks, or end the gateway.
#[test]
fn a_confined_program_does_not_command_the_gateway() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    fs::write(lab.data(1).join("f"), "x\n").unwrap();
    let posh = format!("{PROGRAMS}/posh");
    let text = format!(
        "{posh} -c 'cat /mnt/s1/f'; {posh} mounts > /dev/null; echo $?
         setpriv --no-new-privs {posh} mounts > /dev/null 2>&1; echo $?
         setpriv --no-new-privs {posh} gateway stop > /dev/null 2>&1; echo $?
         setpriv --no-new-privs {posh} -c 'cat /mnt/s1/f' 2> said; grep -c 'gateway.s own rights' said
         {posh} mounts > /dev/null; echo $?"
    );
    let outcome = Script::new(text).run(&lab.workstation, Under::Shell).unwrap();
    let said = String::from_utf8_lossy(&outcome.stdout).into_owned();
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[..2], ["x", "0"], "{outcome}");
    assert!(lines[2] != "0" && lines[3] != "0", "{outcome}");
    assert_eq!(lines[4..], ["x", "1", "0"], "{outcome}");
}
