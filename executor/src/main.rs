//! The program `posh-executor`: reads its arguments and either serves, or is a runner that another
//! `posh-executor` started. Exit codes: 0 after an orderly end, 1 when serving failed, 2 when the
//! configuration is wrong.

use std::{
    ffi::OsString, net::SocketAddr, path::PathBuf, process::ExitCode, thread, time::Duration,
};

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use posh_executor::{
    Config, ConfigChanges, Error, Stdio,
    accounts::{self, Inputs},
    audit, config, longest_end, run_stdio, run_with_changes, runner,
    tls::{DEFAULT_DIRECTORY, TlsError, administer, rotation::Forced},
    verify,
};
use tokio::{
    net::TcpListener,
    runtime,
    signal::unix,
    sync::{mpsc, oneshot},
};
use tracing_subscriber::EnvFilter;

/// Worker threads at most: the network bounds streams, and the cores belong to the commands.
const MAX_WORKERS: usize = 4;

/// Handshakes and strangers keep one processor busy at most: some thousand handshakes a second.
const STRANGERS_WORKERS: usize = 1;

/// Niceness of these workers, so that floods of strangers cost others no processor.
const STRANGERS_NICE: i32 = 10;

/// Identities without an account that may wait for a look-up.
const ATTEMPTS: usize = 64;

/// Time beyond the longest orderly end, after which the process exits all the same.
const END_SLACK: Duration = Duration::from_secs(2);

/// Runs parts of shell pipelines next to the data
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct ExecutorArguments {
    #[command(subcommand)]
    role: Option<Role>,
    /// Read everything from this file (see docs/executor.md)
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = [
            "stdio", "listen", "export", "read_only", "allow_plaintext", "user",
            "trust_caller_ids", "require", "state",
        ]
    )]
    config: Option<PathBuf>,
    /// Address and port to listen on
    #[arg(long, value_name = "ADDR", default_value_t = config::default_listen())]
    listen: SocketAddr,
    /// Serve the one connection on standard input and output, and end with it: for ssh
    #[arg(
        long,
        conflicts_with_all = [
            "listen", "allow_plaintext", "user", "trust_caller_ids", "require", "state",
        ]
    )]
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
    /// Run commands as this account; root has to be spelled out
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Let volumes act with the ids that workstations claim (with --user root only)
    #[arg(long)]
    trust_caller_ids: bool,
    /// Directory for what the next start has to know of volumes (/run/posh-executor for root)
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Refuse to start where commands are confined less than this: strict (the default), namespaces
    /// or none
    #[arg(long, value_name = "LEVEL")]
    require: Option<config::Level>,
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
    /// Make the certificates of this executor: an authority of its own, and what it shows to
    /// gateways
    Init {
        #[command(flatten)]
        place: CertificateDirectory,
        /// A host name or IP address by which gateways call this machine; may be repeated
        #[arg(long, value_name = "HOST")]
        name: Vec<String>,
    },
    /// Make this executor a new certificate, for other names if any are given
    Renew {
        #[command(flatten)]
        place: CertificateDirectory,
        /// A host name or IP address by which gateways call this machine; may be repeated
        #[arg(long, value_name = "HOST")]
        name: Vec<String>,
    },
    /// Replace the authority without an outage: make the next one, and once all have renewed, end
    /// the former one
    Rotate {
        #[command(flatten)]
        place: CertificateDirectory,
        /// From now on only the next authority counts; refused while a certificate of the former
        /// one does
        #[arg(long)]
        finish: bool,
        /// Also if workstations are locked out by it, which must be enrolled anew
        #[arg(long, requires = "finish")]
        force: bool,
    },
    /// Print a token by which one workstation gets a certificate as NAME, once and within an hour
    Enroll {
        #[command(flatten)]
        place: CertificateDirectory,
        /// The [[identity]] of executor.toml
        #[arg(value_parser = identity)]
        name: String,
    },
    /// Take the certificates and tokens of NAME back; a running executor heeds it at once
    Revoke {
        #[command(flatten)]
        place: CertificateDirectory,
        /// As it was enrolled
        #[arg(value_parser = identity)]
        name: String,
        /// Only the certificate whose SHA-256 begins so, as `list` shows it
        #[arg(long, value_name = "SHA256")]
        certificate: Option<String>,
    },
    /// Look at the audit record
    Audit {
        #[command(subcommand)]
        task: AuditTask,
    },
    /// List the certificates that were issued
    List {
        #[command(flatten)]
        place: CertificateDirectory,
    },
}

