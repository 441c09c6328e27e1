//! One promise after the other.

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    process::Command,
    sync::atomic::Ordering,
    time::Duration,
};

use bytes::Bytes;
use posh_volume::{Errno, fs::Source, recovery::Recovery, store::*};

use crate::client::{NEW, Site};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_takes_a_few_requests() {
    let site = Site::new();
    let client = site.client("a").await;
    client.make_directory("t").await.unwrap();
    let before = client.asked();
    for directory in 0..10 {
        client.make_directory(format!("t/{directory}")).await.unwrap();
        for file in 0..100 {
            let path = format!("t/{directory}/{file}");
            client.put(&path, path.repeat(file).as_bytes(), 1_000_000 + file as i64).await.unwrap();
        }
        client.symlink(format!("t/{directory}/link"), "7").await.unwrap();
        let number = client.number(format!("t/{directory}").as_ref()).await.unwrap();
        let mtime = Some(NewTime::At(Time { seconds: 77, nanoseconds: 6 }));
        let changes = Changes { mtime, mode: Some(0o711), ..Changes::default() };
        client.volume.change(&client.caller, number, None, changes).await.unwrap();
    }
    client.volume.drain_all().await.unwrap();
    let asked = client.asked() - before;
    assert!(asked <= 60, "{asked} requests for 1000 files");
    for directory in 0..10 {
        let found = fs::metadata(site.path(&format!("t/{directory}"))).unwrap();
        assert_eq!((found.mode() & 0o7777, found.mtime(), found.mtime_nsec()), (0o711, 77, 6));
        assert_eq!(
            fs::read_link(site.path(&format!("t/{directory}/link"))).unwrap().to_str(),
            Some("7")
        );
        for file in 0..100 {
            let path = format!("t/{directory}/{file}");
            let found = fs::metadata(site.path(&path)).unwrap();
            assert_eq!(fs::read(site.path(&path)).unwrap(), path.repeat(file).as_bytes());
            assert_eq!(
                (found.mode() & 0o7777, found.mtime(), found.mtime_nsec()),
                (0o600, 1_000_000 + file as i64, 5)
            );
            assert_eq!((found.atime(), found.atime_nsec()), (7, 5));
        }
    }
    assert_eq!(client.volume.state().dirty_bytes, 0);
}

/// A program that looks at a file twice, as tar does, must not take it for one that has changed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_made_is_shown_as_it_was_when_it_has_been_sent() {
    let site = Site::new();
    let client = site.client("a").await;
    client.make_directory("t").await.unwrap();
    client.make_directory("t/d").await.unwrap();
    let names = ["t", "t/d", "t/d/f", "t/0", "t/199"];
    for file in 0..200 {
        client.put(format!("t/{file}"), &[b'x'; 5000], 1_000_000).await.unwrap();
    }
    client.put("t/d/f", b"old", 1_000_000).await.unwrap();
    let look = async || {
        let mut seen = Vec::new();
        for name in names {
            let its = client.stat(name).await.unwrap();
            seen.push((its.ctime, its.mtime, its.size, its.blocks));
        }
        seen
    };
    let before = look().await;
    client.volume.drain_all().await.unwrap();
    assert_eq!(look().await, before);
    // From a command on the server on, as the server has it.
    client.volume.settle().await.unwrap();
    for (name, seen) in names.into_iter().zip(look().await) {
        let found = fs::metadata(site.path(name)).unwrap();
        let ctime = Time {
            seconds: found.ctime(),
            nanoseconds: u32::try_from(found.ctime_nsec()).unwrap(),
        };
        assert_eq!((seen.0, seen.2, seen.3), (ctime, found.len(), found.blocks()), "{name}");
    }
}

