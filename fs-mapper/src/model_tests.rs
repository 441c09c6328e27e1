//! The model: random trees, links and mounts; realpath(3) and a naive longest
//! prefix say what a resolution must be. The stage program's quick look must
//! never say no where the table says owned.

use super::*;
use crate::prefixes::Prefixes;
use proptest::collection::vec;
use proptest::prelude::*;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;

/// What is mounted: an executor's, a local file system, a network one without owner.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Owned,
    Local,
    Closed,
}

#[derive(Debug, Clone)]
struct World {
    dirs: Vec<String>,
    /// Directory, name, target.
    links: Vec<(usize, String, String)>,
    /// Directory and name.
    files: Vec<(usize, String)>,
    mounts: Vec<(usize, Kind)>,
    /// Working directory and path.
    asked: Vec<(usize, String)>,
}

fn relative(max: usize) -> impl Strategy<Value = String> {
    let part = prop_oneof![4 => "[a-d]", 2 => Just("..".to_owned()), 1 => Just(".".to_owned()), 1 => Just(String::new())];
    vec(part, 1..max).prop_map(|parts| parts.join("/").trim_start_matches('/').to_owned())
}

/// A path below the base, by name or by `..`, absolute or not.
fn any_path() -> impl Strategy<Value = String> {
    prop_oneof![relative(7).prop_map(|path| format!("B/{path}")), relative(7)]
}

fn world() -> impl Strategy<Value = World> {
    let dir = vec("[a-c]", 1..5).prop_map(|parts| format!("B/{}", parts.join("/")));
    let kind = prop_oneof![3 => Just(Kind::Owned), 1 => Just(Kind::Local), 1 => Just(Kind::Closed)];
    (
        vec(dir, 1..10),
        vec((any::<prop::sample::Index>(), "[a-d]", any_path()), 0..8),
        vec((any::<prop::sample::Index>(), "[a-d]"), 0..4),
        vec((any::<prop::sample::Index>(), kind), 1..5),
        vec((any::<prop::sample::Index>(), any_path()), 1..20),
    )
        .prop_map(|(dirs, links, files, mounts, asked)| World {
            links: links
                .into_iter()
                .map(|(at, name, to)| (at.index(dirs.len()), name, to))
                .collect(),
            files: files.into_iter().map(|(at, name)| (at.index(dirs.len()), name)).collect(),
            mounts: mounts.into_iter().map(|(at, kind)| (at.index(dirs.len()), kind)).collect(),
            asked: asked.into_iter().map(|(at, path)| (at.index(dirs.len()), path)).collect(),
            dirs,
        })
}

/// A lab of a world, and its mounts by path: the shorter ones first, each once.
fn build(world: &World) -> (Lab, Vec<(String, Kind)>) {
    let mut mounts: Vec<(String, Kind)> = Vec::new();
    for (at, kind) in &world.mounts {
        if mounts.iter().all(|(path, _)| *path != world.dirs[*at]) {
            mounts.push((world.dirs[*at].clone(), *kind));
        }
    }
    mounts.sort_by_key(|(path, _)| path.len());
    let mut info = String::new();
    let mut config = String::new();
    for (index, (path, kind)) in mounts.iter().enumerate() {
        let around =
            mounts[..index].iter().rposition(|(outer, _)| path.starts_with(&format!("{outer}/")));
        let parent = around.map_or(1, |outer| 10 + outer);
        let fs_type = if *kind == Kind::Local { "tmpfs" } else { "nfs" };
        info +=
            &format!("{} {parent} 0:{index} / {path} rw - {fs_type} s:/{index} rw\n", 10 + index);
        if *kind == Kind::Owned {
            config += &mount(path, "s1", &format!("e{index}"), "");
        }
    }
    let dirs: Vec<&str> = world.dirs.iter().map(String::as_str).collect();
    let lab = Lab::new(&dirs, &[], &info, &config);
    for (at, name) in &world.files {
        let path = lab.real(&world.dirs[*at]).join(name);
        let _a_directory_already = fs::OpenOptions::new().write(true).create_new(true).open(path);
    }
    for (at, name, target) in &world.links {
        let dir = &world.dirs[*at];
        // A closed mount's links are not followed, which is slow at worst; the model leaves them
        // out.
        let closed = deepest(&mounts, Path::new(dir)).is_some_and(|(_, kind)| kind == Kind::Closed);
        if !closed && !target.is_empty() {
            let _exists_already = symlink(lab.real(target), lab.real(dir).join(name));
        }
    }
    (lab, mounts)
}

