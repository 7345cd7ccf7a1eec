//! The task that runs a switch: it takes upcalls, commands and notices one by one.
//!
//! One task owns the tables and alone adds flows, so no change of the tables can slip in between a decision
//! and its flow.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    time::Duration,
};

use rustix::io::Errno;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior, interval},
};
use weft_path::{Mac, Vni};

use super::{
    api::{Command, OdpEdit, OdpEvent, OdpProbe, OdpSpec},
    codec_flow::{FlowEntry, Put, delete_flow, dump_flows, flow_entry, put_flow},
    codec_packet::{Upcall, execute, upcall},
    codec_port::{CMD_DEL, PORT_INTERNAL, datapath, get_datapath, vport},
    counters::{OdpAudit, OdpCounters},
    decide::{Decision, Verdict, decide},
    drops::OdpDrop,
    flow::{Frame, Output},
    index::{Edit, Index},
    limits::Bucket,
    ports,
    socket::{Sweep, Upcalls, join, open_notices, open_requests},
    state::{Core, Queues},
    tables::{Change, PortKind, Tables},
};
use crate::{
    error::KernelError,
    handle::Kernel,
    netlink::{error::RequestError, generic, notices::Notices, reader::messages, socket::Datagram},
};

/// How many frames to unknown destinations are sent everywhere, per second.
pub const FLOODS_PER_S_MAX: u64 = 1_000;
/// How many other frames without a flow the daemon sends on, per second.
pub const FLOWLESS_PER_S_MAX: u64 = 20_000;
/// How many received probes are handed on, per second: two a second from some thousand peers.
pub const PROBES_PER_S_MAX: u64 = 10_000;
/// How often the switch looks for the device of a missing port, in milliseconds.
pub const REPAIR_INTERVAL_MS: u64 = 1_000;
/// Copies of a frame in one request; with more, there is no flow and there are several requests.
const OUTPUTS_PER_EXECUTE_MAX: usize = 256;

/// A switch with its event sources.
pub(super) struct Worker {
    core: Core,
    commands: mpsc::Receiver<Command>,
    upcalls: Upcalls,
    notices: Notices,
    sweep: Sweep,
}

/// How the switch goes on after a command.
enum Next {
    Serve,
    /// The switch ends and replies afterwards, so that the caller can start the next one at once.
    Stop(Farewell),
}

type Farewell = Box<dyn FnOnce() + Send>;

/// Why a switch has ended.
enum End {
    Stopped(Farewell),
    Failed(String),
}

impl Worker {
    /// Opens the sockets in the network namespace of `kernel` and creates missing objects.
    pub(super) async fn start(
        kernel: &Kernel,
        spec: OdpSpec,
        queues: Queues,
    ) -> Result<Self, KernelError> {
        let open = || Ok((open_requests()?, Upcalls::open()?, open_notices()?, Sweep::open()?));
        let (mut requests, upcalls, notices, sweep) = kernel.at_home(open)?;
        let families = requests.families().await?;
        join(&notices, &families)?;
        let found = ports::open_datapath(kernel, &spec, &mut requests, &families).await?;
        let first = Vni(spec.vni);
        let mut tables = Tables::new(first);
        tables.pin(first, Mac(spec.mac), Some(&spec.name));
        let wanted = [
            (spec.name.clone(), PortKind::Local(first)),
            (spec.tap.clone(), PortKind::Tap(first)),
            (spec.tunnel.clone(), PortKind::Tunnel),
        ];
        let mut core = Core {
            kernel: kernel.clone(),
            spec,
            requests,
            families,
            datapath: found.index,
            tables,
            counters: OdpCounters::default(),
            wanted: wanted.into(),
            missing: BTreeMap::new(),
            index: Index::default(),
            metered: BTreeSet::new(),
            next_limit_look_ms: 0,
            unlimited: None,
            groups: queues.groups,
            events: queues.events,
            probes: queues.probes,
            suspect: false,
            lost_before: found.stats.lost,
            started: Instant::now(),
            floods: Bucket::new(FLOODS_PER_S_MAX, FLOODS_PER_S_MAX),
            flowless: Bucket::new(FLOWLESS_PER_S_MAX, FLOWLESS_PER_S_MAX),
            probe_bucket: Bucket::new(PROBES_PER_S_MAX, PROBES_PER_S_MAX),
        };
        core.reconcile().await?;
        Ok(Self { core, commands: queues.commands, upcalls, notices, sweep })
    }

