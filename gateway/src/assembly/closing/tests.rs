//! Who may be joined to whom: each case is a handful of processes and pipe ends.

use super::*;
use crate::assembly::procfs::PipeEnd;

const SHELL: Pid = 10;
/// A pipe whose writer has said that it stays.
const FED_HERE: u64 = 77;
/// A process that this gateway has yet to answer.
const ASKS: Pid = 55;
/// The session of a process that has been asleep for 20 ms.
const SLEPT_LONG: Pid = 2;
/// The start of a process below which a command was sent to a server.
const ASKS_A_SERVER: u64 = 2;
const WAIT4: i64 = nix::libc::SYS_wait4;
const STAGE_PROGRAM: &str = "/opt/posh-stage";

/// A stage with these (descriptor, pipe, writes) and queued bytes in what it writes.
pub(in crate::assembly) fn stage(
    pid: Pid,
    ends: &[(u32, u64, bool)],
    queued: u64,
    words: &[&str],
) -> Enlisted {
    let descriptors = ends.iter().map(|&(fd, inode, writes)| Descriptor {
        fd,
        kind: DescriptorKind::Pipe,
        path: format!("pipe:[{inode}]").into(),
        identity: (0, inode),
        flags: u32::from(writes),
        offset: 0,
        queued_bytes: queued,
        same_as: None,
        mount_id: None,
        on_mount: true,
        is_older: false,
    });
    Enlisted {
        session: String::new(),
        pid,
        name: "cat".to_owned(),
        program: "/bin/cat".into(),
        argv: std::iter::once("cat").chain(words.iter().copied()).map(Into::into).collect(),
        env: Vec::new(),
        cwd: "/".into(),
        umask: 0o022,
        descriptors: descriptors.collect(),
        ignored_signals: 0,
        blocked_signals: 0,
        limits: Vec::new(),
        nice: 0,
        cwd_mount_id: None,
        mount_namespace: 0,
        window: None,
        childless: true,
        must_stay: None,
        has_own_rights: false,
        stays: None,
    }
}

fn process(
    pid: Pid,
    state: char,
    executable: &str,
    ends: &[(u32, u64, bool)],
    call: Option<i64>,
) -> Process {
    let pipe_ends =
        ends.iter().map(|&(fd, inode, writes)| PipeEnd { inode, fd, reads: !writes, writes });
    Process {
        pid,
        parent: if pid == SHELL { 1 } else { SHELL },
        state,
        executable: executable.into(),
        session: 1,
        started: 1,
        is_opaque: false,
        ending: executable.is_empty(),
        pipe_ends: pipe_ends.collect(),
        files: Vec::new(),
        system_call: call.map(|number| (number, 0)),
        sleeps_in_pipe: false,
        waits_for_partner: false,
        scheduled: Scheduled::default(),
    }
}

/// A stage program without any pipe.
pub(in crate::assembly) fn stage_process(pid: Pid) -> Process {
    process(pid, 'S', STAGE_PROGRAM, &[], None)
}

/// The process in which an enlisted stage waits.
fn process_of(stage: &Enlisted) -> Process {
    let ends: Vec<_> = stage.descriptors.iter().map(|d| (d.fd, d.identity.1, d.writes())).collect();
    process(stage.pid, 'S', STAGE_PROGRAM, &ends, None)
}

fn patience(found: &Closing) -> Vec<(usize, Awaited)> {
    found.pending.iter().map(|(stage, patience)| (*stage, patience.awaited)).collect()
}

fn look(stages: &[Enlisted], others: Vec<Process>) -> Closing {
    look_at(stages, stages.iter().map(process_of).chain(others).collect())
}

/// With all processes, the stages' own among them.
fn look_at(stages: &[Enlisted], processes: Vec<Process>) -> Closing {
    let snapshot = Snapshot::of(processes.into_iter());
    let stages: Vec<&Enlisted> = stages.iter().collect();
    let waiting: HashMap<Pid, usize> = stages.iter().enumerate().map(|(i, s)| (s.pid, i)).collect();
    examine(
        &stages,
        &snapshot,
        &Actors {
            stage_programs: &[PathBuf::from(STAGE_PROGRAM)].into(),
            shells: &[].into(),
            waiting: &waiting,
            directed: &|pid| pid == 99,
            leads_out: &|_, _| false,
            fed_here: &|_, pipe| pipe == FED_HERE,
            asks: &|pid| pid == ASKS,
            watched: &|process| {
                Duration::from_millis(if process.session == SLEPT_LONG { 20 } else { 0 })
            },
            slept: &|process| {
                Duration::from_millis(if process.session == SLEPT_LONG { 20 } else { 0 })
            },
            asks_a_server: &|process| process.started == ASKS_A_SERVER,
            answers_within: Duration::from_millis(100),
        },
    )
}

