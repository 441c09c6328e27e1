//! The file of `--trace`. The gateway provides its content. It is opened before the shell is
//! started, so that a wrong name is reported early, and written at the end.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
};

use posh_proto::{clock::monotonic_ns, gateway::SessionTimes};

use crate::Error;

/// An empty trace.
const NOTHING: &str = "{\"traceEvents\":[]}\n";

/// A requested trace.
pub struct Trace {
    path: PathBuf,
    file: File,
    /// Start and end of posh and its shell.
    pub times: SessionTimes,
}

impl Trace {
    /// Creates or truncates the file, and begins the trace.
    ///
    /// # Errors
    /// [`Error::Trace`]
    pub fn begin(path: &Path) -> Result<Self, Error> {
        let times = SessionTimes { started_ns: monotonic_ns(), ..SessionTimes::default() };
        let file =
            File::create(path).map_err(|source| Error::Trace { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), file, times })
    }

    /// Writes the document; an empty trace, if there is none.
    ///
    /// # Errors
    /// [`Error::Trace`]
    pub fn write(&mut self, document: Option<&str>) -> Result<(), Error> {
        let written = self.file.write_all(document.unwrap_or(NOTHING).as_bytes());
        written.map_err(|source| Error::Trace { path: self.path.clone(), source })
    }
}
