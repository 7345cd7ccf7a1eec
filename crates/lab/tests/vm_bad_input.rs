//! Parts that are missing, refused, taken, deleted or lost: each has a named reason, and the other engine takes
//! over. No daemon exits, and the best path returns once the obstacle is gone.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use weft_bench::sandbox::{Container, Host, progress, wait_until};
use weft_lab::net::guest::host::{HiddenModules, kernel_counter, load, status};
use weft_lab::net::guest::stage::{WRAP, is_active, is_on, says, wait_path};
use weft_lab::net::guest::{
    BACK_LIMIT_S, Flow, LeakWatch, SETTLE_LIMIT, Stage, by_clock, figure, foreign, seed, xfrm,
};
use weft_lab::net::is_soak;

/// A kernel that lacks something is asked again every few seconds; the path must then prove itself.
const PICKED_UP_LIMIT: Duration = Duration::from_secs(12);

/// The daemon that runs on a host must be the same at the end.
struct Alive<'a>(&'a Host, Option<u32>);

impl<'a> Alive<'a> {
    fn of(host: &'a Host) -> Self {
        Self(host, host.daemon_pid())
    }

    fn still(&self) -> anyhow::Result<()> {
        anyhow::ensure!(self.1.is_some() && self.0.daemon_pid() == self.1, "another daemon");
        status(self.0)?;
        Ok(())
    }
}

/// Waits until a host says why it has no kernel engine.
fn wait_missing(host: &Host, reason: &str) -> anyhow::Result<()> {
    let mut seen = Value::Null;
    let what = format!("\"{reason}\" in the status of {}", host.nickname());
    let result = wait_until(&what, PICKED_UP_LIMIT, || {
        seen = status(host).map_or(Value::Null, |it| it["engines_missing"].clone());
        seen["kernel"].as_str().is_some_and(|text| text.contains(reason))
    });
    result.map_err(|error| anyhow::anyhow!("{error}: {seen}"))?;
    Ok(())
}

/// A launched pair must be on the vector engine, and both ends say why. Both ends lack the same parts of the
/// kernel.
fn falls_back(stage: &Stage, reason: &str) -> anyhow::Result<(Container, Container)> {
    both_say(stage, reason, &[reason])
}

/// As [`falls_back`], where only the first host has the obstacle.
fn falls_back_alone(stage: &Stage, reason: &str) -> anyhow::Result<(Container, Container)> {
    both_say(stage, reason, &["peer: ", reason])
}

fn both_say(stage: &Stage, reason: &str, told: &[&str]) -> anyhow::Result<(Container, Container)> {
    let (here, there) = (stage.host(0), stage.host(1));
    wait_missing(here, reason)?;
    let vector = |c: &Value| is_active(c) && c["engine"] == "userspace" && says(c, &[reason]);
    wait_path(here, there, "the vector engine with the reason", SETTLE_LIMIT, vector)?;
    let told = |c: &Value| is_active(c) && says(c, told);
    wait_path(there, here, "the reason at the other end", SETTLE_LIMIT, told)?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    Ok((one, two))
}

/// Once the obstacle is gone the kernel takes over, without a restart and without a packet lost.
fn heals(
    stage: &Stage,
    one: &Container,
    two: &Container,
    remove: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let (here, there) = (stage.host(0), stage.host(1));
    let alive = [Alive::of(here), Alive::of(there)];
    let flow = Flow::start(one, two, Duration::from_millis(10))?;
    flow.wait_more(20, SETTLE_LIMIT)?;
    let start = Instant::now();
    remove()?;
    for (host, peer) in [(here, there), (there, here)] {
        wait_path(host, peer, "the kernel's path", PICKED_UP_LIMIT, is_on("kernel", "kernel"))?;
    }
    figure("picked up after", format!("{:.1} s", start.elapsed().as_secs_f64()));
    flow.wait_more(50, SETTLE_LIMIT)?;
    let report = flow.stop()?;
    report.ensure_no_loss().map_err(|error| error.context(stage.diagnosis()))?;
    anyhow::ensure!(report.doubled().is_empty(), "doubled: {:?}", report.doubled());
    let best = |c: &Value| is_on("kernel", "kernel")(c) && c["reason"].is_null();
    wait_path(here, there, "the path without a reason", by_clock(60), best)?;
    alive.iter().try_for_each(Alive::still)
}

