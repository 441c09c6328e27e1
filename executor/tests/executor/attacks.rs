//! Attacks by a hostile gateway, or by a command under its control, which must fail. Each test
//! names the guard that it fails without; docs/security.md has the whole table.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{TcpListener, UdpSocket},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::Bytes;
use nix::{
    libc,
    mount::MsFlags,
    sched::{CloneFlags, unshare},
};
use posh_executor::{
    config::{Commands, Confinement, Level},
    identity::UnixUser,
    runner::ALLOWED_CALLS,
};
use posh_proto::executor::{
    ClientFile, DescribeRequest, EnvVar, Guard, PathUse, ResourceLimit, RunSpec, StatusRequest,
    WatchedTree, exited::How, guard, rejected::Kind, run_input, run_output,
};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use crate::harness::*;

/// An account with no rights of its own.
const NOBODY: &str = "nobody";

/// A shell whose annotation names its inputs, outputs and programs: stands in for a command under
/// an attacker's control.
const SHELL: &str = "
sh:
  helpers: [cat, cp, ln, ls, mv, perl, rm]
  annotations:
  - OPTPARAMS:
    - {short: c, type: string, size: 1}
    - {short: i, type: input_file, size: 1}
    - {short: o, type: output_file, size: 1}
    PARAMS:
    - {name: names, type: string, size: list}
";

/// An executor with annotations as they ship, and [`SHELL`].
async fn annotated() -> (Lab, TempDir) {
    annotated_with(SHELL).await
}

/// An executor with annotations as they ship, and these.
async fn annotated_with(annotations: &str) -> (Lab, TempDir) {
    let directory = TempDir::new().unwrap();
    fs::write(directory.path().join("own.yaml"), annotations).unwrap();
    let path = directory.path().to_owned();
    let lab = Lab::with(|config| {
        config.confinement = Confinement {
            annotations: vec![path],
            user: Some(own_user().into()),
            ..Confinement::default()
        };
    });
    (lab.await, directory)
}

async fn as_nobody() -> Lab {
    let lab =
        Lab::with(|config| config.confinement.user = UnixUser::named(NOBODY).ok().map(Into::into))
            .await;
    fs::set_permissions(lab.store.path(), fs::Permissions::from_mode(0o777)).unwrap();
    lab
}

/// `diff <(sort a) <(sort b)` and `tee /dev/stderr` are everyday commands.
#[tokio::test]
async fn a_command_opens_its_pipes_by_name_whoever_it_runs_as() {
    let lab = as_nobody().await;
    for command in ["cat /dev/stdin", "cat /dev/fd/0", "tee /dev/stderr", "grep a - /dev/stdin"] {
        let outcome =
            run(&lab.client, pipeline_with_input(&[command]), Bytes::from_static(b"a\n")).await;
        assert!(outcome.text().ends_with("a\n"), "{command}: {outcome:?}");
        assert_eq!(outcome.codes(), [How::Code(0)], "{command}: {outcome:?}");
    }
    let outcome =
        run(&lab.client, pipeline(&["echo a", "cat /dev/stdin", "tee /dev/stdout"]), Bytes::new())
            .await;
    assert_eq!(outcome.text(), "a\na\n", "{outcome:?}");
}

fn shell(script: &str) -> RunSpec {
    command(&["sh", "-c", script])
}

/// A script for a command that has `input` (read as $1) among its words.
fn shell_with_input(script: &str, input: &str) -> RunSpec {
    // The shell takes what follows the script for its own parameters.
    command(&["sh", "-c", script, "sh", "-i", input])
}

impl Lab {
    /// Runs a script to its end; returns its output, errors included.
    async fn says(&self, spec: RunSpec) -> String {
        let outcome = self.run(spec).await;
        assert!(outcome.is_finished, "{outcome:?}");
        format!("{}{}", outcome.text(), outcome.errors())
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.store.path().join(name)).unwrap()
    }

    fn has(&self, name: &str) -> bool {
        self.store.path().join(name).exists()
    }
}

/// The errno of a system call made by a command.
async fn answer_to(lab: &Lab, call: libc::c_long, arguments: &str) -> String {
    let script = format!("$! = 0; syscall({call}, {arguments}); print $! + 0");
    lab.says(command(&["perl", "-e", &script])).await
}

// Guards: confine::keeper and confine::take_user.
#[tokio::test]
async fn commands_have_no_privileges() {
    let script = "grep -E '^(CapPrm|CapEff|CapBnd|CapAmb|NoNewPrivs|Seccomp):' /proc/self/status; id -u; id -G";
    let lab = Lab::start().await;
    // Root keeps its rights over files: a command of root needs them.
    let roots = lab.says(shell(script)).await;
    let files = "000000000000001f";
    for expected in [
        format!("CapPrm:\t{files}"),
        format!("CapEff:\t{files}"),
        format!("CapBnd:\t{files}"),
        "CapAmb:\t0000000000000000".to_owned(),
        "NoNewPrivs:\t1".to_owned(),
        "Seccomp:\t2".to_owned(),
    ] {
        assert!(roots.contains(&expected), "{expected}: {roots}");
    }
    let nobody = UnixUser::named(NOBODY).unwrap();
    let others = as_nobody().await.says(shell(script)).await;
    let none = "0000000000000000";
    for capability in ["CapPrm", "CapEff", "CapBnd"] {
        assert!(others.contains(&format!("{capability}:\t{none}")), "{others}");
    }
    assert!(others.contains(&format!("\n{}\n", nobody.uid)), "{others}");
}

// Guard: confine::take_user, before any path is looked at.
#[tokio::test]
async fn a_users_rights_count_for_redirects_and_files() {
    let lab = as_nobody().await;
    lab.write("secret", "of root\n");
    fs::set_permissions(lab.store.path().join("secret"), fs::Permissions::from_mode(0o600))
        .unwrap();
    let outcome = lab.run(pipeline(&["cat secret"])).await;
    assert!(outcome.errors().contains("Permission denied"), "{outcome:?}");
    let mut spec = pipeline(&["cat"]);
    spec.stages[0].descriptors[0].source = Some(file("secret", libc::O_RDONLY, 0));
    assert_eq!(lab.run(spec).await.refusal().kind(), Kind::OpenFailed);
    lab.says(shell("echo made > new")).await;
    let made = fs::metadata(lab.store.path().join("new")).unwrap();
    assert_eq!(made.uid(), UnixUser::named(NOBODY).unwrap().uid);
}

// A command's working directory may be closed to its user (confine::enter_directory).
#[tokio::test]
async fn a_user_stays_in_a_directory_that_is_locked() {
    let lab = as_nobody().await;
    fs::create_dir(lab.store.path().join("locked")).unwrap();
    fs::set_permissions(lab.store.path().join("locked"), fs::Permissions::from_mode(0o700))
        .unwrap();
    lab.write("locked/f", "x");
    let mut spec = shell("pwd; ls; cat f; grep CapPrm /proc/self/status");
    spec.stages[0].cwd = format!("{MOUNT}/locked").into();
    let said = lab.says(spec).await;
    assert!(said.starts_with(&format!("{MOUNT}/locked\nCapPrm:\t0000000000000000\n")), "{said}");
    assert_eq!(said.matches("Permission denied").count(), 2, "{said}");
}

// Guards: nosuid of the mounts, no_new_privs, and no right to start what is in an export.
#[tokio::test]
async fn setuid_programs_give_nothing() {
    let lab = as_nobody().await;
    let copy = lab.store.path().join("id");
    fs::copy("/usr/bin/id", &copy).unwrap();
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o4755)).unwrap();
    assert_eq!(lab.says(shell("./id -u; echo $?")).await, "126\nsh: 1: ./id: Permission denied\n");
    let said = lab.says(shell("cp id /tmp/id; chmod 4755 /tmp/id; /tmp/id -u; echo $?")).await;
    assert!(said.starts_with("126\n"), "{said}");
    let mounts = lab.says(shell("grep -E ' (/usr|/mnt[^ ]*) ' /proc/self/mountinfo")).await;
    assert!(
        mounts.lines().all(|line| line.contains("nosuid") && line.contains("nodev")),
        "{mounts}"
    );
}

// Guards: the list of /etc and of devices in `system`, and the mount namespace.
#[tokio::test]
async fn the_servers_secrets_are_not_there() {
    let lab = Lab::start().await;
    let said = lab.says(shell("for f in /etc/shadow /etc/ssh /etc/hosts /etc/fstab /root /var/lib /boot /srv /run/* /home/*; do ls -d $f; done")).await;
    assert_eq!(said.matches("cannot access").count(), 10, "{said}");
    let devices = lab.says(shell("echo /dev/*")).await;
    assert_eq!(
        devices.trim(),
        "/dev/fd /dev/full /dev/null /dev/random /dev/stderr /dev/stdin /dev/stdout /dev/tty /dev/urandom /dev/zero"
    );
    // Nor through another process's root.
    for root in ["/proc/1/root", "/proc/self/root", "/proc/self/cwd/../../../.."] {
        let said = lab
            .says(shell(&format!("ls -d {root}/etc/shadow {root}/root; cat {root}/proc/1/environ")))
            .await;
        assert!(
            !said.contains("root:")
                && !said.contains("PATH=")
                && !said.contains(&format!("\n{root}/root\n")),
            "{said}"
        );
    }
    // The machine's settings are invisible, and so can't be changed.
    let said = lab
        .says(shell("cat /proc/sys/kernel/core_pattern; echo x > /proc/sys/kernel/core_pattern"))
        .await;
    assert!(!said.contains("core\n"), "{said}");
    let said = lab.says(shell("echo 1 > /proc/self/oom_score_adj")).await;
    assert!(said.contains("Read-only file system") || said.contains("Permission denied"), "{said}");
}

