//! Descriptors: what a stage reads and writes, and where that is.

use std::{
    os::unix::ffi::OsStrExt,
    path::{Component, Path},
};

use fs_mapper::{
    ClientPath, Resolution,
    coherence::{Adapter, WriteBehind},
};
use posh_annotations::{Invocation, StdinUse, TerminalUse};
use posh_proto::rule::{self, Rule};

use super::{PathOwner, ResolvedCommand, Surroundings, World, is_shown};
use crate::{
    enlisted::{Descriptor, DescriptorKind, Enlisted, descriptor_named_by},
    model::{LocalReason, ReasonKind},
    plan::{ExecutorId, Flow, Site},
};

pub(super) fn check_terminal(stage: &Enlisted, invocation: &Invocation) -> Result<(), LocalReason> {
    let on_terminal =
        (0..=2).any(|fd| stage.descriptor(fd).is_some_and(|d| d.kind == DescriptorKind::Tty));
    match invocation.terminal {
        TerminalUse::Interactive if on_terminal && rule::holds(Rule::AskingCommands) => {
            Err(ReasonKind::Descriptors
                .because(format!("{} may ask or draw on the terminal", invocation.command)))
        }
        _ => Ok(()),
    }
}

/// Checks outputs: posh handles terminals and /dev/null. Errors of other devices (/dev/full) are
/// known only to the command itself.
pub(super) fn check_devices(stage: &Enlisted) -> Result<(), LocalReason> {
    let strange = [1, 2]
        .into_iter()
        .filter_map(|fd| stage.descriptor(fd))
        .find(|d| d.kind == DescriptorKind::Other);
    match strange {
        None => Ok(()),
        Some(device) => Err(ReasonKind::Descriptors
            .because(format!("it writes to the device {}", device.path.display()))),
    }
}

/// `cat a all >> all`: the command notices only if its output is opened on the same machine as its
/// input. For single files, the executor checks whether they are an output that is written through
/// the mount (`lower::Builder::local_output`), as the command does locally: by resolved paths.
pub(super) fn check_output_is_not_input(
    world: &World<'_>,
    stage: &Enlisted,
    reading: &ResolvedCommand,
    around: &Surroundings<'_>,
) -> Result<(), LocalReason> {
    let Some(output) = stage.descriptor(1).filter(|d| d.kind == DescriptorKind::File) else {
        return Ok(());
    };
    if !rule::holds(Rule::InputIsOutput) {
        return Ok(());
    }
    let inputs_there = |id: ExecutorId| {
        reading.invocation.files.iter().zip(&reading.places).any(|(file, place)| match place {
            Some(PathOwner::At(executor, path, mount)) => {
                let mount = world.table.mount(*mount);
                let is_told_apart = !file.kind.recursive()
                    && (mount.adapter() != Adapter::Rclone || are_two_files(path, &output.path));
                *executor == id && !is_told_apart
            }
            _ => false,
        })
    };
    match file_site(world, output) {
        Some(id) if inputs_there(id) && !opens_there(world, output, around) => {
            Err(ReasonKind::Descriptors.because(
                "its output file is beside its input and must be written through the mount",
            ))
        }
        Some(_) if reads_its_output(stage, reading) && !opens_there(world, output, around) => {
            Err(ReasonKind::Descriptors
                .because("its output file is its input and must be written through the mount"))
        }
        _ => Ok(()),
    }
}

fn reads_its_output(stage: &Enlisted, reading: &ResolvedCommand) -> bool {
    let is_read = reading.invocation.stdin != StdinUse::Unused;
    let path = |fd: u32| stage.descriptor(fd).map(|file| &file.path);
    is_read && path(0) == path(1)
}

/// Returns true if two names on an rclone mount are certainly different files: it has no links, but
/// some clouds ignore case.
fn are_two_files(one: &ClientPath, other: &Path) -> bool {
    let plain = |path: &Path| {
        let goes_up = path.components().any(|part| part == Component::ParentDir);
        path.to_str().filter(|_| !goes_up).map(str::to_lowercase)
    };
    let (one, other) = (plain(one.as_path()), plain(other));
    one.is_some() && other.is_some() && one != other
}

/// Checks words such as `/dev/stdin`. A pipe or terminal is the descriptor itself, but a regular
/// file is opened anew (proc_pid_fd(5)), at its beginning. An executor does so only if it has
/// opened the file itself.
pub(super) fn check_named_descriptors(
    world: &World<'_>,
    stage: &Enlisted,
    invocation: &Invocation,
    around: &Surroundings<'_>,
) -> Result<(), LocalReason> {
    for file in &invocation.files {
        let named = descriptor_named_by(&file.path).and_then(|fd| stage.descriptor(fd));
        let Some(named) = named.filter(|named| named.kind == DescriptorKind::File) else {
            continue;
        };
        let is_there = site_by_name(world, named).is_some()
            && (named.fd == 0 || opens_there(world, named, around));
        if !is_there && rule::holds(Rule::DescriptorKinds) {
            return Err(ReasonKind::Descriptors
                .because(format!("{} is a file that is opened anew here", file.path.display())));
        }
    }
    Ok(())
}

