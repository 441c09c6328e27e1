//! Runs and sessions of volumes on one executor: changes of one reach the other in time.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use posh_proto::{
    PROTOCOL_VERSION,
    executor::{ReturnedLease, VolumeSession, rejected, run_output},
    volume::{Hello, ToVolume, to_volume, volume_client::VolumeClient},
};
use posh_volume::{
    Store as _,
    remote::{CannotConnect, Connector, Patience, Remote},
    store::{
        Answer, Caller, Changes, Entry, Leases, NewTime, Notice, Notices, Op, OpenFlags, Place,
        Returned, Time, Write,
    },
};
use tokio_stream::{StreamExt as _, wrappers::ReceiverStream};
use tonic::transport::Channel;

use super::harness::*;

struct Direct(SocketAddr);

#[tonic::async_trait]
impl Connector for Direct {
    async fn connect(&self) -> Result<Channel, CannotConnect> {
        let endpoint = Channel::from_shared(format!("http://{}", self.0)).unwrap();
        endpoint.connect().await.map_err(|error| CannotConnect::Unreachable(error.to_string()))
    }
}

async fn session(lab: &Lab) -> (Remote, Notices) {
    let remote =
        Remote::open(Arc::new(Direct(lab.address)), "logs", Patience::default()).await.unwrap();
    let notices = remote.notices();
    (remote, notices)
}

/// The session, as a run names it.
fn named(remote: &Remote) -> VolumeSession {
    VolumeSession {
        session: remote.session(),
        opened: remote.opened().0,
        export: "logs".to_owned(),
        ..VolumeSession::default()
    }
}

async fn open(remote: &Remote, name: &str, flags: OpenFlags) -> (Place, Entry) {
    let walk = Op::Walk { from: remote.root(), names: vec![name.into()] };
    let Answer::Walked(walked) = remote.call(&Caller::default(), walk).await.unwrap() else {
        panic!("walked")
    };
    let file = walked.entries[0].attributes.id;
    match remote.call(&Caller::default(), Op::Open { place: file.into(), flags }).await.unwrap() {
        Answer::Opened { handle, entry, .. } => (Place { file, handle: Some(handle) }, entry),
        other => panic!("{other:?}"),
    }
}

async fn next(notices: &mut Notices) -> Notice {
    tokio::time::timeout(PATIENCE, notices.next())
        .await
        .expect("in time")
        .expect("the session lives")
}

