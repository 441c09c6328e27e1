//! `posh mounts`, `posh resolve` and `posh status`: the gateway's answers as tables and as JSON.

use std::{
    env,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use posh_proto::{
    gateway::{ExecutorStatus, Mount, ResolveReply, ResolveRequest, StatusReply},
    untrusted::{escaped, escaped_json},
};
use serde_json::{Map, Value, json};

use crate::{
    Error,
    gateway::{self, Client, GatewayTarget},
};

/// Characters between columns.
const GAP: usize = 2;

/// The mount table.
///
/// # Errors
/// Any error of reaching or asking the gateway, as for every question of this module.
pub fn mounts(target: &GatewayTarget, as_json: bool) -> Result<String, Error> {
    let mounts = gateway::reach(&gateway::require(target)?)?.mounts()?.mounts;
    Ok(if as_json {
        pretty(&mounts.iter().map(mount_json).collect())
    } else {
        mount_table(&mounts)
    })
}

/// The owner of `path`, and its path on the owner's machine.
///
/// # Errors
/// As [`mounts`].
pub fn resolve(target: &GatewayTarget, path: &Path, as_json: bool) -> Result<String, Error> {
    let cwd = env::current_dir().unwrap_or_else(|_| PathBuf::from("/"));
    let request = ResolveRequest {
        path: path.as_os_str().as_bytes().to_vec().into(),
        cwd: cwd.as_os_str().as_bytes().to_vec().into(),
    };
    let mut reply = gateway::reach(&gateway::require(target)?)?.resolve(request)?;
    if reply.client_path.is_empty() {
        // Not resolved: the path is shown as given.
        reply.client_path = path.as_os_str().as_bytes().to_vec().into();
    }
    Ok(if as_json { pretty(&resolved_json(&reply)) } else { resolved_text(&reply) })
}

/// State of the gateway and its executors; a gateway that does not run is not started.
///
/// # Errors
/// As [`mounts`], and [`Error::NotRunning`].
pub fn status(target: &GatewayTarget, as_json: bool) -> Result<String, Error> {
    let status = Client::connect(gateway::require(target)?.socket())?.status()?;
    Ok(if as_json { pretty(&status_json(&status)) } else { status_text(&status) })
}

fn mount_table(mounts: &[Mount]) -> String {
    let heading = ["PATH", "TYPE", "SOURCE", "OWNER", "STATE"].map(str::to_owned);
    let rows = mounts.iter().map(|mount| {
        let kind = if mount.fs_type.is_empty() { "-" } else { &mount.fs_type };
        let source = if mount.source.is_empty() { "-".to_owned() } else { shown(&mount.source) };
        let state = if mount.mounted {
            mount.state.clone()
        } else {
            format!("{}, not mounted", mount.state)
        };
        [shown(&mount.path), kind.to_owned(), source, owner(mount), state]
    });
    aligned(std::iter::once(heading).chain(rows))
}

/// `executor:export/sub`, or `-` for a mount without owner.
fn owner(mount: &Mount) -> String {
    if mount.executor.is_empty() {
        "-".to_owned()
    } else {
        place(&mount.executor, &mount.export, &mount.sub_path)
    }
}

fn place(executor: &str, export: &str, below: &[u8]) -> String {
    let below = shown(below);
    let slash = if below.is_empty() || below.starts_with('/') { "" } else { "/" };
    format!("{}:{}{slash}{below}", escaped(executor), escaped(export))
}

fn resolved_text(reply: &ResolveReply) -> String {
    if reply.executor.is_empty() {
        return format!("{} is local: {}\n", shown(&reply.client_path), escaped(&reply.reason));
    }
    let owner = place(&reply.executor, &reply.export, &reply.export_path);
    format!("{} is {owner} (mount {})\n", shown(&reply.client_path), shown(&reply.mount))
}

fn status_text(status: &StatusReply) -> String {
    let mut lines = format!(
        "gateway {} (protocol {}), pid {}\nconfiguration {}\n{} sessions, {} pipelines running, {} \
         in all\n",
        escaped(&status.version),
        status.protocol,
        status.pid,
        shown(&status.config),
        status.sessions,
        status.pipelines_running,
        status.pipelines_total,
    );
    lines.push_str(&format!(
        "longest wait for a pipeline's commands {:.1} ms\n",
        status.longest_wait_ms
    ));
    let reached = status.backstops.iter().filter(|one| one.reached > 0);
    reached.for_each(|one| {
        let name = escaped(&one.name);
        lines.push_str(&format!(
            "fault: {} waits reached their last limit ({name}), see the log\n",
            one.reached
        ));
    });
    if !status.executors.is_empty() {
        let heading = ["EXECUTOR", "ADDRESS", "STATE", "ROUND TRIP"].map(str::to_owned);
        let rows = status.executors.iter().map(|executor| {
            let rtt = if executor.rtt_ms > 0.0 {
                format!("{:.2} ms", executor.rtt_ms)
            } else {
                "-".to_owned()
            };
            [executor.name.clone(), executor.address.clone(), executor.state.clone(), rtt]
        });
        lines.push_str(&aligned(std::iter::once(heading).chain(rows)));
        status.executors.iter().for_each(|executor| lines.push_str(&usage_text(executor)));
    }
    lines
}

/// The executor's own report, in lines; empty if it has not been asked.
fn usage_text(executor: &ExecutorStatus) -> String {
    let name = &escaped(&executor.name);
    let mut lines = String::new();
    if executor.asked {
        let known_as = if executor.identity.is_empty() { "anybody" } else { &executor.identity };
        let user = if executor.user.is_empty() { "its own user" } else { &executor.user };
        let own_limit = if executor.max_runs > 0 {
            format!(" of {}", executor.max_runs)
        } else {
            String::new()
        };
        let (known_as, user) = (escaped(known_as), escaped(user));
        lines.push_str(&format!("{name} knows us as {known_as}; commands run as {user}\n"));
        if !executor.confinement.is_empty() {
            lines.push_str(&format!(
                "{name} confines commands: {}\n",
                escaped(&executor.confinement)
            ));
        }
        lines.push_str(&format!(
            "{name} has {} of {} runs, {}{own_limit} of them ours; refused {} of ours; load \
             average {:.2}\n",
            executor.all_runs,
            executor.max_all_runs,
            executor.runs,
            executor.refused,
            executor.load_average
        ));
    }
    if !executor.refusing.is_empty() {
        lines.push_str(&format!("{name} refuses commands now: {}\n", escaped(&executor.refusing)));
    }
    lines
}

fn mount_json(mount: &Mount) -> Value {
    json!({
        "path": text(&mount.path),
        "type": mount.fs_type,
        "source": text(&mount.source),
        "executor": optional(&mount.executor),
        "address": optional(&mount.address),
        "export": optional(&mount.export),
        "sub_path": text(&mount.sub_path),
        "state": mount.state,
        "mounted": mount.mounted,
    })
}

fn resolved_json(reply: &ResolveReply) -> Value {
    json!({
        "client_path": text(&reply.client_path),
        "executor": optional(&reply.executor),
        "export": optional(&reply.export),
        "export_path": text(&reply.export_path),
        "mount": text(&reply.mount),
        "reason": optional(&reply.reason),
    })
}

fn status_json(status: &StatusReply) -> Value {
    let executor = |executor: &posh_proto::gateway::ExecutorStatus| {
        json!({
            "name": executor.name,
            "address": executor.address,
            "state": executor.state,
            "rtt_ms": executor.rtt_ms,
            "identity": optional(&executor.identity),
            "user": optional(&executor.user),
            "confinement": optional(&executor.confinement),
            "runs": executor.asked.then_some(executor.runs),
            "max_runs": (executor.max_runs > 0).then_some(executor.max_runs),
            "refused": executor.asked.then_some(executor.refused),
            "all_runs": executor.asked.then_some(executor.all_runs),
            "max_all_runs": executor.asked.then_some(executor.max_all_runs),
            "load_average": executor.asked.then_some(executor.load_average),
            "refusing": optional(&executor.refusing),
        })
    };
    json!({
        "version": status.version,
        "protocol": status.protocol,
        "pid": status.pid,
        "config": text(&status.config),
        "sessions": status.sessions,
        "pipelines_running": status.pipelines_running,
        "pipelines_total": status.pipelines_total,
        "longest_wait_ms": status.longest_wait_ms,
        "backstops": status
            .backstops
            .iter()
            .map(|one| (one.name.clone(), one.reached.into()))
            .collect::<Map<_, _>>(),
        "executors": status.executors.iter().map(executor).collect::<Vec<_>>(),
    })
}

/// The contract's empty string means "none".
fn optional(value: &str) -> Option<&str> {
    (!value.is_empty()).then_some(value)
}

/// A path for JSON, which has only Unicode text.
pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A path for a terminal, escaped.
pub(super) fn shown(bytes: &[u8]) -> String {
    escaped(&String::from_utf8_lossy(bytes)).into_owned()
}

pub(super) fn pretty(value: &Value) -> String {
    escaped_json(&format!("{value:#}\n")).into_owned()
}

/// Rows with aligned columns; the last column is not padded.
///
/// Invariant: a row is one line, with the cells that it was given: most of the text is chosen by
/// the owner of a file system or server.
pub(super) fn aligned<const N: usize>(rows: impl Iterator<Item = [String; N]>) -> String {
    let rows: Vec<[String; N]> =
        rows.map(|row| row.map(|cell| escaped(&cell).into_owned())).collect();
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0) + GAP;
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells: String =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        format!("{}\n", cells.trim_end())
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_table_is_aligned_and_names_owners() {
        let owned = Mount {
            path: "/mnt/logs".into(),
            fs_type: "fuse.sshfs".to_owned(),
            source: "store1:/srv".into(),
            executor: "store1".to_owned(),
            export: "logs".to_owned(),
            sub_path: "2024".into(),
            state: "connected".to_owned(),
            mounted: true,
            ..Mount::default()
        };
        let unmounted = Mount {
            path: "/mnt/x".into(),
            fs_type: String::new(),
            source: "".into(),
            mounted: false,
            ..owned.clone()
        };
        let foreign = Mount {
            path: "/".into(),
            fs_type: "ext4".to_owned(),
            source: "/dev/vda1".into(),
            state: "no owner".to_owned(),
            mounted: true,
            ..Mount::default()
        };
        let expected = "\
PATH       TYPE        SOURCE       OWNER             STATE
/mnt/logs  fuse.sshfs  store1:/srv  store1:logs/2024  connected
/mnt/x     -           -            store1:logs/2024  connected, not mounted
/          ext4        /dev/vda1    -                 no owner
";
        assert_eq!(mount_table(&[owned, unmounted, foreign]), expected);
    }

    #[test]
    fn no_cell_makes_a_line_of_its_own() {
        let forged = "x\n/mnt/pay  fuse.sshfs  pay:/srv".to_owned();
        let mount = Mount {
            path: "/mnt/a".into(),
            fs_type: format!("fuse.{forged}"),
            source: forged.clone().into(),
            executor: forged.clone(),
            export: forged.clone(),
            state: forged.clone(),
            mounted: true,
            ..Mount::default()
        };
        let table = mount_table(&[mount]);
        assert_eq!(
            (table.lines().count(), table.matches("x\\n/mnt/pay").count()),
            (2, 5),
            "{table}"
        );
        let executor = ExecutorStatus {
            name: forged.clone(),
            address: forged.clone(),
            state: forged.clone(),
            ..Default::default()
        };
        let told = ExecutorStatus {
            asked: true,
            identity: forged.clone(),
            user: forged.clone(),
            confinement: forged.clone(),
            refusing: forged.clone(),
            ..executor.clone()
        };
        let status = StatusReply {
            version: forged,
            executors: vec![executor, told],
            ..StatusReply::default()
        };
        let text = status_text(&status);
        assert!(!text.lines().any(|line| line.starts_with("/mnt/pay")), "{text}");
    }

    #[test]
    fn a_resolved_path_says_where_it_is() {
        let mut reply = ResolveReply {
            executor: "store1".to_owned(),
            export: "logs".to_owned(),
            export_path: "a/b".into(),
            mount: "/mnt/logs".into(),
            client_path: "/mnt/logs/a/b".into(),
            ..ResolveReply::default()
        };
        assert_eq!(resolved_text(&reply), "/mnt/logs/a/b is store1:logs/a/b (mount /mnt/logs)\n");
        reply.executor.clear();
        reply.reason = "it is not on a mount with an executor".to_owned();
        assert_eq!(
            resolved_text(&reply),
            "/mnt/logs/a/b is local: it is not on a mount with an executor\n"
        );
        reply.reason = "there is no a\n/mnt/logs/a/b is store1:logs/a/b".to_owned();
        let said = resolved_text(&reply);
        assert_eq!(
            said,
            "/mnt/logs/a/b is local: there is no a\\n/mnt/logs/a/b is store1:logs/a/b\n"
        );
    }
}
