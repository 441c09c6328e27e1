//! Files and command lines: what is read by a parser of ours.

use std::{
    ffi::OsString,
    os::unix::ffi::OsStringExt as _,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use fs_mapper::{MountTable, Prefixes, config::Config, mountinfo::MountInfo};
use posh_annotations::{Library, check_text};

/// Longer texts only repeat what shorter ones show, at the cost of speed.
const MAX_TEXT: usize = 16 << 10;

fn text(data: &[u8]) -> Option<&str> {
    std::str::from_utf8(data).ok().filter(|text| text.len() <= MAX_TEXT)
}

/// An annotation file: it is read, or every fault has a place inside of it.
pub fn annotations(data: &[u8]) {
    let Some(text) = text(data) else { return };
    // What YAML may count as the end of a line.
    let lines = text.split(['\n', '\r', '\u{85}', '\u{2028}', '\u{2029}']).count() + 1;
    for fault in check_text(Path::new("fuzzed.yaml"), text) {
        assert!(fault.line <= lines, "{fault} is behind the {lines} lines");
    }
}

pub fn annotation_files() -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../annotations/commands");
    files_of(&directory)
}

fn files_of(directory: &Path) -> Vec<Vec<u8>> {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
        .into_iter()
        .filter_map(|file| std::fs::read(file).ok())
        .filter(|text| text.len() <= MAX_TEXT)
        .collect()
}

static LIBRARY: LazyLock<Library> = LazyLock::new(Library::builtin);

/// A command line, its words ending in NUL, and a variable in front: read by the annotation
/// of the command, or unknown for a reason that has words.
pub fn invocation(data: &[u8]) {
    let mut words = data.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec()));
    let (Some(variable), Some(name)) = (words.next(), words.next()) else { return };
    let argv: Vec<OsString> = std::iter::once(name.clone()).chain(words).collect();
    let Some(name) = name.to_str() else { return };
    let environment = |wanted: &str| {
        let variable = variable.to_str()?;
        variable.split_once('=').filter(|(name, _)| *name == wanted).map(|(_, value)| value.into())
    };
    if let Err(unknown) = LIBRARY.classify(name, &argv, &environment) {
        assert!(
            !unknown.to_string().is_empty(),
            "an invocation is unknown, and there is no reason"
        );
    }
    let _ = LIBRARY.explain(name, &argv, &environment);
}

pub fn invocations() -> Vec<Vec<u8>> {
    const LINES: [&str; 14] = [
        "|grep|-rn|--include=*.c|-e|word|src",
        "|sort|-k2,2n|-t|,|-o|out|in",
        "TAR_OPTIONS=-v|tar|-C|dir|-xzf|a.tar.gz|--strip-components=1",
        "|git|-C|repo|commit|-m|message|--|a",
        "POSIXLY_CORRECT=1|head|-n|3|a|-q",
        "|find|.|-name|*.log|-exec|rm|{}|;",
        "|sed|-i|-e|s/a/b/w out|f",
        "|awk|-F|,|BEGIN { system(\"x\") }|f",
        "|cut|-d|:|-f1-3,5|/etc/passwd",
        "|cat|-|-n|--|-f",
        "|xargs|-0|-n|1|wc|-l",
        "|jq|-r|.a[]|f.json",
        "|convert|a.jpg|-resize|10x10|b.jpg",
        "|dd|if=a|of=b|bs=1M|count=3",
    ];
    let mut seeds: Vec<Vec<u8>> =
        LINES.iter().map(|line| line.replace('|', "\0").into_bytes()).collect();
    seeds.extend(
        LIBRARY
            .full_names()
            .map(|name| format!("\0{}\0-x\0a", name.replace(' ', "\0")).into_bytes()),
    );
    seeds
}

/// A `mounts.toml`, joined to this machine's mounts and asked for a path; or all its mistakes
/// with places inside of it.
pub fn mounts_toml(data: &[u8]) {
    static MOUNTED: LazyLock<MountInfo> =
        LazyLock::new(|| MountInfo::parse(MOUNTINFO.as_bytes()).unwrap());
    let Some(text) = text(data) else { return };
    match Config::parse(text, Path::new("/etc/posh/mounts.toml")) {
        Ok(config) => ask(&MountTable::new(&config, &MOUNTED)),
        Err(errors) => assert!(!errors.to_string().is_empty()),
    }
}

