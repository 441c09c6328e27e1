//! What a shell may look up and list, found before it asks: all paths in one request, where the kernel
//! takes a directory's names one after the other. Nothing depends on it: what could not be found is looked up when it is asked for.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::{sync::Notify, time::timeout};

use super::{Volume, table::ROOT, told::plain_names};
use crate::store::{Answer, Caller, Entry, MOST_PATHS, Op};

/// A question that a look should answer is asked all the same after that time.
const PATIENCE: Duration = Duration::from_secs(1);

/// What may be asked for soon; paths below the volume's root.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Look {
    /// Files, directories, and names that may not be there.
    pub named: Vec<PathBuf>,
    /// Directories that may be listed.
    pub listed: Vec<PathBuf>,
}

/// Looks that are under way.
#[derive(Debug, Default)]
pub(super) struct Looks {
    /// Their paths.
    paths: Mutex<Vec<Arc<Vec<Vec<OsString>>>>>,
    /// Whenever one has ended.
    ended: Notify,
}

impl Looks {
    fn paths(&self) -> MutexGuard<'_, Vec<Arc<Vec<Vec<OsString>>>>> {
        self.paths.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for looks at the root, or at a name of it.
    pub async fn passed(&self, name: Option<&OsStr>) {
        let goes_there = |path: &Vec<OsString>| name.is_none_or(|name| path.first().is_some_and(|first| first == name));
        let is_under_way = || self.paths().iter().any(|paths| paths.iter().any(goes_there));
        if !is_under_way() {
            return;
        }
        let all_ended = async {
            loop {
                let ended = self.ended.notified();
                tokio::pin!(ended);
                ended.as_mut().enable();
                if !is_under_way() {
                    return;
                }
                ended.await;
            }
        };
        let _ = timeout(PATIENCE, all_ended).await;
    }
}

impl Volume {
    /// Begins to look; needs to be called within the runtime that works for the volume. Questions of the kernel
    /// about the root, and about names of it that are being looked for, wait for the answer.
    pub fn look_ahead(self: &Arc<Self>, caller: &Caller, look: &Look) {
        let questions = questions(look);
        // Under a limited lease nothing of it could be relied upon when it is asked for.
        if questions.is_empty() || self.store.lease_limit().is_some() {
            return;
        }
        let (paths, is_listed): (Vec<_>, Vec<_>) = questions.into_iter().take(MOST_PATHS).unzip();
        let paths = Arc::new(paths);
        self.looks.paths().push(Arc::clone(&paths));
        let (volume, caller) = (Arc::clone(self), caller.clone());
        tokio::spawn(async move {
            let found = volume.explore(&caller, &paths).await;
            volume.looks.paths().retain(|other| !Arc::ptr_eq(other, &paths));
            volume.looks.ended.notify_waiters();
            let listed = found.into_iter().zip(is_listed).filter(|(_, is_listed)| *is_listed);
            for directory in listed.filter_map(|(found, _)| found) {
                let (volume, caller) = (Arc::clone(&volume), caller.clone());
                tokio::spawn(async move { volume.list_beforehand(&caller, directory.attributes.id).await });
            }
        });
    }

    /// What paths lead to, as far as they are there; every name on the way is remembered, and where one ends.
    async fn explore(&self, caller: &Caller, paths: &[Vec<OsString>]) -> Vec<Option<Entry>> {
        let asked = Instant::now();
        let Ok(root) = self.file(ROOT) else { return Vec::new() };
        let op = Op::Explore { from: root, paths: paths.to_vec() };
        let Ok(Answer::Explored(walks)) = self.store.call(caller, op).await else { return Vec::new() };
        let mut table = self.table();
        paths.iter().zip(&walks).map(|(path, walked)| table.walked(path, walked, asked)).collect()
    }
}

/// Names from the root, each once, and whether what they lead to is to be listed.
fn questions(look: &Look) -> BTreeMap<Vec<OsString>, bool> {
    let named = look.named.iter().map(|path| (path, false));
    let all = named.chain(look.listed.iter().map(|path| (path, true)));
    all.filter_map(|(path, is_listed)| Some((plain_names(path)?, is_listed))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_path_is_asked_for_once() {
        let look = Look {
            named: vec!["a/b".into(), "a".into(), "./a//b".into(), "../x".into()],
            listed: vec!["a".into(), "".into()],
        };
        let found: Vec<String> = questions(&look).iter().map(|(path, listed)| format!("{path:?} {listed}")).collect();
        assert_eq!(found, [r#"[] true"#, r#"["a"] true"#, r#"["a", "b"] false"#]);
    }
}
