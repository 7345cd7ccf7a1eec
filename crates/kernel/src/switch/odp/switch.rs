//! The handle of a running ODP switch.

use std::net::IpAddr;

use tokio::sync::{mpsc, oneshot, watch};
use weft_crypto::PeerId;
use weft_path::Mac;

use super::{
    api::{Command, OdpEdit, OdpEvent, OdpProbe, OdpSpec, Reply},
    counters::{OdpAudit, OdpCounters},
    state::Queues,
    tables::Via,
    worker,
};
use crate::{
    error::KernelError,
    handle::Kernel,
    net::link::{check_mtu, check_name},
    switch::{groups::GroupCounts, port_lock::PortLock},
};

/// The most commands that wait for the switch; callers wait beyond it.
pub const COMMANDS_QUEUED_MAX: usize = 256;
/// The most received probes that wait for the daemon; more are dropped and counted.
pub const PROBES_QUEUED_MAX: usize = 1_024;
/// The most events that wait for the daemon; more are dropped and counted.
pub const EVENTS_QUEUED_MAX: usize = 256;
/// How often flows that nothing has used since the last time are deleted, in seconds, by default.
pub const SWEEP_INTERVAL_S: u64 = 30;
/// The shortest probe: an Ethernet header, in bytes.
const PROBE_LEN_MIN: usize = 14;
/// The longest probe in bytes: an IPv4 packet less the IP, UDP and VXLAN headers.
const PROBE_LEN_MAX: usize = 65_535 - 20 - 8 - 8;

/// Events and probes of a running switch.
#[derive(Debug)]
pub struct OdpInbox {
    /// Events. The channel closes when the switch ends.
    pub events: mpsc::Receiver<OdpEvent>,
    /// Probes received on the VXLAN network identifier of probes.
    pub probes: mpsc::Receiver<OdpProbe>,
}

/// A running ODP switch. Clones drive the same one. When the last is dropped the switch stops, and
/// datapath and flows stay as they are.
#[derive(Debug, Clone)]
pub struct OdpSwitch {
    name: String,
    commands: mpsc::Sender<Command>,
    /// Why the switch has ended, once it has.
    ended: watch::Receiver<Option<String>>,
    groups: watch::Receiver<GroupCounts>,
}

impl OdpSwitch {
    /// Makes the datapath with its devices, or takes over what an earlier run of ours left, even after `kill
    /// -9`. The ports stay. The old flows, which no daemon maintains, are deleted once. A bridge of ours
    /// under the name is deleted first.
    ///
    /// It works in the network namespace of `kernel`, as a task of the runtime.
    ///
    /// # Errors
    /// [`KernelError::OdpMissing`], [`KernelError::NameTaken`] if another program's device or datapath has
    /// the name, [`KernelError::SwitchTaken`], [`KernelError::UdpPortTaken`], [`KernelError::NotPermitted`],
    /// or the kernel's refusal.
    pub async fn start(kernel: &Kernel, spec: OdpSpec) -> Result<(Self, OdpInbox), KernelError> {
        for name in [&spec.name, &spec.tap, &spec.tunnel] {
            check_name(name)?;
        }
        check_mtu(spec.mtu)?;
        let (commands, command_queue) = mpsc::channel(COMMANDS_QUEUED_MAX);
        let (event_queue, events) = mpsc::channel(EVENTS_QUEUED_MAX);
        let (probe_queue, probes) = mpsc::channel(PROBES_QUEUED_MAX);
        let (end, ended) = watch::channel(None);
        let (counted, groups) = watch::channel(GroupCounts::default());
        let name = spec.name.clone();
        let queues = Queues {
            commands: command_queue,
            events: event_queue,
            probes: probe_queue,
            groups: counted,
        };
        let worker = worker::Worker::start(kernel, spec, queues).await?;
        tokio::spawn(worker.run(end));
        Ok((Self { name, commands, ended, groups }, OdpInbox { events, probes }))
    }

