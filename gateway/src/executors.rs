//! The executors of this configuration and the warm connection to each: made
//! before the first pipeline needs it, with what the executor said of itself. The
//! way there is `posh_reach`'s matter.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use fs_mapper::{ExecutorName, config::Config};
use posh_proto::{
    MAX_MESSAGE_BYTES, PROTOCOL_VERSION,
    executor::{DescribeReply, DescribeRequest, Tool, ToolsRequest, executor_client::ExecutorClient},
};
use posh_reach::{Carrier, Reached, Route};
use tokio::sync::{Notify, watch};
use tonic::transport::Channel;

use crate::plan::ExecutorId;

/// What the answers may take, once there is a connection.
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
    /// Where it is, as the configuration says.
    pub address: String,
    route: Route,
    state: watch::Sender<State>,
    retry: Notify,
}

/// All executors of the configuration.
#[derive(Debug, Clone)]
pub struct Executors(Arc<Vec<Arc<Executor>>>);

impl Executors {
    /// Starts to connect to each. `commands` are those whose identity matters.
    #[must_use]
    pub fn start(config: &Config, commands: &Arc<Vec<String>>) -> Self {
        let executors = config.executors.iter().enumerate().map(|(index, executor)| {
            let executor = Arc::new(Executor {
                id: ExecutorId(index),
                name: executor.name.clone(),
                address: executor.address.to_string(),
                route: Route::to(executor, config),
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
        if self.broke(connection, why) {
            self.retry.notify_one();
        }
    }

    /// Whether it was the one in use.
    fn broke(&self, connection: &Arc<Connection>, why: &str) -> bool {
        let is_current = matches!(&*self.state.borrow(), State::Ready(c) if Arc::ptr_eq(c, connection));
        if is_current {
            tracing::warn!(executor = %self.name, why, "connection lost");
            self.state.send_replace(State::Unreachable(why.to_owned()));
        }
        is_current
    }

    fn out_of_reach(&self, why: &str) -> String {
        format!("executor {} at {} is not in reach: {why}", self.name, self.address)
    }

    async fn keep_connected(self: Arc<Self>, commands: Arc<Vec<String>>) {
        let mut pause = RETRY_FIRST;
        loop {
            match greet(&self.route, &commands).await {
                Ok((connection, carrier)) => {
                    tracing::info!(executor = %self.name, address = self.address, rtt = ?connection.rtt, "connected");
                    pause = RETRY_FIRST;
                    self.keep(Arc::new(connection), carrier).await;
                }
                Err(why) => self.note_failure(&why),
            }
            let _ = tokio::time::timeout(pause, self.retry.notified()).await;
            pause = (pause * 2).min(RETRY_LAST);
        }
    }

    /// Until the connection is found to be broken, or is.
    async fn keep(&self, connection: Arc<Connection>, mut carrier: Carrier) {
        self.state.send_replace(State::Ready(Arc::clone(&connection)));
        tokio::select! {
            () = self.retry.notified() => {}
            why = carrier.ended() => drop(self.broke(&connection, &why)),
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
async fn greet(route: &Route, commands: &[String]) -> Result<(Connection, Carrier), String> {
    let Reached { channel, carrier } = posh_reach::connect(route).await.map_err(|error| error.sentence())?;
    let answers = tokio::time::timeout(GREETING_TIMEOUT, ask(channel, commands)).await;
    let connection = answers.unwrap_or_else(|_| Err("it does not answer".to_owned()))?;
    Ok((connection, carrier))
}

async fn ask(channel: Channel, commands: &[String]) -> Result<Connection, String> {
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
