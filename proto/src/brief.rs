//! Limits the length of error messages. gRPC puts them into a header, of which HTTP/2 peers accept
//! 16 KiB in all. A longer one, which quotes the peer's input, would end the connection with all
//! its calls, not only the failed one.

use tonic::codegen::http::{HeaderValue, Response};

/// gRPC over HTTP/2, "Status-Message": percent-encoded.
const MESSAGE: &str = "grpc-message";

/// Limit of an encoded message: enough for a percent-encoded path of 4096 bytes and a text around
/// it.
const MESSAGE_BYTES: usize = 8 << 10;

/// Truncates the response's error message to what fits in the header.
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

/// The longest prefix within the limit that ends at a character's end.
fn beginning(message: &[u8]) -> &[u8] {
    let mut end = message.len().min(MESSAGE_BYTES);
    // Drops a truncated escape.
    if let Some(at) = message[end.saturating_sub(2)..end].iter().position(|byte| *byte == b'%') {
        end = end.saturating_sub(2) + at;
    }
    // Drops the escapes of a truncated character: %8x to %Fx, back to the last ASCII character.
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
