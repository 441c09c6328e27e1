//! `posh doctor`: checks the set-up of this machine, with advice for each fault. It changes
//! nothing; it only starts the gateway, as any shell would.

use std::{env, fs::OpenOptions, io, path::Path, time::Duration};

use fs_mapper::{
    config::{Address, Config, ExecutorConfig, ExecutorOrigin},
    mountinfo::MountInfo,
    sshfs,
};
use posh_proto::{
    PROTOCOL_VERSION,
    executor::{DescribeReply, DescribeRequest},
    gateway::Mount,
    other_version,
    runtime::RuntimeDir,
    untrusted::{escaped, escaped_lines},
};
use posh_reach::{
    Route, Server, Unreachable,
    tls::{self, credentials::Credentials},
};
use tokio::runtime::Builder;

use crate::{
    Error,
    error::named,
    gateway::{self, Client, GatewayTarget},
    hook,
    launch::{Shell, find_program},
    programs,
};

/// Timeout for an executor; a slower one is of no use to a shell either.
const EXECUTOR_TIMEOUT: Duration = Duration::from_secs(3);

/// Own side in a comparison of protocol versions.
const OURS: &str = "this posh";

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Finding {
    verdict: DoctorVerdict,
    subject: String,
    detail: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DoctorVerdict {
    Good,
    /// Something optional is missing.
    Note,
    Bad,
}

impl Finding {
    /// Invariant: the text can't forge another finding: it is partly chosen by the owner of a file
    /// system or server.
    fn new(verdict: DoctorVerdict, subject: impl Into<String>, detail: impl Into<String>) -> Self {
        let (subject, detail) = (subject.into(), detail.into());
        Self {
            verdict,
            subject: escaped(&subject).into_owned(),
            detail: escaped(&detail).into_owned(),
        }
    }

    /// A finding whose detail has line breaks of our own, such as the mistakes of a configuration.
    fn with_lines(verdict: DoctorVerdict, subject: &str, detail: &str) -> Self {
        Self { verdict, subject: subject.to_owned(), detail: escaped_lines(detail).into_owned() }
    }
}

/// Makes all checks: the text to print, and whether nothing is bad.
#[must_use]
pub fn examine(target: &GatewayTarget) -> (String, bool) {
    let mut findings = programs();
    findings.push(runtime_directory());
    let config = configuration(target, &mut findings);
    if !matches!(gateway::find(target), Ok(None)) {
        findings.extend(service(target));
    }
    let info = MountInfo::read().unwrap_or_default();
    let (config, left_out) = sshfs::adopted(&config.unwrap_or_default(), &info);
    findings
        .extend(config.executors.iter().flat_map(|executor| examine_executor(executor, &config)));
    findings.extend(left_out.iter().map(|mount| {
        let subject = format!("mount {}", mount.path.display());
        Finding::new(
            DoctorVerdict::Note,
            subject,
            format!("an sshfs mount without owner, since {}", mount.reason),
        )
    }));
    findings.extend(fuse());
    findings.extend(shells());
    (
        findings.iter().map(line).collect(),
        findings.iter().all(|finding| finding.verdict != DoctorVerdict::Bad),
    )
}

fn line(finding: &Finding) -> String {
    let mark = match finding.verdict {
        DoctorVerdict::Good => "ok",
        DoctorVerdict::Note => "note",
        DoctorVerdict::Bad => "BAD",
    };
    // Further lines of a finding are indented below its first.
    let detail = finding.detail.replace('\n', "\n      ");
    format!("{mark:4}  {}: {detail}\n", finding.subject)
}

fn programs() -> Vec<Finding> {
    let found = |name: &str| match programs::beside(name) {
        Ok(path) if path.is_file() => {
            Finding::new(DoctorVerdict::Good, name, path.display().to_string())
        }
        Ok(path) => Finding::new(
            DoctorVerdict::Bad,
            name,
            format!("{} is missing; install it there", path.display()),
        ),
        Err(_) => Finding::new(
            DoctorVerdict::Bad,
            name,
            "can't find posh's own program; is /proc mounted?",
        ),
    };
    ["posh", "posh-stage", "posh-gateway"].map(found).into()
}

fn runtime_directory() -> Finding {
    match RuntimeDir::open() {
        Ok(found) => Finding::new(
            DoctorVerdict::Good,
            "runtime directory",
            found.path().display().to_string(),
        ),
        Err(error) => Finding::with_lines(
            DoctorVerdict::Bad,
            "runtime directory",
            &Error::from(error).chain(),
        ),
    }
}

fn configuration(target: &GatewayTarget, findings: &mut Vec<Finding>) -> Option<Config> {
    let mut found = |verdict, detail: String| {
        findings.push(Finding::with_lines(verdict, "configuration", &detail))
    };
    match gateway::find_config(target) {
        Err(error) => found(DoctorVerdict::Bad, error.chain()),
        Ok(None) => found(
            DoctorVerdict::Note,
            format!("{}; until then everything runs here", Error::NoConfig),
        ),
        Ok(Some(file)) => match Config::load_found(&file) {
            Err(mistakes) => found(DoctorVerdict::Bad, Error::from(mistakes).chain()),
            Ok(config) => {
                let (executors, mounts) = (config.executors.len(), config.mounts.len());
                found(
                    DoctorVerdict::Good,
                    format!("{}: executors {executors}, mounts {mounts}", named(&file.file)),
                );
                return Some(config);
            }
        },
    }
    None
}

/// Checks the gateway, and the owned mounts that it reports.
fn service(target: &GatewayTarget) -> Vec<Finding> {
    let bad =
        |error: &Error| vec![Finding::with_lines(DoctorVerdict::Bad, "gateway", &error.chain())];
    let asked = gateway::require(target).and_then(|place| {
        let mut client = gateway::reach(&place)?;
        Ok((place, client.status()?, client))
    });
    let (place, status, mut client): (gateway::GatewayPlace, _, Client) = match asked {
        Ok(asked) => asked,
        Err(error) => return bad(&error),
    };
    let detail =
        format!("version {}, pid {}, at {}", status.version, status.pid, place.socket().display());
    let mut findings = vec![if status.protocol == PROTOCOL_VERSION {
        Finding::new(DoctorVerdict::Good, "gateway", detail)
    } else {
        // The gateway was started before the programs were replaced; the next shell starts the
        // installed one.
        let words = other_version("the running gateway", status.protocol, OURS);
        Finding::new(
            DoctorVerdict::Bad,
            "gateway",
            format!("{detail}: {words}; to end the one that runs: posh gateway stop"),
        )
    }];
    match client.mounts() {
        Ok(reply) => findings.extend(
            reply.mounts.iter().filter(|mount| !mount.executor.is_empty()).map(examine_mount),
        ),
        Err(error) => findings.extend(bad(&error)),
    }
    findings
}

fn examine_mount(mount: &Mount) -> Finding {
    let subject = format!("mount {}", String::from_utf8_lossy(&mount.path));
    if let Some(why) = mount.state.strip_prefix("not used: ") {
        return Finding::new(DoctorVerdict::Bad, subject, why);
    }
    if mount.mounted {
        Finding::new(
            DoctorVerdict::Good,
            subject,
            format!("{}, owned by {}", mount.fs_type, mount.executor),
        )
    } else {
        let detail = "nothing is mounted there; commands find what the directory itself holds";
        Finding::new(DoctorVerdict::Note, subject, detail)
    }
}

/// Asks the executor itself, as the gateway would, and checks each export of the configuration.
fn examine_executor(executor: &ExecutorConfig, config: &Config) -> Vec<Finding> {
    let subject = format!("executor {}", executor.name);
    let address = &executor.address;
    let reply = match describe(&Route::to(executor, config)) {
        Ok(reply) => reply,
        Err(why) => {
            // Only an sshfs mount names it, not the configuration.
            let verdict = if executor.origin == ExecutorOrigin::Configured {
                DoctorVerdict::Bad
            } else {
                DoctorVerdict::Note
            };
            return vec![Finding::new(
                verdict,
                subject,
                format!("no answer from {address}: {why}"),
            )];
        }
    };
    let mut findings = vec![Finding::new(
        DoctorVerdict::Good,
        subject,
        format!("{} {} at {address}", reply.hostname, reply.version),
    )];
    findings.extend(examine_certificate(executor));
    findings.extend(examine_confinement(executor.name.as_str(), &reply.confinement));
    if reply.protocol != PROTOCOL_VERSION {
        let peer = format!("its posh-executor {}", reply.version);
        let detail = format!(
            "{}; until then everything runs here",
            other_version(&peer, reply.protocol, OURS)
        );
        findings.push(Finding::new(
            DoctorVerdict::Bad,
            format!("executor {}", executor.name),
            detail,
        ));
    }
    let mounts = config.mounts.iter().filter(|mount| mount.executor == executor.name);
    findings
        .extend(mounts.map(|mount| examine_export(executor.name.as_str(), &mount.export, &reply)));
    findings
}

/// Checks the certificate by which the executor knows this workstation.
fn examine_certificate(executor: &ExecutorConfig) -> Option<Finding> {
    let Address::Tls(host) = &executor.address else { return None };
    let path = tls::credentials_file(host).ok()?;
    let credentials = Credentials::load(&path, host).ok()?;
    let days = credentials.expires_in().as_secs() / (24 * 3600);
    let good = format!("as {}, good for {days} days", credentials.identity);
    let subject = format!("certificate {}", executor.name);
    let runtime = Builder::new_current_thread().enable_all().build().ok()?;
    if !runtime.block_on(tls::is_behind(host, &path)) {
        return Some(Finding::new(DoctorVerdict::Good, subject, good));
    }
    let hint = "the executor's authority is being replaced, and the gateway has yet to renew it: \
                once an hour it looks";
    Some(Finding::new(DoctorVerdict::Note, subject, format!("{good}; {hint}")))
}

/// The executor's confinement of commands; an older executor does not report it.
fn examine_confinement(executor: &str, reached: &str) -> Option<Finding> {
    let verdict =
        if reached.starts_with("strict") { DoctorVerdict::Good } else { DoctorVerdict::Note };
    (!reached.is_empty())
        .then(|| Finding::new(verdict, format!("confinement {executor}"), reached.to_owned()))
}

fn examine_export(executor: &str, export: &str, reply: &DescribeReply) -> Finding {
    let subject = format!("export {executor}:{export}");
    match reply.exports.iter().find(|served| served.name == export) {
        Some(served) => Finding::new(
            DoctorVerdict::Good,
            subject,
            if served.read_only { "served, read-only" } else { "served" },
        ),
        None => {
            let names: Vec<&str> =
                reply.exports.iter().map(|served| served.name.as_str()).collect();
            let detail = format!("{}; it has: {}", not_served(export), names.join(", "));
            Finding::new(DoctorVerdict::Bad, subject, detail)
        }
    }
}

/// Over ssh an export is a directory, served if it can be opened.
fn not_served(export: &str) -> &'static str {
    if export.starts_with(['/', '~']) {
        "it can't be opened there"
    } else {
        "the executor serves no such export"
    }
}

