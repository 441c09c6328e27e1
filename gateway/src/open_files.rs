//! Files that processes of this machine have open or mapped.
//!
//! On each write, sshfs names an open file by the directories above it. Once one of these was
//! removed through the mount (not only on the server), the file has no name any more, and sshfs 3.7
//! exits at the next write. So no directory above an open file is ever removed through an sshfs
//! mount ([`above_open_files`]).
//!
//! sshfs also identifies files by name: an open file and the one that replaces it on the server
//! share one size and one cache, and a reader would get a mix of both. In a plain shell the
//! replacement goes through the mount, whose kernel tells the two apart. So a command that may
//! replace an open file on an sshfs mount runs locally ([`OpenFiles::why_local`]). A replacement by
//! another machine confuses sshfs in a plain shell, too.
//!
//! The text of an open file's name is only valid on the mount that this process has there: a
//! container, or a bind mount, has files of the same file system by other names. So an open file is
//! recognized by its device and mount ID ([`SshfsSite`]), and one that is open through another
//! mount counts as in use wherever it lies. A descriptor in flight (SCM_RIGHTS), or one that is
//! only registered with an io_uring, is in no process's list and can't be seen.
//!
//! Invariant: no process of this machine makes a look take long, or delays anything but the command
//! that it is for. Root's gateway looks at everybody's processes, and a process may have millions
//! of descriptors, hundreds of megabytes of mappings, or block its readers. So a look has its own
//! thread, works piece by piece, and ends when its time is used up ([`LookBudget`]): open files are
//! unknown then.

use std::{
    cell::OnceCell,
    collections::BTreeSet,
    ffi::OsStr,
    fs::{self, File},
    io,
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use fs_mapper::{Mount, MountTable, coherence::Adapter};
use nix::{
    time::{ClockId, clock_gettime},
    unistd::geteuid,
};
use posh_proto::rule::{self, Rule};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use crate::{
    enlisted::{Descriptor, Pid},
    facts::{PathOwner, ResolvedCommand},
    model::{LocalReason, ReasonKind},
    shares::Shares,
    written,
};

/// CPU time for one look: a desktop with a browser takes up to half of it.
const MOST_WORK: Duration = Duration::from_millis(400);
/// Time that a command waits for its look.
const PATIENCE: Duration = Duration::from_secs(2);
/// Like `PATIENCE`, but for a refresh: the shell waits anyway, and an unknown result makes it wait
/// longer.
const PATIENCE_OF_REFRESH: Duration = Duration::from_secs(10);
/// Size of a read of the mappings.
const MAPS_BYTES: usize = 64 << 10;
/// Limit on a shell's descriptors; it has about ten.
const MOST_OF_A_SHELL: usize = 1024;

/// Finds open files.
#[derive(Debug, Default)]
pub struct OpenFiles {
    looks: Shares,
}

impl OpenFiles {
    /// Reason for running a command that may change names locally: it may replace a file on an
    /// sshfs mount that a process other than `stage` has open.
    pub fn why_local(
        &self,
        table: &MountTable,
        stage: Pid,
        reading: &ResolvedCommand,
    ) -> Option<LocalReason> {
        if !rule::holds(Rule::Coherence) {
            return None;
        }
        let files = reading.invocation.files.iter().zip(&reading.places);
        let written =
            files.filter(|(file, _)| file.kind.writes()).filter_map(|(_, place)| match place {
                Some(PathOwner::At(_, path, mount)) => Some((path.as_path().to_owned(), *mount)),
                _ => None,
            });
        let all = written.chain(written::watched_places(table, reading));
        let on_sshfs = all.filter(|(_, mount)| table.mount(*mount).adapter() == Adapter::Sshfs);
        let (tops, mounts): (Vec<PathBuf>, BTreeSet<PathBuf>) =
            on_sshfs.map(|(path, mount)| (path, mount_point(table.mount(mount)))).unzip();
        if tops.is_empty() {
            return None;
        }
        let look = move || {
            let sites = Sites::of(&mounts)?;
            open_below(&tops, &sites, stage, &LookBudget::begin(PATIENCE))
        };
        match self.looks.ask_aside(Path::new("/proc"), PATIENCE, look) {
            Ok(Ok(found)) => Some(ReasonKind::Descriptors.because(format!(
                "it may replace {}, which a process here has open",
                found?.display()
            ))),
            Ok(Err(Exceeded)) | Err(_) => Some(ReasonKind::Descriptors.because(
                "it may replace a file that a process here has open, which can't be told in time",
            )),
        }
    }

    /// Directories below which a process of this machine may have a file open or mapped.
    pub async fn above(
        &self,
        table: &MountTable,
        directories: BTreeSet<PathBuf>,
    ) -> BTreeSet<PathBuf> {
        let all = directories.clone();
        let on_sshfs = table.mounts().filter(|mount| {
            mount.adapter() == Adapter::Sshfs
                && mount.mounted()
                && all.iter().any(|directory| directory.starts_with(mount.path.as_path()))
        });
        let mounts: BTreeSet<PathBuf> = on_sshfs.map(mount_point).collect();
        let look = move || {
            let sites = Sites::of(&mounts)?;
            above_open_files(&directories, &sites, &LookBudget::begin(PATIENCE_OF_REFRESH))
        };
        match self.looks.ask(Path::new("/proc"), PATIENCE_OF_REFRESH, look).await {
            Ok(Ok(found)) => found,
            Ok(Err(Exceeded)) | Err(_) => all,
        }
    }
}

fn mount_point(mount: &Mount) -> PathBuf {
    mount.path.as_path().to_owned()
}

/// Device of a file system: major and minor number.
type Device = (u32, u32);

/// An sshfs mount, and how the kernel knows the files on it.
#[derive(Debug)]
struct SshfsSite {
    mount_point: PathBuf,
    device: Device,
    mount_id: u64,
}

/// The sshfs mounts that a look is for.
#[derive(Debug, Default)]
struct Sites {
    all: Vec<SshfsSite>,
    /// Devices of this machine's mounts, one each; read on first use.
    mounted: OnceCell<Vec<Device>>,
}

/// An open or mapped file.
struct OpenFile<'a> {
    /// Its name, as the kernel shows it to this process.
    text: &'a Path,
    /// Mounts of its file system, for which the text does not tell where it lies.
    anywhere_on: Vec<&'a SshfsSite>,
}

