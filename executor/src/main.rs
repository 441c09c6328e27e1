//! The program `posh-executor`: reads its arguments and either serves, or is a
//! runner that another `posh-executor` started. Exit codes live here: 0 after
//! an orderly end, 1 when serving failed, 2 when the configuration is wrong.

use std::{ffi::OsString, net::SocketAddr, path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use posh_executor::{
    Config, Error, Stdio, config, run, run_stdio, run_with_changes, runner,
    tls::{DEFAULT_DIRECTORY, TlsError, administer},
    verify,
};
use tokio::{net::TcpListener, runtime, signal::unix, sync::mpsc};
use tracing_subscriber::EnvFilter;

/// Worker threads at most: streams are bounded by the network, and the cores
/// belong to the commands.
const MAX_WORKERS: usize = 4;

/// Runs parts of shell pipelines next to the data
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    role: Option<Role>,
    /// Read everything from this file (see docs/executor.md)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["stdio", "listen", "export", "read_only", "allow_plaintext"])]
    config: Option<PathBuf>,
    /// Address and port to listen on
    #[arg(long, value_name = "ADDR", default_value_t = config::default_listen())]
    listen: SocketAddr,
    /// Serve the one connection on standard input and output, and end with it: for ssh
    #[arg(long, conflicts_with_all = ["listen", "allow_plaintext"])]
    stdio: bool,
    /// Serve directory DIR under NAME, or /DIR or ~/DIR under that very text; may be repeated
    #[arg(long, value_name = "[NAME=]DIR", value_parser = config::parse_export)]
    export: Vec<(String, PathBuf)>,
    /// Commands may read the exports, but not change them
    #[arg(long)]
    read_only: bool,
    /// Serve plain text on addresses that others can reach: closed networks only
    #[arg(long)]
    allow_plaintext: bool,
}

#[derive(Subcommand)]
enum Role {
    /// Started by the executor itself: one private view of the file tree
    #[command(hide = true)]
    Runner,
    /// Behind `posh annotations verify`
    #[command(hide = true)]
    Verify {
        /// A directory of annotation files; may be repeated
        #[arg(long, value_name = "DIR")]
        annotations: Vec<PathBuf>,
        /// Lines for the shell
        #[arg(long, value_name = "FILE")]
        file: Option<PathBuf>,
        /// Run in a copy of DIR
        #[arg(long = "in", value_name = "DIR")]
        in_copy_of: Option<PathBuf>,
        /// One command, or one line for the shell
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
    /// Make the certificates of this executor: an authority of its own, and what it shows to gateways
    Init {
        #[command(flatten)]
        place: Place,
        /// A host name or IP address by which gateways call this machine; may be repeated
        #[arg(long, value_name = "HOST")]
        name: Vec<String>,
    },
    /// Make this executor a new certificate, for other names if any are given
    Renew {
        #[command(flatten)]
        place: Place,
        /// A host name or IP address by which gateways call this machine; may be repeated
        #[arg(long, value_name = "HOST")]
        name: Vec<String>,
    },
    /// Print a token by which one workstation gets a certificate as NAME, once and within an hour
    Enroll {
        #[command(flatten)]
        place: Place,
        /// The [[identity]] of executor.toml
        #[arg(value_parser = identity)]
        name: String,
    },
    /// Take the certificates and tokens of NAME back; a running executor heeds it at once
    Revoke {
        #[command(flatten)]
        place: Place,
        /// As it was enrolled
        #[arg(value_parser = identity)]
        name: String,
    },
    /// List the certificates that were issued
    List {
        #[command(flatten)]
        place: Place,
    },
}

/// Where certificates, keys and tokens are.
#[derive(Args)]
struct Place {
    /// The directory, as in [tls] of executor.toml
    #[arg(long, value_name = "DIR", default_value = DEFAULT_DIRECTORY)]
    dir: PathBuf,
}

fn identity(text: &str) -> Result<String, String> {
    config::check_identity(text).map(|()| text.to_owned())
}

fn main() -> ExitCode {
    let mut arguments = Arguments::parse();
    match arguments.role.take() {
        None => {}
        Some(Role::Runner) => return runner::main(),
        Some(Role::Verify { annotations, file, in_copy_of, command }) => {
            return tell_verdict(verify::verify(&verify::Task { annotations, command, file, in_copy_of }));
        }
        Some(role) => return tell(administer(role)),
    }
    // What an executor behind ssh says is for the error message of a gateway, not for a log.
    let level = if arguments.stdio { "warn" } else { "info" };
    // Whoever read the log may be gone; to say so there would be a panic.
    tracing_subscriber::fmt()
        .log_internal_errors(false)
        .with_env_filter(EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level)))
        .with_writer(std::io::stderr)
        .with_ansi(!arguments.stdio)
        .init();
    match serve(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("posh-executor: {error:#}");
            let is_config = matches!(
                error.downcast_ref(),
                Some(Error::Config(_) | Error::Plaintext(_) | Error::Confinement { .. })
            );
            ExitCode::from(if is_config { 2 } else { 1 })
        }
    }
}

