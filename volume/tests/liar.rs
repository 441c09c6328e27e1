//! A server of volumes that lies: names that lead elsewhere, more than was asked for, bytes beside
//! what was asked for.
#![allow(clippy::unwrap_used)]

use std::{
    ffi::OsString,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use posh_proto::volume::{
    self as pb, FromVolume, Reply, ToVolume, Welcome,
    answer::Kind as Said,
    from_volume, to_volume,
    volume_server::{Volume, VolumeServer},
};
use posh_volume::{
    Errno, Store,
    remote::{CannotConnect, Connector, Patience, Remote},
    store::*,
};
use tokio::{net::TcpListener, sync::mpsc, time::timeout};
use tokio_stream::{
    Stream, StreamExt as _,
    wrappers::{ReceiverStream, TcpListenerStream},
};
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Channel, Endpoint, Server},
};

/// For anything that is to happen at all.
const PATIENCE: Duration = Duration::from_secs(20);

/// Gives one answer to whatever is asked, and the same pieces to each read.
#[derive(Clone, Default)]
struct Liar {
    answer: Option<Said>,
    pieces: Vec<pb::Piece>,
    written: Vec<pb::Written>,
    refusal: Option<String>,
    /// Roots of the first sessions: each but the last ends with its first call.
    roots: Vec<pb::FileId>,
    /// Machines of the first sessions.
    machines: Vec<&'static str>,
    sessions: Arc<AtomicUsize>,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Volume for Liar {
    type SessionStream = Answers<FromVolume>;
    type ReadStream = Answers<pb::ReadReply>;

    async fn session(
        &self,
        request: Request<Streaming<ToVolume>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        if let Some(refusal) = &self.refusal {
            return Err(Status::permission_denied(refusal));
        }
        let (mut asked, answer) = (request.into_inner(), self.answer.clone());
        let session = self.sessions.fetch_add(1, Ordering::Relaxed);
        let own = pb::FileId { inode: 1, generation: 0 };
        let root = Some(self.roots.get(session).copied().unwrap_or(own));
        let machine = Bytes::from(self.machines.get(session).copied().unwrap_or_default());
        let is_short = session + 1 < self.roots.len();
        let (sender, answers) = mpsc::channel(16);
        tokio::spawn(async move {
            while let Some(Ok(message)) = asked.next().await {
                let kind = match message.kind {
                    Some(to_volume::Kind::Hello(_)) => {
                        let machine = machine.clone();
                        from_volume::Kind::Welcome(Welcome { root, machine, ..Welcome::default() })
                    }
                    Some(to_volume::Kind::Call(_)) if is_short => return,
                    Some(to_volume::Kind::Call(call)) => {
                        let answer = Some(pb::Answer { kind: answer.clone() });
                        from_volume::Kind::Reply(Reply {
                            number: call.number,
                            answer,
                            ..Reply::default()
                        })
                    }
                    _ => continue,
                };
                if sender.send(Ok(FromVolume { kind: Some(kind) })).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(answers))))
    }

    async fn read(
        &self,
        _: Request<pb::ReadRequest>,
    ) -> Result<Response<Self::ReadStream>, Status> {
        let reply = pb::ReadReply { pieces: self.pieces.clone() };
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(reply)))))
    }

    async fn write(
        &self,
        _: Request<pb::WriteRequest>,
    ) -> Result<Response<pb::WriteReply>, Status> {
        Ok(Response::new(pb::WriteReply { results: self.written.clone() }))
    }
}

struct To(SocketAddr);

#[tonic::async_trait]
impl Connector for To {
    async fn connect(&self) -> Result<Channel, CannotConnect> {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.0))
            .map_err(|error| CannotConnect::Unreachable(error.to_string()))?;
        endpoint.connect().await.map_err(|error| CannotConnect::Unreachable(error.to_string()))
    }
}

impl Liar {
    fn says(answer: Said) -> Self {
        Self { answer: Some(answer), ..Self::default() }
    }

