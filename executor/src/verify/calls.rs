//! A table of the system calls by which a command uses files by path, and the meaning of their
//! arguments. Access through an open descriptor is not a path access.

use nix::{
    fcntl::OFlag,
    libc::{self, c_long},
};

/// Kind of access to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deed {
    /// open(2), with its flags.
    Open(OFlag),
    /// Lookup: existence, status, target of a link.
    Look,
    /// A file or directory is created; fails if the name exists.
    Make,
    /// A file is moved to a name, and replaces what has it.
    Replace,
    /// Like `Make`, for other types of files.
    MakeSpecial,
    /// A name is removed.
    Remove,
    /// Content is cut off.
    Truncate,
    /// Mode, owner, times or attributes are changed.
    Alter,
    /// A program is started.
    Run,
}

/// One access by path.
#[derive(Debug, PartialEq, Eq)]
pub struct Touch {
    /// The descriptor that a relative path starts from, `AT_FDCWD` for the current directory.
    pub directory: i32,
    /// Address of the path in the process's memory.
    pub path: u64,
    /// A link at the end is followed.
    pub follows: bool,
    /// Kind of access.
    pub deed: Deed,
}

/// Kind of a row: how the arguments determine the access; numbers are those of arguments.
#[derive(Debug, Clone, Copy)]
enum AccessKind {
    Open(usize),
    /// The flags are the first word of a structure.
    OpenHow(usize),
    Create,
    MakeNode(usize),
    /// A link at the end is not followed, or makes creation fail.
    Plain(Deed),
    Followed(Deed),
    /// Followed unless the flags in that argument have `AT_SYMLINK_NOFOLLOW`.
    ByFlags(Deed, usize),
}

/// One path of one call.
struct PathRow {
    number: c_long,
    directory: Option<usize>,
    path: usize,
    way: AccessKind,
}

const fn here(number: c_long, path: usize, way: AccessKind) -> PathRow {
    PathRow { number, directory: None, path, way }
}

const fn at(number: c_long, directory: usize, way: AccessKind) -> PathRow {
    PathRow { number, directory: Some(directory), path: directory + 1, way }
}

use AccessKind::{ByFlags, Followed, Plain};
use Deed::{Alter, Look, Make, MakeSpecial, Remove, Replace, Run, Truncate};

/// Calls of all architectures. Those with two paths have two rows.
const ROWS: &[PathRow] = &[
    at(libc::SYS_openat, 0, AccessKind::Open(2)),
    at(libc::SYS_openat2, 0, AccessKind::OpenHow(2)),
    at(libc::SYS_newfstatat, 0, ByFlags(Look, 3)),
    at(libc::SYS_statx, 0, ByFlags(Look, 2)),
    at(libc::SYS_faccessat, 0, Followed(Look)),
    at(libc::SYS_faccessat2, 0, ByFlags(Look, 3)),
    at(libc::SYS_readlinkat, 0, Plain(Look)),
    here(libc::SYS_chdir, 0, Followed(Look)),
    here(libc::SYS_statfs, 0, Followed(Look)),
    here(libc::SYS_getxattr, 0, Followed(Look)),
    here(libc::SYS_lgetxattr, 0, Plain(Look)),
    here(libc::SYS_listxattr, 0, Followed(Look)),
    here(libc::SYS_llistxattr, 0, Plain(Look)),
    at(libc::SYS_mkdirat, 0, Plain(Make)),
    at(libc::SYS_mknodat, 0, AccessKind::MakeNode(2)),
    at(libc::SYS_symlinkat, 1, Plain(Make)),
    at(libc::SYS_linkat, 0, Plain(Look)),
    at(libc::SYS_linkat, 2, Plain(Make)),
    at(libc::SYS_unlinkat, 0, Plain(Remove)),
    at(libc::SYS_renameat2, 0, Plain(Remove)),
    at(libc::SYS_renameat2, 2, Plain(Replace)),
    here(libc::SYS_truncate, 0, Followed(Truncate)),
    at(libc::SYS_fchmodat, 0, Followed(Alter)),
    at(libc::SYS_fchmodat2, 0, ByFlags(Alter, 3)),
    at(libc::SYS_fchownat, 0, ByFlags(Alter, 4)),
    at(libc::SYS_utimensat, 0, ByFlags(Alter, 3)),
    here(libc::SYS_setxattr, 0, Followed(Alter)),
    here(libc::SYS_lsetxattr, 0, Plain(Alter)),
    here(libc::SYS_removexattr, 0, Followed(Alter)),
    here(libc::SYS_lremovexattr, 0, Plain(Alter)),
    here(libc::SYS_execve, 0, Followed(Run)),
    at(libc::SYS_execveat, 0, Followed(Run)),
];