/// Source of standard input, after checking descriptors that the words name.
pub(super) fn flow_in(
    world: &World<'_>,
    stage: &Enlisted,
    invocation: &Invocation,
    around: &Surroundings<'_>,
) -> Result<Flow, LocalReason> {
    for named in stage.named_descriptors() {
        match named.kind {
            DescriptorKind::Pipe if around.feeds(named.fd) || around.drains(named.fd) => {}
            DescriptorKind::File if !rule::holds(Rule::DescriptorKinds) => {}
            _ => {
                return Err(ReasonKind::Descriptors.because(format!(
                    "{} is not a pipe from a stage that posh runs",
                    named.path.display()
                )));
            }
        }
    }
    let early = match invocation.stdin {
        StdinUse::Unused if rule::holds(Rule::Stdin) => return Ok(Flow::Nothing),
        StdinUse::Unused => false,
        StdinUse::ReadsAll => false,
        StdinUse::MayStopEarly => rule::holds(Rule::EarlyReaders),
    };
    let Some(input) = stage.descriptor(0) else { return Ok(Flow::Nothing) };
    match input.kind {
        DescriptorKind::Null => Ok(Flow::Nothing),
        DescriptorKind::Pipe if around.feeds(0) => Ok(Flow::Nothing),
        DescriptorKind::Pipe | DescriptorKind::Socket
            if early && around.shared_inputs.contains(&0) =>
        {
            Err(ReasonKind::Descriptors.because("it may stop reading an input that others read on"))
        }
        DescriptorKind::Pipe => Ok(Flow::At(Site::Here)),
        DescriptorKind::Socket if !early => Ok(Flow::At(Site::Here)),
        DescriptorKind::File if input.is_older => Err(ReasonKind::Descriptors.because(
            "its input may have been opened before it, and its name be another file's by now",
        )),
        DescriptorKind::File => match site_by_name(world, input) {
            Some(id) => Ok(Flow::At(Site::Executor(id))),
            None if early => Err(ReasonKind::Descriptors
                .because("it may stop reading in the middle of a file on this machine")),
            None => Ok(Flow::At(Site::Here)),
        },
        DescriptorKind::Tty => Err(ReasonKind::Descriptors.because("it reads the terminal")),
        DescriptorKind::Socket | DescriptorKind::Directory | DescriptorKind::Other => {
            Err(ReasonKind::Descriptors.because("its standard input is no file and no pipe"))
        }
    }
}

pub(super) fn flow_out(world: &World<'_>, stage: &Enlisted, around: &Surroundings<'_>) -> Flow {
    let Some(output) = stage.descriptor(1) else { return Flow::Nothing };
    match output.kind {
        DescriptorKind::Null => Flow::Nothing,
        DescriptorKind::Pipe if around.drains(1) => Flow::Nothing,
        DescriptorKind::File => {
            match site_by_name(world, output).filter(|_| opens_there(world, output, around)) {
                Some(id) => Flow::At(Site::Executor(id)),
                None => Flow::At(Site::Here),
            }
        }
        _ => Flow::At(Site::Here),
    }
}

/// Executor that owns the file of a descriptor. The kernel's path has no symlinks; a deleted file
/// has no path on the server.
#[must_use]
pub fn file_site(world: &World<'_>, descriptor: &Descriptor) -> Option<ExecutorId> {
    if descriptor.kind != DescriptorKind::File
        || descriptor.path.as_os_str().as_bytes().ends_with(b" (deleted)")
        || !is_shown(world.table, &descriptor.path, descriptor.mount_id)
    {
        return None;
    }
    match world.table.resolve(&descriptor.path, Path::new("/")) {
        Resolution::Owned(owned) => world.executor_id(&owned.executor),
        Resolution::Local { .. } => None,
    }
}

/// Like `file_site`, but only if the file certainly still has the name.
#[must_use]
pub fn site_by_name(world: &World<'_>, descriptor: &Descriptor) -> Option<ExecutorId> {
    file_site(world, descriptor).filter(|_| !descriptor.is_older)
}

/// Returns true if an output file on a mount may be opened on the server instead.
#[must_use]
pub fn opens_there(world: &World<'_>, descriptor: &Descriptor, around: &Surroundings<'_>) -> bool {
    let Resolution::Owned(owned) = world.table.resolve(&descriptor.path, Path::new("/")) else {
        return false;
    };
    let mount = world.table.mount(owned.mount);
    rule::holds(Rule::InputIsOutput)
        && !descriptor.is_older
        && !around.shared_outputs.contains(&descriptor.path)
        && mount.coherence().write_behind() == WriteBehind::Allowed
        // Else this machine would go on showing what was in the file.
        && (mount.shows_changes() || !rule::holds(Rule::Coherence))
}
