//! The store over a directory: what it does to files, whom it tells, and that it stays inside.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::{
    ffi::OsString,
    fs,
    io::BufRead as _,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use nix::mount::MsFlags;
use posh_volume::{
    Errno, Store,
    directory::{
        Account, Directory, DirectorySession, EFFECTS, EffectMark, Effects, Liveness, Machine,
        Mutability, Pool, Rights, WriteRoom,
    },
    store::*,
};
use tokio_stream::StreamExt as _;

/// For what comes at once or never.
const SOON: Duration = Duration::from_secs(5);

struct Site {
    top: tempfile::TempDir,
    machine: Arc<Machine>,
    directory: Arc<Directory>,
}

impl Site {
    fn new() -> Self {
        let top = tempfile::tempdir().unwrap();
        fs::create_dir(top.path().join("export")).unwrap();
        let machine = Machine::start().unwrap();
        let path = top.path().join("export");
        let directory =
            Directory::open(machine.clone(), &path, Rights::Own, Mutability::ReadWrite).unwrap();
        Self { top, machine, directory }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.top.path().join("export").join(name)
    }

    fn session(&self) -> DirectorySession {
        DirectorySession::open(self.directory.clone(), Liveness::Own)
    }
}

fn me() -> Caller {
    Caller::default()
}

async fn call(store: &dyn Store, op: Op) -> Result<Answer, Errno> {
    tokio::time::timeout(Duration::from_secs(30), store.call(&me(), op)).await.expect("an answer")
}

async fn walk(store: &dyn Store, path: &str) -> Walked {
    let names = Path::new(path).iter().map(OsString::from).collect();
    match call(store, Op::Walk { from: store.root(), names }).await.unwrap() {
        Answer::Walked(walked) => walked,
        other => panic!("{other:?}"),
    }
}

async fn find(store: &dyn Store, path: &str) -> Entry {
    let walked = walk(store, path).await;
    assert_eq!(walked.error, None, "{path}");
    walked.entries.last().copied().unwrap_or(walked.from)
}

async fn open(store: &dyn Store, path: &str, flags: OpenFlags) -> (Place, Entry) {
    let file = find(store, path).await.attributes.id;
    match call(store, Op::Open { place: file.into(), flags }).await.unwrap() {
        Answer::Opened { handle, entry, .. } => (Place { file, handle: Some(handle) }, entry),
        other => panic!("{other:?}"),
    }
}

async fn create(store: &dyn Store, name: &str, flags: OpenFlags) -> Place {
    let op = Op::Create { parent: store.root(), name: name.into(), mode: 0o640.into(), flags };
    match call(store, op).await.unwrap() {
        Answer::Opened { handle, entry, .. } => {
            Place { file: entry.attributes.id, handle: Some(handle) }
        }
        other => panic!("{other:?}"),
    }
}

async fn content(store: &dyn Store, place: Place) -> Result<Vec<u8>, Errno> {
    let mut pieces = store.read(&me(), vec![ReadPart { place, range: 0..u64::MAX }]).await;
    let mut content = Vec::new();
    while let Some(piece) = pieces.next().await {
        content.extend_from_slice(&piece?.data?);
    }
    Ok(content)
}

async fn put(store: &dyn Store, place: Place, offset: u64, data: &'static [u8]) -> Entry {
    let write = Write::At { place, offset, data: Bytes::from_static(data) };
    store.write(&me(), vec![write]).await.unwrap().remove(0).unwrap()
}

const RW: OpenFlags = OpenFlags::READ.union(OpenFlags::WRITE);

/// A process that ends with its test.
struct Helper(std::process::Child);

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// fcntl(2), F_SETLEASE: open(2) of a leased file waits until the lease is given up.
#[tokio::test]
async fn files_that_a_program_of_the_server_has_leased_hold_up_no_others_and_are_opened_when_it_gives_them_up()
 {
    let site = Site::new();
    let session = Arc::new(site.session());
    for name in ["f", "other"] {
        fs::write(site.path(name), "text").unwrap();
    }
    let lessee = r#"
        $| = 1; open(F, "+<", $ARGV[0]) or die; fcntl(F, 1024, 1) or die "lease: $!";
        $SIG{IO} = sub { print "asked\n" };
        print "leased\n"; until (defined($line = <STDIN>)) { }"#;
    let mut command = Command::new("perl");
    command.args(["-e", lessee]).arg(site.path("f")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut lessee = Helper(command.spawn().unwrap());
    let mut said =
        std::io::BufReader::new(lessee.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(said.next().unwrap(), "leased");
    // More than there are threads.
    let opened = || {
        let session = session.clone();
        tokio::spawn(async move { open(&*session, "f", OpenFlags::READ).await.0 })
    };
    let opened: Vec<_> = (0..40).map(|_| opened()).collect();
    tokio::task::spawn_blocking(move || assert_eq!(said.next().unwrap(), "asked")).await.unwrap();
    for _ in 0..3 {
        tokio::time::timeout(SOON, open(&*session, "other", OpenFlags::READ))
            .await
            .expect("not held up");
    }
    assert!(opened.iter().all(|opened| !opened.is_finished()));
    drop(lessee);
    for place in opened {
        let place = tokio::time::timeout(SOON, place).await.expect("opened at last").unwrap();
        call(&*session, Op::Close(place.handle.unwrap())).await.unwrap();
    }
}

#[tokio::test]
async fn a_file_is_made_written_read_and_removed_while_open() {
    let site = Site::new();
    let store = site.session();
    let place = create(&store, "a", RW).await;
    let entry = put(&store, place, 3, b"hello").await;
    assert_eq!(entry.attributes.size, 8);
    assert_eq!(fs::read(site.path("a")).unwrap(), b"\0\0\0hello");
    assert_eq!(fs::metadata(site.path("a")).unwrap().mode() & 0o7777, 0o640);
    let op = Op::Remove { parent: store.root(), name: "a".into(), what: Removal::File };
    let Answer::Removed { file: Some(file), .. } = call(&store, op).await.unwrap() else {
        panic!("it is open")
    };
    assert_eq!(file.attributes.links, 0);
    assert_eq!(content(&store, place).await.unwrap(), b"\0\0\0hello");
    assert_eq!(walk(&store, "a").await.error, Some(Errno::ENOENT));
    call(&store, Op::Close(place.handle.unwrap())).await.unwrap();
    assert_eq!(call(&store, Op::Attributes(place)).await, Err(Errno::ESTALE));
}

/// Whatever is looked at is kept open for a while, but for what has no name any more.
#[tokio::test]
async fn what_is_removed_is_not_kept_open() {
    let site = Site::new();
    let store = site.session();
    fs::create_dir(site.path("d")).unwrap();
    for name in ["a", "b", "d/c", "kept"] {
        fs::write(site.path(name), "x").unwrap();
        find(&store, name).await;
    }
    let open = || {
        let fds = fs::read_dir("/proc/self/fd")
            .unwrap()
            .filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
        let removed = |path: &Path| {
            path.starts_with(site.top.path()) && path.to_string_lossy().ends_with(" (deleted)")
        };
        fds.filter(|path| removed(path)).count()
    };
    let remove = Op::Remove { parent: store.root(), name: "a".into(), what: Removal::File };
    call(&store, remove).await.unwrap();
    assert_eq!(open(), 0);
    let rename = Op::Rename {
        parent: store.root(),
        name: "kept".into(),
        new_parent: store.root(),
        new_name: "b".into(),
        how: Renaming::Replace,
    };
    call(&store, rename).await.unwrap();
    assert_eq!(open(), 0);
    // By another program.
    fs::remove_dir_all(site.path("d")).unwrap();
    assert_eq!(open(), 2);
    site.directory.close_removed();
    assert_eq!(open(), 0);
    assert_eq!(find(&store, "b").await.attributes.links, 1);
}

/// Number of this process's open files below `top`.
fn open_below(top: &Path) -> usize {
    let open = fs::read_dir("/proc/self/fd").unwrap();
    let targets = open.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    targets.filter(|target| target.starts_with(top)).count()
}

#[tokio::test]
async fn all_exports_together_have_so_many_files_open() {
    const MOST: usize = 60;
    let top = tempfile::tempdir().unwrap();
    let machine = Machine::start_with(Arc::default(), Arc::default(), MOST).unwrap();
    let sessions = ["one", "other"].map(|name| {
        let path = top.path().join(name);
        fs::create_dir(&path).unwrap();
        (0..100).for_each(|number| fs::write(path.join(number.to_string()), "").unwrap());
        let directory =
            Directory::open(machine.clone(), &path, Rights::Own, Mutability::ReadWrite).unwrap();
        DirectorySession::open(directory, Liveness::Own)
    });
    let roots = open_below(top.path());
    for session in &sessions {
        for number in 0..100 {
            find(session, &number.to_string()).await;
        }
    }
    let walked = open_below(top.path()) - roots;
    assert!((5..=MOST / 3).contains(&walked), "{walked} for directories and files on the way");
    let mut opened = Vec::new();
    let refused = loop {
        let file = find(&sessions[0], "7").await.attributes.id;
        match call(&sessions[0], Op::Open { place: file.into(), flags: RW }).await {
            Ok(answer) => opened.push(answer),
            Err(errno) => break errno,
        }
        assert!(opened.len() <= MOST);
    };
    assert_eq!(refused, Errno::EMFILE);
    // One account may have as much as it leaves to others.
    assert!((5..=MOST / 3).contains(&opened.len()), "{} opened", opened.len());
    assert!(open_below(top.path()) - roots <= 2 * MOST / 3);
}

#[test]
fn a_mount_over_an_export_is_another_directory() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let in_private = || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
        let none = None::<&str>;
        let mount = |source: Option<&Path>, at: &Path, flags| {
            nix::mount::mount(source, at, none, flags, none).unwrap();
        };
        mount(None, Path::new("/"), MsFlags::MS_REC | MsFlags::MS_PRIVATE);
        let site = Site::new();
        let path = site.path("");
        assert!(site.directory.is_at(&path));
        mount(Some(&path), &path, MsFlags::MS_BIND);
        let reopened =
            Directory::open(site.machine.clone(), &path, Rights::Own, Mutability::ReadWrite)
                .unwrap();
        (site.directory.is_at(&path), site.directory.is_same(&reopened), reopened.is_at(&path))
    };
    assert_eq!(std::thread::spawn(in_private).join().unwrap(), (false, false, true));
}

