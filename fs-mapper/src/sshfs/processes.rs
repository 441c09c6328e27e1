//! Command line of an sshfs process.

use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

/// A command line longer than this is not sshfs's.
const MAX_ARGUMENTS: usize = 256;

/// File name of sshfs's executable.
pub(super) const PROGRAMS: &[&str] = &["sshfs"];

/// Names in sshfs's argv[0]: mount(8) uses those of its helpers.
const NAMES: [&str; 4] = ["sshfs", "mount.sshfs", "mount.fuse.sshfs", "mount.fuse"];

/// Arguments of an sshfs, if they name this source and this mount point.
pub(super) fn of_mount<'a>(
    words: &'a [OsString],
    source: &str,
    mount_point: &Path,
) -> Option<&'a [OsString]> {
    arguments(words).filter(|arguments| name(arguments, source, mount_point))
}

/// Arguments without argv[0]; `None` for another program.
pub(super) fn arguments(words: &[OsString]) -> Option<&[OsString]> {
    let (program, arguments) = words.split_first()?;
    let is_sshfs =
        Path::new(program).file_name().is_some_and(|name| NAMES.iter().any(|known| name == *known));
    (is_sshfs && arguments.len() < MAX_ARGUMENTS).then_some(arguments)
}

/// Returns true if arguments name this source and this mount point. A relative mount point started
/// at a directory that the process has left: it must match as a suffix.
fn name(arguments: &[OsString], source: &str, mount_point: &Path) -> bool {
    let is_point = |word: &OsString| {
        let end: PathBuf =
            Path::new(word).components().filter(|part| *part != Component::CurDir).collect();
        end.as_os_str() == mount_point.as_os_str()
            || end.is_relative() && end.components().next().is_some() && mount_point.ends_with(&end)
    };
    arguments.iter().any(|word| word == source) && arguments.iter().any(is_point)
}

#[cfg(test)]
mod tests {
    use crate::process::tests::Running;

    #[test]
    fn a_program_under_another_name_is_no_sshfs() {
        use std::os::unix::process::CommandExt as _;
        // As an attacker starts a set-user-id program: sshfs by its argv[0] only.
        let mut command = std::process::Command::new("sh");
        let running = Running::start(command.arg0("sshfs").args(["-c", "echo; read line"]));
        let process = running.process();
        assert_eq!((process.is_ours(&[]), process.runs(super::PROGRAMS)), (true, false));
        let words = process.strings("cmdline").expect("it runs");
        assert!(super::arguments(&words).is_some());
    }
}
