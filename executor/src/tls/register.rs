//! The register: issued certificates with identity, expiry and revocation, and unused tokens. One
//! file, replaced as a whole under a lock; a reader notices when another process has changed it.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File, OpenOptions},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, RwLock},
};

use nix::{libc, unistd::geteuid};
use posh_proto::{
    secret::{self, SecretError},
    token::{Fingerprint, SECRET_BYTES, Token},
};
use serde::{Deserialize, Serialize};

use super::{
    FileVersion, REGISTER_FILE, TlsError,
    authority::{Authority, Issued},
    now_s, provider,
};

/// Lifetime of a token.
pub const TOKEN_LIFETIME_S: u64 = 3600;

/// Time for which an expired certificate is still told apart from an unknown one.
const REMEMBERED_S: u64 = 180 * 24 * 3600;

/// Bound of the file, which is read as a whole; no identity can come near it.
const MAX_CERTIFICATES: usize = 10_000;

/// Certificates of one identity that the register keeps, invalid ones included: some tens of
/// workstations. Only an administrator's tokens add to them; a renewal replaces.
pub const MAX_OF_ONE: usize = 64;

/// Time for which a renewed certificate stays valid, in case its successor did not arrive.
pub const SUPERSEDED_S: u64 = 24 * 3600;

/// Valid successors of one certificate: gateways of one user may renew at the same time.
const SUCCESSORS: usize = 3;

/// Valid certificates that descend from one enrolment: one workstation leaves the others of its
/// identity room.
const MAX_OF_ENROLMENT: usize = 8;

/// Least digits of a certificate's SHA-256 that name it.
const PREFIX_DIGITS: usize = 8;

/// Content of the file.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct RegisterContent {
    /// Host names and IP addresses of the executor's own certificate.
    pub(super) names: Vec<String>,
    pub(super) certificates: Vec<CertificateEntry>,
    pub(super) tokens: Vec<TokenEntry>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct CertificateEntry {
    sha256: String,
    pub(super) identity: String,
    issued_s: u64,
    expires_s: u64,
    revoked: bool,
    /// The SHA-256 of the authority that has signed it; an older register lacks it, and knew only
    /// one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) authority: Option<String>,
    /// That authority was replaced.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) retired: bool,
    /// The certificate that asked for this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    replaces: Option<String>,
    /// End of its validity because of a successor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) superseded_s: Option<u64>,
    /// The SHA-256 of the certificate that was got for a token, of which this one is a renewal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    enrolment: Option<String>,
    /// Somebody has shown it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    shown: bool,
    /// The audit record has its revocation.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    recorded: bool,
}

impl CertificateEntry {
    /// Names the enrolment that it descends from; older registers do not say it of renewals.
    fn enrolment(&self) -> &str {
        self.enrolment.as_deref().unwrap_or(&self.sha256)
    }

    /// Returns true if it is valid at that time.
    pub(super) fn counts_at(&self, now_s: u64) -> bool {
        let has_ended = self.revoked || self.retired || self.expires_s <= now_s;
        !has_ended && self.superseded_s.is_none_or(|at| at > now_s)
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct TokenEntry {
    /// Hash of the secret: a reader of the file can't enrol.
    sha256: String,
    pub(super) identity: String,
    pub(super) expires_s: u64,
}

/// Data of a certificate, for `posh-executor list`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// Its SHA-256, in hexadecimal digits.
    pub sha256: String,
    /// Identity that it was issued to.
    pub identity: String,
    /// Time of issue, in seconds since 1970.
    pub issued_s: u64,
    /// Expiry, in seconds since 1970.
    pub expires_s: u64,
    /// It was revoked.
    pub revoked: bool,
    /// End of its validity beside its successor, if it has one.
    pub superseded_s: Option<u64>,
    /// The authority that has signed it was replaced.
    pub retired: bool,
}

/// Reason for refusing a certificate or a token, for the user that shows it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// This executor has not issued it.
    #[error("this executor has not issued the certificate of this workstation; {ENROL}")]
    Unknown,
    /// It was revoked.
    #[error("the certificate of `{0}` was revoked; if that is a mistake, {ENROL}")]
    Revoked(String),
    /// It has expired.
    #[error("the certificate of `{0}` has expired; {ENROL}")]
    Expired(String),
    /// It was renewed long ago.
    #[error("the certificate of `{0}` was replaced by a newer one; {ENROL}")]
    Superseded(String),
    /// It was not renewed while its authority was replaced.
    #[error(
        "the authority that has signed the certificate of `{0}` was replaced meanwhile; {ENROL}"
    )]
    Retired(String),
    /// No such token, or used already: these can't be told apart.
    #[error("the token is not valid: mistyped, used already, or taken back; {NEW_TOKEN}")]
    Token,
    /// The token has expired.
    #[error("the token has expired; {NEW_TOKEN}")]
    TokenExpired,
    /// The register can't be read.
    #[error(
        "this executor can't read its register of certificates, so that it lets nobody in; its log \
         says why"
    )]
    Register,
}

