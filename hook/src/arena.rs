//! Memory for one exec. A caller may have next to no stack (a child of clone(2) on 8 KiB of its
//! own), so that all frames of this library together take less than 2 KiB, and every path, array
//! and file goes into a slot of static memory.
//!
//! # Invariant
//!
//! A slot belongs to the thread whose id is in its lock, from the claim until the thread releases
//! it or **leaves this memory**, by an exec or by its end. Several threads may claim at once; a
//! thread that finds all slots taken executes as without the hook. No thread waits, so that a
//! signal handler may interrupt anywhere.
//!
//! Three things can happen to an owner that does not release its slot:
//!
//! - Its exec succeeds, or it is killed, and the memory was its own: the slot is gone with it.
//! - Likewise, but the memory is its parent's (vfork(2), `CLONE_VM`): the slot must become free.
//!   The lock is a robust futex (`get_robust_list(2)`), which the kernel marks when the owner
//!   leaves the memory, before it wakes a parent of vfork. Such a child has no list of robust
//!   futexes, and gets one that lies on its stack for as long as it owns the slot. A thread that
//!   has a list is one of the C library's, in memory that ends with it.
//! - Another thread has forked meanwhile: in the copy the owner does not exist. The locks lie in a
//!   page that is zero after a fork (`MADV_WIPEONFORK`).
//!
//! So children do not grow their parent's memory, and no slot is lost.
#![allow(
    unsafe_code,
    reason = "static memory that is handed out under a lock, and the kernel's list of locks"
)]

use core::{
    cell::UnsafeCell,
    ffi::{CStr, c_char, c_int},
    mem::{self, MaybeUninit},
    ptr,
    sync::atomic::{AtomicPtr, AtomicU32, Ordering, compiler_fence},
};

use crate::{
    sys,
    syscall::{call, number},
    text::Text,
};

/// Limit of concurrent threads and children in an exec; a further one executes the program as
/// given.
const SLOTS: usize = 8;
/// Four paths of PATH_MAX, two arrays of some thousand words, and a lookup with its links.
/// Untouched pages cost no memory.
pub(crate) const SLOT_BYTES: usize = 64 << 10;

/// `FUTEX_TID_MASK` of linux/futex.h: the owner's thread id; 0 in a lock that is free or marked by
/// the kernel.
const OWNER: u32 = 0x3fff_ffff;

/// In whole pages, apart from the slots.
#[repr(C, align(4096))]
struct Locks([AtomicU32; SLOTS], [u32; 1024 - SLOTS]);

static LOCKS: Locks = Locks([const { AtomicU32::new(0) }; SLOTS], [0; 1024 - SLOTS]);

/// Aligned for pointers.
#[repr(C, align(16))]
struct Memory(UnsafeCell<[u8; SLOT_BYTES]>);

// SAFETY: only the owner of the lock with the same index accesses it.
unsafe impl Sync for Memory {}

static SLOT_MEMORY: [Memory; SLOTS] = [const { Memory(UnsafeCell::new([0; SLOT_BYTES])) }; SLOTS];

/// Prepares the locks; runs before `main`.
pub(crate) fn prepare() {
    const MADV_WIPEONFORK: usize = 18;
    // SAFETY: whole pages of ours, which are zero. A kernel with larger pages refuses, and then a
    // fork in the middle of another thread's exec costs the child a slot.
    let _ = unsafe {
        call(number::MADVISE, [(&raw const LOCKS).addr(), size_of::<Locks>(), MADV_WIPEONFORK])
    };
}

/// `struct robust_list_head` of linux/futex.h, with no entry but one that is about to be locked.
#[repr(C)]
struct RobustList {
    /// Points to itself: an empty list.
    first: AtomicPtr<RobustList>,
    /// Offset from an entry to its lock.
    offset: isize,
    pending: AtomicPtr<AtomicU32>,
}

