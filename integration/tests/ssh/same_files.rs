//! An sshfs mount and an executor are reached by one name, which may mean two machines.

use super::*;

/// Directs the name `store` to a server, for sshfs and for posh's own ssh.
fn store_is(lab: &Lab, server: usize) {
    let (_, address) = network::addresses(server);
    let text = ssh_config("root", WORKSTATION_KEY)
        .replace("Host store1", "Host store")
        .replace(&network::addresses(1).1.to_string(), &address.to_string());
    write_file(&lab.workstation, SSH_CONFIG, text.as_bytes()).unwrap();
}

fn assert_local(outcome: &RunOutcome, why: &str) {
    let reasons = reasons(outcome);
    assert!(!reasons.is_empty());
    for reason in &reasons {
        assert!(reason.starts_with("local ") && reason.contains(why), "{reasons:#?}");
    }
}

/// The mount goes on with the machine that it is connected to: what it shows counts, and what is
/// done goes there.
#[test]
fn a_name_that_means_another_machine_by_now() {
    let lab = Lab::start(&LabSpec::servers(2).without_executors(), &programs()).unwrap();
    configure(&lab, "");
    for server in [1, 2] {
        let host = &lab.servers[server - 1].host;
        install(host);
        sh(
            host,
            &format!(
                "mkdir -p /srv/x/d; echo machine {server} > /srv/x/f; echo > /srv/x/d/k; \
                 touch -d @1700000000 /srv/x/d/k /srv/x/d /srv/x/f /srv/x"
            ),
        );
    }
    store_is(&lab, 1);
    sh(&lab.workstation, &format!("mkdir -p /mnt/x; sshfs -F {SSH_CONFIG} store:/srv/x /mnt/x"));
    store_is(&lab, 2);
    let text = "cat /mnt/x/f; rm -r /mnt/x/d; cp /mnt/x/f /mnt/x/copy; ls /mnt/x";
    let outcome = Script::new(text).run(&lab.workstation, Under::PoshExplained).unwrap();
    assert_eq!(stdout(&outcome), "machine 1\ncopy\nf\n");
    assert_local(&outcome, "is not shown to have the files that executor store serves as /srv/x");
    let mounts = stdout(&posh(&lab.workstation, &["mounts"]));
    assert!(mounts.contains("not used: the mount at /mnt/x is not shown"), "{mounts}");
    let has = |server: usize, name: &str| {
        lab.servers[server - 1].host.path(format!("/srv/x/{name}")).exists()
    };
    assert_eq!([has(1, "d"), has(1, "copy")], [false, true]);
    assert_eq!([has(2, "d"), has(2, "copy")], [true, false]);

    // Mounted anew, both mean the same machine.
    sh(
        &lab.workstation,
        &format!("fusermount3 -u /mnt/x; sshfs -F {SSH_CONFIG} store:/srv/x /mnt/x"),
    );
    let outcome = assert_same(&lab.workstation, &Script::new("cat /mnt/x/f | tac"));
    assert_offloaded(outcome.report());
    assert_eq!(stdout(&outcome), "machine 2\n");
}

/// An executor at the mount's address serves another directory, which has just been made or never
/// rests.
#[test]
fn another_directory_than_the_mount_shows() {
    let lab = lab();
    let other = lab.servers[0].host.path("/srv/other");
    fs::create_dir(&other).unwrap();
    configure(&lab, &table("ssh://store1", "/srv/other", &format!("ssh -F {SSH_CONFIG}")));
    let script = Script::new("cat /mnt/s1/f | grep needle");
    let check = || {
        let outcome = assert_same(&lab.workstation, &script);
        assert_local(&outcome, "is not shown to have the files that executor store1 serves");
        let doctor = stdout(&posh(&lab.workstation, &["doctor"]));
        assert!(doctor.contains("does not read what was written in /mnt/s1"), "{doctor}");
        posh(&lab.workstation, &["gateway", "stop"]);
    };
    check();
    fs::write(other.join("f"), "other\n").unwrap();
    check();
    let mut writer = Command::new("sh");
    let text = "while :; do echo >> f; : > n$$; rm n$$; mkdir d; rmdir d; done";
    let mut writer = writer.args(["-c", text]).current_dir(&other).spawn().unwrap();
    check();
    writer.kill().unwrap();
    writer.wait().unwrap();
}

