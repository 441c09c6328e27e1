//! The gRPC service: the contract's calls.

use std::sync::{
    Arc, RwLock,
    atomic::{AtomicBool, Ordering},
};

use posh_proto::{
    PROTOCOL_VERSION,
    executor::{
        DescribeReply, DescribeRequest, FingerprintReply, FingerprintRequest, RunInput,
        StatusReply, StatusRequest, ToolsReply, ToolsRequest, executor_server::Executor,
    },
};
use tokio::sync::watch;
use tonic::{Request, Response, Status, Streaming};

use crate::{
    Config,
    accept::Peer,
    admission::{Admission, Denied, peer_name},
    audit::AuditLog,
    callers::{Caller, Callers, caller_of},
    cgroup::Cgroups,
    classifier::{Classifier, Turns},
    describe::MachineDescription,
    error::Refusal,
    fingerprint,
    load::Load,
    metered::kept_until_sent,
    policy::Policy,
    pool::Pool,
    run,
    runner::{refuse, wire::ConfinementReport, wire::ViewUser},
    tls::serving::Proof,
    tools::Tools,
    volume::Volumes,
};

/// Names in one `Tools` request; each may cost reading a file.
const MAX_TOOL_NAMES: usize = 4096;

/// `Tools` requests of one identity, each from its start until its answer has gone out: some 0.5 MB
/// each. A gateway makes one when it connects.
pub const TOOLS_OF_ONE: usize = 4;

/// Specifications of one identity, each from its decoding until its commands run: up to 4 MB each,
/// and the work of starting them. Others wait undecoded, on the account of unfinished messages.
pub const ARRIVALS_OF_ONE: usize = 16;

/// Answered calls of one identity whose clients have not ended their requests: each holds some 40
/// KB. A gateway does so a round trip after the answer.
pub const HEARD_OUT_OF_ONE: usize = 256;

/// Runs of one identity that are starting commands: their forks keep half of the processors busy,
/// or the only one, and others' commands start beside them.
pub fn launches_of_one() -> usize {
    (std::thread::available_parallelism().map_or(1, usize::from) / 2).max(1)
}

/// State shared by all calls.
pub struct ServiceState {
    pub config: Config,
    /// Admission control.
    pub load: Arc<Load>,
    pub pool: Pool,
    /// Replaced when the configuration is read again.
    pub policy: RwLock<Arc<Policy>>,
    /// Analysis of requests in turns.
    pub classifier: Classifier,
    /// Admission of identities.
    pub admission: Admission,
    /// Parent of the runs' cgroups.
    pub cgroups: Option<Cgroups>,
    pub machine: MachineDescription,
    pub tools: Tools,
    /// Turns of identities to ask about tools and directories.
    pub tool_turns: Turns,
    /// Turns of identities to have specifications in memory that are not charged yet.
    pub arrivals: Turns,
    /// Turns of identities to have a large specification analysed and started.
    pub large: Turns,
    /// Turns of identities to start commands.
    pub launches: Turns,
    /// See [`HEARD_OUT_OF_ONE`].
    pub heard_out: Turns,
    /// Runs that outlive their connections for a while, and their results.
    pub kept: run::KeptRuns,
    /// The audit record.
    pub audit: AuditLog,
    /// Mounts that gateways serve from here.
    pub volumes: Volumes,
    /// Refuse new runs.
    pub draining: AtomicBool,
    /// Turns true to kill running commands.
    pub kill: watch::Sender<bool>,
}

/// The service, one for all connections.
pub struct ExecutorService(pub Arc<ServiceState>);

#[tonic::async_trait]
impl Executor for ExecutorService {
    type RunStream = run::Messages;

    async fn describe(
        &self,
        request: Request<DescribeRequest>,
    ) -> Result<Response<DescribeReply>, Status> {
        let caller = self.caller_now(&request)?;
        self.count(&caller)?;
        let peer: Option<Peer> = request.extensions().get().cloned();
        let theirs = request.into_inner().protocol;
        if theirs != PROTOCOL_VERSION {
            let peer = peer_name(peer.as_ref());
            if self.0.audit.refused(caller.name(), &peer, "describe: another protocol version") {
                tracing::warn!(
                    theirs,
                    ours = PROTOCOL_VERSION,
                    "a gateway of another protocol version"
                );
            }
        }
        let shared = &self.0;
        Ok(Response::new(
            shared.machine.describe(&caller, &shared.pool, &shared.confinement()).await,
        ))
    }

