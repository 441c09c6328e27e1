//! A script's commands are begun before its shell comes to them; and nobody can tell, but by the time that it takes.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use posh_integration::oracle::{Outcome, Under, assert_equal};
use posh_integration::volumes::Mounts;
use posh_integration::{Lab, LabSpec, Script};

use crate::programs;

/// What the report says of a command that was begun.
const BEGUN: &str = "begun before it came";

fn lab() -> Lab {
    lab_with(Mounts::Sshfs)
}

fn lab_with(mounts: Mounts) -> Lab {
    let lab = Lab::start(&LabSpec::servers(1).mounts(mounts), &programs()).unwrap();
    // The gateway knows the programs then.
    run(&lab, "cat $D/f | sort | head -n 1; wc < $D/f; grep x $D/f; sed p $D/f; ls $D");
    lab
}

/// A directory that the mount has never seen.
fn fresh(lab: &Lab) -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("run-{}-", NEXT.fetch_add(1, Ordering::Relaxed));
    let directory = lab.data(1).join(&name);
    fs::create_dir_all(directory.join("d")).unwrap();
    fs::write(directory.join("f"), "b\nx\na\n").unwrap();
    fs::write(directory.join("d/g"), "g\n").unwrap();
    name
}

fn script(lab: &Lab, directory: &str, text: &str) -> Script {
    Script::new(text).variable("D", lab.mount(1).join(directory).to_str().unwrap())
}

fn run(lab: &Lab, text: &str) -> Outcome {
    script(lab, &fresh(lab), text).run(&lab.workstation, Under::PoshExplained).unwrap()
}

/// Which of the commands were begun before they came, in order, by the names of their first ones.
fn begun(outcome: &Outcome) -> Vec<&str> {
    let pipelines = outcome.report().pipelines.iter();
    let first = pipelines.filter_map(|pipeline| pipeline.stages.first());
    first.filter(|stage| stage.reason.contains(BEGUN)).map(|stage| stage.command.as_str()).collect()
}

/// The names and contents of all files.
fn tree(directory: &Path) -> Vec<(PathBuf, String)> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<(PathBuf, String)> = Vec::new();
    for path in entries {
        match path.is_dir() {
            true => files.extend(tree(&path).into_iter().map(|(name, text)| (Path::new("d").join(name), text))),
            false => {
                let text = fs::read_to_string(&path).unwrap();
                files.push((path.file_name().unwrap().into(), text));
            }
        }
    }
    files.sort();
    files
}

/// Runs a text under bash and under posh, each with the files as they were at first. Gives what was begun.
fn check(lab: &Lab, text: &str) -> Vec<String> {
    check_after(lab, text, &|_| {})
}

fn check_after(lab: &Lab, text: &str, prepare: &dyn Fn(&Path)) -> Vec<String> {
    let run_under = |under| {
        let name = fresh(lab);
        let directory = lab.data(1).join(&name);
        prepare(&directory);
        let outcome = script(lab, &name, text).run(&lab.workstation, under).unwrap();
        let left = tree(&directory).into_iter().map(|(file, text)| (file, text.replace(&name, "RUN")));
        (outcome.with(&name, "RUN"), left.collect::<Vec<_>>())
    };
    let (bash, bash_left) = run_under(Under::Shell);
    let (posh, posh_left) = run_under(Under::PoshExplained);
    assert_equal(text, &bash, &posh);
    assert_eq!(bash_left, posh_left, "{text}");
    begun(&posh).into_iter().map(str::to_owned).collect()
}

/// A head start is a matter of time: a shell may be sooner.
fn check_begun(lab: &Lab, text: &str, expected: &[&str]) {
    let mut seen = Vec::new();
    for _ in 0..20 {
        let begun = check(lab, text);
        if begun == expected {
            return;
        }
        seen.push(begun);
    }
    panic!("{text}: {expected:?} is not what was begun: {seen:?}");
}

#[test]
fn what_only_reads_is_begun_before_it_comes() {
    let lab = lab();
    check_begun(&lab, "cat $D/f", &["cat"]);
    check_begun(&lab, "set -e; cd $D\nsort < f | head -n 1\ngrep x f nowhere | wc -l", &["sort", "grep"]);
    check_begun(&lab, "rm $D/f; cat $D/f; ls $D", &["ls"]);
    check_begun(&lab, "cat $D/f > /dev/null; cat $D/d/g", &["cat", "cat"]);
    let many = "cat $D/f; sort $D/f\nwc $D/d/g > /dev/null; grep x < $D/f | head; ls $D; sed p $D/f";
    check_begun(&lab, many, &["cat", "sort", "wc", "grep", "ls", "sed"]);
}

