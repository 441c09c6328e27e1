//! Full stores: closed files are created all the same, and a call that finds no space fails itself.

use std::{fs, io::Write as _, path::Path, sync::atomic::Ordering, time::Duration};

use posh_volume::{Errno, fs::Source, store::Synced};

use crate::client::{NEW, Site};

/// Another program of the server takes all there is.
fn fill(path: &Path) {
    let mut file = fs::File::create(path).unwrap();
    for block in [1 << 20, 4096] {
        while file.write_all(&vec![1; block]).is_ok() {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_closed_is_taken_when_others_have_filled_the_store() {
    let Some(site) = Site::sized("size=160m") else { return };
    let client = site.client("a").await;
    client.make_directory("t").await.unwrap();
    client.store.held.send_replace(true);
    let contents = |file: usize| vec![b'c'; 1 + file * 5];
    for file in 0..1000 {
        client.put(format!("t/{file}"), &contents(file), 5).await.unwrap();
    }
    client.make_directory("t/d").await.unwrap();
    client.symlink("t/d/l", &"x".repeat(3000)).await.unwrap();
    assert!(!site.path("t/999").exists(), "they wait");
    fill(&site.path("filled"));
    client.store.held.send_replace(false);
    client.volume.settle().await.unwrap();
    for file in 0..1000 {
        assert_eq!(fs::read(site.path(&format!("t/{file}"))).unwrap(), contents(file), "{file}");
    }
    assert!(fs::read_link(site.path("t/d/l")).is_ok());
    assert_eq!(client.volume.state().lost, None);
}

/// Files that are open when they are created on the server are accepted, too, and go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_file_is_taken_when_others_have_filled_the_store() {
    let Some(site) = Site::sized("size=160m") else { return };
    let client = site.client("a").await;
    client.make_directory("t").await.unwrap();
    client.store.held.send_replace(true);
    let mut all = Vec::new();
    for file in 0..50 {
        let (open, _) = client.create(format!("t/{file}"), NEW).await.unwrap();
        client.volume.write(open.number, 0, vec![b'c'; 20_000].into(), Source::Call).await.unwrap();
        all.push(open);
    }
    fill(&site.path("filled"));
    client.store.held.send_replace(false);
    for open in &all {
        client.volume.sync(open.number, Synced::Everything).await.unwrap();
    }
    fs::remove_file(site.path("filled")).unwrap();
    for (file, open) in all.into_iter().enumerate() {
        client
            .volume
            .write(open.number, 20_000, vec![b'd'; 10].into(), Source::Call)
            .await
            .unwrap();
        client.close(open).await.unwrap();
        assert_eq!(fs::read(site.path(&format!("t/{file}"))).unwrap().len(), 20_010, "{file}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_store_says_so_in_the_call_that_it_has_no_room_for() {
    let Some(site) = Site::sized("size=12m") else { return };
    let client = site.client("a").await;
    client.make_directory("t").await.unwrap();
    let mut taken = Vec::new();
    let refused = loop {
        let name = format!("t/{}", taken.len());
        match client.put(&name, &[b'c'; 50_000], 5).await {
            Ok(_) => taken.push(name),
            Err(errno) => break errno,
        }
        assert!(taken.len() < 1000);
    };
    assert_eq!(refused, Errno::ENOSPC);
    assert!(taken.len() > 150, "only {} of some 240 found room", taken.len());
    client.volume.settle().await.unwrap();
    assert_eq!(client.volume.state().lost, None);
    for name in taken {
        assert_eq!(fs::read(site.path(&name)).unwrap(), [b'c'; 50_000], "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_inodes_are_few_each_file_is_made_on_the_server() {
    let Some(site) = Site::sized("size=40m,nr_inodes=100") else { return };
    let client = site.client("a").await;
    client.make_directory("t").await.unwrap();
    let mut taken = 0;
    let refused = loop {
        match client.put(format!("t/{taken}"), b"contents", 5).await {
            Ok(_) => taken += 1,
            Err(errno) => break errno,
        }
        assert!(site.path(&format!("t/{}", taken - 1)).exists());
    };
    assert_eq!(refused, Errno::ENOSPC);
    assert!(taken > 80, "only {taken}");
    assert_eq!(client.volume.state().lost, None);
}

/// Space that nobody uses is not kept from others for long; and none is when the session is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_kept_free_is_given_back() {
    let Some(site) = Site::sized("size=40m") else { return };
    let free = || {
        let found = nix::sys::statvfs::statvfs(&site.path("")).unwrap();
        found.blocks_available() * found.fragment_size()
    };
    let before = free();
    let client = site.client("a").await;
    client.make_directory("t").await.unwrap();
    client.put("t/f", b"contents", 5).await.unwrap();
    client.volume.settle().await.unwrap();
    assert!(free() + (1 << 20) < before, "nothing was reserved");
    let asked = client.store.calls.load(Ordering::Relaxed);
    for _ in 0..400 {
        if free() + (1 << 20) >= before {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(free() + (1 << 20) >= before, "it is still taken");
    assert!(client.store.calls.load(Ordering::Relaxed) <= asked + 1);
    // The next files reserve anew.
    client.put("t/g", b"contents", 5).await.unwrap();
    client.volume.settle().await.unwrap();
    assert!(free() + (1 << 20) < before);
    drop(client);
    for _ in 0..400 {
        if free() + (1 << 20) >= before {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the session's end has given nothing back");
}
