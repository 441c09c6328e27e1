//! Nothing old is seen: not of what another mount does, nor of what is done on the server.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::unistd::geteuid;
use proptest::{
    prelude::Rng as _,
    test_runner::{RngAlgorithm, TestRng},
};

use crate::site::Site;

/// Changes by one of the two mounts, each looked at through both at once.
const CHANGES: usize = 400;

/// By when a change of another program must be seen.
const SEEN_WITHIN: Duration = Duration::from_millis(100);

/// All names that changes are about.
const NAMES: [&str; 4] = ["a", "b", "d/a", "d/b"];

/// Which of the names there are: asked one by one, also for those that are not there.
fn there(top: &Path) -> [bool; 4] {
    NAMES.map(|name| top.join(name).symlink_metadata().is_ok())
}

/// Lists everything below a directory: names and contents.
fn picture(top: &Path) -> Vec<(PathBuf, Option<Vec<u8>>)> {
    let mut names: Vec<_> =
        fs::read_dir(top).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    let mut all = Vec::new();
    for name in names {
        let path = top.join(&name);
        let found = fs::symlink_metadata(&path).unwrap();
        if found.is_dir() {
            all.push((name.clone().into(), None));
            all.extend(
                picture(&path)
                    .into_iter()
                    .map(|(below, content)| (Path::new(&name).join(below), content)),
            );
        } else {
            let content = fs::read(&path).unwrap();
            assert_eq!(found.len(), content.len() as u64, "{}", path.display());
            all.push((name.into(), Some(content)));
        }
    }
    all
}

fn below(random: &mut TestRng, limit: u32) -> usize {
    usize::try_from(random.next_u32() % limit).unwrap()
}

/// One change, of which each is possible at any time.
fn change(top: &Path, random: &mut TestRng) {
    let name = |random: &mut TestRng| top.join(NAMES[below(random, 4)]);
    let (path, other) = (name(random), name(random));
    match below(random, 7) {
        0 => drop(fs::write(&path, vec![b'w'; below(random, 9000)])),
        1 => drop(fs::remove_file(&path)),
        2 => drop(fs::rename(&path, &other)),
        3 => drop(fs::hard_link(&path, &other)),
        4 => drop(fs::create_dir(top.join("d")).or_else(|_| fs::remove_dir(top.join("d")))),
        5 => {
            if let Ok(file) = OpenOptions::new().write(true).open(&path) {
                let value = u8::try_from(random.next_u32() % 256).unwrap();
                file.write_all_at(&[value; 100], u64::from(random.next_u32() % 5000)).unwrap();
            }
        }
        _ => {
            if let Ok(file) = OpenOptions::new().write(true).open(&path) {
                file.set_len(u64::from(random.next_u32() % 5000)).unwrap();
            }
        }
    }
}

#[test]
fn what_one_mount_does_the_other_sees_at_once() {
    let site = Site::new(2);
    let mut random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    for number in 0..CHANGES {
        change(site.mount(below(&mut random, 2)), &mut random);
        let real = picture(&site.origin());
        for mount in 0..2 {
            assert_eq!(
                there(site.mount(mount)),
                there(&site.origin()),
                "mount {mount} after change {number}"
            );
            assert_eq!(picture(site.mount(mount)), real, "mount {mount} after change {number}");
            // All names are known now: also those that are not there are remembered without a
            // question.
            there(site.mount(mount));
        }
    }
}

/// Like [`change`], but by another process, since the store ignores events of its own process.
fn change_elsewhere(top: &Path, random: &mut TestRng) {
    let mut name = || NAMES[below(random, 4)];
    let (path, other) = (name(), name());
    let (length, offset) = (below(random, 9000), below(random, 5000));
    let script = match below(random, 7) {
        0 => format!("head -c {length} /dev/urandom > {path}"),
        1 => format!("rm {path}"),
        2 => format!("mv -T {path} {other}"),
        3 => format!("ln {path} {other}"),
        4 => "mkdir d || rmdir d".to_owned(),
        5 => format!(
            "test -e {path} && printf changed | dd of={path} conv=notrunc bs=1 seek={offset}"
        ),
        _ => format!("test -e {path} && truncate -s {offset} {path}"),
    };
    // Most of them fail now and then, as there is no such file.
    Command::new("sh")
        .args(["-c", &script])
        .current_dir(top)
        .stderr(Stdio::null())
        .status()
        .unwrap();
}

