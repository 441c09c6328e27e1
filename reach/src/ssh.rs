//! An executor behind ssh: starts `ssh HOST posh-executor --stdio` and makes one
//! stream of its output and input, once the executor has greeted. The process
//! belongs to the stream: it ends soon after that is dropped, and is reaped.

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

use crate::Route;
use said::Said;

/// From ssh's start to the executor's greeting: a slow link, name look-ups and start-up
/// files on the way, but nobody who types a password.
const START_LIMIT: Duration = Duration::from_secs(10);
/// ssh ends when its input does; one that can't, because the link is frozen, is killed after this
/// time.
const FAREWELL: Duration = Duration::from_secs(1);
/// For what ssh still says when it has ended, and for the rest of a line that is not the
/// executor's.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// What is shown of words that are not the executor's.
const SHOWN_BYTES: usize = 80;
/// Exit statuses of a shell that finds no program, and of ssh itself.
const NOT_FOUND: i32 = 127;

/// Why there is no executor behind an ssh. `login` is what to call the machine by.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// There is no ssh here.
    #[error("cannot run {program}")]
    Spawn {
        /// The first word of `ssh_command`.
        program: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// ssh got there, and the program is not there.
    #[error("posh-executor is not installed there; run: posh attach {login}")]
    NotInstalled {
        /// The machine.
        login: String,
    },
    /// Something else than the executor spoke.
    #[error(
        "{login} said {said:?} where posh-executor was to speak; its shell's start-up files (such as ~/.bashrc) \
         must print nothing when there is no terminal"
    )]
    Noise {
        /// The machine.
        login: String,
        /// The beginning of it.
        said: String,
    },
    /// ssh ended; its own words, and how.
    #[error("{0}")]
    Ended(String),
    /// Nothing in all the time that it had.
    #[error("no answer through ssh within {} s{said}", START_LIMIT.as_secs())]
    Silent {
        /// What ssh has said, after a colon, or nothing.
        said: String,
    },
}

/// Tells when an ssh has ended, and why.
#[derive(Debug)]
pub struct Watch(watch::Receiver<Option<String>>);

impl Watch {
    /// Completes when it has, with its last words.
    pub async fn ended(&mut self) -> String {
        match self.0.wait_for(Option::is_some).await {
            Ok(why) => why.clone().unwrap_or_default(),
            Err(_) => "ssh was given up".to_owned(),
        }
    }
}

/// Starts ssh, and the executor through it; returns when it has greeted.
///
/// # Errors
/// [`Fault`], with nothing left behind.
pub async fn start(login: &Login, route: &Route) -> Result<(Carried, Watch), Fault> {
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
            return Err(Fault::Noise { login: login.to_string(), said });
        }
        Ok(Err(NotGreeted::Ended)) => {
            drop(stdin);
            return Err(why_ended(login, child, said).await);
        }
        Err(_) => return Err(Fault::Silent { said: said.after(": ").await }),
    }
    let (stream, dropped) = Carried::new(stdin, stdout);
    let (tell, watch) = watch::channel(None);
    tokio::spawn(async move {
        let status = ended(&mut child, dropped).await;
        tell.send_replace(Some(words(status, &mut said).await));
    });
    Ok((stream, Watch(watch)))
}

/// A connector that gives this stream, once: what comes after it is another ssh.
pub fn only(
    stream: Carried,
) -> impl Service<Uri, Response = TokioIo<Carried>, Error = io::Error, Future: Send> + Send + 'static
{
    let mut stream = Some(TokioIo::new(stream));
    service_fn(move |_: Uri| {
        std::future::ready(stream.take().ok_or_else(|| io::Error::other("its ssh has ended")))
    })
}

/// What came instead of the greeting.
#[derive(Debug, PartialEq, Eq)]
enum NotGreeted {
    Noise(String),
    Ended,
}

/// Reads the greeting and not a byte more.
async fn greeting(stdout: &mut ChildStdout) -> Result<(), NotGreeted> {
    let mut got = Vec::new();
    while got.len() < STDIO_GREETING.len() {
        match read_some(stdout, &mut got, STDIO_GREETING.len()).await {
            0 if got.is_empty() => return Err(NotGreeted::Ended),
            0 => return Err(NotGreeted::Noise(shown(&got))),
            _ if STDIO_GREETING.starts_with(&got) => {}
            _ => {
                // Its line to the end, for the message.
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

/// Reads once, up to `limit` bytes in all; the number read, 0 at the end.
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

async fn why_ended(login: &Login, mut child: Child, mut said: Said) -> Fault {
    let status = match timeout(LAST_WORDS, child.wait()).await {
        Ok(status) => status,
        // Its output is closed and it lives: of no use.
        Err(_) => kill(&mut child).await,
    };
    if status.as_ref().is_ok_and(|status| status.code() == Some(NOT_FOUND)) {
        return Fault::NotInstalled { login: login.to_string() };
    }
    let mut why = words(status, &mut said).await;
    if ["Permission denied", "Host key verification failed"]
        .iter()
        .any(|refusal| why.contains(refusal))
    {
        why.push_str("; ssh can ask nothing here, so this must work: ");
        why.push_str(&format!("ssh -o BatchMode=yes {} true", arguments(login)[..].join(" ")));
    }
    Fault::Ended(why)
}

/// Waits for the process; once nobody uses its stream it is given little time.
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

/// How ssh ended, in its own words if it had any.
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
