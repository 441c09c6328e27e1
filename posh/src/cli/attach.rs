//! `posh attach HOST`: copies this machine's `posh-executor` to the home of a login on another
//! machine, by the user's own ssh, after asking. It changes nothing else on that machine.

use std::{
    env,
    fs::{self, File},
    io::{self, BufRead, BufReader, IsTerminal, Read, Write},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use fs_mapper::config::{Address, AddressFault, Config, Login};
use nix::sys::utsname::uname;
use posh_proto::{token::Fingerprint, untrusted::escaped};
use posh_reach::ssh;

use crate::{
    Error,
    gateway::{self, GatewayTarget},
};

const PROGRAM: &str = "posh-executor";
/// Prefix of our own line in ssh's output, to which start-up files may write too.
const MARK: &str = "posh-attach";
/// Script that prints the remote system, processor, and installed program, by SHA-256 and version.
const LOOK: &str = concat!(
    r#"d="$HOME/.local/bin/posh-executor"; s=-; v=; [ -f "$d" ] && s=$(sha256sum < "$d" "#,
    r#"2>/dev/null) && s=${s%% *}; [ -x "$d" ] && v=$("$d" --version 2>/dev/null); echo "#,
    r#"posh-attach $(uname -s) $(uname -m) ${s:--} $v"#,
);
/// Script that copies the program from standard input into a new file that only this login can
/// write. `$1` is its SHA-256, `$2` its version line. The file is renamed only if both are right,
/// since the copy may be incomplete or another file, and the home may be mounted noexec. An
/// existing link or directory of the final name is not followed.
const TAKE: &str = concat!(
    r#"umask 077; d="$HOME/.local/bin"; mkdir -p "$d" && t=$(mktemp "#,
    r#""$d/.posh-executor.XXXXXXXX") || exit 1; cat > "$t" && s=$(sha256sum < "$t") && { "#,
    r#"[ "${s%% *}" = "$1" ] || { echo "the copy has another SHA-256" >&2; false; }; } && "#,
    r#"chmod 755 "$t" && v=$("$t" --version) && { [ "$v" = "$2" ] || { echo "the copy says "#,
    r#"that it is $v" >&2; false; }; } && mv -fT "$t" "$d/posh-executor" && echo posh-attach "#,
    r#"$v && exit 0; rm -f "$t"; exit 1"#,
);

/// Limit of a login's standard output, start-up files included; our own line has less than 200
/// bytes.
const ANSWER_BYTES: usize = 64 << 10;
/// Limits of its standard error (a banner, ssh's own messages) that is shown, and of one line.
const SHOWN_BYTES: usize = 64 << 10;
const LINE_BYTES: u64 = 4 << 10;
/// Timeout for the rest of standard error after ssh has ended.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Error of [`parse_login`], for the user.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoginFault {
    /// The address of an executor that listens.
    #[error("an executor that listens is installed by who runs it")]
    Listens,
    /// No address.
    #[error("{0}; {hint}", hint = .0.hint())]
    Address(AddressFault),
}

/// A login as it is given on the command line: `[ssh://][USER@]HOST[:PORT]`.
///
/// # Errors
/// No login.
pub fn parse_login(text: &str) -> Result<Login, LoginFault> {
    let address = if text.contains("://") { text.to_owned() } else { format!("ssh://{text}") };
    match Address::parse(&address) {
        Ok(Address::Ssh(login)) => Ok(login),
        Ok(Address::Http { .. } | Address::Tls(_)) => Err(LoginFault::Listens),
        Err(fault) => Err(LoginFault::Address(fault)),
    }
}

/// Permission to copy without a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Consent {
    /// `--yes`.
    Given,
    /// Ask on the terminal.
    Ask,
}

/// Copies the program to `login`, unless it is installed already; returns a report.
///
/// # Errors
/// [`Error::Attach`] for every reason why it is not copied, and [`Error::Config`].
pub fn attach(target: &GatewayTarget, login: &Login, consent: Consent) -> Result<String, Error> {
    let way = SshRoute { ssh_command: ssh_command(target)?, login };
    let own = OwnProgram::find()?;
    let there = There::look(&way)?;
    there.can_run(login)?;
    if there.version == own.version && there.sha256 == own.sha256 {
        return Ok(format!("{login} has {} already\n", own.version));
    }
    if consent == Consent::Ask {
        ask(&own, &there, login)?;
    }
    let version = copy(&way, &own)?;
    Ok(format!(
        "{login} has {version} now, as ~/.local/bin/{PROGRAM}; in mounts.toml its address is \
         ssh://{login}\n"
    ))
}

