//! Conditions, and keyword values that depend on them.

use super::Compiler;
use super::Depth;
use super::fields::Fields;
use crate::document::{NodeContent, SourcePosition, YamlNode};
use crate::model::{Cases, Condition, Conditional, Pattern, Subject, Test, Which};

impl Compiler<'_> {
    /// A condition in any of its forms.
    pub(super) fn condition(&mut self, node: &YamlNode) -> Condition {
        match &node.content {
            NodeContent::Text(text) if text == "true" => Condition::Always,
            NodeContent::Text(text) if text == "false" => Condition::Never,
            NodeContent::Text(text) => {
                self.subject(text, node.place).map_or(Condition::Never, Condition::Given)
            }
            NodeContent::List(items) => {
                Condition::Any(items.iter().map(|item| self.condition(item)).collect())
            }
            NodeContent::Map(_) => self.condition_mapping(node),
            NodeContent::Null => {
                self.faults.add(node.place, "a condition is missing here");
                Condition::Never
            }
        }
    }

    fn condition_mapping(&mut self, node: &YamlNode) -> Condition {
        let Some(mut fields) = Fields::of(node, "a condition", self.faults) else {
            return Condition::Never;
        };
        let condition = self.condition_form(&mut fields);
        fields.finish(self.faults);
        condition
    }

    fn condition_form(&mut self, fields: &mut Fields<'_>) -> Condition {
        if let Some(node) = fields.take("any") {
            return Condition::Any(self.conditions(node, "any"));
        }
        if let Some(node) = fields.take("all") {
            return Condition::All(self.conditions(node, "all"));
        }
        if let Some(node) = fields.take("not") {
            return Condition::Not(Box::new(self.condition(node)));
        }
        for (key, which) in [("value", Which::Some), ("every", Which::Every), ("last", Which::Last)]
        {
            if let Some(node) = fields.take(key) {
                let of = self.subjects(node);
                let test = self.test(fields);
                if test.is_none() {
                    self.faults
                        .add(fields.place, format!("{key} needs a test: is, matches or contains"));
                }
                return test.map_or(Condition::Never, |test| Condition::Value { which, of, test });
            }
        }
        self.other_form(fields)
    }

    fn other_form(&mut self, fields: &mut Fields<'_>) -> Condition {
        if let Some(node) = fields.take("count") {
            let of = self.subjects(node);
            if !fields.has("at_least") && !fields.has("at_most") {
                self.faults.add(fields.place, "count needs at_least or at_most");
            }
            let at_least = fields.take("at_least").and_then(|node| self.number(node)).unwrap_or(0);
            let at_most =
                fields.take("at_most").and_then(|node| self.number(node)).unwrap_or(usize::MAX);
            return Condition::Count { of, at_least, at_most };
        }
        if let Some(node) = fields.take("last_of") {
            return self.last_of(node, fields);
        }
        if let Some(node) = fields.take("environment") {
            let name = self.word(node, "a variable's name").unwrap_or_default();
            return Condition::Environment { name, test: self.test(fields) };
        }
        if fields.has("when") || fields.has("unless") {
            return self.guard(fields);
        }
        self.faults.add(
            fields.place,
            "a condition has one of any, all, not, when, unless, value, every, last, count, \
             last_of, environment",
        );
        Condition::Never
    }

    fn last_of(&mut self, node: &YamlNode, fields: &mut Fields<'_>) -> Condition {
        let options = |subjects: Vec<Subject>| -> Vec<usize> {
            subjects
                .into_iter()
                .filter_map(|subject| if let Subject::Option(i) = subject { Some(i) } else { None })
                .collect()
        };
        let of = options(self.subjects(node));
        let is = fields.take("is").map(|node| options(self.subjects(node))).unwrap_or_default();
        match is.as_slice() {
            [is] if of.contains(is) => Condition::LastOf { of, is: *is },
            _ => {
                self.faults.add(fields.place, "last_of needs is: one of its own options");
                Condition::Never
            }
        }
    }

    fn conditions(&mut self, node: &YamlNode, what: &str) -> Vec<Condition> {
        match &node.content {
            NodeContent::List(items) => items.iter().map(|item| self.condition(item)).collect(),
            _ => {
                self.faults.add(
                    node.place,
                    format!("{what} takes a list of conditions, not {}", node.kind()),
                );
                Vec::new()
            }
        }
    }

    /// `is`, `matches` or `contains`, if one is given.
    fn test(&mut self, fields: &mut Fields<'_>) -> Option<Test> {
        if let Some(node) = fields.take("is") {
            return Some(Test::Is(self.words(node, "a value")));
        }
        for (key, whole) in [("matches", true), ("contains", false)] {
            if let Some(node) = fields.take(key) {
                return Some(Test::Patterns(self.patterns(node, whole)));
            }
        }
        None
    }

    fn patterns(&mut self, node: &YamlNode, whole: bool) -> Vec<Pattern> {
        let sources = self.words(node, "a regular expression");
        let patterns: Vec<Pattern> =
            sources.iter().map(|source| Pattern::new(source, whole)).collect();
        match self.depth {
            Depth::Trusted => {}
            Depth::Ready => patterns.iter().for_each(Pattern::prepare),
            Depth::Full => {
                for (pattern, source) in patterns.iter().zip(&sources) {
                    if let Some(fault) = pattern.fault() {
                        self.faults
                            .add(node.place, format!("bad regular expression {source}: {fault}"));
                    }
                }
            }
        }
        patterns
    }

    fn subjects(&mut self, node: &YamlNode) -> Vec<Subject> {
        let mut subjects = Vec::new();
        for (name, place) in self.placed_words(node, "the name of an option or operand") {
            subjects.extend(self.subject(&name, place));
        }
        subjects
    }

    /// The option or operand that a name in a condition denotes; it must be declared.
    pub(super) fn subject(&mut self, name: &str, place: SourcePosition) -> Option<Subject> {
        let found = self.scope.find(name);
        match found {
            None if name.starts_with(['-', '+']) => {
                self.faults.add(
                    place,
                    format!(
                        "the condition names flag {name}, which this annotation does not declare"
                    ),
                );
            }
            None => {
                self.faults.add(
                    place,
                    format!(
                        "the condition names operand {name}, which this annotation does not declare"
                    ),
                );
            }
            Some(Subject::Param(_)) if self.options_only => {
                self.faults.add(
                    place,
                    format!(
                        "whether an operand exists can only depend on options, not on operand \
                         {name}"
                    ),
                );
            }
            Some(_) => {}
        }
        found
    }

    /// `when` and `unless` beside other keys; true if neither is there.
    pub(super) fn guard(&mut self, fields: &mut Fields<'_>) -> Condition {
        let when = fields.take("when").map(|node| self.condition(node));
        let unless =
            fields.take("unless").map(|node| Condition::Not(Box::new(self.condition(node))));
        match (when, unless) {
            (None, None) => Condition::Always,
            (Some(one), None) | (None, Some(one)) => one,
            (Some(when), Some(unless)) => Condition::All(vec![when, unless]),
        }
    }

    /// A plain value, one case, or a list of cases.
    pub(super) fn cases<T>(
        &mut self,
        node: &YamlNode,
        parse: &mut dyn FnMut(&mut Self, &YamlNode) -> Option<T>,
    ) -> Cases<T> {
        let is_case = |node: &YamlNode| match &node.content {
            NodeContent::Map(entries) => {
                entries.iter().any(|(key, _)| matches!(key.text(), Some("is" | "when" | "unless")))
            }
            _ => false,
        };
        match &node.content {
            NodeContent::List(items) => {
                Cases(items.iter().filter_map(|item| self.conditional(item, "is", parse)).collect())
            }
            _ if is_case(node) => Cases(self.conditional(node, "is", parse).into_iter().collect()),
            _ => Cases(
                parse(self, node)
                    .map(|is| Conditional { when: Condition::Always, is })
                    .into_iter()
                    .collect(),
            ),
        }
    }

    /// A mapping with `when`, `unless` and the value under `key`.
    pub(super) fn conditional<T>(
        &mut self,
        node: &YamlNode,
        key: &'static str,
        parse: &mut dyn FnMut(&mut Self, &YamlNode) -> Option<T>,
    ) -> Option<Conditional<T>> {
        let mut fields = Fields::of(node, "a case", self.faults)?;
        let when = self.guard(&mut fields);
        let value = fields.take(key);
        if value.is_none() {
            self.faults.add(node.place, format!("{key} is missing"));
        }
        fields.finish(self.faults);
        Some(Conditional { when, is: parse(self, value?)? })
    }
}