#[derive(Subcommand)]
enum AuditTask {
    /// Tell whether lines were removed, changed or moved since they were written
    Verify {
        /// The files of one record, the oldest first, the one that is written now last
        #[arg(required = true, value_name = "FILE")]
        file: Vec<PathBuf>,
    },
}

/// Where certificates, keys and tokens are.
#[derive(Args)]
struct CertificateDirectory {
    /// The directory, as in [tls] of executor.toml
    #[arg(long, value_name = "DIR", default_value = DEFAULT_DIRECTORY)]
    dir: PathBuf,
}

fn identity(text: &str) -> Result<String, config::NoIdentityName> {
    config::check_identity(text).map(|()| text.to_owned())
}

fn main() -> ExitCode {
    let mut arguments = ExecutorArguments::parse();
    match arguments.role.take() {
        None => {}
        Some(Role::Runner) => return runner::main(),
        Some(Role::Verify { annotations, file, in_copy_of, command }) => {
            return tell_verdict(verify::verify(&verify::Task {
                annotations,
                command,
                file,
                in_copy_of,
            }));
        }
        Some(Role::Audit { task: AuditTask::Verify { file } }) => {
            return tell_verdict(
                audit::verify(&file).map(|verdict| (verdict.text, verdict.is_whole)),
            );
        }
        Some(role) => return tell(administer(role)),
    }
    // Behind ssh, the output is for the error message of a gateway, not for a log.
    let level = if arguments.stdio { "warn" } else { "info" };
    // The log's reader may be gone; to report that on standard error would panic.
    tracing_subscriber::fmt()
        .log_internal_errors(false)
        .with_env_filter(
            EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level)),
        )
        .with_writer(std::io::stderr)
        .with_ansi(!arguments.stdio)
        .init();
    match serve(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("posh-executor: {error:#}");
            let is_config = matches!(
                error.downcast_ref(),
                Some(
                    Error::Config(_)
                        | Error::Plaintext(_)
                        | Error::RootUser
                        | Error::Confinement { .. }
                )
            );
            ExitCode::from(if is_config { 2 } else { 1 })
        }
    }
}

