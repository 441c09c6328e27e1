//! Checks on parsed Rust: names of types, errors that are text, parameters that are tuples.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use syn::{
    FnArg, GenericArgument, Ident, Item, ItemEnum, ItemMod, ItemStruct, ItemTrait, ItemType,
    PathArguments, Signature, Type, TypePath, spanned::Spanned, visit::Visit,
};

use super::{Check, Finding, sources::Source};

/// Types of the whole workspace that may have the same name.
const SAME_NAMES: usize = 2;

/// Types and findings of one file.
#[derive(Default)]
struct FileFindings {
    path: String,
    types: Vec<(String, usize)>,
    text_errors: Vec<Finding>,
    tuples: Vec<Finding>,
}

pub fn checks(sources: &[Source]) -> Result<Vec<Check>> {
    let mut files = Vec::new();
    for source in sources.iter().filter(|source| !source.is_test) {
        let file = syn::parse_file(&source.text);
        let file = file.with_context(|| format!("cannot parse {}", source.path))?;
        let mut found = FileFindings { path: source.path.clone(), ..FileFindings::default() };
        found.visit_file(&file);
        files.push(found);
    }
    let names = repeated_names(&files);
    let (mut text_errors, mut tuples) = (Vec::new(), Vec::new());
    for file in files {
        text_errors.extend(file.text_errors);
        tuples.extend(file.tuples);
    }
    Ok(vec![
        Check {
            name: "repeated-type-names",
            rule: "at most 2 types of the workspace have the same name",
            findings: names,
        },
        Check { name: "text-errors", rule: "an error is a type, no String", findings: text_errors },
        Check {
            name: "tuple-parameters",
            rule: "a parameter is no tuple: a type with names says what is what",
            findings: tuples,
        },
    ])
}

fn repeated_names(files: &[FileFindings]) -> Vec<Finding> {
    let mut by_name: BTreeMap<&str, Vec<(&str, usize)>> = BTreeMap::new();
    for file in files {
        for (name, line) in &file.types {
            by_name.entry(name).or_default().push((&file.path, *line));
        }
    }
    let repeated = by_name.into_iter().filter(|(_, places)| places.len() > SAME_NAMES);
    let finding = |(name, places): (&str, Vec<(&str, usize)>)| {
        let list = places.iter().map(|(path, line)| format!("{path}:{line}"));
        let list = list.collect::<Vec<_>>().join(", ");
        Finding::new(places[0].0, places[0].1, format!("{name}: {} ({list})", places.len()))
    };
    repeated.map(finding).collect()
}

impl FileFindings {
    fn type_name(&mut self, name: &Ident) {
        self.types.push((name.to_string(), name.span().start().line));
    }
}

impl<'a> Visit<'a> for FileFindings {
    fn visit_item(&mut self, item: &'a Item) {
        match item {
            Item::Struct(ItemStruct { ident, .. })
            | Item::Enum(ItemEnum { ident, .. })
            | Item::Trait(ItemTrait { ident, .. })
            | Item::Type(ItemType { ident, .. }) => self.type_name(ident),
            Item::Mod(module) if is_for_tests(module) => return,
            _ => {}
        }
        syn::visit::visit_item(self, item);
    }

    fn visit_signature(&mut self, signature: &'a Signature) {
        for parameter in &signature.inputs {
            if let FnArg::Typed(parameter) = parameter
                && matches!(&*parameter.ty, Type::Tuple(tuple) if !tuple.elems.is_empty())
            {
                let line = parameter.span().start().line;
                self.tuples.push(Finding::new(&self.path, line, signature.ident.to_string()));
            }
        }
        syn::visit::visit_signature(self, signature);
    }

    fn visit_type_path(&mut self, path: &'a TypePath) {
        if let Some(last) = path.path.segments.last()
            && last.ident == "Result"
            && let PathArguments::AngleBracketed(arguments) = &last.arguments
            && let Some(GenericArgument::Type(Type::Path(error))) = arguments.args.iter().nth(1)
            && error.path.is_ident("String")
        {
            self.text_errors.push(Finding::new(&self.path, last.span().start().line, "String"));
        }
        syn::visit::visit_type_path(self, path);
    }
}

/// `#[cfg(test)] mod …`.
fn is_for_tests(module: &ItemMod) -> bool {
    module.attrs.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.meta.require_list().is_ok_and(|list| list.tokens.to_string() == "test")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<Check> {
        let source = Source { path: "a.rs".to_owned(), text: text.to_owned(), is_test: false };
        checks(&[source]).unwrap()
    }

    #[test]
    fn each_check_finds_its_kind_outside_tests() {
        let text = "mod a { struct S; }\nmod b { enum S {} }\nmod c { type S = u8; }\n\
                    fn f((a, b): (u8, u8)) -> Result<u8, String> { todo!() }\n\
                    #[cfg(test)]\nmod tests { struct S; fn g(a: (u8, u8)) {} }\n";
        let checks = found(text);
        let lines = |check: &Check| check.findings.iter().map(|one| one.line).collect::<Vec<_>>();
        assert_eq!(checks.iter().map(lines).collect::<Vec<_>>(), [vec![1], vec![4], vec![4]]);
        assert!(checks[0].findings[0].what.starts_with("S: 3 ("));
    }
}