    async fn open(self) -> Result<Remote, String> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = VolumeServer::new(self);
        tokio::spawn(
            Server::builder()
                .add_service(service)
                .serve_with_incoming(TcpListenerStream::new(listener)),
        );
        Remote::open(Arc::new(To(address)), "x", Patience::default())
            .await
            .map_err(|error| error.to_string())
    }

    async fn answer(self, op: Op) -> Result<Answer, Errno> {
        let remote = self.open().await.unwrap();
        timeout(PATIENCE, remote.call(&caller(), op)).await.unwrap()
    }
}

fn caller() -> Caller {
    Caller { uid: 0, gid: 0, groups: Arc::from([]), is_guest: false }
}

fn file(inode: u64) -> FileId {
    FileId { inode, generation: 0 }
}

fn entry() -> pb::Entry {
    entry_of(file(1))
}

fn entry_of(id: FileId) -> pb::Entry {
    let id = Some(id.into());
    pb::Entry {
        attributes: Some(pb::Attributes { id, ..pb::Attributes::default() }),
        ..pb::Entry::default()
    }
}

fn listing(names: &[&[u8]]) -> Said {
    let listed =
        |name: &&[u8]| pb::Listed { name: Bytes::copy_from_slice(name), ..pb::Listed::default() };
    let names = names.iter().map(listed).collect();
    Said::Listing(pb::Listing { directory: Some(entry()), names, is_last: true })
}

fn stamped(values: Vec<Bytes>) -> pb::Stamped {
    pb::Stamped { values, stamp: 1 }
}

#[tokio::test]
async fn names_that_are_none_are_not_shown() {
    let list = || Op::List { directory: file(1), cookie: 0, limit: 4 };
    let long = [b'n'; 256];
    for name in [&b"../../etc/passwd"[..], b"a/b", b"/", b"", b".", b"..", b"a\0b", &long] {
        let answer = Liar::says(listing(&[b"fine", name])).answer(list()).await;
        assert_eq!(answer, Err(Errno::EIO), "{name:?}");
    }
    let Ok(Answer::Listing(fine)) =
        Liar::says(listing(&[b"...", &long[..255]])).answer(list()).await
    else {
        panic!("these are names");
    };
    assert_eq!(fine.names.len(), 2);
}

#[tokio::test]
async fn more_than_was_asked_for_is_not_kept() {
    let place = || Place { file: file(1), handle: None };
    let walked = pb::Walked { from: Some(entry()), entries: vec![entry(); 3], error: 0 };
    let names = vec![OsString::from("a"), OsString::from("b")];
    let lies = [
        (Op::List { directory: file(1), cookie: 0, limit: 2 }, listing(&[b"a", b"b", b"c"])),
        (Op::Walk { from: file(1), names }, Said::Walked(walked)),
        (Op::ReadLink(file(2)), Said::Target(stamped(vec![vec![b'x'; 1 << 20].into()]))),
        (Op::ReadLink(file(2)), Said::Target(stamped(vec![Bytes::from_static(b"a\0b")]))),
        (
            Op::GetAttribute { place: place(), name: "user.x".into() },
            Said::Value(stamped(vec![vec![0; 1 << 20].into()])),
        ),
        (Op::ListAttributes(place()), Said::Names(stamped(vec![vec![b'x'; 255].into(); 1024]))),
        (
            Op::CopyRange {
                from: PositionIn { file: place(), offset: 0 },
                to: PositionIn { file: place(), offset: 0 },
                length: 10,
            },
            Said::Copied(pb::Copied { bytes: 11, entry: Some(entry()) }),
        ),
    ];
    for (op, said) in lies {
        assert_eq!(Liar::says(said).answer(op.clone()).await, Err(Errno::EIO), "{op:?}");
    }
}

