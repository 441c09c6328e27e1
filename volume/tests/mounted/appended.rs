//! `O_APPEND`: what one write(2) appends is in one piece, whoever else appends to the file.

use std::{
    fs::{self, File, OpenOptions},
    io::{IoSlice, Write as _},
    os::unix::fs::FileExt as _,
    path::Path,
    process::Command,
    thread,
};

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    unistd::geteuid,
};

use crate::site::Site;

/// Of one record, which then crosses the border of a page now and then.
const RECORD: usize = 144;

/// Limit for an atomic append by one write(2): a request of 256 pages that begins anywhere in a
/// page.
const MOST: usize = (1 << 20) - 4095;

/// By a program of the server.
const APPEND: &str = r#"awk -v w="$1" -v n="$2" 'BEGIN { while (i < n) {
    r = sprintf("%d.%06d|", w, ++i); printf "%s\n", substr(r r r r r r r r r r r r r r r r, 1, 143); fflush() } }' >> log"#;

fn append_on_server(site: &Site, writer: usize, each: usize) {
    let arguments = ["-ec", APPEND, "sh", &writer.to_string(), &each.to_string()];
    assert!(
        Command::new("sh").args(arguments).current_dir(site.origin()).status().unwrap().success()
    );
}

fn record(writer: usize, number: usize) -> Vec<u8> {
    let mut record = format!("{writer}.{number:06}|").repeat(16).into_bytes();
    record.truncate(RECORD - 1);
    record.push(b'\n');
    record
}

fn open_to_append(path: &Path) -> File {
    OpenOptions::new().append(true).open(path).unwrap()
}

/// All records of each writer, in its order, and nothing else.
fn assert_whole(log: &[u8], writers: usize, each: usize) {
    let mut next = vec![1; writers];
    for (at, line) in log.split_inclusive(|byte| *byte == b'\n').enumerate() {
        let writer = usize::from(line[0].wrapping_sub(b'0'));
        assert!(writer < writers, "line {at}: {:?}", String::from_utf8_lossy(line));
        assert_eq!(
            line,
            record(writer, next[writer]),
            "line {at}: {:?}",
            String::from_utf8_lossy(line)
        );
        next[writer] += 1;
    }
    assert_eq!(next, vec![each + 1; writers]);
}

/// Asserts that each mount shows the server's contents, and returns them.
fn assert_seen(site: &Site, mounts: usize) -> Vec<u8> {
    let log = fs::read(site.origin().join("log")).unwrap();
    for mount in 0..mounts {
        site.catch_up(mount);
        assert!(fs::read(site.mount(mount).join("log")).unwrap() == log, "mount {mount}");
    }
    log
}

#[test]
fn records_of_two_mounts_and_a_program_of_the_server_are_whole() {
    const EACH: usize = 3000;
    let writers = if geteuid().is_root() { 3 } else { 2 };
    let site = Site::new(2);
    fs::write(site.origin().join("log"), "").unwrap();
    thread::scope(|scope| {
        for writer in 0..2 {
            let path = site.mount(writer).join("log");
            scope.spawn(move || {
                let mut log = open_to_append(&path);
                (1..=EACH).for_each(|number| log.write_all(&record(writer, number)).unwrap());
            });
        }
        if writers == 3 {
            append_on_server(&site, 2, EACH);
        }
    });
    assert_whole(&assert_seen(&site, 2), writers, EACH);
}

/// It is alone, and has the right to write: no lease keeps programs of the server away.
#[test]
fn records_of_one_mount_and_a_program_of_the_server_are_whole() {
    const EACH: usize = 3000;
    if !geteuid().is_root() {
        return;
    }
    let site = Site::new(1);
    fs::write(site.origin().join("log"), "").unwrap();
    thread::scope(|scope| {
        scope.spawn(|| append_on_server(&site, 1, EACH));
        let mut log = open_to_append(&site.mount(0).join("log"));
        (1..=EACH).for_each(|number| log.write_all(&record(0, number)).unwrap());
    });
    assert_whole(&assert_seen(&site, 1), 2, EACH);
}

