//! Guards: files near a command's directory decide whether it runs.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
};

use posh_executor::config::Commands;
use posh_proto::executor::{ClientFile, EnvVar, Guard, RunSpec, guard::Test, rejected::Kind};
use sha2::{Digest as _, Sha256};

use crate::harness::*;

const REASON: &str = "not there";

fn guard(test: Test, below: &str, files: &[&str]) -> Guard {
    Guard {
        below: below.to_owned(),
        files: files.iter().map(|file| file.as_bytes().to_vec().into()).collect(),
        test: test.into(),
        reason: REASON.to_owned(),
        ..Guard::default()
    }
}

fn settings(test: Test, files: &[&str], settings: &[&str]) -> Guard {
    let settings = settings.iter().map(|&pattern| pattern.to_owned()).collect();
    Guard { settings, ..guard(test, ".git", files) }
}

fn guarded(guard: &Guard, directory: &str) -> RunSpec {
    let mut spec = pipeline(&["echo ok"]);
    spec.stages[0].cwd = directory.to_owned().into();
    spec.stages[0].guards = vec![guard.clone()];
    spec
}

impl Lab {
    /// A repository as made by `git init`, in `repository`, with a directory `a/b` in it.
    fn with_repository(self) -> Self {
        let git = self.store.path().join("repository/.git");
        for directory in ["hooks", "objects/info", "refs"] {
            fs::create_dir_all(git.join(directory)).unwrap();
        }
        fs::create_dir_all(self.store.path().join("repository/a/b")).unwrap();
        self.write("repository/.git/HEAD", "ref: refs/heads/main\n");
        self.write("repository/.git/config", "[core]\n\tbare = false\n[user]\n\temail = a@b\n");
        self.program("repository/.git/hooks/pre-commit.sample");
        self
    }

    fn program(&self, name: &str) {
        self.write(name, "#!/bin/sh\n");
        fs::set_permissions(self.store.path().join(name), fs::Permissions::from_mode(0o755))
            .unwrap();
    }

    async fn passes(&self, guard: &Guard) {
        for directory in ["repository", "repository/a/b"] {
            let outcome = self.run(guarded(guard, &format!("{MOUNT}/{directory}"))).await;
            assert_eq!(outcome.text(), "ok\n", "{guard:?}");
        }
        // From another directory, by the guard's own.
        let elsewhere = Guard { directory: "repository/a".into(), ..guard.clone() };
        assert_eq!(self.run(guarded(&elsewhere, MOUNT)).await.text(), "ok\n", "{guard:?}");
    }

    async fn refuses(&self, guard: &Guard, found: &str) {
        let elsewhere = Guard { directory: "repository/a".into(), ..guard.clone() };
        let specs = ["repository", "repository/a/b"]
            .map(|directory| guarded(guard, &format!("{MOUNT}/{directory}")));
        for spec in specs.into_iter().chain([guarded(&elsewhere, MOUNT)]) {
            let outcome = self.run(spec).await;
            let refusal = outcome.refusal();
            assert_eq!((refusal.kind(), refusal.stage), (Kind::Guard, 1));
            let expected =
                if found.is_empty() { REASON.to_owned() } else { format!("{REASON} ({found})") };
            assert_eq!(refusal.message, expected);
        }
    }
}

#[tokio::test]
async fn hooks_count_when_they_can_be_executed() {
    let lab = Lab::start().await.with_repository();
    let hooks = guard(Test::Executable, ".git", &["hooks/commit-msg", "hooks/pre-commit"]);
    lab.passes(&hooks).await;
    lab.write("repository/.git/hooks/pre-commit", "not executable");
    lab.passes(&hooks).await;
    lab.program("repository/.git/hooks/pre-commit");
    lab.refuses(&hooks, &format!("{MOUNT}/repository/.git/hooks/pre-commit")).await;
    // Without a repository, the command reports that itself.
    assert_eq!(lab.run(guarded(&hooks, MOUNT)).await.text(), "ok\n");
    assert_eq!(lab.run(guarded(&hooks, "/home/nobody-here")).await.text(), "ok\n");
}

