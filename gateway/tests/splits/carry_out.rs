//! Carries out a case unsplit, and as the planner splits it.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fmt, fs,
    io::Write as _,
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::LazyLock,
};

use posh_annotations::{Invocation, Library};
use posh_gateway::{
    dispatch::output::StageOutput,
    facts,
    join::{self, AggregatorEvent, AggregatorProgram, Joining, Recipe, Words, status},
    lower::{JOINED, argv_of},
    model::Edge,
    plan::{
        self, ExecutorId, Flow, Join, LineEnds, Need, PipelineFacts, Placement, Plan, PlanSettings,
        StageFacts, StagePart,
    },
    stage_link::Status,
};

/// What a name stands for.
#[derive(Debug, Clone)]
pub enum Content {
    Bytes(Vec<u8>),
    Missing,
    Directory,
    Tree(Vec<&'static str>),
    Image,
}

/// An operand of the first stage, and whose it is.
#[derive(Debug, Clone)]
pub struct File {
    pub name: String,
    pub content: Content,
    pub owner: usize,
}

/// A pipeline whose first stage has files.
#[derive(Debug, Clone)]
pub struct Case {
    pub stages: Vec<Vec<String>>,
    pub files: Vec<File>,
    /// Words of the first stage behind the files.
    pub behind: Vec<String>,
    pub factor: usize,
    pub locale: String,
}

/// What came of a case.
pub enum Verdict {
    /// The annotations, the planner or the executor's checks left it whole.
    NotSplit,
    Same,
    Differs(String),
}

/// Output, error outputs and statuses by stage, and the files afterwards.
#[derive(PartialEq, Eq)]
struct Outcome {
    output: Vec<u8>,
    errors: Vec<Vec<u8>>,
    statuses: Vec<Status>,
    tree: BTreeMap<PathBuf, Vec<u8>>,
}

type Ran = (Vec<u8>, Vec<u8>, Status);

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "LC_ALL={} {:?} {:?}, {} parts a machine",
            self.locale, self.stages, self.behind, self.factor
        )?;
        self.files.iter().try_for_each(|file| match &file.content {
            Content::Bytes(bytes) => {
                writeln!(f, "  {:?} on {}: {}", file.name, file.owner, shown(bytes))
            }
            other => writeln!(f, "  {:?} on {}: {other:?}", file.name, file.owner),
        })
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let errors: Vec<String> = self.errors.iter().map(|e| shown(e)).collect();
        write!(f, "{} errors {errors:?} {:?}", shown(&self.output), self.statuses)?;
        self.tree
            .iter()
            .try_for_each(|(path, bytes)| write!(f, " {}:{}", path.display(), bytes.len()))
    }
}

fn shown(bytes: &[u8]) -> String {
    const LONGEST: usize = 400;
    let text = bytes.escape_ascii().to_string();
    if text.len() > LONGEST {
        format!("{}... ({} bytes)", &text[..LONGEST], bytes.len())
    } else {
        text
    }
}

/// The locales among which a tool can make a difference, as far as this machine has them.
pub fn locales() -> Vec<String> {
    static FOUND: LazyLock<Vec<String>> = LazyLock::new(|| {
        let listed = Command::new("locale").arg("-a").output().unwrap().stdout;
        let listed = String::from_utf8_lossy(&listed).to_lowercase();
        let mut found = vec!["C".to_owned(), "C.UTF-8".to_owned()];
        found.extend(listed.lines().any(|l| l == "en_us.utf8").then(|| "en_US.UTF-8".to_owned()));
        found
    });
    FOUND.clone()
}

/// A JPEG file, made once.
static IMAGE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let made = Command::new("convert")
        .args(["-size", "8x6", "gradient:red-blue", "jpg:-"])
        .output()
        .unwrap();
    assert!(made.status.success() && !made.stdout.is_empty(), "convert makes an image");
    made.stdout
});

/// Runs the case both ways.
pub fn compare(library: &Library, case: &Case) -> Verdict {
    let machine = Machine::new(case);
    let Some(stages) = machine.stages(library, case) else { return Verdict::NotSplit };
    let Some(plan) = machine.plan(case, &stages) else { return Verdict::NotSplit };
    let whole = machine.whole(&stages);
    let machine = Machine::new(case);
    let parts = machine.in_parts(&stages, &plan);
    if whole == parts {
        return Verdict::Same;
    }
    Verdict::Differs(format!("{plan}whole {whole}\nparts {parts}"))
}

struct Stage {
    argv: Vec<OsString>,
    invocation: Invocation,
}

/// A directory with the files of a case; it stands for all machines.
struct Machine {
    directory: tempfile::TempDir,
    locale: String,
}

