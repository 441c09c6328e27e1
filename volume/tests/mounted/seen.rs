//! Nothing old is seen: not of what another mount does, nor of what is done on the server.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use proptest::{
    prelude::Rng as _,
    test_runner::{RngAlgorithm, TestRng},
};

use crate::site::Site;

/// Changes by one of the two mounts, each looked at through both at once.
const CHANGES: usize = 400;

/// By when a change of another program must be seen.
const SEEN_WITHIN: Duration = Duration::from_millis(100);

/// What there is below a directory: names, contents and sizes.
fn picture(top: &Path) -> Vec<(PathBuf, Option<Vec<u8>>)> {
    let mut names: Vec<_> = fs::read_dir(top).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    let mut all = Vec::new();
    for name in names {
        let path = top.join(&name);
        let found = fs::symlink_metadata(&path).unwrap();
        if found.is_dir() {
            all.push((name.clone().into(), None));
            all.extend(picture(&path).into_iter().map(|(below, content)| (Path::new(&name).join(below), content)));
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
    let name = |random: &mut TestRng| top.join(["a", "b", "d/a", "d/b"][below(random, 4)]);
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
            assert_eq!(picture(site.mount(mount)), real, "mount {mount} after change {number}");
        }
    }
}

/// The same by another process: what the process of the store does itself is no news to it.
fn change_elsewhere(top: &Path, random: &mut TestRng) {
    let mut name = || ["a", "b", "d/a", "d/b"][below(random, 4)];
    let (path, other) = (name(), name());
    let (length, offset) = (below(random, 9000), below(random, 5000));
    let script = match below(random, 7) {
        0 => format!("head -c {length} /dev/urandom > {path}"),
        1 => format!("rm {path}"),
        2 => format!("mv -T {path} {other}"),
        3 => format!("ln {path} {other}"),
        4 => "mkdir d || rmdir d".to_owned(),
        5 => format!("test -e {path} && printf changed | dd of={path} conv=notrunc bs=1 seek={offset}"),
        _ => format!("test -e {path} && truncate -s {offset} {path}"),
    };
    // Most of them fail now and then, as there is no such file.
    Command::new("sh").args(["-c", &script]).current_dir(top).stderr(Stdio::null()).status().unwrap();
}

/// As an offloaded command's changes, after which the gateway asks.
#[test]
fn what_is_done_on_the_server_is_seen_when_it_was_asked_for() {
    let site = Site::new(1);
    let mut random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    for number in 0..CHANGES {
        change(site.mount(0), &mut random);
        site.settle(0);
        change_elsewhere(&site.origin(), &mut random);
        site.catch_up(0);
        assert_eq!(picture(site.mount(0)), picture(&site.origin()), "after change {number}");
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
