//! `./dev demo` and `./dev bench` on a kernel with IPsec, as most users' have it; `net_bench` has the
//! benchmark on the machine's own.

use weft_lab::net::figures::{measured, names};
use weft_lab::net::guest::host::{HiddenModules, has_module};

#[test]
fn the_demo_shows_the_engine_that_this_kernel_takes() -> anyhow::Result<()> {
    let figures = measured(&["demo", "--seconds", "1"])?;
    assert_eq!(names(&figures), ["direct", "vxlan", "weft-esp-kernel"]);
    Ok(())
}

#[test]
fn without_esp_the_demo_shows_the_kernels_ovpn() -> anyhow::Result<()> {
    let esp = ["esp4_offload", "esp6_offload", "esp4", "esp6"];
    let there: Vec<&str> = esp.into_iter().filter(|name| has_module(name)).collect();
    let _hidden = HiddenModules::hide(&there)?;
    let figures = measured(&["demo", "--seconds", "1"])?;
    assert_eq!(names(&figures), ["direct", "vxlan", "weft-ovpn-network-kernel"]);
    Ok(())
}

#[test]
fn the_benchmark_has_a_row_of_the_kernel_engine_in_each_format() -> anyhow::Result<()> {
    let rows = "weft-esp-kernel,weft-ovpn-network-kernel";
    let figures = measured(&["bench", "--quick", "--seconds", "1", "--rows", rows])?;
    assert_eq!(names(&figures).join(","), rows);
    for row in figures["rows"].as_array().into_iter().flatten() {
        assert!(row["tcp1_gbps"].as_f64().is_some_and(|gbps| gbps > 0.0), "{row}");
    }
    Ok(())
}
