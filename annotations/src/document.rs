//! A YAML document as a tree that keeps what serde's own value type loses: the
//! order of keys, keys given twice, and, on demand, the place of every node.
//! Knows nothing of the annotation language.

use std::fmt;

use saphyr_parser::{Event, Parser, Span};
use serde::de::{self, Deserialize, Deserializer, EnumAccess, MapAccess, SeqAccess, Visitor};

/// A place in a file: line and column, both from 1. `Place::default()` (0, 0) is
/// "not looked for".
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// From 1.
    pub line: usize,
    /// In characters, from 1.
    pub column: usize,
}

/// One node of the document.
#[derive(Debug, Clone)]
pub struct Node {
    /// Where it begins.
    pub place: Place,
    /// What it is.
    pub content: Content,
}

/// What a node is. Numbers and booleans are text: the language's keywords decide
/// what a word means, not YAML's guess.
#[derive(Debug, Clone)]
pub enum Content {
    /// Nothing, `null` or `~`.
    Null,
    /// A word, number or text.
    Text(String),
    /// `- a` or `[a]`
    List(Vec<Node>),
    /// `a: b` or `{a: b}`, in the order of the file, doubles included.
    Map(Vec<(Node, Node)>),
}

/// A document that is not YAML.
#[derive(Debug)]
pub struct SyntaxFault {
    pub place: Place,
    pub message: String,
}

/// Reads the one document of `text`, without places.
pub fn read(text: &str) -> Result<Node, SyntaxFault> {
    serde_yaml::from_str(text).map_err(|error| {
        let place = error.location().map_or(Place { line: 1, column: 1 }, |location| Place {
            line: location.line(),
            column: location.column(),
        });
        // The library appends the place to its message; ours goes in front of it.
        let message = error.to_string();
        let message = message.split(" at line ").next().unwrap_or_default().to_owned();
        SyntaxFault { place, message }
    })
}

/// Fills in the places of `node`, which [`read`] made from the same `text`.
pub fn locate(node: &mut Node, text: &str) {
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
fn fill(node: &mut Node, events: &mut Events<'_>, opening: &Event<'_>, span: Span) {
    let place = Place { line: span.start.line(), column: span.start.col() + 1 };
    // What an alias repeats is reported where it is repeated.
    if matches!(opening, Event::Alias(_)) {
        return fill_all(node, place);
    }
    node.place = place;
    match &mut node.content {
        Content::Null | Content::Text(_) => {}
        Content::List(items) => {
            items.iter_mut().for_each(|item| fill_next(item, events));
            events.next();
        }
        Content::Map(entries) => {
            for (key, value) in entries {
                fill_next(key, events);
                fill_next(value, events);
            }
            events.next();
        }
    }
}

fn fill_next(node: &mut Node, events: &mut Events<'_>) {
    if let Some(Ok((event, span))) = events.next() {
        fill(node, events, &event, span);
    }
}

fn fill_all(node: &mut Node, place: Place) {
    node.place = place;
    match &mut node.content {
        Content::Null | Content::Text(_) => {}
        Content::List(items) => items.iter_mut().for_each(|item| fill_all(item, place)),
        Content::Map(entries) => {
            for (key, value) in entries {
                fill_all(key, place);
                fill_all(value, place);
            }
        }
    }
}

impl Node {
    /// The text of a scalar.
    pub fn text(&self) -> Option<&str> {
        match &self.content {
            Content::Text(text) => Some(text),
            _ => None,
        }
    }

    /// What to call it in a message.
    pub fn kind(&self) -> &'static str {
        match self.content {
            Content::Null => "nothing",
            Content::Text(_) => "a word",
            Content::List(_) => "a list",
            Content::Map(_) => "a mapping",
        }
    }

    fn new(content: Content) -> Self {
        Self { place: Place::default(), content }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl NodeVisitor {
    fn text<E>(value: impl ToString) -> Result<Node, E> {
        Ok(Node::new(Content::Text(value.to_string())))
    }
}

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a word, a list or a mapping")
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Node, E> {
        Self::text(value)
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Node, E> {
        Self::text(value)
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Node, E> {
        Self::text(value)
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Node, E> {
        Self::text(value)
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Node, E> {
        Self::text(value)
    }

    fn visit_unit<E: de::Error>(self) -> Result<Node, E> {
        Ok(Node::new(Content::Null))
    }

    fn visit_none<E: de::Error>(self) -> Result<Node, E> {
        self.visit_unit()
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            items.push(item);
        }
        Ok(Node::new(Content::List(items)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Node::new(Content::Map(entries)))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, _tagged: A) -> Result<Node, A::Error> {
        Err(de::Error::custom("tags such as !name have no meaning here"))
    }
}
