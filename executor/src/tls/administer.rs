//! What an administrator does with certificates: `posh-executor init`, `renew`, `enroll`,
//! `revoke` and `list`. Each gives the text to print; none needs a running executor,
//! and a running one takes notice by itself.

use std::path::Path;

use nix::unistd::gethostname;

use super::{
    TlsError,
    authority::{Authority, CLIENT_LIFETIME_S},
    now_s,
    register::{Certificate, Register, TOKEN_LIFETIME_S},
};

const DAY_S: u64 = 24 * 3600;

/// Makes the authority, the executor's certificate for `names` and an empty register.
///
/// # Errors
/// [`TlsError`].
pub fn init(directory: &Path, names: Vec<String>) -> Result<String, TlsError> {
    let names = or_own_names(names);
    Authority::at(directory).create(&names)?;
    Register::at(directory).create(&names)?;
    let shown = directory.display();
    Ok(format!(
        "made an authority and a certificate for {} in {shown}\n\
         in executor.toml: [tls] dir = \"{shown}\", and an [[identity]] for each who may come\n",
        names.join(", ")
    ))
}

/// Makes the executor a new certificate, for other names if there are any.
///
/// # Errors
/// [`TlsError`].
pub fn renew(directory: &Path, names: Vec<String>) -> Result<String, TlsError> {
    let register = Register::at(directory);
    if !names.is_empty() {
        register.rename(&names)?;
    }
    let names = register.names()?;
    Authority::at(directory).renew_server(&names)?;
    Ok(format!("made a new certificate for {}; a running executor takes it by itself\n", names.join(", ")))
}

/// A token for `identity`: the text to print, and a hint for a terminal.
///
/// # Errors
/// [`TlsError`].
pub fn enroll(directory: &Path, identity: &str) -> Result<(String, String), TlsError> {
    let register = Register::at(directory);
    let token = register.token_for(identity)?;
    let names = register.names()?;
    let host = names.first().map_or("HOST", String::as_str);
    let hint = format!(
        "on the workstation of {identity}, within {} minutes: posh enroll {host}:{} TOKEN\n\
         the certificate is then good for {} days, and renewed by itself\n",
        TOKEN_LIFETIME_S / 60,
        crate::config::default_listen().port(),
        CLIENT_LIFETIME_S / DAY_S
    );
    Ok((format!("{token}\n"), hint))
}

/// Takes all that `identity` has back.
///
/// # Errors
/// [`TlsError`].
pub fn revoke(directory: &Path, identity: &str) -> Result<String, TlsError> {
    let count = Register::at(directory).revoke(identity)?;
    Ok(match count {
        0 => format!("{identity} has no certificate and no token\n"),
        _ => format!(
            "took {count} certificates and tokens of {identity} back; calls are refused from now on, and runs at work end within a second or two\n"
        ),
    })
}

/// One line for each certificate.
///
/// # Errors
/// [`TlsError`].
pub fn list(directory: &Path) -> Result<String, TlsError> {
    let now = now_s();
    let line = |Certificate { identity, issued_s, expires_s, revoked }: &Certificate| {
        let state = match (revoked, expires_s.checked_sub(now)) {
            (true, _) => "revoked".to_owned(),
            (_, None) => "expired".to_owned(),
            (_, Some(left_s)) => format!("good for {} days", left_s / DAY_S),
        };
        format!("{identity}: issued {} days ago, {state}\n", now.saturating_sub(*issued_s) / DAY_S)
    };
    Ok(Register::at(directory).certificates()?.iter().map(line).collect())
}

/// The names by which this machine may be called, when none were given.
fn or_own_names(names: Vec<String>) -> Vec<String> {
    if !names.is_empty() {
        return names;
    }
    let host = gethostname().ok().and_then(|name| name.into_string().ok()).filter(|name| !name.is_empty());
    host.into_iter().chain(["localhost", "127.0.0.1", "::1"].map(str::to_owned)).collect()
}
