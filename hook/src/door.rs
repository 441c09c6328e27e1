//! Decides how to execute a program: as given, with the session's variables, or by executing the
//! stage program in its place.
#![allow(unsafe_code, reason = "reads and builds the arrays that execve(2) takes")]

use core::{
    ffi::{CStr, c_char, c_int},
    iter,
};

use crate::{
    arena::Arena,
    leaves,
    look::{self, Look},
    message::SessionFile,
    pipes::{self, Notes, PipeWriter, Standard},
    question::Question,
    session::{self, SessionDirectory, SessionVariables},
    sys::{self, AT_FDCWD, E2BIG, PATH_BYTES, Stat, Strings},
    target::{self, Target},
    text::Full,
};

/// Longest variable that is built: its value is a path or a few of them. It fits a slot of the
/// arena beside the arguments of execve(2).
const VARIABLE_BYTES: usize = PATH_BYTES + 16;

/// An exec function: takes the program to execute instead (`None`: the given one) and the
/// environment; returns 0 or the error.
pub(crate) type Exec<'e> = dyn FnMut(Option<&CStr>, Strings) -> c_int + 'e;

/// Arguments of an exec.
#[derive(Clone, Copy)]
pub(crate) struct ExecRequest<'a> {
    /// As in openat(2).
    pub(crate) directory: c_int,
    /// As given, or as found on PATH.
    pub(crate) path: &'a CStr,
    pub(crate) argv: Strings,
    pub(crate) environment: Strings,
    /// Another process executes it (posix_spawn(3)).
    pub(crate) spawned: bool,
    /// Its working directory and descriptors will differ from this process's.
    pub(crate) moved: bool,
}

/// How to execute a request. Memory is taken from the arena only where it is used.
pub(crate) struct Plan<'a> {
    session: &'static SessionVariables,
    request: &'a ExecRequest<'a>,
    /// The program can be preloaded.
    preloads: bool,
    /// A known program that starts no other: executed locally, it needs no session variables.
    is_leaf: bool,
    /// `None` if the stage program is not used.
    stage: Option<StageUse>,
}

/// Use of the stage program.
#[derive(Clone, Copy)]
struct StageUse {
    directory: SessionDirectory<'static>,
    /// Prefix of the target variable.
    reach: &'static [u8],
}

impl<'a> Plan<'a> {
    /// `None`: execute exactly as given.
    ///
    /// # Safety
    /// The request's arrays are null or end in a null pointer, and all other entries point to C
    /// strings; likewise for arrays passed to its methods.
    pub(crate) unsafe fn of(request: &'a ExecRequest<'a>, arena: &mut Arena<'_>) -> Option<Self> {
        let session = session::current()?;
        let is_known = name_of(request.path).is_some_and(|name| session.knows(name, arena));
        let directory = if is_known { session.directory(arena) } else { None };
        let stage = directory.and_then(|directory| {
            // SAFETY: the caller's promise.
            let reach = unsafe { reach_in_words(directory, request, arena) }?;
            Some(StageUse { directory, reach })
        });
        let is_leaf = is_known && leaves::starts_no_other(request.path);
        if is_leaf && stage.is_none() {
            return None;
        }
        // Another user can't read it, and a cleaner may have removed it.
        if !session.library_is_in_reach() {
            return None;
        }
        let target = target::look(request.directory, request.path, arena);
        if target == Target::Closed {
            return None;
        }
        let preloads = target == Target::Preloads;
        (stage.is_some() || preloads).then_some(Self { session, request, preloads, is_leaf, stage })
    }

