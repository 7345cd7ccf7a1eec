//! `weft doctor`: which features Weft can use on this host, how fast its processor is, and what to do about
//! missing ones.
//!
//! It does not change the host. It tests the offloads on a temporary device.

mod firewall;
mod host;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::Serialize;
use weft_crypto::{Cipher, SizeClass};
use weft_daemon::config::EngineChoice;
use weft_daemon::narrow_link;
use weft_engine::race::{self, Winners};
use weft_io::offload::{self, Verdict};
use weft_io::redirect::MacSet;
use weft_io::steer;
use weft_kernel::engine::SwitchKind;

use self::host::Module;
pub use self::host::{cpu_model, find_program};

/// The plaintext on which the AEADs are measured, in bytes: that of a full datagram on 1500.
const AEAD_BYTES: usize = SizeClass::Medium.typical_bytes();
/// How long the measurement of all AEADs takes together, in milliseconds.
const RACE_MS: u64 = 1_000;
/// Kernels that corrupt headers and checksums of GSO batches for some network drivers (reference: Tailscale's
/// issue 19777; 7.1.5 does not). Loopback has no such driver, so no test here detects it.
const SPOILING_RUNS: RangeInclusive<[u32; 3]> = [7, 0, 0]..=[7, 1, 4];

/// Options of `weft doctor`.
#[derive(Debug, Clone, clap::Args)]
pub struct DoctorOptions {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Present and working.
    Ok,
    /// Missing, but Weft runs slower or with fewer features.
    Without,
    /// Weft cannot run.
    Missing,
    /// The host does not provide this information.
    Unknown,
}

/// One line: the subject, its state, and advice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The subject of the check.
    pub name: String,
    /// Its state.
    pub state: State,
    /// The result in words.
    pub detail: String,
    /// Advice, if there is any.
    pub advice: Option<String>,
}

/// The speed of one core with an AEAD.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AeadFigure {
    /// The AEAD.
    pub cipher: Cipher,
    /// The library that was measured.
    pub library: &'static str,
    /// Plaintext of one packet, bytes.
    pub bytes: usize,
    /// Gbit/s sealed.
    pub sealed_gbps: f64,
    /// Gbit/s opened.
    pub opened_gbps: f64,
    /// Whether the engine seals packets of this size with it, by the race at start.
    pub seals: bool,
    /// Whether the engine opens them with it.
    pub opens: bool,
}

/// All findings.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Diagnosis {
    /// Whether Weft can run here.
    pub ready: bool,
    /// The findings, one a line.
    pub findings: Vec<Finding>,
    /// The AEADs, per core.
    pub aead: Vec<AeadFigure>,
}

/// Examines this host.
#[must_use]
pub fn examine() -> Diagnosis {
    let kernel = host::Kernel::read();
    let aead = measure_aeads();
    let mut findings = vec![
        Finding::new("kernel", State::Ok, format!("Linux {}", kernel.release)),
        processor(&aead),
        permission(host::may_change_networks()),
    ];
    findings.extend(tap_and_offloads());
    findings.extend(drivers(&kernel.release));
    findings.extend(PARTS.iter().map(|part| part.look_at(&kernel)));
    let has_nft = find_program("nft").is_some();
    findings.push(nft(has_nft));
    if has_nft {
        let module = kernel.module("esp4", "CONFIG_INET_ESP");
        findings.extend(firewall::look(matches!(module, Module::There | Module::OnDisk)));
    }
    findings.push(landlock(weft_daemon::has_landlock()));
    findings.push(link(host::link_mtu()));
    let ready = findings.iter().all(|finding| finding.state != State::Missing);
    Diagnosis { ready, findings, aead }
}

impl Diagnosis {
    /// Adds the running daemon's findings: foreign rules that do not see all frames, warnings, and sandboxing
    /// that is off.
    pub fn add_running(
        &mut self,
        passed_by: &[String],
        warnings: &[String],
        hardening: &BTreeMap<String, String>,
    ) {
        const ADVICE: &str = "if it must see them: weft launch --port-mode bridge, which gives containers new interfaces";
        let finding =
            |line: &String| Finding::new("passed by", State::Without, line.clone()).advise(ADVICE);
        self.findings.extend(passed_by.iter().map(finding));
        let warned = |line: &String| Finding::new("this network", State::Without, line.clone());
        self.findings.extend(warnings.iter().map(warned));
        let off = hardening.iter().filter(|(_, state)| state.starts_with("off"));
        let off = off.map(|(means, state)| {
            Finding::new("this daemon", State::Without, format!("{means} {state}"))
        });
        self.findings.extend(off);
    }
}

impl Finding {
    fn new(name: &str, state: State, detail: impl Into<String>) -> Self {
        Self { name: name.to_owned(), state, detail: detail.into(), advice: None }
    }

    fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }
}

fn measure_aeads() -> Vec<AeadFigure> {
    let laps = race::run(Duration::from_millis(RACE_MS));
    let winners = race::winners(&laps);
    let medium = laps.iter().filter(|lap| lap.class == SizeClass::Medium);
    let figures = medium.filter_map(|lap| {
        let Winners { cipher, sealing, opening } =
            *winners.iter().find(|winners| winners.cipher == lap.cipher)?;
        Some(AeadFigure {
            cipher,
            library: lap.library.name(),
            bytes: AEAD_BYTES,
            sealed_gbps: gbps(lap.seal_ns?),
            opened_gbps: gbps(lap.open_ns?),
            seals: sealing.of(SizeClass::Medium) == lap.library,
            opens: opening.of(SizeClass::Medium) == lap.library,
        })
    });
    figures.collect()
}

/// Gbit/s with one decimal, from the nanoseconds that [`AEAD_BYTES`] take.
fn gbps(ns: f64) -> f64 {
    let bits = f64::from(u32::try_from(AEAD_BYTES * 8).unwrap_or(u32::MAX));
    (bits / ns * 10.0).round() / 10.0
}

fn processor(aead: &[AeadFigure]) -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let model = host::cpu_model();
    let features = host::cpu_features();
    let detail = format!("{} cores of {}; {}", cores, model, features.join(" "));
    let speed = |cipher| {
        let seal = aead.iter().filter(|figure| figure.cipher == cipher);
        seal.map(|figure| figure.sealed_gbps).fold(0.0, f64::max)
    };
    let slower = speed(Cipher::Aes256Gcm) < speed(Cipher::ChaCha20Poly1305);
    if slower {
        let advice =
            "chacha20-poly1305 is faster on this processor: weft launch --cipher chacha20-poly1305";
        return Finding::new("processor", State::Without, detail).advise(advice);
    }
    Finding::new("processor", State::Ok, detail)
}

fn permission(granted: bool) -> Finding {
    match granted {
        true => Finding::new("permission", State::Ok, "this process may configure networks"),
        false => Finding::new("permission", State::Missing, "this process lacks CAP_NET_ADMIN")
            .advise("run as root, or give the container the capability NET_ADMIN"),
    }
}

/// The link to other hosts, by its MTU.
fn link(mtu: Option<u16>) -> Finding {
    let Some(mtu) = mtu else {
        return Finding::new("link", State::Unknown, "no link to other hosts is up");
    };
    match narrow_link(mtu, EngineChoice::Auto, SwitchKind::Bridge) {
        None => Finding::new("link", State::Ok, format!("MTU {mtu}")),
        Some(narrow) => Finding::new("link", State::Without, narrow)
            .advise("raise the MTU of the link or tunnel"),
    }
}

/// The TAP device, and the offloads tested on one.
fn tap_and_offloads() -> Vec<Finding> {
    let offloads = match offload::self_test() {
        Ok(offloads) => offloads,
        Err(error) => {
            let advice = "load it (modprobe tun), give the container /dev/net/tun, or run as root";
            return vec![
                Finding::new("TAP device", State::Missing, error.to_string()).advise(advice),
            ];
        }
    };
    let segments = offloads.run_segments_max;
    let slower =
        "boot a newer kernel: without it the vector engine works at a fraction of the speed";
    let mut findings = vec![Finding::new("TAP device", State::Ok, "/dev/net/tun works")];
    for (name, verdict, what) in [
        ("TCP super-packets", &offloads.tap_tso, "to and from the TAP device".to_owned()),
        ("UDP super-packets", &offloads.tap_uso, "to the TAP device".to_owned()),
        ("UDP_SEGMENT", &offloads.udp_segment, format!("{segments} datagrams a run")),
        ("UDP_GRO", &offloads.udp_gro, "runs on receipt".to_owned()),
    ] {
        let detail = format!("{verdict} ({what})");
        findings.push(match verdict {
            Verdict::Works => Finding::new(name, State::Ok, detail),
            Verdict::Untested(_) => Finding::new(name, State::Unknown, detail)
                .advise("bring the loopback device up: ip link set lo up"),
            Verdict::Absent | Verdict::Broken(_) => {
                Finding::new(name, State::Without, detail).advise(slower)
            }
        });
    }
    findings.push(match steer::FrameSteering::new() {
        Ok(_) => Finding::new("queue by container", State::Ok, "eBPF picks it on the TAP device"),
        Err(error) => Finding::new("queue by container", State::Without, error.to_string()).advise(
            "give the process CAP_BPF: without it a container that sends too much fills the queues of others",
        ),
    });
    findings.push(match MacSet::new().and_then(|macs| macs.self_test()) {
        Ok(()) => {
            Finding::new("ways past the switch", State::Ok, "direct ports and shortcuts (tcx)")
        }
        Err(error) => Finding::new("ways past the switch", State::Without, error.to_string())
            .advise("use Linux 6.6 or later, with CAP_BPF: without it all frames take the switch"),
    });
    findings
}

