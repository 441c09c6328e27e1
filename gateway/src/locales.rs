//! Same locales (design §5, rule 3): a command goes only where it finds the locales that it finds
//! here, by the same definitions, or finds none of them as here.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    os::unix::ffi::OsStrExt as _,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use posh_proto::{
    executor::DescribeReply,
    locales::{DIRECTORY, Locales, LocalesStamp, Lookup},
};

use crate::{
    enlisted::Enlisted,
    model::{LocalReason, ReasonKind},
};

/// This machine's locales, read again after each change.
#[derive(Debug, Default)]
pub struct LocalLocales {
    known: Mutex<Option<(LocalesStamp, Option<Arc<Locales>>)>>,
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

    /// Checks that a command finds the same locales on an executor.
    ///
    /// # Errors
    /// The first difference.
    pub fn same(
        &self,
        executor: &str,
        there: Option<&Locales>,
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
        needed.iter().try_for_each(|name| is_same(executor, &here, there, name))
    }
}

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
pub fn told(about: &DescribeReply) -> Option<Locales> {
    let told = about.locales.iter().map(|its| (its.name.clone(), its.digest.to_vec()));
    (!about.locales_unknown).then(|| Locales::of(told))
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
