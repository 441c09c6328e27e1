//! The compared systems: names, requirements, and the command that runs a workload under each.

use std::process::Command;

use posh_integration::host::HOME;
use posh_integration::oracle::{Door, Script, Under};
use posh_integration::{Host, Lab, network};

use super::catalogue::{DataSize, Workload};

/// Directory for results on the machine of the shell that runs the script.
pub const OUT: &str = "/home/user/out";
/// The script as a file of the workstation, to be sent through ssh.
pub const SCRIPT_FILE: &str = "/run/bench-script.sh";
/// Mount table with an executor on another server than the data's.
pub const ELSEWHERE: &str = "/run/elsewhere.toml";
/// The mount table for posh's own volumes: executors only.
pub const VOLUMES: &str = "/run/volumes.toml";
/// ssh's configuration on the workstation, without a shared connection.
pub const COLD: &str = "/run/bench-ssh-cold";
/// ssh's configuration on the workstation, with a shared connection.
pub const MASTER: &str = "/run/bench-ssh-master";

/// One way to run a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum System {
    /// bash on the first server; other servers' data through sshfs over the link between them.
    Server,
    /// bash on the workstation over sshfs with default options.
    Sshfs,
    /// bash on the workstation over sshfs with an expert's options.
    SshfsTuned,
    /// bash on the workstation over rclone mount, by sftp, contents cached on disk.
    Rclone,
    /// By hand, a connection for each ssh.
    Ssh,
    /// By hand over one existing connection.
    SshMaster,
    /// By hand with GNU parallel, over existing connections.
    Parallel,
    /// posh over sshfs with default options; the gateway runs and is connected.
    Posh,
    /// Like [`System::Posh`], through the shims on PATH.
    PoshPath,
    /// posh without a running gateway.
    PoshCold,
    /// posh with the executor on the second server, which mounts the data.
    PoshElsewhere,
    /// posh over volumes of its own.
    PoshVolume,
    /// bash over volumes of posh: everything runs on the workstation.
    Volume,
}

