//! The wire contract of posh: generated messages and services, and the framing of the stage socket.
//! The only logic is shared by both ends of a connection: the place of the sockets ([`runtime`]),
//! secrets ([`secret`], [`token`]), the traces' clock ([`clock`]), the length of error messages
//! ([`brief`]), the digest of delivered bytes ([`digest`]), the switches of the rules ([`rule`]),
//! and the limits of messages ([`codec`]).
//!
//! * [`executor`]: gateway ↔ executor, gRPC over TCP, or over the input and output of an ssh.
//! * [`gateway`]: other programs ↔ gateway, gRPC over a UNIX socket.
//! * [`volume`]: gateway ↔ executor, the files of mounts that posh serves itself.
//! * [`stage`]: one intercepted command, or a `posh` that begins, ↔ gateway, length-delimited
//!   protobuf messages over a second UNIX socket (see [`frame`]).
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "generated code takes its words from the .proto files")]

pub mod brief;
pub mod catalogs;
pub mod clock;
pub mod codec;
pub mod digest;
pub mod frame;
pub mod locales;
pub mod packed;
pub mod pieces;
pub mod rule;
pub mod runtime;
pub mod secret;
pub mod token;
pub mod untrusted;

pub mod executor {
    //! `posh.executor.v1`, see `proto/executor.proto`.
    tonic::include_proto!("posh.executor.v1");
}

pub mod gateway {
    //! `posh.gateway.v1`, see `proto/gateway.proto`.
    tonic::include_proto!("posh.gateway.v1");
}

#[allow(
    clippy::large_enum_variant,
    reason = "generated; an Enlist comes once a stage and is never copied"
)]
pub mod stage {
    //! `posh.stage.v1`, see `proto/stage.proto`.
    tonic::include_proto!("posh.stage.v1");
}

#[allow(clippy::large_enum_variant, reason = "generated; lives for one message")]
pub mod volume {
    //! `posh.volume.v1`, see `proto/volume.proto`.
    tonic::include_proto!("posh.volume.v1");
}

/// Version of the protocols; a peer of another version is refused with an error that names it.
pub const PROTOCOL_VERSION: u32 = 6;

/// Error for a peer of another version; says which side to update.
#[must_use]
pub fn other_version(peer: &str, theirs: u32, own: &str) -> String {
    let older = if theirs < PROTOCOL_VERSION { peer } else { own };
    format!("{peer} speaks protocol {theirs}, {own} {PROTOCOL_VERSION}: update {older}")
}

/// First line that an executor started by ssh writes to its standard output. Bytes before it are
/// not the executor's; gRPC follows.
pub const STDIO_GREETING: &[u8] = b"posh-executor --stdio\n";

/// The encoded descriptor set, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// The largest message that a client accepts from a server: a listing, or the names that a
/// command has changed. Servers accept far less, see [`codec`].
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// Text in the gateway's log when a stage's wait ended by its last limit; tests look for it.
pub const BACKSTOP: &str = "a wait has reached its last limit";

/// The size of a message on the wire.
#[must_use]
pub fn message_bytes(message: &impl prost::Message) -> usize {
    message.encoded_len()
}