#[tokio::test]
async fn bytes_beside_what_was_asked_for_are_not_taken() {
    let piece = |part, offset, bytes: usize| pb::Piece {
        part,
        offset,
        data: vec![b'x'; bytes].into(),
        ..pb::Piece::default()
    };
    let part = || ReadPart { place: Place { file: file(2), handle: None }, range: 100..200 };
    for lie in [
        piece(0, 0, 10),
        piece(0, 150, 51),
        piece(0, 100, 1 << 20),
        piece(0, u64::MAX, 2),
        piece(1, 100, 10),
        // Beyond a gap; without bytes, of which there could be any number.
        piece(0, 160, 10),
        piece(0, 150, 0),
        pb::Piece { error: 5, ..piece(0, 150, 0) },
    ] {
        let (offset, bytes) = (lie.offset, lie.data.len());
        let liar = Liar { pieces: vec![piece(0, 100, 50), lie], ..Liar::default() };
        let remote = liar.open().await.unwrap();
        let mut pieces = remote.read(&caller(), vec![part()]).await;
        assert!(matches!(timeout(PATIENCE, pieces.next()).await.unwrap(), Some(Ok(_))));
        assert!(
            matches!(timeout(PATIENCE, pieces.next()).await.unwrap(), Some(Err(_))),
            "{bytes} bytes at {offset}"
        );
    }
}

#[tokio::test]
async fn a_refusal_says_nothing_to_the_terminal() {
    let liar =
        Liar { refusal: Some("no\u{1b}]0;T\u{7}\nFORGED: ok".to_owned()), ..Liar::default() };
    let why = liar.open().await.unwrap_err();
    assert!(why.contains("no\\u{1b}]0;T\\u{7}\\nFORGED: ok"), "{why}");
}

#[tokio::test]
async fn no_answer_is_about_another_file_than_was_asked_about() {
    let place = || Place { file: file(2), handle: None };
    let name = || OsString::from("n");
    let entries = |ids: &[u64]| pb::Entries {
        entries: ids.iter().map(|inode| entry_of(file(*inode))).collect(),
    };
    let opened = |entry: u64, parent: Option<u64>| {
        Said::Opened(pb::Opened {
            handle: 1,
            entry: Some(entry_of(file(entry))),
            parent: parent.map(|parent| entry_of(file(parent))),
        })
    };
    let walked = |from| {
        Said::Walked(pb::Walked { from: Some(entry_of(file(from))), ..pb::Walked::default() })
    };
    let listed = |directory| {
        let directory = Some(entry_of(file(directory)));
        Said::Listing(pb::Listing { directory, names: Vec::new(), is_last: true })
    };
    let symlink = || Op::Symlink { parent: file(2), name: name(), target: name() };
    let create = || Op::Create {
        parent: file(2),
        name: name(),
        mode: 0o600.into(),
        flags: OpenFlags::WRITE,
    };
    let open = || Op::Open { place: place(), flags: OpenFlags::READ };
    let remove = || Op::Remove { parent: file(2), name: name(), what: Removal::File };
    let rename = || Op::Rename {
        parent: file(2),
        name: name(),
        new_parent: file(3),
        new_name: name(),
        how: Renaming::Replace,
    };
    for (op, said, is_taken) in [
        (Op::Attributes(place()), Said::Entry(entry_of(file(2))), true),
        (Op::Attributes(place()), Said::Entry(entry_of(file(3))), false),
        (Op::Walk { from: file(2), names: Vec::new() }, walked(2), true),
        (Op::Walk { from: file(2), names: Vec::new() }, walked(3), false),
        (Op::List { directory: file(2), cookie: 0, limit: 1 }, listed(2), true),
        (Op::List { directory: file(2), cookie: 0, limit: 1 }, listed(3), false),
        (symlink(), Said::Made(entries(&[4, 2])), true),
        (symlink(), Said::Made(entries(&[4, 3])), false),
        // A directory in itself.
        (symlink(), Said::Made(entries(&[2, 2])), false),
        (create(), opened(4, Some(2)), true),
        (create(), opened(4, Some(3)), false),
        (create(), opened(2, None), false),
        (open(), opened(2, None), true),
        (open(), opened(3, None), false),
        (remove(), Said::Removed(entries(&[2])), true),
        (remove(), Said::Removed(entries(&[3])), false),
        (rename(), Said::Renamed(entries(&[2, 3, 4])), true),
        (rename(), Said::Renamed(entries(&[3, 3, 4])), false),
        (rename(), Said::Renamed(entries(&[2, 2, 4])), false),
    ] {
        let answer = Liar::says(said.clone()).answer(op.clone()).await;
        assert_eq!(answer.is_ok(), is_taken, "{op:?} {said:?}");
    }
    for (answered, is_taken) in [(2, true), (3, false)] {
        let entry = Some(entry_of(file(answered)));
        let written = vec![pb::Written { entry, error: 0 }];
        let whole = pb::Piece { entry, is_last: true, ..pb::Piece::default() };
        let remote = Liar { written, pieces: vec![whole], ..Liar::default() }.open().await.unwrap();
        let write = Write::At { place: place(), offset: 0, data: Bytes::from_static(b"x") };
        let result = timeout(PATIENCE, remote.write(&caller(), vec![write])).await.unwrap();
        assert_eq!(result.is_ok(), is_taken);
        let part = ReadPart { place: place(), range: 0..1 };
        let mut pieces = remote.read(&caller(), vec![part]).await;
        let piece = timeout(PATIENCE, pieces.next()).await.unwrap().unwrap();
        assert_eq!(piece.is_ok(), is_taken);
    }
}

