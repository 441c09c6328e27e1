//! What a volume has at hand is used here, where asking its server would take longer.

use std::fs;

use posh_integration::explain::ExplainReport;
use posh_integration::oracle::Under;
use posh_integration::volumes::{Mounts, User, posh};
use posh_integration::wire::Profile;
use posh_integration::{Lab, LabSpec, Script};

use crate::programs;

/// More than is fetched within the time that a run on the server takes.
const LARGE: usize = 4 << 20;

fn lab() -> Lab {
    let spec = LabSpec::servers(1).link(Profile::WAN).mounts(Mounts::AtHand);
    let lab = Lab::start(&spec, &programs()).unwrap();
    let data = lab.data(1);
    fs::create_dir_all(data.join("d/deep")).unwrap();
    for (name, text) in [("a", "3\n1\n2\n"), ("b", "5\n4\n"), ("deep/c", "6\n")] {
        fs::write(data.join("d").join(name), text).unwrap();
    }
    fs::write(data.join("d/large"), "0123456\n".repeat(LARGE / 8)).unwrap();
    lab
}

/// Where each stage of a command ran, in the order of the report: a letter each, `h`ere or `t`here.
fn places(report: &ExplainReport, command: &str) -> String {
    report.stages(command).map(|stage| if stage.is_offloaded() { 't' } else { 'h' }).collect()
}

