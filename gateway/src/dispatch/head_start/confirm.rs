//! What was begun some time ago counts only if all that it reads is as it was. Its executor can tell, in the round trip that lets its
//! redirects go.

use std::{sync::Arc, time::Instant};

use posh_proto::executor::{Release, Resume, RunInput, RunSpec, run_input, run_output};

use posh_reach::has_exceeded;

use super::super::{
    resume::{Resumed, resume},
    start::{Flight, Refusal},
};
use crate::executors::Executor;

/// Messages before the answer: a run has little credit until then, and larger chunks the more it says.
const MOST_HEARD: usize = 1 << 16;

/// Lets a run go if all is as it was; else nothing of it has come anywhere. What it says meanwhile is kept.
///
/// # Errors
/// [`Refusal`], an unclear one, if the executor was lost: it may have let it go.
pub async fn release_if_unchanged(
    executor: Arc<Executor>,
    flight: &mut Flight,
    spec: &RunSpec,
) -> Result<bool, Refusal> {
    loop {
        let volumes = spec.volumes.clone();
        let release = run_input::Kind::Release(Release { if_unchanged: true, volumes });
        // Whether that could be sent, the answer tells.
        let _ = flight.input.send(RunInput { kind: Some(release) }).await;
        let sent = Instant::now();
        let why = loop {
            match flight.output.message().await {
                Ok(Some(message)) => {
                    let answer = match &message.kind {
                        Some(run_output::Kind::Released(released)) => Some(released.changed.is_empty()),
                        _ => None,
                    };
                    flight.heard.push(message);
                    if let Some(is_unchanged) = answer {
                        return Ok(is_unchanged);
                    }
                    if flight.heard.len() > MOST_HEARD {
                        return Err(Refusal::unclear(&executor, "it does not answer", "it is not run again"));
                    }
                }
                Err(status) if has_exceeded(&status) => {
                    return Err(Refusal::unclear(&executor, status.message(), "it is not run again"));
                }
                Ok(None) => break "the connection was closed".to_owned(),
                Err(status) => break status.message().to_owned(),
            }
        };
        executor.lost(&flight.connection, &why);
        // Nobody has seen anything of it, and it has ended with its connection.
        if spec.grace_ms == 0 {
            return Ok(false);
        }
        // `Started` has come as well.
        let received = 1 + flight.heard.len() as u64;
        let order = Resume { run_id: spec.run_id.clone(), received, ..Resume::default() };
        let (lost, allowance) = (Arc::clone(&flight.connection), flight.output.allowance().clone());
        match resume(Arc::clone(&executor), lost, sent.elapsed(), (order, allowance)).await {
            Ok(Resumed { connection, input, output }) => {
                (flight.connection, flight.input, flight.output) = (connection, input, output);
            }
            Err(gone) => return Err(Refusal::unclear(&executor, &why, gone.sentence())),
        }
    }
}
