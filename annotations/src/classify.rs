//! Classifies one invocation: finds the annotation that fits its words, and evaluates the
//! annotation's keywords.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use crate::facts::{Environment, Facts};
use crate::files::{self, FilesFault, Gathered};
use crate::invocation::{
    Aggregator, Because, CurrentDir, FileKind, Invocation, LineEnds, Split, StatusRule, StdinUse,
    TerminalUse, ToolVersion, Unknown,
};
use crate::library::Library;
use crate::model::{
    Annotation, Arity, Body, Command, Joiner, KeptOptions, Reason, Subject, ValueType,
};
use crate::words::{self, GivenOption, Manner, Misfit, Why};

/// Environment variables on which every command depends: locale (messages, collation) and getopt's
/// parsing mode.
const ENVIRONMENT_OF_ALL: [&str; 4] = ["LANG", "LANGUAGE", "LC_*", "POSIXLY_CORRECT"];

/// An invocation and how its words were read: first those before the
/// subcommand's name (if there is one), then those of the annotation that fits.
pub struct Understood<'a> {
    pub invocation: Invocation,
    pub levels: Vec<Facts<'a>>,
}

/// Reads one invocation. `name` is the last component of the command's path.
pub fn understand<'a>(
    library: &'a Library,
    name: &str,
    argv: &'a [OsString],
    environment: Environment<'a>,
) -> Result<Understood<'a>, Unknown> {
    let command = library.command(name).ok_or_else(|| Unknown::Command(name.to_owned()))?;
    let mut walk = InvocationWalk { library, argv, environment, outer: Vec::new() };
    walk.command(name, command, 1)
}

struct InvocationWalk<'a> {
    library: &'a Library,
    argv: &'a [OsString],
    environment: Environment<'a>,
    /// Options and files read before the subcommand's name, outermost command first.
    outer: Vec<(Facts<'a>, Gathered)>,
}

/// Reason why an annotation does not accept an invocation.
enum Refusal {
    /// The next annotation may accept it.
    Misfit(Misfit),
    /// No annotation may accept it.
    Final(Unknown),
}