/// Of a directory that is not on the server yet, with a file in it that is open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_is_there_is_not_made_again() {
    let site = Site::new();
    let client = site.client("a").await;
    client.make_directory("t").await.unwrap();
    for round in 0..20 {
        client.make_directory(format!("t/{round}")).await.unwrap();
        let name = format!("t/{round}/f");
        let (open, _) = client.create(&name, NEW).await.unwrap();
        client
            .volume
            .write(open.number, 0, Bytes::from_static(b"first"), Source::Call)
            .await
            .unwrap();
        assert_eq!(client.create(&name, NEW).await.map(drop), Err(Errno::EEXIST));
        client.close(open).await.unwrap();
        client.volume.settle().await.unwrap();
        assert_eq!(fs::read(site.path(&name)).unwrap(), b"first");
    }
}

/// Changes by a command on the server are known in the volume when the command's end is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn how_changed_files_are_is_told_with_the_end_of_a_command() {
    let site = Site::new();
    let client = site.client("a").await;
    fs::create_dir(site.path("d")).unwrap();
    fs::write(site.path("d/f"), "old").unwrap();
    fs::write(site.path("d/gone"), "").unwrap();
    if client.store.state().watched == Watched::LeaseEnd {
        // Nobody knows what has changed.
        assert_ne!(rustix::process::geteuid().as_raw(), 0);
        return;
    }
    for round in 0..20 {
        client.names("d").await.unwrap();
        let old = client.stat("d/f").await.unwrap();
        Command::new("sh")
            .args([
                "-c",
                "echo \"new $1\" >> d/f; echo > \"d/new $1\"; rm d/gone; echo > d/gone",
                "sh",
                &round.to_string(),
            ])
            .current_dir(site.path(""))
            .status()
            .unwrap();
        client
            .volume
            .caught_up(client.store.mark().await, posh_volume::fs::Changes::Possible)
            .await;
        let before = client.asked();
        let new = client.stat("d/f").await.unwrap();
        assert_eq!(new.size, fs::metadata(site.path("d/f")).unwrap().len());
        assert!(new.size > old.size);
        let of_directory = client.stat("d").await.unwrap();
        assert_eq!(of_directory.mtime.seconds, fs::metadata(site.path("d")).unwrap().mtime());
        // Only the name: it is the directory's matter, which has changed.
        assert_eq!(client.asked() - before, 1, "round {round}");
    }
}