impl Machine {
    fn new(case: &Case) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for file in &case.files {
            let path = directory.path().join(&file.name);
            match &file.content {
                Content::Bytes(bytes) => fs::write(path, bytes).unwrap(),
                Content::Missing => {}
                Content::Directory => fs::create_dir(path).unwrap(),
                Content::Tree(names) => {
                    fs::create_dir(&path).unwrap();
                    for name in names {
                        let file = path.join(name);
                        fs::create_dir_all(file.parent().unwrap()).unwrap();
                        fs::write(file, name).unwrap();
                    }
                }
                Content::Image => fs::write(path, &*IMAGE).unwrap(),
            }
        }
        Self { directory, locale: case.locale.clone() }
    }

    fn environment(&self) -> Vec<(OsString, OsString)> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        vec![
            ("PATH".into(), path),
            ("LC_ALL".into(), self.locale.clone().into()),
            ("TZ".into(), "UTC".into()),
        ]
    }

    /// The stages as their annotations read them; `None` if one of them is not understood.
    fn stages(&self, library: &Library, case: &Case) -> Option<Vec<Stage>> {
        let environment = self.environment();
        let lookup =
            |name: &str| environment.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
        let stages = case.stages.iter().enumerate().map(|(index, words)| {
            let mut argv: Vec<OsString> = words.iter().map(OsString::from).collect();
            if index == 0 {
                argv.extend(case.files.iter().map(|f| OsString::from(&f.name)));
                argv.extend(case.behind.iter().map(OsString::from));
            }
            let invocation = library.classify(&words[0], &argv, &lookup).ok()?;
            Some(Stage { argv, invocation })
        });
        stages.collect()
    }

    /// The plan, made anew as the gateway does when an executor's check refuses it; `None` if
    /// nothing is split.
    fn plan(&self, case: &Case, stages: &[Stage]) -> Option<Plan> {
        let last = stages.len() - 1;
        let mut facts = PipelineFacts {
            stages: stages
                .iter()
                .map(|s| StageFacts { output: Flow::Nothing, ..facts::splitting(&s.invocation) })
                .collect(),
            edges: (0..last).map(|i| Edge { from: (i, 1), to: (i + 1, 0) }).collect(),
            own_input_only: BTreeMap::new(),
        };
        facts.stages[last].output = Flow::At(plan::Site::Here);
        let head = &mut facts.stages[0];
        let operands = &stages[0].invocation.split.as_ref()?.operands;
        let owner = |word: &OsStr| {
            case.files.iter().find(|f| *f.name == *word).map(|f| ExecutorId(f.owner))
        };
        head.operands = operands
            .iter()
            .map(|o| Some((*o, owner(&stages[0].argv[*o])?)))
            .collect::<Option<_>>()?;
        let first = head.operands.first()?.1;
        head.need = if head.operands.iter().all(|(_, e)| *e == first) {
            Need::At(first)
        } else {
            Need::Split
        };
        // What is cheap is for the planner's own tests: here all is to be offloaded.
        facts.stages.iter_mut().for_each(|s| s.weight = s.weight.min(0.5));
        let options = PlanSettings { split_factor: case.factor, ..PlanSettings::default() };
        let mut plan = plan::greedy(&facts, options);
        if !self.seams_hold(&plan, &stages[0]) {
            facts.stages.iter_mut().for_each(|s| s.line_ends = LineEnds::Unknown);
            plan = plan::greedy(&facts, options);
        }
        if !self.files_hold(&plan, &stages[0]) {
            return None;
        }
        let in_parts = |p: &Placement| matches!(p, Placement::Remote(parts) if parts.len() > 1);
        // The command that is tried is the last one.
        in_parts(&plan.placements[last]).then_some(plan)
    }

    fn seams_hold(&self, plan: &Plan, head: &Stage) -> bool {
        parts(plan, 0).iter().filter(|p| p.needs_newline).all(|part| {
            let last = part.operands.as_ref().and_then(|o| o.last()).unwrap();
            fs::read(self.path(&head.argv[*last])).is_ok_and(|bytes| bytes.ends_with(b"\n"))
        })
    }

    fn files_hold(&self, plan: &Plan, head: &Stage) -> bool {
        let mut operands = parts(plan, 0)
            .iter()
            .filter(|p| p.whole_files)
            .flat_map(|p| p.operands.iter().flatten());
        operands.all(|operand| self.path(&head.argv[*operand]).is_file())
    }

    fn path(&self, name: &OsStr) -> PathBuf {
        self.directory.path().join(name)
    }

    fn whole(&self, stages: &[Stage]) -> Outcome {
        let mut input = None;
        let mut outcome = Outcome {
            output: Vec::new(),
            errors: Vec::new(),
            statuses: Vec::new(),
            tree: BTreeMap::new(),
        };
        for stage in stages {
            let (output, errors, status) = self.run(&stage.argv, input.as_deref());
            outcome.errors.push(errors);
            outcome.statuses.push(status);
            input = Some(output);
        }
        outcome.output = input.unwrap();
        outcome.tree = tree(self.directory.path());
        outcome
    }

    fn in_parts(&self, stages: &[Stage], plan: &Plan) -> Outcome {
        let mut inputs: Vec<Option<Vec<u8>>> = vec![None; parts(plan, 0).len().max(1)];
        let mut outcome = Outcome {
            output: Vec::new(),
            errors: Vec::new(),
            statuses: Vec::new(),
            tree: BTreeMap::new(),
        };
        for (index, stage) in stages.iter().enumerate() {
            let parts = parts(plan, index);
            let ran: Vec<Ran> = match parts {
                [] => vec![self.run(&stage.argv, inputs[0].as_deref())],
                parts => (parts.iter().zip(&inputs))
                    .map(|(part, input)| {
                        self.run(&argv_of(&stage.argv, &stage.invocation, part), input.as_deref())
                    })
                    .collect(),
            };
            let outputs: Vec<Vec<u8>> = ran.iter().map(|(output, ..)| output.clone()).collect();
            let mut by = (Vec::new(), None);
            inputs = match plan.joins[index] {
                Join::Parts => outputs.into_iter().map(Some).collect(),
                Join::InOrder => vec![Some(outputs.concat())],
                Join::By { steps, .. } => {
                    let words = |s: usize| Words {
                        argv: &stages[s].argv,
                        invocation: &stages[s].invocation,
                    };
                    let (output, errors, status) =
                        self.join(&Recipe::of(steps, index, parts, &words), &outputs);
                    by = (errors, Some(status));
                    vec![Some(output)]
                }
            };
            let statuses: Vec<Status> = ran.iter().map(|(.., status)| *status).collect();
            outcome.statuses.push(status::of_stage(&statuses, by.1, stage.invocation.status_rule));
            outcome.errors.push(errors_of(&stage.argv, parts, &ran, &by.0));
        }
        outcome.output = inputs.into_iter().flatten().flatten().collect();
        outcome.tree = tree(self.directory.path());
        outcome
    }

    /// One command; `None` reads nothing.
    fn run(&self, argv: &[OsString], input: Option<&[u8]>) -> Ran {
        let mut command = Command::new(&argv[0]);
        command
            .args(&argv[1..])
            .current_dir(self.directory.path())
            .env_clear()
            .envs(self.environment());
        command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let stdin = child.stdin.take();
        let output = std::thread::scope(|scope| {
            if let (Some(mut stdin), Some(input)) = (stdin, input) {
                // One that ends early is none of our concern.
                scope.spawn(move || drop(stdin.write_all(input)));
            }
            child.wait_with_output().unwrap()
        });
        let status = match output.status.signal() {
            Some(signal) => Status::Signal(signal.cast_unsigned()),
            None => Status::Code(output.status.code().unwrap().cast_unsigned()),
        };
        (output.stdout, output.stderr, status)
    }

    /// A join as the gateway runs it.
    fn join(&self, recipe: &Recipe, outputs: &[Vec<u8>]) -> Ran {
        let program = |words: &[OsString]| AggregatorProgram {
            path: which(&words[0].to_string_lossy()).unwrap(),
            env: self.environment(),
        };
        let programs: Vec<AggregatorProgram> =
            recipe.commands.iter().map(|step| program(&step.argv)).collect();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (mut joining, mut told) = Joining::start(recipe, &programs).unwrap();
            // From the last to the first, and in pieces: they come as they like.
            for (part, output) in outputs.iter().enumerate().rev() {
                output.chunks(1000).for_each(|piece| joining.push(part, piece.to_vec().into()));
                joining.end(part);
            }
            let (mut output, mut errors) = (Vec::new(), Vec::new());
            loop {
                match told.recv().await.unwrap() {
                    AggregatorEvent::Fed(..) => {}
                    AggregatorEvent::Output(data) => {
                        joining.allow(data.len() as u64);
                        output.extend_from_slice(&data);
                    }
                    AggregatorEvent::Errors(data) => errors.extend_from_slice(&data),
                    AggregatorEvent::Over(status) => return (output, errors, status),
                }
            }
        })
    }
}

