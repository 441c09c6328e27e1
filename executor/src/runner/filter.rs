//! Seccomp filters. The keeper of a view has one that refuses system calls that commands beside
//! data don't need, and that attacks on the kernel or on other processes use. All its children
//! inherit it: the kernel has it once for each view. An annotated command installs one more, which
//! allows the listed calls alone; an unannotated one may need any other call, and installs none.
//!
//! The kernel compiles each installed filter and keeps it in its JIT compiler's memory until the
//! last process that has it is gone. When thousands are freed at once, the machine stalls. So no
//! command has more than one of its own, none can install any (`seccomp`, `prctl`), nor attach
//! other programs to sockets (`setsockopt`), and `config::MOST_PROCESSES` bounds their number.
//!
//! Invariant: no call of a command changes another process, except by a signal, which ends at a
//! Landlock domain (`fence`). The kernel asks some calls for nothing but the same user: those have
//! to name the caller by 0 ([`OWN_PROCESS`]), the others are refused.
//!
//! Invariant: no call takes what the machine has once for everybody, or lets an access of a file
//! wait for a command that has the file open, beyond locks that both ask for. What the kernel
//! bounds by user, IPC namespace or process (inotify, timers, locked memory, message queues) is
//! allowed.

use std::{
    fs::File,
    io::{self, Read as _},
    sync::{Arc, LazyLock},
};

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, sock_filter,
};

use nix::{errno::Errno, libc};

use super::wire::Isolation;
use crate::sys;

/// Refused with EPERM, whatever the arguments. Any other call that is not [`ALLOWED`] is ENOSYS,
/// upon which C libraries fall back to an older one.
const REFUSED: &[libc::c_long] = &[
    // The file tree, and namespaces.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    // open_tree_attr, newer than the C library that this is built with.
    467,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_open_by_handle_at,
    libc::SYS_fanotify_init,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    // The network: commands that are annotated as needing it do not run on executors, and a socket
    // in a directory is a way out, too.
    libc::SYS_socket,
    // Parts of the kernel with a long list of faults.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // One number of events is all that the machine has for everybody (fs.aio-max-nr).
    libc::SYS_io_setup,
    libc::SYS_io_destroy,
    libc::SYS_io_submit,
    libc::SYS_io_cancel,
    libc::SYS_io_getevents,
    // io_pgetevents, which the C library's bindings do not have on each architecture.
    IO_PGETEVENTS,
    // As long as somebody has such memory, the machine can't hibernate.
    libc::SYS_memfd_secret,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    // The machine itself.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_acct,
    libc::SYS_syslog,
    libc::SYS_vhangup,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
];

const IO_PGETEVENTS: libc::c_long = if cfg!(target_arch = "x86_64") { 333 } else { 292 };

/// Commands of fcntl(2) that are refused with EPERM: a lease or delegation of a file makes others
/// wait who open it, root too, for up to `fs.lease-break-time`, and F_NOTIFY tells of others'
/// accesses by signals.
const LEASES: [libc::c_int; 2] = [libc::F_SETLEASE, libc::F_NOTIFY];

/// The first command of fcntl(2) behind those that were looked at (Linux 6.13, F_SET_FILE_RW_HINT
/// is the last): all others are refused, too. Delegations (F_SETDELEG) are among them.
const FIRST_UNKNOWN_FCNTL: u64 = 1039;

/// Refused with EPERM for commands that see the server's own tree: Landlock has no rights for
/// attributes, so these calls reach every file of the user. Those that take a descriptor change a
/// file that is open for reading.
const ATTRIBUTES: &[libc::c_long] = &[
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    // Newer than the C library that this is built with: setxattrat, removexattrat, file_setattr.
    463,
    466,
    469,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lchown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_utime,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_utimes,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_futimesat,
];

/// Like `ATTRIBUTES`, but by ioctl(2): FS_IOC_SETFLAGS and FS_IOC_FSSETXATTR (chattr(1)).
const ATTRIBUTE_REQUESTS: [u64; 2] = [0x4008_6602, 0x401c_5820];

