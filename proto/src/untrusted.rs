//! Escapes text of other origin, such as a server's error message or a file's name, for a terminal,
//! a log or a report. Characters that could move the cursor, set a title, forge a line or change
//! the reading direction are spelled out. The output of commands is delivered unchanged, and is
//! never escaped.

use std::borrow::Cow;

/// Escapes every character that has an effect besides its own appearance.
#[must_use]
pub fn escaped(text: &str) -> Cow<'_, str> {
    escaped_but(text, |_| false)
}

/// Like [`escaped`], but keeps line breaks and tabs: for a table or report of our own that contains
/// such names.
#[must_use]
pub fn escaped_lines(text: &str) -> Cow<'_, str> {
    escaped_but(text, |character| matches!(character, '\n' | '\t'))
}

/// Like [`escaped`] for a JSON document, whose meaning does not change: such characters are in
/// strings only, where JSON has escapes for them (RFC 8259, section 7), or are line breaks between
/// its values.
#[must_use]
pub fn escaped_json(document: &str) -> Cow<'_, str> {
    let is_in_string = |character: char| acts(character) && character != '\n';
    if !document.contains(is_in_string) {
        return Cow::Borrowed(document);
    }
    let mut shown = String::with_capacity(document.len());
    for character in document.chars() {
        if is_in_string(character) {
            let units = character
                .encode_utf16(&mut [0; 2])
                .iter()
                .map(|unit| format!("\\u{unit:04x}"))
                .collect::<String>();
            shown.push_str(&units);
        } else {
            shown.push(character);
        }
    }
    Cow::Owned(shown)
}

fn escaped_but(text: &str, is_kept: impl Fn(char) -> bool) -> Cow<'_, str> {
    let acts = |character: char| acts(character) && !is_kept(character);
    if !text.contains(acts) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + text.len() / 4);
    for character in text.chars() {
        if acts(character) {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    Cow::Owned(shown)
}

/// Control characters (C0, DEL, C1), line and paragraph separators, marks, embeddings and isolates
/// of the writing direction, and tags, which are invisible.
fn acts(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{200e}' | '\u{200f}' | '\u{061c}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
        || matches!(character, '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_acts_on_a_terminal_is_spelled_out() {
        let cases = [
            ("plain \u{fc}\u{1f980} text", "plain \u{fc}\u{1f980} text"),
            ("\u{1b}]0;T\u{7}", "\\u{1b}]0;T\\u{7}"),
            ("a\r\nFORGED: ok", "a\\r\\nFORGED: ok"),
            ("\u{9b}31m\u{7f}", "\\u{9b}31m\\u{7f}"),
            ("\u{202e}txt.exe", "\\u{202e}txt.exe"),
        ];
        for (text, expect) in cases {
            assert_eq!(escaped(text), expect);
        }
        assert_eq!(escaped_lines("one\n\u{1b}two\r\n"), "one\n\\u{1b}two\\r\n");
        assert!(matches!(escaped("plain"), Cow::Borrowed(_)));
        assert_eq!(
            escaped_json("{\n\"a\": \"\u{9b}\u{e0041}\"}"),
            "{\n\"a\": \"\\u009b\\udb40\\udc41\"}"
        );
    }
}
