//! The work of a host whose state cannot be saved: which outputs go on, and which wait until it can.
//!
//! Endpoints, members and connections go on in memory: the next link transmits them again. Results that a crash
//! would falsify wait or are refused: a given address, a range with a new owner. While a state is being written, news of
//! endpoints, members and names overtakes what waits for it.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use weft_crypto::PeerId;
use weft_packet::vxlan::Vni;

use super::{Change, Mesh, Output};
use crate::error::AddressError;
use crate::ledger::Holder;
use crate::limits::{HELD_OUTPUTS_MAX, SAVE_RETRY_FIRST_MS, SAVE_RETRY_MAX_MS};
use crate::message::{ClaimResult, Message};
use crate::state::State;

/// The progress of saving this host's state.
#[derive(Debug)]
pub(crate) struct Storage {
    /// The state on disk.
    durable: State,
    /// The state in the last [`Output::Persist`].
    saving: Option<State>,
    passing: Passing,
    failing: Option<Failing>,
}

/// The look for outputs that need not wait for the write under way.
#[derive(Debug, Default)]
struct Passing {
    /// Outputs at the head of the queue that wait.
    waiting: usize,
    /// Peers for whom a message waits that must come first: what this host holds, or all its endpoints.
    blocked: BTreeSet<PeerId>,
}

impl Passing {
    /// Whether this output may overtake those that wait.
    fn may_pass(&mut self, output: &Output) -> bool {
        match output {
            Output::Persist(_) | Output::Answer { .. } => false,
            Output::Changed(change) => !relies_on_state(change),
            Output::Send { peer, message } => {
                let plain = match message {
                    Message::On { message, .. } => message,
                    plain => plain,
                };
                match plain {
                    Message::Network { .. }
                    | Message::Networks { .. }
                    | Message::Endpoints { full: true, .. } => {
                        self.blocked.insert(*peer);
                        false
                    }
                    Message::Endpoints { .. }
                    | Message::EndpointsRequest
                    | Message::BarrierRequest { .. }
                    | Message::BarrierReply { .. }
                    | Message::Names { .. }
                    | Message::Members { .. }
                    | Message::Connections { .. } => !self.blocked.contains(peer),
                    _ => false,
                }
            }
            Output::BarrierPassed { .. }
            | Output::Dial { .. }
            | Output::Endpoints { .. }
            | Output::NetworkPeers { .. }
            | Output::Refuse { .. } => true,
        }
    }
}

/// Whether a crash before the state is saved would falsify a change.
const fn relies_on_state(change: &Change) -> bool {
    matches!(
        change,
        Change::Founded { .. }
            | Change::RangesFounded { .. }
            | Change::Joined { .. }
            | Change::RangesGiven { .. }
            | Change::RangesReceived { .. }
    )
}

/// The state cannot be saved now.
#[derive(Debug)]
struct Failing {
    why: String,
    retry_at: Instant,
    pause: Duration,
    /// Save the next change at once: the pause is over, or a user waits.
    due: bool,
    /// Outputs that depend on unsaved changes, at most [`HELD_OUTPUTS_MAX`].
    held: VecDeque<Output>,
}

impl Storage {
    pub(crate) fn new(durable: State) -> Self {
        Self { durable, saving: None, passing: Passing::default(), failing: None }
    }

    /// The reason why saving fails, if it does.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failing.as_ref().map(|failing| failing.why.as_str())
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        self.failing.as_ref().map(|failing| failing.retry_at)
    }

    /// Whether to save a change now. While saving fails, changes wait for the next retry.
    pub(crate) fn may_save(&mut self) -> bool {
        self.failing.as_mut().is_none_or(|failing| std::mem::take(&mut failing.due))
    }

    pub(crate) fn saving(&mut self, state: &State) {
        self.saving = Some(state.clone());
    }

    /// The queue of outputs has changed at its head.
    pub(crate) fn look_anew(&mut self) {
        self.passing = Passing::default();
    }

    /// A user waits for the result of a change: the next save is due at once.
    pub(crate) fn hurry(&mut self) {
        if let Some(failing) = &mut self.failing {
            failing.due = true;
        }
    }

    pub(crate) fn has_grant_of(&self, vni: Vni, to: PeerId, request: u64) -> bool {
        let grants = self.durable.ledger(vni).map(|ledger| ledger.open_grants(to));
        grants.is_some_and(|grants| grants.iter().any(|(known, _)| *known == request))
    }

    /// The generation on disk, where that may be older than the one in memory.
    pub(crate) fn generation(&self) -> Option<u64> {
        self.failing.as_ref().map(|_| self.durable.generation())
    }

    /// Keeps some of the outputs that wait.
    pub(crate) fn retain_held(&mut self, keep: impl Fn(&Output) -> bool) {
        if let Some(failing) = &mut self.failing {
            failing.held.retain(keep);
        }
    }

    fn hold(&mut self, output: Output) {
        if let Some(failing) = &mut self.failing
            && failing.held.len() < HELD_OUTPUTS_MAX
        {
            failing.held.push_back(output);
        }
    }
}