/// Unloaded in this order: later ones are used by earlier ones.
const ESP: [&str; 4] = ["esp4_offload", "esp6_offload", "esp4", "esp6"];
/// The data channel device would stand in for IPsec.
const STANDS_IN: &str = "ovpn";

/// Hides the modules that the kernel's IPsec needs, and the device that would stand in for it.
fn hide_ipsec(names: &[&str]) -> anyhow::Result<[Option<HiddenModules>; 2]> {
    let there = weft_lab::net::guest::host::has_module(STANDS_IN);
    let stand_in = there.then(|| HiddenModules::hide(&[STANDS_IN])).transpose()?;
    Ok([stand_in, Some(hide_those_there(names)?)])
}

fn hide_those_there(names: &[&str]) -> anyhow::Result<HiddenModules> {
    let there: Vec<&str> =
        names.iter().copied().filter(|name| weft_lab::net::guest::host::has_module(name)).collect();
    anyhow::ensure!(!there.is_empty(), "the kernel has none of {names:?}");
    HiddenModules::hide(&there)
}

#[test]
fn esp_loaded_later_is_picked_up_without_a_restart_and_without_loss() -> anyhow::Result<()> {
    let hidden = hide_ipsec(&ESP)?;
    let stage = Stage::pair(&[], &[])?;
    let (one, two) = falls_back(&stage, "kernel without ESP")?;
    heals(&stage, &one, &two, || {
        drop(hidden);
        load("esp4")?;
        load("esp6")
    })
}

#[test]
fn ovpn_loaded_later_is_picked_up_without_a_restart_and_without_loss() -> anyhow::Result<()> {
    let hidden = hide_those_there(&[STANDS_IN])?;
    let stage = Stage::pair(&OVPN, &OVPN)?;
    let (one, two) = falls_back(&stage, "kernel without ovpn")?;
    heals(&stage, &one, &two, || {
        drop(hidden);
        load(STANDS_IN)
    })
}

#[test]
fn a_kernel_without_vxlan_is_named() -> anyhow::Result<()> {
    let hidden = hide_those_there(&["vport_vxlan", "vxlan"])?;
    let stage = Stage::pair(&[], &[])?;
    let (one, two) = falls_back(&stage, "kernel without VXLAN")?;
    heals(&stage, &one, &two, || {
        drop(hidden);
        load("vxlan")
    })
}

#[test]
fn without_open_vswitch_the_bridge_is_taken_and_the_reason_named() -> anyhow::Result<()> {
    let _hidden = hide_those_there(&["vport_vxlan", "vport_geneve", "vport_gre", "openvswitch"])?;
    let odp = ["--engine", "kernel", "--switch", "odp"];
    let stage = Stage::pair(&odp, &odp)?;
    let host = stage.host(0);
    let status = status(host)?;
    assert_eq!(status["switch"], "bridge", "{status}");
    let reason = status["switch_reason"].as_str().unwrap_or_default();
    assert!(reason.contains("kernel without Open vSwitch"), "{status}");
    let text = host.weft(&["status"])?.success()?.stdout;
    assert!(text.contains("Open vSwitch"), "{text}");
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    Ok(())
}

/// Modules where AES-GCM is one: newer kernels have it built in.
const AES: [&str; 3] = ["aesni_intel", "gcm", "aes_generic"];
const CHACHA: &[&str] = &["chacha20poly1305"];
/// A module that both ciphers of ESP need.
const IV: &[&str] = &["seqiv"];

#[test]
fn a_kernel_without_aes_gcm_takes_the_other_cipher() -> anyhow::Result<()> {
    takes_the_other(&AES, &[], "chacha20-poly1305")
}

#[test]
fn a_kernel_without_the_preferred_cipher_takes_the_other() -> anyhow::Result<()> {
    takes_the_other(CHACHA, &["--cipher", "chacha20-poly1305"], "aes-256-gcm")
}