fn edge(from: (usize, u32), to: (usize, u32)) -> Edge {
    Edge { from, to }
}

fn pair() -> [Enlisted; 2] {
    [stage(20, &[(1, 7, true)], 0, &[]), stage(21, &[(0, 7, false)], 0, &[])]
}

#[test]
fn one_writer_and_one_reader_are_joined() {
    let found = look(&pair(), vec![process(SHELL, 'S', "/bin/bash", &[], Some(WAIT4))]);
    assert_eq!((found.edges, found.pending.len()), (vec![edge((0, 1), (1, 0))], 0));
}

#[test]
fn a_subshell_that_keeps_the_read_end_is_a_boundary() {
    // cat f | { head -1; wc -l; }
    let found =
        look(&pair(), vec![process(SHELL, 'S', "/bin/bash", &[(0, 7, false)], Some(WAIT4))]);
    assert_eq!((found.edges, found.pending.len()), (vec![], 0));
}

#[test]
fn queued_bytes_are_a_boundary() {
    // (echo h; exec cat f) | sort
    let [writer, reader] = pair();
    let writer = stage(writer.pid, &[(1, 7, true)], 2, &[]);
    assert_eq!(look(&[writer, reader], vec![]).edges, []);
}

#[test]
fn a_second_writer_is_a_boundary() {
    let other = process(30, 'S', "/usr/bin/yes", &[(1, 7, true)], Some(WAIT4));
    assert_eq!(look(&pair(), vec![other]).edges, []);
}

#[test]
fn a_shell_whose_child_ends_goes_on() {
    // cat $(cat names) | wc: the writer has read its words, and waits for who wrote them.
    let reader = || [stage(21, &[(0, 7, false)], 0, &[])];
    let shell = || process(30, 'S', "/bin/bash", &[(1, 7, true)], Some(WAIT4));
    let child = |state: char, executable: &str| Process {
        parent: 30,
        ..process(31, state, executable, &[], None)
    };
    assert_eq!(patience(&look(&reader(), vec![shell(), child('R', "")])), [(0, Awaited::Work)]);
    assert_eq!(patience(&look(&reader(), vec![shell(), child('Z', "")])), [(0, Awaited::Work)]);
    // { cat a > b; cat c; } | wc: it may take long.
    assert_eq!(patience(&look(&reader(), vec![shell(), child('S', "/bin/cat")])), []);
}

#[test]
fn a_running_shell_may_still_let_go() {
    let found = look(&pair(), vec![process(SHELL, 'R', "/bin/bash", &[(3, 7, true)], None)]);
    assert_eq!((found.edges, found.pending.len()), (vec![], 2));
}

#[test]
fn a_stage_program_that_has_not_enlisted_is_waited_for() {
    let writer = [stage(20, &[(1, 7, true)], 0, &[])];
    let reader = |pid| process(pid, 'S', STAGE_PROGRAM, &[(0, 7, false)], None);
    assert_eq!(patience(&look(&writer, vec![reader(31)])), [(0, Awaited::Enlistment)]);
    // One that stands in for a remote command already will not enlist again.
    assert!(look(&writer, vec![reader(99)]).pending.is_empty());
}

#[test]
fn a_shell_that_still_expands_words_is_waited_for() {
    // cat f | grep x /slow/mount/*: the child lists the directory; with $(...) it reads another
    // pipe.
    let writer = [stage(20, &[(1, 7, true)], 0, &[])];
    let shell = || process(SHELL, 'S', "/bin/bash", &[], Some(WAIT4));
    let child = |call| process(30, 'S', "/bin/bash", &[(0, 7, false)], Some(call));
    let lists = look(&writer, vec![shell(), child(nix::libc::SYS_getdents64)]);
    assert_eq!(patience(&lists), [(0, Awaited::Answer)]);
    let reads = Process { sleeps_in_pipe: true, ..child(nix::libc::SYS_read) };
    let reads = Process { system_call: Some((nix::libc::SYS_read, 5)), ..reads };
    assert_eq!(patience(&look(&writer, vec![shell(), reads])), [(0, Awaited::Answer)]);
}

