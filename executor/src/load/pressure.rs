//! Load of the machine itself: load average, and pressure stall information (PSI, /proc/pressure,
//! where the kernel has it).

use std::{
    fs,
    path::PathBuf,
    sync::Mutex,
    time::{Duration, Instant},
};

use crate::config::Bounds;

/// Interval of reads: the kernel's own averages change every two seconds (PSI) or five (load).
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// Bounds for the machine, and the values read last.
#[derive(Debug)]
pub struct Pressure {
    proc: PathBuf,
    max_load: Option<f64>,
    max_memory: Option<f64>,
    max_cpu: Option<f64>,
    max_io: Option<f64>,
    seen: Mutex<Option<(Instant, PressureSample)>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct PressureSample {
    load: f64,
    memory: f64,
    cpu: f64,
    io: f64,
}

impl Pressure {
    /// With these bounds.
    pub fn new(bounds: &Bounds) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            proc: PathBuf::from("/proc"),
            #[allow(clippy::cast_precision_loss, reason = "a number of cores")]
            max_load: bounds.load_per_core.map(|load| f64::from(load) * cores as f64),
            max_memory: bounds.memory_pressure.map(f64::from),
            max_cpu: bounds.cpu_pressure.map(f64::from),
            max_io: bounds.io_pressure.map(f64::from),
            seen: Mutex::default(),
        }
    }

    /// Reason to refuse further runs now, if there is one.
    pub fn refusal(&self) -> Option<String> {
        let seen = self.look();
        let over = |what: &str, value: f64, bound: Option<f64>, unit: &str| {
            let bound = bound.filter(|bound| value > *bound)?;
            Some(format!(
                "the executor's {what} is {value:.1}{unit}, above its limit of {bound:.1}{unit}"
            ))
        };
        over("load average", seen.load, self.max_load, "")
            .or_else(|| over("memory pressure", seen.memory, self.max_memory, " %"))
            .or_else(|| over("CPU pressure", seen.cpu, self.max_cpu, " %"))
            .or_else(|| over("I/O pressure", seen.io, self.max_io, " %"))
    }

    /// Load average, and memory pressure in per cent.
    pub fn now(&self) -> (f64, f64) {
        let seen = self.look();
        (seen.load, seen.memory)
    }

    /// Pressure of an overloaded machine.
    #[cfg(test)]
    pub fn seen_as_busy() -> Self {
        let busy = Self::new(&Bounds { load_per_core: Some(0), ..Bounds::unbounded() });
        // Far in the future, so that it stays fresh.
        let at = Instant::now() + Duration::from_secs(3600);
        *busy.seen.lock().expect("not poisoned") =
            Some((at, PressureSample { load: 1.0, ..PressureSample::default() }));
        busy
    }

    fn look(&self) -> PressureSample {
        let mut seen = self.seen.lock().expect("not poisoned");
        if let Some((at, seen)) = *seen
            && at.elapsed() < LOOK_INTERVAL
        {
            return seen;
        }
        let text = |name: &str| fs::read_to_string(self.proc.join(name)).unwrap_or_default();
        let fresh = PressureSample {
            load: text("loadavg")
                .split_whitespace()
                .next()
                .and_then(|load| load.parse().ok())
                .unwrap_or(0.0),
            memory: some_avg10(&text("pressure/memory")),
            cpu: some_avg10(&text("pressure/cpu")),
            io: some_avg10(&text("pressure/io")),
        };
        *seen = Some((Instant::now(), fresh));
        fresh
    }
}

/// Value of `some avg10=1.53 avg60=...` (Documentation/accounting/psi.rst); 0 without one.
fn some_avg10(text: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix("some "));
    let field = line
        .and_then(|line| line.split_whitespace().find_map(|field| field.strip_prefix("avg10=")));
    field.and_then(|value| value.parse().ok()).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pressure(bounds: &Bounds, loadavg: &str, memory: &str) -> Option<String> {
        let proc = tempfile::tempdir().unwrap();
        fs::create_dir(proc.path().join("pressure")).unwrap();
        fs::write(proc.path().join("loadavg"), loadavg).unwrap();
        fs::write(proc.path().join("pressure/memory"), memory).unwrap();
        let mut pressure = Pressure::new(bounds);
        pressure.max_load = bounds.load_per_core.map(f64::from);
        pressure.proc = proc.path().to_owned();
        pressure.refusal()
    }

    #[test]
    fn a_machine_that_is_busy_refuses() {
        let bounds =
            Bounds { load_per_core: Some(4), memory_pressure: Some(20), ..Bounds::default() };
        let (idle, busy) = ("0.10 0.2 0.3 1/100 7\n", "4.50 0.2 0.3 1/100 7\n");
        let (calm, pressed) = (
            "some avg10=0.00 avg60=90.00 avg300=0 total=0\nfull avg10=99.0\n",
            "some avg10=20.50 x\n",
        );
        assert_eq!(pressure(&bounds, idle, calm), None);
        assert_eq!(
            pressure(&bounds, busy, calm).as_deref(),
            Some("the executor's load average is 4.5, above its limit of 4.0")
        );
        assert_eq!(
            pressure(&bounds, idle, pressed).as_deref(),
            Some("the executor's memory pressure is 20.5 %, above its limit of 20.0 %")
        );
        assert_eq!(pressure(&bounds, "", ""), None);
        assert_eq!(pressure(&Bounds::unbounded(), busy, pressed), None);
    }
}