    /// The session's variables, for a program that preloads.
    ///
    /// # Safety
    /// As for [`Plan::of`].
    pub(crate) unsafe fn variables<'m>(&self, arena: &mut Arena<'m>) -> Option<[&'m CStr; 2]> {
        let session: &'static CStr = self.session.session.as_c_str()?;
        // SAFETY: the caller's promise.
        let theirs = unsafe { preloaded(self.request.environment) };
        match theirs {
            _ if !self.preloads => None,
            None => Some([session, self.session.preload.as_c_str()?]),
            Some(theirs) => Some([session, joined_preload(self.session, theirs, arena)?]),
        }
    }

    /// Tries the ways to execute, best first, until one returns 0 or an error of the given program
    /// itself.
    ///
    /// # Safety
    /// As for [`Plan::of`].
    pub(crate) unsafe fn attempt(&self, arena: &mut Arena<'_>, exec: &mut Exec<'_>) -> c_int {
        let environment = self.request.environment;
        // SAFETY: the caller's promise holds for all calls.
        unsafe {
            match self.stage {
                Some(stage)
                    if !self.stays(stage, arena)
                        && self.execute_stage(stage, arena, exec) == Some(0) =>
                {
                    return 0;
                }
                Some(_) => {}
                None => self.note_other(arena),
            }
            if self.is_leaf {
                return exec(None, environment);
            }
            match self.with_session(arena) {
                // The program may fit without the session's variables; any other error is its own.
                Some(extended) => match exec(None, extended) {
                    E2BIG => exec(None, environment),
                    result => result,
                },
                None => exec(None, environment),
            }
        }
    }

    /// The environment with the session's variables; `None` if there are too many entries.
    ///
    /// # Safety
    /// As for [`Plan::of`].
    #[inline(never)]
    unsafe fn with_session(&self, arena: &mut Arena<'_>) -> Option<Strings> {
        // SAFETY: the caller's promise.
        unsafe {
            let variables = self.variables(arena)?;
            extended(self.request.environment, &variables, arena)
        }
    }

    /// Returns true if the command is certain to stay local, and notes this for the readers of its
    /// output. Examines this process.
    ///
    /// # Safety
    /// As for [`Plan::of`].
    #[inline(never)]
    unsafe fn stays(&self, stage: StageUse, arena: &mut Arena<'_>) -> bool {
        if self.request.spawned {
            return false;
        }
        let mut arena = arena.scope();
        let Some(file) = stage.directory.file(&mut arena) else { return false };
        let Some(about) = SessionFile::read(file.as_bytes()).filter(|about| !about.is_told_of)
        else {
            return false;
        };
        let streams = [0, 1, 2].map(standard_stream);
        let pipes = Standard::of(streams);
        let notes =
            (pipes != Standard::default()).then(|| stage.directory.notes(&mut arena)).flatten();
        let touches_nothing = stage.reach == session::PIPE_ONLY;
        // The gateway knows a command that asks; its neighbours know one that does not ask by the
        // notes alone.
        let may_stay = if touches_nothing { notes.is_some() } else { about.asks };
        // SAFETY: the caller's promise.
        let may_stay = may_stay && !unsafe { self.names_descriptors() };
        let note = |writer| {
            notes.iter().for_each(|notes| pipes.outputs().for_each(|pipe| notes.note(pipe, writer)))
        };
        if may_stay {
            note(PipeWriter::Decides);
        }
        let is_fed_here = || {
            let stays = |notes: &Notes, pipe| notes.wait_for_writer(pipe) == PipeWriter::Stays;
            pipes.input.is_none_or(|pipe| notes.as_ref().is_some_and(|notes| stays(notes, pipe)))
        };
        // SAFETY: as above.
        let stays = may_stay
            && is_fed_here()
            && (touches_nothing || unsafe { self.is_at_hand(&about, streams, pipes, arena) });
        note(if stays { PipeWriter::Stays } else { PipeWriter::IsAsked });
        stays
    }

    /// Notes that an unknown program, and so the data that it pipes on, is local, unless the
    /// program becomes another one by exec.
    #[inline(never)]
    fn note_other(&self, arena: &mut Arena<'_>) {
        let output = standard_stream(1).filter(|output| output.is_pipe() && !self.request.spawned);
        let Some(pipe) = output.map(|output| output.inode) else { return };
        let path = self.request.path.to_bytes();
        let becomes_another = name_of(self.request.path).is_none_or(pipes::becomes_another);
        if becomes_another || path.starts_with(b"/proc/") {
            return;
        }
        let directory = self.session.directory(arena);
        if let Some(notes) = directory.and_then(|directory| directory.notes(arena)) {
            notes.note(pipe, PipeWriter::Stays);
        }
    }

    /// Returns true if a word probably names a descriptor of this process (`/dev/fd/63`).
    ///
    /// # Safety
    /// As for [`Plan::of`].
    unsafe fn names_descriptors(&self) -> bool {
        let is_one = |word: &[u8]| match word.strip_prefix(b"/dev/") {
            Some(device) => device.starts_with(b"fd/") || device.starts_with(b"std"),
            None => word.starts_with(b"/proc/") && word.windows(4).any(|part| part == b"/fd/"),
        };
        // SAFETY: the caller's promise.
        unsafe { strings(self.request.argv) }.any(|word| is_one(word.to_bytes()))
    }

    /// Returns true if the gateway answers at once that the command stays local.
    ///
    /// # Safety
    /// As for [`Plan::of`].
    #[inline(never)]
    unsafe fn is_at_hand(
        &self,
        about: &SessionFile<'_>,
        streams: [Option<Stat>; 3],
        pipes: Standard,
        mut arena: Arena<'_>,
    ) -> bool {
        let on_mounts = streams.iter().enumerate().filter_map(|(fd, stream)| {
            let may_own = stream
                .filter(|stream| stream.is_file())?
                .mount
                .is_none_or(|mount| about.places.may_own(mount));
            may_own.then_some(1_u8 << fd)
        });
        let on_mounts = on_mounts.fold(0, |bits, bit| bits | bit);
        let Some(cwd) = sys::working_directory(&mut arena) else { return false };
        // SAFETY: the caller's promise.
        unsafe { self.is_known_at_once(about, cwd, on_mounts, pipes, arena) }
    }

    /// Sends the question, with the working directory and the streams on mounts.
    ///
    /// # Safety
    /// As for [`Plan::of`].
    #[inline(never)]
    unsafe fn is_known_at_once(
        &self,
        about: &SessionFile<'_>,
        cwd: &[u8],
        on_mounts: u8,
        pipes: Standard,
        mut arena: Arena<'_>,
    ) -> bool {
        let mut question = || -> Result<Question<'_>, Full> {
            let mut question = Question::of(self.request.path.to_bytes(), &mut arena)?;
            question.working_directory(cwd)?;
            question.streams(on_mounts)?;
            pipes.outputs().try_for_each(|pipe| question.writes(pipe))?;
            // SAFETY: the caller's promise.
            unsafe { strings(self.request.argv) }
                .try_for_each(|word| question.word(word.to_bytes()))?;
            Ok(question)
        };
        question().is_ok_and(|question| question.ask(about.socket))
    }

    /// Executes the stage program, with the variable that names its target.
    ///
    /// # Safety
    /// As for [`Plan::of`].
    #[inline(never)]
    unsafe fn execute_stage(
        &self,
        stage: StageUse,
        arena: &mut Arena<'_>,
        exec: &mut Exec<'_>,
    ) -> Option<c_int> {
        let mut arena = arena.scope();
        let path = self.request.path;
        let program = stage.directory.stage_program(name_of(path)?, &mut arena)?;
        let target = variable(
            &[session::TARGET_VARIABLE.as_bytes(), b"=", stage.reach, path.to_bytes()],
            &mut arena,
        )?;
        let session = self.session.session.as_c_str()?;
        if !sys::is_executable(path) || !sys::is_executable(program) {
            return None;
        }
        // SAFETY: the caller's promise.
        let environment = unsafe {
            match self.preloads {
                true => {
                    let [session, preload] = self.variables(&mut arena)?;
                    extended(self.request.environment, &[session, preload, target], &mut arena)
                }
                false => extended(self.request.environment, &[session, target], &mut arena),
            }
        };
        Some(exec(Some(program), environment?))
    }
}

