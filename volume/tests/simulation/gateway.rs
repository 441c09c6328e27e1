//! A gateway's process with one volume, its journal on the disk, and what programs do by paths.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use posh_volume::{
    Errno, Store,
    fs::{EarlierSessionsError, Opened, ROOT, Settings, Source, Volume},
    journal::Journal,
    store::*,
};
use tokio::time::sleep;

use crate::{
    link::Link,
    server::{Fault, Site},
};

/// Records of the journal begin with their length and their checksum.
const RECORD_HEAD: usize = 8;
/// Files that a volume holds: so few that they are given up all the time, or so many that none is.
const MOST_FILES: [usize; 4] = [2, 6, 20, 1000];

/// Shorter ones tell that something is done.
const SHORTEST_RECORD: usize = 40;

pub struct Gateway {
    pub volume: Arc<Volume>,
    pub link: Arc<Link>,
    disk: PathBuf,
}

/// Where a machine's gateways have their journals, one directory for each process.
pub struct Machine {
    pub number: u64,
    pub top: PathBuf,
    pub processes: AtomicU64,
    pub seed: u64,
}

impl Machine {
    /// A gateway, with the journal as the last one has left it on the disk.
    pub async fn start(&self, site: &Arc<Site>, last: Option<&Path>) -> Gateway {
        let mut last = last.map(Path::to_owned);
        loop {
            let process = self.processes.fetch_add(1, Ordering::Relaxed);
            let disk = self.top.join(format!("journal-{}-{process}", self.number));
            if let Some(last) = &last {
                copy_journal(last, &disk, site.fault);
            }
            let link = Link::connect(site, self.number + 2 * process, self.seed).await;
            let settings = Settings {
                sync: false,
                memory_bytes: 4 << 20,
                most_files: MOST_FILES[self.seed as usize % MOST_FILES.len()],
            };
            let (volume, mut invalidations) =
                Volume::new(Arc::clone(&link) as Arc<dyn Store>, settings, None);
            tokio::spawn(async move { while invalidations.recv().await.is_some() {} });
            let (journal, left) = Journal::open(&disk).unwrap();
            let gateway = Gateway { volume, link, disk };
            let count = left.len();
            let name = Bytes::from((self.number + 2 * process).to_string());
            let ended = gateway.volume.end_earlier_sessions(&journal, &name).await;
            let taken_up = match ended {
                Ok(()) => gateway.volume.keep_journal(journal, left).await,
                Err(EarlierSessionsError::Store(errno)) => Err(errno),
                Err(EarlierSessionsError::Names(error)) => panic!("{error}"),
            };
            match taken_up {
                Ok(()) => {
                    site.log
                        .note(&format!("gateway {}-{process} is up, {count} records", self.number));
                    return gateway;
                }
                Err(errno) => {
                    site.log.note(&format!(
                        "gateway {}-{process} can't take its journal up: {errno}",
                        self.number
                    ));
                    last = Some(gateway.kill());
                    sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }
}

fn copy_journal(from: &Path, to: &Path, fault: Option<Fault>) {
    std::fs::create_dir(to).unwrap();
    std::os::unix::fs::PermissionsExt::set_mode(
        &mut std::fs::metadata(to).unwrap().permissions(),
        0o700,
    );
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() == "sessions" {
            std::fs::copy(entry.path(), to.join("sessions")).unwrap();
        }
        if entry.file_name().to_string_lossy().starts_with("journal-") {
            let mut data = std::fs::read(entry.path()).unwrap();
            if fault == Some(Fault::JournalTail) {
                cut_last_record(&mut data);
            }
            std::fs::write(to.join(entry.file_name()), data).unwrap();
        }
    }
}

fn cut_last_record(data: &mut Vec<u8>) {
    let (mut at, mut last) = (0, None);
    while let Some(head) = data.get(at..at + 4) {
        let length = u32::from_le_bytes(head.try_into().unwrap()) as usize;
        let end = at + RECORD_HEAD + length;
        if length > SHORTEST_RECORD {
            last = Some(at..end);
        }
        at = end;
    }
    if let Some(last) = last {
        data.drain(last);
    }
}

impl Gateway {
    /// Kills the gateway: its memory is lost, its journal stays. Returns the journal's directory.
    pub fn kill(&self) -> PathBuf {
        self.link.kill();
        self.volume.end();
        self.disk.clone()
    }

    fn caller() -> Caller {
        Caller::default()
    }

    pub async fn number(&self, path: &str) -> Result<u64, Errno> {
        let mut at = ROOT;
        for name in Path::new(path) {
            let its = NameIn { parent: at, name };
            let found = self.volume.lookup(&Self::caller(), its).await?;
            at = self.volume.tell(its, &found, |told| told.number);
        }
        Ok(at)
    }

    async fn parent<'a>(&self, path: &'a str) -> Result<NameIn<'a, u64>, Errno> {
        let path = Path::new(path);
        let parent = self.number(path.parent().unwrap().to_str().unwrap()).await?;
        Ok(NameIn { parent, name: path.file_name().unwrap() })
    }

