//! Files in the form of git-config(1), read as git 2.39 reads them, and patterns
//! for what they set. What a setting means is not known here.

/// One setting: `core.bare`, `remote.origin.url`; section and key in lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    pub name: Vec<u8>,
    /// None: the key stands alone, which means yes.
    pub value: Option<Vec<u8>>,
}

impl Setting {
    /// Whether `pattern` (`name` or `name=value`, `*` for any text) is of it.
    pub fn is_like(&self, pattern: &str) -> bool {
        let (name, value) = match pattern.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (pattern, None),
        };
        is_like(name.as_bytes(), &self.name)
            && value.is_none_or(|value| self.value.as_ref().is_some_and(|own| is_like(value.as_bytes(), own)))
    }
}

/// Whether `text` is what `pattern` says, upper case being as lower case.
fn is_like(pattern: &[u8], text: &[u8]) -> bool {
    let mut parts = pattern.split(|byte| *byte == b'*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.get(first.len()..).filter(|_| text[..first.len()].eq_ignore_ascii_case(first)) else {
        return false;
    };
    let mut parts: Vec<&[u8]> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    // The earliest place of each part leaves the most for those after it.
    for part in parts {
        let found =
            (0..=rest.len()).find(|at| rest[*at..].get(..part.len()).is_some_and(|t| t.eq_ignore_ascii_case(part)));
        let Some(at) = found else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.len() >= last.len() && rest[rest.len() - last.len()..].eq_ignore_ascii_case(last)
}

/// All settings of a file, in its order.
///
/// # Errors
/// The number of the line that git would complain of.
pub fn parse(content: &[u8]) -> Result<Vec<Setting>, usize> {
    let content = content.strip_prefix(b"\xef\xbb\xbf").unwrap_or(content);
    let mut reader = Reader { content, at: 0, line: 1 };
    reader.settings().ok_or(reader.line)
}

struct Reader<'a> {
    content: &'a [u8],
    at: usize,
    line: usize,
}

impl Reader<'_> {
    /// The next byte; CR LF is one newline, and so is the end of the file.
    fn next(&mut self) -> u8 {
        if self.content[self.at.min(self.content.len())..].starts_with(b"\r\n") {
            self.at += 1;
        }
        let byte = self.content.get(self.at).copied().unwrap_or(b'\n');
        self.at += 1;
        self.line += usize::from(byte == b'\n' && self.at <= self.content.len());
        byte
    }

    fn settings(&mut self) -> Option<Vec<Setting>> {
        let mut settings = Vec::new();
        let mut section = Vec::new();
        while self.at < self.content.len() {
            match self.next() {
                b'#' | b';' => while self.next() != b'\n' {},
                b'[' => section = self.section()?,
                letter if letter.is_ascii_alphabetic() => settings.push(self.setting(&section, letter)?),
                space if is_space(space) => {}
                _ => return None,
            }
        }
        Some(settings)
    }

    /// After `[`: the name with a dot at its end, up to and including `]`.
    fn section(&mut self) -> Option<Vec<u8>> {
        let mut name = Vec::new();
        loop {
            match self.next() {
                b']' => break,
                byte if is_key(byte) || byte == b'.' => name.push(byte.to_ascii_lowercase()),
                byte if is_space(byte) && byte != b'\n' => {
                    self.subsection(&mut name)?;
                    break;
                }
                _ => return None,
            }
        }
        name.push(b'.');
        Some(name)
    }

    fn subsection(&mut self, name: &mut Vec<u8>) -> Option<()> {
        let mut byte = self.next();
        while byte != b'\n' && is_space(byte) {
            byte = self.next();
        }
        if byte != b'"' {
            return None;
        }
        name.push(b'.');
        loop {
            match self.next() {
                b'\n' => return None,
                b'"' => break,
                b'\\' => match self.next() {
                    b'\n' => return None,
                    escaped => name.push(escaped),
                },
                byte => name.push(byte),
            }
        }
        (self.next() == b']').then_some(())
    }

    /// After the key's first letter, up to and including the end of the line.
    fn setting(&mut self, section: &[u8], first: u8) -> Option<Setting> {
        let mut name = section.to_vec();
        let mut byte = first;
        while is_key(byte) {
            name.push(byte.to_ascii_lowercase());
            byte = self.next();
        }
        while byte == b' ' || byte == b'\t' {
            byte = self.next();
        }
        match byte {
            b'\n' => Some(Setting { name, value: None }),
            b'=' => Some(Setting { name, value: Some(self.value()?) }),
            _ => None,
        }
    }

    fn value(&mut self) -> Option<Vec<u8>> {
        let (mut value, mut spaces) = (Vec::new(), 0);
        let mut is_quoted = false;
        loop {
            let byte = self.next();
            match byte {
                b'\n' => return (!is_quoted).then_some(value),
                b'#' | b';' if !is_quoted => {
                    while self.next() != b'\n' {}
                    return Some(value);
                }
                space if is_space(space) && !is_quoted => {
                    spaces += usize::from(!value.is_empty());
                    continue;
                }
                _ => {}
            }
            value.extend(std::iter::repeat_n(b' ', std::mem::take(&mut spaces)));
            match byte {
                b'"' => is_quoted = !is_quoted,
                b'\\' => value.extend(self.escaped()?),
                other => value.push(other),
            }
        }
    }

    /// What a backslash makes of the next byte: nothing of a newline.
    fn escaped(&mut self) -> Option<Option<u8>> {
        Some(Some(match self.next() {
            b'\n' => return Some(None),
            b't' => b'\t',
            b'b' => 8,
            b'n' => b'\n',
            same @ (b'\\' | b'"') => same,
            _ => return None,
        }))
    }
}

