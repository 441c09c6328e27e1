//! No stage waits for what may never come, whatever a shell or a program makes of its processes and
//! pipes (integration/shapes.yaml).

use posh_integration::oracle::Under;
use posh_integration::shapes::{self, WaitCounts};
use posh_integration::{Lab, LabSpec};

use crate::programs;

/// So many there are at least.
const SHAPES: usize = 90;
/// A gateway may get no processor for some time on a busy machine. Its own limits are 12 ms; what
/// was waited for in vain before there were any took 500 ms or more.
const LONGEST_MS: f64 = 300.0;

#[test]
fn no_shape_of_processes_makes_a_command_wait() {
    let _turn = crate::whole_machine();
    let shapes = shapes::load().unwrap();
    assert!(shapes.len() >= SHAPES, "only {} shapes are left", shapes.len());
    let lab = Lab::start(&LabSpec::servers(1), &programs()).unwrap();
    shapes::furnish(&lab).unwrap();
    let mut faults = Vec::new();
    let mut longest_ms = 0.0;
    for shape in &shapes {
        let [bash, posh] = [Under::Shell, Under::Posh].map(|under| shape.run(&lab, under).unwrap());
        if bash != posh {
            faults.push(format!("{} differs\n--- bash: {bash}\n--- posh: {posh}", shape.name));
        }
        let waits = WaitCounts::of(&lab.workstation).unwrap();
        assert_eq!(waits.backstops.len(), 3, "{waits:?}");
        if waits.backstops.iter().any(|(_, reached)| *reached > 0) {
            faults.push(format!(
                "{}: a wait has reached its last limit by now: {waits:?}",
                shape.name
            ));
        }
        if waits.longest_ms > longest_ms && waits.longest_ms > LONGEST_MS {
            faults.push(format!(
                "{}: a command has waited for {:.1} ms",
                shape.name, waits.longest_ms
            ));
        }
        longest_ms = waits.longest_ms.max(longest_ms);
    }
    // Some waits there were: what is counted is counted.
    assert!(longest_ms > 0.0);
    assert!(
        faults.is_empty(),
        "{} of {} shapes:\n{}",
        faults.len(),
        shapes.len(),
        faults.join("\n")
    );
}
