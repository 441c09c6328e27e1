//! Random calls in a new tree give what they give in a plain directory, also while another session
//! looks, and after everything has been sent.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use posh_volume::{Errno, fs::Source, store::*};
use proptest::prelude::*;

use crate::client::{Client, NEW, Site};

/// One call. Names are few, so that calls collide.
#[derive(Debug, Clone)]
enum Call {
    Create {
        name: u8,
        length: u16,
        stays_open: bool,
    },
    Write {
        name: u8,
        offset: u16,
        length: u16,
    },
    Append {
        name: u8,
        length: u16,
    },
    CloseAll,
    Truncate {
        name: u8,
        length: u32,
    },
    Mode {
        name: u8,
        mode: u8,
    },
    Times {
        name: u8,
        seconds: u16,
    },
    Remove {
        name: u8,
    },
    MakeDirectory {
        name: u8,
    },
    RemoveDirectory {
        name: u8,
    },
    Rename {
        from: u8,
        to: u8,
    },
    Link {
        from: u8,
        to: u8,
    },
    /// copy_file_range(2) of a part to a new file.
    Copy {
        from: u8,
        to: u8,
        offset: u16,
        length: u32,
    },
    Symlink {
        name: u8,
    },
    Read {
        name: u8,
    },
    Stat {
        name: u8,
    },
    List {
        name: u8,
    },
    /// A read by the other session.
    OtherReads {
        name: u8,
    },
    OtherStats {
        name: u8,
    },
    OtherLists {
        name: u8,
    },
    OtherCreates {
        name: u8,
    },
    /// Flush, and comparison with the server's files.
    Settle,
}

fn call() -> impl Strategy<Value = Call> {
    let name = || 0..15_u8;
    prop_oneof![
        8 => (name(), any::<u16>(), any::<bool>())
            .prop_map(|(name, length, stays_open)| Call::Create { name, length, stays_open }),
        3 => (name(), any::<u16>(), any::<u16>()).prop_map(|(name, offset, length)| Call::Write { name, offset, length }),
        1 => (name(), 0..5000_u16).prop_map(|(name, length)| Call::Append { name, length }),
        1 => Just(Call::CloseAll),
        2 => (name(), 0..600_000_u32).prop_map(|(name, length)| Call::Truncate { name, length }),
        2 => (name(), 0..64_u8).prop_map(|(name, mode)| Call::Mode { name, mode }),
        2 => (name(), any::<u16>()).prop_map(|(name, seconds)| Call::Times { name, seconds }),
        3 => name().prop_map(|name| Call::Remove { name }),
        3 => name().prop_map(|name| Call::MakeDirectory { name }),
        1 => name().prop_map(|name| Call::RemoveDirectory { name }),
        2 => (name(), name()).prop_map(|(from, to)| Call::Rename { from, to }),
        1 => (name(), name()).prop_map(|(from, to)| Call::Link { from, to }),
        2 => (name(), name(), any::<u16>(), 0..600_000_u32)
            .prop_map(|(from, to, offset, length)| Call::Copy { from, to, offset, length }),
        1 => name().prop_map(|name| Call::Symlink { name }),
        2 => name().prop_map(|name| Call::Read { name }),
        4 => name().prop_map(|name| Call::Stat { name }),
        1 => name().prop_map(|name| Call::List { name }),
        1 => name().prop_map(|name| Call::OtherReads { name }),
        1 => name().prop_map(|name| Call::OtherStats { name }),
        1 => name().prop_map(|name| Call::OtherLists { name }),
        1 => name().prop_map(|name| Call::OtherCreates { name }),
        1 => Just(Call::Settle),
    ]
}

fn path_of(name: u8) -> PathBuf {
    let last = (name % 5).to_string();
    match name / 5 {
        0 => Path::new("t").join(last),
        1 => Path::new("t/0").join(last),
        _ => Path::new("t/0/1").join(last),
    }
}

type Outcome = Result<String, i32>;