/// Makes a file append-only, or any other (chattr(1)).
fn set_append_only(path: &Path, flag: &str) {
    assert!(Command::new("chattr").arg(flag).arg(path).status().unwrap().success());
}

#[tokio::test]
async fn a_file_that_can_only_be_appended_to_is_appended_to() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let site = Site::new();
    let path = site.path("log");
    fs::write(&path, "1\n").unwrap();
    set_append_only(&path, "+a");
    let store = site.session();
    let write = async |write| store.write(&me(), vec![write]).await.unwrap().remove(0).err();
    let file = find(&store, "log").await.attributes.id;
    let refused = call(&store, Op::Open { place: file.into(), flags: RW }).await;
    let (place, _) = open(&store, "log", RW | OpenFlags::APPEND).await;
    let line = Bytes::from_static(b"2\n");
    let data = || line.clone();
    let found = [
        write(Write::Append { place, data: data() }).await,
        write(Write::Append { place: file.into(), data: data() }).await,
        // fcntl(2) can't take O_APPEND away from such a file, and it can't be mapped for writing.
        write(Write::At { place, offset: 0, data: data() }).await,
        write(Write::At { place: file.into(), offset: 0, data: data() }).await,
    ];
    let content = fs::read(&path).unwrap();
    set_append_only(&path, "-a");
    assert_eq!(refused, Err(Errno::EPERM));
    assert_eq!(found, [None, None, Some(Errno::EPERM), Some(Errno::EPERM)]);
    assert_eq!(content, b"1\n2\n2\n");
}

#[tokio::test]
async fn a_file_that_was_opened_for_appending_is_written_where_each_write_says() {
    let site = Site::new();
    fs::write(site.path("f"), "abc").unwrap();
    let store = site.session();
    let (place, _) = open(&store, "f", RW | OpenFlags::APPEND).await;
    put(&store, place, 1, b"X").await;
    let append = Write::Append { place, data: Bytes::from_static(b"d") };
    assert!(store.write(&me(), vec![append]).await.unwrap()[0].is_ok());
    assert_eq!(fs::read(site.path("f")).unwrap(), b"aXcd");
}

#[tokio::test]
async fn nothing_leads_out_of_the_export() {
    let site = Site::new();
    fs::write(site.top.path().join("secret"), "x").unwrap();
    symlink("../secret", site.path("link")).unwrap();
    symlink("..", site.path("up")).unwrap();
    let store = site.session();
    for names in [
        vec![".."],
        vec!["up", "secret"],
        vec!["link", "x"],
        vec!["a/../../secret"],
        vec![""],
        vec!["."],
    ] {
        let names: Vec<OsString> = names.into_iter().map(OsString::from).collect();
        let Answer::Walked(walked) =
            call(&store, Op::Walk { from: store.root(), names }).await.unwrap()
        else {
            panic!("walked")
        };
        assert!(walked.error.is_some(), "{walked:?}");
        assert!(
            walked.entries.iter().all(|entry| entry.attributes.kind == Kind::Symlink),
            "{walked:?}"
        );
    }
    let link = find(&store, "link").await.attributes.id;
    assert_eq!(
        call(&store, Op::Open { place: link.into(), flags: OpenFlags::READ }).await,
        Err(Errno::ELOOP)
    );
    assert_eq!(content(&store, link.into()).await, Err(Errno::ELOOP));
    let op = Op::Create {
        parent: store.root(),
        name: "link".into(),
        mode: 0o600.into(),
        flags: RW | OpenFlags::TRUNCATE,
    };
    assert_eq!(call(&store, op).await, Err(Errno::ELOOP));
    for path in [
        vec!["up".into(), "new".into()],
        vec!["..".into(), "new".into()],
        vec!["link".into()],
        vec![],
    ] {
        let what = NewFile::Regular { data: Bytes::from_static(b"y") };
        let put =
            Put { directory: store.root(), path, what, mode: 0o600, changes: Changes::default() };
        assert!(store.write(&me(), vec![Write::Put(put)]).await.unwrap()[0].is_err());
    }
    assert_eq!(fs::read(site.top.path().join("secret")).unwrap(), b"x");
    assert_eq!(fs::read_dir(site.top.path()).unwrap().count(), 2);
    // An id that was never given out is no way in, also where its file exists.
    let outside = fs::metadata(site.top.path().join("secret")).unwrap().ino();
    let guessed = FileId { inode: outside, generation: 1 };
    assert_eq!(call(&store, Op::Attributes(guessed.into())).await, Err(Errno::ESTALE));
}

#[tokio::test]
async fn a_directory_that_becomes_a_link_leads_nowhere() {
    const ATTEMPTS: usize = 400;
    let site = Site::new();
    fs::write(site.top.path().join("secret"), "x").unwrap();
    fs::create_dir(site.path("d")).unwrap();
    symlink("..", site.path("l")).unwrap();
    let store = site.session();
    let (first, second) = (site.path("d"), site.path("l"));
    let is_over = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let its = is_over.clone();
    let swapping = std::thread::spawn(move || {
        let here = rustix::fs::CWD;
        while !its.load(std::sync::atomic::Ordering::Relaxed) {
            rustix::fs::renameat_with(
                here,
                &first,
                here,
                &second,
                rustix::fs::RenameFlags::EXCHANGE,
            )
            .unwrap();
        }
    });
    let (mut links, mut made) = (0, 0);
    for number in 0..ATTEMPTS {
        let names = vec!["d".into(), "secret".into()];
        let Answer::Walked(walked) =
            call(&store, Op::Walk { from: store.root(), names }).await.unwrap()
        else {
            panic!("walked")
        };
        assert_eq!(walked.entries.len(), 1, "{walked:?}");
        links += usize::from(walked.entries[0].attributes.kind == Kind::Symlink);
        let path = vec!["d".into(), format!("new{number}").into()];
        let what = NewFile::Regular { data: Bytes::new() };
        let put =
            Put { directory: store.root(), path, what, mode: 0o600, changes: Changes::default() };
        made += usize::from(store.write(&me(), vec![Write::Put(put)]).await.unwrap()[0].is_ok());
    }
    is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    swapping.join().unwrap();
    assert!(links > 0 && made > 0, "one of the two was never there: {links} links, {made} files");
    assert_eq!(fs::read_dir(site.top.path()).unwrap().count(), 2, "something was made outside");
}

/// A failed creation leaves nothing.
#[tokio::test]
async fn what_can_not_be_made_whole_is_not_made() {
    let site = Site::new();
    let store = site.session();
    let kinds = [
        NewFile::Directory,
        NewFile::Symlink { target: "x".into() },
        NewFile::Regular { data: Bytes::new() },
    ];
    for what in kinds {
        // Neither a directory nor a link has a size that can be set, and no file one of 2^63.
        let changes = Changes { size: Some(1 << 63), ..Changes::default() };
        let put = Put {
            directory: store.root(),
            path: vec!["new".into()],
            what: what.clone(),
            mode: 0o700,
            changes,
        };
        assert!(store.write(&me(), vec![Write::Put(put)]).await.unwrap()[0].is_err(), "{what:?}");
        assert!(site.path("new").symlink_metadata().is_err(), "{what:?} is left");
    }
}

#[tokio::test]
async fn a_directory_that_was_moved_out_is_not_reached_any_more() {
    let site = Site::new();
    fs::create_dir_all(site.path("d/below")).unwrap();
    let store = site.session();
    let below = find(&store, "d/below").await.attributes.id;
    fs::rename(site.path("d"), site.top.path().join("elsewhere")).unwrap();
    let op = Op::MakeDirectory { parent: below, name: "new".into(), mode: 0o700.into() };
    assert_eq!(call(&store, op).await, Err(Errno::ESTALE));
    assert_eq!(fs::read_dir(site.top.path().join("elsewhere/below")).unwrap().count(), 0);
}

async fn next(notices: &mut Notices) -> Notice {
    tokio::time::timeout(SOON, notices.next()).await.expect("a notice").unwrap()
}