// Guards: CLONE_NEWNET in runner::leave_namespaces; socket(2) in `filter`.
#[tokio::test]
async fn there_is_no_network() {
    let lab = Lab::start().await;
    let (tcp, udp) =
        (TcpListener::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
    for (protocol, port) in
        [("tcp", tcp.local_addr().unwrap().port()), ("udp", udp.local_addr().unwrap().port())]
    {
        let script = format!("echo x > /dev/{protocol}/127.0.0.1/{port}; echo $?");
        let said = lab.says(command(&["bash", "-c", &script])).await;
        assert!(said.starts_with("1\n"), "{said}");
    }
    for family in [
        libc::AF_UNIX,
        libc::AF_INET,
        libc::AF_INET6,
        libc::AF_NETLINK,
        libc::AF_PACKET,
        libc::AF_VSOCK,
    ] {
        let arguments = format!("{family}, {}, 0", libc::SOCK_DGRAM);
        assert_eq!(
            answer_to(&lab, libc::SYS_socket, &arguments).await,
            libc::EPERM.to_string(),
            "{family}"
        );
    }
    let theirs = lab
        .says(shell(
            "readlink /proc/self/ns/net /proc/self/ns/ipc /proc/self/ns/uts /proc/self/ns/pid",
        ))
        .await;
    for (their, name) in theirs.lines().zip(["net", "ipc", "uts", "pid"]) {
        assert_ne!(Path::new(their), fs::read_link(format!("/proc/self/ns/{name}")).unwrap());
    }
}

// Guard: `filter`.
#[tokio::test]
async fn dangerous_system_calls_are_refused() {
    let lab = Lab::start().await;
    for (call, arguments) in [
        (libc::SYS_ptrace, "0, 0, 0, 0"),
        (libc::SYS_process_vm_readv, "1, 0, 0, 0, 0, 0"),
        (libc::SYS_mount, "0, 0, 0, 0, 0"),
        (libc::SYS_umount2, "0, 0"),
        (libc::SYS_unshare, "0"),
        (libc::SYS_setns, "0, 0"),
        (libc::SYS_chroot, "0"),
        (libc::SYS_bpf, "0, 0, 0"),
        (libc::SYS_perf_event_open, "0, 0, 0, 0, 0"),
        (libc::SYS_userfaultfd, "0"),
        (libc::SYS_io_uring_setup, "1, 0"),
        (libc::SYS_keyctl, "0, 0, 0, 0, 0"),
        (libc::SYS_kexec_load, "0, 0, 0, 0"),
        (libc::SYS_open_by_handle_at, "0, 0, 0"),
        (libc::SYS_clone, "0x10000000, 0, 0, 0, 0"),
        (libc::SYS_ioctl, "0, 0x5412, 0"),
    ] {
        assert_eq!(answer_to(&lab, call, arguments).await, libc::EPERM.to_string(), "call {call}");
    }
    assert_eq!(answer_to(&lab, libc::SYS_clone3, "0, 0").await, libc::ENOSYS.to_string());
    if cfg!(target_arch = "x86_64") {
        // The same call by its number in the x32 interface; a kernel without that would say ENOSYS.
        let ptrace = libc::SYS_ptrace | 0x4000_0000;
        assert_eq!(answer_to(&lab, ptrace, "0, 0, 0, 0").await, libc::EPERM.to_string());
    }
}

// Guard: filter::OWN_PROCESS and limits_of_others. Each of these asks for the same user alone, and the
// keeper, process 1, has the command's here.
#[tokio::test]
async fn no_call_changes_another_process() {
    let lab = Lab::start().await;
    // SCHED_IDLE (5) may be taken from everywhere. Perl hands a variable to the kernel, but no constant.
    let [limit, parameter, processors] =
        ["$p = pack('QQ', 100, 100)", "$p = pack('l', 0)", "$p = pack('Q', -1)"];
    let attributes = "$p = pack('LLQlLQQQ', 48, 5, 0, 0, 0, 0, 0, 0)";
    for (call, own, others) in [
        (libc::SYS_prlimit64, format!("0, 7, {limit}, 0"), format!("1, 7, {limit}, 0")),
        (libc::SYS_sched_setaffinity, format!("0, 8, {processors}"), format!("1, 8, {processors}")),
        (libc::SYS_sched_setscheduler, format!("0, 5, {parameter}"), format!("1, 5, {parameter}")),
        (libc::SYS_sched_setparam, format!("0, {parameter}"), format!("1, {parameter}")),
        (libc::SYS_sched_setattr, format!("0, {attributes}, 0"), format!("1, {attributes}, 0")),
        (libc::SYS_setpriority, "0, 0, 1".to_owned(), "0, 1, 1".to_owned()),
        (libc::SYS_setpriority, "0, 0, 1".to_owned(), "1, 0, 1".to_owned()),
        (libc::SYS_setpriority, "0, 0, 1".to_owned(), "2, 0, 1".to_owned()),
        (libc::SYS_ioprio_set, "1, 0, 0".to_owned(), "1, 1, 0".to_owned()),
        (libc::SYS_ioprio_set, "1, 0, 0".to_owned(), "2, 0, 0".to_owned()),
        (libc::SYS_ioprio_set, "1, 0, 0".to_owned(), "3, 0, 0".to_owned()),
    ] {
        let refused = libc::EPERM.to_string();
        assert_eq!(answer_to(&lab, call, &others).await, refused, "call {call}: {others}");
        assert_eq!(answer_to(&lab, call, &own).await, "0", "call {call}: {own}");
    }
    // Limits may be read.
    assert_eq!(answer_to(&lab, libc::SYS_prlimit64, "1, 7, 0, $b = 'x' x 16").await, "0");
}

/// Makes calls by their numbers; prints the number and errno of each.
const PROBE: &str = "$| = 1; for $n (@ARGV) { $! = 0; syscall($n + 0, 0, 0, 0, 0, 0, 0); print $n, q( ), $! + 0, qq(\\n) }";

// Guard: the list of allowed calls (filter::narrow), for annotated commands.
#[tokio::test]
async fn an_annotated_command_makes_no_other_system_call_than_those_listed() {
    let (lab, _directory) = annotated().await;
    // The kernel lets two past every filter, for its uprobes: a process that makes one by itself is
    // killed (SIGILL).
    let is_tried =
        |call: &libc::c_long| !ALLOWED_CALLS.contains(call) && ![335, 336].contains(call);
    let others: Vec<libc::c_long> = (0..=470).filter(is_tried).collect();
    assert!(others.len() > 100, "{others:?}");
    let words: Vec<String> = others.iter().map(ToString::to_string).collect();
    let outcome = lab.run(shell(&format!("exec perl -e '{PROBE}' {}", words.join(" ")))).await;
    let said = outcome.text();
    let answers: Vec<(&str, &str)> = said.lines().filter_map(|line| line.split_once(' ')).collect();
    assert_eq!(answers.len(), others.len(), "{outcome:?}");
    let [forbidden, unknown] = [libc::EPERM, libc::ENOSYS].map(|errno| errno.to_string());
    for (call, answer) in &answers {
        assert!(*answer == forbidden || *answer == unknown, "call {call}: {answer}");
    }
    let answer = |call: libc::c_long| {
        answers.iter().find(|(number, _)| *number == call.to_string()).unwrap().1
    };
    for call in [
        libc::SYS_mount,
        libc::SYS_ptrace,
        libc::SYS_bpf,
        libc::SYS_socket,
        libc::SYS_io_uring_setup,
    ] {
        assert_eq!(answer(call), forbidden, "call {call}");
    }
    // A C library falls back to an older call for an absent one.
    for call in [libc::SYS_clone3, libc::SYS_memfd_create, libc::SYS_semget, libc::SYS_mq_open, 470]
    {
        assert_eq!(answer(call), unknown, "call {call}");
    }
    // An unannotated command has the wider filter alone.
    let lab = Lab::start().await;
    assert_ne!(answer_to(&lab, libc::SYS_memfd_create, "0, 0").await, unknown);
}

/// Prints the number of seccomp filters of its process, before and after it has installed one that
/// allows everything by each of the two calls, and the results of these calls.
const INSTALLER: &str = "sub count { open F, '/proc/self/status'; join '', map { /^Seccomp_filters:\\s+(\\d+)/ } <F> }
$one = pack('SCCL', 6, 0, 0, 0x7fff0000); $all = pack('Sx6P', 1, $one); $before = count;
$prctl = syscall(PRCTL, 22, 2, $all, 0, 0); $seccomp = syscall(SECCOMP, 1, 0, $all); $strict = syscall(SECCOMP, 0, 0, 0);
$listener = syscall(SECCOMP, 1, 8, $all); $error = $! + 0;
print join ' ', $before, count, $prctl, $seccomp, $strict, $listener, $error";

// Guard: filter::no_filters, and one filter for all of a view. The kernel's memory for compiled
// filters is small, and a machine stalls when thousands are freed at once.
#[tokio::test]
async fn a_command_has_one_filter_of_its_own_at_most_and_installs_none() {
    let [prctl, seccomp] = [libc::SYS_prctl, libc::SYS_seccomp].map(|call| call.to_string());
    let script = INSTALLER.replace("PRCTL", &prctl).replace("SECCOMP", &seccomp);
    // The view's filter, which the kernel has once.
    let lab = Lab::start().await;
    assert_eq!(lab.says(command(&["perl", "-e", &script])).await, "1 1 0 0 0 -1 1");
    // And its own.
    let (lab, _directory) =
        annotated_with(&SHELL.replace("sh:", "perl:").replace("short: c", "short: e")).await;
    assert_eq!(lab.says(command(&["perl", "-e", &script])).await, "2 2 0 0 0 -1 1");
}

// Guard: filter::SOCKET_PROGRAMS.
#[tokio::test]
async fn no_program_is_attached_to_a_socket() {
    let attach = "socketpair(A, B, 1, 1, 0) or die; $one = pack('SCCL', 6, 0, 0, 0xffff); $all = pack('Sx6P', 1, $one);
        for (26, 50, 51, 52) { $! = 0; setsockopt(A, 1, $_, $all); print $! + 0, ' ' } setsockopt(A, 1, 7, 9999) and print 'ok'";
    let lab = Lab::start().await;
    assert_eq!(lab.says(command(&["perl", "-e", attach])).await, "1 1 1 1 ok");
}

// Guard: filter::other_pairs. A datagram socket of a pair can be sent from to any other by its path.
#[tokio::test]
async fn a_socket_of_a_pair_leads_only_to_the_other_one() {
    // Of type and family: streams and packets in order, then datagrams with and without flags, and
    // the families INET, INET6, NETLINK and VSOCK.
    let ask = "for ([1, 1], [1, 5], [1, 524289], [1, 2], [1, 3], [1, 2 | 2048], [2, 1], [10, 2], [16, 3], [40, 1]) {
        print socketpair(A, B, $_->[0], $_->[1], 0) ? 0 : $! + 0, ' ' }";
    let lab = Lab::start().await;
    assert_eq!(lab.says(command(&["perl", "-e", ask])).await, "0 0 0 1 1 1 1 1 1 1 ");
}

// Guard: filter::holes_in_files. grep takes a file with a hole for binary, where lseek(2) tells.
#[tokio::test]
async fn where_the_workstation_sees_no_holes_commands_see_none() {
    let lab = Lab::start().await;
    lab.write("f", format!("needle\n{}", "hay\n".repeat(100_000)));
    let file = fs::File::options().write(true).open(lab.store.path().join("f")).unwrap();
    file.set_len(1 << 20).unwrap();
    let mut spec = command(&["grep", "needle", "f"]);
    assert!(lab.says(spec.clone()).await.contains("binary file matches"));
    spec.mounts[0].no_holes = true;
    assert_eq!(lab.says(spec).await, "needle\n");
}