impl<'a> InvocationWalk<'a> {
    /// Reads `argv[from..]`, the words after the command's name.
    fn command(
        &mut self,
        name: &str,
        command: &'a Command,
        from: usize,
    ) -> Result<Understood<'a>, Unknown> {
        let annotations = match &command.body {
            Body::Annotations(annotations) => annotations,
            Body::Subcommands(before) => return self.subcommand(name, before, from),
        };
        let mut best: Option<Misfit> = None;
        for annotation in annotations {
            match self.annotation(name, annotation, from, false) {
                Ok((facts, gathered)) => return self.finish(name, facts, gathered),
                Err(Refusal::Final(unknown)) => return Err(unknown),
                Err(Refusal::Misfit(misfit)) => {
                    if best.as_ref().is_none_or(|best| best.at < misfit.at) {
                        best = Some(misfit);
                    }
                }
            }
        }
        Err(best
            .map_or_else(|| Unknown::Command(name.to_owned()), |misfit| misfit.into_unknown(name)))
    }

    fn subcommand(
        &mut self,
        name: &str,
        before: &'a Annotation,
        from: usize,
    ) -> Result<Understood<'a>, Unknown> {
        let (facts, gathered) =
            self.annotation(name, before, from, true).map_err(|refusal| match refusal {
                Refusal::Misfit(misfit) => misfit.into_unknown(name),
                Refusal::Final(unknown) => unknown,
            })?;
        let Some(operand) = facts.reading.operands.first().map(|operand| operand.argument) else {
            return Err(Unknown::Shape {
                command: name.to_owned(),
                reason: "a subcommand is missing".to_owned(),
            });
        };
        let subcommand = self.argv[operand].to_string_lossy().into_owned();
        let full = format!("{name} {subcommand}");
        let Some(command) = self.library.command(&full) else {
            return Err(Unknown::Subcommand { command: name.to_owned(), subcommand });
        };
        self.outer.push((facts, gathered));
        self.command(&full, command, operand + 1)
    }

    fn annotation(
        &self,
        name: &str,
        annotation: &'a Annotation,
        from: usize,
        until_operand: bool,
    ) -> Result<(Facts<'a>, Gathered), Refusal> {
        let posix = !annotation.style.ignores_posixly_correct
            && (self.environment)("POSIXLY_CORRECT").is_some();
        let manner =
            Manner { from, options_first: annotation.style.options_first || posix, until_operand };
        let misfit = |reason: &str, at: usize| {
            Refusal::Misfit(Misfit { at: (at, 0), why: Why::Shape(reason.to_owned()) })
        };
        let reading = words::read(annotation, self.argv, manner).map_err(Refusal::Misfit)?;
        let facts = if until_operand {
            Facts::undealt(annotation, self.argv, reading, self.environment)
        } else {
            Facts::new(annotation, self.argv, reading, self.environment)
                .map_err(|fault| misfit(&fault.to_string(), self.argv.len()))?
        };
        if !facts.holds(&annotation.when) {
            return Err(misfit("this use of it is not annotated", 0));
        }
        let stays = |reason: &str, because| {
            Refusal::Final(Unknown::StaysHere {
                command: name.to_owned(),
                reason: reason.to_owned(),
                because,
            })
        };
        if let Some(reason) = self.stays_here(&facts) {
            return Err(stays(&reason.text, reason.because));
        }
        let inside = self.outer.iter().any(|(_, gathered)| gathered.working_dir.is_some());
        match files::gather(&facts, inside) {
            Ok(gathered) => Ok((facts, gathered)),
            Err(FilesFault::Shape(reason)) => Err(misfit(&reason, self.argv.len())),
            Err(FilesFault::Stays(reason)) => Err(stays(&reason, Because::Exactness)),
        }
    }

    /// The annotation's first local reason that applies and that the library does not ignore.
    fn stays_here(&self, facts: &Facts<'a>) -> Option<&'a Reason> {
        let given = facts.reading.given.iter();
        let of_flags =
            given.filter_map(|given| facts.annotation.options[given.option].stays_here.as_ref());
        let mut reasons = of_flags.chain(facts.holding(&facts.annotation.stays_here));
        reasons.find(|reason| self.library.heeds(reason.because))
    }

    fn finish(
        &mut self,
        name: &str,
        facts: Facts<'a>,
        gathered: Gathered,
    ) -> Result<Understood<'a>, Unknown> {
        let mut invocation = invocation(name, &facts, &gathered);
        let mut levels = Vec::new();
        for (outer, before) in self.outer.drain(..).rev() {
            add_outer(&mut invocation, &outer, before, gathered.writes_below_working_dir);
            levels.insert(0, outer);
        }
        self.add_programs(&mut invocation)?;
        settle(&mut invocation);
        levels.push(facts);
        Ok(Understood { invocation, levels })
    }

    /// Adds what the programs that the command starts read beside their words, which are unknown
    /// here: so a variable by which one of them may stay here keeps the command here.
    fn add_programs(&self, invocation: &mut Invocation) -> Result<(), Unknown> {
        let started = invocation.runs.iter().chain(&invocation.helpers);
        let commands: Vec<(String, &Command)> =
            started.filter_map(|name| Some((name.clone(), self.library.command(name)?))).collect();
        for (name, command) in commands {
            let annotations = match &command.body {
                Body::Annotations(annotations) => annotations.as_slice(),
                Body::Subcommands(before) => std::slice::from_ref(&**before),
            };
            for annotation in annotations {
                let mut variables = Vec::new();
                annotation
                    .stays_here
                    .iter()
                    .for_each(|reason| reason.when.variables(&mut variables));
                if let Some(variable) =
                    variables.into_iter().find(|variable| (self.environment)(variable).is_some())
                {
                    return Err(Unknown::StaysHere {
                        command: invocation.command.clone(),
                        reason: format!("{variable} is set, for {name}, which it starts"),
                        because: Because::Exactness,
                    });
                }
                invocation.environment.extend(annotation.environment.iter().cloned());
                invocation.client_files.extend(annotation.client_files.iter().cloned());
            }
        }
        Ok(())
    }
}

