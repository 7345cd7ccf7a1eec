//! The kernel engine's task: one order, event or timer at a time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use weft_crypto::PeerId;
use weft_io::keylog::KeyLog;
use weft_path::{Endpoint, EngineCommand, EngineEvent, EngineKind, Mac, Vni};

use super::action::Action;
use super::carry_out::local_address;
use super::channel::Channel;
use super::filters::{Filters, Told};
use super::ledger::Ledger;
use super::lifecycle::entry_policies;
use super::probes::Received;
use super::state::State;
use super::switch::{Switch, SwitchEvent};
use super::unheard::Unheard;
use super::worker::{Counters, Events, Ipsec, RECONCILE_MS, Worker};
use super::{KernelEngineConfig, Order, Support, SwitchKind};
use crate::error::KernelError;
use crate::firewall::guard::Guard;
use crate::handle::Kernel;
use crate::net::attach::CONTAINER_MTU_MIN;
use crate::net::link_watch::LinkEvent;
use crate::ovpn::{DATA_CHANNEL_DEVICE, OvpnError, Watched};
use crate::switch::announcements::TooMany;
use crate::xfrm::{StateId, XfrmEvent};

/// How long to wait for further changes to devices of ours before repairing them together, in milliseconds.
const MEND_SETTLE_MS: u64 = 100;
/// The shortest time between two such mendings, in milliseconds: another program may change them again
/// and again.
const MEND_PAUSE_MS: u64 = 1_000;

impl Worker {
    /// Makes the switch ready and, where the kernel can, IPsec.
    pub(super) async fn start(
        kernel: Kernel,
        config: KernelEngineConfig,
        support: watch::Sender<Support>,
        events: Events,
    ) -> Result<Self, KernelError> {
        if config.switch == SwitchKind::Odp && config.moves {
            // Its tunnel is there from the start, and nothing of the overlay may be without the guard.
            Guard::new(kernel.clone(), &[]).ensure(&[]).await?;
        }
        let (switch, switch_reason) = Switch::start(&kernel, &config).await?;
        let links = kernel.watch().await?;
        let filters = Filters::start(switch.guard(&kernel), switch.mss_clamp()?, switch.limiter()?);
        let keylog = KeyLog::open(config.keylog.as_deref())
            .map_err(|source| KernelError::Socket { doing: "open the key log".into(), source })?;
        let now = Instant::now();
        let mut worker = Self {
            state: State::new(config.encapsulation_port, config.data_channel_port),
            kernel,
            config,
            events,
            support,
            switch,
            ipsec: None,
            channel: Channel::default(),
            links,
            trusted: BTreeSet::new(),
            holders: BTreeMap::new(),
            filters,
            retired: VecDeque::new(),
            closed: false,
            switch_reason,
            next_support: now,
            next_reconcile: now + Duration::from_millis(RECONCILE_MS),
            mend: (None, now),
            next_reading: now,
            counters: Counters::default(),
            ledger: Ledger::default(),
            unheard: Unheard::default(),
            keylog,
        };
        if worker.switch.kind() == SwitchKind::Bridge {
            worker.state.give_numbers();
        }
        worker.remove_leftovers().await;
        worker.look_for_support().await;
        worker.wait_for_guard().await;
        Ok(worker)
    }

    pub(super) const fn switch_kind(&self) -> SwitchKind {
        self.switch.kind()
    }

    /// Reads how many announcements the switch kept from other hosts.
    pub(super) fn announcements(&self) -> Option<TooMany> {
        self.switch.announcements()
    }

    pub(super) async fn run(mut self, mut orders: mpsc::Receiver<Order>) {
        loop {
            let timer = self.next_timeout();
            let event = tokio::select! {
                order = orders.recv() => match order {
                    Some(Order::Stop { done }) => {
                        self.stop().await;
                        let _ = done.send(());
                        return;
                    }
                    Some(order) => { self.handle_order(order).await; continue; }
                    None => return,
                },
                event = self.links.next() => Event::Link(event),
                event = Ipsec::next(self.ipsec.as_mut()) => event,
                event = self.channel.next() => Event::Channel(event),
                event = self.switch.next() => Event::Switch(event),
                told = self.filters.next() => Event::Filters(told),
                () = tokio::time::sleep_until(timer.into()) => Event::Timer,
            };
            self.handle_event(event).await;
        }
    }
}

/// Events besides orders.
enum Event {
    Link(Result<LinkEvent, KernelError>),
    Xfrm(Result<XfrmEvent, KernelError>),
    Filters(Told),
    Probes(std::io::Result<Received>),
    Channel(Result<Watched, OvpnError>),
    Switch(SwitchEvent),
    Timer,
}

impl Ipsec {
    async fn next(ipsec: Option<&mut Self>) -> Event {
        let Some(ipsec) = ipsec else { return std::future::pending().await };
        tokio::select! {
            event = ipsec.watch.next() => Event::Xfrm(event),
            received = ipsec.probes.receive() => Event::Probes(received),
        }
    }
}

