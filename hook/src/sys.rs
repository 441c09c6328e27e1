//! The C library's calls behind safe functions. Numbers of errors and flags are
//! Linux's own for every machine that this is built for.
#![allow(unsafe_code, reason = "this file is where the C library is called; each function says why its call is sound")]

use core::{
    ffi::{CStr, c_char, c_int, c_long, c_void},
    ptr,
};

use crate::text::Text;

mod c {
    use core::ffi::{c_char, c_int, c_long, c_void};

    unsafe extern "C" {
        pub fn readlink(path: *const c_char, buffer: *mut c_char, size: usize) -> isize;
        pub fn access(path: *const c_char, mode: c_int) -> c_int;
        pub fn eaccess(path: *const c_char, mode: c_int) -> c_int;
        pub fn getresuid(real: *mut u32, effective: *mut u32, saved: *mut u32) -> c_int;
        pub fn getresgid(real: *mut u32, effective: *mut u32, saved: *mut u32) -> c_int;
        pub fn openat(directory: c_int, path: *const c_char, flags: c_int, ...) -> c_int;
        pub fn pread(fd: c_int, buffer: *mut c_void, count: usize, offset: i64) -> isize;
        pub fn pwrite(fd: c_int, buffer: *const c_void, count: usize, offset: i64) -> isize;
        pub fn close(fd: c_int) -> c_int;
        pub fn getcwd(buffer: *mut c_char, size: usize) -> *mut c_char;
        pub fn fgetxattr(fd: c_int, name: *const c_char, value: *mut c_void, size: usize) -> isize;
        pub fn mmap(at: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: i64) -> *mut c_void;
        pub fn munmap(at: *mut c_void, len: usize) -> c_int;
        pub fn syscall(number: c_long, ...) -> c_long;
        pub fn __errno_location() -> *mut c_int;
        pub fn getenv(name: *const c_char) -> *const c_char;
        pub fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    }
}

pub const ENOENT: c_int = 2;
pub const E2BIG: c_int = 7;
pub const ENOEXEC: c_int = 8;
pub const ENOMEM: c_int = 12;
pub const EACCES: c_int = 13;
pub const ENODEV: c_int = 19;
pub const ENOTDIR: c_int = 20;
pub const EINVAL: c_int = 22;
pub const ENAMETOOLONG: c_int = 36;
pub const ENOSYS: c_int = 38;
pub const ETIMEDOUT: c_int = 110;
pub const ESTALE: c_int = 116;

/// The working directory, for calls that take a directory.
pub const AT_FDCWD: c_int = -100;
pub const AT_EMPTY_PATH: c_int = 0x1000;
/// What is known is good enough: a file on a slow mount costs no round trip.
pub const AT_STATX_DONT_SYNC: c_int = 0x4000;

/// The kernel's longest path (PATH_MAX), its NUL included.
pub const PATH_BYTES: usize = 4096;

const F_OK: c_int = 0;
const X_OK: c_int = 1;
const R_OK: c_int = 4;
const O_RDWR: c_int = 2;
const O_NONBLOCK: c_int = 0o4000;
const O_NOCTTY: c_int = 0o400;
const O_CLOEXEC: c_int = 0o2_000_000;
const PROT_READ: c_int = 1;
const PROT_WRITE: c_int = 2;
const MAP_PRIVATE: c_int = 2;
const MAP_ANONYMOUS: c_int = 0x20;
const STATX_TYPE_MODE_SIZE: u32 = 0x1 | 0x2 | 0x200;
const STATX_INO: u32 = 0x100;
const STATX_MNT_ID: u32 = 0x1000;