/// The configured ssh command, or the default.
fn ssh_command(target: &GatewayTarget) -> Result<Vec<String>, Error> {
    let Some(found) = gateway::find_config(target)? else {
        return Ok(Config::default().gateway.ssh_command);
    };
    match Config::load_found(&found) {
        Ok(config) => Ok(config.gateway.ssh_command),
        Err(mistakes) => Err(mistakes.into()),
    }
}

/// This machine's program.
struct OwnProgram {
    path: PathBuf,
    bytes: u64,
    /// In hexadecimal digits.
    sha256: String,
    version: String,
}

impl OwnProgram {
    fn find() -> Result<Self, Error> {
        let failed = |path: &Path, error: io::Error| {
            Error::Attach(format!("can't read {}: {error}", path.display()))
        };
        let beside =
            env::current_exe().map_err(|error| failed(Path::new("/proc/self/exe"), error))?;
        let path = beside.with_file_name(PROGRAM);
        let program = fs::read(&path).map_err(|error| failed(&path, error))?;
        let (bytes, sha256) = (program.len() as u64, Fingerprint::of(&program).to_string());
        let said =
            Command::new(&path).arg("--version").output().map_err(|error| failed(&path, error))?;
        Ok(Self { bytes, sha256, version: one_line(&said.stdout), path })
    }
}

/// ssh to the other machine.
struct SshRoute<'a> {
    ssh_command: Vec<String>,
    login: &'a Login,
}

impl SshRoute<'_> {
    /// Runs a script on the other machine. ssh asks its questions on the terminal; standard error
    /// is passed on, escaped. Returns the script's line after [`MARK`].
    fn run(&self, script: &str, input: Stdio) -> Result<String, Error> {
        let (program, first) =
            self.ssh_command.split_first().expect("the configuration has checked it");
        let mut command = Command::new(program);
        command
            .args(first)
            .args(ssh::ATTENDED)
            .args(ssh::arguments(self.login))
            .arg(ssh::any_shell(script));
        let ended = run_bounded(command.stdin(input), io::stderr());
        let (status, output) =
            ended.map_err(|error| Error::Attach(format!("can't run {program}: {error}")))?;
        if output.len() > ANSWER_BYTES {
            return Err(Error::Attach(format!(
                "{} says more than {} KiB at login",
                self.login,
                ANSWER_BYTES >> 10
            )));
        }
        let text = String::from_utf8_lossy(&output);
        if let Some(answer) = text.lines().find_map(|line| line.strip_prefix(MARK)) {
            return Ok(answer.trim().to_owned());
        }
        let said = one_line(&output);
        let said = if said.is_empty() { String::new() } else { format!("; it said {said:?}") };
        Err(Error::Attach(format!("{program} {} failed ({status}){said}", self.login)))
    }
}

/// Runs a command, and kills it when its output exceeds [`ANSWER_BYTES`]; passes its standard error
/// on to `errors`.
fn run_bounded(
    command: &mut Command,
    errors: impl Write + Send + 'static,
) -> io::Result<(ExitStatus, Vec<u8>)> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
        unreachable!("both are pipes")
    };
    let (done, passed) = mpsc::channel();
    thread::spawn(move || {
        pass_on(BufReader::new(stderr), errors);
        let _ = done.send(());
    });
    let mut output = Vec::new();
    let read = stdout.take(ANSWER_BYTES as u64 + 1).read_to_end(&mut output);
    if read.is_err() || output.len() > ANSWER_BYTES {
        let _ = child.kill();
    }
    let status = child.wait()?;
    // A shared ssh connection may hold it open.
    let _ = passed.recv_timeout(LAST_WORDS);
    read.map(|_| (status, output))
}

/// Passes lines of a server on to the terminal, escaped.
fn pass_on(mut from: impl BufRead, mut to: impl Write) {
    let mut left_bytes = SHOWN_BYTES;
    loop {
        let mut line = Vec::new();
        match from.by_ref().take(LINE_BYTES).read_until(b'\n', &mut line) {
            Ok(1..) => {}
            Ok(0) | Err(_) => return,
        }
        // All of it is read, so that the writer never blocks; the excess is not shown.
        if let Some(left) = left_bytes.checked_sub(line.len()) {
            left_bytes = left;
            let _ = writeln!(to, "{}", escaped(String::from_utf8_lossy(&line).trim_end()));
        }
    }
}

