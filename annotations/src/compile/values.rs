//! Words, numbers, sizes, types and other small values of keywords.

use super::Compiler;
use super::fields::{Fields, alike};
use crate::document::{NodeContent, SourcePosition, YamlNode};
use crate::invocation::{
    BehindMerge, CurrentDir, FileAttribute, FileKind, LineEnds, StatusRule, TerminalUse,
    ToolVersion,
};
use crate::model::{Arity, Cases, Conditional, Joiner, KeptOptions, Subject, ValueType};

const TYPES: [(&str, ValueType); 8] = [
    ("string", ValueType::Text),
    ("input_file", ValueType::File(FileKind::InputFile)),
    ("input_dir", ValueType::File(FileKind::InputDir)),
    ("output_file", ValueType::File(FileKind::OutputFile)),
    ("output_dir", ValueType::File(FileKind::OutputDir)),
    ("new_dir", ValueType::File(FileKind::NewDir)),
    ("inout_file", ValueType::File(FileKind::InoutFile)),
    ("list_file", ValueType::File(FileKind::ListFile)),
];

const AGGREGATORS: [(&str, Joiner); 5] = [
    ("none", Joiner::Concatenation),
    ("same", Joiner::Same),
    ("sum", Joiner::Sum),
    ("uniq_count", Joiner::UniqCount),
    ("wc_total", Joiner::WcTotal),
];

const ATTRIBUTES: [(&str, FileAttribute); 12] = [
    ("owner", FileAttribute::Owner),
    ("inode", FileAttribute::Inode),
    ("links", FileAttribute::Links),
    ("blocks", FileAttribute::Blocks),
    ("device", FileAttribute::Device),
    ("times", FileAttribute::Times),
    ("mode", FileAttribute::Mode),
    ("dir_size", FileAttribute::DirSize),
    ("order", FileAttribute::Order),
    ("access_time", FileAttribute::AccessTime),
    ("copied_owner", FileAttribute::CopiedOwner),
    ("symlinks", FileAttribute::Symlinks),
];

