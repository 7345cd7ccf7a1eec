//! The expected result of path choice, derived from the hosts' settings without the code under test; and runs
//! over many seeds.

use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use weft_crypto::{Cipher, Format};
use weft_path::{Config, Encapsulation, EngineKind, EngineOffer, PathState, PathStatus, Reason};

use super::{HostId, World};

/// The path that a host must end on towards another, on a network that lets everything through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Best {
    /// The wire format.
    pub format: Format,
    /// The engine at this end.
    pub engine: EngineKind,
    /// The engine at the other.
    pub remote_engine: EngineKind,
    /// Protocol 50 or UDP; without meaning for format `plain`.
    pub encapsulation: Encapsulation,
    /// The text of the reason why it is not a better one.
    pub why: Option<String>,
}

impl Best {
    /// A path carries frames as it must, for the reason that it must.
    pub fn is(&self, status: &PathStatus) -> bool {
        let encapsulation = (self.format == Format::Esp).then_some(self.encapsulation);
        status.state == PathState::Active
            && status.format == Some(self.format)
            && status.engine == Some(self.engine)
            && status.remote_engine == Some(self.remote_engine)
            && status.encapsulation == encapsulation
            && status.encrypted == (self.format != Format::Plain)
            && status.why_not_best.as_ref().map(ToString::to_string) == self.why
    }
}

impl World {
    /// The best path from one host to another; `None`: none.
    pub fn best(&self, from: HostId, to: HostId) -> Option<Best> {
        let (ours, theirs) = (self.hosts[from].config(), self.hosts[to].config());
        let trust = |truster: &Config, address: IpAddr| {
            truster.trusted_subnets.iter().any(|subnet| subnet.contains(&address))
        };
        let (kernel, userspace) = (EngineKind::Kernel, EngineKind::Userspace);
        // `plain` in the kernel needs no more than `esp`.
        let of_kernel = |host, peer| {
            let esp = |_| self.offer(host, peer, kernel, Format::Esp);
            self.offer(host, peer, kernel, Format::Plain).or_else(esp)
        };
        let there = of_kernel(to, from).map_err(|text| format!("peer: {text}"));
        let kernels = of_kernel(from, to).and(there);
        let trusted =
            trust(ours, self.address_seen(to, from)) && trust(theirs, self.address_seen(from, to));
        let best = |format, engine, remote_engine, encapsulation, why| {
            Some(Best { format, engine, remote_engine, encapsulation, why })
        };
        let (raw, udp) = (Encapsulation::Raw, Encapsulation::Udp);
        let (mut why, mut narrow) = (None, None);
        if trusted && kernels.is_ok() {
            let plain = best(Format::Plain, kernel, kernel, udp, None);
            if !takes_less(theirs, ours) {
                return plain;
            }
            (why, narrow) = (Some(Reason::MtuNotCarried.to_string()), plain);
        } else if trusted {
            why = kernels.err();
        }
        for (engine, remote_engine, format, encapsulation) in [
            (kernel, kernel, Format::Esp, raw),
            (kernel, kernel, Format::Esp, udp),
            (kernel, kernel, Format::Ovpn, udp),
            (kernel, userspace, Format::Esp, udp),
            (kernel, userspace, Format::Ovpn, udp),
            (userspace, kernel, Format::Esp, udp),
            (userspace, kernel, Format::Ovpn, udp),
            (userspace, userspace, Format::Esp, udp),
            (userspace, userspace, Format::Ovpn, udp),
        ] {
            let verdict = self.verdict((from, engine), (to, remote_engine), format, encapsulation);
            let alone = has_ovpn_alone(ours, engine) || has_ovpn_alone(theirs, remote_engine);
            let found = best(format, engine, remote_engine, encapsulation, why.clone());
            match verdict {
                // Some packets of containers do not get there: it is for want of a vector engine alone.
                Ok(())
                    if engine == kernel
                        && (is_narrow(ours, format, encapsulation)
                            || remote_engine == kernel && takes_less(theirs, ours)) =>
                {
                    narrow = narrow.or(found);
                    why = why.or(Some(Reason::MtuNotCarried.to_string()));
                }
                Ok(()) if narrow.is_none() || self.has_vector(from, to) => return found,
                Ok(()) => {}
                Err(reason) if alone == (format == Format::Ovpn) => why = why.or(Some(reason)),
                // Else it only ever stands in for the other format.
                Err(_) => {}
            }
        }
        narrow
    }