/// The kernel's data about a file, from its caches alone: a question to the server of the file
/// could take forever.
fn device_and_mount(file: &Path) -> io::Result<(Device, u64)> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    let found = statx(CWD, file, flags, StatxFlags::MNT_ID)?;
    Ok(((found.stx_dev_major, found.stx_dev_minor), found.stx_mnt_id))
}

impl Sites {
    fn of(mount_points: &BTreeSet<PathBuf>) -> Result<Self, Exceeded> {
        let site = |mount_point: &PathBuf| {
            let (device, mount_id) = device_and_mount(mount_point).map_err(|_| Exceeded)?;
            Ok(SshfsSite { mount_point: mount_point.clone(), device, mount_id })
        };
        let all = mount_points.iter().map(site).collect::<Result<_, Exceeded>>()?;
        Ok(Self { all, mounted: OnceCell::new() })
    }

    fn on(&self, device: Device) -> impl Iterator<Item = &SshfsSite> {
        self.all.iter().filter(move |site| site.device == device)
    }

    /// The file of a descriptor, by its link in /proc.
    fn opened<'a>(&'a self, descriptor: &Path, text: &'a Path) -> OpenFile<'a> {
        // Pipes, sockets and the like have no path, and no mounts lead to them.
        let about = (!self.all.is_empty() && text.is_absolute())
            .then(|| device_and_mount(descriptor).ok())
            .flatten();
        let anywhere_on = about.map(|(device, mount_id)| {
            self.on(device).filter(|site| site.mount_id != mount_id).collect()
        });
        OpenFile { text, anywhere_on: anywhere_on.unwrap_or_default() }
    }

    /// The file of a mapping, of which the mount is not shown: its text counts only if the process
    /// has our mounts, and the file system has one mount.
    fn mapped<'a>(&'a self, process: &Path, mapping: &Mapping<'a>) -> OpenFile<'a> {
        let anywhere_on = self.on(mapping.device).filter(|site| {
            !mapping.text.starts_with(&site.mount_point)
                || self.is_mounted_again(site.device)
                || !has_our_mounts(process)
        });
        OpenFile { text: mapping.text, anywhere_on: anywhere_on.collect() }
    }

    fn is_mounted_again(&self, device: Device) -> bool {
        let mounted = self.mounted.get_or_init(|| {
            let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
            text.lines().filter_map(|line| device_of(line.split(' ').nth(2)?, 10)).collect()
        });
        mounted.iter().filter(|mounted| **mounted == device).count() != 1
    }
}

