//! Chunks on a disk: against a model, over restarts, damage and full disks.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const SMALL_QUOTA: u64 = 20 * BLOCK_BYTES;

fn key(inode: u64, version: u64, index: u64) -> ChunkKey {
    ChunkKey { file: FileId { inode, generation: 7 }, version, index }
}

/// Returns the space on the disk, in whole blocks.
fn on_disk(directory: &Path) -> u64 {
    let shards = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir());
    let files = shards.flat_map(|shard| fs::read_dir(shard).unwrap());
    files.map(|file| file.unwrap().metadata().unwrap().size().next_multiple_of(BLOCK_BYTES)).sum()
}

/// Something done to the bytes of a chunk's file.
type Damage = Box<dyn Fn(&mut Vec<u8>)>;

fn only_file(directory: &Path) -> PathBuf {
    let shards = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir());
    let mut files: Vec<_> = shards.flat_map(|shard| fs::read_dir(shard).unwrap()).collect();
    assert_eq!(files.len(), 1);
    files.remove(0).unwrap().path()
}

#[derive(Debug, Clone)]
enum Step {
    Put(ChunkKey, usize),
    Get(ChunkKey),
    Forget(FileId, Option<u64>),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let keys =
        (0..3u64, 0..2u64, 0..3u64).prop_map(|(inode, version, index)| key(inode, version, index));
    prop_oneof![
        4 => (keys.clone(), 0..20_000usize).prop_map(|(key, bytes)| Step::Put(key, bytes)),
        4 => keys.clone().prop_map(Step::Get),
        1 => (keys, proptest::option::of(0..2u64)).prop_map(|(key, but)| Step::Forget(key.file, but)),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn it_gives_what_was_put_or_nothing_and_never_exceeds_its_quota(steps in prop::collection::vec(step(), 1..60)) {
        let directory = tempfile::tempdir().unwrap();
        let mut cache = DiskCache::open(directory.path(), SMALL_QUOTA).unwrap();
        let mut model: HashMap<ChunkKey, Vec<u8>> = HashMap::new();
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Put(key, bytes) => {
                    let data = vec![number as u8; bytes];
                    cache.put(key, &data);
                    prop_assert!(cache.has(key), "the last one put is not the one that goes");
                    model.insert(key, data);
                }
                Step::Get(key) => match cache.get(key) {
                    Some(data) => prop_assert_eq!(Some(&data[..]), model.get(&key).map(|data| &data[..])),
                    None => prop_assert!(!cache.has(key)),
                },
                Step::Forget(file, but) => {
                    cache.forget(file, but);
                    model.retain(|key, _| key.file != file || Some(key.version) == but);
                    for gone in (0..2).flat_map(|version| (0..3).map(move |index| (version, index))) {
                        let (version, index) = gone;
                        let is_gone = !cache.has(ChunkKey { file, version, index });
                        prop_assert!(is_gone || Some(version) == but);
                    }
                }
                Step::Restart => {
                    let before = cache.usage();
                    drop(cache);
                    cache = DiskCache::open(directory.path(), SMALL_QUOTA).unwrap();
                    prop_assert_eq!(cache.usage().chunks, before.chunks);
                }
            }
            prop_assert!(on_disk(directory.path()) <= SMALL_QUOTA);
            prop_assert_eq!(on_disk(directory.path()), cache.usage().bytes);
        }
        prop_assert_eq!(cache.usage().damaged, 0);
    }
}

#[test]
fn what_was_not_used_for_longest_goes_first() {
    let directory = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(directory.path(), 3 * BLOCK_BYTES).unwrap();
    (0..3).for_each(|index| cache.put(key(1, 0, index), b"contents"));
    assert!(cache.get(key(1, 0, 0)).is_some());
    cache.put(key(2, 0, 0), b"more");
    let kept = [0, 1, 2].map(|index| cache.has(key(1, 0, index)));
    assert_eq!(kept, [true, false, true]);
}

#[test]
fn a_chunk_larger_than_the_quota_is_not_kept_and_costs_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(directory.path(), BLOCK_BYTES / 2).unwrap();
    cache.put(key(1, 0, 0), b"contents");
    assert_eq!(cache.get(key(1, 0, 0)), None);
    assert_eq!(cache.usage().bytes, 0);
}

#[test]
fn a_smaller_quota_after_a_restart_is_kept_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(directory.path(), 8 * BLOCK_BYTES).unwrap();
    (0..8).for_each(|index| cache.put(key(1, 0, index), b"contents"));
    drop(cache);
    let cache = DiskCache::open(directory.path(), 2 * BLOCK_BYTES).unwrap();
    assert_eq!((cache.usage().chunks, on_disk(directory.path())), (2, 2 * BLOCK_BYTES));
}