#[tokio::test]
async fn a_hook_that_only_the_workstation_may_have_is_refused() {
    let lab = Lab::start().await.with_repository();
    let hooks = guard(Test::Executable, ".git", &["hooks/pre-commit"]);
    symlink("/home/u/hooks/pre-commit", lab.store.path().join("repository/.git/hooks/pre-commit"))
        .unwrap();
    let outcome = lab.run(guarded(&hooks, &format!("{MOUNT}/repository"))).await;
    assert!(outcome.refusal().message.contains("hooks/pre-commit leads to /"), "{outcome:?}");
    fs::remove_file(lab.store.path().join("repository/.git/hooks/pre-commit")).unwrap();
    lab.program("shared");
    symlink("../../../shared", lab.store.path().join("repository/.git/hooks/pre-commit")).unwrap();
    lab.refuses(&hooks, &format!("{MOUNT}/repository/.git/hooks/pre-commit")).await;
}

#[tokio::test]
async fn settings_are_an_allow_list() {
    let lab = Lab::start().await.with_repository();
    let config = format!("{MOUNT}/repository/.git/config");
    let allowed = settings(
        Test::SettingsAllowed,
        &["config"],
        &["core.bare", "user.*", "commit.gpgSign=false"],
    );
    lab.passes(&allowed).await;
    let plain = "[core]\n\tbare = false\n[commit] gpgsign = False\n";
    lab.write("repository/.git/config", plain);
    lab.passes(&allowed).await;
    for (added, found) in [
        (
            "[filter \"lfs\"]\n\tclean = git-lfs clean -- %f\n",
            format!("filter.lfs.clean in {config}"),
        ),
        ("[Include]path=~/work\n", format!("include.path in {config}")),
        ("[core] hooksPath = ../hooks\n", format!("core.hookspath in {config}")),
        ("[commit]\n\tgpgSign\n", format!("commit.gpgsign in {config}")),
        ("[broken\n", format!("line 5 of {config} is no setting")),
    ] {
        lab.write("repository/.git/config", format!("{plain}{added}"));
        lab.refuses(&allowed, &found).await;
    }
    lab.write("repository/.git/config", vec![b'\n'; (1 << 20) + 1]);
    lab.refuses(&allowed, &format!("{config} is larger than 1 MiB")).await;
    fs::remove_file(lab.store.path().join("repository/.git/config")).unwrap();
    lab.passes(&allowed).await;
    nix::unistd::mkfifo(
        &lab.store.path().join("repository/.git/config"),
        nix::sys::stat::Mode::S_IRWXU,
    )
    .unwrap();
    lab.refuses(&allowed, &format!("{config} is no plain file")).await;
}

#[tokio::test]
async fn settings_of_the_user_count_too() {
    let lab = Lab::start().await.with_repository();
    let user = "/home/u/.gitconfig";
    let run = |test, patterns: &[&str], content: &str| {
        let guard = settings(test, &["config", user], patterns);
        let mut spec = guarded(&guard, &format!("{MOUNT}/repository"));
        spec.client_files =
            vec![ClientFile { path: user.into(), content: content.to_owned().into(), mode: 0o600 }];
        lab.run(spec)
    };
    let name = ["user.name", "author.name"];
    assert_eq!(run(Test::SettingRequired, &name, "[user]\nname = A\n").await.text(), "ok\n");
    assert_eq!(run(Test::SettingRequired, &name, "").await.refusal().message, REASON);
    assert_eq!(run(Test::SettingRequired, &["user.email"], "").await.text(), "ok\n");
    let allowed = ["core.bare", "user.*"];
    assert_eq!(run(Test::SettingsAllowed, &allowed, "[user]\nname = A\n").await.text(), "ok\n");
    let outcome =
        run(Test::SettingsAllowed, &allowed, "[core]\neditor = x\n[diff]\nexternal = y\n").await;
    assert_eq!(outcome.refusal().message, format!("{REASON} (core.editor in {user})"));
}

