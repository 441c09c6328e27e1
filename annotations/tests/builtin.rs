//! The command files that ship with posh have no fault, and the table that
//! build.rs makes of them names their commands.

use std::path::Path;

use posh_annotations::{Library, check};

#[test]
fn the_command_files_have_no_fault() {
    let faults = check(&Path::new(env!("CARGO_MANIFEST_DIR")).join("commands"));
    let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn every_embedded_command_can_be_used() {
    let library = Library::builtin();
    let names: Vec<&str> = library.full_names().collect();
    assert!(names.contains(&"grep"), "{names:?}");
    for name in names {
        assert!(library.help_command(name).is_some(), "{name} does not compile");
    }
}

#[test]
fn commands_that_were_made_ready_are_read_as_others() {
    let (ready, other) = (Library::builtin(), Library::builtin());
    ready.prepare();
    for text in [
        "cat f",
        "grep -n x f",
        "sed -n 2,4p f",
        "sed w f",
        "stat -c %n f",
        "awk 1 f",
        "git status",
        "cat -X f",
    ] {
        let argv: Vec<_> = text.split(' ').map(Into::into).collect();
        let read =
            |library: &Library| library.classify(text.split(' ').next().unwrap(), &argv, &|_| None);
        assert_eq!(read(&ready), read(&other), "{text}");
    }
    assert!(ready.full_names().all(|name| ready.help_command(name).is_some()));
}

#[test]
fn files_of_the_user_replace_whole_commands() {
    let directory = tempfile::tempdir().unwrap();
    let directories = [directory.path().to_owned()];
    let before = Library::fingerprint(&directories);
    std::fs::write(directory.path().join("cat.yaml"), "cat:\n- FLAGS:\n  - short: q\n").unwrap();
    std::fs::write(directory.path().join("bad.yaml"), "mine:\n- FLUGS: []\n").unwrap();
    assert_ne!(Library::fingerprint(&directories), before);

    let (library, faults) = Library::load(&directories);
    let run = |words: &[&str]| {
        let argv: Vec<std::ffi::OsString> = words.iter().map(Into::into).collect();
        library.classify(words[0], &argv, &|_| None)
    };
    assert!(run(&["cat", "-q"]).is_ok());
    assert!(run(&["cat", "-A"]).is_err());
    assert!(run(&["mine"]).is_err());
    assert!(run(&["/usr/bin/grep", "x", "y"]).is_ok());
    let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
    assert_eq!(faults.len(), 1);
    assert!(
        faults[0].ends_with("bad.yaml:2:3: unknown key FLUGS; did you mean FLAGS?"),
        "{faults:?}"
    );
}

#[test]
fn a_directory_that_does_not_exist_is_empty_to_load_and_a_fault_to_check() {
    let missing = Path::new("/nowhere/annotations");
    assert!(Library::load(&[missing.to_owned()]).1.is_empty());
    assert_eq!(check(missing).len(), 1);
}