    /// Serves until it is stopped or the datapath is gone.
    pub(super) async fn run(mut self, end: watch::Sender<Option<String>>) {
        match self.serve().await {
            End::Stopped(farewell) => {
                drop(self);
                farewell();
            }
            End::Failed(reason) => {
                tracing::error!(switch = %self.core.spec.name, %reason, "the ODP switch has ended");
                end.send_replace(Some(reason.clone()));
                self.core.event(OdpEvent::Failed { reason });
            }
        }
    }

    async fn serve(&mut self) -> End {
        let Self { core, commands, upcalls, notices, sweep } = self;
        let mut repair = interval(Duration::from_millis(REPAIR_INTERVAL_MS));
        repair.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut sweep_due = interval(core.spec.sweep_interval.max(Duration::from_millis(1)));
        sweep_due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                command = commands.recv() => {
                    let Some(command) = command else { return End::Stopped(Box::new(|| ())) };
                    if let Next::Stop(farewell) = core.command(command, sweep).await {
                        return End::Stopped(farewell);
                    }
                }
                received = upcalls.receive() => match received {
                    Ok(datagram) => core.upcalls(datagram).await,
                    Err(error) => core.overrun(&error),
                },
                received = notices.receive() => match received {
                    Ok(datagram) => core.notices(datagram).await,
                    Err(_) => core.look().await,
                },
                listed = sweep.receive() => core.swept(listed).await,
                _ = repair.tick() => {
                    if !core.missing.is_empty() {
                        core.look().await;
                    }
                    core.keep_limits(core.now_ms()).await;
                }
                _ = sweep_due.tick() => core.begin_sweep(sweep).await,
            }
            if core.suspect && !core.is_there().await {
                let name = &core.spec.name;
                let what = "was deleted, or the module openvswitch was unloaded";
                return End::Failed(format!("the datapath {name} {what}"));
            }
        }
    }
}

/// Commands.
impl Core {
    async fn command(&mut self, command: Command, sweep: &mut Sweep) -> Next {
        // A caller that no longer waits for its answer has no use for it.
        match command {
            Command::Edit(edits, reply) => _ = reply.send(self.edit(edits).await),
            Command::AddNetwork(vni, tap, reply) => {
                _ = reply.send(self.add_network(vni, &tap).await);
            }
            Command::RemoveNetwork(vni, reply) => _ = reply.send(self.remove_network(vni).await),
            Command::AddPort(vni, name, reply) => _ = reply.send(self.add_port(vni, &name).await),
            Command::RemovePort(name, reply) => _ = reply.send(self.remove_port(&name).await),
            Command::RetainPorts(names, reply) => _ = reply.send(self.retain_ports(&names).await),
            Command::Reconcile(reply) => _ = reply.send(self.reconcile_all().await),
            Command::Probe { remote, local, frame, reply } => {
                _ = reply.send(self.send_probe(remote, local, &frame).await);
            }
            Command::Counters(reply) => _ = reply.send(self.read_counters().await),
            Command::Audit(reply) => _ = reply.send(self.audit().await),
            Command::Sweep(reply) => {
                self.begin_sweep(sweep).await;
                let _ = reply.send(Ok(()));
            }
            Command::Stop(reply) => return Next::Stop(Box::new(|| _ = reply.send(Ok(())))),
            Command::Remove(reply) => {
                let (name, tunnel) = (&self.spec.name, &self.spec.tunnel);
                match ports::remove_datapath(&self.kernel, name, tunnel).await {
                    Ok(count) => return Next::Stop(Box::new(move || _ = reply.send(Ok(count)))),
                    Err(error) => _ = reply.send(Err(error)),
                }
            }
        }
        Next::Serve
    }

