//! `./dev bench` on this kernel: short runs, whose figures only show that there are figures.

use serde_json::Value;
use weft_lab::net::figures::{measured, names};

/// The least share of its rate alone that each of several like senders keeps; a third would be fair.
const KEPT: f64 = 0.1;

/// Checks that each figure of a row of the main table exists and is above zero; the loss of datagrams may be
/// zero. The report's test covers which figures exist.
fn every_figure(row: &Value) -> anyhow::Result<()> {
    let figures: Vec<_> = row.as_object().into_iter().flatten().collect();
    anyhow::ensure!(!figures.is_empty(), "no row: {row}");
    for (name, figure) in figures {
        let (low, high) =
            if name == "udp_loss" { (0.0, 0.01) } else { (f64::MIN_POSITIVE, f64::MAX) };
        let is_measured = match figure.as_f64() {
            Some(figure) => (low..high).contains(&figure),
            None => !figure.is_null(),
        };
        anyhow::ensure!(is_measured, "no {name} in {row}");
    }
    Ok(())
}

#[test]
fn every_column_has_a_figure_on_either_underlay() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let [chart, table] = ["chart.svg", "table.md"].map(|name| directory.path().join(name));
    let row = "weft-esp-userspace";
    let once = ["bench", "--rounds", "1", "--seconds", "1", "--underlay", "both", "--rows", row];
    let files = ["--svg", &chart.to_string_lossy(), "--markdown", &table.to_string_lossy()];
    let figures = measured(&[&once[..], &files].concat())?;
    let rows = figures["rows"].as_array().cloned().unwrap_or_default();
    let underlays: Vec<_> = rows.iter().map(|row| row["underlay"].as_str()).collect();
    assert_eq!(underlays, [Some("veth"), Some("wire")]);
    rows.iter().try_for_each(every_figure)?;
    let (chart, table) = (std::fs::read_to_string(chart)?, std::fs::read_to_string(table)?);
    assert!(chart.contains("<svg") && chart.contains(row), "{chart}");
    assert_eq!(table.matches(&format!("| {row} ")).count(), 2, "{table}");
    assert!(table.contains("iperf3 -J -c SERVER"), "the commands are printed: {table}");
    Ok(())
}

#[test]
fn the_table_of_data_channel_devices_has_a_device() -> anyhow::Result<()> {
    let table =
        ["bench", "--table", "dco", "--rounds", "1", "--seconds", "1", "--underlay", "veth"];
    let rows = ["--rows", "weft-ovpn-userspace"];
    let figures = measured(&[&table[..], &rows].concat())?;
    assert_eq!(names(&figures), rows[1..]);
    every_figure(&figures["rows"][0])
}

/// Three hosts send to a fourth. First each sends a stream; then one sends eight streams, and another a flood of
/// small datagrams, which nothing slows down.
#[test]
fn hosts_that_send_at_once_each_keep_a_share() -> anyhow::Result<()> {
    // Medians: in a run of a second, one repetition after a timeout of TCP decides the result.
    let table = ["bench", "--table", "fair", "--rounds", "3", "--seconds", "1"];
    let figures = measured(&[&table[..], &["--underlay", "veth"]].concat())?;
    let scenes = figures["fair"].as_array().cloned().unwrap_or_default();
    let shares = |scene: &Value| scene["shares"].as_array().cloned().unwrap_or_default();
    assert_eq!(scenes.iter().filter(|scene| shares(scene).len() == 3).count(), 2, "{figures}");
    for scene in &scenes {
        assert!(scene["jain"].as_f64().is_some_and(|jain| jain > 0.0), "{scene}");
        for share in shares(scene) {
            let (alone, together) = (share["alone"].as_f64(), share["together"].as_f64());
            let Some((alone, together)) = alone.zip(together) else { continue };
            let least = if scene["scene"] == "alike" { alone * KEPT } else { 0.0 };
            assert!(together > least, "{together} of {alone}: {scene}");
        }
    }
    Ok(())
}

#[test]
fn attach_and_detach_are_measured_with_few_containers_and_with_many() -> anyhow::Result<()> {
    let figures = measured(&["bench", "--table", "attach", "--quick", "--rounds", "1"])?;
    let rows = figures["attach"].as_array().cloned().unwrap_or_default();
    let held: Vec<_> = rows.iter().map(|row| row["held"].as_u64()).collect();
    assert_eq!(held, [Some(0), Some(100)]);
    for row in &rows {
        for step in ["attach", "detach", "attach_command", "detach_command", "by_hand"] {
            let median = row[format!("{step}_ms")]["median"].as_f64();
            assert!(median.is_some_and(|median| median > 0.0), "{step}: {row}");
        }
    }
    Ok(())
}

#[test]
fn the_gateway_is_measured_beside_a_stock_server() -> anyhow::Result<()> {
    let figures = measured(&["bench", "--table", "gateway", "--quick"])?;
    let rows = figures["gateway"].as_array().cloned().unwrap_or_default();
    let row = |name: &str| rows.iter().find(|row| row["name"] == name);
    for name in ["handshakes", "one_up_cpu", "one_down_cpu", "four_up", "four_down", "own_up"] {
        let ratio = row(name).and_then(|row| row["ratio"]["median"].as_f64());
        assert!(ratio.is_some_and(|ratio| ratio > 0.0), "{name}: {figures}");
    }
    let weft = |name: &str| row(name).and_then(|row| row["weft"]["median"].as_f64());
    assert_eq!(weft("flood_clients"), Some(0.0), "a flood has left state: {figures}");
    assert!(weft("idle_clients") > Some(0.0) && weft("idle_memory") > Some(0.0), "{figures}");
    assert!(weft("idle_late").is_some() && weft("flood_ping") > Some(0.0), "{figures}");
    Ok(())
}