#[test]
fn a_pipe_that_a_shell_above_has_itself_is_not_waited_for() {
    // x=$(wc -l < f) with errors into a pipe: the shell reads another pipe, and has this one as its
    // descriptor 2.
    let errors = [stage(20, &[(2, 7, true)], 0, &[])];
    let shell = process(SHELL, 'S', "/bin/bash", &[(2, 7, true)], Some(nix::libc::SYS_read));
    assert!(look(&errors, vec![Process { sleeps_in_pipe: true, ..shell }]).pending.is_empty());
}

#[test]
fn a_pipe_out_of_the_session_is_not_waited_for() {
    // cat f | { read l; ...; } with errors into somebody else's pipe: the group reads, and holds
    // that pipe too.
    let writer = [stage(20, &[(1, 7, true), (2, 8, true)], 0, &[])];
    let group =
        process(30, 'S', "/bin/bash", &[(0, 7, false), (2, 8, true)], Some(nix::libc::SYS_read));
    assert!(look(&writer, vec![Process { sleeps_in_pipe: true, ..group }]).pending.is_empty());
}

#[test]
fn a_foreign_reader_is_no_reason_to_wait_once_it_sleeps() {
    let writer = [stage(20, &[(1, 7, true)], 0, &[])];
    let mut less = process(30, 'S', "/usr/bin/less", &[(0, 7, false)], Some(nix::libc::SYS_read));
    less.system_call = Some((nix::libc::SYS_read, 0));
    let found = look(&writer, vec![less]);
    assert_eq!((found.edges, found.pending.len()), (vec![], 0));
}

#[test]
fn nothing_is_joined_past_a_process_whose_descriptors_can_not_be_read() {
    let stages = [stage(20, &[(1, 7, true)], 0, &[]), stage(21, &[(0, 7, false)], 0, &[])];
    let joined = [edge((0, 1), (1, 0))];
    assert_eq!(look(&stages, vec![]).edges, joined);
    let opaque = |state| Process { is_opaque: true, ..process(30, state, "", &[], None) };
    assert_eq!(look(&stages, vec![opaque('S')]).edges, []);
    assert_eq!(look(&stages, vec![opaque('Z')]).edges, joined);
}

#[test]
fn process_substitution_is_joined_though_the_shell_lends_its_end() {
    // comm <(sort a) <(sort b): the shell keeps 63 and 62 and waits; the second sort inherits 63.
    let stages = [
        stage(20, &[(1, 7, true)], 0, &[]),
        stage(21, &[(1, 8, true), (63, 7, false)], 0, &[]),
        stage(22, &[(63, 7, false), (62, 8, false)], 0, &["/dev/fd/63", "/dev/fd/62"]),
    ];
    let shell = process(SHELL, 'S', "/bin/bash", &[(63, 7, false), (62, 8, false)], Some(WAIT4));
    let found = look(&stages, vec![shell]);
    assert_eq!(found.edges, [edge((0, 1), (2, 63)), edge((1, 1), (2, 62))]);
}

#[test]
fn output_and_errors_into_one_pipe_are_one_edge() {
    let stages =
        [stage(20, &[(1, 7, true), (2, 7, true)], 0, &[]), stage(21, &[(0, 7, false)], 0, &[])];
    assert_eq!(look(&stages, vec![]).edges, [edge((0, 1), (1, 0))]);
}

#[test]
fn groups_run_from_source_to_sink() {
    // The shell started the reader (0) before its writers (2 and 1).
    let edges = [edge((2, 1), (1, 0)), edge((1, 1), (0, 0))];
    assert_eq!(groups(4, &edges), [vec![2, 1, 0], vec![3]]);
    assert_eq!(edges_of(&[2, 1, 0], &edges), [edge((0, 1), (1, 0)), edge((1, 1), (2, 0))]);
    assert_eq!(
        edges_of(&[2, 1, 0], &[edges[1], edges[0]]),
        [edge((0, 1), (1, 0)), edge((1, 1), (2, 0))]
    );
}

#[test]
fn a_writer_that_has_said_that_it_stays_is_not_waited_for() {
    let pending = |pipe| {
        let reader = stage(12, &[(0, pipe, false)], 0, &[]);
        look(&[reader], vec![process(20, 'R', "/usr/bin/python3", &[(1, pipe, true)], None)])
            .pending
    };
    assert!(!pending(FED_HERE + 1).is_empty());
    assert!(pending(FED_HERE).is_empty());
}

