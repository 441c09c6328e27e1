//! The end of a terminal, and a command that lives through its changes.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use nix::mount::{MsFlags, mount};
use posh_integration::host::CONFIG;
use posh_integration::oracle::Under;
use posh_integration::quiet::processes_left;
use posh_integration::running::Running;
use posh_integration::services::write_file;
use posh_integration::terminal::TerminalSize;
use posh_integration::terminal::session::{TerminalSession, TerminalSetup};
use posh_integration::{Host, Lab, LabSpec, Shell};

use super::story::{PROMISE, tell};
use super::{lab, lab_of};

const FOLLOW: &str = "tail -n +1 -f /mnt/s1/log | grep --line-buffered needle";
const SIGN: &str = "a needle";

fn session(lab: &Lab, under: Under) -> TerminalSession {
    let home = "/home/user/hung";
    let setting = TerminalSetup {
        shell: Shell::Bash,
        under,
        door: None,
        size: TerminalSize::USUAL,
        home,
        rc: "",
    };
    TerminalSession::start(&lab.workstation, &setting).unwrap()
}

fn assert_nothing_left(lab: &Lab, after: &str) {
    for host in [&lab.servers[0].host, &lab.workstation] {
        let left = processes_left(host, PROMISE).unwrap();
        assert!(left.is_empty(), "{after}: left on {}: {left:?}", host.name());
    }
}

fn on_server(lab: &Lab) -> Vec<Running> {
    let mut found = lab.servers[0].host.processes().unwrap();
    found.retain(|p| p.command_line.starts_with("tail ") || p.command_line.starts_with("grep "));
    found
}

/// A window is closed while something runs in the foreground, in the background, stopped, or not at
/// all.
#[test]
fn a_hangup() {
    let lab = lab();
    hang_up(&lab, Under::Posh, "in front", |s| s.begin(FOLLOW, SIGN).unwrap());
    hang_up(&lab, Under::Posh, "stopped", stop);
    hang_up(&lab, Under::Posh, "behind", |s| {
        s.line(&format!("{FOLLOW} &")).unwrap();
        s.terminal().until_anywhere(SIGN).unwrap();
    });
    session(&lab, Under::Posh).hang_up().wait().unwrap();
    assert_nothing_left(&lab, "idle");
    // posh stays beside the shell for the report, which nobody sees then.
    hang_up(&lab, Under::PoshExplained, "in front, explained", |s| s.begin(FOLLOW, SIGN).unwrap());
    hang_up(&lab, Under::PoshExplained, "stopped, explained", stop);
}

fn stop(session: &mut TerminalSession) {
    session.begin(FOLLOW, SIGN).unwrap();
    session.key("\x1a").unwrap();
}

fn hang_up(lab: &Lab, under: Under, what: &str, start: impl Fn(&mut TerminalSession)) {
    let mut session = session(lab, under);
    start(&mut session);
    assert!(on_server(lab).iter().any(|p| p.command_line.starts_with("tail ")), "{what}");
    session.hang_up().wait().unwrap();
    assert_nothing_left(lab, what);
}

/// A command that says how wide its terminal is, at first and whenever that changes. Signals are
/// held but while it waits, so that none comes in between. SIGWINCH is 28, TIOCGWINSZ is 0x5413.
const WIDTH: &str = "#!/usr/bin/perl\n\
    use POSIX; $| = 1;\n\
    $SIG{WINCH} = sub {};\n\
    sigprocmask(SIG_BLOCK, POSIX::SigSet->new(28));\n\
    while (1) {\n\
        my $size = ''; ioctl(STDOUT, 0x5413, $size);\n\
        printf(\"%d %d\\n\", unpack('SS', $size));\n\
        sigsuspend(POSIX::SigSet->new());\n\
    }\n";
const WIDTH_ANNOTATION: &str =
    "width:\n- PARAMS:\n  - {name: file, type: input_file, size: 1}\n  terminal: output\n";

#[test]
fn a_remote_command_hears_of_a_new_size() {
    let mut lab = lab_of(&LabSpec::servers(1).without_executors());
    [&lab.workstation, &lab.servers[0].host].into_iter().for_each(install_width);
    // The server lets run what its own administrator has annotated.
    let places =
        [(&lab.workstation, "/run/annotations"), (&lab.servers[0].host, "/etc/posh/annotations")];
    for annotations in places.map(|(host, directory)| host.path(directory)) {
        fs::create_dir_all(&annotations).unwrap();
        fs::write(annotations.join("width.yaml"), WIDTH_ANNOTATION).unwrap();
    }
    lab.servers[0].start_executor().unwrap();
    let table = format!("[gateway]\nannotations = [\"/run/annotations\"]\n{}", lab.mount_table());
    write_file(&lab.workstation, CONFIG, table.as_bytes()).unwrap();
    tell(&lab, Shell::Bash, "", |t| {
        t.begin("width /mnt/s1/f", "24 80\r\n");
        let width = |p: &Running| p.command_line.contains("/width");
        let there = lab.servers[0].host.processes().unwrap().into_iter().filter(width).count();
        assert_eq!(there, usize::from(t.under == Under::Posh), "it runs on the server");
        for (rows, columns) in [(30, 100), (17, 42)] {
            t.session.terminal().resize(TerminalSize::new(rows, columns)).unwrap();
            t.until(&format!("{rows} {columns}\r\n"));
        }
        t.key("\x03");
        t.assert_gone(&[]);
    });
}

/// Onto a host's own directory for local programs, so that this machine's stays as it is.
fn install_width(host: &Host) {
    let none: Option<&str> = None;
    host.run(move || mount(Some("tmpfs"), "/usr/local/bin", Some("tmpfs"), MsFlags::empty(), none))
        .unwrap();
    write_file(host, "/usr/local/bin/width", WIDTH.as_bytes()).unwrap();
    fs::set_permissions(host.path("/usr/local/bin/width"), fs::Permissions::from_mode(0o755))
        .unwrap();
}
