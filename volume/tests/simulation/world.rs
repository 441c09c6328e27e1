//! One run: two machines with programs on one server, what goes wrong meanwhile, and the comparison
//! with the model when all is well again.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};

use posh_volume::{Errno, recovery::Recovery};
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};

use crate::{
    chance::Chance,
    gateway::{Gateway, Machine},
    model::{Found, Model, Setting, State},
    program::Program,
    server::{Fault, Log, Site, all_below},
    shared::Shared,
};

pub const LOGS: [&str; 2] = ["shared/log0", "shared/log1"];
pub const REGISTERS: [&str; 2] = ["shared/register0", "shared/register1"];
/// Initial contents of a register.
const INITIAL: &str = "initial";
/// Longer than a value.
pub const VALUE_BYTES: usize = 16;
/// A run that has not ended in this (simulated) time hangs.
const LONGEST_RUN: Duration = Duration::from_secs(7200);
/// By the machine's clock: simulated time stands still as long as tasks wake one another. A run
/// takes some 15 ms.
const LONGEST_REAL_RUN: Duration = Duration::from_secs(120);
/// Time in which all gateways deliver their data: a refused file is retried within a minute, an
/// unreachable server within seconds.
const LONGEST_SETTLING: Duration = Duration::from_secs(300);

/// Faults of a run.
#[derive(Debug, Clone, Copy)]
pub struct Weather {
    pub cuts: bool,
    pub server_dies: bool,
    pub gateways_die: bool,
    pub disk_fills: bool,
}

impl Weather {
    fn of(chance: &mut Chance) -> Self {
        if chance.happens(300) {
            return Self {
                cuts: false,
                server_dies: false,
                gateways_die: false,
                disk_fills: false,
            };
        }
        Self {
            cuts: chance.happens(700),
            server_dies: chance.happens(400),
            gateways_die: chance.happens(600),
            disk_fills: chance.happens(400),
        }
    }

    /// Returns true for a run without faults, in which each machine sees the other's closed files:
    /// no machine is unreachable for so long that its leases expire.
    pub fn is_calm(self) -> bool {
        !(self.cuts || self.server_dies || self.gateways_die || self.disk_fills)
    }
}

pub struct World {
    pub site: Arc<Site>,
    pub weather: Weather,
    pub model: Mutex<Model>,
    pub gateways: Vec<Shared<Option<Arc<Gateway>>>>,
    machines: Vec<Machine>,
    chance: Mutex<Chance>,
    is_over: AtomicBool,
    _top: TempDir,
}

/// Result of a run.
pub struct Outcome {
    pub broken: Vec<String>,
    pub log: Vec<String>,
}

pub fn run(seed: u64, fault: Option<Fault>) -> Outcome {
    let _watched = ends_in_time(seed);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let world = World::new(seed, fault);
        let ended = timeout(LONGEST_RUN, Arc::clone(&world).live(seed)).await;
        let mut broken = std::mem::take(&mut world.model.lock().unwrap().broken);
        if ended.is_err() {
            broken.push("it hangs".to_owned());
        }
        Outcome { broken, log: world.site.log.lines() }
    })
}

/// Ends the process if what is returned is not dropped in time.
fn ends_in_time(seed: u64) -> mpsc::Sender<()> {
    let (watched, has_ended) = mpsc::channel();
    std::thread::spawn(move || {
        if has_ended.recv_timeout(LONGEST_REAL_RUN) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("seed {seed} breaks:\nit goes round in a circle, and no time passes");
            std::process::exit(1);
        }
    });
    watched
}

