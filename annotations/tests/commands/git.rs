//! git, subcommand by subcommand.

use posh_annotations::{Admitted, GuardTest, Library, settings::Setting};

use crate::reading::{check, classify};

#[test]
fn git_is_read_up_to_its_subcommand() {
    check(&[
        ("git status", "writes .; only .git; tty"),
        ("git -C /m/repo status", "fills /m/repo; only .git; in /m/repo; tty"),
        (
            "git -C /m/repo commit -q -m x",
            "fills /m/repo; only .git; in /m/repo; tty; varies; once",
        ),
        (
            "git -C repo add ../other",
            "here: git add: a path leads out of the directory that it changes to",
        ),
        ("git -c user.name=me status", "writes .; only .git; tty"),
        (
            "git -c core.fsmonitor=prog status",
            "here: git: the configuration given by -c may start programs or name files",
        ),
        (
            "git --git-dir=/m/repo/.git status",
            "here: git: the repository is not looked for in the usual place",
        ),
        ("git --no-pager status", "writes .; only .git; tty"),
        ("GIT_DIR=/m/.git git status", "here: git: variables say where the repository is"),
        ("GIT_CONFIG_COUNT=1 git status", "here: git: variables say where git's configuration is"),
        ("XDG_CONFIG_HOME=/x git status", "here: git: variables say where git's configuration is"),
        ("GIT_ATTR_SOURCE=HEAD git status", "here: git: variables name programs or files"),
        ("GIT_TRACE_REFS=1 git status", "here: git: git is being traced"),
        ("GIT_TEST_DATE_NOW=1 git log", "here: git: git is being tested"),
        ("GIT_ASKPASS=/x GIT_TOKEN=x git status", "writes .; only .git; tty"),
        ("git -p status", "here: git: starts a pager"),
        ("git bisect start", "here: git bisect has no annotation"),
        ("git stash", "here: git stash has no annotation"),
        ("git", "here: git: a subcommand is missing"),
    ]);
}

/// The hooks that a line's guards look for, and the settings that they require (the first of each).
fn guarded(line: &str) -> String {
    let invocation = classify(&Library::builtin(), line).expect("it is annotated");
    let mut parts = Vec::new();
    for guard in &invocation.guards {
        match &guard.test {
            GuardTest::Executable => {
                parts.extend(
                    guard
                        .files
                        .iter()
                        .map(|file| file.strip_prefix("hooks/").expect("a hook").to_owned()),
                );
            }
            GuardTest::SettingRequired(settings) => parts.push(settings.join("|")),
            _ => {}
        }
    }
    parts.join(" ")
}

#[test]
fn git_guards() {
    const ALL: &str = "post-index-change reference-transaction";
    let commit = "pre-commit prepare-commit-msg commit-msg post-commit post-rewrite pre-auto-gc";
    let am = "applypatch-msg pre-applypatch post-applypatch post-rewrite pre-auto-gc";
    let committer = "user.name|committer.name user.email|committer.email";
    let author = "user.name|author.name user.email|author.email";
    let index = "core.checkStat=minimal core.trustctime=false";
    for (line, expected) in [
        ("git status", format!(" {index}")),
        ("git diff", format!(" {index}")),
        ("git diff --cached", String::new()),
        ("git log", String::new()),
        ("git apply x.patch", format!(" {index}")),
        ("git commit -m x", format!(" {index} {commit} {committer} {author}")),
        (
            "EMAIL=a@b git commit -m x",
            format!(" {index} {commit} user.name|committer.name user.name|author.name"),
        ),
        (
            "GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b git commit -m x",
            format!(" {index} {commit} {author}"),
        ),
        ("git checkout main", format!(" {index} post-checkout {committer}")),
        ("git -C /m/repo reset --hard", format!(" {index} {committer}")),
        ("git am x.mbox", format!(" {index} {am} {committer}")),
        ("git am --continue", format!(" {index} {am} {committer}")),
        ("git branch", String::new()),
        ("git branch new", format!(" {committer}")),
    ] {
        assert_eq!(guarded(line), format!("{ALL}{expected}"), "{line}");
    }
    let status = classify(&Library::builtin(), "git status").unwrap();
    assert!(
        status.guards.iter().all(
            |guard| guard.below.as_deref() == Some(".git") || guard.test == GuardTest::AllExist
        )
    );
    assert!(status.client_files.contains(&"~/.gitconfig".to_owned()));
}

