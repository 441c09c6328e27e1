//! First questions on a new connection, which no pipeline can do without.

use std::{
    sync::{Arc, Mutex, RwLock},
    time::Duration,
};

use posh_proto::{PROTOCOL_VERSION, executor::ToolsRequest, other_version};
use posh_reach::{Carrier, Reached, Route, Server, Unreachable};
use tonic::transport::Channel;

use super::{Description, ExecutorConnection};

/// Timeout for the executor's answers on a new connection.
pub const GREETING_TIMEOUT: Duration = Duration::from_secs(8);

/// Reason why an executor is not usable, in words that `posh status` shows.
#[derive(Debug, thiserror::Error)]
pub enum CannotGreet {
    /// There is no connection.
    #[error("{}", .0.sentence())]
    Unreachable(#[from] Unreachable),
    /// No answer within the limit.
    #[error("it does not answer")]
    Mute,
    /// A call failed, with the reason.
    #[error("{0}")]
    Failed(String),
    /// It speaks another version of the protocol, with what to do.
    #[error("{0}")]
    OtherVersion(String),
}

/// Connects and asks for everything that pipelines need to know.
pub async fn greet(
    route: &Route,
    commands: &[String],
) -> Result<(ExecutorConnection, Carrier), CannotGreet> {
    let Reached { channel, carrier, .. } = posh_reach::connect(route).await?;
    let answers = ask(channel, commands, carrier.ssh_process());
    let answers = tokio::time::timeout(GREETING_TIMEOUT, answers).await;
    match answers.unwrap_or(Err(CannotGreet::Mute)) {
        Ok(connection) => Ok((connection, carrier)),
        Err(why) => {
            let why = posh_reach::why_mute(route, why.to_string()).await;
            Err(CannotGreet::Failed(why))
        }
    }
}

async fn ask(
    channel: Channel,
    commands: &[String],
    ssh_process: Option<u32>,
) -> Result<ExecutorConnection, CannotGreet> {
    let mut client = Server::new(channel);
    // In parallel: a first command waits for the answers.
    let mut second = client.clone();
    let tools = second.tools(ToolsRequest { names: commands.to_vec() });
    let (about, tools) = tokio::join!(Description::ask(&mut client), tools);
    let failed = |status: tonic::Status| CannotGreet::Failed(status.message().to_owned());
    let description = about.map_err(failed)?;
    let about = &description.reply;
    if about.protocol != PROTOCOL_VERSION {
        let peer = format!("its posh-executor {}", about.version);
        let words = other_version(&peer, about.protocol, "this gateway");
        return Err(CannotGreet::OtherVersion(words));
    }
    let tools = tools.map_err(failed)?.into_iter().map(|t| (t.name.clone(), t)).collect();
    Ok(ExecutorConnection {
        client,
        instance: about.instance.clone(),
        tools,
        rtt: description.rtt,
        ssh_process,
        description: RwLock::new(Arc::new(description)),
        describing: tokio::sync::Mutex::default(),
        versions: Mutex::default(),
    })
}
