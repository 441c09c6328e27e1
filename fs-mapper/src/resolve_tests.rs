//! Who owns a path: tables of cases over a made-up mount list and a real tree of
//! symlinks, and a model: realpath(3) and the longest prefix.

use super::*;
use crate::config::Config;
use crate::mountinfo::MountInfo;
use std::fs;
use std::os::unix::fs::symlink;

/// A tree in a temporary directory, and mounts that are said to be in it. What
/// they hold is the tree itself, so that the kernel can be asked for the truth.
struct Lab {
    _dir: tempfile::TempDir,
    base: PathBuf,
    table: MountTable,
}

/// `B` in any of the texts stands for the directory.
impl Lab {
    fn new(dirs: &[&str], links: &[(&str, &str)], mounts: &str, config: &str) -> Lab {
        let dir = tempfile::tempdir().expect("a directory");
        let base = dir.path().canonicalize().expect("a real path");
        let real = |text: &str| text.replace('B', base.to_str().expect("ASCII"));
        for dir in dirs {
            fs::create_dir_all(real(dir)).expect("a directory");
        }
        for (link, target) in links {
            symlink(real(target), real(link)).expect("a link");
        }
        let root = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:4 / /proc rw - proc proc rw\n";
        let info =
            MountInfo::parse(format!("{root}{}", real(mounts)).as_bytes()).expect("mountinfo");
        let executors = "[[executor]]\nname='s1'\naddress='http://s:1'\n[[executor]]\nname='s2'\naddress='http://s:2'\n";
        let config = Config::parse(&format!("{executors}{}", real(config)), Path::new("m"))
            .expect("a configuration");
        let table = MountTable::new(&config, &info);
        Lab { _dir: dir, base, table }
    }

    fn real(&self, text: &str) -> PathBuf {
        PathBuf::from(text.replace('B', self.base.to_str().expect("ASCII")))
    }

    /// What becomes of a path, in short: `s1 logs:/a @ B/mnt/logs/a`, or the reason.
    fn show(&self, path: &str, cwd: &str) -> String {
        self.shown(self.table.resolve(&self.real(path), &self.real(cwd)))
    }

    fn shown(&self, resolution: Resolution) -> String {
        let text = match resolution {
            Resolution::Owned(owned) => {
                let flags = [(owned.uncertain, " uncertain"), (owned.through_symlink, " link")];
                let flags: String =
                    flags.iter().filter(|(set, _)| *set).map(|(_, flag)| *flag).collect();
                format!(
                    "{} {} @ {}{flags}",
                    owned.executor,
                    owned.export_path,
                    owned.client_path.as_path().display()
                )
            }
            Resolution::Local { reason } => reason.to_string(),
        };
        text.replace(self.base.to_str().expect("ASCII"), "B")
    }
}

fn mount(path: &str, executor: &str, export: &str, more: &str) -> String {
    format!("[[mount]]\npath='{path}'\nexecutor='{executor}'\nexport='{export}'\n{more}\n")
}

/// Two owned mounts, one inside the other; a tmpfs and a foreign NFS inside of
/// the first; an NFS elsewhere; links to all of them.
fn lab() -> Lab {
    let mounts = "10 1 0:10 / B/mnt/logs rw - fuse.sshfs me@s:logs rw\n\
                  11 10 0:11 / B/mnt/logs/old rw - nfs s2:/old rw\n\
                  12 10 0:12 / B/mnt/logs/deep/cache rw - tmpfs tmpfs rw\n\
                  13 10 0:13 / B/mnt/logs/nfs rw - nfs4 other:/x rw\n\
                  14 1 0:14 / B/net rw - nfs other:/y rw\n\
                  15 1 0:10 /sub/x B/srv/x rw - fuse.sshfs me@s:logs rw\n\
                  16 1 0:11 / B/srv/old-y rw - nfs s2:/old/y rw\n\
                  17 1 8:1 /home B/srv/local rw - ext4 /dev/sda1 rw\n";
    let config = mount("B/mnt/logs", "s1", "logs", "")
        + &mount("B/mnt/logs/old", "s2", "archive", "sub_path='2025'")
        + &mount("B/mnt/logs/bigger", "s2", "bigger", "")
        + &mount("B/mnt/none", "s2", "none", "");
    let dirs = ["B/mnt/logs/dir", "B/mnt/none", "B/net", "B/home/u", "B/srv", "B/mnt/logs/old"];
    let links = [
        ("B/home/u/logs", "../../mnt/logs"),
        ("B/home/u/abs", "B/mnt/logs/dir"),
        ("B/home/u/old", "logs/old/y"),
        ("B/home/u/loop", "loop"),
        ("B/home/u/net", "B/net/z"),
        ("B/home/u/up", "../../mnt/logs/dir/../up"),
        ("B/mnt/logs/inner", "B/home/u"),
        ("B/home/u/broken", "nothing"),
    ];
    Lab::new(&dirs, &links, mounts, &config)
}

