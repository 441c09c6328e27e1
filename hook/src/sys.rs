//! System calls behind safe functions, and the few symbols of the C library. Error numbers and
//! flags are the same on all architectures that this is built for.
#![allow(
    unsafe_code,
    reason = "this file is where the kernel is called; each function says why its call is sound"
)]

use core::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use crate::{
    arena::Arena,
    syscall::{call, number},
    text::Text,
};

mod c {
    use core::ffi::{c_char, c_int, c_void};

    unsafe extern "C" {
        pub fn __errno_location() -> *mut c_int;
        pub fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
        #[link_name = "environ"]
        pub static ENVIRONMENT: *const *const c_char;
    }
}

/// Pointers to C strings, the last one null: argv or an environment.
pub(crate) type Strings = *const *const c_char;

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
pub const AT_SYMLINK_NOFOLLOW: c_int = 0x100;
pub const AT_NO_AUTOMOUNT: c_int = 0x800;
/// Cached attributes suffice: a file on a slow mount costs no round trip.
pub const AT_STATX_DONT_SYNC: c_int = 0x4000;

/// The kernel's longest path (PATH_MAX), its NUL included.
pub const PATH_BYTES: usize = 4096;

const F_OK: usize = 0;
const X_OK: usize = 1;
const R_OK: usize = 4;
const O_RDWR: c_int = 2;
const O_NONBLOCK: c_int = 0o4000;
const O_NOCTTY: c_int = 0o400;
const O_CLOEXEC: c_int = 0o2_000_000;
const PROT_READ: usize = 1;
const MAP_PRIVATE: usize = 2;
const STATX_MNT_ID: u32 = 0x1000;
/// STATX_TYPE, STATX_MODE, STATX_CTIME, STATX_INO, STATX_SIZE, STATX_MNT_ID.
const STATX_FIELDS: usize = 0x1 | 0x2 | 0x80 | 0x100 | 0x200 | STATX_MNT_ID as usize;

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

/// A descriptor, or [`AT_FDCWD`], as the kernel takes it.
fn argument(fd: c_int) -> usize {
    fd.cast_unsigned() as usize
}

/// readlink(2); returns the number of bytes in the buffer.
pub fn read_link(path: &CStr, buffer: &mut [u8]) -> Result<usize, c_int> {
    let arguments = [
        argument(AT_FDCWD),
        path.as_ptr().expose_provenance(),
        buffer.as_mut_ptr().expose_provenance(),
        buffer.len(),
    ];
    // SAFETY: the path is a C string, and the buffer is ours and has the size that is told.
    unsafe { call(number::READLINKAT, arguments) }
}

/// Returns true if the path is a symlink; an error if it does not exist.
pub fn is_link(path: &CStr) -> Result<bool, c_int> {
    match read_link(path, &mut [0]) {
        // It exists and is no symlink.
        Err(EINVAL) => Ok(false),
        Err(error) => Err(error),
        Ok(_) => Ok(true),
    }
}

/// Returns true if a path that ends in `/.` is in a directory, even one that may not be searched.
pub fn is_in_directory(path: &CStr) -> bool {
    matches!(access(path, F_OK), Ok(()) | Err(EACCES))
}

/// access(2) for the real user.
fn access(path: &CStr, mode: usize) -> Result<(), c_int> {
    // SAFETY: only the C string is read.
    unsafe {
        call(number::FACCESSAT, [argument(AT_FDCWD), path.as_ptr().expose_provenance(), mode])
    }
    .map(drop)
}

/// Returns true if the effective user may read the file.
pub fn is_readable(path: &CStr) -> bool {
    may(path, R_OK)
}

/// Returns true if the effective user may execute the file.
pub fn is_executable(path: &CStr) -> bool {
    may(path, X_OK)
}