// Guards: the sized tmpfs (scratch::mount_private); its memory is freed (scratch::Use::clean).
#[tokio::test]
async fn what_is_put_into_tmp_is_bounded_and_given_back() {
    let lab = Lab::with(|config| config.confinement.tmp_bytes = 8 << 20).await;
    for path in ["/tmp/x", "/var/tmp/x"] {
        let outcome = lab.run(pipeline(&[&format!("cp /dev/zero {path}")])).await;
        assert!(outcome.errors().contains("No space left on device"), "{}", outcome.errors());
    }
    let deep = "chdir '/tmp'; for (1..3000) { mkdir 'd'; open F, '>f'; chmod 0, 'f'; chdir 'd' } mkdir '/tmp/.1'";
    assert_eq!(lab.says(command(&["perl", "-e", deep])).await, "");
    // A run has ended for its client before its supervisor is gone.
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    let said = lab
        .says(shell("truncate -s 100T /tmp/sparse; ln -s /mnt /tmp/link; ls -A /tmp /var/tmp"))
        .await;
    assert_eq!(said, "/tmp:\nlink\nsparse\n\n/var/tmp:\n");
    // The end of one run removes no file of another that still runs.
    let mut call = Call::open(&lab.client, pipeline_with_input(&["tee /tmp/kept"])).await;
    call.send(run_input::Kind::Chunk(posh_proto::executor::Chunk {
        stream: IN,
        data: "a\n".into(),
    }))
    .await;
    call.until_output("a\n").await;
    for _ in 0..3 {
        assert_eq!(lab.says(shell("cat /tmp/kept")).await, "a\n");
    }
}

// Guard: confine::bound_shared_memory.
#[tokio::test]
async fn shared_memory_that_outlives_its_processes_is_bounded() {
    let lab = Lab::with(|config| config.confinement.tmp_bytes = 8 << 20).await;
    let segments =
        "for (1..100) { defined(shmget(0, 1 << 20, 0600)) or last; $count++ } print $count";
    assert_eq!(lab.says(command(&["perl", "-e", segments])).await, "8");
    let queues = "for (1..1000) { defined(msgget(0, 0600)) or last; $count++ } print $count";
    assert_eq!(lab.says(command(&["perl", "-e", queues])).await, "16");
    let semaphores =
        "for (1..1000) { defined(semget(0, 100, 0600)) or last; $count += 100 } print $count";
    assert_eq!(lab.says(command(&["perl", "-e", semaphores])).await, "1000");
}

// Not an attack: on a machine with read-only settings a view has no bounds, and this is reported.
#[tokio::test]
async fn bounds_that_can_not_be_set_are_told() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let told = async || {
        let lab = Lab::start().await;
        let request = DescribeRequest { protocol: posh_proto::PROTOCOL_VERSION };
        lab.client.clone().describe(request).await.unwrap().into_inner().confinement
    };
    assert!(!told().await.contains("a bound of each view"));
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    let mount = |source: Option<&str>, at: &str, flags| {
        nix::mount::mount(source, at, None::<&str>, flags, None::<&str>).unwrap();
    };
    mount(None, "/", MsFlags::MS_REC | MsFlags::MS_PRIVATE);
    mount(Some("/proc/sys"), "/proc/sys", MsFlags::MS_BIND);
    mount(None, "/proc/sys", MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY);
    let said = told().await;
    for setting in ["shmall", "msgmni", "sem"] {
        let expected =
            format!("a bound of each view (/proc/sys/kernel/{setting}: Read-only file system");
        assert!(said.starts_with("strict: ") && said.contains(&expected), "{said}");
    }
}

// Guard: confine::be_killed_first.
#[tokio::test]
async fn a_command_is_killed_before_the_machines_own_processes() {
    let lab = Lab::start().await;
    let script = "cat /proc/self/oom_score_adj; echo 0 > /proc/self/oom_score_adj; cat /proc/self/oom_score_adj";
    let said = lab.says(shell(script)).await;
    assert!(said.starts_with("500\n500\n"), "{said}");
}

// Guard: the bounds that there are without configuration.
#[tokio::test]
async fn memory_is_bounded_without_a_word_on_it() {
    let lab = Lab::start().await;
    let said = lab.says(command(&["bash", "-c", "ulimit -d; df -B1024 --output=size /tmp"])).await;
    let numbers: Vec<u64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let about = fs::read_to_string("/proc/meminfo").unwrap();
    let total_kib: u64 = about.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(
        numbers[0] <= (total_kib / 4).max(2 << 20) && numbers[1] <= total_kib / 4 + 4,
        "{said}"
    );
}

// Guards: config::MOST_PROCESSES, for commands; the default of RLIMIT_NPROC, for what they fork.
#[tokio::test]
async fn processes_are_bounded_without_a_word_on_it() {
    let lab = Lab::start().await;
    assert_eq!(lab.says(command(&["bash", "-c", "ulimit -u"])).await, "8192\n");
    let status = lab.client.clone().status(StatusRequest {}).await.unwrap().into_inner();
    assert_eq!(status.whole.unwrap().max_processes, 768);
}

// Guard: RLIMIT_NICE (confine::set_bounds), which supervisors have.
#[tokio::test]
async fn no_command_goes_before_others() {
    let lab = Lab::start().await;
    assert_eq!(lab.says(command(&["bash", "-c", "ulimit -e"])).await, "0\n");
    let refused = libc::EACCES.to_string();
    assert_eq!(answer_to(&lab, libc::SYS_setpriority, "0, 0, -1").await, refused);
}

// Guards: RLIMIT_NOFILE (confine::set_bounds), whatever the workstation asks for; the machine's open
// files are a part for all commands (config::Bounds::with_files).
#[tokio::test]
async fn open_files_end_at_their_bound_and_a_command_that_needs_more_is_refused() {
    const BOUND: usize = 1100;
    let lab = Lab::with(|config| config.confinement.max_open_files = BOUND as u64).await;
    let with_limit = |argv: &[&str], soft: u64| {
        let mut spec = command(argv);
        spec.stages[0].limits =
            vec![ResourceLimit { resource: libc::RLIMIT_NOFILE, soft, hard: 1 << 20 }];
        spec
    };
    let said = lab.says(with_limit(&["bash", "-c", "ulimit -Sn; ulimit -Hn"], 1 << 20)).await;
    assert_eq!(said, format!("{BOUND}\n{BOUND}\n"));
    let said = lab.says(command(&["bash", "-c", "ulimit -Hn"])).await;
    assert_eq!(said, format!("{BOUND}\n"));
    // It has each of its operands open at once.
    lab.write("a", "x\n");
    let paste = |operands: usize| [&["paste"][..], &vec!["a"; operands]].concat();
    assert_eq!(
        lab.run(with_limit(&paste(BOUND), 1 << 20)).await.refusal().kind(),
        Kind::NotAllowed
    );
    let said = lab.says(with_limit(&paste(BOUND - 100), 1 << 20)).await;
    assert_eq!(said.matches('x').count(), BOUND - 100, "{said}");
    // It would not get as far on the workstation.
    let outcome = lab.run(with_limit(&paste(BOUND), 64)).await;
    assert!(outcome.errors().contains("Too many open files"), "{outcome:?}");
}

// Guards: the process namespace; the scope of signals in `fence`.
#[tokio::test]
async fn foreign_processes_can_not_be_killed() {
    let lab = Lab::start().await;
    let mut spec = pipeline_with_input(&["sh"]);
    let words = ["sh", "-c", "echo ready; read line; echo alive"];
    spec.stages[0].argv = words.map(|word| Bytes::from_static(word.as_bytes())).to_vec();
    let mut call = Call::open(&lab.client, spec).await;
    call.until_output("ready").await;
    let said = lab
        .says(shell(
            "kill -9 -1; kill -9 1; for p in /proc/[0-9]*; do kill -9 ${p#/proc/}; done; echo over",
        ))
        .await;
    assert!(!said.contains("over"), "it has killed itself: {said}");
    let own = std::process::id();
    assert!(!lab.says(shell(&format!("ls -d /proc/{own}/task/{own}/root"))).await.is_empty());
    call.send(run_input::Kind::Chunk(posh_proto::executor::Chunk {
        stream: IN,
        data: "line\n".into(),
    }))
    .await;
    call.until_output("alive").await;
    call.until(|kind| {
        matches!(kind, run_output::Kind::Exited(exited) if exited.how == Some(How::Code(0)))
            .then_some(())
    })
    .await;
}

/// Forks until it can't, or far too often; prints the number.
const FORK_BOMB: &str = "while (defined($child = fork)) { $child or do { close STDOUT; close STDERR; sleep 1000 }; \
                         ++$count < 5000 or last } print $count";

/// Number of processes that a fork bomb of this user makes under this bound.
async fn forked(user: Option<UnixUser>, max_processes: u64) -> u32 {
    let lab = Lab::with(|config| {
        config.confinement.max_processes = max_processes;
        config.confinement.user = user.or(Some(own_user())).map(Into::into);
    });
    let lab = lab.await;
    assert_eq!(lab.says(command(&["bash", "-c", "ulimit -u"])).await, format!("{max_processes}\n"));
    let made = lab.says(command(&["perl", "-e", FORK_BOMB])).await;
    // The next run has room again.
    assert_eq!(lab.says(shell("echo ok")).await, "ok\n");
    made.parse().unwrap()
}

// Guard: RLIMIT_NPROC (confine::set_bounds). The end of process numbers, which is never below 302,
// is not the reason.
#[tokio::test]
async fn a_users_fork_bomb_ends_at_the_bound() {
    // The bound counts all processes of a user of this machine: this one has no others.
    let uid = 1_900_000_000 + std::process::id();
    let user =
        UnixUser { name: "bomber".into(), uid, gid: uid, groups: vec![uid], home: "/".into() };
    let made = forked(Some(user), 100).await;
    assert!((50..100).contains(&made), "{made}");
}

// Guard: pid_max (confine::bound_processes); no limit of processes holds for root.
#[tokio::test]
async fn roots_fork_bomb_ends_at_the_bound() {
    let made = forked(None, 350).await;
    assert!((10..350).contains(&made), "{made}");
}

// Guards: RLIMIT_DATA and RLIMIT_FSIZE (confine::set_bounds).
#[tokio::test]
async fn memory_and_files_end_at_their_bounds() {
    let lab = Lab::with(|config| {
        config.confinement.max_memory_bytes = 64 << 20;
        config.confinement.max_file_bytes = 1 << 20;
    });
    let lab = lab.await;
    let outcome = lab
        .run(command(&["perl", "-e", "$size = 1 << 30; $hog = 'a' x $size; print length $hog"]))
        .await;
    assert_eq!(outcome.text(), "");
    assert!(outcome.errors().contains("Out of memory"), "{}", outcome.errors());
    // Without the bound, a gigabyte would be written.
    let outcome = lab.run(pipeline(&["dd if=/dev/zero of=zeros bs=1M count=1024"])).await;
    assert_eq!(
        outcome.codes(),
        [How::Signal(libc::SIGXFSZ.unsigned_abs())],
        "{}",
        outcome.errors()
    );
    assert_eq!(fs::metadata(lab.store.path().join("zeros")).unwrap().len(), 1 << 20);
}

