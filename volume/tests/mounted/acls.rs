//! POSIX ACLs on a mount for everybody: each user may do there what they may do in a directory of
//! the server, with the same commands on a plain directory as the oracle. All of it needs root, and
//! an `ext4` or `tmpfs` at the temporary directory.

use std::{path::Path, process::Command};

use nix::unistd::geteuid;

use crate::site::Site;

/// The people of these tests, and a function that runs shell text as one of them.
const PEOPLE: &str = r#"
as() {
    case $1 in
        root)     set -- 0 0 0 "$2" ;;
        owner)    set -- 20001 20001 20001 "$2" ;;
        named)    set -- 20002 20002 20002 "$2" ;;
        group)    set -- 20003 20003 20100 "$2" ;;
        team)     set -- 20004 20004 20200 "$2" ;;
        both)     set -- 20002 20002 20100,20200 "$2" ;;
        stranger) set -- 20005 20005 20005 "$2" ;;
    esac
    setpriv --reuid "$1" --regid "$2" --groups "$3" sh -c "$4" 2>/dev/null
}
everybody="root owner named group team both stranger"
"#;

/// For each of them, each right, and what the file's contents are at last.
const PROBE: &str = r#"
probe() {
    for who in $everybody; do
        said=$(as $who 'for right in r w x; do [ -'\$right' f ] && printf '\$right'; done
            cat f >&3 && printf :read; printf x >> f && printf :write; ./f && printf :execute
            ls d >&3 && printf :list; cat d/inner >&3 && printf :search; : > d/new && printf :create
            rm -f d/new && [ ! -e d/new ] && printf :remove; (cd d) && printf :cd; true' 3>/dev/null)
        echo "$who: $said"
    done
    stat -c '%a %u %g' f d d/*; getfacl -cnp f d d/*; cat f
}
"#;

fn shell(directory: &Path, text: &str) -> String {
    let text = format!("{PEOPLE}\n{PROBE}\numask 022\n{text}");
    let output = Command::new("bash").args(["-c", &text]).current_dir(directory).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    format!("{}{errors}", String::from_utf8(output.stdout).unwrap())
}

/// Shell text prints the same on a mount and in a plain directory.
fn check(text: &str) {
    if !geteuid().is_root() {
        return;
    }
    let site = Site::new(1);
    let plain = shell(&site.plain(), text);
    assert!(plain.len() > 10, "{plain}");
    assert_eq!(shell(site.mount(0), text), plain, "{text}");
    site.settle(0);
    // On the server, too.
    let shown = |directory: &Path| {
        shell(directory, "getfacl -cnpR . | grep -v '^#'; find . -printf '%p %m %U %G\\n' | sort")
    };
    assert_eq!(shown(&site.origin()), shown(&site.plain()), "{text}");
}

const MADE: &str =
    "printf 'true\\n' > f; mkdir d; printf inner > d/inner; chown 20001:20100 f d d/inner
    chmod 750 f d; chmod 640 d/inner;";

#[test]
fn everybody_may_do_what_the_acl_says_and_no_more() {
    for acls in [
        "true",
        "setfacl -m u:20002:rw f; setfacl -m u:20002:rwx d; setfacl -m u:20002:r d/inner",
        // The group's bits of the mode are the mask: not what the group may do.
        "setfacl -m u:20002:rwx,g::---,m::rwx f d; setfacl -m u:20002:rw,g::-,m::rw d/inner",
        "setfacl -m g:20200:rwx,m::r f; setfacl -m g:20200:rwx,m::rx d",
        "setfacl -m u:20002:-,g:20200:rwx,o::rx f d; setfacl -m u:20002:-,g:20200:rw,o::r d/inner",
        "setfacl -m g:20100:-,g:20200:rwx f d; setfacl -m g:20200:r d/inner",
        "setfacl -m u:20002:rwx,g:20200:rwx f d; chmod g-w f d; setfacl -m g:20200:r d/inner",
        "setfacl -m u:20002:rwx f d; setfacl -x u:20002 f; setfacl -b d",
        "setfacl -m u:20005:rwx f d; chown 20005:20200 f d",
        "chmod 2770 d; setfacl -m u:20002:rwx d; as named 'setfacl -b d'; as owner 'setfacl -m o::x d'",
        // The owner is no member of the group, which gives and takes bits of the mode.
        "chmod 6750 f; as owner 'setfacl -m u:20002:rx f'; chmod 2750 d; as owner 'chmod 2777 d'",
        "setfacl -m u:20002:rwx f; chmod 6770 f; as named 'printf y >> f'; stat -c %a f; chmod 6770 f; as owner 'chown :20001 f'",
    ] {
        check(&format!("{MADE} {acls}; probe"));
    }
}

#[test]
fn what_is_made_where_there_is_a_default_acl_gets_it() {
    for acls in [
        "true",
        "setfacl -d -m u::rwx,g::rwx,o::rwx d",
        "setfacl -d -m u:20002:rwx,g:20200:rx,o::- d",
        "setfacl -d -m u:20002:rwx,g::-,m::x,o::r d",
        "chmod g+s d; setfacl -d -m u:20002:rwx d",
        "setfacl -d -m u:20002:rwx d; setfacl -k d",
    ] {
        for umask in ["027", "000"] {
            check(&format!(
                "{MADE} chmod 777 d; {acls}; umask {umask}
                cd d; mkdir sub; : > file; mkfifo pipe; install -m 604 file put; ln -s file link; cp -p inner kept
                mkdir -m 750 sub/below; : > sub/below/file; mkdir sub/below/last; : > sub/below/last/file; cd ..
                as named 'umask {umask}; cd d; mkdir theirs; : > theirs/file; : > file2; mkdir -m 700 private'
                for who in $everybody; do echo $who; as $who 'cd d; find . ; cat */file; : > sub/'$who; done
                getfacl -cnpR d; probe"
            ));
        }
    }
}

