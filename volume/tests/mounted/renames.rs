//! renameat2(2) says on a volume what it says on a plain directory, and does what it does there:
//! for every pair of what is moved and what is in the way, in directories that were just made and
//! in those that the server had before.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, RenameFlags, renameat_with},
    io::Errno,
};

use crate::site::Site;

const MOVED: [&str; 7] = ["file", "empty", "full", "link", "missing", "full/in", "file/under"];

const OVER: [&str; 14] = [
    "file",
    "other",
    "empty",
    "void",
    "full",
    "stuffed",
    "link",
    "absent",
    "nowhere/absent",
    "file/under",
    "full/in",
    "full/deep/absent",
    ".",
    "full/deep/..",
];

const FLAGS: [RenameFlags; 4] = [
    RenameFlags::empty(),
    RenameFlags::NOREPLACE,
    RenameFlags::EXCHANGE,
    RenameFlags::NOREPLACE.union(RenameFlags::EXCHANGE),
];

/// How the server comes to have a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Made {
    /// By another program.
    There,
    /// Through the volume, just now: it is not sent yet.
    Now,
}

/// A directory with one of each.
fn make(top: &Path) {
    for name in ["", "empty", "void", "full", "full/deep", "stuffed"] {
        fs::create_dir(top.join(name)).unwrap();
    }
    for name in ["file", "other", "full/in", "stuffed/in"] {
        fs::write(top.join(name), name).unwrap();
    }
    symlink("file", top.join("link")).unwrap();
}

/// All that is below.
fn tree(top: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut left = vec![PathBuf::new()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(top.join(&directory)).unwrap() {
            let name = directory.join(entry.unwrap().file_name());
            let (kind, path) =
                (fs::symlink_metadata(top.join(&name)).unwrap().file_type(), top.join(&name));
            let what = match () {
                () if kind.is_dir() => "directory".to_owned(),
                () if kind.is_symlink() => format!("link to {:?}", fs::read_link(path).unwrap()),
                () => format!("file with {:?}", fs::read_to_string(path).unwrap()),
            };
            found.push(format!("{}: {what}", name.display()));
            if kind.is_dir() {
                left.push(name);
            }
        }
    }
    found.sort();
    found
}

/// All calls of the table, each with two directories of its own, made as said. `to` is `None`: they
/// are one.
fn compare(from: Made, to: Option<Made>) {
    let site = Site::new(1);
    let (plain, mount, origin) = (site.plain(), site.mount(0).to_owned(), site.origin());
    let both = [("from", Some(from)), ("to", to)];
    let make_those = |made: Made, top: &Path| {
        let those = both.iter().filter(|(_, its)| *its == Some(made));
        those.for_each(|(name, _)| make(&top.join(name)));
    };
    // Before the volume has looked at any: what this process does there is taken for the volume's
    // own doing.
    let at = |place: &Path, number: usize| place.join(number.to_string());
    for number in 0..table().count() {
        fs::create_dir(at(&plain, number)).unwrap();
        [Made::There, Made::Now].into_iter().for_each(|made| make_those(made, &at(&plain, number)));
        if from == Made::There {
            fs::create_dir(at(&origin, number)).unwrap();
            make_those(Made::There, &at(&origin, number));
        }
    }
    let other = if to.is_some() { "to" } else { "from" };
    let mut said = Vec::new();
    for (number, (moved, over, flags)) in table().enumerate() {
        if from == Made::Now {
            fs::create_dir(at(&mount, number)).unwrap();
        }
        make_those(Made::Now, &at(&mount, number));
        let call = |place: &Path| {
            let top = at(place, number);
            renameat_with(CWD, top.join("from").join(moved), CWD, top.join(other).join(over), flags)
        };
        let what =
            format!("{moved} of a directory made {from:?} to {over} of one made {to:?}, {flags:?}");
        assert_eq!(call(&mount), call(&plain), "{what}");
        assert_eq!(tree(&at(&mount, number)), tree(&at(&plain, number)), "{what}");
        said.push(what);
    }
    site.settle(0);
    for (number, what) in said.into_iter().enumerate() {
        assert_eq!(tree(&at(&origin, number)), tree(&at(&plain, number)), "on the server: {what}");
    }
}