const ENROL: &str = "run `posh-executor enroll NAME` there and `posh enroll ADDRESS TOKEN` here";
const NEW_TOKEN: &str = "get a new one from `posh-executor enroll NAME` there";

/// The register of one directory.
#[derive(Debug)]
pub struct Register {
    path: PathBuf,
    pub(super) authority: Authority,
    known: RwLock<Option<(FileVersion, Arc<RegisterIndex>)>>,
    /// Certificates that were shown, of which the file does not say it yet.
    shown: Mutex<HashSet<Fingerprint>>,
}

/// The content, indexed.
#[derive(Debug)]
struct RegisterIndex {
    certificates: HashMap<Fingerprint, IndexedCertificate>,
    tokens: Vec<Fingerprint>,
}

#[derive(Debug)]
struct IndexedCertificate {
    certificate: Certificate,
    enrolment: String,
    shown: bool,
    recorded: bool,
}

/// A certificate that an administrator revoked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Revocation {
    /// Identity of the certificate.
    pub identity: String,
    /// Its SHA-256, in hexadecimal digits.
    pub sha256: String,
}

impl Register {
    /// The register in that directory; reads nothing.
    #[must_use]
    pub fn at(directory: &Path) -> Self {
        Self {
            path: directory.join(REGISTER_FILE),
            authority: Authority::at(directory),
            known: RwLock::default(),
            shown: Mutex::default(),
        }
    }