#[test]
fn owners() {
    let lab = lab();
    let check = |path: &str, expect: &str| assert_eq!(lab.show(path, "B/home/u"), expect, "{path}");
    check("B/mnt/logs/a.log", "s1 logs:/a.log @ B/mnt/logs/a.log");
    check("B//mnt/./logs//dir/a/", "s1 logs:/dir/a @ B/mnt/logs/dir/a");
    check("B/mnt/logs", "s1 logs:/ @ B/mnt/logs");
    check("B/mnt/logs/", "s1 logs:/ @ B/mnt/logs");
    check("../../mnt/logs/x", "s1 logs:/x @ B/mnt/logs/x");
    // The longest prefix.
    check("B/mnt/logs/old/f", "s2 archive:/2025/f @ B/mnt/logs/old/f");
    check("B/mnt/logs/bigger/f", "s2 bigger:/f @ B/mnt/logs/bigger/f");
    check("B/mnt/logs-2/f", "B/mnt/logs-2/f is not on a mount with an executor");
    // `..` above a mount is followed, also out of one that is known by its mount points.
    check("B/mnt/../mnt/logs/f", "s1 logs:/f @ B/mnt/logs/f");
    check("B/mnt/logs/old/../f", "s1 logs:/f @ B/mnt/logs/f");
    check("B/mnt/logs/deep/../f", "s1 logs:/f @ B/mnt/logs/f");
    // Below it stays.
    check("B/mnt/logs/dir/../f", "s1 logs:/dir/../f @ B/mnt/logs/dir/../f uncertain");
    check(
        "B/mnt/logs/a/../../../home/u/f",
        "s1 logs:/a/../../../home/u/f @ B/mnt/logs/a/../../../home/u/f uncertain",
    );
    check("B/mnt/logs/../f", "B/mnt/logs/../f is not on a mount with an executor");
    // What is not there is the executor's to tell, above it is ours.
    check("B/mnt/logs/absent/f", "s1 logs:/absent/f @ B/mnt/logs/absent/f");
    check("B/absent/../mnt/logs/f", "B/absent/../mnt/logs/f is not on a mount with an executor");
}

#[test]
fn links_above_mounts_are_followed_and_those_below_are_not() {
    let lab = lab();
    let check = |path: &str, expect: &str| assert_eq!(lab.show(path, "B/home/u"), expect, "{path}");
    check("logs/a", "s1 logs:/a @ B/mnt/logs/a link");
    check("B/home/u/abs/a", "s1 logs:/dir/a @ B/mnt/logs/dir/a link");
    check("abs", "s1 logs:/dir @ B/mnt/logs/dir link");
    check("old/f", "s2 archive:/2025/y/f @ B/mnt/logs/old/y/f link");
    check("up/f", "s1 logs:/dir/../up/f @ B/mnt/logs/dir/../up/f uncertain link");
    check("B/mnt/logs/inner/f", "s1 logs:/inner/f @ B/mnt/logs/inner/f");
    check("loop/f", "loop/f passes too many symbolic links");
    check("broken", "broken is not on a mount with an executor");
    check("net", "B/net (nfs) has no executor in the configuration");
    // An absolute link ends what stood before it, `..` after a link is that of its target.
    check("abs/../f", "s1 logs:/dir/../f @ B/mnt/logs/dir/../f uncertain link");
    check("logs/../f", "logs/../f is not on a mount with an executor");
}