/// cp -r within a volume: it asks the kernel to copy, and so the volume.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copied_tree_takes_a_few_requests() {
    let site = Site::new();
    let client = site.client_with("a", 16 << 20).await;
    client.make_directory("from").await.unwrap();
    for file in 0..200 {
        client
            .put(format!("from/{file}"), format!("{file}").repeat(file).as_bytes(), 5)
            .await
            .unwrap();
    }
    client.volume.drain_all().await.unwrap();
    let before = client.asked();
    client.make_directory("to").await.unwrap();
    assert_eq!(client.names("from").await.unwrap().len(), 200);
    for file in 0..200 {
        let number = client.number(format!("from/{file}").as_ref()).await.unwrap();
        let source = client.volume.open(&client.caller, number, OpenFlags::READ).await.unwrap();
        let (target, _) = client.create(format!("to/{file}"), NEW).await.unwrap();
        let mut copied = 0;
        loop {
            let at = |file| PositionIn { file, offset: copied };
            let (from, to) = (at(source.number), at(target.number));
            match client.volume.copy(from, to, 1 << 40).await.unwrap() {
                0 => break,
                more => copied += more,
            }
        }
        client.close(source).await.unwrap();
        client.close(target).await.unwrap();
    }
    client.volume.drain_all().await.unwrap();
    let asked = client.asked() - before;
    assert!(asked <= 20, "{asked} requests for 200 files");
    for file in 0..200 {
        assert_eq!(
            fs::read(site.path(&format!("to/{file}"))).unwrap(),
            format!("{file}").repeat(file).as_bytes()
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_looks_sees_all_that_was_made() {
    let site = Site::new();
    let (one, other) = (site.client("a").await, site.client("b").await);
    one.make_directory("t").await.unwrap();
    for round in 0..20 {
        one.make_directory(format!("t/{round}")).await.unwrap();
        one.put(format!("t/{round}/f"), b"contents", 5).await.unwrap();
        let (open, _) = one.create(format!("t/{round}/open"), NEW).await.unwrap();
        one.volume
            .write(open.number, 0, Bytes::from_static(b"so far"), Source::Call)
            .await
            .unwrap();
        let shown = one.stat(format!("t/{round}")).await.unwrap();
        match round % 4 {
            0 => assert_eq!(other.names(format!("t/{round}")).await.unwrap(), ["f", "open"]),
            1 => assert_eq!(other.read(format!("t/{round}/open")).await.unwrap(), b"so far"),
            2 => assert_eq!(other.stat(format!("t/{round}/f")).await.unwrap().size, 8),
            _ => assert_eq!(
                other.create(format!("t/{round}/f"), NEW).await.map(drop),
                Err(Errno::EEXIST)
            ),
        }
        assert_eq!(other.read(format!("t/{round}/f")).await.unwrap(), b"contents");
        assert_eq!(other.stat(format!("t/{round}")).await.unwrap().mtime, shown.mtime);
        one.volume
            .write(open.number, 6, Bytes::from_static(b", and more"), Source::Call)
            .await
            .unwrap();
        one.close(open).await.unwrap();
        assert_eq!(other.read(format!("t/{round}/open")).await.unwrap(), b"so far, and more");
        assert_eq!(one.names(format!("t/{round}")).await.unwrap(), ["f", "open"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_on_the_server_see_all_after_it_was_settled() {
    let site = Site::new();
    let client = site.client("a").await;
    client.make_directory("t").await.unwrap();
    client.make_directory("t/sub").await.unwrap();
    client.put("t/sub/f", b"contents", 5).await.unwrap();
    let (open, _) = client.create("t/open", NEW).await.unwrap();
    client.volume.settle().await.unwrap();
    assert_eq!(fs::read(site.path("t/sub/f")).unwrap(), b"contents");
    assert!(site.path("t/open").exists());
    let script = "echo changed > f; echo new > g";
    Command::new("sh").args(["-c", script]).current_dir(site.path("t/sub")).status().unwrap();
    client.volume.catch_up().await;
    assert_eq!(client.read("t/sub/f").await.unwrap(), b"changed\n");
    assert_eq!(client.names("t/sub").await.unwrap(), ["f", "g"]);
    // It is not ours alone any more: what is made there is made on the server.
    let before = client.asked();
    let (new, _) = client.create("t/sub/h", NEW).await.unwrap();
    assert!(client.asked() > before && site.path("t/sub/h").exists());
    client.close(new).await.unwrap();
    client.close(open).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_of_directories_that_were_there_are_made_on_the_server() {
    let site = Site::new();
    fs::create_dir(site.path("old")).unwrap();
    let client = site.client("a").await;
    let (open, _) = client.create("old/lock", NEW).await.unwrap();
    assert!(site.path("old/lock").exists());
    client.close(open).await.unwrap();
    client.make_directory("t").await.unwrap();
    // No leave to write: the server says so.
    let number = client.number("t".as_ref()).await.unwrap();
    let changes = Changes { mode: Some(0o500), ..Changes::default() };
    client.volume.change(&client.caller, number, None, changes).await.unwrap();
    assert_eq!(fs::metadata(site.path("t")).unwrap().permissions().mode() & 0o7777, 0o500);
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

#[test]
fn what_was_closed_survives_the_death_of_the_gateway() {
    let site = Site::new();
    let killed = runtime();
    killed.block_on(async {
        let client = site.client("a").await;
        client.make_directory("old").await.unwrap();
        client.make_directory("old/t").await.unwrap();
        client.put("old/t/sent", b"sent", 5).await.unwrap();
        client.volume.drain_all().await.unwrap();
        client.store.is_dead.store(true, Ordering::Relaxed);
        client.make_directory("old/t/sub").await.unwrap();
        client.put("old/t/sub/f", b"contents", 123).await.unwrap();
        client.symlink("old/t/link", "sub/f").await.unwrap();
        client.put("old/t/taken", b"ours", 5).await.unwrap();
    });
    // With everything that it was about to do.
    killed.shutdown_background();
    fs::remove_file(site.path("old/t/sent")).unwrap();
    assert!(!site.path("old/t/sub").exists());
    fs::write(site.path("old/t/taken"), "theirs").unwrap();
    runtime().block_on(async {
        let client = site.client("a").await;
        assert_eq!(client.read("old/t/sub/f").await.unwrap(), b"contents");
        assert_eq!(fs::metadata(site.path("old/t/sub/f")).unwrap().mtime(), 123);
        assert_eq!(fs::read_link(site.path("old/t/link")).unwrap().to_str(), Some("sub/f"));
        assert!(
            !site.path("old/t/sent").exists(),
            "it was on the server before, and removed there"
        );
        // Nothing that is pending is in the way of what comes now.
        client.volume.drain_all().await.unwrap();
        assert_eq!(fs::read(site.path("old/t/taken")).unwrap(), b"theirs");
        // Ours is shown under its name, and can be taken out.
        assert_eq!(client.read("old/t/taken").await.unwrap(), b"ours");
        let lost = client.volume.state().lost.unwrap();
        assert!(lost.contains("old/t/taken"), "{lost}");
        let to = site.path("../recovered");
        assert_eq!(client.volume.recover(&Recovery::create(&to).unwrap()).unwrap(), 1);
        assert_eq!(fs::read(to.join("old/t/taken")).unwrap(), b"ours");
        assert_eq!(client.read("old/t/taken").await.unwrap(), b"theirs");
        assert_eq!(client.volume.state().lost, None);
    });
}

/// Closes a file in directories that the server has, while it does not answer; then the gateway is
/// killed.
fn close_unsent(site: &Site, path: &str, contents: &'static [u8]) {
    let killed = runtime();
    killed.block_on(async {
        let client = site.client("a").await;
        for (end, _) in path.match_indices('/') {
            client.make_directory(&path[..end]).await.unwrap();
        }
        client.volume.drain_all().await.unwrap();
        client.store.is_dead.store(true, Ordering::Relaxed);
        client.put(path, contents, 5).await.unwrap();
    });
    killed.shutdown_background();
}

#[test]
fn what_was_closed_in_a_directory_that_is_gone_is_told_and_can_be_taken_out() {
    let site = Site::new();
    close_unsent(&site, "old/t/f", b"contents");
    fs::remove_dir(site.path("old/t")).unwrap();
    runtime().block_on(async {
        let client = site.client("a").await;
        let lost = client.volume.state().lost.unwrap();
        assert!(lost.contains("old/t/f"), "{lost}");
        // A command on the server would not find it.
        assert_eq!(client.volume.settle().await, Err(Errno::ESTALE));
        let to = site.path("../recovered");
        assert_eq!(client.volume.recover(&Recovery::create(&to).unwrap()).unwrap(), 1);
        assert_eq!(fs::read(to.join("old/t/f")).unwrap(), b"contents");
        assert_eq!((client.volume.state().lost, client.volume.settle().await), (None, Ok(())));
    });
}

/// As after a crash between a file and its removal, or if the record of that is damaged.
#[test]
fn of_two_records_of_one_path_the_last_is_the_file_and_the_other_is_kept() {
    let site = Site::new();
    close_unsent(&site, "old/f", b"first");
    let (journal, left) = runtime().block_on(site.journal("a"));
    let mut second = left.last().unwrap().clone();
    second.order += 1;
    second.put.what = NewFile::Regular { data: "second".into() };
    journal.note(second).unwrap();
    drop(journal);
    runtime().block_on(async {
        let client = site.client("a").await;
        client.volume.drain_all().await.unwrap();
        assert_eq!(client.read("old/f").await.unwrap(), b"second");
        assert_eq!(fs::read(site.path("old/f")).unwrap(), b"second");
        let lost = client.volume.state().lost.unwrap();
        assert!(lost.contains("old/f"), "{lost}");
        let to = site.path("../recovered");
        assert_eq!(client.volume.recover(&Recovery::create(&to).unwrap()).unwrap(), 1);
        assert_eq!(fs::read(to.join("old/f")).unwrap(), b"first");
        assert_eq!(client.volume.state().lost, None);
    });
}

/// For a volume that is mounted read-only.
#[test]
fn what_is_not_sent_by_a_volume_that_changes_nothing_is_told() {
    let site = Site::new();
    close_unsent(&site, "old/f", b"contents");
    runtime().block_on(async {
        let (journal, left) = site.journal("a").await;
        let reader = site.client_of(1 << 20);
        reader.volume.withhold_journal(journal, left);
        reader.volume.drain_all().await.unwrap();
        let lost = reader.volume.state().lost.unwrap();
        assert!(lost.contains("old/f") && lost.contains("EROFS"), "{lost}");
        assert!(!site.path("old/f").exists());
    });
    // The next one that may write sends it.
    runtime().block_on(async {
        let client = site.client("a").await;
        client.volume.drain_all().await.unwrap();
        assert_eq!(fs::read(site.path("old/f")).unwrap(), b"contents");
    });
}

/// Once while a directory is looked up, and again before it is used.
#[test]
fn what_was_closed_survives_a_server_that_is_started_anew_while_the_journal_is_taken_up() {
    let site = Site::new();
    close_unsent(&site, "old/t/f", b"contents");
    site.forgets.store(2, Ordering::Relaxed);
    runtime().block_on(async {
        let client = site.client("a").await;
        assert_eq!(client.volume.state().lost, None);
        client.volume.settle().await.unwrap();
        assert_eq!(fs::read(site.path("old/t/f")).unwrap(), b"contents");
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_server_refuses_is_never_silent() {
    let site = Site::new();
    let client = site.client("a").await;
    client.make_directory("t").await.unwrap();
    *client.store.refused.lock().unwrap() = Some(("full", Errno::ENOSPC));
    let number = client.put("t/full", b"contents", 5).await.unwrap();
    client.put("t/other", b"other", 5).await.unwrap();
    client.volume.drain_all().await.unwrap();
    assert_eq!(
        client.volume.settle().await,
        Err(Errno::ENOSPC),
        "a command on the server would not see it"
    );
    assert_eq!(fs::read(site.path("t/other")).unwrap(), b"other");
    // What was closed is kept, and seen under its name; what needs the server gets the error.
    let (caller, volume) = (client.caller.clone(), &client.volume);
    assert_eq!(client.read("t/full").await.unwrap(), b"contents");
    assert_eq!(client.stat("t/full").await.unwrap().size, 8);
    assert_eq!(client.names("t").await.unwrap(), ["full", "other"]);
    assert_eq!(
        volume.open(&caller, number, OpenFlags::READ | OpenFlags::WRITE).await,
        Err(Errno::ENOSPC)
    );
    let t = client.number("t".as_ref()).await.unwrap();
    let replace = Renaming::Replace;
    let at = |name: &'static str| NameIn { parent: t, name: name.as_ref() };
    assert_eq!(volume.rename(&caller, at("full"), at("x"), replace).await, Err(Errno::ENOSPC));
    assert_eq!(volume.sync_directory(&caller, t, Synced::Everything).await, Err(Errno::ENOSPC));
    let lost = client.volume.state().lost.unwrap();
    assert!(lost.contains("t/full could not be made"), "{lost}");
    // Nothing more is promised while the server is full.
    let before = client.asked();
    client.put("t/later", b"later", 5).await.unwrap();
    assert!(client.asked() > before && site.path("t/later").exists());
    *client.store.refused.lock().unwrap() = None;
    let began = std::time::Instant::now();
    while !site.path("t/full").exists() {
        assert!(began.elapsed().as_secs() < 20, "it is not tried again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    client.volume.settle().await.unwrap();
    assert_eq!(fs::read(site.path("t/full")).unwrap(), b"contents");
    assert_eq!(client.volume.state().lost, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_lies_in_a_directory_that_is_refused_is_kept_with_it_and_can_be_removed() {
    let site = Site::new();
    let client = site.client("a").await;
    client.make_directory("u").await.unwrap();
    *client.store.refused.lock().unwrap() = Some(("directory", Errno::EDQUOT));
    client.make_directory("u/directory").await.unwrap();
    client.put("u/directory/inside", b"inside", 5).await.unwrap();
    client.put("u/directory/more", b"more", 5).await.unwrap();
    client.volume.drain_all().await.unwrap();
    assert_eq!(client.names("u/directory").await.unwrap(), ["inside", "more"]);
    assert_eq!(client.read("u/directory/inside").await.unwrap(), b"inside");
    assert_eq!(client.make_directory("u/directory/new").await, Err(Errno::EDQUOT));
    assert_eq!(client.create("u/directory/new", NEW).await.map(drop), Err(Errno::EDQUOT));
    assert_eq!(client.remove("u/directory", Removal::Directory).await, Err(Errno::ENOTEMPTY));
    client.remove("u/directory/inside", Removal::File).await.unwrap();
    assert_eq!(client.names("u/directory").await.unwrap(), ["more"]);
    let to = site.path("../recovered");
    assert_eq!(client.volume.recover(&Recovery::create(&to).unwrap()).unwrap(), 1);
    assert_eq!(fs::read(to.join("u/directory/more")).unwrap(), b"more");
    assert_eq!(client.stat("u/directory").await, Err(Errno::ENOENT));
    *client.store.refused.lock().unwrap() = None;
    client.volume.settle().await.unwrap();
    assert!(client.names("u").await.unwrap().is_empty());
    assert!(!site.path("u/directory").exists());
}

/// A request is lost, after or before it was carried out, and what was closed is on the server all
/// the same, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_closed_is_sent_until_the_server_has_it() {
    for round in 0..20 {
        let site = Site::new();
        let client = site.client("a").await;
        client.make_directory("t").await.unwrap();
        client.store.lost.store(1 + round % 3, Ordering::Relaxed);
        client.store.is_lost_after.store(round % 2 == 0, Ordering::Relaxed);
        client.make_directory("t/d").await.unwrap();
        client.put("t/d/f", b"contents", 77).await.unwrap();
        client.symlink("t/link", "d/f").await.unwrap();
        let (open, _) = client.create("t/open", NEW).await.unwrap();
        client
            .volume
            .write(open.number, 0, Bytes::from_static(b"so far"), Source::Call)
            .await
            .unwrap();
        client.volume.settle().await.unwrap();
        assert_eq!(client.store.lost.load(Ordering::Relaxed), 0, "nothing was lost");
        client
            .volume
            .write(open.number, 6, Bytes::from_static(b", more"), Source::Call)
            .await
            .unwrap();
        client.close(open).await.unwrap();
        assert_eq!(fs::read(site.path("t/d/f")).unwrap(), b"contents");
        assert_eq!(fs::metadata(site.path("t/d/f")).unwrap().mtime(), 77);
        assert_eq!(fs::read_link(site.path("t/link")).unwrap().to_str(), Some("d/f"));
        assert_eq!(fs::read(site.path("t/open")).unwrap(), b"so far, more");
        assert_eq!(client.volume.state().lost, None, "round {round}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_and_times_stay_when_a_file_is_born() {
    let site = Site::new();
    let client = site.client("a").await;
    client.make_directory("t").await.unwrap();
    client.make_directory("t/sub").await.unwrap();
    let (open, number) = client.create("t/sub/f", NEW).await.unwrap();
    client.volume.write(open.number, 3, Bytes::from_static(b"data"), Source::Call).await.unwrap();
    assert_eq!(client.volume.read(open.number, 0, 100).await.unwrap(), b"\0\0\0data"[..]);
    client.close(open).await.unwrap();
    let seen = |attributes: Attributes| {
        (attributes.mode, attributes.size, attributes.mtime, attributes.atime)
    };
    let client = &client;
    let told = |path: &'static str| async move {
        (client.number(path.as_ref()).await.unwrap(), seen(client.stat(path).await.unwrap()))
    };
    let before =
        (told("t/sub/f").await, told("t/sub").await.0, client.stat("t/sub").await.unwrap().mtime);
    assert_eq!(before.0.0, number);
    client.volume.drain_all().await.unwrap();
    assert!(site.path("t/sub/f").exists());
    assert_eq!(
        (told("t/sub/f").await, told("t/sub").await.0, client.stat("t/sub").await.unwrap().mtime),
        before
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_removed_before_it_was_sent_never_was() {
    let site = Site::new();
    let client = site.client("a").await;
    client.make_directory("t").await.unwrap();
    client.store.held.send_replace(true);
    client.put("t/first", b"holds the others up", 5).await.unwrap();
    while client.store.writes.load(Ordering::Relaxed) == 0 {
        tokio::task::yield_now().await;
    }
    client.put("t/temporary", b"contents", 5).await.unwrap();
    client.remove("t/temporary", Removal::File).await.unwrap();
    assert_eq!(client.stat("t/temporary").await, Err(Errno::ENOENT));
    client.put("t/temporary", b"again", 5).await.unwrap();
    client.store.held.send_replace(false);
    assert_eq!(client.names("t").await.unwrap(), ["first", "temporary"]);
    assert_eq!(fs::read(site.path("t/temporary")).unwrap(), b"again");
    client.remove("t/temporary", Removal::File).await.unwrap();
    assert!(!site.path("t/temporary").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_files_are_written_while_they_grow() {
    let site = Site::new();
    let client = site.client("a").await;
    client.make_directory("t").await.unwrap();
    let (open, _) = client.create("t/large", NEW).await.unwrap();
    let piece = Bytes::from(vec![7; 100_000]);
    for number in 0..30 {
        client
            .volume
            .write(open.number, number * 100_000, piece.clone(), Source::Call)
            .await
            .unwrap();
    }
    client.close(open).await.unwrap();
    assert_eq!(fs::read(site.path("t/large")).unwrap(), vec![7; 3_000_000]);
    assert_eq!(client.read("t/large").await.unwrap(), vec![7; 3_000_000]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_stays_open_is_on_the_server_soon() {
    let site = Site::new();
    let client = site.client("a").await;
    client.make_directory("t").await.unwrap();
    let (open, _) = client.create("t/log", NEW).await.unwrap();
    client.volume.write(open.number, 0, Bytes::from_static(b"line\n"), Source::Call).await.unwrap();
    let began = std::time::Instant::now();
    while fs::read(site.path("t/log")).unwrap_or_default() != b"line\n" {
        assert!(began.elapsed().as_secs() < 10, "it is not there");
        tokio::task::yield_now().await;
    }
    client.close(open).await.unwrap();
}

/// The gateway is killed when the server has made an open file, whose other descriptor was closed
/// before: the next one finds it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_file_that_was_made_when_the_gateway_was_killed_is_whole() {
    let site = Site::new();
    let client = site.client("a").await;
    client.make_directory("t").await.unwrap();
    client.volume.drain_all().await.unwrap();
    let (open, _) = client.create("t/log", NEW).await.unwrap();
    client.volume.write(open.number, 0, Bytes::from_static(b"line\n"), Source::Call).await.unwrap();
    client.volume.flush(open.number, Some(1)).await.unwrap();
    client.store.is_dead.store(true, Ordering::Relaxed);
    while !site.path("t/log").exists() {
        tokio::task::yield_now().await;
    }
    assert_eq!(fs::read(site.path("t/log")).unwrap(), b"line\n");
    // Its task that waits for the answer keeps the journal.
    let copied =
        Command::new("cp").arg("-r").args([site.state("a"), site.state("b")]).status().unwrap();
    assert!(copied.success());
    client.store.end_session();
    drop(client);
    let next = site.client("b").await;
    next.volume.drain_all().await.unwrap();
    assert_eq!(next.volume.state().lost, None);
    assert_eq!(next.read("t/log").await.unwrap(), b"line\n");
    assert_eq!(fs::read(site.path("t/log")).unwrap(), b"line\n");
}

/// A change of an open file that comes while the file is made on the server follows it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_changed_while_an_open_file_is_made_is_on_the_server() {
    for lost in [0, 1] {
        let site = Site::new();
        let client = site.client("a").await;
        client.make_directory("t").await.unwrap();
        client.volume.drain_all().await.unwrap();
        client.store.lost.store(lost, Ordering::Relaxed);
        client.store.is_lost_after.store(true, Ordering::Relaxed);
        let (open, number) = client.create("t/log", NEW).await.unwrap();
        client
            .volume
            .write(open.number, 0, Bytes::from_static(b"line\n"), Source::Call)
            .await
            .unwrap();
        client.store.held.send_replace(true);
        client.store.creating.subscribe().wait_for(|is_creating| *is_creating).await.unwrap();
        let at = |seconds| Some(NewTime::At(Time { seconds, nanoseconds: 5 }));
        let changes = Changes { mode: Some(0o640), mtime: at(77), ..Changes::default() };
        client.volume.change(&client.caller, number, Some(open.number), changes).await.unwrap();
        client.store.held.send_replace(false);
        client.volume.sync(open.number, Synced::Everything).await.unwrap();
        client.close(open).await.unwrap();
        client.volume.drain_all().await.unwrap();
        let there = fs::metadata(site.path("t/log")).unwrap();
        assert_eq!((there.mode() & 0o7777, there.mtime()), (0o640, 77), "{lost} lost");
        assert_eq!(fs::read(site.path("t/log")).unwrap(), b"line\n");
    }
}

/// The executor is started anew, and the link is cut while the file is looked up in it: what was
/// written is sent again, and nobody hears of a stale file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_written_survives_a_restart_and_a_lost_lookup() {
    let site = Site::new();
    let client = site.client("a").await;
    fs::write(site.path("f"), "old").unwrap();
    let number = client.number("f".as_ref()).await.unwrap();
    let open = client.volume.open(&client.caller, number, OpenFlags::WRITE).await.unwrap();
    for (restarts, lost_walks, text) in [(1, 1, b"one"), (4, 2, b"two"), (4, 0, b"111")] {
        client.store.stale.store(restarts, Ordering::Relaxed);
        client.store.lost_walks.store(lost_walks, Ordering::Relaxed);
        client.volume.write(open.number, 0, Bytes::from_static(text), Source::Call).await.unwrap();
        client.volume.sync(open.number, Synced::Everything).await.unwrap();
        assert_eq!(fs::read(site.path("f")).unwrap(), text);
    }
    client.close(open).await.unwrap();
}

/// A pending file that the full server refuses now and then, between restarts of its executor.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_file_survives_any_number_of_restarts() {
    let site = Site::new();
    let client = site.client("a").await;
    client.make_directory("t").await.unwrap();
    client.volume.settle().await.unwrap();
    *client.store.refused.lock().unwrap() = Some(("f", Errno::ENOSPC));
    client.put("t/f", b"kept", 7).await.unwrap();
    for _ in 0..3 {
        // The next attempt finds that the server does not know the directory.
        client.store.stale.store(1, Ordering::Relaxed);
        let began = std::time::Instant::now();
        while client.store.stale.load(Ordering::Relaxed) > 0 {
            assert!(began.elapsed().as_secs() < 60, "nothing is tried again");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(client.volume.settle().await, Err(Errno::ENOSPC));
    }
    assert_eq!(client.read("t/f").await.unwrap(), b"kept");
    *client.store.refused.lock().unwrap() = None;
}