/// The other machine.
#[derive(Debug, PartialEq, Eq)]
struct There {
    system: String,
    machine: String,
    /// SHA-256 of its program; `-` when there is none.
    sha256: String,
    /// Empty when no program can be run.
    version: String,
}

impl There {
    fn look(way: &SshRoute<'_>) -> Result<Self, Error> {
        let answer = way.run(LOOK, Stdio::null())?;
        Self::parse(&answer)
            .ok_or_else(|| Error::Attach(format!("{} gave an odd answer: {answer:?}", way.login)))
    }

    fn parse(answer: &str) -> Option<Self> {
        let mut words = answer.split_whitespace();
        let (system, machine) = (words.next()?.to_owned(), words.next()?.to_owned());
        let sha256 = words.next()?.to_owned();
        Some(Self { system, machine, sha256, version: words.collect::<Vec<_>>().join(" ") })
    }

    /// An error if the other machine has another system or processor, for which this machine has no
    /// program.
    fn can_run(&self, login: &Login) -> Result<(), Error> {
        let own = uname()
            .map_err(|source| Error::System { attempt: "ask for the machine's name", source })?;
        let (system, machine) = (own.sysname().to_string_lossy(), own.machine().to_string_lossy());
        if (self.system.as_str(), self.machine.as_str()) == (&*system, &*machine) {
            return Ok(());
        }
        Err(Error::Attach(format!(
            "{login} is a {} machine with {}, and this {PROGRAM} is for {machine} with {system}; \
             build it for that machine and put it into its ~/.local/bin",
            self.machine, self.system
        )))
    }
}

fn ask(own: &OwnProgram, there: &There, login: &Login) -> Result<(), Error> {
    if !io::stdin().is_terminal() {
        return Err(Error::Attach(
            "nobody to ask: standard input is not a terminal; give --yes".to_owned(),
        ));
    }
    let instead = if there.version.is_empty() {
        String::new()
    } else {
        format!(" in place of {}", escaped(&there.version))
    };
    let mut terminal = io::stderr();
    let size_mb = own.bytes.div_ceil(1_000_000);
    let asked = write!(
        terminal,
        "copy {} ({size_mb} MB) to ~/.local/bin on {login}{instead}? [y/N] ",
        own.version
    );
    asked.and_then(|()| terminal.flush()).map_err(Error::Output)?;
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    match (read, answer.trim()) {
        (Ok(_), "y" | "Y" | "yes") => Ok(()),
        _ => Err(Error::Attach("nothing was copied".to_owned())),
    }
}

/// Copies the program; returns its version as run on the other machine.
fn copy(way: &SshRoute<'_>, own: &OwnProgram) -> Result<String, Error> {
    let failed =
        |error: io::Error| Error::Attach(format!("can't read {}: {error}", own.path.display()));
    let program = File::open(&own.path).map_err(failed)?;
    let words = [&own.sha256, &own.version].map(|word| ssh::quoted(word.as_bytes())).join(" ");
    let script = format!("set -- {words}; {TAKE}");
    way.run(&script, program.into())
}

