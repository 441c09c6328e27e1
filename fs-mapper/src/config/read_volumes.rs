//! The `[[volume]]` entries of the file.

use super::{ConfigReader, Section, address_of};
use crate::config::mistake::Position;
use crate::config::{ExecutorConfig, VolumeConfig, value};
use crate::path::ExecutorName;
use std::collections::HashMap;
use std::path::PathBuf;
use toml::de::{DeTable, DeValue};

const VOLUME_KEYS: [&str; 7] =
    ["path", "executor", "export", "read_only", "cache_size", "sync", "hard"];

impl ConfigReader<'_> {
    /// `seen` has the mount paths in use, with their offsets.
    pub(super) fn volumes(
        &mut self,
        document: &DeTable<'_>,
        executors: &[ExecutorConfig],
        seen: &mut HashMap<PathBuf, usize>,
    ) -> Vec<VolumeConfig> {
        let mut volumes = Vec::new();
        for section in self.sections(document, "volume", "[[volume]]") {
            self.unknown_keys(section, &VOLUME_KEYS);
            let path = self.required(section, "path").and_then(|path| self.mount_path(path, seen));
            let executor = self.required(section, "executor");
            let address = executor.as_ref().and_then(|name| address_of(executors, name.value));
            let export =
                self.required(section, "export").and_then(|export| self.export(export, address));
            let cache_bytes = self.cache_size(section);
            let [read_only, sync, hard] =
                ["read_only", "sync", "hard"].map(|key| self.choice(section, key, false));
            if let (Some(path), Some(executor), Some(export)) = (path, executor, export) {
                let executor = ExecutorName::new(executor.value);
                let position = Position::of(self.text, section.start);
                volumes.push(VolumeConfig {
                    path,
                    executor,
                    export,
                    read_only,
                    cache_bytes,
                    sync,
                    hard,
                    position,
                });
            }
        }
        volumes
    }

    fn cache_size(&mut self, section: Section<'_>) -> u64 {
        let text = self.optional(section, "cache_size");
        match text.map(|text| (value::size(text.value), text)) {
            Some((Ok(bytes), _)) => bytes,
            Some((Err((what, hint)), text)) => {
                self.mistake(text.span, format!("cache_size {:?} {what}", text.value), hint);
                VolumeConfig::DEFAULT_CACHE_BYTES
            }
            None => VolumeConfig::DEFAULT_CACHE_BYTES,
        }
    }

    pub(super) fn choice(&mut self, section: Section<'_>, key: &'static str, unsaid: bool) -> bool {
        let Some(value) = section.table.get(key) else { return unsaid };
        if let DeValue::Boolean(choice) = value.get_ref() {
            return *choice;
        }
        self.wrong_type(section, key, value, "true or false");
        unsaid
    }
}
