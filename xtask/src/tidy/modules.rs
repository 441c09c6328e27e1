//! Which modules of a crate use which: arrows are to go one way.

use std::collections::{BTreeMap, BTreeSet};

use super::{Check, Finding, sources::Source};

/// Modules that may use each other.
const LARGEST_CIRCLE: usize = 3;

/// Modules of a crate with those that they name as `crate::MODULE`.
type Uses = BTreeMap<String, BTreeSet<String>>;

pub fn circles(sources: &[Source]) -> Check {
    let mut crates: BTreeMap<&str, Uses> = BTreeMap::new();
    for source in sources.iter().filter(|source| !source.is_test) {
        let Some((package, module)) = module_of(&source.path) else { continue };
        let uses = crates.entry(package).or_default().entry(module.to_owned()).or_default();
        let is_code = |line: &&str| !line.trim_start().starts_with("//");
        let code: String = source.own_text().split_inclusive('\n').filter(is_code).collect();
        uses.extend(named(&code).into_iter().filter(|name| name != module));
    }
    let findings = crates.iter().flat_map(|(package, uses)| {
        let circles = circles_of(uses).into_iter().filter(|circle| circle.len() > LARGEST_CIRCLE);
        circles.map(|circle| Finding::new(package, 0, circle.join(", ")))
    });
    Check {
        name: "circles",
        rule: "at most 3 modules of a crate use each other",
        findings: findings.collect(),
    }
}

/// `gateway/src/dispatch/mod.rs` → `gateway`, `dispatch`.
fn module_of(path: &str) -> Option<(&str, &str)> {
    let (package, rest) = path.split_once("/src/")?;
    let module = rest.split('/').next()?.trim_end_matches(".rs");
    (!matches!(module, "lib" | "main" | "bin")).then_some((package, module))
}

/// Modules behind each `crate::`, those in braces included.
fn named(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for rest in text.split("crate::").skip(1) {
        let Some(list) = rest.strip_prefix('{') else {
            found.insert(identifier(rest));
            continue;
        };
        let mut depth = 0;
        let mut is_first = true;
        for (place, next) in list.char_indices() {
            match next {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => is_first = true,
                _ if next.is_whitespace() => {}
                _ if is_first => {
                    found.insert(identifier(&list[place..]));
                    is_first = false;
                }
                _ => {}
            }
        }
    }
    found
}

fn identifier(text: &str) -> String {
    text.chars().take_while(|next| next.is_alphanumeric() || *next == '_').collect()
}

/// Sets of modules that reach each other.
fn circles_of(uses: &Uses) -> Vec<Vec<String>> {
    let reached: BTreeMap<&String, BTreeSet<&String>> =
        uses.keys().map(|module| (module, reach(uses, module))).collect();
    let mut circles: Vec<Vec<String>> = Vec::new();
    for (module, from_here) in &reached {
        if circles.iter().any(|circle| circle.contains(module)) {
            continue;
        }
        let back = from_here.iter().filter(|other| reached[**other].contains(module));
        let circle: Vec<String> = back.map(|name| (*name).clone()).collect();
        if circle.len() > 1 {
            circles.push(circle);
        }
    }
    circles
}

/// Modules that a module uses, directly or by others.
fn reach<'u>(uses: &'u Uses, from: &str) -> BTreeSet<&'u String> {
    let (mut found, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(module) = open.pop() {
        for name in uses.get(module).into_iter().flatten() {
            if let Some((name, _)) = uses.get_key_value(name)
                && found.insert(name)
            {
                open.push(name);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_behind_crate_are_found() {
        let text = "use crate::{\n    a::{b, c},\n    d,\n};\nfn f() { crate::e::g() }";
        assert_eq!(named(text), ["a", "d", "e"].map(str::to_owned).into());
        assert_eq!(module_of("gateway/src/dispatch/mod.rs"), Some(("gateway", "dispatch")));
        assert_eq!(module_of("gateway/src/lib.rs"), None);
    }

    #[test]
    fn circles_are_what_reaches_itself() {
        let line = |module: &str, uses: &[&str]| {
            (module.to_owned(), uses.iter().map(|&name| name.to_owned()).collect())
        };
        let uses = Uses::from([
            line("a", &["b"]),
            line("b", &["c", "d"]),
            line("c", &["a"]),
            line("d", &["gone"]),
        ]);
        assert_eq!(circles_of(&uses), [["a", "b", "c"].map(str::to_owned).to_vec()]);
    }
}
