//! How the shipped annotations of the commands for files, of git and of ImageMagick read real command
//! lines: for each line what follows from it, or why it stays here.

// All of this is test code; clippy's own exception knows only #[test] functions.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::ffi::OsString;

use posh_annotations::{CurrentDir, FileKind, GuardTest, Invocation, Library, StdinUse, TerminalUse, Unknown};

/// Checks lines of the form `[NAME=VALUE]... COMMAND [WORD]...`; words may stand in single quotes.
#[track_caller]
fn check(table: &[(&str, &str)]) {
    let library = Library::builtin();
    let wrong: Vec<String> = table
        .iter()
        .map(|(line, expected)| (line, expected, read(&library, line)))
        .filter(|(_, expected, found)| *expected != found)
        .map(|(line, expected, found)| format!("{line}\n  expected {expected}\n  found    {found}"))
        .collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

fn read(library: &Library, line: &str) -> String {
    match classify(library, line) {
        Ok(invocation) => describe(&invocation),
        Err(unknown) => format!("here: {unknown}"),
    }
}

fn classify(library: &Library, line: &str) -> Result<Invocation, Unknown> {
    let mut words = words(line);
    let mut variables = HashMap::new();
    while let Some((name, value)) = words[0].split_once('=') {
        variables.insert(name.to_owned(), OsString::from(value));
        words.remove(0);
    }
    let argv: Vec<OsString> = words.iter().map(OsString::from).collect();
    library.classify(&words[0], &argv, &|name| variables.get(name).cloned())
}

fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut rest = line.trim_start();
    while !rest.is_empty() {
        let (word, after) = match rest.strip_prefix('\'') {
            Some(quoted) => quoted.split_once('\'').expect("a quote is closed"),
            None => rest.split_once(' ').unwrap_or((rest, "")),
        };
        words.push(word.to_owned());
        rest = after.trim_start();
    }
    words
}

/// The reading in one line: files with their kinds (`!`: the last symlink is not followed), then what is
/// not the plainest case.
fn describe(invocation: &Invocation) -> String {
    let mut parts: Vec<String> = Vec::new();
    for file in &invocation.files {
        let kind = match file.kind {
            FileKind::InputFile => "reads",
            FileKind::InputDir => "walks",
            FileKind::OutputFile => "makes",
            FileKind::OutputDir => "fills",
            FileKind::InoutFile => "changes",
            FileKind::ListFile => "lists",
        };
        let mark = if file.no_follow { "!" } else { "" };
        parts.push(format!("{kind} {}{mark}", file.path.to_string_lossy()));
    }
    match invocation.current_dir {
        CurrentDir::Unused => {}
        CurrentDir::Reads => parts.push("reads .".to_owned()),
        CurrentDir::Writes => parts.push("writes .".to_owned()),
    }
    if !invocation.changes_only.is_empty() && invocation.side_effects {
        parts.push(format!("only {}", invocation.changes_only.join(" ")));
    }
    if let Some(directory) = &invocation.working_dir {
        parts.push(format!("in {}", directory.to_string_lossy()));
    }
    match invocation.stdin {
        StdinUse::Unused => {}
        StdinUse::ReadsAll => parts.push("stdin".to_owned()),
        StdinUse::MayStopEarly => parts.push("stdin early".to_owned()),
    }
    if let Some(split) = &invocation.split {
        parts.push(format!("split {}", split.operands.len()));
    }
    if !invocation.shows.is_empty() {
        parts.push(format!("shows {:?}", invocation.shows));
    }
    match invocation.terminal {
        TerminalUse::Plain => {}
        TerminalUse::Output => parts.push("tty".to_owned()),
        TerminalUse::Interactive => parts.push("asks".to_owned()),
    }
    if !invocation.deterministic {
        parts.push("varies".to_owned());
    }
    if !invocation.idempotent {
        parts.push("once".to_owned());
    }
    parts.join("; ")
}

