//! Error messages that fit where gRPC puts them: in a header, of which HTTP/2 peers take 16 KiB in
//! all. A longer one, which repeats what somebody has sent, would not be an error of one call but
//! the end of the connection with all that is under way on it.

use tonic::codegen::http::{HeaderValue, Response};

/// gRPC over HTTP/2, "Status-Message": percent-encoded.
const MESSAGE: &str = "grpc-message";

/// Of a message, encoded: enough for a path of 4096 bytes that is spelled out, and for what is said
/// of it.
const MESSAGE_BYTES: usize = 8 << 10;

/// A response with as much of its error's message as may be.
#[must_use]
pub fn shortened<B>(mut response: Response<B>) -> Response<B> {
    if let Some(message) = response.headers_mut().get_mut(MESSAGE)
        && message.len() > MESSAGE_BYTES
        && let Ok(beginning) = HeaderValue::from_bytes(beginning(message.as_bytes()))
    {
        *message = beginning;
    }
    response
}

/// Up to a character's end.
fn beginning(message: &[u8]) -> &[u8] {
    let mut end = message.len().min(MESSAGE_BYTES);
    // An escape that was cut through.
    if let Some(at) = message[end.saturating_sub(2)..end].iter().position(|byte| *byte == b'%') {
        end = end.saturating_sub(2) + at;
    }
    // And the escapes of a character that was: %8x to %Fx, up to where the last plain one ends.
    while end >= 3 && message[end - 3] == b'%' && message[end - 2] >= b'8' {
        end -= 3;
    }
    &message[..end]
}

#[cfg(test)]
mod tests {
    use tonic::Status;

    use super::*;

    fn after(message: &str) -> String {
        let response: Response<tonic::body::Body> = Status::not_found(message).into_http();
        let response = shortened(response);
        assert!(
            response.headers().get(MESSAGE).is_none_or(|message| message.len() <= MESSAGE_BYTES)
        );
        Status::from_header_map(response.headers()).unwrap().message().to_owned()
    }

    #[test]
    fn short_messages_are_as_they_were() {
        for message in ["", "no such export", "100 % of \u{1f980}\n", &"x".repeat(MESSAGE_BYTES)] {
            assert_eq!(after(message), message);
        }
    }

    #[test]
    fn long_ones_are_cut_between_characters() {
        for character in ["x", "\n", "%", "\u{e9}", "\u{20ac}", "\u{1f980}"] {
            for before in 0..12 {
                // Plain ones before the cut, since a row of others is left out as a whole.
                let message =
                    format!("{}{}", "x".repeat(MESSAGE_BYTES - before), character.repeat(100));
                let shown = after(&message);
                assert!(
                    message.starts_with(&shown) && shown.len() >= MESSAGE_BYTES - 12,
                    "{before} {character:?}"
                );
            }
        }
    }
}
