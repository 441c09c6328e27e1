//! Files in the form of git-config(1): reading them as git 2.39 does, writing them, and patterns
//! for settings. The meaning of a setting is not known here.

/// One setting: `core.bare`, `remote.origin.url`; section and key in lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// `section.key` or `section.subsection.key`.
    pub name: Vec<u8>,
    /// None: the key stands alone, which means yes.
    pub value: Option<Vec<u8>>,
    /// Outside of quotes the value has white space other than blanks. git before 2.45 reads it as
    /// blanks, and so does [`parse`]; later versions keep it.
    pub depends_on_version: bool,
}

impl Setting {
    /// Tells if the setting matches `pattern`: `name` or `name=value`, with `*` for any text.
    #[must_use]
    pub fn is_like(&self, pattern: &str) -> bool {
        let (name, value) = match pattern.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (pattern, None),
        };
        is_like(name.as_bytes(), &self.name)
            && value.is_none_or(|value| {
                self.value.as_ref().is_some_and(|own| is_like(value.as_bytes(), own))
            })
    }
}

/// Matches a whole text with a pattern, upper case being as lower case.
fn is_like(pattern: &[u8], text: &[u8]) -> bool {
    let mut parts = pattern.split(|byte| *byte == b'*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) =
        text.get(first.len()..).filter(|_| text[..first.len()].eq_ignore_ascii_case(first))
    else {
        return false;
    };
    let mut parts: Vec<&[u8]> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    // The earliest place of each part leaves the most for those after it.
    for part in parts {
        let found = (0..=rest.len())
            .find(|at| rest[*at..].get(..part.len()).is_some_and(|t| t.eq_ignore_ascii_case(part)));
        let Some(at) = found else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.len() >= last.len() && rest[rest.len() - last.len()..].eq_ignore_ascii_case(last)
}

/// All settings of a file, in its order.
///
/// # Errors
/// The number of a line that is no setting. A NUL byte is an error too: git would read the value
/// only up to it.
pub fn parse(content: &[u8]) -> Result<Vec<Setting>, usize> {
    let content = content.strip_prefix(b"\xef\xbb\xbf").unwrap_or(content);
    let mut reader = SettingsReader { content, at: 0, line: 1 };
    reader.settings().ok_or(reader.line)
}

/// A file from which git, and [`parse`], read exactly these settings in this order, if they are
/// ones that [`parse`] gives. It has no comments.
#[must_use]
pub fn write<'a>(settings: impl IntoIterator<Item = &'a Setting>) -> Vec<u8> {
    let (mut file, mut section) = (Vec::new(), &b""[..]);
    for Setting { name, value, .. } in settings {
        let (own, key) = match name.iter().rposition(|byte| *byte == b'.') {
            Some(dot) => (&name[..=dot], &name[dot + 1..]),
            // Keys before the first section.
            None => (&b""[..], &name[..]),
        };
        if own != section {
            write_section(&mut file, &own[..own.len().saturating_sub(1)]);
            section = own;
        }
        file.push(b'\t');
        file.extend(key);
        if let Some(value) = value {
            file.extend(b" = \"");
            value.iter().for_each(|byte| write_byte(&mut file, *byte));
            file.push(b'"');
        }
        file.push(b'\n');
    }
    file
}

/// The line `[section]` or `[section "subsection"]`. The first dot of a name ends the section; all
/// others are the subsection's.
fn write_section(file: &mut Vec<u8>, name: &[u8]) {
    let (section, subsection) = match name.iter().position(|byte| *byte == b'.') {
        Some(dot) => (&name[..dot], Some(&name[dot + 1..])),
        None => (name, None),
    };
    file.push(b'[');
    file.extend(section);
    if let Some(subsection) = subsection {
        file.extend(b" \"");
        for byte in subsection {
            if matches!(byte, b'"' | b'\\') {
                file.push(b'\\');
            }
            file.push(*byte);
        }
        file.push(b'"');
    }
    file.extend(b"]\n");
}

/// A byte of a value, between quotes.
fn write_byte(file: &mut Vec<u8>, byte: u8) {
    let escaped = match byte {
        b'"' | b'\\' => byte,
        b'\n' => b'n',
        b'\t' => b't',
        8 => b'b',
        other => return file.push(other),
    };
    file.extend([b'\\', escaped]);
}

struct SettingsReader<'a> {
    content: &'a [u8],
    at: usize,
    line: usize,
}

