//! Builds the preloaded library from the crate `hook`; `posh` embeds it. Cargo can't build it:
//! posh's programs are static, and a C library can't be, so that it needs other flags. An embedded
//! library is found wherever the program is, and always has its version.

use std::{
    env, fs,
    hash::{DefaultHasher, Hasher},
    path::{Path, PathBuf},
    process::Command,
};

/// Targets whose C library the hook is for; elsewhere posh has only shims on PATH.
const SERVED: [&str; 2] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];

fn main() {
    println!("cargo::rustc-check-cfg=cfg(posh_has_hook)");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("hook").join("src");
    println!("cargo::rerun-if-changed={}", root.display());
    println!("cargo::rerun-if-env-changed=RUSTC");
    // `posh` itself may be built for musl, to start faster, on a machine with glibc.
    let (host, target) = (variable("HOST"), variable("TARGET"));
    let target = if target == host.replace("-gnu", "-musl") { host } else { target };
    if !SERVED.contains(&target.as_str()) {
        return;
    }
    let library = PathBuf::from(variable("OUT_DIR")).join("libposh_hook.so");
    let mut rustc = Command::new(variable("RUSTC"));
    rustc
        .arg("--crate-name=posh_hook")
        .arg("--crate-type=cdylib")
        .arg("--edition=2024")
        .arg("--cfg=posh_preload");
    rustc.arg("--target").arg(&target).arg("-o").arg(&library).arg(root.join("lib.rs"));
    if let Ok(linker) = env::var("RUSTC_LINKER") {
        rustc.arg(format!("-Clinker={linker}"));
    }
    // Without unwinding, and not linked to the C library, since every process has one, of any
    // version. Small, with few segments, and a hash table of symbols (measured: 0.04 ms less than
    // with relro and opt-level 3 for every program that loads it).
    rustc.args([
        "-Copt-level=s",
        "-Clto=fat",
        "-Ccodegen-units=1",
        "-Cpanic=abort",
        "-Cstrip=symbols",
    ]);
    rustc.args(["-Ctarget-feature=-crt-static", "-Cforce-unwind-tables=no", "-Crelro-level=off"]);
    // The few symbols of the C library are bound at the start: lazily, the loader would resolve
    // them on the stack of the thread that executes first, and take kilobytes of it.
    let link = [
        "-nostdlib",
        "-Wl,-soname,libposh_hook.so",
        "-Wl,--hash-style=gnu",
        "-Wl,-z,noseparate-code",
        "-Wl,-z,now",
    ];
    for argument in link {
        rustc.arg(format!("-Clink-arg={argument}"));
    }
    let status = rustc.status().expect("rustc starts");
    assert!(status.success(), "the library of the crate `hook` can't be built: {rustc:?} failed");
    let mut digest = DefaultHasher::new();
    digest.write(&fs::read(&library).expect("rustc has written it"));
    println!("cargo::rustc-env=POSH_HOOK_DIGEST={:016x}", digest.finish());
    println!("cargo::rustc-cfg=posh_has_hook");
    println!("cargo::rustc-env=POSH_HOOK_LIBRARY={}", library.display());
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}