/// `coproc cat f; read -u ${COPROC[0]} line`: the shell writes to what the stage reads, and reads
/// what it writes.
#[test]
fn a_shell_that_waits_for_the_stage_is_not_waited_for() {
    let read = nix::libc::SYS_read;
    let stages = [stage(20, &[(0, 7, false), (1, 8, true)], 0, &[])];
    let mut shell = process(SHELL, 'S', "/bin/bash", &[(60, 7, true), (63, 8, false)], None);
    shell.sleeps_in_pipe = true;
    shell.system_call = Some((read, 63));
    let as_child = |mut process: Process| {
        // A fork of a shell: what it executes next may be a stage.
        process.parent = 9;
        process
    };
    let other = || Process { parent: 1, ..process(9, 'S', "/bin/bash", &[], Some(WAIT4)) };
    assert_eq!(patience(&look(&stages, vec![as_child(shell.clone()), other()])), []);
    // Somebody else writes to it as well: that may come first.
    let writer = process(30, 'R', "/bin/bash", &[(1, 8, true)], None);
    let found = look(&stages, vec![as_child(shell), other(), writer]);
    assert_eq!(patience(&found), [(0, Awaited::Answer)]);
}

/// `coproc { while read x; do grep x f; done; }`: between the two is a shell that waits for the
/// stage to end.
#[test]
fn a_coprocess_that_waits_for_the_stage_is_not_waited_for() {
    let enlisted = [stage(20, &[(0, 7, false), (1, 8, true)], 0, &[])];
    let mut waiting = process_of(&enlisted[0]);
    waiting.parent = 30;
    let mut shell = process(SHELL, 'S', "/bin/bash", &[(60, 7, true), (63, 8, false)], None);
    (shell.sleeps_in_pipe, shell.system_call, shell.parent) =
        (true, Some((nix::libc::SYS_read, 63)), 9);
    let other = Process { parent: 1, ..process(9, 'S', "/bin/bash", &[], Some(WAIT4)) };
    let between = process(30, 'S', "/bin/bash", &[(0, 7, false), (1, 8, true)], Some(WAIT4));
    let found = look_at(&enlisted, vec![waiting, shell, other, between]);
    assert_eq!(patience(&found), []);
}

#[test]
fn what_was_stopped_is_not_waited_for() {
    let [writer, _] = pair();
    let waited = |state| {
        patience(&look(
            std::slice::from_ref(&writer),
            vec![process(21, state, STAGE_PROGRAM, &[(0, 7, false)], None)],
        ))
    };
    assert_eq!((waited('S'), waited('T')), (vec![(0, Awaited::Enlistment)], vec![]));
}

/// `head -n "$(wc -l < f)" g | tail`: the writer's words wait for another stage, which is about to
/// be let go.
#[test]
fn a_shell_that_waits_for_another_stage_is_waited_for() {
    let [tail, wc] = [stage(20, &[(0, 7, false)], 0, &[]), stage(21, &[(1, 8, true)], 0, &[])];
    let mut expands = process(30, 'S', "/bin/bash", &[(1, 7, true), (3, 8, false)], None);
    (expands.sleeps_in_pipe, expands.system_call) = (true, Some((nix::libc::SYS_read, 3)));
    let shell = Process { parent: 1, ..process(SHELL, 'S', "/bin/bash", &[], Some(WAIT4)) };
    assert_eq!(patience(&look(&[tail, wc], vec![expands, shell])), [(0, Awaited::Answer)]);
}

/// `coproc cat | tr a b` as one pipeline: the shell waits for the last stage, which reads from the
/// first.
#[test]
fn a_shell_that_waits_for_the_end_of_the_stage_s_pipeline_is_not_waited_for() {
    let [cat, tr] = [
        stage(20, &[(0, 7, false), (1, 9, true)], 0, &[]),
        stage(21, &[(0, 9, false), (1, 8, true)], 0, &[]),
    ];
    let mut shell = process(SHELL, 'S', "/bin/bash", &[(60, 7, true), (63, 8, false)], None);
    (shell.sleeps_in_pipe, shell.system_call, shell.parent) =
        (true, Some((nix::libc::SYS_read, 63)), 9);
    let other = Process { parent: 1, ..process(9, 'S', "/bin/bash", &[], Some(WAIT4)) };
    assert_eq!(patience(&look(&[cat, tr], vec![shell, other])), []);
}

