//! Catalogs of translated messages (gettext(3)), as workstation and server compare them: a program
//! that finds a catalog says on one machine in French what it says on the other in English.
//!
//! Compared is which catalogs there are. Their contents belong to the programs, which are the same
//! on both machines.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};

/// Directories of the catalogs; the second one is Ubuntu's (language packs).
pub const DIRECTORIES: [&str; 2] = ["/usr/share/locale", "/usr/share/locale-langpack"];

/// Text domains of annotated programs, of what these start, and of the C library.
const DOMAINS: [&str; 15] = [
    "bfd",
    "binutils",
    "coreutils",
    "diffutils",
    "findutils",
    "gawk",
    "git",
    "grep",
    "gzip",
    "libc",
    "opcodes",
    "sed",
    "tar",
    "util-linux",
    "xz",
];

/// Catalogs of one language, and what they were read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Catalogs {
    /// Equal where the same catalogs exist.
    pub digest: Vec<u8>,
    seen: CatalogsStamp,
}

/// Identity of the directories of one language's catalogs; another one after each change.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CatalogsStamp(Vec<(PathBuf, [u64; 2], [i64; 2])>);

impl CatalogsStamp {
    fn of(directories: impl Iterator<Item = PathBuf>) -> Self {
        let seen = directories.map(|path| {
            let found = fs::metadata(&path).ok();
            let (place, changed) = found.map_or_else(Default::default, |found| {
                ([found.dev(), found.ino()], [found.ctime(), found.ctime_nsec()])
            });
            (path, place, changed)
        });
        Self(seen.collect())
    }

    fn is_current(&self) -> bool {
        *self == Self::of(self.0.iter().map(|(path, ..)| path.clone()))
    }
}

impl Catalogs {
    /// Reads which catalogs a language has in all its territories and scripts.
    ///
    /// # Errors
    /// Those of reading.
    pub fn of(directories: &[&Path], language: &str) -> io::Result<Self> {
        let mut names = names(directories)?;
        names.retain(|name| language_of(name) == language);
        Self::read(directories, &names)
    }

    fn read(directories: &[&Path], names: &BTreeSet<String>) -> io::Result<Self> {
        let tops = directories.iter().map(|directory| directory.to_path_buf());
        let in_each = |name| directories.iter().map(move |directory| directory.join(name));
        let places: Vec<PathBuf> = names.iter().flat_map(in_each).collect();
        let below = places.iter().flat_map(|place| [place.clone(), place.join("LC_MESSAGES")]);
        let seen = CatalogsStamp::of(tops.chain(below));
        let mut digest = Sha256::new();
        for name in names {
            for domain in DOMAINS {
                // Which of the directories has it does not matter.
                let file = Path::new("LC_MESSAGES").join(domain).with_extension("mo");
                if in_each(name).any(|place| place.join(&file).exists()) {
                    digest.update(name.as_bytes());
                    digest.update([0]);
                    digest.update(domain.as_bytes());
                    digest.update([0]);
                }
            }
        }
        Ok(Self { digest: digest.finalize().to_vec(), seen })
    }

    /// Returns true if no catalog has come or gone since it was read: one stat(2) for each
    /// directory.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.seen.is_current()
    }
}

/// Digests of the catalogs of all languages, by language.
///
/// # Errors
/// Those of reading.
pub fn all(directories: &[&Path]) -> io::Result<BTreeMap<String, Vec<u8>>> {
    let mut by_language: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for name in names(directories)? {
        by_language.entry(language_of(&name).to_owned()).or_default().insert(name);
    }
    let read = |(language, names): (String, BTreeSet<String>)| {
        Ok((language, Catalogs::read(directories, &names)?.digest))
    };
    by_language.into_iter().map(read).collect()
}

/// Digest of a language without catalogs.
#[must_use]
pub fn none() -> Vec<u8> {
    Sha256::new().finalize().to_vec()
}

/// Returns true for the code of a language (ISO 639). Any other name may be an alias
/// (`locale.alias`), which only the C library knows.
#[must_use]
pub fn is_code(language: &str) -> bool {
    matches!(language.len(), 2 | 3) && language.bytes().all(|byte| byte.is_ascii_lowercase())
}

/// The language in the name of a locale or of its catalogs' directory, such as `de_AT.UTF-8@euro`.
#[must_use]
pub fn language_of(name: &str) -> &str {
    name.split(['_', '.', '@']).next().unwrap_or_default()
}

fn names(directories: &[&Path]) -> io::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for directory in directories {
        let entries = match fs::read_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            // Beside the catalogs lie files such as `locale.alias`.
            let is_directory = entry.path().is_dir();
            names.extend(entry.file_name().into_string().ok().filter(|_| is_directory));
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_language_has_the_same_catalogs_or_others() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let put = |at: &tempfile::TempDir, path: &str| {
            let path = at.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "catalog").unwrap();
        };
        for at in [&one, &other] {
            put(at, "de/LC_MESSAGES/grep.mo");
            put(at, "de_AT/LC_MESSAGES/sed.mo");
        }
        let read = |at: &tempfile::TempDir, language| Catalogs::of(&[at.path()], language).unwrap();
        assert_eq!(read(&one, "de").digest, read(&other, "de").digest);
        assert_eq!(read(&one, "fr").digest, none());
        fs::write(one.path().join("locale.alias"), "aliases").unwrap();
        let before = read(&one, "de");
        // Of a program that no annotation knows.
        put(&one, "de/LC_MESSAGES/gimp.mo");
        assert_eq!(read(&one, "de").digest, read(&other, "de").digest);
        put(&one, "de/LC_MESSAGES/coreutils.mo");
        assert!(!before.is_current() && read(&one, "de").is_current());
        assert_ne!(read(&one, "de").digest, read(&other, "de").digest);
        let all = all(&[one.path()]).unwrap();
        assert_eq!(all, BTreeMap::from([("de".to_owned(), read(&one, "de").digest)]));
        put(&other, "de@x/LC_MESSAGES/coreutils.mo");
        assert_ne!(read(&one, "de").digest, read(&other, "de").digest);
    }
}
