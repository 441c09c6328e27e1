//! docs/configuration.md says what the parser does.

use fs_mapper::config::{Config, GatewayConfig, VolumeConfig};
use std::path::Path;

const TEXT: &str = include_str!("../../docs/configuration.md");

/// The fenced blocks of one language between two headings.
fn blocks(language: &str, from: &str, to: &str) -> Vec<String> {
    let start = TEXT.find(&format!("\n## {from}\n")).expect("the heading");
    let end = TEXT.find(&format!("\n## {to}\n")).expect("the next heading");
    let fence = format!("\n```{language}\n");
    TEXT[start..end]
        .split(&fence)
        .skip(1)
        .map(|rest| rest.split("\n```\n").next().expect("an end").to_owned())
        .collect()
}

#[test]
fn the_examples_are_valid() {
    let parse =
        |text: &str| Config::parse(text, Path::new("/etc/posh/mounts.toml")).expect("no mistake");
    let [listening, volume] = &blocks("toml", "mounts.toml", "Over ssh")[..] else {
        panic!("two examples")
    };
    let config = parse(listening);
    assert_eq!(config.mounts.len(), 2);
    assert_eq!(config.gateway.annotations, [Path::new("/etc/posh/commands")]);
    let volumes = parse(volume).volumes;
    assert_eq!((volumes.len(), volumes[0].cache_bytes), (1, 512 << 20));
    let [through_ssh] = &blocks("toml", "Over ssh", "Which paths a mount owns")[..] else {
        panic!("one example")
    };
    assert!(parse(through_ssh).executors[0].address.is_ssh());
}

#[test]
fn the_mistakes_are_reported_as_shown() {
    let blocks = blocks("text", "Mistakes", "executor.toml");
    let [file, messages] = blocks.as_slice() else { panic!("a file and its messages") };
    let errors = Config::parse(file, Path::new("mounts.toml")).expect_err("mistakes");
    assert_eq!(errors.to_string(), *messages);
}

#[test]
fn the_defaults_are_those_shown() {
    let defaults = GatewayConfig::default();
    assert!(
        TEXT.contains(&format!("| `ssh_command` | `\"{}\"` |", defaults.ssh_command.join(" ")))
    );
    assert!(defaults.sshfs && TEXT.contains("| `sshfs` | `\"auto\"` |"));
    let cache = format!("| `cache_size` | `\"{}G\"` |", VolumeConfig::DEFAULT_CACHE_BYTES >> 30);
    assert!(TEXT.contains(&cache), "{cache}");
    for (key, value) in
        [("split", u64::from(defaults.split)), ("idle_timeout_s", defaults.idle_timeout_s)]
    {
        assert!(TEXT.contains(&format!("| `{key}` | `{value}` |")), "{key} = {value}");
    }
}

#[test]
fn the_file_in_the_repository_is_valid() {
    let text = include_str!("../../mounts.toml");
    Config::parse(text, Path::new("mounts.toml")).expect("no mistake");
    // With its comment signs taken away, too.
    let whole = text.replace("# [", "[").replace("# name", "name").replace("# address", "address");
    let whole = whole
        .replace("# path", "path")
        .replace("# executor", "executor")
        .replace("# export", "export");
    let config = Config::parse(&whole, Path::new("mounts.toml")).expect("no mistake");
    assert_eq!((config.executors.len(), config.mounts.len(), config.volumes.len()), (1, 2, 1));
}
