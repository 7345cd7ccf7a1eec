//! The flows that the kernel has, and those that a change concerns. Pure: changes to the kernel's table are
//! returned as [`Edit`]s.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::{
    codec_flow::{FlowEntry, FlowId},
    decide::{Decision, Verdict, decide},
    drops::OdpDrop,
    flow::{FlowKey, Frame, Output},
    tables::{Change, Tables},
};

/// The most flows of one switch. Frames beyond it go through the daemon, one by one.
pub const FLOWS_MAX: usize = 65_536;
/// The most flows for frames from one local port, so that one container cannot use up those of the others.
pub const FLOWS_PER_PORT_MAX: usize = 8_192;
/// The shortest time between two additions of the same flow, in milliseconds. Its first packets were already
/// queued as upcalls when it was added.
pub const PUT_AGAIN_AFTER_MS: u64 = 1_000;

/// A change to make in the kernel's table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Edit {
    /// Adds a flow, or replaces the actions of an existing one.
    Put { id: FlowId, key: FlowKey, outputs: Vec<Output>, replaces: bool },
    /// Deletes a flow.
    Delete { id: FlowId },
}

/// The action of a flow.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Effect {
    Forward(Vec<Output>),
    Keep(Vec<Output>),
    Drop(OdpDrop),
}

impl Effect {
    fn of(verdict: &Verdict) -> Option<Self> {
        match verdict {
            Verdict::Forward(outputs) => Some(Self::Forward(outputs.clone())),
            Verdict::Keep(outputs) => Some(Self::Keep(outputs.clone())),
            Verdict::Drop(reason) => Some(Self::Drop(*reason)),
            Verdict::Flood(_) | Verdict::Probe(_) => None,
        }
    }

    fn outputs(&self) -> &[Output] {
        match self {
            Self::Forward(outputs) | Self::Keep(outputs) => outputs,
            Self::Drop(_) => &[],
        }
    }
}

#[derive(Debug, Clone)]
struct Flow {
    key: FlowKey,
    /// The frame for which it was made; it is decided again when something changes.
    frame: Frame,
    effect: Effect,
    depends: Vec<Change>,
    put_ms: u64,
    /// The number of sweeps that had begun when it was made.
    born: u64,
    /// Its packets at the last sweep.
    packets: Option<u64>,
}

/// The flows of one switch.
#[derive(Debug, Clone, Default)]
pub(super) struct Index {
    flows: HashMap<FlowId, Flow>,
    by_key: HashMap<FlowKey, FlowId>,
    by_change: HashMap<Change, HashSet<FlowId>>,
    per_port: HashMap<u32, usize>,
    next: u64,
    sweeps: u64,
}

/// The result of a sweep.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Swept {
    pub(super) edits: Vec<Edit>,
    /// Flows deleted because nothing used them since the last sweep.
    pub(super) idle: u64,
    /// Flows that another program had deleted.
    pub(super) vanished: u64,
    /// Packets that flows dropped since the last sweep, by reason.
    pub(super) dropped: Vec<(OdpDrop, u64)>,
    /// Reports that flows kept from peers since then.
    pub(super) kept: u64,
}

impl Index {
    /// Notes the flow of a decision just made for `frame`. `Ok(None)`: it is there already.
    ///
    /// # Errors
    /// There are too many flows.
    pub(super) fn admit(
        &mut self,
        frame: &Frame,
        decision: &Decision,
        limited: bool,
        now_ms: u64,
    ) -> Result<Option<Edit>, TooMany> {
        let Some((key, effect)) = decision.flow.zip(Effect::of(&decision.verdict)) else {
            return Ok(None);
        };
        if let Some(id) = self.by_key.get(&key).copied() {
            // The kernel asks although the flow exists: the upcall was already queued, or another program
            // deleted the flow.
            let Some(flow) = self.flows.get_mut(&id) else { return Ok(None) };
            if flow.effect == effect && now_ms < flow.put_ms.saturating_add(PUT_AGAIN_AFTER_MS) {
                return Ok(None);
            }
            flow.put_ms = now_ms;
            flow.effect = effect;
            let outputs = flow.effect.outputs().to_vec();
            self.depend(id, decision.depends.clone());
            return Ok(Some(Edit::Put { id, key, outputs, replaces: true }));
        }
        let on_port = self.per_port.get(&key.port()).copied().unwrap_or_default();
        if self.flows.len() >= FLOWS_MAX || (limited && on_port >= FLOWS_PER_PORT_MAX) {
            return Err(TooMany);
        }
        self.next += 1;
        let id = FlowId(self.next);
        let outputs = effect.outputs().to_vec();
        let flow = Flow {
            key,
            frame: *frame,
            effect,
            depends: Vec::new(),
            put_ms: now_ms,
            born: self.sweeps,
            packets: None,
        };
        self.flows.insert(id, flow);
        self.by_key.insert(key, id);
        *self.per_port.entry(key.port()).or_default() += 1;
        self.depend(id, decision.depends.clone());
        Ok(Some(Edit::Put { id, key, outputs, replaces: false }))
    }

