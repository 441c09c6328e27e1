//! Pipes, streams, credit, descriptors, exits.

use bytes::Bytes;
use nix::libc;
use posh_proto::executor::{
    Chunk, Credit, EnvVar, Inlet, Merge, Pty, ResourceLimit, RunSpec, Signal, WindowSize,
    descriptor::Source, exited::How, rejected, run_input::Kind, run_output,
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

#[tokio::test]
async fn statuses_and_errors_are_the_commands_own() {
    let lab = Lab::start().await;
    let outcome = lab.run(pipeline(&["cat nowhere", "grep x"])).await;
    assert_eq!(outcome.codes(), [How::Code(1), How::Code(1)]);
    assert_eq!(outcome.errors(), "cat: nowhere: No such file or directory\n");
    let outcome = lab.run(command(&["sh", "-c", "exit 200"])).await;
    assert_eq!(outcome.codes(), [How::Code(200)]);
    let outcome = lab.run(command(&["sh", "-c", "kill -SEGV $$"])).await;
    assert_eq!(outcome.codes(), [How::Signal(11)]);
}

#[tokio::test]
async fn a_reader_that_stops_ends_the_writer() {
    let lab = Lab::start().await;
    let outcome = lab.run(pipeline(&["yes", "head -1"])).await;
    assert_eq!(outcome.text(), "y\n");
    assert_eq!(outcome.codes(), [How::Signal(13), How::Code(0)]);
}

#[tokio::test]
async fn a_closed_outlet_ends_the_writer() {
    let lab = Lab::start().await;
    let mut call = Call::open(&lab.client, pipeline(&["yes"])).await;
    call.until_output("y\n").await;
    call.send(Kind::Closed(OUT)).await;
    let how = call.until(exited).await;
    assert_eq!(how, How::Signal(13));
    call.until(|kind| matches!(kind, run_output::Kind::Finished(_)).then_some(())).await;
    assert!(call.next().await.is_none());
}

#[tokio::test]
async fn a_closed_outlet_ends_a_silent_tail() {
    let lab = Lab::start().await;
    lab.write("log", "first\n");
    let mut call = Call::open(&lab.client, pipeline(&["tail -f log"])).await;
    call.until_output("first").await;
    call.send(Kind::Closed(OUT)).await;
    call.until(exited).await;
}

#[tokio::test]
async fn output_moves_as_it_appears() {
    let lab = Lab::start().await;
    lab.write("log", "");
    let mut call =
        Call::open(&lab.client, pipeline(&["tail -f log", "grep --line-buffered x"])).await;
    call.until(started).await;
    for line in ["x1\n", "x2\n"] {
        let path = lab.store.path().join("log");
        let mut log = std::fs::File::options().append(true).open(path).unwrap();
        std::io::Write::write_all(&mut log, line.as_bytes()).unwrap();
        call.until_output(line).await;
    }
}

#[tokio::test]
async fn an_outlet_never_exceeds_its_credit() {
    let lab = Lab::start().await;
    let mut spec = pipeline(&["yes"]);
    spec.outlets[0].initial_credit_bytes = 10;
    let mut call = Call::open(&lab.client, spec).await;
    let (mut seen, mut granted) = (0, 10);
    for more in [7, 1 << 20, 0] {
        while seen < granted {
            let count = call.until(|kind| chunk(kind).map(|data| data.len() as u64)).await;
            seen += count;
            assert!(seen <= granted, "{seen} bytes of {granted} allowed");
        }
        if more > 0 {
            granted += more;
            call.send(Kind::Credit(Credit { stream: OUT, bytes: more })).await;
        }
    }
    // Dead or not, output in the pipe needs credit.
    call.send(Kind::Signal(Signal { stage: 1, signal: 9, group: false })).await;
    let how = call.until(|kind| chunk(kind).map(|_| How::Code(0)).or_else(|| exited(kind))).await;
    assert_eq!(how, How::Signal(9));
    call.send(Kind::Closed(OUT)).await;
    call.until(|kind| matches!(kind, run_output::Kind::Finished(_)).then_some(())).await;
}

#[tokio::test]
async fn an_unread_outlet_holds_up_no_other() {
    let lab = Lab::start().await;
    let mut spec = command(&["sh", "-c", "yes & yes done | head -1000 >&2; wait"]);
    spec.outlets[0].initial_credit_bytes = 0;
    let mut call = Call::open(&lab.client, spec).await;
    let mut seen = 0;
    call.until(|kind| {
        if let run_output::Kind::Chunk(Chunk { stream: ERR, data }) = kind {
            seen += data.len();
        }
        (seen == 5000).then_some(())
    })
    .await;
}

#[tokio::test]
async fn input_reaches_the_command_and_its_end_too() {
    let lab = Lab::start().await;
    let input: Bytes = (0..1_000_000).map(|n| format!("{n}\n")).collect::<String>().into();
    let outcome = run(&lab.client, pipeline_with_input(&["cat", "cat"]), input.clone()).await;
    assert!(outcome.out == input, "{} bytes of {}", outcome.out.len(), input.len());
    let outcome = run(&lab.client, pipeline_with_input(&["wc -c"]), Bytes::new()).await;
    assert_eq!(outcome.text(), "0\n");
}

#[tokio::test]
async fn an_inlet_that_nobody_reads_is_closed() {
    let lab = Lab::start().await;
    let mut call = Call::open(&lab.client, pipeline_with_input(&["head -c 1"])).await;
    call.until(started).await;
    call.send(Kind::Chunk(Chunk { stream: IN, data: "xyz".into() })).await;
    call.until(|kind| matches!(kind, run_output::Kind::Closed(IN)).then_some(())).await;
    // No input was ever sent to it.
    let mut call = Call::open(&lab.client, pipeline_with_input(&["true"])).await;
    call.until(|kind| matches!(kind, run_output::Kind::Closed(IN)).then_some(())).await;
    call.until(|kind| matches!(kind, run_output::Kind::Finished(_)).then_some(())).await;
}

#[tokio::test]
async fn more_input_than_the_credit_is_an_error() {
    let lab = Lab::start().await;
    let mut call = Call::open(&lab.client, pipeline_with_input(&["sleep 1000"])).await;
    call.until(started).await;
    for _ in 0..12 {
        call.send(Kind::Chunk(Chunk { stream: IN, data: vec![0; CHUNK_BYTES].into() })).await;
    }
    let error = loop {
        match call.output.message().await {
            Ok(Some(_)) => {}
            other => break other.unwrap_err(),
        }
    };
    assert_eq!(error.code(), tonic::Code::InvalidArgument, "{error}");
}

#[tokio::test]
async fn redirects_start_at_their_offsets_and_tell_where_they_ended() {
    let lab = Lab::start().await;
    lab.write("in", "one\ntwo\nthree\n");
    lab.write("out", "old\n");
    let mut spec = pipeline(&["cat"]);
    spec.stages[0].descriptors[0].source = Some(file("in", libc::O_RDONLY, 4));
    spec.stages[0].descriptors[1].source = Some(file("out", libc::O_WRONLY, 2));
    let outcome = lab.run(spec).await;
    assert!(outcome.is_finished, "{outcome:?}");
    assert_eq!(std::fs::read_to_string(lab.store.path().join("out")).unwrap(), "oltwo\nthree\n");
    let offsets: Vec<_> =
        outcome.exits[&1].offsets.iter().map(|offset| (offset.fd, offset.offset)).collect();
    assert_eq!(offsets, [(0, 14), (1, 12)]);
}

#[tokio::test]
async fn an_appending_redirect_appends() {
    let lab = Lab::start().await;
    lab.write("log", "old\n");
    let mut spec = pipeline(&["echo new"]);
    spec.stages[0].descriptors[1].source = Some(file("log", libc::O_WRONLY | libc::O_APPEND, 0));
    lab.run(spec).await;
    assert_eq!(std::fs::read_to_string(lab.store.path().join("log")).unwrap(), "old\nnew\n");
}

#[tokio::test]
async fn a_redirect_that_would_truncate_is_refused() {
    let lab = Lab::start().await;
    lab.write("log", "old\n");
    let mut spec = pipeline(&["echo new"]);
    spec.stages[0].descriptors[1].source = Some(file("log", libc::O_WRONLY | libc::O_TRUNC, 0));
    assert_eq!(lab.run(spec).await.refusal().kind(), rejected::Kind::Protocol);
    assert_eq!(std::fs::read_to_string(lab.store.path().join("log")).unwrap(), "old\n");
}

#[tokio::test]
async fn two_descriptors_may_be_one_description() {
    let lab = Lab::start().await;
    let mut spec = command(&["sh", "-c", "echo a; echo b >&2; echo c"]);
    spec.stages[0].descriptors[2].source = Some(Source::DuplicateOf(1));
    spec.pipes.retain(|id| *id != 99);
    spec.outlets.truncate(1);
    assert_eq!(lab.run(spec).await.text(), "a\nb\nc\n");
    // One offset, as with `> file 2>&1`: neither overwrites the other.
    lab.write("both", "");
    let mut spec = command(&["sh", "-c", "echo a; echo b >&2; echo c"]);
    spec.stages[0].descriptors[1].source = Some(file("both", libc::O_WRONLY, 0));
    spec.stages[0].descriptors[2].source = Some(Source::DuplicateOf(1));
    lab.run(spec).await;
    assert_eq!(std::fs::read_to_string(lab.store.path().join("both")).unwrap(), "a\nb\nc\n");
}

#[tokio::test]
async fn descriptors_have_any_number_and_there_are_no_others() {
    let lab = Lab::start().await;
    let mut spec = command(&["cat", "/dev/fd/63", "/dev/fd/3"]);
    spec.stages[0].paths = vec![path_use("/dev/fd/63"), path_use("/dev/fd/3")];
    let mut echo = spec.stages[0].clone();
    for (id, fd, word) in [(2, 63, "high"), (3, 3, "low")] {
        echo.id = id;
        echo.program = "echo".into();
        echo.argv = vec!["echo".into(), word.into()];
        echo.paths.clear();
        echo.descriptors[1].source = Some(Source::PipeWrite(200 + id));
        spec.pipes.push(200 + id);
        spec.stages[0].descriptors.push(descriptor(fd, Source::PipeRead(200 + id)));
        spec.stages.push(echo.clone());
    }
    assert_eq!(lab.run(spec).await.text(), "high\nlow\n");
    let outcome = lab.run(command(&["ls", "/proc/self/fd"])).await;
    // The last is the directory that ls has open.
    assert_eq!(outcome.text(), "0\n1\n2\n3\n");
}

// Guard: `Prepared::enter`, before the descriptors are put in their places.
#[tokio::test]
async fn numbers_that_the_executor_uses_itself_are_the_command_s() {
    let lab = Lab::start().await;
    lab.write("f", "own\n");
    let mut spec = pipeline(&["cat f"]);
    spec.stages[0].descriptors.extend((3..200).map(|fd| descriptor(fd, Source::NullFlags(0))));
    let outcome = lab.run(spec).await;
    assert_eq!((outcome.text().as_str(), outcome.errors().as_str()), ("own\n", ""));
}

#[tokio::test]
async fn a_closed_descriptor_is_closed() {
    let lab = Lab::start().await;
    let mut spec = pipeline(&["cat"]);
    spec.stages[0].descriptors[0].source = Some(Source::Closed(true));
    let outcome = lab.run(spec).await;
    assert_eq!(
        outcome.errors(),
        "cat: -: Bad file descriptor\ncat: closing standard input: Bad file descriptor\n"
    );
    assert_eq!(outcome.codes(), [How::Code(1)]);
}

fn with_pty(mut spec: RunSpec) -> RunSpec {
    let size = WindowSize { rows: 33, columns: 77, x_pixels: 0, y_pixels: 0 };
    spec.ptys = vec![Pty { id: 300, size: Some(size) }];
    spec.stages[0].descriptors[1].source = Some(Source::Pty(300));
    spec.outlets[0].sources = vec![300];
    spec
}

#[tokio::test]
async fn a_pty_is_a_terminal_of_the_given_size() {
    let lab = Lab::start().await;
    let outcome =
        lab.run(with_pty(command(&["sh", "-c", "test -t 1 && stty size <&1; echo end"]))).await;
    assert_eq!(outcome.text(), "33 77\nend\n", "{outcome:?}");
    let wait = "trap 'stty size <&1; exit' WINCH; echo ready; while :; do sleep 0.05; done";
    let mut call = Call::open(&lab.client, with_pty(command(&["sh", "-c", wait]))).await;
    call.until_output("ready").await;
    call.send(Kind::WindowSize(WindowSize { rows: 10, columns: 20, x_pixels: 0, y_pixels: 0 }))
        .await;
    call.until_output("10 20").await;
}

#[tokio::test]
async fn merges_and_outlets_read_their_sources_in_order() {
    let lab = Lab::start().await;
    // More than all pipes hold, so that the later ones must wait.
    let counts = ["seq 1 300000", "seq 300001 600000", "seq 600001 900000"];
    let expected: String = (1..=900_000).map(|n| format!("{n}\n")).collect();
    let mut spec = pipeline(&["cat"]);
    for (at, count) in (0..).zip(counts) {
        let mut seq = pipeline(&[count]).stages.remove(0);
        seq.id = 10 + at;
        seq.descriptors[1].source = Some(Source::PipeWrite(200 + at));
        spec.pipes.push(200 + at);
        spec.stages.push(seq);
    }
    let mut outlets_only = spec.clone();
    spec.pipes.push(250);
    spec.stages[0].descriptors[0].source = Some(Source::PipeRead(250));
    spec.merges = vec![Merge { sources: vec![200, 201, 202], pipe: 250 }];
    let outcome = lab.run(spec).await;
    assert!(outcome.text() == expected, "merge: {} bytes", outcome.out.len());
    outlets_only.stages.remove(0);
    outlets_only.outlets[0].sources = vec![200, 201, 202];
    let outcome = lab.run(outlets_only).await;
    assert!(outcome.text() == expected, "outlet: {} bytes", outcome.out.len());
}

#[tokio::test]
async fn the_reader_of_a_merge_that_stops_ends_all_writers() {
    let lab = Lab::start().await;
    let mut spec = pipeline(&["head -1"]);
    for at in 0..2 {
        let mut yes = pipeline(&["yes"]).stages.remove(0);
        yes.id = 10 + at;
        yes.descriptors[1].source = Some(Source::PipeWrite(200 + at));
        spec.pipes.push(200 + at);
        spec.stages.push(yes);
    }
    spec.pipes.push(250);
    spec.stages[0].descriptors[0].source = Some(Source::PipeRead(250));
    spec.merges = vec![Merge { sources: vec![200, 201], pipe: 250 }];
    let outcome = lab.run(spec).await;
    assert_eq!(outcome.text(), "y\n");
    assert_eq!(outcome.codes(), [How::Code(0), How::Signal(13), How::Signal(13)]);
}

#[tokio::test]
async fn an_inlet_can_be_part_of_a_merge() {
    let lab = Lab::start().await;
    let mut spec = pipeline_with_input(&["cat"]);
    let mut echo = pipeline(&["echo second"]).stages.remove(0);
    echo.id = 2;
    echo.descriptors[1].source = Some(Source::PipeWrite(200));
    spec.stages.push(echo);
    spec.pipes.extend([200, 250]);
    spec.stages[0].descriptors[0].source = Some(Source::PipeRead(250));
    spec.inlets = vec![Inlet { stream: IN, pipe: 98 }];
    spec.merges = vec![Merge { sources: vec![98, 200], pipe: 250 }];
    assert_eq!(run(&lab.client, spec, "first\n".into()).await.text(), "first\nsecond\n");
}

#[tokio::test]
async fn a_stage_starts_as_the_shell_would_have_started_it() {
    let lab = Lab::start().await;
    let script = "echo $0 $LANG $PATH; umask; ulimit -n; nice; kill -PIPE $$; echo alive; cut -d' ' -f5 /proc/$$/stat";
    let mut spec = command(&["odd name", "-c", script]);
    let stage = &mut spec.stages[0];
    stage.program = "sh".into();
    let variable = |name: &str, value: &str| EnvVar {
        name: name.to_owned().into(),
        value: value.to_owned().into(),
    };
    stage.env = vec![variable("LANG", "xx"), variable("PATH", "/nowhere")];
    stage.umask = 0o027;
    stage.nice = 5;
    stage.ignored_signals = 1 << 12;
    stage.limits = vec![ResourceLimit { resource: libc::RLIMIT_NOFILE, soft: 77, hard: 99 }];
    let text = lab.run(spec).await.text();
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[0].starts_with("odd name xx /usr/local/sbin:"), "{text}");
    assert_eq!(lines[1..5], ["0027", "77", "5", "alive"], "{text}");
    // The default limit is the executor's original one, not the raised one.
    let (soft, _) =
        nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
    let text = lab.run(command(&["sh", "-c", "ulimit -n; kill -PIPE $$; echo alive"])).await.text();
    assert!(text.trim().parse::<u64>().unwrap() <= soft, "{text}");
}