#[cfg(target_arch = "x86_64")]
mod number {
    pub const STATX: core::ffi::c_long = 332;
    pub const PRCTL: core::ffi::c_long = 157;
    pub const BRK: core::ffi::c_long = 12;
    pub const MINCORE: core::ffi::c_long = 27;
    pub const SOCKET: core::ffi::c_long = 41;
    pub const CONNECT: core::ffi::c_long = 42;
    pub const SENDTO: core::ffi::c_long = 44;
    pub const RECVFROM: core::ffi::c_long = 45;
    pub const SETSOCKOPT: core::ffi::c_long = 54;
    pub const NANOSLEEP: core::ffi::c_long = 35;
    pub const CLOCK_GETTIME: core::ffi::c_long = 228;
    pub const PRLIMIT: core::ffi::c_long = 302;
    pub const GETPID: core::ffi::c_long = 39;
}
#[cfg(target_arch = "aarch64")]
mod number {
    pub const STATX: core::ffi::c_long = 291;
    pub const PRCTL: core::ffi::c_long = 167;
    pub const BRK: core::ffi::c_long = 214;
    pub const MINCORE: core::ffi::c_long = 232;
    pub const SOCKET: core::ffi::c_long = 198;
    pub const CONNECT: core::ffi::c_long = 203;
    pub const SENDTO: core::ffi::c_long = 206;
    pub const RECVFROM: core::ffi::c_long = 207;
    pub const SETSOCKOPT: core::ffi::c_long = 208;
    pub const NANOSLEEP: core::ffi::c_long = 101;
    pub const CLOCK_GETTIME: core::ffi::c_long = 113;
    pub const PRLIMIT: core::ffi::c_long = 261;
    pub const GETPID: core::ffi::c_long = 172;
}

/// The calling thread's `errno`.
pub fn errno() -> c_int {
    // SAFETY: glibc's function gives the address of the thread's own variable.
    unsafe { *c::__errno_location() }
}

/// Sets it.
pub fn set_errno(value: c_int) {
    // SAFETY: as above.
    unsafe { *c::__errno_location() = value }
}

/// The path as a C string, for one call.
fn with_path<T>(path: &[u8], call: impl FnOnce(*const c_char) -> T) -> Result<T, c_int> {
    let text = Text::<{ PATH_BYTES + 2 }>::of(&[path, b"\0"]).map_err(|_| ENAMETOOLONG)?;
    text.as_c_str().map(|path| call(path.as_ptr())).ok_or(EINVAL)
}

/// readlink(2).
pub fn read_link(path: &[u8]) -> Result<Text<PATH_BYTES>, c_int> {
    let mut target = Text::new();
    let buffer = target.buffer();
    // SAFETY: the path is a C string, and the buffer is ours and has the size that is told.
    let length = with_path(path, |path| unsafe { c::readlink(path, buffer.as_mut_ptr().cast(), PATH_BYTES) })?;
    target.set_len(usize::try_from(length).map_err(|_| errno())?);
    Ok(target)
}

/// Whether a path is a symlink; an error if nothing is there.
pub fn is_link(path: &CStr) -> Result<bool, c_int> {
    let mut first: c_char = 0;
    // SAFETY: the path is a C string, and there is room for the one byte that is asked for.
    match unsafe { c::readlink(path.as_ptr(), &raw mut first, 1) } {
        // It is there and is none.
        -1 if errno() == EINVAL => Ok(false),
        -1 => Err(errno()),
        _ => Ok(true),
    }
}

/// Whether a path with a slash at its end is a directory: one that may not be searched is one, too.
pub fn is_directory(dir: &[u8]) -> bool {
    let Ok(inside) = Text::<{ PATH_BYTES + 2 }>::of(&[dir, b"."]) else { return false };
    // SAFETY: access only reads the C string.
    let found = with_path(inside.as_bytes(), |path| unsafe { c::access(path, F_OK) });
    found.is_ok_and(|result| result == 0 || errno() == EACCES)
}

/// Whether the effective user may read a file.
pub fn is_readable(path: &CStr) -> bool {
    may(path, R_OK)
}

/// Whether the effective user may execute it.
pub fn is_executable(path: &CStr) -> bool {
    may(path, X_OK)
}