impl Misfit {
    fn into_unknown(self, name: &str) -> Unknown {
        let command = name.to_owned();
        match self.why {
            Why::Flag(flag) => Unknown::Flag { command, flag },
            Why::Shape(reason) => Unknown::Shape { command, reason },
        }
    }
}

/// Evaluates the keywords.
fn invocation(name: &str, facts: &Facts<'_>, gathered: &Gathered) -> Invocation {
    let annotation = facts.annotation;
    let mut current_dir =
        facts.case(&annotation.needs_current_dir).copied().unwrap_or(CurrentDir::Unused);
    if let Some(by_default) = default_dir(facts) {
        current_dir = if current_dir == CurrentDir::Writes { current_dir } else { by_default };
    }
    let stdin = stdin(facts, gathered);
    let writes = current_dir == CurrentDir::Writes
        || gathered.writes_below_working_dir
        || gathered.uses.iter().any(|file| file.kind.writes());
    let side_effects =
        annotation.side_effects.as_ref().map_or(writes, |condition| facts.holds(condition));
    Invocation {
        command: name.to_owned(),
        files: gathered.uses.clone(),
        current_dir,
        stdin,
        output_weight: facts.case(&annotation.output_weight).copied().unwrap_or(1.0),
        split: split(facts, gathered, stdin),
        status_rule: facts.case(&annotation.status).copied().unwrap_or(StatusRule::Maximum),
        line_ends: facts.case(&annotation.line_ends).copied().unwrap_or(LineEnds::Unknown),
        environment: annotation.environment.clone(),
        client_files: annotation.client_files.clone(),
        same_files: annotation.same_files.clone(),
        deterministic: annotation
            .deterministic
            .as_ref()
            .is_none_or(|condition| facts.holds(condition)),
        idempotent: annotation
            .idempotent
            .as_ref()
            .map_or(!side_effects, |condition| facts.holds(condition)),
        side_effects,
        needs_network: facts.holds(&annotation.needs_network),
        terminal: facts.case(&annotation.terminal).copied().unwrap_or(TerminalUse::Plain),
        tool_version: facts.case(&annotation.tool_version).copied().unwrap_or(ToolVersion::Same),
        runs: facts.holding(&annotation.runs).cloned().collect(),
        helpers: facts.holding(&annotation.helpers).cloned().collect(),
        shows: facts.holding(&annotation.shows).copied().collect(),
        searches_up: annotation.searches_up.clone(),
        remote_arguments: facts
            .holding(&annotation.when_remote)
            .flatten()
            .map(OsString::from)
            .collect(),
        changes_only: facts.holding(&annotation.changes_only).cloned().collect(),
        only_grows: annotation.only_grows.clone(),
        own_directories: annotation.own_directories.clone(),
        replaces_files: annotation
            .replaces_files
            .as_ref()
            .is_some_and(|condition| facts.holds(condition)),
        guards: facts.holding(&annotation.guards).cloned().collect(),
        working_dir: gathered.working_dir.clone(),
    }
}

/// The use of the current directory by an operand that is not given.
fn default_dir(facts: &Facts<'_>) -> Option<CurrentDir> {
    absent_params(facts).find(|(_, param)| facts.holds(&param.or_current_dir)).map(|(_, param)| {
        let writes =
            |types| matches!(facts.case(types), Some(ValueType::File(kind)) if kind.writes());
        if param.value.types.iter().any(writes) { CurrentDir::Writes } else { CurrentDir::Reads }
    })
}

