//! After some commands a shell goes on while its mounts are told of them: nobody may notice.

use posh_integration::oracle::assert_equal;
use posh_integration::wire::Profile;

use super::*;

/// Each looks at once at what the one before has left, most with a command that runs here, since it reads a file of this machine as well.
const TEXTS: [&str; 10] = [
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
            assert_eq!(look(&mount.join(&name)), look(&there), "{text}");
            (outcome.with(&name, "RUN"), look(&there))
        };
        let (bash, bash_left) = run_under(Under::Shell);
        let (posh, posh_left) = run_under(Under::Posh);
        assert_equal(text, &bash, &posh);
        assert_eq!(bash_left, posh_left, "{text}");
    }
}