/// The guard on git's settings.
fn test_of_settings() -> GuardTest {
    let status = classify(&Library::builtin(), "git status").unwrap();
    let is_meant = |test: &&GuardTest| matches!(test, GuardTest::SettingsAllowed { .. });
    status.guards.iter().map(|guard| &guard.test).find(is_meant).unwrap().clone()
}

fn setting(text: &str) -> Setting {
    let (name, value) = text.split_once('=').unwrap_or((text, "x"));
    Setting { name: name.into(), value: Some(value.into()), depends_on_version: false }
}

/// A setting that is admitted must not start a program, nor name a file that only the workstation
/// has.
#[test]
fn git_settings_that_start_programs_are_not_allowed() {
    let test = test_of_settings();
    for refused in [
        "core.hookspath",
        "core.worktree",
        "core.fsmonitor",
        "core.attributesfile",
        "core.excludesfile",
        "core.alternaterefscommand",
        "filter.lfs.clean",
        "filter.lfs.process",
        "include.path",
        "includeif.gitdir:/x.path",
        "diff.external",
        "diff.orderfile",
        "diff.pdf.textconv",
        "diff.pdf.command",
        "merge.x.driver",
        "commit.gpgsign",
        "commit.template",
        "extensions.worktreeconfig",
        "extensions.partialclone",
        "remote.origin.promisor",
        "log.showsignature",
        "submodule.recurse",
        "status.submodulesummary",
        "blame.ignorerevsfile",
        "mailmap.file",
        "pager.status",
        "trace2.eventtarget",
        "trailer.x.command",
        "grep.patterntype",
        "gc.recentobjectshook",
    ] {
        assert_eq!(test.admits(&setting(refused)), None, "{refused}");
    }
    for usual in
        ["core.filemode", "remote.origin.fetch", "branch.main.merge", "user.email", "gc.auto"]
    {
        assert_eq!(test.admits(&setting(usual)), Some(Admitted::Sent), "{usual}");
    }
}

#[test]
fn git_settings_that_may_hold_secrets_are_withheld() {
    let test = test_of_settings();
    for withheld in [
        "alias.st",
        "core.askpass",
        "core.editor",
        "core.gitproxy",
        "core.sshcommand",
        "credential.helper",
        "credential.https://example.org.username",
        "github.token",
        "gitlab.token",
        "gpg.program",
        "hub.oauthtoken",
        "http.extraheader",
        "http.https://example.org/.extraheader",
        "http.proxy",
        "push.pushoption",
        "receive.certnonceseed",
        "remote.origin.pushurl",
        "remote.origin.url",
        "sendemail.smtppass",
        "sequence.editor",
        "url.https://token@example.org/.insteadof",
        "user.signingkey",
        "web.browser",
    ] {
        assert_eq!(test.admits(&setting(withheld)), Some(Admitted::Withheld), "{withheld}");
    }
}

/// Settings that other guards require are looked for in the files that were sent.
#[test]
fn git_settings_that_are_required_are_sent() {
    let (test, commit) =
        (test_of_settings(), classify(&Library::builtin(), "git commit -m x").unwrap());
    let required =
        commit.guards.iter().filter(|guard| matches!(guard.test, GuardTest::SettingRequired(_)));
    for pattern in required.flat_map(|guard| guard.test.patterns()) {
        assert_eq!(test.admits(&setting(pattern)), Some(Admitted::Sent), "{pattern}");
    }
}

#[test]
fn git_gets_the_variables_that_it_needs_and_no_secrets() {
    let log = classify(&Library::builtin(), "git log").unwrap();
    for needed in
        ["GIT_AUTHOR_NAME", "GIT_COMMITTER_DATE", "GIT_PAGER", "GIT_OPTIONAL_LOCKS", "EMAIL", "TZ"]
    {
        assert!(log.environment.iter().any(|name| name == needed), "{needed}");
    }
    let prefixes: Vec<_> = log.environment.iter().filter(|name| name.ends_with('*')).collect();
    assert_eq!(prefixes, ["LC_*"]);
    for secret in
        ["GIT_ASKPASS", "GIT_SSH_COMMAND", "GIT_PROXY_COMMAND", "GIT_TOKEN", "GIT_CONFIG_VALUE_0"]
    {
        assert!(log.environment.iter().all(|name| name != secret), "{secret}");
    }
}

#[test]
fn git_status() {
    check(&[
        ("git status -s src", "walks src!; writes .; only .git; tty"),
        ("git status --porcelain=v2 -uno -z", "writes .; only .git; tty"),
        ("git status -- ':!x'", "here: git status: a pathspec with magic words is not a path"),
        ("git status --ignored --show-stash", "writes .; only .git; tty"),
        ("git status --stat", "here: flag --stat of git status is not annotated"),
    ]);
}