// Guard: read-only attribute of the mount (build::mount_export).
#[tokio::test]
async fn a_read_only_export_stays_as_it_is() {
    let lab = Lab::with(|config| config.exports[0].read_only = true).await;
    lab.write("f", "content\n");
    let said = lab
        .says(shell(
            "exec 3< f; echo x > /proc/self/fd/3; echo x > f; mount -o remount,rw .; rm f; mkdir d; ln f g; chmod 0 f",
        ))
        .await;
    assert!(said.matches("Read-only file system").count() >= 6, "{said}");
    assert_eq!(lab.read("f"), "content\n");
    assert_eq!(
        fs::metadata(lab.store.path().join("f")).unwrap().permissions().mode() & 0o777,
        0o644
    );
}

// Guards: fence::in_mount (any command), and Resolver::require_plain (annotated ones), whatever
// paths a client says that a command uses.
#[tokio::test]
async fn nothing_goes_through_a_fifo_of_an_export() {
    let lab = Lab::with(|config| config.exports[0].read_only = true).await;
    let fifo = lab.store.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    // Both ends of the server's: neither the command nor this test waits.
    let mut server = fs::File::options().read(true).write(true).open(&fifo).unwrap();
    server.write_all(b"the server's").unwrap();
    let script = "for f in fifo /proc/self/cwd/fifo; do (echo x > $f); (echo x <> $f); done";
    let said = lab.says(shell(script)).await;
    assert_eq!(said.matches("Permission denied").count(), 4, "{said}");
    let by_cwd = "/proc/self/cwd/fifo";
    for words in [
        ["tee", "-a", "fifo"],
        ["sort", "-o", "fifo"],
        ["cat", "fifo", "."],
        ["cat", ".", by_cwd],
        ["cp", "-P", "fifo"],
    ] {
        let target = (words[0] == "cp").then_some("/dev/stdout");
        let words: Vec<&str> = words.into_iter().chain(target).collect();
        let outcome = lab.run(command(&words)).await;
        assert_eq!(outcome.refusal().kind(), Kind::PathOutside, "{words:?}");
    }
    // Of the name alone, a command may tell.
    assert_eq!(lab.says(command(&["find", "fifo"])).await, "fifo\n");
    let mut left = [0; 64];
    let bytes = server.read(&mut left).unwrap();
    assert_eq!(&left[..bytes], b"the server's");
}

// Guard: `fence`. Beside an operand, and below its directory, all can be read; elsewhere nothing.
#[tokio::test]
async fn what_is_not_named_can_not_be_read() {
    let (lab, _directory) = annotated().await;
    for directory in ["n/below", "d"] {
        fs::create_dir_all(lab.store.path().join(directory)).unwrap();
    }
    lab.write("n/named", "named\n");
    for name in ["n/beside", "n/below/f"] {
        lab.write(name, "beside\n");
    }
    for name in ["secret", "d/secret", "d/named"] {
        lab.write(name, "secret\n");
    }
    for (target, name) in
        [("secret", "link"), ("../secret", "n/link"), ("../d", "n/tree"), ("../d/named", "n/to")]
    {
        symlink(target, lab.store.path().join(name)).unwrap();
    }
    let own = |name: &str| format!("{MOUNT}/{name}");
    let said = lab.says(shell_with_input("cat n/named n/beside n/below/f", "n/named")).await;
    assert_eq!(said, "named\nbeside\nbeside\n");
    for path in [
        "secret".to_owned(),
        "link".to_owned(),
        "n/link".to_owned(),
        "n/tree/secret".to_owned(),
        "d/secret".to_owned(),
        "./d/../secret".to_owned(),
        "n/../secret".to_owned(),
        own("secret"),
        format!("/proc/self/root{}", own("secret")),
        format!("/proc/1/root{}", own("secret")),
        format!("/proc/1/cwd{}", own("secret")),
        "/proc/self/cwd/secret".to_owned(),
        "/dev/fd/../cwd/secret".to_owned(),
    ] {
        // Also if the operand is a tree, or does not exist.
        for operand in ["n/named", "n/below", "n/late", "n/below/missing/late"] {
            let said =
                lab.says(shell_with_input(&format!("cat {path}; cat < {path}"), operand)).await;
            assert!(
                !said.contains("secret\nsecret") && !said.starts_with("secret"),
                "{path}: {said}"
            );
            assert!(said.contains("denied") || said.contains("No such"), "{path}: {said}");
        }
    }
    // Of a link, its target's directory counts too; of a tree, only the files below.
    let said = lab.says(shell_with_input("cat n/to d/secret; cat secret", "n/to")).await;
    assert!(said.starts_with("secret\nsecret\ncat: secret: Permission denied"), "{said}");
    let said = lab.says(shell_with_input("cat n/below/f; cat n/beside", "n/below")).await;
    assert_eq!(said, "beside\ncat: n/beside: Permission denied\n");
    lab.write("named", "named\n");
    let said = lab
        .says(shell_with_input(
            "ls d; echo x > named; echo x > new; rm named; mv d e; ln named new",
            "named",
        ))
        .await;
    assert!(said.matches("Permission denied").count() >= 5, "{said}");
    assert_eq!(
        (lab.read("named"), lab.has("new"), lab.has("d")),
        ("named\n".to_owned(), false, true)
    );
    // A file that may be read can't be executed, by whatever name.
    lab.write("named", "#!/bin/sh\necho started\n");
    fs::set_permissions(lab.store.path().join("named"), fs::Permissions::from_mode(0o755)).unwrap();
    let said =
        lab.says(shell_with_input("./named; cp /usr/bin/id /tmp/id && /tmp/id", "named")).await;
    assert!(!said.contains("started") && !said.contains("uid="), "{said}");
}

// Guard: `fence`; beside the named output, nothing can be written.
#[tokio::test]
async fn what_is_not_named_can_not_be_written() {
    let (lab, _directory) = annotated().await;
    for name in ["out", "other"] {
        lab.write(name, "before\n");
    }
    let script =
        "echo after > out; echo after > other; cat other; echo x > /etc/new; echo x > /usr/new";
    let said = lab.says(command(&["sh", "-c", script, "sh", "-o", "out"])).await;
    assert_eq!(said.matches("Permission denied").count(), 2, "{said}");
    assert_eq!((lab.read("out"), lab.read("other")), ("after\n".to_owned(), "before\n".to_owned()));
    // Nor removed, or replaced by the output.
    let script = "rm -f other; mv -f out other; ln -f out other; echo x > new";
    let said = lab.says(command(&["sh", "-c", script, "sh", "-o", "out"])).await;
    assert_eq!(said.matches("Permission denied").count(), 4, "{said}");
    assert_eq!((lab.read("other"), lab.has("new")), ("before\n".to_owned(), false));
}

// Guard: `fence`; a right to remove a name includes that to write its contents, so that tar does
// not empty a file that it can't extract.
#[tokio::test]
async fn a_link_out_of_the_directory_of_an_archive_empties_nothing() {
    let (lab, directory) = annotated().await;
    let made = directory.path().join("made/l");
    fs::create_dir_all(&made).unwrap();
    fs::write(made.join("f"), "new\n").unwrap();
    fs::write(directory.path().join("made/g"), "new\n").unwrap();
    let archive = lab.store.path().join("a.tar");
    let words = ["-C", "made", "-cf", archive.to_str().unwrap(), "l/f", "g"];
    assert!(
        std::process::Command::new("tar")
            .args(words)
            .current_dir(directory.path())
            .status()
            .unwrap()
            .success()
    );
    for directory in ["d/e", "out", "in"] {
        fs::create_dir_all(lab.store.path().join(directory)).unwrap();
    }
    for name in ["out/f", "d/g"] {
        lab.write(name, "kept\n");
    }
    symlink("../out", lab.store.path().join("d/l")).unwrap();
    let outcome = lab.run(pipeline(&["tar -x -C d -f a.tar"])).await;
    assert_eq!(outcome.codes(), [How::Code(2)], "{outcome:?}");
    assert!(outcome.errors().contains("tar: l/f: Cannot open: File exists"), "{outcome:?}");
    assert_eq!((lab.read("out/f"), lab.read("d/g")), ("kept\n".to_owned(), "new\n".to_owned()));
    // A link that stays inside is followed, as by every shell's tar.
    symlink("e", lab.store.path().join("d/inner")).unwrap();
    fs::remove_file(lab.store.path().join("d/l")).unwrap();
    fs::rename(lab.store.path().join("d/inner"), lab.store.path().join("d/l")).unwrap();
    lab.write("d/e/f", "kept\n");
    let outcome = lab.run(pipeline(&["tar -x -C d -f a.tar"])).await;
    assert_eq!(
        (outcome.codes(), lab.read("d/e/f")),
        (vec![How::Code(0)], "new\n".to_owned()),
        "{outcome:?}"
    );
    // Also in its own directory: it has no rights to files around that.
    let mut spec = pipeline(&["tar -xf ../a.tar"]);
    spec.stages[0].cwd = format!("{MOUNT}/in").into();
    symlink("../out", lab.store.path().join("in/l")).unwrap();
    assert_eq!(lab.run(spec).await.codes(), [How::Code(2)]);
    assert_eq!((lab.read("out/f"), lab.read("in/g")), ("kept\n".to_owned(), "new\n".to_owned()));
}

// Guard: fence::AROUND_DIRECTORY; the directory itself may be removed.
#[tokio::test]
async fn a_directory_that_may_be_removed_is_none_around_which_files_may() {
    let (lab, _directory) = annotated_with(&SHELL.replace("output_file", "output_dir")).await;
    fs::create_dir_all(lab.store.path().join("d/e")).unwrap();
    for name in ["f", "d/f"] {
        lab.write(name, "content\n");
    }
    let script = "rm -f f; mv f g; echo x > new; echo x > f; rm -r d && echo removed";
    let said = lab.says(command(&["sh", "-c", script, "sh", "-o", "d"])).await;
    assert!(
        said.starts_with("removed\n") && said.matches("Permission denied").count() == 4,
        "{said}"
    );
    assert_eq!(
        (lab.read("f"), lab.has("g"), lab.has("new"), lab.has("d")),
        ("content\n".into(), false, false, false)
    );
}

// Guard: Access::Within. A command does not remove its working directory: it has no rights around
// it.
#[tokio::test]
async fn a_command_that_changes_its_directory_changes_nothing_around_it() {
    let (lab, _directory) = annotated_with(
        &SHELL.replace("  - OPTPARAMS", "  - needs_current_dir: writes\n    OPTPARAMS"),
    )
    .await;
    for directory in ["in", "empty"] {
        fs::create_dir(lab.store.path().join(directory)).unwrap();
    }
    lab.write("f", "content\n");
    let script = "perl -e 'rmdir(q(../empty)) or warn qq($!\\n)'; mv ../empty e; rm -f ../f; echo x > ../new; echo x > g";
    let mut spec = shell(script);
    spec.stages[0].cwd = format!("{MOUNT}/in").into();
    let said = lab.says(spec).await;
    assert!(said.matches("Permission denied").count() >= 4, "{said}");
    assert_eq!(
        (lab.has("empty"), lab.read("f"), lab.has("new"), lab.read("in/g")),
        (true, "content\n".into(), false, "x\n".into())
    );
}