/// Reason why an executor does not describe itself.
#[derive(Debug, thiserror::Error)]
enum NoDescription {
    #[error(transparent)]
    Runtime(#[from] io::Error),
    #[error("{}", .0.sentence())]
    Unreachable(#[from] Unreachable),
    /// The connection exists, and the call has failed.
    #[error("{0}")]
    Mute(String),
}

fn describe(route: &Route) -> Result<DescribeReply, NoDescription> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let reached = posh_reach::connect(route).await?;
        let mut client = Server::new(reached.channel);
        let reply = client.describe(DescribeRequest { protocol: PROTOCOL_VERSION });
        let why = match tokio::time::timeout(EXECUTOR_TIMEOUT, reply).await {
            Ok(Ok(reply)) => return Ok(reply),
            Ok(Err(status)) => status.message().to_owned(),
            Err(_) => "it does not answer".to_owned(),
        };
        Err(NoDescription::Mute(posh_reach::why_mute(route, why).await))
    })
}

fn fuse() -> Vec<Finding> {
    let device = match OpenOptions::new().read(true).write(true).open("/dev/fuse") {
        Ok(_) => Finding::new(DoctorVerdict::Good, "/dev/fuse", "can be opened"),
        Err(error) => {
            let hint = "without it no FUSE mount (sshfs, rclone, ...) works; run: modprobe fuse";
            Finding::new(DoctorVerdict::Bad, "/dev/fuse", format!("{error}; {hint}"))
        }
    };
    vec![
        device,
        on_path(
            "fusermount3",
            DoctorVerdict::Note,
            "ordinary users need it to mount; install fuse3",
        ),
    ]
}

