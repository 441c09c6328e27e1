//! Pipes, streams, credit, descriptors, exits.

use posh_proto::executor::{
    Chunk, Credit, Merge, Pty, Signal, WindowSize, descriptor::Source, exited::How, run_input::Kind, run_output,
};

use crate::harness::*;

#[tokio::test]
async fn a_pipeline_runs_and_every_stage_exits() {
    let lab = Lab::start().await;
    lab.write("f", "b x\na\nc x\na x\n");
    let outcome = lab.run(pipeline(&["cat f", "grep x", "sort"])).await;
    assert_eq!(outcome.text(), "a x\nb x\nc x\n", "{outcome:?}");
    assert_eq!(outcome.codes(), [How::Code(0); 3]);
}
