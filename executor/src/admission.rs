//! Admission: maps what a connection has proved to a [`Caller`]. Decided at every call, so that
//! changes of the register and the configuration apply at once, also to connections that are
//! already open.

use std::{
    sync::{Arc, Mutex, RwLock},
    time::{Duration, Instant},
};

use posh_proto::token::Fingerprint;
use tokio::sync::{Semaphore, mpsc};
use tonic::{Request, Status, body::Body, codegen::http, service::Interceptor};

use crate::{
    accept::Peer,
    audit::AuditLog,
    callers::{AbsentAccount, Caller, Callers},
    load::{ConnectionShare, Load},
    metered::{Accounts, Arrived, Charged, ChargedAccount, Largest, Metered},
    tls::{
        register::Invalid,
        serving::{Proof, Serving},
    },
};

/// Calls with a stream of requests.
const STREAMS: [&str; 2] = ["/posh.executor.v1.Executor/Run", "/posh.volume.v1.Volume/Session"];

/// Answer to a peer without a certificate.
const NO_CERTIFICATE: &str = "this executor wants to know who calls, and this workstation has no \
                              certificate for it; run `posh-executor enroll NAME` there and \
                              `posh enroll ADDRESS TOKEN` here";

/// Interval at which the identity of running work is checked again: one stat(2), unless the
/// register has changed.
pub const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// A register that is unreadable for so long ends running work: nobody knows any more what was
/// revoked.
const REGISTER_PATIENCE: Duration = Duration::from_secs(5);

/// Time since which the register is unreadable.
#[derive(Debug, Default)]
struct Unread(Mutex<Option<Instant>>);

impl Unread {
    fn note(&self, is_read: bool) {
        let mut since = self.0.lock().expect("not poisoned");
        *since = if is_read { None } else { Some(since.unwrap_or_else(Instant::now)) };
    }

    fn is_long(&self) -> bool {
        self.0
            .lock()
            .expect("not poisoned")
            .is_some_and(|since| since.elapsed() >= REGISTER_PATIENCE)
    }
}

/// Decides about connections, calls and running work.
#[derive(Clone)]
pub struct Admission {
    /// Replaced when the configuration is read again.
    callers: Arc<RwLock<Arc<Callers>>>,
    tls: Option<Arc<Serving>>,
    unread: Arc<Unread>,
    load: Arc<Load>,
    unfinished: Arc<Accounts>,
    streams: Arc<Accounts>,
    untaken: Arc<Accounts>,
    queued: Arc<Accounts>,
    frames: Arc<Accounts>,
    audit: AuditLog,
    /// Accounts of identities that want to be let in and can't; see [`crate::ConfigChanges`].
    attempts: mpsc::Sender<String>,
}

/// Effect of a certificate that has expired, or that its renewal or a change of the authority has
/// replaced. A revoked one is always refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LapsedCertificate {
    Suffices,
    IsRefused,
}

/// Reason of a denial: a sentence for the user.
#[derive(Debug)]
pub struct Denied(pub String);

impl From<Invalid> for Denied {
    fn from(invalid: Invalid) -> Self {
        Self(invalid.to_string())
    }
}

impl Admission {
    /// Without TLS every peer is `anybody`.
    pub fn new(
        callers: Callers,
        tls: Option<Arc<Serving>>,
        load: Arc<Load>,
        audit: AuditLog,
        attempts: mpsc::Sender<String>,
    ) -> Self {
        let unfinished = Arc::new(Accounts::of_unfinished(callers.count()));
        let streams = Arc::new(Accounts::of_streams(callers.count()));
        let untaken = Arc::new(Accounts::of_untaken(callers.count()));
        let queued = Arc::new(Accounts::of_queued(callers.count()));
        let frames = Arc::new(Accounts::of_queued(callers.count()));
        let callers = Arc::new(RwLock::new(Arc::new(callers)));
        Self {
            callers,
            tls,
            unread: Arc::default(),
            load,
            unfinished,
            streams,
            untaken,
            queued,
            frames,
            audit,
            attempts,
        }
    }

    /// Replaces the callers, for new calls and for running work.
    pub fn change(&self, callers: Callers) {
        *self.callers.write().expect("not poisoned") = Arc::new(callers);
    }

    fn callers(&self) -> Arc<Callers> {
        self.callers.read().expect("not poisoned").clone()
    }

    /// Waits until this proof no longer admits: its certificate is revoked, or replaced twice, its
    /// identity is not in the configuration, or the account is gone. An expired certificate, or a
    /// register that is unreadable for a moment, ends no running work.
    pub async fn removed(&self, proof: &Proof) -> Denied {
        if !matches!(proof, Proof::Certificate(_) | Proof::NotAsked) {
            return std::future::pending().await;
        }
        loop {
            match self.standing(proof) {
                Err(denied) => return denied,
                Ok(_) => tokio::time::sleep(LOOK_INTERVAL).await,
            }
        }
    }

    /// Rights that this proof gives a running command at this moment. A certificate that has lapsed
    /// ends no command. `None`: as at its start; see [`Self::admitted`].
    pub fn standing(&self, proof: &Proof) -> Result<Option<Arc<Caller>>, Denied> {
        self.rights(proof, LapsedCertificate::Suffices)
    }

    /// Rights that this proof gives a volume at this moment: those of a new call, since a session
    /// is an unlimited number of them. `None`: as at its start, since the register is unreadable
    /// just now; only for [`REGISTER_PATIENCE`], since running work may be the reason.
    pub fn admitted(&self, proof: &Proof) -> Result<Option<Arc<Caller>>, Denied> {
        self.rights(proof, LapsedCertificate::IsRefused)
    }

