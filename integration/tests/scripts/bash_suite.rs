//! bash's own test suite, from Debian's source package, which `cargo xtask setup` fetches.