fn takes_the_other(modules: &[&str], options: &[&str], other: &str) -> anyhow::Result<()> {
    let _hidden = hide_those_there(modules)?;
    let stage = Stage::pair(options, options)?;
    let of_other = |c: &Value| is_on("kernel", "kernel")(c) && c["cipher"] == other;
    wait_path(stage.host(0), stage.host(1), "the other cipher", SETTLE_LIMIT, of_other)?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    Ok(())
}

#[test]
fn a_kernel_without_either_cipher_is_named() -> anyhow::Result<()> {
    let hidden = hide_ipsec(IV)?;
    let stage = Stage::pair(&[], &[])?;
    let (one, two) = falls_back(&stage, "cipher missing")?;
    heals(&stage, &one, &two, || {
        drop(hidden);
        IV.iter().try_for_each(|module| load(module))
    })
}

/// A program that the whole guest has not while this lives.
struct HiddenProgram(PathBuf);

impl HiddenProgram {
    fn hide(name: &str) -> anyhow::Result<Self> {
        let places = ["/usr/sbin", "/usr/bin"].map(|folder| Path::new(folder).join(name));
        let place = places.into_iter().find(|place| place.exists());
        let place = place.ok_or_else(|| anyhow::anyhow!("the guest has no {name}"))?;
        std::fs::rename(&place, place.with_extension("hidden"))?;
        Ok(Self(place))
    }
}

impl Drop for HiddenProgram {
    fn drop(&mut self) {
        let _ = std::fs::rename(self.0.with_extension("hidden"), &self.0);
    }
}

#[test]
fn without_nft_nothing_is_moved_by_the_kernel() -> anyhow::Result<()> {
    let hidden = HiddenProgram::hide("nft")?;
    let stage = Stage::pair(&[], &[])?;
    let (one, two) = falls_back(&stage, "nft missing")?;
    assert!(xfrm::own_states(stage.host(0).netns())?.is_empty(), "SAs without a guard");
    heals(&stage, &one, &two, || {
        drop(hidden);
        Ok(())
    })
}

#[test]
fn without_a_capability_the_daemon_runs_on_what_it_may_do() -> anyhow::Result<()> {
    let stage = Stage::wrapped(2)?;
    let without = "setpriv --bounding-set=-net_raw --inh-caps=-net_raw";
    stage.launch_with(0, &[], &[(WRAP, without)])?;
    stage.launch(1, &[])?;
    let (here, there) = (stage.host(0), stage.host(1));
    let vector = |c: &Value| is_active(c) && c["engine"] == "userspace";
    let connection = wait_path(here, there, "the vector engine", SETTLE_LIMIT, vector)?;
    let missing = status(here)?["engines_missing"]["kernel"].clone();
    let text = missing.as_str().unwrap_or_default();
    assert!(text.contains("engine error") && text.contains("permitted"), "{missing}; {connection}");
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    Ok(())
}

/// An obstacle in a host's namespace, the words that name it, and the commands to put and remove it.
struct Obstacle {
    name: &'static str,
    /// How both daemons are launched.
    options: &'static [&'static str],
    put: &'static str,
    remove: &'static str,
    reason: &'static str,
}

