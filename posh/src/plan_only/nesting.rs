//! Nesting depth of a text. The parser backtracks at each bracket that is never closed, and at each
//! `case`, so that twenty of them take more than twenty seconds.

/// Limit of nesting, beyond that of real texts. The parser takes some tenths of a millisecond for
/// as many unclosed brackets.
const DEPTH: usize = 8;

/// Returns true if the command parser can read this text quickly. Quoted text and comments count
/// like any other: only the parser could tell them apart.
pub(super) fn is_parsable(text: &str) -> bool {
    let (mut open, mut brackets, mut is_in_pattern) = (0_usize, 0_usize, false);
    text.bytes().enumerate().all(|(at, byte)| {
        match byte {
            b'(' | b'{' => open += 1,
            // A parenthesis that nothing opens ends a pattern of `case`.
            b')' if is_in_pattern => is_in_pattern = false,
            b')' | b'}' => open = open.saturating_sub(1),
            // Subscripts (`a[`) and patterns.
            b'[' => brackets += 1,
            b']' => brackets = brackets.saturating_sub(1),
            b'c' if is_word(text, at, "case") => (open, is_in_pattern) = (open + 1, true),
            b'e' if is_word(text, at, "esac") => open = open.saturating_sub(1),
            _ => is_in_pattern |= text.as_bytes()[at..].starts_with(b";;"),
        }
        open <= DEPTH && brackets <= DEPTH
    })
}

/// Returns true if `word` is at this position, as a whole word.
fn is_word(text: &str, at: usize, word: &str) -> bool {
    let bytes = text.as_bytes();
    let is_part =
        |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b'/');
    let stands_alone = !at.checked_sub(1).and_then(|before| bytes.get(before)).is_some_and(is_part)
        && !bytes.get(at + word.len()).is_some_and(is_part);
    bytes[at..].starts_with(word.as_bytes()) && stands_alone
}

/// Returns true if the word parser can read this word quickly.
pub(super) fn is_readable(word: &str) -> bool {
    let mut open: Vec<char> = Vec::new();
    let mut before = ' ';
    let mut characters = word.chars();
    while let Some(character) = characters.next() {
        match (character, open.last()) {
            ('\\', _) => drop(characters.next()),
            ('\'', Some('"')) => {}
            ('\'', _) => drop(characters.find(|character| *character == '\'')),
            ('"' | '`', Some(last)) if *last == character => drop(open.pop()),
            ('}', Some('{')) | (')', Some('(')) | (']', Some('[')) => drop(open.pop()),
            ('{' | '(' | '"' | '`', _) => open.push(character),
            ('[', _) if before == '$' => open.push(character),
            _ => {}
        }
        if open.len() > DEPTH {
            return false;
        }
        before = character;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_closes_is_counted() {
        let each = [
            "{", "{a,", "{b,}{", "$(", "\"$(", "${x:-", "${x/", "$[", "{1..", "{'}'", "\"{\"{",
            "`{",
        ];
        for part in each {
            assert!(is_readable(&part.repeat(2)), "{part}");
            assert!(!is_readable(&part.repeat(20)), "{part}");
        }
    }

    #[test]
    fn a_text_that_opens_more_than_it_closes_is_not_parsed() {
        for part in [
            "(",
            ">(",
            "{ ",
            "$((",
            "case x in a) (",
            "(case x in a) ",
            "case x in a) ",
            "case x in\na)\n",
            "a[",
            "a[$'",
        ] {
            assert!(is_parsable(&part.repeat(2)) && !is_parsable(&part.repeat(20)), "{part}");
        }
        for part in [
            "(a); ",
            "case x in a) b;; c) d;; esac; ",
            "f() { g; }; ",
            "lowercase --ignore-case; ",
            "[ a ]; [[ b ]]; ",
        ] {
            assert!(is_parsable(&part.repeat(100)), "{part}");
        }
    }

    #[test]
    fn what_is_closed_is_not() {
        let each = [
            "{a,b}",
            "\"${x}\"/",
            "$(a)",
            "${x:-\"$(b)\"}",
            "'{'",
            "\\{",
            "\"a'b\"",
            "`a`",
            "$[1]",
            "[ab]",
            "it\\'s",
        ];
        for part in each {
            assert!(is_readable(&part.repeat(100)), "{part}");
        }
        let deep = |depth: usize| format!("{}x{}", "{a,".repeat(depth), "}".repeat(depth));
        assert!(is_readable(&deep(DEPTH)) && !is_readable(&deep(DEPTH + 1)));
    }
}