#[test]
fn git_add() {
    check(&[
        ("git add .", "walks .!; writes .; only .git; tty"),
        ("git add -A", "writes .; only .git; tty"),
        ("git add -u src README", "walks src!; walks README!; writes .; only .git; tty"),
        ("git add -p", "here: git add: asks the user"),
        ("git add -i", "here: git add: asks the user"),
        (
            "git add --pathspec-from-file=list",
            "here: flag --pathspec-from-file of git add is not annotated",
        ),
        ("git add ':/x'", "here: git add: a pathspec with magic words is not a path"),
        ("POSIXLY_CORRECT=1 git add a -v", "walks a!; writes .; only .git; tty; once"),
    ]);
}

#[test]
fn git_commit() {
    check(&[
        ("git commit -m 'a message'", "writes .; only .git; tty; varies; once"),
        ("git commit -am x", "writes .; only .git; tty; varies; once"),
        ("git commit", "here: git commit: opens an editor for the message"),
        ("git commit --amend --no-edit", "writes .; only .git; tty; varies; once"),
        ("git commit --amend", "here: git commit: opens an editor for the message"),
        (
            "git commit -F msg src/a",
            "reads msg; walks src/a!; writes .; only .git; tty; varies; once",
        ),
        ("git commit -F -", "writes .; only .git; stdin; tty; varies; once"),
        ("git commit -S -m x", "here: git commit: signs with the keys of this machine"),
        ("git commit -e -m x", "here: git commit: opens an editor"),
        ("git commit --fixup=HEAD~1", "writes .; only .git; tty; varies; once"),
        ("git commit --fixup=amend:HEAD", "here: git commit: opens an editor for the message"),
        ("git commit --dry-run", "writes .; only .git; tty; varies; once"),
    ]);
}

#[test]
fn git_apply() {
    check(&[
        ("git apply x.patch", "reads x.patch; writes .; replaces; tty; once"),
        ("git apply", "writes .; replaces; stdin; tty; once"),
        ("git apply -", "writes .; replaces; stdin; tty; once"),
        ("git apply --check x.patch", "reads x.patch; reads .; tty"),
        ("git apply --stat --apply x.patch", "reads x.patch; writes .; replaces; tty; once"),
        (
            "git apply -3 -p2 --index a.patch b.patch",
            "reads a.patch; reads b.patch; writes .; tty; once",
        ),
        ("git apply --reject x.patch", "reads x.patch; writes .; tty; once"),
        (
            "git apply --unsafe-paths x.patch",
            "here: flag --unsafe-paths of git apply is not annotated",
        ),
        (
            "git -C /m/repo apply /home/u/x.patch",
            "fills /m/repo; reads /home/u/x.patch; replaces; in /m/repo; tty; once",
        ),
    ]);
}

#[test]
fn git_checkout() {
    check(&[
        ("git checkout main", "writes .; tty; once"),
        ("git checkout -b new origin/main", "writes .; tty; once"),
        ("git checkout -- src/a", "fills src/a!; writes .; tty; once"),
        ("git checkout HEAD~1 -- src", "fills src!; writes .; tty; once"),
        ("git checkout -p", "here: git checkout: asks the user"),
        ("git checkout -f -q main", "writes .; tty; once"),
        (
            "git checkout --recurse-submodules main",
            "here: flag --recurse-submodules of git checkout is not annotated",
        ),
        ("git checkout -", "writes .; tty; once"),
    ]);
}

#[test]
fn git_reset() {
    check(&[
        ("git reset", "writes .; only .git; tty; once"),
        ("git reset --hard HEAD~1", "writes .; tty; once"),
        ("git reset -q -- a b", "walks a!; walks b!; writes .; only .git; tty; once"),
        ("git reset -p", "here: git reset: asks the user"),
        ("git reset --soft main", "writes .; only .git; tty; once"),
        (
            "git reset --recurse-submodules",
            "here: flag --recurse-submodules of git reset is not annotated",
        ),
    ]);
}

#[test]
fn git_am() {
    check(&[
        ("git am x.mbox", "walks x.mbox; writes .; tty; varies; once"),
        ("git am", "writes .; stdin; tty; varies; once"),
        ("git am -3 a.patch b.patch", "walks a.patch; walks b.patch; writes .; tty; varies; once"),
        ("git am --continue", "writes .; tty; varies; once"),
        ("git am --abort", "writes .; tty; varies; once"),
        ("git am -i x.mbox", "here: flag -i of git am is not annotated"),
        ("git am -S x.mbox", "here: flag -S of git am is not annotated"),
    ]);
}

