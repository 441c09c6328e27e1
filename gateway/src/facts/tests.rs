//! Tables of commands and what is known of them, over a made-up list of mounts: no process runs,
//! and nothing is connected to.

use std::{collections::HashSet, fmt::Write as _, path::PathBuf, sync::Arc};

use fs_mapper::{config::Config, mountinfo::MountInfo};

use super::*;
use crate::{
    enlisted::Descriptor,
    plan::Site,
    written::{self, ChangedListing},
};

/// A table with a mount of each kind at `/m/KIND`, of one executor, and others of another below `/o`.
struct Facts {
    table: MountTable,
    library: Library,
    executors: Executors,
    own_files: Shares,
    /// The mount namespace's number.
    namespace: u64,
}

const KINDS: [(&str, &str); 4] =
    [("ssh", "fuse.sshfs"), ("vol", "fuse.posh"), ("nfs", "nfs4"), ("bind", "ext4")];

/// An sshfs mount that can't be made to show what changes on its server.
const KEPT: &str = "/o/kept";

impl Facts {
    fn new() -> Self {
        let mut info = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n".to_owned();
        let mut config = "[[executor]]\nname='one'\naddress='http://127.0.0.1:1'\n\
                          [[executor]]\nname='two'\naddress='http://127.0.0.1:1'\n"
            .to_owned();
        let others = [("/o/ssh", "fuse.sshfs", "two"), (KEPT, "fuse.sshfs", "two")];
        let ours = KINDS.map(|(kind, fs_type)| (format!("/m/{kind}"), fs_type, "one"));
        let all = ours.iter().map(|(path, fs_type, owner)| (path.as_str(), *fs_type, *owner));
        for (number, (path, fs_type, owner)) in (2..).zip(all.chain(others)) {
            writeln!(info, "{number} 1 0:{number} / {path} rw - {fs_type} source rw").unwrap();
            let coherence = if fs_type == "ext4" { "coherence='bind'\n" } else { "" };
            writeln!(
                config,
                "[[mount]]\npath='{path}'\nexecutor='{owner}'\nexport='x'\n{coherence}"
            )
            .unwrap();
        }
        let mut config = Config::parse(&config, Path::new("mounts.toml")).unwrap();
        for mount in &mut config.mounts {
            mount.shows_changes = mount.path != Path::new(KEPT);
        }
        let annotations = Path::new(env!("CARGO_MANIFEST_DIR")).join("../annotations/commands");
        let (library, mistakes) = Library::load(&[annotations]);
        assert!(mistakes.is_empty(), "{mistakes:?}");
        Self {
            table: MountTable::new(&config, &MountInfo::parse(info.as_bytes()).unwrap()),
            library,
            executors: Executors::start(&config, &Arc::new(Vec::new())),
            own_files: Shares::default(),
            namespace: 7,
        }
    }

    fn world(&self) -> World<'_> {
        World {
            table: &self.table,
            library: &self.library,
            executors: &self.executors,
            mount_namespace: self.namespace,
            mounts_have_changed: false,
            own_files: &self.own_files,
        }
    }

    /// A command by its words, in `/`, under the usual umask.
    fn stage(&self, words: &str) -> Enlisted {
        let argv: Vec<_> = words.split(' ').map(Into::into).collect();
        Enlisted {
            name: words.split(' ').next().unwrap_or_default().to_owned(),
            argv,
            cwd: PathBuf::from("/"),
            cwd_mount_id: None,
            umask: 0o022,
            mount_namespace: self.namespace,
            ..Enlisted::from(posh_proto::stage::Enlist::default())
        }
    }

    /// Names of the executors that own a command's files, or the reason for running it here.
    fn read(&self, stage: &Enlisted) -> Result<Vec<String>, LocalReason> {
        let reading = read(&self.world(), stage)?;
        let name = |place: &PathOwner| match place {
            PathOwner::At(id, ..) => self.executors.get(*id).name.as_str().to_owned(),
            PathOwner::Here(reason) => reason.to_string(),
        };
        Ok(reading.places.iter().flatten().chain(&reading.cwd).map(name).collect())
    }

    fn flows(&self, stage: &Enlisted) -> StageFacts {
        let (shared_inputs, shared_outputs) = (HashSet::new(), HashSet::new());
        let around = Surroundings {
            edges: &[],
            index: 0,
            shared_inputs: &shared_inputs,
            shared_outputs: &shared_outputs,
        };
        stage_facts(&self.world(), stage, &read(&self.world(), stage), &around)
    }
}

