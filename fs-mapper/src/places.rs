//! The mount points that matter, as a sorted list of paths: who is exactly
//! here, what lies below, what is the longest prefix. Pure; shared by the whole
//! table and by the stage program's short list.