#[test]
fn git_branch() {
    check(&[
        ("git branch", "reads .; asks"),
        ("git branch -a -vv", "reads .; asks"),
        ("git branch --list 'x*'", "reads .; asks"),
        ("git branch --contains HEAD", "reads .; asks"),
        ("git branch --merged", "reads .; asks"),
        ("git branch new main", "writes .; only .git; once"),
        ("git branch -D old", "writes .; only .git; once"),
        ("git branch -m a b", "here: flag -m of git branch is not annotated"),
        (
            "git branch --edit-description",
            "here: flag --edit-description of git branch is not annotated",
        ),
    ]);
}

#[test]
fn git_mv_rm() {
    check(&[
        (
            "git mv a b",
            "here: git mv: renames through the mount: cheap, and the names it has cached stay right",
        ),
        (
            "git mv -k a b dir",
            "here: git mv: renames through the mount: cheap, and the names it has cached stay right",
        ),
        (
            "git mv -n a b",
            "here: git mv: renames through the mount: cheap, and the names it has cached stay right",
        ),
        ("git mv a", "here: git mv: an operand is missing"),
        (
            "git mv -v -f a b",
            "here: git mv: renames through the mount: cheap, and the names it has cached stay right",
        ),
        (
            "git rm a",
            "here: git rm: removes names through the mount, so that those it has cached stay right",
        ),
        ("git rm -r --cached dir", "fills dir!; writes .; only .git; once"),
        ("git rm --cached a b", "fills a!; fills b!; writes .; only .git; once"),
        (
            "git rm -f a",
            "here: git rm: removes names through the mount, so that those it has cached stay right",
        ),
        (
            "git rm --pathspec-from-file=l",
            "here: flag --pathspec-from-file of git rm is not annotated",
        ),
    ]);
}

#[test]
fn git_diff() {
    check(&[
        ("git diff", "writes .; only .git; asks"),
        ("git diff --stat HEAD~2 HEAD -- src", "walks src!; writes .; only .git; asks"),
        ("git diff --cached", "reads .; asks"),
        ("GIT_PAGER=cat git diff -U5 -w", "writes .; only .git; tty"),
        ("git diff a..b src", "writes .; only .git; asks"),
        ("git diff /m/a /n/b", "here: git diff: may compare files outside of the repository"),
        ("git diff ../x y", "here: git diff: may compare files outside of the repository"),
        ("git diff - x", "here: git diff: may compare files outside of the repository"),
        ("git diff --no-index a b", "here: git diff: compares files outside of a repository"),
        ("git diff --output=f", "here: git diff: writes its output to a file of its own"),
        ("git diff -Oorder", "here: git diff: reads the order of files from a file"),
        (
            "git diff --ext-diff",
            "here: git diff: starts the programs that the repository's configuration names",
        ),
    ]);
}

#[test]
fn git_log() {
    check(&[
        ("git log --oneline -5", "reads .; asks"),
        ("git log -p --since=yesterday -- src", "walks src!; reads .; asks; varies"),
        ("git log --author me --grep=x --all", "reads .; asks"),
        ("git log --format='%h %an'", "reads .; asks"),
        ("git log --format=%G?", "here: git log: checks signatures with the keys of this machine"),
        (
            "git log --show-signature",
            "here: git log: checks signatures with the keys of this machine",
        ),
        ("git log --stdin", "reads .; stdin; asks"),
        ("git log -L1,5:file", "reads .; asks"),
        ("git log -P --grep=x", "here: flag -P of git log is not annotated"),
        ("GIT_PAGER= git log -S word --graph", "reads .; tty"),
    ]);
}

#[test]
fn git_show() {
    check(&[
        ("git show", "reads .; asks"),
        ("git show HEAD:src/a", "reads .; asks"),
        ("git show --stat HEAD~1", "reads .; asks"),
        (
            "git show --pretty=%GS HEAD",
            "here: git show: checks signatures with the keys of this machine",
        ),
        (
            "git show --textconv HEAD:a",
            "here: git show: starts the programs that the repository's configuration names",
        ),
    ]);
}