const OVPN: [&str; 2] = ["--format", "ovpn"];
const OBSTACLES: [Obstacle; 7] = [
    Obstacle {
        name: "a foreign table has the guard's name",
        options: &[],
        put: "nft 'add table inet weft-guard; add chain inet weft-guard other'",
        remove: "nft delete table inet weft-guard",
        reason: "weft-guard",
    },
    Obstacle {
        name: "a foreign device has the VXLAN device's name",
        options: &[],
        put: "ip link add weft-vxlan type dummy",
        remove: "ip link del weft-vxlan",
        reason: "weft-vxlan",
    },
    Obstacle {
        name: "a foreign device has the probes' device's name",
        options: &[],
        put: "ip link add weft-probe type dummy",
        remove: "ip link del weft-probe",
        reason: "weft-probe",
    },
    Obstacle {
        name: "a foreign VXLAN device has port and VNI",
        options: &[],
        put: "ip link add other type vxlan id 1 dstport 6787 local 192.0.2.1; ip link set other up",
        remove: "ip link del other",
        reason: "engine error",
    },
    Obstacle {
        name: "another program has the port of ESP in UDP",
        options: &[],
        put: "socat -u UDP4-RECV:6785 OPEN:/dev/null & sleep 2",
        remove: "kill $(ss -Hlunp 'sport = 6785' | grep -o 'pid=[0-9]*' | cut -d= -f2 | sort -u)",
        reason: "6785",
    },
    Obstacle {
        name: "a foreign device has the data channel device's name",
        options: &OVPN,
        put: "ip link add weft-ovpn type dummy",
        remove: "ip link del weft-ovpn",
        reason: "weft-ovpn",
    },
    Obstacle {
        name: "another program has the port of the data channel",
        options: &OVPN,
        put: "socat -u UDP4-RECV:6786 OPEN:/dev/null & sleep 2",
        remove: "kill $(ss -Hlunp 'sport = 6786' | grep -o 'pid=[0-9]*' | cut -d= -f2 | sort -u)",
        reason: "6786",
    },
];

#[test]
fn names_and_ports_that_others_have_are_named_and_taken_into_use_once_free() -> anyhow::Result<()> {
    let mut failures = Vec::new();
    // Each takes most of a minute: two that differ from run to run, all in a soak.
    let first = usize::try_from(seed()? % OBSTACLES.len() as u64)?;
    let count = if is_soak() { OBSTACLES.len() } else { 2 };
    for obstacle in OBSTACLES.iter().cycle().skip(first).take(count) {
        progress::step(obstacle.name);
        if let Err(error) = obstructed(obstacle) {
            failures.push(format!("{}: {error:?}", obstacle.name));
        }
    }
    anyhow::ensure!(failures.is_empty(), "{}", failures.join("\n\n"));
    Ok(())
}

fn obstructed(obstacle: &Obstacle) -> anyhow::Result<()> {
    let stage = Stage::new(2)?;
    let netns = stage.host(0).netns().clone();
    let script = |text: &str| netns.exec(&["bash", "-c", &format!("({text}) >/dev/null 2>&1")]);
    script(obstacle.put)?.success()?;
    let before = foreign::everything(&netns)?;
    let stage = stage.launched(&[obstacle.options, obstacle.options])?;
    let (one, two) = falls_back_alone(&stage, obstacle.reason)?;
    let now = foreign::everything(&netns)?;
    let gone: Vec<_> = before.lines().filter(|line| !now.lines().any(|it| it == *line)).collect();
    anyhow::ensure!(gone.is_empty(), "touched: {gone:?}");
    heals(&stage, &one, &two, || {
        script(obstacle.remove)?.success()?;
        Ok(())
    })
}

#[test]
fn devices_deleted_by_hand_come_back() -> anyhow::Result<()> {
    let kernel = ["--engine", "kernel"];
    let stage = Stage::pair(&kernel, &kernel)?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    let host = stage.host(0);
    let alive = Alive::of(host);
    let watch = LeakWatch::start(&stage)?;
    for device in ["weft-vxlan", "weft-vxlan6", "weft-probe", "weft-probe6", "weft"] {
        let flow = Flow::start(&one, &two, Duration::from_millis(10))?;
        flow.wait_more(20, SETTLE_LIMIT)?;
        let before = kernel_counter(host, "devices_restored")?;
        let at = Instant::now();
        host.netns().ip(&format!("link del {device}"))?;
        wait_until(&format!("{device} to come back"), Duration::from_secs(5), || {
            host.netns().ip(&format!("link show {device}")).is_ok()
        })?;
        flow.wait_more(50, SETTLE_LIMIT)?;
        let gap = flow.stop()?.longest_gap(at);
        figure(&format!("{device} deleted"), format!("{} ms without a packet", gap.as_millis()));
        assert!(kernel_counter(host, "devices_restored")? > before, "{device}");
        let on = is_on("kernel", "kernel");
        wait_path(host, stage.host(1), "the path", SETTLE_LIMIT, on)?;
        stage.reach(&two, &one)?;
    }
    alive.still()?;
    assert_eq!(watch.finish()?.readable, 0, "overlay packets could be read");
    Ok(())
}