#[test]
fn the_link_itself() {
    let lab = lab();
    let check = |path: &str, expect: &str| {
        let cwd = lab.real("B/home/u");
        let found = Resolver::new(&lab.table, &cwd).resolve_with(&lab.real(path), LastLink::Keep);
        assert_eq!(lab.shown(found), expect, "{path}");
    };
    check("abs", "abs is not on a mount with an executor");
    check("B/home/u/abs", "B/home/u/abs is not on a mount with an executor");
    check("abs/", "s1 logs:/dir @ B/mnt/logs/dir link");
    check("logs/a", "s1 logs:/a @ B/mnt/logs/a link");
    check("B/mnt/logs", "s1 logs:/ @ B/mnt/logs");
}

#[test]
fn local_reasons() {
    let lab = lab();
    let check = |path: &str, expect: &str| assert_eq!(lab.show(path, "B/home/u"), expect, "{path}");
    check(
        "B/mnt/logs/deep/cache/f",
        "B/mnt/logs/deep/cache (tmpfs) is mounted inside B/mnt/logs and is not part of it",
    );
    check(
        "B/mnt/logs/nfs/f",
        "B/mnt/logs/nfs (nfs4) is mounted inside B/mnt/logs and is not part of it",
    );
    check("B/net/f", "B/net (nfs) has no executor in the configuration");
    check("B/mnt/none/f", "nothing is mounted on B/mnt/none now");
    check("/proc/self/cwd/f", "/proc/self/cwd/f is a view of one process");
    check("", "\"\" is not a path");
    check("a\0b", "\"a\\0b\" is not a path");
    check("file/..", "file/.. is not on a mount with an executor");
    assert_eq!(lab.show("x", "nowhere"), "\"x\" is not a path");
    // A file is no way to its directory.
    fs::write(lab.real("B/home/u/plain"), "").expect("a file");
    check("plain/../logs/f", "plain/../logs/f is not on a mount with an executor");
    check("./../u/logs/f", "s1 logs:/f @ B/mnt/logs/f link");
}

#[test]
fn the_working_directory_is_a_real_one() {
    let lab = lab();
    let check = |path: &str, cwd: &str, expect: &str| {
        assert_eq!(lab.show(path, cwd), expect, "{path} in {cwd}")
    };
    check("f", "B/mnt/logs/dir", "s1 logs:/dir/f @ B/mnt/logs/dir/f");
    check("../f", "B/mnt/logs/dir", "s1 logs:/f @ B/mnt/logs/f");
    check("../../f", "B/mnt/logs/dir", "../../f is not on a mount with an executor");
    check("a/../f", "B/mnt/logs/dir", "s1 logs:/dir/a/../f @ B/mnt/logs/dir/a/../f uncertain");
    check("logs/f", "B/mnt", "s1 logs:/f @ B/mnt/logs/f");
    check("../f", "B/mnt/logs/deep/cache", "s1 logs:/deep/f @ B/mnt/logs/deep/f");
    check(".", "B/mnt/logs", "s1 logs:/ @ B/mnt/logs");
    check("../mnt/logs/f", "B/net/z", "B/net (nfs) has no executor in the configuration");
    check("../../mnt/logs/f", "B/net/z", "s1 logs:/f @ B/mnt/logs/f");
}

#[test]
fn bind_mounts_of_parts_are_owned_too() {
    let lab = lab();
    let check = |path: &str, expect: &str| assert_eq!(lab.show(path, "B"), expect, "{path}");
    check("B/srv/x/f", "s1 logs:/sub/x/f @ B/srv/x/f");
    check("srv/old-y/f", "s2 archive:/2025/y/f @ B/srv/old-y/f");
    check("srv/local/f", "srv/local/f is not on a mount with an executor");
    let derived =
        lab.table.mounts().find(|mount| mount.kernel_id == Some(15)).expect("the bind mount");
    assert_eq!(
        derived.owner.as_ref().map(|owner| owner.sub_path.as_path()),
        Some(Path::new("sub/x"))
    );
}

