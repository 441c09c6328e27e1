//! The packages of the programs, from `cargo metadata`, and their checksums, from Cargo.lock.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::cargo;

/// The targets that programs are built for.
pub const TARGETS: [&str; 2] = ["x86_64-unknown-linux-gnu", "x86_64-unknown-linux-musl"];

/// The workspace and all packages that it depends on.
#[derive(Debug, Deserialize)]
pub struct Metadata {
    pub packages: Vec<Package>,
    resolve: Resolve,
    workspace_root: PathBuf,
}

/// One package of one version.
#[derive(Debug, Clone, Deserialize)]
pub struct Package {
    pub id: String,
    pub name: String,
    pub version: String,
    pub license: Option<String>,
    /// `None`: a package of the workspace.
    pub source: Option<String>,
    pub dependencies: Vec<Dependency>,
}

/// A dependency of a package, as declared.
#[derive(Debug, Clone, Deserialize)]
pub struct Dependency {
    pub name: String,
    pub req: String,
    pub path: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Resolve {
    nodes: Vec<PackageNode>,
}

#[derive(Debug, Deserialize)]
struct PackageNode {
    id: String,
    deps: Vec<Edge>,
}

#[derive(Debug, Deserialize)]
struct Edge {
    pkg: String,
    dep_kinds: Vec<EdgeKind>,
}

#[derive(Debug, Deserialize)]
struct EdgeKind {
    /// `None`, `build` or `dev`.
    kind: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Lock {
    package: Vec<Locked>,
}

/// An entry of Cargo.lock.
#[derive(Debug, Deserialize)]
pub struct Locked {
    pub name: String,
    pub version: String,
    pub source: Option<String>,
    pub checksum: Option<String>,
}

impl Metadata {
    /// Metadata of this workspace, by Cargo.lock.
    pub fn read() -> Result<Self> {
        let mut command = cargo::command(&["metadata", "--format-version", "1", "--locked"]);
        for target in TARGETS {
            command.args(["--filter-platform", target]);
        }
        let output = command.output().context("cannot start cargo metadata")?;
        ensure!(
            output.status.success(),
            "cargo metadata failed: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        serde_json::from_slice(&output.stdout).context("cargo metadata printed something else")
    }

    /// Directory of Cargo.lock and deny.toml.
    pub fn root(&self) -> &Path {
        &self.workspace_root
    }

    /// Packages that become part of a program of these packages, or build one; each with its
    /// dependencies.
    pub fn parts_of(&self, names: &[&str]) -> Result<Vec<(&Package, Vec<&Package>)>> {
        let options = names.iter().flat_map(|name| ["--package", *name]);
        let built = built(
            &[&["--edges", "normal,build"], options.collect::<Vec<_>>().as_slice()].concat(),
        )?;
        let is_built =
            |package: &&Package| built.contains(&(package.name.clone(), package.version.clone()));
        let parts: BTreeMap<&str, &Package> = self
            .packages
            .iter()
            .filter(is_built)
            .map(|package| (package.id.as_str(), package))
            .collect();
        let needed = |id: &str| {
            let edges = self
                .resolve
                .nodes
                .iter()
                .find(|node| node.id == id)
                .map(|node| node.deps.as_slice());
            let edges = edges.unwrap_or_default().iter();
            let edges = edges.filter(|edge| {
                edge.dep_kinds.iter().any(|kind| kind.kind.as_deref() != Some("dev"))
            });
            edges.filter_map(|edge| parts.get(edge.pkg.as_str()).copied()).collect()
        };
        Ok(parts.iter().map(|(id, package)| (*package, needed(id))).collect())
    }

    /// Packages of which anything is built, for tests and tasks too.
    pub fn used(&self) -> Result<Vec<&Package>> {
        let built = built(&["--workspace", "--edges", "normal,build,dev"])?;
        let is_built =
            |package: &&Package| built.contains(&(package.name.clone(), package.version.clone()));
        Ok(self.packages.iter().filter(is_built).collect())
    }
}

/// Names and versions by `cargo tree`, which resolves the features of each target; `cargo metadata`
/// also lists packages that are never built.
fn built(options: &[&str]) -> Result<BTreeSet<(String, String)>> {
    let mut command = cargo::command(&["tree", "--locked", "--prefix", "none", "--format", "{p}"]);
    for target in TARGETS {
        command.args(["--target", target]);
    }
    let output = command.args(options).output().context("cannot start cargo tree")?;
    ensure!(
        output.status.success(),
        "cargo tree failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).context("cargo tree printed something else")?;
    let package = |line: &str| {
        let mut words = line.split(' ');
        Some((words.next()?.to_owned(), words.next()?.strip_prefix('v')?.to_owned()))
    };
    Ok(text.lines().filter_map(package).collect())
}

/// The entries of the workspace's Cargo.lock.
pub fn locked(root: &Path) -> Result<Vec<Locked>> {
    let text = fs::read_to_string(root.join("Cargo.lock")).context("cannot read Cargo.lock")?;
    Ok(toml::from_str::<Lock>(&text).context("Cargo.lock is not as cargo writes it")?.package)
}
