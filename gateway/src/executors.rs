//! The executors of this configuration and the warm connection to each: made
//! before the first pipeline needs it, with what the executor said of itself.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use fs_mapper::{ExecutorName, config::ExecutorConfig};
use posh_proto::{
    MAX_MESSAGE_BYTES, PROTOCOL_VERSION,
    executor::{DescribeReply, DescribeRequest, Tool, ToolsRequest, executor_client::ExecutorClient},
};
use tokio::sync::{Notify, watch};
use tonic::transport::{Channel, Endpoint};

use crate::plan::ExecutorId;

/// One HTTP/2 stream may have this much under way: 20 ms at 600 Mbit/s are 1.5 MB,
/// and a loopback link takes far more.
pub const STREAM_WINDOW_BYTES: u32 = 8 << 20;
/// All streams of a connection together; credits keep the streams below it, so
/// that none that is read late can hold up the others.
pub const CONNECTION_WINDOW_BYTES: u32 = 256 << 20;
/// Chunks are up to 256 KiB: with the default frames of 16 KiB the executor needs twice the time for a gigabyte.
const FRAME_BYTES: u32 = 1 << 20;
/// Keepalive: a frozen peer is noticed after the two together.
const KEEPALIVE: Duration = Duration::from_secs(2);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// What one attempt to connect and ask may take in all.
const GREETING_TIMEOUT: Duration = Duration::from_secs(8);
/// Pauses between attempts, doubling.
const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_LAST: Duration = Duration::from_secs(20);
/// How long the first pipeline waits for a connection that is being made.
const PATIENCE: Duration = Duration::from_secs(2);

/// A live connection.
#[derive(Debug)]
pub struct Connection {
    /// The client; clones share the connection.
    pub client: ExecutorClient<Channel>,
    /// What the executor is and serves.
    pub about: DescribeReply,
    /// Its commands, by name, without version lines.
    pub tools: HashMap<String, Tool>,
    /// The shortest of a few round trips.
    pub rtt: Duration,
}

/// How it stands with an executor.
#[derive(Debug, Clone)]
pub enum State {
    /// The first attempt is under way.
    Connecting,
    /// In reach.
    Ready(Arc<Connection>),
    /// Not in reach, and why.
    Unreachable(String),
}

/// One executor of the configuration.
#[derive(Debug)]
pub struct Executor {
    /// Its place in the configuration.
    pub id: ExecutorId,
    /// Its name there.
    pub name: ExecutorName,
    /// Where it listens.
    pub address: String,
    state: watch::Sender<State>,
    retry: Notify,
}

/// All executors of the configuration.
#[derive(Debug, Clone)]
pub struct Executors(Arc<Vec<Arc<Executor>>>);

impl Executors {
    /// Starts to connect to each. `commands` are those whose identity matters.
    #[must_use]
    pub fn start(configured: &[ExecutorConfig], commands: &Arc<Vec<String>>) -> Self {
        let executors = configured.iter().enumerate().map(|(index, config)| {
            let executor = Arc::new(Executor {
                id: ExecutorId(index),
                name: config.name.clone(),
                address: config.address.as_str().to_owned(),
                state: watch::Sender::new(State::Connecting),
                retry: Notify::new(),
            });
            tokio::spawn(Arc::clone(&executor).keep_connected(Arc::clone(commands)));
            executor
        });
        Self(Arc::new(executors.collect()))
    }

    /// One of them.
    #[must_use]
    pub fn get(&self, id: ExecutorId) -> &Arc<Executor> {
        &self.0[id.0]
    }