/// If real and effective user are the same, access(2) decides; it does not count capabilities of
/// root that end with the exec. Otherwise faccessat2(2) decides; before Linux 5.8, which lacks it,
/// the answer is no, and such a program is executed as given.
fn may(path: &CStr, mode: usize) -> bool {
    const AT_EACCESS: usize = 0x200;
    let is_one = |number| {
        let (mut real, mut effective, mut saved) = (0_u32, 0_u32, 0_u32);
        let places =
            [&raw mut real, &raw mut effective, &raw mut saved].map(<*mut u32>::expose_provenance);
        // SAFETY: each of the three numbers has its place.
        unsafe { call(number, places) }.is_ok() && real == effective
    };
    if is_one(number::GETRESUID) && is_one(number::GETRESGID) {
        return access(path, mode).is_ok();
    }
    // SAFETY: only the C string is read.
    unsafe {
        call(
            number::FACCESSAT2,
            [argument(AT_FDCWD), path.as_ptr().expose_provenance(), mode, AT_EACCESS],
        )
    }
    .is_ok()
}

/// Path in /proc of one of this process's descriptors, with a NUL at the end.
pub fn descriptor_path(fd: c_int) -> Option<Text<[u8; 32]>> {
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

/// getcwd(2); the root if it fails, as in the stage program. `None` when the arena is full.
pub fn working_directory<'a>(arena: &mut Arena<'a>) -> Option<&'a [u8]> {
    let found = arena.filled(PATH_BYTES, (), |buffer| {
        // SAFETY: the buffer is ours and has the size that is told.
        let count = unsafe {
            call(number::GETCWD, [buffer.as_mut_ptr().expose_provenance(), buffer.len()])
        };
        match count {
            // The count includes the NUL. A path without a leading slash is unreachable
            // (getcwd(2)).
            Ok(count) if buffer.first() == Some(&b'/') => Ok(count.saturating_sub(1)),
            _ => {
                *buffer.first_mut().ok_or(())? = b'/';
                Ok(1)
            }
        }
    });
    found.ok()
}

/// `environ`, as execv(3) passes it; another thread may change it at any time.
pub fn environment() -> Strings {
    // SAFETY: the C library's own variable; read as a whole, as everybody reads it.
    let environment: &AtomicPtr<*const c_char> = unsafe { &*(&raw const c::ENVIRONMENT).cast() };
    environment.load(Ordering::Relaxed).cast_const()
}

/// An entry of an array, read once and atomically: another thread may replace an entry of `environ`
/// meanwhile.
///
/// # Safety
/// The array has that entry.
pub unsafe fn entry(array: Strings, index: usize) -> *const c_char {
    // SAFETY: the caller's promise; entries are aligned.
    let entry: &AtomicPtr<c_char> = unsafe { &*array.add(index).cast() };
    entry.load(Ordering::Relaxed).cast_const()
}

/// The next definition of a function after ours (RTLD_NEXT): usually the C library's.
pub fn next_function(name: &CStr) -> *mut c_void {
    const RTLD_NEXT: *mut c_void = usize::MAX as *mut c_void;
    // SAFETY: the handle is the one that dlsym(3) knows, the name is a C string.
    unsafe { c::dlsym(RTLD_NEXT, name.as_ptr()) }
}

/// prctl(2) with PR_SET_MM.
///
/// # Safety
/// `value` is as the manual wants it for `which`: an address of this process's memory map, or of a
/// structure of `size` bytes that describes it rightly.
pub unsafe fn set_memory_map(which: usize, value: usize, size: usize) -> bool {
    const PR_SET_MM: usize = 35;
    // SAFETY: the caller's promise.
    unsafe { call(number::PRCTL, [PR_SET_MM, which, value, size, 0]) }.is_ok()
}

/// The end of the heap, as the kernel records it.
pub fn heap_end() -> u64 {
    // SAFETY: an impossible end leaves the heap as it is (brk(2)).
    unsafe { call(number::BRK, [0]) }.unwrap_or(0) as u64
}

/// Returns true if anything is mapped at `page` (mincore(2)), or if that is unknown.
pub fn is_mapped(page: u64, page_bytes: u64) -> bool {
    let mut resident = 0_u8;
    let arguments = [page as usize, page_bytes as usize, (&raw mut resident).expose_provenance()];
    // SAFETY: one page asks for one byte, which is ours.
    let result = unsafe { call(number::MINCORE, arguments) };
    result != Err(ENOMEM)
}

