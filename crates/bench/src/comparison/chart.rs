//! The figures as a picture: one bar of TCP throughput per row, in SVG, readable on a light and on
//! a dark page.

use std::fmt::Write;

use super::report::{Report, ReportRow};
use super::rows;

/// All lengths are in SVG user units (pixels at scale 1).
const WIDTH: f64 = 860.0;
/// The left edge of text.
const MARGIN: f64 = 24.0;
/// Between a row's name and its bar.
const NAME_GAP: f64 = 10.0;
/// Widths of a letter in a wide font such as DejaVu Sans or Verdana, as parts of the font's size.
const LETTER: f64 = 0.65;
const BOLD_LETTER: f64 = 0.7;
/// Between an entry of the legend and the next.
const LEGEND_GAP: f64 = 22.0;
/// Room for a bar's figures, behind its end.
const RIGHT: f64 = 216.0;
const TOP: f64 = 98.0;
const BAR: f64 = 24.0;
const STEP: f64 = 40.0;
const GROUP_GAP: f64 = 46.0;
const BOTTOM: f64 = 46.0;

const STYLE: &str = "
  .page{fill:#ffffff}.ink{fill:#1f2328}.dim{fill:#59636e}.line{stroke:#d1d9e0}
  .weft{fill:#0b7a75}.secret{fill:#8a6bb8}.clear{fill:#9aa4af}.whisker{stroke:#1f2328}
  .halo{paint-order:stroke;stroke:#ffffff;stroke-width:4px;stroke-linejoin:round}
  text{font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif}
  @media(prefers-color-scheme:dark){
  .page{fill:#0d1117}.ink{fill:#f0f6fc}.dim{fill:#9198a1}.line{stroke:#3d444d}
  .weft{fill:#2bb5a8}.secret{fill:#a88bd9}.clear{fill:#656c76}.whisker{stroke:#f0f6fc}.halo{stroke:#0d1117}}
";

/// Draws the chart. A report without rows gives a chart without bars.
#[must_use]
pub fn svg(report: &Report) -> String {
    let groups = groups(report);
    let bars: usize = groups.iter().map(|(_, rows)| rows.len()).sum();
    let plot = bars as f64 * STEP + groups.len() as f64 * GROUP_GAP;
    let height = TOP + plot + BOTTOM;
    let scale = Scale::up_to(greatest(report), left_of(report));
    let mut svg = String::new();
    let _ = write!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"TCP throughput between containers on two hosts\">\n\
         <style>{STYLE}</style>\n\
         <rect class=\"page\" width=\"{WIDTH}\" height=\"{height}\" rx=\"8\"/>\n"
    );
    title(&mut svg, report);
    let mut y = TOP;
    for (underlay, rows) in groups {
        text(
            &mut svg,
            (MARGIN, y + 12.0),
            "ink",
            "13",
            "font-weight=\"600\"",
            underlay_title(underlay),
        );
        y += GROUP_GAP;
        scale.draw(&mut svg, y - 4.0, y + rows.len() as f64 * STEP - (STEP - BAR) + 4.0);
        for row in rows {
            bar(&mut svg, row, &scale, y);
            y += STEP;
        }
    }
    legend(&mut svg, report, (scale.left, height - 16.0));
    svg.push_str("</svg>\n");
    svg
}

fn title(svg: &mut String, report: &Report) {
    let machine = &report.machine;
    let heading = "TCP, one stream between two hosts, Gbit/s";
    text(svg, (MARGIN, 34.0), "ink", "18", "font-weight=\"600\"", heading);
    let date = machine.date.split('T').next().unwrap_or_default();
    let rounds = report.rows.iter().map(|row| row.rounds).max().unwrap_or(0);
    let subtitle = format!(
        "{} cores of {} · Linux {} · {date}",
        machine.cores,
        short_cpu(&machine.cpu),
        machine.kernel
    );
    text(svg, (MARGIN, 57.0), "dim", "12.5", "", &subtitle);
    let method = format!(
        "median of {rounds} rounds; thin line: least to greatest; core-s/Gbit: busy time of the machine per gigabit"
    );
    text(svg, (MARGIN, 76.0), "dim", "12.5", "", &method);
}

fn bar(svg: &mut String, row: &ReportRow, scale: &Scale, y: f64) {
    let value = row.tcp1_gbps.unwrap_or(0.0);
    let middle = y + BAR / 2.0;
    let end = scale.x(value);
    let class = class_of(row);
    let weight = if class == "weft" { "font-weight=\"600\"" } else { "" };
    let anchor = format!("text-anchor=\"end\" {weight}");
    text(svg, (scale.left - NAME_GAP, middle + 4.5), "ink", "13", &anchor, &row.name);
    let _ = writeln!(
        svg,
        "<rect class=\"{class}\" x=\"{:.1}\" y=\"{y}\" width=\"{:.1}\" height=\"{BAR}\" rx=\"3\"/>",
        scale.left,
        (end - scale.left).max(1.0)
    );
    let mut label_x = end;
    if let Some((least, greatest)) = row.spread.get("tcp1_gbps") {
        let (x1, x2) = (scale.x(*least), scale.x(*greatest));
        label_x = label_x.max(x2);
        let _ = writeln!(
            svg,
            "<line class=\"whisker\" x1=\"{x1:.1}\" y1=\"{middle}\" x2=\"{x2:.1}\" y2=\"{middle}\" stroke-width=\"1.5\"/>"
        );
    }
    let cost = row.core_s_per_gbit.map(|cost| format!("{cost:.3} core-s/Gbit"));
    let label = format!("{value:.1}");
    let x = label_x + 8.0;
    let _ = writeln!(
        svg,
        "<text class=\"halo\" x=\"{x:.1}\" y=\"{:.1}\" font-size=\"13\"><tspan class=\"ink\" font-weight=\"600\">{label}</tspan>\
         <tspan class=\"dim\" dx=\"8\">{}</tspan></text>",
        middle + 4.5,
        cost.unwrap_or_default()
    );
}

fn class_of(row: &ReportRow) -> &'static str {
    match row.name.as_str() {
        name if name.starts_with("weft-") => "weft",
        rows::DIRECT | rows::GRE | rows::VXLAN => "clear",
        _ => "secret",
    }
}

fn legend(svg: &mut String, report: &Report, (mut x, y): (f64, f64)) {
    let all =
        [("weft", "Weft, encrypted"), ("secret", "others, encrypted"), ("clear", "not encrypted")];
    let shown =
        all.into_iter().filter(|(class, _)| report.rows.iter().any(|row| class_of(row) == *class));
    for (class, label) in shown {
        let _ = writeln!(
            svg,
            "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{}\" width=\"12\" height=\"12\" rx=\"2\"/>",
            y - 10.5
        );
        text(svg, (x + 18.0, y), "dim", "12", "", label);
        x += 18.0 + label.len() as f64 * 12.0 * LETTER + LEGEND_GAP;
    }
}

/// The x-coordinate of the bars: behind the longest name, in any font.
fn left_of(report: &Report) -> f64 {
    let longest = report.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
    MARGIN + longest as f64 * 13.0 * BOLD_LETTER + NAME_GAP
}

/// The horizontal axis: from 0, at `left`, to a round number.
struct Scale {
    top: f64,
    tick: f64,
    left: f64,
}

impl Scale {
    fn up_to(greatest: f64, left: f64) -> Self {
        let ticks = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0];
        let tick = ticks.into_iter().find(|tick| greatest / tick <= 6.0).unwrap_or(1_000.0);
        Self { top: (greatest / tick).ceil().max(1.0) * tick, tick, left }
    }

    fn x(&self, value: f64) -> f64 {
        self.left + value.clamp(0.0, self.top) / self.top * (WIDTH - self.left - RIGHT)
    }

    fn draw(&self, svg: &mut String, from: f64, to: f64) {
        let count = (self.top / self.tick).round() as u32;
        for number in 0..=count {
            let value = f64::from(number) * self.tick;
            let x = self.x(value);
            let _ = writeln!(
                svg,
                "<line class=\"line\" x1=\"{x:.1}\" y1=\"{from}\" x2=\"{x:.1}\" y2=\"{to}\"/>"
            );
            let label = if self.tick < 1.0 { format!("{value:.1}") } else { format!("{value:.0}") };
            text(svg, (x, from - 6.0), "dim", "11", "text-anchor=\"middle\"", &label);
        }
    }
}

fn text(svg: &mut String, at: (f64, f64), class: &str, size: &str, more: &str, content: &str) {
    let (x, y) = at;
    let _ = writeln!(
        svg,
        "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" {more}>{}</text>",
        escape(content)
    );
}

fn groups(report: &Report) -> Vec<(&str, Vec<&ReportRow>)> {
    let mut groups: Vec<(&str, Vec<&ReportRow>)> = Vec::new();
    for row in &report.rows {
        match groups.iter_mut().find(|(underlay, _)| *underlay == row.underlay) {
            Some((_, rows)) => rows.push(row),
            None => groups.push((&row.underlay, vec![row])),
        }
    }
    groups
}

fn underlay_title(underlay: &str) -> &str {
    match underlay {
        "veth" => "veth as it is: super-packets cross whole",
        "wire" => "wire: real 1500-byte datagrams cross",
        other => other,
    }
}

fn greatest(report: &Report) -> f64 {
    let tops = report.rows.iter().map(|row| row.spread.get("tcp1_gbps").map(|spread| spread.1));
    tops.zip(report.rows.iter().map(|row| row.tcp1_gbps))
        .filter_map(|(top, median)| top.or(median))
        .fold(0.1, f64::max)
}

/// The processor's name without what every name has.
pub(super) fn short_cpu(cpu: &str) -> String {
    let words = cpu.split_whitespace().filter(|word| !matches!(*word, "CPU" | "Processor"));
    words.map(|word| word.replace("(R)", "").replace("(TM)", "")).collect::<Vec<_>>().join(" ")
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::report::tests::report;
    use super::*;

    #[test]
    fn the_chart_has_a_bar_for_each_row_and_names_the_machine() {
        let svg = svg(&report());
        assert_eq!(svg.matches("height=\"24\"").count(), 4, "{svg}");
        for text in ["6.1.0", "2026-11-21", "wireguard-go", "0.200 core-s/Gbit"] {
            assert!(svg.contains(text), "{text} is missing");
        }
    }

    #[test]
    fn names_from_outside_are_escaped() {
        let svg = svg(&report());
        assert!(
            svg.contains("A &lt;CPU&gt; &amp; co") || svg.contains("A &lt;CPU&gt; &amp;"),
            "{svg}"
        );
        assert!(!svg.contains("<CPU>"));
    }

    #[test]
    fn bars_are_as_long_as_their_figures() {
        let scale = Scale::up_to(46.0, 100.0);
        assert!((scale.top - 50.0).abs() < 1e-9, "{}", scale.top);
        assert!(scale.x(46.0) > scale.x(23.0));
        let half = (scale.x(25.0) - scale.left) / (scale.x(50.0) - scale.left);
        assert!((half - 0.5).abs() < 1e-9, "{half}");
    }

    #[test]
    fn each_text_fits_into_the_picture_in_a_wide_font() {
        let mut report = report();
        report.machine.cpu = "Intel(R) Xeon(R) Gold 6146 CPU @ 3.20GHz".to_owned();
        for (row, (gbps, cost)) in report.rows.iter_mut().zip([(0.1, 64.526), (199.9, 10.055)]) {
            row.name = "weft-esp-userspace-chacha20".to_owned();
            row.tcp1_gbps = Some(gbps);
            row.core_s_per_gbit = Some(cost);
            row.spread.clear();
        }
        let svg = svg(&report);
        let texts: Vec<&str> = svg.lines().filter(|line| line.starts_with("<text")).collect();
        assert!(texts.len() > 12, "{svg}");
        for text in texts {
            let number = |name: &str| -> f64 {
                let value = text.split_once(&format!(" {name}=\"")).unwrap().1;
                value.split('"').next().unwrap().parse().unwrap()
            };
            let (x, width) = (number("x"), width_of(text, number("font-size")));
            let left = match text {
                text if text.contains("\"end\"") => x - width,
                text if text.contains("\"middle\"") => x - width / 2.0,
                _ => x,
            };
            assert!(left >= MARGIN - 1e-9 && left + width <= WIDTH, "{left} and {width}: {text}");
        }
    }

    #[test]
    fn entries_of_the_legend_do_not_touch() {
        let mut report = report();
        report.rows[1].name = rows::NEBULA.to_owned();
        report.rows[3].name = rows::DIRECT.to_owned();
        let svg = svg(&report);
        let mut end = 0.0;
        for text in svg.lines().filter(|line| line.contains("font-size=\"12\"")) {
            let x = text.split_once("x=\"").unwrap().1.split('"').next().unwrap();
            let x: f64 = x.parse().unwrap();
            assert!(x - 18.0 > end, "{text}");
            end = x + width_of(text, 12.0);
        }
        assert!(end > 0.0 && end < WIDTH, "{svg}");
    }

    /// The width of an element's text, whose parts may have another weight each.
    fn width_of(element: &str, size: f64) -> f64 {
        let mut width = 0.0;
        for part in element.split('<').skip(1) {
            let (tag, text) = part.split_once('>').unwrap();
            let letter = if tag.contains("font-weight") { BOLD_LETTER } else { LETTER };
            let gap = if tag.contains("dx=") { 8.0 } else { 0.0 };
            width += gap + text.chars().count() as f64 * size * letter;
        }
        width
    }

    #[test]
    fn the_chart_follows_the_page_into_the_dark() {
        assert!(svg(&Report::default()).contains("prefers-color-scheme:dark"));
    }
}