/// Waits for a recall of the session's lease, writes, and returns the lease.
async fn hand_over(remote: &Remote, notices: &mut Notices, (place, text): (Place, &'static [u8])) {
    let (file, leases, stamp) = loop {
        match next(notices).await {
            Notice::Recall { file, leases, stamp } => break (file, leases, stamp),
            Notice::Is(_) | Notice::All { .. } => {}
            Notice::Lost { .. } => panic!("lost"),
        }
    };
    assert!(file == place.file && leases.contains(Leases::WRITE));
    let write = Write::At { place, offset: 0, data: Bytes::from_static(text) };
    remote.write(&Caller::default(), vec![write]).await.unwrap()[0].unwrap();
    remote
        .call(&Caller::default(), Op::Return(vec![Returned { file, leases, stamp }]))
        .await
        .unwrap();
}

#[tokio::test]
async fn before_its_end_is_told_a_command_has_told_the_volumes_what_it_changed() {
    let lab = Lab::start().await;
    lab.write("f", "old");
    let (remote, mut notices) = session(&lab).await;
    for round in 0..20 {
        lab.write("g", format!("new {round}"));
        let (place, entry) = open(&remote, "f", OpenFlags::READ).await;
        assert!(entry.leases.contains(Leases::DATA), "{entry:?}");
        let mut spec = pipeline(&["cat g", "tee f"]);
        spec.volumes = vec![named(&remote)];
        let outcome = lab.run(spec).await;
        assert_eq!(outcome.text(), format!("new {round}"));
        let marks = &outcome.exits[&2].volume_marks;
        assert!(marks.len() == 1 && marks[0].session == remote.session(), "{marks:?}");
        let mut is_recalled = false;
        loop {
            match next(&mut notices).await {
                Notice::Recall { file, leases, stamp } => {
                    is_recalled |= file == place.file && leases.contains(Leases::DATA);
                    let returned = vec![Returned { file, leases, stamp }];
                    remote.call(&Caller::default(), Op::Return(returned)).await.unwrap();
                }
                Notice::All { stamp } if stamp.0 >= marks[0].stamp => break,
                Notice::Is(_) | Notice::All { .. } => {}
                Notice::Lost { .. } => panic!("lost"),
            }
        }
        assert!(is_recalled, "round {round}");
    }
}

#[tokio::test]
async fn a_session_that_an_executor_does_not_know_is_told_nothing() {
    let lab = Lab::start().await;
    let mut spec = pipeline(&["true"]);
    spec.volumes = vec![VolumeSession {
        session: Bytes::from_static(b"nobody's session"),
        ..VolumeSession::default()
    }];
    assert!(lab.run(spec).await.exits[&1].volume_marks.is_empty());
}

#[tokio::test]
async fn a_session_that_is_named_again_and_again_is_told_once() {
    let lab = Lab::start().await;
    let (remote, _notices) = session(&lab).await;
    let mut spec = pipeline(&["true"]);
    spec.volumes = vec![named(&remote); 256];
    assert_eq!(lab.run(spec).await.exits[&1].volume_marks.len(), 1);
}

/// Like a session of another identity, whose lease is recalled.
#[tokio::test]
async fn a_run_waits_for_what_a_session_holds_back() {
    let lab = Lab::start().await;
    lab.write("f", "old");
    let (remote, mut notices) = session(&lab).await;
    let (place, entry) = open(&remote, "f", OpenFlags::READ | OpenFlags::WRITE).await;
    assert!(entry.leases.contains(Leases::WRITE), "{entry:?}");
    let holder = hand_over(&remote, &mut notices, (place, b"new"));
    let (outcome, ()) = tokio::join!(lab.run(pipeline(&["cat f"])), holder);
    assert_eq!(outcome.text(), "new");
}

/// Two exports of one directory, by a bind mount.
#[tokio::test]
async fn a_run_waits_for_changes_held_back_under_another_path() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    take_own_mounts();
    let other = tempfile::tempdir().unwrap();
    let lab = Lab::with(|config| {
        let export = posh_executor::Export {
            name: "other".into(),
            path: other.path().to_owned(),
            ..config.exports[0].clone()
        };
        config.exports.push(export);
    })
    .await;
    bind(lab.store.path(), other.path());
    lab.write("f", "old");
    let (remote, mut notices) = session(&lab).await;
    let (place, entry) = open(&remote, "f", OpenFlags::READ | OpenFlags::WRITE).await;
    assert!(entry.leases.contains(Leases::WRITE), "{entry:?}");
    let holder = hand_over(&remote, &mut notices, (place, b"new"));
    let mut spec = pipeline(&["cat f"]);
    spec.mounts[0].export = "other".into();
    let (outcome, ()) = tokio::join!(lab.run(spec), holder);
    assert_eq!(outcome.text(), "new");
    nix::mount::umount(other.path()).unwrap();
}

