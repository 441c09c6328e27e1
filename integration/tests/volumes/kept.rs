//! Closed files in new directories: an executor's death, and files that can't be delivered.

use std::fs;
use std::time::Instant;

use posh_integration::network::{LinkState, set_link};

use super::{PATIENCE, VOLUME, mounted, must, posh, shell};

#[test]
fn what_was_closed_survives_the_death_of_the_executor() {
    const FILES: usize = 200;
    let mut lab = mounted();
    let host = &lab.workstation;
    shell(host, &format!("mkdir {VOLUME}/new"));
    // So that all of them are still to be sent.
    set_link(host, 1, LinkState::Down).unwrap();
    shell(host, &format!("cd {VOLUME}/new; for i in $(seq {FILES}); do echo $i > $i; done"));
    let new = lab.data(1).join("new");
    assert_eq!(fs::read_dir(&new).unwrap().count(), 0, "they were sent before");
    // By SIGKILL.
    drop(lab.servers[0].executor.take().unwrap());
    lab.servers[0].start_executor().unwrap();
    let host = &lab.workstation;
    set_link(host, 1, LinkState::Up).unwrap();

    let began = Instant::now();
    while fs::read_dir(&new).unwrap().count() < FILES {
        assert!(began.elapsed() < 2 * PATIENCE, "{}", must(host, &["volumes"]));
    }
    for file in 1..=FILES {
        assert_eq!(fs::read_to_string(new.join(file.to_string())).unwrap(), format!("{file}\n"));
    }
    assert_eq!(shell(host, &format!("cat {VOLUME}/new/* | wc -l")), format!("{FILES}\n"));
    must(host, &["umount", VOLUME]);
}

/// A program of the server removes a directory while files of it are on their way.
#[test]
fn what_can_not_be_delivered_is_shown_and_recovered() {
    let lab = mounted();
    let host = &lab.workstation;
    shell(host, &format!("mkdir -p {VOLUME}/new"));
    set_link(host, 1, LinkState::Down).unwrap();
    shell(
        host,
        &format!(
            "cd {VOLUME}/new; echo text > file; mkdir inner; echo more > inner/other; ln -s file link"
        ),
    );
    fs::remove_dir(lab.data(1).join("new")).unwrap();
    set_link(host, 1, LinkState::Up).unwrap();
    let began = Instant::now();
    while !must(host, &["volumes"]).contains("new and 4 more could not be made") {
        assert!(began.elapsed() < 2 * PATIENCE, "{}", must(host, &["volumes"]));
    }
    assert_eq!(
        shell(host, &format!("cd {VOLUME}/new; cat file inner/other; readlink link")),
        "text\nmore\nfile\n"
    );

    let into_volume = posh(host, &["volumes", "recover", VOLUME, &format!("{VOLUME}/safe")]);
    let said = String::from_utf8_lossy(&into_volume.stderr).into_owned();
    assert!(!into_volume.status.success() && said.contains(VOLUME), "{said}");
    let said = must(host, &["volumes", "recover", VOLUME, "/tmp/safe"]);
    assert!(said.contains("files are in /tmp/safe"), "{said}");
    let tree =
        shell(host, "cd /tmp/safe; find . | sort; cat new/file new/inner/other; readlink new/link");
    assert_eq!(
        tree,
        ".\n./new\n./new/file\n./new/inner\n./new/inner/other\n./new/link\ntext\nmore\nfile\n"
    );
    assert_eq!(shell(host, &format!("ls {VOLUME}")), "");
    assert!(!must(host, &["volumes"]).contains("could not be made"));
    must(host, &["umount", VOLUME]);
}
