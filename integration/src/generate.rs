//! Deterministic data for the paper's applications (§7.1): the same size gives the same bytes on
//! every machine.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// A small reproducible random number generator (xorshift64*, Vigna 2016).
#[derive(Debug, Clone)]
pub struct Numbers(u64);

impl Numbers {
    /// Different seeds give independent streams.
    pub fn seeded(seed: u64) -> Numbers {
        Numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// The next number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % limit
    }
}

/// A hash that is stable over releases (FNV-1a, 64 bits).
pub fn sum(bytes: &[u8]) -> u64 {
    let add = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, add)
}

/// The ray that `raytrace.sh` searches for.
pub const RAY: u64 = 590_432;
/// Interval of that ray among the records of a worker.
const RAY_EVERY: usize = 20_000;

/// Logs of a distributed ray tracer, `worker-NNN.log`: records of rays among other
/// messages; the first lines of each file name the columns.
pub fn ray_logs(directory: &Path, workers: usize, lines: usize) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    for worker in 0..workers {
        let mut numbers = Numbers::seeded(worker as u64);
        let mut log = create(&directory.join(format!("worker-{worker:03}.log")))?;
        writeln!(log, "[INFO] worker {worker} of {workers} has its scene")?;
        writeln!(log, "[RAY]  pathID,hop,worker,treelet,x,y,milliseconds")?;
        for line in 0..lines {
            if line % 3 == 2 {
                writeln!(
                    log,
                    "[INFO] queue {} of treelet {}",
                    numbers.below(4000),
                    numbers.below(64)
                )?;
                continue;
            }
            // Never the searched ray, unless it is its turn.
            let ray = if line % RAY_EVERY == 0 { RAY } else { 600_000 + numbers.below(400_000) };
            let (hop, treelet) = (numbers.below(24), numbers.below(64));
            let (x, y) = (numbers.below(1920), numbers.below(1080));
            writeln!(log, "[RAY]  {ray},{hop},{worker},{treelet},{x},{y},{}", line / 7)?;
        }
        log.flush()?;
    }
    Ok(())
}

/// Pictures as binary PPM, `NNNN.ppm`: gradients with noise, so that scaling is real work.
pub fn images(directory: &Path, count: usize, width: usize, height: usize) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    for image in 0..count {
        let mut numbers = Numbers::seeded(image as u64);
        let mut file = create(&directory.join(format!("{image:04}.ppm")))?;
        write!(file, "P6\n{width} {height}\n255\n")?;
        for y in 0..height {
            for x in 0..width {
                let noise = numbers.below(32) as u8;
                let red = (x * 223 / width) as u8;
                let green = (y * 223 / height) as u8;
                file.write_all(&[red + noise, green + noise, (image * 37 % 224) as u8 + noise])?;
            }
        }
        file.flush()?;
    }
    Ok(())
}

/// A file of incompressible bytes (a multiple of four).
pub fn noise(file: &Path, bytes: u64) -> io::Result<()> {
    let mut numbers = Numbers::seeded(bytes);
    let mut out = BufWriter::new(File::create(file)?);
    for _ in 0..bytes / 4 {
        let number = numbers.below(1 << 32) as u32;
        out.write_all(&number.to_le_bytes())?;
    }
    out.flush()
}

/// A port scan with routing data, one JSON object a line, in zannotate's format.
pub fn port_scan(file: &Path, hosts: usize) -> io::Result<()> {
    let mut numbers = Numbers::seeded(80);
    let mut out = create(file)?;
    for host in 0..hosts {
        let (a, b, c) = (1 + host / 65_536 % 223, host / 256 % 256, host % 256);
        // Few systems have most of the addresses.
        let system = 64_512 + numbers.below(1 + numbers.clone().below(400));
        writeln!(
            out,
            "{{\"ip\":\"{a}.{b}.{c}.{}\",\"port\":80,\"ttl\":{},\"success\":true,\"zannotate\":{{\"routing\":\
             {{\"prefix\":\"{a}.{b}.0.0/16\",\"asn\":{system},\"path\":[3356,1299,{system}],\"origin\":\"IGP\"}}}}}}",
            numbers.below(256),
            40 + numbers.below(90)
        )?;
    }
    out.flush()
}

/// The address that `access-logs.sh` searches for.
pub const VISITOR: &str = "101.81.133.jja";
/// Interval of that address among the lines of a log.
const VISIT_EVERY: usize = 15_000;

