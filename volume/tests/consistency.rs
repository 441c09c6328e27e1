//! docs/consistency.md: each sentence of it is held by a test that exists.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::{fs, path::Path};

/// `file::function`, the file by its path in the repository without `.rs`.
fn exists(test: &str) -> bool {
    let Some((file, function)) = test.rsplit_once("::") else { return false };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file).with_extension("rs");
    fs::read_to_string(path).unwrap_or_default().contains(&format!("fn {function}("))
}

/// An item without what follows the list.
fn first_paragraph(item: &str) -> &str {
    item.split_once("\n\n").map_or(item, |(paragraph, _)| paragraph)
}

#[test]
fn each_sentence_is_held_by_a_test() {
    let text =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/consistency.md"))
            .unwrap();
    let items: Vec<&str> = text.split("\n- ").skip(1).map(first_paragraph).collect();
    assert!(items.len() > 15, "the document's items are not found");
    for item in items {
        let tests = item.rsplit_once('→').map_or("", |(_, behind)| behind);
        let tests: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        assert!(!tests.is_empty(), "no test is named: {item}");
        tests.iter().for_each(|test| assert!(exists(test), "{test} does not exist: {item}"));
    }
}