impl Mesh {
    /// How the saving of the last [`Output::Persist`] ended. After a failure the outputs go on, without those that
    /// only a saved state allows. Requests for new addresses are refused with `why`. The mesh asks again to save
    /// the state, with growing pauses, and at once for a user's request.
    pub fn handle_saved(&mut self, now: Instant, result: Result<(), String>) {
        match result {
            Ok(()) => {
                if let Some(saved) = self.storage.saving.take() {
                    self.storage.durable = saved;
                }
                if let Some(failing) = self.storage.failing.take() {
                    let mut later = std::mem::take(&mut self.outputs);
                    // The state of now is saved first, and has all of those that were to be saved after this one. Outputs
                    // of the meantime may stand before the state that they depend on.
                    let before = later.len();
                    later.retain(|output| !matches!(output, Output::Persist(_)));
                    self.dirty |= later.len() != before;
                    self.outputs = failing.held;
                    self.flush();
                    self.outputs.extend(later);
                    self.drive(now);
                }
            }
            Err(why) => {
                self.dirty = true;
                let before = self.storage.failing.take();
                let first = Duration::from_millis(SAVE_RETRY_FIRST_MS);
                let longest = Duration::from_millis(SAVE_RETRY_MAX_MS);
                let pause = before.as_ref().map_or(first, |b| (b.pause * 2).min(longest));
                let held = before.map(|before| before.held).unwrap_or_default();
                let retry_at = now + pause;
                self.storage.failing = Some(Failing { why, retry_at, pause, due: false, held });
            }
        }
    }

    /// While the state of the last [`Output::Persist`] is being written: returns the next output that does not rely on
    /// it. So a slow disk holds up no news of endpoints, members and names. The others wait for [`Self::poll_output`].
    pub fn poll_output_while_saving(&mut self) -> Option<Output> {
        let passing = &mut self.storage.passing;
        while let Some(output) = self.outputs.get(passing.waiting) {
            if passing.may_pass(output) {
                return self.outputs.remove(passing.waiting);
            }
            passing.waiting += 1;
        }
        None
    }

    /// Why this host's state cannot be saved, if so.
    pub fn save_failure(&self) -> Option<&str> {
        self.storage.failure()
    }

    pub(crate) fn drive_storage(&mut self, now: Instant) {
        if let Some(failing) = &mut self.storage.failing
            && failing.retry_at <= now
        {
            failing.due = true;
            // Until it is known how that ended.
            failing.retry_at = now + failing.pause;
        }
    }

    /// Returns an output that may go out now. Others wait for a saved state, or are undone and refused.
    pub(crate) fn sift(&mut self, output: Output) -> Option<Output> {
        let Some(why) = self.storage.failure().map(str::to_owned) else { return Some(output) };
        match output {
            Output::Answer { ticket, vni, result: Ok(nets) } => {
                let unsaved: Vec<IpNet> =
                    nets.iter().copied().filter(|net| !self.is_durable(vni, *net)).collect();
                if unsaved.is_empty() {
                    return Some(Output::Answer { ticket, vni, result: Ok(nets) });
                }
                unsaved.into_iter().for_each(|net| self.undo(vni, net));
                let result = Err(AddressError::NotSaved { why });
                Some(Output::Answer { ticket, vni, result })
            }
            Output::Send { peer, message } => self.sift_message(peer, message),
            Output::Changed(change) if relies_on_state(&change) => {
                self.storage.hold(Output::Changed(change));
                None
            }
            other => Some(other),
        }
    }

