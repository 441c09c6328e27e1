//! Calls of any method of a service, with messages as bytes: what no generated client would send.

use std::time::Duration;

use arbitrary::{Result, Unstructured};
use bytes::{Buf as _, BufMut as _, Bytes};
use prost::Message as _;
use prost_reflect::{DynamicMessage, MethodDescriptor, ServiceDescriptor};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Request, Status,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::http::uri::PathAndQuery,
    transport::Channel,
};

use crate::hostile;

/// Messages of a call whose client may send many.
const MAX_MESSAGES: usize = 6;

/// A call that is still open then is given up, as a client that goes away does.
const CALL: Duration = Duration::from_millis(150);

/// Answers of a call that are looked at: a run may go on for ever.
const MAX_ANSWERS: usize = 64;

/// Messages that go through as they are.
#[derive(Clone, Copy, Default)]
pub struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, to: &mut EncodeBuf<'_>) -> std::result::Result<(), Status> {
        to.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> std::result::Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

/// One call: what is sent, and whether the client then waits or goes.
pub struct Call {
    method: MethodDescriptor,
    messages: Vec<Bytes>,
    stays_open: bool,
}

impl Call {
    /// A call of some method of `service`, but none of `left_out`. Streams begin with one of the
    /// greetings, if there are any, but for some.
    pub fn choose(
        service: &ServiceDescriptor,
        left_out: &[&str],
        (sound, greetings): (&[DynamicMessage], &[Bytes]),
        source: &mut Unstructured<'_>,
    ) -> Result<Self> {
        let methods: Vec<_> =
            service.methods().filter(|method| !left_out.contains(&method.name())).collect();
        // The streaming ones hold most of what can go wrong.
        let streaming: Vec<_> =
            methods.iter().filter(|method| method.is_client_streaming()).cloned().collect();
        let method =
            if streaming.is_empty() || source.ratio(1, 4)? { &methods } else { &streaming };
        let method = source.choose(method)?.clone();
        let count =
            if method.is_client_streaming() { source.int_in_range(1..=MAX_MESSAGES)? } else { 1 };
        let mut messages = Vec::new();
        if method.is_client_streaming() && !greetings.is_empty() && source.ratio(7, 8)? {
            messages.push(source.choose(greetings)?.clone());
        }
        for _ in 0..count {
            let message = hostile::message(&method.input(), sound, source)?;
            let mut bytes = message.encode_to_vec();
            if source.ratio(1, 30)? {
                bytes.truncate(source.choose_index(bytes.len().max(1))?);
            }
            messages.push(bytes.into());
        }
        Ok(Self { method, messages, stays_open: source.ratio(1, 3)? })
    }

    /// Makes the call. Any answer and any error will do: gives the error's words.
    pub async fn make(self, channel: &Channel) -> Option<String> {
        let path = format!("/{}/{}", self.method.parent_service().full_name(), self.method.name());
        let path = PathAndQuery::try_from(path).expect("names make a path");
        let mut grpc = Grpc::new(channel.clone());
        grpc.ready().await.expect("the peer is there");
        let (input, stream) = mpsc::channel(1 + MAX_MESSAGES);
        for message in self.messages {
            input.try_send(message).expect("there is room for all");
        }
        let input = self.stays_open.then_some(input);
        let talk = async {
            let mut answers = grpc
                .streaming(Request::new(ReceiverStream::new(stream)), path, Raw)
                .await?
                .into_inner();
            for _ in 0..MAX_ANSWERS {
                if answers.message().await?.is_none() {
                    break;
                }
            }
            Ok::<(), Status>(())
        };
        let talked = timeout(CALL, talk).await;
        drop(input);
        talked.ok()?.err().map(|status| status.message().to_owned())
    }
}