/// `current -> r1` becomes `current -> r2`: sshfs follows the link at each request.
#[test]
fn a_link_above_the_mount_s_directory_leads_elsewhere() {
    let lab = lab();
    configure(&lab, "");
    let server = &lab.servers[0].host;
    for release in ["r1", "r2"] {
        sh(
            server,
            &format!(
                "mkdir -p /srv/{release}/d/old; echo {release} {release} > /srv/{release}/d/f; \
                 touch -d @1700000000 /srv/{release}/d/f"
            ),
        );
    }
    let lead_to = |release: &str| sh(server, &format!("ln -sfn {release} /srv/cur"));
    lead_to("r1");
    sh(
        &lab.workstation,
        &format!("mkdir -p /mnt/x; sshfs -F {SSH_CONFIG} store1:/srv/cur/d /mnt/x"),
    );
    let read = Script::new("cat /mnt/x/f | tac");
    let outcome = assert_same(&lab.workstation, &read);
    assert_offloaded(outcome.report());
    assert_eq!(stdout(&outcome), "r1 r1\n");
    lead_to("r2");
    let outcome = Script::new("rm -r /mnt/x/old; cat /mnt/x/f").run(&lab.workstation, Under::Posh);
    assert_eq!(stdout(&outcome.unwrap()), "r2 r2\n");
    let has_old = ["r1", "r2"].map(|release| server.path(format!("/srv/{release}/d/old")).exists());
    assert_eq!(has_old, [true, false]);
    // An executor that knows of it is started meanwhile.
    let began = Instant::now();
    loop {
        let outcome = assert_same(&lab.workstation, &read);
        assert_eq!(stdout(&outcome), "r2 r2\n");
        if outcome.report().stages("cat").all(|stage| stage.is_offloaded()) {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(90), "{outcome}");
        std::thread::sleep(Duration::from_secs(1));
    }
}

#[test]
fn the_first_command_is_offloaded_whatever_the_directory_is() {
    let mut lab = lab();
    let data = lab.data(1);
    let check = |lab: &Lab, text: &str| {
        posh(&lab.workstation, &["gateway", "stop"]);
        let outcome = assert_same(&lab.workstation, &Script::new(text));
        assert_offloaded(outcome.report());
    };
    lab.remount(1, &["ro".to_owned()]).unwrap();
    check(&lab, "cat /mnt/s1/f | grep needle");
    for number in 0..10_000 {
        fs::write(data.join(format!("n{number}")), "").unwrap();
    }
    lab.remount(1, &[]).unwrap();
    check(&lab, "cat /mnt/s1/f | grep needle");
    for entry in fs::read_dir(&data).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    lab.remount(1, &[]).unwrap();
    check(&lab, "ls -a /mnt/s1 | tac");
    // One that never rests.
    let mut writer = Command::new("sh");
    let text = "while :; do echo >> w; : > n$$; rm n$$; mkdir d; rmdir d; done";
    let mut writer = writer.args(["-c", text]).current_dir(&data).spawn().unwrap();
    fs::write(data.join("f"), "needle\n").unwrap();
    lab.remount(1, &[]).unwrap();
    check(&lab, "cat /mnt/s1/f | grep needle");
    writer.kill().unwrap();
    writer.wait().unwrap();
}

/// After either connection is lost, the two are compared anew.
#[test]
fn a_connection_that_is_made_anew() {
    let mut lab = lab();
    configure(&lab, "");
    lab.remount(1, &["reconnect".to_owned()]).unwrap();
    let script = Script::new("cat /mnt/s1/f | grep needle");
    assert_offloaded(assert_same(&lab.workstation, &script).report());
    let of_ssh = |with: &str| -> Vec<Running> {
        let all = lab.workstation.processes().unwrap();
        all.into_iter().filter(|p| p.program == "ssh" && p.command_line.contains(with)).collect()
    };
    of_ssh("--stdio").iter().for_each(|p| kill(p.pid));
    let began = Instant::now();
    loop {
        let outcome = assert_same(&lab.workstation, &script);
        if reasons(&outcome).iter().all(|reason| !reason.starts_with("local ")) {
            break;
        }
        assert!(began.elapsed() < LIMIT, "{outcome}");
    }
    of_ssh("sftp").iter().for_each(|p| kill(p.pid));
    // The first use makes it connect.
    sh(&lab.workstation, "sleep 0.5; ls /mnt/s1/ > /dev/null; stat /mnt/s1/absent || true");
    let outcome = assert_same(&lab.workstation, &script);
    assert_local(&outcome, "its sshfs has connected anew");
}