/// As an offloaded command's changes, after which the gateway asks.
#[test]
fn what_is_done_on_the_server_is_seen_when_it_was_asked_for() {
    changes_are_seen(&Site::new(1));
}

/// The kernel is made to forget in another way then.
#[test]
fn what_is_done_on_the_server_is_seen_also_around_other_mounts() {
    if !geteuid().is_root() {
        return;
    }
    let mut site = Site::new(1);
    site.mount_below(0);
    changes_are_seen(&site);
}

fn changes_are_seen(site: &Site) {
    let mut random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    for number in 0..CHANGES {
        change(site.mount(0), &mut random);
        site.settle(0);
        change_elsewhere(&site.origin(), &mut random);
        site.catch_up(0);
        assert_eq!(there(site.mount(0)), there(&site.origin()), "after change {number}");
        assert_eq!(picture(site.mount(0)), picture(&site.origin()), "after change {number}");
        there(site.mount(0));
    }
}

/// The kernel is told of each name then, also of those of which it was said that they are not
/// there: of a directory that this session has made, and of one that was listed, nobody was asked.
/// Needs root, who alone may mount something there.
#[test]
fn names_that_were_not_there_are_seen_when_a_run_has_made_them() {
    if !geteuid().is_root() {
        return;
    }
    let mut site = Site::new(1);
    site.mount_below(0);
    for number in 0..10 {
        let own = format!("new{number}/own");
        fs::create_dir_all(site.mount(0).join(&own)).unwrap();
        let listed = format!("listed{number}");
        let made = Command::new("mkdir").arg(site.origin().join(&listed)).status().unwrap();
        assert!(made.success());
        site.catch_up(0);
        assert_eq!(fs::read_dir(site.mount(0).join(&listed)).unwrap().count(), 0);
        let names = [own, listed].map(|directory| format!("{directory}/made"));
        assert!(names.iter().all(|name| !site.mount(0).join(name).exists()));
        site.settle(0);
        let made = Command::new("touch").args(&names).current_dir(site.origin()).status().unwrap();
        assert!(made.success());
        site.catch_up(0);
        assert!(names.iter().all(|name| site.mount(0).join(name).exists()), "{number}: {names:?}");
    }
}

#[test]
fn what_another_program_does_on_the_server_is_seen_soon() {
    let site = Site::new(1);
    fs::write(site.origin().join("f"), b"old").unwrap();
    let mut slowest = Duration::ZERO;
    for text in ["first", "second", "third, and longer"] {
        // So that it is remembered.
        let _ = picture(site.mount(0));
        let script = format!("printf '{text}' > f");
        Command::new("sh").args(["-c", &script]).current_dir(site.origin()).status().unwrap();
        let began = Instant::now();
        while fs::read_to_string(site.mount(0).join("f")).unwrap() != text {
            assert!(began.elapsed() < SEEN_WITHIN * 20, "{text} is not seen");
        }
        slowest = slowest.max(began.elapsed());
    }
    println!("seen within {slowest:?}");
}

/// A directory is read in two steps; between them a file of it gets another name, by either mount.
#[test]
fn names_of_an_old_listing_lead_nowhere_else() {
    let site = Site::new(2);
    for (changer, directory) in [(0, "own"), (1, "others")] {
        fs::create_dir(site.mount(changer).join(directory)).unwrap();
        let (read, changed) = (site.mount(0).join(directory), site.mount(changer).join(directory));
        for number in 0..2000 {
            fs::write(changed.join(format!("f{number}")), b"0").unwrap();
        }
        for name in ["t", "removed"] {
            fs::write(changed.join(name), b"precious").unwrap();
        }
        let _ = fs::read_dir(&read).unwrap().count();
        let mut names = fs::read_dir(&read).unwrap();
        names.next().unwrap().unwrap();
        fs::rename(changed.join("t"), changed.join("result")).unwrap();
        fs::remove_file(changed.join("removed")).unwrap();
        let _ = fs::metadata(read.join("f0"));
        assert!(names.all(|name| name.is_ok()));
        assert!(!read.join("t").exists() && !read.join("removed").exists(), "{directory}");
        fs::write(read.join("t"), b"another").unwrap();
        assert_eq!(fs::read(read.join("result")).unwrap(), b"precious");
        for (name, content) in [("t", "another"), ("result", "precious")] {
            assert_eq!(fs::read_to_string(changed.join(name)).unwrap(), content, "{directory}");
        }
    }
}
