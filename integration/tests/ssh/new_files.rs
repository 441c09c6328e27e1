//! sftp services that make other files than a login's commands, or none.

use super::*;

const MOUNT: &str = "/mnt/x";

/// Mounts /srv/s1 through another sshd on the server, started with this umask and these lines.
fn mount_through(lab: &Lab, port: u16, umask: &str, lines: &str) {
    let server = &lab.servers[0].host;
    let text = format!(
        "grep -vi '^port\\|^subsystem\\|^pidfile' /run/lab-ssh/config > /run/lab-ssh/c{port}; \
         printf 'Port {port}\\nPidFile none\\n{lines}\\n' >> /run/lab-ssh/c{port}; umask {umask}; \
         exec /usr/sbin/sshd -f /run/lab-ssh/c{port}"
    );
    sh(server, &text);
    let config = format!("{}Port {port}\n", ssh_config("root", WORKSTATION_KEY));
    write_file(&lab.workstation, SSH_CONFIG, config.as_bytes()).unwrap();
    let mount = format!(
        "fusermount3 -u {MOUNT}; mkdir -p {MOUNT}; \
         exec sshfs -F {SSH_CONFIG} store1:/srv/s1 {MOUNT}"
    );
    posh(&lab.workstation, &["gateway", "stop"]);
    sh(&lab.workstation, &mount);
}

#[test]
fn files_have_the_permissions_that_the_sftp_service_gives() {
    let lab = lab();
    configure(&lab, "");
    fs::create_dir(lab.data(1).join("d")).unwrap();
    fs::write(lab.data(1).join("d/k"), "k\n").unwrap();
    let makes = "cd /mnt/x; rm -rf c t s e; cp f c; tee t < f > /dev/null; sort -o s f; cp -r d e; \
                 sort f > r; stat -c '%a %n' c t s e e/k r";
    let service = "Subsystem sftp internal-sftp";
    let of = [("077", service.to_owned()), ("022", format!("{service} -u 0027"))];
    for (port, (umask, lines)) in (2201..).zip(of) {
        mount_through(&lab, port, umask, &lines);
        let outcome = assert_same(&lab.workstation, &Script::new(makes));
        let is_refused = |reason: &String| reason.contains("does not give to new files");
        assert!(reasons(&outcome).iter().any(is_refused), "{:#?}", reasons(&outcome));
        // What the shell has no permissions to give needs none of the server.
        let own = format!("umask {}; {makes}", umask.replace("022", "027"));
        let outcome = assert_same(&lab.workstation, &Script::new(own));
        assert!(!reasons(&outcome).iter().any(is_refused), "{:#?}", reasons(&outcome));
        let copied = outcome.report().stages("tee").all(|stage| stage.is_offloaded());
        assert!(copied, "{:#?}", reasons(&outcome));
        // Nothing of the proof is left.
        let left = fs::read_dir(lab.data(1)).unwrap();
        let left = left.filter(|e| e.as_ref().unwrap().file_name().as_encoded_bytes()[0] == b'.');
        assert_eq!(left.count(), 0);
    }
}

#[test]
fn a_service_that_changes_less_or_is_another_user() {
    let lab = lab();
    configure(&lab, "");
    // Sticky, so that root's changes there may go on the server at all.
    let open = fs::Permissions::from_mode(0o1777);
    fs::set_permissions(lab.data(1), open).unwrap();
    let nobody = "/usr/sbin/runuser -u nobody -- /usr/lib/openssh/sftp-server";
    let group = "/usr/bin/setpriv --regid 65534 --clear-groups /usr/lib/openssh/sftp-server";
    let of = [
        ("internal-sftp -R", "can't be changed through the mount"),
        ("internal-sftp -P rename,posix-rename", "can't be changed through the mount"),
        ("internal-sftp -P rmdir", "can't be removed through the mount"),
        ("internal-sftp -P setstat,fsetstat", "can't be changed through the mount"),
        (nobody, "makes files of user 65534"),
        (group, "of user 0 and group 65534"),
    ];
    for (port, (service, why)) in (2211..).zip(of) {
        mount_through(&lab, port, "022", &format!("Subsystem sftp {service}"));
        fs::create_dir_all(lab.data(1).join("d")).unwrap();
        fs::write(lab.data(1).join("d/k"), "k\n").unwrap();
        let text = "cd /mnt/x; rm -r d; echo $?; sed -i s/needle/N/ f; echo $?; grep -c N f; ls";
        let posh = Script::new(text).run(&lab.workstation, Under::PoshExplained).unwrap();
        let changing = posh.report().stages("rm").chain(posh.report().stages("sed"));
        let changing: Vec<_> = changing.collect();
        assert!(!changing.is_empty(), "{posh}");
        for stage in changing {
            assert!(!stage.is_offloaded() && stage.reason.contains(why), "{stage:#?}");
        }
        if ["internal-sftp -R", "internal-sftp -P rmdir", nobody].contains(&service) {
            assert_eq!(stdout(&posh).lines().next(), Some("1"), "{posh}");
            assert!(lab.data(1).join("d").exists());
        }
        // Two commands have tried, and one at most has left something.
        let entries = fs::read_dir(lab.data(1)).unwrap().map(|entry| entry.unwrap().path());
        let left: Vec<_> =
            entries.filter(|path| path.to_string_lossy().contains("/.posh-")).collect();
        assert_eq!(left.len(), usize::from(service.contains("rmdir")), "{left:?}");
        left.iter().for_each(|path| fs::remove_dir(path).unwrap());
    }
}
