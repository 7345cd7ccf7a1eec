//! A kernel without IPv6 (`ipv6.disable=1`): IPv4 works alone, by every engine and switch, and `weft ps` says
//! so once.

use std::time::Duration;

use anyhow::Context;
use weft_bench::sandbox::Host;
use weft_lab::net::guest::stage::{is_on, wait_path};
use weft_lab::net::guest::{SETTLE_LIMIT, Stage};

/// For so long nothing may be tried again and again, in seconds: longer than anything is looked at.
const QUIET_S: u64 = 45;

#[test]
fn by_the_kernel_engine() -> anyhow::Result<()> {
    works("kernel", &[])
}

#[test]
fn by_the_kernel_engine_on_a_datapath() -> anyhow::Result<()> {
    works("kernel", &["--switch", "odp"])
}

#[test]
fn by_the_vector_engine() -> anyhow::Result<()> {
    works("userspace", &["--engine", "userspace"])
}

fn works(engine: &'static str, options: &[&str]) -> anyhow::Result<()> {
    anyhow::ensure!(
        !std::path::Path::new("/proc/sys/net/ipv6").exists(),
        "this kernel has IPv6: boot it with ipv6.disable=1"
    );
    let stage = Stage::new(2)?.launched(&[options; 2])?;
    let (here, there) = (stage.host(0), stage.host(1));
    wait_path(here, there, "the engine asked for", SETTLE_LIMIT, is_on(engine, engine))?;
    let (one, two) = (here.add_container("one")?, there.add_container("two")?);
    stage.reach(&one, &two)?;
    let listed = here.weft(&["ps"])?.success()?.stdout;
    let said = listed.matches("no IPv6: the kernel has none").count();
    assert_eq!(said, 1, "{listed}");
    assert!(one.addresses()?.iter().all(std::net::IpAddr::is_ipv4), "{:?}", one.addresses()?);
    let before = complaints(here);
    assert_eq!(before, Vec::<String>::new());
    let length = here.log().len();
    std::thread::sleep(Duration::from_secs(QUIET_S));
    stage.reach(&one, &two)?;
    let log = here.log();
    let later = log.get(length..).context("the log became shorter")?;
    assert!(!later.contains("IPv6") && complaints(here).is_empty(), "{later}");
    Ok(())
}

fn complaints(host: &Host) -> Vec<String> {
    let is_complaint = |line: &&str| line.contains(" WARN ") || line.contains(" ERROR ");
    host.log().lines().filter(is_complaint).map(str::to_owned).collect()
}
