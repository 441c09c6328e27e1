//! What holds for all words, sensible or not.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use std::sync::LazyLock;

use posh_annotations::Library;
use proptest::prelude::*;

static LIBRARY: LazyLock<Library> = LazyLock::new(Library::builtin);

/// Words that look like options of the commands, values, names, and bytes of any kind.
fn word() -> impl Strategy<Value = OsString> {
    prop_oneof![
        "-[a-zA-Z0-9]{1,3}".prop_map(OsString::from),
        "--[a-z]{1,9}(=[a-z,]{0,3})?".prop_map(OsString::from),
        "--(file|regexp|color|lines|key|output|directory|extract|create)(=[a-z]{0,3})?"
            .prop_map(OsString::from),
        "[a-z./]{0,5}".prop_map(OsString::from),
        prop::sample::select(vec![
            "-", "--", "-f", "-c", "-x", "-C", "..", "(", "!", "-exec", ";", "+5", "-5", "status"
        ])
        .prop_map(OsString::from),
        prop::collection::vec(any::<u8>(), 0..6).prop_map(OsString::from_vec),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn reading_never_fails_badly_and_points_at_what_it_found(
        command in any::<prop::sample::Index>(),
        words in prop::collection::vec(word(), 0..7),
        posix in any::<bool>(),
    ) {
        let library = &*LIBRARY;
        let commands: Vec<&str> = library.commands().collect();
        let name = *command.get(&commands);
        let argv: Vec<OsString> = std::iter::once(name.into()).chain(words).collect();
        let environment = |variable: &str| (posix && variable == "POSIXLY_CORRECT").then(OsString::new);
        let explained = library.explain(name, &argv, &environment);
        prop_assert!(explained.ends_with('\n'));
        let Ok(invocation) = library.classify(name, &argv, &environment) else { return Ok(()) };
        for file in &invocation.files {
            prop_assert!(file.argument > 0);
            prop_assert_eq!(&argv[file.argument].as_bytes()[file.start..file.end], file.path.as_bytes());
            prop_assert!(!file.path.is_empty());
        }
        let order: Vec<(usize, usize)> = invocation.files.iter().map(|file| (file.argument, file.start)).collect();
        prop_assert!(order.is_sorted());
        if let Some(split) = &invocation.split {
            prop_assert!(split.operands.len() != 1);
            prop_assert!(split.operands.is_empty() == split.across_input);
            for operand in &split.operands {
                prop_assert!(invocation.files.iter().any(|file| file.argument == *operand));
            }
        }
    }
}
