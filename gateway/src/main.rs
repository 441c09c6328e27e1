//! `posh-gateway`: reads its configuration, binds its sockets, serves.
#![forbid(unsafe_code)]

use std::{
    fs::File,
    io::Write,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::Parser;
use fs_mapper::config::{Config, ConfigErrors, ConfigSearch, FoundConfig, Mistake};
use posh_gateway::{
    Listeners,
    log::{Limit, Log, LogFile},
};
use posh_proto::{
    runtime::{RuntimeDir, stage_socket},
    untrusted::escaped,
};
use tokio::{
    net::{UnixListener, UnixSocket, UnixStream},
    signal::unix::{SignalKind, signal},
};
use tracing_subscriber::{EnvFilter, layer::SubscriberExt as _, util::SubscriberInitExt as _};

/// Limit on stage connections that wait to be accepted. The kernel accepts them in order, so a
/// process that connects without pause is ahead of the others by so many. Beyond, the processes
/// wait for their turns. 256 connections are accepted within some milliseconds; a question of the
/// preload library waits 50 ms.
const STAGE_BACKLOG: u32 = 256;
/// The kernel's own limit.
const SOMAXCONN: u32 = 4096;
/// Time in which each kind of event has a limited number of lines in the log.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The posh gateway: decides where the commands of a posh shell run.
#[derive(Debug, Parser)]
#[command(version)]
struct GatewayArguments {
    /// The mount table (default: $POSH_CONFIG, ./mounts.toml, ~/.config/posh/mounts.toml,
    /// /etc/posh/mounts.toml)
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The mount table that a directory holds and its user has allowed, which may start and mount
    /// nothing
    #[arg(long, value_name = "FILE", hide = true, conflicts_with = "config")]
    from_directory: Option<PathBuf>,
    /// The gRPC socket to listen on (default: in the user's runtime directory, named after the
    /// configuration)
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Write "ready" and a newline, or what went wrong, to this descriptor
    #[arg(long, value_name = "N", hide = true)]
    ready_fd: Option<u32>,
    /// The file that is standard error, which then keeps to a limited size; a former one has
    /// `.old` behind its name
    #[arg(long, value_name = "FILE", hide = true)]
    log: Option<PathBuf>,
}

fn main() -> ExitCode {
    posh_gateway::keep_little();
    let arguments = GatewayArguments::parse();
    let limit = log_to(LogFile::new(arguments.log.as_deref()));
    let ready = arguments.ready_fd;
    let raised = posh_gateway::limits::raise().map_err(Into::into);
    let served = raised.and_then(|()| serve(&arguments, &limit));
    limit.tell_withheld(Log(LogFile::new(arguments.log.as_deref())));
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let words = words(&error);
            tell_starter(ready, &format!("{words}\n"));
            eprintln!("posh-gateway: {words}");
            ExitCode::FAILURE
        }
    }
}

/// The error in one line, or each mistake of the configuration in one: no name in them forges any.
fn words(error: &anyhow::Error) -> String {
    match error.downcast_ref::<ConfigErrors>() {
        Some(errors) => {
            let line = |mistake: &Mistake| escaped(&mistake.to_string()).into_owned();
            errors.mistakes().iter().map(line).collect::<Vec<_>>().join("\n")
        }
        None => escaped(&format!("{error:#}")).into_owned(),
    }
}

fn log_to(file: LogFile) -> Limit {
    file.clone().include_panics();
    let limit = Limit::default();
    // Standard error may be closed; reporting that on it would panic.
    let lines = tracing_subscriber::fmt::layer()
        .log_internal_errors(false)
        .with_ansi(false)
        .with_writer(move || Log(file.clone()));
    tracing_subscriber::registry()
        .with(lines)
        .with(limit.clone())
        .with(EnvFilter::try_from_env("POSH_LOG").unwrap_or_else(|_| "info".into()))
        .init();
    limit
}

fn serve(arguments: &GatewayArguments, limit: &Limit) -> anyhow::Result<()> {
    let found = configuration(arguments)?;
    let config = Config::load_found(&found)?;
    // A command's message passes through half a dozen tasks. With a second worker, each of them
    // wakes it, to find nothing left to do or to move the next task to another processor: 1.4 ms of
    // a small command's 5.6 ms on two processors, without more throughput. Work that may take long
    // goes `aside`, and volumes have their own threads.
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let served = runtime.block_on(async {
        let directory = RuntimeDir::open()?;
        let socket = arguments
            .socket
            .clone()
            .unwrap_or_else(|| directory.socket_path(&found.gateway_name()));
        let stage_socket = stage_socket(&socket);
        let listeners = Listeners {
            grpc: bind(&socket, SOMAXCONN).await?,
            stages: bind(&stage_socket, STAGE_BACKLOG).await?,
            stage_socket: stage_socket.clone(),
            directory: directory.path().to_owned(),
        };
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        // A limit on file sizes may be set from outside (prlimit(2)): a write beyond must be an
        // error and not end all sessions. The handler stays after the drop.
        drop(signal(SignalKind::from_raw(nix::libc::SIGXFSZ))?);
        let shutdown = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        tracing::info!(socket = %socket.display(), config = ?found.file, "listening");
        let (limit, log) = (limit.clone(), LogFile::new(arguments.log.as_deref()));
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(LOG_INTERVAL).await;
                limit.tell_withheld(Log(log.clone()));
            }
        });
        tell_starter(arguments.ready_fd, "ready\n");
        let served = posh_gateway::run(config, listeners, shutdown).await;
        let _ = std::fs::remove_file(&socket);
        let _ = std::fs::remove_file(&stage_socket);
        served.map_err(anyhow::Error::from)
    });
    // A thread that waits for a mount may do so forever.
    runtime.shutdown_background();
    served
}

fn configuration(arguments: &GatewayArguments) -> anyhow::Result<FoundConfig> {
    if let Some(file) = &arguments.from_directory {
        return Ok(Config::allowed(file)?);
    }
    if let Some(file) = &arguments.config {
        return Ok(Config::named(file)?);
    }
    let ConfigSearch { found, passed_over } = Config::find()?;
    for why in passed_over {
        tracing::warn!("{}", escaped(&why.to_string()));
    }
    found.ok_or_else(|| anyhow::anyhow!("no configuration found; give --config FILE"))
}

/// Listens on a socket that only this user may use, replacing a stale one.
async fn bind(path: &Path, backlog: u32) -> anyhow::Result<UnixListener> {
    if UnixStream::connect(path).await.is_ok() {
        anyhow::bail!("another gateway listens on {}", path.display());
    }
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            anyhow::bail!("cannot replace the old socket {}: {e}", path.display());
        }
        _ => {}
    }
    let socket = UnixSocket::new_stream()?;
    let listener = socket
        .bind(path)
        .and_then(|()| socket.listen(backlog))
        .map_err(|e| anyhow::anyhow!("cannot listen on {}: {e}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Writes to the starter's pipe and closes it: the starter reads to the end.
fn tell_starter(descriptor: Option<u32>, text: &str) {
    let Some(number) = descriptor.map(u32::cast_signed) else { return };
    // Reopened through /proc, since the number alone does not own the descriptor.
    if let Ok(mut pipe) = File::options().write(true).open(format!("/proc/self/fd/{number}")) {
        let _ = pipe.write_all(text.as_bytes());
    }
    let _ = nix::unistd::close(number);
}