/// Reads `MAJOR:MINOR`.
fn device_of(text: &str, radix: u32) -> Option<Device> {
    let (major, minor) = text.split_once(':')?;
    Some((u32::from_str_radix(major, radix).ok()?, u32::from_str_radix(minor, radix).ok()?))
}

fn has_our_mounts(process: &Path) -> bool {
    let namespace = |process: &Path| fs::metadata(process.join("ns/mnt")).map(|found| found.ino());
    namespace(process)
        .is_ok_and(|theirs| namespace(Path::new("/proc/self")).is_ok_and(|ours| ours == theirs))
}

/// Remaining time of a look.
#[derive(Debug)]
struct LookBudget {
    /// CPU time of the looking thread at which it stops.
    worked: Duration,
    /// Time at which the caller gives up.
    end: Instant,
}

/// Error of a look that has used up its time.
#[derive(Debug, PartialEq, Eq)]
struct Exceeded;

impl LookBudget {
    /// Budget of a look in this thread. CPU time limits the work that other processes can cause;
    /// elapsed time also depends on the load.
    fn begin(patience: Duration) -> Self {
        Self { worked: worked() + MOST_WORK, end: Instant::now() + patience }
    }

    fn spend(&self) -> Result<(), Exceeded> {
        if worked() < self.worked && Instant::now() < self.end { Ok(()) } else { Err(Exceeded) }
    }
}

/// CPU time of this thread.
fn worked() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}

/// Returns true if a process has the file of another one's descriptor open, or if that is unknown.
/// A file that is renamed meanwhile keeps its inode number, which is unique per mount only.
#[must_use]
pub fn has_open(pid: Pid, owner: Pid, file: &Descriptor) -> bool {
    let process = |pid: Pid| Path::new("/proc").join(pid.to_string());
    let own = identity_of(&process(owner).join("fdinfo").join(file.fd.to_string()));
    let descriptors = fs::read_dir(process(pid).join("fd"));
    let (Some(own), Ok(descriptors)) = (own, descriptors) else { return true };
    descriptors.flatten().enumerate().any(|(number, descriptor)| {
        number >= MOST_OF_A_SHELL
            || fs::read_link(descriptor.path()).is_ok_and(|path| path == file.path)
            || identity_of(&process(pid).join("fdinfo").join(descriptor.file_name())) == Some(own)
    })
}

/// Directories below which a process of this machine has a file open or mapped. Blocks.
fn above_open_files(
    directories: &BTreeSet<PathBuf>,
    sites: &Sites,
    budget: &LookBudget,
) -> Result<BTreeSet<PathBuf>, Exceeded> {
    let mut found = BTreeSet::new();
    look(None, sites, budget, |open| {
        note(directories, open.text, &mut found);
        for site in &open.anywhere_on {
            let all = directories.iter();
            found.extend(all.filter(|path| path.starts_with(&site.mount_point)).cloned());
        }
        found.len() == directories.len()
    })?;
    Ok(found)
}

/// Finds a file that may be at or below these paths and that a process other than `but` has open or
/// mapped. Blocks.
fn open_below(
    tops: &[PathBuf],
    sites: &Sites,
    but: Pid,
    budget: &LookBudget,
) -> Result<Option<PathBuf>, Exceeded> {
    let mut found = None;
    look(Some(but), sites, budget, |open| {
        let is_below = |top: &PathBuf| {
            open.text.starts_with(top)
                || open.anywhere_on.iter().any(|site| top.starts_with(&site.mount_point))
        };
        if tops.iter().any(is_below) {
            found = Some(open.text.to_owned());
        }
        found.is_some()
    })?;
    Ok(found)
}