/// System calls of annotated commands. All work on open files, on names, which the mounts, the
/// user's rights and Landlock check, or on the process itself.
pub const ALLOWED: &[libc::c_long] = &[
    // Files: open, read, write, status.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_lseek,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync,
    libc::SYS_syncfs,
    libc::SYS_sync_file_range,
    libc::SYS_truncate,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fadvise64,
    libc::SYS_readahead,
    libc::SYS_getdents64,
    libc::SYS_copy_file_range,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_tee,
    libc::SYS_vmsplice,
    libc::SYS_ioctl,
    libc::SYS_umask,
    // Names, and attributes.
    libc::SYS_getcwd,
    libc::SYS_chdir,
    libc::SYS_fchdir,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_mkdirat,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_unlinkat,
    libc::SYS_readlinkat,
    libc::SYS_mknodat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_getxattr,
    libc::SYS_lgetxattr,
    libc::SYS_fgetxattr,
    libc::SYS_listxattr,
    libc::SYS_llistxattr,
    libc::SYS_flistxattr,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_rm_watch,
    // Waiting.
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_signalfd4,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_pipe2,
    // Memory.
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_msync,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    libc::SYS_membarrier,
    libc::SYS_get_mempolicy,
    // Processes and threads. The other filter checks the flags of clone.
    libc::SYS_clone,
    libc::SYS_execve,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getpgid,
    libc::SYS_setpgid,
    libc::SYS_getsid,
    libc::SYS_setsid,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_tgkill,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_prctl,
    libc::SYS_set_tid_address,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_rseq,
    libc::SYS_restart_syscall,
    libc::SYS_seccomp,
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_add_rule,
    libc::SYS_landlock_restrict_self,
    // User and group ids; no command has a capability by which it could change them.
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getgroups,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_setgroups,
    libc::SYS_capget,
    libc::SYS_capset,
    // Bounds and priorities.
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_setparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_getattr,
    libc::SYS_sched_setattr,
    libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min,
    libc::SYS_sched_rr_get_interval,
    libc::SYS_getpriority,
    libc::SYS_setpriority,
    libc::SYS_ioprio_get,
    libc::SYS_ioprio_set,
    libc::SYS_getrlimit,
    libc::SYS_setrlimit,
    libc::SYS_prlimit64,
    libc::SYS_getrusage,
    libc::SYS_times,
    libc::SYS_getcpu,
    // Signals and time.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_sigaltstack,
    libc::SYS_setitimer,
    libc::SYS_getitimer,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_timer_create,
    libc::SYS_timer_settime,
    libc::SYS_timer_gettime,
    libc::SYS_timer_getoverrun,
    libc::SYS_timer_delete,
    // Socket pairs between the processes of one command (rsync), and checks for a socket (bash).
    // socket(2) itself is refused.
    libc::SYS_socketpair,
    libc::SYS_shutdown,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    // The machine.
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_getrandom,
    // Calls that only this architecture has.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_creat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_dup2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_getdents,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mkdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rmdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_link,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_symlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mknod,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lchown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_utime,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_utimes,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_futimesat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_inotify_init,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_select,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_create,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_eventfd,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_signalfd,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_pipe,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_fork,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_vfork,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_getpgrp,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_arch_prctl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_alarm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_pause,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_time,
    // Newer than the C library that this is built with: futex_wake, futex_wait, futex_requeue;
    // mseal; setxattrat and its like.
    454,
    455,
    456,
    462,
    463,
    464,
    465,
    466,
];

/// Calls that change a process of the same user: its limits, its processors, its turn. The
/// arguments that say which one, with the value by which they mean the caller; any other is EPERM,
/// also its own number, which no filter knows: pthread_setaffinity_np(3), renice(1) by number.
const OWN_PROCESS: &[(libc::c_long, &[(u8, u64)])] = &[
    (libc::SYS_sched_setaffinity, &[(0, 0)]),
    (libc::SYS_sched_setscheduler, &[(0, 0)]),
    (libc::SYS_sched_setparam, &[(0, 0)]),
    (libc::SYS_sched_setattr, &[(0, 0)]),
    (libc::SYS_setpriority, &[(0, PRIO_PROCESS), (1, 0)]),
    (libc::SYS_ioprio_set, &[(0, IOPRIO_WHO_PROCESS), (1, 0)]),
];

