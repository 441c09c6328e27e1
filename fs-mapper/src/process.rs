//! Processes in /proc (proc(5)). A process chooses much of its own content there, and the length.
//!
//! Invariants:
//! * A process is identified by a descriptor of its directory in /proc, which the kernel never
//!   reuses for a later process with the same ID: reads through it return that process's data, or
//!   an error.
//! * A process chooses the length of `cmdline` and `environ` (prctl(2), PR_SET_MM_MAP, makes them
//!   as long as its address space). At most [`MOST_BYTES`] are read, and a longer file is an error.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, fstat, openat, readlinkat};

/// No user's program needs more arguments or variables.
pub const MOST_BYTES: u64 = 4 << 20;
/// User and group IDs are among the first lines of `status`.
const FIRST_LINES: u64 = 4096;
/// root's user ID.
const ROOT: u32 = 0;

/// A process, which may end at any time.
#[derive(Debug)]
pub struct Process {
    number: String,
    directory: OwnedFd,
}

impl Process {
    /// Opens the process with this ID.
    ///
    /// # Errors
    /// No process has it.
    pub fn open(number: u32) -> io::Result<Self> {
        Self::at(number.to_string())
    }

    /// Opens this process.
    ///
    /// # Errors
    /// /proc is not mounted.
    pub fn own() -> io::Result<Self> {
        Self::at("self".to_owned())
    }

    /// Running processes whose four user IDs are all ours, or all one of `others`. Reads nothing
    /// else of other users' processes: each could block us or mislead us.
    pub fn of_users(others: &[u32]) -> impl Iterator<Item = Process> {
        let own = rustix::process::geteuid().as_raw();
        let is_number = |name: &OsStr| name.as_bytes().iter().all(u8::is_ascii_digit);
        let entries = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
        let names = entries.map(|entry| entry.file_name()).filter(move |name| is_number(name));
        let processes = names.filter_map(|name| Self::at(name.into_string().ok()?).ok());
        processes.filter(move |process| {
            // The directory belongs to the effective user, or to root if the process is not
            // dumpable (proc(5)).
            let owner = fstat(&process.directory).map(|found| found.st_uid);
            owner.is_ok_and(|owner| owner == own || owner == ROOT || others.contains(&owner))
                && process.is_ours(others)
        })
    }