#[test]
fn what_is_at_hand_is_used_here_and_the_rest_there() {
    let lab = lab();
    let text = "cd /mnt/s1/d
        cat a; cat a; sort a b | head -n 2; sort a b > sorted; tail -n 1 sorted
        wc -l large; wc -l < large
        find deep -name c; ls > /dev/null; ls deep; find deep -name c; grep -r 6 deep; grep -r 6 deep
        cat none a; echo $?; cut -c 1 < a | tr 3 x; md5sum a | cut -c 1-4";
    // Read here before, by a shell alone.
    Script::new("cd /mnt/s1/d; cat a b; ls").run(&lab.workstation, Under::Shell).unwrap();
    let output = Script::new(text).run(&lab.workstation, Under::PoshExplained).unwrap();
    let (said, report) = (String::from_utf8_lossy(&output.stdout).into_owned(), output.report());
    let expect = "3\n1\n2\n3\n1\n2\n1\n2\n5\n524288 large\n524288\ndeep/c\nc\ndeep/c\ndeep/c:6\ndeep/c:6\n3\n1\n2\n1\nx\n1\n2\n6aed\n";
    assert_eq!(said, expect, "{report:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "cat: none: No such file or directory\n");
    // Large files are read where they are, whatever is known of them.
    assert_eq!(places(report, "wc"), "tt", "{report:?}");
    // Nothing was known of the directory when it was searched first.
    assert_eq!(places(report, "find"), "th", "{report:?}");
    for (command, expect) in
        [("sort", "hh"), ("head", "h"), ("tail", "h"), ("ls", "hh"), ("md5sum", "h")]
    {
        assert_eq!(places(report, command), expect, "{command}: {report:?}");
    }
    let cats = places(report, "cat");
    assert!(cats.ends_with("hh"), "{report:?}");
    let reasons: Vec<_> = report.stages("cat").map(|stage| stage.reason.as_str()).collect();
    assert!(reasons[1].contains("what it uses on /mnt/s1 is at hand"), "{reasons:?}");
}

/// Nor does the stage program start for it: the gateway is asked by the hook, and no pipeline comes
/// of that.
#[test]
fn what_is_all_at_hand_is_executed_as_given() {
    let lab = lab();
    let host = &lab.workstation;
    let pipelines = || -> u64 {
        let status = host.must(posh(host, User::Root, &["status", "--json"])).unwrap();
        let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
        status["pipelines_total"].as_u64().unwrap()
    };
    let run = |text: &str| {
        let output = Script::new(text).run(host, Under::Posh).unwrap();
        assert!(output.stderr.is_empty(), "{output}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    run("cd /mnt/s1/d; ls > /dev/null; cat a b > /dev/null; cat a b > /dev/null");
    let text = "cd /mnt/s1/d; for i in $(seq 20); do cat a | tail -n 1; wc -c < b; done; (cd deep; ls ../a); cp b e; cat e";
    // On a machine with more to do than processors, some `tail` does not hear in time that its
    // `cat` stays.
    let made = (0..5).map(|_| {
        let before = pipelines();
        assert_eq!(run(text), format!("{}../a\n5\n4\n", "2\n4\n".repeat(20)));
        pipelines() - before
    });
    let least = made.min().unwrap();
    assert!(least < 10, "{least} pipelines");
}

/// What another has changed is at hand no more as soon as this machine can know of it, and what was
/// changed there is seen here at once.
#[test]
fn what_is_at_hand_is_never_old() {
    let lab = lab();
    let file = lab.data(1).join("d/a");
    let host = &lab.workstation;
    host.must({
        let mut fifos = host.command("mkfifo");
        fifos.args(["/tmp/ask", "/tmp/go"]);
        fifos
    })
    .unwrap();
    let text = "cd /mnt/s1/d; ls > /dev/null
        for i in 11 12 13 14 15 16; do
            cat a; cat a > /dev/null; echo $i > /tmp/ask; read -r line < /tmp/go
            n=0; until grep -qx $i a; do n=$((n + 1)); [ $n -lt 1000 ] || break; done; cat a
        done
        for i in 1 2 3 4 5 6; do cat large b | sed \"s/^/$i/\" > new; tail -n 1 new; tail -n 1 new; done";
    let output = std::thread::scope(|scope| {
        let running = scope.spawn(|| Script::new(text).run(host, Under::PoshExplained).unwrap());
        for _ in 0..6 {
            let number = fs::read_to_string(host.path("/tmp/ask")).unwrap();
            fs::write(&file, format!("changed\n{number}")).unwrap();
            fs::write(host.path("/tmp/go"), "go\n").unwrap();
        }
        running.join().unwrap()
    });
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let before =
        |i: u32| if i == 11 { "3\n1\n2\n".to_owned() } else { format!("changed\n{}\n", i - 1) };
    let changed: String = (11..=16).map(|i| format!("{}changed\n{i}\n", before(i))).collect();
    let made: String = (1..=6).map(|i| format!("{i}4\n{i}4\n")).collect();
    assert_eq!(said, changed + &made);
    let report = output.report();
    assert!(
        places(report, "cat").contains("hh") && places(report, "grep").contains('h'),
        "{report:?}"
    );
    // On a busy machine a stage may come too late for the one before it.
    assert!(places(report, "sed").matches('t').count() >= 4, "{report:?}");
}

/// A shell goes on in the directory that it has open when the server gives that one's name to
/// another.
#[test]
fn a_directory_that_was_replaced_on_the_server_is_left_to_who_works_in_it() {
    let lab = lab();
    let host = &lab.workstation;
    host.must({
        let mut fifos = host.command("mkfifo");
        fifos.args(["/tmp/ask", "/tmp/go"]);
        fifos
    })
    .unwrap();
    let text = "cd /mnt/s1/work; cat f large > /dev/null; sort f
        echo > /tmp/ask; read -r line < /tmp/go
        n=0; until [ \"$(cat /mnt/s1/work/f)\" = new ]; do n=$((n + 1)); [ $n -lt 1000 ] || break; done
        sort f; head -n 1 < f; grep -c . f; sort f -o o; rm -r sub; echo $?";
    let outcomes = [Under::Shell, Under::PoshExplained].map(|under| {
        let data = lab.data(1);
        for (directory, contents) in [("work", "old\n"), ("next", "new\n")] {
            let _none = fs::remove_dir_all(data.join(directory));
            fs::create_dir_all(data.join(directory).join("sub")).unwrap();
            fs::write(data.join(directory).join("f"), contents).unwrap();
            fs::write(data.join(directory).join("large"), "0".repeat(LARGE)).unwrap();
        }
        let _none = fs::remove_dir_all(data.join("former"));
        let output = std::thread::scope(|scope| {
            let running = scope.spawn(|| Script::new(text).run(host, under).unwrap());
            fs::read_to_string(host.path("/tmp/ask")).unwrap();
            fs::rename(data.join("work"), data.join("former")).unwrap();
            fs::rename(data.join("next"), data.join("work")).unwrap();
            fs::write(host.path("/tmp/go"), "go\n").unwrap();
            running.join().unwrap()
        });
        assert!(data.join("work/sub").exists() && !data.join("work/o").exists(), "{output}");
        output
    });
    let [bash, posh] = &outcomes;
    assert_eq!((&bash.stdout, &bash.stderr), (&posh.stdout, &posh.stderr), "{posh}");
}