#[test]
fn git_rev_list() {
    check(&[
        ("git rev-list --count HEAD", "reads ."),
        ("git rev-list --all --objects", "reads ."),
        ("git rev-list --stdin", "reads .; stdin"),
        ("git rev-list -n 1 HEAD -- src", "walks src!; reads ."),
        (
            "git rev-list --disk-usage HEAD",
            "here: flag --disk-usage of git rev-list is not annotated",
        ),
    ]);
}

#[test]
fn git_shortlog() {
    check(&[
        ("git shortlog -sn HEAD", "reads .; asks"),
        (
            "git shortlog -sn",
            "here: git shortlog: reads a log from standard input unless a revision is given, which only git can tell",
        ),
        ("git shortlog v1..v2", "reads .; asks"),
        ("git shortlog --all -e", "reads .; asks"),
        (
            "git shortlog src",
            "here: git shortlog: reads a log from standard input unless a revision is given, which only git can tell",
        ),
        (
            "git shortlog --no-merges",
            "here: git shortlog: reads a log from standard input unless a revision is given, which only git can tell",
        ),
    ]);
}

#[test]
fn git_blame() {
    check(&[
        ("git blame src/a", "reads .; asks"),
        ("git blame -L 1,10 -w -M HEAD~1 -- src/a", "reads src/a!; reads .; asks"),
        ("git blame --date=relative a", "reads .; asks; varies"),
        ("git blame --contents other a", "here: git blame: reads the contents from another file"),
        ("git blame -S revs a", "here: git blame: reads revisions from a file"),
        ("git blame --porcelain a", "reads .; asks"),
    ]);
}

#[test]
fn git_describe() {
    check(&[
        ("git describe", "reads ."),
        ("git describe --tags --always --long", "reads ."),
        ("git describe --dirty", "writes .; only .git"),
        ("git describe --match 'v*' HEAD", "reads ."),
        ("git describe --broken", "here: flag --broken of git describe is not annotated"),
    ]);
}

#[test]
fn git_format_patch() {
    check(&[
        ("git format-patch -1", "writes .; tty"),
        ("git format-patch -o /m/out main..", "fills /m/out; reads .; tty"),
        ("git format-patch --stdout HEAD~2", "reads .; asks"),
        (
            "git format-patch --cover-letter main",
            "here: flag --cover-letter of git format-patch is not annotated",
        ),
        ("git format-patch -3 HEAD -- src", "walks src!; writes .; tty"),
    ]);
}

#[test]
fn git_grep() {
    check(&[
        ("git grep foo", "reads .; asks"),
        ("git grep -n foo src", "reads .; asks"),
        ("git grep -e a --and -e b HEAD -- src", "walks src!; reads .; asks"),
        ("git grep -f patterns", "reads patterns; reads .; asks"),
        ("git grep -f -", "reads .; stdin; asks"),
        ("git grep -O foo", "here: git grep: starts a pager"),
        ("git grep --no-index foo", "here: git grep: searches outside of a repository"),
        ("git grep -P foo", "here: flag -P of git grep is not annotated"),
        ("git grep -C2 -5 foo", "reads .; asks"),
    ]);
}

#[test]
fn git_ls_files() {
    check(&[
        ("git ls-files", "reads ."),
        ("git ls-files -z src", "walks src!; reads ."),
        ("git ls-files -o --exclude-standard", "reads ."),
        ("git ls-files -X ignore -i -o", "reads ignore; reads ."),
        ("git ls-files --debug", "here: flag --debug of git ls-files is not annotated"),
        ("git ls-files -m -d", "reads ."),
    ]);
}

#[test]
fn git_rev_parse() {
    check(&[
        ("git rev-parse HEAD", "reads ."),
        ("git rev-parse --show-toplevel", "reads ."),
        ("git rev-parse --abbrev-ref HEAD", "reads ."),
        ("git rev-parse --short=8 --verify main", "reads ."),
        ("git rev-parse --parseopt", "here: flag --parseopt of git rev-parse is not annotated"),
        ("git rev-parse --git-path hooks", "reads ."),
    ]);
}

#[test]
fn git_cat_file() {
    check(&[
        ("git cat-file -p HEAD:a", "reads ."),
        ("git cat-file --batch", "reads .; stdin"),
        ("git cat-file --batch-check --batch-all-objects", "reads ."),
        ("git cat-file -t HEAD", "reads ."),
        ("git cat-file --filters HEAD:a", "here: flag --filters of git cat-file is not annotated"),
        (
            "git cat-file --batch-check='%(objectsize:disk)'",
            "here: git cat-file: shows how the repository is packed at the moment",
        ),
    ]);
}
