//! Programs that start no others. They do not need the hook, and loading one more library is half
//! of posh's overhead for a local command. (Of sort(1), the `--compress-program` is started as from
//! any program without the hook.)

use core::ffi::CStr;

/// Directories of the system's programs; elsewhere a program of that name may be the user's own.
const DIRECTORIES: [&[u8]; 2] = [b"/usr/bin/", b"/bin/"];

/// Names in these directories.
const NAMES: &[u8] =
    b"b2sum base64 bzip2 cat chmod cksum cmp column comm cp cut dd du expand fold \
    grep gzip head join jq ln ls md5sum mkdir mv nl od paste pr rev rm rmdir sha1sum sha224sum \
    sha256sum sha384sum sha512sum shuf sort stat strings sum tac tail tee touch tr tsort unexpand \
    uniq wc xz zstd";

/// Returns true if the path is that of a listed program. A wrong yes costs speed only: programs
/// that it starts run locally, without the hook.
pub(crate) fn starts_no_other(path: &CStr) -> bool {
    let path = path.to_bytes();
    let name = DIRECTORIES.iter().find_map(|directory| path.strip_prefix(*directory));
    name.is_some_and(|name| NAMES.split(|byte| *byte == b' ').any(|leaf| leaf == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_the_system_that_start_no_others() {
        for path in [c"/usr/bin/cat", c"/bin/wc", c"/usr/bin/zstd"] {
            assert!(starts_no_other(path), "{path:?}");
        }
        for path in [
            c"cat",
            c"/usr/local/bin/cat",
            c"/usr/bin/x/cat",
            c"/usr/bin/",
            c"/usr/bin/find",
            c"/usr/bin/ca",
        ] {
            assert!(!starts_no_other(path), "{path:?}");
        }
    }
}