/// nanosleep(2); a signal may end it early.
pub fn sleep(microseconds: u32) {
    let time = [0, i64::from(microseconds).saturating_mul(1000)];
    // SAFETY: a struct timespec, two numbers of 64 bits, is read, and what is left of it is not
    // asked for.
    let _ = unsafe { call(number::NANOSLEEP, [time.as_ptr().expose_provenance(), 0]) };
}

/// RLIMIT_FSIZE of this process (getrlimit(2)): writing beyond that length would kill it.
pub fn longest_file() -> u64 {
    const RLIMIT_FSIZE: usize = 1;
    let mut limits = [0_u64; 2];
    // SAFETY: a struct rlimit64, two numbers of 64 bits, is written, and none is read.
    let _ = unsafe {
        call(number::PRLIMIT, [0, RLIMIT_FSIZE, 0, limits.as_mut_ptr().expose_provenance()])
    };
    limits[0]
}

/// getpid(2), by a direct system call: other libraries may interpose the C library's.
pub fn process() -> usize {
    // SAFETY: it takes nothing and touches no memory.
    unsafe { call(number::GETPID, []) }.unwrap_or(0)
}

/// gettid(2).
pub fn thread() -> usize {
    // SAFETY: it takes nothing and touches no memory.
    unsafe { call(number::GETTID, []) }.unwrap_or(0)
}

/// Status of a file (statx(2)).
#[derive(Debug, Clone, Copy)]
pub struct Stat {
    /// Type and permissions.
    pub mode: u16,
    /// Length in bytes.
    pub size: u64,
    /// Device of the file system: major and minor number.
    pub device: u64,
    /// Inode number; it identifies a pipe.
    pub inode: u64,
    /// Time of the last change of the file's status, in nanoseconds since 1970.
    pub changed: u64,
    /// The mount's `mnt_id`; `None` if the kernel does not report it (before 5.8).
    pub mount: Option<u64>,
}

impl Stat {
    /// Returns true for a regular file.
    pub fn is_file(self) -> bool {
        self.mode & 0o170_000 == 0o100_000
    }

    /// Returns true for a pipe or FIFO.
    pub fn is_pipe(self) -> bool {
        self.mode & 0o170_000 == 0o010_000
    }

    /// Returns true for a symlink.
    pub fn is_link(self) -> bool {
        self.mode & 0o170_000 == 0o120_000
    }

    /// Returns true if the program runs as another user or group.
    pub fn is_set_id(self) -> bool {
        self.mode & 0o6000 != 0
    }
}

/// statx(2) of a path; with an empty path and AT_EMPTY_PATH, of the descriptor itself.
pub fn stat(directory: c_int, path: &CStr, flags: c_int) -> Option<Stat> {
    const STATX_BYTES: usize = 256;
    #[repr(C, align(8))]
    struct Buffer([u8; STATX_BYTES]);
    let mut buffer = Buffer([0; STATX_BYTES]);
    let to = buffer.0.as_mut_ptr().expose_provenance();
    let arguments =
        [argument(directory), path.as_ptr().expose_provenance(), argument(flags), STATX_FIELDS, to];
    // SAFETY: the path is a C string, and the buffer has the size of struct statx, which never
    // changes.
    unsafe { call(number::STATX, arguments) }.ok()?;
    // include/uapi/linux/stat.h
    let word = |at: usize| {
        let bytes = buffer.0.get(at..at.checked_add(4)?)?;
        bytes.try_into().ok().map(u32::from_ne_bytes)
    };
    let long = |at: usize| {
        let bytes = buffer.0.get(at..at.checked_add(8)?)?;
        bytes.try_into().ok().map(u64::from_ne_bytes)
    };
    let (mask, mode) = (word(0)?, buffer.0.get(28..30)?.try_into().ok().map(u16::from_ne_bytes)?);
    let (inode, size) = (long(32)?, long(40)?);
    let changed = long(96)?.wrapping_mul(1_000_000_000).wrapping_add(word(104)?.into());
    let device = u64::from(word(136)?) << 32 | u64::from(word(140)?);
    let mount = long(144).filter(|_| mask & STATX_MNT_ID != 0);
    Some(Stat { mode, size, device, inode, changed, mount })
}

