//! Locales of the C library (setlocale(3)), as workstation and server compare them: a program that
//! finds a locale of another definition, or none, sorts, classifies and counts otherwise.
//!
//! glibc looks for a locale in the archive first (localedef(1)), then for a directory of files.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};

/// Directory of the locales, unless a variable names another one.
pub const DIRECTORY: &str = "/usr/lib/locale";

/// Variables that name other places of locales, for glibc and for that of Nix.
pub const PLACES: [&str; 2] = ["LOCPATH", "LOCALE_ARCHIVE"];

/// Locales by name, and digests of their definitions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Locales(BTreeMap<String, Vec<u8>>);

/// Result of asking for a locale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lookup<'a> {
    /// The definition with this digest.
    Found(&'a [u8]),
    /// That of `C`.
    Absent,
    /// An alias, a path, or one with another codeset or territory: only the C library knows.
    Unclear,
}

/// Identity of what [`Locales::read`] reads; another one after each change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalesStamp(Vec<(PathBuf, [u64; 3], [i64; 2])>);

impl LocalesStamp {
    /// Of the locales now.
    #[must_use]
    pub fn now(directory: &Path) -> Self {
        let mut seen = Vec::new();
        let mut see = |path: PathBuf| {
            if let Ok(found) = fs::metadata(&path) {
                let times = [found.mtime(), found.mtime_nsec()];
                seen.push((path, [found.dev(), found.ino(), found.size()], times));
            }
        };
        see(directory.to_owned());
        fs::read_dir(directory).into_iter().flatten().flatten().for_each(|at| see(at.path()));
        seen.sort_unstable();
        Self(seen)
    }
}

impl Locales {
    /// Reads the locales in a directory and in its archive.
    ///
    /// # Errors
    /// Those of reading; `InvalidData` for an archive that is none.
    pub fn read(directory: &Path) -> io::Result<Self> {
        let mut all = BTreeMap::new();
        let entries = match fs::read_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self(all)),
            entries => entries?,
        };
        for entry in entries {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            if let Some(name) = name.filter(|_| path.is_dir()) {
                all.insert(normal(name), digest_of_files(&path)?);
            }
        }
        match fs::read(directory.join("locale-archive")) {
            Ok(archive) => all.extend(Archive(&archive).locales()?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(Self(all))
    }

    /// Those that a server tells of.
    pub fn of(told: impl IntoIterator<Item = (String, Vec<u8>)>) -> Self {
        Self(told.into_iter().collect())
    }

    /// Names, in a normal form, and digests.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.0.iter().map(|(name, digest)| (name.as_str(), digest.as_slice()))
    }

    /// Finds what setlocale(3) finds by a name other than `C` and `POSIX`.
    #[must_use]
    pub fn look_up(&self, name: &str) -> Lookup<'_> {
        if let Some(digest) = self.0.get(&normal(name)) {
            // The C library converts only UTF-8 by itself; other codesets take modules (gconv),
            // which may be missing.
            let is_own = name.starts_with("C.") || normal(name).contains(".utf8");
            return if is_own { Lookup::Found(digest) } else { Lookup::Unclear };
        }
        let (bare, modifier) = name.split_once('@').map_or((name, None), |(n, m)| (n, Some(m)));
        let place = bare.split('.').next().unwrap_or_default();
        let language = place.split('_').next().unwrap_or_default();
        let is_alias = !place.contains('_') && place != "C";
        let mut shorter = [place, language].into_iter().flat_map(|short| {
            let with = modifier.map(|modifier| format!("{short}@{modifier}"));
            [Some(short.to_owned()), with].into_iter().flatten()
        });
        if is_alias || name.contains('/') || shorter.any(|short| self.0.contains_key(&short)) {
            return Lookup::Unclear;
        }
        Lookup::Absent
    }
}

