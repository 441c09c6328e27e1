//! The reading and writing of git's configuration files, held to git itself.

// All of this is test code; clippy's own exception knows only #[test] functions.
#![allow(clippy::unwrap_used)]

use std::{fs, path::Path, process::Command};

use posh_annotations::settings::{Setting, parse, write};
use proptest::prelude::*;

type Pairs = Vec<(Vec<u8>, Option<Vec<u8>>)>;

/// Name and value of each setting as git reads them; `None` if git refuses the file.
fn as_git_reads(content: &[u8], file: &Path) -> Option<Pairs> {
    fs::write(file, content).unwrap();
    let output =
        Command::new("git").args(["config", "-z", "--list", "-f"]).arg(file).output().unwrap();
    let entry = |text: &[u8]| match text.iter().position(|byte| *byte == b'\n') {
        Some(at) => (text[..at].to_vec(), Some(text[at + 1..].to_vec())),
        None => (text.to_vec(), None),
    };
    let list = output
        .stdout
        .strip_suffix(b"\0")
        .map(|list| list.split(|byte| *byte == 0).map(entry).collect());
    output.status.success().then(|| list.unwrap_or_default())
}

fn pairs(settings: &[Setting]) -> Pairs {
    settings.iter().map(|setting| (setting.name.clone(), setting.value.clone())).collect()
}

/// Reads the content as we do and as git does, and once more as we write it.
fn check(content: &[u8], file: &Path) {
    let shown = String::from_utf8_lossy(content);
    let expected = as_git_reads(content, file);
    let Ok(settings) = parse(content) else {
        assert_eq!(expected, None, "{shown:?}");
        return;
    };
    assert_eq!(Some(pairs(&settings)), expected, "{shown:?}");
    let written = write(&settings);
    let again = parse(&written).unwrap();
    assert_eq!(pairs(&again), pairs(&settings), "{shown:?}");
    assert!(again.iter().all(|setting| !setting.depends_on_version), "{shown:?}");
    assert_eq!(
        as_git_reads(&written, file),
        expected,
        "{shown:?} is written as {:?}",
        String::from_utf8_lossy(&written)
    );
}

#[test]
fn files_are_read_and_written_as_git_reads_them() {
    let directory = tempfile::tempdir().unwrap();
    for content in [
        &b""[..],
        b"[core]\n\tbare = false\n",
        b"\xef\xbb\xbf[Core]\nBARE",
        b"\xef\xbb[core]\nbare\n",
        b"[a]k=v\n[a \"B.c\"] k = w\n[a] l\n",
        b"[a.B.c]\nKey-1 = x\n[a.]\nk = v\n[.b]\nk = v\n",
        b"[ \"x\"]\nk = v\n[ \"\"]\nk = v\n",
        b"[a]\nk = v\n[]\nk = v\n",
        b"[a \"q\\\"b\\\\s\\t \xff\"]\nk = v\n",
        b"[a]\nk = \" lead; # and trail \" ; comment\n",
        b"[a]\nk = one \\\n  two\\\n\tthree\n",
        b"[a]\nk = \\t\\b\\n\\\"\\\\\r\nl = a\rb\r\n",
        b"[a]\nk = \"\"\nl =\nm\nn = \"x\"y\"z\"\n",
        b"[a]\nk = \xff\xfe\x01\x7f\n",
        b"[url \"https://token@example.org/\"]\n\tinsteadOf = gh:\n",
        b"[a]\nk = \"v\nx\n",
        b"[a]\nk = \\q\n",
        b"[a\nk = v\n",
        b"[a]\n1k = v\n",
        b"[a \"b\" ]\nk = v\n",
    ] {
        check(content, &directory.path().join("config"));
    }
}

/// Pieces of configuration files, sound and unsound. Keys before the first section are left out:
/// versions of git list them differently.
fn content() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        2 => "\\[[aB.-]{0,3}\\]",
        2 => "\\[[aB.]{0,3}[ \t]{1,2}\"([aB. '#;]|\\\\[\\\\\"t]){0,4}\"\\]",
        4 => "[ \t]{0,2}[aK][a9-]{0,2}[ \t]{0,2}=[ \t]{0,2}([ab #;\"\t\r]|\\\\[\\\\\"tnb\n]){0,8}",
        1 => "[ \t]{0,2}[aK][a9-]{0,2}",
        1 => "[ \t]{0,2}[#;][a\"\\[\\\\]{0,3}",
        1 => "[ab\\[\\]\"\\\\=#; \t\r.]{0,6}",
    ];
    let line = (piece, prop_oneof![4 => Just("\n"), 1 => Just("\r\n"), 1 => Just("")]);
    prop::collection::vec(line, 0..8).prop_map(|lines| {
        let text: String = lines.into_iter().map(|(piece, end)| piece + end).collect();
        format!("[s]\n{text}").into_bytes()
    })
}

fn setting() -> impl Strategy<Value = Setting> {
    let byte = || (1..=255_u8).prop_filter("no newline in a subsection", |byte| *byte != b'\n');
    let subsection = prop::option::of(prop::collection::vec(byte(), 0..6));
    let value = prop::option::of(prop::collection::vec(1..=255_u8, 0..8));
    ("[a-z0-9-]{1,3}", subsection, "[a-z][a-z0-9-]{0,2}", value).prop_map(
        |(section, subsection, key, value)| {
            let mut name = section.into_bytes();
            for part in subsection.into_iter().chain([key.into_bytes()]) {
                name.push(b'.');
                name.extend(part);
            }
            Setting { name, value, depends_on_version: false }
        },
    )
}

proptest! {
    // Each case starts git twice.
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_file_is_read_and_written_as_git_reads_it(content in content()) {
        let directory = tempfile::tempdir().unwrap();
        check(&content, &directory.path().join("config"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_settings_are_read_as_they_were_written(settings in prop::collection::vec(setting(), 0..6)) {
        prop_assert_eq!(parse(&write(&settings)), Ok(settings));
    }
}
