//! Cost of one identity's leases for another identity.

use super::*;
use crate::store::FileId;

const LEASED: u64 = 100_000;
const FLUSHES: usize = 400;
/// Measured in a release build, on two cores with other work: 1 to 4 ms under recalls, 24 to 90 ms
/// under answers that come in a loop without any pause (how much of it is the wait for a core is
/// not known). In a debug build beside other tests up to 1.5 s were seen; without steps it would be
/// minutes.
const LONGEST: Duration = Duration::from_secs(3);

fn file(number: u64) -> FileRef {
    FileRef {
        key: File { system: 1, generation: number },
        id: FileId { inode: number, generation: number },
    }
}

/// An op as another identity's sessions make it, on another export, until `until`; the longest took
/// so long.
async fn longest_op(
    keeper: &Arc<Keeper>,
    session: SessionId,
    until: impl Fn(usize) -> bool,
) -> Duration {
    let (mut longest, mut count) = (Duration::ZERO, 0);
    while !until(count) {
        let (own, began) = (file(u64::MAX), crate::clock::now());
        let mut begun = keeper.begin(session, &[(own, Intent::Change(Leases::DATA))]);
        assert!(begun.is_clear());
        begun.clear().await;
        let _ = keeper.table().grant(session, own, Leases::DATA, crate::clock::now());
        begun.finish();
        longest = longest.max(began.elapsed());
        count += 1;
        tokio::task::yield_now().await;
    }
    longest
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_identity_with_many_leases_and_flushes_holds_up_no_other() {
    let keeper = Arc::new(Keeper::default());
    let open = |owner, tree: &str| {
        keeper.table().open_session_of(owner, Path::new(tree), crate::clock::now())
    };
    let (ada, adas, bob) = (open("ada", "/a"), open("ada", "/a"), open("bob", "/b"));
    for number in 0..LEASED {
        let granted = keeper.table().grant(ada, file(number), Leases::WRITE, crate::clock::now()).0;
        assert_eq!(granted, Leases::WRITE);
        if number % 10_000 == 0 {
            keeper.table().renew(ada, crate::clock::now());
            keeper.table().renew(bob, crate::clock::now());
        }
    }
    let flushes = (0..FLUSHES).map(|_| {
        let keeper = keeper.clone();
        tokio::spawn(async move {
            keeper.flush("ada", Some(adas), |_| true, crate::leases::FLUSH_TIME).await
        })
    });
    let flushes: Vec<_> = flushes.collect();
    let recalling = longest_op(&keeper, bob, |count| count >= 1000).await;
    keeper.table().renew(ada, crate::clock::now());
    keeper.table().renew(bob, crate::clock::now());
    // It answers one after the other, as it was asked.
    let its = keeper.clone();
    let answers = tokio::task::spawn_blocking(move || {
        (0..LEASED)
            .for_each(|number| its.returned(ada, file(number).key, Leases::WRITE, Stamp(u64::MAX)));
    });
    let answering = longest_op(&keeper, bob, |_| answers.is_finished()).await;
    for flush in flushes {
        tokio::time::timeout(Duration::from_secs(20), flush)
            .await
            .expect("all is answered")
            .expect("no panic");
    }
    println!(
        "the longest op of another identity: {recalling:?} under recalls, {answering:?} under answers"
    );
    assert!(recalling < LONGEST && answering < LONGEST, "{recalling:?}, {answering:?}");
}

/// The end of a session isn't done in steps; it costs O(1) per lease, once.
#[tokio::test]
async fn a_session_ends_in_time_with_all_that_it_has() {
    let keeper = Arc::new(Keeper::default());
    let ada = keeper.table().open_session_of("ada", Path::new("/a"), crate::clock::now());
    let now = crate::clock::now();
    (0..LEASED).for_each(|number| {
        let _ = keeper.table().grant(ada, file(number), Leases::WRITE, now);
    });
    let began = crate::clock::now();
    keeper.end_session(ada);
    let took = began.elapsed();
    println!("the end of {LEASED} leases: {took:?}");
    assert!(took < LONGEST * 5, "{took:?}");
    assert_eq!(keeper.table().size(), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn changes_and_flushes_go_on_as_soon_as_former_holders_are_back() {
    let former = |name: &str| Former { name: name.to_owned(), tree: "/a".into() };
    let keeper = Arc::new(Keeper::after([former("ada"), former("bob")]));
    let open = |name: &str| {
        let session = keeper.open_session(name, Path::new("/a"));
        keeper.table().name(session, name);
        session
    };
    let (ada, bob) = (open("ada"), open("bob"));
    let began = crate::clock::now();
    let waits = [ada, bob].map(|session| {
        let keeper = keeper.clone();
        tokio::spawn(async move {
            keeper.begin(session, &[(file(1), Intent::Change(Leases::DATA))]).clear().await;
            crate::clock::now() - began
        })
    });
    let flush = tokio::spawn({
        let keeper = keeper.clone();
        async move {
            keeper.flush("eve", None, |tree| tree.starts_with("/a"), crate::leases::RUN_TIME).await;
            crate::clock::now() - began
        }
    });
    tokio::time::sleep(Duration::from_secs(2)).await;
    let lost = keeper.table().missed(ada).0;
    keeper.forgotten(ada, lost);
    tokio::time::sleep(Duration::from_secs(1)).await;
    keeper.table().renew(ada, crate::clock::now());
    keeper.table().renew(bob, crate::clock::now());
    let [adas, bobs] = waits;
    assert_eq!(bobs.await.unwrap().as_secs(), 2);
    // Bob says nothing.
    assert_eq!(adas.await.unwrap().as_secs(), 10);
    assert_eq!(flush.await.unwrap().as_secs(), 10);
}
