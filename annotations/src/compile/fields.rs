//! The keys of one mapping, taken one by one; what nobody took is a fault.

use crate::diagnostic::Faults;
use crate::document::{NodeContent, SourcePosition, YamlNode};

/// A key and its value.
pub(super) type KeyValue = (YamlNode, YamlNode);

/// The mapping being read.
pub(super) struct Fields<'n> {
    pub place: SourcePosition,
    entries: Vec<Field<'n>>,
    asked: Vec<&'static str>,
}

struct Field<'n> {
    key: &'n str,
    place: SourcePosition,
    value: &'n YamlNode,
    taken: bool,
}

impl<'n> Fields<'n> {
    /// `what` names the mapping in the fault when it is none.
    pub fn of(node: &'n YamlNode, what: &str, faults: &mut Faults) -> Option<Self> {
        match &node.content {
            NodeContent::Map(entries) => Some(Self::new(node.place, entries, faults)),
            _ => {
                faults.add(node.place, format!("{what} is a mapping, not {}", node.kind()));
                None
            }
        }
    }

    /// Reports keys that are no words, or given twice.
    pub fn new(place: SourcePosition, entries: &'n [KeyValue], faults: &mut Faults) -> Self {
        let mut fields = Self { place, entries: Vec::new(), asked: Vec::new() };
        for (key, value) in entries {
            match key.text() {
                None => faults.add(key.place, format!("a key is a word, not {}", key.kind())),
                Some(text) if fields.has(text) => {
                    faults.add(key.place, format!("{text} is given twice"))
                }
                Some(text) => {
                    fields.entries.push(Field { key: text, place: key.place, value, taken: false })
                }
            }
        }
        fields
    }

    pub fn has(&self, key: &str) -> bool {
        self.entries.iter().any(|field| field.key == key)
    }

    pub fn take(&mut self, key: &'static str) -> Option<&'n YamlNode> {
        self.asked.push(key);
        let field = self.entries.iter_mut().find(|field| field.key == key)?;
        field.taken = true;
        Some(field.value)
    }

    /// The place of a key that was given, else of the mapping.
    pub fn place_of(&self, key: &str) -> SourcePosition {
        self.entries.iter().find(|field| field.key == key).map_or(self.place, |field| field.place)
    }

    /// Reports the keys that were not taken.
    pub fn finish(self, faults: &mut Faults) {
        for field in self.entries.iter().filter(|field| !field.taken) {
            let near = self.asked.iter().find(|asked| alike(asked, field.key));
            let hint = near.map_or_else(String::new, |near| format!("; did you mean {near}?"));
            faults.add(field.place, format!("unknown key {}{hint}", field.key));
        }
    }
}

/// Returns true if one word may be a typo of the other: at most two letters apart, for words of
/// four letters or more.
pub(super) fn alike(a: &str, b: &str) -> bool {
    let plain = |text: &str| text.to_ascii_lowercase().replace('-', "_");
    let (a, b) = (plain(a), plain(b));
    a == b || (a.len().min(b.len()) > 3 && distance(a.as_bytes(), b.as_bytes()) <= 2)
}

/// Levenshtein's distance.
fn distance(a: &[u8], b: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
