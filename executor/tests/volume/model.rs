//! Runs the same operations on a volume and, by the standard library, on a plain directory, and
//! compares results and trees.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write as _},
    os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt},
    path::Path,
};

use bytes::Bytes;
use posh_volume::{Errno, Store, store::*};
use proptest::prelude::*;

use super::harness::*;

#[derive(Debug, Clone)]
enum Step {
    Make(usize, u32),
    Create(usize, u32),
    Write(usize, u16, Vec<u8>),
    Append(usize, Vec<u8>),
    Truncate(usize, u16),
    Read(usize),
    Mode(usize, u32),
    Remove(usize),
    RemoveDirectory(usize),
    Rename(usize, usize),
    Link(usize, usize),
    Symlink(usize, usize),
    ReadLink(usize),
    List(usize),
}

/// Few names, so that operations conflict.
const PATHS: [&str; 9] = ["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "c", "c/a"];

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let path = || 0..PATHS.len();
    let mode = || prop::sample::select(vec![0o600_u32, 0o644, 0o755, 0o700]);
    let data = || prop::collection::vec(any::<u8>(), 1..200);
    let step = prop_oneof![
        3 => (path(), mode()).prop_map(|(path, mode)| Step::Make(path, mode)),
        4 => (path(), mode()).prop_map(|(path, mode)| Step::Create(path, mode)),
        3 => (path(), any::<u16>(), data()).prop_map(|(path, at, data)| Step::Write(path, at, data)),
        2 => (path(), data()).prop_map(|(path, data)| Step::Append(path, data)),
        1 => (path(), any::<u16>()).prop_map(|(path, size)| Step::Truncate(path, size)),
        2 => path().prop_map(Step::Read),
        1 => (path(), mode()).prop_map(|(path, mode)| Step::Mode(path, mode)),
        2 => path().prop_map(Step::Remove),
        1 => path().prop_map(Step::RemoveDirectory),
        2 => (path(), path()).prop_map(|(from, to)| Step::Rename(from, to)),
        1 => (path(), path()).prop_map(|(from, to)| Step::Link(from, to)),
        1 => (path(), path()).prop_map(|(from, to)| Step::Symlink(from, to)),
        1 => path().prop_map(Step::ReadLink),
        1 => path().prop_map(Step::List),
    ];
    prop::collection::vec(step, 1..60)
}

/// Result of a step: an error, or bytes.
type Shown = Result<Vec<u8>, Errno>;

fn errno(error: io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().expect("an error of the system"))
}

/// Uses the standard library. Follows no symbolic link: on a volume the workstation's kernel would.
fn on_directory(top: &Path, step: &Step) -> Shown {
    const NO_FOLLOW: i32 = nix::libc::O_NOFOLLOW;
    let at = |path: &usize| top.join(PATHS[*path]);
    let existing =
        |path: &usize| fs::OpenOptions::new().write(true).custom_flags(NO_FOLLOW).open(at(path));
    let is_link =
        |path: &usize| fs::symlink_metadata(at(path)).is_ok_and(|found| found.is_symlink());
    let nothing = |done: io::Result<()>| done.map(|()| Vec::new()).map_err(errno);
    match step {
        Step::Make(path, mode) => nothing(
            fs::create_dir(at(path))
                .and_then(|()| fs::set_permissions(at(path), PermissionsExt::from_mode(*mode))),
        ),
        Step::Create(path, mode) => {
            let mut options = fs::OpenOptions::new();
            options.write(true).create_new(true);
            nothing(
                options
                    .open(at(path))
                    .and_then(|file| file.set_permissions(PermissionsExt::from_mode(*mode))),
            )
        }
        Step::Write(path, offset, data) => {
            nothing(existing(path).and_then(|file| file.write_all_at(data, (*offset).into())))
        }
        Step::Append(path, data) => {
            let mut options = fs::OpenOptions::new();
            options.append(true).custom_flags(NO_FOLLOW);
            nothing(options.open(at(path)).and_then(|mut file| file.write_all(data)))
        }
        Step::Truncate(path, size) => {
            nothing(existing(path).and_then(|file| file.set_len((*size).into())))
        }
        Step::Read(path) => {
            let file = fs::OpenOptions::new().read(true).custom_flags(NO_FOLLOW).open(at(path));
            file.and_then(|mut file| {
                let mut content = Vec::new();
                io::Read::read_to_end(&mut file, &mut content).map(|_| content)
            })
            .map_err(errno)
        }
        Step::Mode(path, _) if is_link(path) => Err(Errno::EOPNOTSUPP),
        Step::Mode(path, mode) => {
            nothing(fs::set_permissions(at(path), PermissionsExt::from_mode(*mode)))
        }
        Step::Remove(path) => nothing(fs::remove_file(at(path))),
        Step::RemoveDirectory(path) => nothing(fs::remove_dir(at(path))),
        Step::Rename(from, to) => nothing(fs::rename(at(from), at(to))),
        Step::Link(from, to) => nothing(fs::hard_link(at(from), at(to))),
        Step::Symlink(from, to) => nothing(std::os::unix::fs::symlink(PATHS[*from], at(to))),
        Step::ReadLink(path) => fs::read_link(at(path))
            .map(|target| target.into_os_string().into_encoded_bytes())
            .map_err(errno),
        Step::List(path) => {
            if is_link(path) {
                return Err(Errno::ENOTDIR);
            }
            let names = fs::read_dir(at(path)).map_err(errno)?;
            let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            Ok(names.join("/".as_ref()).into_encoded_bytes())
        }
    }
}

