//! sshfs mounts that no configuration names: what sshfs was told is enough.

use super::*;

/// A mount that nobody has configured: what sshfs was told is enough.
#[test]
fn an_sshfs_mount_needs_no_configuration() {
    let lab = lab();
    configure(&lab, "");
    // Nothing is started for commands that do not touch it.
    let local = Script::new("cd /tmp; echo x > local; cat local | sort; mkdir d; ls d");
    let bash = local.run(&lab.workstation, Under::Shell).unwrap();
    fs::remove_dir(lab.workstation.path("/tmp/d")).unwrap();
    let posh_run = local.run(&lab.workstation, Under::Posh).unwrap();
    assert_equal("local", &bash, &posh_run);
    let mounts = stdout(&posh(&lab.workstation, &["mounts"]));
    let line =
        |text: &str| text.lines().find(|line| line.starts_with("/mnt/s1")).unwrap().to_owned();
    let (_, address) = network::addresses(1);
    let owned = format!("root@{address}:/srv/s1");
    assert!(line(&mounts).contains(&owned) && line(&mounts).contains("not used yet"), "{mounts}");
    assert_eq!(of_the_way_in(&lab.workstation), []);

    for text in [
        "cat /mnt/s1/f | grep needle | sort -r",
        "cd /mnt/s1; grep -c hay f; tac f > out; md5sum out",
    ] {
        let outcome = assert_same(&lab.workstation, &Script::new(text));
        assert_offloaded(outcome.report());
    }
    let mounts = stdout(&posh(&lab.workstation, &["mounts"]));
    assert!(line(&mounts).contains("connected"), "{mounts}");
    let doctor = stdout(&posh(&lab.workstation, &["doctor"]));
    assert!(
        doctor.contains(&format!(
            "ok    executor root@{address}: store1 0.1.0 at ssh://root@{address}"
        )),
        "{doctor}"
    );
}

#[test]
fn an_sshfs_mount_and_no_file_at_all() {
    let lab = lab();
    fs::remove_file(lab.workstation.path(CONFIG)).unwrap();
    let pipeline = "cat /mnt/s1/f | grep needle | sort";
    let posh = lab.workstation.programs().join("posh");
    let text = format!("unset POSH_CONFIG; exec {} --explain=json -c '{pipeline}'", posh.display());
    let bash = Script::new(pipeline).run(&lab.workstation, Under::Shell).unwrap();
    let found = Script::new(text).run(&lab.workstation, Under::Shell).unwrap();
    let (stderr, report) = ExplainReport::take(&found.stderr).unwrap();
    assert_eq!((&found.stdout, stderr), (&bash.stdout, Vec::new()), "{found}");
    assert_offloaded(&report);
}

/// Nobody has asked for it: what is missing there is no news, but to be found.
#[test]
fn an_sshfs_mount_of_a_server_without_posh() {
    let lab = lab();
    configure(&lab, "");
    fs::remove_file(lab.servers[0].host.path(INSTALLED)).unwrap();
    let script = Script::new("cat /mnt/s1/f | grep needle | sort");
    let bash = script.run(&lab.workstation, Under::Shell).unwrap();
    let silent = script.run(&lab.workstation, Under::Posh).unwrap();
    assert_equal(&script.text, &bash, &silent);
    let explained = assert_same(&lab.workstation, &script);
    let (_, address) = network::addresses(1);
    for stage in explained.report().stages("cat") {
        assert!(stage.reason.contains(&format!("run: posh attach root@{address}")), "{stage:?}");
    }
    let doctor = posh(&lab.workstation, &["doctor"]);
    let line = stdout(&doctor).lines().find(|l| l.contains("executor root@")).unwrap().to_owned();
    assert!(line.starts_with("note") && line.contains("posh attach"), "{line}");
    assert!(doctor.status.success(), "{doctor}");
}

#[test]
fn sshfs_mounts_are_left_alone_where_that_is_said() {
    let lab = lab();
    configure(&lab, "[gateway]\nsshfs = \"off\"\n");
    let outcome = assert_same(&lab.workstation, &Script::new("cat /mnt/s1/f | grep needle | sort"));
    let stages: Vec<_> = outcome.report().pipelines.iter().flat_map(|p| &p.stages).collect();
    assert!(stages.iter().all(|stage| !stage.is_offloaded()), "{stages:?}");
    assert_eq!(of_the_way_in(&lab.workstation), []);
}

#[test]
fn an_sshfs_mount_that_comes_and_goes() {
    let mut lab = lab();
    configure(&lab, "");
    let script = Script::new("cat /mnt/s1/f | grep needle | sort");
    assert_offloaded(assert_same(&lab.workstation, &script).report());
    let (here, there) = (of_the_way_in(&lab.workstation), of_the_way_in(&lab.servers[0].host));
    lab.unmount().unwrap();
    assert_gone(&here);
    assert_gone(&there);
    // One that shows other files than the server has them.
    lab.remount(1, &["follow_symlinks".to_owned()]).unwrap();
    let outcome = assert_same(&lab.workstation, &script);
    assert!(
        outcome.report().stages("cat").all(|stage| !stage.is_offloaded()),
        "{:?}",
        outcome.report()
    );
    let doctor = stdout(&posh(&lab.workstation, &["doctor"]));
    assert!(
        doctor.contains(
            "mounted with the option follow_symlinks, which may change what commands see"
        ),
        "{doctor}"
    );
    lab.remount(1, &[]).unwrap();
    assert_offloaded(assert_same(&lab.workstation, &script).report());
}
