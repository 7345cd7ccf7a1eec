//! Detects the kernel's features, takes the engine into use, repairs it and shuts it down.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use weft_crypto::Cipher;
use weft_path::Reason;

use super::filters::Told;
use super::probes::Probes;
use super::worker::{Ipsec, RECONCILE_MS, SUPPORT_MS, Worker};
use super::{KernelCounters, Support};
use crate::error::KernelError;
use crate::firewall::guard::GUARDED_PORTS;
use crate::ovpn::DATA_CHANNEL_DEVICE;
use crate::xfrm::{EntryPolicy, PolicyId, PolicySpec, StateId, Xfrm};

/// Lanes to a peer at most beside the one for all other CPUs; each costs about 5 KiB at both ends.
const CPU_LANES_MAX: u16 = 8;

/// How long the start waits for the guard, in milliseconds; where `nft` is slower, the kernel engine comes
/// later.
const GUARD_WAIT_MS: u64 = 3_000;

/// In which formats the kernel moves packets.
struct Formats {
    esp: Result<Vec<Cipher>, Reason>,
    ovpn: Result<Vec<Cipher>, Reason>,
    per_cpu: bool,
}

impl Worker {
    /// Removes the leftovers of an earlier run that was killed or stopped: SAs whose keys are lost, and their
    /// policies. Kept sockets belong to the data channel's device until it is gone.
    pub(super) async fn remove_leftovers(&self) {
        match self.kernel.remove_device(DATA_CHANNEL_DEVICE).await {
            Ok(true) => tracing::info!("removed the data channel that an earlier run left"),
            Ok(false) => {}
            Err(error) => tracing::warn!(%error, "an earlier run's data channel may be left"),
        }
        let Ok(xfrm) = Xfrm::open() else { return };
        match xfrm.remove_own().await {
            Ok(removed) if removed.states + removed.policies > 0 => tracing::info!(
                states = removed.states,
                policies = removed.policies,
                "removed what an earlier run left in the kernel"
            ),
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "an earlier run's IPsec states may be left"),
        }
    }

    /// Takes IPsec into use if the kernel has all of it, and reports the support.
    pub(super) async fn look_for_support(&mut self) {
        self.next_support = Instant::now() + Duration::from_millis(SUPPORT_MS);
        let support = match self.config.moves {
            false => Support::Forbidden,
            true => match self.open_ipsec().await {
                Ok((ipsec, support)) => {
                    self.ipsec = Some(ipsec);
                    support
                }
                Err(support) => support,
            },
        };
        if support != Support::Guarding {
            self.close_once().await;
        }
        self.tell_support(support);
    }

    /// Removes the leftovers of an earlier run or a failed attempt, once and not at every look.
    async fn close_once(&mut self) {
        if self.ipsec.is_none() && !self.closed {
            self.close_overlay().await;
            self.release_sockets().await;
            self.closed = true;
        }
    }

    /// Without the guard nothing may be moved by the kernel.
    pub(super) async fn handle_filters(&mut self, told: Told) {
        match told {
            Told::Stands(_) if self.ipsec.is_none() => self.look_for_support().await,
            Told::Stands(_) => {}
            Told::Restored => self.counters.guard_restored += 1,
            Told::Broken(error) if self.ipsec.is_some() => {
                self.withdraw(Support::no_guard(&error)).await;
            }
            Told::Broken(error) => {
                self.close_once().await;
                self.tell_support(Support::no_guard(&error));
            }
        }
    }

    /// At the start, the guard mostly stands within a moment; wait for it, so that peers see no change.
    pub(super) async fn wait_for_guard(&mut self) {
        let limit = Duration::from_millis(GUARD_WAIT_MS);
        let waits = *self.support.borrow() == Support::Guarding;
        if waits && let Ok(told) = tokio::time::timeout(limit, self.filters.next()).await {
            self.handle_filters(told).await;
        }
    }

    /// Whether to look again from time to time: the kernel engine is not in use, or the preferred one of the
    /// wanted formats is missing.
    pub(super) fn lacks_support(&self) -> bool {
        let lacks = match &*self.support.borrow() {
            Support::Ready { esp, .. } if self.config.esp => esp.is_err(),
            Support::Ready { ovpn, .. } => self.config.ovpn && ovpn.is_err(),
            _ => false,
        };
        lacks || self.ipsec.is_none()
    }

    /// Looks whether the kernel has more formats than it had. That it has less is found where it fails.
    pub(super) async fn look_for_formats(&mut self) {
        self.next_support = Instant::now() + Duration::from_millis(SUPPORT_MS);
        let Ok(xfrm) = Xfrm::open() else { return };
        if let Ok(formats) = self.formats(&xfrm).await {
            let support = self.take_into_use(formats);
            self.tell_support(support);
        }
    }

    fn take_into_use(&mut self, Formats { esp, ovpn, per_cpu }: Formats) -> Support {
        self.state.set_per_cpu(per_cpu);
        let lanes_max = if per_cpu { 1 + online_cpus().min(CPU_LANES_MAX) } else { 1 };
        Support::Ready { esp, ovpn, lanes_max }
    }

    async fn open_ipsec(&mut self) -> Result<(Ipsec, Support), Support> {
        let xfrm = Xfrm::open().map_err(|error| match self.config.esp {
            true => failed(error),
            false => Support::NoOvpn(Reason::EngineError(error.to_string())),
        })?;
        // Take kept sockets first: they hold ports that the look for formats tries.
        let kept = self.take_kept_sockets().await;
        let formats = self.formats(&xfrm).await?;
        // Nothing of the overlay may be there without the guard.
        if !self.filters.guard_stands(&self.trusted) {
            return Err(Support::Guarding);
        }
        self.closed = false;
        xfrm.set_entry_policies(&entry_policies(&self.trusted)).await.map_err(failed)?;
        let devices = self.switch.open_overlay().await.map_err(failed)?;
        let watch = xfrm.watch().map_err(failed)?;
        let encapsulation = self.open_encapsulation(kept).await;
        let encapsulation = encapsulation.map_err(|error| Support::Failed(error.to_string()))?;
        let probes =
            Probes::open(&self.config.local, self.config.host, &devices).map_err(failed)?;
        self.keep_sockets(&encapsulation).await;
        let support = self.take_into_use(formats);
        Ok((Ipsec { xfrm, watch, encapsulation, probes }, support))
    }

    /// Returns the formats that the kernel supports and the configuration wants; fails if there is none.
    async fn formats(&mut self, xfrm: &Xfrm) -> Result<Formats, Support> {
        let esp = match self.config.esp {
            true => Some(xfrm.support().await),
            false => None,
        };
        let ovpn = self.channel_support().await;
        match (esp, ovpn) {
            (Some(Err(error)), Err(_)) if !self.config.plain => Err(failed(error)),
            (None, Err(reason)) if !self.config.plain => Err(match self.config.ovpn {
                true => Support::NoOvpn(reason),
                false => Support::Forbidden,
            }),
            (esp, ovpn) => {
                let per_cpu = matches!(&esp, Some(Ok(esp)) if esp.per_cpu);
                let esp = match esp {
                    Some(found) => found.map(|esp| esp.ciphers).map_err(why_no_esp),
                    None => Err(Reason::Forced),
                };
                Ok(Formats { esp, ovpn, per_cpu })
            }
        }
    }

    fn tell_support(&self, support: Support) {
        self.support.send_if_modified(|present| {
            // It is tried again, for the same reason, until it succeeds.
            let again = support == Support::Guarding
                && matches!(present, Support::NoNft | Support::NoGuard(_));
            let changed = *present != support && !again;
            if changed {
                tracing::info!(?support, "kernel engine");
                *present = support;
            }
            changed
        });
    }

    /// The kernel must move nothing any more, for this reason.
    pub(super) async fn withdraw(&mut self, support: Support) {
        // An ODP tunnel exists without the guard, and frames led to it would find another route.
        if let Err(error) = self.switch.set_peers(&self.state.led_to_kernel()).await {
            tracing::warn!(%error, "cannot remove forwarding entries");
        }
        if let Some(ipsec) = self.ipsec.take() {
            self.state.states_lost();
            if let Err(error) = ipsec.xfrm.remove_own().await {
                tracing::warn!(%error, "IPsec states may be left");
            }
        }
        self.release_sockets().await;
        self.close_overlay().await;
        self.next_support = Instant::now() + Duration::from_millis(SUPPORT_MS);
        self.tell_support(support);
    }

    /// Removes the devices first: with all of them gone there is nothing left to guard.
    async fn close_overlay(&mut self) {
        let channel_gone = self.close_channel().await;
        match self.switch.close_overlay().await {
            Ok(true) if channel_gone => self.filters.remove_guard(),
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot remove the kernel engine's devices; the guard stays");
            }
        }
    }

    /// Recreates devices that another program removed, and writes their entries again.
    pub(super) async fn restore_devices(&mut self) {
        // The overlay's devices are plugged into the local switch.
        if let Err(error) = self.switch.ensure_local().await {
            tracing::warn!(%error, "cannot create the local switch again");
        }
        if self.ipsec.is_some() {
            match self.switch.open_overlay().await {
                Ok(devices) => {
                    if let Some(ipsec) = &mut self.ipsec
                        && let Err(error) = ipsec.probes.reopen(&devices)
                    {
                        tracing::warn!(%error, "cannot receive probes");
                    }
                }
                Err(error) => return self.withdraw(Support::Failed(error.to_string())).await,
            }
        }
        if let Err(error) = self.switch.resync().await {
            tracing::warn!(%error, "cannot restore the switch");
        }
    }

    /// Checks everything in the kernel and repairs differences.
    pub(super) async fn reconcile(&mut self) {
        self.next_reconcile = Instant::now() + Duration::from_millis(RECONCILE_MS);
        self.filters.look();
        self.restore_devices().await;
        self.reconcile_xfrm().await;
        self.reconcile_channel().await;
    }

    /// Compares SAs and policies with their wanted state. A missing SA cannot be restored, since its sequence
    /// numbers would begin again; its path is replaced.
    pub(super) async fn reconcile_xfrm(&mut self) {
        let Some(ipsec) = &self.ipsec else { return };
        let (states, policies) =
            match (ipsec.xfrm.own_states().await, ipsec.xfrm.own_policies().await) {
                (Ok(states), Ok(policies)) => (states, policies),
                (Err(error), _) | (_, Err(error)) => {
                    return tracing::warn!(%error, "cannot list IPsec states and policies");
                }
            };
        let present: BTreeSet<StateId> = states.iter().map(|state| state.id).collect();
        let wanted: BTreeMap<StateId, _> = self.state.states().collect();
        let missing: BTreeSet<_> =
            wanted.iter().filter(|(id, _)| !present.contains(id)).map(|(_, path)| *path).collect();
        let retired: BTreeSet<StateId> = self.retired.iter().map(|(_, id)| *id).collect();
        let is_left = |id: &&StateId| !wanted.contains_key(id) && !retired.contains(id);
        let left: Vec<StateId> = present.iter().filter(is_left).copied().collect();
        let wanted: BTreeMap<PolicyId, PolicySpec> =
            self.state.policies().map(|policy| (policy.id, *policy)).collect();
        let differs = |policy: &&PolicySpec| !policies.contains(policy);
        let to_set: Vec<_> = wanted.values().filter(differs).copied().collect();
        let gone = policies.iter().map(|policy| policy.id).filter(|id| !wanted.contains_key(id));
        let gone: Vec<PolicyId> = gone.collect();
        for path in missing {
            self.path_failed(path, "its IPsec state is gone");
        }
        self.counters.policies_restored += to_set.len() as u64;
        self.set_policies(to_set).await;
        self.remove_policies(gone).await;
        self.remove_states(&left).await;
        self.ensure_entries().await;
    }

    /// Leaves nothing in the kernel but the local switch.
    pub(super) async fn stop(mut self) {
        self.withdraw(Support::Forbidden).await;
        self.filters.clamp(Vec::new());
        match self.switch.stop().await {
            Ok(()) => self.filters.remove_guard(),
            Err(error) => tracing::warn!(%error, "cannot remove the switch; the guard stays"),
        }
        self.filters.finish().await;
    }

    pub(super) async fn count(&self) -> KernelCounters {
        let guard = self.ipsec.as_ref().and_then(|_| self.filters.reader().last());
        let (guard, guard_age) = guard.unzip();
        let counters = &self.counters;
        let mut named = vec![
            ("states_added", counters.states_added),
            ("states_refused", counters.states_refused),
            ("policies_set", counters.policies_set),
            ("policies_restored", counters.policies_restored),
            ("probes_sent", counters.probes_sent),
            ("probes_too_long", counters.probes_too_long),
            ("probes_refused", counters.probes_refused),
            ("probes_received", counters.probes_received),
            ("probes_unknown", counters.probes_unknown),
            ("paths_unheard", counters.paths_unheard),
            ("devices_restored", counters.devices_restored),
            ("guard_restored", counters.guard_restored),
        ];
        named.extend(guard.map(|it| ("foreign_source", it.foreign_source.packets)));
        let groups = self.filters.reader().groups();
        named.push(("broadcasts_limited", groups.limited));
        named.push(("bridge_reports_kept", groups.reports));
        named.extend(counters.channel.named());
        named.extend(self.switch.counters().await);
        let switch_reason = self.switch_reason.clone();
        KernelCounters { guard, guard_age, switch: self.switch.kind(), switch_reason, named }
    }
}

