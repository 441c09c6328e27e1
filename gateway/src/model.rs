//! Values that assembly, planning and execution share.

use std::{borrow::Cow, fmt};

/// Reason for running a command locally. Logic compares its kind; its words are for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalReason {
    /// Its kind.
    pub kind: ReasonKind,
    words: Cow<'static, str>,
}

/// Kind of a reason for running a command locally.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasonKind {
    /// No executor is concerned.
    NothingOnMounts,
    /// Volumes have its files cached, and answer sooner than their servers.
    Cached,
    /// Its process: namespace, rights, working directory, loader.
    Process,
    /// Its annotation, or that it has none.
    Annotation,
    /// A path: a link, or a mount that is new or lies beneath or over another one.
    Path,
    /// Attributes that the mount does not show, or not take, as the server would.
    Attributes,
    /// Configuration files, and files that it searches upwards.
    ClientFiles,
    /// Its descriptors: terminals, devices, offsets, what others have open.
    Descriptors,
    /// Local writes may not be on the server yet.
    Unflushed,
    /// An executor can't run it, refused it, or was lost.
    Executor,
    /// The planner's choice.
    Placement,
    /// `posh explain` knows too little of it.
    Unknowable,
}

impl ReasonKind {
    /// A reason of this kind, in words.
    pub fn because(self, words: impl Into<Cow<'static, str>>) -> LocalReason {
        LocalReason { kind: self, words: words.into() }
    }
}

impl LocalReason {
    /// Reason for a stage in a pipeline that concerns no executor.
    #[must_use]
    pub const fn nothing_on_mounts() -> Self {
        let words = "nothing that it uses is on a mount with an executor";
        Self { kind: ReasonKind::NothingOnMounts, words: Cow::Borrowed(words) }
    }

    /// Adds words.
    #[must_use]
    pub fn with(&self, more: &str) -> Self {
        self.kind.because(format!("{self}; {more}"))
    }
}

impl fmt::Display for LocalReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words)
    }
}

/// An executor, by its index in the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExecutorId(pub usize);

/// A pipe between two waiting stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edge {
    /// Index and descriptor of the writing stage.
    pub from: (usize, u32),
    /// Index and descriptor of the reading stage.
    pub to: (usize, u32),
}