/// Access logs in the columns of the SEC's EDGAR data set, `log-NN.csv`. `server` makes the
/// servers' logs differ.
pub fn access_logs(directory: &Path, server: usize, files: usize, lines: usize) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    for day in 0..files {
        let mut numbers = Numbers::seeded((server * 1000 + day) as u64);
        let mut log = create(&directory.join(format!("log-{day:02}.csv")))?;
        writeln!(log, "ip,date,time,zone,cik,accession,extention,code,size")?;
        for line in 0..lines {
            if line % VISIT_EVERY == 7 {
                write!(log, "{VISITOR}")?;
            } else {
                let mut part = || numbers.below(256);
                write!(log, "{}.{}.{}.dfe", part(), part(), part())?;
            }
            let second = line % 86_400;
            let (h, m, s) = (second / 3600, second / 60 % 60, second % 60);
            let (firm, size) = (numbers.below(1_500_000), numbers.below(900_000));
            writeln!(
                log,
                ",2017-06-{:02},{h:02}:{m:02}:{s:02},0.0,{firm}.0,000{firm}-17-{server}{day:05},-index.htm,200.0,{size}.0",
                day % 30 + 1
            )?;
        }
        log.flush()?;
    }
    Ok(())
}

/// Lines of each file of [`source_tree`].
const SOURCE_LINES: usize = 40;

/// A source tree of `files` files in directories of 25, for a repository.
pub fn source_tree(directory: &Path, files: usize) -> io::Result<()> {
    for number in 0..files {
        let path = directory.join(source_name(number));
        fs::create_dir_all(path.parent().unwrap_or(directory))?;
        let mut file = create(&path)?;
        for line in 1..=SOURCE_LINES {
            writeln!(file, "{}", source_line(number, line))?;
        }
        file.flush()?;
    }
    Ok(())
}

/// `count` patches, `NN.patch`, that apply to [`source_tree`] one after the other:
/// each changes one line in several files and adds a file.
pub fn patches(directory: &Path, count: usize, files: usize) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    for patch in 0..count {
        let mut out = create(&directory.join(format!("{patch:02}.patch")))?;
        // Three lines further with every patch: a file that is patched again has unchanged context.
        let line = 2 + patch * 3 % (SOURCE_LINES - 3);
        for step in 0..files.min(3) {
            let number = (patch * 7 + step * 11) % files;
            let name = source_name(number);
            let old = source_line(number, line);
            writeln!(out, "--- a/{name}\n+++ b/{name}\n@@ -{},3 +{},3 @@", line - 1, line - 1)?;
            writeln!(out, " {}\n-{old}\n+{old} // patch {patch}", source_line(number, line - 1))?;
            writeln!(out, " {}", source_line(number, line + 1))?;
        }
        writeln!(
            out,
            "--- /dev/null\n+++ b/added/{patch:02}.c\n@@ -0,0 +1 @@\n+int added_{patch};"
        )?;
        out.flush()?;
    }
    Ok(())
}

fn source_name(number: usize) -> String {
    format!("module-{:03}/file-{:05}.c", number / 25, number)
}

fn source_line(number: usize, line: usize) -> String {
    format!("int value_{number}_{line}(void) {{ return {}; }}", number * 31 + line)
}

fn create(path: &Path) -> io::Result<BufWriter<File>> {
    Ok(BufWriter::with_capacity(1 << 16, File::create(path)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_size_gives_the_same_bytes() {
        let make = || {
            let directory = tempfile::tempdir().unwrap();
            ray_logs(directory.path(), 2, 100).unwrap();
            access_logs(directory.path(), 1, 1, 100).unwrap();
            port_scan(&directory.path().join("scan"), 100).unwrap();
            images(directory.path(), 1, 8, 8).unwrap();
            crate::tree::snapshot(directory.path(), &[]).unwrap()
        };
        let first = make();
        assert_eq!(first.len(), 5);
        assert_eq!(first, make());
    }

    #[test]
    fn what_is_looked_for_is_there_and_rare() {
        let directory = tempfile::tempdir().unwrap();
        access_logs(directory.path(), 1, 1, 30_000).unwrap();
        let log = fs::read_to_string(directory.path().join("log-00.csv")).unwrap();
        assert_eq!(log.lines().filter(|l| l.starts_with(VISITOR)).count(), 2);
    }
}