/// The commands of an administrator: what to print, and a hint for who reads it.
fn administer(role: Role) -> Result<(String, String), TlsError> {
    let absolute = |place: Place| std::path::absolute(&place.dir).unwrap_or(place.dir);
    let text = match role {
        Role::Runner | Role::Verify { .. } => String::new(),
        Role::Init { place, name } => administer::init(&absolute(place), name)?,
        Role::Renew { place, name } => administer::renew(&absolute(place), name)?,
        Role::Enroll { place, name } => return administer::enroll(&absolute(place), &name),
        Role::Revoke { place, name } => administer::revoke(&absolute(place), &name)?,
        Role::List { place } => administer::list(&absolute(place))?,
    };
    Ok((text, String::new()))
}

fn tell(outcome: Result<(String, String), TlsError>) -> ExitCode {
    match outcome {
        Ok((text, hint)) => {
            eprint!("{hint}");
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("posh-executor: {:#}", anyhow::Error::from(error));
            ExitCode::FAILURE
        }
    }
}

fn tell_verdict(outcome: std::io::Result<(String, bool)>) -> ExitCode {
    match outcome {
        Ok((text, is_sound)) => {
            print!("{text}");
            if is_sound { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("posh-executor: {error}");
            ExitCode::from(2)
        }
    }
}

/// Reads the configuration again at each SIGHUP. One with mistakes changes nothing.
async fn read_anew(file: PathBuf, mut hangup: unix::Signal, changed: mpsc::Sender<Config>) {
    while hangup.recv().await.is_some() {
        match Config::load(&file) {
            Ok(config) => drop(changed.send(config).await),
            Err(error) => {
                let error = anyhow::Error::from(error);
                tracing::error!("the configuration stays as it was, since it can't be read anew: {error:#}");
            }
        }
    }
}

fn serve(arguments: Arguments) -> anyhow::Result<()> {
    let config = match &arguments.config {
        Some(file) => Config::load(file)?,
        None if arguments.stdio => Config::for_stdio(arguments.export, arguments.read_only),
        None => {
            Config::from_arguments(arguments.listen, arguments.export, arguments.read_only, arguments.allow_plaintext)?
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(cores.clamp(1, MAX_WORKERS))
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async {
        let mut terminate = unix::signal(unix::SignalKind::terminate()).context("cannot handle SIGTERM")?;
        let mut interrupt = unix::signal(unix::SignalKind::interrupt()).context("cannot handle SIGINT")?;
        if arguments.stdio {
            // sshd, or whoever stands for it, is going: runs end in order before we do.
            let mut hangup = unix::signal(unix::SignalKind::hangup()).context("cannot handle SIGHUP")?;
            let shutdown = async move {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                    _ = hangup.recv() => {}
                }
            };
            return Ok(run_stdio(config, Stdio::take()?, shutdown).await?);
        }
        config.check_address(config.listen)?;
        let listener =
            TcpListener::bind(config.listen).await.with_context(|| format!("cannot listen on {}", config.listen))?;
        let shutdown = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        let Some(file) = arguments.config else { return Ok(run(config, listener, shutdown).await?) };
        let hangup = unix::signal(unix::SignalKind::hangup()).context("cannot handle SIGHUP")?;
        let (changed, changes) = mpsc::channel(1);
        tokio::spawn(read_anew(file, hangup, changed));
        Ok(run_with_changes(config, changes, listener, shutdown).await?)
    })
}