/// Where the user is one and the same, access(2) tells, which also counts rights of root that end with the exec as ended;
/// what the C library makes of the rest begins with another look at the file.
fn may(path: &CStr, mode: c_int) -> bool {
    let (mut user, mut group) = ([0_u32; 3], [0_u32; 3]);
    let ([real_user, user_now, saved_user], [real_group, group_now, saved_group]) = (&mut user, &mut group);
    // SAFETY: each of the three numbers has its place, and the others only read the C string.
    unsafe {
        let known =
            c::getresuid(real_user, user_now, saved_user) == 0 && c::getresgid(real_group, group_now, saved_group) == 0;
        match known && real_user == user_now && real_group == group_now {
            true => c::access(path.as_ptr(), mode) == 0,
            false => c::eaccess(path.as_ptr(), mode) == 0,
        }
    }
}

/// The path by which a process opens its own descriptor anew, a NUL at the end.
pub fn descriptor_path(fd: c_int) -> Option<Text<32>> {
    let mut rest = u32::try_from(fd).ok()?;
    let mut digits = [0_u8; 10];
    let mut used = 0;
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
        used += 1;
        if rest == 0 {
            break;
        }
    }
    let digits = digits.get(digits.len() - used..)?;
    Text::of(&[b"/proc/self/fd/", digits, b"\0"]).ok()
}

/// getcwd(3); the root where there is none, as the stage program takes it.
pub fn working_directory() -> Text<PATH_BYTES> {
    let mut cwd = Text::new();
    // SAFETY: the buffer is ours and has the size that is told.
    let found = unsafe { c::getcwd(cwd.buffer().as_mut_ptr().cast(), PATH_BYTES) };
    if found.is_null() {
        let _ = cwd.push(b"/");
        return cwd;
    }
    let length = cwd.buffer().iter().position(|byte| *byte == 0).unwrap_or(0);
    cwd.set_len(length);
    cwd
}

/// The variable's value in the process's own environment, which must not be changed while it is used.
pub fn variable<'a>(name: &CStr) -> Option<&'a CStr> {
    // SAFETY: the name is a C string; what getenv gives is null or one.
    unsafe {
        let value = c::getenv(name.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value))
    }
}

/// The definition of a function that comes after ours: usually the C library's.
pub fn next_function(name: &CStr) -> *mut c_void {
    const RTLD_NEXT: *mut c_void = usize::MAX as *mut c_void;
    // SAFETY: the handle is the one that dlsym(3) knows, the name is a C string.
    unsafe { c::dlsym(RTLD_NEXT, name.as_ptr()) }
}

/// prctl(2) with three arguments.
pub fn prctl(option: c_long, which: c_long, value: usize, size: usize) -> bool {
    // SAFETY: used with PR_SET_MM only, whose pointers, if any, are to the caller's live structure.
    unsafe { c::syscall(number::PRCTL, option, which, value, size, 0_usize) == 0 }
}

/// The end of the heap, as the kernel has it.
pub fn heap_end() -> u64 {
    // SAFETY: an impossible end leaves the heap as it is (brk(2)).
    let end = unsafe { c::syscall(number::BRK, 0_usize) };
    end.cast_unsigned()
}

/// Whether anything is mapped there (mincore(2)); also when that can't be told.
pub fn is_mapped(page: u64, page_bytes: u64) -> bool {
    let mut resident = 0_u8;
    // SAFETY: one page asks for one byte, which is ours.
    let result = unsafe { c::syscall(number::MINCORE, page, page_bytes, &raw mut resident) };
    result == 0 || errno() != ENOMEM
}

/// nanosleep(2); less if a signal comes.
pub fn sleep(microseconds: u32) {
    let time = [0, i64::from(microseconds).saturating_mul(1000)];
    // SAFETY: a struct timespec, two numbers of 64 bits, is read, and what is left of it is not asked for.
    unsafe { c::syscall(number::NANOSLEEP, time.as_ptr(), ptr::null_mut::<c_void>()) };
}

