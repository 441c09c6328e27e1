//! The supply chain: rules for packages of the programs ([`policy`]), and a list of them
//! ([`sbom`]).

pub mod packages;
pub mod policy;
pub mod sbom;

use std::fs;

use anyhow::{Context, Result, ensure};

use self::packages::Metadata;
use self::policy::Policy;
use crate::cargo;

/// Checks licences, bans and sources; all faults are one error.
///
/// cargo-deny does the same and checks advisories. Its build would add many minutes to a test of
/// twenty, and its database of advisories must be fetched, so it runs only where it is installed.
pub fn check() -> Result<()> {
    let metadata = Metadata::read()?;
    let path = metadata.root().join("deny.toml");
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let policy = Policy::read(&text)?;
    let used = metadata.used()?;
    let faults = policy.faults(&used, &packages::locked(metadata.root())?);
    ensure!(faults.is_empty(), "deny.toml forbids:\n{}", faults.join("\n"));
    println!("supply chain: {} packages are as deny.toml wants them", used.len());
    with_cargo_deny()
}

fn with_cargo_deny() -> Result<()> {
    let is_there =
        cargo::command(&["deny", "--version"]).output().is_ok_and(|output| output.status.success());
    if !is_there {
        println!(
            "advisories: NOT looked for: cargo-deny is not installed (cargo install cargo-deny \
             --locked)"
        );
        return Ok(());
    }
    cargo::must(cargo::command(&[
        "deny",
        "--locked",
        "--offline",
        "check",
        "bans",
        "licenses",
        "sources",
    ]))?;
    // The database is fetched if there is a network; otherwise the last one is used.
    let advisories = [
        &["deny", "--locked", "check", "advisories"][..],
        &["deny", "--locked", "--offline", "check", "advisories"],
    ];
    let fetch = cargo::command(&["deny", "--locked", "fetch", "db"]).output();
    match fetch.is_ok_and(|output| output.status.success()) {
        true => cargo::must(cargo::command(advisories[0])),
        false if has_database() => cargo::must(cargo::command(advisories[1])),
        false => {
            println!("advisories: NOT looked for: their database can't be had here");
            Ok(())
        }
    }
}

/// Returns true if some version of the advisory database exists.
fn has_database() -> bool {
    let home = std::env::var_os("CARGO_HOME").map(std::path::PathBuf::from);
    let home = home.or_else(|| {
        std::env::var_os("HOME").map(|home| std::path::Path::new(&home).join(".cargo"))
    });
    home.is_some_and(|home| {
        fs::read_dir(home.join("advisory-dbs")).is_ok_and(|mut entries| entries.next().is_some())
    })
}