/// The directory and the name of a path.
async fn parted(store: &dyn Store, path: usize) -> Result<(FileId, std::ffi::OsString), Errno> {
    let path = Path::new(PATHS[path]);
    let above = path.parent().unwrap().to_str().unwrap();
    let parent = find(store, above).await?.attributes;
    if parent.kind != Kind::Directory {
        return Err(Errno::ENOTDIR);
    }
    Ok((parent.id, path.file_name().unwrap().to_owned()))
}

async fn on_volume(store: &dyn Store, step: &Step) -> Shown {
    let done = |answer: Result<Answer, Errno>| answer.map(|_| Vec::new());
    match step {
        Step::Make(path, mode) => {
            let (parent, name) = parted(store, *path).await?;
            done(call(store, Op::MakeDirectory { parent, name, mode: (*mode).into() }).await)
        }
        Step::Create(path, mode) => {
            let (parent, name) = parted(store, *path).await?;
            let op =
                Op::Create { parent, name, mode: (*mode).into(), flags: RW | OpenFlags::EXCLUSIVE };
            let Answer::Opened { handle, .. } = call(store, op).await? else { panic!("opened") };
            done(call(store, Op::Close(handle)).await)
        }
        Step::Write(path, offset, data) => {
            let (place, _) = open(store, PATHS[*path], OpenFlags::WRITE).await?;
            let entry = write(store, place, (*offset).into(), data.clone()).await?;
            assert!(entry.attributes.size >= u64::from(*offset) + data.len() as u64);
            done(call(store, Op::Close(place.handle.unwrap())).await)
        }
        Step::Append(path, data) => {
            let place = find(store, PATHS[*path]).await?.attributes.id.into();
            let append = Write::Append { place, data: Bytes::from(data.clone()) };
            store.write(&me(), vec![append]).await?.remove(0).map(|_| Vec::new())
        }
        Step::Truncate(path, size) => {
            let place = find(store, PATHS[*path]).await?.attributes.id.into();
            let changes = Changes { size: Some((*size).into()), ..Changes::default() };
            done(call(store, Op::Set { place, changes }).await)
        }
        Step::Read(path) => {
            let place = find(store, PATHS[*path]).await?.attributes.id.into();
            content(store, place).await.map(|(content, _)| content)
        }
        Step::Mode(path, mode) => {
            let place = find(store, PATHS[*path]).await?.attributes.id.into();
            let changes = Changes { mode: Some(*mode), ..Changes::default() };
            done(call(store, Op::Set { place, changes }).await)
        }
        Step::Remove(path) => remove(store, *path, Removal::File).await,
        Step::RemoveDirectory(path) => remove(store, *path, Removal::Directory).await,
        Step::Rename(from, to) => {
            let (parent, name) = parted(store, *from).await?;
            let (new_parent, new_name) = parted(store, *to).await?;
            let how = Renaming::Replace;
            done(call(store, Op::Rename { parent, name, new_parent, new_name, how }).await)
        }
        Step::Link(from, to) => {
            let file = find(store, PATHS[*from]).await?.attributes.id.into();
            let (parent, name) = parted(store, *to).await?;
            done(call(store, Op::Link { file, parent, name }).await)
        }
        Step::Symlink(from, to) => {
            let (parent, name) = parted(store, *to).await?;
            done(call(store, Op::Symlink { parent, name, target: PATHS[*from].into() }).await)
        }
        Step::ReadLink(path) => {
            let file = find(store, PATHS[*path]).await?.attributes.id;
            let Answer::Target { target, .. } = call(store, Op::ReadLink(file)).await? else {
                panic!("a target")
            };
            Ok(target.into_encoded_bytes())
        }
        Step::List(path) => {
            let directory = find(store, PATHS[*path]).await?.attributes.id;
            let op = Op::List { directory, cookie: 0, limit: 1000 };
            let Answer::Listing(listing) = call(store, op).await? else { panic!("a listing") };
            let mut names: Vec<_> = listing.names.into_iter().map(|listed| listed.name).collect();
            names.sort();
            Ok(names.join("/".as_ref()).into_encoded_bytes())
        }
    }
}

