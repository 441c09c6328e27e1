//! A session's cached data under its leases equals the files, whoever changes them.

use std::{
    collections::HashMap,
    fs,
    process::Command,
    sync::{Arc, Mutex},
};

use posh_volume::{Store, remote::Remote, store::*};
use tokio_stream::StreamExt as _;

use super::harness::*;

const FILES: u64 = 4;
const STEPS: u64 = 1500;

/// A client that caches as much as its leases allow.
struct Caching {
    store: Arc<Remote>,
    memory: Arc<Mutex<Memory>>,
    hits: u64,
}

#[derive(Default)]
struct Memory {
    contents: HashMap<FileId, Vec<u8>>,
    recalled: HashMap<FileId, Stamp>,
    lost: Stamp,
}

impl Caching {
    fn new(store: Remote, tasks: &mut tokio::task::JoinSet<()>) -> Self {
        let store = Arc::new(store);
        let memory = Arc::<Mutex<Memory>>::default();
        let (its, remembered) = (store.clone(), memory.clone());
        let mut notices = store.notices();
        tasks.spawn(async move {
            while let Some(notice) = notices.next().await {
                match notice {
                    Notice::Recall { file, leases, stamp } => {
                        {
                            let mut memory = remembered.lock().unwrap();
                            memory.contents.remove(&file);
                            memory.recalled.insert(file, stamp);
                        }
                        let _ = its
                            .call(&me(), Op::Return(vec![Returned { file, leases, stamp }]))
                            .await;
                    }
                    Notice::Is(_) | Notice::All { .. } => {}
                    Notice::Lost { stamp } => {
                        let mut memory = remembered.lock().unwrap();
                        memory.contents.clear();
                        memory.lost = stamp;
                    }
                }
            }
        });
        Self { store, memory, hits: 0 }
    }

    /// From the cache where a lease allows it.
    async fn read(&mut self, file: FileId) -> Vec<u8> {
        if self.store.valid_until() > std::time::Instant::now()
            && let Some(known) = self.memory.lock().unwrap().contents.get(&file)
        {
            self.hits += 1;
            return known.clone();
        }
        let (content, entry) = content(&*self.store, file.into()).await.unwrap();
        let entry = entry.unwrap();
        let mut memory = self.memory.lock().unwrap();
        let recalled = memory.recalled.get(&file).copied().unwrap_or_default().max(memory.lost);
        if entry.leases.contains(Leases::DATA) && entry.stamp > recalled {
            memory.contents.insert(file, content.clone());
        }
        content
    }

    async fn write(&self, file: FileId, data: &str) {
        write(&*self.store, file.into(), 0, data.as_bytes().to_vec()).await.unwrap();
        if let Some(known) = self.memory.lock().unwrap().contents.get_mut(&file) {
            *known = data.as_bytes().to_vec();
        }
    }
}

/// Small, and the same numbers each time.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_sessions_and_a_program_of_the_server_are_never_stale() {
    let site = Site::new().await;
    let mut tasks = tokio::task::JoinSet::new();
    let proxy = Proxy::to(site.address).await;
    let behind =
        Remote::open(Arc::new(Direct(proxy.address)), EXPORT, Default::default()).await.unwrap();
    let mut clients =
        [Caching::new(behind, &mut tasks), Caching::new(site.remote().await, &mut tasks)];
    let mut files = Vec::new();
    for number in 0..FILES {
        fs::write(site.path(&format!("f{number}")), "00000000").unwrap();
        files.push(find(&*clients[0].store, &format!("f{number}")).await.unwrap().attributes.id);
    }
    let mut numbers = Numbers(7);
    let mut expected = vec!["00000000".to_owned(); FILES as usize];
    for step in 0..STEPS {
        let file = numbers.below(FILES) as usize;
        let client = numbers.below(2) as usize;
        match numbers.below(100) {
            0..20 => {
                expected[file] = format!("{step:08}");
                clients[client].write(files[file], &expected[file]).await;
            }
            // By another program: as after every offloaded command, the gateway asks for changes.
            20..23 => {
                expected[file] = format!("{step:08}");
                let script = format!("printf {} > f{file}", expected[file]);
                assert!(
                    Command::new("sh")
                        .args(["-c", &script])
                        .current_dir(site.top.path())
                        .status()
                        .unwrap()
                        .success()
                );
                for client in &clients {
                    let Answer::Settled(settled) =
                        call(&*client.store, Op::Settle(Settling::Recalls)).await.unwrap()
                    else {
                        panic!("settled")
                    };
                    assert!(settled > Stamp(0));
                }
            }
            23 => proxy.cut(),
            _ => {
                let found = clients[client].read(files[file]).await;
                assert_eq!(String::from_utf8_lossy(&found), expected[file], "step {step}, f{file}");
            }
        }
    }
    assert!(clients.iter().all(|client| client.hits > STEPS / 20), "nothing was remembered");
}
