//! The bill of materials of a release (CycloneDX 1.5, JSON): every package that becomes part of a
//! program or builds one, with its licence and the checksum by which cargo has verified it. It is
//! reproducible: a release always gives the same bytes.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use serde_json::{Value, json};

use super::packages::{Locked, Metadata, Package};

/// The packages whose programs are released.
pub const RELEASED: [&str; 3] = ["posh", "posh-gateway", "posh-executor"];

/// The bill of materials.
pub fn document(metadata: &Metadata, locked: &[Locked], version: &str) -> Result<Value> {
    let checksums: BTreeMap<(&str, &str), &str> = locked
        .iter()
        .filter_map(|entry| {
            Some(((entry.name.as_str(), entry.version.as_str()), entry.checksum.as_deref()?))
        })
        .collect();
    let mut components = Vec::new();
    let mut dependencies = Vec::new();
    for (part, needed) in metadata.parts_of(&RELEASED)? {
        components.push(component(
            part,
            checksums.get(&(part.name.as_str(), part.version.as_str())).copied(),
        ));
        let on: BTreeSet<String> = needed.into_iter().map(reference).collect();
        dependencies.push(json!({ "ref": reference(part), "dependsOn": on }));
    }
    let by =
        |key: &'static str| move |value: &Value| value[key].as_str().unwrap_or_default().to_owned();
    components.sort_by_key(by("bom-ref"));
    dependencies.sort_by_key(by("ref"));
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "name": "posh",
                "version": version,
                "bom-ref": "posh-release",
            }
        },
        "components": components,
        "dependencies": dependencies,
    }))
}

/// Unique name of a package in the document (purl).
fn reference(package: &Package) -> String {
    format!("pkg:cargo/{}@{}", package.name, package.version.replace('+', "%2B"))
}

fn component(package: &Package, checksum: Option<&str>) -> Value {
    let reference = reference(package);
    let mut component = json!({
        "type": if package.source.is_none() { "application" } else { "library" },
        "bom-ref": reference,
        "name": package.name,
        "version": package.version,
        "purl": reference,
    });
    if let Some(license) = &package.license {
        // SPDX has no `/`, which some packages write for OR.
        component["licenses"] =
            json!([{ "expression": license.replace(" / ", " OR ").replace('/', " OR ") }]);
    }
    if let Some(checksum) = checksum {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
    }
    component
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supply::packages;

    #[test]
    fn each_package_of_a_program_is_there_with_the_lock_s_checksum() {
        let metadata = Metadata::read().unwrap();
        let locked = packages::locked(metadata.root()).unwrap();
        let document = document(&metadata, &locked, "1.2.3").unwrap();
        let components = document["components"].as_array().unwrap();
        let names: BTreeSet<&str> =
            components.iter().map(|c| c["name"].as_str().unwrap()).collect();
        for name in [
            "posh",
            "posh-executor",
            "posh-gateway",
            "posh-volume",
            "rustls",
            "aws-lc-sys",
            "tonic",
            "fuser",
        ] {
            assert!(names.contains(name), "{name}");
        }
        // What only tests and chores use is part of no program.
        for name in ["posh-integration", "posh-bench", "xtask", "proptest", "spdx", "vt100", "ring"]
        {
            assert!(!names.contains(name), "{name}");
        }
        let references: BTreeSet<&str> =
            components.iter().map(|c| c["bom-ref"].as_str().unwrap()).collect();
        assert_eq!(references.len(), components.len(), "each has one name");
        for component in components {
            let (name, version) =
                (component["name"].as_str().unwrap(), component["version"].as_str().unwrap());
            let entry = locked.iter().find(|entry| entry.name == name && entry.version == version);
            let entry = entry.unwrap_or_else(|| panic!("{name} {version} is not in Cargo.lock"));
            assert_eq!(
                component["hashes"][0]["content"].as_str(),
                entry.checksum.as_deref(),
                "{name}"
            );
            assert_eq!(entry.checksum.is_none(), entry.source.is_none(), "{name}");
            let license = component["licenses"][0]["expression"].as_str().unwrap();
            assert!(spdx::Expression::parse(license).is_ok(), "{name}: {license}");
        }
        for dependency in document["dependencies"].as_array().unwrap() {
            assert!(references.contains(dependency["ref"].as_str().unwrap()));
            assert!(
                dependency["dependsOn"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .all(|on| references.contains(on.as_str().unwrap()))
            );
        }
    }
}
