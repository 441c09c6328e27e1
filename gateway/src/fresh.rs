//! Redirects whose files a server may open by name.
//!
//! A file that is open locally and the file with its name on the server are the same only if the
//! name was not reused since the shell's open(2): by a command of posh, another machine, or a
//! second mount of the same export. No file system reports that. So a server opens a redirect's
//! file by name only if the descriptor is *fresh*; every other file is read and written through the
//! shell's own descriptor.
//!
//! Invariant: a fresh descriptor was opened by the stage's own process, between its fork for this
//! one command and its exec, and nothing that its shell has started since can have acted before the
//! server opens the file. The shell could as well have opened the file a moment later.
//!
//! Proof. When the pipeline is complete and none of its commands runs yet, the parent is a shell
//! that sleeps until a child ends or writes (`$(...)`), and all its children are commands of this
//! pipeline: it does nothing itself, and waits for nothing else that it has started. What the
//! parent does not have open then, and did not have open when the stage enlisted, the stage has
//! opened itself. The stage has no children, and has waited for none: the kernel would have added
//! their page faults to its account. An output that a server opens is as empty as the shell has
//! left it (`executor/src/runner/paths.rs`).
//!
//! Not detected: a background subshell that opens a file by `exec < f`, then informs another
//! process or waits in a builtin alone, and then becomes a command by `exec` within
//! [`LONGEST_SETUP`], while its shell has come to `wait`.
//!
//! fish does not qualify: it opens redirects itself, before it starts a command, and closes its
//! copies. Its background commands look like others (they don't ignore SIGINT, and have no process
//! group of their own unless fish is interactive).

use std::{collections::HashSet, fs, path::Path, sync::Arc, time::Duration};

use nix::{
    libc::{SIGCHLD, SIGINT},
    time::{ClockId, clock_gettime},
};
use posh_proto::rule::{self, Rule};

use crate::{
    assembly::{
        Pipeline, Stat, children_of, is_below, pipe_inode, pipe_read_by, read_stat,
        waits_for_children,
    },
    enlisted::{Descriptor, DescriptorKind, Enlisted, Pid},
    open_files,
};

/// Shells that open redirects after a fork, or close their copies only when the command has ended
/// (dash), and wait for foreground commands.
const SHELLS: [&str; 4] = ["bash", "dash", "zsh", "zsh5"];
/// Clock ticks of proc_pid_stat(5), USER_HZ.
const TICKS_PER_SECOND: u64 = 100;
/// Number and interval of looks at a shell that does not wait yet.
const LOOKS: u32 = 8;
const BETWEEN_LOOKS: Duration = Duration::from_micros(500);
/// Maximum age: an older process has done more than open its redirects. Those of one command may
/// take some round trips each.
const LONGEST_SETUP: Duration = Duration::from_secs(2);

/// Marks a stage's files on mounts that are not fresh.
pub fn note(stage: &mut Enlisted, shell: Option<Pid>) {
    let is_concerned = |file: &Descriptor| file.kind == DescriptorKind::File && file.on_mount;
    if !rule::holds(Rule::Coherence) || !stage.descriptors.iter().any(is_concerned) {
        return;
    }
    let pid = stage.pid;
    let parent = shell.and_then(|shell| waiting_shell(stage, shell));
    for file in stage.descriptors.iter_mut().filter(|file| is_concerned(file)) {
        file.is_older = parent.is_none_or(|parent| open_files::has_open(parent, pid, file));
    }
}

/// Checks again when a pipeline is complete: descriptors are fresh only if each stage's shell
/// sleeps until a child ends, and its only running children are commands of this pipeline.
pub async fn confirm(pipeline: &mut Pipeline) {
    let is_concerned =
        |file: &Descriptor| file.kind == DescriptorKind::File && file.on_mount && !file.is_older;
    let own: HashSet<Pid> = pipeline.stages.iter().map(|stage| stage.enlisted.pid).collect();
    let pipes: HashSet<u64> =
        pipeline.stages.iter().flat_map(|stage| pipes_of(&stage.enlisted)).collect();
    for stage in &mut pipeline.stages {
        if !rule::holds(Rule::Coherence) || !stage.enlisted.descriptors.iter().any(is_concerned) {
            continue;
        }
        let Some(parent) = read_stat(stage.enlisted.pid).map(|stat| stat.parent) else { continue };
        let mut is_waited_for = sleeps_for(parent, &own, &pipes);
        for _ in 0..LOOKS {
            if is_waited_for {
                break;
            }
            // It may be between its fork(2) and its wait(2).
            tokio::time::sleep(BETWEEN_LOOKS).await;
            is_waited_for = sleeps_for(parent, &own, &pipes);
        }
        if !is_waited_for {
            let files = Arc::make_mut(&mut stage.enlisted).descriptors.iter_mut();
            files.filter(|file| is_concerned(file)).for_each(|file| file.is_older = true);
        }
    }
}

fn pipes_of(stage: &Enlisted) -> impl Iterator<Item = u64> {
    stage
        .descriptors
        .iter()
        .filter(|end| end.kind == DescriptorKind::Pipe)
        .map(|end| end.identity.1)
}

/// Returns true if a shell sleeps until a child ends or one of `pipes` has data, and all its
/// children are `own` processes or joined to them by one of `pipes`. A child that has just ended
/// counts as having acted. A pipe that the shell itself holds joins more than the commands of one
/// pipeline.
fn sleeps_for(shell: Pid, own: &HashSet<Pid>, pipes: &HashSet<u64>) -> bool {
    let Ok(open) = fs::read_dir(format!("/proc/{shell}/fd")) else { return false };
    let links = open.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    let of_shell: HashSet<u64> = links.filter_map(|link| pipe_inode(&link)).collect();
    let is_joined = |child: Pid| {
        let standard = (0..3).filter_map(|fd| fs::read_link(format!("/proc/{child}/fd/{fd}")).ok());
        standard
            .filter_map(|link| pipe_inode(&link))
            .any(|pipe| pipes.contains(&pipe) && !of_shell.contains(&pipe))
    };
    let is_own = |pipe: &u64| pipes.contains(pipe);
    (waits_for_children(shell) || pipe_read_by(shell).as_ref().is_some_and(is_own))
        && children_of(shell).into_iter().all(|child| own.contains(&child) || is_joined(child))
}