#[test]
fn find_searches_trees_whose_results_this_machine_need_not_know() {
    check(&[
        ("find /m/logs -name '*.log'", "walks /m/logs!; shows [Order]; tty"),
        ("find -type f -print0", "reads .; shows [Order]; tty"),
        ("find /a /b ( -name x -o -iname 'y*' ) -prune -o -print", "walks /a!; walks /b!; split 2; shows [Order]; tty"),
        ("find /a /b -name x -quit", "walks /a!; walks /b!; shows [Order]; tty"),
        ("find -H /a -maxdepth 2 -size +1k", "walks /a; shows [DirSize, Order]; tty"),
        ("find . ! -path './.git/*' -regex '.*[0-9]'", "walks .!; shows [Order]; tty"),
        ("find /a -newer /b/stamp -mtime -3", "walks /a!; reads /b/stamp; shows [Times, Order]; tty; varies"),
        (r"find /a -printf '%p %s\n'", "walks /a!; shows [DirSize, Order]; tty"),
        (
            r"find /a -printf '%T@ %p\n'",
            "here: find: the -printf format has directives that show more than names, types, sizes and modes",
        ),
        ("find -L /a -name x", "here: find: follows symlinks below the starting points, which may lead anywhere"),
        ("find . -name x -exec grep y '{}' + -print", "here: find: starts other commands, which are placed one by one"),
        ("find . -delete", "here: find: deletes through the mount, so that the names that it has cached stay right"),
        ("find . -lname x", "here: find: reads symlinks, which a mount may show otherwise or not at all"),
        ("find . -user alice", "here: find: looks up user and group names on the machine that it runs on"),
        ("find . -xtype l", "here: find: follows symlinks below the starting points, which may lead anywhere"),
        ("find . -executable", "here: find: asks this machine's kernel what the user may do"),
        ("find -files0-from list", "here: find: the starting points come from a file"),
        ("find . -nosuch", "here: flag -nosuch of find is not annotated"),
    ]);
}

#[test]
fn ls_lists_names() {
    check(&[
        ("ls", "reads .; tty"),
        ("ls -1 /m /n", "reads /m; reads /n; tty"),
        ("ls -d '/m/*' x", "reads /m/*!; reads x!; tty"),
        ("ls -R /m", "walks /m; tty"),
        ("ls -la", "here: ls: a long listing shows owners, links, blocks and access lists as this machine sees them"),
        (
            "ls -lh --color=auto /m",
            "here: ls: a long listing shows owners, links, blocks and access lists as this machine sees them",
        ),
        ("ls --color=auto /m", "reads /m; asks"),
        ("ls --color /m", "here: ls: colours tell of capabilities of files, which mounts do not carry"),
        ("ls --color=always /m", "here: ls: the value always is not annotated of --color"),
        ("ls -t /m", "reads /m; shows [Times]; tty"),
        ("ls -S /m", "reads /m; shows [DirSize]; tty"),
        ("ls -f /m", "reads /m; shows [Order]; tty"),
        ("ls -F link", "reads link!; shows [Mode]; tty"),
        ("ls -FH link", "reads link; shows [Mode]; tty"),
        ("ls -i /m", "reads /m; shows [Inode]; tty"),
        ("ls -L /m", "here: ls: follows symlinks in the directories, which may lead anywhere"),
        ("ls --hyperlink /m", "here: flag --hyperlink of ls is not annotated"),
        ("ls -- -", "reads -; tty"),
    ]);
}

#[test]
fn du_shows_what_mounts_may_not() {
    check(&[
        ("du -sh /m", "walks /m!; shows [Inode, Links, Blocks]"),
        ("du -sb /m", "walks /m!; shows [Inode, Links, DirSize]"),
        ("du --max-depth=1 /m", "walks /m!; shows [Inode, Links, Blocks, Order]"),
        ("du -L /m", "here: du: follows symlinks in the tree, which may lead anywhere"),
        ("du -D link", "walks link; shows [Inode, Links, Blocks, Order]"),
        ("du -x --inodes .", "walks .!; shows [Inode, Links, Device, Order]"),
        ("du --files0-from=list", "here: flag --files0-from of du is not annotated"),
    ]);
}

#[test]
fn stat_needs_a_known_format() {
    check(&[
        ("stat /m/a", "here: stat: shows device and inode numbers, blocks and times as this machine sees them"),
        ("stat -c '%n %s' /m/a /m/b", "reads /m/a!; reads /m/b!; split 2; shows [DirSize]"),
        (r"stat --printf='%n\n' /m/a", "reads /m/a!"),
        ("stat -c '%U %n' /m/a", "here: stat: the format has directives that show what differs between machines"),
        ("stat -c %Y -L /m/link", "reads /m/link; shows [Times]"),
        ("stat -c %N /m/a", "here: stat: the format has directives that show what differs between machines"),
        ("stat -f -c %n /m", "here: stat: describes the file system as this machine has mounted it"),
        ("stat -c %d /m/a", "here: stat: the format has directives that show what differs between machines"),
        ("stat -c %n -", "here: stat: describes its own standard input"),
    ]);
}