impl Compiler<'_> {
    /// A word that is not empty.
    pub(super) fn word(&mut self, node: &YamlNode, what: &str) -> Option<String> {
        match node.text() {
            Some(text) => Some(text.to_owned()),
            None => {
                let hint = if matches!(node.content, NodeContent::Null) {
                    " (quote null if it is meant as a word)"
                } else {
                    ""
                };
                self.faults
                    .add(node.place, format!("{what} is needed here, not {}{hint}", node.kind()));
                None
            }
        }
    }

    /// One word or a list of words.
    pub(super) fn words(&mut self, node: &YamlNode, what: &str) -> Vec<String> {
        self.placed_words(node, what).into_iter().map(|(word, _)| word).collect()
    }

    pub(super) fn placed_words(
        &mut self,
        node: &YamlNode,
        what: &str,
    ) -> Vec<(String, SourcePosition)> {
        let nodes = match &node.content {
            NodeContent::List(items) => items.as_slice(),
            _ => std::slice::from_ref(node),
        };
        nodes.iter().filter_map(|node| Some((self.word(node, what)?, node.place))).collect()
    }

    /// A list of words, never a single one.
    pub(super) fn word_list(&mut self, node: &YamlNode, what: &str) -> Vec<String> {
        match &node.content {
            NodeContent::List(_) => self.words(node, what),
            _ => {
                self.faults.add(node.place, format!("a list is needed here, not {}", node.kind()));
                Vec::new()
            }
        }
    }

    pub(super) fn number(&mut self, node: &YamlNode) -> Option<usize> {
        let number = node.text().and_then(|text| text.parse().ok());
        if number.is_none() {
            self.faults.add(node.place, "a number is needed here");
        }
        number
    }

    /// Plain true or false.
    pub(super) fn flag(&mut self, node: Option<&YamlNode>) -> bool {
        match node.map(|node| (node.text(), node.place)) {
            None | Some((Some("false"), _)) => false,
            Some((Some("true"), _)) => true,
            Some((_, place)) => {
                self.faults.add(place, "true or false is needed here");
                false
            }
        }
    }

    /// One of a few words.
    pub(super) fn choice<T: Clone>(
        &mut self,
        node: &YamlNode,
        what: &str,
        choices: &[(&str, T)],
    ) -> Option<T> {
        let text = node.text().unwrap_or_default();
        if let Some((_, value)) = choices.iter().find(|(word, _)| *word == text) {
            return Some(value.clone());
        }
        let hint = match choices.iter().find(|(word, _)| alike(word, text)) {
            Some((word, _)) => format!("did you mean {word}?"),
            None => format!(
                "it is one of {}",
                choices.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", ")
            ),
        };
        let given = if text.is_empty() { node.kind() } else { text };
        self.faults.add(node.place, format!("unknown {what} {given}; {hint}"));
        None
    }

    pub(super) fn value_type(&mut self, node: &YamlNode) -> Option<ValueType> {
        self.choice(node, "type", &TYPES)
    }

    pub(super) fn size(&mut self, node: &YamlNode) -> Arity {
        let text = node.text().unwrap_or_default();
        let inside = |name: &str| text.strip_prefix(name)?.strip_prefix('(')?.strip_suffix(')');
        match text {
            "0" => return Arity::Nothing,
            "1" => return Arity::One,
            "optional" => return Arity::Optional,
            "list" => return Arity::List,
            _ => {}
        }
        if let Some(count) = inside("specific_size").and_then(|count| count.trim().parse().ok())
            && count > 0
        {
            return Arity::Exactly(count);
        }
        if let Some(ends) = inside("until") {
            let ends = ends.split(',').map(|end| end.trim().trim_matches(['"', '\'']).to_owned());
            return Arity::Until(ends.collect());
        }
        self.faults.add(
            node.place,
            format!("bad size {text}; it is 1, optional, specific_size(n) or list"),
        );
        Arity::One
    }

    pub(super) fn current_dir(&mut self, node: &YamlNode) -> Cases<CurrentDir> {
        let choices = [
            ("reads", CurrentDir::Reads),
            ("true", CurrentDir::Reads),
            ("writes", CurrentDir::Writes),
            ("false", CurrentDir::Unused),
        ];
        self.cases(node, &mut |compiler, node| {
            compiler.choice(node, "use of the current directory", &choices)
        })
    }

    pub(super) fn weight(&mut self, node: &YamlNode) -> Cases<f64> {
        self.cases(node, &mut |compiler, node| match node.text() {
            Some("true") => Some(0.5),
            Some("false") => Some(1.0),
            other => {
                let weight = other
                    .and_then(|text| text.parse().ok())
                    .filter(|weight: &f64| weight.is_finite() && *weight >= 0.0);
                if weight.is_none() {
                    compiler
                        .faults
                        .add(node.place, "filters_input is true, false or a number from 0");
                }
                weight
            }
        })
    }

    pub(super) fn status(&mut self, node: &YamlNode) -> Cases<StatusRule> {
        let choices = [("maximum", StatusRule::Maximum), ("grep", StatusRule::Grep)];
        self.cases(node, &mut |compiler, node| compiler.choice(node, "status rule", &choices))
    }

    pub(super) fn line_ends(&mut self, node: &YamlNode) -> Cases<LineEnds> {
        let choices = [
            ("unknown", LineEnds::Unknown),
            ("as_input", LineEnds::AsInput),
            ("always", LineEnds::Always),
        ];
        self.cases(node, &mut |compiler, node| compiler.choice(node, "end of lines", &choices))
    }

    pub(super) fn terminal(&mut self, node: &YamlNode) -> Cases<TerminalUse> {
        let choices = [
            ("plain", TerminalUse::Plain),
            ("output", TerminalUse::Output),
            ("interactive", TerminalUse::Interactive),
        ];
        self.cases(node, &mut |compiler, node| compiler.choice(node, "use of a terminal", &choices))
    }

    pub(super) fn tool_version(&mut self, node: &YamlNode) -> Cases<ToolVersion> {
        let choices = [
            ("same", ToolVersion::Same),
            ("compatible", ToolVersion::Compatible),
            ("any", ToolVersion::Any),
        ];
        self.cases(node, &mut |compiler, node| compiler.choice(node, "version policy", &choices))
    }

    pub(super) fn aggregator(&mut self, node: &YamlNode) -> Cases<Joiner> {
        self.cases(node, &mut |compiler, node| match node.text() {
            Some(_) => compiler.choice(node, "aggregator", &AGGREGATORS),
            None => compiler.joining_command(node),
        })
    }

    pub(super) fn behind_merge(&mut self, node: &YamlNode) -> Cases<BehindMerge> {
        let choices = [("same", BehindMerge::Same), ("counted", BehindMerge::Counted)];
        self.cases(node, &mut |compiler, node| {
            compiler.choice(node, "way behind a merge", &choices)
        })
    }

    fn joining_command(&mut self, node: &YamlNode) -> Option<Joiner> {
        let mut fields = Fields::of(node, "an aggregator", self.faults)?;
        let words = fields
            .take("command")
            .map(|node| self.word_list(node, "a word of the command"))
            .unwrap_or_default();
        if words.is_empty() {
            self.faults.add(node.place, "an aggregator has a command");
        }
        let keep = match fields.take("keep") {
            None => KeptOptions::Nothing,
            Some(keep) if keep.text() == Some("options") => KeptOptions::Options,
            Some(keep) => KeptOptions::Only(self.option_numbers(keep)),
        };
        let drops = fields.take("drops").map(|node| self.option_numbers(node)).unwrap_or_default();
        fields.finish(self.faults);
        Some(Joiner::Merge { words, keep, drops })
    }

    fn option_numbers(&mut self, node: &YamlNode) -> Vec<usize> {
        let mut numbers = Vec::new();
        for (name, place) in self.placed_words(node, "a flag") {
            match self.subject(&name, place) {
                Some(Subject::Option(number)) => numbers.push(number),
                Some(Subject::Param(_)) => {
                    self.faults.add(place, format!("{name} is an operand, not a flag"))
                }
                None => {}
            }
        }
        numbers
    }

    /// A list whose items are plain, or mappings with `is` and a guard.
    pub(super) fn mixed_list<T>(
        &mut self,
        node: &YamlNode,
        parse: &mut dyn FnMut(&mut Self, &YamlNode) -> Option<T>,
    ) -> Vec<Conditional<T>> {
        let NodeContent::List(items) = &node.content else {
            self.faults.add(node.place, format!("a list is needed here, not {}", node.kind()));
            return Vec::new();
        };
        items.iter().flat_map(|item| self.cases(item, parse).0).collect()
    }

    pub(super) fn attribute(&mut self, node: &YamlNode) -> Option<FileAttribute> {
        self.choice(node, "file attribute", &ATTRIBUTES)
    }
}