/// Runs an administrator's command; returns its output, and a hint for the user.
fn administer(role: Role) -> Result<(String, String), TlsError> {
    let absolute =
        |place: CertificateDirectory| std::path::absolute(&place.dir).unwrap_or(place.dir);
    let text = match role {
        Role::Runner | Role::Verify { .. } | Role::Audit { .. } => String::new(),
        Role::Init { place, name } => administer::init(&absolute(place), name)?,
        Role::Renew { place, name } => administer::renew(&absolute(place), name)?,
        Role::Rotate { place, finish: false, .. } => administer::rotate(&absolute(place))?,
        Role::Rotate { place, force, .. } => administer::finish_rotation(
            &absolute(place),
            if force { Forced::Yes } else { Forced::No },
        )?,
        Role::Enroll { place, name } => return administer::enroll(&absolute(place), &name),
        Role::Revoke { place, name, certificate: None } => {
            administer::revoke(&absolute(place), &name)?
        }
        Role::Revoke { place, name, certificate: Some(prefix) } => {
            administer::revoke_one(&absolute(place), &name, &prefix)?
        }
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

/// Adds the default directory for records of volume sessions, if volumes are served.
fn with_state(mut config: Config) -> Config {
    if config.volumes {
        config.state.get_or_insert_with(config::default_state);
    }
    config
}

/// Reads the configuration again at each SIGHUP. One with mistakes changes nothing.
async fn read_anew(
    mut config: Config,
    file: PathBuf,
    mut hangup: unix::Signal,
    changed: mpsc::Sender<Config>,
) {
    while hangup.recv().await.is_some() {
        let (file, before) = (file.clone(), config.clone());
        // Looking up accounts may take a while.
        let loaded =
            tokio::task::spawn_blocking(move || before.load_again(&file).map(with_state)).await;
        match loaded
            .map_err(anyhow::Error::from)
            .and_then(|loaded| loaded.map_err(anyhow::Error::from))
        {
            Ok(read) => {
                config = read;
                drop(changed.send(config.clone()).await);
            }
            Err(error) => {
                tracing::error!(
                    "the configuration stays as it was, since it can't be read anew: {error:#}"
                );
            }
        }
    }
}

/// Waits for the signals that end the executor, on a thread of its own, which nothing in the
/// executor can block. If the executor has not ended in its longest time, the thread ends the
/// process.
fn heed_signals(is_stdio: bool, longest_end: Duration) -> anyhow::Result<oneshot::Receiver<()>> {
    let (told, shutdown) = oneshot::channel();
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot wait for signals")?;
    let entered = runtime.enter();
    let mut terminate =
        unix::signal(unix::SignalKind::terminate()).context("cannot handle SIGTERM")?;
    let mut interrupt =
        unix::signal(unix::SignalKind::interrupt()).context("cannot handle SIGINT")?;
    // A write beyond a limit on file sizes must fail with EFBIG and not kill the process: a caller
    // of a volume chooses where it writes. The handler stays when this is dropped.
    drop(
        unix::signal(unix::SignalKind::from_raw(nix::libc::SIGXFSZ))
            .context("cannot handle SIGXFSZ")?,
    );
    // sshd, or its stand-in, is ending: end runs in order before us.
    let hangup = is_stdio.then(|| unix::signal(unix::SignalKind::hangup())).transpose();
    let mut hangup = hangup.context("cannot handle SIGHUP")?;
    drop(entered);
    let wait = async move {
        let hung_up = async {
            match &mut hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hung_up => {}
        }
        let _ = told.send(());
        tokio::time::sleep(longest_end + END_SLACK).await;
        // No message: the log may be what hangs.
        std::process::exit(1);
    };
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || runtime.block_on(wait))
        .context("cannot wait for signals")?;
    Ok(shutdown)
}

fn serve(arguments: ExecutorArguments) -> anyhow::Result<()> {
    let mut config = match &arguments.config {
        Some(file) => Config::load(file)?,
        None if arguments.stdio => Config::for_stdio(arguments.export, arguments.read_only),
        None => {
            let rights = config::RightsArguments {
                user: arguments.user,
                trust_caller_ids: arguments.trust_caller_ids,
                require: arguments.require,
            };
            let ExecutorArguments { listen, export, read_only, allow_plaintext, state, .. } =
                arguments;
            let state = state.map(|state| std::path::absolute(&state).unwrap_or(state));
            Config {
                state,
                ..Config::from_arguments(listen, export, read_only, allow_plaintext, rights)?
            }
        }
    };
    // Behind ssh there is one session, and the next process serves another one.
    if !arguments.stdio {
        config = with_state(config);
    }
    let told = heed_signals(arguments.stdio, longest_end(config.drain))?;
    let shutdown = async move {
        let _ = told.await;
    };
    // Identities have runtimes of their own: this one serves handshakes and peers without proof.
    let serves_strangers = config.tls.is_some();
    let workers = match serves_strangers {
        true => STRANGERS_WORKERS,
        false => std::thread::available_parallelism().map_or(1, usize::from).clamp(1, MAX_WORKERS),
    };
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(workers)
        .on_thread_start(move || {
            if serves_strangers {
                posh_executor::lower_priority(STRANGERS_NICE);
            }
        })
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let served = runtime.block_on(async {
        if arguments.stdio {
            return Ok(run_stdio(config, Stdio::take()?, shutdown).await?);
        }
        config.check_address(config.listen)?;
        let listener = TcpListener::bind(config.listen)
            .await
            .with_context(|| format!("cannot listen on {}", config.listen))?;
        let (read, anew) = mpsc::channel(1);
        if let Some(file) = arguments.config {
            let hangup =
                unix::signal(unix::SignalKind::hangup()).context("cannot handle SIGHUP")?;
            tokio::spawn(read_anew(config.clone(), file, hangup, read));
        }
        let (changed, configs) = mpsc::channel(1);
        let (attempts, attempted) = mpsc::channel(ATTEMPTS);
        tokio::spawn(accounts::follow(config.clone(), Inputs { anew, attempted }, changed));
        let changes = ConfigChanges { configs, attempts };
        Ok(run_with_changes(config, changes, listener, shutdown).await?)
    });
    // Work that hangs in the kernel must not hold up the end.
    runtime.shutdown_background();
    served
}
