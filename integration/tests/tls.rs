//! Standing executors with certificates, as an administrator and a user set them up: the
//! same answers as bash's, placed there; and every way of not being let in ends in the
//! same answers too, with a word why.

use std::fs;

use posh_integration::host::{CONFIG, PROGRAMS};
use posh_integration::oracle::{SCRIPT_LIMIT, Under, assert_same, collect};
use posh_integration::services::{self, EXECUTOR_PORT, Service, read_file, write_file};
use posh_integration::{Host, Lab, LabSpec, RunOutcome, Script, network};

use crate::programs;

const DIRECTORY: &str = "/run/posh-tls";
const EXECUTOR_CONFIG: &str = "/run/executor.toml";
const AUDIT: &str = "/run/audit.jsonl";

/// A server with a certificate, whose configuration ends with `identities`.
struct Standing {
    executor: Service,
    lab: Lab,
}

impl Standing {
    fn start(identities: &str) -> Standing {
        let lab = Lab::start(&LabSpec::servers(1).without_executors(), &programs()).unwrap();
        let lines: String = (0..3_000)
            .map(|i| format!("line {i} {}\n", if i % 50 == 0 { "needle" } else { "hay" }))
            .collect();
        fs::write(lab.data(1).join("f"), lines).unwrap();
        let (_, address) = network::addresses(1);
        let server = &lab.servers[0].host;
        said(server, "posh-executor", &["init", "--dir", DIRECTORY, "--name", &address]);
        let config = format!(
            "listen = \"{address}:{EXECUTOR_PORT}\"\naudit = \"{AUDIT}\"\n[tls]\ndir = \"{DIRECTORY}\"\n\
             [[export]]\nname = \"s1\"\npath = \"/srv/s1\"\n{identities}"
        );
        write_file(server, EXECUTOR_CONFIG, config.as_bytes()).unwrap();
        let mut command = server.command(format!("{PROGRAMS}/posh-executor"));
        command.args(["--config", EXECUTOR_CONFIG]);
        let executor = services::start_listening(server, command).unwrap();
        write_file(&lab.workstation, CONFIG, table(&tls_address()).as_bytes()).unwrap();
        Standing { executor, lab }
    }

    fn server(&self) -> &Host {
        &self.lab.servers[0].host
    }

    fn enrol(&self, name: &str) {
        let token = said(self.server(), "posh-executor", &["enroll", name, "--dir", DIRECTORY]);
        let told = said(&self.lab.workstation, "posh", &["enroll", &tls_address(), token.trim()]);
        assert!(
            told.contains(&format!("as {name} now")) && told.contains(&tls_address()),
            "{told}"
        );
    }

    /// The pipeline gives what bash gives, by running here, and the report says why.
    fn assert_here(&self, text: &str, words: &str) {
        let script = Script::new(text);
        let bash = script.run(&self.lab.workstation, Under::Shell).unwrap();
        let posh = script.run(&self.lab.workstation, Under::PoshExplained).unwrap();
        assert_eq!((&posh.stdout, posh.status), (&bash.stdout, bash.status), "{posh}");
        for stage in posh.report().pipelines.iter().flat_map(|pipeline| &pipeline.stages) {
            assert!(
                !stage.is_offloaded() && stage.reason.contains(words),
                "{words:?} is not in {stage:?}"
            );
        }
    }

    fn assert_there(&self, text: &str) {
        let outcome = assert_same(&self.lab.workstation, &Script::new(text));
        let stages: Vec<_> =
            outcome.report().pipelines.iter().flat_map(|pipeline| &pipeline.stages).collect();
        assert!(
            !stages.is_empty() && stages.iter().all(|stage| stage.is_offloaded()),
            "{stages:#?}"
        );
    }
}

fn tls_address() -> String {
    format!("tls://{}:{EXECUTOR_PORT}", network::addresses(1).1)
}

fn table(address: &str) -> String {
    format!(
        "[[executor]]\nname = \"store1\"\naddress = \"{address}\"\n\n\
         [[mount]]\npath = \"/mnt/s1\"\nexecutor = \"store1\"\nexport = \"s1\"\n"
    )
}

fn identity(further: &str) -> String {
    format!("[[identity]]\nname = \"ada\"\nuser = \"root\"\n{further}")
}

fn asked(host: &Host, program: &str, words: &[&str]) -> RunOutcome {
    let mut command = host.command(host.programs().join(program));
    command.args(words);
    collect(host, command, program, SCRIPT_LIMIT).unwrap()
}

fn said(host: &Host, program: &str, words: &[&str]) -> String {
    let outcome = asked(host, program, words);
    assert!(outcome.status.success(), "{outcome}");
    String::from_utf8_lossy(&outcome.stdout).into_owned()
}

const PIPELINE: &str =
    "cat /mnt/s1/f | grep needle | sort -r | head -n 5; echo \"${PIPESTATUS[*]}\"";

#[test]
fn who_is_enrolled_has_the_work_done_there() {
    let standing = Standing::start(&identity("max_runs = 7\n"));
    standing.enrol("ada");
    standing.assert_there(PIPELINE);
    standing.assert_there("cat /mnt/s1/f | grep -v hay | tac > /mnt/s1/out; cat /mnt/s1/out");
    let status = said(&standing.lab.workstation, "posh", &["status"]);
    assert!(status.contains("store1 knows us as ada; commands run as root"), "{status}");
    assert!(status.contains(" of 7 of them ours; refused 0 of ours"), "{status}");
    let doctor = asked(&standing.lab.workstation, "posh", &["doctor"]);
    let doctor = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(
        doctor.lines().any(|line| line.starts_with("ok") && line.contains("executor store1")),
        "{doctor}"
    );
}

