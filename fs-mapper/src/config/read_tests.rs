//! What `mounts.toml` may say, and how every mistake is reported.

use super::*;

fn parse(text: &str) -> Result<Config, ConfigErrors> {
    Config::parse(text, Path::new("mounts.toml"))
}

/// The one-line messages of a text, without the file's name.
fn mistakes(text: &str) -> Vec<String> {
    let errors = parse(text).expect_err("a mistake");
    errors
        .to_string()
        .lines()
        .map(|line| line.strip_prefix("mounts.toml:").expect("the file").to_owned())
        .collect()
}

const GOOD: &str = r#"
[[executor]]
name = "store1"
address = "http://127.0.0.1:7400"

[[mount]]
path = "/mnt/logs/"
executor = "store1"
export = "logs"

[[mount]]
path = "/mnt//photos/./raw"
executor = "store1"
export = "photos"
sub_path = "raw/2026/"
coherence = "rclone"

[gateway]
split = 4
scheduler = "greedy"
idle_timeout_s = 30
annotations = ["commands", "/opt/commands"]
"#;

#[test]
fn a_whole_file() {
    let config = Config::parse(GOOD, Path::new("/etc/posh/mounts.toml")).expect("no mistake");
    assert_eq!(config.executors.len(), 1);
    assert_eq!(config.executors[0].address.to_string(), "http://127.0.0.1:7400");
    assert_eq!(config.mounts[0].path, Path::new("/mnt/logs"));
    assert_eq!(config.mounts[0].sub_path, Path::new(""));
    assert_eq!(config.mounts[0].position, Position { line: 6, column: 1 });
    assert_eq!(config.mounts[1].path, Path::new("/mnt/photos/raw"));
    assert_eq!(config.mounts[1].sub_path, Path::new("raw/2026"));
    assert_eq!(config.mounts[1].coherence, Some(Adapter::Rclone));
    assert_eq!(config.gateway.split, 4);
    assert_eq!(config.gateway.idle_timeout_s, 30);
    assert_eq!(
        config.gateway.annotations,
        [Path::new("/etc/posh/commands"), Path::new("/opt/commands")]
    );
    assert!(config.executor(&config.mounts[0].executor).is_some());
}

#[test]
fn an_executor_takes_input_unless_that_is_said() {
    let takes_input = |line: &str| {
        let text = format!("[[executor]]\nname = 's'\naddress = 'http://127.0.0.1:1'\n{line}");
        Config::parse(&text, Path::new("mounts.toml")).expect("no mistake").executors[0].takes_input
    };
    assert_eq!(
        ["", "takes_input = true", "takes_input = false"].map(takes_input),
        [true, true, false]
    );
}

const SSH: &str = r#"
[[mount]]
path = "/mnt/logs"
executor = "store1"
export = "/srv//logs/./"

[[mount]]
path = "/mnt/own"
executor = "store1"
export = "~/own/"

[[mount]]
path = "/mnt/raw"
executor = "store1"
export = "/srv/logs"
sub_path = "raw"

[[executor]]
name = "store1"
address = "ssh://ada@store1.example.org"

[gateway]
ssh_command = "ssh -F '/etc/posh/ssh config'"
"#;

#[test]
fn over_ssh_a_mount_names_a_directory_of_the_server() {
    let config = parse(SSH).expect("no mistake");
    let exports: Vec<&str> = config.mounts.iter().map(|mount| mount.export.as_str()).collect();
    assert_eq!(exports, ["/srv/logs", "~/own", "/srv/logs"]);
    assert_eq!(config.exports_of(&config.executors[0].name), ["/srv/logs", "~/own"]);
    assert_eq!(config.gateway.ssh_command, ["ssh", "-F", "/etc/posh/ssh config"]);
}

