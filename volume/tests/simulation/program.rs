//! A program: one call after the other, by paths, with notes of what each has promised.

use std::{sync::Arc, time::Duration};

use posh_volume::{Errno, store::*};
use tokio::time::sleep;

use crate::{
    chance::Chance,
    gateway::Gateway,
    model::{Doubt, Setting, State, is_break, is_refusal},
    world::{LOGS, REGISTERS, VALUE_BYTES, World, padded},
};

/// Names in each directory, few, so that they meet.
const NAMES: u64 = 4;
/// More than a file may have in memory.
const LARGE: usize = 300_000;

pub struct Program {
    world: Arc<World>,
    machine: usize,
    name: String,
    chance: Chance,
    /// Directories that are certain to be there.
    directories: Vec<String>,
    made: u64,
    steps: u64,
}

impl Program {
    pub fn new(world: Arc<World>, machine: usize, name: String, seed: u64) -> Self {
        let purpose = 100 + u64::from(name.as_bytes()[0]) * 10 + u64::from(name.as_bytes()[1]);
        let mut chance = Chance::new(seed, purpose);
        let steps = 8 + chance.below(30);
        Self { world, machine, directories: vec![name.clone()], name, chance, made: 0, steps }
    }

    pub async fn run(mut self) {
        for step in 0..self.steps {
            let world = Arc::clone(&self.world);
            let gateways = &world.gateways[self.machine];
            let gateway = gateways.when(Option::is_some).await.unwrap();
            let is_dead = async {
                let other = |now: &Option<Arc<Gateway>>| {
                    !now.as_ref().is_some_and(|now| Arc::ptr_eq(now, &gateway))
                };
                gateways.when(other).await;
            };
            tokio::select! {
                biased;
                () = is_dead => self.note(&format!("step {step} dies with its gateway")),
                () = self.step(&gateway, step) => {}
            }
            self.world.forget_refused(&gateway);
            if self.world.weather.gateways_die && self.chance.happens(25) {
                self.world.kill_gateway_soon(self.machine);
            }
            let pause = match self.chance.below(12) {
                0 => self.chance.between(Duration::ZERO, Duration::from_secs(12)),
                1..4 => self.chance.between(Duration::ZERO, Duration::from_millis(300)),
                _ => Duration::ZERO,
            };
            sleep(pause).await;
        }
    }

    fn note(&self, what: &str) {
        self.world.site.log.note(&format!("{}: {what}", self.name));
    }

    fn breaks(&self, what: &str) {
        self.note(&format!("BROKEN {what}"));
        self.world.model.lock().unwrap().breaks(format!("{}: {what}", self.name));
    }

    fn told<T>(&self, call: &str, result: &Result<T, Errno>) {
        match result {
            Ok(_) => self.note(&format!("{call} = 0")),
            Err(errno) if is_break(*errno) || is_refusal(*errno) => {
                self.note(&format!("{call} = {errno:?}"))
            }
            Err(errno) => self.breaks(&format!("{call} = {errno:?}")),
        }
    }

    async fn step(&mut self, gateway: &Gateway, step: u64) {
        match self.chance.below(100) {
            0..30 => self.put(gateway, step).await,
            30..38 => self.make_directory(gateway).await,
            38..46 => self.rename(gateway).await,
            46..53 => self.remove(gateway).await,
            53..63 => self.read(gateway).await,
            63..67 => self.sync_directory(gateway).await,
            67..71 => self.settle(gateway).await,
            71..80 => self.append(gateway, step).await,
            80..86 => self.set_one(gateway, step).await,
            86..92 => self.get_one(gateway).await,
            92..94 => self.watch(gateway).await,
            _ => self.read_of_others(gateway).await,
        }
    }

    fn a_path(&mut self) -> String {
        let directory = self.chance.pick(&self.directories).cloned().unwrap_or_default();
        format!("{directory}/f{}", self.chance.below(NAMES))
    }

    fn a_certain_path(&mut self) -> Option<(String, State)> {
        let path = self.a_path();
        let model = self.world.model.lock().unwrap();
        model.is_certain(&path).then(|| (path.clone(), model.is(&path)))
    }

