//! What patterns become (bash(1), "Pathname Expansion"), by what a look ahead has found, with a shell's defaults: a guess. It is good for what is
//! thrown away unless the shell's own words are the same.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use glob::{MatchOptions, Pattern};
use posh_proto::gateway::{CertainCommand, PlannedStage};
use tokio::sync::watch;

use super::path;

/// Names that one pattern becomes, at most.
const WORDS: usize = 1024;

/// Names of a directory that are remembered at most.
const NAMES: usize = 4096;

/// Directories that are or were listed, as the text names them.
#[derive(Debug, Default, Clone)]
pub struct Listed(BTreeMap<PathBuf, watch::Receiver<Option<Vec<OsString>>>>);

/// Where to tell what is in a directory: whoever knows it first. All are dropped when nothing more comes.
#[derive(Debug, Clone)]
pub struct Found(watch::Sender<Option<Vec<OsString>>>);

impl Found {
    /// Tells it.
    pub fn tell(&self, names: Vec<OsString>) {
        self.0.send_if_modified(|known| {
            let is_wanted = known.is_none() && names.len() <= NAMES;
            if is_wanted {
                *known = Some(names);
            }
            is_wanted
        });
    }
}

impl Listed {
    /// Somebody will list a directory.
    pub(super) fn expect(&mut self, directory: PathBuf) -> Found {
        let (found, names) = watch::channel(None);
        self.0.insert(directory, names);
        Found(found)
    }

    /// A command with what its patterns become in place of them, as soon as that is known; `None` if nobody will tell. `by_bytes` says that the
    /// shell's locale orders names by their bytes.
    pub async fn expand(&self, mut command: CertainCommand, by_bytes: bool) -> Option<CertainCommand> {
        for stage in command.stages.iter_mut().filter(|stage| stage.has_pattern) {
            self.expand_stage(stage, &path(&command.cwd), by_bytes).await?;
        }
        Some(command)
    }

    async fn expand_stage(&self, stage: &mut PlannedStage, cwd: &Path, by_bytes: bool) -> Option<()> {
        if [&stage.stdin_path, &stage.stdout_path].into_iter().any(is_special) {
            return None;
        }
        let mut argv = Vec::new();
        for word in std::mem::take(&mut stage.argv) {
            // A word whose directory nobody lists is quoted.
            let split = word.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
            let (directory, pattern) = (word.slice(..split), word.slice(split..));
            let names = self.0.get(&cwd.join(path(&directory))).filter(|_| is_special(&word));
            let Some(names) = names else {
                argv.push(word);
                continue;
            };
            let mut names = names.clone();
            let names = names.wait_for(Option::is_some).await.ok()?;
            let found = matching(std::str::from_utf8(&pattern).ok()?, names.as_deref()?, by_bytes)?;
            stage.has_pattern &= found.is_empty();
            match found.is_empty() {
                true => argv.push(word),
                false => argv.extend(found.iter().map(|name| Bytes::from([&directory, name.as_bytes()].concat()))),
            }
        }
        stage.argv = argv;
        // It has become nothing: what a shell makes of that is for its options to say.
        (!stage.has_pattern).then_some(())
    }
}

/// Names in the shell's order; `None` where that is not known.
fn matching<'a>(pattern: &str, names: &'a [OsString], by_bytes: bool) -> Option<Vec<&'a str>> {
    let options =
        MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };
    let pattern = Pattern::new(&pattern.replace("[^", "[!")).ok()?;
    let is_name = |name: &&OsString| ![".", ".."].iter().any(|own| OsStr::new(own) == *name);
    let names = names.iter().filter(is_name).filter_map(|name| name.to_str());
    let mut found: Vec<&str> = names.filter(|name| pattern.matches_with(name, options)).take(WORDS + 1).collect();
    found.sort_unstable();
    (found.len() <= WORDS && (by_bytes || differ_in_digits(&found))).then_some(found)
}

/// Whether names have one order everywhere: they are of one length, and wherever two differ there are digits.
fn differ_in_digits(names: &[&str]) -> bool {
    let [first, others @ ..] = names else { return true };
    let is_alike = |(one, other): (u8, u8)| one == other || one.is_ascii_digit() && other.is_ascii_digit();
    others.iter().all(|other| other.len() == first.len() && first.bytes().zip(other.bytes()).all(is_alike))
}

fn is_special(word: &Bytes) -> bool {
    word.iter().any(|byte| b"*?[".contains(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn patterns_become_what_a_look_has_found() {
        let mut listed = Listed::default();
        let found = listed.expect(PathBuf::from("/m/logs/"));
        let names = [".", "..", "w-10", "w-02", "W", "x", ".w-1", "a[1]"].map(OsString::from);
        found.tell(names.to_vec());
        found.tell(vec!["late".into()]);
        let _never_told = listed.expect(PathBuf::from("/m/failed"));
        drop(_never_told);
        for (words, by_bytes, expected) in [
            ("cat logs/w-*", false, Some("cat logs/w-02 logs/w-10")),
            ("grep [x] /m/logs/w-?? /f", false, Some("grep [x] /m/logs/w-02 /m/logs/w-10 /f")),
            ("cat logs/[xw]*", true, Some("cat logs/w-02 logs/w-10 logs/x")),
            ("cat logs/[xw]*", false, None),
            ("cat logs/*", true, Some("cat logs/W logs/a[1] logs/w-02 logs/w-10 logs/x")),
            ("cat logs/.w*", false, Some("cat logs/.w-1")),
            ("cat logs/[^wx.]", false, Some("cat logs/W")),
            ("cat logs/none*", true, None),
            ("cat elsewhere/*", true, None),
            ("cat logs/*/x", true, None),
            ("cat failed/*", true, None),
        ] {
            let argv = words.split(' ').map(|word| Bytes::copy_from_slice(word.as_bytes())).collect();
            let stages = vec![PlannedStage { argv, has_pattern: true, ..PlannedStage::default() }];
            let command = CertainCommand { stages, cwd: Bytes::from_static(b"/m") };
            let expanded = listed.expand(command, by_bytes).await;
            let text = expanded.map(|command| {
                let words: Vec<&str> =
                    command.stages[0].argv.iter().map(|word| std::str::from_utf8(word).unwrap()).collect();
                words.join(" ")
            });
            assert_eq!(text.as_deref(), expected, "{words}");
        }
    }
}