/// A warning for kernels that corrupt GSO batches with some drivers, which no test at start detects.
fn drivers(release: &str) -> Option<Finding> {
    let version = offload::kernel_version(release)?;
    SPOILING_RUNS.contains(&version).then(|| {
        let detail = format!("Linux {release} corrupts runs with some network drivers");
        Finding::new("UDP_SEGMENT by driver", State::Unknown, detail).advise(
            "use Linux 7.1.5 or later; until then, if few of this host's packets arrive: weft launch --no-offloads",
        )
    })
}

/// A part of the kernel, and its use.
struct Part {
    module: &'static str,
    option: &'static str,
    use_of_it: &'static str,
    /// Nothing works without it.
    needed: bool,
}

const PARTS: [Part; 9] = [
    Part { module: "bridge", option: "CONFIG_BRIDGE", use_of_it: "the switch", needed: true },
    Part { module: "veth", option: "CONFIG_VETH", use_of_it: "attaching containers", needed: true },
    Part { module: "vxlan", option: "CONFIG_VXLAN", use_of_it: "kernel engine", needed: false },
    Part {
        module: "xfrm_user",
        option: "CONFIG_XFRM_USER",
        use_of_it: "kernel engine",
        needed: false,
    },
    Part {
        module: "esp4",
        option: "CONFIG_INET_ESP",
        use_of_it: "kernel engine, IPv4",
        needed: false,
    },
    Part {
        module: "esp6",
        option: "CONFIG_INET6_ESP",
        use_of_it: "kernel engine, IPv6",
        needed: false,
    },
    Part {
        module: "nf_tables",
        option: "CONFIG_NF_TABLES",
        use_of_it: "the guard of the kernel engine",
        needed: false,
    },
    Part {
        module: "openvswitch",
        option: "CONFIG_OPENVSWITCH",
        use_of_it: "--switch odp",
        needed: false,
    },
    Part {
        module: "ovpn",
        option: "CONFIG_OVPN",
        use_of_it: "OpenVPN in the kernel (Linux 6.16)",
        needed: false,
    },
];

impl Part {
    fn look_at(&self, kernel: &host::Kernel) -> Finding {
        self.finding(kernel.module(self.module, self.option))
    }

    fn finding(&self, module: Module) -> Finding {
        let Self { module: name, option, use_of_it, needed } = self;
        let lacking = if *needed { State::Missing } else { State::Without };
        let (state, found, advice) = match module {
            Module::There => (State::Ok, "in the kernel", None),
            Module::OnDisk => (State::Ok, "a module, loaded when needed", None),
            Module::NotInstalled => {
                let advice = format!(
                    "the kernel was built with {name} as a module: install the package that holds it"
                );
                (lacking, "a module that is not installed", Some(advice))
            }
            Module::Absent => {
                let without = if *needed { "" } else { "; Weft runs without it" };
                (lacking, "absent", Some(format!("use a kernel built with {option}{without}")))
            }
            Module::Unknown => (State::Unknown, "the kernel does not say", None),
        };
        let finding = Finding::new(name, state, format!("{found} ({use_of_it})"));
        advice.into_iter().fold(finding, Finding::advise)
    }
}

fn nft(found: bool) -> Finding {
    match found {
        true => Finding::new("nft", State::Ok, "installed (the guard of the kernel engine)"),
        false => Finding::new(
            "nft",
            State::Without,
            "not installed (no kernel engine without its guard)",
        )
        .advise("install it: apt-get install nftables"),
    }
}

fn landlock(found: Result<(), &str>) -> Finding {
    match found {
        Ok(()) => Finding::new("Landlock", State::Ok, "restricts the daemon's write access"),
        Err(why) => Finding::new("Landlock", State::Without, why)
            .advise("Weft runs without it, and may write to any file"),
    }
}