// Guard: rules on what a name and its directory led to when the run began, not on the name.
#[tokio::test]
async fn a_link_that_is_swapped_leads_nowhere() {
    let (lab, _directory) = annotated().await;
    lab.write("secret", "secret\n");
    fs::create_dir(lab.store.path().join("n")).unwrap();
    lab.write("n/kept", "named\n");
    let at = |name: &str| lab.store.path().join("n").join(name);
    fs::hard_link(at("kept"), at("named")).unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let racer = std::thread::spawn({
        let (is_over, store) = (is_over.clone(), lab.store.path().join("n"));
        move || {
            let at = |name: &str| store.join(name);
            while !is_over.load(Ordering::Relaxed) {
                symlink("../secret", at("swap")).unwrap();
                fs::rename(at("swap"), at("named")).unwrap();
                fs::hard_link(at("kept"), at("swap")).unwrap();
                fs::rename(at("swap"), at("named")).unwrap();
            }
        }
    });
    let (mut read, mut refused) = (0, 0);
    for _ in 0..20 {
        let script =
            "i=0; while [ $i -lt 200 ]; do read line < n/named && echo $line; i=$((i+1)); done";
        let outcome = lab.run(shell_with_input(script, "n/kept")).await;
        assert!(!outcome.text().contains("secret"), "{outcome:?}");
        read += outcome.text().lines().count();
        refused += outcome.errors().matches("Permission denied").count();
    }
    is_over.store(true, Ordering::Relaxed);
    racer.join().unwrap();
    assert!(read > 0 && refused > 0, "{read} read, {refused} refused: nothing was raced for");
}

// Files made or replaced in the directories of operands while a command waits can be read, as by
// every shell's (fence::Reads).
#[tokio::test]
async fn what_is_made_or_replaced_while_a_command_waits_is_read() {
    let (lab, _directory) = annotated().await;
    let at = |name: &str| lab.store.path().join(name);
    fs::create_dir(at("n")).unwrap();
    for name in ["abc", "n/abc", "log"] {
        lab.write(name, "old\n");
    }
    symlink("n/abc", at("link")).unwrap();
    lab.write("a", "2\n1\n");
    let outcome = lab.run(pipeline(&["sort a", "tee x", "cat - x"])).await;
    assert_eq!(outcome.text(), "1\n2\n1\n2\n", "{outcome:?}");
    let mut call =
        Call::open(&lab.client, pipeline_with_input(&["cat - abc late link n/late"])).await;
    call.send(run_input::Kind::Chunk(posh_proto::executor::Chunk {
        stream: IN,
        data: "first\n".into(),
    }))
    .await;
    call.until_output("first\n").await;
    for (number, name) in ["abc", "late", "n/abc", "n/late"].into_iter().enumerate() {
        lab.write("swap", format!("{number}\n"));
        fs::rename(at("swap"), at(name)).unwrap();
    }
    call.send(run_input::Kind::End(IN)).await;
    assert_eq!(call.collect(Bytes::new()).await.text(), "0\n1\n2\n3\n");
    // tail(1) opens the file that has the name now.
    let mut call = Call::open(&lab.client, pipeline(&["tail -F log new"])).await;
    call.until_output("old\n").await;
    fs::rename(at("log"), at("log.1")).unwrap();
    lab.write("log", "rotated\n");
    call.until_output("rotated\n").await;
    lab.write("new", "made\n");
    call.until_output("made\n").await;
}

/// Gives this thread and its children a mount namespace in which these directories are empty.
fn take_empty(directories: &[&str]) {
    take_own_mounts();
    let none = None::<&str>;
    for directory in directories {
        nix::mount::mount(Some("none"), *directory, Some("tmpfs"), MsFlags::empty(), none).unwrap();
    }
}

// Guard: hidden::shown and system::Hidden. Every view shows /opt and /usr, with their programs: no
// /opt where an export lies in it, and /usr without the directories that are exports.
#[tokio::test]
async fn exports_below_opt_are_only_where_they_are_mounted() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let tops = ["/opt", "/usr/src"];
    take_empty(&tops);
    for top in tops {
        for user in [own_user(), UnixUser::named(NOBODY).unwrap()] {
            try_to_read_exports_below(Path::new(top), user).await;
        }
    }
}

