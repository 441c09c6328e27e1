//! `posh annotations`: pending.
use crate::Error;
use std::{ffi::OsString, path::Path};
/// x
pub fn check(_dir: Option<&Path>) -> Result<(String, bool), Error> {
    Err(Error::Annotations(String::new()))
}
/// x
pub fn explain(_c: &[OsString]) -> Result<String, Error> {
    Err(Error::Annotations(String::new()))
}
/// x
pub fn coverage(_c: &[String]) -> Result<String, Error> {
    Err(Error::Annotations(String::new()))
}
