//! The port lock with each engine and switch: what a container sends under other addresses reaches nobody.

use std::time::Duration;

use weft_bench::sandbox::try_wait_until;
use weft_lab::net::guest::Stage;
use weft_lab::net::spoof::Spoofer;
use weft_lab::net::wait_ping;

const SETTLE: Duration = Duration::from_secs(15);

#[test]
fn a_kernel_on_a_bridge() -> anyhow::Result<()> {
    nobody_is_reached(["kernel", "bridge"])
}

#[test]
fn a_kernel_on_a_datapath() -> anyhow::Result<()> {
    nobody_is_reached(["kernel", "odp"])
}

#[test]
fn a_vector_engine_on_a_datapath() -> anyhow::Result<()> {
    nobody_is_reached(["userspace", "odp"])
}

fn nobody_is_reached([engine, switch]: [&str; 2]) -> anyhow::Result<()> {
    let stage = Stage::new(2)?;
    for index in 0..2 {
        stage.launch(index, &["--engine", engine, "--switch", switch])?;
    }
    stage.wait_all_active(2)?;
    let host = stage.host(0);
    let (evil, near) = (host.add_container("evil")?, host.add_container("near")?);
    let far = stage.host(1).add_container("far")?;
    for victim in [&near, &far] {
        wait_ping(&evil, victim.ipv4()?.into(), SETTLE)?;
        wait_ping(&evil, victim.ipv6()?.into(), SETTLE)?;
    }
    let sent = Spoofer::new(&evil, &near)?.reach_nobody(&[&near, &far])?;
    try_wait_until("the status to count all drops", SETTLE, || {
        let shown = host.weft_json(&["status"])?["port_lock"].clone();
        let count = |reason: &str| shown["dropped"][reason].as_u64().unwrap_or_default();
        let of = |reason: &str| sent.iter().filter(|it| **it == reason).count() as u64;
        Ok(shown["on"] == true && sent.iter().all(|reason| count(reason) >= of(reason)))
    })?;
    // The same frames from a container that may send them.
    let open = host.add_container_with("open", &["--allow-macs"])?;
    wait_ping(&open, near.ipv4()?.into(), SETTLE)?;
    let allowed = Spoofer::new(&open, &near)?;
    let broadcast = weft_packet::ethernet::BROADCAST;
    let (_, claim) = allowed.frames(broadcast).swap_remove(5);
    assert_eq!(allowed.arriving(&near, &[claim])?, 1, "ARP under another's address");
    Ok(())
}
