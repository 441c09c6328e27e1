//! How the shipped annotations of the commands for files, of git and of ImageMagick read real
//! command lines: for each line what follows from it, or why it stays here.

// All of this is test code; clippy's own exception knows only #[test] functions.
#![allow(clippy::unwrap_used)]

mod files;
mod git;
mod images;
mod reading;