#[test]
fn an_export_is_checked_by_how_its_executor_is_reached() {
    let mistake = |address: &str, export: &str| {
        let executor = format!("executor = [{{name='s', address='{address}'}}]\n");
        mistakes(&format!("{executor}[[mount]]\nexecutor='s'\npath='/x'\nexport=\"{export}\""))
    };
    let not_there = "is not a directory of the server; \
                     over ssh, export is a directory there, such as \"/srv/data\" or \"~/data\"";
    let check = |export: &str, expect: &str| {
        assert_eq!(mistake("ssh://h", export), [format!("5:8: error: {expect}")], "{export}");
    };
    check("logs", &format!("\"logs\" {not_there}"));
    check("", &format!("\"\" {not_there}"));
    check("~ada/logs", &format!("\"~ada/logs\" {not_there}"));
    check("/srv/../etc", "\"/srv/../etc\" holds ..; write the directory that is meant");
    let control = "holds control characters; rename the directory, or export the one above it";
    check("/srv/a\\nb", &format!("\"/srv/a\\nb\" {control}"));
    assert_eq!(
        mistake("http://h:1", "/srv/logs"),
        ["5:8: error: \"/srv/logs\" is not the name of an export; \
          give the executor's name for it; directories below it go into sub_path"]
    );
    // Of a wrong address only that is said.
    assert_eq!(mistake("ssh://", "/srv/logs").len(), 1);
    assert_eq!(mistake("ssh://", "logs").len(), 1);
}

#[test]
fn an_empty_file_configures_nothing() {
    let config = parse("# nothing\n").expect("no mistake");
    assert_eq!(Config { file: PathBuf::new(), ..config }, Config::default());
}

#[test]
fn every_mistake_is_reported_at_once() {
    let text = r#"
colour = "red"
[[executor]]
name = "store1"
address = "127.0.0.1:7400"
[[executor]]
name = "store1"
address = "http://127.0.0.1:7401"
[[executor]]
adress = "http://127.0.0.1:7402"
[[mount]]
path = "mnt/logs"
executor = "store1"
exprot = "logs"
[[mount]]
path = "/mnt/data"
executor = "stor1"
export = "a/b"
sub_path = "../up"
coherence = "magic"
[[mount]]
path = "/mnt/data/"
executor = "store1"
export = 7
[gateway]
split = 0
scheduler = "best"
idle_timeout_s = "soon"
annotations = ["~/x", 3]
"#;
    let expect = [
        "2:1: error: unknown key `colour` in the file; known are executor, mount, volume, gateway",
        "5:11: error: the address has no scheme: \"127.0.0.1:7400\"; write it as http://host:7400 or ssh://host",
        "7:8: error: executor `store1` is already defined in line 4; every executor needs its own name",
        "9:1: error: [[executor]] has no `name`; add name = \"...\"",
        "9:1: error: [[executor]] has no `address`; add address = \"...\"",
        "10:1: error: unknown key `adress` in [[executor]]; did you mean `address`?",
        "11:1: error: [[mount]] has no `export`; add export = \"...\"",
        "12:8: error: mount path \"mnt/logs\" is relative; write it from / on",
        "14:1: error: unknown key `exprot` in [[mount]]; did you mean `export`?",
        "17:12: error: no executor is named `stor1`; did you mean `store1`?",
        "18:10: error: \"a/b\" is not the name of an export; give the executor's name for it; directories below it go into sub_path",
        "19:12: error: sub_path \"../up\" leaves the export; give a path below the export, without a leading / and without ..",
        "20:13: error: unknown coherence \"magic\"; it is one of sshfs, rclone, nfs, volume, bind, generic",
        "22:8: error: mount path `/mnt/data` is already given in line 16; a path has one owner: remove one of the two",
        "24:10: error: `export` in [[mount]] is 7; it must be a string",
        "26:9: error: `split` in [gateway] is 0; it must be a number from 1 to 1024",
        "27:13: error: unknown scheduler \"best\"; it is \"cost\" or \"greedy\"",
        "28:18: error: `idle_timeout_s` in [gateway] is a string; it must be a number from 1 to 4294967295",
        "29:16: error: directory \"~/x\" begins with ~; write it in full",
        "29:23: error: `annotations` in [gateway] is 3; it must be an array of directories",
    ];
    assert_eq!(mistakes(text), expect);
}

