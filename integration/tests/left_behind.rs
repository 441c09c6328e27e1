//! Jobs that a shell leaves behind: their commands run as under the shell alone,
//! though the session that they came from has lost its shell.

use std::fs;

use posh_integration::oracle::{Door, Under};
use posh_integration::{Lab, LabSpec, Script};

use crate::programs;

/// A shell knows by heart where it has found a command, so a job must find it there
/// after its shell has ended.
#[test]
fn a_job_that_outlives_its_shell() {
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    fs::write(lab.data(1).join("a"), "one\ntwo\n").unwrap();
    for door in Door::ALL {
        let text = r#"rm -f ~/go ~/said; mkfifo ~/go ~/said; wc -l /mnt/s1/a
            { { read -r x; wc -l /mnt/s1/a; } < ~/go > ~/said 2>&1; } > /dev/null 2>&1 &"#;
        let outcome = Script::new(text).door(door).run(&lab.workstation, Under::Posh).unwrap();
        assert_eq!(String::from_utf8_lossy(&outcome.stdout), "2 /mnt/s1/a\n", "{outcome}");
        fs::write(lab.workstation.path("/home/user/go"), "go\n").unwrap();
        assert_eq!(
            fs::read_to_string(lab.workstation.path("/home/user/said")).unwrap(),
            "2 /mnt/s1/a\n"
        );
    }
}