    async fn tools(&self, request: Request<ToolsRequest>) -> Result<Response<ToolsReply>, Status> {
        let caller = self.caller_now(&request)?;
        self.count(&caller)?;
        let ToolsRequest { names } = request.into_inner();
        if names.len() > MAX_TOOL_NAMES {
            return Err(Status::invalid_argument(format!("more than {MAX_TOOL_NAMES} names")));
        }
        let turn = self.0.tool_turns.share_of(&caller).try_acquire_owned();
        let turn = turn
            .map_err(|_| Status::resource_exhausted("too many answers about tools are not read"))?;
        let (shared, asking) = (self.0.clone(), caller.clone());
        let reading = move || {
            let user = asking.user.as_ref().map(ViewUser::from);
            let told = shared.tools.describe_all(names, user.as_ref(), |name| asking.may_run(name));
            told.map_err(|errno| refuse(errno.desc()))
        };
        let tools = self.0.classifier.read(&caller, reading).await;
        let reply =
            ToolsReply { tools: tools.map_err(|refusal| Status::internal(refusal.message))? };
        Ok(kept_until_sent(Response::new(reply), turn))
    }

    async fn fingerprint(
        &self,
        request: Request<FingerprintRequest>,
    ) -> Result<Response<FingerprintReply>, Status> {
        let caller = self.caller_now(&request)?;
        self.count(&caller)?;
        let turn = self.0.tool_turns.share_of(&caller).try_acquire_owned();
        let turn = turn.map_err(|_| {
            Status::resource_exhausted("too many answers about directories are not read")
        })?;
        let peer = peer_name(request.extensions().get());
        let request = request.into_inner();
        let refused = |refusal: Refusal| Status::failed_precondition(refusal.message);
        fingerprint::record(&self.0.audit, &caller, &peer, &request).await.map_err(refused)?;
        // Not in a turn of the analysis, which runs need: a file system may hang.
        let looking = tokio::task::spawn_blocking(move || {
            let reply = fingerprint::take(&caller, request);
            (reply, turn)
        });
        let (reply, turn) = looking.await.map_err(|error| Status::internal(error.to_string()))?;
        Ok(kept_until_sent(Response::new(reply.map_err(refused)?), turn))
    }

    async fn status(
        &self,
        request: Request<StatusRequest>,
    ) -> Result<Response<StatusReply>, Status> {
        let caller = self.caller_now(&request)?;
        self.count(&caller)?;
        let confinement = self.0.confinement().to_string();
        Ok(Response::new(StatusReply { confinement, ..self.0.load.status(&caller) }))
    }

    async fn run(
        &self,
        request: Request<Streaming<RunInput>>,
    ) -> Result<Response<Self::RunStream>, Status> {
        let peer: Option<&Peer> = request.extensions().get();
        let proof = peer.map_or(Proof::Nothing, |peer| peer.proof.clone());
        let client = run::RunOrigin { caller: caller_of(&request)?, peer: peer_name(peer), proof };
        let largest = request.extensions().get().cloned();
        let input = run::ClientMessages { messages: request.into_inner(), largest };
        Ok(Response::new(run::answer(self.0.clone(), client, input).await))
    }
}

impl ExecutorService {
    /// The caller with its current rights, since a call's headers may have come long before its
    /// message.
    fn caller_now<T>(&self, request: &Request<T>) -> Result<Arc<Caller>, Status> {
        let peer: Option<&Peer> = request.extensions().get();
        let proof = peer.map_or(Proof::Nothing, |peer| peer.proof.clone());
        match self.0.admission.admitted(&proof) {
            Ok(Some(caller)) => Ok(caller),
            Ok(None) => caller_of(request),
            Err(Denied(why)) => Err(Status::unauthenticated(why)),
        }
    }

    /// Refuses calls beyond the caller's rate.
    fn count(&self, caller: &Caller) -> Result<(), Status> {
        self.0
            .load
            .admit_call(caller)
            .map_err(|refusal| Status::resource_exhausted(refusal.message))
    }
}

impl ServiceState {
    /// Confinement that commands have.
    pub fn confinement(&self) -> ConfinementReport {
        let mut reached = self.pool.confinement();
        reached.has.extend(self.cgroups.as_ref().map(Cgroups::words));
        reached
    }

    /// The current policy.
    pub fn policy(&self) -> Arc<Policy> {
        self.policy.read().expect("not poisoned").clone()
    }

    /// Replaces callers and policy at the same moment.
    pub fn change(&self, callers: Callers, policy: Policy) {
        let mut current = self.policy.write().expect("not poisoned");
        self.admission.change(callers);
        *current = Arc::new(policy);
    }

    /// Returns true if new runs are refused because the executor is ending.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
}