impl Worker {
    async fn handle_order(&mut self, order: Order) {
        match order {
            Order::Apply { commands, done } => {
                self.apply(commands).await;
                let _ = done.send(());
            }
            Order::AddPort { vni, name, reply } => {
                let _ = reply.send(self.switch.add_port(vni, &name).await);
            }
            Order::LockPort { name, lock, reply } => {
                let _ = reply.send(self.switch.lock_port(&name, lock).await);
            }
            Order::LockCounts { reply } => {
                let _ = reply.send(self.switch.lock_counts().await);
            }
            Order::AddNetwork { network, reply } => {
                let _ = reply.send(self.switch.add_network(network).await);
            }
            Order::RemoveNetwork { vni, done } => {
                self.holders.retain(|(of, _), _| *of != vni);
                self.switch.remove_network(vni).await;
                self.clamp();
                let _ = done.send(());
            }
            Order::RemovePort { name, done } => {
                self.switch.remove_port(&name).await;
                let _ = done.send(());
            }
            Order::Repair { done } => {
                self.reconcile().await;
                let _ = done.send(());
            }
            Order::Counters { reply } => {
                let _ = reply.send(self.count().await);
            }
            Order::Traffic { reply } => {
                let _ = reply.send(self.traffic().await);
            }
            Order::Stop { .. } => {}
        }
    }

    async fn handle_event(&mut self, event: Event) {
        match event {
            Event::Link(Ok(LinkEvent::Removed { name })) if self.switch.needs(&name) => {
                tracing::warn!(name, "an interface of ours was removed; creating it again");
                self.counters.devices_restored += 1;
                self.restore_devices().await;
            }
            Event::Link(Ok(LinkEvent::Removed { name })) if name == DATA_CHANNEL_DEVICE => {
                self.handle_channel_removed().await;
            }
            Event::Link(Ok(
                LinkEvent::Down { name }
                | LinkEvent::Changed { name }
                | LinkEvent::MtuChanged { name, .. },
            )) if self.switch.has(&name) => {
                let settled = Instant::now() + Duration::from_millis(MEND_SETTLE_MS);
                self.mend.0.get_or_insert(settled.max(self.mend.1));
            }
            Event::Link(Ok(_)) => {}
            Event::Link(Err(error)) => {
                tracing::warn!(%error, "cannot watch interfaces; opening the watch again");
                if let Ok(links) = self.kernel.watch().await {
                    self.links = links;
                }
                self.reconcile().await;
            }
            Event::Xfrm(Ok(event)) => self.handle_xfrm(event).await,
            Event::Filters(told) => self.handle_filters(told).await,
            Event::Channel(event) => self.handle_channel(event).await,
            Event::Probes(Ok(received)) | Event::Switch(SwitchEvent::Probe(received)) => {
                self.handle_probe(&received);
            }
            // The clamp goes with the tunnel's device.
            Event::Switch(SwitchEvent::Changed) => self.filters.clamps_lost(),
            Event::Switch(SwitchEvent::Announced(vni, heard)) => {
                if let Err(error) = self.switch.handle_announcement(vni, &heard).await {
                    tracing::warn!(%error, "the bridge may answer for an address that has moved");
                }
            }
            Event::Switch(SwitchEvent::Failed(reason)) => {
                self.fail(&reason).await;
            }
            Event::Xfrm(Err(error)) => self.fail(&error.to_string()).await,
            Event::Probes(Err(error)) => {
                self.fail(&format!("cannot receive probes: {error}")).await;
            }
            Event::Timer => self.handle_timeout().await,
        }
    }

    fn next_timeout(&self) -> Instant {
        let retire = self.retired.front().map(|(at, _)| *at);
        let support = self.lacks_support().then_some(self.next_support);
        let channel = self.reading_due().into_iter().chain(self.channel.deletion_due());
        let timers = retire.into_iter().chain(support).chain(channel).chain(self.mend.0);
        let timers = timers.chain(self.listening_due());
        timers.fold(self.next_reconcile, Instant::min)
    }

    async fn handle_timeout(&mut self) {
        let now = Instant::now();
        let due = self.retired.partition_point(|(at, _)| *at <= now);
        let retired: Vec<StateId> = self.retired.drain(..due).map(|(_, id)| id).collect();
        self.remove_states(&retired).await;
        self.delete_leaving_peer().await;
        if self.lacks_support() && now >= self.next_support {
            match self.ipsec {
                None => self.look_for_support().await,
                Some(_) => self.look_for_formats().await,
            }
        }
        if self.reading_due().is_some_and(|at| now >= at) {
            self.read_channel().await;
        }
        if self.listening_due().is_some_and(|at| now >= at) {
            self.listen().await;
        }
        if self.mend.0.is_some_and(|at| now >= at) {
            self.mend = (None, now + Duration::from_millis(MEND_PAUSE_MS));
            self.mend_devices().await;
        }
        if now >= self.next_reconcile {
            self.reconcile().await;
        }
    }

    /// A device of the switch was changed: perhaps by us, and perhaps only its carrier.
    async fn mend_devices(&mut self) {
        let changes = self.kernel.changes();
        self.restore_devices().await;
        if self.kernel.changes() != changes {
            tracing::warn!("another program changed our devices; restored them");
            self.counters.devices_restored += 1;
        }
    }