#[tokio::test]
async fn a_change_waits_until_the_other_session_has_forgotten() {
    let site = Site::new();
    fs::write(site.path("a"), "one").unwrap();
    let (reader, writer) = (site.session(), site.session());
    let mut notices = reader.notices();
    let (read, entry) = open(&reader, "a", OpenFlags::READ).await;
    assert!(entry.leases.contains(Leases::DATA | Leases::ATTRIBUTES));
    let (written, entry) = open(&writer, "a", OpenFlags::WRITE).await;
    assert!(!entry.leases.contains(Leases::WRITE), "another has a lease");
    let write = put(&writer, written, 0, b"two");
    tokio::pin!(write);
    let notice = tokio::select! {
        notice = next(&mut notices) => notice,
        _ = &mut write => panic!("nobody has answered"),
    };
    let Notice::Recall { file, leases, stamp } = notice else { panic!("{notice:?}") };
    assert_eq!(file, read.file);
    assert_eq!(fs::read(site.path("a")).unwrap(), b"one");
    call(&reader, Op::Return(vec![Returned { file, leases, stamp }])).await.unwrap();
    let entry = write.await;
    assert!(entry.stamp > stamp);
    assert_eq!(content(&reader, read).await.unwrap(), b"two");
}

/// One worker would be enough to hang for ever, were its end asked for again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_notices_of_an_ended_session_end_though_somebody_still_has_it() {
    let site = Site::new();
    let session = site.session();
    let mut notices = session.notices();
    session.end();
    assert_eq!(tokio::time::timeout(SOON, notices.next()).await.expect("an end"), None);
    drop(session);
}

#[tokio::test]
async fn what_is_held_back_is_written_before_another_session_looks() {
    let site = Site::new();
    let (holder, other) = (site.session(), site.session());
    let mut notices = holder.notices();
    let place = create(&holder, "a", RW).await;
    call(&holder, Op::Close(place.handle.unwrap())).await.unwrap();
    let (place, entry) = open(&holder, "a", RW).await;
    assert!(entry.leases.contains(Leases::WRITE));
    let look = find(&other, "a");
    tokio::pin!(look);
    let notice = tokio::select! {
        notice = next(&mut notices) => notice,
        _ = &mut look => panic!("nobody has answered"),
    };
    let Notice::Recall { file, leases, stamp } = notice else { panic!("{notice:?}") };
    assert_eq!((file, leases), (place.file, Leases::WRITE));
    put(&holder, place, 0, b"late").await;
    call(&holder, Op::Return(vec![Returned { file, leases, stamp }])).await.unwrap();
    assert_eq!(look.await.attributes.size, 4);
}

/// pwritev2(2) takes -1 for the present position.
#[tokio::test]
async fn offsets_that_no_file_has_are_refused() {
    let site = Site::new();
    let session = site.session();
    let place = create(&session, "f", RW).await;
    for offset in [u64::MAX, u64::MAX - 2, 1 << 63, i64::MAX as u64] {
        let write = Write::At { place, offset, data: Bytes::from_static(b"xx") };
        assert_eq!(session.write(&me(), vec![write]).await.unwrap_err(), Errno::EINVAL, "{offset}");
        let mut pieces =
            session.read(&me(), vec![ReadPart { place, range: offset..u64::MAX }]).await;
        let piece = pieces.next().await.unwrap();
        let is_refused = piece.is_err() || piece.is_ok_and(|piece| piece.data.is_err());
        assert!(is_refused || offset == i64::MAX as u64, "{offset}");
    }
    assert_eq!(fs::metadata(site.path("f")).unwrap().len(), 0);
}

/// A session that has a right to write, and answers nothing.
async fn silent_holder(site: &Site) -> (DirectorySession, Notices) {
    let holder = site.session();
    let notices = holder.notices();
    let place = create(&holder, "held", RW).await;
    call(&holder, Op::Close(place.handle.unwrap())).await.unwrap();
    assert!(open(&holder, "held", RW).await.1.leases.contains(Leases::WRITE));
    (holder, notices)
}

fn settling(
    session: &DirectorySession,
    how: Settling,
) -> tokio::task::JoinHandle<Result<Answer, Errno>> {
    let session = session.clone();
    tokio::spawn(async move { call(&session, Op::Settle(how)).await })
}

