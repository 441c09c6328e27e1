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
        let different = |text: String| Err(ReasonKind::Executor.because(text));
        let (Some(here), Some(there)) = (self.now(), there) else {
            return different(format!("the locales here or on {executor} can't be read"));
        };
        for name in needed {
            match (here.look_up(&name), there.look_up(&name)) {
                (Lookup::Absent, Lookup::Absent) => {}
                (Lookup::Found(one), Lookup::Found(other)) if one == other => {}
                (Lookup::Found(_), Lookup::Found(_)) => {
                    return different(format!("{executor} has another definition of {name}"));
                }
                (Lookup::Found(_), Lookup::Absent) => {
                    return different(format!("{executor} does not have the locale {name}"));
                }
                (Lookup::Absent, Lookup::Found(_)) => {
                    return different(format!(
                        "this machine does not have the locale {name}, which {executor} has"
                    ));
                }
                (Lookup::Unclear, _) | (_, Lookup::Unclear) => {
                    return different(format!(
                        "the locale {name} may be another one on {executor}"
                    ));
                }
            }
        }
        Ok(())
    }
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
