//! The one client of an executor. Replies are untrusted input, and are sanitized in this module so
//! that no caller can forget to: text is escaped, and invalid names and paths are dropped. The
//! gateway checks on which mounts a path lies, since it knows the mount table.

use std::borrow::Cow;

use posh_proto::{
    MAX_MESSAGE_BYTES,
    executor::{
        ChangedDirectory, DescribeReply, DescribeRequest, Exited, FingerprintReply,
        FingerprintRequest, Rejected, RunInput, RunOutput, StatusReply, StatusRequest, Tool,
        ToolsRequest, executor_client::ExecutorClient, exited, run_output,
    },
    untrusted::escaped,
};
use tonic::{IntoStreamingRequest, Status, Streaming, transport::Channel};

use crate::allowance::{Allowance, Exceeded};

/// Longest name of a file (NAME_MAX of Linux's file systems).
const NAME_BYTES: usize = 255;
/// Longest path that a system call takes (PATH_MAX).
const PATH_BYTES: usize = 4096;

/// Limit for the paths of changed files, each as a whole path: an executor reports at most half as
/// much, and sets a flag if there is more.
const TOLD_PATHS_BYTES: usize = 16 << 20;

/// SIGRTMAX of the kernel (signal(7)).
const LAST_SIGNAL: u32 = 64;
/// Signals that end nothing by default: SIGCHLD, SIGCONT, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU,
/// SIGURG, SIGWINCH.
const STOP_OR_PASS: [u32; 8] = [17, 18, 19, 20, 21, 22, 23, 28];

/// Client of an executor over one connection; clones share the connection.
#[derive(Debug, Clone)]
pub struct Server(ExecutorClient<Channel>);

/// Messages of a run, checked against its allowance.
#[derive(Debug)]
pub struct Outputs {
    messages: Streaming<RunOutput>,
    allowance: Allowance,
}

impl Server {
    /// Returns a client over an existing connection.
    #[must_use]
    pub fn new(channel: Channel) -> Self {
        let client = ExecutorClient::new(channel);
        Self(
            client
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(MAX_MESSAGE_BYTES),
        )
    }

    /// Describes the executor and its exports.
    ///
    /// # Errors
    /// Of the call.
    pub async fn describe(&mut self, request: DescribeRequest) -> Result<DescribeReply, Status> {
        let mut about = self.0.describe(request).await.map_err(shown)?.into_inner();
        let DescribeReply {
            version,
            hostname,
            exports,
            locales,
            catalogs,
            machine,
            namespaces_reason,
            ..
        } = &mut about;
        let locales = locales.iter_mut().chain(catalogs).map(|locale| &mut locale.name);
        [version, hostname, machine, namespaces_reason].into_iter().chain(locales).for_each(show);
        exports.iter_mut().for_each(|export| show(&mut export.name));
        [&mut about.instance, &mut about.confinement].into_iter().for_each(show);
        Ok(about)
    }

    /// Lists the executor's commands.
    ///
    /// # Errors
    /// Of the call.
    pub async fn tools(&mut self, request: ToolsRequest) -> Result<Vec<Tool>, Status> {
        let mut tools = self.0.tools(request).await.map_err(shown)?.into_inner().tools;
        tools.iter_mut().map(|tool| &mut tool.name).for_each(show);
        Ok(tools)
    }

    /// Looks at a directory of an export. Names are only compared with those that a mount shows.
    ///
    /// # Errors
    /// Of the call.
    pub async fn fingerprint(
        &mut self,
        request: FingerprintRequest,
    ) -> Result<FingerprintReply, Status> {
        Ok(self.0.fingerprint(request).await.map_err(shown)?.into_inner())
    }

    /// Returns the executor's status.
    ///
    /// # Errors
    /// Of the call.
    pub async fn status(&mut self) -> Result<StatusReply, Status> {
        let mut status = self.0.status(StatusRequest {}).await.map_err(shown)?.into_inner();
        let StatusReply { identity, user, confinement, refusing, .. } = &mut status;
        [identity, user, confinement, refusing].into_iter().for_each(show);
        Ok(status)
    }

