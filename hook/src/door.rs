//! The decision at the door, and what follows from it: a program is executed
//! as it is given, or with the session's variables, or the stage program is
//! executed in its place.
#![allow(unsafe_code, reason = "reads and builds the arrays that execve(2) takes")]

use core::{
    ffi::{CStr, c_char, c_int},
    mem::MaybeUninit,
    ptr,
};

use crate::{
    foreseen::Digest,
    leaves,
    look::{self, Look},
    message::SessionFile,
    pipes::{self, Notes, Standard, Writer},
    question::Question,
    session::{self, Session},
    sys::{self, AT_FDCWD, E2BIG, PATH_BYTES, Stat},
    target::{self, Target},
    text::{Full, Text},
};

/// A variable whose value is a path, or a few of them.
type Variable = Text<{ PATH_BYTES + 16 }>;

/// argv or an environment: pointers to C strings, the last one null.
pub(crate) type Strings = *const *const c_char;

/// Sizes of the array for an environment that grows by our variables. On the stack, since what
/// a child of vfork allocates stays with its parent. The usual one fits the first; above
/// the last (half a MiB) a program is executed as given, and what it starts is not seen.
const SMALL: usize = 256;
const MIDDLE: usize = 4096;
const LARGE: usize = 65_536;
/// At most so many variables are added.
const MAX_EXTRAS: usize = 3;

/// What is about to be executed.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    /// As in openat(2).
    pub(crate) directory: c_int,
    /// As it was given, or found on PATH.
    pub(crate) path: &'a CStr,
    pub(crate) argv: Strings,
    pub(crate) environment: Strings,
    /// Another process is going to execute it.
    pub(crate) spawned: bool,
    /// Its working directory and descriptors will be others than this process has now.
    pub(crate) moved: bool,
}

/// How it is to go. Small, and what needs room is made where it is used and on no other way: each page of the stack that is
/// touched in a forked child costs about as much as all the system calls here together.
pub(crate) struct Plan<'a> {
    session: &'static Session,
    request: &'a Request<'a>,
    /// The program can be preloaded.
    preloads: bool,
    /// It is one that posh knows, and that starts no other: executed here, it goes without us.
    is_leaf: bool,
    /// What the stage program is to be told, if it is to be executed instead.
    reach: Option<&'static [u8]>,
}

impl<'a> Plan<'a> {
    /// `None`: exactly as given.
    ///
    /// # Safety
    /// The request's arrays are null or end in a null pointer, and all others point to C strings; so do those that its
    /// methods get.
    pub(crate) unsafe fn of(request: &'a Request<'a>) -> Option<Self> {
        let session = session::current()?;
        let is_known = name_of(request.path).is_some_and(|name| session.knows(name));
        // SAFETY: the caller's promise.
        let reach = if is_known { unsafe { reach_in_words(session, request) } } else { None };
        let is_leaf = is_known && leaves::starts_no_other(request.path);
        if is_leaf && reach.is_none() {
            return None;
        }
        // Not here, for this user: another root directory, another mount namespace, another user.
        if !session.library().is_some_and(sys::is_readable) {
            return None;
        }
        let target = target::look(request.directory, request.path);
        if target == Target::Closed {
            return None;
        }
        let preloads = target == Target::Preloads;
        (reach.is_some() || preloads).then_some(Self { session, request, preloads, is_leaf, reach })
    }

    /// Calls with the session's variables for a program that preloads.
    pub(crate) unsafe fn with_variables(&self, call: &mut dyn FnMut([&CStr; 2]) -> Option<c_int>) -> Option<c_int> {
        let session = self.session.session.as_c_str()?;
        // SAFETY: the caller's promise.
        let theirs = unsafe { preloaded(self.request.environment) };
        match theirs {
            _ if !self.preloads => None,
            None => call([session, self.session.preload.as_c_str()?]),
            Some(theirs) => joined_preload(self.session, theirs, &mut |preload| call([session, preload])),
        }
    }

