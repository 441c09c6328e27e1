//! Asks the gateway whether a command stays local, before the stage program is started for it: for
//! a command whose files are all cached, starting that program would take most of the time. One
//! message each way (`Question` of proto/stage.proto). On any failure the stage program asks
//! itself.

use crate::{
    arena::Arena,
    sys::Socket,
    text::{Full, Text},
};

/// Limit of the message; a longer command line is left to the stage program, since each page that
/// is touched costs as much as the question.
const QUESTION_BYTES: usize = 2048;

/// Bytes of the frame's length, the tag of `ToGateway.question`, and the message's length as a
/// varint of two groups.
const HEAD_BYTES: usize = 7;

/// Tags of length-delimited fields.
const QUESTION: u8 = tag(11);
const PROGRAM: u8 = tag(2);
const WORD: u8 = tag(3);
const CWD: u8 = tag(4);
/// Tags of a varint field and of a 64-bit field.
const STREAMS: u8 = 5 << 3;
const WRITES: u8 = 6 << 3 | 1;

/// First byte after the frame's length of the only answer that counts, `ToStage.run_here`.
const RUN_HERE: u8 = tag(1);
const FRAME_LENGTH_BYTES: usize = 4;

const fn tag(field: u8) -> u8 {
    field << 3 | 2
}

/// A question under construction.
pub(crate) struct Question<'a>(Text<&'a mut [u8]>);

impl<'a> Question<'a> {
    /// A question without words.
    pub(crate) fn of(program: &[u8], arena: &mut Arena<'a>) -> Result<Self, Full> {
        let mut question = Self(arena.text(QUESTION_BYTES).ok_or(Full)?);
        question.0.push(&[0; HEAD_BYTES])?;
        question.field(PROGRAM, program)?;
        Ok(question)
    }

    /// Sets the command's working directory.
    pub(crate) fn working_directory(&mut self, path: &[u8]) -> Result<(), Full> {
        self.field(CWD, path)
    }

    /// Sets which of descriptors 0 to 2 may be files on owned mounts: bit N for descriptor N.
    pub(crate) fn streams(&mut self, bits: u8) -> Result<(), Full> {
        self.0.push(&[STREAMS, bits & 7])
    }

    /// Adds a pipe that the command writes to, by its inode.
    pub(crate) fn writes(&mut self, pipe: u64) -> Result<(), Full> {
        self.0.push(&[WRITES])?;
        self.0.push(&pipe.to_le_bytes())
    }

    /// Adds the next word of argv.
    pub(crate) fn word(&mut self, word: &[u8]) -> Result<(), Full> {
        self.field(WORD, word)
    }

    fn field(&mut self, tag: u8, value: &[u8]) -> Result<(), Full> {
        let length = groups(value.len()).ok_or(Full)?;
        let length = if value.len() < 0x80 { length.get(..1) } else { length.get(..) };
        self.0.push(&[tag])?;
        self.0.push(length.unwrap_or_default())?;
        self.0.push(value)
    }

    /// Completes and returns the message.
    fn finish(&mut self) -> Option<&[u8]> {
        let length = self.0.len();
        let body = groups(length.checked_sub(HEAD_BYTES)?)?;
        let frame = u32::try_from(length.checked_sub(FRAME_LENGTH_BYTES)?).ok()?.to_le_bytes();
        // A varint may have more groups than it needs.
        let head = [frame.as_slice(), &[QUESTION], &[body[0] | 0x80, body[1] & 0x7f]];
        let head = head.into_iter().flatten();
        self.0.as_bytes_mut().iter_mut().zip(head).for_each(|(to, from)| *to = *from);
        Some(self.0.as_bytes())
    }

    /// Asks at that socket. Returns false on any failure.
    pub(crate) fn ask(mut self, socket: &[u8]) -> bool {
        self.answer(socket) == Some(RUN_HERE)
    }

    fn answer(&mut self, socket: &[u8]) -> Option<u8> {
        let message = self.finish()?;
        let socket = Socket::connect(socket)?;
        socket.send(message).then_some(())?;
        let mut answer = [0; 16];
        let count = socket.receive(&mut answer)?;
        answer.get(..count)?.get(FRAME_LENGTH_BYTES).copied()
    }
}

/// A number below 16,384 as a varint of two groups; the continuation bit is set only if the second
/// is needed.
fn groups(number: usize) -> Option<[u8; 2]> {
    let number = u16::try_from(number).ok().filter(|number| *number < 1 << 14)?;
    let [low, high] = [(number & 0x7f) as u8, (number >> 7) as u8];
    Some([if high > 0 { low | 0x80 } else { low }, high])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_in_the_contract_s_encoding() {
        let mut memory = [0; QUESTION_BYTES];
        let mut question = Question::of(b"/bin/cat", &mut Arena::new(&mut memory)).unwrap();
        question.word(b"cat").unwrap();
        question.word(&[b'x'; 300]).unwrap();
        question.word(b"").unwrap();
        let body =
            [&b"\x12\x08/bin/cat\x1a\x03cat\x1a\xac\x02"[..], &[b'x'; 300], b"\x1a\0"].concat();
        assert_eq!(body.len(), 10 + 5 + 303 + 2);
        let head = [
            &(body.len() as u32 + 3).to_le_bytes()[..],
            &[0x5a, 0x80 | (body.len() & 0x7f) as u8, 2],
        ]
        .concat();
        assert_eq!(question.finish().unwrap(), [head, body].concat());
    }

    #[test]
    fn what_is_too_long_is_not_asked() {
        let mut memory = [0; 2 * QUESTION_BYTES];
        let mut arena = Arena::new(&mut memory);
        let mut question = Question::of(b"/p", &mut arena).unwrap();
        assert_eq!(question.word(&[b'x'; QUESTION_BYTES]), Err(Full));
        assert!(Question::of(&[b'/'; QUESTION_BYTES], &mut arena).is_err());
    }

    #[test]
    fn nobody_answers() {
        let asks = |socket: &[u8]| {
            Question::of(b"/p", &mut Arena::new(&mut [0; QUESTION_BYTES])).unwrap().ask(socket)
        };
        assert!(!asks(b"/nonexistent/socket") && !asks(&[b'/'; 200]));
    }
}
