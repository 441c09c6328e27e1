//! Facts about one concrete invocation: plain data, made by [`crate::Library::classify`] and read
//! by the gateway's planner.

use std::ffi::OsString;

use crate::settings::Setting;

/// One command with its arguments, read by the annotation that fits it.
#[derive(Debug, Clone, PartialEq)]
pub struct Invocation {
    /// The annotated command's name, with its subcommand: `grep`, `git status`.
    pub command: String,
    /// Every file the arguments name, in the order of argv.
    pub files: Vec<FileUse>,
    /// Use of the current directory when no argument names it (`needs_current_dir`); an operand
    /// that defaults to `.` counts here.
    pub current_dir: CurrentDir,
    /// Use of standard input.
    pub stdin: StdinUse,
    /// Bytes out for each byte in: 0.5 for `filters_input` unless a number is given,
    /// above 1 for what expands (paper §5.2).
    pub output_weight: f64,
    /// How the command can be split across its operands or its input (paper §5.3).
    pub split: Option<Split>,
    /// How exit statuses of the parts make the status of the whole.
    pub status_rule: StatusRule,
    /// How the last line of its output ends: decides whether a split of it may go on in the next
    /// stage.
    pub line_ends: LineEnds,
    /// Environment variables that can change what it does: names, or prefixes ending in `*`.
    pub environment: Vec<String>,
    /// Configuration files of the user it reads: absolute, or starting with `~/`.
    pub client_files: Vec<String>,
    /// Files that must be the same on this machine and on the executor's: absolute, or starting
    /// with `~/`. None of them is sent.
    pub same_files: Vec<String>,
    /// Same input, same output: may be run again to resume an interrupted stream.
    pub deterministic: bool,
    /// Running it twice leaves what running it once leaves.
    pub idempotent: bool,
    /// Changes something besides its standard output.
    pub side_effects: bool,
    /// Needs the network (never offloaded).
    pub needs_network: bool,
    /// Dependence of the output on a terminal.
    pub terminal: TerminalUse,
    /// Which version of the tool an executor must have.
    pub tool_version: ToolVersion,
    /// Other commands that it starts, whose versions matter too (`tar -z` starts gzip).
    pub runs: Vec<String>,
    /// Programs that it starts beside those, names or absolute paths, whose versions do not matter
    /// (`tar -z` starts sh). On an executor it can start no others.
    pub helpers: Vec<String>,
    /// File attributes that its result depends on, and that a mount may not show as the
    /// server has them. Sorted, once each.
    pub shows: Vec<FileAttribute>,
    /// Names that it looks for in its directory and in every directory above (`.git`).
    pub searches_up: Vec<String>,
    /// Words inserted after `argv[0]` (or the subcommand) when its files are on a remote file
    /// system and it runs on their server (`when_remote`), so that it behaves as on a remote file
    /// system.
    pub remote_arguments: Vec<OsString>,
    /// Everything that it changes in a tree that it may change: paths relative to the tree's top,
    /// the directory that contains one of [`Invocation::searches_up`]. Empty: anything in the tree.
    pub changes_only: Vec<String>,
    /// Directories, relative to the same top, to which entries are only ever added, in
    /// subdirectories too: existing entries keep name and content (git's objects).
    pub only_grows: Vec<String>,
    /// Trees, relative to the same top, that are private to the command: nobody asks for the times
    /// of their directories, and they are seldom listed (`.git`).
    pub own_directories: Vec<String>,
    /// Outside of those it changes no file in place: it removes the file and creates a new one, so
    /// that the directory's times show the change.
    pub replaces_files: bool,
    /// Tests on files near its directory ([`Invocation::working_dir`], else the current one), made
    /// by the executor in the annotation's order. The first that fails keeps the invocation local.
    pub guards: Vec<Guard>,
    /// The directory that it changes to before all else (`git -C DIR`), as written and also in
    /// [`Invocation::files`]; `None`: the current directory.
    pub working_dir: Option<OsString>,
}

/// See [`Invocation::guards`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guard {
    /// The directory of this name in the command's directory and in every one above it; `None`:
    /// these directories themselves.
    pub below: Option<String>,
    /// Relative to each directory found; absolute, or starting with `~/`: one file of the user, and
    /// also in [`Invocation::client_files`].
    pub files: Vec<String>,
    /// Condition that makes the guard fail.
    pub test: GuardTest,
    /// Reason for running locally then: a sentence for `explain`.
    pub reason: String,
}