#[tokio::test]
async fn flushes_of_an_account_are_few_at_a_time_and_hold_up_no_other() {
    let (site, ada, bob) = (Site::new(), Account::named("ada"), Account::named("bob"));
    let (holder, _unanswered) = silent_holder(&site).await;
    let other = tempfile::tempdir().unwrap();
    let other =
        Directory::open(site.machine.clone(), other.path(), Rights::Own, Mutability::ReadWrite)
            .unwrap();
    let of = |account: &Arc<Account>, directory: &Arc<Directory>| {
        DirectorySession::open_for(account.clone(), directory.clone(), Liveness::Own)
    };
    let sessions = [&site.directory, &site.directory, &other].map(|directory| of(&ada, directory));
    // The third has nobody to wait for but the first two.
    let settles = sessions.each_ref().map(|session| settling(session, Settling::Flush));
    for _ in 0..20 {
        let bobs = settling(&of(&bob, &other), Settling::Flush);
        tokio::time::timeout(SOON, bobs).await.unwrap().unwrap().unwrap();
    }
    assert!(settles.iter().all(|settle| !settle.is_finished()));
    holder.end();
    for settle in settles {
        tokio::time::timeout(SOON, settle).await.unwrap().unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_session_is_settled_once_at_a_time() {
    let site = Site::new();
    let (holder, _unanswered) = silent_holder(&site).await;
    let (one, other) = (site.session(), site.session());
    let settles = [settling(&one, Settling::Flush), settling(&one, Settling::Recalls)];
    for _ in 0..20 {
        let others = settling(&other, Settling::Recalls);
        tokio::time::timeout(SOON, others).await.unwrap().unwrap().unwrap();
    }
    assert!(settles.iter().all(|settle| !settle.is_finished()));
    holder.end();
    for settle in settles {
        tokio::time::timeout(SOON, settle).await.unwrap().unwrap().unwrap();
    }
}

/// Others of the same account can write what the one that waits waits for.
#[tokio::test]
async fn writes_that_wait_have_a_room_of_their_own() {
    let site = Site::new();
    fs::write(site.path("g"), "old").unwrap();
    let (holder, other) = (site.session(), site.session());
    let unrelated = find(&other, "g").await.attributes.id;
    let _unanswered = holder.notices();
    let place = create(&holder, "f", RW).await;
    call(&holder, Op::Close(place.handle.unwrap())).await.unwrap();
    let (place, entry) = open(&holder, "f", RW).await;
    assert!(entry.leases.contains(Leases::WRITE));
    let theirs = place.file;
    // Of nobody in particular, as the sessions.
    let account = Account::named("");
    let (writes, waiting) = (Pool::new(64, 64), Pool::new(16, 8));
    let room = || WriteRoom {
        charge: writes.try_take(&account, 8).unwrap(),
        waiting: waiting.clone(),
        bytes: 8,
    };
    let write = |store: &DirectorySession, place: Place| {
        let (store, room) = (store.clone(), room());
        let data = Bytes::from_static(b"12345678");
        tokio::spawn(async move {
            store.write_in(&me(), vec![Write::At { place, offset: 0, data }], room).await
        })
    };
    let waits = write(&other, Place { file: theirs, handle: None });
    let one_waits = async {
        while waiting.try_take(&account, 1).is_some() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SOON, one_waits).await.unwrap();
    let refused = write(&other, Place { file: theirs, handle: None }).await.unwrap();
    assert_eq!(refused.unwrap_err(), Errno::EAGAIN);
    assert_eq!(fs::read(site.path("f")).unwrap(), b"");
    assert!(
        write(&other, Place { file: unrelated, handle: None }).await.unwrap().unwrap()[0].is_ok()
    );
    assert!(write(&holder, place).await.unwrap().unwrap()[0].is_ok());
    holder.end();
    assert!(tokio::time::timeout(SOON, waits).await.unwrap().unwrap().unwrap()[0].is_ok());
}

#[tokio::test]
async fn what_other_programs_change_is_recalled() {
    let site = Site::new();
    fs::write(site.path("a"), "one").unwrap();
    fs::create_dir(site.path("d")).unwrap();
    let store = site.session();
    assert_eq!(store.state().watched, Watched::Fanotify, "tests run as root");
    let mut notices = store.notices();
    let changes = [
        ("echo two >> a", "a", Leases::DATA),
        ("chmod 600 a", "a", Leases::ATTRIBUTES),
        ("touch d/new", "d", Leases::ENTRIES),
        ("rm d/new", "d", Leases::ENTRIES),
        ("mv a d/a", ".", Leases::ENTRIES),
        ("mv d/a a", "d", Leases::ENTRIES),
        ("ln a b", "a", Leases::ATTRIBUTES),
    ];
    for (command, path, expected) in changes {
        let id = match path {
            "." => store.root(),
            path => find(&store, path).await.attributes.id,
        };
        let _ = walk(&store, "nothing").await;
        if path == "a" {
            let (place, _) = open(&store, "a", OpenFlags::READ).await;
            call(&store, Op::Close(place.handle.unwrap())).await.unwrap();
        }
        let status =
            Command::new("sh").args(["-c", command]).current_dir(site.path("")).status().unwrap();
        assert!(status.success());
        let mut settled = Box::pin(call(&store, Op::Settle(Settling::Recalls)));
        let mut is_seen = false;
        loop {
            let notice = tokio::select! {
                settled = &mut settled => {
                    assert!(settled.is_ok());
                    assert!(is_seen, "{command}");
                    break;
                }
                notice = next(&mut notices) => notice,
            };
            let Notice::Recall { file, leases, stamp } = notice else { panic!("{command}: lost") };
            call(&store, Op::Return(vec![Returned { file, leases, stamp }])).await.unwrap();
            is_seen |= file == id && leases.intersects(expected);
        }
    }
}

#[tokio::test]
async fn a_lock_that_is_waited_for_no_more_is_not_taken() {
    let site = Site::new();
    fs::write(site.path("a"), "").unwrap();
    let (one, two) = (site.session(), site.session());
    let (mine, _) = open(&one, "a", RW).await;
    let (theirs, _) = open(&two, "a", RW).await;
    let lock = |place, wait| Op::Lock {
        place,
        owner: 0,
        lock: Lock::Whole(Some(Access::Exclusive)),
        wait,
    };
    call(&one, lock(mine, Wait::No)).await.unwrap();
    let mut waiting = Box::pin(call(&two, lock(theirs, Wait::Yes)));
    assert!(futures_poll(&mut waiting).await.is_none());
    drop(waiting);
    call(&one, Op::Close(mine.handle.unwrap())).await.unwrap();
    let (again, _) = open(&one, "a", RW).await;
    call(&one, lock(again, Wait::Yes)).await.unwrap();
}

/// A guest is another local user of the workstation.
#[tokio::test]
async fn guests_that_wait_for_locks_leave_the_owner_room_to_wait() {
    let site = Site::new();
    fs::write(site.path("a"), "").unwrap();
    let (one, two) = (site.session(), site.session());
    let (mine, _) = open(&one, "a", RW).await;
    let (theirs, _) = open(&two, "a", RW).await;
    let exclusive = RangeLock { range: 0..1, access: Some(Access::Exclusive) };
    let lock =
        |place, owner, wait| Op::Lock { place, owner, lock: Lock::Range(exclusive.clone()), wait };
    call(&one, lock(mine, 0, Wait::No)).await.unwrap();
    let guest = Caller { is_guest: true, ..me() };
    let mut waiting: tokio::task::JoinSet<_> = (0..65)
        .map(|owner| (two.clone(), guest.clone(), lock(theirs, owner, Wait::Yes)))
        .map(|(two, guest, op)| async move { two.call(&guest, op).await })
        .collect();
    let refused = tokio::time::timeout(Duration::from_secs(20), waiting.join_next()).await;
    assert_eq!(refused.expect("one too many").unwrap().unwrap(), Err(Errno::ENOLCK));
    let mut own = Box::pin(call(&two, lock(theirs, 1000, Wait::Yes)));
    assert!(futures_poll(&mut own).await.is_none());
}

#[tokio::test]
async fn where_changes_are_not_noticed_settling_recalls_everything() {
    let top = tempfile::tempdir().unwrap();
    fs::write(top.path().join("a"), "one").unwrap();
    let machine = Machine::blind().unwrap();
    let directory =
        Directory::open(machine, top.path(), Rights::Own, Mutability::ReadWrite).unwrap();
    let store = DirectorySession::open(directory, Liveness::Own);
    assert_eq!(store.state().watched, Watched::LeaseEnd);
    assert!(store.lease_limit().is_some());
    let mut notices = store.notices();
    let (place, entry) = open(&store, "a", OpenFlags::READ).await;
    assert!(entry.leases.contains(Leases::DATA));
    let mut settled = Box::pin(call(&store, Op::Settle(Settling::Recalls)));
    let mut recalled = Vec::new();
    loop {
        tokio::select! {
            settled = &mut settled => break assert!(settled.is_ok()),
            notice = next(&mut notices) => {
                let Notice::Recall { file, leases, stamp } = notice else { panic!("lost") };
                recalled.push(file);
                call(&store, Op::Return(vec![Returned { file, leases, stamp }])).await.unwrap();
            }
        }
    }
    assert!(recalled.contains(&place.file) && recalled.contains(&store.root()));
}

#[tokio::test]
async fn a_change_that_is_refused_recalls_nothing() {
    let mut site = Site::new();
    fs::set_permissions(site.top.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for name in ["a", "last"] {
        fs::write(site.path(name), "one").unwrap();
    }
    fs::hard_link(site.path("a"), site.path("again")).unwrap();
    symlink("a", site.path("link")).unwrap();
    nix::unistd::mkfifo(&site.path("pipe"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    let export = site.path("");
    site.directory =
        Directory::open(site.machine.clone(), &export, Rights::Callers, Mutability::ReadWrite)
            .unwrap();
    let (store, other) = (site.session(), site.session());
    let stranger = Caller { uid: 61_001, gid: 61_001, ..Caller::default() };
    let mut notices = store.notices();
    for name in ["pipe", "link", "nothing"] {
        let _ = walk(&store, name).await;
    }
    let (place, entry) = open(&store, "a", OpenFlags::READ).await;
    assert!(entry.leases.contains(Leases::DATA));
    let (last, _) = open(&store, "last", OpenFlags::READ).await;
    let (file, parent) = (Place::from(place.file), store.root());
    let mode = Changes { mode: Some(0o600), ..Changes::default() };
    let shorter = Changes { size: Some(0), ..Changes::default() };
    for op in [
        Op::Set { place: file, changes: mode },
        Op::Set { place: file, changes: shorter },
        Op::Open { place: file.file.into(), flags: OpenFlags::WRITE | OpenFlags::TRUNCATE },
        Op::Allocate { place: file, range: 0..9, how: Allocation::Extend },
        Op::CopyRange {
            from: PositionIn { file, offset: 0 },
            to: PositionIn { file, offset: 9 },
            length: 1,
        },
        Op::Remove { parent, name: "a".into(), what: Removal::File },
        Op::Rename {
            parent,
            name: "a".into(),
            new_parent: parent,
            new_name: "b".into(),
            how: Renaming::Replace,
        },
        Op::MakeDirectory { parent, name: "d".into(), mode: 0o700.into() },
        Op::Link { file, parent, name: "b".into() },
    ] {
        let refused = other.call(&stranger, op.clone()).await;
        assert!(matches!(refused, Err(Errno::EACCES | Errno::EPERM)), "{op:?}: {refused:?}");
    }
    // Nor does what is refused for the file's kind, or changes nothing.
    let (pipe, link) =
        (find(&other, "pipe").await.attributes.id, find(&other, "link").await.attributes.id);
    let value = Bytes::from_static(b"x");
    let any = AttributeChange::Any;
    for op in [
        Op::Set { place: file, changes: Changes::default() },
        Op::Set { place: parent.into(), changes: Changes::default() },
        Op::Open { place: parent.into(), flags: OpenFlags::WRITE | OpenFlags::TRUNCATE },
        Op::Open { place: pipe.into(), flags: OpenFlags::WRITE | OpenFlags::TRUNCATE },
        Op::Open { place: link.into(), flags: OpenFlags::WRITE | OpenFlags::TRUNCATE },
        Op::Create {
            parent,
            name: "link".into(),
            mode: 0o600.into(),
            flags: OpenFlags::WRITE | OpenFlags::TRUNCATE,
        },
        Op::SetAttribute {
            place: link.into(),
            name: "user.a".into(),
            value: value.clone(),
            how: any,
        },
        Op::SetAttribute { place: file, name: "trusted.a".into(), value, how: any },
        Op::Rename {
            parent,
            name: "a".into(),
            new_parent: parent,
            new_name: "a".into(),
            how: Renaming::Replace,
        },
        Op::Rename {
            parent,
            name: "a".into(),
            new_parent: parent,
            new_name: "again".into(),
            how: Renaming::Exchange,
        },
        Op::Rename {
            parent,
            name: "pipe".into(),
            new_parent: parent,
            new_name: "pipe".into(),
            how: Renaming::NoReplace,
        },
    ] {
        let _ = other.call(&stranger, op).await;
    }
    let write = Write::At { place: file, offset: 0, data: Bytes::from_static(b"x") };
    let set = Write::Set { place: file, changes: mode };
    let refused = other.write(&stranger, vec![write, set]).await.unwrap();
    assert_eq!(
        refused.iter().map(|done| done.err()).collect::<Vec<_>>(),
        [Some(Errno::EACCES), Some(Errno::EPERM)]
    );
    // Whatever was to come has come: what is not refused is the first thing that is heard.
    let (last, owner) = (last.file, Caller::default());
    let allowed = other.call(&owner, Op::Set { place: last.into(), changes: mode });
    let (allowed, ()) = tokio::join!(allowed, async {
        let Notice::Recall { file, leases, stamp } = next(&mut notices).await else {
            panic!("lost")
        };
        assert_eq!(file, last);
        call(&store, Op::Return(vec![Returned { file, leases, stamp }])).await.unwrap();
    });
    assert!(allowed.is_ok());
}

#[tokio::test]
async fn own_changes_are_not_recalled_from_oneself() {
    let site = Site::new();
    let store = site.session();
    let mut notices = store.notices();
    let place = create(&store, "a", RW).await;
    put(&store, place, 0, b"x").await;
    let op = Op::MakeDirectory { parent: store.root(), name: "d".into(), mode: 0o700.into() };
    call(&store, op).await.unwrap();
    call(&store, Op::Settle(Settling::Flush)).await.unwrap();
    // Whatever was to come has come: a change by another program is the first thing that is heard.
    assert!(Command::new("touch").arg(site.path("other")).status().unwrap().success());
    let notice = next(&mut notices).await;
    assert!(matches!(notice, Notice::Recall { file, .. } if file == store.root()), "{notice:?}");
}

#[tokio::test]
async fn locks_exclude_sessions_and_programs_of_the_server() {
    let site = Site::new();
    fs::write(site.path("a"), "0123456789").unwrap();
    let (one, two) = (site.session(), site.session());
    let (mine, _) = open(&one, "a", RW | OpenFlags::NO_LEASE).await;
    let (theirs, _) = open(&two, "a", RW | OpenFlags::NO_LEASE).await;
    let range = |range, access| Lock::Range(RangeLock { range, access: Some(access) });
    let lock = |place, owner, lock, wait| Op::Lock { place, owner, lock, wait };
    call(&one, lock(mine, 1, range(0..5, Access::Exclusive), Wait::No)).await.unwrap();
    call(&one, lock(mine, 1, range(3..8, Access::Exclusive), Wait::No)).await.unwrap();
    let refused = call(&two, lock(theirs, 1, range(7..9, Access::Shared), Wait::No)).await;
    assert_eq!(refused, Err(Errno::EAGAIN));
    let test = Op::TestLock {
        place: theirs,
        owner: 1,
        lock: RangeLock { range: 0..u64::MAX, access: Some(Access::Shared) },
    };
    let Answer::Locked(Some(found)) = call(&two, test).await.unwrap() else { panic!("a lock") };
    assert_eq!(found, RangeLock { range: 0..8, access: Some(Access::Exclusive) });
    // Another owner of the same session is another process of the workstation.
    assert_eq!(
        call(&one, lock(mine, 2, range(0..1, Access::Shared), Wait::No)).await,
        Err(Errno::EAGAIN)
    );
    let waiting = two.clone();
    let mut wait =
        Box::pin(call(&waiting, lock(theirs, 1, range(0..9, Access::Exclusive), Wait::Yes)));
    assert!(futures_poll(&mut wait).await.is_none());
    call(&one, Op::Unlock { file: mine.file, owner: 1 }).await.unwrap();
    wait.await.unwrap();
    drop(waiting);

    let flock = |path: &Path| {
        Command::new("flock").args(["-n", "-x"]).arg(path).arg("true").status().unwrap()
    };
    call(&one, lock(mine, 0, Lock::Whole(Some(Access::Shared)), Wait::No)).await.unwrap();
    call(&two, lock(theirs, 0, Lock::Whole(Some(Access::Shared)), Wait::No)).await.unwrap();
    assert!(!flock(&site.path("a")).success());
    call(&one, Op::Close(mine.handle.unwrap())).await.unwrap();
    drop(two);
    // A session's locks end with it, on a thread that may block.
    let end = std::time::Instant::now() + SOON;
    while !flock(&site.path("a")).success() {
        assert!(std::time::Instant::now() < end, "the lock is left");
    }
}

/// As the kernel says it of processes of one machine.
#[tokio::test]
async fn who_would_wait_for_each_other_is_told() {
    let site = Site::new();
    fs::write(site.path("a"), "0123456789").unwrap();
    let (one, two) = (site.session(), site.session());
    let (mine, _) = open(&one, "a", RW | OpenFlags::NO_LEASE).await;
    let (theirs, _) = open(&two, "a", RW | OpenFlags::NO_LEASE).await;
    let lock = |place, range, access, wait| Op::Lock {
        place,
        owner: 1,
        lock: Lock::Range(RangeLock { range, access }),
        wait,
    };
    let exclusive = Some(Access::Exclusive);
    call(&one, lock(mine, 0..1, exclusive, Wait::No)).await.unwrap();
    call(&two, lock(theirs, 1..2, exclusive, Wait::No)).await.unwrap();
    let waiting = two.clone();
    let mut wait = Box::pin(call(&waiting, lock(theirs, 0..1, exclusive, Wait::Yes)));
    assert!(futures_poll(&mut wait).await.is_none());
    let refused = call(&one, lock(mine, 1..2, exclusive, Wait::Yes)).await;
    assert_eq!(refused, Err(Errno::EDEADLK));
    let refused = call(&one, lock(mine, 1..2, exclusive, Wait::No)).await;
    assert_eq!(refused, Err(Errno::EAGAIN));
    // It goes back, so that the other goes on, and releases all; then it waits for nobody.
    call(&one, lock(mine, 0..1, None, Wait::No)).await.unwrap();
    wait.await.unwrap();
    call(&two, Op::Unlock { file: theirs.file, owner: 1 }).await.unwrap();
    call(&one, lock(mine, 0..2, exclusive, Wait::Yes)).await.unwrap();
}

/// Polls a future for a short time; returns its result if it is ready.
async fn futures_poll<T>(future: &mut (impl Future<Output = T> + Unpin)) -> Option<T> {
    tokio::time::timeout(Duration::from_millis(120), future).await.ok()
}

#[tokio::test]
async fn a_tree_is_put_in_one_request() {
    let site = Site::new();
    let store = site.session();
    let time = Time { seconds: 1_000_000_000, nanoseconds: 5 };
    let changes = Changes { mtime: Some(NewTime::At(time)), ..Changes::default() };
    let put = |path: &[&str], what, mode| {
        let path = path.iter().map(OsString::from).collect();
        Write::Put(Put { directory: store.root(), path, what, mode, changes })
    };
    let regular =
        |data: &'static str| NewFile::Regular { data: Bytes::from_static(data.as_bytes()) };
    let writes = vec![
        put(&["d"], NewFile::Directory, 0o755),
        put(&["d", "e"], NewFile::Directory, 0o700),
        put(&["d", "e", "f"], regular("f's"), 0o604),
        put(&["d", "l"], NewFile::Symlink { target: "e/f".into() }, 0),
        put(&["d"], NewFile::Directory, 0o755),
        put(&["missing", "f"], regular(""), 0o600),
    ];
    let results = store.write(&me(), writes).await.unwrap();
    let faults: Vec<_> = results.iter().map(|result| result.as_ref().err().copied()).collect();
    assert_eq!(faults, [None, None, None, None, Some(Errno::EEXIST), Some(Errno::ENOENT)]);
    assert_eq!(fs::read(site.path("d/l")).unwrap(), b"f's");
    let found = fs::metadata(site.path("d/e/f")).unwrap();
    assert_eq!(
        (found.mode() & 0o7777, found.mtime(), found.mtime_nsec()),
        (0o604, 1_000_000_000, 5)
    );
}

#[tokio::test]
async fn appends_of_all_sessions_are_whole() {
    const EACH: usize = 50;
    let site = Site::new();
    fs::write(site.path("a"), "").unwrap();
    let mut writers = tokio::task::JoinSet::new();
    for number in 0..4_u8 {
        let store = site.session();
        writers.spawn(async move {
            let (place, _) =
                open(&store, "a", OpenFlags::WRITE | OpenFlags::APPEND | OpenFlags::NO_LEASE).await;
            for _ in 0..EACH {
                let data = Bytes::from(vec![b'0' + number; 100]);
                store
                    .write(&me(), vec![Write::Append { place, data }])
                    .await
                    .unwrap()
                    .remove(0)
                    .unwrap();
            }
        });
    }
    writers.join_all().await;
    let content = fs::read(site.path("a")).unwrap();
    assert_eq!(content.len(), 4 * EACH * 100);
    assert!(content.chunks(100).all(|chunk| chunk.iter().all(|byte| *byte == chunk[0])));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_of_writes_ends_with_its_session_and_says_what_is_written() {
    const BYTES: usize = 32 << 10;
    let site = Site::new();
    fs::write(site.path("a"), "").unwrap();
    let store = site.session();
    // By its id: what was open ends with the session in any case.
    let place = Place::from(find(&store, "a").await.attributes.id);
    let data = Bytes::from(vec![b'x'; BYTES]);
    let writes = vec![Write::Append { place, data }; 8192];
    let batch = tokio::spawn({
        let store = store.clone();
        async move { store.write(&me(), writes).await }
    });
    let size = || fs::metadata(site.path("a")).unwrap().len();
    while size() == 0 {
        tokio::task::yield_now().await;
    }
    store.end();
    let results = tokio::time::timeout(SOON, batch).await.unwrap().unwrap().unwrap();
    let written = results.iter().filter(|result| result.is_ok()).count();
    assert_eq!(
        (results.len(), results.last().unwrap().as_ref().err()),
        (8192, Some(&Errno::ESTALE))
    );
    assert_eq!(size(), (written * BYTES) as u64);
}

/// An identity could use up the executor's descriptors by calls that wait.
#[tokio::test]
async fn calls_that_wait_hold_no_file_open() {
    const BYTES: u64 = 32 << 20;
    let site = Site::new();
    fs::write(site.path("a"), vec![b'x'; 1 << 20]).unwrap();
    fs::File::options().write(true).open(site.path("a")).unwrap().set_len(BYTES).unwrap();
    fs::write(site.path("b"), "").unwrap();
    let store = site.session();
    let (from, to) = (find(&store, "a").await.attributes.id, find(&store, "b").await.attributes.id);
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let store = store.clone();
        let copy = Op::CopyRange {
            from: PositionIn { file: from.into(), offset: 0 },
            to: PositionIn { file: to.into(), offset: 0 },
            length: BYTES,
        };
        calls.spawn(async move { store.call(&me(), copy).await });
        let (store, part) = (site.session(), ReadPart { place: from.into(), range: 0..BYTES });
        calls.spawn(async move {
            // Nobody takes the second piece.
            let mut pieces = store.read(&me(), vec![part]).await;
            pieces.next().await.unwrap()?.data?;
            tokio::time::sleep(SOON).await;
            drop(pieces);
            Err(Errno::ETIMEDOUT)
        });
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let paths = [site.path("a"), site.path("b")];
    let is_open = |link: &std::path::PathBuf| paths.contains(link);
    let open =
        fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
    let open = open.filter(is_open).count();
    assert!(open <= 20, "{open}");
}

#[tokio::test]
async fn a_read_only_export_is_not_changed() {
    let site = Site::new();
    fs::write(site.path("a"), "one").unwrap();
    let path = site.path("");
    let directory =
        Directory::open(site.machine.clone(), &path, Rights::Own, Mutability::ReadOnly).unwrap();
    let store = DirectorySession::open(directory, Liveness::Own);
    let file = find(&store, "a").await.attributes.id;
    let root = store.root();
    let size = Changes { size: Some(0), ..Changes::default() };
    let ops = [
        Op::Open { place: file.into(), flags: RW },
        Op::Create { parent: root, name: "b".into(), mode: 0o600.into(), flags: RW },
        Op::Set { place: file.into(), changes: size },
        Op::MakeDirectory { parent: root, name: "d".into(), mode: 0o700.into() },
        Op::Remove { parent: root, name: "a".into(), what: Removal::File },
        Op::Rename {
            parent: root,
            name: "a".into(),
            new_parent: root,
            new_name: "b".into(),
            how: Renaming::Replace,
        },
        Op::SetAttribute {
            place: file.into(),
            name: "user.x".into(),
            value: Bytes::new(),
            how: AttributeChange::Any,
        },
    ];
    for op in ops {
        assert_eq!(call(&store, op.clone()).await, Err(Errno::EROFS), "{op:?}");
    }
    let write = Write::At { place: file.into(), offset: 0, data: Bytes::from_static(b"x") };
    assert_eq!(store.write(&me(), vec![write]).await.unwrap()[0], Err(Errno::EROFS));
    assert_eq!(fs::read(site.path("a")).unwrap(), b"one");
    let op =
        Op::Create { parent: root, name: "a".into(), mode: 0o600.into(), flags: OpenFlags::READ };
    assert!(call(&store, op).await.is_ok(), "what exists may be opened with O_CREAT");
}

#[tokio::test]
async fn files_belong_to_their_callers() {
    let site = Site::new();
    fs::set_permissions(site.path(""), std::os::unix::fs::PermissionsExt::from_mode(0o777))
        .unwrap();
    fs::write(site.path("roots"), "r").unwrap();
    fs::set_permissions(site.path("roots"), std::os::unix::fs::PermissionsExt::from_mode(0o600))
        .unwrap();
    let path = site.path("");
    let directory =
        Directory::open(site.machine.clone(), &path, Rights::Callers, Mutability::ReadWrite)
            .unwrap();
    let store = DirectorySession::open(directory, Liveness::Own);
    let user = Caller { uid: 1234, gid: 2345, groups: Arc::new([3456]), is_guest: false };
    let op = Op::MakeDirectory { parent: store.root(), name: "d".into(), mode: 0o700.into() };
    store.call(&user, op).await.unwrap();
    let found = fs::metadata(site.path("d")).unwrap();
    assert_eq!((found.uid(), found.gid()), (1234, 2345));
    let file = find(&store, "roots").await.attributes.id;
    let refused = store.call(&user, Op::Open { place: file.into(), flags: OpenFlags::READ }).await;
    assert_eq!(refused, Err(Errno::EACCES));
    let to_group = Changes { gid: Some(3456), ..Changes::default() };
    let directory = find(&store, "d").await.attributes.id;
    store.call(&user, Op::Set { place: directory.into(), changes: to_group }).await.unwrap();
    let to_root = Changes { uid: Some(0), ..Changes::default() };
    let refused = store.call(&user, Op::Set { place: directory.into(), changes: to_root }).await;
    assert_eq!(refused, Err(Errno::EPERM));
    // Root is itself again afterwards.
    assert!(call(&store, Op::Open { place: file.into(), flags: OpenFlags::READ }).await.is_ok());
}

#[tokio::test]
async fn a_large_directory_is_listed_in_parts() {
    let site = Site::new();
    for number in 0..2500 {
        fs::write(site.path(&format!("f{number}")), "").unwrap();
    }
    let store = site.session();
    let (mut cookie, mut names) = (0, std::collections::HashSet::new());
    loop {
        let op = Op::List { directory: store.root(), cookie, limit: 1000 };
        let Answer::Listing(listing) = call(&store, op).await.unwrap() else { panic!("a listing") };
        for listed in &listing.names {
            assert_eq!(listed.entry.unwrap().attributes.id.inode, listed.inode);
            assert!(names.insert(listed.name.clone()));
            cookie = listed.cookie;
        }
        if listing.is_last {
            break;
        }
    }
    assert_eq!(names.len(), 2500);
}

async fn make_directory(store: &dyn Store, name: &str) -> Entry {
    let op = Op::MakeDirectory { parent: store.root(), name: name.into(), mode: 0o755.into() };
    match call(store, op).await.unwrap() {
        Answer::Made { entry, .. } => entry,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn who_makes_a_directory_may_hold_its_names_back_until_somebody_else_looks() {
    let site = Site::new();
    let (one, other) = (site.session(), site.session());
    let (mut recalls, _others) = (one.notices(), other.notices());
    fs::create_dir(site.path("old")).unwrap();
    assert!(!find(&one, "old").await.leases.contains(Leases::WRITE));
    let made = make_directory(&one, "new").await;
    assert!(made.leases.contains(Leases::WRITE | Leases::ENTRIES));
    assert!(find(&one, "new").await.leases.contains(Leases::WRITE), "its own looks change nothing");
    // What the other session would remove is perhaps not sent yet.
    let op = Op::Remove { parent: made.attributes.id, name: "unsent".into(), what: Removal::File };
    let removal = tokio::spawn(async move { call(&other, op).await });
    let notice = tokio::time::timeout(SOON, recalls.next()).await.unwrap().unwrap();
    let Notice::Recall { file, leases, stamp } = notice else { panic!("{notice:?}") };
    assert_eq!((file, leases.contains(Leases::WRITE)), (made.attributes.id, true));
    let put = Put {
        directory: file,
        path: vec!["unsent".into()],
        what: NewFile::Regular { data: Bytes::from_static(b"x") },
        mode: 0o644,
        changes: Changes::default(),
    };
    one.write(&me(), vec![Write::Put(put)]).await.unwrap().remove(0).unwrap();
    call(&one, Op::Return(vec![Returned { file, leases, stamp }])).await.unwrap();
    assert!(matches!(removal.await.unwrap(), Ok(Answer::Removed { .. })));
    assert!(!site.path("new/unsent").exists());
    assert!(!find(&one, "new").await.leases.contains(Leases::WRITE), "once only");
}

#[tokio::test]
async fn permissions_that_come_of_a_default_acl_are_the_servers_alone() {
    let site = Site::new();
    let store = site.session();
    let _recalls = store.notices();
    // Version 2; u::rwx, g::r-x, o::r-x (acl(5), as the kernel has it).
    let acl = [
        &[2_u8, 0, 0, 0][..],
        &[1, 0, 7, 0, 255, 255, 255, 255],
        &[4, 0, 5, 0, 255, 255, 255, 255],
        &[32, 0, 5, 0, 255, 255, 255, 255],
    ];
    let above = make_directory(&store, "above").await.attributes.id;
    let (place, how) = (above.into(), AttributeChange::Any);
    let value = Bytes::from(acl.concat());
    let op = Op::SetAttribute { place, name: "system.posix_acl_default".into(), value, how };
    call(&store, op).await.unwrap();
    let op = Op::MakeDirectory { parent: above, name: "below".into(), mode: 0o755.into() };
    let Answer::Made { entry, .. } = call(&store, op).await.unwrap() else { panic!("made") };
    assert!(!entry.leases.contains(Leases::WRITE));
}

#[tokio::test]
async fn directories_that_were_reached_through_others_are_found_again() {
    let site = Site::new();
    let store = site.session();
    let directory = |path: &[&str]| {
        let path = path.iter().map(OsString::from).collect();
        let (what, changes) = (NewFile::Directory, Changes::default());
        Write::Put(Put { directory: store.root(), path, what, mode: 0o755, changes })
    };
    // More than descriptors are kept for.
    let others = || (0..5000).map(|number| format!("other{number}"));
    let tree = [directory(&["a"]), directory(&["a", "b"]), directory(&["a", "b", "c"])];
    let made = store.write(&me(), tree.to_vec()).await.unwrap();
    let many: Vec<Write> = others().map(|name| directory(&[&name])).collect();
    store.write(&me(), many).await.unwrap();
    for entry in made {
        call(&store, Op::List { directory: entry.unwrap().attributes.id, cookie: 0, limit: 1 })
            .await
            .unwrap();
    }
}

/// A user of no account.
const STRANGER: u32 = 54_321;

fn stranger() -> Caller {
    Caller { uid: STRANGER, gid: STRANGER, groups: vec![STRANGER].into(), is_guest: false }
}

/// The export, open to all, with a session by the rights of each caller. Needs root.
fn shared_by_callers(site: &Site) -> Option<DirectorySession> {
    if !nix::unistd::geteuid().is_root() {
        return None;
    }
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(site.top.path(), open).unwrap();
    fs::set_permissions(site.path(""), std::os::unix::fs::PermissionsExt::from_mode(0o777))
        .unwrap();
    let rights = Rights::Callers;
    let directory =
        Directory::open(site.machine.clone(), &site.path(""), rights, Mutability::ReadWrite)
            .unwrap();
    Some(DirectorySession::open(directory, Liveness::Own))
}

#[tokio::test]
async fn a_change_that_fails_after_its_first_step_has_begun() {
    let site = Site::new();
    let Some(store) = shared_by_callers(&site) else { return };
    fs::create_dir(site.path("there")).unwrap();
    // Nobody else may give files to root: that comes after a directory was made, and before a file
    // has got its name.
    let changes = Changes { uid: Some(0), ..Changes::default() };
    let put = |name: &str, what: NewFile| {
        let (directory, path) = (store.root(), vec![name.into()]);
        Write::Put(Put { directory, path, what, mode: 0o700, changes })
    };
    let writes = vec![
        put("file", NewFile::Regular { data: Bytes::from_static(b"x") }),
        put("new", NewFile::Directory),
        put("there", NewFile::Directory),
    ];
    let effects: Effects = (0..3).map(|_| EffectMark::default()).collect();
    let written = EFFECTS.scope(effects.clone(), store.write(&stranger(), writes)).await.unwrap();
    assert_eq!(
        written.iter().map(|result| result.as_ref().err().copied()).collect::<Vec<_>>(),
        [Some(Errno::EPERM), Some(Errno::EPERM), Some(Errno::EEXIST)]
    );
    let begun = |effects: &Effects| effects.iter().map(EffectMark::has_begun).collect::<Vec<_>>();
    assert_eq!(begun(&effects), [false, true, false]);
    for (name, has_begun) in [("there", false), ("link", true)] {
        let effects: Effects = [EffectMark::default()].into();
        let link = Op::Symlink { parent: store.root(), name: name.into(), target: "x".into() };
        let made = EFFECTS.scope(effects.clone(), store.call(&stranger(), link)).await;
        assert_eq!((made.is_ok(), begun(&effects)), (has_begun, vec![has_begun]));
    }
}

/// All callers act as root, and one of them is not the one who mounted the volume.
#[tokio::test]
async fn a_guest_makes_and_leaves_no_set_user_id_bits_for_another_account() {
    let site = Site::new();
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let directory = Directory::open(
        site.machine.clone(),
        &site.path(""),
        Rights::User(Caller::default()),
        Mutability::ReadWrite,
    );
    let store = DirectorySession::open(directory.unwrap(), Liveness::Own);
    for is_guest in [true, false] {
        let caller = Caller { is_guest, ..stranger() };
        let bits = if is_guest { 0 } else { 0o6000 };
        let name = |what: &str| format!("{what}-{is_guest}");
        let mode = |what: &str| {
            let found = fs::metadata(site.path(&name(what))).unwrap();
            std::os::unix::fs::PermissionsExt::mode(&found.permissions()) & 0o7777
        };
        for there in ["written", "changed"] {
            fs::write(site.path(&name(there)), "x").unwrap();
        }
        set_mode(&site.path(&name("written")), 0o6755);
        let created = Op::Create {
            parent: store.root(),
            name: name("created").into(),
            mode: 0o6755.into(),
            flags: OpenFlags::WRITE,
        };
        store.call(&caller, created).await.unwrap();
        let place = find(&store, &name("changed")).await.attributes.id.into();
        let changes = Changes { mode: Some(0o6755), ..Changes::default() };
        store.call(&caller, Op::Set { place, changes }).await.unwrap();
        let place = find(&store, &name("written")).await.attributes.id.into();
        let put = Put {
            directory: store.root(),
            path: vec![name("put").into()],
            what: NewFile::Regular { data: Bytes::from_static(b"x") },
            mode: 0o6755,
            changes: Changes::default(),
        };
        let writes =
            vec![Write::At { place, offset: 0, data: Bytes::from_static(b"y") }, Write::Put(put)];
        store.write(&caller, writes).await.unwrap().into_iter().for_each(|done| {
            done.unwrap();
        });
        for what in ["created", "changed", "written", "put"] {
            assert_eq!(mode(what), bits | 0o755, "{}", name(what));
        }
    }
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
}

#[tokio::test]
async fn an_id_is_of_no_use_to_who_may_not_search_the_way_to_it() {
    let site = Site::new();
    let Some(store) = shared_by_callers(&site) else { return };
    fs::create_dir_all(site.path("private/sub")).unwrap();
    fs::write(site.path("private/notes"), "secret").unwrap();
    fs::write(site.path("private/shared"), "x").unwrap();
    [
        ("private/sub", 0o777),
        ("private/notes", 0o644),
        ("private/shared", 0o666),
        ("private", 0o700),
    ]
    .iter()
    .for_each(|(path, mode)| set_mode(&site.path(path), *mode));
    // root finds them, so that this session knows their ids and has descriptors of them.
    let (notes, shared, sub) = (
        find(&store, "private/notes").await,
        find(&store, "private/shared").await,
        find(&store, "private/sub").await,
    );
    let [notes, shared, sub] = [notes, shared, sub].map(|entry| entry.attributes.id);
    let refused = |op: Op| {
        let store = &store;
        async move {
            assert_eq!(store.call(&stranger(), op.clone()).await, Err(Errno::EACCES), "{op:?}")
        }
    };
    let names = vec!["private".into(), "notes".into()];
    let Answer::Walked(walked) =
        store.call(&stranger(), Op::Walk { from: store.root(), names }).await.unwrap()
    else {
        panic!("walked")
    };
    assert_eq!((walked.entries.len(), walked.error), (1, Some(Errno::EACCES)));
    for op in [
        Op::Attributes(notes.into()),
        Op::Open { place: notes.into(), flags: OpenFlags::READ },
        Op::Open { place: shared.into(), flags: OpenFlags::WRITE },
        Op::List { directory: sub, cookie: 0, limit: 9 },
        Op::MakeDirectory { parent: sub, name: "made".into(), mode: 0o755.into() },
        Op::Symlink { parent: sub, name: "made".into(), target: "x".into() },
        Op::Create { parent: sub, name: "made".into(), mode: 0o644.into(), flags: RW },
        Op::Link { file: shared.into(), parent: store.root(), name: "link".into() },
        Op::Set { place: shared.into(), changes: Changes { size: Some(0), ..Changes::default() } },
        Op::Sync { place: notes.into(), what: Synced::Data },
        Op::ListAttributes(notes.into()),
        Op::Allocate { place: shared.into(), range: 0..9, how: Allocation::Extend },
        Op::CopyRange {
            from: PositionIn { file: notes.into(), offset: 0 },
            to: PositionIn { file: shared.into(), offset: 0 },
            length: 9,
        },
    ] {
        refused(op).await;
    }
    let read = store
        .read(&stranger(), vec![ReadPart { place: notes.into(), range: 0..9 }])
        .await
        .next()
        .await;
    assert_eq!(read.unwrap().unwrap().data, Err(Errno::EACCES));
    let write = Write::At { place: shared.into(), offset: 0, data: Bytes::from_static(b"y") };
    assert_eq!(store.write(&stranger(), vec![write]).await.unwrap(), [Err(Errno::EACCES)]);
    assert_eq!(fs::read(site.path("private/shared")).unwrap(), b"x");
    // As soon as the way is free the same ids are of use.
    set_mode(&site.path("private"), 0o711);
    let op = Op::Open { place: notes.into(), flags: OpenFlags::READ };
    let Answer::Opened { handle, .. } = store.call(&stranger(), op).await.unwrap() else {
        panic!("opened")
    };
    // What is open goes on to work; what is not, does not.
    set_mode(&site.path("private"), 0o700);
    let open = Place { file: notes, handle: Some(handle) };
    store.call(&stranger(), Op::Attributes(open)).await.unwrap();
    let piece =
        store.read(&stranger(), vec![ReadPart { place: open, range: 0..9 }]).await.next().await;
    assert_eq!(piece.unwrap().unwrap().data.unwrap(), "secret");
    refused(Op::Attributes(notes.into())).await;
    refused(Op::Open { place: notes.into(), flags: OpenFlags::READ }).await;
}

#[tokio::test]
async fn ids_lead_to_files_that_other_programs_have_moved() {
    let site = Site::new();
    let store = site.session();
    fs::create_dir_all(site.path("a/b")).unwrap();
    fs::write(site.path("a/b/f"), "x").unwrap();
    let file = find(&store, "a/b/f").await.attributes.id;
    fs::rename(site.path("a/b"), site.path("c")).unwrap();
    fs::rename(site.path("c/f"), site.path("g")).unwrap();
    assert_eq!(content(&store, file.into()).await.unwrap(), b"x");
    // Out of the export it is gone.
    fs::rename(site.path("g"), site.top.path().join("g")).unwrap();
    assert_eq!(content(&store, file.into()).await, Err(Errno::ESTALE));
}

#[tokio::test]
async fn root_from_elsewhere_makes_no_devices_and_no_attributes_of_the_system() {
    let site = Site::new();
    let Some(store) = shared_by_callers(&site) else { return };
    for kind in [Kind::BlockDevice, Kind::CharacterDevice] {
        let op = Op::MakeNode {
            parent: store.root(),
            name: "n".into(),
            mode: 0o666.into(),
            kind,
            rdev: 0x103,
        };
        assert_eq!(call(&store, op).await, Err(Errno::EPERM));
    }
    fs::write(site.path("f"), "").unwrap();
    let place: Place = find(&store, "f").await.attributes.id.into();
    for name in ["security.capability", "trusted.overlay.opaque", "system.other"] {
        let (value, how) = (Bytes::from_static(b"1"), AttributeChange::Any);
        let op = Op::SetAttribute { place, name: name.into(), value, how };
        assert_eq!(call(&store, op).await, Err(Errno::EOPNOTSUPP), "{name}");
    }
    let nobody = Caller { uid: u32::MAX, ..Caller::default() };
    assert_eq!(store.call(&nobody, Op::Attributes(place)).await, Err(Errno::EINVAL));
}

#[tokio::test]
async fn who_may_only_read_locks_nobody_out() {
    let site = Site::new();
    fs::write(site.path("f"), "x").unwrap();
    let path = site.path("");
    let directory =
        Directory::open(site.machine.clone(), &path, Rights::Own, Mutability::ReadOnly).unwrap();
    let store = DirectorySession::open(directory, Liveness::Own);
    let (place, _) = open(&store, "f", OpenFlags::READ).await;
    let range = |access| Lock::Range(RangeLock { range: 0..100, access: Some(access) });
    for place in [place, place.file.into()] {
        for lock in [Lock::Whole(Some(Access::Exclusive)), range(Access::Exclusive)] {
            let op = Op::Lock { place, owner: 1, lock, wait: Wait::Yes };
            assert_eq!(call(&store, op).await, Err(Errno::EROFS));
        }
        for lock in [Lock::Whole(Some(Access::Shared)), range(Access::Shared)] {
            let op = Op::Lock { place, owner: 1, lock, wait: Wait::No };
            assert_eq!(call(&store, op).await, Ok(Answer::Done));
        }
    }
    let file = fs::OpenOptions::new().read(true).write(true).open(site.path("f")).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_eq!(
        call(&store, Op::Open { place: place.file.into(), flags: RW }).await,
        Err(Errno::EROFS)
    );
}

// What is open for writing is no program that can be started (ETXTBSY); the other way around, a
// program at work can't be opened so, which shows here what is tried.
#[tokio::test]
async fn who_asks_about_locks_opens_nothing_to_write_to() {
    let site = Site::new();
    fs::copy("/bin/sleep", site.path("f")).unwrap();
    let mut program = Command::new(site.path("f"))
        .arg("20")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let path = site.path("");
    let read_only =
        Directory::open(site.machine.clone(), &path, Rights::Own, Mutability::ReadOnly).unwrap();
    for store in [DirectorySession::open(read_only, Liveness::Own), site.session()] {
        let (place, _) = open(&store, "f", OpenFlags::READ).await;
        for place in [place, place.file.into()] {
            let lock = RangeLock { range: 0..10, access: Some(Access::Exclusive) };
            let asked = call(&store, Op::TestLock { place, owner: 7, lock }).await;
            assert_eq!(asked, Ok(Answer::Locked(None)));
        }
    }
    program.kill().unwrap();
    program.wait().unwrap();
}

#[tokio::test]
async fn a_change_that_is_refused_takes_nobodys_leases() {
    let site = Site::new();
    fs::write(site.path("f"), "x").unwrap();
    let path = site.path("");
    let directory =
        Directory::open(site.machine.clone(), &path, Rights::Own, Mutability::ReadOnly).unwrap();
    let store = DirectorySession::open(directory, Liveness::Own);
    let (file, root) = (find(&store, "f").await.attributes.id, store.root());
    let owner = site.session();
    let mut notices = owner.notices();
    let (_, entry) = open(&owner, "f", RW).await;
    assert!(entry.leases.contains(Leases::WRITE), "{entry:?}");
    let changes = Changes { mode: Some(0o777), ..Changes::default() };
    let set = Op::Set { place: file.into(), changes };
    let made = Op::MakeDirectory { parent: root, name: "d".into(), mode: 0o700.into() };
    let allocated = Op::Allocate { place: file.into(), range: 0..10, how: Allocation::Extend };
    for op in [set, made, allocated] {
        assert_eq!(call(&store, op.clone()).await, Err(Errno::EROFS), "{op:?}");
    }
    let write = Write::Set { place: file.into(), changes };
    assert_eq!(store.write(&me(), vec![write]).await.unwrap()[0], Err(Errno::EROFS));
    let heard = tokio::time::timeout(Duration::from_millis(300), notices.next()).await;
    assert!(heard.is_err(), "{heard:?}");
}

#[tokio::test]
async fn locks_that_wait_are_bounded_and_end_with_their_session() {
    const WAITING: usize = 256;
    let site = Site::new();
    fs::write(site.path("f"), "x").unwrap();
    let session = |name| {
        DirectorySession::open_for(Account::named(name), site.directory.clone(), Liveness::Own)
    };
    let (ada, bob) = (session("ada"), session("bob"));
    let lock = |place| Op::Lock {
        place,
        owner: 1,
        lock: Lock::Whole(Some(Access::Exclusive)),
        wait: Wait::Yes,
    };
    let (held, _) = open(&ada, "f", RW).await;
    call(&ada, lock(held)).await.unwrap();
    let (place, _) = open(&ada, "f", RW).await;
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..WAITING + 44 {
        let ada = ada.clone();
        waiting.spawn(async move { ada.call(&Caller::default(), lock(place)).await });
    }
    for _ in 0..44 {
        let refused = tokio::time::timeout(SOON, waiting.join_next())
            .await
            .expect("refused at once")
            .unwrap();
        assert_eq!(refused.unwrap(), Err(Errno::ENOLCK));
    }
    let (its, _) = open(&bob, "f", RW).await;
    let bobs = tokio::spawn(async move { call(&bob, lock(its)).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!bobs.is_finished());
    // Whoever still has a share of the session: its locks are given back, and those that wait are
    // refused.
    ada.end();
    assert_eq!(
        tokio::time::timeout(SOON, bobs).await.expect("the lock").unwrap(),
        Ok(Answer::Done)
    );
    while let Some(refused) = tokio::time::timeout(SOON, waiting.join_next()).await.expect("an end")
    {
        assert_eq!(refused.unwrap(), Err(Errno::ESTALE));
    }
    assert_eq!(call(&ada, Op::Attributes(its)).await, Err(Errno::ESTALE));
}

/// Each owner has some two thousand at most of a file, and an account so many of all.
#[tokio::test]
async fn ranges_that_are_locked_are_few() {
    let site = Site::new();
    let session = |name| {
        DirectorySession::open_for(Account::named(name), site.directory.clone(), Liveness::Own)
    };
    let (ada, bob) = (session("ada"), session("bob"));
    let lock = |place, start: u64| {
        let range = RangeLock { range: start..start + 1, access: Some(Access::Exclusive) };
        Op::Lock { place, owner: 1, lock: Lock::Range(range), wait: Wait::No }
    };
    let mut count = 0;
    for file in 0..20 {
        let name = format!("f{file}");
        fs::write(site.path(&name), "x").unwrap();
        let (place, _) = open(&ada, &name, RW).await;
        // Every second byte: neighbours would be one range.
        let mut starts = (0..5000).map(|number| 2 * number);
        count += loop {
            let start = starts.next().unwrap();
            match call(&ada, lock(place, start)).await {
                Ok(_) => {}
                Err(refused) => {
                    assert_eq!(refused, Errno::ENOLCK);
                    break start / 2;
                }
            }
        };
    }
    assert!((20_000..=65_536).contains(&count), "{count}");
    // Others have room, and so has it when it has given something back.
    let (its, _) = open(&bob, "f0", RW).await;
    call(&bob, lock(its, 1)).await.unwrap();
    fs::write(site.path("g"), "x").unwrap();
    let (place, _) = open(&ada, "g", RW).await;
    assert_eq!(call(&ada, lock(place, 1)).await, Err(Errno::ENOLCK));
    let file = open(&ada, "f1", RW).await.0.file;
    call(&ada, Op::Unlock { file, owner: 1 }).await.unwrap();
    call(&ada, lock(place, 1)).await.unwrap();
}

#[tokio::test]
#[expect(clippy::reversed_empty_ranges, reason = "a peer sends them")]
async fn what_asks_for_too_much_is_refused() {
    let site = Site::new();
    let store = site.session();
    fs::write(site.path("f"), "x").unwrap();
    let place: Place = find(&store, "f").await.attributes.id.into();
    let root = store.root();
    let name = || OsString::from("a");
    for (op, errno) in [
        (Op::Walk { from: root, names: vec![name(); 10_000] }, Errno::ENAMETOOLONG),
        (
            Op::Symlink { parent: root, name: name(), target: "x".repeat(1 << 20).into() },
            Errno::ENAMETOOLONG,
        ),
        (Op::Allocate { place, range: 9..3, how: Allocation::Extend }, Errno::EINVAL),
        (Op::Allocate { place, range: 0..u64::MAX, how: Allocation::InsertRange }, Errno::EINVAL),
        (
            Op::CopyRange {
                from: PositionIn { file: place, offset: u64::MAX },
                to: PositionIn { file: place, offset: 0 },
                length: u64::MAX,
            },
            Errno::EINVAL,
        ),
        (Op::Seek { place, offset: u64::MAX, what: Sought::Data }, Errno::ENXIO),
    ] {
        let answer = call(&store, op.clone()).await;
        let kin = [errno, Errno::EINVAL, Errno::EFBIG, Errno::EOPNOTSUPP, Errno::EOVERFLOW];
        assert!(answer.as_ref().is_err_and(|found| kin.contains(found)), "{op:?}: {answer:?}");
    }
    for range in [0..0, 9..3, u64::MAX - 1..u64::MAX, 0..u64::MAX] {
        let mut pieces = store.read(&me(), vec![ReadPart { place, range }]).await;
        while pieces.next().await.is_some() {}
    }
    let lock =
        Lock::Range(RangeLock { range: u64::MAX - 1..u64::MAX, access: Some(Access::Shared) });
    assert!(call(&store, Op::Lock { place, owner: 1, lock, wait: Wait::No }).await.is_err());
}