    fn a_file(&mut self) -> Option<(String, State)> {
        (0..4).find_map(|_| self.a_certain_path().filter(|(_, state)| *state != State::Absent))
    }

    fn begin(&self, call: &str, paths: &[&str], worlds: Vec<Vec<State>>) {
        let paths = paths.iter().map(|path| (*path).to_owned()).collect();
        self.world.model.lock().unwrap().begin(Doubt {
            call: format!("{}: {call}", self.name),
            paths,
            worlds,
        });
    }

    fn end(&self, paths: &[&str], states: Vec<State>) {
        self.world.model.lock().unwrap().end(paths, states);
    }

    /// A file is made, or written anew, in a few pieces.
    async fn put(&mut self, gateway: &Gateway, step: u64) {
        let Some((path, before)) = self.a_certain_path() else { return };
        let length = match self.chance.below(20) {
            0 => LARGE,
            1..4 => 20_000,
            4..7 => 0,
            _ => 30,
        };
        let word = format!("{}-{step} ", self.name);
        let data: Vec<u8> = word.bytes().cycle().take(length).collect();
        let (pieces, syncs) = (1 + self.chance.below(3), self.chance.happens(200));
        let mut worlds = vec![vec![before.clone()], vec![State::PartOf(data.clone())]];
        if before == State::Absent {
            worlds.push(vec![State::Absent]);
        }
        self.begin("put", &[&path], worlds);
        let opened = if before == State::Absent {
            gateway.create(&path).await
        } else {
            gateway.open(&path, OpenFlags::WRITE | OpenFlags::READ | OpenFlags::TRUNCATE).await
        };
        self.told(&format!("open {path} to put {word}of {length}"), &opened);
        let opened = match opened {
            Ok(opened) => opened,
            Err(errno) => {
                if is_refusal(errno) {
                    self.end(&[&path], vec![before]);
                }
                return;
            }
        };
        let mut written = Ok(());
        for piece in 0..pieces {
            let at = |piece: u64| {
                data.len() * usize::try_from(piece).unwrap() / usize::try_from(pieces).unwrap()
            };
            let (from, to) = (at(piece), at(piece + 1));
            if from < to && written.is_ok() {
                written = gateway.write(opened, from as u64, &data[from..to]).await;
                if self.chance.happens(50) {
                    sleep(Duration::from_millis(300)).await;
                }
            }
        }
        self.told(&format!("write {path}"), &written);
        if syncs && written.is_ok() {
            let synced = gateway.volume.sync(opened.number, Synced::Everything).await;
            if synced.is_ok() {
                self.must_be_there(&path, &State::File(data.clone()), "fsync");
            }
            self.told(&format!("fsync {path}"), &synced);
            written = synced;
        }
        let closed = gateway.close(opened).await;
        if written.is_ok() && closed.is_ok() {
            self.end(&[&path], vec![State::File(data)]);
        }
        self.told(&format!("close {path}"), &closed);
    }

    fn must_be_there(&self, path: &str, state: &State, call: &str) {
        let found = self.world.found(path);
        if !state.fits(&found) {
            let (state, found) = (state.shown(), found.shown());
            self.breaks(&format!(
                "after {call} {path} must be {state} on the server, and is {found}"
            ));
        }
    }

    async fn make_directory(&mut self, gateway: &Gateway) {
        let above = self.chance.pick(&self.directories).cloned().unwrap_or_default();
        let path = format!("{above}/d{}", self.made);
        self.made += 1;
        self.begin("mkdir", &[&path], vec![vec![State::Absent], vec![State::Directory]]);
        let made = gateway.make_directory(&path).await;
        match made {
            Ok(()) => {
                self.end(&[&path], vec![State::Directory]);
                self.directories.push(path.clone());
            }
            Err(errno) if is_refusal(errno) => self.end(&[&path], vec![State::Absent]),
            Err(_) => {}
        }
        self.told(&format!("mkdir {path}"), &made);
    }

