//! Makes a TUN device: a network interface whose packets a process reads and writes
//! (Documentation/networking/tuntap.rst). Packets have a `virtio_net_hdr`, so that the kernel
//! passes up to 64 KiB at once instead of single frames, and the other side's kernel segments them.
#![allow(unsafe_code, reason = "TUN devices are made by ioctls that no safe crate in use offers")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::libc;

/// `struct virtio_net_hdr` (linux/virtio_net.h).
pub const HEADER_BYTES: usize = 10;

/// linux/if_tun.h: leaves checksums, and segments of TCP over IPv4 and IPv6, to the receiver.
const OFFLOADS: libc::c_uint = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;

nix::ioctl_write_ptr_bad!(set_interface, libc::TUNSETIFF, libc::ifreq);
nix::ioctl_write_int_bad!(set_offloads, libc::TUNSETOFFLOAD);

/// Makes the device in the network namespace of the calling thread. The device is removed when the
/// last copy of the descriptor is closed. Reads do not block.
pub fn open(name: &str) -> io::Result<OwnedFd> {
    let device: File = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")?;
    let request = request(name)?;
    // SAFETY: `request` is an initialised ifreq that lives through the call; TUNSETIFF reads and
    // writes no more than that.
    unsafe { set_interface(device.as_raw_fd(), &raw const request) }?;
    let offloads = libc::c_int::try_from(OFFLOADS).expect("three low bits");
    // SAFETY: TUNSETOFFLOAD takes its argument by value.
    unsafe { set_offloads(device.as_raw_fd(), offloads) }?;
    Ok(device.into())
}

fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: an ifreq is plain data for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.is_empty() || name.len() >= request.ifr_name.len() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{name:?} is no name for an interface"),
        ));
    }
    for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *place = byte.cast_signed();
    }
    let flags = libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags =
        libc::c_short::try_from(flags).expect("the flags of linux/if_tun.h fit");
    Ok(request)
}
