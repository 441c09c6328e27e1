//! Rotation of the authority: workstations come to believe another one without being enrolled anew,
//! and without an outage.
//!
//! 1. `posh-executor rotate` makes the next authority. The former one signs its certificate, and
//!    does nothing else any more: the next one signs the executor's certificate, renewals and
//!    enrolments.
//! 2. Workstations notice by the certificate that they are shown, and renew. With the answer each
//!    believes the next authority in place of the former one, because the former one vouches for it
//!    (`posh_reach::tls::enrol`).
//! 3. `posh-executor rotate --finish` puts the next authority in the place of the former one, whose
//!    certificates count no more.
//!
//! What holds at every moment, also when one of the steps was interrupted:
//!
//! * Whoever believes the former or the next authority believes the certificate that the executor
//!   shows. It is signed by the next one before anybody is given that one to believe, and goes with
//!   the certificate in which the former one vouches for it.
//! * Whoever has a registered certificate of either is let in until the end. The end is refused
//!   while a certificate of the former one counts, also one that was renewed: it counts for a day
//!   after that, in case the answer was lost. So every workstation that is let in before the end is
//!   let in after it.

use std::{collections::BTreeMap, fmt};

use posh_proto::token::Fingerprint;

use super::{
    TlsError, now_s,
    register::{Content, Entry, Register},
};

/// Who could not come any more if the rotation ended now, by identity.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outstanding(BTreeMap<String, Waiting>);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Waiting {
    /// Certificates that were not renewed.
    present: usize,
    /// Those that were, less than a day ago.
    renewed: usize,
    /// Tokens that were not used yet: they name the former authority.
    tokens: usize,
}

impl Register {
    /// Makes the next authority.
    ///
    /// # Errors
    /// [`TlsError::Rotating`], or when it can't be made or written; all is as before then.
    pub fn begin_rotation(&self) -> Result<(), TlsError> {
        let _lock = self.lock()?;
        self.authority.create_next(&self.load()?.names)
    }

    /// Has only the next authority count: whom that locks out, which is nobody unless it is
    /// `forced`.
    ///
    /// # Errors
    /// [`TlsError::NotRotating`], [`TlsError::NotRenewed`], or when something can't be written.
    /// Done again, it goes on then.
    pub fn finish_rotation(&self, forced: Forced) -> Result<Outstanding, TlsError> {
        let _lock = self.lock()?;
        let mut content = self.load()?;
        let next = self
            .next_authority()?
            .ok_or_else(|| TlsError::NotRotating(self.directory().to_owned()))?;
        let outstanding = Outstanding::of(&content, &next);
        if forced == Forced::No && !outstanding.is_empty() {
            return Err(TlsError::NotRenewed(outstanding.to_string()));
        }
        // The chain of certificates is looked at for connections, and the register for every call.
        content.certificates.iter_mut().for_each(|entry| entry.retired |= is_former(entry, &next));
        content.tokens.clear();
        self.save(&content)?;
        self.authority.take_next()?;
        self.authority.renew_server(&content.names)?;
        Ok(outstanding)
    }

    /// Who has to renew before a rotation can end; `None` when none is under way.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn outstanding(&self) -> Result<Option<Outstanding>, TlsError> {
        let content = self.load()?;
        Ok(self.next_authority()?.map(|next| Outstanding::of(&content, &next)))
    }

    /// The SHA-256 of the authority that follows the present one.
    fn next_authority(&self) -> Result<Option<String>, TlsError> {
        let authorities = self.authority.certificates()?;
        Ok((authorities.len() > 1).then(|| Fingerprint::of(&authorities[0]).to_string()))
    }
}

/// Whether a rotation ends whoever is locked out by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forced {
    /// It does.
    Yes,
    /// Not before all have renewed.
    No,
}

impl Outstanding {
    fn of(content: &Content, next: &str) -> Self {
        let (mut by, now): (BTreeMap<String, Waiting>, _) = (BTreeMap::new(), now_s());
        for entry in content
            .certificates
            .iter()
            .filter(|entry| is_former(entry, next) && entry.counts_at(now))
        {
            let waiting = by.entry(entry.identity.clone()).or_default();
            match entry.superseded_s {
                None => waiting.present += 1,
                Some(_) => waiting.renewed += 1,
            }
        }
        for token in content.tokens.iter().filter(|token| token.expires_s > now) {
            by.entry(token.identity.clone()).or_default().tokens += 1;
        }
        Self(by)
    }

    /// Whether all have renewed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Outstanding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (identity, Waiting { present, renewed, tokens })) in self.0.iter().enumerate() {
            let counts = [
                (present, "not renewed"),
                (renewed, "renewed within a day"),
                (tokens, "tokens not used"),
            ];
            let counts = counts.into_iter().filter(|(count, _)| **count > 0);
            let counts: Vec<_> = counts.map(|(count, what)| format!("{count} {what}")).collect();
            write!(f, "{}{identity} ({})", if index > 0 { ", " } else { "" }, counts.join(", "))?;
        }
        Ok(())
    }
}

fn is_former(entry: &Entry, next: &str) -> bool {
    entry.authority.as_deref() != Some(next)
}