/// By a volume.
async fn ours(call: &Call, client: &mut Client) -> Result<String, Errno> {
    match *call {
        Call::Create { name, length, stays_open } => {
            let (opened, _) = client.create(path_of(name), NEW).await?;
            let data = Bytes::from(vec![b'c'; usize::from(length)]);
            client.volume.write(opened.number, 0, data, Source::Call).await?;
            if stays_open {
                client.open.insert(path_of(name), opened);
            } else {
                client.close(opened).await?;
            }
        }
        Call::Write { name, offset, length } => {
            let data = Bytes::from(vec![b'w'; usize::from(length)]);
            // By what is open already, if it is.
            let opened = match client.open.get(&path_of(name)) {
                Some(opened) => *opened,
                None => {
                    let number = file(client, name).await?;
                    client.volume.open(&client.caller, number, OpenFlags::WRITE).await?
                }
            };
            client.volume.write(opened.number, offset.into(), data, Source::Call).await?;
            if !client.open.contains_key(&path_of(name)) {
                client.close(opened).await?;
            }
        }
        Call::Append { name, length } => {
            let number = file(client, name).await?;
            let flags = OpenFlags::WRITE | OpenFlags::APPEND;
            let opened = client.volume.open(&client.caller, number, flags).await?;
            let size = client.volume.attributes(&client.caller, number).await?.size;
            let data = Bytes::from(vec![b'a'; usize::from(length)]);
            client.volume.write(opened.number, size, data, Source::Append).await?;
            client.close(opened).await?;
        }
        Call::CloseAll => {
            for (_, opened) in std::mem::take(&mut client.open) {
                client.close(opened).await?;
            }
        }
        Call::Truncate { name, length } => {
            let number = file(client, name).await?;
            let open = client.open.get(&path_of(name)).map(|opened| opened.number);
            let changes = Changes { size: Some(length.into()), ..Changes::default() };
            client.volume.change(&client.caller, number, open, changes).await?;
        }
        Call::Mode { name, mode } => {
            let number = client.number(&path_of(name)).await?;
            let changes = Changes { mode: Some(0o700 | u32::from(mode)), ..Changes::default() };
            if client.volume.attributes(&client.caller, number).await?.kind != Kind::Symlink {
                client.volume.change(&client.caller, number, None, changes).await?;
            }
        }
        Call::Times { name, seconds } => {
            let number = client.number(&path_of(name)).await?;
            let time = Some(NewTime::At(Time { seconds: seconds.into(), nanoseconds: 1 }));
            let changes = Changes { mtime: time, atime: time, ..Changes::default() };
            client.volume.change(&client.caller, number, None, changes).await?;
        }
        Call::Remove { name } => client.remove(path_of(name), Removal::File).await?,
        Call::MakeDirectory { name } => drop(client.make_directory(path_of(name)).await?),
        Call::RemoveDirectory { name } => client.remove(path_of(name), Removal::Directory).await?,
        Call::Rename { from, to } => {
            let (from, to) = (path_of(from), path_of(to));
            let (from, to) = (client.parent(&from).await?, client.parent(&to).await?);
            client.volume.rename(&client.caller, from, to, Renaming::Replace).await?;
        }
        Call::Link { from, to } => {
            let (number, to) = (client.number(&path_of(from)).await?, path_of(to));
            let at = client.parent(&to).await?;
            client.volume.link(&client.caller, number, at).await?;
        }
        Call::Copy { from, to, offset, length } => {
            let number = file(client, from).await?;
            let source = client.volume.open(&client.caller, number, OpenFlags::READ).await?;
            let target = match client.create(path_of(to), NEW).await {
                Ok((target, _)) => target,
                Err(errno) => {
                    client.close(source).await?;
                    return Err(errno);
                }
            };
            let offset = u64::from(offset);
            let from = PositionIn { file: source.number, offset };
            let to = PositionIn { file: target.number, offset: offset / 2 };
            let copied = client.volume.copy(from, to, length.into()).await?;
            client.close(source).await?;
            client.close(target).await?;
            return Ok(copied.to_string());
        }
        Call::Symlink { name } => client.symlink(path_of(name), "somewhere").await?,
        Call::Read { name } | Call::OtherReads { name } => {
            file(client, name).await?;
            let data = client.read(path_of(name)).await?;
            return Ok(format!("{data:?}"));
        }
        Call::Stat { name } | Call::OtherStats { name } => {
            return Ok(seen(&client.stat(path_of(name)).await?));
        }
        Call::List { name } | Call::OtherLists { name } => {
            let number = client.number(&path_of(name)).await?;
            if client.volume.attributes(&client.caller, number).await?.kind != Kind::Directory {
                return Err(Errno::ENOTDIR);
            }
            return Ok(format!("{:?}", client.names(path_of(name)).await?));
        }
        Call::OtherCreates { name } => {
            let (opened, _) = client.create(path_of(name), NEW).await?;
            client.close(opened).await?;
        }
        Call::Settle => client.volume.settle().await?,
    }
    Ok(String::new())
}

