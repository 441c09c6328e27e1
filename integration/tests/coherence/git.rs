//! What git changes on the server, and what of it the mount is told.

use super::*;

/// Changes by git, one after the other.
const BY_GIT: &[(&str, &str)] = &[
    ("echo b > src/b && git add src/b", "git add"),
    ("git commit -q -m b", "git commit"),
    ("git checkout -q -b other HEAD~1", "git checkout"),
    ("mkdir -p new/deep && echo c > new/deep/c && git add . && git commit -q -m c", "git commit"),
    ("git checkout -q main", "git checkout"),
    ("git checkout -q other", "git checkout"),
    ("git reset -q --hard HEAD~1", "git reset"),
    ("git branch -q -D main", "git branch"),
    // A file of the same size, one with another mode, one that goes; then what stays in its place
    // and is written into.
    ("git apply ../patch", "git apply"),
    ("git apply --reject ../patch 2> /dev/null || true", "git apply"),
    (
        "sed -i 's/^+A/+and/' ../patch; git apply --reject ../patch 2> /dev/null || true",
        "git apply",
    ),
];

const PATCH: &str = "\
diff --git a/src/a b/src/a
--- a/src/a
+++ b/src/a
@@ -1 +1 @@
-a
+A
diff --git a/src/new b/src/new
new file mode 100755
--- /dev/null
+++ b/src/new
@@ -0,0 +1 @@
+new
";

#[test]
fn sshfs_shows_what_git_has_changed_at_once() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let made =
        "mkdir -p repo/src && cd repo && git init -q -b main && git config user.name A && git config user.email a@b &&
        git config gc.auto 0 && git config core.checkStat minimal && git config core.trustctime false &&
        echo a > src/a && git add . && git commit -q -m a";
    let mut command = lab.servers[0].host.command("sh");
    command.args(["-c", made]).current_dir("/srv/s1");
    lab.servers[0].host.must(command).unwrap();
    let (mount, store) = (lab.workstation.path("/mnt/s1/repo"), lab.data(1).join("repo"));
    fs::write(lab.data(1).join("patch"), PATCH).unwrap();
    for (change, command) in BY_GIT {
        // Listed now: of what is not listed again before the next change nobody remembers anything.
        let before = look(&mount);
        let outcome = run(&lab.workstation, &format!("cd /mnt/s1/repo && {change}"));
        assert_offloaded(&outcome, command);
        assert_eq!(look_for(&mount, &before), look(&store), "{change}");
    }
    // The same, looked at only in the end.
    run(
        &lab.workstation,
        "cd /mnt/s1/repo && for i in 1 2 3; do echo $i > src/$i; git add .; git commit -q -m $i; done",
    );
    assert_eq!(look(&mount), look(&store));
}

/// Each adds objects to directories that git has made or read just before, and nobody else.
#[test]
fn of_what_only_git_reads_no_listing_is_forgotten() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    let made = "git init -q -b main repo && cd repo && git config user.name A && git config user.email a@b &&
        git config gc.auto 0 && git config core.checkStat minimal && git config core.trustctime false";
    let mut command = lab.servers[0].host.command("sh");
    command.args(["-c", made]).current_dir("/srv/s1");
    lab.servers[0].host.must(command).unwrap();
    let commits = "cd /mnt/s1/repo; for i in $(seq 36); do echo $i > $i; git add .; git commit -q -m $i; done";
    let mut script = Script::new(commits);
    script.options = vec!["--trace".to_owned(), "trace.json".to_owned()];
    let outcome = script.run(&lab.workstation, Under::Posh).unwrap();
    assert!(outcome.status.success() && outcome.stderr.is_empty(), "{outcome}");
    let trace = fs::read_to_string(lab.workstation.path(HOME).join("trace.json")).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
    let refreshes = trace["traceEvents"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|e| e["name"] == "refreshing the mount");
    let listings: Vec<bool> =
        refreshes.map(|refresh| !refresh["args"]["listings"].is_null()).collect();
    assert_eq!(listings.len(), 72, "all ran on the server");
    // The first commands find directories that were made and read before posh came. Without the
    // mechanism a third of the later ones put an object where git had looked before.
    assert_eq!(listings.iter().skip(36).filter(|told| **told).count(), 0, "{listings:?}");
    assert_eq!(look(&lab.workstation.path("/mnt/s1/repo")), look(&lab.data(1).join("repo")));
}

/// A repository on the server, of which two directories have a file that a patch replaces.
fn patched_repository(lab: &Lab) {
    let made = "git init -q -b main repo && cd repo && git config core.checkStat minimal &&
        git config core.trustctime false && mkdir src lib && echo a > src/a && echo b > lib/b &&
        sed s,a/src/a,a/lib/b,\\;s,b/src/a,b/lib/b,\\;s,-a,-b,\\;s,+A,+BBB, ../one > ../two && touch -d 2020-01-01 src lib src/a lib/b";
    let one = PATCH.split_inclusive('\n').take(6).collect::<String>();
    fs::write(lab.data(1).join("one"), one).unwrap();
    let mut command = lab.servers[0].host.command("sh");
    command.args(["-c", made]).current_dir("/srv/s1");
    lab.servers[0].host.must(command).unwrap();
}

#[test]
fn sshfs_shows_what_git_apply_has_replaced() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    patched_repository(&lab);
    let (mount, store) = (lab.workstation.path("/mnt/s1/repo"), lab.data(1).join("repo"));
    let times = |top: &Path| {
        ["src", "lib", "src/a", "lib/b"]
            .map(|name| fs::symlink_metadata(top.join(name)).unwrap().mtime())
    };
    // One that is remembered with all its files, and one that nobody has looked at.
    assert_eq!(fs::read_to_string(mount.join("src/a")).unwrap(), "a\n");
    let before = [
        fs::symlink_metadata(mount.join("src")).unwrap().mtime(),
        fs::read_dir(mount.join("src")).unwrap().count() as i64,
    ];
    assert_eq!(before[1], 1);
    for patch in ["one", "two"] {
        assert_offloaded(
            &run(&lab.workstation, &format!("cd /mnt/s1/repo && git apply ../{patch}")),
            "git apply",
        );
    }
    assert_eq!((look(&mount), times(&mount)), (look(&store), times(&store)));
    assert!(times(&mount).iter().all(|time| *time > before[0]));
}

#[test]
fn of_what_git_apply_has_replaced_nothing_is_forgotten_that_is_shown_rightly() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    patched_repository(&lab);
    // sshfs forgets a listing when the group is set, which the directory's times on the server
    // tell.
    let is_forgotten = |name: &str| {
        let found = fs::metadata(lab.data(1).join("repo").join(name)).unwrap();
        (found.ctime(), found.ctime_nsec()) > (found.mtime(), found.mtime_nsec())
    };
    assert!(fs::symlink_metadata(lab.workstation.path("/mnt/s1/repo/lib")).unwrap().is_dir());
    for (patch, directory, is_remembered) in [("one", "src", false), ("two", "lib", true)] {
        assert_offloaded(
            &run(&lab.workstation, &format!("cd /mnt/s1/repo && git apply ../{patch}")),
            "git apply",
        );
        assert_eq!(is_forgotten(directory), is_remembered, "{directory}");
    }
}
