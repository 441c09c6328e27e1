//! Gateways of other versions: named in words, and every command runs here.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::{ffi::OsStrExt as _, fs::symlink, net::UnixListener, process::CommandExt as _},
    thread,
};

use fs_mapper::Prefixes;
use posh_proto::{
    PROTOCOL_VERSION, frame,
    runtime::stage_socket,
    stage::{SessionFile, ToGateway, to_gateway::Kind},
};
use prost::Message as _;

use super::{
    fake::{Fake, Installed},
    stderr, stdout,
};

/// Older and newer than we are.
const OTHERS: [u32; 2] = [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1];

#[test]
fn the_front_end_names_a_gateway_of_another_version() {
    for protocol in OTHERS {
        let installed = Installed::new().configured();
        let fake = Fake::of_version(protocol, &installed.socket(), &installed.at("shims"));
        let output = installed.posh(&["-c", "echo ran; exit 3"]);
        assert_eq!((stdout(&output).as_str(), output.status.code()), ("ran\n", Some(3)));
        let words =
            format!("could not open a session: posh {PROTOCOL_VERSION}, gateway {protocol}\n");
        let said = stderr(&output);
        assert!(
            said.starts_with("posh: every command runs here: ") && said.ends_with(&words),
            "{said}"
        );
        // Nothing to explain, and that is said too.
        let explained = installed.posh(&["--explain", "-c", "echo ran"]);
        assert_eq!((stdout(&explained).as_str(), stderr(&explained)), ("ran\n", said));
        assert!(fake.asked.lock().unwrap().sessions.is_empty());
    }
}

#[test]
fn a_gateway_that_does_not_answer_the_question_is_named() {
    let installed = Installed::new().configured();
    let stages = UnixListener::bind(stage_socket(&installed.socket())).unwrap();
    let hang_up = thread::spawn(move || {
        for _ in 0..2 {
            drop(stages.accept().unwrap());
        }
        // And one that hangs.
        stages.accept().unwrap()
    });
    let ending = ["`posh gateway stop` ends it\n", "no answer within 5 s\n"];
    for ending in ending {
        let output = installed.posh(&["-c", "echo ran; exit 3"]);
        assert_eq!((stdout(&output).as_str(), output.status.code()), ("ran\n", Some(3)));
        let said = stderr(&output);
        assert!(
            said.starts_with("posh: every command runs here: the gateway at ")
                && said.ends_with(ending),
            "{said}"
        );
    }
    drop(hang_up.join().unwrap());
}

#[test]
fn doctor_says_who_is_to_be_updated() {
    for protocol in OTHERS {
        let installed = Installed::new().configured();
        let _fake = Fake::of_version(protocol, &installed.socket(), &installed.at("shims"));
        let output = installed.posh(&["doctor"]);
        let said = stdout(&output);
        let older = if protocol < PROTOCOL_VERSION { "the running gateway" } else { "this posh" };
        let words = format!(
            ": the running gateway speaks protocol {protocol}, this posh {PROTOCOL_VERSION}: update {older}; \
             to end the one that runs: posh gateway stop"
        );
        let line = said
            .lines()
            .find(|line| line.contains("gateway: version 9.9, pid 7"))
            .unwrap_or_default();
        assert!(line.starts_with("BAD ") && line.ends_with(&words), "{said}");
        assert_eq!(output.status.code(), Some(1));
    }
}

/// What a gateway of another version may do with an enlistment that it does not know.
#[test]
fn a_stage_program_runs_its_command_itself() {
    let hangs_up: &[u8] = b"";
    let unknown_kind: &[u8] = &[2, 0, 0, 0, 0xfa, 0x07];
    let too_long: &[u8] = &[0xff; 64];
    for answer in [hangs_up, unknown_kind, too_long] {
        let installed = Installed::new();
        let listener = UnixListener::bind(installed.at("stage.sock")).unwrap();
        let socket = installed.at("stage.sock").as_os_str().as_bytes().to_vec().into();
        let prefixes = Prefixes::default().encode().into();
        let session = SessionFile {
            session: "s".into(),
            socket,
            always_enlist: true,
            prefixes,
            ..SessionFile::default()
        };
        fs::write(installed.at("session"), session.encode_to_vec()).unwrap();
        symlink(env!("CARGO_BIN_EXE_posh-stage"), installed.at("shims/cat")).unwrap();
        fs::write(installed.at("home/f"), "content\n").unwrap();
        let asked = thread::spawn(move || {
            let (mut stage, _) = listener.accept().unwrap();
            let mut header = [0; frame::HEADER_BYTES];
            stage.read_exact(&mut header).unwrap();
            let mut message = vec![0; u32::from_le_bytes(header) as usize];
            stage.read_exact(&mut message).unwrap();
            stage.write_all(answer).unwrap();
            ToGateway::decode(&message[..]).unwrap().kind
        });
        let output = installed
            .command(installed.at("shims/cat"), &["f", "missing"])
            .arg0("cat")
            .output()
            .unwrap();
        let theirs = installed.command("cat", &["f", "missing"]).output().unwrap();
        assert_eq!((&output.stdout, &output.stderr), (&theirs.stdout, &theirs.stderr));
        assert_eq!(output.status, theirs.status);
        let Some(Kind::Enlist(enlist)) = asked.join().unwrap() else { panic!("no enlistment") };
        assert_eq!((enlist.protocol, enlist.name.as_str()), (PROTOCOL_VERSION, "cat"));
    }
}
