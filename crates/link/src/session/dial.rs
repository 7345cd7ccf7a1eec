//! Keeps dialling one target until it is forgotten.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::time::sleep;
use weft_crypto::PeerId;

use super::{Outcome, connect};
use crate::error::{Cause, Failure};
use crate::limits::{ADDRESSES_MAX, BACKOFF_RESET_S, OTHER_KEY_PAUSE_MAX_S, Timing};
use crate::shared::{Dial, DialKey, Shared, State};
use crate::status::LinkState;
use crate::target::Target;

/// Starts to dial a target, or retries at once if it is dialled already.
pub(crate) fn start(shared: &Arc<Shared>, state: &mut State, target: Target) {
    let key = DialKey::Target(target.address());
    if let Some(dial) = state.dials.get_mut(&key) {
        dial.target = target;
        dial.kick.notify_one();
        return;
    }
    let dial = spawn(shared, &key, target, false);
    state.dials.insert(key, dial);
}

/// Starts to dial a peer at any of these addresses. If it is dialled already, new addresses are tried at once.
/// With `lost`, a link was lost, and the first attempt waits a little.
pub(crate) fn start_peer(
    shared: &Arc<Shared>,
    state: &mut State,
    peer: PeerId,
    mut addresses: Vec<SocketAddr>,
    lost: Option<&Failure>,
) {
    let key = DialKey::Peer(peer);
    addresses.truncate(ADDRESSES_MAX);
    let Some(first) = addresses.first().copied() else { return };
    if let Some(dial) = state.dials.get_mut(&key) {
        if dial.look_at(peer, addresses) {
            dial.kick.notify_one();
        }
        return;
    }
    let mut dial = spawn(shared, &key, Target::of_peer(peer, first), lost.is_some());
    (dial.addresses, dial.peer) = (addresses, Some(peer));
    if lost.is_some() {
        dial.change(LinkState::Retrying, lost, None, Instant::now(), &shared.events);
    }
    state.dials.insert(key, dial);
}

fn spawn(shared: &Arc<Shared>, key: &DialKey, target: Target, lost: bool) -> Dial {
    let kick = Arc::new(Notify::new());
    let dialler = Dialler {
        shared: shared.clone(),
        key: key.clone(),
        kick: kick.clone(),
        backoff: Backoff::new(&shared.timing),
    };
    let task = tokio::spawn(dialler.run(lost)).abort_handle();
    Dial::new(target, kick, task)
}

struct Dialler {
    shared: Arc<Shared>,
    key: DialKey,
    kick: Arc<Notify>,
    backoff: Backoff,
}

impl Dialler {
    async fn run(mut self, mut lost: bool) {
        loop {
            if lost {
                let wait = self.after_loss();
                self.pause(wait).await;
            }
            if let Some((peer, since)) = self.linked() {
                self.while_linked(peer).await;
                if since.elapsed() > Duration::from_secs(BACKOFF_RESET_S) {
                    self.backoff.reset();
                }
                lost = true;
                continue;
            }
            lost = false;
            let Some((target, addresses)) = self.target() else { return };
            self.set(LinkState::Connecting, None, None);
            let pending = || self.set(LinkState::Pending, None, None);
            match connect::attempt(&self.shared, &target, addresses, pending).await {
                Ok(Outcome::Up(peer) | Outcome::Duplicate(peer)) => {
                    self.met(peer);
                    if self.linked().is_none() {
                        lost = true;
                    }
                }
                Err(failure) => {
                    let wait = self.after_failure(&failure);
                    self.pause(wait).await;
                }
            }
        }
    }

    /// Waits, unless a kick requests an immediate attempt or the link comes up from the other side.
    async fn pause(&mut self, wait: Duration) {
        let mut changes = self.shared.changed.subscribe();
        let linked = async { while self.linked().is_none() && changes.changed().await.is_ok() {} };
        let kicked = tokio::select! {
            () = sleep(wait) => false,
            () = self.kick.notified() => true,
            () = linked => false,
        };
        if kicked {
            self.backoff.reset();
        }
    }

    async fn while_linked(&self, peer: PeerId) {
        let mut changes = self.shared.changed.subscribe();
        self.met(peer);
        self.set(LinkState::Established, None, None);
        while self.linked().is_some() && changes.changed().await.is_ok() {}
    }

