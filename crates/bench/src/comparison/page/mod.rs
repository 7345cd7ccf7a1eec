//! `docs/performance.md`: the hand-written text of its template, and tables of the runs in `docs/figures`.
//!
//! An order in the template, as `{{systems systems-epyc veth}}`, gives way to the table or figure that it names.

mod tables;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, bail};

use super::chart;
use super::figures::{self, Kept};
use super::report::ReportRow;

/// The directory of the documents; `./dev` runs in the root of the tree.
pub(crate) const DOCS: &str = "docs";
const TEMPLATE: &str = "performance.template.md";
const PAGE: &str = "performance.md";
const CHART: &str = "performance.svg";
/// The run that the chart shows.
const CHARTED: &str = "systems-epyc";
const HEAD: &str = "<!-- `./dev bench --page` makes this page from performance.template.md and figures/*.json. \
                    Change those. -->\n\n";

/// The page and its chart.
#[derive(Debug, PartialEq, Eq)]
struct Page {
    text: String,
    chart: String,
}

/// Makes the page and its chart anew.
///
/// # Errors
/// Returns an error if a file cannot be read or written, or the template orders something that is not there.
pub(crate) fn write(docs: &Path) -> anyhow::Result<()> {
    let Page { text, chart } = make(docs, &figures::read_all(docs)?)?;
    for (name, text) in [(PAGE, text), (CHART, chart)] {
        let file = docs.join(name);
        std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

fn make(docs: &Path, runs: &BTreeMap<String, Kept>) -> anyhow::Result<Page> {
    let file = docs.join(TEMPLATE);
    let template = std::fs::read_to_string(&file);
    let template = template.with_context(|| format!("cannot read {}", file.display()))?;
    let text = expand(&template, |order| answer(order, runs))?;
    Ok(Page { text: format!("{HEAD}{text}"), chart: chart::svg(&run(runs, CHARTED)?.report) })
}

/// The text with an answer in the place of each order.
fn expand(
    template: &str,
    answer: impl Fn(&str) -> anyhow::Result<String>,
) -> anyhow::Result<String> {
    let mut text = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("{{") {
        let (order, after) =
            after.split_once("}}").context("an order in the template has no end")?;
        let answer = answer(order).with_context(|| format!("cannot follow {{{{{order}}}}}"))?;
        text.push_str(before);
        text.push_str(answer.trim_end());
        rest = after;
    }
    text.push_str(rest);
    Ok(text)
}

/// The table or figure that an order names.
fn answer(order: &str, runs: &BTreeMap<String, Kept>) -> anyhow::Result<String> {
    let words: Vec<&str> = order.split_whitespace().collect();
    let report = |name: &str| run(runs, name).map(|kept| &kept.report);
    let reports =
        |names: &[&str]| names.iter().map(|name| report(name)).collect::<Result<Vec<_>, _>>();
    Ok(match words[..] {
        ["runs"] => tables::runs(runs),
        ["systems", name, underlay] => tables::systems(&rows_on(runs, name, underlay)?),
        ["others", ref names @ ..] => tables::others(&reports(names)?),
        ["fair", ref names @ ..] => tables::fair(&reports(names)?),
        ["threads", ref names @ ..] => tables::threads(&reports(names)?),
        ["gateway", name] => super::gateway::table(&report(name)?.gateway),
        ["attach", name] => super::attach::table(&report(name)?.attach),
        ["engine", name] => super::engine::table(&report(name)?.engine),
        ["workers", name] => tables::workers(&report(name)?.ladder),
        ["pressure", name] => tables::pressure(&report(name)?.pressure),
        ["weave", name] => tables::weave(&report(name)?.weave),
        ["listing", name] => {
            let listing = run(runs, name)?.listing.as_ref();
            tables::listing(listing.context("the run has no listing")?)
        }
        ["value", name, underlay, row, column] => {
            let (value, digits) = value(row_on(runs, name, underlay, row)?, column)?;
            format!("{value:.digits$}")
        }
        ["times", name, underlay, row, other, column] => {
            let (ours, _) = value(row_on(runs, name, underlay, row)?, column)?;
            let (theirs, _) = value(row_on(runs, name, underlay, other)?, column)?;
            format!("{:.2}", ours / theirs)
        }
        _ => bail!("no such order"),
    })
}

fn run<'a>(runs: &'a BTreeMap<String, Kept>, name: &str) -> anyhow::Result<&'a Kept> {
    runs.get(name).with_context(|| format!("there is no figures/{name}.json"))
}

