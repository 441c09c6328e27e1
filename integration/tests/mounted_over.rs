//! Mounts that are made while shells are at work: a command uses what the kernel shows it, not what
//! the path meant a moment ago.

use std::fs;

use posh_integration::host::CONFIG;
use posh_integration::oracle::{Door, Under};
use posh_integration::{Lab, LabSpec, Script};

use crate::programs;

/// A working directory and open files stay what they are when something is mounted over them.
#[test]
fn what_lies_beneath_a_new_mount_is_used_by_who_has_it() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let far = lab.data(1);
    let text = r#"mkdir -p ~/x; cd ~/x; echo local > f; echo local > g; exec 7>> log 8< f
        mount --bind /mnt/s1 ~/x
        cat f; cat < f; sort f > out; rm g; sed -i s/local/changed/ f; cat <&8; sort /mnt/s1/f >&7
        ls; cat ~/x/f
        umount ~/x; ls; cat f out log; cd; rm -r ~/x; wc -l /mnt/s1/f"#;
    for door in Door::ALL {
        let script = Script::new(text).door(door);
        let seen = [Under::Shell, Under::PoshExplained].map(|under| {
            for name in ["f", "g"] {
                fs::write(far.join(name), "server\n").unwrap();
            }
            let outcome = script.clone().run(&lab.workstation, under).unwrap();
            let on_server = ["f", "g"].map(|name| fs::read_to_string(far.join(name)).unwrap());
            assert_eq!(on_server, ["server\n", "server\n"].map(str::to_owned), "{outcome}");
            assert_eq!(fs::read_dir(&far).unwrap().count(), 2, "{outcome}");
            outcome
        });
        let [bash, posh] = &seen;
        assert_eq!((&bash.stdout, &bash.stderr), (&posh.stdout, &posh.stderr), "{posh}");
        let report = posh.report();
        assert!(report.stages("wc").any(|stage| stage.is_offloaded()), "{report:#?}");
    }
}

/// Other users can have the kernel list a thousand mounts, so that the gateway is late to know of
/// the last one.
#[test]
fn a_mount_that_was_made_just_before_a_command_counts_for_it() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    fs::create_dir(lab.data(1).join("sub")).unwrap();
    fs::write(lab.data(1).join("sub/f"), "server\n").unwrap();
    fs::write(lab.data(1).join("other"), "server\n").unwrap();
    let text = r#"mkdir ~/l ~/many; echo local > ~/l/f
        for i in {1..1000}; do mkdir ~/many/$i; mount -t tmpfs none ~/many/$i; done
        cat /mnt/s1/other
        for i in {1..60}; do
            mount --bind ~/l /mnt/s1/sub; cat /mnt/s1/sub/f; umount /mnt/s1/sub; cat /mnt/s1/sub/f
        done | sort | uniq -c
        sleep 2; cat /mnt/s1/other"#;
    let outcome = Script::new(text).run(&lab.workstation, Under::PoshExplained).unwrap();
    let said = String::from_utf8_lossy(&outcome.stdout);
    let words: Vec<&str> = said.split_whitespace().collect();
    assert_eq!(words, ["server", "60", "local", "60", "server", "server"], "{outcome}");
    let report = outcome.report();
    assert!(report.stages("cat").last().is_some_and(|stage| stage.is_offloaded()), "{report:#?}");
}

