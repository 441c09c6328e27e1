//! Rotation of the authority: nobody is locked out who renews in time, and nobody else is let in.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use posh_executor::{
    config::Identity,
    tls::{administer, authority::Authority, rotation::Forced},
};
use posh_proto::{executor::DescribeRequest, secret};
use posh_reach::tls::{self, credentials::Credentials};
use tempfile::TempDir;

use super::{TlsLab, identity, now_s};
use crate::harness::{Client, PATIENCE, pipeline, run};

fn all() -> [Identity; 3] {
    ["ada", "bob", "eve"].map(identity)
}

impl TlsLab {
    pub(super) fn rotate(&self) -> String {
        administer::rotate(self.directory.path()).unwrap()
    }

    pub(super) fn finish(&self, forced: Forced) -> Result<String, String> {
        administer::finish_rotation(self.directory.path(), forced)
            .map_err(|error| error.to_string())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The authority that signs, DER.
    fn signing(&self) -> Vec<u8> {
        Authority::at(self.directory.path()).certificates().unwrap()[0].to_vec()
    }

    fn load(&self, path: &Path) -> Credentials {
        Credentials::load(path, &self.host).unwrap()
    }

    async fn renew(&self, path: &Path) -> Result<Credentials, tls::TlsFault> {
        tls::enrol::renew(tls::channel(&self.host, path).await?, &self.host, path).await
    }

    async fn assert_works(&self, path: &Path) {
        let client = self.client_of(path).await;
        assert_eq!(
            run(&client, pipeline(&["echo x"]), Bytes::new()).await.text(),
            "x\n",
            "{}",
            path.display()
        );
    }

    async fn assert_refused(&self, path: &Path, words: &str) {
        assert_refused(&mut self.client_of(path).await, words).await;
    }

    /// A copy that is not renewed.
    fn kept(&self, path: &Path) -> PathBuf {
        let kept = path.with_extension("kept");
        secret::write(&kept, &fs::read_to_string(path).unwrap()).unwrap();
        kept
    }

    pub(super) fn change_register(&self, change: impl Fn(&mut serde_json::Value)) {
        let path = self.file("register.json");
        let mut register = serde_json::from_str(&secret::read(&path).unwrap()).unwrap();
        change(&mut register);
        secret::write(&path, &register.to_string()).unwrap();
    }

    /// Renewed certificates have become invalid.
    pub(super) fn a_day_later(&self) {
        self.change_register(|register| {
            for entry in register["certificates"].as_array_mut().unwrap() {
                if entry.get("superseded_s").is_some() {
                    entry["superseded_s"] = 1.into();
                }
            }
        });
    }
}

async fn assert_refused(client: &mut Client, words: &str) {
    let refused = client.describe(DescribeRequest { protocol: 1 }).await.unwrap_err();
    assert!(refused.message().contains(words), "{refused:?}");
}

/// Administrators' commands are programs of their own: the executor notices.
async fn wait_for_record(audit: &Path, event: &str, count: usize) {
    let event = format!("\"event\":\"{event}\"");
    let recorded = async {
        while fs::read_to_string(audit).unwrap().matches(&event).count() < count {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, recorded).await.expect("it is recorded");
}

fn make_older(path: &Path) {
    let before = SystemTime::now() - Duration::from_secs(2 * 3600);
    fs::File::open(path).unwrap().set_modified(before).unwrap();
}

#[tokio::test]
async fn whoever_renews_meanwhile_is_let_in_before_and_after() {
    let record = TempDir::new().unwrap();
    let audit = record.path().join("audit");
    let lab = TlsLab::with(&all(), |config| config.audit = Some(audit.clone())).await;
    let (ada, bob) = (lab.enrol("ada").await.unwrap(), lab.enrol("bob").await.unwrap());
    let server = lab.load(&ada).server();
    // As written by an executor of an older version.
    lab.change_register(|register| {
        for entry in register["certificates"].as_array_mut().unwrap() {
            assert!(entry.as_object_mut().unwrap().remove("authority").is_some());
        }
    });
    for rotation in 1..=2 {
        let former = lab.signing();
        let said = lab.rotate();
        assert!(said.contains("ada (1 not renewed), bob (1 not renewed)"), "{said}");
        assert!(
            administer::rotate(lab.directory.path())
                .unwrap_err()
                .to_string()
                .contains("is under way")
        );
        let old = lab.kept(&ada);
        lab.assert_works(&ada).await;
        // Twice: the renewed certificate may be of either authority.
        for _ in 0..2 {
            let renewed = lab.renew(&ada).await.unwrap();
            assert_eq!((renewed.authority, renewed.server), (lab.signing(), Some(server.clone())));
        }
        assert_ne!(former, lab.signing());
        wait_for_record(&audit, "rotation_begin", rotation).await;
        for path in [&ada, &bob] {
            lab.assert_works(path).await;
        }
        // An identity that has not come yet is not forgotten.
        let why = lab.finish(Forced::No).unwrap_err();
        assert!(why.contains("bob (1 not renewed)") && why.contains("--force"), "{why}");
        let listed = administer::list(lab.directory.path()).unwrap();
        assert!(listed.contains("the authority is being replaced; to renew yet: "), "{listed}");
        lab.renew(&bob).await.unwrap();
        let why = lab.finish(Forced::No).unwrap_err();
        assert!(why.contains("bob (1 renewed within a day)"), "{why}");
        lab.a_day_later();
        lab.finish(Forced::No).unwrap();
        for path in [&ada, &bob] {
            lab.assert_works(path).await;
            assert_eq!(lab.load(path).authority, lab.signing());
        }
        lab.assert_refused(&old, "posh enroll").await;
        assert!(lab.finish(Forced::No).unwrap_err().contains("no rotation"));
        wait_for_record(&audit, "rotation_end", rotation).await;
    }
}

#[tokio::test]
async fn a_token_is_good_until_the_end_of_a_rotation() {
    let lab = TlsLab::start(&all()).await;
    let before = lab.register().token_for("ada").unwrap();
    lab.rotate();
    let meanwhile = lab.register().token_for("bob").unwrap();
    let unused = lab.register().token_for("eve").unwrap();
    for (token, name) in [(&before, "ada"), (&meanwhile, "bob")] {
        let path = lab.enrol_with(token, name).await.unwrap();
        lab.assert_works(&path).await;
        assert_eq!(lab.load(&path).authority, lab.signing());
    }
    let why = lab.finish(Forced::No).unwrap_err();
    assert!(why.contains(": eve (1 tokens not used)\n"), "{why}");
    lab.finish(Forced::Yes).unwrap();
    let why = lab.enrol_with(&unused, "eve").await.unwrap_err().to_string();
    assert!(why.contains("is not the executor that has made this token"), "{why}");
    lab.enrol("eve").await.unwrap();
    lab.assert_works(&lab.credentials("ada")).await;
}

#[tokio::test]
async fn whoever_did_not_renew_is_told_to_enrol_anew() {
    let lab = TlsLab::start(&all()).await;
    let ada = lab.enrol("ada").await.unwrap();
    let (mut open, server) = (lab.client_of(&ada).await, lab.load(&ada).server());
    lab.rotate();
    let said = lab.finish(Forced::Yes).unwrap();
    assert!(said.contains("ada (1 not renewed)") && said.contains("enrolled anew"), "{said}");
    // On open connections, too.
    let words = "the authority that has signed the certificate of `ada` was replaced meanwhile; run `posh-executor enroll";
    assert_refused(&mut open, words).await;
    lab.assert_refused(&ada, words).await;
    assert!(lab.renew(&ada).await.is_err());
    lab.enrol("ada").await.unwrap();
    lab.assert_works(&ada).await;
    // Its own settings for that server are kept.
    assert_eq!(lab.load(&ada).server(), server);
}

#[tokio::test]
async fn the_former_authority_counts_for_nothing_after_the_end() {
    let lab = TlsLab::start(&all()).await;
    let ada = lab.enrol("ada").await.unwrap();
    let stolen = TempDir::new().unwrap();
    fs::copy(lab.file("ca.pem"), stolen.path().join("ca.pem")).unwrap();
    lab.rotate();
    lab.renew(&ada).await.unwrap();
    lab.finish(Forced::Yes).unwrap();
    // Signed with its stolen key, and even in the register.
    let valid_s = now_s() - 60..now_s() + 3600;
    let (eve, issued) = lab.forge("eve", stolen.path(), valid_s);
    lab.register().note("eve", &issued).unwrap();
    lab.assert_refused(&eve, "is not accepted").await;
    lab.assert_works(&ada).await;
}

/// It still trusts the former authority, which vouches for the next one.
#[tokio::test]
async fn a_workstation_of_an_older_version_is_let_in_before_and_after() {
    let lab = TlsLab::start(&all()).await;
    let former = lab.signing();
    lab.rotate();
    let ada = lab.issue("ada", now_s() - 60..now_s() + 3600);
    assert_eq!(lab.load(&ada).authority, former);
    lab.assert_works(&ada).await;
    lab.finish(Forced::No).unwrap();
    assert_ne!(lab.signing(), former);
    lab.assert_works(&ada).await;
}

#[tokio::test]
async fn an_interrupted_rotation_works_and_goes_on() {
    let lab = TlsLab::start(&all()).await;
    let (ada, bob) = (lab.enrol("ada").await.unwrap(), lab.enrol("bob").await.unwrap());
    // The executor's certificate was written, but not the authority that has signed it.
    lab.rotate();
    fs::remove_file(lab.file("ca-next.pem")).unwrap();
    lab.assert_works(&ada).await;
    lab.renew(&ada).await.unwrap();
    lab.enrol("eve").await.unwrap();
    lab.rotate();
    lab.assert_works(&ada).await;
    lab.renew(&ada).await.unwrap();
    let states: Vec<_> = ["ca.pem", "ca-next.pem", "server.pem"]
        .map(|name| (name, fs::read(lab.file(name)).unwrap()))
        .into();
    lab.finish(Forced::Yes).unwrap();
    // The register was written, and nothing else.
    for (name, content) in &states {
        secret::write(&lab.file(name), std::str::from_utf8(content).unwrap()).unwrap();
    }
    lab.assert_works(&ada).await;
    lab.assert_refused(&bob, "was replaced").await;
    lab.finish(Forced::No).unwrap();
    // All but the executor's certificate.
    secret::write(&lab.file("server.pem"), std::str::from_utf8(&states[2].1).unwrap()).unwrap();
    lab.assert_works(&ada).await;
    lab.enrol("bob").await.unwrap();
    lab.assert_works(&bob).await;
}

#[tokio::test]
async fn a_next_authority_that_others_can_write_is_none() {
    let lab = TlsLab::start(&all()).await;
    let (ada, bob) = (lab.enrol("ada").await.unwrap(), lab.enrol("bob").await.unwrap());
    lab.rotate();
    lab.renew(&ada).await.unwrap();
    lab.assert_works(&ada).await;
    // As somebody with write access to it would do.
    let other = TempDir::new().unwrap();
    administer::init(other.path(), Vec::new()).unwrap();
    let (eve, issued) = lab.forge("eve", other.path(), now_s() - 60..now_s() + 3600);
    lab.register().note("eve", &issued).unwrap();
    let next = lab.file("ca-next.pem");
    let sound = fs::read(&next).unwrap();
    fs::set_permissions(&next, fs::Permissions::from_mode(0o666)).unwrap();
    fs::write(&next, fs::read(other.path().join("ca.pem")).unwrap()).unwrap();
    lab.assert_refused(&eve, "is not accepted").await;
    for path in [&ada, &bob] {
        lab.assert_works(path).await;
    }
    let why = lab.renew(&bob).await.err().unwrap().to_string();
    assert!(why.contains("cannot issue a certificate"), "{why}");
    assert!(lab.finish(Forced::Yes).unwrap_err().contains("chmod 600"));
    fs::write(&next, sound).unwrap();
    fs::set_permissions(&next, fs::Permissions::from_mode(0o600)).unwrap();
    lab.renew(&bob).await.unwrap();
    lab.assert_works(&bob).await;
}

#[tokio::test]
async fn a_workstation_renews_once_it_is_shown_another_authority() {
    let lab = TlsLab::start(&all()).await;
    let ada = lab.enrol("ada").await.unwrap();
    let first = lab.load(&ada);
    make_older(&ada);
    drop(tls::channel(&lab.host, &ada).await.unwrap());
    assert_eq!(lab.load(&ada).certificate, first.certificate);
    lab.rotate();
    let (_, server) = tls::identified_channel(&lab.host, &ada).await.unwrap();
    let second = lab.load(&ada);
    assert_eq!((&second.authority, second.server()), (&lab.signing(), first.server()));
    make_older(&ada);
    let (_, same) = tls::identified_channel(&lab.host, &ada).await.unwrap();
    assert_eq!((lab.load(&ada).certificate, same), (second.certificate, server));
}

/// Whatever an executor shows: each time costs a key and a file.
#[tokio::test]
async fn a_workstation_renews_no_more_than_once_an_hour_for_that() {
    let lab = TlsLab::start(&all()).await;
    let ada = lab.enrol("ada").await.unwrap();
    lab.rotate();
    let first = lab.load(&ada).certificate;
    drop(tls::channel(&lab.host, &ada).await.unwrap());
    assert_eq!(lab.load(&ada).certificate, first);
}