/// The parts of a stage; none when it runs here.
fn parts(plan: &Plan, stage: usize) -> &[StagePart] {
    match &plan.placements[stage] {
        Placement::Remote(parts) => parts,
        Placement::Here(_) => &[],
    }
}

/// The error outputs of parts and of what joins them, as the gateway puts them together.
fn errors_of(argv: &[OsString], parts: &[StagePart], ran: &[Ran], by: &[u8]) -> Vec<u8> {
    let mut streams: Vec<(usize, u32)> = (0..ran.len()).map(|part| (part, 2)).collect();
    streams.push((JOINED, 2));
    let mut output = match join::starts_alike(argv, parts) {
        true => StageOutput::of_errors(&streams, ran.len()),
        false => StageOutput::new(&streams),
    };
    let texts: Vec<&[u8]> =
        ran.iter().map(|(_, errors, _)| errors.as_slice()).chain([by]).collect();
    let mut text = Vec::new();
    for (stream, errors) in streams.into_iter().zip(texts).rev() {
        text.extend(output.push(stream, errors.to_vec().into()));
        text.extend(output.end(stream));
    }
    text.concat()
}

fn tree(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(tree(&path)),
            false => drop(
                found.insert(path.file_name().unwrap().into(), fs::read(&path).unwrap_or_default()),
            ),
        }
    }
    found
}

/// The program of a name.
pub fn which(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|d| d.join(name)).find(|p| p.is_file())
}