fn file(fd: u32, path: &str) -> Descriptor {
    let opened = posh_proto::stage::Descriptor {
        fd,
        kind: posh_proto::stage::descriptor::Kind::File.into(),
        path: path.as_bytes().to_vec().into(),
        flags: u32::from(fd > 0),
        inode: u64::from(fd),
        ..Default::default()
    };
    Descriptor { mount_id: None, is_older: false, ..Descriptor::from(&opened) }
}

#[tokio::test]
async fn a_command_belongs_to_who_owns_its_files() {
    let facts = Facts::new();
    let owned: [(&str, &[&str]); 6] = [
        ("cat /m/ssh/a /m/vol/b", &["one", "one"]),
        ("cat /m/ssh/a /o/ssh/b", &["one", "two"]),
        ("grep -c x /m/nfs/a", &["one"]),
        ("sort -o /m/ssh/out /m/ssh/in", &["one", "one"]),
        ("grep x", &[]),
        ("ls /m/bind", &["one"]),
    ];
    for (words, owners) in owned {
        assert_eq!(facts.read(&facts.stage(words)).unwrap(), owners_of(owners), "{words}");
    }
    let places = facts.read(&facts.stage("cat /etc/passwd /m/ssh/a")).unwrap();
    assert!(places[0].contains("not on a mount"), "{places:?}");
}

