//! Starting, ending, and what is left behind.
