//! What becomes of sshfs mounts that no configuration names.

use super::*;

use crate::daemons::FuseDescriptors;

fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Mounts of this user: mount point and source, with their places in the list as the numbers of
/// their connections.
fn mounted(mounts: &[(&str, &str)]) -> MountInfo {
    let line = |(id, (point, source)): (usize, &(&str, &str))| {
        let source = source.replace(' ', "\\040");
        format!(
            "{} 20 0:{id} / {point} rw - fuse.sshfs {source} rw,user_id={},group_id=0\n",
            30 + id,
            uid()
        )
    };
    let lines: String = mounts.iter().enumerate().map(line).collect();
    MountInfo::parse(format!("20 1 8:1 / / rw - ext4 /dev/sda1 rw\n{lines}").as_bytes())
        .expect("mountinfo")
}

/// One process that holds the first connection.
fn process(words: &[&str]) -> Daemons {
    Daemons::of(&[(words, FuseDescriptors::Connections(vec![0]))])
}

/// Address, export and ssh's words of the one mount, or why it is left alone.
fn adopt_one(source: &str, words: &[&str]) -> Result<(String, String, String), String> {
    let (config, left_out) =
        adopt(&Config::default(), &mounted(&[("/mnt/a", source)]), &process(words));
    if let Some(left_out) = left_out.first() {
        return Err(left_out.reason.clone());
    }
    let executor = &config.executors[0];
    let ExecutorOrigin::Sshfs { ssh_command } = &executor.origin else { panic!("{executor:?}") };
    Ok((executor.address.to_string(), config.mounts[0].export.clone(), ssh_command.join(" ")))
}

#[test]
fn owners_pass_only_where_no_number_is_translated() {
    let info = mounted(&[("/mnt/a", "root@store1:/srv")]);
    let entry = *info.visible().iter().find(|entry| entry.fs_type == FS_TYPE).expect("it");
    let passes = |options: &str| {
        shows_changes(entry, &process(&["sshfs", "root@store1:/srv", "/mnt/a", "-o", options]))
    };
    assert!(passes("allow_other,idmap=none,Port=22"));
    for options in ["idmap=user", "idmap=file,uidfile=/x", "sftp_server=sudo /x", "uid=7"] {
        assert!(!passes(options), "{options}");
    }
    assert!(!shows_changes(entry, &Daemons::default()));
}

#[test]
fn owners_pass_only_where_the_kernel_remembers_no_longer_than_by_default() {
    let info = mounted(&[("/mnt/a", "h:/a")]);
    let passes = |options: &str| {
        let words = process(&["sshfs", "h:/a", "/mnt/a", "-o", options]);
        let (config, left_out) = adopt(&Config::default(), &info, &words);
        assert_eq!(left_out, [], "{options}");
        let entry = *info.visible().iter().find(|entry| entry.fs_type == FS_TYPE).expect("it");
        assert_eq!(config.mounts[0].shows_changes, shows_changes(entry, &words), "{options}");
        config.mounts[0].shows_changes
    };
    let same = "noauto_cache,attr_timeout=1,entry_timeout=0.5,ac_attr_timeout=0,negative_timeout=0";
    for options in [same, "cache=no", "dcache_timeout=20", "dir_cache=no"] {
        assert!(passes(options), "{options}");
    }
    for options in [
        "kernel_cache",
        "auto_cache",
        "rw,attr_timeout=1.01",
        "entry_timeout=60",
        "ac_attr_timeout=60",
        "negative_timeout=0.1",
        "attr_timeout=inf",
        "attr_timeout=nan",
        "entry_timeout=0x10",
    ] {
        assert!(!passes(options), "{options}");
    }
}

#[test]
fn mounts_whose_modes_the_kernel_checks_are_root_s_alone() {
    let line = format!(
        "30 20 0:0 / /mnt/a rw - fuse.sshfs h:/a rw,user_id={},default_permissions\n",
        uid()
    );
    let info = MountInfo::parse(line.as_bytes()).expect("mountinfo");
    let processes = process(&["sshfs", "h:/a", "/mnt/a", "-o", "default_permissions"]);
    let (config, left_out) = adopt(&Config::default(), &info, &processes);
    let is_root = uid() == 0;
    assert_eq!((config.mounts.len(), left_out.len()), if is_root { (1, 0) } else { (0, 1) });
}

#[test]
fn the_way_is_that_of_sshfs() {
    let check = |source: &str, options: &[&str], expect: (&str, &str, &str)| {
        let words = [&["sshfs", source, "/mnt/a"], options].concat();
        let (address, export, ssh) = adopt_one(source, &words).expect(source);
        assert_eq!((address.as_str(), export.as_str(), ssh.as_str()), expect, "{words:?}");
    };
    check("store1:/srv/a", &[], ("ssh://store1", "/srv/a", "ssh"));
    check("ada@store1:", &[], ("ssh://ada@store1", "~", "ssh"));
    check("ada@store1:data/x y/", &[], ("ssh://ada@store1", "~/data/x y", "ssh"));
    check("[::1]:/", &[], ("ssh://[::1]", "/", "ssh"));
    check("ada@[fe80::1]:/a:b", &[], ("ssh://ada@[fe80::1]", "/a:b", "ssh"));
    check("h:/a", &["-p", "2222"], ("ssh://h:2222", "/a", "ssh"));
    check("h:/a", &["-p2222", "-C", "-f"], ("ssh://h:2222", "/a", "ssh -C"));
    check(
        "h:/a",
        &["-oPort=22,reconnect", "-F", "/etc/ssh/x"],
        ("ssh://h:22", "/a", "ssh -F /etc/ssh/x"),
    );
    check(
        "h:/a",
        &[
            "-o",
            "IdentityFile=~/.ssh/k,ProxyJump=gate,BatchMode=no,rw,nosuid,idmap=user",
            "-o",
            "cache_timeout=3",
        ],
        ("ssh://h", "/a", "ssh -o IdentityFile=~/.ssh/k -o ProxyJump=gate"),
    );
    check(
        "h:/a",
        &["-o", "ssh_command=ssh -i /k\\,1,Compression=yes"],
        ("ssh://h", "/a", "ssh -i /k,1 -o Compression=yes"),
    );
}