#[test]
fn file_reads_the_beginnings() {
    check(&[
        ("file /m/a /m/b", "reads /m/a; reads /m/b; shows [Mode]"),
        ("file -b /m/a /m/b", "reads /m/a; reads /m/b; split 2; shows [Mode]"),
        ("file -i -N a b", "reads a; reads b; split 2; shows [Mode]"),
        ("file -", "stdin early; shows [Mode]"),
        ("file -f names", "lists names; shows [Mode]"),
        ("file -z a.gz", "here: flag -z of file is not annotated"),
        ("MAGIC=/my/magic file a", "here: file: MAGIC names other magic files"),
    ]);
}

#[test]
fn cp_copies_where_the_data_is() {
    check(&[
        ("cp a b", "reads a; fills b"),
        ("cp -r a b c", "walks a!; walks b!; fills c; shows [Symlinks]; once"),
        ("cp -a tree copy", "walks tree!; fills copy; shows [Owner, Inode, Links, Times, Symlinks]; once"),
        ("cp -p a b", "reads a; fills b; shows [Owner, Times]"),
        ("cp --preserve=mode a b", "reads a; fills b"),
        ("cp --preserve=all a b", "here: cp: extended attributes and contexts differ between a mount and its server"),
        ("cp -t dir a b", "fills dir; reads a; reads b"),
        ("cp -T a b", "reads a; makes b"),
        ("cp -rT a b", "walks a!; fills b; shows [Symlinks]; once"),
        ("cp -i a b", "here: cp: asks before it overwrites"),
        ("cp -rL a b", "here: cp: follows symlinks in the tree, which may lead anywhere"),
        ("cp -u a b", "reads a; fills b; shows [Times]; once"),
        ("cp -n a -", "reads a; fills -; once"),
        ("cp --reflink=auto --sparse=never a b", "reads a; fills b"),
        (
            "cp --reflink a b",
            "here: cp: whether blocks can be shared depends on the file system as this machine sees it",
        ),
        ("cp -b a b", "here: flag -b of cp is not annotated"),
        ("cp -l a b", "here: cp: hard links are made through the mount: cheap, and the names it has cached stay right"),
        ("cp a", "here: cp: an operand is missing"),
    ]);
}

#[test]
fn mv_stays() {
    check(&[
        ("mv a b", "here: mv: renames through the mount: cheap, and the names it has cached stay right"),
        ("mv -f a b dir", "here: mv: renames through the mount: cheap, and the names it has cached stay right"),
        ("mv -t dir a", "here: mv: renames through the mount: cheap, and the names it has cached stay right"),
        ("mv -i a b", "here: mv: renames through the mount: cheap, and the names it has cached stay right"),
        ("mv --backup a b", "here: mv: renames through the mount: cheap, and the names it has cached stay right"),
    ]);
}

#[test]
fn rm_takes_whole_trees() {
    check(&[
        ("rm a", "here: rm: removes names through the mount: cheap, and the names it has cached stay right"),
        ("rm -rf tree", "fills tree!"),
        ("rm -r tree", "fills tree!; asks; once"),
        ("rm -rv tree", "fills tree!; shows [Order]; asks; once"),
        ("rm -f a b", "here: rm: removes names through the mount: cheap, and the names it has cached stay right"),
        ("rm -ri tree", "here: rm: asks before it removes"),
        ("rm -rf --no-preserve-root /", "here: flag --no-preserve-root of rm is not annotated"),
        ("rm -rf -- -x", "fills -x!"),
    ]);
}

