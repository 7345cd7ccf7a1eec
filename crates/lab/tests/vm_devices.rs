//! Devices of Weft's where the kernel moves the frames: damage that others do is mended.

use std::time::Duration;

use weft_bench::sandbox::wait_until;
use weft_lab::net::devices;
use weft_lab::net::guest::stage::{is_on, wait_path};
use weft_lab::net::guest::{SETTLE_LIMIT, Stage, by_clock, figure};

const KERNEL: [&str; 2] = ["--engine", "kernel"];

/// Two hosts whose kernels move the frames.
fn pair(options: &[&str]) -> anyhow::Result<Stage> {
    let stage = Stage::pair(options, options)?;
    on_kernel(&stage)?;
    Ok(stage)
}

fn on_kernel(stage: &Stage) -> anyhow::Result<()> {
    let (here, there) = (stage.host(0), stage.host(1));
    for (host, peer) in [(here, there), (there, here)] {
        wait_path(host, peer, "the kernel's path", by_clock(90), is_on("kernel", "kernel"))?;
    }
    Ok(())
}

#[test]
fn damage_to_containers_interfaces_is_mended_on_the_bridge() -> anyhow::Result<()> {
    damaged("bridge")
}

#[test]
fn damage_to_containers_interfaces_is_mended_on_odp() -> anyhow::Result<()> {
    damaged("odp")
}

fn damaged(switch: &str) -> anyhow::Result<()> {
    let stage = pair(&[&KERNEL[..], &["--switch", switch]].concat())?;
    let far = stage.host(1).add_container("far")?;
    let mended = devices::wreck_and_wait(stage.host(0), &far, SETTLE_LIMIT);
    mended.map_err(|error| error.context(stage.diagnosis()))?;
    on_kernel(&stage)
}

#[test]
fn the_engines_devices_come_back_whatever_is_done_to_them() -> anyhow::Result<()> {
    let stage = pair(&KERNEL)?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    for wreck in [
        "link set weft-vxlan down",
        "link set weft-vxlan nomaster",
        "link set weft-vxlan name other",
        "link set weft-vxlan address 02:00:00:00:09:09",
        "link set weft-probe down",
        "link set weft-probe name other",
        "link set weft down",
        "link set weft name other",
    ] {
        devices::damage(stage.host(0).netns(), wreck)?;
        std::thread::sleep(Duration::from_millis(500));
        let taken = wait_until(&format!("{wreck}, mended"), by_clock(60), || {
            [(&one, &two), (&two, &one)].iter().all(|(from, to)| {
                // Found anew by a broadcast, which takes all devices.
                let _ = from.netns().ip("neigh flush dev weft0");
                to.ipv4().is_ok_and(|to| from.ping(to.into()).is_ok())
            })
        });
        let taken = taken.map_err(|error| anyhow::anyhow!("{error}: {}", stage.diagnosis()))?;
        figure(&format!("{wreck}, mended after"), format!("{taken:?}"));
        on_kernel(&stage).map_err(|error| error.context(wreck))?;
    }
    Ok(())
}