    /// Makes all edits that are possible; the first that is not gives the error.
    async fn edit(&mut self, edits: Vec<OdpEdit>) -> Result<(), KernelError> {
        let mut done = Ok(());
        for edit in edits {
            let this = self.edit_one(edit);
            done = done.and(this);
        }
        self.refresh().await;
        done
    }

    fn edit_one(&mut self, edit: OdpEdit) -> Result<(), KernelError> {
        match edit {
            OdpEdit::Peer(peer, via) => self.tables.set_peer(peer, via),
            OdpEdit::Sources(peer, sources) => self.tables.set_sources(peer, &sources),
            OdpEdit::RemovePeer(peer) => self.tables.remove_peer(peer),
            OdpEdit::Endpoint(vni, mac, peer) => {
                self.tables.set_remote(self.network(vni)?, mac, Some(peer));
            }
            OdpEdit::RemoveEndpoint(vni, mac) => {
                self.tables.set_remote(self.network(vni)?, mac, None);
            }
            OdpEdit::Broadcast(vni, peers) => {
                self.tables.set_receivers(self.network(vni)?, peers);
            }
            OdpEdit::Local(vni, mac, port) => {
                self.tables.pin(self.network(vni)?, mac, Some(&port));
            }
            OdpEdit::RemoveLocal(vni, mac) => self.tables.pin(self.network(vni)?, mac, None),
            OdpEdit::Lock(port, lock) => self.tables.set_lock(&port, lock)?,
            OdpEdit::Unlock(port) => self.tables.remove_lock(&port),
        }
        Ok(())
    }

    async fn send_probe(
        &mut self,
        remote: IpAddr,
        local: Option<IpAddr>,
        frame: &[u8],
    ) -> Result<(), KernelError> {
        let missing = || KernelError::LinkMissing { name: self.spec.tunnel.clone() };
        let port = self.tables.tunnel().ok_or_else(missing)?;
        let output = Output::Tunnel { port, id: u64::from(Vni::PROBE.0), remote, local };
        let (family, number) = (self.families.packet, self.datapath);
        let request = execute(family, number, PORT_INTERNAL, frame, None, &[output]);
        let sent = self.requests.run(request).await;
        self.watch_for_end(&sent);
        sent.map_err(|error| error.while_doing(format!("send a probe to {remote}")))?;
        self.counters.probes_sent += 1;
        Ok(())
    }

    async fn read_counters(&mut self) -> Result<OdpCounters, KernelError> {
        let request = get_datapath(self.families.datapath, &self.spec.name);
        let found = self.requests.run(request).await;
        self.watch_for_end(&found);
        let found = found.map_err(|error| error.while_doing("read the datapath's counters"))?;
        let stats = found.first().and_then(|body| datapath(body)).unwrap_or_default().stats;
        let mut counters = self.counters.clone();
        counters.upcalls_lost = stats.lost.saturating_sub(self.lost_before);
        counters.hits = stats.hits;
        counters.misses = stats.misses;
        counters.flows = stats.flows;
        counters.groups_limited = self.tables.limits().limited();
        counters.macs_learned = self.tables.learned_len() as u64;
        Ok(counters)
    }

    async fn audit(&mut self) -> Result<OdpAudit, KernelError> {
        let request = dump_flows(self.families.flow, self.datapath, true);
        let found = self.requests.dump(request).await;
        self.watch_for_end(&found);
        let found = found.map_err(|error| error.while_doing("list the datapath's flows"))?;
        let mut expected = self.index.expected();
        let mut audit = OdpAudit { flows: found.len(), ..OdpAudit::default() };
        for entry in found.iter().filter_map(|body| flow_entry(body)) {
            match entry.id.and_then(|id| expected.remove(&id)) {
                None => audit.unknown += 1,
                Some(outputs) if entry.outputs.as_ref() != Some(&outputs) => audit.differing += 1,
                Some(_) => {}
            }
        }
        audit.missing = expected.len();
        audit.outdated = self.index.outdated(&self.tables);
        Ok(audit)
    }
}

/// Frames.
impl Core {
    async fn upcalls(&mut self, datagram: &[u8]) {
        for message in messages(datagram) {
            if let Some(upcall) = upcall(self.families.packet, &message)
                && upcall.datapath == self.datapath
            {
                self.upcall(&upcall).await;
            }
        }
    }