    /// Begins an empty register for an executor that is reached by `names`.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn create(&self, names: &[String]) -> Result<(), TlsError> {
        self.save(&RegisterContent { names: names.to_vec(), ..RegisterContent::default() })
    }

    /// The executor's host names and IP addresses.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn names(&self) -> Result<Vec<String>, TlsError> {
        Ok(self.load()?.names)
    }

    /// Sets the executor's host names and IP addresses.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn rename(&self, names: &[String]) -> Result<(), TlsError> {
        self.change(|content| content.names = names.to_vec())
    }

    /// Renews the executor's certificate, for its names, which are returned. Not while the
    /// authority is being changed.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn renew_server(&self) -> Result<Vec<String>, TlsError> {
        let _lock = self.lock()?;
        let names = self.load()?.names;
        self.authority.renew_server(&names)?;
        Ok(names)
    }

    /// Identity of a certificate.
    ///
    /// # Errors
    /// [`Invalid`].
    pub fn identity_of(&self, certificate: &Fingerprint) -> Result<String, Invalid> {
        let known = self.known().map_err(|error| {
            tracing::error!(error = ?error, "cannot read the register of certificates: {error}");
            Invalid::Register
        })?;
        let entry = known.certificates.get(certificate).ok_or(Invalid::Unknown)?;
        match &entry.certificate {
            Certificate { revoked: true, identity, .. } => Err(Invalid::Revoked(identity.clone())),
            Certificate { expires_s, identity, .. } if *expires_s <= now_s() => {
                Err(Invalid::Expired(identity.clone()))
            }
            Certificate { retired: true, identity, .. } => Err(Invalid::Retired(identity.clone())),
            Certificate { superseded_s: Some(at), identity, .. } if *at <= now_s() => {
                Err(Invalid::Superseded(identity.clone()))
            }
            Certificate { identity, .. } => {
                if !entry.shown {
                    self.shown.lock().expect("not poisoned").insert(*certificate);
                }
                Ok(identity.clone())
            }
        }
    }

    /// Names the enrolment that a certificate descends from; `None` if the register lacks it.
    pub(crate) fn enrolment_of(&self, certificate: &Fingerprint) -> Option<String> {
        let known = self.known().ok()?;
        known.certificates.get(certificate).map(|entry| entry.enrolment.clone())
    }

    /// Makes a token for `identity`, valid once and for an hour.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn token_for(&self, identity: &str) -> Result<Token, TlsError> {
        self.token_until(identity, now_s() + TOKEN_LIFETIME_S)
    }

    /// Like `token_for`, with a given expiry.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn token_until(&self, identity: &str, expires_s: u64) -> Result<Token, TlsError> {
        let mut secret = [0; SECRET_BYTES];
        let random = provider().secure_random.fill(&mut secret);
        random.map_err(|_| TlsError::Make("no random numbers".to_owned()))?;
        let token = Token { authority: self.authority.fingerprint()?, secret };
        let pending = TokenEntry {
            sha256: Fingerprint::of(&secret).to_string(),
            identity: identity.to_owned(),
            expires_s,
        };
        self.change(|content| content.tokens.push(pending))?;
        Ok(token)
    }

    /// Uses up a token, and signs a request for its identity.
    ///
    /// # Errors
    /// [`Invalid`] when the token is invalid, and then it stays as it was.
    pub fn enrol(
        &self,
        secret: &[u8],
        request: &[u8],
    ) -> Result<Result<(String, Issued), Invalid>, TlsError> {
        let offered = Fingerprint::of(secret);
        let lock = self.lock()?;
        let mut content = self.load()?;
        // Compares all, in constant time: the position does not show either.
        let is_it = |token: &TokenEntry| {
            token.sha256.parse().is_ok_and(|known: Fingerprint| known.is(&offered))
        };
        let matching: Vec<bool> = content.tokens.iter().map(is_it).collect();
        let Some(found) = matching.iter().position(|is_it| *is_it) else {
            return Ok(Err(Invalid::Token));
        };
        if content.tokens[found].expires_s <= now_s() {
            return Ok(Err(Invalid::TokenExpired));
        }
        let identity = content.tokens.swap_remove(found).identity;
        let issued = self.authority.issue(request, &identity)?;
        self.enter(&mut content, &identity, &issued, None)?;
        drop(lock);
        Ok(Ok((identity, issued)))
    }

    /// Returns true if that is the secret of a token, even of an expired one.
    #[must_use]
    pub fn has_token(&self, secret: &[u8]) -> bool {
        let offered = Fingerprint::of(secret);
        // Compares all, in constant time: the position does not show either.
        self.known().is_ok_and(|known| {
            known.tokens.iter().fold(false, |found, token| found | token.is(&offered))
        })
    }

    /// Signs a successor of the certificate `present`, for its identity. The predecessor of
    /// `present` ends: whoever renews has received `present`. It stays in the register until it
    /// expires, so that work that began with it can be revoked. Other successors of that
    /// predecessor are dropped if nobody has shown them; a shown one is in use, and a thief of the
    /// former certificate can't remove it.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn renew(
        &self,
        identity: &str,
        present: &Fingerprint,
        request: &[u8],
    ) -> Result<Issued, TlsError> {
        let _lock = self.lock()?;
        let mut content = self.load()?;
        let present = present.to_string();
        // Under the lock: it may have been revoked since the call was admitted.
        let counts = |entry: &CertificateEntry| {
            entry.sha256 == present && entry.identity == identity && entry.counts_at(now_s())
        };
        if !content.certificates.iter().any(counts) {
            return Err(TlsError::NotRenewable(identity.to_owned()));
        }
        let issued = self.authority.issue(request, identity)?;
        let entries = &mut content.certificates;
        let shown = self.shown.lock().expect("not poisoned").clone();
        // A renewed certificate was shown, though this process may not have seen it.
        let renewed: HashSet<String> =
            entries.iter().filter_map(|entry| entry.replaces.clone()).collect();
        let is_unused = |entry: &CertificateEntry| {
            let was_shown =
                entry.shown || entry.sha256.parse().is_ok_and(|its| shown.contains(&its));
            !entry.revoked && !was_shown && !renewed.contains(&entry.sha256)
        };
        let present_entry = entries.iter().find(|entry| entry.sha256 == present);
        let enrolment = present_entry.map(|entry| entry.enrolment().to_owned());
        if let Some(before) =
            entries.iter().find(|e| e.sha256 == present).and_then(|e| e.replaces.clone())
        {
            for entry in entries.iter_mut().filter(|entry| entry.sha256 == before) {
                entry.superseded_s = entry.superseded_s.min(Some(now_s())).or(Some(now_s()));
            }
            forget(entries, |e| {
                e.sha256 != present && e.replaces.as_ref() == Some(&before) && is_unused(e)
            });
        }
        let refused = || TlsError::AllInUse(identity.to_owned());
        let is_successor = |e: &CertificateEntry| e.replaces.as_ref() == Some(&present);
        let is_of_enrolment = |e: &CertificateEntry| {
            e.sha256 != present && Some(e.enrolment()) == enrolment.as_deref()
        };
        leave_room(entries, SUCCESSORS, is_successor, &is_unused).ok_or_else(refused)?;
        leave_room(entries, MAX_OF_ENROLMENT - 1, is_of_enrolment, &is_unused)
            .ok_or_else(refused)?;
        if let Some(entry) = entries.iter_mut().find(|entry| entry.sha256 == present) {
            entry.superseded_s = Some(now_s() + SUPERSEDED_S);
        }
        self.enter(
            &mut content,
            identity,
            &issued,
            Some(Predecessor { sha256: present, enrolment }),
        )?;
        Ok(issued)
    }

    /// Enters a certificate issued by other means.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn note(&self, identity: &str, issued: &Issued) -> Result<(), TlsError> {
        let _lock = self.lock()?;
        self.enter(&mut self.load()?, identity, issued, None)
    }

    /// Revokes all certificates and tokens of `identity`; returns their number.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn revoke(&self, identity: &str) -> Result<usize, TlsError> {
        let mut count = 0;
        self.change(|content| {
            let tokens = content.tokens.len();
            content.tokens.retain(|token| token.identity != identity);
            count = tokens - content.tokens.len();
            for entry in content
                .certificates
                .iter_mut()
                .filter(|entry| entry.identity == identity && !entry.revoked)
            {
                entry.revoked = true;
                count += 1;
            }
        })?;
        Ok(count)
    }

    /// Revokes the certificate whose SHA-256 begins with `prefix`, and its successors; returns its
    /// SHA-256. `None` if `identity` has none, or more than one.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn revoke_one(&self, identity: &str, prefix: &str) -> Result<Option<String>, TlsError> {
        let prefix = prefix.to_ascii_lowercase();
        let mut revoked = None;
        self.change(|content| {
            let of_it = |entry: &&mut CertificateEntry| {
                entry.identity == identity && entry.sha256.starts_with(&prefix)
            };
            let found: Vec<_> =
                content.certificates.iter_mut().filter(of_it).map(|e| e.sha256.clone()).collect();
            if let ([sha256], true) = (&found[..], prefix.len() >= PREFIX_DIGITS) {
                revoke_with_successors(&mut content.certificates, sha256);
                revoked = Some(sha256.clone());
            }
        })?;
        Ok(revoked)
    }

    /// Revocations that the audit record lacks, as far as the register says; also those that were
    /// made while no executor was running.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn unrecorded(&self) -> Result<Vec<Revocation>, TlsError> {
        let known = self.known()?;
        let unrecorded =
            known.certificates.values().filter(|e| e.certificate.revoked && !e.recorded);
        Ok(unrecorded
            .map(|entry| Revocation {
                identity: entry.certificate.identity.clone(),
                sha256: entry.certificate.sha256.clone(),
            })
            .collect())
    }

    /// Writes which certificates were shown, and which revocations the audit record has now. No
    /// access to the file when there is nothing to write.
    ///
    /// # Errors
    /// [`TlsError`]; the next call tries again.
    pub fn settle(&self, recorded: &[Revocation]) -> Result<(), TlsError> {
        let shown = self.shown.lock().expect("not poisoned").clone();
        if shown.is_empty() && recorded.is_empty() {
            return Ok(());
        }
        self.change(|content| {
            for entry in &mut content.certificates {
                entry.shown |= entry.sha256.parse().is_ok_and(|its| shown.contains(&its));
                entry.recorded |= recorded.iter().any(|its| its.sha256 == entry.sha256);
            }
        })?;
        self.shown.lock().expect("not poisoned").retain(|its| !shown.contains(its));
        Ok(())
    }

    /// All certificates, oldest first.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn certificates(&self) -> Result<Vec<Certificate>, TlsError> {
        let content = self.load()?;
        Ok(content.certificates.iter().map(Certificate::from).collect())
    }

    fn enter(
        &self,
        content: &mut RegisterContent,
        identity: &str,
        issued: &Issued,
        predecessor: Option<Predecessor>,
    ) -> Result<(), TlsError> {
        make_room(&mut content.certificates, identity)?;
        content.certificates.push(CertificateEntry {
            sha256: Fingerprint::of(&issued.certificate).to_string(),
            identity: identity.to_owned(),
            issued_s: issued.valid_s.start,
            expires_s: issued.valid_s.end,
            revoked: false,
            authority: Some(Fingerprint::of(issued.signed_by()).to_string()),
            retired: false,
            enrolment: predecessor.as_ref().and_then(|before| before.enrolment.clone()),
            replaces: predecessor.map(|before| before.sha256),
            superseded_s: None,
            shown: false,
            recorded: false,
        });
        self.save(content)
    }

    fn change(&self, change: impl FnOnce(&mut RegisterContent)) -> Result<(), TlsError> {
        let _lock = self.lock()?;
        let mut content = self.load()?;
        change(&mut content);
        self.save(&content)
    }

    /// Two processes must not both use one token. Blocks; a holder writes one file.
    pub(super) fn lock(&self) -> Result<File, TlsError> {
        let path = self.path.with_extension("lock");
        let failed = |source| SecretError::Io { attempt: "lock", path: path.clone(), source };
        // Its owner would be locked out by a file of another user's.
        let owner = fs::metadata(self.directory()).map_err(failed)?.uid();
        if owner != geteuid().as_raw() {
            return Err(TlsError::AnotherUsers { directory: self.directory().to_owned(), owner });
        }
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)
            .map_err(failed)?;
        file.lock().map_err(failed)?;
        Ok(file)
    }

    pub(super) fn directory(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    pub(super) fn load(&self) -> Result<RegisterContent, TlsError> {
        let text = match secret::read(&self.path) {
            Err(error) if error.is_missing() => {
                return Err(TlsError::NotMade(self.directory().to_owned()));
            }
            text => text?,
        };
        serde_json::from_str(&text)
            .map_err(|error| TlsError::Damaged { path: self.path.clone(), what: error.to_string() })
    }

    pub(super) fn save(&self, content: &RegisterContent) -> Result<(), TlsError> {
        let now = now_s();
        let mut content = content.clone();
        forget(&mut content.certificates, |entry| entry.expires_s + REMEMBERED_S <= now);
        content.tokens.retain(|token| token.expires_s + TOKEN_LIFETIME_S > now);
        let text = serde_json::to_string_pretty(&content)
            .map_err(|error| TlsError::Make(error.to_string()))?
            + "\n";
        match secret::write(&self.path, &text) {
            // A revocation makes it shorter: it must not wait for room on the disk, which the
            // revoked one may have taken.
            Err(error) if error.is_full() => Ok(secret::overwrite(&self.path, &text)?),
            written => Ok(written?),
        }
    }

    /// Current content of the file: one stat(2) if it is unchanged.
    fn known(&self) -> Result<Arc<RegisterIndex>, TlsError> {
        let stamp = FileVersion::of(&self.path);
        if let (Some(stamp), Some((known_at, known))) =
            (stamp, &*self.known.read().expect("not poisoned"))
            && *known_at == stamp
        {
            return Ok(known.clone());
        }
        let content = self.load()?;
        let entries = content.certificates.iter();
        let pairs = entries.filter_map(|entry| {
            let indexed = IndexedCertificate {
                certificate: Certificate::from(entry),
                enrolment: entry.enrolment().to_owned(),
                shown: entry.shown,
                recorded: entry.recorded,
            };
            Some((entry.sha256.parse().ok()?, indexed))
        });
        let tokens = content.tokens.iter().filter_map(|token| token.sha256.parse().ok());
        let known =
            Arc::new(RegisterIndex { certificates: pairs.collect(), tokens: tokens.collect() });
        // The stamp is older: a change since then is seen next time.
        *self.known.write().expect("not poisoned") = stamp.map(|stamp| (stamp, known.clone()));
        Ok(known)
    }
}