/// What CLOCK_MONOTONIC said at the last tick, in nanoseconds (clock_gettime(2)).
pub fn monotonic_ns() -> u64 {
    const CLOCK_MONOTONIC_COARSE: c_long = 6;
    let mut time = [0_i64; 2];
    // SAFETY: a struct timespec, two numbers of 64 bits, is written.
    unsafe { c::syscall(number::CLOCK_GETTIME, CLOCK_MONOTONIC_COARSE, time.as_mut_ptr()) };
    let [seconds, nanoseconds] = time.map(i64::unsigned_abs);
    seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
}

/// The length up to which this process may write to files (RLIMIT_FSIZE of getrlimit(2)); what goes beyond kills it.
pub fn longest_file() -> u64 {
    const RLIMIT_FSIZE: c_long = 1;
    let mut limits = [0_u64; 2];
    // SAFETY: a struct rlimit64, two numbers of 64 bits, is written, and none is read.
    unsafe { c::syscall(number::PRLIMIT, 0 as c_long, RLIMIT_FSIZE, ptr::null::<c_void>(), limits.as_mut_ptr()) };
    limits[0]
}

/// getpid(2), asked of the kernel: other libraries may stand before the C library's.
pub fn process() -> c_long {
    // SAFETY: it takes nothing and touches no memory.
    unsafe { c::syscall(number::GETPID) }
}

/// What statx(2) says of a file.
#[derive(Debug, Clone, Copy)]
pub struct Stat {
    /// Type and permissions.
    pub mode: u16,
    /// Length in bytes.
    pub size: u64,
    /// Its number; a pipe's names it.
    pub inode: u64,
    /// The `mnt_id` of what it is on; `None` where the kernel does not tell (before 5.8).
    pub mount: Option<u64>,
}

impl Stat {
    /// A regular file.
    pub fn is_file(self) -> bool {
        self.mode & 0o170_000 == 0o100_000
    }

    /// A pipe or FIFO.
    pub fn is_pipe(self) -> bool {
        self.mode & 0o170_000 == 0o010_000
    }

    /// Runs as another user or group.
    pub fn is_set_id(self) -> bool {
        self.mode & 0o6000 != 0
    }
}

/// statx(2) of a path, or with an empty one of the descriptor itself.
pub fn stat(directory: c_int, path: &CStr, flags: c_int) -> Option<Stat> {
    const STATX_BYTES: usize = 256;
    #[repr(C, align(8))]
    struct Buffer([u8; STATX_BYTES]);
    let mut buffer = Buffer([0; STATX_BYTES]);
    // SAFETY: the path is a C string, and the buffer has the size of struct statx, which never changes.
    let result = unsafe {
        let to: *mut u8 = buffer.0.as_mut_ptr();
        c::syscall(number::STATX, directory, path.as_ptr(), flags, STATX_TYPE_MODE_SIZE | STATX_INO | STATX_MNT_ID, to)
    };
    if result != 0 {
        return None;
    }
    // stx_mask is at 0, stx_mode at 28, stx_ino at 32, stx_size at 40, stx_mnt_id at 144 (include/uapi/linux/stat.h).
    let mask = buffer.0.get(..4)?.try_into().ok().map(u32::from_ne_bytes)?;
    let mode = buffer.0.get(28..30)?.try_into().ok().map(u16::from_ne_bytes)?;
    let inode = buffer.0.get(32..40)?.try_into().ok().map(u64::from_ne_bytes)?;
    let size = buffer.0.get(40..48)?.try_into().ok().map(u64::from_ne_bytes)?;
    let mount = buffer.0.get(144..152)?.try_into().ok().map(u64::from_ne_bytes);
    Some(Stat { mode, size, inode, mount: mount.filter(|_| mask & STATX_MNT_ID != 0) })
}

/// An open file; closed when dropped.
pub struct File(c_int);

impl File {
    /// Opens it for reading; never waits, and is not inherited.
    pub fn open(directory: c_int, path: &CStr) -> Option<Self> {
        Self::open_with(directory, path, 0)
    }

    /// The same for writing, too.
    pub fn open_to_write(path: &CStr) -> Option<Self> {
        Self::open_with(AT_FDCWD, path, O_RDWR)
    }