#[test]
fn one_mistake_each() {
    let check = |text: &str, expect: &str| assert_eq!(mistakes(text), [expect], "{text}");
    check(
        "executor = 3",
        "1:12: error: `executor` is not a list of tables; write [[executor]], with two brackets",
    );
    check(
        "[mount]\npath = '/x'",
        "1:1: error: `mount` is not a list of tables; write [[mount]], with two brackets",
    );
    check(
        "mount = [1]",
        "1:10: error: an entry of `mount` is an integer, not a table; write [[mount]]",
    );
    check(
        "gateway = 1",
        "1:11: error: `gateway` is not a table; write [gateway] on a line of its own",
    );
    check(
        "executor = [{name='s', address='http://s:1', takes_input='no'}]",
        "1:58: error: `takes_input` in [[executor]] is a string; it must be true or false",
    );
    check(
        "[gateway]\nspilt = 2",
        "2:1: error: unknown key `spilt` in [gateway]; did you mean `split`?",
    );
    check(
        "[gateway]\nsplit = -1",
        "2:9: error: `split` in [gateway] is -1; it must be a number from 1 to 1024",
    );
    let mount = |path: &str| {
        format!(
            "executor = [{{name='s', address='http://s:1'}}]\n[[mount]]\nexecutor='s'\nexport='e'\npath='{path}'"
        )
    };
    check(
        "[gateway]\nssh_command = 'ssh \"-F'",
        "2:15: error: \"ssh \\\"-F\" is not a command; write a program and its arguments, such as \"ssh -F /etc/posh/ssh\"",
    );
    check(
        "[gateway]\nsshfs = 'on'",
        "2:9: error: unknown choice \"on\" for sshfs; it is \"auto\" or \"off\"",
    );
    check(
        "[gateway]\nssh_command = ' '",
        "2:15: error: \" \" is not a command; write a program and its arguments, such as \"ssh -F /etc/posh/ssh\"",
    );
    check(
        &mount("~/logs"),
        "5:6: error: mount path \"~/logs\" begins with ~; write the home directory in full",
    );
    check(
        &mount("/"),
        "5:6: error: mount path \"/\" is the root directory; name the directories that executors serve",
    );
    check(
        &mount("/a/../b"),
        "5:6: error: mount path \"/a/../b\" holds ..; write the directory that is meant",
    );
    check(&mount(""), "5:6: error: mount path \"\" is relative; write it from / on");
}

#[test]
fn bad_toml_does_not_hide_the_rest_and_blames_nothing_that_may_only_be_unreadable() {
    let text = "[[executor]]\nname = \"s\naddress = 'http://s:1'\n\n[[mount]]\npath = 'relative'\nexecutor = 's'\n";
    let found = mistakes(text);
    assert!(found[0].starts_with("2:") && found[0].contains("not valid TOML"), "{found:?}");
    assert!(found.iter().any(|line| line.starts_with("6:8: error: mount path")), "{found:?}");
    assert!(
        !found.iter().any(|line| line.contains("no executor") || line.contains("has no `export`")),
        "{found:?}"
    );
}

#[test]
fn a_key_given_twice_is_bad_toml() {
    let found = mistakes("[gateway]\nsplit = 1\nsplit = 2\n");
    assert_eq!(found.len(), 1);
    assert!(found[0].starts_with("3:1: error: not valid TOML"), "{found:?}");
}

#[test]
fn columns_count_characters() {
    let found = mistakes("[[mount]]\n'é' = 1\nexecutor = 's'\npath = '/x'\nexport = 'ü/'\n");
    assert!(found.iter().any(|line| line.starts_with("5:10:")), "{found:?}");
}

#[test]
fn a_missing_file_is_one_mistake() {
    let errors = Config::load(Path::new("/nonexistent/mounts.toml")).expect_err("no such file");
    let text = errors.to_string();
    assert!(
        text.starts_with(
            "/nonexistent/mounts.toml: error: cannot read the configuration: No such file"
        ),
        "{text}"
    );
    assert_eq!(errors.mistakes()[0].position, None);
}