#[test]
fn what_is_not_known_is_left_alone() {
    let check = |source: &str, options: &[&str], expect: &str| {
        let words = [&["sshfs", source, "/mnt/a"], options].concat();
        let reason = adopt_one(source, &words).expect_err(source);
        assert!(reason.contains(expect), "{words:?}: {reason}");
    };
    for option in [
        "ro",
        "follow_symlinks",
        "transform_symlinks",
        "idmap=file",
        "umask=077",
        "sftp_server=/x",
        "port=3",
    ] {
        let name = option.split('=').next().expect("a name");
        check("h:/a", &["-o", option], &format!("mounted with the option {name}, "));
    }
    for option in
        ["cache_timeout=115200", "dcache_stat_timeout=21", "dcache_dir_timeout=-1", "cache_timeout"]
    {
        check("h:/a", &["-o", option], "remembers for more than 20 s");
    }
    check("h:/a", &["-1"], "option -1 is not known");
    check("h:/a", &["-F", "config"], "relative file \"config\"");
    check("h:/a", &["-oIdentityFile=key"], "relative file \"key\"");
    check("h:/a", &["-p", "x"], "port \"x\" is none");
    check("h:/a", &["-o"], "option -o has no value");
    check("-h:/a", &[], "option -h:/a is not known");
    check("h:/a/../b", &[], "\"/a/../b\" holds ..");
    let elsewhere = ["sshfs", "h:/a", "/mnt/b"];
    assert!(adopt_one("h:/a", &elsewhere).expect_err("another mount").contains("not found"));
}

#[test]
fn mounts_are_told_apart_by_their_processes() {
    let info =
        mounted(&[("/mnt/a", "h:/a"), ("/mnt/b", "h:/a"), ("/mnt/c", "h:/c"), ("/mnt/d", "h:/d")]);
    let processes = [
        &["/usr/bin/sshfs", "h:/a", "/mnt/a"][..],
        &["sshfs", "-p", "2222", "h:/a", "b"],
        &["mount.sshfs", "h:/c", "./c", "-o", "rw"],
        &["sshfs", "h:/d", "d"],
        &["sshfs", "h:/d", "d", "-p", "4"],
    ];
    let adopted = |held: &dyn Fn(u32) -> FuseDescriptors| {
        let daemons: Vec<_> =
            processes.iter().zip(0..).map(|(words, number)| (*words, held(number))).collect();
        let (config, left_out) = adopt(&Config::default(), &info, &Daemons::of(&daemons));
        let owner = |mount: &MountConfig| format!("{} {}", mount.path.display(), mount.executor);
        (config.mounts.iter().map(owner).collect::<Vec<_>>(), config.executors.len(), left_out)
    };
    // By their words, where the kernel does not tell more.
    let (owners, executors, left_out) = adopted(&|_| FuseDescriptors::Untold);
    assert_eq!(
        (owners, executors),
        (vec!["/mnt/a h".into(), "/mnt/b h:2222".into(), "/mnt/c h".into()], 2)
    );
    assert!(left_out[0].reason.contains("several sshfs processes"), "{left_out:?}");
    // By their connections, of which the last has no mount here.
    let (owners, _, left_out) = adopted(&|number| FuseDescriptors::Connections(vec![number]));
    assert_eq!((&owners[3], left_out.len()), (&"/mnt/d h".to_owned(), 0));
    // Words alone are not enough where it tells.
    let (owners, _, left_out) = adopted(&|number| FuseDescriptors::Connections(vec![number + 10]));
    assert_eq!((owners.len(), left_out.len()), (0, 4));
}

#[test]
fn configured_and_foreign_mounts_stay_what_they_are() {
    let info = mounted(&[("/mnt/a", "h:/a")]);
    let processes = process(&["sshfs", "h:/a", "/mnt/a"]);
    let text = "executor = [{name='h', address='http://h:1'}]\n[[mount]]\npath='/mnt/a'\nexecutor='h'\nexport='a'\n";
    let named = Config::parse(text, Path::new("mounts.toml")).expect("no mistake");
    assert_eq!(adopt(&named, &info, &processes), (named.clone(), Vec::new()));
    // A name that is taken is not taken away.
    let text = "executor = [{name='h', address='http://h:1'}]\n";
    let other = Config::parse(text, Path::new("mounts.toml")).expect("no mistake");
    assert_eq!(adopt(&other, &info, &processes).0.mounts[0].executor.as_str(), "h-2");
    let off = Config::parse("[gateway]\nsshfs = \"off\"\n", Path::new("mounts.toml"))
        .expect("no mistake");
    assert_eq!(adopted(&off, &info), (off.clone(), Vec::new()));
    let line =
        format!("30 20 0:1 / /mnt/a rw - fuse.sshfs h:/a rw,user_id={},group_id=0\n", uid() + 1);
    let of_another = MountInfo::parse(line.as_bytes()).expect("mountinfo");
    assert!(!is_mounted(&of_another) && is_mounted(&info));
}

#[test]
fn other_programs_are_not_sshfs() {
    assert_eq!(processes::arguments(&[]), None);
    assert_eq!(processes::arguments(&["vim".into(), "sshfs".into()]), None);
}