    fn at(number: String) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = openat(CWD, Path::new("/proc").join(&number), flags, Mode::empty())?;
        Ok(Self { number, directory })
    }

    /// Duplicates the handle, for another thread.
    ///
    /// # Errors
    /// No descriptors are left.
    pub(crate) fn again(&self) -> io::Result<Self> {
        Ok(Self { number: self.number.clone(), directory: self.directory.try_clone()? })
    }

    /// Path of its directory in /proc, by its ID.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        Path::new("/proc").join(&self.number)
    }

    /// Process ID; `None` for this process.
    #[must_use]
    pub fn number(&self) -> Option<u32> {
        self.number.parse().ok()
    }

    /// Descriptor of its directory in /proc.
    pub(crate) fn directory(&self) -> &OwnedFd {
        &self.directory
    }

    /// Reads one of its files.
    ///
    /// # Errors
    /// The process has ended or may not be read, or the file has more than `most` bytes.
    pub fn read(&self, name: &str, most: u64) -> io::Result<Vec<u8>> {
        let content = self.beginning(name, most + 1)?;
        match content.len() as u64 > most {
            true => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("its {name} has more than {most} bytes"),
            )),
            false => Ok(content),
        }
    }

    fn beginning(&self, name: &str, most: u64) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        self.open_file(name)?.take(most).read_to_end(&mut content)?;
        Ok(content)
    }

    fn open_file(&self, name: &str) -> io::Result<File> {
        Ok(openat(&self.directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?.into())
    }

    /// Target of one of its links.
    ///
    /// # Errors
    /// The process has ended or may not be read.
    pub fn link(&self, name: &str) -> io::Result<PathBuf> {
        let target = readlinkat(&self.directory, name, Vec::new())?;
        Ok(PathBuf::from(OsString::from_vec(target.into_bytes())))
    }

    /// Arguments or variables from `cmdline` or `environ`, including empty ones.
    ///
    /// # Errors
    /// As [`Process::read`].
    pub fn strings(&self, name: &str) -> io::Result<Vec<OsString>> {
        let text = self.read(name, MOST_BYTES)?;
        let text = text.strip_suffix(b"\0").unwrap_or(&text);
        Ok(text.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec())).collect())
    }

    /// Returns true if all its user IDs are this user's, or all one of `others`.
    #[must_use]
    pub fn is_ours(&self, others: &[u32]) -> bool {
        let own = rustix::process::geteuid().as_raw();
        self.user_ids()
            .is_some_and(|ids| ids == [own; 4] || others.iter().any(|other| ids == [*other; 4]))
    }

    /// Real, effective, saved and file system user ID.
    fn user_ids(&self) -> Option<[u32; 4]> {
        let status = self.beginning("status", FIRST_LINES).ok()?;
        let status = String::from_utf8_lossy(&status);
        let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
        let ids: Vec<u32> =
            line.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
        ids.try_into().ok()
    }

    /// Returns true if its executable has one of these names, even if a newer file has replaced it.
    #[must_use]
    pub fn runs(&self, names: &[&str]) -> bool {
        let Ok(program) = self.link("exe") else { return false };
        let name = program.file_name().unwrap_or_default().as_bytes();
        let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
        names.iter().any(|known| known.as_bytes() == name)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::BufRead as _;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process of a test's, which ends with it.
    pub(crate) struct Running {
        child: Child,
        /// The first line that it wrote.
        pub(crate) said: String,
    }

    impl Running {
        /// Starts it, and waits until it says something.
        pub(crate) fn start(command: &mut Command) -> Running {
            let mut child =
                command.stdout(Stdio::piped()).stdin(Stdio::piped()).spawn().expect("it starts");
            let mut said = String::new();
            io::BufReader::new(child.stdout.take().expect("a pipe"))
                .read_line(&mut said)
                .expect("a line");
            Running { child, said: said.trim_end().to_owned() }
        }

        pub(crate) fn process(&self) -> Process {
            Process::open(self.child.id()).expect("it runs")
        }
    }

    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    /// Makes `file` of its own process as long as it says, as any program may.
    const LENGTHENS: &str = r#"
import ctypes, sys, time
file, length = sys.argv[1], int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
start = libc.mmap(None, ctypes.c_size_t(length), 3, 0x4022, -1, ctypes.c_long(0))
of = open('/proc/self/stat').read().rpartition(')')[2].split()
field = lambda number: int(of[number - 3])
values = [field(n) for n in (26, 27, 45, 46, 47)] + [libc.sbrk(ctypes.c_long(0)), field(28)] + [field(n) for n in (48, 49, 50, 51)]
at = 7 if file == 'cmdline' else 9
values[at:at + 2] = [start, start + length]
class Map(ctypes.Structure):
    _fields_ = [('values', ctypes.c_uint64 * 11), ('auxv', ctypes.c_void_p), ('size', ctypes.c_uint32), ('exe', ctypes.c_uint32)]
its = Map((ctypes.c_uint64 * 11)(*values), None, 0, 0xffffffff)
if libc.prctl(35, 14, ctypes.byref(its), ctypes.c_ulong(ctypes.sizeof(its)), ctypes.c_ulong(0)):
    raise OSError(ctypes.get_errno(), 'PR_SET_MM_MAP')
print('begun', flush=True)
time.sleep(100)
"#;

    /// Its first line of output is "begun".
    pub(crate) fn with_long(file: &str, length: u64) -> Command {
        let mut command = Command::new("python3");
        command.args(["-c", LENGTHENS, file, &length.to_string()]);
        command
    }

    #[test]
    fn what_its_owner_makes_long_is_not_read() {
        for file in ["cmdline", "environ"] {
            let running = Running::start(&mut with_long(file, 16 * MOST_BYTES));
            assert_eq!(running.said, "begun");
            let why = running.process().strings(file).expect_err("it is too long");
            assert_eq!(why.to_string(), format!("its {file} has more than {MOST_BYTES} bytes"));
            assert_eq!(running.process().beginning(file, 10).expect("it runs").len(), 10);
            let short = Running::start(&mut with_long(file, MOST_BYTES));
            assert_eq!(
                short.process().read(file, MOST_BYTES).expect("it may be so long").len() as u64,
                MOST_BYTES
            );
        }
    }

    #[test]
    fn a_process_that_has_ended_tells_nothing() {
        let running = Running::start(Command::new("sh").args(["-c", "echo; read line"]));
        let process = running.process();
        assert_eq!(process.strings("cmdline").expect("it runs")[0], "sh");
        assert!(process.is_ours(&[]));
        drop(running);
        assert!(process.strings("cmdline").is_err() && !process.is_ours(&[]));
    }

    #[test]
    fn processes_of_other_users_are_left_out() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        // A shell would give up what it has of two users.
        let begins = ["perl", "-e", "$| = 1; print \"\\n\"; <STDIN>"];
        let ours = Running::start(Command::new("env").args(begins));
        let all =
            |line: &str| Running::start(Command::new("setpriv").args(line.split(' ')).args(begins));
        let theirs = all("--reuid 12345 --clear-groups");
        // As a set-user-id program has them.
        let of_two = all("--ruid 12345");
        let numbers = |others: &[u32]| -> Vec<u32> {
            Process::of_users(others).filter_map(|p| p.number()).collect()
        };
        let found = |others: &[u32]| {
            [&ours, &theirs, &of_two].map(|one| numbers(others).contains(&one.child.id()))
        };
        assert_eq!(found(&[]), [true, false, false]);
        assert_eq!(found(&[12345]), [true, true, false]);
    }
}