/// The kernel takes a mount along with a directory above it, and tells nobody.
#[test]
fn a_mount_is_not_at_its_path_when_a_directory_above_it_was_renamed() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let far = lab.data(1);
    let host = &lab.workstation;
    let config = fs::read_to_string(host.path(CONFIG)).unwrap();
    fs::write(host.path(CONFIG), config.replace("/mnt/s1", "/mnt/p/q")).unwrap();
    let mounted = Script::new("mkdir -p /mnt/p/q; mount --bind /mnt/s1 /mnt/p/q && umount /mnt/s1");
    assert!(mounted.run(host, Under::Shell).unwrap().stderr.is_empty());
    let text = r#"cat /mnt/p/q/f; mv /mnt/p /mnt/r && mkdir -p /mnt/p/q/d || exit
        echo local > /mnt/p/q/f; echo local > /mnt/p/q/d/f
        cat /mnt/p/q/f; sort /mnt/p/q/f -o /mnt/p/q/o; rm -r /mnt/p/q/d; sort /mnt/p/q/f; ls /mnt/p/q
        rm -r /mnt/p; mv /mnt/r /mnt/p; cat /mnt/p/q/f > /dev/null; sleep 3; sort /mnt/p/q/f"#;
    let script = Script::new(text);
    let seen = [Under::Shell, Under::PoshExplained].map(|under| {
        fs::create_dir_all(far.join("d")).unwrap();
        for name in ["f", "d/f"] {
            fs::write(far.join(name), "server\n").unwrap();
        }
        let outcome = script.clone().run(&lab.workstation, under).unwrap();
        assert_eq!(fs::read_to_string(far.join("d/f")).unwrap(), "server\n", "{outcome}");
        assert!(!far.join("o").exists(), "{outcome}");
        outcome
    });
    let [bash, posh] = &seen;
    assert_eq!((&bash.stdout, &bash.stderr), (&posh.stdout, &posh.stderr), "{posh}");
    let report = posh.report();
    assert!(report.stages("cat").next().is_some_and(|stage| stage.is_offloaded()), "{report:#?}");
    assert!(report.stages("sort").last().is_some_and(|stage| stage.is_offloaded()), "{report:#?}");
}

/// An executor knows nothing of the workstation's mounts but what it is told.
#[test]
fn nothing_is_changed_through_a_read_only_mount() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let far = lab.data(1);
    let text = r#"umask 077; mkdir -p ~/ro; mount --bind /mnt/s1 ~/ro && mount -o remount,bind,ro ~/ro || exit
        change() { for c in 'cp f g' 'tee f' 'sort -r f -o f' 'sed -i s/server/x/ f 2> ~/said' 'rm -r d' 'gzip f' \
            'tar xf t.tar' 'split -l 1 f' 'cd d; tar xf ../t.tar'; do (eval "$c" < /dev/null; echo "$c: $?"); done; }
        cd ~/ro; change; cd; cat ~/ro/f; cp /mnt/s1/t.tar /mnt/s1/link; echo $?
        umount ~/ro; mkdir /mnt/s1/in; echo x > /mnt/s1/d/kept
        mount --bind /mnt/s1/d /mnt/s1/in && mount -o remount,bind,ro /mnt/s1/in
        cp /mnt/s1/f /mnt/s1/in/g; (cd /mnt/s1; tar xf t.tar -C in; rm -r in/kept; cp -r f in); echo $?
        umount /mnt/s1/in; rmdir /mnt/s1/in; rm /mnt/s1/d/kept
        mount -o remount,bind,ro /mnt/s1; cd /mnt/s1; change; cd; mount -o remount,bind,rw /mnt/s1
        cp /mnt/s1/f /mnt/s1/copy; wc -l /mnt/s1/copy; rm /mnt/s1/copy"#;
    let seen = [Under::Shell, Under::PoshExplained].map(|under| {
        fs::create_dir_all(far.join("d")).unwrap();
        fs::write(far.join("f"), "server\n").unwrap();
        let link = far.join("link");
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink("/home/user/ro/f", &link).unwrap();
        let archive = "tar cf t.tar f";
        let made =
            std::process::Command::new("sh").args(["-c", archive]).current_dir(&far).status();
        assert!(made.unwrap().success());
        let outcome = Script::new(text).run(&lab.workstation, under).unwrap();
        let mut names: Vec<_> =
            fs::read_dir(&far).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["d", "f", "link", "t.tar"], "{outcome}");
        assert_eq!(fs::read_to_string(far.join("f")).unwrap(), "server\n", "{outcome}");
        assert_eq!(fs::read_dir(far.join("d")).unwrap().count(), 0, "{outcome}");
        outcome
    });
    let [bash, posh] = &seen;
    assert_eq!((&bash.stdout, &bash.stderr), (&posh.stdout, &posh.stderr), "{posh}");
    let report = posh.report();
    for read in ["cat", "wc"] {
        assert!(report.stages(read).any(|stage| stage.is_offloaded()), "{report:#?}");
    }
}
