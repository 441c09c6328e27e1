//! Same locales (design §5, rule 3): a command goes only where it finds the locales that it finds
//! here, by the same definitions, or finds none of them as here; and the same catalogs of messages
//! of its languages.

use std::{
    collections::{BTreeSet, HashMap},
    ffi::OsStr,
    os::unix::ffi::OsStrExt as _,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use posh_proto::{
    catalogs::{self, Catalogs},
    executor::{DescribeReply, Locale},
    locales::{DIRECTORY, Locales, LocalesStamp, Lookup},
};

use crate::{
    enlisted::Enlisted,
    model::{LocalReason, ReasonKind},
};

/// This machine's locales and catalogs, read again after each change.
#[derive(Debug, Default)]
pub struct LocalLocales {
    known: Mutex<Option<(LocalesStamp, Option<Arc<Locales>>)>>,
    /// By language.
    catalogs: Mutex<HashMap<String, Catalogs>>,
}

/// Locales and catalogs of an executor.
#[derive(Debug)]
pub struct RemoteLocales {
    locales: Locales,
    /// Digests, by language.
    catalogs: HashMap<String, Vec<u8>>,
}

impl LocalLocales {
    /// The locales now; `None` if they can't be read.
    fn now(&self) -> Option<Arc<Locales>> {
        let directory = Path::new(DIRECTORY);
        let stamp = LocalesStamp::now(directory);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((its, locales)) = &*known
            && *its == stamp
        {
            return locales.clone();
        }
        let locales = Locales::read(directory).ok().map(Arc::new);
        *known = Some((stamp, locales.clone()));
        locales
    }

    /// Digest of the catalogs of a language now; `None` if they can't be read.
    fn catalogs_now(&self, language: &str) -> Option<Vec<u8>> {
        let mut known = self.catalogs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(catalogs) = known.get(language).filter(|catalogs| catalogs.is_current()) {
            return Some(catalogs.digest.clone());
        }
        if known.len() >= LANGUAGES {
            known.clear();
        }
        let read = Catalogs::of(&catalogs::DIRECTORIES.map(Path::new), language).ok()?;
        let digest = read.digest.clone();
        known.insert(language.to_owned(), read);
        Some(digest)
    }

    /// Checks that a command finds the same locales and catalogs on an executor.
    ///
    /// # Errors
    /// The first difference.
    pub fn same(
        &self,
        executor: &str,
        there: Option<&RemoteLocales>,
        stage: &Enlisted,
    ) -> Result<(), LocalReason> {
        let needed = needed(stage);
        if needed.is_empty() {
            return Ok(());
        }
        let (Some(here), Some(there)) = (self.now(), there) else {
            return Err(ReasonKind::Executor
                .because(format!("the locales here or on {executor} can't be read")));
        };
        needed.iter().try_for_each(|name| is_same(executor, &here, &there.locales, name))?;
        let none = catalogs::none();
        for language in languages(stage) {
            if !catalogs::is_code(&language) {
                return Err(ReasonKind::Executor.because(format!(
                    "messages in `{language}` may be in another language on {executor}"
                )));
            }
            let its = there.catalogs.get(&language).unwrap_or(&none);
            if self.catalogs_now(&language).as_ref() != Some(its) {
                return Err(ReasonKind::Executor.because(format!(
                    "{executor} has other catalogs of messages in the language `{language}`"
                )));
            }
        }
        Ok(())
    }
}

/// Languages whose catalogs are remembered: those of all shells of a user.
const LANGUAGES: usize = 64;

/// Checks that a name stands for the same locale here and there, or for none.
fn is_same(executor: &str, here: &Locales, there: &Locales, name: &str) -> Result<(), LocalReason> {
    let text = match (here.look_up(name), there.look_up(name)) {
        (Lookup::Absent, Lookup::Absent) => return Ok(()),
        (Lookup::Found(one), Lookup::Found(other)) if one == other => return Ok(()),
        (Lookup::Found(_), Lookup::Found(_)) => {
            format!("{executor} has another definition of the locale {name}")
        }
        (Lookup::Found(_), Lookup::Absent) => format!("{executor} does not have the locale {name}"),
        (Lookup::Absent, Lookup::Found(_)) => {
            format!("this machine does not have the locale {name}, which {executor} has")
        }
        (Lookup::Unclear, _) | (_, Lookup::Unclear) => {
            format!("the locale {name} may be another one on {executor}")
        }
    };
    Err(ReasonKind::Executor.because(text))
}

/// Locales of an executor; `None` if it can't read them.
#[must_use]
pub fn told(about: &DescribeReply) -> Option<RemoteLocales> {
    let pair = |its: &Locale| (its.name.clone(), its.digest.to_vec());
    (!about.locales_unknown).then(|| RemoteLocales {
        locales: Locales::of(about.locales.iter().map(pair)),
        catalogs: about.catalogs.iter().map(pair).collect(),
    })
}

/// Languages in which a command looks for messages (gettext(3)): those of `LANGUAGE`, which counts
/// where the locale is not `C`, or that of the locale.
fn languages(stage: &Enlisted) -> BTreeSet<String> {
    let value = |name: &str| stage.variable(name).filter(|value| !value.is_empty());
    let locale = value("LC_ALL").or_else(|| value("LC_MESSAGES")).or_else(|| value("LANG"));
    let locale = locale.filter(|name| *name != "C" && *name != "POSIX");
    let Some(locale) = locale else { return BTreeSet::new() };
    let list = value("LANGUAGE").unwrap_or(locale).to_string_lossy();
    let languages = list.split(':').map(|name| catalogs::language_of(name).to_owned());
    languages.filter(|name| !matches!(name.as_str(), "" | "C" | "POSIX")).collect()
}

/// Locales that affect a command (locale(7): `LC_ALL` overrides all categories, `LANG` is the
/// default of unset ones), without those that are built into the C library.
fn needed(stage: &Enlisted) -> BTreeSet<String> {
    let value = |name: &OsStr| stage.variable(name.to_str()?).filter(|value| !value.is_empty());
    let all = value(OsStr::new("LC_ALL"));
    let kinds = stage.env.iter().map(|(name, _)| name.as_os_str());
    let kinds = kinds
        .filter(|name| name.as_bytes().starts_with(b"LC_") || *name == "LANG")
        .filter(|_| all.is_none());
    let set = all.into_iter().chain(kinds.filter_map(value));
    set.map(|name| name.to_string_lossy().into_owned())
        .filter(|name| !matches!(name.as_str(), "C" | "POSIX"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_looked_for_as_the_c_library_does() {
        let wanted = |env: &[(&str, &str)]| {
            let stage = Enlisted {
                env: env.iter().map(|(name, value)| (name.into(), value.into())).collect(),
                ..Enlisted::from(posh_proto::stage::Enlist::default())
            };
            languages(&stage).into_iter().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(wanted(&[("LANG", "de_AT.UTF-8@x"), ("LC_MESSAGES", "")]), "de");
        assert_eq!(wanted(&[("LANG", "de_DE.UTF-8"), ("LC_MESSAGES", "fr_FR")]), "fr");
        assert_eq!(wanted(&[("LC_ALL", "C.UTF-8"), ("LANGUAGE", "pt_BR:en::C")]), "en pt");
        assert_eq!(wanted(&[("LC_ALL", "C"), ("LANGUAGE", "de"), ("LANG", "de_DE")]), "");
        assert_eq!(wanted(&[("LANGUAGE", "de")]), "");
        assert_eq!(wanted(&[("LANG", "C.UTF-8")]), "");
    }

    #[test]
    fn a_locale_is_the_same_on_both_sides_or_on_neither() {
        let all = |locales: &[(&str, u8)]| {
            Locales::of(locales.iter().map(|(name, digest)| ((*name).to_owned(), vec![*digest])))
        };
        let here = all(&[("C.utf8", 1), ("en_US.utf8", 2), ("de_DE.utf8", 3)]);
        let there = all(&[("C.utf8", 1), ("en_US.utf8", 4), ("fr_FR.utf8", 5)]);
        let same = |name: &str| is_same("store1", &here, &there, name).is_ok();
        assert!(same("C.UTF-8") && same("pl_PL.UTF-8"));
        for name in ["en_US.UTF-8", "de_DE.UTF-8", "fr_FR.UTF-8", "german"] {
            assert!(!same(name), "{name}");
        }
    }
}
