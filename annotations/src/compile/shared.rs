//! Normalizes the forms in which a command may be written (a list, a mapping with shared keywords,
//! an alias) to a list of annotations, each merged with the shared keywords.

use super::fields::{Fields, KeyValue};
use crate::diagnostic::Faults;
use crate::document::{NodeContent, SourcePosition, YamlNode};

/// Keywords whose lists are joined, the shared ones first. All others are replaced.
const JOINED: [&str; 17] = [
    "FLAGS",
    "OPTPARAMS",
    "EXPRESSION",
    "environment",
    "client_files",
    "same_files",
    "runs",
    "helpers",
    "shows",
    "searches_up",
    "changes_only",
    "only_grows",
    "own_directories",
    "guards",
    "stays_here",
    "when_split",
    "when_remote",
];

/// Keywords of the mapping form that are the command's, not its annotations'.
const OF_COMMAND: [&str; 5] = ["annotations", "same_as", "subcommands", "not_annotated", "help"];

/// Limit against circular aliases.
const ALIAS_DEPTH: usize = 4;

/// Finds another command's node by its name.
pub type Lookup<'a> = &'a dyn Fn(&str) -> Option<YamlNode>;

/// A command in the normalized form.
pub(super) struct NormalizedCommand {
    /// Each with its place; shared keywords are merged in.
    pub annotations: Vec<(SourcePosition, Vec<KeyValue>)>,
    /// With `subcommands: true` there is one annotation, of what stands before the subcommand.
    pub subcommands: bool,
    pub not_annotated: Option<YamlNode>,
    pub help: Option<YamlNode>,
}

/// Normalizes `node`.
pub(super) fn written(
    node: &YamlNode,
    lookup: Lookup<'_>,
    faults: &mut Faults,
) -> Option<NormalizedCommand> {
    follow(node, lookup, faults, ALIAS_DEPTH)
}

fn follow(
    node: &YamlNode,
    lookup: Lookup<'_>,
    faults: &mut Faults,
    depth: usize,
) -> Option<NormalizedCommand> {
    let entries = match &node.content {
        NodeContent::List(items) => {
            let annotations = list(items, &[], faults);
            return Some(NormalizedCommand {
                annotations,
                subcommands: false,
                not_annotated: None,
                help: None,
            });
        }
        NodeContent::Map(entries) => entries,
        _ => {
            faults.add(
                node.place,
                format!("a command is a list of annotations or a mapping, not {}", node.kind()),
            );
            return None;
        }
    };
    let mut fields = Fields::new(node.place, entries, faults);
    let shared: Vec<KeyValue> =
        entries.iter().filter(|(key, _)| !is_of_command(key)).cloned().collect();
    let mut written = body(&mut fields, shared, lookup, faults, depth)?;
    written.not_annotated = fields.take("not_annotated").cloned().or(written.not_annotated);
    written.help = fields.take("help").cloned().or(written.help);
    Some(written)
}

fn is_of_command(key: &YamlNode) -> bool {
    key.text().is_some_and(|key| OF_COMMAND.contains(&key))
}

/// Reads the one of `annotations`, `same_as` and `subcommands` that is given.
fn body(
    fields: &mut Fields<'_>,
    shared: Vec<KeyValue>,
    lookup: Lookup<'_>,
    faults: &mut Faults,
    depth: usize,
) -> Option<NormalizedCommand> {
    let plain = |annotations, subcommands| NormalizedCommand {
        annotations,
        subcommands,
        not_annotated: None,
        help: None,
    };
    match (fields.take("annotations"), fields.take("same_as"), fields.take("subcommands")) {
        (Some(YamlNode { content: NodeContent::List(items), .. }), None, None) => {
            Some(plain(list(items, &shared, faults), false))
        }
        (Some(other), None, None) => {
            faults.add(other.place, format!("annotations is a list, not {}", other.kind()));
            None
        }
        (None, Some(target), None) => alias(target, &shared, lookup, faults, depth),
        (None, None, Some(yes)) => {
            if yes.text() != Some("true") {
                faults.add(yes.place, "subcommands is true or absent");
            }
            Some(plain(vec![(fields.place, shared)], true))
        }
        _ => {
            faults.add(fields.place, "a command has one of annotations, same_as and subcommands");
            None
        }
    }
}

fn alias(
    target: &YamlNode,
    shared: &[KeyValue],
    lookup: Lookup<'_>,
    faults: &mut Faults,
    depth: usize,
) -> Option<NormalizedCommand> {
    let name = target.text().unwrap_or_default();
    let Some(node) = lookup(name) else {
        faults.add(target.place, format!("same_as names {name}, which has no annotation"));
        return None;
    };
    if depth == 0 {
        return None;
    }
    // The target's own faults are reported where it is checked itself.
    let Some(mut written) = follow(&node, lookup, &mut Faults::default(), depth - 1) else {
        faults.add(
            target.place,
            format!("same_as names {name}, which has faults or leads in a circle"),
        );
        return None;
    };
    for (_, annotation) in &mut written.annotations {
        *annotation = merge(shared, annotation, &mut Faults::default());
    }
    Some(written)
}

fn list(
    items: &[YamlNode],
    shared: &[KeyValue],
    faults: &mut Faults,
) -> Vec<(SourcePosition, Vec<KeyValue>)> {
    let mut annotations = Vec::new();
    for item in items {
        match &item.content {
            NodeContent::Map(own) => annotations.push((item.place, merge(shared, own, faults))),
            _ => faults.add(item.place, format!("an annotation is a mapping, not {}", item.kind())),
        }
    }
    annotations
}

fn merge(shared: &[KeyValue], own: &[KeyValue], faults: &mut Faults) -> Vec<KeyValue> {
    let mut merged = own.to_vec();
    for (key, value) in shared {
        let same = merged.iter_mut().find(|(other, _)| other.text() == key.text());
        match same {
            None => merged.push((key.clone(), value.clone())),
            Some((_, mine)) if key.text().is_some_and(|key| JOINED.contains(&key)) => {
                join(value, mine, faults)
            }
            Some(_) => {}
        }
    }
    merged
}

/// Puts the items of `shared` before those of `own`.
fn join(shared: &YamlNode, own: &mut YamlNode, faults: &mut Faults) {
    match (&shared.content, &mut own.content) {
        (NodeContent::List(shared), NodeContent::List(own)) => {
            own.splice(0..0, shared.iter().cloned());
        }
        (NodeContent::List(_), _) => {} // reported when it is read
        _ => faults.add(shared.place, format!("a list is needed here, not {}", shared.kind())),
    }
}
