//! Which paths commands may use, and what they see.
