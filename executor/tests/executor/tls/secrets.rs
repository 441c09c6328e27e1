//! Files of secrets that others can read, or that belong to others, are not used.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, chown},
    path::Path,
};

use posh_executor::{config::Identity, tls::administer};
use posh_proto::executor::DescribeRequest;
use posh_reach::tls::{self, TlsFault};
use tempfile::TempDir;
use tokio::net::TcpListener;

use super::{TlsLab, identity};
use crate::harness::config;

/// Another user's id.
const STRANGER: u32 = 12345;

fn ada() -> [Identity; 1] {
    [identity("ada")]
}

/// Both ways in which a file is no secret, and the repair of each.
fn spoil(path: &Path, mut check: impl FnMut(&str)) {
    for mode in [0o640, 0o602] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        check("chmod 600");
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    chown(path, Some(STRANGER), None).unwrap();
    check("belongs to user 12345");
    chown(path, Some(0), None).unwrap();
}

#[tokio::test]
async fn an_executor_does_not_start_with_open_secrets() {
    let directory = TempDir::new().unwrap();
    administer::init(directory.path(), vec!["127.0.0.1".to_owned()]).unwrap();
    let mut config = config(directory.path());
    config.tls = Some(posh_executor::tls::TlsConfig { directory: directory.path().to_owned() });
    administer::rotate(directory.path()).unwrap();
    for name in ["ca.pem", "ca-next.pem", "server.pem", "register.json"] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let path = directory.path().join(name);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let started = tokio::time::timeout(
            crate::harness::PATIENCE,
            posh_executor::run(config.clone(), listener, std::future::pending()),
        );
        let why = started.await.expect("it ends at once").unwrap_err().to_string();
        assert!(why.contains(name) && why.contains("chmod 600"), "{why}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    }
}

#[test]
fn an_administrators_commands_read_no_open_secret() {
    let directory = TempDir::new().unwrap();
    administer::init(directory.path(), Vec::new()).unwrap();
    for name in ["ca.pem", "register.json"] {
        spoil(&directory.path().join(name), |words| {
            let why = administer::enroll(directory.path(), "ada").unwrap_err().to_string();
            assert!(why.contains(words) && why.contains(name), "{why}");
        });
    }
    assert!(administer::enroll(directory.path(), "ada").is_ok());
}

#[tokio::test]
async fn a_register_that_others_can_write_lets_nobody_in() {
    let lab = TlsLab::start(&ada()).await;
    let mut client = lab.client("ada").await;
    let path = lab.directory.path().join("register.json");
    for spoilt in [false, true, false, true, false] {
        fs::set_permissions(&path, fs::Permissions::from_mode(if spoilt { 0o666 } else { 0o600 }))
            .unwrap();
        match client.describe(DescribeRequest { protocol: 1 }).await {
            Ok(_) => assert!(!spoilt),
            Err(status) => assert!(spoilt && status.message().contains("register"), "{status:?}"),
        }
    }
}

#[tokio::test]
async fn a_workstation_uses_no_open_key() {
    let lab = TlsLab::start(&ada()).await;
    let path = lab.enrol("ada").await.unwrap();
    for mode in [0o640, 0o604, 0o666] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let why = tls::channel(&lab.host, &path).await.unwrap_err();
        assert!(matches!(why, TlsFault::Secret(_)), "{why}");
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    assert!(tls::channel(&lab.host, &path).await.is_ok());
    chown(&path, Some(STRANGER), None).unwrap();
    let why = tls::channel(&lab.host, &path).await.unwrap_err().to_string();
    assert!(why.contains("belongs to user 12345"), "{why}");
}

#[test]
fn an_authority_is_not_replaced() {
    let directory = TempDir::new().unwrap();
    administer::init(directory.path(), Vec::new()).unwrap();
    let before = fs::read(directory.path().join("ca.pem")).unwrap();
    let why = administer::init(directory.path(), Vec::new()).unwrap_err().to_string();
    assert!(why.contains("posh-executor renew"), "{why}");
    assert_eq!(fs::read(directory.path().join("ca.pem")).unwrap(), before);
}