#[test]
fn damage_anywhere_is_a_miss_and_gone_afterwards() {
    let directory = tempfile::tempdir().unwrap();
    let contents = vec![5; 3000];
    // A byte of every field, the contents, and both lengths that a crash can leave.
    let places = [0, 8, 12, 16, 24, 32, 40, HEADER_BYTES, HEADER_BYTES + 2999];
    let flips =
        places.map(|place| Box::new(move |bytes: &mut Vec<u8>| bytes[place] ^= 0x10) as Damage);
    let cuts: [Damage; 3] = [
        Box::new(|bytes| bytes.truncate(HEADER_BYTES + 100)),
        Box::new(|bytes| bytes.truncate(10)),
        Box::new(|bytes| bytes.push(0)),
    ];
    for damage in flips.into_iter().chain(cuts) {
        let cache = DiskCache::open(directory.path(), SMALL_QUOTA).unwrap();
        cache.put(key(1, 0, 0), &contents);
        assert_eq!(cache.get(key(1, 0, 0)).as_deref(), Some(&contents[..]));
        let path = only_file(directory.path());
        let mut bytes = fs::read(&path).unwrap();
        damage(&mut bytes);
        fs::write(&path, bytes).unwrap();
        assert_eq!(cache.get(key(1, 0, 0)), None);
        assert_eq!(cache.usage().damaged, 1);
        assert!(!path.exists() && !cache.has(key(1, 0, 0)));
        assert_eq!(cache.usage().bytes, 0);
    }
}

#[test]
fn a_chunk_under_another_name_is_not_taken_for_that() {
    let directory = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(directory.path(), SMALL_QUOTA).unwrap();
    cache.put(key(256, 0, 0), b"of version 0");
    drop(cache);
    let path = only_file(directory.path());
    fs::rename(&path, path.with_file_name(name_of(key(256, 1, 0)))).unwrap();
    let cache = DiskCache::open(directory.path(), SMALL_QUOTA).unwrap();
    assert_eq!(cache.get(key(256, 1, 0)), None);
}

#[test]
fn what_a_crash_left_goes_and_files_of_others_stay() {
    let directory = tempfile::tempdir().unwrap();
    drop(DiskCache::open(directory.path(), SMALL_QUOTA).unwrap());
    let [unfinished, others] = ["00/new-3", "00/notes.txt"].map(|name| directory.path().join(name));
    fs::create_dir(directory.path().join("00")).unwrap();
    fs::write(&unfinished, "half").unwrap();
    fs::write(&others, "mine").unwrap();
    let cache = DiskCache::open(directory.path(), SMALL_QUOTA).unwrap();
    assert_eq!((unfinished.exists(), others.exists(), cache.usage().chunks), (false, true, 0));
}

#[test]
fn a_directory_has_one_user_at_a_time() {
    let directory = tempfile::tempdir().unwrap();
    let first = DiskCache::open(directory.path(), SMALL_QUOTA).unwrap();
    let second = DiskCache::open(directory.path(), SMALL_QUOTA).unwrap_err();
    assert_eq!(second.kind(), io::ErrorKind::WouldBlock);
    drop(first);
    DiskCache::open(directory.path(), SMALL_QUOTA).unwrap();
}

#[test]
fn many_threads_share_it() {
    let directory = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(directory.path(), SMALL_QUOTA).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let cache = &cache;
            scope.spawn(move || {
                for round in 0..300u64 {
                    let key = key(round % 5, 0, round % 7);
                    let contents = [(round % 5) as u8, (round % 7) as u8];
                    if (round + u64::from(thread)).is_multiple_of(3) {
                        cache.put(key, &contents);
                    } else if let Some(found) = cache.get(key) {
                        assert_eq!(&found[..], &contents);
                    }
                }
            });
        }
    });
    assert_eq!((cache.usage().bytes, cache.usage().damaged), (on_disk(directory.path()), 0));
}

#[test]
fn a_directory_that_was_given_up_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let open = || DiskCache::open(directory.path(), SMALL_QUOTA);
    let first = open().unwrap();
    first.put(key(1, 0, 0), b"kept");
    assert!(open().is_err(), "it is in use");
    first.give_up();
    let second = open().unwrap();
    let before = on_disk(directory.path());
    first.put(key(2, 0, 0), b"late");
    first.forget(key(1, 0, 0).file, None);
    assert_eq!((first.get(key(1, 0, 0)), on_disk(directory.path())), (None, before));
    assert_eq!(second.get(key(1, 0, 0)).as_deref(), Some(b"kept".as_slice()));
}