const VOLUMES: &str = r#"
[[executor]]
name = "store1"
address = "http://127.0.0.1:7400"

[[volume]]
path = "/mnt/logs/"
executor = "store1"
export = "logs"

[[volume]]
path = "/mnt/photos"
executor = "store1"
export = "photos"
read_only = true
cache_size = "10G"
sync = true
hard = true
"#;

#[test]
fn a_volume_is_a_mount_with_an_owner() {
    let config = parse(VOLUMES).expect("no mistake");
    let [logs, photos] = &config.volumes[..] else { panic!("two volumes: {:?}", config.volumes) };
    assert_eq!((logs.read_only, logs.sync, logs.hard), (false, false, false));
    assert_eq!(logs.cache_bytes, VolumeConfig::DEFAULT_CACHE_BYTES);
    assert_eq!((photos.read_only, photos.sync, photos.hard), (true, true, true));
    assert_eq!((photos.cache_bytes, photos.source()), (10 << 30, "store1:photos".to_owned()));
    let mounts: Vec<_> =
        config.mounts.iter().map(|mount| (mount.path.as_path(), mount.export.as_str())).collect();
    assert_eq!(mounts, [(Path::new("/mnt/logs"), "logs"), (Path::new("/mnt/photos"), "photos")]);
}

#[test]
fn mistakes_in_volumes() {
    let text = r#"
[[mount]]
path = "/mnt/logs"
executor = "s"
export = "logs"
[[volume]]
path = "/mnt/logs"
executor = "store2"
export = "a/b"
read_only = "yes"
cache_size = "10 G"
colour = 1
[[executor]]
name = "s"
address = "http://s:1"
"#;
    let expect = [
        "7:8: error: mount path `/mnt/logs` is already given in line 3; a path has one owner: remove one of the two",
        "8:12: error: no executor is named `store2`; add an [[executor]] of that name",
        "9:10: error: \"a/b\" is not the name of an export; give the executor's name for it; directories below it go into sub_path",
        "10:13: error: `read_only` in [[volume]] is a string; it must be true or false",
        "11:14: error: cache_size \"10 G\" is not a size; write it as a number of bytes, or as 512M or 10G",
        "12:1: error: unknown key `colour` in [[volume]]; known are path, executor, export, read_only, cache_size, sync, hard",
    ];
    assert_eq!(mistakes(text), expect);
}

#[test]
fn sizes() {
    let check = |text: &str, expect: Option<u64>| {
        assert_eq!(crate::config::cache_size(text).ok(), expect, "{text}")
    };
    check("1", Some(1));
    check("64k", Some(64 << 10));
    check("10G", Some(10 << 30));
    check("2T", Some(2 << 40));
    for wrong in ["", "G", "0", "-1", "1.5G", "+1", "18446744073709551615G", "1GB"] {
        check(wrong, None);
    }
}

#[test]
fn a_directory_s_file_starts_and_mounts_nothing() {
    let text = "[[executor]]\nname = \"s\"\naddress = \"ssh://host\"\n\
                [[volume]]\npath = \"/mnt/v\"\nexecutor = \"s\"\nexport = \"/x\"\n\
                [gateway]\nssh_command = \"/bin/sh -c id\"\nannotations = [\"a\"]\nsplit = 2\n";
    assert!(Config::parse(text, Path::new("mounts.toml")).is_ok());
    let errors = super::read(text, Path::new("mounts.toml"), super::ConfigScope::Directory)
        .expect_err("four keys");
    let places: Vec<_> =
        errors.mistakes().iter().filter_map(|m| m.position).map(|p| (p.line, p.column)).collect();
    assert_eq!(places, [(3, 11), (4, 3), (9, 1), (10, 1)], "{errors}");
    let harmless = "[[executor]]\nname = \"s\"\naddress = \"http://h:1\"\n\
                    [[mount]]\npath = \"/mnt/m\"\nexecutor = \"s\"\nexport = \"x\"\n[gateway]\nsshfs = \"off\"\n";
    assert!(super::read(harmless, Path::new("mounts.toml"), super::ConfigScope::Directory).is_ok());
}
