//! ELF files: the interpreter (loader) of a program, and the libraries that the loader will look
//! for (elf(5), ld.so(8)). Only 64-bit files are known: the seccomp filters refuse all others.

use std::{
    ffi::OsString, fs::File, os::unix::ffi::OsStringExt as _, os::unix::fs::FileExt as _,
    path::PathBuf,
};

/// Bounds on reads of a malformed file.
const MAX_HEADERS: usize = 128;
const MAX_DYNAMIC_BYTES: usize = 64 << 10;
const MAX_NAME_BYTES: usize = 4096;

/// Kinds of segments, and of entries of the dynamic section.
const LOAD: u64 = 1;
const DYNAMIC: u64 = 2;
const INTERPRETER: u64 = 3;
const NEEDED: u64 = 1;
const STRINGS: u64 = 5;
const RPATH: u64 = 15;
const RUNPATH: u64 = 29;

/// A program or a library.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ElfImage {
    /// The loader; none for a library, and for a static program.
    pub interpreter: Option<PathBuf>,
    /// Names of libraries.
    pub needed: Vec<OsString>,
    /// Search path before all others, lists with colons.
    pub run_paths: Vec<OsString>,
}

/// One segment: kind, offset in the file, address in memory, size in the file.
struct Segment {
    kind: u64,
    offset: u64,
    address: u64,
    size: u64,
}

impl ElfImage {
    /// Reads a file; `None` if it has another format.
    pub fn read(file: &File) -> Option<Self> {
        let header = bytes(file, 0, 64)?;
        if !header.starts_with(b"\x7fELF\x02\x01") {
            return None;
        }
        let (at, size, count) =
            (number(&header, 32, 8)?, number(&header, 54, 2)?, number(&header, 56, 2)?);
        let count = usize::try_from(count).ok()?.min(MAX_HEADERS);
        let size = usize::try_from(size).ok().filter(|size| (56..=256).contains(size))?;
        let table = bytes(file, at, size * count)?;
        let segments: Vec<Segment> = table.chunks_exact(size).filter_map(segment).collect();
        let of = |kind| segments.iter().find(|segment| segment.kind == kind);
        let interpreter =
            of(INTERPRETER).and_then(|segment| name(file, segment.offset)).map(PathBuf::from);
        let mut image = Self { interpreter, ..Self::default() };
        if let Some(dynamic) = of(DYNAMIC) {
            image.read_dynamic(file, dynamic, &segments)?;
        }
        Some(image)
    }

    fn read_dynamic(&mut self, file: &File, dynamic: &Segment, segments: &[Segment]) -> Option<()> {
        let size = usize::try_from(dynamic.size).ok()?.min(MAX_DYNAMIC_BYTES);
        let table = bytes(file, dynamic.offset, size)?;
        let entries = table
            .chunks_exact(16)
            .filter_map(|entry| Some((number(entry, 0, 8)?, number(entry, 8, 8)?)));
        let entries: Vec<(u64, u64)> = entries.take_while(|(kind, _)| *kind != 0).collect();
        let address = entries.iter().find(|(kind, _)| *kind == STRINGS)?.1;
        let strings =
            segments.iter().filter(|segment| segment.kind == LOAD).find_map(|segment| {
                let within =
                    address.checked_sub(segment.address).filter(|within| *within < segment.size)?;
                segment.offset.checked_add(within)
            })?;
        let text = |at: u64| name(file, strings.checked_add(at)?);
        let of = |kinds: &[u64]| -> Option<Vec<OsString>> {
            entries
                .iter()
                .filter(|(kind, _)| kinds.contains(kind))
                .map(|(_, at)| text(*at))
                .collect()
        };
        (self.needed, self.run_paths) = (of(&[NEEDED])?, of(&[RPATH, RUNPATH])?);
        Some(())
    }
}

fn segment(entry: &[u8]) -> Option<Segment> {
    let field = |at| number(entry, at, 8);
    Some(Segment {
        kind: number(entry, 0, 4)?,
        offset: field(8)?,
        address: field(16)?,
        size: field(32)?,
    })
}

fn number(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let mut value = [0; 8];
    value[..size].copy_from_slice(bytes.get(at..at + size)?);
    Some(u64::from_le_bytes(value))
}

fn bytes(file: &File, at: u64, count: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; count];
    file.read_exact_at(&mut bytes, at).ok()?;
    Some(bytes)
}

/// A string that ends in a zero byte.
fn name(file: &File, at: u64) -> Option<OsString> {
    let mut bytes = vec![0; MAX_NAME_BYTES];
    let count = file.read_at(&mut bytes, at).ok()?;
    let end = bytes[..count].iter().position(|byte| *byte == 0)?;
    bytes.truncate(end);
    Some(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_program_names_its_loader_and_its_libraries() {
        let image = ElfImage::read(&File::open("/usr/bin/sort").unwrap()).unwrap();
        assert!(image.interpreter.unwrap().display().to_string().contains("ld-"));
        assert!(
            image.needed.iter().any(|name| name.to_string_lossy().starts_with("libc.")),
            "{:?}",
            image.needed
        );
    }

    #[test]
    fn what_is_no_program_or_a_broken_one_is_none() {
        let program = std::fs::read("/usr/bin/sort").unwrap();
        for length in [0, 3, 63, 64, 200] {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&program[..length]).unwrap();
            assert_eq!(ElfImage::read(&file), None, "{length}");
        }
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"#!/bin/sh\n").unwrap();
        assert_eq!(ElfImage::read(&file), None);
        // Whatever its numbers say, nothing is read without a bound.
        for at in 0..program.len().min(1024) {
            let mut broken = program[..program.len().min(32 << 10)].to_vec();
            broken[at] = 0xff;
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&broken).unwrap();
            let _ = ElfImage::read(&file);
        }
    }
}