/// From setpriority(2) and ioprio_set(2).
const PRIO_PROCESS: u64 = 0;
const IOPRIO_WHO_PROCESS: u64 = 1;

/// Flags of clone(2) that make a namespace.
const NAMESPACES: [libc::c_int; 7] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
];

/// Types of socket pairs that commands may have, of the family AF_UNIX: these are connected to each
/// other for good. A datagram socket of a pair can be connected to any other by its path, and no
/// Landlock right is asked for that.
const PAIRS: [libc::c_int; 2] = [libc::SOCK_STREAM, libc::SOCK_SEQPACKET];
/// Bits of a socket's type, as the kernel has them (SOCK_TYPE_MASK).
const SOCKET_TYPES: u64 = 0xf;

/// Requests that put typed characters into a terminal, for its next reader.
const TERMINAL_INPUT: [u64; 2] = [libc::TIOCSTI, libc::TIOCLINUX];

/// Options that attach a BPF program to a socket: one more in the kernel's JIT compiler's memory.
const SOCKET_PROGRAMS: [libc::c_int; 4] = [
    libc::SO_ATTACH_FILTER,
    libc::SO_ATTACH_BPF,
    libc::SO_ATTACH_REUSEPORT_CBPF,
    libc::SO_ATTACH_REUSEPORT_EBPF,
];

/// Reason for a missing filter.
#[derive(Debug, Clone, thiserror::Error)]
pub enum NoFilter {
    /// The rules can't be compiled for this machine.
    #[error("{0}")]
    Rules(Arc<BackendError>),
    /// More steps than a jump can pass.
    #[error("a filter has too many steps")]
    TooLong,
    /// No random number for the pass.
    #[error("/dev/urandom: {0}")]
    NoPass(Arc<io::Error>),
    /// The kernel refuses it.
    #[error("{}", .0.desc())]
    Kernel(#[from] Errno),
}

impl From<BackendError> for NoFilter {
    fn from(error: BackendError) -> Self {
        Self::Rules(error.into())
    }
}

/// The first call that this list does not know: from it on, every call is ENOSYS for every command,
/// as on kernels without it.
const FIRST_UNKNOWN: u32 = 470;

/// Answer to lseek(2) with SEEK_DATA and SEEK_HOLE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holes {
    /// That of the server's file system.
    Shown,
    /// EINVAL, as from one without them: grep takes a file with a hole for binary.
    Hidden,
}

/// Installs the filter on this process and all its children. They must not be able to get new
/// privileges. Where they see the server's own tree, they can't change attributes.
pub fn apply(isolation: Isolation, holes: Holes) -> Result<(), NoFilter> {
    Ok(install(&refusing(isolation, holes)?)?)
}

/// Steps for lseek(2), with the number of the call loaded before and after.
fn holes_in_files(holes: Holes) -> Result<BpfProgram, NoFilter> {
    let invalid = || vec![answer(libc::SECCOMP_RET_ERRNO | libc::EINVAL.unsigned_abs())];
    let steps = [
        vec![load(argument(2))],
        only_for(libc::SEEK_DATA.unsigned_abs(), invalid())?,
        only_for(libc::SEEK_HOLE.unsigned_abs(), invalid())?,
        vec![load(0)],
    ];
    match holes {
        Holes::Shown => Ok(Vec::new()),
        Holes::Hidden => only_for(number_of(libc::SYS_lseek), steps.concat()),
    }
}

