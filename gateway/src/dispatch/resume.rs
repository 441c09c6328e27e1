//! Resumes a run whose connection was lost: reconnects to the executor and asks for the run's
//! state. [`super::again`] decides which runs are resumable.

use std::{sync::Arc, time::Duration};

use posh_proto::executor::{Resume, RunInput, RunOutput, rejected, run_input, run_output};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::start::QUEUE;
use posh_reach::{Allowance, Outputs};

use crate::executors::{Executor, ExecutorConnection};

/// Time for which an executor keeps a run without us. It may notice the loss as late as we do.
pub const GRACE: Duration = Duration::from_secs(10);
/// Timeout for reconnecting, since the executor's last message: nothing may hang for more than 10 s
/// after a fault. A silent executor is noticed after 8 s.
const WITHIN: Duration = Duration::from_secs(9);
/// Minimum, however long the silence before: two attempts to connect.
const AT_LEAST: Duration = Duration::from_millis(1500);
/// Maximum: the executor keeps the run for little longer.
const AT_MOST: Duration = Duration::from_secs(6);

/// A resumed run.
pub struct Resumed {
    /// New connection.
    pub connection: Arc<ExecutorConnection>,
    /// Messages to the executor.
    pub input: mpsc::Sender<RunInput>,
    /// Messages from the executor.
    pub output: Outputs,
}

/// Reason why a run can't be resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    /// The executor has ended it.
    Killed,
    /// The executor never received it.
    NeverCame,
    /// The executor was restarted and does not know its predecessor's runs.
    Unknown,
    /// The executor could not be reached in time.
    OutOfReach,
    /// The executor served the lost connection alone. The loss may be noticed late on its side:
    /// until then, its commands go on.
    WithConnection,
}

impl Gone {
    /// Returns true if none of its processes is left.
    pub fn is_dead(self) -> bool {
        matches!(self, Self::Killed | Self::NeverCame | Self::Unknown)
    }

    /// Text for the error message of a command.
    pub fn sentence(self) -> &'static str {
        match self {
            Self::Killed => "it was ended there before it was done",
            Self::NeverCame => "the executor knows nothing of it",
            Self::Unknown => {
                "the executor was restarted, and how far it came is not known; it is not run again"
            }
            Self::OutOfReach => "whether it was done there is not known, and it is not run again",
            Self::WithConnection => {
                "what ssh has started ends with it, how far the command came is not known, and it \
                 is not run again"
            }
        }
    }
}

/// A request to resume a run.
#[derive(Debug, Clone)]
pub struct Order {
    /// The run, and what was received of it.
    pub resume: Resume,
    /// Remaining allowance for its messages.
    pub allowance: Allowance,
}

/// Reconnects to the executor and resumes the run under the rest of its allowance. `silence` is the
/// time since its last message.
///
/// # Errors
/// [`Gone`]
pub async fn resume(
    executor: Arc<Executor>,
    lost: Arc<ExecutorConnection>,
    silence: Duration,
    order: Order,
) -> Result<Resumed, Gone> {
    if executor.ends_with_connection() {
        return Err(Gone::WithConnection);
    }
    let within = WITHIN.saturating_sub(silence).clamp(AT_LEAST, AT_MOST);
    tokio::time::timeout(within, ask(&executor, lost, order)).await.unwrap_or(Err(Gone::OutOfReach))
}

async fn ask(
    executor: &Executor,
    mut lost: Arc<ExecutorConnection>,
    order: Order,
) -> Result<Resumed, Gone> {
    let instance = lost.instance.clone();
    loop {
        let connection = executor.next_connection(&lost).await;
        let (input, requests) = mpsc::channel(QUEUE);
        let _ = input
            .send(RunInput { kind: Some(run_input::Kind::Resume(order.resume.clone())) })
            .await;
        let first = match connection
            .client
            .clone()
            .run(ReceiverStream::new(requests), order.allowance.clone())
            .await
        {
            Ok(mut output) => output.message().await.map(|first| (first, output)),
            Err(status) => Err(status),
        };
        match first {
            Ok((Some(RunOutput { kind: Some(run_output::Kind::Resumed(_)) }), output)) => {
                return Ok(Resumed { connection, input, output });
            }
            Ok((Some(RunOutput { kind: Some(run_output::Kind::Rejected(rejected)) }), _)) => {
                return Err(match rejected.kind() {
                    rejected::Kind::RunKilled => Gone::Killed,
                    _ if connection.instance == instance => Gone::NeverCame,
                    _ => Gone::Unknown,
                });
            }
            Ok(_) => return Err(Gone::Unknown),
            Err(status) => {
                executor.lost(&connection, status.message());
                lost = connection;
            }
        }
    }
}
