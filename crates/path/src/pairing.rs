//! The paths that two hosts can have, the best first, and why they cannot have the others.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use weft_crypto::{Cipher, Format};

use crate::config::{Config, ENGINES_MAX, EngineOffer};
use crate::engine_api::{Encapsulation, EngineKind};
use crate::message::{EngineAbility, Hello, MissingEngine};
use crate::status::Reason;

const KINDS: [EngineKind; 2] = [EngineKind::Kernel, EngineKind::Userspace];

/// Names a candidate among those of one peer. Candidates are ordered by preference. A path without
/// encryption, between hosts that trust each other, comes before all others. Then come the kernel before
/// userspace, at this end first, protocol 50 before UDP, and `esp` before `ovpn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) engine: EngineKind,
    pub(crate) remote_engine: EngineKind,
    pub(crate) encapsulation: Encapsulation,
    pub(crate) format: Format,
}

impl Key {
    pub(crate) const PLAIN: Self = Self {
        engine: EngineKind::Kernel,
        remote_engine: EngineKind::Kernel,
        encapsulation: Encapsulation::Udp,
        format: Format::Plain,
    };

    pub(crate) fn is_kernel(&self) -> bool {
        self.engine == EngineKind::Kernel
    }

    pub(crate) fn is_plain(&self) -> bool {
        self.format == Format::Plain
    }

    pub(crate) fn is_raw(&self) -> bool {
        self.encapsulation == Encapsulation::Raw
    }

    /// This host's engine identifies the path's packets by the addresses of both hosts. Its SAs can be
    /// replaced but not moved, and two peers at one address are indistinguishable. One policy per peer
    /// carries the probes.
    pub(crate) fn is_bound_to_addresses(&self) -> bool {
        binds_addresses(self.engine, self.format)
    }

    /// The peer's kernel opens the packets and applies its input rules to them again: a firewall there
    /// may drop the inner packets.
    pub(crate) fn is_judged_again(&self) -> bool {
        self.remote_engine == EngineKind::Kernel && !self.is_plain()
    }

    /// This host receives with the kernel's `ovpn` device, which holds two keys for a path at once.
    pub(crate) fn has_two_slots(&self) -> bool {
        self.is_kernel() && self.format == Format::Ovpn
    }

    /// No two hosts can have SAs for it: only kernels use protocol 50, and `plain` has no SAs.
    pub(crate) fn is_impossible(&self) -> bool {
        let kernels = self.is_kernel() && self.remote_engine == EngineKind::Kernel;
        let esp = self.format == Format::Esp;
        self.is_plain() || (self.is_raw() && !(kernels && esp))
    }

    /// How its packets travel, where there is a choice.
    pub(crate) fn shown_encapsulation(&self) -> Option<Encapsulation> {
        (self.format == Format::Esp).then_some(self.encapsulation)
    }

    fn rank(&self) -> (bool, EngineKind, EngineKind, Encapsulation, Format) {
        (!self.is_plain(), self.engine, self.remote_engine, self.encapsulation, self.format)
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        self.rank().cmp(&other.rank())
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The inputs that determine which paths two hosts can have.
pub(crate) struct Negotiation<'a> {
    pub(crate) config: &'a Config,
    /// The peer's hello of the present session.
    pub(crate) hello: &'a Hello,
    /// There is a NAT between the hosts.
    pub(crate) nat: bool,
    /// Another peer owns this one's address: no path that is bound to it is possible here.
    pub(crate) address_shared: bool,
    /// This host trusts the peer's address.
    pub(crate) trusted: bool,
}

/// The terms that two engines agree on.
#[derive(Clone, Debug)]
pub(crate) struct Agreement<'a> {
    pub(crate) engine: &'a EngineOffer,
    /// `None` for format `plain`.
    pub(crate) cipher: Option<Cipher>,
    /// Lanes that this host receives on.
    pub(crate) lanes: u16,
}

/// A path that two hosts lack: for the engine at this end, at the peer's, or both.
pub(crate) struct Absence {
    pub(crate) engine: Option<EngineKind>,
    pub(crate) remote_engine: Option<EngineKind>,
    pub(crate) encapsulation: Option<Encapsulation>,
    pub(crate) reason: Reason,
}

