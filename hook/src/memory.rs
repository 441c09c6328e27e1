//! This process's memory layout as the kernel records it. Moving the end of /proc/self/environ
//! without a capability sets the whole layout at once, so all of it must be known. At a program's
//! start nearly everything follows from the initial stack; /proc/self/stat has it too, but the
//! first file opened in a process's /proc takes much longer.
#![allow(
    unsafe_code,
    reason = "reads the initial stack and the program headers, as execve(2) has left them"
)]

use core::{
    ffi::{CStr, c_char},
    ptr,
};

use crate::{
    sys::{self, AT_FDCWD, File},
    text::decimal,
};

/// The initial stack, before it was changed.
#[derive(Clone, Copy)]
pub(crate) struct InitialStack {
    /// argv and argc.
    pub(crate) arguments: (*const *const c_char, usize),
    /// First string of the environment.
    pub(crate) first_variable: *const c_char,
    /// The auxiliary vector (getauxval(3)): pairs of type and value; the last has type 0.
    pub(crate) auxiliary: *const [usize; 2],
}

/// Moves the end of the environment's strings. Otherwise erased strings would show as NULs.
///
/// # Safety
/// `start` is what the kernel made, and what it points to is as it was.
pub(crate) unsafe fn end_environment_at(address: usize, start: &InitialStack) {
    const PR_SET_MM_ENV_END: usize = 11;
    const PR_SET_MM_MAP: usize = 14;
    // Needs CAP_SYS_RESOURCE; the other way needs no right, but a kernel with
    // CONFIG_CHECKPOINT_RESTORE, and more time. SAFETY: the caller's promise: the address lies
    // between the environment's first string and its end.
    if unsafe { sys::set_memory_map(PR_SET_MM_ENV_END, address, 0) } {
        return;
    }
    // SAFETY: the caller's promise.
    if let Some(mut map) = unsafe { MemoryMap::at_start(start) }.or_else(MemoryMap::of_this_process)
    {
        map.env_end = address as u64;
        let at = (&raw const map).expose_provenance();
        // SAFETY: the map is what the kernel has, or has said, but for the end of the environment.
        unsafe { sys::set_memory_map(PR_SET_MM_MAP, at, size_of::<MemoryMap>()) };
    }
}

/// `struct prctl_mm_map` of include/uapi/linux/prctl.h.
#[repr(C)]
struct MemoryMap {
    start_code: u64,
    end_code: u64,
    start_data: u64,
    end_data: u64,
    start_brk: u64,
    brk: u64,
    start_stack: u64,
    arg_start: u64,
    arg_end: u64,
    env_start: u64,
    env_end: u64,
    auxv: u64,
    auxv_size: u32,
    exe_fd: u32,
}

impl MemoryMap {
    /// As `load_elf_binary` of fs/binfmt_elf.c has it; `None` where that can't be told any more.
    ///
    /// # Safety
    /// As for [`end_environment_at`].
    unsafe fn at_start(start: &InitialStack) -> Option<Self> {
        let (arguments, count) = start.arguments;
        let last_index = count.checked_sub(1)?;
        // SAFETY: the caller's promise: the array has that many entries, and each is a C string.
        let (first, last) = unsafe { (*arguments, CStr::from_ptr(*arguments.add(last_index))) };
        let end = start.first_variable;
        // Somebody has changed the arrays, or the strings are not where the kernel puts them.
        if last.as_ptr().addr().checked_add(last.count_bytes() + 1)? != end.addr() {
            return None;
        }
        // SAFETY: as above.
        let image = unsafe { ProgramSegments::of(start) }?;
        let brk = image.empty_heap()?;
        Some(Self {
            start_code: image.start_code,
            end_code: image.end_code,
            start_data: image.start_data,
            end_data: image.end_data,
            start_brk: brk,
            brk,
            // The stack began with the number of arguments, a word.
            start_stack: arguments.addr().checked_sub(size_of::<usize>())? as u64,
            arg_start: first.addr() as u64,
            arg_end: end.addr() as u64,
            env_start: end.addr() as u64,
            env_end: 0,
            auxv: 0,
            auxv_size: 0,
            exe_fd: u32::MAX,
        })
    }

    /// The current layout, from proc_pid_stat(5).
    fn of_this_process() -> Option<Self> {
        /// Numbers of at most 20 digits, 52 of them, and the name.
        const STAT_BYTES: usize = 1200;
        let mut buffer = [0; STAT_BYTES];
        let count = File::open(AT_FDCWD, c"/proc/self/stat")?.read(&mut buffer, 0)?;
        let line = buffer.get(..count)?;
        let name_end = line.iter().rposition(|byte| *byte == b')')?;
        // The word behind the name is field 3.
        let field = |number: usize| {
            decimal(line.get(name_end + 2..)?.split(|byte| *byte == b' ').nth(number - 3)?)
        };
        Some(Self {
            start_code: field(26)?,
            end_code: field(27)?,
            start_data: field(45)?,
            end_data: field(46)?,
            start_brk: field(47)?,
            brk: sys::heap_end(),
            start_stack: field(28)?,
            arg_start: field(48)?,
            arg_end: field(49)?,
            env_start: field(50)?,
            env_end: field(51)?,
            auxv: 0,
            auxv_size: 0,
            exe_fd: u32::MAX,
        })
    }
}

