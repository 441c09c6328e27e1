//! A YAML document as a tree that keeps what serde's own value type loses: the
//! order of keys, keys given twice, and, on demand, the place of every node.
//! Knows nothing of the annotation language.

use std::cell::Cell;
use std::fmt;

use saphyr_parser::{Event, Parser, Span};
use serde::de::{self, DeserializeSeed, Deserializer, EnumAccess, MapAccess, SeqAccess, Visitor};

/// A place in a file: line and column, both from 1. `SourcePosition::default()` (0, 0) is
/// "not looked for".
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourcePosition {
    /// From 1.
    pub line: usize,
    /// In characters, from 1.
    pub column: usize,
}

/// One node of the document.
#[derive(Debug, Clone)]
pub struct YamlNode {
    /// Place of its first character.
    pub place: SourcePosition,
    /// Kind and value.
    pub content: NodeContent,
}

/// Kind and value of a node. Numbers and booleans are text: the annotation language's keywords
/// decide a word's meaning, not YAML's type inference.
#[derive(Debug, Clone)]
pub enum NodeContent {
    /// Nothing, `null` or `~`.
    Null,
    /// A word, number or text.
    Text(String),
    /// `- a` or `[a]`
    List(Vec<YamlNode>),
    /// `a: b` or `{a: b}`, in the order of the file, doubles included.
    Map(Vec<(YamlNode, YamlNode)>),
}

/// A document that is not YAML.
#[derive(Debug)]
pub struct SyntaxFault {
    pub place: SourcePosition,
    pub message: String,
}

/// Brackets within brackets: annotations have eight. For each token the parsers look at all that
/// are open.
const MOST_BRACKETS: usize = 128;
/// Bytes charged for a node besides its text.
const NODE_BYTES: usize = 64;
/// All nodes together, some twenty times the largest file: an alias repeats what it names, and that
/// may be aliases.
const MOST_BYTES: usize = 32 << 20;

/// Reads the one document of `text`, without places.
///
/// Invariant: it takes time and memory in proportion to the text, or is refused.
pub fn read(text: &str) -> Result<YamlNode, SyntaxFault> {
    if let Some(place) = too_deep(text) {
        let message = format!("more than {MOST_BRACKETS} brackets are open");
        return Err(SyntaxFault { place, message });
    }
    let left = Cell::new(MOST_BYTES);
    let read = Maker { left: &left }.deserialize(serde_yaml::Deserializer::from_str(text));
    read.map_err(|error| {
        let place = error.location().map_or(SourcePosition { line: 1, column: 1 }, |location| {
            SourcePosition { line: location.line(), column: location.column() }
        });
        // The library appends the place to its message; ours goes in front of it.
        let message = error.to_string();
        let message = message.split(" at line ").next().unwrap_or_default().to_owned();
        SyntaxFault { place, message }
    })
}

/// Place of the bracket that opens one too many; brackets in words count too.
fn too_deep(text: &str) -> Option<SourcePosition> {
    let mut open = 0_usize;
    for (line, content) in text.lines().enumerate() {
        for (column, character) in content.chars().enumerate() {
            match character {
                '[' | '{' => open += 1,
                ']' | '}' => open = open.saturating_sub(1),
                _ => {}
            }
            if open > MOST_BRACKETS {
                return Some(SourcePosition { line: line + 1, column: column + 1 });
            }
        }
    }
    None
}

/// Fills in the places of `node`, which [`read`] made from the same `text`.
pub fn locate(node: &mut YamlNode, text: &str) {
    let mut events = Parser::new_from_str(text);
    while let Some(Ok((event, span))) = events.next() {
        if !matches!(event, Event::StreamStart | Event::DocumentStart(_) | Event::Nothing) {
            fill(node, &mut events, &event, span);
            return;
        }
    }
}

type Events<'a> = Parser<'a, saphyr_parser::StrInput<'a>>;

/// Gives `node` the place of the event that opens it, and its children theirs.
fn fill(node: &mut YamlNode, events: &mut Events<'_>, opening: &Event<'_>, span: Span) {
    let place = SourcePosition { line: span.start.line(), column: span.start.col() + 1 };
    // What an alias repeats is reported where it is repeated.
    if matches!(opening, Event::Alias(_)) {
        return fill_all(node, place);
    }
    node.place = place;
    match &mut node.content {
        NodeContent::Null | NodeContent::Text(_) => {}
        NodeContent::List(items) => {
            items.iter_mut().for_each(|item| fill_next(item, events));
            events.next();
        }
        NodeContent::Map(entries) => {
            for (key, value) in entries {
                fill_next(key, events);
                fill_next(value, events);
            }
            events.next();
        }
    }
}