/// Nobody reads what comes before its stages do.
#[test]
fn what_is_large_comes_whole() {
    let lab = lab();
    let larger = |data: &Path| fs::write(data.join("f"), "a line of the file\n".repeat(200_000)).unwrap();
    let text = "cat $D/f; sort $D/f | uniq -c; sed s/line/LINE/ $D/f";
    let tries = (0..20).any(|_| check_after(&lab, text, &larger).contains(&"cat".to_owned()));
    assert!(tries, "never begun");
}

/// The second one is begun with the first, which takes so long that it may not count any more.
#[test]
fn what_others_change_while_a_command_runs_is_seen_by_the_next() {
    let lab = lab();
    let name = fresh(&lab);
    let directory = lab.data(1).join(&name);
    let lines: String = (0..3_000_000_u32).map(|number| format!("{}\n", number.wrapping_mul(2_654_435_761))).collect();
    fs::write(directory.join("large"), lines).unwrap();
    let text = "sort $D/large | wc -l; cat $D/f";
    let outcome = std::thread::scope(|scope| {
        let running = scope.spawn(|| script(&lab, &name, text).run(&lab.workstation, Under::PoshExplained).unwrap());
        let began = Instant::now();
        while !lab.servers[0].host.processes().unwrap().iter().any(|process| process.program == "sort") {
            assert!(began.elapsed() < Duration::from_secs(10));
        }
        std::thread::sleep(Duration::from_millis(150));
        fs::write(directory.join("f"), "new\n").unwrap();
        running.join().unwrap()
    });
    assert_eq!(String::from_utf8_lossy(&outcome.stdout), "3000000\nnew\n", "{outcome}");
}

#[test]
fn what_writes_where_it_is_redirected_to_is_begun_and_waits() {
    let lab = lab();
    check_begun(&lab, "sort $D/f > $D/sorted; cat $D/sorted; wc -l < $D/sorted > $D/d/g", &["sort", "cat", "wc"]);
    check_begun(&lab, "sort $D/f > $D/d/g && cat $D/d/g", &["sort"]);
    check_begun(&lab, "sort $D/f >> $D/d/g; uniq $D/d/g >> $D/new; cat $D/new", &["sort", "uniq", "cat"]);
    check_begun(&lab, "cat $D/f | sort > $D/sorted\nls $D; uniq $D/sorted > $D/sorted-2", &["cat", "ls", "uniq"]);
    let larger = |data: &Path| fs::write(data.join("f"), "a line of the file\n".repeat(200_000)).unwrap();
    let text = "cat $D/f | tr a-z A-Z > $D/upper; wc $D/upper";
    let tries = (0..20).any(|_| check_after(&lab, text, &larger) == ["cat", "wc"]);
    assert!(tries, "never begun");
}

/// File systems count time in steps.
const SETTLED: Duration = Duration::from_millis(100);

fn numbers() -> String {
    (0..1_500_000_u32).map(|number| format!("{}\n", number.wrapping_mul(2_654_435_761))).collect()
}

/// All that is `sort` on the server, while a text is run there. At the moment when there is one, `change` is called.
fn watch_sorts(lab: &Lab, (name, text): (&str, &str), change: &dyn Fn()) -> (Outcome, usize) {
    std::thread::scope(|scope| {
        let running = scope.spawn(|| script(lab, name, text).run(&lab.workstation, Under::PoshExplained).unwrap());
        let mut most = 0;
        while !running.is_finished() {
            let processes = lab.servers[0].host.processes().unwrap();
            let sorts = processes.iter().filter(|process| process.program == "sort").count();
            if sorts > 0 && most == 0 {
                change();
            }
            most = most.max(sorts);
        }
        (running.join().unwrap(), most)
    })
}

