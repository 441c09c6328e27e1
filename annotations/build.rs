//! Embeds `commands/*.yaml` as a table of file name, command names and text. The names are
//! extracted at build time, so that a program parses a file only when one of its commands is asked
//! for; a test compares them with the parser's.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let directory =
        Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("commands");
    println!("cargo::rerun-if-changed={}", directory.display());
    let mut files: Vec<PathBuf> =
        fs::read_dir(&directory)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "yaml"));
    files.sort();
    let mut table = String::from("pub static FILES: &[(&str, &[&str], &str)] = &[\n");
    for path in &files {
        println!("cargo::rerun-if-changed={}", path.display());
        let name = path.file_name().expect("read_dir gives names").to_string_lossy().into_owned();
        let text = fs::read_to_string(path)?;
        let commands: Vec<&str> = text.lines().filter_map(command).collect();
        writeln!(
            table,
            "    ({name:?}, &{commands:?}, include_str!({:?})),",
            path.display().to_string()
        )
        .expect("a string can be written to");
    }
    table.push_str("];\n");
    fs::write(Path::new(&env::var("OUT_DIR").expect("cargo sets it")).join("embedded.rs"), table)
}

/// The command that a line begins to define: a key that is not indented.
fn command(line: &str) -> Option<&str> {
    if line.starts_with([' ', '\t', '#', '-', '}', ']', '%']) {
        return None;
    }
    let (key, rest) = line.split_once(':')?;
    (rest.is_empty() || rest.starts_with(' ')).then(|| key.trim_matches(['"', '\'']))
}
