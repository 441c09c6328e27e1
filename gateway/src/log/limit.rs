//! Limit on the events that others can cause: a refused connection, a notice of a server.
//!
//! Invariant: between two calls of [`Limit::tell_withheld`], each kind of event has at most
//! [`LINES`], and each call writes at most one line for it. A kind is a place in the source, and,
//! if it says so, the executor or export: a server can't withhold what is said of another. These
//! names are the configuration's, so kinds are few.
//!
//! All events have the limit, not only those that look as if others caused them: nobody has to
//! remember it for a new one. Only debugging output, which the user asked for, has none.

use std::{
    collections::HashMap,
    fmt,
    io::Write,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tracing::{
    Event, Level, Metadata, Subscriber,
    callsite::Identifier,
    field::{Field, Visit},
};
use tracing_subscriber::{
    Layer,
    fmt::{
        format::Writer,
        time::{FormatTime as _, SystemTime},
    },
    layer::Context,
};

/// Number of lines of each kind.
const LINES: u64 = 10;

/// Counts of events.
#[derive(Debug, Clone, Default)]
pub struct Limit {
    kinds: Arc<Mutex<HashMap<EventKind, EventCount>>>,
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct EventKind {
    callsite: Identifier,
    /// Executor or export.
    of: Option<String>,
}

#[derive(Debug)]
struct EventCount {
    events: u64,
    metadata: &'static Metadata<'static>,
    /// Message of the first that was withheld.
    message: String,
}

impl Limit {
    /// Writes a line for each kind of which events were withheld, and begins to count anew.
    pub fn tell_withheld(&self, mut log: impl Write) {
        let counts = std::mem::take(&mut *self.kinds());
        for (kind, count) in counts {
            let withheld = count.events.saturating_sub(LINES);
            if withheld > 0 {
                // The log may be full, as its file system.
                let _ = log.write(count.summary(&kind, withheld).as_bytes());
            }
        }
    }

    fn kinds(&self) -> MutexGuard<'_, HashMap<EventKind, EventCount>> {
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Subscriber> Layer<S> for Limit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if *metadata.level() > Level::INFO {
            return true;
        }
        let mut of = ReadFields::default();
        event.record(&mut of);
        let kind = EventKind { callsite: metadata.callsite(), of: of.executor_or_export };
        let mut kinds = self.kinds();
        let count = kinds.entry(kind).or_insert_with(|| EventCount {
            events: 0,
            metadata,
            message: String::new(),
        });
        count.events += 1;
        if count.events == LINES + 1 {
            count.message = of.message;
        }
        count.events <= LINES
    }
}

impl EventCount {
    fn summary(&self, kind: &EventKind, withheld: u64) -> String {
        let mut line = String::new();
        let _ = SystemTime.format_time(&mut Writer::new(&mut line));
        let of = kind.of.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
        line += &format!(
            " {:>5} {}: {withheld} more within a minute{of}: {}\n",
            self.metadata.level(),
            self.metadata.target(),
            self.message
        );
        line
    }
}

#[derive(Debug, Default)]
struct ReadFields {
    executor_or_export: Option<String>,
    message: String,
}

impl Visit for ReadFields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "executor" | "export" => self.executor_or_export = Some(format!("{value:?}")),
            "message" => self.message = format!("{value:?}"),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    /// Counts the events that pass.
    struct Passed(Arc<AtomicUsize>);

    impl<S: Subscriber> Layer<S> for Passed {
        fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_flood_of_one_kind_is_a_few_lines_and_a_count() {
        let (limit, passed) = (Limit::default(), Arc::new(AtomicUsize::new(0)));
        let passing = || passed.swap(0, Ordering::Relaxed);
        let told = || {
            let mut log = Vec::new();
            limit.tell_withheld(&mut log);
            String::from_utf8(log).unwrap()
        };
        let refused = |why| tracing::warn!(why, "not let in");
        let lost = |executor| tracing::warn!(%executor, "connection lost");
        let subscriber =
            tracing_subscriber::registry().with(Passed(Arc::clone(&passed))).with(limit.clone());
        tracing::subscriber::with_default(subscriber, || {
            // Every one with other words.
            (0..1000).for_each(refused);
            assert_eq!(passing(), 10);
            // Other kinds are not affected.
            (0..20).for_each(|_| lost("liar"));
            assert_eq!(passing(), 10);
            lost("store1");
            tracing::info!("another");
            assert_eq!(passing(), 2);
            let lines = told();
            assert_eq!(lines.lines().count(), 2, "{lines}");
            let expect =
                " WARN posh_gateway::log::limit::tests: 990 more within a minute: not let in";
            assert!(lines.contains(expect), "{lines}");
            assert!(lines.contains(": 10 more within a minute (liar): connection lost"), "{lines}");
            // The next minute.
            refused(0);
            assert_eq!((passing(), told()), (1, String::new()));
            (0..1000).for_each(|_| tracing::debug!("asked for"));
            assert_eq!(passing(), 1000);
        });
    }
}
