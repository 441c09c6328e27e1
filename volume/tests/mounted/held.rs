//! Open files, and file systems mounted inside of a volume, survive changes of their names.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader},
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    process::{Command, Stdio},
};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::site::Site;

/// By another process: the store hears of it as of any other program's changes.
fn elsewhere(site: &Site, script: &str) {
    let status =
        Command::new("sh").args(["-euc", script]).current_dir(site.origin()).status().unwrap();
    assert!(status.success(), "{script}");
    site.catch_up(0);
}

fn content(file: &File) -> String {
    let mut text = vec![0; 1000];
    let length = file.read_at(&mut text, 0).unwrap();
    text.truncate(length);
    String::from_utf8(text).unwrap()
}

/// All names with their attributes, as `ls -l` has them.
fn listed(top: &Path) -> usize {
    let all: Vec<fs::Metadata> =
        fs::read_dir(top).unwrap().map(|entry| entry.unwrap().metadata().unwrap()).collect();
    all.len()
}

/// The listing after the change names the file when its attributes are not known any more.
#[test]
fn a_file_that_is_open_can_be_read_on_when_it_has_been_changed_and_listed() {
    let site = Site::new(1);
    elsewhere(&site, "printf 'first\\n' > f; : > g");
    let _ = listed(site.mount(0));
    let file = File::open(site.mount(0).join("f")).unwrap();
    assert_eq!(content(&file), "first\n");
    for script in ["printf 'second\\n' >> f", "printf 'third\\n' > f; : > h", "chmod 600 f; rm g h"]
    {
        elsewhere(&site, script);
        let _ = listed(site.mount(0));
        let real = fs::metadata(site.origin().join("f")).unwrap();
        assert_eq!(
            content(&file),
            fs::read_to_string(site.origin().join("f")).unwrap(),
            "{script}"
        );
        assert_eq!(
            (file.metadata().unwrap().size(), file.metadata().unwrap().mode()),
            (real.size(), real.mode())
        );
    }
}

/// As in a plain directory: `cd ..` asks for the attributes of the working directory.
#[test]
fn a_working_directory_that_was_removed_can_be_left() {
    let site = Site::new(1);
    elsewhere(&site, "mkdir -p d/e; : > d/f; : > other");
    let mut shell = Command::new("bash")
        .args(["-c", "ls; read -r; cd .. && ls"])
        .current_dir(site.mount(0).join("d"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(shell.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(said.next().as_deref(), Some("e"));
    assert_eq!(said.next().as_deref(), Some("f"));
    elsewhere(&site, "rm -r d");
    drop(shell.stdin.take());
    assert_eq!(said.collect::<Vec<_>>(), ["other"]);
    assert!(shell.wait().unwrap().success());
}

#[test]
fn a_file_that_was_opened_from_memory_is_there_when_its_name_is_gone() {
    let site = Site::new(1);
    let path = site.mount(0).join("f");
    for go in [
        |path: &Path| fs::remove_file(path),
        |path: &Path| fs::rename(path.with_extension("new"), path),
    ] {
        elsewhere(&site, "printf first > f; printf other > f.new");
        // Read once, it needs no server to be opened again.
        assert_eq!(fs::read(&path).unwrap(), b"first");
        let file = File::open(&path).unwrap();
        go(&path).unwrap();
        assert_eq!((content(&file), file.metadata().unwrap().nlink()), ("first".to_owned(), 0));
    }
}

#[test]
fn what_is_mounted_inside_stays_while_names_beside_it_change() {
    let site = Site::new(1);
    let inner = site.mount(0).join("d/inner");
    fs::create_dir_all(&inner).unwrap();
    let tmpfs = Some("tmpfs");
    mount(tmpfs, &inner, tmpfs, MsFlags::empty(), None::<&str>).unwrap();
    let unmounted = Unmounted(&inner);
    fs::write(inner.join("own"), b"own").unwrap();
    for script in ["mkdir x; : > d/y", "rm -r x d/y; mkdir d/z", ": > d/inner/below"] {
        elsewhere(&site, script);
        assert_eq!(listed(&inner), 1, "{script}");
        assert_eq!(
            listed(&site.mount(0).join("d")),
            fs::read_dir(site.origin().join("d")).unwrap().count()
        );
        assert_eq!(fs::read(inner.join("own")).unwrap(), b"own", "{script}");
    }
    drop(unmounted);
    assert!(inner.join("below").exists());
}

/// Ends with the test, however that ends.
struct Unmounted<'a>(&'a Path);

impl Drop for Unmounted<'_> {
    fn drop(&mut self) {
        let _ = umount2(self.0, MntFlags::MNT_DETACH);
    }
}
