//! Compares the trees of the volume, its server and a plain directory, by readdir(3), stat(2),
//! readlink(2), open(2) and read(2); and the content of files that stay open.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{AttemptExt, LabError, Result};
use crate::generate::Numbers;

/// Largest size of a file: commands append the files' tails to each other.
const LARGEST_BYTES: u64 = 40_000;
/// Size after a larger file was cut.
const CUT_TO_BYTES: u64 = 500;
/// Number of files that are held open.
const HELD: usize = 4;
/// The archive that commands make.
const ARCHIVE: &str = "t.tar";
/// Characters of content in the report of a difference.
const SHOWN: usize = 30;
/// Reported differences of one comparison: the first ones are the most informative.
const TOLD: usize = 4;

/// First inode number of those that a volume assigns itself; file systems assign none as large.
const FIRST_OWN_NUMBER: u64 = 1 << 62;

#[derive(Debug, Clone, PartialEq, Eq)]
struct SeenFile {
    attributes: Attributes,
    content: Vec<u8>,
}

/// Attributes on which the server and its volume must agree.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Attributes {
    inode: u64,
    links: u64,
    mode: u32,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Attributes {
    fn of(metadata: &Metadata) -> Attributes {
        Attributes {
            inode: metadata.ino(),
            links: metadata.nlink(),
            mode: metadata.mode(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

type Picture = BTreeMap<PathBuf, SeenFile>;

/// A picture with the name of its root, for a report.
struct NamedPicture<'a> {
    name: &'a str,
    picture: &'a Picture,
}

fn picture(root: &Path, below: &Path, into: &mut Picture) -> io::Result<()> {
    for entry in fs::read_dir(root.join(below))? {
        let path = below.join(entry?.file_name());
        let whole = root.join(&path);
        let metadata = fs::symlink_metadata(&whole)?;
        let content = if metadata.is_dir() {
            Vec::new()
        } else if metadata.is_symlink() {
            fs::read_link(&whole)?.into_os_string().into_encoded_bytes()
        } else {
            fs::read(&whole)?
        };
        let is_directory = metadata.is_dir();
        into.insert(path.clone(), SeenFile { attributes: Attributes::of(&metadata), content });
        if is_directory {
            picture(root, &path, into)?;
        }
    }
    Ok(())
}

fn whole(root: &Path) -> io::Result<Picture> {
    let mut seen = Picture::new();
    picture(root, Path::new(""), &mut seen)?;
    Ok(seen)
}

/// Differences between the volume and its server, and between the server and the plain directory
/// except times and numbers. Counts the compared entries.
pub fn differences([volume, server, plain]: &[PathBuf; 3], reads: &mut usize) -> Vec<String> {
    let pictures = whole(volume).and_then(|ours| Ok((ours, whole(server)?, whole(plain)?)));
    let (ours, server, plain) = match pictures {
        Ok(pictures) => pictures,
        Err(error) => return vec![format!("a read fails: {error}")],
    };
    *reads += ours.len();
    let mut found = compare(
        &NamedPicture { name: "the volume", picture: &numbered_alike(ours, &server) },
        &NamedPicture { name: "its server", picture: &server },
        SeenFile::clone,
    );
    // An archive contains times.
    let [server, plain] = [server, plain].map(|mut all| {
        all.remove(Path::new(ARCHIVE));
        all
    });
    found.extend(compare(
        &NamedPicture { name: "the server", picture: &server },
        &NamedPicture { name: "a plain directory", picture: &plain },
        without_what_differs,
    ));
    found.truncate(TOLD);
    found
}

/// A file that the volume has created in memory keeps its inode number (docs/consistency.md), under
/// all its names: it is mapped to the server's.
fn numbered_alike(mut ours: Picture, server: &Picture) -> Picture {
    let mut meant = BTreeMap::new();
    for (path, seen) in
        ours.iter_mut().filter(|(_, seen)| seen.attributes.inode >= FIRST_OWN_NUMBER)
    {
        if let Some(theirs) = server.get(path) {
            seen.attributes.inode =
                *meant.entry(seen.attributes.inode).or_insert(theirs.attributes.inode);
        }
    }
    ours
}

/// Removes numbers, sizes of directories and times, in which a plain directory differs.
fn without_what_differs(seen: &SeenFile) -> SeenFile {
    let mode = seen.attributes.mode;
    let attributes =
        Attributes { inode: 0, links: 0, mode, size: 0, modified: (0, 0), changed: (0, 0) };
    SeenFile { attributes, content: seen.content.clone() }
}

fn compare(
    one: &NamedPicture<'_>,
    other: &NamedPicture<'_>,
    of_interest: impl Fn(&SeenFile) -> SeenFile,
) -> Vec<String> {
    let (ours, theirs) = (one.picture, other.picture);
    let mut found = Vec::new();
    for path in ours.keys().chain(theirs.keys().filter(|path| !ours.contains_key(*path))) {
        let [left, right] = [ours, theirs].map(|all| all.get(path).map(&of_interest));
        if left != right {
            let [left, right] =
                [left, right].map(|seen| seen.as_ref().map_or("nothing".to_owned(), describe));
            let path = path.display();
            found.push(format!("{path}: {} has {left}, {} {right}", one.name, other.name));
        }
    }
    found
}

/// One line, with a hash of all the content.
fn describe(seen: &SeenFile) -> String {
    let Attributes { inode, links, mode, size, modified, changed } = &seen.attributes;
    let start: String = String::from_utf8_lossy(&seen.content).chars().take(SHOWN).collect();
    let (length, sum) = (seen.content.len(), crate::generate::sum(&seen.content));
    format!(
        "{mode:o} {inode} links {links} size {size} times {modified:?} {changed:?}, {length} bytes \
         {start:?} {sum:x}"
    )
}

/// Cuts large files in the volume and the plain directory.
pub fn bound(volume: &Path, plain: &Path) -> Result<()> {
    let mut seen = Picture::new();
    // Read errors are reported already.
    let _ = picture(volume, Path::new(""), &mut seen);
    let large = |seen: &SeenFile| {
        seen.attributes.mode & 0o170_000 == 0o100_000 && seen.attributes.size > LARGEST_BYTES
    };
    for path in seen.iter().filter(|(_, seen)| large(seen)).map(|(path, _)| path) {
        for root in [volume, plain] {
            // An archive may be smaller in the plain directory.
            let Ok(file) = File::options().write(true).open(root.join(path)) else { continue };
            file.set_len(CUT_TO_BYTES).attempt(|| format!("cut {}", path.display()))?;
        }
    }
    Ok(())
}

/// Replaces a directory by a copy of another one.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::remove_dir_all(to)
        .and_then(|()| fs::create_dir(to))
        .attempt(|| format!("empty {}", to.display()))?;
    let mut copy = Command::new("cp");
    let output = copy.arg("-aT").args([from, to]).output().attempt(|| "run cp".into())?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(LabError::Command { command: format!("{copy:?}"), host: "this machine".into(), stderr })
}

/// Files that stay open while names change: through the volume and, at the same time, on its
/// server.
#[derive(Debug, Default)]
pub struct Handles(Vec<(PathBuf, [File; 2])>);

impl Handles {
    /// Sometimes opens another file and drops an old one.
    pub fn change(&mut self, numbers: &mut Numbers, [volume, server, _]: &[PathBuf; 3]) {
        if numbers.below(3) > 0 {
            return;
        }
        let path =
            Path::new(["a", "b", "d/a"][usize::try_from(numbers.below(3)).expect("below 3")]);
        let regular = |file: &File| file.metadata().is_ok_and(|metadata| metadata.is_file());
        // The file may not exist now.
        let [Ok(ours), Ok(theirs)] = [volume, server].map(|root| File::open(root.join(path)))
        else {
            return;
        };
        if regular(&ours) && regular(&theirs) {
            self.0.push((path.to_owned(), [ours, theirs]));
            self.0.drain(..self.0.len().saturating_sub(HELD));
        }
    }

    /// Differences between the two views of the open files.
    pub fn differences(&self, reads: &mut usize) -> Vec<String> {
        *reads += self.0.len();
        let compare = |(path, files): &(PathBuf, [File; 2])| {
            let [ours, theirs] = files.each_ref().map(seen);
            let [ours, theirs] = shown(ours, theirs);
            (ours != theirs).then(|| {
                format!("{}, held open, has {ours}, on the server {theirs}", path.display())
            })
        };
        self.0.iter().filter_map(compare).collect()
    }
}

/// Descriptions; an inode number of the volume's own is mapped to the server's.
fn shown(mut ours: io::Result<SeenFile>, theirs: io::Result<SeenFile>) -> [String; 2] {
    if let (Ok(ours), Ok(theirs)) = (&mut ours, &theirs)
        && ours.attributes.inode >= FIRST_OWN_NUMBER
    {
        ours.attributes.inode = theirs.attributes.inode;
    }
    [ours, theirs]
        .map(|seen| seen.map_or_else(|error| format!("an error: {error}"), |seen| describe(&seen)))
}

/// Attributes, and content by pread(2).
fn seen(file: &File) -> io::Result<SeenFile> {
    let attributes = Attributes::of(&file.metadata()?);
    let mut content = vec![0; usize::try_from(attributes.size + 1).expect("files are small")];
    let length = file.read_at(&mut content, 0)?;
    content.truncate(length);
    Ok(SeenFile { attributes, content })
}
