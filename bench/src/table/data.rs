//! Makes the workloads' inputs, in the servers' own directories and not through mounts. The
//! generators of the paper's applications are in `posh_integration::generate`.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result};
use posh_integration::generate::{self, Numbers};
use posh_integration::workload::Store;

use super::catalogue::{Amount, Workload};

/// Makes input in the workload's directory of each server.
pub type Making = fn(&[Store<'_>], Amount) -> Result<()>;

/// No input.
pub fn nothing(_: &[Store<'_>], _: Amount) -> Result<()> {
    Ok(())
}

/// See [`generate::ray_logs`].
pub fn ray_logs(stores: &[Store<'_>], amount: Amount) -> Result<()> {
    Ok(generate::ray_logs(&stores[0].data().join("logs"), amount.files, amount.each)?)
}

/// Pictures of width `each` with the proportions 7:5.
pub fn images(stores: &[Store<'_>], amount: Amount) -> Result<()> {
    let height = amount.each * 5 / 7;
    Ok(generate::images(&stores[0].data().join("images"), amount.files, amount.each, height)?)
}

/// See [`generate::port_scan`].
pub fn port_scan(stores: &[Store<'_>], amount: Amount) -> Result<()> {
    Ok(generate::port_scan(&stores[0].data().join("scan.json"), amount.each)?)
}

/// See [`generate::access_logs`].
pub fn access_logs(stores: &[Store<'_>], amount: Amount) -> Result<()> {
    for (number, store) in (1..).zip(stores) {
        generate::access_logs(&store.data().join("logs"), number, amount.files, amount.each)?;
    }
    Ok(())
}

/// A source tree.
pub fn tree(stores: &[Store<'_>], amount: Amount) -> Result<()> {
    Ok(generate::source_tree(&stores[0].data().join("tree"), amount.files)?)
}

/// A source tree as an archive.
pub fn archive(stores: &[Store<'_>], amount: Amount) -> Result<()> {
    tree(stores, amount)?;
    let data = stores[0].data();
    on_server(&stores[0], "tar", &["-c", "-f", "tree.tar", "-C", "tree", "."])?;
    fs::remove_dir_all(data.join("tree")).context("cannot remove what was packed")
}

/// A small project with a text and a list.
pub fn project(stores: &[Store<'_>], amount: Amount) -> Result<()> {
    let project = stores[0].data().join("project");
    generate::source_tree(&project, amount.files)?;
    let text: String =
        (1..=40).map(|n| format!("Sentence {n} of what this is and how it is used.\n")).collect();
    fs::write(project.join("README"), text)?;
    let mut numbers = Numbers::seeded(30);
    let notes: String = (0..30).map(|_| format!("note {}\n", numbers.below(9))).collect();
    Ok(fs::write(project.join("notes.txt"), notes)?)
}

/// A file of incompressible bytes.
pub fn large(stores: &[Store<'_>], amount: Amount) -> Result<()> {
    let bytes = (amount.each as u64) << 20;
    Ok(generate::noise(&stores[0].data().join("large"), bytes)?)
}

/// A file of a few lines.
pub fn small(stores: &[Store<'_>], _: Amount) -> Result<()> {
    Ok(fs::write(stores[0].data().join("small"), "a line\nanother line\n")?)
}

/// Sorted numbers, one third of which is common to both servers.
pub fn sorted_lists(stores: &[Store<'_>], amount: Amount) -> Result<()> {
    for (number, store) in stores.iter().enumerate() {
        let mut out = BufWriter::new(File::create(store.data().join("sorted"))?);
        for line in 0..amount.each {
            // Multiples of three are common; the others belong to one server.
            let value = line * 3 + if line % 3 == 0 { 0 } else { number + 1 };
            writeln!(out, "{value:012} entry")?;
        }
        out.flush()?;
    }
    Ok(())
}

/// A repository with all sources committed, one pack, and `each` patches beside it.
pub fn repository(stores: &[Store<'_>], amount: Amount) -> Result<()> {
    let data = stores[0].data();
    generate::source_tree(&data.join("pristine"), amount.files)?;
    generate::patches(&data.join("patches"), amount.each, amount.files)?;
    let settings = [
        ("user.name", "A. Developer"),
        ("user.email", "developer@example.org"),
        // Background maintenance would count for a random run.
        ("gc.auto", "0"),
        ("maintenance.auto", "false"),
        // Makes git's index valid both on the server and through sshfs.
        ("core.checkStat", "minimal"),
        ("core.trustctime", "false"),
    ];
    let git = |arguments: &[&str]| {
        on_server(&stores[0], "git", &[&["-C", "pristine"], arguments].concat())
    };
    git(&["init", "-q", "-b", "main"])?;
    for (name, value) in settings {
        git(&["config", name, value])?;
    }
    git(&["add", "."])?;
    git(&["commit", "-q", "-m", "the sources"])?;
    git(&["gc", "-q"])
}

/// Runs a command in the workload's directory on its server.
pub fn on_server(store: &Store<'_>, program: &str, arguments: &[&str]) -> Result<()> {
    let mut command = store.host.command(program);
    command.current_dir(&store.directory).args(arguments);
    // Equal commits need equal dates.
    command.envs([("GIT_AUTHOR_DATE", DATE), ("GIT_COMMITTER_DATE", DATE)]);
    store.host.must(command)?;
    Ok(())
}

const DATE: &str = "2020-07-15T12:00:00+0000";

/// Restores the state before the first run.
pub fn reset(workload: &Workload, store: &Store<'_>) -> Result<()> {
    for result in workload.results {
        let path = store.data().join(result);
        let removed =
            if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", path.display()));
            }
            _ => {}
        }
    }
    match workload.copy {
        Some((copy, original)) => on_server(store, "cp", &["-a", original, copy]),
        None => Ok(()),
    }
}

/// Number of files and bytes below a directory.
pub fn extent(directory: &Path) -> io::Result<(u64, u64)> {
    let (mut files, mut bytes) = (0, 0);
    let mut open = vec![directory.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(&directory)? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            if metadata.is_dir() {
                open.push(entry.path());
            } else {
                files += 1;
                bytes += metadata.len();
            }
        }
    }
    Ok((files, bytes))
}