/// An open file; closed when dropped.
pub struct File(c_int);

impl File {
    /// Opens a file for reading; never blocks, and is close-on-exec.
    pub fn open(directory: c_int, path: &CStr) -> Option<Self> {
        Self::open_with(directory, path, 0)
    }

    /// Like [`File::open`], but for reading and writing.
    pub fn open_to_write(path: &CStr) -> Option<Self> {
        Self::open_with(AT_FDCWD, path, O_RDWR)
    }

    fn open_with(directory: c_int, path: &CStr, access: c_int) -> Option<Self> {
        let flags = argument(access | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        // SAFETY: the path is a C string.
        let fd = unsafe {
            call(number::OPENAT, [argument(directory), path.as_ptr().expose_provenance(), flags, 0])
        };
        c_int::try_from(fd.ok()?).ok().map(Self)
    }

    /// Its status.
    pub fn stat(&self) -> Option<Stat> {
        stat(self.0, c"", AT_EMPTY_PATH)
    }

    /// Reads into the buffer from an offset; returns the number of bytes.
    pub fn read(&self, buffer: &mut [u8], offset: u64) -> Option<usize> {
        let arguments = [
            argument(self.0),
            buffer.as_mut_ptr().expose_provenance(),
            buffer.len(),
            offset as usize,
        ];
        // SAFETY: the buffer is ours and has the size that is told.
        unsafe { call(number::PREAD, arguments) }.ok()
    }

    /// Writes these bytes at an offset; returns true if all were written.
    pub fn write(&self, bytes: &[u8], offset: u64) -> bool {
        let arguments =
            [argument(self.0), bytes.as_ptr().expose_provenance(), bytes.len(), offset as usize];
        // SAFETY: the bytes are read, as many as are told.
        let count = unsafe { call(number::PWRITE, arguments) };
        count == Ok(bytes.len())
    }

    /// Returns true if the file has capabilities of its own (capabilities(7)).
    pub fn has_capabilities(&self) -> bool {
        let name = c"security.capability".as_ptr().expose_provenance();
        // SAFETY: with size 0 nothing is written.
        unsafe { call(number::FGETXATTR, [argument(self.0), name, 0, 0]) }
            .is_ok_and(|size| size > 0)
    }

    /// Its content; `None` for an empty file.
    pub fn contents<'a>(&self, arena: &mut Arena<'a>) -> Option<Contents<'a>> {
        let bytes = arena.filled(FEW_BYTES, (), |buffer| self.read(buffer, 0).ok_or(())).ok()?;
        if bytes.len() < FEW_BYTES {
            return (!bytes.is_empty()).then_some(Contents::Few(bytes));
        }
        let len = usize::try_from(self.stat()?.size).ok()?;
        Mapped::new(len, self).map(Contents::Many)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours and is not used after this.
        let _ = unsafe { call(number::CLOSE, [argument(self.0)]) };
    }
}

/// A connection to a unix(7) socket; close-on-exec, and closed when dropped.
pub struct Socket(c_int);

impl Socket {
    /// Timeout of connecting, sending and receiving.
    const WAIT_MICROSECONDS: i64 = 50_000;

    /// Connects.
    pub fn connect(path: &[u8]) -> Option<Self> {
        const AF_UNIX: u16 = 1;
        const SOCK_STREAM: c_int = 1;
        const SOL_SOCKET: usize = 1;
        const SO_RCVTIMEO: usize = 20;
        const SO_SNDTIMEO: usize = 21;
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
        // SAFETY: it touches no memory.
        let fd =
            unsafe { call(number::SOCKET, [AF_UNIX.into(), argument(SOCK_STREAM | O_CLOEXEC), 0]) }
                .ok()?;
        let socket = Self(c_int::try_from(fd).ok()?);
        for option in [SO_RCVTIMEO, SO_SNDTIMEO] {
            let value = [wait.as_ptr().expose_provenance(), size_of_val(&wait)];
            // SAFETY: a struct timeval, two numbers of 64 bits, is read.
            let _ =
                unsafe { call(number::SETSOCKOPT, [fd, SOL_SOCKET, option, value[0], value[1]]) };
        }
        let at = (&raw const address).expose_provenance();
        // SAFETY: a struct sockaddr_un of that size is read.
        unsafe { call(number::CONNECT, [fd, at, size_of::<Address>()]) }.ok()?;
        Some(socket)
    }