impl RobustList {
    const fn new() -> Self {
        Self {
            first: AtomicPtr::new(ptr::null_mut()),
            offset: 0,
            pending: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Returns true if this thread has a list.
    fn exists() -> Result<bool, c_int> {
        let (mut head, mut size) = (0_usize, 0_usize);
        // SAFETY: both results have their places.
        unsafe {
            call(number::GET_ROBUST_LIST, [0, (&raw mut head).addr(), (&raw mut size).addr()])
        }?;
        Ok(head != 0)
    }

    /// Makes it this thread's list.
    ///
    /// # Safety
    /// It must not move until [`RobustList::withdraw`].
    unsafe fn register(&self) -> Result<(), c_int> {
        self.first.store((&raw const *self).cast_mut(), Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe {
            call(
                number::SET_ROBUST_LIST,
                [(&raw const *self).expose_provenance(), size_of::<Self>()],
            )
        }?;
        Ok(())
    }

    /// Removes this thread's list.
    fn withdraw() {
        // SAFETY: the thread had no list before.
        let _ = unsafe { call(number::SET_ROBUST_LIST, [0, size_of::<Self>()]) };
    }
}

/// Calls with the memory of a slot, or with `None` if no slot is free.
pub(crate) fn with<T>(use_it: impl FnOnce(Option<&mut Arena<'_>>) -> T) -> T {
    let list = RobustList::new();
    let Ok(is_thread) = RobustList::exists() else { return use_it(None) };
    // SAFETY: `list` lives until the end of this function, and is withdrawn there.
    if !is_thread && unsafe { list.register() }.is_err() {
        return use_it(None);
    }
    let result = match claim(&list.pending) {
        Some((lock, memory)) => {
            // SAFETY: the lock is ours.
            let result = use_it(Some(&mut Arena { free: unsafe { &mut *memory.0.get() } }));
            lock.store(0, Ordering::Release);
            result
        }
        None => use_it(None),
    };
    if !is_thread {
        RobustList::withdraw();
    }
    result
}

/// A lock and its memory. The lock is registered with the kernel before it is taken.
fn claim(pending: &AtomicPtr<AtomicU32>) -> Option<(&'static AtomicU32, &'static Memory)> {
    let owner = u32::try_from(sys::thread()).ok()?;
    LOCKS.0.iter().zip(&SLOT_MEMORY).find(|(lock, _)| {
        let now = lock.load(Ordering::Relaxed);
        if now & OWNER != 0 {
            return false;
        }
        pending.store((&raw const **lock).cast_mut(), Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        lock.compare_exchange(now, owner, Ordering::Acquire, Ordering::Relaxed).is_ok()
    })
}

/// Bump allocator.
pub struct Arena<'a> {
    free: &'a mut [u8],
}

impl<'a> Arena<'a> {
    /// An arena of all these bytes.
    pub fn new(free: &'a mut [u8]) -> Self {
        Self { free }
    }

    /// An arena that returns its memory when it is dropped.
    pub fn scope(&mut self) -> Arena<'_> {
        Arena { free: &mut *self.free }
    }

    fn take(&mut self, len: usize) -> Option<&'a mut [u8]> {
        if len > self.free.len() {
            return None;
        }
        let (taken, rest) = mem::take(&mut self.free).split_at_mut_checked(len)?;
        self.free = rest;
        Some(taken)
    }

    /// Runs `fill` on a buffer of `len` bytes, and keeps as many as it says.
    pub(crate) fn filled<E>(
        &mut self,
        len: usize,
        full: E,
        fill: impl FnOnce(&mut [u8]) -> Result<usize, E>,
    ) -> Result<&'a [u8], E> {
        let buffer = match self.free.get_mut(..len) {
            Some(buffer) => buffer,
            None => return Err(full),
        };
        let count = fill(buffer)?.min(len);
        self.take(count).map(|kept| &*kept).ok_or(full)
    }

    /// An empty text of capacity `len`.
    pub(crate) fn text(&mut self, len: usize) -> Option<Text<&'a mut [u8]>> {
        self.take(len).map(Text::within)
    }

    /// Number of free bytes.
    pub(crate) fn left(&self) -> usize {
        self.free.len()
    }

    /// A buffer of `len` bytes.
    pub(crate) fn buffer(&mut self, len: usize) -> Option<&'a mut [u8]> {
        self.take(len)
    }

    /// The concatenated parts as a C string.
    pub(crate) fn c_str(&mut self, parts: &[&[u8]]) -> Option<&'a CStr> {
        let len = parts.iter().fold(1_usize, |sum, part| sum.saturating_add(part.len()));
        let mut text = self.text(len)?;
        parts.iter().chain([&&b"\0"[..]]).try_for_each(|part| text.push(part)).ok()?;
        CStr::from_bytes_with_nul(text.into_bytes()).ok()
    }

    /// An array of these words and a null pointer. Each word is read once, since other threads may
    /// change the source meanwhile.
    pub(crate) fn words(
        &mut self,
        words: impl Iterator<Item = *const c_char>,
    ) -> Option<&'a [*const c_char]> {
        // SAFETY: any bytes may be taken for pointers that are not initialised.
        let (before, slots, _) = unsafe { self.free.align_to_mut::<MaybeUninit<*const c_char>>() };
        let before = before.len();
        let mut count = 0;
        for word in words.chain([ptr::null()]) {
            slots.get_mut(count)?.write(word);
            count += 1;
        }
        let taken = self.take(before + count * size_of::<*const c_char>())?;
        let array = taken.get(before..)?.as_ptr().cast();
        // SAFETY: so many were written there, aligned.
        Some(unsafe { core::slice::from_raw_parts(array, count) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_in_a_scope_is_free_behind_it() {
        let mut memory = [0; 16];
        let mut arena = Arena::new(&mut memory);
        assert_eq!(arena.scope().c_str(&[b"0123456789", b"abcde"]).unwrap(), c"0123456789abcde");
        assert!(arena.scope().c_str(&[b"0123456789", b"abcdef"]).is_none());
        assert_eq!(arena.c_str(&[b"01", b"23"]).unwrap(), c"0123");
        assert_eq!(arena.filled(11, (), |buffer| Ok(buffer.len() - 8)).unwrap().len(), 3);
        assert!(
            arena.filled(9, (), |_| Ok(0)).is_err() && arena.filled(8, (), |_| Err(())).is_err()
        );
        assert_eq!(arena.text(8).map(|text| text.len()), Some(0));
        assert!(arena.text(1).is_none());
    }

    #[test]
    fn arrays_of_words_end_in_null_or_are_none() {
        let mut memory = [0; 64];
        let mut arena = Arena::new(&mut memory);
        arena.c_str(&[b"a"]).unwrap();
        let words = [c"x".as_ptr(), c"y".as_ptr()];
        assert_eq!(arena.words(words.into_iter()).unwrap(), [words[0], words[1], ptr::null()]);
        assert!(arena.words(words.into_iter().cycle()).is_none());
    }

    #[test]
    fn each_has_a_slot_of_its_own_until_all_are_taken() {
        fn claim_all(depth: usize) -> usize {
            with(|arena| arena.map_or(depth, |_| claim_all(depth + 1)))
        }
        // Tests of other modules claim none.
        assert_eq!(claim_all(0), SLOTS);
        assert_eq!(claim_all(0), SLOTS, "all were given back");
    }
}