/// The number of an ordinary file: symbolic links are followed by the kernel, and here by nobody.
async fn file(client: &Client, name: u8) -> Result<u64, Errno> {
    let number = client.number(&path_of(name)).await?;
    match client.volume.attributes(&client.caller, number).await?.kind {
        Kind::Symlink => Err(Errno::ELOOP),
        Kind::Directory => Err(Errno::EISDIR),
        _ => Ok(number),
    }
}

fn seen(found: &Attributes) -> String {
    // A directory's size and links are matters of its file system; a time that was not given is
    // nobody's.
    let (size, links) =
        if found.kind == Kind::Directory { (0, 0) } else { (found.size, found.links) };
    let mtime = Some(found.mtime.seconds).filter(|seconds| *seconds < 100_000);
    format!("{:?} {:o} {size} {links} {mtime:?}", found.kind, found.mode)
}

/// By the system.
fn theirs(call: &Call, top: &Path, open: &mut Vec<(PathBuf, File)>) -> io::Result<String> {
    let path = |name: u8| top.join(path_of(name));
    let held = |open: &Vec<(PathBuf, File)>, name: u8| {
        open.iter()
            .find(|(path, _)| *path == path_of(name))
            .map(|(_, file)| file.try_clone().unwrap())
    };
    match *call {
        Call::Create { name, length, stays_open } => {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o644)
                .open(path(name))?;
            file.write_all_at(&vec![b'c'; usize::from(length)], 0)?;
            if stays_open {
                open.retain(|(path, _)| *path != path_of(name));
                open.push((path_of(name), file));
            }
        }
        Call::Write { name, offset, length } => {
            let file = match held(open, name) {
                Some(file) => file,
                None => regular(&path(name), OpenOptions::new().write(true))?,
            };
            file.write_all_at(&vec![b'w'; usize::from(length)], offset.into())?;
        }
        Call::Append { name, length } => {
            let mut file = regular(&path(name), OpenOptions::new().append(true))?;
            io::Write::write_all(&mut file, &vec![b'a'; usize::from(length)])?;
        }
        Call::CloseAll => open.clear(),
        Call::Truncate { name, length } => {
            regular(&path(name), OpenOptions::new().write(true))?.set_len(length.into())?;
        }
        Call::Mode { name, mode } => {
            if !fs::symlink_metadata(path(name))?.is_symlink() {
                fs::set_permissions(
                    path(name),
                    fs::Permissions::from_mode(0o700 | u32::from(mode)),
                )?;
            }
        }
        Call::Times { name, seconds } => {
            let time = rustix::fs::Timespec { tv_sec: seconds.into(), tv_nsec: 1 };
            let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
            let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
            rustix::fs::utimensat(rustix::fs::CWD, path(name), &times, flags)?;
        }
        Call::Remove { name } => fs::remove_file(path(name))?,
        Call::MakeDirectory { name } => {
            fs::create_dir(path(name))?;
            fs::set_permissions(path(name), fs::Permissions::from_mode(0o755))?;
        }
        Call::RemoveDirectory { name } => fs::remove_dir(path(name))?,
        Call::Rename { from, to } => fs::rename(path(from), path(to))?,
        Call::Link { from, to } => fs::hard_link(path(from), path(to))?,
        Call::Copy { from, to, offset, length } => {
            let source = regular(&path(from), OpenOptions::new().read(true))?;
            let target = OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o644)
                .open(path(to))?;
            let (mut here, mut there) = (u64::from(offset), u64::from(offset) / 2);
            let copied = rustix::fs::copy_file_range(
                source,
                Some(&mut here),
                target,
                Some(&mut there),
                length as usize,
            )?;
            return Ok(copied.to_string());
        }
        Call::Symlink { name } => symlink("somewhere", path(name))?,
        Call::Read { name } | Call::OtherReads { name } => {
            regular(&path(name), OpenOptions::new().read(true))?;
            return Ok(format!("{:?}", fs::read(path(name))?));
        }
        Call::Stat { name } | Call::OtherStats { name } => {
            return Ok(shown(&fs::symlink_metadata(path(name))?));
        }
        Call::List { name } | Call::OtherLists { name } => {
            if !fs::symlink_metadata(path(name))?.is_dir() {
                return Err(Errno::ENOTDIR.into());
            }
            let names = fs::read_dir(path(name))?
                .map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<String> = names.collect();
            names.sort();
            return Ok(format!("{names:?}"));
        }
        Call::OtherCreates { name } => {
            drop(OpenOptions::new().write(true).create_new(true).mode(0o644).open(path(name))?);
        }
        Call::Settle => {}
    }
    Ok(String::new())
}