    /// Starts or resumes a run, whose output is limited by `allowance`.
    ///
    /// # Errors
    /// Of the call.
    pub async fn run(
        &mut self,
        request: impl IntoStreamingRequest<Message = RunInput>,
        allowance: Allowance,
    ) -> Result<Outputs, Status> {
        let messages = self.0.run(request).await.map_err(shown)?.into_inner();
        Ok(Outputs { messages, allowance })
    }
}

impl Outputs {
    /// Returns the run's allowance, in which each grant of credit must be recorded.
    #[must_use]
    pub fn allowance(&self) -> &Allowance {
        &self.allowance
    }

    /// Returns the next message; `None` at the end.
    ///
    /// # Errors
    /// Of the call, and when the executor exceeds the allowance
    /// ([`has_exceeded`](crate::has_exceeded)).
    pub async fn message(&mut self) -> Result<Option<RunOutput>, Status> {
        let mut message = self.messages.message().await.map_err(shown)?;
        message.iter().try_for_each(|message| self.allowance.take(message))?;
        match message.as_mut().and_then(|message| message.kind.as_mut()) {
            Some(run_output::Kind::Rejected(Rejected { message, .. })) => show(message),
            Some(run_output::Kind::Exited(exited)) => check(exited)?,
            _ => {}
        }
        Ok(message)
    }
}

fn show(text: &mut String) {
    if let Cow::Owned(fit) = escaped(text) {
        *text = fit;
    }
}

/// Escapes the message of a peer's status. A local status has a source, and its message is ours.
fn shown(status: Status) -> Status {
    match (std::error::Error::source(&status), escaped(status.message())) {
        (None, Cow::Owned(fit)) => Status::new(status.code(), fit),
        _ => status,
    }
}

/// # Errors
/// [`Exceeded::End`]: with such a status the local stage would stop, continue or succeed although
/// the command didn't.
fn check(exited: &mut Exited) -> Result<(), Exceeded> {
    if !exited.how.as_ref().is_none_or(is_end) {
        return Err(Exceeded::End);
    }
    if exited.changed_directories.iter().map(paths_bytes).sum::<usize>() > TOLD_PATHS_BYTES {
        tracing::warn!("an executor tells of more changes than are kept");
        (exited.changed_directories, exited.changes_incomplete) = (Vec::new(), true);
    }
    let told = exited.changed_directories.len();
    exited.changed_directories.retain(is_sound);
    if exited.changed_directories.len() < told {
        let dropped = told - exited.changed_directories.len();
        tracing::warn!(dropped, "an executor tells of changes in directories that can't be");
    }
    Ok(())
}

/// A status of eight bits, or a signal whose default action ends a process (signal(7)).
fn is_end(how: &exited::How) -> bool {
    match how {
        exited::How::Code(code) => *code <= u32::from(u8::MAX),
        exited::How::Signal(signal) => {
            (1..=LAST_SIGNAL).contains(signal) && !STOP_OR_PASS.contains(signal)
        }
    }
}

/// Returns the length of all its entries as whole paths.
fn paths_bytes(directory: &ChangedDirectory) -> usize {
    let names = directory.written.iter().chain(&directory.removed);
    let names = names.map(|name| directory.path.len() + name.len()).sum::<usize>();
    let kinds =
        directory.kinds.iter().map(|kind| directory.path.len() + kind.name.len() + kind.link.len());
    names + kinds.sum::<usize>() + directory.path.len()
}

/// Returns true if the path is absolute and has no `.` or `..`, and all names are file names, which
/// can't lead out of the directory.
fn is_sound(directory: &ChangedDirectory) -> bool {
    let path = &directory.path;
    let is_normal = path.len() <= PATH_BYTES && path.starts_with(b"/") && !path.contains(&0);
    let parts = || path.split(|byte| *byte == b'/').filter(|part| !part.is_empty());
    let kinds = directory.kinds.iter().map(|kind| &kind.name);
    let mut names = directory.written.iter().chain(&directory.removed).chain(kinds);
    let is_target = |link: &[u8]| link.len() <= PATH_BYTES && !link.contains(&0);
    is_normal
        && parts().all(is_name)
        && names.all(|name| is_name(name))
        && directory.kinds.iter().all(|kind| is_target(&kind.link))
}