/// The certificate that a renewal was asked for with.
struct Predecessor {
    sha256: String,
    enrolment: Option<String>,
}

impl From<&CertificateEntry> for Certificate {
    fn from(entry: &CertificateEntry) -> Self {
        Self {
            sha256: entry.sha256.clone(),
            identity: entry.identity.clone(),
            issued_s: entry.issued_s,
            expires_s: entry.expires_s,
            revoked: entry.revoked,
            superseded_s: entry.superseded_s,
            retired: entry.retired,
        }
    }
}

/// Removes entries. A successor of a removed entry becomes one of that entry's predecessor.
///
/// Invariant: whatever is removed, `replaces` leads from a certificate to all its predecessors in
/// the register, so that the revocation of any of these revokes it, too.
fn forget(certificates: &mut Vec<CertificateEntry>, is_gone: impl Fn(&CertificateEntry) -> bool) {
    let gone: HashMap<String, Option<String>> = certificates
        .extract_if(.., |entry| is_gone(entry))
        .map(|entry| (entry.sha256, entry.replaces))
        .collect();
    for entry in certificates.iter_mut() {
        // Each step leads to an older certificate; an edited file may have circles.
        for _ in 0..gone.len() {
            let Some(before) = entry.replaces.as_ref().and_then(|replaced| gone.get(replaced))
            else {
                break;
            };
            entry.replaces.clone_from(before);
        }
    }
}

