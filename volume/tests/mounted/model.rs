//! Random calls give on a mount what they give on a plain directory.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt, symlink},
    path::Path,
};

use proptest::prelude::*;

use crate::site::Site;

/// One call. Names are few, so that calls collide.
#[derive(Debug, Clone)]
enum Call {
    Write { name: u8, offset: u16, length: u16, value: u8 },
    Append { name: u8, length: u16 },
    Truncate { name: u8, length: u16 },
    Read { name: u8, offset: u16, length: u16 },
    Create { name: u8 },
    Remove { name: u8 },
    MakeDirectory { name: u8 },
    RemoveDirectory { name: u8 },
    Rename { from: u8, to: u8 },
    Link { from: u8, to: u8 },
    Symlink { from: u8, to: u8 },
    Look { name: u8 },
    List { name: u8 },
}

fn call() -> impl Strategy<Value = Call> {
    let name = || 0..10_u8;
    prop_oneof![
        4 => (name(), any::<u16>(), any::<u16>(), any::<u8>())
            .prop_map(|(name, offset, length, value)| Call::Write { name, offset, length, value }),
        1 => (name(), 0..5000_u16).prop_map(|(name, length)| Call::Append { name, length }),
        2 => (name(), any::<u16>()).prop_map(|(name, length)| Call::Truncate { name, length }),
        4 => (name(), any::<u16>(), any::<u16>()).prop_map(|(name, offset, length)| Call::Read { name, offset, length }),
        2 => name().prop_map(|name| Call::Create { name }),
        2 => name().prop_map(|name| Call::Remove { name }),
        1 => name().prop_map(|name| Call::MakeDirectory { name }),
        1 => name().prop_map(|name| Call::RemoveDirectory { name }),
        2 => (name(), name()).prop_map(|(from, to)| Call::Rename { from, to }),
        1 => (name(), name()).prop_map(|(from, to)| Call::Link { from, to }),
        1 => (name(), name()).prop_map(|(from, to)| Call::Symlink { from, to }),
        3 => name().prop_map(|name| Call::Look { name }),
        1 => name().prop_map(|name| Call::List { name }),
    ]
}

/// Performs a call; returns its result as a program sees it.
fn carry_out(call: &Call, top: &Path) -> Result<String, Option<i32>> {
    let path = |name: u8| {
        if name < 5 {
            top.join(name.to_string())
        } else {
            top.join("0").join((name - 5).to_string())
        }
    };
    let done = |()| String::new();
    let outcome: io::Result<String> = match *call {
        Call::Write { name, offset, length, value } => {
            open(&path(name), OpenOptions::new().write(true)).and_then(|file| {
                file.write_all_at(&vec![value; usize::from(length)], u64::from(offset)).map(done)
            })
        }
        Call::Append { name, length } => open(&path(name), OpenOptions::new().append(true))
            .and_then(|mut file| {
                io::Write::write_all(&mut file, &vec![b'a'; usize::from(length)]).map(done)
            }),
        Call::Truncate { name, length } => open(&path(name), OpenOptions::new().write(true))
            .and_then(|file| file.set_len(u64::from(length)).map(done)),
        Call::Read { name, offset, length } => open(&path(name), OpenOptions::new().read(true))
            .and_then(|file| {
                let mut data = vec![0; usize::from(length)];
                let read = file.read_at(&mut data, u64::from(offset))?;
                data.truncate(read);
                Ok(format!("{data:?}"))
            }),
        Call::Create { name } => open(&path(name), OpenOptions::new().write(true).create_new(true))
            .map(|_| String::new()),
        Call::Remove { name } => fs::remove_file(path(name)).map(done),
        Call::MakeDirectory { name } => fs::create_dir(path(name)).map(done),
        Call::RemoveDirectory { name } => fs::remove_dir(path(name)).map(done),
        Call::Rename { from, to } => fs::rename(path(from), path(to)).map(done),
        Call::Link { from, to } => fs::hard_link(path(from), path(to)).map(done),
        Call::Symlink { from, to } => symlink(path(from).file_name().unwrap(), path(to)).map(done),
        Call::Look { name } => fs::symlink_metadata(path(name)).map(|found| {
            use std::os::unix::fs::MetadataExt;
            // A directory's size and links are matters of its file system.
            let (size, links) = if found.is_dir() { (0, 0) } else { (found.len(), found.nlink()) };
            format!("{:?} {:o} {size} {links}", found.file_type(), found.mode())
        }),
        Call::List { name } => fs::read_dir(path(name)).and_then(|entries| {
            let mut names = entries
                .map(|entry| entry.map(|e| e.file_name()))
                .collect::<io::Result<Vec<_>>>()?;
            names.sort();
            Ok(format!("{names:?}"))
        }),
    };
    outcome.map_err(|error| error.raw_os_error())
}

fn open(path: &Path, options: &OpenOptions) -> io::Result<File> {
    // A fifo would wait; there is none, but a symbolic link may lead in a circle.
    options.clone().custom_flags(nix::libc::O_NONBLOCK).open(path)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn random_calls_give_what_they_give_on_a_plain_directory(
        calls in proptest::collection::vec((call(), 0..2_usize), 1..120),
    ) {
        let site = Site::new(2);
        let plain = site.plain();
        for (number, (call, mount)) in calls.iter().enumerate() {
            let (ours, theirs) = (carry_out(call, site.mount(*mount)), carry_out(call, &plain));
            prop_assert_eq!(ours, theirs, "call {}: {:?} through mount {}", number, call, mount);
        }
    }
}
