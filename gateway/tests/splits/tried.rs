//! Invocations tried of each command: flags of which a few are taken, and the words without which it
//! does nothing. A flag that the annotation does not split with costs a case; a flag that is
//! missing here is not tried.

/// What the operands are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operands {
    /// Files of text, some of them hardly that.
    Text,
    /// Small trees.
    Trees,
    /// JPEG images.
    Images,
}

/// One command.
#[derive(Debug)]
pub struct Tried {
    pub name: &'static str,
    pub flags: &'static [&'static str],
    /// One of these is taken, and stands behind the flags.
    pub words: &'static [&'static [&'static str]],
    /// Words behind the operands.
    pub behind: &'static [&'static [&'static str]],
    pub operands: Operands,
    /// Another implementation of a command that is there, which not every machine has.
    pub may_be_missing: bool,
}

const fn text(
    name: &'static str,
    flags: &'static [&'static str],
    words: &'static [&'static [&'static str]],
) -> Tried {
    Tried { name, flags, words, behind: &[&[]], operands: Operands::Text, may_be_missing: false }
}

const NONE: &[&[&str]] = &[&[]];

const GREP: &[&str] = &[
    "-i",
    "-v",
    "-w",
    "-x",
    "-b",
    "-n",
    "-H",
    "-h",
    "-o",
    "-a",
    "-L",
    "-l",
    "-c",
    "-Z",
    "-m1",
    "-m2",
    "-s",
    "-z",
    "-U",
    "-I",
    "-E",
    "-F",
    "--color=always",
    "--line-buffered",
    "--label=x",
    "-A1",
    "-q",
    "--binary-files=text",
];
/// One of them is no pattern, one is warned of.
const PATTERNS: &[&[&str]] = &[
    &["-e", "a", "-e", "two"],
    &["1"],
    &["^$"],
    &["."],
    &["[ab]$"],
    &["é"],
    &["["],
    &["\\d"],
    &["nowhere"],
    &[""],
];
const SUMS: &[&str] = &["-b", "-t", "-z", "--tag"];
const SED: &[&[&str]] = &[
    &["s/a/b/"],
    &["s/[0-9]*/<&>/g"],
    &["/a/d"],
    &["y/abc/xyz/"],
    &["/^$/d;s/.$//"],
    &["s/$/;/"],
    &["-n", "/two/p"],
    &["-E", "s/(a+)/\\1\\1/"],
    &["p"],
    &["s,\\(,x,"],
    &["2d"],
    &["$d"],
    &["1q"],
    &["N;P;D"],
    &["s/é/e/I"],
];
const AWK: &[&[&str]] = &[
    &["{print $1}"],
    &["/a/{print $2, $NF}"],
    &["$1 > 5"],
    &["{print length($0)}"],
    &["-F:", "{print $2}"],
    &["{gsub(/a/, \"b\"); print}"],
    &["NR > 1"],
    &["{s += $1} END {print s}"],
    &["{print substr($0, 2)}"],
];

pub const TRIED: &[Tried] = &[
    text("cat", &["-A", "-b", "-e", "-E", "-n", "-s", "-t", "-T", "-u", "-v"], NONE),
    text("grep", GREP, PATTERNS),
    text("egrep", GREP, PATTERNS),
    text("fgrep", GREP, PATTERNS),
    text(
        "zgrep",
        &["-i", "-v", "-n", "-H", "-h", "-o", "-a", "-l", "-L", "-c", "-s"],
        &[&["a"], &["-e", "1"], &["\\d"]],
    ),
    text("head", &["-q", "-v", "-z", "-n2", "-n-2", "-c3", "-c-3", "-n0"], &[&[], &["-q"]]),
    text(
        "tail",
        &["-q", "-v", "-z", "-n2", "-n+2", "-c3", "-c+3", "-n0", "-n-2", "-nx"],
        &[&[], &["-q"]],
    ),
    text(
        "cut",
        &["-s", "-z", "--complement", "--output-delimiter=_", "-n"],
        &[&["-d:", "-f2"], &["-b2-3"], &["-c1,4-"], &["-f0"], &["-f1"], &["-d", "\n", "-f1"]],
    ),
    text(
        "tr",
        &["-d", "-c", "-t"],
        &[
            &["a-o"],
            &["a-z", "A-Z"],
            &["a\\n", "xy"],
            &["\\0-\\377", "\\1-\\377"],
            &["[:digit:]", "#"],
            &["-s", "a-z"],
        ],
    ),
    text(
        "sort",
        &[
            "-b",
            "-d",
            "-f",
            "-g",
            "-i",
            "-M",
            "-h",
            "-n",
            "-r",
            "-V",
            "-s",
            "-u",
            "-z",
            "-k2",
            "-k1.2,1n",
            "-k2,2r",
            "-t:",
            "-m",
            "-c",
            "--parallel=2",
            "-S1M",
            "-k0",
            "--sort=numeric",
        ],
        NONE,
    ),
    text(
        "uniq",
        &["-c", "-d", "-D", "-i", "-u", "-z", "-f1", "-s1", "-w1", "-1", "--group", "-c", "-wx"],
        NONE,
    ),
    text("wc", &["-c", "-m", "-l", "-L", "-w"], NONE),
    text("fold", &["-b", "-s", "-w5", "-w2", "-3", "-wx"], NONE),
    text("expand", &["-i", "-t2", "-4", "-t1,5"], NONE),
    text("unexpand", &["-a", "-t2", "--first-only", "-t1,5"], NONE),
    text("paste", &["-z", "-d:", "-d", "-d\\n"], &[&["-s"]]),
    text("tac", &["-b", "-r", "-sa", "-s:"], NONE),
    text("rev", &[], NONE),
    text("strings", &["-a", "-n2", "-1", "-f", "-tx", "-w", "-eS"], NONE),
    text("sed", &["-E", "-s", "-u", "-z", "--posix", "-n"], SED),
    text("awk", &[], AWK),
    text("mawk", &[], AWK),
    Tried { may_be_missing: true, ..text("gawk", &[], AWK) },
    text("nawk", &[], AWK),
    Tried { may_be_missing: true, ..text("original-awk", &[], AWK) },
    text("md5sum", SUMS, NONE),
    text("sha1sum", SUMS, NONE),
    text("sha224sum", SUMS, NONE),
    text("sha256sum", SUMS, NONE),
    text("sha384sum", SUMS, NONE),
    text("sha512sum", SUMS, NONE),
    text("b2sum", &["-b", "-t", "-z", "--tag", "-l8"], NONE),
    text("cksum", &["-z", "--untagged", "--debug"], &[&[], &["-amd5"], &["-abogus"]]),
    text("file", &["-i", "-k", "-L", "-n", "-r", "--mime-type"], &[&["-b"], &["-N"]]),
    text("stat", &["-L"], &[&["-c", "%n %s %F"], &["--printf=%a %n\\n"]]),
    Tried {
        name: "find",
        flags: &["-P", "-H"],
        words: NONE,
        behind: &[
            &[],
            &["-name", "a*"],
            &["-type", "f", "-print0"],
            &["-bogus"],
            &["-maxdepth", "1"],
        ],
        operands: Operands::Trees,
        may_be_missing: false,
    },
    Tried {
        name: "bzip2",
        flags: &["-k", "-f", "-1", "-q", "-d"],
        words: &[&["-c"]],
        behind: NONE,
        operands: Operands::Text,
        may_be_missing: false,
    },
    Tried {
        name: "zstd",
        flags: &["-k", "-1", "-q"],
        words: &[&["-c", "-f"]],
        behind: NONE,
        operands: Operands::Text,
        may_be_missing: false,
    },
    Tried {
        name: "zstdcat",
        flags: &["-q", "-f"],
        words: NONE,
        behind: NONE,
        operands: Operands::Text,
        may_be_missing: false,
    },
    Tried {
        name: "unzstd",
        flags: &["-k", "-q"],
        words: &[&["-c", "-f"]],
        behind: NONE,
        operands: Operands::Text,
        may_be_missing: false,
    },
    Tried {
        name: "mogrify",
        flags: &["-strip", "-flip", "-negate"],
        words: &[&["-format", "gif"], &["-format", "bmp", "-resize", "50%"]],
        behind: NONE,
        operands: Operands::Images,
        may_be_missing: false,
    },
];
