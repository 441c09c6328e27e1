//! Bad input: the message a user would understand, the status bash would give, and
//! nothing lost. Wherever posh cannot offload, the command runs here.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use posh_integration::explain::ExplainReport;
use posh_integration::host::CONFIG;
use posh_integration::oracle::Under;
use posh_integration::services::write_file;
use posh_integration::{Lab, LabSpec, RunOutcome, Script};

use crate::programs;

const PIPELINE: &str = "cat /mnt/s1/f | grep needle | sort; echo \"${PIPESTATUS[*]}\"";

fn lab(spec: &LabSpec) -> Lab {
    let lab = Lab::start(spec, &programs()).unwrap();
    let lines: String = (0..3_000)
        .map(|i| format!("line {i} {}\n", if i % 50 == 0 { "needle" } else { "hay" }))
        .collect();
    fs::write(lab.data(1).join("f"), lines).unwrap();
    fs::write(lab.data(1).join("records.json"), "{\"a\": 1}\n{\"a\": 2}\n").unwrap();
    lab
}

fn run(lab: &Lab, text: &str, under: Under) -> RunOutcome {
    Script::new(text).run(&lab.workstation, under).unwrap()
}

/// What posh itself says on stderr, apart from the commands' own words.
fn notices(outcome: &RunOutcome) -> Vec<String> {
    let text = String::from_utf8_lossy(&outcome.stderr).into_owned();
    text.lines().filter(|l| l.starts_with("posh: ")).map(str::to_owned).collect()
}

/// posh gives bash's output and status, whatever it has to say besides.
fn assert_runs_here(lab: &Lab, text: &str) -> (RunOutcome, ExplainReport) {
    let bash = run(lab, text, Under::Shell);
    let plain = run(lab, text, Under::Posh);
    let explained = run(lab, text, Under::PoshExplained);
    for posh in [&plain, &explained] {
        assert_eq!((&posh.stdout, posh.status), (&bash.stdout, bash.status), "{text}\n{posh}");
        let own = notices(posh).join("\n");
        let rest: Vec<_> = String::from_utf8_lossy(&posh.stderr)
            .lines()
            .filter(|l| !own.contains(*l))
            .map(str::to_owned)
            .collect();
        assert_eq!(
            rest.join("\n"),
            String::from_utf8_lossy(&bash.stderr).trim_end(),
            "{text}\n{posh}"
        );
    }
    let report = explained.report().clone();
    (plain, report)
}

fn assert_reason(report: &ExplainReport, command: &str, words: &str) {
    let stages: Vec<_> = report.stages(command).collect();
    let right =
        !stages.is_empty() && stages.iter().all(|s| !s.is_offloaded() && s.reason.contains(words));
    assert!(right, "the reason for {command} here should name {words:?}: {stages:?}");
}

#[test]
fn a_command_that_does_not_exist() {
    let lab = lab(&LabSpec::servers(1));
    assert_runs_here(&lab, "cat /mnt/s1/f | no-such-command; echo \"${PIPESTATUS[1]}\"");
    assert_runs_here(&lab, "no-such-command /mnt/s1/f; echo $?");
}

#[test]
fn a_command_that_the_server_lacks() {
    let lab = lab(&LabSpec::servers(1));
    let hidden = lab.servers[0].host.run(|| {
        let none: Option<&str> = None;
        mount(Some("/dev/null"), "/usr/bin/jq", none, MsFlags::MS_BIND, none)
    });
    hidden.unwrap();
    let (_, report) = assert_runs_here(&lab, "cat /mnt/s1/records.json | jq .a | tail -n 1");
    assert_reason(&report, "jq", "store1");
}

#[test]
fn an_executor_that_refuses_connections() {
    let lab = lab(&LabSpec::servers(1).without_executors());
    let (plain, report) = assert_runs_here(&lab, PIPELINE);
    assert_reason(&report, "cat", "store1");
    let said = notices(&plain);
    assert!(said.len() <= 1, "it is said once: {said:?}");
}

#[test]
fn an_executor_at_an_address_of_nobody() {
    let lab = lab(&LabSpec::servers(1));
    let table = lab.mount_table().replace(&lab.servers[0].address, "http://10.77.1.99:7400");
    write_file(&lab.workstation, CONFIG, table.as_bytes()).unwrap();
    let (_, report) = assert_runs_here(&lab, PIPELINE);
    assert_reason(&report, "cat", "store1");
}

#[test]
fn an_export_that_does_not_exist() {
    let lab = lab(&LabSpec::servers(1));
    let table = lab.mount_table().replace("export = \"s1\"", "export = \"elsewhere\"");
    write_file(&lab.workstation, CONFIG, table.as_bytes()).unwrap();
    let (_, report) = assert_runs_here(&lab, PIPELINE);
    assert_reason(&report, "cat", "elsewhere");
}

#[test]
fn no_configuration() {
    let lab = lab(&LabSpec::servers(1));
    fs::remove_file(lab.workstation.path(CONFIG)).unwrap();
    let bash = run(&lab, PIPELINE, Under::Shell);
    // POSH_CONFIG names a file that is not there: that is worth a word, not a failure.
    let posh = run(&lab, PIPELINE, Under::Posh);
    assert_eq!((&posh.stdout, posh.status), (&bash.stdout, bash.status), "{posh}");
    let unset = Script::new(format!(
        "unset POSH_CONFIG; exec {} -c '{}'",
        "/run/posh-bin/posh",
        PIPELINE.replace('\'', "'\\''")
    ));
    let posh = unset.run(&lab.workstation, Under::Shell).unwrap();
    assert_eq!((&posh.stdout, posh.status), (&bash.stdout, bash.status), "{posh}");
}