/// How packets to the overlay's ports may come in. They are opened by a state of ours, come in plain from
/// trusted peers, or come from addresses of the data channel. For the last, the guard ensures that they came
/// out of its device.
pub(super) fn entry_policies(trusted: &BTreeSet<IpAddr>) -> Vec<EntryPolicy> {
    let (tunnel, bits) = weft_crypto::TUNNEL_PREFIX;
    let any: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    let peer = |address: &IpAddr| (*address, if address.is_ipv4() { 32 } else { 128 }, true);
    let networks = any.map(|any| (any, 0, false)).into_iter().chain([(tunnel.into(), bits, true)]);
    let networks: Vec<_> = networks.chain(trusted.iter().map(peer)).collect();
    let of = |port| {
        let entry = move |&(source, prefix, plain)| EntryPolicy { source, prefix, port, plain };
        networks.iter().map(entry)
    };
    GUARDED_PORTS.into_iter().flat_map(of).collect()
}

/// Maps an error to the support state of the whole engine.
fn failed(error: KernelError) -> Support {
    match error {
        KernelError::NoVxlan { .. } => Support::NoVxlan,
        KernelError::NoXfrm | KernelError::NoEsp { .. } => Support::NoEsp(error.to_string()),
        KernelError::NoCipher { .. } => Support::NoCipher,
        error => Support::Failed(error.to_string()),
    }
}

/// Maps an error to the reason that format `esp` is missing.
fn why_no_esp(error: KernelError) -> Reason {
    match failed(error) {
        Support::NoCipher => Reason::CipherMissing,
        Support::Failed(text) => Reason::EngineError(text),
        _ => Reason::KernelWithoutEsp,
    }
}

/// The number of CPUs up to the highest online one. Packets leave from any of them, regardless of this
/// process's affinity. A CPU without a dedicated lane uses the common lane.
fn online_cpus() -> u16 {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    highest(&list).map_or(1, |highest| highest.saturating_add(1))
}

/// The last number of a list such as `0-3,6`.
fn highest(list: &str) -> Option<u16> {
    list.trim().rsplit([',', '-']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_counted_up_to_the_last() {
        assert_eq!(highest("0\n"), Some(0));
        assert_eq!(highest("0-3\n"), Some(3));
        assert_eq!(highest("0-3,6\n"), Some(6));
        assert_eq!(highest(""), None);
        let usable = std::thread::available_parallelism().map_or(1, usize::from);
        assert!(usize::from(online_cpus()) >= usable);
    }
}
