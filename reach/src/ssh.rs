//! An executor behind ssh: starts `ssh HOST posh-executor --stdio`, waits for the executor's
//! greeting, and joins its standard input and output into one stream. The stream owns the process:
//! after the stream is dropped, the process ends soon and is reaped.

mod carried;
mod command;
mod said;

use std::{io, process::ExitStatus, time::Duration};

use fs_mapper::config::Login;
use hyper_util::rt::TokioIo;
use posh_proto::STDIO_GREETING;
use posh_proto::untrusted::escaped;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::{Child, ChildStdout},
    sync::{oneshot, watch},
    time::timeout,
};
use tonic::transport::Uri;
use tower::{Service, service_fn};

pub use carried::Carried;
pub use command::{ATTENDED, any_shell, arguments, executor_command, quoted};

use crate::{Route, frames::Metered};
use said::Said;

/// Timeout from ssh's start to the executor's greeting: enough for a slow link, DNS and start-up
/// files, but not for typing a password.
const START_LIMIT: Duration = Duration::from_secs(10);
/// ssh exits at the end of its input; if it doesn't (a frozen link), it is killed after this time.
const FAREWELL: Duration = Duration::from_secs(1);
/// Timeout for ssh's last messages after it has exited, and for the rest of a line that is not the
/// greeting.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// Length of unexpected output in an error message, in characters or bytes.
const SHOWN_BYTES: usize = 80;
/// Exit status of a shell that doesn't find the program.
const NOT_FOUND: i32 = 127;

/// Error of [`start`]; `login` names the machine.
#[derive(Debug, thiserror::Error)]
pub enum SshFault {
    /// The ssh program can't be started.
    #[error("cannot run {program}")]
    Spawn {
        /// The first word of `ssh_command`.
        program: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// ssh connected, but the machine has no posh-executor.
    #[error("posh-executor is not installed there; run: posh attach {login}")]
    NotInstalled {
        /// The machine.
        login: String,
    },
    /// Output other than the executor's greeting.
    #[error(
        "{login} said {said:?} where posh-executor was to speak; its shell's start-up files \
         (such as ~/.bashrc) must print nothing when there is no terminal"
    )]
    Noise {
        /// The machine.
        login: String,
        /// The beginning of that output.
        said: String,
    },
    /// ssh exited; its last messages, or its status.
    #[error("{0}")]
    Ended(String),
    /// No greeting within the timeout.
    #[error("no answer through ssh within {} s{said}", START_LIMIT.as_secs())]
    Silent {
        /// ssh's messages after a colon, or nothing.
        said: String,
    },
}

/// Reports when an ssh has exited, and why.
#[derive(Debug)]
pub struct Watch {
    process: Option<u32>,
    why_ended: watch::Receiver<Option<String>>,
}

impl Watch {
    /// ssh's process ID.
    #[must_use]
    pub fn process(&self) -> Option<u32> {
        self.process
    }

    /// Completes when ssh has exited, with its last messages.
    pub async fn ended(&mut self) -> String {
        match self.why_ended.wait_for(Option::is_some).await {
            Ok(why) => why.clone().unwrap_or_default(),
            Err(_) => "ssh was given up".to_owned(),
        }
    }
}

/// Starts ssh, and the executor through it; returns after the executor's greeting.
///
/// # Errors
/// [`SshFault`]; no process is left then.
pub async fn start(login: &Login, route: &Route) -> Result<(Carried, Watch), SshFault> {
    let mut child = command::spawn(login, route)?;
    let (Some(stdin), Some(mut stdout), Some(stderr)) =
        (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        unreachable!("all three are pipes")
    };
    let mut said = Said::listen(stderr);
    match timeout(START_LIMIT, greeting(&mut stdout)).await {
        Ok(Ok(())) => {}
        Ok(Err(NotGreeted::Noise(said))) => {
            return Err(SshFault::Noise { login: login.to_string(), said });
        }
        Ok(Err(NotGreeted::Ended)) => {
            drop(stdin);
            return Err(why_ended(login, child, said).await);
        }
        Err(_) => return Err(SshFault::Silent { said: said.after(": ").await }),
    }
    let (stream, dropped) = Carried::new(stdin, stdout);
    let (tell, why_ended) = watch::channel(None);
    let process = child.id();
    tokio::spawn(async move {
        let status = ended(&mut child, dropped).await;
        tell.send_replace(Some(words(status, &mut said).await));
    });
    Ok((stream, Watch { process, why_ended }))
}