impl System {
    /// Name in results and reports.
    pub fn name(self) -> &'static str {
        match self {
            System::Server => "server",
            System::Sshfs => "sshfs",
            System::SshfsTuned => "sshfs-tuned",
            System::Rclone => "rclone",
            System::Ssh => "ssh",
            System::SshMaster => "ssh-master",
            System::Parallel => "parallel",
            System::Posh => "posh",
            System::PoshPath => "posh-path",
            System::PoshCold => "posh-cold",
            System::PoshElsewhere => "posh-elsewhere",
            System::PoshVolume => "posh-volume",
            System::Volume => "volume",
        }
    }

    /// Systems that can run a workload.
    pub fn of(workload: &Workload) -> Vec<System> {
        use System::*;
        if workload.servers == 0 {
            return vec![Sshfs, Posh, PoshPath];
        }
        if workload.here {
            let mut systems = vec![Server, Sshfs, SshfsTuned, Volume];
            // rclone writes back some seconds after the program has ended, outside of the measured
            // time.
            systems.extend(workload.results.is_empty().then_some(Rclone));
            return systems;
        }
        let mut systems = vec![Server, Sshfs, SshfsTuned, Posh, PoshVolume, Volume];
        if workload.by_hand.is_some() {
            systems.extend([Ssh, SshMaster]);
        }
        if workload.parallel.is_some() {
            systems.push(Parallel);
        }
        if workload.elsewhere {
            systems.push(PoshElsewhere);
        }
        if workload.name == "one-command" {
            systems.push(PoshCold);
        }
        systems
    }

    /// Returns true if the script runs under posh.
    pub fn is_posh(self) -> bool {
        use System::*;
        matches!(self, Posh | PoshPath | PoshCold | PoshElsewhere | PoshVolume)
    }

    /// Returns true if it may read through the workstation's sshfs mounts.
    pub fn mounts(self) -> bool {
        use System::*;
        matches!(self, Sshfs | SshfsTuned | Posh | PoshPath | PoshCold | PoshElsewhere)
    }

    /// Returns true if the mounts are volumes of posh.
    pub fn has_volumes(self) -> bool {
        matches!(self, System::PoshVolume | System::Volume)
    }

    /// Returns true if a gateway runs, and knows its executors, before the time starts.
    pub fn has_gateway(self) -> bool {
        self.has_volumes() || (self.is_posh() && self != System::PoshCold)
    }

    /// posh's configuration, if it is not the default.
    fn configuration(self) -> Option<&'static str> {
        match self {
            System::PoshElsewhere => Some(ELSEWHERE),
            _ if self.has_volumes() => Some(VOLUMES),
            _ => None,
        }
    }

    /// Further options of its mounts.
    pub fn mount_options(self) -> Vec<String> {
        let options: &[&str] = match self {
            // Names and attributes are cached for an hour, contents stay in the page cache; several
            // connections, no compression, and the fastest cipher of this processor.
            System::SshfsTuned => &[
                "kernel_cache,dir_cache=yes,dcache_timeout=3600,dcache_max_size=1000000",
                "entry_timeout=3600,attr_timeout=3600,negative_timeout=3600,ac_attr_timeout=3600",
                "max_conns=4,Compression=no,Ciphers=aes128-gcm@openssh.com",
            ],
            _ => &[],
        };
        options.iter().map(|option| (*option).to_owned()).collect()
    }

    /// The machine whose shell runs the script.
    pub fn host(self, lab: &Lab) -> &Host {
        if self == System::Server { &lab.servers[0].host } else { &lab.workstation }
    }

    /// Returns true if the script uses the server's own paths: it runs by hand.
    fn paths_of_server(self) -> bool {
        matches!(self, System::Ssh | System::SshMaster | System::Parallel)
    }

    /// Directory of server number `number` (from 1), as the script names it.
    fn directory(self, workload: &Workload, number: usize) -> String {
        let own = self.paths_of_server() || (self == System::Server && number == 1);
        format!("/{}/s{number}/{}", if own { "srv" } else { "mnt" }, workload.name)
    }

    /// The script, and the shell or posh to run it under.
    pub fn script(self, workload: &Workload, size: DataSize) -> (Script, Under) {
        let text = match self {
            System::Ssh | System::SshMaster => workload.by_hand.unwrap_or_default(),
            System::Parallel => workload.parallel.unwrap_or_default(),
            _ => workload.script,
        };
        let mut pairs = vec![("OUT".to_owned(), OUT.to_owned())];
        pairs
            .extend((1..=workload.servers).map(|n| (format!("S{n}"), self.directory(workload, n))));
        pairs.extend(workload.variables(size));
        let mut script = Script::new(text);
        if self.paths_of_server() {
            script = with_ssh(script, self, &pairs);
        }
        script = pairs.iter().fold(script, |script, (name, value)| script.variable(name, value));
        if self == System::PoshPath {
            script = script.door(Door::Path);
        }
        if let Some(file) = self.configuration() {
            script = script.variable("POSH_CONFIG", file);
        }
        let made_here =
            self == System::Volume || (self == System::PoshVolume && workload.made_here);
        if made_here && !workload.results.is_empty() {
            // Files that programs of the workstation create are flushed after the programs end. The
            // comparison reads them on the server, and the flush belongs to the time. Files that
            // commands create on the server need no flush.
            script.text += "\nsync \"$S1\"\n";
        }
        (script, if self.is_posh() { Under::Posh } else { Under::Shell })
    }

    /// A command of posh's front end with the same configuration as the system's scripts.
    pub fn posh(self, lab: &Lab, words: &[&str]) -> Command {
        let mut command = lab.workstation.command(lab.workstation.programs().join("posh"));
        command.args(words);
        if let Some(file) = self.configuration() {
            command.env("POSH_CONFIG", file);
        }
        command
    }
}

/// Adds variables for a script by hand: the ssh command and hosts, and the script's variables for a
/// remote shell.
fn with_ssh(script: Script, system: System, pairs: &[(String, String)]) -> Script {
    let configuration = if system == System::Ssh { COLD } else { MASTER };
    let mut words = format!("LANG=C.UTF-8 HOME={HOME} PARALLEL_HOME=/tmp/parallel");
    for (name, value) in pairs {
        words += &format!(" {name}='{value}'");
    }
    let hosts = (1..).zip(pairs.iter().filter(|(name, _)| name.starts_with('S')));
    let script = hosts
        .fold(script, |script, (n, _)| script.variable(&format!("H{n}"), network::addresses(n).1));
    script
        .variable("SSH", format!("ssh -F {configuration}"))
        .variable("WITH", words)
        .variable("SCRIPT", SCRIPT_FILE)
        // For GNU parallel on the workstation; its files are removed with the workstation.
        .variable("PARALLEL_HOME", "/tmp/parallel")
}