/// The diagnosis as text.
#[must_use]
pub fn text(diagnosis: &Diagnosis) -> String {
    let width = diagnosis.findings.iter().map(|finding| finding.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Finding { name, state, detail, advice } in &diagnosis.findings {
        let state = match state {
            State::Ok => "ok",
            State::Without => "without",
            State::Missing => "MISSING",
            State::Unknown => "unknown",
        };
        let _ = writeln!(text, "{name:<width$}  {state:<7}  {detail}");
        if let Some(advice) = advice {
            let _ = writeln!(text, "{:width$}           -> {advice}", "");
        }
    }
    let _ = writeln!(
        text,
        "\nGbit/s of one core, {AEAD_BYTES} bytes per packet (*: used for packets of this size)"
    );
    for figure in &diagnosis.aead {
        let AeadFigure { cipher, library, sealed_gbps, opened_gbps, seals, opens, .. } = figure;
        let mark = |taken: &bool| if *taken { "*" } else { " " };
        let (seals, opens) = (mark(seals), mark(opens));
        let _ = writeln!(
            text,
            "{cipher:<18} {library:<7} seals {sealed_gbps:>5.1}{seals}  opens {opened_gbps:>5.1}{opens}"
        );
    }
    let _ = writeln!(
        text,
        "\n{}",
        if diagnosis.ready { "Weft can run here." } else { "Weft cannot run here: see MISSING." }
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_bounds_of_the_daemon_are_told_with_the_reason() {
        let mut diagnosis = Diagnosis { ready: true, findings: Vec::new(), aead: Vec::new() };
        let states = [("landlock", "off: the kernel has none"), ("seccomp", "on")];
        let states = states.map(|(means, state)| (means.to_owned(), state.to_owned()));
        diagnosis.add_running(&[], &[], &BTreeMap::from(states));
        let told: Vec<_> = diagnosis.findings.iter().map(|it| it.detail.as_str()).collect();
        assert_eq!(told, ["landlock off: the kernel has none"]);
        assert_eq!(landlock(Err("the kernel has none")).state, State::Without);
    }

    fn part(needed: bool) -> Part {
        Part { module: "esp4", option: "CONFIG_INET_ESP", use_of_it: "kernel engine", needed }
    }

    #[test]
    fn only_what_nothing_works_without_keeps_weft_from_running() {
        for lacking in [Module::Absent, Module::NotInstalled] {
            assert_eq!(part(true).finding(lacking).state, State::Missing);
            assert_eq!(part(false).finding(lacking).state, State::Without);
        }
        for there in [Module::There, Module::OnDisk] {
            assert_eq!(part(true).finding(there).state, State::Ok);
        }
        assert_eq!(part(true).finding(Module::Unknown).state, State::Unknown);
        assert_eq!(permission(false).state, State::Missing);
        assert_eq!(nft(false).state, State::Without);
    }

    #[test]
    fn each_gap_comes_with_advice() {
        let mut findings = vec![permission(false), nft(false)];
        for module in [Module::Absent, Module::NotInstalled] {
            findings.extend([true, false].map(|needed| part(needed).finding(module)));
        }
        for finding in findings {
            assert!(finding.advice.is_some(), "{finding:?}");
        }
    }

    #[test]
    fn a_processor_without_aes_is_told_the_other_cipher() {
        let figure = |cipher, sealed_gbps| AeadFigure {
            cipher,
            library: "aws-lc",
            bytes: AEAD_BYTES,
            sealed_gbps,
            opened_gbps: sealed_gbps,
            seals: true,
            opens: true,
        };
        let both = |aes, chacha| {
            [figure(Cipher::Aes256Gcm, aes), figure(Cipher::ChaCha20Poly1305, chacha)]
        };
        assert_eq!(processor(&both(40.0, 12.0)).state, State::Ok);
        let slow = processor(&both(2.0, 8.0));
        assert_eq!(slow.state, State::Without);
        assert!(slow.advice.is_some_and(|advice| advice.contains("--cipher chacha20-poly1305")));
    }

    #[test]
    fn kernels_that_spoil_runs_with_some_drivers_are_told_of() {
        for release in ["7.0.0", "7.0-rc1", "7.0.2-6-pve", "7.1.4+deb14-amd64"] {
            let finding = drivers(release);
            assert_eq!(finding.as_ref().map(|finding| finding.state), Some(State::Unknown));
            let advice = finding.and_then(|finding| finding.advice);
            assert!(advice.is_some_and(|advice| advice.contains("--no-offloads")), "{release}");
        }
        for release in ["6.18.44-fc-v669", "6.99.99", "7.1.5", "7.3.4+deb13-cloud-amd64", "unknown"]
        {
            assert_eq!(drivers(release), None, "{release}");
        }
    }

    #[test]
    fn the_text_has_a_line_for_each_finding_and_the_verdict() {
        let mut diagnosis = Diagnosis {
            ready: true,
            findings: vec![permission(true), part(false).finding(Module::Absent)],
            aead: Vec::new(),
        };
        let good = text(&diagnosis);
        assert!(
            good.contains("permission")
                && good.contains("-> use a kernel built with CONFIG_INET_ESP")
        );
        assert!(good.ends_with("Weft can run here.\n"), "{good}");
        diagnosis.ready = false;
        assert!(text(&diagnosis).contains("cannot run here"));
    }
}