/// PARAMS entries that exist and got no operand.
fn absent_params<'f>(
    facts: &'f Facts<'_>,
) -> impl Iterator<Item = (usize, &'f crate::model::Param)> {
    let params = facts.annotation.params.iter().enumerate();
    params.filter(|(number, param)| {
        facts.holds(&param.exists) && facts.arguments(*number).next().is_none()
    })
}

fn stdin(facts: &Facts<'_>, gathered: &Gathered) -> StdinUse {
    let by_default = || absent_params(facts).any(|(_, param)| facts.holds(&param.or_stdin));
    let reads = gathered.names_stdin || facts.holds(&facts.annotation.reads_stdin) || by_default();
    match (reads, reads && facts.holds(&facts.annotation.stops_early)) {
        (false, _) => StdinUse::Unused,
        (true, false) => StdinUse::ReadsAll,
        (true, true) => StdinUse::MayStopEarly,
    }
}

fn split(facts: &Facts<'_>, gathered: &Gathered, stdin: StdinUse) -> Option<Split> {
    let annotation = facts.annotation;
    let operands = splittable_operands(facts, gathered);
    let across_input = operands.is_empty()
        && stdin == StdinUse::ReadsAll
        && !gathered.stdin_in_option
        && gathered.file_operands == gathered.stdin_operands.len()
        && gathered.file_operands <= 1
        && facts.holds(&annotation.splittable_across_input);
    if operands.is_empty() && !across_input {
        return None;
    }
    let words = facts.holding(&annotation.when_split).flatten().filter(|_| !across_input);
    let add_arguments = words.map(OsString::from).collect();
    let aggregator =
        facts.case(&annotation.aggregator).and_then(|joiner| aggregator(facts, joiner));
    let behind_merge = facts.case(&annotation.behind_merge).copied().filter(|_| across_input);
    let whole_files = !operands.is_empty() && facts.holds(&annotation.whole_files);
    Some(Split { operands, across_input, add_arguments, aggregator, behind_merge, whole_files })
}

/// The arguments of the splittable entry: at least two, all of them plain files.
fn splittable_operands(facts: &Facts<'_>, gathered: &Gathered) -> Vec<usize> {
    let mut params = facts.annotation.params.iter().enumerate();
    let Some((number, _)) = params.find(|(_, param)| facts.holds(&param.splittable)) else {
        return Vec::new();
    };
    let operands: Vec<usize> = facts.arguments(number).collect();
    // Counted once: there are as many uses as operands.
    let stdin: std::collections::HashSet<&usize> = gathered.stdin_operands.iter().collect();
    let mut uses = std::collections::HashMap::<usize, usize>::new();
    gathered.uses.iter().for_each(|file| *uses.entry(file.argument).or_default() += 1);
    uses.retain(|argument, _| !stdin.contains(argument));
    let listed = |argument: &usize| uses.get(argument) == Some(&1);
    if operands.len() > 1 && operands.iter().all(listed) { operands } else { Vec::new() }
}

fn aggregator(facts: &Facts<'_>, joiner: &Joiner) -> Option<Aggregator> {
    let (words, keep, drops) = match joiner {
        Joiner::Concatenation => return None,
        Joiner::Same => return Some(Aggregator::Same),
        Joiner::Sum => return Some(Aggregator::Sum),
        Joiner::UniqCount => return Some(Aggregator::UniqCount),
        Joiner::WcTotal => return Some(Aggregator::WcTotal(letters(facts))),
        Joiner::Merge { words, keep, drops } => (words, keep, drops),
    };
    let mut words: Vec<OsString> = words.iter().map(OsString::from).collect();
    for given in &facts.reading.given {
        let kept = match keep {
            KeptOptions::Nothing => false,
            KeptOptions::Options => true,
            KeptOptions::Only(options) => options.contains(&given.option),
        };
        if kept {
            words.extend(written(facts, given));
        }
    }
    Some(Aggregator::Merge {
        words,
        drops: drops.iter().any(|option| facts.count(Subject::Option(*option)) > 0),
    })
}

