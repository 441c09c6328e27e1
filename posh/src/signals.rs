//! Blocks signals temporarily without changing their dispositions, which the shell inherits.

use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};

use crate::Error;

/// While this lives, the given signals are blocked in this thread; those that arrived are discarded
/// when it is dropped.
#[derive(Debug)]
pub struct BlockedSignals {
    arrived: SignalFd,
    before: SigSet,
}

impl BlockedSignals {
    /// Blocks those of `signals` that are not blocked already.
    ///
    /// # Errors
    /// [`Error::System`] when the kernel has no descriptor for it.
    pub fn new(signals: &[Signal]) -> Result<Self, Error> {
        let system = |source| Error::System { attempt: "hold signals back", source };
        let before = SigSet::thread_get_mask().map_err(system)?;
        let newly_blocked: SigSet =
            signals.iter().copied().filter(|&signal| !before.contains(signal)).collect();
        let arrived =
            SignalFd::with_flags(&newly_blocked, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC);
        let arrived = arrived.map_err(system)?;
        newly_blocked.thread_block().map_err(system)?;
        Ok(Self { arrived, before })
    }

    /// The original mask, for a child.
    #[must_use]
    pub fn mask_before(&self) -> &SigSet {
        &self.before
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        while let Ok(Some(_)) = self.arrived.read_signal() {}
        let _ = self.before.thread_set_mask();
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::raise;

    use super::*;

    #[test]
    fn what_came_meanwhile_is_forgotten() {
        let before = SigSet::thread_get_mask().unwrap();
        let held = BlockedSignals::new(&[Signal::SIGINT, Signal::SIGPIPE]).unwrap();
        // Either would end this process; raise(3) sends to this very thread.
        raise(Signal::SIGINT).unwrap();
        raise(Signal::SIGPIPE).unwrap();
        drop(held);
        assert_eq!(SigSet::thread_get_mask().unwrap(), before);
    }
}