async fn try_to_read_exports_below(top: &Path, user: UnixUser) {
    let is_all_hidden = top == Path::new("/opt");
    for (directory, name) in
        [("payroll/data", "list"), ("tool/bin", "told"), ("posh/tls", "key"), ("other", "x")]
    {
        fs::create_dir_all(top.join(directory)).unwrap();
        let file = top.join(directory).join(name);
        fs::write(&file, format!("#!/bin/sh\necho content of {name}\n")).unwrap();
        fs::set_permissions(file, fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::write(top.join("posh/executor.toml"), "content of toml").unwrap();
    let lab = Lab::with(|config| {
        let export = |name: &str, path: &str| posh_executor::Export {
            name: name.into(),
            path: top.join(path),
            ..config.exports[0].clone()
        };
        config.exports.extend([export("payroll", "payroll/data"), export("old", "posh/tls")]);
        config.file = Some(top.join("posh/executor.toml"));
        config.confinement.user = Some(user.into());
        config.confinement.trust_caller_ids = false;
    })
    .await;
    fs::set_permissions(lab.store.path(), fs::Permissions::from_mode(0o777)).unwrap();
    fs::create_dir(top.join("beside")).ok();
    bind(lab.store.path(), &top.join("beside"));
    lab.write("f", "content of the store");
    let here = |script: &str| shell(&format!("top={}; {script}", top.display()));
    let hidden =
        "for f in payroll/data/list posh/tls/key posh/executor.toml beside/f; do cat $top/$f; done
        $top/payroll/data/list; ls $top/payroll/data $top/beside; cd $top/payroll/data && ls";
    let said = lab.says(here(hidden)).await;
    assert!(
        !said.contains("content of") && !said.lines().any(|line| line == "list" || line == "f"),
        "{said}"
    );
    let said = lab.says(here("$top/tool/bin/told; cat $top/other/x")).await;
    assert_eq!(said.contains("content of told"), !is_all_hidden, "{said}");
    assert_eq!(said.contains("echo content of x"), !is_all_hidden, "{said}");
    // What a deployment does, while the view is kept, and while a command runs in it.
    let later = "echo begun; until [ -e renamed ]; do sleep 0.05; done; cat $top/payroll/data/list \
                 $top/posh/tls/key $top/payroll/data.old/list";
    let mut call = Call::open(&lab.client, here(later)).await;
    call.until_output("begun\n").await;
    let (data, old) = (top.join("payroll/data"), top.join("payroll/data.old"));
    fs::rename(&data, &old).unwrap();
    fs::create_dir(&data).unwrap();
    fs::copy(old.join("list"), data.join("list")).unwrap();
    lab.write("renamed", "");
    let said = call.collect(Bytes::new()).await;
    assert!(!format!("{} {}", said.text(), said.errors()).contains("content of"), "{said:?}");
    let said = lab.says(here("cat $top/payroll/data/list; ls $top/payroll")).await;
    // The former directory is no export: below /usr it is shown, as all that is not hidden.
    assert!(!said.contains("content of") && said.contains("data.old") != is_all_hidden, "{said}");
    if is_all_hidden {
        let said = lab.says(here("cat $top/payroll/data.old/list; ls $top")).await;
        assert!(!said.contains("content of") && !said.contains("payroll\n"), "{said}");
    }
    fs::remove_dir_all(old).unwrap();
    fs::remove_file(lab.store.path().join("renamed")).unwrap();
    let mut spec = shell("cat /mnt/p/list");
    spec.mounts.push(mount("/mnt/p", "payroll", ""));
    assert!(lab.says(spec).await.contains("content of list"));
    nix::mount::umount(&top.join("beside")).unwrap();
}

// Guard: ServerTree::without. No view shows the exports below /usr, and a user who may write the
// directory around one puts a link in its place.
#[tokio::test]
async fn a_link_in_the_place_of_an_export_stops_nobodys_runs() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    take_empty(&["/usr/src"]);
    fs::create_dir_all("/usr/src/shared/n").unwrap();
    let lab = Lab::with(|config| {
        let n = posh_executor::Export {
            name: "n".into(),
            path: "/usr/src/shared/n".into(),
            ..config.exports[0].clone()
        };
        config.exports.push(n);
    })
    .await;
    fs::rename("/usr/src/shared/n", "/usr/src/shared/gone").unwrap();
    std::os::unix::fs::symlink("gone", "/usr/src/shared/n").unwrap();
    assert!(lab.says(shell("echo told")).await.contains("told"));
    fs::rename("/usr/src/shared", "/usr/src/moved").unwrap();
    std::os::unix::fs::symlink("moved", "/usr/src/shared").unwrap();
    assert!(lab.says(shell("echo told")).await.contains("told"));
}

// Guard: runner::budget. Without it the server looks at each of these names again and again, before
// the command and after it.
#[tokio::test]
async fn trees_that_are_named_over_and_over_cost_no_more_than_a_large_one() {
    let lab = Lab::start().await;
    (0..400).for_each(|number| lab.write(&format!("f{number}"), ""));
    let tree = |times: usize| WatchedTree {
        path: MOUNT.into(),
        only: vec![".".to_owned(); times],
        ..WatchedTree::default()
    };
    for (times, is_too_much) in [(1, false), (3000, true)] {
        let mut spec = pipeline(&["true"]);
        spec.stages[0].watched_trees = vec![tree(times)];
        let outcome = lab.run(spec).await;
        assert_eq!(outcome.exits[&1].changes_incomplete, is_too_much, "{times}");
    }
}

// Guard: the same, for what decides whether a command starts.
#[tokio::test]
async fn guards_and_paths_without_end_are_refused() {
    let lab = Lab::start().await;
    let deep = vec!["d"; 60].join("/");
    fs::create_dir_all(lab.store.path().join(&deep)).unwrap();
    let mut spec = pipeline(&["true"]);
    spec.stages[0].cwd = format!("{MOUNT}/{deep}").into();
    let files = (0..15_000).map(|number| format!("{number}").into()).collect();
    spec.stages[0].guards =
        vec![Guard { files, test: guard::Test::Exists.into(), ..Guard::default() }];
    let outcome = lab.run(spec).await;
    let refusal = outcome.refusal();
    assert!(
        refusal.kind() == Kind::Guard && refusal.message.contains("more to look at"),
        "{refusal:?}"
    );
    let mut spec = pipeline(&["true"]);
    fs::create_dir_all(lab.store.path().join("links")).unwrap();
    (0..400).for_each(|number| lab.write(&format!("links/{number}"), ""));
    let used = PathUse { plain_symlinks_below: true, ..path_use("links") };
    spec.stages[0].paths = vec![used; 3000];
    let outcome = lab.run(spec).await;
    let refusal = outcome.refusal();
    assert!(
        refusal.kind() == Kind::PathOutside && refusal.message.contains("too many"),
        "{refusal:?}"
    );
}

// Guard: listing::has_default_acl. The umask does not count in a directory with a default ACL, and
// the workstation has applied it.
#[tokio::test]
async fn where_a_directory_has_a_default_acl_no_files_are_made_for_mounts_that_mask() {
    let lab = Lab::start().await;
    // Version 2, and user::rwx group::rwx other::--- (acl(5)).
    let entry = |tag: u8, rights: u8| [tag, 0, rights, 0, 0xff, 0xff, 0xff, 0xff];
    let acl = [vec![2, 0, 0, 0], [entry(1, 7), entry(4, 7), entry(0x20, 0)].concat()].concat();
    fs::create_dir_all(lab.store.path().join("top/shared")).unwrap();
    let shared = lab.store.path().join("top/shared");
    let name = "system.posix_acl_default";
    rustix::fs::setxattr(&shared, name, &acl, rustix::fs::XattrFlags::empty()).unwrap();
    let top = WatchedTree { path: format!("{MOUNT}/top").into(), ..WatchedTree::default() };
    let used = |path, takes_umask| PathUse { takes_umask, ..path_use(path) };
    for (used, trees, is_refused) in [
        (used("top/shared/new", true), vec![], true),
        (used("top/shared", true), vec![], true),
        (used("top", true), vec![top.clone()], true),
        (used("top", false), vec![top], false),
        (used("top/shared/new", false), vec![], false),
        (used("top/new", true), vec![], false),
    ] {
        let mut spec = pipeline(&["true"]);
        spec.stages[0].paths = vec![used.clone()];
        spec.stages[0].watched_trees = trees;
        let outcome = lab.run(spec).await;
        match is_refused {
            true => {
                let refusal = outcome.refusal();
                assert!(
                    refusal.kind() == Kind::Guard && refusal.message.contains("default ACL"),
                    "{refusal:?}"
                );
            }
            false => assert!(outcome.rejected.is_none(), "{used:?}"),
        }
    }
}

// Guard: ids::is_told. The workstation sets the told owner, and another directory may have the name
// by then.
#[tokio::test]
async fn the_owner_of_another_user_s_directory_is_not_told() {
    let lab = Lab::start().await;
    for name in ["own", "bobs"] {
        fs::create_dir(lab.store.path().join(name)).unwrap();
    }
    std::os::unix::fs::chown(lab.store.path().join("bobs"), Some(4242), None).unwrap();
    let mut spec = pipeline(&["true"]);
    let wanted = ["own", "bobs", "gone"].map(|name| format!("{MOUNT}/{name}"));
    spec.stages[0].owners_of = wanted.iter().map(|path| path.clone().into()).collect();
    let outcome = lab.run(spec).await;
    let told = &outcome.exits[&1].changed_directories;
    let owner = |path: &String| {
        told.iter().find(|told| told.path == path.as_bytes()).and_then(|told| told.owner)
    };
    assert_eq!(wanted.each_ref().map(owner), [Some(0), None, None]);
}

#[tokio::test]
async fn an_end_tells_of_no_more_directories_than_a_workstation_takes() {
    let lab = Lab::start().await;
    let mut spec = pipeline(&["true"]);
    let most = posh_proto::codec::MOST_CHANGED_DIRECTORIES;
    spec.stages[0].owners_of =
        (0..most + 9).map(|number| format!("{MOUNT}/{number}").into()).collect();
    let outcome = lab.run(spec).await;
    assert_eq!(outcome.exits[&1].changed_directories.len(), most);
}

// Guard: guards::Check::files is lazy. All the paths at once, places times files, would be more
// than its supervisor may have.
#[tokio::test]
async fn a_guard_of_many_files_in_a_deep_directory_is_refused_before_its_paths_are_made() {
    let lab = Lab::start().await;
    let deep = vec!["d"; 400].join("/");
    fs::create_dir_all(lab.store.path().join(&deep)).unwrap();
    let mut spec = pipeline(&["true"]);
    spec.stages[0].cwd = format!("{MOUNT}/{deep}").into();
    let files = (0..10_000).map(|number| format!("{number:x}").into()).collect();
    spec.stages[0].guards =
        vec![Guard { files, test: guard::Test::Exists.into(), ..Guard::default() }];
    let outcome = lab.run(spec).await;
    let refusal = outcome.refusal();
    assert!(
        refusal.kind() == Kind::Guard && refusal.message.contains("more to look at"),
        "{refusal:?}"
    );
}

// Guard: fence::Resolver::spend, and that it keeps which directories there are, not their paths.
#[tokio::test]
async fn operands_through_long_links_are_refused_before_they_take_memory() {
    let lab = Lab::start().await;
    let long = "X".repeat(250);
    let top = lab.store.path();
    for directory in [long.clone(), format!("L/{long}")] {
        fs::create_dir_all(top.join(directory)).unwrap();
    }
    (0..100).for_each(|number| fs::create_dir(top.join(format!("q{number}"))).unwrap());
    symlink(format!("{}l1", format!("{long}/../").repeat(14)), top.join("L/l0")).unwrap();
    (1..39).for_each(|number| {
        symlink(format!("../L/l{}", number + 1), top.join(format!("L/l{number}"))).unwrap()
    });
    lab.write("L/l39", "x\n");
    let operands: Vec<String> =
        (0..6000).map(|n| format!("q{}/../q{}/../L/l0", n % 100, n / 100)).collect();
    let few = |count: usize| {
        let words: Vec<&str> =
            std::iter::once("cat").chain(operands.iter().take(count).map(String::as_str)).collect();
        command(&words)
    };
    assert_eq!(lab.run(few(3)).await.text(), "x\n".repeat(3));
    let outcome = lab.run(few(6000)).await;
    let refusal = outcome.refusal();
    assert!(
        refusal.kind() == Kind::Guard && refusal.message.contains("more to look at"),
        "{refusal:?}"
    );
}

fn with_variable(mut spec: RunSpec, name: &str, value: &str) -> RunSpec {
    spec.stages[0]
        .env
        .push(EnvVar { name: name.to_owned().into(), value: value.to_owned().into() });
    spec
}

// Guard: `policy`, which reads the words of a command itself.
#[tokio::test]
async fn words_that_start_programs_are_refused() {
    let (lab, _directory) = annotated().await;
    lab.write("f", "content\n");
    for words in [
        &["tar", "-xf", "f", "--to-command=sh"][..],
        &["tar", "-cf", "out", "f", "--checkpoint=1", "--checkpoint-action=exec=sh"],
        &["tar", "-cf", "out", "-I", "sh", "f"],
        &["tar", "--use-compress-program=sh", "-tf", "f"],
        &["find", ".", "-exec", "sh", "{}", ";"],
        &["find", ".", "-fprintf", "out", "x"],
        &["sed", "e id", "f"],
        &["sed", "s/c/id/e", "f"],
        &["sed", "w out", "f"],
        &["awk", "BEGIN { system(\"id\") }"],
        &["awk", "BEGIN { \"id\" | getline x; print x }"],
        &["awk", "{ print > \"out\" }", "f"],
        &["sort", "--compress-program=sh", "f"],
        &["xargs", "sh"],
        &["git", "-c", "core.pager=sh", "log"],
        &["git", "-c", "alias.x=!sh", "x"],
        &["git", "--exec-path=.", "status"],
        &["git", "fetch", "ext::sh"],
        &["git", "grep", "-Osh", "x"],
        &["env", "sh"],
        &["bash", "-c", "id"],
        &["mount", "f"],
    ] {
        let outcome = lab.run(command(words)).await;
        let refusal = outcome.refusal();
        assert_eq!((refusal.kind(), refusal.stage), (Kind::NotAllowed, 1), "{words:?}");
    }
    assert!(!lab.has("out"));
}

// Guard: policy::check_name, and tools::find.
#[tokio::test]
async fn a_program_is_a_name() {
    let (lab, _directory) = annotated().await;
    for (program, called) in [
        ("/bin/sh", "sh"),
        ("../bin/sh", "sh"),
        ("./cat", "cat"),
        ("", "cat"),
        ("cat", "perl"),
        ("cat", "/bin/bash"),
    ] {
        let mut spec = pipeline(&["cat"]);
        spec.stages[0].program = program.to_owned();
        spec.stages[0].argv[0] = called.to_owned().into();
        assert_eq!(lab.run(spec).await.refusal().kind(), Kind::NotAllowed, "{program}, {called}");
    }
    let mut spec = pipeline(&["cat missing"]);
    spec.stages[0].argv[0] = "dog".into();
    assert!(lab.run(spec).await.errors().starts_with("dog: missing"));
}

// Guard: policy::read for what is annotated, LOADING for everything else.
#[tokio::test]
async fn variables_bring_nothing_in() {
    let (lab, _directory) = annotated().await;
    lab.write("f", "content\n");
    for (name, command) in [
        ("LD_PRELOAD", "cat f"),
        ("LD_LIBRARY_PATH", "cat f"),
        ("BASH_ENV", "cat f"),
        ("ENV", "zgrep x f"),
        ("GREP_OPTIONS", "grep content f"),
        ("GIT_SSH_COMMAND", "cat f"),
        ("PAGER", "git status"),
        ("GIT_EXEC_PATH", "git status"),
        ("GIT_EXTERNAL_DIFF", "git diff"),
        ("GIT_CONFIG_COUNT", "git status"),
        ("TAR_OPTIONS", "tar -tf f"),
        ("GLIBC_TUNABLES", "cat f"),
        ("PERL5OPT", "cat f"),
    ] {
        let outcome = lab.run(with_variable(pipeline(&[command]), name, "./f")).await;
        assert_eq!(outcome.refusal().kind(), Kind::NotAllowed, "{name}");
    }
    let any = Lab::start().await;
    for name in ["LD_PRELOAD", "BASH_ENV", "BASH_FUNC_x%%", "GCONV_PATH", "PYTHONSTARTUP"] {
        let outcome = any.run(with_variable(shell("true"), name, "./f")).await;
        assert_eq!(outcome.refusal().kind(), Kind::NotAllowed, "{name}");
    }
}

// Guard: policy::check_client_file.
#[tokio::test]
async fn the_workstations_files_do_not_replace_the_systems() {
    let lab = Lab::start().await;
    for path in [
        "/etc/ld.so.preload",
        "/etc/ld.so.cache",
        "/etc/passwd",
        "/usr/bin/cat",
        "/lib/x",
        "/home/../etc/passwd",
        "relative",
    ] {
        let mut spec = pipeline(&["cat /dev/null"]);
        spec.client_files =
            vec![ClientFile { path: path.into(), content: "x".into(), mode: 0o644 }];
        assert_eq!(lab.run(spec).await.refusal().kind(), Kind::NotAllowed, "{path}");
    }
}

// Guard: policy::check_client_file, which asks the annotations of the run's commands.
#[tokio::test]
async fn the_workstation_has_only_files_that_a_command_reads() {
    let (lab, _directory) = annotated().await;
    lab.write("f", "content\n");
    for (command, path, is_allowed) in [
        ("file f", "/home/u/.magic", true),
        ("file f", "/etc/magic", true),
        ("file f", "/home/v/.magic", false),
        ("file f", "/home/u/.gitconfig", false),
        ("file f", "/etc/gitconfig", false),
        ("cat f", "/home/u/.magic", false),
        ("identify f.png", "/home/u/.config/ImageMagick/policy.xml", false),
        ("cat f", "/etc/localtime", true),
    ] {
        let mut spec = with_variable(pipeline(&[command]), "HOME", "/home/u");
        spec.client_files =
            vec![ClientFile { path: path.into(), content: "# x\n".into(), mode: 0o644 }];
        let outcome = lab.run(spec).await;
        match is_allowed {
            true => assert!(outcome.is_finished, "{command} {path}: {outcome:?}"),
            false => assert_eq!(outcome.refusal().kind(), Kind::NotAllowed, "{command} {path}"),
        }
    }
}

/// Calls `test` on a thread that can't make namespaces, and nor can its children.
fn without_namespaces(test: impl AsyncFnOnce() + Send) {
    use seccompiler::{SeccompAction, SeccompFilter};
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let rules = [(libc::SYS_unshare, Vec::new())].into_iter().collect();
    let filter: seccompiler::BpfProgram =
        SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch).unwrap().try_into().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            seccompiler::apply_filter(&filter).unwrap();
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(test());
        });
    });
}

