//! Path lookup as the kernel does it, but only as far down as local disks go:
//! readlink(2) above mount points, nothing but text below them.