impl<'a> Negotiation<'a> {
    /// All paths that two such hosts could have at best, the preferred first. Format `plain` needs both
    /// hosts to want it. Format `ovpn` needs both to have it and no `esp` between the same engines, since
    /// next to `esp` it would add no other path. Between hosts configured for `ovpn` alone, `ovpn` is the
    /// best.
    pub(crate) fn keys(&self) -> Vec<Key> {
        let mut keys = Vec::with_capacity(6);
        if self.trusted && self.hello.trusted {
            keys.push(Key::PLAIN);
        }
        for engine in KINDS {
            for remote_engine in KINDS {
                for encapsulation in [Encapsulation::Raw, Encapsulation::Udp] {
                    for format in [Format::Esp, Format::Ovpn] {
                        let key = Key { engine, remote_engine, encapsulation, format };
                        let alone =
                            self.has_ovpn_alone(engine) || self.peer_has_ovpn_alone(remote_engine);
                        let wanted = match format {
                            Format::Esp => !alone,
                            _ => alone || self.stands_in(&key),
                        };
                        if wanted && !key.is_impossible() {
                            keys.push(key);
                        }
                    }
                }
            }
        }
        keys
    }

    /// Two engines have this path of format `ovpn`, and no `esp`.
    fn stands_in(&self, key: &Key) -> bool {
        let esp = Key { format: Format::Esp, ..*key };
        self.agree(key).is_ok() && self.agree(&esp).is_err()
    }

    /// This host offers the engine in format `ovpn` alone, and says no reason why not in `esp`.
    fn has_ovpn_alone(&self, kind: EngineKind) -> bool {
        let has = |format| self.config.engine(kind, format).is_some();
        let said = self.config.missing.iter().any(|(engine, _)| *engine == kind);
        has(Format::Ovpn) && !has(Format::Esp) && !said
    }

    /// Likewise the peer.
    fn peer_has_ovpn_alone(&self, kind: EngineKind) -> bool {
        let has = |format| self.theirs(kind, format).is_ok();
        let mut missing = self.hello.missing.iter().take(ENGINES_MAX);
        let said = missing.any(|missing| missing.engine == kind);
        has(Format::Ovpn) && !has(Format::Esp) && !said
    }

