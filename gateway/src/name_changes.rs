//! Files that a process here has open, and whose names a command on a server may give to others.
//!
//! Invariant: a server opens the file of a redirect by its name only if no command that this
//! gateway started on a server can have changed a name between the shell's open(2) and now. Every
//! other file is read and written through the shell's own descriptor.
//!
//! Proof: whatever was opened before a command ended and is still of use then, some process has
//! open at that moment. So the files that are open when a command has ended, before its end is
//! told, are all that are older than the change. Their names count and their inodes, since a
//! directory above may be renamed later. Names that the command changed are not compared with
//! them: a tree may be reached by links that only its server knows. While a command is still at
//! work, only what the stage has just opened itself is certain to be new.
//!
//! sshfs knows files by their names: an open file and the one that gets its name have one size and
//! one cache here, and a reader would get some of both. So a command that may replace an open file
//! on an sshfs mount runs locally ([`NameChanges::open_here`]).
//!
//! Changes made by other machines, or through a second mount of the same export, are not seen.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use fs_mapper::{MountTable, coherence::Adapter};
use posh_proto::rule::{self, Rule};

use crate::{
    aside::Growing,
    assembly::{has_open, parent_of},
    enlisted::{Descriptor, Enlisted, Kind, Pid},
    facts::{Place, Reading},
    lower,
    open_files::{OpenFile, open_below},
    state::Gateway,
};

/// Files that are older than the last change.
#[derive(Debug, Default)]
pub struct NameChanges {
    state: Mutex<State>,
    looking: Growing,
}

#[derive(Debug, Default)]
struct State {
    /// Commands at work on servers that may change names.
    at_work: usize,
    /// Files on mounts that were open when the last one had ended.
    names: HashSet<PathBuf>,
    inodes: HashSet<u64>,
}

/// One command on a server that may change names. Dropping it looks for open files; to be done
/// before the command's end is told.
#[derive(Debug)]
pub struct Changing {
    gateway: Arc<Gateway>,
    /// The command's process here, whose own files are closed with it.
    stage: Pid,
}

impl Changing {
    /// It begins.
    #[must_use]
    pub fn begin(gateway: &Arc<Gateway>, stage: Pid) -> Self {
        gateway.name_changes.lock().at_work += 1;
        Self { gateway: Arc::clone(gateway), stage }
    }
}

impl Drop for Changing {
    fn drop(&mut self) {
        // Locked while looking: the result of a later look must not be replaced by an earlier one's.
        let mut state = self.gateway.name_changes.lock();
        let view = self.gateway.view();
        let tops: Vec<PathBuf> = view.table.mounts().map(|mount| mount.path.as_path().to_owned()).collect();
        state.ended(self.gateway.name_changes.looking.run(|| open_below(&tops, self.stage)));
    }
}

impl State {
    fn ended(&mut self, open: Vec<OpenFile>) {
        self.at_work -= 1;
        self.inodes = open.iter().filter_map(|file| file.inode).collect();
        self.names = open.into_iter().map(|file| file.path).collect();
    }

    fn may_be_older(&self, file: &Descriptor, (stage, childless): (Pid, bool), shell: Option<Pid>) -> bool {
        self.names.contains(&file.path)
            || self.inodes.contains(&file.identity.1)
            || (self.at_work > 0
                && (!childless || shell.is_none_or(|shell| may_be_inherited(&file.path, stage, shell))))
    }
}

impl NameChanges {
    /// Notes in a stage's descriptors which of its files on mounts may be older than a change.
    pub fn note(&self, stage: &mut Enlisted, shell: Option<Pid>) {
        let process = (stage.pid, stage.childless);
        let state = self.lock();
        for file in stage.descriptors.iter_mut().filter(|d| d.kind == Kind::File && d.on_mount) {
            file.is_older = state.may_be_older(file, process, shell);
        }
    }

    /// Tells why a command that may change names has to run locally: it may replace a file on an
    /// sshfs mount that a process other than `stage` has open.
    pub fn open_here(&self, table: &MountTable, stage: Pid, reading: &Reading) -> Option<String> {
        if !rule::holds(Rule::Coherence) {
            return None;
        }
        let files = reading.invocation.files.iter().zip(&reading.places);
        let written = files.filter(|(file, _)| file.kind.writes()).filter_map(|(_, place)| match place {
            Some(Place::At(_, path, mount)) => Some((path.as_path().to_owned(), *mount)),
            _ => None,
        });
        let all = written.chain(lower::watched_places(table, reading));
        let on_sshfs = all.filter(|(_, mount)| table.mount(*mount).adapter() == Adapter::Sshfs);
        let tops: Vec<PathBuf> = on_sshfs.map(|(path, _)| path).collect();
        if tops.is_empty() {
            return None;
        }
        let open = self.looking.run(|| open_below(&tops, stage));
        let path = open.first()?.path.display();
        Some(format!("it may replace {path}, which a process here has open"))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether an ancestor up to the shell has such a file open, or the shell is no ancestor any more.
fn may_be_inherited(file: &Path, stage: Pid, shell: Pid) -> bool {
    let mut above = parent_of(stage);
    while let Some(pid) = above {
        if has_open(pid, file) {
            return true;
        }
        if pid == shell {
            return false;
        }
        above = parent_of(pid);
    }
    true
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        process::{Command, Stdio},
    };

    use super::*;

    #[test]
    fn what_was_open_when_a_command_ended_is_older() {
        let file = |path: &str, inode| Descriptor {
            identity: (0, inode),
            ..Descriptor::imagined(0, Kind::File, path.into(), 0)
        };
        let mut state = State { at_work: 1, ..State::default() };
        state.ended(vec![OpenFile { path: "/m/f".into(), inode: Some(7) }]);
        let check = |file: &Descriptor| state.may_be_older(file, (0, false), None);
        assert!(check(&file("/m/f", 1)));
        // Its directory was renamed.
        assert!(check(&file("/m/d/f", 7)));
        assert!(!check(&file("/m/g", 2)));
        state.at_work = 1;
        state.ended(Vec::new());
        assert!(!state.may_be_older(&file("/m/f", 7), (0, false), None));
    }

    #[test]
    fn beside_a_command_at_work_only_the_stage_s_own_is_new() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().canonicalize().unwrap().join("f");
        fs::write(&path, "x").unwrap();
        let mut child =
            Command::new("sleep").arg("1000").stdin(Stdio::from(File::open(&path).unwrap())).spawn().unwrap();
        let (pid, own) = (child.id(), std::process::id());
        let file = Descriptor::imagined(0, Kind::File, path.clone(), 0);
        let may_be_older = |at_work, childless, shell| {
            let state = State { at_work, ..State::default() };
            state.may_be_older(&file, (pid, childless), shell)
        };
        // The last two: its shell is not above it.
        let found = [
            may_be_older(0, false, None),
            may_be_older(1, true, Some(own)),
            may_be_older(1, false, Some(own)),
            may_be_older(1, true, Some(u32::MAX)),
            may_be_older(1, true, None),
        ];
        let held = File::open(&path).unwrap();
        let while_held = may_be_older(1, true, Some(own));
        drop(held);
        let afterwards = may_be_older(1, true, Some(own));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found, [false, false, true, true, true]);
        assert_eq!((while_held, afterwards), (true, false));
    }
}
