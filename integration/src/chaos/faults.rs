//! What can go wrong, and when: faults, and the points of a run's protocol at which
//! they are done.

/// Between which messages of a run a fault is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Point {
    /// The specification is on its way to the executor.
    BeforeSpecification,
    /// The executor has started the run, and its word is on its way.
    BeforeStarted,
    /// The gateway knows, and no byte has come.
    BeforeFirstByte,
    /// Some of the output has come.
    Middle,
    /// The output has come, and no status.
    BeforeStatus,
    /// A status has come, and not the end of the run.
    BeforeFinished,
}

impl Point {
    /// In the order of the protocol.
    pub const ALL: [Point; 6] = [
        Point::BeforeSpecification,
        Point::BeforeStarted,
        Point::BeforeFirstByte,
        Point::Middle,
        Point::BeforeStatus,
        Point::BeforeFinished,
    ];

    /// For the table.
    pub fn words(self) -> &'static str {
        match self {
            Point::BeforeSpecification => "before the acknowledgement",
            Point::BeforeStarted => "started, not yet told",
            Point::BeforeFirstByte => "before the first byte",
            Point::Middle => "in the middle",
            Point::BeforeStatus => "after the last byte",
            Point::BeforeFinished => "after the status",
        }
    }
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// The executor is killed, and started again at once.
    Kill,
    /// The executor is killed, and is not there until the pipeline's end.
    KillForGood,
    /// The executor is stopped for two seconds, and nothing is answered.
    Freeze,
    /// The same until the pipeline's end.
    FreezeForGood,
    /// The connection is reset; executor and link are well.
    Reset,
    /// Nothing moves for a moment.
    Delay,
    /// The server's network is down for two seconds.
    Cut,
    /// The same until the pipeline's end.
    CutForGood,
    /// The gateway is killed.
    KillGateway,
    /// The server's disk is filled.
    FullDisk,
}

impl Fault {
    /// All.
    pub const ALL: [Fault; 10] = [
        Fault::Kill,
        Fault::KillForGood,
        Fault::Freeze,
        Fault::FreezeForGood,
        Fault::Reset,
        Fault::Delay,
        Fault::Cut,
        Fault::CutForGood,
        Fault::KillGateway,
        Fault::FullDisk,
    ];

    /// It is noticed only by waiting.
    pub fn is_long(self) -> bool {
        matches!(self, Fault::FreezeForGood | Fault::CutForGood | Fault::KillForGood)
    }

    /// For the table.
    pub fn words(self) -> &'static str {
        match self {
            Fault::Kill => "executor killed, restarted",
            Fault::KillForGood => "executor killed for good",
            Fault::Freeze => "executor frozen for 2 s",
            Fault::FreezeForGood => "executor frozen for good",
            Fault::Reset => "connection reset",
            Fault::Delay => "link delayed by 1 s",
            Fault::Cut => "network down for 2 s",
            Fault::CutForGood => "network down for good",
            Fault::KillGateway => "gateway killed",
            Fault::FullDisk => "server's disk full",
        }
    }
}
