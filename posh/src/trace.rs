//! The file that `--trace` writes. Its content is the gateway's; here it is opened
//! before anything runs, so that a mistake in its name costs nothing, and written at the end.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
};

use posh_proto::{clock::monotonic_ns, gateway::SessionTimes};

use crate::Error;

/// A trace in which nothing happened.
const NOTHING: &str = "{\"traceEvents\":[]}\n";

/// A trace that was asked for.
pub struct Trace {
    path: PathBuf,
    file: File,
    /// When posh and its shell began and ended.
    pub times: SessionTimes,
}

impl Trace {
    /// Makes or empties the file; the trace begins.
    ///
    /// # Errors
    /// [`Error::Trace`]
    pub fn begin(path: &Path) -> Result<Self, Error> {
        let times = SessionTimes { started_ns: monotonic_ns(), ..SessionTimes::default() };
        let file =
            File::create(path).map_err(|source| Error::Trace { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), file, times })
    }

    /// Writes the document; one in which nothing happened, if there is none.
    ///
    /// # Errors
    /// [`Error::Trace`]
    pub fn write(&mut self, document: Option<&str>) -> Result<(), Error> {
        let written = self.file.write_all(document.unwrap_or(NOTHING).as_bytes());
        written.map_err(|source| Error::Trace { path: self.path.clone(), source })
    }
}
