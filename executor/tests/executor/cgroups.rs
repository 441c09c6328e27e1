//! A cgroup per run, in hierarchies of version 2 that the tests mount where no other process sees
//! them. Bounds of memory and processes depend on the system: a machine may have these controllers
//! in version 1.

use std::{fs, path::PathBuf, process::Command, time::Duration};

use bytes::Bytes;
use posh_proto::{PROTOCOL_VERSION, executor::DescribeRequest};

use crate::{harness::*, lifecycle::Program};

/// Mounts the hierarchy at `$1`, makes the cgroup `$2` in it, sets its attribute `$3` and enters it
/// if `$3` is not empty, and executes the rest.
const IN_A_CGROUP: &str = "mount -t cgroup2 none \"$1\" && mkdir -p \"$2\" || exit 90
if [ -n \"$3\" ]; then setfattr -n \"$3\" -v 1 \"$2\" && echo 0 > \"$2/cgroup.procs\" || exit 91; fi
shift 3; exec \"$@\"";

/// Removes a cgroup that the tests have left.
const REMOVE: &str = "mount -t cgroup2 none \"$1\" && find \"$2\" -depth -type d -exec rmdir {} +";

/// A cgroup for one test.
struct Delegated {
    mount: tempfile::TempDir,
    path: PathBuf,
}

impl Delegated {
    fn new(test: &str) -> Self {
        let mount = tempfile::tempdir().unwrap();
        let path = mount.path().join(format!("posh-test-{test}-{}", std::process::id()));
        Self { mount, path }
    }

    fn script(&self, script: &str) -> Command {
        let mut command = Command::new("unshare");
        command.args(["-m", "--propagation", "private", "sh", "-c", script, "sh"]);
        command.args([self.mount.path(), &self.path]);
        command
    }

    /// The executor's command, in the cgroup if that has an attribute `mark`.
    fn executor(&self, mark: &str) -> Command {
        let mut command = self.script(IN_A_CGROUP);
        command.args([mark, env!("CARGO_BIN_EXE_posh-executor")]);
        command
    }

    /// The cgroups below it, as the executor sees them.
    fn inside(&self, executor: &Program) -> Vec<String> {
        let root = PathBuf::from(format!("/proc/{}/root", executor.pid()));
        let entries = fs::read_dir(root.join(self.path.strip_prefix("/").unwrap())).unwrap();
        let directories =
            entries.map(Result::unwrap).filter(|entry| entry.file_type().unwrap().is_dir());
        directories.map(|entry| entry.file_name().into_string().unwrap()).collect()
    }
}

impl Drop for Delegated {
    fn drop(&mut self) {
        let _ = self.script(REMOVE).status();
    }
}

/// Runs have a cgroup each, with all that they start, and none is left.
async fn each_run_has_one(delegated: &Delegated, executor: &mut Program) {
    let mut client = connect(executor.address()).await;
    let about =
        client.describe(DescribeRequest { protocol: PROTOCOL_VERSION }).await.unwrap().into_inner();
    assert!(about.confinement.contains(", cgroup"), "{}", about.confinement);
    let line = ["sh", "-c", "cat /proc/self/cgroup; sleep 1000 > /dev/null 2>&1 &"];
    let mut seen = Vec::new();
    for _ in 0..2 {
        let outcome = run(&client, command(&line), Bytes::new()).await;
        let text = outcome.text();
        let own = text
            .lines()
            .find_map(|line| line.strip_prefix("0::"))
            .unwrap_or_else(|| panic!("{text}"));
        let (above, name) = own.rsplit_once('/').unwrap();
        assert!(
            name.starts_with("run-") && delegated.path.ends_with(above.trim_start_matches('/')),
            "{own}"
        );
        seen.push(name.to_owned());
    }
    assert_ne!(seen[0], seen[1]);
    let gone = async {
        while delegated.inside(executor) != ["executor"] {
            tokio::task::yield_now().await;
        }
    };
    let gone = tokio::time::timeout(Duration::from_secs(20), gone).await;
    assert!(gone.is_ok(), "still there: {:?}", delegated.inside(executor));
}

#[tokio::test]
async fn the_configuration_names_one() {
    let (store, delegated) = (tempfile::tempdir().unwrap(), Delegated::new("named"));
    let line = format!("cgroup = {:?}\n", delegated.path);
    let mut executor = Program::with(&mut delegated.executor(""), store.path(), &line);
    each_run_has_one(&delegated, &mut executor).await;
}

#[tokio::test]
async fn the_system_has_delegated_one() {
    let (store, delegated) = (tempfile::tempdir().unwrap(), Delegated::new("delegated"));
    let mut executor = Program::start(&mut delegated.executor("user.delegate"), store.path());
    each_run_has_one(&delegated, &mut executor).await;
}

#[tokio::test]
async fn no_other_is_touched() {
    let (store, delegated) = (tempfile::tempdir().unwrap(), Delegated::new("other"));
    // The executor is in it, but it is not marked as delegated.
    let mut executor = Program::start(&mut delegated.executor("user.somebody"), store.path());
    let mut client = connect(executor.address()).await;
    let about =
        client.describe(DescribeRequest { protocol: PROTOCOL_VERSION }).await.unwrap().into_inner();
    assert!(!about.confinement.contains("cgroup"), "{}", about.confinement);
    assert_eq!(run(&client, command(&["echo", "x"]), Bytes::new()).await.text(), "x\n");
    assert_eq!(delegated.inside(&executor), Vec::<String>::new());
}

#[test]
fn one_that_is_none_is_refused() {
    let store = tempfile::tempdir().unwrap();
    let line = format!("cgroup = {:?}\n", store.path());
    let mut executor =
        Program::with(&mut Command::new(env!("CARGO_BIN_EXE_posh-executor")), store.path(), &line);
    let said = executor.until("cannot read the cgroup ");
    assert!(said.contains("names a cgroup of version 2 that is this program's to use"), "{said}");
}
