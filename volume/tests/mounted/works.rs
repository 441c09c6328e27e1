//! Programs' operations on files work.

use std::{
    fs::{self, File, OpenOptions},
    io::{ErrorKind, Read, Seek, SeekFrom, Write},
    os::fd::AsRawFd as _,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink},
    path::Path,
    process::Command,
};

use nix::{
    fcntl::{Flock, FlockArg, RenameFlags, renameat2},
    sys::statvfs::statvfs,
};

use crate::site::Site;

#[test]
fn mountinfo_names_the_type_and_the_source() {
    let site = Site::new(1);
    let info = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = info.lines().find(|line| line.contains(site.mount(0).to_str().unwrap())).unwrap();
    assert!(line.contains(" - fuse.posh test:origin "), "{line}");
}

#[test]
fn files_are_made_written_read_and_removed() {
    let site = Site::new(1);
    let dir = site.mount(0);
    let path = dir.join("f");
    fs::write(&path, b"0123456789").unwrap();
    assert_eq!(fs::read(site.origin().join("f")).unwrap(), b"0123456789");
    let mut file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    file.write_at(b"xy", 3).unwrap();
    file.seek(SeekFrom::Start(2)).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "2xy56789");
    file.set_len(4).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"012x");
    file.write_at(b"end", 5000).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 5003);
    fs::remove_file(&path).unwrap();
    assert_eq!(File::open(&path).unwrap_err().kind(), ErrorKind::NotFound);
    // It has no name any more, and is there as long as it is open.
    let mut end = [0; 3];
    file.read_exact_at(&mut end, 5000).unwrap();
    file.write_at(b"END", 5000).unwrap();
    file.read_exact_at(&mut end, 5000).unwrap();
    assert_eq!(&end, b"END");
    assert_eq!((file.metadata().unwrap().nlink(), file.metadata().unwrap().len()), (0, 5003));
}

#[test]
fn a_file_without_a_name_is_opened_again_through_its_descriptor() {
    let site = Site::new(1);
    let dir = site.mount(0);
    let again = |file: &File| format!("/proc/self/fd/{}", file.as_raw_fd());
    // Written through the volume and not sent yet, known, and not known before.
    for (name, seen) in [("sent", true), ("new", false)] {
        let path = dir.join(name);
        match seen {
            true => fs::write(&path, b"old").unwrap(),
            false => fs::write(site.origin().join(name), b"old").unwrap(),
        }
        for remove in [(|path: &Path| fs::remove_file(path).unwrap()) as fn(&Path), |path| {
            fs::write(path.with_extension("other"), b"other").unwrap();
            fs::rename(path.with_extension("other"), path).unwrap();
        }] {
            fs::write(&path, b"old").unwrap();
            let file = File::open(&path).unwrap();
            let mut first = [0];
            file.read_exact_at(&mut first, 0).unwrap();
            remove(&path);
            assert_eq!(fs::read(again(&file)).unwrap(), b"old", "{name}");
            let writing = OpenOptions::new().write(true).open(again(&file)).unwrap();
            writing.write_at(b"new", 0).unwrap();
            assert_eq!(fs::read(again(&file)).unwrap(), b"new", "{name}");
            let _ = fs::remove_file(&path);
        }
    }
}

#[test]
fn names_are_made_and_moved() {
    let site = Site::new(1);
    let dir = site.mount(0);
    fs::create_dir_all(dir.join("a/b")).unwrap();
    fs::write(dir.join("a/f"), b"f").unwrap();
    fs::rename(dir.join("a/f"), dir.join("a/b/g")).unwrap();
    assert!(!dir.join("a/f").exists());
    fs::hard_link(dir.join("a/b/g"), dir.join("h")).unwrap();
    assert_eq!(fs::metadata(dir.join("h")).unwrap().nlink(), 2);
    symlink("a/b/g", dir.join("l")).unwrap();
    assert_eq!(fs::read(dir.join("l")).unwrap(), b"f");
    assert_eq!(fs::read_link(dir.join("l")).unwrap().to_str(), Some("a/b/g"));
    fs::write(dir.join("other"), b"other").unwrap();
    let exchange = |how| {
        renameat2(
            nix::fcntl::AT_FDCWD,
            &dir.join("h"),
            nix::fcntl::AT_FDCWD,
            &dir.join("other"),
            how,
        )
    };
    assert_eq!(exchange(RenameFlags::RENAME_NOREPLACE), Err(nix::errno::Errno::EEXIST));
    exchange(RenameFlags::RENAME_EXCHANGE).unwrap();
    assert_eq!(
        (fs::read(dir.join("h")).unwrap(), fs::read(dir.join("other")).unwrap()),
        (b"other".into(), b"f".into())
    );
    assert_eq!(
        fs::remove_dir(dir.join("a")).unwrap_err().raw_os_error(),
        Some(nix::libc::ENOTEMPTY)
    );
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["a", "h", "l", "other"]);
    fs::remove_dir_all(dir.join("a")).unwrap();
    assert!(!site.origin().join("a").exists());
}

