//! Normalizes git's index for comparison: drops the fields that differ between any two runs (times,
//! device, inode and owner of each entry, the size, which is 0 while an entry is "racily clean",
//! and the checksum) and the extensions. See gitformat-index(5).

/// `DIRC`, version, number of entries.
const HEADER_BYTES: usize = 12;
/// From the first time to the size; the mode lies between.
const STAT_BYTES: usize = 40;
const MODE: std::ops::Range<usize> = 24..28;
/// Stat fields, object name, flags.
const ENTRY_BYTES: usize = STAT_BYTES + 20 + 2;
/// SHA-1 over everything before.
const CHECKSUM_BYTES: usize = 20;
/// Entries are padded to this; versions before 4.
const ALIGNMENT: usize = 8;

/// Blanks those fields, if `content` is an index of version 2 or 3 with SHA-1 names.
pub fn neutral(mut content: Vec<u8>) -> Vec<u8> {
    let number = |at: usize, bytes: &[u8]| {
        bytes.get(at..at + 4).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]))
    };
    let is_index = content.starts_with(b"DIRC") && matches!(number(4, &content), Some(2 | 3));
    let Some(count) = number(8, &content).filter(|_| is_index) else { return content };
    let end = content.len().saturating_sub(CHECKSUM_BYTES);
    content.truncate(end);
    let mut at = HEADER_BYTES;
    for _ in 0..count {
        let Some(entry) = content.get_mut(at..) else { return content };
        let Some(name) =
            entry.get(ENTRY_BYTES..).and_then(|name| name.iter().position(|b| *b == 0))
        else {
            return content;
        };
        let fields =
            entry[..STAT_BYTES].iter_mut().enumerate().filter(|(at, _)| !MODE.contains(at));
        fields.for_each(|(_, byte)| *byte = 0);
        // At least one zero ends the name.
        at += (ENTRY_BYTES + name + 1).next_multiple_of(ALIGNMENT);
    }
    // Extensions follow, which are caches; their content depends on times.
    content.truncate(at);
    content
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(entries: &[(&str, u8)]) -> Vec<u8> {
        let mut bytes = b"DIRC\0\0\0\x02\0\0\0".to_vec();
        bytes.push(u8::try_from(entries.len()).unwrap());
        for (name, stat) in entries {
            let start = bytes.len();
            bytes.extend([*stat; 24]);
            bytes.extend([0, 0, 0x81, 0xa4]);
            bytes.extend([*stat; 12]);
            bytes.extend([7; 22]);
            bytes.extend(name.bytes());
            bytes.push(0);
            while !(bytes.len() - start).is_multiple_of(ALIGNMENT) {
                bytes.push(0);
            }
        }
        bytes.extend([entries.first().map_or(0, |e| e.1); CHECKSUM_BYTES]);
        bytes
    }

    #[test]
    fn only_what_runs_can_share_is_left() {
        let one = neutral(index(&[("a", 1), ("dir/name", 2), ("z", 3)]));
        assert_eq!(one, neutral(index(&[("a", 4), ("dir/name", 5), ("z", 6)])));
        assert_ne!(one, neutral(index(&[("a", 1), ("dir/nami", 2), ("z", 3)])));
        assert_eq!(neutral(b"DIRC is a word".to_vec()), b"DIRC is a word");
    }
}
