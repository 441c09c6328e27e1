//! Byte strings in buffers of fixed size, in place of `Vec`, and decimal numbers in them.

use core::ffi::CStr;

/// Error: the addition did not fit; nothing was added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full;

/// Bytes in a buffer: an array of its own, or a borrowed one (`&mut [u8]`).
#[derive(Clone)]
pub struct Text<B> {
    buffer: B,
    len: usize,
}

impl<const N: usize> Text<[u8; N]> {
    /// The concatenated parts.
    pub fn of(parts: &[&[u8]]) -> Result<Self, Full> {
        let mut text = Self::within([0; N]);
        parts.iter().try_for_each(|part| text.push(part))?;
        Ok(text)
    }
}

impl<B> Text<B> {
    /// An empty text in this buffer.
    pub const fn within(buffer: B) -> Self {
        Self { buffer, len: 0 }
    }

    /// Number of bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Drops all but the first `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}

impl<'a> Text<&'a mut [u8]> {
    /// The bytes, for as long as the buffer is borrowed.
    pub fn into_bytes(self) -> &'a [u8] {
        self.buffer.get(..self.len).unwrap_or_default()
    }
}

impl<B: AsRef<[u8]> + AsMut<[u8]>> Text<B> {
    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        self.buffer.as_ref().get(..self.len).unwrap_or_default()
    }

    /// Adds bytes at the end.
    pub fn push(&mut self, more: &[u8]) -> Result<(), Full> {
        let room = self.buffer.as_mut().get_mut(self.len..).unwrap_or_default();
        copy(more, room.get_mut(..more.len()).ok_or(Full)?);
        self.len += more.len();
        Ok(())
    }

    /// The bytes, mutable.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.as_mut().get_mut(..self.len).unwrap_or_default()
    }

    /// The text as a C string; `None` unless its only NUL is at the end.
    pub fn as_c_str(&self) -> Option<&CStr> {
        CStr::from_bytes_with_nul(self.as_bytes()).ok()
    }

    /// Calls with the text and `more` as one C string; the text is unchanged afterwards.
    pub fn with_c_str<T>(&mut self, more: &[u8], call: impl FnOnce(&CStr) -> T) -> Option<T> {
        let len = self.len;
        let fits = self.push(more).and_then(|()| self.push(b"\0")).is_ok();
        let result = if fits { self.as_c_str().map(call) } else { None };
        self.truncate(len);
        result
    }
}

/// Copies between slices of equal length, in code that can't panic.
pub fn copy(from: &[u8], to: &mut [u8]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
}

/// Parses a decimal number.
pub fn decimal(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0_u64, |value, digit| {
        let digit = digit.checked_sub(b'0').filter(|digit| *digit < 10)?;
        value.checked_mul(10)?.checked_add(digit.into())
    })
}

#[cfg(test)]
mod tests {
    use super::{Full, Text, decimal};

    #[test]
    fn numbers() {
        for (digits, value) in
            [(&b"0"[..], Some(0)), (b"1234", Some(1234)), (b"-1", None), (b"1x", None)]
        {
            assert_eq!(decimal(digits), value);
        }
        assert_eq!(decimal(b"18446744073709551616"), None);
    }

    #[test]
    fn what_does_not_fit_is_refused_whole() {
        let mut buffer = [0; 4];
        let mut text = Text::within(&mut buffer[..]);
        text.push(b"ab").unwrap();
        assert_eq!(text.with_c_str(b"c", |text| text == c"abc"), Some(true));
        assert_eq!(text.with_c_str(b"cd", |_| ()), None);
        text.push(b"c").unwrap();
        assert_eq!(text.push(b"de"), Err(Full));
        assert_eq!(text.as_bytes(), b"abc");
        assert_eq!(text.push(b"\0"), Ok(()));
        assert_eq!(text.as_c_str(), Some(c"abc"));
        text.truncate(2);
        assert_eq!((text.as_bytes(), text.as_c_str()), (&b"ab"[..], None));
        assert!(Text::<[u8; 4]>::of(&[b"abc", b"de"]).is_err());
    }
}
