//! Guards: tests on files that the executor makes before it starts a command.

use super::Compiler;
use super::fields::Fields;
use crate::document::{NodeContent, YamlNode};
use crate::invocation::{Guard, GuardTest};
use crate::model::Conditional;
use crate::settings::Setting;

impl Compiler<'_> {
    pub(super) fn guards(&mut self, node: &YamlNode) -> Vec<Conditional<Guard>> {
        let NodeContent::List(items) = &node.content else {
            self.faults.add(node.place, format!("a list is needed here, not {}", node.kind()));
            return Vec::new();
        };
        items.iter().filter_map(|item| self.guard_on_files(item)).collect()
    }

    fn guard_on_files(&mut self, node: &YamlNode) -> Option<Conditional<Guard>> {
        let mut fields = Fields::of(node, "a guard", self.faults)?;
        let when = self.guard(&mut fields);
        let below = fields.take("below").and_then(|node| self.word(node, "a directory's name"));
        if below.as_ref().is_some_and(|name| name.is_empty() || name.contains('/')) {
            self.faults
                .add(fields.place_of("below"), "below is the name of a directory, without slashes");
        }
        let tested = self.tested_files(&mut fields);
        let reason = fields.take("reason").and_then(|node| self.word(node, "a reason"));
        if reason.is_none() {
            self.faults.add(fields.place, "a guard has a reason");
        }
        fields.finish(self.faults);
        let (files, test) = tested?;
        Some(Conditional { when, is: Guard { below, files, test, reason: reason? } })
    }

    /// The one test of a guard, and the files that it is made on.
    fn tested_files(&mut self, fields: &mut Fields<'_>) -> Option<(Vec<String>, GuardTest)> {
        let plain = [
            ("exists", GuardTest::Exists),
            ("executable", GuardTest::Executable),
            ("all_exist", GuardTest::AllExist),
        ];
        let mut found = Vec::new();
        for (key, test) in plain {
            found.extend(fields.take(key).map(|node| (self.words(node, "a file"), test)));
        }
        if let Some(files) = fields.take("settings").map(|node| self.words(node, "a file")) {
            found.extend(self.allowed(fields).map(|test| (files.clone(), test)));
            let required = fields.take("required").map(|node| self.words(node, "a setting"));
            found.extend(required.map(|patterns| (files, GuardTest::SettingRequired(patterns))));
        }
        if found.len() == 1 {
            return found.pop();
        }
        let wanted = "a guard has one of exists, executable, all_exist and settings, and settings \
                      one of allowed and required";
        self.faults.add(fields.place, wanted);
        None
    }

    /// `allowed` and `withheld`.
    fn allowed(&mut self, fields: &mut Fields<'_>) -> Option<GuardTest> {
        let withheld = fields.take("withheld");
        let Some(allowed) = fields.take("allowed").map(|node| self.words(node, "a setting")) else {
            if withheld.is_some() {
                self.faults.add(fields.place_of("withheld"), "withheld without allowed");
            }
            return None;
        };
        let withheld =
            withheld.map(|node| self.placed_words(node, "a setting")).unwrap_or_default();
        for (pattern, place) in &withheld {
            if let Some(other) = allowed.iter().find(|other| is_hidden(pattern, other)) {
                self.faults
                    .add(*place, format!("{pattern} would be sent, since {other} is allowed"));
            }
        }
        let withheld = withheld.into_iter().map(|(pattern, _)| pattern).collect();
        Some(GuardTest::SettingsAllowed { allowed, withheld })
    }
}

/// Tells if all settings of `pattern` match `other` too.
fn is_hidden(pattern: &str, other: &str) -> bool {
    let (name, value) = match pattern.split_once('=') {
        Some((name, value)) => (name, Some(value.into())),
        None => (pattern, None),
    };
    Setting { name: name.into(), value, depends_on_version: false }.is_like(other)
}