fn name_of(path: &CStr) -> Option<&[u8]> {
    path.to_bytes().rsplit(|byte| *byte == b'/').next().filter(|name| !name.is_empty())
}

/// Prefix of the stage program's target variable for a known command; `None` if it can't touch a
/// mount.
///
/// # Safety
/// As for [`Plan::of`].
#[inline(never)]
unsafe fn reach_in_words(
    directory: SessionDirectory<'_>,
    request: &ExecRequest<'_>,
    arena: &mut Arena<'_>,
) -> Option<&'static [u8]> {
    // SAFETY: the caller's promise.
    let reach = match request.directory {
        AT_FDCWD => unsafe { reach(directory, request, arena.scope()) }?,
        _ => Reach::Nothing,
    };
    match reach {
        Reach::Nothing => None,
        Reach::Pipe => Some(session::PIPE_ONLY),
        Reach::Mount => Some(session::MAY_TOUCH),
    }
}

/// Files that a command can reach.
enum Reach {
    /// No owned mount.
    Nothing,
    /// A pipe, whose other end may belong to a command that reaches an owned mount.
    Pipe,
    /// Possibly an owned mount.
    Mount,
}

/// Checks the working directory, every word, and descriptors 0 to 2.
///
/// # Safety
/// As for [`Plan::of`].
unsafe fn reach(
    directory: SessionDirectory<'_>,
    request: &ExecRequest<'_>,
    mut arena: Arena<'_>,
) -> Option<Reach> {
    let file = directory.file(&mut arena)?;
    let SessionFile { always_enlist, places, .. } = SessionFile::read(file.as_bytes())?;
    if !places.has_owned() {
        return Some(if always_enlist { Reach::Mount } else { Reach::Nothing });
    }
    if request.moved {
        return Some(Reach::Mount);
    }
    let look = Look::new(places, sys::working_directory(&mut arena)?);
    // SAFETY: the caller's promise.
    let mut words = unsafe { strings(request.argv) }.skip(1);
    let standard = [0, 1, 2].map(standard_stream);
    let mut streams = standard.iter().enumerate();
    let owned = look.cwd_is_owned()
        || streams
            .any(|(fd, stream)| stream.is_some_and(|s| is_owned(places, fd, s, arena.scope())));
    Some(if owned || words.any(|word| look.may_touch(word.to_bytes(), &mut arena)) {
        Reach::Mount
    } else if standard.iter().take(2).flatten().any(|stream| stream.is_pipe()) {
        Reach::Pipe
    } else if always_enlist {
        Reach::Mount
    } else {
        Reach::Nothing
    })
}

