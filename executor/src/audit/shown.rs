//! Texts of clients in the record.

/// The beginning of a text that takes at most so many bytes in the record. Replaces control
/// characters: in JSON each would take six.
pub fn shown(text: &[u8], most: usize) -> String {
    let begin = &text[..text.len().min(most)];
    let mut shown = String::new();
    let mut room = most;
    for character in String::from_utf8_lossy(begin).chars() {
        let character =
            if character.is_control() { char::REPLACEMENT_CHARACTER } else { character };
        let Some(left) = room.checked_sub(room_of(character.encode_utf8(&mut [0; 4]))) else {
            break;
        };
        room = left;
        shown.push(character);
    }
    shown
}

/// Bytes that it takes in the record.
pub fn room_of(shown: &str) -> usize {
    shown.len() + shown.matches(['"', '\\']).count()
}
