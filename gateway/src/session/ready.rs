//! The session that is ready for whoever comes next (`posh_proto::ready`), made of what the last one has left.

use std::{
    collections::HashSet,
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

use posh_proto::ready::{self, MadeFor};

use super::removal;
use crate::enlisted::Pid;

/// One at most.
#[derive(Debug, Default)]
pub(super) struct Ready {
    /// What lies where, unless somebody has taken it.
    offer: Option<Offer>,
    /// Names of sessions that were ready and have not been heard of.
    unheard: HashSet<String>,
}

#[derive(Debug)]
struct Offer {
    id: String,
    directory: PathBuf,
    made_for: MadeFor,
}

impl Ready {
    /// Whether one that was made for this would be of use: there is none like it.
    pub(super) fn lacks(&self, made_for: &MadeFor) -> bool {
        self.offer.as_ref().is_none_or(|offer| offer.made_for != *made_for || !offer.directory.exists())
    }

    /// Offers what lies in `directory`, in place of what was offered before.
    pub(super) fn offer(
        &mut self,
        id: String,
        directory: &Path,
        made_for: MadeFor,
        stage_socket: &Path,
    ) -> io::Result<()> {
        self.withdraw();
        let place = made_for.place(stage_socket);
        fs::rename(directory, &place)?;
        self.unheard.insert(id.clone());
        self.offer = Some(Offer { id, directory: place, made_for });
        Ok(())
    }

    /// What is offered, if it was made for this, for a session that is opened otherwise: its shims go to `directory`.
    pub(super) fn take(&mut self, made_for: &MadeFor, directory: &Path) -> bool {
        let Some(offer) = self.offer.take_if(|offer| offer.made_for == *made_for) else { return false };
        let is_taken = fs::rename(&offer.directory, directory).is_ok();
        if is_taken {
            self.unheard.remove(&offer.id);
        }
        is_taken
    }

    /// The name and place of what is offered.
    pub(super) fn offered(&self) -> Option<(&str, &Path)> {
        self.offer.as_ref().map(|offer| (offer.id.as_str(), offer.directory.as_path()))
    }

    /// Takes back what is offered. False: somebody was sooner, and will be heard of.
    pub(super) fn withdraw(&mut self) -> bool {
        let Some(offer) = self.offer.take() else { return true };
        let aside = offer.directory.with_extension("withdrawn");
        if fs::rename(&offer.directory, &aside).is_err() {
            return false;
        }
        self.unheard.remove(&offer.id);
        if let Some(top) = aside.parent() {
            let _ = removal::remove(&aside, top);
        }
        true
    }

    /// The name of what somebody has taken, who tells now that it lies in `directory`; none if it is not one of ours.
    pub(super) fn unheard(&self, directory: &Path) -> Option<String> {
        id_in(directory).filter(|id| self.unheard.contains(id))
    }

    /// It has been opened.
    pub(super) fn heard_of(&mut self, id: &str) {
        self.unheard.remove(id);
    }

    /// Whether this may be the name of a session that has been taken and not been heard of yet.
    pub(super) fn is_unheard(&self, id: &str) -> bool {
        self.unheard.contains(id)
    }
}

/// The name that the shell's process gives to what it has taken.
pub(super) fn name_of_taken(pid: Pid) -> OsString {
    ready::taken_name(pid).into()
}

fn id_in(directory: &Path) -> Option<String> {
    ready::session_file(directory).ok().map(|file| file.session)
}

/// Removes what gateways that were killed had ready: this one's predecessors, by its stage socket, and those of others.
pub(super) fn remove_those_of_the_dead(directory: &Path, stage_socket: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for path in entries.flatten().map(|entry| entry.path()).filter(|path| ready::is_ready(path)) {
        let owner = || id_in(&path)?.split('-').next()?.parse::<Pid>().ok();
        let is_ours = path.with_extension("") == stage_socket.with_extension("");
        if is_ours || owner().is_none_or(|pid| !Path::new("/proc").join(pid.to_string()).exists()) {
            let _ = removal::remove(&path, directory);
        }
    }
}
