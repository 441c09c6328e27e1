//! Guards: tests on files that the executor makes before it starts a command.

use super::Compiler;
use super::fields::Fields;
use crate::document::{Content, Node};
use crate::invocation::{Guard, GuardTest};
use crate::model::Conditional;

impl Compiler<'_> {
    pub(super) fn guards(&mut self, node: &Node) -> Vec<Conditional<Guard>> {
        let Content::List(items) = &node.content else {
            self.faults.add(node.place, format!("a list is needed here, not {}", node.kind()));
            return Vec::new();
        };
        items.iter().filter_map(|item| self.guard_on_files(item)).collect()
    }

    fn guard_on_files(&mut self, node: &Node) -> Option<Conditional<Guard>> {
        let mut fields = Fields::of(node, "a guard", self.faults)?;
        let when = self.guard(&mut fields);
        let below = fields.take("below").and_then(|node| self.word(node, "a directory's name"));
        if below.as_ref().is_some_and(|name| name.is_empty() || name.contains('/')) {
            self.faults.add(fields.place_of("below"), "below is the name of a directory, without slashes");
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
        let plain =
            [("exists", GuardTest::Exists), ("executable", GuardTest::Executable), ("all_exist", GuardTest::AllExist)];
        let mut found = Vec::new();
        for (key, test) in plain {
            found.extend(fields.take(key).map(|node| (self.words(node, "a file"), test)));
        }
        if let Some(files) = fields.take("settings").map(|node| self.words(node, "a file")) {
            let mut settings = |key| fields.take(key).map(|node| self.words(node, "a setting"));
            let tests = [
                settings("allowed").map(GuardTest::SettingsAllowed),
                settings("required").map(GuardTest::SettingRequired),
            ];
            found.extend(tests.into_iter().flatten().map(|test| (files.clone(), test)));
        }
        if found.len() == 1 {
            return found.pop();
        }
        let wanted = "a guard has one of exists, executable, all_exist and settings, and settings one of allowed and \
                      required";
        self.faults.add(fields.place, wanted);
        None
    }
}
