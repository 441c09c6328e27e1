//! The gRPC service that issues certificates to gateways: the first for a token, each next one for
//! the one before.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use posh_proto::executor::{
    EnrolRequest, IssuedCertificate, RenewRequest, enrolment_server::Enrolment,
};
use tonic::{Request, Response, Status};

use crate::{
    accept::{Peer, SeatUnit},
    admission::{Admission, Denied, peer_name},
    audit::{AuditLog, CertificateEvent},
    tls::{
        authority::Issued,
        register::{Invalid, Register},
        serving::{Proof, Serving},
    },
};

/// Failed attempts of one source address, at once and over time. A token has 128 bits, and a right
/// one is always accepted: this only keeps the log short.
const FAILURES: Rate = Rate { at_once: 20, interval: Duration::from_millis(500) };

/// Renewals of what descends from one enrolment, a workstation's, each of which signs and writes a
/// file: one is due once in two months.
const RENEWALS: Rate = Rate { at_once: 20, interval: Duration::from_secs(30) };

/// Sources or enrolments that are counted; beyond, the one that was idle longest is forgotten.
const COUNTED: usize = 4096;

/// A request of ours has some 250 bytes.
const MAX_REQUEST_BYTES: usize = 16 << 10;

/// The service; unimplemented without TLS.
pub struct Enrolments {
    tls: Option<Arc<Serving>>,
    admission: Admission,
    audit: AuditLog,
    failures: Mutex<Buckets<Option<SeatUnit>>>,
    renewals: Mutex<Buckets<String>>,
}

/// A token bucket's size, and the interval in which one token is added.
#[derive(Debug, Clone, Copy)]
struct Rate {
    at_once: u32,
    interval: Duration,
}

/// Token buckets by key.
struct Buckets<K> {
    rate: Rate,
    by: HashMap<K, Bucket>,
}

struct Bucket {
    left: u32,
    since: Instant,
}

impl Enrolments {
    /// For an executor with that TLS.
    pub fn new(tls: Option<Arc<Serving>>, admission: Admission, audit: AuditLog) -> Self {
        let (failures, renewals) =
            (Mutex::new(Buckets::new(FAILURES)), Mutex::new(Buckets::new(RENEWALS)));
        Self { tls, admission, audit, failures, renewals }
    }

    fn register(&self) -> Result<Arc<Register>, Status> {
        let tls = self.tls.as_ref();
        tls.map(|tls| tls.register.clone())
            .ok_or_else(|| Status::unimplemented("this executor needs no certificates"))
    }

    /// Counts a failed attempt.
    fn failed(&self, peer: Option<&Peer>, invalid: &Invalid) -> Status {
        let source = peer.and_then(|peer| peer.address).map(|address| SeatUnit::of(address.ip()));
        if !self.failures.lock().expect("not poisoned").take(source) {
            return Status::resource_exhausted(
                "too many failed enrolments from this address; try again in a minute",
            );
        }
        if self.audit.refused("-", &peer_name(peer), "enrolment") {
            tracing::warn!(peer = peer_name(peer), "enrolment refused: {invalid}");
        }
        Status::permission_denied(invalid.to_string())
    }
}

impl<K: Eq + Hash + Clone> Buckets<K> {
    fn new(rate: Rate) -> Self {
        Self { rate, by: HashMap::new() }
    }

    fn take(&mut self, key: K) -> bool {
        let Rate { at_once, interval } = self.rate;
        if self.by.len() >= COUNTED && !self.by.contains_key(&key) {
            let idle =
                self.by.iter().min_by_key(|(_, bucket)| bucket.since).map(|(key, _)| key.clone());
            if let Some(key) = idle {
                self.by.remove(&key);
            }
        }
        let bucket =
            self.by.entry(key).or_insert_with(|| Bucket { left: at_once, since: Instant::now() });
        let earned = bucket.since.elapsed().as_nanos() / interval.as_nanos();
        let earned = u32::try_from(earned).unwrap_or(at_once).min(at_once);
        if earned > 0 {
            bucket.left = (bucket.left + earned).min(at_once);
            bucket.since = Instant::now();
        }
        let is_left = bucket.left > 0;
        bucket.left = bucket.left.saturating_sub(1);
        is_left
    }
}

#[tonic::async_trait]
impl Enrolment for Enrolments {
    async fn enrol(
        &self,
        request: Request<EnrolRequest>,
    ) -> Result<Response<IssuedCertificate>, Status> {
        let register = self.register()?;
        let peer = request.extensions().get::<Peer>().cloned();
        let EnrolRequest { secret, signing_request } = request.into_inner();
        require_size(&signing_request)?;
        // A guess costs a hash, and no access to the file.
        if !register.has_token(&secret) {
            return Err(self.failed(peer.as_ref(), &Invalid::Token));
        }
        let enrolled = off_thread(move || register.enrol(&secret, &signing_request)).await?;
        match enrolled {
            Ok((identity, issued)) => {
                let peer = peer_name(peer.as_ref());
                tracing::info!(identity, peer, "enrolled");
                self.audit.certificate(CertificateEvent::Enrolled, &identity, &peer, &issued);
                Ok(Response::new(reply(identity, &issued)))
            }
            Err(invalid) => Err(self.failed(peer.as_ref(), &invalid)),
        }
    }

    async fn renew(
        &self,
        request: Request<RenewRequest>,
    ) -> Result<Response<IssuedCertificate>, Status> {
        let register = self.register()?;
        let proof =
            request.extensions().get().map_or(Proof::Nothing, |peer: &Peer| peer.proof.clone());
        let caller =
            self.admission.caller(&proof).map_err(|Denied(why)| Status::unauthenticated(why))?;
        let identity =
            caller.identity.clone().ok_or_else(|| Status::internal("a caller without identity"))?;
        let peer = peer_name(request.extensions().get());
        let Proof::Certificate(present) = proof else {
            return Err(Status::internal("a caller without certificate"));
        };
        let signing_request = request.into_inner().signing_request;
        require_size(&signing_request)?;
        let enrolment = register.enrolment_of(&present).unwrap_or_default();
        if !self.renewals.lock().expect("not poisoned").take(enrolment) {
            return Err(Status::resource_exhausted(
                "too many renewals of this workstation's certificate; try again in an hour",
            ));
        }
        let issued = {
            let identity = identity.clone();
            off_thread(move || register.renew(&identity, &present, &signing_request)).await?
        };
        tracing::info!(identity, peer, "certificate renewed");
        self.audit.certificate(CertificateEvent::Renewed, &identity, &peer, &issued);
        Ok(Response::new(reply(identity, &issued)))
    }
}

fn require_size(signing_request: &[u8]) -> Result<(), Status> {
    if signing_request.len() <= MAX_REQUEST_BYTES {
        return Ok(());
    }
    Err(Status::invalid_argument("the signing request is too long"))
}

/// Runs blocking work, signing and file access, off the runtime's threads.
async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, crate::tls::TlsError> + Send + 'static,
) -> Result<T, Status> {
    let done = tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Status::internal(error.to_string()))?;
    done.map_err(|error| {
        tracing::error!("cannot issue a certificate: {error}");
        Status::internal("this executor cannot issue a certificate just now; its log says why")
    })
}

fn reply(identity: String, issued: &Issued) -> IssuedCertificate {
    IssuedCertificate {
        identity,
        certificate: issued.certificate.to_vec().into(),
        authority: issued.authority.to_vec().into(),
        next_authority: issued.next_authority.as_deref().unwrap_or_default().to_vec().into(),
        issued_s: issued.valid_s.start,
        expires_s: issued.valid_s.end,
    }
}