    async fn apply(&mut self, commands: Vec<EngineCommand>) {
        let host = self.config.host;
        let mut pending = Vec::new();
        for command in commands {
            if let EngineCommand::SetEndpoints { vni, add, remove } = &command {
                self.carry_out(&mut pending).await;
                self.set_endpoints(*vni, add, remove).await;
                continue;
            }
            if let EngineCommand::SetBroadcast { vni, peers } = &command {
                self.carry_out(&mut pending).await;
                if let Err(error) = self.switch.set_broadcast(*vni, peers).await {
                    tracing::warn!(%error, "cannot write who gets broadcasts");
                }
                continue;
            }
            for action in self.state.apply(command, |remote| local_address(remote, host)) {
                let alone = matches!(action, Action::Probe(_));
                if alone {
                    self.carry_out(&mut pending).await;
                }
                pending.push(action);
            }
        }
        self.carry_out(&mut pending).await;
        self.clamp();
        let cut = !self.state.narrow(CONTAINER_MTU_MIN as u16).is_empty();
        if let Err(error) = self.switch.cut_outside(cut).await {
            tracing::warn!(%error, "IPv6 packets of up to 1280 bytes may be lost");
        }
    }

    async fn set_endpoints(&mut self, vni: Vni, add: &[(Endpoint, PeerId)], remove: &[Mac]) {
        let known = self.switch.set_senders(vni, add, remove).await;
        if let Err(error @ KernelError::NoNetwork { .. }) = known {
            return tracing::warn!(%error, "endpoints ignored");
        }
        self.note_senders(known);
        remove.iter().for_each(|mac| _ = self.holders.remove(&(vni, mac.0)));
        self.holders.extend(add.iter().map(|(endpoint, peer)| ((vni, endpoint.mac.0), *peer)));
        if let Err(error) = self.switch.set_endpoints(vni, add, remove).await {
            tracing::warn!(%error, "cannot write forwarding entries");
        }
    }

    /// Clamps TCP segment sizes for peers whose path is narrower than the containers' MTU. Other traffic
    /// learns the size from the kernel's ICMP errors.
    fn clamp(&self) {
        if self.ipsec.is_none() {
            return;
        }
        let narrow = self.state.narrow(self.config.mtu);
        // Two networks may have the same address; the narrower path counts for both.
        let mut wanted = BTreeMap::new();
        for ((_, mac), peer) in self.holders.iter().filter(|_| !narrow.is_empty()) {
            let Some(mtu) = narrow.get(peer).copied() else { continue };
            let least = wanted.entry(*mac).or_insert(mtu);
            *least = mtu.min(*least);
        }
        self.filters.clamp(wanted.into_iter().collect());
    }
}

impl Worker {
    async fn handle_xfrm(&mut self, event: XfrmEvent) {
        match event {
            XfrmEvent::Expired { state, hard } => {
                let spi = state.spi;
                let Some((path, true)) = self.state.path_of(spi) else { return };
                (self.events)(match hard {
                    false => EngineEvent::OutboundNearLimit { path, spi },
                    true => EngineEvent::OutboundExhausted { path, spi },
                });
            }
            XfrmEvent::RemoteMoved { state, remote } => {
                if let Some(path) = self.state.moved(state.spi, remote) {
                    (self.events)(EngineEvent::RemoteMoved { path, remote });
                }
            }
            XfrmEvent::StateRemoved { state } => {
                if let Some((path, _)) = self.state.path_of(state.spi) {
                    self.path_failed(path, "another program removed its IPsec state");
                }
            }
            XfrmEvent::StatesFlushed => {
                self.state.states_lost();
                self.fail("another program removed all IPsec states").await;
            }
            XfrmEvent::PolicyRemoved { .. } | XfrmEvent::PoliciesFlushed => {
                let wanted: Vec<_> = self.state.policies().copied().collect();
                self.counters.policies_restored += wanted.len() as u64;
                self.set_policies(wanted).await;
                self.ensure_entries().await;
            }
            XfrmEvent::EntryRemoved => self.ensure_entries().await,
            XfrmEvent::Lost => self.reconcile_xfrm().await,
        }
    }

    /// Reports that the kernel engine has lost the state of its paths. Path choice moves them and sends new
    /// offers.
    pub(super) async fn fail(&mut self, reason: &str) {
        tracing::warn!(reason, "the kernel engine has failed");
        let reason = reason.to_owned();
        (self.events)(EngineEvent::EngineFailed { engine: EngineKind::Kernel, reason });
        self.reconcile().await;
    }

    /// Brings the inbound policies in line with the trusted addresses. Without them, the guard alone checks
    /// inbound packets, and it suffices.
    pub(super) async fn ensure_entries(&mut self) {
        let Some(ipsec) = &self.ipsec else { return };
        match ipsec.xfrm.set_entry_policies(&entry_policies(&self.trusted)).await {
            Ok(changed) => self.counters.policies_restored += changed as u64,
            Err(error) => tracing::warn!(%error, "cannot restore an inbound IPsec policy"),
        }
    }
}
