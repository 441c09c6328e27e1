//! Volumes in the file tree: the kernel, the adapter, the file system and the store over a
//! directory, as one. What is seen through a mount is held against the directory itself, against a
//! second mount of it, and against a plain directory.
#![allow(clippy::unwrap_used)]

mod acls;
mod appended;
mod crossed;
mod ended;
mod given_back;
mod held;
mod kept;
mod killed;
mod locks;
mod model;
mod remembered;
mod renames;
mod seen;
mod silent;
mod site;
mod works;
