//! Parses TOML with spans into a [`Config`] and collects mistakes: a mistake in one entry never
//! hides those of the next.

use super::mistake::{ConfigErrors, Mistake, Position};
use super::near::closest;
use super::value::{export_name, normal_path, server_directory};
use super::{
    Address, Config, ConfigScope, ExecutorConfig, ExecutorOrigin, GatewayConfig, MountConfig,
    Scheduler, VolumeConfig,
};
use crate::coherence::Adapter;
use crate::path::ExecutorName;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

#[path = "read_directory.rs"]
mod directory;
#[path = "read_volumes.rs"]
mod volumes;

const TOP_KEYS: [&str; 4] = ["executor", "mount", "volume", "gateway"];
const EXECUTOR_KEYS: [&str; 3] = ["name", "address", "takes_input"];
const MOUNT_KEYS: [&str; 5] = ["path", "executor", "export", "sub_path", "coherence"];
const GATEWAY_KEYS: [&str; 6] =
    ["split", "scheduler", "idle_timeout_s", "annotations", "ssh_command", "sshfs"];

/// Upper bound of parts per machine, to catch typing errors.
const MAX_SPLIT: u64 = 1024;

/// Validates a text; `file` is its name in messages.
pub(super) fn read(text: &str, file: &Path, scope: ConfigScope) -> Result<Config, ConfigErrors> {
    let (document, syntax) = DeTable::parse_recoverable(text);
    let mut reader = ConfigReader { text, file, mistakes: Vec::new(), broken: !syntax.is_empty() };
    for error in &syntax {
        reader.mistake(
            error.span().unwrap_or(0..0),
            format!("not valid TOML: {}", one_line(error.message())),
            "",
        );
    }
    if scope == ConfigScope::Directory {
        reader.forbidden_in_directories(document.get_ref());
    }
    let config = reader.document(document.get_ref());
    reader.finish(config)
}

/// A table of the file, with its name for messages.
#[derive(Clone, Copy)]
struct Section<'t> {
    what: &'static str,
    table: &'t DeTable<'t>,
    start: usize,
}

/// A string of the file, with its span.
struct SpannedText<'t> {
    value: &'t str,
    span: Range<usize>,
}

struct ConfigReader<'a> {
    text: &'a str,
    file: &'a Path,
    /// Mistakes with the offset that they are sorted by.
    mistakes: Vec<(usize, Mistake)>,
    /// The text is not valid TOML: don't report missing keys, as they may only be unreadable.
    broken: bool,
}