/// Condition that keeps an invocation local. The patterns of settings are `section.key` or
/// `section.key=value` with `*` for any text, and apply to files in the form of git-config(1).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuardTest {
    /// One of the files exists.
    Exists,
    /// One of the files is an executable file.
    Executable,
    /// A directory holds all of the files.
    AllExist,
    /// A setting in one of the files matches neither list.
    SettingsAllowed {
        /// Settings that the command may need: those of the user's files are sent with it.
        allowed: Vec<String>,
        /// Settings that it does not need: those of the user's files are not sent.
        withheld: Vec<String>,
    },
    /// No setting in any of the files is one of these.
    SettingRequired(Vec<String>),
}

impl GuardTest {
    /// All patterns of a test on settings.
    pub fn patterns(&self) -> impl Iterator<Item = &String> {
        let (patterns, more) = match self {
            Self::Exists | Self::Executable | Self::AllExist => (&[][..], &[][..]),
            Self::SettingsAllowed { allowed, withheld } => (&allowed[..], &withheld[..]),
            Self::SettingRequired(patterns) => (&patterns[..], &[][..]),
        };
        patterns.iter().chain(more)
    }

    /// How a [`GuardTest::SettingsAllowed`] admits one of the user's settings; `None` if the
    /// setting fails the test, or if this is another test.
    #[must_use]
    pub fn admits(&self, setting: &Setting) -> Option<Admitted> {
        let Self::SettingsAllowed { allowed, withheld } = self else { return None };
        let is_one_of =
            |patterns: &[String]| patterns.iter().any(|pattern| setting.is_like(pattern));
        if is_one_of(allowed) {
            return Some(Admitted::Sent);
        }
        is_one_of(withheld).then_some(Admitted::Withheld)
    }
}

/// See [`GuardTest::admits`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admitted {
    /// Sent with the command.
    Sent,
    /// Kept on this machine.
    Withheld,
}

/// See [`Invocation::shows`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FileAttribute {
    /// Owner and group.
    Owner,
    /// Owner and group, which a file that the command makes gets from its input: any mount leaves
    /// that to the server.
    CopiedOwner,
    /// Inode numbers.
    Inode,
    /// Numbers of hard links.
    Links,
    /// Blocks used on the disk.
    Blocks,
    /// Device numbers, and with them the borders of file systems.
    Device,
    /// Times of change, to the fraction of a second that is stored.
    Times,
    /// Permissions.
    Mode,
    /// Sizes of directories.
    DirSize,
    /// The order in which a directory lists its entries.
    Order,
    /// Times of access.
    AccessTime,
    /// Targets of symbolic links.
    Symlinks,
}

/// How a command uses a file that an argument names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileUse {
    /// Index into argv.
    pub argument: usize,
    /// Byte offset of the path inside that argument (after `--file=` or `-f`).
    pub start: usize,
    /// One past the path's last byte inside that argument.
    pub end: usize,
    /// The path itself, as written.
    pub path: OsString,
    /// Read, written, or both; a file or a tree.
    pub kind: FileKind,
    /// A symlink at the last component is not followed (`rm`, `ls -d`, `mv`).
    pub no_follow: bool,
}

impl FileUse {
    /// Returns true if the command may open the file itself, if it is no link. Of names that are
    /// not followed, it opens only input files (`cp -P`); others it lists, walks, moves or removes.
    pub fn is_opened(&self) -> bool {
        !self.no_follow || self.kind == FileKind::InputFile
    }
}

/// The annotation language's file types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// `input_file`
    InputFile,
    /// `input_dir`: a directory (or file) that is walked.
    InputDir,
    /// `output_file`
    OutputFile,
    /// `output_dir`: files below it are made or changed.
    OutputDir,
    /// `new_dir`: a directory that is made, with those above it that are missing. One that is there
    /// stays as it is.
    NewDir,
    /// `inout_file`: changed in place.
    InoutFile,
    /// `list_file`: names of further files, one a line, whose places are unknown to us.
    ListFile,
}

impl FileKind {
    /// Returns true if the command may change the file or something below it.
    #[must_use]
    pub fn writes(self) -> bool {
        matches!(self, Self::OutputFile | Self::OutputDir | Self::NewDir | Self::InoutFile)
    }

    /// Returns true if the command may use everything below the path.
    #[must_use]
    pub fn recursive(self) -> bool {
        matches!(self, Self::InputDir | Self::OutputDir)
    }
}

/// See [`Invocation::current_dir`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CurrentDir {
    /// Only as the base of relative paths.
    Unused,
    /// Reads the tree below it.
    Reads,
    /// May change the tree below it.
    Writes,
}

/// See [`Invocation::stdin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StdinUse {
    /// Never read: it must not be drained.
    Unused,
    /// Read to its end.
    ReadsAll,
    /// May stop before the end (`head`, `grep -q`, `sed q`): what is left belongs to others.
    MayStopEarly,
}