/// The first line that is not empty.
fn one_line(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn what_the_machine_answers() {
        let there = |version: &str, sha256: &str| There {
            system: "Linux".into(),
            machine: "x86_64".into(),
            sha256: sha256.into(),
            version: version.into(),
        };
        assert_eq!(
            There::parse("Linux x86_64 0a posh-executor 0.1.0"),
            Some(there("posh-executor 0.1.0", "0a"))
        );
        assert_eq!(There::parse("Linux x86_64 -"), Some(there("", "-")));
        assert_eq!(There::parse("Linux x86_64"), None);
    }

    /// What [`TAKE`] makes of a program with these words for it, in a home; whether it says that
    /// all is well.
    fn take(home: &Path, program: &str, sha256: &str, version: &str) -> bool {
        fs::write(home.join("sent"), program).unwrap();
        let words = [sha256, version].map(|word| ssh::quoted(word.as_bytes())).join(" ");
        let script = ssh::any_shell(&format!("set -- {words}; {TAKE}"));
        let input = File::open(home.join("sent")).unwrap();
        let output = Command::new("sh")
            .args(["-c", &script])
            .env("HOME", home)
            .stdin(input)
            .output()
            .unwrap();
        let left = fs::read_dir(home.join(".local/bin")).unwrap().filter_map(Result::ok);
        assert!(
            left.map(|entry| entry.file_name()).all(|name| name == PROGRAM),
            "nothing else is left"
        );
        output.status.success() && String::from_utf8_lossy(&output.stdout).contains(MARK)
    }

    #[test]
    fn only_the_program_that_was_sent_gets_the_name() {
        let home = tempfile::tempdir().unwrap();
        let installed = home.path().join(".local/bin").join(PROGRAM);
        let (program, version) = ("#!/bin/sh\necho posh-executor 0.1.0\n", "posh-executor 0.1.0");
        let sha256 = Fingerprint::of(program.as_bytes()).to_string();
        assert!(!take(home.path(), &program[..20], &sha256, version));
        assert!(!take(home.path(), "#!/bin/sh\necho posh-executor 0.1.0 \n", &sha256, version));
        assert!(!take(home.path(), program, &sha256, "posh-executor 0.2.0"));
        assert!(!installed.exists());
        assert!(take(home.path(), program, &sha256, version));
        assert_eq!(fs::read_to_string(&installed).unwrap(), program);
        assert_eq!(installed.metadata().unwrap().permissions().mode() & 0o7777, 0o755);
    }

    #[test]
    fn a_link_that_has_the_name_is_replaced_and_not_followed() {
        let home = tempfile::tempdir().unwrap();
        let (program, version) = ("#!/bin/sh\necho v\n", "v");
        let sha256 = Fingerprint::of(program.as_bytes()).to_string();
        let installed = home.path().join(".local/bin").join(PROGRAM);
        fs::create_dir_all(installed.parent().unwrap()).unwrap();
        fs::write(home.path().join("precious"), "text").unwrap();
        fs::create_dir(home.path().join("directory")).unwrap();
        for target in ["precious", "directory"] {
            let _ = fs::remove_file(&installed);
            symlink(home.path().join(target), &installed).unwrap();
            assert!(take(home.path(), program, &sha256, version), "{target}");
            assert!(installed.symlink_metadata().unwrap().is_file(), "{target}");
        }
        assert_eq!(fs::read_to_string(home.path().join("precious")).unwrap(), "text");
        assert_eq!(fs::read_dir(home.path().join("directory")).unwrap().count(), 0);
    }

    #[test]
    fn a_login_that_never_stops_talking_is_ended() {
        let login = parse_login("ada@store1").unwrap();
        for script in
            ["exec yes", "echo posh-attach Linux; exec yes x", "exec tr '\\0' x < /dev/zero"]
        {
            let ssh_command = ["sh", "-c", script, "ssh"].map(str::to_owned).to_vec();
            let why = SshRoute { ssh_command, login: &login }
                .run("true", Stdio::null())
                .unwrap_err()
                .to_string();
            assert_eq!(why, "ada@store1 says more than 64 KiB at login");
        }
    }

    #[test]
    fn what_a_login_says_on_standard_error_says_nothing_to_the_terminal() {
        let passed = |said: &[u8]| {
            let mut shown = Vec::new();
            pass_on(said, &mut shown);
            String::from_utf8(shown).unwrap()
        };
        assert_eq!(
            passed(b"a banner\r\nx\x1b]0;T\x07\xff\n"),
            "a banner\nx\\u{1b}]0;T\\u{7}\u{fffd}\n"
        );
        let long = passed(&vec![b'x'; 10 * SHOWN_BYTES]);
        assert!((SHOWN_BYTES / 2..=2 * SHOWN_BYTES).contains(&long.len()), "{}", long.len());
    }

    #[test]
    fn another_processor_gets_no_copy() {
        let login = parse_login("ada@store1").unwrap();
        let there = There {
            system: "Linux".into(),
            machine: "pdp11".into(),
            sha256: "-".into(),
            version: String::new(),
        };
        let why = there.can_run(&login).unwrap_err().to_string();
        assert!(
            why.starts_with(
                "ada@store1 is a pdp11 machine with Linux, and this posh-executor is for "
            ),
            "{why}"
        );
    }

    #[test]
    fn logins() {
        for (text, expect) in [
            ("store1", Ok("store1")),
            ("ada@store1:22", Ok("ada@store1:22")),
            ("ssh://ada@store1", Ok("ada@store1")),
            ("-oProxyCommand=x", Err("the address has no valid host; ")),
            ("http://store1:7400", Err("an executor that listens is installed by who runs it")),
        ] {
            match (parse_login(text), expect) {
                (Ok(login), Ok(expect)) => assert_eq!(login.to_string(), expect),
                (Err(why), Err(expect)) => assert!(why.to_string().starts_with(expect), "{why}"),
                (found, _) => panic!("{text}: {found:?}"),
            }
        }
    }
}