#[tokio::test]
async fn a_right_to_write_that_comes_back_with_the_run_is_not_asked_for() {
    let lab = Lab::start().await;
    lab.write("f", "text");
    let (remote, mut notices) = session(&lab).await;
    let (place, entry) = open(&remote, "f", OpenFlags::READ | OpenFlags::WRITE).await;
    assert!(entry.leases.contains(Leases::WRITE), "{entry:?}");
    let (inode, generation) = (place.file.inode, place.file.generation);
    let returned = vec![ReturnedLease { inode, generation, stamp: entry.stamp.0 }];
    let mut spec = pipeline(&["cat f"]);
    spec.volumes = vec![VolumeSession { returned, ..named(&remote) }];
    // Nobody answers recalls, but none is needed.
    let mut call = Call::open(&lab.client, spec).await;
    let marks = call
        .until(|kind| match kind {
            run_output::Kind::Exited(exited) => Some(exited.volume_marks.clone()),
            _ => None,
        })
        .await;
    loop {
        match next(&mut notices).await {
            Notice::All { stamp } if stamp.0 >= marks[0].stamp => break,
            Notice::Is(_) | Notice::All { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_session_is_recorded_when_it_begins_and_what_it_changed_when_it_ends() {
    let record = tempfile::tempdir().unwrap();
    let path = record.path().join("audit");
    let lab = Lab::with(|config| config.audit = Some(path.clone())).await;
    lab.write("f", "old");
    let (remote, _notices) = session(&lab).await;
    let of_event = |event: &str| -> Option<serde_json::Value> {
        let text = std::fs::read_to_string(&path).unwrap();
        let mut lines =
            text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        lines.find(|line| line["event"] == event)
    };
    // Recorded before its first call.
    let begin = of_event("volume_begin").expect("recorded");
    assert_eq!((&begin["volume"], &begin["read_only"]), (&"logs".into(), &false.into()));
    let (place, _) = open(&remote, "f", OpenFlags::WRITE).await;
    let write = Write::At { place, offset: 0, data: Bytes::from_static(b"new") };
    remote.write(&Caller::default(), vec![write]).await.unwrap()[0].unwrap();
    for name in ["d", "d"] {
        let make =
            Op::MakeDirectory { parent: remote.root(), name: name.into(), mode: 0o755.into() };
        let _ = remote.call(&Caller::default(), make).await;
    }
    let name = remote.session();
    remote.close().await;
    drop(remote);
    let end = loop {
        match of_event("volume_end") {
            Some(end) => break end,
            None => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
        }
    };
    assert_eq!(end["session"], begin["session"]);
    assert_eq!(
        (&end["did"], &end["bytes_written"]),
        (&serde_json::json!({ "made": 1, "written": 1 }), &3.into())
    );
    // The record does not have the name, by which others could resume the session.
    let text = std::fs::read(&path).unwrap();
    assert!(!text.windows(name.len()).any(|bytes| bytes == &name[..]));
}

#[tokio::test]
async fn what_failed_after_its_first_step_is_recorded_and_what_was_refused_is_not() {
    let record = tempfile::tempdir().unwrap();
    let path = record.path().join("audit");
    let lab = Lab::with(|config| config.audit = Some(path.clone())).await;
    lab.write("f", "old");
    let (remote, _notices) = session(&lab).await;
    let (place, _) = open(&remote, "f", OpenFlags::READ).await;
    let file = Place::from(place.file);
    let impossible = NewTime::At(Time { seconds: 0, nanoseconds: 2_000_000_000 });
    let changes = Changes { size: Some(0), mtime: Some(impossible), ..Changes::default() };
    let emptied = remote.call(&Caller::default(), Op::Set { place: file, changes }).await;
    assert!(emptied.is_err() && std::fs::read(lab.store.path().join("f")).unwrap().is_empty());
    // Not open for writing.
    let write = Write::At { place, offset: 0, data: Bytes::from(vec![0; 1000]) };
    assert!(remote.write(&Caller::default(), vec![write]).await.unwrap()[0].is_err());
    remote.close().await;
    drop(remote);
    let end = loop {
        let text = std::fs::read_to_string(&path).unwrap();
        match text.lines().find(|line| line.contains("volume_end")) {
            Some(line) => break serde_json::from_str::<serde_json::Value>(line).unwrap(),
            None => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    assert_eq!(
        (&end["did"], &end["bytes_written"]),
        (&serde_json::json!({ "changed": 1 }), &0.into())
    );
}

#[tokio::test]
async fn a_session_that_is_left_when_the_executor_stops_is_recorded_to_its_end() {
    let record = tempfile::tempdir().unwrap();
    let path = record.path().join("audit");
    let mut lab = Lab::with(|config| config.audit = Some(path.clone())).await;
    let (remote, _notices) = session(&lab).await;
    let make = Op::MakeDirectory { parent: remote.root(), name: "d".into(), mode: 0o755.into() };
    remote.call(&Caller::default(), make).await.unwrap();
    lab.stop();
    tokio::time::timeout(PATIENCE, &mut lab.served).await.expect("it stops").unwrap().unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let records: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let [.., end, stop] = &records[..] else { panic!("{text}") };
    assert_eq!(
        (&end["event"], &end["did"]),
        (&"volume_end".into(), &serde_json::json!({ "made": 1 }))
    );
    assert_eq!(stop["event"], "stop");
}

#[tokio::test]
async fn a_session_that_finds_no_room_is_not_recorded() {
    let record = tempfile::tempdir().unwrap();
    let path = record.path().join("audit");
    let lab = Lab::with(|config| config.audit = Some(path.clone())).await;
    let mut client = VolumeClient::new(Direct(lab.address).connect().await.unwrap());
    let (mut open, mut refused) = (Vec::new(), 0);
    for number in 0_u32..200 {
        let session = Bytes::from([[0; 16], [1; 16]].concat()).slice(0..28);
        let session = Bytes::from([&session[..], &number.to_be_bytes()].concat());
        let hello = Hello {
            protocol: PROTOCOL_VERSION,
            session,
            export: "logs".into(),
            ..Hello::default()
        };
        let (sender, messages) = tokio::sync::mpsc::channel(1);
        sender.send(ToVolume { kind: Some(to_volume::Kind::Hello(hello)) }).await.unwrap();
        match client.session(ReceiverStream::new(messages)).await {
            Ok(answers) => open.push((sender, answers)),
            Err(_) => refused += 1,
        }
    }
    let text = std::fs::read_to_string(&path).unwrap();
    let count = |event: &str| text.lines().filter(|line| line.contains(event)).count();
    assert!(refused > 0);
    assert_eq!((count("volume_begin"), count("volume_end")), (open.len(), 0));
}

#[tokio::test]
async fn a_session_whose_call_is_reset_as_it_begins_is_recorded_to_its_end() {
    let record = tempfile::tempdir().unwrap();
    let path = record.path().join("audit");
    let lab = Lab::with(|config| config.audit = Some(path.clone())).await;
    let mut client = VolumeClient::new(Direct(lab.address).connect().await.unwrap());
    let count = |event: &str| {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        text.lines().filter(|line| line.contains(&format!("\"event\":\"{event}\""))).count()
    };
    for number in 0_u8..u8::MAX {
        // On a busy machine none begins in so short a time.
        if number >= 40 && count("volume_begin") > 1 {
            break;
        }
        let session = Bytes::from(vec![number; 16]);
        let hello = Hello {
            protocol: PROTOCOL_VERSION,
            session,
            export: "logs".into(),
            ..Hello::default()
        };
        let hello = ToVolume { kind: Some(to_volume::Kind::Hello(hello)) };
        let patience = Duration::from_micros(100 * u64::from(number));
        let (sender, messages) = tokio::sync::mpsc::channel(1);
        sender.send(hello).await.unwrap();
        // Its answer, if there is one, is dropped, and no further message is sent.
        let _ = tokio::time::timeout(patience, client.session(ReceiverStream::new(messages))).await;
    }
    // Each is kept for half a minute in case its gateway reconnects.
    let all_have_ended = async {
        while count("volume_begin") == 0 || count("volume_end") < count("volume_begin") {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let ended = tokio::time::timeout(Duration::from_secs(90), all_have_ended).await;
    assert!(ended.is_ok(), "{} begun, {} ended", count("volume_begin"), count("volume_end"));
    assert!(count("volume_begin") > 1);
}

/// Users of an export can rename directories in it, even that of another export.
#[tokio::test]
async fn a_link_in_place_of_an_exports_directory_is_not_followed() {
    let secret = tempfile::tempdir().unwrap();
    std::fs::write(secret.path().join("f"), "a secret\n").unwrap();
    let lab = Lab::with(|config| {
        let path = config.exports[0].path.join("inner");
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("f"), "x\n").unwrap();
        let inner =
            posh_executor::Export { name: "inner".to_owned(), path, ..config.exports[0].clone() };
        config.exports.push(inner);
    })
    .await;
    let spec = || {
        let mut spec = pipeline(&["cat f"]);
        spec.mounts = vec![mount(MOUNT, "inner", "")];
        spec
    };
    let volume = || Remote::open(Arc::new(Direct(lab.address)), "inner", Patience::default());
    assert_eq!(lab.run(spec()).await.text(), "x\n");
    volume().await.unwrap().close().await;
    let inner = lab.store.path().join("inner");
    std::fs::rename(&inner, lab.store.path().join("aside")).unwrap();
    std::os::unix::fs::symlink(secret.path(), &inner).unwrap();
    let outcome = lab.run(spec()).await;
    assert_eq!(outcome.refusal().kind(), rejected::Kind::UnknownExport, "{outcome:?}");
    assert!(volume().await.is_err());
    std::fs::remove_file(&inner).unwrap();
    std::fs::rename(lab.store.path().join("aside"), &inner).unwrap();
    assert_eq!(lab.run(spec()).await.text(), "x\n");
}

/// The reason for which a run of this command, which names the volume, is not done.
async fn refused(lab: &Lab, volume: VolumeSession, sub_path: &'static str) -> Option<String> {
    let mut spec = pipeline(&["touch made"]);
    spec.mounts[0].sub_path = sub_path.into();
    spec.volumes = vec![volume];
    let rejected = lab.run(spec).await.rejected?;
    assert_eq!(rejected.kind(), rejected::Kind::Stale, "{}", rejected.message);
    Some(rejected.message)
}

/// Puts another directory at the export's path (`mv n n.old; mkdir n`); returns the former one's.
fn replace(lab: &Lab, name: &str) -> std::path::PathBuf {
    let (path, old) = (lab.store.path(), lab.store.path().with_extension(name));
    std::fs::rename(path, &old).unwrap();
    std::fs::create_dir_all(path.join("d")).unwrap();
    old
}

// Guard: volume::shown.
#[tokio::test]
async fn a_run_acts_in_no_other_directory_than_the_volume_shows() {
    for sub_path in ["", "d"] {
        let lab = Lab::start().await;
        std::fs::create_dir(lab.store.path().join("d")).unwrap();
        let (remote, _notices) = session(&lab).await;
        let first = named(&remote);
        assert_eq!(refused(&lab, first.clone(), sub_path).await, None);
        let old = replace(&lab, "old");
        std::fs::remove_file(old.join(sub_path).join("made")).unwrap();
        assert!(refused(&lab, first.clone(), sub_path).await.is_some());
        // The session has ended, and the mount finds the new directory. Until the workstation knows
        // of that, it names the former session.
        let opened_anew = async {
            while remote.opened().0 == first.opened {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(PATIENCE, opened_anew).await.expect("a session of the new directory");
        assert!(refused(&lab, first, sub_path).await.is_some());
        let [old_one, new_one] =
            [&*old, lab.store.path()].map(|top| top.join(sub_path).join("made"));
        assert!(!old_one.exists() && !new_one.exists());
        assert_eq!(refused(&lab, named(&remote), sub_path).await, None);
        assert!(!old_one.exists() && new_one.exists());
        std::fs::remove_dir_all(old).unwrap();
    }
}

#[tokio::test]
async fn a_lost_session_is_in_the_way_of_no_run_with_another_export() {
    let lab = Lab::start().await;
    let lost = |export: &str| VolumeSession {
        session: Bytes::from_static(b"nobody's session"),
        opened: 7,
        export: export.to_owned(),
        ..VolumeSession::default()
    };
    assert_eq!(refused(&lab, lost("other"), "").await, None);
    assert!(refused(&lab, lost("logs"), "").await.is_some());
}

/// A volume of another workstation, which runs nothing.
#[tokio::test]
async fn a_run_ends_the_sessions_of_the_former_directory() {
    let lab = Lab::start().await;
    let (remote, _notices) = session(&lab).await;
    let first = remote.opened();
    let old = replace(&lab, "old");
    assert_eq!(lab.run(pipeline(&["echo x"])).await.text(), "x\n");
    let opened_anew = async {
        while remote.opened() == first {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, opened_anew).await.expect("a session of the new directory");
    std::fs::remove_dir_all(old).unwrap();
}
