//! Files beyond those that a volume holds: their leases go back, the kernel lets go of them, and
//! what it shows of them afterwards is what is there.

use std::{
    fs::{self, File},
    io::Read as _,
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    path::Path,
    time::{Duration, Instant},
};

use crate::site::{FILES, Site};

/// For what is to happen soon.
const PATIENCE: Duration = Duration::from_secs(10);

const DIRECTORIES: u64 = 12;

/// In each directory.
const NAMES: u64 = 25;

fn path(top: &Path, directory: u64, name: u64) -> std::path::PathBuf {
    top.join(format!("d{directory}/f{name}"))
}

/// As `find -size` does: names first, then each file. All sizes, in the order of the names.
fn sizes(top: &Path) -> Vec<(String, u64)> {
    let mut sizes = Vec::new();
    for directory in 0..DIRECTORIES {
        let names: Vec<_> =
            fs::read_dir(top.join(format!("d{directory}"))).unwrap().map(Result::unwrap).collect();
        let look = |name: fs::DirEntry| {
            (format!("{directory} {:?}", name.file_name()), name.metadata().unwrap().size())
        };
        sizes.extend(names.into_iter().map(look));
    }
    sizes.sort();
    sizes
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_was_given_back_is_looked_at_again() {
    let site = Site::new(2);
    for directory in 0..DIRECTORIES {
        fs::create_dir(site.origin().join(format!("d{directory}"))).unwrap();
        (0..NAMES).for_each(|name| fs::write(path(&site.origin(), directory, name), "x").unwrap());
    }
    // Whoever uses a file or a directory goes on with it.
    let mut open = File::open(path(site.mount(0), 0, 3)).unwrap();
    let inside = File::open(site.mount(0).join("d0")).unwrap();
    for round in 0..4 {
        assert_eq!(sizes(site.mount(0)), sizes(&site.origin()), "{round}");
        until("leases go back", || site.state(0).leases <= 2 * FILES as u64);
        for directory in 0..DIRECTORIES {
            let changed = round * 7 + directory;
            let name = |number: u64| (changed + number) % NAMES;
            // By a program of the server, and by another machine's.
            fs::write(path(&site.origin(), directory, name(0)), vec![b'y'; changed as usize])
                .unwrap();
            fs::write(path(site.mount(1), directory, name(1)), vec![b'z'; changed as usize + 1])
                .unwrap();
            fs::rename(
                path(&site.origin(), directory, name(2)),
                site.origin().join(format!("d{directory}/n{round}")),
            )
            .unwrap();
            fs::write(path(&site.origin(), directory, name(2)), "new").unwrap();
        }
        site.catch_up(0);
    }
    assert_eq!(sizes(site.mount(0)), sizes(&site.origin()));
    assert_eq!(sizes(site.mount(1)), sizes(&site.origin()));
    let link = format!("/proc/self/fd/{}", inside.as_raw_fd());
    assert_eq!(fs::read_link(link).unwrap(), site.mount(0).join("d0"));
    let mut contents = String::new();
    open.read_to_string(&mut contents).unwrap();
    assert_eq!(contents, fs::read_to_string(path(&site.origin(), 0, 3)).unwrap());
}