fn refusing(isolation: Isolation, holes: Holes) -> Result<BpfProgram, NoFilter> {
    let (attributes, requests) = match isolation {
        Isolation::Nothing => (ATTRIBUTES, &ATTRIBUTE_REQUESTS[..]),
        Isolation::Mounts | Isolation::MountsAndProcesses => (&[][..], &[][..]),
    };
    let by_name = REFUSED.iter().chain(attributes).map(|call| (*call, Vec::new()));
    let namespaces = NAMESPACES.iter().map(|flag| flag.unsigned_abs().into());
    let clones = namespaces
        .map(|flag| rule(0, SeccompCmpOp::MaskedEq(flag), flag))
        .collect::<Result<_, _>>()?;
    let inputs = TERMINAL_INPUT
        .iter()
        .chain(requests)
        .map(|call| rule(1, SeccompCmpOp::Eq, *call))
        .collect::<Result<_, _>>()?;
    let programs =
        SOCKET_PROGRAMS.iter().map(|option| socket_rule(*option)).collect::<Result<_, _>>()?;
    let others = |arguments: &[(u8, u64)]| {
        let is_other = |(argument, own): &(u8, u64)| rule(*argument, SeccompCmpOp::Ne, *own);
        arguments.iter().map(is_other).collect::<Result<Vec<_>, NoFilter>>()
    };
    let leases = LEASES
        .iter()
        .map(|command| rule(1, SeccompCmpOp::Eq, command.unsigned_abs().into()))
        .chain([rule(1, SeccompCmpOp::Ge, FIRST_UNKNOWN_FCNTL)])
        .collect::<Result<_, _>>()?;
    let on_others = OWN_PROCESS
        .iter()
        .map(|(call, arguments)| Ok((*call, others(arguments)?)))
        .collect::<Result<Vec<_>, NoFilter>>()?;
    let by_argument = [
        (libc::SYS_clone, clones),
        (libc::SYS_ioctl, inputs),
        (libc::SYS_setsockopt, programs),
        (libc::SYS_fcntl, leases),
        (libc::SYS_socketpair, other_pairs()?),
        (libc::SYS_prlimit64, vec![limits_of_others()?]),
    ]
    .into_iter()
    .chain(on_others);
    let unknown = step(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 1, FIRST_UNKNOWN);
    let absent = answer(libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs());
    let known =
        [vec![load(0), unknown, absent], holes_in_files(holes)?, no_filters(PASS.clone()?)?]
            .concat();
    let mut program = only_native(known);
    program.extend(filter(by_name.chain(by_argument), libc::EPERM)?);
    Ok(program)
}

/// socketpair(2) of another family or type than commands may have.
fn other_pairs() -> Result<Vec<SeccompRule>, NoFilter> {
    let is_pair = |kind: &u64| PAIRS.iter().any(|pair| u64::from(pair.unsigned_abs()) == *kind);
    let families = [rule(0, SeccompCmpOp::Ne, libc::AF_UNIX.unsigned_abs().into())];
    let types = (0..=SOCKET_TYPES)
        .filter(|kind| !is_pair(kind))
        .map(|kind| rule(1, SeccompCmpOp::MaskedEq(SOCKET_TYPES), kind));
    families.into_iter().chain(types).collect()
}

/// prlimit64 with a new limit for another process; anyone may read limits.
fn limits_of_others() -> Result<SeccompRule, NoFilter> {
    let differs = |argument, length| SeccompCondition::new(argument, length, SeccompCmpOp::Ne, 0);
    let (process, limit) = (SeccompCmpArgLen::Dword, SeccompCmpArgLen::Qword);
    Ok(SeccompRule::new(vec![differs(0, process)?, differs(2, limit)?])?)
}

fn socket_rule(option: libc::c_int) -> Result<SeccompRule, NoFilter> {
    let equals = |argument, value: libc::c_int| {
        SeccompCondition::new(
            argument,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::Eq,
            value.unsigned_abs().into(),
        )
    };
    Ok(SeccompRule::new(vec![equals(1, libc::SOL_SOCKET)?, equals(2, option)?])?)
}

