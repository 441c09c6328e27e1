//! Who is let in: from what a connection has proved to a [`Caller`]. Asked at every call,
//! so that what the register and the configuration say counts at once, also on
//! connections that are open already.

use std::{
    sync::{Arc, Mutex, RwLock},
    time::{Duration, Instant},
};

use posh_proto::token::Fingerprint;
use tokio::sync::Semaphore;
use tonic::{Request, Status, body::Body, codegen::http, service::Interceptor};

use crate::{
    audit::AuditLog,
    callers::{Caller, Callers},
    load::{ConnectionShare, Load},
    metered::{Accounts, Arrived, Charge, Charged, Largest, Metered},
    tls::{
        accept::Peer,
        register::Invalid,
        serving::{Proof, Serving},
    },
};

/// The calls by which more than one message comes.
const STREAMS: [&str; 2] = ["/posh.executor.v1.Executor/Run", "/posh.volume.v1.Volume/Session"];

/// For who shows no certificate.
const NO_CERTIFICATE: &str = "this executor wants to know who calls, and this workstation has no certificate for it; \
                              run `posh-executor enroll NAME` there and `posh enroll ADDRESS TOKEN` here";

/// How often it is asked whether who has a run at work may still be here: one stat(2), unless the
/// register has changed.
pub const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// A register that can't be read for so long ends what is at work: nobody knows any more what was
/// revoked.
const REGISTER_PATIENCE: Duration = Duration::from_secs(5);

/// Since when the register can't be read.
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

/// Decides about connections, calls and runs at work.
#[derive(Clone)]
pub struct Admission {
    /// Another one after the configuration was read anew.
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
}

/// Why somebody is not let in: a sentence for its user.
#[derive(Debug)]
pub struct Denied(pub String);

impl From<Invalid> for Denied {
    fn from(invalid: Invalid) -> Self {
        Self(invalid.to_string())
    }
}

impl Admission {
    /// By these callers; without TLS all are anybody.
    pub fn new(
        callers: Callers,
        tls: Option<Arc<Serving>>,
        load: Arc<Load>,
        audit: AuditLog,
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
        }
    }

    /// From now on these may come; it counts for calls, and for the runs of who may come no more.
    pub fn change(&self, callers: Callers) {
        *self.callers.write().expect("not poisoned") = Arc::new(callers);
    }

    fn callers(&self) -> Arc<Callers> {
        self.callers.read().expect("not poisoned").clone()
    }

    /// Waits until who has proved this may no longer be here: revoked, replaced twice, or without a
    /// place in the configuration. A certificate that has expired, or a register that can't be read
    /// for a moment, ends nothing that is at work.
    pub async fn removed(&self, proof: &Proof) -> Denied {
        if !matches!(proof, Proof::Certificate(_)) {
            return std::future::pending().await;
        }
        loop {
            match self.standing(proof) {
                Err(denied) => return denied,
                Ok(_) => tokio::time::sleep(LOOK_INTERVAL).await,
            }
        }
    }

    /// What who has proved this may do at this moment with what is at work already. `None`: nothing
    /// else is known than when it began, since the register can't be read just now; only for
    /// [`REGISTER_PATIENCE`], since who is at work may be the reason.
    pub fn standing(&self, proof: &Proof) -> Result<Option<Arc<Caller>>, Denied> {
        match (proof, &self.tls) {
            (Proof::NotAsked, None) => Ok(Some(self.callers().anybody.clone())),
            (Proof::Certificate(certificate), Some(tls)) => {
                match self.identity_of(tls, certificate) {
                    Ok(name) => {
                        self.callers().identity(&name).map(Some).ok_or_else(|| unplaced(&name))
                    }
                    // What is at work began with a certificate that was known: unknown since is one
                    // that later renewals have removed, which no revocation could name any more.
                    Err(ended @ (Invalid::Revoked(_) | Invalid::Unknown)) => Err(ended.into()),
                    // What has begun may go on, as far as the configuration lets its identity.
                    Err(
                        Invalid::Expired(name) | Invalid::Superseded(name) | Invalid::Retired(name),
                    ) => self.callers().identity(&name).map(Some).ok_or_else(|| unplaced(&name)),
                    Err(unread @ Invalid::Register) if self.unread.is_long() => Err(unread.into()),
                    Err(_) => Ok(None),
                }
            }
            _ => Ok(None),
        }
    }

    fn identity_of(&self, tls: &Serving, certificate: &Fingerprint) -> Result<String, Invalid> {
        let known = tls.register.identity_of(certificate);
        self.unread.note(!matches!(known, Err(Invalid::Register)));
        known
    }

    /// Who has proved this.
    pub fn caller(&self, proof: &Proof) -> Result<Arc<Caller>, Denied> {
        let certificate = match (proof, &self.tls) {
            (Proof::NotAsked, None) => return Ok(self.callers().anybody.clone()),
            (Proof::Useless(why), _) => return Err(Denied(why.clone())),
            (Proof::Certificate(certificate), Some(tls)) => self.identity_of(tls, certificate)?,
            _ => return Err(Denied(NO_CERTIFICATE.to_owned())),
        };
        self.callers().identity(&certificate).ok_or_else(|| unplaced(&certificate))
    }

    /// Room for a connection that has proved this.
    pub fn connection(&self, proof: &Proof) -> Result<ConnectionShare, Denied> {
        let caller = self.caller(proof)?;
        self.load.admit_connection(&caller).map_err(Denied)
    }

    /// The account of what a caller's runs have queued.
    pub fn queued(&self, caller: &Caller) -> Arc<Semaphore> {
        self.queued.account(caller.identity.as_ref())
    }

    /// The account of large frames that a caller's runs have not sent.
    pub fn frames(&self, caller: &Caller) -> Arc<Semaphore> {
        self.frames.account(caller.identity.as_ref())
    }

    /// Has what a request brings counted, and says who is charged for the answer. A stranger's is
    /// bounded by its connection; who is refused here, hears of it from the call itself.
    pub fn meter(&self, mut request: http::Request<Body>) -> (http::Request<Body>, Charged) {
        let proof =
            request.extensions().get().map_or(Proof::Nothing, |peer: &Peer| peer.proof.clone());
        let Ok(caller) = self.caller(&proof) else { return (request, Charged::default()) };
        let (share, refused) = match self.load.admit_open_call(&caller) {
            Ok(share) => (Some(Arc::new(share)), None),
            Err(why) => (None, Some(Status::resource_exhausted(why))),
        };
        let charged = Charged {
            share: share.clone(),
            untaken: Some(self.untaken.account(caller.identity.as_ref())),
        };
        let charge = if STREAMS.contains(&request.uri().path()) {
            let largest = Largest::on(self.streams.account(caller.identity.as_ref()));
            request.extensions_mut().insert(largest.clone());
            Charge::Stream(largest)
        } else {
            let arrived = Arrived::default();
            request.extensions_mut().insert(arrived.clone());
            Charge::Unary(self.unfinished.account(caller.identity.as_ref()), arrived)
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
        // Every transport of ours says who its peer is: without, nothing is known.
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