/// The program's own segments.
#[derive(Debug, Default, PartialEq, Eq)]
struct ProgramSegments {
    start_code: u64,
    end_code: u64,
    start_data: u64,
    end_data: u64,
    /// Behind everything, what begins as zeros included.
    end: u64,
    page: u64,
}

impl ProgramSegments {
    /// # Safety
    /// As for [`end_environment_at`].
    unsafe fn of(start: &InitialStack) -> Option<Self> {
        const AT_PHDR: usize = 3;
        const AT_PHENT: usize = 4;
        const AT_PHNUM: usize = 5;
        const AT_PAGESZ: usize = 6;
        const AT_BASE: usize = 7;
        // SAFETY: the vector ends in an entry of type 0, and nothing behind it is read.
        let value = |kind: usize| unsafe {
            let entries = (0..).map(|index| *start.auxiliary.add(index));
            entries
                .take_while(|entry| entry[0] != 0)
                .find(|entry| entry[0] == kind)
                .map(|entry| entry[1])
        };
        // Without a loader's address the loader itself is the program (`ld.so /bin/true`), and has
        // changed the others.
        value(AT_BASE).filter(|base| *base != 0)?;
        let (address, entries) = (value(AT_PHDR)?, value(AT_PHNUM)?);
        if value(AT_PHENT)? != size_of::<Segment>() || address % align_of::<Segment>() != 0 {
            return None;
        }
        // SAFETY: the kernel has mapped the headers there, that many of them.
        let segments = unsafe {
            core::slice::from_raw_parts(ptr::with_exposed_provenance::<Segment>(address), entries)
        };
        Self::from_segments(segments, address as u64, value(AT_PAGESZ)? as u64)
    }

    fn from_segments(segments: &[Segment], address: u64, page: u64) -> Option<Self> {
        const PT_LOAD: u32 = 1;
        const PT_PHDR: u32 = 6;
        const PF_X: u32 = 1;
        let headers = segments.iter().find(|segment| segment.kind == PT_PHDR)?;
        let bias = address.checked_sub(headers.address)?;
        let mut image = Self { start_code: u64::MAX, page, ..Self::default() };
        for segment in segments.iter().filter(|segment| segment.kind == PT_LOAD) {
            let begin = bias.checked_add(segment.address)?;
            let end = begin.checked_add(segment.file_bytes)?;
            if segment.flags & PF_X != 0 {
                image.start_code = image.start_code.min(begin);
                image.end_code = image.end_code.max(end);
            }
            image.start_data = image.start_data.max(begin);
            image.end_data = image.end_data.max(end);
            image.end = image.end.max(begin.checked_add(segment.memory_bytes)?);
        }
        Some(image).filter(|image| image.start_code < image.end_code && page.is_power_of_two())
    }

    /// Address of an unused heap, which begins where it ends; the beginning of a used one is
    /// unknown.
    fn empty_heap(&self) -> Option<u64> {
        let brk = sys::heap_end();
        let begins_behind_image = brk == self.end.checked_next_multiple_of(self.page)?;
        let below = brk.checked_sub(self.page).filter(|_| brk.is_multiple_of(self.page))?;
        (begins_behind_image || !sys::is_mapped(below, self.page)).then_some(brk)
    }
}

/// `Elf64_Phdr` of elf(5).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Segment {
    kind: u32,
    flags: u32,
    _offset: u64,
    address: u64,
    _physical: u64,
    file_bytes: u64,
    memory_bytes: u64,
    _align: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(kind: u32, flags: u32, address: u64, file_bytes: u64, memory_bytes: u64) -> Segment {
        Segment {
            kind,
            flags,
            _offset: 0,
            address,
            _physical: 0,
            file_bytes,
            memory_bytes,
            _align: 0,
        }
    }

    #[test]
    fn the_kernel_s_map_of_this_process_is_read() {
        let map = MemoryMap::of_this_process().unwrap();
        assert!(
            map.start_code < map.end_code
                && map.arg_start < map.arg_end
                && map.arg_end <= map.env_start
        );
        assert!(map.env_start < map.env_end && map.start_brk <= map.brk);
    }

    #[test]
    fn segments_are_taken_as_the_kernel_takes_them() {
        // As of /bin/true: headers, read-only, code, constants, data with zeros behind.
        let segments = [
            segment(6, 4, 0x40, 0x2d8, 0x2d8),
            segment(1, 4, 0, 0x1360, 0x1360),
            segment(1, 5, 0x2000, 0x2d81, 0x2d81),
            segment(1, 4, 0x5000, 0xe00, 0xe00),
            segment(1, 6, 0x6c70, 0x410, 0x5e8),
        ];
        let image = ProgramSegments::from_segments(&segments, 0x5000_0040, 4096).unwrap();
        let expected = ProgramSegments {
            start_code: 0x5000_2000,
            end_code: 0x5000_4d81,
            start_data: 0x5000_6c70,
            end_data: 0x5000_7080,
            end: 0x5000_7258,
            page: 4096,
        };
        assert_eq!(image, expected);
        assert_eq!(
            ProgramSegments::from_segments(&segments[1..], 0x5000_0040, 4096),
            None,
            "no header of the headers"
        );
        assert_eq!(
            ProgramSegments::from_segments(&segments[..2], 0x5000_0040, 4096),
            None,
            "no code"
        );
    }
}
