//! Cost of TLS: the throughput from an executor over plain text and over TLS.

use anyhow::Result;
use posh_integration::programs::Programs;

use super::throughput::{SIZE_BYTES, UNIT, paired, rate};
use crate::report::{BenchReport, FigureTarget};
use crate::sample::Samples;
use crate::site::{BenchSite, local_path};

/// Target of TLS's rate, as a share of plain text's.
const SHARE: f64 = 0.6;

/// Measures both, one after the other.
pub fn measure(programs: &Programs, report: &mut BenchReport) -> Result<()> {
    let plain = copied(&BenchSite::start(programs, 1)?)?;
    let tls = copied(&BenchSite::with_certificates(programs)?)?;
    let share = Samples::one(tls.median() / plain.median());
    report.add("cat 1 GiB to a file: plain text", UNIT, FigureTarget::None, plain);
    report.add(
        "cat 1 GiB to a file: TLS, certificates on both sides",
        UNIT,
        FigureTarget::None,
        tls,
    );
    report.add("TLS, as a share of plain text", "", FigureTarget::AtLeast(SHARE), share);
    Ok(())
}

fn copied(site: &BenchSite) -> Result<Samples> {
    let big = site.file("big", SIZE_BYTES)?;
    let copy = local_path("copy");
    let to_file = format!("cat {} > {}", big.display(), copy.display());
    let empty = format!(": > {}", copy.display());
    site.expect_placement(&to_file, true)?;
    Ok(rate(&paired(&to_file, &empty).run(site)?.posh))
}