    /// Makes attempts, the best first, each with the program to execute instead (`None`: the one given) and the
    /// environment, until one gives 0 or an error that is the given program's own.
    ///
    /// # Safety
    /// As for [`Plan::of`].
    pub(crate) unsafe fn attempt(&self, exec: &mut dyn FnMut(Option<&CStr>, Strings) -> c_int) -> c_int {
        let environment = self.request.environment;
        // SAFETY: the caller's promise holds for all calls.
        unsafe {
            match self.reach {
                Some(reach) if !self.stays(reach) && self.stage(reach, exec) == Some(0) => return 0,
                Some(_) => {}
                None => self.note_other(),
            }
            if self.is_leaf {
                return exec(None, environment);
            }
            let with_session = self.with_variables(&mut |variables| {
                extended(environment, &variables, &mut |environment| exec(None, environment))
            });
            match with_session {
                // It fits without our variables, or its error is the right one.
                None | Some(E2BIG) => exec(None, environment),
                Some(result) => result,
            }
        }
    }

    /// Whether the command stays here for certain; who reads what it writes is told. It looks at this process.
    #[inline(never)]
    unsafe fn stays(&self, reach: &[u8]) -> bool {
        if self.request.spawned {
            return false;
        }
        let Some(file) = self.session.file() else { return false };
        let Some(about) = SessionFile::read(file.as_bytes()).filter(|about| !about.is_told_of) else { return false };
        let streams = [0, 1, 2].map(standard_stream);
        let pipes = Standard::of(streams);
        let notes = (pipes != Standard::default()).then(|| Notes::open(self.session.directory())).flatten();
        let touches_nothing = reach == session::PIPE_ONLY;
        // Whoever asks is known to the gateway, too; of another one, its neighbours know by the notes alone.
        let may_stay = if touches_nothing { notes.is_some() } else { about.asks };
        // SAFETY: the caller's promise.
        let may_stay = may_stay && !unsafe { self.names_descriptors() };
        let is_fed_here = || {
            let stays = |notes: &Notes, pipe| notes.wait_for_writer(pipe) == Writer::Stays;
            pipes.input.is_none_or(|pipe| notes.as_ref().is_some_and(|notes| stays(notes, pipe)))
        };
        // SAFETY: as above.
        let stays =
            may_stay && is_fed_here() && (touches_nothing || unsafe { self.is_at_hand(&about, streams, pipes) });
        let told = if stays { Writer::Stays } else { Writer::IsAsked };
        notes.iter().for_each(|notes| pipes.outputs().for_each(|pipe| notes.note(pipe, told)));
        stays
    }

    /// A program that posh does not know runs here, and so does what it pipes on, unless it is one that becomes another.
    #[inline(never)]
    fn note_other(&self) {
        let output = standard_stream(1).filter(|output| output.is_pipe() && !self.request.spawned);
        let Some(pipe) = output.map(|output| output.inode) else { return };
        let path = self.request.path.to_bytes();
        let becomes_another = name_of(self.request.path).is_none_or(pipes::becomes_another);
        if becomes_another || path.starts_with(b"/proc/") {
            return;
        }
        if let Some(notes) = Notes::open(self.session.directory()) {
            notes.note(pipe, Writer::Stays);
        }
    }

    /// A word is a pipe of this process, most likely (`/dev/fd/63`).
    unsafe fn names_descriptors(&self) -> bool {
        let is_one = |word: &[u8]| match word.strip_prefix(b"/dev/") {
            Some(device) => device.starts_with(b"fd/") || device.starts_with(b"std"),
            None => word.starts_with(b"/proc/") && word.windows(4).any(|part| part == b"/fd/"),
        };
        // SAFETY: the caller's promise.
        unsafe { strings(self.request.argv) }.any(|word| is_one(word.to_bytes()))
    }

    /// Whether the gateway has said before, or knows at once, that all of it is at hand.
    #[inline(never)]
    unsafe fn is_at_hand(&self, about: &SessionFile<'_>, streams: [Option<Stat>; 3], pipes: Standard) -> bool {
        let on_mounts = streams.iter().enumerate().filter_map(|(fd, stream)| {
            let may_own =
                stream.filter(|stream| stream.is_file())?.mount.is_none_or(|mount| about.places.may_own(mount));
            may_own.then_some(1_u8 << fd)
        });
        let on_mounts = on_mounts.fold(0, |bits, bit| bits | bit);
        // SAFETY: the caller's promise.
        unsafe { self.is_foreseen(about, on_mounts) || self.is_known_at_once(about, on_mounts, pipes) }
    }

