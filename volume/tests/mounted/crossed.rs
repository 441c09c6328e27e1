//! Two mounts that read and change one file at the same time. What one has to forget for the
//! other's changes does not wait for what waits for its own.

use std::{
    fs::{self, File, OpenOptions},
    io::Write as _,
    os::unix::fs::FileExt as _,
    thread,
    time::{Duration, Instant},
};

use crate::site::Site;

/// For so long a recall waits for the kernel at most (`fs/recalled.rs`). Who waits for half of that
/// waits for what does not come.
const STALLED: Duration = Duration::from_millis(2500);

/// Threads of each mount: one reads while the other's changes are on their way.
const THREADS: u64 = 2;

const ROUNDS: u64 = 150;

/// Bytes of the file at first. Each thread has a page's worth of each page for its own.
const SIZE: u64 = 64 << 10;

type Step = fn(&File, u64, u64);

fn append(mut file: &File, thread: u64, _: u64) {
    file.write_all(&[b'a' + u8::try_from(thread).unwrap(); 144]).unwrap();
}

/// Crosses the borders of pages, and is there when it is read.
fn change(file: &File, thread: u64, round: u64) {
    let data = [u8::try_from(round).unwrap(); 100];
    let place = (round * 7 % 16) * 4096 + 4000 + thread * 100;
    file.write_all_at(&data, place.min(SIZE - 100 * (thread + 1))).unwrap();
    let mut there = [0; 100];
    file.read_exact_at(&mut there, place.min(SIZE - 100 * (thread + 1))).unwrap();
    assert_eq!(there, data, "{thread} {round}");
}

fn cut(file: &File, thread: u64, round: u64) {
    change(file, thread, round);
    if round % 5 == thread {
        file.set_len(SIZE + round * 100).unwrap();
    }
}

fn cross(name: &str, appends: bool, step: Step) {
    let site = Site::new(2);
    fs::write(site.origin().join(name), vec![0; usize::try_from(SIZE).unwrap()]).unwrap();
    thread::scope(|scope| {
        for number in 0..2 * THREADS {
            let path = site.mount(usize::try_from(number % 2).unwrap()).join(name);
            scope.spawn(move || {
                let file =
                    OpenOptions::new().append(appends).write(true).read(true).open(&path).unwrap();
                for round in 0..ROUNDS {
                    let began = Instant::now();
                    step(&file, number, round);
                    assert!(fs::read(&path).unwrap().len() as u64 >= SIZE);
                    let took = began.elapsed();
                    assert!(took < STALLED, "{name} {number} {round}: {took:?}");
                }
            });
        }
    });
    for mount in 0..2 {
        let (seen, there) =
            (fs::read(site.mount(mount).join(name)), fs::read(site.origin().join(name)));
        assert!(seen.unwrap() == there.unwrap(), "{name} {mount}");
    }
}

#[test]
fn who_appends_and_reads_beside_another_does_not_wait_for_what_waits_for_it() {
    cross("appended", true, append);
}

#[test]
fn who_writes_and_reads_beside_another_does_not_wait_for_what_waits_for_it() {
    cross("written", false, change);
}

#[test]
fn who_changes_the_length_and_reads_beside_another_does_not_wait_for_what_waits_for_it() {
    cross("cut", false, cut);
}

/// Pages that the kernel has from a write, too, are remembered only as long as the lease holds.
#[test]
fn what_one_has_written_over_is_seen_through_a_file_that_the_other_holds_open() {
    let site = Site::new(2);
    let origin = site.origin().join("f");
    fs::write(&origin, vec![b'0'; 8192]).unwrap();
    let open = |mount: usize| {
        OpenOptions::new().write(true).read(true).open(site.mount(mount).join("f")).unwrap()
    };
    let files = [open(0), open(1)];
    for round in 0..20_u8 {
        // The first change takes from the other what it had read; what that writes over then is
        // remembered by no lease.
        for (step, number) in [1, 0, 1, 0, 1, 0].into_iter().enumerate() {
            let own = vec![b'a' + round + u8::try_from(step % 3).unwrap(); 4096];
            files[number].write_all_at(&own, 4096 * u64::from(round % 2)).unwrap();
            // Is on the server then.
            files[number].sync_data().unwrap();
            if step % 3 < 2 {
                continue;
            }
            for (other, file) in files.iter().enumerate() {
                let mut seen = vec![0; 8192];
                file.read_exact_at(&mut seen, 0).unwrap();
                assert!(
                    seen == fs::read(&origin).unwrap(),
                    "round {round}: written by {number}, seen by {other}"
                );
            }
        }
    }
}