#[test]
fn what_reads_something_else_is_begun_beside_what_is_at_work() {
    let lab = lab();
    let name = fresh(&lab);
    let directory = lab.data(1).join(&name);
    fs::write(directory.join("large"), numbers()).unwrap();
    let texts = [
        // What is at work, and what the next one says, by how much of it is there at once.
        ("sort $D/large > $D/x; sort -r $D/large > $D/y; cat $D/x $D/y | wc -l", 2, "3000000\n"),
        ("sort $D/large > $D/x; sort -r $D/large | wc -l; cat $D/x | wc -l", 2, "1500000\n1500000\n"),
        ("sort $D/large > $D/x; sort $D/x > $D/y; sort $D/y | wc -l", 1, "1500000\n"),
        ("sort $D/large > $D/x; rm $D/y; sort $D/large | wc -l", 1, "1500000\n"),
    ];
    for (text, at_once, expected) in texts {
        let is_so = |_| {
            std::thread::sleep(SETTLED);
            let (outcome, most) = watch_sorts(&lab, (&name, text), &|| {});
            assert_eq!(String::from_utf8_lossy(&outcome.stdout), expected, "{outcome}");
            assert!(most <= at_once, "{text}: {most} at once");
            most == at_once
        };
        assert!((0..10).any(is_so), "{text}: never {at_once} at once");
    }
}

#[test]
fn what_was_begun_beside_another_one_counts_only_if_nothing_has_changed() {
    let lab = lab();
    let name = fresh(&lab);
    let directory = lab.data(1).join(&name);
    fs::write(directory.join("large"), numbers()).unwrap();
    for text in ["sort $D/large > $D/x; cat $D/f > $D/y; cat $D/y", "sort $D/large > $D/x; cat $D/f"] {
        fs::write(directory.join("f"), "old\n").unwrap();
        std::thread::sleep(SETTLED);
        let change = || fs::write(directory.join("f"), "new\n").unwrap();
        let (outcome, most) = watch_sorts(&lab, (&name, text), &change);
        assert_eq!((String::from_utf8_lossy(&outcome.stdout).as_ref(), most), ("new\n", 1), "{outcome}");
    }
    // By another name it is what the one before writes.
    let linked = |directory: &Path| {
        fs::write(directory.join("x"), "old\n").unwrap();
        symlink("x", directory.join("soft")).unwrap();
        fs::hard_link(directory.join("x"), directory.join("hard")).unwrap();
        std::thread::sleep(SETTLED);
    };
    for link in ["soft", "hard"] {
        let text = format!("sort $D/f > $D/x; cat $D/{link} > $D/y; cat $D/{link} >> $D/x; cat $D/x");
        check_after(&lab, &text, &linked);
    }
    check_after(&lab, "sort $D/f > $D/x; cat $D/y > $D/z; sort $D/f > $D/y; cat $D/y", &linked);
}

/// When its stage program has been told that it runs here, nothing more is heard of it.
#[test]
fn beside_what_changes_something_here_nothing_is_begun() {
    let lab = lab();
    let many = |data: &Path| (0..5_000).for_each(|number| fs::write(data.join(format!("d/g-{number}")), "").unwrap());
    for text in [
        "ls $D/d | tail -n 1; rm $D/d/g-1*; ls $D/d | wc -l",
        "cd $D; ls d | tail -n 1; rm d/g-[12]?*; ls d | wc -l; chmod 600 d/g-3*; find d -perm 600 | wc -l",
    ] {
        (0..4).for_each(|_| drop(check_after(&lab, text, &many)));
    }
}