/// The first short name of every option that is given.
fn letters(facts: &Facts<'_>) -> String {
    let short = facts
        .reading
        .given
        .iter()
        .filter_map(|given| facts.annotation.options[given.option].short.first());
    short.map(|letter| char::from(*letter)).collect()
}

/// One option as separate words, even if it was given in a bundle.
fn written(facts: &Facts<'_>, given: &GivenOption) -> Vec<OsString> {
    let mut name = facts.bytes(given.name).to_vec();
    let in_bundle = given.name.end - given.name.start == 1 && name != b"-";
    if in_bundle {
        name.insert(0, b'-');
    }
    let mut values: Vec<OsString> = given
        .values
        .iter()
        .map(|value| OsStr::from_bytes(facts.bytes(*value)).to_owned())
        .collect();
    let option = &facts.annotation.options[given.option];
    // An optional value must be attached; the number of `-5` has only its dash for a name.
    if (option.size == Arity::Optional || name == b"-") && !values.is_empty() {
        if name.starts_with(b"--") {
            name.push(b'=');
        }
        name.extend_from_slice(values.remove(0).as_bytes());
    }
    values.insert(0, OsStr::from_bytes(&name).to_owned());
    values
}

/// Merges the facts of an outer command's words before the subcommand into `invocation`.
fn add_outer(invocation: &mut Invocation, outer: &Facts<'_>, before: Gathered, writes_below: bool) {
    let changed = before.working_dir.is_some();
    let writes = writes_below || invocation.current_dir == CurrentDir::Writes;
    let mut files = before.uses;
    for file in &mut files {
        if changed && writes && file.kind == FileKind::InputDir {
            file.kind = FileKind::OutputDir;
        }
    }
    files.append(&mut invocation.files);
    invocation.files = files;
    if changed {
        invocation.working_dir = before.working_dir;
    }
    let annotation = outer.annotation;
    invocation.environment.extend(annotation.environment.iter().cloned());
    invocation.client_files.extend(annotation.client_files.iter().cloned());
    invocation.same_files.extend(annotation.same_files.iter().cloned());
    invocation.searches_up.extend(annotation.searches_up.iter().cloned());
    invocation.changes_only.extend(outer.holding(&annotation.changes_only).cloned());
    invocation.only_grows.extend(annotation.only_grows.iter().cloned());
    invocation.own_directories.extend(annotation.own_directories.iter().cloned());
    invocation.guards.splice(0..0, outer.holding(&annotation.guards).cloned());
    invocation.runs.extend(outer.holding(&annotation.runs).cloned());
    invocation.helpers.extend(outer.holding(&annotation.helpers).cloned());
    invocation.shows.extend(outer.holding(&annotation.shows).copied());
    // Behind the name of the outer command they would be its words.
    invocation.remote_arguments.clear();
}

/// Adds what holds for every command, then sorts and deduplicates the lists.
fn settle(invocation: &mut Invocation) {
    if invocation.working_dir.is_some() {
        invocation.current_dir = CurrentDir::Unused;
    }
    invocation.environment.extend(ENVIRONMENT_OF_ALL.map(str::to_owned));
    let guarded = invocation.guards.iter().flat_map(|guard| &guard.files);
    invocation.client_files.extend(guarded.filter(|file| file.starts_with(['/', '~'])).cloned());
    let Invocation { client_files, same_files, .. } = invocation;
    client_files.retain(|file| !same_files.contains(file));
    for list in [
        &mut invocation.environment,
        &mut invocation.client_files,
        &mut invocation.same_files,
        &mut invocation.searches_up,
        &mut invocation.runs,
        &mut invocation.helpers,
    ] {
        list.sort();
        list.dedup();
    }
    invocation.shows.sort();
    invocation.shows.dedup();
}