#[tokio::test]
async fn signals_reach_a_stage_or_its_group() {
    let lab = Lab::start().await;
    let script = "trap 'echo got it; exit 3' TERM; echo ready; while :; do sleep 0.05; done";
    let mut call = Call::open(&lab.client, command(&["sh", "-c", script])).await;
    call.until_output("ready").await;
    call.send(Kind::Signal(Signal { stage: 1, signal: 15, group: false })).await;
    let outcome = call.collect(Bytes::new()).await;
    assert_eq!((outcome.text().as_str(), outcome.codes()), ("got it\n", vec![How::Code(3)]));
    // Not SIGINT: dash can lose that between fork and exec. And not before it has forked: dash
    // holds signals up for that, and its child never gets those.
    let script = "sh -c 'echo ready; exec sleep 1000'; echo not reached";
    let mut call = Call::open(&lab.client, command(&["sh", "-c", script])).await;
    call.until_output("ready").await;
    call.send(Kind::Signal(Signal { stage: 1, signal: 15, group: true })).await;
    let outcome = call.collect(Bytes::new()).await;
    assert_eq!((outcome.text().as_str(), outcome.codes()), ("", vec![How::Signal(15)]));
}

/// The client does not know yet that it has started.
#[tokio::test]
async fn a_signal_right_behind_the_specification_is_not_lost() {
    let lab = Lab::start().await;
    for _ in 0..20 {
        let call = Call::open(&lab.client, command(&["sleep", "1000"])).await;
        call.send(Kind::Signal(Signal { stage: 1, signal: 15, group: true })).await;
        let outcome =
            tokio::time::timeout(PATIENCE, call.collect(Bytes::new())).await.expect("it is ended");
        assert_eq!(outcome.codes(), vec![How::Signal(15)]);
    }
}

