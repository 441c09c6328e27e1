//! The gRPC service by which a gateway gets its certificate: with a token the first, with
//! a certificate the next one.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use posh_proto::executor::{EnrolRequest, IssuedCertificate, RenewRequest, enrolment_server::Enrolment};
use tonic::{Request, Response, Status};

use crate::{
    admission::{Admission, Denied, peer_name},
    tls::{
        accept::Peer,
        authority::Issued,
        register::Register,
        serving::{Proof, Serving},
    },
};

/// Attempts that may come at once, and how fast there may be more. A secret has 128 bits:
/// this is against the work that they make, which is signing and writing a file.
const ATTEMPTS: u32 = 20;
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(500);

/// A request of ours has some 250 bytes.
const MAX_REQUEST_BYTES: usize = 16 << 10;

/// The service; without TLS there is none.
pub struct Enrolments {
    tls: Option<Arc<Serving>>,
    admission: Admission,
    attempts: Mutex<Attempts>,
}

/// How many are left, and since when.
struct Attempts {
    left: u32,
    since: Instant,
}

impl Enrolments {
    /// For an executor with that TLS.
    pub fn new(tls: Option<Arc<Serving>>, admission: Admission) -> Self {
        Self { tls, admission, attempts: Mutex::new(Attempts { left: ATTEMPTS, since: Instant::now() }) }
    }

    fn register(&self) -> Result<Arc<Register>, Status> {
        let tls = self.tls.as_ref();
        tls.map(|tls| tls.register.clone()).ok_or_else(|| Status::unimplemented("this executor needs no certificates"))
    }
}

impl Attempts {
    fn take(&mut self) -> bool {
        let interval = ATTEMPT_INTERVAL.as_secs_f64();
        let earned = (self.since.elapsed().as_secs_f64() / interval).min(f64::from(ATTEMPTS));
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and ATTEMPTS")]
        let earned = earned as u32;
        if earned > 0 {
            self.left = (self.left + earned).min(ATTEMPTS);
            self.since = Instant::now();
        }
        let is_left = self.left > 0;
        self.left = self.left.saturating_sub(1);
        is_left
    }
}

#[tonic::async_trait]
impl Enrolment for Enrolments {
    async fn enrol(&self, request: Request<EnrolRequest>) -> Result<Response<IssuedCertificate>, Status> {
        let register = self.register()?;
        if !self.attempts.lock().expect("not poisoned").take() {
            return Err(Status::resource_exhausted("too many enrolments at once; try again in a few seconds"));
        }
        let peer = peer_name(request.extensions().get());
        let EnrolRequest { secret, signing_request } = request.into_inner();
        require_size(&signing_request)?;
        let enrolled = off_thread(move || register.enrol(&secret, &signing_request)).await?;
        match enrolled {
            Ok((identity, issued)) => {
                tracing::info!(identity, peer, "enrolled");
                Ok(Response::new(reply(identity, &issued)))
            }
            Err(invalid) => {
                tracing::warn!(peer, "enrolment refused: {invalid}");
                Err(Status::permission_denied(invalid.to_string()))
            }
        }
    }

    async fn renew(&self, request: Request<RenewRequest>) -> Result<Response<IssuedCertificate>, Status> {
        let register = self.register()?;
        let proof = request.extensions().get().map_or(Proof::Nothing, |peer: &Peer| peer.proof.clone());
        let caller = self.admission.caller(&proof).map_err(|Denied(why)| Status::unauthenticated(why))?;
        let identity = caller.identity.clone().ok_or_else(|| Status::internal("a caller without identity"))?;
        let peer = peer_name(request.extensions().get());
        let signing_request = request.into_inner().signing_request;
        require_size(&signing_request)?;
        let issued = {
            let identity = identity.clone();
            off_thread(move || register.renew(&identity, &signing_request)).await?
        };
        tracing::info!(identity, peer, "certificate renewed");
        Ok(Response::new(reply(identity, &issued)))
    }
}

fn require_size(signing_request: &[u8]) -> Result<(), Status> {
    if signing_request.len() <= MAX_REQUEST_BYTES {
        return Ok(());
    }
    Err(Status::invalid_argument("the signing request is too long"))
}

/// Signing and files are not for the runtime's threads.
async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, crate::tls::TlsError> + Send + 'static,
) -> Result<T, Status> {
    let done = tokio::task::spawn_blocking(work).await.map_err(|error| Status::internal(error.to_string()))?;
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
        issued_s: issued.valid_s.start,
        expires_s: issued.valid_s.end,
    }
}
