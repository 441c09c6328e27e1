//! System calls without the C library: they need no stack beyond a frame, leave `errno` alone, are
//! no cancellation points, and can't be interposed.
#![allow(unsafe_code, reason = "the instruction that enters the kernel")]

use core::{arch::asm, ffi::c_int};

#[cfg(target_arch = "x86_64")]
pub(crate) mod number {
    pub(crate) const CLOSE: usize = 3;
    pub(crate) const MMAP: usize = 9;
    pub(crate) const MUNMAP: usize = 11;
    pub(crate) const BRK: usize = 12;
    pub(crate) const RT_SIGPROCMASK: usize = 14;
    pub(crate) const PREAD: usize = 17;
    pub(crate) const PWRITE: usize = 18;
    pub(crate) const MINCORE: usize = 27;
    pub(crate) const MADVISE: usize = 28;
    pub(crate) const NANOSLEEP: usize = 35;
    pub(crate) const GETPID: usize = 39;
    pub(crate) const SOCKET: usize = 41;
    pub(crate) const CONNECT: usize = 42;
    pub(crate) const SENDTO: usize = 44;
    pub(crate) const RECVFROM: usize = 45;
    pub(crate) const SETSOCKOPT: usize = 54;
    pub(crate) const GETCWD: usize = 79;
    pub(crate) const GETRESUID: usize = 118;
    pub(crate) const GETRESGID: usize = 120;
    pub(crate) const PRCTL: usize = 157;
    pub(crate) const GETTID: usize = 186;
    pub(crate) const FGETXATTR: usize = 193;
    pub(crate) const OPENAT: usize = 257;
    pub(crate) const READLINKAT: usize = 267;
    pub(crate) const FACCESSAT: usize = 269;
    pub(crate) const SET_ROBUST_LIST: usize = 273;
    pub(crate) const GET_ROBUST_LIST: usize = 274;
    pub(crate) const PRLIMIT: usize = 302;
    pub(crate) const STATX: usize = 332;
    pub(crate) const FACCESSAT2: usize = 439;
}
#[cfg(target_arch = "aarch64")]
pub(crate) mod number {
    pub(crate) const FGETXATTR: usize = 10;
    pub(crate) const GETCWD: usize = 17;
    pub(crate) const FACCESSAT: usize = 48;
    pub(crate) const OPENAT: usize = 56;
    pub(crate) const CLOSE: usize = 57;
    pub(crate) const PREAD: usize = 67;
    pub(crate) const PWRITE: usize = 68;
    pub(crate) const READLINKAT: usize = 78;
    pub(crate) const SET_ROBUST_LIST: usize = 99;
    pub(crate) const GET_ROBUST_LIST: usize = 100;
    pub(crate) const NANOSLEEP: usize = 101;
    pub(crate) const RT_SIGPROCMASK: usize = 135;
    pub(crate) const GETRESUID: usize = 148;
    pub(crate) const GETRESGID: usize = 150;
    pub(crate) const PRCTL: usize = 167;
    pub(crate) const GETPID: usize = 172;
    pub(crate) const GETTID: usize = 178;
    pub(crate) const SOCKET: usize = 198;
    pub(crate) const CONNECT: usize = 203;
    pub(crate) const SENDTO: usize = 206;
    pub(crate) const RECVFROM: usize = 207;
    pub(crate) const SETSOCKOPT: usize = 208;
    pub(crate) const BRK: usize = 214;
    pub(crate) const MUNMAP: usize = 215;
    pub(crate) const MMAP: usize = 222;
    pub(crate) const MINCORE: usize = 232;
    pub(crate) const MADVISE: usize = 233;
    pub(crate) const PRLIMIT: usize = 261;
    pub(crate) const STATX: usize = 291;
    pub(crate) const FACCESSAT2: usize = 439;
}

/// A system call with up to six arguments; its result, or the error number.
///
/// # Safety
/// As the manual of that call says.
pub(crate) unsafe fn call<const N: usize>(
    number: usize,
    arguments: [usize; N],
) -> Result<usize, c_int> {
    const { assert!(N <= 6, "a system call has at most six arguments") };
    let mut all = [0; 6];
    all.iter_mut().zip(arguments).for_each(|(to, from)| *to = from);
    // SAFETY: the caller's promise.
    let result = unsafe { enter(number, all) };
    /// The kernel gives errors as numbers from -4095 to -1 (`MAX_ERRNO`).
    const MAX_ERRNO: usize = 4095;
    match result.wrapping_neg() {
        error @ 1..=MAX_ERRNO => Err(c_int::try_from(error).unwrap_or(c_int::MAX)),
        _ => Ok(result),
    }
}

/// Enters the kernel.
///
/// # Safety
/// As of [`call`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn enter(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> usize {
    let result;
    // SAFETY: the convention of syscall(2): the kernel keeps all registers but these.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

#[cfg(target_arch = "aarch64")]
#[inline(always)]
unsafe fn enter(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> usize {
    let result;
    // SAFETY: the convention of syscall(2): the kernel keeps all registers but the result's.
    unsafe {
        asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack),
        );
    }
    result
}
