//! The filter of system calls: what no command that runs beside data needs, and what
//! attacks on the kernel or on other processes are made of. A list of what is
//! refused rather than of what is allowed, since commands must behave as
//! they do on the workstation, whichever C library they bring.

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    sock_filter,
};

use nix::libc;

/// Refused with EPERM, whatever the arguments.
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
    // The network: what is annotated as needing it never comes here, and a socket in a directory is a way out too.
    libc::SYS_socket,
    // Parts of the kernel with a long list of faults.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
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

/// clone(2) is how processes are made; with one of these it makes a namespace.
const NAMESPACES: [libc::c_int; 7] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
];

/// Puts typed characters into a terminal, for whoever reads it next.
const TERMINAL_INPUT: [u64; 2] = [libc::TIOCSTI, libc::TIOCLINUX];

/// Puts the filter on this process and all that it will start. They must not be able to get new privileges.
///
/// The error is a sentence for a list of what is missing.
pub fn apply() -> Result<(), String> {
    // Structures in memory can't be looked at by a filter; a C library that has not got clone3 takes clone.
    let absent = filter([(libc::SYS_clone3, Vec::new())], libc::ENOSYS)?;
    let by_name = REFUSED.iter().map(|call| (*call, Vec::new()));
    let namespaces = NAMESPACES.iter().map(|flag| flag.unsigned_abs().into());
    let clones = namespaces.map(|flag| rule(0, SeccompCmpOp::MaskedEq(flag), flag)).collect::<Result<_, _>>()?;
    let inputs = TERMINAL_INPUT.iter().map(|call| rule(1, SeccompCmpOp::Eq, *call)).collect::<Result<_, _>>()?;
    let refused = filter(by_name.chain([(libc::SYS_clone, clones), (libc::SYS_ioctl, inputs)]), libc::EPERM)?;
    for program in [absent, only_native(refused)] {
        seccompiler::apply_filter(&program).map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn filter(
    rules: impl IntoIterator<Item = (libc::c_long, Vec<SeccompRule>)>,
    errno: libc::c_int,
) -> Result<BpfProgram, String> {
    let arch = std::env::consts::ARCH.try_into().map_err(|error| format!("{error}"))?;
    let refuse = SeccompAction::Errno(errno.unsigned_abs());
    let filter = SeccompFilter::new(rules.into_iter().collect(), SeccompAction::Allow, refuse, arch);
    filter.and_then(TryInto::try_into).map_err(|error| error.to_string())
}

fn rule(argument: u8, operation: SeccompCmpOp, value: u64) -> Result<SeccompRule, String> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operation, value)
        .and_then(|condition| SeccompRule::new(vec![condition]))
        .map_err(|error| error.to_string())
}

/// On x86-64 every call has a second number, of the x32 binary interface, by which it would pass.
fn only_native(program: BpfProgram) -> BpfProgram {
    if !cfg!(target_arch = "x86_64") {
        return program;
    }
    const X32_BIT: u32 = 0x4000_0000;
    let step = |code: u32, jt, jf, k| sock_filter { code: u16::try_from(code).unwrap_or_default(), jt, jf, k };
    let mut whole = vec![
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 1, X32_BIT),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs()),
    ];
    whole.extend(program);
    whole
}