    fn rights(
        &self,
        proof: &Proof,
        lapsed: LapsedCertificate,
    ) -> Result<Option<Arc<Caller>>, Denied> {
        match (proof, &self.tls) {
            (Proof::NotAsked, None) => self.anybody().map(Some),
            (Proof::Certificate(certificate), Some(tls)) => {
                let name = match self.identity_of(tls, certificate) {
                    Ok(name) => name,
                    // As far as the configuration still admits the identity.
                    Err(
                        Invalid::Expired(name) | Invalid::Superseded(name) | Invalid::Retired(name),
                    ) if lapsed == LapsedCertificate::Suffices => name,
                    Err(Invalid::Register) if !self.unread.is_long() => return Ok(None),
                    // Running work began with a known certificate: unknown now means that later
                    // renewals have removed it, and no revocation could name it any more.
                    Err(ended) => return Err(ended.into()),
                };
                self.placed(&name).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn identity_of(&self, tls: &Serving, certificate: &Fingerprint) -> Result<String, Invalid> {
        let known = tls.register.identity_of(certificate);
        self.unread.note(!matches!(known, Err(Invalid::Register)));
        known
    }

    /// The caller that this proof identifies.
    pub fn caller(&self, proof: &Proof) -> Result<Arc<Caller>, Denied> {
        let certificate = match (proof, &self.tls) {
            (Proof::NotAsked, None) => return self.anybody(),
            (Proof::Useless(why), _) => return Err(Denied(why.clone())),
            (Proof::Certificate(certificate), Some(tls)) => self.identity_of(tls, certificate)?,
            _ => return Err(Denied(NO_CERTIFICATE.to_owned())),
        };
        self.placed(&certificate)
    }

    /// The caller with that proved name.
    fn placed(&self, name: &str) -> Result<Arc<Caller>, Denied> {
        let callers = self.callers();
        if let Some(caller) = callers.identity(name) {
            return Ok(caller);
        }
        let Some(account) = callers.absent_account(name) else { return Err(unplaced(name)) };
        Err(self.absent(account, &format!("`{name}` is an identity of this executor, but its")))
    }

    /// The caller without a proof.
    fn anybody(&self) -> Result<Arc<Caller>, Denied> {
        let callers = self.callers();
        callers
            .anybody
            .clone()
            .map_err(|AbsentAccount(account)| self.absent(&account, "this executor's"))
    }

    /// Has an absent account looked up again, and denies what it was wanted for.
    fn absent(&self, account: &str, whose: &str) -> Denied {
        // Where more wait than fit, each is looked up again soon anyway.
        let _ = self.attempts.try_send(account.to_owned());
        Denied(format!(
            "{whose} account is not known on that machine at present; it is looked up again at \
             each attempt, and the executor's log says more to its administrator"
        ))
    }

    /// A slot for a connection with this proof.
    pub fn connection(&self, proof: &Proof) -> Result<ConnectionShare, Denied> {
        let caller = self.caller(proof)?;
        self.load.admit_connection(&caller).map_err(|refusal| Denied(refusal.message))
    }

    /// The caller's account of messages that its runs have queued.
    pub fn queued(&self, caller: &Caller) -> Arc<Semaphore> {
        self.queued.account(caller.identity.as_ref())
    }

    /// The caller's account of large frames that its runs have not sent.
    pub fn frames(&self, caller: &Caller) -> Arc<Semaphore> {
        self.frames.account(caller.identity.as_ref())
    }

    /// Meters the request's body, and returns the account that is charged for the answer. A
    /// stranger's body is bounded by its connection. The call itself reports a refusal.
    pub fn meter(&self, mut request: http::Request<Body>) -> (http::Request<Body>, Charged) {
        let proof =
            request.extensions().get().map_or(Proof::Nothing, |peer: &Peer| peer.proof.clone());
        let Ok(caller) = self.caller(&proof) else { return (request, Charged::default()) };
        let (share, refused) = match self.load.admit_open_call(&caller) {
            Ok(share) => (Some(Arc::new(share)), None),
            Err(refusal) => (None, Some(Status::resource_exhausted(refusal.message))),
        };
        let charged = Charged {
            share: share.clone(),
            untaken: Some(self.untaken.account(caller.identity.as_ref())),
        };
        let charge = if STREAMS.contains(&request.uri().path()) {
            let largest = Largest::on(self.streams.account(caller.identity.as_ref()));
            request.extensions_mut().insert(largest.clone());
            ChargedAccount::Stream(largest)
        } else {
            let arrived = Arrived::default();
            request.extensions_mut().insert(arrived.clone());
            ChargedAccount::Unary(self.unfinished.account(caller.identity.as_ref()), arrived)
        };
        (request.map(|body| Body::new(Metered::new(body, charge, refused, share))), charged)
    }
}

fn unplaced(identity: &str) -> Denied {
    let hint =
        format!("its administrator adds [[identity]] name = {identity:?} and sends it SIGHUP");
    Denied(format!("`{identity}` has no place in the configuration of this executor; {hint}"))
}

impl Interceptor for Admission {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let peer = request.extensions().get::<Peer>();
        // Every transport of ours sets its peer; without a peer, nothing is proved.
        let proof = peer.map_or(&Proof::Nothing, |peer| &peer.proof);
        match self.caller(proof) {
            Ok(caller) => {
                request.extensions_mut().insert(caller);
                Ok(request)
            }
            Err(Denied(why)) => {
                let peer = peer_name(peer);
                if self.audit.refused("-", &peer, "call") {
                    tracing::info!(peer, why, "call refused");
                }
                Err(Status::unauthenticated(why))
            }
        }
    }
}

/// A peer's address for the log.
pub fn peer_name(peer: Option<&Peer>) -> String {
    peer.and_then(|peer| peer.address)
        .map_or_else(|| "unknown".to_owned(), |address| address.to_string())
}