    /// Carries the network with this VXLAN network identifier from now on. Its TAP, the vector engine's device,
    /// becomes a port whenever it is there, and at once if it is there now. A network that the switch carries
    /// already goes on, with this TAP instead of an earlier one.
    ///
    /// # Errors
    /// [`KernelError::TableFull`] beyond [`NETWORKS_MAX`](super::NETWORKS_MAX) networks, and
    /// [`KernelError::NoNetwork`] for an identifier that no network can have. [`KernelError::PortTaken`] if the
    /// TAP is another port of this switch. After [`KernelError::LinkMissing`], `PortTaken` for another bridge
    /// or datapath, or the kernel's refusal, the network is there, and the switch keeps trying to add its TAP.
    /// [`KernelError::SwitchStopped`].
    pub async fn add_network(&self, vni: u32, tap: String) -> Result<(), KernelError> {
        check_name(&tap)?;
        self.ask(|reply| Command::AddNetwork(vni, tap, reply)).await
    }

    /// Removes a network. Its ports leave the datapath, and their devices stay; its endpoints, learned MACs and
    /// flows are forgotten. False if there was no such network, or if it is the first, which stays.
    ///
    /// # Errors
    /// [`KernelError::SwitchStopped`] or the kernel's refusal. The network is there then, without some of its
    /// ports.
    pub async fn remove_network(&self, vni: u32) -> Result<bool, KernelError> {
        self.ask(|reply| Command::RemoveNetwork(vni, reply)).await
    }

    /// Makes a network device a local port of a network, or does nothing if it already is one. A local port of
    /// another network moves.
    ///
    /// # Errors
    /// [`KernelError::NoNetwork`]; [`KernelError::LinkMissing`]; [`KernelError::PortTaken`] if it is in another
    /// bridge or datapath, or a TAP or the tunnel of this one; [`KernelError::SwitchStopped`]. After an error the
    /// switch does not keep a port that it did not have before.
    pub async fn add_port(&self, vni: u32, name: &str) -> Result<(), KernelError> {
        check_name(name)?;
        self.ask(|reply| Command::AddPort(vni, name.to_owned(), reply)).await
    }

    /// Removes a local port; its device stays, and the MACs fixed to it are forgotten. Its lock stays, for the port
    /// may come back. False if there was no such port.
    ///
    /// # Errors
    /// [`KernelError::SwitchStopped`] or the kernel's refusal.
    pub async fn remove_port(&self, name: &str) -> Result<bool, KernelError> {
        self.ask(|reply| Command::RemovePort(name.to_owned(), reply)).await
    }

    /// Removes the local ports of ours that are not in `names`, which an earlier run left. Ports that another
    /// program added stay. Returns the number of removed ports.
    ///
    /// # Errors
    /// [`KernelError::SwitchStopped`] or the kernel's refusal.
    pub async fn retain_ports(&self, names: &[String]) -> Result<usize, KernelError> {
        self.ask(|reply| Command::RetainPorts(names.to_vec(), reply)).await
    }

    /// Changes the switch's tables in one step. When it returns, every flow in the kernel follows the new
    /// tables; only flows that depend on the changed entries were touched.
    ///
    /// # Errors
    /// [`KernelError::NoNetwork`] if an edit names a network that the switch does not carry,
    /// [`KernelError::LockTooLong`] and [`KernelError::TableFull`] for locks beyond a limit; all other edits
    /// are made. [`KernelError::SwitchStopped`].
    pub async fn apply(&self, edits: Vec<OdpEdit>) -> Result<(), KernelError> {
        self.ask(|reply| Command::Edit(edits, reply)).await
    }

    /// How frames for a peer leave: [`OdpEdit::Peer`].
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub async fn set_peer(&self, peer: PeerId, via: Via) -> Result<(), KernelError> {
        self.apply(vec![OdpEdit::Peer(peer, via)]).await
    }

    /// Forgets a peer: [`OdpEdit::RemovePeer`].
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub async fn remove_peer(&self, peer: PeerId) -> Result<(), KernelError> {
        self.apply(vec![OdpEdit::RemovePeer(peer)]).await
    }

    /// Adds and removes endpoints of a network behind peers; first those that go, then those that come.
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub async fn set_endpoints(
        &self,
        vni: u32,
        add: &[(Mac, PeerId)],
        remove: &[Mac],
    ) -> Result<(), KernelError> {
        let gone = remove.iter().map(|mac| OdpEdit::RemoveEndpoint(vni, *mac));
        let come = add.iter().map(|(mac, peer)| OdpEdit::Endpoint(vni, *mac, *peer));
        self.apply(gone.chain(come).collect()).await
    }

    /// Fixes a MAC of a network to a local port: [`OdpEdit::Local`].
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub async fn set_local(&self, vni: u32, mac: Mac, port: &str) -> Result<(), KernelError> {
        self.apply(vec![OdpEdit::Local(vni, mac, port.to_owned())]).await
    }