/// Who, what, where, how it ended; no values, no contents, no arguments.
#[test]
fn every_run_is_recorded_and_no_secret_is() {
    let standing = Standing::start(&identity("max_processes = 2\n"));
    standing.enrol("ada");
    let script = "export TZ=secret-value LC_ALL=C; cat /mnt/s1/f | grep -e secret-word -e needle; \
                  cat /mnt/s1/f | grep needle | sort | head -n 1";
    Script::new(script).run(&standing.lab.workstation, Under::Posh).unwrap();
    // The record is written when the run has been cleaned up.
    standing.executor.journal.wait_for("OVERLOADED", SCRIPT_LIMIT).unwrap();
    let mut text = String::new();
    while !text.contains("OVERLOADED") || !text.contains("finished") {
        text = String::from_utf8(read_file(standing.server(), AUDIT).unwrap()).unwrap();
        std::thread::yield_now();
    }
    for expected in [
        "\"identity\":\"ada\"",
        "\"user\":\"root\"",
        "\"programs\":[\"cat\",\"grep\"]",
        "\"exports\":[\"s1\"]",
        "\"ms\":",
    ] {
        assert!(text.contains(expected), "{expected} is not in {text}");
    }
    assert!(text.lines().all(|line| line.starts_with('{') && line.ends_with('}')), "{text}");
    let log = standing.executor.journal.text();
    for secret in ["secret-value", "secret-word", "needle", "line 50"] {
        assert!(!text.contains(secret) && !log.contains(secret), "{secret} is in {text}{log}");
    }
    let mode = fs::metadata(standing.server().path(AUDIT)).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::mode(&mode) & 0o777, 0o600);
}

#[test]
fn who_was_never_enrolled_works_here() {
    let standing = Standing::start(&identity(""));
    standing.assert_here(PIPELINE, "this workstation has no certificate for");
    let doctor = asked(&standing.lab.workstation, "posh", &["doctor"]);
    let doctor = String::from_utf8_lossy(&doctor.stdout).into_owned();
    let line = doctor.lines().find(|line| line.contains("executor store1")).unwrap();
    assert!(line.starts_with("BAD") && line.contains("posh enroll"), "{line}");
    assert!(said(&standing.lab.workstation, "posh", &["status"]).contains("posh enroll"));
}

#[test]
fn who_is_revoked_works_here_from_then_on() {
    let standing = Standing::start(&identity(""));
    standing.enrol("ada");
    standing.assert_there(PIPELINE);
    said(standing.server(), "posh-executor", &["revoke", "ada", "--dir", DIRECTORY]);
    // The connection ends just then, which may be all that the first one hears.
    assert_same(&standing.lab.workstation, &Script::new(PIPELINE));
    standing.assert_here(PIPELINE, "the certificate of `ada` was revoked");
    standing.enrol("ada");
}

/// By the programs, as an administrator would do it; neither the executor nor the gateway is
/// started anew.
#[test]
fn an_authority_is_replaced_while_the_work_goes_on() {
    let standing = Standing::start(&identity(""));
    standing.enrol("ada");
    said(standing.server(), "posh-executor", &["rotate", "--dir", DIRECTORY]);
    let refused =
        asked(standing.server(), "posh-executor", &["rotate", "--finish", "--dir", DIRECTORY]);
    assert!(!refused.status.success(), "{refused}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("ada (1 not renewed)"), "{refused}");
    // An hour later.
    let aged = Script::new("touch -d '2 hours ago' ~/.config/posh/tls/*.json && echo done");
    let aged = aged.run(&standing.lab.workstation, Under::Shell).unwrap();
    assert_eq!(aged.stdout, b"done\n", "{aged}");
    // The gateway connects, and renews.
    standing.assert_there(PIPELINE);
    let certificate = || {
        let doctor = asked(&standing.lab.workstation, "posh", &["doctor"]);
        let doctor = String::from_utf8_lossy(&doctor.stdout).into_owned();
        doctor
            .lines()
            .find(|line| line.contains("certificate store1"))
            .unwrap_or_else(|| panic!("{doctor}"))
            .to_owned()
    };
    assert!(certificate().ends_with("as ada, good for 89 days"), "{}", certificate());
    let ended = said(
        standing.server(),
        "posh-executor",
        &["rotate", "--finish", "--force", "--dir", DIRECTORY],
    );
    assert!(ended.contains("ada (1 renewed within a day)"), "{ended}");
    standing.assert_there(PIPELINE);
    said(standing.server(), "posh-executor", &["rotate", "--dir", DIRECTORY]);
    let behind = certificate();
    assert!(
        behind.contains("as ada, good for 89 days; the executor's authority is being replaced"),
        "{behind}"
    );
}

#[test]
fn an_executor_that_is_full_leaves_the_work_here() {
    let standing = Standing::start(&identity("max_processes = 2\n"));
    standing.enrol("ada");
    standing.assert_there("cat /mnt/s1/f | grep -c needle");
    standing.assert_here(PIPELINE, "ada is at its limit of processes on this executor");
    let status = said(&standing.lab.workstation, "posh", &["status"]);
    assert!(status.contains("refused 1 of ours"), "{status}");
}

#[test]
fn who_may_only_read_writes_through_the_mount() {
    let standing = Standing::start(&identity("read_only = true\n"));
    standing.enrol("ada");
    standing.assert_there(PIPELINE);
    let script = Script::new(
        "grep -c needle /mnt/s1/f > /mnt/s1/out; echo $?; cat /mnt/s1/out; rm /mnt/s1/out",
    );
    let [bash, posh] = [Under::Shell, Under::Posh]
        .map(|under| script.run(&standing.lab.workstation, under).unwrap());
    assert_eq!((&posh.stdout, &posh.stderr), (&bash.stdout, &bash.stderr), "{posh}");
}