/// Volumes may hold back what this machine has written: that is asked for when it comes.
#[test]
fn over_a_volume_what_is_begun_has_read_nothing_old() {
    let lab = lab_with(Mounts::Volume);
    let name = fresh(&lab);
    let (directory, mount) = (lab.data(1).join(&name), lab.workstation.path(lab.mount(1)).join(&name));
    fs::write(directory.join("large"), numbers()).unwrap();
    let text = "sort $D/large > $D/x; sort -r $D/large > $D/y; cat $D/x $D/y | wc -l";
    let is_beside = |_| {
        std::thread::sleep(SETTLED);
        let (outcome, most) = watch_sorts(&lab, (&name, text), &|| {});
        assert_eq!(String::from_utf8_lossy(&outcome.stdout), "3000000\n", "{outcome}");
        most == 2
    };
    assert!((0..10).any(is_beside), "never two at once");

    for text in ["sort $D/large > $D/x; cat $D/f $D/large > $D/y; head -n 1 $D/y", "sort $D/large > $D/x; cat $D/f"] {
        for changed in [&mount, &directory] {
            fs::write(directory.join("f"), "old\n").unwrap();
            std::thread::sleep(SETTLED);
            let change = || fs::write(changed.join("f"), "new\n").unwrap();
            let (outcome, _) = watch_sorts(&lab, (&name, text), &change);
            assert_eq!(String::from_utf8_lossy(&outcome.stdout), "new\n", "{outcome}");
        }
    }

    let larger = |data: &Path| {
        fs::write(data.join("f"), "a line of the file\n".repeat(200_000)).unwrap();
        std::thread::sleep(SETTLED);
    };
    let texts = [
        "cat $D/f | tr a-z A-Z > $D/upper; wc -l $D/upper; sort $D/f >> $D/upper; wc -l < $D/upper",
        "sort -u $D/f > $D/d/g; sort $D/f > $D/new; uniq $D/d/g >> $D/new; cat $D/new $D/d/g | uniq -c",
        "echo more >> $D/f; sort $D/f | uniq -c; echo more >> $D/f; sort $D/f | uniq -c > $D/out; cat $D/out",
        "sort $D/f > $D/x; cat $D/f > $D/y; rm $D/f; cat $D/f; cat $D/x $D/y | uniq -c",
        "sort $D/f > $D/f; wc -c $D/f; cat $D/d/g > $D/f; cat $D/f",
    ];
    let begun: Vec<String> = texts.into_iter().flat_map(|text| check_after(&lab, text, &larger)).collect();
    assert!(!begun.is_empty(), "nothing was begun");
}

/// The directory of the pattern is listed while the shell starts.
#[test]
fn what_patterns_become_is_guessed_and_compared() {
    let lab = lab();
    let logs = |data: &Path| {
        (0..12).for_each(|number| fs::write(data.join(format!("d/w-{number:02}")), format!("{number}\nx\n")).unwrap());
    };
    let begun = |text: &str, expected: &[&str], prepare: &dyn Fn(&Path)| {
        let mut seen = Vec::new();
        for _ in 0..20 {
            seen.push(check_after(&lab, text, prepare));
            if seen.last().is_some_and(|last| last == expected) {
                return;
            }
        }
        panic!("{text}: {expected:?} is not what was begun: {seen:?}");
    };
    begun("cat $D/d/w-*", &["cat"], &logs);
    begun(
        "cat $D/f | head -n 1 > $D/out\ncat $D/d/w-*[13] | grep -v x >> $D/out\nuniq $D/out",
        &["cat", "cat", "uniq"],
        &logs,
    );
    begun("cat $D/f; cd $D; cat d/w-?? d/w*1 | grep '[0-9]'", &["cat", "cat"], &logs);
    // One file more than was listed, and another order.
    check_after(&lab, "cat $D/f > $D/d/w-12; cat $D/d/w-*", &logs);
    check_after(&lab, "shopt -s nullglob; cat $D/f $D/d/none*; set -f; cat $D/d/w-*", &logs);
    check_after(&lab, "set -f; cat $D/d/w-*", &logs);
    let mixed = |data: &Path| {
        ["B", "a", "C", "b-a", "ba"].iter().for_each(|name| fs::write(data.join("d").join(name), name).unwrap())
    };
    for locale in ["C.UTF-8", "en_US.UTF-8"] {
        check_after(&lab, &format!("LC_ALL={locale}; export LC_ALL; cat $D/d/*; cat $D/d/*"), &mixed);
    }
    check_after(&lab, "cat $D/d/*; cat $D/d/*", &mixed);
}

#[test]
fn what_is_emptied_by_its_own_redirect_is_read_empty() {
    let lab = lab();
    check(&lab, "sort $D/f > $D/f; wc $D/f");
    check(&lab, "sort < $D/f > $D/f; wc $D/f");
    check(&lab, "cat $D/f >> $D/f; wc $D/f");
    check(&lab, "sort $D/f >> $D/f; wc $D/f");
    let link = |data: &Path| symlink("f", data.join("link")).unwrap();
    let hard = |data: &Path| fs::hard_link(data.join("f"), data.join("link")).unwrap();
    for prepare in [&link as &dyn Fn(&Path), &hard] {
        check_after(&lab, "sort $D/f > $D/link; wc $D/f", prepare);
        check_after(&lab, "sort $D/link > $D/f; wc $D/f", prepare);
        check_after(&lab, "sort < $D/link > $D/f; wc $D/f", prepare);
    }
}