    /// Whether the gateway has said it before the command came.
    unsafe fn is_foreseen(&self, about: &SessionFile<'_>, on_mounts: u8) -> bool {
        let (all, until_ns) = about.foreseen;
        if all.is_empty() || sys::monotonic_ns() > until_ns {
            return false;
        }
        let mut digest = Digest::new(sys::working_directory().as_bytes(), on_mounts);
        // SAFETY: the caller's promise.
        unsafe { strings(self.request.argv) }.for_each(|word| digest.word(word.to_bytes()));
        digest.is_in(all)
    }

    /// Whether it says so now.
    #[inline(never)]
    unsafe fn is_known_at_once(&self, about: &SessionFile<'_>, on_mounts: u8, pipes: Standard) -> bool {
        let question = || -> Result<Question, Full> {
            let mut question = Question::of(self.request.path.to_bytes())?;
            question.working_directory(sys::working_directory().as_bytes())?;
            question.streams(on_mounts)?;
            pipes.outputs().try_for_each(|pipe| question.writes(pipe))?;
            // SAFETY: the caller's promise.
            unsafe { strings(self.request.argv) }.try_for_each(|word| question.word(word.to_bytes()))?;
            Ok(question)
        };
        question().is_ok_and(|question| question.ask(about.socket))
    }

    /// Executes the stage program, with the variable that tells it what it stands for.
    #[inline(never)]
    unsafe fn stage(&self, reach: &[u8], exec: &mut dyn FnMut(Option<&CStr>, Strings) -> c_int) -> Option<c_int> {
        let path = self.request.path;
        let program = self.session.stage_program(name_of(path)?)?;
        let program = program.as_c_str()?;
        let target: Variable =
            Text::of(&[session::TARGET_VARIABLE.as_bytes(), b"=", reach, path.to_bytes(), b"\0"]).ok()?;
        let (target, session) = (target.as_c_str()?, self.session.session.as_c_str()?);
        if !sys::is_executable(path) || !sys::is_executable(program) {
            return None;
        }
        let environment = self.request.environment;
        let mut exec = |environment| exec(Some(program), environment);
        // SAFETY: the caller's promise.
        unsafe {
            match self.preloads {
                true => self.with_variables(&mut |[session, preload]| {
                    extended(environment, &[session, preload, target], &mut exec)
                }),
                false => extended(environment, &[session, target], &mut exec),
            }
        }
    }
}

fn name_of(path: &CStr) -> Option<&[u8]> {
    path.to_bytes().rsplit(|byte| *byte == b'/').next().filter(|name| !name.is_empty())
}

/// What the stage program is to be told of a command that posh knows, if it may touch a mount.
#[inline(never)]
unsafe fn reach_in_words(session: &Session, request: &Request<'_>) -> Option<&'static [u8]> {
    // SAFETY: the caller's promise.
    let reach = if request.directory == AT_FDCWD { unsafe { reach(session, request) }? } else { Reach::Nothing };
    match reach {
        Reach::Nothing => None,
        Reach::Pipe => Some(session::PIPE_ONLY),
        Reach::Mount => Some(session::MAY_TOUCH),
    }
}

/// What a command can reach.
enum Reach {
    /// No mount that has an owner.
    Nothing,
    /// A pipe, whose other end may be a command's that reaches one.
    Pipe,
    /// Such a mount, perhaps.
    Mount,
}

/// The quick look: at the working directory, every word, and descriptors 0 to 2.
unsafe fn reach(session: &Session, request: &Request<'_>) -> Option<Reach> {
    let file = session.file()?;
    let SessionFile { always_enlist, places, .. } = SessionFile::read(file.as_bytes())?;
    if places.owned().next().is_none() {
        return Some(if always_enlist { Reach::Mount } else { Reach::Nothing });
    }
    if request.moved {
        return Some(Reach::Mount);
    }
    let cwd = sys::working_directory();
    let look = Look::new(places, cwd.as_bytes());
    // SAFETY: the caller's promise.
    let mut words = unsafe { strings(request.argv) }.skip(1);
    let standard = [0, 1, 2].map(standard_stream);
    let mut streams = standard.iter().enumerate();
    let owned = look.cwd_is_owned() || streams.any(|(fd, stream)| stream.is_some_and(|s| is_owned(places, fd, s)));
    Some(if owned || words.any(|word| look.may_touch(word.to_bytes())) {
        Reach::Mount
    } else if standard.iter().take(2).flatten().any(|stream| stream.is_pipe()) {
        Reach::Pipe
    } else if always_enlist {
        Reach::Mount
    } else {
        Reach::Nothing
    })
}

/// What descriptor 0, 1 or 2 is.
fn standard_stream(fd: c_int) -> Option<Stat> {
    sys::stat(fd, c"", sys::AT_EMPTY_PATH | sys::AT_STATX_DONT_SYNC)
}

/// Its mount tells in most cases; the first look into a new process's /proc costs as much as all the rest here.
fn is_owned(places: look::Places<'_>, fd: usize, stream: Stat) -> bool {
    if stream.mount.is_some_and(|mount| !places.may_own(mount)) {
        return false;
    }
    const LINKS: [&[u8]; 3] = [b"/proc/self/fd/0", b"/proc/self/fd/1", b"/proc/self/fd/2"];
    let target = LINKS.get(fd).and_then(|link| sys::read_link(link).ok());
    target.is_some_and(|target| look::is_owned(places, target.as_bytes()))
}

/// The libraries that the environment names.
unsafe fn preloaded(environment: Strings) -> Option<&'static [u8]> {
    let name = session::PRELOAD_VARIABLE.as_bytes();
    let value = |variable: &'static CStr| variable.to_bytes().strip_prefix(name)?.strip_prefix(b"=");
    // SAFETY: the caller's promise.
    unsafe { strings(environment) }.filter_map(value).last().filter(|value| !value.is_empty())
}

