//! Snapshots of real processes, and of imagined ones.

use std::time::Instant;

use super::{super::closing::tests::stage, *};

#[test]
fn pipes_are_known_by_their_links() {
    assert_eq!(pipe_inode(Path::new("pipe:[4711]")), Some(4711));
    assert_eq!(pipe_inode(Path::new("/tmp/pipe:[4711]")), None);
    assert_eq!(pipe_inode(Path::new("socket:[4711]")), None);
}

#[test]
fn an_older_root_makes_younger_what_was_old() {
    let older = std::process::Command::new("sleep").arg("100").spawn().unwrap();
    // Starts are counted in ticks of the clock: wait for one.
    let start = |pid: Pid| read_stat(pid).unwrap().started;
    let mut younger = std::process::Command::new("sleep").arg("100").spawn().unwrap();
    while start(younger.id()) == start(older.id()) {
        younger.kill().unwrap();
        younger.wait().unwrap();
        younger = std::process::Command::new("sleep").arg("100").spawn().unwrap();
    }
    let mut orphans = Orphans::default();
    let mut remembered = |root: Pid| {
        orphans.find(&[root], |_| false);
        (orphans.old.contains(&1), orphans.old.contains(&older.id()))
    };
    assert_eq!(remembered(older.id()), (true, false));
    assert_eq!(remembered(younger.id()), (true, true));
    assert_eq!(remembered(older.id()), (true, false));
    for mut child in [older, younger] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

#[test]
fn only_a_reaper_above_the_root_has_orphans_of_its_session() {
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};
    let shell = |script: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
    };
    // Says the number of a process that it starts when told to.
    let told = |shell: &mut std::process::Child| -> Pid {
        shell.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        let mut line = String::new();
        BufReader::new(shell.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        line.trim().parse().unwrap()
    };
    let mut other = shell("read go; sleep 100 & echo $!; wait");
    std::thread::sleep(Duration::from_millis(20));
    let mut root = shell("read go; (sleep 100 & echo $!); read end");
    let (not_ours, ours) = (told(&mut other), told(&mut root));
    let find = || Orphans::default().find(&[root.id()], |_| false);
    // Its parent, a subshell, is at its end.
    let deadline = Instant::now() + Duration::from_secs(10);
    while !find().contains(&ours) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    let found = find();
    for pid in [not_ours, ours] {
        let _ = nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(pid as i32),
            nix::sys::signal::SIGKILL,
        );
    }
    for mut shell in [other, root] {
        shell.kill().unwrap();
        shell.wait().unwrap();
    }
    assert_eq!([ours, not_ours].map(|pid| found.contains(&pid)), [true, false]);
}

#[test]
fn what_a_session_was_given_may_be_used_by_who_started_it_and_by_its_other_children() {
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};
    let ready = "echo ready; sleep 100; :";
    let leave = "exec < /dev/null > /dev/null 2> /dev/null 3<&-";
    for (script, is_read, is_written) in [
        // Who waits reads on later, and writes nothing meanwhile.
        (format!("exec 3<&0; sh -c '{ready}' <&3 & wait"), true, false),
        (format!("exec 3<&0; sh -c '{ready}' <&3 3<&- & {leave}; wait"), false, false),
        (
            format!("exec 3<&0; (sleep 100; :) <&3 & sh -c '{ready}' <&3 3<&- & {leave}; wait"),
            true,
            true,
        ),
    ] {
        let output = tempfile::NamedTempFile::new().unwrap();
        let (input, mut write) = std::io::pipe().unwrap();
        let pipe = pipe_inode(
            &fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&input)))
                .unwrap(),
        );
        let mut outer = Command::new("sh");
        outer
            .args(["-c", &script])
            .stdin(input)
            .stdout(Stdio::piped())
            .stderr(output.reopen().unwrap());
        let mut outer = outer.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(outer.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let is_root = |pid: &Pid| {
            fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|words| {
                words.ends_with(b"ready; sleep 100; :\0")
                    && !words.windows(4).any(|four| four == b"wait")
            })
        };
        let root = children(outer.id()).into_iter().find(is_root).unwrap();
        let wanted = SearchTargets {
            pipes: pipe.into_iter().collect(),
            files: [output.path().to_owned()].into(),
            ..SearchTargets::default()
        };
        // The outer shell may not wait yet.
        let deadline = Instant::now() + Duration::from_secs(10);
        let found = loop {
            let snapshot = Snapshot::take(&[root], &wanted, &mut Orphans::default());
            // Whoever began within the same tick as the session counts as one of its own that was
            // cut off.
            let inside = || {
                snapshot.processes().filter(|p| p.pid != root && !snapshot.is_ancestor(root, p.pid))
            };
            let reads =
                |p: &Process| p.pipe_ends.iter().any(|end| Some(end.inode) == pipe && end.reads);
            let waits = |p: &Process| p.pid == outer.id() && p.waits_for_children();
            let writes =
                |p: &Process| p.files.iter().any(|file| file == output.path()) && !waits(p);
            let found = (
                inside().any(reads) || snapshot.is_read_outside(pipe.unwrap()),
                inside().any(writes) || snapshot.is_written_outside(output.path()),
            );
            if found == (is_read, is_written) || Instant::now() > deadline {
                break found;
            }
        };
        for pid in
            children(outer.id()).into_iter().flat_map(|pid| [children(pid), vec![pid]].concat())
        {
            let _ = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(pid as i32),
                nix::sys::signal::SIGKILL,
            );
        }
        outer.kill().unwrap();
        outer.wait().unwrap();
        let _ = write.write(b"");
        assert_eq!(found, (is_read, is_written), "{script}");
    }
}