#[test]
fn a_bind_mount_of_a_local_directory_owns_that_directory_and_no_more() {
    let mounts = "10 1 8:1 /data/logs B/mnt rw - ext4 /dev/sda1 rw\n\
                  11 1 8:1 /data/logs/x B/x rw - ext4 /dev/sda1 rw\n\
                  12 1 8:1 /data B/y rw - ext4 /dev/sda1 rw\n\
                  13 1 8:2 /data/logs B/z rw - ext4 /dev/sdb1 rw\n\
                  14 1 8:1 /data/logs/gone//deleted B/w rw - ext4 /dev/sda1 rw\n";
    let lab = Lab::new(&["B/mnt"], &[], mounts, &mount("B/mnt", "s1", "logs", ""));
    let owned: Vec<PathBuf> =
        lab.table.mounts().map(|mount| mount.path.as_path().to_path_buf()).collect();
    assert_eq!(owned, [lab.real("B/mnt"), lab.real("B/x")]);
    assert_eq!(lab.table.prefixes().owned(), owned);
}

#[test]
fn configured_paths_may_be_links() {
    let links = [("B/data", "mnt/logs"), ("B/again", "data")];
    let mounts = "10 1 0:10 / B/mnt/logs rw - fuse.sshfs s:logs rw\n";
    let config = mount("B/data", "s1", "logs", "") + &mount("B/again", "s2", "other", "");
    let lab = Lab::new(&["B/mnt/logs"], &links, mounts, &config);
    assert_eq!(lab.show("B/data/f", "/"), "s1 logs:/f @ B/mnt/logs/f link");
    assert_eq!(lab.show("B/mnt/logs/f", "/"), "s1 logs:/f @ B/mnt/logs/f");
    let shown: Vec<&Mount> = lab.table.mounts().collect();
    assert_eq!(shown.len(), 1);
    assert_eq!(shown[0].configured_as, Some(lab.real("B/data")));
    let problem =
        lab.table.problems()[0].to_string().replace(lab.base.to_str().expect("ASCII"), "B");
    assert_eq!(
        problem,
        "line 12: B/again is the same directory as B/data, which is in line 7; only the first counts"
    );
}

#[test]
fn plain_directories_are_owned_only_when_the_configuration_says_so() {
    let config =
        mount("B/plain", "s1", "plain", "coherence='bind'") + &mount("B/bare", "s1", "bare", "");
    let lab = Lab::new(&["B/plain", "B/bare"], &[], "", &config);
    assert_eq!(lab.show("B/plain/f", "/"), "s1 plain:/f @ B/plain/f");
    assert_eq!(lab.show("B/bare/f", "/"), "nothing is mounted on B/bare now");
    let states: Vec<(MountState, bool)> =
        lab.table.mounts().map(|mount| (mount.state, mount.mounted())).collect();
    assert_eq!(states, [(MountState::NotMounted, false), (MountState::PlainDirectory, true)]);
}

#[test]
fn a_directory_inside_a_network_mount_can_have_an_owner() {
    let mounts = "10 1 0:10 / B/net rw - nfs s:/ rw\n11 1 0:10 / B/bind rw - nfs s:/logs/a rw\n";
    let lab = Lab::new(&["B/net"], &[], mounts, &mount("B/net/logs", "s1", "logs", ""));
    assert_eq!(lab.show("B/net/logs/f", "/"), "s1 logs:/f @ B/net/logs/f");
    assert_eq!(lab.show("B/net/f", "/"), "B/net (nfs) has no executor in the configuration");
    assert_eq!(lab.show("B/bind/f", "/"), "s1 logs:/a/f @ B/bind/f");
}

