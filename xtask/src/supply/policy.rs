//! deny.toml, and its rules for packages. The file's format is cargo-deny's; other keys than these
//! are refused, so that no key is without effect.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use spdx::{Expression, Licensee, ParseMode};

use super::packages::{Locked, Package};

/// The file as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyFile {
    #[allow(
        dead_code,
        reason = "cargo-deny's: the targets are in the code, which builds for them"
    )]
    graph: toml::Table,
    licenses: Licenses,
    bans: Bans,
    sources: Sources,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Licenses {
    allow: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Bans {
    multiple_versions: String,
    wildcards: String,
    deny: Vec<Ban>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ban {
    #[serde(rename = "crate")]
    name: String,
    reason: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Sources {
    unknown_registry: String,
    unknown_git: String,
    allow_registry: Vec<String>,
}

/// Rules for the packages of the programs.
#[derive(Debug)]
pub struct Policy {
    licences: Vec<Licensee>,
    bans: Vec<Ban>,
    registries: BTreeSet<String>,
}

impl Policy {
    /// Reads the file's text.
    pub fn read(text: &str) -> Result<Self> {
        let file: PolicyFile = toml::from_str(text)
            .context("deny.toml has keys that are not checked, or lacks some")?;
        let settings = [
            (file.bans.multiple_versions.as_str(), "allow"),
            (&file.bans.wildcards, "deny"),
            (&file.sources.unknown_registry, "deny"),
            (&file.sources.unknown_git, "deny"),
        ];
        if let Some((found, wanted)) = settings.iter().find(|(found, wanted)| found != wanted) {
            bail!("deny.toml: \"{found}\" is not checked here, only \"{wanted}\"");
        }
        let licences = file.licenses.allow.iter();
        let licences = licences.map(|name| {
            Licensee::parse(name).with_context(|| format!("deny.toml: licence {name}"))
        });
        Ok(Self {
            licences: licences.collect::<Result<_>>()?,
            bans: file.bans.deny,
            registries: file.sources.allow_registry.into_iter().collect(),
        })
    }

    /// All violations.
    pub fn faults(&self, used: &[&Package], locked: &[Locked]) -> Vec<String> {
        let packages = used.iter().flat_map(|package| {
            [self.licence(package), self.ban(package), wildcard(package)].into_iter().flatten()
        });
        packages.chain(locked.iter().filter_map(|entry| self.source(entry))).collect()
    }

    fn licence(&self, package: &Package) -> Option<String> {
        let Package { name, version, license, .. } = package;
        let Some(license) = license else {
            return Some(format!("{name} {version}: no licence is given"));
        };
        // As in cargo-deny: some packages write `/` for OR.
        let expression = match Expression::parse_mode(license, ParseMode::LAX) {
            Ok(expression) => expression,
            Err(error) => return Some(format!("{name} {version}: {license}: {}", error.reason)),
        };
        let is_allowed = |wanted: &spdx::LicenseReq| {
            self.licences.iter().any(|allowed| allowed.satisfies(wanted))
        };
        (!expression.evaluate(is_allowed))
            .then(|| format!("{name} {version}: {license} is not allowed"))
    }

    fn ban(&self, package: &Package) -> Option<String> {
        let ban = self.bans.iter().find(|ban| ban.name == package.name)?;
        Some(format!("{} {}: banned: {}", package.name, package.version, ban.reason))
    }

    /// Violation of the rules for sources, for any entry of Cargo.lock and any target.
    fn source(&self, entry: &Locked) -> Option<String> {
        let Locked { name, version, source, checksum } = entry;
        let registry = source.as_deref()?.strip_prefix("registry+");
        match registry {
            Some(registry) if self.registries.contains(registry) && checksum.is_some() => None,
            _ => Some(format!("{name} {version}: from {}", source.as_deref().unwrap_or_default())),
        }
    }
}

/// Violation: a package of others is required in any version.
fn wildcard(package: &Package) -> Option<String> {
    let is_own = package.source.is_none();
    let found = package
        .dependencies
        .iter()
        .find(|needed| is_own && needed.req == "*" && needed.path.is_none());
    found.map(|needed| format!("{} wants any version of {}", package.name, needed.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supply::packages::{Dependency, Metadata};

    const TEXT: &str = r#"
        graph = {}
        [licenses]
        allow = ["MIT", "Apache-2.0 WITH LLVM-exception"]
        [bans]
        multiple-versions = "allow"
        wildcards = "deny"
        deny = [{ crate = "ring", reason = "there is another" }]
        [sources]
        unknown-registry = "deny"
        unknown-git = "deny"
        allow-registry = ["https://index"]
    "#;

    fn package(name: &str, license: Option<&str>) -> Package {
        Package {
            id: name.to_owned(),
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
            license: license.map(str::to_owned),
            source: Some("registry+https://index".to_owned()),
            dependencies: Vec::new(),
        }
    }

    #[test]
    fn licences_are_expressions() {
        let policy = Policy::read(TEXT).unwrap();
        for (license, is_allowed) in [
            (Some("MIT"), true),
            (Some("GPL-3.0-only"), false),
            (Some("GPL-3.0-only OR MIT"), true),
            (Some("MIT/GPL-2.0"), true),
            (Some("MIT AND GPL-3.0-only"), false),
            (Some("Apache-2.0"), false),
            (Some("Apache-2.0 WITH LLVM-exception"), true),
            (Some("whatever you like"), false),
            (None, false),
        ] {
            assert_eq!(policy.licence(&package("a", license)).is_none(), is_allowed, "{license:?}");
        }
    }

    #[test]
    fn bans_sources_and_wildcards() {
        let policy = Policy::read(TEXT).unwrap();
        assert!(
            policy.ban(&package("ring", Some("MIT"))).is_some()
                && policy.ban(&package("rings", None)).is_none()
        );
        let locked = |source: Option<&str>, checksum: Option<&str>| Locked {
            name: "a".to_owned(),
            version: "1.0.0".to_owned(),
            source: source.map(str::to_owned),
            checksum: checksum.map(str::to_owned),
        };
        assert!(policy.source(&locked(None, None)).is_none(), "the workspace's own");
        assert!(policy.source(&locked(Some("registry+https://index"), Some("00"))).is_none());
        for (source, checksum) in [
            ("registry+https://index", None),
            ("registry+https://other", Some("00")),
            ("git+https://index#0", None),
            ("https://index", Some("00")),
        ] {
            assert!(policy.source(&locked(Some(source), checksum)).is_some(), "{source}");
        }
        let dependency = |req: &str, path: Option<&str>| Dependency {
            name: "b".to_owned(),
            req: req.to_owned(),
            path: path.map(Into::into),
        };
        let own = |dependency| Package {
            source: None,
            dependencies: vec![dependency],
            ..package("a", None)
        };
        assert!(wildcard(&own(dependency("*", None))).is_some());
        assert!(
            wildcard(&own(dependency("*", Some("/b")))).is_none()
                && wildcard(&own(dependency("^1", None))).is_none()
        );
    }

    #[test]
    fn keys_that_nobody_checks_are_refused() {
        for (from, to) in [
            ("wildcards = \"deny\"", "wildcards = \"warn\""),
            ("unknown-git = \"deny\"", "unknown-git = \"allow\""),
            ("allow = [", "exceptions = []\nallow = ["),
            ("graph = {}", "advisories = {}\ngraph = {}"),
            ("\"MIT\"", "\"MITT\""),
        ] {
            assert!(Policy::read(&TEXT.replacen(from, to, 1)).is_err(), "{to}");
        }
    }

    #[test]
    fn this_workspace_is_as_its_file_wants_it() {
        let metadata = Metadata::read().unwrap();
        let text = std::fs::read_to_string(metadata.root().join("deny.toml")).unwrap();
        let locked = crate::supply::packages::locked(metadata.root()).unwrap();
        let used = metadata.used().unwrap();
        assert!(locked.len() > 100 && used.len() > 100);
        assert_eq!(Policy::read(&text).unwrap().faults(&used, &locked), Vec::<String>::new());
    }
}