/// isspace(3) of the C locale, without vertical tab and form feed, as git has it.
fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

fn is_key(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'-'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(content: &str) -> String {
        let settings = match parse(content.as_bytes()) {
            Ok(settings) => settings,
            Err(line) => return format!("line {line}"),
        };
        let one = |setting: &Setting| {
            let value = setting.value.as_ref().map(|value| format!("={}", String::from_utf8_lossy(value)));
            format!("{}{}", String::from_utf8_lossy(&setting.name), value.unwrap_or_default())
        };
        settings.iter().map(one).collect::<Vec<_>>().join("|")
    }

    #[test]
    fn settings_are_read_as_git_reads_them() {
        for (content, expected) in [
            ("[core]\n\tbare = false\n", "core.bare=false"),
            ("[Core]\nBARE", "core.bare"),
            ("\u{feff}[core] hooksPath=x ; why\n", "core.hookspath=x"),
            ("[filter \"L\\\"FS\"]\r\n clean = git-lfs  clean \r\n", "filter.L\"FS.clean=git-lfs  clean"),
            ("[a.B]k=\"x ; y\" z # c\nl = \\\n  m\n", "a.b.k=x ; y z|a.b.l=m"),
            ("# c\n; d\n[a]\nk = \\t\\\"\\n\n", "a.k=\t\"\n"),
            ("[a]\nk =\n[b]\n", "a.k="),
            ("[a]\nk = v\\", "a.k=v"),
            ("", ""),
            ("[a]\nk v\n", "line 2"),
            ("[a\n", "line 2"),
            ("[a \"b]\n", "line 2"),
            ("[a]\nk = \"v\nx\n", "line 3"),
            ("[a]\n= v\n", "line 2"),
            ("[a]\nk = \\q\n", "line 2"),
        ] {
            assert_eq!(shown(content), expected, "{content:?}");
        }
    }

    #[test]
    fn patterns_are_of_whole_names_and_values() {
        let setting = |name: &str, value: Option<&str>| Setting {
            name: name.into(),
            value: value.map(|value| value.as_bytes().to_vec()),
        };
        let bare = setting("core.bare", Some("FALSE"));
        let url = setting("remote.a=b.url", Some("x=y"));
        let alone = setting("core.bare", None);
        for (pattern, setting, expected) in [
            ("core.bare", &bare, true),
            ("Core.Bare=false", &bare, true),
            ("core.bare=true", &bare, false),
            ("core.bar", &bare, false),
            ("core.*", &bare, true),
            ("core.bare=*", &alone, false),
            ("core.bare", &alone, true),
            ("remote.*.url", &url, true),
            ("remote.*.url=x=*", &url, true),
            ("remote.a=b.url", &url, false),
            ("*.u*l", &url, true),
            ("remote.*.*.url", &url, false),
            ("*", &url, true),
        ] {
            assert_eq!(setting.is_like(pattern), expected, "{pattern} {setting:?}");
        }
    }
}