/// Shell that forked the process for this command and waits for it; `None` if uncertain. `session`
/// is the session's own shell.
fn waiting_shell(stage: &Enlisted, session: Pid) -> Option<Pid> {
    let ignores = |signal: i32| stage.ignored_signals & 1 << (signal - 1) != 0;
    let stat = read_stat(stage.pid)?;
    let parent = stat.parent;
    let has_started_none = stage.childless && stat.faults_of_children == 0 && !ignores(SIGCHLD);
    let is_waited_for = || !ignores(SIGINT) && is_in_foreground(&stat, read_stat(parent).as_ref());
    let is_certain = has_started_none
        && is_young(&stat)
        && is_waited_for()
        && is_shell(parent)
        && is_below(parent, &[session]);
    is_certain.then_some(parent)
}

/// Returns true if it shares its parent's process group, or has the terminal's.
fn is_in_foreground(process: &Stat, parent: Option<&Stat>) -> bool {
    process.group == process.foreground
        || parent.is_some_and(|parent| parent.group == process.group)
}

fn is_young(process: &Stat) -> bool {
    let Ok(now) = clock_gettime(ClockId::CLOCK_BOOTTIME) else { return false };
    let started = Duration::from_millis(process.started.saturating_mul(1000 / TICKS_PER_SECOND));
    Duration::from(now).saturating_sub(started) < LONGEST_SETUP
}

fn is_shell(pid: Pid) -> bool {
    let program = fs::read_link(format!("/proc/{pid}/exe"));
    let name = program.as_deref().ok().and_then(Path::file_name);
    name.is_some_and(|name| SHELLS.iter().any(|shell| name == *shell))
}

#[cfg(test)]
mod tests {
    use std::{process::Command, time::Instant};

    use super::*;
    use crate::assembly::children_of;

    /// Has a shell start `sleep`, and tells whether its descriptor 0 is fresh.
    fn is_fresh(shell: &str, script: &str) -> bool {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().canonicalize().unwrap().join("f");
        fs::write(&path, "x").unwrap();
        let mut shell = Command::new(shell).args(["-c", script]).env("F", &path).spawn().unwrap();
        let began = Instant::now();
        let is_sleep =
            |pid: &Pid| fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name == b"sleep\n");
        let below = |pid: Pid| {
            children_of(pid)
                .into_iter()
                .flat_map(|child| [vec![child], children_of(child)].concat())
        };
        let stage = loop {
            if let Some(pid) = below(shell.id()).chain([shell.id()]).find(is_sleep) {
                break pid;
            }
            assert!(began.elapsed() < Duration::from_secs(10), "{script}");
        };
        let status = fs::read_to_string(format!("/proc/{stage}/status")).unwrap();
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:\t")).unwrap();
        let file = Descriptor::imagined(0, DescriptorKind::File, path.clone(), 0);
        let mut enlisted = Enlisted {
            pid: stage,
            childless: true,
            ignored_signals: u64::from_str_radix(ignored, 16).unwrap(),
            descriptors: vec![file],
            ..Enlisted::from(posh_proto::stage::Enlist::default())
        };
        note(&mut enlisted, Some(shell.id()));
        for pid in [stage, shell.id()] {
            let _ended = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(pid.try_into().unwrap()),
                nix::sys::signal::Signal::SIGKILL,
            );
        }
        shell.wait().unwrap();
        !enlisted.descriptors[0].is_older
    }

    #[test]
    fn what_a_command_s_own_process_has_opened_is_fresh() {
        assert!(is_fresh("bash", "sleep 100 < $F; :"));
        assert!(is_fresh("bash", "( sleep 100 < $F; : ); :"));
        assert!(is_fresh("bash", ": < $F; sleep 100 < $F; :"));
    }

    #[test]
    fn what_its_shell_has_open_is_older() {
        assert!(!is_fresh("bash", "exec 3< $F; sleep 100 <&3; :"));
        assert!(!is_fresh("bash", "{ sleep 100; :; } < $F; :"));
        assert!(!is_fresh("bash", "while :; do sleep 100; done < $F"));
        assert!(!is_fresh("dash", "{ sleep 100; :; } < $F; :"));
    }

    #[test]
    fn what_its_shell_may_have_closed_since_is_older() {
        assert!(!is_fresh("bash", "exec 3< $F; sleep 100 <&3 & exec 3<&-; wait"));
        assert!(!is_fresh("bash", "set -m; exec 3< $F; sleep 100 <&3 & exec 3<&-; wait"));
        let python = "import os,subprocess as s; f = open(os.environ['F']); p = s.Popen(['sleep', '100'], \
                      stdin=f); f.close(); p.wait()";
        assert!(!is_fresh("python3", python));
    }

    #[test]
    fn what_fish_has_opened_is_older() {
        assert!(!is_fresh("fish", "sleep 100 < $F &\nwait"));
        assert!(!is_fresh("fish", "sleep 100 < $F"));
    }

    #[test]
    fn what_was_opened_before_another_command_is_older() {
        assert!(!is_fresh("bash", "( exec < $F; /bin/true; exec sleep 100 ); :"));
        assert!(!is_fresh("bash", "exec < $F; exec sleep 100"));
    }
}
