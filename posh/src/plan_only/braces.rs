//! Brace expansion (bash(1), "Brace Expansion"): `{a,b}`, `{1..9}`, nested. The parser finds the
//! braces; this module expands them, left to right.

use brush_parser::{
    ParserOptions,
    word::{BraceExpressionMember, BraceExpressionOrText, parse_brace_expansions},
};

use super::nesting::is_readable;

/// Limit of the words of one expansion: nobody reads the plan of `{1..1000000}`.
const WORDS: usize = 10_000;

/// Expands one word; `None` when the result has too many words, or the braces are nested too deep.
pub(super) fn expand(word: &str, options: &ParserOptions) -> Option<Vec<String>> {
    // Without one of these, a brace is literal.
    let may_expand = word.contains('{') && (word.contains(',') || word.contains(".."));
    if !may_expand {
        return Some(vec![word.to_owned()]);
    }
    if !is_readable(word) {
        return None;
    }
    match parse_brace_expansions(word, options) {
        Ok(Some(parts)) => product(&parts),
        // No braces, or unbalanced ones, which are literal.
        Ok(None) | Err(_) => Some(vec![word.to_owned()]),
    }
}

fn product(parts: &[BraceExpressionOrText]) -> Option<Vec<String>> {
    let mut words = vec![String::new()];
    for part in parts {
        let ends = match part {
            BraceExpressionOrText::Text(text) => vec![text.clone()],
            BraceExpressionOrText::Expr(members) => members
                .iter()
                .map(member)
                .collect::<Option<Vec<_>>>()?
                .into_iter()
                .flatten()
                .collect(),
        };
        if words.len().checked_mul(ends.len())? > WORDS {
            return None;
        }
        words = words
            .iter()
            .flat_map(|word| ends.iter().map(move |end| format!("{word}{end}")))
            .collect();
    }
    Some(words)
}

fn member(member: &BraceExpressionMember) -> Option<Vec<String>> {
    match member {
        BraceExpressionMember::Child(parts) => product(parts),
        BraceExpressionMember::NumberSequence { start, end, increment } => {
            let numbers = sequence(*start, *end, *increment)?;
            Some(numbers.into_iter().map(|number| number.to_string()).collect())
        }
        BraceExpressionMember::CharSequence { start, end, increment } => {
            let codes =
                sequence(i64::from(u32::from(*start)), i64::from(u32::from(*end)), *increment)?;
            codes
                .into_iter()
                .map(|code| u32::try_from(code).ok().and_then(char::from_u32).map(String::from))
                .collect()
        }
    }
}

/// From `start` towards `end`, both included; the increment's sign is ignored.
fn sequence(start: i64, end: i64, increment: i64) -> Option<Vec<i64>> {
    let step = increment.unsigned_abs().max(1);
    let count = usize::try_from(start.abs_diff(end) / step)
        .ok()?
        .checked_add(1)
        .filter(|&count| count <= WORDS)?;
    let step = i64::try_from(step).ok()?;
    let signed = if end < start { -step } else { step };
    (0..count).map(|n| i64::try_from(n).ok().map(|n| start + n * signed)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_multiply_from_left_to_right() {
        // What bash 5.2 echoes for each.
        let cases = [
            ("a", "a"),
            ("{a,b}", "a b"),
            ("x{a,b}{1,2}y", "xa1y xa2y xb1y xb2y"),
            ("{a,b{1..3}}.log", "a.log b1.log b2.log b3.log"),
            ("{3..1}", "3 2 1"),
            ("{1..7..3}", "1 4 7"),
            ("{a..e..2}", "a c e"),
            ("{a}", "{a}"),
            ("a{", "a{"),
            ("'{a,b}'", "'{a,b}'"),
        ];
        for (word, expected) in cases {
            assert_eq!(
                expand(word, &ParserOptions::default()).unwrap().join(" "),
                expected,
                "{word}"
            );
        }
        for word in ["{1..1000000}", &"{b,}{".repeat(20)] {
            assert_eq!(expand(word, &ParserOptions::default()), None);
        }
        // Jinja's, say.
        let word = "{".repeat(1000);
        assert_eq!(expand(&word, &ParserOptions::default()), Some(vec![word]));
    }
}
