//! After some commands a shell goes on while its mounts are told of them: nobody may notice.

use posh_integration::oracle::assert_equal;
use posh_integration::people::{self, Person};
use posh_integration::wire::Profile;

use super::*;

/// Each looks at once at what the one before has left, most with a command that runs here, since it reads a file of this machine as well.
const TEXTS: [&str; 19] = [
    "sort $D/f >> $D/out; wc -c $D/out /etc/hostname",
    "sort $D/f >> $D/out; ls -l --time-style=+ $D/out /etc/hostname",
    "sort $D/f > $D/out; cat $D/out /etc/hostname",
    "for i in 1 2 3; do sort $D/f >> $D/out; done; wc -c $D/out /etc/hostname",
    "sort $D/f >> $D/out || exit; wc -c /etc/hostname $D/out; wc -c < $D/out >> $D/n; wc -c /etc/hostname $D/n",
    "tac $D/f >> $D/n; wc -c < $D/f >> $D/more; wc -c $D/more $D/n $D/out /etc/hostname",
    "if sort $D/f >> $D/out; then wc -c $D/out /etc/hostname; fi",
    "sort $D/f >> $D/out; [ -s $D/out ] && read -r line < $D/out && echo $line; wc -c $D/out /etc/hostname",
    "sort $D/f >> $D/out; echo $(wc -c $D/out /etc/hostname)",
    "sort $D/f >> $D/n; cat $D/nowhere; cat $D/[nm]* /etc/hostname",
    "mkdir $D/d; ls $D /etc/hostname",
    "mkdir -p $D/a/b/c; find $D /etc/hostname | LC_ALL=C sort",
    "mkdir $D/d $D/d/e $D/n; ls -R $D /etc/hostname; rmdir $D/d/e; ls -R $D /etc/hostname",
    "mkdir $D/d; cp $D/f $D/n $D/d; ls -l --time-style=+ $D/d /etc/hostname; tac $D/d/f > $D/d/out; ls -R $D /etc/hostname",
    "mkdir $D/d; ls $D/d /etc/hostname; cp $D/f $D/d; ls $D/d /etc/hostname; cp $D/n $D/d; ls $D/d /etc/hostname",
    "mkdir $D/d; ls -d $D/d /etc/hostname; cp $D/f $D/d; stat -c '%s %A' $D/d /etc/hostname | sort",
    "mkdir $D/d; cp -r $D/f $D/more $D/d; cp $D/n $D/d/f; tail -n +1 $D/d/* /etc/hostname",
    "tar -cf $D/n -C $D f more; mkdir $D/d; tar -xf $D/n -C $D/d; tar -cf $D/out -C $D d; tar -tf $D/out; cat $D/d/f /etc/hostname; rm $D/n $D/out",
    "umask 027; mkdir -m 750 $D/d; sort $D/f > $D/d/out; mkdir $D/e; ls -l --time-style=+ $D /etc/hostname; cat $D/d/out",
];

#[test]
fn what_a_shell_goes_on_to_finds_all_as_it_is() {
    let lab = Lab::start(&LabSpec::servers(1).link(Profile::WAN), &programs()).unwrap();
    let mount = lab.workstation.path(lab.mount(1).to_str().unwrap());
    for (number, text) in TEXTS.into_iter().enumerate() {
        let run_under = |under| {
            let name = format!("{number}{}", &format!("{under:?}")[..1]);
            let there = lab.data(1).join(&name);
            fs::create_dir(&there).unwrap();
            for (file, content) in [("f", "b\na\nc\n"), ("out", "old\n"), ("n", ""), ("more", "older\n")] {
                fs::write(there.join(file), content).unwrap();
            }
            // What this machine remembers now is old soon.
            look(&mount.join(&name));
            let directory = lab.mount(1).join(&name);
            let script = Script::new(text).variable("D", directory.to_str().unwrap());
            let outcome = script.run(&lab.workstation, under).unwrap();
            let (shown, left) = (look(&mount.join(&name)), look(&there));
            let differ: Vec<_> = left.iter().filter(|(name, found)| shown.get(*name) != Some(found)).collect();
            assert!(differ.is_empty() && shown.len() == left.len(), "{text}: {shown:?} is shown, not {differ:?}");
            assert_eq!(directories(&mount.join(&name)), directories(&there), "{text}");
            (outcome.with(&name, "RUN"), look(&there))
        };
        let (bash, bash_left) = run_under(Under::Shell);
        let (posh, posh_left) = run_under(Under::Posh);
        assert_equal(text, &bash, &posh);
        assert_eq!(bash_left, posh_left, "{text}");
    }
}