#[tokio::test]
async fn no_server_speaks_of_files_that_it_can_not_know() {
    let provisional = FileId::provisional((1 << 62) + 1);
    assert!(provisional.is_provisional());
    let symlink = Op::Symlink { parent: file(2), name: "n".into(), target: "t".into() };
    let made = pb::Entries { entries: vec![entry_of(provisional), entry_of(file(2))] };
    assert_eq!(Liar::says(Said::Made(made)).answer(symlink).await, Err(Errno::EIO));
    let walk = Op::Walk { from: file(1), names: vec!["n".into()] };
    let entries = vec![entry_of(provisional)];
    let walked = pb::Walked { from: Some(entry()), entries, error: 0 };
    assert_eq!(Liar::says(Said::Walked(walked)).answer(walk).await, Err(Errno::EIO));
    for notice in [
        pb::Notice { file: Some(provisional.into()), leases: 1, stamp: 1, ..Default::default() },
        pb::Notice { entry: Some(entry_of(provisional)), ..Default::default() },
    ] {
        assert!(Notice::try_from(notice).is_err(), "{notice:?}");
    }
    let liar = Liar { roots: vec![provisional.into()], ..Liar::default() };
    assert!(liar.open().await.is_err());
}

/// The export's directory was replaced while there was no connection.
#[tokio::test]
async fn another_root_comes_with_the_loss_of_all_leases() {
    let roots = [1, 2].map(|inode| file(inode).into()).to_vec();
    let liar = Liar { roots, ..Liar::says(Said::Entry(entry_of(file(7)))) };
    let remote = liar.open().await.unwrap();
    let mut notices = remote.notices();
    assert_eq!(remote.root(), file(1));
    let caller = caller();
    let asked = remote.call(&caller, Op::Attributes(file(7).into()));
    timeout(PATIENCE, asked).await.unwrap().unwrap();
    let notice = timeout(PATIENCE, notices.next()).await.unwrap();
    assert!(matches!(notice, Some(Notice::Lost { .. })), "{notice:?}");
    assert_eq!(remote.root(), file(2));
}

/// The name of the server means another machine for a while.
#[tokio::test]
async fn a_volume_goes_on_with_no_other_machine_and_with_its_own_when_that_is_back() {
    let roots = [1, 2, 1].map(|inode| file(inode).into()).to_vec();
    let answer = Said::Entry(entry_of(file(7)));
    let liar = Liar { roots, machines: vec!["one", "two", "one"], ..Liar::says(answer) };
    let sessions = Arc::clone(&liar.sessions);
    let remote = liar.open().await.unwrap();
    assert_eq!(remote.machine(), "one");
    let mut notices = remote.notices();
    let asked = caller();
    let asked = remote.call(&asked, Op::Attributes(file(7).into()));
    let told = async {
        let is_told = |fault: String| fault.contains("leads to another machine now");
        while !remote.state().fault.is_some_and(is_told) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let (answered, ()) = timeout(PATIENCE, async { tokio::join!(asked, told) }).await.unwrap();
    answered.unwrap();
    assert_eq!((sessions.load(Ordering::Relaxed), remote.root()), (3, file(1)));
    // Nothing of the other one was taken up.
    assert!(timeout(Duration::ZERO, notices.next()).await.is_err());
}