    /// Lets a local port send from these addresses alone: [`OdpEdit::Lock`]. Set it before the port is added, so that
    /// no frame of another address gets through.
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub async fn lock_port(&self, port: &str, lock: PortLock) -> Result<(), KernelError> {
        check_name(port)?;
        self.apply(vec![OdpEdit::Lock(port.to_owned(), lock)]).await
    }

    /// Ends the lock of a port: [`OdpEdit::Unlock`].
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub async fn unlock_port(&self, port: &str) -> Result<(), KernelError> {
        self.apply(vec![OdpEdit::Unlock(port.to_owned())]).await
    }

    /// Sends an Ethernet frame to a host on the VXLAN network identifier of probes, through the same
    /// device, outer port and routing as data. `local` is the outer source address; the routing
    /// table's choice if `None`.
    ///
    /// # Errors
    /// [`KernelError::ProbeLength`], [`KernelError::LinkMissing`] while there is no tunnel port,
    /// [`KernelError::SwitchStopped`], or the kernel's refusal.
    pub async fn send_probe(
        &self,
        remote: IpAddr,
        local: Option<IpAddr>,
        frame: &[u8],
    ) -> Result<(), KernelError> {
        if !(PROBE_LEN_MIN..=PROBE_LEN_MAX).contains(&frame.len()) {
            let length = frame.len();
            return Err(KernelError::ProbeLength {
                length,
                min: PROBE_LEN_MIN,
                max: PROBE_LEN_MAX,
            });
        }
        let frame = frame.to_vec();
        self.ask(|reply| Command::Probe { remote, local, frame, reply }).await
    }

    /// Counts of group frames that did not go to peers, as of the last reading.
    #[must_use]
    pub fn groups(&self) -> watch::Receiver<GroupCounts> {
        self.groups.clone()
    }

    /// The counters.
    ///
    /// # Errors
    /// [`KernelError::SwitchStopped`] or the kernel's refusal.
    pub async fn counters(&self) -> Result<OdpCounters, KernelError> {
        self.ask(Command::Counters).await
    }

    /// Compares the kernel's flows with the tables. Costs a listing of all flows.
    ///
    /// # Errors
    /// [`KernelError::SwitchStopped`] or the kernel's refusal.
    pub async fn audit(&self) -> Result<OdpAudit, KernelError> {
        self.ask(Command::Audit).await
    }

    /// Checks devices and ports and repairs missing or changed ones. The switch does so itself after a notice
    /// of a change to a port; call it for changes to devices (down, MTU).
    ///
    /// # Errors
    /// [`KernelError::SwitchStopped`] or the kernel's refusal.
    pub async fn reconcile(&self) -> Result<(), KernelError> {
        self.ask(Command::Reconcile).await
    }

    /// Begins to look for flows that nothing has used since the last time, before the interval is
    /// over.
    ///
    /// # Errors
    /// [`KernelError::SwitchStopped`] or the kernel's refusal.
    pub async fn sweep(&self) -> Result<(), KernelError> {
        self.ask(Command::Sweep).await
    }

    /// Stops the switch. Datapath and flows stay, so that containers keep their connections until the next
    /// start.
    ///
    /// # Errors
    /// [`KernelError::SwitchStopped`] if it has stopped already.
    pub async fn stop(&self) -> Result<(), KernelError> {
        self.ask(Command::Stop).await
    }

    /// Stops the switch and deletes the datapath, the tunnel's device and every device of ours that was a
    /// port. Each container end goes with its host end. Returns how many devices it deleted. Devices of
    /// others only lose the datapath; the TAP is the vector engine's.
    ///
    /// # Errors
    /// [`KernelError::SwitchStopped`] or the kernel's refusal.
    pub async fn remove(&self) -> Result<usize, KernelError> {
        self.ask(Command::Remove).await
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, KernelError> {
        let (reply, answer) = oneshot::channel();
        if self.commands.send(command(reply)).await.is_err() {
            return Err(self.stopped());
        }
        answer.await.unwrap_or_else(|_| Err(self.stopped()))
    }

    fn stopped(&self) -> KernelError {
        let why = self.ended.borrow().clone().unwrap_or_else(|| "it was stopped".to_owned());
        KernelError::SwitchStopped { name: self.name.clone(), why }
    }
}