/// Removes the oldest unused ones of the valid entries that are `counted` until fewer than `most`
/// are left; `None` if too many are in use.
fn leave_room(
    certificates: &mut Vec<CertificateEntry>,
    most: usize,
    counted: impl Fn(&CertificateEntry) -> bool,
    is_unused: &impl Fn(&CertificateEntry) -> bool,
) -> Option<()> {
    let now = now_s();
    loop {
        let valid: Vec<_> =
            certificates.iter().filter(|entry| entry.counts_at(now) && counted(entry)).collect();
        if valid.len() < most {
            return Some(());
        }
        let unused = valid.into_iter().filter(|entry| is_unused(entry));
        let oldest = unused.min_by_key(|entry| entry.issued_s)?.sha256.clone();
        forget(certificates, |entry| entry.sha256 == oldest);
    }
}

/// Revokes successors, too: the holder of a revoked certificate's key may have renewed it.
fn revoke_with_successors(certificates: &mut [CertificateEntry], sha256: &str) {
    let mut revoked = vec![sha256.to_owned()];
    while let Some(sha256) = revoked.pop() {
        for entry in certificates.iter_mut() {
            if entry.sha256 == sha256 {
                entry.revoked = true;
            }
            if entry.replaces.as_ref() == Some(&sha256) && !entry.revoked {
                revoked.push(entry.sha256.clone());
            }
        }
    }
}

