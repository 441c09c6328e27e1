//! Volumes of somebody who is not root, by fusermount3; and how much memory a gateway takes that
//! serves some.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, chown};

use posh_integration::explain::ExplainReport;
use posh_integration::oracle::Under;
use posh_integration::people::{self, Person};
use posh_integration::volumes::{self, Mounts, User};
use posh_integration::{Host, Lab, LabSpec, Script};

use super::{VOLUME, mounted, must, shell};
use crate::programs;

/// What a gateway needs besides its cache in memory.
const RESIDENT_KIB: u64 = 64 << 10;
/// What a volume keeps in memory of contents, at most.
const CACHE_KIB: u64 = 64 << 10;

fn hers(host: &Host, words: &[&str]) -> (bool, String) {
    let output = volumes::output(host, User::Ordinary, words).unwrap();
    (
        output.status.success(),
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned(),
    )
}

/// As the ordinary user, under posh or not.
fn as_her(host: &Host, text: &str, under: Under) -> (String, Option<ExplainReport>) {
    let mut script = Script::new(text).directory(people::HOME);
    script.account = Some(people::HERE);
    script.variables.extend(Person::variables().map(|(name, value)| (name.to_owned(), value)));
    let outcome = script.run(host, under).unwrap();
    (
        String::from_utf8_lossy(&[outcome.stdout, outcome.stderr].concat()).into_owned(),
        outcome.report,
    )
}

#[test]
fn an_ordinary_user_mounts_works_and_unmounts() {
    let lab =
        Lab::start(&LabSpec::servers(1).different().mounts(Mounts::Volume), &programs()).unwrap();
    let host = &lab.workstation;
    let info = shell(host, "cat /proc/self/mountinfo");
    let line = info.lines().find(|line| line.contains(&format!(" {} ", people::MOUNT))).unwrap();
    assert!(line.contains(" - fuse.posh store1:u1 ") && line.contains("nosuid,nodev"), "{line}");
    let text = format!(
        "cd {}; seq 500 > f; sort -r f > g; head -n 1 g; rm f; ls; chmod 600 g",
        people::MOUNT
    );
    let (said, report) = as_her(host, &text, Under::PoshExplained);
    assert_eq!(said, "99\ng\n");
    assert!(report.unwrap().stages("sort").all(|stage| stage.is_offloaded()));
    let there = lab.servers[0].host.path(people::DIRECTORY).join("g");
    assert_eq!(fs::read_to_string(there).unwrap().lines().count(), 500);
    // A default ACL of the server's counts in the place of her umask: user::rwx group::rwx
    // other::r-x (acl(5)).
    let entry = |tag: u8, rights: u8| [tag, 0, rights, 0, 0xff, 0xff, 0xff, 0xff];
    let acl = [vec![2, 0, 0, 0], [entry(1, 7), entry(4, 7), entry(0x20, 5)].concat()].concat();
    let hers_there = lab.servers[0].host.path(people::DIRECTORY);
    let shared = hers_there.join("d");
    fs::create_dir(&shared).unwrap();
    chown(&shared, Some(hers_there.metadata().unwrap().uid()), None).unwrap();
    let name = "system.posix_acl_default";
    rustix::fs::setxattr(&shared, name, &acl, rustix::fs::XattrFlags::empty()).unwrap();
    let text = format!(
        "cd {}/d; umask 077; echo x > a; cp a b; stat -c %a a b; rm -r ../d",
        people::MOUNT
    );
    assert_eq!(as_her(host, &text, Under::Posh).0, "664\n664\n");
    // It is hers alone: not even root looks in.
    assert!(
        shell(host, &format!("cat {}/g 2>&1 || true", people::MOUNT)).contains("Permission denied")
    );
    let (done, said) = hers(host, &["umount", people::MOUNT]);
    assert!(done, "{said}");
    let (done, said) = hers(host, &["mount", "store1:u1", people::MOUNT, "--read-only"]);
    assert!(done, "{said}");
    let (said, _) =
        as_her(host, &format!("wc -l < {0}/g; touch {0}/new", people::MOUNT), Under::Shell);
    assert!(said.starts_with("500\n") && said.contains("Read-only"), "{said}");
    assert!(hers(host, &["umount", people::MOUNT]).0);
}

/// More contents than are kept in memory, and many names.
#[test]
fn memory_is_bounded_however_much_is_read() {
    let lab = mounted();
    let host = &lab.workstation;
    let megabyte: Vec<u8> = (0..1_u32 << 20).map(|byte| (byte % 251) as u8).collect();
    let mut large = fs::File::create(lab.data(1).join("large")).unwrap();
    (0..200).for_each(|_| large.write_all(&megabyte).unwrap());
    for directory in 0..20 {
        let directory = lab.data(1).join(format!("many/{directory}"));
        fs::create_dir_all(&directory).unwrap();
        (0..250)
            .for_each(|file| fs::write(directory.join(format!("file {file}")), "text").unwrap());
    }
    let mut read = fs::File::open(host.path(format!("{VOLUME}/large"))).unwrap();
    let mut piece = vec![0; 1 << 20];
    while read.read(&mut piece).unwrap() > 0 {}
    assert_eq!(shell(host, &format!("find {VOLUME}/many -type f -size -2 | wc -l")), "5000\n");
    let status = must(host, &["status", "--json"]);
    let pid = status
        .lines()
        .find_map(|line| line.trim().strip_prefix("\"pid\": "))
        .unwrap()
        .trim_end_matches(',');
    // Without the program itself, which is large here: it carries what a debugger wants.
    let resident = shell(host, &format!("grep RssAnon /proc/{pid}/status | tr -dc 0-9"));
    let resident: u64 = resident.trim().parse().unwrap();
    println!("{resident} KiB");
    assert!(resident < RESIDENT_KIB + CACHE_KIB, "{resident} KiB");
}
