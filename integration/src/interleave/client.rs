//! Measures how soon a change by another client is seen: a second gateway, as of another
//! workstation, with a volume of the same export.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::{AttemptExt, LabError, Result};
use crate::host::Host;
use crate::lab::Lab;
use crate::volumes::{self, Mounts, User};

/// The other client's volume.
const MOUNT: &str = "/mnt/other";
/// Timeout for seeing a change.
const LIMIT: Duration = Duration::from_secs(20);

/// Delays of `changes` changes by the other client, each from its first call until this one sees
/// it.
pub fn delays(lab: &Lab, changes: usize) -> Result<Vec<Duration>> {
    let host = &lab.workstation;
    other_gateway(lab)?;
    let (ours, other) = (host.path(lab.mount(1)), host.path(MOUNT));
    let mut delays = Vec::new();
    for number in 0..changes {
        let text = format!("change {number}\n");
        let name = format!("by-another-{}", number % 3);
        // Fills the cache, names included.
        let _ = (fs::read_dir(&ours).map(Iterator::count), fs::read(ours.join(&name)));
        let began = Instant::now();
        change(&other.join(&name), number, &text)?;
        wait_seen(&ours.join(&name), &text, began)?;
        delays.push(began.elapsed());
    }
    host.must(volumes::posh(host, User::OtherRoot, &["gateway", "stop"]))?;
    delays.sort_unstable();
    Ok(delays)
}

/// Changes the file in place, or replaces it.
fn change(path: &Path, number: usize, text: &str) -> Result<()> {
    let changed = if number.is_multiple_of(2) {
        fs::write(path, text)
    } else {
        let new = path.with_extension("new");
        fs::write(&new, text).and_then(|()| fs::rename(new, path))
    };
    changed.attempt(|| format!("change {}", path.display()))
}

fn wait_seen(path: &Path, text: &str, began: Instant) -> Result<()> {
    while fs::read(path).ok().as_deref() != Some(text.as_bytes()) {
        if began.elapsed() > LIMIT {
            let what = format!("that {text:?} is seen");
            return Err(LabError::Timeout {
                what,
                after: LIMIT,
                detail: format!("{:?}", fs::read(path)),
            });
        }
    }
    Ok(())
}

fn other_gateway(lab: &Lab) -> Result<()> {
    let (host, server): (&Host, _) = (&lab.workstation, &lab.servers[0]);
    let name = &server.spec.name;
    let executor = format!("[[executor]]\nname = \"{name}\"\naddress = \"{}\"\n\n", server.address);
    let table = Mounts::Volume.settings().to_owned()
        + &executor
        + &Mounts::Volume.entry(MOUNT, name, &server.spec.exports[0].name);
    volumes::other_root(host, &table)?;
    let point = host.path(MOUNT);
    fs::create_dir_all(&point).attempt(|| format!("make {}", point.display()))?;
    volumes::start(host, User::OtherRoot, &[MOUNT])
}
