//! What path choice must come to, worked out from the hosts' settings without its code; and runs
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
    /// The best path that one host can have to another; `None`: none.
    pub fn best(&self, from: HostId, to: HostId) -> Option<Best> {
        let (ours, theirs) = (self.hosts[from].config(), self.hosts[to].config());
        let nat = self.hosts[from].nat != self.hosts[to].nat;
        let mut why = None;
        let trust = |truster: &Config, address: IpAddr| {
            truster.trusted_subnets.iter().any(|subnet| subnet.contains(&address))
        };
        let kernels = self.offer(from, to, EngineKind::Kernel).is_ok()
            && self.offer(to, from, EngineKind::Kernel).is_ok();
        let trusted =
            trust(ours, self.address_seen(to, from)) && trust(theirs, self.address_seen(from, to));
        let (kernel, userspace) = (EngineKind::Kernel, EngineKind::Userspace);
        let best = |format, engine, remote_engine, encapsulation, why| {
            Some(Best { format, engine, remote_engine, encapsulation, why })
        };
        if trusted && kernels {
            return best(Format::Plain, kernel, kernel, Encapsulation::Udp, None);
        }
        for (engine, remote_engine, encapsulation) in [
            (kernel, kernel, Encapsulation::Raw),
            (kernel, kernel, Encapsulation::Udp),
            (kernel, userspace, Encapsulation::Udp),
            (userspace, kernel, Encapsulation::Udp),
            (userspace, userspace, Encapsulation::Udp),
        ] {
            let here = self.offer(from, to, engine);
            let there = self.offer(to, from, remote_engine).map_err(|text| format!("peer: {text}"));
            let verdict = match (here, there) {
                (Err(reason), _) | (_, Err(reason)) => Err(reason),
                (Ok(_), Ok(_)) if encapsulation == Encapsulation::Raw && nat => {
                    Err(Reason::Nat.to_string())
                }
                (Ok(here), Ok(there)) if !here.iter().any(|cipher| there.contains(cipher)) => {
                    Err(Reason::CipherMissing.to_string())
                }
                _ => Ok(()),
            };
            match verdict {
                Ok(()) => return best(Format::Esp, engine, remote_engine, encapsulation, why),
                Err(reason) => why = why.or(Some(reason)),
            }
        }
        None
    }

    /// The ciphers of an engine that a host has for another one, or why it has not.
    fn offer(&self, host: HostId, peer: HostId, kind: EngineKind) -> Result<Vec<Cipher>, String> {
        let config = self.hosts[host].config();
        let Some(engine) = config.engines.iter().find(|engine| engine.kind == kind) else {
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
        if kind == EngineKind::Kernel && self.says_address_shared(host, peer) {
            return Err(Reason::AddressShared.to_string());
        }
        let ciphers = config.ciphers.iter().copied();
        let ciphers: Vec<Cipher> = ciphers.filter(|it| engine.ciphers.contains(it)).collect();
        if ciphers.is_empty() { Err(Reason::CipherMissing.to_string()) } else { Ok(ciphers) }
    }

    /// Who of several peers at one address came first only the host knows.
    pub fn says_address_shared(&self, host: HostId, peer: HostId) -> bool {
        let entries = self.status(host, peer);
        let shared = |entry: &PathStatus| {
            entry.engine.is_some() && entry.reason == Some(Reason::AddressShared)
        };
        entries.iter().any(shared)
    }

    /// Lets time pass until every pair of hosts is on its best path.
    ///
    /// # Errors
    /// After `most`, with what the first pair that is not says of itself.
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
