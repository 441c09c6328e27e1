//! Locks of two mounts and of the server, of fcntl(2) and of flock(2).

use std::{fs::File, path::Path};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, Flock, FlockArg, fcntl},
    libc,
};

use crate::site::Site;

fn range(kind: i32, from: i64, length: i64) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: from,
        l_len: length,
        l_pid: 0,
    }
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

#[test]
fn ranges_exclude_each_other_among_mounts_and_programs_of_the_server() {
    let site = Site::new(2);
    std::fs::write(site.origin().join("f"), b"0123456789").unwrap();
    let [one, other] = [0, 1].map(|number| open(&site.mount(number).join("f")));
    let here = open(&site.origin().join("f"));
    let take = |file: &File, kind, from, length| {
        fcntl(file, FcntlArg::F_SETLK(&range(kind, from, length)))
    };
    let there =
        |kind, from, length| fcntl(&here, FcntlArg::F_OFD_SETLK(&range(kind, from, length)));
    take(&one, libc::F_WRLCK, 0, 10).unwrap();
    assert_eq!(take(&other, libc::F_RDLCK, 5, 10), Err(Errno::EAGAIN));
    assert_eq!(there(libc::F_RDLCK, 9, 1), Err(Errno::EAGAIN));
    take(&other, libc::F_WRLCK, 10, 10).unwrap();
    let mut asked = range(libc::F_WRLCK, 0, 0);
    fcntl(&other, FcntlArg::F_GETLK(&mut asked)).unwrap();
    assert_eq!((i32::from(asked.l_type), asked.l_start, asked.l_len), (libc::F_WRLCK, 0, 10));
    // In parts, and for reading together.
    take(&one, libc::F_UNLCK, 0, 5).unwrap();
    there(libc::F_RDLCK, 0, 5).unwrap();
    take(&other, libc::F_RDLCK, 0, 5).unwrap();
    assert_eq!(take(&one, libc::F_WRLCK, 0, 5), Err(Errno::EAGAIN));
    // Who waits gets it when the file is closed, by whichever descriptor of the process.
    let waiting = std::thread::spawn(move || {
        fcntl(&other, FcntlArg::F_SETLKW(&range(libc::F_WRLCK, 5, 5))).is_ok()
    });
    drop(open(&site.mount(0).join("f")));
    assert!(waiting.join().unwrap());
}

/// As `flock FILE COMMAND` and many scripts do.
#[test]
fn a_file_that_is_open_for_reading_can_be_locked_against_all() {
    let site = Site::new(2);
    std::fs::write(site.origin().join("f"), b"").unwrap();
    let open = |number: usize| File::open(site.mount(number).join("f")).unwrap();
    let held = Flock::lock(open(0), FlockArg::LockExclusiveNonblock).unwrap();
    let (file, refused) = Flock::lock(open(1), FlockArg::LockSharedNonblock).unwrap_err();
    assert_eq!(refused, Errno::EWOULDBLOCK);
    held.unlock().unwrap();
    let one = Flock::lock(file, FlockArg::LockSharedNonblock).unwrap();
    let other = Flock::lock(open(0), FlockArg::LockSharedNonblock).unwrap();
    let (_, refused) = Flock::lock(open(0), FlockArg::LockExclusiveNonblock).unwrap_err();
    assert_eq!(refused, Errno::EWOULDBLOCK);
    // A lock of fcntl(2) for writing still needs a descriptor for writing.
    let reading = range(libc::F_WRLCK, 0, 1);
    assert_eq!(fcntl(&*one, FcntlArg::F_SETLK(&reading)), Err(Errno::EBADF));
    drop(other);
}

/// The kernel does not say that locks of an open file go.
#[test]
fn locks_of_an_open_file_go_with_it_and_those_of_a_process_stay() {
    let site = Site::new(2);
    std::fs::write(site.origin().join("f"), b"").unwrap();
    let path = |number: usize| site.mount(number).join("f");
    for _ in 0..3 {
        let one = open(&path(0));
        // The last close, of the turn before too, is told to the file system afterwards.
        fcntl(&one, FcntlArg::F_OFD_SETLKW(&range(libc::F_WRLCK, 0, 10))).unwrap();
        let again = one.try_clone().unwrap();
        drop(one);
        assert_eq!(
            fcntl(open(&path(1)), FcntlArg::F_OFD_SETLK(&range(libc::F_RDLCK, 0, 1))),
            Err(Errno::EAGAIN)
        );
        drop(again);
        let other = open(&path(1));
        assert_eq!(fcntl(&other, FcntlArg::F_OFD_SETLKW(&range(libc::F_WRLCK, 0, 10))), Ok(0));
    }
    // A process that closes one file, takes the lock by another and has the first one released.
    let (first, second) = (open(&path(0)), open(&path(0)));
    fcntl(&first, FcntlArg::F_SETLKW(&range(libc::F_WRLCK, 0, 10))).unwrap();
    drop(first);
    fcntl(&second, FcntlArg::F_SETLK(&range(libc::F_WRLCK, 0, 10))).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert_eq!(
        fcntl(open(&path(1)), FcntlArg::F_SETLK(&range(libc::F_WRLCK, 0, 10))),
        Err(Errno::EAGAIN)
    );
}