async fn remove(store: &dyn Store, path: usize, what: Removal) -> Shown {
    let (parent, name) = parted(store, path).await?;
    call(store, Op::Remove { parent, name, what }).await.map(|_| Vec::new())
}

/// Name → kind and mode, links, size, contents.
fn tree(top: &Path) -> BTreeMap<String, (u32, u64, Vec<u8>)> {
    let mut tree = BTreeMap::new();
    for path in PATHS {
        let Ok(found) = fs::symlink_metadata(top.join(path)) else { continue };
        // Some of these names may lead through a link by now, on both sides.
        let content = if found.is_file() { fs::read(top.join(path)).unwrap() } else { Vec::new() };
        tree.insert(path.to_owned(), (found.mode(), found.nlink(), content));
    }
    tree
}

/// The workstation's kernel resolves a path through a symbolic link.
fn leads_through_a_link(top: &Path, step: &Step) -> bool {
    let paths: Vec<usize> = match step {
        Step::Rename(a, b) | Step::Link(a, b) => vec![*a, *b],
        Step::Symlink(_, b) => vec![*b],
        Step::Make(a, _)
        | Step::Create(a, _)
        | Step::Write(a, ..)
        | Step::Append(a, _)
        | Step::Truncate(a, _) => {
            vec![*a]
        }
        Step::Read(a)
        | Step::Mode(a, _)
        | Step::Remove(a)
        | Step::RemoveDirectory(a)
        | Step::ReadLink(a) => vec![*a],
        Step::List(a) => vec![*a],
    };
    let above = |path: &usize| {
        Path::new(PATHS[*path]).ancestors().skip(1).map(|above| top.join(above)).collect::<Vec<_>>()
    };
    let is_link = |path: &std::path::PathBuf| {
        fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink())
    };
    paths.iter().flat_map(above).any(|path| is_link(&path))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn a_volume_is_a_directory(steps in steps()) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async {
            let plain = tempfile::tempdir().unwrap();
            let site = Site::new().await;
            let store = site.remote().await;
            for step in steps.iter().filter(|step| !leads_through_a_link(plain.path(), step)).collect::<Vec<_>>() {
                if leads_through_a_link(plain.path(), step) {
                    continue;
                }
                let expected = on_directory(plain.path(), step);
                let found = on_volume(&store, step).await;
                assert_eq!(found, expected, "{step:?}");
                assert_eq!(tree(site.top.path()), tree(plain.path()), "{step:?}");
            }
        });
    }
}