#[test]
fn cheap_changes_of_names_stay() {
    check(&[
        ("mkdir -p a/b", "here: mkdir: makes names through the mount: cheap, and the names it has cached stay right"),
        ("mkdir a b", "here: mkdir: makes names through the mount: cheap, and the names it has cached stay right"),
        ("mkdir -m 700 a", "here: mkdir: makes names through the mount: cheap, and the names it has cached stay right"),
        ("mkdir -Z a", "here: flag -Z of mkdir is not annotated"),
        ("mkdir", "here: mkdir: an operand is missing"),
        ("rmdir a", "here: rmdir: removes names through the mount: cheap, and the names it has cached stay right"),
        ("rmdir -p a/b", "here: rmdir: removes names through the mount: cheap, and the names it has cached stay right"),
        (
            "rmdir --ignore-fail-on-non-empty a",
            "here: rmdir: removes names through the mount: cheap, and the names it has cached stay right",
        ),
        ("rmdir -q a", "here: flag -q of rmdir is not annotated"),
        ("rmdir", "here: rmdir: an operand is missing"),
        (
            "touch a",
            "here: touch: sets times through the mount: cheap, and the names and times it has cached stay right",
        ),
        (
            "touch -r b a",
            "here: touch: sets times through the mount: cheap, and the names and times it has cached stay right",
        ),
        (
            "touch -d yesterday a",
            "here: touch: sets times through the mount: cheap, and the names and times it has cached stay right",
        ),
        (
            "touch -h -",
            "here: touch: sets times through the mount: cheap, and the names and times it has cached stay right",
        ),
        ("touch", "here: touch: an operand is missing"),
        ("ln -s a b", "here: ln: makes links through the mount: cheap, and the names it has cached stay right"),
        ("ln a b", "here: ln: makes links through the mount: cheap, and the names it has cached stay right"),
        ("ln -sf a b dir", "here: ln: makes links through the mount: cheap, and the names it has cached stay right"),
        ("ln -t dir a", "here: ln: makes links through the mount: cheap, and the names it has cached stay right"),
        ("ln --relative", "here: ln: an operand is missing"),
        (
            "dd if=a of=b bs=1M",
            "here: dd: its files are parts of words (if=FILE), and what it counts are reads, which depend on timing",
        ),
        (
            "dd",
            "here: dd: its files are parts of words (if=FILE), and what it counts are reads, which depend on timing",
        ),
        (
            "dd of=b conv=notrunc",
            "here: dd: its files are parts of words (if=FILE), and what it counts are reads, which depend on timing",
        ),
        (
            "dd status=none",
            "here: dd: its files are parts of words (if=FILE), and what it counts are reads, which depend on timing",
        ),
        ("dd --help", "here: dd: is about the dd of this machine"),
    ]);
}

#[test]
fn chmod_takes_whole_trees() {
    check(&[
        (
            "chmod 644 a",
            "here: chmod: changes single files through the mount: cheap, and the modes it has cached stay right",
        ),
        ("chmod -R 644 tree", "fills tree; shows [Mode]"),
        ("chmod -R u+w tree other", "fills tree; fills other; shows [Mode]; once"),
        ("chmod -Rv 755 tree", "fills tree; shows [Mode, Order]; once"),
        ("chmod -R --reference=a tree", "reads a; fills tree; shows [Mode]"),
        ("chmod -x a", "here: flag -x of chmod is not annotated"),
        ("chmod -R -w tree", "here: flag -w of chmod is not annotated"),
    ]);
}

