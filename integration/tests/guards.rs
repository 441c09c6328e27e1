//! git, whose repository says what a command does: offloaded where it says nothing
//! that needs this machine, and otherwise run here, with the reason in the report.

use std::io;
use std::path::Path;
use std::process::Command;

use posh_integration::Script;

use crate::arena::{Arena, assert_none};

/// Name, what is done to the repository first, a git command, and what the report says of why it
/// runs here; `None`: it runs on the server. The user's own settings are looked at here, all else
/// by the server.
const CASES: &[(&str, &str, &str, Option<&str>)] = &[
    ("plain", "true", "git status --short", None),
    ("plain-from-below", "cd dir", "git log --format=%s", None),
    ("sample-hooks", "echo x > .git/hooks/pre-commit.sample", "git commit -q -a -m more", None),
    ("hook-of-another-command", "hook pre-commit", "git status --short", None),
    ("hook", "hook pre-commit", "git commit -q -a -m more", Some("the repository has hooks")),
    (
        "hook-that-fails",
        "hook commit-msg 'exit 3'",
        "git commit -q -a -m more",
        Some("the repository has hooks"),
    ),
    (
        "post-checkout",
        "hook post-checkout",
        "git checkout -q -b other",
        Some("the repository has hooks"),
    ),
    (
        "filter",
        "git config filter.up.clean 'tr a-z A-Z'; echo '* filter=up' > .gitattributes",
        "git add .",
        Some("filter.up.clean"),
    ),
    (
        "hooks-elsewhere",
        "git config core.hooksPath ~/hooks",
        "git commit -q -a -m more",
        Some("core.hookspath"),
    ),
    (
        "include",
        "echo '[user] name = Included' > ~/inc; git config include.path ~/inc",
        "git status --short",
        Some("include.path"),
    ),
    (
        "user-includes",
        "git config --global include.path ~/inc",
        "git status --short",
        Some("include.path in /home/user/.gitconfig"),
    ),
    (
        "user-signs",
        "git config --global commit.gpgSign true",
        "git commit -q -a -m more",
        Some("commit.gpgsign"),
    ),
    ("user-aliases", "git config --global alias.st status", "git status --short", None),
    (
        "user-secrets",
        "printf '[http]\\n extraHeader = x\\n[github]\\n token = x\\n[user]\\n name = \"B; \\\\\"C\\\\\" # D\" ; x\\n' > ~/.gitconfig; git config --unset user.name",
        "git commit -q -a -m more",
        None,
    ),
    (
        "no-address",
        "git config --unset user.email",
        "git commit -q -a -m more",
        Some("user.email is set"),
    ),
    ("no-address-needed", "git config --unset user.email", "git log --format=%s", None),
    (
        "address-given",
        "git config --unset user.email; export EMAIL=me@example.org",
        "git commit -q -a -m more",
        None,
    ),
    (
        "borrowed-objects",
        "git clone -q --shared . ../borrower; cd ../borrower",
        "git status --short",
        Some("borrows objects"),
    ),
    (
        "work-tree",
        "git worktree add -q ../tree; cd ../tree",
        "git status --short",
        Some("more than one work tree"),
    ),
    ("inside", "cd .git", "git log --format=%s", Some("is a repository's own")),
    (
        "from-elsewhere",
        "hook pre-commit; cd ..",
        "git -C repository commit -q -a -m more",
        Some("the repository has hooks"),
    ),
    // Commands that run here use what others have just made on the server.
    (
        "in-turns",
        "hook pre-commit; for i in 1 2 3; do echo $i > new$i; git add .; git commit -q -m $i; git checkout -q -b b$i; git stash list; git rev-parse HEAD; done",
        "git status --short",
        None,
    ),
    // What git finds through the mount after it was changed behind it, deep below the work tree
    // too.
    (
        "seen-through-the-mount",
        "for i in 1 2 3; do echo $i > new$i; git add .; git write-tree; git commit -q -m $i; git checkout -q -b b$i; git symbolic-ref HEAD; git show-ref; git fsck; done",
        "git status --short",
        None,
    ),
    ("no-repository", "cd ..", "git status --short", None),
];

/// What a case's script begins with. The index holds times and inode numbers, and the user's own
/// configuration must not last: both go at its end.
const BEFORE: &str = r#"
export GIT_AUTHOR_DATE='2026-01-01T00:00:00Z' GIT_COMMITTER_DATE='2026-01-01T00:00:00Z' GIT_PAGER=cat
hook() { printf '#!/bin/sh\necho hook >&2\n%s\n' "$2" > ".git/hooks/$1"; chmod +x ".git/hooks/$1"; }
trap 'rm -rf ~/.gitconfig ~/inc "$D/repository" "$D/borrower" "$D/tree"' EXIT
cd "$D/repository"
"#;

/// A repository with one commit and one change. git would lose its way in the server's directory,
/// which this machine sees below /proc.
fn fill(directory: &Path) -> io::Result<()> {
    let made = tempfile::tempdir()?;
    let repository = made.path().join("repository");
    std::fs::create_dir_all(repository.join("dir"))?;
    std::fs::write(repository.join("dir/file"), "one\n")?;
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        command.arg("-C").arg(&repository).args(arguments).env("HOME", made.path());
        command
            .env("GIT_AUTHOR_DATE", "2026-01-01T00:00:00Z")
            .env("GIT_COMMITTER_DATE", "2026-01-01T00:00:00Z");
        succeed(&mut command)
    };
    git(&["init", "-q", "-b", "main"])?;
    git(&["config", "user.name", "A. Developer"])?;
    git(&["config", "user.email", "developer@example.org"])?;
    git(&["config", "core.checkStat", "minimal"])?;
    git(&["config", "core.trustctime", "false"])?;
    git(&["add", "."])?;
    git(&["commit", "-q", "-m", "first"])?;
    std::fs::write(repository.join("dir/file"), "one\ntwo\n")?;
    succeed(Command::new("cp").arg("-a").arg(&repository).arg(directory))
}

fn succeed(command: &mut Command) -> io::Result<()> {
    let output = command.output()?;
    if output.status.success() { Ok(()) } else { Err(io::Error::other(format!("{output:?}"))) }
}

#[test]
fn a_repository_decides_where_git_runs() {
    let arena = Arena::new(fill);
    let attempt =
        |(name, before, command, reason): &(&str, &str, &str, Option<&str>)| -> Result<(), String> {
            let text =
                format!("{BEFORE}{before}\n{command}; echo $?; git log --format='%H %an %ae %s'");
            let report = arena.attempt(name, &Script::new(text))?;
            let argv: Vec<&str> = command.split(' ').collect();
            let stage = report.pipelines.iter().flat_map(|p| &p.stages).find(|s| s.argv == argv);
            let stage = stage
                .ok_or_else(|| format!("{name}: {command} is not in the report\n{report:?}"))?;
            let is_as_expected = match reason {
                None => stage.is_offloaded(),
                Some(reason) => {
                    let is_refused = stage.reason.contains("refused") != name.starts_with("user-");
                    !stage.is_offloaded() && stage.reason.contains(reason) && is_refused
                }
            };
            if is_as_expected {
                Ok(())
            } else {
                Err(format!("{name}: {command} ran at {}: {}", stage.placement, stage.reason))
            }
        };
    assert_none(
        &CASES.iter().filter_map(|case| attempt(case).err()).collect::<Vec<_>>(),
        CASES.len(),
    );
}
