//! Connections that break: nothing happens twice, nothing open is lost.

use std::{
    fs,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use posh_proto::{
    PROTOCOL_VERSION,
    volume::{Hello, ToVolume, to_volume, volume_client::VolumeClient},
};
use posh_volume::{
    Errno, Store as _,
    remote::{CannotConnect, Connector, Patience, Remote},
    store::*,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use super::harness::*;

/// Time for which an executor keeps a session without connection.
const KEPT: Duration = Duration::from_secs(30);

async fn behind(proxy: &Proxy, patience: Patience) -> Remote {
    Remote::open(Arc::new(Direct(proxy.address)), EXPORT, patience).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_happen_once_while_the_connection_breaks() {
    const LINES: u64 = 400;
    let site = Site::new().await;
    fs::write(site.path("log"), "").unwrap();
    let proxy = Proxy::to(site.address).await;
    let store = behind(&proxy, Patience::default()).await;
    let (place, _) = open(&store, "log", OpenFlags::WRITE).await.unwrap();
    let mut expected = Vec::new();
    for number in 0..LINES {
        let line = format!("{number}\n");
        expected.extend_from_slice(line.as_bytes());
        let append = [Write::Append { place, data: Bytes::from(line.into_bytes()) }];
        let make = Op::MakeDirectory {
            parent: store.root(),
            name: format!("d{number}").into(),
            mode: 0o700.into(),
        };
        let remove = Op::Remove {
            parent: store.root(),
            name: format!("d{}", number.wrapping_sub(1)).into(),
            what: Removal::Directory,
        };
        // In the middle of all three, at another moment each time.
        let caller = me();
        let cut = async {
            if number % 20 == 7 {
                for _ in 0..number % 13 {
                    tokio::task::yield_now().await;
                }
                proxy.cut();
            }
        };
        let write = tokio::time::timeout(PATIENCE, store.write(&caller, append.to_vec()));
        let (written, made, ()) = tokio::join!(write, call(&store, make), cut);
        let written = written.unwrap_or_else(|_| panic!("{number} was not written in time"));
        assert!(written.unwrap()[0].is_ok(), "{number}");
        assert!(matches!(made, Ok(Answer::Made { .. })), "{number}: {made:?}");
        if number > 0 {
            assert!(matches!(call(&store, remove).await, Ok(Answer::Removed { .. })), "{number}");
        }
    }
    assert_eq!(fs::read(site.path("log")).unwrap(), expected);
    assert!(store.state().reconnects > 3, "the connection was never broken");
    assert_eq!(fs::read_dir(site.top.path()).unwrap().count(), 2);
}

/// The link is gone for longer than the executor keeps a session. One change has arrived before,
/// and is made while no connection can be told; two others are on their way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_happen_once_also_when_their_session_has_ended() {
    let site = Site::new().await;
    fs::write(site.path("log"), "").unwrap();
    let proxy = Proxy::to(site.address).await;
    let store = Arc::new(behind(&proxy, Patience { deadline: None }).await);
    let (place, _) = open(&*store, "log", OpenFlags::WRITE).await.unwrap();
    let make = |name: &str| {
        let (store, name) = (store.clone(), name.into());
        tokio::spawn(async move {
            let op = Op::MakeDirectory { parent: store.root(), name, mode: 0o700.into() };
            store.call(&me(), op).await
        })
    };
    // This session does not answer recalls.
    let other = site.remote().await;
    let _unanswered = other.notices();
    assert!(find(&other, "").await.unwrap().leases.contains(Leases::ENTRIES));
    let arrived = make("arrived");
    tokio::time::sleep(Duration::from_secs(1)).await;
    proxy.freeze();
    let on_its_way = make("on-its-way");
    let append = tokio::spawn({
        let store = store.clone();
        async move {
            store
                .write(&me(), vec![Write::Append { place, data: Bytes::from_static(b"line\n") }])
                .await
        }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    proxy.let_through(false);
    tokio::time::sleep(KEPT + Duration::from_secs(2)).await;
    assert!(site.path("arrived").is_dir() && !site.path("on-its-way").exists());
    proxy.let_through(true);
    for made in [arrived, on_its_way] {
        let made = made.await.unwrap();
        assert!(matches!(made, Ok(Answer::Made { .. })), "{made:?}");
    }
    let written = append.await.unwrap();
    assert!(matches!(&written, Ok(results) if results[0].is_ok()), "{written:?}");
    assert_eq!(fs::read(site.path("log")).unwrap(), b"line\n");
}

#[tokio::test]
async fn requests_that_are_lost_with_their_connection_are_made_anew() {
    let site = Site::new().await;
    fs::write(site.path("log"), "one ").unwrap();
    let proxy = Proxy::to(site.address).await;
    let store = behind(&proxy, Patience::default()).await;
    let (place, _) = open(&store, "log", RW).await.unwrap();
    // Neither side is told that they are lost.
    proxy.freeze();
    let append = vec![Write::Append { place, data: Bytes::from_static(b"two") }];
    let (written, found) = tokio::time::timeout(PATIENCE, async {
        let caller = me();
        tokio::join!(store.write(&caller, append), content(&store, place))
    })
    .await
    .expect("in time");
    assert!(written.unwrap()[0].is_ok());
    assert!(found.unwrap().0.starts_with(b"one "));
    assert_eq!(fs::read(site.path("log")).unwrap(), b"one two");
    assert_eq!(store.state().reconnects, 1);
}

#[tokio::test]
async fn open_files_and_locks_survive_a_broken_connection() {
    let site = Site::new().await;
    fs::write(site.path("a"), "before").unwrap();
    let proxy = Proxy::to(site.address).await;
    let store = behind(&proxy, Patience::default()).await;
    let (place, _) = open(&store, "a", RW).await.unwrap();
    let lock =
        Op::Lock { place, owner: 0, lock: Lock::Whole(Some(Access::Exclusive)), wait: Wait::No };
    call(&store, lock).await.unwrap();
    fs::remove_file(site.path("a")).unwrap();
    proxy.cut();
    // Reached by its handle alone.
    write(&store, place, 0, b"after!".to_vec()).await.unwrap();
    assert_eq!(content(&store, place).await.unwrap().0, b"after!");
    let other = site.remote().await;
    let refused = open(&other, "a", OpenFlags::READ).await;
    assert_eq!(refused.unwrap_err(), Errno::ENOENT);
    store.close().await;
}

#[tokio::test]
async fn a_session_that_says_goodbye_gives_its_locks_back_at_once() {
    let site = Site::new().await;
    fs::write(site.path("a"), "").unwrap();
    let (one, two) = (site.remote().await, site.remote().await);
    let lock = |place, wait| Op::Lock {
        place,
        owner: 0,
        lock: Lock::Whole(Some(Access::Exclusive)),
        wait,
    };
    let (mine, _) = open(&one, "a", RW).await.unwrap();
    let (theirs, _) = open(&two, "a", RW).await.unwrap();
    call(&one, lock(mine, Wait::No)).await.unwrap();
    assert_eq!(call(&two, lock(theirs, Wait::No)).await, Err(Errno::EAGAIN));
    let (waited, ()) = tokio::join!(call(&two, lock(theirs, Wait::Yes)), one.close());
    waited.unwrap();
}

#[tokio::test]
async fn without_the_executor_operations_end_after_the_deadline() {
    let site = Site::new().await;
    let proxy = Proxy::to(site.address).await;
    let deadline = Duration::from_millis(1500);
    let store = behind(&proxy, Patience { deadline: Some(deadline) }).await;
    let place = Place::from(store.root());
    assert!(call(&store, Op::Attributes(place)).await.is_ok());
    proxy.let_through(false);
    let began = Instant::now();
    assert_eq!(call(&store, Op::Attributes(place)).await, Err(Errno::ETIMEDOUT));
    let pieces = content(&store, place).await;
    assert_eq!(pieces.unwrap_err(), Errno::ETIMEDOUT);
    assert_eq!(write(&store, place, 0, b"x".to_vec()).await, Err(Errno::ETIMEDOUT));
    assert!(began.elapsed() < PATIENCE / 2, "{:?}", began.elapsed());
    proxy.let_through(true);
    let patient = async {
        while call(&store, Op::Attributes(place)).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, patient).await.expect("it is back");
}

#[tokio::test]
async fn leases_end_by_time_when_the_connection_is_gone() {
    let site = Site::new().await;
    fs::write(site.path("a"), "one").unwrap();
    let proxy = Proxy::to(site.address).await;
    let (holder, writer) = (behind(&proxy, Patience::default()).await, site.remote().await);
    let mut notices = holder.notices();
    let (_, entry) = open(&holder, "a", OpenFlags::READ).await.unwrap();
    assert!(entry.leases.contains(Leases::DATA), "{entry:?}");
    proxy.let_through(false);
    let (place, _) = open(&writer, "a", OpenFlags::WRITE).await.unwrap();
    let written = write(&writer, place, 0, b"two".to_vec()).await;
    // The writer has waited until the holder's lease has expired.
    assert!(written.is_ok());
    assert!(holder.valid_until() <= Instant::now());
    proxy.let_through(true);
    let notice =
        tokio::time::timeout(PATIENCE, tokio_stream::StreamExt::next(&mut notices)).await.unwrap();
    assert!(matches!(notice, Some(Notice::Lost { .. })), "{notice:?}");
}

#[tokio::test]
async fn who_takes_a_session_up_hears_when_it_has_heard_all() {
    let site = Site::new().await;
    let proxy = Proxy::to(site.address).await;
    let store = behind(&proxy, Patience::default()).await;
    let mut notices = store.notices();
    let mut last = Stamp(0);
    for _ in 0..3 {
        let entry = find(&store, "").await.unwrap();
        proxy.cut();
        loop {
            let notice =
                tokio::time::timeout(PATIENCE, tokio_stream::StreamExt::next(&mut notices))
                    .await
                    .unwrap();
            let Some(Notice::All { stamp }) = notice else { panic!("{notice:?}") };
            assert!(stamp >= last);
            last = stamp;
            // A late one may be of the connection before.
            if stamp >= entry.stamp {
                break;
            }
        }
    }
}

#[tokio::test]
async fn only_what_is_exported_is_served() {
    let site = Site::new().await;
    let refused = Remote::open(Arc::new(Direct(site.address)), "other", Patience::default()).await;
    assert!(refused.unwrap_err().to_string().contains("no export `other`"));
}

/// The name is as long as gRPC allows; the error message must be shorter, since HTTP/2 ends
/// connections with such headers.
#[tokio::test]
async fn a_refusal_of_something_long_leaves_the_connection_as_it_was() {
    let site = Site::new().await;
    let channel = Direct(site.address).connect().await.unwrap();
    let refused =
        Remote::open(Arc::new(Same(channel.clone())), &"long".repeat(10_000), Patience::default())
            .await;
    assert!(refused.unwrap_err().to_string().contains("no export `longlong"));
    let store = Remote::open(Arc::new(Same(channel)), EXPORT, Patience::default()).await.unwrap();
    assert_eq!(store.state().reconnects, 0);
}

/// One connection for all.
struct Same(Channel);

#[async_trait::async_trait]
impl Connector for Same {
    async fn connect(&self) -> Result<Channel, CannotConnect> {
        Ok(self.0.clone())
    }
}

/// Two executors, whose exports have a file of one name.
async fn two_sites() -> (Site, Site) {
    let sites = (Site::new().await, Site::new().await);
    for site in [&sites.0, &sites.1] {
        fs::write(site.path("a"), "x").unwrap();
    }
    sites
}

#[tokio::test]
async fn after_another_executor_has_taken_over_nothing_old_is_believed() {
    let (first, second) = two_sites().await;
    let proxy = Proxy::to(first.address).await;
    let store = behind(&proxy, Patience::default()).await;
    let mut notices = store.notices();
    let (place, before) = open(&store, "a", RW).await.unwrap();
    proxy.lead_to(second.address);
    let change = Op::MakeDirectory { parent: store.root(), name: "d".into(), mode: 0o700.into() };
    let notice =
        tokio::time::timeout(PATIENCE, tokio_stream::StreamExt::next(&mut notices)).await.unwrap();
    assert!(matches!(notice, Some(Notice::Lost { stamp }) if stamp > before.stamp), "{notice:?}");
    // Handles of the first mean nothing to the second, until they are looked up again.
    assert_eq!(call(&store, Op::Attributes(place)).await, Err(Errno::ESTALE));
    let _ = call(&store, change).await;
    assert!(!first.path("d").exists());
    assert!(find(&store, "a").await.unwrap().stamp > before.stamp);
}

/// A hello whose welcome is lost opens a session that its workstation never has: the next hello
/// must not take that for the workstation's former one.
#[tokio::test]
async fn a_session_that_a_lost_hello_has_opened_is_a_new_one() {
    let (first, second) = two_sites().await;
    let proxy = Proxy::to(first.address).await;
    let store = behind(&proxy, Patience::default()).await;
    let mut notices = store.notices();
    let (place, before) = open(&store, "a", RW).await.unwrap();
    proxy.let_through(false);
    let session = store.session();
    let hello = Hello {
        protocol: PROTOCOL_VERSION,
        session,
        export: EXPORT.to_owned(),
        ..Hello::default()
    };
    let (sender, messages) = tokio::sync::mpsc::channel(1);
    sender.send(ToVolume { kind: Some(to_volume::Kind::Hello(hello)) }).await.unwrap();
    let mut client = VolumeClient::new(Direct(second.address).connect().await.unwrap());
    let mut answers = client.session(ReceiverStream::new(messages)).await.unwrap().into_inner();
    assert!(
        answers.message().await.unwrap().is_some(),
        "a welcome, which its workstation never gets"
    );
    proxy.lead_to(second.address);
    proxy.let_through(true);
    let notice =
        tokio::time::timeout(PATIENCE, tokio_stream::StreamExt::next(&mut notices)).await.unwrap();
    assert!(matches!(notice, Some(Notice::Lost { stamp }) if stamp > before.stamp), "{notice:?}");
    // The handle is one of the former session, and the file is opened again for it.
    find(&store, "a").await.unwrap();
    let write = Write::At { place, offset: 0, data: "y".into() };
    let written = tokio::time::timeout(PATIENCE, store.write(&me(), vec![write])).await.unwrap();
    assert_eq!(written, Err(Errno::ESTALE), "it is another file");
    let (place, _) = open(&store, "a", RW).await.unwrap();
    let write = Write::At { place, offset: 0, data: "y".into() };
    assert!(matches!(store.write(&me(), vec![write]).await.unwrap()[..], [Ok(_)]));
    assert_eq!(fs::read(second.path("a")).unwrap(), b"y");
}
