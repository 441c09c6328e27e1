//! docs/semantics.md: each sentence of it is held by a test that exists.

use std::fs;
use std::path::{Path, PathBuf};

/// The document's items, up to the next item or paragraph.
fn items(text: &str) -> impl Iterator<Item = &str> {
    let behind_dash = text.split("\n- ").skip(1);
    behind_dash.map(|item| item.split_once("\n\n").map_or(item, |(paragraph, _)| paragraph))
}

/// The tests behind an item's arrow.
fn tests_of(item: &str) -> Vec<&str> {
    let behind = item.rsplit_once('→').map_or("", |(_, behind)| behind);
    behind.split('`').skip(1).step_by(2).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A file of cases, or `module::function` of this crate's tests.
fn exists(test: &str) -> bool {
    let here = root().join("integration");
    match test.rsplit_once("::") {
        None => here.join("cases").join(test).with_extension("yaml").is_file(),
        Some((module, function)) => {
            let file = here.join("tests").join(module.replace("::", "/")).with_extension("rs");
            let text = fs::read_to_string(file).unwrap_or_default();
            text.contains(&format!("fn {function}()"))
        }
    }
}

#[test]
fn each_sentence_is_held_by_a_test() {
    let text = fs::read_to_string(root().join("docs/semantics.md")).unwrap();
    let mut faults = Vec::new();
    for item in items(&text) {
        let tests = tests_of(item);
        if tests.is_empty() {
            faults.push(format!("no test is named: {item}"));
        }
        faults.extend(
            tests.iter().filter(|t| !exists(t)).map(|t| format!("{t} does not exist: {item}")),
        );
    }
    assert!(items(&text).count() > 20, "the document's items are not found");
    assert!(faults.is_empty(), "docs/semantics.md:\n{}", faults.join("\n"));
}
