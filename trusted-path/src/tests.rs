//! Each rule of the walk with a path that breaks it.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs::{self, Permissions},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, chown, symlink},
};

use super::*;

/// Somebody who is neither root nor the user of these tests.
const OTHER: u32 = 54_321;

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// A directory of our own, and in it one for each name.
fn made(names: &[&str]) -> tempfile::TempDir {
    let top = tempfile::tempdir().unwrap();
    for name in names {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(top.path().join(name)).unwrap();
    }
    top
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

#[test]
fn missing_directories_are_made_for_the_user_alone() {
    let top = made(&[]);
    let path = top.path().join("a/b");
    assert!(directory(&path, user()).unwrap_err().is_missing());
    for _ in 0..2 {
        let found = make_directory(&path, user()).unwrap();
        assert_eq!(
            (found.path.as_path(), found.owner, found.mode),
            (path.as_path(), user(), 0o700)
        );
    }
    assert_eq!(fs::metadata(top.path().join("a")).unwrap().mode() & 0o7777, 0o700);
}

#[test]
fn a_component_that_others_can_write_is_refused() {
    for mode in [0o720, 0o702, 0o777, 0o2770] {
        let top = made(&["a/b/c"]);
        set_mode(&top.path().join("a"), mode);
        for path in ["a", "a/b", "a/b/c"] {
            let refused = directory(&top.path().join(path), user()).unwrap_err();
            assert!(
                matches!(refused, Untrusted::Writable { mode: found, .. } if found == mode),
                "{refused}"
            );
        }
    }
}

#[test]
fn a_sticky_directory_is_passed_but_is_no_place_of_one_s_own() {
    let top = made(&["tmp/mine"]);
    set_mode(&top.path().join("tmp"), 0o1777);
    assert!(directory(&top.path().join("tmp/mine"), user()).is_ok());
    assert!(matches!(
        directory(&top.path().join("tmp"), user()),
        Err(Untrusted::Writable { mode: 0o1777, .. })
    ));
    fs::write(top.path().join("tmp/file"), "").unwrap();
    assert!(open_file(&top.path().join("tmp/file"), user()).unwrap().is_in_shared_directory);
}

#[test]
fn links_are_followed_where_only_the_user_could_have_made_them() {
    let top = made(&["target/in", "tmp", "links"]);
    set_mode(&top.path().join("tmp"), 0o1777);
    let at = |name: &str| top.path().join(name);
    symlink(at("target"), at("links/absolute")).unwrap();
    symlink("../target/../target", at("links/relative")).unwrap();
    symlink("loop", at("links/loop")).unwrap();
    symlink(at("target"), at("tmp/link")).unwrap();
    for name in ["links/absolute/in", "links/relative/in", "links/../target/in"] {
        assert_eq!(directory(&at(name), user()).unwrap().path, at("target/in"), "{name}");
    }
    assert!(matches!(directory(&at("links/loop"), user()), Err(Untrusted::Io { .. })));
    assert!(matches!(directory(&at("tmp/link"), user()), Err(Untrusted::SharedLink(_))));
    set_mode(&at("target"), 0o757);
    assert!(matches!(directory(&at("links/absolute/in"), user()), Err(Untrusted::Writable { .. })));
}

#[test]
fn a_component_of_another_user_is_refused() {
    let top = made(&["a/b"]);
    if user() != ROOT {
        // Our own directories are another's for another user.
        assert!(matches!(
            directory(&top.path().join("a"), OTHER),
            Err(Untrusted::ForeignOwner { .. })
        ));
        return;
    }
    let at = |name: &str| top.path().join(name);
    fs::write(at("a/b/file"), "").unwrap();
    for name in ["a/b/file", "a/b", "a"] {
        chown(at(name), Some(OTHER), None).unwrap();
        assert!(matches!(
            open_file(&at("a/b/file"), ROOT),
            Err(Untrusted::ForeignOwner { owner: OTHER, .. })
        ));
        // To that user they are as good as root's.
        assert!(
            open_file(&at("a/b/file"), OTHER)
                .is_ok_and(|found| [OTHER, ROOT].contains(&found.owner))
        );
        chown(at(name), Some(ROOT), None).unwrap();
    }
    symlink("a", at("link")).unwrap();
    std::os::unix::fs::lchown(at("link"), Some(OTHER), None).unwrap();
    assert!(matches!(directory(&at("link/b"), ROOT), Err(Untrusted::ForeignOwner { .. })));
}

#[test]
fn files_are_regular_and_directories_are_directories() {
    let top = made(&["a"]);
    let at = |name: &str| top.path().join(name);
    fs::write(at("file"), "text").unwrap();
    assert!(matches!(open_file(&at("a"), user()), Err(Untrusted::Kind { .. })));
    assert!(matches!(directory(&at("file"), user()), Err(Untrusted::Kind { .. })));
    assert!(directory(&at("file/below"), user()).is_err());
    assert!(open_file(Path::new("/dev/null"), user()).is_err());
    set_mode(&at("file"), 0o664);
    assert!(matches!(open_file(&at("file"), user()), Err(Untrusted::Writable { .. })));
    set_mode(&at("file"), 0o644);
    assert_eq!(io::read_to_string(open_file(&at("file"), user()).unwrap().file).unwrap(), "text");
}

/// In a mount namespace of its own, by this program itself.
#[test]
fn a_mount_in_a_directory_of_all_users_is_not_entered() {
    const PLACE: &str = "TRUSTED_PATH_TEST_MOUNT";
    if let Some(place) = std::env::var_os(PLACE) {
        let found = directory(&Path::new(&place).join("tmp/mine/inner"), user());
        assert!(
            matches!(&found, Err(Untrusted::SharedMount(path)) if path.ends_with("tmp/mine")),
            "{found:?}"
        );
        assert!(directory(&Path::new(&place).join("ours/inner"), user()).is_ok());
        return;
    }
    if user() != 0 {
        return;
    }
    let top = made(&["tmp/mine", "ours"]);
    set_mode(&top.path().join("tmp"), 0o1777);
    let script = "for at in tmp/mine ours; do mount -t tmpfs -o mode=700 none \"$1/$at\" && mkdir -m 700 \"$1/$at/inner\" || exit; done; exec \"$2\" --exact tests::a_mount_in_a_directory_of_all_users_is_not_entered";
    let test = std::process::Command::new("unshare")
        .args(["-m", "sh", "-c", script, "sh"])
        .args([top.path().as_os_str(), std::env::current_exe().unwrap().as_os_str()])
        .env(PLACE, top.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&test.stdout);
    assert!(test.status.success() && said.contains("1 passed"), "{said}");
}