/// How a command may be split without changing its output.
#[derive(Debug, Clone, PartialEq)]
pub struct Split {
    /// Indices into argv of the one splittable parameter's values; each is also in
    /// [`Invocation::files`]. Empty: not splittable across operands.
    pub operands: Vec<usize>,
    /// May be split across its standard input at line ends (`splittable_across_input`).
    pub across_input: bool,
    /// Words put in after `argv[0]` (or the subcommand) of each part when the
    /// operands are split (`when_split`): `-H` for grep, whose output would else lose its names.
    pub add_arguments: Vec<OsString>,
    /// How the outputs are joined; `None` is plain concatenation in order.
    pub aggregator: Option<Aggregator>,
    /// How the split goes on in this command when the parts before it have to be merged, so that
    /// they can't be joined in order; `None`: it does not.
    pub behind_merge: Option<BehindMerge>,
    /// Only split across operands if each of them is a regular file that can be read
    /// (`whole_files`).
    pub whole_files: bool,
}

/// How the outputs of the parts become one; `docs/annotations.md` says more of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Aggregator {
    /// A command that takes the parts as file operands after these words: `sort -m -k2`.
    Merge {
        /// Its words.
        words: Vec<OsString>,
        /// It may drop lines that are equal (`sort -m -u`).
        drops: bool,
    },
    /// The command itself once more, over the parts' outputs joined in order (`tail -n 3`).
    Same,
    /// Each part is a number in a line; the result is their sum (`grep -c`).
    Sum,
    /// Each part is an output of `uniq -c`: equal lines where two parts meet become one.
    UniqCount,
    /// Each part is an output of `wc`: the columns and the total line are made anew. The short
    /// names of the options that the invocation has: `l`, `w`, `m`, `c`, `L`.
    WcTotal(String),
}

/// See [`Split::behind_merge`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BehindMerge {
    /// The parts are merged and the command itself reads that once more (`sort | tail -n 3`).
    Same,
    /// The parts are counts of equal lines, as `uniq -c` prints them: each line is written out so
    /// many times, the parts are merged, and the command itself reads that.
    Counted,
}

/// How exit statuses of the parts combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StatusRule {
    /// The largest one (cat: 1 if any failed).
    Maximum,
    /// 0 if any is 0 and none is above 1; else 2 or more if any was; else 1.
    Grep,
}

/// See [`Invocation::line_ends`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LineEnds {
    /// Nothing is known: parts of a split are joined before the next stage.
    Unknown,
    /// As the last of its files ends (`cat`).
    AsInput,
    /// In a newline, whatever the input (`grep`, `sort`), or it is empty.
    Always,
}

/// Effect of a terminal on stdout or stdin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TerminalUse {
    /// Nothing.
    Plain,
    /// Output differs on a terminal (columns, colours): a remote pty is needed.
    Output,
    /// Asks the user, or moves the cursor: runs here when stdin or stdout is a terminal.
    Interactive,
}

/// Which version of the tool an executor must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ToolVersion {
    /// Equal version line.
    Same,
    /// Equal major version.
    Compatible,
    /// Any.
    Any,
}

/// Kind of an annotation's reason for keeping an invocation local.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Because {
    /// Its behaviour on another machine might differ, or is not known.
    Exactness,
    /// Offloading gains nothing: the mount creates, removes and changes single names as fast, and
    /// its cache of them stays right.
    CheapThroughMount,
    /// It asks the user, or opens an editor.
    Asks,
    /// It prints attributes that a mount may show differently from the server: owners, inode
    /// numbers, blocks.
    MountDiffers,
}

/// Why an invocation can't be placed; each is a sentence for `explain`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unknown {
    /// No annotation of that name.
    #[error("{0} has no annotation")]
    Command(String),
    /// A subcommand that no annotation covers.
    #[error("{command} {subcommand} has no annotation")]
    Subcommand {
        /// `git`
        command: String,
        /// `bisect`
        subcommand: String,
    },
    /// A flag that no fitting annotation lists.
    #[error("flag {flag} of {command} is not annotated")]
    Flag {
        /// `grep`
        command: String,
        /// As written: `-P`, `--perl-regexp`.
        flag: String,
    },
    /// The annotation says that this use stays here, and why.
    #[error("{command}: {reason}")]
    StaysHere {
        /// `sed`
        command: String,
        /// The annotation's own sentence.
        reason: String,
        /// Kind of the reason.
        because: Because,
    },
    /// The words do not fit any annotation (a missing operand, a bad value).
    #[error("{command}: {reason}")]
    Shape {
        /// `cut`
        command: String,
        /// Description of the mismatch.
        reason: String,
    },
}
