//! Reasons for running locally: a sentence and its kind.

use super::Compiler;
use super::fields::Fields;
use crate::document::{NodeContent, YamlNode};
use crate::invocation::Because;
use crate::model::{Conditional, Reason};

const KINDS: [(&str, Because); 3] = [
    ("cheap_through_mount", Because::CheapThroughMount),
    ("asks", Because::Asks),
    ("mount_differs", Because::MountDiffers),
];

impl Compiler<'_> {
    /// Of a flag: the sentence alone, or a mapping with `reason` and `because`.
    pub(super) fn reason(&mut self, node: &YamlNode) -> Option<Reason> {
        if !matches!(node.content, NodeContent::Map(_)) {
            return self
                .word(node, "a reason")
                .map(|text| Reason { text, because: Because::Exactness });
        }
        let mut fields = Fields::of(node, "a reason", self.faults)?;
        let reason = self.reason_of(&mut fields);
        fields.finish(self.faults);
        reason
    }

    /// Of an annotation: a list of mappings, each with a condition.
    pub(super) fn reasons(&mut self, node: &YamlNode) -> Vec<Conditional<Reason>> {
        let NodeContent::List(items) = &node.content else {
            self.faults.add(node.place, format!("a list is needed here, not {}", node.kind()));
            return Vec::new();
        };
        items.iter().filter_map(|item| self.conditional_reason(item)).collect()
    }

    fn conditional_reason(&mut self, node: &YamlNode) -> Option<Conditional<Reason>> {
        let mut fields = Fields::of(node, "a case", self.faults)?;
        let when = self.guard(&mut fields);
        let reason = self.reason_of(&mut fields);
        fields.finish(self.faults);
        Some(Conditional { when, is: reason? })
    }

    fn reason_of(&mut self, fields: &mut Fields<'_>) -> Option<Reason> {
        let text = fields.take("reason");
        if text.is_none() {
            self.faults.add(fields.place, "reason is missing");
        }
        let because =
            fields.take("because").map(|node| self.choice(node, "kind of reason", &KINDS));
        Some(Reason {
            text: self.word(text?, "a reason")?,
            because: because.unwrap_or(Some(Because::Exactness))?,
        })
    }
}