    fn open_with(directory: c_int, path: &CStr, access: c_int) -> Option<Self> {
        // SAFETY: the path is a C string; without O_CREAT there is no third argument.
        let fd = unsafe { c::openat(directory, path.as_ptr(), access | O_NONBLOCK | O_NOCTTY | O_CLOEXEC) };
        (fd >= 0).then_some(Self(fd))
    }

    /// What statx(2) says of it.
    pub fn stat(&self) -> Option<Stat> {
        stat(self.0, c"", AT_EMPTY_PATH)
    }

    /// Fills the buffer from an offset; the number of bytes.
    pub fn read(&self, buffer: &mut [u8], offset: u64) -> Option<usize> {
        let offset = i64::try_from(offset).ok()?;
        // SAFETY: the buffer is ours and has the size that is told.
        let count = unsafe { c::pread(self.0, buffer.as_mut_ptr().cast(), buffer.len(), offset) };
        usize::try_from(count).ok()
    }

    /// Writes these bytes at an offset; whether all of them.
    pub fn write(&self, bytes: &[u8], offset: u64) -> bool {
        let Ok(offset) = i64::try_from(offset) else { return false };
        // SAFETY: the bytes are read, as many as are told.
        let count = unsafe { c::pwrite(self.0, bytes.as_ptr().cast(), bytes.len(), offset) };
        usize::try_from(count) == Ok(bytes.len())
    }

    /// Whether it has capabilities of its own (capabilities(7)).
    pub fn has_capabilities(&self) -> bool {
        // SAFETY: with size 0 nothing is written.
        unsafe { c::fgetxattr(self.0, c"security.capability".as_ptr(), ptr::null_mut(), 0) > 0 }
    }

    /// Its bytes; none of an empty one.
    pub fn contents(&self) -> Option<Contents> {
        let mut buffer = [0; FEW_BYTES];
        let count = self.read(&mut buffer, 0).filter(|count| *count > 0)?;
        if count < FEW_BYTES {
            return Some(Contents::Few(buffer, count));
        }
        let len = usize::try_from(self.stat()?.size).ok()?;
        Mapped::new(len, PROT_READ, MAP_PRIVATE, self.0).map(Contents::Many)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours and is not used after this.
        unsafe { c::close(self.0) };
    }
}

/// A connection to a server on this machine (unix(7)); closed when dropped, and not inherited. By system calls alone: a
/// library of the user's that stands before connect(3), to lead it through a proxy, has nothing to do with it.
pub struct Socket(c_int);

impl Socket {
    /// Longer than that nobody waits, neither to connect nor to send or receive.
    const WAIT_MICROSECONDS: i64 = 50_000;

    /// Connects.
    pub fn connect(path: &[u8]) -> Option<Self> {
        const AF_UNIX: u16 = 1;
        const SOCK_STREAM: c_int = 1;
        const SOL_SOCKET: c_long = 1;
        const SO_RCVTIMEO: c_long = 20;
        const SO_SNDTIMEO: c_long = 21;
        const PATH_BYTES: usize = 108;
        #[repr(C)]
        struct Address {
            family: u16,
            path: [u8; PATH_BYTES],
        }
        let mut address = Address { family: AF_UNIX, path: [0; PATH_BYTES] };
        if path.len() >= PATH_BYTES {
            return None;
        }
        address.path.iter_mut().zip(path).for_each(|(to, from)| *to = *from);
        let wait = [0_i64, Self::WAIT_MICROSECONDS];
        let (kind, family) = (c_long::from(SOCK_STREAM | O_CLOEXEC), c_long::from(AF_UNIX));
        // SAFETY: a new descriptor, or -1.
        let fd = unsafe { c::syscall(number::SOCKET, family, kind, 0 as c_long) };
        let socket = Self(c_int::try_from(fd).ok().filter(|fd| *fd >= 0)?);
        for option in [SO_RCVTIMEO, SO_SNDTIMEO] {
            // SAFETY: a struct timeval, two numbers of 64 bits, is read.
            unsafe { c::syscall(number::SETSOCKOPT, fd, SOL_SOCKET, option, wait.as_ptr(), size_of_val(&wait)) };
        }
        // SAFETY: a struct sockaddr_un of that size is read.
        let result = unsafe { c::syscall(number::CONNECT, fd, &raw const address, size_of::<Address>()) };
        (result == 0).then_some(socket)
    }