    async fn upcall(&mut self, upcall: &Upcall<'_>) {
        let (frame, now_ms) = (upcall.frame, self.now_ms());
        self.counters.upcalls += 1;
        let local = matches!(self.tables.port_kind(frame.port), Some(PortKind::Local(_)));
        if local {
            self.tables.learn(frame.source, frame.port, now_ms);
            self.refresh().await;
        }
        let decision = decide(&self.tables, &frame);
        self.note_metered(&frame, &decision);
        let has_flow = self.admit(&frame, &decision, local, now_ms).await;
        let outputs = match &decision.verdict {
            Verdict::Drop(reason) => return self.count_drops(*reason, 1),
            Verdict::Probe(remote) => return self.deliver(*remote, upcall.packet, now_ms),
            Verdict::Forward(outputs) => {
                if !has_flow && !self.flowless.take(now_ms) {
                    self.counters.limited += 1;
                    return;
                }
                outputs
            }
            Verdict::Keep(outputs) => {
                self.counters.reports_kept += 1;
                outputs
            }
            Verdict::Flood(outputs) => {
                if !self.floods.take(now_ms) {
                    self.counters.limited += 1;
                    return;
                }
                self.counters.floods += 1;
                outputs
            }
        };
        self.execute(upcall, outputs).await;
    }

    /// Adds the decision's flow; false if there is none.
    async fn admit(
        &mut self,
        frame: &Frame,
        decision: &Decision,
        local: bool,
        now_ms: u64,
    ) -> bool {
        match self.index.admit(frame, decision, local, now_ms) {
            Ok(Some(edit)) => {
                self.counters.flows_put += 1;
                self.change(edit).await
            }
            Ok(None) => decision.flow.is_some(),
            Err(_) => {
                self.counters.flows_refused += 1;
                false
            }
        }
    }

    async fn execute(&mut self, upcall: &Upcall<'_>, outputs: &[Output]) {
        let parts;
        let outputs = if outputs.len() > OUTPUTS_PER_EXECUTE_MAX {
            parts = self.limit_parts(&upcall.frame, outputs);
            &parts
        } else {
            outputs
        };
        for some in outputs.chunks(OUTPUTS_PER_EXECUTE_MAX) {
            let (family, port) = (self.families.packet, upcall.frame.port);
            let request = execute(family, self.datapath, port, upcall.packet, upcall.hash, some);
            let done = self.requests.run(request).await;
            self.watch_for_end(&done);
            match done {
                Ok(_) => self.counters.executed += 1,
                Err(error) => {
                    self.counters.execute_errors += 1;
                    tracing::debug!(?error, "the datapath refused a frame");
                }
            }
        }
    }

    fn deliver(&mut self, remote: IpAddr, packet: &[u8], now_ms: u64) {
        let probe = || OdpProbe { remote, frame: packet.to_vec() };
        if self.probe_bucket.take(now_ms) && self.probes.try_send(probe()).is_ok() {
            self.counters.probes_received += 1;
        } else {
            self.counters.probes_dropped += 1;
        }
    }

    fn overrun(&mut self, error: &io::Error) {
        // How many were lost, the datapath counts.
        self.counters.upcall_overruns += 1;
        tracing::debug!(%error, "upcalls were lost");
    }

    fn count_drops(&mut self, reason: OdpDrop, packets: u64) {
        *self.counters.drops.entry(reason).or_default() += packets;
    }
}

/// Flows.
impl Core {
    /// Brings the flows up to date with the tables.
    pub(super) async fn refresh(&mut self) {
        let changes = self.tables.take_changes();
        if changes.is_empty() {
            return;
        }
        for edit in self.index.refresh(&self.tables, &changes) {
            match edit {
                Edit::Put { .. } => self.counters.flows_changed += 1,
                Edit::Delete { .. } => self.counters.flows_deleted += 1,
            }
            self.change(edit).await;
        }
    }