/// Calls `found` with each open or mapped file (proc_pid_fd(5), proc_pid_maps(5)) until it returns
/// true. Skips unreadable processes: they can't use a mount of this user, unless it has
/// `allow_other`.
fn look(
    but: Option<Pid>,
    sites: &Sites,
    budget: &LookBudget,
    mut found: impl FnMut(&OpenFile<'_>) -> bool,
) -> Result<(), Exceeded> {
    for process in processes(but, budget)? {
        // If the first thread has ended, read the other threads' descriptors.
        let has_some =
            fs::read_dir(process.join("fd")).is_ok_and(|mut table| table.next().is_some());
        let threads = if has_some { None } else { fs::read_dir(process.join("task")).ok() };
        let tables = has_some.then(|| process.clone()).into_iter();
        for table in tables.chain(threads.into_iter().flatten().flatten().map(|task| task.path())) {
            budget.spend()?;
            for descriptor in fs::read_dir(table.join("fd")).into_iter().flatten().flatten() {
                budget.spend()?;
                let Ok(path) = fs::read_link(descriptor.path()) else { continue };
                if found(&sites.opened(&descriptor.path(), &path)) {
                    return Ok(());
                }
            }
        }
        let Ok(maps) = File::open(process.join("maps")) else { continue };
        let note = &mut |mapping: &Mapping<'_>| found(&sites.mapped(&process, mapping));
        if mapped(maps, budget, note)? {
            return Ok(());
        }
    }
    Ok(())
}

/// All processes but this one and `but`; this user's first, so that others' processes can't use up
/// the budget before.
fn processes(but: Option<Pid>, budget: &LookBudget) -> Result<Vec<PathBuf>, Exceeded> {
    let passed_over = [Some(std::process::id()), but];
    let (mut own, mut others) = (Vec::new(), Vec::new());
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        budget.spend()?;
        let pid = entry.file_name().to_str().and_then(|name| name.parse::<Pid>().ok());
        if pid.is_some_and(|pid| !passed_over.contains(&Some(pid))) {
            let is_own = entry.metadata().is_ok_and(|about| about.uid() == geteuid().as_raw());
            if is_own { &mut own } else { &mut others }.push(entry.path());
        }
    }
    own.append(&mut others);
    Ok(own)
}

/// Mount ID and inode number of an open file (proc_pid_fdinfo(5), since Linux 5.14).
fn identity_of(info: &Path) -> Option<(u64, u64)> {
    let info = fs::read_to_string(info).ok()?;
    let number =
        |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    Some((number("mnt_id:")?, number("ino:")?))
}

fn note(directories: &BTreeSet<PathBuf>, path: &Path, found: &mut BTreeSet<PathBuf>) {
    found.extend(path.ancestors().skip(1).filter_map(|above| directories.get(above)).cloned());
}

/// Calls `found` with the files of /proc/PID/maps until it returns true, and returns its last
/// answer.
fn mapped(
    mut maps: impl io::Read,
    budget: &LookBudget,
    found: &mut impl FnMut(&Mapping<'_>) -> bool,
) -> Result<bool, Exceeded> {
    let mut piece = vec![0; MAPS_BYTES];
    let mut begun = 0;
    loop {
        budget.spend()?;
        // A line has at most the length of four paths, as special characters are escaped.
        let count = match maps.read(&mut piece[begun..]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) | Ok(0) => {
                return Ok(Mapping::of(&piece[..begun]).is_some_and(|mapping| found(&mapping)));
            }
            Ok(count) => count,
        };
        let end = begun + count;
        let whole = piece[..end].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let mut lines = piece[..whole].split(|byte| *byte == b'\n').filter_map(Mapping::of);
        if lines.any(|mapping| found(&mapping)) {
            return Ok(true);
        }
        piece.copy_within(whole..end, 0);
        begun = end - whole;
        if begun == piece.len() {
            return Err(Exceeded);
        }
    }
}

/// A mapped file.
struct Mapping<'a> {
    text: &'a Path,
    device: Device,
}

impl<'a> Mapping<'a> {
    /// Reads one line. The name starts at the first slash, as no earlier column has one.
    fn of(line: &'a [u8]) -> Option<Self> {
        let at = line.iter().position(|byte| *byte == b'/')?;
        let columns = std::str::from_utf8(&line[..at]).ok()?;
        let device = device_of(columns.split(' ').nth(3)?, 16)?;
        Some(Self { text: Path::new(OsStr::from_bytes(&line[at..])), device })
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::enlisted::DescriptorKind;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn directories_above_files_that_others_have_open_are_found() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        let [open, other] = ["open", "other"].map(|name| place.join(name));
        fs::create_dir_all(open.join("deep")).unwrap();
        fs::create_dir(&other).unwrap();
        let path = open.join("deep/f");
        fs::write(&path, "x").unwrap();
        let all = BTreeSet::from([open.clone(), open.join("deep"), other]);
        let look = || above_open_files(&all, &Sites::default(), &LookBudget::begin(LONG)).unwrap();
        assert!(look().is_empty());
        let file = fs::File::open(&path).unwrap();
        let mut holder =
            Command::new("sleep").arg("1000").stdin(Stdio::from(file)).spawn().unwrap();
        let expected = BTreeSet::from([open.clone(), open.join("deep")]);
        let found = look();
        // Also when its name and its directories are gone.
        fs::remove_dir_all(&open).unwrap();
        let found_later = look();
        holder.kill().unwrap();
        holder.wait().unwrap();
        assert_eq!((found, found_later), (expected.clone(), expected));
    }