#[test]
fn attributes_are_those_of_the_server() {
    let site = Site::new(1);
    let (ours, theirs) = (site.mount(0).join("f"), site.origin().join("f"));
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o640)
        .open(&ours)
        .unwrap()
        .write_all(&[1; 10_000])
        .unwrap();
    let time = std::time::UNIX_EPOCH + std::time::Duration::new(1_000_000_000, 123_456_789);
    let times = fs::FileTimes::new().set_modified(time).set_accessed(time);
    File::options().write(true).open(&ours).unwrap().set_times(times).unwrap();
    fs::set_permissions(&ours, fs::Permissions::from_mode(0o604)).unwrap();
    let (shown, real) = (fs::metadata(&ours).unwrap(), fs::metadata(&theirs).unwrap());
    let all = |found: &fs::Metadata| {
        let times = (found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec());
        (
            found.ino(),
            found.mode(),
            found.uid(),
            found.gid(),
            found.nlink(),
            found.size(),
            found.blocks(),
            times,
        )
    };
    assert_eq!(all(&shown), all(&real));
    assert_eq!((shown.mode() & 0o7777, shown.mtime_nsec()), (0o604, 123_456_789));
    let (shown, real) = (statvfs(site.mount(0)).unwrap(), statvfs(&site.origin()).unwrap());
    assert_eq!((shown.blocks(), shown.name_max()), (real.blocks(), real.name_max()));
}

#[test]
fn a_lock_is_seen_by_the_other_mount() {
    let site = Site::new(2);
    fs::write(site.mount(0).join("lock"), b"").unwrap();
    let open =
        |number: usize| File::options().write(true).open(site.mount(number).join("lock")).unwrap();
    let held = Flock::lock(open(0), FlockArg::LockExclusiveNonblock).unwrap();
    let (_, refused) = Flock::lock(open(1), FlockArg::LockExclusiveNonblock).unwrap_err();
    assert_eq!(refused, nix::errno::Errno::EWOULDBLOCK);
    let other = open(1);
    let waiting = std::thread::spawn(move || Flock::lock(other, FlockArg::LockExclusive).is_ok());
    drop(held);
    assert!(waiting.join().unwrap());
}

#[test]
fn appends_of_two_mounts_are_all_there() {
    let site = Site::new(2);
    fs::write(site.origin().join("log"), b"").unwrap();
    const LINES: usize = 200;
    std::thread::scope(|scope| {
        for number in 0..2 {
            let path = site.mount(number).join("log");
            scope.spawn(move || {
                let mut log = OpenOptions::new().append(true).open(path).unwrap();
                (0..LINES).for_each(|line| {
                    log.write_all(format!("{number} {line:05}\n").as_bytes()).unwrap()
                });
            });
        }
    });
    let text = fs::read_to_string(site.mount(0).join("log")).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    for number in 0..2 {
        let own: Vec<&&str> =
            lines.iter().filter(|line| line.starts_with(&number.to_string())).collect();
        assert!(own.len() == LINES && own.is_sorted(), "{number}: {} lines", own.len());
    }
    lines.dedup();
    assert_eq!(lines.len(), 2 * LINES);
}

#[test]
fn git_works_on_it() {
    let site = Site::new(1);
    let git = |arguments: &[&str], dir: &str| {
        let mut git = Command::new("git");
        git.current_dir(site.mount(0).join(dir))
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GIT_CONFIG_SYSTEM", "/dev/null");
        git.args(["-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main"])
            .args(arguments);
        let output = git.output().unwrap();
        assert!(
            output.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    };
    git(&["init", "-q", "one"], ".");
    for number in 0..20 {
        fs::write(site.mount(0).join(format!("one/f{number}")), format!("{number}\n").repeat(1000))
            .unwrap();
    }
    git(&["add", "."], "one");
    git(&["commit", "-q", "-m", "first"], "one");
    git(&["clone", "-q", "--no-hardlinks", "one", "two"], ".");
    git(&["checkout", "-q", "-b", "branch"], "two");
    git(&["rm", "-q", "f0"], "two");
    git(&["commit", "-q", "-m", "second"], "two");
    git(&["gc", "-q"], "two");
    git(&["fsck", "--strict"], "two");
    git(&["checkout", "-q", "main"], "two");
    assert_eq!(git(&["status", "--porcelain"], "two"), "");
    assert!(site.origin().join("two/f0").exists());
}