    /// Decides again the flows that read something that changed.
    pub(super) fn refresh(&mut self, tables: &Tables, changes: &BTreeSet<Change>) -> Vec<Edit> {
        let concerned = changes.iter().filter_map(|change| self.by_change.get(change)).flatten();
        let concerned: BTreeSet<FlowId> = concerned.copied().collect();
        let mut edits = Vec::new();
        for id in concerned {
            let Some(flow) = self.flows.get_mut(&id) else { continue };
            let decision = decide(tables, &flow.frame);
            match Effect::of(&decision.verdict) {
                Some(effect) if decision.flow == Some(flow.key) => {
                    let same = flow.effect.outputs() == effect.outputs();
                    flow.effect = effect;
                    let (key, outputs) = (flow.key, flow.effect.outputs().to_vec());
                    self.depend(id, decision.depends);
                    if !same {
                        edits.push(Edit::Put { id, key, outputs, replaces: true });
                    }
                }
                _ => {
                    self.forget(id);
                    edits.push(Edit::Delete { id });
                }
            }
        }
        edits
    }

    /// A sweep begins: the kernel's flows are being listed.
    pub(super) fn begin_sweep(&mut self) {
        self.sweeps += 1;
    }

    /// Compares the flows with the kernel's list. Deletes flows that carried nothing since the last sweep,
    /// and flows of ours that are not in the index.
    pub(super) fn sweep(&mut self, entries: &[FlowEntry]) -> Swept {
        let mut swept = Swept::default();
        let ours = |entry: &FlowEntry| entry.id.map(|id| (id, entry.packets));
        let listed: HashMap<FlowId, u64> = entries.iter().filter_map(ours).collect();
        for id in listed.keys().filter(|id| !self.flows.contains_key(id)) {
            swept.edits.push(Edit::Delete { id: *id });
        }
        let mut dropped: HashMap<OdpDrop, u64> = HashMap::new();
        let (mut idle, mut vanished) = (Vec::new(), Vec::new());
        for (id, flow) in &mut self.flows {
            let Some(packets) = listed.get(id).copied() else {
                if flow.born < self.sweeps {
                    vanished.push(*id);
                }
                continue;
            };
            let since = packets.saturating_sub(flow.packets.unwrap_or_default());
            match flow.effect {
                Effect::Drop(reason) => *dropped.entry(reason).or_default() += since,
                Effect::Keep(_) => swept.kept += since,
                Effect::Forward(_) => {}
            }
            if flow.packets.replace(packets) == Some(packets) {
                idle.push(*id);
            }
        }
        swept.idle = idle.len() as u64;
        swept.vanished = vanished.len() as u64;
        swept.dropped = dropped.into_iter().filter(|(_, packets)| *packets > 0).collect();
        for id in vanished {
            self.forget(id);
        }
        for id in idle {
            self.forget(id);
            swept.edits.push(Edit::Delete { id });
        }
        swept
    }

    /// Whether a flow read this entry.
    pub(super) fn reads(&self, change: Change) -> bool {
        self.by_change.contains_key(&change)
    }

    /// The flow is not in the kernel.
    pub(super) fn forget(&mut self, id: FlowId) {
        let Some(flow) = self.flows.remove(&id) else { return };
        self.by_key.remove(&flow.key);
        self.undepend(id, &flow.depends);
        if let Some(count) = self.per_port.get_mut(&flow.key.port()) {
            *count -= 1;
            if *count == 0 {
                self.per_port.remove(&flow.key.port());
            }
        }
    }

    /// The name and the actions of each flow, for comparison with the kernel's.
    pub(super) fn expected(&self) -> HashMap<FlowId, Vec<Output>> {
        let entry = |(id, flow): (&FlowId, &Flow)| (*id, flow.effect.outputs().to_vec());
        self.flows.iter().map(entry).collect()
    }

    /// How many flows differ from the current decision for their frame; always 0.
    pub(super) fn outdated(&self, tables: &Tables) -> usize {
        let outdated = |flow: &&Flow| {
            let decision = decide(tables, &flow.frame);
            decision.flow != Some(flow.key)
                || Effect::of(&decision.verdict).as_ref() != Some(&flow.effect)
        };
        self.flows.values().filter(outdated).count()
    }

    fn depend(&mut self, id: FlowId, depends: Vec<Change>) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let before = std::mem::replace(&mut flow.depends, depends.clone());
        self.undepend(id, &before);
        for change in depends {
            self.by_change.entry(change).or_default().insert(id);
        }
    }

    fn undepend(&mut self, id: FlowId, depends: &[Change]) {
        for change in depends {
            if let Some(ids) = self.by_change.get_mut(change) {
                ids.remove(&id);
                if ids.is_empty() {
                    self.by_change.remove(change);
                }
            }
        }
    }
}

/// There is no room for another flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooMany;
