//! Going on with a run whose connection was lost: the executor is reached anew and
//! asked what became of it. Which runs that is done for is decided in [`super::again`].

use std::{sync::Arc, time::Duration};

use posh_proto::executor::{Resume, RunInput, RunOutput, rejected, run_input, run_output};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::start::QUEUE;
use posh_reach::{Allowance, Outputs};

use crate::executors::{Connection, Executor};

/// How long an executor lets a kept run go on without us. Its own notice of the loss may come as
/// late as ours.
pub const GRACE: Duration = Duration::from_secs(10);
/// How long the executor is looked for, counted from when it was last heard: nothing may hang for
/// more than 10 s after a fault. A silent one is noticed after 8 s.
const WITHIN: Duration = Duration::from_secs(9);
/// The least, whatever the silence before: two attempts to connect.
const AT_LEAST: Duration = Duration::from_millis(1500);
/// The most: it lets the run go on for little longer.
const AT_MOST: Duration = Duration::from_secs(6);

/// A run that goes on.
pub struct Resumed {
    /// By which connection.
    pub connection: Arc<Connection>,
    /// To it.
    pub input: mpsc::Sender<RunInput>,
    /// From it.
    pub output: Outputs,
}

/// Why a run does not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    /// The executor was reached and has ended it.
    Killed,
    /// The executor was reached and has never heard of it.
    NeverCame,
    /// The executor was restarted, and nothing is known of what its predecessor did.
    Unknown,
    /// The executor was not reached in time.
    OutOfReach,
    /// It was there for the lost connection alone. That may have ended here before it ends there:
    /// until somebody there notices, its commands go on.
    WithConnection,
}

impl Gone {
    /// None of its processes is there any more.
    pub fn is_dead(self) -> bool {
        matches!(self, Self::Killed | Self::NeverCame | Self::Unknown)
    }

    /// For the error of a command.
    pub fn sentence(self) -> &'static str {
        match self {
            Self::Killed => "it was ended there before it was done",
            Self::NeverCame => "the executor knows nothing of it",
            Self::Unknown => {
                "the executor was restarted, and how far it came is not known; it is not run again"
            }
            Self::OutOfReach => "whether it was done there is not known, and it is not run again",
            Self::WithConnection => {
                "what ssh has started ends with it, how far the command came is not known, and it is not run again"
            }
        }
    }
}

/// Reaches the executor anew and goes on with the run, which may say so much; it was heard last so
/// long ago.
///
/// # Errors
/// [`Gone`]
pub async fn resume(
    executor: Arc<Executor>,
    lost: Arc<Connection>,
    silence: Duration,
    order: (Resume, Allowance),
) -> Result<Resumed, Gone> {
    if executor.ends_with_connection() {
        return Err(Gone::WithConnection);
    }
    let within = WITHIN.saturating_sub(silence).clamp(AT_LEAST, AT_MOST);
    tokio::time::timeout(within, ask(&executor, lost, order)).await.unwrap_or(Err(Gone::OutOfReach))
}

async fn ask(
    executor: &Executor,
    mut lost: Arc<Connection>,
    (order, allowance): (Resume, Allowance),
) -> Result<Resumed, Gone> {
    let instance = lost.about.instance.clone();
    loop {
        let connection = executor.next_connection(&lost).await;
        let (input, requests) = mpsc::channel(QUEUE);
        let _ = input.send(RunInput { kind: Some(run_input::Kind::Resume(order.clone())) }).await;
        let first = match connection
            .client
            .clone()
            .run(ReceiverStream::new(requests), allowance.clone())
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
                    _ if connection.about.instance == instance => Gone::NeverCame,
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