#[tokio::test]
async fn ten_thousand_names_fit() {
    let lab = Lab::start().await;
    let mut names = vec!["echo".to_owned()];
    names.extend((0..10_000).map(|n| format!("{n:0100}")));
    let words: Vec<_> = names.iter().map(String::as_str).collect();
    let mut spec = command(&words);
    spec.stages[0].paths = words[1..].iter().map(|name| path_use(name)).collect();
    assert_eq!(lab.run(spec).await.text().len(), 10_000 * 101);
}

#[tokio::test]
async fn five_hundred_stages_in_a_row() {
    let lab = Lab::start().await;
    let mut commands = vec!["echo through"];
    commands.resize(500, "cat");
    let outcome = lab.run(pipeline(&commands)).await;
    assert_eq!(outcome.text(), "through\n");
    assert_eq!(outcome.exits.len(), 500);
}

fn started(kind: &run_output::Kind) -> Option<()> {
    matches!(kind, run_output::Kind::Started(_)).then_some(())
}

fn exited(kind: &run_output::Kind) -> Option<How> {
    match kind {
        run_output::Kind::Exited(exited) => exited.how,
        _ => None,
    }
}

fn chunk(kind: &run_output::Kind) -> Option<&Bytes> {
    match kind {
        run_output::Kind::Chunk(Chunk { stream: OUT, data }) => Some(data),
        _ => None,
    }
}