    /// Changes one flow in the kernel. A flow that cannot be changed is deleted: no flow is better
    /// than an old one. False if there is no flow after it.
    async fn change(&mut self, edit: Edit) -> bool {
        let (family, number) = (self.families.flow, self.datapath);
        match edit {
            Edit::Put { id, key, outputs, replaces } => {
                let put = |put| put_flow(family, number, put, id, &key, &outputs);
                let first = if replaces { Put::Set } else { Put::New };
                let mut done = self.requests.run(put(first)).await;
                if replaces && done.as_ref().is_err_and(|error| error.is(Errno::NOENT)) {
                    // Another program deleted it.
                    done = self.requests.run(put(Put::New)).await;
                }
                self.watch_for_end(&done);
                let Err(error) = done else { return true };
                tracing::warn!(?error, ?key, "the datapath refused a flow");
                self.counters.flow_errors += 1;
                self.index.forget(id);
                if replaces {
                    let _ = self.requests.run(delete_flow(family, number, id)).await;
                }
                false
            }
            Edit::Delete { id } => {
                let done = self.requests.run(delete_flow(family, number, id)).await;
                self.watch_for_end(&done);
                match done {
                    Err(error) if !error.is(Errno::NOENT) => {
                        tracing::warn!(?error, "the datapath did not delete a flow");
                        self.counters.flow_errors += 1;
                    }
                    _ => {}
                }
                false
            }
        }
    }

    async fn begin_sweep(&mut self, sweep: &mut Sweep) {
        if sweep.is_running() {
            return;
        }
        self.index.begin_sweep();
        let request = dump_flows(self.families.flow, self.datapath, false);
        if let Err(error) = sweep.begin(request).await {
            let error = error.while_doing("list the flows");
            tracing::warn!(%error, "cannot list the datapath's flows");
        }
    }

    async fn swept(&mut self, listed: Result<Option<Vec<FlowEntry>>, RequestError>) {
        let entries = match listed {
            Ok(Some(entries)) => entries,
            Ok(None) => return,
            Err(error) => {
                let error = error.while_doing("list the flows");
                tracing::warn!(%error, "cannot list the datapath's flows");
                self.suspect = true;
                return;
            }
        };
        let swept = self.index.sweep(&entries);
        self.counters.flows_idle += swept.idle;
        self.counters.flows_vanished += swept.vanished;
        self.counters.reports_kept += swept.kept;
        for (reason, packets) in swept.dropped {
            self.count_drops(reason, packets);
        }
        for edit in swept.edits {
            self.change(edit).await;
        }
        let (now_ms, index) = (self.now_ms(), &self.index);
        self.tables.age(now_ms, |vni, mac| index.reads(Change::Mac(vni, mac)));
        self.refresh().await;
    }
}

/// Notices, and the end.
impl Core {
    async fn notices(&mut self, datagram: Datagram<'_>) {
        let mut news = false;
        for message in datagram.messages() {
            let Some((command, body)) = generic::command(&message) else { continue };
            if message.kind == self.families.datapath && command == CMD_DEL {
                self.suspect |= datapath(body).is_some_and(|found| found.index == self.datapath);
            }
            if message.kind == self.families.vport
                && let Some(vport) = vport(body).filter(|port| port.datapath == self.datapath)
            {
                let known = self.tables.port_number(&vport.name) == Some(vport.number);
                news |= known == (command == CMD_DEL);
            }
        }
        if news && !self.suspect {
            self.look().await;
        }
    }

    /// Reconciles the ports; a failure is logged and retried later.
    async fn look(&mut self) {
        if let Err(error) = self.reconcile().await {
            tracing::warn!(%error, "cannot reconcile the ports of the ODP switch");
        }
    }

    async fn is_there(&mut self) -> bool {
        self.suspect = false;
        let request = get_datapath(self.families.datapath, &self.spec.name);
        match self.requests.run(request).await {
            Ok(found) => {
                let found = found.first().and_then(|body| datapath(body));
                found.is_some_and(|found| found.index == self.datapath)
            }
            // The family itself is gone with the module.
            Err(error) => !(error.is(Errno::NODEV) || error.is(Errno::NOENT)),
        }
    }
}