fn fill_next(node: &mut YamlNode, events: &mut Events<'_>) {
    if let Some(Ok((event, span))) = events.next() {
        fill(node, events, &event, span);
    }
}

fn fill_all(node: &mut YamlNode, place: SourcePosition) {
    node.place = place;
    match &mut node.content {
        NodeContent::Null | NodeContent::Text(_) => {}
        NodeContent::List(items) => items.iter_mut().for_each(|item| fill_all(item, place)),
        NodeContent::Map(entries) => {
            for (key, value) in entries {
                fill_all(key, place);
                fill_all(value, place);
            }
        }
    }
}

impl YamlNode {
    /// The text of a scalar.
    pub fn text(&self) -> Option<&str> {
        match &self.content {
            NodeContent::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Name of this kind of node in a message.
    pub fn kind(&self) -> &'static str {
        match self.content {
            NodeContent::Null => "nothing",
            NodeContent::Text(_) => "a word",
            NodeContent::List(_) => "a list",
            NodeContent::Map(_) => "a mapping",
        }
    }

    fn new(content: NodeContent) -> Self {
        Self { place: SourcePosition::default(), content }
    }
}

/// Makes nodes as long as there is room for them.
#[derive(Clone, Copy)]
struct Maker<'a> {
    left: &'a Cell<usize>,
}

impl Maker<'_> {
    fn text<E: de::Error>(self, value: &str) -> Result<YamlNode, E> {
        self.make(value.len())?;
        Ok(YamlNode::new(NodeContent::Text(value.to_owned())))
    }

    fn make<E: de::Error>(self, bytes: usize) -> Result<(), E> {
        let left = self.left.get().checked_sub(NODE_BYTES + bytes);
        self.left.set(left.ok_or_else(|| E::custom("its aliases repeat too much"))?);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for Maker<'_> {
    type Value = YamlNode;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<YamlNode, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Maker<'_> {
    type Value = YamlNode;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a word, a list or a mapping")
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<YamlNode, E> {
        self.text(&value.to_string())
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<YamlNode, E> {
        self.text(&value.to_string())
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<YamlNode, E> {
        self.text(&value.to_string())
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<YamlNode, E> {
        self.text(&value.to_string())
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<YamlNode, E> {
        self.text(value)
    }

    fn visit_unit<E: de::Error>(self) -> Result<YamlNode, E> {
        self.make(0)?;
        Ok(YamlNode::new(NodeContent::Null))
    }

    fn visit_none<E: de::Error>(self) -> Result<YamlNode, E> {
        self.visit_unit()
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<YamlNode, A::Error> {
        self.make(0)?;
        let mut items = Vec::new();
        while let Some(item) = list.next_element_seed(self)? {
            items.push(item);
        }
        Ok(YamlNode::new(NodeContent::List(items)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<YamlNode, A::Error> {
        self.make(0)?;
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry_seed(self, self)? {
            entries.push(entry);
        }
        Ok(YamlNode::new(NodeContent::Map(entries)))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, _tagged: A) -> Result<YamlNode, A::Error> {
        Err(de::Error::custom("tags such as !name have no meaning here"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_take_long_is_refused() {
        let fault =
            |text: &str| read(text).map(|_| ()).map_err(|fault| (fault.place.line, fault.message));
        let deep = format!("a: 1\n{}", "[".repeat(20_000));
        assert_eq!(fault(&deep), Err((2, "more than 128 brackets are open".to_owned())));
        assert_eq!(
            fault(&"{".repeat(20_000)),
            Err((1, "more than 128 brackets are open".to_owned()))
        );
        let closed = "[a, {b: c}], ".repeat(10_000);
        assert_eq!(fault(&format!("[{closed}]")), Ok(()));
        // Aliases of a long list, and of a long word.
        let many = |what: &str| format!("a: &a {what}\nb: [{}]\n", "*a, ".repeat(2_000));
        for what in [format!("[{}]", "x, ".repeat(2_000)), "x".repeat(20_000)] {
            let (_, message) = fault(&many(&what)).expect_err("it is too much");
            assert!(message.ends_with("its aliases repeat too much"), "{message}");
        }
        assert_eq!(fault(&many("[x]")), Ok(()));
    }
}