    /// By the configuration's name.
    #[must_use]
    pub fn named(&self, name: &ExecutorName) -> Option<&Arc<Executor>> {
        self.0.iter().find(|e| e.name == *name)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Executor>> {
        self.0.iter()
    }
}

impl Executor {
    /// Its state now.
    #[must_use]
    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// The connection, waiting a little for one that is being made.
    ///
    /// # Errors
    /// The sentence for explain.
    pub async fn connection(&self) -> Result<Arc<Connection>, String> {
        let mut state = self.state.subscribe();
        let settled = state.wait_for(|s| !matches!(s, State::Connecting));
        match tokio::time::timeout(PATIENCE, settled).await {
            Ok(Ok(settled)) => match &*settled {
                State::Ready(connection) => Ok(Arc::clone(connection)),
                State::Unreachable(why) => Err(self.out_of_reach(why)),
                State::Connecting => unreachable!("waited for something else"),
            },
            _ => Err(self.out_of_reach("it has not answered yet")),
        }
    }

    /// A run found the connection broken: try anew.
    pub fn lost(&self, connection: &Arc<Connection>, why: &str) {
        let is_current = matches!(&*self.state.borrow(), State::Ready(c) if Arc::ptr_eq(c, connection));
        if is_current {
            tracing::warn!(executor = %self.name, why, "connection lost");
            self.state.send_replace(State::Unreachable(why.to_owned()));
            self.retry.notify_one();
        }
    }

    fn out_of_reach(&self, why: &str) -> String {
        format!("executor {} at {} is not in reach: {why}", self.name, self.address)
    }

    async fn keep_connected(self: Arc<Self>, commands: Arc<Vec<String>>) {
        let mut pause = RETRY_FIRST;
        loop {
            match tokio::time::timeout(GREETING_TIMEOUT, greet(&self.address, &commands)).await {
                Ok(Ok(connection)) => {
                    tracing::info!(executor = %self.name, address = self.address, rtt = ?connection.rtt, "connected");
                    self.state.send_replace(State::Ready(Arc::new(connection)));
                    pause = RETRY_FIRST;
                    self.retry.notified().await;
                }
                Ok(Err(why)) => self.note_failure(&why),
                Err(_) => self.note_failure("it does not answer"),
            }
            let _ = tokio::time::timeout(pause, self.retry.notified()).await;
            pause = (pause * 2).min(RETRY_LAST);
        }
    }

    fn note_failure(&self, why: &str) {
        let known = matches!(&*self.state.borrow(), State::Unreachable(old) if old == why);
        if !known {
            tracing::warn!(executor = %self.name, address = self.address, why, "not in reach");
        }
        self.state.send_replace(State::Unreachable(why.to_owned()));
    }
}

/// Connects and asks what the pipelines will need to know.
async fn greet(address: &str, commands: &[String]) -> Result<Connection, String> {
    let endpoint = Endpoint::from_shared(address.to_owned())
        .map_err(|e| format!("bad address: {e}"))?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE)
        .keep_alive_while_idle(true);
    let channel = endpoint.connect().await.map_err(|e| root_cause(&e))?;
    let mut client = ExecutorClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    // Both at once: a first command waits for the answers.
    let mut second = client.clone();
    let tools = second.tools(ToolsRequest { names: commands.to_vec(), versions: false });
    let asked = Instant::now();
    let about = async { (client.describe(DescribeRequest { protocol: PROTOCOL_VERSION }).await, asked.elapsed()) };
    let ((about, rtt), tools) = tokio::join!(about, tools);
    let about = about.map_err(|e| e.message().to_owned())?.into_inner();
    if about.protocol != PROTOCOL_VERSION {
        return Err(format!(
            "it speaks protocol {} (posh-executor {}), and this gateway {PROTOCOL_VERSION}; install the same version on both",
            about.protocol, about.version
        ));
    }
    let tools = tools.map_err(|e| e.message().to_owned())?.into_inner().tools;
    let tools = tools.into_iter().map(|t| (t.name.clone(), t)).collect();
    Ok(Connection { client, about, tools, rtt })
}

/// The innermost cause says what a user understands ("Connection refused").
fn root_cause(error: &dyn std::error::Error) -> String {
    std::iter::successors(error.source(), |e| e.source()).last().map_or_else(|| error.to_string(), ToString::to_string)
}
