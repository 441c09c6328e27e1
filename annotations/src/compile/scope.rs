//! The names that the conditions of one annotation may use: its options, as
//! they are written on a command line, and its named operands.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::fields;
use crate::diagnostic::Faults;
use crate::document::{NodeContent, YamlNode};
use crate::model::Subject;

/// Names and what they stand for. Options are numbered through FLAGS, OPTPARAMS
/// and EXPRESSION in this order.
pub(super) struct NameScope {
    subjects: HashMap<String, Subject>,
}

/// The lists that declare options, in the order of their numbers.
pub(super) const OPTION_LISTS: [&str; 3] = ["FLAGS", "OPTPARAMS", "EXPRESSION"];

impl NameScope {
    /// Collects the names of an annotation, and reports those declared twice.
    pub fn of(entries: &[fields::KeyValue], faults: &mut Faults) -> Self {
        let mut scope = Self { subjects: HashMap::new() };
        let single_dash =
            find(entries, "long_arg_single_dash").and_then(YamlNode::text) == Some("true");
        let options = OPTION_LISTS.into_iter().flat_map(|list| items(entries, list));
        for (number, item) in options.enumerate() {
            for (key, dashes) in
                [("short", "-"), ("long", if single_dash { "-" } else { "--" }), ("word", "")]
            {
                for name in names(field(item, key)) {
                    scope.declare(
                        format!("{dashes}{}", name.text().unwrap_or_default()),
                        number,
                        name,
                        faults,
                    );
                }
            }
        }
        for (number, item) in items(entries, "PARAMS").iter().enumerate() {
            let Some((text, name)) =
                field(item, "name").and_then(|name| Some((name.text()?, name)))
            else {
                continue;
            };
            if scope.subjects.insert(text.to_owned(), Subject::Param(number)).is_some() {
                faults.add(name.place, format!("the name {text} is given twice"));
            }
        }
        scope
    }

    fn declare(&mut self, name: String, number: usize, node: &YamlNode, faults: &mut Faults) {
        match self.subjects.entry(name) {
            Entry::Occupied(earlier) => {
                faults.add(node.place, format!("flag {} is declared twice", earlier.key()))
            }
            Entry::Vacant(vacant) => {
                vacant.insert(Subject::Option(number));
            }
        }
    }

    /// The option or operand of that name.
    pub fn find(&self, name: &str) -> Option<Subject> {
        self.subjects.get(name).copied()
    }
}

pub(super) fn find<'n>(entries: &'n [fields::KeyValue], key: &str) -> Option<&'n YamlNode> {
    entries.iter().find(|(name, _)| name.text() == Some(key)).map(|(_, value)| value)
}

pub(super) fn items<'n>(entries: &'n [fields::KeyValue], key: &str) -> &'n [YamlNode] {
    match find(entries, key).map(|node| &node.content) {
        Some(NodeContent::List(items)) => items,
        _ => &[],
    }
}

fn field<'n>(node: &'n YamlNode, key: &str) -> Option<&'n YamlNode> {
    match &node.content {
        NodeContent::Map(entries) => find(entries, key),
        _ => None,
    }
}

/// The scalars of a word or a list of words.
pub(super) fn names(node: Option<&YamlNode>) -> impl Iterator<Item = &YamlNode> {
    let nodes = match node.map(|node| (&node.content, node)) {
        Some((NodeContent::List(items), _)) => items.as_slice(),
        Some((NodeContent::Text(_), node)) => std::slice::from_ref(node),
        _ => &[],
    };
    nodes.iter().filter(|node| node.text().is_some())
}
