//! system(3) and popen(3) give the shell that they start the process's own
//! environment, so the session's variables are lent to it for as long as the
//! call takes. Other threads may read the environment meanwhile, and even change
//! it: what they change stays.
#![allow(unsafe_code, reason = "replaces the array that `environ` points to, and puts it back")]

use core::{
    ffi::{CStr, c_char, c_void},
    ptr,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::{
    door::{Plan, Request, Strings},
    session::count,
    sys::{AT_FDCWD, Mapped},
};

unsafe extern "C" {
    #[link_name = "environ"]
    static mut ENVIRONMENT: *mut *const c_char;
}

/// One loan at a time: who comes meanwhile finds the variables there already.
static LENT: AtomicBool = AtomicBool::new(false);

/// The array that is lent. It is kept: another thread may look into it at any time.
static mut ARRAY: (*mut *const c_char, usize) = (ptr::null_mut(), 0);

/// Room for both variables behind the array.
const STRINGS_BYTES: usize = 16 << 10;

/// Calls with the session's variables in the environment, where a shell takes them.
pub(crate) fn to_shell<T>(call: impl FnOnce() -> T) -> T {
    if LENT.swap(true, Ordering::Acquire) {
        return call();
    }
    // SAFETY: `LENT` keeps other loans away.
    let loan = unsafe { lend() };
    let result = call();
    if let Some(loan) = loan {
        // SAFETY: this loan was just made.
        unsafe { loan.end() };
    }
    LENT.store(false, Ordering::Release);
    result
}

struct Loan {
    original: *mut *const c_char,
    lent: *mut *const c_char,
    variables: [*const c_char; 2],
}

unsafe fn lend() -> Option<Loan> {
    // SAFETY: `environ` and what it points to are the process's environment; the new array has room for it, two more
    // entries, the null pointer, and the strings.
    unsafe {
        let original = ENVIRONMENT;
        let (environment, argv): (Strings, Strings) = (original.cast_const(), ptr::null());
        let request = Request { directory: AT_FDCWD, path: c"/bin/sh", argv, environment, spawned: true, moved: false };
        let plan = Plan::of(&request)?;
        let entries = if original.is_null() { 0 } else { count(environment) };
        let (lent, strings) = array(entries + 3)?;
        for index in 0..entries {
            *lent.add(index) = *original.add(index);
        }
        let mut copied = None;
        plan.with_variables(&mut |variables| {
            copied = copy(variables, strings);
            Some(0)
        });
        let variables = copied?;
        *lent.add(entries) = variables[0];
        *lent.add(entries + 1) = variables[1];
        *lent.add(entries + 2) = ptr::null();
        ENVIRONMENT = lent;
        Some(Loan { original, lent, variables })
    }
}

/// An array of at least so many entries, and the room behind it.
unsafe fn array(entries: usize) -> Option<(*mut *const c_char, *mut u8)> {
    // SAFETY: only the holder of `LENT` comes here.
    unsafe {
        if ARRAY.1 < entries {
            let size = (2 * entries).checked_mul(size_of::<*const c_char>())?.checked_add(STRINGS_BYTES)?;
            let new: *mut c_void = Mapped::forever(size)?;
            ARRAY = (new.cast(), 2 * entries);
        }
        Some((ARRAY.0, ARRAY.0.add(ARRAY.1).cast()))
    }
}

unsafe fn copy(variables: [&CStr; 2], strings: *mut u8) -> Option<[*const c_char; 2]> {
    let [first, second] = variables.map(CStr::to_bytes_with_nul);
    if first.len() + second.len() > STRINGS_BYTES {
        return None;
    }
    // SAFETY: the room is that large, and nobody else writes there.
    unsafe {
        let behind = strings.add(first.len());
        ptr::copy_nonoverlapping(first.as_ptr(), strings, first.len());
        ptr::copy_nonoverlapping(second.as_ptr(), behind, second.len());
        Some([strings.cast_const().cast(), behind.cast_const().cast()])
    }
}

impl Loan {
    /// Takes the variables out again.
    unsafe fn end(self) {
        // SAFETY: whatever array `environ` points to now ends in a null pointer; ours had a place for each entry of the
        // original, and others can only have replaced or removed some, or have moved all to a new array.
        unsafe {
            let now = ENVIRONMENT;
            let back = if now == self.lent && !self.original.is_null() { self.original } else { now };
            if now.is_null() {
                return;
            }
            let (mut from, mut to) = (now, back);
            while !(*from).is_null() {
                if !self.variables.contains(&*from) {
                    *to = *from;
                    to = to.add(1);
                }
                from = from.add(1);
            }
            *to = ptr::null();
            ENVIRONMENT = back;
        }
    }
}