impl World {
    fn new(seed: u64, fault: Option<Fault>) -> Arc<Self> {
        let memory = Path::new("/dev/shm");
        let top = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }
            .unwrap();
        let export = top.path().join("export");
        std::fs::create_dir_all(export.join("shared")).unwrap();
        LOGS.iter().for_each(|log| std::fs::write(export.join(log), "").unwrap());
        REGISTERS
            .iter()
            .for_each(|register| std::fs::write(export.join(register), padded(INITIAL)).unwrap());
        let mut chance = Chance::new(seed, 1);
        let weather = Weather::of(&mut chance);
        let count = if chance.happens(700) { 2 } else { 1 };
        let site = Site {
            export,
            fault,
            full: AtomicU64::new(0),
            is_rough: AtomicBool::new(weather.cuts),
            server: Mutex::new(None),
            log: Log::new(),
        };
        let machines = (0..count)
            .map(|number| Machine {
                number,
                top: top.path().to_owned(),
                processes: AtomicU64::new(0),
                seed,
            })
            .collect();
        let model = Model {
            logs: LOGS.iter().map(|log| ((*log).to_owned(), BTreeMap::new())).collect(),
            registers: REGISTERS
                .iter()
                .map(|register| {
                    let initial = Setting { value: INITIAL.to_owned(), began: 0, ended: Some(0) };
                    ((*register).to_owned(), vec![initial])
                })
                .collect(),
            ..Model::default()
        };
        Arc::new(Self {
            site: Arc::new(site),
            weather,
            model: Mutex::new(model),
            gateways: (0..count).map(|_| Shared::new(None)).collect(),
            machines,
            chance: Mutex::new(chance),
            is_over: AtomicBool::new(false),
            _top: top,
        })
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.site.export.join(path)
    }

    /// Returns the server's state of a path.
    pub fn found(&self, path: &str) -> Found {
        let path = self.path(path);
        match path.symlink_metadata() {
            Err(_) => Found::Absent,
            Ok(found) if found.is_dir() => Found::Directory,
            Ok(_) => Found::File(std::fs::read(path).unwrap_or_default()),
        }
    }

    async fn live(self: Arc<Self>, seed: u64) {
        self.site.log.note(&format!(
            "seed {seed}: {:?}, {} machines",
            self.weather,
            self.machines.len()
        ));
        let mut programs = Vec::new();
        for machine in 0..self.machines.len() {
            let count = 1 + self.chance.lock().unwrap().below(2);
            for number in 0..count {
                let name = format!("{}{number}", ["a", "b"][machine]);
                std::fs::create_dir(self.path(&name)).unwrap();
                self.model.lock().unwrap().known.insert(name.clone(), State::Directory);
                programs.push(Program::new(Arc::clone(&self), machine, name, seed));
            }
        }
        self.site.start_server(std::collections::BTreeSet::new());
        for (machine, gateway) in self.machines.iter().zip(&self.gateways) {
            gateway.set(Some(Arc::new(machine.start(&self.site, None).await)));
        }
        let trouble = tokio::spawn(Arc::clone(&self).make_trouble());
        let programs: Vec<_> =
            programs.into_iter().map(|program| tokio::spawn(program.run())).collect();
        for program in programs {
            program.await.unwrap();
        }
        self.is_over.store(true, Ordering::Relaxed);
        trouble.await.unwrap();
        self.settle_and_compare("at the end").await;
        for machine in 0..self.machines.len() {
            self.kill_gateway(machine, Duration::ZERO);
        }
        self.settle_and_compare("after another start").await;
    }

    /// The gateway dies; another one starts after a time.
    pub fn kill_gateway(self: &Arc<Self>, machine: usize, pause: Duration) {
        let Some(gateway) = self.gateways[machine].set(None) else { return };
        self.site.log.note(&format!("the gateway of machine {machine} is killed"));
        let journal = gateway.kill();
        let world = Arc::clone(self);
        tokio::spawn(async move {
            sleep(pause).await;
            let gateway = world.machines[machine].start(&world.site, Some(&journal)).await;
            world.gateways[machine].set(Some(Arc::new(gateway)));
        });
    }

    pub fn kill_gateway_soon(self: &Arc<Self>, machine: usize) {
        let pause = self.chance.lock().unwrap().between(Duration::ZERO, Duration::from_secs(12));
        self.kill_gateway(machine, pause);
    }

    fn kill_server(self: &Arc<Self>, pause: Duration) {
        let former = self.site.kill_server();
        let world = Arc::clone(self);
        tokio::spawn(async move {
            sleep(pause).await;
            world.site.start_server(former);
        });
    }

    async fn make_trouble(self: Arc<Self>) {
        while !self.is_over.load(Ordering::Relaxed) && !self.weather.is_calm() {
            let (pause, what, machine, time) = {
                let mut chance = self.chance.lock().unwrap();
                let longest = if chance.happens(150) { 50_000 } else { 4_000 };
                let time =
                    chance.between(Duration::from_millis(10), Duration::from_millis(longest));
                let pause = chance.between(Duration::from_millis(10), Duration::from_secs(5));
                let machine = usize::try_from(chance.below(self.machines.len() as u64)).unwrap();
                (pause, chance.below(6), machine, time)
            };
            sleep(pause).await;
            let gateway = self.gateways[machine].get();
            let weather = self.weather;
            match (what, gateway) {
                (0, Some(gateway)) if weather.cuts => gateway.link.cut(time),
                (1, Some(gateway)) if weather.cuts => gateway.link.hold(time),
                (2, _) if weather.server_dies && self.site.running().is_some() => {
                    if weather.cuts
                        && self.machines.len() == 2
                        && self.chance.lock().unwrap().happens(500)
                    {
                        self.restart_beside_a_cut(machine, time / 4).await;
                    } else {
                        self.kill_server(time / 4);
                    }
                }
                (3, _) if weather.gateways_die => self.kill_gateway_soon(machine),
                (4, _) if weather.disk_fills => {
                    let writes = self.chance.lock().unwrap().below(40);
                    self.site.log.note(&format!("the disk is full for {writes} writes"));
                    self.site.full.store(writes, Ordering::Relaxed);
                }
                _ => {}
            }
        }
    }

    /// The server starts anew while one machine can't reach it, and relies on the lease of a
    /// register that the other one sets.
    async fn restart_beside_a_cut(self: &Arc<Self>, machine: usize, pause: Duration) {
        let gateways = [machine, 1 - machine].map(|machine| self.gateways[machine].get());
        let [Some(cut), Some(other)] = gateways else { return };
        let (register, number, time, pause) = {
            let mut chance = self.chance.lock().unwrap();
            let register = *chance.pick(&REGISTERS).unwrap();
            let time = chance.between(Duration::from_secs(1), Duration::from_secs(12));
            (register, chance.below(1_000_000), time, pause.min(Duration::from_secs(1)))
        };
        let program = |machine: usize, name: &str| {
            Program::new(Arc::clone(self), machine, name.to_owned(), number)
        };
        let (mut watcher, mut setter) = (program(machine, "w0"), program(1 - machine, "s0"));
        let _ = timeout(Duration::from_secs(3), watcher.get(&cut, register)).await;
        self.kill_server(pause);
        cut.link.cut(time);
        let watching = async {
            // Nobody asks a gateway that was killed.
            let is_there =
                || self.gateways[machine].get().is_some_and(|now| Arc::ptr_eq(&now, &cut));
            for _ in 0..12 {
                if !is_there() {
                    return;
                }
                let _ = timeout(Duration::from_secs(1), watcher.get(&cut, register)).await;
                sleep(Duration::from_secs(1)).await;
            }
        };
        let setting = timeout(Duration::from_secs(20), setter.set(&other, register, number));
        let _ = tokio::join!(watching, setting);
    }

    /// All is mended, and what was promised must be there.
    async fn settle_and_compare(self: &Arc<Self>, when: &str) {
        self.site.is_rough.store(false, Ordering::Relaxed);
        self.site.full.store(0, Ordering::Relaxed);
        let mut gateways = Vec::new();
        for gateway in &self.gateways {
            if let Some(gateway) = gateway.get() {
                gateway.link.heal();
            }
            gateways.extend(gateway.when(Option::is_some).await);
        }
        self.site.log.note(&format!("{when}: all is mended"));
        let mut broken = Vec::new();
        for (machine, gateway) in gateways.iter().enumerate() {
            gateway.link.heal();
            gateway.link.is_up().await;
            let until = Instant::now() + LONGEST_SETTLING;
            let settled = loop {
                match gateway.volume.settle().await {
                    Ok(()) => break Ok(()),
                    Err(errno) if Instant::now() > until => break Err(errno),
                    Err(_) => sleep(Duration::from_secs(1)).await,
                }
            };
            if let Err(errno) = settled {
                broken.push(format!(
                    "{when}: machine {machine} is not settled: {errno}, {:?}",
                    gateway.volume.state().lost
                ));
            }
        }
        self.site.log.note(&format!("{when}: settled"));
        self.compare_server(when);
        for (machine, gateway) in gateways.iter().enumerate() {
            broken.extend(
                self.compare_shown(&format!("{when}, on machine {machine}"), gateway).await,
            );
        }
        self.model.lock().unwrap().broken.extend(broken);
    }

    fn compare_server(&self, when: &str) {
        let mut model = self.model.lock().unwrap();
        let place = format!("{when}, on the server");
        model.check(&place, &|path| self.found(path));
        for log in LOGS {
            let contents = std::fs::read(self.path(log)).unwrap();
            model.check_log(&place, log, &contents);
        }
        for path in all_below(&self.site.export) {
            let path = path.strip_prefix(&self.site.export).unwrap().to_str().unwrap().to_owned();
            if !path.starts_with("shared") && !model.may_be(&path) {
                model.breaks(format!("{place}: {path}, which nobody made or somebody removed"));
            }
        }
    }

    /// Compares the files that a machine shows with the server's.
    async fn compare_shown(&self, place: &str, gateway: &Gateway) -> Vec<String> {
        let mut paths: Vec<String> = {
            let model = self.model.lock().unwrap();
            let doubtful = model.doubts.iter().flat_map(|doubt| doubt.paths.clone());
            model.known.keys().cloned().chain(doubtful).collect()
        };
        paths.extend(LOGS.iter().chain(&REGISTERS).map(|path| (*path).to_owned()));
        let mut broken = Vec::new();
        for path in paths {
            // A call of a gateway that was killed may be carried out meanwhile.
            let before = self.found(&path);
            let shown = match gateway.read(&path).await {
                Ok(Some(data)) => Found::File(data),
                Ok(None) => Found::Directory,
                Err(Errno::ENOENT) => Found::Absent,
                Err(errno) => {
                    broken.push(format!("{place}: {path} gives {errno}"));
                    continue;
                }
            };
            if shown != before && shown != self.found(&path) {
                broken.push(format!(
                    "{place}: {path} is shown as {}, and is {}",
                    shown.shown(),
                    before.shown()
                ));
            }
        }
        broken
    }

    /// Takes what the server has refused out, and throws it away.
    pub fn forget_refused(&self, gateway: &Gateway) {
        if self.site.fault == Some(Fault::ForgetRefused) && gateway.volume.state().lost.is_some() {
            let trash = tempfile::tempdir_in(self.site.export.parent().unwrap()).unwrap();
            let to = Recovery::create(&trash.path().join("to")).unwrap();
            let _ = gateway.volume.recover(&to);
        }
    }
}

pub fn padded(value: &str) -> String {
    format!("{value:<VALUE_BYTES$}")
}