#[test]
fn a_device_that_the_kernel_says_is_busy_is_named_and_made_again() -> anyhow::Result<()> {
    let stage = Stage::pair(&[], &[])?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    let (here, there) = (stage.host(0), stage.host(1));
    let kernel = is_on("kernel", "kernel");
    wait_path(here, there, "the kernel's path", SETTLE_LIMIT, &kernel)?;
    let alive = [Alive::of(here), Alive::of(there)];
    // A device has one master: with another, the switch cannot have it (EBUSY).
    // The daemon stands still meanwhile, since it would give the device its master back.
    let pid = alive[0].1.unwrap_or_default();
    let script = format!(
        "kill -STOP {pid}; ip link set weft-vxlan nomaster && ip link add other link weft-vxlan type macvlan; \
         result=$?; kill -CONT {pid}; exit $result"
    );
    here.netns().exec(&["bash", "-c", &script])?.success()?;
    wait_missing(here, "busy")?;
    // The other device hung on this one, and goes with it.
    wait_path(here, there, "the kernel's path again", by_clock(BACK_LIMIT_S), &kernel)?;
    stage.reach(&one, &two)?;
    alive.iter().try_for_each(Alive::still)
}

#[test]
fn lost_notifications_are_made_good_by_looking() -> anyhow::Result<()> {
    let kernel = ["--engine", "kernel"];
    let stage = Stage::pair(&kernel, &kernel)?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    let host = stage.host(0);
    let alive = Alive::of(host);
    let pid = alive.1.unwrap_or_default().to_string();
    // More events than its sockets hold, while it is stopped, and its own SAs lost among them.
    let batch = stage.directory().join("batch");
    let state = |verb: &str, number: u32| {
        let id = format!("src 198.51.100.1 dst 198.51.100.2 proto esp spi {:#x}", 0x2000 + number);
        let rest = " reqid 77 mode transport aead rfc4106(gcm(aes)) \
                    0x0102030405060708090a0b0c0d0e0f1011121314 128";
        format!("xfrm state {verb} {id}{}\n", if verb == "add" { rest } else { "" })
    };
    let text: String =
        ["add", "delete"].iter().flat_map(|verb| (0..1_000).map(|n| state(verb, n))).collect();
    std::fs::write(&batch, text)?;
    let script = format!(
        "kill -STOP {pid}; ip -batch {batch}; ip xfrm state flush; ip xfrm policy flush; \
         ip -batch {batch}; for n in {{1..60}}; do ip link add lost$n type dummy; ip link del lost$n; \
         done; kill -CONT {pid}",
        batch = batch.display()
    );
    host.netns().exec(&["bash", "-c", &script])?.success()?;
    let start = Instant::now();
    stage.reach(&one, &two)?;
    figure("healed after lost notifications", format!("{:.1} s", start.elapsed().as_secs_f64()));
    wait_path(host, stage.host(1), "the path", SETTLE_LIMIT, is_on("kernel", "kernel"))?;
    alive.still()
}

#[test]
fn an_engine_that_is_forced_and_missing_is_said_and_not_replaced() -> anyhow::Result<()> {
    let hidden = hide_ipsec(&ESP)?;
    let stage = Stage::new(2)?;
    for index in 0..2 {
        stage.launch(index, &["--engine", "kernel"])?;
    }
    let (here, there) = (stage.host(0), stage.host(1));
    let failed = |c: &Value| c["state"] == "failed" && says(c, &["kernel without ESP"]);
    wait_path(here, there, "the failure", SETTLE_LIMIT, failed)?;
    let status = status(here)?;
    assert_eq!(status["engines_missing"]["userspace"], "forced by configuration", "{status}");
    drop(hidden);
    for name in ["esp4", "esp6"] {
        load(name)?;
    }
    wait_path(here, there, "the kernel's path", PICKED_UP_LIMIT, is_on("kernel", "kernel"))?;
    Ok(())
}