#[test]
fn git_is_read_up_to_its_subcommand() {
    check(&[
        ("git status", "writes .; only .git; tty"),
        ("git -C /m/repo status", "fills /m/repo; only .git; in /m/repo; tty"),
        ("git -C /m/repo commit -q -m x", "fills /m/repo; only .git; in /m/repo; tty; varies; once"),
        ("git -C repo add ../other", "here: git add: a path leads out of the directory that it changes to"),
        ("git -c user.name=me status", "writes .; only .git; tty"),
        (
            "git -c core.fsmonitor=prog status",
            "here: git: the configuration given by -c may start programs or name files",
        ),
        ("git --git-dir=/m/repo/.git status", "here: git: the repository is not looked for in the usual place"),
        ("git --no-pager status", "writes .; only .git; tty"),
        ("GIT_DIR=/m/.git git status", "here: git: variables say where the repository is"),
        ("GIT_CONFIG_COUNT=1 git status", "here: git: variables say where git's configuration is"),
        ("XDG_CONFIG_HOME=/x git status", "here: git: variables say where git's configuration is"),
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
                parts.extend(guard.files.iter().map(|file| file.strip_prefix("hooks/").expect("a hook").to_owned()));
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
        ("EMAIL=a@b git commit -m x", format!(" {index} {commit} user.name|committer.name user.name|author.name")),
        ("GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b git commit -m x", format!(" {index} {commit} {author}")),
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
        status.guards.iter().all(|guard| guard.below.as_deref() == Some(".git") || guard.test == GuardTest::AllExist)
    );
    assert!(status.client_files.contains(&"~/.gitconfig".to_owned()));
}

/// What is allowed must not start a program, nor name a file that only the workstation has.
#[test]
fn git_settings_that_start_programs_are_not_allowed() {
    let status = classify(&Library::builtin(), "git status").unwrap();
    let allowed = status.guards.iter().find_map(|guard| match &guard.test {
        GuardTest::SettingsAllowed(settings) => Some(settings),
        _ => None,
    });
    let allowed: Vec<String> = allowed.unwrap().iter().map(|setting| setting.to_lowercase()).collect();
    let is_like = |pattern: &str, name: &str| match pattern.split_once('*') {
        Some((start, end)) => name.len() >= start.len() + end.len() && name.starts_with(start) && name.ends_with(end),
        None => pattern == name,
    };
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
        let found = allowed.iter().find(|pattern| is_like(pattern, refused));
        assert_eq!(found, None, "{refused}");
    }
    for usual in ["core.filemode", "remote.origin.fetch", "branch.main.merge", "user.email", "gc.auto", "alias.st"] {
        assert!(allowed.iter().any(|pattern| is_like(pattern, usual)), "{usual}");
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
        ("git add --pathspec-from-file=list", "here: flag --pathspec-from-file of git add is not annotated"),
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
        ("git commit -F msg src/a", "reads msg; walks src/a!; writes .; only .git; tty; varies; once"),
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
        ("git apply x.patch", "reads x.patch; writes .; tty; once"),
        ("git apply", "writes .; stdin; tty; once"),
        ("git apply -", "writes .; stdin; tty; once"),
        ("git apply --check x.patch", "reads x.patch; reads .; tty"),
        ("git apply --stat --apply x.patch", "reads x.patch; writes .; tty; once"),
        ("git apply -3 -p2 --index a.patch b.patch", "reads a.patch; reads b.patch; writes .; tty; once"),
        ("git apply --unsafe-paths x.patch", "here: flag --unsafe-paths of git apply is not annotated"),
        ("git -C /m/repo apply /home/u/x.patch", "fills /m/repo; reads /home/u/x.patch; in /m/repo; tty; once"),
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
        ("git checkout --recurse-submodules main", "here: flag --recurse-submodules of git checkout is not annotated"),
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
        ("git reset --recurse-submodules", "here: flag --recurse-submodules of git reset is not annotated"),
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
        ("git branch --edit-description", "here: flag --edit-description of git branch is not annotated"),
    ]);
}

#[test]
fn git_mv_rm() {
    check(&[
        ("git mv a b", "here: git mv: renames through the mount: cheap, and the names it has cached stay right"),
        ("git mv -k a b dir", "here: git mv: renames through the mount: cheap, and the names it has cached stay right"),
        ("git mv -n a b", "here: git mv: renames through the mount: cheap, and the names it has cached stay right"),
        ("git mv a", "here: git mv: an operand is missing"),
        ("git mv -v -f a b", "here: git mv: renames through the mount: cheap, and the names it has cached stay right"),
        ("git rm a", "here: git rm: removes names through the mount, so that those it has cached stay right"),
        ("git rm -r --cached dir", "fills dir!; writes .; only .git; once"),
        ("git rm --cached a b", "fills a!; fills b!; writes .; only .git; once"),
        ("git rm -f a", "here: git rm: removes names through the mount, so that those it has cached stay right"),
        ("git rm --pathspec-from-file=l", "here: flag --pathspec-from-file of git rm is not annotated"),
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
        ("git diff --ext-diff", "here: git diff: starts the programs that the repository's configuration names"),
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
        ("git log --show-signature", "here: git log: checks signatures with the keys of this machine"),
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
        ("git show --pretty=%GS HEAD", "here: git show: checks signatures with the keys of this machine"),
        ("git show --textconv HEAD:a", "here: git show: starts the programs that the repository's configuration names"),
    ]);
}