    pub async fn create(&self, path: &str) -> Result<Opened, Errno> {
        let at = self.parent(path).await?;
        let flags = OpenFlags::READ | OpenFlags::WRITE | OpenFlags::EXCLUSIVE;
        let (opened, entry) = self.volume.create(&Self::caller(), at, 0o644.into(), flags).await?;
        self.volume.tell(at, &entry, |_| ());
        Ok(opened)
    }

    pub async fn open(&self, path: &str, flags: OpenFlags) -> Result<Opened, Errno> {
        let number = self.number(path).await?;
        self.volume.open(&Self::caller(), number, flags).await
    }

    pub async fn write(&self, opened: Opened, offset: u64, data: &[u8]) -> Result<(), Errno> {
        self.volume.write(opened.number, offset, Bytes::copy_from_slice(data), Source::Call).await
    }

    /// `offset`: where the kernel thinks that the end is.
    pub async fn append(&self, opened: Opened, offset: u64, data: &[u8]) -> Result<(), Errno> {
        self.volume.write(opened.number, offset, Bytes::copy_from_slice(data), Source::Append).await
    }

    pub async fn close(&self, opened: Opened) -> Result<(), Errno> {
        let flushed = self.volume.flush(opened.number, Some(1)).await;
        let released = self.volume.release(opened.number, Some(1)).await;
        flushed.and(released)
    }

    pub async fn size(&self, path: &str) -> Result<u64, Errno> {
        let number = self.number(path).await?;
        Ok(self.volume.attributes(&Self::caller(), number).await?.size)
    }

    /// The contents; `None` for a directory.
    pub async fn read(&self, path: &str) -> Result<Option<Vec<u8>>, Errno> {
        let number = self.number(path).await?;
        if self.volume.attributes(&Self::caller(), number).await?.kind == Kind::Directory {
            return Ok(None);
        }
        let opened = self.volume.open(&Self::caller(), number, OpenFlags::READ).await?;
        let mut data = Vec::new();
        let read = loop {
            match self.volume.read(opened.number, data.len() as u64, 128 << 10).await {
                Ok(piece) if piece.is_empty() => break Ok(()),
                Ok(piece) => data.extend_from_slice(&piece),
                Err(errno) => break Err(errno),
            }
        };
        let closed = self.close(opened).await;
        read.and(closed).map(|()| Some(data))
    }

    pub async fn make_directory(&self, path: &str) -> Result<(), Errno> {
        let at = self.parent(path).await?;
        let made = self.volume.make_directory(&Self::caller(), at, 0o755.into()).await?;
        self.volume.tell(at, &made, |_| ());
        Ok(())
    }

    pub async fn remove(&self, path: &str, what: Removal) -> Result<(), Errno> {
        let at = self.parent(path).await?;
        self.volume.remove(&Self::caller(), at, what).await
    }

    pub async fn rename(&self, from: &str, to: &str) -> Result<(), Errno> {
        let (from, to) = (self.parent(from).await?, self.parent(to).await?);
        self.volume.rename(&Self::caller(), from, to, Renaming::Replace).await
    }

    pub async fn sync_directory(&self, path: &str) -> Result<(), Errno> {
        let number = self.number(path).await?;
        self.volume.sync_directory(&Self::caller(), number, Synced::Everything).await
    }
}