/// Older calls without a directory descriptor, which newer architectures lack.
#[cfg(target_arch = "x86_64")]
const OLD_ROWS: &[PathRow] = &[
    here(libc::SYS_open, 0, AccessKind::Open(1)),
    here(libc::SYS_creat, 0, AccessKind::Create),
    here(libc::SYS_stat, 0, Followed(Look)),
    here(libc::SYS_lstat, 0, Plain(Look)),
    here(libc::SYS_access, 0, Followed(Look)),
    here(libc::SYS_readlink, 0, Plain(Look)),
    here(libc::SYS_mkdir, 0, Plain(Make)),
    here(libc::SYS_mknod, 0, AccessKind::MakeNode(1)),
    here(libc::SYS_symlink, 1, Plain(Make)),
    here(libc::SYS_link, 0, Plain(Look)),
    here(libc::SYS_link, 1, Plain(Make)),
    here(libc::SYS_unlink, 0, Plain(Remove)),
    here(libc::SYS_rmdir, 0, Plain(Remove)),
    here(libc::SYS_rename, 0, Plain(Remove)),
    here(libc::SYS_rename, 1, Plain(Replace)),
    at(libc::SYS_renameat, 0, Plain(Remove)),
    at(libc::SYS_renameat, 2, Plain(Replace)),
    here(libc::SYS_chmod, 0, Followed(Alter)),
    here(libc::SYS_chown, 0, Followed(Alter)),
    here(libc::SYS_lchown, 0, Plain(Alter)),
    here(libc::SYS_utime, 0, Followed(Alter)),
    here(libc::SYS_utimes, 0, Followed(Alter)),
    at(libc::SYS_futimesat, 0, Followed(Alter)),
];
#[cfg(not(target_arch = "x86_64"))]
const OLD_ROWS: &[PathRow] = &[];

/// A call with its arguments.
#[derive(Debug, Clone, Copy)]
pub struct SystemCall {
    /// By this machine's table.
    pub number: c_long,
    /// As passed to the kernel.
    pub arguments: [u64; 6],
}

/// Numbers of all calls in the table.
pub fn numbers() -> impl Iterator<Item = c_long> {
    ROWS.iter().chain(OLD_ROWS).map(|row| row.number)
}

/// Accesses by path that a call makes. `word` reads eight bytes of the process's memory.
pub fn touches(call: &SystemCall, word: &dyn Fn(u64) -> Option<u64>) -> Vec<Touch> {
    let rows = ROWS.iter().chain(OLD_ROWS).filter(|row| row.number == call.number);
    rows.filter_map(|row| touch(row, call, word)).collect()
}

fn touch(row: &PathRow, call: &SystemCall, word: &dyn Fn(u64) -> Option<u64>) -> Option<Touch> {
    let flags = |argument: usize| low(call.arguments[argument]);
    let opened = |flags: i32| {
        let flags = OFlag::from_bits_retain(flags);
        let new_only = flags.contains(OFlag::O_CREAT | OFlag::O_EXCL);
        (Deed::Open(flags), !new_only && !flags.contains(OFlag::O_NOFOLLOW))
    };
    let (deed, follows) = match row.way {
        AccessKind::Open(argument) => opened(flags(argument)),
        AccessKind::OpenHow(argument) => opened(low(word(call.arguments[argument])?)),
        AccessKind::Create => opened(libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC),
        AccessKind::MakeNode(mode) => match flags(mode).unsigned_abs() & libc::S_IFMT {
            0 | libc::S_IFREG => (Make, false),
            _ => (MakeSpecial, false),
        },
        Plain(deed) => (deed, false),
        Followed(deed) => (deed, true),
        ByFlags(deed, argument) => (deed, flags(argument) & libc::AT_SYMLINK_NOFOLLOW == 0),
    };
    let directory = row.directory.map_or(libc::AT_FDCWD, |argument| low(call.arguments[argument]));
    Some(Touch { directory, path: call.arguments[row.path], follows, deed })
}

/// An int is the lower half of a register.
#[allow(clippy::cast_possible_truncation, reason = "that is what the kernel makes of it")]
fn low(register: u64) -> i32 {
    register as u32 as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_read_by_the_call() {
        let of =
            |number, arguments: [u64; 6]| touches(&SystemCall { number, arguments }, &|_| Some(0));
        let here = libc::AT_FDCWD;
        let touch = |directory, path, follows, deed| Touch { directory, path, follows, deed };
        let minus_100 = u64::from(here as u32);
        assert_eq!(
            of(libc::SYS_openat, [minus_100, 7, 0, 0, 0, 0]),
            [touch(here, 7, true, Deed::Open(OFlag::O_RDONLY))]
        );
        let new = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_WRONLY;
        assert_eq!(
            of(libc::SYS_openat, [3, 7, new.bits() as u64, 0, 0, 0]),
            [touch(3, 7, false, Deed::Open(new))]
        );
        let nofollow = libc::AT_SYMLINK_NOFOLLOW as u64;
        assert_eq!(of(libc::SYS_newfstatat, [4, 7, 0, nofollow, 0, 0]), [touch(4, 7, false, Look)]);
        assert_eq!(
            of(libc::SYS_renameat2, [4, 7, 5, 8, 0, 0]),
            [touch(4, 7, false, Remove), touch(5, 8, false, Replace)]
        );
        assert_eq!(of(libc::SYS_symlinkat, [9, 5, 8, 0, 0, 0]), [touch(5, 8, false, Make)]);
        assert_eq!(of(libc::SYS_read, [0; 6]), []);
    }
}