fn table() -> impl Iterator<Item = (&'static str, &'static str, RenameFlags)> {
    let pairs = MOVED.into_iter().flat_map(|moved| OVER.into_iter().map(move |over| (moved, over)));
    pairs.flat_map(|(moved, over)| FLAGS.into_iter().map(move |flags| (moved, over, flags)))
}

#[test]
fn renames_in_a_directory_of_the_server_are_as_on_a_plain_directory() {
    compare(Made::There, None);
}

#[test]
fn renames_in_a_new_directory_are_as_on_a_plain_directory() {
    compare(Made::Now, None);
}

#[test]
fn renames_into_a_new_directory_are_as_on_a_plain_directory() {
    compare(Made::There, Some(Made::Now));
}

#[test]
fn renames_among_new_directories_are_as_on_a_plain_directory() {
    compare(Made::Now, Some(Made::Now));
}

#[test]
fn nothing_is_renamed_from_one_volume_to_another() {
    let site = Site::new(2);
    let at = |mount: usize, name: &str| site.mount(mount).join(name);
    for name in ["file", "directory/file"] {
        fs::create_dir_all(at(0, name).parent().unwrap()).unwrap();
        fs::write(at(0, name), name).unwrap();
    }
    for name in ["file", "directory", "directory/file"] {
        let moved = renameat_with(CWD, at(0, name), CWD, at(1, "absent"), RenameFlags::empty());
        assert_eq!(moved, Err(Errno::XDEV), "{name}");
    }
}

/// Each directory is gone into from the one above: the whole path is longer than any that a call
/// takes.
#[test]
fn directories_nest_beyond_the_longest_path() {
    const DEPTH: usize = 30;
    let (site, name) = (Site::new(1), "d".repeat(200));
    fs::create_dir(site.origin().join("there")).unwrap();
    for top in ["there", "now"] {
        let path = site.mount(0).join(top);
        let _ = fs::create_dir(&path);
        let steps = format!(
            "cd -P {top} && for i in $(seq {DEPTH}); do mkdir {name} && cd -P {name} || exit 1; done; echo text > bottom
             cat bottom; mv bottom moved && stat -c %s moved"
        );
        assert_eq!(run(site.mount(0), &steps), "text\n5\n", "{top}");
        site.settle(0);
        let walk = format!(
            "cd -P {top} && for i in $(seq {DEPTH}); do cd -P {name} || exit 1; done; cat moved"
        );
        assert_eq!(run(&site.origin(), &walk), "text\n", "{top}");
        assert_eq!(
            run(site.mount(0), &format!("rm -r {top} && ls {top} 2>&1 | grep -c 'No such'")),
            "1\n"
        );
    }
}

/// One path of 4,000 bytes, and the longest names.
#[test]
fn paths_and_names_are_as_long_as_on_a_plain_directory() {
    let site = Site::new(1);
    let plain = site.plain();
    let deep: PathBuf = std::iter::repeat_n("d".repeat(199), 19).collect();
    assert_eq!(deep.as_os_str().len(), 3799);
    for place in [site.mount(0), &plain] {
        fs::create_dir_all(place.join(&deep)).unwrap();
        let rest = 4000 - place.join(&deep).as_os_str().len() - 1;
        let file = place.join(&deep).join("f".repeat(rest));
        assert_eq!(file.as_os_str().len(), 4000);
        fs::write(&file, "text").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "text");
        let of = |length: usize| "n".repeat(length);
        fs::write(place.join(of(255)), "text").unwrap();
        fs::rename(place.join(of(255)), place.join("m".repeat(255))).unwrap();
        let too_long = [
            fs::write(place.join(of(256)), "text"),
            fs::create_dir(place.join(of(256))),
            fs::rename(place.join("m".repeat(255)), place.join(of(256))),
            fs::metadata(place.join(of(256))).map(drop),
            symlink("target", place.join(of(256))),
        ];
        let errors = too_long.map(|outcome| outcome.unwrap_err().raw_os_error());
        assert_eq!(errors, [Some(nix::libc::ENAMETOOLONG); 5], "{}", place.display());
    }
}

/// Runs a script in a directory; returns its output.
fn run(directory: &Path, text: &str) -> String {
    let output = std::process::Command::new("bash")
        .args(["-c", text])
        .current_dir(directory)
        .output()
        .unwrap();
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}