fn owners_of(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[tokio::test]
async fn a_command_runs_here_where_its_mount_shows_other_attributes() {
    let facts = Facts::new();
    let rows = [
        ("find /m/ssh -mtime 1", Some("which a fuse.sshfs mount does not show as the server does")),
        ("find /m/vol -mtime 1", None),
        ("ls -i /m/vol", None),
        ("ls -i /m/nfs", Some("shows inode numbers")),
        ("du /m/ssh", Some("shows inode numbers")),
        ("wc -c /m/ssh/f", None),
    ];
    for (words, expected) in rows {
        match (facts.read(&facts.stage(words)), expected) {
            (Ok(_), None) => {}
            (Err(reason), Some(part)) => {
                assert!(reason.to_string().contains(part), "{words}: {reason}")
            }
            (other, _) => panic!("{words}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_process_that_is_not_as_the_gateway_knows_runs_here() {
    let facts = Facts::new();
    let variable = |name: &str, value: &str| vec![(name.into(), value.into())];
    let plain = || facts.stage("sort -o /m/ssh/out /m/ssh/in");
    let rows = [
        (Enlisted { mount_namespace: 8, ..plain() }, "another mount namespace"),
        (Enlisted { cwd: "gone".into(), ..plain() }, "was deleted"),
        (Enlisted { cwd_mount_id: Some(999), ..plain() }, "lies beneath a mount"),
        (Enlisted { env: variable("LD_PRELOAD", "x.so"), ..plain() }, "LD_PRELOAD changes"),
        (Enlisted { env: variable("LOCPATH", "/l"), ..plain() }, "LOCPATH changes"),
        (facts.stage("no-such-command /m/ssh/f"), "no-such-command"),
    ];
    for (stage, part) in rows {
        let reason = facts.read(&stage).unwrap_err().to_string();
        assert!(reason.contains(part), "{part}: {reason}");
    }
    let changed = World { mounts_have_changed: true, ..facts.world() };
    assert!(read(&changed, &plain()).unwrap_err().to_string().contains("mounts have changed"));
    let empty = Enlisted { env: variable("LD_PRELOAD", ""), ..plain() };
    assert!(facts.read(&empty).is_ok());
}

#[tokio::test]
async fn what_a_stage_reads_and_writes_is_where_its_file_is() {
    let facts = Facts::new();
    let with = |words: &str, descriptors: Vec<Descriptor>| {
        facts.flows(&Enlisted { descriptors, ..facts.stage(words) })
    };
    let one = Flow::At(Site::Executor(ExecutorId(0)));
    let here = Flow::At(Site::Here);
    let read_there = with("grep x", vec![file(0, "/m/ssh/in"), file(1, "/tmp/out")]);
    assert_eq!((read_there.input, read_there.output), (one, here));
    let written_there = with("grep x", vec![file(0, "/tmp/in"), file(1, "/m/ssh/out")]);
    assert_eq!((written_there.input, written_there.output), (here, one));
    let kept = format!("{KEPT}/out");
    let written_here = with("cat /o/ssh/a", vec![file(1, &kept)]);
    assert_eq!((written_here.need, written_here.output), (Need::At(ExecutorId(1)), here));
    let older = Descriptor { is_older: true, ..file(1, "/m/ssh/out") };
    assert_eq!(with("grep x", vec![file(0, "/m/ssh/in"), older]).output, here);
    let removed = with("grep x", vec![file(0, "/m/ssh/in (deleted)"), file(1, "/tmp/out")]);
    assert_eq!(removed.input, here);
    let older_input = Descriptor { is_older: true, ..file(0, "/m/ssh/in") };
    let refused = with("grep x", vec![older_input]);
    assert!(matches!(refused.need, Need::Here(why) if why.to_string().contains("opened before")));
    let device = Descriptor { kind: DescriptorKind::Other, ..file(1, "/dev/full") };
    let refused = with("cat /m/ssh/a", vec![device]);
    assert!(matches!(refused.need, Need::Here(why) if why.to_string().contains("/dev/full")));
}

#[tokio::test]
async fn a_stage_needs_the_machine_of_its_files_or_a_split() {
    let facts = Facts::new();
    let need = |words: &str| {
        let descriptors = vec![file(1, "/tmp/out"), file(2, "/tmp/errors")];
        facts.flows(&Enlisted { descriptors, ..facts.stage(words) }).need
    };
    assert_eq!(need("cat /m/ssh/a /m/vol/b"), Need::At(ExecutorId(0)));
    assert_eq!(need("cat /o/ssh/a"), Need::At(ExecutorId(1)));
    assert_eq!(need("cat /m/ssh/a /o/ssh/b"), Need::Split);
    assert!(matches!(need("comm /m/ssh/a /o/ssh/b"), Need::Here(_)));
    assert!(matches!(need("cat /m/ssh/a /etc/passwd"), Need::Here(_)));
    assert_eq!(need("grep x"), Need::Anywhere);
}

#[tokio::test]
async fn the_listings_above_trees_change_where_a_tree_is_made_or_taken_away() {
    let facts = Facts::new();
    let rows = [
        ("cp -r /m/ssh/a /m/ssh/d/new", ("/m/ssh/d", Some("/m/ssh/d/new"))),
        ("rm -r /m/ssh/d/old", ("/m/ssh/d", None)),
        ("sort -o /m/ssh/d/out /m/ssh/a", ("/m/ssh/d", Some("/m/ssh/d/out"))),
    ];
    for (words, (directory, unless_exists)) in rows {
        let reading = read(&facts.world(), &facts.stage(words)).unwrap();
        let listings = written::listings_on_sshfs(&facts.table, &reading);
        let expected = ChangedListing {
            directory: directory.into(),
            unless_exists: unless_exists.map(PathBuf::from),
        };
        assert!(listings.contains(&expected), "{words}: {listings:?}");
    }
    // What lies above a mount's root is no listing of it.
    let reading = read(&facts.world(), &facts.stage("cp -r /m/ssh/a /m/ssh")).unwrap();
    let listings = written::listings_on_sshfs(&facts.table, &reading);
    assert!(listings.iter().all(|one| one.directory.starts_with("/m/ssh")), "{listings:?}");
}