#[test]
fn a_snapshot_sees_our_own_pipe() {
    let (read, write) = nix::unistd::pipe().unwrap();
    let inode = pipe_inode(
        &fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&read)))
            .unwrap(),
    );
    let wanted = SearchTargets { pipes: inode.into_iter().collect(), ..SearchTargets::default() };
    let me = std::process::id();
    let snapshot = Snapshot::take(&[me], &wanted, &mut Orphans::default());
    let ends = &snapshot.get(me).unwrap().pipe_ends;
    assert_eq!(
        (ends.iter().filter(|e| e.reads).count(), ends.iter().filter(|e| e.writes).count()),
        (1, 1)
    );
    drop((read, write));
}

#[test]
fn a_process_that_hides_its_descriptors_may_hold_only_pipes_that_are_older() {
    let hidden = |started| Process { started, is_opaque: true, ..Process::asleep(9, 1) };
    let mut snapshot = Snapshot::of([hidden(500)].into_iter());
    snapshot.made = [(1, 499), (2, 501)].into();
    assert_eq!([1, 2, 3].map(|pipe| snapshot.may_be_held_unseen(pipe)), [true, false, true]);
    let dead = Snapshot::of([Process { state: 'Z', ..hidden(500) }].into_iter());
    assert!(!dead.may_be_held_unseen(1));
}

/// Init, a shell 10 with another one, 20, and their children 11 and 21; 30, which was cut off; and
/// one that hides its descriptors. All of them are older than the pipe.
fn around(hidden: (Pid, Pid), holder: Pid) -> Snapshot {
    let end = PipeEnd { inode: 7, fd: 1, reads: false, writes: true };
    let process = |(pid, parent): (Pid, Pid)| {
        let pipe_ends = (pid == holder).then_some(end).into_iter().collect();
        Process { started: 500, session: 1, pipe_ends, ..Process::asleep(pid, parent) }
    };
    let opaque = Process { is_opaque: true, session: 99, ..process(hidden) };
    let others = [(10, 1), (11, 10), (20, 10), (21, 20), (30, 1), (40, 1), (41, 40)]
        .into_iter()
        .map(process);
    let mut snapshot = Snapshot::of(others.filter(|p| p.pid != hidden.0).chain([opaque]));
    (snapshot.roots, snapshot.made) = ([10, 20, 40].into(), [(7, 501)].into());
    snapshot
}

#[test]
fn a_process_that_hides_its_descriptors_may_have_made_the_pipes_of_its_kin() {
    let check = |hidden: (Pid, Pid), holder: Pid, may_hold: bool| {
        assert_eq!(around(hidden, holder).may_be_held_unseen(7), may_hold, "{hidden:?} {holder}");
    };
    // Below the holder's shell, or above it; also where that is a shell within another one.
    check((12, 10), 11, true);
    check((11, 10), 11, true);
    check((22, 21), 11, true);
    check((12, 10), 21, true);
    // It was cut off, before the pipe was made, or lives in another session.
    check((50, 1), 11, false);
    check((30, 1), 11, false);
    check((42, 41), 11, false);
    // It was cut off, and has a session below it.
    check((1, 0), 11, true);
    // The holder was cut off, from whomever.
    check((50, 1), 30, true);
    check((42, 41), 30, true);
}

