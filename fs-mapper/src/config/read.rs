//! From TOML with spans to a [`Config`], collecting mistakes on the way.

use super::{Config, ConfigErrors};
use std::path::Path;

pub(super) fn read(_text: &str, _file: &Path) -> Result<Config, ConfigErrors> {
    todo!()
}