    /// The terms two hosts agree on for a path, or why they cannot have it. This host's own reason takes
    /// precedence over the peer's.
    pub(crate) fn agree(&self, key: &Key) -> Result<Agreement<'a>, Reason> {
        if key.is_plain() {
            return self.agree_plain();
        }
        let engine = self.ours(key.engine, key.format)?;
        let theirs = self.theirs(key.remote_engine, key.format)?;
        if key.is_raw() && self.nat {
            return Err(Reason::Nat);
        }
        let they_take =
            if theirs.ciphers.is_empty() { &self.hello.ciphers } else { &theirs.ciphers };
        let cipher = taken(self.config, engine).find(|cipher| they_take.contains(cipher));
        let cipher = Some(cipher.ok_or(Reason::CipherMissing)?);
        let lanes = engine.lanes_max.min(theirs.lanes_max).max(1);
        Ok(Agreement { engine, cipher, lanes })
    }

    /// The absent paths, each once. Omits an engine whose `ovpn` stands in for its `esp`.
    pub(crate) fn absent(&self) -> Vec<Absence> {
        let mut absent = Vec::new();
        let keys = self.keys();
        let stands_in = |engine: Option<EngineKind>, remote_engine: Option<EngineKind>| {
            keys.iter().any(|key| {
                key.format == Format::Ovpn
                    && engine.is_none_or(|kind| kind == key.engine)
                    && remote_engine.is_none_or(|kind| kind == key.remote_engine)
                    && self.agree(key).is_ok()
            })
        };
        let here = |kind| {
            let told = !stands_in(Some(kind), None) && !self.has_ovpn_alone(kind);
            self.ours(kind, Format::Esp).err().filter(|_| told)
        };
        let there = |kind| {
            let told = !stands_in(None, Some(kind)) && !self.peer_has_ovpn_alone(kind);
            self.theirs(kind, Format::Esp).err().filter(|_| told)
        };
        for kind in KINDS {
            let (engine, remote_engine, encapsulation) = (Some(kind), None, None);
            let reason = here(kind);
            absent.extend(reason.map(|reason| Absence {
                engine,
                remote_engine,
                encapsulation,
                reason,
            }));
        }
        for kind in KINDS {
            let (engine, remote_engine, encapsulation) = (None, Some(kind), None);
            let reason = there(kind);
            absent.extend(reason.map(|reason| Absence {
                engine,
                remote_engine,
                encapsulation,
                reason,
            }));
        }
        for key in &keys {
            if let Err(reason @ (Reason::Nat | Reason::CipherMissing)) = self.agree(key)
                && here(key.engine).is_none()
                && there(key.remote_engine).is_none()
                && !stands_in(Some(key.engine), Some(key.remote_engine))
            {
                absent.push(Absence {
                    engine: Some(key.engine),
                    remote_engine: Some(key.remote_engine),
                    encapsulation: Some(key.encapsulation),
                    reason,
                });
            }
        }
        absent
    }

    /// Why there is no path at all.
    pub(crate) fn why_none(&self) -> Reason {
        if !self.config.ciphers.iter().any(|cipher| self.hello.ciphers.contains(cipher)) {
            return Reason::NoCommonCipher;
        }
        let ours = self.config.engines.iter().map(|engine| engine.format);
        let theirs = self.hello.engines.iter().take(ENGINES_MAX).map(|engine| engine.format);
        let [ours, theirs] = [encrypted(ours), encrypted(theirs)];
        if !ours.is_empty() && !theirs.is_empty() && ours.is_disjoint(&theirs) {
            return Reason::NoCommonFormat;
        }
        let nothing_said = Reason::of_peer(&Reason::NotOffered.to_string());
        let said = self.absent().into_iter().map(|absence| absence.reason);
        let said = said.filter(|reason| *reason != Reason::NotOffered && *reason != nothing_said);
        Reason::of_all(said).unwrap_or(Reason::NoCommonFormat)
    }

    /// A kernel engine is enough for `plain`, with ESP or without.
    fn agree_plain(&self) -> Result<Agreement<'a>, Reason> {
        let kernel = EngineKind::Kernel;
        let engine = self.ours(kernel, Format::Plain).or(self.ours(kernel, Format::Esp))?;
        let theirs = self.theirs(kernel, Format::Plain).or(self.theirs(kernel, Format::Esp));
        theirs.map(|_| Agreement { engine, cipher: None, lanes: 0 })
    }

    fn ours(&self, kind: EngineKind, format: Format) -> Result<&'a EngineOffer, Reason> {
        let reason = || why_missing(self.config, kind);
        let engine = self.config.engine(kind, format).ok_or_else(reason)?;
        if self.address_shared && binds_addresses(kind, format) {
            return Err(Reason::AddressShared);
        }
        let able = format == Format::Plain || taken(self.config, engine).next().is_some();
        able.then_some(engine).ok_or(Reason::CipherMissing)
    }

    fn theirs(&self, kind: EngineKind, format: Format) -> Result<&'a EngineAbility, Reason> {
        let mut engines = self.hello.engines.iter().take(ENGINES_MAX);
        let engine = engines.find(|engine| engine.engine == kind && engine.format == format);
        engine.ok_or_else(|| {
            let missing = self.hello.missing.iter().take(ENGINES_MAX);
            let reasons = missing.filter(|missing| missing.engine == kind);
            let reasons = reasons.map(|missing| Reason::of_peer(&missing.reason));
            let nothing_said = || Reason::of_peer(&Reason::NotOffered.to_string());
            Reason::of_all(reasons).unwrap_or_else(nothing_said)
        })
    }
}

/// The engines for this host's hello, and the reasons why others are missing.
pub(crate) fn abilities(
    config: &Config,
    address_shared: bool,
) -> (Vec<EngineAbility>, Vec<MissingEngine>) {
    let mut engines = Vec::new();
    let mut missing: Vec<MissingEngine> = config
        .missing
        .iter()
        .map(|(engine, reason)| MissingEngine { engine: *engine, reason: reason.to_string() })
        .collect();
    for engine in &config.engines {
        let ciphers: Vec<Cipher> = taken(config, engine).collect();
        let reason = if address_shared && binds_addresses(engine.kind, engine.format) {
            Reason::AddressShared
        } else if ciphers.is_empty() && engine.format != Format::Plain {
            Reason::CipherMissing
        } else {
            let (format, lanes_max) = (engine.format, engine.lanes_max);
            engines.push(EngineAbility { engine: engine.kind, format, lanes_max, ciphers });
            continue;
        };
        missing.push(MissingEngine { engine: engine.kind, reason: reason.to_string() });
    }
    missing.truncate(ENGINES_MAX);
    (engines, missing)
}