/// The rows of a run on one underlay; `veth-9000` is the link of that MTU.
fn rows_on<'a>(
    runs: &'a BTreeMap<String, Kept>,
    name: &str,
    underlay: &str,
) -> anyhow::Result<Vec<&'a ReportRow>> {
    let underlay = underlay.replace('-', " ");
    let rows = run(runs, name)?.report.rows.iter();
    let rows: Vec<_> = rows.filter(|row| row.underlay == underlay).collect();
    anyhow::ensure!(!rows.is_empty(), "figures/{name}.json has no row on {underlay}");
    Ok(rows)
}

fn row_on<'a>(
    runs: &'a BTreeMap<String, Kept>,
    name: &str,
    underlay: &str,
    row: &str,
) -> anyhow::Result<&'a ReportRow> {
    let rows = rows_on(runs, name, underlay)?;
    let found = rows.into_iter().find(|one| one.name == row);
    found.with_context(|| format!("figures/{name}.json has no row {row} on {underlay}"))
}

/// A column of a row, and the digits behind the point that it is shown with.
fn value(row: &ReportRow, column: &str) -> anyhow::Result<(f64, usize)> {
    let (value, digits) = match column {
        "tcp1" => (row.tcp1_gbps, 2),
        "tcp4" => (row.tcp4_gbps, 2),
        "tcp8" => (row.tcp8_gbps, 2),
        "core-s" => (row.core_s_per_gbit, 3),
        "udp" => (row.udp_gbps, 2),
        "small" => (row.pps64.map(|pps| pps / 1e3), 0),
        "rr" => (row.rr_tps, 0),
        "rr-p99" => (row.rr_p99_us, 0),
        "load" => (row.load_tps, 0),
        "rss" => (row.rss_mib, 0),
        _ => bail!("no such column"),
    };
    Ok((value.context("the row has no such figure")?, digits))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::path::PathBuf;

    use super::super::rows;
    use super::*;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    fn kept() -> BTreeMap<String, Kept> {
        figures::read_all(&root().join(DOCS)).unwrap()
    }

    #[test]
    fn the_page_in_the_tree_is_what_the_command_makes() {
        let docs = root().join(DOCS);
        let made = make(&docs, &kept()).unwrap();
        let read = |name: &str| std::fs::read_to_string(docs.join(name)).unwrap();
        let mend = "./dev bench --page makes it anew";
        assert!(
            made.text == read(PAGE),
            "docs/{PAGE} has been edited, or its figures have: {mend}"
        );
        assert!(made.chart == read(CHART), "docs/{CHART} shows other figures: {mend}");
    }

    #[test]
    fn a_changed_figure_changes_the_page() {
        let docs = root().join(DOCS);
        let mut runs = kept();
        let made = make(&docs, &runs).unwrap();
        let rows = &mut runs.get_mut(CHARTED).unwrap().report.rows;
        let row = rows.iter_mut().find(|row| row.name == rows::WEFT).unwrap();
        row.tcp1_gbps = row.tcp1_gbps.map(|gbps| gbps + 0.1);
        let changed = make(&docs, &runs).unwrap();
        assert_ne!(made.text, changed.text);
        assert_ne!(made.chart, changed.chart);
    }

    #[test]
    fn the_ratios_of_the_readme_are_those_of_the_page() {
        let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
        let runs = kept();
        for name in ["systems-epyc", "systems-xeon"] {
            for underlay in ["veth", "wire"] {
                let times = |other| {
                    answer(&format!("times {name} {underlay} {} {other} tcp1", rows::WEFT), &runs)
                };
                let others =
                    [rows::VXLAN, rows::NEBULA, rows::WIREGUARD_GO_TAILSCALE, rows::WIREGUARD_GO];
                let cells = others.map(|other| times(other).unwrap()).join(" | ");
                assert!(readme.contains(&cells), "README.md has no {cells} ({name}, {underlay})");
            }
        }
    }

    #[test]
    fn an_order_gives_way_to_its_answer() {
        let text = expand("a {{b c}}, {{d}}\n", |order| Ok(format!("[{order}]\n"))).unwrap();
        assert_eq!(text, "a [b c], [d]\n");
        assert!(expand("a {{b", |_| Ok(String::new())).is_err());
        let error = expand("{{sing}}", |order| answer(order, &BTreeMap::new())).unwrap_err();
        assert!(format!("{error:#}").contains("{{sing}}"), "{error:#}");
    }
}