/// The name with its codeset as glibc compares it: letters and digits, in lower case.
fn normal(name: &str) -> String {
    let (bare, modifier) = name.split_once('@').map_or((name, None), |(n, m)| (n, Some(m)));
    let Some((place, codeset)) = bare.split_once('.') else { return name.to_owned() };
    let mut codeset: String = codeset.chars().filter(char::is_ascii_alphanumeric).collect();
    codeset.make_ascii_lowercase();
    if codeset.bytes().all(|byte| byte.is_ascii_digit()) {
        codeset = format!("iso{codeset}");
    }
    let modifier = modifier.map(|modifier| format!("@{modifier}")).unwrap_or_default();
    format!("{place}.{codeset}{modifier}")
}

/// Digest of a locale's directory: its files, and those of the one directory in it.
fn digest_of_files(directory: &Path) -> io::Result<Vec<u8>> {
    let mut files = BTreeMap::new();
    for at in [directory.to_owned(), directory.join("LC_MESSAGES")] {
        for entry in fs::read_dir(&at).into_iter().flatten() {
            let path = entry?.path();
            if path.is_file() {
                files.insert(
                    path.strip_prefix(directory).map_err(io::Error::other)?.to_owned(),
                    path,
                );
            }
        }
    }
    let mut digest = Sha256::new();
    for (name, path) in files {
        digest.update(name.as_os_str().as_encoded_bytes());
        digest.update([0]);
        digest.update(Sha256::digest(fs::read(path)?));
    }
    Ok(digest.finalize().to_vec())
}

/// glibc's archive of locales (localedef(1); `struct locarhead` of its sources): numbers are those
/// of the machine.
struct Archive<'a>(&'a [u8]);

/// First number of an archive.
const MAGIC: u32 = 0xde02_0109;
/// Categories of locale(7) in a record, and the number of `LC_ALL`, which holds all small ones.
const CATEGORIES: usize = 13;
const ALL: usize = 6;