    async fn rename(&mut self, gateway: &Gateway) {
        let Some((from, moved)) = self.a_file() else { return };
        let Some((to, replaced)) = self.a_certain_path().filter(|(to, _)| *to != from) else {
            return;
        };
        let (after, before) = (vec![State::Absent, moved.clone()], vec![moved, replaced]);
        self.begin("rename", &[&from, &to], vec![before.clone(), after.clone()]);
        let renamed = gateway.rename(&from, &to).await;
        match renamed {
            Ok(()) => self.end(&[&from, &to], after),
            Err(errno) if is_refusal(errno) => self.end(&[&from, &to], before),
            Err(_) => {}
        }
        self.told(&format!("rename {from} {to}"), &renamed);
    }

    async fn remove(&mut self, gateway: &Gateway) {
        let Some((path, before)) = self.a_file() else { return };
        self.begin("unlink", &[&path], vec![vec![before.clone()], vec![State::Absent]]);
        let removed = gateway.remove(&path, Removal::File).await;
        match removed {
            Ok(()) => self.end(&[&path], vec![State::Absent]),
            Err(errno) if is_refusal(errno) => self.end(&[&path], vec![before]),
            Err(_) => {}
        }
        self.told(&format!("unlink {path}"), &removed);
    }

    async fn read(&mut self, gateway: &Gateway) {
        let Some((path, state)) = self.a_certain_path() else { return };
        let read = gateway.read(&path).await;
        self.compare_read(&path, &state, read);
    }

    fn compare_read(&self, path: &str, state: &State, read: Result<Option<Vec<u8>>, Errno>) {
        let read = match (state, read) {
            (State::Absent, Err(Errno::ENOENT)) => Ok(()),
            (State::File(data), Ok(Some(read))) if *data == read => Ok(()),
            (_, Ok(Some(read))) => {
                let read = crate::model::Found::File(read).shown();
                return self
                    .breaks(&format!("read {path} gives {read}, and not {}", state.shown()));
            }
            (_, read) => read.map(drop),
        };
        self.told(&format!("read {path}"), &read);
    }

    /// A file of the other machine, which nobody is about to change.
    async fn read_of_others(&mut self, gateway: &Gateway) {
        let world = Arc::clone(&self.world);
        if !world.weather.is_calm() {
            return;
        }
        let stable = |path: &String| world.model.lock().unwrap().is_certain(path);
        let paths: Vec<String> = {
            let model = world.model.lock().unwrap();
            let is_file = |(path, state): (&String, &State)| {
                (!path.starts_with(&self.name) && *state != State::Directory).then(|| path.clone())
            };
            model.known.iter().filter_map(is_file).collect()
        };
        let Some(path) = self.chance.pick(&paths).cloned().filter(stable) else { return };
        let before = world.model.lock().unwrap().is(&path);
        let began = world.model.lock().unwrap().step;
        let read = gateway.read(&path).await;
        let is_same = stable(&path) && world.model.lock().unwrap().is(&path) == before;
        self.note(&format!("read of others {path} {began}"));
        if is_same {
            self.compare_read(&path, &before, read);
        }
    }

    async fn sync_directory(&mut self, gateway: &Gateway) {
        let Some(directory) = self.chance.pick(&self.directories).cloned() else { return };
        let synced = gateway.sync_directory(&directory).await;
        if synced.is_ok() {
            for number in 0..NAMES {
                let path = format!("{directory}/f{number}");
                let known = {
                    let model = self.world.model.lock().unwrap();
                    model.is_certain(&path).then(|| model.is(&path))
                };
                if let Some(state) = known {
                    self.must_be_there(&path, &state, "fsync of the directory");
                }
            }
        }
        self.told(&format!("fsync {directory}"), &synced);
    }