#[test]
fn a_process_that_hides_its_descriptors_may_have_the_files_of_its_shell() {
    let check = |hidden: (Pid, Pid), session: Pid, may_share: bool| {
        let found = around(hidden, 0).may_share_files_unseen(11, Some(session));
        assert_eq!(found, may_share, "{hidden:?} {session}");
    };
    // Below the shell, in whatever session.
    check((12, 10), 1, true);
    check((12, 10), 2, true);
    check((22, 21), 2, true);
    // A daemon, and one of the same session.
    check((50, 1), 1, false);
    check((50, 1), 99, true);
    // Below another shell of the same session, and of another one.
    check((42, 41), 1, true);
    check((42, 41), 2, false);
}

#[test]
fn where_others_do_not_show_every_pipe_may_be_held_unseen() {
    let mut snapshot = around((50, 1), 11);
    assert!(!snapshot.may_be_held_unseen(7) && !snapshot.may_share_files_unseen(11, Some(1)));
    snapshot.hides_others = true;
    assert!(snapshot.may_be_held_unseen(7) && snapshot.may_share_files_unseen(11, Some(1)));
}

#[test]
fn a_child_that_is_alive_and_can_not_be_read_hides_its_descriptors() {
    let read = |pid: Pid| {
        let mut snapshot = Snapshot::default();
        snapshot.add(pid, None, Some(10));
        snapshot.opaque().map(|p| (p.pid, p.parent, p.started)).next()
    };
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    assert_eq!(read(std::process::id()), Some((std::process::id(), 10, u64::MAX)));
    assert_eq!(read(child.id()), None);
}

#[test]
fn a_process_goes_on_when_its_first_thread_has_ended() {
    use std::process::{Command, Stdio};
    let script = "import ctypes, threading, time\n\
        threading.Thread(target=lambda: time.sleep(100)).start()\n\
        ctypes.CDLL(None).pthread_exit(None)";
    let mut child = Command::new("/usr/bin/python3")
        .args(["-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let ours = child.stdout.take().unwrap();
    let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&ours));
    let pipe = pipe_inode(&fs::read_link(link).unwrap()).unwrap();
    let began = Instant::now();
    while !read_stat(child.id()).unwrap().has_ended() {
        assert!(began.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(5));
    }
    let wanted = SearchTargets { pipes: [pipe].into(), ..SearchTargets::default() };
    let process = read_process(child.id(), &wanted).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(process.pipe_ends, [PipeEnd { inode: pipe, fd: 1, reads: false, writes: true }]);
    assert!(!process.is_dead() && !process.is_opaque && !process.ending);
}

#[test]
fn a_thread_may_have_descriptors_of_its_own() {
    let (read, write) = nix::unistd::pipe().unwrap();
    let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&write));
    let pipe = pipe_inode(&fs::read_link(link).unwrap()).unwrap();
    let (started, has_started) = std::sync::mpsc::channel();
    let (end, ends) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_FILES).unwrap();
        started.send(()).unwrap();
        // Until the other end is dropped.
        let _ = ends.recv();
    });
    has_started.recv().unwrap();
    drop((read, write));
    let wanted = SearchTargets { pipes: [pipe].into(), ..SearchTargets::default() };
    let found = |threads| {
        let mut process = Process::asleep(std::process::id(), 1);
        process.read_descriptors(&wanted, threads);
        process.pipe_ends.len()
    };
    let found = [found(1), found(2)];
    drop(end);
    thread.join().unwrap();
    assert_eq!(found, [0, 2]);
}