/// Begins a filter: an attempt to install another one without the pass succeeds, but has no effect.
/// Programs that confine themselves exit when that fails: file(1) of distributions that build it
/// with libseccomp, and man(1). Others ignore the failure (sshd); xz(1) uses Landlock. None needs
/// more than the refusal of calls that it does not make anyway, and this filter refuses more than
/// theirs. With 0 libseccomp takes seccomp(2) for absent and goes on to prctl(2). A filter with a
/// listener returns a descriptor: that is EPERM.
///
/// clone3 is absent (ENOSYS): its flags are in memory, where no filter sees them, and a C library
/// falls back to clone(2).
fn no_filters(pass: u64) -> Result<BpfProgram, NoFilter> {
    let refuse = |errno: libc::c_int| vec![answer(libc::SECCOMP_RET_ERRNO | errno.unsigned_abs())];
    let done = vec![answer(libc::SECCOMP_RET_ERRNO)];
    let listener = u32::try_from(libc::SECCOMP_FILTER_FLAG_NEW_LISTENER).expect("a small number");
    let listens = step(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, 0, 1, listener);
    let filter = [vec![load(argument(1)), listens], refuse(libc::EPERM), done.clone()].concat();
    let without_pass = [
        vec![load(argument(0))],
        only_for(libc::SECCOMP_SET_MODE_STRICT, done.clone())?,
        only_for(libc::SECCOMP_SET_MODE_FILTER, filter)?,
    ]
    .concat();
    let [low, high] = halves(pass);
    let has_pass =
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, length_of(&without_pass)?, 0, high);
    let seccomp =
        [vec![load(argument(5)), unless(low, 2), load(argument(5) + 4), has_pass], without_pass]
            .concat();
    let prctl = [
        vec![load(argument(0))],
        only_for(libc::PR_SET_SECCOMP.unsigned_abs(), done)?,
        vec![load(0)],
    ]
    .concat();
    Ok([
        vec![load(0)],
        only_for(number_of(libc::SYS_clone3), refuse(libc::ENOSYS))?,
        only_for(number_of(libc::SYS_prctl), prctl)?,
        only_for(number_of(libc::SYS_seccomp), seccomp)?,
    ]
    .concat())
}

fn install(program: &[sock_filter]) -> nix::Result<()> {
    sys::install_filter(program, PASS.as_ref().copied().unwrap_or_default())
}

/// Programs that a narrowed command may execute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Narrowed {
    /// Only its own: its first execve(2) has the pass, which no program knows.
    Alone,
    /// Those that `fence` lets it execute.
    WithOthers,
}

/// Compiles the filters of [`narrow`], once for all commands of a view.
pub fn prepare() -> Result<(), NoFilter> {
    ALONE.as_ref().and(NARROW.as_ref()).map(drop).map_err(Clone::clone)
}

/// Allows this process, and all its children, only the calls of [`ALLOWED`].
pub fn narrow(narrowed: Narrowed) -> nix::Result<()> {
    let program = match narrowed {
        Narrowed::Alone => &ALONE,
        Narrowed::WithOthers => &NARROW,
    };
    install(program.as_ref().map_err(|_| Errno::EINVAL)?)
}

/// Sixth argument of the execve(2) of a command that is [`Narrowed::Alone`], and of each seccomp(2)
/// by which this program installs a filter.
pub fn pass() -> u64 {
    PASS.as_ref().copied().unwrap_or_default()
}

/// Random, and gone with the memory of the process that becomes the command.
static PASS: LazyLock<Result<u64, NoFilter>> = LazyLock::new(|| {
    let mut bytes = [0; 8];
    let random = File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut bytes));
    random.map(|()| u64::from_ne_bytes(bytes)).map_err(|error| NoFilter::NoPass(error.into()))
});

/// Checks execve(2) first, and continues like `NARROW`.
static ALONE: LazyLock<Result<BpfProgram, NoFilter>> = LazyLock::new(|| {
    let call = number_of(libc::SYS_execve);
    let halves = halves(PASS.clone()?);
    let refused = libc::SECCOMP_RET_ERRNO | libc::EACCES.unsigned_abs();
    let mut program = vec![
        load(0),
        unless(call, 6),
        load(argument(5)),
        unless(halves[0], 3),
        load(argument(5) + 4),
        unless(halves[1], 1),
        answer(libc::SECCOMP_RET_ALLOW),
        answer(refused),
    ];
    program.extend(NARROW.clone()?);
    Ok(program)
});

/// Offset of an argument in a filter's data, its lower half first (seccomp(2), struct
/// seccomp_data).
const fn argument(index: u32) -> u32 {
    16 + index * 8
}