impl ConfigReader<'_> {
    fn finish(mut self, config: Config) -> Result<Config, ConfigErrors> {
        if self.mistakes.is_empty() {
            return Ok(config);
        }
        self.mistakes.sort_by_key(|(offset, _)| *offset);
        Err(ConfigErrors {
            mistakes: self.mistakes.into_iter().map(|(_, mistake)| mistake).collect(),
        })
    }

    fn mistake(&mut self, span: Range<usize>, message: impl Into<String>, hint: impl Into<String>) {
        let position = Some(Position::of(self.text, span.start));
        let mistake = Mistake {
            file: self.file.to_path_buf(),
            position,
            message: message.into(),
            hint: hint.into(),
        };
        self.mistakes.push((span.start, mistake));
    }

    fn document(&mut self, table: &DeTable<'_>) -> Config {
        self.unknown_keys(Section { what: "the file", table, start: 0 }, &TOP_KEYS);
        let executors = self.executors(table);
        let mut seen = HashMap::new();
        let mut mounts = self.mounts(table, &executors, &mut seen);
        let volumes = self.volumes(table, &executors, &mut seen);
        mounts.extend(volumes.iter().map(VolumeConfig::mount));
        let gateway = self.gateway(table);
        Config { file: self.file.to_path_buf(), executors, mounts, volumes, gateway }
    }

    fn executors(&mut self, document: &DeTable<'_>) -> Vec<ExecutorConfig> {
        let mut seen: HashMap<String, usize> = HashMap::new();
        let mut executors = Vec::new();
        for section in self.sections(document, "executor", "[[executor]]") {
            self.unknown_keys(section, &EXECUTOR_KEYS);
            let name =
                self.required(section, "name").and_then(|name| self.executor_name(name, &mut seen));
            let address =
                self.required(section, "address").and_then(|address| self.address(address));
            let takes_input = self.choice(section, "takes_input", true);
            if let (Some(name), Some(address)) = (name, address) {
                executors.push(ExecutorConfig {
                    name,
                    address,
                    takes_input,
                    origin: ExecutorOrigin::Configured,
                });
            } else if let Some(DeValue::String(name)) =
                section.table.get("name").map(Spanned::get_ref)
            {
                // Don't report mounts that name it because its address is wrong.
                seen.entry(name.to_string()).or_insert(section.start);
            }
        }
        self.known_executors(&seen, document);
        executors
    }

    fn executor_name(
        &mut self,
        name: SpannedText<'_>,
        seen: &mut HashMap<String, usize>,
    ) -> Option<ExecutorName> {
        if name.value.is_empty()
            || name.value.contains(|c: char| c.is_whitespace() || c.is_control())
        {
            let message = format!("{:?} is not a name for an executor", name.value);
            self.mistake(name.span, message, "a name is not empty and has no blanks");
            return None;
        }
        if let Some(first) = seen.insert(name.value.to_owned(), name.span.start) {
            let message = format!(
                "executor `{}` is already defined in line {}",
                name.value,
                self.line(first)
            );
            self.mistake(name.span, message, "every executor needs its own name");
            return None;
        }
        Some(ExecutorName::new(name.value))
    }

    fn address(&mut self, address: SpannedText<'_>) -> Option<Address> {
        match Address::parse(address.value) {
            Ok(address) => Some(address),
            Err(fault) => {
                self.mistake(address.span, format!("{fault}: {:?}", address.value), fault.hint());
                None
            }
        }
    }

    /// Every `executor` of a mount must be one of `seen`.
    fn known_executors(&mut self, seen: &HashMap<String, usize>, document: &DeTable<'_>) {
        if self.broken {
            return;
        }
        for table in tables(document, "mount").chain(tables(document, "volume")) {
            let Some(value) = table.get("executor") else { continue };
            let DeValue::String(name) = value.get_ref() else { continue };
            if !seen.contains_key(name.as_ref()) {
                let mut known: Vec<&str> = seen.keys().map(String::as_str).collect();
                known.sort_unstable();
                let hint = match closest(name, &known) {
                    Some(near) => format!("did you mean `{near}`?"),
                    None => String::from("add an [[executor]] of that name"),
                };
                self.mistake(value.span(), format!("no executor is named `{name}`"), hint);
            }
        }
    }

    /// `seen` has the mount paths in use, with their offsets.
    fn mounts(
        &mut self,
        document: &DeTable<'_>,
        executors: &[ExecutorConfig],
        seen: &mut HashMap<PathBuf, usize>,
    ) -> Vec<MountConfig> {
        let mut mounts = Vec::new();
        for section in self.sections(document, "mount", "[[mount]]") {
            self.unknown_keys(section, &MOUNT_KEYS);
            let path = self.required(section, "path").and_then(|path| self.mount_path(path, seen));
            let executor = self.required(section, "executor");
            let address = executor.as_ref().and_then(|name| address_of(executors, name.value));
            let export =
                self.required(section, "export").and_then(|export| self.export(export, address));
            let sub_path =
                self.optional(section, "sub_path").and_then(|sub_path| self.sub_path(sub_path));
            let coherence =
                self.optional(section, "coherence").and_then(|name| self.coherence(name));
            if let (Some(path), Some(executor), Some(export)) = (path, executor, export) {
                let executor = ExecutorName::new(executor.value);
                let position = Position::of(self.text, section.start);
                let sub_path = sub_path.unwrap_or_default();
                let shows_changes = false;
                mounts.push(MountConfig {
                    path,
                    executor,
                    export,
                    sub_path,
                    coherence,
                    shows_changes,
                    position,
                });
            }
        }
        mounts
    }

    fn mount_path(
        &mut self,
        path: SpannedText<'_>,
        seen: &mut HashMap<PathBuf, usize>,
    ) -> Option<PathBuf> {
        let normal = match normal_path(path.value) {
            Ok(normal) => normal,
            Err((message, hint)) => {
                self.mistake(path.span, format!("mount path {:?} {message}", path.value), hint);
                return None;
            }
        };
        if let Some(first) = seen.insert(normal.clone(), path.span.start) {
            let line = self.line(first);
            let message =
                format!("mount path `{}` is already given in line {line}", normal.display());
            self.mistake(path.span, message, "a path has one owner: remove one of the two");
            return None;
        }
        Some(normal)
    }

    /// Validates an export: a name that the executor gives, or, over ssh, a directory that we name.
    /// If the executor itself is a mistake, accepts either.
    fn export(&mut self, export: SpannedText<'_>, address: Option<&Address>) -> Option<String> {
        let checked = match address {
            Some(Address::Ssh(_)) => server_directory(export.value),
            Some(Address::Http { .. } | Address::Tls(_)) => export_name(export.value),
            None => export_name(export.value)
                .or_else(|mistake| server_directory(export.value).or(Err(mistake))),
        };
        match checked {
            Ok(export) => Some(export),
            Err((message, hint)) => {
                self.mistake(export.span, format!("{:?} {message}", export.value), hint);
                None
            }
        }
    }

    fn sub_path(&mut self, sub_path: SpannedText<'_>) -> Option<PathBuf> {
        let normal: Option<PathBuf> = Path::new(sub_path.value)
            .components()
            .filter(|part| *part != Component::CurDir)
            .map(|part| matches!(part, Component::Normal(_)).then_some(part.as_os_str()))
            .collect();
        if normal.is_none() || sub_path.value.contains('\0') {
            let message = format!("sub_path {:?} leaves the export", sub_path.value);
            self.mistake(
                sub_path.span,
                message,
                "give a path below the export, without a leading / and without ..",
            );
            return None;
        }
        normal
    }

    fn coherence(&mut self, name: SpannedText<'_>) -> Option<Adapter> {
        let adapter = Adapter::ALL.into_iter().find(|adapter| adapter.name() == name.value);
        if adapter.is_none() {
            let known = Adapter::ALL.map(Adapter::name).join(", ");
            self.mistake(
                name.span,
                format!("unknown coherence {:?}", name.value),
                format!("it is one of {known}"),
            );
        }
        adapter
    }

    fn gateway(&mut self, document: &DeTable<'_>) -> GatewayConfig {
        let mut gateway = GatewayConfig::default();
        let Some(value) = document.get("gateway") else { return gateway };
        let DeValue::Table(table) = value.get_ref() else {
            self.mistake(
                value.span(),
                "`gateway` is not a table",
                "write [gateway] on a line of its own",
            );
            return gateway;
        };
        let section = Section { what: "[gateway]", table, start: value.span().start };
        self.unknown_keys(section, &GATEWAY_KEYS);
        if let Some(split) = self.number(section, "split", 1..=MAX_SPLIT) {
            gateway.split = u32::try_from(split).expect("the range fits");
        }
        if let Some(idle) = self.number(section, "idle_timeout_s", 1..=u64::from(u32::MAX)) {
            gateway.idle_timeout_s = idle;
        }
        match self.optional(section, "scheduler") {
            Some(name) if !["cost", "greedy"].contains(&name.value) => {
                let message = format!("unknown scheduler {:?}", name.value);
                self.mistake(name.span, message, "it is \"cost\" or \"greedy\"");
            }
            Some(name) if name.value == "greedy" => gateway.scheduler = Scheduler::Greedy,
            _ => gateway.scheduler = Scheduler::Cost,
        }
        gateway.annotations = self.annotations(section);
        if let Some(words) =
            self.optional(section, "ssh_command").and_then(|command| self.words(command))
        {
            gateway.ssh_command = words;
        }
        match self.optional(section, "sshfs") {
            Some(choice) if !["auto", "off"].contains(&choice.value) => {
                let message = format!("unknown choice {:?} for sshfs", choice.value);
                self.mistake(choice.span, message, "it is \"auto\" or \"off\"");
            }
            choice => gateway.sshfs = choice.is_none_or(|choice| choice.value == "auto"),
        }
        gateway
    }

    /// Splits a command as a shell does, with quoting but without expansions.
    fn words(&mut self, command: SpannedText<'_>) -> Option<Vec<String>> {
        let words = shlex::split(command.value)
            .filter(|words| words.first().is_some_and(|word| !word.is_empty()));
        if words.is_none() {
            let message = format!("{:?} is not a command", command.value);
            self.mistake(
                command.span,
                message,
                "write a program and its arguments, such as \"ssh -F /etc/posh/ssh\"",
            );
        }
        words
    }

    fn annotations(&mut self, section: Section<'_>) -> Vec<PathBuf> {
        let Some(value) = section.table.get("annotations") else { return Vec::new() };
        let DeValue::Array(items) = value.get_ref() else {
            self.wrong_type(section, "annotations", value, "an array of directories");
            return Vec::new();
        };
        let base = self.file.parent().unwrap_or(Path::new(""));
        let mut dirs = Vec::new();
        for item in items.iter() {
            match item.get_ref() {
                DeValue::String(dir) if dir.starts_with('~') => {
                    self.mistake(
                        item.span(),
                        format!("directory {dir:?} begins with ~"),
                        "write it in full",
                    );
                }
                DeValue::String(dir) if !dir.is_empty() => dirs.push(base.join(dir.as_ref())),
                _ => self.wrong_type(section, "annotations", item, "an array of directories"),
            }
        }
        dirs
    }

    /// The tables of `[[key]]`.
    fn sections<'t>(
        &mut self,
        document: &'t DeTable<'t>,
        key: &str,
        what: &'static str,
    ) -> Vec<Section<'t>> {
        let Some(value) = document.get(key) else { return Vec::new() };
        let DeValue::Array(items) = value.get_ref() else {
            let message = format!("`{key}` is not a list of tables");
            self.mistake(value.span(), message, format!("write {what}, with two brackets"));
            return Vec::new();
        };
        let mut sections = Vec::new();
        for item in items.iter() {
            match item.get_ref() {
                DeValue::Table(table) => {
                    sections.push(Section { what, table, start: item.span().start })
                }
                other => {
                    let message = format!("an entry of `{key}` is {}, not a table", article(other));
                    self.mistake(item.span(), message, format!("write {what}"));
                }
            }
        }
        sections
    }

    fn unknown_keys(&mut self, section: Section<'_>, known: &[&str]) {
        for key in section.table.keys() {
            let name = key.get_ref().as_ref();
            if known.contains(&name) {
                continue;
            }
            let hint = match closest(name, known) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("known are {}", known.join(", ")),
            };
            self.mistake(key.span(), format!("unknown key `{name}` in {}", section.what), hint);
        }
    }

    fn optional<'t>(&mut self, section: Section<'t>, key: &'static str) -> Option<SpannedText<'t>> {
        let value = section.table.get(key)?;
        match value.get_ref() {
            DeValue::String(text) => Some(SpannedText { value: text.as_ref(), span: value.span() }),
            _ => {
                self.wrong_type(section, key, value, "a string");
                None
            }
        }
    }

    fn required<'t>(&mut self, section: Section<'t>, key: &'static str) -> Option<SpannedText<'t>> {
        if !section.table.contains_key(key) && !self.broken {
            let message = format!("{} has no `{key}`", section.what);
            self.mistake(section.start..section.start, message, format!("add {key} = \"...\""));
        }
        self.optional(section, key)
    }

    fn number(
        &mut self,
        section: Section<'_>,
        key: &str,
        range: std::ops::RangeInclusive<u64>,
    ) -> Option<u64> {
        let value = section.table.get(key)?;
        let number = match value.get_ref() {
            DeValue::Integer(number) => u64::from_str_radix(number.as_str(), number.radix()).ok(),
            _ => None,
        };
        let number = number.filter(|number| range.contains(number));
        if number.is_none() {
            self.wrong_type(
                section,
                key,
                value,
                &format!("a number from {} to {}", range.start(), range.end()),
            );
        }
        number
    }

    fn wrong_type(
        &mut self,
        section: Section<'_>,
        key: &str,
        value: &Spanned<DeValue<'_>>,
        wanted: &str,
    ) {
        let found = article(value.get_ref());
        let message = match value.get_ref() {
            DeValue::Integer(number) => format!("`{key}` in {} is {number}", section.what),
            _ => format!("`{key}` in {} is {found}", section.what),
        };
        self.mistake(value.span(), message, format!("it must be {wanted}"));
    }

    fn line(&self, offset: usize) -> usize {
        Position::of(self.text, offset).line
    }
}

/// Tables of an array of tables; `sections` reports other values.
fn tables<'t>(document: &'t DeTable<'t>, key: &str) -> impl Iterator<Item = &'t DeTable<'t>> {
    let items = match document.get(key).map(Spanned::get_ref) {
        Some(DeValue::Array(items)) => items.iter().as_slice(),
        _ => &[],
    };
    items.iter().filter_map(|item| item.get_ref().as_table())
}

fn address_of<'e>(executors: &'e [ExecutorConfig], name: &str) -> Option<&'e Address> {
    executors
        .iter()
        .find(|executor| executor.name.as_str() == name)
        .map(|executor| &executor.address)
}

fn article(value: &DeValue<'_>) -> String {
    let name = value.type_str();
    let an = if name.starts_with(['a', 'i']) { "an" } else { "a" };
    format!("{an} {name}")
}

fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
#[path = "read_tests.rs"]
mod tests;