#[test]
fn the_making_of_a_pipe_is_known_or_not_told() {
    let mut child =
        std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&input));
    let pipe = pipe_inode(&fs::read_link(link).unwrap()).unwrap();
    let made = || {
        let wanted = SearchTargets { pipes: [pipe].into(), ..SearchTargets::default() };
        let mut snapshot = Snapshot::take(&[std::process::id()], &wanted, &mut Orphans::default());
        snapshot.read_times_of_pipes();
        let started = snapshot.get(child.id()).unwrap().started;
        snapshot.made.get(&pipe).map(|made| started.saturating_sub(*made))
    };
    // Of a child that was forked just after it.
    let at_first = made();
    assert!(at_first.is_some_and(|since| since < 1000), "{at_first:?}");
    // Older kernels than 6.15 note the use of a pipe in its times.
    std::thread::sleep(Duration::from_millis(20));
    std::io::Write::write_all(&mut input, b"x").unwrap();
    assert!(made().is_none_or(|since| Some(since) == at_first));
    drop(input);
    child.wait().unwrap();
}

#[test]
fn who_waits_has_what_it_enlisted_with() {
    let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
    let (pid, me) = (child.id(), std::process::id());
    let mut stage = stage(pid, &[(0, 7, false), (1, 8, true), (4, 9, false)], 0, &[]);
    // A pipe with a name.
    stage.descriptors[1].path = PathBuf::from("/tmp/fifo");
    let wanted = SearchTargets {
        pipes: [7, 8].into(),
        waiting: [(pid, Arc::new(stage))].into(),
        ..SearchTargets::default()
    };
    let snapshot = Snapshot::take(&[me], &wanted, &mut Orphans::default());
    let process = snapshot.get(pid).unwrap();
    let ends: Vec<_> =
        process.pipe_ends.iter().map(|end| (end.inode, end.fd, end.reads, end.writes)).collect();
    assert_eq!((process.parent, ends), (me, vec![(7, 0, true, false)]));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn who_is_without_is_not_looked_at_while_it_runs_its_program() {
    // It has our pipe as its input.
    let mut child =
        std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    let (ours, me) = (child.stdin.take().unwrap(), std::process::id());
    let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&ours));
    let pipes: HashSet<u64> = pipe_inode(&fs::read_link(link).unwrap()).into_iter().collect();
    let found = |without: &[Pid], program: &Path| {
        let (without, stage_programs) =
            (without.iter().copied().collect(), [program.to_owned()].into());
        let wanted = SearchTargets {
            pipes: pipes.clone(),
            without,
            stage_programs,
            ..SearchTargets::default()
        };
        let snapshot = Snapshot::take(&[me], &wanted, &mut Orphans::default());
        let process = snapshot.get(pid).unwrap();
        (process.parent, process.executable.clone(), process.pipe_ends.len())
    };
    let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap();
    assert_eq!(found(&[], &program), (me, program.clone(), 1));
    assert_eq!(found(&[pid], &program), (me, program.clone(), 0));
    assert_eq!(found(&[pid], Path::new("/another")), (me, program, 1));
    drop(ours);
    child.wait().unwrap();
}

#[test]
fn the_pipe_of_a_substitution_is_found_above_its_commands() {
    let find = |script: &str| {
        let mut shell = std::process::Command::new("bash").args(["-c", script]).spawn().unwrap();
        let name = |pid: Pid| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        // Without orphans, which may be another test's.
        let below = |pid: Pid| -> Vec<Pid> {
            let mut found = vec![pid];
            let mut next = 0;
            while let Some(&pid) = found.get(next) {
                found.extend(children(pid));
                next += 1;
            }
            found
        };
        let deadline = Instant::now() + Duration::from_secs(10);
        let found = loop {
            assert!(Instant::now() < deadline, "{script}");
            let sleep = below(shell.id()).into_iter().find(|pid| name(*pid) == "sleep\n");
            let rests = waits_for_children(shell.id()) || pipe_read_by(shell.id()).is_some();
            let Some(sleep) = sleep.filter(|_| rests) else { continue };
            let link = fs::read_link(format!("/proc/{sleep}/fd/1")).ok();
            break (substitution_above(sleep), link.as_deref().and_then(pipe_inode));
        };
        for pid in below(shell.id()) {
            let _ended = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(pid.try_into().unwrap()),
                nix::sys::signal::Signal::SIGKILL,
            );
        }
        shell.wait().unwrap();
        found
    };
    for script in ["x=$(sleep 100); :", "x=$( (sleep 100; :); :); :"] {
        let (found, pipe) = find(script);
        assert!(found.is_some() && found == pipe, "{script}: {found:?}, {pipe:?}");
    }
    assert_eq!(find("sleep 100 | cat; :").0, None);
}
