//! Plain SVG: grouped bars on a logarithmic scale, and lines, of any data.

use std::fmt::Write as _;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 60.0;
const BOTTOM: f64 = 70.0;
/// Distinguishable by colour-blind readers (Okabe and Ito).
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#e69f00", "#009e73", "#56b4e9", "#cc79a7", "#999999", "#000000"];

/// A named row of values; one for each group, or points.
#[derive(Debug, Clone)]
pub struct Series<T> {
    /// Name in the legend.
    pub name: String,
    /// In order.
    pub values: Vec<T>,
}

/// One bar for each series in each group, on a logarithmic axis; missing values and zeros have no
/// bar.
pub fn bars(title: &str, unit: &str, groups: &[String], series: &[Series<Option<f64>>]) -> String {
    let shown = |v: &Option<f64>| v.filter(|v| *v > 0.0);
    let values: Vec<f64> = series.iter().flat_map(|s| s.values.iter().filter_map(shown)).collect();
    let (low, high) = decades(&values);
    let mut svg = frame(title, unit, series.iter().map(|s| s.name.as_str()));
    let y = |value: f64| {
        HEIGHT - BOTTOM - (value.log10() - low) / (high - low) * (HEIGHT - BOTTOM - TOP)
    };
    let mut exponent = low;
    while exponent <= high {
        line_across(&mut svg, y(10f64.powf(exponent)), &number(10f64.powf(exponent)));
        exponent += 1.0;
    }
    let group_width = (WIDTH - LEFT - RIGHT) / groups.len().max(1) as f64;
    let bar_width = group_width * 0.84 / series.len().max(1) as f64;
    for (g, group) in groups.iter().enumerate() {
        let start = LEFT + g as f64 * group_width + group_width * 0.08;
        for (s, row) in series.iter().enumerate() {
            let Some(value) = row.values.get(g).and_then(shown) else { continue };
            let (x, top) = (start + s as f64 * bar_width, y(value));
            let height = HEIGHT - BOTTOM - top;
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{height:.1}\" \
                 fill=\"{}\">\
                 <title>{group}, {}: {} {unit}</title></rect>",
                bar_width * 0.92,
                COLOURS[s % COLOURS.len()],
                row.name,
                number(value)
            );
        }
        let (x, y) = (start + group_width * 0.42, HEIGHT - BOTTOM + 14.0);
        let _ = writeln!(
            svg,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" transform=\"rotate(25 {x:.1} {y:.1})\">{group}</text>"
        );
    }
    svg + "</svg>\n"
}

/// Points joined by lines, both axes linear and from zero.
pub fn lines(title: &str, across: &str, unit: &str, series: &[Series<(f64, f64)>]) -> String {
    let points = || series.iter().flat_map(|s| &s.values);
    let most = |pick: fn(&(f64, f64)) -> f64| points().map(pick).fold(f64::MIN_POSITIVE, f64::max);
    let (most_x, most_y) = (most(|p| p.0), most(|p| p.1) * 1.05);
    let mut svg = frame(title, unit, series.iter().map(|s| s.name.as_str()));
    let x = |value: f64| LEFT + value / most_x * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| HEIGHT - BOTTOM - value / most_y * (HEIGHT - BOTTOM - TOP);
    let step = step(most_y);
    for count in 0..=(most_y / step) as usize {
        line_across(&mut svg, y(count as f64 * step), &number(count as f64 * step));
    }
    let mut ticks: Vec<f64> = points().map(|p| p.0).collect();
    ticks.sort_by(f64::total_cmp);
    ticks.dedup();
    for tick in ticks {
        let (x, y) = (x(tick), HEIGHT - BOTTOM + 16.0);
        let _ = writeln!(
            svg,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{}</text>",
            number(tick)
        );
    }
    let (middle, below) = (WIDTH / 2.0, HEIGHT - BOTTOM + 38.0);
    let _ =
        writeln!(svg, "<text x=\"{middle}\" y=\"{below}\" text-anchor=\"middle\">{across}</text>");
    for (s, row) in series.iter().enumerate() {
        let colour = COLOURS[s % COLOURS.len()];
        let path: Vec<String> =
            row.values.iter().map(|p| format!("{:.1},{:.1}", x(p.0), y(p.1))).collect();
        let points = path.join(" ");
        let _ = writeln!(
            svg,
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"
        );
        for p in &row.values {
            let _ = writeln!(
                svg,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\" fill=\"{colour}\"><title>{}: {} \
                 {unit}</title></circle>",
                x(p.0),
                y(p.1),
                row.name,
                number(p.1)
            );
        }
    }
    svg + "</svg>\n"
}

/// Background, title and legend of a plot.
fn frame<'a>(title: &str, unit: &str, names: impl Iterator<Item = &'a str>) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n\
         <text x=\"{LEFT}\" y=\"20\" font-size=\"15\">{title} ({unit})</text>\n"
    );
    let mut x = LEFT;
    for (index, name) in names.enumerate() {
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"32\" width=\"12\" height=\"12\" fill=\"{}\"/><text x=\"{}\" \
             y=\"42\">{name}</text>",
            COLOURS[index % COLOURS.len()],
            x + 16.0
        );
        x += 34.0 + 7.0 * name.len() as f64;
    }
    svg
}

fn line_across(svg: &mut String, y: f64, label: &str) {
    let (right, text_x, text_y) = (WIDTH - RIGHT, LEFT - 6.0, y + 4.0);
    let _ = writeln!(
        svg,
        "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#dddddd\"/>\
         <text x=\"{text_x}\" y=\"{text_y:.1}\" text-anchor=\"end\">{label}</text>"
    );
}

/// The powers of ten around all values; at least one decade.
fn decades(values: &[f64]) -> (f64, f64) {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min).log10().floor();
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max).log10().ceil();
    if low.is_finite() && high.is_finite() { (low, high.max(low + 1.0)) } else { (0.0, 1.0) }
}

/// A round step that gives about five lines.
fn step(most: f64) -> f64 {
    let power = 10f64.powf((most / 5.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| most / s <= 6.0).unwrap_or(power)
}

fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 10.0 || v == 0.0 => format!("{value:.0}"),
        v if v >= 1.0 => format!("{value:.1}").trim_end_matches(".0").to_owned(),
        _ => format!("{value:.4}").trim_end_matches('0').to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_for_each_value_that_is_there() {
        let series = |name: &str, values| Series { name: name.into(), values };
        let rows = [series("a", vec![Some(0.01), None]), series("b", vec![Some(10.0), Some(0.0)])];
        let svg = bars("t", "s", &["g".into(), "h".into()], &rows);
        // The background, two in the legend, two bars.
        assert_eq!(svg.matches("<rect").count(), 5);
        assert!(svg.contains("g, b: 10 s"));
    }

    #[test]
    fn axes_take_in_all_values() {
        assert_eq!(decades(&[0.02, 150.0]), (-2.0, 3.0));
        assert_eq!(decades(&[1.0]), (0.0, 1.0));
        assert_eq!(step(105.0), 20.0);
    }
}