#[tokio::test]
async fn what_is_missing_on_the_workstation_must_be_missing_here() {
    let lab = Lab::start().await;
    let absent = guard(Test::Exists, "", &["/etc/posh-test-no-such-file"]);
    assert_eq!(lab.run(guarded(&absent, MOUNT)).await.text(), "ok\n");
    let present = guard(Test::Exists, "", &["/etc/passwd"]);
    assert_eq!(
        lab.run(guarded(&present, MOUNT)).await.refusal().message,
        format!("{REASON} (/etc/passwd)")
    );
}

#[tokio::test]
async fn a_repository_that_is_not_whole_is_refused() {
    let lab = Lab::start().await.with_repository();
    let parts = guard(Test::Exists, ".git", &["objects/info/alternates", "worktrees"]);
    lab.passes(&parts).await;
    lab.write("repository/.git/objects/info/alternates", "/home/u/other/objects\n");
    lab.refuses(&parts, &format!("{MOUNT}/repository/.git/objects/info/alternates")).await;
    lab.write("repository/a/.git", "gitdir: /home/u/repository/.git/worktrees/a\n");
    let outcome = lab.run(guarded(&parts, &format!("{MOUNT}/repository/a/b"))).await;
    let expected = format!("{REASON} ({MOUNT}/repository/a/.git is no directory)");
    assert_eq!(outcome.refusal().message, expected);
    let elsewhere = lab.store.path().join("linked");
    fs::create_dir(&elsewhere).unwrap();
    symlink(Path::new("/home/u/repository/.git"), elsewhere.join(".git")).unwrap();
    let outcome = lab.run(guarded(&parts, &format!("{MOUNT}/linked"))).await;
    assert!(outcome.refusal().message.contains("linked/.git leads to /"), "{outcome:?}");
}

#[tokio::test]
async fn the_inside_of_a_repository_is_found_by_what_is_in_it() {
    let lab = Lab::start().await.with_repository();
    let inside = guard(Test::AllExist, "", &["HEAD", "objects", "refs"]);
    lab.passes(&inside).await;
    let outcome = lab.run(guarded(&inside, &format!("{MOUNT}/repository/.git/hooks"))).await;
    assert_eq!(outcome.refusal().message, format!("{REASON} ({MOUNT}/repository/.git)"));
}

fn same(files: &[(&str, Option<&[u8]>)]) -> Guard {
    let sha256 = |content: &[u8]| Sha256::digest(content).to_vec().into();
    Guard {
        sha256: files.iter().map(|(_, content)| content.map(sha256).unwrap_or_default()).collect(),
        ..guard(Test::SameContent, "", &files.iter().map(|(file, _)| *file).collect::<Vec<_>>())
    }
}

#[tokio::test]
async fn files_must_be_the_same_on_both_machines() {
    let lab = Lab::start().await;
    lab.write("f", "ours\n");
    lab.write("large", vec![b'x'; (1 << 20) + 1]);
    fs::create_dir(lab.store.path().join("d")).unwrap();
    let [f, none, large, d] = ["f", "none", "large", "d"].map(|name| format!("{MOUNT}/{name}"));
    let policy = fs::read("/etc/ImageMagick-6/policy.xml").ok();
    let policy = ("/etc/ImageMagick-6/policy.xml", policy.as_deref());
    let (ours, theirs) = (Some(&b"ours\n"[..]), Some(&b"theirs\n"[..]));
    for (files, found) in [
        (&[(&f[..], ours), (&none, None), policy][..], None),
        (&[(&f, theirs)], Some(f.clone())),
        (&[(&f, ours), (&f, None)], Some(f.clone())),
        (&[(&none, ours)], Some(none.clone())),
        (&[(policy.0, theirs)], Some(policy.0.to_owned())),
        (&[("f", ours)], Some("f is not absolute".to_owned())),
        (&[(&d, None)], Some(format!("{d} is no plain file"))),
        (&[(&large, ours)], Some(format!("{large} is larger than 1 MiB"))),
    ] {
        // A directory that is in no mount is as good as any other.
        for directory in [MOUNT, "/tmp"] {
            let outcome = lab.run(guarded(&same(files), directory)).await;
            match &found {
                None => assert_eq!(outcome.text(), "ok\n", "{files:?}"),
                Some(found) => assert_eq!(outcome.refusal().message, format!("{REASON} ({found})")),
            }
        }
    }
    let without = Guard { sha256: Vec::new(), ..same(&[(&f, ours)]) };
    assert_eq!(lab.run(guarded(&without, MOUNT)).await.refusal().kind(), Kind::Guard);
}