fn deepest(mounts: &[(String, Kind)], path: &Path) -> Option<(PathBuf, Kind)> {
    let around = mounts.iter().filter(|(mount, _)| path.starts_with(mount));
    around.max_by_key(|(mount, _)| mount.len()).map(|(mount, kind)| (PathBuf::from(mount), *kind))
}

fn check(world: &World) -> Result<(), TestCaseError> {
    let (lab, mounts) = build(world);
    let base = lab.base.to_str().expect("ASCII");
    let mounts: Vec<(String, Kind)> =
        mounts.iter().map(|(path, kind)| (path.replace('B', base), *kind)).collect();
    let prefixes = Prefixes::decode(&lab.table.prefixes().encode()).expect("what encode made");
    for (at, path) in &world.asked {
        let (cwd, path) = (lab.real(&world.dirs[*at]), lab.real(path));
        if path.as_os_str().is_empty() {
            continue;
        }
        let truth = cwd.join(&path).canonicalize();
        let found = lab.table.resolve(&path, &cwd);
        match (&found, truth) {
            (Resolution::Owned(owned), truth) => {
                // Whatever was left as text, it leads to the same file, or to none. (Of
                // `file/.` the dot is dropped: that it is an error the executor will say.)
                let not_a_directory =
                    truth.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotADirectory);
                if !not_a_directory {
                    prop_assert_eq!(owned.client_path.as_path().canonicalize().ok(), truth.ok());
                }
                let mount = lab.table.mount(owned.mount);
                let rest = owned.client_path.as_path().strip_prefix(mount.path.as_path());
                prop_assert_eq!(rest, Ok(owned.export_path.path.as_path()));
                // As text, it is below no other mount.
                if !owned.uncertain {
                    let deepest = deepest(&mounts, owned.client_path.as_path());
                    prop_assert_eq!(
                        deepest,
                        Some((mount.path.as_path().to_path_buf(), Kind::Owned))
                    );
                }
                for word in words(&path) {
                    prop_assert!(
                        prefixes.may_touch(&word, &cwd),
                        "{:?} in {:?}",
                        String::from_utf8_lossy(&word),
                        cwd
                    );
                }
            }
            (Resolution::Local { reason }, Ok(real)) => {
                let through_closed = matches!(
                    reason,
                    LocalReason::UnownedMount { .. } | LocalReason::Boundary { .. }
                );
                let owned = deepest(&mounts, &real).is_some_and(|(_, kind)| kind == Kind::Owned);
                prop_assert!(!owned || through_closed, "{path:?} in {cwd:?} is {real:?}: {reason}");
            }
            (Resolution::Local { .. }, Err(_)) => {}
        }
        // In one call, with what it remembers, the same.
        let mut resolver = Resolver::new(&lab.table, &cwd);
        prop_assert_eq!(&resolver.resolve(&path), &found);
        prop_assert_eq!(&resolver.resolve(&path), &found);
    }
    Ok(())
}

/// The words of an argv that give a path to a command.
fn words(path: &Path) -> Vec<Vec<u8>> {
    let path = path.as_os_str().as_bytes();
    let mut befores: Vec<&[u8]> = vec![b"", b"-f", b"if=", b"--file="];
    if path.starts_with(b"/") {
        befores.extend([&b"-xzf"[..], b"host:", b"@", b"1,", b"\""]);
    }
    befores.iter().map(|before| [before, path].concat()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]
    #[test]
    fn the_table_is_realpath_and_the_longest_prefix(world in world()) {
        check(&world)?;
    }
}