/// Returns a connector that yields this stream once: a reconnect needs another ssh.
pub fn only(
    stream: Metered<Carried>,
) -> impl Service<Uri, Response = TokioIo<Metered<Carried>>, Error = io::Error, Future: Send> + Send
{
    let mut stream = Some(TokioIo::new(stream));
    service_fn(move |_: Uri| {
        std::future::ready(stream.take().ok_or_else(|| io::Error::other("its ssh has ended")))
    })
}

/// Reason for a missing greeting.
#[derive(Debug, PartialEq, Eq)]
enum NotGreeted {
    Noise(String),
    Ended,
}

/// Reads the greeting, and not a byte more.
async fn greeting(stdout: &mut ChildStdout) -> Result<(), NotGreeted> {
    let mut got = Vec::new();
    while got.len() < STDIO_GREETING.len() {
        match read_some(stdout, &mut got, STDIO_GREETING.len()).await {
            0 if got.is_empty() => return Err(NotGreeted::Ended),
            0 => return Err(NotGreeted::Noise(shown(&got))),
            _ if STDIO_GREETING.starts_with(&got) => {}
            _ => {
                // The rest of the line, for the error message.
                let line = async {
                    while !got.contains(&b'\n')
                        && read_some(stdout, &mut got, SHOWN_BYTES).await > 0
                    {}
                };
                let _ = timeout(LAST_WORDS, line).await;
                return Err(NotGreeted::Noise(shown(&got)));
            }
        }
    }
    Ok(())
}

/// Reads once, up to `limit` bytes in all; returns the number read, 0 at the end or on an error.
async fn read_some(input: &mut (impl AsyncRead + Unpin), got: &mut Vec<u8>, limit: usize) -> usize {
    let mut piece = vec![0; limit.saturating_sub(got.len())];
    let read = input.read(&mut piece).await.unwrap_or(0);
    got.extend_from_slice(&piece[..read]);
    read
}

fn shown(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    line.trim_end().chars().take(SHOWN_BYTES).collect()
}

async fn why_ended(login: &Login, mut child: Child, mut said: Said) -> SshFault {
    let status = match timeout(LAST_WORDS, child.wait()).await {
        Ok(status) => status,
        // Its output is closed but it still runs: useless.
        Err(_) => kill(&mut child).await,
    };
    if status.as_ref().is_ok_and(|status| status.code() == Some(NOT_FOUND)) {
        return SshFault::NotInstalled { login: login.to_string() };
    }
    let mut why = words(status, &mut said).await;
    if ["Permission denied", "Host key verification failed"]
        .iter()
        .any(|refusal| why.contains(refusal))
    {
        why.push_str("; ssh can ask nothing here, so this must work: ");
        why.push_str(&format!("ssh -o BatchMode=yes {} true", arguments(login)[..].join(" ")));
    }
    SshFault::Ended(why)
}

/// Waits for the process; kills it a while after its stream was dropped.
async fn ended(child: &mut Child, dropped: oneshot::Receiver<()>) -> io::Result<ExitStatus> {
    tokio::select! {
        status = child.wait() => return status,
        _ = dropped => {}
    }
    match timeout(FAREWELL, child.wait()).await {
        Ok(status) => status,
        Err(_) => kill(child).await,
    }
}

async fn kill(child: &mut Child) -> io::Result<ExitStatus> {
    child.start_kill()?;
    child.wait().await
}

/// Returns ssh's last messages, or else its exit status.
async fn words(status: io::Result<ExitStatus>, said: &mut Said) -> String {
    match (said.after("ssh: ").await, status) {
        (said, _) if !said.is_empty() => escaped(&said).into_owned(),
        (_, Ok(status)) => format!("ssh ended without a word ({status})"),
        (_, Err(error)) => format!("ssh was lost: {error}"),
    }
}

#[cfg(test)]
#[path = "ssh/tests.rs"]
mod tests;