#[test]
fn what_is_not_certain_is_not_begun() {
    let lab = lab();
    let never = [
        // What may do more than read, or wait for somebody.
        "touch $D/new",
        "cat $D/f | tee $D/new",
        "cat",
        "cat /etc/hostname $D/f",
        // What only running tells.
        "X=1; cat $D/$X; cat $D/f",
        "X=1 cat $D/f",
        "cat $(echo $D/f)",
        "if cat $D/f; then :; fi",
        "cat() { echo mine; }; cat $D/f",
        "cat $D/* 2> /dev/null",
        // Where trees are read that it may be in.
        "grep -r x $D > $D/found",
    ];
    for text in never {
        assert_eq!(check(&lab, text), [""; 0], "{text}");
    }
    // A file of this machine that is emptied: it might be the same by another way. When the shell has emptied it, it may be begun.
    for text in ["echo old > /tmp/old; cat $D/f > /tmp/old", "cat $D/f > /tmp/old"] {
        let is_left = |_| {
            // There is one file /tmp/old, not one for each run.
            fs::write(lab.workstation.path("/tmp/old"), "old\n").unwrap();
            check(&lab, text).is_empty()
        };
        assert!((0..10).any(is_left), "{text}");
    }
}

#[test]
fn what_a_shell_changes_itself_is_seen() {
    let lab = lab();
    check(&lab, "cat $D/f; echo new > $D/f; cat $D/f");
    check(&lab, "cat $D/f\necho new >> $D/f\ncat $D/f\nrm $D/f\ncat $D/f");
    check(&lab, "cat $D/f; cd $D/nowhere 2> /dev/null && cat f; echo new > $D/f; cd $D; cat f");
    check(&lab, "cat $D/nowhere || echo new > $D/f; cat $D/f");
    check(&lab, "cat $D/f & wait; echo new > $D/f; cat $D/f");
    check(&lab, "false && cat $D/f; echo new > $D/f; cat $D/f");
    check(&lab, "sh -c 'echo new > $D/f'; cat $D/f");
    check(&lab, "true; cat $D/f; (echo new > $D/f); cat $D/f");
    check(&lab, "set -e; cat $D/nowhere; cat $D/f");
    check(&lab, "trap 'echo new > $D/f' EXIT; cat $D/f");
    check(&lab, "umask 077; cat $D/f > $D/new; ls -l $D/new | cut -c 1-10");
    check(&lab, "ulimit -f 1; sort $D/f > $D/new; cat $D/new");
}

#[test]
fn an_environment_that_runs_something_first_is_left_to_the_shell() {
    let lab = lab();
    let start = lab.workstation.path("/tmp/start.sh");
    fs::write(&start, "echo new > $D/f\n").unwrap();
    for (name, value) in [("BASH_ENV", "/tmp/start.sh"), ("BASH_FUNC_cat%%", "() { echo mine; }")] {
        let [bash, posh] = [Under::Shell, Under::PoshExplained].map(|under| {
            let script = script(&lab, &fresh(&lab), "cat $D/f; cat $D/f").variable(name, value);
            script.run(&lab.workstation, under).unwrap()
        });
        assert_equal(name, &bash, &posh);
        assert_eq!(begun(&posh), [""; 0], "{name}");
    }
}

#[test]
fn a_command_that_does_not_come_leaves_nothing_behind() {
    let lab = lab();
    let name = fresh(&lab);
    fs::write(lab.data(1).join(&name).join("f"), "x\n".repeat(10_000_000)).unwrap();
    // Its redirect can't be opened, so that nobody reads what it writes.
    for text in ["cat $D/f > $D/nowhere/x", "cat $D/f > $D/nowhere/x; sleep 1"] {
        let outcome = script(&lab, &name, text).run(&lab.workstation, Under::PoshExplained).unwrap();
        assert!(String::from_utf8_lossy(&outcome.stderr).contains("nowhere/x"), "{outcome}");
    }
    let began = Instant::now();
    let at_work = || lab.servers[0].host.processes().unwrap().into_iter().find(|process| process.program == "cat");
    while at_work().is_some() {
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", at_work());
        std::thread::sleep(Duration::from_millis(20));
    }
}