/// Directories with their times of change, seconds since 1970.
fn directories(top: &Path) -> BTreeMap<String, i64> {
    let below = look(top).into_keys().chain([String::new()]);
    let found = below.map(|name| (fs::symlink_metadata(top.join(&name)).unwrap(), name));
    found.filter(|(found, _)| found.is_dir()).map(|(found, name)| (name, found.mtime())).collect()
}

/// Through the mount it takes longer, but where the mount can't be told of it, that would take longer still.
#[test]
fn a_directory_is_made_on_the_server_where_it_is_far_away_and_the_mount_can_be_told() {
    let lab = Lab::start(&LabSpec::servers(1).different().link(Profile::WAN), &programs()).unwrap();
    let near = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    fs::write(lab.data(1).join("f"), "").unwrap();
    fs::write(near.data(1).join("f"), "").unwrap();
    let place = |lab: &Lab, text: &str| {
        let outcome = run(&lab.workstation, text);
        let stage = outcome.report().stages("mkdir").next().expect("it ran");
        (stage.is_offloaded(), stage.reason.clone())
    };
    let here = "mkdir: makes names through the mount: cheap, and the names it has cached stay right".to_owned();
    // Until its server is in reach, nobody knows how far away a mount is.
    assert_offloaded(&run(&lab.workstation, "tac /mnt/s1/f"), "tac");
    assert_eq!(place(&lab, "mkdir /mnt/s1/a; tac /mnt/s1/f").1, "runs where its data is");
    assert_eq!(place(&lab, "mkdir /mnt/s1/b"), (false, here.clone()), "nothing follows");
    assert_eq!(place(&lab, "mkdir /mnt/s1/c; cd /mnt/s1/c; tac ../f"), (false, here.clone()), "the shell looks");
    assert_eq!(place(&lab, "mkdir /mnt/s1/d; x=$(tac /mnt/s1/f)"), (false, here.clone()), "who knows");
    assert_eq!(place(&near, "mkdir /mnt/s1/a; tac /mnt/s1/f"), (false, here), "that would be no sooner");
    for store in [lab.data(1), near.data(1)] {
        assert!(store.join("a").is_dir());
    }

    let other = lab.servers[0].host.path(people::DIRECTORY).join("other");
    fs::create_dir(&other).unwrap();
    fs::set_permissions(&other, fs::Permissions::from_mode(0o777)).unwrap();
    let text =
        "tac /mnt/u1/own; mkdir /mnt/u1/own; tac /mnt/u1/own; mkdir /mnt/u1/other/new; tac /mnt/u1/other/new; true";
    let mut script = Script::new(text);
    for (name, value) in Person::variables() {
        script = script.variable(name, value);
    }
    let script = Script { account: Some(people::HERE), directory: Some(people::HOME.into()), ..script };
    let outcome = script.run(&lab.workstation, Under::PoshExplained).unwrap();
    let stages: Vec<_> = outcome.report().stages("mkdir").collect();
    assert!(stages[0].is_offloaded() && !stages[1].is_offloaded(), "{stages:#?}");
    assert!(stages[1].reason.contains("/mnt/u1/other is another user's"), "{stages:#?}");
    assert!(other.join("new").is_dir());
}
