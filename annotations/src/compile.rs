//! Compiles YAML to checked annotations. Every fault is reported with its place, and checking
//! continues after each, so that one pass finds them all.
//!
//! The reference of what is accepted is `docs/annotations.md`.

mod argument;
mod condition;
mod fields;
mod guards;
mod reasons;
mod scope;
mod shared;
mod values;

use crate::diagnostic::Faults;
use crate::document::{NodeContent, SourcePosition, YamlNode};
use crate::model::{Annotation, Body, Command, Condition, Conditional, Omission, Style};
use fields::{Fields, KeyValue};
use scope::NameScope;
pub(crate) use shared::Lookup;

/// Treatment of regular expressions, whose compilation takes longer than the rest of checking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Depth {
    /// Compiled at first use; a test compiles those that ship with posh.
    Trusted,
    /// Compiled now.
    Ready,
    /// Compiled now, and faults are reported.
    Full,
}

/// Reads one command. `None` if it has no usable form at all; else the result
/// may be used only if `faults` stayed empty.
pub(crate) fn command(
    node: &YamlNode,
    lookup: Lookup<'_>,
    depth: Depth,
    faults: &mut Faults,
) -> Option<Command> {
    let written = shared::written(node, lookup, faults)?;
    let omissions =
        written.not_annotated.as_ref().map(|node| omissions(node, faults)).unwrap_or_default();
    let help = written.help.as_ref().and_then(|node| help(node, faults));
    let mut annotations = Vec::new();
    for (place, entries) in &written.annotations {
        let mut annotation = annotation(*place, entries, depth, faults);
        annotation.known_long = long_names(&omissions);
        if written.subcommands && !annotation.params.is_empty() {
            faults.add(*place, "a command with subcommands has no PARAMS of its own");
        }
        annotations.push(annotation);
    }
    if annotations.is_empty() {
        faults.add(node.place, "a command needs at least one annotation");
    }
    let body = match (written.subcommands, annotations.pop()) {
        (true, Some(global)) => Body::Subcommands(Box::new(global)),
        (_, last) => {
            annotations.extend(last);
            Body::Annotations(annotations)
        }
    };
    Some(Command { body, omissions, help })
}

fn help(node: &YamlNode, faults: &mut Faults) -> Option<Vec<String>> {
    match &node.content {
        NodeContent::List(items) => {
            Some(items.iter().filter_map(|item| item.text().map(str::to_owned)).collect())
        }
        _ => {
            faults.add(node.place, "help is a list of words");
            None
        }
    }
}

fn omissions(node: &YamlNode, faults: &mut Faults) -> Vec<Omission> {
    let NodeContent::List(items) = &node.content else {
        faults.add(node.place, format!("not_annotated is a list, not {}", node.kind()));
        return Vec::new();
    };
    items.iter().filter_map(|item| omission(item, faults)).collect()
}

fn omission(node: &YamlNode, faults: &mut Faults) -> Option<Omission> {
    let mut fields = Fields::of(node, "an item of not_annotated", faults)?;
    let flags: Vec<String> = scope::names(fields.take("flags"))
        .filter_map(|name| name.text())
        .map(str::to_owned)
        .collect();
    let reason = fields.take("reason").and_then(YamlNode::text).unwrap_or_default().to_owned();
    if flags.is_empty() || reason.is_empty() {
        faults.add(node.place, "an item of not_annotated has flags and a reason");
    }
    fields.finish(faults);
    Some(Omission { flags, reason })
}

fn long_names(omissions: &[Omission]) -> Vec<String> {
    let flags = omissions.iter().flat_map(|omission| &omission.flags);
    flags.filter_map(|flag| flag.strip_prefix("--")).map(str::to_owned).collect()
}

/// State for compiling one annotation.
struct Compiler<'f> {
    faults: &'f mut Faults,
    scope: NameScope,
    depth: Depth,
    /// Operands can't be named: set while the condition for an operand's existence is read.
    options_only: bool,
}

fn annotation(
    place: SourcePosition,
    entries: &[KeyValue],
    depth: Depth,
    faults: &mut Faults,
) -> Annotation {
    let scope = NameScope::of(entries, faults);
    let mut compiler = Compiler { faults, scope, depth, options_only: false };
    let mut fields = Fields::new(place, entries, compiler.faults);
    let mut annotation = Annotation {
        when: Condition::Always,
        options: compiler.options(entries),
        params: compiler.params(entries),
        style: compiler.style(&mut fields),
        ..Annotation::default()
    };
    for list in scope::OPTION_LISTS {
        fields.take(list);
    }
    fields.take("PARAMS");
    annotation.style.expression = fields.has("EXPRESSION");
    compiler.keywords(&mut fields, &mut annotation);
    compiler.lists(&mut fields, &mut annotation);
    compiler.splitting(&mut fields, &mut annotation);
    fields.finish(compiler.faults);
    annotation
}

