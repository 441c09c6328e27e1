//! Faults, and the points of a run's protocol at which they are injected.

/// Point between messages of a run at which a fault is injected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Point {
    /// The specification is on its way to the executor.
    BeforeSpecification,
    /// The executor has started the run; its message is on its way.
    BeforeStarted,
    /// The gateway knows that the run has started, and no output has arrived.
    BeforeFirstByte,
    /// Some of the output has arrived.
    Middle,
    /// The output has arrived, but no status.
    BeforeStatus,
    /// A status has arrived, but not the end of the run.
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

    /// Text for the table.
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

/// A fault to inject.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum InjectedFault {
    /// The executor is killed, and started again at once.
    Kill,
    /// The executor is killed, and restarted only after the pipeline's end.
    KillForGood,
    /// The executor is stopped (SIGSTOP) for two seconds.
    Freeze,
    /// The executor is stopped until the pipeline's end.
    FreezeForGood,
    /// The connection is reset; executor and link are unharmed.
    Reset,
    /// No message is forwarded for a moment.
    Delay,
    /// The server's network is down for two seconds.
    Cut,
    /// The server's network is down until the pipeline's end.
    CutForGood,
    /// The gateway is killed.
    KillGateway,
    /// The server's disk is filled.
    FullDisk,
}

impl InjectedFault {
    /// All.
    pub const ALL: [InjectedFault; 10] = [
        InjectedFault::Kill,
        InjectedFault::KillForGood,
        InjectedFault::Freeze,
        InjectedFault::FreezeForGood,
        InjectedFault::Reset,
        InjectedFault::Delay,
        InjectedFault::Cut,
        InjectedFault::CutForGood,
        InjectedFault::KillGateway,
        InjectedFault::FullDisk,
    ];

    /// Returns true if the fault is noticed only by a timeout.
    pub fn is_long(self) -> bool {
        matches!(
            self,
            InjectedFault::FreezeForGood | InjectedFault::CutForGood | InjectedFault::KillForGood
        )
    }

    /// Text for the table.
    pub fn words(self) -> &'static str {
        match self {
            InjectedFault::Kill => "executor killed, restarted",
            InjectedFault::KillForGood => "executor killed for good",
            InjectedFault::Freeze => "executor frozen for 2 s",
            InjectedFault::FreezeForGood => "executor frozen for good",
            InjectedFault::Reset => "connection reset",
            InjectedFault::Delay => "link delayed by 1 s",
            InjectedFault::Cut => "network down for 2 s",
            InjectedFault::CutForGood => "network down for good",
            InjectedFault::KillGateway => "gateway killed",
            InjectedFault::FullDisk => "server's disk full",
        }
    }
}