    /// Whether two engines have a format and a cipher in common and get through, or why not.
    fn verdict(
        &self,
        (from, engine): (HostId, EngineKind),
        (to, remote_engine): (HostId, EngineKind),
        format: Format,
        encapsulation: Encapsulation,
    ) -> Result<(), String> {
        let nat = self.hosts[from].nat != self.hosts[to].nat;
        let here = self.offer(from, to, engine, format)?;
        let there = self.offer(to, from, remote_engine, format);
        let there = there.map_err(|text| format!("peer: {text}"))?;
        if encapsulation == Encapsulation::Raw && nat {
            return Err(Reason::Nat.to_string());
        }
        match here.iter().any(|cipher| there.contains(cipher)) {
            true => Ok(()),
            false => Err(Reason::CipherMissing.to_string()),
        }
    }

    /// Whether a host's vector engine can send to another host.
    fn has_vector(&self, from: HostId, to: HostId) -> bool {
        let userspace = EngineKind::Userspace;
        [Format::Esp, Format::Ovpn].into_iter().any(|format| {
            let there = |kind| self.offer(to, from, kind, format).is_ok();
            self.offer(from, to, userspace, format).is_ok()
                && (there(userspace) || there(EngineKind::Kernel))
        })
    }

    /// The ciphers of an engine that a host has for another one, or why it has not.
    fn offer(
        &self,
        host: HostId,
        peer: HostId,
        kind: EngineKind,
        format: Format,
    ) -> Result<Vec<Cipher>, String> {
        let config = self.hosts[host].config();
        let mut engines = config.engines.iter();
        let Some(engine) = engines.find(|it| (it.kind, it.format) == (kind, format)) else {
            let mut named: Vec<String> = config
                .missing
                .iter()
                .filter(|(engine, _)| *engine == kind)
                .map(|(_, reason)| reason.to_string())
                .collect();
            named.sort();
            let said = (!named.is_empty()).then(|| named.join("; "));
            return Err(said.unwrap_or_else(|| Reason::NotOffered.to_string()));
        };
        let by_address = kind == EngineKind::Kernel && format != Format::Ovpn;
        if by_address && self.says_address_shared(host, peer) {
            return Err(Reason::AddressShared.to_string());
        }
        let ciphers = config.ciphers.iter().copied();
        let ciphers: Vec<Cipher> = ciphers.filter(|it| engine.ciphers.contains(it)).collect();
        if ciphers.is_empty() { Err(Reason::CipherMissing.to_string()) } else { Ok(ciphers) }
    }

    /// Whether a host reports a shared address. Only the host knows which of several peers at one address came
    /// first.
    pub fn says_address_shared(&self, host: HostId, peer: HostId) -> bool {
        let entries = self.status(host, peer);
        let shared = |entry: &PathStatus| {
            let absent = entry.engine.is_some() && entry.reason == Some(Reason::AddressShared);
            // If the kernel's `ovpn` stands in, no engine is absent.
            absent || entry.why_not_best == Some(Reason::AddressShared)
        };
        entries.iter().any(shared)
    }

    /// Lets time pass until every pair of hosts is on its best path.
    ///
    /// # Errors
    /// After `most`, a description of the first pair that is not on its best path.
    pub fn settle(&mut self, most: Duration) -> Result<(), String> {
        let end = self.now + most;
        loop {
            self.run(Duration::from_secs(1));
            match self.wrong() {
                Some(wrong) if self.now >= end => return Err(wrong),
                Some(_) => {}
                None => return Ok(()),
            }
        }
    }

