//! Logins that go wrong, each in its way: the pipeline runs here, and every place that
//! can say why does.

use std::time::Instant;

use super::*;

/// The pipeline runs here, as bash would run it, and each place that can say why does.
fn assert_unreachable(lab: &Lab, words: &str) {
    let script = Script::new("cat /mnt/s1/f | grep needle | sort; echo \"${PIPESTATUS[*]}\"");
    let bash = script.run(&lab.workstation, Under::Shell).unwrap();
    let posh_run = script.run(&lab.workstation, Under::PoshExplained).unwrap();
    assert_eq!((&posh_run.stdout, posh_run.status), (&bash.stdout, bash.status), "{posh_run}");
    for stage in posh_run.report().stages("cat") {
        assert!(
            !stage.is_offloaded() && stage.reason.contains(words),
            "{words:?} is not in {stage:?}"
        );
    }
    let doctor = posh(&lab.workstation, &["doctor"]);
    let line = stdout(&doctor).lines().find(|l| l.contains("executor store1")).unwrap().to_owned();
    assert!(line.starts_with("BAD") && line.contains(words), "{words:?} is not in {line:?}");
    assert!(stdout(&posh(&lab.workstation, &["status"])).contains(words));
}

#[test]
fn a_program_that_is_not_installed() {
    let lab = lab();
    fs::remove_file(lab.servers[0].host.path(INSTALLED)).unwrap();
    assert_unreachable(&lab, "posh-executor is not installed there; run: posh attach store1");
}

#[test]
fn a_port_on_which_nobody_listens() {
    let lab = lab();
    configure(&lab, &table("ssh://root@store1:2222", "/srv/s1", &format!("ssh -F {SSH_CONFIG}")));
    assert_unreachable(&lab, "port 2222: Connection refused");
}

#[test]
fn a_login_that_is_refused() {
    let lab = lab();
    let other = ssh_config("root", "/run/no-such-key");
    write_file(&lab.workstation, SSH_CONFIG, other.as_bytes()).unwrap();
    assert_unreachable(&lab, "Permission denied (publickey");
}

#[test]
fn a_host_key_that_nobody_has_accepted() {
    let lab = lab();
    let strict = ssh_config("root", WORKSTATION_KEY)
        .replace("StrictHostKeyChecking no", "StrictHostKeyChecking ask");
    write_file(&lab.workstation, SSH_CONFIG, strict.as_bytes()).unwrap();
    assert_unreachable(&lab, "Host key verification failed");
}

#[test]
fn no_ssh_at_all() {
    let lab = lab();
    configure(&lab, &table("ssh://store1", "/srv/s1", "/nonexistent/ssh"));
    assert_unreachable(&lab, "cannot run /nonexistent/ssh: No such file or directory");
}

/// What a start-up file prints would be taken for the protocol.
#[test]
fn a_login_shell_that_talks() {
    let lab = lab();
    // bash reads it when sshd starts it for a command.
    write_file(
        &lab.servers[0].host,
        format!("{HOME}/.bashrc"),
        b"echo hello from the start-up file\n",
    )
    .unwrap();
    let started = Instant::now();
    assert_unreachable(
        &lab,
        "said \"hello from the start-up file\" where posh-executor was to speak",
    );
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
}