    /// Sends all of it; false when that failed.
    pub fn send(&self, bytes: &[u8]) -> bool {
        const MSG_NOSIGNAL: c_long = 0x4000;
        let (fd, to) = (c_long::from(self.0), ptr::null::<c_void>());
        // SAFETY: the bytes are read, as many as are told; there is no address.
        let count = unsafe { c::syscall(number::SENDTO, fd, bytes.as_ptr(), bytes.len(), MSG_NOSIGNAL, to, 0_usize) };
        usize::try_from(count) == Ok(bytes.len())
    }

    /// Waits for an answer; the number of its bytes, 0 at the end.
    pub fn receive(&self, buffer: &mut [u8]) -> Option<usize> {
        let (fd, from) = (c_long::from(self.0), ptr::null_mut::<c_void>());
        let (at, size) = (buffer.as_mut_ptr(), buffer.len());
        // SAFETY: the buffer is ours and has the size that is told; no address is asked for.
        let count = unsafe { c::syscall(number::RECVFROM, fd, at, size, 0 as c_long, from, from) };
        usize::try_from(count).ok()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours and is not used after this.
        unsafe { c::close(self.0) };
    }
}

/// A file that is shorter is read, which costs less than to map and unmap it: a session file with a dozen mounts is.
const FEW_BYTES: usize = 1024;

/// The bytes of a file that is replaced, never changed.
#[allow(clippy::large_enum_variant, reason = "there is no allocator, and one of these at a time")]
pub enum Contents {
    /// The first so many.
    Few([u8; FEW_BYTES], usize),
    /// All of it.
    Many(Mapped),
}

impl Contents {
    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Few(bytes, count) => bytes.get(..*count).unwrap_or_default(),
            Self::Many(mapped) => mapped.as_bytes(),
        }
    }
}

/// Mapped memory; unmapped when dropped.
pub struct Mapped {
    at: *mut c_void,
    len: usize,
}

impl Mapped {
    fn new(len: usize, protection: c_int, flags: c_int, fd: c_int) -> Option<Self> {
        const MAP_FAILED: usize = usize::MAX;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory in use.
        let at = unsafe { c::mmap(ptr::null_mut(), len, protection, flags, fd, 0) };
        (at.addr() != MAP_FAILED).then_some(Self { at, len })
    }

    fn as_bytes(&self) -> &[u8] {
        // SAFETY: the mapping is that long, readable, and lives as long as this value.
        unsafe { core::slice::from_raw_parts(self.at.cast(), self.len) }
    }

    /// Memory for so many bytes, zeroed, for the rest of the process's life.
    pub fn forever(len: usize) -> Option<*mut c_void> {
        let new = Self::new(len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1)?;
        let at = new.at;
        core::mem::forget(new);
        Some(at)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and whoever borrowed its bytes is gone.
        unsafe { c::munmap(self.at, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_have_paths() {
        for fd in [0, 7, 10, 1_234_567_890] {
            let expected = std::ffi::CString::new(format!("/proc/self/fd/{fd}")).unwrap();
            assert_eq!(descriptor_path(fd).unwrap().as_c_str(), Some(expected.as_c_str()));
        }
        assert!(descriptor_path(-1).is_none());
    }

    #[test]
    fn links_and_directories() {
        assert_eq!(read_link(b"/proc/self/cwd").unwrap().as_bytes(), working_directory().as_bytes());
        assert_eq!(read_link(b"/").err(), Some(EINVAL));
        assert_eq!(read_link(b"/nonexistent").err(), Some(ENOENT));
        assert!(is_directory(b"/etc/") && !is_directory(b"/etc/passwd/") && !is_directory(b"/nonexistent/"));
    }
}