/// Status of descriptor 0, 1 or 2.
fn standard_stream(fd: c_int) -> Option<Stat> {
    sys::stat(fd, c"", sys::AT_EMPTY_PATH | sys::AT_STATX_DONT_SYNC)
}

/// Returns true if the stream's file is on an owned mount. Its mount id decides in most cases: the
/// first access to a new process's /proc costs as much as all other checks.
fn is_owned(places: look::Places<'_>, fd: usize, stream: Stat, mut arena: Arena<'_>) -> bool {
    if stream.mount.is_some_and(|mount| !places.may_own(mount)) {
        return false;
    }
    const LINKS: [&CStr; 3] = [c"/proc/self/fd/0", c"/proc/self/fd/1", c"/proc/self/fd/2"];
    let Some(link) = LINKS.get(fd) else { return false };
    let target = arena.filled(PATH_BYTES, sys::ENOMEM, |buffer| sys::read_link(link, buffer));
    target.is_ok_and(|target| look::is_owned(places, target))
}

/// The value of `LD_PRELOAD` in the environment.
///
/// # Safety
/// As for [`Plan::of`].
unsafe fn preloaded(environment: Strings) -> Option<&'static [u8]> {
    let name = session::PRELOAD_VARIABLE.as_bytes();
    let value =
        |variable: &'static CStr| variable.to_bytes().strip_prefix(name)?.strip_prefix(b"=");
    // SAFETY: the caller's promise.
    unsafe { strings(environment) }.filter_map(value).last().filter(|value| !value.is_empty())
}

/// `LD_PRELOAD=` with our library first, then the given ones; `None` if it is too long.
#[inline(never)]
fn joined_preload<'m>(
    session: &SessionVariables,
    theirs: &[u8],
    arena: &mut Arena<'m>,
) -> Option<&'m CStr> {
    let ours = session.preload.as_bytes().strip_suffix(b"\0").unwrap_or_default();
    variable(&[ours, b":", theirs], arena)
}

/// The concatenated parts; `None` if they are too long for a variable.
fn variable<'m>(parts: &[&[u8]], arena: &mut Arena<'m>) -> Option<&'m CStr> {
    let len = parts.iter().fold(0_usize, |sum, part| sum.saturating_add(part.len()));
    if len < VARIABLE_BYTES { arena.c_str(parts) } else { None }
}

/// The pointers of an array up to the null pointer, each read once.
///
/// # Safety
/// The array is null or ends in a null pointer.
pub(crate) unsafe fn words(array: Strings) -> impl Iterator<Item = *const c_char> {
    let mut next = Some(array).filter(|array| !array.is_null());
    iter::from_fn(move || {
        let at = next?;
        // SAFETY: the caller's promise; nothing behind the null pointer is read.
        let word = unsafe { sys::entry(at, 0) };
        next = (!word.is_null()).then(|| at.wrapping_add(1));
        next.map(|_| word)
    })
}

/// The strings of an array. They are used only until the exec returns.
///
/// # Safety
/// As for [`words`], and all before the null pointer are C strings.
unsafe fn strings(array: Strings) -> impl Iterator<Item = &'static CStr> {
    // SAFETY: the caller's promise.
    unsafe { words(array) }.map(|word| unsafe { CStr::from_ptr(word) })
}

/// The environment with these variables appended; `None` if there are too many entries.
///
/// # Safety
/// As for [`words`].
unsafe fn extended(
    environment: Strings,
    extras: &[&CStr],
    arena: &mut Arena<'_>,
) -> Option<Strings> {
    // SAFETY: the caller's promise.
    let entries = unsafe { words(environment) };
    Some(arena.words(entries.chain(extras.iter().map(|extra| extra.as_ptr())))?.as_ptr())
}