/// However the bytes lie in memory.
#[test]
fn what_one_call_appends_is_whole_as_far_as_a_request_carries_it() {
    let site = Site::new(2);
    fs::write(site.origin().join("log"), "x").unwrap();
    const ROUNDS: usize = 8;
    thread::scope(|scope| {
        for writer in 0..2_u8 {
            let path = site.mount(usize::from(writer)).join("log");
            scope.spawn(move || {
                let mut log = open_to_append(&path);
                let data = vec![b'0' + writer; MOST + 1];
                for round in 0..ROUNDS {
                    let parts = [
                        &data[1..=round + 1],
                        &data[round + 2..3 * 4096],
                        &data[3 * 4096..MOST - 3 * 4096],
                    ];
                    let (whole, parts) = (&data[1..], parts.map(IoSlice::new));
                    let (written, wanted) = if round % 2 == 0 {
                        (log.write(whole).unwrap(), whole.len())
                    } else {
                        (
                            log.write_vectored(&parts).unwrap(),
                            parts.iter().map(|part| part.len()).sum(),
                        )
                    };
                    assert_eq!(written, wanted);
                }
            });
        }
    });
    let log = assert_seen(&site, 2);
    let mut runs: Vec<usize> = log.chunk_by(|one, other| one == other).map(<[u8]>::len).collect();
    assert_eq!(runs.remove(0), 1);
    let (long, short) = (MOST, MOST - 3 * 4096 - 1);
    let mut rounds = 0;
    for run in runs {
        // Several of one writer may follow one another.
        let count = (0..=2 * ROUNDS)
            .find_map(|l| (0..=2 * ROUNDS).find(|s| l * long + s * short == run).map(|s| l + s));
        rounds += count.unwrap_or_else(|| panic!("{run} bytes of one writer"));
    }
    assert_eq!(rounds, 2 * ROUNDS);
}

#[test]
fn a_flag_that_is_set_or_taken_later_counts() {
    let site = Site::new(2);
    let path = site.mount(0).join("log");
    for (first, then) in [(OFlag::empty(), OFlag::O_APPEND), (OFlag::O_APPEND, OFlag::empty())] {
        fs::write(site.mount(0).join("log"), "first\n").unwrap();
        let appends = first.contains(OFlag::O_APPEND);
        let mut log =
            OpenOptions::new().append(appends).write(true).read(true).open(&path).unwrap();
        fcntl(&log, FcntlArg::F_SETFL(then)).unwrap();
        open_to_append(&site.mount(1).join("log")).write_all(b"other\n").unwrap();
        log.write_all(b"own\n").unwrap();
        let expected = if appends { "own\nt\nother\n" } else { "first\nother\nown\n" };
        // What is written is on the server before anything is answered about it.
        assert_eq!(log.metadata().unwrap().len(), expected.len() as u64);
        let mut seen = vec![0; 100];
        let length = log.read_at(&mut seen, 0).unwrap();
        assert_eq!(String::from_utf8_lossy(&seen[..length]), expected);
        for top in [site.mount(0), site.mount(1), &site.origin()] {
            assert_eq!(fs::read_to_string(top.join("log")).unwrap(), expected, "{}", top.display());
        }
    }
}

#[test]
fn what_is_read_by_the_file_that_appends_is_what_is_there() {
    let site = Site::new(1);
    let path = site.mount(0).join("log");
    fs::write(&path, record(0, 1)).unwrap();
    let reader = File::open(&path).unwrap();
    let mut log = OpenOptions::new().append(true).read(true).open(&path).unwrap();
    let mut expected = record(0, 1);
    for number in 2..100 {
        log.write_all(&record(0, number)).unwrap();
        expected.extend(record(0, number));
        for file in [&log, &reader] {
            let mut all = vec![0; expected.len() + 1];
            assert_eq!(file.read_at(&mut all, 0).unwrap(), expected.len());
            assert!(all[..expected.len()] == expected, "{number}");
        }
    }
}