fn is_name(name: &[u8]) -> bool {
    !name.is_empty()
        && name.len() <= NAME_BYTES
        && name != b"."
        && name != b".."
        && !name.iter().any(|b| matches!(b, 0 | b'/'))
}

#[cfg(test)]
mod tests {
    use posh_proto::executor::NamedKind;

    use super::*;

    #[test]
    fn more_changes_than_are_kept_are_changes_that_nobody_saw() {
        let deep = "/n".repeat(PATH_BYTES / 2);
        let told = |names: usize| Exited {
            changed_directories: vec![ChangedDirectory {
                path: deep.clone().into(),
                removed: vec!["n".into(); names],
                ..ChangedDirectory::default()
            }],
            ..Exited::default()
        };
        let [mut few, mut many] = [100, 100_000].map(told);
        check(&mut few).unwrap();
        check(&mut many).unwrap();
        assert!(!few.changes_incomplete && few.changed_directories.len() == 1);
        assert!(many.changes_incomplete && many.changed_directories.is_empty());
    }

    #[test]
    fn only_paths_and_names_that_can_be_are_kept() {
        let directory = |path: &str, written: &[&str], removed: &[&str]| ChangedDirectory {
            path: path.to_owned().into(),
            written: written.iter().map(|name| name.as_bytes().to_vec().into()).collect(),
            removed: removed.iter().map(|name| name.as_bytes().to_vec().into()).collect(),
            ..ChangedDirectory::default()
        };
        let long = "n".repeat(NAME_BYTES + 1);
        let deep = "/n".repeat(PATH_BYTES);
        let lies = [
            directory("relative", &[], &[]),
            directory("", &[], &[]),
            directory("/mnt/../etc", &[], &[]),
            directory("/mnt/./d", &[], &[]),
            directory("/mnt/d\0", &[], &[]),
            directory(&deep, &[], &[]),
            directory("/mnt", &["../etc/passwd"], &[]),
            directory("/mnt", &["f", ".."], &[]),
            directory("/mnt", &[], &["/etc/passwd"]),
            directory("/mnt", &[], &["f", ""]),
            directory("/mnt", &["a\0b"], &[]),
            directory("/mnt", &[&long], &[]),
        ];
        let of_kind = |name: &str, link: &[u8]| ChangedDirectory {
            kinds: vec![NamedKind { name: name.to_owned().into(), link: link.to_vec().into() }],
            ..directory("/mnt/d", &["f"], &[])
        };
        let of_kinds = [
            ("../f", &b"x"[..]),
            ("", b"x"),
            ("..", b""),
            ("f", b"a\0b"),
            ("f", &[b'x'; PATH_BYTES + 1]),
        ];
        let lies = lies.into_iter().chain(of_kinds.map(|(name, link)| of_kind(name, link)));
        let sound = ChangedDirectory {
            kinds: of_kind("f", b"../else\x1bwhere").kinds,
            ..directory("/mnt/d", &["f", "..."], &["\u{1b}"])
        };
        let changed_directories = lies.chain([sound.clone()]).collect();
        let mut exited = Exited { changed_directories, ..Exited::default() };
        check(&mut exited).unwrap();
        assert_eq!(exited.changed_directories, [sound]);
    }

    #[test]
    fn an_end_is_a_status_or_a_signal_that_ends_processes() {
        let check = |how| check(&mut Exited { how: Some(how), ..Exited::default() }).is_ok();
        let passed: Vec<u32> =
            (0..=300).filter(|signal| check(exited::How::Signal(*signal))).collect();
        // What signal(7) has as Term or Core, and the real-time signals.
        let ends: Vec<u32> = (1..=16).chain(24..=27).chain(29..=64).collect();
        assert_eq!(passed, ends);
        let large = [u32::MAX, u32::MAX - 127, 1 << 31, 256];
        assert!(
            large
                .into_iter()
                .all(|number| !check(exited::How::Signal(number))
                    && !check(exited::How::Code(number)))
        );
        assert!((0..=255).all(|code| check(exited::How::Code(code))));
    }
}