impl Compiler<'_> {
    fn style(&mut self, fields: &mut Fields<'_>) -> Style {
        Style {
            long_arg_single_dash: self.flag(fields.take("long_arg_single_dash")),
            no_abbreviations: fields
                .take("abbreviations")
                .is_some_and(|node| !self.flag(Some(node))),
            options_first: self.flag(fields.take("options_first")),
            ignores_posixly_correct: self.flag(fields.take("ignores_posixly_correct")),
            old_style: self.flag(fields.take("old_style")),
            expression: false,
        }
    }

    /// The keywords with one value.
    fn keywords(&mut self, fields: &mut Fields<'_>, annotation: &mut Annotation) {
        let mut condition = |key| fields.take(key).map(|node| self.condition(node));
        annotation.when = condition("when").unwrap_or(Condition::Always);
        annotation.reads_stdin = condition("reads_stdin").unwrap_or_default();
        annotation.stops_early = condition("stops_early").unwrap_or_default();
        annotation.needs_network = condition("needs_network").unwrap_or_default();
        annotation.deterministic = condition("deterministic");
        annotation.side_effects = condition("side_effects");
        annotation.idempotent = condition("idempotent");
        annotation.replaces_files = condition("replaces_files");
        if let Some(node) = fields.take("needs_current_dir") {
            annotation.needs_current_dir = self.current_dir(node);
        }
        if let Some(node) = fields.take("filters_input") {
            annotation.output_weight = self.weight(node);
        }
        if let Some(node) = fields.take("status") {
            annotation.status = self.status(node);
        }
        if let Some(node) = fields.take("ends_lines") {
            annotation.line_ends = self.line_ends(node);
        }
        if let Some(node) = fields.take("terminal") {
            annotation.terminal = self.terminal(node);
        }
        if let Some(node) = fields.take("tool_version") {
            annotation.tool_version = self.tool_version(node);
        }
    }

    /// The keywords that are lists.
    fn lists(&mut self, fields: &mut Fields<'_>, annotation: &mut Annotation) {
        if let Some(node) = fields.take("environment") {
            annotation.environment = self.word_list(node, "a variable's name");
        }
        if let Some(node) = fields.take("client_files") {
            annotation.client_files = self.user_files(node, "a client file");
        }
        if let Some(node) = fields.take("same_files") {
            annotation.same_files = self.user_files(node, "a file of same_files");
            if annotation.same_files.iter().any(|path| annotation.client_files.contains(path)) {
                self.faults.add(
                    node.place,
                    "a file is either sent (client_files) or compared (same_files)",
                );
            }
        }
        if let Some(node) = fields.take("searches_up") {
            annotation.searches_up = self.word_list(node, "a file name");
        }
        if let Some(node) = fields.take("changes_only") {
            let parse = &mut |compiler: &mut Self, node: &YamlNode| compiler.word(node, "a path");
            annotation.changes_only = self.mixed_list(node, parse);
        }
        if let Some(node) = fields.take("only_grows") {
            annotation.only_grows = self.word_list(node, "a path");
        }
        if let Some(node) = fields.take("own_directories") {
            annotation.own_directories = self.word_list(node, "a path");
        }
        if let Some(node) = fields.take("runs") {
            annotation.runs =
                self.mixed_list(node, &mut |compiler, node| compiler.word(node, "a command"));
        }
        if let Some(node) = fields.take("helpers") {
            annotation.helpers =
                self.mixed_list(node, &mut |compiler, node| compiler.word(node, "a program"));
        }
        if let Some(node) = fields.take("shows") {
            annotation.shows = self.mixed_list(node, &mut Self::attribute);
        }
        if let Some(node) = fields.take("guards") {
            annotation.guards = self.guards(node);
        }
        if let Some(node) = fields.take("stays_here") {
            annotation.stays_here = self.reasons(node);
        }
    }

    fn user_files(&mut self, node: &YamlNode, what: &str) -> Vec<String> {
        let files = self.word_list(node, "a path");
        if files.iter().any(|path| !path.starts_with('/') && !path.starts_with("~/")) {
            self.faults.add(node.place, format!("{what} is absolute or starts with ~/"));
        }
        files
    }

    fn splitting(&mut self, fields: &mut Fields<'_>, annotation: &mut Annotation) {
        if let Some(node) = fields.take("splittable_across_input") {
            annotation.splittable_across_input = self.condition(node);
        }
        let operands =
            annotation.params.iter().any(|param| !matches!(param.splittable, Condition::Never));
        let input = !matches!(annotation.splittable_across_input, Condition::Never);
        if let Some(node) = fields.take("when_split") {
            let parse = &mut |compiler: &mut Self, node: &YamlNode| {
                Some(compiler.word_list(node, "a word"))
            };
            annotation.when_split = self.conditionals(node, "add", parse);
            if !operands {
                self.faults
                    .add(fields.place_of("when_split"), "when_split without a splittable operand");
            }
        }
        if let Some(node) = fields.take("when_remote") {
            let parse = &mut |compiler: &mut Self, node: &YamlNode| {
                Some(compiler.word_list(node, "a word"))
            };
            annotation.when_remote = self.conditionals(node, "add", parse);
        }
        if let Some(node) = fields.take("aggregator") {
            annotation.aggregator = self.aggregator(node);
            if !operands && !input {
                self.faults.add(
                    fields.place_of("aggregator"),
                    "an aggregator without anything splittable",
                );
            }
        }
        if let Some(node) = fields.take("behind_merge") {
            annotation.behind_merge = self.behind_merge(node);
            if !input {
                self.faults.add(
                    fields.place_of("behind_merge"),
                    "behind_merge without splittable_across_input",
                );
            }
        }
        if let Some(node) = fields.take("whole_files") {
            annotation.whole_files = self.condition(node);
            if !operands {
                self.faults.add(
                    fields.place_of("whole_files"),
                    "whole_files without a splittable operand",
                );
            }
        }
    }

    fn conditionals<T>(
        &mut self,
        node: &YamlNode,
        key: &'static str,
        parse: &mut dyn FnMut(&mut Self, &YamlNode) -> Option<T>,
    ) -> Vec<Conditional<T>> {
        let NodeContent::List(items) = &node.content else {
            self.faults.add(node.place, format!("a list is needed here, not {}", node.kind()));
            return Vec::new();
        };
        items.iter().filter_map(|item| self.conditional(item, key, parse)).collect()
    }
}