/// A group of commands at the pipe that reads another one:
/// `tee log < f | { read x < <(until [ -s log ]; do sleep .01; done); cat; }`.
#[test]
fn a_shell_that_reads_what_nobody_may_ever_write_is_waited_for_briefly() {
    let writer = [stage(20, &[(1, 7, true)], 0, &[])];
    let main = || Process { parent: 1, ..process(SHELL, 'S', "/bin/bash", &[], Some(WAIT4)) };
    let group = |session| {
        let group = process(30, 'S', "/bin/bash", &[(0, 7, false)], Some(nix::libc::SYS_read));
        Process {
            sleeps_in_pipe: true,
            session,
            system_call: Some((nix::libc::SYS_read, 5)),
            ..group
        }
    };
    assert_eq!(patience(&look(&writer, vec![main(), group(1)])), [(0, Awaited::Answer)]);
    assert_eq!(patience(&look(&writer, vec![main(), group(SLEPT_LONG)])), []);
    // A command that has been sent to a server prints what it reads: that takes round trips.
    let asks = Process { started: ASKS_A_SERVER, ..group(SLEPT_LONG) };
    assert_eq!(patience(&look(&writer, vec![main(), asks])), [(0, Awaited::Answer)]);
}

/// `cat f | grep x < fifo`, or `{ read x < fifo; ...; }`.
#[test]
fn a_shell_that_opens_a_fifo_without_another_end_is_not_waited_for() {
    let writer = [stage(20, &[(1, 7, true)], 0, &[])];
    let main = || Process { parent: 1, ..process(SHELL, 'S', "/bin/bash", &[], Some(WAIT4)) };
    let opens = || process(30, 'S', "/bin/bash", &[(0, 7, false)], Some(nix::libc::SYS_openat));
    assert_eq!(patience(&look(&writer, vec![main(), opens()])), [(0, Awaited::Answer)]);
    let alone = Process { waits_for_partner: true, ..opens() };
    assert_eq!(patience(&look(&writer, vec![main(), alone])), []);
}

/// `{ while :; do true; done & cat f; } | tail`: whoever the loop starts, the loop keeps the pipe.
#[test]
fn nobody_is_waited_for_at_a_pipe_that_somebody_keeps() {
    let reader = [stage(21, &[(0, 7, false)], 0, &[])];
    let child = || process(31, 'R', "/bin/bash", &[(1, 7, true)], None);
    let keeps = |state, call| process(30, state, "/bin/bash", &[(1, 7, true)], call);
    assert_eq!(patience(&look(&reader, vec![child()])), [(0, Awaited::Work)]);
    let waits = look(&reader, vec![child(), keeps('S', Some(WAIT4))]);
    let stopped = look(&reader, vec![child(), keeps('T', None)]);
    let remote =
        look(&reader, vec![child(), process(99, 'S', STAGE_PROGRAM, &[(1, 7, true)], None)]);
    assert_eq!([patience(&waits), patience(&stopped), patience(&remote)], [[], [], []]);
    // What a shell has above its standard streams it lends to a process substitution.
    let lends = process(30, 'S', "/bin/bash", &[(63, 7, true)], Some(WAIT4));
    assert_eq!(patience(&look(&reader, vec![child(), lends])), [(0, Awaited::Work)]);
}

/// Of another gateway, which it has asked.
#[test]
fn a_stage_program_that_sleeps_is_not_waited_for() {
    let writer = [stage(20, &[(1, 7, true)], 0, &[])];
    let other =
        |session| Process { session, ..process(30, 'S', STAGE_PROGRAM, &[(0, 7, false)], None) };
    let waited = |session| patience(&look(&writer, vec![other(session)]));
    assert_eq!((waited(1), waited(SLEPT_LONG)), (vec![(0, Awaited::Enlistment)], vec![]));
}

/// The gateway takes long over what the command's annotation says, or the shell's child over a
/// disk.
#[test]
fn a_process_that_has_asked_this_gateway_or_waits_for_a_disk_is_awaited_however_long_it_sleeps() {
    let writer = [stage(20, &[(1, 5, true)], 0, &[])];
    let reader = |pid, state, executable| Process {
        session: SLEPT_LONG,
        ..process(pid, state, executable, &[(0, 5, false)], None)
    };
    for executable in [STAGE_PROGRAM, "/bin/bash"] {
        let asks = look(&writer, vec![reader(ASKS, 'S', executable)]);
        assert_eq!(patience(&asks), vec![(0, Awaited::Enlistment)], "{executable}");
        assert_eq!(
            patience(&look(&writer, vec![reader(21, 'S', executable)])),
            vec![],
            "{executable}"
        );
        let reads_a_disk = look(&writer, vec![reader(21, 'D', executable)]);
        assert_eq!(patience(&reads_a_disk), vec![(0, Awaited::Answer)], "{executable}");
    }
}