impl Archive<'_> {
    fn number(&self, at: usize) -> io::Result<u32> {
        let bytes = self.bytes(at, 4)?;
        Ok(u32::from_ne_bytes(bytes.try_into().map_err(io::Error::other)?))
    }

    fn bytes(&self, at: usize, count: usize) -> io::Result<&[u8]> {
        let bad = || io::Error::new(io::ErrorKind::InvalidData, "no archive of locales");
        at.checked_add(count).and_then(|end| self.0.get(at..end)).ok_or_else(bad)
    }

    /// Offset and size of a table.
    fn table(&self, number: usize) -> io::Result<(usize, usize)> {
        // After the magic and a serial number: offset, used and size of each.
        let at = 8 + 12 * number;
        Ok((self.number(at)? as usize, self.number(at + 8)? as usize))
    }

    fn locales(&self) -> io::Result<BTreeMap<String, Vec<u8>>> {
        if self.number(0)? != MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no archive of locales"));
        }
        let ((names, count), (sums, summed)) = (self.table(0)?, self.table(3)?);
        // The archive has checksums of the large parts, by their place.
        let mut known: HashMap<u32, &[u8]> = HashMap::new();
        for entry in (0..summed).map(|number| sums + 20 * number) {
            known.insert(self.number(entry + 16)?, self.bytes(entry, 16)?);
        }
        let mut all = BTreeMap::new();
        for entry in (0..count).map(|number| names + 12 * number) {
            let (name, record) = (self.number(entry + 4)? as usize, self.number(entry + 8)?);
            if record == 0 {
                continue;
            }
            let name = self.0.get(name..).unwrap_or_default().split(|byte| *byte == 0).next();
            let name = String::from_utf8_lossy(name.unwrap_or_default());
            all.insert(normal(&name), self.digest(record as usize, &known)?);
        }
        Ok(all)
    }

    fn digest(&self, record: usize, known: &HashMap<u32, &[u8]>) -> io::Result<Vec<u8>> {
        let part = |category: usize| -> io::Result<(u32, u32)> {
            let at = record + 4 + 8 * category;
            Ok((self.number(at)?, self.number(at + 4)?))
        };
        let (small, small_size) = part(ALL)?;
        let mut digest = Sha256::new();
        for category in 0..CATEGORIES {
            let (at, size) = part(category)?;
            digest.update(size.to_le_bytes());
            if let Some(sum) = known.get(&at) {
                digest.update(sum);
            } else if let Some(within) = at.checked_sub(small).filter(|at| *at < small_size) {
                digest.update(within.to_le_bytes());
            } else {
                digest.update(Sha256::digest(self.bytes(at as usize, size as usize)?));
            }
        }
        Ok(digest.finalize().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(names: &[&str]) -> Locales {
        Locales::of(names.iter().map(|name| (normal(name), name.as_bytes().to_vec())))
    }

    #[test]
    fn names_are_found_as_the_c_library_finds_them() {
        let all = of(&["en_US.utf8", "de_DE.iso885915@euro", "de_DE.utf8@euro", "C.utf8", "sr"]);
        for (name, found) in [
            ("en_US.UTF-8", Some("en_US.utf8")),
            ("de_DE.UTF-8@euro", Some("de_DE.utf8@euro")),
            ("C.UTF-8", Some("C.utf8")),
        ] {
            let found = found.map(str::as_bytes).unwrap();
            assert_eq!(all.look_up(name), Lookup::Found(found), "{name}");
        }
        for name in ["en_US", "en_US.ISO-8859-1", "de_DE.UTF-8", "en_us.utf8"] {
            assert_eq!(all.look_up(name), Lookup::Absent, "{name}");
        }
        // A directory of the language alone, an alias of locale.alias, a path, another codeset.
        for name in ["de_DE.ISO-8859-15@euro", "sr_RS.UTF-8", "sr_RS@latin", "german", "/x/y"] {
            assert_eq!(all.look_up(name), Lookup::Unclear, "{name}");
        }
        assert_eq!(of(&[]).look_up("C.UTF-8"), Lookup::Absent);
    }

    #[test]
    fn another_definition_has_another_digest() {
        let directory = tempfile::tempdir().unwrap();
        let locale = directory.path().join("xx_YY.utf8/LC_MESSAGES");
        fs::create_dir_all(&locale).unwrap();
        let read = || Locales::read(directory.path()).unwrap();
        fs::write(locale.join("SYS_LC_MESSAGES"), "yes").unwrap();
        let (before, stamp) = (read(), LocalesStamp::now(directory.path()));
        assert_eq!((read(), LocalesStamp::now(directory.path())), (before.clone(), stamp.clone()));
        fs::write(locale.join("SYS_LC_MESSAGES"), "ja").unwrap();
        assert_ne!(read(), before);
        fs::create_dir(directory.path().join("zz_ZZ")).unwrap();
        assert_ne!(LocalesStamp::now(directory.path()), stamp);
        fs::write(directory.path().join("locale-archive"), "not one").unwrap();
        assert!(Locales::read(directory.path()).is_err());
    }

    /// Made by localedef(1), where that and its sources are installed.
    #[test]
    fn an_archive_of_the_c_library_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join(DIRECTORY.trim_start_matches('/'));
        fs::create_dir_all(&place).unwrap();
        let make = |input: &str, name: &str| {
            let mut command = std::process::Command::new("localedef");
            command.arg("--prefix").arg(directory.path()).args(["-i", input, "-f", "UTF-8", name]);
            command.output().is_ok_and(|done| {
                place.join("locale-archive").exists() && !done.stderr.starts_with(b"cannot")
            })
        };
        if !Path::new("/usr/share/i18n/locales/en_US").exists() || !make("en_US", "en_US.UTF-8") {
            return;
        }
        let one = Locales::read(&place).unwrap();
        let Lookup::Found(english) = one.look_up("en_US.UTF-8") else { panic!("{one:?}") };
        assert!(make("de_DE", "de_DE.UTF-8"));
        let both = Locales::read(&place).unwrap();
        assert_eq!(both.look_up("en_US.utf8"), Lookup::Found(english));
        assert!(matches!(both.look_up("de_DE.UTF-8"), Lookup::Found(german) if german != english));
    }
}
