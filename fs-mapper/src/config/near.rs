//! "Did you mean": the known word closest to a misspelt one.

/// Finds the closest known word within an edit distance of two.
pub(super) fn closest<'k>(word: &str, known: &[&'k str]) -> Option<&'k str> {
    let near = known.iter().map(|candidate| (slips(word, candidate), *candidate)).min()?;
    (near.0 <= 2 && near.0 < word.chars().count()).then_some(near.1)
}

/// Levenshtein distance.
fn slips(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_enough() {
        let check = |word: &str, expect: Option<&str>| {
            assert_eq!(closest(word, &["path", "export"]), expect, "{word}")
        };
        check("exprot", Some("export"));
        check("Path", Some("path"));
        check("pth", Some("path"));
        check("colour", None);
        check("a", None);
        check("", None);
    }
}