fn shown(found: &fs::Metadata) -> String {
    let kind = match found.file_type() {
        kind if kind.is_dir() => Kind::Directory,
        kind if kind.is_symlink() => Kind::Symlink,
        _ => Kind::Regular,
    };
    let (size, links) = if found.is_dir() { (0, 0) } else { (found.len(), found.nlink()) };
    let mtime = Some(found.mtime()).filter(|seconds| *seconds < 100_000);
    format!("{kind:?} {:o} {size} {links} {mtime:?}", found.mode() & 0o7777)
}

fn regular(path: &Path, options: &OpenOptions) -> io::Result<File> {
    let found = fs::symlink_metadata(path)?;
    if found.is_symlink() {
        return Err(Errno::ELOOP.into());
    }
    if found.is_dir() {
        return Err(Errno::EISDIR.into());
    }
    options.open(path)
}

/// Names, kinds, modes and contents of a tree.
fn picture(top: &Path) -> Vec<(PathBuf, String, Option<Vec<u8>>)> {
    let mut names: Vec<PathBuf> =
        fs::read_dir(top).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    let mut all = Vec::new();
    for path in names {
        let found = fs::symlink_metadata(&path).unwrap();
        let content = found.is_file().then(|| fs::read(&path).unwrap());
        all.push((path.file_name().unwrap().into(), shown(&found), content));
        if found.is_dir() {
            all.extend(picture(&path));
        }
    }
    all
}

fn is_open_elsewhere(call: &Call, open: &[(PathBuf, File)]) -> bool {
    // What a name is open as, after it has become another file's, is not what this is about.
    let is_open = |name: u8| {
        open.iter().any(|(path, _)| *path == path_of(name) || path.starts_with(path_of(name)))
    };
    match *call {
        Call::Remove { name } | Call::RemoveDirectory { name } => is_open(name),
        Call::Rename { from, to } | Call::Link { from, to } => is_open(from) || is_open(to),
        _ => false,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn random_calls_in_a_new_tree_give_what_they_give_in_a_plain_directory(
        calls in proptest::collection::vec(call(), 1..150),
    ) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let site = Site::new();
        let plain = tempfile::tempdir().unwrap();
        let (mut one, mut other) = runtime.block_on(async { (site.client("a").await, site.client("b").await) });
        runtime.block_on(one.make_directory("t")).unwrap();
        fs::create_dir(plain.path().join("t")).unwrap();
        fs::set_permissions(plain.path().join("t"), fs::Permissions::from_mode(0o755)).unwrap();
        let mut open = Vec::new();
        for (number, call) in calls.iter().enumerate() {
            if is_open_elsewhere(call, &open) {
                continue;
            }
            let who = match call {
                Call::OtherReads { .. } | Call::OtherStats { .. } | Call::OtherLists { .. } | Call::OtherCreates { .. } =>
                    &mut other,
                _ => &mut one,
            };
            let by_us: Outcome = runtime.block_on(ours(call, who)).map_err(|errno| errno as i32);
            let by_them: Outcome = theirs(call, plain.path(), &mut open).map_err(|e| e.raw_os_error().unwrap());
            prop_assert_eq!(by_us, by_them, "call {}: {:?}", number, call);
            if matches!(call, Call::Settle) {
                prop_assert_eq!(picture(&site.path("t")), picture(&plain.path().join("t")), "settled after call {}", number);
            }
        }
        runtime.block_on(one.volume.drain_all()).unwrap();
        prop_assert_eq!(picture(&site.path("t")), picture(&plain.path().join("t")));
        prop_assert_eq!(one.volume.state().lost, None);
        runtime.shutdown_background();
    }
}