pub fn mounts_tomls() -> Vec<Vec<u8>> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../mounts.toml");
    vec![
        std::fs::read(own).unwrap(),
        b"[gateway]\nssh_command = \"ssh -4\"\nsshfs = \"off\"\nidle_timeout_s = 3\nannotations = [\"x\"]\n\
          [[executor]]\nname = \"a\"\naddress = \"ssh://u@h:22\"\n[[executor]]\nname = \"b\"\naddress = \"http://[::1]:7400\"\n\
          [[mount]]\npath = \"/mnt/a\"\nexecutor = \"a\"\nexport = \"~/x\"\n[[mount]]\npath = \"/b\"\nexecutor = \"b\"\nexport = \"e\"\n\
          sub_path = \"c/d\"\ncoherence = \"bind\"\n"
            .to_vec(),
    ]
}

/// An `executor.toml`.
pub fn executor_toml(data: &[u8]) {
    static FILE: LazyLock<PathBuf> =
        LazyLock::new(|| crate::scratch::directory().join("executor.toml"));
    if data.len() > MAX_TEXT {
        return;
    }
    std::fs::write(&*FILE, data).unwrap();
    if let Err(error) = posh_executor::Config::load(&FILE) {
        assert!(!error.to_string().is_empty());
    }
}

pub fn executor_tomls() -> Vec<Vec<u8>> {
    vec![
        b"listen = \"0.0.0.0:7400\"\nallow_plaintext = true\nmax_runs = 3\ndrain_seconds = 2\n[[export]]\nname = \"logs\"\n\
          path = \"/tmp\"\nread_only = true\ncoherence = \"bind\"\n[confinement]\nuser = \"root\"\ntrust_caller_ids = true\n"
            .to_vec(),
        b"[[export]]\nname = \"a\"\npath = \"/\"\n".to_vec(),
    ]
}

const MOUNTINFO: &str = "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n\
    35 21 0:31 / /mnt/a rw,nosuid,nodev,relatime shared:2 master:1 propagate_from:2 - fuse.sshfs u@h:/srv/a rw,user_id=0,group_id=0\n\
    36 35 0:32 /sub /mnt/a/b\\040c ro - nfs4 server:/export rw,vers=4.2\n\
    37 21 0:33 / /home autofs autofs.fd=5 - autofs systemd-1 rw,fd=41\n\
    38 21 0:34 / /mnt/r rw - fuse.rclone remote:bucket rw\n\
    39 36 0:35 / /mnt/a/b\\040c rw - tmpfs tmpfs rw\n";

/// A mountinfo, joined to a configuration that has its mounts.
pub fn mountinfo(data: &[u8]) {
    static CONFIG: LazyLock<Config> = LazyLock::new(|| {
        let text = std::str::from_utf8(&mounts_tomls()[1]).unwrap().to_owned();
        Config::parse(&text, Path::new("/etc/posh/mounts.toml")).unwrap()
    });
    if data.len() > MAX_TEXT {
        return;
    }
    let Ok(info) = MountInfo::parse(data) else { return };
    let _ = info.visible();
    ask(&MountTable::new(&CONFIG, &info));
    let (adopted, _) = fs_mapper::sshfs::adopted(&CONFIG, &info);
    ask(&MountTable::new(&adopted, &info));
}

pub fn mountinfos() -> Vec<Vec<u8>> {
    vec![MOUNTINFO.into(), std::fs::read("/proc/self/mountinfo").unwrap_or_default()]
}

/// Asks a table what it can be asked.
fn ask(table: &MountTable) {
    for path in ["/mnt/a/x", "../mnt/a/../a/b c/y", "/", "x", "/home/u/b/../../.."] {
        let _ = table.resolve(Path::new(path), Path::new("/mnt/a/d"));
    }
    let prefixes = table.prefixes();
    let again = Prefixes::decode(&prefixes.encode()).expect("what was written can be read");
    let may = |prefixes: &Prefixes| prefixes.may_touch(b"/mnt/a/x", Path::new("/"));
    assert_eq!(may(&prefixes), may(&again), "the prefixes changed on their way");
}