fn shells() -> Vec<Finding> {
    let shell = |shell: Shell| {
        let absent = if shell == Shell::Bash { DoctorVerdict::Bad } else { DoctorVerdict::Note };
        let mut found = on_path(shell.name(), absent, "posh can't start it");
        let path = find_program(shell.name(), &env::var_os("PATH").unwrap_or_default());
        if let Some(Err(error)) = path.map(|path| hook::library_for(&path)) {
            found.verdict = DoctorVerdict::Note;
            found
                .detail
                .push_str(&format!("\nits commands are seen through shims on PATH only: {error}"));
        }
        found
    };
    [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Dash].map(shell).into()
}

fn on_path(name: &str, if_absent: DoctorVerdict, hint: &str) -> Finding {
    match find_program(name, &env::var_os("PATH").unwrap_or_default()) {
        Some(path) => Finding::new(DoctorVerdict::Good, name, display(&path)),
        None => Finding::new(if_absent, name, format!("not on PATH; {hint}")),
    }
}

fn display(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use posh_proto::executor::Export;

    use super::*;

    #[test]
    fn what_others_have_named_makes_no_finding() {
        let forged = "x\nok    gateway: it is well";
        let mount = Mount {
            path: forged.as_bytes().to_vec().into(),
            fs_type: forged.to_owned(),
            executor: forged.to_owned(),
            mounted: true,
            ..Mount::default()
        };
        let (mounted, gone) =
            (examine_mount(&mount), examine_mount(&Mount { mounted: false, ..mount.clone() }));
        let reply = DescribeReply { confinement: forged.to_owned(), ..DescribeReply::default() };
        let others = [
            examine_export("store1", forged, &reply),
            examine_confinement("store1", forged).unwrap(),
        ];
        for finding in [mounted, gone].iter().chain(&others) {
            assert_eq!(line(finding).lines().count(), 1, "{finding:?}");
        }
    }

    #[test]
    fn a_missing_export_is_bad_and_names_those_there_are() {
        let exports = ["logs", "home"]
            .map(|name| Export { name: name.to_owned(), read_only: name == "home" });
        let reply = DescribeReply { exports: exports.into(), ..DescribeReply::default() };
        let verdict = |export: &str| examine_export("store1", export, &reply).verdict;
        assert_eq!(
            (verdict("logs"), verdict("home"), verdict("log")),
            (DoctorVerdict::Good, DoctorVerdict::Good, DoctorVerdict::Bad)
        );
        let missing = line(&examine_export("store1", "log", &reply));
        assert_eq!(
            missing,
            "BAD   export store1:log: the executor serves no such export; it has: logs, home\n"
        );
    }
}