/// Names of a directory that was made just now are made in memory, as long as the server would do
/// nothing else.
#[test]
fn a_directory_that_gets_a_default_acl_is_made_in_no_more_without_it() {
    check(
        "umask 027; mkdir new new/inner; : > new/before; setfacl -d -m u:20002:rw new; setfacl -m u:20002:rwx new
        : > new/after; mkdir new/sub; : > new/sub/file; : > new/inner/file; setfacl -d -m g:20200:x new/inner
        : > new/inner/after; chmod 664 new/after; setfacl -k new; : > new/last; setfacl -m u:20002:r new/before
        chmod 600 new/before; as named 'cat new/before || echo not masked'; chmod 640 new/before
        as named 'cat new/before && echo masked'; getfacl -cnpR new; ls -la new | cut -c 1-11",
    );
}

#[test]
fn a_change_by_the_server_or_another_mount_is_heeded_at_once() {
    if !geteuid().is_root() {
        return;
    }
    let site = Site::new(2);
    let may = || {
        ["named", "group"]
            .map(|who| shell(site.mount(0), &format!("as {who} 'cat d/inner'")) == "inner")
    };
    shell(&site.origin(), MADE);
    site.catch_up(0);
    assert_eq!(may(), [false, true]);
    // Each twice: what the first has asked, the second is let in by.
    for number in 0..4 {
        let elsewhere = if number % 2 == 0 { site.origin() } else { site.mount(1).to_owned() };
        let change = |text: &str| {
            assert_eq!(shell(&elsewhere, text), "", "{text}");
            if number % 2 == 0 {
                site.catch_up(0);
            }
        };
        change("setfacl -m u:20002:rx d; setfacl -m u:20002:r d/inner");
        assert_eq!((may(), may()), ([true, true], [true, true]), "{number}");
        // The mode stays as it is.
        change("setfacl -m u:20002:-,g::-,m::r d/inner");
        assert_eq!((may(), may()), ([false, false], [false, false]), "{number}");
        change("setfacl -m u:20002:r,g::r d/inner");
        assert_eq!(may(), [true, true], "{number}");
        change("setfacl -m u:20002:-,m::rx d");
        assert_eq!((may(), may()), ([false, true], [false, true]), "{number}");
        change("setfacl -b d d/inner");
        assert_eq!(may(), [false, true], "{number}");
    }
}

/// Nobody asks: the executor is told by the kernel.
#[test]
fn an_acl_that_a_program_of_the_server_has_removed_lets_nobody_in_any_more() {
    if !geteuid().is_root() {
        return;
    }
    let site = Site::new(1);
    let is_let_in = || shell(site.mount(0), "as named 'cat d/inner'") == "inner";
    shell(&site.origin(), &format!("{MADE} setfacl -m u:20002:rx d; setfacl -m u:20002:r d/inner"));
    site.catch_up(0);
    assert!(is_let_in() && is_let_in());
    shell(&site.origin(), "setfacl -b d/inner");
    let began = std::time::Instant::now();
    while is_let_in() {
        assert!(began.elapsed() < std::time::Duration::from_secs(2), "it is not seen");
    }
    println!("seen within {:?}", began.elapsed());
}

/// An ACL that is set while something of it is made in memory, which its answer must not hide.
#[test]
fn an_acl_that_is_set_on_a_directory_with_new_names_counts() {
    check(
        "umask 022; for n in 1 2 3 4 5 6 7 8; do mkdir d$n; printf $n > d$n/f
        (for i in 1 2 3 4 5; do : > d$n/new$i; done) & setfacl -m u:20002:-,d:u:20002:r d$n; wait
        : > d$n/last; as named \"cat d$n/f || echo no $n\"; as stranger \"cat d$n/f\"
        getfacl -cnp d$n d$n/last; rm d$n/new*; done",
    );
}
