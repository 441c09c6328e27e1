//! Leases that end by time, while nobody can be asked.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use tokio::sync::watch;

use crate::{silent::Silent, site::Site};

const LENGTH: usize = 4 << 20;

/// Where a read waits for the server.
const IN_FLIGHT: u64 = 2 << 20;

/// As long as it takes to read the files.
const LEASE: Duration = Duration::from_secs(2);

/// For what is to happen soon, and what is not to happen.
const SOON: Duration = Duration::from_secs(10);
const NOT_YET: Duration = Duration::from_millis(300);

fn byte(file: &File, at: u64) -> u8 {
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    byte[0]
}

/// The store does not tell of changes of this process: nothing but the end of the leases has the
/// kernel forget.
#[test]
fn what_is_held_open_is_not_old_when_the_leases_have_ended() {
    let (silence, is_silent) = watch::channel(false);
    let until = Instant::now() + LEASE;
    let site = Site::over(1, |inner| {
        Arc::new(Silent { inner, is_silent: is_silent.clone(), until: Some(until) })
    });
    let names = ["read", "being-read"];
    names.iter().for_each(|name| fs::write(site.origin().join(name), vec![b'o'; LENGTH]).unwrap());
    let open = |name: &str| {
        let file = File::open(site.mount(0).join(name)).unwrap();
        // Without pages that nobody has asked for.
        nix::fcntl::posix_fadvise(&file, 0, 0, nix::fcntl::PosixFadviseAdvice::POSIX_FADV_RANDOM)
            .unwrap();
        assert_eq!((byte(&file, 0), byte(&file, LENGTH as u64 - 1)), (b'o', b'o'));
        file
    };
    let [read, being_read] = names.map(open);
    silence.send_replace(true);
    let in_flight = being_read.try_clone().unwrap();
    let waiting = thread::spawn(move || byte(&in_flight, IN_FLIGHT));
    thread::sleep(until.saturating_duration_since(Instant::now()) + Duration::from_secs(1));
    names.iter().for_each(|name| fs::write(site.origin().join(name), vec![b'n'; LENGTH]).unwrap());
    let (sender, seen) = mpsc::channel();
    let looks: Vec<Box<dyn FnOnce() -> u8 + Send>> = vec![
        Box::new(move || byte(&read, 0)),
        Box::new({
            let file = being_read.try_clone().unwrap();
            move || byte(&file, 0)
        }),
        Box::new(move || byte(&being_read, LENGTH as u64 - 1)),
    ];
    let count = looks.len();
    for look in looks {
        let sender = sender.clone();
        thread::spawn(move || sender.send(look()));
    }
    assert_eq!(seen.recv_timeout(NOT_YET), Err(mpsc::RecvTimeoutError::Timeout));
    silence.send_replace(false);
    for _ in 0..count {
        assert_eq!(seen.recv_timeout(SOON), Ok(b'n'));
    }
    waiting.join().unwrap();
}
