//! The language's reference is held to what it shows: every YAML example is an
//! annotation file without a fault.

use std::path::Path;

#[test]
fn every_example_of_the_reference_is_a_sound_annotation_file() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/annotations.md");
    let text = std::fs::read_to_string(&document).unwrap();
    let examples = examples(&text);
    assert!(examples.len() >= 15, "only {} examples found", examples.len());
    let faults: Vec<String> = examples
        .iter()
        .flat_map(|(line, example)| {
            let faults = posh_annotations::check_text(Path::new("example"), example);
            faults.into_iter().map(move |fault| {
                format!("annotations.md:{}: {}", line + fault.line, fault.message)
            })
        })
        .collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Each fenced `yaml` block with the number of the line that opens it.
fn examples(text: &str) -> Vec<(usize, String)> {
    let mut examples = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for (number, line) in text.lines().enumerate() {
        match &mut open {
            None if line == "```yaml" => open = Some((number + 1, String::new())),
            None => {}
            Some(_) if line == "```" => examples.extend(open.take()),
            Some((_, example)) => {
                example.push_str(line);
                example.push('\n');
            }
        }
    }
    examples
}

/// One name for one thing, in the checker and in the reference.
#[test]
fn every_keyword_that_the_checker_takes_is_in_the_reference() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let reference = std::fs::read_to_string(package.join("../docs/annotations.md")).unwrap();
    let mut files = vec![package.join("src/compile.rs")];
    files.extend(
        std::fs::read_dir(package.join("src/compile")).unwrap().map(|entry| entry.unwrap().path()),
    );
    let mut keywords = std::collections::BTreeSet::new();
    for file in files {
        let source = std::fs::read_to_string(file).unwrap();
        for call in ["take(\"", "condition(\""] {
            let uses = source.split(call).skip(1).filter_map(|rest| rest.split_once('"'));
            keywords.extend(uses.map(|(keyword, _)| keyword.to_owned()));
        }
    }
    assert!(keywords.len() > 50, "{keywords:?}");
    let quoted = |keyword: &str| {
        [format!("`{keyword}"), format!("{{{keyword}:"), format!(", {keyword}:")]
            .iter()
            .any(|text| reference.contains(text))
    };
    let missing: Vec<&String> = keywords.iter().filter(|keyword| !quoted(keyword)).collect();
    assert!(missing.is_empty(), "not in docs/annotations.md: {missing:?}");
}