    #[test]
    fn a_file_below_a_path_is_found_but_for_one_process() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        let path = place.join("f");
        fs::write(&path, "x").unwrap();
        let file = fs::File::open(&path).unwrap();
        let mut holder =
            Command::new("sleep").arg("1000").stdin(Stdio::from(file)).spawn().unwrap();
        let look = |top: &Path, but| {
            let tops = [top.to_owned()];
            open_below(&tops, &Sites::default(), but, &LookBudget::begin(LONG)).unwrap()
        };
        let found = [
            look(&place, 0),
            look(&path, 0),
            look(&place.join("other"), 0),
            look(&place, holder.id()),
        ];
        holder.kill().unwrap();
        holder.wait().unwrap();
        assert_eq!(found, [Some(path.clone()), Some(path), None, None]);
    }

    /// Runs the test again in a mount namespace of its own, with a file system at `$SITE` that is
    /// also mounted at `$ALIAS`, in part.
    fn in_own_mounts(test: &str) -> Option<[PathBuf; 2]> {
        if let (Some(site), Some(alias)) = (std::env::var_os("SITE"), std::env::var_os("ALIAS")) {
            return Some([site.into(), alias.into()]);
        }
        if !geteuid().is_root() {
            return None;
        }
        let place = tempfile::tempdir().unwrap();
        let [site, alias] = ["site", "alias"].map(|name| place.path().join(name));
        let script = "mkdir $SITE $ALIAS && mount -t tmpfs x $SITE && mkdir -p $SITE/d/e $SITE/x \
             && cp /bin/sleep $SITE/d/e && mount --bind $SITE/d/e $ALIAS \
             && exec \"$0\" \"$@\"";
        let status = Command::new("unshare")
            .args(["-m", "--propagation", "private", "sh", "-c", script])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", test])
            .envs([("SITE", &site), ("ALIAS", &alias)])
            .status();
        assert!(status.unwrap().success());
        None
    }

    #[test]
    fn a_file_that_is_open_by_another_name_is_found() {
        let test = "open_files::tests::a_file_that_is_open_by_another_name_is_found";
        let Some([site, alias]) = in_own_mounts(test) else { return };
        let open = |line: &str| {
            let line = line.replace("SITE", site.to_str().unwrap());
            let line = line.replace("ALIAS", alias.to_str().unwrap());
            Command::new("sh").args(["-c", &format!("{line}; exit")]).spawn().unwrap()
        };
        let sites = || Sites::of(&BTreeSet::from([site.clone()])).unwrap();
        let directories = BTreeSet::from(["d", "x"].map(|name| site.join(name)));
        let of = |line: &str| {
            let mut holder = open(line);
            std::thread::sleep(Duration::from_millis(300));
            let tops = [site.join("x")];
            let below = open_below(&tops, &sites(), 0, &LookBudget::begin(LONG)).unwrap().is_some();
            let above =
                above_open_files(&directories, &sites(), &LookBudget::begin(LONG)).unwrap().len();
            holder.kill().unwrap();
            holder.wait().unwrap();
            (below, above)
        };
        assert_eq!(of("exec sleep 1000"), (false, 0));
        assert_eq!(of("exec sleep 1000 < SITE/d/e/sleep"), (false, 1));
        // By the bind mount, mapped, in another namespace, and where the text is one of ours.
        assert_eq!(of("exec sleep 1000 < ALIAS/sleep"), (true, 2));
        assert_eq!(of("exec ALIAS/sleep 1000"), (true, 2));
        assert_eq!(of("exec unshare -m sleep 1000 < SITE/d/e/sleep"), (false, 1));
        assert_eq!(
            of(
                "exec unshare -m sh -c 'mount --bind SITE/d/e SITE/d; exec sleep 1000 < SITE/d/sleep'"
            ),
            (true, 2)
        );
        assert_eq!(of("exec unshare -m SITE/d/e/sleep 1000"), (true, 2));
    }

    #[test]
    fn an_open_file_is_known_by_its_name_and_by_its_inode() {
        use std::os::fd::AsRawFd as _;

        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        let open = |name: &str| {
            fs::write(place.join(name), "x").unwrap();
            fs::File::open(place.join(name)).unwrap()
        };
        let (held, other) = (open("f"), open("g"));
        let own = std::process::id();
        let mut holder =
            Command::new("sleep").arg("1000").stdin(Stdio::from(open("f"))).spawn().unwrap();
        let is_open = |file: &fs::File, name: &str| {
            let fd = u32::try_from(file.as_raw_fd()).unwrap();
            has_open(
                holder.id(),
                own,
                &Descriptor::imagined(fd, DescriptorKind::File, place.join(name), 0),
            )
        };
        let found = [is_open(&held, "renamed"), is_open(&other, "f"), is_open(&other, "g")];
        holder.kill().unwrap();
        holder.wait().unwrap();
        assert_eq!(found, [true, true, false]);
        let closed = Descriptor::imagined(u32::MAX, DescriptorKind::File, place.join("g"), 0);
        assert!(has_open(own, own, &closed), "it can't be told");
    }

    #[test]
    fn mapped_files_are_found() {
        let maps = b"7f00-7f01 r--p 00000000 fe:00 123   /m/d/f\n7f02-7f03 rw-p 00000000 00:00 0\n7f04-7f05 rw-s 0 0:3 9 /m/a b (deleted)\n";
        for piece in [1, 7, maps.len()] {
            let mut found = Vec::new();
            let note = &mut |mapping: &Mapping<'_>| {
                found.push((mapping.text.to_owned(), mapping.device));
                false
            };
            assert_eq!(mapped(Pieces(maps, piece), &LookBudget::begin(LONG), note), Ok(false));
            let expected = [("/m/d/f", (0xfe, 0)), ("/m/a b (deleted)", (0, 3))];
            assert_eq!(found, expected.map(|(text, device)| (PathBuf::from(text), device)));
        }
        let mut first = None;
        let note = &mut |mapping: &Mapping<'_>| first.replace(mapping.text.to_owned()).is_none();
        assert_eq!(mapped(&maps[..], &LookBudget::begin(LONG), note), Ok(true));
        assert_eq!(first.as_deref(), Some(Path::new("/m/d/f")));
    }

    /// Gives few bytes at a time, as the kernel does.
    struct Pieces<'a>(&'a [u8], usize);

    impl io::Read for Pieces<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let few = buffer.len().min(self.1);
            self.0.read(&mut buffer[..few])
        }
    }

    /// A table of mappings that never ends, as one of hundreds of megabytes is for who waits.
    #[test]
    fn mappings_without_end_end_a_look() {
        struct Endless;
        impl io::Read for Endless {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                buffer.fill(b'\n');
                Ok(buffer.len())
            }
        }
        let began = worked();
        assert_eq!(mapped(Endless, &LookBudget::begin(LONG), &mut |_| false), Err(Exceeded));
        assert!(worked() - began < 10 * MOST_WORK);
        // A line without an end is kept in no memory.
        assert_eq!(
            mapped(io::repeat(b'/'), &LookBudget::begin(LONG), &mut |_| false),
            Err(Exceeded)
        );
    }

    #[test]
    fn what_can_not_be_told_in_time_is_not_told() {
        let budget = LookBudget::begin(Duration::ZERO);
        let (none, all) = (Sites::default(), BTreeSet::from(["/m".into()]));
        assert_eq!(open_below(&["/m".into()], &none, 0, &budget), Err(Exceeded));
        assert_eq!(above_open_files(&all, &none, &budget), Err(Exceeded));
    }

    #[tokio::test]
    async fn where_nothing_can_be_told_every_directory_counts_as_in_use() {
        let files = OpenFiles::default();
        let directories = BTreeSet::from([PathBuf::from("/nowhere")]);
        let config = fs_mapper::config::Config::parse("", Path::new("/mounts.toml")).unwrap();
        let info = fs_mapper::mountinfo::MountInfo::parse(b"").unwrap();
        let table = MountTable::new(&config, &info);
        assert_eq!(files.above(&table, directories.clone()).await, BTreeSet::new());
        // Somebody holds up who looks.
        let (answer, answered) = std::sync::mpsc::channel::<()>();
        let held_up = files
            .looks
            .ask(Path::new("/proc"), Duration::from_millis(10), move || answered.recv())
            .await;
        assert!(held_up.is_err());
        assert_eq!(files.above(&table, directories.clone()).await, directories);
        drop(answer);
    }
}