/// A perl that has no side effects, as far as its annotation knows.
const READER: &str = "
perl:
- OPTPARAMS:
  - {short: e, type: string, size: 1}
  PARAMS:
  - {name: file, type: input_file, size: 1}
";

/// Calls that change attributes of the file $p, or of the file that is open for reading as $n.
const CHANGES_OF_ATTRIBUTES: &[(libc::c_long, &str)] = &[
    (libc::SYS_fchmod, "$n, 0777"),
    (libc::SYS_fchmodat, "-100, $p, 0777"),
    (libc::SYS_fchmodat2, "-100, $p, 0777, 0"),
    (libc::SYS_fchown, "$n, 1, 1"),
    (libc::SYS_fchownat, "-100, $p, 1, 1, 0"),
    (libc::SYS_utimensat, "-100, $p, 0, 0"),
    (libc::SYS_utimensat, "$n, 0, 0, 0"),
    (libc::SYS_setxattr, "$p, $x, $v, 1, 0"),
    (libc::SYS_lsetxattr, "$p, $x, $v, 1, 0"),
    (libc::SYS_fsetxattr, "$n, $x, $v, 1, 0"),
    (libc::SYS_removexattr, "$p, $x"),
    (libc::SYS_lremovexattr, "$p, $x"),
    (libc::SYS_fremovexattr, "$n, $x"),
    (463, "-100, $p, 0, $x, 0, 0"),
    (466, "-100, $p, 0, $x"),
    (libc::SYS_ioctl, "$n, 0x40086602, $v"),
    (libc::SYS_ioctl, "$n, 0x401c5820, $v"),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_chmod, "$p, 0777"),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_chown, "$p, 1, 1"),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_lchown, "$p, 1, 1"),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_utime, "$p, 0"),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_utimes, "$p, 0"),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_futimesat, "-100, $p, 0"),
];

/// An executor without namespaces, whose export has the path of its workstations.
async fn in_its_own_tree(annotations: &Path, commands: Commands) -> (Lab, String) {
    let annotations = vec![annotations.to_owned()];
    let user = Some(own_user().into());
    let lab = Lab::with(|config| {
        config.confinement = Confinement {
            annotations,
            user,
            commands,
            require: Level::None,
            ..Confinement::default()
        };
    })
    .await;
    let at = lab.store.path().to_str().unwrap().to_owned();
    (lab, at)
}

fn at(store: &str, mut spec: RunSpec) -> RunSpec {
    spec.mounts = vec![mount(store, "logs", "")];
    spec.stages[0].cwd = store.to_owned().into();
    spec
}

// Guard: spawn::changes_without_namespaces. Landlock knows no right to attributes.
#[test]
fn without_namespaces_only_what_changes_nothing_runs() {
    let annotations = TempDir::new().unwrap();
    without_namespaces(async || {
        let (lab, store) = in_its_own_tree(annotations.path(), Commands::Any).await;
        lab.write("f", "content\n");
        assert_eq!(lab.says(at(&store, pipeline(&["cat f"]))).await, "content\n");
        assert_eq!(lab.says(at(&store, pipeline(&["sort -r f"]))).await, "content\n");
        let mut spec = at(&store, pipeline(&["sort f"]));
        lab.write("out", "");
        spec.stages[0].descriptors[1].source = Some(file("out", libc::O_WRONLY, 0));
        assert_eq!((lab.says(spec).await.as_str(), lab.read("out")), ("", "content\n".to_owned()));
        for words in [
            "chmod 600 f",
            "touch f",
            "cp -p f g",
            "rm -rf f",
            "tee g",
            "sort -o g f",
            "gzip f",
            "tar -xf f",
            "perl -e 1",
            "sed -i s/c/C/ f",
            "ln f g",
            "mkdir -p g/h",
            "git status",
        ] {
            let outcome = lab.run(at(&store, pipeline(&[words]))).await;
            let refusal = outcome.refusal();
            assert_eq!(
                (refusal.kind(), refusal.stage),
                (Kind::NotAllowed, 1),
                "{words}: {refusal:?}"
            );
            assert!(refusal.message.contains("without namespaces"), "{words}: {refusal:?}");
        }
        assert_eq!((lab.read("f"), lab.has("g")), ("content\n".to_owned(), false));
    });
}

// Guard: guards::Check::require_readable. An answer that depends on a file's content, asked often
// enough, is its content.
#[test]
fn without_namespaces_guards_tell_nothing_of_files_outside_of_the_mounts() {
    let annotations = TempDir::new().unwrap();
    without_namespaces(async || {
        let (lab, store) = in_its_own_tree(annotations.path(), Commands::Annotated).await;
        lab.write("f", "content\n");
        let outside = TempDir::new().unwrap();
        let secret = outside.path().join("rclone.conf");
        fs::write(&secret, "[remote]\n\tpass = hunter2\n").unwrap();
        symlink(&secret, lab.store.path().join("link")).unwrap();
        let inside = format!("{store}/own.conf");
        fs::write(&inside, "[remote]\n\tpass = hunter2\n").unwrap();
        let secret = secret.to_str().unwrap();
        let link = format!("{store}/link");
        let ask = async |test: guard::Test, file: &str, value: &str| {
            let mut spec = at(&store, pipeline(&["cat f"]));
            let hash = Sha256::digest("[remote]\n\tpass = hunter2\n").to_vec();
            spec.stages[0].guards = vec![Guard {
                files: vec![file.to_owned().into()],
                settings: vec![format!("remote.pass={value}*")],
                sha256: vec![hash.into()],
                test: test.into(),
                ..Guard::default()
            }];
            let outcome = lab.run(spec).await;
            match outcome.is_finished {
                true => "fine".to_owned(),
                false => outcome.refusal().message.clone(),
            }
        };
        use guard::Test;
        for file in [secret, &link] {
            let answer = ask(Test::SettingsAllowed, file, "hunter").await;
            assert!(answer.contains("which is not in"), "{answer}");
            assert_eq!(answer, ask(Test::SettingsAllowed, file, "other").await);
            assert!(ask(Test::SameContent, file, "").await.contains("which is not in"));
            assert!(ask(Test::Exists, file, "").await.contains("which is not in"));
        }
        assert_eq!(ask(Test::SettingsAllowed, &inside, "hunter").await, "fine");
        assert!(ask(Test::SettingsAllowed, &inside, "other").await.contains("remote.pass in"));
        assert_eq!(ask(Test::SameContent, &inside, "").await, "fine");
        assert!(
            ask(Test::Exists, "/etc/passwd", "").await.contains("(/etc/passwd)"),
            "every view has it"
        );
    });
}

// Guard: fence::Ground::new. The machine's /etc, /proc and /tmp are not a view's.
#[test]
fn without_namespaces_the_machines_own_etc_proc_and_tmp_are_not_read() {
    let annotations = TempDir::new().unwrap();
    fs::write(annotations.path().join("own.yaml"), READER).unwrap();
    without_namespaces(async || {
        let (lab, store) = in_its_own_tree(annotations.path(), Commands::Annotated).await;
        lab.write("f", "content\n");
        let outside = TempDir::new().unwrap();
        let foreign = outside.path().join("foreign");
        fs::write(&foreign, "of somebody else").unwrap();
        let script = |deed: &str, paths: &[String]| {
            let each: Vec<String> = paths.iter().map(|path| format!("'{path}'")).collect();
            let deed =
                format!("for (split ' ', qq({})) {{ {deed} }}", each.join(" ").replace('\'', ""));
            at(&store, command(&["perl", "-e", &deed, "f"]))
        };
        let read = "print open(F, '<', $_) ? 'read ' : 0 + $!, ' ';";
        let own = std::process::id();
        let refused = [
            "/etc/hosts".to_owned(),
            "/etc/shadow".to_owned(),
            "/proc/version".to_owned(),
            format!("/proc/{own}/cmdline"),
            format!("/proc/{own}/environ"),
            foreign.to_str().unwrap().to_owned(),
        ];
        let said = lab.says(script(read, &refused)).await;
        assert!(!said.contains("read"), "{said}");
        let allowed =
            ["/etc/passwd", "/proc/meminfo", "/proc/self/mounts", "/etc/mtab", "/dev/null"];
        let said = lab.says(script(read, &allowed.map(str::to_owned))).await;
        assert_eq!(said.matches("read").count(), allowed.len(), "{said}");
        let made = outside.path().join("made").to_str().unwrap().to_owned();
        let write = "print open(F, '>', $_) ? 'written ' : 0 + $!, ' ';";
        assert_eq!(
            lab.says(script(write, std::slice::from_ref(&made))).await,
            format!("{} ", libc::EACCES)
        );
        let temporary = script(
            "print open(F, '>', $ENV{TMPDIR} . '/t') ? 'written ' : 0 + $!, ' ';",
            &["x".to_owned()],
        );
        assert_eq!(lab.says(temporary).await, "written  ");
    });
}

// Guard: paths::is_readable_file. Opening a file is a deed, which its watchers see.
#[test]
fn without_namespaces_no_file_outside_of_the_mounts_is_opened() {
    use rustix::fs::inotify;
    let annotations = TempDir::new().unwrap();
    without_namespaces(async || {
        let (lab, store) = in_its_own_tree(annotations.path(), Commands::Annotated).await;
        lab.write("f", "content\n");
        let outside = TempDir::new().unwrap();
        let foreign = outside.path().join("foreign");
        fs::write(&foreign, "").unwrap();
        let watcher = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
        inotify::add_watch(&watcher, &foreign, inotify::WatchFlags::OPEN).unwrap();
        let ask = async |path: &str| {
            let mut spec = at(&store, pipeline(&["cat f"]));
            spec.stages[0].paths = vec![PathUse { whole_file: true, ..path_use(path) }];
            lab.run(spec).await
        };
        assert!(ask("f").await.is_finished);
        assert_eq!(ask(foreign.to_str().unwrap()).await.refusal().kind(), Kind::NotWhole);
        assert!(rustix::io::read(&watcher, &mut [0; 4096]).is_err(), "it was opened");
    });
}

