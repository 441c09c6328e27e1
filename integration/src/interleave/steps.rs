//! Random steps: a command line for both shells, or system calls of this process. There are few
//! names, so that steps collide. Most steps are possible at any time, and the others fail in the
//! same way everywhere.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;

use crate::generate::Numbers;

const FILES: [&str; 6] = ["a", "b", "c", "d/a", "d/b", "e/a"];
const DIRECTORIES: [&str; 3] = ["d", "e", "d/f"];

/// One step.
#[derive(Debug, Clone)]
pub enum InterleaveStep {
    /// A command line, which posh runs on the server.
    Command(String),
    /// Calls of a program on the workstation.
    Here(Change),
}

/// System calls.
#[derive(Debug, Clone)]
pub enum Change {
    Write(&'static str, Vec<u8>),
    WriteAt(&'static str, Vec<u8>, u64),
    Append(&'static str, Vec<u8>),
    Truncate(&'static str, u64),
    Rename(&'static str, &'static str),
    Remove(&'static str),
    MakeDirectory(&'static str),
    RemoveDirectory(&'static str),
    Link(&'static str, &'static str),
    SymbolicLink(&'static str, &'static str),
}

impl fmt::Display for InterleaveStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InterleaveStep::Command(line) => write!(f, "{line:?}"),
            InterleaveStep::Here(change) => {
                write!(f, "{}", format!("{change:?}").chars().take(60).collect::<String>())
            }
        }
    }
}

fn pick(numbers: &mut Numbers, all: &[&'static str]) -> &'static str {
    all[usize::try_from(numbers.below(all.len() as u64)).expect("below a usize")]
}

impl InterleaveStep {
    /// A random step; three of four are commands.
    pub fn any(numbers: &mut Numbers) -> InterleaveStep {
        if numbers.below(4) == 0 {
            InterleaveStep::Here(Change::any(numbers))
        } else {
            InterleaveStep::Command(command(numbers))
        }
    }
}

/// A random command that posh offloads in any state of the files.
fn command(numbers: &mut Numbers) -> String {
    let [x, y] = [(); 2].map(|()| pick(numbers, &FILES));
    let [d, e] = [(); 2].map(|()| pick(numbers, &DIRECTORIES));
    let n = numbers.below(1000);
    match numbers.below(20) {
        0 | 1 => format!("tail -n 3 {y} >> {x}"),
        2 => format!("seq {n} | tail -n 40 | tee {x}"),
        3 => format!("seq {n} | tail -n 5 | tee -a {x} {y}"),
        4 => format!("sed -i 's/{}/{n}/' {x}", n % 10),
        5 => format!("sed -i '$a line {n}' {x} {y}"),
        6 => format!("sort -r {y} > {x}"),
        7 => format!("sort -o {x} {y}"),
        8 => format!("cp {y} {x}"),
        9 => format!("cp -p {y} {x}"),
        10 => format!("cp -r {d} {e}"),
        11 => format!("rm -rf {d}"),
        12 => format!("rm -rf {x} {y} {d}"),
        13 => format!("tar -cf t.tar {d}; tar -xf t.tar -C {e}"),
        14 => format!("tar -cf t.tar {d} {x}; rm -rf {d}; tar -xf t.tar"),
        15 => format!("gzip -nf {x}; rm -rf {y}; gunzip -f {x}.gz"),
        16 => format!("gzip -nkf {x}; cat {x}.gz > {y}"),
        17 => format!("grep -n 1 {y} > {x}"),
        18 => format!("split -n 2 {x} {d}/p; cat {d}/p* > {y}"),
        _ => format!("uniq {y} {x}; head -n 20 {x} > c"),
    }
}

impl Change {
    fn any(numbers: &mut Numbers) -> Change {
        let [x, y] = [(); 2].map(|()| pick(numbers, &FILES));
        let d = pick(numbers, &DIRECTORIES);
        let at = numbers.below(6000);
        let data = format!("{at} here\n")
            .repeat(usize::try_from(numbers.below(300)).expect("below 300"))
            .into_bytes();
        match numbers.below(12) {
            0 | 1 => Change::Write(x, data),
            2 => Change::WriteAt(x, data, at),
            3 => Change::Append(x, data),
            4 => Change::Truncate(x, at),
            5 => Change::Rename(x, y),
            6 => Change::Rename("d", "e"),
            7 => Change::Remove(x),
            8 => Change::RemoveDirectory(d),
            9 => Change::Link(x, y),
            10 => Change::SymbolicLink("a", x),
            _ => Change::MakeDirectory(d),
        }
    }

    /// Makes the change below a directory; returns the error's number, if it fails.
    pub fn carry_out(&self, root: &Path) -> Option<i32> {
        self.calls(root).err().map(|error| error.raw_os_error().unwrap_or(0))
    }

    fn calls(&self, root: &Path) -> io::Result<()> {
        let writing = |name: &str| OpenOptions::new().write(true).open(root.join(name));
        match self {
            Change::Write(name, data) => File::create(root.join(name))?.write_all(data),
            Change::WriteAt(name, data, at) => writing(name)?.write_all_at(data, *at),
            Change::Append(name, data) => {
                OpenOptions::new().append(true).open(root.join(name))?.write_all(data)
            }
            Change::Truncate(name, size) => writing(name)?.set_len(*size),
            Change::Rename(from, to) => fs::rename(root.join(from), root.join(to)),
            Change::Remove(name) => fs::remove_file(root.join(name)),
            Change::MakeDirectory(name) => fs::create_dir(root.join(name)),
            Change::RemoveDirectory(name) => fs::remove_dir(root.join(name)),
            Change::Link(from, to) => fs::hard_link(root.join(from), root.join(to)),
            Change::SymbolicLink(target, name) => symlink(target, root.join(name)),
        }
    }
}