    fn wrong(&self) -> Option<String> {
        let all = 0..self.hosts.len();
        let mut pairs = all.clone().flat_map(|from| all.clone().map(move |to| (from, to)));
        pairs.find_map(|(from, to)| {
            let best = (from != to).then(|| self.best(from, to))??;
            let active = self.active(from, to);
            let right = active.as_ref().is_some_and(|status| best.is(status));
            (!right).then(|| {
                let shown = |entry: PathStatus| {
                    format!(
                        "\n  {:?} {:?}-{:?} {:?} {:?} {:?} why {:?}",
                        entry.format,
                        entry.engine,
                        entry.remote_engine,
                        entry.encapsulation,
                        entry.state,
                        entry.reason.map(|reason| reason.to_string()),
                        entry.why_not_best.map(|reason| reason.to_string()),
                    )
                };
                let entries: String = self.status(from, to).into_iter().map(shown).collect();
                format!("{from} -> {to}: not {best:?} but{entries}")
            })
        })
    }
}

/// Settings of a host with both engines.
pub fn both_engines() -> Config {
    let mut config = Config::default();
    config.engines.push(kernel_engine());
    config
}

/// The kernel engine as a host offers it.
pub fn kernel_engine() -> EngineOffer {
    let mut kernel = Config::default().engines.remove(0);
    kernel.kind = EngineKind::Kernel;
    kernel.port = 6785;
    kernel.rco = false;
    kernel
}

/// Settings of a host whose kernel and vector engine have these formats; without ESP it reports that its kernel
/// has none. Its containers' packets have the length that the daemon chooses. They fit paths of format `ovpn`
/// if the kernel has no other format.
pub fn with_formats(of_kernel: &[Format], of_vector: &[Format]) -> Config {
    let container_mtu = if of_kernel.contains(&Format::Esp) { 1_388 } else { 1_356 };
    let mut config = Config { container_mtu, ..Config::default() };
    let vector = config.engines.remove(0);
    let vector = of_vector.iter().map(|format| EngineOffer { format: *format, ..vector.clone() });
    let kernel = of_kernel.iter().map(|format| match format {
        Format::Ovpn => {
            EngineOffer { format: *format, port: 6786, lanes_max: 1, ..kernel_engine() }
        }
        _ => EngineOffer { format: *format, ..kernel_engine() },
    });
    config.engines = vector.chain(kernel).collect();
    if !of_kernel.contains(&Format::Esp) {
        config.missing.push((EngineKind::Kernel, Reason::KernelWithoutEsp));
    }
    if of_vector.is_empty() {
        config.missing.push((EngineKind::Userspace, Reason::Forced));
    }
    config
}

/// Settings of a host without one of the engines.
pub fn without(kind: EngineKind, reason: Reason) -> Config {
    let mut config = both_engines();
    config.engines.retain(|engine| engine.kind != kind);
    config.missing.push((kind, reason));
    config
}

/// Runs a test for many seeds and names the seed that fails.
///
/// # Panics
/// As the test does.
pub fn seeds(seeds: impl IntoIterator<Item = u64>, test: impl Fn(u64)) {
    for seed in seeds {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| test(seed))) {
            let line = format!("failed with seed {seed}\n");
            let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
            resume_unwind(panic);
        }
    }
}

/// A path over IPv4 carries less than the host's containers send.
fn is_narrow(config: &Config, format: Format, encapsulation: Encapsulation) -> bool {
    let carried = config.link_mtu - weft_path::overhead(format, encapsulation, false);
    carried / 4 * 4 < config.container_mtu
}

/// Whether our kernel drops packets, ahead of its containers, that the other host's containers may send.
const fn takes_less(theirs: &Config, ours: &Config) -> bool {
    theirs.container_mtu < ours.container_mtu
}

/// A host has an engine in format `ovpn` alone and does not say why.
fn has_ovpn_alone(config: &Config, kind: EngineKind) -> bool {
    let is_of = |engine: &&EngineOffer| engine.kind == kind && engine.format != Format::Plain;
    let mut offered = config.engines.iter().filter(is_of).peekable();
    let said = config.missing.iter().any(|(engine, _)| *engine == kind);
    offered.peek().is_some() && offered.all(|engine| engine.format == Format::Ovpn) && !said
}