/// AEADs that one engine of this host takes, the preferred first.
pub(crate) fn taken<'a>(
    config: &'a Config,
    engine: &'a EngineOffer,
) -> impl Iterator<Item = Cipher> + 'a {
    config.ciphers.iter().copied().filter(|cipher| engine.ciphers.contains(cipher))
}

/// See [`Key::is_bound_to_addresses`]. In format `ovpn` the kernel, too, knows its peers by id.
fn binds_addresses(engine: EngineKind, format: Format) -> bool {
    engine == EngineKind::Kernel && format != Format::Ovpn
}

/// Without `plain`, which hosts have by trust.
fn encrypted(formats: impl Iterator<Item = Format>) -> BTreeSet<Format> {
    formats.filter(|format| *format != Format::Plain).collect()
}

fn why_missing(config: &Config, kind: EngineKind) -> Reason {
    let named = config.missing.iter().filter(|(engine, _)| *engine == kind);
    Reason::of_all(named.map(|(_, reason)| reason.clone())).unwrap_or(Reason::NotOffered)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn kernel(ciphers: &[Cipher]) -> EngineOffer {
        EngineOffer {
            kind: EngineKind::Kernel,
            format: Format::Esp,
            port: 6785,
            lanes_max: 1,
            rco: false,
            ciphers: ciphers.to_vec(),
        }
    }

    fn config(kernel_ciphers: Option<&[Cipher]>) -> Config {
        let mut config = Config::default();
        match kernel_ciphers {
            Some(ciphers) => config.engines.push(kernel(ciphers)),
            None => config.missing.push((EngineKind::Kernel, Reason::KernelWithoutEsp)),
        }
        config
    }

    fn hello(config: &Config) -> Hello {
        let (engines, missing) = abilities(config, false);
        Hello {
            session: 1,
            instance: 1,
            ciphers: config.ciphers.clone(),
            engines,
            missing,
            address: None,
            peer_address: None,
            trusted: false,
            mtu: 1500,
            container_mtu: None,
            opens_lanes: None,
            reply_wanted: false,
        }
    }

    fn negotiation<'a>(config: &'a Config, hello: &'a Hello) -> Negotiation<'a> {
        Negotiation { config, hello, nat: false, address_shared: false, trusted: false }
    }

    const BOTH: &[Cipher] = &[Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];

    fn names(negotiation: &Negotiation<'_>) -> Vec<String> {
        let name = |key: &Key| {
            let (here, there) = (&key.engine.name()[..1], &key.remote_engine.name()[..1]);
            let way = match key.format {
                Format::Ovpn => "ovpn",
                _ => key.encapsulation.name(),
            };
            match negotiation.agree(key) {
                Ok(_) => format!("{here}{there} {way}"),
                Err(reason) => format!("{here}{there} {way}: {reason}"),
            }
        };
        negotiation.keys().iter().map(name).collect()
    }

    #[test]
    fn the_kernel_comes_first_here_then_there_and_raw_before_udp() {
        let config = config(Some(BOTH));
        let hello = hello(&config);
        let expected = ["kk raw", "kk udp", "ku udp", "uk udp", "uu udp"];
        assert_eq!(names(&negotiation(&config, &hello)), expected);
        let mut keys = negotiation(&config, &hello).keys();
        keys.push(Key::PLAIN);
        keys.sort();
        assert_eq!(keys[0], Key::PLAIN, "nothing is faster than no encryption");
        assert_eq!(keys[1..], negotiation(&config, &hello).keys());
    }

    #[test]
    fn a_reason_of_this_host_comes_before_that_of_the_peer() {
        let (with, without) = (config(Some(BOTH)), config(None));
        let (with_hello, without_hello) = (hello(&with), hello(&without));
        let mine = names(&negotiation(&without, &without_hello));
        assert_eq!(mine[0], "kk raw: kernel without ESP");
        let theirs = names(&negotiation(&with, &without_hello));
        assert_eq!(theirs[0], "kk raw: peer: kernel without ESP");
        assert_eq!(theirs[2], "ku udp");
        assert_eq!(names(&negotiation(&without, &with_hello))[3], "uk udp");
    }

    #[test]
    fn nat_shared_addresses_and_ciphers_rule_out_what_they_must() {
        let both = config(Some(BOTH));
        let chacha_only = config(Some(&[Cipher::ChaCha20Poly1305]));
        let aes_only = config(Some(&[Cipher::Aes256Gcm]));
        let (greeting, chacha) = (hello(&both), hello(&chacha_only));
        let nat = Negotiation { nat: true, ..negotiation(&both, &greeting) };
        assert_eq!(names(&nat)[..2], ["kk raw: NAT", "kk udp"]);
        let shared = Negotiation { address_shared: true, ..negotiation(&both, &greeting) };
        assert_eq!(names(&shared)[2..], ["ku udp: address shared", "uk udp", "uu udp"]);
        let (engines, missing) = abilities(&both, true);
        assert!(engines.iter().all(|engine| engine.engine == EngineKind::Userspace));
        assert_eq!(missing[0].reason, "address shared");
        let expected = ["kk raw: cipher missing", "kk udp: cipher missing", "ku udp"];
        assert_eq!(names(&negotiation(&aes_only, &chacha))[..3], expected);
        let agreed =
            negotiation(&both, &chacha).agree(&negotiation(&both, &chacha).keys()[0]).unwrap();
        assert_eq!(agreed.cipher, Some(Cipher::ChaCha20Poly1305));
    }

    /// With this format in place of the vector engine's.
    fn with_format(config: &Config, formats: &[Format]) -> Config {
        let mut config = config.clone();
        let vector = config.engines.remove(0);
        config.engines.extend(formats.iter().map(|format| {
            let format = *format;
            EngineOffer { format, ..vector.clone() }
        }));
        config
    }

    #[test]
    fn ovpn_is_for_hosts_that_have_no_esp_together() {
        let of = |formats: &[Format]| with_format(&config(None), formats);
        let (both, esp, ovpn) =
            (of(&[Format::Esp, Format::Ovpn]), of(&[Format::Esp]), of(&[Format::Ovpn]));
        let agreed = |here: &Config, there: &Config| {
            let hello = hello(there);
            let negotiation = negotiation(here, &hello);
            let keys = negotiation.keys().into_iter().filter(|key| negotiation.agree(key).is_ok());
            keys.map(|key| key.format).collect::<Vec<_>>()
        };
        assert_eq!(agreed(&both, &both), [Format::Esp]);
        assert_eq!(agreed(&both, &ovpn), [Format::Ovpn]);
        assert_eq!(agreed(&ovpn, &both), [Format::Ovpn]);
        assert_eq!(agreed(&ovpn, &ovpn), [Format::Ovpn]);
        assert_eq!(agreed(&esp, &ovpn), []);
        let hello = hello(&ovpn);
        assert!(negotiation(&esp, &hello).why_none() == Reason::NoCommonFormat);
    }

    const ESP: &[Format] = &[Format::Esp];
    const OVPN: &[Format] = &[Format::Ovpn];
    const ALL: &[Format] = &[Format::Esp, Format::Ovpn];

    /// A host whose engines have these formats. Its kernel lacks ESP unless `of_kernel` has it.
    fn host(of_kernel: &[Format], of_vector: &[Format]) -> Config {
        let mut host = with_format(&config(None), of_vector);
        if of_kernel.contains(&Format::Esp) {
            host.missing.clear();
        }
        let offer = |format: &Format| EngineOffer { format: *format, ..kernel(BOTH) };
        host.engines.extend(of_kernel.iter().map(offer));
        host
    }

    /// The paths that two hosts can have, and the absent ones with reasons.
    fn possible(negotiation: &Negotiation<'_>) -> (Vec<String>, Vec<String>) {
        let kind = |kind: Option<EngineKind>| kind.map_or("", EngineKind::name);
        let absent = negotiation.absent().into_iter().map(|absence| {
            let (here, there) = (kind(absence.engine), kind(absence.remote_engine));
            format!("{here}-{there}: {}", absence.reason)
        });
        let paths = names(negotiation).into_iter().filter(|name| !name.contains(':'));
        (paths.collect(), absent.collect())
    }

    #[test]
    fn the_kernels_ovpn_stands_in_where_one_kernel_has_no_esp() {
        let judged = |here: &Config, there: &Config| {
            let hello = hello(there);
            possible(&negotiation(here, &hello))
        };
        let of = |paths: &[&str], absent: &[&str]| {
            let texts = |texts: &[&str]| -> Vec<String> {
                texts.iter().map(|text| (*text).to_owned()).collect()
            };
            (texts(paths), texts(absent))
        };
        let auto = host(ALL, ALL);
        assert_eq!(
            judged(&auto, &auto),
            of(&["kk raw", "kk udp", "ku udp", "uk udp", "uu udp"], &[])
        );
        let no_esp = host(OVPN, ALL);
        let stands_in = ["kk ovpn", "ku ovpn", "uk ovpn", "uu udp"];
        assert_eq!(judged(&no_esp, &no_esp), of(&stands_in, &[]));
        assert_eq!(judged(&auto, &no_esp), of(&["kk ovpn", "ku udp", "uk ovpn", "uu udp"], &[]));
        assert_eq!(judged(&no_esp, &auto), of(&["kk ovpn", "ku ovpn", "uk udp", "uu udp"], &[]));
        // The vector engines have `esp` alone, so only the kernels meet in the other.
        let kernels = host(OVPN, ESP);
        assert_eq!(judged(&kernels, &kernels), of(&["kk ovpn", "uu udp"], &[]));
        let (hello, esp) = (hello(&kernels), host(ESP, ESP));
        assert_eq!(
            names(&negotiation(&kernels, &hello))[..2],
            ["kk raw: kernel without ESP", "kk udp: kernel without ESP"]
        );
        // It stands in for nothing towards a host that does not have it.
        assert_eq!(
            judged(&kernels, &esp),
            of(&["uk udp", "uu udp"], &["kernel-: kernel without ESP"])
        );
        assert_eq!(
            judged(&esp, &kernels),
            of(&["ku udp", "uu udp"], &["-kernel: peer: kernel without ESP"])
        );
    }

    #[test]
    fn a_host_that_wants_ovpn_alone_is_not_asked_why() {
        let mut alone = host(OVPN, OVPN);
        alone.missing.clear();
        let (greeting, esp) = (hello(&alone), host(ESP, ESP));
        let all = ["kk ovpn", "ku ovpn", "uk ovpn", "uu ovpn"];
        assert_eq!(names(&negotiation(&alone, &greeting)), all);
        assert_eq!(possible(&negotiation(&alone, &greeting)).1, Vec::<String>::new());
        let vector = hello(&host(&[], OVPN));
        let names = names(&negotiation(&alone, &vector));
        assert_eq!(names[..2], ["kk ovpn: peer: kernel without ESP", "ku ovpn"]);
        let negotiation = negotiation(&esp, &greeting);
        assert_eq!(possible(&negotiation), (Vec::new(), Vec::new()));
        assert_eq!(negotiation.why_none(), Reason::NoCommonFormat);
    }

    #[test]
    fn a_shared_address_rules_out_what_is_bound_to_it() {
        let auto = host(ALL, ALL);
        let (greeting, esp) = (hello(&auto), hello(&host(ESP, ESP)));
        let shared = |hello| Negotiation { address_shared: true, ..negotiation(&auto, hello) };
        let (paths, absent) = possible(&shared(&greeting));
        assert_eq!(paths, ["kk ovpn", "ku ovpn", "uk udp", "uu udp"]);
        assert_eq!(absent, Vec::<String>::new());
        assert_eq!(names(&shared(&greeting))[0], "kk raw: address shared");
        let (paths, absent) = possible(&shared(&esp));
        assert_eq!((paths.len(), &absent[..]), (2, &["kernel-: address shared".to_owned()][..]));
        let (engines, missing) = abilities(&auto, true);
        let of_kernel = engines.iter().filter(|engine| engine.engine == EngineKind::Kernel);
        assert!(of_kernel.map(|engine| engine.format).eq([Format::Ovpn]));
        assert_eq!((missing.len(), &*missing[0].reason), (1, "address shared"));
        let plain = Key::PLAIN;
        assert!(plain.is_bound_to_addresses() && !plain.has_two_slots());
    }

    #[test]
    fn plain_needs_the_word_of_both() {
        let config = config(Some(BOTH));
        let mut hello = hello(&config);
        let plain = |hello: &Hello, trusted| {
            Negotiation { trusted, ..negotiation(&config, hello) }.keys().contains(&Key::PLAIN)
        };
        assert!(!plain(&hello, true));
        hello.trusted = true;
        assert!(!plain(&hello, false));
        assert!(plain(&hello, true));
    }

    #[test]
    fn an_earlier_version_says_nothing_of_its_kernel() {
        let config = config(Some(BOTH));
        let mut hello = hello(&config);
        hello.engines.retain(|engine| engine.engine == EngineKind::Userspace);
        hello.engines[0].ciphers.clear();
        let names = names(&negotiation(&config, &hello));
        assert_eq!(names[0], "kk raw: peer: not offered");
        assert_eq!((names[2].as_str(), names[4].as_str()), ("ku udp", "uu udp"));
    }
}