#[tokio::test]
async fn a_test_that_is_not_known_does_not_pass() {
    let lab = Lab::start().await;
    let outcome = lab.run(guarded(&guard(Test::Unspecified, "", &["f"]), MOUNT)).await;
    assert_eq!(outcome.refusal().kind(), Kind::Guard);
}

// Guard: policy::add_guards. The gateway has sent none.
#[tokio::test]
async fn git_has_its_guards_whatever_the_gateway_sends() {
    let lab = Lab::with(|config| config.confinement.commands = Commands::Annotated).await;
    let init =
        std::process::Command::new("git").args(["init", "-q"]).arg(lab.store.path()).status();
    assert!(init.unwrap().success());
    let config = fs::read_to_string(lab.store.path().join(".git/config")).unwrap();
    let status = || lab.run(command(&["git", "status", "--porcelain"]));
    assert_eq!(status().await.rejected, None);
    for added in [
        "[filter \"x\"]\n\tclean = touch pwned\n",
        "[core]\n\tfsmonitor = touch pwned\n",
        "[include]\n\tpath = other\n",
        "[core]\n\tworktree = /\n",
        "[core]\n\thooksPath = hooks\n",
    ] {
        lab.write(".git/config", format!("{config}{added}"));
        assert_eq!(status().await.refusal().kind(), Kind::Guard, "{added}");
    }
    lab.write(".git/config", &config);
    lab.write(".git/objects/info/alternates", "/\n");
    assert_eq!(status().await.refusal().kind(), Kind::Guard);
    fs::remove_file(lab.store.path().join(".git/objects/info/alternates")).unwrap();
    lab.program(".git/hooks/pre-commit");
    let commit = lab.run(command(&["git", "commit", "-q", "-m", "x"])).await;
    assert_eq!(commit.refusal().kind(), Kind::Guard);
}

// Guard: `policy::check_home`.
#[tokio::test]
async fn a_home_that_is_not_plain_is_refused() {
    let lab = Lab::with(|config| config.confinement.commands = Commands::Annotated).await;
    for homes in [&["home"][..], &["./home"], &["/mnt/../home"], &[""], &["/home/u", "/home/v"]] {
        let mut spec = pipeline(&["cat /dev/null"]);
        let home = |value: &&str| EnvVar { name: "HOME".into(), value: value.to_string().into() };
        spec.stages[0].env = homes.iter().map(home).collect();
        assert_eq!(lab.run(spec).await.refusal().kind(), Kind::NotAllowed, "{homes:?}");
    }
}

// Guard: `policy::check_variables`.
#[tokio::test]
async fn a_variable_has_one_name_and_one_value() {
    let lab = Lab::with(|config| config.confinement.commands = Commands::Annotated).await;
    let init =
        std::process::Command::new("git").args(["init", "-q"]).arg(lab.store.path()).status();
    assert!(init.unwrap().success());
    for names in [
        &["GIT_CONFIG_GLOBAL=/mnt/logs/evil"][..],
        &["GIT_EXTERNAL_DIFF=touch pwned"],
        &["LC_ALL=C\nX"],
        &["", "LANG"],
        &["LC_ALL\0"],
        &["LANG", "LANG"],
    ] {
        let mut spec = command(&["git", "status", "--porcelain"]);
        let variable = |name: &&str| EnvVar { name: name.to_string().into(), value: "".into() };
        spec.stages[0].env = names.iter().map(variable).collect();
        let outcome = lab.run(spec).await;
        assert_eq!(outcome.refusal().kind(), Kind::NotAllowed, "{names:?}");
    }
}