    /// Flushes the volume, as the gateway does before a command runs on the server.
    async fn settle(&mut self, gateway: &Gateway) {
        let its = ["a", "b"][self.machine];
        let certain = |world: &World| {
            let model = world.model.lock().unwrap();
            let known = model
                .known
                .iter()
                .filter(|(path, _)| path.starts_with(its) && model.is_certain(path));
            known.map(|(path, state)| (path.clone(), state.clone())).collect::<Vec<_>>()
        };
        let before = certain(&self.world);
        let settled = gateway.volume.settle().await;
        if settled.is_ok() {
            let after = certain(&self.world);
            for (path, state) in before.iter().filter(|known| after.contains(known)) {
                self.must_be_there(path, state, "settle");
            }
        }
        self.told("settle", &settled);
    }

    async fn append(&mut self, gateway: &Gateway, step: u64) {
        let Some(log) = self.chance.pick(&LOGS).copied() else { return };
        let record = format!("{}-{step} was here", self.name);
        let promise = |least, most| {
            let mut model = self.world.model.lock().unwrap();
            model.logs.get_mut(log).unwrap().insert(record.clone(), (least, most));
        };
        promise(0, 1);
        let appended = async {
            let opened = gateway
                .open(log, OpenFlags::WRITE | OpenFlags::APPEND)
                .await
                .inspect_err(|_| promise(0, 0))?;
            let size = gateway.size(log).await;
            let written = match size {
                Ok(size) => gateway.append(opened, size, format!("{record}\n").as_bytes()).await,
                Err(errno) => Err(errno),
            };
            if written.is_err_and(is_refusal) || size.is_err() {
                promise(0, 0);
            }
            written.and(gateway.close(opened).await)
        };
        let appended = appended.await;
        if appended.is_ok() {
            promise(1, 1);
        }
        self.told(&format!("append {record:?} to {log}"), &appended);
    }

    async fn set_one(&mut self, gateway: &Gateway, step: u64) {
        if let Some(register) = self.chance.pick(&REGISTERS).copied() {
            self.set(gateway, register, step).await;
        }
    }

    /// A register gets another value, by one write.
    pub async fn set(&mut self, gateway: &Gateway, register: &str, step: u64) {
        let value = format!("{}-{step}", self.name);
        {
            let mut model = self.world.model.lock().unwrap();
            let began = model.tick();
            let setting = Setting { value: value.clone(), began, ended: None };
            model.registers.get_mut(register).unwrap().push(setting);
        }
        let set = async {
            let opened = gateway.open(register, OpenFlags::WRITE).await?;
            let written = gateway.write(opened, 0, padded(&value).as_bytes()).await;
            written.and(gateway.close(opened).await)
        };
        let set = set.await;
        if set.is_ok() {
            let mut model = self.world.model.lock().unwrap();
            let ended = Some(model.tick());
            let settings = model.registers.get_mut(register).unwrap();
            settings
                .iter_mut()
                .filter(|setting| setting.value == value)
                .for_each(|setting| setting.ended = ended);
        }
        self.told(&format!("set {register} to {value}"), &set);
    }

    /// Reads one register again and again.
    async fn watch(&mut self, gateway: &Gateway) {
        let Some(register) = self.chance.pick(&REGISTERS).copied() else { return };
        for _ in 0..10 {
            self.get(gateway, register).await;
            let pause = self.chance.between(Duration::ZERO, Duration::from_millis(1500));
            sleep(pause).await;
        }
    }

    async fn get_one(&mut self, gateway: &Gateway) {
        if let Some(register) = self.chance.pick(&REGISTERS).copied() {
            self.get(gateway, register).await;
        }
    }

    pub async fn get(&mut self, gateway: &Gateway, register: &str) {
        let began = self.world.model.lock().unwrap().tick();
        let read = gateway.read(register).await;
        self.told(&format!("get {register} = {:?}", read.as_ref().ok().and_then(shown)), &read);
        if let Ok(Some(read)) = read {
            let value =
                String::from_utf8_lossy(&read[..read.len().min(VALUE_BYTES)]).trim_end().to_owned();
            self.world.model.lock().unwrap().check_register(&self.name, register, began, &value);
        }
    }
}

fn shown(read: &Option<Vec<u8>>) -> Option<String> {
    read.as_ref().map(|read| String::from_utf8_lossy(read).trim_end().to_owned())
}