#[test]
fn what_the_automounter_has_yet_to_mount() {
    let mounts = "10 1 0:10 / B/net rw - autofs auto.net rw\n11 1 0:11 / B/direct rw - autofs systemd-1 rw\n\
                  12 11 0:12 / B/direct rw - nfs s:/d rw\n13 1 0:13 / B/wait rw - autofs systemd-1 rw\n";
    let config = mount("B/net/logs", "s1", "logs", "")
        + &mount("B/direct", "s1", "d", "")
        + &mount("B/wait", "s2", "w", "");
    let lab = Lab::new(&["B/net", "B/direct", "B/wait"], &[], mounts, &config);
    assert_eq!(
        lab.show("B/net/logs/f", "/"),
        "B/net/logs has not been mounted by the automounter yet"
    );
    assert_eq!(
        lab.show("B/net/else/f", "/"),
        "B/net (autofs) has no executor in the configuration"
    );
    assert_eq!(lab.show("B/direct/f", "/"), "s1 d:/f @ B/direct/f");
    assert_eq!(lab.show("B/wait/f", "/"), "B/wait has not been mounted by the automounter yet");
    // The stage asks the gateway about them.
    assert!(lab.table.prefixes().may_touch(b"logs/f", &lab.real("B/net")));
    assert!(lab.table.prefixes().may_touch(b"wait/f", &lab.base));
}

#[test]
fn nested_mounts() {
    let lab = lab();
    let check = |path: &str, expect: &[&str]| {
        let path = ClientPath::new(lab.real(path)).expect("absolute");
        let nested: Vec<PathBuf> = lab
            .table
            .nested(&path)
            .iter()
            .map(|mount| mount.path.as_path().to_path_buf())
            .collect();
        assert_eq!(nested, expect.iter().map(|text| lab.real(text)).collect::<Vec<_>>());
    };
    check("B/mnt/logs/deep", &["B/mnt/logs/deep/cache"]);
    check("B/mnt/logs/deep/cache", &[]);
    let all = ["B/mnt/logs/bigger", "B/mnt/logs/deep/cache", "B/mnt/logs/nfs", "B/mnt/logs/old"];
    check("B/mnt/logs", &all);
    check("B/mnt", &[&["B/mnt/logs"], &all[..]].concat());
    check("B/home", &[]);
}

#[test]
fn many_names_in_one_directory() {
    let lab = lab();
    let cwd = lab.real("B/home/u");
    let mut resolver = Resolver::new(&lab.table, &cwd);
    for number in 0..10_000 {
        let expect = format!("s1 logs:/{number} @ B/mnt/logs/{number} link");
        assert_eq!(lab.shown(resolver.resolve(Path::new(&format!("logs/{number}")))), expect);
    }
    assert_eq!(resolver.directories.len(), 1);
}

#[path = "model_tests.rs"]
mod model;

#[test]
fn mounts_of_other_users_are_not_used() {
    let own = rustix::process::geteuid().as_raw();
    let line = |id: u32, path: &str, fs_type: &str, options: &str| {
        format!("{id} 1 0:{id} / {path} rw - {fs_type} h:/a rw,{options}\n")
    };
    let other = format!("user_id={},allow_other", own + 1);
    let mounts = [
        line(10, "B/own", "fuse.sshfs", &format!("user_id={own},allow_other")),
        line(11, "B/other", "fuse.sshfs", &other),
        line(12, "B/cloud", "fuse.rclone", &other),
        // The number means nothing to other file systems.
        line(13, "B/nfs", "nfs4", &other),
        line(11, "B/bound", "fuse.sshfs", &other),
        line(14, "B/unnamed", "fuse.sshfs", &other),
        line(15, "B/modes", "fuse.sshfs", &format!("user_id={own},default_permissions")),
    ];
    let named = ["own", "other", "cloud", "nfs", "modes"];
    let config = named.map(|name| mount(&format!("B/{name}"), "s1", name, ""));
    let lab = Lab::new(&["B/own"], &[], &mounts.concat(), &config.concat());
    for name in ["own", "nfs"] {
        assert_eq!(
            lab.show(&format!("B/{name}/f"), "/"),
            format!("s1 {name}:/f @ B/{name}/f"),
            "{name}"
        );
    }
    for name in ["other", "cloud", "bound", "unnamed"] {
        let reason = format!(
            "B/{name} is not used: it is a mount of the user {}, whose rights count there",
            own + 1
        );
        assert_eq!(lab.show(&format!("B/{name}/f"), "/"), reason);
    }
    let modes = lab.show("B/modes/f", "/");
    assert_eq!(modes.starts_with("s1 modes:/f"), own == 0, "{modes}");
}
