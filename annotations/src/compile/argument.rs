//! FLAGS, OPTPARAMS, PARAMS and EXPRESSION.

use super::Compiler;
use super::fields::{Fields, KeyValue};
use super::scope::{find, items};
use crate::document::{NodeContent, YamlNode};
use crate::invocation::FileKind;
use crate::model::{
    Arity, Cases, ChangesDir, Condition, Dash, Numeric, Opt, Param, ValueRule, ValueType,
};

/// The list that an option stands in.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OptionList {
    Flags,
    OptParams,
    Expression,
}

impl Compiler<'_> {
    /// All options, in the order in which [`super::scope::NameScope`] numbers them.
    pub(super) fn options(&mut self, entries: &[KeyValue]) -> Vec<Opt> {
        let mut options = Vec::new();
        for (list, place) in [
            ("FLAGS", OptionList::Flags),
            ("OPTPARAMS", OptionList::OptParams),
            ("EXPRESSION", OptionList::Expression),
        ] {
            self.expect_list(entries, list);
            for item in items(entries, list) {
                options.push(self.option(item, place));
            }
        }
        options
    }

    fn expect_list(&mut self, entries: &[KeyValue], key: &str) {
        if let Some(node) = find(entries, key)
            && !matches!(node.content, NodeContent::List(_))
        {
            self.faults.add(node.place, format!("{key} is a list, not {}", node.kind()));
        }
    }

    fn option(&mut self, node: &YamlNode, list: OptionList) -> Opt {
        let mut option = empty_option(list);
        let Some(mut fields) = Fields::of(node, "an option", self.faults) else { return option };
        self.names(&mut fields, &mut option, list);
        option.stays_here = fields.take("stays_here").and_then(|node| self.reason(node));
        if list != OptionList::Flags {
            option.size = match fields.take("size") {
                Some(size) => self.size(size),
                None if list == OptionList::Expression => Arity::Nothing,
                None => Arity::One,
            };
            option.value = self.value_rule(&mut fields, &option.size);
        }
        if list == OptionList::OptParams {
            self.only_with_value(&mut fields, &mut option);
        }
        if matches!(option.size, Arity::Until(_)) && list != OptionList::Expression {
            self.faults.add(fields.place_of("size"), "the size until(...) is for EXPRESSION");
        }
        fields.finish(self.faults);
        option
    }

    fn names(&mut self, fields: &mut Fields<'_>, option: &mut Opt, list: OptionList) {
        if list != OptionList::Expression {
            if let Some(node) = fields.take("short") {
                for (name, place) in self.placed_words(node, "a character") {
                    match name.as_bytes() {
                        [character] if character.is_ascii_graphic() && *character != b'-' => {
                            option.short.push(*character)
                        }
                        _ => self.faults.add(
                            place,
                            format!("short is one character, not {name}; see long and word"),
                        ),
                    }
                }
            }
            if let Some(node) = fields.take("long") {
                for (name, place) in self.placed_words(node, "a name") {
                    // Tools have options for their own tests with a third dash
                    // (`---disable-inotify`): that one is of the name.
                    let plain = name.strip_prefix('-').unwrap_or(&name);
                    if plain.starts_with('-') || plain.contains('=') || plain.is_empty() {
                        self.faults
                            .add(place, format!("long is a name without dashes, not {name}"));
                    }
                    option.long.push(name);
                }
            }
        }
        if let Some(node) = fields.take("word") {
            option.words = self.words(node, "a word");
        }
        let named = !(option.short.is_empty() && option.long.is_empty() && option.words.is_empty());
        if !named
            && !fields.has("numeric")
            && !["short", "long", "word"].iter().any(|key| fields.has(key))
        {
            let wanted =
                if list == OptionList::Expression { "a word" } else { "a short, a long or a word" };
            self.faults.add(fields.place, format!("an option has {wanted}"));
        }
    }

    fn only_with_value(&mut self, fields: &mut Fields<'_>, option: &mut Opt) {
        let forms = [("first", Numeric::First), ("anywhere", Numeric::Anywhere)];
        option.numeric =
            fields.take("numeric").and_then(|node| self.choice(node, "form of numeric", &forms));
        let reach = [("operands", ChangesDir::Operands), ("everything", ChangesDir::Everything)];
        option.changes_dir = fields
            .take("changes_dir")
            .and_then(|node| self.choice(node, "reach of changes_dir", &reach));
        let is_dir = |value: &ValueType| {
            matches!(value, ValueType::File(FileKind::InputDir | FileKind::OutputDir))
        };
        if option.changes_dir.is_some()
            && !option.value.types.iter().all(|types| all(types, is_dir))
        {
            self.faults.add(
                fields.place_of("changes_dir"),
                "changes_dir needs the type input_dir or output_dir",
            );
        }
        if option.size == Arity::Nothing {
            self.faults
                .add(fields.place_of("size"), "an option without a value belongs under FLAGS");
        }
    }

    /// The keys that say what a value is.
    fn value_rule(&mut self, fields: &mut Fields<'_>, size: &Arity) -> ValueRule {
        let mut rule = ValueRule::default();
        match (fields.take("type"), fields.take("types")) {
            (Some(_), Some(_)) => {
                self.faults.add(fields.place_of("types"), "type and types exclude each other")
            }
            (Some(node), None) => rule.types = vec![self.cases(node, &mut Self::value_type)],
            (None, Some(node)) => rule.types = self.types(node, size),
            (None, None) => {}
        }
        if let Some(node) = fields.take("separator") {
            rule.separator = self.word(node, "a separator").filter(|text| !text.is_empty());
            if *size != Arity::List {
                self.faults.add(fields.place_of("separator"), "a separator needs size: list");
            }
        }
        if let Some(node) = fields.take("values") {
            rule.allowed = self.words(node, "a value");
        }
        let dashes = [("file", Dash::File), ("stdin", Dash::Stdin), ("stdout", Dash::Stdout)];
        rule.dash = fields.take("dash").and_then(|node| self.choice(node, "meaning of -", &dashes));
        if let Some(node) = fields.take("no_follow") {
            rule.no_follow = self.condition(node);
        }
        rule
    }

    fn types(&mut self, node: &YamlNode, size: &Arity) -> Vec<Cases<ValueType>> {
        let NodeContent::List(items) = &node.content else {
            self.faults.add(node.place, "types is a list with a type for each word; see type");
            return vec![Cases::default()];
        };
        if *size != Arity::Exactly(items.len()) {
            self.faults.add(
                node.place,
                format!("{} types need size: specific_size({})", items.len(), items.len()),
            );
        }
        items.iter().map(|item| self.cases(item, &mut Self::value_type)).collect()
    }

    /// All operands.
    pub(super) fn params(&mut self, entries: &[KeyValue]) -> Vec<Param> {
        self.expect_list(entries, "PARAMS");
        let params: Vec<Param> =
            items(entries, "PARAMS").iter().map(|item| self.param(item)).collect();
        for after_dashes in [false, true] {
            let mut lists = items(entries, "PARAMS").iter().zip(&params);
            let is_list = |(_, param): &(&YamlNode, &Param)| {
                param.size == Arity::List && param.after_dashes == after_dashes
            };
            if let Some((node, _)) = lists.by_ref().filter(is_list).nth(1)
                && !params.iter().any(|param| {
                    param.size == Arity::List && !matches!(param.exists, Condition::Always)
                })
            {
                self.faults
                    .add(node.place, "a second operand of size list; which words are whose?");
            }
        }
        let splittable =
            |(_, param): &(&YamlNode, &Param)| !matches!(param.splittable, Condition::Never);
        if let Some((node, _)) =
            items(entries, "PARAMS").iter().zip(&params).filter(splittable).nth(1)
        {
            self.faults.add(node.place, "a second splittable operand; at most one is");
        }
        params
    }

    fn param(&mut self, node: &YamlNode) -> Param {
        let mut param = empty_param();
        let Some(mut fields) = Fields::of(node, "an operand", self.faults) else { return param };
        param.name = fields.take("name").and_then(|node| self.word(node, "a name"));
        self.options_only = true;
        param.exists = self.guard(&mut fields);
        self.options_only = false;
        match fields.take("size") {
            Some(size) => param.size = self.size(size),
            None => self.faults.add(fields.place, "size is missing"),
        }
        if matches!(param.size, Arity::Nothing | Arity::Until(_)) {
            self.faults.add(
                fields.place_of("size"),
                "an operand's size is 1, optional, specific_size(n) or list",
            );
        }
        param.value = self.value_rule(&mut fields, &param.size);
        param.after_dashes = self.flag(fields.take("after_dashes"));
        if let Some(node) = fields.take("at_least") {
            param.at_least = self.number(node).unwrap_or(0);
            if param.size != Arity::List {
                self.faults.add(fields.place_of("at_least"), "at_least needs size: list");
            }
        }
        self.param_conditions(&mut fields, &mut param);
        fields.finish(self.faults);
        param
    }

    fn param_conditions(&mut self, fields: &mut Fields<'_>, param: &mut Param) {
        let mut condition =
            |key| fields.take(key).map_or(Condition::Never, |node| self.condition(node));
        param.splittable = condition("splittable");
        param.or_stdin = condition("or_stdin");
        param.or_current_dir = condition("or_current_dir");
        let is_file = |value: &ValueType| *value != ValueType::Text;
        let files = param.value.types.iter().all(|types| all(types, is_file));
        let can_be_split = files && param.size == Arity::List;
        if !can_be_split && !matches!(param.splittable, Condition::Never) {
            self.faults.add(
                fields.place_of("splittable"),
                "a splittable operand has a file type and size: list",
            );
        }
    }
}

/// Returns true if there is a case and every case passes.
fn all(types: &Cases<ValueType>, test: impl Fn(&ValueType) -> bool) -> bool {
    !types.0.is_empty() && types.0.iter().all(|case| test(&case.is))
}

fn empty_option(list: OptionList) -> Opt {
    Opt {
        short: Vec::new(),
        long: Vec::new(),
        words: Vec::new(),
        in_expression: list == OptionList::Expression,
        size: Arity::Nothing,
        numeric: None,
        value: ValueRule::default(),
        changes_dir: None,
        stays_here: None,
    }
}

fn empty_param() -> Param {
    Param {
        name: None,
        exists: Condition::Always,
        size: Arity::One,
        at_least: 0,
        value: ValueRule::default(),
        splittable: Condition::Never,
        or_stdin: Condition::Never,
        or_current_dir: Condition::Never,
        after_dashes: false,
    }
}