#[test]
fn a_broken_configuration() {
    let lab = lab(&LabSpec::servers(1));
    let table = lab.mount_table()
        + "[[mount]]\npath = \"relative\"\nexecutor = \"nobody\"\nexprot = \"x\"\n";
    write_file(&lab.workstation, CONFIG, table.as_bytes()).unwrap();
    let bash = run(&lab, PIPELINE, Under::Shell);
    let posh = run(&lab, PIPELINE, Under::Posh);
    assert_eq!((&posh.stdout, posh.status), (&bash.stdout, bash.status), "{posh}");
    let said = String::from_utf8_lossy(&posh.stderr);
    for words in ["mounts.toml", "relative", "nobody", "exprot"] {
        assert!(said.contains(words), "all faults are reported at once, {words:?} is not: {said}");
    }
}

#[test]
fn a_broken_annotation_file() {
    let lab = lab(&LabSpec::servers(1));
    let directory = lab.workstation.path("/home/user/.config/posh/annotations");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("grep.yaml"), "command: grep\nparameters: [\n").unwrap();
    assert_runs_here(&lab, PIPELINE);
    let mut check = lab.workstation.command(Path::new("/run/posh-bin/posh"));
    check.args(["annotations", "check", "/home/user/.config/posh/annotations"]);
    let outcome = posh_integration::oracle::collect(
        &lab.workstation,
        check,
        "posh annotations check",
        posh_integration::oracle::SCRIPT_LIMIT,
    )
    .unwrap();
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&outcome.stdout),
        String::from_utf8_lossy(&outcome.stderr)
    );
    assert!(!outcome.status.success() && said.contains("grep.yaml:3"), "{outcome}");
}

/// The kernel holds a file that a command was let to reach until the command's Landlock domain is
/// freed, some moments after its end (docs/security.md): so long the space of a removed one is not
/// free.
fn write_when_free(path: &Path, content: &[u8]) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while let Err(error) = fs::write(path, content) {
        assert!(Instant::now() < deadline, "the space does not come back: {error}");
        std::thread::yield_now();
    }
}

#[test]
fn a_full_disk_on_the_server() {
    const DISK: u64 = 1 << 20;
    let lab = lab(&LabSpec::servers(1).with_small_export("full", DISK));
    fs::write(lab.data(1).join("large"), vec![b'x'; 2 * usize::try_from(DISK).unwrap()]).unwrap();
    let posh =
        run(&lab, "cat /mnt/s1/large > /mnt/full/out; echo $?; rm /mnt/full/out", Under::Posh);
    assert_eq!(String::from_utf8_lossy(&posh.stdout), "1\n", "{posh}");
    assert!(String::from_utf8_lossy(&posh.stderr).starts_with("cat: "), "{posh}");
    // Both ends of the copy in one export: then cat itself runs on the full disk.
    write_when_free(&lab.servers[0].host.path("/srv/full/half"), &vec![b'x'; 600 << 10]);
    // With an assignment before it is not begun before it comes: what does not come to its file
    // then is written here once more, by way of the mount.
    let posh = run(
        &lab,
        "X=; cat /mnt/full/half /mnt/full/half > /mnt/full/again; echo $?",
        Under::PoshExplained,
    );
    assert_eq!(String::from_utf8_lossy(&posh.stdout), "1\n", "{posh}");
    assert!(String::from_utf8_lossy(&posh.stderr).contains("No space left on device"), "{posh}");
    assert!(
        posh.report().stages("cat").all(posh_integration::explain::ExplainedStage::is_offloaded),
        "{:?}",
        posh.report()
    );
    let posh =
        run(&lab, "cat /mnt/full/half /mnt/full/half > /mnt/full/again; echo $?", Under::Posh);
    assert_eq!(String::from_utf8_lossy(&posh.stdout), "1\n", "{posh}");
    assert!(String::from_utf8_lossy(&posh.stderr).starts_with("cat: "), "{posh}");
    assert_eq!(fs::metadata(lab.servers[0].host.path("/srv/full/half")).unwrap().len(), 600 << 10);
}

/// A parser of scripts (brush-parser 0.4, which `posh explain` uses) takes minutes for the first,
/// and panics at the second: the shell's text is the shell's alone.
#[test]
fn a_script_that_posh_can_not_read() {
    let lab = lab(&LabSpec::servers(1));
    for text in [
        format!("cat /mnt/s1/{}*; {PIPELINE}", "{".repeat(40)),
        format!("{PIPELINE}; \"\"<<END&${{t}}${{\nEND\n"),
    ] {
        let (ours, bash) = (run(&lab, &text, Under::Posh), run(&lab, &text, Under::Shell));
        assert_eq!((&ours.stdout, ours.status), (&bash.stdout, bash.status), "{text}\n{ours}");
        let (own, said) = (notices(&ours), String::from_utf8_lossy(&bash.stderr).into_owned());
        assert!(String::from_utf8_lossy(&ours.stderr).ends_with(&said), "{text}\n{ours}");
        assert!(own.iter().all(|notice| notice.contains("a fault of posh")), "{own:?}");
    }
}
