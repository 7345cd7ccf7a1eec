//! `weft demo` and `weft bench` on a kernel with IPsec, as most users' have it: the namespace lab runs
//! them on one without.

use std::path::Path;
use std::process::Command;

use serde_json::Value;
use weft_lab::net::guest::host::{HiddenModules, has_module};

/// Runs the program and returns the JSON that it wrote.
fn figures(words: &[&str]) -> anyhow::Result<Value> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("figures.json");
    let output = Command::new(Path::new(&std::env::var("WEFT_BIN")?))
        .args(words)
        .arg("--json")
        .arg(&file)
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "weft {}: {said}", words.join(" "));
    Ok(serde_json::from_slice(&std::fs::read(&file)?)?)
}

fn names(figures: &Value) -> Vec<&str> {
    let rows = figures["rows"].as_array().into_iter().flatten();
    rows.filter_map(|row| row["name"].as_str()).collect()
}

#[test]
fn the_demo_shows_the_engine_that_this_kernel_takes() -> anyhow::Result<()> {
    let figures = figures(&["demo", "--seconds", "1"])?;
    assert_eq!(names(&figures), ["direct", "vxlan", "weft-esp-kernel"]);
    Ok(())
}

#[test]
fn without_esp_the_demo_shows_the_kernels_ovpn() -> anyhow::Result<()> {
    let esp = ["esp4_offload", "esp6_offload", "esp4", "esp6"];
    let there: Vec<&str> = esp.into_iter().filter(|name| has_module(name)).collect();
    let _hidden = HiddenModules::hide(&there)?;
    let figures = figures(&["demo", "--seconds", "1"])?;
    assert_eq!(names(&figures), ["direct", "vxlan", "weft-ovpn-network-kernel"]);
    Ok(())
}

#[test]
fn the_benchmark_has_a_row_of_each_engine_and_format() -> anyhow::Result<()> {
    let rows = "weft-esp-userspace,weft-esp-kernel,weft-ovpn-network-kernel";
    let figures = figures(&["bench", "--quick", "--seconds", "1", "--rows", rows])?;
    assert_eq!(names(&figures).join(","), rows);
    for row in figures["rows"].as_array().into_iter().flatten() {
        assert!(row["tcp1_gbps"].as_f64().is_some_and(|gbps| gbps > 0.0), "{row}");
    }
    Ok(())
}
