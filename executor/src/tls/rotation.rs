//! Rotation of the authority: workstations come to trust another one without a new enrolment, and
//! without an outage.
//!
//! 1. `posh-executor rotate` makes the next authority. The former one signs its certificate, and
//!    nothing else from then on: the next one signs the executor's certificate, renewals and
//!    enrolments.
//! 2. Workstations notice the change by the executor's certificate, and renew. With the answer each
//!    trusts the next authority in place of the former one, because the former one vouches for it
//!    (`posh_reach::tls::enrol`).
//! 3. `posh-executor rotate --finish` replaces the former authority by the next one. The former
//!    one's certificates become invalid.
//!
//! Invariants, even if one of the steps was interrupted:
//!
//! * A peer that trusts the former or the next authority trusts the executor's certificate. It is
//!   signed by the next one before any peer is told to trust that one, and is sent with the
//!   certificate in which the former one vouches for it.
//! * A registered certificate of either is accepted until the end. The end is refused while a
//!   certificate of the former one is valid, even a renewed one: it is valid for a day after that,
//!   in case the answer was lost. So every workstation that is admitted before the end is admitted
//!   after it.

use std::{collections::BTreeMap, fmt};

use posh_proto::token::Fingerprint;

use super::{
    TlsError, now_s,
    register::{CertificateEntry, Register, RegisterContent},
};

/// Certificates and tokens that would become invalid if the rotation ended now, by identity.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outstanding(BTreeMap<String, OutstandingCounts>);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct OutstandingCounts {
    /// Certificates that were not renewed.
    present: usize,
    /// Certificates that were renewed less than a day ago.
    renewed: usize,
    /// Unused tokens: they name the former authority.
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

    /// Makes only the next authority valid; returns the identities that this locks out, which are
    /// none unless it is `forced`.
    ///
    /// # Errors
    /// [`TlsError::NotRotating`], [`TlsError::NotRenewed`], or when something can't be written.
    /// Call it again then to continue.
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
        // The chain of certificates is checked for connections, and the register for every call.
        content.certificates.iter_mut().for_each(|entry| entry.retired |= is_former(entry, &next));
        content.tokens.clear();
        self.save(&content)?;
        self.authority.take_next()?;
        self.authority.renew_server(&content.names)?;
        Ok(outstanding)
    }

    /// Identities that must renew before the rotation can end; `None` when none is in progress.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn outstanding(&self) -> Result<Option<Outstanding>, TlsError> {
        let content = self.load()?;
        Ok(self.next_authority()?.map(|next| Outstanding::of(&content, &next)))
    }

    /// The SHA-256 of the next authority.
    fn next_authority(&self) -> Result<Option<String>, TlsError> {
        let authorities = self.authority.certificates()?;
        Ok((authorities.len() > 1).then(|| Fingerprint::of(&authorities[0]).to_string()))
    }
}

/// Decides if a rotation ends although it locks workstations out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forced {
    /// It ends.
    Yes,
    /// It does not end before all have renewed.
    No,
}

impl Outstanding {
    fn of(content: &RegisterContent, next: &str) -> Self {
        let (mut by, now): (BTreeMap<String, OutstandingCounts>, _) = (BTreeMap::new(), now_s());
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

    /// Returns true if all have renewed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Outstanding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (identity, OutstandingCounts { present, renewed, tokens })) in
            self.0.iter().enumerate()
        {
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

fn is_former(entry: &CertificateEntry, next: &str) -> bool {
    entry.authority.as_deref() != Some(next)
}