/// The halves of a number in memory order, as a filter sees them.
fn halves(number: u64) -> [u32; 2] {
    let bytes = number.to_ne_bytes();
    [0, 4].map(|at| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes")))
}

static NARROW: LazyLock<Result<BpfProgram, NoFilter>> = LazyLock::new(|| {
    let refuse = |errno: libc::c_int| libc::SECCOMP_RET_ERRNO | errno.unsigned_abs();
    let answer = |call: u32| match libc::c_long::from(call) {
        call if ALLOWED.contains(&call) => libc::SECCOMP_RET_ALLOW,
        call if REFUSED.contains(&call) => refuse(libc::EPERM),
        _ => refuse(libc::ENOSYS),
    };
    let mut ranges: Vec<(u32, u32)> = (0..LAST_CALL).map(|call| (call, answer(call))).collect();
    ranges.push((LAST_CALL, refuse(libc::ENOSYS)));
    ranges.push((X32_BIT, refuse(libc::EPERM)));
    ranges.dedup_by_key(|(_, answer)| *answer);
    let mut program = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    program.extend(search(&ranges)?);
    Ok(program)
});

/// No kernel has a call with a higher number.
const LAST_CALL: u32 = 1024;

/// Finds the answer for a number in ranges that begin at these: a search tree, since the kernel
/// evaluates the filter for each of some hundred calls when it is installed, which has to take
/// microseconds.
fn search(ranges: &[(u32, u32)]) -> Result<BpfProgram, NoFilter> {
    if let [(_, answer)] = ranges {
        return Ok(vec![step(libc::BPF_RET | libc::BPF_K, 0, 0, *answer)]);
    }
    let (low, high) = ranges.split_at(ranges.len() / 2);
    let below = search(low)?;
    let past = length_of(&below)?;
    let mut program = vec![step(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, past, 0, high[0].0)];
    program.extend(below);
    program.extend(search(high)?);
    Ok(program)
}

fn load(at: u32) -> sock_filter {
    step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, at)
}

/// Skips so many steps if the loaded value differs.
fn unless(value: u32, past: u8) -> sock_filter {
    step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, past, value)
}

/// These steps if the loaded value is `value`; else they are skipped.
fn only_for(value: u32, steps: BpfProgram) -> Result<BpfProgram, NoFilter> {
    Ok([vec![unless(value, length_of(&steps)?)], steps].concat())
}

fn length_of(steps: &[sock_filter]) -> Result<u8, NoFilter> {
    u8::try_from(steps.len()).map_err(|_| NoFilter::TooLong)
}

fn number_of(call: libc::c_long) -> u32 {
    u32::try_from(call).expect("numbers of calls are small")
}

fn answer(answer: u32) -> sock_filter {
    step(libc::BPF_RET | libc::BPF_K, 0, 0, answer)
}

fn step(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code: u16::try_from(code).unwrap_or_default(), jt, jf, k }
}

/// Call numbers with this bit belong to the x32 ABI.
const X32_BIT: u32 = 0x4000_0000;

fn filter(
    rules: impl IntoIterator<Item = (libc::c_long, Vec<SeccompRule>)>,
    errno: libc::c_int,
) -> Result<BpfProgram, NoFilter> {
    let arch = std::env::consts::ARCH.try_into()?;
    let refuse = SeccompAction::Errno(errno.unsigned_abs());
    let filter =
        SeccompFilter::new(rules.into_iter().collect(), SeccompAction::Allow, refuse, arch);
    Ok(filter?.try_into()?)
}

fn rule(argument: u8, operation: SeccompCmpOp, value: u64) -> Result<SeccompRule, NoFilter> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operation, value)?;
    Ok(SeccompRule::new(vec![condition])?)
}

