//! Processor time and memory of running processes, from /proc.

use std::collections::HashMap;
use std::fs;

use super::results::ProgramUsage;
use crate::machine::{field, kib};

/// Processor time of processes at one moment.
#[derive(Debug, Default)]
pub struct Mark(HashMap<u32, f64>);

impl Mark {
    /// Records the processor time, and resets the peaks of memory.
    pub fn set(processes: &[u32]) -> Mark {
        for pid in processes {
            // proc(5): 5 resets the peak resident set size. A process that has ended has none.
            let _ = fs::write(format!("/proc/{pid}/clear_refs"), "5");
        }
        Mark(processes.iter().filter_map(|pid| Some((*pid, cpu_seconds(*pid)?))).collect())
    }

    /// Usage of these processes since the mark; of new ones, since their start.
    pub fn since(&self, processes: &[u32]) -> ProgramUsage {
        let mut usage = ProgramUsage::default();
        for pid in processes {
            usage.cpu_s += cpu_seconds(*pid).unwrap_or(0.0) - self.0.get(pid).unwrap_or(&0.0);
            let peak = field(&format!("/proc/{pid}/status"), "VmHWM")
                .and_then(|value| kib(&value))
                .unwrap_or(0);
            usage.peak_mib = usage.peak_mib.max(peak as f64 / 1024.0);
        }
        usage
    }
}

/// Fields 14 and 15 of proc_pid_stat(5): the process's own, without its children's.
fn cpu_seconds(pid: u32) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
    let ticks = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok()??;
    Some(ticks as f64 / per_second as f64)
}