    /// Sends all of it; returns false on failure.
    pub fn send(&self, bytes: &[u8]) -> bool {
        const MSG_NOSIGNAL: usize = 0x4000;
        let arguments =
            [argument(self.0), bytes.as_ptr().expose_provenance(), bytes.len(), MSG_NOSIGNAL, 0, 0];
        // SAFETY: the bytes are read, as many as are told; there is no address.
        let count = unsafe { call(number::SENDTO, arguments) };
        count == Ok(bytes.len())
    }

    /// Waits for data; returns the number of bytes, 0 at the end.
    pub fn receive(&self, buffer: &mut [u8]) -> Option<usize> {
        let arguments =
            [argument(self.0), buffer.as_mut_ptr().expose_provenance(), buffer.len(), 0, 0, 0];
        // SAFETY: the buffer is ours and has the size that is told; no address is asked for.
        unsafe { call(number::RECVFROM, arguments) }.ok()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours and is not used after this.
        let _ = unsafe { call(number::CLOSE, [argument(self.0)]) };
    }
}

/// A shorter file is read, which costs less than mapping and unmapping it: a session file with a
/// dozen mounts is shorter.
const FEW_BYTES: usize = 1024;

/// Content of a file that is replaced, never changed in place.
pub enum Contents<'a> {
    /// A short file, read.
    Few(&'a [u8]),
    /// A long file, mapped.
    Many(Mapped),
}

impl Contents<'_> {
    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Few(bytes) => bytes,
            Self::Many(mapped) => mapped.as_bytes(),
        }
    }
}

/// A mapped file, or memory; unmapped when dropped.
pub struct Mapped {
    at: *mut c_void,
    len: usize,
}

impl Mapped {
    fn new(len: usize, file: &File) -> Option<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory in use.
        let at =
            unsafe { call(number::MMAP, [0, len, PROT_READ, MAP_PRIVATE, argument(file.0), 0]) };
        Some(Self { at: ptr::with_exposed_provenance_mut(at.ok()?), len })
    }

    /// New memory with a copy of these bytes.
    pub fn copy_of(bytes: &[u8]) -> Option<Self> {
        const PROT_WRITE: usize = 2;
        const MAP_ANONYMOUS: usize = 0x20;
        let arguments =
            [0, bytes.len(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, usize::MAX, 0];
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory in use.
        let at: *mut c_void =
            ptr::with_exposed_provenance_mut(unsafe { call(number::MMAP, arguments) }.ok()?);
        // SAFETY: the mapping is that long and nobody else's.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), at.cast(), bytes.len()) };
        Some(Self { at, len: bytes.len() })
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: the mapping is that long, readable, and lives as long as this value.
        unsafe { core::slice::from_raw_parts(self.at.cast(), self.len) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no borrow of its bytes is left.
        let _ = unsafe { call(number::MUNMAP, [self.at.addr(), self.len]) };
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
        let (mut first, mut second) = ([0; PATH_BYTES], [0; PATH_BYTES]);
        let count = read_link(c"/proc/self/cwd", &mut first).unwrap();
        assert_eq!(Some(&first[..count]), working_directory(&mut Arena::new(&mut second)));
        assert_eq!(read_link(c"/", &mut first).err(), Some(EINVAL));
        assert_eq!(read_link(c"/nonexistent", &mut first).err(), Some(ENOENT));
        assert_eq!((is_link(c"/proc/self"), is_link(c"/")), (Ok(true), Ok(false)));
        assert!(is_in_directory(c"/etc/.") && !is_in_directory(c"/etc/passwd/."));
        assert!(
            is_readable(c"/etc/passwd")
                && is_executable(c"/bin/sh")
                && !is_executable(c"/etc/passwd")
        );
    }
}
