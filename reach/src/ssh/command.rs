//! ssh's arguments, and the command line for the remote login shell, whichever that is.

use std::process::Stdio;

use fs_mapper::config::Login;
use tokio::process::{Child, Command};

use super::SshFault;
use crate::{Route, open_files};

/// Start of the executor: the user's own installation (`posh attach`) takes precedence over PATH.
const SCRIPT: &str =
    r#"p="$HOME/.local/bin/posh-executor"; [ -x "$p" ] || p=posh-executor; exec "$p" --stdio"#;

/// Options of a non-interactive ssh: no prompts, and none of the user's settings for terminals,
/// forwardings and remote commands. It uses an existing shared connection (ControlMaster), but
/// isn't a master itself, since it ends with the gateway.
const UNATTENDED: [&str; 11] = [
    "-T",
    "-x",
    "-a",
    "-o",
    "BatchMode=yes",
    "-o",
    "ClearAllForwardings=yes",
    "-o",
    "ControlMaster=no",
    "-o",
    "RemoteCommand=none",
];

/// Options of an ssh for one command whose user answers its prompts.
pub const ATTENDED: [&str; 7] =
    ["-T", "-x", "-a", "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none"];

/// Starts ssh with pipes, in a process group of its own, so that signals to the gateway's group
/// don't reach it. Its working directory is `/`: relative names in its arguments must not resolve
/// in the directory where `posh doctor` is called, which another user may control.
pub(super) fn spawn(login: &Login, route: &Route) -> Result<Child, SshFault> {
    let (program, first) =
        route.ssh_command.split_first().expect("the configuration has checked it");
    let mut command = Command::new(program);
    command
        .args(first)
        .args(UNATTENDED)
        .args(arguments(login))
        .arg(executor_command(&route.exports));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.current_dir("/").process_group(0).kill_on_drop(true);
    open_files::give_back(command.as_std_mut());
    command.spawn().map_err(|source| SshFault::Spawn { program: program.clone(), source })
}

/// Returns ssh's arguments for the destination.
#[must_use]
pub fn arguments(login: &Login) -> Vec<String> {
    let mut words = Vec::new();
    if let Some(port) = login.port() {
        words.extend(["-p".to_owned(), port.to_string()]);
    }
    if let Some(user) = login.user() {
        words.extend(["-l".to_owned(), user.to_owned()]);
    }
    words.extend(["--".to_owned(), login.host().to_owned()]);
    words
}

/// Returns the command line that starts an executor with these exports, for any login shell.
#[must_use]
pub fn executor_command(exports: &[String]) -> String {
    let exports: String =
        exports.iter().map(|export| format!(" --export {}", quoted(export.as_bytes()))).collect();
    any_shell(&format!("{SCRIPT}{exports}"))
}

/// Wraps a script for sh into a command line for any login shell. Inside of single quotes sh, bash,
/// zsh, fish and csh agree on all but a few characters, which the script must not contain.
#[must_use]
pub fn any_shell(script: &str) -> String {
    assert!(!script.contains(['\'', '!', '\n']), "these mean something inside of quotes: {script}");
    format!("exec sh -c '{script}'")
}

/// Quotes a word of a script for [`any_shell`].
#[must_use]
pub fn quoted(word: &[u8]) -> String {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/._-+=:@,%~ ".contains(byte);
    if word.iter().all(is_plain) {
        return format!("\"{}\"", String::from_utf8_lossy(word));
    }
    let octal: String = word.iter().map(|byte| format!("\\0{byte:03o}")).collect();
    format!("\"$(printf %b \"{octal}\")\"")
}

#[cfg(test)]
mod tests {
    use std::process::Command as StdCommand;

    use super::*;

    /// Every login shell that the tests' machine has.
    const SHELLS: [&str; 4] = ["bash", "dash", "zsh", "fish"];

    #[test]
    fn every_shell_hands_on_the_same_words() {
        let odd = [
            "plain",
            "",
            "two words",
            "~/x",
            "it's",
            "a\"b",
            "$HOME `id` \\n",
            "50%s",
            "bang!",
            "ümläut",
            "-n",
        ];
        let script: String =
            odd.iter().map(|word| format!(" {}", quoted(word.as_bytes()))).collect();
        let command = any_shell(&format!("printf \"<%s>\" {script}"));
        for shell in SHELLS {
            let output = StdCommand::new(shell).args(["-c", &command]).output().expect(shell);
            let expect: String = odd.iter().map(|word| format!("<{word}>")).collect();
            assert_eq!(String::from_utf8_lossy(&output.stdout), expect, "{shell}: {output:?}");
        }
    }

    #[test]
    fn the_users_own_program_comes_first_and_a_missing_one_is_status_127() {
        let home = tempfile::tempdir().expect("a directory");
        let run = |shell: &str| {
            let mut command = StdCommand::new(shell);
            command.args(["-c", &executor_command(&["/srv/x y".to_owned(), "~".to_owned()])]);
            command.env("HOME", home.path()).env("PATH", "/usr/bin:/bin").output().expect(shell)
        };
        for shell in SHELLS {
            assert_eq!(run(shell).status.code(), Some(127), "{shell}");
        }
        let directory = home.path().join(".local/bin");
        std::fs::create_dir_all(&directory).expect("made");
        std::os::unix::fs::symlink("/bin/echo", directory.join("posh-executor")).expect("linked");
        for shell in SHELLS {
            let output = run(shell);
            assert_eq!(
                String::from_utf8_lossy(&output.stdout),
                "--stdio --export /srv/x y --export ~\n",
                "{shell}"
            );
        }
    }

    #[test]
    fn where_to() {
        let check = |user: Option<&str>, host: &str, port: Option<u16>, expect: &[&str]| {
            assert_eq!(arguments(&Login::new(user, host, port).expect("a login")), expect);
        };
        check(None, "store1", None, &["--", "store1"]);
        check(Some("ada"), "::1", Some(2222), &["-p", "2222", "-l", "ada", "--", "::1"]);
    }
}