    /// A message that may go out now. A claim that could not be saved is taken back and refused.
    fn sift_message(&mut self, peer: PeerId, message: Message) -> Option<Output> {
        let (vni, plain) = match message {
            Message::On { vni, message } => (vni, *message),
            plain => (Vni::WEFT, plain),
        };
        if let Message::ClaimAnswer { id, address, result: ClaimResult::Given } = plain {
            let holder = |state: &State| {
                state.ledger(vni).and_then(|ledger| ledger.taken.get(&address)).cloned()
            };
            let now = holder(&self.state);
            // The peer may have given it back by now, and another may have it.
            let theirs = matches!(&now, Some(Holder::Peer { peer: it, .. }) if *it == peer);
            let saved = theirs && holder(&self.storage.durable) == now;
            if theirs
                && !saved
                && let Some(ledger) = self.state.ledger_mut(vni)
            {
                ledger.taken.remove(&address);
            }
            let result = if saved { ClaimResult::Given } else { ClaimResult::NotSaved };
            let message = Message::ClaimAnswer { id, address, result }.on(vni);
            return Some(Output::Send { peer, message });
        }
        let may = self.may_send((peer, vni), &plain);
        let output = Output::Send { peer, message: plain.on(vni) };
        if may {
            return Some(output);
        }
        self.storage.hold(output);
        None
    }

    /// Whether a message about a network stays true if this host restarts from the state on its disk.
    fn may_send(&self, (peer, vni): (PeerId, Vni), message: &Message) -> bool {
        let durable = &self.storage.durable;
        let ledger = durable.ledger(vni);
        match message {
            Message::Network { network } => durable.weft.network == Some(*network),
            Message::Ranges { announcement } if announcement.owner == self.config.local => {
                let local = self.config.local;
                ledger.and_then(|it| it.announcement(local)).as_ref() == Some(announcement)
            }
            Message::RangeRequest { request, .. } => {
                ledger.is_some_and(|it| it.has_issued(*request))
            }
            Message::RangeGrant { request, .. } => self.storage.has_grant_of(vni, peer, *request),
            Message::RangeAccepted { request } => {
                ledger.is_some_and(|it| it.has_grant(peer, *request))
            }
            Message::Generation { generation } => *generation <= durable.generation(),
            // A host that restarts without the founding would not know what it asked for.
            Message::Claim { .. } => {
                let ours = self.state.ledger(vni).and_then(|it| it.network);
                ours.is_some() && ledger.and_then(|it| it.network) == ours
            }
            Message::ClaimRelease { address } => {
                ledger.is_none_or(|it| !it.held.contains_key(address))
            }
            _ => true,
        }
    }

    fn is_durable(&self, vni: Vni, net: IpNet) -> bool {
        let (durable, state) = (&self.storage.durable, &self.state);
        let allocator = state.allocator(vni);
        match (self.slot_of(vni, net), allocator) {
            (Ok(Some(slot)), Some(allocator)) => {
                let given = |state: &State| {
                    let ledger = state.ledger(allocator)?;
                    Some((ledger.taken.get(&slot).cloned(), ledger.held.get(&slot).cloned()))
                };
                given(durable).is_some() && given(durable) == given(state)
            }
            _ => {
                let holder = |state: &State| {
                    state.outside(vni).and_then(|outside| outside.get(&net.addr())).cloned()
                };
                holder(durable) == holder(state)
            }
        }
    }

    /// Takes an address back that was given and could not be saved.
    fn undo(&mut self, vni: Vni, net: IpNet) {
        let (Ok(Some(slot)), Some(allocator)) = (self.slot_of(vni, net), self.state.allocator(vni))
        else {
            if let Some(outside) = self.state.outside_mut(vni) {
                outside.remove(&net.addr());
            }
            return;
        };
        let Some(ledger) = self.state.ledger_mut(allocator) else { return };
        if matches!(ledger.taken.get(&slot), Some(Holder::Local { .. })) {
            ledger.taken.remove(&slot);
        }
        if let Some(from) = ledger.held.get(&slot).map(|held| held.from) {
            self.give_back(allocator, slot, from);
        }
    }
}
