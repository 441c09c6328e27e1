//! Bytes in a buffer of fixed size, which is what a `Vec` is elsewhere, and numbers in them.

use core::ffi::CStr;

/// What was to be added did not fit; nothing was added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full;

/// At most `N` bytes.
#[derive(Clone)]
pub struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Text<N> {
    /// No bytes.
    pub const fn new() -> Self {
        Self { bytes: [0; N], len: 0 }
    }

    /// These bytes.
    pub fn of(parts: &[&[u8]]) -> Result<Self, Full> {
        let mut text = Self::new();
        parts.iter().try_for_each(|part| text.push(part))?;
        Ok(text)
    }

    /// What it holds.
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    /// How many bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Adds bytes at the end.
    pub fn push(&mut self, more: &[u8]) -> Result<(), Full> {
        let room = self.bytes.get_mut(self.len..).unwrap_or_default();
        if more.len() > room.len() {
            return Err(Full);
        }
        room.iter_mut().zip(more).for_each(|(to, from)| *to = *from);
        self.len += more.len();
        Ok(())
    }

    /// Forgets all but the first `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// The whole buffer, for a system call that writes; [`Self::set_len`] then says how much it wrote.
    pub fn buffer(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// See [`Self::buffer`].
    pub fn set_len(&mut self, len: usize) {
        self.len = len.min(N);
    }

    /// As a C string: `None` without a NUL at the end, or with another one.
    pub fn as_c_str(&self) -> Option<&CStr> {
        CStr::from_bytes_with_nul(self.as_bytes()).ok()
    }
}

/// The number that decimal digits are.
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
        for (digits, value) in [(&b"0"[..], Some(0)), (b"1234", Some(1234)), (b"-1", None), (b"1x", None)] {
            assert_eq!(decimal(digits), value);
        }
        assert_eq!(decimal(b"18446744073709551616"), None);
    }

    #[test]
    fn what_does_not_fit_is_refused_whole() {
        let mut text = Text::<4>::of(&[b"ab", b"c"]).unwrap();
        assert_eq!(text.push(b"de"), Err(Full));
        assert_eq!(text.as_bytes(), b"abc");
        assert_eq!(text.push(b"\0"), Ok(()));
        assert_eq!(text.as_c_str(), Some(c"abc"));
        text.truncate(2);
        assert_eq!((text.as_bytes(), text.as_c_str()), (&b"ab"[..], None));
    }
}