/// Calls with `LD_PRELOAD=` with our library first and then theirs; `None` when that is too long.
#[inline(never)]
fn joined_preload(session: &Session, theirs: &[u8], call: &mut dyn FnMut(&CStr) -> Option<c_int>) -> Option<c_int> {
    let ours = session.preload.as_bytes().strip_suffix(b"\0").unwrap_or_default();
    let joined: Variable = Text::of(&[ours, b":", theirs, b"\0"]).ok()?;
    call(joined.as_c_str()?)
}

/// The strings of an array. They live as long as the exec takes, which is all that anybody here does.
unsafe fn strings(array: Strings) -> impl Iterator<Item = &'static CStr> {
    // SAFETY: the caller's promise: nothing behind the null pointer is read, and all before are C strings.
    let count = if array.is_null() { 0 } else { unsafe { session::count(array) } };
    // SAFETY: as above.
    (0..count).map(move |index| unsafe { CStr::from_ptr(*array.add(index)) })
}

/// Calls with the environment and these variables behind it; `None` when there are too many for that.
unsafe fn extended(environment: Strings, extras: &[&CStr], call: &mut dyn FnMut(Strings) -> c_int) -> Option<c_int> {
    // SAFETY: the caller's promise.
    let count = if environment.is_null() { 0 } else { unsafe { session::count(environment) } };
    let parts = [(environment, count)];
    // SAFETY: the part has that many entries.
    unsafe { joined(&parts, extras, call) }
}

/// Calls with an array on the stack: the first parts, then the others, then null.
///
/// # Safety
/// Each part has that many entries.
pub(crate) unsafe fn joined(
    parts: &[(Strings, usize)],
    extras: &[&CStr],
    call: &mut dyn FnMut(Strings) -> c_int,
) -> Option<c_int> {
    let needed = parts.iter().fold(MAX_EXTRAS + 1, |sum, (_, count)| sum.saturating_add(*count));
    // SAFETY: the size was chosen so that all fits; the parts are as promised.
    unsafe {
        if needed <= SMALL {
            Some(on_stack::<SMALL>(parts, extras, call))
        } else if needed <= MIDDLE {
            Some(on_stack::<MIDDLE>(parts, extras, call))
        } else {
            (needed <= LARGE).then(|| on_stack::<LARGE>(parts, extras, call))
        }
    }
}

/// Not inlined: each size is taken from the stack only by those who need it.
#[inline(never)]
unsafe fn on_stack<const N: usize>(
    parts: &[(Strings, usize)],
    extras: &[&CStr],
    call: &mut dyn FnMut(Strings) -> c_int,
) -> c_int {
    let mut array = [const { MaybeUninit::<*const c_char>::uninit() }; N];
    let mut slots = array.iter_mut();
    let mut put = |entry: *const c_char| {
        if let Some(slot) = slots.next() {
            slot.write(entry);
        }
    };
    for (part, count) in parts {
        // SAFETY: the part has that many entries.
        (0..*count).for_each(|index| put(unsafe { *part.add(index) }));
    }
    extras.iter().for_each(|extra| put(extra.as_ptr()));
    put(ptr::null());
    call(array.as_ptr().cast())
}