impl SettingsReader<'_> {
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
        if let Some(nul) = self.content.iter().position(|byte| *byte == 0) {
            self.line += self.content[..nul].iter().filter(|byte| **byte == b'\n').count();
            return None;
        }
        while self.at < self.content.len() {
            match self.next() {
                b'#' | b';' => while self.next() != b'\n' {},
                b'[' => section = self.section()?,
                letter if letter.is_ascii_alphabetic() => {
                    settings.push(self.setting(&section, letter)?)
                }
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
        let is_empty = name.is_empty();
        name.push(b'.');
        (!is_empty).then_some(name)
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
            b'\n' => Some(Setting { name, value: None, depends_on_version: false }),
            b'=' => {
                let (value, depends_on_version) = self.value()?;
                Some(Setting { name, value: Some(value), depends_on_version })
            }
            _ => None,
        }
    }

    /// The value, and [`Setting::depends_on_version`].
    fn value(&mut self) -> Option<(Vec<u8>, bool)> {
        let (mut value, mut spaces) = (Vec::new(), 0);
        let (mut is_quoted, mut has_others, mut depends_on_version) = (false, false, false);
        loop {
            let byte = self.next();
            match byte {
                b'\n' => return (!is_quoted).then_some((value, depends_on_version)),
                b'#' | b';' if !is_quoted => {
                    while self.next() != b'\n' {}
                    return Some((value, depends_on_version));
                }
                space if is_space(space) && !is_quoted => {
                    if !value.is_empty() {
                        spaces += 1;
                        has_others |= space != b' ';
                    }
                    continue;
                }
                _ => {}
            }
            value.extend(std::iter::repeat_n(b' ', std::mem::take(&mut spaces)));
            depends_on_version |= std::mem::take(&mut has_others);
            match byte {
                b'"' => is_quoted = !is_quoted,
                b'\\' => value.extend(self.escaped()?),
                other => value.push(other),
            }
        }
    }

    /// The byte that a backslash and the next byte stand for; none for a newline. `None` if the
    /// escape is invalid.
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
            let value =
                setting.value.as_ref().map(|value| format!("={}", String::from_utf8_lossy(value)));
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
            (
                "[filter \"L\\\"FS\"]\r\n clean = git-lfs  clean \r\n",
                "filter.L\"FS.clean=git-lfs  clean",
            ),
            ("[a.B]k=\"x ; y\" z # c\nl = \\\n  m\n", "a.b.k=x ; y z|a.b.l=m"),
            ("# c\n; d\n[a]\nk = \\t\\\"\\n\n", "a.k=\t\"\n"),
            ("[a]\nk =\n[b]\n", "a.k="),
            ("[a]\nk = v\\", "a.k=v"),
            ("", ""),
            ("k = v\n[ \"\"]\nk = x\n", "k=v|..k=x"),
            ("[a]\n[]\n", "line 2"),
            ("[a]\nk = \"x\\\n  y\" \\\n z\n", "a.k=x  y  z"),
            ("[a]\nk v\n", "line 2"),
            ("[a\n", "line 2"),
            ("[a \"b]\n", "line 2"),
            ("[a]\nk = \"v\nx\n", "line 3"),
            ("[a]\n= v\n", "line 2"),
            ("[a]\nk = \\q\n", "line 2"),
            ("[a]\nk = v\n\tl = v\0w\n", "line 3"),
        ] {
            assert_eq!(shown(content), expected, "{content:?}");
        }
    }

    #[test]
    fn patterns_are_of_whole_names_and_values() {
        let setting = |name: &str, value: Option<&str>| Setting {
            name: name.into(),
            value: value.map(|value| value.as_bytes().to_vec()),
            depends_on_version: false,
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

    #[test]
    fn white_space_within_a_value_depends_on_the_version() {
        for (content, expected) in [
            ("[a]\nk = \t v  w\t# c\n", false),
            ("[a]\nk = v\tw\n", true),
            ("[a]\nk = \"v\tw\"\n", false),
            ("[a]\nk = v \\\n\tw\n", true),
            ("[a]\nk = v\rw\n", true),
        ] {
            let settings = parse(content.as_bytes()).unwrap();
            assert_eq!(settings[0].depends_on_version, expected, "{content:?}");
        }
    }

    #[test]
    fn files_are_written_without_comments_and_in_one_form() {
        for (content, expected) in [
            ("# c\n[Core] ; c\n  BARE\n", "[core]\n\tbare\n"),
            (
                "[a]k=1\n[a \"B.\\\"\"]\nk = x # y\n[a]\nk=",
                "[a]\n\tk = \"1\"\n[a \"B.\\\"\"]\n\tk = \"x\"\n[a]\n\tk = \"\"\n",
            ),
            ("[a.B]\nk = \\t\\b\\n\\\\ \\\" \\\n;", "[a \"b\"]\n\tk = \"\\t\\b\\n\\\\ \\\" \"\n"),
            ("k = v\n[ \"\"]\nk", "\tk = \"v\"\n[ \"\"]\n\tk\n"),
        ] {
            let written = write(&parse(content.as_bytes()).unwrap());
            assert_eq!(String::from_utf8_lossy(&written), expected, "{content:?}");
        }
    }
}