#[test]
fn git_rev_list() {
    check(&[
        ("git rev-list --count HEAD", "reads ."),
        ("git rev-list --all --objects", "reads ."),
        ("git rev-list --stdin", "reads .; stdin"),
        ("git rev-list -n 1 HEAD -- src", "walks src!; reads ."),
        ("git rev-list --disk-usage HEAD", "here: flag --disk-usage of git rev-list is not annotated"),
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
        ("git format-patch --cover-letter main", "here: flag --cover-letter of git format-patch is not annotated"),
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

#[test]
fn mogrify_makes_thumbnails() {
    check(&[
        (
            "mogrify  -format gif -path thumbs_dir -thumbnail 100x100 data_dir/a.jpg data_dir/b.jpg",
            "fills thumbs_dir; reads data_dir/a.jpg; reads data_dir/b.jpg",
        ),
        ("mogrify -format gif -thumbnail 100x100 d/a.jpg d/b.jpg", "changes d/a.jpg; changes d/b.jpg; split 2"),
        ("mogrify -format gif -path t a.jpg b.jpg", "fills t; reads a.jpg; reads b.jpg; split 2"),
        ("mogrify -format gif a.jpg a.png", "changes a.jpg; changes a.png; once"),
        ("mogrify -format jpg a.jpg b.jpg", "changes a.jpg; changes b.jpg; once"),
        ("mogrify -resize 50% a.jpg b.jpg", "changes a.jpg; changes b.jpg; once"),
        ("mogrify -format png a.jpg b.jpg", "changes a.jpg; changes b.jpg; split 2; shows [Times]"),
        ("mogrify -strip -format png a.jpg", "changes a.jpg"),
        (
            "mogrify -resize 50% 'a.jpg[0]'",
            "here: mogrify: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        (
            "mogrify -resize 50% a.svg",
            "here: mogrify: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        ("mogrify -crop 10x10 a.jpg", "here: mogrify: the -crop may make several images"),
        ("mogrify -crop 10x10+5+5 +repage a.jpg", "changes a.jpg; once"),
        (
            "mogrify -resize 50% '@names'",
            "here: mogrify: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        ("mogrify -write b.jpg a.jpg", "here: flag -write of mogrify is not annotated"),
        ("mogrify -draw 'point 1,1' a.jpg", "here: flag -draw of mogrify is not annotated"),
        ("mogrify -morphology Convolve '@kernel' a.jpg", "here: mogrify: reads a value from a file"),
        (
            "mogrify -resize 50% '*.jpg'",
            "here: mogrify: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        ("mogrify -resize 50%", "here: mogrify: an operand is missing"),
        ("MAGICK_CONFIGURE_PATH=/x mogrify -flip a.jpg", "here: mogrify: variables say where ImageMagick's files are"),
    ]);
}

#[test]
fn convert_writes_one_file() {
    check(&[
        ("convert a.jpg -resize 50% b.gif", "reads a.jpg; makes b.gif"),
        ("convert a.jpg b.png", "reads a.jpg; makes b.png; shows [Times]"),
        ("convert a.jpg -strip b.png", "reads a.jpg; makes b.png"),
        ("convert a.jpg b.jpg +append c.jpg", "reads a.jpg; reads b.jpg; makes c.jpg"),
        ("convert a.jpg b.jpg c.jpg", "here: convert: may write several files"),
        ("convert a.jpg b.jpg c.gif", "reads a.jpg; reads b.jpg; makes c.gif"),
        ("convert a.gif b.jpg", "here: convert: may write several files, if the input holds several images"),
        (
            "convert a.jpg jpg:-",
            "here: convert: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        (
            "convert - b.jpg",
            "here: convert: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        (
            "convert rose: b.jpg",
            "here: convert: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        (
            "convert a.jpg 'b-%d.jpg'",
            "here: convert: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        (
            "convert ( a.jpg -flip ) b.jpg",
            "here: convert: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        ("convert a.jpg -define registry:x=/y b.jpg", "here: convert: the -define is not known"),
        (
            "convert a.jpg b.pdf",
            "here: convert: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
    ]);
}

#[test]
fn identify_describes_images() {
    check(&[
        ("identify a.jpg", "reads a.jpg; varies"),
        (r"identify -format '%w %h\n' a.jpg b.png", "reads a.jpg; reads b.png"),
        ("identify -format '%[EXIF:Model]' a.jpg", "reads a.jpg"),
        (
            "identify -format '%[date:modify]' a.jpg",
            "here: identify: the format asks for more than names, sizes and numbers",
        ),
        ("identify -format '@f' a.jpg", "here: identify: the format asks for more than names, sizes and numbers"),
        ("identify -verbose a.jpg", "here: flag -verbose of identify is not annotated"),
        (
            "identify -ping 'a.gif[0]'",
            "here: identify: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
    ]);
}