/// On x86-64 every call has a second number, of the x32 ABI, which the filter would let pass.
fn only_native(program: BpfProgram) -> BpfProgram {
    if !cfg!(target_arch = "x86_64") {
        return program;
    }
    let mut whole = vec![
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 1, X32_BIT),
        step(
            libc::BPF_RET | libc::BPF_K,
            0,
            0,
            libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs(),
        ),
    ];
    whole.extend(program);
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    const JUMP: u32 = libc::BPF_JMP | libc::BPF_JA;
    const AND: u32 = libc::BPF_ALU | libc::BPF_AND | libc::BPF_K;
    const EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const GREATER: u32 = libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K;
    const AT_LEAST: u32 = libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K;
    const ANY: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;

    /// Answer of a filter for a call without arguments, as the kernel evaluates it
    /// (Documentation/networking/filter.rst).
    fn said(program: &[sock_filter], call: u32) -> u32 {
        said_with(program, call, 0)
    }

    /// The same for a call with this second argument.
    fn said_with(program: &[sock_filter], call: u32, second: u64) -> u32 {
        let [low, high] = halves(second);
        let arch = if cfg!(target_arch = "x86_64") { 0xc000_003e } else { 0xc000_00b7 };
        let (mut at, mut value) = (0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            let jump = |holds: bool| usize::from(if holds { jt } else { jf });
            match u32::from(code) {
                LOAD => {
                    value = match k {
                        0 => call,
                        4 => arch,
                        _ if k == argument(1) => low,
                        _ if k == argument(1) + 4 => high,
                        _ => 0,
                    }
                }
                RETURN => return k,
                JUMP => at += k as usize,
                AND => value &= k,
                EQUAL => at += jump(value == k),
                GREATER => at += jump(value > k),
                AT_LEAST => at += jump(value >= k),
                ANY => at += jump(value & k != 0),
                other => panic!("step {other:#x}"),
            }
        }
    }

    #[test]
    fn what_nobody_has_looked_at_is_absent_for_all_commands() {
        let refused = |errno: libc::c_int| libc::SECCOMP_RET_ERRNO | errno.unsigned_abs();
        let views = [Isolation::Nothing, Isolation::Mounts, Isolation::MountsAndProcesses];
        let programs = views.map(|isolation| refusing(isolation, Holes::Hidden).expect("a filter"));
        for program in &programs {
            for call in (FIRST_UNKNOWN..1200).chain([1 << 20, X32_BIT - 1]) {
                assert_eq!(said(program, call), refused(libc::ENOSYS), "{call}");
            }
            assert_eq!(said(program, 467), refused(libc::EPERM));
            assert_eq!(said(program, number_of(libc::SYS_mount)), refused(libc::EPERM));
            assert_eq!(said(program, number_of(libc::SYS_read)), libc::SECCOMP_RET_ALLOW);
        }
        let narrow = NARROW.as_ref().expect("a filter");
        for call in FIRST_UNKNOWN..1200 {
            assert_eq!(said(narrow, call), refused(libc::ENOSYS), "{call}");
        }
    }

    #[test]
    fn no_command_makes_others_wait_or_takes_what_all_share() {
        let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs();
        let fcntl = number_of(libc::SYS_fcntl);
        for isolation in [Isolation::Nothing, Isolation::Mounts, Isolation::MountsAndProcesses] {
            let program = refusing(isolation, Holes::Hidden).expect("a filter");
            // F_SETLEASE, F_NOTIFY, F_SETDELEG. The kernel looks at the lower half alone.
            for command in [1024, 1026, 1040] {
                for garbage in [0, 7 << 32] {
                    assert_eq!(said_with(&program, fcntl, command | garbage), refused, "{command}");
                    let x32 = fcntl | X32_BIT;
                    assert_eq!(said_with(&program, x32, command | garbage), refused, "{command}");
                }
            }
            for command in (0..=38).chain([1025]).chain(1027..=1038) {
                let said = said_with(&program, fcntl, command);
                assert_eq!(said, libc::SECCOMP_RET_ALLOW, "{command}");
            }
            for call in [libc::SYS_io_setup, libc::SYS_io_submit, libc::SYS_memfd_secret] {
                assert_eq!(said(&program, number_of(call)), refused, "{call}");
                assert_eq!(said(&program, number_of(call) | X32_BIT), refused, "{call}");
            }
        }
        let narrow = NARROW.as_ref().expect("a filter");
        assert_eq!(said(narrow, number_of(libc::SYS_io_setup)), refused);
    }
}
