//! Directories that live as long as this process. What is in statics is never dropped, and a fuzzer
//! ends by a signal.

use std::{
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::LazyLock,
};

/// A new, empty one. It is gone soon after this process has ended, however it does.
pub fn directory() -> PathBuf {
    static BASE: LazyLock<(PathBuf, Child)> = LazyLock::new(|| {
        let base = tempfile::tempdir().unwrap().keep();
        // It reads until the other end of its input is closed, which the kernel does for us, also
        // after a Ctrl-C, which comes to both.
        let mut remover = Command::new("sh");
        remover.args(["-c", "trap '' HUP INT TERM; read -r _; rm -rf -- \"$0\""]).arg(&base);
        remover.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        (base, remover.spawn().unwrap())
    });
    tempfile::tempdir_in(&BASE.0).unwrap().keep()
}