// Guard: changes::Trees::keep_inside.
#[test]
fn without_namespaces_trees_outside_of_the_mounts_are_not_watched() {
    let annotations = TempDir::new().unwrap();
    without_namespaces(async || {
        let (lab, store) = in_its_own_tree(annotations.path(), Commands::Annotated).await;
        lab.write("f", "content\n");
        lab.write("of the mount", "");
        let outside = TempDir::new().unwrap();
        let foreign = outside.path().to_str().unwrap().to_owned();
        fs::create_dir(outside.path().join("d")).unwrap();
        symlink(&foreign, lab.store.path().join("link")).unwrap();
        let mut spec = at(&store, command(&["tail", "-f", "f"]));
        let tree = |path: &str, only: &[&str]| WatchedTree {
            path: path.to_owned().into(),
            only: only.iter().map(ToString::to_string).collect(),
            ..WatchedTree::default()
        };
        spec.stages[0].watched_trees =
            vec![tree(&foreign, &[]), tree(&store, &["link/d", "of the mount"])];
        let mut call = Call::open(&lab.client, spec).await;
        call.until_output("content").await;
        fs::write(outside.path().join("d/new"), "").unwrap();
        fs::remove_file(lab.store.path().join("of the mount")).unwrap();
        let signal = posh_proto::executor::Signal { stage: 1, signal: 15, group: false };
        call.send(run_input::Kind::Signal(signal)).await;
        let outcome = call.collect(Bytes::new()).await;
        let told: Vec<&[u8]> =
            outcome.exits[&1].changed_directories.iter().map(|told| &told.path[..]).collect();
        assert_eq!(told, [store.as_bytes()]);
    });
}

// Guards: filter::ATTRIBUTES, also of files that are open for reading; ATTRIBUTE_REQUESTS.
#[test]
fn without_namespaces_no_attributes_change() {
    let annotations = TempDir::new().unwrap();
    fs::write(annotations.path().join("own.yaml"), READER).unwrap();
    without_namespaces(async || {
        let (lab, store) = in_its_own_tree(annotations.path(), Commands::Annotated).await;
        let outside = TempDir::new().unwrap();
        let secret = outside.path().join("secret");
        for path in [&secret, &lab.store.path().join("f")] {
            fs::write(path, "content\n").unwrap();
        }
        let before = fs::metadata(&secret).unwrap();
        let calls: String = CHANGES_OF_ATTRIBUTES
            .iter()
            .map(|(call, arguments)| {
                format!("$! = 0; syscall({call}, {arguments}); print $! + 0, ' '; ")
            })
            .collect();
        let script = format!(
            "open F, '<f'; $n = fileno F; $p = '{}'; $x = 'user.x'; $v = 'y' x 28; {calls}",
            secret.display()
        );
        let said = lab.says(at(&store, command(&["perl", "-e", &script, "f"]))).await;
        assert_eq!(said, format!("{} ", libc::EPERM).repeat(CHANGES_OF_ATTRIBUTES.len()));
        let after = fs::metadata(&secret).unwrap();
        assert_eq!(
            (after.mode(), after.uid(), after.modified().unwrap()),
            (before.mode(), before.uid(), before.modified().unwrap())
        );
    });
}

/// The loader of this machine's programs, which starts whatever it can read.
fn loader() -> String {
    let found = ["/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"];
    found.into_iter().find(|path| Path::new(path).exists()).expect("a loader").to_owned()
}

// Guard: filter::Narrowed::Alone. Its own program and the loader it could execute by its domain.
#[tokio::test]
async fn a_command_that_starts_nothing_becomes_no_other_program() {
    let (lab, _directory) =
        annotated_with(&SHELL.replace("  helpers: [cat, cp, ln, ls, mv, perl, rm]\n", "")).await;
    assert_eq!(lab.says(shell("echo started")).await, "started\n");
    for script in [
        "sh -c 'echo started'".to_owned(),
        "exec /bin/sh -c 'echo started'".to_owned(),
        "exec /proc/self/exe -c 'echo started'".to_owned(),
        "perl -e 'print \"started\"'".to_owned(),
        format!("{} /bin/sh -c 'echo started'", loader()),
    ] {
        let said = lab.says(shell(&script)).await;
        assert!(
            !said.starts_with("started") && said.contains("Permission denied"),
            "{script}: {said}"
        );
    }
}

// Guards: `programs`, the rules of `fence` that are made of it.
#[tokio::test]
async fn a_command_starts_what_its_annotation_names_alone() {
    let (lab, _directory) =
        annotated_with(&SHELL.replace("[cat, cp, ln, ls, mv, perl, rm]", "[sh, cat]")).await;
    lab.write("f", "content\n");
    assert_eq!(lab.says(shell_with_input("cat f; sh -c 'echo sub'", "f")).await, "content\nsub\n");
    for script in [
        "id".to_owned(),
        "/usr/bin/perl -e 'print qq(uid=)'".to_owned(),
        // A loader reads no program that may not be started, nor one by a link.
        format!("{} /usr/bin/id", loader()),
        format!("cat /usr/bin/id > /dev/null && {} /usr/bin/id", loader()),
        format!("{} /usr/bin/perl -e 'print qq(uid=)'", loader()),
    ] {
        let said = lab.says(shell(&script)).await;
        assert!(!said.contains("uid="), "{script}: {said}");
        assert!(
            said.contains("Permission denied") || said.contains("cannot open"),
            "{script}: {said}"
        );
    }
}

/// git without its guards: as if a repository's settings had changed after its guards have looked.
const UNGUARDED: &str = "
git:
  subcommands: true
  OPTPARAMS:
  - {short: c, type: string, size: 1}
  searches_up: [.git]
  own_directories: [.git]
  helpers: [git, /usr/lib/git-core/git, /usr/libexec/git-core/git]
git status:
  annotations:
  - needs_current_dir: writes
git diff:
  annotations:
  - needs_current_dir: writes
";

/// Leaves a file when it is executed.
const MARKER: &str = "open F, '>started'; print F 1; close F";

/// A repository at `directory` of the export, with a program in two files that git calls its hook's
/// protocol.
fn make_repository(lab: &Lab, directory: &str) {
    let at = lab.store.path().join(directory);
    fs::create_dir_all(&at).unwrap();
    for name in ["1", "2", "f"] {
        fs::write(at.join(name), MARKER).unwrap();
    }
    for words in [
        &["init", "-q", "."][..],
        &["config", "user.name", "A"],
        &["config", "user.email", "a@b"],
        &["add", "."],
        &["commit", "-qm", "x"],
    ] {
        let status =
            std::process::Command::new("git").arg("-C").arg(&at).args(words).status().unwrap();
        assert!(status.success(), "{words:?}");
    }
}

// Guard: `programs`. Each of these starts a program when git may execute what is installed.
#[tokio::test]
async fn settings_that_change_behind_the_guards_start_nothing() {
    let (lab, _directory) = annotated_with(UNGUARDED).await;
    make_repository(&lab, ".");
    lab.write("f", "changed\n");
    lab.write(".gitattributes", "f filter=x diff=x\n");
    let shell = format!("perl -e \"{MARKER}\"");
    for (setting, subcommand) in [
        // The protocol's number is the script's name.
        ("core.fsmonitor=/usr/bin/perl".to_owned(), "status"),
        (format!("core.fsmonitor={shell}"), "status"),
        (format!("filter.x.clean={shell}"), "status"),
        (format!("filter.x.process={shell}"), "status"),
        (format!("diff.external={shell}"), "diff"),
        ("diff.external=/usr/bin/perl".to_owned(), "diff"),
        (format!("diff.x.textconv={shell}"), "diff"),
        (format!("diff.x.command={shell}"), "diff"),
    ] {
        lab.says(command(&["git", "-c", &setting, subcommand])).await;
        assert!(!lab.has("started"), "{setting}");
    }
    // The first argument of the program is a path of the repository's: a loader starts any file
    // that it can read.
    fs::remove_file(lab.store.path().join("f")).unwrap();
    symlink("/usr/bin/id", lab.store.path().join("f")).unwrap();
    let setting = format!("diff.external={}", loader());
    let said = lab.says(command(&["git", "-c", &setting, "diff"])).await;
    assert!(!said.contains("uid=") && said.contains("cannot open shared object"), "{said}");
}

// Guard: `programs`. No guard looks at the settings of a nested repository; git runs itself in it.
#[tokio::test]
async fn a_repository_in_a_repository_starts_nothing() {
    let (lab, _directory) = annotated().await;
    make_repository(&lab, "inner");
    let fsmonitor = "[core]\n\tfsmonitor = /usr/bin/perl\n";
    make_repository(&lab, ".");
    let inner = lab.read("inner/.git/config");
    lab.write("inner/.git/config", format!("{inner}{fsmonitor}"));
    lab.write("inner/new", "new\n");
    let said = lab.says(command(&["git", "status", "--porcelain"])).await;
    // The nested git was asked, and its answer is right.
    assert!(
        said.starts_with(" M inner\n")
            && said.contains("cannot exec '/usr/bin/perl': Permission denied"),
        "{said}"
    );
    assert!(!lab.has("inner/started"));
}

// Guard: nothing in an export can be started (`fence`), also when the gateway leaves the guards of
// git out.
#[tokio::test]
async fn hooks_of_a_repository_do_not_start() {
    let (lab, _directory) = annotated().await;
    let git = |words: &[&str]| {
        let status = std::process::Command::new("git")
            .arg("-C")
            .arg(lab.store.path())
            .args(words)
            .status()
            .unwrap();
        assert!(status.success(), "{words:?}");
    };
    git(&["init", "-q", "."]);
    git(&["config", "user.name", "A"]);
    git(&["config", "user.email", "a@b"]);
    lab.write(
        ".git/hooks/pre-commit",
        format!("#!/bin/sh\ntouch {MOUNT}/started {}/started\n", lab.store.path().display()),
    );
    fs::set_permissions(
        lab.store.path().join(".git/hooks/pre-commit"),
        fs::Permissions::from_mode(0o755),
    )
    .unwrap();
    let outcome = lab.run(command(&["git", "commit", "-q", "--allow-empty", "-m", "x"])).await;
    assert_eq!(outcome.refusal().kind(), Kind::Guard);
    // An attacker in control of a command that has passed its guards can't start it either.
    let said = lab.says(shell(".git/hooks/pre-commit")).await;
    assert!(said.contains("Permission denied") && !lab.has("started"), "{said}");
}