/// Makes room for one more of `identity`: invalid entries are removed before anything is refused.
fn make_room(certificates: &mut Vec<CertificateEntry>, identity: &str) -> Result<(), TlsError> {
    let now = now_s();
    trim_shares(certificates, now);
    while certificates.iter().filter(|entry| entry.identity == identity).count() >= MAX_OF_ONE {
        let spent =
            certificates.iter().find(|entry| entry.identity == identity && !entry.counts_at(now));
        let spent =
            spent.ok_or_else(|| TlsError::FullOf(identity.to_owned(), MAX_OF_ONE))?.sha256.clone();
        forget(certificates, |entry| entry.sha256 == spent);
    }
    while certificates.len() >= MAX_CERTIFICATES {
        // Unknown certificates are not accepted either.
        let spent = certificates.iter().find(|entry| !entry.counts_at(now));
        let spent = spent.ok_or(TlsError::Full(MAX_CERTIFICATES))?.sha256.clone();
        forget(certificates, |entry| entry.sha256 == spent);
    }
    Ok(())
}

/// Leaves each identity its newest `MAX_OF_ONE`, valid ones before others: an older version of this
/// program, or an editor, may have entered more, and other identities must not pay for them.
fn trim_shares(certificates: &mut Vec<CertificateEntry>, now: u64) {
    let mut newest_first: Vec<usize> = (0..certificates.len()).rev().collect();
    newest_first.sort_by_key(|index| !certificates[*index].counts_at(now));
    let mut counts: HashMap<String, usize> = HashMap::new();
    let mut beyond = HashSet::new();
    for index in newest_first {
        let count = counts.entry(certificates[index].identity.clone()).or_default();
        *count += 1;
        if *count > MAX_OF_ONE {
            beyond.insert(certificates[index].sha256.clone());
        }
    }
    if !beyond.is_empty() {
        forget(certificates, |entry| beyond.contains(&entry.sha256));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(identity: &str, number: usize, revoked: bool) -> CertificateEntry {
        let (sha256, identity) = (format!("{number:064x}"), identity.to_owned());
        let (issued_s, expires_s) = (now_s(), now_s() + 1000);
        let (authority, retired, replaces, superseded_s) = (None, false, None, None);
        CertificateEntry {
            sha256,
            identity,
            issued_s,
            expires_s,
            revoked,
            authority,
            retired,
            replaces,
            superseded_s,
            enrolment: None,
            shown: false,
            recorded: false,
        }
    }

    #[test]
    fn who_has_filled_the_register_before_leaves_room_for_others() {
        let mut all: Vec<_> =
            (0..MAX_CERTIFICATES).map(|number| entry("bob", number, number % 2 == 0)).collect();
        make_room(&mut all, "ada").unwrap();
        assert_eq!(all.len(), MAX_OF_ONE);
        assert!(all.iter().all(|entry| !entry.revoked));
        assert_eq!(all.last().unwrap().sha256, format!("{:064x}", MAX_CERTIFICATES - 1));
        assert!(matches!(make_room(&mut all, "bob"), Err(TlsError::FullOf(..))));
    }

    /// In a mount namespace of its own, which takes root.
    #[test]
    fn a_revocation_counts_though_the_disk_is_full() {
        use nix::mount::{MsFlags, mount};
        const OF_THE_CHILD: &str = "POSH_TEST_FULL_DISK";
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let Some(directory) = std::env::var_os(OF_THE_CHILD) else {
            // A mount below /tmp is nobody's that one trusts.
            let directory =
                tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap());
            let directory = directory.unwrap();
            let mut child = std::process::Command::new("unshare");
            child.args(["--mount", "--propagation", "private"]);
            child.arg(std::env::current_exe().unwrap()).args(["--exact", "--nocapture"]);
            child.arg("tls::register::tests::a_revocation_counts_though_the_disk_is_full");
            let ended = child.env(OF_THE_CHILD, directory.path()).output().unwrap();
            let said = String::from_utf8_lossy(&ended.stdout);
            return assert!(ended.status.success() && said.contains("1 passed"), "{ended:?}");
        };
        let (path, none) = (Path::new(&directory), None::<&str>);
        mount(none, path, Some("tmpfs"), MsFlags::empty(), Some("size=64k,mode=700")).unwrap();
        let register = Register::at(path);
        register.create(&[]).unwrap();
        let certificates = (0..9).map(|number| entry("ada", number, false)).collect();
        register.save(&RegisterContent { certificates, ..Default::default() }).unwrap();
        drop(register.lock().unwrap());
        let mut fill = File::create(path.join("fill")).unwrap();
        while std::io::Write::write(&mut fill, &[0; 4096]).is_ok_and(|count| count > 0) {}
        assert!(register.token_for("ada").is_err());
        assert_eq!(register.revoke("ada").unwrap(), 9);
        assert!(register.certificates().unwrap().iter().all(|it| it.revoked));
    }

    #[test]
    fn nothing_is_made_in_another_users_directory() {
        if !geteuid().is_root() {
            return;
        }
        let (theirs, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let register = Register::at(theirs.path());
        register.create(&[]).unwrap();
        std::os::unix::fs::chown(theirs.path(), Some(4711), None).unwrap();
        assert!(matches!(register.revoke("ada"), Err(TlsError::AnotherUsers { owner: 4711, .. })));
        let link = theirs.path().join("register.lock");
        fs::remove_file(&link).ok();
        std::os::unix::fs::symlink(elsewhere.path().join("made"), &link).unwrap();
        std::os::unix::fs::chown(theirs.path(), Some(0), None).unwrap();
        assert!(register.lock().is_err());
        assert!(!elsewhere.path().join("made").exists());
    }

    #[test]
    fn a_revocation_reaches_what_was_got_over_certificates_that_are_forgotten() {
        let mut all: Vec<_> = (0..5).map(|number| entry("ada", number, false)).collect();
        for number in 1..5 {
            all[number].replaces = Some(all[number - 1].sha256.clone());
        }
        forget(&mut all, |entry| ["1", "2", "3"].iter().any(|digit| entry.sha256.ends_with(digit)));
        let [first, last] = &all[..] else { panic!("{all:?}") };
        assert_eq!(last.replaces.as_ref(), Some(&first.sha256));
        let first = first.sha256.clone();
        revoke_with_successors(&mut all, &first);
        assert!(all.iter().all(|entry| entry.revoked));
        // The successor of a removed first certificate has no predecessor.
        forget(&mut all, |entry| entry.sha256 == first);
        assert_eq!((all.len(), all[0].replaces.as_ref()), (1, None));
    }

    #[test]
    fn what_was_revoked_makes_way_when_the_register_is_full() {
        let revoked = |number: usize| number.is_multiple_of(100);
        let mut all: Vec<_> = (0..MAX_CERTIFICATES)
            .map(|number| {
                entry(&format!("identity-{}", number / MAX_OF_ONE), number, revoked(number))
            })
            .collect();
        make_room(&mut all, "ada").unwrap();
        assert_eq!(
            (all.len(), all.iter().filter(|entry| entry.revoked).count()),
            (MAX_CERTIFICATES - 1, 99)
        );
        all.iter_mut().for_each(|entry| entry.revoked = false);
        all.push(entry("eve", 1, false));
        assert!(matches!(make_room(&mut all, "ada"), Err(TlsError::Full(_))));
    }
}