    fn after_failure(&mut self, failure: &Failure) -> Duration {
        self.shared.tell_same_identity(failure);
        let (to, wait) = match failure.cause() {
            Cause::KeyMismatch => (LinkState::Failed, self.backoff.other_key()),
            _ if failure.is_refusal() => (LinkState::Failed, self.backoff.slow()),
            _ => (LinkState::Retrying, self.backoff.next()),
        };
        self.set(to, Some(failure), Some(wait));
        wait
    }

    /// The end of the link has already set the state and its reason.
    fn after_loss(&mut self) -> Duration {
        let mut state = self.shared.lock();
        let Some(dial) = state.dials.get_mut(&self.key) else { return Duration::ZERO };
        let wait = match dial.state {
            LinkState::Failed => self.backoff.slow(),
            _ => self.backoff.next(),
        };
        dial.next_try = Some(Instant::now() + wait);
        wait
    }

    fn linked(&self) -> Option<(PeerId, Instant)> {
        let state = self.shared.lock();
        let dial = state.dials.get(&self.key)?;
        if let Some(peer) = dial.peer {
            return state.links.get(&peer).map(|link| (peer, link.since));
        }
        let (peer, link) = state.links.iter().find(|(peer, _)| dial.is_for(**peer))?;
        Some((*peer, link.since))
    }

    fn met(&self, peer: PeerId) {
        if let Some(dial) = self.shared.lock().dials.get_mut(&self.key) {
            dial.peer = Some(peer);
        }
    }

    fn target(&self) -> Option<(Target, Vec<SocketAddr>)> {
        let state = self.shared.lock();
        state.dials.get(&self.key).map(|dial| (dial.target.clone(), dial.addresses.clone()))
    }

    fn set(&self, to: LinkState, failure: Option<&Failure>, wait: Option<Duration>) {
        self.shared.set_dial(&self.key, to, failure, wait);
    }
}

/// Pauses that grow by half each time, with jitter between half and one and a half of the value.
struct Backoff {
    first: Duration,
    max: Duration,
    present: Duration,
    /// The pause after an unexpected key.
    other_key: Duration,
}

impl Backoff {
    fn new(timing: &Timing) -> Self {
        let (first, max) = (timing.backoff_first, timing.backoff_max);
        Self { first, max, present: first, other_key: max }
    }

    fn next(&mut self) -> Duration {
        let wait = jitter(self.present).min(self.max);
        self.present = (self.present * 3 / 2).min(self.max);
        wait
    }

    fn slow(&mut self) -> Duration {
        jitter(self.max).min(self.max)
    }

    /// A reinstalled host hardly ever gets its old key back, so the pause grows.
    fn other_key(&mut self) -> Duration {
        let longest = Duration::from_secs(OTHER_KEY_PAUSE_MAX_S).max(self.max);
        let wait = jitter(self.other_key).min(longest);
        self.other_key = (self.other_key * 2).min(longest);
        wait
    }

    fn reset(&mut self) {
        (self.present, self.other_key) = (self.first, self.max);
    }
}

fn jitter(wait: Duration) -> Duration {
    wait.mul_f64(rand::random_range(0.5..1.5))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_maximum_and_begin_anew() {
        let timing = Timing::default();
        let mut backoff = Backoff::new(&timing);
        for _ in 0..100 {
            let first = backoff.next();
            assert!(first >= timing.backoff_first / 2 && first <= timing.backoff_first * 3 / 2);
            for _ in 0..30 {
                assert!(backoff.next() <= timing.backoff_max);
            }
            assert!(backoff.next() >= timing.backoff_max / 2);
            assert!(backoff.slow() >= timing.backoff_max / 2);
            let other_key: Vec<Duration> = (0..9).map(|_| backoff.other_key()).collect();
            assert!(other_key[0] <= timing.backoff_max * 3 / 2, "{other_key:?}");
            let longest = Duration::from_secs(OTHER_KEY_PAUSE_MAX_S);
            assert!(other_key[8] >= longest / 2 && other_key[8] <= longest, "{other_key:?}");
            backoff.reset();
        }
    }
}
